"""Parameters: the table, the state made from it, its values, and the padding on devices."""

import functools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import small_config
from jax.sharding import PartitionSpec as P
from programs import mesh_of, strip_padding

import train_gpt as T

RECORD = T.Config()
BANKS = ("qk_bank", "vo_bank", "mlp_bank")
TABLES = ("head", "embed", "value_tables", "ngram_table")


# ------------------------------------------------------------------------------------------------
# The table of the record, once more
# ------------------------------------------------------------------------------------------------

# name: shape, rate, decay, betas. Rates are multiples of 0.008, decays of 0.005.
ADAM_ROWS = {
    "head": ((50_304, 768), 1, 150, (0.5, 0.95)),
    "embed": ((50_304, 768), 1, 150, (0.5, 0.95)),
    "value_tables": ((4 * 50_304, 768), 70, 5, (0.75, 0.95)),
    "ngram_table": ((42_301_440, 768), 70, 5, (0, 0.95)),
    "value_gate": ((3, 6, 12), 1, 1, (0.9, 0.99)),
    "smear_gate": ((1, 12), 0.01, 0, (0.9, 0.99)),
    "resid_lambdas": ((11, 2), 5, 0, (0.9, 0.95)),
    "post_lambdas": ((11, 2), 1, 0, (0.9, 0.95)),
    "qkv_lambda": ((11,), 5, 0, (0.9, 0.99)),
    "o_lambda": ((11,), 5, 0, (0.9, 0.99)),
    "smear_lambda": ((1,), 5, 0, (0.9, 0.99)),
    "skip_lambda": ((1,), 5, 0, (0.9, 0.99)),
    "mudd_w1": ((2, 64, 768), 0.25, 1, (0.9, 0.99)),
    "mudd_w2": ((2, 14, 64), 0.25, 1, (0.9, 0.99)),
    "mudd_b2": ((2, 14), 0.25, 0, (0.9, 0.99)),
    "mudd_w2g": ((14, 12, 64), 0.25, 1, (0.9, 0.99)),
    "gate_w1": ((2, 64, 768), 0.1, 1, (0.9, 0.99)),
    "gate_w2": ((2, 23, 64), 0.1, 1, (0.9, 0.99)),
    "gate_b2": ((2, 23), 0.1, 0, (0.9, 0.99)),
    "gate_scale": ((1,), 0.1, 0, (0.9, 0.99)),
}
SMALL = {*ADAM_ROWS} - {*TABLES}
AVERAGES = {
    "head": (("ema", 0.65),),
    "embed": (("ema", 0.65),),
    "value_tables": (("planes", 1.0),),
    "qk_bank": (("blend", 0.55),),
    "vo_bank": (("average", 1.0), ("blend", 0.55 - 0.2007)),
    "mlp_bank": (("average", 1.0), ("blend", 0.55 - 0.2007)),
}


def test_the_table_is_complete():
    assert {*T.param_table(RECORD)} == {*ADAM_ROWS, *BANKS}


@pytest.mark.parametrize("name", ADAM_ROWS)
def test_rows_of_adam(name):
    row, (shape, rate, decay, betas) = T.param_table(RECORD)[name], ADAM_ROWS[name]
    assert (row.optimizer, row.shape) == ("rows" if name == "ngram_table" else "adam", shape)
    assert row.updated_by == ("tables" if name in ("value_tables", "ngram_table") else "adam")
    assert row.lr == pytest.approx(0.008 * rate, rel=1e-12)
    assert row.decay == pytest.approx(0.005 * decay, rel=1e-12)
    assert (row.betas, row.scale, row.count) == (betas, (), math.prod(shape))
    assert row.tied_to == ("head" if name == "embed" else "")
    assert row.dtype == ("bfloat16" if name == "ngram_table" else "float32")


def test_rows_of_anvil():
    """Seven layers of q and k by two heads, v and o; 12 up- and 12 down-projections, of which those
    of layer 7 are dead."""
    qk, vo, mlp = (T.param_table(RECORD)[name] for name in BANKS)
    assert (qk.shape, vo.shape) == ((7 * 2 * 3, 256, 768), (7 * 2, 768, 768))
    assert mlp.shape == (24, 2816, 768)
    for row in (qk, vo, mlp):
        assert (row.optimizer, row.updated_by, row.tied_to) == ("anvil", "anvil", "")
        assert (row.lr, row.decay) == (0.023, 2.25)
    assert (qk.scale, vo.scale) == ((1.0,) * 42, (1.0,) * 14)
    tall = [math.sqrt(2816 / 768) * (slot != 7) for slot in range(12)]
    assert mlp.scale == pytest.approx((*tall, *(2 * x for x in tall)), rel=1e-12)


@pytest.mark.parametrize("name", [*ADAM_ROWS, *BANKS])
def test_what_is_averaged_at_the_end(name):
    row = T.param_table(RECORD)[name]
    assert row.averages == AVERAGES.get(name, ())
    assert row.rescaled == (name in AVERAGES and name != "value_tables")


def test_rates_and_decays_of_the_config_reach_their_rows():
    cfg = small_config(lr_anvil=3.0, decay_anvil=5.0, lr_adam=0.5, decay_adam=7.0)
    for name, row in T.param_table(cfg).items():
        rate, decay = (6, 5 / 7) if name in BANKS else ADAM_ROWS[name][1:3]
        assert row.lr == pytest.approx(0.5 * rate, rel=1e-12), name
        assert row.decay == pytest.approx(7.0 * decay, rel=1e-12), name


def test_numbers_of_the_record_by_hand():
    counts = {name: row.count for name, row in T.param_table(RECORD).items()}
    tables = {name: counts.pop(name) for name in TABLES}
    assert tables == {
        "head": 38_633_472,
        "embed": 38_633_472,
        "value_tables": 154_533_888,
        "ngram_table": 32_487_505_920,
    }
    assert counts.pop("qk_bank") == counts.pop("vo_bank") == 7 * 2 * 768 * 768
    assert counts.pop("mlp_bank") == 12 * 2 * 2816 * 768
    gates = 216 + 12 + 98_304 + 46 * 64 + 46 + 1
    mudd = 98_304 + 28 * 64 + 28 + 14 * 12 * 64
    assert sum(counts.values()) == gates + mudd + 4 * 11 + 2 * 11 + 2
    assert sum(row.count for row in T.param_table(RECORD).values()) == 32_787_938_803


def test_flops_of_the_record_by_hand():
    """6 for every weight of a matmul that is used: of half wide q and k in five layers, of whole
    ones in two, of half wide v and o in two and whole ones in five, of eleven MLPs, of the rows of
    the head that are candidates; not for the tables."""
    attention = 768 * 2 * (5 * 384 + 2 * 768 + 2 * 384 + 5 * 768)
    mlps = 11 * 2 * 2816 * 768
    for step, ids in ((0, 10_240), (681, 14_336), (1106, 24_576), (1107, 50_304)):
        assert T.flops_per_token(RECORD, step) == 6 * (attention + mlps + ids * 768)


@pytest.mark.parametrize("name", [*ADAM_ROWS, *BANKS])
def test_what_is_large_is_cut_over_the_devices_and_the_rest_is_whole(name):
    large = name not in SMALL
    assert T.param_table(RECORD)[name].sharded == large
    for arrays in T.abstract_state(RECORD, mesh_of(8)).values():
        if name in arrays:
            assert arrays[name].sharding.spec == (P("data") if large else P())


# ------------------------------------------------------------------------------------------------
# Other sizes
# ------------------------------------------------------------------------------------------------


def test_shapes_follow_the_layers():
    """No size need be a multiple of anything. Three layers attend, two have values; of the MLPs one
    is dead and one has another two beside it."""
    cfg = small_config(
        layers=(
            T.Layer("short", values=True, xsa=True, ngram=True, mlps=3),
            T.Layer("paired", x0=True),
            T.Layer(mlps=0),
            T.Layer("long", values=True, gated=True, ngram=True),
        ),
        skip=(0, 1),
        source=2,
        vocab=101,
        ngram_rows=522,
    )
    small = {"mudd_w1": (2, 8, 32), "mudd_w2": (2, 14, 8), "mudd_b2": (2, 14)}
    small |= {"gate_w1": (2, 8, 32), "gate_w2": (2, 7, 8), "gate_b2": (2, 7), "gate_scale": (1,)}
    assert {name: row.shape for name, row in T.param_table(cfg).items()} == {
        "head": (101, 32),
        "embed": (101, 32),
        "value_tables": (2 * 101, 32),
        "ngram_table": (522, 32),
        "qk_bank": (3 * 2 * 2, 16, 32),
        "vo_bank": (3 * 2, 32, 32),
        "mlp_bank": (2 * 6, 128, 32),
        "value_gate": (1, 4, 12),
        "smear_gate": (1, 12),
        **dict.fromkeys(("resid_lambdas", "post_lambdas"), (4, 2)),
        **dict.fromkeys(("qkv_lambda", "o_lambda"), (4,)),
        **dict.fromkeys(("smear_lambda", "skip_lambda"), (1,)),
        "mudd_w2g": (14, 8, 8),
        **small,
    }
    assert T.param_table(cfg)["mlp_bank"].scale == (2, 2, 0, 2, 2, 2, 4, 4, 0, 4, 4, 4)
    assert T.mlp_slots(cfg) == ([(0, 4, 5), (1,), (), (3,)], 6)
    first, second = T.gate_slices(cfg)
    assert first == {("xsa", 0): slice(0, 4), ("ngram", 0): slice(4, 5)}
    assert second == {
        ("gated", 3): slice(0, 4),
        ("x0", 1): slice(4, 5),
        ("ngram", 3): slice(5, 6),
        ("skip", 1): slice(6, 7),
    }


@pytest.mark.parametrize("width, tall", [(32, 2.0), (128, 1.0), (256, 1.0)])
def test_factors_of_up_and_down_matrices(width, tall):
    """sqrt(128 / width) but at least 1, and twice that; 0 for layer 2, which has no MLP."""
    scale = T.param_table(small_config(width=width, mlp_width=128))["mlp_bank"].scale
    one = [tall, tall, 0, tall, tall, tall]
    np.testing.assert_allclose(scale, one + [2 * x for x in one])


# ------------------------------------------------------------------------------------------------
# The state
# ------------------------------------------------------------------------------------------------


# Large enough to measure a standard deviation; eight devices share none of the tables and not all
# of the banks equally.
WIDE = small_config(width=128, mlp_width=256, vocab=1021, ngram_rows=1022)


@functools.cache
def initializer(devices: int):
    return T.start_state(WIDE, mesh_of(devices))


@functools.cache
def born(devices: int, seed: int = 7):
    """The state of WIDE as it is made on so many devices."""
    return initializer(devices)(np.uint32(seed))


def whole(state):
    """A state without its padding, as NumPy arrays."""
    return {kind: jax.device_get(strip_padding(WIDE, arrays)) for kind, arrays in state.items()}


def test_the_kinds_of_the_state():
    """Adam has two moments, the n-gram table a mean square of each row, ANVIL two averages and mean
    squares of the lanes along the longer side; what is averaged at the end has its averages."""
    table, kinds = T.param_table(WIDE), {"params": dict.fromkeys(T.param_table(WIDE), ...)}
    for kind in ("first", "second"):
        kinds[kind] = dict.fromkeys(set(ADAM_ROWS) - {"ngram_table"}, ...)
    kinds["second"]["ngram_table"] = (1022,)
    kinds |= {kind: dict.fromkeys(BANKS, ...) for kind in ("fast", "slow")}
    kinds["equaliser"] = {"qk_bank": (16, 128), "vo_bank": (8, 128), "mlp_bank": (12, 256)}
    for name, tails in AVERAGES.items():
        for tail, _ in tails:
            kinds.setdefault(tail, {})[name] = ...
    assert {kind: {*arrays} for kind, arrays in born(1).items()} == {
        kind: {*names} for kind, names in kinds.items()
    }
    for kind, arrays in born(1).items():
        for name, array in arrays.items():
            shape = table[name].shape if kinds[kind][name] is ... else kinds[kind][name]
            assert (array.shape, array.dtype) == (shape, np.float32), (kind, name)


def test_of_the_masters_only_the_ngram_table_may_be_short():
    for dtype in ("float32", "bfloat16"):
        state = T.abstract_state(small_config(compute_dtype=dtype), mesh_of(1))
        short = {(k, n) for k, of in state.items() for n, x in of.items() if x.dtype == "bfloat16"}
        assert short == ({("params", "ngram_table")} if dtype == "bfloat16" else set())


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
            share = rows if name in SMALL else math.ceil(rows / devices)
            assert array.sharding.shard_shape(array.shape)[0] == share, (kind, name)
            assert array.shape[0] == (rows if name in SMALL else share * devices)


def test_padding_starts_at_zero():
    """Of the tables and of one bank."""
    for kind, arrays in born(8).items():
        for name, array in arrays.items():
            padding = np.asarray(array)[T.param_table(WIDE)[name].shape[0] :]
            want = {"head": 3, "embed": 3, "value_tables": 1, "ngram_table": 2, "mlp_bank": 4}
            assert len(padding) == want.get(name, 0) and not padding.any(), (kind, name)


def test_the_record_on_eight_devices_has_whole_matrices():
    """42 matrices of q and k are 48 of which each device owns six, 14 of v and o are 16; the rest
    divides as it is."""
    state, table = T.abstract_state(RECORD, mesh_of(8)), T.param_table(RECORD)
    for name, leaf in state["params"].items():
        rows = {"qk_bank": 48, "vo_bank": 16}.get(name, table[name].shape[0])
        assert leaf.shape == (rows, *table[name].shape[1:]), name


@pytest.mark.parametrize("cuts, rows", [(1, 14), (2, 14), (3, 15), (4, 16), (5, 15), (8, 16)])
def test_what_does_not_divide_is_padded_with_zeros(cuts, rows):
    table = T.param_table(RECORD)
    assert T.padded_shape((14, 3, 5), table["vo_bank"], cuts) == (rows, 3, 5)
    assert T.padded_shape((14, 3), table["vo_bank"], cuts) == (rows, 3)  # its mean squares
    assert T.padded_shape((11, 2), table["resid_lambdas"], cuts) == (11, 2)  # not cut
    x = 1 + np.arange(14 * 3, dtype=np.float32).reshape(14, 3)
    np.testing.assert_array_equal(T.pad_rows(x, rows), [*x, *np.zeros((rows - 14, 3))])


# ------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def params():
    """The first parameters, as NumPy arrays."""
    return SimpleNamespace(**whole(born(1))["params"])


@pytest.mark.parametrize("name, std", [("head", 0.005), ("embed", 0.005), ("value_tables", 0.01)])
def test_tables_are_normal(name, std, params):
    """130,688 draws or three times as many: the std is good to 0.2 %, the mean to 0.003 std."""
    values = getattr(params, name) / std
    assert abs(values.mean()) < 0.015 and abs(values.std() - 1) < 0.01
    assert 3.5 < np.abs(values).max() < 7
    assert abs(np.mean(values**4) - 3) < 0.15  # not a uniform's 1.8


def test_the_embedding_starts_as_the_head(params):
    np.testing.assert_array_equal(params.embed, params.head)


def test_value_tables_of_different_layers_differ(params):
    one, two, _ = np.split(params.value_tables, 3)
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(one.ravel(), params.head.ravel())[0, 1]) < 0.02


UNIFORM = {"qk_bank": 0.5, "vo_bank": 0.5, "mlp_bank": 0.5}  # std times the root of the width
UNIFORM |= dict.fromkeys(("mudd_w1", "gate_w1"), 1 / math.sqrt(3))


@pytest.mark.parametrize("name", UNIFORM)
def test_matrices_are_uniform(name, params):
    """Output projections of attention too; 1,024 draws of a small one: the std is good to 1.5 %."""
    bank, std = getattr(params, name), UNIFORM[name] / math.sqrt(128)
    for values in bank[:6]:  # of the MLPs the up-projections
        assert abs(values.std() / std - 1) < 0.05 and abs(values.mean()) < 0.1 * std
        assert 1.69 * std < np.abs(values).max() <= math.sqrt(3) * std * (1 + 1e-6)
        assert abs(np.mean((values / std) ** 4) - 1.8) < 0.2  # not a normal's 3


def test_down_projections_start_at_zero(params):
    assert not params.mlp_bank[6:].any()


def test_small_parameters_start_at_their_constants(params):
    """Gates where they would stand without a token's say: of layers' lanes, see gate_slices."""
    mudd = np.zeros((2, 14))
    mudd[0] = [0, 0, 0, 0, 0, 0, 20, 20, 10 * math.sqrt(1.1), 10, 0, 0.5, 10 * math.sqrt(1.1), 10]
    mudd[1, 1] = -5
    first = [0, 0, 0, 0, 2.5, 2.5, 2.5, 2.5, 0, 0.5]  # XSA, gated heads, x0, n-grams
    second = [2.5, 2.5, 2.5, 2.5, 0, 0.5, 5, 0, 0, 0]  # gated heads, x0, n-grams, skip
    starts = {"mudd_b2": mudd, "gate_b2": np.array([first, second]), "gate_scale": 0.1}
    zeros = "value_gate", "smear_gate", "smear_lambda", "mudd_w2", "mudd_w2g", "gate_w2"
    starts |= dict.fromkeys((*zeros, "ngram_table"), 0)
    starts |= {"resid_lambdas": math.sqrt(1.1), "post_lambdas": 1, "qkv_lambda": 0.5}
    starts |= {"o_lambda": 1, "skip_lambda": -1.5}
    assert {*starts} == SMALL - {*UNIFORM} | {"ngram_table"}
    for name, want in starts.items():
        found = getattr(params, name)
        want = np.broadcast_to(want, found.shape)
        np.testing.assert_allclose(found, want, rtol=1e-7, err_msg=name)


def test_all_but_the_parameters_starts_at_zero():
    state = born(1)
    assert not any(np.any(x) for kind in {*state} - {"params"} for x in state[kind].values())


def test_no_two_matrices_are_equal(params):
    live = [*params.qk_bank, *params.vo_bank, *params.mlp_bank[:6], *params.mudd_w1]
    live += [*params.gate_w1]
    assert len({x.tobytes() for x in live}) == len(live)


def test_seed_decides_every_random_value():
    one, other = born(1)["params"], born(1, seed=8)["params"]
    again = initializer(1)(np.uint32(7))["params"]
    for name in one:
        np.testing.assert_array_equal(one[name], again[name])
        live = np.asarray(one[name]) != 0
        if name in (*UNIFORM, "head", "embed", "value_tables"):
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
