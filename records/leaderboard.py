"""Collect timed runs into records, check and rank records, and run them again.

    python records/leaderboard.py                # print the standings
    python records/leaderboard.py add RUN_DIR... --track T --name NAME --by WHO --what TEXT
    python records/leaderboard.py check          # derive all results from the logs again
    python records/leaderboard.py render         # update the tables in records/README.md
    python records/leaderboard.py diff records/T/DATE_NAME
    python records/leaderboard.py reproduce records/T/DATE_NAME
    python records/leaderboard.py compare BASE.py CAND.py --runs N -- ARGS

README.md has the rules. Only `reproduce` and `compare` execute sources, see .github/SECURITY.md.
The other commands do not need jax.
A refusal is one line with its reason, with exit status 1; an invalid command line is one line with
exit status 2. The exit status is also 1 if `reproduce` could not recompute a loss; its last line
has the reason.
"""

import argparse
import difflib
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
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import checks as C
import numpy as np
import scipy
from checks import Record, Refused, Run, about, escaped, require, visible
from redact import MARKER, SECRET, copy_redacted
from sandbox import sandbox

HERE = Path(__file__).resolve().parent
MARKERS = "<!-- leaderboard: begin, generated -->\n", "<!-- leaderboard: end -->\n"
REPEATED = "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS"  # variables that `reproduce` sets
LOSS_OFF = 0.002  # largest difference between the losses that two programs compute for one model
SAME_LOSS = 1e-6  # the same for the final losses of runs with equal training losses
MAIN = "refs/remotes/origin/main", "refs/heads/main"  # the first existing branch is used
LONG_LINE = 200  # characters; readers easily miss text that is further right
FAR = 200  # different lines; if there are more, `diff` looks for a nearer source
VERSIONS = 400  # number of versions of train_gpt.py in which `diff` looks


class Unproven(Exception):
    """The reason why the loss of a reproduced record could not be recomputed."""


def add(root: Path, args) -> str:
    """Make a record from redacted copies of runs and from their source; write it if it is valid."""
    named = C.NAME.fullmatch(args.name)
    require(named, f"--name {args.name}: use letters, digits, hyphens; it is part of a folder name")
    require(args.by.strip() and args.what.strip(), "--by and --what must not be empty")
    track = C.TRACKS[args.track]
    pinned = C.read_json(root / "tokens.json")
    before = C.all_valid(root)
    runs = [C.read_run(Path(os.path.realpath(path))) for path in args.runs]
    kinds, places = set(), set()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "record")
        folder.mkdir()
        with about(f"{args.track}/{args.name}"):
            if args.pin:
                pin_tokens(pinned, track, runs[0])
            C.judge(track, runs, pinned)  # redaction could make different runs equal
            (folder / C.SOURCE_FILE).write_bytes(runs[0].source)  # `judge` compares all sources
            for run in runs:
                replaced, left = copy_redacted(run, folder / run.folder.name)
                kinds |= replaced
                places |= left
            copies = [C.read_run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
            result = C.judge(track, copies, pinned)
        fields = {"track": args.track, "name": args.name, "by": args.by, "what": args.what}
        fields |= {"beats": None, "result": result}
        if args.rate is not None:
            fields |= {"rate": args.rate, "price": C.price(args.rate, result)}
        place = root / args.track / f"{result['date']}_{args.name}"
        record = Record(place, fields, result, copies)
        if standing := C.chains(before).get(record.competition):
            fields["beats"] = standing[-1].folder.name
        C.check_ranks([*before, record])
        (folder / "record.json").write_text(json.dumps(fields, indent=1) + "\n")
        shutil.copytree(folder, place)
    if args.pin:
        (root / "tokens.json").write_text(json.dumps(pinned, indent=1, sort_keys=True) + "\n")
    if places:
        print("the record has these paths and URLs; are they private?", file=sys.stderr)
        print("\n".join(map(visible, sorted(places))), file=sys.stderr)
    redacted = f" (redacted: {', '.join(sorted(kinds))})" if kinds else ""
    return f"added {place}{redacted}; next: python records/leaderboard.py render"


def pin_tokens(pinned: dict, track: C.Track, run: Run):
    """Add the shards of a run to `pinned`; known shards and demo corpora do not change."""
    data = run.facts["data"]
    stream = C.stream_name(track, data)
    if stream == "fineweb" or stream not in pinned:
        pinned[stream] = data | pinned.get(stream, {})


def table(rows: list[dict]) -> str:
    """Return a Markdown table of rows with the same columns; each value stays in its cell."""

    def cell(value) -> str:
        text = visible(" ".join(str(value).split()))
        return text.replace("|", "\\|")

    lines = [[*rows[0]], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    cells = [[*map(cell, line)] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def record_row(number: int, record: Record) -> dict:
    """Return the row of a record in the table of its competition."""
    got, fields = record.result, record.fields
    resumed = f" ({len(got['resumed'])} resumed)" if got["resumed"] else ""
    proof = {
        "seconds": {"proof": "p = {p_value:.1e}"},
        "steps": {"proof": "margin {margin:.4f}"},
        "loss": {"passes": "{passes}", "numbers": "{parameters:,}", "machine": "{hardware}"},
    }[record.ranked_by]
    proof = {column: form.format(**got) for column, form in proof.items()}
    paid = {}
    if "gpu_seconds" in got and record.ranked_by == "seconds":  # other tables also have CPUs
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
        "what": f"[{fields['name']}]({record.label}): {fields['what']}",
        "by": fields["by"],
        "date": got["date"],
    }


def predicted_row(root: Path, path: Path) -> dict:
    """Return the row of a prediction by preflight.py."""
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
    """Return the generated part of records/README.md."""
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
    """Update the tables; with --check, refuse if they are out of date."""
    records = C.all_valid(root)
    page = root / "README.md"
    text = page.read_text(encoding="utf-8")
    parts = re.fullmatch(f"(.*?){MARKERS[0]}.*{MARKERS[1]}(.*)", text, re.S)
    require(parts, "README.md does not have the two markers of the leaderboard")
    fresh = parts[1] + standings(root, records) + parts[2]
    if fresh != text:
        require(not args.check, "README.md is stale: run python records/leaderboard.py render")
        page.write_text(fresh, encoding="utf-8")
    return f"{page} is up to date, {len(records)} records"


# ---- diff --------------------------------------------------------------------------------------


def find_record(root: Path, name: str) -> tuple[Record, Record | None]:
    """Return (the record in the folder `name`, the record that it has beaten, None if none)."""
    folder = Path(name).resolve()
    C.read_json(folder / "record.json")
    records = C.all_valid(root)
    record = next((record for record in records if record.folder == folder), None)
    require(record, f"{name} is not in {root}: copy the folder of the record there")
    chain = C.chains(records)[record.competition]
    place = chain.index(record)
    return record, chain[place - 1] if place else None


def changes(name: str, old, new) -> Iterator[str]:
    """Yield a line for each difference, with its path, such as config.stages.0.share."""
    old, new = (dict(enumerate(x)) if isinstance(x, list) else x for x in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from changes(f"{name}.{key}", old.get(key), new.get(key))
    elif old != new:
        yield f"{name}: {old!r} -> {new!r}"


def changed_settings(old: Run, new: Run) -> list[str]:
    """Return a line for each difference in command, config, environment and versions."""
    sides = []
    for run in (old, new):
        facts = {name: run.facts[name] for name in ("environment", "versions")}
        config = run.facts["config"] | C.FREE
        sides.append({"command": shlex.join(run.words), "config": config} | facts)
    return [line for name in sides[0] for line in changes(name, sides[0][name], sides[1][name])]


def equal_losses(old: list[Run], new: list[Run]) -> list[str]:
    """Return a line for each seed with equal training losses, which could have been copied."""
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
    """Return the lines of a source, escaped so that different lines never look equal."""
    lines = []
    for line in map(visible, source.decode().removesuffix("\n").split("\n")):
        text = line.rstrip(" ")
        end = "".join(map(escaped, line[len(text) :]))
        long = f"<{len(line)} characters>" if len(line) > LONG_LINE else ""
        lines.append(f"{long}{text}{end}")
    return lines


def nearest_version(source: bytes, began: datetime) -> tuple[str, bytes] | None:
    """Return (commit, content) of the version of train_gpt.py that is nearest to `source`.

    Only versions on the main branch from before the runs began are compared.
    """
    main = main_branch()
    if not main:
        return None
    words = "--format=%h", f"--before={began}", f"-{VERSIONS}", main, "--", "train_gpt.py"
    lines = set(source.splitlines())
    best, fewest = None, math.inf
    for commit in git("log", *words).decode().split():
        content = git("show", f"{commit}:train_gpt.py")
        others = len(lines ^ set(content.splitlines()))
        if content and others < fewest:
            best, fewest = (commit, content), others
    return best


def differences(old: bytes, new: bytes, names: tuple[str, str]) -> tuple[list[str], int]:
    """Return (unified diff of two sources, number of lines that differ)."""
    lines = [*difflib.unified_diff(shown_lines(old), shown_lines(new), *names, lineterm="")]
    return lines, sum(line[0] in "+-" for line in lines[2:])


def diff(root: Path, args) -> str:
    """Return the unified diff of a record's source against the record before it.

    If many lines differ, a nearer version of train_gpt.py may be used. Other changes go to stderr.
    """
    record, before = find_record(root, args.record)
    new = record.runs[0].source
    if before:
        name = before.label
        old = before.runs[0].source
        notes = changed_settings(before.runs[0], record.runs[0])
        notes += equal_losses(before.runs, record.runs)
    else:
        name = "train_gpt.py of this repository"
        old = (HERE.parent / "train_gpt.py").read_bytes()
        notes = [f"{record.label} is the first record of its class"]
    lines, count = differences(old, new, (name, record.label))
    notes.append(f"lines that differ from {name}: {count:,}")
    began = min(run.began for run in record.runs)
    nearest = nearest_version(new, began) if count > FAR else None
    if nearest:
        commit, version = nearest
        other = f"train_gpt.py of commit {commit}"
        fewer, few = differences(version, new, (other, record.label))
        notes.append(f"lines that differ from {other}, the nearest version: {few:,}")
        if few < count:
            name, old, lines = other, version, fewer
    notes.append(f"compared with {name}")
    print("\n".join(map(visible, notes)), file=sys.stderr)
    if not lines and old != new:
        return "the sources have equal lines, but only one of them ends with a line end"
    return "\n".join(lines)


def git(*words: str, stdin=b"") -> bytes:
    """Return the output of a git command in this clone; b"" without a clone or without git."""
    if not ((HERE.parent / ".git").exists() and shutil.which("git")):
        return b""
    # The files of a clone in a container may belong to another user.
    command = ["git", "-c", "safe.directory=*", "-C", str(HERE.parent), *words]
    return subprocess.run(command, input=stdin, capture_output=True).stdout


def main_branch() -> str:
    """Return the main branch of this clone ("" if none): only its commits were reviewed."""
    for name in MAIN:
        if git("rev-parse", "--verify", "--quiet", name):
            return name
    return ""


# ---- reproduce and compare ---------------------------------------------------------------------


def commits_with(source: bytes) -> list[str]:
    """Return the commits on the main branch that added or removed `source`; the oldest is last."""
    main = main_branch()
    if not main:
        return []
    blob = git("hash-object", "--stdin", stdin=source).decode().strip()
    found = git("log", "--format=%H", f"--find-object={blob}", main, "--", "train_gpt.py")
    return found.decode().split()


def need_tools(folder: Path, source: bytes):
    """Refuse an older source of a record if this clone lacks the tools in data/ of its commit."""
    is_ours = folder.is_relative_to(HERE)
    is_today = source == (HERE.parent / "train_gpt.py").read_bytes()
    whole = git("rev-parse", "--is-shallow-repository") == b"false\n"
    history = whole and main_branch()
    lacking = "its source needs older tools in data/: install git and use a clone with its history"
    fix = "not a ZIP or --depth (git fetch --unshallow gets the rest), and with its branch main"
    ready = history or is_today or not is_ours or commits_with(source)
    require(ready, f"{lacking}, {fix}")


def lay_out(source: bytes, home: Path):
    """Write `source` as home/train_gpt.py, with the shards of this clone in data/ next to it.

    The tools in data/ are from the commit that added the source to the main branch, or from here.
    """
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


def train_with(home: Path, words: list[str], out: Path, cwd=None, environment=None, box=None):
    """Run home/train_gpt.py in the folder `cwd` and return its Run, which is written to `out`.

    Its output goes to stderr. `box` adds a sandbox. The environment is passed without secrets.
    """
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    command = [sys.executable, str(home / "train_gpt.py"), *words, "--out", str(out.resolve())]
    env = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    env |= environment or {}
    if box:
        command = box(command, env)
    status = subprocess.run(command, cwd=cwd, env=env, stdout=2).returncode
    require(status == 0, f"train_gpt.py ended with status {status}, see above")
    found = set(out.iterdir()) - before
    require(len(found) == 1, f"it wrote {len(found)} runs instead of one: it is not a train_gpt.py")
    return C.read_run(*found)


def confirm(args, run: Run, environment: dict[str, str]):
    """Show the command and its environment, and ask; refuse unless the answer is yes."""
    can_ask = args.yes or (sys.stdin is not None and sys.stdin.isatty())
    require(can_ask, "reproduce runs a submitted source: read it (diff), then add --yes")
    lines = [f"command: {shlex.join(['python', 'train_gpt.py', *run.words])}"]
    for name, value in run.facts["environment"].items():
        is_set = name in environment
        lines.append(f"environment{'' if is_set else ', not set here'}: {name}={value}")
    rights = "in a sandbox" if args.sandbox else "with all your rights (see --sandbox)"
    lines.append(f"this runs a submitted source {rights}; `diff` shows its changes")
    print("\n".join(map(visible, lines)), file=sys.stderr)
    if not args.yes:
        print("run it? [y/N] ", end="", file=sys.stderr, flush=True)
        require(sys.stdin.readline().strip().lower() in ("y", "yes"), "not confirmed")


def recheck(run: Run, checkpoint: Path, *words) -> tuple[float, str]:
    """Return (the loss of a checkpoint that records/recheck.py prints, the reason if it fails)."""
    command = [sys.executable, HERE / "recheck.py", run.folder / "run.json", checkpoint, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["recheck.py was killed"])[-1]
        return math.nan, reason.removeprefix("error: ")
    return float(done.stdout.splitlines()[-1]), ""


def compute_loss(old: Run, new: Run, data: list[str]) -> tuple[float, str]:
    """Return (loss of the last checkpoint of the run `new`, "") by this repository's code.

    If it cannot be computed, return (loss that the run reports, the reason).
    """
    checkpoint = new.folder / "checkpoints" / str(new.facts["steps"])
    exists = checkpoint.is_dir() and not checkpoint.is_symlink()
    require(exists, "not reproduced: the run left no checkpoint (is the disk full?)")
    loss, reason = recheck(old, checkpoint, *data)
    if reason:
        return new.loss, reason
    found = f"this repository's code computes a loss of {loss:.4f} from the last checkpoint"
    print(f"seed 0: {found}, the run reports {new.loss:.4f}", flush=True)
    causes = "its source has another model (see diff), or reports a wrong loss"
    differs = f"{found}, the run reports {new.loss:.4f}: {causes}"
    require(abs(loss - new.loss) <= LOSS_OFF, f"not reproduced: {differs}")
    return loss, ""


def check_mean(record: Record, before: Record | None, losses: list[float]):
    """Refuse if the mean of the reproduced losses is above the target, or above the record before.

    This does not use the deviation of the recorded losses, which can be invented.
    """
    limit = C.TRACKS[record.fields["track"]].target
    if record.ranked_by == "loss":
        limit = before.result["mean_loss"] if before else math.inf
    mean = np.mean(losses)
    seeds = f"{len(losses)} of {len(record.runs)} seeds"
    above = f"the mean reproduced loss ({seeds}) is {mean:.4f}, above {limit:.4f}"
    require(
        mean <= limit, f"not reproduced: {above}: reproduce more seeds (--runs), if it has more"
    )


def check_reproduced(record: Record, old: Run, new: Run, pinned: dict) -> str:
    """Compare a reproduced run with the record and with the rules; return a line about it.

    Its loss must be where 99% of runs with the recorded mean and deviation are.
    """
    other = "other tokens than the record's (another Python has another demo corpus)"
    require(new.facts["data"] == old.facts["data"], other)
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
    require(abs(new.loss - mean) <= reach, f"not reproduced: loss {miss}")
    pairs = zip(new.train_losses, old.train_losses, strict=True)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    digits = "equal to the last digit" if equal is None else f"equal for {equal} steps"
    if equal is None:
        final = f"final loss {new.loss:.7f}, recorded {old.loss:.7f}"
        differs = f"not reproduced: all training losses are equal, but not the {final}"
        require(abs(new.loss - old.loss) <= SAME_LOSS, differs)
    loss = f"loss {new.loss:.4f}, recorded {old.loss:.4f}"
    seconds = f"{new.seconds:.2f} s on {new.hardware}, recorded {old.seconds:.2f} s"
    return f"{loss}; {seconds}; training losses {digits}"


def workplace(folder: Path, out: Path, source: bytes, boxed: bool, environment: dict) -> Callable:
    """Return a function (arguments of train_gpt.py) -> Run in `out`, which runs `source`.

    `folder`, which has its files, is created again. Only compiled programs are kept.
    """
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
    return lambda words: train_with(home, words, out, home, env, box)


def reproduce(root: Path, args) -> str:
    """Run a record's own source again and print the results.

    Two of them do not depend on the source's reports: the loss that is computed from the last
    checkpoint, and the time of a process whose programs are already compiled.
    """
    pinned = C.read_json(root / "tokens.json")
    record, before = find_record(root, args.record)
    n = len(record.runs)
    require(1 <= args.runs <= n, f"--runs {args.runs}: the record has 1 to {n}")
    runs = sorted(record.runs, key=lambda run: run.facts["seed"])[: args.runs]
    first = runs[0]
    need_tools(record.folder, first.source)
    recorded = first.facts["environment"].items()
    environment = {x: y for x, y in recorded if x in REPEATED and MARKER not in y}
    data = ["--data", str(Path(args.data).resolve())] if args.data else []
    confirm(args, first, environment)
    reason = ""
    if "checkpoint_end" not in first.facts["config"]:
        reason = "its source does not have the setting checkpoint_end"
    losses = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary, "place")
        out = Path(args.out or Path(temporary, "runs")).resolve()
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        train = workplace(place, out, first.source, args.sandbox, environment)
        for seed, old in enumerate(runs):
            saves = seed == 0 and not reason  # one checkpoint is enough: it can have 70 GB
            with about(f"seed {seed}"):
                words = [*old.words, *data, "--seed", str(seed)]
                if saves:
                    words += ["--set", "checkpoint_end=always"]
                new = train(words)
                print(f"seed {seed}: {check_reproduced(record, old, new, pinned)}", flush=True)
                loss = new.loss
                if saves:
                    loss, reason = compute_loss(old, new, data)
                losses.append(loss)
        check_mean(record, before, losses)
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
            require(new.seconds <= took, f"not reproduced: {process}, so not {new.seconds:.2f} s")
    if reason:
        raise Unproven(f"reproduced, but its loss was not computed again: {reason}")
    return "reproduced"


def side_of(text: str, arguments: list[str]) -> tuple[bytes, list[str]]:
    """Return (source, arguments) of "FILE", of "FILE ARG ...", or of a record or run."""
    with about(text):
        file, *own = [text] if Path(text).exists() else shlex.split(text)
        folder = Path(file).resolve()
        if not folder.is_dir():
            return folder.read_bytes(), [*arguments, *own]
        runs = [x for x in (folder, *sorted(folder.glob("*"))) if (x / "metrics.jsonl").is_file()]
        require(runs, f"{file} has no run: name logs/<run id>, or the folder of a record")
        run = C.read_run(runs[0])
        need_tools(folder, run.source)
        return run.source, run.words + own


def compare(root: Path, args) -> str:
    """Alternate two sources on this machine and print paired differences.

    Both runs of pair i have seed i. The order alternates too, because a machine may warm up.
    """
    require(args.runs >= 2, "--runs: at least two pairs are needed for a confidence interval")
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
                words = [*sides[name][1], "--seed", str(seed)]
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


# ---- The command line --------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, with exit status 2."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")


def main(argv=None) -> int:
    """Parse and run the command line; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="leaderboard.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", default=HERE, help="another folder of records")
    commands = parser.add_subparsers(dest="do", help="without a command: print the standings")
    one = commands.add_parser("add", help="collect runs into a record")
    one.add_argument("runs", nargs="+", metavar="RUN_DIR")
    one.add_argument("--track", required=True, choices=C.TRACKS)
    one.add_argument("--name", required=True, help="part of its folder: letters, digits, hyphens")
    one.add_argument("--by", required=True, help="the author")
    one.add_argument("--what", required=True, help="the change, in a sentence")
    one.add_argument("--rate", type=float, metavar="X", help="dollars per hour of the machine")
    one.add_argument("--pin", action="store_true", help="add new shards to tokens.json")
    commands.add_parser("check", help="derive all results from the logs again")
    one = commands.add_parser("render", help="update the tables in README.md")
    one.add_argument("--check", action="store_true", help="only report whether they are stale")
    one = commands.add_parser("diff", help="show the changes of a record in the source")
    one.add_argument("record", metavar="RECORD", help="its folder, which may be a new one")
    one = commands.add_parser("reproduce", help="run a record's source again")
    one.add_argument("record", metavar="RECORD")
    one.add_argument("--runs", type=int, default=1, metavar="N", help="number of seeds")
    one.add_argument("--data", metavar="DIR", help="folder with the token shards")
    one.add_argument("--out", metavar="DIR", help="keep the runs in this folder")
    one.add_argument("--sandbox", action="store_true", help="use bubblewrap or docker")
    one.add_argument("--yes", action="store_true", help="do not ask before running it")
    one = commands.add_parser("compare", help="alternate two sources on this machine")
    one.epilog = "Both sources get the arguments after --."
    one.add_argument("base", metavar="BASE.py", help='or "BASE.py ARG ...", or a record')
    one.add_argument("cand", metavar="CAND.py", help='or "CAND.py ARG ...", or a record')
    one.add_argument("--runs", type=int, default=5, metavar="N", help="number of pairs")
    one.add_argument("--out", metavar="DIR", help="keep the runs in DIR/base and DIR/cand")
    args = parser.parse_args(argv[:cut])
    args.arguments = argv[cut + 1 :]
    if args.arguments and args.do != "compare":
        parser.error("only compare takes arguments after --")
    root = Path(args.records).resolve()
    do = {"add": add, "render": render, "diff": diff, "reproduce": reproduce, "compare": compare}
    do |= {"check": lambda root, args: f"valid records: {len(C.all_valid(root))}"}
    do |= {None: lambda root, args: standings(root, C.all_valid(root))}
    try:
        answer = do[args.do](root, args)
        if answer:  # the diff of equal sources is empty
            print(answer)
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the process that it runs
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` is not an error
    sys.exit(main())
