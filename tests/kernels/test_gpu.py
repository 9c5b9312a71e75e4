"""Tests that need an NVIDIA GPU: python -m pytest --gpu tests/kernels/test_gpu.py, some minutes.

Results are compared with results of the CPU in float32. On a GPU sums have no fixed order (and
float32 matmuls may be rounded to tf32), so nothing is compared bit for bit.
"""

import functools
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GPU, documents, small_config, write_shard
from layers import KINDS, RECORD, distance, layer_inputs, record_layer, run_layer
from programs import run_steps

import train_gpt as T

pytestmark = pytest.mark.skipif(not GPU, reason="only with --gpu")
DEVICES = {kind: jax.devices(kind)[0] for kind in (("cuda", "cpu") if GPU else ())}
CFG = small_config(
    width=128,
    heads=2,
    mlp_width=512,
    steps=24,
    extension=2,
    stages=(
        T.Stage(0.5, 8 * 256, 256, 0, (64, 128), 1.0, (1.0, 0.5), (1.0, 0.0), (0.2,), (100,)),
        T.Stage(0.5, 8 * 512, 512, 200, (128, 300), 1.5),
        T.Stage(0.0, 8 * 512, 512, 200, (200, 512)),
    ),
    attention_cap=180,
    rails_step=10,
    table_change=8,
    tail=12,
    tail_average=10,
    val_tokens=8192,
    val_every=8,
    val_batch=4096,
    val_row=512,
    val_windows=(200, 512),
    compute_dtype="bfloat16",
    micro_tokens=2048,
    adam_eps=1e-8,
    lr_anvil=0.01,
)


def attention_inputs(t: int, n: int = 6, h: int = 128, v: int = 128):
    """Return q, k (normed) [1, t, n, h], v and an output gradient [1, t, n, v] in bfloat16, and
    segments of 700 tokens on average."""
    rng = np.random.default_rng(t)
    q, k, v, grad = (rng.standard_normal((1, t, n, x)).astype(np.float32) for x in (h, h, v, v))
    q, k = (x / np.sqrt(np.square(x).mean(-1, keepdims=True)) for x in (q, k))
    segments = np.cumsum(rng.random((1, t)) < 1 / 700, axis=1, dtype=np.int32)
    return [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, grad)], segments


def attended(attend, device, dtype, arrays, segments, window: int):
    """Run an attention function on a device: return (output, gradients of q, k and v)."""

    def run(q, k, v, grad, segments):
        attending = functools.partial(attend, segments_bt=segments, window=window, scale=0.12)
        out, back = jax.vjp(lambda *x: attending(*x), q, k, v)
        return out, *back(grad)

    arrays = [jax.device_put(np.asarray(x, np.float32).astype(dtype), device) for x in arrays]
    return jax.device_get(jax.jit(run)(*arrays, jax.device_put(segments, device)))


def attend_gpu(*args, **more):
    """Run attention by the kernels, with the record's tiles for this GPU."""
    return T.attend_gpu(T.tiles_for(RECORD, DEVICES["cuda"]), *args, **more)


@pytest.mark.parametrize(
    "h, v, window",
    [
        *((128, 128, window) for window in (63, 64, 128, 640, 1408)),
        *((h, v, 200) for h, v in ((64, 64), (64, 128), (32, 64), (16, 16))),
    ],
)
def test_attention_is_the_reference(h, v, window):
    """Windows, documents, narrow and wide heads. An error at one edge in 100 would be 10 %."""
    arrays, segments = attention_inputs(4096, n=3, h=h, v=v)
    got = attended(attend_gpu, DEVICES["cuda"], jnp.bfloat16, arrays, segments, window)
    want = attended(T.attend_plain, DEVICES["cpu"], np.float32, arrays, segments, window)
    for name, x, y in zip(("out", "q", "k", "v"), got, want, strict=True):
        assert distance(x, y) < 0.012, name  # rounded to bfloat16 three times, 2^-9 each


@pytest.mark.parametrize("h, v, window", [(128, 128, 1408), (64, 128, 640)])
def test_attention_in_a_row_of_the_record(h, v, window):
    """49,152 tokens, so offsets exceed 2^24. The plain form runs on the GPU in bfloat16, too."""
    arrays, segments = attention_inputs(49_152, h=h, v=v)
    args = DEVICES["cuda"], jnp.bfloat16, arrays, segments, window
    for x, y in zip(attended(attend_gpu, *args), attended(T.attend_band, *args), strict=True):
        assert distance(x, y) < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_the_record_are_the_reference(kind):
    """From the projection to the outputs of heads: pairs, added values, key offset, XSA, gates.

    The plain form gets the same rounded inputs in float32.
    """
    heads, parts = record_layer(kind, (300, 500))
    arrays, *rest = layer_inputs(heads, 1024, parts, jnp.bfloat16)
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    attend = T.choose_kernels(RECORD, DEVICES["cuda"])[0].attend

    def on(device, attend, arrays):
        inputs = jax.device_put((arrays, *rest), DEVICES[device])
        return run_layer(attend, heads, *inputs, jit=jax.jit)

    got, want = on("cuda", attend, arrays), on("cpu", T.PLAIN.attend, wide)
    assert got.keys() == {"y", "q", "k", "v", *parts.split()}
    for name, x in got.items():
        assert distance(x, want[name]) < 0.015, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with tokens for CFG."""
    folder = tmp_path_factory.mktemp("tokens")
    write_shard(folder / "small_train_000001.bin", documents(1, 120_000))
    write_shard(folder / "small_val_000000.bin", documents(3, 9000))
    return folder


def losses(cfg: T.Config, device, folder) -> list[float]:
    """Return the training losses of all steps of `cfg` on one device, and the validation loss."""
    cfg, mesh = T.make_mesh(cfg, [device])
    compiled, _ = T.compile_all(cfg, mesh, T.choose_kernels(cfg, device)[0], lambda line: None)
    return run_steps(cfg, mesh, compiled, folder, [bytes([i]) for i in range(cfg.bos)])[0]


@pytest.fixture(scope="module")
def on_cpu(folder):
    return losses(replace(CFG, compute_dtype="float32"), DEVICES["cpu"], folder)


@pytest.mark.parametrize(
    "changes",
    [{}, {"kernels": "plain"}, {"micro_tokens": 512, "recompute": True}],
    ids=["auto", "plain", "512 tokens at a time, recomputed"],
)
def test_training_follows_the_cpu(folder, on_cpu, changes):
    """The loss falls by more than 0.5 in these 24 steps. The mean difference is at most 0.02."""
    cfg = replace(CFG, **changes)
    reason = T.choose_kernels(cfg, DEVICES["cuda"])[1]
    plain = cfg.kernels == "plain"
    assert reason == ("plain (requested)" if plain else "attend,cross_entropy")
    got = losses(cfg, DEVICES["cuda"], folder)
    assert on_cpu[0] - on_cpu[-2] > 0.5
    assert abs(got[0] - on_cpu[0]) < 0.01
    assert np.mean(np.abs(np.subtract(got, on_cpu))) < 0.02


def test_a_run_on_the_gpu_is_finished_and_resumed(folder, tmp_path):
    """Runs train(), with a checkpoint in the middle, and checks run.json."""
    cfg = T.validate(replace(CFG, data=str(folder), devices=1, checkpoint_every=11))
    whole = T.train(cfg, tmp_path, "test", say=lambda line: None)
    facts = json.loads((whole / "run.json").read_text())
    assert facts["finished"] and facts["devices"]["platform"] == "gpu"
    assert facts["choices"]["kernels"] == "attend,cross_entropy"
    shutil.rmtree(whole / "checkpoints" / "24")
    saved = T.find_checkpoint(whole)
    assert 0 < saved.step < 24 and saved.step % cfg.adam_every == 0
    T.train(saved.cfg, tmp_path, "test", saved, say=lambda line: None)
    again = json.loads((whole / "run.json").read_text())
    assert abs(again["val_loss"] - facts["val_loss"]) < 0.01
