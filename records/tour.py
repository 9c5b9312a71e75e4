"""Write a web page that shows the assigned arrays and the costs next to each line of train_gpt.py.

    python records/tour.py [PRESET] [--set ...] [--program NAME] [--bench DIR] [--out FILE.html]

The page is one HTML file that needs no network. It takes about fifteen seconds. A step is traced
for eight devices (or --set devices=N), which need not exist; it does not run. It is the first step
that ends with every kind of update; --program NAME traces only one of its programs. Functions that
the step does not use are folded. A table at the top lists the ten most expensive lines.

--bench DIR adds the time of each line, from a trace by `bench.py --profile DIR`.
"""

import ast
import html
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import costs as C
import jax
from costs import NAMED, OWNER, TREE, Step, Watch, amount

import train_gpt as T

LINES = T.SOURCE.splitlines()
DEFINED = {node.name: node.lineno for node in NAMED}
PART_2 = LINES.index("# PART II: THE IDEAS OF THE RECORD")  # number of lines before it
KERNELS = tuple(f"kernels.{name}" for name in T.Kernels._fields)


def as_html(text: str) -> str:
    """Escape <, > and & in a text."""
    return html.escape(text, quote=False)


def link(line: int, text) -> str:
    """Return a link to a line."""
    return f"<a href=#L{line}>{text}</a>"


class Page:
    """The page of a step."""

    def __init__(self, step: Step, costs: dict, watch: Watch):
        self.step, self.costs, self.watch = step, costs, watch
        self.shares = C.shares(costs)
        self.flops, self.bytes, self.ms = C.sums(costs)
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
        used = watch.ran | costs.keys()
        for node in NAMED:
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
            units, both = ("FLOP", "B"), (cost.flops, cost.bytes)
            for unit, kinds, share in zip(units, both, each[:2], strict=True):
                if share:
                    of_kinds = (f"{x} {amount(kinds[x], unit)}" for x in C.KINDS if kinds[x])
                    words.append(f"{', '.join(of_kinds)} ({share:.1%})")
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
        """Return links to parts and sections."""
        items = []
        for line, text in enumerate(LINES, 1):
            if re.match("# (---- |PART)", text):
                kind = "<li class=part>" if text.startswith("# PART") else "<li>"
                items.append(kind + link(line, as_html(text.strip("#- "))))
        return "".join(items)

    def top_lines(self) -> str:
        """Return the rows of a table of the ten most expensive lines."""
        rows = []
        for line, shares in [x for x in self.shares.items() if any(x[1])][:10]:
            code = LINES[line - 1].strip() if line else "no line of train_gpt.py"
            code = link(line, f"<code>{as_html(code)}</code>")
            percent = [f"{share:.1%}" if share else "" for share in shares]
            cells = OWNER.get(line, ""), link(line, line), code, *percent
            rows.append("".join(f"<td>{x}" for x in cells))
        return "<tr>".join(rows)

    def html(self, devices: str) -> str:
        """Return the page; `devices` are the devices of the measured times."""
        step = self.step
        ms = f"{self.ms:.3g} ms on {as_html(devices)}"
        facts = {
            "preset": as_html(step.cfg.preset),
            "devices": step.mesh.size,
            "number": step.number + 1,
            "programs": ", ".join(step.programs),
            "tokens": f"{step.stage.batch_tokens:,}",
            "flops": amount(self.flops, "FLOP"),
            "bytes": amount(self.bytes, "B"),
            "time": ms if devices else "not measured",
            "index": self.index(),
            "top": self.top_lines(),
            "source": "\n".join(self.source()),
        }
        form = Path(__file__).with_suffix(".html").read_text()
        return re.sub(r"\{\{(\w+)\}\}", lambda found: str(facts[found[1]]), form)


def write_page(asked: T.Config, args):
    """Write the page of a config to the file --out."""
    with Watch() as watch:
        step = Step.of(asked, args.program)
        costs = step.costs()
    devices = ""
    if args.bench:
        devices = C.add_times(costs, Path(args.bench, "lines.json"), next(iter(step.programs)))
    Path(args.out).write_text(Page(step, costs, watch).html(devices))
    T.tell(f"wrote {args.out}")


def main(argv=None) -> int:
    """Parse the command line and write the page."""

    def run():
        parser = T.Parser(prog="tour.py", description=(__doc__ or "").split("\n")[0])
        T.add_config_options(parser)
        add = parser.add_argument
        add("--program", default="", metavar="NAME", help="one program, such as grads0 or adam")
        add("--bench", metavar="DIR", help="add times from a trace by bench.py --profile")
        add("--out", default="tour.html", metavar="FILE.html", help="the file of the page")
        args = parser.parse_args(argv)
        jax.config.update("jax_platforms", "cpu")  # nothing is computed
        if jax.config.jax_num_cpu_devices < 0:
            jax.config.update("jax_num_cpu_devices", 8)
        write_page(T.resolve(args), args)

    return T.report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
