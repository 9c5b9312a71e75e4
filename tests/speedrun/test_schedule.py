"""Schedule: what holds at every step and at every edge."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import small_config

import train_gpt as T

RECORD = T.Config()  # 1450 scheduled steps and 40 more; the rate falls from step 580 on


def staged(steps: int, *shares: float, **changes) -> T.Config:
    """A config whose stages differ in their first window, so that they can be told apart."""
    stages = [T.Stage(share, 256, 32, 0, (i + 1, 32)) for i, share in enumerate(shares)]
    return small_config(**{"steps": steps, "extension": 0, "stages": tuple(stages), **changes})


# ------------------------------------------------------------------------------------------------
# Stages
# ------------------------------------------------------------------------------------------------


def test_the_record_changes_stage_at_steps_483_967_and_1450():
    assert RECORD.boundaries == (0, 483, 967, 1450, 1490)
    numbers = [T.stage_index(RECORD, step) for step in range(1490)]
    assert numbers == [0] * 483 + [1] * 484 + [2] * 483 + [3] * 40
    assert all(T.stage_at(RECORD, s) is RECORD.stages[n] for s, n in enumerate(numbers))


def test_the_record_sees_396_million_tokens():
    counts = 483 * 131_072 + 484 * 262_144 + (483 + 40) * 393_216
    assert RECORD.total_tokens == counts == 395_837_440


@pytest.mark.parametrize(
    "step, tokens",
    [
        (0, 0),
        (1, 131_072),
        (483, 483 * 131_072),
        (484, 483 * 131_072 + 262_144),
        (967, 483 * 131_072 + 484 * 262_144),
        (1450, 483 * 131_072 + 484 * 262_144 + 483 * 393_216),
        (1490, 395_837_440),
        (9999, 395_837_440),
    ],
)
def test_tokens_after_a_step(step, tokens):
    assert RECORD.tokens_after(step) == tokens


@pytest.mark.parametrize(
    "steps, shares, extension, boundaries",
    [
        (10, (1.0,), 0, (0, 10)),
        (2, (0.5, 0.5), 0, (0, 1, 2)),
        (5, (0.5, 0.5), 0, (0, 2, 5)),  # halves go to the even number
        (7, (0.5, 0.5), 0, (0, 4, 7)),
        (7, (1 / 3, 1 / 3, 1 / 3), 0, (0, 2, 5, 7)),
        (10, (0.1, 0.2, 0.7), 0, (0, 1, 3, 10)),  # 0.1 + 0.2 is a little above 0.3
        (1000, (0.333, 0.333, 0.334), 0, (0, 333, 666, 1000)),
        (3, (0.4, 0.2, 0.4), 0, (0, 1, 2, 3)),
        (10, (1.0, 0.0), 1, (0, 9, 10)),
        (10, (1.0, 0.0), 9, (0, 1, 10)),
        (10, (0.5, 0.5, 0.0), 4, (0, 3, 6, 10)),
    ],
)
def test_boundaries_and_the_stage_of_every_step(steps, shares, extension, boundaries):
    cfg = staged(steps, *shares, extension=extension)
    assert cfg.boundaries == boundaries and cfg.scheduled == steps - extension
    numbers = [T.stage_at(cfg, step).windows[0] - 1 for step in range(steps)]
    assert numbers == np.repeat(np.arange(len(shares)), np.diff(boundaries)).tolist()
    assert numbers == [T.stage_index(cfg, step) for step in range(steps)]


def test_tokens_of_stages_with_different_batches():
    stages = T.Stage(0.3, 64, 8, 0, (4, 8)), T.Stage(0.7, 256, 8, 0, (4, 8))
    cfg = small_config(steps=7, extension=0, stages=stages)
    assert cfg.boundaries == (0, 2, 7)
    assert cfg.total_tokens == 2 * 64 + 5 * 256
    assert [cfg.tokens_after(step) for step in (0, 1, 2, 3, 7)] == [0, 64, 128, 384, 1408]


# ------------------------------------------------------------------------------------------------
# Learning rate
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, scale",
    [
        (0, 1.0),
        (482, 1.0),
        (483, 1.52),
        (580, 1.52),
        (581, 1.52 * 869 / 870 + 0.15 * 1 / 870),
        (966, 1.52 * 484 / 870 + 0.15 * 386 / 870),
        (967, 1.73 * 483 / 870 + 0.15 * 387 / 870),
        (1449, 1.73 * 1 / 870 + 0.15 * 869 / 870),
        (1450, 0.15),
        (1489, 0.15),
    ],
)
def test_lr_is_flat_then_falls_linearly_to_the_floor(step, scale):
    """Each stage has its own factor, the floor is common to all."""
    assert T.lr_scale(RECORD, step) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    "changes, step, scale",
    [
        ({"cooldown": 0.0}, 1449, 1.73),
        ({"cooldown": 0.0}, 1450, 0.15),
        ({"cooldown": 0.0}, 1489, 0.15),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 0, 1.0),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 290, 0.8),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 1449, 1.73 / 1450),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 1450, 0.0),
        ({"lr_floor": 0.0}, 1449, 1.73 / 870),
        ({"lr_floor": 1.0}, 1489, 1.0),
    ],
)
def test_lr_with_other_cooldowns_and_floors(changes, step, scale):
    assert T.lr_scale(replace(RECORD, **changes), step) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("cooldown, last", [(0.0, 1.0), (0.5, 0.2 + 0.8 * 0.15)])
def test_lr_without_an_extension_ends_one_step_above_the_floor(cooldown, last):
    """Of 10 steps the last 5 fall; the floor itself would be reached at step 10."""
    cfg = staged(10, 1.0, cooldown=cooldown)
    assert [T.lr_scale(cfg, step) for step in (0, 5)] == [1.0, 1.0]
    assert T.lr_scale(cfg, 9) == pytest.approx(last, rel=1e-12)


# ------------------------------------------------------------------------------------------------
# Momentum, weights of the losses
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, mu",
    [(0, 0.85), (150, 0.9), (300, 0.95), (301, 0.95), (1440, 0.95), (1465, 0.9), (1489, 0.852)],
)
def test_momentum_warms_up_stays_and_cools_down(step, mu):
    assert T.muon_momentum(RECORD, step) == pytest.approx(mu, rel=1e-12)


def test_momentum_without_cooldown_stays():
    assert T.muon_momentum(replace(RECORD, momentum_cooldown=0), 1489) == 0.95


def test_momentum_of_a_run_too_short_for_both_is_the_lower_of_the_two():
    """4 steps up, 8 steps down, 10 in all: 0, 1/4, 1/2, 3/4 meet 1, 7/8, 6/8, 5/8 at step 5."""
    cfg = staged(10, 1.0, momentum_warmup=4, momentum_cooldown=8)
    got = [(T.muon_momentum(cfg, step) - 0.85) / 0.1 for step in range(10)]
    want = [0, 1 / 4, 1 / 2, 3 / 4, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize(
    "step, weights",
    [
        (0, (1.0, 0.5, 0.25)),
        (161, (1.0, 0.5, 0.25 * 2 / 3)),
        (482, (1.0, 0.5, 0.25 / 483)),
        (483, (1.0, 0.5)),
        (604, (1.0, 0.375)),
        (966, (1.0, 0.5 / 484)),
        (967, (1.0,)),
        (1489, (1.0,)),
    ],
)
def test_weights_of_the_losses_fall_linearly_within_their_stage(step, weights):
    assert T.loss_weights(RECORD, step) == pytest.approx(weights, rel=1e-12)


def test_weights_may_rise_too():
    stages = (T.Stage(1.0, 256, 32, 0, (8, 32), 1.0, (1.0, 0.0), (2.0, 1.0)),)
    cfg = small_config(steps=4, extension=0, stages=stages)
    got = [T.loss_weights(cfg, step) for step in range(4)]
    assert got == [(1.0, 0.0), (1.25, 0.25), (1.5, 0.5), (1.75, 0.75)]


# ------------------------------------------------------------------------------------------------
# Adam's steps, and the end of the tie
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "every, steps", [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (3, [2, 5]), (7, [6]), (8, [])]
)
def test_adam_takes_the_last_step_of_every_group(every, steps):
    cfg = replace(RECORD, adam_every=every)
    assert [step for step in range(7) if T.is_adam_step(cfg, step)] == steps


@pytest.mark.parametrize("every, last", [(1, 967), (2, 967), (3, 968), (5, 969), (8, 967)])
def test_the_tie_ends_with_an_adam_step(every, last):
    """The first one at or after step round(2/3 of 1450) = 967."""
    cfg = replace(RECORD, adam_every=every)
    assert [T.is_tied(cfg, step) for step in range(1490)] == [True] * (last + 1) + [False] * (
        1489 - last
    )
    assert T.is_adam_step(cfg, last)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("tied, always", [(0.0, False), (1.0, True)])
def test_never_tied_and_always_tied(tied, always, every):
    cfg = staged(10, 1.0, tied=tied, adam_every=every)
    assert [T.is_tied(cfg, step) for step in range(10)] == [always] * 10


def test_something_with_a_period():
    assert [step for step in range(9) if T.every(4, step)] == [0, 4, 8]
    assert [step for step in range(3) if T.every(1, step)] == [0, 1, 2]
    assert not any(T.every(0, step) for step in range(9))


@pytest.mark.parametrize(
    "period, last, steps",
    [
        (0, 0, []),
        (1, 0, [1, 2, 3, 4, 5, 6, 7, 8]),
        (4, 0, [4, 5, 6, 7, 8]),  # until it is done, which makes it the last
        (4, 4, [8]),
        (4, 6, [8]),
        (3, 4, [6, 7, 8]),  # at 4 instead of 3, where gradients waited: the next at 6 all the same
    ],
)
def test_what_could_not_be_done_at_its_period_is_due_at_the_next_step(period, last, steps):
    """Checkpoints: not while gradients wait for Adam."""
    assert [step for step in range(last, 9) if T.is_due(period, last, step)] == steps


@pytest.mark.parametrize("adam_every, saved", [(1, [3, 6, 9]), (2, [4, 6, 10]), (5, [5, 10])])
def test_checkpoints_of_ten_steps_with_period_three(adam_every, saved):
    """Where no gradient waits, at or soon after each multiple of the period; none is lost."""
    cfg, last, found = small_config(adam_every=adam_every), 0, []
    for step in range(11):
        waiting = step > 0 and not T.is_adam_step(cfg, step - 1)
        if not waiting and T.is_due(3, last, step):
            found.append(step)
            last = step
    assert found == saved


@pytest.mark.parametrize(
    "kept, preset, changes",
    [
        (True, "tiny", {}),
        (True, "speedrun", {}),  # 539 million parameters, 12 bytes each: 6.5 GB
        (False, "speedrun", {"width": 1536, "mlp_width": 6144}),  # over 12 GB
        (True, "speedrun", {"width": 1536, "mlp_width": 6144, "checkpoint_end": "always"}),
        (False, "tiny", {"checkpoint_end": "never"}),
    ],
)
def test_which_runs_end_with_a_checkpoint(kept, preset, changes):
    assert T.keeps_end(replace(T.PRESETS[preset], **changes)) == kept


# ------------------------------------------------------------------------------------------------
# YaRN
# ------------------------------------------------------------------------------------------------


def exact_yarn(base: float, count: int, windows) -> tuple[np.ndarray, float]:
    """(frequencies, growth of the scale) after the long window went through `windows`, float64."""
    freqs, growth = np.array([base ** (-k / (count - 1)) for k in range(count)]), 1.0
    for old, new in zip(windows, windows[1:], strict=False):
        for k in range(count):
            turns = old * freqs[k] / (2 * math.pi)
            share = min(max((turns - 1) / (32 - 1), 0), 1)
            freqs[k] *= share + (1 - share) * old / new
        growth *= 1 + 0.2 * math.log(new / old)
    return freqs, growth


@pytest.mark.parametrize("stage, scale", [(0, 0.1), (1, 0.1169), (2, 0.1275), (3, 0.1318)])
def test_yarn_of_the_record_against_float64(stage, scale):
    """Long windows of 3, 7, 11 and 13 times 128 tokens."""
    freqs, attn_scale = T.yarn(RECORD, stage)
    assert freqs.dtype == np.float32 and freqs.shape == (128 // 4,)
    want, growth = exact_yarn(1024, 32, [384, 896, 1408, 1664][: stage + 1])
    np.testing.assert_allclose(freqs, want, rtol=2e-6)  # three roundings to float32 a stage
    assert attn_scale == pytest.approx(0.1 * growth, rel=1e-12)
    assert round(attn_scale, 4) == scale


def test_yarn_slows_what_turned_less_than_once_and_keeps_what_turned_32_times():
    """From 384 to 896 tokens: below 2 pi / 384 they shrink to 3/7, above 64 pi / 384 they stay."""
    before, after = (T.yarn(RECORD, stage)[0].astype(np.float64) for stage in (0, 1))
    turns = 384 * before / (2 * math.pi)
    assert (turns < 1).sum() >= 5 and (turns > 32).sum() >= 2
    np.testing.assert_array_equal(after[turns > 32], before[turns > 32])
    np.testing.assert_allclose(after[turns < 1], before[turns < 1] * 3 / 7, rtol=1e-6)
    between = (turns > 1) & (turns < 32)
    assert (np.diff((after / before)[between]) < 0).all()


def with_windows(*windows: tuple[int, int]) -> T.Config:
    """Stages that differ in their windows only."""
    share = 1 / len(windows)
    stages = tuple(T.Stage(share, 256, 32, 0, pair) for pair in windows)
    return small_config(width=128, extension=0, stages=stages)


def test_equal_long_windows_change_nothing():
    """Not even by a rounding, and whatever the short ones do."""
    cfg = with_windows((8, 384), (64, 384), (8, 896), (9, 896))
    for one, two in ((0, 1), (2, 3)):
        (freqs, scale), (freqs_after, scale_after) = T.yarn(cfg, one), T.yarn(cfg, two)
        np.testing.assert_array_equal(freqs, freqs_after)
        assert scale == scale_after
    assert T.yarn(cfg, 1)[1] < T.yarn(cfg, 2)[1]


def test_only_long_windows_count():
    one, two = with_windows((8, 64), (16, 128)), with_windows((8, 64), (60, 128))
    np.testing.assert_array_equal(T.yarn(one, 1)[0], T.yarn(two, 1)[0])
    assert T.yarn(one, 1)[1] == T.yarn(two, 1)[1]


@pytest.mark.parametrize("windows", [(64, 128, 256), (64, 32)])
@pytest.mark.parametrize("base, scale", [(1024.0, 0.1), (50.0, 0.25)])
def test_yarn_of_other_heads_bases_and_scales(base, scale, windows):
    """Heads of 32: 8 frequencies. A window that shrinks turns all around."""
    cfg = with_windows(*((8, w) for w in windows))
    cfg = replace(cfg, rope_base=base, attn_scale=scale)
    freqs, attn_scale = T.yarn(cfg, len(windows) - 1)
    want, growth = exact_yarn(base, 8, windows)
    np.testing.assert_allclose(freqs, want, rtol=2e-6)
    assert attn_scale == pytest.approx(scale * growth, rel=1e-12)


# ------------------------------------------------------------------------------------------------
# What travels with a batch
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 161, 482, 483, 604, 967, 968, 1449, 1450, 1489])
def test_hyper_is_the_schedule_in_float32(step):
    hyper = T.hyper_at(RECORD, step)
    freqs, attn_scale = T.yarn(RECORD, T.stage_index(RECORD, step))
    assert hyper.lr == np.float32(T.lr_scale(RECORD, step))
    assert hyper.momentum == np.float32(T.muon_momentum(RECORD, step))
    assert hyper.tied == (step <= 967)
    assert hyper.attn_scale == np.float32(attn_scale)
    np.testing.assert_array_equal(hyper.freqs, freqs)
    weights = T.loss_weights(RECORD, step)
    np.testing.assert_array_equal(hyper.weights, np.float32([*weights, 0, 0][:3]))


@pytest.mark.parametrize(
    "every, counts",
    [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 1, 2, 2, 3, 3, 4]), (3, [1, 1, 1, 2, 2, 2, 3])],
)
def test_adam_counts_its_own_steps(every, counts):
    """The bias correction of its first step is that of one gradient, whenever it comes."""
    cfg = replace(RECORD, adam_every=every)
    assert [T.hyper_at(cfg, step).adam_count for step in range(7)] == counts


@pytest.mark.parametrize("cfg", [RECORD, small_config()], ids=lambda cfg: cfg.preset)
def test_hyper_has_the_same_shapes_at_every_step(cfg):
    """So that no step recompiles a program; weights are padded to those of the widest stage."""
    want = [(np.dtype(np.float32), shape) for shape in [()] * 5]
    widest = max(len(stage.weights) for stage in cfg.stages)
    want += [(np.dtype(np.float32), shape) for shape in ((cfg.head_width // 4,), (widest,))]
    for step in range(cfg.steps):
        hyper = T.hyper_at(cfg, step)
        assert all(type(x) is np.ndarray for x in hyper)
        assert [(x.dtype, x.shape) for x in hyper] == want
