"""records/leaderboard.py: what it refuses and why, what it derives, a stranger's whole path.

Most runs here are written by runs.py, in the trainer's format; the last test trains. The records of
this repository are checked too: they were written by older trainers.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import checks as C
import leaderboard as L
import numpy as np
import pytest
from conftest import ROOT, write_shard
from runs import (
    BUILTIN,
    BUILTIN_NAME,
    CHOICES,
    FINEWEB,
    HOST,
    RULE,
    SETTINGS,
    SOURCE,
    head,
    read_metrics,
    shard,
    write_json,
    write_metrics,
    write_run,
)

import train_gpt as T


def as_json(cfg: T.Config) -> dict:
    """As run.json has it."""
    return json.loads(json.dumps(asdict(cfg)))


BETTER = SOURCE + "better = True\n"
TARGET = C.TRACKS["cpu"].target
TINY = replace(T.PRESETS["tiny"], steps=12, extension=2, val_every=5, target=TARGET)
GOOD = round(TARGET - 0.05, 6)  # a loss that is low enough, and so are those around it
CPUS = {"kind": "cpu", "count": 1, "platform": "cpu", "processes": 8}
V6E = {"kind": "TPU v6 lite", "count": 8, "platform": "tpu", "processes": 1}
COUNTING = replace(
    T.PRESETS["speedrun"],
    steps=20,
    extension=2,
    stages=tuple(replace(s, batch_tokens=524_288) for s in T.PRESETS["speedrun"].stages),
)


def runs_of(folder: Path, losses=(), seconds=10.0, spread=0.01, cfg=TINY, **changes):
    """Runs with seeds 0, 1, ...; the times differ by `spread`. Losses are good by default."""
    losses = losses or (GOOD, GOOD + 0.005, GOOD + 0.01)
    return [
        write_run(folder, seed, as_json(cfg), loss, seconds + spread * seed, **changes)
        for seed, loss in enumerate(losses)
    ]


def tool(root: Path, *words) -> int:
    return L.main(["--records", str(root), *map(str, words)])


def add(root: Path, runs, name: str, track="cpu", *words) -> int:
    about = ["--track", track, "--name", name, "--by", "A. Stranger", "--what", f"is {name}"]
    return tool(root, "add", *runs, *about, *words)


def empty(root: Path) -> Path:
    """A records folder without records, with the pages of the real one."""
    root.mkdir(exist_ok=True)
    shutil.copy(ROOT / "records/README.md", root)
    shutil.copytree(ROOT / "records" / "predicted", root / "predicted")
    write_json(root / "tokens.json", {BUILTIN_NAME: BUILTIN})
    return root


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """Records with a first record on `cpu` and a faster one."""
    base = tmp_path_factory.mktemp("original")
    root = empty(base / "records")
    assert add(root, runs_of(base / "a"), "First") == 0
    assert add(root, runs_of(base / "b", seconds=8.0, source=BETTER, day=2), "Second") == 0
    assert tool(root, "check") == 0
    return root


@pytest.fixture
def records(original, tmp_path) -> Path:
    """A copy of them to tamper with."""
    return Path(shutil.copytree(original, tmp_path / "records"))


def forge(root: Path, runs, name: str, track="cpu", beats=None):
    """A record folder with all that `add` writes, and no check of the rules."""
    read = [C.read_run(run) for run in runs]
    fields = {"track": track, "name": name, "by": "me", "what": "this", "beats": beats}
    fields["result"] = C.derive(C.TRACKS[track], read)
    folder = root / track / f"{fields['result']['date']}_{name}"
    folder.mkdir(parents=True)
    for run in runs:
        shutil.copytree(run, folder / run.name)
    write_json(folder / "record.json", fields)
    (folder / "README.md").write_text(C.describe(fields))
    return folder


def refusal(root: Path, capsys, *words) -> str:
    """The one line with which the tool refuses, after those that say how far it is."""
    capsys.readouterr()
    assert tool(root, *(words or ["check"])) == 1
    said = capsys.readouterr().err.splitlines()
    said = [line for line in said if not re.search(r"(seed|pair) \d+.*: step ", line)]
    assert len(said) == 1 and said[0].startswith("refused: "), said
    return said[0]


# ------------------------------------------------------------------------------------------------
# Tampering with a record: every way is refused, with the right reason
# ------------------------------------------------------------------------------------------------


def edit(path: Path, old: str, new: str, count=1):
    text = path.read_text()
    assert re.search(old, text), (path, old)
    path.write_text(re.sub(old, new, text, count=count))


def edit_json(path: Path, **changes):
    write_json(path, json.loads(path.read_text()) | changes)


def edit_result(record: Path, **changes):
    fields = json.loads((record / "record.json").read_text())
    fields["result"] |= changes
    write_json(record / "record.json", fields)


def edit_config(record: Path, run: Path, **changes):
    """In the log and in run.json of all runs, as if they had been made with it."""
    for folder in run.parent.iterdir():
        if folder.is_dir():
            facts = json.loads((folder / "run.json").read_text())
            facts["config"] |= changes
            edit_json(folder / "run.json", config=facts["config"])
            line = f"config: {json.dumps(facts['config'])}"
            edit(folder / "log.txt", r"config: .*", line.replace("\\", r"\\"))


def edit_metrics(run: Path, at: int, **changes):
    rows = read_metrics(run)
    rows[at] |= changes
    write_metrics(run, rows)


def resume_silently(record: Path, run: Path, before="", after=""):
    """`before` and `after` in its second head."""
    log = (run / "log.txt").read_text()
    about = head(json.loads((run / "run.json").read_text()))
    at = log.index("step:6/")
    log = log[:at] + f"{RULE}\nresumed\n{before}{about}\n{after}{RULE}\n" + log[at:]
    (run / "log.txt").write_text(log)


def cut_log(record: Path, run: Path):
    log = (run / "log.txt").read_text()
    (run / "log.txt").write_text(log[: log.index("step:11/")])


def other_shard(record: Path, run: Path, rename=False):
    for folder in record.iterdir():
        if folder.is_dir():
            old = json.loads((folder / "run.json").read_text())["data"]
            data = old | {"builtin_train_000001.bin": shard("easier", 4_000_000)}
            if rename:
                data = old | {"mine_train_000001.bin": shard("easier", 4_000_000)}
            edit_json(folder / "run.json", data=data)
            edit(folder / "log.txt", r"\ndata: .*", f"\ndata: {json.dumps(data)}")


def without_step(record: Path, run: Path):
    edit(run / "log.txt", r"step:7/12 .*\n", "")
    write_metrics(run, [row for row in read_metrics(run) if row["step"] != 7])


def repeated_seed(record: Path, run: Path):
    (other,) = (p for p in record.iterdir() if "-s1-" in p.name)
    shutil.rmtree(other)
    write_run(record, 0, as_json(TINY), GOOD + 0.01, 10.01, curve_seed=9)


def renamed_seed(record: Path, run: Path):
    (other,) = (p for p in record.iterdir() if "-s1-" in p.name)
    shutil.rmtree(other)
    made = write_run(record, 1, as_json(TINY), GOOD, 10.0, curve_seed=0)
    rows = read_metrics(run)
    assert [r.get("train_loss") for r in read_metrics(made)] == [r.get("train_loss") for r in rows]


def other_source(record: Path, run: Path):
    (other,) = (p for p in record.iterdir() if "-s1-" in p.name)
    shutil.rmtree(other)
    write_run(record, 1, as_json(TINY), GOOD + 0.01, 10.01, source="# faster\n" + SOURCE)


def slower_clock(record: Path, run: Path):
    line = "step:7/12 train_time:4900ms step_avg:700.00ms"
    edit(run / "log.txt", r"step:7/12 train_time:.*", line)
    at = next(i for i, row in enumerate(read_metrics(run)) if row["step"] == 7)
    edit_metrics(run, at, train_time_ms=4900.0)


def edit_facts(folder: Path, **changes):
    """In run.json, and where the log's heads say the same."""
    edit_json(folder / "run.json", **changes)
    for name, value in changes.items():
        value = value if name == "command" else json.dumps(value)
        edit(folder / "log.txt", rf"\n{name}: .*", f"\n{name}: {value}", count=0)


def in_all(record: Path, change):
    for folder in sorted(path for path in record.iterdir() if path.is_dir()):
        change(folder)


def edit_command(folder: Path, old: str, new: str):
    command = json.loads((folder / "run.json").read_text())["command"]
    edit_facts(folder, command=re.sub(old, new, command))


def edit_times(run: Path, times):
    """`times(ms)` in place of all times of the run."""
    rows = [row | {"train_time_ms": times(row["train_time_ms"])} for row in read_metrics(run)]
    write_metrics(run, rows)
    edit_json(run / "run.json", train_time_ms=rows[-1]["train_time_ms"])
    lines, rest = [], iter(rows)
    for line in (run / "log.txt").read_text().splitlines():
        if line.startswith("step:"):
            row = next(rest)
            ms, step = row["train_time_ms"], row["step"]
            line = line[: line.index("train_time")]
            line += f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        lines.append(line)
    (run / "log.txt").write_text("\n".join(lines) + "\n")


def copied_seed(record: Path, run: Path):
    """The curve of seed 0 as seed 1's, with a constant added."""
    (other,) = record.glob("*-s1-*")
    mine = iter([row["train_loss"] for row in read_metrics(run) if "train_loss" in row])
    rows = read_metrics(other)
    for row in rows:
        if "train_loss" in row:
            row["train_loss"] = round(next(mine) + 0.125, 6)
    write_metrics(other, rows)


def copied_times(record: Path, run: Path):
    """The times of seed 0 as seed 1's, one in a thousand less, and half a second more a step."""
    (other,) = record.glob("*-s1-*")
    mine = iter([row["train_time_ms"] * 0.999 + 500.0 * row["step"] for row in read_metrics(run)])
    edit_times(other, lambda ms: round(next(mine), 3))


def resource(record: Path, source: str):
    """Another source in all runs, as if they had been made with it."""
    for run in record.glob("*-s*-*"):
        log = (run / "log.txt").read_text()
        (run / "log.txt").write_text(source + log[log.index(f"\n{RULE}") :])
        edit_json(run / "run.json", source_sha256=sha256(source.encode()).hexdigest())


def piped(record: Path, run: Path):
    (run / "log.txt").unlink()
    os.mkfifo(run / "log.txt")


def more_tokens(record: Path, name: str, stream=BUILTIN_NAME):
    path = record.parents[1] / "tokens.json"
    tokens = json.loads(path.read_text())
    tokens.setdefault(stream, {})[name] = shard("more", 4_000_000)
    write_json(path, tokens)


def edit_prediction(record: Path, old: str, new: str):
    edit(record.parents[1] / "predicted/v6e-8/preflight.json", old, new)


def profiled_resume(record: Path, run: Path):
    resume_silently(record, run)
    edit_json(run / "run.json", resumed=True, command="python train_gpt.py --resume x --profile")
    edit(run / "log.txt", r"(resumed\n(?:.*\n)*?)command: .*", r"\1command: python train_gpt.py "
         "--resume x --profile")  # fmt: skip


OTHER = {"grads0": {"micro_tokens": 512, "recompute": True}}  # than SETTINGS


def forced(folder: Path, settings: dict):
    """The line with which a log begins when memory forced other settings than those asked for."""
    edit(folder / "log.txt", r"\nstep:0/", f"\nsettings: {json.dumps(settings)}\nstep:0/")


def without_versions(record: Path, run: Path):
    def change(folder):
        edit_json(folder / "run.json", versions={"python": "3.11.9", "jax": "0.10.2"})
        edit(folder / "log.txt", r"jaxlib.*\n", "")

    in_all(record, change)


def linked(record: Path, run: Path):
    (run / "log.txt").rename(record.parents[1] / "log.txt")
    (run / "log.txt").symlink_to(record.parents[1] / "log.txt")


def without_loss(record: Path, run: Path):
    facts = json.loads((run / "run.json").read_text())
    del facts["val_loss"]
    write_json(run / "run.json", facts)


def renamed(run: Path, old: str, new: str):
    edit_json(run / "run.json", run_id=run.name.replace(old, new))
    run.rename(run.with_name(run.name.replace(old, new)))


TAMPERED = {
    # the source
    "source in the log": (
        lambda record, run: edit(run / "log.txt", "a trainer", "a cheater"),
        r"the source in log\.txt has sha256 \w{12}, run\.json says \w{12}",
    ),
    "source hash in run.json": (
        lambda record, run: edit_json(run / "run.json", source_sha256="0" * 64),
        r"the source in log\.txt has sha256 \w{12}, run\.json says 000000000000",
    ),
    "source hash in record.json": (
        lambda record, run: edit_result(record, source_sha256="0" * 64),
        r"record\.json says source_sha256 0+, from the logs it is \w{64}",
    ),
    "source of one run": (other_source, "source_sha256 differs between .* and "),
    # seeds
    "seed twice": (repeated_seed, r"seeds repeat: \[0, 0, 2\]"),
    "one run as two seeds": (
        renamed_seed,
        "seeds repeat: .* have the same training losses",
    ),
    "a seed made from another": (copied_seed, "seeds repeat: .* have the same training losses"),
    "a seed left out": (
        lambda record, run: shutil.rmtree(run),
        r"seeds \[1, 2\] are not 0 to 1: to choose seeds is to choose losses",
    ),
    "one seed in the config": (
        lambda record, run: edit_json(run / "run.json", seed=7),
        "run.json has two seeds",
    ),
    # whole runs
    "not finished": (
        lambda record, run: edit_json(run / "run.json", finished=False),
        "not finished",
    ),
    "log cut off": (cut_log, "not finished: log.txt ends at step 10 of 12"),
    "resumed in silence": (resume_silently, "was resumed 1 times, run.json says False"),
    "resumed only by word": (
        lambda record, run: edit_json(run / "run.json", resumed=True),
        "was resumed 0 times, run.json says True",
    ),
    # what is fixed
    "fewer validation tokens": (
        lambda record, run: edit_config(record, run, val_tokens=4096),
        "wrong number of validation tokens: 4096, not 98304",
    ),
    "an easier target": (
        lambda record, run: edit_config(record, run, target=4.5),
        r"the run's target is",
    ),
    "other training tokens": (other_shard, r"token stream other than the rules': builtin_train_"),
    "other shards": (
        lambda record, run: other_shard(record, run, rename=True),
        r"token stream other than the rules': builtin_.*, mine_train_000001\.bin",
    ),
    # steps and tokens
    "a step left out": (without_step, r"log\.txt does not have the steps of the config \(12\)"),
    "config of fewer steps": (
        lambda record, run: edit_config(record, run, steps=11),
        r"log\.txt does not have the steps of the config \(11\)",
    ),
    "config of smaller batches": (
        lambda record, run: edit_config(
            record, run, stages=[s | {"batch_tokens": 512} for s in asdict(TINY)["stages"]]
        ),
        r"metrics\.jsonl: 1024 tokens after step 1, by the config it is 512",
    ),
    "tokens in the metrics": (
        lambda record, run: edit_metrics(run, 3, tokens=7),
        r"metrics\.jsonl: 7 tokens after step",
    ),
    "tokens in run.json": (
        lambda record, run: edit_json(run / "run.json", tokens=7),
        r"run\.json and metrics\.jsonl disagree: tokens 7 and",
    ),
    # log and JSON
    "final loss in the log": (
        lambda record, run: edit(run / "log.txt", r"(step:12/12 val_loss):\d\.", r"\1:2."),
        r"log\.txt and metrics\.jsonl disagree on the loss of step 12: 2\.9000 and 3\.9",
    ),
    "final loss in the metrics": (
        lambda record, run: edit_metrics(run, -1, val_loss=2.9),
        r"log\.txt and metrics\.jsonl disagree on the loss of step 12: 3\.9000 and 2\.9",
    ),
    "final loss in run.json": (
        lambda record, run: edit_json(run / "run.json", val_loss=2.9),
        r"run\.json and metrics\.jsonl disagree: val_loss 2\.9 and 3\.9",
    ),
    "final time in the metrics": (
        lambda record, run: edit_metrics(run, -1, train_time_ms=9990.0),
        r"log\.txt and metrics\.jsonl disagree on the time of step 12: 10000 and 9990\.0 ms",
    ),
    "final time in run.json": (
        lambda record, run: edit_json(run / "run.json", train_time_ms=9.0),
        r"run\.json and metrics\.jsonl disagree: train_time_ms 9\.0 and 10000\.0",
    ),
    "step average in the log": (
        lambda record, run: edit(run / "log.txt", r"step_avg:833\.\d\d", "step_avg:733.33"),
        "step_avg times .* steps is not train_time",
    ),
    "config in run.json": (
        lambda record, run: edit_json(
            run / "run.json",
            config=json.loads((run / "run.json").read_text())["config"] | {"lr_anvil": 9},
        ),
        r"log\.txt and run\.json disagree: config: ",
    ),
    "command in run.json": (
        lambda record, run: edit_json(run / "run.json", command="python train_gpt.py speedrun"),
        r"log\.txt and run\.json disagree: command: .* and command: python train_gpt.py speedrun",
    ),
    "versions in run.json": (
        lambda record, run: edit_json(
            run / "run.json", versions={"python": "3.11.9", "jax": "0.11.0", "jaxlib": "0.10.2"}
        ),
        r"log\.txt and run\.json disagree: jax 0\.10\.2 and jax 0\.11\.0$",
    ),
    "another version beside the first": (
        lambda record, run: edit(run / "log.txt", "\njax 0", "\njax 0.9.9\njax 0"),
        r"log\.txt and run\.json disagree: jax 0\.9\.9 and jax 0",
    ),
    "environment in run.json": (
        lambda record, run: edit_json(run / "run.json", environment={}),
        r"log\.txt and run\.json disagree: environment: .* and environment: \{\}$",
    ),
    "run.json of another run": (
        lambda record, run: edit_json(run / "run.json", run_id="another"),
        "run.json is of another run, another",
    ),
    "two runs in one log": (
        lambda record, run: (run / "log.txt").write_text((run / "log.txt").read_text() * 2),
        "log.txt was resumed 1 times, run.json says False",
    ),
    # times
    "a clock that goes backwards": (slower_clock, "times are not monotonic"),
    "a clock that stands still": (
        lambda record, run: edit_times(run, lambda ms: float(ms > 9999)),
        "the clock stood still in a step",
    ),
    # machines
    "one run on another machine": (
        lambda record, run: edit_facts(run, host=HOST | {"cores": 64}),
        "host differs between",
    ),
    "one run on another system": (
        lambda record, run: [
            edit_facts(run, host=HOST | {"platform": "Linux-7"}),
            edit(run / "log.txt", r"\nLinux\n", "\nLinux-7\n"),
        ],
        "host differs between",
    ),
    "flags in one run": (
        lambda record, run: edit_facts(run, environment={"OMP_NUM_THREADS": "9"}),
        "environment differs between",
    ),
    "choices in run.json": (
        lambda record, run: edit_json(run / "run.json", choices=CHOICES | {"kernels": "faster"}),
        r"log\.txt and run\.json disagree: choices: ",
    ),
    "choices not in the log": (
        lambda record, run: edit(run / "log.txt", r"\nchoices: .*", ""),
        r"log\.txt and run\.json disagree: data: .* and choices: ",
    ),
    "other choices in one run": (
        lambda record, run: edit_facts(run, choices=CHOICES | {"kernels": "faster"}),
        "choices differs between",
    ),
    "settings in the log": (
        lambda record, run: forced(run, OTHER),
        r"log\.txt and run\.json disagree on settings",
    ),
    "settings not in the log": (
        lambda record, run: edit_json(run / "run.json", settings=SETTINGS),
        r"log\.txt and run\.json disagree on settings",
    ),
    "other settings in one run": (
        lambda record, run: [forced(run, OTHER), edit_json(run / "run.json", settings=OTHER)],
        "settings differs between",
    ),
    "versions left out": (without_versions, "versions: 'jaxlib' is missing"),
    "many processes": (
        lambda record, run: in_all(
            record, lambda folder: edit_json(folder / "run.json", devices=CPUS)
        ),
        "8 processes: one drives all devices on this track",
    ),
    # commands
    "the same seed in all commands": (
        lambda record, run: in_all(
            record, lambda folder: edit_command(folder, r"--seed \d", "--seed 0")
        ),
        r"the command asks for seed=0, the config has 1",
    ),
    "no seed in all commands": (
        lambda record, run: in_all(record, lambda folder: edit_command(folder, r"--seed \d ", "")),
        r"the command asks for seed=0, the config has 1",
    ),
    "a setting in one command": (
        lambda record, run: edit_command(run, "tiny", "tiny --set lr_anvil=0.5 val_tokens=4096"),
        rf"the command asks for lr_anvil=0\.5, the config has {TINY.lr_anvil}",
    ),
    "true settings in one command": (
        lambda record, run: edit_command(
            run, "tiny", f"tiny --set lr_anvil={TINY.lr_anvil:e} skip=(1,3)"
        ),
        "the command differs between",
    ),
    "another preset in all commands": (
        lambda record, run: in_all(
            record, lambda folder: edit_command(folder, "tiny", "speedrun --set steps=12")
        ),
        "the command asks for preset=speedrun, the config has tiny",
    ),
    "another preset in the config": (
        lambda record, run: edit_config(record, run, preset="speedrun"),
        "the run's name has another preset or seed, or none",
    ),
    "no command": (
        lambda record, run: edit_command(run, "--out /mine", "--out"),
        r"no command of train_gpt\.py: argument --out: expected one argument",
    ),
    "profiled when resumed": (profiled_resume, "a run with --profile is no record"),
    # dates
    "no day of the calendar": (
        lambda record, run: renamed(run, "20260101", "20999999"),
        r"not as train_gpt\.py writes it \(time data",
    ),
    "a day to come": (
        lambda record, run: renamed(run, "20260101", "29990101"),
        "its date is in the future",
    ),
    "no date": (
        lambda record, run: renamed(run, "20260101-000000-", ""),
        "the run's name has another preset or seed, or none",
    ),
    "another seed in the name": (
        lambda record, run: renamed(run, "-s0-", "-s5-"),
        "the run's name has another preset or seed, or none",
    ),
    # what ends a tool that does not look
    "nesting": (
        lambda record, run: (run / "run.json").write_text("[" * 100_000 + "\n"),
        r"not as train_gpt\.py writes it \(maximum recursion",
    ),
    "a billion steps": (
        lambda record, run: [
            edit_config(record, run, steps=10**9),
            edit(run / "log.txt", r"step:12/12", f"step:{10**9}/{10**9}", count=0),
        ],
        r"run\.json: config: steps: it cannot be 1000000000",
    ),
    "an endless stage": (
        lambda record, run: edit_config(record, run, extension=-(10**12)),
        r"run\.json: config: extension: it cannot be -1000000000000",
    ),
    "profiled": (
        lambda record, run: edit_command(run, "--out", "--profile --out"),
        "a run with --profile is no record",
    ),
    # what people typed
    "p-value in record.json": (
        lambda record, run: edit_result(record, p_value=1e-9),
        r"record\.json says p_value 1e-09, from the logs it is 0\.00\d+",
    ),
    "times in record.json": (
        lambda record, run: edit_result(record, mean_seconds=1.0),
        r"record\.json says mean_seconds 1\.0, from the logs it is 10\.01",
    ),
    "more in record.json": (
        lambda record, run: edit_json(record / "record.json", rank=1),
        r"record\.json: the trainer writes no 'rank'",
    ),
    "more in its result": (
        lambda record, run: edit_result(record, rank=None),
        r"record\.json says rank None, from the logs it is nothing",
    ),
    "its page": (
        lambda record, run: edit(record / "README.md", "10.01 s", "9.01 s"),
        r"its README\.md above the notes is not as generated",
    ),
    "an author of two lines": (
        lambda record, run: edit_json(record / "record.json", by="me\n| 1 s |"),
        r'record\.json: by: it cannot be "me\\n\| 1 s \|"',
    ),
    "its folder's name": (
        lambda record, run: record.rename(record.with_name("2025-01-01_First")),
        "folder, name and date differ",
    ),
    # files
    "a file missing": (lambda record, run: (run / "metrics.jsonl").unlink(), "not as train_gpt.py"),
    "a file more": (
        lambda record, run: (run / "x.py").write_text(""),
        r"too many or missing: .*/x\.py$",
    ),
    "a file more beside the runs": (
        lambda record, run: (record / "x.py").write_text(""),
        r"too many or missing: x\.py$",
    ),
    "a link to a log": (linked, r"links are no evidence, the files are needed: \['log\.txt'\]"),
    "a link to a run": (
        lambda record, run: [
            run.rename(record.parents[1] / run.name),
            run.symlink_to(record.parents[1] / run.name, target_is_directory=True),
        ],
        "links are no evidence, the files are needed",
    ),
    "a name of Markdown": (
        lambda record, run: edit_json(record / "record.json", name="a](b)"),
        r'record\.json: name: it cannot be "a\]\(b\)"',
    ),
    "another track in record.json": (
        lambda record, run: edit_json(record / "record.json", track="moon"),
        "it is in the folder of no track, or of another than its moon",
    ),
    # JSON that says two things, or none
    "a field twice in run.json": (
        lambda record, run: edit(run / "run.json", "{", '{"val_loss": 1.0, '),
        "not as json.dumps writes it, or a name twice",
    ),
    "a field twice in record.json": (
        lambda record, run: edit(record / "record.json", "{", '{"by": "me", '),
        "not as json.dumps writes it, or a name twice",
    ),
    "a field twice in the metrics": (
        lambda record, run: edit(run / "metrics.jsonl", "{", '{"tokens": 0, '),
        "not as json.dumps writes it, or a name twice",
    ),
    "a line twice in the log's head": (
        lambda record, run: edit(run / "log.txt", "(command: .*)", r"\1\n\1"),
        "log.txt and run.json disagree: command: .* and host: ",
    ),
    "too large a number": (
        lambda record, run: edit(
            run / "metrics.jsonl", r'"train_loss": [\d.]+', '"train_loss": 1e999'
        ),
        "not as json.dumps writes it",
    ),
    "true for a number in run.json": (
        lambda record, run: edit_json(run / "run.json", seed=False),
        "seed: it cannot be false",
    ),
    "true for a number in the metrics": (
        lambda record, run: edit_metrics(run, 1, step=True),
        "step: it cannot be true",
    ),
    "true for a number in record.json": (
        lambda record, run: edit_result(record, seeds=[False, True, 2]),
        r"record\.json says seeds \[False, True, 2\]",
    ),
    "no final loss": (without_loss, "'val_loss' is missing"),
    "hardware of Markdown": (
        lambda record, run: in_all(
            record, lambda folder: edit_facts(folder, host=HOST | {"cpu": "![x](y)"})
        ),
        r'run\.json: host: cpu: it cannot be "!\[x\]\(y\)"',
    ),
    "no number": (
        lambda record, run: edit_metrics(run, -1, val_loss=float("nan")),
        r"metrics\.jsonl: 16: val_loss: not as train_gpt\.py writes it \(Out of range float",
    ),
    "a number that is no whole one": (
        lambda record, run: edit_metrics(run, 1, tokens=1024.0),
        r"metrics\.jsonl: 2: tokens: it cannot be 1024\.0",
    ),
    # what the trainer does not write
    "a field more in run.json": (
        lambda record, run: edit_json(run / "run.json", rank=1),
        "run.json: the trainer writes no 'rank'",
    ),
    "a field more in the metrics": (
        lambda record, run: edit_metrics(run, 3, rank=1),
        r"metrics\.jsonl: 4: the trainer writes no 'rank'",
    ),
    "norms of some steps": (
        lambda record, run: edit(run / "metrics.jsonl", r', "grad_norm": 1\.5', ""),
        "some steps have a grad_norm, and some have none",
    ),
    "a line more in the log": (
        lambda record, run: edit(run / "log.txt", r"\nstep:7/", "\nfaster from here\nstep:7/"),
        r"log\.txt: no line of the trainer: faster from here",
    ),
    "a checkpoint of a step to come": (
        lambda record, run: edit(run / "log.txt", r"\n(step:7/(.*\n)*)(checkpoint.*\n)", r"\n\3\1"),
        r"log\.txt: no line of the trainer: checkpoint:12",
    ),
    "digits of another alphabet": (
        lambda record, run: edit(run / "log.txt", "step:7/12", "step:\u0667/12"),
        r"log\.txt: no line of the trainer: step:\u0667/12",
    ),
    "a separator of lines": (
        lambda record, run: edit(run / "log.txt", r"\nstep:7/", "\u2028step:7/"),
        r"log\.txt: it has the character U\+2028",
    ),
    "lines of another system": (
        lambda record, run: (run / "log.txt").write_bytes(
            (run / "log.txt").read_bytes().replace(b"\n", b"\r\n")
        ),
        r"log\.txt: it has the character U\+000D",
    ),
    "a pipe for a log": (piped, r"log\.txt: it is no file"),
    "a version of nothing": (
        lambda record, run: edit_json(
            run / "run.json", versions={"python": "3.11.9", "jax": "banana", "jaxlib": "0.10.2"}
        ),
        'run.json: versions: jax: it cannot be "banana"',
    ),
    "compiled before it began": (
        lambda record, run: edit_json(run / "run.json", compile_seconds={"grads0": -1.2}),
        "run.json: compile_seconds: it cannot be",
    ),
    "n-grams without room left out of run.json": (
        lambda record, run: edit_json(run / "run.json", dropped_ngrams=0),
        "log.txt, metrics.jsonl and run.json disagree on n-grams that found no room",
    ),
    "n-grams without room left out of the log": (
        lambda record, run: edit(run / "log.txt", r"n-grams that found no room: 1\n", ""),
        "log.txt, metrics.jsonl and run.json disagree on n-grams that found no room",
    ),
    "fewer cores than none": (
        lambda record, run: in_all(
            record, lambda folder: edit_facts(folder, host=HOST | {"cores": -1})
        ),
        "run.json: host: cores: it cannot be -1",
    ),
    "resumed with another source": (
        lambda record, run: resume_silently(record, run, before=f"source: {'0' * 64}\nx = 1\n"),
        "resumed with another source: that is no record",
    ),
    "resumed with other settings": (
        lambda record, run: [
            resume_silently(record, run, after='config: {"log_every": 7}\n'),
            edit_json(run / "run.json", resumed=True, config=as_json(replace(TINY, log_every=7))),
        ],
        "resumed with other settings: that is no record",
    ),
    # sources
    "no source": (lambda record, run: resource(record, ""), "source in log.txt: no trainer"),
    "a source of words": (
        lambda record, run: resource(record, "import sys\nto be faster\n"),
        r"source in log\.txt: not as train_gpt\.py writes it \(invalid syntax",
    ),
    "a source that reads otherwise than it looks": (
        lambda record, run: resource(record, SOURCE + "# \u202e\n"),
        r"log\.txt: it has the character U\+202E",
    ),
    # copies
    "times made from another seed's": (copied_times, "seeds repeat: .* have the same times"),
    "two runs at once": (
        lambda record, run: renamed(next(record.glob("*-s1-*")), "-010000-", "-000005-"),
        r"runs overlap: .*-s1-\w+ began on this machine before .*-s0-\w+ had ended",
    ),
    # pages
    **{
        f"an author of {what}": (
            lambda record, run, by=by: edit_json(record / "record.json", by=by),
            "record.json: by: it cannot be ",
        )
        for what, by in (
            ("two directions", "me \u202eem"),
            ("no width", "m\u200be"),
            ("another alphabet", "m\u0435"),
            ("HTML", "<b>me</b>"),
            ("a table", "me | 1 s"),
            ("a picture", "![me](x)"),
            ("half a quotation", "`me"),
            ("nothing", ""),
        )
    },
    # tokens and predictions
    "a shard that nobody reads": (
        lambda record, run: more_tokens(record, "builtin_train_000002.bin"),
        r"tokens\.json: no record reads .*builtin_train_000002",
    ),
    "a stream of nothing": (
        lambda record, run: write_json(
            record.parents[1] / "tokens.json", {BUILTIN_NAME: BUILTIN, "fineweb": {}}
        ),
        r"tokens\.json: no record reads a stream",
    ),
    "a stream that nobody reads": (
        lambda record, run: more_tokens(record, "fineweb_train_000001.bin", "fineweb"),
        r"tokens\.json: no record reads .*fineweb",
    ),
    "a prediction of half the steps": (
        lambda record, run: edit_prediction(record, '"total_steps": 1194', '"total_steps": 597'),
        r"predicted/v6e-8: preflight\.json: its programs add up to other total_steps$",
    ),
    "a faster prediction": (
        lambda record, run: edit_prediction(record, r'"train_seconds": \d+', '"train_seconds": 99'),
        r"predicted/v6e-8: preflight\.json: its programs add up to other train_seconds$",
    ),
    "half a prediction": (
        lambda record, run: edit_prediction(record, r'"variants": (.*\n)*', "\n"),
        r"predicted/v6e-8: preflight\.json: not as train_gpt\.py writes it",
    ),
    "a version of something in HTML": (
        lambda record, run: edit_prediction(record, '"libtpu"', '"<b>"'),
        r"preflight\.json: versions: the trainer writes no '<b>'",
    ),
    "a prediction for a machine of HTML": (
        lambda record, run: edit_prediction(record, "TPU v6 lite", "<b>TPU</b>"),
        r"predicted/v6e-8: preflight\.json: device_kind: it cannot be",
    ),
    "a field missing": (lambda record, run: write_json(run / "run.json", {}), "is missing"),
}


@pytest.mark.parametrize("towards", [0, math.inf])
def test_predictions_of_a_python_that_adds_otherwise_are_accepted(records, towards):
    path = records / "predicted/v6e-8/preflight.json"
    totals = json.loads(path.read_text())["predicted"]
    for name in {*C.SUMS, "sum_seconds"}:
        totals[name] = math.nextafter(totals[name], towards)
    edit_json(path, predicted=totals)
    assert tool(records, "check") == 0


@pytest.mark.parametrize("way", TAMPERED)
def test_a_record_that_was_tampered_with_is_refused(records, capsys, way):
    tamper, reason = TAMPERED[way]
    record = next((records / "cpu").glob("*_First"))
    run = next(record.glob("*-s0-*"))
    tamper(record, run)
    said = refusal(records, capsys)
    assert re.search(reason, said), said
    assert re.match(r"refused: (cpu/\S+_First|predicted/v6e-8|tokens\.json): ", said)


@pytest.mark.parametrize("name", C.FILES)
def test_a_file_of_many_lines_is_refused_at_once(records, capsys, name):
    """By its size: the trainer's largest runs leave a fourth of that."""
    run = next((records / "cpu").glob("*_First/*-s0-*"))
    (run / name).write_text("0\n" * 6_500_000)
    began = time.process_time()
    assert refusal(records, capsys).endswith(f"{name}: it is larger than 4 MiB")
    assert time.process_time() - began < 3


def test_losses_that_are_not_good_enough(records, tmp_path, capsys):
    for losses, reason in (
        ((0.01, 0, 0.02), rf"the mean loss {TARGET + 0.01:.4f} is above the target {TARGET}$"),
        ((-0.01, -0.1, 0), rf"p = 0\.\d+ that the mean loss is not below {TARGET}, not < 0\.01"),
    ):
        losses = [TARGET + x for x in losses]
        runs = runs_of(tmp_path / reason[:8], losses, seconds=5.0, day=3)
        about = ["--track", "cpu", "--name", "X", "--by", "me", "--what", "it"]
        assert re.search(reason, refusal(records, capsys, "add", *runs, *about))
        forged = forge(records, runs, "X", beats="2026-01-02_Second")
        assert re.search(reason, refusal(records, capsys))
        shutil.rmtree(forged)


def test_times_that_are_not_good_enough(records, tmp_path, capsys):
    for seconds, spread, reason in (
        (8.5, 0.01, r"not faster than the standing record: 8\.51 s, that one takes 8\.01 s"),
        (7.0, 0.9, r"not faster than the standing record beyond chance: 7\.9 s against 8\.01 s"),
    ):
        runs = runs_of(tmp_path / str(seconds), seconds=seconds, spread=spread, day=3)
        about = ["--track", "cpu", "--name", "X", "--by", "me", "--what", "it"]
        assert re.search(reason, refusal(records, capsys, "add", *runs, *about))
        forged = forge(records, runs, "X", beats="2026-01-02_Second")
        assert re.search(reason, refusal(records, capsys))
        shutil.rmtree(forged)


def test_records_of_a_class_are_one_chain(records, tmp_path, capsys):
    runs = runs_of(tmp_path, seconds=5.0, day=3)
    for beats, reason in (
        ("2026-01-01_First", "another record beats 2026-01-01_First too: add anew"),
        (None, "another record beats nothing too: add anew"),
        ("2026-01-09_None", "it beats 2026-01-09_None, which is no record of its class"),
    ):
        forged = forge(records, runs, "X", beats=beats)
        assert reason in refusal(records, capsys)
        shutil.rmtree(forged)


def test_a_rerun_is_no_record_and_none_is_older_than_what_it_beats(records, tmp_path, capsys):
    """However fast the machine was that day."""
    about = ["--track", "cpu", "--name", "X", "--by", "me", "--what", "it"]
    better = {"seconds": 5.0, "source": BETTER}
    for i, (changes, reason) in enumerate(
        (
            ({"day": 3, **better}, "nothing was changed since 2026-01-02_Second"),
            ({"day": 1, "seconds": 5.0}, "of 2026-01-01, older than 2026-01-02_Second"),
        )
    ):
        runs = runs_of(tmp_path / str(i), **changes)
        assert reason in refusal(records, capsys, "add", *runs, *about)
        forged = forge(records, runs, "X", beats="2026-01-02_Second")
        assert reason in refusal(records, capsys)
        shutil.rmtree(forged)
    faster = runs_of(tmp_path / "flags", day=3, environment={"XLA_FLAGS": "--fast"}, **better)
    assert add(records, faster, "Flags") == 0 and tool(records, "check") == 0


def test_a_record_outside_the_tracks_is_refused(records, capsys):
    shutil.copytree(next((records / "cpu").glob("*_First")), records / "moon/2026-01-01_First")
    assert "moon/2026-01-01_First: it is in the folder of no track" in refusal(records, capsys)


def test_classes_of_hardware_do_not_compete(records, tmp_path):
    """A slower machine has its own first record; blanks make no other machine."""
    host = HOST | {"cpu": " A  slow CPU "}
    assert add(records, runs_of(tmp_path, seconds=99.0, host=host), "Slow") == 0
    assert tool(records, "check") == 0
    record = json.loads(next((records / "cpu").glob("*_Slow/record.json")).read_text())
    assert record["beats"] is None and record["result"]["hardware"] == "A slow CPU, 2 cores"


def test_a_corpus_that_is_not_known_needs_to_be_pinned(records, tmp_path, capsys):
    data = BUILTIN | {"builtin_val_000000.bin": shard("of another Python", 300_000)}
    runs = runs_of(tmp_path, data=data)
    about = ["--track", "cpu", "--name", "New", "--by", "me", "--what", "it"]
    assert "is not in tokens.json" in refusal(records, capsys, "add", *runs, *about)
    assert add(records, runs, "New", "cpu", "--pin") == 0 and tool(records, "check") == 0
    for name in ("builtin_train_000001.bin", "builtin_train_000002.bin"):  # what is pinned stays
        changed = data | {name: shard("easier", 4_000_000)}
        runs = runs_of(tmp_path / name, seconds=5.0, data=changed, day=2)
        said = refusal(records, capsys, "add", *runs, *about, "--pin")
        assert "token stream other than the rules'" in said
    runs = runs_of(tmp_path / "bad", data={name: {"bytes": 400_000} for name in BUILTIN})
    assert "run.json: data: it cannot be" in refusal(records, capsys, "add", *runs, *about, "--pin")
    twice = {name: BUILTIN["builtin_train_000001.bin"] for name in BUILTIN}
    runs = runs_of(tmp_path / "twice", data=twice)
    said = refusal(records, capsys, "add", *runs, *about, "--pin")
    assert "or it trains on the validation's" in said
    small = BUILTIN | {"builtin_val_000000.bin": shard("little", 2048)}
    runs = runs_of(tmp_path / "small", data=small)
    assert "shard holds 512 tokens, too few for 98304" in refusal(
        records, capsys, "add", *runs, *about, "--pin"
    )


def test_the_track_of_a_tpu(records, tmp_path, capsys):
    cfg = replace(T.PRESETS["speedrun"], steps=20, extension=2)
    same = {"cfg": cfg, "data": FINEWEB, "devices": V6E, "losses": (3.270, 3.271, 3.272)}
    about = ["--track", "v6e-8", "--name", "X", "--by", "me", "--what", "it", "--pin"]
    for i, (changes, reason) in enumerate(
        (
            ({"devices": V6E | {"count": 4}}, "4 x TPU v6 lite is not the hardware of this track"),
            ({"devices": None}, "1 x cpu is not the hardware of this track"),
            ({"cfg": TINY}, "wrong number of validation tokens: 98304, not 10485760"),
            ({"data": BUILTIN}, "there is no fineweb_val_000000.bin"),
            ({"cfg": replace(cfg, steps=900)}, "trained on .* tokens, its shards hold 100000000"),
        )
    ):
        runs = runs_of(tmp_path / str(i), **(same | changes))
        assert re.search(reason, refusal(records, capsys, "add", *runs, *about))
    assert add(records, runs_of(tmp_path / "good", **same), "Good", "v6e-8", "--pin") == 0
    assert tool(records, "check") == 0


def test_the_track_of_eight_gpus_is_one_process_on_whole_gpus(records, tmp_path, capsys):
    cfg = replace(T.PRESETS["speedrun"], steps=20, extension=2)
    same = {"cfg": cfg, "data": FINEWEB, "losses": (3.270, 3.271, 3.272)}
    h100 = {"kind": "NVIDIA H100 80GB HBM3", "count": 8, "platform": "gpu", "processes": 1}
    about = ["--track", "8xh100", "--name", "X", "--by", "me", "--what", "it", "--pin"]
    for i, (changes, reason) in enumerate(
        (
            ({"processes": 8}, "8 processes: one drives all devices on this track"),
            ({"kind": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}, "is not the hardware of this track"),
        )
    ):
        runs = runs_of(tmp_path / str(i), devices=h100 | changes, **same)
        assert reason in refusal(records, capsys, "add", *runs, *about)
    runs = runs_of(tmp_path / "good", devices=h100, **same)
    assert add(records, runs, "Good", "8xh100", "--pin") == 0 and tool(records, "check") == 0


def test_the_track_that_counts_steps(records, tmp_path, capsys):
    """No hardware, no seconds: fewer steps, and (target - mean) * sqrt(n) >= 0.004."""
    same = {"cfg": COUNTING, "data": FINEWEB, "losses": (3.2770, 3.2775, 3.2776)}
    about = ["--track", "steps", "--name", "X", "--by", "me", "--what", "it", "--pin"]
    ramp = replace(COUNTING, stages=T.PRESETS["speedrun"].stages)
    for i, (changes, reason) in enumerate(
        (
            ({"losses": (3.278, 3.279, 3.278)}, r"\* sqrt\(n\) is 0\.0029, less than 0\.004"),
            ({"cfg": ramp}, "every step of this track takes 524288 tokens, not "),
            ({"cfg": replace(COUNTING, width=640)}, "width is 768 on this track, not 640"),
            (
                {"cfg": replace(COUNTING, layers=COUNTING.layers[:-1])},
                "layers.10 is long values gated mlps=1 on this track, not none",
            ),
        )
    ):
        runs = runs_of(tmp_path / str(i), **(same | changes))
        assert re.search(reason, refusal(records, capsys, "add", *runs, *about))
    assert add(records, runs_of(tmp_path / "a", **same), "A", "steps", "--pin") == 0
    again = runs_of(tmp_path / "b", seconds=1.0, devices=V6E, **same)
    assert "20 steps, that one takes 20 steps" in refusal(records, capsys, "add", *again, *about)
    fewer = same | {"cfg": replace(COUNTING, steps=19)}
    assert add(records, runs_of(tmp_path / "c", seconds=99.0, **fewer), "C", "steps") == 0
    assert tool(records, "check") == 0


def test_rules_that_the_tool_repeats_are_those_of_the_presets():
    """It does not import the trainer, so that old records outlive its changes; nothing drifts."""
    for name, preset in (("cpu", "tiny"), ("v6e-8", "speedrun"), ("steps", "speedrun")):
        track, cfg = C.TRACKS[name], T.PRESETS[preset]
        assert track.val_tokens == cfg.val_tokens
        assert track.target == (3.95 if name == "cpu" else cfg.target)  # what `tiny` once had
    config = json.loads(json.dumps(asdict(T.PRESETS["speedrun"])))
    assert C.architecture(config) == C.ARCHITECTURE
    for cfg in (*T.PRESETS.values(), COUNTING, TINY):
        plan = C.planned(json.loads(json.dumps(asdict(cfg))))
        assert plan[-1] == (cfg.steps, True, cfg.total_tokens)
        want = np.cumsum([0] + [T.stage_at(cfg, step).batch_tokens for step in range(cfg.steps)])
        assert all(tokens == want[step] for step, _, tokens in plan)
        validations = 1 + sum(T.is_due(cfg.val_every, step - 1, step) for step in range(cfg.steps))
        assert sum(validates for _, validates, _ in plan) == validations


def test_what_memory_forced_and_older_formats_are_accepted(tmp_path):
    """A line of settings after each head; a run.json that has neither settings nor choices."""
    root = empty(tmp_path / "records")
    runs = runs_of(tmp_path / "runs")
    for run in runs:
        resume_silently(None, run)
        edit_json(run / "run.json", resumed=True, settings=OTHER)
        forced(run, SETTINGS)  # of the machine before
        edit(run / "log.txt", r"\nstep:6/", f"\nsettings: {json.dumps(OTHER)}\nstep:6/")
    assert add(root, runs, "Forced") == 0 and tool(root, "check") == 0
    (old,) = runs_of(tmp_path / "old", losses=(GOOD,))
    facts = json.loads((old / "run.json").read_text())
    del facts["settings"], facts["choices"]
    facts["config"]["attention"] = "auto"  # a field that is gone
    write_json(old / "run.json", facts)
    edit(old / "log.txt", r"\nchoices: .*", "")
    edit(old / "log.txt", r"\nconfig: .*", f"\nconfig: {json.dumps(facts['config'])}")
    assert C.read_run(old).facts == facts


def test_a_run_on_more_devices_than_rows_says_how_they_were_cut(tmp_path):
    (run,) = runs_of(tmp_path, losses=(GOOD,))
    cut = json.loads((run / "run.json").read_text())["choices"]
    cut |= {"rows": {"count": 16, "tokens": [64, 128, 192, 128]}}
    edit_json(run / "run.json", choices=cut)
    edit(run / "log.txt", r"\nchoices: .*", f"\nchoices: {json.dumps(cut)}")
    assert C.read_run(run).facts["choices"] == cut
    edit_json(run / "run.json", choices=cut | {"rows": {"count": 16, "tokens": "64"}})
    with pytest.raises(C.Refused, match="tokens"):
        C.read_run(run)


def test_a_run_that_was_resumed_and_says_so_is_marked(original, tmp_path, capsys):
    root = empty(tmp_path / "records")
    runs = runs_of(tmp_path / "runs")
    resume_silently(None, runs[1])
    edit_json(runs[1] / "run.json", resumed=True)
    assert add(root, runs, "Resumed") == 0 and tool(root, "check") == 0
    page = next((root / "cpu").glob("*/README.md")).read_text()
    assert f"**Resumed** after an interruption: {runs[1].name}" in page
    (record,) = C.all_valid(root)
    assert "3 (1 resumed)" in L.record_tables(root, [record])


def test_numbers_are_those_of_scipy(original):
    first = next(r for r in C.all_valid(original) if r.fields["name"] == "First").result
    losses = [GOOD, round(GOOD + 0.005, 6), round(GOOD + 0.01, 6)]
    assert first["losses"] == losses and first["seeds"] == [0, 1, 2]
    # Student's t with two degrees of freedom has a closed form.
    t = (0.005 - 0.05) / (0.005 / np.sqrt(3))
    assert first["p_value"] == pytest.approx(0.5 + t / (2 * np.sqrt(2 + t * t)), rel=1e-2)
    assert first["mean_seconds"] == 10.01 and first["sd_seconds"] == 0.01
    assert first["command"] == "python train_gpt.py tiny" and first["date"] == "2026-01-01"


def test_add_writes_nothing_when_it_refuses(records, tmp_path, capsys):
    before = sorted(records.rglob("*"))
    runs = runs_of(tmp_path, seconds=9.0)
    for name, reason in (
        ("Slow", "not faster"),
        ("a/b", 'name: it cannot be "a/b"'),
        ("First", "is there already"),
    ):
        about = ["--track", "cpu", "--name", name, "--by", "me", "--what", "it"]
        assert reason in refusal(records, capsys, "add", *runs, *about)
    said = refusal(records, capsys, "add", *runs[:1], *about)
    assert "one run has no p-value" in said
    assert sorted(records.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        ["--", "x"],
        ["add"],
        ["add", "x", "--track", "moon"],
        ["compare", "a.py"],
        ["check", "--", "x"],
        ["frobnicate"],
    ],
)
def test_a_wrong_command_line_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        L.main(words)
    assert end.value.code == 2


# ------------------------------------------------------------------------------------------------
# The page and the plots
# ------------------------------------------------------------------------------------------------


def test_table_has_the_standing_record_first_and_nothing_of_a_person_breaks_it(original):
    records = C.all_valid(original)
    text = L.record_tables(original, records)
    rows = [line for line in text.splitlines() if "A. Stranger" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| 2", "| 1"]
    assert "8.01 s ± 0.01" in rows[0] and "[Second](cpu/2026-01-02_Second/README.md)" in rows[0]
    assert f"### `cpu`: A CPU, 2 cores, tokens `{BUILTIN_NAME}`" in text
    assert L.cell("a|b") == "a\\|b"
    names = "AMD EPYC, 2 cores", "AMD EPYC., 2 cores", "amd epyc, 2 cores", "AMD EPYC, -2 cores"
    assert len({L.plot_path(original, ("cpu", name, "x")) for name in names}) == len(names)


def test_every_track_is_in_the_first_table_with_its_standing_record(original):
    lines = L.track_table(C.all_valid(original)).splitlines()[2:]
    rows = {line.split("`")[1]: line for line in lines}
    assert [*rows] == [*C.TRACKS]
    assert rows["cpu"].endswith("| seconds of training | **8.01 s ± 0.01** on A CPU, 2 cores |")
    assert rows["steps"].endswith("| steps | No record yet: be the first. |")


def test_without_a_command_it_prints_the_standings(original, capsys):
    capsys.readouterr()
    assert tool(original) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    at = lines.index(f"cpu: the demo corpus to {TARGET} on a CPU")
    assert lines[at + 1] == f"  A CPU, 2 cores, tokens {BUILTIN_NAME}"
    assert re.match(
        rf"   2  8\.01 s ± 0\.01  12 steps  loss {GOOD + 0.005:.4f} .* Second, by A. Str",
        lines[at + 2],
    )
    assert lines[at + 3].startswith("   1  10.01 s") and lines[at + 4].startswith("steps: ")
    assert lines[at + 5] == "  no record yet: be the first"
    at = lines.index("predicted by the compiler, timed by nobody:")
    assert all("speedrun" in line for line in lines[at + 1 :]) and len(lines) > at + 1


def test_standings_of_a_broken_record_are_refused(records, capsys):
    next((records / "cpu").glob("*_First/*-s0-*/metrics.jsonl")).unlink()
    capsys.readouterr()
    assert tool(records) == 1
    said = capsys.readouterr()
    assert said.out == "" and re.match(r"refused: cpu/\S+_First: .*metrics\.jsonl", said.err)


def prediction(root: Path, target: str, names=("grads0", "anvil"), **predicted):
    """A preflight.json with these programs, of which the first needs 2 GiB and the others 1."""
    variants = [
        {"name": name, "bytes": {"peak": 2**30 * (1 + (i == 0))}, "resident_bytes": 2**29}
        for i, name in enumerate(names)
    ]
    whole = {"train_seconds": 100.0, "train_link_floor_seconds": 20.0}
    report = {
        "preset": "speedrun",
        "device_kind": target,
        "devices": 8,
        "versions": {"jax": "0.10.2"},
        "total_steps": 1194,
        "total_tokens": 395_837_440,
        "variants": variants,
        "predicted": whole | {"train_moved_floor_seconds": 3.25} | predicted,
    }
    path = root / "predicted" / target / "preflight.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(report))


def test_predictions_lead_with_the_sum_of_computation_links_and_moves(tmp_path):
    prediction(tmp_path, "A", more_seconds=123.25)
    prediction(tmp_path, "B", train_seconds=None, train_moved_floor_seconds=None)
    head, _, first, second = L.predicted_table(tmp_path).splitlines()
    assert head.startswith("| hardware | preset | in all | predicted | links | moves | steps |")
    link = "[speedrun](predicted/{}/preflight.json)"
    want = f"| 8 x A | {link.format('A')} | **123.2 s** | 100.0 s | 20.0 s | 3.2 s | 1,194 |"
    assert first == f"{want} 395,837,440 | 2.5 | jax 0.10.2 |"
    assert second.startswith(f"| 8 x B | {link.format('B')} | **unknown** | unknown | unknown |")
    assert L.predicted_table(tmp_path / "none") == "None yet.\n"
    path = tmp_path / "predicted/A/preflight.json"
    edit_json(path, predicted=None)  # of some programs
    with pytest.raises(C.Refused, match="has no totals of a run: preflight.py without --program"):
        L.predicted_table(tmp_path)


def test_render_is_deterministic_and_knows_when_it_is_stale(records, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert "README.md is stale" in refusal(records, capsys, "render", "--check")
    assert tool(records, "render") == 0
    (plot,) = (x for x in records.rglob("*.png") if "predicted" not in x.parts)
    first = plot.read_bytes(), (records / "README.md").read_bytes()
    assert first[0].startswith(b"\x89PNG") and len(first[0]) > 10_000
    assert tool(records, "render", "--check") == 0
    black = first[0].replace(b"IDAT", b"IDAX", 1)
    for wrong in (first[0][8:], first[0][: len(first[0]) // 2], first[0][:-12], black, b"", None):
        plot.unlink() if wrong is None else plot.write_bytes(wrong)  # most have the digest
        assert f"the plot {plot.name} is stale" in refusal(records, capsys, "render", "--check")
    assert tool(records, "render") == 0
    assert (plot.read_bytes(), (records / "README.md").read_bytes()) == first
    assert add(records, runs_of(tmp_path, seconds=5.0, day=3), "Third") == 0
    assert "is stale" in refusal(records, capsys, "render", "--check")
    assert tool(records, "render") == 0 and plot.read_bytes() != first[0]


def test_page_of_this_repository_is_not_stale():
    assert L.main(["check"]) == 0 and L.main(["render", "--check"]) == 0


# ------------------------------------------------------------------------------------------------
# Running sources
# ------------------------------------------------------------------------------------------------

STUB = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from runs import write_run
args = sys.argv[1:]
assert Path("data/builtin_corpus.py").exists()
seed, out = (args[args.index(name) + 1] for name in ("--seed", "--out"))
loss = {loss} + int(seed) / 1000
config, source = json.loads({config!r}), Path(__file__).read_text()
command = " ".join(["python", *sys.argv])
write_run(Path(out), int(seed), config, loss, {seconds}, source=source, command=command)
"""


def stub(path: Path, loss: float, seconds: float, **changes) -> Path:
    """A source that trains nothing, and writes a run in no time; `changes` of its config."""
    config = json.dumps(as_json(TINY) | changes)
    path.write_text(STUB.format(tests=str(ROOT / "tests"), **locals()))
    return path


def test_compare_alternates_and_says_ratio_and_difference(tmp_path, capsys):
    base = stub(tmp_path / "base.py", 3.90, "10 + 0.01 * int(seed)")
    cand = stub(tmp_path / "cand.py", 3.88, "8 + 0.02 * int(seed)")
    out = tmp_path / "kept"
    words = "--runs", "3", "--out", str(out), "--", "tiny", "--set", "steps=9"
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
    command = json.loads(runs[0].read_text())["command"].split()
    assert command[:5] == ["python", "train_gpt.py", "tiny", "--set", "steps=9"]
    names = "base", "cand", "cand", "base", "base", "cand"
    assert order == list(zip(names, (0, 0, 1, 1, 2, 2), strict=True))


def test_compare_of_settings_and_of_records(original, tmp_path, capsys):
    """A side is a file, a file with arguments of its own, or a record with its own arguments."""
    source = stub(tmp_path / "base.py", 3.90, 10)
    assert L.side_of(str(source), ["tiny"]) == (source.read_bytes(), ["tiny"])
    words = f"{source} --set steps=9"
    assert L.side_of(words, ["tiny"])[1] == ["tiny", "--set", "steps=9"]
    record = next((original / "cpu").glob("*_Second"))
    assert L.side_of(str(record), ["speedrun"]) == (BETTER.encode(), ["tiny"])


def test_compare_says_in_a_line_what_went_wrong(tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('error: no memory')")
    said = refusal(tmp_path, capsys, "compare", broken, broken, "--runs", "2")
    assert said == "refused: base, seed 0: exit status 1, it said: error: no memory"
    assert "--runs: two pairs" in refusal(
        tmp_path, capsys, "compare", broken, broken, "--runs", "1"
    )
    missing = tmp_path / "missing.py"
    assert "No such file" in refusal(tmp_path, capsys, "compare", missing, broken)
    base, cand = stub(tmp_path / "a.py", 3.9, 10), stub(tmp_path / "b.py", 3.8, 10, val_tokens=4096)
    said = refusal(tmp_path, capsys, "compare", base, cand, "--runs", "2")
    assert "base and cand have different val_tokens: their losses cannot be compared" in said


def test_reproduce_runs_the_records_own_source(tmp_path, capsys):
    root, source = empty(tmp_path / "records"), stub(tmp_path / "a.py", GOOD, 10)
    assert L.main(["compare", str(source), str(source), "--out", str(tmp_path / "a")]) == 0
    assert add(root, sorted((tmp_path / "a/base").iterdir()), "Stub") == 0
    (record,) = (root / "cpu").iterdir()
    capsys.readouterr()
    assert tool(root, "reproduce", record, "--runs", "2") == 0
    said = capsys.readouterr().out.splitlines()
    loss = f"loss {GOOD:.4f}, recorded {GOOD:.4f}"
    assert said[0].startswith(f"seed 0: {loss}; 10.00 s on A CPU, 2 cores,")
    assert said[0].endswith("equal to the last digit") and said[-1] == "reproduced"


@pytest.mark.parametrize("runs", ["0", "-1", "4"])
def test_reproduce_refuses_a_number_of_runs_that_the_record_does_not_have(tmp_path, capsys, runs):
    root = empty(tmp_path / "records")
    source = stub(tmp_path / "a.py", GOOD, 10).read_text()
    assert add(root, runs_of(tmp_path / "runs", source=source), "Some") == 0
    (record,) = (root / "cpu").iterdir()
    said = refusal(root, capsys, "reproduce", record, "--runs", runs)
    assert f"--runs {runs}: the record has 1 to 3" in said


def test_reproduce_refuses_a_loss_that_the_source_does_not_reach(tmp_path, capsys):
    root = empty(tmp_path / "records")
    source = stub(tmp_path / "a.py", GOOD + 0.04, 10).read_text()
    runs = runs_of(tmp_path / "runs", (GOOD - 0.1, GOOD - 0.09, GOOD - 0.08), source=source)
    assert add(root, runs, "Lucky") == 0
    (record,) = (root / "cpu").iterdir()
    said = refusal(root, capsys, "reproduce", record)
    words = f"loss {GOOD + 0.04:.4f} is not within .* recorded mean {GOOD - 0.09:.4f}"
    assert re.search(f"not reproduced: {words}", said)


@pytest.mark.slow
def test_a_strangers_path_from_training_to_the_table(tmp_path):
    """In a clone without records: two seeds of a small `tiny`, add, check, render, reproduce."""
    pytest.importorskip("matplotlib")
    clone = tmp_path / "clone"
    for part in ("data", "records"):
        ours = shutil.ignore_patterns(*C.TRACKS, "*.bin")
        shutil.copytree(ROOT / part, clone / part, ignore=ours)
    (clone / "records/tokens.json").write_text("{}\n")  # as there are no records
    # What so few steps cannot reach, and what takes long: on this track, and in its preset.
    for name in ("train_gpt.py", "records/checks.py"):
        text = (ROOT / name).read_text()
        easier = text.replace("target=3.95", "target=9.5").replace("98_304", "4096")
        (clone / name).write_text(easier)
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

    short = "steps=16 extension=2 momentum_warmup=2 momentum_cooldown=1 event_change=4".split()
    short += "sample_tokens=0 val_every=0 width=32 mlp_width=64 ngram_rows=2048".split()
    short += ["loss_chunk=512", "target=9.5"]  # the track's target, which is not the preset's
    # All stages alike, so that they compile to one program.
    alike = "batch_tokens=1024", "row_tokens=128", "windows=64,128", "weights=1,", "weights_end=1,"
    alike += "prefix=0,", "candidates=512,"
    short += [f"stages.{i}.{what}" for i in range(len(TINY.stages)) for what in alike]
    for seed in "01":
        run("train_gpt.py", "--set", *short, "--seed", seed)
    runs = sorted((clone / "logs").iterdir())
    board = "records/leaderboard.py"
    about = ["--track", "cpu", "--name", "Mine", "--by", "me", "--what", "my first"]
    run(board, "add", *runs, *about, "--pin")
    assert "1 record is valid" in run(board, "check")
    run(board, "render")
    run(board, "render", "--check")
    page = (clone / "records/README.md").read_text()
    assert re.search(r"\| 1 \| \d+\.\d\d s ± \d.* \| 16 \| .*\[Mine\]", page)
    (record,) = (path for path in (clone / "records/cpu").iterdir() if path.is_dir())
    said = run(board, "reproduce", record)
    assert "training losses equal to the last digit" in said and "reproduced" in said
