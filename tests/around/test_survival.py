"""Runs that are killed, and runs of several processes: real ones, each a process of its own."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, documents, write_shard
from training import (
    BRIEF,
    arrays,
    assert_same_arrays,
    facts,
    metrics,
    steps_of,
    trained,
    unfinished,
    without_times,
)

import train_gpt as T

# The command line of train_gpt.py with configs of the tests as presets, on N devices, compiled
# without what costs the most time. A batch can be made to take a while, and the disk always does.
SCRIPT = f"""
import os, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests/around")!r}]
from programs import CFG, quick_compilation
from training import BRIEF
import jax
import train_gpt as T
devices, seconds, *words = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))
T.PRESETS |= {{"small": CFG, "brief": BRIEF}}
next_rows, fsync = T.next_rows, os.fsync
T.next_rows = lambda *args: (time.sleep(float(seconds)), next_rows(*args))[1]
os.fsync = lambda file: (time.sleep(0.02), fsync(file))
with quick_compilation():
    sys.exit(T.main(words))
"""
STEPS = 40


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Enough for 40 steps."""
    folder = tmp_path_factory.mktemp("data")
    write_shard(folder / "small_train_000001.bin", documents(1, 40_000))
    write_shard(folder / "small_val_000000.bin", documents(2, 2000))
    return folder


@pytest.fixture(scope="module")
def launch(tmp_path_factory, shards):
    """A function that starts a run, with a cache of programs that all runs here share."""
    cache, started = tmp_path_factory.mktemp("cache"), []

    def start(*args, preset="small", devices=1, seconds=0, **settings):
        command = [sys.executable, "-c", SCRIPT, str(devices), str(seconds)]
        if "--resume" not in args:
            settings = {"steps": STEPS, "val_every": 10, "log_every": 1, **settings}
            command += [preset, "--data", str(shards), "--set"]
            command += [f"{key}={value}" for key, value in settings.items()]
        command += [*map(str, args), "--cache", str(cache)]
        env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.said, process.warned = [], []
        for stream, lines in ((process.stdout, process.said), (process.stderr, process.warned)):
            threading.Thread(target=lambda s=stream, x=lines: x.extend(s), daemon=True).start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(process, pattern: str, seconds=120):
    """Until a line of the process matches; fails if it ends or takes longer."""
    deadline = time.monotonic() + seconds
    while not any(re.search(pattern, line) for line in process.said):
        assert process.poll() is None, "".join(process.said + process.warned)
        assert time.monotonic() < deadline, "".join(process.said + process.warned)
        time.sleep(0.01)


def ends(process, seconds=180) -> int:
    """The exit status."""
    status = process.wait(seconds)
    time.sleep(0.1)  # the last lines are still on their way
    return status


def only(folder):
    (run,) = folder.iterdir()
    return run


def result(run):
    """(metrics without times, arrays of the last checkpoint) of a finished run."""
    times = [line["train_time_ms"] for line in metrics(run)]
    assert times == sorted(times) and facts(run)["finished"] is True
    return without_times(run), arrays(T.find_checkpoint(run).folder)


def assert_same(got, want):
    """Bit for bit."""
    assert got[0] == want[0]
    assert_same_arrays(got[1], want[1])


def assert_close(got, want):
    """Up to reductions that add up in another order, and what 40 steps of Adam make of that."""
    assert [line["step"] for line in got[0]] == [line["step"] for line in want[0]]
    for key in ("train_loss", "val_loss"):
        values = [[line[key] for line in lines if key in line] for lines, _ in (got, want)]
        np.testing.assert_allclose(*values, rtol=1e-4)
    for name in (name for name in want[1] if name.startswith("params.")):
        error = np.linalg.norm(got[1][name] - want[1][name])
        assert error <= 1e-3 * np.linalg.norm(want[1][name]) + 1e-6, name


# ------------------------------------------------------------------------------------------------
# Two processes
# ------------------------------------------------------------------------------------------------


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_all(launch, *args, count=2, own=({}, {}), **settings):
    """Processes of one run, with 8 devices together."""
    where = f"127.0.0.1:{free_port()}"
    group = "--coordinator", where, "--processes", count, "--process-id"
    own = [*own, *[{}] * count][:count]
    each = enumerate({"devices": 8 // count} | settings | mine for mine in own)
    return [launch(*args, *group, i, **settings) for i, settings in each]


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_together_with_one_checkpoint(launch, shards, tmp_path):
    """SIGTERM to the second is the end of both; one process goes on from the files of both."""
    both = launch_all(
        launch, "--out", tmp_path / "two", preset="brief", seconds=0.1, checkpoint_every=0
    )
    cfg = replace(BRIEF, steps=STEPS, val_every=10, checkpoint_every=0)
    want = result(trained(cfg, tmp_path / "one", shards))  # meanwhile; on eight devices
    wait_for(both[0], "^step:3/")
    both[1].send_signal(signal.SIGTERM)
    assert [ends(process) for process in both] == [143, 143], both[0].warned + both[1].warned

    run = only(tmp_path / "two")
    (step,) = steps_of(run)
    assert 3 <= int(step) < STEPS and int(step) % 2 == 0  # where no gradients wait for Adam
    words = f"stopped after {step} of {STEPS} steps; to continue: "
    assert f"{words}python train_gpt.py --resume {run}\n" in "".join(both[0].said)
    folder = run / "checkpoints" / step
    assert sorted(path.name for path in folder.iterdir()) == ["0.npz", "1.npz", "meta.json"]
    assert facts(run)["devices"]["processes"] == 2
    saved = T.find_checkpoint(run)
    trained(replace(saved.cfg, devices=0), tmp_path, shards, saved)
    assert_close(result(run), want)


@pytest.fixture(scope="module")
def alone(launch, tmp_path_factory):
    """The result of a run that nobody interrupts, on one device; its programs are cached."""
    out = tmp_path_factory.mktemp("alone")
    process = launch("--out", out)
    assert ends(process) == 0, process.warned
    return result(only(out))


@pytest.fixture(scope="module")
def on_eight(launch, tmp_path_factory):
    """The same on eight devices."""
    out = tmp_path_factory.mktemp("eight")
    process = launch("--out", out, devices=8)
    assert ends(process) == 0, process.warned
    return result(only(out))


@pytest.fixture(scope="module")
def of_two(launch, tmp_path_factory):
    """The folder of a run of two processes, and what they printed."""
    out = tmp_path_factory.mktemp("two")
    both = launch_all(launch, "--out", out)
    for process in both:
        assert ends(process) == 0, "".join(process.said + process.warned)
    return only(out), both


@pytest.mark.slow
def test_two_processes_train_as_one_does(of_two, on_eight):
    """Three stages, with a checkpoint at every event; once they have met one speaks."""
    run, (first, second) = of_two
    assert_close(result(run), on_eight)
    assert facts(run)["devices"]["processes"] == 2
    # Gloo's threads write in pieces, sometimes into one another's lines; nothing else may be said.
    gloo = r"\[Gloo\] Rank | is connected to | peer ranks\. Expected.*?peer ranks is : |\d|\s"
    waits = "waiting for the other processes, up to 300 s; Ctrl-C ends\n"
    assert second.said[0] == waits == first.said[0]
    assert re.sub(gloo, "", "".join(second.said[1:])) == ""
    with np.load(run / f"checkpoints/{STEPS}/1.npz") as file:
        names = {name.split(".")[1] for name in file.files}
    assert names == {n for n, row in T.param_table(BRIEF).items() if row.sharded} | {"offsets"}
    assert sum(line.startswith("step:") for line in first.said) == STEPS + 5


def stopped_copy(run, folder):
    """A copy of a finished run as it was before its last event."""
    copy = shutil.copytree(run, folder / "run")
    shutil.rmtree(copy / f"checkpoints/{STEPS}")
    unfinished(copy)
    assert T.find_checkpoint(copy).step == STEPS - 4
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 2])
def test_run_of_two_processes_resumes_in_one(launch, of_two, on_eight, tmp_path, devices):
    run = stopped_copy(of_two[0], tmp_path)
    assert ends(launch("--resume", run, devices=devices)) == 0
    assert_close(result(run), on_eight)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["^compiling", "^step:"])
def test_run_of_one_process_resumes_in_two(launch, on_eight, tmp_path, when):
    """Which then end with SIGTERM to the second alone, and begin once more."""
    process = launch("--out", tmp_path, devices=8, seconds=0.02)
    wait_for(process, "step:12/")
    process.send_signal(signal.SIGTERM)
    assert ends(process) == 143
    run = only(tmp_path)
    both = launch_all(launch, "--resume", run, seconds=0.1)
    wait_for(both[0], when)
    both[1].send_signal(signal.SIGTERM)
    assert [ends(process) for process in both] == [143, 143]
    step = T.find_checkpoint(run).step
    assert 12 <= step < STEPS
    both = launch_all(launch, "--resume", run)
    assert [ends(process) for process in both] == [0, 0]
    assert_close(result(run), on_eight)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_when_one_of_four_is_killed_all_end_and_fewer_go_on(launch, on_eight, tmp_path, victim):
    """By jax's own means; process 0 keeps the service that tells the others."""
    four = launch_all(launch, "--out", tmp_path, count=4, seconds=0.1)
    wait_for(four[0], "step:15/")
    four[victim].kill()
    for process in four:
        assert ends(process, 150) != 0
    run = only(tmp_path)
    assert all(T.read_checkpoint(run / f"checkpoints/{step}") for step in visible(run))
    fewer = launch_all(launch, "--resume", run, count=2, devices=2)
    assert [ends(process) for process in fewer] == [0, 0], fewer[0].warned
    assert facts(run)["devices"] | {"kind": 0} == {
        **{"kind": 0, "platform": "cpu", "count": 4, "processes": 2}
    }
    assert_close(result(run), on_eight)


@pytest.mark.slow
def test_four_processes_train_as_one_does(launch, on_eight, tmp_path):
    """And each writes its own rows alone, of parameters and of where it stands in its data."""
    four = launch_all(launch, "--out", tmp_path, count=4)
    for process in four:
        assert ends(process) == 0, "".join(process.said + process.warned)
    run = only(tmp_path)
    assert_close(result(run), on_eight)
    for i in range(4):
        with np.load(run / f"checkpoints/{STEPS}/{i}.npz") as file:
            assert f"loader.offsets.{2 * i}" in file.files
            assert f"params.head.{26 * i}" in file.files


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(8, 16), (16, 8)])
def test_a_run_goes_on_with_rows_of_another_length(launch, of_two, tmp_path, before, after):
    """Beyond eight devices a batch has as many rows as there are devices, which is said."""
    process = launch("--out", tmp_path, devices=before)
    assert ends(process) == 0, process.warned
    whole = only(tmp_path)
    copy = stopped_copy(whole, tmp_path / "copy")
    again = launch("--resume", copy, devices=after)
    assert ends(again) == 0, again.warned
    got, want = result(copy)[0], result(whole)[0]
    for key in ("train_loss", "val_loss"):
        losses = [[line[key] for line in lines if key in line] for lines in (got, want)]
        assert losses[0] != losses[1]
        np.testing.assert_allclose(*losses, rtol=0.02)
    cut = "a batch is cut into 16 rows, not 8: of 16, 32, 32 tokens"
    said = [any(cut in line for line in x.said) for x in (process, again)]
    assert said == [before == 16, after == 16]
    rows = {"count": 16, "tokens": [16, 32, 32]}
    assert facts(whole)["choices"].get("rows") == (rows if before == 16 else None)
    assert facts(copy)["choices"].get("rows") == (rows if after == 16 else None)


@pytest.mark.slow
def test_processes_that_disagree_end_with_what_differs(launch, tmp_path):
    both = launch_all(launch, "--out", tmp_path, own=({"seed": 0}, {"seed": 1}))
    for process in both:
        assert ends(process, 60) == 2
    words = "^error: the processes differ in config's seed: make that equal on all hosts"
    assert any(re.search(words, line) for process in both for line in process.warned)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------
# Kills and signals at random moments
# ------------------------------------------------------------------------------------------------


def visible(run) -> list[int]:
    return T.checkpoint_steps(run / "checkpoints")


def survive(launch, out, kills: int, stop=signal.SIGKILL, seed=0):
    """Interrupt and resume a run `kills` times at random moments; how many were in a write."""
    rng, run, inside, done = random.Random(seed), None, 0, 0
    while True:
        process = launch("--resume", run) if run and visible(run) else launch("--out", out)
        if done < kills:
            # Some of the moments are before the first step, while it compiles; most a few steps on.
            wait_for(process, "^run " if rng.random() < 0.2 else "^step:")
            for _ in range(rng.randrange(8)):
                lines = len(process.said)
                while len(process.said) == lines and process.poll() is None:
                    time.sleep(0.001)
            time.sleep(rng.random() * 0.05)
            if process.poll() is None:
                process.send_signal(stop)
                done += 1
        status = ends(process)
        found = sorted(out.iterdir(), key=lambda path: path.stat().st_mtime)
        run = found[-1]
        inside += any((run / "checkpoints").glob(".*"))
        for step in visible(run):  # raises if anything is wrong with it
            T.read_checkpoint(run / f"checkpoints/{step}")
        if status == 0:
            return run, done, inside
        assert status in (-stop, 128 + stop), "".join(process.said + process.warned)
        assert not any("Traceback" in line for line in process.warned)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "signals"), [(6, 2), (30, 6)])
def test_runs_survive_kills_and_signals(launch, alone, tmp_path, kills, signals):
    """At random moments; with a checkpoint at every event many kills are inside a write."""

    def chain(number, stop, times):
        tries = inside = 0
        for turn in range(times):  # a run can end before its last interruption
            out = tmp_path / f"{number}-{turn}"
            out.mkdir()
            run, done, hits = survive(launch, out, times - tries, stop, seed=10 * number + turn)
            assert_same(result(run), alone)
            tries, inside = tries + done, inside + hits
            if tries == times:
                return inside

    chains = [(0, signal.SIGKILL, kills // 2), (1, signal.SIGKILL, kills // 2)]
    chains += [(2, signal.SIGTERM, signals)]
    with ThreadPoolExecutor(2) as pool:
        inside = list(pool.map(lambda chain_: chain(*chain_), chains))
    print(f"{kills} kills survived, {inside[0] + inside[1]} inside the write of a checkpoint")
    assert inside[0] + inside[1] >= kills // 10
