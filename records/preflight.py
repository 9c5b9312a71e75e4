"""Will a run compile, fit and be fast on hardware that is not here?

    pip install -r requirements.txt "jax[tpu]"
    python records/preflight.py TARGET [PRESET] [--set KEY=VALUE ...] [--dump DIR] [--program NAME]

TARGET is v6e-1, v6e-4, v6e-8, v6e-16, v6e-64, v6e-256, h100x8, h100x16 (two machines) or a TPU
topology NAME:AxB that libtpu knows, such as v5e:2x4. No PRESET: `speedrun`. Every program of the
run is compiled by the real compiler, on any x86 machine, for devices that are absent: libtpu for
TPUs; for GPUs the two packages that an error names. It takes minutes of a core for each program
with gradients. With --program only those programs are compiled. The exit status is 1 if a program
does not fit.

The figure that counts leads the report: seconds of the whole run, the sum of

    predicted  of each instruction the longer of two: the compiler's estimate of its cycles, and its
               bytes at the rate at which memory has been measured. Loops count as often as they
               run, of a conditional the dearest branch. What the compiler makes no estimate of
               is counted in bundles of its final schedule: of Pallas kernels times 1.12, and no
               step of theirs shorter than 0.36 us (an upper bound, since blocks count that
               documents let them skip), of gathers, scatters and sorts times 1.77.
    links      the time in which devices only send and receive. A collective takes what the device
               with the fewest links sends, at the link's rate; an all-to-all what crosses the
               busiest cut through the mesh, if that is longer: each byte goes all the way, and
               through the middle of a v6e-8 two links carry half of all. (Of a v6e-256 rows and
               columns close to rings.) Between two machines, what leaves one by the network cards
               of all its GPUs, and of an all-to-all by a GPU's own. The schedule is played:
               links carry one collective after the other; what is started goes on beside other
               instructions until one awaits it; all else holds them up.
    moves      bytes of what has neither, above all what SparseCores do, at the memory's rate. A
               floor.

Bytes are those of operands and results that lie in memory, tiles filled up, none of what stays on
the chip; of slices, gathers and updates in place, fused or not, only the rows that they touch. The
compiler's own copies between memory and chip are counted, but take no time: they go on beside work.

Predictions of a compiler are not measurements. What there is to hold them against: made of
estimates and bundles alone for an earlier JAX port the prediction was 0.295 s a step where its log
has 0.307 s at 1024 tokens a row, 0.502 s for 0.424 s at 2048, and 667 s for the 612 s of its whole
run. Use them to rank changes, and quote ratios. Of hardware other than v6e there are no
predictions, only memory, collectives and the seconds that a run cannot go below: libtpu writes no
estimates for some, and H100's compiler makes none.

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
    ms, memory, of peak   predicted; what of it memory decides; the model's FLOP in that time, of
              the peak in bfloat16
    links, hidden, moves   ms of what is said above; the share of all time of links that work hides
    by component   Mcycles of all three above, GB, and the least that the matrix unit (none known of
              kernels) and memory would need, in Mcycles; how many times the larger of these it is
    visits    of the blocks that windows reach, those that attention kernels visit if documents have
              typical lengths, and the ms that they are faster then: in no other figure
    MB        of whole buffers that cross the network: before a reduce-scatter, after an all-gather;
              "sent" by one device

A program that does not fit as it is asked for is compiled with the next of train_gpt.py's settings,
as in a run (recompute, then smaller micro-batches): the report says with what, and its row has it
as `settings`, which is null otherwise.
--dump DIR keeps the optimized programs and preflight.json: {"preset", "command", "made_of": a hash
of source and config, "versions", "target", "device_kind", "devices", "links", "kernels",
"total_steps", "total_tokens", "variants": one row for each program, "predicted": totals of the run
(of all programs only), "compile_seconds", "cpu_seconds"}. What is not known is null. Rows that are
there stay if they are made of the same: two calls with other programs can share the work.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
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
import numpy as np

import train_gpt as T

TOPOLOGIES = {
    "v6e-1": "v6e:1x1",
    "v6e-4": "v6e:2x2",
    "v6e-8": "v6e:2x4",
    "v6e-16": "v6e:4x4",
    "v6e-64": "v6e:8x8",
    "v6e-256": "v6e:16x16",
}
GPU_TARGETS = {"h100x8": "1x1x8", "h100x16": "1x2x8"}  # the latter: two machines
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
# Cycles per bundle of a Pallas kernel, whose blocks come and go behind its work. Kernels of which
# times are published, compiled again: JAX's guide to matmuls with Pallas took 9.15 M cycles of a
# v5e for 9.00 M bundles (blocks of 512 x 1024 x 1024, 0.12 ms of the call included), and 9.20 M
# with a ReLU; JAX's flash attention in AXLearn's benchmark on a v4 took, for each head more, 1.09
# times its bundles forward, all that stands around it included, and both ways as long as its
# bundles where it computes and its bytes where it only moves blocks. 1.12 is the most that XLA's
# own estimates have where the matrix unit decides (0.88 to 1.12 of the bundles of such fusions).
KERNEL_FACTOR = 1.12
# What a step of a kernel's grid takes at least: the guide's matmul in blocks of 128 has 185 bundles
# a step, and takes 0.36 us for each of 32,768 steps, and 0.35 of 262,144: it waits for its blocks.
STEP_SECONDS = 0.36e-6
# Cycles per bundle of what else XLA makes no estimate of: gathers, scatters and sorts, which wait
# for rows: the ratio of estimates to bundles in an MLP of the earlier port, which waits for memory.
WAITING_FACTOR = 1.77
CALLS = "call", "call-start", "async-start"
RENAMES = "bitcast", "get-tuple-element", "tuple", "opt-barrier"
# What takes no time itself, and custom calls that take none.
FREE = *RENAMES, "parameter", "constant", "after-all", "partition-id", "while", "conditional"
NO_WORK = "ConcatBitcast", "AssumeGatherIndicesInBound", "AllocateBuffer"
NO_WORK += "PrepareAsyncCallStart", "PrepareAsyncCallDone"
# Those that need all of an operand for any part of their result.
WHOLE = "dot", "convolution", "reduce", "reduce-window", "sort", "custom-call"
# What functions of train_gpt.py do, for the table by component; the innermost that is named counts.
COMPONENTS = {
    "attention kernels": "attend_window window_forward window_backward attend_heads attend_triton",
    "projections": "attention projection",
    "MLP": "mlp squared_relu lean_squared_relu",
    "head and loss": "loss_sums fused_cross_entropy_backward",
    "mixes and norms": "forward weighted_sum_backward",
    "tables, exchange": "look_up candidate_head signed_sum fetch exchange sum_rows scatter_rows "
    "sum_requests gather_banks grads_step",
    "optimizer": "update_step finish_step",
    "collectives": "",
    "other": "",
}
PART_OF = {name: part for part, names in COMPONENTS.items() for name in names.split()}
COLLECTIVES = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"


class Hardware(NamedTuple):
    """One device of a kind, by its maker's data sheet where nothing else is said; None for what has
    not been looked up."""

    memory: int | None = None  # bytes that programs and state can have together
    hbm: float | None = None  # bytes/s to and from memory, measured if that is known
    link: float | None = None  # bytes/s that leave through one link
    clock: float | None = None  # Hz of the compiler's cycles
    network: float | None = None  # bytes/s that leave a machine for each of its devices


HARDWARE = {  # by device kind; its peak FLOP/s stand in train_gpt.py
    # Of a v6e's memory 1,185 GB/s have been measured and published; its data sheet has 1,638.
    "TPU v6 lite": Hardware(int(31.25 * 2**30), 1.185e12, 56e9, 1.75e9),
    # jax takes 75 % of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
    "NVIDIA H100 80GB HBM3": Hardware(
        int(0.75 * 81_559 * 2**20),
        3.35e12,
        450e9,
        network=50e9,  # a card of 400 Gbit/s for each
    ),
}


def hardware(kind: str) -> Hardware:
    """What is known of a device kind."""
    return HARDWARE.get(kind, Hardware())


# ------------------------------------------------------------------------------------------------
# Devices that are not here
# ------------------------------------------------------------------------------------------------


def absent_devices(target: str) -> list:
    """Devices for compilation only: a key of TOPOLOGIES or GPU_TARGETS, or a TPU's NAME:AxB.

    UserError if there is no such hardware, or no compiler for it.
    """
    from jax.experimental import topologies

    for key, value in NOBODY_HOME.items():
        os.environ.setdefault(key, value)
    known = f"use {', '.join((*TOPOLOGIES, *GPU_TARGETS))} or a TPU topology such as v5e:2x4"
    name = TOPOLOGIES.get(target, target)
    if target in GPU_TARGETS:
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            parts = " ".join(f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))
            raise T.UserError(f"{target} needs the GPU compiler: pip install {parts}")
        options = {"platform": "cuda", "topology_name": "h100", "topology": GPU_TARGETS[target]}
        options["target_config"] = H100
    elif not re.fullmatch(r"\w+:\d+(x\d+)+", name):
        raise T.UserError(f"no such hardware as {target}: {known}")
    else:
        if importlib.util.find_spec("libtpu") is None:
            raise T.UserError(f'{target} needs the TPU compiler: pip install "jax[tpu]"')
        shape = [int(side) for side in name.split(":")[1].split("x")]
        whole = (*shape, *[1] * (3 - len(shape)))  # one host, as on a v6e-8 VM
        bounds = whole if math.prod(shape) <= 8 else (2, 2, 1)  # on larger slices it has four chips
        options = {"platform": "tpu", "topology_name": name, "chips_per_host_bounds": bounds}
    try:
        return topologies.get_topology_desc(**options).devices
    except Exception as error:  # whatever the compiler library finds wrong with a name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise T.UserError(f"no such hardware as {target} ({reason}): {known}") from None


def link_count(devices) -> int:
    """Links of the device that has fewest: at a corner of a TPU mesh, one for each axis; two where
    that is a ring."""
    places = [getattr(device, "coords", (i,)) for i, device in enumerate(devices)]
    rings = hasattr(devices[0], "coords")
    axes = [len({*axis}) for axis in zip(*places, strict=True)]
    return sum((n > 1) + (rings and n >= RING) for n in axes)


RING = 16  # chips along an axis of a v6e that closes to a ring: only a v6e-256 has them


def machines(devices) -> int:
    """On how many machines they are."""
    return len({getattr(device, "process_index", 0) for device in devices})


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
        lines = len(places) / len({*axis}) * (2 if len({*axis}) >= RING else 1)
        below = (sum(x < cut for x in axis) for cut in {*axis})
        loads += [a * (len(places) - a) / len(places) / lines for a in below]
    return max(loads)


# ------------------------------------------------------------------------------------------------
# Reading an optimized program
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of an optimized program, and how often it runs."""

    name: str
    shape: str  # of its result, as text
    op: str
    rest: str  # operands, then attributes
    root: bool
    fused: bool  # part of a fusion's computation
    scope: dict = dataclasses.field(repr=False)  # name -> Instruction of its computation
    inner: dict | None = dataclasses.field(repr=False)  # the same of the computation that it calls
    times: int = 1
    in_loop: bool = False

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
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    def inputs(self) -> list["Instruction"]:
        """The operands that are instructions of the same computation, without what only renames."""
        found = []
        for one in (self.scope[name] for name in self.operands if name in self.scope):
            found += one.inputs() if one.op in RENAMES else [one]
        return found

    @functools.cached_property
    def transfer(self) -> "Instruction | None":
        """The collective that it is, or that it executes or starts in a computation of its own.

        A TPU's compiler also makes one of three kinds of fusions: one that starts it, some that do
        other work in the meantime (they count as that work), and one that waits for its end.
        """
        if any(self.op in (kind, f"{kind}-start") for kind in COLLECTIVES):
            return self
        carries = self.op in ("fusion", "call-start", "async-start") and self.inner
        beside = self.called("calls").startswith("async_collective_fusion")
        if not carries or beside or self.holds("AsyncCollectiveDone"):
            return None
        return next((one.transfer for one in self.inner.values() if one.transfer), None)

    def holds(self, target: str) -> bool:
        """Whether it is a fusion with a custom call of this kind."""
        fused = self.inner.values() if self.op == "fusion" and self.inner else ()
        return any(f'custom_call_target="{target}"' in one.rest for one in fused)

    @property
    def starts(self) -> bool:
        """Whether what it begins goes on while others run."""
        return self.op.endswith("-start") or self.holds("AsyncCollectiveStart")

    @property
    def awaits(self) -> bool:
        """Whether it waits for what another one has started."""
        return self.op.endswith("-done") or self.holds("AsyncCollectiveDone")

    @property
    def collective(self) -> str | None:
        """Which of COLLECTIVES it is. A TPU's reduce-scatter can be a fusion of another name."""
        if self.transfer and self.called("calls").startswith("all-reduce-scatter"):
            return "reduce-scatter"
        return self.transfer and self.transfer.op.removesuffix("-start")


def hlo_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """({computation: {name: Instruction}}, name of the entry) of an HLO module as text."""
    blocks = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\) -> .* \{\n)", text)[1:]
    heads = [re.match(r"(ENTRY )?%?([\w.\-]+) ", block) for block in blocks]
    found = {head[2]: {} for head in heads}
    fused = {*re.findall(r" fusion\(.*?\bcalls=%?([\w.\-]+)", text)}
    for head, block in zip(heads, blocks, strict=True):
        scope = found[head[2]]
        for root, name, *line in re.findall(
            r"^ +(ROOT )?%?([^\s=]+) = (.*?[\])}]) ([a-z][\w\-]*)\((.*(?:\n(?!\}$|  ).*)*)",
            block,
            re.MULTILINE,
        ):
            called = re.search(r"\b(?:calls|to_apply)=%?([\w.\-]+)", line[2])
            inner = called and found.get(called[1])
            place = {"root": bool(root), "fused": head[2] in fused, "scope": scope}
            scope[name] = Instruction(name, *line, **place, inner=inner)
    return found, next((head[2] for head in heads if head[1]), "")


def loop_trips(one: Instruction, computations) -> int | None:
    """How often a while loop runs: written beside it, or the constant that its counter meets."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest):
        return int(known[1])
    condition = computations[one.called("condition")]
    for test in condition.values():
        if test.op == "compare" and "direction=LT" in test.rest:
            bound = condition.get(test.operands[1])
            if bound is not None and bound.op == "constant":
                return int(bound.rest.split(")")[0])
    return None


def walk(computations, entry: str, notes: set, price=lambda one: one.cycles):
    """Yield all Instructions that a program executes, in their order.

    Loops multiply `times`; fusions are one instruction. Of a conditional the branch with the
    highest price counts. What makes the sum doubtful goes into `notes`.
    """

    def visit(name, times, in_loop):
        for one in computations[name].values():
            one = dataclasses.replace(one, times=times, in_loop=in_loop)
            yield one
            if one.op == "while":
                trips = loop_trips(one, computations)
                if trips is None:
                    notes.add(f"loop {one.name}, of unknown length, is counted once")
                yield from visit(one.called("body"), times * (trips or 1), True)
            elif one.op == "conditional":
                names = re.findall(r"%([\w.\-]+)", one.rest.split("), ", 1)[1])
                known = (name for name in names if name in computations)
                branches = [list(visit(name, times, in_loop)) for name in known]
                yield from max(branches, key=lambda found: sum(x.times * price(x) for x in found))
            elif one.op in CALLS and not one.transfer:
                yield from visit(one.called("to_apply") or one.called("calls"), times, in_loop)

    return visit(entry, 1, False)


class Array(NamedTuple):
    """One array of an HLO type."""

    count: int  # of its numbers
    size: int  # bytes of these
    stored: int  # bytes in memory, with what fills up tiles; 0 if it is kept on the chip


def arrays(shape: str) -> list[Array]:
    """The arrays of an HLO type. Of a layout {1,0:T(8,128)S(1)} T is the tile, S where it is."""
    found = []
    for dtype, sides, layout in re.findall(
        r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\](?:\{([^}]*)\})?", shape
    ):
        bits = re.search(r"\d+", dtype)  # pred has none
        bits, sides = int(bits[0]) if bits else 8, [int(x) for x in sides.split(",") if x]
        count, order = math.prod(sides), [int(x) for x in layout.split(":")[0].split(",") if x]
        tile = re.search(r"T\(([\d,]+)\)", layout)
        if tile and order:
            for axis, side in zip(order, reversed(tile[1].split(",")), strict=False):
                sides[axis] = -(-sides[axis] // int(side)) * int(side)
        stored = 0 if "S(" in layout else -(-math.prod(sides) * bits // 8)
        found.append(Array(count, -(-count * bits // 8), stored))
    return found


def array_bytes(shape: str) -> int:
    """Bytes of all arrays in an HLO type."""
    return sum(array.size for array in arrays(shape))


def numbers(one: Instruction) -> int:
    """How many numbers its result has."""
    return sum(array.count for array in arrays(one.shape))


def updates(one: Instruction) -> int:
    """How many numbers a dynamic-update-slice or a scatter writes."""
    names = one.operands[1:2] if one.op == "dynamic-update-slice" else one.operands
    names = names[-(len(names) // 2) :] if one.op == "scatter" else names
    return sum(numbers(one.scope[name]) for name in names if name in one.scope)


def in_place(one: Instruction) -> bool:
    """Whether it writes into an array that is there already: not one that its fusion has made."""
    if one.op not in ("dynamic-update-slice", "scatter"):
        return False
    base = one.scope.get(one.operands[0])
    while base is not None and base.op in RENAMES and base.operands:
        base = one.scope.get(base.operands[0])
    return base is None or base.op == "parameter" or not one.fused


def reads(one: Instruction, wanted: int) -> list[int]:
    """How many numbers of each operand `one` reads if `wanted` of its result are."""
    sizes = [numbers(one.scope[x]) if x in one.scope else 0 for x in one.operands]
    if one.op == "fusion" and one.inner:
        taken = fused_reads(one.inner, wanted)
        return [min(size, taken.get(at, 0)) for at, size in enumerate(sizes)]
    if one.op in ("slice", "dynamic-slice", "gather"):
        return [min(sizes[0], wanted), *sizes[1:]] if sizes else []
    if one.op in ("dynamic-update-slice", "scatter") and in_place(one):
        bases = 1 if one.op == "dynamic-update-slice" else (len(sizes) - 1) // 2
        old = updates(one) // bases if one.op == "scatter" else 0  # it adds to what is there
        return [min(size, old) for size in sizes[:bases]] + sizes[bases:]
    if one.op in WHOLE:
        return sizes
    return [min(size, wanted) for size in sizes]


def fused_reads(inner: dict[str, Instruction], wanted: int) -> Counter:
    """{number of a parameter: how many of its numbers a fused computation needs}."""
    need, found = Counter(), Counter()
    for one in reversed(inner.values()):
        asked = min(wanted if one.root else need[one.name], numbers(one))
        if one.op == "parameter":
            found[int(one.rest.split(")")[0])] = asked
        elif asked:
            for name, count in zip(one.operands, reads(one, asked), strict=True):
                need[name] += count
    return found


def writes(one: Instruction) -> list[int]:
    """How many numbers of each array of its result `one` writes."""
    if one.op == "fusion" and one.inner:
        return next(writes(x) for x in one.inner.values() if x.root)
    if one.op == "tuple":
        return [n for x in one.operands for n in writes(one.scope[x])]
    if one.op in RENAMES and len(one.operands) == 1 and one.operands[0] in one.scope:
        before = one.scope[one.operands[0]]
        if numbers(before) == numbers(one):
            return writes(before)
    return [updates(one)] if in_place(one) else [array.count for array in arrays(one.shape)]


def memory_bytes(one: Instruction) -> int:
    """Bytes that one execution reads from memory and writes there; none of a collective."""
    if one.op in FREE or one.awaits or one.transfer or one.op in CALLS:
        return 0
    if one.op == "custom-call" and any(f'"{target}"' in one.rest for target in NO_WORK):
        return 0
    results = arrays(one.shape)
    if one.starts:  # a copy to or from the chip: (what it makes, what of) or the other way around
        size = min(array.size for array in results[:2])
        return sum(min(size, array.stored) for array in results[:2])
    if one.kernel:  # an operand that is given several times, or is also a result, counts once
        aliased = {int(x) for x in re.findall(r"\{[\d, ]*\}: \((\d+),", one.rest)}
        names = {x for at, x in enumerate(one.operands) if at not in aliased and x in one.scope}
        given = [array for name in names for array in arrays(one.scope[name].shape)]
        return sum(array.stored for array in results + given)
    total = 0
    for name, count in zip(one.operands, reads(one, numbers(one)), strict=True):
        for array in arrays(one.scope[name].shape) if name in one.scope else ():
            total += array.stored * min(count, array.count) / max(array.count, 1)
    written = writes(one)
    if len(written) != len(results):
        written = [array.count for array in results]
    for count, array in zip(written, results, strict=True):
        total += array.stored * count / max(array.count, 1)
    return round(total)


def matmul_flops(one: Instruction) -> int:
    """FLOP of the matmuls of an instruction or of what it fuses, as dots or as convolutions.

    Each of b m k n: twice the root of the sizes of both operands and the result, if what all three
    share (b) is taken out once.
    """
    if one.op == "fusion" and one.inner:
        return sum(matmul_flops(x) for x in one.inner.values())
    if one.op not in ("dot", "convolution") or not {*one.operands[:2]} <= {*one.scope}:
        return 0
    shapes = *(one.scope[x].shape for x in one.operands[:2]), one.shape
    sides = [[int(n) for n in re.findall(r"\d+", x[x.index("[") : x.index("]")])] for x in shapes]
    if labels := re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest):
        places = [[at.index(x) for at in labels.groups()] for x in labels[1] if x.isdigit()]
        shared = [{side[i] for side, i in zip(sides, at, strict=True)} for at in places]
        shared = [sizes.pop() for sizes in shared if len(sizes) == 1]
    else:
        axes = re.search(r"lhs_batch_dims=\{([\d,]*)\}", one.rest)
        shared = [sides[0][int(x)] for x in axes[1].split(",")] if axes else []
    return 2 * math.isqrt(math.prod(map(math.prod, sides)) // math.prod(shared))


def sent_bytes(one: Instruction, devices: int) -> tuple[int, int]:
    """(bytes of the whole buffer of a collective, those that a device sends).

    The buffer is that before a reduce-scatter, after the others. Of it each device must send, or
    receive, (n-1)/n; for an all-reduce, which is both, twice that.
    """
    kind, inside = one.collective, one.transfer
    groups = re.search(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])", inside.rest)
    n = devices if groups is None else int(groups[2] or len(groups[1].split(",")))
    whole = inside.op.endswith("-start") and kind != "all-reduce"  # operands and results
    size = array_bytes(inside.shape.replace("u32[]", "") if whole else inside.shape)
    if whole:
        size = size * n // (n + 1) if kind in ("reduce-scatter", "all-gather") else size // 2
    elif inside.op == "reduce-scatter":
        size *= n
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
    return size, round(size * share)


def collectives(instructions, devices: int) -> dict[str, dict]:
    """{kind: {count, bytes, largest_bytes, in_loop, sent_bytes}} of what one device executes."""
    found = {}
    for one in instructions:
        if not one.collective:
            continue
        size, sent = sent_bytes(one, devices)
        empty = {"count": 0, "bytes": 0, "largest_bytes": 0, "sent_bytes": 0, "in_loop": False}
        row = found.setdefault(one.collective, empty)
        row["count"] += one.times
        row["bytes"] += one.times * size
        row["sent_bytes"] += one.times * sent
        row["largest_bytes"] = max(row["largest_bytes"], size)
        row["in_loop"] |= one.in_loop
    return found


def link_seconds(instructions, work, cross) -> tuple[float, float]:
    """(seconds that collectives take, those in which nothing else is done): a play of the schedule.

    work(one), cross(one): seconds of one execution of its own, and in the links, which carry one
    collective after the other. Those that are started go on until an instruction awaits them;
    others, and what awaits something unknown, hold everything up. Loops are played once with all
    times multiplied: every trip is alike.
    """

    def start_of(one) -> str | None:
        """What it awaits; found through fusions that do other work in the meantime."""
        for x in one.inputs():
            if x.starts:
                return x.name
            between = x.op.endswith("-update") or "async_collective_fusion" in x.called("calls")
            if between and (name := start_of(x)):
                return name
        return None

    now = free = worked = total = 0.0  # the time; when the links are free
    ends = dict.fromkeys((start_of(one) for one in instructions if one.awaits), 0.0)
    for one in instructions:
        if one.awaits:
            name = start_of(one)
            now = max(now, ends[name] if name else free)
        elif one.transfer:
            took = one.times * cross(one)
            total, free = total + took, max(free, now) + took
            if one.starts and one.name in ends:
                ends[one.name] = free
            else:
                now = free
        spent = one.times * work(one)
        now, worked = now + spent, worked + spent
    return total, max(0.0, min(total, max(now, free) - worked))


def kernel_bundles(schedule: str) -> tuple[int, int, int]:
    """(instruction bundles that a Pallas kernel issues, steps of its outermost loops, which is that
    over its grid, loops of unknown length, counted once).

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
    open_loops, steps, unknown = [[0, 1]], 0, 0  # from outside in: bundles, trips

    def close(depth: int):
        nonlocal steps, unknown
        while len(open_loops) > depth + 1:
            bundles, trips = open_loops.pop()
            unknown += trips is None
            open_loops[-1][0] += bundles * (trips or 1)
            steps += (trips or 1) * (len(open_loops) == 1)

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
    return open_loops[0][0], steps, unknown


dumps: list[Path] = []  # the folder of the schedule_dump that is open


@contextlib.contextmanager
def schedule_dump():
    """A temporary folder to which libtpu, when it is loaded inside, writes its final schedules.

    Inside another one it is the same folder, for a process loads libtpu once. All other passes are
    left out: they would be gigabytes, and twice the time.
    """
    if dumps:
        yield dumps[0]
        return
    before = os.environ.get("LIBTPU_INIT_ARGS")
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        only = "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        os.environ["LIBTPU_INIT_ARGS"] = f"{before or ''} {flags} {only}".strip()
        dumps.append(Path(folder))
        try:
            yield dumps[0]
        finally:
            dumps.clear()
            os.environ.pop("LIBTPU_INIT_ARGS")
            if before is not None:
                os.environ["LIBTPU_INIT_ARGS"] = before


class Kernel(NamedTuple):
    """What the schedule of a Pallas kernel tells."""

    bundles: int
    steps: int  # of its grid
    skipped: list[int] = []  # bundles of each region that a step of its grid may skip


def skipped_bundles(schedule: str) -> list[int]:
    """Bundles of the large regions that a predicate may skip, in order: of pl.when, in our kernels.

    A branch to region N is there to skip what goes on to the end of region N - 1.
    """
    head = r"^ *(?:0x)?([0-9a-f]+) +(?:[A-Z]{2})? *:[ >]*\{"
    _, *parts = re.split(head, schedule, flags=re.MULTILINE)
    bundles = [(int(at, 16), text) for at, text in zip(parts[::2], parts[1::2], strict=True)]
    ends = {int(n): at for at, text in bundles for n in re.findall(r"End region (\d+)", text)}
    found = []
    for at, text in bundles:
        for target in re.findall(r"sbr\.rel \(.*?target = \$region(\d+)", text):
            size = ends.get(int(target) - 1, 0) - at
            found += [size] if 100 < size < len(bundles) / 2 else []
    return found


def read_schedules(instructions, folder: Path, notes: set) -> dict[str, Kernel] | None:
    """{name: Kernel} of a program's Pallas kernels, and of what else has a schedule, but no
    estimate: gathers, scatters and sorts.

    From the schedules in `folder`, which it empties; of two under one name the later counts, for
    the one before may be of a program that did not fit. Equal kernels are compiled once, under the
    name of one of them. None if one has no schedule: libtpu was loaded before schedule_dump.
    """
    untold = {one.name: one for one in instructions if one.kernel or not one.cycles}
    kernels = {name: one for name, one in untold.items() if one.kernel}
    code = {x: re.findall(r'"body":"(.*?)"', one.rest) or x for x, one in untold.items()}
    found, open_loops = {}, 0
    for path in sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if name and name[1] in untold:
            text = path.read_text(errors="replace")
            bundles, steps, unknown = kernel_bundles(text)
            found[name[1]] = Kernel(bundles, steps, skipped_bundles(text))
            if unknown and name[1] in kernels:
                notes.add(f"kernel {name[1]}: {unknown} loops of unknown length counted once")
            open_loops += bool(unknown) and name[1] not in kernels
        path.unlink()
    if open_loops:
        notes.add(f"{open_loops} gathers, scatters and sorts: loops of unknown length counted once")
    all_ = dict(found)
    for name in kernels:
        same_code = [found[x] for x in found if code[x] == code[name]]
        same_function = [found[x] for x in found if function_of(x) == function_of(name)]
        equal = same_code or same_function
        if not equal:
            notes.add(f"kernel {name} has no schedule: no prediction")
            return None
        all_[name] = found.get(name) or max(equal)
    return all_


def function_of(name: str) -> str:
    """The name of a kernel without the numbers that tell its calls apart."""
    return re.sub(r"(\.\d+)+$", "", name)


def stack_frames(text: str) -> dict[str, list[str]]:
    """{stack_frame_id: functions, innermost first} of an HLO module as text.

    A frame names its parent by the number of that plus 1; the outermost one names itself.
    """

    def section(name):
        found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return dict(x.split(" ", 1) for x in found[1].splitlines()) if found else {}

    def field(line, key):
        return re.search(rf"{key}=(\d+)", line)[1]

    names, places = section("FunctionNames"), section("FileLocations")
    frames, found = section("StackFrames"), {}
    for number in sorted(frames, key=int):  # parents come first
        place = places[field(frames[number], "file_location_id")]
        parent = str(int(field(frames[number], "parent_frame_id")) - 1)
        function = names[field(place, "function_name_id")].strip('"')
        found[number] = [function, *found.get(parent, [])]
    return found


def component(one: Instruction, frames: dict[str, list[str]]) -> str:
    """Which of COMPONENTS an instruction belongs to: by a matmul that it fuses, then by itself.

    One that the compiler has added, such as a copy, belongs to what uses it, or to what made it.
    """

    def named(x) -> str | None:
        fused = [*x.inner.values()] if x.op == "fusion" and x.inner else []
        matmuls = [y for y in fused if y.op in ("dot", "convolution")]
        for source in (*matmuls, x, *(y for y in fused if y.root)):
            frame = re.search(r"stack_frame_id=(\d+)", source.rest)
            if functions := frame and frames.get(frame[1]):
                parts = (PART_OF.get(name.split(".")[0]) for name in functions)
                return next(filter(None, parts), "other")
        return None

    def users(x):
        return [y for y in x.scope.values() if x.name in y.operands]

    if one.transfer or one.holds("AsyncCollectiveDone"):
        return "collectives"
    for ahead in (users, Instruction.inputs):
        found = [one]
        for _ in range(9):
            if parts := [part for part in map(named, found) if part]:
                return parts[0]
            found = [y for x in found[:9] for y in ahead(x)]
    return "other"


def analyse(compiled, mesh, schedules: Path) -> dict:
    """What a compiled program tells of one execution on one device, for its row.

    None stands for what is not known. "flops" is the compiler's own count, which leaves out kernels
    and takes the body of a loop once.
    """
    devices, notes, text = [*mesh.devices.flat], set(), compiled.as_text()
    known, peak = hardware(devices[0].device_kind), T.peak_flops(devices[0].device_kind)
    (computations, entry), frames = hlo_computations(text), stack_frames(text)
    every = (one for scope in computations.values() for one in scope.values())
    kernels = read_schedules(every, schedules, notes)
    links, load = link_count(devices) or 1, all_to_all_load(devices)
    hosts = machines(devices)

    def cycles(one, factor=KERNEL_FACTOR) -> int:
        found = (kernels or {}).get(one.name)
        if one.cycles or not found:
            return one.cycles
        if not one.kernel:
            return round(found.bundles * WAITING_FACTOR)
        waits = found.steps * STEP_SECONDS * (known.clock or 0.0)
        return round(max(found.bundles * factor, waits))

    def seconds(one, *factor) -> tuple[float, float]:
        """By cycles and by memory: copies that go on beside other work take none of either."""
        moves = known.hbm and not one.starts
        computed = cycles(one, *factor) / known.clock if known.clock else 0.0
        return computed, memory_bytes(one) / known.hbm if moves else 0.0

    def work(one) -> float:
        return max(seconds(one))

    def cross(one) -> float:
        size, sent = sent_bytes(one, mesh.size)
        across = size * load if one.collective == "all-to-all" else 0.0
        inside = max(sent / links, across) / known.link if known.link else 0.0
        if hosts == 1 or not known.network:
            return inside
        cards = 1 if one.collective == "all-to-all" else len(devices) / hosts
        leaves = size * (1 - 1 / hosts) * (2 if one.collective == "all-reduce" else 1)
        return max(inside, leaves / cards / known.network)

    instructions = [*walk(computations, entry, notes, work)]
    linked, alone = link_seconds(instructions, work, cross)
    estimated = sum(one.times * one.cycles for one in instructions)
    parts = {part: Counter() for part in COMPONENTS}
    spent, calls = Counter(), {}
    for one in instructions:
        computed, moving = seconds(one)
        took, part = one.times * max(computed, moving), parts[component(one, frames)]
        spent["predicted" if computed else "moved"] += took
        spent["by memory"] += took if moving > computed > 0 else 0.0
        part["seconds"] += took
        part["bytes"] += one.times * memory_bytes(one)
        part["flops"] += one.times * matmul_flops(one)
        if one.kernel and kernels:
            spent["slack"] += one.times * (max(seconds(one, WAITING_FACTOR)) - work(one))
            call = {"calls": 0, "cycles": 0, "skipped": kernels[one.name].skipped}
            call = calls.setdefault(function_of(one.name), call)
            call["calls"] += one.times
            call["cycles"] += one.times * cycles(one)
    parts["collectives"]["seconds"] += alone
    own, clock = sum(call["cycles"] for call in calls.values()), known.clock
    told = bool(estimated and clock) and kernels is not None
    table = {
        part: {
            "cycles": round(x["seconds"] * clock),
            "bytes": x["bytes"],
            "flops": x["flops"],
            "matrix_cycles": round(x["flops"] / peak * clock),
            "memory_cycles": round(x["bytes"] / known.hbm * clock),
        }
        for part, x in (parts.items() if told and peak else ())
    }
    return {
        "flops": (compiled.cost_analysis() or {}).get("flops"),
        "bytes": T.program_bytes(compiled),
        "collectives": collectives(instructions, mesh.size),
        "estimated_cycles": estimated + own if told else None,
        "kernel_cycles": own if told else None,
        "predicted_ms": 1e3 * spent["predicted"] if told else None,
        "memory_ms": 1e3 * spent["by memory"] if told else None,
        "slack_ms": 1e3 * spent["slack"] if told else None,
        "link_ms": known.link and 1e3 * linked,
        "link_floor_ms": known.link and 1e3 * alone,
        "moved_floor_ms": known.hbm and 1e3 * spent["moved"],
        "components": table or None,
        "kernels": calls,
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
    counts = Counter(name for step in range(cfg.steps) for name in T.schedule(cfg).programs(step))
    validations = 1 + sum(T.is_due(cfg.val_every, step - 1, step) for step in range(cfg.steps))
    rows = cfg.val_tokens // cfg.val_row
    counts["finish"], counts["eval"] = 1, validations * -(-rows // (cfg.val_batch // cfg.val_row))
    return counts


def about(cfg: T.Config, name: str) -> dict:
    """What a program takes, for its row of preflight.json; "what" says it for a reader."""
    table, steps = T.param_table(cfg), T.updates(cfg)
    if name in (*steps, "finish"):
        changed = [x for x, row in table.items() if row.averages or row.rescaled]
        changed = T.updated(cfg, name) if name in steps else changed
        what = {"finish": "averages", "adam_tied": "tied update"}
        what = what.get(name, "update")
        what += f" of {len(changed)} parameters, {sum(table[x].count for x in changed):,} numbers"
        if steps.get(name, 1) > 1:
            what += f", every {steps[name]} steps"
        return {"what": what, "tokens_per_step": 0}
    batch = min(cfg.val_batch, cfg.val_tokens)
    row, windows, targets, ids = cfg.val_row, cfg.val_windows, 1, 0
    if name != "eval":
        at, ids = T.grads_kinds(cfg)[int(name.removeprefix("grads"))]
        stage = cfg.stages[at]
        batch = stage.batch_tokens
        row, windows = stage.row_tokens, stage.windows
        targets = len(stage.weights) + any(stage.prefix)
    what = f"{batch:,} tokens, rows of {row:,}, windows {windows[0]}/{windows[1]}"
    if targets > 1 or ids:
        what += f", {targets} targets of " if targets > 1 else ", "
        what += f"{ids:,} ids" if ids else "all ids"
    return {
        "what": what,
        "tokens_per_step": batch,
        "row_tokens": row,
        "windows": windows,
        "targets": targets,
        "candidates": ids,
    }


# Lengths of documents: log-normal with this mean and deviation of the logarithm, as FineWeb's.
DOCUMENTS = 1050, 1.0


def typical_starts(cfg: T.Config, stage: T.Stage) -> np.ndarray:
    """Where the documents of a batch's tokens begin in their rows, int32 [rows, t], as documents of
    typical lengths fill rows of `stage` in plan_packed's order."""
    (mean, deviation), draw = DOCUMENTS, np.random.default_rng(0)
    tokens = np.zeros((stage.rows, stage.row_tokens + 1), np.int32)
    for row in tokens:
        at = 0
        while at < row.size:
            row[at] = 1  # BOS
            length = draw.lognormal(math.log(mean) - deviation**2 / 2, deviation)
            at += max(2, min(round(length), stage.doc_cap or row.size))
    return np.asarray(T.document_starts(T.segment_ids(tokens[:, :-1], 1, cfg.attention_cap)))


def visits(cfg: T.Config, name: str, devices: int, kernels: dict, clock: float) -> list[dict]:
    """Of a program with gradients, by kind of layer and window: the share of the blocks that
    windows reach which typical documents make attention visit, and the ms that are less for it.

    As T.visits, the kernels' rule, has it. None as ms: not all schedules say what a visit takes.
    """
    stage = cfg.stages[T.grads_kinds(cfg)[int(name.removeprefix("grads"))][0]]
    starts, found = typical_starts(cfg, stage), {}
    rows = len(starts)
    for i in cfg.layers_with("attends"):
        heads = T.heads_of(cfg, i, stage.windows)
        plan = T.window_plan(heads, stage.row_tokens)
        earliest = plan.earliest(starts)
        blocks = np.arange(earliest.shape[1])
        seen = [int(T.visits(blocks, j, earliest).sum()) for j in range(plan.slots)]
        saved = 0
        for direction, steps in (("forward", blocks.size), ("backward", blocks.size + plan.delay)):
            regions = kernels.get(plan.name(direction), {"skipped": []})["skipped"]
            known = len(regions) == plan.slots - 1 and saved is not None
            less = (size * (rows * steps - n) for size, n in zip(regions, seen[1:], strict=False))
            saved = saved + sum(less) if known else None
        row = {"attends": cfg.layers[i].attends, "window": heads.window, "layers": 0, "ms": 0.0}
        row = found.setdefault((cfg.layers[i].attends, heads.window), row)
        row["share"] = sum(seen) / (rows * blocks.size * plan.slots)
        row["layers"] += 1
        less = None if saved is None else 1e3 * saved * KERNEL_FACTOR / devices / clock
        row["ms"] = None if None in (less, row["ms"]) else row["ms"] + less
    return [*found.values()]


def model_flops(cfg: T.Config, name: str, tokens: float) -> float:
    """Model FLOPs of a program with so many `tokens`, on all devices."""
    if name == "eval":  # a forward pass only, over the whole vocabulary
        whole = tuple(dataclasses.replace(s, candidates=(0,)) for s in cfg.stages)
        return T.flops_per_token(dataclasses.replace(cfg, stages=whole), 0) / 3 * tokens
    steps = (step for step in range(cfg.steps) if T.schedule(cfg).programs(step)[0] == name)
    return sum(T.flops_per_token(cfg, step) * tokens for step in itertools.islice(steps, 1))


def preflight_row(cfg, mesh, kernels, name: str, schedules: Path, dump: Path | None, say) -> dict:
    """Compile a program; its row of preflight.json. Model FLOPs are those of all devices."""
    kind, start = mesh.devices.flat[0].device_kind, time.perf_counter()
    limit, peak = hardware(kind).memory, T.peak_flops(kind)
    of = about(cfg, name)
    row = {"name": name, "steps": executions(cfg)[name], **of}
    row["model_flops"] = model_flops(cfg, name, of["tokens_per_step"])
    row["resident_bytes"] = T.resident_bytes(cfg, mesh, name)
    row |= {"device_bytes_limit": limit, "settings": None, "hlo": None}
    try:
        compiled, changes, _ = T.compile_fitting(cfg, mesh, kernels, name, limit, say)
    except jax.errors.JaxRuntimeError as error:
        return row | refused(error) | {"compile_seconds": round(time.perf_counter() - start, 1)}
    row["compile_seconds"] = round(time.perf_counter() - start, 1)
    row["settings"] = changes or None
    row |= analyse(compiled, mesh, schedules)
    row |= {"visits": None, "visit_ms": None}
    ours, clock = any(x.startswith("window_") for x in row["kernels"]), hardware(kind).clock
    if ours and clock and name.startswith("grads"):
        row["visits"] = visits(cfg, name, mesh.size, row["kernels"], clock)
        each = [found["ms"] for found in row["visits"]]
        row["visit_ms"] = None if None in each else sum(each)
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

    def in_all(part, key):
        return sum(row["steps"] * row["components"][part][key] for row in training)

    parts = None
    if all(row.get("components") for row in training):
        keys = training[0]["components"]["other"]
        parts = {part: {key: in_all(part, key) for key in keys} for part in COMPONENTS}
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
        "train_memory_seconds": seconds("memory_ms", training),
        "slack_seconds": seconds("slack_ms", training),
        "train_link_seconds": seconds("link_ms", training),
        "visit_seconds": seconds("visit_ms", grads),
        "components": parts,
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


def by_component(name: str, parts: dict) -> list[str]:
    """Rows of the table by component: those that take any time, and their sum."""
    keys = "cycles", "bytes", "matrix_cycles", "memory_cycles"
    parts = {part: row for part, row in parts.items() if row["cycles"] or row["bytes"]}
    whole = {key: sum(row[key] for row in parts.values()) for key in keys}
    lines = []
    for part, row in (parts | {"all": whole}).items():
        cells = [f"{row[key] / 1e6:,.2f}" for key in keys]
        cells[1] = f"{row['bytes'] / 1e9:,.2f}"
        floor = max(row["matrix_cycles"], row["memory_cycles"])
        cells.append(f"{row['cycles'] / floor:.2f}" if floor > 1e-3 * row["cycles"] else "-")
        lines.append(f"{name:8} {part:17}" + "".join(f" {cell:>13}" for cell in cells))
    return lines


def lead(report: dict) -> str:
    """The figure that counts, and what else there is to say about the whole run."""
    run, where = report["predicted"], f"{report['devices']} x {report['device_kind']}"
    spent = f"compiled in {report['compile_seconds']:.0f} s"
    spent += f", {report['cpu_seconds'] / 60:.1f} minutes of CPU"
    if run is None:
        return f"Some programs on {where}; the sum for a run needs all (no --program)\n  {spent}"
    keys = "train_seconds", "train_link_floor_seconds", "train_moved_floor_seconds"
    parts_of = [run[key] for key in keys]
    parts = zip(("predicted", "links", "moves"), parts_of, strict=True)
    parts = " + ".join(f"{name} {number(seconds)}" for name, seconds in parts)
    total = "unknown" if run["sum_seconds"] is None else f"{run['sum_seconds']:.1f} s"
    flops, peak = run["model_flops"], T.peak_flops(report["device_kind"])
    tokens = f"{report['total_steps']:,} steps, {report['total_tokens']:,} tokens, {flops:.3e} FLOP"
    if run["train_seconds"] and peak:
        share = flops / (report["devices"] * peak * run["train_seconds"])
        tokens += f", {share:.1%} of the peak in what is predicted"
    lines = [f"The whole run on {where}: {total} = {parts}", tokens]
    if run["sum_seconds"] is None and peak:
        least = max(flops / report["devices"] / peak, sum(x or 0 for x in parts_of))
        lines.append(f"no less than {least:.1f} s, by the rates of memory, links and matrix units")
    if run["train_seconds"]:
        by_memory, linked = run["train_memory_seconds"], run["train_link_seconds"]
        share, away = by_memory / run["train_seconds"], 1 - parts_of[1] / linked if linked else 0
        said = f"memory decides {by_memory:.1f} s, {share:.1%}, of what is predicted"
        lines.append(f"{said}; of {linked:.1f} s of links {away:.1%} are hidden")
    if run["visit_seconds"] is not None:
        less = f"{run['visit_seconds']:.1f} s less"
        lines.append(f"{less} if attention skips what documents of typical lengths let it skip")
    if run["slack_seconds"] is not None:
        more = f"{run['slack_seconds']:.1f} s more if a bundle of kernels took"
        lines.append(f"{more} {WAITING_FACTOR} cycles, not {KERNEL_FACTOR}")
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
    heads = "TFLOP", "counted", "Mcycles", "kernels", "ms", "memory", "of peak"
    costs = [line("", *heads, "links", "hidden", "moves")]
    heads = "Mcycles", "GB", "matrix unit", "memory", "x the floor"
    parts = [f"{'by component':26}" + "".join(f" {head:>13}" for head in heads)]
    seen = ["visits   of what windows reach, with documents of typical lengths; ms less for it"]
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
        spent = number(row.get("predicted_ms")), number(row.get("memory_ms"))
        used, links, alone = (row.get(x) for x in ("utilization", "link_ms", "link_floor_ms"))
        away = number(1 - alone / links if links else None, ".1%")
        floors = number(used, ".1%"), number(alone), away, number(row.get("moved_floor_ms"))
        costs.append(line(name, *flops, *cycles, *spent, *floors))
        parts += by_component(name, row["components"]) if row.get("components") else []
        for found in row.get("visits") or ():
            kind = f"{found['layers']} layers {found['attends']}, window {found['window']:,}"
            seen.append(f"{name:8} {kind:32} {found['share']:>8.1%} {number(found['ms']):>8}")
        for kind, found in row.get("collectives", {}).items():
            keys = "bytes", "largest_bytes", "sent_bytes"
            size = (f"{found[key] / 1e6:,.1f}" for key in keys)
            loop = "yes" if found["in_loop"] else "no"
            sent.append(f"{name:9} {kind:17}" + line("", found["count"], *size, loop)[9:])
    if report["predicted"] and (whole := report["predicted"]["components"]):
        parts += by_component("the run", whole)
    seen, parts = (table if len(table) > 1 else [] for table in (seen, parts))
    notes = [f"{row['name']}: {note}" for row in rows for note in row.get("notes", ())]
    legend = (
        "Predicted by the compiler, not measured, with all blocks that windows reach; for one "
        "execution\non one device, but TFLOP on all. What the columns mean, and how far to trust "
        "them: the docstring\nof records/preflight.py."
    )
    tables = (programs, memory, costs, parts, seen, sent, notes, [legend])
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


def source_of(cfg: T.Config, target: str) -> str:
    """A hash of all that a prediction is made of."""
    read = [Path(module.__file__).read_bytes() for module in (T, sys.modules[__name__])]
    return hashlib.sha256(b"".join([*read, repr((cfg, target)).encode()])).hexdigest()


def report_in(folder: Path) -> dict | None:
    """What preflight.json of a folder says; None without one. UserError if it is damaged."""
    path = folder / "preflight.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        report = None
    if not (isinstance(report, dict) and {"made_of", "versions", "variants"} <= report.keys()):
        raise T.UserError(f"{path} is no report: delete it") from None
    return report


def kept(cfg: T.Config, target: str, dump: Path) -> dict[str, dict]:
    """Name -> row of the programs that stand in `dump`, made of the same."""
    before = report_in(dump)
    if before is None:
        return {}
    same = (before["made_of"], before["versions"]) == (source_of(cfg, target), T.versions())
    return {row["name"]: row for row in before["variants"]} if same else {}


def preflight(cfg, target: str, names=(), dump: Path | None = None, command="", say=T.tell) -> bool:
    """Compile the run's programs for absent hardware, report what they need; whether they fit.

    All of them, or those in `names`. With `dump`, preflight.json and the optimized HLO of each
    program go there; programs that stand there already, made of the same, stay in the report.
    """
    if dump:
        T.make_folder(dump, "--dump")
    made_of = source_of(cfg, target)
    with schedule_dump() as schedules:
        devices = absent_devices(target)
        recipe = cfg
        cfg, mesh = T.make_mesh(recipe, devices)
        kernels, reason = T.pick_kernels(cfg, devices[0], mesh.size)
        say(f"kernels: {reason}")
        every = [*T.programs(cfg, mesh, kernels)]
        for name in names:
            if name not in every:
                raise T.UserError(f"--program {name}: there are {', '.join(every)}")
        rows = {}
        for name in names or every:
            cpu = sum(os.times()[:4])  # of this process and of those that it starts
            rows[name] = preflight_row(cfg, mesh, kernels, name, schedules, dump, say)
            rows[name]["cpu_seconds"] = round(sum(os.times()[:4]) - cpu, 1)
            say(f"{name} compiled in {rows[name]['compile_seconds']:.0f} s")
    if dump:
        rows = kept(recipe, target, dump) | rows
    rows = [rows[name] for name in every if name in rows]
    report = {
        "preset": cfg.preset,
        "command": command,
        "made_of": made_of,
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
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows), 1),
    }
    if dump:
        (dump / "unfinished.json").write_text(json.dumps(report, indent=1) + "\n")
        os.replace(dump / "unfinished.json", dump / "preflight.json")
    fits, lines = verdict(report)
    say("\n" + "\n".join([describe(report), "", *lines]))
    return fits


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""

    def run():
        parser = T.Parser(prog="preflight.py", description=(__doc__ or "").split("\n")[0])
        parser.add_argument(
            "target", metavar="TARGET", help="v6e-8, v6e-64, h100x8, v5e:2x4 or the like"
        )
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
