"""Attention layers with random numbers, for kernels of all devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from programs import jit

import train_gpt as T


def distance(got, want) -> float:
    """Relative norm of the difference."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def segment_rows(t: int) -> np.ndarray:
    """Return segments int32 [4, t]: no BOS (0), BOS first (1), a few documents, many documents."""
    starts = np.zeros((4, t), np.int32)
    starts[1:3, 0] = 1
    cuts = [t // 3, min(t // 3 + 1, t - 1), 3 * t // 4]  # one document has one token
    starts[2, cuts] = 7  # ids must only rise
    starts[3, 2::5] = 1  # the row begins within a document
    return np.cumsum(starts, axis=1, dtype=np.int32)


def narrow(count: int, window: int, v_width: int = 64, **more) -> T.Heads:
    """Heads of a short layer of the record; v is 64 columns wide, or 128."""
    return T.Heads(count, 64, v_width, window, **more)


def paired(count: int, window: int, v_width: int = 128) -> T.Heads:
    """Heads of a paired layer; the window is in half tokens."""
    return narrow(count, window, v_width, paired=True)


def long(count: int, window: int) -> T.Heads:
    """Return heads of a long layer: full width, with the key offset."""
    return T.Heads(count, 128, 128, window, offset=True)


RECORD = T.PRESETS["speedrun"]
KINDS = {"narrow": 1, "paired": 2, "long": 3}  # kind -> a layer of the record


def record_layer(kind: str, windows: tuple[int, int]) -> tuple[T.Heads, str]:
    """Return (Heads, parts for layer_shapes) of a layer of the record with these windows."""
    return T.heads_of(RECORD, KINDS[kind], windows), record_parts(KINDS[kind])


def record_parts(i: int) -> str:
    """Return the parts of layer `i` of the record for layer_shapes."""
    one = RECORD.layers[i]
    has = {"added": one.values, "added_gates": one.values, "xsa": one.xsa, "gates": one.gated}
    return " ".join(name for name, there in has.items() if there)


def layer_shapes(heads: T.Heads, b: int, t: int, parts: str, dtype, sharding=None):
    """What layer_inputs draws, as shapes with dtypes; all but qkv only if in `parts`.

    As in the record, heads with the key offset are whole, in q and k at least, and stand still in
    half of their columns; others are half a head.
    """
    n, h = heads.count, heads.qk_width

    def shape(*sides, dtype=np.float32):
        return jax.ShapeDtypeStruct(sides, dtype, sharding=sharding)

    arrays = {"qkv": shape(b, t, n * (2 * h + heads.v_width), dtype=dtype)}
    arrays |= {name: shape(b, t, n) for name in parts.split()}
    if "added" in arrays:
        arrays["added"] = shape(b, t, n * T.LANES, dtype=dtype)
    freqs = shape(h // 4 if heads.offset else h // 2)
    return arrays, shape(b, t, n * heads.v_width), shape(b, t, dtype=np.int32), freqs


def layer_inputs(heads: T.Heads, t: int, parts: str, dtype, segments=None):
    """Return (arrays with gradients, output gradient [b, t, n v], segments [b, t], frequencies). By
    default, the segments have three rows."""
    if segments is None:
        segments = segment_rows(t)[1:]
    rng = np.random.default_rng(t)
    arrays, out_grad, _, freqs = layer_shapes(heads, len(segments), t, parts, dtype)
    arrays = {x: jnp.asarray(rng.standard_normal(s.shape), s.dtype) for x, s in arrays.items()}
    if "gates" in arrays:  # of any sign, and zero
        arrays["gates"] = arrays["gates"].at[:, 40:65].set(0.0)
    if "xsa" in arrays:  # also for zero values, and for tiny values, which are divided by a minimum
        times = np.ones((1, t, 1), np.float32)
        times[:, 10:12], times[:, 20:22] = 0.0, 5e-6
        v, times = 2 * heads.count * heads.qk_width, jnp.asarray(times, dtype)
        arrays["qkv"] = arrays["qkv"].at[..., v:].multiply(times)
        arrays["xsa"] *= np.where(times < 1, 1e-4, 1)  # or gradients of v would be 1e4 there
    out_grad = jnp.asarray(rng.standard_normal(out_grad.shape), dtype).astype(np.float32)
    # Few bits make angles exact. Otherwise, rounding an angle of 400 has an error of 2e-5.
    freqs = np.float32(rng.integers(102, 1536, freqs.shape) / 1024)
    return arrays, out_grad, segments, freqs


def layer(attend, heads: T.Heads):
    """Return a function (arrays, segments, freqs) -> y of a Kernels.attend."""

    def run(arrays, segments, freqs):
        added = (arrays["added"], arrays["added_gates"]) if "added" in arrays else None
        own = added, arrays.get("xsa"), arrays.get("gates")
        return attend(heads, arrays["qkv"], T.HeadInputs(*own, segments, freqs, jnp.float32(0.1)))

    return run


def layer_with_gradients(attend, heads: T.Heads):
    """Return a function of the results of layer_inputs -> (gradients of the arrays, y)."""

    def run(arrays, out_grad, segments, freqs):
        def loss(arrays):
            y = layer(attend, heads)(arrays, segments, freqs)
            return jnp.sum(y.astype(jnp.float32) * out_grad), y

        return jax.grad(loss, has_aux=True)(arrays)

    return run


def run_layer(attend, heads: T.Heads, *inputs, jit=jit) -> dict[str, np.ndarray]:
    """Return {"y": output, "q", "k", "v", "xsa", "gates": gradients, if they exist}."""
    grads, y = jax.device_get(jit(layer_with_gradients(attend, heads))(*inputs))
    qk = heads.count * heads.qk_width
    d_qkv = np.split(grads.pop("qkv"), (qk, 2 * qk), axis=-1)
    return {"y": y, **dict(zip("qkv", d_qkv, strict=True)), **grads}


def assert_same_layer(attend, heads: T.Heads, parts: str, inputs):
    """Fail unless output and gradients of a layer in float32 equal the plain form."""
    got, want = (run_layer(x, heads, *inputs) for x in (attend, T.PLAIN.attend))
    assert got.keys() == want.keys() == {"y", "q", "k", "v", *parts.split()}
    for name, x in got.items():
        y = want[name]
        # Relative to the largest, which is above 1 (but 0 for q and k where a window is 0): sums of
        # up to 768 terms in float32. Seen: 1.3e-6; 6e-6 where a window is 0.
        atol = 1e-5 * max(np.abs(y).max(), 1)
        np.testing.assert_allclose(x, y, atol=atol, err_msg=name)


def assert_rounded_layer(attend, heads: T.Heads):
    """Fail unless a layer in bfloat16 equals the plain form in float32, on the same inputs, within
    a few roundings of 2^-9."""
    arrays, *rest = layer_inputs(heads, 512, "added added_gates xsa gates", jnp.bfloat16)
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    want = run_layer(T.PLAIN.attend, heads, wide, *rest)
    for name, x in run_layer(attend, heads, arrays, *rest).items():
        assert x.dtype == (jnp.float32 if name.endswith(("xsa", "gates")) else jnp.bfloat16)
        assert distance(x, want[name]) < 0.007, name  # seen: 0.0054


def lowered(function, *shapes, platform: str = "tpu") -> str:
    """Lower `function` for Mosaic or Triton, which have rules that the interpreter does not check.
    Fail if a kernel does not read all its operands."""
    kind = {"tpu": "TPU v6 lite", "cuda": "NVIDIA H100"}[platform]  # jax 0.11 asks which GPU
    device = jax.sharding.AbstractDevice(kind, None, platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(function).trace(*shapes)
    calls = [*kernel_calls(traced.jaxpr.jaxpr)]
    assert calls and [unread(call) for call in calls] == [[]] * len(calls)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def kernel_calls(jaxpr):
    """Return all calls of kernels in a jaxpr and its inner jaxprs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from kernel_calls(inner)


def unread(call) -> list[int]:
    """Return the operands that neither a kernel nor its index maps read. In that case, libtpu
    0.0.43 to 0.0.45 can read zeros from memory (jax issue 39744)."""
    mapping, kernel = call.params["grid_mapping"], call.params["jaxpr"]
    scalars = mapping.num_index_operands
    read = {id(x) for eqn in kernel.eqns for x in eqn.invars}
    for block in mapping.block_mappings:  # arguments: indices of the grid, then the scalars
        choice = block.index_map_jaxpr.jaxpr
        used = {id(x) for eqn in choice.eqns for x in eqn.invars}
        refs = choice.invars[len(choice.invars) - scalars :] if scalars else []
        read |= {id(x) for x, ref in zip(kernel.invars, refs, strict=False) if id(ref) in used}
    operands = kernel.invars[: scalars + mapping.num_inputs]
    return [i for i, x in enumerate(operands) if id(x) not in read]
