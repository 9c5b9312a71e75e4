"""Parameters: the table, the state made from it, its values, and the padding of the banks."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from jax.sharding import PartitionSpec as P

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
    assert (row.spare, row.scale) == (0, ())
    assert row.count == math.prod(shape)
    assert row.twin == ("head" if name == "embed" else "")


def test_rows_of_muon():
    """10 layers of q, k, v, o; 11 up- and 11 down-projections, and two matrices of padding."""
    attn, mlp = (T.param_table(RECORD)[name] for name in MUON)
    assert (attn.shape, mlp.shape) == ((40, 768, 768), (24, 3072, 768))
    assert (attn.spare, mlp.spare) == (0, 2)
    for row in (attn, mlp):
        assert (row.optimizer, row.lr, row.decay, row.twin) == ("muon", 0.023, 1.2, "")
    assert attn.scale == (1.0,) * 40
    assert mlp.scale[:22] == (2.0,) * 11 + (4.0,) * 11 and len(mlp.scale) == 24


def test_rates_and_decays_of_the_config_reach_their_rows():
    cfg = small_config(lr_muon=3.0, decay_muon=5.0, lr_adam=0.5, decay_adam=7.0)
    for name, row in T.param_table(cfg).items():
        rate, decay = (6, 5 / 7) if name in MUON else ADAM_ROWS[name][1:3]
        assert row.lr == pytest.approx(0.5 * rate, rel=1e-12), name
        assert row.decay == pytest.approx(7.0 * decay, rel=1e-12), name


def test_numbers_of_the_record_by_hand():
    """Without the padding."""
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
    """6 for every weight of a matmul: neither the padding nor the tables."""
    assert T.flops_per_token(RECORD) == 6 * (23_592_960 + 51_904_512 + 38_633_472)


@pytest.mark.parametrize("name", ADAM_ROWS | dict.fromkeys(MUON))
def test_what_is_large_is_cut_into_eight_and_the_rest_is_whole(name):
    row = T.param_table(RECORD)[name]
    large = name not in STARTS
    assert row.sharded == large and T.partition(row) == (P("data") if large else P())
    assert not large or row.shape[0] % T.STATE_CUTS == 0


# ------------------------------------------------------------------------------------------------
# Other sizes: shapes, padding
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
def test_shapes_and_padding_follow_the_layers(layers, attn, mlp):
    """Banks are filled up to a multiple of 8, which is not counted."""
    cfg = sized(layers)
    table = T.param_table(cfg)
    attends, values = layers - 1, min(2, layers - 1)
    assert {name: row.shape for name, row in table.items()} == {
        "head": (104, 32),
        "embed": (104, 32),
        "value_tables": (values * 104, 32),
        "bigram_table": (520, 32),
        "attn_bank": (attn + -attn % 8, 32, 32),
        "mlp_bank": (mlp + -mlp % 8, 128, 32),
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
    assert table["attn_bank"].scale == (1.0,) * (attn + -attn % 8)
    assert table["mlp_bank"].scale[:mlp] == (2.0,) * layers + (4.0,) * layers


# ------------------------------------------------------------------------------------------------
# The state
# ------------------------------------------------------------------------------------------------


@functools.cache
def born(devices: int, seed: int = 7):
    """The state of WIDE as its compiled initializer makes it."""
    return initializer(devices)(np.uint32(seed))


@functools.cache
def initializer(devices: int):
    return T.lower_init(WIDE, T.make_mesh(WIDE, jax.devices()[:devices])).compile()


# Large enough to measure a standard deviation. 3 attention layers of the small config and 4 MLPs
# are 12 matrices, padded to 16, and 8; a fifth layer would pad both, and is not needed.
WIDE = small_config(width=128, mlp_width=256, vocab=1024, bigram_rows=1024)
BANKS = {"attn_bank": (16, 128, 128), "mlp_bank": (8, 256, 128)}


def test_the_state_is_a_tree_of_four_kinds():
    """Muon has a mean square per row of a matrix, and sums wait only for Adam."""
    state, table = born(1), T.param_table(WIDE)
    assert {*state} == {"params", "first", "second", "sums"}
    for kind in ("params", "first", "second"):
        assert {*state[kind]} == {*table}
    assert {*state["sums"]} == {*table} - {*MUON}
    for kind, arrays in state.items():
        for name, array in arrays.items():
            whole = BANKS.get(name, table[name].shape)
            shape = whole[:2] if kind == "second" and name in MUON else whole
            assert (array.shape, array.dtype) == (shape, np.float32), (kind, name)


@pytest.mark.parametrize("devices", [1, 8])
def test_abstract_state_agrees_with_the_state(devices):
    """Structure, shapes, types and where every share lies."""
    abstract = T.abstract_state(WIDE, T.make_mesh(WIDE, jax.devices()[:devices]))

    def same(x, y):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, len(x.shape))
        return True

    assert jax.tree.all(jax.tree.map(same, abstract, born(devices)))


@pytest.mark.parametrize("devices", [1, 8])
def test_state_is_born_in_its_shards(devices):
    for kind, arrays in born(devices).items():
        for name, array in arrays.items():
            parts = 1 if name in STARTS else devices
            shard = array.sharding.shard_shape(array.shape)
            assert shard == (array.shape[0] // parts, *array.shape[1:]), (kind, name)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_record_can_be_cut_for_every_device_count(devices):
    state = T.abstract_state(RECORD, T.make_mesh(RECORD, jax.devices()[:devices]))
    for x in jax.tree.leaves(state):
        shard = x.sharding.shard_shape(x.shape)  # raises where it does not divide
        assert x.size < 10_000 or math.prod(shard) * devices == x.size


# ------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def params():
    """The first parameters, as NumPy arrays."""
    return SimpleNamespace(**{name: np.asarray(x) for name, x in born(1)["params"].items()})


@pytest.mark.parametrize("name, std", [("head", 0.005), ("embed", 0.005), ("value_tables", 0.01)])
def test_tables_are_normal(name, std, params):
    """131,072 draws or twice as many: the std is good to 0.2 %, the mean to 0.003 std."""
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


def test_down_projections_and_padding_start_at_zero(params):
    assert not params.mlp_bank[4:].any()
    assert not params.attn_bank[12:].any()


def test_padding_of_both_banks_starts_at_zero():
    """Six layers: 20 of 24 matrices of attention, and 6 up-projections of 16 of the MLPs."""
    for (name, row), live, size in zip(
        T.bank_rows(sized(6)).items(), (20, 6), (24, 16), strict=True
    ):
        values = np.asarray(row.init(jax.random.key(0), row.shape))
        assert len(values) == size, name
        assert values[:live].any(axis=(1, 2)).all() and not values[live:].any()


@pytest.mark.parametrize("name", STARTS)
def test_small_parameters_start_at_their_constants(name, params):
    found = getattr(params, name)
    np.testing.assert_array_equal(found, np.full_like(found, STARTS[name]))


def test_optimizer_state_starts_at_zero():
    state = born(1)
    assert not any(np.any(x) for kind in ("first", "second", "sums") for x in state[kind].values())


def test_no_two_matrices_are_equal(params):
    live = [*params.attn_bank[:12], *params.mlp_bank[:4, :128], *params.mlp_bank[:4, 128:]]
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
    jax.tree.map(np.testing.assert_array_equal, born(1), born(8))


def test_values_do_not_depend_on_the_other_parameters(monkeypatch):
    """Each has its own key, made from its name. Here it is alone in the table, and not compiled,
    which rounds a little otherwise."""
    full = T.param_table(WIDE)
    for name in ("head", "mlp_bank"):
        monkeypatch.setattr(T, "param_table", lambda cfg, name=name: {name: full[name]})
        alone = T.init_state(WIDE, 7)
        np.testing.assert_allclose(alone["params"][name], born(1)["params"][name], rtol=3e-7)


# ------------------------------------------------------------------------------------------------
# Padding: matrices that only fill a bank up to a multiple of 8
# ------------------------------------------------------------------------------------------------


def test_the_model_never_reads_the_padding():
    """Not a number there, all finite in the output. So its gradient is zero, and the update of a
    zero matrix is zero (tests of the optimizers)."""
    cfg = sized(2)
    rng = np.random.default_rng(0)
    values = {
        name: rng.normal(0, 0.3, row.shape).astype(np.float32)
        for name, row in T.param_table(cfg).items()
    }
    tokens, hyper = jnp.arange(32)[None] % 97, T.hyper_at(cfg, 0)

    @jax.jit
    def run(params):
        rows = T.look_up(cfg, params, tokens)
        return T.forward(params, rows, tokens, cfg, (8, 32), hyper, T.ATTENTION["xla"])

    clean = run(values)
    for name, live in (("attn_bank", 4), ("mlp_bank", 4)):
        values[name][live:] = np.nan
    np.testing.assert_array_equal(run(values), clean)
    values["mlp_bank"][3] = np.nan  # the last that it does read
    assert np.isnan(run(values)).all()
