"""The programs on the devices: what they compute, send, keep and consume.

That a training is the same on any number of devices: test_devices.py.
"""

import functools
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, small_config
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import (
    CFG,
    fitting,
    lay,
    mesh_of,
    programs_of,
    quick,
    quick_compilation,
    spread,
    strip_padding,
)

import train_gpt as T

TABLE = T.param_table(CFG)
SHARDED = {name for name, row in TABLE.items() if row.sharded}
BANKS = {name for name, row in TABLE.items() if row.optimizer == "anvil"}
UPDATED = {name: T.updated(CFG, name) for name in ("anvil", "adam", "adam_tied", "tables4")}
KERNELS, _ = T.pick_kernels(CFG, jax.devices()[0])
WORDS = [bytes([i % 48]) * (1 + i // 48) for i in range(BOS)]  # half of them begin with another
# On 8 devices with one row of 32 tokens at a time: four micro-batches for each step, and the logits
# of each in two chunks.
WIDE = replace(
    CFG,
    extension=0,
    tied=0.5,
    stages=(T.Stage(1.0, 32 * 32, 32, 0, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0), (0.3,), (48,)),),
    micro_tokens=32,
    loss_chunk=16,
)


@functools.cache
def lowered(cfg: T.Config, devices: int, name: str):
    mesh = mesh_of(devices)
    with quick_compilation():
        return T.lower(T.programs(cfg, mesh, KERNELS)[name], mesh)


@functools.cache
def program(cfg: T.Config, devices: int, name: str):
    """One compiled program."""
    return lowered(cfg, devices, name).compile()


def random_state(cfg, seed=0, tied=False):
    """A state in which everything has a gradient and every moment is there, as NumPy arrays."""
    rng = np.random.default_rng(seed)

    def leaf(shape, dtype, row):
        return rng.normal(0, 0.3 if row.sharded else 0.5, shape).astype(dtype)

    state = T.map_state(cfg, leaf)
    for kind in ("second", "equaliser"):
        state[kind] = {name: np.square(x) for name, x in state[kind].items()}
    for arrays in state.values():
        if tied and "embed" in arrays:
            arrays["embed"] = arrays["head"].copy()
    return state


def on_mesh(cfg, state, mesh):
    """Such a state padded and cut over the devices."""
    return {kind: lay(cfg, arrays, mesh) for kind, arrays in state.items()}


def model_on(cfg, params, mesh):
    """(compute copies of such parameters and signs, whole on every device; the n-gram table)."""
    params = lay(cfg, params, mesh)
    with quick_compilation():
        return T.start_copies(cfg, mesh)(params, np.uint32(0)), params["ngram_table"]


def random_due(cfg, mesh, update):
    """What an update takes: the gradients of as many steps as it sums."""
    found = {name: () for name in T.updated(cfg, update)}
    for seed in range(8, 8 + T.updates(cfg)[update]):
        grads = random_state(cfg, seed)["params"]
        grads = {n: x.astype(cfg.dtype) if TABLE[n].sharded else x for n, x in grads.items()}
        grads = spread(cfg, {name: grads[name] for name in found}, mesh)
        found = {name: (*found[name], grad) for name, grad in grads.items()}
    return fitting(T.programs(cfg, mesh, T.PLAIN)[update], found)


def hyper_on(cfg, step, mesh, **changes):
    hyper = T.hyper_at(cfg, step)._replace(**{k: np.float32(v) for k, v in changes.items()})
    return jax.tree.map(lambda x: T.put(x, mesh, P()), hyper)


def batch_of(cfg, step, mesh, shards):
    """(Rows, wanted) of a step from the start of the shards, as NumPy arrays and on the mesh."""
    stream, known = T.TokenStream(shards, "train", BOS), T.vocabulary(cfg, WORDS)
    *arrays, _ = T.next_batch(cfg, mesh, stream, known, step, T.loader_state(cfg, mesh))
    return arrays, jax.tree.map(lambda x: T.put(x, mesh, P(T.AXIS)), arrays)


def dense(cfg, request, devices: int):
    """The gradient [rows, d] of the n-gram table from the pair that a `grads` program returns."""
    wanted, grads = (np.asarray(x) for x in request)
    rows = T.padded_shape(TABLE["ngram_table"].shape, TABLE["ngram_table"], devices)[0]
    wanted = wanted.reshape(devices, devices, -1)
    total, share = np.zeros((rows, grads.shape[-1]), np.float32), rows // devices
    first = share * np.arange(devices)[:, None, None]  # of the owner, to whom they were sent
    ids = np.where(wanted < share, wanted + first, -1).reshape(-1)
    grads = grads.reshape(-1, grads.shape[-1]).astype(np.float32)
    assert not np.any(grads[ids < 0])
    np.add.at(total, ids[ids >= 0], grads[ids >= 0])
    return total


def assert_same(got, want):
    """Equal to the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def distance(got, want) -> float:
    """Relative norm of the difference."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# ------------------------------------------------------------------------------------------------
# Gradients
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"micro_tokens": 512}, {"recompute": True}])
def test_gradients_do_not_depend_on_micro_tokens_and_recompute(shards, change):
    """All rows at once instead of two; layers computed again on the way back."""
    mesh, cfg = mesh_of(1), replace(CFG, **change)
    assert T.micro_rows(cfg, 8, 32)[0] == (8 if "micro_tokens" in change else 2)
    if cfg.recompute:
        plain, again = (lowered(c, 1, "grads0").as_text() for c in (CFG, cfg))
        barrier = "optimization_barrier"
        assert again.count(barrier) >= plain.count(barrier) + CFG.depth
    model, (_, batch) = (
        model_on(CFG, random_state(CFG)["params"], mesh),
        batch_of(CFG, 0, mesh, shards),
    )
    args = *model, T.Batch(*batch, hyper_on(CFG, 0, mesh))
    (want, wanted, _), (got, loss, _) = (program(c, 1, "grads0")(*args) for c in (CFG, cfg))
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    for name in TABLE:
        one, two = (
            dense(CFG, x[name], 1) if name == "ngram_table" else x[name] for x in (got, want)
        )
        assert distance(one, two) < 1e-3, name  # float32 gets few digits of them: see below


def test_padded_tables_have_the_gradients_of_those_without(shards):
    """Three value tables lie in one array of 306 rows, which eight devices pad to 312."""
    cfg, found = replace(CFG, vocab=102), []
    for devices in (1, 8):
        mesh = mesh_of(devices)
        model = model_on(cfg, random_state(cfg)["params"], mesh)
        _, batch = batch_of(cfg, 0, mesh, shards)
        args = *model, T.Batch(*batch, hyper_on(cfg, 0, mesh))
        grads = program(cfg, devices, "grads0")(*args)[0]["value_tables"]
        found.append(np.asarray(grads).reshape(devices, -1, cfg.width).sum(axis=0)[: 3 * 102])
    assert distance(*found) < 1e-3


TOY_TOKENS = np.random.default_rng(0).integers(1, 6, (12, 6)).astype(np.uint16)  # ids repeat


def toy_copies(dtype):
    """Tables, signs and one weight of small whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(1)
    names = "embed", "value_tables", "ngram_table", "head"
    found = {name: jnp.asarray(rng.integers(-2, 3, TABLE[name].shape), dtype) for name in names}
    return found | {"signs": T.sign_pool(CFG, 0)}


def toy_forward(model, rows):
    """In place of forward: features in which all tables that tokens look up have a part."""
    one, two, three = rows["value_tables"]
    return jnp.concatenate([rows["embed"] + one - 2 * two + 3 * three, rows["ngram"]], axis=-1)


def toy_loss(model, features, head, aims, *_):
    """In place of loss_sums: (a sum in which every table has a gradient, another number)."""
    x, ngram = jnp.split(features, 2, axis=-1)
    x = (x * aims.targets[..., None].astype(x.dtype) + ngram).astype(jnp.float32)
    weights = head[:3].astype(jnp.float32)
    return jnp.sum(x @ weights.T), jnp.sum(aims.targets).astype("float32")


@functools.cache
def toy_autodiff(dtype):
    """((loss, other number), gradients) of all rows at once, in float32, lookups inside."""
    aims = T.Aims(None, TOY_TOKENS[:, 1:].astype(np.int32), None)
    inputs = TOY_TOKENS[:, :-1]
    places = T.table_rows(T.ngram_ids(inputs, CFG.ngram_rows), CFG.ngram_rows)
    copies = toy_copies(dtype)
    signs = copies.pop("signs")

    def loss(copies):
        tables = copies | {"ngrams": copies["ngram_table"]}
        rows = T.look_up(CFG, tables, inputs, places.swapaxes(0, 1))
        rows["ngram"] = T.signed_sum(CFG, signs, rows["ngrams"], inputs)
        return toy_loss(None, toy_forward(None, rows), copies["head"], aims)

    copies = {name: x.astype(jnp.float32) for name, x in copies.items()}
    return quick(jax.value_and_grad(loss, has_aux=True), copies)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro", [1, 2, 3, 6, 12])
def test_accumulated_gradient_is_the_sum_over_all_rows_in_float32(monkeypatch, micro, dtype):
    """That of tables, added row by row, equals autodiff's through the lookup; over rows of the
    batch, the mean."""
    monkeypatch.setattr(T, "forward", toy_forward)
    monkeypatch.setattr(T, "loss_sums", toy_loss)
    stage = T.Stage(1.0, 16 * 8, 8, 0, (1, 1))  # 1 / 16 rows and 1 / 128 tokens are exact
    cfg = replace(CFG, micro_tokens=5 * micro, compute_dtype=dtype, stages=(stage,), extension=0)
    step = jax.shard_map(
        partial(T.grads_step, cfg, T.PLAIN, (0, 0)),
        mesh=mesh_of(1),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    copies, inputs = toy_copies(dtype), TOY_TOKENS[:, :-1]
    wanted, places = T.request(cfg, inputs, 1)
    targets = TOY_TOKENS[:, 1:].astype(np.int32)
    aims = T.Aims(np.empty((12, 0), np.int32), targets, 0 * targets)
    rows, table = T.Rows(TOY_TOKENS, inputs, places, aims), copies.pop("ngram_table")
    grads, mean, dropped = quick(step, copies, table, T.Batch(rows, wanted, T.hyper_at(cfg, 0)))
    assert dropped == 0
    (_, want), wanted = toy_autodiff(dtype)
    assert mean == want / 128 == targets.sum() / 128 and mean.dtype == jnp.float32
    assert grads.keys() == wanted.keys()
    assert {x.dtype for x in jax.tree.leaves(grads)} - {np.dtype("int32")} == {np.dtype(dtype)}
    grads["ngram_table"] = dense(cfg, grads["ngram_table"], 1)
    for name, grad in grads.items():
        assert np.abs(wanted[name]).max() > 10
        want = wanted[name].astype(dtype) / 16
        # Whole numbers below 2^8 are exact in bfloat16; only the head's gradient, a sum over a
        # micro-batch, is larger and has the 8 bits of its parameter before it is added up.
        exact = dtype == "float32" or name != "head"
        atol = 0 if exact else 2**-7 * float(np.abs(want).max())
        np.testing.assert_allclose(
            grad.astype("float32"), want.astype("float32"), rtol=0, atol=atol, err_msg=name
        )
    used = np.unique(TOY_TOKENS[:, :-1])
    assert np.flatnonzero(np.abs(grads["embed"]).sum(1)).tolist() == used.tolist()


def test_gradient_is_that_of_the_weighted_row_sums_averaged_over_rows(shards):
    """Of 8 devices and 4 micro-batches, against autodiff of the whole batch, lookups included.

    Losses run over each row's candidates. The reported one is the plain mean over next tokens,
    whatever the weights.
    """
    mesh, weights = mesh_of(8), np.float32([0.7, 1.9])
    params = random_state(WIDE)["params"]
    (rows, _), batch = batch_of(WIDE, 0, mesh, shards)
    model = model_on(WIDE, params, mesh)
    hyper = hyper_on(WIDE, 0, mesh, weights=weights)
    got, loss, _ = program(WIDE, 8, "grads0")(*model, T.Batch(*batch, hyper))
    inputs, targets, aims = rows.tokens[:, :-1], rows.tokens[:, 1:].astype(np.int32), rows.aims
    places = T.table_rows(T.ngram_ids(rows.hashed, WIDE.ngram_rows), WIDE.ngram_rows)
    prefixes = np.take_along_axis(aims.candidates, np.maximum(aims.prefixes, 0), 1)
    has_prefix, signs = aims.prefixes >= 0, jnp.asarray(np.asarray(model[0]["signs"]))
    assert 0.1 < has_prefix.mean() < 0.8

    def losses(params):
        tables = params | {"ngrams": params["ngram_table"]}
        found = T.look_up(WIDE, tables, inputs, places.swapaxes(0, 1))
        found["ngram"] = T.signed_sum(WIDE, signs, found["ngrams"], rows.hashed)
        segments = T.segment_ids(inputs, BOS, WIDE.attention_cap)
        model = T.Model(params, WIDE, T.PLAIN, (8, 32), segments, T.hyper_at(WIDE, 0))
        x = T.forward(model, found)
        capped = T.cap_logits(x @ params["head"].T, WIDE)
        among = jnp.take_along_axis(capped, aims.candidates[:, None], 2)
        total = jnp.log(jnp.sum(jnp.exp(among), axis=2))

        def ahead(ids, k=0):
            picked = jnp.take_along_axis(capped[:, : 32 - k], ids[:, k:, None], 2)[..., 0]
            return total[:, : 32 - k] - picked

        plain = jnp.sum(ahead(targets))
        weighted = weights[0] * plain + weights[1] * jnp.sum(ahead(targets, 1))
        return (weighted + 0.3 * jnp.sum(has_prefix * ahead(prefixes))) / 32, plain

    (_, plain), wanted = quick(jax.value_and_grad(losses, has_aux=True), params)
    assert loss.shape == () and loss.dtype == np.float32
    np.testing.assert_allclose(loss, plain / 1024, rtol=1e-6)
    assert got.keys() == wanted.keys() == TABLE.keys()
    for name, row in TABLE.items():
        assert np.linalg.norm(wanted[name]) > 1e-3, name
        for x in jax.tree.leaves(got[name]):
            assert x.sharding == NamedSharding(mesh, P(T.AXIS))
        if name == "ngram_table":
            total = dense(WIDE, got[name], 8)
        else:
            total = np.asarray(got[name])
            if row.optimizer != "anvil":  # every device's own gradient
                total = total.reshape(8, *T.padded_shape(row.shape, row, 8)).sum(0)
        assert not total[row.shape[0] :].any()
        # With such parameters both sides are up to 8e-4 from the same in float64.
        assert distance(total[: row.shape[0]], wanted[name]) < 2e-3, name


def test_padding_is_never_read(shards):
    """Not a number there, but finite losses and gradients, equal to those over zeros."""
    mesh, found = mesh_of(8), []
    model = model_on(CFG, random_state(CFG)["params"], mesh)
    (rows, _), batch = batch_of(CFG, 3, mesh, shards)
    batch = T.Batch(*batch, hyper_on(CFG, 3, mesh))
    val = T.val_batch(CFG, mesh, T.vocabulary(CFG, WORDS), rows.tokens, [True] * 8, batch.hyper)
    for padding in (0.0, np.nan):
        copies, table = jax.tree.map(np.array, model)
        for name in SHARDED:
            (table if name == "ngram_table" else copies[name])[TABLE[name].shape[0] :] = padding
        specs = {n: x.sharding.spec for n, x in T.abstract_copies(CFG, mesh).items()}
        copies = {name: T.put(x, mesh, specs[name]) for name, x in copies.items()}
        table = T.put(table, mesh, P(T.AXIS))
        name = T.schedule(CFG).programs(3)[0]
        for which, args in ((name, batch), ("eval", val)):
            out = programs_of(CFG, 8)[which](copies, table, args)
            found.append(jax.device_get(out))
    assert_same(found[:2], found[2:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize(
    ("micro_tokens", "rows", "row_tokens", "want"),
    [
        (64, 8, 32, 2),
        (63, 8, 32, 1),
        (256, 8, 32, 8),
        (10_000, 8, 32, 8),
        (160, 6, 32, 3),  # five would fit, but do not divide six
        (16, 8, 32, 1),  # a row is never cut
        (64, 1, 32, 1),
    ],
)
def test_micro_batches_have_the_most_rows_that_divide_and_fit(micro_tokens, rows, row_tokens, want):
    cfg = small_config(micro_tokens=micro_tokens)
    tokens = np.arange(rows * (row_tokens + 1), dtype=np.uint16).reshape(rows, -1)
    places = np.arange(rows * 2 * row_tokens).reshape(rows, 2, -1)
    aims = T.Aims(np.empty((rows, 0)), tokens[:, 1:], tokens[:, 1:])
    got = T.micro_batches(cfg, T.Rows(tokens, tokens[:, :-1], places, aims))
    assert got.tokens.shape == (rows // want, want, row_tokens + 1)
    assert got.aims.candidates.shape == (rows // want, want, 0)
    np.testing.assert_array_equal(got.tokens.reshape(rows, -1), tokens)
    np.testing.assert_array_equal(got.slots.reshape(places.shape), places)


# ------------------------------------------------------------------------------------------------
# Collectives
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reduced_gradients_are_the_sums_over_steps_and_devices_cut_or_whole(monkeypatch, dtype):
    """Large ones travel in the compute dtype; of numbers so small that sums are exact in it."""
    monkeypatch.setattr(T, "apply_updates", lambda cfg, state, grads, hyper: {"params": grads})
    cfg, mesh, rng = replace(CFG, compute_dtype=dtype), mesh_of(8), np.random.default_rng(0)
    like, due, wanted = T.programs(cfg, mesh, T.PLAIN)["adam"].args[1], {}, {}
    for name in UPDATED["adam"]:
        shape = 2, 8, like[name][0].shape[0] // 8, *like[name][0].shape[1:]
        parts = rng.integers(-7, 8, shape).astype(np.float32)
        due[name] = tuple(
            T.put(x.reshape(-1, *shape[3:]).astype(one.dtype), mesh, P(T.AXIS))
            for x, one in zip(parts, like[name], strict=True)
        )
        wanted[name] = parts.sum((0, 1))
    cut = {name: P(T.AXIS) if name in SHARDED else P() for name in due}
    update = jax.shard_map(
        lambda due: T.update_step(cfg, T.PLAIN, "adam", None, due, None),
        mesh=mesh,
        in_specs=P(T.AXIS),
        out_specs=({"params": cut}, {name: P() for name in due}, P()),
        check_vma=False,
    )
    traced = jax.jit(update).trace(due)
    names = "reduce_scatter|psum\\w*|all_gather"
    sent = re.findall(rf":(\w+)\[[^\]]*\] = ({names})\[", str(traced.jaxpr))
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    large = len(SHARDED & due.keys() - BANKS)
    assert Counter(x for x, name in sent if name == "reduce_scatter") == {short: large}
    assert Counter(x for x, name in sent if name == "all_gather") == {short: large}
    small, norm = len(due.keys() - SHARDED), 1  # of which one number travels
    assert Counter(x for x, name in sent if name[:4] == "psum") == {"f32": small + norm}
    new, copies, norm = traced.lower().compile()(due)
    every = np.concatenate([x.ravel() for x in wanted.values()]).astype(np.float64)
    np.testing.assert_allclose(norm, np.linalg.norm(every), rtol=1e-6)
    assert_same(new["params"], wanted)
    for name, grad in new["params"].items():
        assert grad.dtype == np.float32 and grad.sharding == NamedSharding(mesh, cut[name])
    assert_same(copies, {name: x.astype(like[name][0].dtype) for name, x in wanted.items()})


def test_rows_that_were_fetched_get_the_sum_of_their_gradients():
    """From two steps and four devices, each row once; in float32, of bfloat16 parts."""
    mesh, share, size, rng = mesh_of(4), 6, 5, np.random.default_rng(0)
    parts, want = [], np.zeros((4 * share, 3), np.float32)
    for _ in range(2):
        wanted = np.full((4, 4, size), share, np.int32)
        grads = np.zeros((4, 4, size, 3), np.float32)
        for device, owner in np.ndindex(4, 4):
            ids = rng.permutation(share)[: rng.integers(0, size + 1)]
            wanted[owner, device, : len(ids)] = ids
            grads[owner, device, : len(ids)] = rng.integers(-200, 200, (len(ids), 3))
            np.add.at(want, owner * share + ids, grads[owner, device, : len(ids)])
        grads = jnp.asarray(grads.reshape(16, size, 3), jnp.bfloat16)
        parts.append((wanted.reshape(16, size), grads))
    summed = jax.shard_map(
        lambda parts: T.sum_requests(parts, share, T.scatter_rows),
        mesh=mesh, in_specs=P(T.AXIS), out_specs=P(T.AXIS), check_vma=False,
    )  # fmt: skip
    ids, grads = (np.split(np.asarray(x), 4) for x in quick(summed, parts))
    got = np.zeros_like(want)
    for owner in range(4):
        assert len(np.unique(ids[owner])) == len(ids[owner]) == 2 * 4 * size
        own = ids[owner] < share
        assert grads[owner].dtype == np.float32
        got[owner * share + ids[owner][own]] = grads[owner][own]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("rows", "width", "parts"),
    [
        (96, 40_000, 3),  # 15 MB a device: thirds have 32 rows
        (64, 40_000, 1),  # 10 MB
        (96, 20_000, 1),
        (33, 99_000, 1),  # 13.07 MB, and no part has a multiple of 32 rows
    ],
)
def test_large_sums_over_devices_cross_in_parts_that_sparse_cores_take(rows, width, parts):
    mesh = mesh_of(2)
    x = np.random.default_rng(rows).integers(-9, 9, (2 * 2 * rows, width)).astype(np.float32)
    both = jax.shard_map(
        lambda x: (T.reduce_scatter(x), lax.psum_scatter(x, T.AXIS, tiled=True)),
        mesh=mesh, in_specs=P(T.AXIS), out_specs=P(T.AXIS), check_vma=False,
    )  # fmt: skip
    got, want = quick(both, x)
    np.testing.assert_array_equal(got, want)
    assert got.shape == (2 * rows, width)
    text = jax.jit(both).lower(x).as_text()
    assert text.count('"stablehlo.reduce_scatter"') == parts + 1


PIECES = T.padded_shape(TABLE["mlp_bank"].shape, TABLE["mlp_bank"], 8)[0] // 8
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(hlo: str) -> tuple[list[str], list[str]]:
    """Names of the collectives in compiled HLO text: (all of them, those inside while loops)."""
    bodies = {}  # computation -> its lines
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            lines = bodies.setdefault(head[1], [])
        elif line.startswith("  "):
            lines.append(line)

    def found(names):
        pattern = rf"[ )]({'|'.join(COLLECTIVES)})(?:-start)?\("
        return [m[1] for name in names for line in bodies[name] for m in re.finditer(pattern, line)]

    def called(name):
        for line in bodies[name]:
            for names in re.findall(r"(?:body|condition|calls|to_apply)=(%[\w.-]+)", line):
                yield names.removeprefix("%")
            for names in re.findall(r"branch_computations=\{([^}]*)\}", line):
                yield from (one.strip().removeprefix("%") for one in names.split(","))

    inside = set()
    todo = re.findall(r" while\(.*body=%([\w.-]+)", hlo)
    assert todo, "no while loop in this program"
    while todo:
        name = todo.pop()
        if name not in inside:
            inside.add(name)
            todo.extend(called(name))
    return found(bodies), found(inside)


def test_gradients_communicate_their_loss_and_never_while_they_accumulate():
    """And the rows of the n-gram table, before they begin, and banks before and after."""
    everywhere, in_loops = collectives(program(WIDE, 8, "grads0").as_text())
    assert set(everywhere) == {"all-reduce", "all-to-all", "all-gather", "reduce-scatter"}
    assert in_loops == []


def test_a_collective_inside_the_loop_would_be_found():
    """The same search over gradients that reduce the loss of every micro-batch."""
    mesh = mesh_of(8)
    like = T.programs(WIDE, mesh, KERNELS)["grads0"]

    def reduce_each(copies, table, batch):
        def add(total, rows):
            x = copies["embed"][rows.tokens[:, :-1]]
            return total + lax.psum(jnp.sum(x), T.AXIS), None

        total, _ = lax.scan(add, jnp.zeros(()), T.micro_batches(WIDE, batch.rows))
        return table, total, total

    with quick_compilation():
        hlo = T.lower(like._replace(step=reduce_each), mesh).compile().as_text()
    assert "all-reduce" in collectives(hlo)[1]


@pytest.mark.parametrize(
    ("name", "gathered", "scattered", "summed", "exchanged"),
    [
        # Two banks, the MLPs' in pieces; the loss; what is wanted of n-grams, their rows there and
        # the gradients of these back.
        ("grads0", 2 + PIECES, 2 + PIECES, 1, 3),
        ("anvil", 0, 0, 1, 0),  # the norm
        ("adam", 2, 2, 16 + 1, 0),
        ("adam_tied", 1, 1, 16 + 1, 0),
        ("tables2", 1, 1, 1, 0),
        ("tables4", 1, 1, 1, 0),
        ("finish", 3, 0, 5 * 2, 0),  # norms before and after
        ("eval", 2 + PIECES, 0, 1, 2),
    ],
)
def test_programs_have_one_collective_for_each_parameter(
    name, gathered, scattered, summed, exchanged
):
    """Banks are gathered and reduced beside the gradients. Of all others an update reduce-scatters
    or all-reduces the gradients, and gathers what it changed."""
    text = lowered(WIDE, 8, name).as_text()
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")
    count = [text.count(f'"stablehlo.{name}"') for name in names]
    assert count == [gathered, scattered, summed, exchanged, 0]


# ------------------------------------------------------------------------------------------------
# State and copies
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compute_copies_have_the_compute_dtype_where_parameters_are_large(dtype):
    """Of the n-gram table there is none."""
    cfg = replace(CFG, compute_dtype=dtype)
    params = {name: np.full(row.shape, 1 + 2**-10, np.float32) for name, row in TABLE.items()}
    copies = T.compute_copies(cfg, params)
    assert copies.keys() == TABLE.keys() - {"ngram_table"}
    for name, copy in copies.items():
        large = TABLE[name].sharded
        assert copy.dtype == (dtype if large else "float32"), name
        rounded = 1 if large and dtype == "bfloat16" else 1 + 2**-10
        assert copy.shape == TABLE[name].shape and np.all(copy == rounded), name
    tables = {"head", "embed", "value_tables", "ngram_table"}
    assert {*tables, *UPDATED["anvil"]} == SHARDED


def test_first_copies_are_the_state_cut_or_whole_on_every_device():
    """With signs of a seed, as many of either kind."""
    params = random_state(CFG)["params"]
    copies, _ = model_on(CFG, params, mesh_of(8))
    whole = {name for name, copy in copies.items() if copy.sharding.is_fully_replicated}
    assert whole == copies.keys() - BANKS and len(BANKS) == 3
    signs = np.asarray(copies.pop("signs"))
    del params["ngram_table"]
    assert_same(strip_padding(CFG, copies), params)
    assert signs.dtype == np.int8 and signs.shape == (64, 32) and abs(signs.mean()) < 0.1
    assert set(signs.reshape(-1).tolist()) == {-1, 1}
    assert np.any(signs != T.sign_pool(CFG, 1))


@pytest.fixture(scope="module")
def updated():
    """Before and after each update on 8 devices, by its name."""
    mesh, compiled, found = mesh_of(8), programs_of(CFG, 8), {}
    for name in UPDATED:
        start = random_state(CFG, tied=name == "adam_tied")
        state = on_mesh(CFG, start, mesh)
        about = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
        copies, _ = model_on(CFG, start["params"], mesh)
        due, hyper = random_due(CFG, mesh, name), hyper_on(CFG, 1, mesh, average_rates=[0.5] * 4)
        new, changed, _ = compiled[name](state, due, hyper)
        found[name] = SimpleNamespace(
            start=start, about=about, old=state, changed=changed, due=due,
            new=new, copies=copies | changed,
        )  # fmt: skip
    return found


NAMES = pytest.mark.parametrize("name", UPDATED)


@NAMES
def test_update_keeps_the_copies_in_step_with_the_state(updated, name):
    """Of all that it changes, which are its own parameters; the others stand still."""
    step, tied = updated[name], name == "adam_tied"
    assert set(step.changed) == set(UPDATED[name]) - {"ngram_table"}
    for copy in set(step.copies) - {"signs"}:
        np.testing.assert_array_equal(step.copies[copy], step.new["params"][copy])
    for kind, before in step.start.items():
        new = strip_padding(CFG, step.new[kind])
        moved = {name for name, x in before.items() if np.any(x != new[name])}
        assert moved == set(UPDATED[name]) & set(before), kind
    pairs = [(x["embed"], x["head"]) for x in step.new.values() if "embed" in x]
    assert len(pairs) == 4 and all(np.array_equal(*pair) for pair in pairs) is tied
    assert np.array_equal(step.copies["embed"], step.copies["head"]) is tied


@NAMES
def test_three_devices_update_as_eight_do(updated, name):
    """Which have other padding."""
    mesh, start = mesh_of(3), updated[name].start
    due, hyper = random_due(CFG, mesh, name), hyper_on(CFG, 1, mesh, average_rates=[0.5] * 4)
    new, *_ = program(CFG, 3, name)(on_mesh(CFG, start, mesh), due, hyper)
    for kind, arrays in new.items():
        got, want = (strip_padding(CFG, x) for x in (arrays, updated[name].new[kind]))
        for n in got:
            assert distance(got[n], want[n]) < 2e-5, (kind, n)


def test_a_waiting_gradient_counts_exactly_like_one_of_this_step(updated):
    """One Adam step on the sum of two gradients: no other number, whichever came first."""
    mesh, step = mesh_of(8), updated["adam"]

    def update(due):
        hyper = hyper_on(CFG, 1, mesh, average_rates=[0.5] * 4)
        return programs_of(CFG, 8)["adam"](on_mesh(CFG, random_state(CFG), mesh), due, hyper)[0]

    assert_same(update({name: parts[::-1] for name, parts in step.due.items()}), step.new)
    alone = update({name: (parts[0], 0 * parts[1]) for name, parts in step.due.items()})
    for name in step.due:
        assert np.any(np.asarray(alone["first"][name]) != step.new["first"][name]), name


@NAMES
def test_update_consumes_the_old_state_and_leaves_the_gradients(updated, name):
    step = updated[name]
    if name == "adam_tied":  # which has no use for the embedding's
        step.old = {
            kind: {n: x for n, x in of.items() if n != "embed"} for kind, of in step.old.items()
        }
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(step.old))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(step.due))


@pytest.mark.parametrize("name", [*UPDATED, "finish"])
def test_update_writes_the_state_where_the_old_one_was(name):
    """On each device, its share of what is cut and all of what is not."""
    state = T.abstract_state(CFG, mesh_of(8))
    if name == "adam_tied":  # copies of the head
        state = {kind: {n: x for n, x in of.items() if n != "embed"} for kind, of in state.items()}
    size = sum(np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state))
    memory = programs_of(CFG, 8)[name].memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * size


@NAMES
def test_update_keeps_shapes_dtypes_and_shardings(updated, name):
    step = updated[name]
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), step.new) == step.about
    assert {leaf.dtype for leaf in jax.tree.leaves(step.new)} == {np.dtype("float32")}


def test_update_rounds_its_copies_to_bfloat16():
    """And the next update starts from the float32 masters: small changes are not lost."""
    cfg, mesh = replace(CFG, compute_dtype="bfloat16"), mesh_of(1)
    start = random_state(cfg)
    due, hyper = random_due(cfg, mesh, "adam"), hyper_on(cfg, 1, mesh, lr=1e-3)
    state, copies, _ = program(cfg, 1, "adam")(on_mesh(cfg, start, mesh), due, hyper)
    for name in UPDATED["adam"]:
        want = np.asarray(state["params"][name])
        assert np.any(want != start["params"][name]), name
        rounded = want.astype(cfg.dtype) if TABLE[name].sharded else want
        np.testing.assert_array_equal(copies[name], rounded, err_msg=name)
    before = start["params"]["head"]
    moved = np.asarray(state["params"]["head"]) != before
    hidden = np.asarray(copies["head"]) == before.astype(cfg.dtype)
    assert np.mean(moved & hidden) > 0.5


def test_state_is_cut_over_the_devices_and_copies_of_tables_are_whole(updated):
    step = updated["adam"]
    for arrays in step.new.values():
        for name, array in arrays.items():
            cut = (array.shape[0] // 8, *array.shape[1:]) if name in SHARDED else array.shape
            assert [s.data.shape for s in array.addressable_shards] == [cut] * 8, name
            assert len({s.device for s in array.addressable_shards}) == 8
    for name, row in TABLE.items():
        if name != "ngram_table":
            rows, *cols = T.padded_shape(row.shape, row, 8)
            shape = (rows // 8 if row.optimizer == "anvil" else rows, *cols)
            assert [s.data.shape for s in step.copies[name].addressable_shards] == [shape] * 8


# ------------------------------------------------------------------------------------------------
# Programs
# ------------------------------------------------------------------------------------------------


def test_a_step_is_its_gradients_and_one_to_three_updates():
    cfg = small_config()  # stages of 4, 4 and 2 steps
    steps = [T.schedule(cfg).programs(step) for step in range(cfg.steps)]
    assert [names[0] for names in steps] == ["grads0"] * 4 + ["grads1"] * 4 + ["grads2"] * 2
    updates = (
        ("anvil",),
        ("anvil", "adam"),
        ("anvil", "adam_tied"),
        ("anvil", "adam_tied", "tables2"),
        ("anvil", "adam_tied", "tables4"),
    )
    want = [updates[i] for i in (0, 3, 0, 3, 0, 2, 0, 4, 0, 1)]
    assert [names[1:] for names in steps] == want


@pytest.mark.parametrize(
    "every, events, change",
    [
        (1, (1, 2), 4),
        (1, (2, 2), 0),
        (2, (2, 4), 4),
        (2, (4, 8), 8),
        (3, (3, 6), 6),
        (5, (5, 5), 0),
    ],
)
def test_gradients_wait_for_their_update_and_no_longer(every, events, change):
    """Each goes into one update, which takes as many as its program is made for."""
    cfg = small_config(adam_every=every, event_every=events, event_change=change)
    found, waiting = T.programs(cfg, mesh_of(1), T.PLAIN), {}
    for step in range(10):
        names = T.schedule(cfg).programs(step)
        assert set(names) <= set(found)
        waiting = {name: (*waiting.get(name, ()), step) for name in TABLE}
        for update in names[1:]:
            due = {name: waiting.pop(name) for name in T.updated(cfg, update)}
            takes = {name: len(grads) for name, grads in found[update].args[1].items()}
            assert {name: len(grads) for name, grads in due.items()} == takes
            first = step + 1 - T.updates(cfg)[update]
            assert set(due.values()) == {tuple(range(first, step + 1))}
        assert bool(waiting) != (
            T.schedule(cfg).tables[step] > 0
        )  # where a checkpoint may be taken


def test_every_parameter_has_one_update():
    updated = {name: T.updated(T.Config(), name) for name in T.updates(T.Config())}
    anvil, adam, event = updated["anvil"], updated["adam"], updated["tables2"]
    assert anvil == ["qk_bank", "vo_bank", "mlp_bank"] and adam == updated["adam_tied"]
    assert event == updated["tables4"]
    assert event == ["value_tables", "ngram_table"]
    assert sorted(anvil + adam + event) == sorted(T.param_table(T.Config()))


def test_programs_of_the_record_on_eight_devices():
    """Shapes of all that goes in, and where it lies, without a device that could hold it."""
    cfg, mesh = T.Config(), mesh_of(8)
    found, grads = T.programs(cfg, mesh, T.PLAIN), [f"grads{i}" for i in range(6)]
    updates = "anvil", "adam_tied", "adam", "tables2", "tables4"
    assert list(found) == [*grads, *updates, "finish", "eval"]
    shapes = [(16_384, 10_240), (32_768, 10_240), (49_152, 14_336), (49_152, 24_576)]
    shapes += [(40_960, 0), (16_384, 0)]
    shapes = dict(zip(grads, shapes, strict=True)) | {"eval": (262_144, 0)}
    for name, (t, candidates) in shapes.items():
        copies, table, (rows, wanted, hyper) = found[name].args
        assert (rows.tokens.shape, rows.tokens.dtype) == ((8, t + 1), np.uint16)
        assert (rows.hashed.shape, rows.hashed.dtype) == ((8, t), np.uint16)
        assert [x.shape for x in rows.aims] == [(8, candidates), (8, t), (8, t)]
        assert rows.slots.shape == (8, 2, t) and wanted.shape == (8, 8, T.capacity(8 * t, 8))
        assert (table.shape, table.dtype) == ((42_301_440, 768), cfg.dtype)
        cut = {x.sharding.spec for x in jax.tree.leaves((table, rows, wanted))}
        assert cut == {P(T.AXIS)}
        assert copies["qk_bank"].shape == (48, 256, 768) and copies["qk_bank"].dtype == cfg.dtype
        assert {x.sharding.spec for x in jax.tree.leaves(hyper)} == {P()}
        assert {name: x.sharding.spec for name, x in copies.items()} == {
            n: x.sharding.spec for n, x in T.abstract_copies(cfg, mesh).items()
        }
        assert found[name].out == ((P(),) if name == "eval" else (P(T.AXIS), P())) + (P(),)
        assert found[name].donates == ()
    for name, steps in T.updates(cfg).items():
        state, due, _ = found[name].args
        assert jax.tree.all(jax.tree.map(lambda x, y: x == y, state, T.abstract_state(cfg, mesh)))
        assert list(due) == T.updated(cfg, name) and {len(x) for x in due.values()} == {steps}
        assert found[name].donates == (0,)
    (bank,), (gates, _) = found["anvil"].args[1]["qk_bank"], found["adam"].args[1]["gate_w1"]
    assert (bank.shape, bank.dtype, bank.sharding.spec) == (
        (48, 256, 768), cfg.dtype, P(T.AXIS)
    )  # fmt: skip
    assert (gates.shape, gates.dtype) == ((8 * 2, 64, 768), np.float32)
    for name in ("tables2", "tables4"):
        room = T.capacity(393_216, 8)  # the largest stage's
        for ids, rows in found[name].args[1]["ngram_table"]:
            assert (ids.shape, rows.shape, rows.dtype) == ((64, room), (64, room, 768), cfg.dtype)


def test_the_events_of_the_record():
    """Each is of steps that follow each other, as many as its program takes."""
    cfg, made, waiting = T.Config(), Counter(), 0
    for step in range(cfg.steps):
        waiting += 1
        if T.schedule(cfg).tables[step] > 0:
            name = T.schedule(cfg).programs(step)[-1]
            assert T.updates(cfg)[name] == waiting
            made[name], waiting = made[name] + 1, 0
    assert made == {"tables2": 168, "tables4": 214}


@pytest.mark.parametrize("name", T.programs(CFG, mesh_of(2), T.PLAIN))
def test_masters_and_losses_are_float32_also_in_bfloat16(name):
    cfg = replace(CFG, compute_dtype="bfloat16")
    out, about = lowered(cfg, 2, name).out_info, partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    state = about(T.abstract_state(cfg, mesh_of(2)))
    copies = about(T.programs(cfg, mesh_of(2), KERNELS)["eval"].args[0])
    assert {n for of in state.values() for n, x in of.items() if x[1] != "float32"} == {
        "ngram_table"
    }
    assert copies.pop("signs")[1] == "int8"
    assert copies["head"] == ((102, 32), "bfloat16") and copies["gate_w1"][1] == "float32"
    number = (), np.dtype("float32")  # a loss, a norm, or a count of n-grams
    if name in T.updates(cfg):
        want = state, {n: copies[n] for n in T.updated(cfg, name) if n in copies}, number
    elif name.startswith("grads"):  # each device's, one above the other
        grads = {
            name: (x if name in BANKS else (2 * x[0], *x[1:]), dtype)
            for name, (x, dtype) in copies.items()
        }
        size = T.capacity(8 * 64, 2)
        grads["ngram_table"] = ((4, size), np.dtype("int32")), ((4, size, 32), cfg.dtype)
        want = grads, number, number
    else:
        want = (number, number) if name == "eval" else (state, copies)
    assert about(out) == want


def test_warm_up_runs_every_program_once():
    ran = []

    class Told:
        def __init__(self, program):
            self.program = program

        def __getattr__(self, name):
            return getattr(self.program, name)

        def __call__(self, *args):
            ran.append(self)
            return self.program(*args)

    compiled = {name: Told(program) for name, program in programs_of(CFG, 8).items()}
    T.warm_up(compiled)
    assert ran == [*compiled.values()]


# ------------------------------------------------------------------------------------------------
# Validation
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def val(shards):
    return T.TokenStream(shards, "val", BOS)


@pytest.fixture(scope="module")
def direct_loss(val):
    """Steps done -> mean loss of random_state over the first val_tokens, summed in float64."""
    params, known = random_state(CFG)["params"], T.vocabulary(CFG, WORDS)
    tokens = val.read(0, CFG.val_tokens + 1).astype(np.int32)
    rows = tokens[:-1].reshape(-1, CFG.val_row)
    hashed, signs = known.hashed_v[rows], T.sign_pool(CFG, 0)
    places = T.table_rows(T.ngram_ids(hashed, CFG.ngram_rows), CFG.ngram_rows)
    a, b, c = CFG.logit_cap

    def features(params, hyper):
        found = T.look_up(
            CFG, params | {"ngrams": params["ngram_table"]}, rows, places.swapaxes(0, 1)
        )
        found["ngram"] = T.signed_sum(CFG, signs, found["ngrams"], hashed)
        args = CFG, T.PLAIN, CFG.val_windows, T.segment_ids(rows, BOS), hyper
        return T.forward(T.Model(params, *args), found)

    with quick_compilation():
        run = jax.jit(features).lower(params, T.hyper_at(CFG, 0)).compile()

    def loss(step):
        x = np.asarray(run(params, T.hyper_at(CFG, step)), np.float64).reshape(-1, CFG.width)
        logits = a / (1 + np.exp(-(x @ params["head"].T.astype(np.float64) + b) / c))
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), tokens[1:]]
        assert len(losses) == CFG.val_tokens
        return losses.mean()

    return {done: loss(max(done - 1, 0)) for done in (0, 3, 8)}


def test_evaluate_is_the_plain_mean_over_the_first_val_tokens(val, direct_loss):
    """Weight 1 also in the stage that predicts two tokens; rotation and scale of the last step,
    also where the next one (step 3, from 0) has those of another stage."""
    mesh, known = mesh_of(8), T.vocabulary(CFG, WORDS)
    model = model_on(CFG, random_state(CFG)["params"], mesh)
    for done in (0, 3, 8):
        loss = partial(programs_of(CFG, 8)["eval"], *model)
        got, _ = T.evaluate(CFG, mesh, loss, done, val, known)
        assert got == pytest.approx(direct_loss[done], rel=1e-6), done  # float32 sums of 512 losses
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model))
    assert direct_loss[0] == direct_loss[3] != pytest.approx(direct_loss[8], rel=1e-5)


def test_evaluate_does_not_depend_on_val_batch(val, direct_loss):
    cfg, mesh = replace(CFG, val_batch=1024), mesh_of(8)
    model = model_on(CFG, random_state(CFG)["params"], mesh)
    args = 3, val, T.vocabulary(CFG, WORDS)
    got, _ = T.evaluate(cfg, mesh, partial(program(cfg, 8, "eval"), *model), *args)
    assert got == pytest.approx(direct_loss[3], rel=1e-6)


# ------------------------------------------------------------------------------------------------
# Mesh
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 16}, r"devices=16, but there are 8: use a smaller number or 0"),
    ],
)
def test_make_mesh_refuses_devices_that_are_not_there_or_without_work(changes, message):
    with pytest.raises(T.UserError, match=message):
        T.make_mesh(small_config(**changes))


@pytest.mark.parametrize(("devices", "want"), [(0, 8), (1, 1), (2, 2), (4, 4), (8, 8)])
def test_make_mesh_takes_the_first_devices(devices, want):
    _, mesh = T.make_mesh(small_config(devices=devices))
    assert mesh.axis_names == (T.AXIS,)
    assert mesh.devices.tolist() == jax.devices()[:want]
    one = T.put(np.arange(8, dtype=np.float32), mesh, P(T.AXIS))
    assert one.sharding == NamedSharding(mesh, P(T.AXIS))
