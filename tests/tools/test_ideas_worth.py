"""records/ideas.py: which runs it makes, what it keeps, what it says."""

import json

import ideas
import pytest

from train_gpt import IDEAS, UserError


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The runs that it makes, (idea, seed, --set ...); without an idea the loss is 0.5 more."""
    runs = []

    def train(idea, seed, *items):
        runs.append((idea, seed, *items))
        loss = 3.5 + 0.1 * seed + 0.5 * (idea == "mudd")
        return {"val_loss": loss, "train_time_ms": 5000.0, "steps": 100}

    monkeypatch.setattr(ideas, "train", train)
    monkeypatch.setattr(ideas, "KEPT", tmp_path / "ideas.jsonl")
    return runs


def test_it_trains_what_is_not_known_yet_seed_by_seed(made, capsys):
    every = ["", *IDEAS, "all"]
    ideas.KEPT.write_text(json.dumps({"idea": "xsa", "seed": 1, "loss": 3.0}) + "\n")
    ideas.main(["--seeds", "2"])
    assert made == [(x, seed) for seed in (0, 1) for x in every if (x, seed) != ("xsa", 1)]
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| without | loss | more than with all | runs | ms a step |"
    assert "| mudd | 4.0500 ± 0.0500 | +0.5000 ± 0.0707 | 2 |  |" in table
    assert "| (nothing) | 3.5500 ± 0.0500 |  | 2 |  |" in table and len(table) == 2 + len(every)
    made.clear()
    ideas.main(["--seeds", "2", "--times"])
    assert [row[:2] for row in made] == [(x, 0) for x in every] and "steps=100" in made[0]
    assert "| 2 | 50.0 (1.00) |" in capsys.readouterr().out


def test_one_seed_says_nothing(made):
    with pytest.raises(UserError, match="train two seeds at least"):
        ideas.main(["--seeds", "1"])
