"""How long the steps of each stage take on the hardware that is here, and what kernels are worth.

    python records/bench.py [PRESET] [--set KEY=VALUE ...] [--data DIR] [--parts N] [--dump DIR]
    python records/bench.py [PRESET] ... --kernels STAGE

The steps of each stage are timed on the first tokens of the data: milliseconds a step with its
share of all updates (median, least and most of five stretches), tokens/s, share of the hardware's
peak in bfloat16, MiB of memory. The state goes from stage to stage, as in training.

With --kernels the gradients of one stage (0 is the first) are computed without kernels, with all of
this hardware, with all but each, and for attention on NVIDIA GPUs with other tiles. First each is
compared with the plain form in float32: `off` is the norm of the difference over the norm, of the
large parameter where it is largest; over twice that of the plain form the exit status is 1. Then it
is timed.

--parts N gives each device what it would have if N devices shared the run: its rows of every batch,
and its share of the n-gram table, which takes 65 GB in all. On one GPU `--parts 8` is what each of
eight would do, but for the network, and for updates of all other parameters, of which each of eight
does an eighth. --dump DIR keeps the figures, and the facts that run.json has, as bench.json.
"""

import dataclasses
import functools
import itertools
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

import jax
import numpy as np

import train_gpt as T

BATCHES = 4  # lie on the devices and are taken in turn
CHUNKS = 5  # stretches of calls that are timed; their median counts
SECONDS = 0.5  # a chunk takes at least this: to wait for its end costs well under 1 % of it
LARGE = 1000  # numbers: the gradients of single ones are as far off as roundings happen to fall
TILES = {  # constant of train_gpt.py -> others: queries, keys, warps, stages
    "FORWARD_TILES": [(128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 3)],
    "QUERY_TILES": [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
    "KEY_TILES": [(64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 2)],
}


def part_of(cfg: T.Config, devices: int, parts: int) -> T.Config:
    """`cfg` with what is left for `devices` of its batches and of its n-gram table where `parts`
    devices share the whole."""
    stages = []
    for i, stage in enumerate(cfg.stages):
        if stage.rows % parts:
            divides = f"use a number that divides the {stage.rows} rows of stages.{i}"
            raise T.UserError(f"--parts {parts}: {divides}")
        tokens = stage.batch_tokens * devices // parts
        stages.append(dataclasses.replace(stage, batch_tokens=tokens))
    rows = max(4, cfg.ngram_rows * devices // parts // 2 * 2)
    return dataclasses.replace(cfg, stages=tuple(stages), ngram_rows=rows)


def time_chunks(period: int, run: Callable) -> dict:
    """Milliseconds of a call: run(n) makes n of them and returns their seconds. Chunks are whole
    periods, so that each kind of update has its share of them."""
    run(2 * period)  # warm
    calls = period
    while run(calls) < SECONDS:
        calls *= 2
    each = [1e3 * run(calls) / calls for _ in range(CHUNKS)]
    return {"ms": float(np.median(each)), "ms_min": min(each), "ms_max": max(each), "calls": calls}


def cells(row: dict) -> list[str]:
    """Times of a row, for a table."""
    return [f"{row[key]:.2f}" for key in ("ms", "ms_min", "ms_max")]


# ---- Steps of the stages -----------------------------------------------------------------------


def step_batches(cfg: T.Config, mesh, step: int, stream, words: list[bytes]) -> list[T.Batch]:
    """The first batches of `stream` as that of `step`, with the Hyper of `step`."""
    known = T.vocabulary(cfg, words)
    state = T.loader_state(cfg, mesh)
    batches = []
    for _ in range(BATCHES):
        *arrays, state = T.next_batch(cfg, mesh, stream, known, step, state)
        batches.append(T.put_batch(cfg, mesh, step, *arrays))
    return batches


def time_stages(cfg: T.Config, mesh, kernels, tokens: tuple, say) -> list[dict]:
    """A row for each program of gradients; `tokens`: (TokenStream, bytes of its tokens, if known).
    UserError if the loss is no number: such steps tell nothing."""
    schedule = T.schedule(cfg)
    grads = [steps[0] for steps in map(schedule.programs, range(cfg.steps))]
    found = T.programs(cfg, mesh, kernels)
    work = {}
    for name in dict.fromkeys(grads):
        steps = [step for step, other in enumerate(grads) if other == name]
        middle = steps[len(steps) // 2]
        stage = int(schedule.stage[middle])
        summed = cfg.event_every[middle >= cfg.event_change]
        adam = "adam_tied" if schedule.tied[middle] else "adam"
        tables = "-".join([str(stage)] * summed)
        updates = {"anvil": 1, adam: cfg.adam_every, f"tables{tables}": summed}
        cure = f"time a run of more steps, or with a longer stages.{stage}"
        T.need({*updates} <= {*found}, f"no tables{tables} to time with {name}: {cure}")
        work[name] = stage, middle, len(steps), updates, step_batches(cfg, mesh, middle, *tokens)
    say("compiling; for accelerators it takes minutes")
    names = [name for name in found if name not in ("finish", "eval")]
    with ThreadPoolExecutor(T.cpu_cores()) as pool:
        built = pool.map(lambda name: T.lower(found[name], mesh).compile(), names)
        compiled = dict(zip(names, built, strict=True))
    seed = np.uint32(cfg.seed)
    state = T.start_state(cfg, mesh)(seed)
    copies = T.start_copies(cfg, mesh)(state["params"], seed)
    loss = None

    def run(name, updates, supply, steps) -> float:
        nonlocal state, copies, loss
        waiting = {}
        start = time.perf_counter()
        for step in range(1, steps + 1):
            batch = next(supply)
            before = loss
            grads, loss, _ = compiled[name](copies, state["params"][T.NGRAMS], batch)
            waiting = {x: (*waiting.get(x, ()), grad) for x, grad in grads.items()}
            del grads  # or they would lie beside the updates and the next step
            for update in (x for x, every in updates.items() if step % every == 0):
                due = {x: waiting.pop(x) for x in T.updated(cfg, update)}
                state, changed = compiled[update](state, due, batch.hyper)
                copies |= changed
                del due
            jax.block_until_ready(before)  # as in training, while this step runs
        jax.block_until_ready((state, copies))
        return time.perf_counter() - start

    form = "{:9}{:>7}{:>9}{:>11}{:>11}{:>11}{:>12}{:>9}{:>9}".format
    say(form("program", "stage", "steps", "ms/step", "min", "max", "tokens/s", "of bf16", "MiB"))
    rows = []
    peak = T.peak_flops(mesh.devices.flat[0].device_kind)
    for name, (stage, step, count, updates, batches) in work.items():
        run_steps = functools.partial(run, name, updates, itertools.cycle(batches))
        timed = time_chunks(max(updates.values()), run_steps)
        row = {"name": name, "stage": stage, "steps": count, **timed}
        if not np.isfinite(loss):
            raise T.UserError(f"{name}: the loss is {loss}: lower the rates (--set lr_anvil=...)")
        rate = 1e3 * cfg.stages[stage].batch_tokens / row["ms"]
        used = rate * T.flops_per_token(cfg, step) / (mesh.size * peak) if peak else None
        needs = [
            T.resident_bytes(cfg, mesh, x) + T.program_bytes(compiled[x])["peak"]
            for x in (name, *updates)
        ]
        row |= {"loss": float(loss), "tokens_per_second": rate, "utilization": used}
        row["memory_mib"] = max(needs) / 2**20
        rows.append(row)
        more = f"{rate:,.0f}", f"{used:.1%}" if used else "-", f"{row['memory_mib']:,.0f}"
        say(form(name, stage, count, *cells(row), *more))
    return rows


# ---- Kernels on and off ------------------------------------------------------------------------


def variants(cfg: T.Config, mesh, kernels, name: str):
    """Yield (label, the program `name` lowered so): see above."""
    wide = dataclasses.replace(cfg, compute_dtype="float32")
    found = {"float32": (wide, T.PLAIN), "plain": (cfg, T.PLAIN), "all kernels": (cfg, kernels)}
    for field in T.Kernels._fields:
        if getattr(kernels, field) is not getattr(T.PLAIN, field):
            less = kernels._replace(**{field: getattr(T.PLAIN, field)})
            found[f"without {field}"] = cfg, less
    for label, (own, chosen) in found.items():
        yield label, T.lower(T.programs(own, mesh, chosen)[name], mesh)
    tiled = mesh.devices.flat[0].platform == "gpu" and kernels.attend is not T.PLAIN.attend
    for constant, others in TILES.items() if tiled else ():
        usual = getattr(T, constant)
        for tiles in others:
            setattr(T, constant, T.Tiles(*tiles))
            jax.clear_caches()  # of kernels that have been traced with the usual ones
            yield f"{constant} {tiles}", T.lower(T.programs(cfg, mesh, kernels)[name], mesh)
        setattr(T, constant, usual)


def distance(got: list, expected: list) -> float:
    """The largest relative norm of the difference of arrays of LARGE sizes."""
    pairs = [[np.asarray(x, np.float32) for x in pair] for pair in zip(got, expected, strict=True)]
    large = [(np.linalg.norm(x - y), np.linalg.norm(y)) for x, y in pairs if y.size >= LARGE]
    return max(float(off / max(norm, 1e-30)) for off, norm in large)


def compare_kernels(stage: int, cfg: T.Config, mesh, kernels, tokens: tuple, say) -> list[dict]:
    """A row for each of `variants` of the first gradients of a stage: how far off, how long."""
    name = next((f"grads{i}" for i, (at, _) in enumerate(T.grads_kinds(cfg)) if at == stage), None)
    if name is None:
        raise T.UserError(f"--kernels {stage}: stages are 0 to {len(cfg.stages) - 1}")
    batches = step_batches(cfg, mesh, cfg.boundaries[stage], *tokens)
    seed = np.uint32(cfg.seed)
    params = T.start_state(cfg, mesh)(seed)["params"]
    copies = {x: np.asarray(value) for x, value in T.start_copies(cfg, mesh)(params, seed).items()}
    rng = np.random.default_rng(cfg.seed)
    for x, value in copies.items():
        if x != "signs":  # parameters that begin as zeros would hide what is behind them
            copies[x] = value.astype(np.float32) + 0.02 * rng.standard_normal(value.shape)
    form = "{:36}{:>10}{:>11}{:>11}{:>11}{:>9}".format
    say(form(name, "off", "ms", "min", "max", "MiB"))
    rows = []
    for label, lowered in variants(cfg, mesh, kernels, name):
        try:
            program = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "_TILES" not in label:  # other tiles may need too much memory
                raise
            say(f"{label:36}  {str(error).splitlines()[0][:60]}")
            continue
        likes, table = program.args_info[0][:2]
        own = {x: value.astype(likes[x].dtype) for x, value in copies.items()}
        own = jax.device_put(own, program.input_shardings[0][0])
        step = functools.partial(program, own, params[T.NGRAMS].astype(table.dtype))
        supply = itertools.cycle(batches)

        def run(calls, step=step, supply=supply) -> float:
            start = time.perf_counter()
            for _ in range(calls):
                out = step(next(supply))
            jax.block_until_ready(out)
            return time.perf_counter() - start

        grads = jax.tree.leaves(step(batches[0])[0])
        if label == "float32":
            reference = grads
        row = {"name": label, "off": distance(grads, reference), **time_chunks(1, run)}
        row["memory_mib"] = T.program_bytes(program)["peak"] / 2**20
        rows.append(row)
        say(form(label, f"{row['off']:.1e}", *cells(row), f"{row['memory_mib']:,.0f}"))
    return rows


# ---- The command -------------------------------------------------------------------------------


def bench(cfg: T.Config, parts=0, stage: int | None = None, command="", say=T.tell) -> dict:
    """Time the steps of each stage, or the kernels in one `stage`, shared by `parts` devices (0: as
    many as there are); the content of bench.json."""
    whole = cfg
    cfg, mesh = T.make_mesh(cfg)
    device = mesh.devices.flat[0]
    parts = parts or mesh.size
    cfg = part_of(cfg, mesh.size, parts)
    kernels, reason = T.pick_kernels(cfg, device)
    facts = T.run_facts(whole, mesh, command, reason) | {"parts": parts}
    say(f"{cfg.preset} on {mesh.size} x {device.device_kind}, each with 1/{parts} of every batch")
    say(f"kernels: {reason}")
    folder = T.data_folder(cfg, say)
    tokens = T.TokenStream(folder, "train", cfg.bos), T.token_bytes(cfg, folder)
    time_ = functools.partial(compare_kernels, stage) if stage is not None else time_stages
    return facts | {"rows": time_(cfg, mesh, kernels, tokens, say)}


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""

    def run():
        parser = T.Parser(prog="bench.py", description=(__doc__ or "").split("\n")[0])
        T.add_config_options(parser)
        parser.add_argument("--parts", type=int, default=0, metavar="N", help="devices that share")
        parser.add_argument("--kernels", type=int, metavar="STAGE", help="with each on and off")
        parser.add_argument("--dump", metavar="DIR", help="keep the figures as bench.json")
        args = parser.parse_args(argv)
        T.need(args.parts >= 0, f"--parts {args.parts}: a positive number of devices, or none")
        if args.dump:
            Path(args.dump).mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", *sys.argv] if argv is None else argv)
        facts = bench(T.resolve(args), args.parts, args.kernels, command)
        if args.dump:
            Path(args.dump, "bench.json").write_text(json.dumps(facts, indent=1) + "\n")
        off = {row["name"]: row.get("off", 0.0) for row in facts["rows"]}
        if max(off.values()) > 2 * off.get("plain", 0.0) + 1e-3:
            T.tell("kernels are further off float32 than the plain form is")
            return 1

    return T.report_errors(run)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's would wait for the compiler's threads
    sys.exit(main())
