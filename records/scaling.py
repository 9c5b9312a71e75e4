"""How does a run scale? Predicted seconds on more and more devices, as a table and a plot.

    pip install -r requirements.txt "jax[tpu]" matplotlib
    python records/scaling.py [TARGET ...] --dump DIR [--batch N ...]

For each TARGET of preflight.py (by default v6e-8, v6e-16, v6e-64 and v6e-256) and for batches of N
times as many tokens as those of `speedrun` (by default 1 and 4; the same number of steps) every
program of the run but validation is compiled, into DIR/TARGET-xN: a quarter of an hour of a core
each. A program that stands there already, made of the same source, is not compiled again, and
several calls can share the work. Then predicted/scaling.md, its scaling.json and scaling.png are
made anew of all that DIR has; with --draw nothing is compiled.

    in all       predicted seconds of training, with links in the open and moves, as preflight.py
                 has them
    links        the share of it in which devices only send and receive
    efficiency   device seconds of the smallest slice over those of this one, for the same tokens
"""

import argparse
import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
sys.path.insert(0, str(Path(__file__).resolve().parent))

import dataclasses

import jax
import preflight

import train_gpt as T

TARGETS = "v6e-8", "v6e-16", "v6e-64", "v6e-256"
BATCH = "times the tokens of a step; default: 1 4"
HERE = Path(__file__).resolve().parent / "predicted"
NAMED = re.compile(r"-x([1-9]\d*)$")  # folders of a dump
KEYS = "train_seconds", "train_link_floor_seconds", "train_moved_floor_seconds"


def larger(cfg: T.Config, times: int) -> T.Config:
    """`cfg` with batches of so many times as many rows."""
    stages = (dataclasses.replace(s, batch_tokens=times * s.batch_tokens) for s in cfg.stages)
    return T.validate(dataclasses.replace(cfg, stages=tuple(stages)))


def compile_all(cfg: T.Config, target: str, dump: Path, say=T.tell):
    """Compile what `dump` lacks of the programs of a run but for validation, one by one."""
    devices = preflight.absent_devices(target)
    names = [name for name in T.programs(*T.make_mesh(cfg, devices), T.PLAIN) if name != "eval"]
    for name in names:
        if name not in preflight.kept(cfg, target, dump):
            preflight.preflight(cfg, target, [name], dump, say=lambda line: None)
            say(f"{dump.name}: {name}")


def row_of(report: dict, times: int) -> dict | str:
    """What the table says of a preflight.json, or why it says nothing."""
    cfg, rows = larger(T.PRESETS["speedrun"], times), report["variants"]
    if (report["preset"], report["total_tokens"]) != ("speedrun", cfg.total_tokens):
        return f"is not of speedrun with {times} times its batch"
    rows = [row for row in rows if row["name"] != "eval"]
    names = {*preflight.executions(T.for_devices(cfg, report["devices"]))} - {"eval"}
    if missing := names - {row["name"] for row in rows}:
        return f"lacks {', '.join(sorted(missing))}"
    run = preflight.whole_run(rows)
    peak = max((row["bytes"]["peak"] or 0) + row["resident_bytes"] for row in rows)
    grads = [row for row in rows if row["name"].startswith("grads")]
    return {
        "target": report["target"],
        "devices": report["devices"],
        "batch": times,
        "tokens": report["total_tokens"],
        "row": min(row["row_tokens"] for row in grads),
        **{key: run[key] for key in KEYS},
        "in_all": run["sum_seconds"],
        "gib": peak / 2**30,
        "cpu_minutes": sum(row["cpu_seconds"] for row in rows) / 60,
    }


def efficiency(row: dict, rows: list[dict]) -> float | None:
    """Of a row, against the one with the fewest devices for the same batch."""
    least = min((x for x in rows if x["batch"] == row["batch"]), key=lambda x: x["devices"])
    if None in (row["in_all"], least["in_all"]):
        return None
    return least["in_all"] * least["devices"] / (row["in_all"] * row["devices"])


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    heads = "target", "batch", "tokens", "shortest row", "in all", "predicted", "links", "moves"
    heads += "links, share", "efficiency", "GiB a device"
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        seconds = [row["in_all"], *(row[key] for key in KEYS)]
        shown = ["unknown" if x is None else f"{x:.1f} s" for x in seconds]
        share = row["in_all"] and f"{row[KEYS[1]] / row['in_all']:.0%}"
        used = efficiency(row, rows)
        cells = [row["target"], f"x {row['batch']}", f"{row['tokens'] / 1e6:,.0f} M"]
        cells += [f"{row['row']:,}", f"**{shown[0]}**", *shown[1:], share or "-"]
        cells += ["-" if used is None else f"{used:.0%}", f"{row['gib']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict], out: Path):
    """Seconds, efficiency and the share of links over the number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row["in_all"] is not None]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for batch in sorted({row["batch"] for row in rows}):
        own = [row for row in rows if row["batch"] == batch]
        x, label = [row["devices"] for row in own], f"batch x {batch}"
        seconds = [row["in_all"] for row in own]
        (line,) = axes[0].plot(x, seconds, "o-", label=label)
        ideal = [seconds[0] * x[0] / n for n in x]
        axes[0].plot(x, ideal, ":", color=line.get_color(), lw=1)
        axes[1].plot(x, [100 * efficiency(row, rows) for row in own], "o-", label=label)
        axes[2].plot(x, [100 * row[KEYS[1]] / row["in_all"] for row in own], "o-", label=label)
    axes[0].set(ylabel="predicted seconds of the run (dotted: ideal)", yscale="log")
    axes[1].set(ylabel="efficiency, %", ylim=(0, 105))
    axes[2].set(ylabel="share of links in the open, %", ylim=(0, None))
    for axis in axes:
        axis.set(xlabel="devices", xscale="log")
        axis.set_xticks(sorted({row["devices"] for row in rows}))
        axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def write(dump: Path, out: Path, say=T.tell) -> str:
    """Make table and plot in `out` of all that `dump` has; the table. Says what it leaves out."""
    rows = []
    for path in sorted(dump.glob("*-x*")):
        report, named = preflight.report_in(path), NAMED.search(path.name)
        if report is None or not named or path.name != f"{report.get('target')}-x{named[1]}":
            continue
        try:
            row = row_of(report, int(named[1]))
        except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError):
            raise T.UserError(f"{path / 'preflight.json'} is damaged: delete it") from None
        if isinstance(row, str):
            say(f"left out: {path.name} {row}")
        else:
            rows.append(row | {"made_of": report["made_of"], "versions": report["versions"]})
    if not rows:
        raise T.UserError(f"--dump {dump} has no run whose programs are all compiled")
    rows.sort(key=lambda row: (row["batch"], row["devices"], row["target"]))
    (out / "scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
    least = [next(x for x in rows if x["batch"] == n) for n in sorted({x["batch"] for x in rows})]
    least = " and ".join(f"{row['target']} (batch x {row['batch']})" for row in least)
    text = f"{table(rows)}\nEfficiency: device seconds of {least} over those of a slice.\n"
    (out / "scaling.md").write_text(f"# Predicted, not measured\n\n{text}\n![](scaling.png)\n")
    draw(rows, out / "scaling.png")
    return text


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""

    def run():
        parser = T.Parser(prog="scaling.py", description=(__doc__ or "").split("\n")[0])
        parser.add_argument(
            "targets",
            nargs="*",
            metavar="TARGET",
            help="as preflight.py's; default: v6e-8 to v6e-256",
        )
        parser.add_argument("--dump", required=True, metavar="DIR", help="where programs are")
        parser.add_argument("--batch", nargs="+", type=int, default=[1, 4], metavar="N", help=BATCH)
        parser.add_argument("--draw", action="store_true", help="compile nothing")
        parser.add_argument("--out", default=HERE, type=Path, help=argparse.SUPPRESS)
        args = parser.parse_args(argv)
        jax.config.update("jax_platforms", "cpu")  # whatever is here: all that counts is absent
        if min(args.batch) < 1:
            raise T.UserError("--batch: numbers from 1 on")
        if importlib.util.find_spec("matplotlib") is None:
            raise T.UserError("the plot needs matplotlib: pip install matplotlib")
        if args.draw and args.targets:
            raise T.UserError("--draw takes all that --dump has: drop the targets")
        if not args.draw:
            T.make_folder(Path(args.dump), "--dump")
        T.make_folder(args.out, "--out")
        runs = () if args.draw else itertools.product(args.batch, args.targets or TARGETS)
        with preflight.schedule_dump():
            for target in () if args.draw else args.targets:
                preflight.absent_devices(target)  # refuses a wrong one before hours of compiling
            for times, target in runs:
                cfg = larger(T.PRESETS["speedrun"], times)
                compile_all(cfg, target, Path(args.dump) / f"{target}-x{times}")
        T.tell(write(Path(args.dump), args.out))
        return 0

    return T.report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
