"""What the README names is there, and its commands do what it says."""

import json
import os
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import train_gpt as T

README = (ROOT / "README.md").read_text()
INSTALL = "pip install -r requirements.txt && "


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows in a text, without heads."""
    lines = re.findall(r"^\|(.*)\|$", re.sub(r".*\n\|---.*", "", text), re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


def test_quick_start_is_two_commands():
    commands = re.findall(r"^    (.+)$", section("Quick start"), re.M)
    assert commands == [INSTALL + "python train_gpt.py", INSTALL + "python -m pytest"]


def test_files_that_it_names_exist():
    named = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    named += re.findall(r"(?:data|records|tests)/[\w/]*\w\.\w+", README)
    assert len(named) > 10
    for path in named:
        assert (ROOT / path).exists(), path


def test_names_of_train_gpt_in_the_table_of_ideas_and_in_how_to_read_exist():
    ideas = [row for row in rows(section("The recipe")) if "`" in row[1]]
    assert len(ideas) == 42
    assert all(re.fullmatch(r"(PR )?[\d, ]+", row[2]) for row in ideas)
    names = [name for row in ideas for name in re.findall(r"`([^`]+)`", row[1])]
    names += re.findall(r"`(\w+)`", section("How to read the file"))
    assert {"anvil", "Stage.windows", "schedule", "param_table"} <= set(names)
    for name in names:
        first, _, field = name.partition(".")
        assert hasattr(T, first), name
        assert not field or field in T.__dict__[first].__annotations__, name


def test_settings_that_it_names_are_valid():
    settings = [x for words in re.findall(r"--set ((?:[\w.]+=[^\s`)]+ ?)+)", README)
                for x in words.split()]  # fmt: skip
    settings = [x for x in settings if not re.search("=[A-Z]", x)]  # but those like KEY=VALUE
    assert len(settings) >= 4
    for setting in settings:
        key, _, value = setting.partition("=")
        T.validate(T.override(T.PRESETS["speedrun"], key, value))


def help_of(path: str, monkeypatch, capsys) -> str:
    """What a program says to --help."""
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    monkeypatch.syspath_prepend(str((ROOT / path).parent))  # as python does for a script
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    assert not end.value.code
    return capsys.readouterr().out


def test_options_that_it_names_are_the_command_lines(monkeypatch, capsys):
    """All of the trainer's; of the tools, all but those that they have in common with it."""
    trainers, tools = section("The command line").split("\n| tool")
    known = options_in(help_of("train_gpt.py", monkeypatch, capsys)) - {"--help"}
    assert options_in(trainers) == known
    commands = [row[0].strip("`").split(" ", 1) for row in rows("| tool" + tools)]
    assert len(commands) >= 5
    for path, *arguments in commands:
        has = options_in(help_of(path, monkeypatch, capsys)) - {"--help"}
        named = options_in(" ".join(arguments))
        assert named <= has, path
        assert not path.startswith("records/") or has - known - {"--records"} <= named, path


def test_predicted_seconds_are_those_of_the_stored_prediction():
    stored = json.loads((ROOT / "records/predicted/v6e-8/preflight.json").read_text())
    names = "train_seconds", "train_link_floor_seconds", "train_moved_floor_seconds"
    parts = [stored["predicted"][name] for name in names]
    table = "{3:.0f} s: {0:.1f} s of computing, {1:.1f} s of links, {2:.1f} s of moves"
    shown = "{3:.1f} s = predicted {0:.1f} + links {1:.1f} + moves {2:.1f}"
    for form in (table, shown):
        assert form.format(*parts, sum(parts)) in README


@pytest.mark.slow
def test_first_command(tmp_path):
    """As a new user in an empty clone, but for the number of steps: corpus, training, sample."""
    clone = tmp_path / "clone"
    for file in ("train_gpt.py", "data/shards.py", "data/builtin_corpus.py", "records/sample.py"):
        (clone / file).parent.mkdir(parents=True, exist_ok=True)
        (clone / file).write_bytes((ROOT / file).read_bytes())
    shorter = ["steps=16", "extension=2", "event_change=4", "val_tokens=4096", "momentum_warmup=3"]
    shorter += ["sample_tokens=5", "log_every=2"]
    command = [sys.executable, "train_gpt.py", *(x for s in shorter for x in ("--set", s))]
    # Compiled with less effort: half of the time of this test.
    quick = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + quick}
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in ("making the demo corpus", "step:16/16 val_loss:", "bits per byte", "a sample"):
        assert text in done.stdout, text
    (run_dir,) = (clone / "logs").iterdir()
    lines = (run_dir / "log.txt").read_text().split("=" * 100)[-1]
    losses = [float(x) for x in re.findall(r"val_loss:([\d.]+)", lines)]
    assert abs(losses[0] - np.log(2048)) < 0.05 and losses[-1] < losses[0] - 0.1
