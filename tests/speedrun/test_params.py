"""Parameters: the table, the state made from it, its values, and the padding on devices."""

import functools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import small_config
from jax.sharding import PartitionSpec as P
from programs import mesh_of

import train_gpt as T

RECORD = T.Config()
MUON = ("attn_bank", "mlp_bank")
TABLES = ("head", "embed", "value_tables", "bigram_table")


# ------------------------------------------------------------------------------------------------
# The table of the record, once more
# ------------------------------------------------------------------------------------------------

# name: shape, rate, decay, betas. Rates are multiples of 0.008, decays of 0.005.
ADAM_ROWS = {
    "head": ((50_304, 768), 1, 150, (0.5, 0.95)),
    "embed": ((50_304, 768), 1, 150, (0.5, 0.95)),
    "value_tables": ((5 * 50_304, 768), 75, 5, (0.75, 0.95)),
    "bigram_table": ((251_520, 768), 75, 5, (0.75, 0.95)),
    "attn_gate": ((10, 6, 12), 1, 1, (0.9, 0.99)),
    "value_gate": ((5, 6, 12), 1, 1, (0.9, 0.99)),
    "smear_gate": ((1, 12), 0.01, 0, (0.9, 0.99)),
    "skip_gate": ((1, 12), 0.05, 0, (0.9, 0.99)),
    "resid_lambdas": ((11, 2), 5, 0, (0.9, 0.95)),
    "post_lambdas": ((11, 2), 1, 0, (0.9, 0.95)),
    "x0_lambdas": ((11,), 1, 0, (0.9, 0.95)),
    "bigram_lambdas": ((11,), 1, 0, (0.9, 0.95)),
    "qkv_lambda": ((11,), 5, 0, (0.9, 0.99)),
    "o_lambda": ((11,), 5, 0, (0.9, 0.99)),
    "smear_lambda": ((1,), 5, 0, (0.9, 0.99)),
    "backout_lambda": ((1,), 5, 0, (0.9, 0.99)),
    "skip_lambda": ((1,), 5, 0, (0.9, 0.99)),
}
# What each constant starts at.
STARTS = {
    "attn_gate": 0,
    "value_gate": 0,
    "smear_gate": 0,
    "skip_gate": 0,
    "resid_lambdas": math.sqrt(1.1),
    "post_lambdas": 1,
    "x0_lambdas": 0,
    "bigram_lambdas": 0.05,
    "qkv_lambda": 0.5,
    "o_lambda": 1,
    "smear_lambda": 0,
    "backout_lambda": 0.5,
    "skip_lambda": -1.5,
}


def test_the_table_is_complete():
    assert {*T.param_table(RECORD)} == {*ADAM_ROWS, *MUON}
    assert {*STARTS} == {*ADAM_ROWS} - {*TABLES}


@pytest.mark.parametrize("name", ADAM_ROWS)
def test_rows_of_adam(name):
    row, (shape, rate, decay, betas) = T.param_table(RECORD)[name], ADAM_ROWS[name]
    assert (row.optimizer, row.shape, row.betas) == ("adam", shape, betas)
    assert row.lr == pytest.approx(0.008 * rate, rel=1e-12)
    assert row.decay == pytest.approx(0.005 * decay, rel=1e-12)
    assert (row.scale, row.count) == ((), math.prod(shape))
    assert row.tied_to == ("head" if name == "embed" else "")


def test_rows_of_muon():
    """10 layers of q, k, v, o; 11 up- and 11 down-projections."""
    attn, mlp = (T.param_table(RECORD)[name] for name in MUON)
    assert (attn.shape, mlp.shape) == ((40, 768, 768), (22, 3072, 768))
    for row in (attn, mlp):
        assert (row.optimizer, row.lr, row.decay, row.tied_to) == ("muon", 0.023, 1.2, "")
    assert attn.scale == (1.0,) * 40
    assert mlp.scale == (2.0,) * 11 + (4.0,) * 11


def test_rates_and_decays_of_the_config_reach_their_rows():
    cfg = small_config(lr_muon=3.0, decay_muon=5.0, lr_adam=0.5, decay_adam=7.0)
    for name, row in T.param_table(cfg).items():
        rate, decay = (6, 5 / 7) if name in MUON else ADAM_ROWS[name][1:3]
        assert row.lr == pytest.approx(0.5 * rate, rel=1e-12), name
        assert row.decay == pytest.approx(7.0 * decay, rel=1e-12), name


def test_numbers_of_the_record_by_hand():
    counts = {name: row.count for name, row in T.param_table(RECORD).items()}
    tables = {name: counts.pop(name) for name in TABLES}
    assert tables == {
        "head": 38_633_472,
        "embed": 38_633_472,
        "value_tables": 193_167_360,
        "bigram_table": 193_167_360,
    }
    assert counts.pop("attn_bank") == 10 * 4 * 768 * 768
    assert counts.pop("mlp_bank") == 11 * 2 * 3072 * 768
    assert sum(counts.values()) == 720 + 360 + 12 + 12 + 22 + 22 + 11 + 11 + 11 + 11 + 3
    assert sum(row.count for row in T.param_table(RECORD).values()) == 539_100_331


def test_flops_of_the_record_by_hand():
    """6 for every weight of a matmul: not for the tables."""
    assert T.flops_per_token(RECORD) == 6 * (23_592_960 + 51_904_512 + 38_633_472)


@pytest.mark.parametrize("name", ADAM_ROWS | dict.fromkeys(MUON))
def test_what_is_large_is_cut_over_the_devices_and_the_rest_is_whole(name):
    large = name not in STARTS
    assert T.param_table(RECORD)[name].sharded == large
    for kind in ("params", "first", "second"):
        leaf = T.abstract_state(RECORD, mesh_of(8))[kind][name]
        assert leaf.sharding.spec == (P("data") if large else P())


# ------------------------------------------------------------------------------------------------
# Other sizes
# ------------------------------------------------------------------------------------------------


def sized(layers: int, **changes) -> T.Config:
    """small_config with fewer or more layers: all but the last attend."""
    return small_config(
        layers=layers,
        skip=(0, layers - 1),
        backout=0,
        long_layers=(),
        paired_layers=(),
        value_layers=tuple(range(layers - 1))[-2:],
        **changes,
    )


@pytest.mark.parametrize("layers, attn, mlp", [(2, 4, 4), (3, 8, 6), (5, 16, 10), (7, 24, 14)])
def test_shapes_follow_the_layers(layers, attn, mlp):
    """No size need be a multiple of anything."""
    cfg = sized(layers, vocab=101, bigram_rows=523)
    table = T.param_table(cfg)
    attends, values = layers - 1, min(2, layers - 1)
    assert {name: row.shape for name, row in table.items()} == {
        "head": (101, 32),
        "embed": (101, 32),
        "value_tables": (values * 101, 32),
        "bigram_table": (523, 32),
        "attn_bank": (attn, 32, 32),
        "mlp_bank": (mlp, 128, 32),
        "attn_gate": (attends, 4, 12),
        "value_gate": (values, 4, 12),
        "smear_gate": (1, 12),
        "skip_gate": (1, 12),
        "resid_lambdas": (layers, 2),
        "post_lambdas": (layers, 2),
        **dict.fromkeys(("x0_lambdas", "bigram_lambdas", "qkv_lambda", "o_lambda"), (layers,)),
        **dict.fromkeys(("smear_lambda", "backout_lambda", "skip_lambda"), (1,)),
    }
    assert table["attn_bank"].count == attn * 32 * 32
    assert table["mlp_bank"].count == mlp * 128 * 32
    assert table["attn_bank"].scale == (1.0,) * attn
    assert table["mlp_bank"].scale == (2.0,) * layers + (4.0,) * layers


# ------------------------------------------------------------------------------------------------
# The state
# ------------------------------------------------------------------------------------------------


# Large enough to measure a standard deviation. 12 matrices of attention, 8 of MLPs; eight devices
# share none of the tables and only one of the banks equally.
WIDE = small_config(width=128, mlp_width=256, vocab=1021, bigram_rows=1023)


@functools.cache
def initializer(devices: int):
    return T.start_state(WIDE, mesh_of(devices))


@functools.cache
def born(devices: int, seed: int = 7):
    """The state of WIDE as it is made on so many devices."""
    return initializer(devices)(np.uint32(seed))


def whole(state):
    """A state without its padding, as NumPy arrays."""
    return {kind: jax.device_get(T.unpadded(WIDE, arrays)) for kind, arrays in state.items()}


def test_the_state_is_a_tree_of_three_kinds():
    """Muon has a mean square per row of a matrix."""
    state, table = born(1), T.param_table(WIDE)
    assert {*state} == {"params", "first", "second"}
    for kind, arrays in state.items():
        assert {*arrays} == {*table}
        for name, array in arrays.items():
            shape = table[name].shape
            shape = shape[:2] if kind == "second" and name in MUON else shape
            assert (array.shape, array.dtype) == (shape, np.float32), (kind, name)


@pytest.mark.parametrize("devices", [1, 8])
def test_abstract_state_agrees_with_the_state(devices):
    """Structure, shapes, types and where every share lies."""
    abstract = T.abstract_state(WIDE, mesh_of(devices))

    def same(x, y):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, len(x.shape))
        return True

    assert jax.tree.all(jax.tree.map(same, abstract, born(devices)))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 6, 7, 8])
def test_state_is_cut_into_equal_shares(devices):
    """What does not divide is filled up, by less than a row for each device."""
    for kind, arrays in T.abstract_state(WIDE, mesh_of(devices)).items():
        for name, array in arrays.items():
            row = T.param_table(WIDE)[name]
            rows = row.shape[0]
            share = rows if name in STARTS else math.ceil(rows / devices)
            assert array.sharding.shard_shape(array.shape)[0] == share, (kind, name)
            assert array.shape[0] == (rows if name in STARTS else share * devices)


def test_padding_starts_at_zero():
    """Of the tables and of one bank."""
    for kind, arrays in born(8).items():
        padding = {}
        for name, array in arrays.items():
            padding[name] = np.asarray(array)[T.param_table(WIDE)[name].shape[0] :]
            assert not padding[name].any(), (kind, name)
        assert {name: len(x) for name, x in padding.items() if len(x)} == {
            "head": 3,
            "embed": 3,
            "value_tables": 6,
            "bigram_table": 1,
            "attn_bank": 4,
        }


def test_the_record_on_eight_devices_has_whole_matrices():
    """22 MLP matrices are 24 of which each device owns three; the tables divide as they are."""
    state, table = T.abstract_state(RECORD, mesh_of(8)), T.param_table(RECORD)
    for name, leaf in state["params"].items():
        rows = 24 if name == "mlp_bank" else table[name].shape[0]
        assert leaf.shape == (rows, *table[name].shape[1:]), name


@pytest.mark.parametrize("cuts, rows", [(1, 22), (2, 22), (3, 24), (4, 24), (5, 25), (8, 24)])
def test_padded_grown_and_unpadded(cuts, rows):
    """What does not divide grows by zeros at its end, which are cut off again."""
    table = T.param_table(RECORD)
    assert T.padded((22, 3, 5), table["mlp_bank"], cuts) == (rows, 3, 5)
    assert T.padded((22, 3), table["mlp_bank"], cuts) == (rows, 3)  # its mean squares
    assert T.padded((11, 2), table["resid_lambdas"], cuts) == (11, 2)  # not cut
    x = 1 + np.arange(22 * 3, dtype=np.float32).reshape(22, 3)
    large, small = T.grown(x, rows), np.ones((11, 2))
    np.testing.assert_array_equal(large, [*x, *np.zeros((rows - 22, 3))])
    found = T.unpadded(RECORD, {"mlp_bank": large, "resid_lambdas": small})
    np.testing.assert_array_equal(found["mlp_bank"], x)
    assert found["resid_lambdas"] is small


# ------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def params():
    """The first parameters, as NumPy arrays."""
    return SimpleNamespace(**whole(born(1))["params"])


@pytest.mark.parametrize("name, std", [("head", 0.005), ("embed", 0.005), ("value_tables", 0.01)])
def test_tables_are_normal(name, std, params):
    """130,688 draws or twice as many: the std is good to 0.2 %, the mean to 0.003 std."""
    values = getattr(params, name) / std
    assert abs(values.mean()) < 0.015 and abs(values.std() - 1) < 0.01
    assert 3.5 < np.abs(values).max() < 7
    assert abs(np.mean(values**4) - 3) < 0.15  # not a uniform's 1.8


def test_the_embedding_starts_as_the_head(params):
    np.testing.assert_array_equal(params.embed, params.head)


def test_value_tables_of_different_layers_differ(params):
    one, two = np.split(params.value_tables, 2)
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(one.ravel(), params.head.ravel())[0, 1]) < 0.02


def test_the_bigram_table_starts_at_zero(params):
    assert not params.bigram_table.any()


@pytest.mark.parametrize(
    "bank, index", [*(("attn_bank", i) for i in range(12)), *(("mlp_bank", i) for i in range(4))]
)
def test_attention_and_up_matrices_are_uniform_with_std_half_over_sqrt_width(bank, index, params):
    """Output projections of attention too; 16,384 draws: the std is good to 0.35 %."""
    values = getattr(params, bank)[index]
    std = 0.5 / math.sqrt(128)
    assert abs(values.std() / std - 1) < 0.02 and abs(values.mean()) < 0.05 * std
    assert 1.69 * std < np.abs(values).max() <= math.sqrt(3) * std * (1 + 1e-6)
    assert abs(np.mean((values / std) ** 4) - 1.8) < 0.1  # not a normal's 3


def test_down_projections_start_at_zero(params):
    assert not params.mlp_bank[4:].any()


@pytest.mark.parametrize("name", STARTS)
def test_small_parameters_start_at_their_constants(name, params):
    found = getattr(params, name)
    np.testing.assert_array_equal(found, np.full_like(found, STARTS[name]))


def test_optimizer_state_starts_at_zero():
    state = born(1)
    assert not any(np.any(x) for kind in ("first", "second") for x in state[kind].values())


def test_no_two_matrices_are_equal(params):
    live = [*params.attn_bank, *params.mlp_bank[:4, :128], *params.mlp_bank[:4, 128:]]
    assert len({x.tobytes() for x in live}) == len(live)


def test_seed_decides_every_random_value():
    one, other = born(1)["params"], born(1, seed=8)["params"]
    again = initializer(1)(np.uint32(7))["params"]
    for name in one:
        np.testing.assert_array_equal(one[name], again[name])
        live = np.asarray(one[name]) != 0
        if name in (*MUON, "head", "embed", "value_tables"):
            assert (np.asarray(one[name]) != np.asarray(other[name]))[live].mean() > 0.99
        else:
            np.testing.assert_array_equal(one[name], other[name])


def test_values_do_not_depend_on_the_device_count():
    """Nor on the padding."""
    jax.tree.map(np.testing.assert_array_equal, whole(born(1)), whole(born(8)))


def test_values_do_not_depend_on_the_other_parameters(monkeypatch):
    """Each has its own key, made from its name. Here it is alone in the table, and not compiled,
    which rounds a little otherwise."""
    full = T.param_table(WIDE)
    for name in ("head", "mlp_bank"):
        monkeypatch.setattr(T, "param_table", lambda cfg, name=name: {name: full[name]})
        alone = T.init_state(WIDE, 1, 7)
        np.testing.assert_allclose(alone["params"][name], born(1)["params"][name], rtol=3e-7)
