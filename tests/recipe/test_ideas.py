"""Ideas of the record can be disabled. Without any ideas, the model is a plain GPT."""

import ast
import copy
import itertools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, mostly_slow, small_config
from programs import mesh_of, traced
from test_parts import CORE, DEFINITIONS, LINES, TREE, part_of
from test_parts import names_of as definitions_of
from training import BRIEF, arrays, assert_same_arrays, back_to, train_losses, trained

import train_gpt as T

# Idea -> parameters and kinds of state that exist only with it.
OWN = {
    "values": {"value_tables", "value_gate", "value_average"},
    "value_gates": {"value_gate"},
    "smear": {"smear_gate", "smear_lambda"},
    "lambdas": {"resid_lambdas", "post_lambdas", "qkv_lambda", "o_lambda"},
    "skip": {"skip_lambda"},
    "fewer": {"skip_lambda"},
    "mudd": {"mudd_w1", "mudd_w2", "mudd_b2", "mudd_w2g"},
    "gates": {"gate_w1", "gate_w2"},
    "ngrams": {"ngram_table"},
    "equalize": {"equaliser"},
    "rails": {"slow"},
    "averages": {*T.AVERAGES},
    "pointer": {"pointer_qk", "pointer_sink", "pointer_gain"},
}
# Ideas that change updates or initial values, not gradients.
UPDATES = {"muon", "zero_start", "momentum", "seldom", "equalize", "cautious", "tied", "o_start"}
UPDATES |= {"scalar_betas", "rails", "averages"}
# Ideas that change the forward pass with the same parameters, also in validation.
FORWARD = {"squared_relu", "qk_norm", "logit_cap", "still", "key_offset", "paired", "narrow"}
FORWARD |= {"qk_heads", "xsa", "gated", "x0", "signs", "reads"}
QUICK = {"ngrams", "mudd", "muon", "xsa", "all"}  # ideas of each kind, and all
assert UPDATES | FORWARD <= {*T.IDEAS}
CFG = small_config(
    pointer_width=8,
    layers=(
        T.Layer("short", paired=True, values=True, x0=True, ngram=True),
        T.Layer(skip=1, new_gates=True),
        T.Layer("long", narrow=True, xsa=True, values=True, gated=True, reads_back=1, mudd=True),
    ),
)


def names_of(cfg: T.Config) -> set[str]:
    """Return the names of parameters and kinds of state."""
    state = T.map_state(cfg, lambda *_: 0)
    return {*T.param_specs(cfg), *state}


@pytest.mark.parametrize("idea", mostly_slow([*T.IDEAS, "all"], QUICK))
def test_parameters_of_a_disabled_idea_do_not_exist(idea):
    cfg = T.override(CFG, [f"without={idea}"])
    assert cfg != replace(CFG, without=idea) and cfg.without == idea
    if idea == "all":
        assert names_of(cfg) == {"head", "embed", "qk_bank", "vo_bank", "mlp_bank"} | {
            "params", "fast", "first", "second"
        }  # fmt: skip
    else:
        assert names_of(CFG) - names_of(cfg) == OWN.get(idea, set())
    mesh, seen = mesh_of(2), 0
    for key, program in T.programs(cfg, mesh, T.PLAIN).items():
        kind = type(key) if idea in UPDATES else "eval" if idea in FORWARD else "grads0"
        if kind not in (T.Update, str(key)):
            continue
        out, *_ = traced(program, mesh).out_info
        if kind == "eval":
            assert out.shape == ()
        else:
            found = out["params"] if kind is T.Update else out
            assert {*found} == {*T.param_specs(cfg)}
        seen += 1
    assert seen


ONE_STAGE = replace(
    BRIEF,
    layers=(
        T.Layer("short", narrow=True, values=True, xsa=True, x0=True, ngram=True),
        T.Layer(skip=1, new_gates=True),
        T.Layer("short", paired=True, values=True, x0=True),
        T.Layer("long", values=True, gated=True, reads_back=2, mudd=True),
    ),
    stages=(replace(BRIEF.stages[0], prefix_weights=(0.2,)),),
    steps=6,
    pointer_width=4,
    checkpoint_every=2,
    devices=2,
)


# Three at a time, to save time. Other tests trace programs without single ideas.
THREES = [",".join([*T.IDEAS][first::14]) for first in range(14)]


@pytest.mark.slow
@pytest.mark.parametrize("ideas", [*THREES, "all"])
def test_a_run_without_some_ideas_learns_and_resumes(ideas, shards, tmp_path):
    cfg = T.override(ONE_STAGE, [f"without={ideas}"])
    run = trained(cfg, tmp_path, shards)
    losses, end = train_losses(run), arrays(run / "checkpoints/6")
    assert np.all(np.isfinite(losses)) and np.mean(losses[4:]) < 0.995 * np.mean(losses[:2])
    trained(cfg, tmp_path, shards, back_to(run, 4))
    assert train_losses(run) == losses
    assert_same_arrays(arrays(run / "checkpoints/6"), end)


@pytest.mark.slow
def test_heads_share_keys_on_any_number_of_devices(shards, tmp_path):
    """With eight devices, all banks are padded."""
    cfg = T.validate(replace(ONE_STAGE, kv_heads=1, qk_heads=1, checkpoint_every=0))
    each = (trained(replace(cfg, devices=n), tmp_path / str(n), shards) for n in (1, 8))
    one, eight = map(train_losses, each)
    np.testing.assert_allclose(one, eight, rtol=2e-5)


def test_a_run_without_ngrams_ends_with_a_sample(shards, tmp_path):
    short = replace(ONE_STAGE, layers=ONE_STAGE.layers[:1], checkpoint_every=0)
    cfg = T.override(short, ["without=all", "sample_tokens=3"])
    run = trained(cfg, tmp_path, shards)
    assert "a sample after the first words" in (run / "sample.txt").read_text()


def test_without_all_tiny_is_plain():
    cfg = T.override(T.PRESETS["tiny"], ["without=all", "preset=plain", "target=0"])
    assert cfg == T.PRESETS["plain"] and cfg.layers == (T.Layer("long"),) * 4
    assert cfg.stages == (T.Stage(1.0, 1024, 128, 0, (128, 128)),) and cfg.val_windows == (128, 128)
    assert cfg.momentum == (0.93, 0.93) and cfg.adam_every == 1 and cfg.tied == cfg.target == 0


def test_several_ideas_are_disabled_together_and_unknown_names_are_refused():
    cfg = T.override(T.PRESETS["tiny"], ["without=xsa,mudd", "steps=9", "extension=0"])
    assert not any(layer.xsa or layer.mudd for layer in cfg.layers) and cfg.steps == 9
    with pytest.raises(T.UserError, match="without=xsa,mud: it must be all, or a list of "):
        T.override(cfg, ["without=xsa,mud"])


# Runs a command of train_gpt.py, and prints the first lines of all functions that were called.
CALLED = """
import os, runpy, sys, threading
path, seen = sys.argv[1], set()
def note(frame, event, arg):
    if event == "call" and frame.f_code.co_filename == path:
        seen.add(frame.f_code.co_firstlineno)
sys.argv = [path, *sys.argv[2:]]
threading.setprofile(note)
sys.setprofile(note)
try:
    runpy.run_path(path, run_name="__main__")
finally:
    sys.setprofile(None)
    threading.setprofile(None)
    print("\\n" + " ".join(map(str, seen)))
"""


# Functions of Part II that run without any idea: two that add the parameters and numbers of enabled
# ideas, and one that attend_band shares with the pointer.
ALWAYS = {"with_ideas", "hyper_of_ideas", "token_blocks"}


@pytest.mark.slow
def test_plain_runs_all_of_the_core_and_no_ideas(tmp_path):
    path = str(ROOT / "train_gpt.py")
    settings = "steps=4 momentum_cooldown=1 val_tokens=4096 sample_tokens=0 checkpoint_end=never"
    words = ["plain", "--out", str(tmp_path), "--cache", "off", "--set", *settings.split()]
    command = [sys.executable, "-c", CALLED, path, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = {int(x) for x in done.stdout.splitlines()[-1].split()}
    ideas = set()
    for node in DEFINITIONS:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(x.lineno for x in (node, *node.decorator_list))
            runs = bool(lines & {*range(first, node.end_lineno + 1)})
            is_reference = node.name == "attend_plain"  # attend_band is what runs
            if part_of(node) == 1 and node.lineno > CORE and not is_reference:
                assert runs, f"{node.name} is not part of the core"
            if part_of(node) == 2 and runs and isinstance(node, ast.FunctionDef):
                ideas.add(node.name)
    assert ideas <= ALWAYS


class WithoutIdeas(ast.NodeTransformer):
    """Removes the statements of Part I with a comment that quotes the title of an idea. Of an `if`
    with such a comment, only the `else` stays."""

    def visit(self, node):
        if not isinstance(node, ast.stmt) or not re.search(r'  # "[A-Z]', LINES[node.lineno - 1]):
            return self.generic_visit(node)
        if isinstance(node, ast.If):
            return [self.visit(x) for x in node.orelse] or ast.Pass()
        return ast.Pass()


def without_ideas() -> str:
    """Return the source without the lines of ideas in Part I and the functions of Part II."""
    needed = {"IDEAS", "PLAIN_HAS", "blend", "token_blocks"}  # settings, and names of Part V
    kept = []
    for node in DEFINITIONS:
        part = part_of(node)
        if part == 1 and node.lineno > CORE:
            node = WithoutIdeas().visit(copy.deepcopy(node))  # other tests use the tree
        if part != 2 or {*definitions_of(node)} & needed:
            kept.append(node)
    imports = [node for node in TREE.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.unparse(ast.Module([*imports, *kept], []))


@pytest.mark.slow
def test_without_the_lines_of_ideas_a_complete_gpt_remains(tmp_path):
    """It trains to the losses of `plain`."""
    (tmp_path / "train_gpt.py").write_text(without_ideas())
    (tmp_path / "data").symlink_to(ROOT / "data")
    settings = "steps=4 momentum_cooldown=1 val_tokens=4096 sample_tokens=0 checkpoint_end=never"
    found = []
    for folder in (ROOT, tmp_path):
        out = tmp_path / f"logs-{folder.name}"
        words = ["plain", "--out", out, "--cache", "off", "--set", *settings.split()]
        subprocess.run([sys.executable, folder / "train_gpt.py", *words], check=True)
        (run,) = out.iterdir()
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        found.append([line.get("train_loss", line.get("val_loss")) for line in lines])
    assert len(found[0]) == 5 and found[0] == found[1]


def test_every_row_of_the_table_names_the_setting_that_disables_its_idea():
    """By a name of IDEAS, or by other valid settings. Every idea has a row."""
    rows = re.search(r"\| idea \|.*?\n\n", (ROOT / "records/IDEAS.md").read_text(), re.S)[0].strip()
    offs = [row.split("|")[-2].strip().strip("`") for row in rows.splitlines()[2:]]
    named = [off.removeprefix("without=").split(",") for off in offs if off.startswith("without=")]
    assert {*itertools.chain(*named)} == {*T.IDEAS}
    for off in offs:
        assert T.override(T.PRESETS["speedrun"], shlex.split(off)) != T.PRESETS["speedrun"], off


@pytest.mark.parametrize("names", ["xsa,x0,ngrams", "xsa,x0,ngrams,skip", "gated,skip"])
def test_only_one_small_mlp_may_have_gates(names):
    """Gates of layers before the layer with `looks`, or gates of other layers."""
    cfg = T.override(CFG, [f"without={names}"])
    mesh = mesh_of(1)
    program = next(iter(T.programs(cfg, mesh, T.PLAIN).values()))
    text = str(traced(program, mesh).jaxpr)
    count = sum(len(each) > 0 for each in T.coefficient_starts(cfg, "gate"))
    assert count in (1, 2) and text.count("erf") >= count  # in their hidden units


def test_disabled_ideas_add_up():
    at_once = T.override(CFG, ["without=mudd,xsa"])
    assert T.override(CFG, ["without=mudd", "without=xsa"]) == at_once
    assert T.override(T.override(CFG, ["without=mudd"]), ["without=xsa,mudd"]) == at_once
    assert T.override(T.PRESETS["plain"], ["without=mudd"]) == T.PRESETS["plain"]
    assert T.override(T.PRESETS["plain"], ["without=muon"]).without == "all,muon"
