"""Resuming runs with identical results, signals, and runs that cannot be resumed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
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
EIGHT = replace(BRIEF, steps=8, val_every=4, devices=2)  # checkpoints are possible after even steps
ONCE = replace(EIGHT, checkpoint_every=0)


@pytest.fixture(scope="module")
def train(shards):
    """Return a function that trains on the shards of the tests."""
    return lambda cfg, out, saved=None, **options: trained(cfg, out, shards, saved, **options)


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> T.Path:
    """The folder of an uninterrupted run, with checkpoints after 4 and 8 steps."""
    return train(replace(EIGHT, checkpoint_every=4), tmp_path_factory.mktemp("logs"))


@pytest.fixture
def copy(run, tmp_path) -> T.Path:
    """A copy of the folder, which a test may change."""
    return shutil.copytree(run, tmp_path / run.name)


@pytest.fixture(autouse=True)
def restored_signals():
    """A run sets handlers until its process ends."""
    before = T.signal_handlers()
    yield
    T.set_handlers(before)


def content(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_in_log(run) -> list[str]:
    text = (run / "log.txt").read_text()
    return [line.split()[0] for line in text.splitlines() if line.startswith("step:")]


# ---- Resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [EIGHT, pytest.param(CFG, marks=pytest.mark.slow)], ids=["1", "3"])
def test_a_resumed_run_equals_an_uninterrupted_one(train, tmp_path, cfg):
    """Bit for bit, with one stage and with three. The run is resumed after 4 of 8 steps: between
    packed rows, after a validation and after the start of averages. With three stages, head and
    embedding are still tied."""
    whole = train(replace(cfg, checkpoint_every=4), tmp_path)
    last = arrays(whole / "checkpoints/8")
    run = shutil.copytree(whole, tmp_path / "run")
    said, saved = [], back_to(run, 4)
    assert T.LoaderState(0, ()) < saved.loader < T.find_checkpoint(whole).loader
    assert train(saved.cfg, tmp_path, saved, say=said.append) == run
    got, want = facts(run), facts(whole)
    assert_same_arrays(arrays(run / "checkpoints/8"), last)
    assert without_times(run) == without_times(whole)  # each step once
    assert steps_in_log(run) == steps_in_log(whole)
    times = [line["train_time_ms"] for line in metrics(run)]
    assert times == sorted(times)
    assert (got["resumed"], got["finished"], got["run_id"]) == (True, True, "run")
    assert all(got[name] == want[name] for name in ("steps", "tokens", "val_loss"))
    log = (run / "log.txt").read_bytes()
    assert log.count(RULE) == 4 and log.split(RULE)[3].startswith(b"resumed\npython ")
    assert any(line.startswith("resumed after 4 of 8 steps from ") for line in said)


@pytest.mark.parametrize("fails", ["compile_all", "warm_up", "load_state", "start_copies"])
def test_a_resume_that_fails_before_training_changes_no_files(train, copy, monkeypatch, fails):
    """The run can be resumed later, or on another machine."""
    saved = back_to(copy, 4)
    (copy / "checkpoints/.8").mkdir()
    with open(copy / "log.txt", "a") as file:
        file.write("of lost steps\n")
    before = content(copy), sorted(copy.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(T, fails, lambda *_: (_ for _ in ()).throw(T.UserError("no")))
        with pytest.raises(T.UserError, match="no"):
            T.train(replace(saved.cfg, devices=2), copy.parent, "", saved, lambda line: None)
    assert (content(copy), sorted(copy.rglob("*"))) == before


def test_only_hidden_checkpoints_are_deleted(train, copy):
    saved = back_to(copy, 4)
    own = "checkpoints/4-backup", "checkpoints/keep", "best/mine", "checkpoints/.mine"
    hidden = "checkpoints/.8", "checkpoints/.old-2", "best/.old-3"
    for name in (*own, *hidden):
        (copy / name).mkdir(parents=True)
    train(saved.cfg, copy.parent, saved)
    assert all((copy / name).exists() for name in own)
    assert not any((copy / name).exists() for name in hidden)


def test_an_older_checkpoint_is_refused_if_a_newer_one_exists(copy, capsys):
    """The error has the commands for both checkpoints. Nothing is deleted."""
    back_to(copy, 8)
    before = content(copy)
    assert T.main(["--resume", str(copy / "checkpoints/4")]) == 2
    line = capsys.readouterr().err
    for words in (["--resume", copy], ["--start", copy / "checkpoints/4"]):
        assert T.command_for(T.__file__, *words) in line
    assert "is not the newest checkpoint: continue from step 8" in line
    assert content(copy) == before


def test_a_missing_last_checkpoint_can_be_made_by_resuming(train, run, copy, monkeypatch):
    """From the checkpoint before it, although the run is finished."""
    saved = back_to(copy, 4)
    ended = facts(run) | {"missing": "there is no checkpoint of step 8: the disk is full"}
    (copy / "run.json").write_text(json.dumps(ended))
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(T, "train", lambda cfg, out, command, saved, *_: found.append(saved))
        assert T.main(["--resume", str(copy)]) == 0
    assert found == [saved]
    train(saved.cfg, copy.parent, saved)
    assert steps_of(copy) == ["4", "8"] and without_times(copy) == without_times(run)
    assert "missing" not in facts(copy) and facts(copy)["finished"] is True
    assert_same_arrays(arrays(copy / "checkpoints/8"), arrays(run / "checkpoints/8"))


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 8])
def test_a_run_resumes_on_another_number_of_devices(train, run, copy, after):
    """Up to the order of sums. Each number of devices has another padding."""
    saved = back_to(copy, 4)
    train(replace(saved.cfg, devices=after), copy.parent, saved)
    assert facts(copy)["devices"]["count"] == after and facts(run)["devices"]["count"] == 2
    want, end = train_losses(run), arrays(run / "checkpoints/8")
    assert train_losses(copy)[:4] == want[:4]
    np.testing.assert_allclose(train_losses(copy), want, rtol=2e-5)
    got = arrays(copy / "checkpoints/8")
    for name in end:
        np.testing.assert_allclose(got[name], end[name], rtol=2e-3, atol=2e-4, err_msg=name)


def test_a_run_is_resumed_from_a_named_checkpoint(train, run, copy):
    """Later lines of the log are deleted, also an incomplete line of a crash."""
    (copy / "run.json").unlink()  # the checkpoint is enough
    for name in ("metrics.jsonl", "log.txt"):
        with open(copy / name, "a") as file:
            file.write('{"step": 9, "tra')
    saved = T.find_checkpoint(copy / "checkpoints/4")
    assert saved.step == 4
    train(saved.cfg, copy.parent, saved)
    assert steps_of(copy) == ["4", "8"] and facts(copy)["finished"] is True
    assert without_times(copy) == without_times(run) and steps_in_log(copy) == steps_in_log(run)
    assert_same_arrays(arrays(copy / "checkpoints/8"), arrays(run / "checkpoints/8"))


def test_a_damaged_checkpoint_is_skipped_and_replaced(train, run, copy):
    said = []
    back_to(copy, 8)
    (copy / "checkpoints/8/params.embed.0.npy").write_bytes(b"")
    (copy / "checkpoints/.8").mkdir()  # left by a killed process
    saved = T.find_checkpoint(copy, said.append)
    assert saved.step == 4 and said[0].startswith("warning: ")
    train(saved.cfg, copy.parent, saved)
    assert steps_of(copy) == ["4", "8"]
    assert_same_arrays(arrays(copy / "checkpoints/8"), arrays(run / "checkpoints/8"))


# ---- --start -----------------------------------------------------------------------------------


def started(run_dir, capsys, monkeypatch, *argv) -> T.Config:
    """Return the config of `--start RUN_DIR ...`."""
    found = []
    monkeypatch.setattr(T, "train", lambda cfg, out, command, saved, *_: found.append((cfg, saved)))
    assert T.main(["--start", str(run_dir), *argv]) == 0, capsys.readouterr().err
    ((cfg, saved),) = found
    assert saved is None
    return cfg


def test_a_new_run_starts_with_the_parameters_of_another(
    train, copy, tmp_path, capsys, monkeypatch
):
    """Its first loss is close to the last loss of the other run. Schedule and clock are reset."""
    cfg = started(copy, capsys, monkeypatch, "--set", "checkpoint_every=2")
    newest = str(copy / "checkpoints/8")
    changed = {"start": newest, "devices": 0, "data": cfg.data}
    assert cfg == replace(EIGHT, checkpoint_every=2, **changed)
    monkeypatch.undo()
    folder = train(replace(cfg, devices=2), tmp_path)
    first, last = metrics(folder)[0], metrics(copy)[-1]
    assert first["step"] == 0 and first["train_time_ms"] == 0 and first["tokens"] == 0
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=0.01)
    assert first["val_loss"] < 0.98 * metrics(copy)[0]["val_loss"]
    assert facts(folder)["config"]["start"] == newest
    assert not facts(folder)["resumed"]
    # It can be resumed, also if the other run is deleted.
    saved = back_to(folder, 6)
    assert train(replace(saved.cfg, start="gone"), tmp_path, saved).resolve() == folder.resolve()
    assert facts(folder)["finished"]


@pytest.mark.parametrize("argv, words", [
    (["tiny"], "--start uses the model of the run: drop PRESET and seed"),
    (["--seed", "3"], "drop PRESET and seed"),
    (["--set", "seed=3"], "drop PRESET and seed"),
    (["--set", "start=x"], "--set start=: use --start RUN_DIR"),
    (["--set", "mlp_width=64"], "--start uses the model of the run: drop settings of sizes"),
    (["--resume", "x"], "--resume uses the config of the run: drop PRESET, --seed, --show, --set"),
])  # fmt: skip
def test_options_that_start_excludes_are_refused(run, capsys, argv, words):
    assert T.main(["--start", str(run), *argv]) == 2
    assert words in capsys.readouterr().err


def test_start_tokenizes_a_text_with_the_encoding_of_the_run(run, tmp_path, capsys, monkeypatch):
    text = tmp_path / "other.txt"
    text.write_text("Roses are red. " * 900)
    asked = []
    data = f"data={tmp_path}"
    found = json.dumps([str(run), [data, "epochs=3"], "the last tenth of it"])
    monkeypatch.setattr(T, "run_tool", lambda *words: asked.append(words) or found)
    cfg = started(run, capsys, monkeypatch, str(text), "--set", "steps=6")
    assert (cfg.data, cfg.epochs, cfg.steps) == (str(tmp_path), 3, 6)
    assert asked == [("tokenize_text.py", text, "--for", str(run), "--set", "steps=6")]


# ---- Runs that cannot be resumed ---------------------------------------------------------------


def test_a_folder_of_runs_gives_the_newest_checkpoint(run, tmp_path):
    """As in `--resume logs`, or records/sample.py logs."""
    runs = [shutil.copytree(run, tmp_path / name) for name in ("b", "a", "empty")]
    shutil.rmtree(runs[2] / "checkpoints")
    for seconds, folder in enumerate(runs[:2]):
        for step, newer in (("4", 0), ("8", 0.5)):
            os.utime(folder / "checkpoints" / step, (1, 1000 + seconds + newer))
    said = []
    newest = runs[1] / "checkpoints/8"
    assert T.find_checkpoint(tmp_path, said.append).folder == newest
    assert said == [f"the newest checkpoint of the runs in {tmp_path}: {newest}"]
    with pytest.raises(T.UserError, match="no complete checkpoint in .*empty: pass a run with"):
        T.find_checkpoint(runs[2], pytest.fail)


@pytest.mark.parametrize("kept", [[4, 8], [4], []])
def test_a_finished_run_is_not_resumed(copy, capsys, kept):
    """With any of its checkpoints."""
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name) not in kept:
            shutil.rmtree(folder)
    before = content(copy)
    assert T.main(["--resume", str(copy)]) == 2
    again = T.command_for("train_gpt.py", "--start", copy, "--set", "steps=N")
    line = f"{copy} is finished: there is nothing to resume; to train longer, {again}"
    line = line if kept else "no complete checkpoint in "
    assert line in capsys.readouterr().err
    assert content(copy) == before


def test_a_run_is_not_resumed_on_other_tokens(copy, shards, tmp_path):
    """Not even if only one token differs."""
    other = shutil.copytree(shards, tmp_path / "other")
    tokens = documents(1, 3000)
    tokens[7] += 1
    write_shard(other / "small_train_000001.bin", tokens)
    saved = back_to(copy, 4)
    before = content(copy)
    changed = saved._replace(meta=saved.meta | {"data": {}})
    small = shutil.copytree(shards, tmp_path / "small")  # also too small for the run
    write_shard(small / "small_train_000001.bin", documents(1, 30))
    (small / "small_train_000002.bin").unlink()
    places = (other, saved), (shards, changed), (small, saved)
    for data, of in places:  # other shards now, or at the start of the run
        words = f"{data} does not contain the shards of {copy}: omit --data if {shards} does, or "
        words += f"train with its parameters: --start {copy} --data {data}"
        with pytest.raises(T.UserError, match=words):
            trained(saved.cfg, copy.parent, data, of)
    assert content(copy) == before


def rewrite_meta(checkpoint, change):
    """Let `change` edit the meta.json of a checkpoint."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    change(meta)
    (checkpoint / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("renamed", [False, True])
def test_a_run_is_not_resumed_with_another_source(copy, capsys, renamed):
    """This is also the error if the other source had other settings."""
    back_to(copy, 4)

    def change(meta):
        meta["source_sha256"] = "0"
        if renamed:
            meta["config"]["of_old"] = meta["config"].pop("tail")

    rewrite_meta(copy / "checkpoints/4", change)
    before = content(copy)
    assert T.main(["--resume", str(copy)]) == 2
    line = capsys.readouterr().err
    assert content(copy) == before
    assert f"train_gpt.py has changed since {copy} was started: restore it (" in line
    assert f"{copy / 'log.txt'} begins with its source" in line and "--start" in line
    (copy / "log.txt").unlink()
    assert T.main(["--resume", str(copy)]) == 2
    assert "was started: restore it, or use --start" in capsys.readouterr().err


def test_a_config_of_another_version(copy, monkeypatch, capsys):
    """Missing fields have their defaults. Unknown fields are refused unless RENAMED lists them as
    removed."""
    saved = T.find_checkpoint(copy / "checkpoints/8")
    checkpoint = shutil.copytree(copy, copy.parent / "old") / "checkpoints/8"

    def change(meta):
        del meta["config"]["ngram_drop"], meta["config"]["layers"][0]["xsa"]
        meta["config"] |= {"gone": [0, 1]}
        meta["config"]["stages"][0] |= {"too": 3}

    rewrite_meta(checkpoint, change)
    for removed, unknown in (({}, "gone=[0, 1]"), ({"gone": None}, "too=3")):
        monkeypatch.setattr(T, "RENAMED", removed)
        assert T.main(["--start", str(checkpoint), "--show"]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"error: settings of another train_gpt.py ({unknown}): use that")
    monkeypatch.setattr(T, "RENAMED", {"gone": None, "too": None})
    assert T.find_checkpoint(checkpoint, pytest.fail).cfg == saved.cfg
    rewrite_meta(checkpoint, lambda meta: meta["config"]["stages"][0].pop("share"))
    with pytest.raises(T.UserError, match="stages.0: share is missing, and has no default"):
        T.find_checkpoint(checkpoint, pytest.fail)


def test_a_checkpoint_outside_its_run_is_not_resumed(copy, tmp_path, capsys):
    alone = shutil.copytree(copy / "checkpoints/8", tmp_path / "only/8")
    assert T.find_checkpoint(alone, pytest.fail).step == 8
    backup = shutil.copytree(alone, copy / "checkpoints/8.bak")
    assert T.checkpoint_to_resume(backup, pytest.fail).folder == backup
    assert T.main(["--resume", str(alone)]) == 2
    start = T.command_for(T.__file__, "--start", alone)
    words = f"{alone} is not in its run directory: copy it there, or start a new run with them: "
    assert words + start in capsys.readouterr().err


def test_file_names_of_a_checkpoint_cannot_leave_its_folder(copy):
    outside = copy / "params.x.0.npy"
    np.save(outside, np.zeros(3))
    size = outside.stat().st_size

    def change(meta):
        meta["files"]["../../params.x.0.npy"] = size

    rewrite_meta(copy / "checkpoints/8", change)
    said = []
    assert T.find_checkpoint(copy, said.append).step == 4
    assert "../../params.x.0.npy is incomplete" in said[0]


def test_printed_commands_run_this_python(tmp_path, monkeypatch):
    """Also if another Python of this name is found first, or none, or in another folder. The Python
    of a virtual environment is a link to a Python with other packages."""
    bin, env = tmp_path / "bin", tmp_path / "env/bin"
    for folder in (bin, env):
        folder.mkdir(parents=True)
    (bin / "python3").touch(mode=0o755)
    (env / "python3").symlink_to(bin / "python3")
    monkeypatch.setattr(sys, "executable", f"{env}/python3")
    run = "my logs/*"
    monkeypatch.setenv("PATH", f"{env}:{bin}")
    assert T.command_for("train_gpt.py", run) == "python3 train_gpt.py 'my logs/*'"
    for path in (f"{bin}:{env}", "/nowhere"):
        monkeypatch.setenv("PATH", path)
        assert T.command_for("train_gpt.py", run) == f"{env}/python3 train_gpt.py 'my logs/*'"
    monkeypatch.chdir(tmp_path)
    written = T.command_for(tmp_path / "repo/train_gpt.py", run)
    assert written == f"{env}/python3 repo/train_gpt.py 'my logs/*'"


def test_settings_of_the_machine_may_change_on_resume(copy, monkeypatch, capsys):
    """Other settings may not. The log has the new config."""
    back_to(copy, 4)
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))
    assert T.main(["--resume", str(copy), "--set", "lr_anvil=1"]) == 2
    words = "drop PRESET, --seed, --show, --set but for devices, kernels, "
    assert words in capsys.readouterr().err
    before = (copy / "log.txt").read_text()
    monkeypatch.setattr(T, "compile_all", lambda *_: ({}, {}))
    monkeypatch.setattr(T, "ask_to_stop", lambda say: pytest.fail("training begins"))
    with pytest.raises(pytest.fail.Exception, match="training begins"):
        T.main(["--resume", str(copy), "--set", "recompute=1", "loss_chunk=32"])
    config = facts(copy)["config"]
    assert (config["recompute"], config["loss_chunk"], config["steps"]) == (True, 32, 8)
    head = (copy / "log.txt").read_text()[len(before.split("step:5/")[0]) :]
    assert f"\nconfig: {json.dumps(config)}\n" in head


def test_a_run_of_another_process_is_not_resumed(copy, capsys, monkeypatch):
    """It can be resumed once the other process has ended, even if it was killed."""
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))
    back_to(copy, 4)
    code = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, 2); print(flush=True)"
    words = [sys.executable, "-c", f"{code}; input()", str(copy / "log.txt")]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    before = content(copy)
    assert T.main(["--resume", str(copy)]) == 2
    assert f"another process writes {copy}: wait for it, or stop it" in capsys.readouterr().err
    assert content(copy) == before
    other.kill()
    other.communicate()
    with pytest.raises(pytest.fail.Exception, match="went on to compile"):
        T.main(["--resume", str(copy)])


# ---- Signals -----------------------------------------------------------------------------------


def signal_at(patch, number: int, at: int):
    """Send a signal to this process when the loss of step `at` is logged."""

    def line(self, step, *args, real=T.RunLog.line, **more):
        if step == at:
            os.kill(os.getpid(), number)
        return real(self, step, *args, **more)

    patch.setattr(T.RunLog, "line", line)


def test_a_stop_before_the_first_step_after_a_resume_writes_no_checkpoint(train, copy, monkeypatch):
    """The state has not changed, and there may be little time."""
    saved = back_to(copy, 4)
    monkeypatch.setattr(T, "ask_to_stop", lambda say: lambda step: signal.SIGTERM)
    monkeypatch.setattr(T.RunLog, "save", lambda *_: pytest.fail("writes it again"))
    with pytest.raises(SystemExit) as stopped:
        train(replace(EIGHT, checkpoint_every=4), copy.parent, saved)
    assert stopped.value.code == 128 + signal.SIGTERM and steps_of(copy) == ["4"]


@pytest.mark.parametrize(
    "number, at, stop",
    [(signal.SIGTERM, 3, 4), (signal.SIGINT, 2, 4), (signal.SIGHUP, 1, 2)],
    ids=["SIGTERM", "Ctrl-C", "closed terminal"],
)
def test_a_signal_ends_the_run_with_a_checkpoint(
    train, run, tmp_path, monkeypatch, number, at, stop
):
    """After the next step without accumulated gradients. All threads end. The resumed run equals an
    uninterrupted one."""
    said, out = [], tmp_path / "my logs"
    threads = {*threading.enumerate()}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with monkeypatch.context() as patch:
        signal_at(patch, number, at)
        with pytest.raises(SystemExit) as stopped:
            train(ONCE, out, say=said.append)
    (folder,) = out.iterdir()
    assert stopped.value.code == 128 + number
    for thread in {*threading.enumerate()} - threads:
        thread.join(2)
        assert not thread.is_alive()
    again = T.command_for("train_gpt.py", "--resume", folder)
    assert said[-1] == f"stopped after {stop} of 8 steps; to continue: {again}"
    assert steps_of(folder) == [str(stop)]
    saved, got = T.find_checkpoint(folder), facts(folder)
    assert (got["finished"], got["steps"], got["tokens"]) == (False, stop, 256 * stop)
    assert got["train_time_ms"] == pytest.approx(saved.meta["train_time_ms"], abs=500)
    train(saved.cfg, out, saved)
    assert without_times(folder) == without_times(run)
    assert_same_arrays(arrays(folder / "checkpoints/8"), arrays(run / "checkpoints/8"))


def test_a_signal_ends_the_process_if_it_comes_again_after_a_while(monkeypatch):
    """`timeout` sends a signal twice at once. People press Ctrl-C again after a while."""
    ended, now = [], [0.0]
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = T.ask_to_stop()
    assert asked(0) == 0
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        assert asked(1) == signal.SIGINT
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked(2) == signal.SIGINT and not ended  # the first signal
    now[0] = 2.0
    os.kill(os.getpid(), signal.SIGXCPU)  # it comes every second
    assert asked(3) == signal.SIGINT and not ended
    os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]


def test_the_time_of_a_suspended_process_is_reported(monkeypatch):
    """As by Ctrl-Z and fg."""
    now, said = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = T.ask_to_stop(said.append)
    assert asked(0) == 0
    now[0] = 20.0
    os.kill(os.getpid(), signal.SIGCONT)
    assert asked(1) == 0 and asked(2) == 0
    now[0] = 20.5  # `timeout` sends this signal to running processes
    os.kill(os.getpid(), signal.SIGCONT)
    assert asked(3) == 0
    assert said == ["warning: suspended for up to 20 s, which training time includes"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_warnings_of_schedulers_stop_a_run(number):
    """Of `sbatch --signal=USR1@120`, `qsub -notify`, and limits of CPU time."""
    asked = T.ask_to_stop()
    os.kill(os.getpid(), number)
    assert asked(1) == number


def test_ignored_signals_stay_ignored_and_ctrl_c_ends_a_command_before_training(monkeypatch):
    """`main` restores the handlers of its caller."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked = T.ask_to_stop()
    os.kill(os.getpid(), signal.SIGHUP)
    assert asked(1) == 0
    seen = []
    monkeypatch.setattr(T, "show", lambda cfg: seen.append(signal.getsignal(signal.SIGINT)))
    for before, after in (
        (signal.default_int_handler, signal.SIG_DFL),
        (signal.SIG_IGN, signal.SIG_IGN),  # as in a shell script with `&`
    ):
        signal.signal(signal.SIGINT, before)
        assert T.main(["tiny", "--show"]) == 0
        assert seen.pop() is after and signal.getsignal(signal.SIGINT) is before


def test_one_of_several_processes_passes_signals_to_jax(monkeypatch):
    """JAX then stops all of them at the same step. Before training, SIGTERM ends a process at once
    (join_processes)."""
    from jax.experimental import multihost_utils

    begun = []
    state = multihost_utils.distributed.global_state
    monkeypatch.setattr(state, "initialize_preemption_sync_manager", lambda: begun.append(1))
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: step == 3)
    asked = T.ask_to_stop()
    assert asked(1) == 0 and begun == [1]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    assert heard == [signal.SIGTERM] * 3
    # The answer stays the same, since the first step may have accumulated gradients.
    assert [asked(step) for step in (2, 3, 4)] == [0, signal.SIGTERM, signal.SIGTERM]


# ---- Several processes (real ones: test_survival.py) -------------------------------------------


def test_differences_between_processes_are_named(monkeypatch):
    """The folder of the data may differ."""
    from jax.experimental import multihost_utils

    facts = {"source_sha256": "0", "versions": {}, "data": {}, "config": {"data": "", "seed": 0}}
    digests = []
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: digests.append(x) or x)
    for change in ({}, {"config": {"data": "elsewhere", "seed": 0}}, {"config": {"data": ""}}):
        T.check_agreement(facts | change, None)
    for others, words in ((digests[:2], ""), (digests, "the processes differ in config: use")):
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda _, x=others: np.stack(x))
        with pytest.raises(T.UserError, match=words) if words else contextlib.nullcontext():
            T.check_agreement(facts, None)


# ---- keep_best ---------------------------------------------------------------------------------


def run_with(losses, tmp_path, shards, monkeypatch, saved=None, **changes):
    """Return (folder, lines) of a run of 8 steps with these validation losses."""
    rest, said = iter(losses), []
    monkeypatch.setattr(T, "evaluate", lambda *_: (next(rest), 0))
    cfg = replace(BRIEF, steps=8, devices=2, val_every=1, keep_best=True, **changes)
    return trained(cfg, tmp_path, shards, saved, said.append), said


def test_the_best_parameters_are_kept_and_reported(tmp_path, shards, monkeypatch):
    losses = [4.0, 3.0, 3.2, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0]
    run, said = run_with(losses, tmp_path, shards, monkeypatch)
    assert T.checkpoint_steps(run / "best") == [3] and steps_of(run)[-1] == "8"
    best, last = T.find_checkpoint(run / "best"), T.find_checkpoint(run)
    assert (best.step, best.run_dir, best.meta["val_loss"], last.step) == (3, run, 2.5, 8)
    assert T.find_checkpoint(run / "best/3").step == 3
    params = {name for name in arrays(last.folder) if name.startswith("params.")}
    assert arrays(best.folder).keys() == params
    assert facts(run)["best"] == {"step": 3, "val_loss": 2.5}
    lowest = f"the lowest was 2.5000 after step 3 (parameters in {run}/best)"
    assert f"; {lowest}; " in said[-1]
    (warning,) = [i for i, line in enumerate(said) if "has not been below" in line]
    assert "2.5000 since step 3: it may still fall" in said[warning]
    assert said[warning - 1].startswith("step:5/8 val_loss:2.7")


def test_the_last_parameters_may_be_the_best(tmp_path, shards, monkeypatch):
    """They are averaged, and kept also without a last checkpoint. keep_best=0 keeps none."""
    losses = [4.0, 3.0, 3.2, 2.5, 2.6, 2.7, 2.8, 2.9, 2.4]
    run, said = run_with(losses, tmp_path, shards, monkeypatch, checkpoint_end="never")
    assert T.checkpoint_steps(run / "best") == [8] and steps_of(run)[-1] == "6"
    assert "lowest" not in said[-1]
    averaged, before = arrays(run / "best/8"), arrays(run / "checkpoints/6")
    assert not np.array_equal(averaged["params.mlp_bank"], before["params.mlp_bank"])
    rest = iter([4.0, 2.0, 3.0])
    monkeypatch.setattr(T, "evaluate", lambda *_: (next(rest), 0))
    plain = trained(replace(BRIEF, devices=2, val_every=2), tmp_path, shards)
    assert facts(plain)["best"]["step"] == 2 and not (plain / "best").exists()


def test_a_resumed_run_keeps_its_best_but_not_that_of_lost_steps(tmp_path, shards, monkeypatch):
    losses = [4.0, 3.0, 3.2, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0]
    run, _ = run_with(losses, tmp_path, shards, monkeypatch)
    saved = back_to(run, 6)
    shutil.copytree(run / "best/3", run / "best/7")
    assert saved.step == 6
    again, said = run_with(losses[7:], tmp_path, shards, monkeypatch, saved)
    assert again == run and T.checkpoint_steps(run / "best") == [3, 7]  # both are kept
    assert f"lowest was 2.5000 after step 3 (parameters in {run}/best)" in said[-1]
    assert facts(run)["best"]["step"] == 3
    shutil.rmtree(run / "best/3")
    run_with([2.9, 3.0], tmp_path, shards, monkeypatch, back_to(run, 6))
    (last,) = [path for path in (run / "best").iterdir()]
    assert last.name == "7"


def test_a_run_is_not_resumed_from_its_best_parameters(tmp_path, shards, monkeypatch, capsys):
    """If no checkpoint can be used, the error names the best parameters."""
    run, _ = run_with([4.0, 3.0, 3.2, *[3.3] * 6], tmp_path, shards, monkeypatch)
    back_to(run, 6)
    before = content(run)
    for place in ("best", "best/1"):
        assert T.main(["--resume", str(run / place)]) == 2
        start = T.command_for(T.__file__, "--start", run / "best/1")
        words = f"{run}/best/1 holds parameters only: start a new run with them: {start}"
        assert words in capsys.readouterr().err
    assert content(run) == before
    (run / "checkpoints/6/params.embed.0.npy").write_bytes(b"")
    assert T.main(["--resume", str(run)]) == 2
    words = f"params.embed.0.npy is incomplete); {run}/best has parameters for --start"
    assert words in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    for option in ("--resume", "--start"):
        assert T.main([option, str(run)]) == 2
        line = capsys.readouterr().err
        assert f"no complete checkpoint in {run}: pass a run with a" in line
        assert f"; {run}/best has parameters for --start" in line


def test_new_best_parameters_are_written_before_old_ones_are_deleted(tmp_path, monkeypatch):
    """A process that is killed in between leaves both."""
    shards = [("params.x.0.npy", np.zeros(3))]
    T.write_checkpoint(tmp_path / "best", iter(shards), {"step": 3})
    monkeypatch.setattr(T, "remove_checkpoint", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        T.write_checkpoint(tmp_path / "best", iter(shards), {"step": 5})
    assert T.checkpoint_steps(tmp_path / "best") == [3, 5]


def test_a_run_whose_tokens_were_deleted_names_the_text(copy, capsys):
    def change(meta):
        meta["config"]["data"] = str(copy.parent / "deleted.tokens/1")

    rewrite_meta(copy / "checkpoints/4", change)
    back_to(copy, 4)
    assert T.main(["--resume", str(copy)]) == 2
    line = capsys.readouterr().err
    assert "no folder " in line and "pass --data TEXT with the same text" in line
