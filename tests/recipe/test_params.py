"""Parameters: sizes, initial values, padding. test_record92.py checks rates and weight decay."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import small_config
from programs import mesh_of, quick_compilation, strip_padding

import train_gpt as T

RECORD = T.Config()
TABLES = {"head", "embed", "value_tables", "ngram_table"}
BANKS = {"qk_bank", "vo_bank", "mlp_bank"}


def test_numbers_and_flops_of_the_record():
    """A token costs 6 per weight of a matmul: q and k (half as wide in five of seven layers), v and
    o (half as wide in two), eleven MLPs, and the candidates' rows of the head. Tables are free."""
    counts = {name: math.prod(row.shape) for name, row in T.param_specs(RECORD).items()}
    assert sum(counts.values()) == 32_783_613_427
    assert counts.pop("head") == counts.pop("embed") == 50_304 * 768
    assert counts.pop("value_tables") == 4 * 50_304 * 768
    assert counts.pop("ngram_table") == 32_487_505_920
    assert counts.pop("qk_bank") == counts.pop("vo_bank") == 7 * 2 * 768 * 768
    assert counts.pop("mlp_bank") == 11 * 2 * 2816 * 768
    gates = 216 + 12 + 98_304 + 46 * 64 + 46 + 1
    mudd = 98_304 + 28 * 64 + 28 + 14 * 12 * 64
    assert sum(counts.values()) == gates + mudd + 4 * 11 + 2 * 11 + 2
    attention = 768 * 2 * (5 * 384 + 2 * 768 + 2 * 384 + 5 * 768)
    mlps = 11 * 2 * 2816 * 768
    for step, ids in ((0, 10_240), (681, 14_336), (1106, 24_576), (1107, 50_304)):
        assert T.flops_per_token(RECORD, step) == 6 * (attention + mlps + ids * 768)


def test_shapes_follow_the_layers():
    """Three layers have attention, two have values; one has no MLP, one has three. No size is a
    multiple of the number of devices."""
    cfg = small_config(
        layers=(
            T.Layer("short", values=True, xsa=True, ngram=True, mlps=3),
            T.Layer("short", paired=True, x0=True, skip=1, new_gates=True),
            T.Layer(mlps=0),
            T.Layer("long", values=True, gated=True, ngram=True, reads_back=1, mudd=True),
        ),
        vocab=101,
        ngram_rows=522,
    )
    table = T.param_specs(cfg)
    assert {name: row.shape for name, row in table.items()} == {
        "head": (101, 32),
        "embed": (101, 32),
        "value_tables": (2 * 101, 32),
        "ngram_table": (522, 32),
        "qk_bank": (3 * 2 * 2, 16, 32),
        "vo_bank": (3 * 2, 32, 32),
        "mlp_bank": (2 * 5, 128, 32),
        "value_gate": (1, 4, 12),
        "smear_gate": (1, 12),
        **dict.fromkeys(("resid_lambdas", "post_lambdas"), (4, 2)),
        **dict.fromkeys(("qkv_lambda", "o_lambda"), (4,)),
        **dict.fromkeys(("smear_lambda", "skip_lambda", "gate_scale"), (1,)),
        **{"mudd_w2": (2, 14, 8), "mudd_b2": (2, 14), "mudd_w2g": (14, 8, 8)},
        **{"gate_w2": (2, 7, 8), "gate_b2": (2, 7)},
        **dict.fromkeys(("mudd_w1", "gate_w1"), (2, 8, 32)),
    }
    assert table["mlp_bank"].lr_factors == (2, 4) * 5


def test_learning_rates_and_weight_decay_of_the_config_are_used():
    changes = {"lr_anvil": 0.046, "decay_anvil": 6.75, "lr_adam": 0.016, "decay_adam": 0.015}
    other = T.param_specs(small_config(**changes))
    for name, row in T.param_specs(small_config()).items():
        assert other[name].lr == pytest.approx(2 * row.lr, rel=1e-12), name
        assert other[name].decay == pytest.approx(3 * row.decay, rel=1e-12), name


# Large enough to measure a standard deviation. On eight devices, all tables and some banks need
# padding.
WIDE = small_config(width=128, mlp_width=256, vocab=1021, ngram_rows=1022)


@functools.cache
def start(devices: int):
    """Return a cached function seed -> the initial state of WIDE on this number of devices."""
    with quick_compilation():
        return functools.cache(T.start_state(WIDE, mesh_of(devices)))


def test_kinds_of_state():
    """Adam has two moments, the n-gram table a mean square per row, and ANVIL two averages and mean
    squares of neurons. Parameters that are averaged at the end have averages."""
    table = T.param_specs(WIDE)
    want = {"params": {name: row.shape for name, row in table.items()}}
    for kind, names in (
        *((kind, table.keys() - BANKS - {"ngram_table"}) for kind in ("first", "second")),
        *((kind, BANKS) for kind in ("fast", "slow", "bank_ema")),
        *(("ema", {"head", "embed"}), ("value_average", {"value_tables"})),
        ("average", BANKS - {"qk_bank"}),
    ):
        want[kind] = {name: table[name].shape for name in names}
    want["second"]["ngram_table"] = (1022,)
    want["equaliser"] = {"qk_bank": (16, 128), "vo_bank": (8, 128), "mlp_bank": (10, 256)}
    state = start(1)(7)
    assert jax.tree.map(np.shape, state) == want
    assert {x.dtype for x in jax.tree.leaves(state)} == {np.dtype("float32")}
    assert not any(np.any(x) for kind in {*state} - {"params"} for x in state[kind].values())


def test_the_state_is_sharded_evenly_with_zeros_as_padding():
    """Tables and banks are sharded, small parameters replicated. The abstract state is the same."""
    table, abstract = T.param_specs(WIDE), T.abstract_state(WIDE, mesh_of(8))
    for kind, arrays in start(8)(7).items():
        for name, array in arrays.items():
            rows, sharded = table[name].shape[0], name in TABLES | BANKS
            share = math.ceil(rows / 8) if sharded else rows
            assert array.shape[0] == (share * 8 if sharded else rows), (kind, name)
            assert array.sharding.shard_shape(array.shape)[0] == share, (kind, name)
            assert not np.asarray(array)[rows:].any(), (kind, name)
            like = abstract[kind][name]
            assert (array.shape, array.dtype) == (like.shape, like.dtype)
            assert array.sharding.is_equivalent_to(like.sharding, array.ndim)


UNIFORM = {"qk_bank": 0.5, "vo_bank": 0.5, "mlp_bank": 0.5}  # std times the root of the width
UNIFORM |= dict.fromkeys(("mudd_w1", "gate_w1"), 1 / math.sqrt(3))
NORMAL = {"head": 0.005, "value_tables": 0.01}  # std


@pytest.fixture(scope="module")
def params():
    """The initial parameters as NumPy arrays."""
    return strip_padding(WIDE, start(1)(7)["params"])


def test_initial_tables_are_normal(params):
    """130,688 samples or more: the std is accurate to 0.2 %, the mean to 0.003 std."""
    for name, std in NORMAL.items():
        values = params[name] / std
        assert abs(values.mean()) < 0.015 and abs(values.std() - 1) < 0.01
        assert 3.5 < np.abs(values).max() < 7
        assert abs(np.mean(values**4) - 3) < 0.15  # a uniform distribution has 1.8
    np.testing.assert_array_equal(params["embed"], params["head"])
    planes = params["value_tables"].reshape(3, -1)
    assert np.abs(np.corrcoef(planes) - np.eye(3)).max() < 0.02


def test_initial_matrices_are_uniform_and_down_projections_zero(params):
    """Smallest: 1,024 samples, with an accuracy of the std of 1.5 %."""
    found = []
    for name, std in UNIFORM.items():
        std /= math.sqrt(128)
        live = params[name][::2] if name == "mlp_bank" else params[name]
        for values in live:
            assert abs(values.std() / std - 1) < 0.05 and abs(values.mean()) < 0.1 * std
            assert 1.69 * std < np.abs(values).max() <= math.sqrt(3) * std * (1 + 1e-6)
            assert abs(np.mean((values / std) ** 4) - 1.8) < 0.2  # a normal distribution has 3
        found += [x.tobytes() for x in live]
    assert len(set(found)) == len(found), "two matrices are equal"
    assert not params["mlp_bank"][1::2].any()


def test_initial_small_parameters_are_constants(params):
    """Gates begin with the values in coefficient_starts for every token."""
    mudd = np.zeros((2, 14))
    mudd[0] = [0, 0, 0, 0, 0, 0, 20, 20, 10 * math.sqrt(1.1), 10, 0, 0.5, 10 * math.sqrt(1.1), 10]
    mudd[1, 1] = -5
    first = [0, 0, 0, 0, 2.5, 2.5, 2.5, 2.5, 0, 0.5]  # XSA, gated heads, x0, n-grams
    second = [2.5, 2.5, 2.5, 2.5, 0, 0.5, 5, 0, 0, 0]  # gated heads, x0, n-grams, skip
    starts = {"mudd_b2": mudd, "gate_b2": np.array([first, second]), "gate_scale": 0.1}
    starts |= {"resid_lambdas": math.sqrt(1.1), "post_lambdas": 1, "qkv_lambda": 0.5}
    starts |= {"o_lambda": 1, "skip_lambda": -1.5}
    zeros = "value_gate", "smear_gate", "smear_lambda", "mudd_w2", "mudd_w2g", "gate_w2"
    starts |= dict.fromkeys((*zeros, "ngram_table"), 0)
    assert {*starts} == params.keys() - {*UNIFORM, *NORMAL, "embed"}
    for name, want in starts.items():
        want = np.broadcast_to(want, params[name].shape)
        np.testing.assert_allclose(params[name], want, rtol=1e-7, err_msg=name)


def test_the_seed_decides_every_random_value_and_nothing_else(params):
    """Devices and padding do not. Differently compiled programs round differently."""
    other = strip_padding(WIDE, start(1)(8)["params"])
    for name, values in strip_padding(WIDE, start(8)(7)["params"]).items():
        np.testing.assert_allclose(values, params[name], rtol=3e-7, atol=1e-8)
    for name, values in params.items():
        if name in (*UNIFORM, *NORMAL, "embed"):
            assert (values != other[name])[values != 0].mean() > 0.99
        else:
            np.testing.assert_array_equal(values, other[name])


def test_initial_values_do_not_depend_on_other_parameters(monkeypatch, params):
    """Each parameter has a key from its name. Here it is the only one, and not compiled."""
    full = T.param_specs(WIDE)
    monkeypatch.setattr(T, "param_specs", lambda cfg: {"mlp_bank": full["mlp_bank"]})
    alone = T.init_state(WIDE, 7)["params"]["mlp_bank"]
    np.testing.assert_allclose(alone, params["mlp_bank"], rtol=3e-7, atol=1e-8)


def test_signs_of_ngrams_are_balanced_and_depend_on_the_seed():
    signs = np.asarray(T.sign_pool(WIDE, 0))
    assert signs.dtype == np.int8 and signs.shape == (WIDE.sign_rows, WIDE.width)
    assert {*signs.ravel().tolist()} == {-1, 1} and abs(signs.mean()) < 0.05
    assert np.any(signs != T.sign_pool(WIDE, 1))


def test_a_bank_that_adam_updates_has_no_average():
    """Averages follow the steps of ANVIL. Here, they would stay zero, and replace the weights."""
    cfg = small_config()
    bank = T.by_anvil(cfg, (2, 32, 32))
    for row, has in ((bank, True), (replace(bank, optimizer="adam", updated_by="adam"), False)):
        averaged = T.with_averages(cfg, {"vo_bank": row})["vo_bank"]
        assert bool(averaged.averages) is has and averaged.rescaled is has
