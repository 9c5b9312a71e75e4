"""The loss of 12 steps of the tiny preset, number by number: no change of it goes unnoticed.

python tests/test_golden.py     # writes tests/golden/tiny_steps.json again
"""

import hashlib
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import jax
import numpy as np
from conftest import write_shard
from programs import no_wishes, quick_compilation

import train_gpt as T

GOLDEN = Path(__file__).parent / "golden" / "tiny_steps.json"
# Other orders of float32 sums (2 devices, micro-batches of all rows) change these losses by 5e-7 of
# themselves. The smallest changes tried are seen: Muon's safety factor 1 % off makes 3e-3, no key
# offset 2e-3, another hash for the second token of each row 1e-4, a fifth more of Adam's decay too.
TOLERANCE = 1e-5
UPDATE = "if that is meant, run `python tests/test_golden.py` and commit the new file"


def golden_config() -> T.Config:
    """The tiny preset with its model, stages and rates, but 12 steps of 2 rows."""
    tiny = T.PRESETS["tiny"]
    stages = tuple(replace(s, batch_tokens=2 * s.row_tokens) for s in tiny.stages)
    extension = min(tiny.extension, 2)
    return T.validate(replace(tiny, steps=12, extension=extension, stages=stages, devices=1))


def golden_tokens(count: int, bos: int) -> np.ndarray:
    """Documents of ids below 256 that rise in steps of 0 to 2; from a hash, so alike everywhere."""
    steps, ends = np.frombuffer(hashlib.shake_256(b"tokens").digest(2 * count), np.uint8).reshape(
        2, count
    )
    ids = np.cumsum(steps % 3) % 256
    return np.where(ends < 3, bos, ids).astype(np.uint16)


def losses(cfg: T.Config, folder: Path) -> list[float]:
    """The training loss of every step."""
    path = write_shard(folder / "golden_train_0.bin", golden_tokens(cfg.total_tokens + 1, cfg.bos))
    mesh, seen = T.make_mesh(cfg), []
    with quick_compilation():
        variants = [variant for variant in T.executions(cfg) if variant.kind != "eval"]
        programs = {variant: T.lower_variant(cfg, variant, mesh).compile() for variant in variants}
        state = T.lower_init(cfg, mesh).compile()(T.put(np.uint32(cfg.seed), mesh, jax.P()))
        copies = T.lower_copies(cfg, mesh).compile()(state["params"])
    stream, waiting = T.TokenStream(path.parent, "train", cfg.bos), {}
    for step, batch in enumerate(T.train_batches(cfg, mesh, stream, 0, 0)):
        variants = T.step_variants(cfg, step)
        state, copies, waiting, report = T.run_step(
            cfg, programs, variants, state, copies, waiting, batch, no_wishes(mesh)
        )
        seen.append(round(float(report[0]), 7))
    return seen


def changed_fields(stored: dict) -> str:
    """What in the preset is not as it was when the golden file was written."""
    now = json.loads(json.dumps(asdict(golden_config())))
    fields = [f"{k}={now.get(k)}" for k in {**stored, **now} if stored.get(k) != now.get(k)]
    return "; the preset has changed: " + ", ".join(fields) if fields else ""


def test_tiny_preset_trains_as_it_did(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    got = losses(golden_config(), tmp_path)
    error = np.abs(np.divide(got, golden["losses"]) - 1)
    assert error.max() < TOLERANCE, (
        f"the loss of step {error.argmax() + 1} differs by {error.max():.1e} of itself "
        f"(first beyond {TOLERANCE}: step {np.argmax(error > TOLERANCE) + 1})"
        f"{changed_fields(golden['config'])}; {UPDATE}"
    )


def test_golden_losses_are_those_of_a_model_that_learns():
    golden = json.loads(GOLDEN.read_text())["losses"]
    assert len(golden) == golden_config().steps
    assert golden[-1] < 0.5 * golden[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        config = golden_config()
        content = {"config": asdict(config), "losses": losses(config, Path(folder))}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {GOLDEN}: {content['losses'][0]} to {content['losses'][-1]}")
