"""JAX's TPU simulator, for tests of TPU kernels on a CPU."""

import contextlib

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

import train_gpt as T

STRICT = pltpu.InterpretParams(
    uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True
)


@contextlib.contextmanager
def tpu_simulator():
    """Run TPU kernels in the simulator instead of the interpreter, one at a time: it is not
    thread-safe. It models the memory spaces of a TPU and the DMAs between them. Memory starts as
    NaN, and reads out of bounds raise. On exit, fail if a kernel had a race or if none ran."""
    call, new_state = T.pl.pallas_call, interpreter.RaceDetectionState
    states = []  # one per kernel that ran; the simulator itself only keeps the last

    def simulate(kernel, shapes, **how):
        if isinstance(how["compiler_params"], pltpu.CompilerParams):  # not a kernel for GPUs
            how["interpret"] = STRICT
        return call(kernel, shapes, **how)

    def remember(*args, **options):
        states.append(new_state(*args, **options))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T.pl, "pallas_call", simulate)
        patch.setattr(interpreter, "RaceDetectionState", remember)
        try:
            yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()  # an exception leaves memory behind
    assert states, "no kernel ran in the simulator"
    assert not any(state.races_found for state in states), "a kernel has a race"
