"""The programs on the devices: the same training on any number of them, and nothing hidden."""

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
import reference
from conftest import BOS, small_config
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import (
    CFG,
    assert_same_training,
    lay,
    mesh_of,
    programs_of,
    quick,
    quick_compilation,
    run_steps,
    spread,
)

import train_gpt as T

DEVICES = [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8]
TABLE = T.param_table(CFG)
SHARDED = {name for name, row in TABLE.items() if row.sharded}
UPDATED = {name: T.updated(CFG, name) for name in ("muon", "adam")}
KINDS = ("params", "first", "second")
KERNELS, _ = T.pick_kernels(CFG, jax.devices()[0])
# On 8 devices with one row of 32 tokens at a time: four micro-batches for each step, and the logits
# of each in two chunks.
WIDE = replace(
    CFG,
    extension=0,
    stages=(T.Stage(1.0, 32 * 32, 32, 0, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0)),),
    micro_tokens=32,
    loss_chunk=16,
)


def random_state(cfg, seed=0, tied=False):
    """A state in which everything has a gradient and every moment is there, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    state = T.map_state(
        cfg, lambda shape, row: rng.normal(0, 0.3 if row.sharded else 0.5, shape).astype(np.float32)
    )
    state["second"] = {name: np.square(x) for name, x in state["second"].items()}
    if tied:
        for arrays in state.values():
            arrays["embed"] = arrays["head"].copy()
    return state


def on_mesh(cfg, state, mesh):
    """Such a state padded and cut over the devices."""
    return {kind: lay(cfg, arrays, mesh) for kind, arrays in state.items()}


def copies_on(cfg, params, mesh):
    """Compute copies of such parameters, whole on every device."""
    with quick_compilation():
        return T.start_copies(cfg, mesh)(lay(cfg, params, mesh))


def random_due(cfg, mesh, update):
    """What an update takes: for Adam's parameters the gradients of two steps."""
    found = {name: () for name in UPDATED[update]}
    for seed in (8, 9)[: 1 if update == "muon" else 2]:
        grads = T.compute_copies(cfg, random_state(cfg, seed)["params"])
        grads = spread(cfg, {name: grads[name] for name in found}, mesh)
        found = {name: (*found[name], grad) for name, grad in grads.items()}
    return found


def hyper_on(cfg, step, mesh, **changes):
    hyper = T.hyper_at(cfg, step)._replace(**{k: np.float32(v) for k, v in changes.items()})
    return jax.tree.map(lambda x: T.put(x, mesh, P()), hyper)


def assert_same(got, want):
    """Equal to the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ------------------------------------------------------------------------------------------------
# The same training on any number of devices
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_eight(shards):
    return run_steps(CFG, mesh_of(8), programs_of(CFG, 8), shards)


def test_the_run_has_a_stage_change_an_untying_adam_steps_between_others_and_padding():
    """What the comparisons below rely on."""
    assert CFG.boundaries == (0, 3, 6, 8)
    assert [T.is_adam_step(CFG, step) for step in range(8)] == [False, True] * 4
    assert [T.is_tied(CFG, step) for step in range(8)] == [True] * 6 + [False] * 2
    for devices, batches in ((1, 4), (2, 2), (4, 1), (8, 1)):
        rows = np.zeros((8 // devices, 33), np.uint16)
        assert len(T.micro_batches(CFG, rows)) == batches
    uneven = {name for name in SHARDED if TABLE[name].shape[0] % 8}
    assert uneven == {"head", "embed", "value_tables", "bigram_table", "mlp_bank"}


@pytest.mark.parametrize("devices", DEVICES[:3])
def test_training_does_not_depend_on_the_number_of_devices(shards, on_eight, devices):
    got = run_steps(CFG, mesh_of(devices), programs_of(CFG, devices), shards)
    assert_same_training(got, on_eight)


@pytest.mark.slow
def test_three_devices_train_as_eight_do(shards):
    """On 24 rows."""
    stages = (T.Stage(1.0, 24 * 32, 32, 24, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0)),)
    cfg = replace(CFG, stages=stages, extension=0, steps=4, micro_tokens=256, val_batch=24 * 64)
    found = []
    for devices in (3, 8):
        mesh = T.make_mesh(replace(cfg, devices=devices))
        found.append(run_steps(cfg, mesh, programs_of(cfg, devices), shards))
    assert_same_training(*found)


@pytest.mark.parametrize("change", [{"micro_tokens": 512}, {"recompute": True}])
def test_gradients_do_not_depend_on_micro_tokens_and_recompute(shards, change):
    """All rows at once instead of two; layers computed again on the way back."""
    mesh, cfg = mesh_of(1), replace(CFG, **change)
    assert len(T.micro_batches(cfg, np.zeros((8, 33)))) == (1 if "micro_tokens" in change else 4)
    with quick_compilation():
        lowered = T.lower(T.programs(cfg, mesh, KERNELS)["grads0"], mesh)
        other = lowered.compile()
    barriers = lowered.as_text().count("optimization_barrier")
    assert (barriers >= CFG.layers) == cfg.recompute
    rows, _ = T.plain_rows(T.TokenStream(shards, "train", BOS), 0, 8, 32)
    args = copies_on(CFG, random_state(CFG)["params"], mesh), T.put(rows, mesh, P(T.AXIS))
    (want, wanted), (got, loss) = (
        program(*args, hyper_on(CFG, 0, mesh)) for program in (programs_of(CFG, 1)["grads0"], other)
    )
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    for name in TABLE:
        error = np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])
        assert error < 1e-5, (name, error)


def test_training_changes_every_parameter_and_lowers_the_loss(on_eight):
    losses, state = on_eight
    start = quick(partial(T.init_state, CFG, 1), np.uint32(0))
    for name, value in state["params"].items():
        assert np.abs(value - start["params"][name]).max() > 1e-5, name
    # Capped logits of a small head: 1e-2 from those of a uniform guess.
    assert losses[0] == pytest.approx(np.log(CFG.vocab), abs=0.05)
    assert losses[-1] < losses[0] - 0.3


# ------------------------------------------------------------------------------------------------
# Gradients
# ------------------------------------------------------------------------------------------------


def toy_copies(dtype):
    """Tables and one weight of small whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(1)
    names = *T.TABLES, "head"
    return {name: jnp.asarray(rng.integers(-2, 3, TABLE[name].shape), dtype) for name in names}


def toy_loss(params, rows, tokens, *_):
    """In place of loss_sums: (a sum in which every table has a gradient, another number)."""
    x = rows["embed"] + rows["value_tables"][0] - 2 * rows["value_tables"][1]
    x = (x * tokens[:, :-1, None].astype(x.dtype) + rows["bigram_table"]).astype(jnp.float32)
    weights = params["head"][:3].astype(jnp.float32)
    return jnp.sum(x @ weights.T), jnp.sum(tokens[:, 1:]).astype("float32")


def looked_up(copies, tokens):
    """toy_loss with the lookup inside, so that autodiff goes through it."""
    return toy_loss(copies, T.look_up(CFG, copies, tokens[:, :-1]), tokens)


TOY_TOKENS = np.random.default_rng(0).integers(1, 6, (12, 6)).astype(np.uint16)  # ids repeat


@functools.cache
def toy_autodiff(dtype):
    """((loss, other number), gradients) of all rows at once, in float32."""
    copies = {name: x.astype(jnp.float32) for name, x in toy_copies(dtype).items()}
    return quick(jax.value_and_grad(looked_up, has_aux=True), copies, TOY_TOKENS.astype(np.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro", [1, 2, 3, 6, 12])
def test_accumulated_gradient_is_the_sum_over_all_rows_in_float32(monkeypatch, micro, dtype):
    """That of tables, added row by row, equals autodiff's through the lookup; over rows of the
    batch, the mean."""
    monkeypatch.setattr(T, "loss_sums", toy_loss)
    cfg = replace(CFG, micro_tokens=5 * micro, compute_dtype=dtype)
    stage = T.Stage(1.0, 16 * 8, 8, 0, (1, 1))  # 1 / 16 rows and 1 / 128 tokens are exact
    step = jax.shard_map(
        partial(T.grads_step, cfg, T.PLAIN, stage),
        mesh=mesh_of(1),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    copies = toy_copies(dtype)
    grads, mean = quick(step, copies, TOY_TOKENS, T.hyper_at(CFG, 0))
    (_, want), wanted = toy_autodiff(dtype)
    assert mean == want / 128 == TOY_TOKENS[:, 1:].sum() / 128 and mean.dtype == jnp.float32
    assert grads.keys() == wanted.keys() == copies.keys()
    for name, grad in grads.items():
        assert grad.dtype == dtype and np.abs(wanted[name]).max() > 10
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
        lambda due: T.update_step(cfg, None, due, None),
        mesh=mesh,
        in_specs=P(T.AXIS),
        out_specs=({"params": cut}, P(), P()),
        check_vma=False,
    )
    traced = jax.jit(update).trace(due)
    names = "reduce_scatter|psum\\w*|all_gather"
    sent = re.findall(rf":(\w+)\[[^\]]*\] = ({names})\[", str(traced.jaxpr))
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    large = len(SHARDED & due.keys())
    assert Counter(x for x, name in sent if name == "reduce_scatter") == {short: large}
    assert Counter(x for x, name in sent if name == "all_gather") == {short: large}
    norm = 1  # of which one number travels
    assert Counter(x for x, name in sent if name[:4] == "psum") == {"f32": len(due) - large + norm}
    new, copies, norm = traced.lower().compile()(due)
    every = np.concatenate([x.ravel() for x in wanted.values()]).astype(np.float64)
    np.testing.assert_allclose(norm, np.linalg.norm(every), rtol=1e-6)
    assert_same(new["params"], wanted)
    for name, grad in new["params"].items():
        assert grad.dtype == np.float32 and grad.sharding == NamedSharding(mesh, cut[name])
    assert_same(copies, {name: x.astype(like[name][0].dtype) for name, x in wanted.items()})


@pytest.fixture(scope="module")
def wide():
    """The accumulating gradients of WIDE on 8 devices, lowered and compiled."""
    with quick_compilation():
        lowered = T.lower(T.programs(WIDE, mesh_of(8), KERNELS)["grads0"], mesh_of(8))
        return SimpleNamespace(lowered=lowered, compiled=lowered.compile())


def test_gradient_is_that_of_the_weighted_row_sums_averaged_over_rows(wide, shards):
    """Of 8 devices and 4 micro-batches, against autodiff of the whole batch, lookups included.

    The reported loss is the plain mean over next tokens, whatever the weights.
    """
    mesh, weights = mesh_of(8), np.float32([0.7, 1.9])
    params = random_state(WIDE)["params"]
    rows, _ = T.plain_rows(T.TokenStream(shards, "train", BOS), 0, 32, 32)
    hyper = T.hyper_at(WIDE, 0)._replace(weights=weights)
    tokens = T.put(rows, mesh, P(T.AXIS))
    hyper = jax.tree.map(lambda x: T.put(x, mesh, P()), hyper)
    got, loss = wide.compiled(copies_on(WIDE, params, mesh), tokens, hyper)

    def losses(params):
        tokens = rows.astype(np.int32)
        inputs = tokens[:, :-1]
        found = T.look_up(WIDE, params, inputs)
        x = T.forward(params, found, inputs, WIDE, T.PLAIN, (8, 32), hyper)
        log_probs = jax.nn.log_softmax(T.cap_logits(x @ params["head"].T, WIDE))
        ahead = [
            -jnp.take_along_axis(log_probs[:, : 32 - k], tokens[:, 1 + k :, None], 2).sum()
            for k in (0, 1)
        ]
        return (weights[0] * ahead[0] + weights[1] * ahead[1]) / 32, x

    (_, x), wanted = quick(jax.value_and_grad(losses, has_aux=True), params)
    every = reference.losses(x.reshape(-1, WIDE.width), params["head"], WIDE)
    plain = np.take_along_axis(every, rows[:, 1:].reshape(-1, 1).astype(int), axis=1).mean()
    assert loss.shape == () and loss.dtype == np.float32
    np.testing.assert_allclose(loss, plain, rtol=1e-6)
    assert got.keys() == wanted.keys() == TABLE.keys()
    for name, row in TABLE.items():
        assert np.linalg.norm(wanted[name]) > 1e-3, name
        # float32 sums over 1,024 tokens in another order: about 1e-6 of the gradient
        total = np.asarray(got[name]).reshape(8, *T.padded(row.shape, row, 8)).sum(0)
        assert not total[row.shape[0] :].any()
        error = np.linalg.norm(total[: row.shape[0]] - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 2e-5, name
        assert got[name].sharding == NamedSharding(mesh, P(T.AXIS))


def test_padding_is_never_read(shards):
    """Not a number there, but finite losses and gradients, equal to those over zeros."""
    mesh, found = mesh_of(8), []
    params = copies_on(CFG, random_state(CFG)["params"], mesh)
    rows, _ = T.plain_rows(T.TokenStream(shards, "train", BOS), 0, 8, 64)
    for padding in (0.0, np.nan):
        copies = {name: np.array(x) for name, x in params.items()}
        for name, row in TABLE.items():
            copies[name][row.shape[0] :] = padding
        copies = {name: T.put(x, mesh, P()) for name, x in copies.items()}
        for name in ("grads1", "eval"):
            args = copies, T.put(rows, mesh, P(T.AXIS)), hyper_on(CFG, 3, mesh)
            found.append(jax.device_get(programs_of(CFG, 8)[name](*args)))
    assert_same(found[:2], found[2:])


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
    tokens = np.arange(rows * (row_tokens + 1), dtype=np.uint16).reshape(rows, -1)
    got = T.micro_batches(small_config(micro_tokens=micro_tokens), tokens)
    assert got.shape == (rows // want, want, row_tokens + 1) and got.dtype == jnp.int32
    np.testing.assert_array_equal(got.reshape(rows, -1), tokens)


# ------------------------------------------------------------------------------------------------
# Collectives
# ------------------------------------------------------------------------------------------------

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


def test_gradients_communicate_their_loss_and_never_while_they_accumulate(wide):
    everywhere, in_loops = collectives(wide.compiled.as_text())
    assert set(everywhere) == {"all-reduce"}
    assert in_loops == []


def test_a_collective_inside_the_loop_would_be_found():
    """The same search over gradients that reduce the loss of every micro-batch."""
    mesh = mesh_of(8)
    program = T.programs(WIDE, mesh, KERNELS)["grads0"]

    def reduce_each(copies, tokens, hyper):
        def add(total, tokens):
            rows = T.look_up(WIDE, copies, tokens[:, :-1])
            return total + lax.psum(jnp.sum(rows["embed"]), T.AXIS), None

        total = lax.scan(add, jnp.zeros(()), T.micro_batches(WIDE, tokens))[0]
        return {name: jnp.ones(x.shape) for name, x in copies.items()}, total

    with quick_compilation():
        hlo = T.lower(program._replace(step=reduce_each), mesh).compile().as_text()
    assert "all-reduce" in collectives(hlo)[1]


@pytest.mark.parametrize(
    ("name", "gathered", "scattered", "summed"),
    [
        ("grads0", 0, 0, 1),  # the loss
        ("muon", 2, 2, 1),  # the norm
        ("adam", 4, 4, 13 + 1),
        ("eval", 0, 0, 1),
    ],
)
def test_programs_have_one_collective_for_each_parameter(wide, name, gathered, scattered, summed):
    """An update reduce-scatters or all-reduces its gradients, and gathers what it changed."""
    mesh = mesh_of(8)
    lowered = T.lower(T.programs(WIDE, mesh, KERNELS)[name], mesh)
    text = (wide.lowered if name == "grads0" else lowered).as_text()
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")
    count = [text.count(f'"stablehlo.{name}"') for name in names]
    assert count == [gathered, scattered, summed, 0, 0]


# ------------------------------------------------------------------------------------------------
# State and copies
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compute_copies_have_the_compute_dtype_where_parameters_are_large(dtype):
    cfg = replace(CFG, compute_dtype=dtype)
    params = {name: np.full(row.shape, 1 + 2**-10, np.float32) for name, row in TABLE.items()}
    copies = T.compute_copies(cfg, params)
    assert copies.keys() == TABLE.keys()
    for name, copy in copies.items():
        large = TABLE[name].sharded
        assert copy.dtype == (dtype if large else "float32"), name
        rounded = 1 if large and dtype == "bfloat16" else 1 + 2**-10
        assert copy.shape == TABLE[name].shape and np.all(copy == rounded), name
    assert {"head", *T.TABLES, *UPDATED["muon"]} == SHARDED


@pytest.mark.parametrize("devices", [1, 8])
def test_first_copies_are_the_whole_state_on_every_device(devices):
    params = random_state(CFG)["params"]
    copies = copies_on(CFG, params, mesh_of(devices))
    assert_same(T.unpadded(CFG, copies), params)
    assert all(copy.sharding.is_fully_replicated for copy in copies.values())


@pytest.fixture(scope="module")
def updated():
    """Before and after each update on 8 devices, tied or not; key: (its name, tied)."""
    mesh, compiled, found = mesh_of(8), programs_of(CFG, 8), {}
    for name in UPDATED:
        for tied in (False, True):
            start = random_state(CFG, tied=tied)
            state = on_mesh(CFG, start, mesh)
            about = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
            copies = copies_on(CFG, start["params"], mesh)
            due, hyper = random_due(CFG, mesh, name), hyper_on(CFG, 1, mesh, tied=tied)
            new, changed, _ = compiled[name](state, due, hyper)
            found[name, tied] = SimpleNamespace(
                start=start, about=about, old=state, changed=changed, due=due,
                new=new, copies=copies | changed,
            )  # fmt: skip
    return found


NAMES = pytest.mark.parametrize("name", UPDATED)


@NAMES
@pytest.mark.parametrize("tied", [False, True])
def test_update_keeps_the_copies_in_step_with_the_state(updated, name, tied):
    """Of all that it changes, which are its own parameters; the others stand still."""
    step = updated[name, tied]
    assert set(step.changed) == set(UPDATED[name])
    assert_same(step.copies, step.new["params"])
    for kind in KINDS:
        new = T.unpadded(CFG, step.new[kind])
        moved = {name for name in TABLE if np.any(step.start[kind][name] != new[name])}
        assert moved == set(UPDATED[name]), kind
    same = all(np.array_equal(x["embed"], x["head"]) for x in step.new.values())
    assert same is tied
    assert np.array_equal(step.copies["embed"], step.copies["head"]) is tied


@NAMES
def test_three_devices_update_as_eight_do(updated, name):
    """Which have other padding: of the bank of 8 matrices one has a ninth, the other none."""
    mesh, start = mesh_of(3), random_state(CFG)
    with quick_compilation():
        program = T.lower(T.programs(CFG, mesh, KERNELS)[name], mesh).compile()
    due, hyper = random_due(CFG, mesh, name), hyper_on(CFG, 1, mesh, tied=False)
    new, *_ = program(on_mesh(CFG, start, mesh), due, hyper)
    for kind, arrays in new.items():
        got, want = (T.unpadded(CFG, x) for x in (arrays, updated[name, False].new[kind]))
        for n in TABLE:
            error = np.linalg.norm(got[n] - np.asarray(want[n]))
            assert error < 2e-5 * np.linalg.norm(want[n]), (kind, n)


def test_a_waiting_gradient_counts_exactly_like_one_of_this_step(updated):
    """One Adam step on the sum of two gradients: no other number, whichever came first."""
    mesh, step, program = mesh_of(8), updated["adam", False], programs_of(CFG, 8)["adam"]

    def update(due):
        hyper = hyper_on(CFG, 1, mesh, tied=False)
        return program(on_mesh(CFG, random_state(CFG), mesh), due, hyper)[0]

    assert_same(update({name: parts[::-1] for name, parts in step.due.items()}), step.new)
    alone = update({name: (parts[0], 0 * parts[1]) for name, parts in step.due.items()})
    for name in step.due:
        assert np.any(np.asarray(alone["first"][name]) != step.new["first"][name]), name


@NAMES
def test_update_consumes_the_old_state_and_leaves_the_gradients(updated, name):
    step = updated[name, False]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(step.old))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(step.due))


@NAMES
def test_update_writes_the_state_where_the_old_one_was(name):
    """On each device, its share of what is cut and all of what is not."""
    state = T.abstract_state(CFG, mesh_of(8))
    size = sum(np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state))
    memory = programs_of(CFG, 8)[name].memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * size


@NAMES
def test_update_keeps_shapes_dtypes_and_shardings(updated, name):
    step = updated[name, False]
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), step.new) == step.about
    assert {leaf.dtype for leaf in jax.tree.leaves(step.new)} == {np.dtype("float32")}


def test_update_rounds_its_copies_to_bfloat16():
    """And the next update starts from the float32 masters: small changes are not lost."""
    cfg, mesh = replace(CFG, compute_dtype="bfloat16"), mesh_of(1)
    start = random_state(cfg)
    with quick_compilation():
        program = T.lower(T.programs(cfg, mesh, KERNELS)["adam"], mesh).compile()
    due, hyper = random_due(cfg, mesh, "adam"), hyper_on(cfg, 1, mesh, lr=1e-3)
    state, copies, _ = program(on_mesh(cfg, start, mesh), due, hyper)
    for name in UPDATED["adam"]:
        want = np.asarray(state["params"][name])
        assert np.any(want != start["params"][name]), name
        rounded = want.astype(cfg.dtype) if TABLE[name].sharded else want
        np.testing.assert_array_equal(copies[name], rounded, err_msg=name)
    before = start["params"]["head"]
    moved = np.asarray(state["params"]["head"]) != before
    hidden = np.asarray(copies["head"]) == before.astype(cfg.dtype)
    assert np.mean(moved & hidden) > 0.5


def test_state_is_cut_over_the_devices_and_copies_are_whole(updated):
    step = updated["adam", False]
    for arrays in step.new.values():
        for name, array in arrays.items():
            cut = (array.shape[0] // 8, *array.shape[1:]) if name in SHARDED else array.shape
            assert [s.data.shape for s in array.addressable_shards] == [cut] * 8, name
            assert len({s.device for s in array.addressable_shards}) == 8
    for name, copy in step.copies.items():
        whole = T.padded(TABLE[name].shape, TABLE[name], 8)
        assert [s.data.shape for s in copy.addressable_shards] == [whole] * 8


# ------------------------------------------------------------------------------------------------
# Programs
# ------------------------------------------------------------------------------------------------


def test_a_step_is_its_stages_gradients_and_one_or_two_updates():
    cfg = small_config()  # stages of 4, 4 and 2 steps
    steps = [T.programs_of(cfg, step) for step in range(cfg.steps)]
    assert [names[0] for names in steps] == ["grads0"] * 4 + ["grads1"] * 4 + ["grads2"] * 2
    assert [names[1:] for names in steps] == [("muon",), ("muon", "adam")] * 5


@pytest.mark.parametrize("every", [1, 2, 3, 5, 11])
def test_gradients_wait_for_their_update_and_no_longer(every):
    """Each goes into one update, which takes as many as its program is made for."""
    cfg = small_config(adam_every=every)
    found, waiting = T.programs(cfg, mesh_of(1), T.PLAIN), {}
    for step in range(10):
        assert set(T.programs_of(cfg, step)) <= set(found)
        waiting = {name: (*waiting.get(name, ()), step) for name in T.param_table(cfg)}
        for update in T.programs_of(cfg, step)[1:]:
            due = {name: waiting.pop(name) for name in T.updated(cfg, update)}
            takes = {name: len(grads) for name, grads in found[update].args[1].items()}
            assert {name: len(grads) for name, grads in due.items()} == takes
            first = step if update == "muon" else step - every + 1
            assert set(due.values()) == {tuple(range(first, step + 1))}
        adam_too = (step + 1) % every == 0
        assert waiting.keys() == (set() if adam_too else set(T.updated(cfg, "adam")))


def test_every_parameter_has_one_update():
    muon, adam = (T.updated(T.Config(), name) for name in ("muon", "adam"))
    assert muon == ["attn_bank", "mlp_bank"]
    assert sorted(muon + adam) == sorted(T.param_table(T.Config()))
    assert list(T.param_table(T.Config())) == adam[:4] + muon + adam[4:]  # in the table's order


def test_programs_of_the_record_on_eight_devices():
    """Shapes of all that goes in, and where it lies, without a device that could hold it."""
    cfg, mesh = T.Config(), mesh_of(8)
    found = T.programs(cfg, mesh, T.PLAIN)
    assert list(found) == ["grads0", "grads1", "grads2", "grads3", "muon", "adam", "eval"]
    rows = {"grads0": (8, 16_385), "grads1": (8, 32_769), "grads2": (8, 49_153)}
    rows |= {"grads3": (8, 49_153), "eval": (8, 262_145)}
    for name, shape in rows.items():
        copies, tokens, hyper = found[name].args
        assert (tokens.shape, tokens.dtype, tokens.sharding.spec) == (shape, np.uint16, P(T.AXIS))
        assert copies["mlp_bank"].shape == (24, 3072, 768) and copies["mlp_bank"].dtype == cfg.dtype
        assert {x.sharding.spec for x in jax.tree.leaves((copies, hyper))} == {P()}
        assert found[name].out == (P() if name == "eval" else (P(T.AXIS), P()))
        assert found[name].donates == ()
    for name, steps in (("muon", 1), ("adam", 2)):
        state, due, _ = found[name].args
        assert jax.tree.all(jax.tree.map(lambda x, y: x == y, state, T.abstract_state(cfg, mesh)))
        assert list(due) == T.updated(cfg, name) and {len(x) for x in due.values()} == {steps}
        assert found[name].donates == (0,)
    (bank,), (table, _) = found["muon"].args[1]["mlp_bank"], found["adam"].args[1]["head"]
    assert (bank.shape, bank.dtype, bank.sharding.spec) == (
        (8 * 24, 3072, 768),
        cfg.dtype,
        P("data"),
    )
    assert (table.shape, table.dtype) == ((8 * 50_304, 768), cfg.dtype)
    gates, _ = found["adam"].args[1]["attn_gate"]
    assert (gates.shape, gates.dtype) == ((8 * 10, 6, 12), np.float32)


@pytest.mark.parametrize("name", T.programs(CFG, mesh_of(2), T.PLAIN))
def test_masters_and_losses_are_float32_also_in_bfloat16(name):
    cfg, mesh = replace(CFG, compute_dtype="bfloat16"), mesh_of(2)
    program = T.programs(cfg, mesh, KERNELS)[name]
    out = T.lower(program, mesh).out_info
    about = partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    state, copies = (
        about(T.abstract_state(cfg, mesh)),
        about(T.programs(cfg, mesh, KERNELS)["eval"].args[0]),
    )
    assert {dtype for x in state.values() for _, dtype in x.values()} == {np.dtype("float32")}
    assert copies["head"] == ((102, 32), "bfloat16") and copies["attn_gate"][1] == "float32"
    loss = (), np.dtype("float32")
    # Each device's gradients, one above the other.
    grads = {name: ((2 * x[0], *x[1:]), dtype) for name, (x, dtype) in copies.items()}
    if name in UPDATED:
        want = state, {name: copies[name] for name in UPDATED[name]}, loss  # or a norm
    else:
        want = loss if name == "eval" else (grads, loss)
    assert about(out) == want


def test_warm_up_runs_every_program_once_and_consumes_its_state():
    mesh, ran = mesh_of(8), []

    def told(name, program):
        return lambda *args: ran.append(name) or program(*args)

    compiled = {name: told(name, program) for name, program in programs_of(CFG, 8).items()}
    state = on_mesh(CFG, random_state(CFG), mesh)
    T.warm_up(CFG, mesh, compiled, state, copies_on(CFG, random_state(CFG)["params"], mesh))
    assert sorted(ran) == sorted(compiled)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


# ------------------------------------------------------------------------------------------------
# Validation
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def val(shards):
    return T.TokenStream(shards, "val", BOS)


@pytest.fixture(scope="module")
def direct_loss(val):
    """Steps done -> mean loss of random_state over the first val_tokens, summed in float64."""
    params = random_state(CFG)["params"]
    tokens = val.read(0, CFG.val_tokens + 1).astype(np.int32)
    rows = tokens[:-1].reshape(-1, CFG.val_row)
    a, b, c = CFG.logit_cap

    def features(params, hyper):
        found = T.look_up(CFG, params, rows)
        return T.forward(params, found, rows, CFG, T.PLAIN, CFG.val_windows, hyper)

    with quick_compilation():
        program = jax.jit(features).lower(params, T.hyper_at(CFG, 0)).compile()

    def loss(step):
        x = np.asarray(program(params, T.hyper_at(CFG, step)), np.float64).reshape(-1, CFG.width)
        logits = a / (1 + np.exp(-(x @ params["head"].T.astype(np.float64) + b) / c))
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), tokens[1:]]
        assert len(losses) == CFG.val_tokens
        return losses.mean()

    return {done: loss(max(done - 1, 0)) for done in (0, 3, 8)}


@pytest.mark.parametrize("devices", DEVICES)
def test_evaluate_is_the_plain_mean_over_the_first_val_tokens(val, direct_loss, devices):
    """Weight 1 also in the stage that predicts two tokens; rotation and scale of the last step,
    also where the next one (step 3, from 0) has those of another stage."""
    mesh, program = mesh_of(devices), programs_of(CFG, devices)["eval"]
    copies = copies_on(CFG, random_state(CFG)["params"], mesh)
    for done in (0, 3, 8) if devices == 8 else (3,):
        got = T.evaluate(CFG, mesh, program, copies, done, val)
        assert got == pytest.approx(direct_loss[done], rel=1e-6), done  # float32 sums of 512 losses
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(copies))
    assert direct_loss[0] == direct_loss[3] != pytest.approx(direct_loss[8], rel=1e-5)


def test_evaluate_does_not_depend_on_val_batch(val, direct_loss):
    cfg, mesh = replace(CFG, val_batch=1024), mesh_of(8)
    with quick_compilation():
        program = T.lower(T.programs(cfg, mesh, KERNELS)["eval"], mesh).compile()
    copies = copies_on(CFG, random_state(CFG)["params"], mesh)
    got = T.evaluate(cfg, mesh, program, copies, 3, val)
    assert got == pytest.approx(direct_loss[3], rel=1e-6)


# ------------------------------------------------------------------------------------------------
# Mesh
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 3}, r"stages.0.batch_tokens has 8 rows, which 3 devices cannot share equally: "
                         r"use --set devices=N with a divisor of 8"),
        ({"devices": 16}, r"devices=16, but there are 8: use a smaller number or 0"),
        (
            {"stages": (T.Stage(1.0, 4 * 32, 32, 0, (8, 32)),), "extension": 0},
            r"stages.0.batch_tokens has 4 rows, which 8 devices cannot share equally",
        ),
        ({"val_batch": 256}, r"val_batch has 4 rows, which 8 devices cannot share equally"),
    ],
)  # fmt: skip
def test_make_mesh_refuses_devices_that_cannot_share_the_work(changes, message):
    with pytest.raises(T.UserError, match=message):
        T.make_mesh(small_config(**changes))


@pytest.mark.parametrize(("devices", "want"), [(0, 8), (1, 1), (2, 2), (4, 4), (8, 8)])
def test_make_mesh_takes_the_first_devices(devices, want):
    mesh = T.make_mesh(small_config(devices=devices))
    assert mesh.axis_names == (T.AXIS,)
    assert mesh.devices.tolist() == jax.devices()[:want]
    one = T.put(np.arange(8, dtype=np.float32), mesh, P(T.AXIS))
    assert one.sharding == NamedSharding(mesh, P(T.AXIS))
