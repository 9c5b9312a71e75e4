"""fused_cross_entropy and its gradients, against the plain form and autodiff.

tests/recipe/test_loss.py compares the plain form with NumPy float64.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import preflight
import pytest
from conftest import small_config
from layers import distance
from programs import cuda_compiler, jit

import train_gpt as T


def loss_inputs(dtype, rows: int = 104, tokens: int = 48, k: int = 3):
    """Return normed features, a head of `rows` with logits up to 10, targets (some are equal), and
    weights."""
    rng = np.random.default_rng(5)
    width = small_config().width
    x = T.norm(jnp.asarray(rng.standard_normal((tokens, width)), dtype))
    head = jnp.asarray(0.7 * rng.standard_normal((rows, width)), dtype)
    targets = rng.integers(0, rows, (tokens, k)).astype(np.int32)
    targets[3] = targets[3, 0]
    targets[4, -1] = targets[4, 0]
    weights = rng.uniform(0, 1, (tokens, k)).astype(np.float32)
    weights[5] = 0
    return x, head, targets, weights


def sums_and_gradients(function, inputs, chunk: int = 20):
    """Return (weighted sum, plain sum, gradients of the weighted sum for x and for head)."""
    x, head, targets, weights = inputs

    def run(x, head):
        return function(x, head, targets, weights, small_config(loss_chunk=chunk))

    (weighted, plain), grads = jit(jax.value_and_grad(run, (0, 1), has_aux=True))(x, head)
    return weighted, plain, *grads


FORMS = {
    "default": T.fused_cross_entropy,
    "cuda": functools.partial(T.fused_cross_entropy, in_rows=True),
}


@pytest.fixture(params=FORMS)
def form(request):
    """A name in FORMS."""
    return request.param


@functools.cache
def plain(chunk: int, *args):
    """Return the results of the plain loss for loss_inputs(*args), computed once for both forms."""
    return sums_and_gradients(T.cross_entropy, loss_inputs(*args), chunk)


@pytest.mark.parametrize(
    "rows, tokens, k, chunk",  # chunk: most tokens per chunk
    [(37, 45, 1, 45), (513, 48, 4, 32)],
)
def test_both_forms_equal_the_plain_loss_in_float32(form, rows, tokens, k, chunk):
    args = jnp.float32, rows, tokens, k
    got = sums_and_gradients(FORMS[form], loss_inputs(*args), chunk)
    for x, y in zip(got, plain(chunk, *args), strict=True):
        assert x.dtype == y.dtype and distance(x, y) < 1e-6  # observed: 2e-7
    assert not np.any(got[2][5]), "a token without weight"


def test_both_forms_round_to_bfloat16_and_sum_in_float32(form):
    """Stored logits are rounded, by 2^-9 of their values. On NVIDIA GPUs logits are also rounded
    before they are summed, but only in training: validation equals the plain form."""
    inputs, cfg = loss_inputs(jnp.bfloat16), small_config(loss_chunk=16)
    want = plain(16, jnp.bfloat16)
    got = sums_and_gradients(FORMS[form], inputs, 16)
    sums = 2e-4 if form == "cuda" else 1e-6  # observed: 6e-5, 9e-8
    for x, y, off in zip(got, want, (sums, sums, 0.006, 0.006), strict=True):
        assert x.dtype == y.dtype and distance(x, y) < off  # observed for gradients: 0.0038
    losses = FORMS[form], T.cross_entropy
    validated = [jit(lambda *args, f=f: f(*args, cfg))(*inputs) for f in losses]
    assert validated[0] == validated[1] and (form != "cuda" or got[:2] != want[:2])


def test_a_loss_over_candidates_has_gradients_only_for_their_rows_of_the_head(form):
    """The head has the rows of the candidates, and targets are positions among the candidates."""
    x, head, targets, weights = loss_inputs(jnp.float32, 200)
    candidates = np.unique(np.random.default_rng(0).integers(0, 200, 80)).astype(np.int32)
    assert 50 < candidates.size < 80

    def over_candidates(function):
        def run(x, head, targets, weights, cfg):
            return function(x, head[candidates], targets, weights, cfg)

        return sums_and_gradients(run, (x, head, targets % candidates.size, weights))

    got, want = over_candidates(FORMS[form]), over_candidates(T.cross_entropy)
    for y, z in zip(got, want, strict=True):
        assert y.shape == z.shape and distance(y, z) < 1e-6
    rest = np.delete(np.asarray(got[3]), candidates, axis=0)
    assert rest.shape[0] == 200 - candidates.size and not rest.any()


def test_only_the_weighted_sum_has_a_gradient_and_only_for_x_and_head():
    x, head, targets, weights = loss_inputs(jnp.float32)

    @jit
    def gradients(which):
        def loss(x, head, weights):
            sums = T.fused_cross_entropy(x, head, targets, weights, small_config())
            return jnp.where(which, sums[0], sums[1])

        return jax.grad(loss, (0, 1, 2))(x, head, weights)

    d_x, d_head, d_weights = gradients(True)
    assert np.any(d_x) and np.any(d_head) and not np.any(d_weights)
    assert not any(np.any(grad) for grad in gradients(False))


def test_nan_inputs_make_the_loss_nan():
    x, head, *rest = loss_inputs(jnp.float32)
    run = jit(lambda x, head: T.fused_cross_entropy(x, head, *rest, small_config()))
    assert np.isfinite(run(x, head)).all()
    assert np.isnan(run(x.at[2, 3].set(np.nan), head)).all()
    assert np.isnan(run(x, head.at[2, 3].set(np.nan))).all()


@cuda_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["a100-40", "rtx4090", "h100", "b200"])
def test_the_loss_of_the_record_compiles_for_gpus(name):
    """The largest softmax is one chunk, and one kernel. Some seconds each."""
    (device,) = preflight.absent_devices(f"{name}x1")
    mesh = jax.sharding.Mesh(np.array([device]), (T.AXIS,))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    cfg = T.PRESETS["speedrun"]
    cfg = replace(cfg, whole_loss="always")
    loss = T.choose_kernels(cfg, device)[0].cross_entropy
    t, v, d = 40_960, cfg.vocab, cfg.width
    shapes = [((t, d), cfg.dtype), ((v, d), cfg.dtype), ((t, 1), jnp.int32), ((t, 1), jnp.float32)]
    shapes = [jax.ShapeDtypeStruct(*shape, sharding=whole) for shape in shapes]

    def run(x, head, targets, weights):
        def sums(x, head):
            return loss(x, head, targets, weights, cfg)

        return jax.value_and_grad(sums, (0, 1), has_aux=True)(x, head)

    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    text = jax.jit(run).lower(*shapes).compile().as_text()
    assert text.count('"__gpu$xla.gpu.triton"') == 1
    assert not re.search(rf"= bf16\[{t},{v}\]\S* copy\(", text)  # it would copy 4 GB
