"""Checkpoints on the disk, without a run: whole or not to be seen, read by any devices."""

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

CFG = replace(programs.CFG, compute_dtype="bfloat16")  # as the n-gram table then is
LOADER = T.LoaderState(1234, (5, 0, 77, 3, 100, 1, 2, 4))
META = {"train_time_ms": 1.5, "logs": {"log.txt": 7}, "data": {}, "source_sha256": "0"}
META |= {"config": asdict(CFG), "dropped_ngrams": 5}
META |= {"cursor": LOADER.cursor, "offsets": LOADER.offsets}


def quiet(line):
    """In place of print."""


def numbers(seed: int = 0, cfg=CFG) -> dict[str, np.ndarray]:
    """kind.name -> an array of a training state, all of it different numbers."""
    rng = np.random.default_rng(seed)
    leaves = T.map_state(cfg, lambda shape, dtype, row: (shape, dtype))
    return {
        f"{kind}.{name}": rng.standard_normal(shape).astype(dtype)
        for kind, names in leaves.items()
        for name, (shape, dtype) in names.items()
    }


def stored(found: dict) -> dict:
    """The same as it lies in a checkpoint, which has the bits of bfloat16 as numbers."""
    short = {name: x for name, x in found.items() if x.dtype.itemsize == 2}
    assert [*short] == ["params.ngram_table"]
    return found | {name: x.view(np.uint16) for name, x in short.items()}


def state_of(found: dict, mesh, cfg=CFG):
    """These numbers as a training state on the devices of `mesh`: most need padding there."""
    state = T.map_state(cfg, lambda shape, dtype, row: None)
    return {
        kind: lay(cfg, {name: found[f"{kind}.{name}"] for name in names}, mesh)
        for kind, names in state.items()
    }


def write(folder, step: int, found: dict, devices: int = 8):
    """A checkpoint of one process with so many devices."""
    shards = T.own_shards(CFG, state_of(found, mesh_of(devices)))
    T.write_checkpoint(folder, shards, META | {"step": step})


@contextlib.contextmanager
def as_process(number: int, numbers=None):
    """Inside, this is one of two processes; what all say to each other is `numbers`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: number)
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(T, "from_all", lambda own: numbers or [own, own])
        yield


def write_as_two(folder, step: int, found: dict):
    """A checkpoint of two processes: of what is sharded, each has the rows of four devices."""
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
    """RUN_DIR/checkpoints with the steps 6 (of one process) and 8 (of two)."""
    write(tmp_path / "checkpoints", 6, numbers(6))
    write_as_two(tmp_path / "checkpoints", 8, numbers(8))
    return tmp_path / "checkpoints"


def test_files_are_named_by_kind_parameter_and_first_row_and_hold_no_padding(folder):
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
    # 104 rows on 8 devices are 13 each; of the last device's, 10 are of the table
    assert sorted(each["first.embed"]) == [*((13 * i, 13) for i in range(7)), (91, 10)]
    # of 522 rows each device has 66, the last one 60; their second moments lie as they do
    assert sorted(each["params.ngram_table"]) == [*((66 * i, 66) for i in range(7)), (462, 60)]
    assert sorted(each["second.ngram_table"]) == sorted(each["params.ngram_table"])
    assert sorted(each["slow.mlp_bank"]) == [(2 * i, 2) for i in range(5)]  # 6 matrices are padding
    assert each["params.smear_gate"] == [(0, 1)]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("step", [6, 8])
def test_any_number_of_devices_reads_what_any_number_has_written(folder, tmp_path, step, devices):
    state = T.load_state(mesh_of(devices), T.find_checkpoint(folder / str(step)))
    want = state_of(numbers(step), mesh_of(devices))
    assert jax.tree.structure(state) == jax.tree.structure(want)
    for got, same in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        assert (got.dtype, got.sharding) == (same.dtype, same.sharding)
        np.testing.assert_array_equal(got, same)  # zeros where there is padding
    T.write_checkpoint(tmp_path / "again", T.own_shards(CFG, state), META | {"step": step})
    assert_same_arrays(arrays(tmp_path / f"again/{step}"), stored(numbers(step)))


@pytest.mark.slow
def test_no_host_ever_has_the_whole_ngram_table(tmp_path, monkeypatch):
    """But the rows of one device at a time: the record's table takes 65 GB."""

    @contextlib.contextmanager
    def peak_below(size: int):
        """Inside, Python and numpy never take more bytes (jax's arrays are on the devices)."""
        tracemalloc.start()
        yield
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < size, f"{peak:,} bytes on the host"

    cfg = replace(CFG, ngram_rows=2**19 + 6)
    found = numbers(cfg=cfg)
    state = state_of(found, mesh_of(4), cfg)
    most = found["params.ngram_table"].nbytes * 3 // 4  # of four devices
    with peak_below(most):
        meta = META | {"step": 2, "config": asdict(cfg)}
        T.write_checkpoint(tmp_path / "checkpoints", T.own_shards(cfg, state), meta)
    saved = T.find_checkpoint(tmp_path)
    put = jax.device_put  # which gives a CPU numpy's own memory
    monkeypatch.setattr(jax, "device_put", lambda *args: jax.numpy.copy(put(*args)))
    with peak_below(most):
        again = T.load_state(mesh_of(4), saved)
    for got, same in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, same)


# ---- A checkpoint that can be seen is whole ----------------------------------------------------


class Killed(BaseException):
    """As by SIGKILL: nothing of the program runs after it."""


CALLS = [(np, "save"), (T.Path, "write_text"), (os, "rename"), (shutil, "rmtree")]


def kill_at(patch, number: int, amid: bool) -> list:
    """The process ends in the `number`-th call that touches the disk: before it, or amid it. Only
    the first three arrays count, of many."""
    seen = []

    def mortal(real, *args, **kwargs):
        if seen.count(real) < 3:
            seen.append(real)
            if len(seen) == number + 1:
                if amid and real is shutil.rmtree:  # it loses some of its files
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
def test_wherever_a_process_is_killed_it_leaves_whole_checkpoints_only(tmp_path, amid):
    """While it writes the third, which takes the place of the first."""
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


def test_a_process_that_cannot_write_fails_on_all(tmp_path, monkeypatch):
    """And none of them makes the checkpoint visible; also where they do not share the folder."""
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


def test_only_the_newest_two_are_kept_and_a_damaged_one_is_replaced(folder):
    write(folder, 10, numbers(10))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "8"]
    (folder / "10/meta.json").unlink()
    write(folder, 9, numbers(9))  # of a run that went on from 8
    assert sorted(path.name for path in folder.iterdir()) == ["10", "8", "9"]
    write(folder, 10, numbers(10))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "9"]
    assert T.find_checkpoint(folder, pytest.fail).step == 10


# ---- A damaged one is passed over --------------------------------------------------------------

DAMAGE = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"}"),
    "overwritten": lambda file: file.write_bytes(b"\0" * 8 + file.read_bytes()[8:]),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["params.embed.0.npy", "meta.json"])
def test_damaged_checkpoint_is_passed_over_with_a_warning_or_refused_by_name(folder, damage, name):
    DAMAGE[damage](folder / "8" / name)
    said = []
    assert T.find_checkpoint(folder.parent, said.append).step == 6
    (line,) = said
    assert line.startswith(f"warning: {folder / '8'} cannot be used (") and "\n" not in line
    with pytest.raises(T.UserError, match="no complete checkpoint in .*/8: "):
        T.find_checkpoint(folder / "8", quiet)


def test_a_run_may_lie_in_a_folder_that_is_called_checkpoints(folder, tmp_path):
    run_dir = tmp_path / "checkpoints/run"
    os.rename(folder, tmp_path / "moved")
    os.renames(tmp_path / "moved", run_dir / "checkpoints")
    assert T.find_checkpoint(run_dir, pytest.fail).folder == run_dir / "checkpoints/8"


def test_the_newest_whole_one_is_taken_unless_another_is_named(folder):
    (folder / ".99").mkdir()  # what a killed process may leave
    (folder / "10").mkdir()
    (folder / "12").write_text("not a folder")
    said = []
    assert T.find_checkpoint(folder.parent, said.append).folder == folder / "8"
    assert [line.split()[1] for line in said] == [str(folder / str(n)) for n in (12, 10)]
    assert T.find_checkpoint(folder / "6", pytest.fail).step == 6
    assert T.find_checkpoint(folder, quiet).folder == folder / "8"  # RUN_DIR/checkpoints
    with pytest.raises(T.UserError, match="there is no .*/7: name the folder of a run"):
        T.find_checkpoint(folder / "7", pytest.fail)
