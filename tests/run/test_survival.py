"""Killed runs, and runs of several processes, in real processes."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, documents, write_shard
from training import (
    BRIEF,
    arrays,
    assert_same_arrays,
    back_to,
    facts,
    metrics,
    trained,
    without_times,
)

import train_gpt as T

# The command line of train_gpt.py with a config of the tests as a preset, on N devices, with few
# compiler passes. Batches can be delayed.
SCRIPT = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests/helpers")!r}]
from programs import quick_compilation
from training import BRIEF
import jax
import train_gpt as T
devices, seconds, *words = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))
T.PRESETS["brief"] = BRIEF
next_batch = T.next_batch
T.next_batch = lambda *args: (time.sleep(float(seconds)), next_batch(*args))[1]
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
    """Return a function that starts a run. All runs share a cache of programs."""
    cache, started = tmp_path_factory.mktemp("cache"), []

    def start(*args, devices=1, seconds=0.0, **settings):
        command = [sys.executable, "-c", SCRIPT, str(devices), str(seconds)]
        if "--resume" not in args:
            settings = {"steps": STEPS, "val_every": 10, "log_every": 1, **settings}
            command += ["brief", "--data", str(shards), "--set"]
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


def wait_for(process, pattern: str, seconds=180):
    """Wait until a line of the process matches. Fail if the process ends or takes too long."""
    deadline = time.monotonic() + seconds
    while not any(re.search(pattern, line) for line in process.said):
        assert process.poll() is None, "".join(process.said + process.warned)
        assert time.monotonic() < deadline, "".join(process.said + process.warned)
        time.sleep(0.01)


def ends(process, seconds=180) -> int:
    """Return the exit status."""
    status = process.wait(seconds)
    time.sleep(0.1)  # to read the last lines
    return status


def only(folder):
    (run,) = folder.iterdir()
    return run


def result(run):
    """Return (metrics without times, arrays of the last checkpoint) of a finished run."""
    times = [line["train_time_ms"] for line in metrics(run)]
    assert times == sorted(times) and facts(run)["finished"] is True
    return without_times(run), arrays(T.find_checkpoint(run).folder)


def uninterrupted(folder, shards, devices=1, steps=STEPS):
    """Return the result of an uninterrupted run in this process."""
    cfg = replace(BRIEF, steps=steps, val_every=10, checkpoint_every=0, devices=devices)
    return result(trained(cfg, folder, shards))


def assert_close(got, want):
    """Compare results up to the order of sums, and its effect in 40 steps of Adam."""
    assert [line["step"] for line in got[0]] == [line["step"] for line in want[0]]
    for key in ("train_loss", "val_loss"):
        values = [[line[key] for line in lines if key in line] for lines, _ in (got, want)]
        np.testing.assert_allclose(*values, rtol=1e-4)
    for name in (name for name in want[1] if name.startswith("params.")):
        error = np.linalg.norm(got[1][name] - want[1][name])
        assert error <= 1e-3 * np.linalg.norm(want[1][name]) + 1e-6, name


# ---- Kills and signals at random moments -------------------------------------------------------


SIX = [signal.SIGKILL, signal.SIGTERM] * 3


@pytest.mark.slow
@pytest.mark.parametrize("stops, steps", [([signal.SIGKILL], 8), (SIX, STEPS)])
def test_a_run_survives_kills_and_signals_at_random_moments(launch, shards, tmp_path, stops, steps):
    """The result is bit-identical. With a checkpoint every second step, many kills are during a
    write."""
    rng, out = random.Random(len(stops)), tmp_path / "logs"
    for stop in stops:
        again = ("--resume", only(out)) if out.exists() else ("--out", out)
        process = launch(*again, seconds=0.3, steps=steps)
        wait_for(process, r"^step:\d*[2-9]/")
        time.sleep(rng.random())
        process.send_signal(stop)
        assert ends(process) in (-stop, 128 + stop), "".join(process.warned)
        assert not any("Traceback" in line for line in process.warned)
        run = only(out)
        for step in T.checkpoint_steps(run / "checkpoints"):
            assert T.find_checkpoint(run / f"checkpoints/{step}", pytest.fail).step == step
    saved = T.find_checkpoint(run)
    trained(replace(saved.cfg, devices=1), out, shards, saved)
    got, want = result(run), uninterrupted(tmp_path / "whole", shards, steps=steps)
    assert got[0] == want[0]
    assert_same_arrays(got[1], want[1])


# ---- Several processes -------------------------------------------------------------------------


def launch_all(launch, *args, count=2, own=({}, {}), **settings):
    """Start several processes of one run, with 8 devices in total."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    group = "--coordinator", where, "--processes", count, "--process-id"
    each = enumerate({"devices": 8 // count} | settings | mine for mine in [*own, {}, {}][:count])
    return [launch(*args, *group, i, **settings) for i, settings in each]


@pytest.mark.slow
def test_two_processes_train_like_one_and_stop_together(launch, shards, tmp_path):
    """SIGTERM to the second stops both. One process can resume from their files."""
    both = launch_all(launch, "--out", tmp_path / "two", seconds=0.1)
    want = uninterrupted(tmp_path / "one", shards, devices=8)  # at the same time
    wait_for(both[0], "^step:5/")
    both[1].send_signal(signal.SIGTERM)
    assert [ends(process) for process in both] == [143, 143], both[0].warned + both[1].warned
    run = only(tmp_path / "two")
    saved = T.find_checkpoint(run)
    step = saved.step
    assert 5 <= step < STEPS and step % 2 == 0  # no accumulated gradients
    words = f"stopped after {step} of {STEPS} steps; to continue: "
    words += T.command_for(T.__file__, "--resume", run)
    assert f"{words}\n" in "".join(both[0].said)
    assert {path.name for path in saved.folder.glob("[0-9]*.json")} == {"0.json", "1.json"}
    assert facts(run)["devices"]["processes"] == 2
    # After joining, only the first process prints. Lines of Gloo are mixed.
    gloo = r"\[Gloo\] Rank | is connected to | peer ranks\. Expected.*?peer ranks is : |\d|\s"
    assert re.sub(gloo, "", "".join(both[1].said)) == ""
    trained(replace(saved.cfg, devices=0), tmp_path, shards, saved)
    assert_close(result(run), want)
    saved = back_to(run, max(T.checkpoint_steps(run / "checkpoints")[:1]))
    both = launch_all(launch, "--resume", run)
    assert [ends(process) for process in both] == [0, 0], both[0].warned + both[1].warned
    assert_close(result(run), want)


@pytest.mark.slow
def test_if_one_of_four_processes_is_killed_all_end_and_fewer_can_resume(launch, shards, tmp_path):
    """JAX ends the others."""
    four = launch_all(launch, "--out", tmp_path / "four", count=4, seconds=0.1)
    wait_for(four[0], "step:15/")
    four[2].kill()
    for process in four:
        assert ends(process, 150) != 0
    run = only(tmp_path / "four")
    for step in T.checkpoint_steps(run / "checkpoints"):
        assert T.find_checkpoint(run / f"checkpoints/{step}", pytest.fail).step == step
    fewer = launch_all(launch, "--resume", run, count=2, devices=2)
    assert [ends(process) for process in fewer] == [0, 0], fewer[0].warned
    devices = facts(run)["devices"]
    assert (devices["count"], devices["processes"]) == (4, 2)
    assert_close(result(run), uninterrupted(tmp_path / "one", shards, devices=8))


@pytest.mark.slow
def test_processes_with_different_settings_end_before_compiling(launch, tmp_path):
    both = launch_all(launch, "--out", tmp_path, own=({"tail": 3}, {"tail": 4}))
    assert [ends(process, 60) for process in both] == [2, 2]
    words = "^error: the processes differ in config: use the same on all hosts"
    for process in both:
        assert any(re.search(words, line) for line in process.warned)
        assert not any("compiling" in line for line in process.said)
    assert not list(tmp_path.iterdir())
