"""Write a web page that shows the assigned arrays and the costs next to each line of train_gpt.py.

    python records/tour.py [PRESET] [--set ...] [--program NAME] [--bench DIR] [--out FILE.html]

The page is one HTML file that needs no network. It takes about fifteen seconds. A step is traced
for eight devices (or --set devices=N), which need not exist; it does not run. It is the first step
that ends with every kind of update; --program NAME traces only one of its programs. Functions that
the step does not use are folded. A table at the top lists the ten most expensive lines.

--bench DIR adds the time of each line, from a trace by `bench.py --profile DIR`. --ideas also shows
the costs of each idea in README.md's table, by tracing the step without it, in three seconds each.
"""

import ast
import dataclasses
import html
import json
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import costs as C
import jax
from costs import NAMED, OWNER, TREE, Step, Watch, amount

import train_gpt as T

ROOT = Path(__file__).resolve().parents[1]
LINES = T.SOURCE.splitlines()
DEFINED = {node.name: node.lineno for node in NAMED}
PART_2 = LINES.index("# PART II: THE IDEAS OF THE RECORD")  # number of lines before it
STOPS = "forward layer_output attention mlp attend_heads attend_plain batch_loss cross_entropy adam"
STOPS += " anvil orthogonalize param_table grads_step gradients_of update_step train"
KERNELS = tuple(f"kernels.{name}" for name in T.Kernels._fields)


# ---- Ideas: the costs of a step without each idea -----------------------------------------------


class Idea(NamedTuple):
    """A row of README.md's table of ideas, and its part of the step."""

    cells: list[str]  # idea, where, record, saved, off by
    more: list[float] | None  # shares of FLOPs and bytes; None if the step does not have the idea
    lines: list[int]  # lines that are unused without the idea


def idea_rows() -> list[list[str]]:
    """Return the cells of README.md's table of ideas."""
    text = (ROOT / "README.md").read_text().split("| idea | where |")[1].split("\n\n")[0]
    return [re.split(r" *\| *", line)[1:-1] for line in text.splitlines()[2:]]


def ideas(asked: T.Config, step: Step, costs: dict) -> Iterator[Idea]:
    """Yield the Idea of each row.

    Its lines are the lines without operations if the idea is off. They include whole functions that
    are unused then, and functions of Part II in its row.
    """
    own = [x / step.stage.batch_tokens for x in C.sums(costs)]  # per token: batches may differ
    for cells in idea_rows():
        settings = cells[4].strip("`")
        without = T.override(asked, shlex.split(settings))
        of_speedrun = not settings.startswith("without=")  # values for the large presets
        has_idea = dataclasses.replace(without, without=asked.without) != asked
        if not has_idea or (of_speedrun and asked.preset not in T.LARGE):
            yield Idea(cells, None, [])
            continue
        other = Step.of(without)
        other_costs = other.costs()
        rest = [x / other.stage.batch_tokens for x in C.sums(other_costs)]
        lines = costs.keys() - other_costs.keys()
        named = {name for name in re.findall(r"`(\w+)`", cells[1]) if DEFINED.get(name, 0) > PART_2}
        gone = {OWNER.get(line) for line in lines} - {OWNER.get(line) for line in other_costs}
        lines |= {line for line, owner in OWNER.items() if owner in gone | named}
        more = [1 - x / whole for x, whole in zip(rest[:2], own[:2], strict=True)]
        yield Idea(cells, more, sorted(lines - {0}))


# ---- HTML ---------------------------------------------------------------------------------------


def as_html(text: str) -> str:
    """Escape <, > and & in a text."""
    return html.escape(text, quote=False)


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table of cells that are HTML."""
    lines = ["".join(f"<th>{x}" for x in heads)]
    lines += ["".join(f"<td>{x}" for x in row) for row in rows]
    return f"<table><tr>{'<tr>'.join(lines)}</table>"


def link(line: int, text) -> str:
    """Return a link to a line."""
    return f"<a href=#L{line}>{text}</a>"


class Page:
    """The page of a step."""

    def __init__(self, step: Step, costs: dict, watch: Watch):
        self.step, self.costs, self.watch = step, costs, watch
        self.shares = C.shares(costs)
        self.names = defaultdict(list)  # line -> (first column, last column, defined name)
        self.users = defaultdict(list)  # name -> lines that use it
        self.folded = {}  # first line of an unused function -> the function
        for node in ast.walk(TREE):
            if isinstance(node, ast.Name) and node.id in DEFINED:
                self.add_name(node.id, node.lineno, node.col_offset, node.end_col_offset)
            if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(KERNELS):
                kernel = getattr(step.kernels, node.attr)
                name = getattr(kernel, "func", kernel).__name__  # of a functools.partial
                end = node.end_col_offset
                if name in DEFINED:
                    self.add_name(name, node.end_lineno, end - len(node.attr), end)
        for node in NAMED:
            used = self.watch.ran | self.costs.keys()
            if node.lineno > PART_2 and not used & {*range(node.lineno, node.end_lineno + 1)}:
                self.folded[min(x.lineno for x in (node, *node.decorator_list))] = node

    def add_name(self, name: str, line: int, first: int, last: int):
        """Add a use of a defined name."""
        self.names[line].append((first, last, name))
        self.users[name].append(line)

    def code(self, line: int) -> str:
        """Return a line with links from names to their definitions."""
        text = LINES[line - 1].encode()
        parts = []
        start = 0
        for first, last, name in sorted(self.names[line]):
            parts.append(as_html(text[start:first].decode()))
            parts.append(link(DEFINED[name], text[first:last].decode()))
            start = last
        rest = as_html(text[start:].decode())
        return "".join(parts) + re.sub("(^|(?<=  ))#.*", r"<i>\g<0></i>", rest)

    def beside(self, line: int) -> str:
        """Return the bars, costs, assigned arrays and users of a line."""
        parts = []
        cost = self.costs.get(line)
        each = self.shares.get(line, (0, 0, 0))
        if any(each):
            bars = zip("fbt", each, strict=True)
            parts += [f"<u class={x} style=width:{100 * y:.4f}%></u>" for x, y in bars if y]
            words = [f"{cost.runs}×"] if cost.runs else []
            for unit, kinds in (("FLOP", cost.flops), ("B", cost.bytes)):
                if kinds.total():
                    of_kinds = (f"{x} {amount(kinds[x], unit)}" for x in C.KINDS if kinds[x])
                    words.append(f"{', '.join(of_kinds)} ({kinds.total() / self.whole(unit):.1%})")
            words += [f"{cost.ms:.3g} ms"] if cost.ms else []
            parts.append(f"<b>{' · '.join(words)}</b> ")
        seen = [*self.watch.seen.get(line, ())]
        more = [f"and {len(seen) - 4} more"] if len(seen) > 4 else []
        parts.append(as_html(" | ".join(seen[:4] + more)))
        name = OWNER.get(line)
        folded = {node.name for node in self.folded.values()}
        users = [x for x in self.users[name] if OWNER.get(x) not in folded]
        if users and DEFINED[name] == line:
            parts.append(" used in " + " ".join(link(x, x) for x in users[:6]))
        return "".join(parts)

    def whole(self, unit: str) -> float:
        """Return the FLOPs or bytes of the step."""
        return C.sums(self.costs)[unit == "B"]

    def row(self, line: int) -> str:
        """Return a line with its costs."""
        code = self.code(line) if line else "no line of train_gpt.py"
        beside = self.beside(line)
        beside = f"<span>{beside}</span>" if beside else ""
        return f"<div id=L{line}>{link(line, line)}<code>{code}</code>{beside}</div>"

    def source(self) -> Iterator[str]:
        """Yield the lines of the file, with unused functions folded."""
        if any(self.shares.get(0, ())):
            yield self.row(0)
        line = 1
        while line <= len(LINES):
            if node := self.folded.get(line):
                text = as_html("\n".join(LINES[line - 1 : node.end_lineno]))
                head = f"lines {line} to {node.end_lineno}, not used: {node.name}"
                summary = f"<summary>{head}</summary>"
                yield f"<details id=L{node.lineno}>{summary}<pre>{text}</pre></details>"
                line = node.end_lineno
            elif LINES[line - 1].strip("#= "):  # neither empty nor a rule
                yield self.row(line)
            line += 1

    def index(self) -> str:
        """Return links to the main functions, to parts and to sections."""
        stops = " → ".join(link(DEFINED[name], name) for name in STOPS.split())
        items = []
        for line, text in enumerate(LINES, 1):
            if re.match("# (---- |PART)", text):
                kind = "<li class=part>" if text.startswith("# PART") else "<li>"
                items.append(kind + link(line, as_html(text.strip("#- "))))
        return f"<p>From the loop down: {stops}</p><ul>{''.join(items)}</ul>"

    def top_lines(self) -> str:
        """Return a table of the ten most expensive lines."""
        rows = []
        for line, shares in [x for x in self.shares.items() if any(x[1])][:10]:
            code = LINES[line - 1].strip() if line else "no line of train_gpt.py"
            code = link(line, f"<code>{as_html(code)}</code>")
            percent = [f"{share:.1%}" if share else "" for share in shares]
            rows.append([OWNER.get(line, ""), link(line, line), code, *percent])
        return table(["function", "line", "code", "FLOPs", "bytes", "time"], rows)

    def idea_table(self, found: list[Idea]) -> str:
        """Return a table of the ideas, each with a button."""
        rows, others = [], []
        for number, idea in enumerate(found):
            cells = [re.sub("`([^`]+)`", r"<code>\1</code>", as_html(x)) for x in idea.cells]
            name, where, record, saved, off = cells
            if idea.more:
                more = [f"{x:+.2%}" for x in idea.more]
                more.append(f"<button data-idea={number}>{len(idea.lines)} lines</button>")
                rows.append([name, where, record, saved, *more, off])
            else:
                others.append(name)
        if not found:
            return "<p>Add <code>--ideas</code>.</p>"
        heads = "idea, where, record, saved, FLOPs, bytes, own lines, off by".split(", ")
        return f"{table(heads, rows)}<p>Not in this run: {'; '.join(others) or 'none'}.</p>"

    def html(self, found: list[Idea], devices: str) -> str:
        """Return the page; `devices` are the devices of the measured times."""
        step = self.step
        ms = f"{C.sums(self.costs)[2]:.3g} ms on {as_html(devices)}"
        facts = {
            "preset": as_html(step.cfg.preset),
            "devices": step.mesh.size,
            "number": step.number + 1,
            "programs": ", ".join(step.programs),
            "tokens": f"{step.stage.batch_tokens:,}",
            "flops": amount(self.whole("FLOP"), "FLOP"),
            "bytes": amount(self.whole("B"), "B"),
            "time": ms if devices else "not measured",
            "index": self.index(),
            "top": self.top_lines(),
            "ideas": self.idea_table(found),
            "source": "\n".join(self.source()),
            "lines": json.dumps([idea.lines for idea in found], separators=(",", ":")),
        }
        form = Path(__file__).with_suffix(".html").read_text()
        return re.sub(r"\{\{(\w+)\}\}", lambda found: str(facts[found[1]]), form)


def write_page(asked: T.Config, args):
    """Write the page of a config to the file --out."""
    with Watch() as watch:
        step = Step.of(asked, args.program)
        costs = step.costs()
    found = []
    for idea in ideas(asked, step, costs) if args.ideas else ():
        T.tell(f"without {idea.cells[0]}\r")
        found.append(idea)
    devices = ""
    if args.bench:
        devices = C.add_times(costs, Path(args.bench, "lines.json"), next(iter(step.programs)))
    Path(args.out).write_text(Page(step, costs, watch).html(found, devices))
    T.tell(f"wrote {args.out}")


def main(argv=None) -> int:
    """Parse the command line and write the page."""

    def run():
        parser = T.Parser(prog="tour.py", description=(__doc__ or "").split("\n")[0])
        T.add_config_options(parser)
        add = parser.add_argument
        add("--program", default="", metavar="NAME", help="one program, such as grads0 or adam")
        add("--bench", metavar="DIR", help="add times from a trace by bench.py --profile")
        add("--ideas", action="store_true", help="add the costs of each idea")
        add("--out", default="tour.html", metavar="FILE.html", help="the file of the page")
        args = parser.parse_args(argv)
        T.need(not (args.ideas and args.program), "--ideas needs a whole step: omit --program")
        jax.config.update("jax_platforms", "cpu")  # nothing is computed
        if jax.config.jax_num_cpu_devices < 0:
            jax.config.update("jax_num_cpu_devices", 8)
        write_page(T.resolve(args), args)

    return T.report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
