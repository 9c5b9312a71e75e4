"""Runs that are killed, and runs of several processes: real ones, each a process of its own."""

import contextlib
import json
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

import numpy as np
import pytest
from conftest import ROOT, documents, write_shard

import train_gpt as T

# The command line of train_gpt.py with the config of the tests as a preset, on N devices, compiled
# without what costs the most time.
SCRIPT = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from programs import CFG, quick_compilation
import jax
import train_gpt as T
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
T.PRESETS["small"] = CFG
T.HEARTBEAT_SECONDS = 10
with quick_compilation():
    sys.exit(T.main(sys.argv[2:]))
"""
STEPS = 40


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """A function that starts a run, with a cache of programs that all runs here share."""
    cache, shards, started = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("data"), []
    write_shard(shards / "small_train_000001.bin", documents(1, 40_000))
    write_shard(shards / "small_val_000000.bin", documents(2, 2000))

    def start(*args, devices=1, steps=STEPS, **settings):
        command = [sys.executable, "-c", SCRIPT, str(devices)]
        if "--resume" not in args:
            settings = {"steps": steps, "val_every": 10, "log_every": 1, **settings}
            command += ["small", "--data", str(shards), "--set"]
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
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [line.pop("train_time_ms") for line in lines]
    assert times == sorted(times)
    saved = T.find_checkpoint(run)
    files = {stem: sorted(saved.parts(stem)) for stem in {x.rsplit(".", 2)[0] for x in saved.files}}
    whole = {
        stem: np.concatenate([np.load(path) for _, path in parts]) for stem, parts in files.items()
    }
    assert json.loads((run / "run.json").read_text())["finished"] is True
    return lines, whole


def assert_same(got, want):
    """Bit for bit."""
    assert got[0] == want[0] and got[1].keys() == want[1].keys()
    for name in want[1]:
        np.testing.assert_array_equal(got[1][name], want[1][name], err_msg=name)


def assert_close(got, want):
    """Up to reductions that add up in another order, and what 40 steps of Adam make of that."""
    assert [line["step"] for line in got[0]] == [line["step"] for line in want[0]]
    for key in ("train_loss", "val_loss"):
        values = [[line[key] for line in lines if key in line] for lines, _ in (got, want)]
        np.testing.assert_allclose(*values, rtol=1e-4)
    for name in (name for name in want[1] if name.startswith("params.")):
        error = np.linalg.norm(got[1][name] - want[1][name])
        assert error <= 1e-3 * np.linalg.norm(want[1][name]) + 1e-6, name


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


def survive(launch, out, kills: int, stop=signal.SIGKILL, seed=0):
    """Interrupt and resume a run `kills` times at random moments; how many were in a write."""
    rng, run, inside, done = random.Random(seed), None, 0, 0
    while True:
        saved = run and T.checkpoint_steps(run / "checkpoints")
        process = launch("--resume", run) if saved else launch("--out", out)
        if done < kills:
            wait_for(process, "resumed after|step:0/")
            for _ in range(rng.randrange(8)):  # some of the moments: a few steps later
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
        inside += any(path.name.startswith(".") for path in (run / "checkpoints").glob(".*"))
        if status == 0:
            return run, done, inside
        assert status in (-stop, 128 + stop), "".join(process.said + process.warned)
        assert not any("Traceback" in line for line in process.warned)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "signals"), [(6, 2), (30, 6)])
def test_runs_survive_kills_and_signals(launch, alone, tmp_path, kills, signals):
    """At random moments; with a checkpoint at every step many kills are inside a write."""

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


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_two(launch, *args, **settings):
    """Two processes of one run, with 4 devices each."""
    where = f"127.0.0.1:{free_port()}"
    group = "--coordinator", where, "--processes", 2, "--process-id"
    return [launch(*args, *group, i, devices=4, **settings) for i in (0, 1)]


@pytest.fixture(scope="module")
def of_two(launch, tmp_path_factory):
    """The folder of a run of two processes, and what they printed."""
    out = tmp_path_factory.mktemp("two")
    both = launch_two(launch, "--out", out)
    for process in both:
        assert ends(process) == 0, "".join(process.said + process.warned)
    return only(out), both


@pytest.mark.slow
def test_two_processes_train_as_one_does(of_two, on_eight):
    run, (first, second) = of_two
    assert_close(result(run), on_eight)
    assert json.loads((run / "run.json").read_text())["devices"]["processes"] == 2
    # Gloo's threads write in pieces, sometimes into one another's lines; nothing else may be said.
    gloo = r"\[Gloo\] Rank | is connected to | peer ranks\. Expected.*?peer ranks is : |\d|\s"
    assert re.sub(gloo, "", "".join(second.said)) == ""
    saved = T.find_checkpoint(run)
    parts = {stem: len(saved.parts(stem)) for stem in ("params.embed", "params.smear_gate")}
    assert parts == {"params.embed": 2, "params.smear_gate": 1}
    assert sum(line.startswith("step:") for line in first.said) == STEPS + 5


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 2])
def test_run_of_two_processes_resumes_in_one(launch, of_two, on_eight, tmp_path, devices):
    run = stopped_copy(of_two[0], tmp_path)
    assert ends(launch("--resume", run, devices=devices)) == 0
    assert_close(result(run), on_eight)


def stopped_copy(run, folder):
    """A copy of a finished run as it was one step, an odd number of steps, before its end."""
    copy = shutil.copytree(run, folder / "run")
    shutil.rmtree(copy / f"checkpoints/{STEPS}")
    assert T.find_checkpoint(copy).step == STEPS - 1
    return copy


@pytest.mark.slow
def test_run_of_one_process_resumes_in_two(launch, of_two, on_eight, tmp_path):
    """And the end of one of them, SIGTERM to the second alone, is the end of both."""
    process = launch("--out", tmp_path, devices=8)
    wait_for(process, "step:12/")
    process.send_signal(signal.SIGTERM)
    assert ends(process) == 143
    run = only(tmp_path)
    both = launch_two(launch, "--resume", run)
    wait_for(both[0], "^step:")  # before, there is nothing to save, and nobody to catch it
    both[1].send_signal(signal.SIGTERM)
    assert [ends(process) for process in both] == [143, 143]
    step = T.find_checkpoint(run).step
    assert 12 <= step < STEPS
    both = launch_two(launch, "--resume", run)
    assert [ends(process) for process in both] == [0, 0]
    assert_close(result(run), on_eight)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_process_is_killed_the_other_ends_with_an_error(launch, of_two, tmp_path, victim):
    both = launch_two(launch, "--out", tmp_path)
    wait_for(both[0], "step:5/")
    both[victim].kill()
    began, other = time.monotonic(), both[1 - victim]
    assert ends(other, 60) != 0 and time.monotonic() - began < 60
    # Ours, or, where process 0 has ended, of the service of jax that it kept.
    words = "^error: the devices failed: .*if another process has ended|another task died"
    assert any(re.search(words, line) for line in other.warned), other.warned


@pytest.mark.slow
def test_processes_that_disagree_end_with_the_names_of_their_hosts(launch, tmp_path):
    where = f"127.0.0.1:{free_port()}"
    group = "--coordinator", where, "--processes", 2, "--process-id"
    both = [launch("--out", tmp_path, *group, i, devices=4, seed=i) for i in (0, 1)]
    for process in both:
        assert ends(process, 60) == 2
    assert any(
        re.search(r"^error: these hosts disagree about their config: .*\(process 0\) \| .*"
                  r"\(process 1\): make them equal", line)
        for process in both for line in process.warned
    )  # fmt: skip
