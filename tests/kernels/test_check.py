"""wrong_kernels and checked_kernels: kernels beside their plain forms, before a run."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from programs import QUICK, mesh_of

import train_gpt as T

# The record with fewer and smaller rows, of heads that kernels for TPUs take.
CFG = replace(
    T.PRESETS["speedrun"],
    width=256,
    heads=2,
    mlp_width=128,
    vocab=384,
    real_tokens=384,
    bos=383,
    stages=(T.Stage(1.0, 8 * 512, 512, 0, (64, 128)),),
    extension=0,
)
INTERPRETED = T.Kernels(
    T.attend_tpu, T.fused_cross_entropy, T.add_rows_tpu, T.blend_tpu, T.product_8
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    real = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f: real(f, compiler_options=QUICK))


def only(field: str, kernel) -> T.Kernels:
    """The plain forms with another one in a field."""
    return T.PLAIN._replace(**{field: kernel})


def test_every_field_of_kernels_is_tried_as_wide_as_in_the_run():
    pieces = [*T.trials(T.PRESETS["speedrun"])]
    assert {field for field, *_ in pieces} == {*T.Kernels._fields}
    shapes = {}
    for field, _, large, _ in pieces:
        shapes.setdefault(field, []).extend(large)
    columns = {shape[2] for *_, (shape, *_), _ in pieces[:3]}  # short and narrow, paired, long
    assert columns == {6 * (2 * 64 + 64), 6 * (2 * 64 + 128), 6 * (2 * 128 + 128)}
    assert max(shape[1] for shape in shapes["blend"]) >= 2 * 1408


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field, marks=pytest.mark.slow) if field == "attend" else field
        for field in T.Kernels._fields
    ],
)
def test_kernels_that_compute_what_they_should_are_not_wrong(field):
    assert T.wrong_kernels(CFG, only(field, getattr(INTERPRETED, field))) == {}


def with_zeros(out):
    """A result as if the transfer of one block of its tokens had brought zeros."""
    return out.at[:, -64:].set(0)


@jax.custom_vjp
def without_gradient(x):
    return x


without_gradient.defvjp(lambda x: (x, None), lambda _, grad: (jnp.zeros_like(grad),))


def raises(*args):
    raise NotImplementedError("Mosaic does not know this " + "x" * 600)


@pytest.mark.parametrize(
    ("field", "kernel", "why"),
    [
        ("attend", lambda *x: with_zeros(T.ATTEND_PLAIN(*x)), "attend is off by 0."),
        ("attend", lambda heads, x, more: T.ATTEND_PLAIN(heads, without_gradient(x), more), "off"),
        ("blend", lambda x, *more: with_zeros(T.blend(x, *more)), "blend is off by 0."),
        ("cross_entropy", lambda *x: [1.1 * y for y in T.cross_entropy(*x)], "is off by 0.2"),
        ("add_rows", lambda grad, ids, rows: grad, "add_rows is off by 1"),
        ("blend", lambda x, w, y: T.blend(x, w, y) * jnp.nan, "blend is off by nan"),
        ("blend", raises, "blend cannot run (Mosaic does not know this " + "x" * 600 + ")"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_said(field, kernel, why):
    """A block of zeros, no gradient, a sum that is off, numbers that are none, a compiler's no."""
    one = replace(CFG, layers=CFG.layers[3:4])  # of one kind of attention
    wrong = T.wrong_kernels(one, only(field, kernel))
    assert wrong.keys() == {field} and why in wrong[field]


@pytest.fixture
def tpu(monkeypatch):
    """(a mesh of one TPU, what is said) where add_rows and blend are wrong."""
    chosen = T.PLAIN._replace(add_rows=lambda *x: x[0], blend=lambda *x: x[0], attend=lambda *x: x)
    monkeypatch.setattr(T, "pick_kernels", lambda cfg, device: (chosen, "attention, tables"))
    wrong = {"add_rows": "add_rows is off by 1", "blend": "blend cannot run (why)"}
    monkeypatch.setattr(T, "wrong_kernels", lambda cfg, kernels: dict(wrong))
    device = SimpleNamespace(platform="tpu")
    return SimpleNamespace(devices=SimpleNamespace(flat=[device])), wrong, chosen


def test_wrong_kernels_are_left_out_loudly(tpu):
    mesh, wrong, chosen = tpu
    said = []
    kernels, reason = T.checked_kernels(CFG, mesh, said.append)
    assert kernels == T.PLAIN._replace(attend=chosen.attend)
    line = "wrong here, or on another host: add_rows is off by 1; blend cannot run (why)"
    assert said == [f"WARNING: KERNELS ARE LEFT OUT THAT ARE {line}"]
    assert reason == f"attention, tables; LEFT OUT: {line}"  # stands in the log
    wrong.clear()
    assert T.checked_kernels(CFG, mesh, said.append) == (chosen, "attention, tables")
    assert len(said) == 1


def test_wrong_kernels_that_are_named_are_refused(tpu):
    """And those of several hosts, which could not agree on what to leave out."""
    named = replace(CFG, kernels="attend,add_rows,blend")
    with pytest.raises(T.UserError, match=r"blend cannot run \(why\): use --set kernels=attend$"):
        T.checked_kernels(named, tpu[0], print)


def test_on_several_hosts_wrong_kernels_are_refused(tpu, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(T, "from_all", lambda number: [0, 1])
    tpu[1].clear()  # on this one all is well
    with pytest.raises(T.UserError, match="kernels that are wrong here, or on another host"):
        T.checked_kernels(CFG, tpu[0], print)


def test_on_a_cpu_nothing_is_tried(monkeypatch):
    """There tests have."""
    monkeypatch.setattr(T, "wrong_kernels", None)
    chosen = T.pick_kernels(CFG, jax.devices()[0])
    assert T.checked_kernels(CFG, mesh_of(1), print) == chosen
