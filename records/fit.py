#!/usr/bin/env python3
"""Print settings that make a run fit into device memory.

    python records/fit.py [PRESET] [--set KEY=VALUE ...] [--gib N]

The command uses the devices of this machine, or with --gib an NVIDIA GPU with N GiB for JAX (by
default JAX takes 75 % of a GPU's memory). The estimate of temporary arrays was fitted to figures of
the compilers for TPUs and GPUs; it is slightly above them for `speedrun` (records/NOTES.md).
train_gpt.py uses these functions before it compiles, and for the settings in its errors.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_gpt as T

LEAST_NGRAMS = 13 * 2**15  # rows; a guess: a smaller n-gram table is not worth its memory

# Training times of `speedrun` without settings (records/HARDWARE.md):
TIMES = {
    "8 x TPU v6 lite": "67 s, predicted",
    "8 x NVIDIA H100": "57 s, calculated from parts measured on one GPU",
    "1 x NVIDIA H200": "6 minutes, calculated from measured parts",
}


# ---- The estimate ------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """Coefficients for a compiler, fitted to its figures for `speedrun` (records/NOTES.md)."""

    # Activations that a layer keeps per token, in vectors of the model width:
    kept: float
    kept_if_recomputed: float  # with recompute=1
    kept_in_validation: float
    scores: float  # copies of the attention scores of attend_band
    rows_added: float  # copies of n-gram gradients in an update: joined, sorted, in float32
    apart: float  # 1 if logit chunks and gradients are in separate memory; otherwise 0
    whole_logits: float  # memory for all logits in addition to activations, relative to their size


TPU = Fitted(12.8, 5, 1.4, scores=3, rows_added=2.2, apart=0, whole_logits=1)
GPU = Fitted(14, 4, 1.4, scores=3.5, rows_added=5, apart=1, whole_logits=1.5)


def expected_bytes(cfg: T.Config, mesh: T.Mesh, device=None) -> dict[str, float]:
    """Return program name -> bytes on a device while the program runs, temporary arrays included.

    The kind of `device`, by default the mesh's, decides between kernels and between compilers."""
    device = device or mesh.devices.flat[0]
    sizes = {}
    for key in T.keys_of_programs(cfg):
        size = T.held_bytes(cfg, mesh, key)
        if isinstance(key, T.Gradients) or key == "eval":
            size += T.device_bytes(T.abstract_batch(cfg, mesh, *T.batch_shape(cfg, key)))
            size += model_bytes(cfg, mesh, key, device)
        elif key != "finish" and key.kind == "tables":
            size += tables_bytes(cfg, mesh, key, device)
        sizes[str(key)] = size
    return sizes


def fitted_to(device) -> Fitted:
    """Return the coefficients for a device."""
    return TPU if device.platform == "tpu" else GPU


def model_bytes(cfg: T.Config, mesh: T.Mesh, key: T.Gradients | str, device) -> float:
    """Return the bytes of temporary arrays of a program of gradients, or of "eval": activations and
    fetched n-grams."""
    trains = key != "eval"
    vector = cfg.width * cfg.dtype.itemsize
    numbers = fitted_to(device)
    b, t, count = T.batch_shape(cfg, key)
    rows = b // mesh.size
    together = T.rows_together(cfg, rows, t)
    kept = numbers.kept_in_validation
    if trains:
        kept = numbers.kept_if_recomputed if cfg.recompute else numbers.kept
    vectors = together * t * kept * len(cfg.layers)
    fetched = T.capacity(b * t, mesh.size) * mesh.size if cfg.ngram_rows else 0
    vectors += fetched * min(mesh.size, 2)  # several devices hold sent and received rows
    size = vectors * vector
    kernels, _ = T.choose_kernels(cfg, device)
    if kernels.attend is T.PLAIN.attend:
        windows = max(stage.windows for stage in cfg.stages) if trains else cfg.val_windows
        size += numbers.scores * plain_scores(cfg, together, t, max(windows))
    if trains:
        whole = t * count or together * t * cfg.vocab  # each row has its own candidates
        logits = numbers.apart * min(whole, cfg.loss_chunk * cfg.vocab)
        if cfg.whole_loss == "always" and kernels.cross_entropy is not T.PLAIN.cross_entropy:
            logits = max(logits, numbers.whole_logits * whole)
        narrow = T.keeps_logits_narrow(cfg, device)
        size += logits * (cfg.dtype.itemsize if narrow else 4)
        copies = T.device_bytes(T.abstract_copies(cfg, mesh))
        size += numbers.apart * (copies + fetched * vector)
    if trains and together < rows:  # gradients are summed in float32
        dense = [row.shape for name, row in T.param_specs(cfg).items() if name != T.NGRAMS]
        sums = sum(map(math.prod, dense)) + fetched * cfg.width
        size += 4 * sums
    return size


def plain_scores(cfg: T.Config, rows: int, t: int, window: int) -> int:
    """Return the bytes of float32 scores that attend_band holds at once for `rows` of t tokens."""
    queries = T.band_block(t, window)
    keys = min(2 * queries, t)
    block = 4 * cfg.heads * queries * keys
    blocks = rows * t // queries
    return min(blocks * block, max(block, T.SCORE_BYTES))


def tables_bytes(cfg: T.Config, mesh: T.Mesh, update: T.Update, device) -> float:
    """Return the bytes of temporary arrays of an update of tables."""
    vector = cfg.width * cfg.dtype.itemsize
    rows = 0
    if cfg.ngram_rows:
        tokens = [cfg.stages[stage].batch_tokens for stage in update.stages]
        rows = sum(mesh.size * T.capacity(each, mesh.size) for each in tokens)
    size = fitted_to(device).rows_added * min(rows, cfg.rows_at_once) * vector
    if cfg.layers_with("values"):  # their gradients are summed in float32
        size += 4 * len(cfg.layers_with("values")) * cfg.vocab * cfg.width
    return size


# ---- The search --------------------------------------------------------------------------------


def settings_that_fit(cfg: T.Config, mesh: T.Mesh, limit: float, device=None) -> list[str] | None:
    """Return settings for --set so that a run fits into `limit` bytes per device; None if nothing
    fits.

    They are the first of ways_to_fit that suffice, with the largest n-gram table that then fits."""
    no_table = "without=ngrams", "without=ngrams,values"
    least = min(cfg.ngram_rows, LEAST_NGRAMS)
    row = (cfg.width * cfg.dtype.itemsize + 4) / mesh.size  # with the mean square of its gradients
    for tables in (f"ngram_rows={least}", *no_table):
        for way in ways_to_fit(cfg):
            try:
                smaller = T.for_devices(T.override(cfg, [tables, *way]), mesh.size)
            except T.UserError:  # these sizes cannot be divided like this
                continue
            room = T.usable(limit) - max(expected_bytes(smaller, mesh, device).values())
            if room < 0:
                continue
            if tables in no_table:
                return [tables, *way]
            rows = cfg.ngram_rows
            if room < rows * row:
                rows = min(least + int(room / row / 2**15) * 2**15, rows)
            return way if rows == cfg.ngram_rows else [f"ngram_rows={rows}", *way]
    return None


def ways_to_fit(cfg: T.Config) -> list[list[str]]:
    """Return lists of settings, each with less memory than the list before.

    They cost, in turn: context of a few validation tokens; a second forward pass; less frequent
    gradients for tables; context of training tokens, in rows cut in two, four and eight."""
    longest = max(stage.row_tokens for stage in cfg.stages)
    first, later = cfg.table_every

    def validation(n):
        return [f"val_row={cfg.val_row // n}", f"val_batch={cfg.val_batch // n}"]

    ways = [["whole_loss=never"] if cfg.whole_loss == "always" else []]
    for settings in [
        validation(4),
        ["recompute=1", "rows_at_once=65536"],
        [f"table_every={first},{min(first, later)}"],
        [f"micro_tokens={longest // 2}"],
        [f"micro_tokens={longest // 4}", *validation(16)],
        [f"micro_tokens={longest // 8}", f"loss_chunk={max(1, cfg.loss_chunk // 4)}"],
    ]:
        keys = [item.partition("=")[0] for item in settings]
        before = [item for item in ways[-1] if item.partition("=")[0] not in keys]
        ways.append(before + settings)
    return ways


# ---- Commands ----------------------------------------------------------------------------------


def command_that_fits(preset: str, settings: list[str], gib: float | None = None) -> tuple:
    """Return (the command that trains a preset, a note on devices and time) for the devices of this
    machine, or for a GPU of `gib` GiB. Raise UserError if no settings fit."""
    cfg = T.override(T.PRESETS[preset], settings)
    devices = T.all_devices()[: cfg.devices or None]
    device = devices[0]
    if gib:
        device = SimpleNamespace(platform="gpu", device_kind="NVIDIA GPU", compute_capability="8.0")
        devices = devices[: max(cfg.devices, 1)]
    T.require(device.platform != "cpu", "there is no accelerator here: name a GPU by --gib N")
    cfg, mesh = T.make_mesh(cfg, devices)
    limit = gib * 2**30 if gib else T.memory_limit(mesh)
    here = f"{mesh.size} x {device.device_kind}"
    if limit < math.inf:
        here += f" with {limit / 2**30:.1f} GiB"
    found = settings_that_fit(cfg, mesh, limit, device)
    T.require(found is not None, f"{preset} does not fit {here}: use more devices, or tiny")
    command = T.command_for(T.__file__, preset)
    if chosen := [*settings, *found]:
        command += f" --set {' '.join(chosen)}"
    time = "records/HARDWARE.md has predicted times"
    if command == T.command_for(T.__file__, "speedrun"):
        known = [seconds for kind, seconds in TIMES.items() if here.startswith(kind)]
        time = known[0] if known else time
    return command, f"{here}: {time}"


def main(argv=None):
    """Print the command that fits."""
    parser = T.Parser(prog="fit.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("preset", nargs="?", default="speedrun", choices=[*T.PRESETS])
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--gib", type=float, metavar="N", help="memory of a GPU that is not here")
    args = parser.parse_args(argv)
    T.require(args.gib is None or args.gib > 0, f"--gib {args.gib} must be positive")
    command, note = command_that_fits(args.preset, args.set, args.gib)
    T.tell(f"{command}\n({note})")


if __name__ == "__main__":
    sys.exit(T.report_errors(main))
