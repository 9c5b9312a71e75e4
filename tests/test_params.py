"""Parameters: the table, the state made from it, its values, and the padding of the banks."""

import functools

import jax
import numpy as np
import pytest
from conftest import documents, small_config
from jax.sharding import PartitionSpec as P

import train_gpt as T


def expected_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Of small_config: width 32, MLP width 128, 104 table rows; banks in multiples of 8."""
    attn, mlp = {2: (8, 8), 3: (16, 8), 5: (24, 16)}[layers]
    return {
        "embed": (104, 32),
        "resid_mix": (layers, 2),
        "skip": (layers // 2,),
        "attn_bank": (attn, 32, 32),
        "value_mix": (layers,),
        "attn_scale": (layers,),
        "mlp_bank": (mlp, 128, 32),
        "head": (32, 104),
    }


MUON = {"attn_bank", "mlp_bank"}
WHOLE = {"resid_mix", "skip", "value_mix", "attn_scale"}


# The table and the state


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_state_has_exactly_the_arrays_of_the_table(layers):
    cfg = small_config(layers=layers)
    shapes = expected_shapes(layers)
    state = T.init_state(cfg, 0)
    assert list(T.param_table(cfg)) == list(shapes)
    assert set(state) == {"params", "first", "second"}
    for kind, names in (
        ("params", set(shapes)),
        ("first", set(shapes)),
        ("second", set(shapes) - MUON),  # only Adam has a mean square
    ):
        assert set(state[kind]) == names
        for name, array in state[kind].items():
            assert (array.shape, array.dtype) == (shapes[name], np.float32), (kind, name)


@pytest.mark.parametrize("layers", [2, 3])
def test_abstract_state_agrees_with_init_state(layers):
    cfg = small_config(layers=layers)
    abstract, state = T.abstract_state(cfg, T.make_mesh(cfg)), T.init_state(cfg, 0)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)

    def same(x, y):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)

    jax.tree.map(same, abstract, state)


def test_every_row_has_its_optimizer_rate_and_sharding():
    cfg = small_config(lr_muon=1.0, lr_embed=2.0, lr_head=3.0, lr_scalar=4.0)
    rates = {"attn_bank": 1.0, "mlp_bank": 1.0, "embed": 2.0, "head": 3.0}
    for name, row in T.param_table(cfg).items():
        assert row.optimizer == ("muon" if name in MUON else "adam")
        assert row.lr == rates.get(name, 4.0)
        assert T.partition(row) == (P() if name in WHOLE else P("data"))
        assert len(row.scale) == (row.shape[0] if name in MUON else 0)


@functools.cache
def born(devices: int):
    """The state as the compiled initializer makes it, seed 7."""
    cfg = small_config(layers=3, devices=devices)
    return T.lower_init(cfg, T.make_mesh(cfg)).compile()(np.uint32(7))


@pytest.mark.parametrize("devices", [1, 8])
def test_state_is_born_in_its_shards(devices):
    for kind, arrays in born(devices).items():
        for name, array in arrays.items():
            parts = 1 if name in WHOLE else devices
            shard = array.sharding.shard_shape(array.shape)
            assert shard == (array.shape[0] // parts, *array.shape[1:]), (kind, name)


# Values


@pytest.fixture(scope="module")
def wide():
    """Enough numbers to measure a standard deviation; 2 layers of width 128."""
    return T.init_state(small_config(width=128, mlp_width=512, vocab=1024), 0)


def test_embedding_is_standard_normal(wide):
    embed = np.asarray(wide["params"]["embed"])
    # 131,072 draws: mean and std are within 0.01 by more than three of their own deviations
    assert abs(embed.mean()) < 0.01 and abs(embed.std() - 1) < 0.01
    assert np.abs(embed).max() > 3.5


@pytest.mark.parametrize("matrix", ["q0", "k0", "v0", "q1", "k1", "v1", "up0", "up1"])
def test_read_matrices_are_uniform_with_std_half_over_sqrt_width(wide, matrix):
    kind, layer = matrix[:-1], int(matrix[-1])
    if kind == "up":
        values = np.asarray(wide["params"]["mlp_bank"][layer])
    else:
        values = np.asarray(wide["params"]["attn_bank"][4 * layer + "qkv".index(kind)])
    std = 0.5 / np.sqrt(128)
    # 16,384 draws: the std of the std of a uniform is 0.35 %, so 2 % is safe
    assert abs(values.std() / std - 1) < 0.02 and abs(values.mean()) < 0.05 * std
    assert 1.69 * std < np.abs(values).max() <= np.sqrt(3) * std * (1 + 1e-6)


def test_matrices_that_write_to_the_stream_and_the_head_are_zero(wide):
    attn, mlp = (np.asarray(wide["params"][k]) for k in ("attn_bank", "mlp_bank"))
    assert not attn[3].any() and not attn[7].any()
    assert not mlp[2].any() and not mlp[3].any()
    assert not np.any(wide["params"]["head"])


def test_scalars_start_at_their_constants(wide):
    params = wide["params"]
    np.testing.assert_array_equal(params["resid_mix"], [[1, 0], [1, 0]])
    np.testing.assert_array_equal(params["skip"], [1])
    np.testing.assert_array_equal(params["value_mix"], [0.5, 0.5])
    np.testing.assert_array_equal(params["attn_scale"], np.float32([0.12, 0.12]))


def test_optimizer_state_starts_at_zero(wide):
    assert not any(np.any(x) for kind in ("first", "second") for x in wide[kind].values())


def test_no_two_matrices_are_equal(wide):
    attn, mlp = (np.asarray(wide["params"][k]) for k in ("attn_bank", "mlp_bank"))
    live = [*attn[[0, 1, 2, 4, 5, 6]], *mlp[:2, :128]]
    assert len({x.tobytes() for x in live}) == len(live)


def test_seed_decides_every_random_value():
    cfg = small_config()
    one, again, other = (T.init_state(cfg, seed)["params"] for seed in (1, 1, 2))
    for name in one:
        np.testing.assert_array_equal(one[name], again[name])
    for name in ("embed", "attn_bank", "mlp_bank"):
        live = np.asarray(one[name]) != 0
        assert (np.asarray(one[name]) != np.asarray(other[name]))[live].mean() > 0.99


def test_values_do_not_depend_on_the_device_count_or_on_jit():
    plain = T.init_state(small_config(layers=3), 7)
    for devices in (1, 8):
        jax.tree.map(np.testing.assert_array_equal, born(devices), plain)


def test_one_parameter_does_not_change_another():
    two, three = (T.init_state(small_config(layers=n), 0)["params"]["embed"] for n in (2, 3))
    np.testing.assert_array_equal(two, three)


# Padding: matrices that only fill a bank up to a multiple of 8


@pytest.mark.parametrize("layers, attn, mlp", [(2, 8, 4), (3, 12, 6), (5, 20, 10)])
def test_padding_is_zero_and_not_counted(layers, attn, mlp):
    cfg = small_config(layers=layers)
    table, params = T.param_table(cfg), T.init_state(cfg, 0)["params"]
    assert table["attn_bank"].count == attn * 32 * 32
    assert table["mlp_bank"].count == mlp * 128 * 32
    assert not np.any(params["attn_bank"][attn:])
    assert not np.any(params["mlp_bank"][mlp:])
    for name in set(table) - MUON:
        assert table[name].count == params[name].size


def test_padding_stays_zero_through_training_steps():
    cfg = small_config(layers=1, long_layers=(), devices=1, micro_tokens=256, loss_chunk=256)
    mesh = T.make_mesh(cfg)
    variant = T.train_variant(cfg.stages[0])
    step = T.lower_variant(cfg, variant, mesh).compile()
    state = T.lower_init(cfg, mesh).compile()(np.uint32(0))
    rows = documents(0, variant.batch_tokens + variant.rows).reshape(variant.rows, -1)
    tokens = T.put(rows, mesh, P("data"))
    for now in range(4):  # projections are zero at first: gradients reach all banks from the third
        state, _ = step(state, tokens, T.put(T.hyper_at(cfg, now), mesh, P()))
    for kind in ("params", "first"):
        attn, mlp = (np.asarray(state[kind][name]) for name in ("attn_bank", "mlp_bank"))
        assert attn[:4].any(axis=(1, 2)).all() and mlp[:2].any(axis=(1, 2)).all()
        assert not attn[4:].any() and not mlp[2:].any()
