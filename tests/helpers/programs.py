"""A config that compiles quickly, and its programs, which all tests share."""

import contextlib
import functools
import importlib.util
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config

import train_gpt as T

# 8 steps: 3 plain, 3 packed, 2 in the extension. Adam has updates after steps 1, 3, 5 and 7, tables
# after 1, 3 and 7. Head and embedding are untied after 5. Step 3 begins a stage, so its updates
# have gradients of two stages. Averages begin in the last steps. Tables of tokens need padding on
# two devices, the n-gram table on four, banks on eight.
SMALL = small_config()
PAIRED, _, ADDED, SHORT, LONG = SMALL.layers
CFG = small_config(
    vocab=101,
    ngram_rows=522,
    layers=(replace(PAIRED, mlps=2), ADDED, replace(SHORT, xsa=True), LONG),
    steps=8,
    stages=tuple(replace(x, doc_cap=40 if x.doc_cap else 0) for x in SMALL.stages),
    checkpoint_every=1,
)


def strip_padding(cfg: T.Config, arrays: dict) -> dict[str, np.ndarray]:
    """Return name -> array without padding."""
    return {name: np.asarray(x)[: T.param_specs(cfg)[name].shape[0]] for name, x in arrays.items()}


cuda_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="needs the GPU compiler: pip install jax-cuda13-plugin jax-cuda13-pjrt",
)

# Without expensive optimizations, a program of CFG compiles in 1 s instead of 8.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
QUICK |= {"xla_cpu_parallel_codegen_split_count": 1}

# Also without excess precision: XLA keeps all roundings to bfloat16, and tests find wrong ones.
jit = partial(jax.jit, compiler_options=QUICK | {"xla_allow_excess_precision": False})


@contextlib.contextmanager
def quick_compilation():
    """Inside, jax.jit compiles with QUICK in addition to other options."""
    real = jax.jit

    def jit(*args, compiler_options=None, **rest):
        return real(*args, compiler_options=QUICK | (compiler_options or {}), **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        yield


def quick(function, *args):
    """Return function(*args), compiled with QUICK."""
    return jax.jit(function, compiler_options=QUICK)(*args)


def tables_apart(cfg: T.Config, params: dict) -> dict:
    """Return the parameters with a list of value tables, as in compute copies."""
    tables = params.get("value_tables")
    if tables is None or isinstance(tables, list):
        return params
    return params | {"value_tables": jnp.split(tables, len(cfg.layers_with("values")))}


def tables_joined(copies: dict) -> dict[str, np.ndarray]:
    """Return compute copies in the shapes of parameters, with joined value tables."""
    arrays = jax.tree.map(np.asarray, copies)
    return {n: np.concatenate(x) if isinstance(x, list) else x for n, x in arrays.items()}


def features(model: T.Model, tokens, hashed, slots):
    """Return T.forward for tokens [b, t] with parameters, the n-gram table included."""
    none = np.zeros((len(tokens), 0), np.int32)
    rows = T.Rows(jnp.pad(tokens, ((0, 0), (0, 1))), hashed, slots, T.Targets(none, none, none))
    tables = tables_apart(model.cfg, model.params)
    return T.forward(model, T.look_up(tables, T.table_ids(model.cfg, rows)), rows)


def traced(program: T.Program, mesh):
    """Return a traced program for the devices of `mesh`."""
    assert program.mesh == mesh
    return program.traced


def padded(shape: tuple, row: T.ParamSpec, devices: int) -> tuple:
    """Return a shape with padding for this number of devices."""
    return (-(-shape[0] // devices) * devices, *shape[1:]) if row.sharded else shape


def lay(cfg: T.Config, arrays: dict, mesh) -> dict:
    """Return name -> array of a parameter (or a moment), padded and sharded over the mesh."""

    def one(name, x):
        row = T.param_specs(cfg)[name]
        whole = np.zeros(padded(x.shape, row, mesh.size), x.dtype)
        whole.reshape(-1)[: x.size] = x.reshape(-1)
        return T.put(whole, mesh, jax.P(T.AXIS) if row.sharded else jax.P())

    return {name: one(name, np.asarray(x)) for name, x in arrays.items()}


BUILT = {}  # (config, devices), see key -> results of T.compile_all


def key(cfg: T.Config, devices: int):
    """Return a key that is equal for configs with the same programs."""
    smooth = {"seed": 0, "target": 0.0, "checkpoint_every": 0, "val_every": 0, "data": ""}
    smooth |= {"checkpoint_end": "auto", "devices": 0, "start": ""}
    smooth |= {"log_every": 10, "prefetch": 4, "sample_tokens": 0}
    smooth |= {"encoding": "bytes", "ngram_ids": "raw"}
    if cfg.whole_loss == "auto":
        smooth["whole_loss"] = "never"  # the choice of a run on CPUs
    return replace(cfg, **smooth), devices


def mesh_of(devices: int):
    """Return a mesh of the first devices, in any number."""
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), (T.AXIS,))


def fake_devices(*kinds: str, capability="9.0") -> list:
    """Return a device for each "KIND:GIB". Kinds that begin with TPU are TPUs, all others GPUs."""
    devices = []
    for kind in kinds:
        name, _, gib = kind.partition(":")
        stats = {"bytes_limit": float(gib or 1) * 2**30}
        fields = {"device_kind": name, "process_index": 0, "compute_capability": capability}
        fields["platform"] = "tpu" if name.startswith("TPU") else "gpu"
        devices.append(SimpleNamespace(**fields, memory_stats=lambda stats=stats: stats))
    return devices


class FakeMesh:
    """A mesh of CPUs that reports other devices. Memory can be estimated with it."""

    def __init__(self, devices, axes=None):
        self.mesh = mesh_of(len(devices))
        self.local_devices = [*devices]
        self.devices = SimpleNamespace(flat=[*devices])

    def __getattr__(self, name):
        return getattr(self.mesh, name)


def programs_of(cfg: T.Config, devices: int) -> dict:
    """Return name -> executable of all programs of a run, by T.compile_all."""
    if key(cfg, devices) not in BUILT:
        mesh = mesh_of(devices)
        kernels, _ = T.choose_kernels(cfg, mesh.devices.flat[0])
        with quick_compilation():
            BUILT[key(cfg, devices)] = T.compile_all(cfg, mesh, kernels, lambda line: None)
    return by_name(BUILT[key(cfg, devices)][0])


def by_name(programs: dict) -> dict:
    """Replace keys of T.programs by their names."""
    return {str(x): program for x, program in programs.items()}


def stage_at(cfg: T.Config, step: int) -> T.Stage:
    """Return the stage of `step` (from 0)."""
    return cfg.stages[T.schedule(cfg).stage[step]]


def named(cfg: T.Config, name: str):
    """Return the key of T.programs with this name."""
    return by_name({x: x for x in T.programs(cfg, mesh_of(1), T.PLAIN)})[name]


@functools.cache
def first_state(cfg: T.Config) -> dict[str, dict]:
    """Return the initial training state as NumPy arrays."""
    return jax.device_get(quick(partial(T.init_state, cfg), np.uint32(cfg.seed)))


def updates_at(cfg: T.Config, kind: str) -> list:
    """Return the Update of this kind after each step, or None."""
    programs = T.schedule(cfg).programs
    return [next((key for key in keys if key[0] == kind), None) for keys in programs]


def next_rows(stream: T.TokenStream, cursor: int, stage: T.Stage):
    """Return (rows of the global batch at `cursor`, uint16 [rows, t+1]; next cursor)."""
    pieces, after = T.plan_rows(stream, cursor, stage)
    return T.read_rows(stream, pieces, range(stage.rows)), after


def val_batch(cfg: T.Config, mesh, known, tokens, step: int):
    """Return the Batch of validation rows, as in T.evaluate."""
    targets = tokens[:, 1:].astype(np.int32)
    all_targets = T.Targets(np.empty((len(tokens), 0), np.int32), targets, targets)
    return T.put_batch(cfg, mesh, step, known, tokens, all_targets)


def run_steps(cfg: T.Config, mesh, compiled: dict, folder, words) -> tuple[list, dict]:
    """Return (losses, state without padding) of a run, as in T.train. The last loss is the
    validation loss, if `compiled` has the program."""
    state = {kind: lay(cfg, arrays, mesh) for kind, arrays in first_state(cfg).items()}
    with quick_compilation():
        copies = T.start_copies(cfg, mesh)(state["params"], np.uint32(cfg.seed))
    stream, waiting, losses = T.TokenStream(folder, "train", cfg.bos), {}, []
    batches = T.train_batches(cfg, mesh, stream, words, 0, T.loader_state(cfg, mesh))
    for step, (batch, _) in enumerate(batches):
        gradients, *updates = T.schedule(cfg).programs[step]
        grads, loss, _ = compiled[str(gradients)](copies, state["params"].get(T.NGRAMS), batch)
        waiting = {name: (*waiting.get(name, ()), grad) for name, grad in grads.items()}
        for update in updates:
            due = {name: waiting.pop(name) for name in T.updated(cfg, update.kind)}
            state, changed, _ = compiled[str(update)](state, due, batch.hyper)
            copies |= changed
        losses.append(float(loss))
    if "finish" in compiled:
        state, changed = compiled["finish"](state)
        model = partial(compiled["eval"], copies | changed, state["params"].get(T.NGRAMS))
        val, known = T.TokenStream(folder, "val", cfg.bos), T.vocabulary(cfg, words)
        batches = T.validation_batches(cfg, mesh, cfg.steps, val, known)
        losses.append(T.evaluate(cfg, model, batches)[0])
    return losses, {kind: strip_padding(cfg, arrays) for kind, arrays in state.items()}
