"""The five parts of train_gpt.py, and the names of other parts that each may use."""

import ast
import inspect
import re
import symtable

from conftest import ROOT

import train_gpt as T

LINES = (ROOT / "train_gpt.py").read_text().splitlines()
TREE = ast.parse("\n".join(LINES))
# First lines of the parts, at the rules above their titles. Part I includes the head of the file.
RULES = [i - 1 for i, line in enumerate(LINES) if re.match("# PART (II|III|IV|V): ", line)]
FIRST = [0, *RULES, len(LINES)]
CORE = LINES.index("# PART I: THE CORE")  # the head of the file is before it
RECIPE = "\n".join(LINES[: FIRST[3]])  # Parts I to III


def section(title: str) -> str:
    """Return the source of the section with this title, or with these first words of it."""
    return re.search(rf"# ---- {title}.*?(?=\n# (?:---- |====))", "\n".join(LINES), re.S)[0]


def names_of(node) -> list[str]:
    """Return the names that a statement of the module defines."""
    if hasattr(node, "name"):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    names = (x for t in targets if t for x in ast.walk(t) if isinstance(x, ast.Name))
    return [x.id for x in names if isinstance(x.ctx, ast.Store)]


def part_of(node) -> int:
    """Return the number of the part, 1 to 5."""
    return sum(node.lineno > first for first in FIRST[:5])


DEFINITIONS = [node for node in TREE.body if not isinstance(node, ast.Import | ast.ImportFrom)]
PARTS = {name: part_of(node) for node in DEFINITIONS for name in names_of(node)}

# Uses of later parts: collectives, the order of operations for XLA, the functions around a run, and
# in Part IV the programs and kernels of Part V.
LATER = {
    "gathered_model": {"gather_banks"},
    "sum_over_devices": {"reduce_scatter"},
    "train": {"StepResult", "check_loss", "demonstrate", "log_step", "prepare", "set_handlers"},
    "update_rows": {"update_in_parts"},
    "prepare": {
        "check_kernels",
        "choose_kernels",
        "compile_all",
        "start_copies",
        "start_state",
        "warm_up",
    },
    "gradient_bytes": {"abstract_copies"},
    "held_bytes": {"abstract_copies", "abstract_state", "keys_of_steps"},
    "resident_bytes": {"abstract_copies", "abstract_state"},
    "expected_bytes": {"keys_of_programs"},
    "with_whole_loss": {"keys_of_steps"},
    "keeps_logits_narrow": {"PLAIN", "choose_kernels"},
    "load_state": {"abstract_state"},
    "sizes_chosen": {"PLAIN", "loss_tokens"},
    "run_facts": {"compiler_options"},
}


def text_of(node) -> str:
    """Return the lines of a definition, with its decorators."""
    first = min(x.lineno for x in (node, *getattr(node, "decorator_list", [])))
    return "\n".join(LINES[first - 1 : node.end_lineno])


def globals_of(table) -> set[str]:
    """Return the names that are looked up in the module, not local names."""
    top = table.get_type() == "module"
    names = (x for x in table.get_symbols() if x.is_referenced() and (top or x.is_global()))
    return {x.get_name() for x in names}.union(*map(globals_of, table.get_children()))


def later_names(text: str, part: int) -> set[str]:
    """Return the names of later parts in a definition. Parts I to III count as one part."""
    used = globals_of(symtable.symtable(text, "train_gpt.py", "exec"))
    return {name for name in used if PARTS.get(name, 0) > max(part, 3)}


def test_parts_use_only_listed_names_of_later_parts():
    own = {name for name, x in vars(T).items() if getattr(x, "__module__", "") == "train_gpt"}
    assert own <= PARTS.keys() and {PARTS[name] for name in own} == {
        1,
        2,
        3,
        4,
        5,
    }  # all parts are found
    found = {}
    for node in DEFINITIONS:
        if names := later_names(text_of(node), part_of(node)):
            found[", ".join(names_of(node))] = names
    assert found == LATER
    assert PARTS["train"] == 1 and PARTS["choose_kernels"] == 5


def sections(part: int) -> dict[str, str]:
    """Return definition of a part -> title of its section."""
    first, last = FIRST[part - 1], FIRST[part]
    titles = [(i + 1, x) for i, x in enumerate(LINES[first:last], first) if x.startswith("# ---- ")]
    found = {}
    for node in DEFINITIONS:
        if part_of(node) == part:
            above = [title for line, title in titles if line < node.lineno]
            found |= dict.fromkeys(names_of(node), above[-1].strip("#- ") if above else "")
    return found


# Functions of Part I, the core -> names of Part II, the ideas, that they use.
HOOKS = {
    "forward": {"coefficients", "mudd_end", "ngram_vectors", "smear"},
    "layer_output": {"gated_values"},
    "attention": {"post_lambdas"},
    "mlp": {"post_lambdas"},
    "attend_heads": {"exclude_self", "key_offset", "pair_heads"},
    "batch_loss": {"with_pointer"},
    "add_losses": {"mix_pointed"},
    "anvil": {"as_large", "equalize", "two_rails"},
    "param_specs": {"with_ideas"},
    "init_state": {"tie"},
    "grads_step": {"dropped_ngrams", "send_to_owners"},
    "gathered_model": {"fetch_requests"},
    "update_step": {"follow", "update_rows"},
    "finish_step": {"move_to_averages"},
    "eval_step": {"dropped_ngrams"},
    "programs_of_steps": {"last_tied_step"},
    "updates_due": {"table_updates"},
    "hyper_of_steps": {"hyper_of_ideas"},
    "train_batches": {"vocabulary"},
    "next_batch": {"batch_targets"},
    "put_batch": {"hashed_rows"},
}


def uses_of_ideas() -> dict[str, set[str]]:
    """Return definition of Part I -> names of Part II that it uses."""
    found = {}
    for node in DEFINITIONS:
        if part_of(node) == 1 and node.lineno > CORE:
            used = globals_of(symtable.symtable(text_of(node), "train_gpt.py", "exec"))
            if names := {name for name in used if PARTS.get(name) == 2}:
                found[node.name] = names
    return found


def test_the_core_uses_only_listed_hooks_of_ideas():
    assert uses_of_ideas() == HOOKS


def test_a_comment_at_each_hook_names_the_section_of_its_idea():
    """The function has a comment with the title, or its first words, in quotes."""
    title_of = sections(2)
    for function, hooks in HOOKS.items():
        quoted = re.findall(r'"([A-Z][^"]+)"', inspect.getsource(getattr(T, function)))
        for hook in hooks:
            named = [x for x in quoted if title_of[hook].startswith(x)]
            assert named, f"{function}: which section has {hook}? {title_of[hook]}"


def test_no_local_name_hides_a_function_or_class_of_the_module():
    source = "\n".join(LINES)
    names = {node.name for node in DEFINITIONS if hasattr(node, "name")}
    hidden = []

    def look(table):
        for child in table.get_children():
            if child.get_type() == "function":
                local = {x.get_name() for x in child.get_symbols() if x.is_local()}
                hidden.extend(f"{child.get_name()}: {name}" for name in local & names)
            look(child)

    look(symtable.symtable(source, "train_gpt.py", "exec"))
    assert not hidden


def test_only_titles_of_parts_begin_like_titles():
    """Tools find the parts by their titles."""
    assert sum(line.upper().startswith("# PART ") for line in LINES) == 5


def test_no_function_of_the_recipe_has_more_than_six_parameters():
    """Nested functions may."""
    counts = {
        node.name: sum(isinstance(x, ast.arg) for x in ast.walk(node.args))
        for node in DEFINITIONS
        if isinstance(node, ast.FunctionDef) and part_of(node) <= 3
    }
    assert len(counts) > 50 and max(counts.values()) <= 6, max(counts, key=counts.get)


def test_the_head_explains_the_letters_of_axes():
    axes = {*"".join(re.findall(r"_bt([a-z]*)\b", "\n".join(LINES)))}
    assert axes <= {*"sdnhfv"}, "letters that the head does not explain"
