"""A complete run: log, metrics, run.json, the clock, and ways to end."""

import hashlib
import importlib.metadata
import io
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT, small_config
from programs import by_name, mesh_of, programs_of, quick_compilation, updates_at
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

# Checkpoints are possible after 2, 4, 6 and 8 steps; validation after 0, 4 and 8.
CFG = replace(BRIEF, steps=8, val_every=4, devices=2)
RULE = b"=" * 100 + b"\n"


@pytest.fixture(scope="module")
def train(shards):
    """Return a function that trains on the shards of the tests."""
    return lambda cfg, out, **options: trained(cfg, out, shards, **options)


@pytest.fixture(scope="module")
def run(train, tmp_path_factory):
    """A run for most tests: its folder, terminal lines, log and metrics; and `seen`, a list of
    (event, whether the clock was running)."""
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

    jax.clear_caches()  # programs of earlier tests must be compiled again
    jax.monitoring.register_event_duration_secs_listener(on_event)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, T.Clock, "start", clock=True)
        watch(patch, T.Clock, "stop", clock=False)
        watch(patch, T.TokenStream, "find_documents", event="documents")
        for name in ("next_batch", "evaluate", "write_checkpoint", "warm_up", "vocabulary"):
            watch(patch, T, name, event=name)
        folder = train(CFG, tmp_path_factory.mktemp("logs"), say=said.append)
    listening = False
    assert_ended(threads)
    log = (folder / "log.txt").read_bytes()
    return SimpleNamespace(dir=folder, said=said, log=log, metrics=metrics(folder), seen=seen)


def assert_ended(threads: set):
    """Check that all threads but `threads` end within five seconds."""
    end = time.monotonic() + 5
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < end:
        time.sleep(0.01)  # join() fails for threads that a pool has not started
    assert not left


def last_lines(run) -> list[str]:
    """Return the lines of log.txt after its second rule, except lines of checkpoints."""
    lines = run.log.split(RULE)[2].decode().splitlines()
    return [line for line in lines if not line.startswith("checkpoint:")]


# ---- log.txt, metrics.jsonl, run.json, the terminal --------------------------------------------


def test_log_begins_with_the_source_and_the_facts_of_the_run(run):
    source = (ROOT / "train_gpt.py").read_bytes()
    assert run.log.startswith(source)
    before, about, after = run.log[len(source) :].split(RULE)
    assert before.strip() == b"" and after
    lines = about.decode().splitlines()
    for package in ("jax", "jaxlib", "numpy"):
        assert f"{package} {importlib.metadata.version(package)}" in lines
    assert "2 x cpu (cpu)" in lines and "command: train 'this'" in lines
    for name in ("config", "host", "environment", "choices", "parameters", "data"):
        assert f"{name}: {json.dumps(facts(run.dir)[name])}" in lines


def test_log_has_each_step_once_in_the_format_of_modded_nanogpt(run):
    *steps, dropped, last = last_lines(run)
    assert dropped == "n-grams that found no room: 0" and facts(run.dir)["dropped_ngrams"] == 0
    assert re.fullmatch(r"peak memory allocated: \d+ MiB", last)
    form = r"step:(\d+)/8 (val_loss:\d+\.\d{4} )?train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    found = [re.fullmatch(form, line) for line in steps]
    assert all(found), "a line has another form"
    order = [(int(match[1]), bool(match[2])) for match in found]
    assert order == [
        *((0, True), (1, False), (2, False), (3, False), (4, False), (4, True)),
        *((5, False), (6, False), (7, False), (8, False), (8, True)),
    ]
    times = [int(match[3]) for match in found]
    assert times == sorted(times) and times[-1] > 0
    each = [float(match[4]) * max(int(match[1]), 1) for match in found]
    np.testing.assert_allclose(each, times, atol=0.5 + 0.005 * 8 + 1e-6)  # rounded to 0.01 ms


def test_metrics_agree_with_the_log(run):
    lines = last_lines(run)[:-2]
    assert len(run.metrics) == len(lines)
    for fields, line in zip(run.metrics, lines, strict=True):
        step, ms = fields["step"], fields["train_time_ms"]
        assert line.startswith(f"step:{step}/8 ") and fields["tokens"] == 256 * step
        assert abs(int(re.search(r"train_time:(\d+)ms", line)[1]) - ms) < 0.501
        common = {"step", "train_time_ms", "tokens", "dropped_ngrams"}
        if "val_loss" in line:
            assert {*fields} == common | {"val_loss"}
            assert f"val_loss:{fields['val_loss']:.4f} " in line
        else:
            assert {*fields} == common | {"train_loss", "lr", "pass"} and fields["pass"] == 1
            assert fields["lr"] == T.schedule(CFG).hyper.lr[step - 1]


def test_facts_in_run_json(run, monkeypatch):
    got = facts(run.dir)
    shards = T.Path(got["config"]["data"]).glob("*.bin")
    seconds = got.pop("compile_seconds")
    assert seconds.keys() == by_name(T.programs(CFG, mesh_of(2), T.PLAIN)).keys()
    assert min(seconds.values()) > 0
    host, environment = got.pop("host"), got.pop("environment")
    assert host.keys() == {"cpu", "cores", "platform"} and 0 < host["cores"] <= os.cpu_count()
    assert environment["JAX_PLATFORMS"] == "cpu" and "HOME" not in environment
    assert got == {
        "run_id": run.dir.name,
        "preset": "brief",
        "config": json.loads(json.dumps(asdict(replace(CFG, data=got["config"]["data"])))),
        "seed": 0,
        "parameters": sum(math.prod(row.shape) for row in T.param_specs(CFG).values()),
        "command": "train 'this'",
        "source_sha256": hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest(),
        "versions": T.versions(),
        "devices": {"kind": "cpu", "count": 2, "platform": "cpu", "processes": 1},
        "choices": {
            "kernels": T.choose_kernels(CFG, jax.devices()[0])[1],
            "whole_loss": "never",
            "micro_batches": [2],
            "loss_chunks": [1],
            "compiler_options": {},
        },
        "data": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in shards
        },
        "steps": 8,
        "tokens": 8 * 256,
        "val_loss": run.metrics[-1]["val_loss"],
        "best": {"step": 8, "val_loss": run.metrics[-1]["val_loss"]},
        "train_time_ms": run.metrics[-1]["train_time_ms"],
        "dropped_ngrams": 0,
        "target": 10.0,
        "resumed": False,
        "finished": True,
    }
    assert {path.name for path in run.dir.iterdir()} == {
        "log.txt", "metrics.jsonl", "run.json", "checkpoints"
    }  # fmt: skip


def test_choices_include_sizes_that_depend_on_the_machine():
    """For each stage and number of candidates. Lengths of rows are included if they changed."""
    cfg = small_config(loss_chunk=16, micro_tokens=64)
    mesh = mesh_of(2)
    on_devices = T.make_mesh(replace(cfg, devices=2))[0]
    chosen = T.sizes_chosen(cfg, on_devices, mesh, T.PLAIN)
    assert chosen["micro_batches"] == [2, 4, 4] and chosen["whole_loss"] == "auto"
    assert chosen["loss_chunks"] == [1, 4, 4]  # chunks of up to 34, 23 and 16 tokens
    fused = T.PLAIN._replace(cross_entropy=T.fused_cross_entropy)
    whole = replace(on_devices, whole_loss="always")
    assert T.sizes_chosen(cfg, whole, mesh, fused)["loss_chunks"] == [1, 1, 1]
    assert "row_tokens" not in chosen
    many = T.for_devices(T.PRESETS["speedrun"], 16)
    chosen = T.sizes_chosen(T.PRESETS["speedrun"], many, SimpleNamespace(size=16), T.PLAIN)
    assert chosen["row_tokens"] == [8192, 16384, 24576, 20480, 8192]


def test_a_run_on_fineweb_reports_whether_its_shards_are_verified(train, shards, tmp_path):
    folder = tmp_path / "fineweb"
    folder.mkdir()
    hashes = {}
    for path in shards.glob("*.bin"):
        name = path.name.replace("small", "fineweb")
        shutil.copy(path, folder / name)
        hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    cfg = replace(CFG, checkpoint_every=0, checkpoint_end="never")
    for published, word in ((None, "unverified"), ({}, "unverified"), (hashes, "verified")):
        if published is not None:
            (folder / T.HASHES).write_text(json.dumps({"sha256": published}))
        said = []
        run = trained(cfg, tmp_path / "logs", folder, say=said.append)
        assert f"FineWeb shards: {word}" in said
        assert f"\nFineWeb shards: {word}\n" in (run / "log.txt").read_text()


def test_lines_on_the_terminal(run, train, tmp_path):
    assert run.said[0].startswith(f"run {run.dir} on 2 x cpu; kernels: ")
    assert sum("val_loss:" in line for line in run.said) == 3
    loss = facts(run.dir)["val_loss"]
    assert run.said[-1].startswith(f"target 10.0 met: val_loss {loss:.4f} after ")
    assert "2,048 tokens" in run.said[-1]
    said = []
    train(replace(CFG, log_every=3, target=0.5, checkpoint_every=0), tmp_path, say=said.append)
    steps = [line.split()[0] for line in said if " train_loss:" in line]
    assert steps == ["step:1/8", "step:3/8", "step:6/8"]
    assert said[-1].startswith("target 0.5 MISSED: ")
    assert said[-1].endswith(f"; see {next(tmp_path.iterdir())}")  # the folder of the run


def test_progress_is_one_line_on_a_terminal_only(monkeypatch):
    lines = "1 of 2 programs are ready\r", "step:1/4"
    for terminal, want in ((True, "".join(lines) + "\n"), (False, "\n".join(lines) + "\n")):
        stream = io.StringIO()
        stream.isatty = lambda answer=terminal: answer
        for line in lines:
            T.tell(line, stream)
        assert stream.getvalue() == want


def test_a_run_ends_with_a_sample_also_without_a_checkpoint(train, tmp_path):
    """A sample from a checkpoint is the same."""
    cfg = replace(CFG, sample_tokens=5, checkpoint_every=0, checkpoint_end="never")
    said = []
    folder = train(cfg, tmp_path, say=said.append)
    text = (folder / "sample.txt").read_text()
    assert said[-1] == text.removesuffix("\n") and not (folder / "checkpoints").exists()
    assert text.startswith("bits per byte of the validation text: the model ")

    kept = train(replace(cfg, checkpoint_end="always"), tmp_path, say=said.append)
    again = T.command_for(ROOT / "records/sample.py", kept, "--prompt", "TEXT")
    assert said[-1] == f"others: {again}"
    sample = runpy.run_path(str(ROOT / "records/sample.py"))
    with quick_compilation():
        model = sample["load"](T.find_checkpoint(kept))
        draws = [partial(sample["draw"], np.random.default_rng([cfg.seed, 0]))]
        _, prompt = sample["opening"](model, None)
        *pieces, _ = sample["samples"](model, prompt, 5, draws)
    for run in (folder, kept):
        assert "".join(pieces) in (run / "sample.txt").read_text()


def test_a_run_on_ids_without_bytes_ends_without_a_sample(train, run, tmp_path):
    """It has candidates, signs and hashed n-grams like other runs, but no prefixes."""
    said = []
    folder = train(replace(CFG, encoding="ids", sample_tokens=5), tmp_path, say=said.append)
    assert said[-1] == "no sample: the tokens have no bytes (encoding=ids)"
    assert said[-2].startswith("target 10.0 met: val_loss")  # the target is for this encoding
    assert facts(folder)["finished"] and not (folder / "sample.txt").exists()
    assert train_losses(folder) != train_losses(run.dir)  # n-grams of ids instead of normal forms
    raw = train(replace(CFG, ngram_ids="raw"), tmp_path)
    assert train_losses(folder) == train_losses(raw)


@pytest.mark.parametrize("other", [None, object()])
def test_a_tool_imports_the_running_trainer(other, monkeypatch):
    """As `train_gpt`, also if the trainer is the main module. Another module of this name stays."""
    seen = []
    monkeypatch.setattr(T.runpy, "run_path", lambda path: seen.append(sys.modules["train_gpt"]))
    monkeypatch.delitem(sys.modules, "train_gpt")
    if other:
        monkeypatch.setitem(sys.modules, "train_gpt", other)
    monkeypatch.setitem(sys.modules, T.__name__ + "_run", T)
    monkeypatch.setattr(T, "__name__", T.__name__ + "_run")
    load = T.records_tool.__wrapped__  # tools are cached
    assert load("sample.py") is load("absent.py") is None
    assert seen == [T] and sys.modules.get("train_gpt") is other


X86 = """processor : 0
vendor_id : AuthenticAMD
model name\t: AMD EPYC \n
processor : 1
model name\t: AMD EPYC \n
"""
# From /proc/cpuinfo of a Raspberry Pi 5, and of a phone with two kinds of cores.
ARM = "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd0b\n"
BIG_LITTLE = ARM + "CPU implementer\t: 0x41\nCPU part\t: 0xd05\n" + ARM


@pytest.mark.parametrize(
    "system,answer,want",
    [
        ("linux", X86, "AMD EPYC"),
        ("linux", ARM, "aarch64 0x41 0xd0b"),
        ("linux", BIG_LITTLE, "aarch64 0x41 0xd05 0xd0b"),
        ("linux", "processor : 0\n", "aarch64"),
        ("linux", None, "aarch64"),
        ("darwin", "Apple M2 Pro\n", "Apple M2 Pro"),
        ("darwin", "", "aarch64"),
        ("darwin", None, "aarch64"),
    ],
)
def test_cpus_of_different_kinds_have_different_names(system, answer, want, monkeypatch):
    """Records name the CPU. `answer` is the output of /proc/cpuinfo or sysctl; None: not found."""

    def read_text(path):
        if answer is None:
            raise FileNotFoundError(path)
        assert str(path) == "/proc/cpuinfo"
        return answer

    def run(command, **_):
        assert command == ["sysctl", "-n", "machdep.cpu.brand_string"]
        return SimpleNamespace(stdout=read_text("/proc/cpuinfo"))

    monkeypatch.setattr(T.sys, "platform", system)
    monkeypatch.setattr(T.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(T.Path, "read_text", read_text)
    monkeypatch.setattr(T.subprocess, "run", run)
    assert T.cpu_name() == want


def test_an_error_in_the_sample_does_not_fail_the_run(train, tmp_path, monkeypatch):
    said, real = [], T.records_tool
    monkeypatch.setattr(T, "records_tool", lambda name: {} if name == "sample.py" else real(name))
    folder = train(replace(CFG, sample_tokens=5), tmp_path, say=said.append)
    assert said[-1] == "warning: there is no sample: KeyError('demonstrate')"
    assert facts(folder)["finished"]


def test_the_seed_determines_the_run(train, run, tmp_path):
    again = train(replace(CFG, checkpoint_every=0), tmp_path)  # checkpoints have no effect
    other = train(replace(CFG, seed=1), tmp_path)
    assert without_times(again) == without_times(run.dir)
    assert_same_arrays(arrays(again / "checkpoints/8"), arrays(run.dir / "checkpoints/8"))
    assert train_losses(other)[1:] != train_losses(run.dir)[1:] and facts(other)["seed"] == 1


# ---- The clock ---------------------------------------------------------------------------------


def test_nothing_is_compiled_while_the_clock_runs(run):
    compiled = [clock for name, clock in run.seen if name.startswith("/jax")]
    assert compiled.count(False) > 5, "the listener gets no events"
    assert compiled.count(True) == 0


def test_the_clock_includes_loading_and_excludes_validation(run):
    clock = {name: [on for what, on in run.seen if what == name] for name, _ in run.seen}
    assert clock["next_batch"][0] is True and len(clock["next_batch"]) == CFG.steps
    assert clock["evaluate"] == [False] * 3  # after 0, 4 and 8 steps
    assert clock["write_checkpoint"] == [True] * 3 + [
        False
    ]  # during the run, and the last checkpoint
    assert clock["warm_up"] == [False]
    # Work on data counts, so documents and vocabulary are computed again while the clock runs.
    assert clock["vocabulary"].count(True) == 1
    assert clock["documents"][0] is False and clock["documents"][-1] is True


@pytest.mark.parametrize("counts", [(2,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_log_norms_adds_norms_of_gradients_to_the_metrics(
    train, run, tmp_path, monkeypatch, counts
):
    """For each parameter that a step updates. They do not depend on the number of devices."""
    kernels, _ = T.choose_kernels(CFG, jax.devices()[0])
    every = T.programs(CFG, mesh_of(CFG.devices), kernels).items()
    known = {(x.step.func, str(x.args)): key for key, x in every if not isinstance(key, T.Update)}
    compiled = {devices: programs_of(CFG, devices) for devices in counts}

    def lower(program, real=T.Program.lower):
        """Only updates compute norms; other programs are those of `run`."""
        if key := known.get((program.step.func, str(program.args))):
            return SimpleNamespace(compile=lambda: compiled[program.mesh.size][str(key)])
        return real(program)

    monkeypatch.setattr(T.Program, "lower", lower)
    found = []
    for devices in counts:
        cfg = replace(CFG, log_norms=True, checkpoint_every=0, devices=devices)
        lines = metrics(train(cfg, tmp_path / str(devices)))
        steps = [line for line in lines if "train_loss" in line]
        assert [line["train_loss"] for line in steps] == pytest.approx(
            [line["train_loss"] for line in run.metrics if "train_loss" in line], rel=1e-4
        )
        found.append([{k: v for k, v in line.items() if k.startswith("norm_")} for line in steps])
        assert {*found[-1][0]} == {f"norm_{name}" for name in T.updated(cfg, "anvil")}
        assert min(found[-1][0].values()) > 0
        tied = updates_at(cfg, "adam")[3].tied  # the norm of the head then includes the embedding
        names = [name for name in T.param_specs(cfg) if name != "embed" or not tied]
        assert {*found[-1][3]} == {f"norm_{name}" for name in names}
    for one, two in zip(found[0], found[-1], strict=True):
        assert one == pytest.approx(two, rel=0.02)
    assert not any(key.startswith("norm_") for line in run.metrics for key in line)


def test_norms_are_printed_after_the_line_of_a_step(tmp_path):
    said, norms = [], {"head": np.float32(0.0012), "qk_bank": np.float32(12.5)}
    for wanted in (False, True):
        cfg = replace(CFG, log_norms=wanted, log_every=2)
        run_facts = {"dropped_ngrams": 0}
        log = T.RunLog(cfg, tmp_path, run_facts, 0, T.Clock(), said.append)
        log.files["metrics.jsonl"] = open(tmp_path / "metrics.jsonl", "wb")
        for step in (1, 2, 3):
            result = T.StepResult(step, 4.0, 0, norms if wanted else {}, 1)
            log.trained(result, 4.0)
        steps = ["step:1/8", "step:2/8"]
        if wanted:
            steps = ["step:1/8", "norms:", "step:2/8", "norms:"]
            assert said[1] == "norms: head 1.2e-03, qk_bank 1.2e+01"
        assert [line.split()[0] for line in said] == steps
        said.clear()
        for line in metrics(tmp_path):
            assert [key for key in line if key.startswith("norm_")] == [
                f"norm_{name}" for name in norms if wanted
            ]
    assert line["norm_qk_bank"] == 12.5


def test_a_run_with_jax_debug_nans(train, tmp_path, monkeypatch):
    """It skips warm_up, in which zeros make NaNs."""
    monkeypatch.setattr(T, "warm_up", lambda *_: pytest.fail("it would raise here"))
    with jax.debug_nans(True):
        folder = train(replace(CFG, checkpoint_every=0), tmp_path)
    assert facts(folder)["finished"]


# ---- Steps of checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize("every, want", [(1, "2468"), (3, "468"), (5, "68"), (0, "8")])
def test_steps_of_checkpoints(train, tmp_path, every, want):
    """After an odd number of steps, gradients are accumulated, so the next step is used."""
    folder = train(replace(CFG, checkpoint_every=every), tmp_path)
    assert steps_of(folder) == list(want[-2:])  # the newest two stay
    log = (folder / "log.txt").read_text()
    form = r"^checkpoint:(\d) held the loop for \d+\.\dms, \d+\.\d MB$"
    assert re.findall(form, log, re.MULTILINE) == list(want)


# ---- A validation shard that is truncated during the run ---------------------------------------


@pytest.mark.parametrize("tokens", [1999, 100])
def test_truncating_a_validation_shard_ends_the_run(shards, tmp_path, tokens):
    """The rest of a page of memory would be read as zeros, with a lower loss."""
    data = shutil.copytree(shards, tmp_path / "data")
    shard = data / "small_val_000000.bin"

    def say(line):
        if line.startswith("step:1/"):
            os.truncate(shard, T.HEADER_BYTES + 2 * tokens)

    with pytest.raises(
        T.UserError, match=f"{shard} is not a complete token shard .{tokens} tokens foll"
    ):
        trained(replace(CFG, checkpoint_every=0), tmp_path / "logs", data, say=say)
    assert facts(next((tmp_path / "logs").iterdir()))["finished"] is False


# ---- A run that diverges -----------------------------------------------------------------------


@pytest.mark.parametrize("loss", [math.nan, 3 * math.log(CFG.vocab)])
def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(
    train, run, tmp_path, monkeypatch, loss
):
    def log_step(log, newest, real=T.log_step):
        if newest and newest.step == 5:
            newest = newest._replace(loss=loss)
        return real(log, newest)

    monkeypatch.setattr(T, "log_step", log_step)
    words = r"^the loss of step 5 is \S+: lower the learning rates \(--set lr_anvil=\.\.\.\); see "
    with pytest.raises(T.UserError, match=words):
        train(CFG, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert T.find_checkpoint(folder).step == 4 and facts(folder)["finished"] is False
    assert len(train_losses(folder)) == 4  # JSON has no NaN


# ---- A full disk, a closed terminal ------------------------------------------------------------


def no_space(*_):
    raise OSError(28, "No space left on device")


def for_logs(make):
    """Return `open`, except that files in mode "ab", as logs, come from make(path)."""
    return lambda path, mode="r", **how: make(path) if mode == "ab" else open(path, mode, **how)


def test_a_full_disk_during_a_checkpoint_does_not_end_the_run(train, run, tmp_path, monkeypatch):
    """It prints a warning and deletes incomplete files. The next checkpoint may succeed."""
    said, kept = [], []

    def save(path, rows, real=np.save):
        if path.parent.name in (".4", ".6") and path.name.startswith("params."):
            kept.append(steps_of(path.parents[2]))
            no_space()
        return real(path, rows)

    monkeypatch.setattr(np, "save", save)
    folder = train(CFG, tmp_path, say=said.append)
    assert kept == [[".4", "2"], [".6", "2"]]
    warnings = [line for line in said if line.startswith("warning")]
    assert len(warnings) == 2
    assert all(line.endswith("No space left on device; older ones stay") for line in warnings)
    assert steps_of(folder) == ["2", "8"]
    assert_same_arrays(arrays(folder / "checkpoints/8"), arrays(run.dir / "checkpoints/8"))
    assert without_times(folder) == without_times(run.dir)


def test_a_disk_that_stays_full_leaves_the_last_good_checkpoint_and_the_result(
    train, run, tmp_path, monkeypatch
):
    """The missing last checkpoint is an error, with a reason that numpy does not report."""
    said = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3000))
    monkeypatch.setattr(
        np,
        "save",
        lambda path, *a, real=np.save: real(path, *a) if ".2" in str(path) else no_space(),
    )
    words = "is complete, but there is no checkpoint of step 8: the disk is full$"
    with pytest.raises(T.UserError, match=words):
        train(replace(CFG, sample_tokens=5), tmp_path / "logs", say=said.append)
    (folder,) = (tmp_path / "logs").iterdir()
    (end,) = [i for i, line in enumerate(said) if line.startswith("target 10.0 met: val_loss ")]
    assert said[end + 1].startswith(
        "bits per byte of the validation text: "
    )  # the sample is printed, too
    assert facts(folder)["finished"] is True and without_times(folder) == without_times(run.dir)
    assert steps_of(folder) == ["2"] and facts(folder)["missing"].startswith("there is no checkpoi")


def test_a_full_disk_for_the_log_does_not_end_the_run(train, run, tmp_path, monkeypatch):
    """Lines wait in the buffer."""

    class Full(io.FileIO):
        def write(self, data):
            return no_space() if 3 < next(calls) < 20 else super().write(data)

    said, calls = [], iter(range(10**6))
    opens = for_logs(lambda path: io.BufferedWriter(Full(path, "ab"), 2**20))
    monkeypatch.setattr(T, "open", opens, raising=False)
    folder = train(CFG, tmp_path, say=said.append)
    assert sum("cannot write" in line and "the run goes on" in line for line in said) == 1
    assert without_times(folder) == without_times(run.dir)
    logs = (folder / "log.txt").read_bytes(), run.log
    names = [[line.split()[0] for line in log.split(RULE)[2].splitlines()] for log in logs]
    assert names[0] == names[1]


def test_a_disk_that_is_already_full_ends_the_run_before_compiling(train, tmp_path, monkeypatch):
    """Also if empty files can be created on it."""
    monkeypatch.setattr(T, "compile_all", partial(pytest.fail, "went on to compile"))
    full = open("/dev/full", "ab", buffering=2**20)
    with monkeypatch.context() as patch:
        patch.setattr(T, "open", for_logs(lambda path: full), raising=False)
        words = "cannot write .*No space left on device.*: pass another --out"
        with pytest.raises(T.UserError, match=words):
            train(CFG, tmp_path)
    full.raw.close()
    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(T.UserError, match=words):
        train(CFG, tmp_path)


def test_a_disk_that_cannot_rename_folders_ends_the_run_before_compiling(
    train, tmp_path, monkeypatch
):
    """As a mounted bucket: checkpoints would be written and then deleted."""
    rename = os.rename

    def files_only(before, after):
        if os.path.isdir(before):
            raise OSError(24, "Too many open files")
        return rename(before, after)

    monkeypatch.setattr(os, "rename", files_only)
    monkeypatch.setattr(T, "compile_all", partial(pytest.fail, "went on to compile"))
    words = "cannot write .*folders cannot be renamed there: .*gcsfuse.*: pass another --out"
    with pytest.raises(T.UserError, match=words):
        train(CFG, tmp_path)


def test_signals_end_a_run_at_once_when_everything_is_saved(train, tmp_path, monkeypatch):
    """During the sample. Before, the run handles them."""
    seen = []
    before = T.signal_handlers()
    monkeypatch.setattr(T, "demonstrate", lambda *_: seen.append(T.signal_handlers()))
    monkeypatch.setattr(T.RunLog, "ended", lambda log: seen.append(T.signal_handlers()))
    train(replace(CFG, sample_tokens=5), tmp_path)
    assert seen[0] != before and seen[1] == before


def test_a_closed_terminal_does_not_end_the_run(train, tmp_path):
    """As with `| head -5` or a full disk. Flushing its buffer must not fail later, either."""
    for path, closes in (("/dev/full", False), (None, True)):
        read, write = os.pipe()
        terminal = open(path or write, "w")
        if closes:
            os.close(read)
        T.tell("first", terminal)
        say = partial(T.tell, stream=terminal)
        folder = train(replace(CFG, checkpoint_every=0), tmp_path, say=say)
        assert facts(folder)["finished"] is True
        terminal.close()  # flushes


def test_a_run_without_a_terminal_does_not_use_its_file_numbers(tmp_path):
    """As with `>&-` or cron. Output of libraries must not get into the log."""
    code = "import train_gpt as T; T.tell('1 of 2\\r'); print(T.main(['--resume=none'])); "
    code += "raise SystemExit(open(T.__file__).fileno())"
    words = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code]
    assert subprocess.run(words, cwd=ROOT).returncode > 2
