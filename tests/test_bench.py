"""The benchmark: what it runs, what it counts, what it says and leaves behind, what it refuses."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, documents, write_shard
from programs import CFG, mesh_of, quick_compilation

import train_gpt as T

NAMES = [f"grads-{shape}" for shape in ("b256-r32-w8-32-k2", *["b512-r64-w16-64-k1"] * 2)]
BUILT = []  # the answer of compile_all for CFG on 8 devices: the tests share it


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """T.main in an empty folder, with CFG as preset: (status, stdout, stderr)."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(T, "PRESETS", T.PRESETS | {"small": replace(CFG, data="nowhere")})
    monkeypatch.setattr(T, "BENCH_SECONDS", 0.0)  # a chunk is one Adam period

    def run(*argv):
        status = T.main(["small", *map(str, argv)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def built(monkeypatch):
    """Programs are those of CFG on 8 devices, compiled once; a list of what was asked for."""
    asked = []

    def compile_once(cfg, mesh, say, variants, real=T.compile_all):
        asked.append([*variants])
        if not BUILT:
            with quick_compilation():
                BUILT.append(real(cfg, mesh, say, variants))
        return BUILT[0]

    monkeypatch.setattr(T, "compile_all", compile_once)
    return asked


@pytest.fixture
def steps(monkeypatch):
    """Every step that runs: its programs, the state that it takes and makes, its tokens."""
    seen = []

    def run_step(cfg, programs, variants, state, *rest, real=T.run_step):
        out = real(cfg, programs, variants, state, *rest)
        seen.append(SimpleNamespace(variants=variants, took=state, made=out[0], batch=rest[2]))
        return out

    monkeypatch.setattr(T, "run_step", run_step)
    return seen


def refused(result) -> str:
    """The one line of a refused command line."""
    status, out, err = result
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "Traceback" not in out + err
    return err


# ------------------------------------------------------------------------------------------------
# The whole command
# ------------------------------------------------------------------------------------------------


def test_bench_times_every_stage_on_both_kinds_of_tokens(main, built, steps, shards, tmp_path):
    status, out, err = main("--bench", "--data", shards, "--dump", tmp_path / "dump")
    assert (status, err) == (0, "")
    (wanted,) = built
    assert {v.name for v in wanted} == {*NAMES, "update-muon", "update-muon-adam"}
    assert len(wanted) == 4, "each program once, and no eval"

    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "small on 8 x cpu, each with 1/8 of every batch"
    assert f"jax {jax.__version__}" in lines[1] and lines[2].startswith("attention: xla (")
    report = json.loads((tmp_path / "dump/bench.json").read_text())
    rows = report["rows"]
    table = [line.split() for line in lines[-len(rows) - 1 :]]
    assert " ".join(table[0]) == "stage tokens ms/step min max tokens/s of bf16 MiB"
    assert [(row["stage"], row["name"], row["tokens"]) for row in rows] == [
        (i, name, kind) for i, name in enumerate(NAMES) for kind in ("random", "real")
    ]
    for row, cells in zip(rows, table[1:], strict=True):
        ms = np.divide(row["chunk_ms"], row["chunk_steps"])
        assert len(ms) == 5 and row["chunk_steps"] == 2
        assert row["ms"] == pytest.approx(np.median(ms))
        assert (row["ms_min"], row["ms_max"]) == (pytest.approx(min(ms)), pytest.approx(max(ms)))
        assert row["batch_tokens"] == CFG.stages[row["stage"]].batch_tokens
        assert row["tokens_per_second"] * row["ms"] == pytest.approx(1e3 * row["batch_tokens"])
        assert row["utilization"] is None and row["peak_so_far_mib"] > 1 and row["memory_mib"] > 0
        assert 0 < row["loss"] < 2 * math.log(CFG.vocab)
        figures = (f"{row[key]:.2f}" for key in ("ms", "ms_min", "ms_max"))
        rate, memory = f"{row['tokens_per_second']:,.0f}", f"{row['memory_mib']:,.0f}"
        assert cells == [str(row["stage"]), row["name"], row["tokens"], *figures, rate, "-", memory]
    facts = ("source_sha256", "versions", "host", "environment", "command", "choices", "config")
    assert not {*facts, "compile_seconds"} - {*report} and "run_id" not in report
    assert report["parts"] == report["devices"]["count"] == 8
    assert {"init", "copies", *NAMES} <= {*report["compile_seconds"]}
    left = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in left] == ["dump/bench.json"]

    # 4 steps to get warm, 2 to learn how long they take, 5 times 2 that are timed.
    assert len(steps) == 16 * len(rows)
    assert [step.variants[1].adam for step in steps] == [False, True] * 8 * len(rows)
    for i, row in enumerate(rows):
        own = steps[16 * i : 16 * (i + 1)]
        assert {step.variants[0].name for step in own} == {row["name"]}
        assert len({id(step.batch.tokens) for step in own}) == 4
    for before, step in zip(steps, steps[1:], strict=False):
        assert step.took is before.made, "one state, from step to step and from stage to stage"


def test_utilization_is_of_the_peak_of_all_devices(main, built, tmp_path, monkeypatch):
    monkeypatch.setitem(T.HARDWARE, "cpu", T.Hardware(1e9))
    _, out, _ = main("--bench", "--dump", tmp_path / "dump")
    for row in json.loads((tmp_path / "dump/bench.json").read_text())["rows"]:
        want = row["tokens_per_second"] * T.flops_per_token(CFG) / 8e9
        assert row["utilization"] == pytest.approx(want)
        assert f"{want:.1%}" in out


def test_without_data_of_the_preset_the_tokens_are_random(main, built):
    status, out, err = main("--bench")
    assert (status, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.startswith("random tokens only: ")]
    assert "no folder" in line and "nowhere" in line
    assert [line.split()[2] for line in out.splitlines()[-3:]] == ["random"] * 3


def test_a_loss_that_is_no_number_is_refused(main, built, monkeypatch, tmp_path):
    def run_step(*args, real=T.run_step):
        *out, report = real(*args)
        return *out, report * math.nan

    monkeypatch.setattr(T, "run_step", run_step)
    line = refused(main("--bench", "--dump", tmp_path / "dump"))
    assert f"{NAMES[0]}: the loss on random tokens is nan" in line
    assert not list((tmp_path / "dump").iterdir())


# ------------------------------------------------------------------------------------------------
# PARTS
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "parts", "rows"), [(1, 8, 1), (1, 2, 4), (2, 8, 2), (8, 8, 8), (8, 1, 64)]
)
def test_each_device_has_the_rows_of_one_of_parts(main, monkeypatch, devices, parts, rows):
    """So a device of few has the micro-batches that a device of all would have."""
    asked = []

    def compile_all(cfg, mesh, say, variants):
        asked.extend((v, T.micro_rows(cfg, v.rows // mesh.size, 32)) for v in variants if v.rows)
        raise T.UserError("enough")

    monkeypatch.setattr(T, "compile_all", compile_all)
    assert "enough" in refused(main("--bench", parts, "--set", f"devices={devices}"))
    assert [(v.rows, v.row_tokens) for v, _ in asked] == [(rows, 32), (rows, 64)]
    alone = T.micro_rows(CFG, 8 // parts, 32)
    assert [micro for _, micro in asked] == [alone] * 2


def test_config_in_the_file_is_that_of_the_run(built, monkeypatch):
    """And what is timed stands in its rows."""
    monkeypatch.setattr(T, "BENCH_SECONDS", 0.0)
    cfg = replace(
        CFG, stages=tuple(replace(s, batch_tokens=2 * s.batch_tokens) for s in CFG.stages)
    )
    report = T.bench(replace(cfg, data="nowhere"), 16, False, None, "", list().append)
    assert report["parts"] == 16
    assert [stage["batch_tokens"] for stage in report["config"]["stages"]] == [512, 1024, 1024]
    assert [row["batch_tokens"] for row in report["rows"]] == [256, 512, 512]


# ------------------------------------------------------------------------------------------------
# Tokens and times
# ------------------------------------------------------------------------------------------------


def rows_of(batches):
    return [np.asarray(batch.tokens) for batch in batches]


@pytest.mark.parametrize("step", [0, 3])
def test_real_batches_are_the_first_of_the_stream(shards, step):
    """As training would cut them: plain rows in the first stage, packed ones in the second."""
    stream, stage, cursor = T.TokenStream(shards, "train", BOS), T.stage_at(CFG, step), 0
    batches = T.bench_batches(CFG, mesh_of(8), step, stream)
    for batch in batches:
        want, cursor = T.next_rows(stream, cursor, stage)
        np.testing.assert_array_equal(batch.tokens, want)
        assert len(batch.tokens.sharding.device_set) == 8
        jax.tree.map(np.testing.assert_array_equal, batch.hyper, T.hyper_at(CFG, step))
    assert len(batches) == 4


def test_random_batches_are_uniform_with_documents_from_the_seed():
    long = replace(CFG.stages[0], batch_tokens=8 * 8192, row_tokens=8192)
    cfg = replace(CFG, stages=(long, *CFG.stages[1:]))
    rows = rows_of(T.bench_batches(cfg, mesh_of(8), 0, None))
    assert {x.shape for x in rows} == {(8, 8193)} and {x.dtype for x in rows} == {np.dtype("u2")}
    counts = np.bincount(np.concatenate(rows).ravel(), minlength=CFG.vocab)
    assert counts[CFG.real_tokens :].sum() == 0
    total = counts.sum()
    # BOS: as often as any id, and once in 700 tokens beside. Five standard deviations.
    share = np.full(CFG.real_tokens, (1 - 1 / 700) / CFG.real_tokens)
    share[BOS] += 1 / 700
    assert np.all(abs(counts[: CFG.real_tokens] - total * share) < 5 * np.sqrt(total * share))
    again, other = (
        rows_of(T.bench_batches(replace(cfg, seed=seed), mesh_of(8), 0, None)) for seed in (0, 1)
    )
    np.testing.assert_array_equal(rows, again)
    assert len({x.tobytes() for x in rows + other}) == 8


@pytest.mark.parametrize("adam_every", [1, 2, 3])
@pytest.mark.parametrize("speed", [0.001, 0.04, 7.0])  # seconds of a step
def test_chunks_are_long_enough_warm_and_whole_adam_periods(adam_every, speed):
    cfg, asked, rates = replace(CFG, adam_every=adam_every), [], iter([1.0, 1.5, 1.1, 3.0, 0.9])

    def run(steps):
        asked.append(steps)
        late = len(asked) > 2 and asked[-1] == asked[-2]  # one of the chunks that count
        return steps * speed * (next(rates) if late else 1.0), float(len(asked))

    found = T.time_chunks(cfg, run)
    assert asked[0] >= 2 * adam_every and all(steps % adam_every == 0 for steps in asked)
    assert asked[-5:] == [found["chunk_steps"]] * 5
    assert found["chunk_steps"] * speed >= 0.5
    assert found["chunk_steps"] * speed <= max(1.0, adam_every * speed)
    assert found["chunk_ms"] == pytest.approx(
        [1e3 * found["chunk_steps"] * speed * rate for rate in (1.0, 1.5, 1.1, 3.0, 0.9)]
    )
    times = [found[key] / 1e3 / speed for key in ("ms", "ms_min", "ms_max")]
    assert times == pytest.approx([1.1, 0.9, 3.0])
    assert found["loss"] == len(asked), "of the last step"


# ------------------------------------------------------------------------------------------------
# What is refused: before anything is compiled
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bench", "3"], "--bench 3: stages.0 has 8 rows, which 3 devices cannot share equally"),
        (["--bench", "16"], "--bench 16: stages.0 has 8 rows"),
        (["--bench", "-1"], "--bench -1: a positive number of devices, or none"),
        (["--bench", "all"], "argument --bench: invalid int value: 'all'"),
        (["--bench", "--show"], "--show and --bench are two different things to do"),
        (["--bench", "--preflight", "v6e-8"], "--preflight and --bench are two different things"),
        (["--bench", "--profile"], "--bench and --profile are two different things to do"),
        (["--bench", "--data", "nothing"], "no folder"),
        (["--bench", "--set", "data=nothing"], "no folder"),
        (["--bench", "--data", "."], "no train shards"),
        (["--bench", "--dump", "/dev/null/x"], "--dump /dev/null/x: "),
        (["--bench", "--set", "devices=3"], "3 devices do not divide 8"),
        (
            [*"--bench --coordinator a:1 --processes 2 --process-id 0".split()],
            "--bench is for one process: drop --coordinator",
        ),
        (["--dump", "x"], "--dump goes with --preflight TARGET or --bench"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(main, monkeypatch, argv, words):
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))
    assert words in refused(main(*argv))


@pytest.mark.parametrize("mode", ["--resume", "--sample"])
def test_bench_is_not_for_a_run_that_is_there(capsys, mode):
    status = T.main(["--bench", mode, "logs/x"])
    line = refused((status, *capsys.readouterr()))
    assert f"--bench and {mode} are two different things to do" in line


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (documents(0, 600), "the tokens in {} end at 600: download more shards"),
        (np.full(9000, 97), "{}: token id 97 is not below 97"),
    ],
)
def test_bad_data_is_refused_by_name(main, monkeypatch, tmp_path, tokens, words):
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))
    folder = write_shard(tmp_path / "bad/x_train_0.bin", tokens).parent
    assert words.format(folder) in refused(main("--bench", "--data", folder))
