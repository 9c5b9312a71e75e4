"""records/launch/: colab.ipynb (its form, its commands, a complete run with `tiny`) and the
commands that record.sh runs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import bench
import cached_fineweb10B
import pytest
from conftest import ROOT

import train_gpt as T

PATH = ROOT / "records/launch/colab.ipynb"
BOOK = json.loads(PATH.read_text())
CODE = {cell["id"]: "".join(cell["source"]) for cell in BOOK["cells"] if "outputs" in cell}
# With plain kernels, all commands share their programs, and each is compiled once.
SHORT = "--set kernels=plain steps=8 table_change=4 val_tokens=4096 momentum_warmup=3"
SHORT += " val_every=8 sample_tokens=0"
PARAMETERS = f"""
REPOSITORY, PRESET, PARTS, STAGES, SEEDS, FOR_KERNELS = "", "tiny", 2, [0], [0], ""
CHIPS = {{"2 x cpu": ("{SHORT}", "{SHORT}")}}
PACKAGES = ["-r", "requirements.txt"]
SMOKE = ["tiny", *"{SHORT}".split()]
FIRST_SHARD = ALL_SHARDS = ["data/cached_fineweb10B.py", "--help"]
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A copy of the files that the notebook needs, with two devices and without a network. The
    current folder is in it."""
    kinds = "*.py", "data/*.py", "records/*.py", "records/hardware.json", "requirements.txt"
    kinds += ("records/launch/*.ipynb",)
    for path in (path for kind in kinds for path in ROOT.glob(kind)):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    environment = {"JAX_NUM_CPU_DEVICES": "2", "PIP_NO_INDEX": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path / "records/launch")
    return tmp_path


def test_form():
    """It is readable in a diff, and has no output."""
    assert PATH.read_text() == json.dumps(BOOK, indent=1, ensure_ascii=False) + "\n"
    assert (BOOK["nbformat"], BOOK["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in BOOK["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * 11
    assert len({cell["id"] for cell in BOOK["cells"]}) == len(BOOK["cells"])
    assert {tag for cell in cells for tag in cell["metadata"]} == {"tags"}


@pytest.mark.parametrize("chip", ["1 x TPU v6 lite", "8 x TPU v5 lite", "1 x TPU v9"])
def test_commands_are_accepted(clone, monkeypatch, capsys, chip):
    """The tools only parse them."""
    calls = []
    names = {}
    for cell in ("parameters", "clone", "tools"):
        exec(CODE[cell], names)

    def run(name, *words, stop=True):
        calls.append((name, words))
        return f"3.12.1\n0.12.0.1\n{chip}\n"

    monkeypatch.setattr("subprocess.run", lambda *words, **_: None)
    names |= {"run": run, "download": lambda: calls.append(("download", ("-",)))}
    for cell, source in CODE.items():
        if cell not in ("parameters", "clone", "tools"):
            exec(source, names)
    order = "install chip fits smoke shard bench kernels0 kernels2 download shards run0 download"
    assert [name for name, _ in calls] == order.split()

    timed, fetched = [], []
    monkeypatch.setattr(cached_fineweb10B, "open_shard", fetched.append)
    monkeypatch.setattr(
        bench, "bench", lambda *how: timed.append(how) or {"rows": [{"name": "grads0"}]}
    )
    for _, (script, *words) in calls:
        if script == "train_gpt.py":
            assert T.main([*words, "--show"]) == 0, words
        elif script == "records/bench.py":
            assert bench.main(words) == 0, words
        elif script == "data/cached_fineweb10B.py":
            cached_fineweb10B.main(words)
    assert [(cfg.preset, parts, how.func, how.args) for cfg, parts, how, _ in timed] == [
        ("speedrun", 8, bench.time_stages, ()),
        ("speedrun", 8, bench.compare_kernels, (0,)),
        ("speedrun", 8, bench.compare_kernels, (2,)),
    ]
    assert len(fetched) == 2 + 10, "both times with the validation shard"


def test_a_failed_command_stops_the_notebook_unless_it_may_continue(clone, capfd):
    """The output is shown, stored and archived."""
    names = {}
    for cell in ("parameters", "clone", "tools"):
        exec(CODE[cell], names)
    words = "wrong", "-c", "import sys; sys.exit(print('a reason') or 2)"
    with pytest.raises(RuntimeError, match="wrong ended with status 2: see its output above"):
        names["run"](*words)
    assert names["run"](*words, stop=False) == "a reason\n"
    assert capfd.readouterr().out.count("\na reason\n") == 2
    with tarfile.open(clone / "results.tar.gz") as archive:
        assert archive.extractfile("results/wrong.txt").read() == b"a reason\n"


def test_a_cpu_is_refused():
    names = {"PRESET": "speedrun", "CHIPS": {}, "run": lambda *_: "3.12.1\n2 x cpu\n"}
    names |= {"re": re, "shlex": shlex}
    with pytest.raises(RuntimeError, match="jax sees no TPU: choose one in the settings"):
        exec(CODE["chip"], names)


@pytest.mark.parametrize("uploaded", ["", "mine.zip", "mine"])
def test_without_a_clone_an_uploaded_copy_is_used_or_the_error_has_a_fix(
    clone, monkeypatch, uploaded
):
    elsewhere = clone.parent / f"{clone.name}_elsewhere"
    shutil.copytree(clone, elsewhere / "mine" / "whole")
    shutil.make_archive(str(elsewhere / "mine"), "zip", elsewhere / "mine")
    monkeypatch.chdir(elsewhere)
    names = {"REPOSITORY": uploaded}
    if not uploaded:
        with pytest.raises(RuntimeError, match="write the address of your copy into REPOSITORY"):
            exec(CODE["clone"], names)
    else:
        exec(CODE["clone"], names)
        assert names["clone"] == elsewhere / "speedrun" / "whole" == Path.cwd()


@pytest.mark.parametrize("right", ["mine.zip", "mine", "https://example.org/mine.git"])
def test_wrong_uploads_are_reported_and_do_not_block_right_ones(clone, monkeypatch, right):
    """Not even an upload with the name of the notebook's own folder."""
    elsewhere = clone.parent / f"{clone.name}_elsewhere"
    shutil.copytree(clone, elsewhere / "mine")
    shutil.make_archive(str(elsewhere / "mine"), "zip", elsewhere / "mine")
    (elsewhere / "speedrun").mkdir()
    shutil.copy(clone / "train_gpt.py", elsewhere / "speedrun")
    shutil.make_archive(str(elsewhere / "part"), "zip", elsewhere / "speedrun")
    (elsewhere / "text.zip").write_text("no archive")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("subprocess.run", lambda words, **_: shutil.copytree("mine", words[-1]))
    wrong = {name: f"{name} has not all of train_gpt.py, " for name in ("part.zip", "speedrun")}
    for name in ("good.zip", "folder"):
        wrong[name] = f"there is no folder or .zip {name} in {elsewhere}, and it is no address of"
    wrong["text.zip"] = "REPOSITORY cannot be unpacked: text.zip is not a zip file"
    for name, words in wrong.items():
        with pytest.raises(RuntimeError, match=re.escape(words)):
            exec(CODE["clone"], {"REPOSITORY": name})
        assert [*Path("speedrun").iterdir()] == [Path("speedrun/train_gpt.py")]
    for _ in range(2):  # the second time, nothing is fetched
        exec(CODE["clone"], {"REPOSITORY": right})
        assert Path.cwd() == elsewhere / "speedrun" / "speedrun"
        os.chdir(elsewhere)


@pytest.mark.slow
def test_from_top_to_bottom(clone, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(clone / "programs"))
    book = nbformat.read(PATH, as_version=4)
    nbformat.validate(book)
    next(cell for cell in book.cells if cell.id == "parameters").source = PARAMETERS
    place = {"metadata": {"path": str(clone / "records/launch")}}
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=place).execute()
    with tarfile.open(clone / "results.tar.gz") as archive:
        files = {x.name: archive.extractfile(x).read().decode() for x in archive if x.isfile()}
    logs = [text for name, text in files.items() if name.endswith("/log.txt")]
    assert len(logs) == 2 and all("step:8/8 val_loss:" in log for log in logs)
    assert len([name for name in files if name.endswith("/run.json")]) == 2
    assert not any("checkpoints" in x for x in files) and any(clone.glob("logs/*/checkpoints"))
    steps, kernels = (json.loads(files[f"results/{x}/bench.json"]) for x in ("bench", "kernels0"))
    assert steps["parts"] == 2 and steps["rows"][0]["ms"] > 0
    assert [row["name"] for row in kernels["rows"]][:2] == ["float32", "plain"]
    outputs = "install chip fits smoke shard bench kernels0 shards run0 packages".split()
    assert {f"results/{name}.txt" for name in outputs} <= {*files}
    assert "2 x cpu" in files["results/chip.txt"] and "jax" in files["results/packages.txt"]


# Instead of the trainer: appends its arguments to a file, and writes a finished run.
PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then echo "$DEVICES"; exit; fi
echo "$*" >> calls
run=$(sed -n 's/.*--out \\([^ ]*\\) --seed \\([0-9]*\\).*/\\1\\/x-s\\2-x/p' <<<"$*")
if [ "$2" = --resume ]; then run=$3; fi
[ -z "$run" ] || { mkdir -p "$run"; echo '"finished": true' > "$run/run.json"; }
echo it fits
"""


@pytest.fixture
def machine_for_records(clone):
    """Return a function that runs a launch script with environment variables in a clone."""
    for path in (ROOT / "records/launch").glob("*.sh"):
        shutil.copy(path, clone / "records/launch")
    python = clone / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for name in ("README.md", "tokens.json"):
        (clone / "records" / name).touch()

    def run(*command, **variables):
        env = os.environ | {"PYTHON": str(python)} | variables
        return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)

    return run


def test_a_record_starts_only_missing_runs(clone, machine_for_records):
    """In any shell, with valid commands. It resumes the newest run with a checkpoint, or starts a
    new run. It deletes nothing."""
    settings = {"SETTINGS": "ngram_rows=22675456 steps=1250"}
    others = {"RUNS": "3", "RATE": "2.49", "BY": "A. Stranger", "DEVICES": "1 x NVIDIA H100"}
    logs = clone / "logs/1xgpu-First"
    stopped = logs / "x-s0-cut", logs / "x-s2-a/checkpoints/20", logs / "x-s2-b/checkpoints/3"
    for folder in (*stopped, logs / "x-s2-c/checkpoints/.20", logs / "x-s20-d/checkpoints/9"):
        folder.mkdir(parents=True)
    before = {*logs.rglob("*")}
    (clone / "records/1xgpu").mkdir()
    for shell, first in (("sh", True), ("bash", False)):
        words = [shell, "records/launch/1xgpu.sh"]
        done = machine_for_records(*words, **settings, **others)
        assert (done.returncode, done.stderr) == (0, "")
        shown, tokens, *runs, add, render, check = (clone / "calls").read_text().splitlines()
        (clone / "calls").unlink()
        *new, resumed = runs if first else [""]
        assert [run.split(" --set ")[0].split()[-1] for run in new] == ["0", "1"] * first
        assert resumed == "train_gpt.py --resume logs/1xgpu-First/x-s2-b" * first
        assert tokens == "data/cached_fineweb10B.py 9"
        assert (render, check) == ("records/leaderboard.py render", "records/leaderboard.py check")
        for command in (shown, *(f"{run} --show" for run in new)):
            assert T.main(shlex.split(command)[1:]) == 0
        runs = "logs/1xgpu-First/x-s0-x logs/1xgpu-First/x-s1-x logs/1xgpu-First/x-s2-b"
        assert f"add {runs} --track 1xgpu --name First " in add
        assert add.split(" --what ")[0].endswith("--by A. Stranger --pin --rate 2.49")
    assert before < {*logs.rglob("*")}
    other = machine_for_records(*words, **others, SETTINGS="ngram_rows=32768")
    assert other.returncode == 2 and "ngram_rows=22675456 steps=1250): change REC" in other.stderr
    with tarfile.open(clone / "results.tar.gz") as archive:
        names = {*archive.getnames()}
    assert "records/1xgpu" in names and "logs/1xgpu-First/x-s2-b/run.json" in names
    assert "logs/1xgpu-First/x-s2-b/checkpoints" not in names  # they can have 70 GB
    (clone / "records/1xgpu/2026-01-01_First").mkdir()
    (clone / "records/1xgpu/2026-01-01_First/record.json").touch()
    (clone / "calls").unlink(missing_ok=True)
    assert machine_for_records(*words, **settings, **others).returncode == 0
    assert " add " not in (clone / "calls").read_text()  # the record is already there


@pytest.mark.parametrize("words, devices", [
    (["v6e-8.sh"], "8 x TPU v6 lite"),
    (["8xh100.sh"], "8 x NVIDIA H100 80GB HBM3"),
    (["record.sh", "v6e-1"], "1 x TPU v6 lite"),
    (["record.sh", "cpu"], "1 x cpu"),
])  # fmt: skip
def test_a_record_has_the_devices_of_its_track(clone, machine_for_records, words, devices):
    """Other devices are refused before anything is downloaded."""
    track = words[-1].removesuffix(".sh")
    (clone / f"records/{track}").mkdir()
    command = ["bash", f"records/launch/{words[0]}", *words[1:]]
    if track != "cpu":  # JAX_PLATFORMS=cpu ensures it
        refused = machine_for_records(*command, DEVICES="4 x NVIDIA L4")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert f"error: the track {track} needs " in refused.stderr
        assert not (clone / "calls").exists()
    done = machine_for_records(*command, DEVICES=devices)
    assert (done.returncode, done.stderr) == (0, "")
    calls = (clone / "calls").read_text()
    assert f"--track {track} --name First --by me --pin --what" in calls
    tiny = track == "cpu"
    assert ("cached_fineweb10B" in calls) != tiny and calls.count(" --seed ") == 4
    preset = "tiny --set target=3.95 " if tiny else "speedrun --set "
    assert calls.startswith(f"train_gpt.py {preset}checkpoint_end=never --show\n")


def test_an_unknown_track_is_refused_in_one_line(machine_for_records):
    for words in ([], ["tpu"]):
        refused = machine_for_records("sh", "records/launch/record.sh", *words)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert refused.stderr.startswith("error: unknown track '")
