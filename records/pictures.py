"""Draw the pictures of the documentation or, with `curves RUN...`, the losses of runs."""

import contextlib
import itertools
import json
import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
# The folder of train_gpt.py; `curves` needs neither train_gpt.py nor jax.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import leaderboard
import numpy as np

HERE = Path(__file__).resolve().parent

INK, GREY, BLUE, ORANGE = "#1f2328", "#59636e", "#0969da", "#bc4c00"
GREEN, PURPLE, PINK = "#1a7f37", "#8250df", "#bf3989"
PALE = {GREY: "#f3f5f7", BLUE: "#ddf4ff", GREEN: "#dafbe1", PURPLE: "#f6efff", PINK: "#ffeff7"}
AXES = "steps", "tokens", "seconds"


class Picture(list):
    """The elements of an SVG picture with a width of 900; later elements are in front."""

    def text(self, x, y, words, color=INK, anchor="middle"):
        """Write a line of text, vertically centered at `y`."""
        place = f'x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}"'
        self.append(f'<text {place} fill="{color}">{words}</text>')

    def line(self, color, *points, style=""):
        """Connect the points (x, y)."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.append(f'<polyline points="{path}" fill="none" stroke="{color}"{style}/>')

    def box(self, x, y, width, height, color, *lines):
        """Draw a box with lines of text; its upper left corner is at `x`, `y`."""
        place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="3" stroke-width="1"'
        border = color if lines else PALE[color]
        self.append(f'<rect {place} fill="{PALE[color]}" stroke="{border}"/>')
        for i, words in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 13 * (i - (len(lines) - 1) / 2), words, color)

    def svg(self, height: int) -> str:
        """Return the picture as text."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}"'
        head += ' font-family="Helvetica, Arial, sans-serif" font-size="11.5" stroke-width="2">'
        back = f'<rect width="900" height="{height}" rx="8" fill="white"/>'
        return "\n".join([head, back, *self, "</svg>\n"])


def draw_run(cfg) -> str:
    """Return a picture of the schedule: settings by stage, and the updates of parameters."""
    import train_gpt as T

    table = T.schedule(cfg)
    stages = [cfg.stages[i] for i in table.stage]
    picture = Picture()

    def at(step):
        return 180 + 665 * step / cfg.steps

    def name(y, words, color):
        picture.text(168, y, words, color, "end")

    name(26, "stages begin at step", GREY)
    for i, (first, end) in enumerate(itertools.pairwise(cfg.boundaries)):
        if i % 2 == 0:
            picture.box(at(first), 12, at(end) - at(first), 464, GREY)
        picture.text(at(first) + 3, 26, f"{first:,}", GREY, "start")
    curves = {  # color, values, a value and its y; a doubled value is 24 higher
        "tokens per step": (BLUE, [s.batch_tokens for s in stages], 131_072, 102),
        "document cap": (PINK, [s.doc_cap for s in stages], 128, 232),
        "long window": (PURPLE, [s.windows[1] for s in stages], 128, 232),
        "short window": (ORANGE, [s.windows[0] for s in stages], 128, 232),
        "learning rate factor": (GREEN, table.hyper.lr, 1, 274),
    }
    for words, (color, values, unit, base) in curves.items():
        y = base - 24 * np.log2(np.array(values) / unit)
        name(y[0], words, color)
        for first, end in itertools.pairwise(cfg.boundaries):
            steps = np.array([*range(first, end, 12), end - 1])
            picture.line(color, *zip(at(steps), y[steps], strict=True))
            x, up = (at(first) + 3, 8) if end < cfg.steps else (at(end) + 4, 0)
            picture.text(x, y[first] - up, f"{round(values[first], 2):,}", color, "start")
    momenta = np.where(table.hyper.fast_weight < 1, ", fast and slow momentum", "")
    waits = np.where(np.arange(cfg.steps) < cfg.table_change, *cfg.table_every)
    tied = np.arange(cfg.steps) <= T.last_tied_step(cfg)
    averaged = np.cumsum(table.hyper.average_rates.any(axis=1)) > 0
    rows = {
        "next tokens to predict": (GREY, [str(n) for n in (table.hyper.loss_weights > 0).sum(1)]),
        "softmax over": (GREY, [f"{n:,} ids" if n else "all ids" for n in table.candidates]),
        "matrices": (BLUE, [f"every step (ANVIL){words}" for words in momenta]),
        "embedding, head, small": (PURPLE, [f"every {cfg.adam_every} steps (Adam)"] * cfg.steps),
        "value and n-gram tables": (PINK, [f"every {n:.0f} steps (Adam)" for n in waits]),
        "embedding and head": (GREY, np.where(tied, "one matrix", "")),
        "averages of weights": (GREEN, np.where(averaged, f"last {cfg.tail} steps", "")),
    }
    for y, (words, (color, values)) in zip(range(344, 484, 20), rows.items(), strict=True):
        name(y, words, color)
        new = [i for i in range(1, cfg.steps) if values[i] != values[i - 1]]
        for first, end in itertools.pairwise([0, *new, cfg.steps]):
            if values[first]:
                picture.box(at(first) + 1, y - 8, at(end) - at(first) - 2, 16, color, values[first])
    return picture.svg(488)


def draw_model(cfg) -> str:
    """Return a picture of the model. Dots are inputs of layers (filled: with per-token weights)."""
    last = len(cfg.layers) - 1
    column = 606 / len(cfg.layers)
    picture = Picture()

    def edge(i):
        return 166 + column * i

    picture.box(edge(last) + 1, 14, column - 2, 372, PURPLE)
    values, x0, ngrams = (cfg.layers_with(what) for what in ("values", "x0", "ngram"))
    late = cfg.layers[-1].reads_back
    skips = [(i, i - cfg.layers[i].skip) for i in cfg.layers_with("skip")]
    for words, color, y, source, readers, where, to in (  # position in a column, last y
        (f"{len(values)} value tables", PINK, 138, -1, values, 0.28, 176),
        ("initial stream", INK, 50, -1, [last], 0.83, 176),
        *((f"from layer {start}", ORANGE, 72, start, [i], 0.5, 250) for i, start in skips),
        (f"from layer {last - late}", BLUE, 94, last - late, [last], 0.5, 176),
        (f"from layer {last - 1}", INK, 116, last - 1, [last], 0.67, 176),
        ("n-gram table", GREEN, 374, -1, [*ngrams, last], 0.16, 250),
        ("embedding, smeared: x0", ORANGE, 352, -1, x0, 0.03, 250),
        ("stream", INK, 250, -1, [], 0, 250),
    ):
        start = edge(source + 1) - 10 * (source < 0)
        end = edge(readers[-1] + where) if y > 250 else 784
        picture.text(start - 8, y, words, color, "end")
        picture.line(color, (start, 250), (start, y), (end, y))
        for i in readers:
            x = edge(i + where)
            picture.line(color, (x, y), (x, to))
            fill = PURPLE if i == last else "white"
            picture.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{fill}" stroke="{color}"/>')
    picture.line(GREEN, (edge(last + 0.5), 259), (784, 259))
    for i, layer in enumerate(cfg.layers):
        x = edge(i + 0.5)
        picture.text(x, 26, i, GREY)
        if layer.attends:
            picture.line(BLUE, (x, 250), (x, 232))
            flags = [what for what in ("paired", "narrow", "xsa", "gated") if getattr(layer, what)]
            picture.box(edge(i) + 5, 176, column - 10, 56, BLUE, layer.attends, *flags)
        for j in range(layer.mlps):
            picture.line(GREEN, (x, 250), (x, 268))
            picture.box(x - 15, 268 + 27 * j, 30, 22, GREEN, "MLP")
    picture.box(784, 36, 100, 238, PURPLE, "per-token", "mixture", "(MUDD)")
    picture.line(INK, (834, 274), (834, 306))
    picture.box(784, 306, 100, 60, GREY, "norm, head,", "capped logits,", "softmax")
    return picture.svg(400)


def draw_ideas(worth: dict[str, tuple]) -> str:
    """Return a picture of the worth of ideas: mean differences (bars), standard errors (lines)."""
    picture = Picture()
    titles = "tiny: loss increase without it", "plain: loss decrease with it"
    for column, (words, zero) in enumerate(zip(titles, (330, 680), strict=True)):
        bars = {idea: apart[column] for idea, apart in worth.items()}
        longest = max((sum(x) for x in bars.values() if np.isfinite(x[0])), default=1.0)
        unit = 170 / longest
        picture.text(zero, 20, words, GREY)
        for y, (idea, (mean, error)) in zip(itertools.count(42, 16), bars.items()):
            if not column:
                picture.text(120, y, idea, INK, "end")
            if np.isfinite(mean):
                color = GREEN if mean > 2 * error else ORANGE if mean < -2 * error else GREY
                ends = [zero + unit * x for x in (mean - error, mean + error)]
                start, width = min(zero, zero + unit * mean), abs(unit * mean)
                place = f'x="{start:.1f}" y="{y - 5}" width="{width:.1f}" height="10"'
                picture.append(f'<rect {place} fill="{color}" fill-opacity="0.4"/>')
                picture.line(color, *((x, y) for x in ends))
                picture.text(ends[1] + 6, y, f"{mean:+.3f}", color, "start")
        picture.line(GREY, (zero, 32), (zero, 34 + 16 * len(bars)), style=' stroke-width="1"')
    return picture.svg(50 + 16 * len(worth))


def read_losses(run: str) -> list[np.ndarray]:
    """Return training and validation losses of a run, as rows (steps, tokens, seconds, loss)."""
    path = Path(run)
    file = path / "metrics.jsonl" if path.is_dir() else path
    losses = {"train_loss": [], "val_loss": []}
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError, TypeError, LookupError):  # the last line may be cut
            row = json.loads(line)
            kind = "val_loss" if "val_loss" in row else "train_loss"
            values = row["step"], row["tokens"], row["train_time_ms"] / 1000, row[kind]
            if np.isfinite(values).all():
                losses[kind].append(values)
    if not any(losses.values()):
        print(f"skipped, because it has no losses: {run}", file=sys.stderr)
    return [np.array(values).reshape(-1, 4) for values in losses.values()]


def ticks(low, high, least=0.0):
    """Return up to nine round numbers from `low` to `high`, with steps of at least `least`."""
    steps = np.outer(10.0 ** np.arange(-4, 14), [1, 2, 5]).ravel()
    step = steps[steps >= max((high - low) / 8, least)][0]
    return step * np.arange(np.ceil(low / step), np.floor(high / step) + 1, dtype=int)


def draw_curves(runs: dict[str, list[np.ndarray]], over: str) -> str:
    """Return a picture of losses; from 200 steps on, training losses are means of neighbors."""
    column = AXES.index(over)
    rows = np.concatenate([points for losses in runs.values() for points in losses])
    end = rows[:, column].max() or 1
    margin = max(np.ptp(rows[:, 3]) / 20, 0.01)
    low, high = rows[:, 3].min() - margin, rows[:, 3].max() + margin
    picture = Picture()

    def at(x, loss):
        return 60 + 820 * x / end, 380 - 344 * (loss - low) / (high - low)

    picture.text(60, 22, "training loss (thin) and validation loss (dots)", GREY, "start")
    picture.text(880, 412, over, GREY, "end")
    for x in ticks(0, end, over != "seconds"):
        picture.line(PALE[GREY], at(x, low), at(x, high))
        picture.text(at(x, low)[0], 394, f"{x:,.12g}", GREY)
    for y in ticks(low, high):
        picture.line(PALE[GREY], at(0, y), at(end, y))
        picture.text(52, at(0, y)[1], f"{y:,.12g}", GREY, "end")
    for i, (name, (train, val)) in enumerate(runs.items()):
        color = f"hsl({360 * i // len(runs)} 75% 40%)"
        groups = len(train) // max(len(train) // 100, 1)
        means = [part.mean(0) for part in np.array_split(train, groups)] if groups else []
        thin, dots = ([at(x[column], x[3]) for x in points] for points in (means, val))
        y = 430 + 18 * i
        picture.line(color, *thin, style=' stroke-width="1" stroke-opacity="0.6"')
        picture.line(color, *dots)
        picture.line(color, (60, y), (100, y))
        for x, dot in [*dots, (80, y)]:
            picture.append(f'<circle cx="{x:.1f}" cy="{dot:.1f}" r="3" fill="{color}"/>')
        picture.text(108, y, escape(name), INK, "start")
    return picture.svg(430 + 18 * len(runs))


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and draw."""
    parser = leaderboard.Parser(prog="pictures.py", description=(__doc__ or "").split("\n")[0])
    options = "RUN... [--over steps|tokens|seconds] [--out FILE.svg]: draw losses of runs"
    curves = parser.add_subparsers(dest="do").add_parser("curves", help=options)
    curves.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder or metrics.jsonl")
    curves.add_argument("--over", choices=AXES, default="steps")
    curves.add_argument("--out", default="curves.svg", metavar="FILE.svg")
    args = parser.parse_args(argv)
    if args.do != "curves":
        import ideas

        import train_gpt as T

        for name, draw in (("run", draw_run), ("model", draw_model)):
            (HERE / f"pictures/{name}.svg").write_text(draw(T.PRESETS["speedrun"]))
        (HERE / "pictures/ideas.svg").write_text(draw_ideas(ideas.worth(ideas.rows())))
        return
    if not args.out.endswith(".svg"):
        parser.error("--out: the picture is in SVG format, so name a FILE.svg")
    found = {run: read_losses(run) for run in args.runs}
    found = {run: losses for run, losses in found.items() if any(map(len, losses))}
    if not found:  # a run may have ended before its first step
        parser.error(f"no losses in {' '.join(args.runs)}: name runs, such as logs/*")
    try:
        Path(args.out).write_text(draw_curves(found, args.over), "utf-8", "replace")
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    print(f"wrote {Path(args.out).absolute()}")


if __name__ == "__main__":
    sys.exit(main())
