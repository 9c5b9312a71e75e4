"""The five parts of train_gpt.py: what they may name."""

import ast
import inspect
import itertools
import re
import symtable

from conftest import ROOT

import train_gpt as T

LINES = (ROOT / "train_gpt.py").read_text().splitlines()
TREE = ast.parse("\n".join(LINES))
# Where the parts begin, at the rules above their titles; Part I with the head of the file.
RULES = [i - 1 for i, line in enumerate(LINES) if re.match("# PART (II|III|IV|V): ", line)]
FIRST = [0, *RULES, len(LINES)]
RECIPE = "\n".join(LINES[: FIRST[3]])  # Parts I to III
DEVICES_SECTION = re.search(r"# ---- Devices.*?(?=\n# ---- )", "\n".join(LINES), re.S)[0]


def names_of(node) -> list[str]:
    """What a statement of the module defines."""
    if hasattr(node, "name"):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    names = (x for t in targets if t for x in ast.walk(t) if isinstance(x, ast.Name))
    return [x.id for x in names if isinstance(x.ctx, ast.Store)]


def part_of(node) -> int:
    """1 to 5."""
    return sum(node.lineno > first for first in FIRST[:5])


DEFINITIONS = [node for node in TREE.body if not isinstance(node, ast.Import | ast.ImportFrom)]
PARTS = {name: part_of(node) for node in DEFINITIONS for name in names_of(node)}

# What is used of a later part: collectives as compilers want them, how much is computed at once,
# what goes on around a run; and by what is done before the clock starts, what makes programs fast.
LATER = {
    "grads_step": {"gather_banks", "in_order", "sum_batches"},
    "eval_step": {"gather_banks"},
    "update_step": {"reduce_scatter"},
    "programs": {"abstract", "abstract_copies", "abstract_state", "compiler_options"},
    "settle": {"RunLog"},
    "sound": {"RunLog"},
    "train": {"prepare", "demonstrate"},
    "prepare": {"checked_kernels", "compile_all", "warm_up"},
    "run_facts": {"compiler_options"},
}


def globals_of(table) -> set[str]:
    """Names that are looked up in the module; not what has the same name within."""
    top = table.get_type() == "module"
    names = (x for x in table.get_symbols() if x.is_referenced() and (top or x.is_global()))
    return {x.get_name() for x in names}.union(*map(globals_of, table.get_children()))


def later_names(text: str, part: int) -> set[str]:
    """What the text of a definition uses of later parts than `part`; the first three are one."""
    used = globals_of(symtable.symtable(text, "train_gpt.py", "exec"))
    return {name for name in used if PARTS.get(name, 0) > max(part, 3)}


def test_no_part_names_anything_of_a_later_one_but_what_is_listed():
    own = {name for name, x in vars(T).items() if getattr(x, "__module__", "") == "train_gpt"}
    assert own <= PARTS.keys() and {PARTS[name] for name in own} == {1, 2, 3, 4, 5}  # all is seen
    found = {}
    for node in DEFINITIONS:
        decorators = getattr(node, "decorator_list", [])
        first = min(x.lineno for x in (node, *decorators))
        text = "\n".join(LINES[first - 1 : node.end_lineno])
        if names := later_names(text, part_of(node)):
            found[", ".join(names_of(node))] = names
    assert found == LATER
    assert PARTS["train"] == 1 and PARTS["pick_kernels"] == 5


def test_no_other_comment_begins_like_the_title_of_a_part():
    """Tools find the parts by their titles."""
    assert sum(line.upper().startswith("# PART ") for line in LINES) == 5


def test_no_function_of_the_recipe_has_more_than_six_parameters():
    """Those within others may."""
    counts = {
        node.name: sum(isinstance(x, ast.arg) for x in ast.walk(node.args))
        for node in DEFINITIONS
        if isinstance(node, ast.FunctionDef) and part_of(node) <= 3
    }
    assert len(counts) > 50 and max(counts.values()) <= 6, max(counts, key=counts.get)


def test_the_head_shows_lines_of_the_loop_and_names_that_are_there():
    head = LINES[: LINES.index("import argparse")]
    first = next(i for i, line in enumerate(head) if line.startswith("    batch, loader = "))
    loop = list(itertools.takewhile(str.strip, head[first:]))
    source = iter(x.strip() for x in inspect.getsource(T.train).splitlines())
    for line in loop:
        assert line.split("  # ")[0].strip() in source, line  # in this order
    edit = " ".join(head).split("Where to edit.")[1]
    names = re.findall(r"\b[a-z]+_[a-z_]+\b|(?<=of )[A-Z]\w+", edit)
    assert len(names) > 10 and all(hasattr(T, name) for name in names), names
    axes = {*"".join(re.findall(r"_bt([a-z]*)\b", "\n".join(LINES)))}
    assert axes <= {*"sdnhfv"}, "letters of which the head says nothing"
