"""The benchmark: in which order it runs programs, what it counts, what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bench
import jax
import numpy as np
import pytest
from programs import CFG, mesh_of, quick_compilation

import train_gpt as T

ONE = replace(CFG, stages=(replace(CFG.stages[0], share=1.0),), extension=0, devices=1)


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
    every = T.programs(ONE, mesh_of(1), T.PLAIN)
    with quick_compilation():
        names = [name for name in every if name not in ("finish", "eval")]
        return {x: (every[x], T.lower(every[x], mesh_of(1)).compile()) for x in names}


def test_steps_follow_each_other_as_in_training(main, built, monkeypatch):
    """And they train."""
    calls = []

    def lower(program, mesh):
        found = (x for x in built if built[x][0].step.args[-1] == program.step.args[-1])
        name = next(found)
        executable = built[name][1]

        def call(*args):
            calls.append(name)
            return executable(*args)

        call.memory_analysis = executable.memory_analysis
        return SimpleNamespace(compile=lambda: call)

    monkeypatch.setattr(T, "lower", lower)
    with quick_compilation():
        status, out, err = main("one", "--dump", "dump")
    assert (status, err) == (0, "")
    assert "small on 1 x cpu, each with 1/1 of every batch" in out
    period = [*["grads0", "anvil", "grads0", "anvil", "adam_tied"] * 2, "tables0-0-0-0"]
    assert calls == period * 8, "two to get warm, one to learn how long it takes, five that count"
    report = json.loads(Path("dump/bench.json").read_text())
    (row,) = report["rows"]
    assert (row["name"], row["stage"], row["steps"]) == ("grads0", 0, 8)
    assert row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["tokens_per_second"] * row["ms"] == pytest.approx(1e3 * 256)
    assert 0.1 < row["loss"] < math.log(CFG.real_tokens) - 0.05, "four batches, again and again"
    assert row["memory_mib"] > 0.5 and row["utilization"] is None and report["parts"] == 1
    assert {"source_sha256", "versions", "host", "config", "devices"} <= {*report}


def test_kernels_are_compared_with_float32_and_timed(main, built, monkeypatch):
    """Those that are wrong are seen, and the exit status is 1."""
    grads = built["grads0"][1]

    def wrong(*args):
        return jax.tree.map(lambda x: 1.1 * x if x.dtype == "float32" else x, grads(*args))

    for name in ("args_info", "input_shardings", "memory_analysis"):
        setattr(wrong, name, getattr(grads, name))
    order = iter([grads, grads, wrong, wrong, grads])
    monkeypatch.setattr(T, "lower", lambda *_: SimpleNamespace(compile=lambda: next(order)))
    with quick_compilation():
        status, out, _ = main("one", "--kernels", 0, "--dump", "dump")
    rows = json.loads(Path("dump/bench.json").read_text())["rows"]
    names = ["float32", "plain", "all kernels", "without add_mlp", "without cross_entropy"]
    assert [row["name"] for row in rows] == names
    assert [row["off"] for row in rows] == pytest.approx([0, 0, 0.1, 0.1, 0], abs=1e-4)
    assert status == 1 and "kernels are further off float32 than the plain form is" in out


def test_other_tiles_are_tried_for_attention_on_nvidia_gpus(monkeypatch):
    gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(T, "programs", lambda *args: {"grads0": None})
    monkeypatch.setattr(T, "lower", lambda *_: [getattr(T, name) for name in bench.TILES])
    usual = T.lower()
    found = dict(bench.variants(CFG, gpu, T.PLAIN._replace(attend=T.attend_triton), "grads0"))
    assert found["all kernels"] == T.lower() == usual
    assert found["QUERY_TILES (64, 64, 4, 2)"] == [usual[0], (64, 64, 4, 2), usual[2]]
    assert len(found) == 4 + sum(map(len, bench.TILES.values()))


@pytest.mark.parametrize(("devices", "parts", "rows"), [(1, 8, 1), (1, 2, 4), (2, 8, 2), (8, 8, 8)])
def test_each_device_has_the_rows_of_one_of_parts(devices, parts, rows):
    """And its part of the n-gram table: so a device of few has what a device of all would have."""
    cfg = bench.part_of(CFG, devices, parts)
    assert [stage.rows for stage in cfg.stages] == [rows] * 3
    assert [stage.row_tokens for stage in cfg.stages] == [32, 64, 64]
    assert cfg.ngram_rows % 2 == 0 and abs(cfg.ngram_rows / devices - CFG.ngram_rows / parts) < 2


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
        (["--data", "nothing"], "no such text, and no such folder"),
        (["--dump", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(main, monkeypatch, argv, words):
    monkeypatch.setattr(T, "lower", lambda *_: pytest.fail("went on to compile"))
    status, out, err = main("small", *argv)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_a_stage_without_an_update_of_its_own_is_refused(main, monkeypatch):
    """Of one step: the update of the tables sums it with the next stage's."""
    monkeypatch.setattr(T, "lower", lambda *_: pytest.fail("went on to compile"))
    status, _, err = main("small", "--set", "stages.0.share=0.125", "stages.1.share=0.875")
    cure = "time a run of more steps, or with a longer stages.0"
    assert (status, err) == (2, f"error: no tables0-0 to time with grads0: {cure}\n")
