"""Runs that are stopped and go on exactly as if nothing had been; signals; what is not resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import documents, write_shard
from programs import CFG
from training import (
    BRIEF,
    arrays,
    assert_same_arrays,
    back_to,
    facts,
    metrics,
    steps_of,
    train_losses,
    trained,
    without_times,
)

import train_gpt as T

RULE = b"=" * 100 + b"\n"
EIGHT = replace(BRIEF, steps=8, val_every=4, devices=2)  # checkpoints are possible at even steps
ONCE = replace(EIGHT, checkpoint_every=0)


@pytest.fixture(scope="module")
def train(shards):
    """train(cfg, out, saved=None, ...) on the shards of the tests."""
    return lambda cfg, out, saved=None, **options: trained(cfg, out, shards, saved, **options)


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> T.Path:
    """The folder of a run that nobody interrupted, with the checkpoints of 4 and 8 steps."""
    return train(replace(EIGHT, checkpoint_every=4), tmp_path_factory.mktemp("logs"))


@pytest.fixture
def copy(run, tmp_path) -> T.Path:
    """A copy of its folder, which a test may change."""
    return shutil.copytree(run, tmp_path / run.name)


@pytest.fixture(autouse=True)
def signals_as_they_were():
    """A run listens to them until its process ends."""
    before = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def content(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_in_log(run) -> list[str]:
    text = (run / "log.txt").read_text()
    return [line.split()[0] for line in text.splitlines() if line.startswith("step:")]


# ------------------------------------------------------------------------------------------------
# Exactly
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [EIGHT, pytest.param(CFG, marks=pytest.mark.slow)], ids=["1", "3"])
def test_resumed_run_ends_exactly_as_the_uninterrupted_one(train, tmp_path, cfg):
    """Bit for bit: the same programs on the same numbers. Of one stage, and of three.

    After 4 of 8 steps, amid packed rows, where a validation has been, averages have begun, and (of
    three) the last step of the tied head is to come. Rows have walked a part of the way through the
    vocabulary.
    """
    whole = train(replace(cfg, checkpoint_every=4), tmp_path)
    last = arrays(whole / "checkpoints/8")
    run = shutil.copytree(whole, tmp_path / "run")
    said, saved = [], back_to(run, 4)
    assert T.LoaderState(0, ()) < saved.loader < T.find_checkpoint(whole).loader
    assert train(saved.cfg, tmp_path, saved, say=said.append) == run
    got, want = facts(run), facts(whole)
    assert_same_arrays(arrays(run / "checkpoints/8"), last)
    assert without_times(run) == without_times(whole)  # every step once
    assert steps_in_log(run) == steps_in_log(whole)
    times = [line["train_time_ms"] for line in metrics(run)]
    assert times == sorted(times)
    assert (got["resumed"], got["finished"], got["run_id"]) == (True, True, "run")
    assert all(got[name] == want[name] for name in ("steps", "tokens", "val_loss"))
    log = (run / "log.txt").read_bytes()
    assert log.count(RULE) == 4 and log.split(RULE)[3].startswith(b"resumed\npython ")
    assert any(line.startswith("resumed after 4 of 8 steps from ") for line in said)


@pytest.mark.parametrize("after", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_resumes_on_another_number_of_devices(train, run, copy, after):
    """As far as sums in another order allow. Other numbers have other padding, 1 has none."""
    saved = back_to(copy, 4)
    train(replace(saved.cfg, devices=after), copy.parent, saved)
    assert facts(copy)["devices"]["count"] == after and facts(run)["devices"]["count"] == 2
    want, end = train_losses(run), arrays(run / "checkpoints/8")
    assert train_losses(copy)[:4] == want[:4]
    np.testing.assert_allclose(train_losses(copy), want, rtol=2e-5)
    got = arrays(copy / "checkpoints/8")
    for name in end:
        np.testing.assert_allclose(got[name], end[name], rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(("stored", "there", "want"), [(8, 4, 0), (2, 8, 2), (0, 8, 0)])
def test_stored_number_of_devices_counts_if_they_are_there_and_data_may_have_moved(
    monkeypatch, tmp_path, stored, there, want
):
    cfg, seen = replace(CFG, devices=stored), []
    saved = T.Saved(tmp_path / "run/checkpoints/4", cfg, 4, None, {})
    monkeypatch.setattr(T, "find_checkpoint", lambda *_: saved)
    monkeypatch.setattr(T, "all_devices", lambda: jax.devices()[:there])
    monkeypatch.setattr(T, "train", lambda cfg, *_: seen.append((cfg.devices, cfg.data)))
    for options in ((), ("--data", "y")):
        assert T.main(["--resume", "x", *options]) == 0
    assert seen == [(want, CFG.data), (want, "y")]


def test_a_run_goes_on_from_the_checkpoint_that_is_named(train, run, copy):
    """What was logged after it is dropped, also half a line, which a crash may leave."""
    (copy / "run.json").unlink()  # the checkpoint is what counts
    for name in ("metrics.jsonl", "log.txt"):
        with open(copy / name, "a") as file:
            file.write('{"step": 9, "tra')
    saved = T.find_checkpoint(copy / "checkpoints/4")
    assert saved.step == 4
    train(saved.cfg, copy.parent, saved)
    assert steps_of(copy) == ["4", "8"] and facts(copy)["finished"] is True
    assert without_times(copy) == without_times(run) and steps_in_log(copy) == steps_in_log(run)
    assert_same_arrays(arrays(copy / "checkpoints/8"), arrays(run / "checkpoints/8"))


def test_a_damaged_checkpoint_is_passed_over_and_replaced(train, run, copy):
    said = []
    back_to(copy, 8)
    (copy / "checkpoints/8/params.embed.0.npy").write_bytes(b"")
    (copy / "checkpoints/.8").mkdir()  # of a writer that was killed
    saved = T.find_checkpoint(copy, said.append)
    assert saved.step == 4 and said[0].startswith("warning: ")
    train(saved.cfg, copy.parent, saved)
    assert steps_of(copy) == ["4", "8"]
    assert_same_arrays(arrays(copy / "checkpoints/8"), arrays(run / "checkpoints/8"))


# ------------------------------------------------------------------------------------------------
# What is not resumed, or not from there
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [[4, 8], [4], []])
def test_finished_run_is_not_resumed(copy, capsys, kept):
    """Whichever checkpoints it has kept."""
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name) not in kept:
            shutil.rmtree(folder)
    before = content(copy)
    assert T.main(["--resume", str(copy)]) == 2
    line = f"{copy} is finished: there is nothing to resume" if kept else "no checkpoint in "
    assert line in capsys.readouterr().err
    assert content(copy) == before


def test_a_run_whose_last_checkpoint_alone_was_written_is_not_resumed(copy, capsys):
    """The process ended before run.json could say that the run has; no step is left."""
    back_to(copy, 8)
    assert T.main(["--resume", str(copy)]) == 2
    assert "is finished: there is nothing to resume" in capsys.readouterr().err


def test_run_is_not_resumed_on_other_tokens(copy, shards, tmp_path):
    """With as many of them, and the same files but for one token."""
    other = shutil.copytree(shards, tmp_path / "other")
    tokens = documents(1, 3000)
    tokens[7] += 1
    write_shard(other / "small_train_000001.bin", tokens)
    saved = back_to(copy, 4)
    before = content(copy)
    with pytest.raises(T.UserError, match="does not hold the shards of .*: name their --data"):
        trained(saved.cfg, copy.parent, other, saved)
    assert content(copy) == before


def test_changed_source_is_named(train, copy):
    """And stands in the log, as the first one does."""
    said, saved = [], back_to(copy, 4)
    saved.meta["source_sha256"] = "0"
    train(saved.cfg, copy.parent, saved, say=said.append)
    assert any("train_gpt.py has changed since" in line for line in said)
    source, first, steps, second, rest = (copy / "log.txt").read_bytes().split(RULE, 4)
    after = f"resumed\nsource: {facts(copy)['source_sha256']}\n".encode()
    assert second == after + source and rest.startswith(b"python ") and b"resumed" not in steps


def test_how_a_run_is_computed_may_change_when_it_goes_on(copy, monkeypatch, capsys):
    """What decides the loss may not; the log has the config that counts from there on."""
    back_to(copy, 4)
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))
    assert T.main(["--resume", str(copy), "--set", "lr_anvil=1"]) == 2
    words = "drop PRESET, --seed, --show, --set but for devices, kernels, "
    assert words in capsys.readouterr().err
    before = (copy / "log.txt").read_text()
    with pytest.raises(pytest.fail.Exception):
        T.main(["--resume", str(copy), "--set", "recompute=1", "loss_chunk=32"])
    config = facts(copy)["config"]
    assert (config["recompute"], config["loss_chunk"], config["steps"]) == (True, 32, 8)
    head = (copy / "log.txt").read_text()[len(before.split("step:5/")[0]) :]
    assert f"\nconfig: {json.dumps(config)}\n" in head


def test_a_run_that_another_process_writes_is_not_resumed(copy, capsys, monkeypatch):
    """It ends before it writes, and may go on when the other has ended, however that was."""
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))
    back_to(copy, 4)
    code = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, 2); print(flush=True)"
    words = [sys.executable, "-c", f"{code}; input()", str(copy / "log.txt")]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    before = content(copy)
    assert T.main(["--resume", str(copy)]) == 2
    assert f"another process writes {copy}: wait, or end it" in capsys.readouterr().err
    assert content(copy) == before
    other.kill()
    other.communicate()
    with pytest.raises(pytest.fail.Exception, match="went on to compile"):
        T.main(["--resume", str(copy)])


def test_a_new_run_is_locked_while_it_runs(train, tmp_path, monkeypatch):
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), 6)"

    def end(self, *args, real=T.RunLog.end):
        words = [sys.executable, "-c", code, self.folder / "log.txt"]
        tries.append(subprocess.run(words, capture_output=True).returncode)
        return real(self, *args)

    tries = []
    monkeypatch.setattr(T.RunLog, "end", end)
    train(ONCE, tmp_path)
    assert tries == [1]


# ------------------------------------------------------------------------------------------------
# Signals
# ------------------------------------------------------------------------------------------------


def signal_at(patch, number: int, at: int):
    """The process gets a signal when the loss of step `at` is logged, while the next one runs."""

    def line(self, step, *args, real=T.RunLog.line, **more):
        if step == at:
            os.kill(os.getpid(), number)
        return real(self, step, *args, **more)

    patch.setattr(T.RunLog, "line", line)


@pytest.mark.parametrize(
    "number, at, stop",
    [(signal.SIGTERM, 3, 4), (signal.SIGINT, 2, 4), (signal.SIGHUP, 1, 2)],
    ids=["SIGTERM", "Ctrl-C", "closed terminal"],
)
def test_a_signal_saves_and_ends_the_run_where_no_gradients_wait(
    train, run, tmp_path, monkeypatch, number, at, stop
):
    """The command that it prints leads to the same end as if nothing had been."""
    said, out = [], tmp_path / "my logs"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with monkeypatch.context() as patch:
        signal_at(patch, number, at)
        with pytest.raises(SystemExit) as stopped:
            train(ONCE, out, say=said.append)
    (folder,) = out.iterdir()
    assert stopped.value.code == 128 + number
    again = f"to continue: python train_gpt.py --resume '{folder}'"
    assert said[-1] == f"stopped after {stop} of 8 steps; {again}"
    assert steps_of(folder) == [str(stop)]
    saved, got = T.find_checkpoint(folder), facts(folder)
    assert (got["finished"], got["steps"], got["tokens"]) == (False, stop, 256 * stop)
    assert got["train_time_ms"] == pytest.approx(saved.meta["train_time_ms"], abs=500)
    train(saved.cfg, out, saved)
    assert without_times(folder) == without_times(run)
    assert_same_arrays(arrays(folder / "checkpoints/8"), arrays(run / "checkpoints/8"))


def test_a_signal_before_the_last_step_is_too_late(train, tmp_path, monkeypatch):
    signal_at(monkeypatch, signal.SIGTERM, 7)
    assert facts(train(ONCE, tmp_path))["finished"] is True


def test_a_stop_before_the_first_step_can_be_resumed_and_stopped_again(
    train, run, tmp_path, monkeypatch
):
    """As when the signal comes amid compilation: nothing is saved twice."""
    out = tmp_path / "logs"
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(T, "ask_to_stop", lambda: lambda step: signal.SIGTERM)
            folders = list(out.glob("*"))
            saved = T.find_checkpoint(folders[0]) if folders else None
            with pytest.raises(SystemExit):
                train(saved.cfg if saved else ONCE, out, saved)
    (folder,) = out.iterdir()
    assert steps_of(folder) == ["0"]
    saved = T.find_checkpoint(folder)
    train(saved.cfg, out, saved)
    assert without_times(folder) == without_times(run)


def test_a_stop_that_could_not_be_saved_is_an_error(train, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    signal_at(monkeypatch, signal.SIGTERM, 3)
    monkeypatch.setattr(T, "write_checkpoint", full)
    words = r"^stopped after 4 steps, but there is no checkpoint of step 4: .*No space"
    with pytest.raises(T.UserError, match=words):
        train(ONCE, tmp_path)


def test_the_same_signal_twice_is_one_wish_and_later_it_ends_the_process(monkeypatch):
    """`timeout` tells the process and its group; a person presses Ctrl-C again after a while."""
    ended, now = [], [0.0]
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = T.ask_to_stop()
    assert asked(0) == 0
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        assert asked(1) == signal.SIGINT
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked(2) == signal.SIGINT and not ended  # the first of them
    now[0] = 2.0
    os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]


def test_nohup_is_heeded_and_ctrl_c_ends_at_once_where_nothing_could_be_saved():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked = T.ask_to_stop()
    os.kill(os.getpid(), signal.SIGHUP)
    assert asked(1) == 0
    for before, after in (
        (signal.default_int_handler, signal.SIG_DFL),
        (signal.SIG_IGN, signal.SIG_IGN),  # as a shell starts what ends with `&`
    ):
        signal.signal(signal.SIGINT, before)
        assert T.main(["tiny", "--show"]) == 0
        assert signal.getsignal(signal.SIGINT) is after


def test_one_of_several_processes_tells_jax_of_ctrl_c(monkeypatch):
    """Which then stops all of them at one step, with a checkpoint."""
    from jax.experimental import multihost_utils

    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: step == 3)
    asked = T.ask_to_stop()
    assert asked(1) == 0
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    assert heard == [signal.SIGTERM] * 2
    # Gradients may wait at the step at which all could stop: so it holds from there on.
    assert [asked(step) for step in (2, 3, 4)] == [0, signal.SIGTERM, signal.SIGTERM]


# ------------------------------------------------------------------------------------------------
# Several processes; test_survival.py has real ones
# ------------------------------------------------------------------------------------------------


def test_processes_that_do_not_agree_are_told_what_differs(monkeypatch):
    """Wherever their data may be."""
    from jax.experimental import multihost_utils

    def facts_of(**changes):
        facts = {"source_sha256": "0", "versions": {"jax": "1"}, "data": {}, "config": {"data": ""}}
        return facts | changes

    def digests(facts):
        seen = []
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: seen.append(x) or x)
        T.agree(facts, None)
        return seen[0]

    same = [digests(facts_of()), digests(facts_of(config={"data": "elsewhere"}))]
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda _: np.stack(same))
    T.agree(facts_of(), None)
    for name in ("source_sha256", "versions", "data", "config"):
        other = [*same, digests(facts_of(**{name: {"x": 1}}))]
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda _, x=other: np.stack(x))
        words = f"the processes differ in {name}: make that equal everywhere"
        with pytest.raises(T.UserError, match=words):
            T.agree(facts_of(), None)


@pytest.mark.parametrize(
    "tasks, devices, given, joins",
    [
        ("", [], (None, None, None), False),
        ("1", [], (None, None, None), False),
        ("2", [], (None, None, None), True),
        ("", ["accel0"], (None, None, None), True),  # a TPU: jax asks for its slice
        ("", ["vfio/0"], (None, None, None), True),
        ("", [], ("a:1", 2, 1), True),
        ("", [], (None, 2, None), True),
    ],
)
def test_a_process_joins_others_if_it_is_told_to_or_may_have_some(
    monkeypatch, tmp_path, tasks, devices, given, joins
):
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    if tasks:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    for name in devices:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    path, seen = T.Path, []
    monkeypatch.setattr(T, "Path", lambda name: tmp_path if name == "/dev" else path(name))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: seen.append(args))
    T.join_hosts(*given)
    assert seen == [given] * joins


def test_a_process_that_cannot_join_says_so_unless_it_was_alone(monkeypatch, tmp_path):
    def initialize(*_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    (tmp_path / "accel0").touch()
    path = T.Path
    monkeypatch.setattr(T, "Path", lambda name: tmp_path if name == "/dev" else path(name))
    T.join_hosts(None, None, None)
    with pytest.raises(T.UserError, match="cannot join the other processes .coordinator_address "):
        T.join_hosts(None, 2, 1)
