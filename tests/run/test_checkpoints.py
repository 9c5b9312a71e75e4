"""Checkpoints without a run: complete or hidden, and readable on any number of devices."""

import contextlib
import os
import shutil
import tracemalloc
from dataclasses import asdict, replace

import jax
import numpy as np
import programs
import pytest
from programs import lay, mesh_of
from training import arrays, assert_same_arrays

import train_gpt as T

CFG = replace(programs.CFG, compute_dtype="bfloat16")  # the n-gram table is bfloat16, too
LOADER = T.LoaderState(1234, (5, 0, 77, 3, 100, 1, 2, 4))
META = {"train_time_ms": 1.5, "logs": {"log.txt": 7}, "data": {}, "source_sha256": "0"}
META |= {"config": asdict(CFG), "dropped_ngrams": 5}
META |= {"cursor": LOADER.cursor, "offsets": LOADER.offsets}


def quiet(line):
    """Replaces print."""


def numbers(seed: int = 0, cfg=CFG) -> dict[str, np.ndarray]:
    """Return kind.name -> array for a training state of random numbers."""
    rng = np.random.default_rng(seed)
    leaves = T.map_state(cfg, lambda shape, dtype, row: (shape, dtype))
    return {
        f"{kind}.{name}": rng.standard_normal(shape).astype(dtype)
        for kind, names in leaves.items()
        for name, (shape, dtype) in names.items()
    }


def stored(found: dict) -> dict:
    """Return the arrays as in a checkpoint, with the bits of bfloat16 as integers."""
    short = {name: x for name, x in found.items() if x.dtype.itemsize == 2}
    assert [*short] == ["params.ngram_table"]
    return found | {name: x.view(np.uint16) for name, x in short.items()}


def state_of(found: dict, mesh, cfg=CFG):
    """Return a training state with these numbers on the devices of `mesh`, most with padding."""
    state = T.map_state(cfg, lambda shape, dtype, row: None)
    return {
        kind: lay(cfg, {name: found[f"{kind}.{name}"] for name in names}, mesh)
        for kind, names in state.items()
    }


def write(folder, step: int, found: dict, devices: int = 8):
    """Write a checkpoint as one process with this number of devices."""
    shards = T.own_shards(CFG, state_of(found, mesh_of(devices)))
    T.write_checkpoint(folder, shards, META | {"step": step})


@contextlib.contextmanager
def as_process(number: int, numbers=None):
    """Inside, this is one of two processes, and from_processes returns `numbers`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: number)
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(T, "from_processes", lambda own: numbers or [own, own])
        yield


def write_as_two(folder, step: int, found: dict):
    """Write a checkpoint as two processes, each with the shards of four devices."""
    own, seen = ([], []), {}
    for name, rows in T.own_shards(CFG, state_of(found, mesh_of(8))):
        kind = name.rpartition(".")[0].rpartition(".")[0]
        seen[kind] = seen.get(kind, 0) + 1
        own[seen[kind] > 4].append((name, rows))
    for process in (1, 0):
        with as_process(process):
            T.write_checkpoint(folder, iter(own[process]), META | {"step": step})


@pytest.fixture
def folder(tmp_path) -> T.Path:
    """RUN_DIR/checkpoints with step 6, written by one process, and step 8, written by two."""
    write(tmp_path / "checkpoints", 6, numbers(6))
    write_as_two(tmp_path / "checkpoints", 8, numbers(8))
    return tmp_path / "checkpoints"


def test_names_and_rows_of_files(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["6", "8"]
    want, each = stored(numbers()), {}
    for path in (folder / "6").glob("*.npy"):
        kind, name, first, _ = path.name.split(".")
        rows = np.load(path)
        each.setdefault(f"{kind}.{name}", []).append((int(first), len(rows)))
        assert (rows.shape[1:], rows.dtype) == (
            want[f"{kind}.{name}"].shape[1:],
            want[f"{kind}.{name}"].dtype,
        )
    assert each.keys() == want.keys()
    # 104 rows on 8 devices are 13 each. The last device has 10, and padding.
    assert sorted(each["first.embed"]) == [*((13 * i, 13) for i in range(7)), (91, 10)]
    # Each device has 66 of 522 rows, the last one 60. Their second moments are sharded alike.
    assert sorted(each["params.ngram_table"]) == [*((66 * i, 66) for i in range(7)), (462, 60)]
    assert sorted(each["second.ngram_table"]) == sorted(each["params.ngram_table"])
    assert sorted(each["slow.mlp_bank"]) == [(2 * i, 2) for i in range(5)]  # 6 matrices are padding
    assert each["params.smear_gate"] == [(0, 1)]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("step", [6, 8])
def test_a_checkpoint_can_be_read_on_any_number_of_devices(folder, tmp_path, step, devices):
    state = T.load_state(mesh_of(devices), T.find_checkpoint(folder / str(step)))
    want = state_of(numbers(step), mesh_of(devices))
    assert jax.tree.structure(state) == jax.tree.structure(want)
    for got, same in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        assert (got.dtype, got.sharding) == (same.dtype, same.sharding)
        np.testing.assert_array_equal(got, same)  # padding is zero
    T.write_checkpoint(tmp_path / "again", T.own_shards(CFG, state), META | {"step": step})
    assert_same_arrays(arrays(tmp_path / f"again/{step}"), stored(numbers(step)))


@pytest.mark.slow
def test_a_host_copies_the_ngram_table_in_parts(tmp_path, monkeypatch):
    """The rows of one device at a time, since the record's table takes 65 GB."""

    @contextlib.contextmanager
    def peak_below(size: int):
        """Fail if Python and NumPy allocate more bytes (arrays of JAX are not counted)."""
        tracemalloc.start()
        yield
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < size, f"{peak:,} bytes on the host"

    cfg = replace(CFG, ngram_rows=2**19 + 6)
    found = numbers(cfg=cfg)
    state = state_of(found, mesh_of(4), cfg)
    most = found["params.ngram_table"].nbytes * 3 // 4  # for four devices
    with peak_below(most):
        meta = META | {"step": 2, "config": asdict(cfg)}
        T.write_checkpoint(tmp_path / "checkpoints", T.own_shards(cfg, state), meta)
    saved = T.find_checkpoint(tmp_path)
    put = jax.device_put  # on CPUs it shares memory with NumPy
    monkeypatch.setattr(jax, "device_put", lambda *args: jax.numpy.copy(put(*args)))
    with peak_below(most):
        again = T.load_state(mesh_of(4), saved)
    for got, same in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, same)


# ---- Killed processes and full disks -----------------------------------------------------------


class Killed(BaseException):
    """Like SIGKILL: no handler catches it."""


CALLS = [(np, "save"), (T.Path, "write_text"), (os, "rename"), (shutil, "rmtree")]


def kill_at(patch, number: int, amid: bool) -> list:
    """End the process before or during the `number`-th call that changes the disk. Only the first
    three calls of a function count."""
    seen = []

    def mortal(real, *args, **kwargs):
        if seen.count(real) < 3:
            seen.append(real)
            if len(seen) == number + 1:
                if amid and real is shutil.rmtree:  # some files are deleted
                    next(T.Path(args[0]).iterdir()).unlink()
                elif amid:
                    real(*args, **kwargs)
                raise Killed
        return real(*args, **kwargs)

    for owner, name in CALLS:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, real=real, **kwargs: mortal(real, *args, **kwargs))
    return seen


@pytest.mark.parametrize("amid", [False, True])
def test_a_killed_process_leaves_only_complete_checkpoints(tmp_path, amid):
    """While it writes a third checkpoint, which replaces the first."""
    for step in (2, 4):
        write(tmp_path / "whole", step, numbers(step), devices=1)
    number, ended = 0, False
    while not ended:
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"{number}/checkpoints")
        with pytest.MonkeyPatch.context() as patch:
            calls = kill_at(patch, number, amid)
            try:
                write(folder, 6, numbers(6), devices=1)
                ended = True
            except Killed:
                number += 1
        steps = T.checkpoint_steps(folder)
        assert {4} <= {*steps} <= {2, 4, 6}
        for step in steps:
            assert T.find_checkpoint(folder / str(step), pytest.fail).step == step
            assert_same_arrays(arrays(folder / str(step)), stored(numbers(step)))
    assert steps == [4, 6] and number == len(calls) == 8


def test_all_processes_fail_if_one_cannot_write(tmp_path, monkeypatch):
    """The checkpoint stays hidden. The same holds if they do not share the folder."""
    shards = [("params.x.0.npy", np.zeros(3))]
    for process in (0, 1):
        with as_process(process, [0, 1]), pytest.raises(OSError, match="another process could not"):
            T.write_checkpoint(tmp_path, iter(shards), META | {"step": 3})
    with as_process(0, [0, 0]), pytest.raises(FileNotFoundError, match=r"\.5/1\.json"):
        T.write_checkpoint(tmp_path, iter(shards), META | {"step": 5})
    monkeypatch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        T.write_checkpoint(tmp_path, iter(shards), META | {"step": 7})
    assert T.checkpoint_steps(tmp_path) == []


def test_the_newest_two_are_kept_and_a_damaged_one_is_replaced(folder):
    write(folder, 10, numbers(10))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "8"]
    (folder / "10/meta.json").unlink()
    write(folder, 9, numbers(9))  # as a run that resumed from 8
    assert sorted(path.name for path in folder.iterdir()) == ["10", "8", "9"]
    write(folder, 10, numbers(10))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "9"]
    assert T.find_checkpoint(folder, pytest.fail).step == 10


# ---- Damaged checkpoints -----------------------------------------------------------------------

DAMAGE = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"}"),
    "overwritten": lambda file: file.write_bytes(b"\0" * 8 + file.read_bytes()[8:]),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["params.embed.0.npy", "meta.json"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_or_refused_by_name(folder, damage, name):
    DAMAGE[damage](folder / "8" / name)
    said = []
    assert T.find_checkpoint(folder.parent, said.append).step == 6
    (line,) = said
    assert line.startswith(f"warning: {folder / '8'} cannot be used (") and "\n" not in line
    with pytest.raises(T.UserError, match="no complete checkpoint in .*/8: "):
        T.find_checkpoint(folder / "8", quiet)


def test_a_run_may_be_in_a_folder_with_the_name_checkpoints(folder, tmp_path):
    run_dir = tmp_path / "checkpoints/run"
    os.rename(folder, tmp_path / "moved")
    os.renames(tmp_path / "moved", run_dir / "checkpoints")
    assert T.find_checkpoint(run_dir, pytest.fail).folder == run_dir / "checkpoints/8"


def test_the_newest_complete_checkpoint_is_used_unless_another_is_named(folder):
    (folder / ".99").mkdir()  # left by a killed process
    (folder / "10").mkdir()
    (folder / "12").write_text("not a folder")
    said = []
    assert T.find_checkpoint(folder.parent, said.append).folder == folder / "8"
    assert [line.split()[1] for line in said] == [str(folder / str(n)) for n in (12, 10)]
    assert T.find_checkpoint(folder / "6", pytest.fail).step == 6
    assert T.find_checkpoint(folder, quiet).folder == folder / "8"  # RUN_DIR/checkpoints
    with pytest.raises(T.UserError, match=".*/7 does not exist: pass a run directory"):
        T.find_checkpoint(folder / "7", pytest.fail)
