"""records/leaderboard.py: refusals and their reasons, derived results, all steps of a submission.

runs.py writes most of these runs in the trainer's format; only the last test trains. The records of
this repository, which older trainers wrote, are checked as well.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import checks as C
import leaderboard as L
import numpy as np
import pytest
from conftest import ROOT, write_shard
from runs import BUILTIN, BUILTIN_NAME, FINEWEB, RULE, SOURCE, head, shard, write_run

import train_gpt as T


def as_json(cfg: T.Config) -> dict:
    """Return the config as in run.json."""
    return json.loads(json.dumps(asdict(cfg)))


BETTER = SOURCE + "better = True\n"
SOURCE_HASH = sha256(SOURCE.encode()).hexdigest()
TARGET = C.TRACKS["cpu"].target
TINY = replace(T.PRESETS["tiny"], steps=12, val_every=5, target=TARGET)
SPEEDRUN = replace(T.PRESETS["speedrun"], steps=20, extension=2)
COUNTING = replace(
    SPEEDRUN, stages=tuple(replace(stage, batch_tokens=524_288) for stage in SPEEDRUN.stages)
)
GOOD = round(TARGET - 0.05, 6)  # a loss that is low enough, like the losses around it
V6E = {"kind": "TPU v6 lite", "platform": "tpu", "count": 8, "processes": 1}
H100 = {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu", "count": 8, "processes": 1}
V5E = V6E | {"kind": "TPU v5 lite"}
A100 = H100 | {"kind": "NVIDIA A100-SXM4-80GB", "count": 1}
RTX = H100 | {"kind": "NVIDIA GeForce RTX 4090", "count": 1}


def runs_of(folder: Path, losses=(), seconds=10.0, spread=0.01, cfg=TINY, **changes):
    """Write runs with seeds 0, 1, ... and good losses; their times differ by `spread`."""
    losses = losses or [GOOD + 0.005 * seed for seed in range(4)]
    return [
        write_run(folder, seed, as_json(cfg), loss, seconds + spread * seed, **changes)
        for seed, loss in enumerate(losses)
    ]


def tool(root: Path, *words) -> int:
    return L.main(["--records", str(root), *map(str, words)])


def add(root: Path, runs, name: str, track="cpu", *words) -> int:
    about = ["--track", track, "--name", name, "--by", "A. Stranger", "--what", f"is {name}"]
    return tool(root, "add", *runs, *about, *words)


def refusal(root: Path, capsys, *words) -> str:
    """Return the line of a refusal, which must be the only line on stderr."""
    capsys.readouterr()
    assert tool(root, *(words or ["check"])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ")
    return line


def refusal_at_end(root: Path, capsys, *words) -> str:
    """Return the line of a refusal after other output."""
    capsys.readouterr()
    assert tool(root, *words) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("refused: ")
    return line


def refused_to_add(root: Path, capsys, runs, track="cpu", *words) -> str:
    """Return the line of a refusal of `add`, which must write nothing."""
    before = sorted(root.rglob("*"))
    about = ["--track", track, "--name", "X", "--by", "me", "--what", "it", *words]
    line = refusal(root, capsys, "add", *runs, *about)
    assert sorted(root.rglob("*")) == before
    return line


def empty(root: Path) -> Path:
    """Make a folder of records with the real pages, but without records."""
    root.mkdir(exist_ok=True)
    shutil.copy(ROOT / "records/README.md", root)
    shutil.copytree(ROOT / "records/predicted", root / "predicted")
    (root / "tokens.json").write_text(json.dumps({BUILTIN_NAME: BUILTIN}))
    return root


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A folder of records with a first record on `cpu` and a faster one."""
    base = tmp_path_factory.mktemp("original")
    root = empty(base / "records")
    assert add(root, runs_of(base / "a"), "First") == 0
    assert add(root, runs_of(base / "b", seconds=8.0, source=BETTER, day=2), "Second") == 0
    assert tool(root, "check") == 0
    return root


@pytest.fixture
def records(original, tmp_path) -> Path:
    """A copy of `original` that a test can change."""
    return Path(shutil.copytree(original, tmp_path / "records"))


def edit_json(path: Path, **changes):
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


# ---- Forged records are refused for the right reason. `run` is the run with seed 0.


def in_log(record: Path, run: Path, old: str, new: str):
    """Replace text in the log of the run."""
    text = (run / "log.txt").read_text()
    assert old in text
    (run / "log.txt").write_text(text.replace(old, new, 1))


def in_metrics(record: Path, run: Path, at=-1, **changes):
    """Change line `at` of metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[at] = json.dumps(json.loads(lines[at]) | changes)
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def in_json(record: Path, run: Path, **changes):
    """Change run.json only."""
    edit_json(run / "run.json", **changes)


def in_one(record: Path, run: Path, **changes):
    """Change run.json and the same lines of the log."""
    for name, new in changes.items():
        old = json.loads((run / "run.json").read_text())[name]
        lines = (f"\n{name}: {x if name == 'command' else json.dumps(x)}\n" for x in (old, new))
        in_log(record, run, *lines)
    edit_json(run / "run.json", **changes)


def in_all(record: Path, run: Path, **changes):
    """Change fields of the config of all runs, also in the logs."""
    for run in record.glob("*-s*-*"):
        config = json.loads((run / "run.json").read_text())["config"]
        in_one(record, run, config=config | changes)


def in_result(record: Path, run: Path, **changes):
    """Change the results in record.json."""
    result = json.loads((record / "record.json").read_text())["result"]
    edit_json(record / "record.json", result=result | changes)


def resume(record: Path, run: Path, before="", after="", said=True):
    """Make the run look resumed after step 5; `before` and `after` are in its new head."""
    about = head(json.loads((run / "run.json").read_text()))
    new = f"{RULE}\nresumed\n{before}{about}\n{after}{RULE}\n"
    in_log(record, run, "step:6/", f"{new}step:6/")
    edit_json(run / "run.json", resumed=said)


def set_clock_back(record: Path, run: Path):
    """Make a resumed run lose 3 seconds of its time from step 8 on."""
    resume(record, run)
    for at, line in enumerate((run / "metrics.jsonl").read_text().splitlines()):
        row = json.loads(line)
        if row["step"] > 7:
            old = f"step:{row['step']}/12 train_time:{row['train_time_ms']:.0f}ms"
            new = f"step:{row['step']}/12 train_time:{row['train_time_ms'] - 3000:.0f}ms"
            in_metrics(record, run, at, train_time_ms=row["train_time_ms"] - 3000)
            if "train_loss" in row:
                in_log(record, run, old, new)


def as_older(record: Path):
    """Move the source into each log, as in records from before source.py."""
    source = (record / "source.py").read_bytes()
    for log in record.glob("*/log.txt"):
        _, rule, text = log.read_bytes().partition(RULE.encode())
        log.write_bytes(source + b"\n" + rule + text)
    (record / "source.py").unlink()


def source_in_log(record: Path, run: Path, old="a trainer", new="a cheater"):
    """Change the source of the run in an older record."""
    as_older(record)
    in_log(record, run, old, new)


def other_source(record: Path, run: Path, old="a trainer", new="a cheater"):
    """Change the source of the run, and its hash."""
    source_in_log(record, run, old, new)
    source = (run / "log.txt").read_text().split(f"\n{RULE}\n")[0]
    edit_json(run / "run.json", source_sha256=sha256(source.encode()).hexdigest())


def in_source(record: Path, run: Path, hashed=False):
    """Change source.py, and also its hash in the log if `hashed`."""
    before = (record / "source.py").read_text()
    after = before.replace("a trainer", "a cheater")
    (record / "source.py").write_text(after)
    if hashed:
        in_log(record, run, *(sha256(x.encode()).hexdigest() for x in (before, after)))


def two_sources(record: Path, run: Path):
    """Restore source.py after the source has been moved into the logs."""
    source = (record / "source.py").read_bytes()
    as_older(record)
    (record / "source.py").write_bytes(source)


def seed_without_effect(record: Path, run: Path):
    """Give seed 1 the training losses of seed 0."""
    (other,) = record.glob("*-s1-*")
    for at, line in enumerate((run / "metrics.jsonl").read_text().splitlines()):
        if "train_loss" in (row := json.loads(line)):
            in_metrics(record, other, at, train_loss=row["train_loss"])


def began(record: Path, run: Path, stamp: str):
    """Give the run another date and time."""
    run_id = stamp + run.name[15:]
    edit_json(run / "run.json", run_id=run_id)
    run.rename(run.with_name(run_id))


def a_pipe(record: Path, run: Path):
    """Replace the log by a pipe, which would block a reader."""
    (run / "log.txt").unlink()
    os.mkfifo(run / "log.txt")


def run_as_record(record: Path, run: Path):
    """Copy the run to the place of a record."""
    shutil.copytree(run, record.with_name(run.name))


def moved(record: Path, run: Path, to: str):
    """Move the record to another place in the folder of records."""
    (record.parents[1] / to).parent.mkdir(exist_ok=True)
    record.rename(record.parents[1] / to)


EASY = BUILTIN | {"builtin_train_000001.bin": shard("easier", 4_000_000)}
SMALL = [stage | {"batch_tokens": 512} for stage in as_json(TINY)["stages"]]
RATE = as_json(replace(TINY, lr_anvil=0.5))
HOST = {"cpu": "B", "cores": 64, "platform": "Linux"}
ELSE = "it was resumed with another source or other settings"
FORGED = {
    "a doctored loss in the log": (in_log, {"old": "val_loss:3.9000", "new": "val_loss:2.9000"},
        "step 12: loss 2.9000 in log.txt, 3.9 in metrics.jsonl"),
    "a doctored loss in the metrics": (in_metrics, {"val_loss": 2.9},
        "step 12: loss 3.9000 in log.txt, 2.9 in metrics.jsonl"),
    "a doctored loss in run.json": (in_json, {"val_loss": 2.9},
        "val_loss in run.json, in metrics.jsonl: 2.9, not 3.9"),
    "a doctored loss in record.json": (in_result, {"mean_loss": 2.9},
        "mean_loss in record.json: 2.9, not 3.9"),
    "a doctored p-value": (in_result, {"p_value": 1e-9}, "p_value in record.json: 1e-09, not 0.0"),
    "a doctored time": (in_metrics, {"train_time_ms": 9000.0},
        "step 12: 10000 ms in log.txt, 9000.0 in metrics.jsonl"),
    "no number for a loss": (in_metrics, {"val_loss": float("nan")}, "nan in metrics.jsonl"),
    "no training loss": (in_metrics, {"at": 3, "train_loss": float("nan")}, "nan is not a loss"),
    "a changed source in a log": (source_in_log, {}, "sha256 in run.json, of the source: "),
    "a changed source": (in_source, {}, "log.txt refers to another source.py: source: "),
    "a changed source with its hash": (in_source, {"hashed": True},
        "sha256 in run.json, of the source: "),
    "another hash in run.json": (in_json, {"source_sha256": "0" * 64},
        f"sha256 in run.json, of the source: {'0' * 64}, not {SOURCE_HASH}"),
    "another hash in a log": (in_log, {"old": SOURCE_HASH, "new": "0" * 64},
        f"source: ../source.py, sha256 {'0' * 64}, not source: ../source.py, sha256 {SOURCE_HASH}"),
    "a hash and a source in one log": (in_log, {"old": RULE, "new": f"{SOURCE}\n{RULE}"},
        "log.txt has a source although it refers to source.py"),
    "sources in the logs and in source.py": (two_sources, {},
        "log.txt has a source although the record has source.py (add it again)"),
    "no source": (lambda record, _: (record / "source.py").unlink(), {},
        "the source that log.txt refers to: source.py: no such file"),
    "a source in the folder above": (in_log, {"old": "../source.py", "new": "../../source.py"},
        "sha256 in run.json, of the source: "),
    "another source in one run": (other_source, {}, "source_sha256 of "),
    "a left-out seed": (lambda record, run: shutil.rmtree(run), {},
        "seeds (choosing seeds means choosing losses): [1, 2, 3], not [0, 1, 2]"),
    "one run under two seeds": (seed_without_effect, {}, "have the same training losses"),
    "a shortened validation": (in_all, {"val_tokens": 4096}, "tokens: 4096, not 98304"),
    "an easier target": (in_all, {"target": 4.5}, "target (see --set target=): 4.5, not 3.95"),
    "other training tokens": (in_one, {"data": EASY}, "is not in tokens.json"),
    "a left-out step": (in_log, {"old": "step:7/", "new": "7/"}, "[15, 16], not [16, 16]"),
    "a run that was cut short": (in_all, {"steps": 14}, "[16, 16], not [17, 17]"),
    "a run that did not finish": (in_json, {"finished": False}, "finished in run.json: False"),
    "smaller batches in the config": (in_all, {"stages": SMALL}, "metrics.jsonl: (1, 1024), not"),
    "a clock that was set back": (set_clock_back, {}, "step 8: the clock did not advance"),
    "resumed in silence": (resume, {"said": False}, "resumed in run.json, in log.txt: False"),
    "resumed with another source": (resume, {"before": f"source: {'0' * 64}\n"}, ELSE),
    "resumed with other settings": (resume, {"after": 'config: {"log_every": 7}\n'}, ELSE),
    "a setting that one config has": (in_one, {"config": RATE}, "config of "),
    "another config in run.json": (in_json, {"config": RATE}, "config in run.json, in log.txt"),
    "one run on another machine": (in_one, {"host": HOST}, "host of "),
    "flags in one run": (in_one, {"environment": {"XLA_FLAGS": "--fast"}}, "environment of "),
    "other versions in run.json": (in_json, {"versions": {"jax": "9"}}, "of run.json: jax 9"),
    "half a file": (lambda _, run: (run / "run.json").write_text('{"run'), {}, "run.json: cannot"),
    "a log without its head": (in_log, {"old": "command: ", "new": "com"}, "not have the command"),
    "a log without a config": (in_log, {"old": "config: ", "new": "co"}, "config in run.json, in"),
    "a missing file": (lambda _, run: (run / "metrics.jsonl").unlink(), {}, "metrics.jsonl: no s"),
    "runs at the same time": (began, {"stamp": "20260101-010009"},
        "began while 20260101-010000-tiny-s1-"),
    "a date that is none": (began, {"stamp": "20261399-000000"},
        "the date and time in its name: cannot be read"),
    "a pipe": (a_pipe, {}, "log.txt: no such file"),
    "an option that could be two": (in_one, {"command": "python train_gpt.py tiny --pro 2"},
        "cannot be read (ValueError: ambiguous option"),
    "a record a folder deeper": (moved, {"to": "cpu/x/2026-01-01_First"},
        "cpu/x/2026-01-01_First: records are in TRACK/DATE_NAME"),
    "a record without a track": (moved, {"to": "2026-01-01_First"},
        "2026-01-01_First: records are in TRACK/DATE_NAME"),
    "a run in the place of a record": (run_as_record, {},
        ": record.json: no such file"),
    "a record without anything": (lambda record, _: (record.parent / "2026-01-03_X").mkdir(), {},
        "cpu/2026-01-03_X: record.json: no such file"),
    "a record on no track": (lambda record, _: record.parent.rename(record.parents[1] / "moon"), {},
        "it is not in the folder of its track, cpu"),
}  # fmt: skip


@pytest.mark.parametrize("way", FORGED)
def test_forged_records_are_refused(records, capsys, way):
    tamper, changes, reason = FORGED[way]
    record = next((records / "cpu").glob("*_First"))
    tamper(record, next(record.glob("*-s0-*")), **changes)
    assert reason in refusal(records, capsys)


@pytest.mark.parametrize("content", ["[]", "null", '"x"'])
@pytest.mark.parametrize(
    "name", ["cpu/*_First/record.json", "cpu/*_First/*/run.json", "tokens.json"]
)
def test_a_file_that_is_not_a_json_object_is_named(records, capsys, name, content):
    path = next(records.glob(name))
    path.write_text(content)
    assert f"{path.name}: is not a JSON object" in refusal(records, capsys)


def test_no_config_makes_a_plan_that_is_longer_than_the_log(records, capsys):
    run = next((records / "cpu").glob("*_First/*-s0-*"))
    config = json.loads((run / "run.json").read_text())["config"]
    (stage, *_) = config["stages"]
    longer = "[16, 16], not [17, 17]"
    cases = [
        ({"steps": 2_000_000}, longer),
        ({"steps": 2_000_000, "val_every": 1}, longer),
        ({"stages": [stage | {"share": 1e999}] * 2}, "cannot be read (OverflowError"),
        ({"stages": [stage | {"batch_tokens": "9" * 10_000}]}, "cannot be read (TypeError"),
        ({"stages": []}, "cannot be read (IndexError"),
        ({"steps": -1}, "[16, 16], not [1, 1]"),
    ]
    cases += [({"steps": x}, "cannot be read (TypeError") for x in ("12", None, [12], {})]
    tracemalloc.start()
    for changes, reason in cases:
        in_one(None, run, config=config | changes)
        assert reason in refusal(records, capsys)
        in_one(None, run, config=config)
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()


def test_parallel_runs_are_refused(records, tmp_path, capsys):
    """Their names have the start in whole seconds; here each run trains for 10 s."""
    for seconds, resumed, reason in ((9, False, "began while "), (9, True, ""), (10, False, "")):
        runs = runs_of(tmp_path / f"{seconds}{resumed}", day=3)
        if resumed:  # the other run may have been made in between
            resume(None, runs[0])
        began(None, runs[1], f"20260103-0000{seconds:02}")
        runs = [*runs[0].parent.iterdir()]
        assert len(runs) == 4
        line = refused_to_add(records, capsys, runs)
        assert (reason or "not faster than the standing record") in line


def test_losses_and_times_that_are_not_good_enough(records, tmp_path, capsys):
    near = [TARGET + x for x in (-0.01, -0.1, 0, 0)]
    for i, (changes, reason) in enumerate(
        (
            ({"losses": [TARGET + 0.01] * 4}, f"mean loss {TARGET + 0.01:.4f} is above the target"),
            (
                {"losses": near},
                rf"p = 0\.\d+ that the mean loss is not below {TARGET}, not < 0\.01",
            ),
            ({"losses": [GOOD]}, "one run has no p-value"),
            ({"seconds": 0.0}, "step 1: the clock did not advance"),
            ({"seconds": 8.5}, r"not faster than the standing record: 8\.515 against 8\.015"),
            (
                {"seconds": 6.5, "spread": 0.9},
                r"beyond chance: 7\.85 against 8\.\d+, p = 0\.\d+ \(W",
            ),
            ({"seconds": 5.0, "source": BETTER}, "are the same as in the standing record"),
            ({"seconds": 5.0, "day": 1}, "`beats` in record.json"),
        )
    ):
        runs = runs_of(tmp_path / str(i), **({"day": 3, "seconds": 5.0} | changes))
        assert re.search(reason, refused_to_add(records, capsys, runs))
    flags = {"environment": {"XLA_FLAGS": "--fast"}, "source": BETTER}
    assert add(records, runs_of(tmp_path / "flags", day=3, seconds=5.0, **flags), "Flags") == 0
    again = runs_of(tmp_path / "again", day=3, seconds=4.0)
    about = ["--track", "cpu", "--name", "Flags", "--by", "me", "--what", "it"]
    assert "File exists" in refusal(records, capsys, "add", *again, *about)
    edit_json(records / "cpu/2026-01-03_Flags/record.json", beats="2026-01-01_First")
    assert "2026-01-01_First, not 2026-01-02_Second" in refusal(records, capsys)


def test_variables_that_change_no_result_are_ignored(records, tmp_path, capsys):
    """Variables of Python, and a variable that jax sets when it is imported."""
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "TPU_SKIP_MDS_QUERY": "1"}
    same = {"day": 3, "seconds": 5.0}
    runs = runs_of(tmp_path / "a", environment=environment, source=BETTER, **same)
    assert "are the same as" in refused_to_add(records, capsys, runs)
    runs = runs_of(tmp_path / "b", source=BETTER + "#\n", **same)
    in_one(None, runs[1], environment=environment)
    assert add(records, runs, "Mixed") == 0 and tool(records, "check") == 0


@pytest.mark.parametrize(
    "count,deviation,reason",
    [
        (2, 1, "number of runs: 2, not 4, 8, 16: the number is fixed so that nobody adds"),
        (3, 1, "number of runs: 3, not"),
        (5, 1, "number of runs: 5, not"),
        (4, 5.0, ""),  # p = 0.004, from Student's t distribution with 3 degrees of freedom
        (4, 3.0, "not < 0.01: more seeds"),  # 0.013
        (8, 3.4, "not < 0.005: more seeds"),  # 0.006
        (8, 3.8, ""),  # 0.003
        (16, 3.1, "not < 0.0025: more seeds"),  # 0.004
        (16, 3.4, ""),  # 0.002
    ],
)
def test_a_record_has_one_of_three_numbers_of_runs(tmp_path, capsys, count, deviation, reason):
    """Each number has its own limit of p, so more runs do not help to pass a test."""
    root = empty(tmp_path / "records")
    losses = np.linspace(-1, 1, count) * 0.01
    losses += TARGET - deviation * np.std(losses, ddof=1) / np.sqrt(count)
    runs = runs_of(tmp_path / "runs", losses.tolist())
    if reason:
        assert reason in refused_to_add(root, capsys, runs)
    else:
        assert add(root, runs, "Right") == 0 and tool(root, "check") == 0


def test_only_older_records_have_other_numbers_of_runs(tmp_path, capsys):
    root = empty(tmp_path / "records")
    assert add(root, runs_of(tmp_path / "runs"), "First") == 0
    (record,) = (root / "cpu").iterdir()
    shutil.rmtree(next(record.glob("*-s3-*")))
    assert "number of runs: 3" in refusal(root, capsys)
    assert len(C.OLDER) == 5, "no record may be added"
    assert all((ROOT / "records" / name / "record.json").exists() for name in C.OLDER)


def test_an_older_record_cannot_be_altered(tmp_path, capsys):
    """Because it is exempt from newer rules."""
    name = "cpu/2026-11-24_FourLayers"
    copy = shutil.copytree(ROOT / "records" / name, tmp_path / name)
    shutil.copy(ROOT / "records/tokens.json", tmp_path)
    (copy / "README.md").write_text("Prose may be corrected.")
    assert C.check_record(copy, C.read_json(tmp_path / "tokens.json"))
    edit_json(copy / "record.json", what="Four layers.")
    assert f"{name}: its files were changed" in refusal(tmp_path, capsys)


@pytest.mark.parametrize(
    "text,reason",
    [
        ("x = 1\r", "line 4 of its source has U+000D: only printable ASCII, tabs and line ends"),
        ("x = 1\f", "line 4 of its source has U+000C"),
        ("\x1b[8m", "line 4 of its source has U+001B"),
        ("s = 'caf\u00e9'", "line 4 of its source has U+00E9"),
        ("a\u2028b", "line 4 of its source has U+2028"),
        ("\tx = 1  # coding: rot13", ""),  # not in the first two lines
    ],
)
def test_a_source_that_is_not_printable_ascii_is_refused(records, tmp_path, capsys, text, reason):
    source = f"{SOURCE}{text}\n"
    runs = []
    for seed in range(4):
        run = write_run(tmp_path, seed, as_json(TINY), GOOD + seed / 1000, 5 + seed / 100, day=3)
        log = (run / "log.txt").read_text().removeprefix(SOURCE)
        (run / "log.txt").write_bytes((source + log).encode())
        edit_json(run / "run.json", source_sha256=sha256(source.encode()).hexdigest())
        runs.append(run)
    if reason:
        assert reason in refused_to_add(records, capsys, runs)
    else:
        assert add(records, runs, "Plain") == 0


def test_a_source_in_another_encoding_is_refused(records, tmp_path, capsys):
    cookies = {"utf-7": "# coding: utf-7", "rot13": "#!/x\n# vim: fileencoding=rot13"}
    for name, cookie in cookies.items():
        runs = runs_of(tmp_path / name, seconds=5.0, day=3, source=f"{cookie}\n{SOURCE}")
        said = refused_to_add(records, capsys, runs)
        assert f"that its source declares: {name}, not utf-8" in said
    runs = runs_of(tmp_path / "c", seconds=5.0, day=3, source=f"# -*- coding: UTF-8 -*-\n{SOURCE}")
    assert add(records, runs, "Plain") == 0


def test_a_run_from_the_future_is_refused(records, tmp_path, capsys, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls):
            return cls(2026, 1, 5)

    monkeypatch.setattr(C, "datetime", Clock)
    runs = runs_of(tmp_path / "a", seconds=5.0, source=BETTER + "#\n", day=7)
    assert "it began in the future: check the clock" in refused_to_add(records, capsys, runs)
    runs = runs_of(tmp_path / "b", seconds=5.0, source=BETTER + "#\n", day=6)
    assert add(records, runs, "Tomorrow") == 0


def test_names_of_records_and_machines_and_hashes_are_plain(records, tmp_path, capsys):
    host = {"cpu": "A CPU\u200b", "cores": 2, "platform": "Linux"}
    said = refused_to_add(records, capsys, runs_of(tmp_path / "a", host=host))
    assert "the name of its machine, A CPU<U+200B>, 2 cores, is not printable ASCII" in said
    same = {"cfg": SPEEDRUN, "data": FINEWEB, "losses": (3.270, 3.271, 3.272, 3.271)}
    runs = runs_of(tmp_path / "tab", devices=A100 | {"kind": "A\tB"}, **same)
    said = refused_to_add(records, capsys, runs, "1xgpu", "--pin")
    assert "the name of its machine, 1 x A B, is not printable ASCII" in said
    val = "builtin_val_000000.bin"
    short = {val: {"bytes": 300_000, "sha256": "ab" * 31}}
    same = {val: BUILTIN["builtin_train_000001.bin"]}
    digits = "not 64 hexadecimal digits"
    for other, reason in ((short, digits), (same, "two shards have the same hash")):
        runs = runs_of(tmp_path / reason, data=BUILTIN | other)
        assert reason in refused_to_add(records, capsys, runs, "cpu", "--pin")
    (record,) = records.glob("cpu/*_First")
    edit_json(record / "record.json", name="First\x1b")
    record.rename(record.with_name("2026-01-01_First\x1b"))
    assert "name First<U+001B> in record.json: use letters, digits, hyphens" in refusal(
        records, capsys
    )


def copy_losses(run: Path, other: Path, steps: int):
    """Copy the training losses of the first `steps` steps to another run."""
    lines = [(x / "metrics.jsonl").read_text().splitlines() for x in (run, other)]
    for at, line in enumerate(lines[0]):
        row = json.loads(line)
        if "train_loss" in row and row["step"] <= steps:
            in_metrics(None, other, at, train_loss=row["train_loss"])


def test_a_run_that_repeats_half_of_another_one_is_refused(records, tmp_path, capsys):
    """A run of the same record, or a run of another record with another seed."""
    same = {"seconds": 5.0, "day": 3, "source": BETTER + "#\n"}
    runs = runs_of(tmp_path / "a", **same)
    copy_losses(runs[0], runs[1], 7)
    assert "the same training losses in 7 of 12 steps" in refused_to_add(records, capsys, runs)
    runs = runs_of(tmp_path / "b", [GOOD - 0.01 * seed for seed in range(4)], **same)
    (other,) = records.glob("cpu/*_First/*-s2-*")
    copy_losses(other, runs[0], 7)
    said = refused_to_add(records, capsys, runs)
    assert f"{other.name} and {runs[0].name} have the same training losses in 7 of 12" in said
    runs = runs_of(tmp_path / "c", **same)
    copy_losses(runs[0], runs[1], 6)
    assert add(records, runs, "Half") == 0


def test_a_reproduced_run_with_other_parameters_is_refused(reproducible, capsys):
    """The author could have changed the number in the record's logs."""
    record = reproducible("0.1", facts={"parameters": 2_000_000})
    said = refusal_at_end(reproducible.root, capsys, "reproduce", record, "--yes")
    assert "parameters of the reproduced run, of the record: 2000000, not 1000000" in said


def test_a_reproduced_run_on_other_hardware_than_the_tracks_is_refused(reproducible, capsys):
    record = reproducible("0.1", facts={"devices": A100})
    said = refusal_at_end(reproducible.root, capsys, "reproduce", record, "--yes")
    assert "not the hardware of this track, platform: gpu, not cpu" in said


def test_runs_that_do_not_report_the_same_choices_are_no_record(records, tmp_path, capsys):
    runs = runs_of(tmp_path / "a", day=3, seconds=5.0, choices={})
    assert "run.json has no choices" in refused_to_add(records, capsys, runs)
    runs = runs_of(tmp_path / "b", day=3, seconds=5.0)
    in_one(None, runs[1], choices={"kernels": "plain", "compiler_options": {"a": "b"}})
    assert "choices of " in refused_to_add(records, capsys, runs)


def test_classes_of_hardware_do_not_compete(records, tmp_path):
    host = {"cpu": " A  slow CPU ", "cores": 2, "platform": "Linux"}
    assert add(records, runs_of(tmp_path, seconds=99.0, host=host), "Slow") == 0
    assert tool(records, "check") == 0
    record = json.loads(next((records / "cpu").glob("*_Slow/record.json")).read_text())
    assert record["beats"] is None and record["result"]["hardware"] == "A slow CPU, 2 cores"


def test_new_tokens_are_entered_once_and_never_change(records, tmp_path, capsys):
    data = BUILTIN | {"builtin_val_000000.bin": shard("of another Python", 300_000)}
    runs = runs_of(tmp_path, data=data)
    assert "is not in tokens.json" in refused_to_add(records, capsys, runs)
    assert add(records, runs, "New", "cpu", "--pin") == 0 and tool(records, "check") == 0
    for name in ("builtin_train_000001.bin", "builtin_train_000002.bin"):
        changed = data | {name: shard("easier", 4_000_000)}
        runs = runs_of(tmp_path / name, seconds=5.0, data=dict(sorted(changed.items())), day=2)
        assert "is not in tokens.json" in refused_to_add(records, capsys, runs, "cpu", "--pin")
    few = data | {"builtin_train_000001.bin": shard("few", 20_000)}
    few["builtin_val_000000.bin"] = shard("yet another", 300_000)
    said = refused_to_add(records, capsys, runs_of(tmp_path / "few", data=few), "cpu", "--pin")
    assert "its shards have 9488: tokens were read twice" in said


def test_tracks_fix_the_hardware_and_the_tokens(records, tmp_path, capsys):
    same = {
        "cfg": SPEEDRUN,
        "data": FINEWEB,
        "losses": (3.270, 3.271, 3.272, 3.271),
        "devices": V6E,
    }
    for i, (track, changes, reason) in enumerate(
        (
            ("v6e-8", {"devices": V6E | {"count": 4}}, "not the hardware of this track, count: 4"),
            ("v6e-8", {"devices": H100}, "not the hardware of this track, platform: gpu, not tpu"),
            ("v6e-8", {"cfg": TINY}, "validation tokens: 98304, not 10485760"),
            ("v6e-8", {"data": BUILTIN}, "it has no fineweb_val_000000.bin"),
            ("v6e-8", {"cfg": replace(SPEEDRUN, steps=900)}, "its shards have 100000000: tokens"),
            ("8xh100", {"devices": H100 | {"processes": 8}}, "of this track, processes: 8, not 1"),
            ("8xh100", {"devices": H100 | {"kind": "H100 MIG 1g.10gb"}}, "H100 MIG 1g.10gb"),
            ("v6e-8", {"cfg": replace(SPEEDRUN, epochs=2)}, "epochs over the training tokens"),
            (
                "v6e-8",
                {"cfg": replace(SPEEDRUN, start="logs/x")},
                "started with the parameters of ",
            ),
            ("steps", {}, "tokens per step"),
            (
                "steps",
                {"cfg": COUNTING, "losses": (3.278, 3.279, 3.278, 3.279)},
                "0.0030, less than 0.004",
            ),
        )
    ):
        runs = runs_of(tmp_path / str(i), **(same | changes))
        assert reason in refused_to_add(records, capsys, runs, track, "--pin")
    assert add(records, runs_of(tmp_path / "a", **same), "A", "v6e-8", "--pin") == 0
    runs = runs_of(tmp_path / "b", **(same | {"devices": H100}))
    assert add(records, runs, "B", "8xh100") == 0
    counting = same | {"cfg": COUNTING, "losses": (3.2770, 3.2775, 3.2776, 3.2777)}
    assert add(records, runs_of(tmp_path / "c", **counting), "C", "steps") == 0
    again = runs_of(tmp_path / "d", seconds=1.0, source=BETTER, **counting)
    assert "record: 20 against 20" in refused_to_add(records, capsys, again, "steps")
    fewer = counting | {"cfg": replace(COUNTING, steps=19), "devices": H100}
    assert add(records, runs_of(tmp_path / "e", seconds=99.0, **fewer), "E", "steps") == 0
    assert tool(records, "check") == 0


def test_fixed_data_ranks_small_models_by_loss_for_any_epochs_and_hardware(
    records, tmp_path, capsys
):
    many = {"cfg": replace(TINY, epochs=9, target=0.0), "parameters": 1_002_491}
    large = many | {"parameters": 1_002_492}
    said = refused_to_add(records, capsys, runs_of(tmp_path / "a", **large), "fixed-data")
    assert "the model has 1,002,492 parameters, this track allows 1,002,491" in said
    for size in (None, True, 0, "9"):
        runs = runs_of(tmp_path / f"b{size}", **many | {"parameters": size})
        said = refused_to_add(records, capsys, runs, "fixed-data")
        assert f"parameters in run.json: {size!r} is not a count" in said
    first = many | {"losses": (3.50, 3.51, 3.52, 3.51), "seconds": 20.0}
    assert add(records, runs_of(tmp_path / "c", **first), "First", "fixed-data") == 0
    other = {"source": BETTER, "day": 2, "devices": H100, "seconds": 900.0}
    noise = many | other | {"losses": (3.49, 3.50, 3.52, 3.51)}
    said = refused_to_add(records, capsys, runs_of(tmp_path / "d", **noise), "fixed-data")
    assert "not better than the standing record beyond chance: 3.505 against 3.51" in said
    better = many | other | {"losses": (3.40, 3.41, 3.42, 3.41)}
    assert add(records, runs_of(tmp_path / "e", **better), "Second", "fixed-data") == 0
    assert tool(records, "render") == 0 and tool(records, "check") == 0
    page = (records / "README.md").read_text()
    assert f"### `fixed-data`: any hardware, tokens `{BUILTIN_NAME}`" in page
    assert (
        "| passes | numbers | machine |" in page
        and "| 9 | 1,002,491 | 8 x NVIDIA H100 80GB HBM3 |" in page
    )


def test_the_first_record_of_a_class_beats_nothing(tmp_path, capsys):
    """One TPU chip, eight TPU chips, two kinds of GPUs; with a small table of n-grams."""
    root = empty(tmp_path / "records")
    (root / "tokens.json").write_text("{}")
    small = replace(SPEEDRUN, ngram_rows=SPEEDRUN.ngram_rows // 16)
    command = f"python train_gpt.py speedrun --set ngram_rows={small.ngram_rows}"
    more = {"fineweb_train_000002.bin": shard("more", 200_001_024)}
    same = {"cfg": small, "losses": (3.270, 3.271, 3.272, 3.271)}
    found = []
    for track, devices, data in (
        ("v6e-1", V6E | {"count": 1}, FINEWEB),
        ("v5e-8", V5E, FINEWEB),
        ("1xgpu", A100, FINEWEB),
        ("1xgpu", RTX, FINEWEB | more),  # a run with more steps needs more shards
        ("v6e-8", V6E, FINEWEB | more),
        ("8xh100", H100, FINEWEB),
    ):
        found.append(f"### `{track}`: {devices['count']} x {devices['kind']}, tokens `fineweb`")
        name = devices["kind"].split()[-1]
        path = tmp_path / f"{track}{name}"
        runs = runs_of(path, **same, devices=devices, data=data, command=command)
        for seed, run in enumerate(runs):
            in_one(None, run, command=f"{command} --seed {seed}")
        assert add(root, runs, name, track, "--pin") == 0
    other = FINEWEB | {"fineweb_train_000001.bin": shard("easier", 200_001_024)}
    runs = runs_of(tmp_path / "other", **same, devices=H100, data=other, day=2)
    assert "not in tokens.json" in refused_to_add(root, capsys, runs, "8xh100", "--pin")
    assert tool(root, "render") == 0 and tool(root, "check") == 0
    page = (root / "README.md").read_text()
    assert all(page.count(f"{line}\n") == 1 for line in found) and page.count("\n| 1 | ") == 6
    assert not re.search(r"\n\| 2 \| \d", page)


def test_a_record_on_gpus_has_gpu_seconds_and_a_price(tmp_path, capsys):
    """The price of the training time, from the rate that its submitter names."""
    root = empty(tmp_path / "records")
    same = {
        "cfg": SPEEDRUN,
        "data": FINEWEB,
        "losses": (3.270, 3.271, 3.272, 3.271),
        "seconds": 400.0,
    }
    runs = runs_of(tmp_path / "a", devices=A100, **same)
    for rate in ("0", "-2", "nan", "inf"):
        said = refused_to_add(root, capsys, runs, "1xgpu", "--pin", f"--rate={rate}")
        assert "dollars per hour of the machine, such as 2.49" in said
    assert add(root, runs, "Card", "1xgpu", "--pin", "--rate", "1.8") == 0
    runs = runs_of(tmp_path / "b", devices=H100, **same)
    assert add(root, runs, "Eight", "8xh100") == 0 and tool(root, "check") == 0
    path = root / "1xgpu/2026-01-01_Card/record.json"
    fields = json.loads(path.read_text())
    assert (fields["rate"], fields["price"]) == (1.8, 0.2) and fields["result"][
        "gpu_seconds"
    ] == 400.015
    capsys.readouterr()
    assert tool(root) == 0
    out = capsys.readouterr().out
    assert (
        "### `1xgpu`: 1 x NVIDIA A100-SXM4-80GB, tokens `fineweb`\n\n| # | time | GPU-seconds | "
        in out
    )
    assert "| 1 | 400.01 s ± 0.01 | 400 | $0.20 at $1.8 an hour | 20 | " in out
    assert "| 1 | 400.01 s ± 0.01 | 3,200 | - | 20 | " in out
    edit_json(path, price=0.1)
    assert "price in record.json: 0.1, not 0.2" in refusal(root, capsys)
    edit_json(path, price=0.2, rate="1.8")
    assert "--rate 1.8: dollars per hour" in refusal(root, capsys)


def test_tracks_refuse_other_machines(tmp_path, capsys):
    root = empty(tmp_path / "records")
    for track, devices, reason in (
        ("v6e-1", V6E, "not the hardware of this track, count: 8, not 1"),
        ("v6e-1", V5E | {"count": 1}, "not the hardware of this track: TPU v5 lite"),
        ("v5e-8", V6E, "not the hardware of this track: TPU v6 lite"),
        ("v5e-8", V5E | {"count": 1}, "not the hardware of this track, count: 1, not 8"),
        ("1xgpu", A100 | {"kind": A100["kind"] + " MIG 3g.40gb"}, "of this track: NVIDIA A100"),
        ("1xgpu", V6E | {"count": 1}, "not the hardware of this track, platform: tpu, not gpu"),
    ):
        runs = runs_of(tmp_path / reason, cfg=SPEEDRUN, data=FINEWEB, devices=devices)
        assert reason in refused_to_add(root, capsys, runs, track, "--pin")


def test_rules_agree_with_the_presets():
    """checks.py does not import the trainer, so old records stay valid."""
    for name, preset in (("cpu", "tiny"), ("v6e-8", "speedrun"), ("steps", "speedrun")):
        assert C.TRACKS[name].val_tokens == T.PRESETS[preset].val_tokens
    assert C.TRACKS["v6e-8"].target == T.PRESETS["speedrun"].target
    for cfg in (*T.PRESETS.values(), COUNTING, TINY):
        plan = [*C.planned(as_json(cfg))]
        assert plan[-1] == (cfg.steps, True, cfg.tokens_after(cfg.steps))
        assert all(tokens == cfg.tokens_after(step) for step, _, tokens in plan)


def test_a_resumed_run_is_marked(tmp_path, capsys):
    root = empty(tmp_path / "records")
    runs = runs_of(tmp_path / "runs")
    resume(None, runs[1])
    assert add(root, runs, "Resumed") == 0 and tool(root, "check") == 0
    assert json.loads(next(root.glob("cpu/*/record.json")).read_text())["result"]["resumed"] == [
        runs[1].name
    ]
    assert tool(root) == 0 and "| 4 (1 resumed) |" in capsys.readouterr().out


def test_derived_numbers(original):
    first = json.loads((original / "cpu/2026-01-01_First/record.json").read_text())["result"]
    assert first["losses"] == [round(GOOD + 0.005 * seed, 6) for seed in range(4)]
    # Student's t distribution with three degrees of freedom has a closed form.
    u = (0.0075 - 0.05) / np.std(first["losses"])  # t / sqrt(3)
    want = 0.5 + (u / (1 + u * u) + np.arctan(u)) / np.pi
    assert first["p_value"] == pytest.approx(want, rel=1e-2)
    assert first["mean_seconds"] == 10.015 and first["sd_seconds"] == 0.013
    assert first["seeds"] == [0, 1, 2, 3]
    assert first["command"] == "python train_gpt.py tiny" and first["date"] == "2026-01-01"


def test_add_redacts_homes_hosts_and_secrets_in_its_copy(tmp_path, capsys, monkeypatch):
    """Redaction changes the whole log, but not source.py. The runs do not change."""
    root = empty(tmp_path / "records")
    monkeypatch.setenv("HOME", "/srv/people/mary")
    source = SOURCE + "# /home/jane/x\n"
    environment = {"JAX_PLATFORMS": "cpu", "LD_LIBRARY_PATH": "/scratch/jane/lib:/Users/j.d/lib"}
    environment |= {"JAX_API_KEY": "abc", "TPU_WORKER_HOSTNAMES": "tpu-0,tpu-1"}
    environment |= {"JAX_COORDINATOR_ADDRESS": "tpu-0:99", "PYTHON_TOKEN": "1"}
    config = as_json(replace(TINY, data="/home/jane/data"))
    runs = []
    for seed in range(4):
        command = f"python train_gpt.py tiny --seed {seed} --coordinator tpu-0.example.com:8476"
        command += " --out '/home/jane/my runs' --cache=/root/cache --data /srv/people/mary/d"
        facts = {"environment": environment, "command": command, "source": source}
        runs.append(write_run(tmp_path / "runs", seed, config, GOOD + seed / 1000, **facts))
    resume(None, runs[1])
    before = {path: path.read_bytes() for run in runs for path in run.iterdir()}
    assert add(root, runs, "Private") == 0
    assert "redacted: home, host, secret, user" in capsys.readouterr().out
    assert tool(root, "check") == 0
    assert {path: path.read_bytes() for run in runs for path in run.iterdir()} == before
    for copy in (root / "cpu/2026-01-01_Private").glob("*-s*-*"):
        facts = json.loads((copy / "run.json").read_text())
        home, host = "<redacted:home>", "<redacted:host>"
        assert facts["environment"] == {
            "JAX_PLATFORMS": "cpu",
            "LD_LIBRARY_PATH": f"/scratch/<redacted:user>/lib:{home}/lib",
            "JAX_API_KEY": "<redacted:secret>",
            "TPU_WORKER_HOSTNAMES": host,
            "JAX_COORDINATOR_ADDRESS": host,
            "PYTHON_TOKEN": "<redacted:secret>",
        }
        assert facts["config"]["data"] == f"{home}/data"
        words = f"--coordinator {host} --out '{home}/my runs' --cache={home}/cache --data {home}/d"
        assert facts["command"].endswith(words)
        text = (copy / "log.txt").read_text()
        assert (copy.parent / "source.py").read_text() == source
        assert text.startswith(f"source: ../source.py, sha256 {facts['source_sha256']}\n{RULE}")
        text += (copy / "metrics.jsonl").read_text()
        assert not re.search("jane|mary|j\\.d|tpu-|abc|root", text)


def test_the_first_command_of_a_resumed_run_is_redacted(tmp_path, capsys):
    """run.json has only the last command, which may have no private data."""
    root = empty(tmp_path / "records")
    runs = runs_of(tmp_path / "runs")
    resume(None, runs[0])
    (command,) = re.findall("command: (.*)", (runs[0] / "log.txt").read_text().split(RULE)[1])
    private = f"{command} --cache /home/jane/x --coordinator tpu-0:1"
    in_log(None, runs[0], f"command: {command}\n", f"command: {private}\n")
    assert add(root, runs, "Private") == 0
    (copy,) = root.glob(f"cpu/*/{runs[0].name}")
    assert not re.search("jane|tpu-0", (copy / "log.txt").read_text())
    for name in ("run.json", "metrics.jsonl"):
        assert (copy / name).read_bytes() == (runs[0] / name).read_bytes()


def test_secrets_of_all_spellings_and_logins_in_urls_are_redacted(tmp_path, capsys):
    """`add` also prints paths and URLs."""
    root = empty(tmp_path / "records")
    hidden = "wandb_api_key", "Http_Auth", "MY_CREDENTIALS", "DB_PASS", "worker_hostname"
    environment = dict.fromkeys(hidden, "hunter2") | {
        "http_proxy": "http://mary:hunter2@proxy.example.com:80/x",
        "XLA_FLAGS": "--xla_dump_to=/scratch/secret-project",
    }
    runs = runs_of(tmp_path / "runs", environment=environment)
    assert add(root, runs, "Private") == 0
    shown = capsys.readouterr().err.splitlines()
    url = "http://<redacted:secret>@proxy.example.com:80/x"
    assert shown[0].startswith("the record has these paths and URLs")
    assert shown[1:] == ["/mine", "/scratch/secret-project", url]
    for path in root.glob("cpu/*/*/*"):
        assert not re.search("hunter2|mary", path.read_text())


def test_runs_that_only_redaction_makes_equal_are_refused(tmp_path, capsys):
    root = empty(tmp_path / "records")
    runs = runs_of(tmp_path / "a")
    for seed, run in enumerate(runs):
        in_one(None, run, environment={"TF_KEY_FLAGS": f"--fast={seed}"})
    assert "environment of " in refused_to_add(root, capsys, runs)
    runs = runs_of(tmp_path / "b", environment={"TF_KEY_FLAGS": "<redacted:secret>"})
    assert "has a <redacted:...> in it: name the original runs" in refused_to_add(
        root, capsys, runs
    )


def test_a_run_with_nothing_to_redact_is_copied_without_its_source(original, tmp_path):
    (run,) = runs_of(tmp_path, [GOOD])
    (copy,) = (original / "cpu/2026-01-01_First").glob(run.name)
    for name in ("metrics.jsonl", "run.json"):
        assert (copy / name).read_bytes() == (run / name).read_bytes()
    line = f"source: ../source.py, sha256 {SOURCE_HASH}\n"
    log = (run / "log.txt").read_text()
    assert (copy / "log.txt").read_text() == log.replace(f"{SOURCE}\n", line, 1)


def test_a_record_has_its_source_once(original, records, tmp_path, capsys):
    """Logs that contain the source, as in older records, stay valid and give the same results."""
    for record in (records / "cpu").iterdir():
        (new,) = {C.read_run(path).source for path in record.glob("*-s*-*")}
        as_older(record)
        assert {C.read_run(path).source for path in record.glob("*-s*-*")} == {new}
    assert tool(records, "check") == 0
    answers = []
    for root in (original, records):
        capsys.readouterr()
        assert tool(root) == 0 and tool(root, "diff", root / "cpu/2026-01-02_Second") == 0
        answers.append(capsys.readouterr())
        record = root / "cpu/2026-01-01_First"
        assert L.side_of(str(record), []) == (SOURCE.encode(), ["tiny"])
        assert L.side_of(str(next(record.glob("*-s2-*"))), []) == (SOURCE.encode(), ["tiny"])
    assert answers[0] == answers[1]
    (run,) = original.glob("cpu/*_First/*-s0-*")
    run = shutil.copytree(run, tmp_path / "alone" / run.name)
    assert "source.py: no such file" in refusal(records, capsys, "compare", run, run)


def test_copies_of_a_records_runs_make_the_same_record(original, tmp_path):
    """If nothing is redacted, `add` also takes runs whose source is in source.py."""
    root = empty(tmp_path / "records")
    (old,) = original.glob("cpu/*_First")
    assert add(root, sorted(old.glob("*-s*-*")), "First") == 0
    new = root / "cpu" / old.name
    names = [sorted(str(path.relative_to(x)) for path in x.rglob("*")) for x in (old, new)]
    assert names[0] == names[1]
    for path in old.rglob("*.*"):
        assert path.read_bytes() == (new / path.relative_to(old)).read_bytes()


@pytest.mark.parametrize("name", ["record.json", "source.py", "RUN", "RUN/log.txt", "README.md"])
def test_symbolic_links_are_refused(records, tmp_path, capsys, name):
    """They could lead to private files of the reviewer."""
    (record,) = (records / "cpu").glob("*_First")
    (run,) = record.glob("*-s0-*")
    path = record / name.replace("RUN", run.name)
    elsewhere = tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert f"{path.name} is a symbolic link" in refusal(records, capsys)
    if name in ("RUN/log.txt", "source.py"):
        runs = [run, *record.glob("*-s[123]-*")]
        assert f"{path.name} is a symbolic link" in refused_to_add(records, capsys, runs)


CHANGE = """--- cpu/2026-01-01_First
+++ cpu/2026-01-02_Second
@@ -1,3 +1,4 @@
 import sys
 {}
 print('a trainer')
+better = True
""".format("")


def test_diff_shows_the_changes_of_a_record(records, tmp_path, capsys):
    """stdout has only the diff, against the record before the record."""

    def diff(folder):
        assert tool(records, "diff", folder) == 0
        return capsys.readouterr()

    capsys.readouterr()
    first, second = sorted((records / "cpu").iterdir())
    # runs_of writes equal losses, as in a copy with other times.
    few = "".join(f"seed {i}: 12 of 12 training losses are equal\n" for i in range(4))
    few += "lines that differ from cpu/2026-01-01_First: 1\ncompared with cpu/2026-01-01_First\n"
    assert diff(second) == (CHANGE, few)
    shown = diff(first)
    ours = (ROOT / "train_gpt.py").read_text().splitlines()
    assert "is the first record of its class\n" in shown.err
    assert shown.err.endswith("compared with train_gpt.py of this repository\n")
    assert len(re.findall("^-(?!-- )", shown.out, re.M)) > len(ours) - 3
    runs = runs_of(tmp_path / "runs", day=3, seconds=5.0, source=BETTER.replace("True", "1 "))
    assert add(records, runs, "Third") == 0
    capsys.readouterr()
    third = records / "cpu/2026-01-03_Third"
    shown = diff(third)
    assert shown.err.endswith("compared with cpu/2026-01-02_Second\n")
    assert shown.out.splitlines()[-2:] == ["-better = True", "+better = 1<U+0020>"]
    elsewhere = shutil.copytree(third, tmp_path / "theirs/cpu" / third.name)
    said = refusal(records, capsys, "diff", elsewhere)
    assert f"{elsewhere} is not in {records}: copy the folder of the record there" in said
    edit_json(third / "record.json", beats="2026-01-01_First")  # to be compared with an older one
    assert "`beats` in record.json" in refusal(records, capsys, "diff", third)
    assert "record.json: no such file" in refusal(records, capsys, "diff", tmp_path)


def test_different_texts_never_look_equal():
    texts = (
        "a\n",
        "a\t",
        "a\x1b",
        r"a\x1b",
        "a<U+001B>",
        "a<U+003C>U+001B>",
        "a\r",
        "a\u2028",
        "a\xa0",
        "a ",
    )
    shown = {C.visible(text) for text in texts}
    assert len(shown) == len(texts) and all(text.isprintable() for text in shown)
    assert C.visible("x < y <U") == "x < y <U"
    shown = L.shown_lines(b"a \n\n\t\nb\t \n" + b"c" * 201 + b"\nd\r\n")
    assert shown[:4] == ["a<U+0020>", "", "<U+0009>", "b<U+0009><U+0020>"]
    assert shown[4:] == [f"<201 characters>{'c' * 201}", "d<U+000D>"]


def test_diff_shows_changed_settings_and_line_ends(records, tmp_path, capsys):
    """Settings are on stderr. A missing last line end is not in a unified diff."""
    cfg = replace(TINY, lr_anvil=0.5)
    changes = {"source": BETTER.rstrip("\n"), "environment": {"XLA_FLAGS": "--x\x1b"}, "cfg": cfg}
    changes |= {"versions": {"python": "3.11.9", "jax": "0.10.3", "jaxlib": "0.10.2"}}
    changes["losses"] = [GOOD - 0.01 * seed for seed in range(1, 5)]
    assert add(records, runs_of(tmp_path, day=3, seconds=5.0, **changes), "Third") == 0
    capsys.readouterr()
    assert tool(records, "diff", records / "cpu/2026-01-03_Third") == 0
    out, err = capsys.readouterr()
    assert out == ("the sources have equal lines, but only one of them ends with a line end\n")
    assert err.splitlines() == [
        f"config.lr_anvil: {TINY.lr_anvil} -> 0.5",
        "environment.JAX_PLATFORMS: 'cpu' -> None",
        r"environment.XLA_FLAGS: None -> '--x\x1b'",
        "versions.jax: '0.10.2' -> '0.10.3'",
        "lines that differ from cpu/2026-01-02_Second: 0",
        "compared with cpu/2026-01-02_Second",
    ]


def test_diff_of_a_far_source_is_against_the_nearest_version_on_the_main_branch(
    records, clone, tmp_path, capsys, monkeypatch
):
    """Only versions from before the runs count, without the submitter's branch."""
    monkeypatch.setattr(L, "FAR", 2)
    new = "".join(f"x = {i}\n" for i in range(9))
    commit(clone, f"{new}cheat = 1\n", "2025-02-01T00:00:00Z")
    subprocess.run(["git", "checkout", "-q", "main"], cwd=clone, check=True)
    commit(clone, new, "2025-03-01T00:00:00Z")
    commit(clone, "last\n", "2025-04-01T00:00:00Z")
    commit(clone, f"{new}cheat = 1\n", "2026-02-01T00:00:00Z")
    runs = runs_of(tmp_path / "runs", day=3, seconds=5.0, source=f"{new}cheat = 1\n")
    assert add(records, runs, "Third") == 0
    capsys.readouterr()
    assert tool(records, "diff", records / "cpu/2026-01-03_Third") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "+cheat = 1" and len(out.splitlines()) == 7
    *_, standing, nearest, compared = err.splitlines()
    assert standing == "lines that differ from cpu/2026-01-02_Second: 14"
    assert re.fullmatch(
        "lines that differ from train_gpt.py of commit .*, the nearest version: 1", nearest
    )
    assert compared.startswith("compared with train_gpt.py of commit ")


# ---- The page ----------------------------------------------------------------------------------


def test_the_records_of_this_repository_are_valid_and_their_page_is_not_stale():
    assert L.main(["check"]) == 0 and L.main(["render", "--check"]) == 0


def test_the_standings_begin_with_the_standing_record(original, capsys):
    capsys.readouterr()
    assert tool(original) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(f"### `cpu`: A CPU, 2 cores, tokens `{BUILTIN_NAME}`")
    assert lines[at + 4].startswith("| 2 | 8.02 s ± 0.01 | 12 | ")
    assert "| [Second](cpu/2026-01-02_Second): is Second | A. Stranger |" in lines[at + 4]
    assert lines[at + 5].startswith("| 1 | 10.02 s ± 0.01 | 12 | ")
    assert L.table([{"a": "x|y"}]) == "| a |\n| --- |\n| x\\|y |\n"


def test_a_prediction_leads_with_the_sum_of_its_three_parts(tmp_path):
    path = tmp_path / "predicted/A/preflight.json"
    path.parent.mkdir(parents=True)
    parts = {"train_seconds": 100.0, "train_link_floor_seconds": 20.0}
    parts |= {"train_moved_floor_seconds": 3.25, "low_seconds": 99.6, "high_seconds": 150.0}
    report = {"preset": "speedrun", "device_kind": "A", "devices": 8, "versions": {"jax": "0.10.2"}}
    report |= {"total_steps": 1194, "total_tokens": 395_837_440, "predicted": parts}
    report["variants"] = [{"bytes": {"peak": n * 2**30}, "resident_bytes": 2**29} for n in (1, 2)]
    path.write_text(json.dumps(report))
    text = "8 x A | [speedrun](predicted/A/preflight.json) | **123.2 s** (100 to 150) | "
    text += "100.0 + 20.0 + 3.2 | 1,194 | 395,837,440 | 2.5 | jax 0.10.2"
    assert " | ".join(L.predicted_row(tmp_path, path).values()) == text


def test_render_only_writes_a_stale_page(records, tmp_path, capsys):
    assert "README.md is stale" in refusal(records, capsys, "render", "--check")
    assert tool(records, "render") == 0 and tool(records, "render", "--check") == 0
    before = (records / "README.md").stat().st_mtime_ns
    assert tool(records, "render") == 0 and (records / "README.md").stat().st_mtime_ns == before
    assert add(records, runs_of(tmp_path, seconds=5.0, day=3), "Third") == 0
    assert "is stale" in refusal(records, capsys, "render", "--check")


# ---- Running sources ---------------------------------------------------------------------------

STUB = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from runs import write_run
args = sys.argv[1:]
assert Path(__file__).with_name("data").joinpath("builtin_corpus.py").exists()
seed, out = (args[args.index(name) + 1] for name in ("--seed", "--out"))
loss = {loss} + int(seed) / 1000
config, source = json.loads({config!r}), Path(__file__).read_text()
command = " ".join(["python", "train_gpt.py", *args])
asked = "checkpoint_end=always" in args
config["checkpoint_end"] = "always" if asked else "auto"
facts = {facts} | dict(source=source, command=command)
run = write_run(Path(out), int(seed), config, loss, {seconds}, **facts)
if asked and {saves}:
    (run / "checkpoints/12").mkdir(parents=True)
"""


def stub(path: Path, loss: float, seconds, saves=True, facts=(), **changes) -> Path:
    """Write a source that writes a run without training.

    The run has `changes` in its config, `facts` in its run.json, and a checkpoint if its command
    asks for one and `saves` is true.
    """
    facts = dict(facts)
    config = json.dumps(as_json(TINY) | changes)
    path.write_text(STUB.format(tests=str(ROOT / "tests/helpers"), **locals()))
    return path


def test_compare_alternates_and_prints_ratio_and_difference(tmp_path, capsys):
    base = stub(tmp_path / "base.py", 3.90, "10 + 0.01 * int(seed)")
    cand = stub(tmp_path / "cand.py", 3.88, "8 + 0.02 * int(seed)")
    out = tmp_path / "kept"
    words = "--runs", "3", "--out", str(out), "--", "tiny", "--set", "val_every=5"
    assert L.main(["compare", str(base), str(cand), *words]) == 0
    said = capsys.readouterr().out.splitlines()
    ratios = np.log([8 / 10, 8.02 / 10.01, 8.04 / 10.02])
    reach = 4.302653 * np.std(ratios, ddof=1) / np.sqrt(3)  # t of 2 degrees of freedom, 97.5%
    mean, low, high = np.exp(np.mean(ratios) + np.array([0, -reach, reach]))
    want = f"time ratio cand/base {mean:.4f}, 95% confidence {low:.4f} to {high:.4f}"
    assert said[-3] == want
    assert said[-2] == "loss difference cand - base -0.0200, 95% confidence -0.0200 to -0.0200"
    assert said[1].split() == ["0", "10.00", "8.00", "0.8000", "3.9000", "3.8800", "-0.0200"]
    runs = sorted(out.rglob("run.json"), key=lambda path: path.stat().st_mtime_ns)
    order = [(path.parts[-3], json.loads(path.read_text())["seed"]) for path in runs]
    names = "base", "cand", "cand", "base", "base", "cand"
    assert order == list(zip(names, (0, 0, 1, 1, 2, 2), strict=True))
    command = json.loads(runs[0].read_text())["command"]
    assert command.startswith("python train_gpt.py tiny --set val_every=5 --seed 0 --out ")


def test_compare_runs_both_sources_in_the_current_folder(tmp_path, monkeypatch, capsys):
    """Relative paths in the arguments are relative to it, as for train_gpt.py itself."""
    source = stub(tmp_path / "a.py", 3.90, 10)
    source.write_text(
        "from pathlib import Path\nassert Path('book.txt').exists()\n" + source.read_text()
    )
    monkeypatch.chdir(tmp_path)
    Path("book.txt").touch()
    assert L.main(["compare", "a.py", "a.py", "--runs", "2", "--out", "kept"]) == 0
    assert len([*(tmp_path / "kept").glob("*/*/run.json")]) == 4


def test_a_side_is_a_file_with_or_without_settings_or_a_record(original, tmp_path):
    source = stub(tmp_path / "a file.py", 3.90, 10)
    assert L.side_of(str(source), ["tiny"]) == (source.read_bytes(), ["tiny"])
    words = f"'{source}' --set steps=9"
    assert L.side_of(words, ["tiny"]) == (source.read_bytes(), ["tiny", "--set", "steps=9"])
    record = original / "cpu/2026-01-02_Second"
    assert L.side_of(str(record), ["speedrun"]) == (BETTER.encode(), ["tiny"])


def test_compare_reports_errors_in_a_line(tmp_path, capsys):
    def said(*words):
        return refusal(tmp_path, capsys, "compare", *words, "--runs", "2")

    broken, missing, idle = (tmp_path / f"{name}.py" for name in ("broken", "missing", "idle"))
    broken.write_text("raise SystemExit(3)")
    idle.write_text("")
    assert "base, seed 0: train_gpt.py ended with status 3, see above" in said(broken, broken)
    assert "base, seed 0: it wrote 0 runs instead of one" in said(idle, idle)
    assert "No such file" in said(missing, broken)
    assert "--runs: at least two pairs" in refusal(
        tmp_path, capsys, "compare", idle, idle, "--runs", "1"
    )
    cand = stub(tmp_path / "b.py", 3.8, 10, val_tokens=4096)
    assert "val_tokens of base, of cand: 98304, not 4096" in said(
        stub(tmp_path / "a.py", 3.9, 10), cand
    )


@pytest.fixture
def reproducible(tmp_path, monkeypatch):
    """A function that adds a record of a stub's runs. Instead of recheck.py, `loss` is returned."""

    def recheck(run, checkpoint, *words):
        assert checkpoint.parts[-2:] == ("checkpoints", "12") and not words
        return record.loss, record.reason

    def record(seconds: str, **changes) -> Path:
        source = stub(tmp_path / "a.py", GOOD, seconds, **changes).read_text()
        runs = runs_of(tmp_path / "runs", [GOOD + x / 1000 for x in range(4)], 1.0, source=source)
        assert add(record.root, runs, "Stub") == 0
        (folder,) = (record.root / "cpu").iterdir()
        return folder

    record.root, record.loss, record.reason = empty(tmp_path / "records"), GOOD, ""
    monkeypatch.setattr(L, "recheck", recheck)
    return record


def test_reproduce_runs_the_records_own_source(reproducible, capsys, tmp_path):
    record, root = reproducible("0.1"), reproducible.root
    capsys.readouterr()
    words = "--runs", "2", "--yes", "--out", tmp_path / "kept"
    assert tool(root, "reproduce", record, *words) == 0
    out, err = capsys.readouterr()
    first, loss, second, again, end = out.splitlines()
    assert first.startswith(f"seed 0: loss {GOOD:.4f}, recorded {GOOD:.4f}; 0.10 s on A CPU, 2 co")
    assert first.endswith("equal to the last digit") and end == "reproduced"
    assert loss.startswith(f"seed 0: this repository's code computes a loss of {GOOD:.4f} from")
    assert second.startswith(f"seed 1: loss {GOOD + 0.001:.4f}, recorded {GOOD + 0.001:.4f}; 0.10")
    form = r"seed 0 again: its process took \d+\.\d\d s with .*, it reports 0\.10 s of training, "
    form += r"\d+% of it"
    assert re.fullmatch(form, again)
    assert err.splitlines()[:2] == [
        "command: python train_gpt.py tiny",
        "environment: JAX_PLATFORMS=cpu",
    ]
    ends = {}
    for path in (tmp_path / "kept").rglob("run.json"):
        words = json.loads(path.read_text())["command"].split(" --out ")[0]
        ends[path.parent.relative_to(tmp_path / "kept").parts[0]] = words
    of_run = "python train_gpt.py tiny --seed"
    wanted = [f"{of_run} 0 --set checkpoint_end=always", f"{of_run} 1", f"{of_run} 0"]
    assert [ends[name] for name in sorted(ends)] == wanted
    said = refusal(root, capsys, "reproduce", record, "--runs", 5)
    assert "--runs 5: the record has 1 to 4" in said


def test_reproduce_checks_the_reported_loss_and_time(reproducible, capsys):
    """A source can invent both, but not a longer time than its process took."""
    record, root = reproducible("99"), reproducible.root
    capsys.readouterr()
    assert tool(root, "reproduce", record, "--yes") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"refused: seed 0 again: not reproduced: .* so not 99\.00 s$", said)
    reproducible.loss = GOOD + 0.01
    assert tool(root, "reproduce", record, "--yes") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"loss of {GOOD + 0.01:.4f} from the last checkpoint, the run reports {GOOD:.4f}" in said
    reproducible.reason = "it has other settings"
    assert tool(root, "reproduce", record, "--yes") == 1
    assert "so not 99.00 s" in capsys.readouterr().err


def test_the_timed_process_finds_programs_and_nothing_else(tmp_path):
    """An earlier process could have left the losses that it should report."""
    place = tmp_path / "place"
    for name in ("cache/folder-cache", "work", "source"):
        (place / name).mkdir(parents=True)
    program = "cache/jit_step-0f-cache"
    for name in (program, "cache/jit_step-0f-atime", "cache/x.json", "work/x.json", "source/x"):
        (place / name).write_text(name)
    (place / "cache/link-cache").symlink_to("x.json")
    L.workplace(place, tmp_path / "out", b"a source", False, {})
    left = {str(path.relative_to(place)) for path in place.rglob("*")}
    assert left == {"cache", "work", "source", "source/train_gpt.py", "source/data", program}
    assert (place / program).read_text() == program


def test_reproduce_shows_variables_that_it_does_not_set(tmp_path, capsys, monkeypatch):
    root = empty(tmp_path / "records")
    environment = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "LIBTPU_KEY": "secret"}
    assert add(root, runs_of(tmp_path / "runs", environment=environment), "Variables") == 0
    monkeypatch.setattr(sys, "stdin", None)
    (record,) = (root / "cpu").iterdir()
    capsys.readouterr()
    run = C.read_run(next(record.glob("*-s0-*")))
    L.confirm(SimpleNamespace(yes=True, sandbox=False), run, {"JAX_PLATFORMS": "cpu"})
    assert capsys.readouterr().err.splitlines()[1:4] == [
        "environment: JAX_PLATFORMS=cpu",
        "environment, not set here: JAX_ENABLE_X64=1",
        "environment, not set here: LIBTPU_KEY=<redacted:secret>",
    ]


def test_a_loss_that_was_not_recomputed_is_reported(reproducible, capsys):
    record, root = reproducible("0.1"), reproducible.root
    reproducible.reason = "it has other settings"
    capsys.readouterr()
    assert tool(root, "reproduce", record, "--yes") == 1
    out, err = capsys.readouterr()
    end = "reproduced, but its loss was not computed again: it has other settings"
    assert out.splitlines()[-1] == end and "refused" not in err


def test_a_checkpoint_that_is_missing_is_a_refusal(reproducible, capsys):
    record = reproducible("0.1", saves=False)
    said = refusal_at_end(reproducible.root, capsys, "reproduce", record, "--yes")
    assert "seed 0: not reproduced: the run left no checkpoint" in said


def reproduce_wide(tmp_path, offset: float, *words) -> int:
    """Reproduce a record whose losses vary much; return the exit status.

    The loss of its source with seed i is target + offset + 0.001 * i.
    """
    root = empty(tmp_path / "records")
    source = stub(tmp_path / "a.py", TARGET + offset, 0.1).read_text()
    wide = [GOOD - x for x in (0.05, 0.1, 0.15, 0.2)]
    assert add(root, runs_of(tmp_path / "runs", wide, 1.0, source=source), "Wide") == 0
    (record,) = (root / "cpu").iterdir()
    return tool(root, "reproduce", record, "--yes", *words)


@pytest.mark.parametrize(
    "offset,count,reason",
    [
        (0.02, 2, f"(2 of 4 seeds) is {TARGET + 0.0205:.4f}, above {TARGET:.4f}: reproduce "),
        (0.001, 1, f"(1 of 4 seeds) is {TARGET + 0.001:.4f}, above {TARGET:.4f}"),
        (-0.002, 4, ""),  # the last loss is above the target, which is allowed
    ],
)
def test_reproduced_losses_above_the_target_are_refused_whatever_the_deviation(
    tmp_path, capsys, monkeypatch, offset, count, reason
):
    """Invented losses with a large deviation make the interval of 99% very wide."""
    computed = TARGET + offset
    monkeypatch.setattr(L, "recheck", lambda *_: (computed, ""))
    assert reproduce_wide(tmp_path, offset, "--runs", count) == (1 if reason else 0)
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_the_computed_loss_counts_and_not_the_reported_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(L, "recheck", lambda *_: (TARGET + 0.001, ""))
    assert reproduce_wide(tmp_path, -0.0005) == 1
    assert f"is {TARGET + 0.001:.4f}, above {TARGET:.4f}" in capsys.readouterr().err


def test_without_a_target_the_standing_record_is_the_limit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(L, "recheck", lambda *_: (3.6, ""))
    root = empty(tmp_path / "records")
    cfg = replace(TINY, epochs=9, target=0.0)
    first = runs_of(tmp_path / "a", [3.50, 3.51, 3.52, 3.51], cfg=cfg)
    assert add(root, first, "First", "fixed-data") == 0
    source = stub(tmp_path / "a.py", 3.6, 0.1, epochs=9, target=0.0).read_text()
    same = {"cfg": cfg, "source": source, "day": 2}
    wide = runs_of(tmp_path / "b", [2.9, 3.1, 3.2, 3.1], **same)
    assert add(root, wide, "Wide", "fixed-data") == 0
    (record,) = root.glob("fixed-data/*_Wide")
    said = refusal_at_end(root, capsys, "reproduce", record, "--yes")
    assert "the mean reproduced loss (1 of 4 seeds) is 3.6000, above 3.5100" in said


def test_equal_training_losses_with_another_final_loss_are_refused(reproducible, capsys):
    record = reproducible("0.1")
    run = next(record.glob("*-s0-*"))
    in_metrics(None, run, val_loss=GOOD - 1e-5)
    edit_json(run / "run.json", val_loss=GOOD - 1e-5)
    fields = json.loads((record / "record.json").read_text())
    pinned = json.loads((reproducible.root / "tokens.json").read_text())
    runs = [C.read_run(path) for path in sorted(record.glob("*-s*-*"))]
    fields["result"] = C.judge(C.TRACKS["cpu"], runs, pinned)
    edit_json(record / "record.json", **fields)
    said = refusal_at_end(reproducible.root, capsys, "reproduce", record, "--yes")
    assert "all training losses are equal, but not the final loss" in said


@pytest.mark.parametrize("answer", [None, "\n", "n\n", "y\n"])
def test_reproduce_asks_before_it_runs(reproducible, capsys, monkeypatch, answer):
    """It asks only on a terminal."""

    def train_with(*_):
        raise C.Refused("it runs")

    record = reproducible("0.1")
    stream = io.StringIO(answer or "")
    stream.isatty = lambda: answer is not None
    monkeypatch.setattr(sys, "stdin", stream)
    monkeypatch.setattr(L, "train_with", train_with)
    capsys.readouterr()
    assert tool(reproducible.root, "reproduce", record) == 1
    err = capsys.readouterr().err
    if answer is None:
        assert err.count("\n") == 1 and "then add --yes" in err
    else:
        assert "command: python train_gpt.py tiny\n" in err and "run it? [y/N] " in err
        assert err.endswith("it runs\n" if answer == "y\n" else "refused: not confirmed\n")


FAKE = """#!{python}
import json, os, subprocess, sys
words, home = sys.argv[1:], os.environ["FAKE_HOME"]
with open(home + "/calls", "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *words]), file=file)
if words[0] != "import":
    sys.exit(subprocess.run(words[words.index({python!r}) :]).returncode)
"""


@pytest.mark.parametrize("program", ["bwrap", "docker", None])
def test_a_sandbox_has_no_network_and_writes_only_where_runs_go(
    reproducible, tmp_path, monkeypatch, capsys, program
):
    """Stand-ins for bwrap and docker log their arguments and run the command."""
    record = reproducible("0.1")
    if program:
        (tmp_path / program).write_text(FAKE.format(python=sys.executable))
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FAKE_HOME", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setattr(L, "git", lambda *_, **__: b"")
    out = tmp_path / "kept"
    status = tool(reproducible.root, "reproduce", record, "--yes", "--sandbox", "--out", out)
    if not program:
        assert status == 1
        assert "install bwrap or docker" in capsys.readouterr().err.splitlines()[-1]
        return
    assert status == 0, capsys.readouterr().err
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    calls = [" ".join(call) for call in calls if call[1] != "import"]
    assert len(calls) == 2
    for call in calls:
        assert re.search(rf" {sys.executable} \S*/source/train_gpt.py tiny --seed 0 ", call)
        if program == "bwrap":
            assert " --unshare-net " in call and " --ro-bind / / " in call
            writable = re.findall(r" --bind (\S+) (\S+)", call)
        else:
            assert " --network none --read-only " in call and " --volume /usr:/usr:ro " in call
            volumes = re.findall(r" --volume ([^:]+):(\S+)", call)
            writable = [(path, place) for path, place in volumes if not place.endswith(":ro")]
            assert " --env JAX_COMPILATION_CACHE_DIR " in call and "TOKEN" not in call
        assert all(path == place for path, place in writable)
        out = "again" if call is calls[1] else "kept"
        assert [Path(path).name for path, _ in writable] == ["cache", "work", out]


def test_reproduce_refuses_a_loss_that_the_source_does_not_reach(tmp_path, capsys):
    root = empty(tmp_path / "records")
    source = stub(tmp_path / "a.py", GOOD + 0.04, 10).read_text()
    runs = runs_of(tmp_path / "runs", [GOOD - x for x in (0.1, 0.09, 0.08, 0.09)], source=source)
    assert add(root, runs, "Lucky") == 0
    (record,) = (root / "cpu").iterdir()
    words = f"loss {GOOD + 0.04:.4f} is not within .* recorded mean {GOOD - 0.09:.4f}"
    assert tool(root, "reproduce", record, "--yes") == 1
    assert re.search(f"not reproduced: {words}", capsys.readouterr().err.splitlines()[-1])
    assert "record.json: no such file" in refusal(root, capsys, "reproduce", "nothing")


def test_an_older_source_gets_the_tools_of_its_commit(tmp_path):
    """The tools are in data/; the token folders are the folders of this clone."""
    (run,) = list((ROOT / "records/cpu/2026-11-22_Record92").glob("*-s0-*"))
    source = C.read_run(run).source
    L.lay_out(source, tmp_path / "old")
    if (tmp_path / "old/data").is_symlink():
        pytest.skip("this clone lacks the history")
    assert "def text_encoding" in (tmp_path / "old/data/shards.py").read_text()
    assert (tmp_path / "old/train_gpt.py").read_bytes() == source
    L.lay_out(b"new", tmp_path / "new")
    assert (tmp_path / "new/data").resolve() == ROOT / "data"


def commit(folder: Path, text: str, date: str):
    """Commit `text` as train_gpt.py and as a tool in data/."""
    for name in ("train_gpt.py", "data/tool.py"):
        (folder / name).write_text(text)
    when = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    who = "-c", "user.name=A", "-c", "user.email=a@b"
    for words in (["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=folder, env=os.environ | when, check=True)


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A clone with two versions of train_gpt.py on its main branch. A submitter's branch is checked
    out."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    folder = tmp_path / "clone"
    (folder / "data").mkdir(parents=True)
    subprocess.run(["git", "init", "-qb", "main"], cwd=folder, check=True)
    commit(folder, "first\n", "2025-01-01T00:00:00Z")
    commit(folder, "second\n", "2025-01-02T00:00:00Z")
    subprocess.run(["git", "checkout", "-qb", "theirs"], cwd=folder, check=True)
    commit(folder, "submitted\n", "2025-01-03T00:00:00Z")
    monkeypatch.setattr(L, "HERE", folder / "records")
    return folder


def test_older_tools_are_from_the_main_branch_only(clone, tmp_path):
    (clone / "data/tool.py").write_text("of this clone")
    for source, tool_text in (("first\n", "first\n"), ("submitted\n", "of this clone")):
        L.lay_out(source.encode(), tmp_path / source.strip())
        assert (tmp_path / source.strip() / "data/tool.py").read_text() == tool_text


@pytest.mark.parametrize("name", ["data", "data/tool.py"])
def test_a_link_in_place_of_the_tools_is_refused(clone, tmp_path, name):
    (clone / name).rename(tmp_path / "elsewhere")
    (clone / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(C.Refused, match=f"{Path(name).name} is a symbolic link"):
        L.lay_out(b"first\n", tmp_path / "home")


@pytest.mark.parametrize("history", ["none", "cut", "whole", "no git"])
def test_an_older_source_without_its_history_is_refused_in_a_line(
    tmp_path, capsys, monkeypatch, history
):
    """A ZIP of the repository, a clone by --depth, or no git."""
    monkeypatch.setattr(L, "HERE", tmp_path / "records")
    (tmp_path / "train_gpt.py").write_bytes(b"of today")
    if history == "no git":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    if history != "none":
        (tmp_path / ".git").mkdir()
        answers = {"rev-parse": b"false\n" if history == "whole" else b"true\n"}

        def git(command, **_):
            return SimpleNamespace(stdout=answers.get(command[5], b""))

        monkeypatch.setattr(subprocess, "run", git)
    refuses = contextlib.nullcontext()
    if history != "whole":
        refuses = pytest.raises(
            C.Refused, match="use a clone with its history, not a ZIP or --depth"
        )
    with refuses:
        L.need_tools(tmp_path / "records/cpu/2026-01-01_First", b"older")
    L.need_tools(tmp_path / "records/cpu/2026-01-01_First", b"of today")
    L.need_tools(tmp_path / "logs/mine", b"older")


def test_git_does_not_change_line_ends(tmp_path):
    """Git for Windows would, but the hashes of logs and sources must stay valid."""
    assert "* -text" in (ROOT / ".gitattributes").read_text().splitlines()


# ---- The command line --------------------------------------------------------------------------


def test_refusals_of_add_and_unprintable_text(records, tmp_path, capsys):
    for run_id in ("20261399-000000-tiny-s0-abcdef", "notes"):
        runs = runs_of(tmp_path / run_id, day=3)
        began(None, runs[0], run_id)
        runs = [*(tmp_path / run_id).iterdir()]
        assert "the date and time in its name: cannot" in refused_to_add(records, capsys, runs)
    runs = runs_of(tmp_path / "renamed", day=3)
    copy = runs[0].rename(runs[0].with_name("my-best"))
    said = refused_to_add(records, capsys, [copy, *runs[1:]])
    assert f"my-best: its folder must be named {runs[0].name}, as in run.json" in said
    runs = runs_of(tmp_path / "data", data=["builtin_val_000000.bin"], day=3)
    assert "cannot be read (" in refused_to_add(records, capsys, runs, "cpu", "--pin")
    runs = runs_of(tmp_path / "a", day=3, seconds=5.0)
    assert "--by and --what" in refused_to_add(records, capsys, runs, "cpu", "--what", " ")
    edit_json(next(records.glob("cpu/*_First/record.json")), what="\ud800\x1b[8m")
    assert tool(records, "render") == 0
    assert ": <U+D800><U+001B>[8m | A. Stranger" in (records / "README.md").read_text()
    (records / "predicted/v6e-8/preflight.json").write_text("{}")
    assert "predicted/v6e-8/preflight.json: cannot be read (KeyError" in refusal(
        records, capsys, "render"
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["add"], "the following arguments are required"),
        (["add", "x", "--track", "moon"], "invalid choice: 'moon'"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["check", "more"], "unrecognized arguments: more"),
        (["check", "--", "x"], "only compare takes arguments after --"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, words, reason):
    with pytest.raises(SystemExit) as end:
        L.main(words)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and reason in said


def test_it_needs_no_jax_and_no_reader(tmp_path, capsys):
    """No traceback after the end of `| head`, also when Python exits."""
    script = ROOT / "records/leaderboard.py"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    (tmp_path / "jax.py").write_text("raise ImportError('jax is not needed here')")
    environment |= {"PYTHONPATH": str(tmp_path)}
    words = f"{sys.executable} {script} | true"
    done = subprocess.run(words, shell=True, env=environment, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens.json" in refusal(tmp_path, capsys, "check")


@pytest.mark.slow
def test_a_submission_from_training_to_the_table(tmp_path):
    """In a clone without records: train a small `tiny` with four seeds, then use all commands."""
    clone = tmp_path / "clone"
    for part in ("data", "records"):
        ours = shutil.ignore_patterns(*C.TRACKS, "*.bin")
        shutil.copytree(ROOT / part, clone / part, ignore=ours)
    (clone / "records/tokens.json").write_text("{}\n")  # as there are no records
    # An easier target and fewer validation tokens, in the track and in its preset.
    for name in ("train_gpt.py", "records/tracks.json"):
        text = (ROOT / name).read_text().replace('"target": 3.95', '"target": 9.5')
        easier = text.replace("target=3.95", "target=9.5").replace("98_304", "4096")
        (clone / name).write_text(easier.replace('"val_tokens": 98304', '"val_tokens": 4096'))
    rng = np.random.default_rng(0)
    for name, count in (("train_000001", 40_000), ("val_000000", 6_000)):
        document = np.append(T.PRESETS["tiny"].bos, rng.integers(0, 200, count))
        write_shard(clone / f"data/builtin/builtin_{name}.bin", document)
    pairs = [bytes([a, b]).hex() for a in range(7) for b in range(256)]
    (clone / "data/builtin/merges.json").write_text(json.dumps(pairs[: 2048 - 257]))
    quick = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = os.environ | {
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + quick,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=clone, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    short = "steps=16 momentum_warmup=2 momentum_cooldown=1 table_change=4".split()
    short += "sample_tokens=0 val_every=0 width=32 mlp_width=64 ngram_rows=2048".split()
    short += ["loss_chunk=512", "target=9.5"]  # the track's target, which is not the preset's
    for seed in "0123":
        run("train_gpt.py", "--set", *short, "--seed", seed)
    runs = sorted((clone / "logs").iterdir())
    board = "records/leaderboard.py"
    about = ["--track", "cpu", "--name", "Mine", "--by", "me", "--what", "my first"]
    run(board, "add", *runs, *about, "--pin")
    assert "valid records: 1" in run(board, "check")
    run(board, "render")
    run(board, "render", "--check")
    page = (clone / "records/README.md").read_text()
    assert re.search(r"\| 1 \| \d+\.\d\d s ± \d.* \| 16 \| .*\[Mine\]", page)
    (record,) = (path for path in (clone / "records/cpu").iterdir() if path.is_dir())
    said = run(board, "reproduce", record, "--yes")
    assert "this repository's code computes a loss of " in said
    assert "training losses equal to the last digit" in said and "reproduced" in said
