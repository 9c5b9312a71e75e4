"""Records: collect timed runs, check them, rank them, plot them, run them again.

    python records/leaderboard.py                # the standings, on the terminal
    python records/leaderboard.py add RUN_DIR... --track T --name NAME --by WHO --what TEXT
    python records/leaderboard.py check          # everything is derived anew from the logs
    python records/leaderboard.py render         # the tables in records/README.md, and the plots
    python records/leaderboard.py reproduce records/T/DATE_NAME
    python records/leaderboard.py compare BASE.py CAND.py --runs N -- ARGS

The rules are in records/README.md, what is checked in checks.py. Only `reproduce` and `compare`
execute sources. A refusal is one line with its reason and exit status 1; a wrong command line is
exit status 2.
"""

import argparse
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
from pathlib import Path

import checks as C
import numpy as np
from checks import Refused, Run, about, need
from scipy import stats

HERE = Path(__file__).resolve().parent
MARKERS = "<!-- leaderboard: begin, generated -->\n", "<!-- leaderboard: end -->\n"
PNG = b"\x89PNG\r\n\x1a\n"  # how every file of the kind begins
REPEATED = "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS"  # `reproduce` sets them as they were


def add(root: Path, args) -> str:
    """Collect runs into a new record; nothing is written unless all of it is valid."""
    C.check_name(args.name)
    track, pinned = C.TRACKS[args.track], C.read_tokens(root)
    texts = {key: " ".join(getattr(args, key).split()) for key in ("by", "what")}
    need(all(texts.values()), "--by and --what must say something")
    runs = [C.read_run(Path(os.path.abspath(path))) for path in args.runs]
    if args.pin:  # what is known is neither changed nor extended
        with about("--pin"):
            data = runs[0].facts["data"]
            pinned.setdefault(C.stream_name(track, data), data)
    result = C.judge(track, runs, pinned)
    fields = {"track": args.track, "name": args.name, **texts, "beats": None, "result": result}
    folder = root / args.track / f"{result['date']}_{args.name}"
    need(not folder.exists(), f"{folder} is there already: choose another --name")
    record = C.Record(folder, fields, runs)
    if before := C.chain(C.all_valid(root), record.competition):
        C.check_beats(record, before[-1])
        fields["beats"] = before[-1].name
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        made = Path(temporary) / "record"
        for run in runs:
            (made / C.run_id(run)).mkdir(parents=True)
            for name in C.FILES:
                shutil.copy(run.folder / name, made / C.run_id(run))
        (made / "record.json").write_text(json.dumps(fields, indent=1) + "\n")
        (made / "README.md").write_text(C.describe(fields))
        os.replace(made, folder)
    if args.pin:
        (root / "tokens.json").write_text(json.dumps(pinned, indent=1, sort_keys=True) + "\n")
    return f"added {folder}; next: python records/leaderboard.py render"


# ------------------------------------------------------------------------------------------------
# The standings: tables in README.md, text on the terminal, one plot for each competition
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


def chains(records: list[C.Record], track: str) -> dict[tuple, list[C.Record]]:
    """{competition: its records from the first to the standing one} of a track."""
    found = sorted({r.competition for r in records if r.competition[0] == track})
    return {competition: C.chain(records, competition) for competition in found}


def figures(record: C.Record) -> dict[str, str]:
    """What a record is compared by, as the page and the terminal show it."""
    got = record.result
    resumed = f" ({len(got['resumed'])} resumed)" if got["resumed"] else ""
    by_steps = record.track.batch_tokens > 0
    return {
        "time": f"{got['mean_seconds']:.2f} s ± {got['sd_seconds']:.2f}",
        "steps": f"{got['steps']:,}",
        "tokens": f"{got['tokens']:,}",
        "loss": f"{got['mean_loss']:.4f} ± {got['sd_loss']:.4f}",
        "runs": f"{len(got['runs'])}{resumed}",
        "proof": f"margin {got['margin']:.4f}" if by_steps else f"p = {got['p_value']:.1e}",
    }


def track_table(records: list[C.Record]) -> str:
    """One row for each track, with the standing record of each of its classes."""
    rows = []
    for name, track in C.TRACKS.items():
        by = "steps" if track.batch_tokens else "time"
        best = [
            f"**{figures(chain[-1])[by]}** on {competition[1]}"
            for competition, chain in chains(records, name).items()
        ]
        unit = "seconds of training" if by == "time" else by
        standing = "; ".join(best) or "No record yet: be the first."
        rows.append([f"`{name}`", track.title, unit, standing])
    return table("track | task | ranked by | standing record", rows)


def record_tables(root: Path, records: list[C.Record]) -> str:
    """Every competition that has records; the standing one is the first row."""
    text = ""
    for name in C.TRACKS:
        for competition, chain in chains(records, name).items():
            rows = []
            for number, record in reversed(list(enumerate(chain, 1))):
                shown, fields = figures(record), record.fields
                link = f"[{fields['name']}]({name}/{record.name}/README.md)"
                rows.append([number, *shown.values(), f"{link}: {fields['what']}"])
                rows[-1] += [fields["by"], record.result["date"]]
            columns = " | ".join(["#", *shown, "what", "by", "date"])
            path = plot_path(root, competition).relative_to(root)
            text += f"\n### `{name}`: {competition[1]}, tokens `{competition[2]}`\n\n"
            text += f"{table(columns, rows)}\n![loss and record time]({path.as_posix()})\n"
    return text


def predictions(root: Path) -> list[tuple[Path, dict[str, str]]]:
    """What records/preflight.py said of hardware that nobody has timed yet: (its file, as shown).

    `in all` is what counts: the compiler's time and the floors of what that leaves out.
    """
    rows = []
    for path in sorted(root.glob("predicted/*/preflight.json")):
        report = json.loads(path.read_text())
        whole = report["predicted"]
        need(bool(whole), f"{path} has no totals of a run: preflight.py without --program")
        names = "train_seconds", "train_link_floor_seconds", "train_moved_floor_seconds"
        parts = [whole[name] for name in names]
        peak = max(row["bytes"]["peak"] + row["resident_bytes"] for row in report["variants"])
        said = (f"{name} {version}" for name, version in report.get("versions", {}).items())
        shown = {
            "hardware": f"{report['devices']} x {report['device_kind']}",
            "preset": report["preset"],
            **dict.fromkeys(("in all", "predicted", "links", "moves"), "unknown"),
            "steps": f"{report['total_steps']:,}",
            "tokens": f"{report['total_tokens']:,}",
            "GiB": f"{peak / 2**30:.1f}",
            "by": ", ".join(said),
        }
        if None not in parts:  # it is where a compiler estimates no times, as those of GPUs
            shown |= {"in all": f"{sum(parts):.1f} s", "predicted": f"{parts[0]:.1f} s"}
            shown |= {"links": f"{parts[1]:.1f} s", "moves": f"{parts[2]:.1f} s"}
        rows.append((path, shown))
    return rows


def predicted_table(root: Path) -> str:
    """The predictions as a Markdown table."""
    rows = []
    for path, shown in predictions(root):
        link = f"[{shown['preset']}]({path.relative_to(root).as_posix()})"
        rows.append(shown | {"preset": link, "in all": f"**{shown['in all']}**"})
    return table(" | ".join(rows[0]), [[*row.values()] for row in rows]) if rows else "None yet.\n"


def leaderboard(root: Path, records: list[C.Record]) -> str:
    """The generated part of records/README.md."""
    return f"""{MARKERS[0]}
## Standings

{track_table(records)}{record_tables(root, records)}
## Predicted by the compiler

No measurements and no records: what `preflight.py` says of hardware on which nobody has timed this
trainer yet. `predicted` is the compiler's estimate of the computation; `links` and `moves` are the
least that what it leaves out takes. The figure that counts is their sum, `in all`.

{predicted_table(root)}
{MARKERS[1]}"""


def standings(root: Path) -> str:
    """What the page shows, as text: every track with its records, then the predictions."""
    records, lines = C.all_valid(root), []
    for name, track in C.TRACKS.items():
        lines.append(f"{name}: {track.title}")
        found = chains(records, name)
        lines += ["  no record yet: be the first"] * (not found)
        for (_, machine, stream), chain in found.items():
            lines.append(f"  {machine}, tokens {stream}")
            for number, record in reversed(list(enumerate(chain, 1))):
                shown, who = figures(record), f"{record.fields['name']}, by {record.fields['by']}"
                lines.append(
                    f"  {number:2}  {shown['time']}  {shown['steps']} steps  loss {shown['loss']}  "
                    f"{shown['runs']} runs  {shown['proof']}  {who}, {record.result['date']}"
                )
    lines.append("predicted by the compiler, timed by nobody:")
    for _, shown in predictions(root):
        lines.append(
            f"  {shown['hardware']}, {shown['preset']}: {shown['in all']} ({shown['predicted']}, "
            f"at least {shown['links']} of links and {shown['moves']} of moves)"
        )
    return "\n".join(lines)


def curve(runs: list[Run], kind: str) -> np.ndarray:
    """[point, (seconds, tokens, loss)], the mean over the runs."""
    return np.mean([run.losses(kind) for run in runs], axis=0)


def draw(path: Path, records: list[C.Record], digest: str):
    """The plot of a competition: its records from the first to the standing one."""
    try:
        import matplotlib
    except ImportError:
        raise Refused("render draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    small = {"textcoords": "offset points", "fontsize": 8}
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
    top = curve(records[-1].runs, "train_loss")[0, 2]
    lowest = min(record.result["mean_loss"] for record in records)
    for axis, name in ((axes[0], "seconds of training"), (axes[1], "training tokens")):
        axis.axhline(target, color="C3", lw=0.8, ls="--", label=f"target {target}")
        axis.set(xlabel=name, ylabel="loss, nats a token", xlim=(0, None))
        axis.set_ylim(lowest - 0.06 * (top - target), target + 0.55 * (top - target))
        axis.legend(title="line: training, dots: validation", fontsize=8, title_fontsize=8)
    axes[1].xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    values = [r.result["steps" if by_steps else "mean_seconds"] for r in records]
    spread = [0.0 if by_steps else r.result["sd_seconds"] for r in records]
    numbers = range(1, len(records) + 1)
    axes[2].step(numbers, values, where="post", color="0.7")
    axes[2].errorbar(numbers, values, spread, color="C0", marker="o", ls="", capsize=3)
    for number, value, record in zip(numbers, values, records, strict=True):
        axes[2].annotate(f"{record.fields['name']}: {value:,.1f}", (number, value), (7, 3), **small)
    axes[2].set(ylabel="steps" if by_steps else "seconds", ylim=(0, 1.25 * max(values)))
    shown = numbers[:: -(-len(records) // 6)]  # so that their dates do not overlap
    axes[2].set_xticks(shown, [f"{i}\n{records[i - 1].result['date']}" for i in shown])
    axes[2].set_xlim(0.7, len(records) + 0.7)
    axes[2].set_title("the records, one after the other", fontsize=10)
    track, machine, stream = records[-1].competition
    figure.suptitle(f"{track}: {machine}, {stream}", fontsize=10)
    figure.savefig(path, dpi=90, metadata={"Software": None, "Description": digest})
    plt.close(figure)


def render(root: Path, args) -> str:
    """Bring tables and plots up to date; with --check refuse if they are not.

    A plot carries a hash of what it was drawn from and of how, and is drawn again when that has
    changed: another matplotlib alone makes no plot stale.
    """
    records, page = C.all_valid(root), root / "README.md"
    text = page.read_text()
    parts = re.fullmatch(f"(.*?){MARKERS[0]}.*{MARKERS[1]}(.*)", text, re.S)
    need(bool(parts), "README.md has lost the two markers of the leaderboard")
    fresh = parts[1] + leaderboard(root, records) + parts[2]
    again = "run python records/leaderboard.py render"
    need(not args.check or fresh == text, f"the leaderboard in README.md is stale: {again}")
    for competition in sorted({record.competition for record in records}):
        drawn, path = C.chain(records, competition), plot_path(root, competition)
        content = [(r.fields["name"], r.result, r.track.target) for r in drawn]
        content += [run.metrics for record in drawn for run in record.runs]
        digest = hashlib.sha256((repr(content) + inspect.getsource(draw)).encode()).hexdigest()
        there = path.read_bytes() if path.is_file() else b""
        if not there.startswith(PNG) or digest.encode() not in there:
            need(not args.check, f"the plot {path.name} is stale: {again}")
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
    return C.read_run(folder)


def reproduce(root: Path, args) -> str:
    """Run a record's own source again, and hold its loss against what it claims; print its time.

    The loss must be in the interval in which 99% of further runs of such a mean and deviation are.
    """
    record = C.check_record(Path(os.path.abspath(args.record)), C.read_tokens(root))
    result, n = record.result, len(record.runs)
    reach = stats.t.ppf(0.995, n - 1) * result["sd_loss"] * math.sqrt(1 + 1 / n)
    words = C.launch(record.runs[0].commands[0]).words
    words += ["--data", str(Path(args.data).resolve())] if args.data else []
    then = record.runs[0].facts["environment"]
    environment = {name: then[name] for name in then if name in REPEATED}
    runs = sorted(record.runs, key=lambda run: run.facts["seed"])
    need(1 <= args.runs <= len(runs), f"--runs {args.runs}: the record has 1 to {len(runs)}")
    with tempfile.TemporaryDirectory() as temporary:
        for old in runs[: args.runs]:
            seed, home = str(old.facts["seed"]), Path(temporary) / "source"
            with about(f"seed {seed}"):
                out = Path(args.out or Path(temporary) / "runs")
                new = train_with(old.source, home, [*words, "--seed", seed], out, environment)
                need(new.facts["data"] == old.facts["data"], "other tokens than the record's")
                need(
                    new.facts["config"] | C.FREE == old.facts["config"] | C.FREE,
                    "the command does not give the config of the record",
                )
                pairs = zip(new.losses("train_loss"), old.losses("train_loss"), strict=True)
                same = next((i for i, (a, b) in enumerate(pairs) if a[2] != b[2]), None)
                print(
                    f"seed {seed}: loss {new.loss:.4f}, recorded {old.loss:.4f}; "
                    f"{new.seconds:.2f} s on {C.hardware(new)}, recorded {old.seconds:.2f} s on "
                    f"{C.hardware(old)}; training losses "
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


def side_of(words: str, arguments: list[str]) -> tuple[bytes, list[str]]:
    """(source, arguments) of one side: "FILE" or "FILE ARG ...", or a record, with its own."""
    file, *own = shlex.split(words)
    if Path(file).is_dir():
        run = C.read_run(next(path for path in sorted(Path(file).iterdir()) if path.is_dir()))
        return run.source, C.launch(run.commands[0]).words
    return Path(file).read_bytes(), [*arguments, *own]


def compare(root: Path, args) -> str:
    """Alternate two sources on this machine and print paired differences.

    Pair i has seed i in both; every second pair begins with the other one, so that a machine which
    warms up or is busy for a while favours neither.
    """
    need(args.runs >= 2, "--runs: two pairs at least, one has no confidence interval")
    with about("compare"):
        sides = {name: side_of(getattr(args, name), args.arguments) for name in ("base", "cand")}
    ratios, differences = [], []
    print("seed   base s   cand s   ratio   base loss   cand loss   difference", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.runs):
            pair = {}
            for name in ("base", "cand") if seed % 2 == 0 else ("cand", "base"):
                source, words = sides[name]
                home, out = Path(temporary) / f"source-{name}", Path(args.out or temporary) / name
                with about(f"{name}, seed {seed}"):
                    pair[name] = train_with(source, home, [*words, "--seed", str(seed)], out)
            base, cand = pair["base"], pair["cand"]
            for name in base.facts["data"].keys() & cand.facts["data"].keys():
                same = base.facts["data"][name] == cand.facts["data"][name]
                need(same, f"base and cand have different tokens in {name}")
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
        f"{args.runs} pairs on {C.hardware(cand)}"
    )


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def parse_args(argv):
    """The command line as a namespace; `arguments` is what stands after the first --."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="leaderboard.py", description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=HERE, help="this folder, if another")
    commands = parser.add_subparsers(dest="what_to_do", help="none: print the standings")
    one = commands.add_parser("add", help="collect runs into a record")
    one.add_argument("runs", nargs="+", metavar="RUN_DIR")
    one.add_argument("--track", required=True, choices=C.TRACKS)
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
    one = commands.add_parser(
        "compare",
        help="alternate two sources on this machine",
        epilog="What stands after -- is given to both; paths in it must be absolute.",
    )
    one.add_argument("base", metavar="BASE.py", help='or "BASE.py ARG ...", or a record')
    one.add_argument("cand", metavar="CAND.py", help='or "CAND.py ARG ...", or a record')
    one.add_argument("--runs", type=int, default=5, metavar="N", help="pairs")
    one.add_argument("--out", metavar="DIR", help="keep the runs in DIR/base and DIR/cand")
    args = parser.parse_args(words[:cut])
    args.arguments = words[cut + 1 :]
    if args.arguments and args.what_to_do != "compare":
        parser.error("only compare takes arguments after --")
    return args


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""
    args = parse_args(argv)
    root = args.records.resolve()
    try:
        if args.what_to_do == "check":
            records, refusals = C.check_all(root)
            for reason in refusals:
                print("refused:", *reason.split(), file=sys.stderr)
            if not refusals:
                count = len(records)
                print(f"{count} {'record is' if count == 1 else 'records are'} valid")
            return 1 if refusals else 0
        do = {"add": add, "render": render, "reproduce": reproduce, "compare": compare}
        print(do[args.what_to_do](root, args) if args.what_to_do else standings(root))
    except Refused as error:
        print("refused:", *str(error).split(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
