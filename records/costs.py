"""The arrays that each line of train_gpt.py assigns and the costs of the line, for tour.py.

A step is only traced, because jax records the source line of each operation, so this needs no
device and compiles nothing. FLOPs are the FLOPs of matrix products. Bytes are read and written
bytes if nothing is fused, which is an upper bound.
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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of train_gpt.py

import train_gpt as T  # first, because it reports in one line that jax is missing

# isort: split

import jax
import numpy as np

FILE = T.train.__code__.co_filename
TREE = ast.parse(T.SOURCE)
NAMED = [node for node in TREE.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
OWNER = {  # line -> the top-level function or class that contains it
    line: node.name for node in NAMED for line in range(node.lineno, node.end_lineno + 1)
}

# ---- Arrays that each line assigns ---------------------------------------------------------------

SHORT = {"float32": "f32", "bfloat16": "bf16", "int32": "i32", "uint16": "u16", "uint32": "u32"}


def assigned_names() -> dict[int, tuple[int, list[str]]]:
    """Return {line: (first line of its statement, names that the statement assigns)}.

    For a `return` statement the name is "returns".
    """
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
DEF_LINE = {  # first line of a function, or of its decorators -> line of its `def`
    min(x.lineno for x in (node, *node.decorator_list)): node.lineno
    for node in ast.walk(TREE)
    if isinstance(node, ast.FunctionDef)
}


def amount(number: float, unit: str) -> str:
    """Return a number with three digits and a unit, such as 1.23 MB."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def arrays_in(value) -> Iterator:
    """Yield the arrays (of numpy, or traced) in nested tuples, lists and dicts."""
    if isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        yield value
    elif isinstance(value, tuple | list | dict):
        for x in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(x)


def array_bytes(x) -> int:
    """Return the bytes of an array (8 per element of a random key)."""
    return math.prod(x.shape) * getattr(x.dtype, "itemsize", 8)


def described(name: str, value) -> str:
    """Return name, dtype, shape and bytes of an array, or the number of arrays in a tree."""
    arrays = [*arrays_in(value)]
    size = amount(sum(map(array_bytes, arrays)), "B")
    if not arrays or arrays[0] is not value:
        return f"{name}: {len(arrays)} arrays, {size}" if arrays else ""
    text = f"{name} {SHORT.get(str(value.dtype), str(value.dtype))}"
    return f"{text} {'×'.join(map(str, value.shape))}, {size}" if value.shape else text


class Watch:
    """Collects the arrays that train_gpt.py assigns while jax traces it.

    `seen` has {line: descriptions}. `ran` has the functions that have run, as lines of their `def`.
    """

    def __init__(self):
        self.seen = defaultdict(dict)
        self.ran = set()

    def __enter__(self):
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def call(self, frame, _event, _value):
        """Handle the call of a function (see sys.settrace)."""
        code = frame.f_code
        if code.co_filename != FILE:
            return None
        if start := DEF_LINE.get(code.co_firstlineno):
            self.ran.add(start)
            self.note(start, code.co_varnames[: code.co_argcount], frame.f_locals)
        before, returning = 0, 0

        def line(frame, event, value):
            """Handle the next line of the function, or its return."""
            nonlocal before, returning
            first, names = ASSIGNED.get(before, (0, []))
            if "returns" in names:  # the ends of `with` blocks run before the return
                returning = first
            elif first:
                self.note(first, names, frame.f_locals)
            if event == "return" and returning:
                self.note(returning, ["returns"], {"returns": value})
            before = frame.f_lineno
            return line

        return line

    def note(self, line: int, names, values: dict):
        """Add the arrays with these names to a line."""
        for name in names:
            if text := described(name, values.get(name)):
                self.seen[line][text] = None


# ---- Costs: the operations of a program, by source line ------------------------------------------

KINDS = "forward", "gradient", "recomputed"
# Functions that compute or add gradients.
GRADIENT = re.compile(r"(_gradients?|_grads?|_backward|scatter_rows|add_rows_tpu|pointed_slopes)$")
# Operations that compute nothing, or that are part of the operations that read their results.
VIEWS = "reshape squeeze expand_dims broadcast_in_dim optimization_barrier stop_gradient iota"
VIEWS = frozenset(VIEWS.split())
WHOLE = (
    "jit",
    "pjit",
    "custom_jvp_call",
)  # functions of jax; their costs belong to the caller's line


@dataclass
class Cost:
    """The costs of a line in a step, on all devices."""

    flops: Counter = field(default_factory=Counter)  # by KINDS
    bytes: Counter = field(default_factory=Counter)
    primitives: Counter = field(default_factory=Counter)  # runs of each, in the forward pass
    ms: float = 0.0  # measured on a device

    @property
    def runs(self) -> int:
        """The number of times that most of its operations run; 0 if only for gradients."""
        return min(statistics.multimode(self.primitives.values()), default=0)


class Place(NamedTuple):
    """The place of an operation in train_gpt.py."""

    line: int  # 0 if it has no line there
    kind: str  # one of KINDS


def frames_of(operation) -> list:
    """Return the stack frames of an operation in train_gpt.py, the innermost first."""
    traceback = operation.source_info.traceback
    return [x for x in traceback.frames if x.file_name == FILE] if traceback else []


def place_of(operation, outer: Place) -> Place:
    """Return the place of an operation; its line may be the line of the operation around it."""
    info = operation.source_info
    frames = frames_of(operation)
    line = frames[0].line_num if frames else outer.line
    _, *recomputed = str(info.name_stack).split("rematted_computation")
    if outer.kind == "recomputed" or (recomputed and "transpose(" not in recomputed[-1]):
        return Place(line, "recomputed")
    is_gradient = any(GRADIENT.search(x.function_name.split(".")[-1]) for x in frames)
    if is_gradient or "transpose(" in str(info.name_stack):
        return Place(line, "gradient")
    return Place(line, outer.kind)


def add_costs(jaxpr, costs: dict[int, Cost], times: int, outer: Place, whole: bool = False):
    """Add the costs of a jaxpr that runs `times` times to `costs`.

    With `whole`, all costs belong to the line of `outer`. A loop of unknown length counts once.
    """
    for one in jaxpr.eqns:
        name = one.primitive.name
        place = outer if whole else place_of(one, outer)
        cost = costs[place.line]
        bodies = [getattr(x, "jaxpr", x) for x in one.params.values()]
        bodies = [x for x in bodies if hasattr(x, "eqns") and not name.startswith("scatter")]
        count = times
        if name == "scan":
            count *= one.params["length"]
        elif name == "shard_map":
            count *= one.params["mesh"].size
        elif name == "cond":
            bodies = [chosen_branch(one.params)]
        for body in bodies:
            add_costs(body, costs, count, place, whole or name in WHOLE)
        if not bodies and name not in VIEWS:
            cost.flops[place.kind] += times * flops_of(one)
            cost.bytes[place.kind] += times * bytes_of(one)
            if place.kind == "forward":
                cost.primitives[name] += times


def chosen_branch(params: dict):
    """Return the branch of a cond for any platform, or the branch with the most operations."""
    platforms = params.get("branches_platforms")
    if platforms:
        return params["branches"][platforms.index(None)].jaxpr
    return max((x.jaxpr for x in params["branches"]), key=lambda branch: len(branch.eqns))


def flops_of(one) -> float:
    """Return the FLOPs of a matrix product (two per multiplication); 0 for other operations."""
    if one.primitive.name != "dot_general":
        return 0.0
    (contracted, _), _ = one.params["dimension_numbers"]
    left = one.invars[0].aval.shape
    return 2.0 * math.prod(one.outvars[0].aval.shape) * math.prod(left[x] for x in contracted)


def bytes_of(one) -> float:
    """Return the bytes that an operation reads and writes."""
    name = one.primitive.name
    reads = [array_bytes(x.aval) for x in one.invars if hasattr(x.aval, "dtype")]
    writes = sum(array_bytes(x.aval) for x in one.outvars if hasattr(x.aval, "dtype"))
    if name in ("slice", "dynamic_slice", "gather"):  # read only the returned part
        return 2.0 * writes
    if name.startswith("scatter"):  # operand, indices, updates: changes only the indexed rows
        return 3.0 * reads[2]
    if name == "dynamic_update_slice":
        return 2.0 * reads[1]
    return float(sum(reads) + writes)


class Step(NamedTuple):
    """A training step: the programs that it runs."""

    cfg: T.Config
    mesh: jax.sharding.Mesh
    number: int  # from 0; the first of the steps with the most kinds of updates
    programs: dict[str, T.Program]  # by name
    kernels: T.Kernels

    @classmethod
    def of(cls, asked: T.Config, program: str = "") -> "Step":
        """Return the Step of a config, or only one of its programs."""
        cfg, mesh = T.make_mesh(asked)
        kernels, _ = T.choose_kernels(cfg, mesh.devices.flat[0])
        every = {str(key): x for key, x in T.programs(cfg, mesh, kernels).items()}
        keys = T.schedule(cfg).programs
        number = max(range(len(keys)), key=lambda i: (len(keys[i]), -i))
        names = [program] if program else [*map(str, keys[number])]
        T.require({*names} <= {*every}, f"--program {program}: use one of {', '.join(every)}")
        return cls(cfg, mesh, number, {name: every[name] for name in names}, kernels)

    @property
    def stage(self) -> T.Stage:
        """The stage of the step."""
        return self.cfg.stages[T.schedule(self.cfg).stage[self.number]]

    def costs(self) -> dict[int, Cost]:
        """Return {line: Cost} for one run of each program."""
        costs = defaultdict(Cost)
        for program in self.programs.values():
            add_costs(program.traced.jaxpr.jaxpr, costs, 1, Place(0, "forward"))
        return costs


def sums(costs: dict[int, Cost]) -> list[float]:
    """Return FLOPs, bytes and milliseconds of all lines together."""
    found = [(x.flops.total(), x.bytes.total(), x.ms) for x in costs.values()]
    return [sum(column) for column in zip(*found, strict=True)]


def shares(costs: dict[int, Cost]) -> dict[int, list[float]]:
    """Return {line: its shares of the three sums}, the most expensive lines first."""
    wholes = sums(costs)
    found = {}
    for line, cost in costs.items():
        own = cost.flops.total(), cost.bytes.total(), cost.ms
        found[line] = [x / whole if whole else 0.0 for x, whole in zip(own, wholes, strict=True)]
    return dict(sorted(found.items(), key=lambda x: -sum(x[1])))


def add_times(costs: dict[int, Cost], path: Path, program: str) -> str:
    """Add the times of the steps that begin with `program`; return the devices they ran on.

    `path` is the lines.json that `bench.py --profile` has written. Time without a line of
    train_gpt.py is added to line 0.
    """
    T.require(path.exists(), f"no {path}: python records/bench.py ... --profile {path.parent}")
    rows = [row for row in json.loads(path.read_text()) if row["trace"] == program]
    T.require(rows, f"{path} has no trace of {program}")
    lost = 0.0
    for row in rows:
        fits = OWNER.get(row["line"]) == row["function"]
        costs[row["line"] if fits else 0].ms += row["ms_per_step"]
        lost += row["ms_per_step"] * (row["line"] > 0 and not fits)
    whole = sum(row["ms_per_step"] for row in rows)
    T.require(lost < 0.2 * whole, f"{path} is from another train_gpt.py: trace the steps again")
    return rows[0]["devices"]
