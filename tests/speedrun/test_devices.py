"""A whole training gives the same numbers on any number of devices."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from programs import CFG, assert_same_training, mesh_of, programs_of, run_steps

import train_gpt as T

# The encoding "bytes" has no prefixes: these words begin with others, and some are alike but for
# case or space, so that n-grams are hashed under other ids than those of the tokens.
WORDS = [bytes([i]) for i in range(48)] + [bytes([i, 65 + i % 40]) for i in range(48)]


@pytest.fixture(scope="module")
def training(shards):
    """A function devices -> what run_steps returns, each once."""

    @functools.cache
    def run(devices):
        compiled = programs_of(CFG, devices)
        return run_steps(CFG, mesh_of(devices), compiled, shards, words=WORDS, ends=True)

    return run


def test_config_has_every_kind_of_step():
    """So that the comparison below says something."""
    programs = [T.programs_of(CFG, step) for step in range(CFG.steps)]
    used = {name for names in programs for name in names}
    assert used == set(T.programs(CFG, mesh_of(1), T.PLAIN)) - {"finish", "eval"}
    ticks = np.array([T.tick_rates(CFG, step) for step in range(CFG.steps)])
    assert np.all(np.sum(ticks > 0, axis=0) >= 2)
    known = T.vocabulary(CFG, WORDS)
    assert np.any(known.prefix_v >= 0) and np.any(known.hashed_v != np.arange(CFG.vocab))
    rows = {name: row.shape[0] for name, row in T.param_table(CFG).items() if row.sharded}
    assert rows["head"] % 2 and rows["ngram_table"] % 4 and rows["mlp_bank"] % 8


@pytest.mark.parametrize("devices", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8])
def test_training_is_the_same(training, devices):
    """Losses, that of the validation too, and all of the state: but for the order of sums."""
    (losses, state), (want, alone) = training(devices), training(1)
    assert_same_training((losses, state), (want, alone))
    assert len(losses) == CFG.steps + 1
    assert losses[-2] < np.log(CFG.vocab) - 0.2  # the last stage has no candidates
    for kind, arrays in alone.items():
        for name, x in arrays.items():
            assert np.any(x), (kind, name)
            error = np.linalg.norm(state[kind][name] - x) / np.linalg.norm(x)
            assert error < 2e-5, (kind, name)  # 5e-6 was seen


@pytest.mark.slow
def test_stages_train_the_same_in_one_program_and_in_two(shards):
    """Also where rows are filled up: to share a program, or without need."""
    *others, first, last = CFG.stages
    alike = replace(last, windows=first.windows)
    answers = []
    for stage, programs in ((alike, 2), (replace(alike, room=128), 3)):
        cfg = replace(CFG, stages=(*others, first, stage))
        assert len(T.grads_stages(cfg)) == programs
        compiled = programs_of(cfg, 2)
        answers.append(run_steps(cfg, mesh_of(2), compiled, shards, words=WORDS, ends=True))
    assert_same_training(*answers)
