"""Short runs of the trainer within a test, and their files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import small_config
from programs import BUILT, key, quick_compilation

import train_gpt as T

# One stage, one kind of table update and six small programs, which compile in two seconds. 4 steps
# take 0.1 s. Tables and banks need padding on several devices.
BRIEF = small_config(
    preset="brief",
    layers=(
        T.Layer("short", narrow=True, values=True, x0=True, ngram=True),
        T.Layer(skip=1, new_gates=True),
        T.Layer("long", values=True, gated=True, reads_back=1, mudd=True),
    ),
    width=16,
    heads=2,
    mlp_width=32,
    vocab=101,
    ngram_rows=522,
    gate_width=4,
    mudd_width=4,
    steps=4,
    extension=0,
    stages=(T.Stage(1.0, 256, 32, 24, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0), candidates=(48,)),),
    momentum_warmup=2,
    momentum_cooldown=1,
    rails_step=2,
    table_every=(2, 2),
    val_tokens=512,
    val_batch=512,
    checkpoint_every=1,
)
STATES, COPIES = {}, {}  # like BUILT, for T.start_state and T.start_copies
WARM = {}  # the same for each T.warm_up, which tests may replace


def trained(cfg: T.Config, out: Path, shards: Path, saved=None, say=None, **options) -> Path:
    """Call T.train. Runs with the same programs share them."""

    def once(make, known):
        """Call `make` once for all configs with the same programs."""

        def made(cfg, mesh, *args):
            same = key(cfg, mesh.size)
            if same not in known:
                known[same] = make(cfg, mesh, *args)
            return known[same]

        return made

    with pytest.MonkeyPatch.context() as patch, quick_compilation():
        patch.setattr(T, "compile_all", once(T.compile_all, BUILT))
        patch.setattr(T, "start_state", once(T.start_state, STATES))
        patch.setattr(T, "start_copies", once(T.start_copies, COPIES))
        patch.setattr(T, "warm_up", once(T.warm_up, WARM.setdefault(T.warm_up, {})))
        cfg, say = replace(cfg, data=str(shards)), say or (lambda line: None)
        return T.train(cfg, out, "train 'this'", saved, say=say, **options)


def metrics(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(run: Path) -> list[dict]:
    """Return the lines without times."""
    return [{k: v for k, v in line.items() if k != "train_time_ms"} for line in metrics(run)]


def train_losses(run: Path) -> list[float]:
    return [line["train_loss"] for line in metrics(run) if "train_loss" in line]


def facts(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def steps_of(run: Path) -> list[str]:
    """Return the names in the folder of checkpoints, which are steps."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def back_to(run: Path, step: int) -> T.Saved:
    """Change the files of a run as if it had been killed after this checkpoint."""
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    (run / "run.json").write_text(json.dumps(facts(run) | {"finished": False}))
    return T.find_checkpoint(run)


def arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return kind.name -> unsharded array, from the rows in its files."""
    rows = {}
    for path in checkpoint.glob("*.npy"):
        kind, name, first, _ = path.name.split(".")
        rows.setdefault(f"{kind}.{name}", {})[int(first)] = np.load(path)
    for name, pieces in rows.items():
        ends = [first + len(pieces[first]) for first in sorted(pieces)]
        assert sorted(pieces) == [0, *ends[:-1]], f"rows of {name} are missing"
    return {name: np.concatenate([x[first] for first in sorted(x)]) for name, x in rows.items()}


def assert_same_arrays(got: dict, want: dict):
    """Fail unless all arrays are bit-identical."""
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
