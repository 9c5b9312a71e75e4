"""Records: collect timed runs, check them, rank them, plot them, run them again.

    python records/leaderboard.py add RUN_DIR... --track T --name NAME --by WHO --what TEXT
    python records/leaderboard.py check          # everything is derived anew from the logs
    python records/leaderboard.py render         # the tables in records/README.md, and the plots
    python records/leaderboard.py reproduce records/T/DATE_NAME
    python records/leaderboard.py compare BASE.py CAND.py --runs N -- ARGS

A record is a folder records/TRACK/DATE_NAME/ with

    record.json           what its author says, and what the tool derived from the logs
    README.md             the same for people; below the line NOTES there is room for prose
    RUN_ID/               one folder for each run, as train_gpt.py wrote it:
        log.txt           the source, what the run stood on, a line for every step
        metrics.jsonl     the same steps for machines, with more digits
        run.json          config, seed, hashes, versions, hardware, totals

Nothing that a person typed counts as evidence: `check` derives every number from the logs and
compares. It neither imports nor executes a train_gpt.py, neither the record's nor today's. What it
must know of a run (how many steps, their tokens, when it validates) follows from a few fields of
the config that the run itself wrote down, so that a record stays checkable after the trainer has
moved on, and checking a stranger's record is safe. `reproduce` and `compare` do execute sources.

The rules are in records/README.md. A refusal is one line with its reason and exit status 1; a wrong
command line is exit status 2.
"""

import argparse
import contextlib
import hashlib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
FILES = ("log.txt", "metrics.jsonl", "run.json")
NOTES = "<!-- Notes of the author from here on; what stands above is generated. -->\n"
MARKERS = "<!-- leaderboard: begin, generated -->\n", "<!-- leaderboard: end -->\n"
P_VALUE = 0.01  # of the mean loss, and of the gain in time over the standing record
STEP_MARGIN = 0.004  # (target - mean loss) * sqrt(runs), where steps are counted
COMPILER = "XLA_FLAGS", "LIBTPU_INIT_ARGS"  # the same in all runs of a record
REPEATED = (*COMPILER, "JAX_PLATFORMS")  # `reproduce` sets them as they were
LATE_MS = 500.0  # between the time in metrics.jsonl and the one in the line of log.txt after it


class Refused(Exception):
    """Why something is no record: one line."""


def need(holds: bool, reason: str):
    """Refuse for `reason` unless it holds."""
    if not holds:
        raise Refused(reason)


@contextlib.contextmanager
def about(what):
    """Begin the reasons of refusals inside with `what`, unreadable files among them."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{what}: {error}") from None
    except KeyError as error:
        raise Refused(f"{what}: {error} is missing") from None
    except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise Refused(f"{what}: not as train_gpt.py writes it ({reason})") from None


# ------------------------------------------------------------------------------------------------
# Tracks: what each one fixes. What is not named here is free.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Track:
    """The rules of a track, as far as a log can be held against them."""

    title: str
    target: float = 3.28
    val_tokens: int = 10_485_760
    corpus: str = "fineweb"  # what the names of its shards begin with
    shard_bytes: int = 1024 + 2 * 100_000_000  # of every shard; 0: any
    corpora: bool = False  # many, each a competition of its own, named by its validation shard
    platform: str = ""  # of jax; "": any
    kind: str = ""  # part of the name of the devices
    devices: int = 0  # how many; 0: any number
    batch_tokens: int = 0  # of every step. If not 0, steps are counted and not seconds


TRACKS = {
    "v6e-8": Track("FineWeb to 3.28 on a TPU v6e-8", platform="tpu", kind="TPU v6 lite", devices=8),
    "8xh100": Track("FineWeb to 3.28 on eight H100s", platform="gpu", kind="H100", devices=8),
    "1xgpu": Track("FineWeb to 3.28 on one GPU", platform="gpu", devices=1),
    "cpu": Track(
        "the demo corpus to 3.95 on a CPU",
        target=3.95,
        val_tokens=98_304,
        corpus="builtin",
        shard_bytes=0,
        corpora=True,
        platform="cpu",
    ),
    "steps": Track("FineWeb to 3.28 in the fewest steps", batch_tokens=524_288),
}
# What the track `steps` fixes beside the batch: the architecture of the preset `speedrun`.
ARCHITECTURE = {
    "layers": 11,
    "width": 768,
    "heads": 6,
    "mlp_width": 3072,
    "vocab": 50304,
    "bigram_rows": 251_520,
    "long_layers": [3, 10],
    "paired_layers": [0, 2, 5, 9],
    "value_layers": [1, 2, 8, 9, 10],
    "skip": [3, 6],
    "backout": 7,
}


# ------------------------------------------------------------------------------------------------
# One run: its three files, and whether they agree
# ------------------------------------------------------------------------------------------------

RULE = re.compile(rb"^={100}\n", re.M)
STEP = re.compile(
    r"step:(\d+)/(\d+) (?:val_loss:(\d+\.\d{4}) )?train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
)


@dataclass(frozen=True)
class Run:
    """What one run left behind."""

    folder: Path
    source: bytes  # as its log has it
    command: str  # that began it; a resumed run's run.json has the last one
    facts: dict  # run.json
    metrics: list[dict]  # metrics.jsonl

    @property
    def loss(self) -> float:
        """The final validation loss."""
        return self.metrics[-1]["val_loss"]

    @property
    def seconds(self) -> float:
        """The training time."""
        return self.metrics[-1]["train_time_ms"] / 1000

    def losses(self, kind: str) -> list[tuple[float, float, float]]:
        """(seconds, tokens, loss) at every step with a loss of this kind."""
        rows = [row for row in self.metrics if kind in row]
        return [(row["train_time_ms"] / 1000, row["tokens"], row[kind]) for row in rows]


def planned(config: dict) -> list[tuple[int, bool, int]]:
    """(steps done, whether it is a validation, tokens so far) of every line of a whole run.

    These fields of the config are part of the format of logs: steps, extension, val_every, and of
    the stages share and batch_tokens.
    """
    steps, stages, period = config["steps"], config["stages"], config["val_every"]
    ends = accumulate(stage["share"] for stage in stages)
    ends = [round(end * (steps - config["extension"])) for end in ends][:-1] + [steps]
    spans = [end - start for start, end in pairwise([0, *ends])]
    sizes = [stage["batch_tokens"] for stage in stages]
    tokens = [0, *accumulate(n for n, span in zip(sizes, spans, strict=True) for _ in range(span))]
    plan = []
    for step in range(steps + 1):
        if step > 0:
            plan.append((step, False, tokens[step]))
        if step == steps or (period and step % period == 0):
            plan.append((step, True, tokens[step]))
    return plan


def parse_json(text: str):
    """JSON without NaN and infinities, which Python would let through."""

    def refuse(name):
        raise ValueError(f"a number is {name}")

    return json.loads(text, parse_constant=refuse)


def read_run(folder: Path) -> Run:
    """The run in `folder`; Refused if it is not whole, or if its files contradict each other."""
    with about(folder.name):
        log = (folder / "log.txt").read_bytes()
        source, *sections = RULE.split(log)
        source = source.removesuffix(b"\n")  # the log puts one behind it
        heads = [part.decode().splitlines() for part in sections[::2]]
        lines = [line for part in sections[1::2] for line in part.decode().splitlines()]
        facts = parse_json((folder / "run.json").read_text())
        metrics = (folder / "metrics.jsonl").read_text().splitlines()
        named = [dict(line.split(": ", 1) for line in head if ": " in line) for head in heads]
        run = Run(folder, source, named[0]["command"], facts, [*map(parse_json, metrics)])
        need(facts["run_id"] == folder.name, f"run.json is of another run, {facts['run_id']}")
        check_heads(run, heads, named)
        check_steps(run, lines)
        return run


def check_heads(run: Run, heads: list[list[str]], named: list[dict]):
    """What log.txt says before its steps, and again after each resume, is what run.json says."""
    facts, devices = run.facts, run.facts["devices"]
    digest = hashlib.sha256(run.source).hexdigest()
    need(
        digest == facts["source_sha256"],
        f"the source in log.txt has sha256 {digest[:12]}, run.json says "
        f"{facts['source_sha256'][:12]}",
    )
    resumes = sum(head[0] == "resumed" for head in heads)
    need(len(heads) == 1 + resumes, "log.txt holds more than one run")
    need(
        facts["resumed"] is (resumes > 0),
        f"log.txt was resumed {resumes} times, run.json says resumed: {facts['resumed']}",
    )
    said = [f"{package} {version}" for package, version in facts["versions"].items()]
    said.append(f"{devices['count']} x {devices['kind']} ({devices['platform']})")
    for head, values in zip(heads, named, strict=True):
        missing = [line for line in said if line not in head]
        need(not missing, f"log.txt and run.json disagree on versions or devices: {missing}")
        for name in ("host", "environment", "data"):
            same = parse_json(values[name]) == facts[name]
            need(same, f"log.txt and run.json disagree on {name}")
    config = parse_json(named[0]["config"])
    elsewhere = {"data": facts["config"]["data"]} if resumes else {}  # a resume may move the tokens
    need(config | elsewhere == facts["config"], "log.txt and run.json disagree on config")
    need(named[-1]["command"] == facts["command"], "log.txt and run.json disagree on the command")
    need(facts["seed"] == facts["config"]["seed"], "run.json has two seeds, one in its config")


def check_steps(run: Run, lines: list[str]):
    """Every step of the config's plan stands in log.txt and metrics.jsonl, once and the same."""
    facts, metrics, plan = run.facts, run.metrics, planned(run.facts["config"])
    total = facts["config"]["steps"]
    rows = []
    for line in lines:
        if line.startswith("step:"):
            need(bool(row := STEP.fullmatch(line)), f"log.txt: no line of the trainer: {line}")
            rows.append(row)
    last = int(rows[-1][1]) if rows else 0
    ended = facts["finished"] is True and any(line.startswith("peak memory") for line in lines)
    need(ended and last >= total, f"not finished: log.txt ends at step {last} of {total}")

    in_log = [(int(row[1]), row[3] is not None) for row in rows]
    need(
        in_log == [row[:2] for row in plan] and {int(row[2]) for row in rows} == {total},
        f"log.txt does not have the steps of the config ({total}), each once and in order",
    )
    in_metrics = [(row["step"], "val_loss" in row, row["tokens"]) for row in metrics]
    need(
        [row[:2] for row in in_metrics] == in_log,
        "log.txt and metrics.jsonl disagree: they do not have the same steps",
    )
    for got, want in zip(in_metrics, plan, strict=True):
        need(
            got == want,
            f"metrics.jsonl: {got[2]} tokens after step {got[0]}, by the config it is {want[2]}",
        )

    for row, fields in zip(rows, metrics, strict=True):
        step, validates = int(row[1]), row[3] is not None
        ms, loss = fields["train_time_ms"], fields["val_loss" if validates else "train_loss"]
        need(loss > 0, f"metrics.jsonl: the loss of step {step} is {loss}")
        late = int(row[4]) - ms  # the clock goes on between the two, but not while it validates
        need(
            -0.51 <= late <= (0.51 if validates else LATE_MS),
            f"log.txt and metrics.jsonl disagree on the time of step {step}: {row[4]} and {ms} ms",
        )
        need(
            not validates or abs(float(row[3]) - loss) < 0.51e-4,
            f"log.txt and metrics.jsonl disagree on the loss of step {step}: {row[3]} and {loss}",
        )
        need(
            abs(float(row[5]) * max(step, 1) - int(row[4])) <= 0.51 + 0.0051 * step,
            f"log.txt: step_avg times {step} steps is not train_time",
        )
    for times in ([int(row[4]) for row in rows], [row["train_time_ms"] for row in metrics]):
        need(
            times[0] >= 0 and all(a <= b for a, b in pairwise(times)) and times[-1] > times[0],
            "times are not monotonic: the clock went backwards",
        )
    for name, value in [("steps", total), *metrics[-1].items()]:
        if name in facts:
            need(
                facts[name] == value,
                f"run.json and metrics.jsonl disagree: {name} {facts[name]} and {value}",
            )


# ------------------------------------------------------------------------------------------------
# The rules: of a run, and of the runs of a record together
# ------------------------------------------------------------------------------------------------


def hardware(run: Run) -> str:
    """The class in which a run competes; times of different classes are not compared."""
    devices, host = run.facts["devices"], run.facts["host"]
    if devices["platform"] == "cpu":
        return f"{host['cpu']}, {host['cores']} cores"
    return f"{devices['count']} x {devices['kind']}"


def stream_name(track: Track, data: dict) -> str:
    """The token stream that these shards are said to be."""
    val = f"{track.corpus}_val_000000.bin"
    need(val in data, f"token stream other than the rules': there is no {val}")
    return f"{track.corpus}-{data[val]['sha256'][:8]}" if track.corpora else track.corpus


def check_stream(track: Track, run: Run, pinned: dict):
    """The run read the track's token stream: `pinned` has size and hash of each of its shards."""
    data, corpus = run.facts["data"], track.corpus
    known = pinned.get(stream_name(track, data), {})
    names = [f"{corpus}_train_{i:06}.bin" for i in range(1, len(data))]
    need(
        set(data) == {f"{corpus}_val_000000.bin", *names},
        f"token stream other than the rules': {', '.join(sorted(data))}",
    )
    for name, shard in sorted(data.items()):
        need(
            track.shard_bytes in (0, shard["bytes"]) and known.get(name) == shard,
            f"token stream other than the rules': {name} with {shard['bytes']} bytes and sha256 "
            f"{shard['sha256'][:12]} is not in tokens.json",
        )
    there = sum((data[name]["bytes"] - 1024) // 2 for name in names)
    need(
        run.metrics[-1]["tokens"] < there,
        f"trained on {run.metrics[-1]['tokens']} tokens, its shards hold {there}: read twice?",
    )


def check_run(track: Track, run: Run, pinned: dict):
    """The run keeps the rules of the track."""
    config, devices = run.facts["config"], run.facts["devices"]
    need(
        config["val_tokens"] == track.val_tokens,
        f"wrong number of validation tokens: {config['val_tokens']}, not {track.val_tokens}",
    )
    need(
        config["target"] == track.target == run.facts["target"],
        f"the run's target is {run.facts['target']}, the track's {track.target}",
    )
    need(
        track.platform in ("", devices["platform"])
        and track.kind in devices["kind"]
        and track.devices in (0, devices["count"]),
        f"{devices['count']} x {devices['kind']} is not the hardware of this track",
    )
    check_stream(track, run, pinned)
    need("--profile" not in run.command, "a run with --profile is no record")
    if track.batch_tokens:
        sizes = {stage["batch_tokens"] for stage in config["stages"]}
        need(
            sizes == {track.batch_tokens},
            f"every step of this track takes {track.batch_tokens} tokens, not {sorted(sizes)}",
        )
        for name, value in ARCHITECTURE.items():
            need(config[name] == value, f"{name} is {value} on this track, not {config[name]}")


def check_runs(runs: list[Run]):
    """The runs are samples of one thing: same source, config and machine, other seeds."""
    need(len(runs) >= 2, "one run has no p-value: at least two seeds are needed")
    first = runs[0]

    def same(what, value):
        for run in runs[1:]:
            need(
                value(run) == value(first),
                f"{what} differs between {first.folder.name} and {run.folder.name}",
            )

    fixed = {"seed": 0, "data": ""}
    same("the source", lambda run: run.facts["source_sha256"])
    same("the config", lambda run: run.facts["config"] | fixed)
    for name in ("versions", "devices", "data"):
        same(f"{name} in run.json", lambda run, name=name: run.facts[name])
    same("the hardware", hardware)
    for name in COMPILER:
        same(name, lambda run, name=name: run.facts["environment"].get(name))
    seeds = [run.facts["seed"] for run in runs]
    need(len(set(seeds)) == len(seeds), f"seeds repeat: {seeds} are not independent samples")
    need(
        sorted(seeds) == list(range(len(seeds))),
        f"seeds {seeds} are not 0 to {len(seeds) - 1}: to choose seeds is to choose losses",
    )
    losses = {str([loss for *_, loss in run.losses("train_loss")]) for run in runs}
    need(
        len(losses) == len(runs),
        "seeds repeat: two runs have the same training losses under different seeds",
    )


def derive(track: Track, runs: list[Run]) -> dict:
    """All that record.json says of the runs; a function of their logs."""
    runs = sorted(runs, key=lambda run: run.facts["seed"])
    losses, seconds = [run.loss for run in runs], [run.seconds for run in runs]
    facts, mean = runs[0].facts, float(np.mean(losses))
    p_value = stats.ttest_1samp(losses, track.target, alternative="less").pvalue
    return {
        "date": "-".join(re.match(r"(\d{4})(\d\d)(\d\d)-", max(map(run_id, runs))).groups()),
        "runs": [run_id(run) for run in runs],
        "source_sha256": facts["source_sha256"],
        "hardware": hardware(runs[0]),
        "versions": facts["versions"],
        "stream": stream_name(track, facts["data"]),
        "command": shlex.join(["python", "train_gpt.py", *launch_arguments(runs[0].command)]),
        "steps": facts["steps"],
        "tokens": facts["tokens"],
        "seeds": [run.facts["seed"] for run in runs],
        "losses": losses,
        "seconds": [round(x, 3) for x in seconds],
        "mean_loss": round(mean, 6),
        "sd_loss": round(float(np.std(losses, ddof=1)), 6),
        "mean_seconds": round(float(np.mean(seconds)), 3),
        "sd_seconds": round(float(np.std(seconds, ddof=1)), 3),
        "p_value": float(f"{p_value:.3g}"),
        "margin": round((track.target - mean) * math.sqrt(len(runs)), 6),
        "resumed": [run_id(run) for run in runs if run.facts["resumed"]],
    }


def run_id(run: Run) -> str:
    """Its name, which begins with the time at which it started."""
    return run.folder.name


def launch_arguments(command: str) -> list[str]:
    """The arguments of a run's command, without seed and places."""
    parser = argparse.ArgumentParser(add_help=False)
    for option in ("seed", "out", "data", "cache", "coordinator", "processes", "process-id"):
        parser.add_argument(f"--{option}")
    words = shlex.split(command)
    return parser.parse_known_args(words[2:] if words[:1] == ["python"] else words)[1]


def check_statistics(track: Track, result: dict):
    """The mean loss is below the target, and not by chance."""
    mean, target = result["mean_loss"], track.target
    need(mean <= target, f"the mean loss {mean:.4f} is above the target {target}")
    if track.batch_tokens:
        need(
            result["margin"] >= STEP_MARGIN,
            f"(target - mean) * sqrt(n) is {result['margin']:.4f}, less than {STEP_MARGIN}",
        )
    else:
        need(
            result["p_value"] < P_VALUE,
            f"p = {result['p_value']} that the mean loss is not below {target}, not < {P_VALUE}: "
            "more seeds, or a lower loss",
        )


def check_faster(track: Track, result: dict, standing: dict):
    """The record beats the one that stood: fewer steps, or less time than can be chance."""
    if track.batch_tokens:
        need(
            result["steps"] < standing["steps"],
            f"not faster than the standing record: {result['steps']} steps, "
            f"that one has {standing['steps']}",
        )
        return
    new, old = result["mean_seconds"], standing["mean_seconds"]
    need(new < old, f"not faster than the standing record: {new} s, that one takes {old} s")
    times = result["seconds"], standing["seconds"]
    p_value = stats.ttest_ind(*times, equal_var=False, alternative="less").pvalue
    need(
        p_value < P_VALUE,
        f"not faster than the standing record beyond chance: {new} s against {old} s, "
        f"p = {p_value:.2g} (Welch), not < {P_VALUE}",
    )


# ------------------------------------------------------------------------------------------------
# Records: folders of runs
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A folder of runs that keeps the rules."""

    folder: Path
    fields: dict  # record.json; its "result" is what derive() gives
    runs: list[Run]

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.name

    @property
    def result(self) -> dict:
        """What was derived from its runs."""
        return self.fields["result"]

    @property
    def track(self) -> Track:
        """The track that it is on."""
        return TRACKS[self.fields["track"]]

    @property
    def competition(self) -> tuple[str, str, str]:
        """(track, hardware, token stream): the records that it is compared with."""
        machine = "any hardware" if self.track.batch_tokens else self.result["hardware"]
        return self.fields["track"], machine, self.result["stream"]


def read_tokens(root: Path) -> dict:
    """{token stream: {shard: {bytes, sha256}}}."""
    return json.loads((root / "tokens.json").read_text())


def check_record(folder: Path, pinned: dict) -> Record:
    """The record in `folder`, derived anew and held against all rules but those of rank."""
    with about(f"{folder.parent.name}/{folder.name}"):
        fields = parse_json((folder / "record.json").read_text())
        track = TRACKS[folder.parent.name]
        need(fields["track"] == folder.parent.name, "record.json names another track")
        runs = [read_run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
        for run in runs:
            need({path.name for path in run.folder.iterdir()} == set(FILES), f"{run_id(run)} has "
                 "other files than " + ", ".join(FILES))  # fmt: skip
            with about(run_id(run)):
                check_run(track, run, pinned)
        check_runs(runs)
        result, claimed = derive(track, runs), fields["result"]
        for key in result.keys() | claimed.keys():
            got, want = claimed.get(key), result.get(key)
            need(got == want, f"record.json says {key} {got}, from the logs it is {want}")
        need(folder.name == f"{result['date']}_{fields['name']}", "folder, name and date differ")
        page = (folder / "README.md").read_text()
        need(page.startswith(describe(fields)), "its README.md above the notes is not as generated")
        check_statistics(track, result)
        return Record(folder, fields, runs)


def check_ranks(records: list[Record]):
    """Each competition is one chain, in which every record beats exactly the one before it."""
    places = {(record.competition, record.name): record for record in records}
    beaten = set()
    for record in records:
        with about(f"{record.fields['track']}/{record.name}"):
            place = record.competition, record.fields["beats"]
            need(place not in beaten, f"another record beats {place[1] or 'nothing'} too: add anew")
            beaten.add(place)
            if place[1] is not None:
                need(place in places, f"it beats {place[1]}, which is no record of its class")
                check_faster(record.track, record.result, places[place].result)


def chain(records: list[Record], competition) -> list[Record]:
    """The records of a competition, from the first to the standing one."""
    after = {r.fields["beats"]: r for r in records if r.competition == competition}
    found = []
    while (found[-1].name if found else None) in after:
        found.append(after[found[-1].name if found else None])
    return found


def record_folders(root: Path) -> list[Path]:
    """All that claim to be records."""
    tracks = [root / name for name in TRACKS if (root / name).is_dir()]
    return sorted(path for track in tracks for path in track.iterdir() if path.is_dir())


def check_all(root: Path) -> tuple[list[Record], list[str]]:
    """(the records, why what is not among them was refused)."""
    records, refusals, pinned = [], [], read_tokens(root)
    for folder in record_folders(root):
        try:
            records.append(check_record(folder, pinned))
        except Refused as error:
            refusals.append(str(error))
    if not refusals:  # who beats whom makes sense among valid records only
        try:
            check_ranks(records)
        except Refused as error:
            refusals.append(str(error))
    return records, refusals


def all_valid(root: Path) -> list[Record]:
    """The records; Refused if one of them is not."""
    records, refusals = check_all(root)
    need(not refusals, "; ".join(refusals))
    return records


def describe(fields: dict) -> str:
    """README.md of a record, up to the notes."""
    result, track = fields["result"], TRACKS[fields["track"]]
    steps_count = track.batch_tokens > 0
    rows = zip(*(result[key] for key in ("seeds", "losses", "seconds", "runs")), strict=True)
    runs = "".join(f"| {s} | {x:.4f} | {t:.3f} | [{r}]({r}/log.txt) |\n" for s, x, t, r in rows)
    claim = f"{result['mean_seconds']:.2f} s" if not steps_count else f"{result['steps']:,} steps"
    proof = f"p = {result['p_value']} (one-sided t-test)"
    if steps_count:
        proof = f"(target - mean) * sqrt(n) = {result['margin']:.4f}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    resumed = f"\n**Resumed** after an interruption: {', '.join(result['resumed'])}.\n"
    return f"""# {fields["name"]}: {claim}

Track `{fields["track"]}` ({track.title}), {result["date"]}, by {fields["by"]}.
It beats: {fields["beats"] or "nothing, it is the first of its class"}.

**What changed.** {fields["what"]}

{len(result["losses"])} runs, mean loss **{result["mean_loss"]:.4f}** (standard deviation \
{result["sd_loss"]:.4f}; target {track.target}), {proof}.
Mean training time **{result["mean_seconds"]:.3f} s** (standard deviation \
{result["sd_seconds"]:.3f}) for {result["steps"]:,} steps on {result["tokens"]:,} tokens.

| seed | loss | seconds | log |
|---|---|---|---|
{runs}{resumed if result["resumed"] else ""}
- Launch: `{result["command"]}`, with `--seed` {result["seeds"][0]} to {result["seeds"][-1]}
- Hardware: {result["hardware"]}
- Versions: {versions}
- Tokens: `{result["stream"]}` of [tokens.json](../../tokens.json); source: sha256 \
`{result["source_sha256"]}`, at the head of every log

{NOTES}"""


def add(root: Path, args) -> str:
    """Collect runs into a new record; nothing is written unless all of it is valid."""
    need(bool(re.fullmatch(r"[A-Za-z0-9-]+", args.name)), "--name: letters, digits and hyphens")
    track, pinned = TRACKS[args.track], read_tokens(root)
    texts = {key: " ".join(getattr(args, key).split()) for key in ("by", "what")}
    need(all(texts.values()), "--by and --what must say something")
    runs = [read_run(Path(os.path.abspath(path))) for path in args.runs]
    if args.pin:
        for run in runs:
            known = pinned.setdefault(stream_name(track, run.facts["data"]), {})
            known.update(run.facts["data"] | known)
    for run in runs:
        with about(run_id(run)):
            check_run(track, run, pinned)
    check_runs(runs)
    result = derive(track, runs)
    check_statistics(track, result)
    fields = {"track": args.track, "name": args.name, **texts, "beats": None, "result": result}
    folder = root / args.track / f"{result['date']}_{args.name}"
    need(not folder.exists(), f"{folder} is there already: choose another --name")
    before = chain(all_valid(root), Record(folder, fields, runs).competition)
    if before:
        check_faster(track, result, before[-1].result)
        fields["beats"] = before[-1].name
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        made = Path(temporary) / "record"
        for run in runs:
            (made / run_id(run)).mkdir(parents=True)
            for name in FILES:
                shutil.copy(run.folder / name, made / run_id(run))
        (made / "record.json").write_text(json.dumps(fields, indent=1) + "\n")
        (made / "README.md").write_text(describe(fields))
        os.replace(made, folder)
    if args.pin:
        (root / "tokens.json").write_text(json.dumps(pinned, indent=1, sort_keys=True) + "\n")
    return f"added {folder}; next: python records/leaderboard.py render"


# ------------------------------------------------------------------------------------------------
# The leaderboard: tables in README.md, one plot for each competition
# ------------------------------------------------------------------------------------------------


def cell(text) -> str:
    """Text that cannot leave its cell of a table."""
    return str(text).replace("|", "\\|")


def table(names: str, rows: list[list]) -> str:
    """A Markdown table; `names` of its columns with bars between them."""
    lines = [f"| {names} |", "|---" * (names.count("|") + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(map(cell, row))} |" for row in rows]) + "\n"


def plot_path(root: Path, competition) -> Path:
    """Where the plot of a competition is."""
    track, machine, stream = competition
    return root / track / (re.sub(r"[^a-z0-9]+", "-", f"{machine} {stream}".lower()) + ".png")


def record_tables(root: Path, records: list[Record]) -> str:
    """Every track with its competitions; the standing record is the first row."""
    text = ""
    for name, track in TRACKS.items():
        text += f"\n### `{name}`: {track.title}\n"
        found = sorted({r.competition for r in records if r.competition[0] == name})
        if not found:
            text += "\nNo record yet: be the first.\n"
        for competition in found:
            standing = chain(records, competition)
            rows = []
            for number, record in reversed(list(enumerate(standing, 1))):
                got = record.result
                time = f"{got['mean_seconds']:.2f} s ± {got['sd_seconds']:.2f}"
                proof = f"margin {got['margin']:.4f}" if track.batch_tokens else ""
                proof = proof or f"p = {got['p_value']:.1e}"
                loss = f"{got['mean_loss']:.4f} ± {got['sd_loss']:.4f}"
                link = f"[{record.fields['name']}]({name}/{record.name}/README.md)"
                resumed = f" ({len(got['resumed'])} resumed)" if got["resumed"] else ""
                what = link + ": " + record.fields["what"]
                values = time, f"{got['steps']:,}", f"{got['tokens']:,}", loss
                rows.append([number, *values, f"{len(got['runs'])}{resumed}", proof, what])
                rows[-1] += [record.fields["by"], got["date"]]
            columns = "# | time | steps | tokens | loss | runs | proof | what | by | date"
            path = plot_path(root, competition).relative_to(root)
            text += f"\n**{competition[1]}**, tokens `{competition[2]}`\n\n{table(columns, rows)}"
            text += f"\n![loss and record time]({path.as_posix()})\n"
    return text


def predicted_table(root: Path) -> str:
    """What the compiler said to `--preflight` of hardware that nobody has timed yet."""
    rows = []
    for path in sorted(root.glob("predicted/*/preflight.json")):
        report = json.loads(path.read_text())
        whole, versions = report["predicted"], report["versions"]
        floors = whole["train_link_floor_seconds"] + whole["train_moved_floor_seconds"]
        peak = max(row["bytes"]["peak"] + row["resident_bytes"] for row in report["variants"])
        hardware = f"{report['devices']} x {report['device_kind']}"
        link = f"[{report['preset']}]({path.relative_to(root).as_posix()})"
        seconds = f"{whole['train_seconds']:.1f} s", f"{floors:.1f} s"
        sizes = f"{report['total_steps']:,}", f"{report['total_tokens']:,}", f"{peak / 2**30:.1f}"
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        rows.append([hardware, link, *seconds, *sizes, said])
    columns = "hardware | preset | predicted | left out, at least | steps | tokens | GiB | by"
    return table(columns, rows)


def reference_table(root: Path) -> str:
    """What others reached, with their sources."""
    rows = json.loads((root / "references.json").read_text())
    columns = ("what", "hardware", "time", "loss", "steps", "tokens", "source")
    return table(" | ".join(columns), [[row[name] for name in columns] for row in rows])


def leaderboard(root: Path, records: list[Record]) -> str:
    """The generated part of records/README.md."""
    return f"""{MARKERS[0]}
## Records
{record_tables(root, records)}
## Predicted by the compiler

No measurements and no records: what `--preflight` says of hardware on which nobody has timed this
file yet. The second time is a floor of what the prediction leaves out.

{predicted_table(root)}
## Elsewhere

Not records of this repository, and not checked by its tool: other programs, as their authors
published them.

{reference_table(root)}
{MARKERS[1]}"""


def curve(runs: list[Run], kind: str) -> np.ndarray:
    """[point, (seconds, tokens, loss)], the mean over the runs."""
    return np.mean([run.losses(kind) for run in runs], axis=0)


def draw(path: Path, records: list[Record], digest: str):
    """The plot of a competition: its records from the first to the standing one."""
    try:
        import matplotlib
    except ImportError:
        raise Refused("render draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    target, by_steps = records[-1].track.target, records[-1].track.batch_tokens > 0
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for i, record in enumerate(records):
        standing = i == len(records) - 1
        color = "C0" if standing else str(0.35 + 0.45 * (len(records) - 2 - i) / len(records))
        trained, validated = curve(record.runs, "train_loss"), curve(record.runs, "val_loss")
        window = max(len(trained) // 40, 1)
        smooth = [np.convolve(x, np.ones(window) / window, "valid") for x in trained.T]
        for axis, x in ((axes[0], 0), (axes[1], 1)):
            axis.plot(smooth[x], smooth[2], color=color, lw=1, alpha=0.8, zorder=i)
            label = f"{record.fields['name']}: {record.result['mean_loss']:.4f}"
            marks = {"color": color, "marker": "o", "ms": 5, "ls": "", "zorder": i}
            axis.plot(validated[:, x], validated[:, 2], label=label, **marks)
    top = curve(records[-1].runs, "val_loss")[0, 2]
    lowest = min(record.result["mean_loss"] for record in records)
    for axis, name in ((axes[0], "seconds of training"), (axes[1], "training tokens")):
        axis.axhline(target, color="C3", lw=0.8, ls="--", label=f"target {target}")
        axis.set(xlabel=name, ylabel="loss, nats a token", xlim=(0, None))
        axis.set_ylim(lowest - 0.06 * (top - target), target + 0.55 * (top - target))
        axis.legend(title="line: training, dots: validation", fontsize=8, title_fontsize=8)
    values = [r.result["steps" if by_steps else "mean_seconds"] for r in records]
    spread = [0.0 if by_steps else r.result["sd_seconds"] for r in records]
    dates = np.array([r.result["date"] for r in records], "datetime64[D]").astype(object)
    axes[2].step(dates, values, where="post", color="0.7")
    axes[2].errorbar(dates, values, spread, color="C0", marker="o", ls="", capsize=3)
    for date, value, record in zip(dates, values, records, strict=True):
        place = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 8}
        axes[2].annotate(record.fields["name"], (date, value), **place)
    axes[2].set(ylabel="steps" if by_steps else "seconds", ylim=(0, 1.15 * max(values)))
    locator = matplotlib.dates.AutoDateLocator(minticks=1, maxticks=6)
    axes[2].xaxis.set_major_locator(locator)
    axes[2].xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%Y-%m-%d"))
    axes[2].margins(x=0.2)
    axes[2].set_title("the record over time", fontsize=10)
    track, machine, stream = records[-1].competition
    figure.suptitle(f"{track}: {machine}, {stream}", fontsize=10)
    figure.savefig(path, dpi=90, metadata={"Software": None, "Description": digest})
    plt.close(figure)


def render(root: Path, check: bool) -> str:
    """Bring tables and plots up to date; with `check` refuse if they are not.

    A plot carries a hash of what it was drawn from and of how, and is drawn again when that has
    changed: another matplotlib alone makes no plot stale.
    """
    records, page = all_valid(root), root / "README.md"
    text = page.read_text()
    parts = re.fullmatch(f"(.*?){MARKERS[0]}.*{MARKERS[1]}(.*)", text, re.S)
    need(bool(parts), "README.md has lost the two markers of the leaderboard")
    fresh = parts[1] + leaderboard(root, records) + parts[2]
    again = "run python records/leaderboard.py render"
    need(not check or fresh == text, f"the leaderboard in README.md is stale: {again}")
    for competition in sorted({record.competition for record in records}):
        drawn, path = chain(records, competition), plot_path(root, competition)
        content = [[r.fields["name"], r.result, r.track.target] for r in drawn]
        digest = hashlib.sha256((repr(content) + inspect.getsource(draw)).encode()).hexdigest()
        if not path.exists() or digest.encode() not in path.read_bytes():
            need(not check, f"the plot {path.name} is stale: {again}")
            draw(path, drawn, digest)
    page.write_text(fresh)
    return f"{page} is up to date, {len(records)} records"


# ------------------------------------------------------------------------------------------------
# Running sources: reproduce, compare
# ------------------------------------------------------------------------------------------------


def train_with(source: bytes, home: Path, args: list[str], out: Path, environment=None) -> Run:
    """Execute `source` as home/train_gpt.py, beside this repository's data/; its run in `out`."""
    home.mkdir(exist_ok=True)
    (home / "train_gpt.py").write_bytes(source)
    if not (home / "data").exists():
        (home / "data").symlink_to(HERE.parent / "data", target_is_directory=True)
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    command = [sys.executable, "train_gpt.py", *args, "--out", str(out.resolve())]
    done = subprocess.run(
        command, cwd=home, env=os.environ | (environment or {}), capture_output=True, text=True
    )
    said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
    need(done.returncode == 0, f"exit status {done.returncode}, it said: {said[-1]}")
    (folder,) = set(out.iterdir()) - before
    return read_run(folder)


def reproduce(root: Path, args) -> str:
    """Run a record's own source again, and hold loss and time against what it claims.

    The loss must be in the interval in which 99% of further runs of such a mean and deviation are.
    """
    record = check_record(Path(os.path.abspath(args.record)), read_tokens(root))
    result, n = record.result, len(record.runs)
    reach = stats.t.ppf(0.995, n - 1) * result["sd_loss"] * math.sqrt(1 + 1 / n)
    words = launch_arguments(record.runs[0].command)
    words += ["--data", str(Path(args.data).resolve())] if args.data else []
    then = record.runs[0].facts["environment"]
    environment = {name: then[name] for name in then if name in REPEATED}
    runs = sorted(record.runs, key=lambda run: run.facts["seed"])
    with tempfile.TemporaryDirectory() as temporary:
        for old in runs[: args.runs]:
            seed, home = str(old.facts["seed"]), Path(temporary) / "source"
            with about(f"seed {seed}"):
                out = Path(args.out or Path(temporary) / "runs")
                new = train_with(old.source, home, [*words, "--seed", seed], out, environment)
                fixed = {"data": ""}
                need(new.facts["data"] == old.facts["data"], "other tokens than the record's")
                need(
                    new.facts["config"] | fixed == old.facts["config"] | fixed,
                    "the command does not give the config of the record",
                )
                pairs = zip(new.losses("train_loss"), old.losses("train_loss"), strict=True)
                same = next((i for i, (a, b) in enumerate(pairs) if a[2] != b[2]), None)
                print(
                    f"seed {seed}: loss {new.loss:.4f}, recorded {old.loss:.4f}; "
                    f"{new.seconds:.2f} s on {hardware(new)}, recorded {old.seconds:.2f} s on "
                    f"{hardware(old)}; training losses "
                    + ("equal to the last digit" if same is None else f"equal for {same} steps"),
                    flush=True,
                )
                need(
                    abs(new.loss - result["mean_loss"]) <= reach,
                    f"not reproduced: loss {new.loss:.4f} is not within {reach:.4f} of "
                    f"the recorded mean {result['mean_loss']:.4f}",
                )
    return "reproduced"


def interval(values) -> tuple[float, float, float]:
    """(mean, lower, upper) with 95% confidence, by Student's t."""
    mean, error = np.mean(values), stats.sem(values)
    reach = stats.t.ppf(0.975, len(values) - 1) * error
    return float(mean), float(mean - reach), float(mean + reach)


def source_of(path: Path) -> bytes:
    """A source file, or the source that a record holds."""
    if path.is_dir():
        return read_run(next(p for p in sorted(path.iterdir()) if p.is_dir())).source
    return path.read_bytes()


def compare(root: Path, args) -> str:
    """Alternate two sources on this machine and print paired differences.

    Pair i has seed i in both; every second pair begins with the other one, so that a machine which
    warms up or is busy for a while favours neither.
    """
    need(args.runs >= 2, "--runs: two pairs at least, one has no confidence interval")
    with about("compare"):
        sources = {"base": source_of(Path(args.base)), "cand": source_of(Path(args.cand))}
    ratios, differences = [], []
    print("seed   base s   cand s   ratio   base loss   cand loss   difference", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.runs):
            pair = {}
            for name in ("base", "cand") if seed % 2 == 0 else ("cand", "base"):
                out = Path(args.out or temporary) / name
                words = [*args.arguments, "--seed", str(seed)]
                with about(f"{name}, seed {seed}"):
                    home = Path(temporary) / f"source-{name}"
                    pair[name] = train_with(sources[name], home, words, out)
            base, cand = pair["base"], pair["cand"]
            ratios.append(math.log(cand.seconds / base.seconds))
            differences.append(cand.loss - base.loss)
            print(
                f"{seed:4} {base.seconds:8.2f} {cand.seconds:8.2f} {math.exp(ratios[-1]):7.4f}"
                f"   {base.loss:9.4f}   {cand.loss:9.4f}     {differences[-1]:+.4f}",
                flush=True,
            )
    ratio, low, high = (math.exp(x) for x in interval(ratios))
    loss, least, most = interval(differences)
    return (
        f"time ratio cand/base {ratio:.4f}, 95% confidence {low:.4f} to {high:.4f}\n"
        f"loss difference cand - base {loss:+.4f}, 95% confidence {least:+.4f} to {most:+.4f}\n"
        f"{args.runs} pairs on {hardware(cand)}"
    )


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def parse_args(argv):
    """The command line as a namespace."""
    parser = argparse.ArgumentParser(prog="leaderboard.py", description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=HERE, help="this folder, if another")
    commands = parser.add_subparsers(dest="what_to_do", required=True)
    one = commands.add_parser("add", help="collect runs into a record")
    one.add_argument("runs", nargs="+", metavar="RUN_DIR")
    one.add_argument("--track", required=True, choices=TRACKS)
    one.add_argument("--name", required=True, help="of the folder: letters, digits, hyphens")
    one.add_argument("--by", required=True, help="who")
    one.add_argument("--what", required=True, help="what changed, in a sentence")
    one.add_argument("--pin", action="store_true", help="enter new shards into tokens.json")
    commands.add_parser("check", help="derive everything anew from the logs")
    one = commands.add_parser("render", help="tables and plots")
    one.add_argument("--check", action="store_true", help="only say whether they are stale")
    one = commands.add_parser("reproduce", help="run a record's source again")
    one.add_argument("record", metavar="RECORD")
    one.add_argument("--runs", type=int, default=1, metavar="N", help="its first N seeds")
    one.add_argument("--data", metavar="DIR", help="folder with the token shards")
    one.add_argument("--out", metavar="DIR", help="keep the runs there")
    one = commands.add_parser("compare", help="alternate two sources on this machine")
    one.add_argument("base", metavar="BASE.py", help="or a record")
    one.add_argument("cand", metavar="CAND.py", help="or a record")
    one.add_argument("--runs", type=int, default=5, metavar="N", help="pairs")
    one.add_argument("--out", metavar="DIR", help="keep the runs in DIR/base and DIR/cand")
    one.add_argument("arguments", nargs="*", metavar="ARGS", help="of both, after --; full paths")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""
    args = parse_args(argv)
    root = args.records.resolve()
    try:
        if args.what_to_do == "check":
            records, refusals = check_all(root)
            for reason in refusals:
                print(f"refused: {reason}", file=sys.stderr)
            if not refusals:
                count = len(records)
                print(f"{count} {'record is' if count == 1 else 'records are'} valid")
            return 1 if refusals else 0
        if args.what_to_do == "render":
            print(render(root, args.check))
        else:
            print(
                {"add": add, "reproduce": reproduce, "compare": compare}[args.what_to_do](
                    root, args
                )
            )
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
