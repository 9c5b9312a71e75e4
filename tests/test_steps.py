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
from conftest import BOS, small_config
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import CFG, mesh_of, no_wishes, programs_of, quick, quick_compilation, spread

import train_gpt as T

DEVICES = [1, 2, pytest.param(4, marks=pytest.mark.slow), 8]
TABLE = T.param_table(CFG)
BANKS = {name for name, row in TABLE.items() if row.optimizer == "muon"}
SHARDED = {name for name, row in TABLE.items() if row.sharded}
MUON, ADAM = (T.Variant("update", adam=adam) for adam in (False, True))
# On 8 devices with one row of 32 tokens at a time: four micro-batches for each step, and the logits
# of each in two chunks.
WIDE = replace(
    CFG,
    extension=0,
    stages=(T.Stage(1.0, 32 * 32, 32, 0, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0)),),
    micro_tokens=32,
    loss_chunk=16,
)
WIDE_GRADS = T.step_variants(WIDE, 0)[0]


def random_state(cfg, mesh, seed=0, tied=False):
    """A state in which everything has a gradient and every moment is there."""
    rng = np.random.default_rng(seed)

    def leaf(kind, row):
        values = rng.normal(0, 0.3 if row.sharded else 0.5, T.state_shape(kind, row))
        values = np.square(values) if kind == "second" else values
        return T.put(values.astype(np.float32), mesh, T.partition(row))

    state = T.map_state(cfg, leaf)
    if tied:
        for kind in ("params", "first", "second"):
            state[kind]["embed"] = jnp.copy(state[kind]["head"])
    return state


def random_due(cfg, mesh, update):
    """What an update takes: for Adam's parameters the gradients of two steps."""
    waiting = {}
    for seed, variant in ((8, MUON), (9, update)):
        grads = jax.device_get(random_state(cfg, mesh, seed)["params"])
        dtypes = T.abstract_copies(cfg, mesh)
        grads = {name: x.astype(dtypes[name].dtype) for name, x in grads.items()}
        if variant == update:
            return T.split_due(cfg, update, waiting, spread(grads, mesh))[0]
        waiting = T.split_due(cfg, variant, waiting, spread(grads, mesh))[1]


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


def train(cfg, devices, programs, folder):
    """(losses, final state) of the steps of `cfg`."""
    mesh, losses = mesh_of(devices), []
    state = programs["init"](T.put(np.uint32(0), mesh, P()))
    copies, waiting = programs["copies"](state["params"]), {}
    stream = T.TokenStream(folder, "train", BOS)
    for step, batch in enumerate(T.train_batches(cfg, mesh, stream, 0, 0)):
        variants = T.step_variants(cfg, step)
        state, copies, waiting, report = T.run_step(
            cfg, programs, variants, state, copies, waiting, batch, no_wishes(mesh)
        )
        losses.append(float(report[0]))
    return losses, jax.device_get(state)


@pytest.fixture(scope="module")
def on_eight(shards):
    return train(CFG, 8, programs_of(CFG, 8), shards)


def assert_same_training(got, want):
    """Equal but for the order of float32 sums, about 1e-7, of which each step makes more.

    Most comes from Muon: orthogonalization lifts small singular values, and with them their
    rounding error, by up to a thousand. Measured: 2e-7 for losses, 3e-6 for parameters.
    """
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6)
    for name, value in want[1]["params"].items():
        error = np.linalg.norm(got[1]["params"][name] - value) / np.linalg.norm(value)
        assert error < 2e-5, name


def test_the_run_has_a_stage_change_an_untying_and_adam_steps_between_others():
    """What the comparisons below rely on."""
    assert CFG.boundaries == (0, 3, 6, 8)
    assert [T.is_adam_step(CFG, step) for step in range(8)] == [False, True] * 4
    assert [T.is_tied(CFG, step) for step in range(8)] == [True] * 6 + [False] * 2
    assert [T.micro_rows(CFG, 8 // n, 32) for n in (1, 2, 4, 8)] == [2, 2, 2, 1]


@pytest.mark.parametrize("devices", DEVICES[:3])
def test_training_does_not_depend_on_the_number_of_devices(shards, on_eight, devices):
    assert_same_training(train(CFG, devices, programs_of(CFG, devices), shards), on_eight)


def test_training_does_not_depend_on_micro_tokens(shards, on_eight):
    cfg, mesh = replace(CFG, micro_tokens=512), mesh_of(1)
    assert T.micro_rows(cfg, 8, 64) == 8 and T.micro_rows(CFG, 8, 64) == 1
    programs = dict(programs_of(CFG, 1))  # updates do not know of micro-batches
    with quick_compilation():
        for variant in programs:
            if isinstance(variant, T.Variant) and variant.kind == "grads":
                programs[variant] = T.lower_variant(cfg, variant, mesh).compile()
    assert_same_training(train(cfg, 1, programs, shards), on_eight)


def test_training_changes_every_parameter_and_lowers_the_loss(on_eight):
    losses, state = on_eight
    start = quick(partial(T.init_state, CFG), np.uint32(0))
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
    shapes = {name: TABLE[name].shape for name in T.TABLES} | {"w": (CFG.width, 3)}
    return {name: jnp.asarray(rng.integers(-2, 3, x), dtype) for name, x in shapes.items()}


def toy_loss(weights, rows, tokens):
    """(a sum over rows in which every table has a gradient, another number)."""
    x = rows["embed"] + rows["value_tables"][0] - 2 * rows["value_tables"][1]
    x = (x * tokens[:, :-1, None].astype(x.dtype) + rows["bigram_table"]).astype(jnp.float32)
    return jnp.sum(x @ weights["w"].astype(jnp.float32)), jnp.sum(tokens[:, 1:]).astype("float32")


def looked_up(copies, tokens):
    """toy_loss with the lookup inside, so that autodiff goes through it."""
    return toy_loss(copies, T.look_up(CFG, copies, tokens[:, :-1]), tokens)


TOY_TOKENS = np.random.default_rng(0).integers(1, 6, (12, 6)).astype(np.int32)  # ids repeat


@functools.cache
def toy_autodiff(dtype):
    """((loss, other number), gradients) of all rows at once, in float32."""
    copies = {name: x.astype(jnp.float32) for name, x in toy_copies(dtype).items()}
    return quick(jax.value_and_grad(looked_up, has_aux=True), copies, TOY_TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro", [1, 2, 3, 6, 12])
def test_accumulated_gradient_is_the_sum_over_all_rows_in_float32(micro, dtype):
    """That of tables, added row by row, equals autodiff's through the lookup."""
    step = partial(T.accumulate, CFG, toy_loss, T.scatter_rows, micro=micro)
    copies = toy_copies(dtype)
    (plain, grads), ((_, want), wanted) = quick(step, copies, TOY_TOKENS), toy_autodiff(dtype)
    assert plain == want == TOY_TOKENS[:, 1:].sum() and plain.dtype == jnp.float32
    assert grads.keys() == wanted.keys() == copies.keys()
    for name, grad in grads.items():
        assert grad.dtype == dtype and np.abs(wanted[name]).max() > 10
        want = wanted[name].astype(dtype)
        # Whole numbers below 2^8 are exact in bfloat16; only w's gradient, a sum over a
        # micro-batch, is larger and has the 8 bits of its parameter before it is added up.
        exact = dtype == "float32" or name != "w"
        atol = 0 if exact else 2**-7 * float(np.abs(wanted[name]).max())
        np.testing.assert_allclose(
            grad.astype("float32"), want.astype("float32"), rtol=0, atol=atol, err_msg=name
        )
    used = np.unique(TOY_TOKENS[:, :-1])
    assert np.flatnonzero(np.abs(grads["embed"]).sum(1)).tolist() == used.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reduced_gradients_are_the_sums_over_steps_and_devices_cut_or_whole(dtype):
    """Large ones travel in the compute dtype; of numbers so small that sums are exact in it."""
    cfg, mesh, rng = replace(CFG, compute_dtype=dtype), mesh_of(8), np.random.default_rng(0)
    steps = {name: 1 if name in BANKS else 2 for name in TABLE}
    parts = {
        name: rng.integers(-7, 8, (8, steps[name], *row.shape)).astype(np.float32)
        for name, row in TABLE.items()
    }
    due = {
        name: tuple(
            T.put(x[:, i].reshape(-1, *x.shape[3:]).astype(like.dtype), mesh, P(T.AXIS))
            for i, like in enumerate(T.abstract_due(cfg, mesh, ADAM)[name])
        )
        for name, x in parts.items()
    }
    assert {name: len(x) for name, x in due.items()} == steps
    outs = {name: T.partition(row) for name, row in TABLE.items()}
    reduce = jax.shard_map(
        partial(T.reduce_grads, cfg),
        mesh=mesh,
        in_specs=P(T.AXIS),
        out_specs=outs,
        check_vma=False,
    )
    traced = jax.jit(reduce).trace(due)
    sent = re.findall(r":(\w+)\[[^\]]*\] = (reduce_scatter|psum\w*)\[", str(traced.jaxpr))
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    small = len(TABLE) - len(SHARDED)
    assert Counter(x for x, name in sent if name == "reduce_scatter") == {short: len(SHARDED)}
    assert Counter(x for x, name in sent if name != "reduce_scatter") == {"f32": small}
    got = traced.lower().compile()(due)
    assert_same(got, jax.tree.map(lambda x: x.sum((0, 1)), parts))
    for name, grad in got.items():
        assert grad.sharding == NamedSharding(mesh, T.partition(TABLE[name]))


def test_adam_gradients_wait_for_their_update_and_no_longer():
    waiting, banks = {}, sorted(BANKS)
    for step in range(6):
        _, update = T.step_variants(CFG, step)
        grads = dict.fromkeys(TABLE, step)
        due, waiting = T.split_due(CFG, update, waiting, grads)
        assert {due[name] for name in banks} == {(step,)}
        if step % 2:
            assert {due[name] for name in TABLE if name not in banks} == {(step - 1, step)}
            assert due.keys() == TABLE.keys() and not waiting
        else:
            assert due.keys() == BANKS and waiting.keys() == TABLE.keys() - BANKS


@pytest.fixture(scope="module")
def wide():
    """The accumulating gradients of WIDE on 8 devices, lowered and compiled."""
    with quick_compilation():
        lowered = T.lower_variant(WIDE, WIDE_GRADS, mesh_of(8))
        return SimpleNamespace(lowered=lowered, compiled=lowered.compile())


def test_gradient_is_that_of_the_weighted_row_sums_averaged_over_rows(wide, shards):
    """Of 8 devices and 4 micro-batches, against autodiff of the whole batch, lookups included.

    The reported loss is the plain mean over next tokens, whatever the weights.
    """
    mesh, weights = mesh_of(8), np.float32([0.7, 1.9])
    params = jax.device_get(random_state(WIDE, mesh)["params"])
    rows, _ = T.plain_rows(T.TokenStream(shards, "train", BOS), 0, 32, 32)
    hyper = T.hyper_at(WIDE, 0)._replace(weights=weights)
    copies = jax.tree.map(lambda x: T.put(x, mesh, P()), params)
    tokens = T.put(rows, mesh, P(T.AXIS))
    hyper = jax.tree.map(lambda x: T.put(x, mesh, P()), hyper)
    got, (loss, *_) = wide.compiled(copies, tokens, hyper, no_wishes(mesh))

    def losses(params):
        tokens = rows.astype(np.int32)
        inputs = tokens[:, :-1]
        found = T.look_up(WIDE, params, inputs)
        x = T.forward(params, found, inputs, WIDE, (8, 32), hyper, T.ATTENTION["xla"])
        log_probs = jax.nn.log_softmax(T.cap_logits(x @ params["head"].T, WIDE))
        ahead = [
            -jnp.take_along_axis(log_probs[:, : 32 - k], tokens[:, 1 + k :, None], 2).sum()
            for k in (0, 1)
        ]
        return (weights[0] * ahead[0] + weights[1] * ahead[1]) / 32, ahead[0] / (32 * 32)

    (_, plain), wanted = quick(jax.value_and_grad(losses, has_aux=True), params)
    np.testing.assert_allclose(loss, plain, rtol=1e-6)
    assert got.keys() == wanted.keys() == TABLE.keys()
    for name in TABLE:
        assert np.linalg.norm(wanted[name]) > 1e-3, name
        # float32 sums over 1,024 tokens in another order: about 1e-6 of the gradient
        total = np.asarray(got[name]).reshape(8, *TABLE[name].shape).sum(0)
        error = np.linalg.norm(total - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 2e-5, name
        assert got[name].sharding == NamedSharding(mesh, P(T.AXIS))


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


def test_a_collective_inside_the_loop_would_be_found(monkeypatch):
    """The same search over gradients that reduce the loss of every micro-batch."""

    def reduce_each(cfg, loss, add_rows, copies, tokens, micro):
        def add(total, tokens):
            rows = T.look_up(cfg, copies, tokens[:, :-1])
            plain = loss(copies, rows, tokens)[1]
            return total + lax.psum(plain, T.AXIS), None

        total = lax.scan(add, jnp.zeros(()), tokens.reshape(-1, micro, tokens.shape[1]))[0]
        return total, {name: jnp.ones(x.shape) for name, x in copies.items()}

    monkeypatch.setattr(T, "accumulate", reduce_each)
    with quick_compilation():
        hlo = T.lower_variant(WIDE, WIDE_GRADS, mesh_of(8)).compile().as_text()
    assert "all-reduce" in collectives(hlo)[1]


@pytest.mark.parametrize(
    ("variant", "gathered", "scattered", "summed"),
    [
        (WIDE_GRADS, 0, 0, 1),  # the loss
        (MUON, len(BANKS), len(BANKS), 0),
        (ADAM, len(SHARDED), len(SHARDED), len(TABLE) - len(SHARDED)),
        (T.eval_variant(WIDE), 0, 0, 1),
    ],
    ids=lambda x: x.name if isinstance(x, T.Variant) else "",
)
def test_programs_have_one_collective_for_each_parameter(
    wide, variant, gathered, scattered, summed
):
    """An update reduce-scatters or all-reduces its gradients, and gathers what it changed."""
    lowered = wide.lowered if variant == WIDE_GRADS else T.lower_variant(WIDE, variant, mesh_of(8))
    text = lowered.as_text()
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
    assert {"head", "embed", *T.TABLES, *BANKS} == {n for n, row in TABLE.items() if row.sharded}


def test_compute_copies_makes_only_those_that_are_named():
    params = {name: np.zeros(row.shape, np.float32) for name, row in TABLE.items()}
    assert T.compute_copies(CFG, params, names=["x0_lambdas", "head"]).keys() == {
        "x0_lambdas", "head"
    }  # fmt: skip


@pytest.mark.parametrize("devices", [1, 8])
def test_copies_program_gathers_the_whole_state(devices):
    state = random_state(CFG, mesh_of(devices))
    copies = programs_of(CFG, devices)["copies"](state["params"])
    assert_same(copies, state["params"])
    assert all(copy.sharding.is_fully_replicated for copy in copies.values())


@pytest.fixture(scope="module")
def updated():
    """Before and after each update on 8 devices, tied or not; key: (with Adam, tied)."""
    mesh, programs, found = mesh_of(8), programs_of(CFG, 8), {}
    for with_adam in (False, True):
        for tied in (False, True):
            state = random_state(CFG, mesh, tied=tied)
            # Not from `state` itself: a buffer that NumPy looks into cannot be donated.
            start = jax.device_get(random_state(CFG, mesh, tied=tied))
            about = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
            copies, variant = programs["copies"](state["params"]), ADAM if with_adam else MUON
            due, hyper = random_due(CFG, mesh, variant), hyper_on(CFG, 1, mesh, tied=tied)
            new, changed = programs[variant](state, due, hyper)
            found[with_adam, tied] = SimpleNamespace(
                start=start, about=about, old=state, changed=changed, due=due,
                new=new, copies=copies | changed,
            )  # fmt: skip
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("with_adam", [False, True])
def test_update_keeps_the_copies_in_step_with_the_state(updated, with_adam, tied):
    """All of them after an Adam step, the banks after a Muon step, when the others stand still."""
    step = updated[with_adam, tied]
    assert set(step.changed) == (set(TABLE) if with_adam else BANKS)
    assert_same(step.copies, step.new["params"])
    moved = {name for name in TABLE if np.any(step.start["params"][name] != step.copies[name])}
    assert moved == (set(TABLE) if with_adam else BANKS)
    same = all(
        np.array_equal(step.new[kind]["embed"], step.new[kind]["head"])
        for kind in ("params", "first", "second")
    )
    assert same is tied
    assert np.array_equal(step.copies["embed"], step.copies["head"]) is tied


def test_a_waiting_gradient_counts_exactly_like_one_of_this_step(updated):
    """One Adam step on the sum of two gradients: no other number, whichever came first."""
    mesh, step = mesh_of(8), updated[True, False]
    due = {name: parts if name in BANKS else parts[::-1] for name, parts in step.due.items()}
    hyper = hyper_on(CFG, 1, mesh, tied=False)
    new, _ = programs_of(CFG, 8)[ADAM](random_state(CFG, mesh), due, hyper)
    assert_same(new, step.new)
    alone, _ = programs_of(CFG, 8)[ADAM](
        random_state(CFG, mesh),
        {n: parts if n in BANKS else (parts[0], 0 * parts[1]) for n, parts in due.items()},
        hyper,
    )
    for name in TABLE.keys() - BANKS:
        assert np.any(np.asarray(alone["first"][name]) != new["first"][name]), name


@pytest.mark.parametrize("with_adam", [False, True])
def test_update_consumes_the_old_state_and_leaves_the_gradients(updated, with_adam):
    step = updated[with_adam, False]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(step.old))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(step.due))


@pytest.mark.parametrize("variant", [MUON, ADAM], ids=["muon", "adam"])
def test_update_writes_the_state_where_the_old_one_was(variant):
    """On each device, its share of what is cut and all of what is not."""
    size = 0
    for kind, rows in T.map_state(CFG, lambda kind, row: row).items():
        for row in rows.values():
            size += np.prod(T.state_shape(kind, row)) / (8 if row.sharded else 1)
    program = programs_of(CFG, 8)[variant]
    assert program.memory_analysis().alias_size_in_bytes >= 4 * size


@pytest.mark.parametrize("with_adam", [False, True])
def test_update_keeps_shapes_dtypes_and_shardings(updated, with_adam):
    step = updated[with_adam, False]
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), step.new) == step.about
    assert {leaf.dtype for leaf in jax.tree.leaves(step.new)} == {np.dtype("float32")}


@pytest.mark.parametrize("variant", T.executions(CFG), ids=lambda variant: variant.name)
def test_masters_and_losses_are_float32_also_in_bfloat16(variant):
    cfg, mesh = replace(CFG, compute_dtype="bfloat16"), mesh_of(2)
    out = T.lower_variant(cfg, variant, mesh).out_info
    about = partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    state, copies = about(T.abstract_state(cfg, mesh)), about(T.abstract_copies(cfg, mesh))
    assert {dtype for x in state.values() for _, dtype in x.values()} == {np.dtype("float32")}
    assert copies["head"][1] == "bfloat16" and copies["attn_gate"][1] == "float32"
    loss, report = (((), np.dtype("float32")), ((3,), np.dtype("float32")))
    # Each device's gradients, one above the other.
    grads = {name: ((2 * x[0], *x[1:]), dtype) for name, (x, dtype) in copies.items()}
    changed = {name: copies[name] for name in T.updated_names(cfg, variant)}
    want = {"update": (state, changed), "grads": (grads, report), "eval": loss}
    assert about(out) == want[variant.kind]


def test_update_rounds_its_copies_to_bfloat16():
    """And the next update starts from the float32 masters: small changes are not lost."""
    cfg, mesh = replace(CFG, compute_dtype="bfloat16"), mesh_of(1)
    state = random_state(cfg, mesh)
    with quick_compilation():
        program = T.lower_variant(cfg, ADAM, mesh).compile()
    due, hyper = random_due(cfg, mesh, ADAM), hyper_on(cfg, 1, mesh, lr=1e-3)
    before = jax.device_get(state["params"])
    state, copies = program(state, due, hyper)
    for name, row in TABLE.items():
        want = np.asarray(state["params"][name])
        assert np.any(want != before[name]), name
        rounded = want.astype(cfg.dtype) if row.sharded else want
        np.testing.assert_array_equal(copies[name], rounded, err_msg=name)
    moved = np.asarray(state["params"]["head"]) != before["head"]
    hidden = np.asarray(copies["head"]) == before["head"].astype(cfg.dtype)
    assert np.mean(moved & hidden) > 0.5


def test_state_is_cut_over_the_devices_and_copies_are_whole(updated):
    step = updated[True, False]
    for arrays in step.new.values():
        for name, array in arrays.items():
            cut = (array.shape[0] // 8, *array.shape[1:]) if name in SHARDED else array.shape
            assert [s.data.shape for s in array.addressable_shards] == [cut] * 8, name
            assert len({s.device for s in array.addressable_shards}) == 8
    for name, copy in step.copies.items():
        assert [s.data.shape for s in copy.addressable_shards] == [TABLE[name].shape] * 8


# ------------------------------------------------------------------------------------------------
# Variants and compilation
# ------------------------------------------------------------------------------------------------


def test_programs_of_a_run_in_order_of_use_and_how_often_they_run():
    cfg = small_config()  # 10 steps; validation of 2 batches after 0, 4, 8 and 10
    names = {variant.name: count for variant, count in T.executions(cfg).items()}
    assert list(names.items()) == [
        ("grads-b256-r32-w8-32-k2", 4),
        ("update-muon", 5),
        ("update-muon-adam", 5),
        ("grads-b512-r64-w16-64-k1", 4),
        ("grads-b512-r64-w24-64-k1", 2),
        ("eval-b512-r64-w24-64-k1", 8),
    ]
    assert T.executions(replace(cfg, val_every=0))[T.eval_variant(cfg)] == 2
    assert MUON not in T.executions(replace(cfg, adam_every=1))
    assert T.executions(replace(cfg, adam_every=3))[ADAM] == 3


def test_programs_of_the_speedrun():
    names = {variant.name: count for variant, count in T.executions(T.PRESETS["speedrun"]).items()}
    assert names == {
        "grads-b131072-r16384-w128-384-k3": 483,
        "grads-b262144-r32768-w384-896-k2": 484,
        "grads-b393216-r49152-w640-1408-k1": 483,
        "grads-b393216-r49152-w768-1664-k1": 40,
        "update-muon": 745,
        "update-muon-adam": 745,
        "eval-b2097152-r262144-w768-2560-k1": 5 * (6 + 1),  # after 0, 250, ..., 1250 and 1490
    }


def test_a_step_is_its_stages_gradients_and_an_update():
    cfg = small_config()
    steps = [T.step_variants(cfg, step) for step in range(cfg.steps)]
    assert [grads.windows for grads, _ in steps] == [(8, 32)] * 4 + [(16, 64)] * 4 + [(24, 64)] * 2
    assert [grads.ahead for grads, _ in steps] == [2] * 4 + [1] * 6
    assert [update for _, update in steps] == [MUON, ADAM] * 5
    assert {grads.kind for grads, _ in steps} == {"grads"} and {g.rows for g, _ in steps} == {8}
    assert MUON.rows == 0


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"lr_factor": 0.5}, 1),
        ({"doc_cap": 16}, 1),
        ({"weights": (0.3, 0.2)}, 1),
        ({"weights": (1.0,), "weights_end": (1.0,)}, 2),
        ({"row_tokens": 64}, 2),
        ({"windows": (8, 16)}, 2),
        ({"batch_tokens": 512}, 2),
    ],
)
def test_stages_share_a_program_if_they_differ_only_in_what_is_data(change, count):
    stage = T.Stage(0.5, 256, 32, 0, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0))
    cfg = small_config(stages=(stage, replace(stage, **change)), extension=0)
    found = [variant for variant in T.executions(cfg) if variant.kind == "grads"]
    assert len(found) == count
    assert len({variant.name for variant in T.executions(cfg)}) == len(T.executions(cfg))


def test_long_compilations_give_signs_of_life(monkeypatch):
    monkeypatch.setattr(T, "HEARTBEAT_SECONDS", 0.02)
    said, begun = [], {"first": T.time.perf_counter() - 100, "second": T.time.perf_counter()}
    with T.heartbeat(said.append, begun):
        while len(said) < 2:
            T.time.sleep(0.01)
    count = len(said)
    T.time.sleep(0.1)
    assert len(said) == count
    assert re.fullmatch(r"still compiling first \(100 s\), second \(0 s\)", said[0])


def test_compile_all_reports_each_program(monkeypatch):
    """With few programs, and those in float32 that say most: the others take seconds."""
    lines, some = [], {MUON: 4, T.eval_variant(CFG): 6}
    monkeypatch.setattr(T, "executions", lambda cfg: some)
    with quick_compilation():
        programs, seconds = T.compile_all(CFG, mesh_of(1), lines.append)
    assert list(programs) == ["init", "copies", *some]
    names = ["init", "copies", "update-muon", "eval-b512-r64-w24-64-k1"]
    assert list(seconds) == names and min(seconds.values()) > 0
    assert sorted(line.split()[1] for line in lines) == sorted(names)
    assert all(re.search(r"^compiled .* in \d+\.\d s, \d+ MiB temporary$", line) for line in lines)


# ------------------------------------------------------------------------------------------------
# Validation
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def val(shards):
    return T.TokenStream(shards, "val", BOS)


@pytest.fixture(scope="module")
def direct_loss(val):
    """Steps done -> mean loss of random_state over the first val_tokens, summed in float64."""
    params = jax.device_get(random_state(CFG, mesh_of(1))["params"])
    tokens = val.read(0, CFG.val_tokens + 1).astype(np.int32)
    rows = tokens[:-1].reshape(-1, CFG.val_row)
    a, b, c = CFG.logit_cap

    def features(params, hyper):
        found = T.look_up(CFG, params, rows)
        return T.forward(params, found, rows, CFG, CFG.val_windows, hyper, T.ATTENTION["xla"])

    with quick_compilation():
        program = jax.jit(features).lower(params, T.hyper_at(CFG, 0)).compile()

    def loss(step):
        x = np.asarray(program(params, T.hyper_at(CFG, step)), np.float64).reshape(-1, CFG.width)
        logits = a / (1 + np.exp(-(x @ params["head"].T.astype(np.float64) + b) / c))
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), tokens[1:]]
        assert len(losses) == CFG.val_tokens
        return losses.mean()

    return {done: loss(max(done - 1, 0)) for done in (0, 2, 8)}


@pytest.mark.parametrize("devices", DEVICES)
def test_evaluate_is_the_plain_mean_over_the_first_val_tokens(val, direct_loss, devices):
    """Weight 1 also in the stage that predicts two tokens, rotation and scale of the last step."""
    mesh, programs = mesh_of(devices), programs_of(CFG, devices)
    copies = programs["copies"](random_state(CFG, mesh)["params"])
    for done in (0, 2, 8) if devices == 8 else (2,):
        got = T.evaluate(CFG, mesh, programs, copies, done, val)
        assert got == pytest.approx(direct_loss[done], rel=1e-6), done  # float32 sums of 512 losses
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(copies))
    assert direct_loss[0] == direct_loss[2] != pytest.approx(direct_loss[8], rel=1e-5)


def test_evaluate_does_not_depend_on_val_batch(val, direct_loss):
    cfg, mesh = replace(CFG, val_batch=1024), mesh_of(8)
    variant = T.eval_variant(cfg)
    with quick_compilation():
        programs = {variant: T.lower_variant(cfg, variant, mesh).compile()}
    copies = programs_of(CFG, 8)["copies"](random_state(CFG, mesh)["params"])
    got = T.evaluate(cfg, mesh, programs, copies, 2, val)
    assert got == pytest.approx(direct_loss[2], rel=1e-6)


# ------------------------------------------------------------------------------------------------
# Mesh and micro-batches
# ------------------------------------------------------------------------------------------------


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
        (64, 0, 0, 1),  # an update has no rows
    ],
)
def test_micro_rows_are_the_most_that_divide_and_fit(micro_tokens, rows, row_tokens, want):
    assert T.micro_rows(small_config(micro_tokens=micro_tokens), rows, row_tokens) == want


# MiB that cards tell: RTX 4090, L40S, H100, H200. jax takes three quarters of it.
CARDS = {24: 24_564, 48: 46_068, 80: 81_559, 141: 143_771, 8: 8192}


def on_one(monkeypatch, gigabytes: float | None, stage: int, **changes):
    """How one GPU of this memory takes the rows of a stage of the record: (rows, recompute)."""
    limit = gigabytes and 0.75 * CARDS[gigabytes] * 2**20
    monkeypatch.setattr(T, "memory_limit", lambda mesh: limit)
    monkeypatch.setattr(T, "attention_on", lambda cfg, device: ("triton", ""))
    cfg, mesh = replace(T.PRESETS["speedrun"], **changes), mesh_of(1)
    grads = [variant for variant in T.executions(cfg) if variant.kind == "grads"][stage]
    cfg = T.fitted(cfg, grads, mesh)
    return T.micro_rows(cfg, grads.rows, grads.row_tokens), cfg.recompute


@pytest.mark.parametrize(
    ("gigabytes", "first", "last"),
    [
        (24, (1, "never"), (1, "layers")),
        (48, (4, "never"), (1, "never")),
        (80, (8, "never"), (2, "never")),
        (141, (8, "never"), (4, "never")),
        (None, (2, "never"), (1, "never")),
    ],
)
def test_a_device_takes_what_its_memory_holds(monkeypatch, gigabytes, first, last):
    """First: 8 rows of 16,384 tokens, the last: of 49,152."""
    assert on_one(monkeypatch, gigabytes, 0) == first
    assert on_one(monkeypatch, gigabytes, 3) == last


def test_what_is_asked_for_is_not_fitted(monkeypatch):
    assert on_one(monkeypatch, 24, 3, micro_tokens=98_304, recompute="never") == (2, "never")
    assert on_one(monkeypatch, 141, 3, recompute="layers") == (8, "layers")
    assert on_one(monkeypatch, 24, 3, micro_tokens=49_152) == (1, "layers")


def test_validation_takes_one_row_at_a_time(monkeypatch):
    """262,144 tokens: there is nothing to gain from more."""
    monkeypatch.setattr(T, "memory_limit", lambda mesh: 1e12)
    cfg = T.PRESETS["speedrun"]
    variant = T.eval_variant(cfg)
    fitted = T.fitted(cfg, variant, mesh_of(1))
    assert T.micro_rows(fitted, variant.rows, variant.row_tokens) == 1


def test_where_nothing_fits_the_least_is_tried(monkeypatch):
    assert on_one(monkeypatch, 8, 3) == (1, "layers")


def test_training_does_not_depend_on_recompute(shards, on_eight):
    """Gradients through layers that are computed again are the same up to rounding."""
    cfg, mesh = replace(CFG, recompute="layers"), mesh_of(1)
    programs = dict(programs_of(CFG, 1))
    with quick_compilation():
        for variant in programs:
            if isinstance(variant, T.Variant) and variant.kind == "grads":
                lowered = T.lower_variant(cfg, variant, mesh)
                assert "optimization_barrier" in lowered.as_text()
                programs[variant] = lowered.compile()
    assert_same_training(train(cfg, 1, programs, shards), on_eight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 3}, r"3 devices do not divide 8: use --set devices=1, 2, 4 or 8"),
        ({"devices": 16}, r"devices=16, but there are 8: use a smaller number or 0"),
        (
            {"stages": (T.Stage(1.0, 4 * 32, 32, 0, (8, 32)),), "extension": 0},
            r"grads-b128-r32-w8-32-k1 has 4 rows, which 8 devices cannot share equally: use fewer",
        ),
        ({"val_batch": 256}, r"eval-b256-r64-w24-64-k1 has 4 rows"),
    ],
)
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
