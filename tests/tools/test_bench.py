"""The benchmark: in which order it runs programs, what it counts, what it refuses."""

import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bench
import jax
import numpy as np
import preflight
import pytest
from programs import CFG, by_name, mesh_of, quick_compilation
from training import BRIEF

import train_gpt as T

# One stage, whose tables are updated as those of CFG.
ONE = replace(BRIEF, steps=8, table_every=CFG.table_every, devices=1)


@pytest.fixture
def main(tmp_path, shards, monkeypatch, capsys):
    """bench.main with CFG as preset: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    presets = {"small": replace(CFG, data=str(shards)), "one": replace(ONE, data=str(shards))}
    monkeypatch.setattr(T, "PRESETS", T.PRESETS | presets)
    monkeypatch.setattr(bench, "SECONDS", 0.0)  # a chunk is one period

    def run(*argv):
        status = bench.main([*map(str, argv)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def built():
    """{name: (program, executable)} of the steps of ONE."""
    every = by_name(T.programs(ONE, mesh_of(1), T.PLAIN))
    with quick_compilation():
        return {x: (every[x], every[x].lower().compile()) for x in every}


@pytest.mark.slow
def test_steps_follow_each_other_as_in_training(main, built, monkeypatch):
    """And they train. Then each program has its turn, alone."""
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
    assert {row["program"] for row in lines} == {"grads0", "anvil", "adam_tied", "tables0-0-0-0"}
    assert {"matmuls", "attention", "loss", "rest"} <= {row["kind"] for row in lines}
    assert "grads0, ms a step           matmuls  attention       loss      links       rest" in out
    assert "brief on 1 x cpu, each with 1/1 of every batch" in out
    period = [*["grads0", "anvil", "grads0", "anvil", "adam_tied"] * 2, "tables0-0-0-0"]
    steps, alone = calls[: 9 * len(period)], calls[9 * len(period) :]
    assert steps == period * 9, "two to get warm, one for their time, five that count, a trace"
    summed = {"grads0": 0, "anvil": 1, "adam_tied": 2, "tables0-0": 2, "tables0-0-0-0": 4}
    expected = [[*count * ["grads0"], *8 * [name]] for name, count in summed.items()]
    assert alone == [name for each in expected for name in each], "of gradients that it sums"
    report = json.loads(Path("dump/bench.json").read_text())
    alone = {row["name"]: row for row in report["programs"]}
    runs = {"grads0": 8, "adam_tied": 4, "anvil": 8, "tables0-0": 2, "tables0-0-0-0": 1}
    assert {name: row["steps"] for name, row in alone.items()} == runs
    assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in alone.values())
    (row,) = report["rows"]
    assert (row["name"], row["stage"], row["steps"]) == ("grads0", 0, 8)
    assert row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["tokens_per_second"] * row["ms"] == pytest.approx(1e3 * 256)
    assert 0.1 < row["loss"] < math.log(CFG.real_tokens) - 0.05, "four batches, again and again"
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
def test_a_run_without_tables_has_no_update_of_them(main):
    status, out, err = main("one", "--set", "without=ngrams,values")
    assert status == 0, err
    assert "adam" in out and "tables" not in out


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_that_of_the_longest_name(kind):
    assert bench.peak_flops(kind) == KINDS[kind]


def test_clocks_stand_beside_times_where_nvidia_smi_is(tmp_path, monkeypatch):
    """Medians of GPUs that are not idle, and each limit once; nothing where it cannot say."""
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def timed(*lines):
        said = "".join(f'echo "{line}"; ' for line in lines)
        smi.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/asked\n{said}exec sleep 60\n")
        smi.chmod(0o755)
        return bench.time_chunks(1, lambda calls: time.sleep(0.1) or 1.0)

    idle = "345, 90.20, 0x0000000000000001"
    lines = "1755, 650.10, 0x0000000000000004", idle, "1980, 300.5, 0x60", "1700, 640, 0x84", idle
    assert bench.clocks(timed(*lines)) == "", "this is a CPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    row = timed(*lines)
    assert (row["clock_mhz"], row["watts"], row["limited_by"]) == (1755, 640, ["power", "heat"])
    assert bench.clocks(row) == "  1,755 MHz, 640 W, limited by power and heat"
    assert "clocks_event_reasons.active" in (tmp_path / "asked").read_text()
    assert bench.clocks(timed("1980, 300, 0x0")) == "  1,980 MHz, 300 W"
    assert bench.clocks(timed("1755, [N/A], 0x4", "Field x is not a valid field", idle)) == ""
    monkeypatch.setenv("PATH", "")
    assert "watts" not in bench.time_chunks(1, lambda calls: 1.0)


def test_kernels_are_compared_with_float32_and_timed(main, built, monkeypatch):
    """Those that are wrong are seen, and the exit status is 1."""
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
    assert status == 1 and "kernels are further off float32 than the plain form is" in out


def test_other_tiles_are_tried_for_attention_on_nvidia_gpus(monkeypatch):
    gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    key = T.Gradients(0, 0, 0)

    def programs(cfg, mesh, kernels):
        return {key: SimpleNamespace(lower=lambda: kernels.attend)}

    monkeypatch.setattr(T, "programs", programs)
    kernels = T.PLAIN._replace(attend="that of the run")
    found = dict(bench.variants(CFG, gpu, kernels, key))
    assert found["all kernels"] is kernels.attend
    assert found["tiles (64, 32, 4, 3)"].args[0].args == ((64, 32, 4, 3),)
    assert len(found) == 4 + len(bench.TILES)


@pytest.mark.parametrize(("devices", "parts", "rows"), [(1, 8, 1), (1, 2, 4), (2, 8, 2), (8, 8, 8)])
def test_each_device_has_the_rows_of_one_of_parts(devices, parts, rows):
    """And its part of the n-gram table: so a device of few has what a device of all would have."""
    cfg = bench.part_of(CFG, devices, parts)
    assert [stage.rows for stage in cfg.stages] == [rows] * 3
    assert [stage.row_tokens for stage in cfg.stages] == [32, 64, 64]
    assert cfg.ngram_rows % 2 == 0 and abs(cfg.ngram_rows / devices - CFG.ngram_rows / parts) < 2
    assert bench.part_of(replace(CFG, ngram_rows=0), devices, parts).ngram_rows == 0


def test_chunks_are_long_enough_warm_and_whole_periods():
    asked, rates = [], iter([1.0, 1.5, 1.1, 3.0, 0.9])

    def run(steps):
        asked.append(steps)
        late = len(asked) > 2 and asked[-1] == asked[-2]  # one of the chunks that count
        return steps * 0.1 * (next(rates) if late else 1.0)

    found = bench.time_chunks(4, run)
    assert asked == [8, 4, 8, *[8] * 5]
    assert [found[key] for key in ("ms", "ms_min", "ms_max")] == pytest.approx([110, 90, 300])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--parts", "3"], "--parts 3: use a number that divides the 8 rows of stages.0"),
        (["--parts", "-1"], "--parts -1: a positive number of devices, or none"),
        (["--kernels", "3"], "--kernels 3: stages are 0 to 2"),
        (["--data", "nothing"], "there is no nothing"),
        (["--dump", "/dev/null/x"], "/dev/null/x"),
        (["--profile", __file__], "test_bench.py"),
        (["--kernels", "0", "--profile", "x"], "--profile traces the steps of stages: leave out"),
        (["--beside", "/dev/null", "x"], "error: /dev/null: Expecting value: line 1"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(main, monkeypatch, argv, words):
    monkeypatch.setattr(T.Program, "lower", lambda *_: pytest.fail("went on to compile"))
    status, out, err = main("small", *argv)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_a_stage_without_an_update_of_its_own_is_refused(main, monkeypatch):
    """Of one step: the update of the tables sums it with the next stage's."""
    monkeypatch.setattr(T.Program, "lower", lambda *_: pytest.fail("went on to compile"))
    status, _, err = main("small", "--set", "stages.0.share=0.125", "stages.1.share=0.875")
    cure = "time a run of more steps, or with a longer stages.0"
    assert (status, err) == (2, f"error: no tables0-0 to time with grads0: {cure}\n")


YARDSTICK = {"kernel": 1.3, "rows": 1.3, "code": 1.05, "memory": 1.0, "link": 1.0}
TRUE = {"kernel": 1.1, "rows": 1.8, "code": 1.0}
CONFIG = {"steps": 8, "ngram_rows": 4096, "kernels": "auto", "data": "here", "devices": 0}
# Milliseconds of bundles at one cycle each, then of memory and of links in the open.
COUNTED = {"grads0": (10, 2, 3, 4, 0.3), "grads1": (20, 3, 8, 9, 0.2), "grads2": (30, 9, 7, 6, 0.5)}
COUNTED |= {"grads3": (35, 8, 9, 8, 0.7), "anvil": (0, 0, 0.4, 0.1, 0.0)}
COUNTED |= {"tables0-0": (0.1, 6, 2, 1, 0.5), "eval": (90, 9, 9, 9, 1.0)}


def files(links=1, count=8) -> tuple[dict, dict]:
    """(preflight.json, bench.json) of a chip that takes what TRUE says, and of `count` devices."""
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
    preflight = facts | chip | {"kernels": "all", "rates": "measured", "variants": predicted}
    devices = {"kind": "TPU v6 lite", "count": count}
    bench_json = {"devices": devices, "parts": 8, "choices": {"kernels": "all"}}
    return preflight, facts | bench_json | {"programs": measured[:-1]}  # all but eval


def test_measured_beside_predicted_and_the_yardstick_that_would_have_been_right(main, tmp_path):
    """By hand: grads0 takes 11 + 3.6 + 3 + 4 + 0.3, and 13 + 2.6 + 3.15 + 4 + 0.3 was predicted."""
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
    assert f"All programs of training, as often as they run: {sums}, ratio " in out
    numbers = "kernel 1.10 +- 0.00 (now 1.30), rows 1.80 +- 0.00 (now 1.30), code 1.00 +- 0.00 (now"
    assert f"Nearest to 6 programs: {numbers} 1.05); these are off by 0.0%, now by " in out
    assert "Predicted with jax 0.12.0; kernels: all; rates: measured.\nMeasured with jax 0.1" in out


def test_what_is_beside_must_be_the_two_files(main, tmp_path):
    """The one that is not is named, as it was given."""
    contents = dict(zip(("p", "b"), files(), strict=True)) | {"list": [], "other": {"a": 1}}
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    cases = {
        ("b", "p"): "{0}/b is no preflight.json, which comes here: it has no `variants`",
        ("p", "p"): "{0}/p is no bench.json, which comes here: it has no `parts`",
        ("p", "other"): "{0}/other is no bench.json, which comes here: it has no `parts`",
        ("list", "b"): "{0}/list is no preflight.json, which comes here: it has no `variants`",
    }
    for names, words in cases.items():
        status, _, err = main("--beside", *(tmp_path / x for x in names))
        assert (status, err) == (2, f"error: {words.format(tmp_path)}\n")


def test_one_chip_of_eight_compares_gradients_without_links():
    out = bench.beside(*files(links=0, count=1))
    assert "| grads3 |" in out and "anvil" not in out and "tables" not in out
    assert "| 22.75 | 20.75 + 0.00 + 2.00 | 0.95 |" in out
    assert "These programs, as often as they run: " in out
    assert "Nearest to 4 programs: kernel 1.10 +- 0.00" in out
    assert "1 of 8 parts: links, and updates of what is not cut, do not compare." in out


def test_too_few_programs_fit_no_yardstick():
    """As many as numbers would fit whatever they took; without kernels there are two numbers."""
    predicted, measured = files()
    measured["programs"] = measured["programs"][:3]
    assert "3 programs are too few to fit kernel, rows, code." in bench.beside(predicted, measured)
    for row in predicted["variants"]:
        measured_kernels = row["bound_ms"].pop("kernel") / 1.3 * 1.1
        for other in measured["programs"]:
            other["ms"] -= measured_kernels if other["name"] == row["name"] else 0
    found = bench.beside(predicted, measured)
    assert "Nearest to 3 programs: rows 1.80 +- 0.00 (now 1.30), code 1.00 +- 0.00" in found


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((1, "source_sha256"), "cd34", None),  # which is only said
        ((1, "config", "ngram_rows"), 2048, "not the same: ngram_rows 4096, 2048"),
        ((1, "config", "data"), "there", None),
        ((1, "devices", "kind"), "TPU v5 lite", "device TPU v6 lite, TPU v5 lite"),
        ((1, "parts"), 4, "devices (--parts) 8, 4"),
        ((1, "programs"), None, "run it without --kernels"),
        ((0, "variants", 0, "bound_ms"), {}, "has no times for TPU v6 lite"),
        ((0, "variants"), [{"name": "eval", "bound_ms": {"code": 1.0}}], "no program in common"),
    ],
)
def test_files_of_other_programs_are_refused(place, value, words):
    both = json.loads(json.dumps(files()))
    inner = both
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if value is None:
        del inner[place[-1]]
    if words is None:
        text = bench.beside(*both)
        assert "Nearest to 6" in text
        assert ("has changed since the prediction" in text) == ("source_sha256" in place)
        return
    with pytest.raises(T.UserError, match=re.escape(words)):
        bench.beside(*both)
