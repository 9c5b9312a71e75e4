"""What needs an NVIDIA GPU: python -m pytest --gpu tests/test_gpu.py, one GPU, some minutes.

Everything is compared with the same on the CPU in float32. On a GPU sums have no fixed order (and
float32 matmuls may be rounded to tf32), so nothing is compared bit for bit.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, GPU, documents, small_config, write_shard

import train_gpt as T

pytestmark = pytest.mark.gpu
DEVICES = {kind: jax.devices(kind)[0] for kind in (("cuda", "cpu") if GPU else ())}
CFG = small_config(
    width=128,
    heads=2,
    mlp_width=512,
    steps=24,
    extension=2,
    stages=(
        T.Stage(0.5, 8 * 256, 256, 0, (64, 128), 1.0, (1.0, 0.5), (1.0, 0.0)),
        T.Stage(0.5, 8 * 512, 512, 200, (128, 300), 1.5),
        T.Stage(0.0, 8 * 512, 512, 200, (200, 512)),
    ),
    val_tokens=8192,
    val_every=8,
    val_batch=4096,
    val_row=512,
    val_windows=(200, 512),
    compute_dtype="bfloat16",
    micro_tokens=2048,
    adam_eps=1e-8,
    lr_muon=0.01,
)


def distance(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def attention_inputs(t: int, n: int = 6, h: int = 128):
    """q, k (normed), v and an output gradient [1, t, n, h] in bfloat16, and documents of 700."""
    rng = np.random.default_rng(t)
    q, k, v, grad = (rng.standard_normal((1, t, n, h)).astype(np.float32) for _ in range(4))
    q, k = (x / np.sqrt(np.square(x).mean(-1, keepdims=True)) for x in (q, k))
    segments = np.cumsum(rng.random((1, t)) < 1 / 700, axis=1, dtype=np.int32)
    return [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, grad)], segments


def attended(attend, device, dtype, arrays, segments, window: int):
    """(output, gradients of q, k and v) of a backend on a device."""

    def run(q, k, v, grad, segments):
        attending = functools.partial(attend, segments_bt=segments, window=window, scale=0.12)
        out, back = jax.vjp(lambda *x: attending(*x), q, k, v)
        return out, *back(grad)

    arrays = [jax.device_put(np.asarray(x, np.float32).astype(dtype), device) for x in arrays]
    return jax.device_get(jax.jit(run)(*arrays, jax.device_put(segments, device)))


@pytest.mark.parametrize("window", [128, 384, 640, 1408])
@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_attention_of_the_record_is_the_reference(backend, window):
    """Windows and documents, forward and backward. A mistake at one edge in 100 would be 10 %."""
    attend = {"triton": T.attend_triton, "cudnn": T.attend_cudnn}[backend]
    arrays, segments = attention_inputs(4096)
    got = attended(attend, DEVICES["cuda"], jnp.bfloat16, arrays, segments, window)
    want = attended(T.attend_xla, DEVICES["cpu"], np.float32, arrays, segments, window)
    for name, x, y in zip(("out", "q", "k", "v"), got, want, strict=True):
        assert distance(x, y) < 0.012, name  # rounded to bfloat16 thrice, 2^-9 each


def test_attention_in_a_row_of_the_record():
    """49,152 tokens: offsets beyond 2^24; against the plain form on the GPU, also in bfloat16."""
    arrays, segments = attention_inputs(49_152)
    args = DEVICES["cuda"], jnp.bfloat16, arrays, segments, 640
    for x, y in zip(attended(T.attend_triton, *args), attended(T.attend_xla, *args), strict=True):
        assert distance(x, y) < 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokens for CFG."""
    folder = tmp_path_factory.mktemp("tokens")
    write_shard(folder / "small_train_000001.bin", documents(1, 120_000))
    write_shard(folder / "small_val_000000.bin", documents(3, 9000))
    return folder


def losses(cfg: T.Config, device, folder) -> list[float]:
    """Training losses of all steps of `cfg` on one device."""
    mesh, found = T.make_mesh(cfg, [device]), []
    programs, _ = T.compile_all(cfg, mesh, lambda line: None)
    state = programs["init"](T.put(np.uint32(0), mesh, jax.P()))
    copies, waiting = programs["copies"](state["params"]), {}
    wishes = T.Wishes(cfg, mesh).now()
    stream = T.TokenStream(folder, "train", BOS)
    for step, batch in enumerate(T.train_batches(cfg, mesh, stream, 0, 0)):
        variants = T.step_variants(cfg, step)
        state, copies, waiting, report = T.run_step(
            cfg, programs, variants, state, copies, waiting, batch, wishes
        )
        found.append(float(report[0]))
    return found


@pytest.fixture(scope="module")
def on_cpu(folder):
    return losses(replace(CFG, compute_dtype="float32"), DEVICES["cpu"], folder)


@pytest.mark.parametrize(
    ("changes", "off"),
    [
        ({}, 0.02),
        ({"attention": "cudnn"}, 0.02),
        ({"micro_tokens": 512}, 0.02),
        ({"recompute": "layers"}, 0.02),
        ({"micro_tokens": 0}, 0.02),
        ({"fp8": "both"}, 0.06),
    ],
)
def test_training_follows_the_cpu(folder, on_cpu, changes, off):
    """The loss falls by more than 1 in these 24 steps; `off` is the mean distance on the way."""
    cfg = replace(CFG, **changes)
    expected = "cudnn" if changes.get("attention") == "cudnn" else "triton"
    assert T.attention_on(cfg, DEVICES["cuda"])[0] == expected
    got = losses(cfg, DEVICES["cuda"], folder)
    assert on_cpu[0] - on_cpu[-1] > 0.5
    assert abs(got[0] - on_cpu[0]) < 0.01
    assert np.mean(np.abs(np.subtract(got, on_cpu))) < off


def test_a_run_on_the_gpu_is_finished_and_resumed(folder, tmp_path):
    """The whole of train(), with a checkpoint on the way, and what it writes down."""
    cfg = T.validate(replace(CFG, data=str(folder), devices=1, checkpoint_every=11))
    whole = T.train(cfg, tmp_path, "test", say=lambda line: None)
    facts = T.json.loads((whole / "run.json").read_text())
    assert facts["finished"] and facts["devices"]["platform"] == "gpu"
    assert facts["choices"]["attention"].startswith("triton")
    T.remove(whole / "checkpoints" / "24")
    saved = T.find_checkpoint(whole)
    assert saved.step == 22
    T.train(saved.cfg, tmp_path, "test", saved, say=lambda line: None)
    again = T.json.loads((whole / "run.json").read_text())
    assert abs(again["val_loss"] - facts["val_loss"]) < 0.01


def test_the_estimate_of_memory_is_not_below_what_a_stage_takes():
    """memory_needed against the compiler's figures for the record's smallest stage, on this GPU."""
    cfg, device = replace(T.PRESETS["speedrun"], devices=1), DEVICES["cuda"]
    mesh, variant = T.make_mesh(cfg, [device]), next(iter(T.executions(cfg)))
    compiled = T.lower_variant(cfg, variant, mesh).compile()
    takes = T.program_bytes(compiled)["peak"] + T.resident_bytes(cfg, variant, mesh)
    needed = T.memory_needed(T.fitted(cfg, variant, mesh), variant, mesh)
    assert takes <= 1.02 * needed
    assert takes >= 0.7 * needed
