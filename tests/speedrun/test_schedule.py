"""Schedule: the table of every step, at its edges. All of the record's: test_record92.py."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import small_config

import train_gpt as T

RECORD = T.Config()  # 1174 scheduled steps and 20 more; the rate falls from step 234 on
TABLE = T.schedule(RECORD)


def staged(steps: int, *shares: float, **changes) -> T.Config:
    """A config whose stages differ in their first window, so that they can be told apart."""
    stages = [T.Stage(share, 256, 32, 0, (i + 1, 32)) for i, share in enumerate(shares)]
    return small_config(**{"steps": steps, "extension": 0, "stages": tuple(stages), **changes})


def test_stages_and_tokens_of_the_record():
    assert RECORD.boundaries == (0, 320, 681, 1107, 1174, 1194)
    assert TABLE.stage.tolist() == [0] * 320 + [1] * 361 + [2] * 426 + [3] * 67 + [4] * 20
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
        (3, (0.4, 0.2, 0.4), 0, (0, 1, 2, 3)),
        (10, (1.0, 0.0), 9, (0, 1, 10)),
        (10, (0.5, 0.5, 0.0), 4, (0, 3, 6, 10)),
    ],
)
def test_boundaries_and_the_stage_of_every_step(steps, shares, extension, boundaries):
    cfg = staged(steps, *shares, extension=extension)
    assert cfg.boundaries == boundaries
    numbers = [T.stage_at(cfg, step).windows[0] - 1 for step in range(steps)]
    assert numbers == np.repeat(np.arange(len(shares)), np.diff(boundaries)).tolist()
    assert numbers == T.schedule(cfg).stage.tolist()


def test_lr_is_flat_then_falls_linearly_to_the_floor():
    """Each stage has its own factor, the floor is common to all."""
    want = {
        0: 1.0,
        234: 1.0,
        235: 1.0 * 939 / 940 + 0.3 * 1 / 940,
        320: 1.52 * 854 / 940 + 0.3 * 86 / 940,
        1106: 1.73 * 68 / 940 + 0.3 * 872 / 940,
        1173: 1.73 * math.sqrt(5 / 6) / 940 + 0.3 * 939 / 940,
        1174: 0.3,
        1193: 0.3,
    }
    assert TABLE.hyper.lr[[*want]] == pytest.approx([*want.values()], rel=1e-12)


@pytest.mark.parametrize(
    "changes, step, scale",
    [
        ({"cooldown": 0.0}, 1106, 1.73),
        ({"cooldown": 0.0}, 1174, 0.3),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 587, 1.52 / 2),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 1174, 0.0),
        ({"lr_floor": 1.0}, 1193, 1.0),
    ],
)
def test_lr_with_other_cooldowns_and_floors(changes, step, scale):
    hyper = T.schedule(replace(RECORD, **changes)).hyper
    assert hyper.lr[step] == pytest.approx(scale, rel=1e-12)


def test_lr_without_an_extension_ends_one_step_above_the_floor():
    """Of 10 steps the last 5 fall; the floor itself would be reached at step 10."""
    lr = T.schedule(staged(10, 1.0, cooldown=0.5)).hyper.lr
    assert lr[[0, 5, 9]] == pytest.approx([1.0, 1.0, 0.2 + 0.8 * 0.3], rel=1e-12)


def test_momentum_warms_up_stays_and_cools_down():
    steps, want = [0, 120, 240, 1144, 1169, 1193], [0.85, 0.89, 0.93, 0.93, 0.89, 0.8516]
    assert TABLE.hyper.momentum[steps] == pytest.approx(want, rel=1e-12)
    stays = T.schedule(replace(RECORD, momentum_cooldown=0)).hyper.momentum
    assert stays[1193] == 0.93


def test_both_averages_of_the_gradient_count_from_their_step_on():
    """Before it the fast one is the momentum, alone."""
    fast = np.stack([TABLE.hyper.fast_beta, TABLE.hyper.fast_weight], axis=1)
    np.testing.assert_array_equal(fast[:514, 0], TABLE.hyper.momentum[:514])
    assert np.all(fast[:514, 1] == 1) and np.all(fast[514:] == (0.85, 0.4385))


def test_momentum_of_a_run_too_short_for_both_is_the_lower_of_the_two():
    """4 steps up, 8 steps down, 10 in all: 0, 1/4, 1/2, 3/4 meet 1, 7/8, 6/8, 5/8 at step 5."""
    cfg = staged(10, 1.0, momentum_warmup=4, momentum_cooldown=8)
    want = [0, 1 / 4, 1 / 2, 3 / 4, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    np.testing.assert_allclose((T.schedule(cfg).hyper.momentum - 0.85) / 0.08, want, atol=1e-12)


@pytest.mark.parametrize(
    "step, weights, prefix, candidates",
    [
        (0, (1.0, 0.5, 0.25), 0.25, 10_240),
        (160, (1.0, 0.5, 0.125), 0.25, 10_240),
        (320, (1.0, 0.5, 0), 0.2, 10_240),
        (410, (1.0, 0.5 * 271 / 361, 0), 0.2, 10_240),  # 90 of 361 steps: less than a quarter
        (411, (1.0, 0.5 * 270 / 361, 0), 0.15, 10_240),
        (680, (1.0, 0.5 / 361, 0), 0.05, 10_240),
        (681, (1.0, 0, 0), 0.0, 14_336),
        (964, (1.0, 0, 0), 0.0, 14_336),
        (965, (1.0, 0, 0), 0.0, 24_576),
        (1107, (1.0, 0, 0), 0.0, 0),
    ],
)
def test_targets_and_candidates_of_the_record(step, weights, prefix, candidates):
    """Weights of the next tokens fall linearly within their stage, the others by its parts."""
    assert TABLE.hyper.weights[step] == pytest.approx(weights, rel=1e-12)
    assert TABLE.hyper.prefix[step] == prefix and TABLE.candidates[step] == candidates


def test_weights_may_rise_too():
    stages = (T.Stage(1.0, 256, 32, 0, (8, 32), 1.0, (1.0, 0.0), (2.0, 1.0)),)
    cfg = small_config(steps=4, extension=0, stages=stages)
    want = [[1.0, 0.0], [1.25, 0.25], [1.5, 0.5], [1.75, 0.75]]
    assert T.schedule(cfg).hyper.weights.tolist() == want


def test_more_entries_than_steps_of_a_stage():
    """Some are left out."""
    stage = T.Stage(1.0, 256, 32, 0, (8, 32), prefix=(1.0, 2.0, 3.0, 4.0, 5.0), candidates=(0, 40))
    table = T.schedule(small_config(steps=3, extension=0, stages=(stage,)))
    assert table.hyper.prefix.tolist() == [1.0, 2.0, 4.0]
    assert table.candidates.tolist() == [0, 0, 40]


def test_each_stage_and_softmax_of_the_record_has_a_program():
    kinds = T.grads_kinds(RECORD)
    assert kinds == [(0, 10_240), (1, 10_240), (2, 14_336), (2, 24_576), (3, 0), (4, 0)]
    for step in range(RECORD.steps):
        i = kinds.index((TABLE.stage[step], TABLE.candidates[step]))
        assert TABLE.programs(step)[0] == f"grads{i}"


@pytest.mark.parametrize(
    "every, steps", [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (3, [2, 5]), (7, [6]), (8, [])]
)
def test_adam_takes_the_last_step_of_every_group(every, steps):
    table = T.schedule(replace(RECORD, adam_every=every))
    assert np.flatnonzero(table.adam[:7]).tolist() == steps
    counts = [1 + sum(s < step for s in steps) for step in range(7)]
    assert table.hyper.adam_count[:7].tolist() == counts


@pytest.mark.parametrize(
    "every, change, updates",
    [
        ((2, 4), 4, {1: 2, 3: 2, 7: 4, 11: 4}),
        ((2, 4), 8, {1: 2, 3: 2, 5: 2, 7: 2, 11: 4}),
        ((2, 2), 0, {1: 2, 3: 2, 5: 2, 7: 2, 9: 2, 11: 2}),
        ((1, 3), 3, {0: 1, 1: 1, 2: 1, 5: 3, 8: 3, 11: 3}),
        ((4, 4), 400, {3: 4, 7: 4, 11: 4}),
        ((2, 6), 0, {5: 6, 11: 6}),
    ],
)
def test_table_updates_take_the_last_step_of_every_group(every, change, updates):
    """With the number of steps that each sums."""
    table = T.schedule(replace(RECORD, event_every=every, event_change=change, adam_every=1))
    assert table.tables[:12].tolist() == [updates.get(step, 0) for step in range(12)]
    for step in range(12):
        assert table.hyper.table_count[step] == 1 + sum(s < step for s in updates)
        assert table.hyper.table_span[step] == (1 if step < change else every[1] / every[0])


@pytest.mark.parametrize("every, last", [(1, 587), (2, 587), (3, 587), (5, 589), (8, 591)])
def test_the_tie_ends_with_an_adam_step(every, last):
    """The first one at or after the middle of the schedule."""
    table = T.schedule(replace(RECORD, adam_every=every, tied=0.5))
    assert table.tied.tolist() == [s <= last for s in range(1194)]
    assert table.adam[last] and TABLE.tied[[1175, 1176]].tolist() == [True, False]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("tied, always", [(0.0, False), (1.0, True)])
def test_never_tied_and_always_tied(tied, always, every):
    cfg = staged(12, 1.0, tied=tied, adam_every=every, event_every=(6, 12), event_change=12)
    assert T.schedule(cfg).tied.tolist() == [always] * 12


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
    cfg, last, found = small_config(), 0, []  # tables are updated after steps 1, 3, 7
    for step in range(10):
        waiting = step > 0 and not T.schedule(cfg).tables[step - 1]
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


def test_average_rates_by_hand():
    """Of ten steps the last six or five; Adam updates after odd ones, tables after 1, 3 and 7."""
    ema = 1 - (1 - 2 / 7) ** 2  # of two steps at once, and of the last step alone
    want = {3: 1.0, 5: ema, 7: ema, 9: 2 / 7}, {5: 1.0, 9: 1.0}, {7: 1.0}, {5: 1.0, 8: 1.0, 9: 1.0}
    got = T.schedule(small_config()).hyper.average_rates
    for column, rates in zip(got.T, want, strict=True):
        assert column == pytest.approx([rates.get(step, 0) for step in range(10)], rel=1e-12)


@pytest.mark.parametrize("tail", [1, 2, 5, 7, 10, 100])
def test_every_average_begins_with_the_weight_and_stays_within_it(tail):
    rates = T.schedule(small_config(tail=tail, tail_average=tail)).hyper.average_rates
    assert np.all((rates >= 0) & (rates <= 1))
    assert all(column[column > 0][:1].tolist() in ([], [1.0]) for column in rates.T)


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
    freqs, scales = T.yarn(RECORD)[stage]
    assert freqs.dtype == np.float32 and freqs.shape == (2, 128 // 4)
    windows = [128, 384, 640, 640, 768], [384, 896, 1408, 1408, 1664]
    for i, start in enumerate((0.13, 0.085)):
        want, growth = exact_yarn(1024, 32, windows[i][: stage + 1])
        np.testing.assert_allclose(freqs[i], want, rtol=3e-6)  # three roundings to float32 a stage
        assert scales[i] == pytest.approx(start * growth, rel=1e-12)


def test_yarn_slows_what_turned_less_than_once_and_keeps_what_turned_32_times():
    """From 384 to 896 tokens: below 2 pi / 384 they shrink to 3/7, above 64 pi / 384 they stay."""
    before, after = (T.yarn(RECORD)[stage][0][1].astype(np.float64) for stage in (0, 1))
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
    freqs, scales = zip(*T.yarn(cfg), strict=True)
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
    freqs, scales = T.yarn(cfg)[-1]
    want, growth = exact_yarn(base, 8, windows)
    np.testing.assert_allclose(freqs[1], want, rtol=2e-6)
    assert scales.tolist() == pytest.approx([1.0, scale * growth], rel=1e-12)


@pytest.mark.parametrize("cfg", [RECORD, small_config()], ids=lambda cfg: cfg.preset)
def test_hyper_is_a_row_of_the_schedule_in_float32(cfg):
    """With the same shapes at every step, so that none recompiles a program."""
    quarter, most = cfg.head_width // 4, max(len(stage.weights) for stage in cfg.stages)
    shapes = [()] * 7 + [(2, quarter), (2,), (most,), (), (4,)]
    for step in range(cfg.steps):
        hyper = T.hyper_at(cfg, step)
        assert all(type(x) is np.ndarray and x.dtype == np.float32 for x in hyper)
        assert [x.shape for x in hyper] == shapes
        for x, column in zip(hyper, T.schedule(cfg).hyper, strict=True):
            np.testing.assert_array_equal(x, np.float32(column[step]))
