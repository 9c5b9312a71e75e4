"""records/leaderboard.py: pictures of any runs, how far a run is, and its command line."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import leaderboard as L
import numpy as np
import pytest
from conftest import ROOT
from runs import read_metrics, write_metrics, write_run

import train_gpt as T

TINY = replace(T.PRESETS["tiny"], steps=120, val_every=50)


def config(**changes) -> dict:
    """As run.json has it."""
    return json.loads(json.dumps(asdict(replace(TINY, **changes))))


@pytest.fixture
def run(tmp_path):
    """A run of 120 steps in 10 s, with validations at 0, 50, 100 and the end."""
    return write_run(tmp_path / "logs", 0, config())


@pytest.fixture
def plot(tmp_path, monkeypatch):
    """leaderboard.py plot; the figure that it would have written, with its status."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    def draw(*words):
        drawn = []
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append((self, path)))
            assert L.main(["plot", *map(str, words)]) == 0
        ((figure, path),) = drawn
        assert str(path) == "plot.png"
        return figure

    return draw


def refused(capsys, *words, status=1) -> str:
    """The one line with which the tool refuses."""
    try:
        assert L.main([*map(str, words)]) == status == 1
    except SystemExit as end:
        assert end.code == status == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# ------------------------------------------------------------------------------------------------
# Pictures
# ------------------------------------------------------------------------------------------------


def test_losses_over_time_and_tokens_of_runs_and_records(plot, run, tmp_path):
    """A record is one color; of runs that differ in length and target each has its own."""
    record = tmp_path / "2026-01-01_Record"
    for seed in (0, 1, 2):
        write_run(record, seed, config(), 2.7 + seed / 10, 20.0 + seed)
    (record / "record.json").write_text("{}")
    short = write_run(tmp_path / "logs", 1, config(steps=30, target=3.5), 5.0)
    figure = plot(record, run, short, run)
    assert labels(figure) == [
        "2026-01-01_Record: mean of 3 runs, val loss 2.8000, 21.0 s",
        f"{run.name}: step 120 of 120, val loss 3.9000, 10.0 s",
        f"{short.name}: step 30 of 30, val loss 5.0000, 10.0 s",
    ]
    axes, names = figure.axes[:2], ("train_time_ms", "tokens")
    assert [axis.get_xlabel() for axis in axes] == ["seconds of training", "training tokens"]
    for axis, name in zip(axes, names, strict=True):
        rows = read_metrics(run)
        x = np.array([row[name] for row in rows]) / (1000 if name == "train_time_ms" else 1)
        losses = np.array([row.get("train_loss", np.nan) for row in rows])
        lines = {line.get_label(): line for line in axis.lines}
        dots = lines[labels(figure)[1]]
        np.testing.assert_allclose(dots.get_xdata(), x[np.isnan(losses)])
        np.testing.assert_allclose(dots.get_ydata(), [6.9, 3.958824, 3.929703, 3.9])
        (smooth,) = [one for one in axis.lines[:-2] if len(one.get_xdata()) == 118][3:]
        own = ~np.isnan(losses)
        want = [np.mean([x[own][i : i + 3], losses[own][i : i + 3]], axis=1) for i in range(118)]
        np.testing.assert_allclose(smooth.get_xydata(), want)
        targets = {line.get_ydata()[0] for line in axis.lines[-2:]}
        assert targets == {3.5, TINY.target}
        said = {text.get_text() for text in axis.texts}
        assert said >= {"target 3.5", f"target {TINY.target}", "5.0000"}
        assert "2.8000" in said, "the record's mean"
        low, high = axis.get_ylim()
        assert low < 2.7 and 6 < high


def test_a_run_under_way_is_drawn_without_its_half_line(plot, run):
    rows = read_metrics(run)[:8]
    for loss in (math.nan, math.inf, -1e308, 1e308):
        rows.insert(-1, rows[-1] | {"train_loss": loss})
    write_metrics(run, rows)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "train_l')
    loss, seconds = rows[-1]["train_loss"], rows[-1]["train_time_ms"] / 1000
    want = f"{run.name}: step 7 of 120, train loss {loss:.4f}, {seconds:.1f} s"
    assert labels(plot(run)) == [want]


def test_norms_of_gradients_have_a_panel_where_there_are_any(plot, run):
    old = write_run(run.parent, 1, config())
    for folder, new in ((run, True), (old, False)):
        rows = read_metrics(folder)
        for row in rows:
            even, norm = row["step"] % 2 == 0, 2.0 * row["step"]
            [row.pop(name) for name in list(row) if name.startswith("grad_norm")]
            if new and "train_loss" in row:
                row |= {"grad_norm": norm} | ({"grad_norm_adam": 5.0} if even else {})
        write_metrics(folder, rows)
    axis = plot(run.parent).axes[2]  # the folder of both
    drawn = [line.get_ydata() for line in axis.lines if len(line.get_ydata())]
    np.testing.assert_allclose(drawn[0], 2.0 * np.arange(2, 120))
    np.testing.assert_allclose(drawn[1], np.full(60, 5.0))
    assert len(drawn) == 2 and "gradient" in axis.get_ylabel()
    assert len(plot(old).axes) == 2


def test_names_are_shown_as_they_are(plot, run):
    odd = run.rename(run.with_name(r"_a\{$b$"))
    figure = plot(odd)
    figure.draw_without_rendering()
    assert labels(figure)[0].startswith(r"a\{\$b\$: step 120 of 120")


def test_many_runs_have_different_colors(plot, tmp_path):
    for seed in range(12):
        write_run(tmp_path / "logs", seed, config(steps=6, val_every=0))
    figure = plot(tmp_path / "logs")
    assert len({str(line.get_color()) for line in figure.axes[0].lines[:-1]}) == 12


@pytest.mark.parametrize("suffix", L.FORMATS)
def test_the_file_is_of_the_kind_that_its_name_says(run, tmp_path, capsys, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"a{suffix}"
    assert L.main(["plot", str(run), "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"drawn: {path}\n"
    kinds = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".jpg": b"\xff\xd8"}
    assert path.read_bytes().startswith(kinds[suffix])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("metrics.jsonl", "", "there is no step to draw yet"),
        ("metrics.jsonl", '{"step": 1\n{"step": 2}\n', "not as train_gpt.py writes it"),
        ("metrics.jsonl", "[1]\n", "not as train_gpt.py writes it"),
        ("metrics.jsonl", '{"step": 1, "train_time_ms": 1.0, "tokens": 2}\n', "train_loss"),
        ("metrics.jsonl", '{"step": "1"}\n', "not as train_gpt.py writes it"),
        ("run.json", "{", "not as train_gpt.py writes it"),
        ("run.json", None, "it has no run.json"),
        ("run.json", "{}", "'config' is missing"),
        ("run.json", '{"config": {"steps": 9}}', "'target' is missing"),
        ("run.json", '{"config": {"steps": 9, "target": Infinity}}', "its target is no number"),
    ],
)
def test_a_run_that_cannot_be_drawn_is_refused_in_one_line(run, capsys, name, text, words):
    (run / name).unlink()
    if text is not None:
        (run / name).write_text(text)
    assert words in refused(capsys, "plot", run)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nothing"], "no run is in nothing: name logs/<run id>, or the folder of a record"),
        (["."], "no run is in .:"),
        (["{run}/log.txt"], "no run is in"),
        (["{run}", "--out", "plot"], "--out plot: the name of a plot ends with .png, "),
        (["{run}", "--out", "plot.doc"], "--out plot.doc: the name of a plot ends with .png, "),
        (["{run}", "--out", "no/a.png"], "--out no/a.png: no such folder as no, make it first"),
    ],
)
def test_what_cannot_be_read_or_written_is_refused(
    run, tmp_path, monkeypatch, capsys, words, reason
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert reason in refused(capsys, "plot", *(word.format(run=run) for word in words))


def test_without_matplotlib_it_says_so(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused(capsys, "plot", run)


def test_a_change_of_what_both_pictures_share_makes_those_of_records_stale(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    root = shutil.copytree(ROOT / "records", tmp_path / "records")
    records = L.C.all_valid(root)
    monkeypatch.setattr(L.C, "all_valid", lambda *_: records)  # which takes a second each time
    assert L.main(["--records", str(root), "render"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(L, "draw_losses", lambda *_: None)
    assert ".png is stale" in refused(capsys, "--records", root, "render", "--check")


# ------------------------------------------------------------------------------------------------
# How far a run is
# ------------------------------------------------------------------------------------------------

SLOW = """
import json, os, shutil, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from runs import read_metrics, write_metrics, write_run
out, source = Path(sys.argv[sys.argv.index("--out") + 1]), Path(__file__).read_text()
command = " ".join(["python", *sys.argv])
run = write_run(out / "..", 0, json.loads({config!r}), source=source, command=command)
rows = read_metrics(run)
(out / run.name).mkdir()
shutil.copy(run / "run.json", out / run.name)
write_metrics(out / run.name, rows[:4])
Path({wait!r}).read_text()
(out / run.name / "run.json").unlink(), (out / run.name / "metrics.jsonl").unlink()
(out / run.name).rmdir()
os.rename(run, out / run.name)
"""


def test_a_run_under_way_is_reported_until_it_ends(tmp_path, monkeypatch, capsys):
    """Every EVERY seconds a line on stderr; this one waits until that has been said."""
    wait, words = tmp_path / "wait", {"tests": str(ROOT / "tests"), "config": json.dumps(config())}
    os.mkfifo(wait)
    source = SLOW.format(**words, wait=str(wait)).encode()
    monkeypatch.setattr(L, "EVERY", 0.1)
    said = []

    def hear(line, stream):
        assert stream is sys.stderr
        said.append(line)
        if "step 3 of 120" in line and len([x for x in said if x == line]) == 1:
            threading.Thread(target=wait.write_text, args=("go",)).start()

    monkeypatch.setattr(L, "say", hear)
    args = source, tmp_path / "home", ["tiny"], tmp_path / "out" / "base"
    got = L.train_with("pair 1 of 2, base", *args)
    assert got.loss == 3.9 and {line.split(": ")[0] for line in said} == {"pair 1 of 2, base"}
    assert any("train loss" in line and line.endswith(" s") for line in said)
    assert said[-1] == "pair 1 of 2, base: step 120 of 120, val loss 3.9000, 10.0 s"


def test_a_side_is_a_file_or_has_a_run(run, tmp_path, capsys):
    assert L.side_of(str(run), ["other"]) == L.side_of(str(run.parent), ["other"])
    file = tmp_path / "a file.py"
    file.write_text("pass")
    assert L.side_of(str(file), ["tiny"]) == (b"pass", ["tiny"])
    for words, reason in {
        str(tmp_path / "no.py"): "no.py: No such file",
        str(tmp_path): f"no run is in {tmp_path}",
        " ": "No such file",
        f"{file} 'a": "No closing quotation",
    }.items():
        assert reason in refused(capsys, "compare", words, words)
    (tmp_path / "empty.py").write_text("")
    assert L.main(["compare", *[str(tmp_path / "empty.py")] * 2]) == 1
    assert "base, seed 0: it left 0 runs behind, not one" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--records", ""], "--records: it is empty"),
        (["plot", ""], "RUN: it is empty"),
        (["plot", "a", "--out", ""], "--out: it is empty"),
        (["compare", "a", ""], "CAND.py: it is empty"),
        (["compare", "a", "b", "--out", ""], "--out: it is empty"),
        (["reproduce", "a", "--data", ""], "--data: it is empty"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["check", "more"], "unrecognized arguments: more"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, words, reason):
    assert reason in refused(capsys, *words, status=2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--records", "nothing", "check"], "nothing has no tokens.json"),
        (["reproduce", "nothing"], "nothing is no record: name a folder such as"),
        (["compare", __file__, __file__, "--out", "/dev/null/x"], "Not a directory: '/dev/null/x'"),
    ],
)
def test_paths_that_lead_nowhere_are_refused_by_name(capsys, words, reason):
    assert reason in refused(capsys, *words)


def test_it_needs_no_jax_and_nobody_who_reads():
    """`| head` has gone: the same status, without a traceback, now and when Python ends."""
    words = "import sys, leaderboard; status = leaderboard.main([])"
    command = [sys.executable, "-c", f"{words}; sys.exit(status or 'jax' in sys.modules)"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT / "records"), "JAX_PLATFORMS": "nosuch"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def standings(root):
        raise KeyboardInterrupt

    monkeypatch.setattr(L, "standings", standings)
    assert L.main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"
