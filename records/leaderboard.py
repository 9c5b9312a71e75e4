"""Records: collect timed runs, check them, rank them, plot them, run them again.

    python records/leaderboard.py                # the standings, on the terminal
    python records/leaderboard.py add RUN_DIR... --track T --name NAME --by WHO --what TEXT
    python records/leaderboard.py check          # everything is derived anew from the logs
    python records/leaderboard.py render         # the tables in records/README.md, and the plots
    python records/leaderboard.py reproduce records/T/DATE_NAME
    python records/leaderboard.py compare BASE.py CAND.py --runs N -- ARGS
    python records/leaderboard.py plot RUN...    # runs, records, all in one picture: plot.png

The rules are in records/README.md, what is checked in checks.py. Only `reproduce` and `compare`
execute sources; nothing here needs jax. A refusal is one line with its reason and exit status 1, a
wrong command line one line and exit status 2.
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
import signal
import subprocess
import sys
import tempfile
import zlib
from itertools import product
from pathlib import Path
from typing import NamedTuple

import checks as C
import numpy as np
from checks import Refused, Run, about, need
from scipy import stats

HERE = Path(__file__).resolve().parent
MARKERS = "<!-- leaderboard: begin, generated -->\n", "<!-- leaderboard: end -->\n"
PNG = b"\x89PNG\r\n\x1a\n"  # how every file of the kind begins
REPEATED = "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS"  # `reproduce` sets them as they were
FORMATS = ".png", ".svg", ".pdf", ".jpg"  # of a plot, by the end of its name
NORMS = {
    "grad_norm": "-",
    "grad_norm_adam": ":",
    "grad_norm_event": "--",
}  # in metrics.jsonl -> how their lines look
LINES = "line: training, dots: validation"
SMALL = {"textcoords": "offset points", "fontsize": 8}
LARGE = 1e30  # what is beyond, as infinities and NaN, is not drawn
EVERY = 10.0  # seconds after which `reproduce` and `compare` say again how far a run is


def say(line: str, stream=None):
    """Print a line, on stdout if on nothing else. The work goes on if nobody can read it."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError):  # what the stream still holds would fail at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def add(root: Path, args) -> str:
    """Collect runs into a new record; nothing is written unless all of it is valid."""
    track, pinned = C.TRACKS[args.track], C.read_tokens(root)
    texts = {key: " ".join(getattr(args, key).split()) for key in ("name", "by", "what")}
    with about("add"):
        C.expect(texts, {key: C.RECORD[key] for key in texts})
    runs = [C.read_run(Path(os.path.abspath(path))) for path in args.runs]
    if args.pin:  # what is known is neither changed nor extended
        with about("--pin"):
            data = runs[0].facts["data"]
            pinned.setdefault(C.stream_name(track, data), data)
    result = C.judge(track, runs, pinned)
    fields = {"track": args.track, **texts, "beats": None, "result": result}
    folder = root / args.track / f"{result['date']}_{args.name}"
    need(not folder.exists(), f"{folder} is there already: choose another --name")
    record = C.Record(folder, fields, runs)
    if before := C.chain(C.all_valid(root, (record,)), record.competition):
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
    """Where the plot of a competition is; a hash tells names apart that differ in their signs."""
    track, name = competition[0], " ".join(competition[1:])
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return root / track / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{digest}.png"


def sealed(picture: bytes) -> bytes:
    """A PNG that has the hash of all of it in a text before its end: neither half nor another."""
    text = b"tEXtSeal\0" + hashlib.sha256(picture).hexdigest().encode()
    chunk = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    return picture[:-12] + chunk + picture[-12:]


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
        report = json.loads(path.read_text(encoding="utf-8"))
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
trainer yet. `predicted` is the computation, of each instruction the longer of two: the compiler's
estimate, or 1.12 cycles for each bundle that a kernel issues (1.77 for gathers, scatters and
sorts), and its bytes at the rate of the memory; `links` is the time in which devices only send and
receive, `moves` the least that what has no estimate takes. What counts is their sum, `in all`.

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


# ------------------------------------------------------------------------------------------------
# Pictures: of a competition, of any runs
# ------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """What is drawn in one color: a run, all runs of a record, or their mean."""

    label: str
    color: str | tuple
    curves: list[dict[str, np.ndarray]]  # each {kind: [point, (seconds, tokens, value)]}


def pyplot():
    """matplotlib's pyplot, to draw into files; Refused where there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except (ImportError, ValueError) as error:  # ValueError: a setting of the user's is wrong
        raise Refused(f"plots need matplotlib, pip install matplotlib: {error}") from None
    return pyplot


def curves(run: Run) -> dict[str, np.ndarray]:
    """{kind: [point, (seconds, tokens, value)]} of losses and of norms, which a run may lack."""
    kinds = "train_loss", "val_loss", *NORMS
    return {kind: np.array(run.losses(kind), float).reshape(-1, 3) for kind in kinds}


def smooth(values: np.ndarray) -> np.ndarray:
    """[point, column], each column averaged over a fortieth of the points."""
    window = max(len(values) // 40, 1)
    columns = [np.convolve(x, np.ones(window) / window, "valid") for x in values.T if len(x)]
    return np.stack(columns, 1) if columns else values


def draw_losses(axes, shown: list[Shown], targets: set[float]):
    """Loss over seconds on axes[0], over tokens on axes[1]; what comes later lies above.

    Training is smoothed, and may leave the picture at the top in its first twentieth.
    """
    from matplotlib import ticker

    seen = [np.array([[0, 0, target] for target in targets])]
    for one in shown:
        for curve in one.curves:
            line, alpha = smooth(curve["train_loss"]), 0.8 if len(one.curves) == 1 else 0.35
            seen += [line[len(line) // 20 :], curve["val_loss"][-1:]]
            for x, axis in enumerate(axes[:2]):
                axis.plot(line[:, x], line[:, 2], color=one.color, lw=1, alpha=alpha)
        dots = np.concatenate([curve["val_loss"] for curve in one.curves])
        for x, axis in enumerate(axes[:2]):
            look = {"color": one.color, "marker": "o", "ms": 5, "ls": ""}
            axis.plot(dots[:, x], dots[:, 2], label=one.label, **look)
    losses = np.concatenate(seen)[:, 2]
    reach = 0.06 * max(np.ptp(losses), 0.1)
    for axis, name in zip(axes[:2], ("seconds of training", "training tokens"), strict=True):
        for target in targets:
            axis.axhline(target, color="0.2", lw=0.8, ls="--")
            place = {"xytext": (3, 3), "xycoords": axis.get_yaxis_transform()}
            axis.annotate(f"target {target}", (0, target), **place, **SMALL)
        axis.set(xlabel=name, ylabel="loss, nats a token", xlim=(0, None))
        axis.set_ylim(min(losses) - reach, max(losses) + reach)
    axes[1].xaxis.set_major_formatter(ticker.EngFormatter(sep=""))


def draw(path: Path, records: list[C.Record], digest: str):
    """The plot of a competition: its records from the first to the standing one."""
    plt, shown = pyplot(), []
    target, by_steps = records[-1].track.target, records[-1].track.batch_tokens > 0
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for i, record in enumerate(records):
        standing = i == len(records) - 1
        color = "C0" if standing else str(0.35 + 0.45 * (len(records) - 2 - i) / len(records))
        label = f"{record.fields['name']}: {record.result['mean_loss']:.4f}"
        each, kinds = [*map(curves, record.runs)], ("train_loss", "val_loss")
        mean = {kind: np.mean([curve[kind] for curve in each], axis=0) for kind in kinds}
        shown.append(Shown(label, color, [mean]))
    draw_losses(axes, shown, {target})
    for axis in axes[:2]:
        axis.legend(title=LINES, fontsize=8, title_fontsize=8)
    values = [r.result["steps" if by_steps else "mean_seconds"] for r in records]
    spread = [0.0 if by_steps else r.result["sd_seconds"] for r in records]
    numbers = range(1, len(records) + 1)
    axes[2].step(numbers, values, where="post", color="0.7")
    axes[2].errorbar(numbers, values, spread, color="C0", marker="o", ls="", capsize=3)
    for number, value, record in zip(numbers, values, records, strict=True):
        axes[2].annotate(f"{record.fields['name']}: {value:,.1f}", (number, value), (7, 3), **SMALL)
    axes[2].set(ylabel="steps" if by_steps else "seconds", ylim=(0, 1.25 * max(values)))
    shown = numbers[:: -(-len(records) // 6)]  # so that their dates do not overlap
    axes[2].set_xticks(shown, [f"{i}\n{records[i - 1].result['date']}" for i in shown])
    axes[2].set_xlim(0.7, len(records) + 0.7)
    axes[2].set_title("the records, one after the other", fontsize=10)
    track, machine, stream = records[-1].competition
    figure.suptitle(f"{track}: {machine}, {stream}", fontsize=10)
    figure.savefig(path, dpi=90, metadata={"Software": None, "Description": digest})
    plt.close(figure)


def runs_at(path: str) -> list[Path]:
    """The folder of the run at `path`, or those of the runs in it: of a record, of logs/."""
    folder = Path(os.path.abspath(path))
    found = [x for x in (folder, *sorted(folder.glob("*"))) if (x / "metrics.jsonl").is_file()]
    need(bool(found), f"no run is in {path}: name logs/<run id>, or the folder of a record")
    return found


def glance(folder: Path) -> Run:
    """A run for the eye: it may be under way or have diverged, and no rule is checked.

    Without its source and commands, a last line that is not whole, and lines with a value that no
    picture has room for. Refused if the trainer writes no such files.
    """
    with about(folder):
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        need((folder / "run.json").is_file(), "it has no run.json")
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        rows = [x for x in map(json.loads, lines) if all(abs(y) < LARGE for y in x.values())]
        run = Run(folder, b"", [], facts, rows)
        curves(run), how_far(run)  # or what they lack is named here
        need(abs(facts["config"]["target"]) < LARGE, "its target is no number")
        return run


def how_far(run: Run) -> str:
    """The last step, loss and time of a run that may be under way."""
    config, last = run.facts["config"], run.metrics[-1] if run.metrics else None
    if last is None:
        return f"step 0 of {config['steps']:,}, it compiles first"
    kind = "val_loss" if "val_loss" in last else "train_loss"
    seconds, what = last["train_time_ms"] / 1000, kind.replace("_", " ")
    return f"step {last['step']:,} of {config['steps']:,}, {what} {last[kind]:.4f}, {seconds:.1f} s"


def write_losses(axis, x: int, shown: list[Shown]):
    """Write validation losses above their dots, the last ones first, where there is room.

    Of the runs of a record their mean; x: 0 for seconds, 1 for tokens.
    """
    from matplotlib import patheffects

    taken, light = [], [patheffects.withStroke(linewidth=2, foreground="white")]
    for one in reversed(shown):
        several = zip(*(curve["val_loss"] for curve in one.curves), strict=False)
        for dot in reversed([np.mean(dots, axis=0) for dots in several]):
            place = axis.transData.transform(dot[[x, 2]])
            if all((abs(place - other) > (48, 14)).any() for other in taken):
                taken.append(place)
                look = {"color": one.color, "ha": "center", "path_effects": light}
                axis.annotate(f"{dot[2]:.4f}", dot[[x, 2]], (0, 7), **look, **SMALL)


def plot(root: Path, args) -> str:
    """Draw runs in one picture, those of a record in one color; a run may be under way."""
    out, groups = Path(args.out), {}
    need(
        out.suffix.lower() in FORMATS,
        f"--out {out}: the name of a plot ends with {', '.join(FORMATS)}",
    )
    need(out.parent.is_dir(), f"--out {out}: no such folder as {out.parent}, make it first")
    for path in args.runs:
        if Path(path).is_file() and len(args.runs) > 1:  # as `plot records/cpu/*` finds some
            continue
        folder, runs = Path(os.path.abspath(path)), [*map(glance, runs_at(path))]
        is_record = (folder / "record.json").is_file()
        is_record &= all(run.metrics and "val_loss" in run.metrics[-1] for run in runs)
        groups |= {folder: runs} if is_record else {run.folder: [run] for run in runs}
    every = [run for runs in groups.values() for run in runs]
    need(any(run.metrics for run in every), "there is no step to draw yet")

    plt, shown = pyplot(), []
    colors = [f"C{i}" for i in range(10)]  # which are easier to tell apart than those of a scale
    if len(groups) > len(colors):
        colors = [*plt.colormaps["turbo"](np.linspace(0.05, 0.95, len(groups)))]
    for color, (folder, runs) in zip(colors, groups.items(), strict=False):
        label = how_far(runs[0])
        if len(runs) > 1:
            loss, seconds = (
                np.mean([getattr(x, key) for x in runs]) for key in ("loss", "seconds")
            )
            label = f"mean of {len(runs)} runs, val loss {loss:.4f}, {seconds:.1f} s"
        name = folder.name.lstrip("_").replace("$", r"\$")  # which mean something to matplotlib
        shown.append(Shown(f"{name}: {label}", color, [*map(curves, runs)]))
    normed = any(len(curve[kind]) for one in shown for curve in one.curves for kind in NORMS)
    size = 6 * (2 + normed), 5 + 0.1 * len(shown)
    figure, axes = plt.subplots(1, 2 + normed, figsize=size, layout="constrained")
    draw_losses(axes, shown, {run.facts["config"]["target"] for run in every})
    if normed:
        for one in shown:
            for curve, (kind, style) in product(one.curves, NORMS.items()):
                line = smooth(curve[kind])
                axes[2].plot(line[:, 1], line[:, 2], style, color=one.color, lw=1, alpha=0.8)
        axes[2].sharex(axes[1])
        axes[2].set(xlabel="training tokens", ylabel="norm of the gradient", yscale="log")
        axes[2].set_title("line: of the matrices, dots: Adam's", fontsize=8)
    text, place = {"fontsize": 8, "title_fontsize": 8}, "outside lower center"
    named = axes[0].get_legend_handles_labels()
    figure.legend(*named, title=LINES, ncols=2, loc=place, **text)
    figure.draw_without_rendering()  # so that places in the picture are known
    for x, axis in enumerate(axes[:2]):
        write_losses(axis, x, shown)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return f"drawn: {out}"


def render(root: Path, args) -> str:
    """Bring tables and plots up to date; with --check refuse if they are not.

    A plot carries a hash of what it was drawn from and of how, and one of its own bytes. When one
    of them is wrong it is drawn again: another matplotlib alone makes no plot stale.
    """
    records, page = C.all_valid(root), root / "README.md"
    text = page.read_text(encoding="utf-8")
    parts = re.fullmatch(f"(.*?){MARKERS[0]}.*{MARKERS[1]}(.*)", text, re.S)
    need(bool(parts), "README.md has lost the two markers of the leaderboard")
    fresh = parts[1] + leaderboard(root, records) + parts[2]
    again = "run python records/leaderboard.py render"
    need(not args.check or fresh == text, f"the leaderboard in README.md is stale: {again}")
    for competition in sorted({record.competition for record in records}):
        drawn, path = C.chain(records, competition), plot_path(root, competition)
        content = [(r.fields["name"], r.result, r.track.target) for r in drawn]
        content += [run.metrics for record in drawn for run in record.runs]
        how = "".join(map(inspect.getsource, (draw, draw_losses, smooth)))
        digest = hashlib.sha256((repr(content) + how).encode()).hexdigest()
        there = path.read_bytes() if path.is_file() else b""
        whole = sealed(there[:-93] + there[-12:]) == there  # a seal has 81 bytes, a PNG's end 12
        if not whole or not there.startswith(PNG) or digest.encode() not in there:
            need(not args.check, f"the plot {path.name} is stale: {again}")
            draw(path, drawn, digest)
            path.write_bytes(sealed(path.read_bytes()))
    page.write_text(fresh)
    return f"{page} is up to date, {len(records)} records"


# ------------------------------------------------------------------------------------------------
# Running sources: reproduce, compare
# ------------------------------------------------------------------------------------------------


def train_with(what: str, source: bytes, home: Path, args, out: Path, environment=None) -> Run:
    """Execute `source` as home/train_gpt.py, beside this repository's data/; its run in `out`.

    Says on stderr how far it is, every EVERY seconds and at its end, each line with `what` it is.
    """
    home.mkdir(exist_ok=True)
    (home / "train_gpt.py").write_bytes(source)
    if not (home / "data").exists():
        (home / "data").symlink_to(HERE.parent / "data", target_is_directory=True)
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    command = [sys.executable, "train_gpt.py", *args, "--out", str(out.resolve())]
    with subprocess.Popen(
        command,
        **{"cwd": home, "env": os.environ | (environment or {}), "errors": "replace"},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
    ) as child:
        try:
            while child.returncode is None:
                try:
                    stdout, stderr = child.communicate(timeout=EVERY)
                except subprocess.TimeoutExpired:
                    found, far = set(out.iterdir()) - before, "no step yet"
                    with contextlib.suppress(Refused):  # nothing there yet, or half of it
                        far = how_far(glance(*found)) if len(found) == 1 else far
                    say(f"{what}: {far}", sys.stderr)
        except BaseException:
            child.kill()
            child.wait()
            raise
    said = (stderr or stdout).strip().splitlines() or ["nothing"]
    need(child.returncode == 0, f"exit status {child.returncode}, it said: {said[-1]}")
    found = set(out.iterdir()) - before
    need(len(found) == 1, f"it left {len(found)} runs behind, not one: it is no train_gpt.py")
    run = C.read_run(*found)
    say(f"{what}: {how_far(run)}", sys.stderr)
    return run


def reproduce(root: Path, args) -> str:
    """Run a record's own source again, and hold its loss against what it claims; print its time.

    The loss must be in the interval in which 99% of further runs of such a mean and deviation are.
    """
    there = Path(args.record, "record.json").is_file()
    need(there, f"{args.record} is no record: name a folder such as records/cpu/DATE_NAME")
    record = C.check_record(Path(os.path.abspath(args.record)), C.read_tokens(root))
    result, n = record.result, len(record.runs)
    reach = stats.t.ppf(0.995, n - 1) * result["sd_loss"] * math.sqrt(1 + 1 / n)
    words = C.launch(record.runs[0].commands[0]).words
    words += ["--data", str(Path(args.data).resolve())] if args.data else []
    then = record.runs[0].facts["environment"]
    environment = {name: then[name] for name in then if name in REPEATED}
    runs = sorted(record.runs, key=lambda run: run.facts["seed"])
    need(1 <= args.runs <= len(runs), f"--runs {args.runs}: the record has 1 to {len(runs)}")
    Path(args.out or ".").mkdir(parents=True, exist_ok=True)  # or an error, before hours of work
    with tempfile.TemporaryDirectory() as temporary:
        for old in runs[: args.runs]:
            seed, home = str(old.facts["seed"]), Path(temporary) / "source"
            with about(what := f"seed {seed}"):
                out = Path(args.out or Path(temporary) / "runs")
                words_of_seed = [*words, "--seed", seed]
                new = train_with(what, old.source, home, words_of_seed, out, environment)
                need(new.facts["data"] == old.facts["data"], "other tokens than the record's")
                need(
                    new.facts["config"] | C.FREE == old.facts["config"] | C.FREE,
                    "the command does not give the config of the record",
                )
                pairs = zip(new.losses("train_loss"), old.losses("train_loss"), strict=True)
                same = next((i for i, (a, b) in enumerate(pairs) if a[2] != b[2]), None)
                say(
                    f"seed {seed}: loss {new.loss:.4f}, recorded {old.loss:.4f}; "
                    f"{new.seconds:.2f} s on {C.hardware(new)}, recorded {old.seconds:.2f} s on "
                    f"{C.hardware(old)}; training losses "
                    + ("equal to the last digit" if same is None else f"equal for {same} steps")
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
    """(source, arguments) of one side: "FILE" or "FILE ARG ...", or a record or run, with its own.

    Refused, naming the side, if that is nothing of the kind.
    """
    try:
        file, *own = [words] if Path(words).exists() else shlex.split(words) or [words]
    except ValueError as error:  # a quotation without an end
        raise Refused(f"{words!r} names no file ({error})") from None
    if Path(file).is_dir():
        run = C.read_run(runs_at(file)[0])
        return run.source, C.launch(run.commands[0]).words + own
    need(Path(file).is_file(), f"{file}: No such file, and no folder of a record or run")
    return Path(file).read_bytes(), [*arguments, *own]


def compare(root: Path, args) -> str:
    """Alternate two sources on this machine and print paired differences.

    Pair i has seed i in both; every second pair begins with the other one, so that a machine which
    warms up or is busy for a while favours neither.
    """
    need(args.runs >= 2, "--runs: two pairs at least, one has no confidence interval")
    sides = {name: side_of(getattr(args, name), args.arguments) for name in ("base", "cand")}
    Path(args.out or ".").mkdir(parents=True, exist_ok=True)  # or an error, before hours of work
    ratios, differences = [], []
    say("seed   base s   cand s   ratio   base loss   cand loss   difference")
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.runs):
            pair = {}
            for name in ("base", "cand") if seed % 2 == 0 else ("cand", "base"):
                source, words = sides[name]
                home, out = Path(temporary) / f"source-{name}", Path(args.out or temporary) / name
                what = f"pair {seed + 1} of {args.runs}, {name} ({getattr(args, name)})"
                with about(f"{name}, seed {seed}"):
                    pair[name] = train_with(what, source, home, [*words, "--seed", str(seed)], out)
            base, cand = pair["base"], pair["cand"]
            for name in base.facts["data"].keys() & cand.facts["data"].keys():
                same = base.facts["data"][name] == cand.facts["data"][name]
                need(same, f"base and cand have different tokens in {name}")
            for key in ("val_tokens", "target"):
                same = base.facts["config"][key] == cand.facts["config"][key]
                need(same, f"base and cand have different {key}: their losses cannot be compared")
            ratios.append(math.log(cand.seconds / base.seconds))
            differences.append(cand.loss - base.loss)
            say(
                f"{seed:4} {base.seconds:8.2f} {cand.seconds:8.2f} {math.exp(ratios[-1]):7.4f}"
                f"   {base.loss:9.4f}   {cand.loss:9.4f}     {differences[-1]:+.4f}"
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


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, with exit status 2."""

    def error(self, message):
        """End the program without the whole usage."""
        self.exit(2, " ".join(f"error: {message} (see --help)".split()) + "\n")


def path(text: str) -> str:
    """A path of the command line, which is not empty: that would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name something, or drop it")
    return text


def parse_args(argv):
    """The command line as a namespace; `arguments` is what stands after the first --."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = Parser(prog="leaderboard.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=path, default=HERE, help="this folder, if another")
    commands = parser.add_subparsers(dest="what_to_do", help="none: print the standings")
    one = commands.add_parser("add", help="collect runs into a record")
    one.add_argument("runs", nargs="+", type=path, metavar="RUN_DIR")
    one.add_argument("--track", required=True, choices=C.TRACKS)
    one.add_argument("--name", required=True, help="of the folder: letters, digits, hyphens")
    one.add_argument("--by", required=True, help="who")
    one.add_argument("--what", required=True, help="what changed, in a sentence")
    one.add_argument("--pin", action="store_true", help="enter new shards into tokens.json")
    commands.add_parser("check", help="derive everything anew from the logs")
    one = commands.add_parser("render", help="tables and plots")
    one.add_argument("--check", action="store_true", help="only say whether they are stale")
    one = commands.add_parser("reproduce", help="run a record's source again")
    one.add_argument("record", type=path, metavar="RECORD")
    one.add_argument("--runs", type=int, default=1, metavar="N", help="its first N seeds")
    one.add_argument("--data", type=path, metavar="DIR", help="folder with the token shards")
    one.add_argument("--out", type=path, metavar="DIR", help="keep the runs there")
    one = commands.add_parser(
        "compare",
        help="alternate two sources on this machine",
        epilog="What stands after -- is given to both; paths in it must be absolute.",
    )
    one.add_argument("base", type=path, metavar="BASE.py", help='or "BASE.py ARG ...", or a record')
    one.add_argument("cand", type=path, metavar="CAND.py", help='or "CAND.py ARG ...", or a record')
    one.add_argument("--runs", type=int, default=5, metavar="N", help="pairs")
    one.add_argument(
        "--out", type=path, metavar="DIR", help="keep the runs in DIR/base and DIR/cand"
    )
    one = commands.add_parser("plot", help="any runs in one picture")
    one.add_argument("runs", nargs="+", type=path, metavar="RUN", help="its folder, or a record's")
    one.add_argument("--out", type=path, default="plot.png", metavar="FILE", help="plot.png")
    args = parser.parse_args(words[:cut])
    args.arguments = words[cut + 1 :]
    if args.arguments and args.what_to_do != "compare":
        parser.error("only compare takes arguments after --")
    return args


def refuse(reason: str):
    """Say in a line what was refused."""
    say(" ".join(["refused:", *reason.split()]), sys.stderr)


def check(root: Path, args) -> str:
    """Refused, with a line for each reason, unless all records are valid."""
    records, refusals = C.check_all(root)
    for reason in refusals[:-1]:
        refuse(reason)
    need(not refusals, "".join(refusals[-1:]))
    return f"{len(records)} {'record is' if len(records) == 1 else 'records are'} valid"


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""
    args = parse_args(argv)
    root, what = Path(args.records).resolve(), args.what_to_do
    do = {None: lambda root, args: standings(root), "add": add, "check": check, "render": render}
    do |= {"reproduce": reproduce, "compare": compare, "plot": plot}
    try:
        there = what in ("compare", "plot") or (root / "tokens.json").is_file()
        need(there, f"{root} has no tokens.json: --records is the folder records/ of a clone")
        say(do[what](root, args))
    except (Refused, OSError) as error:
        refuse(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # its runs end, too
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for terminals that lack a sign
    sys.exit(main())
