"""Every idea of the record can be left out; without any of them it is a plain GPT."""

import itertools
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import ROOT, small_config
from programs import mesh_of, quick_compilation, run_steps

import train_gpt as T

# What an idea has of its own among parameters, moments and arrays of a batch.
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
}
CFG = small_config(layers=(*small_config().layers[:2], *small_config().layers[3:]))
CFG = replace(
    CFG, layers=(*CFG.layers[:2], replace(CFG.layers[2], skip=1, looks=True), CFG.layers[3])
)


def names_of(cfg: T.Config) -> set[str]:
    """Parameters and kinds of state."""
    state = T.map_state(cfg, lambda *_: 0)
    return {*T.param_table(cfg), *state}


@pytest.mark.parametrize("idea", [*T.IDEAS, "all"])
def test_what_belongs_to_an_idea_alone_is_not_there_without_it(idea):
    cfg = T.override(CFG, [f"without={idea}"])
    assert cfg != replace(CFG, without=idea) and cfg.without == idea
    if idea == "all":
        assert names_of(cfg) == {"head", "embed", "qk_bank", "vo_bank", "mlp_bank"} | {
            "params", "fast", "first", "second"
        }  # fmt: skip
    else:
        assert names_of(CFG) - names_of(cfg) == OWN.get(idea, set())
    mesh = mesh_of(2)
    for key, program in T.programs(cfg, mesh, T.PLAIN).items():
        if isinstance(key, T.Gradients) and key.number == 0:
            grads, *_ = jax.eval_shape(
                jax.shard_map(
                    program.step,
                    mesh=mesh,
                    in_specs=jax.tree.map(lambda x: x.sharding.spec, program.args),
                    out_specs=program.out,
                    check_vma=False,
                ),
                *program.args,
            )
            assert {*grads} == {*T.param_table(cfg)}


@pytest.mark.slow
@pytest.mark.parametrize("idea", [*T.IDEAS, "all"])
def test_without_an_idea_a_run_learns(idea, shards):
    """Its losses fall, also on two devices alike."""
    cfg = T.override(replace(CFG, checkpoint_every=0), [f"without={idea}"])
    found = []
    for devices in (1, 2):
        mesh = mesh_of(devices)
        with quick_compilation():
            compiled = {
                str(key): T.lower(program, mesh).compile()
                for key, program in T.programs(cfg, mesh, T.PLAIN).items()
            }
        words = [bytes([i]) for i in range(256)][: cfg.bos]
        found.append(run_steps(cfg, mesh, compiled, shards, words)[0])
    one, two = np.array(found)
    assert np.all(np.isfinite(one)) and one[-2:].mean() < 0.995 * one[:2].mean()
    np.testing.assert_allclose(one, two, rtol=1e-4)


def test_without_all_tiny_is_plain():
    cfg = T.override(T.PRESETS["tiny"], ["without=all", "preset=plain", "target=0"])
    assert cfg == T.PRESETS["plain"]


def test_several_ideas_are_left_out_together_and_wrong_names_are_said():
    cfg = T.override(T.PRESETS["tiny"], ["without=xsa,mudd", "steps=9", "extension=0"])
    assert not any(layer.xsa or layer.mudd for layer in cfg.layers) and cfg.steps == 9
    with pytest.raises(T.UserError, match="without=xsa,mud: no 'mud'; there are all, muon, "):
        T.override(cfg, ["without=xsa,mud"])


def test_every_row_of_the_readme_says_how_its_idea_is_left_out():
    """By a name of IDEAS, or by a --set that makes a config; every idea has a row."""
    rows = re.search(r"\| idea \|.*?\n\n", (ROOT / "README.md").read_text(), re.S)[0].strip()
    offs = [row.split("|")[-2].strip().strip("`") for row in rows.splitlines()[2:]]
    named = [off.removeprefix("without=").split(",") for off in offs if off.startswith("without=")]
    assert {*itertools.chain(*named)} == {*T.IDEAS}
    for off in offs:
        assert T.override(T.PRESETS["speedrun"], off.split()) != T.PRESETS["speedrun"], off
