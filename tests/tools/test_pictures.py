"""records/pictures.py draws the losses of runs without jax."""

import contextlib
import io
import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pictures
import pytest
from conftest import ROOT

RECORDS = sorted((ROOT / "records/cpu").glob("*/*-tiny-s0-*"))


def draw(folder, *words, says="", run=None):
    """Run the command in `folder`; return the elements, curves and texts of the picture."""
    done = (run or here)(folder, [*map(str, words)])
    if done.returncode:
        return done.returncode, done.stdout, done.stderr
    assert done.stdout == f"wrote {folder / 'curves.svg'}\n"
    assert all(says and line.startswith(says) for line in done.stderr.splitlines())
    assert bool(done.stderr) == bool(says)
    every = [*ElementTree.parse(folder / "curves.svg").iter()]
    thin = [x for x in every if x.get("stroke-opacity")]
    return every, thin, [x.text for x in every if x.tag.endswith("text")]


def here(folder, words) -> subprocess.CompletedProcess:
    """Run the command in this process."""
    out, error, status = io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        with contextlib.redirect_stderr(error):
            try:
                pictures.main(words)
            except SystemExit as end:
                status = end.code
    return subprocess.CompletedProcess(words, status, out.getvalue(), error.getvalue())


def without_jax(folder, words) -> subprocess.CompletedProcess:
    """Run the command in a process that cannot import jax."""
    (folder / "jax.py").write_text("raise ImportError('jax is not needed here')")
    command = [sys.executable, ROOT / "records/pictures.py", *words]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_curves_need_no_jax(tmp_path):
    *_, texts = draw(tmp_path, "curves", *RECORDS, run=without_jax)
    assert texts == draw(tmp_path, "curves", *RECORDS)[-1]
    words = "curves", "nosuch"
    assert draw(tmp_path, *words, run=without_jax) == draw(tmp_path, *words)


@pytest.mark.parametrize("over", ["steps", "tokens", "seconds"])
def test_curves_of_records(tmp_path, over):
    every, thin, texts = draw(tmp_path, "curves", *RECORDS, "--over", over)
    assert texts[-len(RECORDS) :] == [str(run) for run in RECORDS] and over in texts
    assert len({x.get("stroke") for x in thin}) == len(thin) == len(RECORDS) > 2
    losses = sum((run / "metrics.jsonl").read_text().count("val_loss") for run in RECORDS)
    assert sum(x.tag.endswith("circle") for x in every) == losses + len(RECORDS)  # the legend's


def test_where_a_curve_is(tmp_path):
    """NaN and cut lines are skipped. 1,000 losses are drawn as means of ten losses each."""
    for name, losses in {"a": [float("nan"), 4, 3, "x", 2], "b": [3, 2] * 500, "c": [2, 2]}.items():
        rows = [{"step": i, "tokens": 9 * i, "train_time_ms": i, "train_loss": x}
                for i, x in enumerate(losses, 1)]  # fmt: skip
        (tmp_path / name / "<run>").mkdir(parents=True)
        text = "\n".join(map(json.dumps, rows)) + '\n{"step": 6, "train_lo'
        (tmp_path / name / "<run>/metrics.jsonl").write_text(text)
    _, (a,), texts = draw(tmp_path, "curves", "a/<run>/metrics.jsonl")
    assert a.get("points") == "388.0,51.6 552.0,208.0 880.0,364.4"
    assert texts[-1] == "a/<run>/metrics.jsonl"
    _, (a, b), texts = draw(tmp_path, "curves", "a/<run>", "b/<run>")
    height = {x.split(",")[1] for x in b.get("points").split()}
    assert height == {"286.2"} and len(b.get("points").split()) == 100
    assert texts[-2:] == ["a/<run>", "b/<run>"]
    assert draw(tmp_path, "curves", "c/<run>")[1][0].get("points") == "470.0,208.0 880.0,208.0"


def test_errors_are_one_line(tmp_path):
    (tmp_path / "text").write_text('Hello\n[1]\n3\n"train_loss"\nnull\n{"step": 1}\n')
    for words, reason in {
        "--nosuch": "unrecognized arguments: --nosuch",
        "more": "invalid choice: 'more'",
        "curves": "arguments are required: RUN",
        "curves nosuch": "no losses in nosuch: name runs, such as logs/*",
        "curves .": "no losses in .: name runs, such as logs/*",
        "curves text": "no losses in text: name runs",
        "curves text --over walls": "invalid choice: 'walls'",
        "curves text --out x.png": "name a FILE.svg",
        f"curves {RECORDS[0]} --out no/x.svg": "error: no/x.svg: No such file or directory",
    }.items():
        status, said, error = draw(tmp_path, *words.split())
        *skipped, error, end = error.split("\n")
        assert (status, said, end) == (2, "", "") and reason in error
        assert all(x.startswith("skipped, because it has no losses: ") for x in skipped)


def test_paths_without_losses_are_skipped(tmp_path):
    (tmp_path / "empty").mkdir()
    words = "curves", "empty", str(RECORDS[0]), "nosuch"
    _, thin, texts = draw(tmp_path, *words, says="skipped, because it has no losses: ")
    assert len(thin) == 1 and texts[-1] == str(RECORDS[0])
