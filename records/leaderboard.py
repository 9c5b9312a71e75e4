"""Records: collect timed runs, check them, rank them, run them again.

    python records/leaderboard.py                # the standings, on the terminal
    python records/leaderboard.py add RUN_DIR... --track T --name NAME --by WHO --what TEXT
    python records/leaderboard.py check          # everything is derived anew from the logs
    python records/leaderboard.py render         # the tables in records/README.md
    python records/leaderboard.py diff records/T/DATE_NAME
    python records/leaderboard.py reproduce records/T/DATE_NAME
    python records/leaderboard.py compare BASE.py CAND.py --runs N -- ARGS

The rules are in README.md. Only `reproduce` and `compare` execute sources, see .github/SECURITY.md.
The others do not need jax.
A refusal is one line with its reason and exit status 1, a wrong command line one line and 2. The
exit status is also 1 if `reproduce` could not compute a loss again: its last line says why.
"""

import argparse
import difflib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import checks as C
import numpy as np
import scipy
from checks import Record, Refused, Run, about, escaped, need, visible
from redact import MARKER, SECRET, copy_redacted, read_texts
from sandbox import sandbox

HERE = Path(__file__).resolve().parent
MARKERS = "<!-- leaderboard: begin, generated -->\n", "<!-- leaderboard: end -->\n"
REPEATED = "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS"  # `reproduce` sets them as they were
LOSS_OFF = 0.002  # at most, between the losses that two programs compute of one model
MAIN = "refs/remotes/origin/main", "refs/heads/main"  # the first of them that a clone has
SAME_LOSS = 1e-6  # at most, between the final losses of runs whose training losses are all equal
LONG_LINE = 200  # characters; what is behind them is easily overlooked
FAR = 200  # lines that differ, above which `diff` looks for a nearer source
VERSIONS = 400  # of train_gpt.py, at most, that it looks at
PLACES = "--data", "--val", "--start", "--cache"  # options of train_gpt.py that take paths
PRESETS = "plain", "tiny", "speedrun", "pointer"  # words of train_gpt.py that are no paths


class Unproven(Exception):
    """A record was reproduced without its loss: the last line on stdout, with exit status 1."""


def add(root: Path, args) -> str:
    """Collect redacted copies of runs into a new record; nothing is written unless it is valid."""
    with tempfile.TemporaryDirectory() as folder:
        kinds, places, runs = set(), set(), []
        for path in args.runs:
            run = C.read_run(Path(os.path.realpath(path)))
            copy = Path(folder, run.folder.name)
            need(not copy.exists(), f"{path} is named twice")
            facts, _, log = read_texts(run.folder)
            is_original = MARKER not in f"{json.dumps(facts)}{log}"
            need(is_original, f"{path} has a {MARKER}...> in it: name the original runs, no copies")
            replaced, left = copy_redacted(run.folder, copy)
            kinds |= replaced
            places |= left
            runs.append(run)
        copies = [C.read_run(copy) for copy in sorted(Path(folder).iterdir())]
        added = add_runs(root, args, runs, copies)
    if places:
        print("paths and URLs in the record, are they private?", file=sys.stderr)
        print("\n".join(map(visible, sorted(places))), file=sys.stderr)
    redacted = f" (redacted: {', '.join(sorted(kinds))})" if kinds else ""
    return f"added {added}{redacted}; next: python records/leaderboard.py render"


def add_runs(root: Path, args, runs: list[Run], copies: list[Run]) -> Path:
    """Make a record of the redacted copies of these runs; returns its folder. Both keep the rules:
    redaction can make different runs equal."""
    named = C.NAME.fullmatch(args.name)
    need(named, f"--name {args.name}: it is part of a folder's: letters, digits, hyphens")
    track = C.TRACKS[args.track]
    pinned = C.read_json(root / "tokens.json")
    before = C.all_valid(root)
    need(args.by.strip() and args.what.strip(), "--by and --what: they are part of the standings")
    fields = {"track": args.track, "name": args.name, "by": args.by, "what": args.what}
    with about(f"{args.track}/{args.name}"):
        if args.pin:  # what is there is not changed; FineWeb has shards that nobody has read yet
            data = runs[0].facts["data"]
            stream = C.stream_name(track, data)
            if stream == "fineweb" or stream not in pinned:
                pinned[stream] = data | pinned.get(stream, {})
        C.judge(track, runs, pinned)
        result = C.judge(track, copies, pinned)
    fields |= {"beats": None, "result": result}
    if args.rate is not None:
        fields |= {"rate": args.rate, "price": C.price(args.rate, result)}
    record = Record(root / args.track / f"{result['date']}_{args.name}", fields, result, copies)
    if standing := C.chains(before).get(record.competition):
        fields["beats"] = standing[-1].folder.name
    C.check_ranks([*before, record])
    record.folder.mkdir(parents=True)
    for run in copies:
        shutil.copytree(run.folder, record.folder / run.folder.name)
    (record.folder / "record.json").write_text(json.dumps(fields, indent=1) + "\n")
    if args.pin:
        (root / "tokens.json").write_text(json.dumps(pinned, indent=1, sort_keys=True) + "\n")
    return record.folder


def table(rows: list[dict]) -> str:
    """A Markdown table of rows with the same columns; no text leaves its cell."""

    def cell(value) -> str:
        text = visible(" ".join(str(value).split()))
        return text.replace("|", "\\|")

    lines = [[*rows[0]], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    cells = [[*map(cell, line)] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def record_row(number: int, record: Record) -> dict:
    """What a record is compared by, for the table of its competition."""
    got, fields = record.result, record.fields
    resumed = f" ({len(got['resumed'])} resumed)" if got["resumed"] else ""
    proof = {
        "seconds": {"proof": "p = {p_value:.1e}"},
        "steps": {"proof": "margin {margin:.4f}"},
        "loss": {"passes": "{passes}", "numbers": "{parameters:,}", "machine": "{hardware}"},
    }[record.ranked_by]
    proof = {column: form.format(**got) for column, form in proof.items()}
    paid = {}
    if "gpu_seconds" in got and record.ranked_by == "seconds":  # others have all in one table
        cost = f"${fields['price']:.2f} at ${fields['rate']:g} an hour" if "rate" in fields else "-"
        paid = {"GPU-seconds": f"{got['gpu_seconds']:,.0f}", "training costs": cost}
    return {
        "#": number,
        "time": f"{got['mean_seconds']:.2f} s ± {got['sd_seconds']:.2f}",
        **paid,
        "steps": f"{got['steps']:,}",
        "tokens": f"{got['tokens']:,}",
        "loss": f"{got['mean_loss']:.4f} ± {got['sd_loss']:.4f}",
        "runs": f"{len(got['runs'])}{resumed}",
        **proof,
        "what": f"[{fields['name']}]({fields['track']}/{record.folder.name}): {fields['what']}",
        "by": fields["by"],
        "date": got["date"],
    }


def predicted_row(root: Path, path: Path) -> dict:
    """What preflight.py said of the time of a run."""
    report = C.read_json(path)
    run = report["predicted"]
    parts = [run[f"train_{x}seconds"] for x in ("", "link_floor_", "moved_floor_")]
    band = "{low_seconds:.0f} to {high_seconds:.0f}".format(**run)
    peak = max(row["bytes"]["peak"] + row["resident_bytes"] for row in report["variants"])
    return {
        "hardware": f"{report['devices']} x {report['device_kind']}",
        "preset": f"[{report['preset']}]({path.relative_to(root).as_posix()})",
        "in all": f"**{sum(parts):.1f} s** ({band})",
        "computed + links + moves": " + ".join(f"{x:.1f}" for x in parts),
        "steps": f"{report['total_steps']:,}",
        "tokens": f"{report['total_tokens']:,}",
        "GiB": f"{peak / 2**30:.1f}",
        "by": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    }


def standings(root: Path, records: list[Record]) -> str:
    """The generated part of records/README.md."""
    text = f"{MARKERS[0]}\n## Standings\n"
    for (track, machine, stream), chain in C.chains(records).items():
        rows = [record_row(number, record) for number, record in enumerate(chain, 1)]
        text += f"\n### `{track}`: {machine}, tokens `{stream}`\n\n{table(rows[::-1])}"
    rows = []
    for path in sorted(root.glob("predicted/*/preflight.json")):
        with about(path.relative_to(root)):
            rows.append(predicted_row(root, path))
    predicted = table(rows) if rows else "None yet."
    return f"{text}\n## Predicted by the compiler\n\n{predicted}\n{MARKERS[1]}"


def render(root: Path, args) -> str:
    """Bring the tables up to date; with --check refuse if they are not."""
    records = C.all_valid(root)
    page = root / "README.md"
    text = page.read_text(encoding="utf-8")
    parts = re.fullmatch(f"(.*?){MARKERS[0]}.*{MARKERS[1]}(.*)", text, re.S)
    need(parts, "README.md has lost the two markers of the leaderboard")
    fresh = parts[1] + standings(root, records) + parts[2]
    if fresh != text:
        need(not args.check, "README.md is stale: run python records/leaderboard.py render")
        page.write_bytes(fresh.encode())  # what cannot be encoded leaves the page alone
    return f"{page} is up to date, {len(records)} records"


def record_before(root: Path, folder: Path, runs: list[Run]) -> Record | None:
    """The standing record in the competition of these runs, which are in `folder`; if that is the
    standing record or an earlier one, the record before it. None if there is none."""
    track = C.read_json(folder / "record.json")["track"]
    need(track in C.TRACKS, f"{folder.name}: there is no track {track}")
    result = {
        "hardware": runs[0].hardware,
        "stream": C.stream_name(C.TRACKS[track], runs[0].facts["data"]),
        "date": f"{max(run.began for run in runs):%Y-%m-%d}",
        "steps": runs[0].facts["steps"],
        "mean_seconds": np.mean([run.seconds for run in runs]),
        "mean_loss": np.mean([run.loss for run in runs]),
    }
    record = Record(folder, {"track": track}, result, runs)
    pinned = C.read_json(root / "tokens.json")
    folders = sorted(C.record_folders(root))
    records = [C.check_record(path, pinned) for path in folders if path != folder]
    if folder in folders:
        chain = C.chains([*records, record])[record.competition]
        chain = chain[: chain.index(record)]
    else:
        chain = C.chains(records).get(record.competition)
    return chain[-1] if chain else None


def settings(runs: list[Run]) -> dict[str, object]:
    """Config, command, environment and versions of runs, a name for each value, as in
    `config.stages.0.share`."""
    run = runs[0]
    facts = {name: run.facts[name] for name in ("config", "environment", "versions")}
    facts["config"] = facts["config"] | C.FREE
    found = {"command": shlex.join(run.words)}
    todo = [*facts.items()]
    while todo:
        name, value = todo.pop(0)
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            todo = [(f"{name}.{key}", part) for key, part in value.items()] + todo
        else:
            found[name] = value
    return found


def changed_settings(old: list[Run], new: list[Run]) -> list[str]:
    """A line for each setting in which the runs of two records differ."""
    old, new = settings(old), settings(new)
    lines = []
    for name in old | new:
        sides = [repr(x[name]) if name in x else "nothing" for x in (old, new)]
        if sides[0] != sides[1]:
            lines.append(f"{name}: {sides[0]} -> {sides[1]}")
    return lines


def equal_losses(old: list[Run], new: list[Run]) -> list[str]:
    """A line for each seed with which the runs of two records have training losses in common: one
    record may be a copy of the other with other times."""
    lines = []
    before = {run.facts["seed"]: run for run in old}
    for run in new:
        seed = run.facts["seed"]
        if seed in before:
            losses = [np.array(x.train_losses) for x in (before[seed], run)]
            equal, steps = C.equal_steps(*losses)
            if equal:
                lines.append(f"seed {seed}: {equal} of {steps} training losses are equal")
    return lines


def shown_lines(source: bytes) -> list[str]:
    """The lines of a source as `diff` shows them: spaces at the end of a line are escaped, and a
    long line begins with its length. Different lines are never shown as the same."""
    lines = []
    for line in map(visible, source.decode().removesuffix("\n").split("\n")):
        text = line.rstrip(" ")
        end = "".join(map(escaped, line[len(text) :]))
        long = f"<{len(line)} characters>" if len(line) > LONG_LINE else ""
        lines.append(f"{long}{text}{end}")
    return lines


def nearest_version(source: bytes, began: datetime) -> tuple[str, bytes] | None:
    """(commit, content) of the version of train_gpt.py that has the most lines in common with
    `source`: of the last VERSIONS on the main branch from before the runs of a record began, so
    that the record itself is not among them. None if there are none."""
    main = main_branch()
    if not main:
        return None
    words = "--format=%h", f"--before={began}", f"-{VERSIONS}", main, "--", "train_gpt.py"
    commits = git("log", *words).decode().split()
    asked = "".join(f"{commit}:train_gpt.py\n" for commit in commits)
    answer = io.BytesIO(git("cat-file", "--batch", stdin=asked.encode()))
    lines = set(source.splitlines())
    best, fewest = None, math.inf
    for commit in commits:
        kind, size = answer.readline().split()[-2:]
        if kind != b"blob":  # deleted in this commit
            continue
        content = answer.read(int(size))
        answer.readline()
        others = len(lines ^ set(content.splitlines()))
        if others < fewest:
            best, fewest = (commit, content), others
    return best


def differences(old: bytes, new: bytes, names: tuple[str, str]) -> tuple[list[str], int]:
    """(the unified diff of two sources, the number of lines in it that differ)."""
    lines = [*difflib.unified_diff(shown_lines(old), shown_lines(new), *names, lineterm="")]
    return lines, sum(line[0] in "+-" for line in lines[2:])


def diff(root: Path, args) -> str:
    """The source of a record as a unified diff against the source of the record before it or, where
    that is far, against the nearest version of train_gpt.py. What else the record changes is
    printed on stderr. The record need be neither valid nor among the others."""
    folder = Path(args.record).resolve()
    with about(folder.name):
        need((folder / "record.json").is_file(), "record.json: cannot be read (No such file)")
        runs = [C.read_run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
        need(runs, "it has no runs")
        need(len({run.source for run in runs}) == 1, "its runs have several sources")
    new = runs[0].source
    label = f"{folder.parent.name}/{folder.name}"
    before = record_before(root, folder, runs)
    if before:
        name = f"{before.fields['track']}/{before.folder.name}"
        old = before.runs[0].source
        notes = changed_settings(before.runs, runs) + equal_losses(before.runs, runs)
    else:
        name = "train_gpt.py of this repository"
        old = (HERE.parent / "train_gpt.py").read_bytes()
        notes = [f"{folder.name} is the first of its class"]
    lines, count = differences(old, new, (name, label))
    notes.append(f"lines that differ from {name}: {count:,}")
    nearest = nearest_version(new, min(run.began for run in runs)) if count > FAR else None
    if nearest:
        commit, version = nearest
        other = f"train_gpt.py of commit {commit}"
        fewer, few = differences(version, new, (other, label))
        notes.append(f"lines that differ from {other}, the nearest one: {few:,}")
        if few < count:
            name, old, lines = other, version, fewer
    notes.append(f"compared with {name}")
    print("\n".join(map(visible, notes)), file=sys.stderr)
    if not lines and old != new:
        return "the sources have the same lines, but only one of them has a line end at its end"
    return "\n".join(lines)


def git(*words: str, stdin=b"") -> bytes:
    """What git says about this clone; nothing if it is none, or if there is no git."""
    if not ((HERE.parent / ".git").exists() and shutil.which("git")):
        return b""
    # Its files may belong to another user, as in a container.
    command = ["git", "-c", "safe.directory=*", "-C", str(HERE.parent), *words]
    return subprocess.run(command, input=stdin, capture_output=True).stdout


def main_branch() -> str:
    """The main branch of this clone, "" if it has none. Commits of other branches can be those of
    whoever submits a record."""
    for name in MAIN:
        if git("rev-parse", "--verify", "--quiet", name):
            return name
    return ""


def commits_with(source: bytes) -> list[str]:
    """The commits on the main branch in which train_gpt.py became `source`, or ceased to be it; the
    oldest is last."""
    main = main_branch()
    if not main:
        return []
    blob = git("hash-object", "--stdin", stdin=source).decode().strip()
    found = git("log", "--format=%H", f"--find-object={blob}", main, "--", "train_gpt.py")
    return found.decode().split()


def need_tools(folder: Path, source: bytes):
    """Refused if this run of ours has a `source` of older days, whose tools in data/ are only in a
    history that is not here: in a ZIP, or a clone of few commits."""
    is_ours = folder.is_relative_to(HERE)
    is_today = source == (HERE.parent / "train_gpt.py").read_bytes()
    whole = git("rev-parse", "--is-shallow-repository") == b"false\n"
    history = whole and main_branch()
    lacking = "its source needs the tools in data/ of its day: take a clone with its history, "
    cure = "no ZIP and no --depth (git fetch --unshallow gets the rest), with its branch main, "
    cure += "and install git"
    need(history or is_today or not is_ours or commits_with(source), lacking + cure)


def lay_out(source: bytes, home: Path):
    """Write `source` as home/train_gpt.py, with data/ beside it. Older sources run tools in data/
    and get those of the commit on the main branch that brought the source; token shards are those
    of this clone. Refused if data/ or one of its tools is a link."""
    today = HERE.parent / "data"
    for path in (today, *today.glob("*.py")):
        C.need_no_link(path)
    home.mkdir()
    (home / "train_gpt.py").write_bytes(source)
    commits = commits_with(source)
    if not commits:
        (home / "data").symlink_to(today, target_is_directory=True)
        return
    archive = git("archive", commits[-1], "data")
    subprocess.run(["tar", "-x", "-C", home], input=archive, check=True)
    for folder in today.glob("*/"):
        (home / "data" / folder.name).symlink_to(folder, target_is_directory=True)


def train_with(home: Path, words: list[str], out: Path, environment=None, box=None) -> Run:
    """Run home/train_gpt.py with these arguments; its lines go to stderr, its run into `out`. It
    runs in the sandbox of `box` if there is one, and gets no secrets of the environment."""
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    command = [sys.executable, "train_gpt.py", *words, "--out", str(out.resolve())]
    env = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    env |= environment or {}
    if box:
        command = box(command, env)
    status = subprocess.run(command, cwd=home, env=env, stdout=2).returncode
    need(status == 0, f"train_gpt.py ended with status {status}, see above")
    found = set(out.iterdir()) - before
    need(len(found) == 1, f"it left {len(found)} runs behind, not one: it is no train_gpt.py")
    return C.read_run(*found)


def confirm(args, run: Run, environment: dict[str, str]):
    """Show the command and the environment in which it will run, and ask; Refused if the answer is
    not yes, or if there is no terminal to ask on."""
    can_ask = args.yes or (sys.stdin is not None and sys.stdin.isatty())
    need(can_ask, "reproduce runs a source that was submitted: read it (diff), then add --yes")
    lines = [f"command: {shlex.join(['python', 'train_gpt.py', *run.words])}"]
    for name, value in run.facts["environment"].items():
        is_set = name in environment
        lines.append(f"environment{'' if is_set else ', not set here'}: {name}={value}")
    rights = "in a sandbox" if args.sandbox else "with all your rights (see --sandbox)"
    lines.append(f"this runs a source that was submitted, {rights}; `diff` shows what it changes")
    print("\n".join(map(visible, lines)), file=sys.stderr)
    if not args.yes:
        print("run it? [y/N] ", end="", file=sys.stderr, flush=True)
        need(sys.stdin.readline().strip().lower() in ("y", "yes"), "not confirmed")


def recheck(run: Run, *words) -> tuple[float, str]:
    """(the number that records/recheck.py prints for a run of a record, the reason if it prints
    none)."""
    command = [sys.executable, HERE / "recheck.py", run.folder / "run.json", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["recheck.py was killed"])[-1]
        return math.nan, reason.removeprefix("error: ")
    return float(done.stdout.splitlines()[-1]), ""


def why_no_checkpoint(run: Run, out: Path) -> str:
    """Why a reproduced run cannot leave a checkpoint in `out` that this repository can read; "" if
    it can."""
    if "checkpoint_end" not in run.facts["config"]:
        return "its source does not have the setting checkpoint_end"
    size, reason = recheck(run)
    free = shutil.disk_usage(out).free
    if not reason and size > 0.9 * free:
        return f"a checkpoint takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {out}"
    return reason


def compute_loss(old: Run, new: Run, data: list[str]) -> tuple[float, str]:
    """The loss that this repository computes from the last checkpoint of the run `new`, and "". If
    it cannot be computed: the loss that the run reports, and the reason. Refused if there is no
    checkpoint, or if the run has reported another loss."""
    checkpoint = new.folder / "checkpoints" / str(new.facts["steps"])
    there = checkpoint.is_dir() and not checkpoint.is_symlink()
    need(there, "not reproduced: the run left no checkpoint, though its command asks for one")
    loss, reason = recheck(old, checkpoint, *data)
    if reason:
        return new.loss, reason
    found = f"this repository's code computes a loss of {loss:.4f} from the last checkpoint"
    print(f"seed 0: {found}, the run reports {new.loss:.4f}", flush=True)
    causes = "its source has another model (see diff), or reports a wrong loss"
    differs = f"{found}, the run reports {new.loss:.4f}: {causes}"
    need(abs(loss - new.loss) <= LOSS_OFF, f"not reproduced: {differs}")
    return loss, ""


def check_mean(root: Path, record: Record, losses: list[float]):
    """Refuse if the mean of the reproduced losses is above the track's target or, where there is no
    target, above the mean loss of the record that stood before this record. The deviation of the
    recorded losses, which can be invented, does not count here."""
    track = C.TRACKS[record.fields["track"]]
    limit = track.target
    if track.parameters:
        before = record_before(root, record.folder, record.runs)
        limit = before.result["mean_loss"] if before else math.inf
    mean = np.mean(losses)
    seeds = f"{len(losses)} of {len(record.runs)} seeds"
    above = f"the mean reproduced loss ({seeds}) is {mean:.4f}, above {limit:.4f}"
    need(
        mean <= limit, f"not reproduced: {above}: reproduce more seeds (--runs), if there are more"
    )


def check_reproduced(record: Record, old: Run, new: Run, pinned: dict) -> str:
    """A line about a run that was made again. Refused if it is another run, if it does not keep the
    rules of the track, or if its loss is not in the interval in which 99% of further runs of the
    recorded mean and deviation are."""
    other = "other tokens than the record's (another Python has another demo corpus)"
    need(new.facts["data"] == old.facts["data"], other)
    free = C.FREE | {"checkpoint_end": ""}
    configs = [run.facts["config"] | free for run in (new, old)]
    C.agree("config of the command, of the record", *configs)
    sizes = [run.facts.get("parameters") for run in (new, old)]
    C.agree("parameters of the reproduced run, of the record", *sizes)
    C.check_run(C.TRACKS[record.fields["track"]], new, pinned)
    n = len(record.runs)
    mean = record.result["mean_loss"]
    reach = scipy.stats.t.ppf(0.995, n - 1) * record.result["sd_loss"] * math.sqrt(1 + 1 / n)
    miss = f"{new.loss:.4f} is not within {reach:.4f} of the recorded mean {mean:.4f}"
    need(abs(new.loss - mean) <= reach, f"not reproduced: loss {miss}")
    pairs = zip(new.train_losses, old.train_losses, strict=True)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    digits = "equal to the last digit" if equal is None else f"equal for {equal} steps"
    if equal is None:
        final = f"final loss {new.loss:.7f}, recorded {old.loss:.7f}"
        differs = f"not reproduced: all training losses are equal, but not the {final}"
        need(abs(new.loss - old.loss) <= SAME_LOSS, differs)
    loss = f"loss {new.loss:.4f}, recorded {old.loss:.4f}"
    seconds = f"{new.seconds:.2f} s on {new.hardware}, recorded {old.seconds:.2f} s"
    return f"{loss}; {seconds}; training losses {digits}"


def workplace(folder: Path, out: Path, source: bytes, boxed: bool, environment: dict) -> Callable:
    """A function (arguments of train_gpt.py) -> the run of `source`, which goes into `out`.
    `folder`, which has its compilation cache and its temporary files, is made anew: nothing stays
    but compiled programs."""
    home, cache, work = (folder / name for name in ("source", "cache", "work"))
    files = [path for path in cache.glob("*-cache") if path.is_file() and not path.is_symlink()]
    programs = {path.name: path.read_bytes() for path in files}
    if folder.exists():
        shutil.rmtree(folder)
    for path in (cache, work, out):
        path.mkdir(parents=True, exist_ok=True)
    for name, program in programs.items():
        (cache / name).write_bytes(program)
    lay_out(source, home)
    env = environment | {"JAX_COMPILATION_CACHE_DIR": str(cache), "TMPDIR": str(work)}
    box = sandbox(home, [cache, work, out]) if boxed else None
    return lambda words: train_with(home, words, out, env, box)


def reproduce(root: Path, args) -> str:
    """Run a record's own source again, and print what comes out. What it reports itself is held
    against what this repository computes from its last checkpoint, and against the time of a
    process whose programs were compiled by another one."""
    pinned = C.read_json(root / "tokens.json")
    record = C.check_record(Path(args.record).resolve(), pinned)
    n = len(record.runs)
    need(1 <= args.runs <= n, f"--runs {args.runs}: the record has 1 to {n}")
    runs = sorted(record.runs, key=lambda run: run.facts["seed"])[: args.runs]
    first = runs[0]
    need_tools(record.folder, first.source)
    recorded = first.facts["environment"].items()
    environment = {x: y for x, y in recorded if x in REPEATED and MARKER not in y}
    data = ["--data", str(Path(args.data).resolve())] if args.data else []
    confirm(args, first, environment)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary, "place")
        out = Path(args.out or Path(temporary, "runs")).resolve()
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        train = workplace(place, out, first.source, args.sandbox, environment)
        reason = why_no_checkpoint(first, out)
        keep = [] if reason else ["--set", "checkpoint_end=always"]
        losses = []
        for seed, old in enumerate(runs):
            with about(f"seed {seed}"):
                words = [*old.words, *data, "--seed", str(seed)]
                if seed == 0:  # one checkpoint is enough: it can have 70 GB
                    words += keep
                new = train(words)
                print(f"seed {seed}: {check_reproduced(record, old, new, pinned)}", flush=True)
                losses.append(new.loss)
                if seed == 0 and keep:
                    losses[0], reason = compute_loss(old, new, data)
        check_mean(root, record, losses)
        with about("seed 0 again"):
            words = [*first.words, *data, "--seed", "0"]
            train = workplace(place, out / "again", first.source, args.sandbox, environment)
            began = time.monotonic()
            new = train(words)
            took = time.monotonic() - began
            check_reproduced(record, first, new, pinned)
            process = f"its process took {took:.2f} s with programs that were compiled before"
            share = f"{new.seconds / took:.0%} of it"
            print(f"seed 0 again: {process}, it reports {new.seconds:.2f} s of training, {share}")
            need(new.seconds <= took, f"not reproduced: {process}, so not {new.seconds:.2f} s")
    if reason:
        raise Unproven(f"reproduced, but its loss was not computed again: {reason}")
    return "reproduced"


def absolute(words: list[str]) -> list[str]:
    """Arguments of train_gpt.py in which texts and folders that exist here have absolute paths: the
    sources run in another folder."""
    found = []
    option = ""
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0]
        before, path = re.fullmatch("(--[a-z-]+=|data=|)(.*)", word, re.S).groups()
        if option == "--set":
            is_place = before == "data="
        else:
            is_place = option in PLACES or not (path in PRESETS or path.isdecimal())
        if is_place and path and Path(path).exists():
            path = os.path.abspath(path)
        found.append(before + path)
    return found


def side_of(text: str, arguments: list[str]) -> tuple[bytes, list[str]]:
    """(source, arguments) of one side: "FILE", "FILE ARG ...", or a record or run, with its own."""
    with about(text):
        file, *own = [text] if Path(text).exists() else shlex.split(text)
        folder = Path(file).resolve()
        if not folder.is_dir():
            return folder.read_bytes(), [*arguments, *own]
        runs = [x for x in (folder, *sorted(folder.glob("*"))) if (x / "metrics.jsonl").is_file()]
        need(runs, f"no run is in {file}: name logs/<run id>, or the folder of a record")
        run = C.read_run(runs[0])
        need_tools(folder, run.source)
        return run.source, run.words + own


def compare(root: Path, args) -> str:
    """Alternate two sources on this machine and print paired differences. Pair i has seed i in
    both; every second pair begins with the other one, as a machine may warm up."""
    need(args.runs >= 2, "--runs: two pairs at least, one has no confidence interval")
    sides = {name: side_of(getattr(args, name), args.arguments) for name in ("base", "cand")}
    ratios, differences = [], []
    print("seed   base s   cand s   ratio   base loss   cand loss   difference", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name, (source, _) in sides.items():
            lay_out(source, Path(temporary, f"source-{name}"))
        for seed in range(args.runs):
            pair = {}
            for name in ("base", "cand") if seed % 2 == 0 else ("cand", "base"):
                home = Path(temporary, f"source-{name}")
                words = [*absolute(sides[name][1]), "--seed", str(seed)]
                with about(f"{name}, seed {seed}"):
                    pair[name] = train_with(home, words, Path(args.out or temporary, name))
            base, cand = pair["base"], pair["cand"]
            each = [run.facts["config"] | run.facts["data"] for run in (base, cand)]
            for key in ("val_tokens", "target", *base.facts["data"].keys() & cand.facts["data"]):
                C.agree(f"{key} of base, of cand", each[0][key], each[1][key])
            ratios.append(math.log(cand.seconds / base.seconds))
            differences.append(cand.loss - base.loss)
            times = f"{base.seconds:8.2f} {cand.seconds:8.2f} {math.exp(ratios[-1]):7.4f}"
            losses = f"{base.loss:9.4f}   {cand.loss:9.4f}     {differences[-1]:+.4f}"
            print(f"{seed:4} {times}   {losses}", flush=True)
    ends = [scipy.stats.ttest_1samp(x, 0).confidence_interval() for x in (ratios, differences)]
    ratio, low, high = np.exp([np.mean(ratios), *ends[0]])
    loss, least, most = np.mean(differences), *ends[1]
    times = f"time ratio cand/base {ratio:.4f}, 95% confidence {low:.4f} to {high:.4f}"
    losses = f"loss difference cand - base {loss:+.4f}, 95% confidence {least:+.4f} to {most:+.4f}"
    return f"{times}\n{losses}\n{args.runs} pairs on {cand.hardware}"


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, with exit status 2."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="leaderboard.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", default=HERE, help="this folder, if another")
    commands = parser.add_subparsers(dest="do", help="none: print the standings")
    one = commands.add_parser("add", help="collect runs into a record")
    one.add_argument("runs", nargs="+", metavar="RUN_DIR")
    one.add_argument("--track", required=True, choices=C.TRACKS)
    one.add_argument("--name", required=True, help="of the folder: letters, digits, hyphens")
    one.add_argument("--by", required=True, help="who")
    one.add_argument("--what", required=True, help="what changed, in a sentence")
    one.add_argument("--rate", type=float, metavar="X", help="dollars an hour of the machine")
    one.add_argument("--pin", action="store_true", help="enter new shards into tokens.json")
    commands.add_parser("check", help="derive everything anew from the logs")
    one = commands.add_parser("render", help="bring the tables of README.md up to date")
    one.add_argument("--check", action="store_true", help="only say whether they are stale")
    one = commands.add_parser("diff", help="what a record changes in the source")
    one.add_argument("record", metavar="RECORD", help="its folder; it may be a new one")
    one = commands.add_parser("reproduce", help="run a record's source again")
    one.add_argument("record", metavar="RECORD")
    one.add_argument("--runs", type=int, default=1, metavar="N", help="its first N seeds")
    one.add_argument("--data", metavar="DIR", help="folder with the token shards")
    one.add_argument("--out", metavar="DIR", help="keep the runs there")
    one.add_argument("--sandbox", action="store_true", help="in bubblewrap or docker")
    one.add_argument("--yes", action="store_true", help="do not ask before it runs")
    one = commands.add_parser("compare", help="alternate two sources on this machine")
    one.epilog = "What stands after -- is given to both."
    one.add_argument("base", metavar="BASE.py", help='or "BASE.py ARG ...", or a record')
    one.add_argument("cand", metavar="CAND.py", help='or "CAND.py ARG ...", or a record')
    one.add_argument("--runs", type=int, default=5, metavar="N", help="pairs")
    one.add_argument("--out", metavar="DIR", help="keep the runs in DIR/base and DIR/cand")
    # Shells do not replace the ~ in --out=~/runs.
    parts = [word.partition("=") for word in argv[:cut]]
    words = [f"{name}{sign}{os.path.expanduser(value)}" for name, sign, value in parts]
    args = parser.parse_args(words)
    args.arguments = argv[cut + 1 :]
    if args.arguments and args.do != "compare":
        parser.error("only compare takes arguments after --")
    root = Path(args.records).resolve()
    do = {"add": add, "render": render, "diff": diff, "reproduce": reproduce, "compare": compare}
    do |= {"check": lambda root, args: f"valid records: {len(C.all_valid(root))}"}
    do |= {None: lambda root, args: standings(root, C.all_valid(root))}
    try:
        said = do[args.do](root, args)
        if said:  # no line if sources do not differ
            print(said)
    except Unproven as error:
        print(visible(" ".join(str(error).split())))
        return 1
    except (Refused, OSError, ImportError, UnicodeError) as error:
        print("refused:", visible(" ".join(str(error).split())), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it runs, too
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
