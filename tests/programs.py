"""A run that compiles quickly, and its programs, each compiled once for all tests that use them."""

import contextlib
import importlib.util
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from conftest import small_config

import train_gpt as T

# 8 steps: 3 plain, 3 packed, 2 of extension, which share the program of the packed ones. Adam
# steps are 1, 3, 5, 7; head and embedding part after 5; step 3 changes the stage, and its Adam
# update has the gradients of both.
CFG = small_config(
    layers=3,
    long_layers=(2,),
    value_layers=(0, 2),
    skip=(0, 1),
    steps=8,
    stages=(
        T.Stage(0.5, 8 * 32, 32, 0, (8, 32), 1.0, (1.0, 0.5), (1.0, 0.0)),
        T.Stage(0.5, 8 * 64, 64, 40, (16, 64), 1.5),
        T.Stage(0.0, 8 * 64, 64, 40, (16, 64)),
    ),
    checkpoint_every=1,
)

cuda_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="needs the GPU compiler: pip install jax-cuda13-plugin jax-cuda13-pjrt",
)

# Without the optimizations that cost the most a program of CFG compiles in 1 s instead of 8 (with
# the flag that conftest.py sets).
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# QUICK, and XLA must not drop roundings to bfloat16 where it can: tests look for those that should
# not be there.
jit = partial(jax.jit, compiler_options=QUICK | {"xla_allow_excess_precision": False})


@contextlib.contextmanager
def quick_compilation():
    """Inside, jax.jit compiles with QUICK, whatever other options it is given."""
    real = jax.jit

    def jit(*args, compiler_options=None, **rest):
        return real(*args, compiler_options=QUICK | (compiler_options or {}), **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        yield


def quick(function, *args):
    """function(*args), jitted and compiled with QUICK."""
    with quick_compilation():
        return jax.jit(function)(*args)


def no_wishes(mesh):
    """The last input of a `grads` program, when no process wishes anything."""
    return T.put(np.zeros((mesh.size, 2), np.float32), mesh, jax.P(T.AXIS))


def spread(grads, mesh):
    """Gradients as a `grads` program leaves them: every device has some rows of the sum."""

    def one(x):
        parts = np.zeros((mesh.size, *x.shape), x.dtype)
        for i in range(mesh.size):
            parts[i, i :: mesh.size] = x[i :: mesh.size]
        return T.put(parts.reshape(-1, *x.shape[1:]), mesh, jax.P(T.AXIS))

    return jax.tree.map(one, grads)


BUILT = {}  # what changes a program, number of devices -> the answer of T.compile_all


def key(cfg: T.Config, devices: int):
    """Configs that differ in these fields only have the same programs."""
    smooth = {"seed": 0, "target": 0.0, "checkpoint_every": 0, "val_every": 0, "data": ""}
    smooth |= {"checkpoint_seconds": 0.0, "devices": 0}
    return replace(cfg, **smooth), devices


def mesh_of(devices: int):
    """A mesh of the first devices."""
    return T.make_mesh(CFG, jax.devices()[:devices])


def programs_of(cfg: T.Config, devices: int) -> dict:
    """All programs of a run, as T.compile_all makes them."""
    if key(cfg, devices) not in BUILT:
        with quick_compilation():
            BUILT[key(cfg, devices)] = T.compile_all(cfg, mesh_of(devices), lambda line: None)
    return BUILT[key(cfg, devices)][0]
