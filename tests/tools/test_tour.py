"""records/tour.py: sums of costs, shapes of assigned arrays, links and bars of the page."""

import functools
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import costs as C
import pytest
import tour
from conftest import mostly_slow

import train_gpt as T

PRESETS = {"plain", "tiny", "speedrun"}
PLAIN_NAMES = {"cross_entropy": "cross_entropy", "attend": "attend_heads"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@functools.cache
def step_of(preset: str, *settings: str) -> tuple[C.Step, dict]:
    """Return a step of a preset, and the costs of its lines."""
    step = C.Step.of(T.override(T.PRESETS[preset], [*settings]))
    return step, step.costs()


def lines_with(code: str) -> list[int]:
    """Return the lines of train_gpt.py that contain this code."""
    return [i for i, line in enumerate(tour.LINES, 1) if code in line]


# flops_per_token counts the matrix products of these functions.
FORMULA = "attention", "mlp", "chunk_losses", "token_losses", "logit_gradients", "pointer_inputs"


def by_formula(costs: dict[int, C.Cost]) -> tuple[Counter, Counter]:
    """Return the FLOPs in FORMULA by kind, and the other FLOPs by function."""
    counted, left_out = Counter(), Counter()
    for line, cost in costs.items():
        owner = C.OWNER.get(line, "no line")
        for kind, flops in cost.flops.items():
            if owner in FORMULA and kind != "recomputed":
                counted[kind] += flops
            elif flops:
                left_out[f"{owner}, {kind}" if kind == "recomputed" else owner] += flops
    return counted, left_out


@pytest.mark.parametrize("preset", mostly_slow(["plain", "tiny", "speedrun", "pointer"], PRESETS))
def test_lines_add_up_to_flops_per_token(preset):
    step, costs = step_of(preset)
    counted, left_out = by_formula(costs)
    said = T.flops_per_token(step.cfg, step.number) * step.stage.batch_tokens
    within = 1e-5 if preset == "pointer" else 1e-12  # the sink has its own product
    assert counted["forward"] == pytest.approx(said / 3, rel=within)
    assert counted["gradient"] == pytest.approx(said * 2 / 3, rel=within)
    small = {"small_mlp", "gate"} if preset != "plain" else {"chunk_losses, recomputed"}
    large = {"attend_band, recomputed"} if preset in T.LARGE else set()
    large |= {"pointer_scores", "pointer_scores, recomputed"} if preset == "pointer" else set()
    assert {*left_out} == {"attend_band", "orthogonalize"} | small | large
    flops, _, _ = C.sums(costs)
    assert flops == counted.total() + left_out.total()


def test_how_often_a_line_runs():
    """Layers times micro-batches times devices."""
    step, costs = step_of("plain", "devices=2", "micro_tokens=128")
    (line,) = lines_with("return hidden_btf @ down_fd")
    assert costs[line].runs == 4 * 4 * 2
    cfg, tokens = step.cfg, step.stage.batch_tokens
    one_way = 2.0 * 4 * tokens * cfg.width * cfg.mlp_width
    assert costs[line].flops == {"forward": one_way, "gradient": 2 * one_way}


def test_shapes_of_assigned_arrays():
    with C.Watch() as watch:
        C.Step.of(T.override(T.PRESETS["plain"], ["devices=4"])).costs()
    (line,) = lines_with("q, k = rope(q, cos, sin)")
    assert [*watch.seen[line]] == [f"{x} f32 2×128×2×64, 131 kB" for x in "qk"]
    (line,) = lines_with("hidden_btf = activation(")
    assert [*watch.seen[line]] == ["hidden_btf f32 2×128×256, 262 kB"]
    (line,) = lines_with("return model.kernels.attend(heads, qkv, inputs) @ w_o.T")
    assert [*watch.seen[line]] == ["returns f32 2×128×128, 131 kB"]


def test_a_page_by_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tour.main(["plain", "--program", "adam", "--out", "adam.html"]) == 0
    assert capsys.readouterr().out == "wrote adam.html\n"
    page = Path("adam.html").read_text()
    assert len(page) < 10**6 and "(programs adam;" in page
    for kernel in PLAIN_NAMES:  # its link leads to the plain function that the step uses
        assert f"kernels.<a href=#L{tour.DEFINED[PLAIN_NAMES[kernel]]}>{kernel}</a>" in page
    holds_together(page)


@functools.cache
def page_of(preset: str) -> str:
    """Return the page of a preset."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        assert tour.main([preset, "--out", str(path)]) == 0
        return path.read_text()


@pytest.mark.parametrize("preset", mostly_slow(["tiny", "speedrun"], {"tiny"}))
def test_the_page_of_a_whole_step(preset):
    page = page_of(preset)
    assert len(page.encode()) < 10**6
    holds_together(page)
    assert {"f", "b"} <= {*re.findall(r"<u class=(\w) ", page)}


def test_the_ten_most_expensive_lines_are_at_the_top():
    """Sorted by the sums of their shares, with their code."""
    step, costs = step_of("tiny")
    flops, size, _ = C.sums(costs)
    sums = {line: x.flops.total() / flops + x.bytes.total() / size for line, x in costs.items()}
    top, _ = page_of("tiny").split("<h2>Index</h2>")
    found = [int(line) for line in re.findall(r"<a href=#L(\d+)>\d+</a>", top)]
    assert found == sorted(sums, key=sums.get, reverse=True)[:10]
    text = Elements(top).text
    assert all(tour.LINES[line - 1].strip() in text for line in found)
    first = costs[found[0]]
    assert f"{first.flops.total() / flops:.1%}{first.bytes.total() / size:.1%}" in text


class Elements(HTMLParser):
    """The names of the elements of a page, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.names, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)

    def handle_data(self, data):
        self.text += data


def test_text_makes_no_elements_of_the_page(monkeypatch):
    """Such as the dtype of a random key, and the names of sections and devices."""
    step, costs = step_of("plain")
    (line,) = lines_with("hidden_btf = activation(")
    (head,) = lines_with("# ---- Loader: ")
    lines = [*tour.LINES[: head - 1], "# ---- Loader: <x0> ----", *tour.LINES[head:]]
    monkeypatch.setattr(tour, "LINES", lines)
    watch = SimpleNamespace(seen={line: ["key key<x1>"]}, ran={head + 3})
    page = Elements(tour.Page(step, costs, watch).html("2 x <x2>"))
    assert all(f"<x{i}>" in page.text for i in range(3))
    assert not {name for name in page.names if re.match(r"x\d", name)}


@pytest.mark.parametrize(
    "options,says",
    [
        (["--program", "nosuch"], "--program nosuch: use one of grads0, anvil, adam"),
        (
            ["--program", "adam", "--bench", "nosuch"],
            "no nosuch/lines.json: python",
        ),
        (["--program", "adam", "--out", "nosuch/adam.html"], "nosuch/adam.html"),
    ],
)
def test_refusals(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tour.main(["plain", *options]) == 2
    assert says in capsys.readouterr().err


def holds_together(page: str):
    """Check that every link has a target, and that the bars of each kind add up to 100%."""
    places = re.findall(r" id=(L\d+)", page)
    assert len(places) == len({*places}) > 500
    assert {*re.findall(r"href=#(\w+)", page)} <= {*places}
    assert "http" not in re.sub("<main>.*</main>", "", page, flags=re.DOTALL), "it needs no network"
    bars = Counter()
    for kind, share in re.findall(r"<u class=(\w) style=width:([\d.]+)%>", page):
        bars[kind] += float(share)
    assert {*bars} >= {"b"}
    assert all(math.isclose(x, 100, abs_tol=0.05) for x in bars.values()), bars


CHECK = """<script>
const found = {links: 0, lost: 0, bars: {f: 0, b: 0, t: 0}}
for (const link of document.querySelectorAll("a[href^='#']")) {
  found.links += 1
  if (!document.getElementById(link.hash.slice(1))) found.lost += 1
}
for (const bar of document.querySelectorAll("u[style]"))
  found.bars[bar.className] += parseFloat(bar.style.width)
found.wide = document.documentElement.scrollWidth - innerWidth
const folded = document.querySelector("details")
location.hash = folded.id
unfold()
found.open = folded.closest("details").open
found.errors = errors
document.title = JSON.stringify(found)
</script>"""


@pytest.mark.skipif(not BROWSER, reason="needs a browser: chromium")
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser(tmp_path, width):
    head, rest = page_of("tiny").split("<style>")
    note = "<script>const errors = []; onerror = text => errors.push(text)</script>"
    page = tmp_path / "page.html"
    page.write_text(f"{head}{note}<style>{rest}{CHECK}")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [f"--user-data-dir={tmp_path}/profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(re.search("<title>(.*?)</title>", done.stdout)[1].replace("&amp;", "&"))
    assert found["errors"] == [] and found["lost"] == 0 < found["links"]
    assert all(abs(x - 100) < 0.05 for x in found["bars"].values() if x), found
    assert found["bars"]["f"] and found["bars"]["b"]
    assert found["open"] and found["wide"] <= 0
