"""How fast are the attention kernels with other tiles, on an NVIDIA GPU?

    python tests/kernels/tile_times.py            # on the GPU
    python tests/kernels/tile_times.py --small    # interpreted on a CPU: shows that this runs

Each kernel of attend_triton by itself, for one row of the record's largest stage (49,152 tokens,
documents of 700 on average) in its three kinds of layers: narrow heads, 64 columns of q, k and v at
a window of 640; paired ones, 64 and 128, as half as many of twice the length; long ones, 128 in
all, at 1408. The first line of each kernel is what train_gpt.py takes. TFLOP/s count the matmuls of
pairs that see each other, and no others. (For an absent H100 none of these spills registers with
128 columns; (128, 64, 4, 3) forward and (128, 128, 8, 2) for keys do.)
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
KERNELS = {  # constant -> (function, matmuls of t^2 h, of t^2 v)
    "FORWARD_TILES": (T.tiles_forward, 1, 1),
    "QUERY_TILES": (T.tiles_backward_queries, 2, 1),
    "KEY_TILES": (T.tiles_backward_keys, 2, 2),
}
RECORD = T.PRESETS["speedrun"]
STAGE = max(RECORD.stages, key=lambda stage: stage.batch_tokens)
LAYERS = {  # -> (tokens, Heads as the kernels see them)
    kind: (STAGE.row_tokens, T.heads_of(RECORD, i, STAGE.windows))
    for kind, i in {"narrow": 1, "paired": 2, "long": 3}.items()
}
SMALL = {"small": (128, T.Heads(2, 16, 32, 100, paired=True))}


def inputs(tokens: int, heads: T.Heads, interpret: bool):
    """(arrays as the kernels take them, pairs of tokens that see each other)."""
    rng = np.random.default_rng(0)
    starts = rng.random((1, tokens)) < 1 / 700
    tokens, n = tokens * (1 + heads.paired), heads.count // (1 + heads.paired)
    segments = np.repeat(np.cumsum(starts, axis=1), 1 + heads.paired, axis=1)
    widths = {"q": heads.qk_width, "k": heads.qk_width, "v": heads.v_width, "y_grad": heads.v_width}
    arrays = {
        name: jnp.asarray(rng.standard_normal((1, tokens, n, width)), jnp.bfloat16)
        for name, width in widths.items()
    }
    arrays["q"] = T.norm(arrays["q"]) * 0.1
    arrays["k"] = T.norm(arrays["k"])
    here = np.arange(tokens)
    starts = np.searchsorted(segments[0], segments[0], side="left")
    stops = np.searchsorted(segments[0], segments[0], side="right") - 1
    first, last = np.maximum(starts, here - heads.window), np.minimum(stops, here + heads.window)
    arrays["first"], arrays["last"] = (jnp.asarray(x[None], jnp.int32) for x in (first, last))
    _, arrays = T.tiles_forward(arrays, interpret)
    arrays["mean"] = jnp.zeros((1, n, tokens), jnp.float32)
    return arrays, n * int((here - first + 1).sum())


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


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true", help="128 tokens, interpreted on a CPU")
    small = parser.parse_args(argv).small
    calls = 1 if small else 10
    print(jax.devices()[0].device_kind, f"jax {jax.__version__}")
    for layer, (tokens, heads) in (SMALL if small else LAYERS).items():
        arrays, pairs = inputs(tokens, heads, small)
        for name, (kernel, of_h, of_v) in KERNELS.items():
            usual = getattr(T, name)
            for tiles in (usual, *(T.Tiles(*x) for x in CANDIDATES[name])):
                setattr(T, name, tiles)
                try:
                    run = jax.jit(lambda x, kernel=kernel: kernel(x, small))
                    ms = milliseconds(run, arrays, calls)
                    numbers = of_h * heads.qk_width + of_v * heads.v_width
                    rate = 2 * pairs * numbers / ms / 1e9
                    print(f"{layer:6} {name:14} {tiles!s:56} {ms:7.3f} ms {rate:6.0f} TFLOP/s")
                except Exception as error:  # too much shared memory, for one
                    if small or tiles == usual:
                        raise
                    print(f"{layer:6} {name:14} {tiles!s:56} {str(error).splitlines()[0][:60]}")
            setattr(T, name, usual)


if __name__ == "__main__":
    main()
