"""Will a run compile, fit and be fast on hardware that is not here?

    pip install "jax[tpu]>=0.10.2,<0.12"
    python records/preflight.py TARGET [PRESET] [--set KEY=VALUE ...] [--dump DIR] [--program NAME]

TARGET is v6e-1, v6e-4, v6e-8, v6e-16, v6e-64, v6e-256, h100x8, or a TPU topology NAME:AxB that
libtpu knows, such as v5e:2x4. No PRESET: `speedrun`. Every program of the run is compiled by the
real compiler, on any x86 machine, for devices that are absent: libtpu for TPUs; for GPUs the two
packages that an error names. It takes minutes of a core for each program with gradients. With
--program only those programs are compiled. The exit status is 1 if a program does not fit.

The figure that counts leads the report: seconds of the whole run, the sum of

    predicted  the compiler's own estimate of cycles, over all that a program executes: loops as
               often as they run, of a conditional the dearest branch. Pallas kernels, of which
               the compiler makes none, are counted in bundles of their final schedules, times 1.77
               to be on its scale: an upper bound, since blocks count that documents let them skip.
    links      what the device with the fewest links sends in collectives, at the link's rate; of an
               all-to-all what crosses the busiest cut through the mesh, if that takes longer: each
               byte goes all the way, and through the middle of a v6e-8 two links carry half of all.
               A floor, from bytes; nothing that hides it behind computation is known to be there.
    moves      bytes of gathers, scatters and sorts without an estimate, at the memory's rate. A
               floor.

Predictions of a compiler are not measurements. What there is to hold them against: made the same
way for an earlier JAX port the prediction was 0.295 s a step where its log has 0.307 s at 1024
tokens a row, 0.502 s for 0.424 s at 2048, and 667 s for the 612 s of its whole run. Use them to
rank changes, and quote ratios. Of hardware other than v6e there are no predictions, only memory and
collectives: libtpu writes no estimates for some, and H100's compiler makes none.

The tables, for one execution on one device:

    times     how often the program runs in the whole run
    seconds   that it took to compile
    args, temps, peak (GiB)   of the program: its arguments, what it makes meanwhile, and all of
              it at its worst; "+ state" lies beside it: training state and gradients that wait for
              their update, or, beside an update, the copies
    TFLOP     of the model, on all devices: 6 for each matmul weight and token (of the head, for the
              ids that the softmax runs over), none for attention's scores; "counted" is the
              compiler's count on one device: no kernels, loops once
    Mcycles   estimated, with those of the kernels, which the next column has
    ms, of peak   Mcycles in time; the model's FLOP in that time, of the peak in bfloat16
    links, moves  ms of what is said above
    MB        of whole buffers that cross the network: before a reduce-scatter, after an all-gather;
              "sent" by one device

A program that does not fit as it is asked for is compiled with the next of train_gpt.py's settings,
as in a run (recompute, then smaller micro-batches): the report says with what, and its row has it
as `settings`, which is null otherwise.
--dump DIR keeps the optimized programs and preflight.json: {"preset", "command", "versions",
"target", "device_kind", "devices", "links", "kernels", "total_steps", "total_tokens", "variants":
one row for each program, "predicted": totals of the run (of all programs only), "compile_seconds",
"cpu_seconds"}. What is not known is null.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

import jax

import train_gpt as T

TOPOLOGIES = {
    "v6e-1": "v6e:1x1",
    "v6e-4": "v6e:2x2",
    "v6e-8": "v6e:2x4",
    "v6e-16": "v6e:4x4",
    "v6e-64": "v6e:8x8",
    "v6e-256": "v6e:16x16",
}
GPU_TARGET = "h100x8"
# What the GPU compiler must know of an H100 SXM; figures of NVIDIA's data sheets.
H100 = """
device_description_str: "NVIDIA H100 80GB HBM3" platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3350000000000 device_memory_size: 80000000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
"""
# What libtpu would otherwise look for on a TPU's host; the last one keeps jax from asking for CUDA
# libraries that a machine without a GPU does not have.
NOBODY_HOME = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another preflight may run beside this one
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
# Estimated cycles per bundle: the same MLP has 5.29 M of them in XLA's fusions and 2.99 M bundles.
KERNEL_FACTOR = 1.77
COLLECTIVES = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"


class Hardware(NamedTuple):
    """One device of a kind, by its maker's data sheet; None for what has not been looked up."""

    memory: int | None = None  # bytes that programs and state can have together
    hbm: float | None = None  # bytes/s to and from memory
    link: float | None = None  # bytes/s that leave through one link
    clock: float | None = None  # Hz of the compiler's cycles


HARDWARE = {  # by device kind; its peak FLOP/s stand in train_gpt.py
    "TPU v6 lite": Hardware(int(31.25 * 2**30), 1.64e12, 56e9, 1.75e9),
    # jax takes 75 % of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
    "NVIDIA H100 80GB HBM3": Hardware(int(0.75 * 81_559 * 2**20), 3.35e12, 450e9),
}


def hardware(kind: str) -> Hardware:
    """What is known of a device kind."""
    return HARDWARE.get(kind, Hardware())


# ------------------------------------------------------------------------------------------------
# Devices that are not here
# ------------------------------------------------------------------------------------------------


def absent_devices(target: str) -> list:
    """Devices for compilation only: a key of TOPOLOGIES, a TPU topology NAME:AxB, or GPU_TARGET.

    UserError if there is no such hardware, or no compiler for it.
    """
    from jax.experimental import topologies

    for key, value in NOBODY_HOME.items():
        os.environ.setdefault(key, value)
    known = f"use {', '.join((*TOPOLOGIES, GPU_TARGET))} or a TPU topology such as v5e:2x4"
    name = TOPOLOGIES.get(target, target)
    if target == GPU_TARGET:
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            parts = " ".join(f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))
            raise T.UserError(f"{target} needs the GPU compiler: pip install {parts}")
        options = {"platform": "cuda", "topology_name": "h100", "topology": "1x1x8"}
        options["target_config"] = H100
    elif not re.fullmatch(r"\w+:\d+(x\d+)+", name):
        raise T.UserError(f"no such hardware as {target}: {known}")
    else:
        if importlib.util.find_spec("libtpu") is None:
            raise T.UserError(f'{target} needs the TPU compiler: pip install "jax[tpu]"')
        shape = [int(side) for side in name.split(":")[1].split("x")]
        bounds = (*shape, *[1] * (3 - len(shape)))  # one host, as on a v6e-8 VM
        options = {"platform": "tpu", "topology_name": name, "chips_per_host_bounds": bounds}
    try:
        return topologies.get_topology_desc(**options).devices
    except Exception as error:  # whatever the compiler library finds wrong with a name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise T.UserError(f"no such hardware as {target} ({reason}): {known}") from None


def link_count(devices) -> int:
    """Links of the device that has fewest: at a corner of a TPU mesh, one for each axis.

    In a v6e-256 axes close to rings, and each has two: there the floor of links is too high by 2.
    """
    places = [getattr(device, "coords", (i,)) for i, device in enumerate(devices)]
    return sum(len({*axis}) > 1 for axis in zip(*places, strict=True))


def all_to_all_load(devices) -> float:
    """What the busiest link of a TPU mesh carries one way in an all-to-all, at least, as a share of
    the buffer that each device sends parts of to all; 0 on a switch, which has no such link.

    A plane that cuts the mesh in two leaves a and b devices on its sides: a b / n buffers cross it
    each way, through as many links as there are lines of devices along the axis. On a v6e-8 (2x4)
    that is 2 buffers through the 2 links of the middle cut, so 1; of an all-gather's or a
    reduce-scatter's buffer each of the 2 links at a corner carries 7/16.
    """
    places = [device.coords for device in devices if hasattr(device, "coords")]
    loads = [0.0]
    for axis in zip(*places, strict=True):
        lines = len(places) / len({*axis})
        below = (sum(x < cut for x in axis) for cut in {*axis})
        loads += [a * (len(places) - a) / len(places) / lines for a in below]
    return max(loads)


# ------------------------------------------------------------------------------------------------
# Reading an optimized program
# ------------------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    """One instruction of an optimized program, and how often it runs."""

    name: str
    shape: str  # of its result, as text
    op: str
    rest: str  # operands, then attributes
    times: int = 1
    in_loop: bool = False

    @property
    def cycles(self) -> int:
        """The compiler's estimate for one execution; 0 if it makes none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found[1]) if found else 0

    @property
    def collective(self) -> str | None:
        """Which of COLLECTIVES it is. A TPU's reduce-scatter can be a fusion of another name."""
        if self.op == "fusion" and self.called("calls").startswith("all-reduce-scatter"):
            return "reduce-scatter"
        return next((kind for kind in COLLECTIVES if self.op in (kind, f"{kind}-start")), None)

    def called(self, key: str) -> str:
        """The name after `key=`, or ""."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""

    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])


def hlo_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """({computation: {name: Instruction}}, name of the entry) of an HLO module as text."""
    found, entry = {}, ""
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\) -> .* \{\n)", text)[1:]:
        head = re.match(r"(ENTRY )?%?([\w.\-]+) ", block)
        lines = re.findall(
            r"^ +(?:ROOT )?%?([^\s=]+) = (.*?[\])}]) ([a-z][\w\-]*)\((.*(?:\n(?!\}$|  ).*)*)",
            block,
            re.MULTILINE,
        )
        found[head[2]] = {line[0]: Instruction(*line) for line in lines}
        entry = head[2] if head[1] else entry
    return found, entry


def loop_trips(one: Instruction, computations) -> int | None:
    """How often a while loop runs: written beside it, or the constant that its counter meets."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest):
        return int(known[1])
    condition = computations[one.called("condition")]
    for test in condition.values():
        if test.op == "compare" and "direction=LT" in test.rest:
            bound = condition.get(test.operands()[1])
            if bound is not None and bound.op == "constant":
                return int(bound.rest.split(")")[0])
    return None


def walk(text: str, notes: set):
    """Yield (Instruction, its computation) for all that a program executes.

    Loops multiply `times`; of a conditional the dearest branch counts; of fusions only those
    without an estimate are entered. What makes the sum doubtful goes into `notes`.
    """
    computations, entry = hlo_computations(text)

    def visit(name, times, in_loop):
        for one in computations[name].values():
            yield one._replace(times=times, in_loop=in_loop), computations[name]
            if one.op == "while":
                trips = loop_trips(one, computations)
                if trips is None:
                    notes.add(f"loop {one.name}, of unknown length, is counted once")
                yield from visit(one.called("body"), times * (trips or 1), True)
            elif one.op == "conditional":
                names = re.findall(r"%([\w.\-]+)", one.rest.split("), ", 1)[1])
                branches = [list(visit(name, times, in_loop)) for name in names]
                yield from max(branches, key=lambda branch: sum(x.cycles for x, _ in branch))
            elif one.op in ("call", "fusion", "async-start") and not (one.cycles or one.collective):
                yield from visit(one.called("to_apply") or one.called("calls"), times, in_loop)

    return visit(entry, 1, False)


def array_bytes(shape: str, op: str = "") -> int:
    """Bytes of all arrays in an HLO type; of a -start's, without its u32[] for bookkeeping."""
    if op.endswith("-start"):
        shape = shape.replace("u32[]", "")
    total = 0
    for dtype, sides in re.findall(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)  # pred has none
        total += math.prod(map(int, filter(None, sides.split(",")))) * int(bits[0] if bits else 8)
    return total // 8


def collectives(instructions, devices: int) -> dict[str, dict]:
    """{kind: {count, bytes, largest_bytes, in_loop, sent_bytes}} of what one device executes.

    Bytes are those of the whole buffer: before a reduce-scatter, after the others. Of these each
    device must send, or receive, (n-1)/n; for an all-reduce, which is both, twice that.
    """
    found = {}
    for one, _ in instructions:
        kind = one.collective
        if kind is None:
            continue
        groups = re.search(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])", one.rest)
        n = devices if groups is None else int(groups[2] or len(groups[1].split(",")))
        size, cut = array_bytes(one.shape, one.op), kind in ("reduce-scatter", "all-gather")
        if one.op.endswith("-start") and kind != "all-reduce":  # its type has operands and results
            size = size * n // (n + 1) if cut else size // 2
        elif kind == "reduce-scatter":
            size *= n
        sent = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
        empty = {"count": 0, "bytes": 0, "largest_bytes": 0, "sent_bytes": 0, "in_loop": False}
        row = found.setdefault(kind, empty)
        row["count"] += one.times
        row["bytes"] += one.times * size
        row["sent_bytes"] += round(one.times * size * sent)
        row["largest_bytes"] = max(row["largest_bytes"], size)
        row["in_loop"] |= one.in_loop
    return found


def moved_bytes(instructions) -> int:
    """Bytes that gathers, scatters and sorts without an estimate read and write at least.

    A gather reads rows and writes them; a scatter reads updates, and reads and writes their rows.
    """
    total = 0
    for one, scope in instructions:
        if one.op in ("gather", "sort") and not one.cycles:
            total += one.times * 2 * array_bytes(one.shape)
        elif one.op == "scatter" and not one.cycles:
            names = one.operands()
            updates = names[-(len(names) // 2) :]  # after the arrays and one array of places
            total += one.times * 3 * sum(array_bytes(scope[name].shape) for name in updates)
    return total


def kernel_bundles(schedule: str) -> tuple[int, int]:
    """(instruction bundles that a Pallas kernel issues, loops of unknown length, counted once).

    In the text of its final schedule a bundle has an address, `LB` where a loop's body begins, a
    `>` for each loop around it (some are missing inside), and the constant in a loop's exit test.
    Regions that a predicate may skip count as executed: an upper bound.
    """
    head = r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})? *:([ >]*)\{"
    _, *parts = re.split(head, schedule, flags=re.MULTILINE)
    marks, texts = parts[::3], parts[2::3]
    depths = [marks.count(">") for marks in parts[1::3]]
    for i in reversed(range(len(depths) - 1)):
        if marks[i + 1] != "LB":
            depths[i] = max(depths[i], depths[i + 1])
    open_loops, unknown = [[0, 1]], 0  # from outside in: bundles, trips

    def close(depth: int):
        nonlocal unknown
        while len(open_loops) > depth + 1:
            bundles, trips = open_loops.pop()
            unknown += trips is None
            open_loops[-1][0] += bundles * (trips or 1)

    for mark, depth, bundle in zip(marks, depths, texts, strict=True):
        close(depth - (mark == "LB"))
        while len(open_loops) <= depth:
            open_loops.append([0, None])
        open_loops[-1][0] += 1
        test = r"totalorder (?:\(\S+\), )?%\S+, (\d+) /\* loop exit test"
        for trips in re.findall(test, bundle):  # an outer loop's can stand after the inner one's
            waiting = [loop for loop in open_loops if loop[1] is None]
            if waiting:
                waiting[-1][1] = int(trips)
    close(0)
    return open_loops[0][0], unknown


@contextlib.contextmanager
def schedule_dump():
    """A temporary folder to which libtpu, when it is loaded inside, writes its final schedules.

    All other passes are left out: they would be gigabytes, and twice the time.
    """
    before = os.environ.get("LIBTPU_INIT_ARGS")
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        only = "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        os.environ["LIBTPU_INIT_ARGS"] = f"{before or ''} {flags} {only}".strip()
        try:
            yield Path(folder)
        finally:
            os.environ.pop("LIBTPU_INIT_ARGS")
            if before is not None:
                os.environ["LIBTPU_INIT_ARGS"] = before


def kernel_cycles(instructions, folder: Path, notes: set) -> int | None:
    """Cycles of a program's Pallas kernels, on the scale of the estimates for the rest.

    From the schedules in `folder`, which it empties; of two under one name the later counts, for
    the one before may be of a program that did not fit. Equal kernels are compiled once, under the
    name of one of them. None if one has no schedule: libtpu was loaded before schedule_dump.
    """
    kernels = {one.name: one for one, _ in instructions if '"tpu_custom_call"' in one.rest}
    code = {x: re.findall(r'"body":"(.*?)"', one.rest) or x for x, one in kernels.items()}
    function = {name: re.sub(r"[.\d]+$", "", name) for name in kernels}
    counts, total = {}, 0
    for path in sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if name and name[1] in kernels:
            counts[name[1]], unknown = kernel_bundles(path.read_text(errors="replace"))
            if unknown:
                notes.add(f"kernel {name[1]}: {unknown} loops of unknown length counted once")
        path.unlink()
    for name, one in kernels.items():
        same_code = [counts[x] for x in counts if code[x] == code[name]]
        same_function = [counts[x] for x in counts if function[x] == function[name]]
        equal = same_code or same_function
        if not equal:
            notes.add(f"kernel {name} has no schedule: no prediction")
            return None
        total += one.times * counts.get(name, max(equal))
    return round(total * KERNEL_FACTOR)


def analyse(compiled, mesh, schedules: Path) -> dict:
    """What a compiled program tells of one execution on one device, for its row.

    None stands for what is not known. "flops" is the compiler's own count, which leaves out kernels
    and takes the body of a loop once.
    """
    devices, notes = [*mesh.devices.flat], set()
    known = hardware(devices[0].device_kind)
    instructions = [*walk(compiled.as_text(), notes)]
    found = collectives(instructions, mesh.size)
    sent = sum(row["sent_bytes"] for row in found.values())
    kernels = kernel_cycles(instructions, schedules, notes)
    cycles = sum(one.times * one.cycles for one, _ in instructions)
    cycles = cycles + kernels if cycles and kernels is not None else None
    links, across = link_count(devices) or 1, found.get("all-to-all", {"bytes": 0, "sent_bytes": 0})
    middle = across["bytes"] * all_to_all_load(devices) - across["sent_bytes"] / links
    loaded = sent / links + max(0, middle)  # bytes of the busiest link
    return {
        "flops": (compiled.cost_analysis() or {}).get("flops"),
        "bytes": T.program_bytes(compiled),
        "collectives": found,
        "estimated_cycles": cycles,
        "kernel_cycles": cycles and kernels,
        "predicted_ms": cycles and known.clock and 1e3 * cycles / known.clock,
        "link_floor_ms": known.link and 1e3 * loaded / known.link,
        "moved_floor_ms": known.hbm and 1e3 * moved_bytes(instructions) / known.hbm,
        "notes": sorted(notes),
    }


def refused(error: Exception) -> dict:
    """The same for a program that the compiler finds too large; raises any other error."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    lines = str(error).splitlines()
    reason = next((x.strip() for x in lines if "Used" in x or "xceeded" in x), lines[0])
    used = re.search(r"Used ([\d.]+)([KMG]) of", reason)
    sizes = dict.fromkeys(("arguments", "outputs", "aliased", "temporary", "peak"))
    if used:
        sizes["peak"] = round(float(used[1]) * 2 ** (10 * " KMG".index(used[2])))
    return {"flops": None, "bytes": sizes, "error": reason}


# ------------------------------------------------------------------------------------------------
# The whole run
# ------------------------------------------------------------------------------------------------


def executions(cfg: T.Config) -> Counter:
    """How many times each program runs in the whole run."""
    counts = Counter(name for step in range(cfg.steps) for name in T.programs_of(cfg, step))
    validations = 1 + sum(T.every(cfg.val_every, step) for step in range(cfg.steps))
    counts["finish"], counts["eval"] = 1, validations * (cfg.val_tokens // cfg.val_batch)
    return counts


def about(cfg: T.Config, name: str) -> dict:
    """What a program takes, for its row of preflight.json; "what" says it for a reader."""
    table, steps = T.param_table(cfg), T.updates(cfg)
    if name in (*steps, "finish"):
        changed = [x for x, row in table.items() if row.tails or row.rescaled]
        changed = T.updated(cfg, name) if name in steps else changed
        what = "averages" if name == "finish" else "update"
        what += f" of {len(changed)} parameters, {sum(table[x].count for x in changed):,} numbers"
        span = T.events(cfg).get(name)
        if span:
            what += f", {len(span)} steps of stages {span[0]}-{span[-1]}"
        elif steps.get(name, 1) > 1:
            what += f", every {steps[name]} steps"
        return {"what": what, "tokens_per_step": 0}
    batch, row, windows, targets, ids = cfg.val_batch, cfg.val_row, cfg.val_windows, 1, 0
    if name != "eval":
        at, ids = T.grads_shapes(cfg)[int(name.removeprefix("grads"))]
        stage = cfg.stages[at]
        batch, row, windows = stage.batch_tokens, stage.row_tokens, stage.windows
        targets = len(stage.weights) + any(stage.prefix)
    what = f"{batch:,} tokens, rows of {row:,}, windows {windows[0]}/{windows[1]}"
    if targets > 1 or ids:
        what += f", {targets} target{'s' * (targets > 1)}" + (f" of {ids:,} ids" if ids else "")
    return {
        "what": what,
        "tokens_per_step": batch,
        "batch_tokens": batch,
        "row_tokens": row,
        "windows": windows,
        "targets": targets,
        "candidates": ids,
    }


def model_flops(cfg: T.Config, name: str, of: dict) -> float:
    """Model FLOPs of a program, which takes what `about` says, on all devices."""
    if not of["tokens_per_step"]:
        return 0.0
    alike = (dataclasses.replace(s, candidates=(of["candidates"],)) for s in cfg.stages)
    each = T.flops_per_token(dataclasses.replace(cfg, stages=tuple(alike)), 0)
    passes = 1 / 3 if name == "eval" else 1  # a forward pass only
    return passes * each * of["tokens_per_step"]


def preflight_row(cfg, mesh, kernels, name: str, schedules: Path, dump: Path | None, say) -> dict:
    """Compile a program; its row of preflight.json. Model FLOPs are those of all devices."""
    kind, start = mesh.devices.flat[0].device_kind, time.perf_counter()
    limit, peak = hardware(kind).memory, T.peak_flops(kind)
    of = about(cfg, name)
    row = {"name": name, "steps": executions(cfg)[name], **of}
    row["model_flops"] = model_flops(cfg, name, of)
    row["resident_bytes"] = T.resident_bytes(cfg, mesh, name)
    row |= {"device_bytes_limit": limit, "settings": None, "hlo": None}
    try:
        compiled, changes, _ = T.compile_fitting(cfg, mesh, kernels, name, limit, say)
    except jax.errors.JaxRuntimeError as error:
        return row | refused(error) | {"compile_seconds": round(time.perf_counter() - start, 1)}
    row["compile_seconds"] = round(time.perf_counter() - start, 1)
    row["settings"] = changes or None
    row |= analyse(compiled, mesh, schedules)
    seconds = (row["predicted_ms"] or 0) / 1e3
    known = seconds and peak
    row["utilization"] = row["model_flops"] / (mesh.size * peak * seconds) if known else None
    if dump:
        row["hlo"] = f"{name}.hlo"
        (dump / row["hlo"]).write_text(compiled.as_text())
    return row


def whole_run(rows: list[dict]) -> dict:
    """Totals of all executions of the run; None where a program has none."""
    evals = [row for row in rows if row["name"] == "eval"]
    training = [row for row in rows if row["name"] != "eval"]
    grads = [row for row in rows if row["name"].startswith("grads")]
    others = [row for row in training if row not in grads and row["name"] != "finish"]

    def seconds(key, rows):
        each = [(row.get(key), row["steps"]) for row in rows]
        return None if None in [ms for ms, _ in each] else sum(ms * n for ms, n in each) / 1e3

    totals = {
        "train_seconds": seconds("predicted_ms", training),
        "train_link_floor_seconds": seconds("link_floor_ms", training),
        "train_moved_floor_seconds": seconds("moved_floor_ms", training),
    }
    rate = None
    if totals["train_seconds"]:
        update = 1e3 * seconds("predicted_ms", others) / sum(row["steps"] for row in grads)
        rates = [row["tokens_per_step"] / (row["predicted_ms"] + update) for row in grads]
        rate = round(1e3 * max(rates))
    known = None not in totals.values()
    return {
        "sum_seconds": sum(totals.values()) if known else None,
        **totals,
        "eval_seconds": seconds("predicted_ms", evals),
        "loader_tokens_per_second": rate,
        "model_flops": sum(row["model_flops"] * row["steps"] for row in grads),
    }


# ------------------------------------------------------------------------------------------------
# The report
# ------------------------------------------------------------------------------------------------


def number(value, form=".1f", unit=1.0) -> str:
    """A figure of a table; - if it is not known."""
    return "-" if value is None else format(value / unit, form)


def line(name: str, *cells) -> str:
    """A row of a table: the program, then cells of 8 characters."""
    return f"{name:9}" + "".join(f" {cell:>8}" for cell in cells)


def lead(report: dict) -> str:
    """The figure that counts, and what else there is to say about the whole run."""
    run, where = report["predicted"], f"{report['devices']} x {report['device_kind']}"
    spent = f"compiled in {report['compile_seconds']:.0f} s"
    spent += f", {report['cpu_seconds'] / 60:.1f} minutes of CPU"
    if run is None:
        return f"Some programs on {where}; the sum for a run needs all (no --program)\n  {spent}"
    keys = "train_seconds", "train_link_floor_seconds", "train_moved_floor_seconds"
    parts = zip(("predicted", "links", "moves"), (run[key] for key in keys), strict=True)
    parts = " + ".join(f"{name} {number(seconds)}" for name, seconds in parts)
    total = "unknown" if run["sum_seconds"] is None else f"{run['sum_seconds']:.1f} s"
    flops, peak = run["model_flops"], T.peak_flops(report["device_kind"])
    tokens = f"{report['total_steps']:,} steps, {report['total_tokens']:,} tokens, {flops:.3e} FLOP"
    if run["train_seconds"] and peak:
        share = flops / (report["devices"] * peak * run["train_seconds"])
        tokens += f", {share:.1%} of the peak in what is predicted"
    lines = [f"The whole run on {where}: {total} = {parts}", tokens]
    if validation := run["eval_seconds"]:
        lines.append(f"validation {validation:.1f} s, while the clock stands still")
    if rate := run["loader_tokens_per_second"]:
        lines.append(f"the loader must sustain {rate:,} tokens/s")
    return "\n  ".join([*lines, spent])


def describe(report: dict) -> str:
    """The report of preflight as totals and tables, at most 100 columns wide."""
    rows = report["variants"]
    programs = [f"{'program':9} {'':72} {'times':>8} {'seconds':>8}"]
    memory = [line("GiB", "args", "temps", "peak", "+ state")]
    costs = [line("", "TFLOP", "counted", "Mcycles", "kernels", "ms", "of peak", "links", "moves")]
    sent = [line("network", "", "", "count", "MB", "largest", "sent", "in loop")]
    for row in rows:
        name, settings = row["name"], row["settings"]
        seconds = f"{row['compile_seconds']:.0f}"
        programs.append(f"{name:9} {row['what']:72} {row['steps']:>8,} {seconds:>8}")
        sizes = [row["bytes"][key] for key in ("arguments", "temporary", "peak")]
        sizes = [number(size, ".2f", 2**30) for size in (*sizes, row["resident_bytes"])]
        how = "  with " + " ".join(f"{k}={v}" for k, v in settings.items()) if settings else ""
        memory.append(line(name, *sizes) + how)
        flops = number(row["model_flops"], ".1f", 1e12), number(row["flops"], ".2f", 1e12)
        cycles = (number(row.get(key), ".1f", 1e6) for key in ("estimated_cycles", "kernel_cycles"))
        spent = number(row.get("predicted_ms")), number(row.get("utilization"), ".1%")
        floors = number(row.get("link_floor_ms")), number(row.get("moved_floor_ms"))
        costs.append(line(name, *flops, *cycles, *spent, *floors))
        for kind, found in row.get("collectives", {}).items():
            keys = "bytes", "largest_bytes", "sent_bytes"
            size = (f"{found[key] / 1e6:,.1f}" for key in keys)
            loop = "yes" if found["in_loop"] else "no"
            sent.append(f"{name:9} {kind:17}" + line("", found["count"], *size, loop)[9:])
    notes = [f"{row['name']}: {note}" for row in rows for note in row.get("notes", ())]
    legend = (
        "Predicted by the compiler, not measured, and of kernels an upper bound; for one execution "
        "on one\ndevice, but TFLOP on all. What the columns mean, and how far to trust them: the "
        "docstring of\nrecords/preflight.py."
    )
    tables = (programs, memory, costs, sent, notes, [legend])
    return "\n\n".join([lead(report), *("\n".join(table) for table in tables if table)])


def verdict(report: dict) -> tuple[bool, list[str]]:
    """(Whether all programs fit the device, the lines that say so or by how much they do not)."""
    limit, lines = hardware(report["device_kind"]).memory or math.inf, []
    memory = f"the {limit / 2**30:.2f} GiB of a device"
    for row in report["variants"]:
        needs = (row["bytes"]["peak"] or 0) + row["resident_bytes"]
        over = f"{(needs - limit) / 2**30:.2f} GiB over {memory}" if needs > limit else ""
        if reason := ", ".join(filter(None, (over, row.get("error")))):
            lines.append(f"{row['name']} does not fit: {reason}")
    if lines:
        return False, lines
    which = "these" if report["predicted"] is None else "all"
    return True, [f"{which} fit {memory}" if limit < math.inf else "its memory is not known here"]


def preflight(cfg, target: str, names=(), dump: Path | None = None, command="", say=T.tell) -> bool:
    """Compile the run's programs for absent hardware, report what they need; whether they fit.

    All of them, or those in `names`. With `dump`, preflight.json and the optimized HLO of each
    program go there.
    """
    if dump:
        T.make_folder(dump, "--dump")
    with schedule_dump() as schedules:
        devices = absent_devices(target)
        mesh = T.make_mesh(cfg, devices)
        kernels, reason = T.pick_kernels(cfg, devices[0])
        say(f"kernels: {reason}")
        every = [*T.programs(cfg, mesh, kernels)]
        for name in names:
            if name not in every:
                raise T.UserError(f"--program {name}: there are {', '.join(every)}")
        rows, cpu = [], sum(os.times()[:4])  # of this process and of those that it starts
        for name in names or every:
            rows.append(preflight_row(cfg, mesh, kernels, name, schedules, dump, say))
            say(f"{name} compiled in {rows[-1]['compile_seconds']:.0f} s")
    report = {
        "preset": cfg.preset,
        "command": command,
        "versions": T.versions(),
        "target": target,
        "device_kind": devices[0].device_kind,
        "devices": mesh.size,
        "links": link_count([*mesh.devices.flat]),
        "kernels": reason,
        "total_steps": cfg.steps,
        "total_tokens": cfg.total_tokens,
        "variants": rows,
        "predicted": whole_run(rows) if len(rows) == len(every) else None,
        "compile_seconds": round(sum(row["compile_seconds"] for row in rows), 1),
        "cpu_seconds": round(sum(os.times()[:4]) - cpu, 1),
    }
    if dump:
        (dump / "preflight.json").write_text(json.dumps(report, indent=1) + "\n")
    fits, lines = verdict(report)
    say("\n" + "\n".join([describe(report), "", *lines]))
    return fits


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""

    def run():
        parser = T.Parser(prog="preflight.py", description=__doc__.split("\n")[0])
        parser.add_argument("target", metavar="TARGET", help="v6e-8, h100x8, v5e:2x4 or the like")
        T.add_config_options(parser)
        parser.add_argument("--dump", metavar="DIR", help="keep preflight.json and the programs")
        parser.add_argument(
            "--program",
            nargs="+",
            action="extend",
            default=[],
            metavar="NAME",
            help="only these, such as grads0 or anvil",
        )
        args = parser.parse_args(argv)
        if args.dump == "":
            raise T.UserError("--dump is empty: name a folder, or drop it")
        args.preset = "speedrun" if args.preset is None else args.preset  # what TARGET would run
        jax.config.update("jax_platforms", "cpu")  # whatever is here: all that counts is absent
        dump = Path(args.dump) if args.dump else None
        command = shlex.join(["python", *sys.argv] if argv is None else argv)
        names = [*dict.fromkeys(args.program)]
        return 0 if preflight(T.resolve(args), args.target, names, dump, command) else 1

    return T.report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
