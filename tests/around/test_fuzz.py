"""Damaged input by seeded mutation: shards, checkpoints, folders of runs, command lines.

Every case goes through the command line's `main`. It must end with correct work, or with one line
and status 2: no traceback, no hang, no run that goes on from the wrong numbers. One case again:
`python -m pytest "tests/around/test_fuzz.py::test_shards[17]"`. With --slow there are 1,000 of them
with other seeds.
"""

import io
import json
import os
import shutil
import signal
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import documents, write_shard
from programs import BUILT, key, programs_of, quick_compilation
from training import BRIEF, arrays, assert_same_arrays, unfinished

import train_gpt as T

SECONDS = 30  # for one case, which takes 0.1 s; a hang is a failure
SEED, MORE = (2, 1000 / 120) if "--slow" in sys.argv else (1, 1)
SHARDS, DAMAGED, FOLDERS, COMMANDS = (round(MORE * n) for n in (30, 40, 15, 35))  # 120 cases
CFG = replace(BRIEF, preset="fuzz", devices=1)
TRAIN, VAL = ("f_train_000001.bin", "f_train_000002.bin"), "f_val_000001.bin"


class Hang(BaseException):
    """Not an Exception, so that nothing catches it."""


class Compiling(Exception):
    """All checks are passed, and the run would now compile other programs than the test has."""


def late(*_):
    raise Hang(f"no end after {SECONDS} s")


@pytest.fixture
def main(tmp_path, monkeypatch):
    """T.main in an empty folder: (status, stdout, stderr), where "compiling" is a status too.

    A refusal must be one line.
    """

    def compile_all(cfg, mesh, *_):
        if key(cfg, mesh.size) not in BUILT:
            raise Compiling
        return BUILT[key(cfg, mesh.size)]

    def no_hosts(*_, **__):
        raise RuntimeError("no other hosts here")

    def offline(_):
        raise OSError("no network here")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(T, "compile_all", compile_all)
    monkeypatch.setattr(T, "warm_up", lambda *_: None)
    monkeypatch.setattr(T, "start_state", lambda *_: STARTS[0])
    monkeypatch.setattr(T, "start_copies", lambda *_: STARTS[1])
    monkeypatch.setattr(T, "PRESETS", {**T.PRESETS, "fuzz": CFG})
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(jax.distributed, "initialize", no_hosts)
    monkeypatch.setattr("tiktoken.get_encoding", offline)
    cache = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in cache}

    def run(*argv):
        # As a terminal's are; pytest's own refuse what a terminal takes.
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict") for _ in range(2))
        err.reconfigure(errors="backslashreplace")
        handler = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            with (
                redirect_stdout(out),
                redirect_stderr(err),
                warnings.catch_warnings(record=True) as warned,
            ):
                warnings.simplefilter("always")
                warnings.simplefilter("ignore", ResourceWarning)  # files that an error left open
                status = T.main([str(arg) for arg in argv])
        except Compiling:
            status = "compiling"
        except SystemExit as end:
            status = end.code
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        out, err = (stream.detach().getvalue().decode("utf-8", "replace") for stream in (out, err))
        assert status in (0, 2, "compiling"), (status, out, err)
        assert not warned, [str(warning.message) for warning in warned]
        if status == 2:
            assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
            assert len(err) > len("error: \n")
        else:
            assert err == ""
        assert "Traceback" not in out
        return status, out, err

    yield run
    for name, value in before.items():
        jax.config.update(name, value)


STARTS = []  # T.start_state and T.start_copies of CFG, compiled


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The data, and a run that nobody interrupted: its folder, with the checkpoints 2 and 4.

    Of its end `arrays`; `metrics` what was logged.
    """
    data = tmp_path_factory.mktemp("data")
    write_shard(data / TRAIN[0], documents(1, 1500))
    write_shard(data / TRAIN[1], documents(2, 1700))
    write_shard(data / VAL, documents(3, 600))
    cfg = replace(CFG, data=str(data))
    programs_of(cfg, 1)
    with pytest.MonkeyPatch.context() as patch, quick_compilation():
        STARTS[:] = (start(*T.make_mesh(cfg)) for start in (T.start_state, T.start_copies))
        patch.setattr(T, "compile_all", lambda cfg, *_: BUILT[key(cfg, 1)])
        patch.setattr(T, "start_state", lambda *_: STARTS[0])
        patch.setattr(T, "start_copies", lambda *_: STARTS[1])
        run = T.train(cfg, tmp_path_factory.mktemp("logs"), "train", say=lambda line: None)
    end = arrays(run / "checkpoints/4")
    return SimpleNamespace(data=data, dir=run, arrays=end, metrics=metrics(run))


def metrics(run: Path) -> dict:
    """(step, kind) -> loss, of the whole lines in metrics.jsonl."""
    found = {}
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            fields = json.loads(line)
            name = next(name for name in ("train_loss", "val_loss") if name in fields)
            found[fields["step"], name] = fields[name]
        except (ValueError, LookupError, TypeError, StopIteration):
            continue
    return found


def interrupted(base, folder: Path, *steps: int) -> Path:
    """A copy of the run as if it had ended with these checkpoints."""
    without = shutil.ignore_patterns(*{"2", "4"} - {*map(str, steps)})
    run = Path(shutil.copytree(base.dir, folder / "run", ignore=without))
    unfinished(run)
    return run


def assert_same_end(base, run: Path, logs: bool = True):
    """The run has ended as if nobody had interrupted it: parameters, optimizers, losses."""
    assert T.read_checkpoint(run / "checkpoints/4").step == 4
    assert_same_arrays(arrays(run / "checkpoints/4"), base.arrays)
    if logs:
        assert metrics(run) == base.metrics


# ------------------------------------------------------------------------------------------------
# Mutations
# ------------------------------------------------------------------------------------------------


def change_bytes(rng, content: bytes, first: int = 0) -> tuple[str, bytes]:
    """(what was done, other bytes); flips and zeros begin at `first`."""
    data, size = bytearray(content), len(content)
    at = int(rng.integers(min(first, size - 1), size))
    kind = rng.choice(["flip", "cut", "append", "zero", "empty", "random", "insert", "double"])
    if kind == "flip":
        for _ in range(rng.integers(1, 4)):
            data[int(rng.integers(at, size))] ^= 1 << int(rng.integers(8))
    elif kind == "cut":
        del data[at:]
    elif kind == "append":
        data += rng.bytes(int(rng.integers(1, 64)))
    elif kind == "zero":
        end = min(size, at + int(rng.integers(1, 64)))
        data[at:end] = bytes(end - at)
    elif kind == "empty":
        data.clear()
    elif kind == "random":
        data = rng.bytes(size)
    elif kind == "insert":
        data[at:at] = rng.bytes(int(rng.integers(1, 9)))
    else:
        data *= 2
    return f"{kind} at {at} of {size}", bytes(data)


REPLACEMENTS = {  # of a file, by what is no file or not this one
    "removed": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to its folder": lambda path: path.symlink_to(path.parent),
    "an empty file": lambda path: path.touch(),
}


def damage(rng, path: Path, first: int = 0) -> str:
    """Damage a file, or put something else in its place; what was done."""
    if rng.random() < 0.65:
        what, content = change_bytes(rng, path.read_bytes(), first)
        path.write_bytes(content)
        return f"{path.name}: {what}"
    if rng.random() < 0.25:
        other = sorted(p for p in path.parent.iterdir() if p != path and p.is_file())
        other = other[int(rng.integers(len(other)))]
        path.write_bytes(other.read_bytes())
        return f"{path.name}: a copy of {other.name}"
    what = str(rng.choice(list(REPLACEMENTS)))
    path.unlink()
    REPLACEMENTS[what](path)
    return f"{path.name}: {what}"


# ------------------------------------------------------------------------------------------------
# Shards
# ------------------------------------------------------------------------------------------------


def is_shard(path: Path) -> bool:
    """Whether this file is a shard of CFG's vocabulary."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    magic, version, count = np.frombuffer(content[:12].ljust(12), "<i4").tolist()
    tokens = np.frombuffer(content[1024 : len(content) // 2 * 2], "<u2")
    header = (magic, version, len(content)) == (20240520, 1, 1024 + 2 * count)
    return header and count > 0 and int(tokens.max()) < CFG.real_tokens


@pytest.mark.parametrize("case", range(SHARDS))
def test_shards(base, main, tmp_path, case):
    """What is no whole shard of known tokens is refused by name; nothing is left behind."""
    rng = np.random.default_rng([SEED, 1, case])
    data = Path(shutil.copytree(base.data, tmp_path / "data"))
    path = data / rng.choice([*TRAIN, VAL])
    if rng.random() < 0.3:  # a number of the header
        words = np.fromfile(path, "<i4", 256)
        tokens = path.read_bytes()[1024:]
        at = int(rng.integers(4))
        extreme = [-(2**31), -1, 0, 1, 2**30, 2**31 - 1, int(words[at]) + 1, int(words[at]) - 1]
        words[at] = rng.choice(extreme)
        path.write_bytes(words.tobytes() + tokens)
        what = f"{path.name}: word {at} is {words[at]}"
    elif rng.random() < 0.3:  # a token
        tokens = np.fromfile(path, "<u2", offset=1024)
        at = int(rng.choice([0, len(tokens) - 1, rng.integers(len(tokens))]))
        tokens[at] = rng.choice([CFG.real_tokens - 1, CFG.real_tokens, CFG.vocab, 2**15, 2**16 - 1])
        write_shard(path, tokens)
        what = f"{path.name}: token {at} is {tokens[at]}"
    else:
        what = damage(rng, path, first=1024)
    good = all(map(is_shard, map(data.joinpath, (*TRAIN, VAL))))
    out = tmp_path / "logs"
    status, _, err = main("fuzz", "--data", data, "--out", out)
    if status == 2:
        assert not out.exists() and str(data) in err, what
        assert path.name in err or good or not path.exists() or "tokens" in err, (what, err)
    else:
        assert good or not os.path.lexists(path), f"taken: {what}"


# ------------------------------------------------------------------------------------------------
# Checkpoints and folders of runs
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(DAMAGED))
def test_damaged_checkpoints(base, main, tmp_path, case):
    """Refused, or passed over for an older one; from that the run ends as it should."""
    rng = np.random.default_rng([SEED, 2, case])
    older = case % 2 == 0
    run = interrupted(base, tmp_path, *([2, 4] if older else [2]))
    newest = run / f"checkpoints/{4 if older else 2}"
    what = damage(rng, newest / rng.choice(["meta.json", "0.npz"]))
    status, out, err = main("--resume", run)
    assert status != "compiling", what
    if status == 0:
        assert_same_end(base, run)
    elif "is finished" not in err:  # that of 4 is whole: where was changed nothing is read
        assert not older and f"{run} has no checkpoint" in err and "warning: " in out, what
    else:
        assert older
        assert_same_arrays(arrays(newest), base.arrays)


NAMES = ["007", "4", "-3", "+5", "99999999999", "999999999999", "0", "4.0", " 5", "٣", ".4", ".x"]


@pytest.mark.parametrize("case", range(FOLDERS))
def test_folders_of_runs(base, main, tmp_path, case):
    """What is missing is made anew; what cannot be is refused; the checkpoint is what counts."""
    rng = np.random.default_rng([SEED, 3, case])
    run = interrupted(base, tmp_path, 2)
    what, logs = [], True
    for _ in range(rng.integers(1, 4)):
        if rng.random() < 0.5:
            path = run / rng.choice(["log.txt", "metrics.jsonl", "run.json"])
            if path.is_file() and not path.is_symlink():
                what.append(damage(rng, path))
                logs = logs and path.name == "run.json"
        else:
            path = run / "checkpoints" / rng.choice(NAMES)
            if not os.path.lexists(path):
                REPLACEMENTS[how := str(rng.choice(list(REPLACEMENTS)))](path)
                what.append(f"{path.name}: {how}")
    status, _, err = main("--resume", run)
    assert status != "compiling", what
    if status == 0:
        assert_same_end(base, run, logs)
    else:
        assert f"cannot write {run}" in err or "there is no checkpoint of step 4" in err, what


@pytest.mark.parametrize("kind", REPLACEMENTS)
@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/2", "."])
def test_folders_that_are_none(base, main, tmp_path, kind, name):
    run = interrupted(base, tmp_path, 2)
    shutil.rmtree(run / name)
    REPLACEMENTS[kind](run / name)
    assert main("--resume", run)[0] == 2


# ------------------------------------------------------------------------------------------------
# Command lines
# ------------------------------------------------------------------------------------------------

TEXTS = [
    *("", "0", "1", "-1", "2", "3", "7", "1e3", "0x10", "1_000", " 4 ", "٤", "nan", "inf", "-inf"),
    *("1e308", "1e-320", "1e400", "9" * 19, "9" * 400, "-" + "9" * 30, "2147483647"),
    *("4294967295", "4294967296", "1000001", "99999", "65536", "True", "None", "x"),
    *("()", "(1,)", "(1,2)", "[1,2]", "(1,2,3)", "(0.5,0.9)", "(-1,5)", "((1,2),(3,4))", "{1:2}"),
    *("(True,False)", "('a','b')", "(1j,2)", "(nan,1)", "(1e400,1)", f"({'9' * 400},1)", "(,)"),
    *("(" * 5000, "((((", "{" * 99, "__import__('os').abort()", "{}.__class__", "*", "range(9)"),
    *("(0,)", "(0,0)", "(1,0)", "(2,1)", "(9999999999,9999999999)", "lambda: 1", "é" * 50, "x\ny"),
    *("%s%d%n", "$HOME", "`id`", "../..", "\t", "gpt2", "bytes", "bpe", "plain", "auto", "always"),
    *("float32", "bfloat16", "float64"),
    *(
        "short",
        "long",
        "paired",
        "raw",
        "normalised",
        "(48,)",
        "(48,0)",
        "(2,4)",
        "(4,4)",
        "(0.5,)",
    ),
]
FIELDS = [field.name for field in fields(T.Config)]
PARTS = [field.name for field in fields(T.Stage)]
TRAITS = [field.name for field in fields(T.Layer)]
KEYS = [
    *(FIELDS * 4),
    *(f"stages.0.{part}" for part in PARTS * 2),
    *(f"layers.{i}.{trait}" for trait in TRAITS for i in (0, 2)),
    *("", ".", "stages", "stages.", "stages.0", "stages.-1.share", "stages.0.share.x", "steps.0"),
    *("__class__", "stages.0.__dict__", "stages.٠.share", "--set", "Steps", "steps ", "é"),
    *("layers", "layers.", "layers.0", "layers.-1.x0", "layers.3.x0", "layers.0.x0.x", "depth"),
    *("stages.00.share", "stages.9999999999.share", "rows", "dtype", "stages.0.rows", "validate"),
]


def random_command(rng, base) -> list[str]:
    """A command line of pieces that are right or wrong."""

    def one(items):
        return str(items[int(rng.integers(len(items)))])

    paths = ["", "x" * 5000, "nothing", "/dev/null", "/dev/null/x", "a\nb", ".", "-", "é"]
    paths += [str(base.data), str(base.data / VAL), str(base.dir)]
    argv = [one(["fuzz", "tiny", "speedrun", "fuzz"])] if rng.random() < 0.9 else []
    for _ in range(rng.integers(1, 5)):
        kind = one(["set"] * 8 + ["path"] * 3 + ["seed", "flag", "hosts", "odd"])
        if kind == "set":
            item = f"{one(KEYS)}={one(TEXTS)}"
            argv += [f"--set={item}"] if rng.random() < 0.7 else ["--set", item]
        elif kind == "path":
            option = one(["--data", "--out", "--cache", "--resume"])
            argv += [f"{option}={one(paths)}"] if rng.random() < 0.7 else [option, one(paths)]
        elif kind == "seed":
            argv += [f"--seed={one(TEXTS)}"]
        elif kind == "flag":
            argv += [one(["--profile", "--show", "--help", "-h", "--s", "--pro", "--", "-", "-x"])]
        elif kind == "hosts":
            argv += [f"{one(['--coordinator', '--processes', '--process-id'])}={one(TEXTS)}"]
        else:
            argv += [one([*TEXTS, "--prompt=x", "--set", "--sets=1", "@x", "--no-show", "--set=="])]
    return argv


@pytest.mark.parametrize("case", range(COMMANDS))
def test_command_lines(base, main, tmp_path, case):
    rng = np.random.default_rng([SEED, 4, case])
    argv = random_command(rng, base)
    argv += ["--show"] if case % 2 else [f"--data={base.data}", f"--out={tmp_path}/logs"]
    status, out, _ = main(*argv)
    if status == 0:
        done = " model FLOPs", "usage: ", "target "
        assert any(part in out for part in done), argv


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("key", ["steps", "momentum"])
def test_settings(main, key, text):
    status, out, _ = main("fuzz", f"--set={key}={text}", "--show")
    assert status == 2 or any(line.startswith(f"{key} = ") for line in out.splitlines())


def test_the_interrupted_run_ends_as_it_should(base, main, tmp_path):
    """So that the cases above are not refused for another reason."""
    run = interrupted(base, tmp_path, 2)
    assert main("--resume", run)[0] == 0
    assert_same_end(base, run)
