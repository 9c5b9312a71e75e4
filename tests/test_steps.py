"""The programs on the devices: the same training on any number of them, and nothing hidden.

Compiled once: small_config on 1, 2, 4 and 8 devices, and a step of 8 devices that accumulates.
"""

import re
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

import train_gpt as T

DEVICES = [1, 2, 4, 8]
# Six steps over both stages. Several scalars have a gradient of exactly zero at first (the model
# does not depend on the length of the residual stream until attention writes to it); with a tiny
# eps Adam would turn the rounding error in its place into full steps of random sign.
CFG = small_config(steps=6, adam_eps=1e-5, val_every=2, checkpoint_every=3)
# On 8 devices with one row of 32 tokens at a time: four micro-batches for each step.
WIDE = replace(CFG, stages=(T.Stage(1.0, 32 * 32, 32, 0, (8, 32)),), micro_tokens=32)
WIDE_STEP = T.train_variant(WIDE.stages[0])


def mesh_of(devices: int):
    return T.make_mesh(CFG, jax.devices()[:devices])


def random_state(cfg, mesh, seed=0):
    """A state in which everything has a gradient: random parameters, empty optimizer state."""
    rng = np.random.default_rng(seed)

    def leaf(kind, name, row):
        size = 0.3 if row.sharded else 0.5
        values = rng.normal(0, size, row.shape) if kind == "params" else np.zeros(row.shape)
        return T.put(values.astype(np.float32), mesh, T.partition(row))

    return T.map_state(cfg, leaf)


@pytest.fixture(scope="module")
def timed_run(shards, tmp_path_factory):
    """A whole T.train on 8 devices, with what jax compiled and what the clock did, in order."""
    seen, now = [], {"clock": False}
    programs = {}

    def on_event(name, *_, **__):
        if listening and name.startswith("/jax/core/compile"):
            seen.append((name, now["clock"]))

    def watch(patch, owner, name, event=None, clock=None):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if clock is not None:
                now["clock"] = clock
            if event:
                seen.append((event, now["clock"]))
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    def keep(*args):
        built = real_compile(*args)
        programs.update(built[0])
        return built

    lines, real_compile, listening = [], T.compile_all, True
    jax.clear_caches()  # what an earlier test compiled must be seen to be compiled again
    jax.monitoring.register_event_duration_secs_listener(on_event)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, T.Clock, "start", clock=True)
        watch(patch, T.Clock, "stop", clock=False)
        for name in ("next_rows", "evaluate", "save_checkpoint", "warm_up"):
            watch(patch, T, name, event=name)
        patch.setattr(T, "compile_all", keep)
        out = tmp_path_factory.mktemp("steps")
        run_dir = T.train(replace(CFG, data=str(shards)), out, "test", say=lines.append)
    listening = False
    return SimpleNamespace(seen=seen, lines=lines, programs=programs, run_dir=run_dir)


@pytest.fixture(scope="module")
def programs(timed_run):
    """devices -> the compiled programs of CFG."""
    built = {n: T.compile_all(CFG, mesh_of(n), lambda line: None)[0] for n in (1, 2, 4)}
    return {**built, 8: timed_run.programs}


@pytest.fixture(scope="module")
def wide():
    """The accumulating step of WIDE on 8 devices, lowered and compiled."""
    lowered = T.lower_variant(WIDE, WIDE_STEP, mesh_of(8))
    return SimpleNamespace(lowered=lowered, compiled=lowered.compile())


# ------------------------------------------------------------------------------------------------
# The same training on any number of devices
# ------------------------------------------------------------------------------------------------


def train(cfg, mesh, programs, folder):
    """(losses, final state) of the steps of `cfg`."""
    state, losses = programs["init"](T.put(np.uint32(0), mesh, P())), []
    for step, batch in enumerate(
        T.train_batches(cfg, mesh, T.TokenStream(folder, "train", BOS), 0, 0)
    ):
        program = programs[T.train_variant(T.stage_at(cfg, step))]
        state, loss = program(state, batch.tokens, batch.hyper)
        losses.append(float(loss))
    return losses, jax.device_get(state)


@pytest.fixture(scope="module")
def on_eight(programs, shards):
    return train(CFG, mesh_of(8), programs[8], shards)


def assert_same_training(got, want):
    """Equal but for the order of float32 sums, about 1e-7, of which each step makes more.

    Most comes from Muon: orthogonalization lifts small singular values, and with them their
    rounding error, by up to a thousand. Measured: 4e-7 for losses, 4e-6 for parameters.
    """
    np.testing.assert_allclose(got[0], want[0], rtol=5e-6)
    for name, value in want[1]["params"].items():
        error = np.linalg.norm(got[1]["params"][name] - value) / np.linalg.norm(value)
        assert error < 5e-5, name


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_training_does_not_depend_on_the_number_of_devices(programs, shards, on_eight, devices):
    got = train(CFG, mesh_of(devices), programs[devices], shards)
    assert_same_training(got, on_eight)


def test_training_does_not_depend_on_micro_tokens(shards, on_eight):
    cfg, mesh = replace(CFG, micro_tokens=512), mesh_of(1)
    assert T.micro_rows(cfg, 8, 64) == 8 and T.micro_rows(CFG, 8, 64) == 1
    programs = {"init": T.lower_init(cfg, mesh).compile()}
    for variant in T.variants(cfg)[:2]:
        programs[variant] = T.lower_variant(cfg, variant, mesh).compile()
    assert_same_training(train(cfg, mesh, programs, shards), on_eight)


def test_training_changes_every_parameter_and_lowers_the_loss(on_eight):
    losses, state = on_eight
    start = jax.device_get(jax.jit(partial(T.init_state, CFG))(np.uint32(0)))
    for name, value in state["params"].items():
        assert np.abs(value - start["params"][name]).max() > 1e-6, name
    assert losses[0] == pytest.approx(np.log(CFG.vocab), abs=1e-5) and losses[-1] < losses[0] - 0.3


# ------------------------------------------------------------------------------------------------
# Gradients
# ------------------------------------------------------------------------------------------------


def squares(params, rows):
    """A loss that is a sum over rows, with a gradient that differs from row to row."""
    return jnp.sum(jnp.square(rows.astype(jnp.float32) @ params["w"].astype(jnp.float32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro", [1, 2, 3, 6, 12])
def test_accumulated_gradient_is_the_sum_over_all_rows_in_float32(micro, dtype):
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.integers(-9, 9, (12, 4)), jnp.int32)
    params = {"w": jnp.asarray(rng.integers(-4, 4, (4, 3)), dtype)}  # whole numbers: exact sums
    value, grads = jax.jit(partial(T.accumulate, squares, micro=micro))(params, rows)
    want, wanted = jax.value_and_grad(squares)({"w": params["w"].astype(jnp.float32)}, rows)
    assert (value, grads["w"].dtype) == (want, jnp.float32)
    # Each micro-batch's gradient has the dtype of its parameter: 8 bits here, before the sum.
    np.testing.assert_allclose(grads["w"], wanted["w"], rtol=0 if dtype == "float32" else 2**-8)


def test_reduced_gradient_is_that_of_the_plain_mean_loss(wide, shards):
    """What the step of 8 devices and 4 micro-batches gives to its optimizers, against jax.grad.

    Read from the momenta, which after a first step are known multiples of the gradient.
    """
    mesh = mesh_of(8)
    state = random_state(WIDE, mesh)
    params = jax.device_get(state["params"])
    rows, _ = T.plain_rows(T.TokenStream(shards, "train", BOS), 0, 32, 32)
    tokens = T.put(rows, mesh, P(T.AXIS))
    hyper = T.put(np.array(T.Hyper(1.0, 0.5, 1.0), np.float32), mesh, P())
    state, loss = wide.compiled(state, tokens, hyper)

    @jax.jit
    @jax.value_and_grad
    def mean_loss(params):
        x = T.forward(params, rows[:, :-1].astype(np.int32), WIDE, (8, 32), T.attend_xla)
        logits = T.cap_logits(x @ params["head"], WIDE)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None].astype(int), -1)
        return -picked.mean()

    want, wanted = mean_loss(params)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for name, row in T.param_table(WIDE).items():
        share = 1 - 0.5 if row.optimizer == "muon" else 1 - WIDE.adam_betas[0]
        got = np.asarray(state["first"][name]) / share
        assert np.linalg.norm(wanted[name]) > 1e-4
        # float32 sums over 1,024 tokens in another order: about 1e-6 of the gradient
        error = np.linalg.norm(got - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 2e-5, name


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


def test_step_communicates_once_and_never_while_it_accumulates(wide):
    everywhere, in_loops = collectives(wide.compiled.as_text())
    assert set(everywhere) == {"all-reduce", "all-gather", "reduce-scatter"}
    assert in_loops == []


def test_a_collective_inside_the_loop_would_be_found(monkeypatch):
    """The same search over a step that reduces the loss of every micro-batch."""

    def reduce_each(loss, params, tokens, micro):
        def add(total, rows):
            value, grads = jax.value_and_grad(loss)(params, rows)
            value = lax.psum(value, T.AXIS)
            return jax.tree.map(jnp.add, total, (value, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        return lax.scan(add, zeros, tokens.reshape(-1, micro, tokens.shape[1]))[0]

    monkeypatch.setattr(T, "accumulate", reduce_each)
    # Without the second layer and orthogonalization: only the loop matters here.
    cfg = replace(WIDE, layers=1, long_layers=(0,))
    monkeypatch.setattr(T, "POLAR_EXPRESS", ())
    hlo = T.lower_variant(cfg, WIDE_STEP, mesh_of(8)).compile().as_text()
    assert "all-reduce" in collectives(hlo)[1]


def test_step_has_one_collective_for_each_parameter_and_way(wide):
    """Sharded ones are gathered and reduce-scattered, the others and the loss all-reduced."""
    text = wide.lowered.as_text()
    count = {op: text.count(f'"stablehlo.{op}"') for op in ("all_gather", "reduce_scatter")}
    sharded = [row.sharded for row in T.param_table(WIDE).values()]
    assert count == {"all_gather": sum(sharded), "reduce_scatter": sum(sharded)}
    assert text.count('"stablehlo.all_reduce"') == len(sharded) - sum(sharded) + 1


# ------------------------------------------------------------------------------------------------
# State
# ------------------------------------------------------------------------------------------------


def dummy_batch(cfg, mesh, variant):
    rows = np.full((variant.rows, variant.row_tokens + 1), BOS, np.uint16)
    return T.put(rows, mesh, P(T.AXIS)), T.put(T.hyper_at(cfg, 0), mesh, P())


@pytest.fixture(scope="module")
def stepped(wide):
    """The state before and after one step on 8 devices."""
    mesh = mesh_of(8)
    old = random_state(WIDE, mesh)
    about = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), old)
    new, loss = wide.compiled(old, *dummy_batch(WIDE, mesh, WIDE_STEP))
    return SimpleNamespace(old=old, about=about, new=new, loss=loss)


def test_step_consumes_the_old_state(stepped):
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(stepped.old))


def test_step_writes_the_new_state_where_the_old_one_was(wide):
    """Per device: an eighth of the sharded arrays, and all of the small ones."""
    table = T.param_table(WIDE).values()
    copies = [3 if row.optimizer == "adam" else 2 for row in table]
    sizes = [np.prod(row.shape) / (8 if row.sharded else 1) for row in table]
    state_bytes = 4 * sum(n * size for n, size in zip(copies, sizes, strict=True))
    assert wide.compiled.memory_analysis().alias_size_in_bytes >= state_bytes


def test_step_keeps_shapes_dtypes_and_shardings(stepped):
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), stepped.new) == stepped.about
    assert {leaf.dtype for leaf in jax.tree.leaves(stepped.new)} == {np.dtype("float32")}
    assert stepped.loss.dtype == np.float32 and stepped.loss.shape == ()


def test_state_is_cut_over_the_devices(stepped):
    table = T.param_table(WIDE)
    assert {name for name, row in table.items() if row.sharded} >= {"attn_bank", "mlp_bank"}
    for arrays in stepped.new.values():
        for name, array in arrays.items():
            shape = table[name].shape
            share = (shape[0] // 8, *shape[1:]) if table[name].sharded else shape
            assert [s.data.shape for s in array.addressable_shards] == [share] * 8, name
            assert len({s.device for s in array.addressable_shards}) == 8


# ------------------------------------------------------------------------------------------------
# Variants, compilation and the clock
# ------------------------------------------------------------------------------------------------


def test_variants_are_one_program_for_each_shape_of_step():
    names = ["train-b256-r32-w8-32", "train-b512-r64-w16-64", "eval-b512-r64-w16-64"]
    assert [variant.name for variant in T.variants(small_config())] == names
    assert len(set(T.variants(T.PRESETS["speedrun"]))) == len(T.variants(T.PRESETS["speedrun"]))


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"lr_factor": 0.5}, 2),
        ({"doc_cap": 16}, 2),
        ({"row_tokens": 64}, 3),
        ({"windows": (8, 16)}, 3),
        ({"batch_tokens": 512}, 3),
    ],
)
def test_stages_share_a_program_if_they_differ_only_in_what_is_data(change, count):
    stage = T.Stage(0.5, 256, 32, 0, (8, 32))
    cfg = small_config(stages=(stage, replace(stage, **change)))
    assert len(T.variants(cfg)) == count


def test_compile_all_reports_each_program(timed_run):
    names = ["init", *(variant.name for variant in T.variants(CFG))]
    assert list(timed_run.programs) == ["init", *T.variants(CFG)]
    lines = [line for line in timed_run.lines if line.startswith("compiled ")]
    assert sorted(line.split()[1] for line in lines) == sorted(names)
    assert all(re.search(r" in \d+\.\d s, \d+ MiB temporary$", line) for line in lines)
    mesh = mesh_of(8)
    with pytest.MonkeyPatch.context() as patch:  # the seconds, without compiling all of it again
        patch.setattr(T, "variants", lambda cfg: [T.eval_variant(cfg)])
        seconds = T.compile_all(CFG, mesh, lambda line: None)[1]
    assert list(seconds) == ["init", names[-1]] and min(seconds.values()) > 0


def test_nothing_compiles_while_the_clock_runs(timed_run):
    compiled = [clock for name, clock in timed_run.seen if name.startswith("/jax")]
    assert compiled.count(False) > 10, "the listener does not hear of compilations"
    assert compiled.count(True) == 0


def test_clock_runs_while_data_is_loaded_and_stands_while_validating_and_saving(timed_run):
    clock = {
        name: [on for what, on in timed_run.seen if what == name] for name, _ in timed_run.seen
    }
    assert clock["next_rows"][0] is True and len(clock["next_rows"]) == CFG.steps
    assert clock["evaluate"] == [False] * 4  # after 0, 2, 4 and 6 steps
    assert clock["save_checkpoint"] == [False] * 2  # after 3 and 6 steps
    assert clock["warm_up"] == [False]


def test_a_program_that_was_not_compiled_is_a_key_error(timed_run, shards, tmp_path, monkeypatch):
    second = T.train_variant(CFG.stages[1])
    some = {key: program for key, program in timed_run.programs.items() if key != second}
    monkeypatch.setattr(T, "compile_all", lambda *_: (some, {}))
    monkeypatch.setattr(T, "warm_up", lambda *_: None)
    with pytest.raises(KeyError, match="row_tokens=64"):
        T.train(replace(CFG, data=str(shards)), tmp_path, "test", say=lambda line: None)


# ------------------------------------------------------------------------------------------------
# Validation
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def val(shards):
    return T.TokenStream(shards, "val", BOS)


@pytest.fixture(scope="module")
def direct_loss(val):
    """Mean loss of random_state over the first val_tokens tokens, summed in float64."""
    params = jax.device_get(random_state(CFG, mesh_of(1))["params"])
    tokens = val.read(0, CFG.val_tokens + 1).astype(np.int32)
    rows = tokens[:-1].reshape(-1, CFG.val_row)
    x = jax.jit(partial(T.forward, cfg=CFG, windows=CFG.val_windows, attend=T.attend_xla))(
        params, rows
    )
    z = np.asarray(x, np.float64).reshape(-1, CFG.width) @ params["head"].astype(np.float64)
    logits = CFG.softcap / (1 + np.exp(-z / (CFG.softcap / 4)))
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(z)), tokens[1:]]
    assert len(losses) == CFG.val_tokens
    return losses.mean()


@pytest.mark.parametrize("devices", DEVICES)
def test_evaluate_is_the_mean_over_the_first_val_tokens(programs, val, direct_loss, devices):
    mesh = mesh_of(devices)
    params = random_state(CFG, mesh)["params"]
    got = T.evaluate(CFG, mesh, programs[devices], params, val)
    assert got == pytest.approx(direct_loss, rel=1e-6)  # float32 sums of 512 losses
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_evaluate_does_not_depend_on_val_batch(val, direct_loss):
    cfg, mesh = replace(CFG, val_batch=1024), mesh_of(8)
    programs = {T.eval_variant(cfg): T.lower_variant(cfg, T.eval_variant(cfg), mesh).compile()}
    got = T.evaluate(cfg, mesh, programs, random_state(cfg, mesh)["params"], val)
    assert got == pytest.approx(direct_loss, rel=1e-6)


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
    ],
)
def test_micro_rows_are_the_most_that_divide_and_fit(micro_tokens, rows, row_tokens, want):
    assert T.micro_rows(small_config(micro_tokens=micro_tokens), rows, row_tokens) == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 3}, r"3 devices do not divide 8: use --set devices=1, 2, 4 or 8"),
        ({"devices": 16}, r"devices=16, but there are 8: use a smaller number or 0"),
        (
            {"stages": (T.Stage(1.0, 4 * 32, 32, 0, (8, 32)),)},
            r"train-b128-r32-w8-32 has 4 rows, which 8 devices cannot share equally: use fewer",
        ),
        ({"val_batch": 256}, r"eval-b256-r64-w16-64 has 4 rows"),
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
