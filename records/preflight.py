"""Predict memory and time of a run on hardware that is not present.

    pip install -r requirements.txt "jax[tpu]"
    python records/preflight.py TARGET [PRESET] [--set ...] [--program NAME] [--dump DIR|--save DIR]

TARGET is a TPU slice by Google's name (v6e-8, v5e-1; v4-8 and v5p-8 have four chips), a TPU
topology (v5e:2x4), or GPUs (h100x8; an unknown name lists them all). The default PRESET is
`speedrun`. The real compiler compiles every program of the run, or only those that --program names,
on any x86 machine. A program with gradients takes minutes of a core. The exit status is 1 if a
program does not fit.

--dump DIR writes the optimized programs and preflight.json with all figures (null: unknown). --save
DIR writes the executables and predicts nothing: copy DIR to the target, where `train_gpt.py --cache
DIR` loads executables of the same programs, versions and topology (not yet tried on a TPU).

The predicted seconds of a run are the sum of three parts: computing ("predicted"), communication
that no computing hides ("links"), and copies by SparseCores and other units ("moves", a lower
bound). They are known for a v6e and a v5e. For one GPU they follow from FLOPs and bytes, at the
shares of the data sheet that an H200 reached. records/NOTES.md describes the model and its errors.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with PYTHONSAFEPATH
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for train_gpt.py

import train_gpt as T  # first, because it reports a missing jax in one line

# isort: split

import jax
from jax.experimental import topologies

SHEETS = json.loads((Path(__file__).parent / "hardware.json").read_text())
GPUS = SHEETS["gpus"]  # name in TARGET -> (device kind, compute capability, facts)
CORES = SHEETS["cores"]  # compute capability -> facts
SLICES = SHEETS["slices"]  # TPU -> number in TARGET -> chips along each axis
PEAK_FLOPS = SHEETS["peak_flops"]  # part of a device kind -> dense bfloat16 FLOP/s
# Without these, libtpu looks for the host of a TPU, and jax for CUDA libraries.
NO_HOST = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
NO_HOST |= {"TPU_ACCELERATOR_TYPE": "v6e-8", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
NO_HOST |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
# libtpu writes its final schedules to a folder; the schedules of all passes would take gigabytes.
SCHEDULES = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true "
SCHEDULES += "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
RING = 16  # an axis of a v6e with this many chips is a ring (only in a v6e-256)
RENAMES = "bitcast", "get-tuple-element", "tuple", "opt-barrier"
# Operations and custom calls that take no time.
FREE = *RENAMES, "parameter", "constant", "after-all", "partition-id", "while"
NO_WORK = "ConcatBitcast", "AssumeGatherIndicesInBound", "AllocateBuffer"
NO_WORK += "PrepareAsyncCallStart", "PrepareAsyncCallDone"
# Operations that need the full operands for any part of their result.
FULL = "dot", "convolution", "reduce", "reduce-window", "sort", "custom-call"
WRAPPERS = "run_kernel", "run_tiles"  # functions of train_gpt.py that call every kernel
COLLECTIVES = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"


def peak_flops(kind: str) -> float:
    """Return the peak FLOP/s of a device kind by its data sheet; 0 if it is unknown."""
    longest = max((part for part in PEAK_FLOPS if part in kind), key=len, default="")
    return PEAK_FLOPS.get(longest, 0.0)


class Yardstick(NamedTuple):
    """Factors from a compiler's counts to time on a v6e. For GPUs: from FLOPs and bytes, at the
    rates of the data sheet, to time."""

    kernel: float  # cycles per bundle of a Pallas kernel
    rows: float  # cycles per bundle of a gather, a scatter or a sort
    code: float  # cycles per bundle of other code, or per cycle that the compiler estimates
    memory: float  # factor on the seconds at the measured rate
    link: float  # factor on the seconds at the measured rate


# Low end, middle and high end, fitted to published times on a v6e (table in records/NOTES.md).
LOW = Yardstick(1.0, 1.0, 1.0, 0.82, 0.87)
MIDDLE = Yardstick(1.3, 1.3, 1.05, 1.0, 1.0)
HIGH = Yardstick(1.6, 1.8, 1.15, 1.28, 1.55)
# Shares of the data sheet that commit 21b3d1f reached on an H200 with attention (if it skipped no
# document), with other matmuls, and with memory.
ON_GPU = Yardstick(kernel=1 / 0.5, rows=0.0, code=1 / 0.85, memory=1 / 0.7, link=0.0)
# A GPU's band is the middle divided and multiplied by a factor. Programs were within 1.25 on the
# GPUs that were timed; 1.5 for other GPUs is a guess. HARDWARE.md uses the first factor for times
# that it calculates from measured parts (records/NOTES.md, "Eight H100s").
GPU_BANDS = {"measured": 1.25, "data sheet": 1.5}
GPUS_TIMED = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


class Hardware(NamedTuple):
    """One device, by its data sheet unless noted."""

    memory: float = math.inf  # bytes for programs and state
    hbm: float | None = None  # bytes/s of its memory
    link: float | None = None  # bytes/s that leave through one link
    clock: float | None = None  # compiler cycles per second; None: times are not predicted
    peak: int = 0  # bfloat16 FLOP of its matrix units per cycle
    rates: str | None = None  # "measured" or "data sheet": source of hbm and link
    yardsticks: tuple = (LOW, MIDDLE, HIGH)
    is_gpu: bool = False


HARDWARE = defaultdict(Hardware)  # by device kind
for kind, facts in SHEETS["tpus"].items():
    HARDWARE[kind] = Hardware(**facts)
for kind, _, facts in GPUS.values():
    rates = "measured" if kind in GPUS_TIMED else "data sheet"
    band = 1 / GPU_BANDS[rates], 1, GPU_BANDS[rates]
    HARDWARE[kind] = Hardware(
        memory=facts["device_memory_size"],
        hbm=facts["memory_bandwidth"],
        clock=peak_flops(kind) or None,  # its cycles are FLOPs
        peak=1,
        rates=rates,
        yardsticks=tuple(Yardstick(*(x * factor for x in ON_GPU)) for factor in band),
        is_gpu=True,
    )


def tpu_options(target: str) -> dict | None:
    """Return libtpu's description of NAME-NUMBER or of a topology NAME:AxB; None for other text."""
    name, _, number = target.partition("-")
    name = "v5e" if name == "v5litepod" else name  # in Google's accelerator types
    if number in SLICES.get(name, {}):
        target = f"{name}:{SLICES[name][number]}"
    if not re.fullmatch(r"\w+:\d+(x\d+)+", target):
        return None
    shape = [int(side) for side in target.split(":")[1].split("x")]
    one_host = len(shape) == 2 and math.prod(shape) <= 8  # as in a v6e-8; other hosts: four chips
    options = {"platform": "tpu", "topology_name": target}
    options["chips_per_host_bounds"] = (*shape, 1) if one_host else (2, 2, 1)
    if name.startswith("v4"):
        options["chip_config_name"] = "megacore"  # both cores of a chip are one device
    return options


def gpu_options(target: str) -> dict | None:
    """Return the GPU compiler's description of NAMExCOUNT; None for other text."""
    name, _, count = target.rpartition("x")
    if name not in GPUS or not count.isdecimal() or int(count) < 1:
        return None
    kind, capability, facts = GPUS[name]
    major, minor = capability.split(".")
    facts = facts | CORES[capability] | SHEETS["every_gpu"]
    fields = " ".join(f"{field}: {value}" for field, value in facts.items())
    config = f"""device_description_str: "{kind}" platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }} gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }} {fields} }}"""
    hosts = int(count) // 8 if int(count) % 8 == 0 else 1
    topology = f"1x{hosts}x{int(count) // hosts}"
    options = {"platform": "cuda", "topology_name": name, "topology": topology}
    return options | {"target_config": config}


def absent_devices(target: str) -> list:
    """Return devices for compilation only. Raise UserError if the target or its compiler is
    unknown."""
    for key, value in NO_HOST.items():
        os.environ.setdefault(key, value)
    gpus = gpu_options(target)
    options = gpus or tpu_options(target)
    targets = "use a TPU such as v6e-8, a topology such as v5e:2x4, or a GPU such as h100x8 "
    targets += f"(TPUs: {', '.join(SLICES)}; GPUs: {', '.join(GPUS)})"
    T.require(options, f"unknown hardware {target}: {targets}")
    packages = '"jax[tpu]"'
    if gpus:
        packages = f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
    try:
        return topologies.get_topology_desc(**options).devices
    except Exception as error:  # the compilers raise many types
        hint = f"install the compiler (pip install {packages}), or {targets}"
        raise T.UserError(f"cannot compile for {target} ({error!r:.200}): {hint}") from None


def network(devices) -> tuple[int, float]:
    """Return (links of a chip at a corner of a TPU mesh, load of the busiest link in an
    all-to-all). The load is one way, as a share of the buffer of a device: a plane that splits the
    mesh into a and b of n devices is crossed by a b / n buffers each way."""
    count = len(devices)
    links, loads = 0, [0.0]
    for axis in zip(*(device.coords for device in devices), strict=True):
        side = len({*axis})
        rings = side >= RING  # a ring has two links per chip
        links += (side > 1) + rings
        lines = count / side * (2 if rings else 1)
        for cut in {*axis}:
            below = sum(x < cut for x in axis)
            loads.append(below * (count - below) / count / lines)
    return links, max(loads)


# ---- Reading an optimized program: instructions, and their bytes in memory ---------------------


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Instruction:
    """One instruction of an optimized program, and how often it runs."""

    name: str
    shape: str  # of its result, as text
    op: str
    rest: str  # operands, then attributes
    root: bool
    fused: bool  # whether it is part of a fusion
    scope: dict  # computation that contains it: name -> Instruction
    inner: dict | None  # computation that it calls: name -> Instruction
    times: int = 1

    @property
    def cycles(self) -> int:
        """Cycles of one execution by the compiler's estimate; 0 for no estimate or 2^63 - 1."""
        found = re.search(r'"estimated_cycles":"(\d{1,18})"', self.rest)
        return int(found[1]) if found else 0

    @property
    def kernel(self) -> bool:
        """Whether it is a Pallas kernel for TPUs."""
        return self.op == "custom-call" and '"tpu_custom_call"' in self.rest

    def called(self, key: str) -> str:
        """The name after `key=`, or ""."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""

    @functools.cached_property
    def operands(self) -> list["Instruction"]:
        return [self.scope[name] for name in re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])]

    @property
    def contents(self) -> list["Instruction"]:
        """Instructions that a fusion fuses, or that a call starts."""
        return [*self.inner.values()] if self.op in ("fusion", "call-start") and self.inner else []

    def inputs(self) -> list["Instruction"]:
        """The operands; RENAMES are replaced with their own operands."""
        found = []
        for one in self.operands:
            found += one.inputs() if one.op in RENAMES else [one]
        return found

    @functools.cached_property
    def transfer(self) -> "Instruction | None":
        """The collective that it is, executes or starts."""
        if self.op.removesuffix("-start") in COLLECTIVES:
            return self
        return next((one.transfer for one in self.contents if one.transfer), None)

    @property
    def collective(self) -> str | None:
        """Its kind of COLLECTIVES. A TPU's reduce-scatter can be a fusion around an all-reduce."""
        if self.transfer and self.called("calls").startswith("all-reduce-scatter"):
            return "reduce-scatter"
        return self.transfer and self.transfer.op.removesuffix("-start")


def hlo_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Parse an HLO module; return (computation -> name -> Instruction, name of the entry)."""
    _, *parts = re.split(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{\n", text, flags=re.M)
    names = parts[1::3]
    found = {name: {} for name in names}
    fused = {*re.findall(r" fusion\(.*?\bcalls=%?([\w.\-]+)", text)}
    # ROOT, name, shape, operation, and the rest up to the next instruction
    line_form = r"^ +(ROOT )?%?([^\s=]+) = (.*?[\])}]) ([a-z][\w\-]*)\((.*(?:\n(?!\}$|  ).*)*)"
    for computation, body in zip(names, parts[2::3], strict=True):
        scope = found[computation]
        for root, name, shape, op, rest in re.findall(line_form, body, re.M):
            if op == "call-update":  # jax 0.12: it has the operands of the call, which starts here
                begun, operands = re.match(r"%([\w.\-]+)(?:, )?(.*)", rest, re.S).groups()
                start = scope.pop(begun)
                op, rest = start.op, operands + start.rest.removeprefix(")")
            called = re.search(r"\b(?:calls|to_apply)=%?([\w.\-]+)", rest)
            inner = called and found.get(called[1])
            is_fused = computation in fused
            scope[name] = Instruction(name, shape, op, rest, bool(root), is_fused, scope, inner)
    entry = parts[0::3].index("ENTRY ")
    return found, names[entry]


def loop_trips(one: Instruction, computations) -> int:
    """Return how often a while loop runs: the constant in its condition, or (on GPUs, which fuse
    the condition) the count in its attributes; 1 if unknown."""
    for test in computations[one.called("condition")].values():
        if test.op == "compare" and "direction=LT" in test.rest:
            bound = re.match(r"\d+(?=\))", test.operands[1].rest)
            return int(bound[0]) if bound else 1
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest)
    return int(known[1]) if known else 1


def walk(computations, name: str, times: int = 1):
    """Yield the Instructions that a computation executes, in order. Loops multiply `times`; a
    fusion is one instruction. Raise UserError for a conditional."""
    for one in computations[name].values():
        T.require(one.op != "conditional", f"{one.name}: conditionals are not supported")
        one = dataclasses.replace(one, times=times)
        yield one
        if one.op == "while":
            yield from walk(computations, one.called("body"), times * loop_trips(one, computations))
        elif one.op == "call-start" and not one.transfer:
            yield from walk(computations, one.called("to_apply") or one.called("calls"), times)


class Array(NamedTuple):
    """One array of an HLO type."""

    count: int  # numbers
    size: int  # bytes
    stored: int  # bytes in memory, with the padding of tiles; 0 if it stays on the chip


def arrays(shape: str) -> list[Array]:
    """Parse the arrays of an HLO type. A layout {1,0:T(8,128)S(1)} has the order of the axes, the
    tile (T) and the memory space (S)."""
    found = []
    form = r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\](?:\{([^}]*)\})?"
    for dtype, sides, layout in re.findall(form, shape):
        bits = int((re.findall(r"\d+", dtype) or [8])[0])  # 8 for pred
        sides = [int(x) for x in sides.split(",") if x]
        count = math.prod(sides)
        if tile := re.search(r"T\(([\d,]+)\)", layout):
            order = [int(x) for x in layout.split(":")[0].split(",") if x]
            for axis, side in zip(order, reversed(tile[1].split(",")), strict=False):
                sides[axis] = -(-sides[axis] // int(side)) * int(side)
        stored = 0 if "S(" in layout else -(-math.prod(sides) * bits // 8)
        found.append(Array(count, -(-count * bits // 8), stored))
    return found


def numbers(one: Instruction) -> int:
    """Return how many numbers the result has."""
    return sum(array.count for array in arrays(one.shape))


def fetched_rows(one: Instruction) -> int:
    """Return how many slices a gather fetches; 0 for other instructions."""
    for x in one.contents or [one]:
        if x.op == "gather":
            sides = re.search(r"slice_sizes=\{([\d,]+)\}", x.rest)[1].split(",")
            return numbers(x) // math.prod(map(int, sides))
    return 0


def in_place(one: Instruction) -> bool:
    """Whether it updates an existing array, and not one that its own fusion creates."""
    updating = one.op in ("dynamic-update-slice", "scatter")
    return updating and (not one.fused or one.inputs()[0].op == "parameter")


def updated_numbers(one: Instruction) -> int:
    """Return how many numbers a dynamic-update-slice or a scatter writes."""
    half = len(one.operands) // 2
    values = one.operands[-half:] if one.op == "scatter" else one.operands[1:2]
    return sum(map(numbers, values))


def reads(one: Instruction, needed: int) -> list[int]:
    """Return how many numbers of each operand are read for `needed` numbers of the result."""
    sizes = [numbers(x) for x in one.operands]
    if one.contents:
        needs = fused_reads(one.inner, needed)
        return [min(size, needs[number]) for number, size in enumerate(sizes)]
    if one.op in ("slice", "dynamic-slice", "gather"):
        return [min(sizes[0], needed), *sizes[1:]]
    if in_place(one):
        bases, old = 1, 0
        if one.op == "scatter":  # it adds to the old values
            bases = (len(sizes) - 1) // 2
            old = updated_numbers(one) // bases
        return [min(size, old) for size in sizes[:bases]] + sizes[bases:]
    if one.op in FULL:
        return sizes
    return [min(size, needed) for size in sizes]


def fused_reads(inner: dict[str, Instruction], needed: int) -> Counter:
    """Return index of a fusion's parameter -> how many numbers of the parameter are read."""
    need, found = Counter(), Counter()
    for one in reversed(inner.values()):
        count = min(needed if one.root else need[one], numbers(one))
        if one.op == "parameter":
            found[int(one.rest.split(")")[0])] = count
        elif count:
            for operand, part in zip(one.operands, reads(one, count), strict=True):
                need[operand] += part
    return found


def writes(one: Instruction) -> list[int]:
    """Return how many numbers are written of each array of the result."""
    if one.contents:
        return next(writes(x) for x in one.contents if x.root)
    if one.op == "tuple":
        return [count for x in one.operands for count in writes(x)]
    if one.op in RENAMES and numbers(one.operands[0]) == numbers(one):
        return writes(one.operands[0])
    return [updated_numbers(one)] if in_place(one) else [x.count for x in arrays(one.shape)]


def memory_bytes(one: Instruction) -> int:
    """Return the bytes of memory that one execution reads and writes; 0 for collectives and for
    copies to or from the chip, which run at the same time as other work."""
    if one.op in FREE or one.op.endswith(("-start", "-done")) or one.transfer:
        return 0
    if one.op == "custom-call" and any(f'"{target}"' in one.rest for target in NO_WORK):
        return 0
    if one.kernel:  # repeated operands, and operands that are also results, count once
        aliased = {int(x) for x in re.findall(r"\{[\d, ]*\}: \((\d+),", one.rest)}
        given = {x for number, x in enumerate(one.operands) if number not in aliased}
        return sum(array.stored for x in (one, *given) for array in arrays(x.shape))
    touched = []  # (array, numbers read or written)
    for operand, count in zip(one.operands, reads(one, numbers(one)), strict=True):
        touched += [(array, min(count, array.count)) for array in arrays(operand.shape)]
    touched += zip(arrays(one.shape), writes(one), strict=True)
    return round(sum(array.stored * count / max(array.count, 1) for array, count in touched))


# ---- Time of a program -------------------------------------------------------------------------


def sent_bytes(one: Instruction, devices: int) -> tuple[int, int]:
    """Return (bytes of a collective's full buffer, bytes that a device sends or receives). Of n
    devices each sends (n-1)/n of the buffer, in an all-reduce twice."""
    kind = one.collective
    inside = one.transfer
    groups = re.search(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])", inside.rest)
    n = devices if groups is None else int(groups[2] or len(groups[1].split(",")))
    started = inside.op.endswith("-start") and kind != "all-reduce"  # shape: operands, results
    shape = inside.shape.replace("u32[]", "") if started else inside.shape
    size = sum(array.size for array in arrays(shape))
    if started:
        size = size * n // (n + 1) if kind in ("reduce-scatter", "all-gather") else size // 2
    elif inside.op == "reduce-scatter":
        size *= n
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
    return size, round(size * share)


def links_alone(instructions, work, cross) -> float:
    """Simulate the schedule; return the time in which only collectives run. An execution takes
    work(one) on the chip and cross(one) in the links, which carry one collective at a time. A loop
    is simulated once, with all its times multiplied."""
    ends = {}  # name of the start of a collective -> when it ends
    now = links_free = worked = total = 0.0
    for one in instructions:
        if one.op.endswith("-done"):
            start = next((x.name for x in one.inputs() if x.op.endswith("-start")), "")
            now = max(now, ends.get(start, 0.0 if start else links_free))
        elif one.transfer:
            took = one.times * cross(one)
            total += took
            links_free = max(links_free, now) + took
            ends[one.name] = links_free
            if not one.op.endswith("-start"):
                now = links_free
        spent = one.times * work(one)
        now += spent
        worked += spent
    return max(0.0, min(total, max(now, links_free) - worked))


def read_schedule(schedule: str, rows: int = 0) -> int:
    """Return how many bundles a final schedule issues. A bundle has an address, `LB` if it begins
    the body of a loop, a `>` per loop around it (some are missing in inner loops), and in a loop's
    exit test the trip count. A loop without one runs once; if it starts transfers out of memory, it
    runs until they number the `rows` of a gather. Regions that may be skipped count."""
    head = r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})? *:([ >]*)\{"
    _, *parts = re.split(head, schedule, flags=re.MULTILINE)
    marks = parts[::3]
    depths = [marked.count(">") for marked in parts[1::3]]
    for i in reversed(range(len(depths) - 1)):  # restore missing `>`
        around = depths[i + 1] - (marks[i + 1] == "LB")
        depths[i] = max(depths[i], around)
    open_loops = [[0, 1, 0]]  # outermost first: bundles, trips, transfers

    def close(depth: int):
        while len(open_loops) > depth + 1:
            bundles, trips, transfers = open_loops.pop()
            if trips is None and rows and transfers:
                open_loops[0][0] += bundles * rows // transfers  # in all rounds of outer loops
            else:
                open_loops[-1][0] += bundles * (trips or 1)

    for mark, depth, bundle in zip(marks, depths, parts[2::3], strict=True):
        close(depth - (mark == "LB"))
        while len(open_loops) <= depth:
            open_loops.append([0, None, 0])
        open_loops[-1][0] += 1
        open_loops[-1][2] += bundle.count("dma.hbm_to_vmem")
        test = r"totalorder (?:\(\S+\), )?%\S+, (\d+) /\* loop exit test"
        for trips in re.findall(test, bundle):  # the test of an outer loop can follow an inner one
            unknown = [loop for loop in open_loops if loop[1] is None]
            if unknown:
                unknown[-1][1] = int(trips)
    close(0)
    return open_loops[0][0]


def read_schedules(instructions, folder: Path) -> dict[str, int] | None:
    """Return name of an instruction -> bundles of its schedule in `folder`, and empty the folder;
    None if a kernel has no schedule. The compiler writes one schedule for equal instructions."""
    every = {one.name: one for one in instructions}
    found = {}
    twins = Counter()  # twin_key -> the most bundles
    for path in sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if one := name and every.get(name[1]):
            found[one.name] = read_schedule(path.read_text(errors="replace"), fetched_rows(one))
            twins[twin_key(one)] = max(found[one.name], twins[twin_key(one)])
        path.unlink()
    for name in every.keys() - found.keys():
        key = twin_key(every[name])
        if key in twins:
            found[name] = twins[key]
        elif every[name].kernel:
            return None
    return found


def twin_key(one: Instruction) -> tuple:
    """Return a key that is equal for instructions with equal code."""
    if one.kernel:
        return tuple(re.findall(r'"body":"(.*?)"', one.rest))
    return one.op, one.shape, one.cycles, *((x.op, x.shape) for x in one.contents)


def places(text: str) -> dict[str, tuple[str, int]]:
    """Return stack_frame_id -> (innermost function of train_gpt.py except WRAPPERS, line), or
    ("other", 0). The file has the parent's number plus 1; an outermost frame names itself."""

    def rows(section, pattern):
        found = re.findall(rf"^{section}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return re.findall(pattern, "".join(found[:1]), re.MULTILINE)

    names = dict(rows("FunctionNames", r'^(\d+) "([^".]*)'))
    lines = rows("FileLocations", r"^(\d+) .*function_name_id=(\d+) line=(\d+)")
    spots = {place: (names[name], int(line)) for place, name, line in lines}
    frames = rows("StackFrames", r"^(\d+) .*file_location_id=(\d+) parent_frame_id=(\d+)")
    found = {}
    for number, place, parent in sorted(frames, key=lambda row: int(row[0])):  # parents first
        name, line = spots[place]
        ours = callable(getattr(T, name, None)) and name not in WRAPPERS
        found[number] = (name, line) if ours else found.get(str(int(parent) - 1), ("other", 0))
    return found


def place_of(one: Instruction, innermost: dict) -> tuple[str, int]:
    """Return the place (see `places`) of a matmul in an instruction, otherwise of the instruction,
    otherwise of the last instruction in it; ("other", 0) for copies by the compiler."""
    matmuls = [x for x in one.contents if x.op in ("dot", "convolution")]
    for x in (*matmuls, one, *reversed(one.contents)):
        frame = re.search(r"stack_frame_id=(\d+)", x.rest)
        if frame:
            return innermost[frame[1]]
    return "other", 0


def part_of(one: Instruction, innermost: dict) -> str:
    """Return the name under which an instruction is listed: its kernel or its function."""
    if one.transfer:
        return "collectives"
    if one.kernel:
        return re.sub(r"(\.\d+)+$", "", one.name)  # without the number of the call
    return place_of(one, innermost)[0]


def cycles_of(one: Instruction, bundles: int, peak: int) -> tuple[str, float]:
    """Return (field of the Yardstick, cycles to multiply by it) of an instruction with these
    bundles. Matmuls take at least the cycles at the peak: the compiler can estimate fewer."""
    if one.kernel or not one.cycles:
        return "kernel" if one.kernel else "rows", bundles
    matmul = re.compile(r"dim_labels=[bf]{2}_[io]{2}->[bf]{2}[,\s]")
    least = 0.0
    for x in one.contents:
        if matmul.search(x.rest):  # m k, k n and m n numbers: the root of their product is m n k
            sizes = map(numbers, (x, *x.inputs()))
            least += 2 * math.prod(sizes) ** 0.5 / peak
    return "code", max(least, min(one.cycles, bundles or one.cycles))


def matmul_flops(one: Instruction) -> float:
    """Return the FLOPs of the matmuls in an instruction of a GPU."""
    total = 0.0
    for x in (one, *one.contents):
        if x.op == "dot":
            left, right = x.operands[:2]
            sides = re.search(r"\[([\d,]*)\]", left.shape)[1].split(",")
            axes = re.search(r"lhs_batch_dims=\{([\d,]+)\}", x.rest)
            batch = math.prod(int(sides[int(i)]) for i in axes[1].split(",")) if axes else 1
            total += 2 * (numbers(left) * numbers(right) * numbers(x) / batch) ** 0.5
    return total


def attention_flops(cfg: T.Config, key) -> float:
    """Return the FLOPs of a GPU's attention, forward and backward, if it skips no document: five
    products of the width of queries and keys, four of the width of values."""
    if not isinstance(key, T.Gradients):
        return 0.0
    stage = cfg.stages[key.stage]
    per_token = 0
    for i, layer in enumerate(cfg.layers):
        if layer.attends:
            x = T.heads_of(cfg, i, stage.windows)
            per_token += x.count * x.window * (5 * x.qk_width + 4 * x.v_width)
    return 2.0 * stage.batch_tokens * per_token


# Name in the prediction of a run -> name in the row of a program.
SECONDS = {"train_seconds": "predicted_ms", "train_link_floor_seconds": "link_floor_ms"}
SECONDS |= {"train_moved_floor_seconds": "moved_floor_ms"}
SECONDS |= {"low_seconds": "low_ms", "high_seconds": "high_ms"}
FIGURES = *SECONDS.values(), "functions_ms", "bound_ms"


def count(text: str, schedules: Path, devices: list, attention=0.0) -> dict:
    """Return the FIGURES per execution of an optimized program (HLO text) on `devices`, or None for
    unknown figures. `schedules` is the folder of libtpu's schedules, `attention` the FLOPs of a
    GPU's attention. "bound_ms" maps each field of the Yardstick to the time that it determines."""
    known = HARDWARE[devices[0].device_kind]
    computations, entry = hlo_computations(text)
    every = itertools.chain(*(scope.values() for scope in computations.values()))
    bundles = read_schedules(every, schedules)
    if known.clock is None or (len(devices) > 1 if known.is_gpu else not bundles):
        return dict.fromkeys(FIGURES)
    innermost = places(text)
    instructions = [*walk(computations, entry)]
    if known.is_gpu:
        links, load = 0, 0.0
        called = r'"__gpu\$xla\.gpu\.triton".*op_name="[^"]*/attend'
        kernels = [one for one in instructions if re.search(called, one.rest)]
        each = attention / max(sum(one.times for one in kernels), 1)
        issued = {one: ("code", matmul_flops(one)) for one in instructions}
        issued |= {one: ("kernel", each) for one in kernels}
    else:
        links, load = network(devices)
        issued = {one: cycles_of(one, bundles.get(one.name, 0), known.peak) for one in instructions}

    def cross(one) -> float:
        size, sent = sent_bytes(one, len(devices))
        across = size * load if one.collective == "all-to-all" else 0.0
        return max(sent / max(links, 1), across) / known.link

    def measure(yardstick: Yardstick) -> list:
        """Milliseconds: computing, links, moves, by function, by field of the Yardstick."""
        took, spent, parts, bounds = {}, Counter(), Counter(), Counter()
        for one, (field, cycles) in issued.items():
            computed = 1e3 * cycles * getattr(yardstick, field) / known.clock
            moved = 1e3 * yardstick.memory * memory_bytes(one) / known.hbm
            took[one], bound = max((computed, field), (moved, "memory"))
            ms = one.times * took[one]
            spent["predicted" if cycles or known.is_gpu else "moved"] += ms
            parts[part_of(one, innermost)] += ms
            bounds[bound] += ms
        alone = links_alone(instructions, took.get, lambda one: 1e3 * yardstick.link * cross(one))
        parts["collectives"] += alone
        return [spent["predicted"], alone, spent["moved"], parts, bounds]

    low, middle, high = (measure(yardstick) for yardstick in known.yardsticks)
    figures = *middle[:3], sum(low[:3]), sum(high[:3]), *middle[3:]
    return dict(zip(FIGURES, figures, strict=True))


# ---- A run, and the report ---------------------------------------------------------------------


def program_row(cfg, mesh, kernels, key, schedules: Path, dump: Path | None) -> dict:
    """Compile the program with this key of T.programs; return its row of preflight.json."""
    runs = Counter(itertools.chain(*T.schedule(cfg).programs), finish=1)
    lowered = T.programs(cfg, mesh, kernels)[key].lower()
    compiled = T.compile_one(cfg, mesh, key, lowered)
    text = compiled.as_text()
    if dump:
        (dump / f"{key}.hlo").write_text(text)
    row = {"name": str(key), "resident_bytes": T.resident_bytes(cfg, mesh, key)}
    row["steps"] = runs[key]  # executions in training, 0 for eval
    row["bytes"] = {"peak": compiled.memory_analysis().peak_memory_in_bytes}
    return row | count(text, schedules, [*mesh.devices.flat], attention_flops(cfg, key))


def whole_run(rows: list[dict]) -> dict | None:
    """Return the seconds of training: the sum, the parts, the band, and the seconds per function;
    None if they are unknown for a program."""
    seconds, parts = Counter(), Counter()
    for row in rows:
        if row["functions_ms"] is None:
            return None
        runs = row["steps"] / 1e3
        for name, key in SECONDS.items():
            seconds[name] += runs * row[key]
        for part, ms in row["functions_ms"].items() if runs else ():
            parts[part] += runs * ms
    in_all = sum(seconds[name] for name in [*SECONDS][:3])
    return {"sum_seconds": in_all, **seconds, "components": parts}


def describe(report: dict) -> str:
    """Return the report as text. The table is for one execution on one device."""
    where = f"{report['devices']} x {report['device_kind']}, rates: {report['rates']}"
    text = [f"Some programs on {where}; seconds of a run need all programs and a known chip"]
    run = report["predicted"]
    if run:
        form = "{:.1f} s = predicted {:.1f} + links {:.1f} + moves {:.1f}; band {:.1f} to {:.1f} s"
        text = [f"The full run on {where}", form.format(*[*run.values()][:6])]
        functions = [f"{x} {seconds:.2f}" for x, seconds in run["components"].most_common(12)]
        text.append(textwrap.fill(f"seconds by function: {', '.join(functions)}", 100))
    form = "{:17}{:>7}{:>11}{:>9}{:>14}{:>9}{:>9}".format
    text.append("")
    text.append(form("program", "times", "peak GiB", "+ state", "predicted ms", "links", "moves"))
    for row in report["variants"]:
        sizes = row["bytes"]["peak"] / 2**30, row["resident_bytes"] / 2**30
        figures = *sizes, *(row[name] for name in FIGURES[:3])
        cells = ["-" if x is None else f"{x:.2f}" for x in figures]
        text.append(form(row["name"], f"{row['steps']:,}", *cells))
    return "\n".join(text)


def memory_of(mesh) -> float:
    """Return the bytes of a device that a run can use; infinity if unknown. jax takes 75% of a
    GPU's memory unless the environment sets another share."""
    known = HARDWARE[mesh.devices.flat[0].device_kind]
    if not known.is_gpu:
        return known.memory
    return int(float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75) * known.memory)


def run(argv: list[str] | None) -> int:
    """Compile the programs for the target and print what they need; return the exit status."""
    parser = T.Parser(prog="preflight.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", metavar="TARGET", help="for example v6e-8, h100x8 or v5e:2x4")
    T.add_config_options(parser)
    keep = parser.add_mutually_exclusive_group().add_argument
    keep("--dump", metavar="DIR", help="write preflight.json and the optimized programs")
    keep("--save", metavar="DIR", help="write executables for train_gpt.py --cache")
    names = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME"}
    parser.add_argument("--program", **names, help="only these programs: grads0 anvil")
    args = parser.parse_args(argv)
    if not T.config_args(args).preset:
        args.words.append("speedrun")
    jax.config.update("jax_platforms", "cpu")  # the target is absent
    asked = T.resolve(args)
    for folder in filter(None, (args.dump, args.save)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="preflight-") as schedules:
        if args.save:  # without SCHEDULES, because the options of libtpu are part of a cache key
            jax.config.update("jax_compilation_cache_dir", args.save)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        else:
            before = os.environ.get("LIBTPU_INIT_ARGS", "")
            os.environ["LIBTPU_INIT_ARGS"] = f"{before} {SCHEDULES.format(schedules)}"
        devices = absent_devices(args.target)
        cfg, mesh = T.make_mesh(asked, devices)
        limit = memory_of(mesh)
        cfg = T.with_whole_loss(cfg, mesh, limit)
        kernels, reason = T.choose_kernels(cfg, devices[0])
        T.tell(f"kernels: {reason}")
        every = {str(key): key for key in T.programs(cfg, mesh, kernels)}
        unknown = {*args.program} - {*every}
        T.require(not unknown, f"unknown program {', '.join(unknown)}: use {', '.join(every)}")
        sizes = T.expected_bytes(cfg, mesh)
        largest = max(sizes, key=sizes.get)
        refusal = T.memory_refusal(cfg, mesh, largest, sizes[largest], limit)
        if refusal and not args.program:
            T.tell(f"not compiled: {refusal}")
            return 1
        rows, refusals = [], []
        for name in args.program or every:
            T.tell(f"compiling {name}")
            dump = args.dump and Path(args.dump)
            row = program_row(cfg, mesh, kernels, every[name], Path(schedules), dump)
            rows.append(row)
            needs = row["bytes"]["peak"] + row["resident_bytes"]
            refusals.append(T.memory_refusal(cfg, mesh, name, needs, limit))
    command = shlex.join(["python", *sys.argv] if argv is None else argv)
    kind = devices[0].device_kind
    known = HARDWARE[kind]
    report = T.run_facts(asked, mesh, command, {"kernels": reason})
    report |= {"target": args.target, "device_kind": kind, "devices": mesh.size}
    report |= {"rates": known.rates, "yardstick": known.yardsticks[1]._asdict(), "variants": rows}
    report |= {"total_steps": cfg.steps, "total_tokens": cfg.tokens_after(cfg.steps)}
    report["predicted"] = None if args.program else whole_run(rows)
    if args.dump:
        Path(args.dump, "preflight.json").write_text(json.dumps(report, indent=1) + "\n")
    saved = f"saved: copy {args.save} to {args.target} and train there with --cache DIR"
    T.tell(saved if args.save else describe(report))
    fit = f"everything fits into the {limit / 2**30:.2f} GiB of a device"
    if limit == math.inf:
        fit = "the memory of this device is unknown"
    T.tell("\n".join(filter(None, refusals)) or fit)
    return 1 if any(refusals) else 0


def main(argv=None) -> int:
    return T.report_errors(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
