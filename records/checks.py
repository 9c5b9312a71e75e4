"""What a run and a record must be. It reads logs; it executes nothing, and imports no trainer.

A record is a folder records/TRACK/DATE_NAME/ with a folder for each run, as train_gpt.py wrote it
(FILES), and record.json: what its author says, and what follows from the logs. Every number is
derived from the logs and compared, by a few fields of a run's config (see `planned`), so a record
can be checked after the trainer has moved on.

tokens.json has the hashes of all shards that a record may use, by stream: `fineweb`, or `builtin-`
and the beginning of a hash, for every version of Python has its own demo corpus.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import NamedTuple

try:
    import numpy as np
    import scipy  # its parts are imported where they are used first
except ImportError as error:
    sys.exit(f"error: {error}: pip install -r requirements.txt")

FILES = ("log.txt", "metrics.jsonl", "run.json")
# Number of runs of a record -> largest p-value of the mean loss, and of the gain over the standing
# record. With other numbers, or one limit for all, runs could be added until a test passes.
P_VALUES = {4: 0.01, 8: 0.005, 16: 0.0025}
# Records from before the rules of check_new, and their digests. They can have any number of runs,
# with the first limit. No others may join them.
# fmt: off
OLDER = {
    "cpu/2026-11-21_Baseline":
        "39592c32f371229bca6b7347f57447aba898174c4f1c76711d128593f7dcef73",
    "cpu/2026-11-21_HigherRates":
        "c34b64061096ed45164442e6a5aa6bfb4fb27e8800fcf963d36b41841eebd444",
    "cpu/2026-11-22_Record92":
        "1f6f4095c3f070b9631cd33a0a2e6420794b9c9af2376c7d8080aff4b9e43dbb",
    "cpu/2026-11-24_FourLayers":
        "fbcd52778c4d6a9678849f8a9ca67966243a5c2fda5d33c679029471aa00b6f1",
    "fixed-data/2026-11-28_First":
        "2980e5582c1902ef97bc01d8a3d8a35bdb3f28df5af0e8f770dbb60b366043ad",
}
# fmt: on
STEP_MARGIN = 0.004  # (target - mean loss) * sqrt(runs), where steps are counted
FREE = {"seed": 0, "data": ""}  # in which configs may differ and still are the same
ASCII = re.compile(r"[\n\t -~]*")  # printable, with tabs and line ends
NAME = re.compile(r"[A-Za-z0-9-]+")  # of a record
HASH = re.compile(r"[0-9a-f]{64}")  # SHA-256
COOKIE = re.compile(r"[ \t]*#.*?coding[:=][ \t]*([-\w.]+)")  # of a source, by PEP 263
CLOCK_MS = 5  # at most, between the times of a step in log.txt and in metrics.jsonl
RULE = re.compile(r"^={100}\n", re.M)
STEP = re.compile(r"step:(\d+)/\d+ (?:val_loss:(\S+) )?train_time:(\d+)ms step_avg:\S+ms")


class Refused(Exception):
    """Why something is no record: one sentence for the terminal."""


def need(holds, reason: str):
    """Refuse for `reason` unless it holds."""
    if not holds:
        raise Refused(reason)


def agree(what: str, got, want):
    """Refuse unless both values are the same."""
    need(got == want, f"{what}: {got!s:.200}, not {want!s:.200}")


def escaped(character: str) -> str:
    """A character by its number, as in <U+001B>."""
    return f"<U+{ord(character):04X}>"


def visible(text: str) -> str:
    """A text as one line, in which characters that a terminal obeys, instead of showing them, are
    escaped. Two texts are never shown as the same, as what looks like an escape is escaped, too."""
    text = text.replace("<U+", escaped("<") + "U+")
    return "".join(x if x.isprintable() else escaped(x) for x in text)


@contextlib.contextmanager
def about(what):
    """Begin the reasons of refusals inside with `what`; what cannot be read is refused."""
    try:
        yield
    except Exception as error:  # a damaged file, or the command in it, can lead to any
        forms = {Refused: "{}", KeyError: "{} is missing"}
        reason = forms.get(type(error), "cannot be read ({})").format(error)
        raise Refused(f"{what}: {reason}") from None


def need_no_link(path: Path):
    """Refuse a symbolic link: it could lead to a file of whoever checks it."""
    need(not path.is_symlink(), f"{path.name} is a symbolic link")


def read(path: Path, parse: Callable = json.loads):
    """What `parse` makes of the text in a file; Refused if it is no regular file (a pipe, say, has
    no end)."""
    with about(path.name):
        need_no_link(path)
        need(path.is_file(), "cannot be read (No such file)")
        return parse(path.read_bytes().decode())


def read_json(path: Path) -> dict:
    """The object in a JSON file."""
    content = read(path)
    need(isinstance(content, dict), f"{path.name}: is no JSON object")
    return content


class Track(NamedTuple):
    """What a track of tracks.json fixes. The rest is free, or for a reviewer to see."""

    target: float = 3.28
    val_tokens: int = 10_485_760
    corpus: str = "fineweb"  # what the names of its shards begin with
    kind: str = ""  # part of the name of the devices
    devices: dict = {}  # what run.json says of them; one process sees one machine
    batch_tokens: int = 0  # of every step. If not 0, records are ranked by steps, not by seconds
    # Numbers of the model, at most. If not 0, there is no target: records are ranked by loss, and
    # training tokens may be read any number of times.
    parameters: int = 0


TRACKS = read_json(Path(__file__).with_name("tracks.json")).items()
TRACKS = {name: Track(**fixed) for name, fixed in TRACKS}


# ---- One run: its three files, and whether they agree ------------------------------------------


class Run(NamedTuple):
    """What one run left behind."""

    folder: Path
    source: bytes  # as its log has it
    words: list[str]  # the arguments that began it, without seed and folders
    asked: dict[str, str]  # what they set: field of the config -> text
    facts: dict  # run.json
    metrics: list[dict]  # metrics.jsonl
    began: datetime  # by its id, in whole seconds

    @property
    def loss(self) -> float:
        """The final validation loss."""
        return self.metrics[-1]["val_loss"]

    @property
    def seconds(self) -> float:
        """The training time."""
        return self.metrics[-1]["train_time_ms"] / 1000

    @property
    def hardware(self) -> str:
        """The class in which it competes; times of different classes are not compared."""
        devices = self.facts["devices"]
        host = self.facts["host"]
        if devices["platform"] == "cpu":
            return f"{' '.join(host['cpu'].split())}, {host['cores']} cores"
        return f"{devices['count']} x {devices['kind']}"

    @property
    def train_losses(self) -> list[float]:
        """The training loss of every step."""
        return [row["train_loss"] for row in self.metrics if "train_loss" in row]


def planned(config: dict, found: list[int] = ()) -> list[tuple[int, bool, int]]:
    """(steps done, whether it is a validation, tokens so far) of every line of a whole run. The
    fields of the config that it reads are part of the format of logs. Refused, before the plan is
    made, unless `found` (lines in log.txt, in metrics.jsonl) are as many."""
    steps = config["steps"]
    every = config["val_every"]
    stages = config["stages"]
    sizes = [stage["batch_tokens"] for stage in stages]
    for number in (steps, every, config["extension"], *sizes):
        need(type(number) is int and number >= 0, f"{number!r:.50} in its config is no count")
    count = steps + 1 + (-(-steps // every) if every else 0)
    agree("losses in log.txt, in metrics.jsonl", found or [count] * 2, [count] * 2)
    ends = accumulate(stage["share"] for stage in stages)
    ends = [round(end * (steps - config["extension"])) for end in ends]
    ends = [0, *ends[:-1], steps]
    need(ends == sorted(ends), f"its stages begin and end at {ends!s:.100}, not one after another")
    each = np.repeat(sizes, np.diff(ends)).tolist()
    plan = []
    for step, tokens in enumerate(accumulate(each, initial=0)):
        if step > 0:
            plan.append((step, False, tokens))
        if step == steps or (every and step % every == 0):
            plan.append((step, True, tokens))
    return plan


def read_run(folder: Path) -> Run:
    """The run in `folder`; Refused if it is not whole, or if its files contradict each other."""
    with about(folder.name):
        facts = read_json(folder / "run.json")
        metrics = read(folder / "metrics.jsonl", lambda text: [*map(json.loads, text.splitlines())])
        renamed = f"its folder must be named {facts['run_id']}, as in run.json"
        need(facts["run_id"] == folder.name, renamed)
        with about("the date and time in its name"):
            began = datetime.strptime(folder.name[:15], "%Y%m%d-%H%M%S")
        source, *sections = read(folder / "log.txt", RULE.split)
        heads = [section.split("\n") for section in sections[::2]]
        command = next((line[9:] for line in heads[0] if line.startswith("command: ")), "")
        source = source.removesuffix("\n").encode()
        run = Run(folder, source, *launch(command), facts, metrics, began)
        check_heads(run, heads)
        lines = [STEP.fullmatch(line) for body in sections[1::2] for line in body.split("\n")]
        check_steps(run, [line for line in lines if line])
        return run


def check_heads(run: Run, heads: list[list[str]]):
    """What log.txt says before its steps, and again after each resume, is what run.json says."""
    facts = run.facts
    resumes = len(heads) - 1
    changed = [x for head in heads[1:] for x in head if x.startswith(("source: ", "config: "))]
    need(not changed, "it was resumed with another source or other settings: that is no record")
    agree("resumed in run.json, by log.txt", facts["resumed"], resumes > 0)
    digest = hashlib.sha256(run.source).hexdigest()
    agree("sha256 in run.json, of the source in log.txt", facts["source_sha256"], digest)
    agree("seed in run.json, in its config", facts["seed"], facts["config"]["seed"])
    begun = next((json.loads(x[8:]) for x in heads[0] if x.startswith("config: ")), {})
    moved = {"data": "", "devices": 0} if resumes else {}  # which a resume may name anew
    agree("config in run.json, in log.txt", facts["config"] | moved, begun | moved)
    said = f"command: {facts['command']}" in heads[-1]
    need(said, f"log.txt does not have the command of run.json, {facts['command']}")
    want = [f"{package} {version}" for package, version in facts["versions"].items()]
    want += ["{count} x {kind} ({platform})".format(**facts["devices"])]
    names = ("host", "environment", "choices", "parameters", "data")  # older logs lack some
    want += [f"{name}: {json.dumps(facts[name])}" for name in names if name in facts]
    for line in want:
        said = all(line in head for head in heads)
        need(said, f"log.txt does not say what run.json does: {line:.100}")


def check_steps(run: Run, lines: list[re.Match]):
    """Every step of the config's plan stands in log.txt and metrics.jsonl, once and the same."""
    facts = run.facts
    agree("finished in run.json", facts["finished"], True)
    plan = planned(facts["config"], [len(lines), len(run.metrics)])
    before = -1.0
    for (step, validates, tokens), line, row in zip(plan, lines, run.metrics, strict=True):
        with about(f"step {step}"):
            ms = row["train_time_ms"]
            loss = row["val_loss" if validates else "train_loss"]
            agree("in metrics.jsonl", (row["step"], row["tokens"]), (step, tokens))
            agree("in log.txt", (int(line[1]), line[2] is not None), (step, validates))
            near = abs(int(line[3]) - ms) <= CLOCK_MS
            need(near, f"{line[3]} ms in log.txt, {ms} in metrics.jsonl")
            near = not validates or abs(float(line[2]) - loss) < 0.51e-4
            need(near, f"loss {line[2]} in log.txt, {loss} in metrics.jsonl")
            need(0 < loss < 1000, f"{loss} is no loss")
            need(ms > before or (validates and ms == before), "the clock went backwards, or stood")
            before = ms
    last = run.metrics[-1] | {"steps": step}
    for name in ("steps", "tokens", "train_time_ms", "val_loss"):
        agree(f"{name} in run.json, in metrics.jsonl", facts[name], last[name])


# ---- The rules: of a run, and of the runs of a record together ---------------------------------


class Words(argparse.ArgumentParser):
    """argparse whose errors are ValueErrors."""

    def error(self, message):
        raise ValueError(message)


def launch(command: str) -> tuple[list[str], dict[str, str]]:
    """(arguments without seed and folders, what they set: field of the config -> text)."""
    parser = Words(add_help=False)
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    for option in ("seed", "out", "data", "cache", "coordinator", "processes", "process-id"):
        parser.add_argument(f"--{option}")
    args, words = parser.parse_known_args(shlex.split(command.removeprefix("python "))[1:])
    asked = [f"seed={args.seed or 0}", *(f"preset={x}" for x in words if not x.startswith("-"))]
    asked += [item for item in args.set if not item.startswith("data=")]
    words += ["--set"] * bool(args.set) + args.set
    return words, dict(item.split("=", 1) for item in asked)


def check_command(run: Run):
    """The run's config is what its command asked for."""
    for key, text in run.asked.items():
        values = [run.facts["config"]]
        for part in key.split("."):
            if part == "*":  # of all stages, say
                values = [x for value in values for x in value]
            else:
                values = [x[int(part) if isinstance(x, list) else part] for x in values]
        said = [text]
        with contextlib.suppress(ValueError, SyntaxError):
            number = ast.literal_eval(text.capitalize())  # true is True
            said += [number, [number], json.loads(json.dumps(number))]  # (1,) is [1]
        for value in values:
            need(value in said, f"the command asks for {key}={text}, the config has {value}")


def stream_name(track: Track, data: dict) -> str:
    """The token stream that these shards are said to be."""
    val = f"{track.corpus}_val_000000.bin"
    need(val in data, f"token stream other than the rules': there is no {val}")
    return "fineweb" if track.corpus == "fineweb" else f"builtin-{data[val]['sha256'][:8]}"


def check_stream(track: Track, run: Run, pinned: dict):
    """The run read the track's token stream: `pinned` has size and hash of each of its shards."""
    data = run.facts["data"]
    known = pinned.get(stream_name(track, data), {})
    names = [f"{track.corpus}_train_{i:06}.bin" for i in range(1, len(data))]
    hashes = [shard["sha256"] for shard in data.values()]
    need(all(map(HASH.fullmatch, hashes)), "the hash of a shard is not 64 hexadecimal digits")
    need(len({*hashes}) == len(hashes), "two shards have the same hash")
    other = "token stream other than the rules'"
    agree(other, sorted(data), [*names, f"{track.corpus}_val_000000.bin"])
    for name, shard in data.items():
        need(known.get(name) == shard, f"{other}: {name} {shard} is not in tokens.json")
    there = sum((data[name]["bytes"] - 1024) // 2 for name in names)
    taken = run.metrics[-1]["tokens"]
    once = taken < there or track.parameters
    need(once, f"trained on {taken} tokens, its shards hold {there}: read twice?")


def parameters_of(run: Run) -> int:
    """The number of parameters that a run reports; Refused if there is none."""
    size = run.facts.get("parameters")
    counted = type(size) is int and size > 0
    need(counted, f"parameters in run.json, {size!r:.50}, is no count")
    return size


def check_run(track: Track, run: Run, pinned: dict):
    """The run keeps the rules of the track."""
    config = run.facts["config"]
    devices = run.facts["devices"]
    agree("wrong number of validation tokens", config["val_tokens"], track.val_tokens)
    if track.parameters:
        size = parameters_of(run)
        most = track.parameters
        need(size <= most, f"the model has {size:,} numbers, this track takes up to {most:,}")
    else:
        agree("wrong target (see --set target=)", config["target"], track.target)
        passes = config.get("passes", 1)  # older runs have none
        agree("passes through the training tokens", passes, 1)
    agree("starts with parameters of a run", config.get("start", ""), "")
    for name, want in track.devices.items():
        agree(f"not the hardware of this track, {name}", devices[name], want)
    right = track.kind in devices["kind"] and "MIG" not in devices["kind"]  # a part is no GPU
    need(right, f"not the hardware of this track: {devices['kind']}")
    check_command(run)
    check_stream(track, run, pinned)
    if track.batch_tokens:
        sizes = {stage["batch_tokens"] for stage in config["stages"]}
        agree("tokens of every step", sizes, {track.batch_tokens})


def essence(run: Run) -> dict:
    """What makes the run what it is, apart from its seed and its machine. Variables that cannot
    change a result are left out: those of Python, and one that jax sets itself."""
    facts = {name: run.facts[name] for name in ("source_sha256", "versions")}
    environment = {
        name: value
        for name, value in run.facts["environment"].items()
        if not name.startswith("PYTHON") and name != "TPU_SKIP_MDS_QUERY"
    }
    return facts | {"environment": environment, "config": run.facts["config"] | FREE}


def check_runs(runs: list[Run]):
    """The runs are samples of one thing: same source, config and machine, other seeds, in turn."""
    need(len(runs) >= 2, "one run has no p-value: at least two seeds are needed")

    def shared(run):
        names = "devices", "host", "choices", "settings", "data"  # older runs lack some
        facts = {name: run.facts.get(name) for name in names}
        return essence(run) | facts | {"command": run.words}

    for run in runs[1:]:
        for name, value in shared(run).items():
            agree(f"{name} of {run.folder.name}", value, shared(runs[0])[name])
    seeds = sorted(run.facts["seed"] for run in runs)
    agree("seeds (to choose seeds is to choose losses)", seeds, [*range(len(seeds))])
    for one, other in pairwise(sorted(runs, key=lambda run: run.began)):
        later = (other.began - one.began).total_seconds() > one.seconds - 1  # of whole seconds
        both = f"{other.folder.name} began while {one.folder.name} trained"
        need(later or one.facts["resumed"], f"{both}: runs are made one after the other")
    check_repeats(runs)


def equal_steps(losses: np.ndarray, others: np.ndarray) -> tuple[int, int]:
    """(number of steps with equal losses, number of steps that both have)."""
    steps = min(len(losses), len(others))
    return int(np.sum(losses[:steps] == others[:steps])), steps


def check_repeats(runs: list[Run]):
    """No two runs with different seeds have the same training losses in more than half of their
    steps. Runs with the same seed may: a change that only saves time leaves the losses equal."""
    losses = [np.array(run.train_losses) for run in runs]
    for (one, a), (other, b) in combinations(zip(runs, losses, strict=True), 2):
        if one.facts["seed"] == other.facts["seed"]:
            continue
        equal, steps = equal_steps(a, b)
        same = f"{one.folder.name} and {other.folder.name} have the same training losses"
        need(equal <= steps / 2, f"seeds repeat: {same} in {equal} of {steps} steps")


def digest(folder: Path) -> str:
    """The SHA-256 of the names and contents of all files in a record but its README.md."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "README.md":
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()


def is_older(folder: Path) -> bool:
    """Whether the record in `folder` is from before the rules of check_new."""
    return f"{folder.parent.name}/{folder.name}" in OLDER


def check_unchanged(folder: Path):
    """An older record is what it was: the rules that it does not have to keep could be broken."""
    if is_older(folder):
        known = OLDER[f"{folder.parent.name}/{folder.name}"]
        changed = "its files were changed: restore them, for it is exempt from newer rules"
        need(digest(folder) == known, changed)


def check_source(source: bytes):
    """A source is printable ASCII, so that a reviewer sees what Python reads."""
    lines = source.decode().split("\n")
    for number, line in enumerate(lines, 1):
        other = next((x for x in line if not ASCII.fullmatch(x)), None)
        plain = "only printable ASCII, tabs and line ends are allowed"
        reason = f"line {number} of its source has U+{ord(other or ' '):04X}: {plain}"
        need(other is None, reason)
    for line in lines[:2]:
        cookie = COOKIE.match(line)
        right = cookie is None or cookie[1].lower() in ("utf-8", "utf8", "ascii")
        need(right, f"its source has another encoding: {line:.100}")


def check_new(runs: list[Run]):
    """The rules that older records need not keep. The number of runs is one of P_VALUES. Each run
    reports its choices and the number of its parameters, and is not from the future. Source, CPU
    and devices are printable ASCII."""
    numbers = ", ".join(map(str, P_VALUES))
    fixed = "a record has one of these numbers, so that no run is added until a test passes"
    need(len(runs) in P_VALUES, f"number of runs: {len(runs)}, not {numbers}: {fixed}")
    check_source(runs[0].source)  # the others have the same source
    machine = runs[0].hardware
    plain = machine.isascii() and machine.isprintable()
    need(plain, f"the name of its machine, {machine}, is not printable ASCII")
    tomorrow = datetime.now().date() + timedelta(days=1)
    for run in runs:
        with about(run.folder.name):
            need(run.facts.get("choices"), "run.json has no choices")
            parameters_of(run)
            need(run.began.date() <= tomorrow, "it began in the future: check the clock")


def judge(track: Track, runs: list[Run], pinned: dict, older: bool = False) -> dict:
    """What record.json says of runs that keep all rules but those of rank, by their logs. `older`:
    see is_older."""
    for run in runs:
        with about(run.folder.name):
            check_run(track, run, pinned)
    check_runs(runs)
    if not older:
        check_new(runs)
    runs = sorted(runs, key=lambda run: run.facts["seed"])
    losses, seconds = [run.loss for run in runs], [run.seconds for run in runs]
    facts = runs[0].facts
    result = {name: facts[name] for name in ("source_sha256", "versions", "steps", "tokens")}
    for name, values, digits in (("loss", losses, 6), ("seconds", seconds, 3)):
        result[f"mean_{name}"] = round(float(np.mean(values)), digits)
        result[f"sd_{name}"] = round(float(np.std(values, ddof=1)), digits)
    limit = P_VALUES[4 if older else len(runs)]
    result |= size_of(facts) if track.parameters else proof(track, losses, limit)
    if facts["devices"]["platform"] == "gpu":
        result["gpu_seconds"] = round(result["mean_seconds"] * facts["devices"]["count"], 3)
    return result | {
        "date": f"{max(run.began for run in runs):%Y-%m-%d}",
        "runs": [run.folder.name for run in runs],
        "hardware": runs[0].hardware,
        "stream": stream_name(track, facts["data"]),
        "command": shlex.join(["python", "train_gpt.py", *runs[0].words]),
        "seeds": [run.facts["seed"] for run in runs],
        "losses": losses,
        "seconds": [round(x, 3) for x in seconds],
        "resumed": [run.folder.name for run in runs if run.facts["resumed"]],
    }


def proof(track: Track, losses: list[float], limit: float) -> dict:
    """By how much, and how surely, the mean loss is below the target; Refused if it is not, or if
    the p-value is not below `limit`."""
    mean = np.mean(losses)
    p_value = scipy.stats.ttest_1samp(losses, track.target, alternative="less").pvalue
    p_value = float(f"{p_value:.3g}")
    margin = round(float(track.target - mean) * math.sqrt(len(losses)), 6)
    need(mean <= track.target, f"the mean loss {mean:.4f} is above the target {track.target}")
    if track.batch_tokens:
        reason = f"(target - mean) * sqrt(n) is {margin:.4f}, less than {STEP_MARGIN}"
        need(margin >= STEP_MARGIN, reason)
    else:
        reason = f"p = {p_value} that the mean loss is not below {track.target}"
        need(p_value < limit, f"{reason}, not < {limit}: more seeds, or a lower loss")
    return {"p_value": p_value, "margin": margin}


def size_of(facts: dict) -> dict:
    """What is shown, where there is no target, in place of a proof."""
    return {"parameters": facts["parameters"], "passes": facts["config"]["passes"]}


def price(rate: float | None, result: dict) -> float | None:
    """Dollars that training costs, at `rate` an hour of the machine; None: not said."""
    right = rate is None or (type(rate) in (int, float) and 0 < rate < 1e6)
    need(right, f"--rate {rate}: dollars an hour of the machine, such as 2.49")
    return rate and round(rate * result["mean_seconds"] / 3600, 4)


class Record(NamedTuple):
    """A folder of runs that keeps the rules."""

    folder: Path
    fields: dict  # record.json
    result: dict  # its "result": the answer of `judge`
    runs: list[Run]

    @property
    def limit(self) -> float:
        """The largest p-value that it may have."""
        return P_VALUES[4 if is_older(self.folder) else len(self.runs)]

    @property
    def ranked_by(self) -> str:
        """What its track ranks by: seconds, steps or loss; the lower one is better."""
        track = TRACKS[self.fields["track"]]
        if track.parameters:
            return "loss"
        return "steps" if track.batch_tokens else "seconds"

    @property
    def competition(self) -> tuple[str, str, str]:
        """(track, hardware, token stream): the records that it is compared with."""
        machine = self.result["hardware"] if self.ranked_by == "seconds" else "any hardware"
        return self.fields["track"], machine, self.result["stream"]

    @property
    def score(self) -> float:
        """The number that it is ranked by."""
        name = self.ranked_by
        return self.result[name if name == "steps" else f"mean_{name}"]


def check_beats(record: Record, other: Record):
    """The record changes something, and takes fewer steps, or less time or loss than can be
    chance."""
    slow = f"not {'better' if record.ranked_by == 'loss' else 'faster'} than the standing record"
    both = f"{record.score} against {other.score}"
    need(record.score < other.score, f"{slow}: {both}")
    if record.ranked_by != "steps":
        key = {"seconds": "seconds", "loss": "losses"}[record.ranked_by]
        samples = record.result[key], other.result[key]
        p_value = scipy.stats.ttest_ind(*samples, equal_var=False, alternative="less").pvalue
        reason = f"{slow} beyond chance: {both}, p = {p_value:.2g} (Welch), not < {record.limit}"
        need(p_value < record.limit, reason)
    changed = essence(record.runs[0]) != essence(other.runs[0])
    need(changed, "nothing was changed since the standing record, neither source nor config")


def check_record(folder: Path, pinned: dict) -> Record:
    """The record in `folder`, derived anew and held against all rules but those of rank."""
    with about(f"{folder.parent.name}/{folder.name}"):
        for path in (folder, *folder.rglob("*")):
            need_no_link(path)
        check_unchanged(folder)
        fields = read_json(folder / "record.json")
        known = fields["track"] == folder.parent.name in TRACKS
        need(known, f"it is in the folder of no track, or of another than its {fields['track']}")
        named = NAME.fullmatch(fields["name"])
        need(named, f"name {fields['name']} in record.json: letters, digits, hyphens")
        need(fields.get("by") and fields.get("what"), "record.json lacks `by` or `what`")
        runs = [read_run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
        result = judge(TRACKS[fields["track"]], runs, pinned, is_older(folder))
        for key in result.keys() | fields["result"].keys():
            agree(f"{key} in record.json", fields["result"].get(key), result.get(key))
        cost = price(fields.get("rate"), result)
        agree("price in record.json", fields.get("price"), cost)
        agree("name of the folder", folder.name, f"{result['date']}_{fields['name']}")
        return Record(folder, fields, result, runs)


def chains(records: list[Record]) -> dict[tuple, list[Record]]:
    """{competition: its records, from the first to the standing one}."""
    found = {}
    for record in sorted(records, key=lambda r: (r.competition, r.result["date"], -r.score)):
        found.setdefault(record.competition, []).append(record)
    return found


def check_ranks(records: list[Record]):
    """Every record beats the one that stood before it in its competition, and says so. No run is a
    copy of a run of another record with another seed."""
    check_repeats([run for record in records for run in record.runs])
    for chain in chains(records).values():
        for before, record in pairwise([None, *chain]):
            with about(f"{record.fields['track']}/{record.folder.name}"):
                stood = before.folder.name if before else None
                agree("it must beat what stood: add it anew", record.fields["beats"], stood)
                if before:
                    check_beats(record, before)


def record_folders(root: Path) -> set[Path]:
    """The folders of all records; Refused if one is in the wrong place."""
    folders = {path for track in TRACKS for path in root.glob(f"{track}/*/")}
    for name, depth in (("record.json", 3), ("run.json", 4)):  # runs need a record
        for path in sorted(root.rglob(name)):
            place = path.relative_to(root)
            right = len(place.parts) == depth
            if place.parts[0] == "measured":  # what is no record: see README.md there
                continue
            need(right, f"{place}: it is not where records are, in TRACK/DATE_NAME")
            folders.add(path.parents[depth - 3])
    return folders


def all_valid(root: Path) -> list[Record]:
    """The records; Refused if one of them is not valid."""
    pinned = read_json(root / "tokens.json")
    records = [check_record(folder, pinned) for folder in sorted(record_folders(root))]
    check_ranks(records)
    return records
