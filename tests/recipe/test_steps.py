"""Programs on devices: results, communication and buffers. A complete training is the same on any
number of devices, and with only the source of Parts I to III."""

import functools
import inspect
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, small_config
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import CFG as THREE_STAGES
from programs import (
    by_name,
    features,
    jit,
    lay,
    mesh_of,
    named,
    padded,
    programs_of,
    quick,
    quick_compilation,
    run_steps,
    strip_padding,
    tables_joined,
    traced,
    val_batch,
)
from test_parts import LATER, RECIPE, section

import train_gpt as T

# Two stages instead of three, for fewer programs. Adam has updates after steps 1, 3, 5 and 7,
# tables after 1, 3 and 7. Head and embedding are untied after 5. Step 3 begins a stage, so its
# updates have gradients of both. Averages begin in the last steps. Four devices have two rows each,
# in two micro-batches, with logits in chunks and recomputed layers. All tables need padding. The
# array of three value tables has 309 rows, padded to 312, which is not three tables of 104 rows.
FIRST, SECOND, _ = THREE_STAGES.stages
CFG = replace(
    THREE_STAGES,
    vocab=103,
    extension=0,
    tied=0.5,
    stages=(replace(FIRST, share=3 / 8), replace(SECOND, share=5 / 8, candidates=(0,))),
    micro_tokens=32,
    loss_chunk=16,
    recompute=True,
)
DEVICES = 4
TABLE = T.param_specs(CFG)
SHARDED = {name for name, row in TABLE.items() if row.sharded}
BANKS = {name for name, row in TABLE.items() if row.optimizer == "anvil"}
KERNELS, _ = T.choose_kernels(CFG, jax.devices()[0])
# The encoding "bytes" has no prefixes. These words have prefixes, and some differ only in case or
# space, so ids for hashes of n-grams differ from token ids.
WORDS = [bytes([i]) for i in range(48)] + [bytes([i, 65 + i % 40]) for i in range(48)]


def random_state(cfg, tied=False):
    """Return a random state as NumPy arrays, with all moments. Larger weights make gradients less
    accurate: they have errors of 0.5 % at 0.3 and 0.5."""
    rng = np.random.default_rng(0)

    def leaf(shape, dtype, row):
        return rng.normal(0, 0.1 if row.sharded else 0.2, shape).astype(dtype)

    state = T.map_state(cfg, leaf)
    for kind in ("second", "equaliser"):
        state[kind] = {name: np.square(x) for name, x in state[kind].items()}
    for arrays in state.values():
        if tied and "embed" in arrays:
            arrays["embed"] = arrays["head"].copy()
    return state


def model_on(cfg, params, mesh):
    """Return (compute copies of parameters and signs; the n-gram table) on the mesh."""
    params = lay(cfg, params, mesh)
    with quick_compilation():
        return T.start_copies(cfg, mesh)(params, np.uint32(0)), params["ngram_table"]


def hyper_on(cfg, step, mesh, **changes):
    hyper = T.hyper_at(cfg, step)._replace(**{k: np.float32(v) for k, v in changes.items()})
    return jax.tree.map(lambda x: T.put(x, mesh, P()), hyper)


def batch_of(cfg, step, mesh, shards, **changes):
    """Return (Rows in NumPy, Batch on the mesh) of a step from the start of the shards."""
    stream, known = T.TokenStream(shards, "train", BOS), T.vocabulary(cfg, WORDS)
    batch, _ = T.next_batch(cfg, mesh, stream, known, step, T.loader_state(cfg, mesh))
    return jax.device_get(batch.rows), batch._replace(hyper=hyper_on(cfg, step, mesh, **changes))


def dense(request):
    """Return the gradient [rows, d] of the n-gram table from the results of a `grads` program."""
    wanted, grads = (np.asarray(x) for x in request)
    rows = padded(TABLE["ngram_table"].shape, TABLE["ngram_table"], DEVICES)[0]
    wanted = wanted.reshape(DEVICES, DEVICES, -1)
    total, share = np.zeros((rows, grads.shape[-1]), np.float32), rows // DEVICES
    first = share * np.arange(DEVICES)[:, None, None]  # of the owner
    ids = np.where(wanted < share, wanted + first, -1).reshape(-1)
    grads = grads.reshape(-1, grads.shape[-1]).astype(np.float32)
    assert not np.any(grads[ids < 0])
    np.add.at(total, ids[ids >= 0], grads[ids >= 0])
    return total


@pytest.mark.slow
def test_gradients_of_micro_batches_on_devices_equal_the_full_batch(shards):
    """Compare with autodiff of the weighted sum of losses over the candidates of each row, averaged
    over rows. The reported loss is the plain mean over next tokens."""
    cfg, mesh, weights = CFG, mesh_of(DEVICES), np.float32([0.7, 1.9])
    params = random_state(cfg)["params"]
    rows, batch = batch_of(cfg, 0, mesh, shards, loss_weights=weights)
    model = model_on(cfg, params, mesh)
    got, loss, _ = programs_of(cfg, DEVICES)["grads0"](*model, batch)
    inputs, targets, all_targets = (
        rows.tokens[:, :-1],
        rows.tokens[:, 1:].astype(np.int32),
        rows.targets,
    )
    places = T.spread(T.ngram_hashes(rows.hashed, cfg.ngram_rows), cfg.ngram_rows)
    prefixes = np.take_along_axis(all_targets.candidates, np.maximum(all_targets.prefixes, 0), 1)
    has_prefix, signs = all_targets.prefixes >= 0, jnp.asarray(np.asarray(model[0]["signs"]))
    assert 0.1 < has_prefix.mean() < 0.8

    def losses(params):
        plain = replace(cfg, recompute=False)
        model = T.Model(params, plain, T.PLAIN, cfg.stages[0], T.hyper_at(cfg, 0), signs)
        x = features(model, inputs, rows.hashed, places.swapaxes(0, 1))
        capped = T.cap_logits(x @ params["head"].T, cfg)
        among = jnp.take_along_axis(capped, all_targets.candidates[:, None], 2)
        total = jnp.log(jnp.sum(jnp.exp(among), axis=2))

        def ahead(ids, k=0):
            picked = jnp.take_along_axis(capped[:, : 32 - k], ids[:, k:, None], 2)[..., 0]
            return total[:, : 32 - k] - picked

        plain = jnp.sum(ahead(targets))
        weighted = weights[0] * plain + weights[1] * jnp.sum(ahead(targets, 1))
        return (weighted + 0.2 * jnp.sum(has_prefix * ahead(prefixes))) / 8, plain

    (_, plain), wanted = quick(jax.value_and_grad(losses, has_aux=True), params)
    assert loss.shape == () and loss.dtype == np.float32
    np.testing.assert_allclose(loss, plain / 256, rtol=2e-6)
    assert got.keys() == wanted.keys() == TABLE.keys()
    for name, row in TABLE.items():
        assert np.linalg.norm(wanted[name]) > 1e-4, name
        for x in jax.tree.leaves(got[name]):
            assert x.sharding == NamedSharding(mesh, P(T.AXIS))
        if name == "ngram_table":
            total = dense(got[name])
        else:
            total = np.asarray(got[name])
            if row.optimizer != "anvil":  # a gradient per device
                total = total.reshape(DEVICES, *row.shape).sum(0)
        assert not total[row.shape[0] :].any()
        # With these parameters, both sides differ from float64 by up to 8e-4.
        error = np.linalg.norm(total[: row.shape[0]] - wanted[name])
        # Sums over all tokens may cancel (measured: 2e-4, and 1.3e-4 with jax 0.12).
        limit = 1e-3 if row.shape == (1,) else 3e-4 if name == "qkv_lambda" else 5e-5
        assert error < limit * np.linalg.norm(wanted[name]), name


def test_a_parameter_that_only_the_loss_reads_has_a_gradient(shards, monkeypatch):
    cfg, mesh, real = replace(CFG, layers=CFG.layers[:1]), mesh_of(1), T.batch_loss

    def loss(weights, *rest):
        weighted, plain = real(weights, *rest)
        return weighted + jnp.sum(weights["new"] * jnp.float32([1, 2, 3])), plain

    monkeypatch.setattr(T, "batch_loss", loss)
    program = by_name(T.programs(cfg, mesh, T.PLAIN))["grads0"]
    copies, *rest = program.args
    args = copies | {"new": T.abstract(mesh, (3,), jnp.float32)}, *rest
    copies, table = model_on(cfg, random_state(cfg)["params"], mesh)
    _, batch = batch_of(cfg, 0, mesh, shards)
    with quick_compilation():
        step = replace(program, get_args=lambda: args).lower().compile()
    grads, *_ = step(copies | {"new": jnp.ones(3)}, table, batch)
    times = 8 // T.rows_together(cfg, 8, 32)  # micro-batches
    assert times > 1 and grads["new"].tolist() == [times, 2 * times, 3 * times]


def test_padding_is_never_read(shards):
    """With NaN as padding, losses and gradients are equal to those with zeros."""
    mesh, found = mesh_of(DEVICES), []
    model = model_on(CFG, random_state(CFG)["params"], mesh)
    rows, batch = batch_of(CFG, 3, mesh, shards)
    val = val_batch(CFG, mesh, T.vocabulary(CFG, WORDS), rows.tokens, 3)
    for padding in (0.0, np.nan):
        copies, table = jax.tree.map(np.array, model)
        for name in SHARDED - {"value_tables"}:
            (table if name == "ngram_table" else copies[name])[TABLE[name].shape[0] :] = padding
        likes = T.abstract_copies(CFG, mesh)
        copies = jax.tree.map(lambda x, like: T.put(x, mesh, like.sharding.spec), copies, likes)
        table = T.put(table, mesh, P(T.AXIS))
        for which, args in ((str(T.schedule(CFG).programs[3][0]), batch), ("eval", val)):
            found.append(jax.device_get(programs_of(CFG, DEVICES)[which](copies, table, args)))
    jax.tree.map(np.testing.assert_array_equal, found[:2], found[2:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_rows_of_micro_batches():
    """The largest number that fits and divides the rows, but at least one."""
    for tokens, rows, want in ((64, 8, 2), (63, 8, 1), (999, 8, 8), (160, 6, 3), (16, 8, 1)):
        batch = T.Rows(np.arange(rows * 33).reshape(rows, 33), None, None, None)
        got = T.micro_batches(small_config(micro_tokens=tokens), batch).tokens
        np.testing.assert_array_equal(got, batch.tokens.reshape(rows // want, want, 33))


SHORT = replace(CFG, compute_dtype="bfloat16")
SENDS = "all_gather", "reduce_scatter", "psum", "all_to_all", "ppermute"


@functools.cache
def of_short(name: str):
    """Return a traced program of SHORT on two devices."""
    mesh = mesh_of(2)
    return traced(by_name(T.programs(SHORT, mesh, KERNELS))[name], mesh)


def equations(jaxpr, in_loop=False):
    """Yield (equation, whether it is in a loop) of a jaxpr and its inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn, in_loop
        loops = in_loop or eqn.primitive.name in ("scan", "while")
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, loops)


PIECES = padded(TABLE["mlp_bank"].shape, TABLE["mlp_bank"], 2)[0] // 2
SMALL = len(TABLE.keys() - SHARDED)


@pytest.mark.parametrize(
    ("name", "gathered", "scattered", "summed", "exchanged"),
    [
        # Two banks, and the pieces of the MLPs' bank; the loss with the count of n-grams; requests
        # of n-grams, their rows and their gradients.
        ("grads0", 2 + PIECES, 2 + PIECES, 1, 3),
        ("anvil", 0, 0, 0, 0),
        ("adam", 2, 2, SMALL, 0),
        ("adam_tied", 1, 1, SMALL, 0),
        ("tables0-0", 1, 1, 0, 0),
        ("finish", 3, 0, 5 * 2, 0),  # norms before and after
        ("eval", 2 + PIECES, 0, 1, 2),
    ],
)
def test_each_parameter_is_sent_once_in_bfloat16_and_sums_are_float32(
    name, gathered, scattered, summed, exchanged
):
    """Programs of gradients gather and reduce-scatter banks. For other parameters, an update
    reduces the gradients, and gathers the changed parameters. Loops have no communication:
    gradients of micro-batches are summed before, in float32."""
    program, sent, loops = of_short(name), Counter(), []
    for eqn, in_loop in equations(program.jaxpr.jaxpr):
        if kind := next((x for x in SENDS if eqn.primitive.name.startswith(x)), None):
            types = {x.aval.dtype.name for x in eqn.invars}
            assert not in_loop and len(types) == 1
            sent[kind, *types] += len(eqn.invars)
        if eqn.primitive.name == "scan":
            loops.append([x.aval.dtype.name for x in eqn.outvars])
    want = Counter({("psum", "float32"): summed})
    want["all_gather", "bfloat16"] += gathered
    want["reduce_scatter", "bfloat16"] += scattered
    want["all_to_all", "int32"] += exchanged > 0
    want["all_to_all", "bfloat16"] += max(exchanged - 1, 0)
    assert sent == +want
    if name == "grads0":
        sums = max(loops, key=len)
        assert len(sums) > len(TABLE) and {*sums} == {"float32"}
    # Parameters, moments and losses are float32, except for the n-gram table.
    state, *rest = program.out_info
    if name not in ("grads0", "eval"):
        want = T.abstract_state(SHORT, mesh_of(2))
        assert jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype, state, want))
        short = {n for of in want.values() for n, x in of.items() if x.dtype != "float32"}
        assert short == {"ngram_table"} and rest[0].keys() <= TABLE.keys() - short
        for n, copy in rest.pop(0).items():
            dtype = SHORT.dtype if n in SHARDED else "float32"
            assert all(x.dtype == dtype for x in jax.tree.leaves(copy))
    assert {x.dtype.name for x in jax.tree.leaves(rest)} <= {"float32"}


def test_large_sums_over_devices_are_sent_in_parts_for_sparse_cores():
    """15 MB per device are sent in three parts, or in one if parts would not be multiples of 32
    rows. Two arrays are added and rounded first."""

    def both(x):
        in_parts = T.reduce_scatter((x, 2 * x), jnp.dtype("bfloat16"))
        total = (3 * x).astype(jnp.bfloat16)
        return in_parts, lax.psum_scatter(total, T.AXIS, tiled=True)

    specs = {"in_specs": P(T.AXIS), "out_specs": P(T.AXIS), "check_vma": False}
    both = jax.shard_map(both, mesh=mesh_of(2), **specs)
    for rows, parts in ((96, 3), (99, 1)):
        x = np.random.default_rng(rows).integers(-9, 9, (4 * rows, 80_000)).astype(np.float32)
        names = [eqn.primitive.name for eqn, _ in equations(jax.make_jaxpr(both)(x).jaxpr)]
        assert sum(name.startswith("reduce_scatter") for name in names) == parts + 1
        np.testing.assert_array_equal(*quick(both, x))


@pytest.fixture(scope="module")
def gradients(shards):
    """The gradients of a batch."""
    model = model_on(CFG, random_state(CFG)["params"], mesh_of(DEVICES))
    _, batch = batch_of(CFG, 0, mesh_of(DEVICES), shards)
    return programs_of(CFG, DEVICES)["grads0"](*model, batch)[0]


@pytest.mark.parametrize("name", ["anvil", "adam", "adam_tied", "tables0-0"])
def test_an_update_changes_its_own_parameters_in_place_and_their_copies(gradients, name):
    """It consumes the old state, but not the gradients. Shapes, dtypes and shardings stay."""
    mesh, program, tied = mesh_of(DEVICES), programs_of(CFG, DEVICES)[name], name == "adam_tied"
    key = named(CFG, name)
    start, own = random_state(CFG, tied), T.updated(CFG, key.kind)
    state = {kind: lay(CFG, arrays, mesh) for kind, arrays in start.items()}
    due = {n: (gradients[n],) * key.steps for n in own}
    hyper = hyper_on(CFG, 1, mesh, average_rates=[0.5] * 4)
    about = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    new, copies, norms = program(state, due, hyper)
    assert norms == {}  # log_norms is off
    assert not any(x.is_deleted() for x in jax.tree.leaves(due))
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), new) == about
    # While tied, the embedding is a copy of the head, and its old values are unused.
    old = {k: {n: x for n, x in of.items() if not tied or n != "embed"} for k, of in state.items()}
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    size = sum(np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(old))
    assert program.memory_analysis().alias_size_in_bytes >= 4 * size
    for kind, before in start.items():
        after = strip_padding(CFG, new[kind])
        moved = {n for n, x in before.items() if np.any(x != after[n])}
        assert moved == set(own) & set(before), kind
    pairs = [(of["embed"], of["head"]) for of in new.values() if "embed" in of]
    assert len(pairs) == 4 and all(np.array_equal(*pair) for pair in pairs) is tied
    assert set(copies) == set(own) - {"ngram_table"}
    for n, copy in tables_joined(copies).items():
        rows = TABLE[n].shape[0]
        np.testing.assert_array_equal(copy[:rows], new["params"][n][:rows])
        for x in jax.tree.leaves(copies[n]):
            assert x.sharding.is_fully_replicated == (n not in BANKS), n


def test_an_update_rounds_its_copies_to_bfloat16():
    """The next update starts from float32 parameters, so small changes are not lost."""
    mesh, start = mesh_of(1), random_state(SHORT)
    with quick_compilation():
        program = by_name(T.programs(SHORT, mesh, KERNELS))["adam"].lower().compile()
    due = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), program.args_info[0][1])
    state = {kind: lay(SHORT, arrays, mesh) for kind, arrays in start.items()}
    state, copies, _ = program(state, due, hyper_on(SHORT, 1, mesh, lr=1e-3))
    for name in T.updated(SHORT, "adam"):
        want = np.asarray(state["params"][name])
        assert np.any(want != start["params"][name]), name
        rounded = want.astype(SHORT.dtype) if TABLE[name].sharded else want
        np.testing.assert_array_equal(copies[name], rounded, err_msg=name)
    before = start["params"]["head"]
    moved = np.asarray(state["params"]["head"]) != before
    hidden = np.asarray(copies["head"]) == before.astype(SHORT.dtype)
    assert np.mean(moved & hidden) > 0.5


def test_programs_of_the_record_on_eight_devices():
    """Each device has one row."""
    found = by_name(T.programs(T.Config(), mesh_of(8), T.PLAIN))
    shapes = [(16_384, 10_240), (32_768, 10_240), (49_152, 14_336), (49_152, 24_576)]
    shapes += [(40_960, 0), (16_384, 0), (262_144, 0)]
    names = [*(f"grads{i}" for i in range(6)), "eval"]
    updates = ["adam", "adam_tied", "anvil"]
    updates += [f"tables{x}" for x in ("0-0", "1-1", "1-1-1-1", "1-2-2-2", "2-2-2-2", "2-2-2-3")]
    updates += [f"tables{x}" for x in ("3-3-3-3", "3-3-4-4", "4-4-4-4")]
    assert sorted(found) == sorted([*names, *updates, "finish"])
    for name, (t, candidates) in zip(names, shapes, strict=True):
        _, table, (rows, wanted, _) = found[name].args
        assert rows.tokens.shape == (8, t + 1) and rows.targets.candidates.shape == (8, candidates)
        assert wanted.shape == (8, 8, T.capacity(8 * t, 8))
        assert {x.sharding.spec for x in jax.tree.leaves((table, rows, wanted))} == {P(T.AXIS)}


@pytest.fixture(scope="module")
def validation(shards):
    """Return a function (finished steps, val_tokens) -> (validation loss, loss in float64)."""
    mesh, known, val = mesh_of(DEVICES), T.vocabulary(CFG, WORDS), T.TokenStream(shards, "val", BOS)
    params = random_state(CFG)["params"]
    tokens = val.read(0, CFG.val_tokens + 1).astype(np.int32)
    rows = tokens[:-1].reshape(-1, CFG.val_row)
    hashed = known.hashed_v[rows]
    places = T.spread(T.ngram_hashes(hashed, CFG.ngram_rows), CFG.ngram_rows)

    @jit
    def features_of(params, hyper):
        model = T.Model(params, CFG, T.PLAIN, None, hyper, T.sign_pool(CFG, 0))
        return features(model, rows, hashed, places.swapaxes(0, 1))

    def losses(done: int, count: int):
        x = features_of(params, T.hyper_at(CFG, max(done - 1, 0)))
        x = np.asarray(x, np.float64).reshape(-1, CFG.width)
        a, b, c = CFG.logit_cap
        logits = a / (1 + np.exp(-(x @ params["head"].T.astype(np.float64) + b) / c))
        each = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), tokens[1:]]
        loss = partial(programs_of(CFG, DEVICES)["eval"], *model_on(CFG, params, mesh))
        cfg = replace(CFG, val_tokens=count)
        got, _ = T.evaluate(cfg, loss, T.validation_batches(cfg, mesh, done, val, known))
        return got, each[:count].mean()

    return losses


def test_validation_is_the_plain_mean_over_the_first_val_tokens(validation):
    """Also in a stage that predicts two tokens. Rotation and scale belong to the last step, also if
    the next step (step 3, from 0) begins a stage."""
    found = {done: validation(done, CFG.val_tokens) for done in (0, 3, 8)}
    for got, want in found.values():
        assert got == pytest.approx(want, rel=1e-6)  # float32 sums of 512 losses
    assert found[0] == found[3] and found[0][0] != pytest.approx(found[8][0], rel=3e-6)


def test_padding_rows_of_the_last_validation_batch_do_not_count(validation):
    """As with 40 rows on 16 devices."""
    got, want = validation(3, CFG.val_tokens - 3 * CFG.val_row)
    assert got == pytest.approx(want, rel=1e-6)


def train(devices: int, folder, cfg=CFG) -> tuple[list[float], dict]:
    """Return (all losses, the last state) of a run."""
    return run_steps(cfg, mesh_of(devices), programs_of(cfg, devices), folder, WORDS)


def assert_same_training(got, want):
    """Compare results of `train` up to the order of float32 sums.

    Most differences are from ANVIL: orthogonalization multiplies small singular values, and their
    rounding errors, by up to a thousand. Measured: 2e-7 for losses, 5e-6 to 2.4e-5 for the
    state, depending on the CPU.
    """
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6)
    for kind, arrays in want[1].items():
        for name, x in arrays.items():
            assert np.any(x), (kind, name)
            error = np.linalg.norm(got[1][kind][name] - x) / np.linalg.norm(x)
            assert error < 5e-5, (kind, name)


class Log:
    """Replaces RunLog: stores losses and the last state."""

    def __init__(self, clock, folder):
        self.clock, self.folder, self.losses, self.cfg = clock, folder, [], CFG
        self.facts = {}

    def trained(self, result, loss):
        self.losses.append(loss)
        assert result.step == len(self.losses)

    def validated(self, step, loss, dropped):
        self.val_loss = loss

    def save(self, step, state, data):
        self.state = {kind: strip_padding(CFG, arrays) for kind, arrays in state.items()}

    def __getattr__(self, name):
        return lambda *_, **__: None


@pytest.fixture(scope="module")
def part_one(tmp_path_factory, shards):
    """Train with the source of Parts I to III, five more sections and the definitions in `source`,
    and with replacements of all other names. It uses one device, plain kernels and no
    micro-batches."""
    part, folder = ModuleType("part_one"), tmp_path_factory.mktemp("logs")
    part.__file__ = T.__file__
    sys.modules["part_one"] = part
    exec(compile(RECIPE, "part_one", "exec"), vars(part))
    alone = set(vars(part))
    titles = "Data checks", "Devices", "Programs", "Attention for any hardware"
    for title in titles:
        exec(f"from __future__ import annotations\n{section(title)}", vars(part))
    source = T.Prepared, T.prepare, T.Clock, T.StepResult, T.log_step, T.check_loss
    for each in source:
        exec("from __future__ import annotations\n" + inspect.getsource(each), vars(part))
    log = Log(part.Clock(), folder)

    def compile_all(cfg, mesh, kernels, say):
        programs = part.programs(cfg, mesh, kernels)
        return {n: program.lower().compile() for n, program in programs.items()}, {}

    def gather_banks(cfg, copies, after):
        sharded = {name: copies[name] for name in part.updated(cfg, "anvil")}

        def gather(banks):
            return jax.tree.map(lambda x: [*lax.all_gather(x, T.AXIS, tiled=True)], banks)

        whole, reduce = jax.vjp(gather, sharded)
        return after, copies | whole, lambda grads: reduce(grads)[0]

    def reduce_scatter(arrays, dtype):
        total = sum(x.astype(jnp.float32) for x in arrays)
        return lax.psum_scatter(total.astype(dtype), T.AXIS, tiled=True)

    assert not alone & {name for names in LATER.values() for name in names}
    checks = "check_memory", "memory_limit", "warm_up", "demonstrate"
    checks += "signal_handlers", "set_handlers"
    stand_ins = dict.fromkeys(checks, lambda *_: None) | {
        "check_tokens": lambda *_: {"small_train.bin": {}},
        "sizes_chosen": lambda *_: {},
        "data_folder": lambda cfg, say: Path(cfg.data),
        "choose_kernels": lambda cfg, device: (part.PLAIN, "plain"),
        "check_kernels": lambda cfg, mesh, kernels, say: (kernels, ""),
        "compile_all": compile_all,
        # Collectives without the order of operations for XLA.
        "gather_banks": gather_banks,
        "reduce_scatter": reduce_scatter,
        "compiler_options": lambda *_: {},
        "with_whole_loss": lambda cfg, *_: cfg,
        "from_processes": lambda numbers: [numbers],
        "open_log": lambda *_: log,
        "run_facts": lambda *_: {},
        "ask_to_stop": lambda say: lambda step: 0,  # never
    }
    vars(part).update(stand_ins, token_bytes=lambda cfg, folder: WORDS)
    whole = {"micro_tokens": 10_000, "loss_chunk": 64, "recompute": False}
    cfg = replace(CFG, devices=1, checkpoint_every=0, data=str(shards), **whole)
    fields = {name: getattr(cfg, name) for name in part.Config.__dataclass_fields__}
    fields["stages"] = tuple(part.Stage(**vars(stage)) for stage in cfg.stages)
    fields["layers"] = tuple(part.Layer(**vars(layer)) for layer in cfg.layers)
    with quick_compilation():
        assert part.train(part.Config(**fields), folder, "") == folder
    del sys.modules["part_one"]
    return [*log.losses, log.val_loss], log.state


def test_config_has_every_kind_of_step():
    """The comparison below then covers all kinds."""
    table, known = T.schedule(CFG), T.vocabulary(CFG, WORDS)
    used = {key for keys in table.programs for key in keys}
    assert used == set(T.programs(CFG, mesh_of(1), T.PLAIN)) - {"finish", "eval"}
    assert np.all(np.sum(table.hyper.average_rates > 0, axis=0) >= 2)
    assert np.any(known.prefix_v >= 0) and np.any(known.hashed_v != np.arange(CFG.vocab))
    rows = {name: row.shape[0] for name, row in TABLE.items() if row.sharded}
    assert all(n % DEVICES for name, n in rows.items() if name != "qk_bank")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_training_is_the_same_on_any_number_of_devices_and_with_parts_one_to_three(
    part_one, shards, devices
):
    """Losses, validation included, and the state, up to the order of sums."""
    losses, state = train(devices, shards)
    assert len(losses) == CFG.steps + 1
    assert losses[-2] < np.log(CFG.vocab) - 0.2  # the last stage has no candidates
    assert_same_training((losses, state), part_one)


@pytest.mark.slow
def test_ngram_dropout_is_the_same_on_any_number_of_devices(shards):
    cfg = replace(CFG, ngram_drop=0.3)
    four = train(4, shards, cfg)
    assert_same_training(four, train(1, shards, cfg))
    assert np.max(np.abs(np.subtract(four[0], train(4, shards)[0]))) > 1e-4
