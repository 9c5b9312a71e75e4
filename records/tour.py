"""Make a web page of train_gpt.py that shows next to each line what it assigns and what it costs.

    python records/tour.py [PRESET] [--set ...] [--program NAME] [--bench DIR] [--out FILE.html]

The page is one HTML file that needs no network, and takes about fifteen seconds. A step is traced,
not run, for eight devices (or --set devices=N), none of which has to exist. The step is the first
one that ends with every kind of update; --program NAME traces only one of its programs. Lines that
the step does not use are folded. A table at the top lists the ten most expensive lines.

--bench DIR adds the time of each line, from a trace by `bench.py --profile DIR`. --ideas also shows
what each idea in README.md's table costs; it traces the step again without it, three seconds each.
--chip "TPU v6 lite" uses the kernels for these TPUs instead of the plain functions.
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
PART_2 = LINES.index("# PART II: THE IDEAS OF THE RECORD")  # the line before it
STOPS = "forward layer_output attention mlp attend_heads attend_plain batch_loss cross_entropy adam"
STOPS += " anvil orthogonalize param_table grads_step gradients_of update_step train"
KERNELS = tuple(f"kernels.{name}" for name in T.Kernels._fields)
HEADS = re.compile("# (---- |PART)")


# ---- Ideas: what the step costs without each ----------------------------------------------------


class Idea(NamedTuple):
    """A row of README.md's table, and what leaving it out changes."""

    cells: list[str]  # idea, where, record, saved, off by
    more: list[float] | None  # FLOPs, bytes of the step that are there for it; None: not in the run
    lines: list[int]  # that are left out


def idea_rows() -> list[list[str]]:
    """The cells of README.md's table of ideas."""
    text = (ROOT / "README.md").read_text().split("| idea | where |")[1].split("\n\n")[0]
    return [re.split(r" *\| *", line)[1:-1] for line in text.splitlines()[2:]]


def ideas(asked: T.Config, step: Step, costs: dict, chip: str) -> Iterator[Idea]:
    """Yield the Idea of each row. Its lines are those from which nothing comes without it; all of a
    function if that holds for all of its lines, or if it is of Part II and the row names it."""
    own = [x / step.stage.batch_tokens for x in C.sums(costs)]  # of a token: batches may differ
    for cells in idea_rows():
        settings = cells[4].strip("`")
        without = T.override(asked, shlex.split(settings))
        of_speedrun = not settings.startswith("without=")  # numbers that go with its others
        is_there = dataclasses.replace(without, without=asked.without) != asked
        if not is_there or (of_speedrun and asked.preset not in T.LARGE):
            yield Idea(cells, None, [])
            continue
        other = Step.of(without, chip=chip)
        other_costs = other.costs()
        rest = [x / other.stage.batch_tokens for x in C.sums(other_costs)]
        lines = costs.keys() - other_costs.keys()
        named = {name for name in re.findall(r"`(\w+)`", cells[1]) if DEFINED.get(name, 0) > PART_2}
        gone = {OWNER.get(line) for line in lines} - {OWNER.get(line) for line in other_costs}
        lines |= {line for line, owner in OWNER.items() if owner in gone | named}
        more = [1 - x / whole for x, whole in zip(rest[:2], own[:2], strict=True)]
        yield Idea(cells, more, sorted(lines - {0}))


# ---- Text and tables ----------------------------------------------------------------------------


def as_html(text: str) -> str:
    """Text as HTML: <, > and & are escaped."""
    return html.escape(text, quote=False)


def escaped(text: str) -> str:
    """Text as HTML, what stands in backquotes as code."""
    return re.sub("`([^`\n]+)`", r"<code>\1</code>", as_html(text))


def prose(lines: list[str]) -> str:
    """A docstring or comment: paragraphs, but what is indented or in columns stays as it is."""
    found = []
    for block in "\n".join(lines).split("\n\n"):
        as_it_is = re.search(r"^ |\S  +\S", block, re.MULTILINE)
        found.append(f"<pre>{escaped(block)}</pre>" if as_it_is else f"<p>{escaped(block)}</p>")
    return "".join(found)


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are HTML."""
    lines = ["".join(f"<th>{x}" for x in heads)]
    lines += ["".join(f"<td>{x}" for x in row) for row in rows]
    return f"<table><tr>{'<tr>'.join(lines)}</table>"


def link(line: int, text) -> str:
    """A link to a line."""
    return f"<a href=#L{line}>{text}</a>"


# ---- The page -----------------------------------------------------------------------------------


class Page:
    """The page of a step."""

    def __init__(self, step: Step, costs: dict, watch: Watch):
        self.step, self.costs, self.watch = step, costs, watch
        self.shares = C.shares(costs)
        self.names = defaultdict(list)  # line -> (first column, last one, name with a definition)
        self.users = defaultdict(list)  # name -> lines that use it
        self.prose = {}  # first line of a docstring -> last line
        for node in ast.walk(TREE):
            if isinstance(node, ast.Name) and node.id in DEFINED:
                self.names[node.lineno].append((node.col_offset, node.end_col_offset, node.id))
                self.users[node.id].append(node.lineno)
            if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(KERNELS):
                kernel = getattr(step.kernels, node.attr)
                name = getattr(kernel, "func", kernel).__name__  # of a functools.partial
                if name in DEFINED:
                    first = node.end_col_offset - len(node.attr)
                    self.names[node.end_lineno].append((first, node.end_col_offset, name))
                    self.users[name].append(node.end_lineno)
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                if isinstance(body[0].value, ast.Constant):
                    self.prose[body[0].lineno] = body[0].end_lineno
        self.shown = self.lines_shown()

    def lines_shown(self) -> set[int]:
        """What is not folded: Part I, of the others the functions that have run, and the heads of
        their sections."""
        shown = {*range(1, PART_2)}
        shown |= {line for line, text in enumerate(LINES, 1) if text.startswith("# PART")}
        for node in NAMED:
            lines = {*range(node.lineno, node.end_lineno + 1)}
            if lines & (self.watch.ran | self.costs.keys()):
                first = min(x.lineno for x in (node, *node.decorator_list))
                shown |= {*range(first, node.end_lineno + 3)}  # with the empty lines after it
        head = []
        for line in range(PART_2, len(LINES) + 1):
            text = LINES[line - 1]
            if HEADS.match(text):
                head = [line]
            elif head and head[-1] == line - 1 and text[:1] in ("", "#"):
                head.append(line)
            elif line in shown:
                shown |= {*head}
                head = []
        return shown

    def code(self, line: int) -> str:
        """A line, with links from names to their definitions."""
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
        """What stands beside a line: bars, costs, what it assigns, who uses it."""
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
        users = [x for x in self.users[name] if x in self.shown]
        if users and DEFINED[name] == line:
            parts.append(" used in " + " ".join(link(x, x) for x in users[:6]))
        return "".join(parts)

    def whole(self, unit: str) -> float:
        """FLOPs or bytes of the step."""
        return C.sums(self.costs)[unit == "B"]

    def row(self, line: int) -> str:
        """A line, and what stands beside it."""
        code = self.code(line) if line else "no line of train_gpt.py"
        beside = self.beside(line)
        beside = f"<span>{beside}</span>" if beside else ""
        return f"<div id=L{line}>{link(line, line)}<code>{code}</code>{beside}</div>"

    def source(self) -> Iterator[str]:
        """Yield all of the file: rows, prose, heads, and folded what is not shown."""
        if any(self.shares.get(0, ())):
            yield self.row(0)
        line = 1
        while line <= len(LINES):
            text = LINES[line - 1]
            last = self.prose.get(line, line)
            if line not in self.shown:
                while last < len(LINES) and last + 1 not in self.shown:
                    last += 1
                yield self.folded(line, last)
            elif HEADS.match(text):
                level = 3 if text.startswith("# -") else 2
                yield f"<h{level} id=L{line}>{as_html(text.strip('#- '))}</h{level}>"
            elif line in self.prose:
                indent = len(text) - len(text.lstrip())
                words = ast.literal_eval("\n".join(LINES[line - 1 : last]).lstrip()).splitlines()
                words[1:] = [x[indent:] for x in words[1:]]
                margin = f"style=margin-left:{4 + indent / 2}em"
                yield f"<section id=L{line} {margin}>{prose(words)}</section>"
            elif text.startswith("# ") and not text.startswith("# =="):
                while LINES[last].startswith("#") and not re.match("# ?[-=]{2}", LINES[last]):
                    last += 1
                words = [x[2:] for x in LINES[line - 1 : last]]
                yield f"<section id=L{line}>{prose(words)}</section>"
            elif text and not text.startswith("# =="):
                yield self.row(line)
            line = last + 1

    def folded(self, first: int, last: int) -> str:
        """Lines that the step does not touch."""
        body = [as_html(text) for text in LINES[first - 1 : last]]
        names = [name for name, line in DEFINED.items() if first <= line <= last]
        for line in (DEFINED[name] for name in names):
            body[line - first] = f"<b id=L{line}>{body[line - first]}</b>"
        head = f"lines {first} to {last}, not touched: {', '.join(names) or 'constants'}"
        text = "\n".join(body)
        return f"<details><summary>{head}</summary><pre>{text}</pre></details>"

    def index(self) -> str:
        """The loop and what it leads to; then parts and sections."""
        stops = " → ".join(link(DEFINED[name], name) for name in STOPS.split())
        items = []
        for line in sorted(self.shown):
            if HEADS.match(LINES[line - 1]):
                kind = "<li>" if LINES[line - 1].startswith("# -") else "<li class=part>"
                items.append(kind + link(line, as_html(LINES[line - 1].strip("#- "))))
        return f"<p>From the loop down: {stops}</p><ul>{''.join(items)}</ul>"

    def top_lines(self) -> str:
        """A table of the ten most expensive lines."""
        rows = []
        for line, shares in [x for x in self.shares.items() if any(x[1])][:10]:
            code = LINES[line - 1].strip() if line else "no line of train_gpt.py"
            code = link(line, f"<code>{as_html(code)}</code>")
            percent = [f"{share:.1%}" if share else "" for share in shares]
            rows.append([OWNER.get(line, ""), link(line, line), code, *percent])
        return table(["function", "line", "code", "FLOPs", "bytes", "time"], rows)

    def sum_table(self) -> str:
        """What the lines add up to, beside what flops_per_token says."""
        step = self.step
        counted, left_out = C.by_formula(self.costs)
        said = T.flops_per_token(step.cfg, step.number) * step.stage.batch_tokens
        rows = []
        if counted["gradient"]:
            rows.append(["<code>flops_per_token</code> times tokens", amount(said, "FLOP")])
        for kind, flops in counted.items():
            share = f" ({flops / said:.2%} of it)" if counted["gradient"] else ""
            what = f"lines of {', '.join(C.FORMULA)}: {kind}"
            rows.append([what, amount(flops, "FLOP") + share])
        for name, flops in left_out.most_common():
            rows.append([f"which it leaves out: {as_html(name)}", amount(flops, "FLOP")])
        return table(["what", "FLOPs"], rows)

    def idea_table(self, found: list[Idea]) -> str:
        """The ideas, each with a button."""
        rows = []
        for number, idea in enumerate(found):
            name, where, record, saved, off = map(escaped, idea.cells)
            if idea.more:
                more = [f"{x:+.2%}" for x in idea.more]
                more.append(f"<button data-idea={number}>{len(idea.lines)} lines</button>")
                rows.append([name, where, record, saved, *more, off])
        heads = "idea, where, record, saved, FLOPs, bytes, lines of its own, off by".split(", ")
        if not found:
            return "<p>With <code>--ideas</code>.</p>"
        others = [escaped(idea.cells[0]) for idea in found if not idea.more]
        return f"{table(heads, rows)}<p>Not in this run: {'; '.join(others) or 'none'}.</p>"

    def html(self, found: list[Idea], devices: str) -> str:
        """The whole page; times are of these `devices`."""
        step = self.step
        facts = {
            "preset": as_html(step.cfg.preset),
            "devices": step.mesh.size,
            "number": step.number + 1,
            "programs": ", ".join(step.programs),
            "tokens": f"{step.stage.batch_tokens:,}",
            "flops": amount(self.whole("FLOP"), "FLOP"),
            "bytes": amount(self.whole("B"), "B"),
            "time": f"{C.sums(self.costs)[2]:.3g} ms on {as_html(devices)}"
            if devices
            else "not measured",
            "index": self.index(),
            "top": self.top_lines(),
            "sums": self.sum_table(),
            "ideas": self.idea_table(found),
            "source": "\n".join(self.source()),
            "lines": json.dumps([idea.lines for idea in found], separators=(",", ":")),
        }
        form = Path(__file__).with_suffix(".html").read_text()
        return re.sub(r"\{\{(\w+)\}\}", lambda found: str(facts[found[1]]), form)


def write_page(asked: T.Config, args):
    """Write the page of a config to the file --out."""
    with Watch(asked) as watch:
        step = Step.of(asked, args.program, args.chip)
        t = step.stage.row_tokens
        rows = T.rows_together(step.cfg, step.stage.rows // step.mesh.size, t)
        watch.sizes |= {"b": rows, "t": t}
        costs = step.costs()
    found = []
    for idea in ideas(asked, step, costs, args.chip) if args.ideas else ():
        T.tell(f"without {idea.cells[0]}\r")
        found.append(idea)
    devices = ""
    if args.bench:
        devices = C.add_times(costs, Path(args.bench, "lines.json"), next(iter(step.programs)))
    Path(args.out).write_text(Page(step, costs, watch).html(found, devices))
    T.tell(f"wrote {args.out}")


def main(argv=None) -> int:
    def run():
        parser = T.Parser(prog="tour.py", description=(__doc__ or "").split("\n")[0])
        T.add_config_options(parser)
        add = parser.add_argument
        add("--program", default="", metavar="NAME", help="this alone, such as grads0, anvil, eval")
        add("--bench", metavar="DIR", help="with times of what bench.py --profile has traced")
        add("--ideas", action="store_true", help="also what each idea costs")
        add("--chip", default="", metavar="KIND", help="with kernels for TPUs of this kind")
        add("--out", default="tour.html", metavar="FILE.html", help="where the page goes")
        args = parser.parse_args(argv)
        T.need(not (args.ideas and args.program), "--ideas is of a whole step: leave out --program")
        jax.config.update("jax_platforms", "cpu")  # whatever is here: nothing is computed
        if jax.config.jax_num_cpu_devices < 0:
            jax.config.update("jax_num_cpu_devices", 8)
        write_page(T.resolve(args), args)

    return T.report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
