"""The benchmark: what it runs, what it counts, what it says and leaves behind, what it refuses."""

import json
import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, ROOT, documents, write_shard
from programs import CFG, mesh_of, quick_compilation

import train_gpt as T

sys.path.insert(0, str(ROOT / "records"))
sys.path.insert(0, str(ROOT / "tests/kernels"))
import bench
import on_gpu

NAMES = ["grads0", "grads1", "grads2"]
EVENTS = ["tables2", "tables4", "tables4"]  # of the steps amid those of each
ADAMS = ["adam_tied", "adam_tied", "adam"]  # likewise
UPDATES = ["anvil", "adam_tied", "adam", "tables2", "tables4"]
DUE = T.updates(CFG)  # steps whose gradients it gets


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """bench.main in an empty folder, with CFG as preset: (status, stdout, stderr)."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(T, "PRESETS", T.PRESETS | {"small": replace(CFG, data="nowhere")})
    monkeypatch.setattr(bench, "SECONDS", 0.0)  # a chunk is one period

    def run(*argv):
        status = bench.main(["small", *map(str, argv)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def calls(monkeypatch):
    """Programs that compute nothing: every call of one, and what it took and made, in order.

    An update must get the gradients that are due, and nothing else: of one step for the banks, of
    two for Adam's parameters, of two or four for the tables'. `calls.loss` is that of every step.
    """
    made = SimpleNamespace(all=[], loss=np.float32(3.0), seeds=[])

    def new_state():
        return {"params": {"ngram_table": object()}}

    def program(cfg, name, temporaries):
        def call(first, *rest):
            if name in UPDATES:
                due = rest[0]
                assert {*due} == {*T.updated(cfg, name)}
                assert {len(grads) for grads in due.values()} == {DUE[name]}
                assert len({grad for grads in due.values() for grad in grads}) == sum(
                    map(len, due.values())
                ), "every gradient once"
                out = new_state(), {x: object() for x in due}, np.float32(1)
                call = SimpleNamespace(name=name, took=first, made=out)
            else:
                out = {x: object() for x in T.param_table(cfg)}, made.loss, np.float32(0)
                table, batch = rest
                took, tokens = dict(first), batch.rows.tokens
                call = SimpleNamespace(name=name, took=took, tokens=tokens, made=out)
                call.table, call.wanted = table, batch.requests
            made.all.append(call)
            return out

        sizes = dict.fromkeys(("argument", "output", "alias"), 0) | {"temp": temporaries}
        memory = {f"{key}_size_in_bytes": size for key, size in sizes.items()}
        call.memory_analysis = lambda: SimpleNamespace(**memory)
        return call

    def compile_all(cfg, mesh, kernels, say):
        assert kernels == T.pick_kernels(cfg, jax.devices()[0])[0]
        names = [*NAMES[: len(cfg.stages)], *UPDATES]
        found = {name: program(cfg, name, (i + 1) * 2**20) for i, name in enumerate(names)}
        return found, {"compile_seconds": dict.fromkeys(names, 1.0), "settings": {}}

    monkeypatch.setattr(T, "compile_all", compile_all)

    def start(seed):
        made.seeds.append(int(seed))
        return new_state()

    def copy(params, seed):
        made.seeds.append(int(seed))
        return {x: object() for x in (*params, "head", "embed")}

    monkeypatch.setattr(T, "start_state", lambda *_: start)
    monkeypatch.setattr(T, "start_copies", lambda *_: copy)
    return made


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


def test_bench_times_every_stage_on_both_kinds_of_tokens(main, calls, shards, tmp_path):
    status, out, err = main("--data", shards, "--dump", tmp_path / "dump")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "small on 8 x cpu, each with 1/8 of every batch"
    assert f"jax {jax.__version__}" in lines[1] and lines[2].startswith("kernels: plain attention")
    report = json.loads((tmp_path / "dump/bench.json").read_text())
    rows = report["rows"]
    table = [line.split() for line in lines[-len(rows) - 1 :]]
    assert " ".join(table[0]) == "program tokens ms/step min max tokens/s of bf16 MiB"
    assert [(row["stage"], row["name"], row["tokens"]) for row in rows] == [
        (i, name, kind) for i, name in enumerate(NAMES) for kind in ("random", "real")
    ]
    assert [row["candidates"] for row in rows[::2]] == [48, 72, 0]
    assert [row["steps"] for row in rows[::2]] == [3, 3, 2]
    for row, cells in zip(rows, table[1:], strict=True):
        ms = np.divide(row["chunk_ms"], row["chunk_steps"])
        assert len(ms) == 5 and row["chunk_steps"] == DUE[EVENTS[row["stage"]]]
        assert row["ms"] == pytest.approx(np.median(ms))
        assert (row["ms_min"], row["ms_max"]) == (pytest.approx(min(ms)), pytest.approx(max(ms)))
        assert row["batch_tokens"] == CFG.stages[row["stage"]].batch_tokens
        assert row["tokens_per_second"] * row["ms"] == pytest.approx(1e3 * row["batch_tokens"])
        assert row["utilization"] is None and row["peak_so_far_mib"] > 1 and row["loss"] == 3
        figures = (f"{row[key]:.2f}" for key in ("ms", "ms_min", "ms_max"))
        rate, memory = f"{row['tokens_per_second']:,.0f}", f"{row['memory_mib']:,.0f}"
        assert cells == [row["name"], row["tokens"], *figures, rate, "-", memory]
    facts = (
        "source_sha256 versions host environment command choices config compile_seconds settings"
    )
    assert not {*facts.split()} - {*report} and "run_id" not in report
    assert report["parts"] == report["devices"]["count"] == 8
    assert {*report["compile_seconds"]} == {*NAMES, *UPDATES}
    left = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in left] == ["dump/bench.json"]


def test_steps_follow_each_other_as_in_training(main, calls, shards):
    """2 periods to get warm, 1 to learn how long they take, 5 that are timed; of two steps, or of
    four where events are as rare."""
    main("--data", shards, "--seed", 5)
    assert calls.seeds == [5, 5]
    rest = [call.name.rstrip("012") if call.name in NAMES else call.name for call in calls.all]
    for name, adam, event in zip(NAMES, ADAMS, EVENTS, strict=True):
        period = ["grads", "anvil", "grads", "anvil", adam]
        times = DUE[event] // 2
        want = (period * times + [event]) * 16  # for random and real tokens
        got, rest = rest[: len(want)], rest[len(want) :]
        assert got == want, name
    grads = [call for call in calls.all if call.name in NAMES]
    assert [call.name for call in grads] == ["grads0"] * 32 + ["grads1"] * 64 + ["grads2"] * 64
    for own in np.split(np.arange(160), [16, 32, 64, 96, 128]):
        assert len({id(grads[i].tokens) for i in own}) == 4
        assert len({id(grads[i].wanted) for i in own}) == 4
    updates = [call for call in calls.all if call.name in UPDATES]
    for before, call in zip(updates, updates[1:], strict=False):
        assert call.took is before.made[0], "one state, from step to step and stage to stage"
    newest, table = {}, calls.all[0].table
    for call in calls.all:
        if call.name in UPDATES:
            newest |= call.made[1]
            table = call.made[0]["params"]["ngram_table"]
        else:
            assert all(call.took[x] is copy for x, copy in newest.items()), "copies of the update"
            assert call.table is table


def test_mib_are_those_of_the_largest_program_with_what_stays_beside_it(main, calls, tmp_path):
    main("--dump", tmp_path / "dump")
    mesh, names = mesh_of(8), [*NAMES, *UPDATES]
    needs = {
        name: T.resident_bytes(CFG, mesh, name) / 2**20 + i + 1 for i, name in enumerate(names)
    }
    for i, row in enumerate(json.loads((tmp_path / "dump/bench.json").read_text())["rows"]):
        own = NAMES[i], "anvil", ADAMS[i], EVENTS[i]
        assert row["memory_mib"] == pytest.approx(max(needs[name] for name in own))


def test_utilization_is_of_the_peak_of_all_devices(main, calls, tmp_path, monkeypatch):
    monkeypatch.setitem(T.PEAK_FLOPS, "cpu", 1e9)
    _, out, _ = main("--dump", tmp_path / "dump")
    for row in json.loads((tmp_path / "dump/bench.json").read_text())["rows"]:
        step = CFG.boundaries[row["stage"]]
        want = row["tokens_per_second"] * T.flops_per_token(CFG, step) / 8e9
        assert row["utilization"] == pytest.approx(want)
        assert f"{want:.1%}" in out


def test_without_data_of_the_preset_the_tokens_are_random(main, calls):
    status, out, err = main()
    assert (status, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.startswith("random tokens only: ")]
    assert "no folder" in line and "nowhere" in line
    assert [line.split()[1] for line in out.splitlines()[-3:]] == ["random"] * 3


def test_it_goes_on_when_nobody_reads(main, calls, tmp_path, monkeypatch):
    """As after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main("--dump", tmp_path)[0] == 0
    assert (tmp_path / "bench.json").exists()


def test_a_loss_that_is_no_number_is_refused(main, calls, tmp_path):
    calls.loss = np.float32(math.nan)
    line = refused(main("--dump", tmp_path / "dump"))
    assert "grads0: the loss on random tokens is nan" in line
    assert not list((tmp_path / "dump").iterdir())


def test_the_real_programs_of_a_stage_train(monkeypatch):
    """Compiled as in a run; and it learns."""
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    cfg = replace(CFG, stages=CFG.stages[:1], extension=0, devices=1, data="nowhere")
    cfg = T.validate(replace(cfg, stages=(replace(cfg.stages[0], share=1.0),)))
    with quick_compilation():
        report = bench.bench(cfg, say=list().append)
    (row,) = report["rows"]
    assert {*report["compile_seconds"]} == {"grads0", *T.updates(cfg), "finish", "eval"}
    assert min(report["compile_seconds"].values()) > 0
    assert 0.1 < row["loss"] < math.log(CFG.real_tokens) - 0.05, "four batches, again and again"
    assert row["memory_mib"] > 0.5


# ------------------------------------------------------------------------------------------------
# PARTS
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "parts", "rows"), [(1, 8, 1), (1, 2, 4), (2, 8, 2), (8, 8, 8), (8, 1, 64)]
)
def test_each_device_has_the_rows_of_one_of_parts(main, calls, monkeypatch, devices, parts, rows):
    """So a device of few has the micro-batches that a device of all would have. And the part of the
    n-gram table."""
    batches = []
    monkeypatch.setattr(bench, "time_chunks", lambda period, run: pytest.fail("enough"))
    monkeypatch.setattr(T, "compile_all", lambda cfg, *_: batches.append(cfg) or ({}, {}))
    with pytest.raises(pytest.fail.Exception, match="enough"):
        main("--parts", parts, "--set", f"devices={devices}")
    assert [stage.rows for stage in batches[0].stages] == [rows] * 3
    assert [stage.row_tokens for stage in batches[0].stages] == [32, 64, 64]
    share = batches[0].ngram_rows / devices
    assert batches[0].ngram_rows % 2 == 0 and abs(share - CFG.ngram_rows / parts) < 2


def test_config_in_the_file_is_that_of_the_run(calls, monkeypatch):
    """And what is timed stands in its rows."""
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    stages = tuple(replace(stage, batch_tokens=2 * stage.batch_tokens) for stage in CFG.stages)
    report = bench.bench(replace(CFG, stages=stages, data="nowhere"), 16, say=list().append)
    assert report["parts"] == 16
    assert [stage["batch_tokens"] for stage in report["config"]["stages"]] == [512, 1024, 1024]
    assert [row["batch_tokens"] for row in report["rows"]] == [256, 512, 512]


# ------------------------------------------------------------------------------------------------
# Tokens and times
# ------------------------------------------------------------------------------------------------


def rows_of(batches):
    return [np.asarray(batch.rows.tokens) for batch in batches]


WORDS = [bytes([i]) for i in range(BOS)]


@pytest.mark.parametrize("step", [0, 3, 6])
def test_real_batches_are_the_first_of_the_stream(shards, step):
    """As training would cut them, aim them and ask for their n-grams."""
    stream, known = T.TokenStream(shards, "train", BOS), T.vocabulary(CFG, WORDS)
    batches = bench.step_batches(CFG, mesh_of(8), step, stream, WORDS)
    state = T.loader_state(CFG, mesh_of(8))
    for batch in batches:
        *want, state = T.next_batch(CFG, mesh_of(8), stream, known, step, state)
        jax.tree.map(np.testing.assert_array_equal, [batch.rows, batch.requests], want)
        for array in jax.tree.leaves((batch.rows, batch.requests)):
            assert len(array.sharding.device_set) == 8
        jax.tree.map(np.testing.assert_array_equal, batch.hyper, T.hyper_at(CFG, step))
    assert len(batches) == 4


def test_random_batches_are_uniform_with_documents_from_the_seed():
    long = [replace(s, batch_tokens=8 * 8192, row_tokens=8192) for s in CFG.stages]
    cfg = replace(CFG, stages=tuple(long))
    rows = rows_of(bench.step_batches(cfg, mesh_of(8), 6))
    assert {x.shape for x in rows} == {(8, 8193)} and {x.dtype for x in rows} == {np.dtype("u2")}
    counts = np.bincount(np.concatenate(rows).ravel(), minlength=CFG.vocab)
    assert counts[CFG.real_tokens :].sum() == 0
    total = counts.sum()
    # BOS: as often as any id, and once in 700 tokens beside. Five standard deviations.
    share = np.full(CFG.real_tokens, (1 - 1 / 700) / CFG.real_tokens)
    share[BOS] += 1 / 700
    assert np.all(abs(counts[: CFG.real_tokens] - total * share) < 5 * np.sqrt(total * share))
    again, other = (
        rows_of(bench.step_batches(replace(cfg, seed=seed), mesh_of(8), 6)) for seed in (0, 1)
    )
    np.testing.assert_array_equal(rows, again)
    assert len({x.tobytes() for x in rows + other}) == 8


def test_random_rows_have_as_many_ids_as_half_of_their_candidates():
    """So that none has more than there is room for; all aims are among them."""
    long = tuple(replace(s, batch_tokens=8 * 1024, row_tokens=1024) for s in CFG.stages)
    for batch in bench.step_batches(replace(CFG, stages=long), mesh_of(8), 0):
        tokens, aims = np.asarray(batch.rows.tokens), batch.rows.aims
        assert 24 <= len(np.unique(tokens)) <= 25
        ids = np.take_along_axis(np.asarray(aims.candidates), np.asarray(aims.targets), axis=1)
        np.testing.assert_array_equal(ids, tokens[:, 1:])


def test_a_program_is_timed_amid_its_steps():
    """So with the event that most of them have."""
    kinds = {(0, 48): [0, 1, 2], (1, 72): [3, 4, 5], (2, 0): [6, 7]}
    assert bench.kinds_of_steps(CFG) == kinds
    found = bench.kinds_of_steps(T.PRESETS["speedrun"])
    counts = {kind: (steps[len(steps) // 2], len(steps)) for kind, steps in found.items()}
    assert counts == {
        **{(0, 10_240): (160, 320), (1, 10_240): (500, 361), (2, 14_336): (823, 284)},
        **{(2, 24_576): (1036, 142), (3, 0): (1140, 67), (4, 0): (1184, 20)},
    }


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("speed", [0.001, 0.04, 7.0])  # seconds of a step
def test_chunks_are_long_enough_warm_and_whole_periods(period, speed):
    asked, rates = [], iter([1.0, 1.5, 1.1, 3.0, 0.9])

    def run(steps):
        asked.append(steps)
        late = len(asked) > 2 and asked[-1] == asked[-2]  # one of the chunks that count
        return steps * speed * (next(rates) if late else 1.0), float(len(asked))

    found = bench.time_chunks(period, run)
    assert asked[0] >= 2 * period and all(steps % period == 0 for steps in asked)
    assert asked[-5:] == [found["chunk_steps"]] * 5
    assert found["chunk_steps"] * speed >= 0.5
    assert found["chunk_steps"] * speed <= max(1.0, period * speed)
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
        (["--parts", "3"], "--parts 3: stages.0 has 8 rows, which 3 devices cannot share equally"),
        (["--parts", "16"], "--parts 16: stages.0 has 8 rows"),
        (["--parts", "-1"], "--parts -1: a positive number of devices, or none"),
        (["--parts", "all"], "argument --parts: invalid int value: 'all'"),
        (["--data", "nothing"], "no folder"),
        (["--set", "data=nothing"], "no folder"),
        (["--data", "."], "no train shards"),
        (["--dump", "/dev/null/x"], "--dump /dev/null/x: "),
        (["--dump", ""], "--dump is empty"),
        (["--show"], "unrecognized arguments: --show"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(main, monkeypatch, argv, words):
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))
    assert words in refused(main(*argv))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["out", "nosuch"], "unknown PART 'nosuch'; there are: check, tiles, bench, train, "),
        ([""], "OUT or --data is empty"),
        (["out", "--data", ""], "OUT or --data is empty"),
        (["out", "--data", "nothing"], "--data nothing: no such folder"),
        (["out", "--small", "--data", "."], "--small takes the built-in corpus: drop --data"),
        (["/dev/null/x", "--small"], "OUT /dev/null/x: "),
        (["out", "--parts"], "unrecognized arguments: --parts"),
        (["out"], "no NVIDIA GPU here, and no --small: error: there is none"),
    ],
)
def test_wrong_arguments_of_on_gpu_are_refused_in_one_line(
    tmp_path, monkeypatch, capsys, argv, words
):
    answer = SimpleNamespace(returncode=2, stderr="error: there is none\n")
    monkeypatch.setattr(on_gpu.subprocess, "run", lambda *_, **__: answer)
    monkeypatch.chdir(tmp_path)
    assert words in refused((on_gpu.main(argv), *capsys.readouterr()))
    assert not list(tmp_path.iterdir())


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
    assert words.format(folder) in refused(main("--data", folder))
