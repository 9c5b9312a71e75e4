"""The table and the plot of what more devices bring."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT
from programs import CFG, mesh_of

import train_gpt as T

sys.path.insert(0, str(ROOT / "records"))
import preflight
import scaling


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(T, "PRESETS", T.PRESETS | {"small": CFG, "speedrun": CFG})


def report(devices: int, times: int, ms: float | None, links=1.0) -> dict:
    """As preflight.py writes it, of programs that take so long each."""
    cfg, rows = scaling.larger(CFG, times), []
    for name, count in preflight.executions(T.for_devices(cfg, devices)).items():
        row = {"name": name, "steps": count, "resident_bytes": 2**30, "cpu_seconds": 6.0}
        row |= {"predicted_ms": ms, "link_floor_ms": links, "moved_floor_ms": 0.0}
        row |= dict.fromkeys(("memory_ms", "slack_ms", "link_ms", "visit_ms", "components"))
        row |= {"bytes": {"peak": 2**31}, "tokens_per_step": 256, "row_tokens": 64 // times}
        rows.append(row | {"model_flops": 1.0})
    facts = {"preset": "speedrun", "target": f"v6e-{devices}", "devices": devices}
    facts |= {"total_tokens": cfg.total_tokens, "made_of": "x", "versions": {"jax": "1"}}
    return facts | {"variants": [row for row in rows if row["name"] != "eval"]}


def keep(dump, found: dict, times: int):
    folder = dump / f"{found['target']}-x{times}"
    folder.mkdir()
    (folder / "preflight.json").write_text(json.dumps(found))


def test_a_larger_batch_has_more_rows():
    cfg = scaling.larger(CFG, 4)
    assert [s.rows for s in cfg.stages] == [32] * 3 and cfg.total_tokens == 4 * CFG.total_tokens
    assert [s.row_tokens for s in cfg.stages] == [s.row_tokens for s in CFG.stages]


def test_the_table_says_what_the_predictions_add_up_to(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for devices, ms in ((8, 7.0), (16, 3.0), (64, 1.0)):
        keep(tmp_path, report(devices, 1, ms), 1)
    keep(tmp_path, report(8, 4, 31.0), 4)
    (tmp_path / "out").mkdir()
    argv = ["--dump", str(tmp_path), "--draw", "--out", str(tmp_path / "out")]
    assert scaling.main(argv) == 0
    rows = {(x["devices"], x["batch"]): x for x in json.loads(
        (tmp_path / "out/scaling.json").read_text()
    )}  # fmt: skip
    counts = preflight.executions(CFG)
    runs = sum(count for name, count in counts.items() if name != "eval")
    assert rows[8, 1]["in_all"] == pytest.approx(runs * 8e-3)
    assert rows[16, 1]["in_all"] == pytest.approx(runs * 4e-3)
    used = [scaling.efficiency(row, [*rows.values()]) for row in rows.values()]
    assert used == pytest.approx([1.0, 1.0, 0.5, 1.0])
    text = (tmp_path / "out/scaling.md").read_text()
    assert capsys.readouterr().out.strip() in text
    line = f"| v6e-64 | x 1 | {CFG.total_tokens / 1e6:,.0f} M | 64 | **{runs * 2e-3:.1f} s** | "
    assert line in text and "| 50% | 50% | 3.0 |" in text
    assert (tmp_path / "out/scaling.png").stat().st_size > 10_000


def test_a_run_whose_time_is_not_known_stands_without_it(tmp_path):
    row = scaling.row_of(report(16, 1, None), 1)
    assert row["in_all"] is None and scaling.efficiency(row, [row]) is None
    assert "**unknown** | unknown |" in scaling.table([row]) and row["gib"] == 3.0


def test_a_run_that_lacks_programs_is_not_in_the_table(tmp_path):
    found, lines = report(8, 1, 1.0), []
    found["variants"].pop()
    keep(tmp_path, found, 1)
    with pytest.raises(T.UserError, match="no run whose programs are all compiled"):
        scaling.write(tmp_path, tmp_path, lines.append)
    assert lines == ["left out: v6e-8-x1 lacks finish"]


def test_folders_under_another_name_are_not_in_the_table(tmp_path):
    pytest.importorskip("matplotlib")
    lines = []
    keep(tmp_path, report(8, 1, 1.0), 1)
    keep(tmp_path, report(16, 1, 1.0), 4)
    (tmp_path / "notes-x1").write_text("a file")
    (tmp_path / "copy-x1").mkdir()
    (tmp_path / "copy-x1/preflight.json").write_text(json.dumps(report(64, 1, 1.0)))
    text = scaling.write(tmp_path, tmp_path, lines.append)
    assert text.count("| v6e-8 |") == 1 and "v6e-16 |" not in text and "v6e-64 |" not in text
    assert lines == ["left out: v6e-16-x4 is not of speedrun with 4 times its batch"]
    assert "Efficiency: device seconds of v6e-8 (batch x 1) over" in text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"preset"',
        b"\xff",
        b"[]",
        b"{}",
        {"made_of": None},
        {"variants": [{}]},
        {"devices": 0},
    ],
)
def test_a_damaged_report_is_one_line(tmp_path, content):
    if isinstance(content, dict):
        found = report(8, 1, 1.0) | content
        if found["made_of"] is None:
            del found["made_of"]
        content = json.dumps(found).encode()
    (tmp_path / "v6e-8-x1").mkdir()
    (tmp_path / "v6e-8-x1/preflight.json").write_bytes(content)
    with pytest.raises(T.UserError, match=r"v6e-8-x1/preflight.json is .*: delete it"):
        scaling.write(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["--dump", "{here}", "--draw", "v6e-8"],
            "--draw takes all that --dump has: drop the targets",
        ),
        (["--dump", "{here}", "--draw"], "{here} has no run whose programs are all compiled"),
        (["--dump", "{here}", "--batch", "0"], "--batch: numbers from 1 on"),
        (["--dump", "{here}/file"], "--dump {here}/file: File exists: name another folder"),
        (["--dump", "{here}", "v6e-8", "v6e-7"], "no such hardware as v6e-7"),
    ],
)
def test_what_is_refused_before_hours_of_compiling(tmp_path, monkeypatch, capsys, argv, error):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(preflight, "preflight", None)
    real = preflight.absent_devices

    def absent(target):
        return [] if target == "v6e-8" else real(target)

    monkeypatch.setattr(preflight, "absent_devices", absent)
    (tmp_path / "file").write_text("")
    argv = [arg.replace("{here}", str(tmp_path)) for arg in argv]
    assert scaling.main([*argv, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and error.replace("{here}", str(tmp_path)) in line


def test_what_stands_there_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "absent_devices", lambda target: [*mesh_of(8).devices.flat])
    monkeypatch.setattr(preflight, "kept", lambda cfg, target, dump: {"grads1": {}, "adam": {}})
    asked = []

    def compile_(cfg, target, names, dump, say):
        asked.extend(names)

    monkeypatch.setattr(preflight, "preflight", compile_)
    scaling.compile_all(CFG, "v6e-8", tmp_path, say=list().append)
    every = {*T.programs(CFG, mesh_of(8), T.PLAIN)}
    assert {*asked} == every - {"grads1", "adam", "eval"} and len(asked) == len({*asked})


def test_programs_of_other_sources_or_configs_count_as_missing(tmp_path):
    found = {"made_of": preflight.source_of(CFG, "v6e-8"), "versions": T.versions()}
    (tmp_path / "preflight.json").write_text(json.dumps(found | {"variants": [{"name": "adam"}]}))
    assert {*preflight.kept(CFG, "v6e-8", tmp_path)} == {"adam"}
    assert preflight.kept(CFG, "v6e-16", tmp_path) == {}
    assert preflight.kept(replace(CFG, seed=1), "v6e-8", tmp_path) == {}
    assert preflight.kept(CFG, "v6e-8", tmp_path / "nowhere") == {}


# One program of a small run for two slices, as main compiles those of a run; argv: a folder.
TWO_SLICES = """
import dataclasses, sys
sys.path[:0] = [".", "records"]
import preflight, scaling, train_gpt as T
tiny = T.PRESETS["tiny"]
stages = [dataclasses.replace(s, batch_tokens=8 * 512, row_tokens=512) for s in tiny.stages]
small = dataclasses.replace(tiny, preset="speedrun", compute_dtype="bfloat16", width=256, heads=2)
T.PRESETS["speedrun"] = dataclasses.replace(small, stages=tuple(stages))
compile_ = preflight.preflight
preflight.preflight = lambda cfg, target, names, dump, say: (
    names == ["grads0"] and compile_(cfg, target, names, dump, say=say))
scaling.write = lambda *_: "written"
assert scaling.main(["v6e-8", "v6e-16", "--dump", sys.argv[1], "--batch", "1"]) == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the TPU compiler")
def test_one_process_reads_the_schedules_of_several_slices(tmp_path):
    subprocess.run([sys.executable, "-c", TWO_SLICES, str(tmp_path)], cwd=ROOT, check=True)
    for target in "v6e-8", "v6e-16":
        (row,) = json.loads((tmp_path / f"{target}-x1/preflight.json").read_text())["variants"]
        assert row["name"] == "grads0" and row["kernel_cycles"] > 0 and row["predicted_ms"] > 0
