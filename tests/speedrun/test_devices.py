"""A whole training gives the same numbers on any number of devices."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from programs import CFG, mesh_of, programs_of, run_steps

import train_gpt as T

# The encoding "bytes" has no prefixes: these words begin with others, and some are alike but for
# case or space, so that n-grams are hashed under other ids than those of the tokens.
WORDS = [bytes([i]) for i in range(48)] + [bytes([i, 65 + i % 40]) for i in range(48)]


def train(cfg: T.Config, devices: int, folder) -> tuple[list[float], dict]:
    """(all losses, the state at the end) of a run."""
    return run_steps(cfg, mesh_of(devices), programs_of(cfg, devices), folder, WORDS)


def assert_same_training(got, want):
    """Two answers of `train`, equal but for the order of float32 sums: about 1e-7 a step.

    Most comes from ANVIL: orthogonalization lifts small singular values, and with them their
    rounding error, by up to a thousand. Measured: 2e-7 for losses, 5e-6 for the state.
    """
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6)
    for kind, arrays in want[1].items():
        for name, x in arrays.items():
            assert np.any(x), (kind, name)
            error = np.linalg.norm(got[1][kind][name] - x) / np.linalg.norm(x)
            assert error < 2e-5, (kind, name)


@pytest.fixture(scope="module")
def alone(shards):
    """The training on one device."""
    return train(CFG, 1, shards)


def test_config_has_every_kind_of_step():
    """So that the comparison below says something."""
    table, known = T.schedule(CFG), T.vocabulary(CFG, WORDS)
    used = {name for step in range(CFG.steps) for name in table.programs(step)}
    assert used == set(T.programs(CFG, mesh_of(1), T.PLAIN)) - {"finish", "eval"}
    assert np.all(np.sum(table.hyper.average_rates > 0, axis=0) >= 2)
    assert np.any(known.prefix_v >= 0) and np.any(known.hashed_v != np.arange(CFG.vocab))
    rows = {name: row.shape[0] for name, row in T.param_table(CFG).items() if row.sharded}
    assert rows["head"] % 2 and rows["ngram_table"] % 4 and rows["mlp_bank"] % 8


@pytest.mark.parametrize("devices", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8])
def test_training_is_the_same(alone, shards, devices):
    """Losses, that of the validation too, and all of the state: but for the order of sums."""
    losses, state = train(CFG, devices, shards)
    assert_same_training((losses, state), alone)
    assert len(losses) == CFG.steps + 1
    assert losses[-2] < np.log(CFG.vocab) - 0.2  # the last stage has no candidates


# The training on more devices than this process has, in a file.
SCRIPT = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
import conftest, jax, pickle
jax.config.update("jax_num_cpu_devices", 16)
from test_devices import CFG, T, train
pickle.dump(train(T.for_devices(CFG, 16), 16, conftest.Path(sys.argv[1])), open(sys.argv[2], "wb"))
"""


@pytest.mark.slow
def test_more_devices_than_rows_train_as_one_does_on_rows_as_short(shards, tmp_path):
    found = tmp_path / "found.pickle"
    subprocess.run([sys.executable, "-c", SCRIPT, str(shards), str(found)], check=True, cwd=ROOT)
    want = train(T.for_devices(CFG, 16), 1, shards)
    assert_same_training(pickle.loads(found.read_bytes()), want)
