"""How long the steps of each stage take here, without a run around them.

    python records/bench.py [PRESET] [--set KEY=VALUE ...] [--data DIR] [--parts N] [--dump DIR]

Every kind of step is timed, one for each program of gradients, on random tokens and, where there
are any, on the first ones of the data: milliseconds a step with its share of all updates (median,
least and most of five stretches), tokens/s, share of the hardware's peak in bfloat16, MiB of
memory. No run is made and nothing is written but to --dump: bench.json, with the same figures and
all that run.json says of source, versions and machine.

--parts N gives each device what it would have if N devices shared the run: its rows of every batch,
and its share of the n-gram table. On one GPU `--parts 8` is what each of eight would do, but for
the update of all other parameters, of which it does all where each of eight does an eighth, and for
the network. Without it the record's table alone takes 65 GB.

The state goes from stage to stage, as in training. MiB are those of the largest of the step's
programs with what stays beside it; what the devices tell of their peak holds for all so far
(bench.json has both).
"""

import dataclasses
import functools
import itertools
import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

import jax
import numpy as np

import train_gpt as T

BATCHES = 4  # lie on the devices and are taken in turn
CHUNKS = 5  # stretches of steps that are timed; their median counts
SECONDS = 0.5  # a chunk takes at least this: to wait for its end costs well under 1 % of it
DOCUMENT = 700  # mean length of random documents; FineWeb's: 100 M tokens / 150,000 a shard


def part_of(cfg: T.Config, devices: int, parts: int) -> T.Config:
    """`cfg` with what is left for `devices` of its batches and of its n-gram table where `parts`
    devices share the whole."""
    stages = []
    for i, stage in enumerate(cfg.stages):
        if stage.rows % parts:
            raise T.UserError(
                f"--parts {parts}: stages.{i} has {stage.rows} rows, which {parts} devices cannot "
                "share equally: use a number that divides them"
            )
        tokens = stage.batch_tokens * devices // parts
        stages.append(dataclasses.replace(stage, batch_tokens=tokens))
    rows = max(4, cfg.ngram_rows * devices // parts // 2 * 2)
    return dataclasses.replace(cfg, stages=tuple(stages), ngram_rows=rows)


class RandomTokens:
    """In place of a TokenStream: no end, and what is read does not depend on the cursor.

    Tokens are uniform over the real ids, with one document in DOCUMENT tokens, since attention may
    pass over what is in another one. Where a row has few `candidates`, they are uniform over half
    as many ids, so that all are among them.
    """

    def __init__(self, cfg: T.Config, candidates: int):
        self.rng, self.bos = np.random.default_rng(cfg.seed), cfg.bos
        few = min(cfg.real_tokens, candidates // 2 or cfg.real_tokens)
        self.ids = self.rng.permutation(cfg.real_tokens)[:few].astype(np.uint16)

    def read(self, cursor: int, count: int) -> np.ndarray:
        """`count` tokens, uint16."""
        ids = self.rng.choice(self.ids, count)
        return np.where(self.rng.random(count) < 1 / DOCUMENT, np.uint16(self.bos), ids)


def kinds_of_steps(cfg: T.Config) -> dict[tuple[int, int], list[int]]:
    """{(stage, candidates): its steps}: what makes gradients take their time."""
    kinds, grads = T.grads_kinds(cfg), T.schedule(cfg).grads
    found = ((kind, np.flatnonzero(grads == i).tolist()) for i, kind in enumerate(kinds))
    return {kind: steps for kind, steps in found if steps}


def step_batches(cfg: T.Config, mesh, step: int, stream=None, words=()) -> list[T.Batch]:
    """Batches such as that of `step`: the first ones of `stream`, or of random tokens.

    All have the Hyper of `step`. `words` are the bytes of the tokens, if that is known. Rows of
    random tokens are not packed and documents not cut.
    """
    known, state, batches = T.vocabulary(cfg, [*words]), T.loader_state(cfg, mesh), []
    tokens = stream or RandomTokens(cfg, T.schedule(cfg).candidates[step])
    uncut = tuple(dataclasses.replace(stage, doc_cap=0) for stage in cfg.stages)
    cut = cfg if stream else dataclasses.replace(cfg, stages=uncut)
    for _ in range(BATCHES):
        if stream:
            rows, _ = T.next_rows(stream, state.cursor, T.stage_at(cfg, step))
            T.check_ids(cfg, stream.paths[0].parent, rows)
        *arrays, state = T.next_batch(cut, mesh, tokens, known, step, state)
        arrays = jax.tree.map(lambda x: T.put(x, mesh, jax.P(T.AXIS)), arrays)
        batches.append(T.Batch(*arrays, T.put_hyper(cfg, step, mesh)))
    return batches


def time_chunks(period: int, run: Callable) -> dict:
    """Times of run(steps) -> (seconds, loss), warm; the fields of its row in bench.json.

    Chunks are whole periods, so that each kind of update has its share of them.
    """
    run(2 * period)
    steps = period
    while run(steps)[0] < SECONDS:
        steps *= 2
    seconds, losses = zip(*(run(steps) for _ in range(CHUNKS)), strict=True)
    each = [1e3 * x / steps for x in seconds]
    return {
        "ms": float(np.median(each)),
        "ms_min": min(each),
        "ms_max": max(each),
        "chunk_steps": steps,
        "chunk_ms": [1e3 * x for x in seconds],
        "loss": losses[-1],
    }


def line(name, tokens, *cells) -> str:
    """A row of the table."""
    return f"{name:8}{tokens:>8}" + "".join(f"{cell:>12}" for cell in cells)


def bench(cfg: T.Config, parts=0, named=False, dump: Path | None = None, command="", say=T.tell):
    """Time the steps of each stage, on random and on real tokens; the content of bench.json.

    The devices share the batches of each stage, or take their share of them among `parts` devices
    (0: as many as there are). Where there are no data, random tokens have to do, unless the user
    has `named` a folder. UserError if the loss is no number: such steps tell nothing.
    """
    cfg, mesh = T.make_mesh(cfg)
    device, parts, whole = mesh.devices.flat[0], parts or mesh.size, cfg
    cfg, peak = part_of(cfg, mesh.size, parts), T.peak_flops(device.device_kind)
    kernels, reason = T.pick_kernels(cfg, device, mesh.size)
    facts = T.run_facts(whole, mesh, command, reason) | {"parts": parts}
    if dump:
        T.make_folder(dump, "--dump")
    streams = {"random": ()}
    try:
        folder = T.data_folder(cfg, say)
        stream = T.TokenStream(folder, "train", cfg.bos)
        streams["real"] = stream, T.token_bytes(cfg, folder)
    except T.UserError as error:
        if named:
            raise
        say(f"random tokens only: {error}")
    say(f"{cfg.preset} on {mesh.size} x {device.device_kind}, each with 1/{parts} of every batch")
    say(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    say(f"kernels: {reason}")

    work = []
    for (at, candidates), steps in kinds_of_steps(cfg).items():
        step = steps[len(steps) // 2]
        for kind, source in streams.items():
            batches = step_batches(cfg, mesh, step, *source)  # not compiled yet: they may be few
            row = {"stage": at, "candidates": candidates, "steps": len(steps)}
            row["name"] = T.schedule(cfg).programs(step)[0]
            work.append((step, row | {"tokens": kind}, batches))
    compiled, built = T.compile_all(cfg, mesh, kernels, say)
    seed = np.uint32(cfg.seed)
    state = T.start_state(cfg, mesh)(seed)
    copies = T.start_copies(cfg, mesh)(state["params"], seed)

    def run(grads_of, updates, supply, steps):
        nonlocal state, copies
        waiting, loss, start = {}, None, time.perf_counter()
        for step in range(1, steps + 1):
            batch, before = next(supply), loss
            grads, loss, _ = compiled[grads_of](copies, state["params"][T.NGRAMS], batch)
            waiting = {name: (*waiting.get(name, ()), grad) for name, grad in grads.items()}
            del grads  # or they would lie beside the updates and the next step
            for update in (name for name, every in updates.items() if step % every == 0):
                due = {name: waiting.pop(name) for name in T.updated(cfg, update)}
                state, changed, _ = compiled[update](state, due, batch.hyper)
                copies |= changed
                del due
            jax.block_until_ready(before)  # as in training, while this step runs
        jax.block_until_ready((state, copies))
        return time.perf_counter() - start, float(loss)

    rows, head = [], ("ms/step", "min", "max", "tokens/s", "of bf16", "MiB")
    say(line("program", "tokens", *head))
    for step, row, batches in work:
        name, kind, tokens = row["name"], row["tokens"], cfg.stages[row["stage"]].batch_tokens
        summed = cfg.event_every[step >= cfg.event_change]
        adam = "adam_tied" if T.schedule(cfg).tied[step] else "adam"
        updates = {"anvil": 1, adam: cfg.adam_every, f"tables{summed}": summed}
        supply = itertools.cycle(batches)
        times = time_chunks(summed, functools.partial(run, name, updates, supply))
        if not math.isfinite(times["loss"]):
            raise T.UserError(
                f"{name}: the loss on {kind} tokens is {times['loss']}, and the time of such "
                "steps tells nothing: lower the learning rates (--set lr_anvil=...)"
            )
        rate = 1e3 * tokens / times["ms"]
        needs = [
            T.resident_bytes(cfg, mesh, one) + T.program_bytes(compiled[one])["peak"]
            for one in (name, *updates)
        ]
        used = peak and rate * T.flops_per_token(cfg, step) / (mesh.size * peak)
        row |= {"batch_tokens": tokens, **times, "tokens_per_second": rate, "utilization": used}
        row |= {"memory_mib": max(needs) / 2**20, "peak_so_far_mib": T.memory_peak_mib()}
        rows.append(row)
        cells = [f"{row[key]:.2f}" for key in ("ms", "ms_min", "ms_max")]
        cells += f"{rate:,.0f}", f"{used:.1%}" if used else "-", f"{row['memory_mib']:,.0f}"
        say(line(name, kind, *cells))
    facts |= {**built, "rows": rows}
    if dump:
        (dump / "bench.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""

    def run():
        parser = T.Parser(prog="bench.py", description=(__doc__ or "").split("\n")[0])
        T.add_config_options(parser)
        parser.add_argument("--parts", type=int, default=0, metavar="N", help="devices that share")
        parser.add_argument("--dump", metavar="DIR", help="keep the figures as bench.json")
        args = parser.parse_args(argv)
        if args.parts < 0:
            raise T.UserError(f"--parts {args.parts}: a positive number of devices, or none")
        if args.dump == "":
            raise T.UserError("--dump is empty: name a folder, or drop it")
        cfg = T.resolve(args)
        named = args.data is not None or cfg.data not in {x.data for x in T.PRESETS.values()}
        command = shlex.join(["python", *sys.argv] if argv is None else argv)
        dump = Path(args.dump) if args.dump else None
        bench(cfg, args.parts, named, dump, command)

    return T.report_errors(run)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the compiler's threads would not hear Python's
    sys.exit(main())
