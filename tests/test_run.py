"""One whole run and what it leaves behind: log, metrics, run.json, checkpoints, resumed runs."""

import hashlib
import importlib.metadata
import json
import math
import re
import shutil
import threading
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, ROOT
from programs import BUILT, CFG, key, quick, quick_compilation

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
        for name in ("next_rows", "evaluate", "save_checkpoint", "warm_up"):
            watch(patch, T, name, event=name)
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
    """The lines of log.txt after its second rule."""
    return run.log.read_bytes().split(RULE)[2].decode().splitlines()


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
    device = {"kind": "cpu", "count": 8, "platform": "cpu"}
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
        "steps": 8,
        "tokens": 3 * 256 + 5 * 512,
        "val_loss": run.metrics[-1]["val_loss"],
        "train_time_ms": run.metrics[-1]["train_time_ms"],
        "target": 10.0,
        "resumed": False,
        "finished": True,
    }
    seconds = got.pop("compile_seconds")
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
        train(CFG, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert "\n" not in str(error.value) and str(folder / "metrics.jsonl") in str(error.value)
    assert facts(folder)["finished"] is False and not (folder / "checkpoints").exists()
    assert len(train_losses(folder)) == 1  # a loss that is no number is no JSON either
    assert set(threading.enumerate()) <= threads


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


def test_clock_runs_while_data_is_loaded_and_stands_while_validating_and_saving(run):
    clock = {name: [on for what, on in run.seen if what == name] for name, _ in run.seen}
    assert clock["next_rows"][0] is True and len(clock["next_rows"]) == CFG.steps
    assert clock["evaluate"] == [False] * 3  # after 0, 4 and 8 steps
    assert clock["save_checkpoint"] == [False] * 3  # after 3, 6 and 8 steps
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
    assert sorted(path.name for path in folder.iterdir()) == ["3", "6", "8"]
    table = T.param_table(CFG)
    adam = [name for name, row in table.items() if row.optimizer == "adam"]
    kinds = {"params": table, "first": table, "second": table, "sums": adam}
    files = {f"{kind}.{name}.npy" for kind in kinds for name in kinds[kind]} | {"meta.json"}
    for step, cursor in ((3, 3 * 256), (6, None), (8, None)):
        assert {path.name for path in (folder / str(step)).iterdir()} == files
        meta = json.loads((folder / str(step) / "meta.json").read_text())
        assert meta.keys() == {"step", "cursor", "train_time_ms", "config"}
        assert meta["step"] == step and meta["cursor"] == (cursor or meta["cursor"])
        times = [m["train_time_ms"] for m in run.metrics if m["step"] == step]
        later = facts(run.dir)["train_time_ms"]
        assert times[0] - 1e-3 <= meta["train_time_ms"] <= later + 1e-3  # files have microseconds
        assert meta["config"] == facts(run.dir)["config"]


def test_find_checkpoint_takes_the_newest_complete_one(copy):
    shutil.copytree(copy / "checkpoints/8", copy / "checkpoints/10")  # newer than 8, also as text
    (copy / "checkpoints/.99-abc").mkdir()  # what a killed process may leave
    assert T.find_checkpoint(copy)[0] == copy / "checkpoints/10"


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_state_survives_saving_and_loading_exactly(run, tmp_path, devices):
    """Loaded from the run of 8 devices onto some of them, saved again from there."""
    source = run.dir / "checkpoints/6"
    state = T.load_arrays(source, abstract(devices))
    want = arrays(source)
    for kind, names in abstract(devices).items():
        for name, leaf in names.items():
            array = state[kind][name]
            assert (array.shape, array.dtype, array.sharding) == (
                leaf.shape, leaf.dtype, leaf.sharding
            )  # fmt: skip
            np.testing.assert_array_equal(array, want[f"{kind}.{name}.npy"])
    T.save_checkpoint(tmp_path, CFG, state, 7, 1234, 56.5)
    assert_same_arrays(arrays(tmp_path / "checkpoints/7"), want)
    meta = {"step": 7, "cursor": 1234, "train_time_ms": 56.5}
    assert T.find_checkpoint(tmp_path) == (tmp_path / "checkpoints/7", meta, CFG)


def objects(file):
    np.save(file, np.array([{"not": "numbers"}], dtype=object))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda file: file.unlink(), "cannot be loaded", id="missing"),
        pytest.param(lambda file: file.write_bytes(b""), "cannot be loaded", id="empty"),
        pytest.param(
            lambda file: file.write_bytes(file.read_bytes()[:-4]), "cannot be loaded", id="cut"
        ),
        pytest.param(objects, "cannot be loaded", id="pickled objects"),
        pytest.param(lambda file: np.savez(file.open("wb"), a=1), "cannot be loaded", id="zip"),
        pytest.param(
            lambda file: np.save(file, np.zeros((104, 31), np.float32)),
            r"holds float32\[104, 31\], .* expects float32\[104, 32\]",
            id="wrong shape",
        ),
        pytest.param(
            lambda file: np.save(file, np.zeros((104, 32))),
            r"holds float64\[104, 32\], .* expects float32\[104, 32\]",
            id="wrong dtype",
        ),
    ],
)
def test_damaged_array_is_refused_by_name(copy, damage, message):
    file = copy / "checkpoints/8/first.embed.npy"
    damage(file)
    with pytest.raises(T.UserError, match=message) as error:
        T.load_arrays(copy / "checkpoints/8", abstract())
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda file: file.unlink(), id="missing"),
        pytest.param(lambda file: file.write_text(file.read_text()[:-9]), id="cut"),
        pytest.param(lambda file: file.write_bytes(b"\xff\xfe"), id="not text"),
        pytest.param(lambda file: file.write_text("[]"), id="a list"),
        pytest.param(
            lambda file: file.write_text(file.read_text().replace('"cursor"', '"cur"')), id="no key"
        ),
        pytest.param(
            lambda file: file.write_text(file.read_text().replace('"layers": 3', '"layers": "x"')),
            id="not a config",
        ),
        pytest.param(
            lambda file: file.write_text(file.read_text().replace('"layers"', '"leyers"')),
            id="another program's config",
        ),
    ],
)
def test_damaged_meta_is_refused(copy, damage):
    damage(copy / "checkpoints/8/meta.json")
    with pytest.raises(T.UserError, match="cannot be used|does not fit") as error:
        T.find_checkpoint(copy)
    assert "\n" not in str(error.value)


def test_failure_while_saving_leaves_the_older_checkpoints_alone(copy, monkeypatch):
    state, calls, save = T.load_arrays(copy / "checkpoints/8", abstract()), [], np.save

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return save(*args, **kwargs)

    before = {step: arrays(copy / "checkpoints" / step) for step in ("3", "6", "8")}
    monkeypatch.setattr(np, "save", failing)
    for step in (9, 8):  # a new one, and one that is there
        calls.clear()
        with pytest.raises(T.UserError, match="No space"):
            T.save_checkpoint(copy, CFG, state, step, 0, 0.0)
        assert len(calls) == 3
        assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["3", "6", "8"]
        for name, want in before.items():
            assert_same_arrays(arrays(copy / "checkpoints" / name), want)


def test_checkpoint_gets_its_name_when_it_is_complete(copy, monkeypatch):
    """At no time while its files are written, so that a killed process leaves no half of one."""
    state, seen = T.load_arrays(copy / "checkpoints/8", abstract()), []

    def spy(real, *args, **kwargs):
        seen.append((copy / "checkpoints/9").exists())
        return real(*args, **kwargs)

    monkeypatch.setattr(np, "save", partial(spy, np.save))
    monkeypatch.setattr(json, "dump", partial(spy, json.dump))
    T.save_checkpoint(copy, CFG, state, 9, 0, 0.0)
    assert len(seen) == len(jax.tree.leaves(state)) + 1 and not any(seen)
    assert (copy / "checkpoints/9/meta.json").exists()


# ------------------------------------------------------------------------------------------------
# Resumed runs
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 6])
def test_resumed_run_ends_exactly_as_the_uninterrupted_one(train, run, copy, step):
    """Bit for bit: the same programs on the same numbers.

    After 3 steps gradients wait for the next Adam step, and head and embedding are still one;
    after 6 they have just parted.
    """
    state = arrays(run.dir / f"checkpoints/{step}")
    waiting = [name for name in state if name.startswith("sums.") and np.any(state[name])]
    assert len(waiting) == (17 if step == 3 else 0)
    for kind in ("params", "first", "second"):
        np.testing.assert_array_equal(state[f"{kind}.embed.npy"], state[f"{kind}.head.npy"])
    last = arrays(run.dir / "checkpoints/8")
    assert np.any(last["params.embed.npy"] != last["params.head.npy"])
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    checkpoint, meta, cfg = T.find_checkpoint(copy)
    assert checkpoint.name == str(step)
    said = []
    assert train(cfg, copy.parent, resume=copy, say=said.append) == copy

    got, want = facts(copy), facts(run.dir)
    assert_same_arrays(arrays(copy / "checkpoints/8"), arrays(run.dir / "checkpoints/8"))
    assert got["val_loss"] == want["val_loss"]
    assert got["resumed"] is True and got["finished"] is True
    assert (got["run_id"], got["steps"], got["tokens"]) == (copy.name, 8, want["tokens"])

    new = metrics(copy)[len(run.metrics) :]
    times = [line.pop("train_time_ms") for line in new]
    assert times == sorted(times) and times[0] >= meta["train_time_ms"] - 1e-3
    old = [dict(line) for line in run.metrics if line["step"] > step]
    for line in old:
        del line["train_time_ms"]
    assert new == old
    log = (copy / "log.txt").read_bytes()
    assert log.startswith(run.log.read_bytes())  # continued, with no second header
    assert log.count(RULE) == 2
    assert sorted(path.name for path in (copy / "checkpoints").iterdir())[-1] == "8"


def test_resumed_run_does_not_validate_again_where_it_was_saved(train, tmp_path):
    folder = train(replace(CFG, checkpoint_every=4), tmp_path)
    shutil.rmtree(folder / "checkpoints/8")
    before = len(metrics(folder))
    train(T.find_checkpoint(folder)[2], tmp_path, resume=folder)
    assert [line["step"] for line in metrics(folder)[before:]] == [5, 6, 7, 8, 8]


def test_finished_run_is_not_resumed(train, run, copy):
    before = (copy / "run.json").read_bytes()
    with pytest.raises(T.UserError, match="is finished: there is nothing to resume"):
        train(T.find_checkpoint(copy)[2], copy.parent, resume=copy)
    assert (copy / "run.json").read_bytes() == before


@pytest.mark.parametrize("change", [{"step": 99}, {"step": -3}, {"cursor": -5}])
def test_impossible_place_in_a_checkpoint_is_refused(copy, change):
    path = copy / "checkpoints/8/meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(T.UserError, match="meta.json cannot be used"):
        T.find_checkpoint(copy)


# ------------------------------------------------------------------------------------------------
# Sampling and profile
# ------------------------------------------------------------------------------------------------


def test_sample_is_deterministic_text_of_real_tokens(copy):
    file = copy / "checkpoints/8/params.head.npy"
    head = np.load(file)
    head[CFG.real_tokens :] = 9  # padding ids, some of which are now far likelier than any
    head[-1] = -9  # real token, whatever sign the sum of the features has
    np.save(file, head)
    with quick_compilation():
        first, again = (T.sample(CFG, copy, "ABC 12", count=12) for _ in range(2))
    assert first == again and 0 < len(first) <= 12
    assert all(ord(char) < BOS for char in first)


def test_sample_at_temperature_zero_takes_the_likeliest_token(run):
    """Beyond the longest row too, where only its length of the newest tokens is seen."""
    cfg, prompt, count = replace(CFG, val_row=16), "ABCDEFGHIJKL", 8
    with quick_compilation():
        text = T.sample(cfg, run.dir, prompt, count=count, temperature=1e-6)
    tokens = [BOS, *map(ord, prompt + text)] + [BOS] * (len(text) < count)  # BOS ended it early
    seen = [tokens[:end][-16:] for end in range(1 + len(prompt), len(tokens))]
    rows = np.array([row + [0] * (16 - len(row)) for row in seen], np.int32)
    params = T.load_arrays(run.dir / "checkpoints/8", abstract(1))["params"]

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
    T.sample(replace(CFG, val_row=val_row), run.dir, "A" * prompt, count=count)
    assert shapes == [(1, length)]


def test_sample_of_an_unfinished_run_rotates_as_that_run_did(copy, monkeypatch):
    """YaRN changes the rotation from stage to stage: that of the checkpoint's last step counts."""
    for step in ("6", "8"):
        shutil.rmtree(copy / "checkpoints" / step)
    seen = []

    def forward(params, rows, tokens, cfg, windows, hyper, attend):
        seen.append(float(hyper.attn_scale))
        return rows["embed"]

    monkeypatch.setattr(T, "forward", forward)
    T.sample(CFG, copy, "A", count=1)
    assert seen == [pytest.approx(T.yarn(CFG, 0)[1])]
    assert T.yarn(CFG, 0)[1] != T.yarn(CFG, 1)[1]


def test_sample_from_the_command_line(run, capsys):
    with quick_compilation():
        assert T.main(["--sample", str(run.dir), "--prompt", "ABC"]) == 0
        text = T.sample(CFG, run.dir, "ABC")  # 64 tokens, or fewer if the document ends
    assert capsys.readouterr() == (f"ABC{text}\n", "") and 0 < len(text) <= 64


def test_sample_does_not_depend_on_the_length_of_its_rows(run):
    with quick_compilation():
        short, long = (T.sample(replace(CFG, val_row=n), run.dir, "ABC", 8) for n in (16, 4096))
    assert short == long


def test_profile_writes_a_trace(train, tmp_path, monkeypatch):
    monkeypatch.setattr(T, "PROFILE_STEPS", (2, 4))
    folder = train(replace(CFG, checkpoint_every=0), tmp_path, profile=True)
    assert list((folder / "profile").rglob("*.xplane.pb"))


def test_profile_of_a_run_that_is_too_short_is_refused(train, tmp_path, monkeypatch):
    monkeypatch.setattr(T, "PROFILE_STEPS", (6, 8))
    with pytest.raises(T.UserError, match="--profile needs more than 8 steps"):
        train(CFG, tmp_path, profile=True)
    assert not list(tmp_path.iterdir())
