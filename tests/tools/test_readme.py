"""Names, links, commands, settings, figures and pictures in the README."""

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import checks as C
import ideas
import leaderboard as L
import numpy as np
import pictures
import preflight
import pytest
from conftest import ROOT

import train_gpt as T

README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table of a section, without its head."""
    lines = re.findall(r"^\| (.*)\|$", section(title), re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines[1:]]


def test_quick_start_is_two_commands():
    commands = re.findall(r"^    (.+)$", section("Quick start"), re.M)
    install = "pip install -r requirements.txt && python "
    assert commands == [install + "train_gpt.py", install + "-m pytest"]


def test_files_that_it_names_exist():
    named = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    named += re.findall(r"(?:data|records|tests)/[\w/]*\w\.\w+", README)
    assert len(named) > 10 and [path for path in named if not (ROOT / path).exists()] == []


PAGES = "README.md", "records/README.md", "records/NOTES.md", ".github/CONTRIBUTING.md"
PAGES += ("records/measured/README.md",)


@pytest.mark.parametrize("path", PAGES)
def test_links_of_a_page_exist(path):
    """They lead to a file of this repository, and to a heading of it in the form of GitHub."""
    page = ROOT / path
    links = re.findall(r"\]\((?!http)([^)#\s]*)(?:#([\w-]+))?\)", page.read_text())
    for file, place in links:
        target = page.parent / file if file else page
        assert target.exists(), file
        if place:
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            known = [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in heads]
            assert place in known, f"{file}#{place}"
    assert len(links) > 2


def test_names_of_train_gpt_in_the_readme_exist():
    ideas = rows("The recipe")
    assert len(ideas) == 36 and all(re.fullmatch(r"(PR )?[\d, ]+", row[2]) for row in ideas)
    names = re.findall(r"`([\w.]+)`", " ".join(row[1] for row in ideas))
    for name in names + re.findall(r"`(\w+)`", section("How to read the file")):
        first, _, field = name.partition(".")
        assert hasattr(T, first) or first in T.PRESETS, name
        assert not field or field in getattr(T, first).__annotations__, name


def test_settings_that_it_names_are_valid(capsys):
    groups = re.findall(r"--set ((?:[\w.]+=[^\s`)]+\s?)+)", README)
    every = dict.fromkeys(" ".join(groups).split())
    settings = [x for x in every if not x.endswith(("=N", "=VALUE"))]
    assert len(settings) == 9 and T.main(["speedrun", "--show", "--set", *settings]) == 0


def test_settings_for_machines_are_valid_and_used_in_launch_files(capsys):
    form = r"^\| ([^|(]+?) (?:\(.*\) )?\| `((?:\w+=[\w,]+ ?)+)` \|"
    machines = re.findall(form, README, re.M)
    files = {"TPU v6e-1": ("colab.ipynb", "v6e-1.yaml"), "TPU v5e-8": ("colab.ipynb",)}
    files["one H100"] = ("1xgpu.yaml",)
    assert {*files} <= {machine for machine, _ in machines} and len(machines) > 9
    for machine, settings in machines:
        assert T.main(["speedrun", "--show", "--set", *settings.split()]) == 0
        for name in files.get(machine, ()):
            number = re.search(r"ngram_rows=(\d+)", settings)[1]
            assert re.search(rf"\b{number}\b", (ROOT / "records/launch" / name).read_text())


def test_options_in_the_readme_exist(monkeypatch, capsys):
    """All options of the trainer are there. Options of a tool may be missing."""
    commands = [row[0].replace("`", "") for row in rows("The command line")]
    tools = [command.split() for command in commands if ".py" in command]
    options = " ".join(command for command in commands if ".py" not in command)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # commands set handlers
    for path, *arguments in [["train_gpt.py", options], *tools]:
        monkeypatch.setattr(sys, "argv", [path, "--help"])
        monkeypatch.syspath_prepend(str((ROOT / path).parent))  # like Python for a script
        with pytest.raises(SystemExit, match="^(0|None)$"):
            runpy.run_path(str(ROOT / path), run_name="__main__")
        help_text = capsys.readouterr().out
        named, known = (set(re.findall("--[a-z-]+", x)) for x in (" ".join(arguments), help_text))
        known -= {"--help", "--version"}
        assert named == known if path == "train_gpt.py" else named <= known, path


@pytest.mark.parametrize("name", ["v6e-8", "v6e-8-pointer"])
def test_predicted_seconds_equal_the_stored_prediction(name):
    path = ROOT / f"records/predicted/{name}/preflight.json"
    stored = json.loads(path.read_text())["predicted"]
    parts = [stored[f"train_{x}seconds"] for x in ("", "link_floor_", "moved_floor_")]
    band = stored["low_seconds"], stored["high_seconds"]
    shown = "{3:.0f} s ({4:.0f} to {5:.0f}): {0:.1f} s of computing, {1:.1f} s of links, {2:.1f} s"
    assert shown.format(*parts, sum(parts), *band) in README


@pytest.mark.parametrize("name", ["run", "model"])
def test_pictures_show_the_preset(name):
    """Otherwise run `python records/pictures.py`."""
    draw = runpy.run_path(str(ROOT / "records/pictures.py"))[f"draw_{name}"]
    assert draw(T.PRESETS["speedrun"]) == (ROOT / f"records/pictures/{name}.svg").read_text()


def test_the_picture_of_ideas_shows_the_stored_losses():
    """Otherwise run `python records/pictures.py`."""
    drawn = (ROOT / "records/pictures/ideas.svg").read_text()
    assert drawn == pictures.draw_ideas(ideas.worth(ideas.rows()))


@pytest.mark.slow
def test_first_command(tmp_path):
    """Like a new user in an empty clone, with fewer steps: corpus, training, sample."""
    for file in ("train_gpt.py", "data/shards.py", "data/builtin_corpus.py", "records/sample.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    shorter = "steps=16 val_every=16 table_change=4 val_tokens=4096 momentum_warmup=3 log_every=2"
    command = [sys.executable, "train_gpt.py", "--set", *shorter.split(), "sample_tokens=5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    texts = "making the demo corpus", "step:16/16 val_loss:", "bits per byte", "a sample"
    assert [text for text in texts if text not in done.stdout] == []
    losses = [float(x) for x in re.findall(r"val_loss:([\d.]+)", done.stdout)]
    assert abs(losses[0] - np.log(2048)) < 0.05 and losses[-1] < losses[0] - 0.1


def test_names_in_where_to_edit_exist():
    text = (ROOT / "tests/README.md").read_text()
    table = text.split("\n## Where to edit\n")[1].split("\n## ")[0]
    names = re.findall(r"`([A-Za-z]\w+)`", table)
    known = {*vars(T), *T.PRESETS, *T.ParamSpec.__annotations__}
    assert len(names) > 30 and {*names} <= known, {*names} - known
    tests = re.findall(r"`((?:recipe|kernels|run|tools)/\w+\.py)`", table)
    assert len(tests) > 20 and all((ROOT / "tests" / path).exists() for path in tests)
    rows = re.findall(r"^\| (.*) \|$", table, re.M)[1:]
    assert len(rows) > 10 and all(".py`" in row.split("|")[-1] for row in rows)


def test_the_readme_of_the_tests_names_all_their_files():
    text = (ROOT / "tests/README.md").read_text()
    named = {*re.findall(r"`(?:\w+/)?(\w+\.py)`", text)}
    assert named == {path.name for path in (ROOT / "tests").glob("*/*.py")}


MEASURED = ROOT / "records/measured"


def test_measured_times_in_the_notes_equal_the_files():
    """Consecutive steps and single programs on an H200, and two programs on an H100."""
    notes = (ROOT / "records/NOTES.md").read_text()
    found = json.loads((MEASURED / "h200/bench.json").read_text())
    alone = {row["name"]: row["ms"] for row in found["programs"]}
    for row in found["rows"]:
        each = row["steps"], f"{row['ms']:.2f}", f"{row['utilization']:.1%}".replace("%", " %")
        each += f"{alone[row['name']]:.2f}", f"{row['memory_mib'] / 1024:.1f}"
        assert re.search(rf"\| {row['name']} \|[^|]+\| {' . '.join(map(str, each))} \|", notes)
    seconds = sum(row["steps"] * row["ms"] for row in found["rows"]) / 1e3
    parts = [0.0, 0.0]
    for row in found["programs"]:
        parts["grads" not in row["name"]] += row["steps"] * row["ms"] / 1e3
    assert f"sum up to {seconds:.1f}" in notes
    assert (
        f"{parts[0]:.1f} s, and the updates,\n{parts[1]:.1f} s, are {8 * parts[0] + parts[1]:.0f} s"
        in notes
    )
    pieces = (MEASURED / "h100/pieces.txt").read_text()
    for name in ("grads0", "grads2"):
        assert f"{float(re.search(rf'^{name} +base +([0-9.]+)', pieces, re.M)[1]):.2f}" in notes


def minutes_or_seconds(middle: float, low: float, high: float, unit: str) -> str:
    """Return an estimate with its band, in the form of the README."""
    digits = 1 if unit == "minutes" else 0
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"


def test_times_calculated_from_measured_parts_follow_from_the_files():
    """As in NOTES. The band of computing is the band in preflight.py for a measured GPU."""
    notes = (ROOT / "records/NOTES.md").read_text()
    found = json.loads((MEASURED / "h200/bench.json").read_text())
    pieces = (MEASURED / "h100/pieces.txt").read_text()
    alone = {row["name"]: row["ms"] for row in found["programs"]}
    seconds = dict.fromkeys(("grads", "tables", "other"), 0.0)
    for row in found["programs"]:
        kind = re.match("grads|tables|", row["name"])[0] or "other"
        seconds[kind] += row["steps"] * row["ms"] / 1e3
    updates = seconds["tables"] + seconds["other"]
    in_a_row = sum(row["steps"] * row["ms"] for row in found["rows"]) / 1e3 - updates
    gradients = (seconds["grads"] + in_a_row) / 2
    h100 = [
        float(re.search(rf"^{name} +base +([0-9.]+)", pieces, re.M)[1]) / alone[name]
        for name in ("grads0", "grads2")
    ]
    ratio = sum(h100) / 2
    band = preflight.GPU_BANDS["measured"]
    for machine, slower in (("one H200", 1.0), ("one H100", ratio)):
        middle = (8 * gradients + updates) * slower / 60
        shown = minutes_or_seconds(middle, middle / band, middle * band, "minutes")
        row = re.search(rf"^\| {machine} \|.*$", section("Predicted"), re.M)[0]
        assert shown in row, shown

    fewest = updates / 8
    most = seconds["other"] / 8 + seconds["tables"]
    computing = (gradients + (fewest + most) / 2) * ratio
    in_notes = re.search(r"([\d.]+) of the ([\d.]+) s stay in the open", notes)
    in_the_open, links = map(float, in_notes.groups())
    middle = computing + (in_the_open + links) / 2
    low = computing / band + in_the_open
    shown = minutes_or_seconds(middle, low, computing * band + 2 * links, "s")
    assert shown in re.search(r"^\| 8xH100 \|.*$", section("Predicted"), re.M)[0], shown
    assert shown in notes


def test_the_form_for_records_lists_all_tracks():
    form = (ROOT / ".github/ISSUE_TEMPLATE/record.yml").read_text()
    listed = re.search(r"label: Track\n +description: (.*)", form)[1]
    tracks = json.loads((ROOT / "records/tracks.json").read_text())
    assert {*re.split(", | or ", listed)} == {*tracks}


def test_the_measured_run_is_complete(tmp_path):
    """After its log gets the source of its commit."""
    run = next(MEASURED.glob("h200/*-speedrun-s0-*"))
    source = L.git("show", "21b3d1f:train_gpt.py")
    if not source:
        pytest.skip("this clone lacks the history")
    copy = Path(shutil.copytree(run, tmp_path / run.name))
    log = source + b"\n" + b"=" * 100 + b"\n" + (run / "log.txt").read_bytes()
    (copy / "log.txt").write_bytes(log)
    read = C.read_run(copy)
    assert (read.hardware, read.loss, read.seconds) == ("1 x NVIDIA H200", 4.543204, 53.869832)
