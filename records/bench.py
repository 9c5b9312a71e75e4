"""Time the steps of each stage, and each program, on the present hardware.

    python records/bench.py [PRESET] [--set ...] [--parts N] [--dump DIR] [--profile DIR]
    python records/bench.py [PRESET] ... --kernels STAGE
    python records/bench.py --beside PREFLIGHT.json BENCH.json

Prints milliseconds per step with its share of all updates (median, minimum and maximum of five
measurements on the first tokens of the data), tokens/s, share of the peak FLOP/s in bfloat16, and
memory of the gradients. Then it times each program separately.

--kernels times the gradients of one stage (the first is 0) without kernels, with all kernels,
without each kernel, and on NVIDIA GPUs with other attention tiles. "off" is the relative error
against float32 of the large parameter with the largest error. The exit status is 1 if the error is
more than twice the error without kernels.

--parts N times one of N devices, without their network: each device has 1/N of every batch and of
the n-gram table (65 GB in total). --dump DIR writes the figures to bench.json. --profile DIR writes
traces of some steps to DIR/PROGRAM, for xprof or Perfetto, and their time by line of train_gpt.py
to DIR/lines.json (see lines.py). The third form compares predictions by preflight.py with times in
bench.json, and fits the yardstick to the times (records/NOTES.md).

With nvidia-smi, each time is followed by the clock and power of the GPU, and by the reason for a
low clock: the same program took 51 or 56 ms at two clocks.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with PYTHONSAFEPATH
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for train_gpt.py

import train_gpt as T  # first, because it reports a missing jax in one line

# isort: split

import jax
import numpy as np
from lines import describe, keep_lines
from preflight import peak_flops

BATCHES = 4  # different batches on the devices, used in turn
CHUNKS = 5  # measurements; the median counts
LARGE = 1000  # numbers in a large parameter; errors of smaller ones depend on chance
SECONDS = 0.5  # minimum length of a measurement: waiting for its end takes far less than 1% of it
CLOCKS = "clocks.sm,power.draw,clocks_event_reasons.active"  # fields of nvidia-smi
# Bits of the last field: an idle GPU, and reasons for a low clock.
IDLE = 0x1
LIMITS = {0x4: "power", 0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power"}
# Block, tile, warps, stages: alternatives for attention on NVIDIA GPUs.
TILES = (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 2), (128, 32, 8, 3)


def part_of(cfg: T.Config, devices: int, parts: int) -> T.Config:
    """Return the config of `devices` of a run on `parts` devices: their share of each batch and of
    the n-gram table, and a small validation, which is not timed."""
    stages = []
    for i, stage in enumerate(cfg.stages):
        hint = f"use a divisor of {stage.rows}, the rows of stages.{i}"
        T.require(parts > 0 and stage.rows % parts == 0, f"--parts {parts}: {hint}")
        tokens = stage.batch_tokens * devices // parts
        stages.append(dataclasses.replace(stage, batch_tokens=tokens))
    part = {"stages": tuple(stages)}
    if cfg.ngram_rows:
        part["ngram_rows"] = max(4, cfg.ngram_rows * devices // parts // 2 * 2)
    if parts > devices:
        part["val_batch"] = cfg.val_row * devices
    return dataclasses.replace(cfg, **part)


# ---- Timing ------------------------------------------------------------------------------------


def time_step(step: Callable, period: int = 1) -> dict:
    """Return the milliseconds of a call of `step`, which returns arrays to wait for. Measurements
    have a multiple of `period` calls, so that each contains every kind of update."""

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        last = None
        for _ in range(calls):
            before, last = last, step()
            jax.block_until_ready(before)  # two calls in flight, as in training
        jax.block_until_ready(last)
        return time.perf_counter() - start

    seconds(2 * period)  # warm-up
    calls = period
    while seconds(calls) < SECONDS:
        calls *= 2
    with watch_clocks() as clocks:
        each = [1e3 * seconds(calls) / calls for _ in range(CHUNKS)]
    times = {"ms": float(np.median(each)), "ms_min": min(each), "ms_max": max(each)}
    return times | {"calls": calls} | clocks


@contextlib.contextmanager
def watch_clocks():
    """Give a dict that describes the busy NVIDIA GPUs after the block: medians "clock_mhz" and
    "watts", and "limited_by", the reasons for a low clock. It stays empty without nvidia-smi."""
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
    clocks, powers, limits = [], [], {}
    for line in re.findall(r"^(\d+), ([\d.]+), (0x\w+)$", text, re.MULTILINE):
        bits = int(line[2], 16)
        if not bits & IDLE:
            clocks.append(int(line[0]))
            powers.append(float(line[1]))
            limits |= {word: True for bit, word in LIMITS.items() if bits & bit}
    if clocks:
        found["clock_mhz"] = float(np.median(clocks))
        found["watts"] = float(np.median(powers))
        found["limited_by"] = list(limits)


def show(row: dict, *notes: str):
    """Print the times of a row, the notes, and the figures of watch_clocks."""
    times = f"{row['ms']:9.2f} ms ({row['ms_min']:.2f} to {row['ms_max']:.2f})"
    notes = [f"{row['name']:24}{times}", *notes]
    if "clock_mhz" in row:
        notes.append(f"{row['clock_mhz']:,.0f} MHz, {row['watts']:,.0f} W")
        if row["limited_by"]:
            notes.append(f"limited by {' and '.join(row['limited_by'])}")
    T.tell(", ".join(notes))


def step_batches(cfg: T.Config, mesh, step: int, stream, words: list[bytes]) -> list[T.Batch]:
    """Return the first batches of `stream`, prepared for `step`."""
    vocabulary = T.vocabulary(cfg, words)
    state = T.loader_state(cfg, mesh)
    batches = []
    for _ in range(BATCHES):
        batch, state = T.next_batch(cfg, mesh, stream, vocabulary, step, state)
        batches.append(batch)
    return batches


# ---- Steps of each stage, and single programs ----------------------------------------------------


class Trainer:
    """The programs of a run, and the state that they change."""

    def __init__(self, cfg: T.Config, mesh, kernels):
        self.cfg = cfg
        self.compiled, _ = T.compile_all(cfg, mesh, kernels, T.tell)
        seed = np.uint32(cfg.seed)
        self.state = T.start_state(cfg, mesh)(seed)
        self.copies = T.start_copies(cfg, mesh)(self.state["params"], seed)
        self.loss = None

    def gradients(self, key: T.Gradients, batch) -> dict:
        table = self.state["params"].get(T.NGRAMS)
        grads, self.loss, _ = self.compiled[key](self.copies, table, batch)
        return grads

    def update(self, key: T.Update, due: dict, hyper):
        self.state, changed, _ = self.compiled[key](self.state, due, hyper)
        self.copies |= changed
        return changed

    def steps(self, key: T.Gradients, updates: list[T.Update], batches) -> Callable:
        """Return a function that runs one training step, with the updates that are due then."""
        names = {update: T.updated(self.cfg, update.kind) for update in updates}
        waiting = {name: () for name in itertools.chain(*names.values())}
        batches = itertools.cycle(batches)
        numbers = itertools.count(1)

        def step():
            batch = next(batches)
            number = next(numbers)
            grads = self.gradients(key, batch)
            for name in waiting:
                waiting[name] += (grads[name],)
            del grads  # otherwise they stay in memory during the updates
            for update in updates:
                if number % update.steps == 0:
                    due = {name: waiting[name] for name in names[update]}
                    waiting.update(dict.fromkeys(due, ()))
                    self.update(update, due, batch.hyper)
                    del due
            return self.loss

        return step

    def alone(self, key, batches: dict) -> Callable:
        """Return a function that runs one program. An update gets gradients of different batches.
        `batches` maps each program with gradients to an endless iterator."""
        if isinstance(key, T.Gradients):
            return lambda: self.gradients(key, next(batches[key])) and self.loss
        of_stage = {gradients.stage: gradients for gradients in batches}
        due = {name: () for name in T.updated(self.cfg, key.kind)}
        for stage in key.stages or [0] * key.steps:
            batch = next(batches[of_stage[stage]])
            grads = jax.block_until_ready(self.gradients(of_stage[stage], batch))
            due = {name: (*earlier, grads[name]) for name, earlier in due.items()}
        return lambda: self.update(key, due, batch.hyper)


def usual_updates(cfg: T.Config, key: T.Gradients) -> list[T.Update]:
    """Return the most frequent update of each kind in the steps of `key`. Table updates that
    include gradients of other stages are left out."""
    counts = Counter()
    for gradients, *updates in T.schedule(cfg).programs:
        if gradients == key:
            counts.update(x for x in updates if {*x.stages} <= {key.stage})
    usual = {}
    for update, _ in counts.most_common():
        usual.setdefault(update.kind, update)
    return list(usual.values())


def time_stages(cfg: T.Config, mesh, kernels, tokens: tuple, traces=None) -> dict:
    """Time the steps of each stage ("rows") and each program ("programs"). `tokens` is
    (TokenStream, bytes of its tokens). With `traces`, write a profile of each stage there."""
    steps = {}  # program with gradients -> its steps in the run
    for number, (key, *_) in enumerate(T.schedule(cfg).programs):
        steps.setdefault(key, []).append(number)
    trainer = Trainer(cfg, mesh, kernels)
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    batches, rows, traced = {}, [], {}
    for key, numbers in steps.items():
        middle = numbers[len(numbers) // 2]
        batches[key] = step_batches(cfg, mesh, middle, *tokens)
        updates = usual_updates(cfg, key)
        step = trainer.steps(key, updates, batches[key])
        period = max(update.steps for update in updates)
        row = {"name": str(key), "stage": key.stage, "steps": len(numbers)}
        row |= time_step(step, period)
        if traces:
            jax.block_until_ready(trainer.state)
            with jax.profiler.trace(Path(traces, row["name"])):
                for _ in range(period):
                    jax.block_until_ready((step(), trainer.state))
            traced[row["name"]] = period, [key, *updates]
        rate = 1e3 * cfg.stages[key.stage].batch_tokens / row["ms"]
        used = rate * T.flops_per_token(cfg, middle) / (mesh.size * peak) if peak else None
        memory = trainer.compiled[key].memory_analysis().peak_memory_in_bytes
        row |= {"loss": float(trainer.loss), "tokens_per_second": rate, "utilization": used}
        row["memory_mib"] = (memory + T.resident_bytes(cfg, mesh, key)) / 2**20
        rows.append(row)
        share = f"{used:.1%} of bfloat16" if used else "peak unknown"
        show(row, f"{rate:,.0f} tokens/s", share, f"{row['memory_mib']:,.0f} MiB")
    if traces:
        lines = keep_lines(Path(traces), traced, trainer.compiled, mesh)
        for trace in traced:
            T.tell(describe(trace, lines))
    T.tell("each program separately:")
    batches = {key: itertools.cycle(each) for key, each in batches.items()}
    programs = []
    for key, runs in Counter(itertools.chain(*T.schedule(cfg).programs)).items():
        times = time_step(trainer.alone(key, batches))
        programs.append({"name": str(key), "steps": runs} | times)
        show(programs[-1], f"{runs:,} times in the run")
    return {"rows": rows, "programs": programs}


# ---- Kernels -----------------------------------------------------------------------------------


def variants(cfg: T.Config, mesh, kernels) -> dict[str, tuple]:
    """Return label -> (config, kernels) for --kernels."""
    wide = dataclasses.replace(cfg, compute_dtype="float32")
    found = {"float32": (wide, T.PLAIN), "plain": (cfg, T.PLAIN), "all kernels": (cfg, kernels)}
    for field, plain in T.PLAIN._asdict().items():
        if getattr(kernels, field) is not plain:
            found[f"without {field}"] = cfg, kernels._replace(**{field: plain})
    if mesh.devices.flat[0].platform == "gpu" and kernels.attend is not T.PLAIN.attend:
        for tiles in TILES:
            attend = functools.partial(T.attend_gpu, T.Tiles(*tiles))
            attend = functools.partial(T.attend_heads, attend)
            found[f"tiles {tiles}"] = cfg, kernels._replace(attend=attend)
    return found


def distance(got: list, expected: list) -> float:
    """Return the largest relative norm of the difference of arrays with at least LARGE numbers."""
    distances = []
    for x, y in zip(got, expected, strict=True):
        x, y = (np.asarray(array, np.float32) for array in (x, y))
        if y.size >= LARGE:
            distances.append(float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)))
    return max(distances)


def compare_kernels(stage: int, cfg: T.Config, mesh, kernels, tokens: tuple) -> dict:
    """Time the first gradients of a stage with all `variants`, and compare the results."""
    keys = [key for key, *_ in T.schedule(cfg).programs if key.stage == stage]
    T.require(keys, f"--kernels {stage}: the stages are 0 to {len(cfg.stages) - 1}")
    batches = step_batches(cfg, mesh, cfg.boundaries[stage], *tokens)
    seed = np.uint32(cfg.seed)
    params = T.start_state(cfg, mesh)(seed)["params"]
    copies = jax.tree.map(np.asarray, T.start_copies(cfg, mesh)(params, seed))
    rng = np.random.default_rng(cfg.seed)

    def with_noise(x):
        return x.astype(np.float32) + 0.02 * rng.standard_normal(x.shape)

    for name, value in copies.items():
        if name != "signs":  # weights that are initially 0 would hide the gradients of others
            copies[name] = jax.tree.map(with_noise, value)
    arrays = copies, params.get(T.NGRAMS)
    rows = []
    for label, (own_cfg, chosen) in variants(cfg, mesh, kernels).items():
        lowered = T.programs(own_cfg, mesh, chosen)[keys[0]].lower()
        try:
            program = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "tiles" not in label:  # tiles can exceed the shared memory
                raise
            T.tell(f"{label}: {str(error).splitlines()[0][:60]}")
            continue
        likes, places = (x[0][:2] for x in (program.args_info, program.input_shardings))
        own = jax.tree.map(lambda x, like: x.astype(like.dtype), arrays, likes)
        run = functools.partial(program, *jax.device_put(own, places))
        grads = jax.tree.leaves(run(batches[0])[0])
        if label == "float32":
            reference = grads
        row = {"name": label, "off": distance(grads, reference)}
        supply = itertools.cycle(batches)
        row |= time_step(lambda run=run, supply=supply: run(next(supply))[1])
        row["memory_mib"] = program.memory_analysis().peak_memory_in_bytes / 2**20
        rows.append(row)
        show(row, f"off by {row['off']:.1e}", f"{row['memory_mib']:,.0f} MiB")
    return {"rows": rows}


# ---- Predicted and measured times -------------------------------------------------------------


def fit(rows: list[dict], yardstick: dict) -> str:
    """Return the cycles per bundle with the least squared error, relative to the measured times."""
    names = [name for name in ("kernel", "rows", "code") if yardstick[name]]
    cycles, target = [], []
    for row in rows:
        bounds = row["bound_ms"]
        cycles.append([bounds.get(x, 0.0) / yardstick[x] / row["ms"] for x in names])
        target.append(1 - (row["links"] + bounds.get("memory", 0.0)) / row["ms"])
    found, _, rank, _ = np.linalg.lstsq(np.array(cycles), np.array(target))
    if rank < len(names) or len(rows) == rank:
        return f"{len(rows)} programs are too few to fit {', '.join(names)}."
    pairs = zip(names, found, strict=True)
    fitted = [f"{name} {new:.2f} (now {yardstick[name]:.2f})" for name, new in pairs]
    return f"Best fit to {len(rows)} programs: {', '.join(fitted)}."


def beside(predicted: dict, measured: dict) -> str:
    """Return a table of the times in preflight.json and bench.json."""
    is_right = "variants" in predicted and "programs" in measured
    T.require(is_right, "--beside needs preflight.json, then a bench.json made without --kernels")
    has_times = predicted["variants"][0].get("bound_ms")
    T.require(has_times, f"preflight.json has no times for {predicted['device_kind']}")
    parts = measured["parts"]
    ran_on = parts, measured["devices"]["kind"]
    target = predicted["devices"], predicted["device_kind"]
    T.require(
        ran_on == target, "measured for {} x {}, predicted for {} x {}".format(*ran_on, *target)
    )
    count = measured["devices"]["count"]
    timed = {row["name"]: row for row in measured["programs"]}
    rows = []
    text = ["| program | times | measured ms | predicted | computed + links + moves | ratio |"]
    text.append("|---|---|---|---|---|---|")
    for row in predicted["variants"]:
        comparable = count == parts or row["name"].startswith("grads")
        if row["name"] in timed and comparable:
            row = row | timed[row["name"]]
            row["links"] = row["link_floor_ms"] if count == parts else 0.0
            each = row["predicted_ms"], row["links"], row["moved_floor_ms"]
            row["sum"] = sum(each)
            row["ratio"] = row["ms"] / row["sum"]
            row["each"] = " + ".join(f"{x:.2f}" for x in each)
            form = "| {name} | {steps:,} | {ms:.2f} ({ms_min:.2f} to {ms_max:.2f}) "
            form += "| {sum:.2f} | {each} | {ratio:.2f} |"
            text.append(form.format(**row))
            rows.append(row)
    T.require(rows, "preflight.json and bench.json have no program in common")
    seconds = [sum(row["steps"] * row[x] for row in rows) / 1e3 for x in ("ms", "sum")]
    sums = f"measured {seconds[0]:.1f} s, predicted {seconds[1]:.1f} s"
    text += ["", f"These programs, over the run: {sums}, ratio {seconds[0] / seconds[1]:.2f}."]
    text.append(fit(rows, predicted["yardstick"]))
    if count != parts:
        text.append(f"{count} of {parts} devices: without links and updates, which do not compare.")
    different = [
        x for x, value in measured["config"].items() if predicted["config"].get(x) != value
    ]
    if predicted["source_sha256"] != measured["source_sha256"]:
        different.append("the source of train_gpt.py")
    if different:
        text.append(f"Different in the prediction: {', '.join(different)}.")
    return "\n".join(text)


# ---- The command line --------------------------------------------------------------------------


def bench(asked: T.Config, parts: int, timer: Callable, command: str) -> dict:
    """Return the contents of bench.json: facts about the run, and the result of `timer`."""
    cfg, mesh = T.make_mesh(asked)
    device = mesh.devices.flat[0]
    parts = parts or mesh.size
    cfg = part_of(cfg, mesh.size, parts)
    hint = "use more --parts, or --set recompute=1" if parts > mesh.size else ""
    T.check_memory(cfg, mesh, hint)
    cfg = T.with_whole_loss(cfg, mesh, T.memory_limit(mesh))
    kernels, reason = T.choose_kernels(cfg, device)
    T.tell(
        f"{cfg.preset} on {mesh.size} x {device.device_kind}, each with 1/{parts} of every batch"
    )
    T.tell(f"kernels: {reason}")
    folder = T.data_folder(cfg, T.tell)
    tokens = T.TokenStream(folder, "train", cfg.bos), T.token_bytes(cfg, folder)
    facts = T.run_facts(asked, mesh, command, {"kernels": reason}) | {"parts": parts}
    return facts | timer(cfg, mesh, kernels, tokens)


def run(argv: list[str] | None) -> int:
    parser = T.Parser(prog="bench.py", description=(__doc__ or "").split("\n")[0])
    T.add_config_options(parser)
    option = parser.add_argument
    option("--parts", type=int, default=0, metavar="N", help="devices that share the run")
    option("--kernels", type=int, metavar="STAGE", help="compare the kernels in this stage")
    files = {"nargs": 2, "metavar": ("PREFLIGHT.json", "BENCH.json")}
    option("--beside", **files, help="compare predicted with measured times")
    option("--dump", metavar="DIR", help="write bench.json")
    option("--profile", metavar="DIR", help="write a trace of some steps of each stage")
    args = parser.parse_args(argv)
    if args.beside:
        print(beside(*(json.loads(Path(path).read_bytes()) for path in args.beside)))
        return 0
    # With --profile, cached programs must not have the line numbers of an older source.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", bool(args.profile))
    for folder in filter(None, (args.dump, args.profile)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    timer = functools.partial(time_stages, traces=args.profile)
    if args.kernels is not None:
        T.require(not args.profile, "--profile traces steps of stages: omit --kernels")
        timer = functools.partial(compare_kernels, args.kernels)
    command = shlex.join(["python", *sys.argv] if argv is None else argv)
    facts = bench(T.resolve(args), args.parts, timer, command)
    if args.dump:
        Path(args.dump, "bench.json").write_text(json.dumps(facts, indent=1) + "\n")
    off = {row["name"]: row["off"] for row in facts["rows"] if "off" in row}
    if off and max(off.values()) > 2 * off["plain"] + 1e-3:
        T.tell("a kernel has a larger error than the computation without kernels")
        return 1
    return 0


def main(argv=None) -> int:
    return T.report_errors(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
