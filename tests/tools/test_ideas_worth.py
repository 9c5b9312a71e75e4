"""records/ideas.py: its runs, its results, its report."""

import json
from dataclasses import replace

import ideas
import pytest

from train_gpt import IDEAS, PLAIN_HAS, PRESETS, override


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A list of the runs, (variant, seed, --set ...), whose losses depend on the seed."""
    runs = []

    def train(variant, seed, *items):
        runs.append((variant, seed, *items))
        apart = {"mudd": 0.5 + 0.1 * seed, "all": 1.0, "+mudd": 0.75}.get(variant, 0.0)
        return {"val_loss": 3.5 + 0.1 * seed + apart, "train_time_ms": 5000.0, "steps": 100}

    monkeypatch.setattr(ideas, "train", train)
    monkeypatch.setattr(ideas, "KEPT", tmp_path / "ideas.jsonl")
    return runs


def test_it_trains_missing_runs_seed_by_seed(made, capsys):
    lacking = "packing", "ahead", "prefix", "candidates", "pointer"
    has = [x for x in IDEAS if x not in lacking]
    every = ["", *has, "all"]
    ideas.KEPT.write_text(json.dumps({"idea": "xsa", "seed": 1, "loss": 3.0}) + "\n")
    ideas.main(["--seeds", "2", "--alone", "2"])
    assert made[: 2 * len(every) - 1] == [
        (x, seed) for seed in (0, 1) for x in every if (x, seed) != ("xsa", 1)
    ]
    alone = ["+" + x for x in has if x not in PLAIN_HAS]
    assert made[2 * len(every) - 1 :] == [(x, seed) for seed in (0, 1) for x in alone]
    table = capsys.readouterr().out.splitlines()
    # Differences are per seed, so the error does not contain the effect of the seed on both runs.
    assert table[2] == "| mudd | +0.5500 ± 0.0500 | +0.2500 ± 0.0000 |  |"
    assert "| muon | nothing |  |  |" in table
    assert "`tiny` does not have packing, ahead, prefix, candidates, pointer." in table
    assert "`plain`: mean loss 4.5500, 2 seeds, standard deviation 0.0707." in table
    made.clear()
    ideas.main(["--seeds", "2", "--alone", "2", "--times"])
    assert [x for x, *_ in made] == [y for x in every[1:] for y in ("", x)]
    assert "steps=100" in made[0] and "| 1.00 |" in capsys.readouterr().out


def test_one_seed_has_no_error(made, capsys):
    ideas.main(["--seeds", "1"])
    assert "±" not in capsys.readouterr().out


def test_an_idea_alone_leaves_out_all_others_of_the_record(monkeypatch):
    """The ideas that `plain` has stay on."""
    commands = []
    monkeypatch.setattr(ideas.subprocess, "run", lambda command, **_: commands.append(command))
    with pytest.raises(AttributeError):  # there is no result
        ideas.train("+xsa", 3)
    (item,) = (x for x in commands[0] if str(x).startswith("without="))
    assert override(PRESETS["tiny"], [item]) == replace(
        override(PRESETS["tiny"], ["without=all"]),
        without=item.removeprefix("without="),
        layers=override(PRESETS["tiny"], [item]).layers,
    )
    assert any(layer.xsa for layer in override(PRESETS["tiny"], [item]).layers)
