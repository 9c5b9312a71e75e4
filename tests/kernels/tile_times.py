"""How fast are the attention kernels with other tiles, on an NVIDIA GPU?

    python tests/kernels/tile_times.py            # on the GPU
    python tests/kernels/tile_times.py --small    # interpreted on a CPU: shows that this runs

Each kernel of attend_triton by itself, for one row of the record's largest stage (49,152 tokens,
six heads of 128, documents of 700 on average) and both of its windows; the first line of each
kernel is what train_gpt.py takes. TFLOP/s count the matmuls of pairs that see each other, and no
others. (For an absent H100 none of these spills registers; (128, 64, 4, 3) forward and (128, 128,
8, 2) for keys do.)
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt as T

CANDIDATES = {  # constant -> (queries, keys, warps, stages)
    "FORWARD_TILES": [(128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 3)],
    "QUERY_TILES": [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
    "KEY_TILES": [(64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 2)],
}
KERNELS = {  # constant -> (function, matmuls of 2 t^2 h)
    "FORWARD_TILES": (T.tiles_forward, 2),
    "QUERY_TILES": (T.tiles_backward_queries, 3),
    "KEY_TILES": (T.tiles_backward_keys, 4),
}


def inputs(tokens: int, heads: int, width: int, window: int, interpret: bool):
    """(arrays as the kernels take them, pairs of tokens that see each other)."""
    rng = np.random.default_rng(0)
    shape = (1, tokens, heads, width)
    names = "q", "k", "v", "y_grad"
    arrays = {x: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for x in names}
    arrays["q"] = T.norm(arrays["q"]) * 0.1
    arrays["k"] = T.norm(arrays["k"])
    segments = np.cumsum(rng.random((1, tokens)) < 1 / 700, axis=1)
    here = np.arange(tokens)
    starts = np.searchsorted(segments[0], segments[0], side="left")
    stops = np.searchsorted(segments[0], segments[0], side="right") - 1
    first, last = np.maximum(starts, here - window), np.minimum(stops, here + window)
    arrays["first"], arrays["last"] = (jnp.asarray(x[None], jnp.int32) for x in (first, last))
    arrays |= T.tiles_forward(arrays, interpret)
    arrays["mean"] = jnp.zeros((1, heads, tokens), jnp.float32)
    return arrays, int((here - first + 1).sum())


def milliseconds(run, arrays, calls: int) -> float:
    """Of one call: the median of five times `calls` calls."""
    jax.block_until_ready(run(arrays))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            out = run(arrays)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) * 1000 / calls)
    return float(np.median(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="256 tokens, interpreted on a CPU")
    small = parser.parse_args().small
    tokens, heads, width, calls = (256, 1, 16, 1) if small else (49_152, 6, 128, 10)
    print(jax.devices()[0].device_kind, f"jax {jax.__version__}")
    for window in (100,) if small else (640, 1408):
        arrays, pairs = inputs(tokens, heads, width, window, small)
        for name, (kernel, matmuls) in KERNELS.items():
            usual = getattr(T, name)
            for tiles in (usual, *(T.Tiles(*x) for x in CANDIDATES[name])):
                setattr(T, name, tiles)
                try:
                    run = jax.jit(lambda x, kernel=kernel: kernel(x, small))
                    ms = milliseconds(run, arrays, calls)
                    rate = matmuls * 2 * pairs * heads * width / ms / 1e9
                    print(f"{window:5} {name:14} {tiles!s:56} {ms:7.3f} ms {rate:6.0f} TFLOP/s")
                except Exception as error:  # too much shared memory, for one
                    if small or tiles == usual:
                        raise
                    print(f"{window:5} {name:14} {tiles!s:56} {str(error).splitlines()[0][:60]}")
            setattr(T, name, usual)


if __name__ == "__main__":
    main()
