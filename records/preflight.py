"""Will a run compile, fit and be fast on hardware that is not here?

    pip install -r requirements.txt "jax[tpu]"
    python records/preflight.py TARGET [PRESET] [--set ...] [--program NAME] [--dump DIR|--save DIR]

TARGET is NAME-NUMBER of TPUs as Google names them (v6e-8, v5e-1; v4-8 and v5p-8 are four chips),
NAMExCOUNT of GPUs (h100x8, a100-40x1 and others: a wrong one lists all), or a TPU topology NAME:AxB
such as v5e:2x4. No PRESET: `speedrun`. Every program of the run, or those that --program names, is
compiled by the real compiler, on any x86 machine: minutes of a core for one with gradients. The
exit status is 1 if a program does not fit. --dump DIR keeps the optimized programs and
preflight.json, with all figures; null: not known. --save DIR predicts nothing, but keeps the
executables: with DIR copied there, `train_gpt.py --cache DIR` takes those of the same programs,
versions and topology (nobody has tried that on a TPU yet).

Seconds of the whole run are what is computed ("predicted"), the time in which devices only send and
receive ("links"), and what SparseCores and others move ("moves", a floor), of a v6e and a v5e. Of
one GPU they are FLOPs and bytes, at the shares of its data sheet that an H200 has reached. Several
have none. records/NOTES.md has what counts how, and how far to trust it.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

import train_gpt as T  # first: it reports in one line that jax is missing

# isort: split

import jax
from jax.experimental import topologies

# What makers say: GPUs by their names in TARGET, what all of a capability have, slices of TPUs.
SHEETS = json.loads((Path(__file__).parent / "hardware.json").read_text())
GPUS, CORES, TPUS = (SHEETS[name] for name in ("gpus", "cores", "slices"))
# Dense bfloat16 FLOP/s by a part of the device kind; the longest that is in it counts.
PEAK_FLOPS = SHEETS["peak_flops"]
# Without these libtpu looks for a TPU's host, and jax for CUDA libraries.
NO_HOST = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
NO_HOST |= {"TPU_ACCELERATOR_TYPE": "v6e-8", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
NO_HOST |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
# libtpu writes its final schedules to a folder; those of all other passes would be gigabytes.
SCHEDULES = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true "
SCHEDULES += "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
RING = 16  # chips along an axis of a v6e that closes to a ring: only a v6e-256 has them
RENAMES = "bitcast", "get-tuple-element", "tuple", "opt-barrier"
# What takes no time itself, and custom calls that take none.
FREE = *RENAMES, "parameter", "constant", "after-all", "partition-id", "while"
NO_WORK = "ConcatBitcast", "AssumeGatherIndicesInBound", "AllocateBuffer"
NO_WORK += "PrepareAsyncCallStart", "PrepareAsyncCallDone"
# Those that need all of an operand for any part of their result.
WHOLE = "dot", "convolution", "reduce", "reduce-window", "sort", "custom-call"
WRAPPERS = "run_kernel", "run_tiles"
COLLECTIVES = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"


def peak_flops(kind: str) -> float:
    """FLOP/s of a device of this kind by its maker's data sheet; 0 if it is not in the table."""
    return PEAK_FLOPS.get(max((x for x in PEAK_FLOPS if x in kind), key=len, default=""), 0.0)


class Yardstick(NamedTuple):
    """What the compiler's counts take on a v6e; on a GPU FLOPs and bytes, of what its data sheet
    has for them."""

    kernel: float  # cycles for each bundle of a Pallas kernel
    rows: float  # for each bundle of a gather, a scatter or a sort
    code: float  # for each bundle of other code, or each cycle that the compiler estimates
    memory: float  # seconds in place of those at the measured rate
    link: float


# Fitted to what others have timed on a v6e, and the ends of that: records/NOTES.md has the table.
MIDDLE = Yardstick(1.3, 1.3, 1.05, 1.0, 1.0)
LOW = Yardstick(1.0, 1.0, 1.0, 0.82, 0.87)
HIGH = Yardstick(1.6, 1.8, 1.15, 1.28, 1.55)
# Fitted to times of commit 21b3d1f on an H200: attention, if it skipped no document, ran at 0.5 of
# the peak, other matmuls at 0.85, memory at 0.7 of the data sheet. The band reaches from the middle
# divided by a number of GPU_BANDS to the middle times this number. Programs were within 1.25 on the
# GPUs that were timed; 1.5 for others is a guess. Times that the README calculates from measured
# parts have the first band too, for the reasons in records/NOTES.md ("Eight H100s").
GPU = Yardstick(1 / 0.5, 0.0, 1 / 0.85, 1 / 0.7, 0.0)
GPU_BANDS = {"measured": 1.25, "data sheet": 1.5}
GPUS_TIMED = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


class Hardware(NamedTuple):
    """One device of a kind, by its maker's data sheet where nothing else is said."""

    memory: float = math.inf  # bytes that programs and state can have together
    hbm: float | None = None  # bytes/s to and from memory
    link: float | None = None  # bytes/s that leave through one link
    clock: float | None = None  # Hz of the compiler's cycles; None: no times are predicted
    peak: int = 0  # FLOP of its matrix units in a cycle, of bfloat16
    rates: str | None = None  # of what hbm and link are said
    yardsticks: tuple = (LOW, MIDDLE, HIGH)

    @classmethod
    def of_gpu(cls, kind: str, facts: dict) -> "Hardware":
        """A GPU, whose cycles are FLOPs."""
        rates = "measured" if kind in GPUS_TIMED else "data sheet"
        ends = (
            Yardstick(*(x * f for x in GPU)) for f in (1 / GPU_BANDS[rates], 1, GPU_BANDS[rates])
        )
        sizes = facts["device_memory_size"], facts["memory_bandwidth"]
        return cls(*sizes, None, peak_flops(kind) or None, 1, rates, tuple(ends))


HARDWARE = defaultdict(Hardware)  # by device kind
HARDWARE |= {kind: Hardware(**facts) for kind, facts in SHEETS["tpus"].items()}
HARDWARE |= {kind: Hardware.of_gpu(kind, facts) for kind, _, facts in GPUS.values()}


def tpu_options(target: str) -> dict | None:
    """What libtpu must know of NAME-NUMBER or of a topology NAME:AxB. None if it is neither."""
    name, _, number = target.partition("-")
    name = "v5e" if name == "v5litepod" else name  # as Google's accelerator types have it
    if number in TPUS.get(name, {}):
        target = f"{name}:{TPUS[name][number]}"
    if not re.fullmatch(r"\w+:\d+(x\d+)+", target):
        return None
    shape = [int(side) for side in target.split(":")[1].split("x")]
    flat = len(shape) == 2 and math.prod(shape) <= 8  # one host, as on a v6e-8 VM
    bounds = (*shape, 1) if flat else (2, 2, 1)  # others have four chips
    options = {"platform": "tpu", "topology_name": target, "chips_per_host_bounds": bounds}
    # Both cores of a chip are one device, as where a v4 runs.
    return options | ({"chip_config_name": "megacore"} if target.startswith("v4:") else {})


def gpu_options(target: str) -> dict | None:
    """What the GPU compiler must know of NAMExCOUNT; None if that is no such target."""
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
    """Devices for compilation only. UserError if there is no such hardware, or no compiler."""
    for key, value in NO_HOST.items():
        os.environ.setdefault(key, value)
    options = gpu_options(target) or tpu_options(target)
    name = re.sub(r"x\d*$", "", target.lower())
    near = [f"{gpu}x1" for gpu in GPUS if name and gpu.startswith(name)]
    known = f"use {' or '.join(near)}, or " if near else "use "
    known += "a TPU such as v6e-8, a topology such as v5e:2x4, or a GPU such as h100x8 "
    known += f"(TPUs: {', '.join(TPUS)}; GPUs: {', '.join(GPUS)})"
    T.need(options, f"no such hardware as {target}: {known}")
    kind, cure, *modules = "TPU", '"jax[tpu]"', "libtpu"
    if options["platform"] == "cuda":
        cure = f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        kind, *modules = "GPU", "jax_cuda12_plugin", "jax_cuda13_plugin"
    there = any(map(importlib.util.find_spec, modules))
    T.need(there, f"{target} needs the {kind} compiler: pip install {cure}")
    try:
        return topologies.get_topology_desc(**options).devices
    except Exception as error:  # whatever the compiler library finds wrong with a name
        raise T.UserError(f"no such hardware as {target} ({error!r:.200}): {known}") from None


def network(devices) -> tuple[int, float]:
    """(links at a corner of a TPU mesh, of which a ring has two; what the busiest link carries one
    way in an all-to-all, as a share of the buffer of a device). A plane that cuts the mesh in two
    leaves a and b devices on its sides: a b / n buffers cross it each way."""
    count = len(devices)
    links, loads = 0, [0.0]
    for axis in zip(*(device.coords for device in devices), strict=True):
        side = len({*axis})
        links += (side > 1) + (side >= RING)
        lines = count / side * (2 if side >= RING else 1)
        below = (sum(x < cut for x in axis) for cut in {*axis})
        loads += [a * (count - a) / count / lines for a in below]
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
    fused: bool  # part of a fusion's computation
    scope: dict  # name -> Instruction of its computation
    inner: dict | None  # the same of the computation that it calls
    times: int = 1

    @property
    def cycles(self) -> int:
        """The compiler's estimate for one execution; 0 if it makes none, or says 2^63 - 1."""
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
        """The instructions of the same computation that it takes."""
        return [self.scope[name] for name in re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])]

    @property
    def contents(self) -> list["Instruction"]:
        """The instructions that a fusion fuses, or a call starts; of others there are none."""
        return [*self.inner.values()] if self.op in ("fusion", "call-start") and self.inner else []

    def inputs(self) -> list["Instruction"]:
        """The operands, without what only renames."""
        each = (one.inputs() if one.op in RENAMES else [one] for one in self.operands)
        return [*itertools.chain(*each)]

    @functools.cached_property
    def transfer(self) -> "Instruction | None":
        """The collective that it is, or that it executes or starts in a computation of its own."""
        if any(self.op in (kind, f"{kind}-start") for kind in COLLECTIVES):
            return self
        return next((one.transfer for one in self.contents if one.transfer), None)

    @property
    def collective(self) -> str | None:
        """Which of COLLECTIVES it is. A TPU's reduce-scatter can be a fusion of another name."""
        if self.transfer and self.called("calls").startswith("all-reduce-scatter"):
            return "reduce-scatter"
        return self.transfer and self.transfer.op.removesuffix("-start")


def hlo_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """({computation: {name: Instruction}}, name of the entry) of an HLO module as text."""
    _, *parts = re.split(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{\n", text, flags=re.M)
    names = parts[1::3]
    found = {name: {} for name in names}
    fused = {*re.findall(r" fusion\(.*?\bcalls=%?([\w.\-]+)", text)}
    line_form = r"^ +(ROOT )?%?([^\s=]+) = (.*?[\])}]) ([a-z][\w\-]*)\((.*(?:\n(?!\}$|  ).*)*)"
    for computation, body in zip(names, parts[2::3], strict=True):
        scope = found[computation]
        for root, name, *line in re.findall(line_form, body, re.M):
            if line[1] == "call-update":  # of jax 0.12: a call begins when it has operands
                begun, given = re.match(r"%([\w.\-]+)(?:, )?(.*)", line[2], re.S).groups()
                waiting = scope.pop(begun)
                line[1:] = waiting.op, given + waiting.rest.removeprefix(")")
            called = re.search(r"\b(?:calls|to_apply)=%?([\w.\-]+)", line[2])
            inner = called and found.get(called[1])
            scope[name] = Instruction(name, *line, bool(root), computation in fused, scope, inner)
    return found, next(name for entry, name in zip(parts[::3], names, strict=True) if entry)


def loop_trips(one: Instruction, computations) -> int:
    """How often a while loop runs: the constant that its counter meets; 1 if there is none."""
    condition = computations[one.called("condition")]
    for test in condition.values():
        if test.op == "compare" and "direction=LT" in test.rest:
            bound = re.match(r"\d+(?=\))", test.operands[1].rest)  # of a constant
            return int(bound[0]) if bound else 1
    known = re.search(
        r'"known_trip_count":\{"n":"(\d+)"', one.rest
    )  # of a GPU, which fuses the test
    return int(known[1]) if known else 1


def walk(computations, name: str, times: int = 1):
    """Yield all Instructions that a computation executes, in their order. Loops multiply `times`;
    fusions are one instruction. UserError if there is a conditional."""
    for one in computations[name].values():
        T.need(one.op != "conditional", f"{one.name} is a conditional: which branch counts?")
        one = dataclasses.replace(one, times=times)
        yield one
        if one.op == "while":
            yield from walk(computations, one.called("body"), times * loop_trips(one, computations))
        elif one.op == "call-start" and not one.transfer:
            yield from walk(computations, one.called("to_apply") or one.called("calls"), times)


class Array(NamedTuple):
    """One array of an HLO type."""

    count: int  # of its numbers
    size: int  # bytes of these
    stored: int  # bytes in memory, with what pads tiles; 0 if it is kept on the chip


def arrays(shape: str) -> list[Array]:
    """The arrays of an HLO type. Of a layout {1,0:T(8,128)S(1)} T is the tile, S where it is."""
    found = []
    form = r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\](?:\{([^}]*)\})?"
    for dtype, sides, layout in re.findall(form, shape):
        bits = int((re.findall(r"\d+", dtype) or [8])[0])  # pred has none
        sides = [int(x) for x in sides.split(",") if x]
        order = [int(x) for x in layout.split(":")[0].split(",") if x]
        count = math.prod(sides)
        tile = re.search(r"T\(([\d,]+)\)", layout)
        if tile:
            for axis, side in zip(order, reversed(tile[1].split(",")), strict=False):
                sides[axis] = -(-sides[axis] // int(side)) * int(side)
        stored = 0 if "S(" in layout else -(-math.prod(sides) * bits // 8)
        found.append(Array(count, -(-count * bits // 8), stored))
    return found


def numbers(one: Instruction) -> int:
    """How many numbers its result has."""
    return sum(array.count for array in arrays(one.shape))


def fetched_rows(one: Instruction) -> int:
    """How many slices a gather fetches; 0 of anything else."""
    for x in one.contents or [one]:
        if x.op == "gather":
            sides = re.search(r"slice_sizes=\{([\d,]+)\}", x.rest)[1].split(",")
            return numbers(x) // math.prod(map(int, sides))
    return 0


def updates(one: Instruction) -> int:
    """How many numbers a dynamic-update-slice or a scatter writes."""
    half = len(one.operands) // 2
    values = one.operands[-half:] if one.op == "scatter" else one.operands[1:2]
    return sum(map(numbers, values))


def in_place(one: Instruction) -> bool:
    """Whether it writes into an array that is there already: not one that its fusion has made."""
    updating = one.op in ("dynamic-update-slice", "scatter")
    return updating and (not one.fused or one.inputs()[0].op == "parameter")


def reads(one: Instruction, needed: int) -> list[int]:
    """How many numbers of each operand `one` reads if `needed` of its result are."""
    sizes = [numbers(x) for x in one.operands]
    if one.contents:
        taken = fused_reads(one.inner, needed)
        return [min(size, taken.get(at, 0)) for at, size in enumerate(sizes)]
    if one.op in ("slice", "dynamic-slice", "gather"):
        return [min(sizes[0], needed), *sizes[1:]]
    if in_place(one):
        bases = 1 if one.op == "dynamic-update-slice" else (len(sizes) - 1) // 2
        old = updates(one) // bases if one.op == "scatter" else 0  # it adds to what is there
        return [min(size, old) for size in sizes[:bases]] + sizes[bases:]
    if one.op in WHOLE:
        return sizes
    return [min(size, needed) for size in sizes]


def fused_reads(inner: dict[str, Instruction], needed: int) -> Counter:
    """{number of a parameter: how many of its numbers a fused computation needs}."""
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
    """How many numbers of each array of its result `one` writes."""
    if one.contents:
        return next(writes(x) for x in one.contents if x.root)
    if one.op == "tuple":
        return [n for x in one.operands for n in writes(x)]
    if one.op in RENAMES and numbers(one.operands[0]) == numbers(one):
        return writes(one.operands[0])
    return [updates(one)] if in_place(one) else [array.count for array in arrays(one.shape)]


def memory_bytes(one: Instruction) -> int:
    """Bytes that one execution reads from memory and writes there; none of a collective, nor of a
    copy to or from the chip, which waits for nothing, nor does other work for it."""
    if one.op in FREE or one.op.endswith(("-start", "-done")) or one.transfer:
        return 0
    if one.op == "custom-call" and any(f'"{target}"' in one.rest for target in NO_WORK):
        return 0
    if one.kernel:  # an operand that is given several times, or is also a result, counts once
        aliased = {int(x) for x in re.findall(r"\{[\d, ]*\}: \((\d+),", one.rest)}
        given = {x for at, x in enumerate(one.operands) if at not in aliased}
        return sum(array.stored for x in (one, *given) for array in arrays(x.shape))
    touched = []  # (an array, how many of its numbers)
    for operand, count in zip(one.operands, reads(one, numbers(one)), strict=True):
        touched += [(array, min(count, array.count)) for array in arrays(operand.shape)]
    touched += zip(arrays(one.shape), writes(one), strict=True)
    return round(sum(array.stored * count / max(array.count, 1) for array, count in touched))


# ---- What a program takes: links, kernels, and the count ---------------------------------------


def sent_bytes(one: Instruction, devices: int) -> tuple[int, int]:
    """(bytes of the whole buffer of a collective, before a reduce-scatter, after the others; those
    that a device must send or receive: (n-1)/n of it, for an all-reduce, which is both, twice)."""
    kind = one.collective
    inside = one.transfer
    groups = re.search(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])", inside.rest)
    n = devices if groups is None else int(groups[2] or len(groups[1].split(",")))
    started = inside.op.endswith("-start") and kind != "all-reduce"  # operands and results
    shape = inside.shape.replace("u32[]", "") if started else inside.shape
    size = sum(array.size for array in arrays(shape))
    if started:
        size = size * n // (n + 1) if kind in ("reduce-scatter", "all-gather") else size // 2
    elif inside.op == "reduce-scatter":
        size *= n
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
    return size, round(size * share)


def links_alone(instructions, work, cross) -> float:
    """The time in which only collectives go on: a play of the schedule. work(one), cross(one): what
    one execution takes of its own, and in the links, which carry one collective after the other.
    What awaits something unknown waits for all; loops are played once, all times multiplied."""
    awaited = {}  # what waits -> the name of what it waits for, "" if that is unknown
    for one in (x for x in instructions if x.op.endswith("-done")):
        awaited[one] = next((x.name for x in one.inputs() if x.op.endswith("-start")), "")
    ends = dict.fromkeys(filter(None, awaited.values()), 0.0)
    now = free = worked = total = 0.0  # free: when the links are
    for one in instructions:
        if one in awaited:
            now = max(now, ends.get(awaited[one], free))
        elif one.transfer:
            took = one.times * cross(one)
            total += took
            free = max(free, now) + took
            if one.name in ends:
                ends[one.name] = free
            else:
                now = free
        spent = one.times * work(one)
        now += spent
        worked += spent
    return max(0.0, min(total, max(now, free) - worked))


def read_schedule(schedule: str, rows: int = 0) -> int:
    """How many bundles the text of a final schedule issues. A bundle has an address, `LB` where a
    loop's body begins, a `>` for each loop around it (some are missing inside), and the constant in
    a loop's exit test. A loop without one counts once, or if it begins transfers out of memory, so
    often that they are as many as the `rows` of a gather. What may be skipped counts as done."""
    head = r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})? *:([ >]*)\{"
    _, *parts = re.split(head, schedule, flags=re.MULTILINE)
    marks = parts[::3]
    depths = [marked.count(">") for marked in parts[1::3]]
    for i in reversed(range(len(depths) - 1)):
        around = depths[i + 1]
        if marks[i + 1] == "LB":  # the next bundle is the first of an inner loop
            around -= 1
        depths[i] = max(depths[i], around)
    open_loops = [[0, 1, 0]]  # from outside in: bundles, trips, transfers

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
        for trips in re.findall(test, bundle):  # an outer loop's can stand after the inner one's
            waiting = [loop for loop in open_loops if loop[1] is None]
            if waiting:
                waiting[-1][1] = int(trips)
    close(0)
    return open_loops[0][0]


def read_schedules(instructions, folder: Path) -> dict[str, int] | None:
    """{name: bundles} of what has a schedule in `folder`, which it empties; None if a kernel has
    none. Equal instructions are compiled once, under the name of one of them."""
    every = {one.name: one for one in instructions}
    found = {}
    twins = Counter()  # what equal instructions have in common -> the most bundles
    for path in sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if one := name and every.get(name[1]):
            found[one.name] = read_schedule(path.read_text(errors="replace"), fetched_rows(one))
            twins |= dict.fromkeys(twin_keys(one), found[one.name])
        path.unlink()
    for name in every.keys() - found.keys():
        if known := [twins[key] for key in twin_keys(every[name]) if key in twins]:
            found[name] = known[0]
        elif every[name].kernel:
            return None
    return found


def twin_keys(one: Instruction) -> list[tuple]:
    """What tells which instructions have the same code, the surest first."""
    if one.kernel:
        return [(*re.findall(r'"body":"(.*?)"', one.rest),), (function_of(one.name),)]
    return [(one.op, one.shape, one.cycles, *((x.op, x.shape) for x in one.contents))]


def function_of(name: str) -> str:
    """The name of a kernel without the numbers that tell its calls apart."""
    return re.sub(r"(\.\d+)+$", "", name)


def places(text: str) -> dict[str, tuple[str, int]]:
    """{stack_frame_id: (innermost function of train_gpt.py, the line there)} of an HLO module as
    text; ("other", 0) where there is none. Of kernels, which all are called in WRAPPERS, it is the
    function that calls these. A frame names its parent by the number of that plus 1; the outermost
    one names itself."""

    def rows(section, pattern):
        found = re.findall(rf"^{section}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return re.findall(pattern, "".join(found[:1]), re.MULTILINE)

    names = dict(rows("FunctionNames", r'^(\d+) "([^".]*)'))
    lines = rows("FileLocations", r"^(\d+) .*function_name_id=(\d+) line=(\d+)")
    spots = {place: (names[name], int(line)) for place, name, line in lines}
    frames = rows("StackFrames", r"^(\d+) .*file_location_id=(\d+) parent_frame_id=(\d+)")
    found = {}
    for number, place, parent in sorted(frames, key=lambda row: int(row[0])):  # parents come first
        name, line = spots[place]
        ours = callable(getattr(T, name, None)) and name not in WRAPPERS
        found[number] = (name, line) if ours else found.get(str(int(parent) - 1), ("other", 0))
    return found


def cycles_of(one: Instruction, bundles: int, peak: int) -> tuple[str, float]:
    """(the number of the Yardstick for an instruction of so many bundles, the cycles that it
    multiplies), of matmuls no fewer than at the peak: the compiler can estimate less."""
    if one.kernel or not one.cycles:
        return "kernel" if one.kernel else "rows", bundles
    matmul = re.compile(r"dim_labels=[bf]{2}_[io]{2}->[bf]{2}[,\s]")
    # m n, m k and k n numbers: the root of their product is m n k.
    sizes = (map(numbers, (x, *x.inputs())) for x in one.contents if matmul.search(x.rest))
    least = sum(2 * math.prod(each) ** 0.5 for each in sizes) / peak
    return "code", max(least, min(one.cycles, bundles or one.cycles))


def matmul_flops(one: Instruction) -> float:
    """FLOPs of the matmuls that an instruction of a GPU is, or fuses."""
    total = 0.0
    for x in (x for x in (one, *one.contents) if x.op == "dot"):
        left, right = x.operands[:2]
        sides = [int(side) for side in re.search(r"\[([\d,]*)\]", left.shape)[1].split(",")]
        axes = re.search(r"lhs_batch_dims=\{([\d,]+)\}", x.rest)
        batch = math.prod(sides[int(axis)] for axis in axes[1].split(",")) if axes else 1
        total += 2 * (numbers(left) * numbers(right) * numbers(x) / batch) ** 0.5
    return total


def attention_flops(cfg: T.Config, key) -> float:
    """FLOPs of a GPU's attention there and back, if it skips no document: of queries and keys five
    products, of values four."""
    if not isinstance(key, T.Gradients):
        return 0.0
    stage = cfg.stages[key.stage]
    layers = (i for i, layer in enumerate(cfg.layers) if layer.attends)
    every = [T.heads_of(cfg, i, stage.windows) for i in layers]
    widths = (x.count * x.window * (5 * x.qk_width + 4 * x.v_width) for x in every)
    return 2.0 * stage.batch_tokens * sum(widths)


def place_of(one: Instruction, innermost: dict) -> tuple[str, int]:
    """Where an instruction comes from, by `places`: of a matmul that it fuses, else its own, else
    of the last that it fuses; ("other", 0) of copies that the compiler has added, and the like."""
    matmuls = [x for x in one.contents if x.op in ("dot", "convolution")]
    every = (*matmuls, one, *reversed(one.contents))
    frames = (re.search(r"stack_frame_id=(\d+)", x.rest) for x in every)
    return next((innermost[frame[1]] for frame in frames if frame), ("other", 0))


def part_of(one: Instruction, innermost: dict) -> str:
    """What an instruction is listed under: the name of a kernel, or the function of `place_of`."""
    if one.transfer:
        return "collectives"
    if one.kernel:
        return function_of(one.name)
    return place_of(one, innermost)[0]


# Of a whole run -> of a program: the three parts of the sum, and the ends of its band.
SECONDS = {"train_seconds": "predicted_ms", "train_link_floor_seconds": "link_floor_ms"}
SECONDS |= {"train_moved_floor_seconds": "moved_floor_ms"}
SECONDS |= {"low_seconds": "low_ms", "high_seconds": "high_ms"}
FIGURES = *SECONDS.values(), "functions_ms", "bound_ms"


def count(text: str, schedules: Path, devices: list, attention=0.0) -> dict[str, float | None]:
    """FIGURES of one execution of an optimized program (HLO as text) on one of `devices`, with the
    schedules that libtpu has left in a folder, or with the FLOPs of a GPU's attention; None where
    they are not known. "bound_ms" has what is computed and moved by the number of the Yardstick
    that decides how long it takes."""
    known = HARDWARE[devices[0].device_kind]
    gpu = devices[0].device_kind in {kind for kind, *_ in GPUS.values()}
    computations, entry = hlo_computations(text)
    bundles = read_schedules((x for y in computations.values() for x in y.values()), schedules)
    if known.clock is None or (len(devices) > 1 if gpu else not bundles):
        return dict.fromkeys(FIGURES)
    innermost = places(text)
    links, load = (0, 0.0) if gpu else network(devices)
    instructions = [*walk(computations, entry)]
    if gpu:
        called = r'"__gpu\$xla\.gpu\.triton".*op_name="[^"]*/attend'
        kernels = [one for one in instructions if re.search(called, one.rest)]
        each = attention / max(sum(one.times for one in kernels), 1)
        issued = {one: ("code", matmul_flops(one)) for one in instructions}
        issued |= {one: ("kernel", each) for one in kernels}
    else:
        issued = {one: cycles_of(one, bundles.get(one.name, 0), known.peak) for one in instructions}

    def cross(one) -> float:
        size, sent = sent_bytes(one, len(devices))
        across = size * load if one.collective == "all-to-all" else 0.0
        return max(sent / max(links, 1), across) / known.link

    def measure(yardstick: Yardstick) -> list:
        """Milliseconds predicted, of links and of moves, by function, and by what decides."""
        took, spent, parts, bounds = {}, Counter(), Counter(), Counter()
        for one, (number, cycles) in issued.items():
            computed = 1e3 * cycles * getattr(yardstick, number) / known.clock
            moved = 1e3 * yardstick.memory * memory_bytes(one) / known.hbm
            took[one], bound = max((computed, number), (moved, "memory"))
            ms = one.times * took[one]
            spent["predicted" if cycles or gpu else "moved"] += ms
            parts[part_of(one, innermost)] += ms
            bounds[bound] += ms
        alone = links_alone(instructions, took.get, lambda one: 1e3 * yardstick.link * cross(one))
        parts["collectives"] += alone
        return [spent["predicted"], alone, spent["moved"], parts, bounds]

    low, middle, high = (measure(end) for end in known.yardsticks)
    figures = *middle[:3], sum(low[:3]), sum(high[:3]), *middle[3:]
    return dict(zip(FIGURES, figures, strict=True))


# ---- The whole run, and the report -------------------------------------------------------------


def executions(cfg: T.Config) -> Counter:
    """How many times each program runs in the whole run."""
    counts = Counter(itertools.chain(*T.schedule(cfg).programs))
    validations = 1 + len(range(0, cfg.steps, cfg.val_every)) if cfg.val_every else 1
    evals = validations * math.ceil(cfg.val_tokens / cfg.val_batch)
    return counts | Counter(finish=1, eval=evals)


def about(cfg: T.Config, key) -> tuple[int, str]:
    """(tokens of one execution of a program, what it is, for a reader)."""
    if isinstance(key, T.Gradients):
        softmax = f"softmax over {key.candidates or cfg.vocab:,} ids"
        return cfg.stages[key.stage].batch_tokens, f"stage {key.stage}, {softmax}"
    if key == "eval":
        return min(cfg.val_batch, cfg.val_tokens), "validation"
    return 0, "averages" if key == "finish" else "update"


def program_bytes(compiled) -> dict[str, int]:
    """Bytes on a device of a program's arguments, outputs, temporaries, and of all at its peak."""
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,  # outputs that take the place of arguments
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }


def program_row(cfg, mesh, kernels, key, schedules: Path, dump: Path | None) -> dict:
    """Compile the program with this key in T.programs; its row of preflight.json."""
    tokens, what = about(cfg, key)
    row = {"name": str(key), "steps": executions(cfg)[key], "what": what, "tokens_per_step": tokens}
    row["resident_bytes"] = T.resident_bytes(cfg, mesh, key)
    limit = memory_of(mesh)
    row["device_bytes_limit"] = limit if limit < math.inf else None
    start = time.perf_counter()
    lowered = T.programs(cfg, mesh, kernels)[key].lower()
    compiled = T.compile_one(cfg, mesh, key, lowered)
    row["compile_seconds"] = round(time.perf_counter() - start, 1)
    row["bytes"] = program_bytes(compiled)
    if dump:
        (dump / f"{key}.hlo").write_text(compiled.as_text())
    attention = attention_flops(cfg, key)
    return row | count(compiled.as_text(), schedules, [*mesh.devices.flat], attention)


def whole_run(rows: list[dict]) -> dict:
    """Seconds of training: their sum, its band, its parts, those of functions; None: not known."""
    training = [row for row in rows if row["name"] != "eval"]
    if not all(row["functions_ms"] for row in training):
        return dict.fromkeys(("sum_seconds", *SECONDS, "components"))
    seconds, parts = Counter(), Counter()
    for row in training:
        runs = row["steps"] / 1e3
        seconds.update({name: runs * row[key] for name, key in SECONDS.items()})
        parts.update({part: runs * ms for part, ms in row["functions_ms"].items()})
    return {"sum_seconds": sum([*seconds.values()][:3]), **seconds, "components": parts}


def by_function(parts: dict, unit: str) -> str:
    """The functions of train_gpt.py, and kernels, that take more than 2 % of the time."""
    total = sum(parts.values())
    each = Counter(parts).most_common()
    large = ", ".join(f"{name} {x:.2f}" for name, x in each if x > 0.02 * total)
    return f"{large}; in all {total:.2f} {unit}"


def describe(report: dict) -> str:
    """The report as text. Its table is for one execution on one device: GiB of arguments, of
    temporaries, at the peak, and of the state beside them; ms of the three parts, -: not known."""
    form = "{:9}{:>7}{:>11}{:>9}{:>9}{:>9}{:>9}{:>12}{:>9}{:>9}".format
    heads = "compile s", "args", "temps", "peak", "+ state", "predicted", "links", "moves"
    table = [form("program", "times", *heads)]
    more = []
    run = report["predicted"]
    for row in report["variants"]:
        sizes = row["bytes"] | {"resident": row["resident_bytes"]}
        sizes = [sizes[x] / 2**30 for x in ("arguments", "temporary", "peak", "resident")]
        figures = sizes + [row[x] for x in FIGURES[:3]]
        cells = ["-" if x is None else f"{x:.2f}" for x in figures]
        counts = f"{row['steps']:,}", f"{row['compile_seconds']:.0f}"
        table.append(form(row["name"], *counts, *cells))
        more.append(f"{row['name']}, {row['what']}")
        if row["functions_ms"] and not run:
            more[-1] += f": {by_function(row['functions_ms'], 'ms')}"
    where = f"{report['devices']} x {report['device_kind']}"
    where += ", by its data sheet" * (report["rates"] == "data sheet")
    if not run:
        lead = f"Some programs on {where}; the sum for a run needs all (no --program)"
    elif not run["components"]:
        lead = f"The whole run on {where}: no seconds are predicted"
    else:
        lead = "The whole run on {}: {:.1f} s = predicted {:.1f} + links {:.1f} + moves {:.1f}"
        lead = f"{lead}; band {{:.1f}} to {{:.1f}} s".format(where, *[*run.values()][:6])
        more.append(f"the run: {by_function(run['components'], 's')}")
    more = "\n".join(textwrap.fill(x, 100, subsequent_indent="    ") for x in more)
    legend = "Predicted by the compiler, not measured: see the docstring of records/preflight.py."
    return "\n\n".join([lead, "\n".join(table), more, legend])


def memory_of(mesh) -> float:
    """Bytes that a run has on a device of `mesh`; infinity where they are not known. Of a GPU's
    memory jax takes 75 %, or the share that a variable of the environment says."""
    kind = mesh.devices.flat[0].device_kind
    if all(kind != name for name, *_ in GPUS.values()):
        return HARDWARE[kind].memory
    variable = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    said = os.environ.get(variable) or "0.75"
    right = re.fullmatch(r"\d*\.?\d+", said) and 0 < float(said) <= 1
    T.need(right, f"{variable}={said}: use a number above 0 and at most 1, such as 0.92")
    return int(float(said) * HARDWARE[kind].memory)


def run(argv: list[str] | None) -> int:
    """Compile the programs of a run, or those of --program, for the target, and report what they
    need; the exit status. A run that by its shapes does not fit is not compiled."""
    parser = T.Parser(prog="preflight.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", metavar="TARGET", help="v6e-8, h100x8, v5e:2x4 and others")
    T.add_config_options(parser)
    keep = parser.add_mutually_exclusive_group().add_argument
    keep("--dump", metavar="DIR", help="keep preflight.json and the programs")
    keep("--save", metavar="DIR", help="keep executables, for a --cache")
    names = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME"}
    parser.add_argument("--program", **names, help="only these, such as grads0 or anvil")
    args = parser.parse_args(argv)
    args.words += [] if T.asked_for(args).preset else ["speedrun"]  # what TARGET would run
    jax.config.update("jax_platforms", "cpu")  # whatever is here: all that counts is absent
    asked = T.resolve(args)
    dump = args.dump and Path(args.dump)
    for kept in filter(None, (args.dump, args.save)):
        Path(kept).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        if args.save:  # without SCHEDULES: an executable is found under the options it was made by
            jax.config.update("jax_compilation_cache_dir", args.save)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        else:
            before = os.environ.get("LIBTPU_INIT_ARGS", "")
            os.environ["LIBTPU_INIT_ARGS"] = f"{before} {SCHEDULES.format(folder)}"
        devices = absent_devices(args.target)
        cfg, mesh = T.make_mesh(asked, devices)
        limit = memory_of(mesh)
        cfg = T.with_whole_loss(cfg, mesh, limit)
        kernels, reason = T.pick_kernels(cfg, devices[0])
        T.tell(f"kernels: {reason}")
        every = {str(key): key for key in T.programs(cfg, mesh, kernels)}
        there = f"--program {' '.join(args.program)}: there are {', '.join(every)}"
        T.need({*args.program} <= {*every}, there)
        sizes = T.expected_bytes(cfg, mesh)
        largest = max(sizes, key=sizes.get)
        refusal = T.too_large(cfg, mesh, largest, sizes[largest], limit)
        if refusal and not args.program:
            T.tell(f"not compiled: {refusal}")
            return 1
        rows, refusals = [], []
        for name in args.program or every:
            T.tell(f"compiling {name}")
            row = program_row(cfg, mesh, kernels, every[name], Path(folder), dump)
            rows.append(row)
            needs = row["bytes"]["peak"] + row["resident_bytes"]
            refusals.append(T.too_large(cfg, mesh, name, needs, limit))
    command = shlex.join(["python", *sys.argv] if argv is None else argv)
    report = T.run_facts(asked, mesh, command, {"kernels": reason})
    report |= {"target": args.target, "device_kind": devices[0].device_kind, "devices": mesh.size}
    report |= {"kernels": reason, "rates": HARDWARE[devices[0].device_kind].rates, "variants": rows}
    report |= {"yardstick": HARDWARE[devices[0].device_kind].yardsticks[1]._asdict()}
    report |= {"total_steps": cfg.steps, "total_tokens": cfg.tokens_after(cfg.steps)}
    report["predicted"] = None if args.program else whole_run(rows)
    if dump:
        (dump / "preflight.json").write_text(json.dumps(report, indent=1) + "\n")
    saved = f"saved: copy {args.save} to {args.target}, and train with --cache DIR there"
    T.tell(f"\n{saved if args.save else describe(report)}\n")
    spare = (limit - T.usable(limit)) / 2**30
    device = f"{limit / 2**30:.2f} GiB of a device, with {spare:.1f} of them to spare"
    fit = f"{'these' if args.program else 'all'} fit the {device}"
    fit = fit if limit < math.inf else "its memory is not known here"
    T.tell("\n".join(filter(None, refusals)) or fit)
    return 1 if any(refusals) else 0


def main(argv=None) -> int:
    return T.report_errors(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
