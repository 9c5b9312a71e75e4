"""Predict how long JAX's splash attention takes in layers of the record, compiled for a v6e.

    python tests/kernels/beside_splash.py    # needs jax[tpu]; a few minutes of a core

Prints milliseconds per layer, forward and backward, for one row of 49,152 tokens, predicted by
records/preflight.py: for attend_tpu, and for splash attention instead of attend_plain, with norms,
rotations, gates and transposes by XLA. The v6e may be absent. records/NOTES.md has the table. This
is not a test.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "records"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import preflight
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from layers import RECORD, layer_shapes, layer_with_gradients, record_layer

import train_gpt as T


def attend_splash(block: int, q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale):
    """Return attend_plain, by splash attention in blocks of `block` tokens."""
    t, n = q_btnh.shape[1:3]
    mask = masks.MultiHeadMask([masks.LocalMask((t, t), (window, 0), 0)] * n)
    names = "q kv kv_compute q_dkv kv_dkv kv_dkv_compute q_dq kv_dq".split()
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in names})
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def row(q, k, v, segments):
        heads = ((x.swapaxes(0, 1)) for x in (q * scale.astype(q.dtype), k, v))
        return kernel(*heads, segment_ids=splash.SegmentIds(segments, segments)).swapaxes(0, 1)

    return jax.vmap(row)(q_btnh, k_btnh, v_btnh, segments_bt)


def main():
    jax.config.update("jax_platforms", "cpu")
    folder = tempfile.TemporaryDirectory()
    os.environ["LIBTPU_INIT_ARGS"] = preflight.SCHEDULES.format(folder.name)
    chip = preflight.absent_devices("v6e-1")
    mesh = jax.sharding.Mesh(np.array(chip), (T.AXIS,))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    ways = {"ours": T.attend_tpu}
    for block in (512, 1024):
        ways[f"splash, {block}"] = partial(T.attend_heads, partial(attend_splash, block))
    print("| layer | attention | ms | of its kernels |\n|---|---|---|---|")
    for kind in ("narrow", "long"):
        heads, parts = record_layer(kind, RECORD.stages[2].windows)
        shapes = layer_shapes(heads, 1, 49_152, parts, jnp.bfloat16, whole)
        for name, attend in ways.items():
            run = layer_with_gradients(attend, heads)
            run = jax.shard_map(
                run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
            )
            text = jax.jit(run).lower(*shapes).compile().as_text()
            ms = preflight.count(text, Path(folder.name), chip)
            own = [
                x for part, x in ms["functions_ms"].items() if "window" in part or "splash" in part
            ]
            total = ms["predicted_ms"] + ms["moved_floor_ms"]
            print(f"| {kind} | {name} | {total:.2f} | {sum(own):.2f} |", flush=True)


if __name__ == "__main__":
    main()
