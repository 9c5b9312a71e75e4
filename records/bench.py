"""How long the steps of each stage take here, without a run around them.

    python records/bench.py [PRESET] [--set KEY=VALUE ...] [--data DIR] [--parts N] [--dump DIR]

Every stage's steps are timed on random tokens, and on the first ones of the data where there are
any: milliseconds a step (median, least and most of five stretches), tokens/s, share of the
hardware's peak in bfloat16, MiB of memory. No run is made and nothing is written but to --dump:
bench.json, with the same figures and all that run.json says of source, versions and machine.

--parts N gives each device the rows that it would have if N devices shared every batch: on one GPU
`--parts 8` is what each of eight would do, but for the update, of which it does all where each of
eight does an eighth, and for the network.

The state goes from stage to stage, as in training. MiB are those of the largest of the stage's
programs with what stays beside it; what the devices tell of their peak holds for all stages so far
(bench.json has both).
"""

import dataclasses
import functools
import itertools
import json
import math
import shlex
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
    """`cfg` with the batches that are left for `devices` where `parts` devices share the whole."""
    stages = []
    for i, stage in enumerate(cfg.stages):
        if stage.rows % parts:
            raise T.UserError(
                f"--parts {parts}: stages.{i} has {stage.rows} rows, which {parts} devices cannot "
                "share equally: use a number that divides them"
            )
        tokens = stage.batch_tokens * devices // parts
        stages.append(dataclasses.replace(stage, batch_tokens=tokens))
    return dataclasses.replace(cfg, stages=tuple(stages))


def stage_batches(cfg: T.Config, mesh, step: int, stream: T.TokenStream | None) -> list[T.Batch]:
    """Batches of the stage that `step` belongs to: the first of `stream`, or random ones.

    All have the Hyper of `step`. Random tokens are uniform over the real ids, with one document in
    DOCUMENT tokens, since attention may pass over what is in another one; rows are not packed and
    documents not cut.
    """
    stage, hyper, cursor, batches = T.stage_at(cfg, step), T.put_hyper(cfg, step, mesh), 0, []
    rng, shape = np.random.default_rng(cfg.seed), (stage.rows, stage.row_tokens + 1)
    for _ in range(BATCHES):
        if stream:
            rows, cursor = T.next_rows(stream, cursor, stage)
            T.check_ids(cfg, stream.paths[0].parent, rows)
        else:
            ids = rng.integers(cfg.real_tokens, size=shape, dtype=np.uint16)
            rows = np.where(rng.random(shape) < 1 / DOCUMENT, np.uint16(cfg.bos), ids)
        batches.append(T.Batch(T.put(rows, mesh, jax.P(T.AXIS)), hyper))
    return batches


def time_chunks(cfg: T.Config, run: Callable) -> dict:
    """Times of run(steps) -> (seconds, loss), warm; the fields of its row in bench.json.

    Chunks are made of whole Adam periods, so that each kind of update has its share of them.
    """
    run(2 * cfg.adam_every)
    steps = cfg.adam_every
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
    mesh = T.make_mesh(cfg)
    device, parts, whole = mesh.devices.flat[0], parts or mesh.size, cfg
    cfg, peak = part_of(cfg, mesh.size, parts), T.peak_flops(device.device_kind)
    kernels, reason = T.pick_kernels(cfg, device)
    facts = T.run_facts(whole, mesh, command, reason) | {"parts": parts}
    if dump:
        T.make_folder(dump, "--dump")
    streams = {"random": None}
    try:
        streams["real"] = T.TokenStream(T.data_folder(cfg, say), "train", cfg.bos)
    except T.UserError as error:
        if named:
            raise
        say(f"random tokens only: {error}")
    say(f"{cfg.preset} on {mesh.size} x {device.device_kind}, each with 1/{parts} of every batch")
    say(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    say(f"kernels: {reason}")

    work = [  # before anything is compiled: the data may be too short
        (i, kind, stage_batches(cfg, mesh, first, stream))
        for i, first in enumerate(cfg.boundaries[:-1])
        for kind, stream in streams.items()
    ]
    compiled, built = T.compile_all(cfg, mesh, kernels, say)
    state = T.start_state(cfg, mesh)(np.uint32(cfg.seed))
    copies = T.start_copies(cfg, mesh)(state["params"])

    def run(grads_of, supply, steps):
        nonlocal state, copies
        waiting, loss, start = {}, None, time.perf_counter()
        for step in range(steps):
            batch, before = next(supply), loss
            grads, loss = compiled[grads_of](copies, batch.tokens, batch.hyper)
            waiting = {name: (*waiting.get(name, ()), grad) for name, grad in grads.items()}
            for update in T.programs_of(cfg, step % cfg.adam_every)[1:]:
                due = {name: waiting.pop(name) for name in T.updated(cfg, update)}
                state, changed, _ = compiled[update](state, due, batch.hyper)
                copies |= changed
            del grads, due  # or they would lie beside those of the next step
            jax.block_until_ready(before)  # as in training, while this step runs
        jax.block_until_ready((state, copies))
        return time.perf_counter() - start, float(loss)

    rows, head = [], ("ms/step", "min", "max", "tokens/s", "of bf16", "MiB")
    say(line("stage", "tokens", *head))
    for i, kind, batches in work:
        name, tokens = f"grads{i}", cfg.stages[i].batch_tokens
        times = time_chunks(cfg, functools.partial(run, name, itertools.cycle(batches)))
        if not math.isfinite(times["loss"]):
            raise T.UserError(
                f"{name}: the loss on {kind} tokens is {times['loss']}, and the time of such "
                "steps tells nothing: lower the learning rates (--set lr_muon=...)"
            )
        rate = 1e3 * tokens / times["ms"]
        needs = [
            T.resident_bytes(cfg, mesh, one) + T.program_bytes(compiled[one])["peak"]
            for one in (name, "muon", "adam")
        ]
        used = peak and rate * T.flops_per_token(cfg) / (mesh.size * peak)
        row = {"stage": i, "name": name, "batch_tokens": tokens, "tokens": kind}
        row |= {**times, "tokens_per_second": rate, "utilization": used}
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
        parser = T.Parser(prog="bench.py", description=__doc__.split("\n")[0])
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
    sys.exit(main())
