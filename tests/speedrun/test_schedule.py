"""Schedule: what holds at every step and at every edge. The record's own: test_record92.py."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import small_config

import train_gpt as T

RECORD = T.Config()  # 1174 scheduled steps and 20 more; the rate falls from step 234 on


def staged(steps: int, *shares: float, **changes) -> T.Config:
    """A config whose stages differ in their first window, so that they can be told apart."""
    stages = [T.Stage(share, 256, 32, 0, (i + 1, 32)) for i, share in enumerate(shares)]
    return small_config(**{"steps": steps, "extension": 0, "stages": tuple(stages), **changes})


# ------------------------------------------------------------------------------------------------
# Stages
# ------------------------------------------------------------------------------------------------


def test_stages_and_tokens_of_the_record():
    assert RECORD.boundaries == (0, 320, 681, 1107, 1174, 1194)
    numbers = [T.stage_index(RECORD, step) for step in range(1194)]
    assert numbers == [0] * 320 + [1] * 361 + [2] * 426 + [3] * 67 + [4] * 20
    assert all(T.stage_at(RECORD, s) is RECORD.stages[n] for s, n in enumerate(numbers))
    first, second = 320 * 131_072, 361 * 262_144
    want = {0: 0, 1: 131_072, 320: first, 321: first + 262_144, 681: first + second}
    want |= {1107: first + second + 426 * 393_216, 1194: 328_663_040, 9999: 328_663_040}
    assert {step: RECORD.tokens_after(step) for step in want} == want
    assert RECORD.total_tokens == 328_663_040


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


# ------------------------------------------------------------------------------------------------
# Learning rate and momentum
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, scale",
    [
        (0, 1.0),
        (234, 1.0),
        (235, 1.0 * 939 / 940 + 0.3 * 1 / 940),
        (319, 1.0 * 855 / 940 + 0.3 * 85 / 940),
        (320, 1.52 * 854 / 940 + 0.3 * 86 / 940),
        (1106, 1.73 * 68 / 940 + 0.3 * 872 / 940),
        (1173, 1.73 * math.sqrt(5 / 6) / 940 + 0.3 * 939 / 940),
        (1174, 0.3),
        (1193, 0.3),
    ],
)
def test_lr_is_flat_then_falls_linearly_to_the_floor(step, scale):
    """Each stage has its own factor, the floor is common to all."""
    assert T.lr_scale(RECORD, step) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    "changes, step, scale",
    [
        ({"cooldown": 0.0}, 1106, 1.73),
        ({"cooldown": 0.0}, 1174, 0.3),
        ({"cooldown": 0.0}, 1193, 0.3),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 0, 1.0),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 587, 1.52 / 2),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 1174, 0.0),
        ({"lr_floor": 1.0}, 1193, 1.0),
    ],
)
def test_lr_with_other_cooldowns_and_floors(changes, step, scale):
    assert T.lr_scale(replace(RECORD, **changes), step) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("cooldown, last", [(0.0, 1.0), (0.5, 0.2 + 0.8 * 0.3)])
def test_lr_without_an_extension_ends_one_step_above_the_floor(cooldown, last):
    """Of 10 steps the last 5 fall; the floor itself would be reached at step 10."""
    cfg = staged(10, 1.0, cooldown=cooldown)
    assert [T.lr_scale(cfg, step) for step in (0, 5)] == [1.0, 1.0]
    assert T.lr_scale(cfg, 9) == pytest.approx(last, rel=1e-12)


@pytest.mark.parametrize(
    "step, mu",
    [(0, 0.85), (120, 0.89), (240, 0.93), (1144, 0.93), (1169, 0.89), (1193, 0.8516)],
)
def test_momentum_warms_up_stays_and_cools_down(step, mu):
    assert T.momentum(RECORD, step) == pytest.approx(mu, rel=1e-12)
    assert T.rails(RECORD, step) == (
        (0.85, 0.4385) if step >= 514 else (T.momentum(RECORD, step), 1)
    )


def test_rails_begin_at_their_step():
    assert T.rails(RECORD, 513) == (0.93, 1.0) and T.rails(RECORD, 514) == (0.85, 0.4385)
    assert T.rails(replace(RECORD, rails_step=0), 0) == (0.85, 0.4385)


def test_momentum_without_cooldown_stays():
    assert T.momentum(replace(RECORD, momentum_cooldown=0), 1193) == 0.93


def test_momentum_of_a_run_too_short_for_both_is_the_lower_of_the_two():
    """4 steps up, 8 steps down, 10 in all: 0, 1/4, 1/2, 3/4 meet 1, 7/8, 6/8, 5/8 at step 5."""
    cfg = staged(10, 1.0, momentum_warmup=4, momentum_cooldown=8)
    got = [(T.momentum(cfg, step) - 0.85) / 0.08 for step in range(10)]
    want = [0, 1 / 4, 1 / 2, 3 / 4, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    np.testing.assert_allclose(got, want, atol=1e-12)


# ------------------------------------------------------------------------------------------------
# Targets and candidates
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, weights, prefix, candidates",
    [
        (0, (1.0, 0.5, 0.25), 0.25, 10_240),
        (160, (1.0, 0.5, 0.125), 0.25, 10_240),
        (320, (1.0, 0.5), 0.2, 10_240),
        (410, (1.0, 0.5 * 271 / 361), 0.2, 10_240),  # 90 of 361 steps: less than a quarter
        (411, (1.0, 0.5 * 270 / 361), 0.15, 10_240),
        (680, (1.0, 0.5 / 361), 0.05, 10_240),
        (681, (1.0,), 0.0, 14_336),
        (964, (1.0,), 0.0, 14_336),
        (965, (1.0,), 0.0, 24_576),
        (1107, (1.0,), 0.0, 0),
        (1193, (1.0,), 0.0, 0),
    ],
)
def test_targets_and_candidates_of_the_record(step, weights, prefix, candidates):
    """Weights of the next tokens fall linearly within their stage, the others by its parts."""
    assert T.loss_weights(RECORD, step) == pytest.approx(weights, rel=1e-12)
    assert T.prefix_weight(RECORD, step) == prefix
    assert T.candidate_count(RECORD, step) == candidates


def test_weights_may_rise_too():
    stages = (T.Stage(1.0, 256, 32, 0, (8, 32), 1.0, (1.0, 0.0), (2.0, 1.0)),)
    cfg = small_config(steps=4, extension=0, stages=stages)
    got = [T.loss_weights(cfg, step) for step in range(4)]
    assert got == [(1.0, 0.0), (1.25, 0.25), (1.5, 0.5), (1.75, 0.75)]


def test_more_entries_than_steps_of_a_stage():
    """Some are left out."""
    stage = T.Stage(1.0, 256, 32, 0, (8, 32), prefix=(1.0, 2.0, 3.0, 4.0, 5.0), candidates=(0, 40))
    cfg = small_config(steps=3, extension=0, stages=(stage,))
    assert [T.prefix_weight(cfg, step) for step in range(3)] == [1.0, 2.0, 4.0]
    assert [T.candidate_count(cfg, step) for step in range(3)] == [0, 0, 40]


def test_each_stage_and_softmax_of_the_record_has_a_program():
    kinds = T.grads_kinds(RECORD)
    assert kinds == [(0, 10_240), (1, 10_240), (2, 14_336), (2, 24_576), (3, 0), (4, 0)]
    for step in range(RECORD.steps):
        i = kinds.index((T.stage_index(RECORD, step), T.candidate_count(RECORD, step)))
        assert T.programs_of(RECORD, step)[0] == f"grads{i}"


# ------------------------------------------------------------------------------------------------
# Adam's steps, events, and the end of the tie
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "every, steps", [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (3, [2, 5]), (7, [6]), (8, [])]
)
def test_adam_takes_the_last_step_of_every_group(every, steps):
    cfg = replace(RECORD, adam_every=every)
    assert [step for step in range(7) if T.is_adam_step(cfg, step)] == steps
    counts = [T.hyper_at(cfg, step).adam_count for step in range(7)]
    assert counts == [1 + sum(s < step for s in steps) for step in range(7)]


@pytest.mark.parametrize(
    "every, change, events",
    [
        ((2, 4), 4, [1, 3, 7, 11]),
        ((2, 4), 8, [1, 3, 5, 7, 11]),
        ((2, 2), 0, [1, 3, 5, 7, 9, 11]),
        ((1, 3), 3, [0, 1, 2, 5, 8, 11]),
        ((4, 4), 400, [3, 7, 11]),
        ((2, 6), 0, [5, 11]),
    ],
)
def test_events_take_the_last_step_of_every_group(every, change, events):
    cfg = replace(RECORD, event_every=every, event_change=change, adam_every=1)
    assert [step for step in range(12) if T.is_event(cfg, step)] == events
    for step in range(12):
        hyper = T.hyper_at(cfg, step)
        assert hyper.event_count == 1 + sum(s < step for s in events)
        assert hyper.event_span == (1 if step < change else every[1] / every[0])


@pytest.mark.parametrize("every, last", [(1, 587), (2, 587), (3, 587), (5, 589), (8, 591)])
def test_the_tie_ends_with_an_adam_step(every, last):
    """The first one at or after the middle of the schedule."""
    cfg = replace(RECORD, adam_every=every, tied=0.5)
    assert [T.is_tied(cfg, s) for s in range(1194)] == [s <= last for s in range(1194)]
    assert T.is_adam_step(cfg, last)
    assert [T.is_tied(RECORD, s) for s in (1175, 1176)] == [True, False]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("tied, always", [(0.0, False), (1.0, True)])
def test_never_tied_and_always_tied(tied, always, every):
    cfg = staged(12, 1.0, tied=tied, adam_every=every, event_every=(6, 12), event_change=12)
    assert [T.is_tied(cfg, step) for step in range(12)] == [always] * 12


def test_something_with_a_period():
    assert [step for step in range(9) if T.is_due(4, step - 1, step)] == [0, 4, 8]
    assert [step for step in range(3) if T.is_due(1, step - 1, step)] == [0, 1, 2]
    assert not any(T.is_due(0, step - 1, step) for step in range(9))


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


@pytest.mark.parametrize("period, saved", [(1, [2, 4, 8]), (3, [4, 8]), (5, [8])])
def test_checkpoints_of_ten_steps(period, saved):
    """Where no gradient waits, at or soon after each multiple of the period; none is lost."""
    cfg, last, found = small_config(), 0, []  # events after steps 1, 3, 7
    for step in range(10):
        waiting = step > 0 and not T.is_event(cfg, step - 1)
        if not waiting and T.is_due(period, last, step):
            found.append(step)
            last = step
    assert found == saved


@pytest.mark.parametrize(
    "kept, preset, changes",
    [
        (True, "tiny", {}),
        (False, "tiny", {"checkpoint_end": "never"}),
        (False, "speedrun", {}),  # the n-gram table alone: 65 GB
        (True, "speedrun", {"ngram_rows": 1_000_000}),  # 6.5 GB
        (True, "speedrun", {"checkpoint_end": "always"}),
    ],
)
def test_which_runs_end_with_a_checkpoint(kept, preset, changes):
    assert T.keeps_end(replace(T.PRESETS[preset], **changes)) == kept


# ------------------------------------------------------------------------------------------------
# Averages of the last weights
# ------------------------------------------------------------------------------------------------


def test_ticks_by_hand():
    """Of ten steps the last six or five; Adam updates after odd ones, the events are 1, 3 and 7."""
    cfg = small_config()
    ema = 1 - (1 - 2 / 7) ** 2  # of two steps at once, and of the last step alone
    want = {3: 1.0, 5: ema, 7: ema, 9: 2 / 7}, {5: 1.0, 9: 1.0}, {7: 1.0}, {5: 1.0, 8: 1.0, 9: 1.0}
    for got, ticks in zip(T.tail_ticks(cfg), want, strict=True):
        assert got == pytest.approx(ticks, rel=1e-12)
    for step in range(10):
        assert T.tick_rates(cfg, step) == tuple(at.get(step, 0.0) for at in T.tail_ticks(cfg))


@pytest.mark.parametrize("tail", [1, 2, 5, 7, 10, 100])
def test_every_average_begins_with_the_weight_and_stays_within_it(tail):
    for at in T.tail_ticks(small_config(tail=tail, tail_average=tail)):
        assert list(at) == sorted(at) and all(0 <= step < 10 for step in at)
        assert list(at.values())[:1] in ([], [1.0]) and all(0 < rate <= 1 for rate in at.values())


# ------------------------------------------------------------------------------------------------
# YaRN
# ------------------------------------------------------------------------------------------------


def exact_yarn(base: float, count: int, windows) -> tuple[np.ndarray, float]:
    """(frequencies, growth of the scale) after a window went through `windows`, in float64."""
    freqs, growth = np.array([base ** (-k / (count - 1)) for k in range(count)]), 1.0
    for old, new in zip(windows, windows[1:], strict=False):
        for k in range(count):
            turns = old * freqs[k] / (2 * math.pi)
            share = min(max((turns - 1) / (32 - 1), 0), 1)
            freqs[k] *= share + (1 - share) * old / new
        growth *= 1 + 0.2 * math.log(new / old)
    return freqs, growth


@pytest.mark.parametrize("stage", range(5))
def test_yarn_of_the_record_against_float64(stage):
    """Narrow heads by the short windows, wide ones by the long; stage 3 changes nothing."""
    freqs, scales = T.yarn(RECORD, stage)
    assert freqs.dtype == np.float32 and freqs.shape == (2, 128 // 4)
    windows = [128, 384, 640, 640, 768], [384, 896, 1408, 1408, 1664]
    for i, start in enumerate((0.13, 0.085)):
        want, growth = exact_yarn(1024, 32, windows[i][: stage + 1])
        np.testing.assert_allclose(freqs[i], want, rtol=3e-6)  # three roundings to float32 a stage
        assert scales[i] == pytest.approx(start * growth, rel=1e-12)


def test_yarn_slows_what_turned_less_than_once_and_keeps_what_turned_32_times():
    """From 384 to 896 tokens: below 2 pi / 384 they shrink to 3/7, above 64 pi / 384 they stay."""
    before, after = (T.yarn(RECORD, stage)[0][1].astype(np.float64) for stage in (0, 1))
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


def test_each_kind_of_head_follows_its_own_windows():
    """Where these stay the same nothing changes, not even by a rounding."""
    cfg = with_windows((8, 384), (64, 384), (64, 896))
    freqs, scales = zip(*(T.yarn(cfg, i) for i in range(3)), strict=True)
    for kind, (before, after) in ((1, (0, 1)), (0, (1, 2))):
        np.testing.assert_array_equal(freqs[before][kind], freqs[after][kind])
        assert scales[before][kind] == scales[after][kind]
        assert np.any(freqs[before][1 - kind] != freqs[after][1 - kind])
        assert scales[before][1 - kind] < scales[after][1 - kind]


@pytest.mark.parametrize("windows", [(64, 128, 256), (64, 32)])
@pytest.mark.parametrize("base, scale", [(1024.0, 0.1), (50.0, 0.25)])
def test_yarn_of_other_heads_bases_and_scales(base, scale, windows):
    """Heads of 32: 8 frequencies. A window that shrinks turns all around."""
    cfg = with_windows(*((8, w) for w in windows))
    cfg = replace(cfg, rope_base=base, attn_scales=(1.0, scale))
    freqs, scales = T.yarn(cfg, len(windows) - 1)
    want, growth = exact_yarn(base, 8, windows)
    np.testing.assert_allclose(freqs[1], want, rtol=2e-6)
    assert scales.tolist() == pytest.approx([1.0, scale * growth], rel=1e-12)


# ------------------------------------------------------------------------------------------------
# What travels with a batch
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 161, 320, 321, 513, 514, 680, 681, 1107, 1175, 1176, 1193])
def test_hyper_is_the_schedule_in_float32(step):
    hyper = T.hyper_at(RECORD, step)
    (narrow, wide), scales = T.yarn(RECORD, T.stage_index(RECORD, step))
    assert hyper.lr == np.float32(T.lr_scale(RECORD, step))
    assert hyper.momentum == np.float32(T.momentum(RECORD, step))
    rails = np.float32(T.rails(RECORD, step))
    np.testing.assert_array_equal([hyper.fast_beta, hyper.fast_weight], rails)
    np.testing.assert_array_equal(hyper.scales, np.float32(scales))
    np.testing.assert_array_equal(hyper.freqs_narrow, narrow)
    np.testing.assert_array_equal(hyper.freqs_wide, wide)
    weights = T.loss_weights(RECORD, step)
    np.testing.assert_array_equal(hyper.weights, np.float32([*weights, 0, 0][:3]))
    assert hyper.prefix == np.float32(T.prefix_weight(RECORD, step))
    np.testing.assert_array_equal(hyper.ticks, np.float32(T.tick_rates(RECORD, step)))


@pytest.mark.parametrize("cfg", [RECORD, small_config()], ids=lambda cfg: cfg.preset)
def test_hyper_has_the_same_shapes_at_every_step(cfg):
    """So that no step recompiles a program; weights are padded to those of the widest stage."""
    quarter, widest = cfg.head_width // 4, max(len(stage.weights) for stage in cfg.stages)
    shapes = [()] * 7 + [(quarter,), (quarter,), (2,), (widest,), (), (4,)]
    for step in range(cfg.steps):
        hyper = T.hyper_at(cfg, step)
        assert all(type(x) is np.ndarray and x.dtype == np.float32 for x in hyper)
        assert [x.shape for x in hyper] == shapes
