"""Shared by all tests: 8 fake CPU devices, strict broadcasting, small configs and token shards."""

import gc
import os
import signal
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = "data", "records", "tests", "tests/helpers"
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in OWN)]
GPU = "--gpu" in sys.argv
os.environ["JAX_PLATFORMS"] = "cuda,cpu" if GPU else "cpu"
if version("jaxlib").startswith("0.10."):  # later versions stop at an unknown flag
    # Halves the time of compiling for a CPU. Two test processes use two cores.
    flags = os.environ.get("XLA_FLAGS", "")
    flags += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = flags
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")  # tests store no programs

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache.compilation_cache import reset_cache  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

from halves import pytest_runtestloop  # noqa: E402, F401 (a hook)

import train_gpt as T  # noqa: E402

# Traces of JAX stay in memory. Searching them for cycles would take a tenth of the time.
gc.freeze()
gc.set_threshold(100_000, 20, 10)


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="tests that need an NVIDIA GPU")
    parser.addoption("--slow", action="store_true", help="also tests that take minutes")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: python -m pytest --slow"))


def pytest_configure(config):
    # As in a terminal: nohup and `&` in scripts ignore these signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line("markers", "slow: takes minutes; only with --slow")


def mostly_slow(cases, quick: set) -> list:
    """Mark all cases of a parametrized test as slow, except those in `quick`."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(autouse=True)
def interruptible():
    """Restore the handler of Ctrl-C after a test that calls the command line."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def program_cache():
    """The settings of JAX's compilation cache, which are restored after the test."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    reset_cache()
    yield before
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture
def machine(monkeypatch):
    """Return a function that replaces the devices of this machine (see fake_devices)."""
    from programs import FakeMesh, fake_devices  # it imports this file

    def replace_devices(*kinds, **options):
        devices = fake_devices(*kinds, **options)
        monkeypatch.setattr(T, "all_devices", lambda: devices)
        monkeypatch.setattr(T, "Mesh", FakeMesh)
        monkeypatch.setattr(jax, "default_backend", lambda: devices[0].platform)
        return devices

    return replace_devices


BOS = 96  # of the small vocabulary


def small_config(**changes) -> T.Config:
    """Return a config with all ideas in five layers. Tables are updated after steps 1, 3 and 7."""
    cfg = T.Config(
        preset="small",
        layers=(
            T.Layer("short", paired=True, values=True, x0=True, ngram=True),
            T.Layer("long", xsa=True, gated=True),
            T.Layer(x0=True, ngram=True, mlps=0, skip=1, new_gates=True),
            T.Layer("short", narrow=True, values=True, mlps=2),
            T.Layer("long", values=True, gated=True, reads_back=2, mudd=True),
        ),
        width=32,
        heads=4,
        mlp_width=128,
        vocab=104,
        real_tokens=97,
        bos=BOS,
        encoding="bytes",
        ngram_rows=520,
        sign_rows=64,
        gate_width=8,
        mudd_width=8,
        compute_dtype="float32",
        steps=10,
        extension=2,
        stages=(
            T.Stage(0.5, 8 * 32, 32, 0, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0), (0.2, 0.1), (48,)),
            T.Stage(0.5, 8 * 64, 64, 24, (16, 64), 1.5, candidates=(72,)),
            T.Stage(0.0, 8 * 64, 64, 24, (24, 64)),
        ),
        attention_cap=16,
        tied=0.75,
        momentum_warmup=4,
        momentum_cooldown=2,
        rails_step=4,
        table_change=4,
        tail=6,
        tail_average=5,
        micro_tokens=64,
        loss_chunk=64,
        val_tokens=1024,
        val_every=4,
        val_batch=512,
        val_row=64,
        val_windows=(24, 64),
        target=10.0,
    )
    return T.validate(replace(cfg, **changes))


def documents(seed: int, tokens: int, mean: int = 40) -> np.ndarray:
    """Return seeded documents, uint16 [tokens]: BOS, then ids that can be predicted in part."""
    rng = np.random.default_rng(seed)
    ids = np.cumsum(rng.integers(0, 3, tokens)) % BOS  # small steps: the next id is predictable
    ids[0] = BOS
    ids[1:][rng.random(tokens - 1) < 1 / mean] = BOS
    return ids.astype(np.uint16)


def write_shard(path: Path, tokens: np.ndarray, **header) -> Path:
    """Write a shard without the code that is tested."""
    words = np.zeros(256, "<i4")
    words[:3] = header.get("magic", 20240520), header.get("version", 1), len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(words.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def stream_of(folder: Path, *shards: np.ndarray, split: str = "train") -> T.TokenStream:
    """Return a stream over new shards with these tokens."""
    for i, tokens in enumerate(shards):
        write_shard(folder / f"x_{split}_{i:06d}.bin", tokens)
    return T.TokenStream(folder, split, BOS)


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """A folder with two training shards and a validation shard of the small vocabulary."""
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "small_train_000001.bin", documents(1, 3000))
    write_shard(folder / "small_train_000002.bin", documents(2, 7000))
    write_shard(folder / "small_val_000000.bin", documents(3, 2000))
    return folder
