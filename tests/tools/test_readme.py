"""Names, links, commands, settings, figures and pictures in the README and its reference pages."""

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

README, DATA, HARDWARE, IDEAS = (
    (ROOT / name).read_text()
    for name in ("README.md", "data/README.md", "records/HARDWARE.md", "records/IDEAS.md")
)
ALL_PAGES = "\n".join((README, DATA, HARDWARE, IDEAS))


def section(page: str, title: str) -> str:
    """Return the text below a heading of a page, up to the next heading."""
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(page: str, title: str) -> list[list[str]]:
    """Return the cells of the table in a section, without its header."""
    lines = re.findall(r"^\| (.*)\|$", section(page, title), re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines[1:]]


def test_quick_start_installs_runs_and_tests_with_one_command_each():
    clone, *commands = re.findall(r"^    (.+)$", section(README, "Quick start"), re.M)[1:]
    install = "pip install -r requirements.txt && python "
    assert clone.startswith("git clone $REPO ")
    assert commands == [install + "train_gpt.py", install + "-m pytest"]
    assert README.count("OWNER/REPOSITORY") == README.count("OWNER") == 1


def test_the_pages_are_short():
    for page, most in ((README, 180), (DATA, 160), (HARDWARE, 160), (IDEAS, 160)):
        assert page.count("\n") <= most
    assert len(README.split()) <= 1800
    assert len(rows(README, "Results")) <= 6


def test_files_that_the_pages_name_exist():
    named = re.findall(r"(?<![\w./])(?:data|records|tests)/[\w/-]*\w\.\w+", ALL_PAGES)
    assert len(named) > 30 and [path for path in named if not (ROOT / path).exists()] == []


PAGES = (
    "README.md",
    "data/README.md",
    "records/HARDWARE.md",
    "records/IDEAS.md",
    "records/README.md",
)
PAGES += "records/NOTES.md", "records/measured/README.md", ".github/CONTRIBUTING.md"


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


def test_names_of_train_gpt_in_the_pages_exist():
    ideas = rows(IDEAS, "Ideas of the record")
    assert len(ideas) == 36 and all(re.fullmatch(r"(PR )?[\d, ]+", row[2]) for row in ideas)
    names = re.findall(r"`([\w.]+)`", " ".join(row[1] for row in ideas))
    for name in names + re.findall(r"`(\w+)`", section(README, "How to read the file")):
        first, _, field = name.partition(".")
        assert hasattr(T, first) or first in T.PRESETS, name
        assert not field or field in getattr(T, first).__annotations__, name


def test_settings_in_the_pages_are_valid(capsys):
    groups = re.findall(r"--set ((?:[\w.]+=[^\s`)]+\s?)+)", ALL_PAGES)
    groups += re.findall(r"SETTINGS='([^']+)'", README)
    every = dict.fromkeys(" ".join(groups).split())
    settings = [x for x in every if not x.endswith(("=N", "=VALUE"))]
    for_ids = {"encoding=ids", "vocab=1024", "real_tokens=1000", "bos=999"}
    assert for_ids <= {*settings} and len(settings) > 15
    for setting in settings:  # one by one, because some exclude others
        if setting not in for_ids:
            show = ["--show", "--set", setting]
            assert any(T.main([preset, *show]) == 0 for preset in ("speedrun", "tiny")), setting
    assert T.main(["tiny", "--show", "--set", *for_ids]) == 0


def test_commands_with_settings_are_valid(capsys):
    commands = re.findall(r"python train_gpt.py (\w+) --set ([^`\n#]+)", ALL_PAGES)
    assert len(commands) > 2
    for preset, settings in commands:
        assert T.main([preset, "--show", "--set", *settings.split()]) == 0


def test_settings_for_machines_are_valid_and_used_in_launch_files(capsys):
    form = r"^\| ([^|(]+?) (?:\(.*\) )?\| `((?:\w+=[\w,]+ ?)+)` \|"
    machines = re.findall(form, HARDWARE, re.M)
    files = {"TPU v6e-1": ("colab.ipynb", "v6e-1.yaml"), "TPU v5e-8": ("colab.ipynb",)}
    files["one H100"] = ("1xgpu.yaml",)
    assert {*files} <= {machine for machine, _ in machines} and len(machines) > 9
    for machine, settings in machines:
        assert T.main(["speedrun", "--show", "--set", *settings.split()]) == 0
        for name in files.get(machine, ()):
            number = re.search(r"ngram_rows=(\d+)", settings)[1]
            assert re.search(rf"\b{number}\b", (ROOT / "records/launch" / name).read_text())
    assert f"SETTINGS='{dict(machines)['one H100']} " in README


COMMAND = re.compile(r"python ((?:data/|records/)?\w+\.py)((?:[^`\n\\#]|\\\n)*)")
SUBCOMMANDS = "curves", "check", "add", "render", "compare"


def test_options_in_the_pages_exist(monkeypatch, capsys):
    """They are in the tool's --help. The pages name all options of the trainer."""
    named = {}
    for path, words in COMMAND.findall(ALL_PAGES):
        first = words.split()[:1]
        key = path, *(first if first and first[0] in SUBCOMMANDS else ())
        named.setdefault(key, set()).update(re.findall("--[a-z-]+", words))
    assert {"train_gpt.py", "records/bench.py", "records/sample.py"} <= {key[0] for key in named}
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # commands set handlers
    for (path, *subcommand), options in named.items():
        monkeypatch.setattr(sys, "argv", [path, *subcommand, "--help"])
        monkeypatch.syspath_prepend(str((ROOT / path).parent))  # like Python for a script
        with pytest.raises(SystemExit, match="^(0|None)$"):
            runpy.run_path(str(ROOT / path), run_name="__main__")
        known = {*re.findall("--[a-z-]+", capsys.readouterr().out)}
        assert options <= known, path
        if path == "train_gpt.py":
            assert known - {"--help", "--version"} <= {*re.findall("--[a-z-]+", ALL_PAGES)}


def test_every_option_of_the_trainer_has_a_help_text(capsys):
    with pytest.raises(SystemExit):
        T.main(["--help"])
    listed = capsys.readouterr().out.split("\noptions:\n")[1]
    for option in re.split(r"\n  (?=-)", "\n" + listed)[1:]:
        assert re.search(r"(\n {20,}|   )\w", option), option


@pytest.mark.parametrize("name", ["v6e-8", "v6e-8-pointer"])
def test_predicted_seconds_equal_the_stored_prediction(name):
    path = ROOT / f"records/predicted/{name}/preflight.json"
    stored = json.loads(path.read_text())["predicted"]
    parts = [stored[f"train_{x}seconds"] for x in ("", "link_floor_", "moved_floor_")]
    band = stored["low_seconds"], stored["high_seconds"]
    total = "{:.0f} s ({:.0f} to {:.0f})".format(sum(parts), *band)
    shown = "{}: {:.1f} s compute, {:.1f} s communication, {:.1f} s copies"
    assert shown.format(total, *parts) in HARDWARE
    if name == "v6e-8":
        assert f"| TPU v6e-8 | `speedrun` | predicted from compiled programs: {total} |" in README
        assert f"{sum(parts):.0f} s on a v6e-8" in README  # in the status


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
    notes = " ".join((ROOT / "records/NOTES.md").read_text().split())
    found = json.loads((MEASURED / "h200/bench.json").read_text())
    alone = {row["name"]: row["ms"] for row in found["programs"]}
    for row in found["rows"]:
        each = row["steps"], f"{row['ms']:.2f}", f"{row['utilization']:.1%}"
        each += f"{alone[row['name']]:.2f}", f"{row['memory_mib'] / 1024:.1f}"
        assert re.search(rf"\| {row['name']} \|[^|]+\| {' . '.join(map(str, each))} \|", notes)
    seconds = sum(row["steps"] * row["ms"] for row in found["rows"]) / 1e3
    parts = [0.0, 0.0]
    for row in found["programs"]:
        parts["grads" not in row["name"]] += row["steps"] * row["ms"] / 1e3
    assert f"add up to {seconds:.1f}" in notes
    total = 8 * parts[0] + parts[1]
    assert f"({parts[0]:.1f} s) plus the updates ({parts[1]:.1f} s) gives {total:.0f} s" in notes
    pieces = (MEASURED / "h100/pieces.txt").read_text()
    for name in ("grads0", "grads2"):
        assert f"{float(re.search(rf'^{name} +base +([0-9.]+)', pieces, re.M)[1]):.2f}" in notes


def minutes_or_seconds(middle: float, low: float, high: float, unit: str) -> str:
    """Return an estimate with its band, as the pages show it."""
    digits = 1 if unit == "minutes" else 0
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"


def test_times_calculated_from_measured_parts_follow_from_the_files():
    """As in NOTES. The band of computing is the band in preflight.py for a measured GPU."""
    notes = " ".join((ROOT / "records/NOTES.md").read_text().split())
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
        row = re.search(rf"^\| {machine} \|.*$", section(HARDWARE, "Predicted"), re.M)[0]
        assert shown in row, shown
        if machine == "one H200":
            assert f"calculated from measured parts: {shown} |" in section(README, "Results")

    fewest = updates / 8
    most = seconds["other"] / 8 + seconds["tables"]
    computing = (gradients + (fewest + most) / 2) * ratio
    in_notes = re.search(r"([\d.]+) of the ([\d.]+) s stays exposed", notes)
    in_the_open, links = map(float, in_notes.groups())
    middle = computing + (in_the_open + links) / 2
    low = computing / band + in_the_open
    shown = minutes_or_seconds(middle, low, computing * band + 2 * links, "s")
    assert shown in re.search(r"^\| 8xH100 \|.*$", section(HARDWARE, "Predicted"), re.M)[0], shown
    assert f": {shown} |" in section(README, "Results")
    assert f"{middle:.0f} s on 8xH100" in README  # in the status
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
