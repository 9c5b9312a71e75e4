"""One whole run and what it leaves behind: log, metrics, run.json, checkpoints, resumed runs."""

import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import threading
import weakref
import zlib
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, ROOT
from programs import BUILT, CFG, key, mesh_of, quick, quick_compilation

import train_gpt as T

RULE = b"=" * 100 + b"\n"
TRAIN_LINE = re.compile(r"step:(\d+)/8 train_time:(\d+)ms step_avg:(\d+\.\d\d)ms")
VAL_LINE = re.compile(
    r"step:(\d+)/8 val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
)


def quiet(line):
    """In place of print."""


@pytest.fixture(scope="module")
def train(shards):
    """T.train on the test's shards; runs that differ in smooth things share their programs."""
    compile_all = T.compile_all

    def compile_once(cfg, mesh, say):
        if key(cfg, mesh.size) not in BUILT:
            BUILT[key(cfg, mesh.size)] = compile_all(cfg, mesh, say)
        return BUILT[key(cfg, mesh.size)]

    def run(cfg, *args, say=quiet, **kwargs):
        with pytest.MonkeyPatch.context() as patch, quick_compilation():
            patch.setattr(T, "compile_all", compile_once)
            cfg = replace(cfg, data=str(shards))
            return T.train(cfg, *args, command="train 'this'", say=say, **kwargs)

    return run


@pytest.fixture(scope="module")
def run(train, tmp_path_factory):
    """The run that most tests look at: its folder, terminal lines, log lines and metrics.

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

    BUILT.clear()  # what an earlier test compiled must be seen to be compiled again
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(on_event)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, T.Clock, "start", clock=True)
        watch(patch, T.Clock, "stop", clock=False)
        for name in ("next_rows", "evaluate", "own_arrays", "warm_up"):
            watch(patch, T, name, event=name)
        patch.setattr(T, "KEPT", 99)
        folder = train(CFG, tmp_path_factory.mktemp("logs"), say=said.append)
    listening = False
    assert set(threading.enumerate()) <= threads
    log = folder / "log.txt"
    return SimpleNamespace(dir=folder, said=said, log=log, metrics=metrics(folder), seen=seen)


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_losses(folder) -> list[float]:
    return [line["train_loss"] for line in metrics(folder) if "train_loss" in line]


def facts(folder) -> dict:
    return json.loads((folder / "run.json").read_text())


def arrays(checkpoint) -> dict[str, np.ndarray]:
    return {path.name: np.load(path) for path in checkpoint.glob("*.npy")}


def assert_same_arrays(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def last_lines(run) -> list[str]:
    """The lines of log.txt after its second rule, without those of checkpoints."""
    lines = run.log.read_bytes().split(RULE)[2].decode().splitlines()
    return [line for line in lines if not line.startswith("checkpoint:")]


# ------------------------------------------------------------------------------------------------
# log.txt, metrics.jsonl, run.json
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


def test_environment_is_what_matters_and_nothing_secret(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--flag")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    for name in ("JAX_API_KEY", "TPU_AUTH", "CUDA_SECRET_PATH", "HF_TOKEN", "HOME"):
        monkeypatch.setenv(name, "mine")
    got = T.environment()
    assert got["XLA_FLAGS"] == "--flag" and got["NCCL_ALGO"] == "Ring"
    assert got["JAX_PLATFORMS"] == "cpu" and "mine" not in got.values()


def test_log_has_every_step_once_in_the_original_speedruns_format(run):
    *steps, last = last_lines(run)
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
    for line in last_lines(run)[:-1]:
        steps.append(max(int(line[5 : line.index("/")]), 1))
        times.append(int(re.search(r"train_time:(\d+)ms", line)[1]))
        averages.append(float(re.search(r"step_avg:([\d.]+)ms", line)[1]))
    assert times == sorted(times) and times[-1] > 0
    # train_time is rounded to 1 ms, step_avg to 0.01 ms
    np.testing.assert_allclose(np.multiply(averages, steps), times, atol=0.5 + 0.005 * 8 + 1e-6)


def test_metrics_agree_with_the_log(run):
    lines = last_lines(run)[:-1]
    assert len(run.metrics) == len(lines)
    tokens = np.cumsum([0] + [T.stage_at(CFG, step).batch_tokens for step in range(8)]).tolist()
    for fields, line in zip(run.metrics, lines, strict=True):
        step, time = fields["step"], fields["train_time_ms"]
        assert line.startswith(f"step:{step}/8 ") and fields["tokens"] == tokens[step]
        # The log's line is formatted just after the number is taken.
        assert int(re.search(r"train_time:(\d+)ms", line)[1]) == pytest.approx(time, abs=5)
        if match := VAL_LINE.fullmatch(line):
            assert set(fields) == {"step", "val_loss", "train_time_ms", "tokens"}
            assert float(match[2]) == pytest.approx(fields["val_loss"], abs=0.5e-4 + 1e-6)
        else:
            assert set(fields) == {"step", "train_loss", "train_time_ms", "tokens", "lr"}
            assert fields["lr"] == T.lr_scale(CFG, step - 1)


def test_run_json_has_exactly_these_facts(run):
    got = facts(run.dir)
    device = {"kind": "cpu", "count": 8, "platform": "cpu", "processes": 1}
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
        "devices": device,
        "host": T.host(),
        "environment": T.environment(),
        "data": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in shards
        },
        "steps": 8,
        "tokens": 3 * 256 + 5 * 512,
        "val_loss": run.metrics[-1]["val_loss"],
        "train_time_ms": run.metrics[-1]["train_time_ms"],
        "target": 10.0,
        "resumed": False,
        "finished": True,
    }
    seconds = got.pop("compile_seconds")
    chosen = got.pop("choices")
    assert (chosen["attention"], chosen["compiler_options"]) == ("xla (the reference)", {})
    grads = [variant.name for variant in T.executions(CFG) if variant.kind == "grads"]
    assert [*chosen["at_a_time"]] == grads
    assert all((x["rows"], x["recompute"]) == (1, "never") for x in chosen["at_a_time"].values())
    assert got == want
    assert list(seconds) == ["init", "copies", *(variant.name for variant in T.executions(CFG))]
    assert min(seconds.values()) > 0
    assert {path.name for path in run.dir.iterdir()} == {
        "log.txt", "metrics.jsonl", "run.json", "checkpoints"
    }  # fmt: skip


def test_stored_config_is_the_config(run):
    stored = T.config_from_json(facts(run.dir)["config"])
    assert stored == replace(CFG, data=stored.data)


def test_terminal_says_how_it_went(run):
    assert run.said[0] == f"run {run.dir} on 8 x cpu"
    assert sum("val_loss:" in line for line in run.said) == 3
    loss = facts(run.dir)["val_loss"]
    assert run.said[-1].startswith(f"target 10.0 met: val_loss {loss:.4f} after ")
    assert "3,328 tokens" in run.said[-1]


def test_target_that_was_missed_is_said_so(train, tmp_path):
    said = []
    train(replace(CFG, target=0.5), tmp_path, say=said.append)
    assert said[-1].startswith("target 0.5 MISSED: ")


def test_loss_falls_from_that_of_a_uniform_guess(run):
    losses = train_losses(run.dir)
    assert losses[0] == pytest.approx(math.log(CFG.vocab), abs=0.05)  # the head is small, not zero
    assert losses[-1] < losses[0] - 0.3 and facts(run.dir)["val_loss"] < losses[0] - 0.3


def test_same_seed_same_run_and_other_seed_other_run(train, run, tmp_path):
    again = train(replace(CFG, checkpoint_every=0), tmp_path)  # saving changes nothing
    other = train(replace(CFG, seed=1), tmp_path)
    assert train_losses(again) == train_losses(run.dir)
    final = "checkpoints/8"
    assert_same_arrays(arrays(again / final), arrays(run.dir / final))
    assert train_losses(other)[1:] != train_losses(run.dir)[1:]
    assert facts(other)["seed"] == 1
    assert sorted(path.name for path in (again / "checkpoints").iterdir()) == ["8"]


def test_loss_that_is_not_finite_stops_the_run(train, tmp_path, monkeypatch):
    real = T.hyper_at
    broken = np.float32(math.nan)
    monkeypatch.setattr(T, "hyper_at", lambda cfg, step: real(cfg, step)._replace(lr=broken))
    threads = set(threading.enumerate())
    with pytest.raises(T.UserError, match=r"^the loss of step 2 is nan: lower .*lr_muon") as error:
        train(replace(CFG, checkpoint_every=0), tmp_path)
    (folder,) = tmp_path.iterdir()
    assert "\n" not in str(error.value) and str(folder / "metrics.jsonl") in str(error.value)
    assert facts(folder)["finished"] is False and not (folder / "checkpoints").exists()
    assert len(train_losses(folder)) == 1  # a loss that is no number is no JSON either
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("loss", [math.nan, math.inf, 3 * math.log(CFG.vocab)])
def test_a_run_that_diverges_names_the_last_good_checkpoint(
    train, run, tmp_path, monkeypatch, loss
):
    trained = T.Progress.trained

    def spy(self, step, report):
        return trained(self, step, [loss, 0, 0] if step == 5 else report)

    monkeypatch.setattr(T.Progress, "trained", spy)
    with pytest.raises(
        T.UserError, match=r"^the loss of step 5 is .*last good checkpoint is"
    ) as end:
        train(CFG, tmp_path)
    (folder,) = tmp_path.iterdir()
    saved = T.find_checkpoint(folder)
    assert str(end.value).endswith(str(saved.folder)) and saved.step == 4
    assert_same_arrays(arrays(saved.folder), arrays(run.dir / "checkpoints/4"))


# ------------------------------------------------------------------------------------------------
# The clock, and what happens while it runs
# ------------------------------------------------------------------------------------------------


def test_nothing_compiles_while_the_clock_runs(run):
    compiled = [clock for name, clock in run.seen if name.startswith("/jax")]
    assert compiled.count(False) > 10, "the listener does not hear of compilations"
    assert compiled.count(True) == 0


def test_every_program_of_the_run_is_compiled_before_its_first_step(run):
    lines = [line for line in run.said if line.startswith("compiled ")]
    names = ["init", "copies", *(variant.name for variant in T.executions(CFG))]
    assert sorted(line.split()[1] for line in lines) == sorted(names)
    first = next(i for i, line in enumerate(run.said) if line.startswith("step:"))
    assert all(run.said.index(line) < first for line in lines)


def test_clock_runs_while_data_is_loaded_and_stands_while_validating(run):
    clock = {name: [on for what, on in run.seen if what == name] for name, _ in run.seen}
    assert clock["next_rows"][0] is True and len(clock["next_rows"]) == CFG.steps
    assert clock["evaluate"] == [False] * 3  # after 0, 4 and 8 steps
    assert clock["own_arrays"] == [True] * 7 + [False]  # checkpoints on the way, and the last one
    assert clock["warm_up"] == [False]


@pytest.mark.parametrize(("step", "which", "words"), [(3, 0, "row_tokens=64"), (1, 1, "adam=True")])
def test_a_program_that_was_not_compiled_is_a_key_error(
    train, run, tmp_path, monkeypatch, step, which, words
):
    built = BUILT[key(CFG, 8)]
    programs = {k: v for k, v in built[0].items() if k != T.step_variants(CFG, step)[which]}
    monkeypatch.setitem(BUILT, key(CFG, 8), (programs, built[1]))
    monkeypatch.setattr(T, "warm_up", lambda *_: None)
    with pytest.raises(KeyError, match=words):
        train(CFG, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert facts(folder)["finished"] is False


# ------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------


def abstract(devices=8, cfg=CFG):
    return T.abstract_state(cfg, T.make_mesh(cfg, jax.devices()[:devices]))


@pytest.fixture
def copy(run, tmp_path) -> T.Path:
    """A copy of the run's folder to damage."""
    return shutil.copytree(run.dir, tmp_path / run.dir.name)


def test_checkpoints_are_complete_and_nothing_else_is_there(run):
    folder = run.dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == list("12345678")
    table = T.param_table(CFG)
    files = {f"{kind}.{name}.0.npy" for kind in ("params", "first", "second") for name in table}
    waiting = {f"waiting0.{name}.0.npy" for name, row in table.items() if row.optimizer == "adam"}
    for step in range(1, 9):
        want = files | {"meta.json"} | (waiting if step % 2 else set())
        assert {path.name for path in (folder / str(step)).iterdir()} == want
        saved = T.read_checkpoint(folder / str(step))
        assert (saved.step, saved.devices, saved.cfg) == (step, 8, T.find_checkpoint(run.dir).cfg)
        assert saved.data == facts(run.dir)["data"]
        assert saved.source_sha256 == facts(run.dir)["source_sha256"]
        times = [m["train_time_ms"] for m in run.metrics if m["step"] == step]
        assert times[0] - 1e-3 <= saved.train_time_ms  # files have microseconds
        assert saved.train_time_ms <= facts(run.dir)["train_time_ms"] + 1e-3
    assert T.read_checkpoint(folder / "2").cursor == 2 * 256
    log = run.log.read_text()
    assert len(re.findall(r"checkpoint:\d held the loop for \d+\.\dms, \d", log)) == 8


def test_older_checkpoints_are_deleted(train, tmp_path):
    folder = train(CFG, tmp_path)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["7", "8"]


def test_checkpoints_by_time(train, tmp_path, monkeypatch):
    """After the seconds that were asked for, and not again before they have passed anew."""
    steps = []

    def now():  # each step takes a second
        return float(len(steps))

    def run_step(*args, real=T.run_step):
        steps.append(args[2])
        return real(*args)

    monkeypatch.setattr(T, "time", SimpleNamespace(**{**vars(T.time), "monotonic": now}))
    monkeypatch.setattr(T, "run_step", run_step)
    monkeypatch.setattr(T, "KEPT", 99)
    folder = train(replace(CFG, checkpoint_every=0, checkpoint_seconds=1.5), tmp_path)
    saved = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
    # A wish travels with the third step (index 2) and is heard when the fourth is under way.
    assert saved == [4, 8]


def test_find_checkpoint_takes_the_newest_whole_one(copy):
    (copy / "checkpoints/.99").mkdir()  # what a killed process may leave
    (copy / "checkpoints/10").mkdir()
    (copy / "checkpoints/12").write_text("not a folder")
    said = []
    assert T.find_checkpoint(copy, said.append).folder == copy / "checkpoints/8"
    assert [line.split()[1] for line in said] == [str(copy / f"checkpoints/{n}") for n in (12, 10)]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_state_survives_saving_and_loading_exactly(run, tmp_path, devices):
    """Loaded from the run of 8 devices onto some of them, saved again from there."""
    saved = T.read_checkpoint(run.dir / "checkpoints/6")
    state, want = T.load_arrays(saved, abstract(devices)), arrays(saved.folder)
    for kind, names in abstract(devices).items():
        for name, leaf in names.items():
            array = state[kind][name]
            assert (array.shape, array.dtype, array.sharding) == (
                leaf.shape, leaf.dtype, leaf.sharding
            )  # fmt: skip
            np.testing.assert_array_equal(array, want[f"{kind}.{name}.0.npy"])
    meta = {key: getattr(saved, key) for key in saved._fields if key not in ("folder", "files")}
    meta["config"] = asdict(meta.pop("cfg"))
    T.write_checkpoint(tmp_path, T.own_arrays(state), meta)
    assert_same_arrays(arrays(tmp_path / "6"), want)
    again = T.read_checkpoint(tmp_path / "6")
    assert again == saved._replace(folder=tmp_path / "6")


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_waiting_gradients_keep_their_sum_on_other_devices(tmp_path, monkeypatch, devices, dtype):
    """From 2 devices to fewer and to more: of small whole numbers, whose sums are exact."""
    cfg, rng = replace(CFG, compute_dtype=dtype), np.random.default_rng(0)
    due = T.abstract_due(cfg, mesh_of(2), T.Variant("update", adam=True))
    table = T.param_table(cfg)
    old = {
        name: (T.put(rng.integers(-8, 8, x[0].shape).astype(x[0].dtype), mesh_of(2), T.P(T.AXIS)),)
        for name, x in due.items()
        if table[name].optimizer == "adam"
    }
    files = T.own_arrays({"waiting0": {name: grads[0] for name, grads in old.items()}})
    meta = {"step": 3, "cursor": 0, "train_time_ms": 0.0, "validated": True, "devices": 2}
    meta |= {"logs": {}, "data": {}, "source_sha256": "", "config": asdict(cfg)}
    T.write_checkpoint(tmp_path, files, meta)
    new = T.load_waiting(T.read_checkpoint(tmp_path / "3"), mesh_of(devices))
    assert new.keys() == old.keys()
    for name, (grad,) in new.items():
        n, (was,) = table[name].shape[0], old[name]
        assert grad.shape == (devices * n, *was.shape[1:]) and grad.dtype == was.dtype
        parts = [np.asarray(x, np.float64).reshape(-1, n, *x.shape[1:]) for x in (was, grad)]
        np.testing.assert_array_equal(parts[0].sum(0), parts[1].sum(0))
        assert {shard.data.shape[0] for shard in grad.addressable_shards} == {n}


def test_no_device_gets_more_than_its_part(run, monkeypatch):
    """What is loaded is asked for in the parts of the devices, never as a whole."""
    asked, make = [], jax.make_array_from_callback

    def spy(shape, sharding, callback):
        def part(index):
            asked.append((shape, np.empty(shape, bool)[index].size / max(np.prod(shape), 1)))
            return callback(index)

        return make(shape, sharding, part)

    monkeypatch.setattr(jax, "make_array_from_callback", spy)
    saved = T.read_checkpoint(run.dir / "checkpoints/7")
    T.load_arrays(saved, abstract(4)), T.load_waiting(saved, mesh_of(4))
    large = [share for shape, share in asked if np.prod(shape) >= 104 * 32]
    assert len(large) > 4 * 3 * 6 and set(large) == {1 / 4}


def objects(file):
    with file.open("wb") as opened:
        np.save(opened, np.array([{"not": "numbers"}], dtype=object))


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "one bit": lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x01"),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "not text": lambda file: file.write_bytes(b"\xff\xfe"),
    "a list": lambda file: file.write_text("[]"),
    "pickled objects": objects,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["first.embed.0.npy", "params.smear_gate.0.npy", "meta.json"])
def test_damaged_checkpoint_is_passed_over_with_a_warning(copy, damage, name):
    DAMAGE[damage](copy / "checkpoints/8" / name)
    said = []
    assert T.find_checkpoint(copy, said.append).step == 7
    (line,) = said
    assert line.startswith(f"warning: {copy / 'checkpoints/8'} cannot be used (")
    for folder in (copy / "checkpoints").iterdir():
        if folder.name != "8":
            shutil.rmtree(folder)
    with pytest.raises(T.UserError, match="no checkpoint in"):
        T.find_checkpoint(copy, quiet)


@pytest.mark.parametrize(
    "change",
    [
        *({"step": 99}, {"step": -3}, {"step": "8"}, {"step": True}, {"cursor": -5}),
        *({"cursor": 1.5}, {"train_time_ms": -1.0}, {"train_time_ms": "0"}, {"devices": -1}),
        *({"config": {}}, {"config": 3}, {"files": []}, {"files": {"../8/meta.json": {}}}),
    ],
    ids=str,
)
def test_impossible_facts_in_a_checkpoint_are_refused(copy, change):
    """Though the checksum is right: nobody but a program writes it, but which?"""
    path = copy / "checkpoints/8/meta.json"
    meta = json.loads(path.read_text())["checkpoint"] | change
    text = json.dumps(meta, sort_keys=True)
    path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "checkpoint": meta}))
    assert T.find_checkpoint(copy, quiet).step == 7


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (
            np.zeros((104, 31), np.float32),
            r"holds float32\[104, 31\] .* expects float32\[104, 32\]",
        ),
        (np.zeros((104, 32)), r"holds float64\[104, 32\] .* expects float32\[104, 32\]"),
        (np.zeros((100, 32), np.float32), "holds 100 of 104 rows of first.embed"),
    ],
)
def test_array_of_another_program_is_refused(copy, array, words):
    saved = T.read_checkpoint(copy / "checkpoints/8")
    np.save(saved.folder / "first.embed.0.npy", array)
    with pytest.raises(T.UserError, match=words) as error:
        T.load_arrays(saved, abstract())
    assert "\n" not in str(error.value)


def test_full_disk_during_a_checkpoint_does_not_end_the_run(train, run, tmp_path, monkeypatch):
    """It says so, leaves nothing half, and the next checkpoint is written when there is room."""
    said, write, kept = [], T.write_durably, []

    def failing(path, content):
        if path.parent.name in (".3", ".4", ".6") and path.name.startswith("second"):
            kept.append(sorted(x.name for x in path.parents[1].iterdir()))
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(T, "write_durably", failing)
    folder = train(CFG, tmp_path, say=said.append)
    assert kept == [[".3", "1", "2"], [".4", "1", "2"], [".6", "2", "5"]]
    warnings = [line for line in said if line.startswith("warning")]
    assert len(warnings) == 3
    assert all(line.endswith("No space left on device; older ones stay") for line in warnings)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["7", "8"]
    assert_same_arrays(arrays(folder / "checkpoints/8"), arrays(run.dir / "checkpoints/8"))
    assert train_losses(folder) == train_losses(run.dir) and facts(folder)["finished"] is True


def test_disk_that_stays_full_leaves_the_last_good_checkpoint(train, run, tmp_path, monkeypatch):
    """The run is done and its numbers are there; that its end was not saved is an error."""
    fsync, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) > 200:  # some 60 for each checkpoint
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(T.UserError, match="has ended well, but there is no checkpoint of step 8: "):
        train(CFG, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert facts(folder)["finished"] is True and train_losses(folder) == train_losses(run.dir)
    (last, *_) = sorted((path.name for path in (folder / "checkpoints").iterdir()), reverse=True)
    assert int(last) < 8 and not last.startswith(".")
    assert T.read_checkpoint(folder / "checkpoints" / last).step == int(last)


def test_full_disk_under_the_log_does_not_end_the_run(train, run, tmp_path, monkeypatch):
    """A file that takes only a part of a line, then nothing for a while: no byte is lost."""
    said, number, write = [], iter(range(10**6)), T.LogFile.write

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            if 3 < (n := next(number)) < 20:
                if n % 5 == 0:
                    return self.file.write(data[:7])
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    def wrapped(self, text):
        if not isinstance(self.file, Full):
            self.file = Full(self.file)
        write(self, text)

    monkeypatch.setattr(T.LogFile, "write", wrapped)
    folder = train(CFG, tmp_path, say=said.append)
    assert sum("cannot write" in line and "the run goes on" in line for line in said) == 1
    assert train_losses(folder) == train_losses(run.dir)
    lines = (folder / "log.txt").read_text().split("=" * 100 + "\n")[2].splitlines()
    assert [x.split()[0] for x in lines if x.startswith("step:")] == [
        x.split()[0] for x in last_lines(run) if x.startswith("step:")
    ]


def test_run_json_that_cannot_be_written_does_not_end_the_run(train, run, tmp_path, monkeypatch):
    """After the start, at which it ends before anything is compiled."""
    said, replace_, calls = [], os.replace, []

    def failing(source, target):
        calls.append(target)
        if str(target).endswith("run.json") and 1 < len(calls) < 4:
            raise OSError(28, "No space left on device")
        replace_(source, target)

    monkeypatch.setattr(os, "replace", failing)
    folder = train(CFG, tmp_path, say=said.append)
    assert sum("cannot write" in line for line in said) == 1
    assert facts(folder)["finished"] is True


def test_a_state_that_is_not_finite_is_not_saved(copy):
    saved = T.read_checkpoint(copy / "checkpoints/8")
    files = T.own_arrays(T.load_arrays(saved, abstract()))
    files["first.embed"][1][-1][3, 4] = np.nan
    with pytest.raises(OSError, match=r"first\.embed is not finite"):
        T.write_checkpoint(copy / "checkpoints", files, {"step": 9})
    assert not (copy / "checkpoints/9").exists()


def test_checkpoint_gets_its_name_when_it_is_complete(copy, monkeypatch):
    """At no time while its files are written, so that a killed process leaves no half of one."""
    saved = T.read_checkpoint(copy / "checkpoints/8")
    files, seen, real = T.own_arrays(T.load_arrays(saved, abstract())), [], T.write_durably

    def spy(*args):
        seen.append((copy / "checkpoints/9").exists())
        return real(*args)

    monkeypatch.setattr(T, "write_durably", spy)
    T.write_checkpoint(copy / "checkpoints", files, {"step": 9})
    assert len(seen) == len(files) + 1 and not any(seen)
    assert (copy / "checkpoints/9/meta.json").exists()


# ------------------------------------------------------------------------------------------------
# Resumed runs
# ------------------------------------------------------------------------------------------------


def back_to(copy, step: int):
    """Delete the later checkpoints of a run."""
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    return T.find_checkpoint(copy)


def without_times(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "train_time_ms"} for line in lines]


@pytest.mark.parametrize("step", range(1, 8))
def test_resumed_run_ends_exactly_as_the_uninterrupted_one(train, run, copy, step):
    """Bit for bit from everywhere: the same programs on the same numbers.

    Head and embedding are one up to the update of step 7. After an odd number of steps the
    gradients of one of them wait for Adam.
    """
    state = arrays(run.dir / f"checkpoints/{step}")
    for kind in ("params", "first", "second"):
        np.testing.assert_array_equal(state[f"{kind}.embed.0.npy"], state[f"{kind}.head.0.npy"])
    last = arrays(run.dir / "checkpoints/8")
    assert np.any(last["params.embed.0.npy"] != last["params.head.0.npy"])
    said, saved = [], back_to(copy, step)
    assert saved.step == step
    assert train(saved.cfg, copy.parent, resume=saved, say=said.append) == copy

    got, want = facts(copy), facts(run.dir)
    assert_same_arrays(arrays(copy / "checkpoints/8"), arrays(run.dir / "checkpoints/8"))
    assert got["val_loss"] == want["val_loss"]
    assert got["resumed"] is True and got["finished"] is True
    assert (got["run_id"], got["steps"], got["tokens"]) == (copy.name, 8, want["tokens"])
    assert without_times(metrics(copy)) == without_times(run.metrics)
    times = [line["train_time_ms"] for line in metrics(copy)]
    assert times == sorted(times)
    log = (copy / "log.txt").read_bytes()
    assert log.count(RULE) == 4 and log.split(RULE)[3].startswith(b"resumed\npython ")
    assert [x.split()[0] for x in log.decode().splitlines() if x.startswith("step:")] == [
        x.split()[0] for x in run.log.read_text().splitlines() if x.startswith("step:")
    ]


OTHERS = [(5, 1), (6, 4)]


@pytest.mark.parametrize(
    ("step", "devices"),
    [(5, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)],
)
def test_run_of_8_devices_resumes_on_fewer(train, run, copy, devices, step):
    saved = back_to(copy, step)
    cfg = replace(saved.cfg, devices=devices)
    train(cfg, copy.parent, resume=saved._replace(cfg=cfg))
    got, want = train_losses(copy), train_losses(run.dir)
    assert got[:step] == want[:step]
    np.testing.assert_allclose(got, want, rtol=2e-5)
    end, same = arrays(copy / "checkpoints/8"), arrays(run.dir / "checkpoints/8")
    for name in same:
        np.testing.assert_allclose(end[name], same[name], rtol=2e-3, atol=2e-4, err_msg=name)


def test_resumed_run_validates_once_where_it_was_saved(train, tmp_path):
    folder = train(replace(CFG, checkpoint_every=4), tmp_path)
    shutil.rmtree(folder / "checkpoints/8")
    saved = T.find_checkpoint(folder)
    train(saved.cfg, tmp_path, resume=saved)
    assert [line["step"] for line in metrics(folder) if "val_loss" in line] == [0, 4, 8]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_a_signal_saves_and_ends_the_run(train, run, tmp_path, monkeypatch, number, at):
    """Two steps later at most; what it leaves resumes to the same end. A validation that was due
    there (after 4 steps) is not waited for, and done by the resumed run."""
    trained = T.Progress.trained

    def spy(self, step, report):
        if step == at:
            os.kill(os.getpid(), number)
        return trained(self, step, report)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(T.Progress, "trained", spy)
        if at == 7:  # too late: the run ends by itself
            assert facts(train(replace(CFG, checkpoint_every=0), tmp_path))["finished"]
            return
        with pytest.raises(T.Stopped, match=r"^stopped after \d of 8 steps; .* --resume ") as stop:
            train(replace(CFG, checkpoint_every=0), tmp_path)
    assert stop.value.number == number and signal.getsignal(number) is before
    (folder,) = tmp_path.iterdir()
    saved = T.find_checkpoint(folder)
    assert at < saved.step <= at + 3 and f"stopped after {saved.step} of" in str(stop.value)
    assert str(folder) in str(stop.value) and facts(folder)["finished"] is False
    train(saved.cfg, tmp_path, resume=saved)
    assert without_times(metrics(folder)) == without_times(run.metrics)
    assert_same_arrays(arrays(folder / "checkpoints/8"), arrays(run.dir / "checkpoints/8"))


def test_stopped_run_has_the_exit_status_of_its_signal(monkeypatch, capsys):
    def stop(*args):
        raise T.Stopped("stopped after 3 of 8 steps", signal.SIGTERM)

    monkeypatch.setattr(T, "train", stop)
    assert T.main(["tiny"]) == 143
    assert capsys.readouterr().out == "stopped after 3 of 8 steps\n"


def test_finished_run_is_not_resumed(train, run, copy):
    before = (copy / "run.json").read_bytes()
    saved = T.find_checkpoint(copy)
    with pytest.raises(T.UserError, match="is finished: there is nothing to resume"):
        train(saved.cfg, copy.parent, resume=saved)
    assert (copy / "run.json").read_bytes() == before


def test_run_is_not_resumed_on_other_tokens(train, run, copy):
    saved = back_to(copy, 5)
    name = next(iter(saved.data))
    other = saved._replace(data={**saved.data, name: {"bytes": 3, "sha256": "0"}})
    before = {path.name: path.read_bytes() for path in copy.glob("*.*")}
    with pytest.raises(T.UserError, match="does not hold the shards that .* was trained on"):
        train(saved.cfg, copy.parent, resume=other)
    assert {path.name: path.read_bytes() for path in copy.glob("*.*")} == before


def test_a_stop_that_could_not_be_saved_is_an_error(train, tmp_path, monkeypatch):
    trained = T.Progress.trained

    def spy(self, step, report):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return trained(self, step, report)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(T.Progress, "trained", spy)
    monkeypatch.setattr(T, "write_durably", full)
    with pytest.raises(
        T.UserError, match=r"^stopped after \d steps, but there is no checkpoint of"
    ):
        train(replace(CFG, checkpoint_every=0), tmp_path)


def test_the_same_signal_twice_is_one_wish(monkeypatch, request):
    """As from `timeout`, which tells the process and its group; later it ends the process."""
    now, before = [0.0], signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))  # a script's `&` ignores it
    monkeypatch.setattr(T, "time", SimpleNamespace(**{**vars(T.time), "monotonic": lambda: now[0]}))
    with T.Wishes(CFG, mesh_of(2)) as wishes:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert wishes.signal == signal.SIGINT
        np.testing.assert_array_equal(wishes.now(), [[0, 1], [0, 1]])
        now[0] = 2.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_was_passed_over_does_not_come_back(train, copy):
    """A later checkpoint whose damage mends itself, as when a disk was late, stays aside."""
    meta = copy / "checkpoints/8/meta.json"
    whole = meta.read_text()
    meta.write_text("")
    back_to(copy, 8)
    saved = T.find_checkpoint(copy, quiet)
    assert saved.step == 7
    train(saved.cfg, copy.parent, resume=saved)
    (copy / "checkpoints/damaged-8/meta.json").write_text(whole)
    assert T.find_checkpoint(copy).folder == copy / "checkpoints/8"


def test_resumed_run_holds_no_more_gradients_than_it_needs(train, run, copy, monkeypatch):
    """Those that waited in the checkpoint are freed by the update that takes them."""
    saved, refs, load = back_to(copy, 5), [], T.load_waiting

    def spy(*args):
        waiting = load(*args)
        refs.extend(weakref.ref(grad) for grads in waiting.values() for grad in grads)
        return waiting

    def trained(self, step, report, real=T.Progress.trained):
        if step == 7:
            alive.append(sum(ref() is not None for ref in refs))
        return real(self, step, report)

    alive = []
    monkeypatch.setattr(T, "load_waiting", spy)
    monkeypatch.setattr(T.Progress, "trained", trained)
    train(saved.cfg, copy.parent, resume=saved)
    assert len(refs) > 10 and alive == [0]


@pytest.mark.parametrize(("stored", "there", "want"), [(8, 4, 0), (2, 8, 2), (0, 8, 0)])
def test_stored_number_of_devices_counts_if_they_are_there(monkeypatch, stored, there, want):
    cfg, seen = replace(CFG, devices=stored), []
    saved = T.Saved(T.Path("x"), cfg, *[None] * (len(T.Saved._fields) - 2))
    monkeypatch.setattr(T, "find_checkpoint", lambda *_: saved)
    monkeypatch.setattr(T, "all_devices", lambda: jax.devices()[:there])
    monkeypatch.setattr(T, "train", lambda cfg, *_: seen.append(cfg.devices))
    assert T.main(["--resume", "x"]) == 0 and seen == [want]


def test_changed_source_is_named(train, run, copy):
    said, saved = [], back_to(copy, 7)
    train(saved.cfg, copy.parent, resume=saved._replace(source_sha256="0"), say=said.append)
    assert any("train_gpt.py has changed since" in line for line in said)


# ------------------------------------------------------------------------------------------------
# Sampling and profile
# ------------------------------------------------------------------------------------------------


def test_sample_is_deterministic_text_of_real_tokens(copy):
    saved = T.find_checkpoint(copy)  # whose head we replace
    file = saved.folder / "params.head.0.npy"
    head = np.load(file)
    head[CFG.real_tokens :] = 9  # padding ids, some of which are now far likelier than any
    head[-1] = -9  # real token, whatever sign the sum of the features has
    np.save(file, head)
    with quick_compilation():
        first, again = (T.sample(CFG, saved, "ABC 12", count=12) for _ in range(2))
    assert first == again and 0 < len(first) <= 12
    assert all(ord(char) < BOS for char in first)


def test_sample_at_temperature_zero_takes_the_likeliest_token(run):
    """Beyond the longest row too, where only its length of the newest tokens is seen."""
    cfg, prompt, count = replace(CFG, val_row=16), "ABCDEFGHIJKL", 8
    with quick_compilation():
        text = T.sample(cfg, T.find_checkpoint(run.dir), prompt, count=count, temperature=1e-6)
    tokens = [BOS, *map(ord, prompt + text)] + [BOS] * (len(text) < count)  # BOS ended it early
    seen = [tokens[:end][-16:] for end in range(1 + len(prompt), len(tokens))]
    rows = np.array([row + [0] * (16 - len(row)) for row in seen], np.int32)
    params = T.load_arrays(T.read_checkpoint(run.dir / "checkpoints/8"), abstract(1))["params"]

    def features(params):
        found, hyper = T.look_up(cfg, params, rows), T.hyper_at(cfg, cfg.steps - 1)
        return T.forward(params, found, rows, cfg, cfg.val_windows, hyper, T.ATTENTION["xla"])

    logits = np.asarray(quick(features, params) @ params["head"].T)
    logits = logits[np.arange(len(rows)), [len(row) - 1 for row in seen]]
    assert logits[:, : cfg.real_tokens].argmax(1).tolist() == tokens[1 + len(prompt) :]


@pytest.mark.parametrize(
    ("val_row", "prompt", "count", "length"),
    [
        (4096, 3, 8, 128),  # with the BOS 12 tokens
        (4096, 119, 8, 128),
        (4096, 120, 8, 256),
        (64, 120, 8, 64),
    ],
)
def test_sample_computes_rows_that_hold_prompt_and_answer(
    run, monkeypatch, val_row, prompt, count, length
):
    """In multiples of 128, which kernels want, up to the longest row of the run."""
    shapes = []

    def forward(params, rows, tokens, *_):
        shapes.append(tokens.shape)
        return rows["embed"]

    monkeypatch.setattr(T, "forward", forward)
    T.sample(replace(CFG, val_row=val_row), T.find_checkpoint(run.dir), "A" * prompt, count=count)
    assert shapes == [(1, length)]


def test_sample_of_an_unfinished_run_rotates_as_that_run_did(copy, monkeypatch):
    """YaRN changes the rotation from stage to stage: that of the checkpoint's last step counts."""
    back_to(copy, 2)
    seen = []

    def forward(params, rows, tokens, cfg, windows, hyper, attend):
        seen.append(float(hyper.attn_scale))
        return rows["embed"]

    monkeypatch.setattr(T, "forward", forward)
    T.sample(CFG, T.find_checkpoint(copy), "A", count=1)
    assert seen == [pytest.approx(T.yarn(CFG, 0)[1])]
    assert T.yarn(CFG, 0)[1] != T.yarn(CFG, 1)[1]


def test_sample_from_the_command_line(run, capsys):
    with quick_compilation():
        assert T.main(["--sample", str(run.dir), "--prompt", "ABC"]) == 0
        text = T.sample(
            CFG, T.find_checkpoint(run.dir), "ABC"
        )  # 64 tokens, or fewer if the document ends
    assert capsys.readouterr() == (f"ABC{text}\n", "") and 0 < len(text) <= 64


def test_sample_does_not_depend_on_the_length_of_its_rows(run):
    with quick_compilation():
        texts = [
            T.sample(replace(CFG, val_row=n), T.find_checkpoint(run.dir), "ABC", 8)
            for n in (16, 4096)
        ]
    assert texts[0] == texts[1]


def test_profile_writes_a_trace(train, tmp_path, monkeypatch):
    monkeypatch.setattr(T, "PROFILE_STEPS", (2, 4))
    folder = train(replace(CFG, checkpoint_every=0), tmp_path, profile=True)
    assert list((folder / "profile").rglob("*.xplane.pb"))


def test_profile_of_a_run_that_is_too_short_is_refused(train, tmp_path, monkeypatch):
    monkeypatch.setattr(T, "PROFILE_STEPS", (6, 8))
    with pytest.raises(T.UserError, match="--profile needs more than 8 steps"):
        train(CFG, tmp_path, profile=True)
    assert not list(tmp_path.iterdir())
