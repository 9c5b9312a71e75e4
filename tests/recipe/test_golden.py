"""Stored losses of 12 steps of the tiny preset.

PYTHONPATH=tests:tests/helpers python tests/recipe/test_golden.py  # tests/golden/tiny_steps.json
"""

import functools
import hashlib
import itertools
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, write_shard
from programs import by_name, mesh_of, quick_compilation, run_steps

import train_gpt as T

GOLDEN = ROOT / "tests/golden/tiny_steps.json"
# Relative changes of losses: 2e-7 with larger micro-batches; 8e-4 without the key offset, 1e-4 with
# a fifth more weight decay in Adam, 8e-5 with 1 % more in the first coefficient of ANVIL_MAPS, and
# 5e-5 with another hash for the second token of each row.
TOLERANCE = 1e-5
UPDATE = "if the change is intended, write the file again (see the head of this test)"


def golden_config(**changes) -> T.Config:
    """Return the tiny preset with 12 steps of 4 rows and three stages. All numbers that the record
    changes during a run change in it."""
    tiny = T.PRESETS["tiny"]
    stages = (
        T.Stage(0.5, 512, 128, 0, (32, 96), 1.0, (1, 0.5, 0.25), (1, 0.5, 0), (0.25,), (512,)),
        T.Stage(0.5, 1024, 256, 0, (64, 192), 1.52, (1, 0.5), (1, 0), (0.2, 0.1), (1024,)),
        T.Stage(0.0, 1024, 256, 0, (80, 256)),
    )
    short = replace(tiny, steps=12, extension=2, stages=stages, devices=1, table_change=4)
    short = replace(short, rails_step=5, momentum_warmup=4, momentum_cooldown=2)
    return T.validate(replace(short, tail=5, tail_average=4, **changes))


def golden_tokens(count: int, bos: int) -> np.ndarray:
    """Return documents of ids below 256 that rise in steps of 0 to 2, drawn by a hash."""
    drawn = np.frombuffer(hashlib.shake_256(b"tokens").digest(2 * count), np.uint8)
    steps, ends = np.split(drawn, 2)
    ids = np.cumsum(steps % 3) % 256
    return np.where(ends < 3, bos, ids).astype(np.uint16)


@functools.cache
def program(kernels: str, name: str):
    """Compile a program of the golden run."""
    cfg, mesh = golden_config(kernels=kernels), mesh_of(1)
    chosen, _ = T.choose_kernels(cfg, mesh.devices.flat[0])
    with quick_compilation():
        return by_name(T.programs(cfg, mesh, chosen))[name].lower().compile()


def losses(cfg: T.Config, folder: Path) -> list[float]:
    """Return the training losses."""
    path = write_shard(
        folder / "golden_train_0.bin", golden_tokens(cfg.tokens_after(cfg.steps) + 1, cfg.bos)
    )
    compiled = {}
    for key in itertools.chain(*T.schedule(cfg).programs):
        kernels = cfg.kernels if isinstance(key, T.Gradients) else "auto"
        compiled[str(key)] = program(kernels, str(key))
    words = [
        bytes([i % 128]) * (1 + i // 128) for i in range(256)
    ]  # half of these words have a prefix
    found, _ = run_steps(cfg, mesh_of(1), compiled, path.parent, words)
    return [round(x, 7) for x in found]


def differences(stored, now, name: str) -> list[str]:
    """Return the settings with different values, also in layers and stages. Settings that only one
    side has are ignored, since the losses are the same."""
    if isinstance(stored, dict) and isinstance(now, dict):
        both = stored.keys() & now.keys()
        return [
            x for key in sorted(both) for x in differences(stored[key], now[key], f"{name}.{key}")
        ]
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        pairs = enumerate(zip(stored, now, strict=True))
        return [x for i, pair in pairs for x in differences(*pair, f"{name}.{i}")]
    return [] if stored == now else [f"{name.strip('.')}={now!r}, was {stored!r}"]


def changed_fields(stored: dict) -> str:
    """Return the settings of the preset that have changed since the golden file was written."""
    found = differences(stored, json.loads(json.dumps(asdict(golden_config()))), "")
    return "; the preset has changed: " + ", ".join(found) if found else ""


def test_changed_settings_are_named_but_not_added_ones():
    stored = json.loads(GOLDEN.read_text())["config"]
    del stored["lr_floor"], stored["layers"][0]["xsa"]
    assert not changed_fields(stored | {"gone": 1})
    stored["layers"][1]["skip"] = 7
    assert changed_fields(stored | {"width": 64}).endswith(
        ": layers.1.skip=1, was 7, width=128, was 64"
    )


@pytest.mark.parametrize("kernels", ["auto", pytest.param("plain", marks=pytest.mark.slow)])
def test_losses_of_the_tiny_preset_have_not_changed(tmp_path, kernels):
    """With kernels for a CPU, and with plain functions."""
    golden = json.loads(GOLDEN.read_text())
    got = losses(golden_config(kernels=kernels), tmp_path)
    error = np.abs(np.divide(got, golden["losses"]) - 1)
    assert error.max() < TOLERANCE, (
        f"the loss of step {error.argmax() + 1} differs by {error.max():.1e} of itself "
        f"(first beyond {TOLERANCE}: step {np.argmax(error > TOLERANCE) + 1})"
        f"{changed_fields(golden['config'])}; {UPDATE}"
    )


def test_golden_losses_fall():
    golden = json.loads(GOLDEN.read_text())
    assert len(golden["losses"]) == golden_config().steps
    assert golden["losses"][-1] < 0.6 * golden["losses"][0]
    assert not changed_fields(golden["config"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        config = golden_config()
        content = {"config": asdict(config), "losses": losses(config, Path(folder))}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {GOLDEN}: {content['losses'][0]} to {content['losses'][-1]}")
