"""check_kernels: kernels are compared with their plain forms before a run."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import mesh_of, quick_compilation

import train_gpt as T

# The record with fewer and shorter rows, and with heads that fit TPU kernels. A block has 128
# tokens, a micro-batch two rows.
CFG = replace(
    T.PRESETS["speedrun"],
    width=256,
    heads=2,
    mlp_width=128,
    vocab=384,
    real_tokens=384,
    bos=383,
    stages=(T.Stage(1.0, 8 * 384, 384, 0, (64, 128)),),
    extension=0,
    micro_tokens=2 * 384,
)
INTERPRETED = T.Kernels(T.attend_tpu, T.fused_cross_entropy, T.add_rows_tpu, T.blend_tpu)
# A mesh of one TPU. Trials still run on the CPU, where TPU kernels are interpreted.
TPU = SimpleNamespace(devices=SimpleNamespace(flat=[SimpleNamespace(platform="tpu")]))


@pytest.fixture(autouse=True)
def quick():
    with quick_compilation():
        yield


def only(field: str, kernel) -> T.Kernels:
    """Return the plain forms with `kernel` in one field."""
    return T.PLAIN._replace(**{field: kernel})


def test_every_field_of_kernels_has_trials_as_wide_as_the_run():
    trials = [*T.trials(T.PRESETS["speedrun"])]
    assert {trial.field for trial in trials} == {*T.Kernels._fields}
    shapes = {}
    for trial in trials:
        shapes.setdefault(trial.field, []).extend(trial.shapes)
    columns = {trial.shapes[0][2] for trial in trials[:3]}  # short and narrow, paired, long
    assert columns == {6 * (2 * 64 + 64), 6 * (2 * 64 + 128), 6 * (2 * 128 + 128)}
    assert max(shape[1] for shape in shapes["blend"]) >= 2 * 1408


SHORT_ROWS = {"stages.0.row_tokens": 256, "stages.0.batch_tokens": 8 * 256}


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"devices": 1}, 2),  # the first stage has eight rows of 16,384 tokens
        ({"devices": 8}, 1),
        ({"devices": 1, "micro_tokens": 8 * 16_384}, 8),
        ({"devices": 1, "micro_tokens": 16_384}, 1),
        # A micro-batch of the first stage has eight rows, but rows of trials are longer.
        ({"devices": 1, "micro_tokens": 16_384, **SHORT_ROWS}, 16_384 // 3072),
    ],
)
def test_trials_have_as_many_rows_as_a_micro_batch(changes, rows):
    cfg = T.override(T.PRESETS["speedrun"], [f"{key}={value}" for key, value in changes.items()])
    of_rows = [trial for trial in T.trials(cfg) if trial.field in ("attend", "add_rows", "blend")]
    assert {shape[0] for trial in of_rows for shape in trial.shapes} == {rows}


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field, marks=pytest.mark.slow) if field == "attend" else field
        for field in T.Kernels._fields
    ],
)
def test_correct_kernels_pass_the_check(field):
    kernels = only(field, getattr(INTERPRETED, field))
    assert T.check_kernels(CFG, TPU, kernels, print) == (kernels, "")


@functools.cache
def trial_of(name: str) -> T.Trial:
    """Return the Trial for a field of Kernels, or for the attention of a narrow or long layer."""
    if name in ("narrow", "long"):
        i = {"narrow": 1, "long": 3}[name]
        return next(T.trials(replace(CFG, layers=CFG.layers[i : i + 1])))
    return next(trial for trial in T.trials(CFG) if trial.field == name)


class Fault(NamedTuple):
    """Represents a kernel that equals the plain form in bfloat16, except that some numbers are
    halved."""

    result: int  # the array with these numbers: 0 is the output, larger numbers are gradients
    where: Callable  # indices along each axis of the array -> mask of these numbers


RESULTS = {}  # results of the plain forms, computed once for all tests
real_results = T.trial_results


@pytest.fixture
def check(monkeypatch):
    """A function (name for trial_of, kernel) -> how the kernel fails."""

    def trial_results(trial, kernel, dtype):
        plain = getattr(T.PLAIN, trial.field)
        if isinstance(kernel, Fault):
            results = [*trial_results(trial, plain, jnp.bfloat16)]
            x = results[kernel.result]
            where = np.broadcast_to(kernel.where(*np.ogrid[*map(slice, x.shape)]), x.shape)
            results[kernel.result] = np.where(where, x / 2, x)
            return results
        if kernel is not plain:
            return real_results(trial, kernel, dtype)
        key = trial.run, dtype
        if key not in RESULTS:
            RESULTS[key] = real_results(trial, plain, dtype)
        return RESULTS[key]

    monkeypatch.setattr(T, "trial_results", trial_results)

    def check(name: str, kernel) -> str:
        trial = trial_of(name)
        return T.failure(trial, CFG, only(trial.field, kernel))

    return check


STARTS = [(0, 127), (0, 128), (0, 129), (0, 320), (1, 95), (1, 96), (1, 97), (1, 288)]
PLACES = {  # in arrays [row, token, column]
    "document starts": lambda *at: sum((at[0] == row) & (at[1] == t) for row, t in STARTS),
    "first tokens of blocks": lambda row, token, *rest: token % 128 == 0,
    "last tokens of blocks": lambda row, token, *rest: token % 128 == 127,
    "one token of the second row": lambda row, token, *rest: (row == 1) & (token == 200),
    "one head of a few tokens": lambda row, token, column: (token // 8 == 5) & (column // 64 == 0),
    "a quarter of a half head": lambda row, token, column: column // 16 == 1,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "results"),
    [("narrow", (0, 1, 2)), ("long", (0, 1, 2)), ("blend", (0, 1, 2, 8))],
)
def test_halved_numbers_are_found_at_any_place(check, name, results, place):
    """In the output, and in the gradients of qkv and of x (attention) or of streams (blend)."""
    for result in results:
        wrong = check(name, Fault(result, PLACES[place]))
        assert re.search(rf" has [\de.+]+ times the allowed error in result {result}, ", wrong)


def early_documents(patch):
    """Documents start one token too early, and so see the last token of the previous one."""
    starts = T.document_starts
    patch.setattr(T, "document_starts", lambda segments: jnp.maximum(starts(segments) - 1, 0))


def key_of_the_row_before(patch):
    """The first token of the second row gets a key of the first row."""
    offset_key = T.offset_key

    def wrong(r, c, k):
        return offset_key(SimpleNamespace(last=r.last, i=r.i + 2 * r.row), c, k)

    patch.setattr(T, "offset_key", wrong)


def smaller_head(patch):
    """The outputs of one head are too small in a quarter of its columns."""
    finish_outputs = T.finish_outputs

    def wrong(plan, r, slot):
        finish_outputs(plan, r, slot)
        r.y[0, :, 32:64] = r.y[0, :, 32:64] / 2

    patch.setattr(T, "finish_outputs", wrong)


def lost_gradients(patch):
    """The last token of a block misses the gradient from the next block."""
    grad = T.offset_key_grad

    def wrong(plan, r, rows, old, slot, blocks):
        return grad(plan, r, rows, old, slot, jnp.where(old == 0, 0, blocks))

    patch.setattr(T, "offset_key_grad", wrong)


def wider_window(patch):
    """A token sees one more token."""
    plan_for = T.plan_for
    patch.setattr(T, "plan_for", lambda heads, block: plan_for(wider(heads), block))


def wider(heads: T.Heads) -> T.Heads:
    return replace(heads, window=heads.window + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "result"),
    [
        (early_documents, 0),
        (key_of_the_row_before, 0),
        (smaller_head, 0),
        (lost_gradients, 1),
        (wider_window, 0),
    ],
)
def test_a_fault_in_the_code_of_a_kernel_is_found(check, monkeypatch, fault, result):
    fault(monkeypatch)
    assert f" in result {result}, token " in check("long", T.attend_tpu)


def test_one_token_of_the_loss_and_one_row_of_a_table_are_found(check):
    """The message has the index in the first axis: a token, or an id."""
    assert " in result 1, token 200" in check("cross_entropy", Fault(1, lambda t, d: t == 200))
    assert " in result 2, token 200" in check("cross_entropy", Fault(2, lambda v, d: v == 200))
    assert " in result 0, token 193" in check("add_rows", Fault(0, lambda v, d: v == 193))


def with_zeros(out):
    """Set one block of tokens to zero, as if its copy to memory had failed."""
    return out.at[:, -64:].set(0)


@jax.custom_vjp
def without_gradient(x):
    return x


without_gradient.defvjp(lambda x: (x, None), lambda _, grad: (jnp.zeros_like(grad),))


def raises(error: Exception):
    """Return a kernel that raises this error."""

    def kernel(*args):
        raise error

    return kernel


@pytest.mark.parametrize(
    ("name", "kernel", "why"),
    [
        ("narrow", lambda *x: with_zeros(T.ATTEND_PLAIN(*x)), " in result 0, token "),
        (
            "narrow",
            lambda n, x, more: T.ATTEND_PLAIN(n, without_gradient(x), more),
            " in result 1, ",
        ),
        ("blend", lambda x, *more: with_zeros(T.blend(x, *more)), "blend has "),
        (
            "cross_entropy",
            lambda *x: [1.1 * y for y in T.cross_entropy(*x)],
            " in result 0, token 0",
        ),
        (
            "add_rows",
            lambda grad, ids, rows: grad,
            "add_rows has 64 times the allowed error in result 0, token 0",
        ),
        (
            "blend",
            lambda x, w, y: T.blend(x, w, y) * jnp.nan,
            "blend has nan times the allowed error",
        ),
        (
            "blend",
            raises(NotImplementedError("Mosaic does not know this " + "x" * 600)),
            "blend cannot run (Mosaic does not know this " + "x" * 600 + ")",
        ),
    ],
)
def test_the_message_names_the_failure(check, name, kernel, why):
    """A block of zeros, no gradient, a wrong sum, NaNs, a compiler error."""
    assert why in check(name, kernel)


FULL = [
    MemoryError("Unable to allocate 2 TiB"),
    jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"
    ),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm."),
]
TOO_LARGE = [
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 65M of 64M vmem.",
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem",
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 245760, available: 232448",
]


@pytest.mark.parametrize("error", FULL)
def test_a_device_without_free_memory_is_an_error_and_no_failure_of_a_kernel(error):
    """Another process may use the memory. Without the kernel the run would only be slower."""
    with pytest.raises(type(error), match="memory|allocate"):
        T.check_kernels(CFG, TPU, only("blend", raises(error)), print)


@pytest.mark.parametrize("text", TOO_LARGE)
def test_a_kernel_that_does_not_fit_a_core_cannot_run(check, text):
    error = jax.errors.JaxRuntimeError(text)
    assert check("blend", raises(error)) == f"blend cannot run ({text})"


CHOSEN = T.PLAIN._replace(add_rows=lambda *x: x[0], blend=lambda *x: x[0], attend=lambda *x: x)


@pytest.fixture
def failures(monkeypatch):
    """How kernels of CHOSEN fail, by field."""
    failures = {"add_rows": "add_rows is off by 1", "blend": "blend cannot run (why)"}
    monkeypatch.setattr(T, "failure", lambda trial, *_: failures.get(trial.field, ""))
    return failures


def test_wrong_kernels_are_left_out_with_a_warning(failures):
    said = []
    kernels, note = T.check_kernels(CFG, TPU, CHOSEN, said.append)
    assert kernels == T.PLAIN._replace(attend=CHOSEN.attend)
    line = "add_rows is off by 1; blend cannot run (why)"
    assert said == [f"WARNING: WRONG KERNELS ARE LEFT OUT: {line}"]
    assert note == f"; LEFT OUT: {line}"
    failures.clear()
    assert T.check_kernels(CFG, TPU, CHOSEN, said.append) == (CHOSEN, "")
    assert len(said) == 1


def test_wrong_kernels_that_the_settings_name_are_refused(failures):
    named = replace(CFG, kernels="attend,add_rows,blend")
    with pytest.raises(T.UserError, match=r"blend cannot run \(why\): use --set kernels=attend$"):
        T.check_kernels(named, TPU, CHOSEN, print)


def test_wrong_kernels_on_one_of_several_hosts_are_refused(failures, monkeypatch):
    """Each host would leave out other kernels."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(T, "from_processes", lambda number: [0, 1])
    failures.clear()  # on this host all kernels are correct
    with pytest.raises(T.UserError, match="kernels failed on this or another host"):
        T.check_kernels(CFG, TPU, CHOSEN, print)


def test_nothing_is_checked_on_a_cpu(monkeypatch):
    monkeypatch.setattr(T, "failure", None)
    assert T.check_kernels(CFG, mesh_of(1), INTERPRETED, print) == (INTERPRETED, "")
