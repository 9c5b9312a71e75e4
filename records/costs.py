"""What each line of train_gpt.py assigns and costs, by tracing a step; records/tour.py shows it.

Nothing is compiled and no device is needed: jax keeps with every operation the line that made it.
FLOPs are those of matrix products. Bytes are what operations read and write, if each went to memory
by itself: an upper bound, as compilers fuse them.
"""

import ast
import json
import math
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

import train_gpt as T  # first: it reports in one line that jax is missing

# isort: split

import jax
import jax.numpy as jnp
import numpy as np

FILE = T.train.__code__.co_filename
TREE = ast.parse(T.SOURCE)
NAMED = [node for node in TREE.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
OWNER = {  # line -> the function or class at the top of the file that holds it
    line: node.name for node in NAMED for line in range(node.lineno, node.end_lineno + 1)
}

# ---- Shapes: what each line assigns --------------------------------------------------------------

SHORT = {"float32": "f32", "bfloat16": "bf16", "int32": "i32", "uint16": "u16", "uint32": "u32"}
PLACES, FEATURES = "btsn", "hdfv"  # dimension letters of places, and of what is at each


def assigned_names() -> dict[int, tuple[int, list[str]]]:
    """Line -> (first line of its statement, names that it assigns); of a `return` "returns"."""
    found = {}
    for node in ast.walk(TREE):
        last = getattr(node, "end_lineno", 0)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        elif isinstance(node, ast.For):
            targets, last = [node.target], node.lineno
        elif isinstance(node, ast.Return):
            targets = [ast.Name("returns", ast.Store())]
        else:
            continue
        every = (x for target in targets for x in ast.walk(target))
        names = [x.id for x in every if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
        found |= dict.fromkeys(range(node.lineno, last + 1), (node.lineno, names))
    return found


ASSIGNED = assigned_names()
DEF_LINE = {  # first line of a function with its decorators -> that of `def`
    min(x.lineno for x in (node, *node.decorator_list)): node.lineno
    for node in ast.walk(TREE)
    if isinstance(node, ast.FunctionDef)
}


def letters_at_end(name: str, dimensions: int) -> str:
    """The dimension letters that a name ends with, if they are as many; else ""."""
    _, separator, suffix = name.rpartition("_")
    fits = separator and len(suffix) == dimensions and {*suffix} <= {*PLACES + FEATURES}
    return suffix if fits else ""


def in_letters(name: str, shape: tuple, sizes: dict[str, int]) -> str:
    """A shape in dimension letters: those at the end of its name, else those that have its sizes in
    the function. A size that no letter has stays a number."""
    if suffix := letters_at_end(name, len(shape)):
        return " ".join(suffix)
    of_rows = len(shape) > 1 and shape[:2] == (sizes.get("b"), sizes.get("t"))
    found = ["b", "t"] if of_rows else []
    features = FEATURES if shape[-1] in [sizes.get(x) for x in FEATURES] else ""
    for size in shape[len(found) :]:
        is_last = len(found) == len(shape) - 1
        order = features + PLACES if is_last else PLACES + features
        known = [x for x in order if sizes.get(x) == size > 1]
        known.sort(key=found.__contains__)  # the others first
        found.append(known[0] if known else str(size))
    if len(shape) > 2:  # of two axes of one size, the last one has the letter
        pairs = zip(shape, found, range(1, len(shape) + 1), strict=True)
        found = [str(size) if letter in found[after:] else letter for size, letter, after in pairs]
    return " ".join(found)


def amount(number: float, unit: str) -> str:
    """A number with three digits and its unit: 1.23 MB."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def arrays_in(value) -> Iterator:
    """Yield the arrays, of numpy or traced, in tuples, lists and dicts."""
    if isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct | jax.core.Tracer):
        yield value
    elif isinstance(value, tuple | list | dict):
        for x in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(x)


def array_bytes(x) -> int:
    """Bytes of an array; of a random key 8 an element."""
    return math.prod(x.shape) * getattr(x.dtype, "itemsize", 8)


def described(name: str, value, sizes: dict[str, int]) -> str:
    """`value` in words: dtype, shape and bytes of an array, how many arrays are in a tree; "" of
    anything else."""
    arrays = [*arrays_in(value)]
    size = amount(sum(map(array_bytes, arrays)), "B")
    if not arrays or arrays[0] is not value:
        return f"{name}: {len(arrays)} arrays, {size}" if arrays else ""
    text = f"{name} {SHORT.get(str(value.dtype), str(value.dtype))}"
    if not value.shape:
        return text
    if not jnp.issubdtype(value.dtype, jnp.inexact):  # ids and masks, not features
        sizes = {x: n for x, n in sizes.items() if x in PLACES}
    letters = in_letters(name, value.shape, sizes)
    numbers = "×".join(map(str, value.shape))
    both = f"[{letters}] {numbers}" if letters.split() != numbers.split("×") else numbers
    return f"{text} {both}, {size}"


class Watch:
    """Inside it, what train_gpt.py assigns is noted while jax traces it: `seen`, line -> words, and
    `ran`, the functions that have run, by the lines of their `def`."""

    def __init__(self, cfg: T.Config):
        self.sizes = {"d": cfg.width, "f": cfg.mlp_width, "v": cfg.vocab, "n": cfg.heads}
        self.sizes["h"] = cfg.head_width
        self.seen = defaultdict(dict)
        self.ran = set()

    def __enter__(self):
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def call(self, frame, _event, _value):
        """What Python calls at every call of a function."""
        code = frame.f_code
        if code.co_filename != FILE:
            return None
        start = DEF_LINE.get(code.co_firstlineno)
        if code is T.update_step.__code__:  # which has no rows of tokens
            self.sizes = {x: n for x, n in self.sizes.items() if x not in PLACES}
        if start:
            self.ran.add(start)
            self.note(start, code.co_varnames[: code.co_argcount], frame.f_locals)
        before, returning = 0, 0

        def line(frame, event, value):
            """What it calls before every line of that function, and at its return."""
            nonlocal before, returning
            first, names = ASSIGNED.get(before, (0, []))
            if "returns" in names:  # the ends of `with` blocks may come between
                returning = first
            elif first:
                self.note(first, names, frame.f_locals)
            if event == "return" and returning:
                self.note(returning, ["returns"], {"returns": value} | frame.f_locals)
            before = frame.f_lineno
            return line

        return line

    def note(self, line: int, names, values: dict):
        """Note what these names have, after a line."""
        letters = {*PLACES + FEATURES}
        own = {x: n for x, n in values.items() if x in letters and type(n) is int}
        own = own if len(own) > 1 else {}  # one alone may count something else
        for name, value in values.items():
            shape = getattr(value, "shape", ())
            shape = shape if isinstance(shape, tuple) else ()  # jnp.shape is a function
            own = dict(zip(letters_at_end(name, len(shape)), shape, strict=False)) | own
        for name in names:
            if text := described(name, values.get(name), self.sizes | own):
                self.seen[line][text] = None


# ---- Costs: the operations of a program, by the lines that have made them -----------------------

KINDS = "forward", "gradient", "again"  # again: computed once more on the way back
# Functions that write down a gradient, or add up one.
GRADIENT = re.compile(r"(_gradients?|_grads?|_backward|scatter_rows|add_rows_tpu|pointed_slopes)$")
# They say how numbers are to be seen, or are part of what reads them.
VIEWS = "reshape squeeze expand_dims broadcast_in_dim optimization_barrier stop_gradient iota"
VIEWS = frozenset(VIEWS.split())
WHOLE = "jit", "pjit", "custom_jvp_call"  # functions of jax: what they do is their caller's line


@dataclass
class Cost:
    """What a line costs in a step, on all devices."""

    flops: Counter = field(default_factory=Counter)  # by KINDS
    bytes: Counter = field(default_factory=Counter)
    primitives: Counter = field(default_factory=Counter)  # how often each runs on the way forward
    ms: float = 0.0  # measured, on a device

    @property
    def runs(self) -> int:
        """How often most of its operations run, and so the line; 0: as a gradient only."""
        return min(statistics.multimode(self.primitives.values()), default=0)


class Place(NamedTuple):
    """Where an operation is written."""

    line: int  # 0: nowhere in train_gpt.py
    kind: str  # one of KINDS


def frames_of(operation) -> list:
    """The lines of train_gpt.py that have led to an operation, the innermost first."""
    traceback = operation.source_info.traceback
    return [x for x in traceback.frames if x.file_name == FILE] if traceback else []


def place_of(operation, outer: Place) -> Place:
    """The innermost line of train_gpt.py that has made an operation, or that of the operation that
    it is part of."""
    info = operation.source_info
    frames = frames_of(operation)
    line = frames[0].line_num if frames else outer.line
    _, *recomputed = str(info.name_stack).split("rematted_computation")
    if outer.kind == "again" or (recomputed and "transpose(" not in recomputed[-1]):
        return Place(line, "again")
    is_gradient = any(GRADIENT.search(x.function_name.split(".")[-1]) for x in frames)
    if is_gradient or "transpose(" in str(info.name_stack):
        return Place(line, "gradient")
    return Place(line, outer.kind)


def add_costs(jaxpr, costs: dict[int, Cost], times: int, outer: Place, whole: bool = False):
    """Add the operations of a jaxpr that runs so many times to `costs`; with `whole` all belong to
    the line of `outer`. A loop of unknown length counts once. Lines that lead there are in `costs`
    too."""
    for one in jaxpr.eqns:
        name = one.primitive.name
        place = outer if whole else place_of(one, outer)
        cost = costs[place.line]
        for frame in () if whole else frames_of(one):
            costs[frame.line_num]  # it is there now
        bodies = [getattr(x, "jaxpr", x) for x in one.params.values()]
        bodies = [x for x in bodies if hasattr(x, "eqns") and not name.startswith("scatter")]
        count = times
        if name == "scan":
            count *= one.params["length"]
        elif name == "shard_map":
            count *= one.params["mesh"].size
        elif name == "cond":
            bodies = [chosen_branch(one.params)]
        elif name == "pallas_call":  # on the chip only its FLOPs count
            cost.bytes[place.kind] += times * bytes_of(one)
            count *= math.prod(one.params["grid_mapping"].grid)
            on_chip = defaultdict(Cost)
            add_costs(bodies[0], on_chip, count, place)
            for line, own in on_chip.items():
                costs[line].flops += own.flops
            continue
        for body in bodies:
            add_costs(body, costs, count, place, whole or name in WHOLE)
        if not bodies and name not in VIEWS:
            cost.flops[place.kind] += times * flops_of(one)
            cost.bytes[place.kind] += times * bytes_of(one)
            if place.kind == "forward":
                cost.primitives[name] += times


def chosen_branch(params: dict):
    """The branch of a cond that runs where no platform is named, or that of most operations."""
    platforms = params.get("branches_platforms")
    if platforms:
        return params["branches"][platforms.index(None)].jaxpr
    return max((x.jaxpr for x in params["branches"]), key=lambda branch: len(branch.eqns))


def flops_of(one) -> float:
    """FLOPs of a matrix product: twice its multiplications; 0 of all else."""
    if one.primitive.name != "dot_general":
        return 0.0
    (contracted, _), _ = one.params["dimension_numbers"]
    left = one.invars[0].aval.shape
    return 2.0 * math.prod(one.outvars[0].aval.shape) * math.prod(left[x] for x in contracted)


def bytes_of(one) -> float:
    """Bytes that an operation reads and writes."""
    name = one.primitive.name
    reads = [array_bytes(x.aval) for x in one.invars if hasattr(x.aval, "dtype")]
    writes = sum(array_bytes(x.aval) for x in one.outvars if hasattr(x.aval, "dtype"))
    if name in ("slice", "dynamic_slice", "gather"):  # they read only what they take
        return 2.0 * writes
    if name.startswith("scatter"):  # operand, places, updates: it changes only the rows at places
        return 3.0 * reads[2]
    if name == "dynamic_update_slice":
        return 2.0 * reads[1]
    return float(sum(reads) + writes)


class Step(NamedTuple):
    """A step of training: the programs that it runs."""

    cfg: T.Config
    mesh: jax.sharding.Mesh
    number: int  # from 0: the first step that ends with every kind of update, or with most
    programs: dict[str, T.Program]  # by name
    kernels: T.Kernels

    @classmethod
    def of(cls, asked: T.Config, program: str = "", chip: str = "") -> "Step":
        """The Step of a config, or only one program of the run; with the kernels of a chip."""
        cfg, mesh = T.make_mesh(asked)
        device = mesh.devices.flat[0]
        if chip:
            device = SimpleNamespace(platform="tpu", device_kind=chip)
        kernels, _ = T.pick_kernels(cfg, device)
        every = {str(key): x for key, x in T.programs(cfg, mesh, kernels).items()}
        keys = T.schedule(cfg).programs
        number = max(range(len(keys)), key=lambda i: (len(keys[i]), -i))
        names = [program] if program else [*map(str, keys[number])]
        T.need({*names} <= {*every}, f"--program {program}: there are {', '.join(every)}")
        return cls(cfg, mesh, number, {name: every[name] for name in names}, kernels)

    @property
    def stage(self) -> T.Stage:
        """The stage to which it belongs."""
        return self.cfg.stages[T.schedule(self.cfg).stage[self.number]]

    def costs(self) -> dict[int, Cost]:
        """Line -> Cost of running each program once."""
        costs = defaultdict(Cost)
        for program in self.programs.values():
            add_costs(program.traced.jaxpr.jaxpr, costs, 1, Place(0, "forward"))
        return costs


# ---- What follows from them ----------------------------------------------------------------------

# Whose products flops_per_token counts.
FORMULA = "attention", "mlp", "chunk_losses", "token_losses", "logit_gradients", "pointer_inputs"


def sums(costs: dict[int, Cost]) -> list[float]:
    """FLOPs, bytes and milliseconds of all lines."""
    found = [(x.flops.total(), x.bytes.total(), x.ms) for x in costs.values()]
    return [sum(column) for column in zip(*found, strict=True)]


def shares(costs: dict[int, Cost]) -> dict[int, list[float]]:
    """Line -> its shares of the three sums, the most expensive lines first."""
    wholes = sums(costs)
    found = {}
    for line, cost in costs.items():
        own = cost.flops.total(), cost.bytes.total(), cost.ms
        found[line] = [x / whole if whole else 0.0 for x, whole in zip(own, wholes, strict=True)]
    return dict(sorted(found.items(), key=lambda x: -sum(x[1])))


def by_formula(costs: dict[int, Cost]) -> tuple[Counter, Counter]:
    """(FLOPs of what flops_per_token counts, by KINDS; of what it leaves out, by function)."""
    counted, left_out = Counter(), Counter()
    for line, cost in costs.items():
        owner = OWNER.get(line, "no line")
        for kind, flops in cost.flops.items():
            if owner in FORMULA and kind != "again":
                counted[kind] += flops
            elif flops:
                left_out[f"{owner}, again" if kind == "again" else owner] += flops
    return counted, left_out


# ---- Time: a trace by lines ----------------------------------------------------------------------


def add_times(costs: dict[int, Cost], path: Path, program: str) -> str:
    """Add the milliseconds of the steps that begin with `program`, out of the lines.json that
    `bench.py --profile` has written: the devices that they are of. What it gives no line of
    train_gpt.py has line 0."""
    T.need(path.exists(), f"no {path}: python records/bench.py ... --profile {path.parent}")
    rows = [row for row in json.loads(path.read_text()) if row["trace"] == program]
    T.need(rows, f"{path} has no trace of {program}")
    lost = 0.0
    for row in rows:
        is_there = OWNER.get(row["line"]) == row["function"]
        costs[row["line"] if is_there else 0].ms += row["ms_per_step"]
        lost += row["ms_per_step"] * (row["line"] > 0 and not is_there)
    whole = sum(row["ms_per_step"] for row in rows)
    T.need(lost < 0.2 * whole, f"{path} is of another train_gpt.py: trace the steps again")
    return rows[0]["devices"]
