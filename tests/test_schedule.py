"""Schedule: which stage, learning rate and momentum a step has, at every edge."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import small_config

import train_gpt as T

SPEEDRUN = T.PRESETS["speedrun"]  # 1675 steps: cooldown over the last 670, from step 1005 on


def staged(steps: int, *shares: float, **changes) -> T.Config:
    """A config whose stages differ in their first window, so that they can be told apart."""
    stages = [T.Stage(share, 256, 32, 0, (i, 32)) for i, share in enumerate(shares)]
    return small_config(steps=steps, stages=tuple(stages), **changes)


# Stages


@pytest.mark.parametrize("step, stage", [(0, 0), (1, 0), (837, 0), (838, 1), (1674, 1), (1675, 1)])
def test_speedrun_changes_stage_at_step_838(step, stage):
    assert T.stage_at(SPEEDRUN, step) is SPEEDRUN.stages[stage]


@pytest.mark.parametrize(
    "steps, shares, boundaries",
    [
        (10, (1.0,), (0, 10)),
        (2, (0.5, 0.5), (0, 1, 2)),
        (5, (0.5, 0.5), (0, 2, 5)),  # halves go to the even number
        (7, (0.5, 0.5), (0, 4, 7)),
        (7, (1 / 3, 1 / 3, 1 / 3), (0, 2, 5, 7)),
        (10, (0.1, 0.2, 0.7), (0, 1, 3, 10)),  # 0.1 + 0.2 is a little above 0.3
        (1000, (0.333, 0.333, 0.334), (0, 333, 666, 1000)),
        (3, (0.4, 0.2, 0.4), (0, 1, 2, 3)),
    ],
)
def test_boundaries_and_the_stage_of_every_step(steps, shares, boundaries):
    cfg = staged(steps, *shares)
    assert cfg.boundaries == boundaries
    numbers = [T.stage_at(cfg, step).windows[0] for step in range(steps)]
    spans = np.diff(boundaries)
    assert numbers == np.repeat(np.arange(len(shares)), spans).tolist()


def test_a_stage_without_steps_is_refused():
    with pytest.raises(T.UserError, match="steps=10 .*at least one step"):
        staged(10, 0.02, 0.98)


# Learning rate


@pytest.mark.parametrize(
    "step, scale",
    [
        (0, 1.0),
        (1004, 1.0),
        (1005, 1.0),
        (1006, 669 / 670 + 1 / 670 * 0.1),
        (1340, 0.5 + 0.5 * 0.1),
        (1674, 1 / 670 + 669 / 670 * 0.1),
        (1675, 0.1),
    ],
)
def test_lr_is_constant_then_falls_linearly_to_the_floor(step, scale):
    assert T.lr_scale(SPEEDRUN, step) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    "changes, step, scale",
    [
        ({"cooldown": 0.0}, 1674, 1.0),
        ({"cooldown": 0.0}, 1675, 1.0),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 0, 1.0),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 335, 0.8),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 1674, 1 / 1675),
        ({"lr_floor": 0.0}, 1674, 1 / 670),
        ({"lr_floor": 1.0}, 1674, 1.0),
    ],
)
def test_lr_with_other_cooldowns_and_floors(changes, step, scale):
    assert T.lr_scale(replace(SPEEDRUN, **changes), step) == pytest.approx(scale, rel=1e-12)


def test_lr_factor_multiplies_its_own_stage_only():
    first, second = SPEEDRUN.stages
    cfg = replace(SPEEDRUN, stages=(first, replace(second, lr_factor=0.25)))
    assert T.lr_scale(cfg, 837) == 1.0
    assert T.lr_scale(cfg, 838) == 0.25
    assert T.lr_scale(cfg, 1340) == pytest.approx(0.25 * 0.55, rel=1e-12)


# Momentum and the vector that travels with a batch


@pytest.mark.parametrize(
    "step, mu", [(0, 0.85), (250, 0.9), (500, 0.95), (501, 0.95), (9999, 0.95)]
)
def test_momentum_warms_up_and_stays(step, mu):
    assert T.muon_momentum(SPEEDRUN, step) == pytest.approx(mu, rel=1e-12)


@pytest.mark.parametrize("step", [0, 250, 1340, 1674])
def test_hyper_is_three_float32_in_order(step):
    hyper = T.hyper_at(SPEEDRUN, step)
    assert hyper.dtype == np.float32 and hyper.shape == (3,)
    lr, mu, count = T.Hyper(*hyper)
    assert lr == np.float32(T.lr_scale(SPEEDRUN, step))
    assert mu == np.float32(T.muon_momentum(SPEEDRUN, step))
    assert count == step + 1  # Adam's bias correction of the first step is 1 - beta
