"""records/bench.py: the order of programs, the figures, and invalid arguments."""

import functools
import json
import math
import os
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bench
import jax
import numpy as np
import preflight
import pytest
from programs import CFG, by_name, mesh_of, named, quick_compilation
from training import BRIEF

import train_gpt as T

# One stage, with the table updates of CFG.
ONE = replace(BRIEF, steps=8, table_every=CFG.table_every, devices=1)


@pytest.fixture
def main(tmp_path, shards, monkeypatch, capsys):
    """Run bench.main with the presets small and one; return (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    presets = {"small": replace(CFG, data=str(shards)), "one": replace(ONE, data=str(shards))}
    monkeypatch.setattr(T, "PRESETS", T.PRESETS | presets)
    monkeypatch.setattr(bench, "SECONDS", 0.0)  # measurements have one period

    def run(*argv):
        status = bench.main([*map(str, argv)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def built():
    """Return name -> (program, executable) for ONE."""
    every = by_name(T.programs(ONE, mesh_of(1), T.PLAIN))
    with quick_compilation():
        return {x: (every[x], every[x].lower().compile()) for x in every}


@pytest.mark.slow
def test_steps_run_in_the_order_of_training(main, built, monkeypatch):
    """The loss falls. After the steps, each program is timed separately."""
    calls = []

    def key(program):
        return program.step.func, str(program.args)

    def lower(program):
        name = next(x for x, (one, _) in built.items() if key(one) == key(program))
        executable = built[name][1]

        def call(*args):
            calls.append(name)
            return executable(*args)

        call.memory_analysis = executable.memory_analysis
        call.as_text = executable.as_text
        return SimpleNamespace(compile=lambda: call)

    monkeypatch.setattr(T.Program, "lower", lower)
    monkeypatch.setitem(preflight.PEAK_FLOPS, "cpu", 1e12)
    with quick_compilation():
        status, out, err = main("one", "--dump", "dump", "--profile", "traces")
    assert (status, err) == (0, "")
    assert list(Path("traces/grads0").rglob("*.xplane.pb"))
    lines = json.loads(Path("traces/lines.json").read_text())
    assert {row["program"] for row in lines} == {"grads0", "anvil", "adam_tied", "tables0-0"}
    assert "grads0, ms per step by program and by line:" in out
    assert "brief on 1 x cpu, each with 1/1 of every batch" in out
    period = ["grads0", "anvil", "grads0", "anvil", "adam_tied", "tables0-0"]
    steps, alone = calls[: 9 * len(period)], calls[9 * len(period) :]
    assert steps == period * 9, "two for warm-up, one for the length, five measurements, a trace"
    summed = {"grads0": 0, "anvil": 1, "adam_tied": 2, "tables0-0": 2, "tables0-0-0-0": 4}
    expected = [[*count * ["grads0"], *8 * [name]] for name, count in summed.items()]
    assert alone == [name for each in expected for name in each], "with the gradients that it sums"
    report = json.loads(Path("dump/bench.json").read_text())
    alone = {row["name"]: row for row in report["programs"]}
    runs = {"grads0": 8, "adam_tied": 4, "anvil": 8, "tables0-0": 2, "tables0-0-0-0": 1}
    assert {name: row["steps"] for name, row in alone.items()} == runs
    assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in alone.values())
    (row,) = report["rows"]
    assert (row["name"], row["stage"], row["steps"]) == ("grads0", 0, 8)
    assert row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["tokens_per_second"] * row["ms"] == pytest.approx(1e3 * 256)
    assert 0.1 < row["loss"] < math.log(CFG.real_tokens) - 0.05, "after many steps on four batches"
    assert row["memory_mib"] > 0.5 and report["parts"] == 1
    used = row["tokens_per_second"] * T.flops_per_token(ONE, 4) / 1e12
    assert row["utilization"] == pytest.approx(used)
    assert {"source_sha256", "versions", "host", "config", "devices"} <= {*report}


KINDS = {
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "cpu": 0,
}


@pytest.mark.slow
def test_a_run_without_tables_has_no_table_update(main):
    status, out, err = main("one", "--set", "without=ngrams,values")
    assert status == 0, err
    assert "adam" in out and "tables" not in out


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_matching_name_decides_the_peak(kind):
    assert bench.peak_flops(kind) == KINDS[kind]


def test_clocks_of_busy_gpus_by_nvidia_smi(tmp_path, monkeypatch, capsys):
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    step = functools.partial(time.sleep, 0.02)

    def timed(*lines):
        output = "".join(f'echo "{line}"; ' for line in lines)
        smi.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/arguments\n{output}exec sleep 60\n")
        smi.chmod(0o755)
        row = {"name": "anvil"} | bench.time_step(step)
        bench.show(row)
        return row, capsys.readouterr().out

    idle = "345, 90.20, 0x0000000000000001"
    lines = "1755, 650.10, 0x0000000000000004", idle, "1980, 300.5, 0x60", "1700, 640, 0x84", idle
    assert "watts" not in timed(*lines)[0], "this is a CPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    row, text = timed(*lines)
    assert (row["clock_mhz"], row["watts"], row["limited_by"]) == (1755, 640, ["power", "heat"])
    assert text.endswith(", 1,755 MHz, 640 W, limited by power and heat\n")
    assert "clocks_event_reasons.active" in (tmp_path / "arguments").read_text()
    assert timed("1980, 300, 0x0")[1].endswith(", 1,980 MHz, 300 W\n")
    assert "watts" not in timed("1755, [N/A], 0x4", "Field x is not a valid field", idle)[0]
    monkeypatch.setenv("PATH", "")
    assert "watts" not in bench.time_step(step)


def test_kernels_are_compared_with_float32_and_timed(main, built, monkeypatch):
    """The exit status is 1 if a kernel is wrong."""
    grads = built["grads0"][1]

    def wrong(*args):
        return jax.tree.map(lambda x: 1.1 * x if x.dtype == "float32" else x, grads(*args))

    for name in ("args_info", "input_shardings", "memory_analysis"):
        setattr(wrong, name, getattr(grads, name))
    order = iter([grads, grads, wrong, grads])
    monkeypatch.setattr(T.Program, "lower", lambda *_: SimpleNamespace(compile=lambda: next(order)))
    with quick_compilation():
        status, out, _ = main("one", "--kernels", 0, "--dump", "dump")
    rows = json.loads(Path("dump/bench.json").read_text())["rows"]
    names = ["float32", "plain", "all kernels", "without cross_entropy"]
    assert [row["name"] for row in rows] == names
    assert [row["off"] for row in rows] == pytest.approx([0, 0, 0.1, 0], abs=1e-4)
    assert status == 1 and "a kernel has a larger error than the computation without kernels" in out


def test_other_attention_tiles_on_nvidia_gpus():
    gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    kernels = T.PLAIN._replace(attend="the kernel of the run")
    found = bench.variants(CFG, gpu, kernels)
    assert found["all kernels"] == (CFG, kernels)
    assert found["tiles (64, 32, 4, 3)"][1].attend.args[0].args == ((64, 32, 4, 3),)
    assert len(found) == 4 + len(bench.TILES)


@pytest.mark.parametrize(("devices", "parts", "rows"), [(1, 8, 1), (1, 2, 4), (2, 8, 2), (8, 8, 8)])
def test_a_device_gets_its_share_of_rows(devices, parts, rows):
    """A device has the same share of rows and of the n-gram table as in the full run."""
    cfg = bench.part_of(CFG, devices, parts)
    assert [stage.rows for stage in cfg.stages] == [rows] * 3
    assert [stage.row_tokens for stage in cfg.stages] == [32, 64, 64]
    assert cfg.ngram_rows % 2 == 0 and abs(cfg.ngram_rows / devices - CFG.ngram_rows / parts) < 2
    assert bench.part_of(replace(CFG, ngram_rows=0), devices, parts).ngram_rows == 0


def test_measurements_are_long_enough_and_whole_periods(monkeypatch):
    """Each call takes 0.1 s, but in the last measurements 0.11, 0.3 and 0.09 s."""
    calls, now = 0, 0.0
    rates = [0.1] * 20 + [0.1] * 8 + [0.15] * 8 + [0.11] * 8 + [0.3] * 8 + [0.09] * 8

    def step():
        nonlocal calls, now
        now += rates[calls]
        calls += 1

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    found = bench.time_step(step, period=4)
    assert (calls, found["calls"]) == (8 + 4 + 8 + 5 * 8, 8), "warm-up, twice for the length, five"
    assert [found[key] for key in ("ms", "ms_min", "ms_max")] == pytest.approx([110, 90, 300])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--parts", "3"], "--parts 3: use a divisor of 8, the rows of stages.0"),
        (["--parts", "-1"], "--parts -1: use a divisor of 8"),
        (["--kernels", "3"], "--kernels 3: the stages are 0 to 2"),
        (["--data", "nothing"], "nothing does not exist"),
        (["--dump", "/dev/null/x"], "/dev/null/x"),
        (["--profile", __file__], "test_bench.py"),
        (["--kernels", "0", "--profile", "x"], "--profile traces steps of stages: omit"),
        (["--beside", "nothing", "x"], "No such file or directory: 'nothing'"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(main, monkeypatch, argv, words):
    monkeypatch.setattr(T.Program, "lower", lambda *_: pytest.fail("went on to compile"))
    status, out, err = main("small", *argv)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_the_most_frequent_update_of_each_kind_is_timed():
    """An update that includes gradients of another stage is left out."""
    for gradients in ("grads0", "grads1", "grads2"):
        key = named(CFG, gradients)
        counts = Counter()
        for first, *updates in T.schedule(CFG).programs:
            counts.update(updates if first == key else ())
        usual = bench.usual_updates(CFG, key)
        assert usual[0] == T.Update("anvil", 1) and {*usual} <= {*counts}
        assert all({*update.stages} <= {key.stage} for update in usual)
        kinds = [update.kind for update in usual]
        assert len(kinds) == len({*kinds})


YARDSTICK = {"kernel": 1.3, "rows": 1.3, "code": 1.05, "memory": 1.0, "link": 1.0}
TRUE = {"kernel": 1.1, "rows": 1.8, "code": 1.0}
CONFIG = {"steps": 8, "ngram_rows": 4096, "kernels": "auto", "data": "here", "devices": 0}
# Milliseconds of bundles at one cycle each, of memory, and of communication that is not hidden.
COUNTED = {"grads0": (10, 2, 3, 4, 0.3), "grads1": (20, 3, 8, 9, 0.2), "grads2": (30, 9, 7, 6, 0.5)}
COUNTED |= {"grads3": (35, 8, 9, 8, 0.7), "anvil": (0, 0, 0.4, 0.1, 0.0)}
COUNTED |= {"tables0-0": (0.1, 6, 2, 1, 0.5), "eval": (90, 9, 9, 9, 1.0)}


def files(links=1, count=8) -> tuple[dict, dict]:
    """Return (preflight.json, bench.json) for `count` chips with the yardstick TRUE."""
    predicted, measured = [], []
    for steps, (name, (*bundles, memory, link)) in enumerate(COUNTED.items(), 1):
        found = dict(zip(TRUE, bundles, strict=True))
        bound = {x: YARDSTICK[x] * ms for x, ms in found.items()} | {"memory": memory}
        row = {"name": name, "steps": steps, "bound_ms": bound, "link_floor_ms": link}
        row |= {"predicted_ms": sum(bound.values()) - memory / 2, "moved_floor_ms": memory / 2}
        predicted.append(row)
        ms = sum(TRUE[x] * ms for x, ms in found.items()) + memory + links * link
        measured.append({"name": name, "steps": steps, "ms": ms, "ms_min": ms, "ms_max": ms + 1})
    facts = {"source_sha256": "ab12", "versions": {"jax": "0.12.0", "numpy": "2"}, "config": CONFIG}
    chip = {"device_kind": "TPU v6 lite", "devices": 8, "yardstick": YARDSTICK}
    preflight = facts | chip | {"rates": "measured", "variants": predicted}
    devices = {"kind": "TPU v6 lite", "count": count}
    bench_json = {"devices": devices, "parts": 8, "programs": measured[:-1]}  # without eval
    return preflight, facts | bench_json


def test_predicted_beside_measured_times_and_the_best_yardstick(main, tmp_path):
    """grads0 takes 11 + 3.6 + 3 + 4 + 0.3; 13 + 2.6 + 3.15 + 4 + 0.3 was predicted."""
    paths = [tmp_path / "preflight.json", tmp_path / "bench.json"]
    for path, content in zip(paths, files(), strict=True):
        path.write_text(json.dumps(content))
    status, out, err = main("--beside", *paths)
    assert (status, err) == (0, "")
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert table[0].startswith("| program | times | measured ms | predicted | computed + links")
    row = "| grads0 | 1 | 21.90 (21.90 to 22.90) | 23.05 | 20.75 + 0.30 + 2.00 | 0.95 |"
    assert table[2] == row and len(table) == 2 + 6 and "eval" not in out
    seconds = [sum(row["steps"] * row["ms"] for row in files()[1]["programs"]) / 1e3]
    seconds += [sum(row["steps"] * (sum(row["bound_ms"].values()) + row["link_floor_ms"])
                    for row in files()[0]["variants"][:-1]) / 1e3]  # fmt: skip
    sums = "measured {:.1f} s, predicted {:.1f} s".format(*seconds)
    assert f"These programs, over the run: {sums}, ratio " in out
    numbers = "kernel 1.10 (now 1.30), rows 1.80 (now 1.30), code 1.00 (now 1.05)"
    assert f"Best fit to 6 programs: {numbers}." in out and "Different" not in out


def test_files_in_the_wrong_order_are_refused(main, tmp_path):
    for name, content in zip(("predicted", "measured"), files(), strict=True):
        (tmp_path / name).write_text(json.dumps(content))
    for names in (("measured", "predicted"), ("predicted", "predicted")):
        status, _, err = main("--beside", *(tmp_path / x for x in names))
        words = "error: --beside needs preflight.json, then a bench.json made without --kernels\n"
        assert (status, err) == (2, words)


def test_one_chip_of_eight_compares_gradients_without_links():
    out = bench.beside(*files(links=0, count=1))
    assert "| grads3 |" in out and "anvil" not in out and "tables" not in out
    assert "| 22.75 | 20.75 + 0.00 + 2.00 | 0.95 |" in out
    assert "Best fit to 4 programs: kernel 1.10 (now" in out
    assert "1 of 8 devices: without links and updates, which do not compare." in out


def test_too_few_programs_fit_no_yardstick():
    """Three numbers would fit any times of three programs. A GPU has two numbers."""
    predicted, measured = files()
    measured["programs"] = measured["programs"][:3]
    assert "3 programs are too few to fit kernel, rows, code." in bench.beside(predicted, measured)
    predicted["yardstick"] = YARDSTICK | {"kernel": 0.0}
    for row in predicted["variants"]:
        kernels = row["bound_ms"].pop("kernel") / 1.3 * 1.1
        for other in measured["programs"]:
            other["ms"] -= kernels if other["name"] == row["name"] else 0
    found = bench.beside(predicted, measured)
    assert "Best fit to 3 programs: rows 1.80 (now 1.30), code 1.00 (now 1.05)." in found


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((1, "devices", "kind"), "TPU v5 lite", "for 8 x TPU v5 lite, predicted for 8 x TPU v6"),
        ((1, "parts"), 4, "measured for 4 x TPU v6 lite, predicted for 8 x TPU v6 lite"),
        ((1, "programs"), None, "made without --kernels"),
        ((0, "variants", 0, "bound_ms"), None, "preflight.json has no times for TPU v6 lite"),
        ((0, "variants"), [{"name": "eval", "bound_ms": {"code": 1.0}}], "no program in common"),
    ],
)
def test_files_of_other_hardware_are_refused(place, value, words):
    both = json.loads(json.dumps(files()))
    inner = both
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if value is None:
        del inner[place[-1]]
    with pytest.raises(T.UserError, match=re.escape(words)):
        bench.beside(*both)


def test_different_settings_and_sources_are_listed():
    predicted, measured = files()
    measured["config"] = CONFIG | {"ngram_rows": 2048, "data": "there"}
    measured["source_sha256"] = "cd34"
    found = bench.beside(predicted, measured).splitlines()[-1]
    assert found == "Different in the prediction: ngram_rows, data, the source of train_gpt.py."
