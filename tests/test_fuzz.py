"""Hostile input: damaged shards, checkpoints, run folders and command lines, by seeded mutation.

Every case goes through the command line's `main`. It must end with correct work, or with one line
and status 2: no traceback, no hang, no run that goes on from the wrong numbers, and no code that
came with a file. One case again: `python -m pytest "tests/test_fuzz.py::test_shards[17]"`.
"""

import io
import json
import os
import pickle
import shutil
import signal
import warnings
import zlib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import documents, small_config, write_shard
from programs import BUILT, key, programs_of

import train_gpt as T

SECONDS = 30  # for one case, which takes 0.1 s; a hang is a failure
SHARDS, DAMAGED, FORGED, FOLDERS, MERGES, COMMANDS = 110, 110, 130, 50, 40, 100  # random cases
CFG = small_config(  # one device, one stage and four small programs: 4 steps take 0.1 s
    preset="fuzz",
    layers=3,
    width=16,
    heads=2,
    mlp_width=32,
    bigram_rows=104,
    long_layers=(2,),
    value_layers=(0, 2),
    skip=(0, 1),
    steps=4,
    extension=0,
    stages=(T.Stage(1.0, 256, 32, 24, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0)),),
    momentum_warmup=2,
    momentum_cooldown=1,
    val_tokens=256,
    val_batch=256,
    devices=1,
    checkpoint_every=1,
)
TRAIN, VAL = ("f_train_000001.bin", "f_train_000002.bin"), "f_val_000001.bin"


class Hang(BaseException):
    """Not an Exception, so that nothing catches it."""


class Compiling(Exception):
    """All checks are passed, and the run would now compile other programs than the test has."""


class Touch:
    """Pickled code: whoever unpickles it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def late(*_):
    raise Hang(f"no end after {SECONDS} s")


@pytest.fixture
def main(tmp_path, monkeypatch):
    """T.main in an empty folder: (status, stdout, stderr), where "compiling" is a status too.

    A refusal must be one line; nothing may have been run that came with a file (see `marker`).
    """

    def compile_all(cfg, mesh, say):
        if key(cfg, mesh.size) not in BUILT:
            raise Compiling
        return BUILT[key(cfg, mesh.size)]

    def no_hosts(*_, **__):
        raise RuntimeError("no other hosts here")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(T, "compile_all", compile_all)
    monkeypatch.setattr(T, "warm_up", lambda *_: None)
    monkeypatch.setattr(T, "PRESETS", {**T.PRESETS, "fuzz": CFG})
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(jax.distributed, "initialize", no_hosts)
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
        assert not (tmp_path / "marker").exists(), "code that came with a file was run"
        return status, out, err

    yield run
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The data, and a run that nobody interrupted: its folder, with a checkpoint of each step.

    Of its last checkpoint `files` has names, sizes and checksums; `metrics` what was logged.
    """
    data = tmp_path_factory.mktemp("data")
    write_shard(data / TRAIN[0], documents(1, 1500))
    write_shard(data / TRAIN[1], documents(2, 1700))
    write_shard(data / VAL, documents(3, 400))
    cfg = T.dataclasses.replace(CFG, data=str(data))
    programs_of(cfg, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "compile_all", lambda cfg, mesh, say: BUILT[key(cfg, 1)])
        patch.setattr(T, "KEPT", 9)
        run = T.train(cfg, tmp_path_factory.mktemp("logs"), "train", say=lambda line: None)
    files = meta_of(run / "checkpoints/4")["files"]
    return SimpleNamespace(data=data, dir=run, files=files, metrics=metrics(run))


def meta_of(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "meta.json").read_text())["checkpoint"]


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
    without = shutil.ignore_patterns(*{"1", "2", "3", "4"} - {*map(str, steps)})
    return Path(shutil.copytree(base.dir, folder / "run", ignore=without))


def assert_same_end(base, run: Path, logs: bool = True):
    """The run has ended as if nobody had interrupted it: parameters, optimizers, losses."""
    assert meta_of(run / "checkpoints/4")["files"] == base.files
    assert T.read_checkpoint(run / "checkpoints/4").step == 4
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
    "/dev/null": lambda path: path.symlink_to("/dev/null"),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),  # has no end
    "a pipe": lambda path: os.mkfifo(path),  # has no beginning
    "/proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
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


DEEP = "@deep@"  # in JSON's text: lists in lists
VALUES = [
    *(None, True, False, -1, 0, 1, 3, 16, 2**31 - 1, 2**31, 2**63, 10**30, 10**400, -(10**400)),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "\0", "\ud800", "../../../etc/passwd", "/etc/passwd", "1", "__class__", "x" * 9999),
    *([], {}, [[]], [1], [1, 2], ["x", 1], {"x": 1}, [None] * 3, [10**400, 1], DEEP),
]


def places(tree, place=()):
    """Every place in a JSON value but the outermost: keys and indices from there."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, child in list(children):
        yield (*place, name)
        if isinstance(child, dict | list):
            yield from places(child, (*place, name))


def change_json(rng, tree) -> tuple[tuple, str]:
    """Change one value of `tree` in place: (where, what was done)."""
    every = sorted(places(tree), key=lambda place: (len(place), str(place)))
    # Otherwise most of them would be the fields of the many files.
    depth = rng.choice(sorted({len(place) for place in every}))
    every = [place for place in every if len(place) == depth]
    place = every[int(rng.integers(len(every)))]
    parent = tree
    for name in place[:-1]:
        parent = parent[name]
    kind = rng.choice(["delete", "add", "rename", "near", *["value"] * 5])
    value = VALUES[int(rng.integers(len(VALUES)))]
    if kind == "near" and type(parent[place[-1]]) in (int, float):
        value = parent[place[-1]] + int(rng.choice([-1, 1, 8]))
    if kind == "delete":
        del parent[place[-1]]
    elif kind == "rename" and isinstance(parent, dict):
        parent[f"{place[-1]}x"] = parent.pop(place[-1])
    elif kind == "add" and isinstance(parent, dict):
        parent["hostile"] = value
    else:
        parent[place[-1]] = value
    return place, f"{kind} {'.'.join(map(str, place))} {value!r:.60}"


def write_meta(checkpoint: Path, meta):
    """Write a changed meta.json with a right checksum, as somebody would who can compute one."""
    crc = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    text = json.dumps({"crc32": crc, "checkpoint": meta}, indent=1)
    text = text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    (checkpoint / "meta.json").write_text(text)


def replace_array(checkpoint: Path, name: str, content: bytes):
    """Put other bytes in the place of an array, and their right checksum into meta.json."""
    meta = meta_of(checkpoint)
    (checkpoint / name).write_bytes(content)
    meta["files"][name] |= {"bytes": len(content), "crc32": zlib.crc32(content)}
    write_meta(checkpoint, meta)


# ------------------------------------------------------------------------------------------------
# Shards
# ------------------------------------------------------------------------------------------------


def is_shard(path: Path) -> bool:
    """Whether this file is a shard of CFG's vocabulary."""
    if not path.is_file() or path.resolve().is_relative_to("/proc"):
        return False
    content = path.read_bytes()
    magic, version, count = np.frombuffer(content[:12].ljust(12), "<i4").tolist()
    tokens = np.frombuffer(content[1024 : len(content) // 2 * 2], "<u2")
    header = (magic, version, len(content)) == (20240520, 1, 1024 + 2 * count)
    return header and count > 0 and int(tokens.max()) < CFG.real_tokens


def train_on(main, data, tmp_path):
    """Start a run on `data`: (status, stderr). It must leave nothing behind when it is refused."""
    out = tmp_path / "logs"
    status, _, err = main("fuzz", "--data", data, "--out", out, "--set", "devices=1")
    assert status != 2 or not out.exists()
    return status, err


@pytest.mark.parametrize("case", range(SHARDS))
def test_shards(base, main, tmp_path, case):
    rng = np.random.default_rng([1, case])
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
    status, err = train_on(main, data, tmp_path)
    if status == 2:
        assert str(data) in err, what
        assert path.name in err or good or not path.exists() or "tokens" in err, (what, err)
    else:
        assert good or not os.path.lexists(path), f"taken: {what}"


# ------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(DAMAGED))
def test_damaged_checkpoints(base, main, tmp_path, case):
    """Refused, or passed over for an older one; from that the run ends as it should."""
    rng = np.random.default_rng([2, case])
    older = case % 3 == 0
    run = interrupted(base, tmp_path, *([2, 3] if older else [3]))
    newest = run / "checkpoints/3"
    files = sorted(path for path in newest.iterdir())
    path = newest / "meta.json" if case % 2 else files[int(rng.integers(len(files)))]
    what = damage(rng, path)
    mode = "--resume" if older or rng.random() < 0.7 else "--sample"
    status, out, err = main(mode, run)
    assert status != "compiling", what
    if status == 2:
        assert not older and f"no checkpoint in {run}" in err and "warning: " in out, what
    else:
        assert older or meta_of(newest) == meta_of(base.dir / "checkpoints/3"), what
        if mode == "--resume":
            assert_same_end(base, run)


@pytest.mark.parametrize("case", range(FORGED))
def test_forged_checkpoints(base, main, tmp_path, case):
    """Other values, with a checksum that is right."""
    rng = np.random.default_rng([3, case])
    run = interrupted(base, tmp_path, 3)
    meta = meta_of(run / "checkpoints/3")
    place, what = change_json(rng, meta["config"] if case % 3 == 0 else meta)
    write_meta(run / "checkpoints/3", meta)
    status, _, _ = main("--resume", run, *(["--data", base.data] if case % 2 else []))
    config = case % 3 == 0 or place[0] == "config"
    if status == 0 and not config:  # another config is another run
        assert_same_end(base, run, logs=place[0] != "logs")
    assert config or status != "compiling", what


def npy(array, **header) -> bytes:
    """The bytes of a .npy file whose header may lie."""
    file = io.BytesIO()
    fields = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | header
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue() + array.tobytes()


def raw_header(text: str, version=(1, 0)) -> bytes:
    """The beginning of a .npy file with any text for a header."""
    size = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + size + text.encode("latin1")


def pickled(marker, form):
    """Arrays of objects as .npy, .npz or a bare pickle."""
    file, array = io.BytesIO(), np.array([Touch(marker)] * 4, object)
    if form == "npy":
        np.save(file, array, allow_pickle=True)
    elif form == "npz":
        np.savez(file, array)
    else:
        pickle.dump(Touch(marker), file)
    return file.getvalue()


CODE = "__import__('pathlib').Path({!r}).touch()"
ARRAYS = {  # what stands where an array of three rows should be; `m`: a file that code would make
    "pickle in npy": lambda a, m: pickled(m, "npy"),
    "pickle in npz": lambda a, m: pickled(m, "npz"),
    "bare pickle": lambda a, m: pickled(m, "pickle"),
    "npz": lambda a, m: (lambda f: (np.savez(f, a), f.getvalue())[1])(io.BytesIO()),
    "object dtype": lambda a, m: npy(a, descr="|O"),
    "code as header": lambda a, m: raw_header(CODE.format(str(m))),
    "code as shape": lambda a, m: raw_header(
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({CODE.format(str(m))},)}}"
    ),
    "code as dtype": lambda a, m: npy(a, descr=CODE.format(str(m))),
    "open bracket": lambda a, m: raw_header("{'descr': '<f4', ("),
    "many brackets": lambda a, m: raw_header("(" * 9000),
    "many signs": lambda a, m: raw_header("-" * 9000 + "1"),
    "huge header": lambda a, m: raw_header("(" * 200_000, (2, 0)),
    "nul header": lambda a, m: raw_header("\0" * 64),
    "indented header": lambda a, m: raw_header(" {\n  'descr'"),
    "unicode header": lambda a, m: raw_header("\xff\xfe", (3, 0)),
    "unknown version": lambda a, m: raw_header("{}", (9, 0)),
    "empty": lambda a, m: b"",
    "magic only": lambda a, m: b"\x93NUMPY",
    "no data": lambda a, m: npy(a)[: -a.nbytes],
    "one byte less": lambda a, m: npy(a)[:-1],
    "one row less": lambda a, m: npy(a[:-1]),
    "one row more": lambda a, m: npy(np.concatenate([a, a[:1]])),
    "no rows": lambda a, m: npy(a[:0]),
    "scalar": lambda a, m: npy(np.zeros((), a.dtype)),
    "more dimensions": lambda a, m: npy(a[..., None]),
    "one dimension": lambda a, m: npy(a.reshape(-1)),
    "float64": lambda a, m: npy(a.astype(np.float64)),
    "other byte order": lambda a, m: npy(a.astype(">f4")),
    "int32": lambda a, m: npy(a.view(np.int32)),
    "void": lambda a, m: npy(a, descr="|V4"),
    "records": lambda a, m: npy(a, descr=[("a", "<f4")]),
    "dtype of no bytes": lambda a, m: npy(a, descr="|V0"),
    "no dtype": lambda a, m: npy(a, descr="<z9"),
    "number as dtype": lambda a, m: npy(a, descr=7),
    "shape below zero": lambda a, m: npy(a, shape=(-1, *a.shape[1:])),
    "huge shape": lambda a, m: npy(a, shape=(2**62, *a.shape[1:])),
    "larger than numbers": lambda a, m: npy(a, shape=(10**30, *a.shape[1:])),
    "shape of a bool": lambda a, m: npy(a, shape=(True, *a.shape[1:])),
    "shape of text": lambda a, m: npy(a, shape="abc"),
    "shape of a float": lambda a, m: npy(a, shape=(3.0, *a.shape[1:])),
    "keys missing": lambda a, m: raw_header("{'descr': '<f4'}"),
    "keys of numbers": lambda a, m: raw_header("{1: 2, 'descr': 3}"),
    "a list": lambda a, m: raw_header("[1, 2]"),
}


@pytest.mark.parametrize("name", ["params.resid_lambdas", "waiting0.head"])
@pytest.mark.parametrize("kind", ARRAYS)
def test_forged_arrays(base, main, tmp_path, kind, name):
    """No array but the right one is taken, whatever its checksum; no code in it is run."""
    run = interrupted(base, tmp_path, 3)
    checkpoint = run / "checkpoints/3"
    file = next(file for file in meta_of(checkpoint)["files"] if file.startswith(name + "."))
    array = np.load(checkpoint / file)
    replace_array(checkpoint, file, ARRAYS[kind](array, tmp_path / "marker"))
    mode = ("--resume", "--sample")[kind == "pickle in npy" and name.startswith("params")]
    status, _, err = main(mode, run)
    assert status == 2 and str(checkpoint) in err


def forge(change):
    """A case of test_forged_places: `change` changes the meta.json of step 3."""

    def case(base, folder):
        run = interrupted(base, folder, 3)
        meta = meta_of(run / "checkpoints/3")
        change(meta, sorted(meta["files"]))
        write_meta(run / "checkpoints/3", meta)
        return run

    return case


def renamed(base, folder):
    """The arrays of step 2 under the name of step 3."""
    run = interrupted(base, folder, 2)
    (run / "checkpoints/2").rename(run / "checkpoints/3")
    write_meta(run / "checkpoints/3", meta_of(run / "checkpoints/3") | {"step": 3})
    return run


def rename_file(meta, names, new):
    meta["files"][new] = meta["files"].pop(names[0])


PLACES = {
    "renamed": renamed,
    "up": forge(lambda m, n: rename_file(m, n, f"../3/{n[0]}")),
    "absolute": forge(lambda m, n: rename_file(m, n, "/etc/passwd")),
    "dots": forge(lambda m, n: rename_file(m, n, "..")),
    "no name": forge(lambda m, n: rename_file(m, n, "")),
    "nul": forge(lambda m, n: rename_file(m, n, f"{n[0]}\0")),
    "no files": forge(lambda m, n: m.update(files={})),
    "less files": forge(lambda m, n: m["files"].pop(n[5])),
    "rows below zero": forge(lambda m, n: m["files"][n[0]].update(first=-1)),
    "rows later": forge(lambda m, n: m["files"][n[0]].update(first=1)),
    "rows of text": forge(lambda m, n: m["files"][n[0]].update(first="0")),
    "rows twice": forge(lambda m, n: m["files"].update({f"{n[0][:-5]}7.npy": m["files"][n[0]]})),
    "bytes nan": forge(lambda m, n: m["files"][n[0]].update(bytes=float("nan"))),
    "bytes inf": forge(lambda m, n: m["files"][n[0]].update(bytes=float("inf"))),
    "cursor before": forge(lambda m, n: m.update(cursor=m["cursor"] - 1)),
    "cursor zero": forge(lambda m, n: m.update(cursor=0)),
    "cursor at the end": forge(lambda m, n: m.update(cursor=3200)),
    "cursor beyond": forge(lambda m, n: m.update(cursor=10**30)),
    "cursor a bool": forge(lambda m, n: m.update(cursor=True)),
    "step of another": forge(lambda m, n: m.update(step=2)),
    "no devices": forge(lambda m, n: m.update(devices=0)),
    "three devices": forge(lambda m, n: m.update(devices=3)),
    "eight devices": forge(lambda m, n: m.update(devices=8)),
    "huge devices": forge(lambda m, n: m.update(devices=10**30)),
    "time nan": forge(lambda m, n: m.update(train_time_ms=float("nan"))),
    "time inf": forge(lambda m, n: m.update(train_time_ms=float("inf"))),
    "time below zero": forge(lambda m, n: m.update(train_time_ms=-1.0)),
    "validated text": forge(lambda m, n: m.update(validated="no")),
    "logs list": forge(lambda m, n: m.update(logs=[])),
    "logs below zero": forge(lambda m, n: m["logs"].update({"log.txt": -5})),
    "logs text": forge(lambda m, n: m["logs"].update({"log.txt": "5"})),
    "logs huge": forge(lambda m, n: m["logs"].update({"log.txt": 10**30})),
    "no shards": forge(lambda m, n: m.update(data={})),
    "other shards": forge(lambda m, n: m["data"].popitem()),
    "another vocabulary": forge(lambda m, n: m["config"].update(real_tokens=96, bos=95)),
    "fewer steps": forge(lambda m, n: m["config"].update(steps=2)),
    "finished": forge(lambda m, n: m["config"].update(steps=3)),
}


@pytest.mark.parametrize("kind", PLACES)
def test_forged_places(base, main, tmp_path, kind):
    """A checkpoint that says it is of another place, or that its rows are, is not resumed from."""
    run = PLACES[kind](base, tmp_path)
    before = {path: path.read_bytes() for path in run.glob("*.*")}
    status, _, err = main("--resume", run)
    assert status == 2, (status, err)
    if "rows" not in kind and "files" not in kind and "devices" not in kind:  # seen when loaded
        assert before == {path: path.read_bytes() for path in run.glob("*.*")}


# ------------------------------------------------------------------------------------------------
# Folders of runs
# ------------------------------------------------------------------------------------------------

NAMES = [
    "007",
    "4",
    "2",
    "-3",
    "+5",
    "99999999999",
    "999999999999",
    "99999999999999",
    "0",
    "4.0",
    " 5",
    "٣",
    ".4",
    ".3",
    ".x",
    "../run.json.tmp",
]


@pytest.mark.parametrize("case", range(FOLDERS))
def test_folders_of_runs(base, main, tmp_path, case):
    """What is missing is made anew; what cannot be is refused; the checkpoint is what counts."""
    rng = np.random.default_rng([4, case])
    run = interrupted(base, tmp_path, 3)
    what, logs = [], True
    for _ in range(rng.integers(1, 4)):
        kind = rng.choice(["file", "name"])
        if kind == "file":
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
@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/3", "."])
def test_folders_that_are_none(base, main, tmp_path, kind, name):
    run = interrupted(base, tmp_path, 3)
    shutil.rmtree(run / name)
    REPLACEMENTS[kind](run / name)
    assert main("--resume", run)[0] == 2
    assert main("--sample", run)[0] == 2


# ------------------------------------------------------------------------------------------------
# Merges
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(MERGES))
def test_merges(base, main, tmp_path, case):
    """The run on them begins only if they make an encoding that can be used."""
    rng = np.random.default_rng([5, case])
    data = Path(shutil.copytree(base.data, tmp_path / "data"))
    merges, path, what = ["6162", "6364", "61626364", "ff00"], data / T.MERGES, case
    hostile = [merges[:1] * 2, ["61"], [""], ["zz"], ["6"], "6162", {"6162": 1}, None, 5]
    if case < len(hostile):
        path.write_text(json.dumps(hostile[case]))
    elif rng.random() < 0.5:
        what = change_json(rng, merges)[1]
        text = json.dumps(merges).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
        path.write_text(text)
    else:
        path.write_text(json.dumps(merges))
        what = damage(rng, path)
    out = tmp_path / "logs"
    argv = ["--data", data, "--out", out, "--set", "encoding=bpe"]
    status, _, err = main("fuzz", *argv)
    if status == 2:
        assert str(path) in err and not out.exists()
    else:
        merges = json.loads(path.read_text())
        assert isinstance(merges, list) and len({*merges}) == len(merges), what
        encoding = T.text_encoding("bpe", data)
        assert encoding.n_vocab == 257 + len(merges)
        assert encoding.decode(encoding.encode_ordinary("abcd")) == "abcd"


# ------------------------------------------------------------------------------------------------
# Command lines
# ------------------------------------------------------------------------------------------------

TEXTS = [
    *("", "0", "1", "-1", "2", "3", "7", "1e3", "0x10", "1_000", " 4 ", "٤", "nan", "inf", "-inf"),
    *("1e308", "1e-320", "1e400", "9" * 19, "9" * 400, "9" * 5000, "-" + "9" * 30, "2147483647"),
    *("4294967295", "4294967296", "1000001", "99999", "65536", "True", "None", "x"),
    *("()", "(1,)", "(1,2)", "[1,2]", "(1,2,3)", "(0.5,0.9)", "(-1,5)", "((1,2),(3,4))", "{1:2}"),
    *("(True,False)", "('a','b')", "(1j,2)", "(nan,1)", "(1e400,1)", f"({'9' * 400},1)", "(,)"),
    *("(" * 5000, "[" * 90 + "]" * 90, "-" * 50_000 + "1", "1+" * 20_000 + "1", "((((", "{" * 99),
    *("__import__('os').system('touch ../marker')", "open('../marker','w')", "{}.__class__", "*"),
    *("(0,)", "(0,0)", "(1,0)", "(2,1)", "(9999999999,9999999999)", "range(9)", "lambda: 1"),
    *("\0", "\ud800", "é" * 50, "x\ny", "\x85\u2028", "%s%d%n", "$HOME", "`id`", "../..", "\t"),
    *("gpt2", "bytes", "bpe", "xla", "cudnn", "auto", "window", "float32", "bfloat16", "float64"),
]
FIELDS = [field.name for field in T.dataclasses.fields(T.Config)]
PARTS = [field.name for field in T.dataclasses.fields(T.Stage)]
KEYS = [
    *(FIELDS * 4),
    *(f"stages.0.{part}" for part in PARTS * 2),
    *("", ".", "stages", "stages.", "stages.0", "stages.-1.share", "stages.0.share.x", "steps.0"),
    *("__class__", "stages.0.__dict__", "stages.٠.share", "--set", "Steps", "steps ", "é", "\0"),
    *("stages.00.share", "stages.9999999999.share", "rows", "dtype", "stages.0.rows", "validate"),
]


def random_command(rng, base, run) -> list[str]:
    """A command line of pieces that are right or wrong."""

    def one(items):
        return str(items[int(rng.integers(len(items)))])

    paths = ["", "\0", "x\0y", "x" * 5000, "nothing", "/dev/null", "/dev/null/x", "/proc/self/mem"]
    paths += [str(base.data), str(base.data / VAL), str(run), "\ud800", "a\nb", ".", "-", "é"]
    argv = [one(["fuzz", "tiny", "speedrun", "fuzz"])] if rng.random() < 0.9 else []
    for _ in range(rng.integers(1, 5)):
        kind = one(["set"] * 8 + ["path"] * 3 + ["seed", "flag", "hosts", "odd", "target"])
        if kind == "set":
            item = f"{one(KEYS)}={one(TEXTS)}"
            argv += [f"--set={item}"] if rng.random() < 0.7 else ["--set", item]
        elif kind == "path":
            option = one(["--data", "--out", "--cache", "--dump", "--resume", "--sample"])
            argv += [f"{option}={one(paths)}"] if rng.random() < 0.7 else [option, one(paths)]
        elif kind == "seed":
            argv += [f"--seed={one(TEXTS)}"]
        elif kind == "flag":
            argv += [one(["--profile", "--show", "--help", "-h", "--s", "--pro", "--", "-", "-x"])]
        elif kind == "hosts":
            argv += [f"{one(['--coordinator', '--processes', '--process-id'])}={one(TEXTS)}"]
        elif kind == "target":
            argv += [f"--preflight={one(['', 'v6e', 'v6e-8x', 'h100', *TEXTS])}"]
        else:
            argv += [one([*TEXTS, "--prompt=x", "--set", "--sets=1", "@x", "--no-show", "--set=="])]
    return argv


@pytest.mark.parametrize("show", [True, False])
@pytest.mark.parametrize("case", range(COMMANDS))
def test_command_lines(base, main, tmp_path, case, show):
    rng = np.random.default_rng([6, case, show])
    argv = random_command(rng, base, base.dir)
    argv += ["--show"] if show else [f"--data={base.data}", f"--out={tmp_path}/logs"]
    status, out, _ = main(*argv)
    if status == 0:
        done = "programs: ", "usage: ", "target "
        assert any(line.startswith(done) for line in out.splitlines()), argv


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("key", ["steps", "momentum"])
def test_settings(main, key, text):
    status, out, _ = main("fuzz", f"--set={key}={text}", "--show")
    assert status == 2 or any(line.startswith(f"{key} = ") for line in out.splitlines())


def test_there_are_enough_cases():
    """Of the random ones alone; each is a test of its own."""
    assert SHARDS + DAMAGED + FORGED + FOLDERS + MERGES + 2 * COMMANDS >= 500


def test_the_interrupted_run_ends_as_it_should(base, main, tmp_path):
    """So that the cases above are not refused for another reason."""
    for step in (1, 2, 3):
        run = interrupted(base, tmp_path / str(step), step)
        assert main("--resume", run)[0] == 0
        assert_same_end(base, run)
