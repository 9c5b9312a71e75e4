"""Checkpoints on the disk, without a run: whole or not to be seen, checked, for any devices."""

import contextlib
import json
import os
import shutil
import threading
from dataclasses import asdict, replace
from functools import partial

import jax
import numpy as np
import programs
import pytest
from programs import lay, mesh_of
from training import arrays, assert_same_arrays

import train_gpt as T

CFG = replace(programs.CFG, compute_dtype="bfloat16")  # as the n-gram table then is
PLACE = T.Place(1234, (5, 0, 77, 3, 100, 1, 2, 4))
META = {"train_time_ms": 1.5, "logs": {"log.txt": 7}, "data": {}, "source_sha256": "0"}
META |= {"config": asdict(CFG), "place": PLACE}


def quiet(line):
    """In place of print."""


def numbers(seed: int = 0) -> dict[str, np.ndarray]:
    """kind.name -> an array of a training state, all of it different numbers."""
    rng = np.random.default_rng(seed)
    leaves = T.map_state(CFG, lambda shape, dtype, row: (shape, dtype))
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


def state_of(found: dict, mesh):
    """These numbers as a training state on the devices of `mesh`: most need padding there."""
    state = T.map_state(CFG, lambda shape, dtype, row: None)
    return {
        kind: lay(CFG, {name: found[f"{kind}.{name}"] for name in names}, mesh)
        for kind, names in state.items()
    }


def write(folder, step: int, found: dict, devices: int = 8, **options):
    """A checkpoint of one process with so many devices."""
    rows = T.own_rows(CFG, state_of(found, mesh_of(devices)))
    T.write_checkpoint(folder, rows, META | {"step": step}, **options)


@contextlib.contextmanager
def as_process(number: int, of: int = 2):
    """Inside, this is one of several processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: number)
        patch.setattr(jax, "process_count", lambda: of)
        yield


def write_as_two(folder, step: int, found: dict, devices: int = 8):
    """A checkpoint of two processes: of what is cut, each has the rows of half of the devices."""
    rows = T.own_rows(CFG, state_of(found, mesh_of(devices)))
    first, second = {}, {}
    for name, (_, pieces) in rows.items():
        half = devices // 2 if len(pieces) > 1 else 1
        first[name] = 0, pieces[:half]
        if pieces[half:]:
            second[name] = sum(map(len, pieces[:half])), pieces[half:]
    for process, own in ((1, second), (0, first)):
        with as_process(process):
            T.write_checkpoint(folder, own, META | {"step": step})


@pytest.fixture
def folder(tmp_path) -> T.Path:
    """RUN_DIR/checkpoints with the steps 6 (of one process) and 8 (of two)."""
    write(tmp_path / "checkpoints", 6, numbers(6))
    write_as_two(tmp_path / "checkpoints", 8, numbers(8))
    return tmp_path / "checkpoints"


# ------------------------------------------------------------------------------------------------
# What lies where
# ------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_folder_with_facts_and_one_file_of_each_process(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["6", "8"]
    assert sorted(path.name for path in (folder / "6").iterdir()) == ["0.npz", "meta.json"]
    assert sorted(path.name for path in (folder / "8").iterdir()) == ["0.npz", "1.npz", "meta.json"]
    meta = json.loads((folder / "8/meta.json").read_text())["checkpoint"]
    assert meta == json.loads(json.dumps(META)) | {"step": 8, "processes": 2}


def test_members_are_named_by_kind_parameter_and_first_row_and_hold_no_padding(folder):
    table, want = T.param_table(CFG), stored(numbers())
    with np.load(folder / "6/0.npz") as file:
        assert {*file.files} == {f"{name}.0" for name in want}
        for name, x in want.items():
            assert (file[f"{name}.0"].shape, file[f"{name}.0"].dtype) == (x.shape, x.dtype)
        assert {name.split(".")[0] for name in file.files} == {
            *("params", "first", "second", "fast", "slow", "equaliser"), *T.TAILS
        }  # fmt: skip
    with np.load(folder / "8/0.npz") as first, np.load(folder / "8/1.npz") as second:
        # 104 rows on 8 devices are 13 each; of the last device's, 10 are of the table
        assert first["params.embed.0"].shape == (52, 32)
        assert second["params.embed.52"].shape == (49, 32)
        # of 522 rows each device has 66, the last one 60; their second moments lie as they do
        assert second["params.ngram_table.264"].shape == (258, 32)
        assert second["second.ngram_table.264"].shape == (258,)
        # of 16 matrices, of which 6 are padding, all of the second half's are with one device
        assert len(first["slow.mlp_bank.0"]) == 8 and len(second["slow.mlp_bank.8"]) == 2
        assert "params.smear_gate.0" in first.files
        assert {name.split(".")[1] for name in second.files} == {
            name for name, row in table.items() if row.sharded
        }


def test_what_is_read_says_all_that_was_written(folder):
    saved = T.read_checkpoint(folder / "8")
    want = {key: value for key, value in META.items() if key != "config"}
    assert saved == T.Saved(folder=folder / "8", cfg=CFG, step=8, processes=2, **want)
    assert type(saved.place) is T.Place
    for step in (6, 8):
        assert_same_arrays(arrays(folder / str(step)), stored(numbers(step)))


# ------------------------------------------------------------------------------------------------
# Any number of devices and processes
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("step", [6, 8])
def test_any_number_of_devices_reads_what_any_number_has_written(folder, tmp_path, step, devices):
    state = T.load_state(mesh_of(devices), T.read_checkpoint(folder / str(step)))
    want = state_of(numbers(step), mesh_of(devices))
    assert jax.tree.structure(state) == jax.tree.structure(want)
    for got, same in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        assert (got.dtype, got.sharding) == (same.dtype, same.sharding)
        np.testing.assert_array_equal(got, same)  # zeros where there is padding
    T.write_checkpoint(tmp_path / "again", T.own_rows(CFG, state), META | {"step": step})
    assert_same_arrays(arrays(tmp_path / f"again/{step}"), stored(numbers(step)))


def test_a_part_of_the_state_can_be_read_alone(folder):
    state = T.load_state(mesh_of(1), T.read_checkpoint(folder / "8"), kinds=("params",))
    assert state.keys() == {"params"} and state["params"].keys() == T.param_table(CFG).keys()


def test_no_device_gets_more_than_its_part(folder, monkeypatch):
    """What is loaded is asked for in the parts of the devices, never as a whole."""
    asked, make = [], jax.make_array_from_callback

    def spy(shape, sharding, callback):
        def part(index):
            found = callback(index)
            asked.append((np.prod(shape), found.size / np.prod(shape)))
            return found

        return make(shape, sharding, part)

    monkeypatch.setattr(jax, "make_array_from_callback", spy)
    T.load_state(mesh_of(4), T.read_checkpoint(folder / "8"))
    large = [share for size, share in asked if size >= 101 * 32]
    assert len(large) > 4 * 3 * 4 and {*large} == {1 / 4}


def test_what_is_saved_is_a_copy_of_the_state():
    """The next step takes the memory of the state while the thread of the Saver still writes."""
    state, want = state_of(numbers(), mesh_of(2)), numbers()
    rows = T.own_rows(CFG, state)
    spoil = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 0 - 1, x), donate_argnums=0)
    jax.block_until_ready(spoil(state))
    got = {name: np.concatenate(pieces) for name, (_, pieces) in rows.items()}
    assert_same_arrays(got, want)


# ------------------------------------------------------------------------------------------------
# A checkpoint that can be seen is whole
# ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As by SIGKILL: nothing of the program runs after it."""


CALLS = [(os, "fsync"), (os, "replace"), (os, "rename"), (T.shutil, "rmtree"), (np, "savez")]


def kill_at(patch, number: int, after: bool):
    """The process ends in the `number`-th call that touches the disk: before it, or amid it."""
    calls = []

    def mortal(real, *args, **kwargs):
        calls.append(real)
        if len(calls) != number + 1:
            return real(*args, **kwargs)
        if after:  # a folder that is removed loses some of its files
            if real is shutil.rmtree:
                next(T.Path(args[0]).iterdir()).unlink()
            else:
                real(*args, **kwargs)
        raise Killed

    for owner, name in CALLS:
        patch.setattr(owner, name, partial(mortal, getattr(owner, name)))
    return calls


@pytest.mark.parametrize("after", [False, True])
def test_wherever_a_process_is_killed_it_leaves_whole_checkpoints_only(tmp_path, after):
    """While it writes the third, which takes the place of the first."""
    for step in (2, 4):
        write(tmp_path / "whole", step, numbers(step), devices=1)
    number, ended = 0, False
    while not ended:
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"{number}")
        with pytest.MonkeyPatch.context() as patch:
            calls = kill_at(patch, number, after)
            try:
                write(folder, 6, numbers(6), devices=1)
                ended = True
            except Killed:
                number += 1
        seen = T.checkpoint_steps(folder)
        assert {*seen} >= {4} and {*seen} <= {2, 4, 6}
        for step in seen:
            assert T.read_checkpoint(folder / str(step)).step == step
            assert_same_arrays(arrays(folder / str(step)), stored(numbers(step)))
    assert sorted(seen) == [4, 6] and number == len(calls) >= 8


def test_process_0_waits_for_the_rows_of_the_others(tmp_path, monkeypatch):
    """And gives up when they do not come, or when the run ends for another reason."""
    rows = T.own_rows(CFG, state_of(numbers(), mesh_of(2)))
    leaving = threading.Event()
    leaving.set()
    with as_process(0):
        with pytest.raises(OSError, match="no rows of process 1: does it see "):
            T.write_checkpoint(tmp_path, rows, META | {"step": 3}, leaving)
        monkeypatch.setattr(T, "PART_SECONDS", 0.1)
        with pytest.raises(OSError, match="no rows of process 1: does it see "):
            T.write_checkpoint(tmp_path, rows, META | {"step": 5}, threading.Event())
    assert T.checkpoint_steps(tmp_path) == []


@pytest.mark.parametrize("name", ["first.embed", "params.ngram_table"])
def test_a_state_that_is_not_finite_is_not_saved(folder, name):
    found = numbers()
    found[name][3, 4] = np.nan
    with pytest.raises(OSError, match=rf"{name}.* is not finite"):
        write(folder, 9, found)
    assert sorted(T.checkpoint_steps(folder)) == [6, 8]


def test_only_the_newest_two_are_kept(folder):
    write(folder, 10, numbers(10))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "8"]


# ------------------------------------------------------------------------------------------------
# A damaged one is passed over
# ------------------------------------------------------------------------------------------------


def flip(file, at: int):
    """One bit of byte `at` other than it was."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "one bit": lambda file: flip(file, file.stat().st_size // 2),
    "not text": lambda file: file.write_bytes(b"\xff\xfe"),
    "a list": lambda file: file.write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["0.npz", "1.npz", "meta.json"])
def test_damaged_checkpoint_is_passed_over_with_a_warning(folder, damage, name):
    DAMAGE[damage](folder / "8" / name)
    said = []
    assert T.find_checkpoint(folder.parent, said.append).step == 6
    (line,) = said
    assert line.startswith(f"warning: {folder / '8'} cannot be used (") and "\n" not in line
    shutil.rmtree(folder / "6")
    with pytest.raises(T.UserError, match="no checkpoint in .*: name the folder of a run"):
        T.find_checkpoint(folder.parent, quiet)


@pytest.mark.parametrize("name", ["0.npz", "meta.json"])
def test_no_flipped_bit_changes_a_state(folder, name):
    """It is found, or it is where nothing stands that is read (a date in the zip, a space)."""
    path, rng, found = folder / "6" / name, np.random.default_rng(0), 0
    whole, want = path.read_bytes(), T.read_checkpoint(folder / "6")
    for at in rng.integers(len(whole), size=60):
        flip(path, at)
        try:
            assert T.read_checkpoint(folder / "6") == want
            assert_same_arrays(arrays(folder / "6"), stored(numbers(6)))
        except AssertionError:
            raise
        except Exception:  # whatever find_checkpoint passes over
            found += 1
        path.write_bytes(whole)
    assert found >= 40


def test_find_checkpoint_takes_the_newest_whole_one(folder):
    (folder / ".99").mkdir()  # what a killed process may leave
    (folder / "10").mkdir()
    (folder / "12").write_text("not a folder")
    shutil.copytree(folder / "6", folder / "14")  # a copy under another name
    said = []
    assert T.find_checkpoint(folder.parent, said.append).folder == folder / "8"
    assert [line.split()[1] for line in said] == [str(folder / str(n)) for n in (14, 12, 10)]


def test_what_was_passed_over_is_set_aside(folder):
    (folder / "damaged-8").mkdir()  # of an earlier time
    (folder / "8/meta.json").write_text("")
    T.set_aside(T.find_checkpoint(folder.parent, quiet))
    assert sorted(path.name for path in folder.iterdir()) == ["6", "damaged-8"]
    assert sorted(path.name for path in (folder / "damaged-8").iterdir())[0] == "0.npz"
    assert T.checkpoint_steps(folder) == [6]


@pytest.mark.parametrize(
    ("member", "array", "words"),
    [
        ("first.embed.0", np.zeros((101, 31), np.float32), r"first.embed.0 is float32\[101, 31\]"),
        ("first.embed.0", np.zeros((101, 32)), r"float64\[101, 32\], .*float32\[101, 32\]"),
        ("first.embed.0", np.zeros((100, 32), np.float32), r"\[100, 32\], .*float32\[101, 32\]"),
        (
            "params.ngram_table.0",
            np.zeros((522, 32), np.float32),
            r"float32\[522, 32\], not uint16\[522, 32\]",
        ),
        ("params.ngram_table.0", np.zeros((522, 31), np.uint16), r"not uint16\[522, 32\]"),
        ("second.ngram_table.0", np.zeros((522, 1), np.float32), r"not float32\[522\]"),
        ("slow.qk_bank.0", None, "lacks rows of slow.qk_bank: use another"),
        ("first.embed.0", None, "lacks rows of first.embed: use another"),
        ("params.smear_gate.0", None, "lacks rows of params.smear_gate"),
    ],
)
def test_array_of_another_program_is_refused(folder, member, array, words):
    with np.load(folder / "6/0.npz") as file:
        members = {name: file[name] for name in file.files}
    changed = members | {member: array} if array is not None else members
    if array is None:
        del changed[member]
    np.savez(folder / "6/0.npz", **changed)
    with pytest.raises(T.UserError, match=words) as error:
        T.load_state(mesh_of(8), T.read_checkpoint(folder / "6"))
    assert "\n" not in str(error.value)
