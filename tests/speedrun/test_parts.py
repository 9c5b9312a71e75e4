"""The three parts of train_gpt.py: what they may name, how large they are, and Part I alone."""

import ast
import contextlib
import dataclasses
import re
import symtable
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import ROOT
from programs import CFG, mesh_of, programs_of, quick_compilation, run_steps

import train_gpt as T

LINES = (ROOT / "train_gpt.py").read_text().splitlines()
TITLES = ["PART I: THE SPEEDRUN", "PART II: AROUND A RUN", "PART III: FAST ON HARDWARE"]
# Lines. What is over them has to replace something: Part I is read from top to bottom.
LIMITS = {1: 2741, 2: 1537, 3: 1392}
END_OF_LOOP = 2741
# Where a part begins, at the rule above its title; Part I with the head of the file and imports.
FIRST = [0, *(LINES.index(f"# {title}") - 1 for title in TITLES[1:]), len(LINES)]


def part_of(line: int) -> int:
    """1, 2 or 3; lines from 0."""
    return sum(line >= first for first in FIRST[:3])


class Definition:
    """A function, a class or a constant of the file, and the names of the file that it uses."""

    def __init__(self, node):
        decorators = getattr(node, "decorator_list", [])
        first = min(x.lineno for x in (node, *decorators)) - 1
        self.node, self.part, self.end = node, part_of(first), node.end_lineno
        self.text = "\n".join(LINES[first : self.end])
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        stored = [x.id for t in targets if t for x in ast.walk(t) if isinstance(x, ast.Name)]
        self.names = [node.name] if hasattr(node, "name") else stored

    def uses(self) -> set[str]:
        """Those that are looked up in the module, not what has the same name within."""

        def found(table):
            top = table.get_type() == "module"
            names = {
                symbol.get_name()
                for symbol in table.get_symbols()
                if symbol.is_referenced() and (top or symbol.is_global())
            }
            return names.union(*map(found, table.get_children()))

        return found(symtable.symtable(self.text, "train_gpt.py", "exec"))


IMPORTS = ast.Import, ast.ImportFrom
DEFINITIONS = [
    Definition(node) for node in ast.parse("\n".join(LINES)).body if not isinstance(node, IMPORTS)
]
PARTS = {name: definition.part for definition in DEFINITIONS for name in definition.names}
(TRAIN,) = (definition for definition in DEFINITIONS if definition.names == ["train"])


def later_names(definition: Definition) -> set[str]:
    """What a definition uses of the parts after its own."""
    return {name for name in definition.uses() if PARTS.get(name, 0) > definition.part}


def test_all_that_the_module_has_is_seen():
    """So that the searches below miss nothing."""
    own = {name for name, x in vars(T).items() if getattr(x, "__module__", "") == "train_gpt"}
    assert own <= PARTS.keys() and len(own) > 150
    assert {PARTS[name] for name in own} == {1, 2, 3} and PARTS["train"] == 1
    assert PARTS["forward"] == 1 and PARTS["Saver"] == 2 and PARTS["pick_kernels"] == 3


def test_a_later_name_would_be_found():
    """In a body, a default, a decorator, a method; not where a variable has that name."""
    for text in (
        "def f(x):\n    return [Saver for _ in x]",
        "def f(x=Saver):\n    pass",
        "@Saver\ndef f(x):\n    pass",
        "class C:\n    def f(self) -> Saver:\n        pass",
        "X = 1, Saver",
    ):
        definition = Definition.__new__(Definition)
        definition.part, definition.text = 1, text
        assert later_names(definition) == {"Saver"}, text
    definition.text = "def f(x):\n    Saver = x\n    return Saver.Saver"
    assert later_names(definition) == set()


@pytest.mark.parametrize("part", [1, 2])
def test_no_part_names_anything_of_a_later_one(part):
    found = {
        definition.names[0]: sorted(names)
        for definition in DEFINITIONS
        if definition.part == part and definition is not TRAIN
        if (names := later_names(definition))
    }
    assert found == {}


def listed() -> set[str]:
    """The names that the docstring of `train` lists as those of Parts II and III."""
    text = ast.get_docstring(TRAIN.node).split("From Parts II and III:")[1]
    return set(re.findall(r"\w+", text)) & {name for name, part in PARTS.items() if part > 1}


def test_train_names_only_what_its_docstring_lists():
    assert later_names(TRAIN) == listed()


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_part_stays_within_its_lines(part):
    """When this fails: is the new thing worth its place? If so, what can go?"""
    size = FIRST[part] - FIRST[part - 1]
    assert size <= LIMITS[part], f"Part {part} has {size} lines, its limit is {LIMITS[part]}"


def test_the_loop_ends_where_a_reader_can_still_be():
    assert PARTS["train"] == 1 and TRAIN.end < END_OF_LOOP


# ------------------------------------------------------------------------------------------------
# Part I alone
# ------------------------------------------------------------------------------------------------


class Log:
    """In place of the run's log: keeps what `train` tells of losses, hears nothing else."""

    def __init__(self, clock, folder):
        self.clock, self.folder, self.losses, self.val_losses = clock, folder, [], {}

    def trained(self, step, loss, dropped, norms):
        self.losses.append(float(loss))
        assert step == len(self.losses)

    def validated(self, step, loss, dropped):
        self.val_losses[step] = loss

    def __getattr__(self, name):
        return lambda *_, **__: None


def test_part_one_alone_trains_the_same_losses(monkeypatch, tmp_path, shards):
    """Its source and stand-ins for what `train` takes from elsewhere, against the whole file."""
    alone = ModuleType("part_one")
    alone.__file__ = T.__file__
    monkeypatch.setitem(sys.modules, "part_one", alone)
    exec(compile("\n".join(LINES[: FIRST[1]]), "part_one", "exec"), vars(alone))
    stage, log = replace(CFG.stages[0], share=1.0), Log(alone.Clock(), tmp_path)

    def compile_all(cfg, mesh, kernels, say):
        programs = alone.programs(cfg, mesh, kernels)
        with quick_compilation():
            return {n: T.lower(program, mesh).compile() for n, program in programs.items()}, {}

    stand_ins = dict.fromkeys(listed(), lambda *_: None)
    stand_ins |= {
        "make_mesh": T.make_mesh,
        "data_folder": lambda cfg, say: Path(cfg.data),
        "pick_kernels": lambda cfg, device, devices: (alone.PLAIN, "plain"),
        "compile_all": compile_all,
        "open_log": lambda *_: log,
        "run_facts": lambda *_: {},
        "ask_to_stop": lambda: contextlib.nullcontext(lambda step: ""),  # nobody asks
        "Saver": lambda *_: contextlib.nullcontext(SimpleNamespace(missing="")),
        "keeps_end": lambda cfg: False,  # nothing is saved
    }
    assert not stand_ins.keys() & vars(alone).keys()
    vars(alone).update(stand_ins)
    common = {field.name: getattr(CFG, field.name) for field in dataclasses.fields(CFG)}
    common |= {"extension": 0, "steps": 4, "checkpoint_every": 0, "data": str(shards)}
    layers = tuple(alone.Layer(**vars(layer)) for layer in CFG.layers)
    own = alone.Config(**common | {"stages": (alone.Stage(**vars(stage)),), "layers": layers})
    with quick_compilation():
        assert alone.train(own, tmp_path, "") == tmp_path

    cfg, mesh, compiled = T.Config(**common | {"stages": (stage,)}), mesh_of(8), programs_of(CFG, 8)
    losses, _ = run_steps(cfg, mesh, compiled, shards, ends=True)
    assert len(losses) == 5
    # Plain kernels on the one side, those of a CPU on the other.
    assert log.losses == pytest.approx(losses[:4], rel=1e-5)
    assert log.val_losses == {0: log.val_losses[0], 4: pytest.approx(losses[4], rel=1e-5)}
    assert log.val_losses[4] < log.val_losses[0] - 0.1
