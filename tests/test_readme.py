"""What the README and the docstring name is there, and the commands do what they say."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from programs import QUICK

import train_gpt as T

README = (ROOT / "README.md").read_text()
INSTALL = "pip install -r requirements.txt && "


def test_quick_start_is_two_commands():
    section = README.split("## Quick start")[1].split("##")[0]
    commands = re.findall(r"^    (.+)$", section, re.M)
    assert commands == [INSTALL + "python train_gpt.py", INSTALL + "python -m pytest"]


def test_files_that_it_names_exist():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README) + re.findall(r"data/\w+\.py", README):
        assert (ROOT / path).exists(), path


def test_functions_that_the_table_of_ideas_names_exist():
    """The second column of the table in the docstring of train_gpt.py."""
    source, table = (ROOT / "train_gpt.py").read_text(), T.__doc__.split("record  saved\n")[1]
    head = next(line for line in T.__doc__.splitlines() if line.endswith("record  saved"))
    begin, end = head.index("where"), head.index("record")
    cells = [line[begin:end].strip() for line in table.split("\n\n")[0].splitlines()]
    names = [name.split()[0] for cell in cells for name in cell.split(",") if name.strip()]
    assert len(names) > 20 and {"muon", "Stage.windows", "is_tied"} <= set(names)
    for name in names:
        first, _, field = name.partition(".")
        assert re.search(rf"^(def {first}\(|class {first}:|{first} = )", source, re.M), name
        assert not field or field in dir(getattr(T, first)) + [*getattr(T, first).__annotations__]


def test_options_that_it_names_are_the_command_lines():
    shown = subprocess.run(
        [sys.executable, ROOT / "train_gpt.py", "--help"], capture_output=True, text=True
    ).stdout
    section = README.split("## The command line")[1].split("##")[0]
    named, known = (set(re.findall(r"--[a-z]+", text)) for text in (section, shown))
    assert known - {"--help"} <= named <= known


@pytest.mark.slow
def test_first_command(tmp_path):
    """As a new user in an empty clone, but for the number of steps: corpus, training, sample."""
    clone = tmp_path / "clone"
    (clone / "data").mkdir(parents=True)
    for file in ("train_gpt.py", "data/shards.py", "data/builtin_corpus.py"):
        (clone / file).write_bytes((ROOT / file).read_bytes())
    shorter = ["steps=6", "val_tokens=4096", "momentum_warmup=3", "sample_tokens=5", "log_every=2"]
    command = [sys.executable, "train_gpt.py", *(x for s in shorter for x in ("--set", s))]
    # Compiled with less effort: half of the time of this test.
    env = {**os.environ, "XLA_FLAGS": " ".join(f"--{k}={v}" for k, v in QUICK.items()).lower()}
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in ("making the demo corpus", "step:6/6 val_loss:", "bits per byte", "a sample"):
        assert text in done.stdout, text
    (run_dir,) = (clone / "logs").iterdir()
    lines = (run_dir / "log.txt").read_text().split("=" * 100)[-1]
    losses = [float(x) for x in re.findall(r"val_loss:([\d.]+)", lines)]
    assert abs(losses[0] - np.log(2048)) < 0.05 and losses[-1] < losses[0] - 0.1
