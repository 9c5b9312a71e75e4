"""Schedules of changed settings. test_record92.py checks every step of the record."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import small_config
from programs import stage_at, updates_at

import train_gpt as T

RECORD = T.Config()


def staged(steps: int, *shares: float, **changes) -> T.Config:
    """Return a config with another first window in each stage."""
    stages = tuple(T.Stage(share, 256, 32, 0, (i + 1, 32)) for i, share in enumerate(shares))
    return small_config(**{"steps": steps, "extension": 0, "stages": stages, **changes})


@pytest.mark.parametrize("preset", T.PRESETS)
def test_every_gradient_of_a_preset_is_used_in_one_update(preset):
    """An update has the number of gradients that its program expects."""
    cfg = T.PRESETS[preset]
    table, lengths = T.schedule(cfg), np.diff(cfg.boundaries)
    assert lengths.min() > 0 and lengths.sum() == cfg.steps and len(lengths) == len(cfg.stages)
    tokens = sum(n * stage.batch_tokens for n, stage in zip(lengths, cfg.stages, strict=True))
    assert (
        cfg.tokens_after(cfg.steps) == tokens and cfg.tokens_after(1) == cfg.stages[0].batch_tokens
    )
    last = dict.fromkeys(T.param_specs(cfg), -1)  # parameter -> step of its last update
    for step in range(cfg.steps):
        gradients, *updates = table.programs[step]
        assert gradients[1:] == (table.stage[step], table.candidates[step])
        for update in updates:
            for name in T.updated(cfg, update.kind):
                assert step - last[name] == update.steps
                last[name] = step
    assert cfg.steps - 1 - min(last.values()) < max(cfg.table_every)


def test_shares_of_the_schedule_are_rounded_to_steps():
    """Halves are rounded to even numbers; 0.1 + 0.2 is a little above 0.3."""
    for shares, extension, boundaries in (
        ((0.5, 0.5), 0, (0, 2, 5)),
        ((0.5, 0.5), 0, (0, 4, 7)),
        ((0.1, 0.2, 0.7), 0, (0, 1, 3, 10)),
        ((0.5, 0.5, 0.0), 4, (0, 3, 6, 10)),
    ):
        cfg = staged(boundaries[-1], *shares, extension=extension)
        assert cfg.boundaries == boundaries
        numbers = [stage_at(cfg, step).windows[0] - 1 for step in range(cfg.steps)]
        assert numbers == np.repeat(np.arange(len(shares)), np.diff(boundaries)).tolist()
        assert numbers == T.schedule(cfg).stage.tolist()


def test_lr_falls_over_the_cooldown_to_the_floor():
    for changes, step, scale in (
        ({"cooldown": 0.0}, 1106, 1.73),
        ({"cooldown": 0.0}, 1174, 0.3),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 587, 1.52 / 2),
        ({"cooldown": 1.0, "lr_floor": 0.0}, 1174, 0.0),
        ({"lr_floor": 1.0}, 1193, 1.0),
    ):
        lr = T.schedule(replace(RECORD, **changes)).hyper.lr
        assert lr[step] == pytest.approx(scale, rel=1e-12)
    without_extension = T.schedule(staged(10, 1.0, cooldown=0.5)).hyper.lr
    want = [1.0, 1.0, 0.2 + 0.8 * 0.3]  # step 10 would be at the floor
    assert without_extension[[0, 5, 9]] == pytest.approx(want, rel=1e-12)


def test_momentum_of_a_short_run_is_the_minimum_of_warmup_and_cooldown():
    """4 steps up, 8 steps down, 10 in all: 0, 1/4, 1/2, 3/4 meet 1, 7/8, 6/8, 5/8 at step 5."""
    cfg = staged(10, 1.0, momentum_warmup=4, momentum_cooldown=8)
    want = [0, 1 / 4, 1 / 2, 3 / 4, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    np.testing.assert_allclose((T.schedule(cfg).hyper.momentum - 0.85) / 0.08, want, atol=1e-12)
    assert T.schedule(replace(RECORD, momentum_cooldown=0)).hyper.momentum[-1] == 0.93


def test_weights_of_a_single_target_are_used():
    stage = T.Stage(1.0, 64, 8, 0, (2, 4), loss_weights=(0.5,), loss_weights_end=(0.25,))
    cfg = small_config(steps=4, extension=0, stages=(stage,))
    np.testing.assert_allclose(
        T.schedule(cfg).hyper.loss_weights[:, 0], [0.5, 0.4375, 0.375, 0.3125]
    )


def test_entries_of_a_stage_have_equal_parts_and_loss_weights_change_linearly():
    """With more entries than steps some are unused. Weights may rise, too."""
    entries = {"prefix_weights": (1.0, 2.0, 3.0, 4.0, 5.0), "candidates": (0, 40)}
    stage = T.Stage(1.0, 256, 32, 0, (8, 32), 1.0, (1.0, 0.0), (2.5, 0.75), **entries)
    table = T.schedule(small_config(steps=3, extension=0, stages=(stage,)))
    assert table.hyper.prefix_weight.tolist() == [1.0, 2.0, 4.0]
    assert table.candidates.tolist() == [0, 0, 40]
    np.testing.assert_allclose(
        table.hyper.loss_weights, [[1, 0], [1.5, 0.25], [2, 0.5]], rtol=1e-12
    )


@pytest.mark.parametrize(
    "every, change, updates",
    [
        ((2, 4), 4, {1: 2, 3: 2, 7: 4, 11: 4}),
        ((2, 2), 0, {1: 2, 3: 2, 5: 2, 7: 2, 9: 2, 11: 2}),
        ((1, 3), 3, {0: 1, 1: 1, 2: 1, 5: 3, 8: 3, 11: 3}),
        ((4, 4), 400, {3: 4, 7: 4, 11: 4}),
    ],
)
def test_updates_are_in_the_last_step_of_a_group(every, change, updates):
    """Updates of tables, with the number of steps that each accumulates. Counts start at one."""
    cfg = replace(RECORD, table_every=every, table_change=change, adam_every=every[0])
    table = T.schedule(cfg)
    found = enumerate(updates_at(cfg, "tables")[:12])
    assert {step: update.steps for step, update in found if update} == updates
    adam = [*range(every[0] - 1, 12, every[0])]
    assert [step for step, update in enumerate(updates_at(cfg, "adam")[:12]) if update] == adam
    for step in range(12):
        assert table.hyper.adam_count[step] == 1 + sum(s < step for s in adam)
        assert table.hyper.table_count[step] == 1 + sum(s < step for s in updates)


def test_head_and_embedding_are_untied_after_an_adam_step():
    """The first Adam step at or after the share `tied` of the schedule; 0 means never tied."""
    for every, last in ((1, 587), (2, 587), (3, 587), (5, 589), (8, 591)):
        adam = [*enumerate(updates_at(replace(RECORD, adam_every=every, tied=0.5), "adam"))]
        assert adam[last][1] and all(update.tied == (s <= last) for s, update in adam if update)
    for tied, always in ((0.0, False), (1.0, True)):
        cfg = staged(12, 1.0, tied=tied, adam_every=3, table_every=(6, 12), table_change=12)
        assert [update.tied for update in updates_at(cfg, "adam") if update] == [always] * 4


def test_average_rates():
    """Of ten steps the last six or five; Adam updates after odd ones, tables after 1, 3 and 7."""
    ema = 1 - (1 - 2 / 7) ** 2  # two steps at once; the last step has 2 / 7
    want = {3: 1.0, 5: ema, 7: ema, 9: 2 / 7}, {5: 1.0, 9: 1.0}, {7: 1.0}, {5: 1.0, 8: 1.0, 9: 1.0}
    got = T.schedule(small_config()).hyper.average_rates
    for column, rates in zip(got.T, want, strict=True):
        assert column == pytest.approx([rates.get(step, 0) for step in range(10)], rel=1e-12)
    for tail in (1, 2, 7, 100):  # the first rate is 1, others at most 1
        rates = T.schedule(small_config(tail=tail, tail_average=tail)).hyper.average_rates
        assert np.all((rates >= 0) & (rates <= 1))
        assert all(column[column > 0][:1].tolist() in ([], [1.0]) for column in rates.T)
