"""What a run and a record must be. It reads logs; it executes nothing, and asks nobody.

A record is a folder records/TRACK/DATE_NAME/ with

    record.json           what its author says, and what was derived from the logs
    README.md             the same for people; below the line NOTES there is room for prose
    RUN_ID/               one folder for each run, as train_gpt.py wrote it:
        log.txt           the source, what the run stood on, a line for every step
        metrics.jsonl     the same steps for machines, with more digits
        run.json          config, seed, hashes, versions, hardware, totals

A log has, between rules of 100 `=`: the source; a head (versions, devices, then `command`, `host`,
`environment`, `choices`, `data`, `config`, each with what run.json says); the steps, among them
`settings: {...}` if memory forced others than those asked for, and lines about checkpoints. A run
that was resumed has another head, which begins with `resumed`, and its steps, once more or oftener.

The files hold what the trainer writes and nothing else: see the grammar below. Nothing that a
person typed counts as evidence: every number is derived from the logs and compared. No
train_gpt.py is imported, neither the record's nor today's. What must be known of a run (how many
steps, their tokens, when it validates) follows from a few fields of the config that the run itself
wrote down: see `planned`. So a record stays checkable after the trainer has moved on (fields of a
config that are gone by now, heads without `choices`), and to check a stranger's record is safe.

Which tokens a run read is known by the hashes of its shards. tokens.json has those that a record
may use, by stream. A stream is `fineweb`, or the demo corpus of one Python: that corpus comes from
the documentation in the Python installation, so every version has its own, and the stream is named
by the hash of its validation shard. The first record on a new corpus enters it (`add --pin`), where
a reviewer with the same Python makes it again and compares; Python's version is in the log. A
stream that is pinned never changes, `--pin` adds nothing to it, and a record reads each of its
shards. FineWeb's must have 100 million tokens each; their hashes are not pinned yet, for nobody
here has had the files: the first record pins those that it read, and its reviewer downloads them
and compares. Further ones are entered by hand, together with the record that reads them.
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import math
import re
import shlex
import stat
import warnings
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, combinations, pairwise, product, zip_longest
from pathlib import Path

import numpy as np
from scipy import stats

FILES = ("log.txt", "metrics.jsonl", "run.json")
NOTES = "<!-- Notes of the author from here on; what stands above is generated. -->\n"
P_VALUE = 0.01  # of the mean loss, and of the gain in time over the standing record
STEP_MARGIN = 0.004  # (target - mean loss) * sqrt(runs), where steps are counted
FREE = {"seed": 0, "data": ""}  # in which configs may differ and still are the same
BROKEN = (OSError, ValueError, TypeError, AttributeError, SyntaxError, MemoryError)
BROKEN += (LookupError, ArithmeticError, RecursionError)
LATE_MS = 500.0  # between the time in metrics.jsonl and the one in the line of log.txt after it


class Refused(Exception):
    """Why something is no record: one line that a terminal can show."""

    def __init__(self, reason: str):
        line = " ".join(reason.split())
        super().__init__("".join(x if x.isprintable() else "?" for x in line))


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
    except BROKEN as error:
        raise Refused(f"{what}: not as train_gpt.py writes it ({error})") from None


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
    shard_bytes: int = 1024 + 2 * 100_000_000  # each; 0: any, and every corpus competes alone
    platform: str = ""  # of jax; "": any
    kind: str = ""  # part of the name of the devices
    devices: int = 0  # how many; 0: any number
    processes: int = 0  # that drive them: one sees one machine; 0: any number
    batch_tokens: int = 0  # of every step. If not 0, steps are counted and not seconds


TRACKS = {
    "v6e-8": Track("FineWeb to 3.28 on a TPU v6e-8", platform="tpu", kind="TPU v6 lite", devices=8),
    "8xh100": Track(
        "FineWeb to 3.28 on eight H100s", platform="gpu", kind="H100", devices=8, processes=1
    ),
    "1xgpu": Track("FineWeb to 3.28 on one GPU", platform="gpu", devices=1, processes=1),
    "cpu": Track(
        "the demo corpus to 3.95 on a CPU",
        target=3.95,
        val_tokens=98_304,
        corpus="builtin",
        shard_bytes=0,
        platform="cpu",
        processes=1,
    ),
    "steps": Track("FineWeb to 3.28 in the fewest steps", batch_tokens=524_288),
    "medium": Track("FineWeb to 2.92 on any hardware, each kind by itself", target=2.92),
}
# What the track `steps` fixes beside the batch: the architecture of the preset `speedrun`.
ARCHITECTURE = {
    "width": 768,
    "heads": 6,
    "mlp_width": 2816,
    "vocab": 50304,
    "ngram_rows": 42_301_440,
    "sign_rows": 8192,
    "gate_width": 64,
    "skip": [3, 6],
    "source": 7,
    "layers.0": "paired x0 ngram mlps=1",
    "layers.1": "short narrow values xsa x0 ngram mlps=1",
    "layers.2": "paired values x0 mlps=1",
    "layers.3": "long xsa gated mlps=1",
    "layers.4": "x0 ngram mlps=1",
    "layers.5": "paired x0 ngram mlps=1",
    "layers.6": "mlps=1",
    "layers.7": "x0 mlps=0",
    "layers.8": "short narrow values mlps=2",
    "layers.9": "ngram mlps=1",
    "layers.10": "long values gated mlps=1",
}


# ------------------------------------------------------------------------------------------------
# The grammar of all files: what has no place in it is refused
# ------------------------------------------------------------------------------------------------


def table(name: str, part: str) -> str:
    """The pattern of a JSON object whose names and parts match these patterns."""
    return rf'\{{(?:"(?:{name})": (?:{part})(?:, (?="))?)*\}}'


N = "(?:0|[1-9][0-9]{0,15})"  # numbers as Python writes them: no other digits, none in front
REAL, MS, LOSS = r"[0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?", rf"{N}\.[0-9]{{1,3}}", r"\d\d?\.\d{1,6}"
SOME, FLAG, TEXT, ANY = "[1-9][0-9]{0,5}", "true|false", r'"(?:[^"\\]|\\.)*"', ".*"
WORD, HASH, VERSION = "[A-Za-z0-9_.-]+", "[0-9a-f]{64}", r"[0-9]+\.[0-9]+[A-Za-z0-9.+-]*"
HARDWARE, COMMAND = (
    '" *[A-Za-z0-9][A-Za-z0-9 .,@()/+_-]*"',
    '"python [^`]+"',
)  # these stand in pages
# What authors say does too: no HTML, no image, no table, no letter that looks like another.
PLAIN = "A-Za-z0-9\xc0-\u017e\xb1 .,:;()'+*=%@/_~^?!#-"
PROSE = rf'"(?! )(?:[{PLAIN}]|`[{PLAIN}]+`){{1,600}}(?<! )"'

RULE = re.compile(r"^={100}\n", re.M)
STEP = rf"step:({N})/({N}) (?:val_loss:({N}\.[0-9]{{4}}) )?train_time:({N})ms"
STEP = re.compile(rf"{STEP} step_avg:({N}\.[0-9]{{2}})ms")
SAVED = rf"checkpoint:({N}) held the loop for {N}\.[0-9]ms, {N}\.[0-9] MB"
SAVED = re.compile(rf"{SAVED} written in {N}\.[0-9]{{2}}s")
DROPPED = re.compile(f"n-grams that found no room: ({N})")
PEAK = re.compile(rf"peak memory allocated: (?:{N}|nan) MiB")
RUN_ID = re.compile(rf"[0-9]{{8}}-[0-9]{{6}}-({WORD})-s({N})-[0-9a-f]{{6}}")

# Of JSON: patterns by name; names with ? may be missing, a pattern for * is that of all others.
VERSIONS = {"python": rf'"3\.{VERSION}"'} | dict.fromkeys(("jax", "jaxlib", "*"), f'"{VERSION}"')
SHARD = rf'\{{"bytes": {N}, "sha256": "{HASH}"\}}'
SHARDS = table(r"[a-z0-9]+_(?:train|val)_[0-9]{6}\.bin", SHARD)
STAGE = {"share": REAL, "batch_tokens": N, "*": ANY}
CONFIG = {"steps": SOME, "extension": N, "stages": [STAGE], "seed": N, "*": ANY}
CONFIG |= {"val_every": N, "val_tokens": N, "target": REAL, "data": TEXT}
DEVICES = {"kind": HARDWARE, "platform": f'"{WORD}"', "count": SOME, "processes": SOME}
FACTS = {  # run.json; in older ones choices and settings are missing
    "config": CONFIG,
    "versions": VERSIONS,
    "devices": DEVICES,
    "host": {"cpu": HARDWARE, "cores": SOME, "platform": TEXT},
    "choices?": {
        "kernels": TEXT,
        "compiler_options": table(WORD, f"{REAL}|{TEXT}|{FLAG}"),
        # of more devices than the recipe has rows
        "rows?": {"count": SOME, "tokens": rf"\[{N}(?:, {N})*\]"},
    },
    "environment": table(WORD, TEXT),
    "data": SHARDS,
    "compile_seconds": table(WORD, MS),
    "settings?": table(WORD, rf'\{{"micro_tokens": {N}, "recompute": (?:{FLAG})\}}'),
    **{"run_id": f'"{WORD}"', "preset": f'"{WORD}"', "seed": N, "command": COMMAND},
    **{"source_sha256": f'"{HASH}"', "steps": N, "tokens": N, "train_time_ms": MS},
    **{"val_loss": f"{LOSS}|null", "target": REAL, "resumed": FLAG, "finished": FLAG},
    "dropped_ngrams?": N,
}
LINE = {"step": N, "train_time_ms": MS, "tokens": N, "dropped_ngrams?": N}  # of metrics.jsonl
VALIDATED = LINE | {"val_loss": LOSS}
TRAINED = LINE | {"train_loss": LOSS, "lr": REAL}
TRAINED |= dict.fromkeys(("grad_norm?", "grad_norm_adam?", "grad_norm_event?"), REAL)
RECORD = {"track": f'"{WORD}"', "name": '"[A-Za-z0-9-]{1,60}"', "by": PROSE, "what": PROSE}
RECORD |= {"beats": f'null|"{WORD}"', "result": ANY}
TOKENS = table("fineweb|builtin-[0-9a-f]{8}", SHARDS)
SUMS = {"train_seconds": "predicted_ms", "train_link_floor_seconds": "link_floor_ms"}
SUMS |= {"train_moved_floor_seconds": "moved_floor_ms"}  # in preflight.json, and of what
PROGRAM = {"name": f'"{WORD}"', "steps": N, "resident_bytes": N, "*": ANY}
PROGRAM |= {"tokens_per_step": REAL}
PROGRAM |= {"bytes": {"peak": N, "*": f"{N}|null"}, **dict.fromkeys(SUMS.values(), f"{REAL}|null")}
PREDICTION = {"preset": f'"{WORD}"', "versions": VERSIONS, "device_kind": HARDWARE, "devices": N}
PREDICTION |= {"total_steps": N, "total_tokens": N, "variants": [PROGRAM], "*": ANY}
PREDICTION |= {"predicted": {"components?": ANY, "*": f"{REAL}|null"}}


def expect(value, shape):
    """Refuse a value of JSON unless it has this shape; see above."""
    if isinstance(shape, dict) and isinstance(value, dict):
        missing = [x for x in shape if x != "*" and x[-1] != "?" and x not in value]
        need(not missing, f"{', '.join(map(repr, missing))} is missing")
        for name, part in value.items():
            other = "*" if re.fullmatch("[A-Za-z0-9 _.-]+", name) else "?"
            known = [x for x in (name, f"{name}?", other) if x in shape]
            need(bool(known), f"the trainer writes no {name!a:.60}")
            with about(name):
                expect(part, shape[known[0]])
    elif isinstance(shape, list) and isinstance(value, list):
        for i, part in enumerate(value, 1):
            with about(f"{i}"):
                fits = (x for x in shape if {name for name in x if name[-1] != "?"} <= {*part})
                expect(part, next(fits, shape[-1]))
    else:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        right = isinstance(shape, str) and text.isprintable() and re.fullmatch(shape, text, re.A)
        if not right:
            raise Refused(f"it cannot be {json.dumps(value):.80}")


def read_text(path: Path) -> str:
    """A file of printable characters, tabs and line feeds, the last of which is its end."""
    info = path.lstat()
    need(stat.S_ISREG(info.st_mode), "it is no file")  # to read a pipe may never end
    # 4,640 steps of the largest preset leave less than 2 MB; to read far more takes minutes.
    need(info.st_size <= 2**22, "it is larger than 4 MiB")
    text = path.read_bytes().decode()
    odd = [f"U+{ord(x):04X}" for x in {*text} - {*"\n\t"} if not x.isprintable()]
    need(not odd, f"it has the character {', '.join(sorted(odd)[:9])}")
    need(text[-1:] == "\n", "its last line has no end")
    return text


def read_json(path: Path, shape):
    """The value of a JSON file, or the values of the lines of .jsonl, as json.dumps writes them."""
    with about(path.name):
        lines = path.suffix == ".jsonl"
        parts = read_text(path).split("\n")[:-1]
        values = [*map(json.loads, parts if lines else ["\n".join(parts)])]
        again = [json.dumps(value, indent=None if lines else 1) for value in values]
        need("\n".join(again).split("\n") == parts, "not as json.dumps writes it, or a name twice")
        expect(values if lines else values[0], shape)
        return values if lines else values[0]


# ------------------------------------------------------------------------------------------------
# One run: its three files, and whether they agree
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one run left behind."""

    folder: Path
    source: bytes  # as its log has it
    commands: list[str]  # that began it and, if it was resumed, those that continued it
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

    @functools.cached_property
    def changes(self) -> np.ndarray:
        """What training losses and seconds change by from step to step, [2, steps - 1]."""
        return np.diff(np.array(self.losses("train_loss"))[:, [2, 0]].T)


def planned(config: dict) -> list[tuple[int, bool, int]]:
    """(steps done, whether it is a validation, tokens so far) of every line of a whole run.

    These fields of the config are part of the format of logs: steps, extension, val_every, and of
    the stages share and batch_tokens.
    """
    steps, stages, period = config["steps"], config["stages"], config["val_every"]
    ends = accumulate(stage["share"] for stage in stages)
    ends = [round(end * (steps - config["extension"])) for end in ends][:-1] + [steps]
    need([0, *ends] == sorted([0, *ends]), "the stages of the config do not follow each other")
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


def read_run(folder: Path) -> Run:
    """The run in `folder`; Refused if it is not whole, or if its files contradict each other."""
    with about(folder.name):
        facts = read_json(folder / "run.json", FACTS)
        need(facts["run_id"] == folder.name, f"run.json is of another run, {facts['run_id']}")
        with about("log.txt"):
            source, *sections = RULE.split(read_text(folder / "log.txt"))
        source = source.removesuffix("\n")  # the log puts one behind it
        changed = any(part.startswith("resumed\nsource: ") for part in sections)
        need(not changed, "it was resumed with another source: that is no record")
        sections = [part.split("\n")[:-1] for part in sections]
        heads, bodies = sections[::2], sections[1::2]
        need(0 < len(heads) == len(bodies), "log.txt has no steps after its last head")
        commands = [x[9:] for head in heads for x in head if x.startswith("command: ")]
        metrics = read_json(folder / "metrics.jsonl", [VALIDATED, TRAINED])
        run = Run(folder, source.encode(), commands, facts, metrics)
        check_heads(run, heads)
        with about("the source in log.txt"), warnings.catch_warnings(action="ignore"):
            need(len(source) < 2**21, "longer than 2 MiB")
            kinds = {type(x) for x in ast.parse(source).body}
            need(bool(kinds & {ast.Import, ast.ImportFrom}), "no trainer, for it imports nothing")
        for body in bodies:
            forced = body.pop(0) if body and body[0].startswith("settings: ") else ""
            expect(json.loads(forced[10:] or "{}"), FACTS["settings?"])
        said = facts.get("settings")
        same = forced == (f"settings: {json.dumps(said)}" if said else "")
        need(same, f"log.txt and run.json disagree on settings: {forced or 'none'} and {said}")
        check_steps(run, [line for body in bodies for line in body])
        return run


def check_heads(run: Run, heads: list[list[str]]):
    """What log.txt says before its steps, and again after each resume, is what run.json says."""
    facts, devices, config = run.facts, run.facts["devices"], run.facts["config"]
    digest, said = hashlib.sha256(run.source).hexdigest(), facts["source_sha256"]
    both = f"the source in log.txt has sha256 {digest[:12]}, run.json says {said[:12]}"
    need(digest == said, both)
    said, resumes = facts["resumed"], len(heads) - 1
    need(said is (resumes > 0), f"log.txt was resumed {resumes} times, run.json says {said}")
    changed = any(line.startswith("config: ") for head in heads[1:] for line in head)
    need(not changed, "it was resumed with other settings: that is no record")
    begun = json.loads(heads[0][-1].removeprefix("config: "))
    # A resume may move the tokens and name the devices; its head has a `config:` if it does more.
    moved = {name: begun[name] for name in ("data", "devices") if resumes and name in begun}
    before = [f"{package} {version}" for package, version in facts["versions"].items()]
    before += [f"{devices['count']} x {devices['kind']} ({devices['platform']})"]
    before += [facts["host"]["platform"]]
    after = [x for x in ("host", "environment", "choices", "data") if x in facts]
    after = [f"{name}: {json.dumps(facts[name])}" for name in after]
    for i, head in enumerate(heads):
        command = run.commands[i] if i < resumes else facts["command"]
        expect(command, COMMAND)
        want = ["resumed"] * (i > 0) + [*before, f"command: {command}", *after]
        want += [f"config: {json.dumps(config | moved)}"] * (i == 0)
        for there, line in zip_longest(head, want, fillvalue="nothing"):
            need(there == line, f"log.txt and run.json disagree: {there:.70} and {line:.70}")
    need(facts["seed"] == config["seed"], "run.json has two seeds, one in its config")
    parts, preset = RUN_ID.fullmatch(run_id(run)), facts["preset"]
    right = parts and parts[1] == preset == config["preset"] and parts[2] == str(facts["seed"])
    need(bool(right), "the run's name has another preset or seed, or none")
    need(began(run) < datetime.now() + timedelta(days=1), "its date is in the future")


def check_steps(run: Run, lines: list[str]):
    """Every step of the config's plan stands in log.txt and metrics.jsonl, once and the same."""
    facts, metrics, total, rows = run.facts, run.metrics, run.facts["config"]["steps"], []
    ended = bool(lines and PEAK.fullmatch(lines[-1]))
    lines = lines[: len(lines) - ended]
    dropped = DROPPED.fullmatch(lines[-1]) if ended and lines else None
    for line in lines[:-1] if dropped else lines:
        row, saved = STEP.fullmatch(line), SAVED.fullmatch(line)
        right = row or (saved and rows and int(saved[1]) <= int(rows[-1][1]))
        need(bool(right), f"log.txt: no line of the trainer: {line:.80}")
        rows += [row] if row else []
    last = int(rows[-1][1]) if rows else 0
    ended = ended and facts["finished"] and last >= total
    need(ended, f"not finished: log.txt ends at step {last} of {total}")
    plan = planned(facts["config"])
    in_log = [(int(row[1]), row[3] is not None) for row in rows]
    need(
        in_log == [row[:2] for row in plan] and {int(row[2]) for row in rows} == {total},
        f"log.txt does not have the steps of the config ({total}), each once and in order",
    )
    in_metrics = [(row["step"], "val_loss" in row, row["tokens"]) for row in metrics]
    same = [row[:2] for row in in_metrics] == in_log
    need(same, "log.txt and metrics.jsonl disagree: they do not have the same steps")
    for got, want in zip(in_metrics, plan, strict=True):
        reason = f"{got[2]} tokens after step {got[0]}, by the config it is {want[2]}"
        need(got == want, f"metrics.jsonl: {reason}")
    some = {"grad_norm" in row for row in metrics if "train_loss" in row}
    need(len(some) == 1, "metrics.jsonl: some steps have a grad_norm, and some have none")
    counts = sum(row.get("dropped_ngrams", 0) for row in metrics), facts.get("dropped_ngrams", 0)
    same = {*counts} == {int(dropped[1]) if dropped else 0}
    need(same, "log.txt, metrics.jsonl and run.json disagree on n-grams that found no room")

    for row, fields in zip(rows, metrics, strict=True):
        step, validates = int(row[1]), row[3] is not None
        ms, loss = fields["train_time_ms"], fields["val_loss" if validates else "train_loss"]
        need(loss > 0, f"metrics.jsonl: the loss of step {step} is {loss}")
        late = int(row[4]) - ms  # the clock goes on between the two, but not while it validates
        same = -0.51 <= late <= (0.51 if validates else LATE_MS)
        differ = f"log.txt and metrics.jsonl disagree on the {{}} of step {step}: {{}} and {{}}"
        need(same, differ.format("time", row[4], f"{ms} ms"))
        same = not validates or abs(float(row[3]) - loss) < 0.51e-4
        need(same, differ.format("loss", row[3], loss))
        same = abs(float(row[5]) * max(step, 1) - int(row[4])) <= 0.51 + 0.0051 * step
        need(same, f"log.txt: step_avg times {step} steps is not train_time")
    for times in ([int(row[4]) for row in rows], [row["train_time_ms"] for row in metrics]):
        forward = all(a <= b for a, b in pairwise(times)) and 0 <= times[0] < times[-1]
        need(forward, "times are not monotonic: the clock went backwards")
    ends = [(0.0,), *run.losses("train_loss")]
    need(all(a[0] < b[0] for a, b in pairwise(ends)), "the clock stood still in a step")
    for name in ("tokens", "train_time_ms", "val_loss", "steps"):
        said, value = facts[name], (metrics[-1] | {"steps": total})[name]
        need(said == value, f"run.json and metrics.jsonl disagree: {name} {said} and {value}")


# ------------------------------------------------------------------------------------------------
# The rules: of a run, and of the runs of a record together
# ------------------------------------------------------------------------------------------------


def hardware(run: Run) -> str:
    """The class in which a run competes; times of different classes are not compared."""
    devices, host = run.facts["devices"], run.facts["host"]
    if devices["platform"] == "cpu":
        model, cores = " ".join(host["cpu"].split()), host["cores"]
        return f"{model}, {cores} core{'s' * (cores != 1)}"
    return f"{devices['count']} x {' '.join(devices['kind'].split())}"


def stream_name(track: Track, data: dict) -> str:
    """The token stream that these shards are said to be."""
    val = f"{track.corpus}_val_000000.bin"
    need(val in data, f"token stream other than the rules': there is no {val}")
    return track.corpus if track.shard_bytes else f"{track.corpus}-{data[val]['sha256'][:8]}"


def check_stream(track: Track, run: Run, pinned: dict):
    """The run read the track's token stream: `pinned` has size and hash of each of its shards."""
    data, corpus = run.facts["data"], track.corpus
    known = pinned.get(stream_name(track, data), {})
    names = [f"{corpus}_train_{i:06}.bin" for i in range(1, len(data))]
    other = "token stream other than the rules'"
    whole = set(data) == {f"{corpus}_val_000000.bin", *names}
    need(whole, f"{other}: {', '.join(sorted(data))}")
    for name, shard in sorted(data.items()):
        right = track.shard_bytes in (0, shard["bytes"]) and known.get(name) == shard
        what = f"{name} with {shard['bytes']} bytes and sha256 {shard['sha256'][:12]}"
        need(right, f"{other}: {what} is not in tokens.json")
    same = len({shard["sha256"] for shard in data.values()}) < len(data)
    need(not same, f"{other}: two of its shards are the same, or it trains on the validation's")
    there = (data[f"{corpus}_val_000000.bin"]["bytes"] - 1024) // 2
    few = f"the validation shard holds {there} tokens, too few for {track.val_tokens}"
    need(there > track.val_tokens, few)
    there = sum((data[name]["bytes"] - 1024) // 2 for name in names)
    taken = run.metrics[-1]["tokens"]
    need(taken < there, f"trained on {taken} tokens, its shards hold {there}: read twice?")


def check_run(track: Track, run: Run, pinned: dict):
    """The run keeps the rules of the track."""
    config, devices = run.facts["config"], run.facts["devices"]
    val_tokens, targets = config["val_tokens"], {config["target"], run.facts["target"]}
    right = val_tokens == track.val_tokens
    need(right, f"wrong number of validation tokens: {val_tokens}, not {track.val_tokens}")
    how = f"run with --set target={track.target}"
    need(targets == {track.target}, f"the run's target is {targets}, the track's another: {how}")
    count, kind = devices["count"], devices["kind"]
    right = track.platform in ("", devices["platform"]) and track.devices in (0, count)
    right = right and track.kind in kind and "MIG" not in kind  # a part of a GPU is no GPU
    need(right, f"{count} x {kind} is not the hardware of this track")
    processes = devices["processes"]
    one = track.processes in (0, processes)
    need(one, f"{processes} processes: one drives all devices on this track")
    check_command(run)
    check_stream(track, run, pinned)
    if track.batch_tokens:
        sizes, fixed = {stage["batch_tokens"] for stage in config["stages"]}, track.batch_tokens
        need(sizes == {fixed}, f"every step of this track takes {fixed} tokens, not {sizes}")
        found = architecture(config)
        for name in ARCHITECTURE | found:
            got, want = found.get(name, "none"), ARCHITECTURE.get(name, "none")
            need(got == want, f"{name} is {want} on this track, not {got}")


def architecture(config: dict) -> dict:
    """What ARCHITECTURE has, of a config; a layer as words for all that is set in it."""
    found = {name: config[name] for name in ARCHITECTURE if "." not in name}
    for i, layer in enumerate(config["layers"]):
        words = [layer["attends"], *(name for name, value in layer.items() if value is True)]
        words.append(f"mlps={layer['mlps']}")
        found[f"layers.{i}"] = " ".join(filter(None, words))
    return found


def check_command(run: Run):
    """The run's config is what its command asked for, and no command asked for a profile."""
    for command in run.commands:
        need(not launch(command).profile, "a run with --profile is no record")
    for key, text in launch(run.commands[0]).asked.items():
        value = run.facts["config"]
        for part in key.split("."):
            value = value[int(part) if isinstance(value, list) else part]
        numbers = text.strip("()[], ").split(",") if not isinstance(value, str) else []
        same = text == value or [float(x) for x in numbers if x] in (value, [value])
        need(same, f"the command asks for {key}={text}, the config has {value}")


def essence(run: Run) -> dict:
    """What makes the run what it is, but for its seed and its machine."""
    facts = {name: run.facts[name] for name in ("source_sha256", "versions", "environment")}
    return facts | {"config": run.facts["config"] | FREE}


def check_runs(runs: list[Run]):
    """The runs are samples of one thing: same source, config and machine, other seeds."""
    need(len(runs) >= 2, "one run has no p-value: at least two seeds are needed")
    first = runs[0]

    def same(what, value):
        for run in runs[1:]:
            both = f"{run_id(first)} and {run_id(run)}"
            need(value(run) == value(first), f"{what} differs between {both}")

    for name in essence(first):
        same(name, lambda run, name=name: essence(run)[name])
    for name in ("devices", "host", "choices", "settings", "data"):
        same(name, lambda run, name=name: run.facts.get(name))
    same("the command", lambda run: launch(run.commands[0]).words)
    seeds = [run.facts["seed"] for run in runs]
    need(len(set(seeds)) == len(seeds), f"seeds repeat: {seeds} are not independent samples")
    gaps = f"seeds {seeds} are not 0 to {len(seeds) - 1}: to choose seeds is to choose losses"
    need(sorted(seeds) == list(range(len(seeds))), gaps)
    for one, other in combinations(sorted(runs, key=began), 2):
        check_apart(one, other)
        ended = began(one) + timedelta(seconds=one.seconds - 1)  # its name has whole seconds
        both = f"{run_id(other)} began on this machine before {run_id(one)} had ended"
        need(one.facts["resumed"] or ended <= began(other), f"runs overlap: {both}")


def check_apart(one: Run, other: Run):
    """Neither is made from the other, by the differences of losses and of times from step to step.

    What is added to all steps and a factor are taken out first. Of two honest runs one step in a
    hundred is as near as half of the steps must be to be refused.
    """
    steps = min(len(run.changes[0]) for run in (one, other))
    same = one.facts["seed"] == other.facts["seed"]  # in two records: the same in less time
    for i, what, near in ((0, "training losses", 1e-4), (1, "times", 2e-6)):
        a, b = (x - np.mean(x) for x in (one.changes[i, :steps], other.changes[i, :steps]))
        apart = np.abs(b - a * (a @ b) / max(a @ a, 1e-300))
        copied = steps >= 8 and np.median(apart) < near and not (same and i == 0)
        need(not copied, f"seeds repeat: {run_id(one)} and {run_id(other)} have the same {what}")


def derive(track: Track, runs: list[Run]) -> dict:
    """All that record.json says of the runs; a function of their logs."""
    runs = sorted(runs, key=lambda run: run.facts["seed"])
    losses, seconds = [run.loss for run in runs], [run.seconds for run in runs]
    facts, mean = runs[0].facts, float(np.mean(losses))
    p_value = stats.ttest_1samp(losses, track.target, alternative="less").pvalue
    return {
        "date": f"{max(map(began, runs)):%Y-%m-%d}",
        "runs": [run_id(run) for run in runs],
        "source_sha256": facts["source_sha256"],
        "hardware": hardware(runs[0]),
        "versions": facts["versions"],
        "stream": stream_name(track, facts["data"]),
        "command": shlex.join(["python", "train_gpt.py", *launch(runs[0].commands[0]).words]),
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


def judge(track: Track, runs: list[Run], pinned: dict) -> dict:
    """What record.json says of runs that keep all rules but those of rank."""
    for run in runs:
        with about(run_id(run)):
            check_run(track, run, pinned)
    check_runs(runs)
    result = derive(track, runs)
    check_statistics(track, result)
    return result


def began(run: Run) -> datetime:
    """When it started."""
    return datetime.strptime(run_id(run)[:15], "%Y%m%d-%H%M%S")


class CommandLine(argparse.ArgumentParser):
    """A parser that refuses where others end the program."""

    def error(self, message):
        raise Refused(f"no command of train_gpt.py: {message}")


def launch(command: str) -> argparse.Namespace:
    """What a command says: `asked` of which field of the config, and its `words` but seed, places.

    It takes abbreviations as the trainer of older records did.
    """
    parser = CommandLine(add_help=False)
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    parser.add_argument("--profile", action="store_true")
    for option in ("seed", "out", "data", "cache", "coordinator", "processes", "process-id"):
        parser.add_argument(f"--{option}")
    words = shlex.split(command)
    args, rest = parser.parse_known_args(words[2:] if words[:1] == ["python"] else words)
    args.words = rest + ["--set"] * bool(args.set) + args.set
    items = ["seed=0", *(f"preset={word}" for word in rest if not word.startswith("-")), *args.set]
    items += [f"seed={args.seed}"] if args.seed else []
    args.asked = dict(item.split("=", 1) for item in items if not item.startswith("data="))
    return args


def check_statistics(track: Track, result: dict):
    """The mean loss is below the target, and not by chance."""
    mean, target = result["mean_loss"], track.target
    need(mean <= target, f"the mean loss {mean:.4f} is above the target {target}")
    if track.batch_tokens:
        margin = result["margin"]
        reason = f"(target - mean) * sqrt(n) is {margin:.4f}, less than {STEP_MARGIN}"
        need(margin >= STEP_MARGIN, reason)
    else:
        p_value = result["p_value"]
        reason = f"p = {p_value} that the mean loss is not below {target}, not < {P_VALUE}"
        need(p_value < P_VALUE, f"{reason}: more seeds, or a lower loss")


def check_beats(record: "Record", other: "Record"):
    """The record changes something, and takes fewer steps, or less time than can be chance."""
    track, result, standing = record.track, record.result, other.result
    slow, unit = "not faster than the standing record", "steps" if track.batch_tokens else "s"
    key = "steps" if track.batch_tokens else "mean_seconds"
    new, old = result[key], standing[key]
    need(new < old, f"{slow}: {new} {unit}, that one takes {old} {unit}")
    if not track.batch_tokens:
        times = result["seconds"], standing["seconds"]
        p_value = stats.ttest_ind(*times, equal_var=False, alternative="less").pvalue
        reason = f"{slow} beyond chance: {new} s against {old} s, p = {p_value:.2g} (Welch)"
        need(p_value < P_VALUE, f"{reason}, not < {P_VALUE}")
    older = f"of {result['date']}, older than {other.name}, which it beats"
    need(result["date"] >= standing["date"], older)
    changed = essence(record.runs[0]) != essence(other.runs[0])
    need(changed, f"nothing was changed since {other.name}: same source, config and environment")


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
    return read_json(root / "tokens.json", TOKENS)


def check_record(folder: Path, pinned: dict) -> Record:
    """The record in `folder`, derived anew and held against all rules but those of rank."""
    with about(f"{folder.parent.name}/{folder.name}"):
        fields = read_json(folder / "record.json", RECORD)
        known = fields["track"] == folder.parent.name in TRACKS
        need(known, f"it is in the folder of no track, or of another than its {fields['track']}")
        links = [path.name for path in (folder, *folder.rglob("*")) if path.is_symlink()]
        need(not links, f"links are no evidence, the files are needed: {links}")
        runs = [read_run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
        whole = {f"{run_id(run)}/{name}" for run in runs for name in FILES}
        whole |= {"record.json", "README.md", *map(run_id, runs)}
        stray = {path.relative_to(folder).as_posix() for path in folder.rglob("*")} ^ whole
        need(not stray, f"too many or missing: {', '.join(sorted(stray))}")
        result, claimed = judge(TRACKS[fields["track"]], runs, pinned), fields["result"]
        for key in result.keys() | claimed.keys():
            got, want = claimed.get(key, "nothing"), result.get(key, "nothing")
            same = json.dumps(got, sort_keys=True) == json.dumps(want, sort_keys=True)
            need(same, f"record.json says {key} {got}, from the logs it is {want}")
        need(folder.name == f"{result['date']}_{fields['name']}", "folder, name and date differ")
        with about("README.md"):
            page = read_text(folder / "README.md")
        need(page.startswith(describe(fields)), "its README.md above the notes is not as generated")
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
                check_beats(record, places[place])


def chain(records: list[Record], competition) -> list[Record]:
    """The records of a competition, from the first to the standing one."""
    after = {r.fields["beats"]: r for r in records if r.competition == competition}
    found = []
    while (found[-1].name if found else None) in after:
        found.append(after[found[-1].name if found else None])
    return found


def record_folders(root: Path) -> list[Path]:
    """All that claim to be records, those outside the tracks' folders too."""
    claims = {path.parent for path in root.glob("*/*/record.json")}
    return sorted(claims | {x for name in TRACKS for x in root.glob(f"{name}/*") if x.is_dir()})


def check_together(records: list[Record], pinned: dict):
    """No run of a record is made from one of another, and tokens.json has only what they read."""
    for one, other in combinations(records, 2):
        for runs in product(one.runs, other.runs):
            check_apart(*runs)
    read = {(x.result["stream"], name) for x in records for name in x.runs[0].facts["data"]}
    spare = {(stream, name) for stream, shards in pinned.items() for name in shards} - read
    names = ", ".join(sorted(" of ".join(x[::-1]) for x in spare))
    need(not spare and all(pinned.values()), f"tokens.json: no record reads {names or 'a stream'}")


def equal(a, b) -> bool:
    """Of two numbers, or None, but for the last digits: from 3.12 on Python's sum has others."""
    return a == b if None in (a, b) else math.isclose(a, b)


def check_prediction(path: Path):
    """A preflight.json is as records/preflight.py writes it, and its totals are of its programs."""
    with about(f"predicted/{path.parent.name}"):
        report = read_json(path, PREDICTION)
        rows = [row for row in report["variants"] if row["name"] != "eval"]
        grads, want = [row for row in rows if row["name"].startswith("grads")], {}
        for name, key in SUMS.items():
            each = [row[key] for row in rows]
            whole = None not in each and sum(row[key] * row["steps"] for row in rows) / 1e3
            want[name] = None if None in each else whole
        want["sum_seconds"] = None if None in want.values() else sum(want.values())
        want["total_steps"] = sum(row["steps"] for row in grads)
        want["total_tokens"] = round(sum(row["steps"] * row["tokens_per_step"] for row in grads))
        there = report | report["predicted"]
        wrong = [name for name, value in want.items() if not equal(there[name], value)]
        need(not wrong, f"preflight.json: its programs add up to other {', '.join(wrong)}")


def check_all(root: Path, more: tuple[Record, ...] = ()) -> tuple[list[Record], list[str]]:
    """(the records, why what is not among them was refused); `more` are about to join them."""
    refusals, pinned = [], read_tokens(root)

    def attempt(check, *args):
        try:
            return [check(*args)]
        except Refused as error:
            refusals.append(str(error))
            return []

    records = [x for path in record_folders(root) for x in attempt(check_record, path, pinned)]
    for path in sorted(root.glob("predicted/*/preflight.json")):
        attempt(check_prediction, path)
    if not refusals:  # who beats whom makes sense among valid records only
        attempt(check_ranks, records)
        attempt(check_together, [*records, *more], pinned)
    return records, refusals


def all_valid(root: Path, more: tuple[Record, ...] = ()) -> list[Record]:
    """The records; Refused if one of them is not valid, or not beside `more`."""
    records, refusals = check_all(root, more)
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
