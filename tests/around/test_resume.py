"""Runs that are stopped and go on exactly as if nothing had been; signals; several processes."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import documents, write_shard
from programs import CFG
from training import (
    BRIEF,
    arrays,
    assert_same_arrays,
    facts,
    metrics,
    steps_of,
    train_losses,
    trained,
    unfinished,
    without_times,
)

import train_gpt as T

RULE = b"=" * 100 + b"\n"
ONCE = replace(CFG, checkpoint_every=0)


@pytest.fixture(scope="module")
def train(shards):
    """train(cfg, out, saved=None, ...) on the shards of the tests."""
    return lambda cfg, out, saved=None, **options: trained(cfg, out, shards, saved, **options)


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> T.Path:
    """The folder of a run that nobody interrupted, with every checkpoint: of 2, 4 and 8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "KEPT", 99)
        return train(CFG, tmp_path_factory.mktemp("logs"))


@pytest.fixture
def copy(run, tmp_path) -> T.Path:
    """A copy of its folder, which a test may change."""
    return shutil.copytree(run, tmp_path / run.name)


def back_to(run, step: int) -> T.Saved:
    """Delete the later checkpoints of a run, as if it had ended before them."""
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    unfinished(run)
    return T.find_checkpoint(run)


def steps_in_log(run) -> list[str]:
    text = (run / "log.txt").read_text()
    return [line.split()[0] for line in text.splitlines() if line.startswith("step:")]


# ------------------------------------------------------------------------------------------------
# Exactly
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 4])
def test_resumed_run_ends_exactly_as_the_uninterrupted_one(train, run, copy, step):
    """Bit for bit: the same programs on the same numbers.

    After 2 steps amid the plain rows of the first stage; after 4 amid the packed ones, where a
    validation has been, averages have begun, and the last step of the tied head is to come. In both
    stages rows have walked a part of the way through the vocabulary.
    """
    state, last = (arrays(run / f"checkpoints/{step}") for step in (step, 8))
    places = [T.read_checkpoint(run / f"checkpoints/{at}").loader for at in (step, 8)]
    assert T.LoaderState(0, ()) < places[0] < places[1]
    for kind in ("params", "first", "second"):
        np.testing.assert_array_equal(state[f"{kind}.embed"], state[f"{kind}.head"])
    assert np.any(last["params.embed"] != last["params.head"])

    said, saved = [], back_to(copy, step)
    assert train(saved.cfg, copy.parent, saved, say=said.append) == copy
    got, want = facts(copy), facts(run)
    assert_same_arrays(arrays(copy / "checkpoints/8"), last)
    assert without_times(copy) == without_times(run)
    times = [line["train_time_ms"] for line in metrics(copy)]
    assert times == sorted(times)
    assert (got["resumed"], got["finished"], got["run_id"]) == (True, True, copy.name)
    assert all(got[name] == want[name] for name in ("steps", "tokens", "val_loss"))
    log = (copy / "log.txt").read_bytes()
    assert log.count(RULE) == 4 and log.split(RULE)[3].startswith(b"resumed\npython ")
    assert steps_in_log(copy) == steps_in_log(run)
    assert any(line.startswith(f"resumed after {step} of 8 steps from ") for line in said)


@pytest.mark.parametrize(
    "before, after",
    [(8, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 8), (8, 4), (2, 8)))],
)
def test_a_run_resumes_on_another_number_of_devices(train, tmp_path, before, after):
    """As far as sums in another order allow. Other numbers have other padding, 1 has none."""
    run = train(replace(CFG, devices=before), tmp_path)
    want, end = train_losses(run), arrays(run / "checkpoints/8")
    saved = back_to(run, 4)
    assert train(replace(saved.cfg, devices=after), tmp_path, saved) == run
    assert facts(run)["devices"]["count"] == after
    assert train_losses(run)[:4] == want[:4]
    np.testing.assert_allclose(train_losses(run), want, rtol=2e-5)
    got = arrays(run / "checkpoints/8")
    for name in end:
        np.testing.assert_allclose(got[name], end[name], rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(("stored", "there", "want"), [(8, 4, 0), (2, 8, 2), (0, 8, 0)])
def test_stored_number_of_devices_counts_if_they_are_there_and_data_may_have_moved(
    monkeypatch, stored, there, want
):
    cfg, seen = replace(CFG, devices=stored), []
    saved = T.Saved(T.Path("x"), cfg, *[None] * (len(T.Saved._fields) - 2))
    monkeypatch.setattr(T, "find_checkpoint", lambda *_: saved)
    monkeypatch.setattr(T, "all_devices", lambda: jax.devices()[:there])
    monkeypatch.setattr(T, "train", lambda cfg, *_: seen.append((cfg.devices, cfg.data)))
    assert T.main(["--resume", "x"]) == 0 and T.main(["--resume", "x", "--data", "y"]) == 0
    assert seen == [(want, CFG.data), (want, "y")]


def test_a_table_in_bfloat16_comes_back_exactly(train, tmp_path):
    """Whose bits lie in the checkpoint: numpy's files do not know the type."""
    run = train(replace(BRIEF, compute_dtype="bfloat16"), tmp_path)
    want, before = arrays(run / "checkpoints/4"), without_times(run)
    assert want["params.ngram_table"].dtype == np.uint16 and want["params.ngram_table"].any()
    saved = back_to(run, 2)
    train(saved.cfg, tmp_path, saved)
    assert_same_arrays(arrays(run / "checkpoints/4"), want)
    assert without_times(run) == before


def test_resumed_run_validates_once_where_it_was_saved(train, tmp_path):
    folder = train(replace(CFG, checkpoint_every=4), tmp_path)
    saved = back_to(folder, 4)
    train(saved.cfg, tmp_path, saved)
    assert [line["step"] for line in metrics(folder) if "val_loss" in line] == [0, 4, 8]


def test_resumed_run_loads_inside_the_clock_too(train, copy, monkeypatch):
    """Where it has to begin is found before, but its loader starts from nothing."""
    seen, clocks = [], []

    def opened(self, *args, real=T.RunLog.__init__):
        real(self, *args)
        clocks.append(self.clock)

    def documents(self, number, real=T.TokenStream._documents):
        seen.append(bool(clocks) and clocks[0].running.is_set())
        return real(self, number)

    monkeypatch.setattr(T.RunLog, "__init__", opened)
    monkeypatch.setattr(T.TokenStream, "_documents", documents)
    saved = back_to(copy, 4)
    train(saved.cfg, copy.parent, saved)
    assert seen[0] is False and seen[-1] is True


# ------------------------------------------------------------------------------------------------
# What is not resumed, or not from there
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [[2, 4, 8], [4], []])
def test_finished_run_is_not_resumed(copy, capsys, monkeypatch, kept):
    """Whichever checkpoints it has kept, and before it would wait for other processes."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("waits"))
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name) not in kept:
            shutil.rmtree(folder)
    before = {path: path.is_file() and path.read_bytes() for path in copy.rglob("*")}
    group = "--coordinator=localhost:1", "--processes=2", "--process-id=1"
    for more in ((), group):
        assert T.main(["--resume", str(copy), *more]) == 2
        line = f"error: {copy} is finished: there is nothing to resume\n"
        assert capsys.readouterr() == ("", line)
    assert {path: path.is_file() and path.read_bytes() for path in copy.rglob("*")} == before


def test_a_run_whose_last_checkpoint_alone_was_written_is_not_resumed(train, copy):
    """The process ended before run.json could say that the run has; no step is left."""
    unfinished(copy)
    before = (copy / "run.json").read_bytes()
    saved = T.find_checkpoint(copy)
    with pytest.raises(T.UserError, match="is finished: there is nothing to resume"):
        train(saved.cfg, copy.parent, saved)
    assert (copy / "run.json").read_bytes() == before


def test_run_is_not_resumed_on_other_tokens(copy, shards, tmp_path):
    """With as many of them, and the same files but for one token."""
    other = shutil.copytree(shards, tmp_path / "other")
    tokens = documents(1, 3000)
    tokens[7] += 1
    write_shard(other / "small_train_000001.bin", tokens)
    saved = back_to(copy, 4)
    before = {path: path.read_bytes() for path in copy.rglob("*.*")}
    with pytest.raises(T.UserError, match="does not hold the shards of .*: name their --data"):
        trained(saved.cfg, copy.parent, other, saved)
    assert {path: path.read_bytes() for path in copy.rglob("*.*")} == before


def test_changed_source_is_named(train, copy):
    """And stands in the log, as the first one does."""
    said, saved = [], back_to(copy, 4)
    train(saved.cfg, copy.parent, saved._replace(source_sha256="0"), say=said.append)
    assert any("train_gpt.py has changed since" in line for line in said)
    source, first, steps, second, rest = (copy / "log.txt").read_bytes().split(RULE, 4)
    after = f"resumed\nsource: {facts(copy)['source_sha256']}\n".encode()
    assert second == after + source and rest.startswith(b"python ") and b"resumed" not in steps


def test_how_a_run_is_computed_may_change_when_it_goes_on(train, copy, monkeypatch, capsys):
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
    assert (config["recompute"], config["loss_chunk"], config["steps"]) == (True, 32, CFG.steps)
    head = (copy / "log.txt").read_text()[len(before.split("step:5/")[0]) :]
    assert f"\nconfig: {json.dumps(config)}\n" in head


@pytest.fixture
def elsewhere():
    """elsewhere(path): another process that has locked a file."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, 2); print(flush=True)"
    with contextlib.ExitStack() as stack:

        def start(path):
            words = [sys.executable, "-c", f"{code}; input()", str(path)]
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            process.stdout.readline()
            return process

        yield start


def test_a_run_that_another_process_writes_is_not_resumed(copy, elsewhere, capsys, monkeypatch):
    """It ends before it writes, and may go on when the other has ended, however that was."""
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))
    back_to(copy, 4)
    other = elsewhere(copy / "log.txt")
    before = {path: path.read_bytes() for path in copy.rglob("*.*")}
    assert T.main(["--resume", str(copy)]) == 2
    line = capsys.readouterr().err
    assert f"another process writes {copy}: wait for it, or end it" in line
    assert {path: path.read_bytes() for path in copy.rglob("*.*")} == before
    other.kill()
    other.wait()
    with pytest.raises(pytest.fail.Exception, match="went on to compile"):
        T.main(["--resume", str(copy)])


def test_a_new_run_is_locked_while_it_runs(train, tmp_path, monkeypatch):
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), 6)"

    def logged(self, *args, real=T.RunLog.trained):
        words = [sys.executable, "-c", code, self.folder / "log.txt"]
        tries.append(subprocess.run(words, capture_output=True).returncode)
        return real(self, *args)

    tries = []
    monkeypatch.setattr(T.RunLog, "trained", logged)
    train(BRIEF, tmp_path)
    assert tries == [1] * 4


def test_a_damaged_checkpoint_is_passed_over_and_does_not_come_back(train, run, copy):
    """Also if the damage mends itself, as when a disk was late: it stays aside."""
    meta, said = copy / "checkpoints/8/meta.json", []
    whole = meta.read_text()
    meta.write_text("")
    (copy / "checkpoints/.8").mkdir()  # of a writer that was killed
    saved = T.find_checkpoint(copy, said.append)
    assert saved.step == 4 and said[0].startswith("warning: ")
    train(saved.cfg, copy.parent, saved)
    assert "damaged-8" in steps_of(copy) and "8" in steps_of(copy) and ".8" not in steps_of(copy)
    (copy / "checkpoints/damaged-8/meta.json").write_text(whole)
    assert T.find_checkpoint(copy).folder == copy / "checkpoints/8"
    assert_same_arrays(arrays(copy / "checkpoints/8"), arrays(run / "checkpoints/8"))


def test_what_was_logged_after_the_checkpoint_is_dropped(train, run, copy):
    """Of steps that are lost; also half a line, which a crash may leave."""
    saved = back_to(copy, 4)
    for name in ("metrics.jsonl", "log.txt"):
        assert saved.logs[name] < (copy / name).stat().st_size
        with open(copy / name, "a") as file:
            file.write('{"step": 9, "tra')
    train(saved.cfg, copy.parent, saved)
    assert without_times(copy) == without_times(run) and steps_in_log(copy) == steps_in_log(run)


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
@pytest.mark.parametrize("size", [None, 0, 500])
def test_logs_that_have_been_cut_are_named_and_lines_stay_whole(train, copy, name, size):
    saved, said = back_to(copy, 6), []
    (copy / name).unlink() if size is None else os.truncate(copy / name, size)
    train(saved.cfg, copy.parent, saved, say=said.append)
    (warning,) = (line for line in said if line.startswith("warning: "))
    assert warning == f"warning: {name} of {copy} lacks what stood in it: no record any more"
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[-3:]] == [7, 8, 8]


# ------------------------------------------------------------------------------------------------
# Signals
# ------------------------------------------------------------------------------------------------


def signal_at(patch, number: int, at: int):
    """The process gets a signal when the loss of step `at` is logged, while the next one runs."""

    def logged(self, step, *args, real=T.RunLog._trained):
        if step == at:
            os.kill(os.getpid(), number)
        return real(self, step, *args)

    patch.setattr(T.RunLog, "_trained", logged)


@pytest.mark.parametrize(
    "number, at, stop",
    [(signal.SIGTERM, 3, 4), (signal.SIGINT, 2, 4), (signal.SIGHUP, 1, 2)],
    ids=["SIGTERM", "Ctrl-C", "closed terminal"],
)
def test_a_signal_saves_and_ends_the_run_where_no_gradients_wait(
    train, run, tmp_path, monkeypatch, number, at, stop
):
    """The command that it prints leads to the same end as if nothing had been."""
    before, out = signal.getsignal(number), tmp_path / "my logs"
    with monkeypatch.context() as patch:
        signal_at(patch, number, at)
        with pytest.raises(T.Stopped) as stopped:
            train(ONCE, out)
    (folder,) = out.iterdir()
    assert stopped.value.number == number and type(stopped.value.number) is not bool
    assert str(stopped.value) == (
        f"stopped after {stop} of 8 steps; to continue: python train_gpt.py --resume '{folder}'"
    )
    assert signal.getsignal(number) is before
    assert steps_of(folder) == [str(stop)] and facts(folder)["finished"] is False
    assert facts(folder)["steps"] == stop
    saved = T.find_checkpoint(folder)
    train(saved.cfg, out, saved)
    assert without_times(folder) == without_times(run)
    assert_same_arrays(arrays(folder / "checkpoints/8"), arrays(run / "checkpoints/8"))


def test_what_run_json_says_of_a_stop_is_what_the_checkpoint_says(train, tmp_path, monkeypatch):
    signal_at(monkeypatch, signal.SIGTERM, 3)
    with pytest.raises(T.Stopped):
        train(ONCE, tmp_path)
    (folder,) = tmp_path.iterdir()
    meta = json.loads((folder / "checkpoints/4/meta.json").read_text())["checkpoint"]
    got = facts(folder)
    assert (got["steps"], got["tokens"]) == (meta["step"], CFG.tokens_after(4))
    assert all(got[name] == meta[name] for name in ("config", "data", "source_sha256"))
    assert got["train_time_ms"] == pytest.approx(meta["train_time_ms"], abs=1e-3)
    assert (folder / "log.txt").stat().st_size >= meta["logs"]["log.txt"]


def test_a_signal_before_the_last_step_is_too_late(train, tmp_path, monkeypatch):
    signal_at(monkeypatch, signal.SIGTERM, 7)
    assert facts(train(ONCE, tmp_path))["finished"] is True


def test_a_stop_before_the_first_step_can_be_resumed_and_stopped_again(
    train, run, tmp_path, monkeypatch
):
    """As when the signal comes amid compilation and jax keeps it: nothing is saved twice."""
    out, ask = tmp_path / "logs", T.ask_to_stop
    for _ in range(2):
        with monkeypatch.context() as patch:
            asked = T.contextlib.nullcontext(lambda step: signal.SIGTERM)
            patch.setattr(T, "ask_to_stop", lambda asked=asked: asked)
            folders = list(out.glob("*"))
            saved = T.find_checkpoint(folders[0]) if folders else None
            with pytest.raises(T.Stopped, match="^stopped after 0 of 8 steps"):
                train(saved.cfg if saved else ONCE, out, saved)
    assert T.ask_to_stop is ask
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


def test_the_same_signal_twice_is_one_wish_and_later_it_ends_the_process(monkeypatch, request):
    """`timeout` tells the process and its group; a person presses Ctrl-C again after a while."""
    raised, now = [], [0.0]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))  # a script's `&` ignores it
    monkeypatch.setattr(T, "time", SimpleNamespace(**{**vars(T.time), "monotonic": lambda: now[0]}))
    with T.ask_to_stop() as asked:
        assert asked(0) == 0
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert asked(1) == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked(2) == signal.SIGINT  # the first of them
        now[0] = 2.0
        with monkeypatch.context() as patch:  # or it would end this process
            patch.setattr(signal, "raise_signal", lambda n: raised.append((n, signal.getsignal(n))))
            os.kill(os.getpid(), signal.SIGINT)
    assert raised == [(signal.SIGINT, signal.SIG_DFL)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nohup_is_heeded_and_ctrl_c_ends_at_once_where_nothing_could_be_saved(request):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with T.ask_to_stop() as asked:
        os.kill(os.getpid(), signal.SIGHUP)
        assert asked(1) == 0
    assert T.main(["tiny", "--show"]) == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what ends with `&`
    assert T.main(["tiny", "--show"]) == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


# ------------------------------------------------------------------------------------------------
# Several processes, here as threads that believe to be some (test_survival has real ones)
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def as_processes(monkeypatch):
    """as_processes(count, do): the errors (or None) of do(i) in `count` threads, one a process."""
    from jax.experimental import multihost_utils

    me = threading.local()

    def gather(count):
        slots, barrier = [None] * count, threading.Barrier(count, timeout=10)

        def all_of(x):
            slots[me.number] = np.array(x)
            barrier.wait()
            found = np.stack(slots)
            barrier.wait()
            return found

        return all_of

    def run(count, do):
        all_of, errors = gather(count), [None] * count
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: me.number)
        monkeypatch.setattr(multihost_utils, "process_allgather", all_of)
        monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: all_of(x)[0])

        def one(number):
            me.number = number
            try:
                do(number)
            except T.UserError as error:
                errors[number] = str(error)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    return run


def test_one_of_several_processes_tells_jax_of_ctrl_c(monkeypatch, request):
    """Which then stops all of them at one step, with a checkpoint."""
    from jax.experimental import multihost_utils

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    heard, told = [], signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, told))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: step == 3)
    with T.ask_to_stop() as asked:
        assert asked(1) == 0
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert heard == [signal.SIGTERM] * 2
        # Gradients may wait at the step at which all could stop: so it holds from there on.
        assert [asked(step) for step in (2, 3, 4)] == [0, signal.SIGTERM, signal.SIGTERM]


def test_processes_that_agree_go_on(as_processes):
    assert as_processes(3, lambda i: T.agree({"config": [1], "data": {"x": 2}})) == [None] * 3


def test_processes_that_do_not_agree_are_told_what_differs(as_processes):
    facts = [{"versions": {"jax": "1"}, "config": {"seed": seed}} for seed in (0, 0, 4, 5)]
    for error in as_processes(4, lambda i: T.agree(facts[i])):
        assert error == "the processes differ in config: make that equal on all hosts"


def test_the_coordinators_port_is_tried_before_jax_would_crash_on_it():
    """By process 0, which needs it free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(T.UserError, match=f"--coordinator {where}: .*in use: choose another"):
            T.check_port(where)
    T.check_port(where)


def test_processes_that_do_not_come_end_the_wait_with_one_line(monkeypatch, capsys):
    """Also where nobody answers at the coordinator's address; jax itself would wait longer."""
    ended = threading.Event()
    monkeypatch.setattr(T, "JOIN_SECONDS", 0.1)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: ended.wait(10))
    monkeypatch.setattr(os, "_exit", lambda status: (statuses.append(status), ended.set()))
    statuses = []
    T.join_hosts("127.0.0.1:1", 2, 1)
    line = "error: no word of all processes after 0.1 s: start them all, see --coordinator\n"
    assert statuses == [2] and capsys.readouterr().err == line


def test_all_processes_have_the_name_that_process_0_has_chosen(as_processes):
    names = {}
    as_processes(3, lambda i: names.update({i: T.from_first(f"2026-{i}-é")}))
    assert names == {i: "2026-0-é" for i in range(3)}


@pytest.mark.parametrize(
    "variables, given, joins",
    [
        ({}, (None, None, None), False),
        ({"TPU_WORKER_HOSTNAMES": "a"}, (None, None, None), False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, (None, None, None), True),
        ({"SLURM_STEP_NUM_TASKS": "1"}, (None, None, None), False),
        ({"SLURM_STEP_NUM_TASKS": "2"}, (None, None, None), True),
        ({}, ("a:1", 2, 1), True),
    ],
)
def test_a_process_joins_others_if_it_is_told_to_or_finds_some(
    monkeypatch, variables, given, joins
):
    for name in ("TPU_WORKER_HOSTNAMES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **_: seen.append(args))
    monkeypatch.setattr(T.Path, "exists", lambda self: False)  # no device files of a TPU
    T.join_hosts(*given)
    assert seen == [given] * joins
