"""One whole run: its log, metrics and run.json, what happens inside the clock, how it can end."""

import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT
from programs import BUILT, CFG, key, mesh_of
from training import (
    BRIEF,
    arrays,
    assert_same_arrays,
    facts,
    metrics,
    steps_of,
    train_losses,
    trained,
    without_times,
)

import train_gpt as T

RULE = b"=" * 100 + b"\n"
COMMON = "step", "train_time_ms", "tokens", "dropped_ngrams"  # in every line of metrics.jsonl
TRAIN_LINE = re.compile(r"step:(\d+)/8 train_time:(\d+)ms step_avg:(\d+\.\d\d)ms")
VAL_LINE = re.compile(
    r"step:(\d+)/8 val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
)


@pytest.fixture(scope="module")
def train(shards):
    """train(cfg, out, ...) on the shards of the tests."""
    return lambda cfg, out, **options: trained(cfg, out, shards, **options)


@pytest.fixture(scope="module")
def run(train, tmp_path_factory):
    """The run that most tests look at: its folder, terminal lines, log and metrics.

    And `seen`: what jax compiled and what the run did, in order, and whether the clock ran then.
    """
    said, seen, now, threads = [], [], {"clock": False}, set(threading.enumerate())
    listening = True

    def on_event(name, *_, **__):
        if listening and name.startswith("/jax/core/compile"):
            seen.append((name, now["clock"]))

    def watch(patch, owner, name, event=None, clock=None):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if clock is not None:
                now["clock"] = clock
            if event:
                seen.append((event, now["clock"]))
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    jax.clear_caches()  # what an earlier test compiled on the way must be seen to be compiled again
    jax.monitoring.register_event_duration_secs_listener(on_event)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, T.Clock, "start", clock=True)
        watch(patch, T.Clock, "stop", clock=False)
        watch(patch, T.TokenStream, "_documents", event="documents")
        for name in ("next_rows", "evaluate", "own_arrays", "warm_up", "vocabulary"):
            watch(patch, T, name, event=name)
        patch.setattr(T, "KEPT", 99)
        folder = train(CFG, tmp_path_factory.mktemp("logs"), say=said.append)
    listening = False
    assert_ended(threads)
    log = folder / "log.txt"
    return SimpleNamespace(dir=folder, said=said, log=log, metrics=metrics(folder), seen=seen)


def assert_ended(threads: set):
    """No thread but those of `threads` goes on, after a moment: a batch in the making is made."""
    end = time.monotonic() + 5
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < end:
        time.sleep(0.01)  # not join(): what a pool of threads has not started cannot be waited for
    assert not left


def last_lines(run) -> list[str]:
    """The lines of log.txt after its second rule, without those of checkpoints."""
    lines = run.log.read_bytes().split(RULE)[2].decode().splitlines()
    return [line for line in lines if not line.startswith("checkpoint:")]


# ------------------------------------------------------------------------------------------------
# log.txt, metrics.jsonl, run.json, the terminal
# ------------------------------------------------------------------------------------------------


def test_log_begins_with_the_source_and_what_the_run_stands_on(run):
    source = (ROOT / "train_gpt.py").read_bytes()
    text = run.log.read_bytes()
    assert text.startswith(source)
    before, about, after = text[len(source) :].split(RULE)
    assert before.strip() == b"" and after
    lines = about.decode().splitlines()
    for package in ("jax", "jaxlib", "numpy"):
        assert f"{package} {importlib.metadata.version(package)}" in lines
    assert "8 x cpu (cpu)" in lines and "command: train 'this'" in lines
    for name in ("config", "host", "environment", "choices", "data"):
        assert f"{name}: {json.dumps(facts(run.dir)[name])}" in lines


def test_environment_is_what_jax_listens_to(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--flag")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("PYTHONPATH", "where a sitecustomize.py may be")
    for name in ("HF_TOKEN", "HOME", "NVIDIA_API_KEY", "MY_XLA_FLAGS"):
        monkeypatch.setenv(name, "mine")
    got = T.environment()
    assert got["XLA_FLAGS"] == "--flag" and got["NCCL_ALGO"] == "Ring" and got["PYTHONPATH"]
    assert got["JAX_PLATFORMS"] == "cpu" and "mine" not in got.values()
    assert list(got) == sorted(got)


def test_log_has_every_step_once_in_the_original_speedruns_format(run):
    *steps, dropped, last = last_lines(run)
    assert dropped == "n-grams that found no room: 0" and facts(run.dir)["dropped_ngrams"] == 0
    assert re.fullmatch(r"peak memory allocated: \d+ MiB", last)
    trained = [match for line in steps if (match := TRAIN_LINE.fullmatch(line))]
    validated = [match for line in steps if (match := VAL_LINE.fullmatch(line))]
    assert len(trained) + len(validated) == len(steps), "a line of another kind"
    assert [int(match[1]) for match in trained] == list(range(1, 9))
    assert [int(match[1]) for match in validated] == [0, 4, 8]
    order = [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert [line.split()[0] for line in steps] == [f"step:{step}/8" for step in order]


def test_times_in_the_log_grow_and_the_average_is_per_step(run):
    times, steps, averages = [], [], []
    for line in last_lines(run)[:-2]:
        steps.append(max(int(line[5 : line.index("/")]), 1))
        times.append(int(re.search(r"train_time:(\d+)ms", line)[1]))
        averages.append(float(re.search(r"step_avg:([\d.]+)ms", line)[1]))
    assert times == sorted(times) and times[-1] > 0
    # train_time is rounded to 1 ms, step_avg to 0.01 ms
    np.testing.assert_allclose(np.multiply(averages, steps), times, atol=0.5 + 0.005 * 8 + 1e-6)


def test_metrics_agree_with_the_log(run):
    lines = last_lines(run)[:-2]
    assert len(run.metrics) == len(lines)
    tokens = np.cumsum([0] + [T.stage_at(CFG, step).batch_tokens for step in range(8)]).tolist()
    for fields, line in zip(run.metrics, lines, strict=True):
        step, ms = fields["step"], fields["train_time_ms"]
        assert line.startswith(f"step:{step}/8 ") and fields["tokens"] == tokens[step]
        shown = int(re.search(r"train_time:(\d+)ms", line)[1])
        assert abs(shown - ms) < 0.501  # the metrics' ms are rounded too, to thousandths
        if match := VAL_LINE.fullmatch(line):
            assert {*fields} == {*COMMON, "val_loss"}
            assert float(match[2]) == pytest.approx(fields["val_loss"], abs=0.5e-4 + 1e-6)
        else:
            norms = ["grad_norm"] + ["grad_norm_adam"] * bool(T.schedule(CFG).adam[step - 1])
            norms += ["grad_norm_event"] * bool(T.schedule(CFG).tables[step - 1])
            assert {*fields} == {*COMMON, "train_loss", "lr", *norms}
            assert all(0 < fields[name] < 1e4 for name in norms)
            assert fields["lr"] == T.schedule(CFG).hyper.lr[step - 1]


def test_run_json_has_exactly_these_facts(run):
    got = facts(run.dir)
    shards = T.Path(got["config"]["data"]).glob("*.bin")
    source = (ROOT / "train_gpt.py").read_bytes()
    want = {
        "run_id": run.dir.name,
        "preset": "small",
        "config": json.loads(json.dumps(asdict(replace(CFG, data=got["config"]["data"])))),
        "seed": 0,
        "command": "train 'this'",
        "source_sha256": hashlib.sha256(source).hexdigest(),
        "versions": T.versions(),
        "devices": {"kind": "cpu", "count": 8, "platform": "cpu", "processes": 1},
        "host": T.host(),
        "environment": T.environment(),
        "choices": {"kernels": T.pick_kernels(CFG, jax.devices()[0])[1], "compiler_options": {}},
        "data": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in shards
        },
        "settings": {},
        "steps": 8,
        "tokens": 3 * 256 + 5 * 512,
        "val_loss": run.metrics[-1]["val_loss"],
        "train_time_ms": run.metrics[-1]["train_time_ms"],
        "dropped_ngrams": 0,
        "target": 10.0,
        "resumed": False,
        "finished": True,
    }
    seconds = got.pop("compile_seconds")
    assert got == want and got["choices"]["kernels"]
    assert seconds.keys() == T.programs(CFG, mesh_of(8), T.PLAIN).keys()
    assert min(seconds.values()) > 0
    assert {path.name for path in run.dir.iterdir()} == {
        "log.txt", "metrics.jsonl", "run.json", "checkpoints"
    }  # fmt: skip


def test_stored_config_is_the_config(run):
    stored = T.config_from_json(facts(run.dir)["config"])
    assert stored == replace(CFG, data=stored.data)


def test_terminal_says_how_it_went(run):
    assert run.said[0].startswith(f"run {run.dir} on 8 x cpu; kernels: ")
    assert sum("val_loss:" in line for line in run.said) == 3
    loss = facts(run.dir)["val_loss"]
    assert run.said[-1].startswith(f"target 10.0 met: val_loss {loss:.4f} after ")
    assert "3,328 tokens" in run.said[-1]


def test_terminal_has_the_first_step_and_every_log_every_th(train, tmp_path):
    said = []
    train(replace(CFG, log_every=3, target=0.5, checkpoint_every=0), tmp_path, say=said.append)
    steps = [line.split()[0] for line in said if " train_loss:" in line]
    assert steps == ["step:1/8", "step:3/8", "step:6/8"]
    assert said[-1].startswith("target 0.5 MISSED: ")


@pytest.mark.parametrize("kind, share", [("cpu", ""), ("NVIDIA H100 PCIe", "1.0%")])
def test_utilization_is_of_the_peak_of_all_devices(tmp_path, kind, share):
    cfg, said, now = replace(CFG, steps=100), [], [0.0]
    devices = {"kind": kind, "count": 4}
    start = {"devices": devices, "dropped_ngrams": 0}
    log = T.RunLog(cfg, tmp_path / "run", start, None, said.append)
    log.clock = SimpleNamespace(ms=lambda: now[0])
    # A hundred times as long as four devices at their peak take for the tokens of ten steps.
    flops = T.flops_per_token(cfg, 9) * cfg.tokens_after(10)
    now[0] = 100 * 1000 * flops / (4 * 756e12)
    log.trained(10, np.float32(1), np.float32(0), {"anvil": np.float32(math.inf)})
    log.flush()
    assert "grad_norm" not in metrics(tmp_path / "run")[0]  # which JSON cannot have
    assert re.findall(r"mfu:(\S+)", said[-1]) == [share] * bool(share)


def test_a_demonstration_ends_with_what_its_tool_says(train, tmp_path, monkeypatch):
    asked, said = [], []

    def demonstrate(cfg, run, stream, val_loss):
        asked.append((cfg.sample_tokens, facts(run)["finished"], len(stream), val_loss))
        return "and so it wrote"

    def run_tool(name, real=T.run_tool):
        return {"demonstrate": demonstrate} if name == "records/sample.py" else real(name)

    monkeypatch.setattr(T, "run_tool", run_tool)
    folder = train(replace(CFG, sample_tokens=5), tmp_path, say=said.append)
    loss = pytest.approx(facts(folder)["val_loss"], abs=1e-6)
    assert asked == [(5, True, 2000, loss)] and said[-1] == "and so it wrote"


def test_loss_falls_from_that_of_a_uniform_guess(run):
    """Of the candidates of the first step, of the vocabulary elsewhere."""
    losses, guess = train_losses(run.dir), math.log(CFG.vocab)
    few = math.log(CFG.stages[0].candidates[0])
    assert losses[0] == pytest.approx(few, abs=0.05)  # the head is small, not zero
    assert run.metrics[0]["val_loss"] == pytest.approx(guess, abs=0.05)
    assert losses[-1] < guess - 0.3 and facts(run.dir)["val_loss"] < guess - 0.3


def test_same_seed_same_run_and_other_seed_other_run(train, run, tmp_path):
    again = train(replace(CFG, checkpoint_every=0), tmp_path)  # saving changes nothing
    other = train(replace(CFG, seed=1), tmp_path)
    assert without_times(again) == without_times(run.dir)
    assert_same_arrays(arrays(again / "checkpoints/8"), arrays(run.dir / "checkpoints/8"))
    assert train_losses(other)[1:] != train_losses(run.dir)[1:]
    assert facts(other)["seed"] == 1


# ------------------------------------------------------------------------------------------------
# The clock, and what happens while it runs
# ------------------------------------------------------------------------------------------------


def test_nothing_compiles_while_the_clock_runs(run):
    compiled = [clock for name, clock in run.seen if name.startswith("/jax")]
    assert compiled.count(False) > 5, "the listener does not hear of compilations"
    assert compiled.count(True) == 0


def test_a_batch_whose_ngrams_all_have_one_owner_trains_on(train, tmp_path, monkeypatch):
    """Eight devices count what finds no room, over a resume too; one, which has room for all,
    trains as if the owners were asked for equally many."""
    cfg, seen = replace(BRIEF, ngram_rows=2**15, devices=1), []
    real = T.ngram_ids

    def noted(x_bt, rows):
        ids = real(x_bt, rows)
        seen.append(np.unique(ids))
        return ids

    monkeypatch.setattr(T, "ngram_ids", noted)
    want = train(cfg, tmp_path / "even")
    last = cfg.ngram_rows - 1  # of trigrams without history, which has the first place
    used = np.setdiff1d(np.concatenate(seen), last)
    order = [last, *used, *np.setdiff1d(np.arange(last), used)]
    moved = np.argsort(order)
    assert moved[used].max() < cfg.ngram_rows // 8
    monkeypatch.setattr(T, "table_rows", lambda ids, rows: moved[ids])
    one = train(cfg, tmp_path / "one")
    np.testing.assert_allclose(train_losses(one), train_losses(want), rtol=2e-6)
    assert facts(one)["val_loss"] == pytest.approx(facts(want)["val_loss"], rel=2e-6)
    assert facts(one)["dropped_ngrams"] == facts(want)["dropped_ngrams"] == 0

    cfg = replace(cfg, devices=8)
    eight = train(cfg, tmp_path / "eight")
    counts = {row["step"]: row["dropped_ngrams"] for row in metrics(eight) if "lr" in row}
    total = sum(row["dropped_ngrams"] for row in metrics(eight))
    assert min(counts.values()) > 0 and facts(eight)["finished"] is True
    assert facts(eight)["dropped_ngrams"] == total < 2 * (cfg.total_tokens + cfg.val_tokens)
    assert f"\nn-grams that found no room: {total}\n" in (eight / "log.txt").read_text()
    np.testing.assert_allclose(train_losses(eight), train_losses(one), atol=0.05)
    kept = json.loads((eight / "checkpoints/2/meta.json").read_text())["checkpoint"]
    at_the_start = metrics(eight)[0]["dropped_ngrams"]  # of the validation before all steps
    assert kept["dropped_ngrams"] == at_the_start + counts[1] + counts[2]
    shutil.rmtree(eight / "checkpoints/4")
    saved = T.find_checkpoint(eight)
    assert saved.step == 2
    again = train(cfg, tmp_path, saved=saved)
    assert again == eight and facts(eight)["dropped_ngrams"] == total


def test_clock_runs_while_data_is_loaded_and_stands_while_validating(run):
    clock = {name: [on for what, on in run.seen if what == name] for name, _ in run.seen}
    assert clock["next_rows"][0] is True and len(clock["next_rows"]) == CFG.steps
    assert clock["evaluate"] == [False] * 3  # after 0, 4 and 8 steps
    assert clock["own_arrays"] == [True] * 2 + [False]  # checkpoints on the way, and the last one
    assert clock["warm_up"] == [False]
    # The tables of documents and of the vocabulary are made from the data, so once more inside.
    assert clock["vocabulary"].count(True) == 1
    assert clock["documents"][0] is False and clock["documents"][-1] is True


def test_loader_rests_while_the_clock_stands(train, tmp_path, monkeypatch):
    """But for what it draws when the clock stops. It would need 0.05 s for a batch."""
    drawn, while_validating = [], []

    def next_rows(*args, real=T.next_rows):
        time.sleep(0.05)
        drawn.append(args)
        return real(*args)

    def evaluate(*args, real=T.evaluate):
        before = len(drawn)
        time.sleep(0.4)
        while_validating.append(len(drawn) - before)
        return real(*args)

    monkeypatch.setattr(T, "next_rows", next_rows)
    monkeypatch.setattr(T, "evaluate", evaluate)
    train(replace(CFG, prefetch=8, checkpoint_every=0), tmp_path)
    at_the_start, after_4, at_the_end = while_validating
    assert at_the_start == 0 and after_4 <= 1 and at_the_end == 0


@pytest.mark.parametrize("missing", ["grads1", "adam"])
def test_a_program_that_was_not_compiled_is_a_key_error(train, run, tmp_path, monkeypatch, missing):
    programs, told = BUILT[key(CFG, 8)]
    programs = {name: program for name, program in programs.items() if name != missing}
    monkeypatch.setitem(BUILT, key(CFG, 8), (programs, told))
    monkeypatch.setattr(T, "warm_up", lambda *_: None)
    with pytest.raises(KeyError, match=missing):
        train(CFG, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert facts(folder)["finished"] is False


def test_a_loader_that_fails_ends_the_run_with_its_error(train, tmp_path, monkeypatch):
    threads = set(threading.enumerate())

    def next_rows(*args, real=T.next_rows):
        if len(drawn) == 3:
            raise OSError(5, "Input/output error", "small_train_000001.bin")
        drawn.append(args)
        return real(*args)

    drawn = []
    monkeypatch.setattr(T, "next_rows", next_rows)
    with pytest.raises(OSError, match="Input/output error: 'small_train_000001.bin'"):
        train(replace(CFG, checkpoint_every=0), tmp_path)
    (folder,) = tmp_path.iterdir()
    # The steps whose batches came before it are done; nobody waited for the loss of the last one.
    assert len(train_losses(folder)) == 2 and facts(folder)["finished"] is False
    assert_ended(threads)


def test_a_loader_that_stalls_is_reported_and_waited_for(train, run, tmp_path, monkeypatch):
    drawn, reported = [], threading.Event()

    def next_rows(*args, real=T.next_rows):
        drawn.append(args)
        assert len(drawn) != 3 or reported.wait(30)
        return real(*args)

    def say(line):
        if line.startswith("waiting for the loader"):
            reported.set()

    monkeypatch.setattr(T, "next_rows", next_rows)
    monkeypatch.setattr(T, "STALL_SECONDS", 0.2)
    folder = train(replace(CFG, checkpoint_every=0), tmp_path, say=say)
    assert without_times(folder) == without_times(run.dir)


def replaced(path):
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes()[::-1])
    os.replace(other, path)


@pytest.mark.parametrize("change", [replaced, os.remove])
@pytest.mark.parametrize("name", ["small_train_000002.bin", "small_val_000000.bin"])
def test_a_run_goes_on_with_the_shards_that_it_has_opened(
    run, shards, tmp_path, monkeypatch, name, change
):
    """Whatever takes their names."""
    folder = shutil.copytree(shards, tmp_path / "data")

    def logged(self, step, *args, real=T.RunLog.trained):
        if step == 3:
            change(folder / name)
        return real(self, step, *args)

    monkeypatch.setattr(T.RunLog, "trained", logged)
    again = trained(replace(CFG, checkpoint_every=0), tmp_path / "logs", folder)
    assert without_times(again) == without_times(run.dir)


def test_a_folder_that_vanishes_does_not_end_the_run(train, tmp_path, monkeypatch):
    """What can be written still is."""
    said = []

    def logged(self, step, *args, real=T.RunLog.trained):
        if step == 3:
            shutil.rmtree(self.folder)
        return real(self, step, *args)

    monkeypatch.setattr(T.RunLog, "trained", logged)
    train(replace(CFG, checkpoint_every=0), tmp_path, say=said.append)
    assert sum("cannot write" in line and "the run goes on" in line for line in said) == 1
    (folder,) = tmp_path.iterdir()
    assert steps_of(folder) == ["8"]


def test_a_terminal_that_cannot_be_written_does_not_end_the_run(train, tmp_path):
    """As below `| head -5`, or on a full disk; what its buffer holds must not fail later either."""
    for path, closes in (("/dev/full", False), (None, True)):
        read, write = os.pipe()
        terminal = open(path or write, "w")
        if closes:
            os.close(read)
        T.tell("first", terminal)
        folder = train(
            replace(CFG, checkpoint_every=0), tmp_path, say=partial(T.tell, stream=terminal)
        )
        assert facts(folder)["finished"] is True
        terminal.close()  # flushes


def test_profile_writes_a_trace(train, tmp_path, monkeypatch):
    monkeypatch.setattr(T, "PROFILED", range(2, 4))
    folder = train(replace(CFG, checkpoint_every=0), tmp_path, profile=True)
    assert list((folder / "profile").rglob("*.xplane.pb"))


def test_profile_needs_a_step_after_the_profiled_ones(train, tmp_path, monkeypatch):
    monkeypatch.setattr(T, "PROFILED", range(6, 8))
    with pytest.raises(T.UserError, match="--profile needs more than 8 steps"):
        train(CFG, tmp_path, profile=True)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------
# When checkpoints are taken
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every, want", [(1, "248"), (3, "48"), (4, "48"), (5, "8"), (0, "8")])
def test_checkpoints_are_taken_at_the_first_chance_after_each_period(
    train, tmp_path, monkeypatch, every, want
):
    """Not after an odd number of steps, when gradients wait for Adam, nor after 6, when those of
    tables wait for an event; and at the end."""
    monkeypatch.setattr(T, "KEPT", 99)
    folder = train(replace(CFG, checkpoint_every=every), tmp_path)
    assert steps_of(folder) == list(want)
    log = (folder / "log.txt").read_text()
    lines = re.findall(r"^checkpoint:(\d) held the loop for \d+\.\dms, \d", log, re.MULTILINE)
    assert lines == list(want)


@pytest.mark.parametrize(
    "period, last, step, due",
    [
        *((4, 0, 3, False), (4, 0, 4, True), (4, 0, 5, True), (4, 5, 7, False), (4, 5, 8, True)),
        *((4, 8, 8, False), (1, 7, 8, True), (100, 0, 350, True), (0, 0, 8, False)),
    ],
)
def test_the_periods_are_multiples_counted_from_the_start(period, last, step, due):
    """Wherever the last one was taken, so that a resumed run takes them where the first would."""
    assert T.is_due(period, last, step) is due


def test_two_checkpoints_are_kept(train, tmp_path):
    assert steps_of(train(CFG, tmp_path)) == ["4", "8"]


def test_the_end_is_not_saved_if_that_is_not_wanted(train, run, tmp_path):
    folder = train(replace(CFG, checkpoint_end="never"), tmp_path)
    assert steps_of(folder) == ["2", "4"] and facts(folder)["finished"] is True
    assert without_times(folder) == without_times(run.dir)
    folder = train(replace(CFG, checkpoint_end="never", checkpoint_every=0), tmp_path)
    assert not (folder / "checkpoints").exists()


def test_the_end_is_saved_by_itself_if_it_takes_at_most_10_gb():
    """The record without n-grams takes 5.0 GB, of which averages are 1.4; a row of them 1540 bytes:
    768 numbers in bfloat16 and a second moment."""
    state = T.map_state(T.Config(), lambda shape, dtype, row: math.prod(shape) * dtype.itemsize)
    rest = sum(sum(of.values()) for of in state.values()) - 1540 * T.Config().ngram_rows
    assert rest == pytest.approx(5.047e9, rel=1e-3)
    most = int(10e9 - rest) // 1540 // 2 * 2
    fits, large = (replace(T.Config(), ngram_rows=rows) for rows in (most, most + 2))
    kept = {"auto": (True, False), "always": (True, True), "never": (False, False)}
    for end, want in kept.items():
        assert tuple(T.keeps_end(replace(c, checkpoint_end=end)) for c in (fits, large)) == want
    assert T.keeps_end(CFG) and not T.keeps_end(T.PRESETS["speedrun"])


# ------------------------------------------------------------------------------------------------
# A run that diverges
# ------------------------------------------------------------------------------------------------


def test_loss_that_is_not_finite_stops_the_run(train, tmp_path, monkeypatch):
    real = T.hyper_at
    broken = np.float32(math.nan)
    monkeypatch.setattr(T, "hyper_at", lambda cfg, step: real(cfg, step)._replace(lr=broken))
    with pytest.raises(T.UserError, match=r"^the loss of step 2 is nan: lower .*lr_anvil") as error:
        train(replace(CFG, checkpoint_every=0), tmp_path)
    (folder,) = tmp_path.iterdir()
    assert "\n" not in str(error.value) and str(folder / "metrics.jsonl") in str(error.value)
    assert facts(folder)["finished"] is False and not (folder / "checkpoints").exists()
    assert len(train_losses(folder)) == 1  # a loss that is no number is no JSON either


@pytest.mark.parametrize("loss", [math.nan, math.inf, 3 * math.log(CFG.vocab)])
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(
    train, run, tmp_path, monkeypatch, loss
):
    """Also if that is being written when the loss of the next step arrives."""

    def losses(self, step, now, *more, real=T.RunLog.trained):
        return real(self, step, np.float32(loss) if step == 5 else now, *more)

    def slowly(*args, real=T.write_checkpoint):
        time.sleep(0.2)
        return real(*args)

    monkeypatch.setattr(T.RunLog, "trained", losses)
    monkeypatch.setattr(T, "write_checkpoint", slowly)
    with pytest.raises(T.UserError, match=r"^the loss of step 5 is .*: lower the learning rates"):
        train(CFG, tmp_path)
    (folder,) = tmp_path.iterdir()
    saved = T.find_checkpoint(folder)
    assert saved.step == 4
    assert_same_arrays(arrays(saved.folder), arrays(run.dir / "checkpoints/4"))


# ------------------------------------------------------------------------------------------------
# A full disk
# ------------------------------------------------------------------------------------------------


EIGHT = replace(BRIEF, steps=8)  # checkpoints of 2, 4, 6 and 8


@pytest.fixture(scope="module")
def eight(train, tmp_path_factory):
    """The folder of a run of EIGHT on a good disk."""
    return train(EIGHT, tmp_path_factory.mktemp("eight"))


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_full_disk_during_a_checkpoint_does_not_end_the_run(train, eight, tmp_path, monkeypatch):
    """It says so, leaves nothing half, and the next checkpoint is written when there is room."""
    said, kept = [], []

    def whole_file(path, real=T.whole_file):
        if (path.parent.name, path.name) in ((".4", "0.npz"), (".6", "meta.json")):
            kept.append(steps_of(path.parents[2]))
            no_space()
        return real(path)

    monkeypatch.setattr(T, "whole_file", whole_file)
    folder = train(EIGHT, tmp_path, say=said.append)
    assert kept == [[".4", "2"], [".6", "2"]]
    warnings = [line for line in said if line.startswith("warning")]
    assert len(warnings) == 2
    assert all(line.endswith("No space left on device; older ones stay") for line in warnings)
    assert steps_of(folder) == ["2", "8"]
    assert_same_arrays(arrays(folder / "checkpoints/8"), arrays(eight / "checkpoints/8"))
    assert train_losses(folder) == train_losses(eight) and facts(folder)["finished"] is True


def test_disk_that_stays_full_leaves_the_last_good_checkpoint(train, eight, tmp_path, monkeypatch):
    """The run is done and its numbers are there; that its end was not saved is an error."""

    def whole_file(path, real=T.whole_file):
        of_another_step = path.parents[1].name == "checkpoints" and path.parent.name != ".2"
        return no_space() if of_another_step else real(path)

    monkeypatch.setattr(T, "whole_file", whole_file)
    with pytest.raises(T.UserError, match="has ended well, but there is no checkpoint of step 8: "):
        train(EIGHT, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert facts(folder)["finished"] is True and without_times(folder) == without_times(eight)
    assert steps_of(folder) == ["2"] and T.find_checkpoint(folder).step == 2


class Full:
    """A file on a disk that takes only a part of a line, then nothing for a while."""

    def __init__(self, file, calls):
        self.file, self.calls = file, calls

    def write(self, data):
        if 3 < (call := next(self.calls)) < 20:
            return self.file.write(data[:7]) if call % 5 == 0 else no_space()
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_full_disk_under_the_log_does_not_end_the_run(train, run, tmp_path, monkeypatch):
    """No byte is lost, and a checkpoint counts those that wait to be written."""
    said, calls = [], iter(range(10**6))

    def opened(self, *args, real=T.RunLog.__init__):
        real(self, *args)
        self.files = {name: Full(file, calls) for name, file in self.files.items()}

    monkeypatch.setattr(T.RunLog, "__init__", opened)
    folder = train(CFG, tmp_path, say=said.append)
    assert sum("cannot write" in line and "the run goes on" in line for line in said) == 1
    assert without_times(folder) == without_times(run.dir)
    got, want = ((x / "log.txt").read_bytes().split(RULE)[2] for x in (folder, run.dir))
    names = [[line.split()[0] for line in text.splitlines()] for text in (got, want)]
    assert sorted(names[0]) == sorted(names[1])
    saved = T.find_checkpoint(folder)
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert metrics[: saved.logs["metrics.jsonl"]].endswith(b"\n") and saved.step == 8


def test_disk_that_is_full_from_the_beginning_ends_the_run_before_it_compiles(
    train, tmp_path, monkeypatch
):
    """Also one that takes the empty files and run.json, but not the source in the log."""
    full = open("/dev/full", "ab", buffering=0)
    monkeypatch.setattr(T, "claim", lambda folder, name: full)
    monkeypatch.setattr(T, "compile_all", partial(pytest.fail, "went on to compile"))
    with pytest.raises(T.UserError, match="cannot write .*No space left on device.*another --out"):
        train(CFG, tmp_path)


def test_run_json_that_cannot_be_written_does_not_end_the_run(train, tmp_path, monkeypatch):
    """After the start, at which it ends before anything is compiled."""
    said, calls = [], []

    def replaced(source, target, real=os.replace):
        if str(target).endswith("run.json"):
            calls.append(target)
            if 1 < len(calls) < 4:
                no_space()
        real(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    folder = train(CFG, tmp_path, say=said.append)
    assert sum("cannot write" in line for line in said) == 1 and len(calls) > 4
    assert facts(folder)["finished"] is True

    monkeypatch.setattr(os, "replace", no_space)
    monkeypatch.setattr(T, "compile_all", partial(pytest.fail, "went on to compile"))
    with pytest.raises(T.UserError, match=r"cannot write .*\(No space left on device\): name "):
        T.train(replace(CFG, data=facts(folder)["config"]["data"]), tmp_path, "")
