"""How long the steps of each stage take on the hardware that is here, and what kernels are worth.

    python records/bench.py [PRESET] [--set ...] [--parts N] [--dump DIR] [--profile DIR]
    python records/bench.py [PRESET] ... --kernels STAGE
    python records/bench.py --beside PREFLIGHT.json BENCH.json

The steps of each stage are timed on the first tokens of the data: milliseconds a step with its
share of all updates (median, least and most of five stretches), tokens/s, share of the hardware's
peak in bfloat16, MiB of memory. Then each program is timed by itself.

With --kernels the gradients of one stage (0 is the first) are timed without kernels, with all, with
all but each, and for attention on NVIDIA GPUs with other tiles. `off` is the norm of the difference
from the plain form in float32 over its norm, of the large parameter where that is largest; over
twice that of the plain form the exit status is 1.

--parts N gives each device its rows of every batch and its share of the n-gram table (65 GB in all)
as if N devices shared the run, without their network. --dump DIR keeps the figures as bench.json,
--profile DIR a trace of some steps of each stage as DIR/PROGRAM, for xprof or Perfetto, and prints
where their time goes: by kind of kernel, and by line of train_gpt.py; lines.py says what is in
DIR/lines.json. --beside prints what preflight.py has predicted of each program beside what
bench.json has measured, and the yardstick by which the predictions would be nearest
(records/NOTES.md).

Where nvidia-smi is there, a time is followed by the clock and the watts at which the GPU ran, and
by what has limited the clock: the same program took 51 or 56 ms at two clocks.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

import train_gpt as T  # first: it reports in one line that jax is missing

# isort: split

import jax
import numpy as np
from lines import describe, keep_lines
from preflight import peak_flops
from scipy.optimize import curve_fit

BATCHES = 4  # lie on the devices and are taken in turn
CHUNKS = 5  # stretches of calls that are timed; their median counts
SECONDS = 0.5  # a chunk takes at least this: to wait for its end costs well under 1 % of it
LARGE = 1000  # numbers: the gradients of single ones are as far off as roundings happen to fall
HEADS = "program    stage    steps    ms/step        min        max    tokens/s  of bf16      MiB"
TIMES = "{ms:>11.2f}{ms_min:>11.2f}{ms_max:>11.2f}"  # of a row, for a table
CLOCKS = "clocks.sm,power.draw,clocks_event_reasons.active"  # that nvidia-smi is asked for
# Bits of the last of these: a GPU has nothing to do, and why its clock is lower than it could be.
IDLE = 0x1
LIMITS = {0x4: "power", 0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power"}
# Block, tile, warps, stages: what to try where these have not been measured yet.
TILES = (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 2), (128, 32, 8, 3)


def part_of(cfg: T.Config, devices: int, parts: int) -> T.Config:
    """`cfg` with the batches and the n-gram table of `devices` where `parts` share the whole.
    A validation, which is not timed, has as few rows as there are devices."""
    stages = []
    for i, stage in enumerate(cfg.stages):
        divides = f"use a number that divides the {stage.rows} rows of stages.{i}"
        T.need(stage.rows % parts == 0, f"--parts {parts}: {divides}")
        tokens = stage.batch_tokens * devices // parts
        stages.append(dataclasses.replace(stage, batch_tokens=tokens))
    part = {"stages": tuple(stages)}
    if cfg.ngram_rows:
        part["ngram_rows"] = max(4, cfg.ngram_rows * devices // parts // 2 * 2)
    if parts > devices:
        part["val_batch"] = cfg.val_row * devices
    return dataclasses.replace(cfg, **part)


def time_chunks(period: int, run: Callable) -> dict:
    """Milliseconds of a call: run(n) makes n of them and returns their seconds. Chunks are whole
    periods, so that each kind of update has its share of them."""
    run(2 * period)  # warm
    calls = period
    while run(calls) < SECONDS:
        calls *= 2
    with watch_clocks() as found:
        each = [1e3 * run(calls) / calls for _ in range(CHUNKS)]
    times = {"ms": float(np.median(each)), "ms_min": min(each), "ms_max": max(each)}
    return times | {"calls": calls} | found


@contextlib.contextmanager
def watch_clocks():
    """A dict that has, after the block, what busy NVIDIA GPUs did in it, if nvidia-smi is there:
    medians of "clock_mhz" and "watts", and "limited_by", what kept a clock low."""
    found = {}
    if jax.default_backend() != "gpu" or not shutil.which("nvidia-smi"):
        yield found
        return
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits"]
    command.append("--loop-ms=100")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield found
        finally:
            process.terminate()
        text = process.stdout.read()
    lines = re.findall(r"^(\d+), ([\d.]+), (0x\w+)$", text, re.MULTILINE)
    rows = [(int(clock), float(watts), int(reasons, 16)) for clock, watts, reasons in lines]
    rows = [row for row in rows if not row[2] & IDLE]
    if rows:
        mhz, watts, reasons = zip(*rows, strict=True)
        words = (word for bit, word in LIMITS.items() if any(bits & bit for bits in reasons))
        found["limited_by"] = [*dict.fromkeys(words)]
        found |= {"clock_mhz": float(np.median(mhz)), "watts": float(np.median(watts))}


def clocks(row: dict) -> str:
    """What `watch_clocks` has found for a row, to end its line; "" if nothing."""
    if "clock_mhz" not in row:
        return ""
    limits = f", limited by {' and '.join(row['limited_by'])}" if row["limited_by"] else ""
    return f"  {row['clock_mhz']:,.0f} MHz, {row['watts']:,.0f} W{limits}"


def seconds_of(step: Callable, calls: int) -> float:
    """Seconds of so many calls of `step`, which returns what to wait for: two at a time."""
    start = time.perf_counter()
    last = None
    for _ in range(calls):
        before, last = last, step()
        jax.block_until_ready(before)
    jax.block_until_ready(last)
    return time.perf_counter() - start


def step_batches(cfg: T.Config, mesh, step: int, stream, words: list[bytes]) -> list[T.Batch]:
    """The first batches of `stream` as that of `step`, with the Hyper of `step`."""
    known = T.vocabulary(cfg, words)
    state = T.loader_state(cfg, mesh)
    batches = []
    for _ in range(BATCHES):
        batch, state = T.next_batch(cfg, mesh, stream, known, step, state)
        batches.append(batch)
    return batches


def time_stages(cfg: T.Config, mesh, kernels, tokens: tuple, traces=None) -> dict:
    """ "rows" for each program of gradients, "programs" for each by itself; `tokens`: (TokenStream,
    bytes of its tokens). UserError if the loss is no number. `traces`: where profiles go."""
    schedule = T.schedule(cfg)
    grads = [gradients for gradients, *_ in schedule.programs]
    found = T.programs(cfg, mesh, kernels)
    work = {}
    for key in dict.fromkeys(grads):
        steps = [step for step, other in enumerate(grads) if other == key]
        middle = steps[len(steps) // 2]
        summed = cfg.table_every[middle >= cfg.table_change]
        updates = [T.Update("anvil", 1)]
        later = itertools.chain(*schedule.programs[middle:])
        adam = [update for update in later if update[0] == "adam"]
        updates.append(adam[0] if adam else T.Update("adam", cfg.adam_every))
        if T.updated(cfg, "tables"):
            updates.append(T.Update("tables", summed, stages=(key.stage,) * summed))
        cure = f"time a run of more steps, or with a longer stages.{key.stage}"
        T.need({*updates} <= {*found}, f"no {updates[-1]} to time with {key}: {cure}")
        work[key] = middle, len(steps), updates, step_batches(cfg, mesh, middle, *tokens)
    T.tell("compiling; for accelerators it takes minutes")
    keys = [key for key in found if key not in ("finish", "eval")]  # which take minutes, untimed
    with ThreadPoolExecutor(T.cpu_cores()) as pool:
        lowered = (found[key].lower() for key in keys)
        built = pool.map(functools.partial(T.compile_one, cfg, mesh), keys, lowered)
        compiled = dict(zip(keys, built, strict=True))
    seed = np.uint32(cfg.seed)
    state = T.start_state(cfg, mesh)(seed)
    copies = T.start_copies(cfg, mesh)(state["params"], seed)
    loss = None

    def run(key, updates, supply, steps) -> float:
        nonlocal state, copies, loss
        waiting = {}
        start = time.perf_counter()
        for step in range(1, steps + 1):
            batch = next(supply)
            before = loss
            grads, loss, _ = compiled[key](copies, state["params"].get(T.NGRAMS), batch)
            waiting = {x: (*waiting.get(x, ()), grad) for x, grad in grads.items()}
            del grads  # or they would lie beside the updates and the next step
            for update in (x for x in updates if step % x.steps == 0):
                due = {x: waiting.pop(x) for x in T.updated(cfg, update.kind)}
                state, changed, _ = compiled[update](state, due, batch.hyper)
                copies |= changed
                del due
            jax.block_until_ready(before)  # as in training, while this step runs
        jax.block_until_ready((state, copies))
        return time.perf_counter() - start

    form = f"{{name:9}}{{stage:>7}}{{steps:>9}}{TIMES}{{tokens_per_second:>12,.0f}}"
    T.tell(HEADS)
    rows = []
    traced = {}
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    for key, (step, count, updates, batches) in work.items():
        run_steps = functools.partial(run, key, updates, itertools.cycle(batches))
        longest = max(update.steps for update in updates)
        row = {"name": str(key), "stage": key.stage, "steps": count}
        row |= time_chunks(longest, run_steps)
        if traces:
            with jax.profiler.trace(Path(traces, row["name"])):
                run_steps(longest)
            traced[row["name"]] = longest, [key, *updates]
        cure = "lower the rates (--set lr_anvil=...)"
        T.need(np.isfinite(loss), f"{key}: the loss is {loss}: {cure}")
        rate = 1e3 * cfg.stages[key.stage].batch_tokens / row["ms"]
        used = rate * T.flops_per_token(cfg, step) / (mesh.size * peak) if peak else None
        peaks = {x: compiled[x].memory_analysis().peak_memory_in_bytes for x in (key, *updates)}
        needs = max(T.resident_bytes(cfg, mesh, x) + size for x, size in peaks.items())
        row |= {"loss": float(loss), "tokens_per_second": rate, "utilization": used}
        row["memory_mib"] = needs / 2**20
        rows.append(row)
        share = f"{used:.1%}" if used else "-"
        T.tell(f"{form.format(**row)}{share:>9}{row['memory_mib']:>9,.0f}{clocks(row)}")
    if traces:
        lines = keep_lines(Path(traces), traced, compiled, mesh)
        for trace in traced:
            T.tell(describe(trace, lines))
    return {"rows": rows, "programs": time_programs(cfg, compiled, state, copies, work)}


def time_programs(cfg: T.Config, compiled, state, copies, work: dict) -> list[dict]:
    """A row for each program of the run by itself; `work`: {one with gradients: (..., batches)}. An
    update sums what these leave of different batches, again and again."""
    runs = Counter(itertools.chain(*T.schedule(cfg).programs))
    of_stage = {key.stage: key for key in work}
    supplies = {key: itertools.cycle(batches) for key, (*_, batches) in work.items()}

    def gradients(key: T.Gradients):
        """(a batch, its gradients, its loss)."""
        batch = next(supplies[key])
        grads, loss, _ = compiled[key](copies, state["params"].get(T.NGRAMS), batch)
        return batch, grads, loss

    def update(key: T.Update) -> Callable:
        """A function that makes it once, and returns copies to wait for."""
        due = {x: () for x in T.updated(cfg, key.kind)}
        for at in key.stages or [0] * key.steps:
            batch, grads, _ = jax.block_until_ready(gradients(of_stage[at]))
            due = {x: (*waiting, grads[x]) for x, waiting in due.items()}

        def step():
            nonlocal state
            state, changed, _ = compiled[key](state, due, batch.hyper)
            return changed

        return step

    T.tell("by itself            times         ms        min        max")
    rows = []
    for key in runs:
        step = update(key) if key not in supplies else lambda key=key: gradients(key)[-1]
        row = {"name": str(key), "steps": runs[key]}
        row |= time_chunks(1, functools.partial(seconds_of, step))
        del step  # and the gradients that it holds
        rows.append(row)
        T.tell(f"{{name:17}}{{steps:>9,}}{TIMES}".format(**row) + clocks(row))
    return rows


def variants(cfg: T.Config, mesh, kernels, key: T.Gradients):
    """Yield (label, the program `key` lowered so): see above."""
    wide = dataclasses.replace(cfg, compute_dtype="float32")
    found = {"float32": (wide, T.PLAIN), "plain": (cfg, T.PLAIN), "all kernels": (cfg, kernels)}
    for field, plain in T.PLAIN._asdict().items():
        if getattr(kernels, field) is not plain:
            found[f"without {field}"] = cfg, kernels._replace(**{field: plain})
    for label, (own, chosen) in found.items():
        yield label, T.programs(own, mesh, chosen)[key].lower()
    tiled = mesh.devices.flat[0].platform == "gpu" and kernels.attend is not T.PLAIN.attend
    for tiles in TILES if tiled else ():
        attend = functools.partial(T.attend_gpu, T.Tiles(*tiles))
        other = kernels._replace(attend=functools.partial(T.attend_heads, attend))
        yield f"tiles {tiles}", T.programs(cfg, mesh, other)[key].lower()


def distance(got: list, expected: list) -> float:
    """The largest relative norm of the difference of arrays of LARGE sizes."""
    pairs = [[np.asarray(x, np.float32) for x in pair] for pair in zip(got, expected, strict=True)]
    large = [(np.linalg.norm(x - y), np.linalg.norm(y)) for x, y in pairs if y.size >= LARGE]
    return max(float(off / max(norm, 1e-30)) for off, norm in large)


def compare_kernels(stage: int, cfg: T.Config, mesh, kernels, tokens: tuple) -> dict:
    """ "rows" for `variants` of the first gradients of a stage: how far off, how long."""
    keys = (gradients for gradients, *_ in T.schedule(cfg).programs)
    key = next((key for key in keys if key.stage == stage), None)
    T.need(key, f"--kernels {stage}: stages are 0 to {len(cfg.stages) - 1}")
    batches = step_batches(cfg, mesh, cfg.boundaries[stage], *tokens)
    seed = np.uint32(cfg.seed)
    params = T.start_state(cfg, mesh)(seed)["params"]
    copies = jax.tree.map(np.asarray, T.start_copies(cfg, mesh)(params, seed))
    rng = np.random.default_rng(cfg.seed)

    def moved(x):
        return x.astype(np.float32) + 0.02 * rng.standard_normal(x.shape)

    for name, value in copies.items():
        if name != "signs":  # parameters that begin as zeros would hide what is behind them
            copies[name] = jax.tree.map(moved, value)
    T.tell(f"{str(key):36}       off         ms        min        max      MiB")
    rows = []
    for label, lowered in variants(cfg, mesh, kernels, key):
        try:
            program = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "tiles" not in label:  # other tiles may need too much memory
                raise
            T.tell(f"{label:36}  {str(error).splitlines()[0][:60]}")
            continue
        likes, table = program.args_info[0][:2]
        own = jax.tree.map(lambda x, like: x.astype(like.dtype), copies, likes)
        own = jax.device_put(own, program.input_shardings[0][0])
        step = functools.partial(program, own, params[T.NGRAMS].astype(table.dtype))
        losses = (step(batch)[1] for batch in itertools.cycle(batches))
        grads = jax.tree.leaves(step(batches[0])[0])
        if label == "float32":
            reference = grads
        timed = time_chunks(1, functools.partial(seconds_of, functools.partial(next, losses)))
        row = {"name": label, "off": distance(grads, reference), **timed}
        row["memory_mib"] = program.memory_analysis().peak_memory_in_bytes / 2**20
        rows.append(row)
        T.tell(f"{{name:36}}{{off:>10.1e}}{TIMES}{{memory_mib:>9,.0f}}".format(**row) + clocks(row))
    return {"rows": rows}


# Fields of a config on which none of the programs depends that are timed here.
APART = "preset seed target data devices prefetch checkpoint_every checkpoint_end log_every"
APART += " sample_tokens val_tokens val_every val_batch val_row"


def read_report(path: str, name: str, key: str) -> dict:
    """What is in a file; UserError if it lacks the `key` by which it is one of this `name`."""
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise T.UserError(f"{path}: {error}") from None
    T.need(key in content, f"{path} is no {name}, which comes here: it has no `{key}`")
    return content


def same_programs(predicted: dict, measured: dict):
    """UserError unless preflight.json and bench.json are of the same programs, and timed."""
    T.need("programs" in measured, "bench.json has no times of programs: run it without --kernels")
    kind = predicted["device_kind"]
    T.need(predicted["variants"][0].get("bound_ms"), f"preflight.json has no times for {kind}")
    pairs = {"device": (kind, measured["devices"]["kind"])}
    pairs["devices (--parts)"] = predicted["devices"], measured["parts"]
    for key in predicted["config"].keys() & measured["config"].keys() - {*APART.split()}:
        pairs[key] = predicted["config"][key], measured["config"][key]
    differ = [f"{what} {str(x)[:40]}, {str(y)[:40]}" for what, (x, y) in pairs.items() if x != y]
    T.need(not differ, f"predicted and measured are not the same: {'; '.join(differ)}")


def fit(rows: list[dict], yardstick: dict) -> str:
    """The numbers of the yardstick with which the predictions are nearest to what was measured."""
    names = [x for x in ("kernel", "rows", "code") if any(row["bound_ms"].get(x) for row in rows)]
    measured = np.array([row["ms"] for row in rows])
    # Each program counts alike: all is divided by what was measured.
    cycles = np.array([[row["bound_ms"].get(x, 0.0) / yardstick[x] for x in names] for row in rows])
    cycles = cycles.reshape(len(rows), len(names)) / measured[:, None]
    rest = np.array([row["links"] + row["bound_ms"].get("memory", 0.0) for row in rows])
    target = 1 - rest / measured
    if np.linalg.matrix_rank(cycles) < len(names) or len(rows) <= len(names):
        return f"{len(rows)} programs are too few to fit {', '.join(names)}."
    now = [yardstick[x] for x in names]
    found, variance = curve_fit(lambda x, *y: x @ y, cycles, target, now, bounds=(0, np.inf))
    each = zip(names, found, np.diag(variance) ** 0.5, now, strict=True)
    said = ", ".join(f"{x} {new:.2f} +- {off:.2f} (now {old:.2f})" for x, new, off, old in each)
    after, before = (f"{np.sqrt(np.mean((cycles @ x - target) ** 2)):.1%}" for x in (found, now))
    return f"Nearest to {len(rows)} programs: {said}; these are off by {after}, now by {before}."


def beside(predicted: dict, measured: dict) -> str:
    """Measured and predicted times as text: what preflight.json and bench.json have."""
    same_programs(predicted, measured)
    whole = measured["devices"]["count"] == measured["parts"]
    timed = {row["name"]: row for row in measured["programs"]}
    rows = []
    for row in predicted["variants"]:
        if row["name"] in timed and (whole or row["name"].startswith("grads")):
            links = row["link_floor_ms"] if whole else 0.0
            parts = row["predicted_ms"], links, row["moved_floor_ms"]
            each = " + ".join(f"{x:.2f}" for x in parts)
            own = {"links": links, "in_all": sum(parts), "each": each}
            rows.append(row | timed[row["name"]] | own)
    T.need(rows, "preflight.json and bench.json have no program in common")
    text = ["| program | times | measured ms | predicted | computed + links + moves | ratio |"]
    text.append("|---|---|---|---|---|---|")
    form = "| {name} | {steps:,} | {ms:.2f} ({ms_min:.2f} to {ms_max:.2f}) | {in_all:.2f} | {each}"
    text += [f"{form.format(**row)} | {row['ms'] / row['in_all']:.2f} |" for row in rows]
    seconds = [sum(row["steps"] * row[x] for row in rows) / 1e3 for x in ("ms", "in_all")]
    which = "All programs of training" if len(rows) == len(timed) else "These programs"
    sums = f"measured {seconds[0]:.1f} s, predicted {seconds[1]:.1f} s"
    text += ["", f"{which}, as often as they run: {sums}, ratio {seconds[0] / seconds[1]:.2f}."]
    text.append(fit(rows, predicted["yardstick"]))
    if not whole:
        few = f"{measured['devices']['count']} of {measured['parts']} parts"
        text.append(f"{few}: links, and updates of what is not cut, do not compare.")
    kernels = f"{predicted['kernels']}; rates: {predicted['rates']}", measured["choices"]["kernels"]
    for what, x, how in zip(("Predicted", "Measured"), (predicted, measured), kernels, strict=True):
        own = (f"{key} {x['versions'][key]}" for key in ("jax", "libtpu") if key in x["versions"])
        text.append(f"{what} with {', '.join(own)}; kernels: {how}.")
    if predicted["source_sha256"] != measured["source_sha256"]:
        text.append("train_gpt.py is not the same: it has changed since the prediction.")
    return "\n".join(text)


def bench(asked: T.Config, parts: int, timer: Callable, command: str) -> dict:
    """The content of bench.json: what `timer` finds of a run that `parts` devices share."""
    cfg, mesh = T.make_mesh(asked)
    device = mesh.devices.flat[0]
    parts = parts or mesh.size
    cfg = part_of(cfg, mesh.size, parts)
    more_parts = "use more --parts, or --set recompute=1" if parts > mesh.size else ""
    T.check_memory(cfg, mesh, more_parts)
    cfg = T.with_whole_loss(cfg, mesh, T.memory_limit(mesh))
    kernels, reason = T.pick_kernels(cfg, device)
    share = f"each with 1/{parts} of every batch"
    T.tell(f"{cfg.preset} on {mesh.size} x {device.device_kind}, {share}\nkernels: {reason}")
    folder = T.data_folder(cfg, T.tell)
    tokens = T.TokenStream(folder, "train", cfg.bos), T.token_bytes(cfg, folder)
    facts = T.run_facts(asked, mesh, command, {"kernels": reason}) | {"parts": parts}
    return facts | timer(cfg, mesh, kernels, tokens)


def main(argv=None) -> int:
    def run():
        parser = T.Parser(prog="bench.py", description=(__doc__ or "").split("\n")[0])
        T.add_config_options(parser)
        parser.add_argument("--parts", type=int, default=0, metavar="N", help="devices that share")
        parser.add_argument("--kernels", type=int, metavar="STAGE", help="with each on and off")
        files = {"nargs": 2, "metavar": ("PREFLIGHT.json", "BENCH.json")}
        parser.add_argument("--beside", **files, help="print predicted beside measured times")
        parser.add_argument("--dump", metavar="DIR", help="keep the figures as bench.json")
        parser.add_argument("--profile", metavar="DIR", help="keep a trace of steps of each stage")
        args = parser.parse_args(argv)
        if args.beside:
            predicted, measured = args.beside
            predicted = read_report(predicted, "preflight.json", "variants")
            print(beside(predicted, read_report(measured, "bench.json", "parts")))
            return 0
        T.need(args.parts >= 0, f"--parts {args.parts}: a positive number of devices, or none")
        # Or programs that were compiled before and kept would say lines of the source of then.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", bool(args.profile))
        for folder in filter(None, (args.dump, args.profile)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        timer = functools.partial(time_stages, traces=args.profile)
        if args.kernels is not None:
            T.need(not args.profile, "--profile traces the steps of stages: leave out --kernels")
            timer = functools.partial(compare_kernels, args.kernels)
        command = shlex.join(["python", *sys.argv] if argv is None else argv)
        facts = bench(T.resolve(args), args.parts, timer, command)
        if args.dump:
            Path(args.dump, "bench.json").write_text(json.dumps(facts, indent=1) + "\n")
        off = {row["name"]: row.get("off", 0.0) for row in facts["rows"]}
        if max(off.values()) > 2 * off.get("plain", 0.0) + 1e-3:
            T.tell("kernels are further off float32 than the plain form is")
            return 1

    return T.report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
