"""The rules for runs and records. They are checked by reading logs; no source is executed.

A record is a folder records/TRACK/DATE_NAME/. It has record.json (the author's description and the
results), source.py (the train_gpt.py of its runs) and one folder per run. A run folder has the
three files that train_gpt.py writes: log.txt, metrics.jsonl and run.json. In a record, log.txt
begins with the SHA-256 of source.py instead of the source (see `source_line`). In older records and
in the run directories of train_gpt.py, log.txt contains the source itself.

All results are derived from the logs again and compared. Only a few fields of a run's config are
read (see `planned`), so records stay valid when train_gpt.py changes.

tokens.json has the size and hash of each shard that a record may use, by token stream: `fineweb`,
or `builtin-` and the beginning of a hash, because every version of Python has its own demo corpus.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import re
import shlex
import sys
import tokenize
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import accumulate, combinations, islice, pairwise
from pathlib import Path
from typing import NamedTuple

try:
    import numpy as np
    import scipy  # imports its submodules when they are used
except ImportError as error:
    sys.exit(f"error: {error}: pip install -r requirements.txt -r records/requirements.txt")

# Number of runs of a record -> limit of the p-values of its mean loss and of its gain over the
# standing record. With other numbers, or with one limit for all, an author could add runs until a
# test passes.
P_VALUES = {4: 0.01, 8: 0.005, 16: 0.0025}
# Records that are older than the rules of check_new, and their digests. They can have any number of
# runs, with the limit for 4. No other record may be added here.
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
STEP_MARGIN = 0.004  # least (target - mean loss) * sqrt(runs) on tracks that rank by steps
FREE = {"seed": 0, "data": ""}  # fields in which equal configs may differ
NOT_PLAIN = re.compile(r"[^\n\t -~]")  # characters other than printable ASCII, tabs and line ends
NAME = re.compile(r"[A-Za-z0-9-]+")  # of a record
HASH = re.compile(r"[0-9a-f]{64}")  # SHA-256
CLOCK_MS = 5  # largest difference between the times of a step in log.txt and in metrics.jsonl
RULE = re.compile(r"^={100}\n", re.M)  # separates the sections of log.txt
SOURCE_FILE = "source.py"  # in a record's folder: the source of all its runs
SOURCE_LINE = f"source: ../{SOURCE_FILE}"  # start of a log without source; it is not valid Python
STEP = re.compile(r"step:(\d+)/\d+ (?:val_loss:(\S+) )?train_time:(\d+)ms step_avg:\S+ms")


class Refused(Exception):
    """The reason to refuse a record, in one sentence for the terminal."""


def require(holds, reason: str):
    """Raise Refused for `reason` unless the condition holds."""
    if not holds:
        raise Refused(reason)


def agree(name: str, got, want):
    """Raise Refused unless both values of `name` are equal."""
    require(got == want, f"{name}: {got!s:.200}, not {want!s:.200}")


def escaped(character: str) -> str:
    """Return the number of a character, as in <U+001B>."""
    return f"<U+{ord(character):04X}>"


def visible(text: str) -> str:
    """Return a text as one line, with an escape for every character that is not printable."""
    text = text.replace("<U+", escaped("<") + "U+")  # so different texts never look equal
    return "".join(x if x.isprintable() else escaped(x) for x in text)


@contextlib.contextmanager
def about(name):
    """Prefix the reasons of refusals inside with `name`; refuse after any other error, too."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{name}: {error}") from None
    except Exception as error:  # a damaged file can cause any exception
        reason = f"{type(error).__name__}: {error}"
        raise Refused(f"{name}: cannot be read ({reason})") from None


def need_no_link(path: Path):
    """Refuse a symbolic link: it could lead to a private file of the reviewer."""
    require(not path.is_symlink(), f"{path.name} is a symbolic link")


def read(path: Path, parse: Callable = json.loads):
    """Return the parsed text of a regular file (a pipe, for example, has no end)."""
    with about(path.name):
        need_no_link(path)
        require(path.is_file(), "no such file")
        return parse(path.read_bytes().decode())


def read_json(path: Path) -> dict:
    """Return the object in a JSON file."""
    content = read(path)
    require(isinstance(content, dict), f"{path.name}: is not a JSON object")
    return content


class Track(NamedTuple):
    """The requirements of a track, from tracks.json."""

    target: float = 3.28
    val_tokens: int = 10_485_760
    corpus: str = "fineweb"  # prefix of the names of its shards
    kind: str = ""  # part of the device kind
    devices: dict = {}  # required facts about the devices in run.json
    batch_tokens: int = 0  # tokens per step; if not 0, records are ranked by steps
    # Largest number of parameters. If not 0, the track has no target, records are ranked by loss,
    # and training tokens may be read any number of times.
    parameters: int = 0

    @property
    def ranked_by(self) -> str:
        """The quantity that ranks records (seconds, steps or loss); lower is better."""
        if self.parameters:
            return "loss"
        return "steps" if self.batch_tokens else "seconds"


TRACKS = read_json(Path(__file__).with_name("tracks.json")).items()
TRACKS = {name: Track(**fixed) for name, fixed in TRACKS}


# ---- One run: its three files, and whether they agree ------------------------------------------


class Run(NamedTuple):
    """The files of one run."""

    folder: Path
    source: bytes  # from log.txt, or from source.py in the record's folder
    in_log: bool  # whether log.txt contains the source
    words: list[str]  # arguments of train_gpt.py, without seed and folders
    facts: dict  # run.json
    metrics: list[dict]  # metrics.jsonl
    began: datetime  # start time from its name, in whole seconds

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
        """The hardware class; times of different classes are not compared."""
        devices = self.facts["devices"]
        host = self.facts["host"]
        if devices["platform"] == "cpu":
            return f"{' '.join(host['cpu'].split())}, {host['cores']} cores"
        return f"{devices['count']} x {devices['kind']}"

    @property
    def train_losses(self) -> list[float]:
        """The training loss of each step."""
        return [row["train_loss"] for row in self.metrics if "train_loss" in row]


def planned(config: dict) -> Iterator[tuple[int, bool, int]]:
    """Yield (steps done, whether it is a validation, tokens so far) of each line of a whole run."""
    steps = config["steps"]
    every = config["val_every"]
    shares = accumulate(stage["share"] for stage in config["stages"])
    ends = [round(share * (steps - config["extension"])) for share in shares]
    ends[-1] = steps
    step, tokens = 0, 0
    for stage, end in zip(config["stages"], ends, strict=True):
        while step < min(end, steps):
            if every and step % every == 0:
                yield step, True, tokens
            step += 1
            tokens += stage["batch_tokens"]
            yield step, False, tokens
    yield steps, True, tokens


def source_line(source: bytes) -> str:
    """Return the line that replaces the source in the logs of a record."""
    return f"{SOURCE_LINE}, sha256 {hashlib.sha256(source).hexdigest()}\n"


def source_of(folder: Path, section: str) -> tuple[bytes, bool]:
    """Return (source of a run, whether its log contains it), given the first section of the log."""
    if not section.startswith(SOURCE_LINE):
        return section.removesuffix("\n").encode(), True
    line, _, more = section.partition("\n")
    require(not more, f"log.txt has a source although it refers to {SOURCE_FILE}")
    with about("the source that log.txt refers to"):
        source = read(folder.parent / SOURCE_FILE, str.encode)
    agree(f"log.txt refers to another {SOURCE_FILE}", line, source_line(source)[:-1])
    return source, False


def read_run(folder: Path) -> Run:
    """Return the run in `folder`; refuse it if its files are incomplete or contradictory."""
    with about(folder.name):
        facts = read_json(folder / "run.json")
        metrics = read(folder / "metrics.jsonl", lambda text: [*map(json.loads, text.splitlines())])
        renamed = f"its folder must be named {facts['run_id']}, as in run.json"
        require(facts["run_id"] == folder.name, renamed)
        with about("the date and time in its name"):
            began = datetime.strptime(folder.name[:15], "%Y%m%d-%H%M%S")
        first, *sections = read(folder / "log.txt", RULE.split)
        heads = [section.split("\n") for section in sections[::2]]
        command = next((line[9:] for line in heads[0] if line.startswith("command: ")), "")
        source, in_log = source_of(folder, first)
        run = Run(folder, source, in_log, launch(command), facts, metrics, began)
        check_heads(run, heads)
        lines = [STEP.fullmatch(line) for body in sections[1::2] for line in body.split("\n")]
        check_steps(run, [line for line in lines if line])
        return run


def check_heads(run: Run, heads: list[list[str]]):
    """Compare the lines in log.txt before the first step, and after each resume, with run.json."""
    facts = run.facts
    resumes = len(heads) - 1
    changed = [x for head in heads[1:] for x in head if x.startswith(("source: ", "config: "))]
    require(not changed, "it was resumed with another source or other settings")
    agree("resumed in run.json, in log.txt", facts["resumed"], resumes > 0)
    digest = hashlib.sha256(run.source).hexdigest()
    agree("sha256 in run.json, of the source", facts["source_sha256"], digest)
    agree("seed in run.json, in its config", facts["seed"], facts["config"]["seed"])
    logged = next((json.loads(x[8:]) for x in heads[0] if x.startswith("config: ")), {})
    moved = {"data": "", "devices": 0} if resumes else {}  # fields that a resume may change
    agree("config in run.json, in log.txt", facts["config"] | moved, logged | moved)
    has_command = f"command: {facts['command']}" in heads[-1]
    require(has_command, f"log.txt does not have the command of run.json, {facts['command']}")
    want = [f"{package} {version}" for package, version in facts["versions"].items()]
    want += ["{count} x {kind} ({platform})".format(**facts["devices"])]
    names = ("host", "environment", "choices", "parameters", "data")  # some are not in older logs
    want += [f"{name}: {json.dumps(facts[name])}" for name in names if name in facts]
    for line in want:
        in_all = all(line in head for head in heads)
        require(in_all, f"log.txt does not have this line of run.json: {line:.100}")


def check_steps(run: Run, lines: list[re.Match]):
    """Compare the steps in log.txt and in metrics.jsonl with each other and with the config."""
    facts = run.facts
    agree("finished in run.json", facts["finished"], True)
    plan = [*islice(planned(facts["config"]), len(lines) + 1)]  # a config can have any steps
    counts = [len(lines), len(run.metrics)]
    agree("number of losses in log.txt, in metrics.jsonl", counts, [len(plan)] * 2)
    before = -1.0
    for (step, validates, tokens), line, row in zip(plan, lines, run.metrics, strict=True):
        with about(f"step {step}"):
            ms = row["train_time_ms"]
            loss = row["val_loss" if validates else "train_loss"]
            agree("in metrics.jsonl", (row["step"], row["tokens"]), (step, tokens))
            agree("in log.txt", (int(line[1]), line[2] is not None), (step, validates))
            near = abs(int(line[3]) - ms) <= CLOCK_MS
            require(near, f"{line[3]} ms in log.txt, {ms} in metrics.jsonl")
            near = not validates or abs(float(line[2]) - loss) < 0.51e-4
            require(near, f"loss {line[2]} in log.txt, {loss} in metrics.jsonl")
            require(0 < loss < 1000, f"{loss} is not a loss")
            require(ms > before or (validates and ms == before), "the clock did not advance")
            before = ms
    last = run.metrics[-1] | {"steps": step}
    for name in ("steps", "tokens", "train_time_ms", "val_loss"):
        agree(f"{name} in run.json, in metrics.jsonl", facts[name], last[name])


# ---- The rules: for one run, and for the runs of a record together -----------------------------


class Words(argparse.ArgumentParser):
    """An argparse parser that raises ValueErrors."""

    def error(self, message):
        raise ValueError(message)


def launch(command: str) -> list[str]:
    """Return the arguments in the command of a run, without seed, folders and hosts."""
    parser = Words(add_help=False)
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    for option in ("seed", "out", "data", "cache", "coordinator", "processes", "process-id"):
        parser.add_argument(f"--{option}")
    args, words = parser.parse_known_args(shlex.split(command.removeprefix("python "))[1:])
    return words + ["--set"] * bool(args.set) + args.set


def stream_name(track: Track, data: dict) -> str:
    """Return the name of the token stream with these shards."""
    val = f"{track.corpus}_val_000000.bin"
    require(val in data, f"not the token stream of this track: it has no {val}")
    return "fineweb" if track.corpus == "fineweb" else f"builtin-{data[val]['sha256'][:8]}"


def check_stream(track: Track, run: Run, pinned: dict):
    """Compare the shards of a run with `pinned`: token stream -> size and hash of each shard."""
    data = run.facts["data"]
    known = pinned.get(stream_name(track, data), {})
    names = [f"{track.corpus}_train_{i:06}.bin" for i in range(1, len(data))]
    hashes = [shard["sha256"] for shard in data.values()]
    require(all(map(HASH.fullmatch, hashes)), "the hash of a shard is not 64 hexadecimal digits")
    require(len({*hashes}) == len(hashes), "two shards have the same hash")
    other = "not the token stream of this track"
    agree(other, sorted(data), [*names, f"{track.corpus}_val_000000.bin"])
    for name, shard in data.items():
        require(known.get(name) == shard, f"{other}: {name} {shard} is not in tokens.json")
    available = sum((data[name]["bytes"] - 1024) // 2 for name in names)
    used = run.metrics[-1]["tokens"]
    once = used < available or track.parameters
    require(once, f"trained on {used} tokens, its shards have {available}: tokens were read twice")


def parameters_of(run: Run) -> int:
    """Return the number of parameters that a run reports."""
    size = run.facts.get("parameters")
    is_count = type(size) is int and size > 0
    require(is_count, f"parameters in run.json: {size!r:.50} is not a count")
    return size


def epochs_of(config: dict) -> int:
    """Return the number of training epochs, also from a config with the old name `passes`."""
    return config.get("epochs", config.get("passes", 1))


def check_run(track: Track, run: Run, pinned: dict):
    """Check one run against the rules of its track."""
    config = run.facts["config"]
    devices = run.facts["devices"]
    agree("wrong number of validation tokens", config["val_tokens"], track.val_tokens)
    if track.parameters:
        size = parameters_of(run)
        most = track.parameters
        require(size <= most, f"the model has {size:,} parameters, this track allows {most:,}")
    else:
        agree("wrong target (see --set target=)", config["target"], track.target)
        agree("epochs over the training tokens", epochs_of(config), 1)
    agree("started with the parameters of another run", config.get("start", ""), "")
    for name, want in track.devices.items():
        agree(f"not the hardware of this track, {name}", devices[name], want)
    fits = track.kind in devices["kind"] and "MIG" not in devices["kind"]  # MIG: part of a GPU
    require(fits, f"not the hardware of this track: {devices['kind']}")
    check_stream(track, run, pinned)
    if track.batch_tokens:
        sizes = {stage["batch_tokens"] for stage in config["stages"]}
        agree("tokens per step", sizes, {track.batch_tokens})


def essence(run: Run) -> dict:
    """Return the facts that can change the results of a run, except for seed and machine."""
    facts = {name: run.facts[name] for name in ("source_sha256", "versions")}
    environment = {
        name: value
        for name, value in run.facts["environment"].items()
        if not name.startswith("PYTHON") and name != "TPU_SKIP_MDS_QUERY"  # jax sets it
    }
    return facts | {"environment": environment, "config": run.facts["config"] | FREE}


def check_runs(runs: list[Run]):
    """Check that runs are equal except for their seeds, and that they did not run in parallel."""
    require(len(runs) >= 2, "one run has no p-value: at least two seeds are needed")

    def shared(run):
        names = "devices", "host", "choices", "settings", "data"  # some are not in older logs
        facts = {name: run.facts.get(name) for name in names}
        return essence(run) | facts | {"command": run.words}

    for run in runs[1:]:
        for name, value in shared(run).items():
            agree(f"{name} of {run.folder.name}", value, shared(runs[0])[name])
    seeds = sorted(run.facts["seed"] for run in runs)
    agree("seeds (choosing seeds means choosing losses)", seeds, [*range(len(seeds))])
    for one, other in pairwise(sorted(runs, key=lambda run: run.began)):
        later = (other.began - one.began).total_seconds() > one.seconds - 1  # of whole seconds
        both = f"{other.folder.name} began while {one.folder.name} trained"
        require(later or one.facts["resumed"], f"{both}: make one run after the other")
    check_repeats(runs)


def equal_steps(losses: np.ndarray, others: np.ndarray) -> tuple[int, int]:
    """Return (number of steps with equal losses, number of steps that both have)."""
    steps = min(len(losses), len(others))
    return int(np.sum(losses[:steps] == others[:steps])), steps


def check_repeats(runs: list[Run]):
    """Refuse equal training losses in more than half of the steps, if the seeds are different."""
    losses = [np.array(run.train_losses) for run in runs]
    for (one, a), (other, b) in combinations(zip(runs, losses, strict=True), 2):
        if one.facts["seed"] == other.facts["seed"]:
            continue  # a change that only saves time leaves the losses equal
        equal, steps = equal_steps(a, b)
        same = f"{one.folder.name} and {other.folder.name} have the same training losses"
        require(equal <= steps / 2, f"repeated losses: {same} in {equal} of {steps} steps")


def is_older(folder: Path) -> bool:
    """Return whether a record is in OLDER; refuse it if a file except README.md was changed."""
    known = OLDER.get(f"{folder.parent.name}/{folder.name}")
    if not known:
        return False
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "README.md":
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    changed = "its files were changed: restore them, because it is exempt from newer rules"
    require(digest.hexdigest() == known, changed)
    return True


def check_source(source: bytes):
    """Refuse a source that is not printable ASCII, because reviewers must see all of it."""
    text = source.decode()
    if other := NOT_PLAIN.search(text):
        number = text.count("\n", 0, other.start()) + 1
        plain = "only printable ASCII, tabs and line ends are allowed"
        raise Refused(f"line {number} of its source has U+{ord(other[0]):04X}: {plain}")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    agree("encoding that its source declares", encoding, "utf-8")


def check_new(runs: list[Run]):
    """Check the rules that records in OLDER are exempt from."""
    numbers = ", ".join(map(str, P_VALUES))
    fixed = "the number is fixed so that nobody adds runs until a test passes"
    require(len(runs) in P_VALUES, f"number of runs: {len(runs)}, not {numbers}: {fixed}")
    check_source(runs[0].source)  # the other runs have the same source
    machine = runs[0].hardware
    plain = machine.isascii() and machine.isprintable()
    require(plain, f"the name of its machine, {machine}, is not printable ASCII")
    tomorrow = datetime.now().date() + timedelta(days=1)
    for run in runs:
        with about(run.folder.name):
            require(run.facts.get("choices"), "run.json has no choices")
            parameters_of(run)
            require(run.began.date() <= tomorrow, "it began in the future: check the clock")


def judge(track: Track, runs: list[Run], pinned: dict, older: bool = False) -> dict:
    """Return the results of runs for record.json; refuse runs that break a rule of the track."""
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
    if track.parameters:
        result |= {"parameters": facts["parameters"], "passes": epochs_of(facts["config"])}
    else:
        result |= proof(track, losses, P_VALUES[4 if older else len(runs)])
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
    """Return p-value and margin of the mean loss; refuse it if it may be above the target."""
    mean = np.mean(losses)
    p_value = scipy.stats.ttest_1samp(losses, track.target, alternative="less").pvalue
    p_value = float(f"{p_value:.3g}")
    margin = round(float(track.target - mean) * math.sqrt(len(losses)), 6)
    require(mean <= track.target, f"the mean loss {mean:.4f} is above the target {track.target}")
    if track.batch_tokens:
        reason = f"(target - mean) * sqrt(n) is {margin:.4f}, less than {STEP_MARGIN}"
        require(margin >= STEP_MARGIN, reason)
    else:
        reason = f"p = {p_value} that the mean loss is not below {track.target}"
        require(p_value < limit, f"{reason}, not < {limit}: more seeds or a lower loss are needed")
    return {"p_value": p_value, "margin": margin}


def price(rate: float | None, result: dict) -> float | None:
    """Return the training costs in dollars, for a machine that costs `rate` dollars per hour."""
    right = rate is None or (type(rate) in (int, float) and 0 < rate < 1e6)
    require(right, f"--rate {rate}: dollars per hour of the machine, such as 2.49")
    return rate and round(rate * result["mean_seconds"] / 3600, 4)


class Record(NamedTuple):
    """A folder of runs that follow the rules."""

    folder: Path
    fields: dict  # record.json
    result: dict  # its "result", as `judge` returns it
    runs: list[Run]
    older: bool = False  # see is_older

    @property
    def label(self) -> str:
        """Track and folder, as in cpu/2026-11-21_Baseline."""
        return f"{self.fields['track']}/{self.folder.name}"

    @property
    def ranked_by(self) -> str:
        """The quantity that ranks the records of its track."""
        return TRACKS[self.fields["track"]].ranked_by

    @property
    def competition(self) -> tuple[str, str, str]:
        """(track, hardware, token stream); records with the same values compete."""
        machine = self.result["hardware"] if self.ranked_by == "seconds" else "any hardware"
        return self.fields["track"], machine, self.result["stream"]

    @property
    def score(self) -> float:
        """The number that ranks it."""
        name = self.ranked_by
        return self.result[name if name == "steps" else f"mean_{name}"]


def check_beats(record: Record, other: Record):
    """Check that a record changes something and beats the standing record beyond chance."""
    slow = f"not {'better' if record.ranked_by == 'loss' else 'faster'} than the standing record"
    both = f"{record.score} against {other.score}"
    require(record.score < other.score, f"{slow}: {both}")
    if record.ranked_by != "steps":
        key = {"seconds": "seconds", "loss": "losses"}[record.ranked_by]
        samples = record.result[key], other.result[key]
        p_value = scipy.stats.ttest_ind(*samples, equal_var=False, alternative="less").pvalue
        limit = P_VALUES[4 if record.older else len(record.runs)]
        reason = f"{slow} beyond chance: {both}, p = {p_value:.2g} (Welch), not < {limit}"
        require(p_value < limit, reason)
    changed = essence(record.runs[0]) != essence(other.runs[0])
    require(changed, "the source and the config are the same as in the standing record")


def check_one_source(folder: Path, runs: list[Run]):
    """Refuse a log that contains a source in a record with source.py: reviewers read source.py."""
    if (folder / SOURCE_FILE).exists():
        for run in runs:
            twice = f"log.txt has a source although the record has {SOURCE_FILE}"
            require(not run.in_log, f"{run.folder.name}: {twice} (add it again)")


def check_record(folder: Path, pinned: dict) -> Record:
    """Return the record in `folder`; refuse it if it breaks a rule, except the rules of ranking."""
    with about(f"{folder.parent.name}/{folder.name}"):
        for path in (folder, *folder.rglob("*")):
            need_no_link(path)
        older = is_older(folder)
        fields = read_json(folder / "record.json")
        known = fields["track"] == folder.parent.name in TRACKS
        require(known, f"it is not in the folder of its track, {fields['track']}")
        named = NAME.fullmatch(fields["name"])
        require(named, f"name {fields['name']} in record.json: use letters, digits, hyphens")
        require(fields.get("by") and fields.get("what"), "record.json has no `by` or no `what`")
        runs = [read_run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
        check_one_source(folder, runs)
        result = judge(TRACKS[fields["track"]], runs, pinned, older)
        for key in result.keys() | fields["result"].keys():
            agree(f"{key} in record.json", fields["result"].get(key), result.get(key))
        cost = price(fields.get("rate"), result)
        agree("price in record.json", fields.get("price"), cost)
        agree("name of the folder", folder.name, f"{result['date']}_{fields['name']}")
        return Record(folder, fields, result, runs, older)


def chains(records: list[Record]) -> dict[tuple, list[Record]]:
    """Return {competition: its records, from the first to the standing record}."""
    found = {}
    for record in sorted(records, key=lambda r: (r.competition, r.result["date"], -r.score)):
        found.setdefault(record.competition, []).append(record)
    return found


def check_ranks(records: list[Record]):
    """Check that each record beats the record before it, and that no run is a copy of another."""
    check_repeats([run for record in records for run in record.runs])
    for chain in chains(records).values():
        for before, record in pairwise([None, *chain]):
            with about(record.label):
                stood = before.folder.name if before else None
                agree("`beats` in record.json (add it again)", record.fields["beats"], stood)
                if before:
                    check_beats(record, before)


def record_folders(root: Path) -> set[Path]:
    """Return the folders of all records; refuse a record.json in any other place."""
    folders = {path for track in TRACKS for path in root.glob(f"{track}/*/")}
    for path in sorted(root.rglob("record.json")):
        place = path.parent.relative_to(root)
        require(len(place.parts) == 2, f"{place}: records are in TRACK/DATE_NAME")
        folders.add(path.parent)
    return folders


def all_valid(root: Path) -> list[Record]:
    """Return all records; refuse if one of them is not valid."""
    pinned = read_json(root / "tokens.json")
    records = [check_record(folder, pinned) for folder in sorted(record_folders(root))]
    check_ranks(records)
    return records
