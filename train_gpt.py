"""Train a GPT to a target loss as fast as the hardware allows: pure JAX, one file.

`speedrun` trains the model from record 92 of the modded-nanogpt speedrun
(github.com/KellerJordan/modded-nanogpt, Jordan et al. 2024; "upstream" below) on 329 M FineWeb
tokens in 1194 steps; the target validation loss is 3.28. `tiny` is a toy version of the same model;
`plain` is a plain GPT. Parameters are a dict of arrays. Muon, Adam, data parallelism, the data
loader, TPU and GPU kernels and exact checkpoints are all in this file. Each of the record's ideas
can be switched off.

Two CPU cores train `tiny` in less than a minute. A full `speedrun` has not been timed yet, and no
version has run on a TPU; README.md has partial measurements and predictions. Tests check losses,
gradients and updates against upstream.

    python train_gpt.py                    # without an accelerator: `tiny`
    python train_gpt.py speedrun           # on a TPU v6e-8, 8xH100 or one GPU
    python train_gpt.py speedrun --show    # parameters, stages, tokens, FLOPs; no training

To learn how it works, read Part I from the top, then any sections of Part II:

    PART I, the core              a GPT and its training in plain JAX: model, loss, optimizers,
                                  training loop; then settings, schedule and batches
    PART II, the ideas            the record's ideas, one per section (disabled by `without=NAME`)
    PART III, the data            reading shards and prefetching batches
    PART IV, around a run         setup, checks, checkpoints, logging, multi-host runs, command line
    PART V, fast on hardware      compilation, communication, kernels (disabled by `kernels=plain`)

Terms (records/IDEAS.md has more, and the names used in papers):
    record N    entry N in upstream's list of records
    row         one sequence in a batch; also one vector in a table
    table       an array of vectors looked up by id
    head        an attention head; also the output projection to the vocabulary
    stream      the residual stream; the token stream is the concatenated training data
    bank        a stack of equally shaped matrices [matrices, rows, cols]
    copies      the arrays used in the forward pass; large ones are cast to cfg.compute_dtype

Array name suffixes give the axes, as in x_btd: b batch rows, t tokens or queries, s keys, d model
width, n heads, h head width, f MLP width, v vocabulary.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.2,!=0.11.0,!=0.11.1,<0.13", "numpy", "tiktoken"]
# ///
from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import queue
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import typing
import unicodedata
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple, TypeVar

VERSION = "2026.11.29"  # the newest date in CHANGELOG.md
SOURCE = Path(__file__).read_text()  # for the log; read before importing JAX, which is slow
try:
    import fcntl
    import resource

    import jax
    from jax import lax, shard_map
except ImportError as error:
    sys.exit(f"error: {error}: use WSL on Windows, or pip install -r requirements.txt")
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "data"  # the only mesh axis; each device gets its own rows of the batch
GATHER = functools.partial(lax.all_gather, axis_name=AXIS, tiled=True)


class UserError(Exception):
    """An error the user can fix, printed as one line. The exit status is 2."""


def require(holds, reason: str):
    """Raise UserError with this reason unless `holds` is true."""
    if not holds:
        raise UserError(reason)


# ================================================================================================
# PART I: THE CORE
# ================================================================================================

# A run uses a few programs, all compiled before the clock starts:
#     grads0, grads1, ...  forward and backward pass (grads_step), one program per batch shape
#     anvil                updates matrices every step, with Muon or its extension ANVIL
#     adam                 updates the embedding, the head and small parameters every second step
#     tables               updates value and n-gram tables every 2, later 4 steps (not in `plain`)
#     finish, eval         averages the last weights; computes the validation loss
# shard_map runs each program on every device, like torchrun ranks: lax.psum is an all-reduce over
# AXIS, and psum_scatter is a reduce-scatter. The training state holds float32 parameters. Large
# parameters are sharded across devices and have bfloat16 copies for the forward pass. (The n-gram
# table is already bfloat16, so it has no copy.) Matrix copies are also sharded, and all-gathered
# every step (FSDP).
#
# Settings (Layer, Stage, Config) and batches (Rows) come later in Part I; skim them first. A row of
# tokens [t + 1] contains t inputs and the last target.

# ---- Model: token ids -> hidden states ----------------------------------------------------------


class Kernels(NamedTuple):
    """Functions that Part V can replace with faster kernels. Results match up to rounding."""

    attend: Callable  # packed q, k, v -> all head outputs; default: attend_heads
    cross_entropy: Callable  # hidden states -> loss; default: cross_entropy
    add_rows: Callable  # gradient of a table lookup; default: scatter_rows
    blend: Callable  # per-token weighted sum of arrays; default: blend


class Model(NamedTuple):
    """Parameters and settings for one forward pass."""

    params: dict  # name -> compute copy; a bank is a list of matrices
    cfg: Config
    kernels: Kernels
    stage: Stage | None  # current training stage; None during validation
    hyper: Hyper  # per-step hyperparameters
    signs: jax.Array | None  # random signs for n-grams (sign_pool)
    segments_bt: jax.Array | None = None  # attention never crosses segments (segment_ids)


class Inputs(NamedTuple):
    """Arrays that layers can read besides the residual stream."""

    x0: jax.Array  # [b, t, d] normalized embeddings
    stream0: jax.Array  # [b, t, d] residual stream before layer 0
    looked_up: dict  # table name -> looked-up vectors (look_up)
    ngram: jax.Array | None = None  # [b, t, d] n-gram vectors


def forward(model: Model, looked_up: dict, rows: Rows):
    """Return the final normalized hidden states [b, t, d]. `looked_up` maps table names to
    looked-up vectors (look_up).

    Each `if` that quotes a section title adds one of the record's ideas. Without them, this is a
    plain GPT."""
    cfg = model.cfg
    model = model._replace(segments_bt=segments_of(model, rows))
    x0 = looked_up["embed"]
    if cfg.smear:  # "Value tables, smear, learned scalars"
        x0 = smear(x0, model.params["smear_gate"], model.params["smear_lambda"][0])
    x0 = norm(x0)
    x = x0
    gates = {}
    if cfg.has_gates:  # "Gates from small MLPs"
        gates = coefficients(model, "gate", 0, x0)
    ngram = None
    if cfg.ngram_rows:  # "Hashed n-gram table"
        ngram = ngram_vectors(model, looked_up, rows)
    if cfg.layers[0].ngram:  # "Hashed n-gram table"
        x = mix((1.0, x0), (gates["ngram", 0], ngram))
    inputs = Inputs(x0, x, looked_up, ngram)
    outputs = []  # the residual stream after each layer

    def block(i: int, x):
        return layer_output(model, i, x, outputs, inputs, gates)

    if cfg.recompute:  # save only layer outputs for the backward pass
        block = jax.checkpoint(block, static_argnums=0)
    for i, layer in enumerate(cfg.layers):
        if layer.new_gates:  # "Gates from small MLPs"
            number = sum(earlier.new_gates for earlier in cfg.layers[: i + 1])
            gates |= coefficients(model, "gate", number, x)
        if layer.mudd:  # "MUDD": mudd_end runs the last layer
            break
        x = block(i, x)
        outputs.append(x)
    if cfg.layers[-1].mudd:  # "MUDD"
        x = mudd_end(model, x, outputs, inputs, gates)
    return norm(x)


def layer_output(model: Model, i: int, x, outputs: list, inputs: Inputs, gates: dict):
    """Apply layer `i` (pre-norm attention, then pre-norm MLP) to the residual stream `x` [b, t, d].

    `outputs` holds all earlier layer outputs; `gates` come from `coefficients`."""
    cfg, params = model.cfg, model.params
    layer = cfg.layers[i]
    terms = [(1.0, x)]  # (weight, array) pairs for mix
    if cfg.lambdas:  # "Value tables, smear, learned scalars"
        terms = [(params["resid_lambdas"][i, 0], x)]
    if layer.skip:  # "Gates from small MLPs": x is not scaled here, as in upstream
        learned = params["skip_lambda"][cfg.layers_with("skip").index(i)]
        weight = jax.nn.sigmoid(learned) * gates["skip", i]
        terms = [(1.0, x), (weight, outputs[i - layer.skip])]
    if layer.x0:  # "Gates from small MLPs"
        terms.append((gates["x0", i], inputs.x0))
    if layer.ngram and i > 0:  # "Hashed n-gram table"; forward handles layer 0
        terms.append((gates["ngram", i], inputs.ngram))
    source = x  # attention input
    if layer.reads_back:  # "MUDD": attention reads an earlier layer's output
        source = outputs[i - layer.reads_back]
    added = None
    if layer.values:  # "Value tables, smear, learned scalars"
        added = gated_values(model, i, source, inputs.looked_up)
    x = mix(*terms)
    if layer.attends:
        x = x + attention(model, i, source, added, gates)
    terms = [(1.0, x)]
    if cfg.lambdas:  # "Value tables, smear, learned scalars"
        terms = [(params["resid_lambdas"][i, 1], x)]
    if layer.mlps:
        terms.append((1.0, mlp(model, i, x)))
    return mix(*terms)


def segments_of(model: Model, rows: Rows):
    """Return segment ids [b, t] for a batch. With documents=False each row is a single segment."""
    cfg = model.cfg
    tokens = rows.tokens[:, :-1]
    if not cfg.documents:
        return jnp.ones(tokens.shape, jnp.int32)  # 0 is padding
    return segment_ids(tokens, cfg.bos, cfg.attention_cap if model.stage else 0)


def segment_ids(tokens_bt, bos: int, cap: int = 0):
    """Return segment ids [b, t], int32, increasing along each row.

    A new segment starts at every BOS token. If `cap` is set, longer segments are split every `cap`
    tokens (2560 in training, record 92)."""
    t = jnp.arange(tokens_bt.shape[1])[None]
    last_bos = lax.cummax(jnp.where(tokens_bt == bos, t, 0), axis=1)  # 0 before the first BOS
    is_start = (t - last_bos) % (cap or t.size) == 0
    return jnp.cumsum(is_start, axis=1, dtype=jnp.int32)


def attention(model: Model, i: int, x_btd, added: tuple | None, gates: dict):
    """Return layer `i`'s attention output [b, t, d]. HeadInputs explains `added`; `gates` come from
    `coefficients`."""
    cfg, hyper, params = model.cfg, model.hyper, model.params
    heads = heads_of(cfg, i, model.stage.windows if model.stage else cfg.val_windows)
    kind = 1 if cfg.layers[i].attends == "long" else 0  # index into Hyper.freqs and Hyper.scales
    inputs = HeadInputs(
        added=added,
        xsa_btn=gates.get(("xsa", i)),
        gates_btn=gates.get(("gated", i)),
        segments_bt=model.segments_bt,
        freqs=hyper.freqs[kind],
        scale=hyper.scales[kind],
    )
    with jax.named_scope(f"attention{i}"):
        w_qkv, w_o = attention_weights(cfg, params, i, heads)
        if cfg.lambdas:  # "Value tables, smear, learned scalars"
            w_qkv = mix((params["qkv_lambda"][i], w_qkv))
            w_o = mix((post_lambdas(model, i)[0] * params["o_lambda"][i], w_o))
        qkv = norm(x_btd) @ w_qkv.T
        return model.kernels.attend(heads, qkv, inputs) @ w_o.T


def mlp(model: Model, i: int, x_btd):
    """Return layer `i`'s MLP output [b, t, d]."""
    activation = squared_relu if model.cfg.squared_relu else jax.nn.gelu
    up_fd, down_fd = mlp_weights(model.cfg, model.params, i)
    with jax.named_scope(f"mlp{i}"):
        hidden_btf = activation(norm(x_btd) @ up_fd.T)
        if model.cfg.lambdas:  # "Value tables, smear, learned scalars"
            down_fd = mix((post_lambdas(model, i)[1], down_fd))
        return hidden_btf @ down_fd


def attention_weights(cfg: Config, params: dict, i: int, heads: Heads) -> tuple:
    """Slice layer `i`'s projections from the banks (see param_specs). Return (stacked q, k and v
    projections [q + k + v widths, d], used as x @ W.T; output projection [d, n v_width], used as y
    @ W.T).

    All layers store matrices of the same shape. Layers with narrower heads use only the first rows
    or columns of each head; unused weights get zero gradients."""
    n, d = cfg.heads, cfg.width
    kv = heads.kv or n
    number = cfg.layers_with("attends").index(i)
    first = cfg.qk_matrices * number
    qk = jnp.concatenate(params["qk_bank"][first : first + cfg.qk_matrices])
    qk = qk.reshape(n + kv, -1, d)[:, : heads.qk_width]
    if cfg.shared:
        v, o = params["v_bank"][number], params["vo_bank"][number]
    else:
        v, o = params["vo_bank"][2 * number], params["vo_bank"][2 * number + 1]
    v = v.reshape(kv, -1, d)[:, : heads.v_width]
    o = o.reshape(d, n, -1)[..., : heads.v_width]
    qk, v = qk.reshape(-1, d), v.reshape(-1, d)
    return jnp.concatenate([qk, v]), o.reshape(d, -1)


def mlp_weights(cfg: Config, params: dict, i: int) -> tuple:
    """Return layer `i`'s up-projection (used as x @ W.T) and down-projection (used as h @ W), [f,
    d] each. Two parallel MLPs are merged into one that is twice as wide."""
    first = sum(layer.mlps for layer in cfg.layers[:i])
    numbers = range(first, first + cfg.layers[i].mlps)
    bank = params["mlp_bank"]
    up = jnp.concatenate([bank[2 * number] for number in numbers])
    down = jnp.concatenate([bank[2 * number + 1] for number in numbers])
    return up, down


def squared_relu(x):
    """Return relu(x)^2 (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


def mix(*terms):
    """Return the weighted sum of (weight, array) pairs, in the dtype of the first array.

    The sum is accumulated in float32. Weights are float32 too, because their gradients sum over all
    tokens."""
    _, first = terms[0]
    total = 0.0
    for weight, x in terms:
        total += jnp.asarray(weight, jnp.float32) * x
    return total.astype(first.dtype)


def norm(x):
    """RMSNorm over the last axis, without a learned scale. Statistics are computed in float32."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    epsilon = 2.0**-23  # float32 machine epsilon
    return (x * lax.rsqrt(square + epsilon)).astype(x.dtype)


# ---- Attention: the heads of a layer, and the reference for kernels -------------------------


@dataclass(frozen=True)
class Heads:
    """Static properties of one layer's attention heads."""

    count: int
    qk_width: int  # query/key dimension per head
    v_width: int  # value/output dimension per head
    window: int  # earlier positions visible to each query (paired: two per token)
    paired: bool = False  # two heads attend as one (pair_heads)
    offset: bool = False  # half of each key comes from the previous token (key_offset)
    normed: bool = True  # use QK norm
    kv: int = 0  # number of key/value heads (GQA, Ainslie et al. 2023); 0 means `count`


def heads_of(cfg: Config, i: int, windows: tuple[int, int]) -> Heads:
    """Return layer `i`'s Heads. `windows` holds the short and the long window.

    Long layers apply RoPE to half of the query/key dimensions; short layers have only that half
    (record 92). Narrow layers halve the value dimension."""
    layer = cfg.layers[i]
    h = cfg.head_width
    is_long = layer.attends == "long"
    return Heads(
        count=cfg.heads,
        qk_width=h // 2 if cfg.half_rope and not is_long else h,
        v_width=h // 2 if layer.narrow else h,
        window=windows[1] if is_long else windows[0],
        paired=layer.paired,
        offset=is_long and cfg.half_rope and cfg.key_offset,
        normed=cfg.qk_norm,
        kv=cfg.kv_heads,
    )


class HeadInputs(NamedTuple):
    """Inputs to one layer's attention heads, other than queries, keys and values."""

    added: tuple | None  # (x_btd, gates_btn): gates * x is added to v (value tables)
    xsa_btn: jax.Array | None  # gates for exclude_self
    gates_btn: jax.Array | None  # gates on head outputs
    segments_bt: jax.Array
    freqs: jax.Array  # RoPE frequencies in radians per token, [rotating pairs]
    scale: jax.Array  # multiplies q k^T


def attend_heads(attend: Callable, heads: Heads, qkv, inputs: HeadInputs):
    """Apply attention with QK norm and RoPE. Return concatenated head outputs [b, t, n v_width].

    `qkv` concatenates all heads' queries, keys and values along its last axis. `attend` is
    attend_plain or an equivalent function. Kernels.attend may fuse all of this."""
    b, t, _ = qkv.shape
    n, h = heads.count, heads.qk_width
    kv = heads.kv or n
    q, k, v = jnp.split(qkv, (n * h, (n + kv) * h), axis=-1)
    q = q.reshape(b, t, n, -1)
    k = k.reshape(b, t, kv, -1)
    v = v.reshape(b, t, kv, -1)
    if kv < n:  # grouped-query attention
        k, v = (jnp.repeat(x, n // kv, axis=2) for x in (k, v))
    if inputs.added is not None:  # "Value tables, smear, learned scalars"
        added_btd, added_gates_btn = inputs.added
        added = added_btd.reshape(b, t, n, -1)[..., : heads.v_width]
        v = mix((1.0, v), (added_gates_btn[..., None], added))
    if heads.normed:
        q, k = norm(q), norm(k)
    if heads.offset:  # "Heads: key offset, pairs, XSA"
        k = key_offset(k)
    cos, sin = rope_tables(inputs.freqs, positions(t, heads), h)
    q, k = rope(q, cos, sin), rope(k, cos, sin)
    attended = q, k, v
    segments_bt = inputs.segments_bt
    if heads.paired:  # "Heads: key offset, pairs, XSA"
        attended = map(pair_heads, attended)
        segments_bt = jnp.repeat(segments_bt, 2, axis=1)
    y = attend(*attended, segments_bt, heads.window, inputs.scale)
    y = y.reshape(v.shape)
    if inputs.xsa_btn is not None:  # "Heads: key offset, pairs, XSA"
        y = exclude_self(y, v, inputs.xsa_btn)
    if inputs.gates_btn is not None:  # "Gates from small MLPs"
        y = mix((inputs.gates_btn[..., None], y))
    return y.reshape(b, t, -1)


def positions(t: int, heads: Heads):
    """Return RoPE positions, int [t, 1], or [t, n] for paired heads.

    Paired heads use two positions per token i: 2i for even heads, 2i + 1 for odd heads. However,
    pair_heads puts the first half of the heads at 2i. We keep this upstream bug so that losses
    match."""
    token = jnp.arange(t)[:, None]
    if not heads.paired:
        return token
    return 2 * token + jnp.arange(heads.count)[None] % 2


def rope_tables(freqs, positions_tn, width: int):
    """Return (cos, sin) of the RoPE angles, float32 [t, n or 1, width / 2].

    The first pairs of dimensions rotate at `freqs`. The remaining pairs (half of all pairs in long
    layers) have angle 0, so they match content regardless of position."""
    angles = positions_tn[..., None].astype(jnp.float32) * freqs[None, None]
    others = width // 2 - freqs.shape[0]
    padding = [(0, 0), (0, 0), (0, others)]
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return jnp.pad(cos, padding, constant_values=1.0), jnp.pad(sin, padding)


def rope(x_btnh, cos_tnh, sin_tnh):
    """Apply RoPE (Su et al. 2021): rotate each head's dimensions (i, i + h/2) by the negative
    angle."""
    left, right = jnp.split(x_btnh, 2, axis=-1)
    cos = cos_tnh.astype(x_btnh.dtype)[None]
    sin = sin_tnh.astype(x_btnh.dtype)[None]
    return jnp.concatenate([left * cos + right * sin, right * cos - left * sin], axis=-1)


def attend_plain(q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale):
    """Causal sliding-window attention, [b, t, n, h]: the reference for the kernels.

    Each token attends to itself and the `window` tokens before it, within its segment. Scores and
    softmax are computed in float32. All t x t scores are materialized; attend_band (Part V), the
    default without kernels, avoids that."""
    t = jnp.arange(q_btnh.shape[1])
    back_ts = t[:, None] - t[None]  # distance from query t to key s
    near_ts = (back_ts >= 0) & (back_ts <= window)
    mask_bts = near_ts[None] & (segments_bt[:, :, None] == segments_bt[:, None, :])
    scores = jnp.einsum("btnh,bsnh->bnts", q_btnh, k_btnh, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_bts[:, None], scores * scale, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1).astype(v_btnh.dtype)
    return jnp.einsum("bnts,bsnh->btnh", probs, v_btnh)


# ---- Loss: hidden states -> summed cross-entropy ------------------------------------------------


def batch_loss(params, looked_up: dict, model: Model, rows: Rows):
    """Return (weighted training loss, unweighted next-token loss for the log), both float32 sums.

    The training loss is differentiated with respect to `params` and `looked_up`; `params` override
    Model.params. As in upstream, the loss is summed over each row's tokens and averaged over rows.
    Muon and Adam are scale-invariant, but their moments adapt slowly when rows get longer."""
    model = model._replace(params=model.params | params)
    x_btd = forward(model, looked_up, rows)
    per_token = x_btd, *targets_ahead(model, rows.targets)  # features, targets, weights
    if model.cfg.pointer_width:  # "Copy pointer": adds its probabilities
        per_token = with_pointer(model, rows, *per_token)
    if rows.targets.candidates.size:  # "Multi-token prediction and sampled softmax"
        heads_bvd = looked_up["head"]  # one head per row, restricted to the row's candidates
    else:  # all rows share one head, so concatenate them
        heads_bvd = model.params["head"][None]
        per_token = [x.reshape(1, -1, x.shape[-1]) for x in per_token]
    sums = []
    for head_vd, x_td, targets, weights, *pointed in zip(heads_bvd, *per_token, strict=True):
        loss = model.kernels.cross_entropy
        sums.append(loss(x_td, head_vd, targets, weights, model.cfg, *pointed))
    weighted, plain = zip(*sums, strict=True)
    return sum(weighted), sum(plain)


def targets_ahead(model: Model, all_targets: Targets) -> tuple:
    """Return targets [b, t, targets] (int) and their loss weights (float32, same shape).

    Target j of token i is token i + j + 1 (`plain` uses only j = 0), even across document
    boundaries. The next token's prefix can be an extra target. Weights are 0 past the end of a row
    and in padding rows, whose targets are -1."""
    ahead = jnp.ones(1)  # loss weight of each j
    stage = model.stage
    if stage:  # training
        ahead = model.hyper.loss_weights[: len(stage.loss_weights)] / stage.rows
    tokens = jnp.arange(all_targets.ids.shape[1])
    is_padding_b1 = all_targets.ids[:, :1] < 0
    targets = []
    weights = []
    for j in range(ahead.shape[0]):
        next_bt = jnp.maximum(all_targets.ids[:, j:], 0)
        targets.append(jnp.pad(next_bt, ((0, 0), (0, j))))
        counts_bt = (tokens[None] < tokens.size - j) & ~is_padding_b1
        weights.append(counts_bt * ahead[j])
    if stage and any(stage.prefix_weights):  # "Multi-token prediction"
        targets.append(jnp.maximum(all_targets.prefixes, 0))
        weights.append((all_targets.prefixes >= 0) * (model.hyper.prefix_weight / stage.rows))
    return jnp.stack(targets, axis=-1), jnp.stack(weights, axis=-1)


def cross_entropy(x_td, head_vd, targets, weights, cfg: Config, pointed=None):
    """Return (weighted sum of all losses, unweighted sum of next-token losses), float32, in nats.

    Shapes: features [t, d], head [v, d], targets (int) and weights (float) [t, targets]. The
    unweighted sum skips tokens whose first weight is 0. See mix_pointed for `pointed`. Logits are
    recomputed in the backward pass. With kernels and capped logits, fused_cross_entropy (Part V)
    replaces this."""
    wide_vd = head_vd.astype(jnp.float32)  # accumulate its gradient over chunks in float32

    @jax.checkpoint
    def add(sums, chunk):
        chunk_td, chunk_targets, *weights_and_pointed = chunk
        losses = chunk_losses(chunk_td, wide_vd, chunk_targets, cfg)
        return add_losses(sums, losses, *weights_and_pointed), None

    zeros = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    chunks = in_chunks(cfg, len(head_vd), x_td, targets, weights, pointed)
    sums, _ = lax.scan(add, zeros, chunks)
    return sums


def chunk_losses(x_td, head_vd, targets, cfg: Config):
    """Return per-token losses for a chunk, float32 [t, targets]."""
    w_vd = head_vd.astype(x_td.dtype)
    logits_tv = jnp.matmul(x_td, w_vd.T, preferred_element_type=jnp.float32)
    logits_tv = cap_logits(logits_tv, cfg)
    if cfg.logit_cap[0]:  # exp cannot overflow, and not subtracting the max is more accurate
        log_sum_t = jnp.log(jnp.sum(jnp.exp(logits_tv), axis=1))
    else:
        log_sum_t = jax.nn.logsumexp(logits_tv, axis=1)
    return log_sum_t[:, None] - jnp.take_along_axis(logits_tv, targets, axis=1)


def cap_logits(z, cfg: Config):
    """Cap float32 logits to (0, a) with a * sigmoid((z + b) / c). No cap if a = 0 (records 9, 18,
    54)."""
    a, b, c = cfg.logit_cap
    z = z.astype(jnp.float32)
    if not a:
        return z
    return a * jax.nn.sigmoid((z + b) / c)


def add_losses(sums, losses, weights, pointed=None):
    """Add a chunk's losses [t, targets] to cross_entropy's two running sums."""
    weighted, plain = sums
    if pointed is not None:  # "Copy pointer"
        losses = mix_pointed(losses, pointed)
    on_next = jnp.where(weights[:, 0] > 0, losses[:, 0], 0.0)
    return weighted + jnp.sum(losses * weights), plain + jnp.sum(on_next)


def in_chunks(cfg: Config, ids: int, *arrays):
    """Reshape arrays [t, ...] to [chunks, t / chunks, ...]. None stays None.

    Chunks have at most cfg.loss_chunk tokens, or proportionally more if the number of `ids` in the
    softmax is smaller than the vocabulary."""
    tokens = len(arrays[0])
    chunks = chunk_count(tokens, cfg.loss_chunk * cfg.vocab // ids)
    return jax.tree.map(lambda a: a.reshape(chunks, -1, *a.shape[1:]), arrays)


def chunk_count(tokens: int, most: int) -> int:
    """Return the smallest number of equal chunks with at most `most` tokens each."""
    fewest = -(-tokens // most)
    return next(n for n in range(fewest, tokens + 1) if tokens % n == 0)


# ---- Optimizers: Adam and Muon ------------------------------------------------------------------


class AdamRates(NamedTuple):
    """Hyperparameters of one `adam` update."""

    lr: jax.Array
    decay: float  # an update subtracts lr * lr * decay * weight, as in upstream
    count: jax.Array  # update count, starting at 1
    betas: tuple[float, float]
    eps: float
    cautious: bool  # see descend


def adam_rates(cfg: Config, spec: ParamSpec, hyper: Hyper, steps: int) -> AdamRates:
    """Return the AdamRates for an update that sums the gradients of `steps` steps.

    After table_change, tables are updated half as often. To compensate, their betas are squared and
    their weight decay is doubled (record 92)."""
    span, count = 1, hyper.adam_count
    if spec.updated_by == "tables":  # "Table updates"
        span, count = steps / cfg.table_every[0], hyper.table_count
    betas = tuple(beta**span for beta in spec.betas)
    return AdamRates(
        hyper.lr * spec.lr, spec.decay * span, count, betas, cfg.adam_eps, cfg.cautious
    )


def adam(param, mean, square, grad, rates: AdamRates) -> tuple:
    """Return (param, mean, mean square) after one Adam update (Kingma & Ba 2015), all float32. As
    in upstream, eps is added before bias correction."""
    b1, b2 = rates.betas
    mean = b1 * mean + (1 - b1) * grad
    square = b2 * square + (1 - b2) * jnp.square(grad)
    correction = jnp.sqrt(1 - b2**rates.count) / (1 - b1**rates.count)
    update = rates.lr * correction * mean / (jnp.sqrt(square) + rates.eps)
    decay = rates.lr * rates.lr * rates.decay
    return descend(param, update, decay, rates.cautious), mean, square


def descend(param, update, decay, cautious: bool):
    """Return param - update - decay * param. With `cautious`, weight decay is applied only where
    the update shrinks the weight (record 50)."""
    decays = update * param > 0 if cautious else 1.0
    return param - update - decay * decays * param


def anvil(cfg: Config, spec: ParamSpec, old: dict, grad, hyper: Hyper) -> dict:
    """Apply one ANVIL update (record 92) to a bank. `old` and the result hold this device's shards
    of "params" and the moments, float32 [matrices, rows, cols].

    Without its extensions, ANVIL is Muon (Jordan et al. 2024, record 4): it replaces each matrix's
    momentum with the nearest orthogonal matrix, so all directions are updated at the same rate.
    Cautious weight decay (Liang et al. 2024; record 43) applies only where a step along the
    averaged gradient would not grow the weight."""
    param = old["params"]
    if cfg.slow_rate:  # "ANVIL": two averages of the gradient
        update, fast, slow = two_rails(grad, old["fast"], old["slow"], hyper, cfg.slow_rate)
        new = {"fast": fast, "slow": slow}
        average = slow  # used for weight decay
    else:
        average = old["fast"] + (1 - hyper.momentum) * (grad - old["fast"])
        update = grad + hyper.momentum * (average - grad)  # Nesterov momentum
        new = {"fast": average}
    if cfg.muon:
        update = orthogonalize(update, cfg.dtype).astype(jnp.float32)
    else:
        update = as_large(update)  # "ANVIL": only scaled
    if cfg.equalize_rate:  # "ANVIL": normalizes rows or columns
        update, new["equaliser"] = equalize(update, old["equaliser"], cfg.equalize_rate)
    lr = hyper.lr * spec.lr
    decays = average * param >= 0 if cfg.cautious else 1.0
    update += lr * spec.decay * decays * param
    # Per-matrix learning-rate factors; padding matrices get an arbitrary factor.
    matrices = len(param)
    numbers = matrices * lax.axis_index(AXIS) + jnp.arange(matrices)
    scale = jnp.float32(spec.lr_factors).at[numbers].get(mode="clip")
    rate = lr * scale[:, None, None]
    return {"params": param - rate * update, **new}


# Coefficients (a, b, c) of X <- aX + (bA + cAA)X with A = XX^T. Each iteration brings the singular
# values closer to 1 (Polar Express, Amsel et al. 2025; coefficients from record 92).
ANVIL_MAPS = (
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)


def orthogonalize(x, dtype):
    """Replace each matrix in a bank [matrices, rows, cols] with approximately the nearest
    (semi-)orthogonal matrix, computed in `dtype`."""
    x = x.astype(dtype)
    norms = jnp.linalg.norm(x.astype(jnp.float32), axis=(1, 2), keepdims=True)
    x = (x / (norms * 1.05 + 1e-6)).astype(dtype)  # keeps singular values below 1 despite rounding
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # so that the Gram matrix is small

    def closer(x, abc):
        a, b, c = abc
        gram = x @ x.mT
        return a * x + (b * gram + c * (gram @ gram)) @ x, None

    # Unrolling this loop doubles TPU compile time.
    x, _ = lax.scan(closer, x, jnp.asarray(ANVIL_MAPS, dtype))
    return x.mT if tall else x


# ---- Parameters: shapes, initial values and optimizers in one table -----------------------------


@dataclass(frozen=True)
class ParamSpec:
    """An entry in the parameter table."""

    shape: tuple[int, ...]
    init: Callable | float | np.ndarray  # initializer (key, shape) -> float32 array, or values
    optimizer: str  # anvil, adam, or rows (Adam with one second moment per table row)
    updated_by: str  # program that updates it: anvil, adam or tables
    lr: float
    decay: float = 0.0  # an update subtracts lr * lr * decay * weight (ANVIL: * lr_factors)
    betas: tuple[float, float] = (0.0, 0.0)  # for adam and rows
    lr_factors: tuple[float, ...] = ()  # for anvil: per-matrix learning-rate factors
    averages: tuple[tuple[str, float], ...] = ()  # (kind of average, its share)
    rescaled: bool = False  # averaging preserves the weight norm
    sharded: bool = True  # across devices along axis 0; small parameters are replicated
    dtype: str = "float32"


def moments(cfg: Config, spec: ParamSpec) -> dict[str, tuple[int, ...]]:
    """Return a parameter's optimizer state shapes, keyed by kind of moment."""
    if spec.optimizer == "adam":
        return {"first": spec.shape, "second": spec.shape}
    if spec.optimizer == "rows":
        return {"second": spec.shape[:1]}
    kept = {"fast": spec.shape}
    if cfg.slow_rate:  # "ANVIL": a second momentum
        kept["slow"] = spec.shape
    if cfg.equalize_rate:  # "ANVIL": one number per row or column of a matrix
        kept["equaliser"] = spec.shape[0], max(spec.shape[1:])
    return kept


NGRAMS = "ngram_table"  # no compute copy; gradients are exchanged separately


@functools.cache
def param_specs(cfg: Config) -> dict[str, ParamSpec]:
    """Return a dict from parameter names to ParamSpecs.

    Matrices of equal shape are stacked into banks, so that ANVIL needs one batched call per shape:
        qk_bank [matrices, heads per matrix * h, d]: each attention layer's q, then k (x @ W.T).
            The record has six matrices per layer, each with two heads of q or k.
        vo_bank [2 per attention layer, d, d]: v, then o (x @ W.T). With grouped-query attention,
            vo_bank has only o, and v_bank [1 per attention layer, kv_heads * h, d] has v.
        mlp_bank [2 per MLP, f, d]: up-projection (x @ W.T), then down-projection (h @ W).
    """
    d, f, n, h = cfg.width, cfg.mlp_width, cfg.heads, cfg.head_width
    kv = cfg.kv_heads or n
    attentions = len(cfg.layers_with("attends"))
    mlps = sum(layer.mlps for layer in cfg.layers)
    per_matrix = cfg.qk_heads or n  # q or k heads per matrix
    # Orthogonalized updates have unit singular values, so each element of a wide output changes
    # less. A factor of sqrt(f / d) compensates for this in up-projections (Jordan et al. 2024).
    # Doubling it for down-projections is empirical (record 48).
    up_rate = math.sqrt(max(1, f / d))
    mlp_rates = (up_rate, 2 * up_rate) * mlps  # up, down, up, down, as stored
    # in_pairs expects all up-projections, then all down-projections.
    mlp_init = (1.0,) * mlps + (cfg.down_init,) * mlps
    mlp_bank = by_anvil(cfg, (2 * mlps, f, d), mlp_init, mlp_rates)
    # The tuples are multipliers for (lr_adam, decay_adam), and betas.
    head = by_adam(cfg, (cfg.vocab, d), normal(0.005), (1, 150), (0.5, 0.95))
    vo_init = (1.0, cfg.o_init) * attentions
    if cfg.shared:  # v has fewer rows than o, so it needs a separate bank
        vo_init = (cfg.o_init,) * attentions
    table = {
        "head": head,
        "embed": head,
        "qk_bank": by_anvil(cfg, (attentions * cfg.qk_matrices, per_matrix * h, d)),
        "vo_bank": by_anvil(cfg, (len(vo_init), d, d), vo_init),
        "mlp_bank": dataclasses.replace(mlp_bank, init=functools.partial(in_pairs, mlp_bank.init)),
    }
    if cfg.shared:
        table["v_bank"] = by_anvil(cfg, (attentions, kv * h, d))
    table = with_ideas(cfg, table)  # "Parameters of the ideas"
    # Skip empty parameters, e.g. the MLP bank if no layer has an MLP.
    return {name: spec for name, spec in table.items() if math.prod(spec.shape)}


def by_adam(cfg: Config, shape, start, rates: tuple, betas: tuple, **fields) -> ParamSpec:
    """Return the ParamSpec of a parameter trained by Adam. `rates` multiply lr_adam and
    decay_adam; `fields` override other ParamSpec fields."""
    lr, decay = rates
    rates = {"lr": lr * cfg.lr_adam, "decay": decay * cfg.decay_adam, "betas": betas}
    kinds = {"optimizer": "adam", "updated_by": "adam"}
    return ParamSpec(shape, start, **(rates | kinds | fields))


def by_anvil(cfg: Config, shape, init_scales=1.0, lr_factors: tuple = ()) -> ParamSpec:
    """Return a bank's ParamSpec. `init_scales` and `lr_factors` scale each matrix's initial values
    and learning rate."""
    std = 0.5 / math.sqrt(cfg.width)  # as in upstream
    start = functools.partial(uniform, std, init_scales)
    rates = {
        "lr": cfg.lr_anvil,
        "decay": cfg.decay_anvil,
        "lr_factors": lr_factors or (1.0,) * shape[0],
    }
    return ParamSpec(shape, start, "anvil", "anvil", **rates)


def in_pairs(init: Callable, key, shape):
    """Initialize a bank of matrix pairs, drawing all first matrices before all second ones."""
    halves = init(key, shape).reshape(2, -1, *shape[1:])
    return halves.swapaxes(0, 1).reshape(shape)


def normal(std: float) -> Callable:
    """Return an initializer for a normal distribution with this standard deviation."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def uniform(std: float, factors: float | tuple[float, ...], key, shape):
    """Initialize a bank uniformly, with this standard deviation times a factor per matrix."""
    bound = math.sqrt(3) * std
    values = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    return values * jnp.float32(factors).reshape(-1, 1, 1)


def updated(cfg: Config, kind: str) -> list[str]:
    """Return the names of all parameters updated by the program `kind`."""
    return [name for name, spec in param_specs(cfg).items() if spec.updated_by == kind]


def map_state(cfg: Config, leaf: Callable) -> dict[str, dict]:
    """Build a tree with the structure of the training state: kind -> name -> leaf(shape, dtype,
    ParamSpec). Kinds are "params", optimizer moments and averages."""
    state = {}
    for name, spec in param_specs(cfg).items():
        state.setdefault("params", {})[name] = leaf(spec.shape, jnp.dtype(spec.dtype), spec)
        shapes = moments(cfg, spec) | {average: spec.shape for average, _ in spec.averages}
        for kind, shape in shapes.items():
            state.setdefault(kind, {})[name] = leaf(shape, jnp.dtype("float32"), spec)
    return state


def init_state(cfg: Config, seed):
    """Return the initial training state."""
    key = jax.random.key(seed)

    def zeros(shape, dtype, spec):
        return jnp.zeros(shape, dtype)

    state = map_state(cfg, zeros)
    for name, spec in param_specs(cfg).items():
        if callable(spec.init):
            # Derive the key from the name, so that adding a parameter does not change the others.
            digest = hashlib.sha256(name.encode()).digest()
            salt = int.from_bytes(digest[:4], "little")
            start = spec.init(jax.random.fold_in(key, salt), spec.shape)
        else:
            start = jnp.full(spec.shape, spec.init, jnp.float32)
        state["params"][name] = start.astype(spec.dtype)
    if cfg.tied:  # "Table updates, and tied embeddings"
        state = tie(state)
    return state


def compute_copies(cfg: Config, params, gather: Callable = lambda x: x):
    """Return the arrays used in the forward pass: large parameters cast to cfg.dtype, small
    parameters unchanged.

    `gather` all-gathers a table. Value tables are split into one array per layer, because TPU
    lookups should be twice as fast when a table fits in VMEM (predicted in records/NOTES.md)."""
    copies = {}
    for name, x in params.items():
        spec = param_specs(cfg)[name]
        if name == NGRAMS:
            continue
        copies[name] = x.astype(cfg.dtype) if spec.sharded else x
        if spec.sharded and spec.optimizer != "anvil":
            full = gather(copies[name])
            copies[name] = full[: spec.shape[0]]  # drop padding rows (abstract_state)
        if name == "value_tables":
            copies[name] = jnp.split(copies[name], len(cfg.layers_with("values")))
    return copies


# ---- The step: gradients and updates on every device --------------------------------------------

# Banks and their optimizer state are sharded across devices (ZeRO, Rajbhandari et al. 2019).
# gather_banks (Part V) does the following in an order that lets XLA overlap communication:
#     bank = lax.all_gather(shard, AXIS, tiled=True)  # before the forward pass
#     grad_shard = lax.psum_scatter(grad, AXIS, tiled=True)  # after the backward pass
# Tables are gathered only when updated; reduce_scatter (Part V) sums their gradients.


def grads_step(cfg: Config, kernels: Kernels, stage: Stage, copies, table, batch: Batch):
    """Return (gradients, mean loss over all devices, number of dropped n-grams) for one step.

    Bank gradients are reduce-scattered. N-gram gradients are sent to the devices that own the rows.
    All other gradients are for this device's rows only, in the dtypes of the copies; update_step
    sums them over devices. `table` is this device's shard of the n-gram table."""
    model, requested, scatter_banks = gathered_model(cfg, kernels, stage, copies, table, batch)
    total, grads = gradients_of(model, batch.rows)
    grads = {name: in_copy_dtype(grad, model.params[name]) for name, grad in grads.items()}
    dropped = jnp.float32(0)
    if cfg.ngram_rows:  # "Hashed n-gram table"
        dropped = dropped_ngrams(batch.rows.slots)
    numbers = lax.psum(jnp.stack([total / stage.batch_tokens, dropped]), AXIS)
    if cfg.ngram_rows:  # "Hashed n-gram table": exchange after the psum
        numbers, grads[NGRAMS] = send_to_owners(requested, grads[NGRAMS], numbers)
    grads |= scatter_banks({name: grads[name] for name in updated(cfg, "anvil")})  # psum_scatter
    loss, dropped = numbers
    return grads, loss, dropped


def gathered_model(cfg: Config, kernels: Kernels, stage, copies, table, batch: Batch) -> tuple:
    """Return (Model with unsharded parameters, n-gram rows requested from this device, function
    that reduce-scatters bank gradients). `stage` is None during validation."""
    requested, fetched = None, {}
    if cfg.ngram_rows:  # "Hashed n-gram table"
        requested, fetched = fetch_requests(table, batch)
    # Start gathering after the fetch, because layer 0 needs the n-grams first.
    fetched, copies, scatter_banks = gather_banks(cfg, copies, fetched)
    params = {name: x for name, x in copies.items() if name != "signs"} | fetched
    model = Model(params, cfg, kernels, stage, batch.hyper, copies.get("signs"))
    return model, requested, scatter_banks


def in_copy_dtype(grad, copy):
    """Cast a gradient to the dtype of the parameter's copy, to save memory and communication."""
    dtype = jax.tree.leaves(copy)[0].dtype
    return jax.tree.map(lambda x: x.astype(dtype), grad)


def gradients_of(model: Model, rows: Rows):
    """Return (summed next-token loss, dict of float32 gradients) for this device's rows.

    Rows are processed in micro-batches. The loss is differentiated with respect to looked-up
    vectors instead of tables; add_rows then scatters the resulting gradients into the table
    gradient. All value tables share one gradient array."""
    cfg, params = model.cfg, model.params
    lookups = table_ids(cfg, rows)
    weights = {name: x for name, x in params.items() if name not in lookups}
    loss_and_grads = jax.value_and_grad(batch_loss, argnums=(0, 1), has_aux=True)

    def zeros_of(*shape):
        return jnp.zeros(shape, jnp.float32)

    def add(sums, micro_batch: Rows):
        total, grads = sums
        ids = table_ids(cfg, micro_batch)
        looked_up = look_up(params, ids)
        (_, loss), (new, row_grads) = loss_and_grads(weights, looked_up, model, micro_batch)
        so_far = {name: grads[name] for name in weights}
        new = jax.tree.map(lambda total, x: total + x.astype(jnp.float32), so_far, new)
        for name, table_rows in row_grads.items():
            # A single row's candidates are sorted, which speeds up add_rows.
            ascending = name == "head" and len(ids[name]) == 1
            new[name] = model.kernels.add_rows(grads[name], ids[name], table_rows, ascending)
        return total + loss, new

    zeros = jax.tree.map(lambda x: zeros_of(*x.shape), weights)
    for name in lookups:
        tables = jax.tree.leaves(params[name])
        zeros[name] = zeros_of(sum(map(len, tables)), tables[0].shape[1])
    return sum_batches(add, (zeros_of(), zeros), micro_batches(cfg, rows))


def table_ids(cfg: Config, rows: Rows) -> dict[str, jax.Array]:
    """Return a dict that maps table names to the ids to look up."""
    tokens = rows.tokens[:, :-1].astype(jnp.int32)
    ids = {"embed": tokens}
    if cfg.layers_with("values"):  # "Value tables, smear, learned scalars"
        ids["value_tables"] = tokens
    if cfg.ngram_rows:  # "Hashed n-gram table": indices into the fetched rows
        ids[NGRAMS] = rows.slots
    if rows.targets.candidates.size:  # "Multi-token prediction and sampled softmax"
        ids["head"] = rows.targets.candidates
    return ids


def look_up(tables: dict, ids: dict) -> dict:
    """Look up `ids`, a dict from table names to ids [...]. Return a dict from table names to
    vectors [..., d]. For value_tables, return a list with one array per table."""

    def rows_at(table, wanted):
        return table.at[wanted].get(mode="promise_in_bounds")

    looked_up = {}
    for name, wanted in ids.items():
        get = functools.partial(rows_at, wanted=wanted)
        looked_up[name] = jax.tree.map(get, tables[name])
    return looked_up


def scatter_rows(grad_vd, ids, rows, ascending: bool = False):
    """Scatter-add `rows` [..., d], the gradients w.r.t. looked-up vectors, into `grad_vd` at `ids`.

    If `grad_vd` stacks several tables that share the ids, `rows` is a list. The result is not
    deterministic on GPUs."""
    tables = jax.tree.leaves(rows)
    size = grad_vd.shape[0] // len(tables)  # rows per table
    for number, x in enumerate(tables):
        wanted = grad_vd.at[ids + number * size]
        x = x.astype(grad_vd.dtype)
        grad_vd = wanted.add(x, mode="promise_in_bounds", indices_are_sorted=ascending)
    return grad_vd


def sum_batches(add: Callable, zeros, batches):
    """Fold add(carry, batch) -> carry over stacked `batches`. A single batch runs without a loop,
    so that XLA can optimize away the zeros."""
    if len(jax.tree.leaves(batches)[0]) == 1:
        only = jax.tree.map(lambda x: x[0], batches)
        return add(zeros, only)
    carry, _ = lax.scan(lambda carry, batch: (add(carry, batch), None), zeros, batches)
    return carry


def micro_batches(cfg: Config, rows: Rows):
    """Reshape a device's Rows [b, ...] to [micro-batches, rows per micro-batch, ...]."""
    b, t = rows.tokens[:, 1:].shape
    together = rows_together(cfg, b, t)
    return jax.tree.map(lambda x: x.reshape(b // together, together, *x.shape[1:]), rows)


def rows_together(cfg: Config, b: int, t: int) -> int:
    """Return the number of rows per micro-batch: the largest divisor of the device's b rows that
    fits in cfg.micro_tokens, or 1."""
    divisors = (k for k in range(b, 1, -1) if b % k == 0)
    return next((k for k in divisors if k * t <= cfg.micro_tokens), 1)


def update_step(cfg: Config, kernels: Kernels, state, due, hyper: Hyper):
    """Update the parameters in `due`, which maps names to this device's gradients (one per step
    since the last update). Return (state, updated compute copies, gradient norms if cfg.log_norms).

    Each device updates its shard of every large parameter. Head, embedding and value table
    gradients are reduce-scattered first, and the updated shards are all-gathered afterwards, both
    in the compute dtype as in upstream."""
    new = {kind: dict(arrays) for kind, arrays in state.items()}
    norms = {}
    for name, grads in due.items():
        spec = param_specs(cfg)[name]
        old = {kind: state[kind][name] for kind in ("params", *moments(cfg, spec))}
        if spec.optimizer == "rows":  # "Hashed n-gram table"
            rates = adam_rates(cfg, spec, hyper, len(grads))
            arrays = old["params"], old["second"]
            table, second, square = update_rows(cfg, *arrays, grads, rates, kernels.add_rows)
            changed = {"params": table, "second": second}
        else:
            grad = sum_over_devices(cfg, spec, grads)
            square = jnp.sum(grad * grad)
            if spec.optimizer == "anvil":
                changed = anvil(cfg, spec, old, grad, hyper)
            else:
                rates = adam_rates(cfg, spec, hyper, len(grads))
                arrays = adam(old["params"], old["first"], old["second"], grad, rates)
                changed = dict(zip(("params", "first", "second"), arrays, strict=True))
        for kind, x in changed.items():
            new[kind][name] = x
        if spec.averages:  # "Weight averaging"
            follow(new, name, spec, hyper)
        if cfg.log_norms:
            if spec.sharded:
                square = lax.psum(square, AXIS)
            norms[name] = jnp.sqrt(square)
    copies = compute_copies(cfg, {name: new["params"][name] for name in due}, GATHER)
    return new, copies, norms


def sum_over_devices(cfg: Config, spec: ParamSpec, grads: tuple):
    """Sum several steps' gradients over all devices. Return this device's shard, or the full array
    if the parameter is replicated, in float32. (Table gradients are sent in cfg.dtype.)"""
    if spec.sharded and spec.optimizer != "anvil":
        return reduce_scatter(grads, cfg.dtype).astype(jnp.float32)
    grad = sum(x.astype(jnp.float32) for x in grads)
    if spec.sharded:  # a bank: grads_step already summed over devices
        return grad
    return lax.psum(grad, AXIS)


def finish_step(cfg: Config, state):
    """Return (state, compute copies) with the final, averaged weights."""
    params = state["params"]
    if cfg.tail or cfg.tail_average:  # "Weight averaging"
        params = move_to_averages(cfg, state)
    return state | {"params": params}, compute_copies(cfg, params, GATHER)


# ---- Validation ---------------------------------------------------------------------------------


def eval_step(cfg: Config, kernels: Kernels, copies, table, batch: Batch):
    """Return (summed next-token loss in nats, number of dropped n-grams) for a validation batch."""
    model, _, _ = gathered_model(cfg, kernels, None, copies, table, batch)

    def loss(rows: Rows):
        looked_up = look_up(model.params, table_ids(cfg, rows))
        _, plain = batch_loss({}, looked_up, model, rows)
        return plain

    batches = micro_batches(cfg, batch.rows)
    total = jnp.sum(lax.map(loss, batches))
    dropped = jnp.float32(0)
    if cfg.ngram_rows:  # "Hashed n-gram table"
        dropped = dropped_ngrams(batch.rows.slots)
    return tuple(lax.psum(jnp.stack([total, dropped]), AXIS))


def evaluate(cfg: Config, loss: Callable, batches: Iterator) -> tuple[float, int]:
    """Return (mean loss in nats per token, number of dropped n-grams) over validation `batches`.
    `loss` is the compiled eval_step, with only the batch as argument."""
    results = jax.device_get([loss(batch) for batch in batches])
    total, dropped = np.sum(results, axis=0, dtype=np.float64)
    return float(total) / cfg.val_tokens, int(dropped)


# ---- Training: the clock and the loop -----------------------------------------------------------


def train(cfg: Config, out: Path, command: str, saved=None, say=print) -> Path:
    """Train from scratch, or from the checkpoint `saved`, and return the run directory.

    The clock includes training steps, data loading, intermediate checkpoints and the final
    averaging, but not setup (`prepare` in Part IV), validation or the final checkpoint. Checkpoints
    and stop signals are delayed until all accumulated gradients have been applied."""
    ready = prepare(cfg, out, command, saved, say)
    cfg, mesh, log, compiled = ready.cfg, ready.mesh, ready.log, ready.compiled
    state, copies, loader = ready.state, ready.copies, ready.loader
    first = saved.step if saved else 0
    last_saved = first
    save_every = cfg.checkpoint_every or cfg.steps
    waiting = {}  # gradients not yet applied: name -> one entry per step
    newest = None  # last StepResult, not yet logged

    def pause():
        nonlocal newest
        log_step(log, newest)
        newest = None
        jax.block_until_ready((state, copies))
        log.clock.stop()

    def validate_after(step: int):
        pause()
        program = functools.partial(compiled["eval"], copies, state["params"].get(NGRAMS))
        batches = validation_batches(cfg, mesh, step, *ready.validation)
        loss, dropped = evaluate(cfg, program, batches)
        loss = check_loss(log, step, loss)  # stops diverging runs
        is_best = log.validated(step, loss, dropped)
        if is_best and cfg.keep_best and step > 0:
            log.save(step, {"params": state["params"]}, loader, best=True)

    with contextlib.closing(ready.batches) as batches:
        for step in range(first, cfg.steps):
            is_new = step > first or not saved  # the checkpoint's own step was already validated
            if is_new and cfg.val_every and step % cfg.val_every == 0:
                validate_after(step)
            # Signal number or 0, the same on all hosts. The argument counts this process's steps.
            signalled = ready.stop_signal(step - first)
            if signalled and not waiting:
                pause()
                if is_new:
                    log.save(step, state, loader)
                log.stopped(step)
                raise SystemExit(128 + signalled)
            log.clock.start()
            is_due = step // save_every > last_saved // save_every
            if is_due and not waiting:
                log_step(log, newest)
                newest = None
                log.save(step, state, loader)
                last_saved = step
            batch, loader = next(batches)
            gradients, *updates = schedule(cfg).programs[step]
            grads, loss, dropped = compiled[gradients](copies, state["params"].get(NGRAMS), batch)
            waiting = {name: (*waiting.get(name, ()), grad) for name, grad in grads.items()}
            del grads  # free each gradient as soon as it has been applied
            all_norms = {}
            for update in updates:
                due = {name: waiting.pop(name) for name in updated(cfg, update.kind)}
                state, changed, norms = compiled[update](state, due, batch.hyper)
                copies |= changed
                all_norms |= norms
                del due
            log_step(log, newest)  # log the previous step while this one runs
            number_of_pass = ready.stream.pass_at(loader.cursor)
            newest = StepResult(step + 1, loss, dropped, all_norms, number_of_pass)

    waiting.clear()  # gradients that will never be applied
    state, changed = compiled["finish"](state)
    copies |= changed
    validate_after(cfg.steps)
    is_small = sum(x.nbytes for x in jax.tree.leaves(state)) <= 10e9
    if cfg.checkpoint_end == "always" or (cfg.checkpoint_end == "auto" and is_small):
        log.save(cfg.steps, state, loader)
    log.ended()
    set_handlers(ready.handlers)  # everything is saved, so signals may end the process
    if cfg.sample_tokens:
        table = state["params"].get(NGRAMS)
        trained = cfg, mesh, ready.kernels, copies, table, ready.words, cfg.steps
        demonstrate(log, trained)
    missing = log.facts.get("missing")  # error from a failed checkpoint, if any
    require(not missing, f"the run is complete, but {missing}")
    return log.folder


# ---- Settings: all hyperparameters, and the presets ---------------------------------------------

Kind = TypeVar("Kind")
Positive = Annotated[Kind, "positive"]  # must be greater than 0
Machine = Annotated[Kind, "machine"]  # not part of the recipe, so `--resume` can change it


@dataclass(frozen=True)
class Layer:
    """Configuration of one layer. Gates are per-token factors from small MLPs (see
    `coefficients`)."""

    attends: str = ""  # attention window: "short" or "long"; "" means no attention
    paired: bool = False  # pairs of heads attend as one, over half the window (pair_heads)
    narrow: bool = False  # values have half the head width
    values: bool = False  # add gated vectors from this layer's value table to v
    xsa: bool = False  # remove the component along the token's own value (record 82)
    gated: bool = False  # gate each head's output (record 85)
    x0: bool = False  # add the gated token embedding
    ngram: bool = False  # add the gated n-gram vector
    skip: int = 0  # add the gated output from this many layers back; 0 disables it
    reads_back: int = 0  # attention reads the output from this many layers back; 0: the stream
    new_gates: bool = False  # compute new gates from the stream, for this and later layers
    mudd: bool = False  # last layer only: per-token weights for all its inputs (mudd_layer)
    mlps: int = 1  # number of parallel MLPs


@dataclass(frozen=True)
class Stage:
    """A phase of training with a fixed batch size and row length. Sizes are in tokens."""

    share: float  # fraction of the schedule; 0 only for a final stage of Config.extension steps
    batch_tokens: Positive[int]  # global batch size
    row_tokens: Positive[int]  # sequence length
    doc_cap: int  # truncate documents to this length; 0: rows ignore document boundaries
    windows: Positive[tuple[int, int]]  # attention windows of short and long layers
    lr_factor: float = 1.0  # factor on all learning rates
    loss_weights: tuple[float, ...] = (1.0,)  # of the next token, the token after it, ...
    loss_weights_end: tuple[float, ...] = (1.0,)  # at the end of the stage; linearly interpolated
    # Each entry applies to an equal part of the stage:
    prefix_weights: tuple[float, ...] = (0.0,)  # loss weight of the next token's prefix (record 88)
    candidates: tuple[int, ...] = (0,)  # size of the sampled softmax; 0: full vocabulary

    @property
    def rows(self) -> int:
        """Rows per global batch."""
        return self.batch_tokens // self.row_tokens


@dataclass(frozen=True)
class Config:
    """All settings of a run. A preset is a Config; `--set KEY=VALUE` overrides fields.

    The defaults match record 92, except that the n-gram table has half as many rows and hashes
    normalized ids, for the same loss (pull request 375). The record itself uses ngram_rows=84602880
    ngram_ids=raw."""

    preset: str = "speedrun"
    without: str = ""  # comma-separated IDEAS to disable; "all" means all except PLAIN_HAS
    # ---- The recipe: settings that affect the loss ----
    seed: int = 0
    # Model. Layers are counted from 0.
    layers: tuple[Layer, ...] = (  # seven of eleven have attention (record 92)
        Layer("short", paired=True, x0=True, ngram=True),
        Layer("short", narrow=True, values=True, xsa=True, x0=True, ngram=True),
        Layer("short", paired=True, values=True, x0=True),
        Layer("long", xsa=True, gated=True),
        Layer(x0=True, ngram=True, new_gates=True),
        Layer("short", paired=True, x0=True, ngram=True),
        Layer(skip=3),  # adds the output of layer 3
        Layer(x0=True, mlps=0),  # only adds the embedding
        Layer("short", narrow=True, values=True, mlps=2),
        Layer(ngram=True),
        Layer("long", values=True, gated=True, reads_back=3, mudd=True),  # reads layer 7
    )
    width: Positive[int] = 768
    heads: Positive[int] = 6
    kv_heads: int = 0  # key/value heads (GQA); 0 means one per query head
    mlp_width: Positive[int] = 2816  # 11/3 of the width
    vocab: int = 50304  # embedding rows: real_tokens padded to a multiple of 128
    real_tokens: int = 50257  # tokenizer vocabulary size
    bos: int = 50256  # token id at the start of each document
    # Tokenizer. "bpe" needs its merges next to the shards. "ids" is any other tokenizer: token
    # bytes are unknown, so prefixes, normalized n-grams and text samples are unavailable.
    encoding: Literal["gpt2", "bytes", "bpe", "ids"] = "gpt2"
    ngram_rows: int = 42_301_440  # hash table rows, half of them for bigrams; 0 disables n-grams
    ngram_ids: Literal["normalised", "raw"] = "normalised"  # "normalised" ignores case, accents
    ngram_drop: float = 0.0  # dropout probability of n-gram vectors
    sign_rows: int = 8192  # rows of random signs to distinguish colliding n-grams; 0 disables
    documents: bool = True  # attention does not cross document boundaries
    half_rope: bool = True  # RoPE on half of the head dimensions; short layers drop the other half
    qk_norm: bool = True
    key_offset: bool = True  # in long layers, half of each key is the previous token's (key_offset)
    qk_heads: int = 2  # heads per qk_bank matrix; 0 means all
    o_init: float = 1.0  # initial scale of attention output projections
    down_init: float = 0.0  # initial scale of MLP down-projections
    squared_relu: bool = True  # ReLU^2 in MLPs; False means GELU
    smear: bool = True  # add the gated embedding of the previous token to each embedding
    lambdas: bool = True  # learned scalars on q, k, v, o and each layer's terms
    value_gates: bool = True  # per-head gates on value tables
    gate_width: int = 64  # hidden width of gate MLPs; 0 makes gates learned constants
    mudd_width: Positive[int] = 64  # hidden width of MUDD MLPs
    rope_base: Positive[float] = 1024.0
    attn_scales: tuple[float, float] = (0.13, 0.085)  # initial scale of q k^T (short, long)
    # a, b, c in a * sigmoid((logit + b) / c); zeros disable the cap
    logit_cap: tuple[float, float, float] = (23.0, 5.0, 7.5)
    pointer_width: int = 0  # query/key width of the copy pointer (pointer_probs); 0 disables
    pointer_reach: Positive[tuple[int, int]] = (2048, 8192)  # block size (training, validation)
    compute_dtype: Literal["bfloat16", "float32"] = (
        "bfloat16"  # also used for copies and the n-gram table
    )
    # Schedule. Batch size, windows and document length grow; the batch shrinks again at the end.
    start: str = ""  # checkpoint with initial parameters; "" means random initialization
    steps: Positive[int] = 1194
    extension: int = 20  # extra steps with the lowest learning rate and widest windows
    # fmt: off
    stages: tuple[Stage, ...] = (  # lr_factor grows roughly with the square root of the batch size
        Stage(share=320 / 1174, batch_tokens=131_072, row_tokens=16_384, doc_cap=896,
              windows=(128, 384), lr_factor=1.0, candidates=(10_240,),
              loss_weights=(1.0, 0.5, 0.25), loss_weights_end=(1.0, 0.5, 0.0),
              prefix_weights=(0.25,)),
        Stage(share=361 / 1174, batch_tokens=262_144, row_tokens=32_768, doc_cap=2048,
              windows=(384, 896), lr_factor=1.52, candidates=(10_240,),
              loss_weights=(1.0, 0.5), loss_weights_end=(1.0, 0.0),
              prefix_weights=(0.2, 0.15, 0.1, 0.05)),
        Stage(share=426 / 1174, batch_tokens=393_216, row_tokens=49_152, doc_cap=3072,
              windows=(640, 1408), lr_factor=1.73, candidates=(14_336, 14_336, 24_576)),
        Stage(share=67 / 1174, batch_tokens=327_680, row_tokens=40_960, doc_cap=3072,
              windows=(640, 1408), lr_factor=1.73 * math.sqrt(327_680 / 393_216)),
        Stage(share=0.0, batch_tokens=131_072, row_tokens=16_384, doc_cap=3072,
              windows=(768, 1664)),
    )
    # fmt: on
    epochs: Positive[int] = 1  # maximum number of training epochs; records use 1
    attention_cap: Positive[int] = 2560  # maximum segment length in training (segment_ids)
    tied: float = 1.0  # fraction of the schedule with tied head and embedding
    cooldown: float = 0.8  # fraction of the schedule spent in the final linear learning-rate decay
    lr_floor: float = 0.3  # learning-rate factor after the cooldown
    # Optimizers. param_specs has per-parameter factors.
    muon: bool = True  # orthogonalize matrix updates; False only rescales them (as_large)
    lr_anvil: float = 0.023
    decay_anvil: float = (
        2.25  # weight decay per update: lr * lr * decay_anvil * ParamSpec.lr_factors
    )
    momentum: tuple[float, float] = (0.85, 0.93)  # lowest and highest value (momentum_at)
    momentum_warmup: Positive[int] = 240  # steps
    momentum_cooldown: int = 50  # steps
    rails_step: int = 514  # first step with two gradient averages (two_rails)
    rail_fast: tuple[float, float] = (0.85, 0.4385)  # beta and weight of the fast average
    slow_rate: float = 0.02  # 1 - beta of the slow average; 0 disables it
    equalize_rate: float = 0.1  # 1 - beta of the second moments in `equalize`; 0 disables it
    cautious: bool = True  # weight decay only where the update shrinks the weight
    lr_adam: float = 0.008
    decay_adam: float = 0.005  # weight decay per update: lr * lr * decay_adam, times a factor
    adam_eps: Positive[float] = 1e-10
    # Adam betas of mixing weights, and of gates and other scalars
    scalar_betas: tuple[tuple[float, float], tuple[float, float]] = ((0.9, 0.95), (0.9, 0.99))
    adam_every: Positive[int] = 2  # steps of gradients summed per Adam update
    table_every: tuple[int, int] = (2, 4)  # likewise for tables, before and after table_change
    table_change: int = 336  # step
    tail: int = 298  # average head, embedding and matrices over the last 298 steps; 0 disables
    tail_average: int = 250  # likewise for value tables and a second average of v, o and MLPs
    # Validation
    val_tokens: Positive[int] = 10_485_760  # from the start of the validation split
    val_every: int = 0  # steps between validations; 0 validates only at the end
    val_batch: Positive[int] = 2_097_152  # tokens per validation batch
    val_row: Positive[int] = 262_144  # tokens per validation row
    val_windows: Positive[tuple[int, int]] = (768, 2560)  # of short and long layers
    target: float = 3.28  # target validation loss; 0 means none
    data: str = "data/fineweb10B"  # directory of token shards
    # ---- The machine: speed and output ----
    devices: Machine[int] = 0  # 0 uses all; rows are split if there are more devices than rows
    kernels: Machine[str] = "auto"  # "auto", "plain" (none), or names such as "attend,blend"
    sparse_cores: Machine[bool] = True  # on TPUs, overlap communication using SparseCores
    micro_tokens: Machine[Positive[int]] = 49_152  # tokens per micro-batch; longer rows are split
    rows_at_once: Machine[Positive[int]] = 2**19  # n-gram rows per update chunk
    recompute: Machine[bool] = False  # recompute layers in the backward pass to save memory
    loss_chunk: Machine[Positive[int]] = 4800  # tokens per loss chunk
    # Compute the loss without chunks; "auto" depends on device memory (with_whole_loss)
    whole_loss: Machine[Literal["auto", "always", "never"]] = "auto"
    prefetch: Machine[Positive[int]] = 4  # number of batches to prefetch
    checkpoint_every: Machine[int] = 0  # steps between checkpoints; 0 saves only at the end
    checkpoint_end: Machine[Literal["auto", "always", "never"]] = "auto"  # "auto" means up to 10 GB
    keep_best: Machine[bool] = False  # also save the parameters with the lowest validation loss
    log_every: Machine[Positive[int]] = 10  # steps between progress lines on the terminal
    log_norms: Machine[bool] = False  # log gradient norms per parameter (slower)
    sample_tokens: Machine[int] = 0  # length of the text sample at the end; 0 disables it

    @property
    def head_width(self) -> int:
        """Dimensions per attention head."""
        return self.width // self.heads

    @property
    def qk_matrices(self) -> int:
        """Number of qk_bank matrices per attention layer."""
        return (self.heads + (self.kv_heads or self.heads)) // (self.qk_heads or self.heads)

    @property
    def shared(self) -> bool:
        """Whether query heads share keys and values."""
        return self.kv_heads not in (0, self.heads)

    def layers_with(self, what: str) -> tuple[int, ...]:
        """Indices of the layers that set field `what`, in the order used by banks and tables."""
        return tuple(i for i, layer in enumerate(self.layers) if getattr(layer, what))

    @property
    def has_aux_targets(self) -> bool:
        """Whether any stage uses candidates or prefixes."""
        return any(any(stage.prefix_weights + stage.candidates) for stage in self.stages)

    @property
    def has_gates(self) -> bool:
        """Whether any layer has gates."""
        return any(map(self.layers_with, ("xsa", "gated", "x0", "ngram", "skip")))

    @property
    def signed(self) -> bool:
        """Whether n-gram vectors are multiplied by random signs."""
        return bool(self.ngram_rows and self.sign_rows)

    @property
    def dtype(self) -> jnp.dtype:
        """compute_dtype as a dtype."""
        return jnp.dtype(self.compute_dtype)

    @functools.cached_property
    def boundaries(self) -> tuple[int, ...]:
        """First step of each stage, followed by the total number of steps."""
        shares = np.cumsum([stage.share for stage in self.stages[:-1]])
        inner = np.round(shares * (self.steps - self.extension))
        return (0, *inner.astype(int).tolist(), self.steps)

    def tokens_after(self, step: int) -> int:
        """Number of training tokens in the first `step` steps."""
        tokens = 0
        spans = itertools.pairwise(self.boundaries)
        for stage, (first, end) in zip(self.stages, spans, strict=True):
            steps = min(step, end) - first
            tokens += stage.batch_tokens * max(0, steps)
        return tokens


# fmt: off
PRESETS = {
    "plain": None,  # `tiny` with only the ideas in PLAIN_HAS; filled in after `override`
    # A toy version of `speedrun` that takes a minute on two cores. It has only one stage, because
    # each batch shape takes several seconds to compile.
    "tiny": Config(
        preset="tiny",
        layers=(
            Layer("short", narrow=True, values=True, xsa=True, x0=True, ngram=True),
            Layer(skip=1, new_gates=True),
            Layer("short", paired=True, values=True, x0=True),
            Layer("long", values=True, gated=True, reads_back=2, mudd=True),
        ),
        width=128, heads=2, mlp_width=256, gate_width=32, mudd_width=32, ngram_rows=262_144,
        encoding="bpe", vocab=2048, real_tokens=2048, bos=2047,
        compute_dtype="float32",
        steps=440, extension=0,
        stages=(Stage(share=1.0, batch_tokens=1024, row_tokens=128, doc_cap=0, windows=(32, 128)),),
        momentum_warmup=88, momentum_cooldown=18, rails_step=188, table_change=128,
        tail=110, tail_average=92,
        lr_adam=0.016,
        val_tokens=98_304, val_batch=4096, val_row=512, val_windows=(32, 128), target=3.64,
        micro_tokens=256,  # fits in one core's cache
        data="data/builtin", sample_tokens=80,
    ),
    "speedrun": Config(),
    # `speedrun` with the copy pointer, in fewer steps. As in pull request 379, stages are shortened
    # by about 12 %, except for 52 steps of the third stage and the 20 extension steps.
    "pointer": Config(
        preset="pointer", pointer_width=128, steps=1060,
        stages=tuple(
            dataclasses.replace(stage, share=count / 1040)
            for stage, count in zip(Config.stages, (282, 317, 382, 59, 0), strict=True)
        ),
    ),
}
# fmt: on
LARGE = "speedrun", "pointer"  # presets for accelerators


# ---- Schedule: the programs and hyperparameters of every step -----------------------------------


class Hyper(NamedTuple):
    """Hyperparameters that can change every step, sent with each batch as float32. Row sizes,
    windows and candidate counts are compiled into the programs instead."""

    lr: np.ndarray  # factor on all learning rates
    momentum: np.ndarray  # Nesterov momentum of `anvil`
    adam_count: np.ndarray  # Adam update count, starting at 1
    freqs: np.ndarray  # [2, rotating pairs] RoPE frequencies of short and long layers
    scales: np.ndarray  # [2] scale of q k^T in short and long layers
    loss_weights: np.ndarray  # [k] loss weights of the next token, the token after it, ...
    # Fields that are None if their idea is disabled:
    fast_beta: np.ndarray | None = None  # beta of the fast average (two_rails)
    fast_weight: np.ndarray | None = None  # weight of the fast average (two_rails)
    table_count: np.ndarray | None = None  # table update count, starting at 1
    prefix_weight: np.ndarray | None = None  # loss weight of the next token's prefix
    average_rates: np.ndarray | None = None  # [4] rates of AVERAGES; 0 leaves an average unchanged
    drop_seed: np.ndarray | None = None  # seed of ngram_dropout


class Schedule(NamedTuple):
    """Stage, batch shape, programs and hyperparameters for every step."""

    stage: np.ndarray  # [steps] stage index
    candidates: np.ndarray  # [steps] size of the sampled softmax; 0: full vocabulary
    programs: list[list[Gradients | Update]]  # [steps] keys of the programs to run, in order
    hyper: Hyper  # arrays [steps, ...], not yet rounded to float32


class Gradients(NamedTuple):
    """Key of a program that computes gradients; str(key) is its name, e.g. grads0."""

    number: int  # index in order of first use
    stage: int
    candidates: int  # size of the sampled softmax; 0: full vocabulary

    def __str__(self) -> str:
        return f"grads{self.number}"


class Update(NamedTuple):
    """Key of a program that updates parameters; str(key) is its name, e.g. tables2-2-2-2."""

    kind: str  # updates the parameters with this ParamSpec.updated_by
    steps: int  # number of accumulated steps
    tied: bool = False  # for adam: head and embedding are tied
    stages: tuple[int, ...] = ()  # for tables: the stage of each step, which determines shapes

    def __str__(self) -> str:
        tied = "_tied" if self.tied else ""
        return self.kind + tied + "-".join(map(str, self.stages))


@functools.cache
def schedule(cfg: Config) -> Schedule:
    """Compute the Schedule of a run."""
    stage, _, _ = steps_in_stages(cfg)
    sampled = in_parts(cfg, "candidates")
    shapes = list(zip(stage.tolist(), sampled.tolist(), strict=True))
    return Schedule(stage, sampled, programs_of_steps(cfg, shapes), hyper_of_steps(cfg))


def programs_of_steps(cfg: Config, shapes: list[tuple[int, int]]) -> list[list]:
    """For each step, return its program keys in order: Gradients, then Updates. `shapes` holds
    (stage, candidates) for each step; equal shapes share a program."""
    adam_due, tables = updates_due(cfg)
    last_tied = -1
    if cfg.tied:  # "Table updates"
        last_tied = last_tied_step(cfg)
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    of_steps = []
    for i, shape in enumerate(shapes):
        keys = [Gradients(numbers[shape], *shape), Update("anvil", 1)]
        if adam_due[i]:
            keys.append(Update("adam", cfg.adam_every, tied=i <= last_tied))
        if tables[i]:
            first = i + 1 - tables[i]
            stages = [stage for stage, _ in shapes[first : i + 1]]
            keys.append(Update("tables", len(stages), stages=tuple(stages)))
        of_steps.append(keys)
    return of_steps


def updates_due(cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """For each step, return (whether an Adam update is due, number of steps summed by a table
    update or 0 if none is due), each [steps]."""
    step = np.arange(cfg.steps)
    adam_due = (step + 1) % cfg.adam_every == 0
    tables = np.zeros_like(step)
    if updated(cfg, "tables"):  # "Table updates"
        tables = table_updates(cfg, step)
    return adam_due, tables


def hyper_at(cfg: Config, step: int) -> Hyper:
    """Return a step's Hyper, rounded to float32."""
    columns = schedule(cfg).hyper
    return jax.tree.map(lambda column: np.asarray(column[step], np.float32), columns)


def hyper_of_steps(cfg: Config) -> Hyper:
    """Return a Hyper with arrays [steps, ...], not yet rounded to float32."""
    step = np.arange(cfg.steps)
    freqs, scales = rotation(cfg)
    hyper = Hyper(
        lr=learning_rate(cfg, step),
        momentum=momentum_at(cfg, step),
        adam_count=step // cfg.adam_every + 1,
        freqs=np.stack([freqs] * cfg.steps),
        scales=np.stack([scales] * cfg.steps),
        loss_weights=np.ones((cfg.steps, 1)),
    )
    hyper = hyper_of_ideas(cfg, hyper)  # "Parameters of the ideas"
    return hyper


def learning_rate(cfg: Config, step: np.ndarray) -> np.ndarray:
    """Return each step's learning-rate factor: lr_factor, then linear decay to lr_floor. The final
    rate can be high because the last weights are averaged."""
    scheduled = cfg.steps - cfg.extension
    constant = int((1 - cfg.cooldown) * scheduled)  # steps before the cooldown
    fallen = np.maximum(step - constant, 0) / max(scheduled - constant, 1)
    fallen = np.where(step < scheduled, fallen, 1.0)
    factors = np.array([stage.lr_factor for stage in cfg.stages])
    stage, _, _ = steps_in_stages(cfg)
    of_stage = factors[stage]
    return of_stage * (1 - fallen) + cfg.lr_floor * fallen


def momentum_at(cfg: Config, step: np.ndarray) -> np.ndarray:
    """Return each step's momentum, with linear warmup and cooldown. Early gradients change
    direction too quickly for a long average."""
    low, high = cfg.momentum
    risen = np.minimum(step / cfg.momentum_warmup, 1)
    turn = cfg.steps - cfg.momentum_cooldown
    fallen = np.maximum(step - turn, 0) / max(cfg.momentum_cooldown, 1)
    return low + (high - low) * np.minimum(risen, 1 - fallen)


def rotation(cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """Return the initial RoPE frequencies, float32 [2, rotating pairs], and scales of q k^T [2],
    for short and long layers."""
    pairs = cfg.head_width // 2
    if cfg.half_rope:
        pairs = cfg.head_width // 4
    freqs = (1 / cfg.rope_base) ** np.linspace(0, 1, pairs, dtype=np.float32)
    return np.stack([freqs, freqs]), np.array(cfg.attn_scales)


def steps_in_stages(cfg: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each step, return (stage index, step within the stage, stage length), int [steps]
    each."""
    lengths = np.diff(cfg.boundaries)
    stage = np.repeat(np.arange(len(cfg.stages)), lengths)
    first = np.array(cfg.boundaries)[stage]  # first step of the stage
    return stage, np.arange(cfg.steps) - first, lengths[stage]


def in_parts(cfg: Config, name: str) -> np.ndarray:
    """Return the stage field `name` at each step. Entries cover equal parts of a stage."""
    entries = []
    for stage, number, length in zip(*steps_in_stages(cfg), strict=True):
        of_stage = getattr(cfg.stages[stage], name)
        entries.append(of_stage[number * len(of_stage) // length])
    return np.array(entries)


# ---- Batches: the input of a step ---------------------------------------------------------------


class Targets(NamedTuple):
    """Prediction targets of a batch, int32. With a sampled softmax, targets and prefixes are
    indices into the row's candidates; otherwise they are token ids."""

    candidates: np.ndarray  # [b, candidates] sorted ids; [b, 0] for the full vocabulary
    ids: np.ndarray  # [b, t] next tokens; -1 in padding rows of a validation batch
    prefixes: np.ndarray  # [b, t] the next token's prefix; -1 if none


class Rows(NamedTuple):
    """Rows of a batch, sharded across devices. Each process builds its own rows."""

    tokens: jax.Array  # uint16 [b, t + 1]: inputs and the last target
    hashed: jax.Array | None  # uint16 [b, t]: ids for n-gram hashing; None without n-grams
    slots: jax.Array | None  # int32 [b, 2, t]: n-gram indices into the fetched rows (`request`)
    targets: Targets


class Batch(NamedTuple):
    """Inputs to a step other than the training state."""

    rows: Rows
    requests: jax.Array | None  # int32 [devices, devices, size]: n-gram rows to fetch (`request`)
    hyper: Hyper


class LoaderState(NamedTuple):
    """The run's position in the training data, saved in checkpoints."""

    cursor: int  # position in the token stream
    offsets: tuple[int, ...]  # next offset into the candidate walk, for each local row


def train_batches(
    cfg: Config, mesh: Mesh, stream: TokenStream, words: list[bytes], step: int, state: LoaderState
):
    """Yield (Batch, LoaderState after it) for each step, starting at `step`. Vocabulary tables are
    built here so that the clock includes them."""
    vocab = None
    if cfg.has_aux_targets or cfg.ngram_rows:  # "Multi-token prediction", "Hashed n-gram table"
        vocab = vocabulary(cfg, words)
    for number in range(step, cfg.steps):
        batch, state = next_batch(cfg, mesh, stream, vocab, number, state)
        yield batch, state


def next_batch(cfg: Config, mesh: Mesh, stream: TokenStream, vocab, step: int, state: LoaderState):
    """Return (Batch for `step`, next LoaderState). This is a pure function. `vocab` is None if no
    enabled idea needs a Vocabulary."""
    stage = cfg.stages[schedule(cfg).stage[step]]
    tokens, cursor = read_batch(stream, mesh, state.cursor, stage)
    all_targets = next_tokens(tokens[:, 1:].astype(np.int32))
    offsets = state.offsets
    if cfg.has_aux_targets:  # "Multi-token prediction and sampled softmax"
        count = schedule(cfg).candidates[step]
        always = [cfg.real_tokens] if cfg.pointer_width else []  # the copy id (see mix_pointed)
        all_targets, offsets = batch_targets(tokens, offsets, count, vocab.prefix_v, always)
    batch = put_batch(cfg, mesh, step, vocab, tokens, all_targets)
    return batch, LoaderState(cursor, offsets)


def next_tokens(targets) -> Targets:
    """Return Targets for the full vocabulary. The prefixes are an unused placeholder."""
    no_candidates = np.empty((len(targets), 0), np.int32)
    return Targets(no_candidates, targets, prefixes=targets)


def put_batch(cfg: Config, mesh: Mesh, step: int, vocab, tokens, all_targets: Targets) -> Batch:
    """Put a Batch on the devices. `tokens` are this process's rows, uint16 [b, t + 1]."""
    rows = Rows(tokens, None, None, all_targets)
    requests = None
    if cfg.ngram_rows:  # "Hashed n-gram table"
        rows, requests = hashed_rows(cfg, mesh, vocab, tokens, all_targets)
    rows, requests = jax.tree.map(lambda x: put(x, mesh, P(AXIS)), (rows, requests))
    hyper = jax.tree.map(lambda x: put(x, mesh, P()), hyper_at(cfg, step))
    return Batch(rows, requests, hyper)


def validation_batches(cfg: Config, mesh: Mesh, step: int, stream: TokenStream, vocab) -> Iterator:
    """Yield all validation Batches for the model after `step` steps."""
    for tokens, counts in read_validation(cfg, mesh, stream):
        targets = np.where(counts, tokens[:, 1:].astype(np.int32), -1)
        yield batch_of(cfg, mesh, step, vocab, tokens, targets)


def batch_of(cfg: Config, mesh: Mesh, step: int, vocab, tokens, targets) -> Batch:
    """Return a validation Batch for the model after `step` steps. Padding targets are -1."""
    last_step = max(step - 1, 0)  # use the RoPE frequencies of the last training step
    return put_batch(cfg, mesh, last_step, vocab, tokens, next_tokens(targets))


def put(array: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """Put an array on the mesh. For a sharded array, pass this process's part."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), array)


# ================================================================================================
# PART II: THE IDEAS OF THE RECORD
# ================================================================================================

# Each section implements one or more related ideas. Parentheses give the record that introduced an
# idea, the savings that upstream measured, and the switch (`--set without=NAME`). M means million
# training tokens; s means seconds, out of record 92's 39.9 s on eight H100s. Ideas without a
# section are explained in IDEAS.

# ---- The switches -------------------------------------------------------------------------------

# The settings that disable each idea (`--set without=NAME,...`).
IDEAS = {
    "muon": "muon=0",  # orthogonalized matrix updates (anvil)
    "squared_relu": "squared_relu=0",  # ReLU^2 instead of GELU (mlp)
    "zero_start": "down_init=1",  # zero-initialized MLP outputs (param_specs)
    "qk_norm": "qk_norm=0",  # normalized queries and keys (attend_heads)
    "documents": "documents=0",  # attention within documents (segment_ids)
    "logit_cap": "logit_cap=0,0,0",  # bounded logits (cap_logits)
    "momentum": "momentum=0.93,0.93",  # warmup and cooldown (momentum_at)
    "windows": "stages.*.windows=128,128 val_windows=128,128",
    "values": "layers.*.values=0",
    "value_gates": "value_gates=0",
    "still": "half_rope=0",  # no RoPE on half of the dimensions (rope_tables)
    "packing": "stages.*.doc_cap=0",
    "smear": "smear=0",
    "seldom": "adam_every=1 table_every=1,1",
    "equalize": "equalize_rate=0",
    "cautious": "cautious=0",  # cautious weight decay (descend, anvil)
    "skip": "layers.*.skip=0",  # gated skip connection (layer_output)
    "lambdas": "lambdas=0",
    "key_offset": "key_offset=0",
    "tied": "tied=0",
    "scalar_betas": "scalar_betas=(0.9,0.95),(0.9,0.95)",
    "ahead": "stages.*.loss_weights=(1.0,) stages.*.loss_weights_end=(1.0,)",
    "paired": "layers.*.paired=0",
    "qk_heads": "qk_heads=0",
    "o_start": "o_init=0",  # nonzero output projections (param_specs)
    "reads": "layers.*.reads_back=0",  # attention reads an earlier layer (layer_output)
    "mudd": "layers.*.mudd=0",
    "xsa": "layers.*.xsa=0",
    "gated": "layers.*.gated=0",
    "x0": "layers.*.x0=0",
    "signs": "sign_rows=0",
    "gates": "gate_width=0 layers.*.new_gates=0",
    "prefix": "stages.*.prefix_weights=(0.0,)",
    "narrow": "layers.*.narrow=0",  # half-width values (heads_of)
    "fewer": "layers.*.attends=long layers.*.skip=0",  # fewer attention layers (Config.layers)
    "candidates": "stages.*.candidates=(0,)",
    "ngrams": "ngram_rows=0 layers.*.ngram=0",
    "normalised": "ngram_ids=raw",
    "rails": "slow_rate=0",
    "pointer": "pointer_width=0",
    "averages": "tail=0 tail_average=0",
}
PLAIN_HAS = "muon", "squared_relu", "zero_start", "qk_norm", "documents"  # without=all keeps these


# ---- Table updates, and tied embeddings ---------------------------------------------------------

# Each batch uses a table row only a few times, so its gradients are noisy. Table updates therefore
# accumulate gradients over two (later four) steps, and other Adam updates over two (records 39,
# 92: saves 22M tokens; without=seldom). The head and embedding are tied until late in training
# (records 51, 53; without=tied).


def table_updates(cfg: Config, step: np.ndarray) -> np.ndarray:
    """For each step, return how many steps its table update accumulates (0 for no update)."""
    often, seldom = cfg.table_every
    has_changed = step >= cfg.table_change
    interval = np.where(has_changed, seldom, often)
    counted_from = np.where(has_changed, cfg.table_change, 0)
    is_last = (step + 1 - counted_from) % interval == 0
    return np.where(is_last, interval, 0)


def last_tied_step(cfg: Config) -> int:
    """Return the last step with tied head and embedding (1175 in the record). That step ends with
    an Adam update, so that tied and untied gradients never mix."""
    step = round(cfg.tied * (cfg.steps - cfg.extension))
    while (step + 1) % cfg.adam_every:
        step += 1
    return step


def tied_update(cfg: Config, kernels: Kernels, state, due, hyper: Hyper):
    """Run update_step with tied head and embedding, summing their gradients."""
    due = dict(due)
    due["head"] = due["head"] + due.pop("embed")  # concatenates two tuples of gradients
    state, copies, norms = update_step(cfg, kernels, state, due, hyper)
    copies["embed"] = copies["head"]
    return tie(state), copies, norms


def tie(state):
    """Return the training state with the embedding's arrays replaced by the head's."""
    tied = {}
    for kind, arrays in state.items():
        tied[kind] = dict(arrays)
        if "embed" in arrays:
            tied[kind]["embed"] = arrays["head"]
    return tied


# ---- RoPE frequencies that follow the windows ---------------------------------------------------

# Attention windows start short to make early steps cheap, and grow at each stage (records 13, 20,
# 31: saves 65M tokens; without=windows). When a window grows, YaRN (Peng et al. 2023) lowers the
# low rotation frequencies to keep angles in the learned range, and raises the scale of q k^T to
# keep attention sharp.


def yarn(cfg: Config) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each stage, return the rotation frequencies (float32 [2, pairs]) and q k^T scales [2] of
    short and long layers."""
    rotations = [rotation(cfg)]
    for before, after in itertools.pairwise(cfg.stages):
        freqs, scales = (x.copy() for x in rotations[-1])
        for i, (old, new) in enumerate(zip(before.windows, after.windows, strict=True)):
            freqs[i] = stretched(freqs[i], old, new)
            # YaRN scales q and k each by 1 + 0.1 log(new / old); upstream scales q k^T, with 0.2.
            scales[i] *= 1 + 0.2 * math.log(new / old)
        rotations.append((freqs, scales))
    return rotations


def stretched(freqs: np.ndarray, old: int, new: int) -> np.ndarray:
    """Return rotation frequencies (float32) for a window that grows from `old` to `new` tokens. As
    in YaRN, pairs with at most 1 rotation per old window slow down by old / new, pairs with at
    least 32 are unchanged, and the rest are interpolated."""
    turns = old * freqs / np.float32(2 * math.pi)
    kept = np.clip((turns - 1) / (32 - 1), 0, 1)
    slower = old / new
    return freqs * (slower + kept * (1 - slower))


# ---- Weight averaging ---------------------------------------------------------------------------

# Averaging the last weights reduces noise, so the learning rate can stay high (record 92: saves
# 3.8 s; without=averages). `follow` updates the averages during the last steps. After the last
# step, `move_to_averages` moves the weights towards them.


class Average(NamedTuple):
    """A weight average and its parameters."""

    length: str  # name of the setting for the number of steps
    updated_by: str  # ParamSpec.updated_by of its parameters
    shares: dict[str, float]  # parameter -> fraction to move it towards its average
    rescaled: bool = True  # restore each parameter's norm


# Parameters are moved in this order. The shares are from upstream.
TO_BANK_EMA = 0.55 - 0.2007
AVERAGES = {
    "ema": Average("tail", "adam", {"head": 0.65, "embed": 0.65}),
    "average": Average("tail_average", "anvil", {"vo_bank": 1.0, "v_bank": 1.0, "mlp_bank": 1.0}),
    "value_average": Average("tail_average", "tables", {"value_tables": 1.0}, rescaled=False),
    "bank_ema": Average(
        "tail",
        "anvil",
        {"qk_bank": 0.55, "vo_bank": TO_BANK_EMA, "v_bank": TO_BANK_EMA, "mlp_bank": TO_BANK_EMA},
    ),
}
AVERAGE_EVERY = 4  # steps between matrix average updates
AVERAGE_MEMORY = 0.212  # horizon of `average` and value_average, relative to tail_average


def with_averages(cfg: Config, table: dict[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return the parameter table with `averages` and `rescaled` filled in. An average applies only
    to parameters with the same `updated_by`."""
    completed = {}
    for name, row in table.items():
        averages = []
        for kind, average in AVERAGES.items():
            is_on = getattr(cfg, average.length) > 0
            if is_on and average.updated_by == row.updated_by and name in average.shares:
                averages.append((kind, average.shares[name]))
        rescaled = any(AVERAGES[kind].rescaled for kind, _ in averages)
        completed[name] = dataclasses.replace(row, averages=tuple(averages), rescaled=rescaled)
    return completed


def average_rates(cfg: Config, adam_due, tables) -> np.ndarray:
    """Return rates [steps, 4] for AVERAGES: average += rate * (weight - average) after each step.
    The first nonzero rate is 1, which initializes the average."""
    left = cfg.steps - 1 - np.arange(cfg.steps)
    in_average = left < cfg.tail_average
    is_fourth = left % AVERAGE_EVERY == 0
    # `ema` starts from the weights used in the first step of the tail. Their last Adam update may
    # come before the tail.
    ema_due = adam_due & (left + 1 < cfg.tail + cfg.adam_every)
    # Upstream also updates bank_ema at the second-to-last step, probably by accident.
    bank_due = (left < cfg.tail) & (is_fourth | (left == 1))
    # Merge the n per-step updates until the next Adam step into one: 1 - (1 - rate)^n.
    n = np.minimum(cfg.adam_every, left + 1)
    memory = AVERAGE_MEMORY * max(cfg.tail_average, 1)
    average_rate = min(AVERAGE_EVERY / memory, 1)
    rates = {
        "ema": ema_due * (1 - (1 - 2 / (cfg.tail + 1)) ** n),
        "average": (in_average & is_fourth) * average_rate,
        "value_average": (in_average & (tables > 0)) * average_rate,
        "bank_ema": bank_due * min(2 / (cfg.tail // AVERAGE_EVERY + 1), 1),
    }
    for column in rates.values():
        column[np.flatnonzero(column)[:1]] = 1.0
    return np.stack([rates[kind] for kind in AVERAGES], axis=1)


def follow(state, name: str, spec: ParamSpec, hyper: Hyper):
    """Update a parameter's averages in `state`, in place. This runs even while rates are 0, so that
    all steps share one compiled program."""
    kinds = list(AVERAGES)
    for kind, _ in spec.averages:
        rate = hyper.average_rates[kinds.index(kind)]
        average = state[kind][name]
        weight = state["params"][name]
        state[kind][name] = average + rate * (weight - average)


def move_to_averages(cfg: Config, state) -> dict:
    """Return the final weights: the last weights, moved towards their averages. Averaging shrinks
    norms, which changes logits and the residual stream, so `rescaled` parameters are scaled back to
    their old norm."""

    def length(x):
        square = lax.psum(jnp.sum(jnp.square(x)), AXIS)
        return jnp.sqrt(square)

    params = dict(state["params"])
    kinds = list(AVERAGES)
    has_started = schedule(cfg).hyper.average_rates.any(axis=0)
    for name, spec in param_specs(cfg).items():
        for kind, share in spec.averages:
            if has_started[kinds.index(kind)]:
                difference = state[kind][name] - params[name]
                params[name] += share * difference
        if spec.rescaled:
            before = length(state["params"][name])
            after = length(params[name])
            params[name] *= jnp.where(after > 0, before / after, 1.0)
    return params


# ---- Multi-token prediction and sampled softmax -------------------------------------------------

# Early in training, the model also predicts later tokens (record 53: saves 21M tokens, including
# the savings from untying; without=ahead) and the next token's longest prefix, such as "interact"
# for "interaction" (record 88: saves 4M tokens; without=prefix). Each row's softmax covers its
# targets plus a sample of other ids, instead of all 50,304 ids (record 92: saves 8.4 s;
# without=candidates).


def loss_weights(cfg: Config) -> np.ndarray:
    """Return loss weights [steps, k] for the next k tokens, interpolated within each stage and
    zero-padded."""
    most = max(len(stage.loss_weights) for stage in cfg.stages)

    def padded(weights):
        return np.pad(weights, (0, most - len(weights)))

    first = np.stack([padded(stage.loss_weights) for stage in cfg.stages])
    last = np.stack([padded(stage.loss_weights_end) for stage in cfg.stages])
    stage, number, length = steps_in_stages(cfg)
    progress = number / length
    change = (last - first)[stage]
    return first[stage] + change * progress[:, None]


class Vocabulary(NamedTuple):
    """Tables indexed by token id."""

    prefix_v: np.ndarray  # int32, longest proper prefix that is also a token; -1 if none
    hashed_v: np.ndarray  # uint16, id used in n-gram hashes


def vocabulary(cfg: Config, words: list[bytes]) -> Vocabulary:
    """Return the Vocabulary for `words`, the bytes of each token except BOS and padding."""
    prefix_v = prefix_table(words, cfg.vocab)
    hashed_v = np.arange(cfg.vocab).astype(np.uint16)
    if cfg.ngram_ids == "normalised":
        hashed_v = normalised_ids(words, cfg.vocab)
    return Vocabulary(prefix_v, hashed_v)


def prefix_table(words: list[bytes], vocab_size: int) -> np.ndarray:
    """Return Vocabulary.prefix_v for `words`."""
    table = np.full(vocab_size, -1, np.int32)
    id_of = {word: i for i, word in enumerate(words)}
    for word, i in id_of.items():
        for end in range(len(word) - 1, 0, -1):
            prefix = word[:end]
            if prefix in id_of:
                table[i] = id_of[prefix]
                break
    return table


def batch_targets(tokens, offsets, count: int, prefix_v, required=()) -> tuple[Targets, tuple]:
    """Apply row_targets to each row of `tokens` [b, t+1]. Return (stacked Targets, next offset per
    row)."""
    pairs = zip(tokens, offsets, strict=True)
    results = [row_targets(row, offset, count, prefix_v, required) for row, offset in pairs]
    rows, next_offsets = zip(*results, strict=True)
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows), next_offsets


def row_targets(row, offset: int, count: int, prefix_v, required=()) -> tuple[Targets, int]:
    """Return (Targets without axis b, next offset) for a row of t+1 tokens. Candidates include
    targets and `required` ids. count=0 selects the full vocabulary."""
    targets_t = row[1:].astype(np.int32)
    prefixes_t = prefix_v[targets_t]
    if not count:
        return Targets(np.empty(0, np.int32), targets_t, prefixes_t), offset
    included = np.append(targets_t, np.array(required, np.int32))
    ids, offset = candidates(included, offset, count, len(prefix_v))
    # Index of each id among the candidates, or -1. The extra last entry is for missing prefixes.
    place_v = np.full(len(prefix_v) + 1, -1, np.int32)
    place_v[ids] = np.arange(count)
    return Targets(ids.astype(np.int32), place_v[targets_t], place_v[prefixes_t]), offset


STRIDE = 20011  # coprime to the vocabulary size, so that walks visit every id


def candidates(included, offset: int, count: int, vocab_size: int):
    """Return (`count` sorted ids, next offset) for the sampled softmax: the `included` ids plus ids
    from a cyclic walk through the vocabulary, from `offset` in steps of STRIDE. Sampling makes the
    loss too low, so it jumps when the last stages switch to the full vocabulary. Raise UserError if
    `included` has more than `count` distinct ids."""
    is_chosen = np.zeros(vocab_size, bool)
    is_chosen[included] = True
    different = np.count_nonzero(is_chosen)
    too_many = f"a row has {different:,} different targets, more than its {count:,} candidates"
    require(different <= count, f"{too_many}: raise --set stages.N.candidates=")
    missing = count - different
    if missing:
        draw = min(vocab_size, int(missing * 1.7) + 256)  # enough if at most 40% are already chosen
        walk = np.arange(offset, offset + draw) * STRIDE % vocab_size
        others = walk[~is_chosen[walk]]
        if len(others) < missing:  # rare: pick evenly spaced ids instead
            free = np.flatnonzero(~is_chosen)
            others = free[:: max(1, len(free) // missing)]
        is_chosen[others[:missing]] = True
        offset = (offset + draw) % vocab_size
    return np.flatnonzero(is_chosen), offset


# ---- Copy pointer -------------------------------------------------------------------------------

# The model can copy the next token from earlier text (pull request 379: saves 144 steps; sink from
# Merity et al. 2016; without=pointer):
#     1. the softmax gives probability a to an extra id, `<copy>` (real_tokens, the first unused id)
#     2. attention on the final hidden states splits a between earlier tokens and a learned sink key
#     3. the sink's share goes back to the other ids of the softmax
# Only the next-token loss uses this mixture.


class PointerQueries(NamedTuple):
    """Pointer queries, with leading axes [b, t] or [t]."""

    q: jax.Array  # [..., h], normalized and scaled
    sink: jax.Array  # float32, sink score
    next_token: jax.Array  # int32, the token to point at
    segment: jax.Array  # int32 segment id; -1 for padding
    position: jax.Array  # int32 position in the row


class PointerKeys(NamedTuple):
    """Pointer keys, with leading axes [b, t] or [s]."""

    k: jax.Array  # [..., h], normalized
    token: jax.Array  # int32, the token at this position
    segment: jax.Array
    position: jax.Array


def pointer_params(cfg: Config) -> dict[str, ParamSpec]:
    """Return the query and key projections [2, h, d], the sink, and the inverse temperature."""
    h = cfg.pointer_width
    return {
        "pointer_qk": small_param(cfg, (2, h, cfg.width), hidden_start(cfg), 1, decay=1),
        "pointer_sink": small_param(cfg, (h,), normal(1 / math.sqrt(h)), 1),
        "pointer_gain": small_param(cfg, (1,), 1.0, 1),
    }


def with_pointer(model: Model, rows: Rows, x_btd, targets, weights) -> tuple:
    """Return (features, targets, weights, pointer_probs) for the loss, each [b, t, ...]. `<copy>`
    becomes the last target, with weight 0, because mix_pointed needs its loss."""
    ids = rows.targets.candidates
    copy_id = model.cfg.real_tokens
    copy_b1 = jnp.full((1, 1), copy_id)
    if ids.size:  # index among each row's candidates
        copy_b1 = jnp.argmax(ids == copy_id, axis=1)[:, None]
    b, t, _ = targets.shape
    copy_bt1 = jnp.broadcast_to(copy_b1[..., None], (b, t, 1))
    targets = jnp.concatenate([targets, copy_bt1.astype(targets.dtype)], axis=2)
    one_more = [(0, 0), (0, 0), (0, 1)]
    weights = jnp.pad(weights, one_more)
    return x_btd, targets, weights, pointer_probs(model, rows, x_btd)


# Scores for 2048 queries probably do not fit in TPU v6e VMEM.
QUERIES_AT_ONCE = 1024


def pointer_probs(model: Model, rows: Rows, x_btd):
    """Return the pointer's probabilities for the next token (summed over earlier occurrences) and
    for the sink, float32 [b, t, 2]. Tokens attend to earlier tokens in the same segment, within
    their own block of pointer_reach tokens and the previous block."""
    b, t, _ = x_btd.shape
    training_reach, validation_reach = model.cfg.pointer_reach
    size = min(t, training_reach if model.stage else validation_reach)
    past = size if size < t else 0

    def cut(arrays, start: int, stop: int):
        return jax.tree.map(lambda x: x[start:stop], arrays)

    @functools.partial(jax.checkpoint, policy=is_reduction)
    def of_block(block):
        queries, keys = block
        parts = []
        for start in range(0, size, QUERIES_AT_ONCE):
            stop = min(start + QUERIES_AT_ONCE, size)
            earlier_keys = cut(keys, 0, past + stop)  # later keys are masked anyway
            parts.append(point(cut(queries, start, stop), earlier_keys))
        return jnp.concatenate(parts)

    queries, keys = pointer_inputs(model, rows, x_btd)
    queries = jax.tree.map(lambda x: token_blocks(x, size), queries)
    keys = jax.tree.map(lambda x: token_blocks(x, size, past), keys)
    chances = lax.map(of_block, (queries, keys))
    return chances.reshape(b, -1, 2)[:, :t]


def is_reduction(primitive, *_, **__) -> bool:
    """Checkpoint policy: save sums and maxima, and recompute the scores [t, s] (up to 0.8 GB for a
    row of 49,152 tokens)."""
    return primitive.name in ("reduce_sum", "reduce_max")


def token_blocks(x, size: int, past: int = 0):
    """Split rows [b, t, ...] into blocks [b * blocks, past + size, ...]. `past` is 0, or `size` to
    include the previous block. Padding is -1."""
    b, t, *rest = x.shape

    def padded(x, before: int, after: int):
        widths = [(0, 0)] * x.ndim
        widths[1] = (before, after)
        return jnp.pad(x, widths, constant_values=-1)

    x = padded(x, 0, -t % size)
    blocks = x.reshape(b, -1, size, *rest)
    if past:
        before = padded(blocks[:, :-1], 1, 0)
        blocks = jnp.concatenate([before, blocks], axis=2)
    return blocks.reshape(-1, past + size, *rest)


def pointer_inputs(model: Model, rows: Rows, x_btd) -> tuple[PointerQueries, PointerKeys]:
    """Compute all queries and keys from the final hidden states [b, t, d]. The authors report that
    scores blew up without norms."""
    cfg, params = model.cfg, model.params
    w_qk = params["pointer_qk"].astype(x_btd.dtype).reshape(-1, cfg.width)
    qk = x_btd @ w_qk.T
    q, k = jnp.split(qk, 2, axis=2)
    scale = params["pointer_gain"][0] / math.sqrt(cfg.pointer_width)
    q = mix((scale, norm(q)))
    sink = q.astype(jnp.float32) @ params["pointer_sink"]
    tokens = rows.tokens.astype(jnp.int32)
    segment = segments_of(model, rows)
    position = jnp.arange(x_btd.shape[1])[None]
    position = jnp.broadcast_to(position, segment.shape)
    queries = PointerQueries(q, sink, tokens[:, 1:], segment, position)
    keys = PointerKeys(norm(k), tokens[:, :-1], segment, position)
    return queries, keys


def point(queries: PointerQueries, keys: PointerKeys):
    """Return pointer_probs [t, 2], from a softmax over keys [s, ...] and the sink."""
    scores_ts = pointer_scores(queries, keys)
    is_next_ts = queries.next_token[:, None] == keys.token[None]
    most_t = jnp.maximum(jnp.max(scores_ts, axis=1), queries.sink)
    most_t = lax.stop_gradient(most_t)  # the result does not depend on it
    exp_ts = jnp.exp(scores_ts - most_t[:, None])
    exp_sink_t = jnp.exp(queries.sink - most_t)
    exp_next_t = jnp.sum(jnp.where(is_next_ts, exp_ts, 0.0), axis=1)
    total_t = jnp.sum(exp_ts, axis=1) + exp_sink_t
    return jnp.stack([exp_next_t, exp_sink_t], axis=1) / total_t[:, None]


def pointer_scores(queries: PointerQueries, keys: PointerKeys):
    """Return float32 scores [t, s], or -inf unless the key is earlier in the same segment."""
    scores_ts = scores_product(queries.q, keys.k)
    in_segment_ts = queries.segment[:, None] == keys.segment[None]
    is_earlier_ts = queries.position[:, None] > keys.position[None]
    return jnp.where(in_segment_ts & is_earlier_ts, scores_ts, -jnp.inf)


@jax.custom_gradient
def scores_product(q, k):
    """Return q k^T, float32 [t, s]. The backward pass casts gradients to q's dtype for faster
    matmuls."""

    def factor_gradients(grad_ts):
        grad_ts = grad_ts.astype(q.dtype)
        return grad_ts @ k, grad_ts.T @ q

    return jnp.matmul(q, k.T, preferred_element_type=jnp.float32), factor_gradients


def mix_pointed(losses, pointed):
    """Return losses [t, targets], with the next-token loss replaced by the loss under the mixture.

    `losses` come from the softmax. The first is for the next token (probability p), the last for
    `<copy>` (probability a). `pointed` [t, 2] holds pointer_probs (next, sink). In the mixture, the
    next token has probability
        p / (1 - a) * (1 - a + a sink)  +  a next   =   p (1 + a sink / (1 - a)) + a next
    where p / (1 - a) is the softmax without `<copy>`."""
    next_t = pointed[:, 0]
    sink_t = pointed[:, 1]
    chance_t = jnp.exp(-losses[:, 0])  # p
    copy_t = jnp.exp(-losses[:, -1])  # a
    rest_t = -jnp.expm1(-losses[:, -1])  # 1 - a
    returned_t = copy_t * sink_t / jnp.maximum(rest_t, 1e-6)
    chance_t = chance_t * (1 + returned_t) + copy_t * next_t
    loss_t = -jnp.log(jnp.maximum(chance_t, 1e-30))
    return losses.at[:, 0].set(loss_t)


# ---- Hashed n-gram table ------------------------------------------------------------------------

# Each token looks up one vector for its bigram and one for its trigram in a hash table with 42
# million rows (records 62, 92: saves 7.1 s; without=ngrams). Random signs distinguish n-grams that
# share a row (record 83: saves 8M tokens; without=signs). Hashes ignore case and accents (pull
# request 375: saves 15 steps; without=normalised).
#
# For each device, the loader lists the distinct rows that the device needs, grouped by owner, i.e.
# the device that stores them (device_request). Each step exchanges requests, then rows
# (fetch_requests). Owners sum each row's gradients (sum_requests) and update the row (adam_rows).


def ngram_params(cfg: Config) -> dict[str, ParamSpec]:
    """Return the zero-initialized table [rows, d], without a float32 master copy. Its first beta is
    0 because adam_rows keeps no mean."""
    kinds = {"optimizer": "rows", "dtype": cfg.compute_dtype}
    return {NGRAMS: table_param(cfg, cfg.ngram_rows, 0.0, (0, 0.95), **kinds)}


def normalised_ids(words: list[bytes], vocab_size: int) -> np.ndarray:
    """Map each id to the smallest id with the same normal form, or to itself if it has none (uint16
    [v]). This merges GPT-2's 50,257 ids into 32,980, so fewer n-grams collide."""
    table = np.arange(vocab_size).astype(np.uint16)
    first = {}
    for i, word in enumerate(words):
        form = normal_form(word)
        if form:
            table[i] = first.setdefault(form, i)
    return table


def normal_form(word: bytes) -> str:
    """Lowercase a word, strip accents and surrounding whitespace, and fold letter variants. Pure
    whitespace becomes " ", and invalid UTF-8 becomes ""."""
    try:
        text = word.decode()
    except UnicodeDecodeError:  # part of a multi-byte character
        return ""
    text = unicodedata.normalize("NFKD", text)  # accents become separate characters, category Mn
    letters = [c.lower() for c in text if unicodedata.category(c) != "Mn"]
    text = re.sub(r"[ \t\r\n]+", " ", "".join(letters))
    return text if text == " " else text.strip()


def hashed_rows(cfg: Config, mesh: Mesh, by_id: Vocabulary, tokens, all_targets: Targets):
    """Return (Rows with n-grams, requests) for this process, as numpy arrays."""
    hashed = by_id.hashed_v[tokens[:, :-1]]
    mine = len(mesh.local_devices)
    requests, slots = request(cfg, hashed, mesh.size, mine)
    return Rows(tokens, hashed, slots, all_targets), requests


def request(cfg: Config, hashed, devices: int, mine: int) -> tuple:
    """Return (requests [mine, devices, size], slots [b, 2, t]) for this process's rows `hashed`
    [b, t], split evenly over its `mine` devices."""
    tokens_of_device = hashed.size // mine
    size = capacity(tokens_of_device * devices, devices)
    of_device = functools.partial(device_request, cfg, devices=devices, size=size)
    with ThreadPoolExecutor() as pool:  # numpy releases the GIL while sorting
        results = list(pool.map(of_device, np.split(hashed, mine)))
    requests, slots = zip(*results, strict=True)
    return np.stack(requests), np.concatenate(slots)


def device_request(cfg: Config, hashed, devices: int, size: int) -> tuple:
    """Return int32 (requests [devices, size], slots [b, 2, t]) for a device's rows `hashed` [b, t].

    requests[k] lists the distinct rows needed from owner k, as indices into its shard, padded with
    the shard's length. slots holds each token's bigram and trigram row as an index into the
    returned rows, `size` from each owner. N-grams that do not fit are dropped: they get slot 0, the
    row for trigrams without enough history.

    Example with 8 rows on two devices (0-3 and 4-7) and size 3:
        tokens            1  4  1  4  4  4
        bigram hashes     3  1  1  1  1  1   3: not enough history
        trigram hashes    7  7  5  4  6  6   7: not enough history
        bigram rows       4  6  6  6  6  6
        trigram rows      0  0  2  3  1  1
        requests[0]       0  1  2            row 3 does not fit
        requests[1]       0  2  4            4: padding
        rows returned     0  1  2  4  6  7   7: padding
        bigram slots      3  4  4  4  4  4
        trigram slots     0  0  2  0  1  1   fourth token: dropped
    """
    owned = -(-cfg.ngram_rows // devices)  # rows per shard
    hashes = ngram_hashes(hashed, cfg.ngram_rows)
    rows = spread(hashes, cfg.ngram_rows)  # [2, b, t]
    distinct, index = np.unique(rows, return_inverse=True)
    owner, row_of_shard = np.divmod(distinct, owned)  # sorted, like `distinct`
    first = np.searchsorted(owner, np.arange(devices))  # index of each owner's first row
    place = np.arange(len(owner)) - first[owner]
    fits = place < size
    requests = np.full((devices, size), owned, np.int32)
    requests[owner[fits], place[fits]] = row_of_shard[fits]
    slots = np.where(fits, owner * size + place, 0)
    slots = slots.astype(np.int32)
    slots = slots[index].reshape(rows.shape)
    return requests, slots.swapaxes(0, 1)


def ngram_hashes(x_bt: np.ndarray, rows: int) -> np.ndarray:
    """Return each token's bigram and trigram hashes, int32 [2, b, t]. Bigrams hash into the first
    half of the table's `rows`, trigrams into the second (records 62, 92). The last value in each
    half means not enough history. To match an upstream bug, the bigram of a row's second token uses
    `last` instead of the first token."""
    x2_bt, x1_bt, x_bt = last_tokens(np, x_bt)
    position = np.arange(x_bt.shape[1])[None]
    half = rows // 2
    last = half - 1
    before_bt = np.where(position == 1, last, x1_bt)
    bigram = hash_tokens((before_bt, x_bt), (27191, 36313))
    trigram = hash_tokens((x2_bt, x1_bt, x_bt), (45259, 60961, 17351))
    bigram = np.where(position < 1, last, bigram % last)
    trigram = np.where(position < 2, last, trigram % last)
    return np.stack([bigram, half + trigram])


def last_tokens(xp, x_bt) -> tuple:
    """Return (token two back, previous token, token) at each position, int32 [b, t], with 0 before
    the row starts. `xp` is numpy or jax.numpy."""
    x_bt = x_bt.astype(xp.int32)
    padded = xp.pad(x_bt, [(0, 0), (2, 0)])
    x1_bt = padded[:, 1:-1]
    x2_bt = padded[:, :-2]
    return x2_bt, x1_bt, x_bt


def hash_tokens(tokens: tuple, multipliers: tuple[int, ...]):
    """Multiply tokens by upstream's multipliers and XOR the products, with int32 wraparound."""
    hashed = multipliers[0] * tokens[0]
    for x_bt, multiplier in zip(tokens[1:], multipliers[1:], strict=True):
        hashed = hashed ^ (multiplier * x_bt)
    return hashed


def spread(ids: np.ndarray, rows: int) -> np.ndarray:
    """Return the table row of each hash in `ids`, int64; 0 for trigrams without enough history.
    Hashes of small ids are unevenly distributed, because the products do not wrap around.
    Multiplying by a prime spreads them over the owners (Knuth 1973)."""
    prime = 2_654_435_761  # 2**32 / golden ratio; larger than any table
    return (rows - 1 - ids.astype(np.int64)) * prime % rows


def capacity(batch_tokens: int, devices: int) -> int:
    """Return how many n-gram rows a device can request from each owner per step. t tokens of
    English text contain up to 2t (1300 / t)^0.06 distinct n-grams (measured in records/NOTES.md).
    Owners get equal shares, with a margin of five standard deviations."""
    tokens = batch_tokens // devices
    distinct = 2 * tokens * min(1.0, (1300 / tokens) ** 0.06)
    mean = distinct / devices
    most = mean + 5 * math.sqrt(mean)
    return min(2 * tokens, math.ceil(most / 8) * 8)  # 2 * tokens is always enough


def sign_pool(cfg: Config, seed):
    """Return random n-gram signs, int8 [sign_rows, d]. They are not trained."""
    # 92 is arbitrary. init_state folds hashes of names into the same key.
    key = jax.random.fold_in(jax.random.key(seed), 92)
    return jax.random.rademacher(key, (cfg.sign_rows, cfg.width), jnp.int8)


def ngram_vectors(model: Model, looked_up: dict, rows: Rows):
    """Return the n-gram vector of each token, [b, t, d]."""
    ngrams = looked_up[NGRAMS]
    if model.cfg.ngram_drop and model.stage:
        ngrams = ngram_dropout(model, ngrams, rows.tokens)
    return signed_sum(model.signs, ngrams, rows.hashed)


def signed_sum(signs, ngrams, hashed_bt):
    """Return n-gram vectors [b, t, d]: the signed sum of each token's rows `ngrams` [b, 2, t, d].
    `signs` is sign_pool or None."""
    # Don't index instead: XLA would pad each half's gradient to full size.
    bigrams, trigrams = jnp.split(ngrams, 2, axis=1)
    bigrams_btd = bigrams[:, 0]
    trigrams_btd = trigrams[:, 0]
    if signs is None:
        return bigrams_btd + trigrams_btd
    bigram_ids, trigram_ids = sign_ids(hashed_bt, len(signs))
    bigram_signs = signs[bigram_ids].astype(bigrams.dtype)
    trigram_signs = signs[trigram_ids].astype(trigrams.dtype)
    return bigram_signs * bigrams_btd + trigram_signs * trigrams_btd


def sign_ids(x_bt, rows: int):
    """Return the sign_pool rows for each token's bigram and trigram, int32 [2, b, t]; 0 without
    enough history. `rows` is a power of two. The multipliers differ from ngram_hashes, so n-grams
    that share a table row rarely share signs (record 83)."""
    x2_bt, x1_bt, x_bt = last_tokens(jnp, x_bt)
    position = jnp.arange(x_bt.shape[1])[None]
    bigram = hash_tokens((x1_bt, x_bt), (30011, 48271))
    bigram = jnp.where(position < 1, 0, bigram & (rows - 1))
    trigram = hash_tokens((x2_bt, x1_bt, x_bt), (26801, 39779, 58699))
    trigram = jnp.where(position < 2, 0, trigram & (rows - 1))
    return jnp.stack([bigram, trigram])


def ngram_dropout(model: Model, ngrams, tokens):
    """Apply dropout at rate cfg.ngram_drop to `ngrams` [b, 2, t, d], to limit memorization over
    several epochs. The mask depends on the step and each row's `tokens` [t + 1], not on the number
    of devices."""
    kept = 1 - model.cfg.ngram_drop
    of_step = jax.random.key(model.hyper.drop_seed.astype(jnp.uint32))

    def mask(row):
        key = jax.random.fold_in(of_step, jnp.sum(row.astype(jnp.int32)))
        return jax.random.bernoulli(key, kept, (2, len(row) - 1))

    weights = jax.vmap(mask)(tokens)[..., None] / kept
    return ngrams * weights.astype(ngrams.dtype)


def exchange(x):
    """Send part k of x [devices, ...] to device k, and return the parts received."""
    return lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)


def fetch_requests(table, batch: Batch) -> tuple:
    """Exchange requests, then the requested rows. `table` is this device's shard. Return (requests
    received [devices, size], {NGRAMS: rows received [devices * size, d]})."""
    requested = exchange(batch.requests[0])
    rows = table.at[requested].get(mode="clip")  # padding is clipped to the last row
    rows = exchange(rows).reshape(-1, table.shape[1])
    return requested, {NGRAMS: rows}


def send_to_owners(requested, grads, numbers) -> tuple:
    """Send the gradients of fetched rows to their owners. Return (`numbers`, (ids, gradients)
    received). The barrier makes the exchange wait for `numbers`, so that the exchange does not
    delay the loss."""
    grads = grads.reshape(*requested.shape, -1)
    numbers, grads = lax.optimization_barrier((numbers, grads))
    return numbers, (requested, exchange(grads))


def dropped_ngrams(slots):
    """Return the number of dropped n-grams: slots equal to 0, not counting the trigrams of each
    row's first two tokens, which always have slot 0."""
    without_history = slots[:, 1, :2].size
    return jnp.sum(slots == 0, dtype=jnp.float32) - without_history


def update_rows(cfg: Config, table, square, waiting, rates: AdamRates, add_rows: Callable):
    """Take one Adam step on this device's shard of the table. Return (table, mean square of each
    row, sum of squared gradients). `waiting` holds (requested rows [devices, n], gradients
    [devices, n, d]) for each step since the last update."""
    requested, grads = zip(*waiting, strict=True)
    ids = jnp.concatenate([x.reshape(-1) for x in requested])
    grads = [x.reshape(-1, x.shape[-1]) for x in grads]
    places = jnp.arange(len(ids))
    ids, order = lax.sort((ids, places), num_keys=1)
    _, beta = rates.betas
    square = beta * square  # decays for all rows
    update = functools.partial(update_part, rates, add_rows)
    before = table, square, jnp.float32(0)
    if len(ids) > cfg.rows_at_once:  # Part V: same result with less memory
        most_equal = sum(map(len, requested))  # at most one request per device and step
        return update_in_parts(update, before, ids, order, grads, (cfg.rows_at_once, most_equal))
    return update(before, ids, jnp.concatenate(grads)[order], len(ids))


def update_part(rates: AdamRates, add_rows: Callable, so_far: tuple, ids, grads, count):
    """Update the rows for the first `count` of the sorted `ids` [r], with gradients [r, d].
    `so_far` and the result are as in update_rows. Only update_in_parts passes count < r."""
    table, square, total = so_far
    rows = len(table)
    ids, sums = sum_requests(ids, grads, count, rows, add_rows)
    table, square = adam_rows(table, square, ids, sums, rates)
    sums = jnp.where(ids[:, None] < rows, sums, 0)  # ignore padding and other parts
    return table, square, total + jnp.sum(sums * sums)


def sum_requests(ids, grads, count, rows: int, add_rows: Callable):
    """Sum the gradients [r, d] of duplicate ids in the sorted `ids` [r]. Return (distinct ids [r],
    sums float32 [r, d]). Ids after the first `count` are ignored. Padding ids start at `rows` and
    are also distinct, because adam_rows promises XLA unique ids: 3 3 7 becomes 3, 7, rows + 2."""
    places = jnp.arange(len(ids))
    is_new = jnp.diff(ids, prepend=-1) != 0
    group = jnp.cumsum(is_new) - 1  # index among the distinct ids
    zeros = jnp.zeros(grads.shape, jnp.float32)
    sums = add_rows(zeros, group, grads, ascending=True)
    distinct = jax.ops.segment_min(ids, group, len(ids), indices_are_sorted=True)
    groups = jnp.sum(is_new & (places < count))
    return jnp.where(places < groups, distinct, rows + places), sums


def adam_rows(table, square, ids, grad, rates: AdamRates):
    """Take one Adam step on the requested rows. Return (table, mean square of each row).

    To save memory, there is no first moment and only one second moment per row (record 92); two
    moments per element would take 260 GB. `ids` int32 [r] are distinct rows of this shard; ids >=
    len(table) are padding. `grad` [r, d] holds the summed gradients. `square` is already decayed.
    Rows are updated by scatter-add because a v6e's SparseCores cannot assign."""
    _, beta = rates.betas
    increase = (1 - beta) * jnp.mean(jnp.square(grad), axis=1)
    mean_square = square.at[ids].get(mode="clip") + increase
    correction = jnp.sqrt(1 - beta**rates.count)
    lr = rates.lr * correction / (jnp.sqrt(mean_square) + rates.eps)
    old = table.at[ids].get(mode="clip")
    before = old.astype(jnp.float32)
    update = lr[:, None] * grad
    decay = rates.lr * rates.lr * rates.decay
    new = descend(before, update, decay, rates.cautious)
    options = {"mode": "drop", "unique_indices": True}
    change = new.astype(table.dtype) - old
    table = table.at[ids].add(change, **options)
    square = square.at[ids].add(increase, **options)
    return table, square


# ---- Value tables, smear, learned scalars -------------------------------------------------------

# Some layers add a vector looked up by token id to v (record 14: saves 115M tokens;
# without=values), with a gate per head (record 55: saves 9M tokens; without=value_gates). Smear
# adds a fraction of the previous token's embedding (record 34; without=smear). Learned factors
# scale q, k, v, o, the stream and layer outputs (records 47, 48, 73: saves 12M tokens;
# without=lambdas).

GATE_INPUTS = 12  # number of features that smear and value gates read (record 28)


def value_params(cfg: Config) -> dict[str, ParamSpec]:
    """Return the stacked value tables [layers * v, d] and their gate weights. In the MUDD layer,
    mudd_values weights the table instead."""
    layers = cfg.layers_with("values")
    gated = [i for i in layers if not cfg.layers[i].mudd]
    rows = len(layers) * cfg.vocab
    params = {"value_tables": table_param(cfg, rows, normal(0.01), (0.75, 0.95))}
    if cfg.value_gates and gated:
        shape = len(gated), cfg.heads, GATE_INPUTS
        params["value_gate"] = small_param(cfg, shape, 0.0, 1, decay=1)
    return params


def smear_params(cfg: Config) -> dict[str, ParamSpec]:
    """Return the gate's weights [1, features] and maximum."""
    return {
        "smear_gate": small_param(cfg, (1, GATE_INPUTS), 0.0, 0.01),
        "smear_lambda": small_param(cfg, (1,), 0.0, 5),
    }


def lambda_params(cfg: Config) -> dict[str, ParamSpec]:
    """Return the learned factors of each layer."""
    layers = len(cfg.layers)
    return {
        # Scale the stream before attention and before the MLP; initially by 1.1 per layer.
        "resid_lambdas": small_param(cfg, (layers, 2), math.sqrt(1.1), 5, mixes=True),
        # Scale the attention and MLP outputs.
        "post_lambdas": small_param(cfg, (layers, 2), 1.0, 1, mixes=True),
        # Scales q, k and v; QK norm cancels its effect on q and k.
        "qkv_lambda": small_param(cfg, (layers,), 0.5, 5),
        "o_lambda": small_param(cfg, (layers,), 1.0, 5),
    }


def gated_values(model: Model, i: int, x_btd, looked_up: dict) -> tuple:
    """Return layer `i`'s (value vectors [b, t, d], gates [b, t, n]) for HeadInputs.added. Gates are
    computed from the normalized input and the value vector (value residual: Zhou et al. 2024)."""
    number = model.cfg.layers_with("values").index(i)
    values_btd = looked_up["value_tables"][number]
    if not model.cfg.value_gates:
        b, t, _ = x_btd.shape
        return values_btd, jnp.ones((b, t, model.cfg.heads))
    weights = model.params["value_gate"][number]  # the MUDD layer, always last, has no gate
    half = weights.shape[1] // 2
    features = norm(x_btd)[..., :half], values_btd[..., :half]
    return values_btd, 2 * gate(jnp.concatenate(features, axis=-1), weights)


def smear(x_btd, weights, strength):
    """Return embeddings [b, t, d] plus a gated fraction of the previous token's embedding."""
    before_first = [(0, 0), (1, 0), (0, 0)]
    previous_btd = jnp.pad(x_btd[:, :-1], before_first)
    amount = strength * gate(x_btd, weights)
    return mix((1.0, x_btd), (amount, previous_btd))


def gate(x_btd, weights):
    """Compute sigmoid gates [b, t, n] from the first features with `weights` [n, features]."""
    features = x_btd[..., : weights.shape[1]]
    sums = jnp.einsum("bti,ni->btn", features.astype(jnp.float32), weights)
    return jax.nn.sigmoid(sums)


def post_lambdas(model: Model, i: int):
    """Return layer `i`'s factors [2] on the attention and MLP outputs; 1 in the MUDD layer, which
    has per-token weights instead."""
    if model.cfg.layers[i].mudd:
        return jnp.ones(2, jnp.float32)
    return model.params["post_lambdas"][i]


# ---- Gates from small MLPs ----------------------------------------------------------------------

# Small MLPs compute the MUDD weights (next section), as well as per-token gates for heads
# (without=gated), the n-gram vector, the embedding (without=x0) and the skip connection (record 85:
# saves 24M tokens; without=gates makes gates learned constants).

# Initial gate values. xsa and gated have one gate per head; the other kinds have one per layer.
GATES = {"xsa": 0.0, "gated": 0.25, "x0": 0.0, "ngram": 0.05, "skip": 0.5}
# Output scales of the small MLPs. Adam's step size does not depend on them, so a scale of 0.1 makes
# the outputs change a tenth as fast.
GATE_SCALE = 0.1  # initial value; learned, as in upstream
MUDD_SCALE = 0.1
SMALL_MLPS = {  # kind -> parameters
    "gate": ("gate_w1", "gate_w2", "gate_b2"),
    "mudd": ("mudd_w1", "mudd_w2", "mudd_b2"),
}


@functools.cache
def coefficient_starts(cfg: Config, kind: str) -> list[dict]:
    """For each small MLP of a kind, return a dict from output names to initial values. Gates are
    named (kind of gate, layer). Each layer with Layer.new_gates starts a new gate MLP."""
    if kind == "mudd":
        return [mudd_layer_starts(cfg), mudd_mix_starts(cfg)]
    mlp_of_layer = np.cumsum([layer.new_gates for layer in cfg.layers])
    starts = [{} for _ in range(mlp_of_layer[-1] + 1)]
    for gate_kind, start in GATES.items():
        count = cfg.heads if gate_kind in ("xsa", "gated") else 1
        for i in cfg.layers_with(gate_kind):
            starts_of_mlp = starts[mlp_of_layer[i]]
            starts_of_mlp[gate_kind, i] = np.full(count, start)
    return starts


def small_mlp_params(cfg: Config, kind: str, width: int, scale: float, lr: float) -> dict:
    """Return the stacked parameters of all small MLPs of a kind. The biases are the initial outputs
    divided by `scale`. Outputs are padded to match the largest MLP."""
    rows = []
    for starts in coefficient_starts(cfg, kind):
        rows.append(np.hstack([[], *starts.values()]))  # [] for an MLP without outputs
    outputs = max(map(len, rows))
    biases = np.zeros((len(rows), outputs))
    for of_mlp, row in zip(biases, rows, strict=True):
        of_mlp[: len(row)] = row / scale
    mlps = len(rows)
    hidden = hidden_start(cfg)
    w1, w2, b2 = SMALL_MLPS[kind]
    return {
        w1: small_param(cfg, (mlps, width, cfg.width), hidden, lr, decay=1),
        w2: small_param(cfg, (mlps, outputs, width), 0.0, lr, decay=1),
        b2: small_param(cfg, biases.shape, biases, lr),
    }


def hidden_start(cfg: Config) -> Callable:
    """Return an initializer for feature projections [n, h, d]: uniform in +-1 / sqrt(d)."""
    return functools.partial(uniform, 1 / math.sqrt(3 * cfg.width), 1.0)


def gate_params(cfg: Config) -> dict[str, ParamSpec]:
    """Return the gate MLPs (only biases if gate_width=0), the gate scale, and an extra weight per
    skip connection (record 45: saves 5M tokens)."""
    skips = len(cfg.layers_with("skip"))
    return small_mlp_params(cfg, "gate", cfg.gate_width, GATE_SCALE, 0.1) | {
        "gate_scale": small_param(cfg, (1,), GATE_SCALE, 0.1),
        "skip_lambda": small_param(cfg, (skips,), -1.5, 5),
    }


def coefficients(model: Model, kind: str, number: int, x_btd) -> dict:
    """Run small MLP `number` of a kind ("gate" or "mudd"). Return a dict from output names to
    float32 [b, t, count]. Outputs can be negative (records 81, 85). At initialization they are
    constant, because W2 is zero."""
    params = model.params
    starts = coefficient_starts(model.cfg, kind)[number]
    if not starts:
        return {}
    w1, w2, b2 = SMALL_MLPS[kind]
    biases = params[b2][number]
    if w1 in params:
        w1, w2 = params[w1][number], params[w2][number]
        outputs = small_mlp(x_btd, w1, w2, biases)
    else:  # gate_width=0
        outputs = jnp.broadcast_to(biases, (*x_btd.shape[:2], len(biases)))
    outputs *= params["gate_scale"][0] if kind == "gate" else MUDD_SCALE
    values = {}
    first = 0
    for name, start in starts.items():
        stop = first + np.size(start)
        values[name] = outputs[..., first:stop]
        first = stop
    return values


def small_mlp(x_btd, w1, w2, b2):
    """Return W2 gelu(W1 x) + b2, float32 [b, t, outputs], with exact GELU."""
    w1 = w1.astype(x_btd.dtype)
    hidden = jnp.matmul(x_btd, w1.T, preferred_element_type=jnp.float32)
    # Matches PyTorch; jax.nn.gelu(hidden, approximate=False) differs in the last bits.
    erf = lax.erf(hidden * math.sqrt(0.5))
    hidden = hidden * (0.5 + 0.5 * erf)
    return hidden @ w2.T + b2[None, None]


# ---- MUDD: per-token weights of connections -----------------------------------------------------

# In the last layer, each term added to v or the stream has a per-token weight (mudd_layer).
# mudd_mix then adds earlier arrays with per-token weights. Two small MLPs compute the weights
# (MUltiway Dynamic Dense connections, Xiao et al. 2025; records 81, 92: saves 21M tokens;
# without=mudd).

MUDD_LAYER, MUDD_MIX = 0, 1  # indices of the two MLPs


def mudd_params(cfg: Config) -> dict[str, ParamSpec]:
    """Return the two small MLPs, plus extra MUDD_MIX outputs for feature groups."""
    params = small_mlp_params(cfg, "mudd", cfg.mudd_width, MUDD_SCALE, 0.25)
    _, outputs, _ = params["mudd_w2"].shape
    groups = 2 * cfg.heads  # each half a head wide
    shape = outputs, groups, cfg.mudd_width
    return params | {"mudd_w2g": small_param(cfg, shape, 0.0, 0.25, decay=1)}


def mudd_layer_starts(cfg: Config) -> dict[str, float]:
    """Return the initial value of each mudd_layer weight. `first` is the stream before the first
    layer, `source` is the attention input, and `x` is the stream."""
    last = cfg.layers[-1]
    arrays = ["first", "source", "x"] if last.reads_back else ["first", "x"]
    starts = {f"{name}_to_v": 0.0 for name in arrays}
    starts |= {f"{name}_to_x": 0.0 for name in arrays}  # before attention
    if last.values:  # one weight per half of the heads
        starts |= {"values_left": 2.0, "values_right": 2.0}
    # These replace resid_lambdas, post_lambdas and gates.
    starts |= {"keep_attention": math.sqrt(1.1), "attention": 1.0, "first": 0.0}
    if cfg.ngram_rows:
        starts["ngram"] = GATES["ngram"]
    return starts | {"keep_mlp": math.sqrt(1.1), "mlp": 1.0}


def mudd_end(model: Model, x, outputs: list, inputs: Inputs, gates: dict):
    """Apply the last layer and mudd_mix to the residual stream `x` [b, t, d]."""

    def layer(x):
        return mudd_layer(model, x, outputs, inputs, gates)

    if model.cfg.recompute:
        layer = jax.checkpoint(layer)
    before_last = x
    x, mlp_input = layer(x)
    arrays = {"x": before_last, "mlp_input": mlp_input}
    return mudd_mix(model, x, mudd_sources(model.cfg, inputs, outputs, arrays))


def mudd_layer(model: Model, x, outputs: list, inputs: Inputs, gates: dict) -> tuple:
    """Apply the last layer to the stream `x` [b, t, d], with per-token weights `mu` that a small
    MLP computes from `x` (record 81). Return (stream, normalized MLP input)."""
    i = len(model.cfg.layers) - 1
    layer = model.cfg.layers[i]
    mu = coefficients(model, "mudd", MUDD_LAYER, x)
    arrays = {"first": inputs.stream0}
    if layer.reads_back:
        arrays["source"] = outputs[i - layer.reads_back]
    arrays["x"] = x
    source = arrays.get("source", x)
    added = mudd_values(model, mu, arrays, inputs.looked_up)
    # The new x is keep * (x + weighted arrays) + weighted first, attention and n-gram terms.
    # Weights of the same array are combined.
    keep = mu["keep_attention"]
    terms = [
        (keep * (1 + mu["x_to_x"]), x),
        (keep * mu["first_to_x"] + mu["first"], inputs.stream0),
    ]
    if layer.reads_back:
        terms.append((keep * mu["source_to_x"], source))
    attended = attention(model, i, source, added, gates)
    terms.append((mu["attention"], attended))
    if inputs.ngram is not None:
        terms.append((mu["ngram"], inputs.ngram))
    x = mix(*terms)
    mlp_output = mlp(model, i, x)
    after_mlp = mix((mu["keep_mlp"], x), (mu["mlp"], mlp_output))
    return after_mlp, norm(x)


def mudd_values(model: Model, mu: dict, arrays: dict, looked_up: dict) -> tuple:
    """Return the term added to v (HeadInputs.added): a weighted sum of `arrays` and the value
    vectors, if any. Value vectors have one weight per half of the heads."""
    sources = [*arrays.values()]
    weights = [mu[f"{name}_to_v"] for name in arrays]
    halves = [weights]
    if model.cfg.layers[-1].values:
        sources.append(looked_up["value_tables"][-1])
        halves = [[*weights, mu["values_left"]], [*weights, mu["values_right"]]]
    halves = [jnp.concatenate(half, axis=-1) for half in halves]  # [b, t, sources]
    weights = jnp.stack(halves, axis=-1)
    added_btd = model.kernels.blend(None, weights, tuple(sources))
    b, t, _ = added_btd.shape
    return added_btd, jnp.ones((b, t, model.cfg.heads))


def mudd_mix_starts(cfg: Config) -> dict[str, float]:
    """Return the initial weight of each mudd_mix source, in order. Half of `source` (the last
    attention input) is subtracted initially (records 40, 77)."""
    reads = cfg.layers[-1].reads_back
    names = ["first", "source", "x"] if reads else ["first", "x"]
    names += [f"skip{i}" for i in cfg.layers_with("skip")]
    names += [f"values{i}" for i in cfg.layers_with("values")]
    names += ["mlp_input", "normed_source"] if reads else ["mlp_input"]
    return {name: -0.5 if name == "source" else 0.0 for name in names}


def mudd_sources(cfg: Config, inputs: Inputs, outputs: list, arrays: dict) -> tuple:
    """Return the arrays that mudd_mix adds, in order. `arrays` has `x` and `mlp_input`."""
    last = len(cfg.layers) - 1
    sources = {"first": inputs.stream0, **arrays}
    if cfg.layers[last].reads_back:
        source = outputs[last - cfg.layers[last].reads_back]
        sources |= {"source": source, "normed_source": norm(source)}
    for i in cfg.layers_with("skip"):
        sources[f"skip{i}"] = outputs[i - cfg.layers[i].skip]
    values = inputs.looked_up.get("value_tables", ())
    for i, value in zip(cfg.layers_with("values"), values, strict=True):
        sources[f"values{i}"] = value
    return tuple(sources[name] for name in mudd_mix_starts(cfg))


def mudd_mix(model: Model, x_btd, sources: tuple):
    """Return the stream plus earlier arrays: x + sum_k (mu_k + delta_kg) source_k. For each token,
    one small MLP computes mu_k per source and delta_kg per source and feature group."""
    params = model.params
    k = len(sources)
    w1 = params["mudd_w1"][MUDD_MIX]
    w2 = params["mudd_w2"][MUDD_MIX]
    b2 = params["mudd_b2"][MUDD_MIX]
    w2g = params["mudd_w2g"][:k]
    groups = w2g.shape[1]
    w2g = w2g.reshape(k * groups, -1)
    w2_all = jnp.concatenate([w2[:k], w2g])
    b2_all = jnp.pad(b2[:k], (0, k * groups))  # deltas have no biases
    weights = small_mlp(x_btd, w1, w2_all, b2_all)
    mu = weights[..., :k, None]
    b, t, _ = x_btd.shape
    delta = weights[..., k:].reshape(b, t, k, groups)
    return model.kernels.blend(x_btd, MUDD_SCALE * (mu + delta), sources)


def blend(x_btd, weights, sources):
    """Return `x_btd` (if not None) plus the sum of `sources` [b, t, d], weighted by `weights` [b,
    t, sources, groups]. Each group of consecutive features has its own weight."""
    groups = weights.shape[-1]
    size = sources[0].shape[-1] // groups  # features per group
    terms = []
    if x_btd is not None:
        terms = [(1.0, x_btd)]
    for k, source_btd in enumerate(sources):
        weights_btd = jnp.repeat(weights[:, :, k], size, axis=-1)
        terms.append((weights_btd, source_btd))
    return mix(*terms)


# ---- Heads: key offset, pairs, XSA --------------------------------------------------------------

# In long layers, half of each key comes from the previous token (record 49: saves 13M tokens;
# without=key_offset). Pairs of heads attend as one (record 58: saves 17M tokens; without=paired).
# XSA removes the token's own value from head outputs (records 82, 86: saves 8M tokens;
# without=xsa).


def key_offset(k_btnh):
    """Return keys with the non-rotating dimensions taken from the previous token. One layer can
    then find an earlier occurrence of a token and read the token after it (induction), which
    otherwise takes two layers. The first token of a row keeps its own key. Document boundaries are
    ignored."""

    def of_token_before(x):
        first = x[:, :1]
        return jnp.concatenate([first, x[:, :-1]], axis=1)

    # rope pairs dimensions (i, i + h/2) and rotates only the first h/4 pairs.
    rotated, fixed, rotated_too, fixed_too = jnp.split(k_btnh, 4, axis=-1)
    parts = rotated, of_token_before(fixed), rotated_too, of_token_before(fixed_too)
    return jnp.concatenate(parts, axis=-1)


def pair_heads(x_btnh):
    """Reshape [b, t, n, h] to [b, 2t, n/2, h], so that pairs of heads attend as one. Each head also
    sees its partner's keys, and windows reach half as far. The first half of the heads goes to
    positions 2t, the second half to 2t + 1."""
    b, t, n, h = x_btnh.shape
    return x_btnh.reshape(b, 2 * t, n // 2, h)


def exclude_self(y_btnh, v_btnh, gates_btn):
    """Return y - tanh(gate) (y.v / v.v) v (XSA). This removes the component of a head's output
    along the token's own v, which is available without attention."""
    y = y_btnh.astype(jnp.float32)
    v = v_btnh.astype(jnp.float32)
    yv = jnp.sum(y * v, axis=-1)
    vv = jnp.sum(v * v, axis=-1)
    along = yv / jnp.maximum(vv, 1e-8)
    amount = jnp.tanh(gates_btn) * along
    return mix((1.0, y_btnh), (-amount[..., None], v_btnh))


# ---- ANVIL: changes to Muon ---------------------------------------------------------------------

# Momentum combines a fast and a slow average (record 92: saves 0.3 s; without=rails). Updates are
# rescaled so that all neurons have similar norms (record 41: saves 4M tokens; without=equalize). q
# and k are orthogonalized two heads at a time, because heads look for different things (record 80;
# without=qk_heads). as_large replaces orthogonalize to measure the benefit of Muon (without=muon).


def fast_rail(cfg: Config, momentum) -> tuple[np.ndarray, np.ndarray]:
    """Return (beta, weight) of the fast average at each step. Before rails_step, only the fast
    average is used, with the momentum as beta."""
    beta, weight = cfg.rail_fast
    has_two = np.arange(cfg.steps) >= cfg.rails_step
    return np.where(has_two, beta, momentum), np.where(has_two, weight, 1.0)


def two_rails(grad, fast, slow, hyper: Hyper, slow_rate: float):
    """Return (update, new fast average, new slow average) of the gradient. The update combines both
    averages and the gradient (Nesterov). Before rails_step, only the fast average is used, as in
    Muon. Averages need no bias correction, because orthogonalize ignores the norm of its input."""
    fast = fast + (1 - hyper.fast_beta) * (grad - fast)
    slow = slow + slow_rate * (grad - slow)
    average = hyper.fast_weight * fast + (1 - hyper.fast_weight) * slow
    update = grad + hyper.momentum * (average - grad)
    return update, fast, slow


def equalize(update, square, rate):
    """Scale neurons of an orthogonalized update [matrices, rows, cols] to similar norms, while
    keeping the norm of each matrix (after NorMuon, Li et al. 2025). Neurons are rows of tall or
    square matrices, and columns of wide ones. `square` [matrices, neurons] is their running mean
    square. Return (update, square)."""
    along = 2 if update.shape[1] >= update.shape[2] else 1
    power = jnp.mean(jnp.square(update), axis=along)
    square = square + rate * (power - square)
    gain = lax.rsqrt(jnp.maximum(square, 1e-10))
    new_power = power * gain**2
    before = jnp.sqrt(jnp.sum(power, axis=1, keepdims=True))
    after = jnp.sqrt(jnp.sum(new_power, axis=1, keepdims=True))
    gain = gain * before / jnp.maximum(after, 1e-10)
    return update * jnp.expand_dims(gain, along), square


def as_large(x):
    """Scale matrices [matrices, rows, cols] to the norm of orthogonal matrices."""
    size = jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    orthogonal_size = math.sqrt(min(x.shape[1:]))
    return x * (orthogonal_size / (size + 1e-12))


# ---- Parameters of the ideas --------------------------------------------------------------------


def with_ideas(cfg: Config, table: dict[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return the parameter table with the parameters and averages of enabled ideas."""
    parts = [
        (cfg.layers_with("values"), value_params),
        (cfg.ngram_rows, ngram_params),
        (cfg.smear, smear_params),
        (cfg.lambdas, lambda_params),
        (cfg.has_gates, gate_params),
        (cfg.layers[-1].mudd, mudd_params),
        (cfg.pointer_width, pointer_params),
    ]
    for is_on, params in parts:
        if is_on:
            table = table | params(cfg)
    if cfg.tail or cfg.tail_average:
        table = with_averages(cfg, table)
    return table


def small_param(cfg: Config, shape, start, lr: float, decay: float = 0.0, mixes=False) -> ParamSpec:
    """Return the ParamSpec of a small parameter, replicated on all devices and trained by Adam.
    `lr` and `decay` multiply lr_adam and decay_adam. Weights that mix arrays have their own betas
    (record 52: saves 9M tokens; without=scalar_betas)."""
    of_mixing, of_gates = cfg.scalar_betas
    betas = of_mixing if mixes else of_gates
    return by_adam(cfg, shape, start, (lr, decay), betas, sharded=False)


def table_param(cfg: Config, rows: int, start, betas: tuple, **fields) -> ParamSpec:
    """Return the ParamSpec of a table [rows, width] indexed by token. Rows keep their initial value
    until their first gradient, because cautious weight decay skips them."""
    rates = (70, 5)  # from the record; large because most rows get few gradients
    return by_adam(cfg, (rows, cfg.width), start, rates, betas, updated_by="tables", **fields)


def hyper_of_ideas(cfg: Config, hyper: Hyper) -> Hyper:
    """Return `hyper` (arrays [steps, ...]) with the fields of enabled ideas filled in."""
    adam_due, tables = updates_due(cfg)
    fields = {}
    if len(cfg.stages) > 1:
        freqs, scales = zip(*yarn(cfg), strict=True)
        stage, _, _ = steps_in_stages(cfg)
        fields["freqs"] = np.stack(freqs)[stage]
        fields["scales"] = np.stack(scales)[stage]
    all_weights = {stage.loss_weights + stage.loss_weights_end for stage in cfg.stages}
    if all_weights != {(1.0, 1.0)}:
        fields["loss_weights"] = loss_weights(cfg)
    if cfg.slow_rate:
        fields["fast_beta"], fields["fast_weight"] = fast_rail(cfg, hyper.momentum)
    if np.any(tables):
        is_update = tables > 0
        updates_before = np.cumsum(is_update) - is_update
        fields["table_count"] = updates_before + 1
    if cfg.ngram_drop:
        rng = np.random.default_rng(cfg.seed)
        fields["drop_seed"] = rng.integers(2**24, size=cfg.steps)  # exact in float32
    if any(any(stage.prefix_weights) for stage in cfg.stages):
        fields["prefix_weight"] = in_parts(cfg, "prefix_weights")
    if cfg.tail or cfg.tail_average:
        fields["average_rates"] = average_rates(cfg, adam_due, tables)
    return hyper._replace(**fields)


# ================================================================================================
# PART III: THE DATA
# ================================================================================================

# ---- Loader: prefetched batches -----------------------------------------------------------------


def loader_state(cfg: Config, mesh: Mesh, cursor: int = 0, offsets=()) -> LoaderState:
    """Return the LoaderState of a new run, or of a checkpoint with this `cursor` and `offsets`. By
    default, candidate offsets are evenly spaced across rows."""
    rows = cfg.stages[0].rows  # equal in all stages (see validate)
    if len(offsets) != rows:
        first = offsets[0] if offsets else 0
        offsets = [(first + cfg.vocab * row // rows) % cfg.vocab for row in range(rows)]
    return LoaderState(cursor, tuple(offsets[row] for row in own_rows(mesh, rows)))


def own_rows(mesh: Mesh, count: int) -> range:
    """Return the range of rows (out of `count`) that this process owns. Its devices are adjacent in
    the mesh."""
    is_own = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    first = is_own.index(True)
    end = first + sum(is_own)
    of_device = count // mesh.size
    return range(first * of_device, end * of_device)


STALL_SECONDS = 10  # longer waits for a batch are reported


def prefetch(items, depth: int, running: threading.Event, late: Callable = print) -> Iterator:
    """Yield `items`, prefetching up to `depth` of them in a thread. The thread starts an item only
    while the clock is `running`, so that its time counts. `late` is called with a message if an
    item takes too long. Closing the generator stops the thread."""
    ready = queue.Queue(depth)
    closed = threading.Event()

    def make():
        try:
            supply = iter(items)
            while not closed.is_set():
                if running.wait(0.1):
                    ready.put(next(supply))
        except BaseException as error:  # including StopIteration; the main thread handles it
            ready.put(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = ready.get(timeout=STALL_SECONDS)
            except queue.Empty:
                late("waiting for the loader: is the disk with the data slow?")
                continue
            if isinstance(item, StopIteration):
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        while not ready.empty():  # unblocks the thread if the queue is full
            ready.get()
        thread.join(STALL_SECONDS)  # Python aborts if it exits during a copy to a device


# ---- Token stream: shards -> one stream of tokens -> rows ---------------------------------------

# Shards use llm.c's format: a header of 256 int32 (magic number, version, number of tokens, zeros),
# then uint16 tokens.
SHARD_NAME = re.compile(r"([^.].*)_(train|val)_\d+\.bin")  # data set, split; skips hidden files
SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_BYTES = 1024


class Documents(NamedTuple):
    """A shard's documents in reading order, as positions in the shard. For example, documents with
    5, 2 and 3 tokens, read in the order third, first, second, have starts 7, 0, 5; stops 10, 5, 7;
    and places 0, 3, 8."""

    places: np.ndarray  # start of each document in the reordered shard
    starts: np.ndarray  # first token of each document
    stops: np.ndarray  # end of each document (exclusive)


class TokenStream:
    """The tokens of one split: its shards, sorted by name and repeated `epochs` times.

    A cursor is a position in this stream. Later epochs shuffle each shard's documents (or rows if
    doc_cap is 0). The order depends only on `seed`, the shard and the row length, so a cursor is
    enough to resume."""

    def __init__(self, folder: Path, split: str, bos: int, epochs: int = 1, seed: int = 0):
        names = {path: SHARD_NAME.fullmatch(path.name) for path in folder.glob("*.bin")}
        self.paths = sorted(path for path, name in names.items() if name and name[2] == split)
        require(self.paths, f"no {split} shards (*_{split}_*.bin) in {folder}: pass another --data")
        self.bos = bos
        self.shards = [open_shard(path) for path in self.paths] * epochs
        self.ends = np.cumsum([len(shard) for shard in self.shards])
        self.seed = seed
        # Cache the results for two shards.
        self.documents = functools.lru_cache(2)(self.find_documents)
        self.rows = functools.lru_cache(2)(self.draw_rows)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def pass_at(self, cursor: int) -> int:
        """Return the epoch of the token before `cursor`, counted from 1."""
        return -(-cursor // int(self.ends[len(self.paths) - 1]))

    def find_documents(self, number: int) -> Documents:
        """Return the Documents of shard `number`."""
        tokens = self.shards[number]
        starts = np.flatnonzero(tokens == self.bos)
        stops = np.append(starts, len(tokens))[1:]
        if number < len(self.paths):
            return Documents(starts, starts, stops)
        order = np.random.default_rng([self.seed, number]).permutation(len(starts))
        lengths = (stops - starts)[order]
        places = np.cumsum(lengths) - lengths + starts[:1]
        return Documents(places, starts[order], stops[order])

    def draw_rows(self, number: int, t: int) -> np.ndarray:
        """Return the start positions of t-token rows in shard `number`, shuffled so that batches
        mix documents."""
        random = np.random.default_rng([self.seed, number])
        first = int(random.integers(t))
        count = max(len(self.shards[number]) - 1 - first, 0) // t  # - 1 for the last target
        return first + t * random.permutation(count)

    def row_at(self, cursor: int, t: int) -> int:
        """Return the stream position at which the t-token row for `cursor` starts."""
        number, base = self.shard_at(cursor)
        if number < len(self.paths):
            return cursor
        starts = self.rows(number, t)
        row = (cursor - base) // t
        if row >= len(starts):  # the shard's last tokens, too few for a row
            return cursor
        return base + int(starts[row])

    def shard_at(self, cursor: int) -> tuple[int, int]:
        """Return (number, start) of the shard that contains position `cursor` of the stream."""
        number = int(np.searchsorted(self.ends, cursor, side="right"))
        if number == len(self.shards):
            end = f"the tokens in {self.paths[0].parent} end at {len(self):,}"
            raise UserError(f"{end}: download more shards or use fewer steps")
        return number, int(self.ends[number]) - len(self.shards[number])

    def read(self, cursor: int, count: int) -> np.ndarray:
        """Return `count` uint16 tokens starting at `cursor`, possibly from several shards."""
        parts = [np.empty(0, np.uint16)]  # for count=0
        while count:
            number, start = self.shard_at(cursor)
            part = self.shards[number][cursor - start :][:count]
            parts.append(part)
            cursor += len(part)
            count -= len(part)
        return np.concatenate(parts)


def open_shard(path) -> np.memmap:
    """Return the tokens of a shard as a uint16 memory map. Raise UserError if it is incomplete."""
    try:
        header = np.fromfile(path, dtype="<i4", count=3).tolist()
        tokens = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)
        if not len(tokens) or header != [SHARD_MAGIC, SHARD_VERSION, len(tokens)]:
            raise ValueError(f"{len(tokens)} tokens follow a header {header}")
    except (OSError, ValueError) as error:
        fix = "delete it, then download or tokenize it again"
        raise UserError(f"{path} is not a complete token shard ({error}): {fix}") from None
    return tokens


def plan_rows(stream: TokenStream, cursor: int, stage: Stage):
    """Return ([(row, start, stop)], next cursor): the pieces of the stream that form a batch.
    Without doc_cap, rows ignore document boundaries. In the first epoch, rows are consecutive, and
    a row's last target is the next row's first input."""
    if stage.doc_cap:
        return plan_packed(stream, cursor, stage)
    t = stage.row_tokens
    starts = [stream.row_at(cursor + row * t, t) for row in range(stage.rows)]
    pieces = [(row, start, start + t + 1) for row, start in enumerate(starts)]
    return pieces, cursor + stage.rows * t


def plan_packed(stream: TokenStream, cursor: int, stage: Stage):
    """Plan a batch like plan_rows, but fill rows only with beginnings of documents. Beginnings need
    little context, and attention never needs tokens from another row (records 26, 29: saves 18M
    tokens; without=packing).

    A piece starts at a document's BOS. It ends with the document, after doc_cap tokens, or when the
    row is full. The rest of the document is skipped. Rows of t+1 tokens are filled in order, to
    match upstream's batches. If a shard has too few documents left, the whole batch is taken from
    the next shard."""
    while True:
        number, base = stream.shard_at(cursor)
        documents = stream.documents(number)
        first = int(np.searchsorted(documents.places, cursor - base))
        pieces = []
        row = 0
        room = stage.row_tokens + 1
        for i in range(first, len(documents.places)):
            # Convert values one by one: whole lists (150,000 documents) took 20 to 30 ms per batch.
            start = int(documents.starts[i])
            stop = min(int(documents.stops[i]), start + stage.doc_cap, start + room)
            pieces.append((row, base + start, base + stop))
            room -= stop - start
            if room == 0:
                row += 1
                if row == stage.rows:
                    return pieces, base + int(documents.places[i]) + stop - start
                room = stage.row_tokens + 1
        cursor = int(stream.ends[number])


def read_rows(stream: TokenStream, pieces, here: list[int] | range) -> np.ndarray:
    """Return the planned rows in `here`, uint16 [rows, t + 1]."""
    parts = {row: [] for row in here}
    for row, start, stop in pieces:
        if row in parts:
            parts[row].append(stream.read(start, stop - start))
    return np.stack([np.concatenate(parts[row]) for row in here])


def read_batch(stream: TokenStream, mesh: Mesh, cursor: int, stage: Stage):
    """Return (this process's rows of a global batch, uint16 [b, t + 1]; next cursor). Every process
    plans the full batch but reads only its own rows."""
    pieces, next_cursor = plan_rows(stream, cursor, stage)
    return read_rows(stream, pieces, own_rows(mesh, stage.rows)), next_cursor


def read_validation(cfg: Config, mesh: Mesh, stream: TokenStream) -> Iterator:
    """For each batch, yield (this process's rows, uint16 [b, t + 1]; mask of rows to count, bool
    [b, 1]). Only the last batch is padded."""
    rows = cfg.val_tokens // cfg.val_row
    of_batch = cfg.val_batch // cfg.val_row
    t = cfg.val_row
    pieces = [(row, row * t, (row + 1) * t + 1) for row in range(rows)]
    for path in stream.paths:
        open_shard(path)  # check again: a truncated file would read as zeros
    for first in range(0, rows, of_batch):
        numbers = [first + row for row in own_rows(mesh, of_batch)]
        tokens = read_rows(stream, pieces, np.minimum(numbers, rows - 1).tolist())
        yield tokens, np.array(numbers)[:, None] < rows


# ================================================================================================
# PART IV: AROUND A RUN
# ================================================================================================

# ---- Set-up: everything before the clock starts -------------------------------------------------


class Prepared(NamedTuple):
    """Everything `train` needs when the clock starts."""

    cfg: Config  # adapted to the mesh's devices
    mesh: Mesh
    log: RunLog
    compiled: dict  # program key -> executable
    state: dict  # training state
    copies: dict
    batches: Iterator  # yields (Batch, LoaderState after the batch)
    loader: LoaderState  # state before the first batch
    stream: TokenStream  # training tokens
    validation: tuple[TokenStream, Vocabulary | None]
    handlers: dict  # original signal handlers
    stop_signal: Callable  # see ask_to_stop
    kernels: Kernels
    words: list[bytes]  # see token_bytes


def prepare(cfg: Config, out: Path, command: str, saved: Saved | None, say: Callable) -> Prepared:
    """Check devices and data, open the log, compile and warm up all programs, and create or load
    the training state. The loader waits for the clock to start."""
    recipe = cfg
    cfg, mesh = make_mesh(recipe)
    check_memory(cfg, mesh)
    cfg = with_whole_loss(cfg, mesh, memory_limit(mesh))
    if saved:
        check_sizes(cfg, saved)
    data = open_data(cfg, say)
    kernels, reason = choose_kernels(cfg, mesh.devices.flat[0])
    kernels, left_out = check_kernels(cfg, mesh, kernels, say)
    choices = {"kernels": reason + left_out} | sizes_chosen(recipe, cfg, mesh, kernels)
    facts = run_facts(recipe, mesh, command, choices) | {"data": data.shards}
    log = open_log(recipe, facts, out, saved, say)
    compiled, seconds = compile_all(cfg, mesh, kernels, say)
    from_processes(0)  # barrier: some processes take longer to compile
    if not jax.config.jax_debug_nans:  # a warm-up on zeros computes NaNs
        warm_up(cfg, mesh, kernels, compiled)

    seed = np.uint32(cfg.seed)
    if saved:
        state = load_state(mesh, saved)
    else:
        state = start_state(cfg, mesh)(seed)
    if cfg.start and not saved:
        say(f"starting with the parameters of {cfg.start}")
        del state["params"]  # make room for the loaded parameters
        other_run = find_checkpoint(Path(cfg.start), say)
        state |= load_state(mesh, other_run, ("params",))
    copies = start_copies(cfg, mesh)(state["params"], seed)
    jax.block_until_ready(copies)

    done = saved.step if saved else 0
    loader = loader_state(cfg, mesh, *saved.loader) if saved else loader_state(cfg, mesh)
    made = train_batches(cfg, mesh, data.train, data.words, done, loader)
    batches = prefetch(made, cfg.prefetch, log.clock.running, say)
    by_id = vocabulary(cfg, data.words) if cfg.ngram_rows else None
    if saved:  # nothing can fail from here on, so it is safe to change the run's files
        log.begin(saved)
    log.write_facts(compile_seconds=seconds)
    if all(name.startswith("fineweb_") for name in data.shards):
        line = f"FineWeb shards: {provenance(data.folder, data.shards)}"
        log.write("log.txt", line)
        say(line)
    if cfg.encoding == "bpe":  # so that sample.py needs only the run directory
        log.write(MERGES, (data.folder / MERGES).read_text())
    return Prepared(
        cfg=cfg,
        mesh=mesh,
        log=log,
        compiled=compiled,
        state=state,
        copies=copies,
        batches=batches,
        loader=loader,
        stream=data.train,
        validation=(data.val, by_id),
        handlers=signal_handlers(),
        stop_signal=ask_to_stop(say),
        kernels=kernels,
        words=data.words,
    )


# ---- Data checks: all tokens of the run are present and valid -----------------------------------

# JSON files next to the shards:
MERGES = "merges.json"  # bytes of merged tokens in hex (encoding=bpe); also in run directories
HASHES = "hashes.json"  # SHA-256 of each FineWeb shard (data/cached_fineweb10B.py)


class Data(NamedTuple):
    """A run's data, after all checks."""

    folder: Path
    train: TokenStream
    val: TokenStream
    words: list[bytes]  # bytes of each token id (token_bytes)
    shards: dict[str, dict]  # size and hash of each shard (check_tokens)


def open_data(cfg: Config, say: Callable) -> Data:
    """Open and check the run's data. Raise UserError if anything is missing or wrong."""
    folder = data_folder(cfg, say)
    stream = TokenStream(folder, "train", cfg.bos, cfg.epochs, cfg.seed)
    val_stream = TokenStream(folder, "val", cfg.bos)
    shards = check_tokens(cfg, stream, val_stream)
    return Data(folder, stream, val_stream, token_bytes(cfg, folder), shards)


def check_tokens(cfg: Config, stream: TokenStream, val_stream: TokenStream) -> dict[str, dict]:
    """Return the size and hash of every shard the run will read.

    Raise UserError if there are too few tokens, or if they come from another tokenizer."""
    for split in (stream, val_stream):
        if not np.any(split.shards[0] == cfg.bos):
            raise wrong_tokens(cfg, split.paths[0], f"no document begins with bos={cfg.bos}")
    if len(val_stream) <= cfg.val_tokens:
        found = f"{val_stream.paths[0].parent} holds {len(val_stream):,} validation tokens"
        raise UserError(f"{found}, but {cfg.val_tokens + 1:,} are needed: lower --set val_tokens=")
    end = cursor_after(cfg, stream, cfg.steps)
    return shards_until(cfg, stream, end) | shards_until(cfg, val_stream, cfg.val_tokens)


def wrong_tokens(cfg: Config, path: Path, problem: str) -> UserError:
    """Return the error for a shard that does not match cfg.encoding."""
    fix = "set encoding (ids for your own tokenizer), vocab, real_tokens and bos, or tokenize again"
    return UserError(f"{path}: {problem}, so its encoding is not {cfg.encoding}: {fix}")


def cursor_after(cfg: Config, stream: TokenStream, steps: int) -> int:
    """Return the cursor after `steps` steps. Raise UserError if there are too few tokens."""
    cursor = 0
    for step in range(steps):
        stage = cfg.stages[schedule(cfg).stage[step]]
        try:
            _, cursor = plan_rows(stream, cursor, stage)
            if not stage.doc_cap:
                stream.shard_at(cursor)  # check that the last target exists
        except UserError:
            found = f"{stream.paths[0].parent}: {len(stream):,} training tokens"
            fix = f"get more text or shards, lower --set steps=, or raise epochs={cfg.epochs}"
            raise UserError(
                f"{found} are enough for only {step} of {cfg.steps} steps: {fix}"
            ) from None
    # The clock must include all data loading, so clear the caches filled here.
    stream.documents.cache_clear()
    stream.rows.cache_clear()
    return cursor


def shards_until(cfg: Config, stream: TokenStream, end: int) -> dict[str, dict]:
    """Return the size and hash of each shard up to the cursor `end`, by file name.

    Raise UserError if a token id is outside the vocabulary."""
    last, _ = stream.shard_at(min(end, len(stream) - 1))
    facts = {}
    for path, tokens in zip(stream.paths, stream.shards[: last + 1], strict=False):
        largest = tokens.max()
        if largest >= cfg.real_tokens:
            raise wrong_tokens(cfg, path, f"token id {largest} >= {cfg.real_tokens}")
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        facts[path.name] = {"bytes": path.stat().st_size, "sha256": sha256}
    return facts


def provenance(folder: Path, shards: dict[str, dict]) -> str:
    """Return "verified" if all `shards` (see check_tokens) match their published hashes, otherwise
    "unverified"."""
    try:
        published = json.loads((folder / HASHES).read_text())["sha256"]
        same = [published[name] == facts["sha256"] for name, facts in shards.items()]
    except (OSError, ValueError, LookupError, TypeError):  # the file is missing or damaged
        return "unverified"
    return "verified" if all(same) else "unverified"


def token_bytes(cfg: Config, folder: Path) -> list[bytes]:
    """Return the bytes of every token id below BOS, or an empty list for encoding=ids.

    Raise UserError if the bytes cannot be loaded, or if the merges in `folder` are invalid."""
    words = [bytes([i]) for i in range(256)]
    fix = f"make the data in {folder} again, or set encoding=ids if its tokens have no bytes"
    try:
        if cfg.encoding == "ids":
            words = []
        elif cfg.encoding == "gpt2":
            fix = "pip install -r requirements.txt, and connect to the network once"
            import tiktoken  # downloads its vocabulary on first use

            gpt2 = tiktoken.get_encoding("gpt2")
            words = [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)]
        elif cfg.encoding == "bpe":
            merges = json.loads((folder / MERGES).read_text())
            words += [bytes.fromhex(merged) for merged in merges]
            if b"" in words or len({*words}) < len(words) or len(words) < cfg.bos:
                raise ValueError(f"{MERGES} does not belong to these shards")
    except Exception as error:  # from tiktoken, the network or a damaged file
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"no bytes for {cfg.encoding} tokens ({first_line}): {fix}") from None
    return words[: cfg.bos]


# ---- Devices: the devices of a run, and the rows of its batches ---------------------------------

BLOCK = 256  # tokens per block of a kernel


def for_devices(cfg: Config, devices: int) -> Config:
    """Adapt a config to the largest device count up to `devices` that divides the rows evenly.

    If there are fewer rows than devices, or if rows exceed micro_tokens, split them into shorter
    rows of equal length, in whole BLOCKs."""
    rows = cfg.stages[0].rows

    def one_row_each(stage: Stage, count: int) -> bool:
        t, rest = divmod(stage.batch_tokens, count)
        in_blocks = t > 0 and t % min(t, BLOCK) == 0
        return rest == 0 and in_blocks and t >= len(stage.loss_weights)

    def fits(count: int) -> bool:
        if count <= rows:
            return rows % count == 0
        return all(one_row_each(stage, count) for stage in cfg.stages)

    used = next(count for count in range(devices, 0, -1) if fits(count))
    stages = cfg.stages
    largest = max(stage.batch_tokens for stage in stages)
    least = max(used, rows)
    counts = range(least, largest // BLOCK + 1, least)
    shorter = (n for n in counts if n * cfg.micro_tokens >= largest and fits(n))
    count = next(shorter, least)
    if count > rows:
        lengths = [stage.batch_tokens // count for stage in stages]
        pairs = zip(stages, lengths, strict=True)
        stages = tuple(dataclasses.replace(stage, row_tokens=t) for stage, t in pairs)
    val_rows = cfg.val_batch // cfg.val_row
    val_batch = -(-val_rows // used) * used * cfg.val_row
    return dataclasses.replace(cfg, devices=used, stages=stages, val_batch=val_batch)


def cpu_cores() -> int:
    """Return the number of cores available to this process (CPU affinity and cgroup quotas)."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # missing on some systems
        count = len(os.sched_getaffinity(0))
    for quota in cgroup_values("cpu.max"):  # "CPU_TIME PERIOD"
        used, period = quota.split()
        if used != "max":
            count = min(count, max(1, int(used) // int(period)))
    return count


def machine_bytes() -> int:
    """Return the memory available to this process in bytes (limited by RAM and cgroups)."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limits += [int(limit) for limit in cgroup_values("memory.max") if limit != "max"]
    return min(limits)


def cgroup_values(name: str, root: Path = Path("/sys/fs/cgroup")) -> list[str]:
    """Read the file `name` from this process's cgroup (version 2) and its parents."""
    values = []
    with contextlib.suppress(OSError, StopIteration):  # not Linux, or cgroup version 1
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line for line in lines if line.startswith("0::"))
        folder = root / own.removeprefix("0::").strip("/")
        for place in (folder, *folder.parents):
            if root in (place, *place.parents) and (place / name).exists():
                values.append((place / name).read_text().strip())
    return values


def all_devices() -> list:
    """Return the devices of all processes. Raise UserError if JAX cannot start its backend.

    On CPUs, each core (up to eight) becomes a device, because most operations are too small to use
    all cores at once."""
    if jax.config.jax_num_cpu_devices < 0 and not jax.distributed.is_initialized():
        count = min(cpu_cores(), 8)
        with contextlib.suppress(RuntimeError):  # JAX has already started (notebooks)
            jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices()
    except Exception as error:  # plugins raise all kinds of exceptions
        named = os.environ.get("JAX_PLATFORMS", "")
        fix = "see JAX_PLATFORMS and drivers, or end the process that uses them (a notebook)"
        extras = {"cuda": "cuda13", "gpu": "cuda13", "tpu": "tpu"}
        if named in extras:
            fix = f"with JAX_PLATFORMS={named}, it needs pip install 'jax[{extras[named]}]'; {fix}"
        raise UserError(f"JAX finds no devices ({error!r}): {fix}") from None
    joined = jax.distributed.is_initialized() or jax.process_count() == 1
    require(joined, "these devices belong to several hosts: add --distributed on each of them")
    return devices


def capability(device) -> float:
    """Return a GPU's compute capability, or 0 for other devices."""
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if re.fullmatch(r"\d+\.\d", text) else 0.0


def make_mesh(cfg: Config, devices=None) -> tuple[Config, Mesh]:
    """Return (config, mesh) for the first cfg.devices entries of `devices` (all if 0).

    Raise UserError if the devices cannot run the same program."""
    devices = sorted(devices or all_devices(), key=lambda device: device.process_index)
    count = len(devices)
    require(cfg.devices <= count, f"devices={cfg.devices}, but there are {count}: use fewer, or 0")
    cfg = for_devices(cfg, cfg.devices or count)
    one_process = devices[-1].process_index == 0
    uneven = f"{count} devices of several processes cannot divide the rows: use {cfg.devices}"
    require(one_process or cfg.devices == count, uneven)
    numbers = {}  # device kind -> device numbers
    for number, device in enumerate(devices):
        numbers.setdefault(device.device_kind, []).append(str(number))
    fix = " or ".join(f"CUDA_VISIBLE_DEVICES={','.join(x)}" for x in numbers.values())
    used = devices[: cfg.devices]
    alike = len({device.device_kind for device in used}) == 1
    require(alike, f"{' and '.join(numbers)} cannot run the same program: set {fix}")
    return cfg, Mesh(np.array(used), (AXIS,))


# ---- Memory: the device memory of a run, before compilation -------------------------------------

SPARE = 2 * 2**30  # bytes reserved per device for other allocations (records/NOTES.md)


def usable(limit: float) -> float:
    """Return a device's memory `limit` minus SPARE, but at least half the limit."""
    return max(limit - SPARE, limit / 2)


def device_bytes(tree) -> int:
    """Return the per-device bytes of a pytree of arrays or layouts."""
    size = 0
    for x in jax.tree.leaves(tree):
        shape = x.sharding.shard_shape(x.shape)
        size += math.prod(shape) * x.dtype.itemsize
    return size


def gradient_bytes(cfg: Config, mesh: Mesh, name: str, stage: int) -> int:
    """Return the per-device bytes of a parameter's gradient for one step."""
    if name == NGRAMS:
        rows = mesh.size * capacity(cfg.stages[stage].batch_tokens, mesh.size)
        return rows * (4 + cfg.width * cfg.dtype.itemsize)  # ids and vectors
    return device_bytes(abstract_copies(cfg, mesh)[name])


def due_bytes(cfg: Config, mesh: Mesh, update: Update) -> dict[str, list[int]]:
    """Return a dict from parameter names to the per-device bytes of their gradients, one number for
    each step of the update."""
    stages = update.stages or (0,) * update.steps
    names = updated(cfg, update.kind)
    return {name: [gradient_bytes(cfg, mesh, name, stage) for stage in stages] for name in names}


def held_bytes(cfg: Config, mesh: Mesh, key) -> int:
    """Return the per-device bytes of the training state, copies and accumulated gradients while the
    program `key` runs, excluding the program's results."""
    waiting = {}  # name -> bytes of accumulated gradients
    for update in keys_of_steps(cfg):
        if isinstance(update, Update):
            for name, sizes in due_bytes(cfg, mesh, update).items():
                size = sum(sizes if isinstance(key, Update) else sizes[:-1])
                waiting[name] = max(size, waiting.get(name, 0))
    arrays = abstract_state(cfg, mesh), abstract_copies(cfg, mesh)
    return device_bytes(arrays) + sum(waiting.values())


def resident_bytes(cfg: Config, mesh: Mesh, key) -> int:
    """Return held_bytes minus the program's arguments."""
    state = abstract_state(cfg, mesh)
    arguments = device_bytes(state)
    if isinstance(key, Update):
        arguments += sum(map(sum, due_bytes(cfg, mesh, key).values()))
    elif key != "finish":
        table = state["params"].get(NGRAMS)
        arguments = device_bytes((abstract_copies(cfg, mesh), table))
    return held_bytes(cfg, mesh, key) - arguments


def expected_bytes(cfg: Config, mesh: Mesh) -> dict[str, float]:
    """Return each program's peak bytes per device, with estimated temporary arrays if
    records/fit.py exists."""
    if estimate := records_tool("fit.py"):
        return estimate["expected_bytes"](cfg, mesh)
    return {str(key): held_bytes(cfg, mesh, key) for key in keys_of_programs(cfg)}


def memory_refusal(cfg: Config, mesh: Mesh, name: str, size: float, limit: float, fix="") -> str:
    """Return "" if a program needing `size` bytes fits on a device with `limit` bytes.

    Otherwise return an error message suggesting `fix` or settings that fit."""
    if size <= usable(limit):
        return ""
    if not fix:
        fix = "use smaller sizes, such as those of tiny, or more devices"
        if search := records_tool("fit.py"):
            unexpected = max(0.0, size - expected_bytes(cfg, mesh)[name])
            settings = search["settings_that_fit"](cfg, mesh, limit - unexpected)
            if settings:
                fix = f"add --set {' '.join(settings)}, or use more devices"
    free = f"only {usable(limit) / 2**30:.1f} of {limit / 2**30:.1f} GiB are usable"
    return f"{name} needs {size / 2**30:.1f} GiB per device, but {free}: {fix}"


def check_memory(cfg: Config, mesh: Mesh, fix="") -> str:
    """Return a message about memory use. If memory is too small, raise UserError and suggest `fix`
    or settings that fit."""
    sizes = expected_bytes(cfg, mesh)
    name = max(sizes, key=sizes.get)
    size = sizes[name] / 2**30
    limit = memory_limit(mesh)
    if mesh.devices.flat[0].platform == "cpu":  # all devices share the machine's memory
        machine = machine_bytes() / 2**30
        needs = f"{cfg.preset} needs about {size * mesh.size:.1f} GiB"
        cpus = f"jax sees only CPUs, with {machine:.1f} GiB"
        require(size * mesh.size < machine, f"{needs}, and {cpus}: use tiny, or smaller sizes")
    refusal = memory_refusal(cfg, mesh, name, sizes[name], limit, fix)
    require(not refusal, refusal)
    if limit == math.inf:
        return f"it needs about {size:.1f} GiB per device (of unknown memory)"
    return f"it fits: about {size:.1f} of {limit / 2**30:.1f} GiB per device"


def memory_limit(mesh: Mesh) -> float:
    """Return the bytes JAX may use per device (minimum over devices).

    Return infinity if unknown (on CPUs, or with XLA_PYTHON_CLIENT_ALLOCATOR=platform)."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    return min(of_device.get("bytes_limit") or math.inf for of_device in stats)


def with_whole_loss(cfg: Config, mesh: Mesh, limit: float) -> Config:
    """Replace whole_loss="auto" with "always" or "never".

    Without chunks, the head gradient is written only once, but all logits of a micro-batch must fit
    in memory. `speedrun` activations take up to three times the logits' memory, hence `4 *`."""
    if cfg.whole_loss != "auto":
        return cfg
    logits = 0
    for stage in cfg.stages:
        rows = rows_together(cfg, stage.rows // mesh.size, stage.row_tokens)
        tokens = rows * stage.row_tokens
        logits = max(logits, tokens * cfg.vocab * cfg.dtype.itemsize)
    held = max(held_bytes(cfg, mesh, key) for key in keys_of_steps(cfg))
    fits = limit < math.inf and usable(limit) - held >= 4 * logits
    always = fits and keeps_logits_narrow(cfg, mesh.devices.flat[0])
    return dataclasses.replace(cfg, whole_loss="always" if always else "never")


def keeps_logits_narrow(cfg: Config, device) -> bool:
    """Return whether training on this kind of device stores logits in the compute dtype.

    On TPUs, XLA fuses the loss into the matmuls. On GPUs, loss_rows reads rounded logits.
    Otherwise, float32 logits are materialized."""
    loss = choose_kernels(cfg, device)[0].cross_entropy
    if device.platform == "tpu":
        return loss is not PLAIN.cross_entropy
    return isinstance(loss, functools.partial) and not cfg.pointer_width


# ---- Checkpoints: RUN_DIR/checkpoints/STEP/ holds meta.json and KIND.NAME.FIRST_ROW.npy ---------

BEST = "best"  # RUN_DIR/best/STEP/ holds the parameters with the lowest validation loss


class Saved(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    cfg: Config
    step: int  # number of finished steps
    loader: LoaderState  # state of all processes before the next batch
    meta: dict  # contents of run.json, training time, log sizes

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.folder.parents[1]

    @property
    def only_params(self) -> bool:
        """Whether the optimizer state is missing."""
        return all(name.startswith("params.") for name in self.meta["files"])


def own_shards(cfg: Config, state) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (file name, rows) for each shard this process saves. Each row is saved once."""
    for path, array in jax.tree.leaves_with_path(state):
        kind, name = (key.key for key in path)
        rows = param_specs(cfg)[name].shape[0]  # excluding padding (see abstract_state)
        for shard in array.addressable_shards:
            first = shard.index[0].start or 0
            count = min(len(shard.data), rows - first)
            if shard.replica_id == 0 and count > 0:
                yield f"{kind}.{name}.{first}.npy", np.asarray(shard.data)[:count]


def write_checkpoint(folder: Path, shards: Iterator, meta: dict) -> float:
    """Save this process's `shards` and return their size in MB (process 0 returns the total). Raise
    OSError on all processes if any of them cannot write.

    The checkpoint is hidden until it is complete. Then older checkpoints are deleted."""
    step = meta["step"]
    hidden = folder / f".{step}"
    failed = None
    sizes = {}
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        for name, rows in shards:
            # .npy files do not support bfloat16, so store its bits as integers.
            numbers = rows.view(np.uint16) if rows.dtype == jnp.bfloat16 else rows
            np.save(hidden / name, numbers)
            sizes[name] = (hidden / name).stat().st_size
        (hidden / f"{jax.process_index()}.json").write_text(json.dumps(sizes))
    except OSError as error:
        failed = error
    if max(from_processes(failed is not None)):
        raise failed or OSError("another process could not write")
    if jax.process_index() == 0:
        for process in range(jax.process_count()):  # requires a shared file system
            text = (hidden / f"{process}.json").read_text()
            sizes |= json.loads(text)
        (hidden / "meta.json").write_text(json.dumps(meta | {"files": sizes}))
        if (folder / str(step)).exists():  # damaged, or saved before the run was resumed
            remove_checkpoint(folder, step)
        os.rename(hidden, folder / str(step))
        for other in replaced_by(step, folder):
            remove_checkpoint(folder, other)
    return sum(sizes.values()) / 1e6


HIDDEN = re.compile(r"\.(old-)?\d+")  # checkpoints being written or deleted


def remove_checkpoint(folder: Path, step: int):
    """Delete a checkpoint, hiding it first so that an interruption leaves no partial checkpoint."""
    hidden = folder / f".old-{step}"
    os.rename(folder / str(step), hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def replaced_by(step: int, folder: Path) -> list[int]:
    """Return the checkpoints to delete after saving `step`. RUN_DIR/best keeps only `step`.
    RUN_DIR/checkpoints also keeps the previous checkpoint and any later ones."""
    steps = checkpoint_steps(folder)
    if folder.name == BEST:
        return [other for other in steps if other != step]
    return [other for other in steps if other < step][:-1]


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the sorted steps of all checkpoints in a checkpoint directory."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def find_checkpoint(place: Path, say: Callable = print, resumes: bool = False) -> Saved:
    """Return the newest complete checkpoint in `place` (RUN_DIR, RUN_DIR/checkpoints, RUN_DIR/best,
    a checkpoint, or a directory of runs). Skip damaged checkpoints with a warning.

    Raise UserError if there is none, if it has unknown settings, or if `resumes` is set and this
    file has changed."""
    resolved = place.expanduser().resolve()
    require(resolved.exists(), f"{place} does not exist: pass a run directory")
    folder = resolved / "checkpoints"
    if resolved.name in ("checkpoints", BEST) and checkpoint_steps(resolved):
        folder = resolved
    paths = [folder / str(step) for step in checkpoint_steps(folder)]
    if not paths and (resolved / "meta.json").exists():
        paths = [resolved]
    if not paths:
        of_runs = [path for path in resolved.glob("*/checkpoints/*") if path.name.isdecimal()]
        paths = sorted(of_runs, key=os.path.getmtime)
        if paths:
            say(f"the newest checkpoint of the runs in {place}: {paths[-1]}")
    hint = "pass a run with a checkpoint (--set checkpoint_every=N)"
    for path in reversed(paths):
        try:
            return read_checkpoint(path, resumes)
        except UserError:  # older checkpoints have the same problem
            raise
        except Exception as error:  # a damaged file
            hint = f"{path} cannot be used ({error})"
            say(f"warning: {hint}: skipped")
    if checkpoint_steps(resolved / BEST):
        hint += f"; {resolved / BEST} has parameters for --start and samples"
    raise UserError(f"no complete checkpoint in {place}: {hint}")


def read_checkpoint(path: Path, resumes: bool = False) -> Saved:
    """Load the checkpoint at `path` (without its arrays).

    Raise UserError for unknown settings, or if `resumes` is set and this file has changed. Any
    other exception means that the checkpoint is damaged."""
    meta = json.loads((path / "meta.json").read_text())
    for name, size in meta["files"].items():
        if Path(name).name != name or (path / name).stat().st_size != size:
            raise ValueError(f"{name} is incomplete")
        np.load(path / name, mmap_mode="r")  # check that the file is an array
    if resumes:
        check_source(path.parents[1], meta["source_sha256"])
    cfg = validate(typed(Config, meta["config"]))
    loader = LoaderState(meta["cursor"], tuple(meta["offsets"]))
    return Saved(path, cfg, meta["step"], loader, meta)


def check_source(run_dir: Path, sha256: str):
    """Raise UserError if this file has changed since the run started."""
    log = run_dir / "log.txt"
    has_source = f"restore it ({log} begins with its source)" if log.exists() else "restore it"
    changed = f"train_gpt.py has changed since {run_dir} was started: {has_source}"
    require(sha256 == source_sha256(), f"{changed}, or use --start instead")


def checkpoint_to_resume(place: Path, say: Callable) -> Saved:
    """Return the checkpoint to resume from.

    Raise UserError if the checkpoint has no optimizer state, is outside its run directory, or is
    not the newest."""
    saved = find_checkpoint(place, say, resumes=True)
    start = command_for(__file__, "--start", saved.folder)
    new_run = f"start a new run with them: {start}"
    require(not saved.only_params, f"{saved.folder} holds parameters only: {new_run}")
    has_run = (saved.run_dir / "log.txt").exists()
    require(has_run, f"{saved.folder} is not in its run directory: copy it there, or {new_run}")
    newest = find_checkpoint(saved.run_dir, lambda line: None)
    again = command_for(__file__, "--resume", saved.run_dir)
    later = f"{saved.folder} is not the newest checkpoint: continue from step {newest.step}"
    instead = f"move {newest.folder} elsewhere, or {new_run}"
    require(newest.step <= saved.step, f"{later} ({again}), {instead}")
    return saved


def load_state(mesh: Mesh, saved: Saved, kinds=None):
    """Load a checkpoint's training state (or only some `kinds` of arrays) onto a mesh of any size.
    Host memory holds one shard at a time."""
    layout = abstract_state(saved.cfg, mesh)
    wanted = {kind: layout[kind] for kind in kinds or layout}
    return jax.tree.map_with_path(functools.partial(load_array, saved), wanted)


def load_array(saved: Saved, path, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Load the array at this tree `path` with the layout `like`."""
    kind, name = (key.key for key in path)
    dtype = np.dtype(np.uint16 if like.dtype == jnp.bfloat16 else like.dtype)
    other = f"{saved.folder}: {kind}.{name} was saved by another train_gpt.py (see the run's log)"
    files = {}  # first row -> rows
    for file in saved.folder.glob(f"{kind}.{name}.*.npy"):
        first = int(file.stem.rpartition(".")[2])
        files[first] = np.load(file, mmap_mode="r")
    for stored in files.values():
        require(stored.dtype == dtype and stored.shape[1:] == like.shape[1:], other)
    count = sum(map(len, files.values()))
    require(files and count == param_specs(saved.cfg)[name].shape[0], other)
    shards = []
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        start, stop, _ = index[0].indices(like.shape[0])
        rows = np.zeros((stop - start, *like.shape[1:]), dtype)  # zero padding
        for first, stored in files.items():
            part = stored[max(start - first, 0) : max(stop - first, 0)]
            place = max(first - start, 0)
            rows[place:][: len(part)] = part
        shard = jax.device_put(rows.view(like.dtype), device)
        shards.append(shard.block_until_ready())
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


# ---- Run log: RUN_DIR/log.txt, metrics.jsonl, run.json ------------------------------------------

# Environment variables and packages recorded in run.json:
VARIABLES = "(TF_)?XLA_|(JAX|(LIB)?TPU|CU(DA|DNN|BLAS)|NCCL|OMP|OPENBLAS|MKL|LD)_|NVIDIA_TF|PYTHON"
PACKAGES = re.compile("jax(lib|-cuda.*)?|numpy|libtpu|nvidia-(cudnn|cublas).*")
RULE = "=" * 100


def flops_per_token(cfg: Config, step: int) -> float:
    """Return the model FLOPs per token: 6 per weight in the large matmuls, as in upstream."""
    ids = schedule(cfg).candidates[step] or cfg.vocab
    return 6.0 * (matrix_weights(cfg) + cfg.width * ids)


def matrix_weights(cfg: Config) -> int:
    """Return the number of matmul weights per token, excluding the head."""
    total = 2 * cfg.pointer_width * cfg.width
    for i, layer in enumerate(cfg.layers):
        total += 2 * layer.mlps * cfg.mlp_width * cfg.width
        if layer.attends:
            heads = heads_of(cfg, i, (0, 0))
            count = heads.count + (heads.kv or heads.count)  # q and k heads; also o and v heads
            total += count * (heads.qk_width + heads.v_width) * cfg.width
    return total


def versions() -> dict[str, str]:
    """Return the versions of Python and installed PACKAGES."""
    installed = {package.name or "" for package in importlib.metadata.distributions()}
    names = sorted(name for name in installed if PACKAGES.fullmatch(name))
    of_packages = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version()} | of_packages


def cpu_name() -> str:
    """Return the CPU model, or the architecture if unknown. On ARM, Linux reports numbers instead
    of a name."""
    machine = platform.machine()
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            brand = subprocess.run(command, capture_output=True, text=True).stdout
            return brand.strip() or machine
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return machine
    if line := re.search(r"^model name\s*: (.+?)\s*$", text, re.M):
        return line[1]
    numbers = re.findall(r"^CPU (?:implementer|part)\s*: (\S+)", text, re.M)
    return " ".join([machine, *sorted({*numbers})])


def source_sha256() -> str:
    """Return the SHA-256 of this file."""
    return hashlib.sha256(SOURCE.encode()).hexdigest()


def sizes_chosen(recipe: Config, cfg: Config, mesh: Mesh, kernels: Kernels) -> dict:
    """Return the sizes chosen for these devices: micro-batches and loss chunks per stage, and
    row_tokens if it differs from the recipe."""
    of_step, loss_chunks = [], []
    most = cfg.loss_chunk
    if kernels.cross_entropy is not PLAIN.cross_entropy:
        most = loss_tokens(cfg)
    for stage in cfg.stages:
        rows = stage.rows // mesh.size
        together = rows_together(cfg, rows, stage.row_tokens)
        of_step.append(rows // together)
        for ids in dict.fromkeys(stage.candidates):  # each row has its own candidates
            tokens = stage.row_tokens if ids else together * stage.row_tokens
            loss_chunks.append(chunk_count(tokens, most * cfg.vocab // (ids or cfg.vocab)))
    chosen = {"whole_loss": cfg.whole_loss, "micro_batches": of_step}
    chosen["loss_chunks"] = loss_chunks
    if [stage.row_tokens for stage in cfg.stages] != [stage.row_tokens for stage in recipe.stages]:
        chosen["row_tokens"] = [stage.row_tokens for stage in cfg.stages]
    return chosen


def run_facts(cfg: Config, mesh: Mesh, command: str, choices: dict) -> dict:
    """Return everything a run's results depend on: source, versions, machine, config, and the
    `choices` made for this machine."""
    device = mesh.devices.flat[0]
    devices = {"kind": device.device_kind, "platform": device.platform, "count": mesh.size}
    devices["processes"] = jax.process_count()
    names = sorted(name for name in os.environ if re.match(VARIABLES, name))
    options = compiler_options(cfg, device.platform)
    return {
        "preset": cfg.preset,
        "config": dataclasses.asdict(cfg),
        "seed": cfg.seed,
        "parameters": sum(map(math.prod, shapes_of(cfg).values())),
        "command": command,
        "source_sha256": source_sha256(),
        "versions": versions(),
        "devices": devices,
        "host": {"cpu": cpu_name(), "cores": cpu_cores(), "platform": platform.platform()},
        "environment": {name: os.environ[name] for name in names},
        "choices": choices | {"compiler_options": options},
    }


def open_log(cfg: Config, facts: dict, out: Path, saved: Saved | None, say: Callable) -> RunLog:
    """Open the log of a new run in `out`, or of a resumed run (its files stay unchanged for now).
    `facts` must agree across processes (see check_agreement).

    Raise UserError if the files cannot be written, or if the run's data has changed."""
    check_agreement(facts, saved)
    if saved:
        check_data(cfg, facts["data"], saved)
        folder = saved.run_dir
        before = saved.meta
    else:
        folder = out / new_run_id(cfg)
        before = {"step": 0, "train_time_ms": 0.0, "dropped_ngrams": 0, "best": None}
    first = before["step"]
    facts = {"run_id": folder.resolve().name, **facts, "compile_seconds": {}, "steps": first}
    facts["tokens"] = cfg.tokens_after(first)
    facts["dropped_ngrams"] = before["dropped_ngrams"]
    facts["train_time_ms"] = round(before["train_time_ms"], 3)
    facts["best"] = before["best"]
    facts |= {"val_loss": None, "target": cfg.target, "resumed": bool(saved), "finished": False}
    log = RunLog(cfg, folder, facts, first, Clock(before["train_time_ms"]), say)
    try:
        if jax.process_index() == 0:
            open_files(log, saved)
        if not saved:
            log.begin(None)
    except OSError as error:
        log.refused = error
    hint = "resume a copy of it" if saved else "pass another --out"
    require(not log.refused, f"cannot write {folder} ({log.refused}): {hint}")
    devices = "{count} x {kind}".format(**facts["devices"])
    say(f"run {folder} on {devices}; kernels: {facts['choices']['kernels']}")
    if facts["devices"]["count"] < (cfg.devices or jax.device_count()):
        say("some devices are idle: they cannot divide the rows evenly")
    if saved:
        say(f"resumed after {first} of {cfg.steps} steps from {saved.folder}")
    return log


def new_run_id(cfg: Config) -> str:
    """Return a new run id (time, preset, seed, random suffix), the same on all processes."""
    now = time.strftime("%Y%m%d-%H%M%S")
    name = f"{now}-{cfg.preset}-s{cfg.seed}-{os.urandom(3).hex()}"
    letters = np.frombuffer(name.encode(), np.uint8)
    return multihost_utils.broadcast_one_to_all(letters).tobytes().decode()


def check_data(cfg: Config, facts: dict, saved: Saved):
    """Raise UserError unless the shards in `facts` are the run's original shards."""
    folder = saved.run_dir
    place = saved.meta["config"]["data"]
    other = f"{cfg.data} does not contain the shards of {folder}: omit --data if {place} does"
    instead = f"or train with its parameters: --start {folder} --data {cfg.data}"
    require(saved.meta["data"] == facts, f"{other}, {instead}")


def check_sizes(cfg: Config, saved: Saved):
    """Run check_data on file sizes, before reading any tokens."""
    missing = f"no folder {cfg.data}: pass --data TEXT with the same text to make its tokens again"
    require(data_place(cfg.data).exists(), missing)
    sizes = {}
    for name, of_shard in saved.meta["data"].items():
        path = data_place(cfg.data) / name
        size = path.stat().st_size if path.exists() else 0
        sizes[name] = of_shard | {"bytes": size}
    check_data(cfg, sizes, saved)


def open_files(log: RunLog, saved: Saved | None):
    """Open and lock the run's files without changing them.

    Raise OSError if the run directory is not writable, or if the file system cannot rename
    directories (checkpoints require this)."""
    log.folder.mkdir(parents=True, exist_ok=bool(saved))
    for name in ("log.txt", "metrics.jsonl"):
        # The buffer keeps lines while the disk is full.
        file = open(log.folder / name, "ab", buffering=2**20)
        log.files[name] = file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # locked, or locks are not supported
            taken = isinstance(error, BlockingIOError)
            require(not taken, f"another process writes {log.folder}: wait for it, or stop it")
    with tempfile.TemporaryDirectory(prefix=".rename-", dir=log.folder) as trial:
        before = Path(trial, "before")
        before.mkdir()
        (before / "file").touch()
        try:
            os.rename(before, Path(trial, "after"))
        except OSError as error:
            bucket = "gcsfuse needs --rename-dir-limit=10000"
            raise OSError(f"folders cannot be renamed there: {error}; {bucket}") from None


def log_head(log: RunLog, saved: Saved | None) -> list[str]:
    """Return the log.txt header lines of a new or resumed run."""
    facts = log.facts
    lines = [RULE, "resumed"] if saved else [SOURCE, RULE]
    lines += [f"{name} {version}" for name, version in facts["versions"].items()]
    lines.append("{count} x {kind} ({platform})".format(**facts["devices"]))
    lines += [facts["host"]["platform"], f"command: {facts['command']}"]
    for name in ("host", "environment", "choices", "parameters", "data"):
        lines.append(f"{name}: {json.dumps(facts[name])}")
    # A resumed run logs its config only if settings other than these have changed.
    where = {"data": log.cfg.data, "devices": log.cfg.devices}
    if not saved or log.cfg != dataclasses.replace(saved.cfg, **where):
        lines.append(f"config: {json.dumps(facts['config'])}")
    return [*lines, RULE]


class Clock:
    """Training time in milliseconds, including the time before a resume. The loader runs only while
    `running` is set, so all loading time is counted."""

    def __init__(self, elapsed_ms: float = 0.0):
        self.total = elapsed_ms
        self.since = 0.0
        self.running = threading.Event()

    def start(self):
        """Start the clock if it is not running."""
        if not self.running.is_set():
            self.since = time.perf_counter()
            self.running.set()

    def stop(self):
        """Stop the clock."""
        self.total = self.ms()
        self.running.clear()

    def ms(self) -> float:
        """Return the training time so far."""
        if not self.running.is_set():
            return self.total
        return self.total + 1000 * (time.perf_counter() - self.since)


class StepResult(NamedTuple):
    """Results of a step, possibly still being computed."""

    step: int  # 1-based
    loss: jax.Array
    dropped: jax.Array  # number of dropped n-grams
    norms: dict[str, jax.Array]  # gradient norms by parameter; empty without cfg.log_norms
    number_of_pass: int  # training epoch, 1-based


def log_step(log: RunLog, result: StepResult | None):
    """Wait for a step to finish and log it."""
    if result:
        loss = check_loss(log, result.step, float(result.loss))
        log.trained(result, loss)


def check_loss(log: RunLog, step: int, loss: float) -> float:
    """Return `loss`. Raise UserError if the run has diverged: the loss is NaN, or twice the loss of
    a uniform distribution."""
    most = 2 * math.log(log.cfg.vocab)
    hint = f"lower the learning rates (--set lr_anvil=...); see {log.folder}/metrics.jsonl"
    require(loss < most, f"the loss of step {step} is {loss:.4g}: {hint}")
    return loss


@dataclass
class RunLog:
    """Writes the run's files (on process 0 only) and its terminal output. A full disk causes one
    warning; missing lines are written later."""

    cfg: Config
    folder: Path  # run directory
    facts: dict  # contents of run.json
    first: int  # number of steps finished before this process started
    clock: Clock
    say: Callable
    files: dict = dataclasses.field(default_factory=dict)  # name -> open file; process 0 only
    refused: OSError | None = None  # latest write error
    warned: bool = False  # whether a warning about stalled validation was printed

    def begin(self, saved: Saved | None):
        """Write the log header and run.json. For a resumed run, first truncate the logs and delete
        incomplete checkpoints."""
        for name, file in self.files.items():
            if saved:  # drop lines logged after the checkpoint
                size = min(file.tell(), saved.meta["logs"][name])
                file.truncate(size)
                file.seek(0, os.SEEK_END)
        if self.files:
            for path in [*self.folder.glob("checkpoints/*"), *self.folder.glob(f"{BEST}/*")]:
                if HIDDEN.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
            self.write("log.txt", "\n".join(log_head(self, saved)))
        self.write_facts()

    def write(self, name: str, text: str):
        """Append a line to a log file and flush it, or overwrite any other file with `text`."""
        try:
            if name in self.files:
                line = f"{text}\n".encode("utf-8", "backslashreplace")
                self.files[name].write(line)
                self.files[name].flush()
            elif self.files:  # process 0
                new = self.folder / f"{name}.new"
                new.write_text(f"{text}\n", "utf-8")
                os.replace(new, self.folder / name)
        except OSError as error:
            if not self.refused:
                self.say(f"warning: cannot write {self.folder} ({error}); the run goes on")
            self.refused = error

    def write_facts(self, **changes):
        """Update run.json."""
        self.facts.update(changes)
        self.write("run.json", json.dumps(self.facts, indent=1))

    def save(self, step: int, state, loader: LoaderState, best: bool = False):
        """Save a checkpoint, or the `best` parameters. Warn if saving fails."""
        began = time.perf_counter()
        folder = self.folder / (BEST if best else "checkpoints")
        position = {"step": step, "train_time_ms": self.clock.ms(), "cursor": loader.cursor}
        position["offsets"] = from_processes(loader.offsets)
        position["logs"] = {name: file.tell() for name, file in self.files.items()}
        self.facts.pop("missing", None)
        try:
            shards = own_shards(self.cfg, state)
            size = write_checkpoint(folder, shards, self.facts | position)
            ms = 1000 * (time.perf_counter() - began)
            self.write("log.txt", f"checkpoint:{step} held the loop for {ms:.1f}ms, {size:.1f} MB")
        except OSError as error:
            full = shutil.disk_usage(self.folder).free < 2**20  # numpy's error omits this
            reason = "the disk is full" if full else error
            self.facts["missing"] = f"there is no checkpoint of step {step}: {reason}"
            self.say(f"warning: {self.facts['missing']}; older ones stay")
            shutil.rmtree(folder / f".{step}", ignore_errors=True)

    def line(self, step: int, kind: str, loss: float, dropped: int, **fields) -> str:
        """Log the loss after `step` steps, plus additional `fields`. Return the log line, in
        upstream's format."""
        ms = round(self.clock.ms(), 3)
        done = {"train_time_ms": ms, "tokens": self.cfg.tokens_after(step)}
        self.facts |= {"steps": step, **done}
        self.facts["dropped_ngrams"] += dropped
        shown = f"val_loss:{loss:.4f} " if kind == "val_loss" else ""
        average = f"step_avg:{ms / max(step, 1):.2f}ms"
        line = f"step:{step}/{self.cfg.steps} {shown}train_time:{ms:.0f}ms {average}"
        self.write("log.txt", line)
        numbers = {"step": step, kind: round(loss, 6), **done, "dropped_ngrams": dropped}
        self.write("metrics.jsonl", json.dumps(numbers | fields))
        return line

    def trained(self, result: StepResult, loss: float):
        """Log a training step. Print it every log_every steps."""
        step, norms = result.step, result.norms
        fields = {"pass": result.number_of_pass}
        fields["lr"] = float(schedule(self.cfg).hyper.lr[step - 1])
        for name, size in norms.items():
            fields[f"norm_{name}"] = float(size)
        line = self.line(step, "train_loss", loss, int(result.dropped), **fields)
        if step % self.cfg.log_every and step != self.first + 1:
            return
        seconds = max(self.facts["train_time_ms"], 1e-3) / 1000
        speed = self.facts["tokens"] / seconds
        left = (self.cfg.steps - step) * seconds / step
        self.say(f"{line} train_loss:{loss:.4f} {speed:,.0f} tok/s eta:{left:.0f}s")
        if norms:
            shown = [f"{name} {float(size):.1e}" for name, size in norms.items()]
            self.say(f"norms: {', '.join(shown)}")

    def validated(self, step: int, loss: float, dropped: int) -> bool:
        """Log the validation loss after `step` steps. Return whether it is the lowest so far. Warn
        once if the loss has not improved for a quarter of the run."""
        self.say(self.line(step, "val_loss", loss, dropped))
        best = self.facts["best"]
        if not best or loss < best["val_loss"]:
            best = {"step": step, "val_loss": round(loss, 6)}
        self.write_facts(val_loss=round(loss, 6), best=best)
        waited = step - best["step"]
        if not self.warned and waited >= max(self.cfg.steps / 4, 2 * self.cfg.val_every):
            self.warned = True
            lowest = "validation has not been below {val_loss:.4f} since step {step}".format(**best)
            self.say(f"{lowest}: it may still fall in the cooldown, or fewer epochs may help")
        return waited == 0

    def stopped(self, step: int):
        """Log that a signal has stopped the run."""
        self.write_facts()
        missing = self.facts.get("missing")
        require(not missing, f"stopped after {step} steps, but {missing}")
        again = command_for(__file__, "--resume", self.folder)
        self.say(f"stopped after {step} of {self.cfg.steps} steps; to continue: {again}")

    def ended(self):
        """Log the results of a complete run."""
        peak = peak_memory() / 2**20
        self.write("log.txt", f"n-grams that found no room: {self.facts['dropped_ngrams']}")
        self.write("log.txt", f"peak memory allocated: {peak:.0f} MiB")
        self.write_facts(finished=True)
        target = self.cfg.target
        loss, best = self.facts["val_loss"], self.facts["best"]
        met = "met" if loss <= target else "MISSED"
        verdict = f"target {target} {met}: " if target else ""
        result = f"val_loss {loss:.4f} after {self.clock.ms() / 1000:.1f} s of training"
        tokens = f"{self.facts['tokens']:,} tokens"
        lowest = ""
        if best["step"] < self.cfg.steps:
            lowest = "; the lowest was {val_loss:.4f} after step {step}".format(**best)
            if best["step"] in checkpoint_steps(self.folder / BEST):
                lowest += f" (parameters in {self.folder / BEST})"
        memory = f"peak memory {peak:.0f} MiB"
        self.say(f"{verdict}{result} on {tokens}{lowest}; {memory}; see {self.folder}")


def peak_memory() -> int:
    """Return the peak memory in bytes of any local device, or of this process on CPUs."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    of_device = max(stat.get("peak_bytes_in_use", 0) for stat in stats)
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS reports bytes, Linux KiB
    of_process = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return of_device or of_process


@functools.cache
def records_tool(name: str) -> dict | None:
    """Run the tool records/`name` and return its globals, or None if it is missing."""
    tool = Path(__file__).resolve().parent / "records" / name
    if not tool.exists():
        return None
    before = sys.modules.get("train_gpt")
    sys.modules["train_gpt"] = sys.modules[__name__]  # the tool imports this module by this name
    try:
        return runpy.run_path(str(tool))
    finally:
        del sys.modules["train_gpt"]
        if before:
            sys.modules["train_gpt"] = before


def demonstrate(log: RunLog, model: tuple):
    """Print a text sample and the loss in bits per byte (records/sample.py)."""
    try:
        tool = records_tool("sample.py")
        if log.cfg.encoding == "ids":
            log.say("no sample: the tokens have no bytes (encoding=ids)")
        elif min(from_processes(tool is not None)):
            tool["demonstrate"](tool["Trained"](*model), log)
    except Exception as error:  # the run itself was successful
        log.say(f"warning: there is no sample: {error!r}")


# ---- Signals ------------------------------------------------------------------------------------

# Signals that stop a run cleanly: Ctrl-C, a closed terminal, `kill`, and warnings from schedulers
# (Slurm and SGE send SIGUSR1 or SIGUSR2; SGE and `ulimit -t` send SIGXCPU every second).
STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
STOPS += (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def signal_handlers() -> dict:
    """Return the current handlers of all signals used by ask_to_stop."""
    return {number: signal.getsignal(number) for number in (*STOPS, signal.SIGCONT)}


def set_handlers(handlers: dict):
    """Install signal handlers, as returned by signal_handlers. No-op outside the main thread."""
    with contextlib.suppress(ValueError):
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ask_to_stop(say: Callable = print) -> Callable[[int], int]:
    """Install handlers for STOPS. Return a function from the step to the received signal (or 0).

    A second signal kills the process. After a SIGTERM to any of several processes, JAX picks a step
    at which all can stop. The function also warns if the process was suspended (Ctrl-Z)."""
    alone = jax.process_count() == 1
    received = []  # (signal, time)
    agreed = []
    asked_at = [time.monotonic()]
    suspended = []  # upper bounds in seconds

    def receive(number, frame):
        now = time.monotonic()
        again = received and now > received[0][1] + 1  # `timeout` sends each signal twice
        if again and number != signal.SIGXCPU:
            os._exit(128 + number)
        received.append((number, now))
        if not alone:
            signal.raise_signal(signal.SIGTERM)

    def resumed(number, frame):
        seconds = time.monotonic() - asked_at[0]
        if seconds > 1:  # `timeout` also sends SIGCONT to running processes
            suspended.append(seconds)

    def stop_signal(step: int) -> int:
        asked_at[0] = time.monotonic()
        while suspended:
            seconds = suspended.pop()
            say(f"warning: suspended for up to {seconds:.0f} s, which training time includes")
        if alone:
            return received[0][0] if received else 0
        if multihost_utils.reached_preemption_sync_point(step):  # True only once
            agreed.append(signal.SIGTERM)
        return agreed[0] if agreed else 0

    numbers = {*STOPS}
    if not alone:  # from here on JAX handles SIGTERM
        numbers.remove(signal.SIGTERM)
        jax.config.update("jax_enable_preemption_service", True)
        multihost_utils.distributed.global_state.initialize_preemption_sync_manager()
    handlers = {signal.SIGCONT: resumed}
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` and `&` set SIG_IGN
            handlers[number] = receive
    set_handlers(handlers)
    return stop_signal


# ---- Hosts: several processes that run the same programs ----------------------------------------

# Environment variables set by multi-process launchers, and on TPU slices:
LAUNCHERS = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"
TPU_HOSTS = "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"
LONG_WAIT = "waiting for the other processes of this run"


def join_processes(args):
    """Connect to the run's other processes. With --distributed, JAX finds them (TPU slice, Slurm,
    Open MPI). With --coordinator, the options specify them.

    Raise UserError if the connection fails, or if a launcher started several processes without
    either option."""
    named = args.coordinator, args.processes, args.process_id
    one_by_one = "--coordinator HOST:PORT --processes N --process-id I"
    if not args.distributed and named == (None, None, None):
        several = [name for name in LAUNCHERS if os.environ.get(name, "1") not in ("", "1")]
        if os.environ.get("JAX_PLATFORMS") != "cpu":
            several += [name for name in TPU_HOSTS if "," in os.environ.get(name, "")]
        for name in several:
            found = f"{name}={os.environ[name]}, but each process would train a whole run"
            together = f"add --distributed (TPU slice, Slurm, MPI) or {one_by_one} to all of them"
            raise UserError(f"{found}: {together}; to run one alone: env -u {name} before it")
        return
    complete = named == (None, None, None) if args.distributed else None not in named
    require(complete, f"write --distributed or {one_by_one}")
    tasks, hosts = (os.environ.get(f"SLURM_STEP_NUM_{x}") for x in ("TASKS", "NODES"))
    who = "--distributed needs a TPU slice, Slurm or Open MPI"
    who += f"; Slurm expects {tasks} tasks (SLURM_STEP_NUM_TASKS)" if tasks else ""
    if not args.distributed:
        who = f"--coordinator {named[0]} --processes {named[1]} --process-id {named[2]}"
    jax.config.update("jax_enable_preemption_service", False)  # ask_to_stop enables it
    try:
        if args.process_id == 0:  # JAX crashes if the port is already taken
            port = int(args.coordinator.rpartition(":")[2])
            socket.create_server(("", port)).close()
        # With one Slurm task per host, use all GPUs; by default JAX picks one GPU per task.
        gpus = [] if tasks and tasks == hosts else None
        join = functools.partial(jax.distributed.initialize, *named, local_device_ids=gpus)
        wait_for(join, f"{LONG_WAIT}: {who}", timeout=280)  # JAX crashes after 300 s
    except Exception as error:
        raise UserError(f"cannot join the other processes ({error!r}): {who}") from None


def wait_for(task: Callable, message: str = LONG_WAIT, timeout: float | None = None):
    """Return task(). Print `message` if the task is slow. Raise TimeoutError after `timeout` s."""
    result = ThreadPoolExecutor(1).submit(task)
    try:
        return result.result(STALL_SECONDS)
    except TimeoutError:
        tell(message)
    return result.result(timeout)


def from_processes(numbers) -> list[int]:
    """Gather a number, or a list of numbers, from all processes into one list (a barrier)."""
    gathered = wait_for(lambda: multihost_utils.process_allgather(np.int32(numbers)))
    return gathered.ravel().tolist()


def check_agreement(facts: dict, saved: Saved | None):
    """Raise UserError on all processes if they differ in source, versions, data, config or
    checkpoint."""
    same = {name: facts[name] for name in ("source_sha256", "versions", "data")}
    same["config"] = facts["config"] | {"data": ""}  # data paths may differ
    same["checkpoint"] = saved and saved.meta
    sums = [zlib.crc32(json.dumps(fact).encode()) for fact in same.values()]
    gathered = multihost_utils.process_allgather(np.array(sums, np.uint32))
    of_facts = gathered.reshape(-1, len(same)).T.tolist()
    differ = [name for name, sums in zip(same, of_facts, strict=True) if len({*sums}) > 1]
    require(not differ, f"the processes differ in {', '.join(differ)}: use the same on all hosts")


# ---- Settings: --set, and checks of all values --------------------------------------------------


def check_setting(cfg: Config, name: str, holds, expected: str):
    """Unless `holds` is true, raise a UserError naming the setting and the `expected` value."""
    value = cfg
    for key in name.split("."):
        value = value[int(key)] if key.isdecimal() else getattr(value, key)
    require(holds, f"{name}={value!r} must be {expected}")


def validate(cfg: Config) -> Config:
    """Return the config if it is valid. Otherwise raise a UserError naming the invalid setting."""
    rule = functools.partial(check_setting, cfg)
    names = ",".join(Kernels._fields)
    by_name = {*cfg.kernels.split(",")} <= {*Kernels._fields}
    rule("kernels", by_name or cfg.kernels in ("auto", "plain"), f"auto, plain, or some of {names}")
    rule("preset", re.fullmatch(r"[\w.-]+", cfg.preset), "letters, digits, '_', '-' and '.'")
    validate_heads(cfg)
    validate_tables(cfg)
    for number in range(len(cfg.layers)):
        validate_layer(cfg, number)
    row_is_cut = cfg.val_row > 1 and cfg.val_batch % cfg.val_row == 0
    rule("val_batch", row_is_cut, f"a multiple of val_row={cfg.val_row}, which is 2 or more")
    batches = cfg.val_tokens % cfg.val_batch == 0
    rule("val_tokens", batches, f"a multiple of val_batch={cfg.val_batch}")
    validate_shares(cfg)
    for number in range(len(cfg.stages)):
        validate_stage(cfg, number)
    return cfg


def validate_heads(cfg: Config):
    """Check the attention heads and the logit cap."""
    rule = functools.partial(check_setting, cfg)
    even = cfg.heads % 2 == 0
    cut = cfg.width % cfg.heads == 0 and cfg.head_width % 8 == 0
    rule("heads", even and cut, f"an even number that cuts width={cfg.width} into multiples of 8")
    largest, _, divisor = cfg.logit_cap
    capped = 0 < largest <= 64 and divisor > 0
    rule(
        "logit_cap",
        capped or not any(cfg.logit_cap),
        "a,b,c with a up to 64 and c above 0; or 0,0,0",
    )
    if cfg.shared:
        divides = cfg.heads % cfg.kv_heads == 0
        rule("kv_heads", divides, f"0, or a divisor of heads={cfg.heads}")
        cuts_keys = cfg.qk_heads > 0 and cfg.kv_heads % cfg.qk_heads == 0
        rule("qk_heads", cuts_keys, f"a divisor of kv_heads={cfg.kv_heads}, not 0")
    together = cfg.heads % (cfg.qk_heads or 1) == 0
    rule("qk_heads", together, f"a divisor of heads={cfg.heads}, or 0")


def validate_tables(cfg: Config):
    """Check the vocabulary and table settings."""
    rule = functools.partial(check_setting, cfg)
    rule("real_tokens", 0 < cfg.real_tokens <= cfg.vocab, f"1 to vocab={cfg.vocab}")
    rule("bos", cfg.bos < cfg.real_tokens, f"less than real_tokens={cfg.real_tokens}")
    halves = cfg.ngram_rows % 2 == 0 and cfg.ngram_rows != 2
    rule("ngram_rows", halves, "an even number, 4 or more; or 0")
    rule("ngram_drop", 0 <= cfg.ngram_drop < 1, "0 or more, and less than 1")
    power = cfg.sign_rows & (cfg.sign_rows - 1) == 0
    rule("sign_rows", power, "a power of two, or 0")
    no_copy = f"0, as vocab={cfg.vocab} has no unused id to stand for copies"
    rule("pointer_width", cfg.pointer_width == 0 or cfg.vocab > cfg.real_tokens, no_copy)
    often, seldom = cfg.table_every
    nested = 0 < often <= seldom and seldom % often == 0 and often % cfg.adam_every == 0
    rule("table_every", nested, f"multiples of adam_every={cfg.adam_every} and of each other")
    cut = cfg.table_change % seldom == 0
    rule("table_change", cut, f"a multiple of {seldom}, see table_every")


def validate_layer(cfg: Config, number: int):
    """Check the fields of one layer."""
    layer = cfg.layers[number]

    def rule(field: str, holds, expected: str):
        check_setting(cfg, f"layers.{number}.{field}", holds, expected)

    parts = "values", "xsa", "gated", "narrow", "paired"
    of_attention = [name for name in parts if getattr(layer, name)]
    if of_attention:
        needs = f"short or long, as {', '.join(of_attention)} needs attention"
        rule("attends", layer.attends in ("short", "long"), needs)
    rule("attends", layer.attends in ("short", "long", ""), "short, long, or empty")
    rule("new_gates", number > 0 or not layer.new_gates, "False in layer 0")
    for name in ("skip", "reads_back"):
        rule(name, getattr(layer, name) <= number, f"a number of layers up to {number}")
    if layer.mudd:
        last = number == len(cfg.layers) - 1
        has_both = layer.attends != "" and layer.mlps > 0
        rule("mudd", last and has_both, "False except in a last layer with attention and MLP")
    rule("ngram", cfg.ngram_rows > 0 or not layer.ngram, "False, as ngram_rows=0")


def validate_shares(cfg: Config):
    """Check that the stages cover all steps."""
    rule = functools.partial(check_setting, cfg)
    has_extension = cfg.stages[-1].share == 0
    agrees = has_extension == (cfg.extension > 0)
    rule("extension", agrees, "the steps of the last stage if that has share=0, else 0")
    names = [f"stages.{number}.share" for number in range(len(cfg.stages))]
    for name, stage in zip(names[:-1], cfg.stages, strict=False):
        rule(name, stage.share > 0, "above 0; only the last may be 0, for the extension")
    total = sum(stage.share for stage in cfg.stages)
    sums_up = abs(total - 1) < 1e-6
    rule(names[0], sums_up, f"shares that add up to 1, not {total:.6g}: set {', '.join(names)}")
    least = min(stage.share for stage in cfg.stages if stage.share)
    enough = cfg.extension + math.ceil(1 / least)
    lengths = np.diff(cfg.boundaries)
    rule("steps", min(lengths) > 0, f"one or more for each stage: {enough} are enough")


def validate_stage(cfg: Config, number: int):
    """Check the batches and losses of one stage."""
    stage = cfg.stages[number]

    def rule(field: str, holds, expected: str):
        check_setting(cfg, f"stages.{number}.{field}", holds, expected)

    rule("row_tokens", stage.row_tokens > 1, "2 or more")
    whole_rows = stage.batch_tokens % stage.row_tokens == 0
    rule("batch_tokens", whole_rows, f"a multiple of row_tokens={stage.row_tokens}")
    rows = cfg.stages[0].rows
    rule("batch_tokens", stage.rows == rows, f"{rows} rows of {stage.row_tokens}, as in stages.0")
    both = len(stage.loss_weights) == len(stage.loss_weights_end) <= stage.row_tokens
    first = stage.loss_weights[0] > 0
    rule("loss_weights", both and first, "the first above 0, and as many as loss_weights_end")
    rule("candidates", max(stage.candidates) <= cfg.vocab, f"up to vocab={cfg.vocab}")


def typed(kind, value, name="", positive=False):
    """Convert `value` (a literal, or parsed from JSON) to the annotated type `kind`.

    Raise a UserError that mentions `name` if the value has the wrong type, is negative, or is 0
    when it must be positive."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        positive = positive or "positive" in kind.__metadata__
        return typed(kind.__origin__, value, name, positive)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return typed_fields(kind, value, name)
    wrong = f"{name}={value!r} must be "
    if origin is tuple and isinstance(value, tuple | list):
        entry, *others = typing.get_args(kind)
        require(value, f"{wrong}one or more values")
        if others == [...] or len(value) == 1 + len(others):
            return tuple(typed(entry, x, f"{name}.{i}", positive) for i, x in enumerate(value))
    if origin is Literal:
        choices = typing.get_args(kind)
        require(value in choices, wrong + ", ".join(choices))
        return value
    is_number = kind in (int, float) and type(value) in (int, kind)
    is_bool = kind is bool and value in (0, 1)
    is_text = kind is str and type(value) is str
    kind_name = kind if origin else kind.__name__
    require(is_number or is_bool or is_text, f"{wrong}{kind_name}, see --show")
    if is_number:
        require(0 <= value < 2**32, f"{wrong}from 0 to 2**32 - 1")
        require(value or not positive, f"{wrong}positive")
    return kind(value)


# Old setting names, still accepted in checkpoints, logs and --set. None marks a removed (ignored)
# setting.
RENAMED = {
    "down_start": "down_init",
    "looks": "new_gates",
    "o_start": "o_init",
    "passes": "epochs",
    "prefix": "prefix_weights",
    "reads": "reads_back",
    "still": "half_rope",
    "weights": "loss_weights",
    "weights_end": "loss_weights_end",
}


def typed_fields(kind, fields: dict, name: str):
    """Build a dataclass `kind` from `fields`. Missing fields (in old checkpoints) get their
    defaults.

    Raise UserError for unknown fields, and for missing fields without a default."""
    kinds = typing.get_type_hints(kind, include_extras=True)
    fields = {RENAMED.get(field, field): value for field, value in fields.items()}
    fields.pop(None, None)
    unknown = [f"{field}={value!r}" for field, value in fields.items() if field not in kinds]
    of_other = f"settings of another train_gpt.py ({', '.join(unknown)})"
    require(not unknown, f"{of_other}: use that file, which is in the run's log.txt")
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in fields:
            value = fields[field.name]
            values[field.name] = typed(kinds[field.name], value, f"{name}.{field.name}".strip("."))
        else:
            has_default = field.default is not dataclasses.MISSING
            require(has_default, f"{name}: {field.name} is missing, and has no default")
    return kind(**values)


def override(cfg: Config, items: list[str]) -> Config:
    """Apply the KEY=VALUE `items` of --set to a config.

    Keys can be nested: stages.1.windows, or stages.*.windows for all stages. An index one past the
    last stage first appends a copy of the last stage. `without` disables additional ideas by
    applying their settings from IDEAS."""
    return validate(with_settings(cfg, items))


def with_settings(cfg: Config, items: list[str]) -> Config:
    """Apply `items` without validating the result."""
    fields = dataclasses.asdict(cfg)
    for item in items:
        require("=" in item, f"--set {item}: write KEY=VALUE; texts and presets go before --set")
        key, _, text = item.partition("=")
        if key == "without":
            for setting in leave_out(text):
                set_fields(fields, *setting.split("="))
            before = fields["without"].split(",")
            both = [name for name in dict.fromkeys([*before, *text.split(",")]) if name]
            if "all" in both:
                both = ["all", *(name for name in both if name in PLAIN_HAS)]
            text = ",".join(both)
        try:
            set_fields(fields, key, text)
        except (LookupError, TypeError, ValueError):
            similar = ", ".join(similar_settings(key)) or "none"
            numbers = "--show prints all; N counts from 0, * stands for all"
            unknown = f"unknown key {key!r}; similar: {similar}; {numbers}"
            raise UserError(f"--set {item}: {unknown}") from None
    return typed(Config, fields)


def leave_out(names: str) -> list[str]:
    """Return the settings for `without=names`."""
    chosen = [name for name in names.split(",") if name]
    if "all" in chosen:
        chosen.remove("all")
        chosen += [name for name in IDEAS if name not in PLAIN_HAS]
    unknown = [name for name in chosen if name not in IDEAS]
    require(not unknown, f"without={names}: it must be all, or a list of {', '.join(IDEAS)}")
    return " ".join(IDEAS[name] for name in chosen).split()


def set_fields(fields: dict, key: str, text: str):
    """Set `key` in the config dict `fields`. Raise LookupError, TypeError or ValueError if the key
    does not exist."""
    *path, name = key.split(".")
    name = RENAMED.get(name, name)
    holders = [fields]
    if path:
        table, number = path
        if key.startswith(f"stages.{len(fields['stages'])}."):
            last = fields["stages"][-1]
            fields["stages"] += ({**last},)
        holders = fields[table] if number == "*" else [fields[table][int(number)]]
    for holder in holders:
        is_text = isinstance(holder[name], str)
        holder[name] = text if is_text else literal(text)


def literal(text: str):
    """Parse `text` as a Python literal or a JSON boolean; otherwise return `text` itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return {"true": True, "false": False}.get(text, text)


# Other trainers' names for common settings:
FOREIGN = {
    "batch_size": ["stages.*.batch_tokens"],
    "block_size": ["stages.*.row_tokens"],
    "eval_interval": ["val_every"],
    "learning_rate": ["lr_anvil", "lr_adam"],
    "lr": ["lr_anvil", "lr_adam"],
    "max_iters": ["steps"],
    "n_embd": ["width"],
    "save_interval": ["checkpoint_every"],
    "weight_decay": ["decay_anvil", "decay_adam"],
}


def similar_settings(key: str) -> list[str]:
    """Return up to six settings the user may have meant by an unknown `key`: its equivalents in
    FOREIGN, or settings with similar names or names that contain the key."""
    name = key.rpartition(".")[2].replace("-", "_").lower()
    if name in FOREIGN:
        return FOREIGN[name]
    keys = [*Config.__dataclass_fields__]
    keys += [f"stages.N.{field}" for field in Stage.__dataclass_fields__]
    keys += [f"layers.N.{field}" for field in Layer.__dataclass_fields__]
    similar = difflib.get_close_matches(re.sub(r"\.(\d+|\*)\.", ".N.", key), keys, cutoff=0.75)
    similar += [x for x in keys if name and name in x and x not in similar]
    return similar[:6]


def as_setting(word: str) -> str:
    """Return the --set option the user probably meant by NAME=VALUE, or ""."""
    name, _, value = word.lstrip("-").partition("=")
    if name in ("accelerator", "device", "platform"):
        return "JAX_PLATFORMS=cpu (or cuda, tpu) before the command"
    keys = similar_settings(name)
    if keys not in FOREIGN.values():
        keys = keys[:1]
    settings = [shlex.quote(f"{key}={value or '...'}") for key in keys]
    return " ".join(["--set", *settings]) if keys else ""


PRESETS["plain"] = override(PRESETS["tiny"], ["preset=plain", "without=all", "target=0"])


# ---- Data folders: locations of shards, and the tools that make them ----------------------------

# JSON file with the settings encoding, real_tokens and bos, next to shards made from a text or with
# a custom tokenizer.
DESCRIPTION = "dataset.json"


def settings_for(texts: list[str], val: list[str], name: str, given: list[str]) -> tuple:
    """Return (settings to add to the `given` ones, description of the validation data) for training
    the preset or run `name` on `texts`.

    Tokenize `texts` and the validation texts `val`, unless `texts` is a directory of shards."""
    paths = [data_place(text) for text in texts]
    folder = paths[0]
    has_shards = any(folder.glob("*.bin"))
    if has_shards and not (folder / DESCRIPTION).exists():
        require(not val, f"{folder} contains validation shards: --val requires a text to train on")
        return [f"data={folder.resolve()}"], "its shards"
    apart = ["--val", *map(data_place, val)] if val else []
    printed = run_tool("tokenize_text.py", *paths, *apart, "--for", name, "--set", *given)
    last_line = printed.splitlines()[-1]  # sitecustomize may print other lines
    _, settings, validation = json.loads(last_line)
    return settings, validation


def data_folder(cfg: Config, say: Callable = print) -> Path:
    """Return the directory of the run's shards. Make the demo corpus if it is missing."""
    folder = data_place(cfg.data)
    if folder.resolve() == demo_folder().resolve():
        files = "*_train_*.bin", "*_val_*.bin", MERGES
        if not all(any(folder.glob(name)) for name in files):
            require(can_write(folder), f"{folder} is not writable for the demo corpus: pass a text")
            say(f"making the demo corpus in {folder}")
            run_tool("builtin_corpus.py", folder)
    fix = "pass --data TEXT with the same text, or train on another: --start RUN_DIR --data TEXT"
    if cfg.data == Config.data:
        fix = "run data/cached_fineweb10B.py, or pass --data DIR"
    require(folder.is_dir(), f"no folder {folder}: {fix}")
    shards = filter(None, map(SHARD_NAME.fullmatch, os.listdir(folder)))
    sets = sorted({shard[1] for shard in shards})
    several = f"{folder} holds several data sets ({', '.join(sets)})"
    require(len(sets) < 2, f"{several}: give each its own folder")
    return folder


def data_place(data: str) -> Path:
    """Resolve `data` relative to the current directory, or else to this file's directory. The demo
    corpus may also be in the cache (see demo_folder)."""
    here = Path(os.path.expanduser(data))
    if not here.exists() and data == PRESETS["tiny"].data:
        return demo_folder()
    return here if here.exists() else Path(__file__).resolve().parent / data


def demo_folder() -> Path:
    """Return the demo corpus directory: next to this file, or in the cache if this file's directory
    is read-only."""
    folders = [Path(__file__).resolve().parent / PRESETS["tiny"].data]
    if cache := user_cache():
        folders.append(cache / "builtin")
    found = (folder for folder in folders if os.path.exists(folder) or can_write(folder))
    return next(found, folders[0])


def can_write(folder: Path) -> bool:
    """Return whether `folder`, which need not exist yet, is writable."""
    existing = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    return os.path.isdir(existing) and os.access(existing, os.W_OK)


def user_cache() -> Path | None:
    """Return the cache directory, in $XDG_CACHE_HOME or ~/.cache; None if there is no home."""
    place = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if place == "~/.cache" else Path(place, "train_gpt")


def run_tool(name: str, *args) -> str:
    """Run the tool data/`name` in a subprocess (tools import this file) and return its stdout.

    Raise UserError if the tool is missing, is killed or fails. A failing tool prints its own error
    message, so the UserError is empty."""

    def end(number, frame):  # makes subprocess.run kill the tool
        raise SystemExit(128 + number)

    tool = Path(__file__).resolve().parent / "data" / name
    require(tool.exists(), f"no {tool}: copy the directory data/ too, or pass --data DIR")
    before = signal_handlers()
    deadly = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    set_handlers({number: end for number in deadly if before[number] == signal.SIG_DFL})
    try:
        done = subprocess.run([sys.executable, tool, *args], stdout=subprocess.PIPE, text=True)
    finally:
        set_handlers(before)
    killed = f"data/{name} was killed (signal {-done.returncode})"
    if done.returncode == -signal.SIGKILL:
        killed += ", probably for lack of memory: use less text, or make the tokens on a larger"
        killed += " machine (data/tokenize_text.py TEXT --out DIR) and use --data DIR"
    require(done.returncode >= 0, killed)
    require(done.returncode == 0, "")
    return done.stdout


# ---- Command line -------------------------------------------------------------------------------


def show(cfg: Config) -> str:
    """Return the output of --show: settings, layers, parameters, stages and totals."""
    lines = []
    for name, value in dataclasses.asdict(cfg).items():
        if name not in ("layers", "stages"):
            lines.append(f"{name} = {value!r}")
    lines += [f"layers.{i} = {layer}" for i, layer in enumerate(cfg.layers)]
    numbers = 0
    for name, spec in param_specs(cfg).items():
        size = math.prod(spec.shape)
        numbers += size
        learns = f"{spec.updated_by} lr {spec.lr:.3g} decay {spec.decay:.3g} betas {spec.betas}"
        lines.append(f"{name:13} {spec.shape!s:>18} {size:14,}  {learns}")
    rates = schedule(cfg).hyper.lr
    flops = 0.0
    for i, stage in enumerate(cfg.stages):
        first, end = cfg.boundaries[i : i + 2]
        lr = f"lr {rates[first]:.3g} to {rates[end - 1]:.3g}"
        lines.append(f"steps {first} to {end - 1}, {lr}: stages.{i} = {stage}")
        flops += sum(flops_per_token(cfg, step) for step in range(first, end)) * stage.batch_tokens
    tokens = cfg.tokens_after(cfg.steps)
    totals = f"{numbers:,} numbers, {cfg.steps} steps, {tokens:,} tokens"
    lines.append(f"{totals}, {flops:.3e} model FLOPs")
    return "\n".join(lines)


def command_for(script, *words) -> str:
    """Return a shell command that runs `script` with this Python, from the current directory."""
    name = Path(sys.executable).name
    found = shutil.which(name) or ""
    # Do not resolve symlinks: in a virtual environment, `python` links to the system's Python.
    same = os.path.abspath(found) == os.path.abspath(sys.executable)
    python = name if same else sys.executable
    return shlex.join([python, os.path.relpath(script), *map(str, words)])


def tell(line, stream=None):
    """Print a line. On terminals, lines that end with a carriage return get overwritten. A closed
    terminal or a full disk does not stop the run."""
    stream = stream or sys.stdout
    try:
        stays = not str(line).endswith("\r")
        end = "\n" if stays or not (stream and stream.isatty()) else ""
        print(line, end=end, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError):  # otherwise flushing at exit fails
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserErrors and suggests settings for unknown options."""

    def error(self, message):
        if "unrecognized" in message and "--set" in self.format_usage():
            options = [word for word in message.split() if word.startswith("-")]
            hints = filter(None, map(as_setting, options))
            message = "; did you mean ".join([message, *hints])
        raise UserError(f"{message} (see --help)")


def add_config_options(parser: argparse.ArgumentParser):
    """Add the arguments that `resolve` turns into a Config."""
    option = parser.add_argument
    option("words", nargs="*", metavar="PRESET|TEXT", help=f"{', '.join(PRESETS)}; default: tiny")
    several = {"nargs": "+", "action": "extend", "default": []}
    fields = "change settings: steps=500 'stages.*.batch_tokens=4096'; --show prints all"
    option("--set", **several, metavar="KEY=VALUE", help=fields)
    data = "folder of token shards; texts, folders of texts"
    option("--data", **several, metavar="DIR|TEXT", help=data)
    option("--val", **several, metavar="TEXT", help="texts for validation only")
    option("--seed", type=int, metavar="N", help="seed of the parameters, and of samples")


class ConfigArgs(NamedTuple):
    """Arguments that determine the Config."""

    preset: str  # "" if not given
    places: list[str]  # shard directories or texts
    val: list[str]  # validation texts
    settings: list[str]  # KEY=VALUE

    @property
    def keys(self) -> set[str]:
        """The keys in `settings`."""
        return {setting.partition("=")[0] for setting in self.settings}


def config_args(args) -> ConfigArgs:
    """Collect ConfigArgs from parsed arguments. Raise UserError for unknown presets and files."""
    settings = list(args.set)
    if args.seed is not None:
        settings.append(f"seed={args.seed}")
    data = args.data + [x.removeprefix("data=") for x in settings if x.startswith("data=")]
    settings = [x for x in settings if not x.startswith("data=")]
    presets = [word for word in args.words if word in PRESETS]
    require(len(presets) < 2, f"more than one preset: choose {' or '.join(presets)}")
    places = [word for word in args.words if word not in PRESETS] + data
    require(places or not args.val, "--val requires a text to train on: name it first")
    for place in places + args.val:
        if place and data_place(place).exists():
            continue
        setting = as_setting(place) if "=" in place else ""
        require(not setting, f"{place} is not a text: for a setting write {setting}")
        missing = f"{place or repr(place)} does not exist"
        if not presets and place not in data + args.val:  # it may be a misspelled preset
            known = f"unknown preset {place!r} (choose from {', '.join(PRESETS)})"
            missing = f"{known}, and {missing}"
        raise UserError(missing)
    asked = ConfigArgs("".join(presets), places, args.val, settings)
    require("preset" not in asked.keys, "--set preset= changes only a name: write the preset first")
    return asked


def resolve(args, say: Callable = tell, start: Saved | None = None) -> Config:
    """Return the Config for parsed arguments, based on a preset or on the checkpoint `start`.
    Tokenize any texts and add their settings."""
    asked = config_args(args)
    require("start" not in asked.keys, "--set start=: use --start RUN_DIR")
    name = asked.preset or "tiny"
    if start:
        of_run = asked.preset == "" and "seed" not in asked.keys
        require(of_run, "--start uses the model of the run: drop PRESET and seed")
        name = str(start.run_dir)
        base = dataclasses.replace(start.cfg, start=str(start.folder), devices=0)
    else:
        base = PRESETS[name]
    settings = asked.settings
    if asked.places:
        with_settings(base, settings)  # fail on typos before the slow tokenization
        of_data, validation = settings_for(asked.places, asked.val, name, settings)
        settings = of_data + settings
        say(f"data of your own, with validation on {validation}: {shlex.join(of_data)}")
    cfg = override(base, settings)
    same = not start or shapes_of(cfg) == shapes_of(base)
    require(same, "--start uses the model of the run: drop settings of sizes")
    return cfg


def shapes_of(cfg: Config) -> dict[str, tuple[int, ...]]:
    """Return each parameter's shape, by name."""
    return {name: spec.shape for name, spec in param_specs(cfg).items()}


def resume_config(asked: ConfigArgs, saved: Saved) -> Config:
    """Return the Config of a resumed run. Raise UserError if the run is already finished."""
    done = saved.step == saved.cfg.steps
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # damaged run.json
        facts = json.loads((saved.run_dir / "run.json").read_text())
        done |= facts["finished"] and "missing" not in facts
    again = command_for(__file__, "--start", saved.run_dir, "--set", "steps=N")
    longer = f"to train longer, {again}"
    require(not done, f"{saved.run_dir} is finished: there is nothing to resume; {longer}")
    settings = asked.settings
    if asked.places:  # the data may have moved
        with_settings(saved.cfg, settings)
        of_data, _ = settings_for(asked.places, asked.val, str(saved.run_dir), [])
        settings = of_data[:1] + settings
    devices = saved.cfg.devices
    if devices > len(all_devices()):
        devices = 0
    return override(saved.cfg, [f"devices={devices}", *settings])


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    about = (__doc__ or "").split("\n")[0]  # python -OO removes docstrings
    parser = Parser(prog="train_gpt.py", description=about, allow_abbrev=False)
    add_config_options(parser)

    def path(text):  # shells do not expand ~ in --out=~/runs
        return Path(text).expanduser()

    option = parser.add_argument
    option("--out", type=path, metavar="DIR", default="logs", help="runs go to DIR/<run id>/")
    option("--show", action="store_true", help="print settings, parameters and stages, then exit")
    option("--resume", type=path, metavar="RUN_DIR", help="a run, or RUN_DIR/checkpoints/STEP")
    option("--start", type=path, metavar="RUN_DIR", help="train the parameters of another run")
    option("--cache", metavar="DIR", help="folder for compiled programs; off: none")
    found = "one of several processes: the others are found (TPU slice, Slurm, Open MPI)"
    option("--distributed", action="store_true", help=found)
    option("--coordinator", metavar="HOST:PORT", help="the same: address of the first process")
    option("--processes", type=int, metavar="N", help="with --coordinator: their number")
    option("--process-id", type=int, metavar="I", help="with --coordinator: 0 to N-1")
    version = f"train_gpt.py {VERSION}, source {source_sha256()[:12]}, jax {jax.__version__}"
    option("--version", action="version", version=version, help="print the versions, then exit")
    return parser.parse_args(argv)


def check_resume(args, asked: ConfigArgs):
    """Raise UserError if --resume is combined with options that change the recipe."""
    kinds = Config.__annotations__.items()
    machine = [name for name, kind in kinds if kind.startswith("Machine")]
    changes = asked.preset or args.show or args.start or asked.keys - {*machine}
    drop = f"drop PRESET, --seed, --show, --set but for {', '.join(machine)}, and --start"
    instead = f"for a new run with its parameters: --start {args.resume}"
    require(not changes, f"--resume uses the config of the run: {drop}; {instead}")


def keep_programs(cache: str | None):
    """Enable JAX's compilation cache in the directory `cache` ("off" disables it). By default, use
    JAX_COMPILATION_CACHE_DIR or the user's cache."""
    if cache or "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = None
        if cache != "off":
            folder = Path(cache).expanduser() if cache else user_cache()
        if folder:
            trim_cache(folder)
        jax.config.update("jax_compilation_cache_dir", folder and str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


CACHE_BYTES = 10 * 2**30  # size limit of the compilation cache


def trim_cache(folder: Path):
    """Delete the least recently used programs until at most CACHE_BYTES remain. (JAX's own cache
    eviction needs the filelock package.)"""
    files = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(OSError):  # deleted by another process
            facts = path.stat()
            files.append((max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > CACHE_BYTES:
            path.unlink(missing_ok=True)


# CUDA 13 and cuDNN 9.11+ do not support GPUs older than Turing.
FOR_OLD_GPUS = "'jax[cuda12]' 'nvidia-cudnn-cu12<9.11'"


def check_hardware(cfg: Config):
    """Raise UserError if the preset needs an accelerator and JAX sees none, or if the GPU is too
    old for the installed CUDA. Run a trivial program to detect mismatched CUDA libraries."""
    device = jax.local_devices()[0]
    if device.platform == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        fix = "pip install 'jax[tpu]', or 'jax[cuda13]' (driver below 580: cuda12; V100, P100:"
        fix += f" {FOR_OLD_GPUS}); end other processes that use it (a notebook)"
        needs = f"{cfg.preset} needs an accelerator, and JAX sees only CPUs"
        require(cfg.preset not in LARGE, f"{needs}: {fix}; JAX_PLATFORMS=cpu uses CPUs")
    too_old = 0 < capability(device) < 7.5 and "cuda 13" in device.client.platform_version
    old = f"jax[cuda13] does not support {device.device_kind}"
    require(not too_old, f"{old}: pip install {FOR_OLD_GPUS} in a new environment")
    jax.block_until_ready(jnp.arange(2.0) + 1)


def suggest_next(say: Callable):
    """Suggest the next command: train on a text, or run `speedrun` if it fits in memory."""
    say(f"next, a text of your own: {command_for(__file__)} TEXT")
    tool = records_tool("fit.py")
    if not tool or jax.default_backend() == "cpu":
        return
    try:
        command, note = tool["command_that_fits"]("speedrun", [])
    except UserError as error:  # it does not fit
        say(error)
        return
    download = command_for(Path(__file__).with_name("data") / "cached_fineweb10B.py", 9)
    say(f"or speedrun: pip install huggingface_hub && {download} && {command} ({note})")


def run(argv: list[str], command: str):
    """Run the command line `argv`. The log shows it as `command`."""
    args = parse(argv)
    asked = config_args(args)
    if args.resume:
        check_resume(args, asked)
    keep_programs(args.cache)
    while os.open(os.devnull, os.O_RDWR) < 3:  # keep log.txt off a closed stdout's descriptor
        pass
    if not args.show:
        join_processes(args)
    all_devices()  # report backend errors early
    say = tell if jax.process_index() == 0 else lambda line: None
    if args.resume:
        saved = checkpoint_to_resume(args.resume, say)
        cfg = resume_config(asked, saved)
    else:
        saved = None
        start = find_checkpoint(args.start, say) if args.start else None
        cfg = resolve(args, say, start)
    if args.show:
        tell(show(cfg))
        if jax.default_backend() != "cpu":
            tell(check_memory(*make_mesh(cfg)))
        return
    check_hardware(cfg)
    train(cfg, Path(args.out), command, saved, say)
    if not (asked.preset or asked.places or args.resume or args.start):
        suggest_next(say)


def report_errors(do: Callable) -> int:
    """Call do() and return its exit status. For errors that the user can fix, print one line and
    return 2."""
    if hasattr(sys.stdout, "reconfigure"):  # the terminal may not support all characters
        sys.stdout.reconfigure(errors="replace")
    jax.config.update("jax_enable_x64", False)  # overrides JAX_ENABLE_X64: arrays are float32
    jax.config.update("jax_disable_jit", False)  # overrides JAX_DISABLE_JIT: programs are compiled
    before = signal_handlers()
    try:
        # Until training starts, Ctrl-C kills the command: Python does not run signal handlers while
        # XLA compiles. Notebooks (ps1) and other threads keep their handlers.
        in_thread = threading.current_thread() is not threading.main_thread()
        is_command = not (hasattr(sys, "ps1") or in_thread)
        if is_command and before[signal.SIGINT] is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return do() or 0
    except Exception as error:
        line = message_for(error)
        if line is None:  # a bug
            raise
    finally:
        set_handlers(before)
    if line:
        tell(f"error: {' '.join(line.split())}", sys.stderr)
    if jax.distributed.is_initialized():  # otherwise JAX waits for the other processes
        os._exit(2)
    return 2


def message_for(error: Exception) -> str | None:
    """Return the message for an error that the user can fix, or None for a bug."""
    text = str(error)
    if isinstance(error, UserError | OSError):
        return text
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        ways = "--set recompute=1, a smaller micro_tokens or ngram_rows, or more devices"
        if jax.default_backend() == "gpu":
            ways += "; or end other processes on the GPU (nvidia-smi lists them), choose another by"
            ways += " CUDA_VISIBLE_DEVICES, or share it by XLA_PYTHON_CLIENT_MEM_FRACTION"
        return f"out of memory: use {ways}: {text}"
    if re.search("DNN library initialization|B(LAS|las) support|lib(cudnn|cublas|cusolver)", text):
        path = os.environ.get("LD_LIBRARY_PATH")
        fix = f"use a new environment (for V100, P100: {FOR_OLD_GPUS})"
        if path:
            fix = f"unset LD_LIBRARY_PATH ({path}), which leads to other libraries, or {fix}"
        return f"JAX cannot use its CUDA libraries: {fix}: {text}"
    if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
        return f"another process has ended or cannot be reached: see its output ({text})"
    return None


def main(argv=None) -> int:
    """Run the command line (pass `argv` if this file is imported) and return the exit status."""
    is_script = argv is None and __name__ == "__main__"
    words = sys.argv[1:] if is_script else argv or []
    command = shlex.join(["python", "train_gpt.py", *words])
    return report_errors(lambda: run(words, command))


# ================================================================================================
# PART V: FAST ON HARDWARE
# ================================================================================================

# ---- Compilation, before the clock starts -------------------------------------------------------


def compile_all(cfg: Config, mesh: Mesh, kernels: Kernels, say: Callable = print):
    """Compile all programs in parallel and return ({key: executable}, {name: seconds}). Raise
    UserError if a program needs too much memory."""
    every = programs(cfg, mesh, kernels)
    ready = itertools.count(1)

    def build(key, lowered):
        began = time.perf_counter()
        program = compile_one(cfg, mesh, key, lowered)
        seconds = round(time.perf_counter() - began, 3)
        size = resident_bytes(cfg, mesh, key) + program.memory_analysis().peak_memory_in_bytes
        refusal = memory_refusal(cfg, mesh, str(key), size, memory_limit(mesh))
        require(not refusal, refusal)
        say(f"{next(ready)} of {len(every)} programs are ready\r")
        return program, seconds

    say(f"compiling {len(every)} programs; this takes minutes on accelerators\r")
    pool = ThreadPoolExecutor(cpu_cores())
    try:
        built = {key: pool.submit(build, key, x.lower()) for key, x in every.items()}
        for future in as_completed(built.values()):
            future.result()  # raises the first error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    compiled, seconds = {}, {}
    for key, future in built.items():
        compiled[key], seconds[str(key)] = future.result()
    return compiled, seconds


# Collective names in compiler options. The last two are used only with more than eight chips.
OFFLOADED = "all_gather", "reduce_scatter", "dense_all_to_all", "2d_all_gather", "nd_reduce_scatter"


def compiler_options(cfg: Config, backend: str) -> dict[str, bool]:
    """Return XLA compiler options. On TPUs, offload collectives and scatters to the SparseCores
    (predicted to be faster), but not gathers, which can be slower there (JAX issue 40553)."""
    if backend == "gpu":  # otherwise XLA keeps fused activations in float32
        return {"xla_allow_excess_precision": False}
    if backend != "tpu" or not cfg.sparse_cores:
        return {}
    return {
        **{f"xla_tpu_enable_sparse_core_collective_offload_{name}": True for name in OFFLOADED},
        "xla_tpu_enable_offloading_scatter_to_sparsecore": True,
        "xla_tpu_offload_gather_to_sparsecore": False,
        "xla_tpu_offload_all_supported_gathers_to_sparsecore": False,
    }


def compile_one(cfg: Config, mesh: Mesh, key, lowered):
    """Compile a lowered program, or raise UserError with a hint."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
    hint = ""
    sizes = re.search(r"\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", text)
    if sizes:
        size, limit = (float(number) * 2**30 for number in sizes.groups())
        size += resident_bytes(cfg, mesh, key)
        hint = f"{memory_refusal(cfg, mesh, str(key), size, limit)}: "
    elif "compile option" in text:
        hint = "--set sparse_cores=0 leaves out options for TPUs: "
    elif re.search("pallas|mosaic|triton", text.lower()):
        hint = "--set kernels=plain runs without kernels: "
    raise UserError(f"{key} cannot be compiled: {hint}{text}")


def warm_up(cfg: Config, mesh: Mesh, kernels: Kernels, compiled: dict):
    """Run every program once on zeros to keep first-call overhead out of the timed run."""
    every = programs(cfg, mesh, kernels)
    for key, program in compiled.items():
        layout = every[key].args
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), layout)
        jax.block_until_ready(program(*created_sharded(zeros, layout)()))


# ---- Programs: arguments, results and their layouts ---------------------------------------------

# A layout is a pytree of jax.ShapeDtypeStruct: shapes, dtypes and shardings without arrays.


def abstract(mesh: Mesh, shape, dtype, *axes) -> jax.ShapeDtypeStruct:
    """Return the layout of an array sharded over mesh `axes`."""
    sharding = NamedSharding(mesh, P(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def created_sharded(make: Callable, layout) -> Callable:
    """Jit `make` so that each device creates only its own shards of the result."""
    shardings = jax.tree.map(lambda x: x.sharding, layout)
    return jax.jit(make, out_shardings=shardings)


@functools.cache
def abstract_state(cfg: Config, mesh: Mesh):
    """Return the training state layout."""

    def leaf(shape, dtype, spec):
        if not spec.sharded:
            return abstract(mesh, shape, dtype)
        rows = -(-shape[0] // mesh.size) * mesh.size  # padded to a multiple of the device count
        return abstract(mesh, (rows, *shape[1:]), dtype, AXIS)

    return map_state(cfg, leaf)


def start_state(cfg: Config, mesh: Mesh) -> Callable:
    """Return a jitted init_state that takes a seed. Only the padding depends on the mesh."""
    layout = abstract_state(cfg, mesh)

    def state(seed):
        unpadded = init_state(cfg, seed)
        return jax.tree.map(lambda x, padded: pad_rows(x, len(padded)), unpadded, layout)

    return created_sharded(state, layout)


def pad_rows(x, rows: int):
    """Zero-pad `x` to `rows` rows."""
    if len(x) == rows:
        return x
    other_axes = [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, [(0, rows - len(x)), *other_axes])


@functools.cache
def abstract_copies(cfg: Config, mesh: Mesh) -> dict:
    """Return the layout of first_copies: banks are sharded, everything else is replicated."""
    params = abstract_state(cfg, mesh)["params"]
    shapes = jax.eval_shape(functools.partial(first_copies, cfg), params, 0)
    banks = updated(cfg, "anvil")

    def like(path, x):
        axes = [AXIS] if path[0].key in banks else []
        return abstract(mesh, x.shape, x.dtype, *axes)

    return jax.tree.map_with_path(like, shapes)


def start_copies(cfg: Config, mesh: Mesh) -> Callable:
    """Return a jitted first_copies that takes (parameters, seed)."""
    return created_sharded(functools.partial(first_copies, cfg), abstract_copies(cfg, mesh))


def first_copies(cfg: Config, params, seed):
    """Return the compute copies, plus the n-gram signs, which updates never change."""
    copies = compute_copies(cfg, params)
    if cfg.signed:  # "Hashed n-gram table"
        copies["signs"] = sign_pool(cfg, seed)
    return copies


@dataclass(frozen=True)
class Program:
    """Everything needed to compile a step. The devices in the mesh need not exist."""

    name: str  # shown in the log and in traces
    mesh: Mesh
    step: Callable
    get_args: Callable  # returns the argument layouts
    out: tuple  # PartitionSpec per result; one spec can cover a whole pytree
    donates: tuple = ()  # indices of arguments whose memory the results may reuse
    options: dict = dataclasses.field(default_factory=dict)  # compiler options

    @functools.cached_property
    def args(self) -> tuple:
        """The argument layouts."""
        return self.get_args()

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The traced step. Tracing takes seconds."""
        specs = {"in_specs": specs_of(self.args), "out_specs": self.out}
        step = shard_map(self.step, mesh=self.mesh, check_vma=False, **specs)
        step.__name__ = self.name
        step = jax.jit(step, donate_argnums=self.donates, compiler_options=self.options)
        return step.trace(*self.args)

    def lower(self) -> jax.stages.Lowered:
        """Return the lowered step, ready to compile."""
        return self.traced.lower()

    @functools.cached_property
    def results(self) -> tuple:
        """The result layouts."""

        def with_sharding(spec, result):
            return jax.tree.map(lambda x: abstract(self.mesh, x.shape, x.dtype, *spec), result)

        return jax.tree.map(with_sharding, self.out, self.traced.out_info)


def specs_of(layout):
    """Return the PartitionSpec of each array in a layout."""
    return jax.tree.map(lambda x: x.sharding.spec, layout)


@functools.cache
def programs(cfg: Config, mesh: Mesh, kernels: Kernels) -> dict:
    """Return a run's Programs by key (Gradients, Update, "finish" or "eval")."""
    state = abstract_state(cfg, mesh)
    copies = abstract_copies(cfg, mesh)
    options = compiler_options(cfg, mesh.devices.flat[0].platform)
    built = {}
    of_stage = {}  # stage index -> one of its gradient programs

    def add(key, step: Callable, get_args: Callable, out: tuple, donates=()):
        built[key] = Program(str(key), mesh, step, get_args, out, donates, options)

    def model_args(key) -> tuple:
        batch = abstract_batch(cfg, mesh, *batch_shape(cfg, key))
        return copies, state["params"].get(NGRAMS), batch

    gradients_first = sorted(keys_of_steps(cfg), key=lambda key: isinstance(key, Update))
    for key in gradients_first:
        if isinstance(key, Gradients):
            step = functools.partial(grads_step, cfg, kernels, cfg.stages[key.stage])
            add(key, step, functools.partial(model_args, key), (P(AXIS), P(), P()))
            of_stage[key.stage] = built[key]
        else:
            update = update_step
            if key.tied:  # "Table updates, and tied embeddings"
                update = tied_update
            step = functools.partial(update, cfg, kernels)
            get_args = functools.partial(update_args, cfg, mesh, key, of_stage)
            changed = {name: copies[name] for name in updated(cfg, key.kind) if name != NGRAMS}
            add(key, step, get_args, (specs_of(state), specs_of(changed), P()), donates=(0,))
    changed = {name: x for name, x in copies.items() if name != "signs"}
    out = specs_of(state), specs_of(changed)
    add("finish", functools.partial(finish_step, cfg), lambda: (state,), out, donates=(0,))
    step = functools.partial(eval_step, cfg, kernels)
    add("eval", step, functools.partial(model_args, "eval"), (P(), P()))
    return built


def keys_of_steps(cfg: Config) -> list[Gradients | Update]:
    """Return the keys of all training programs, in order of first use."""
    return list(dict.fromkeys(itertools.chain(*schedule(cfg).programs)))


def keys_of_programs(cfg: Config) -> list[Gradients | Update | str]:
    """Return the keys of all programs of a run: training steps, then "finish" and "eval"."""
    return [*keys_of_steps(cfg), "finish", "eval"]


def batch_shape(cfg: Config, key: Gradients | str) -> tuple:
    """Return a program's batch shape: (rows, tokens per row, candidates per row)."""
    if key == "eval":
        return cfg.val_batch // cfg.val_row, cfg.val_row, 0
    stage = cfg.stages[key.stage]
    return stage.rows, stage.row_tokens, key.candidates


def update_args(cfg: Config, mesh: Mesh, update: Update, of_stage: dict) -> tuple:
    """Return the argument layouts of an update program. `of_stage` comes from `programs`."""
    any_stage = min(of_stage)  # only n-gram gradient layouts differ between stages
    stages = update.stages or (any_stage,) * update.steps
    grads = [of_stage[stage].results[0] for stage in stages]
    due = {}
    for name in updated(cfg, update.kind):
        due[name] = tuple(of_step[name] for of_step in grads)
    return abstract_state(cfg, mesh), due, abstract_hyper(cfg, mesh)


def abstract_hyper(cfg: Config, mesh: Mesh) -> Hyper:
    """Return the Hyper layout."""
    return jax.tree.map(lambda x: abstract(mesh, x.shape, x.dtype), hyper_at(cfg, 0))


def abstract_batch(cfg: Config, mesh: Mesh, b: int, t: int, count: int) -> Batch:
    """Return the Batch layout for b rows of t tokens, with `count` candidates per row."""

    def by_rows(dtype, *shape):
        return abstract(mesh, shape, dtype, AXIS)

    hyper = abstract_hyper(cfg, mesh)
    targets = by_rows(jnp.int32, b, t)
    all_targets = Targets(by_rows(jnp.int32, b, count), targets, targets)
    rows = Rows(by_rows(jnp.uint16, b, t + 1), None, None, all_targets)
    if not cfg.ngram_rows:
        return Batch(rows, None, hyper)
    # "Hashed n-gram table"
    rows = rows._replace(hashed=by_rows(jnp.uint16, b, t), slots=by_rows(jnp.int32, b, 2, t))
    room = capacity(b * t, mesh.size)
    return Batch(rows, by_rows(jnp.int32, mesh.size, mesh.size, room), hyper)


# ---- Collectives: all-gather and reduce-scatter, arranged for XLA -------------------------------


def gather_banks(cfg: Config, copies, after):
    """All-gather the banks while the model computes (FSDP, Zhao et al. 2023). Return (`after`,
    copies with full banks as lists of matrices, function that reduce-scatters bank gradients).
    The MLP bank is gathered in pieces (one matrix per device), so that the first layers need not
    wait for the whole bank."""
    banks = {name: copies[name] for name in copies if name in updated(cfg, "anvil")}
    # XLA starts collectives as early as possible. Delay the all-gathers until `after` is ready.
    after, banks = lax.optimization_barrier((after, banks))

    def gather(name, bank):  # returns matrices in full-bank order
        pieces = matrices_of(bank) if name == "mlp_bank" else [bank]
        gathered = [matrices_of(GATHER(piece)) for piece in pieces]
        by_device = zip(*gathered, strict=True)
        return [matrix[0] for matrix in itertools.chain(*by_device)]

    def gather_all(banks):
        return {name: gather(name, bank) for name, bank in banks.items()}

    gathered, transpose = jax.vjp(gather_all, banks)  # all-gather transposes to reduce-scatter
    return after, copies | gathered, lambda grads: transpose(grads)[0]


@jax.custom_vjp
def matrices_of(bank):
    """Split a bank into matrices [1, rows, d]. Without join_matrices, XLA pads each slice's
    gradient to the full bank size before summing."""
    return lax.split(bank, (1,) * len(bank))


def join_matrices(_, grads):
    """Return the bank gradient. On GPUs, copying each matrix while the next ones are computed saves
    0.2 ms per step (calculated)."""
    if compiled_for() != "gpu":
        return (lax.concatenate(grads, 0),)
    bank = lax.empty((len(grads), *grads[0].shape[1:]), grads[0].dtype)
    for i, matrix in enumerate(grads):
        bank = lax.dynamic_update_slice(bank, matrix, (i, 0, 0))
    return (bank,)


matrices_of.defvjp(lambda bank: (matrices_of(bank), None), join_matrices)


def reduce_scatter(arrays: tuple, dtype):
    """Sum `arrays` [rows, d] over all devices and return this device's rows, padded to a multiple
    of the device count. Each device sums in float32 and rounds to `dtype` before sending. The sum
    is sent in the fewest parts (up to eight) that fit the SparseCores, or in one if none fit."""
    devices = lax.axis_size(AXIS)
    rows = -(-len(arrays[0]) // devices)
    row_bytes = arrays[0][0].size * dtype.itemsize

    def fits(parts: int) -> bool:
        # v6e SparseCores send at most 13 MB, in multiples of 32 rows (from compiled programs).
        return rows % (32 * parts) == 0 and rows // parts * row_bytes <= 13e6

    parts = next(filter(fits, range(1, 9)), 1)

    def split(x):
        return pad_rows(x, rows * devices).reshape(devices, parts, -1, *x.shape[1:])

    # Slice before summing: slicing the full sum takes another pass over memory (predicted: 0.2 s
    # per run on a v6e-8).
    def total(part: int):
        return sum(split(x)[:, part].astype(jnp.float32) for x in arrays).astype(dtype)

    sums = [lax.psum_scatter(total(part), AXIS) for part in range(parts)]
    return jnp.concatenate(sums)


# ---- Kernels: selection, and checks on the hardware ---------------------------------------------


def choose_kernels(cfg: Config, device) -> tuple[Kernels, str]:
    """Return the kernels for this type of device and a log message about the choice."""
    if cfg.kernels == "plain":
        return PLAIN, "plain (requested)"
    backend = device.platform
    why = why_no_kernels(cfg, device)
    why_plain = why or why_plain_attention(cfg, device)
    chosen = {}
    if cfg.logit_cap[0]:  # uncapped logits need max subtraction
        chosen["cross_entropy"] = fused_cross_entropy
        if backend == "gpu" and not why and cfg.dtype == jnp.bfloat16:
            chosen["cross_entropy"] = functools.partial(fused_cross_entropy, in_rows=True)
    if backend == "tpu" and not why:
        chosen["add_rows"] = add_rows_tpu
        if cfg.layers_with("mudd"):
            chosen["blend"] = blend_tpu
    if backend == "tpu" and not why_plain:
        chosen["attend"] = attend_tpu
    elif not why_plain:
        attend = functools.partial(attend_gpu, tiles_for(cfg, device))
        chosen["attend"] = functools.partial(attend_heads, attend)
    kernels = PLAIN._replace(**chosen)
    reason = kernel_names(kernels)
    if why_plain:
        reason += f"; plain attention: {why_plain}"
    if cfg.kernels != "auto":
        named = {name: getattr(kernels, name) for name in cfg.kernels.split(",")}
        kernels = PLAIN._replace(**named)
        reason = f"{kernel_names(kernels)}; requested: {cfg.kernels}; auto: {reason}"
    return kernels, reason


def kernel_names(kernels: Kernels) -> str:
    """Return the names of all non-plain kernels, in the format of `--set kernels=`."""
    pairs = zip(Kernels._fields, kernels, PLAIN, strict=True)
    return ",".join(name for name, kernel, plain in pairs if kernel is not plain) or "plain"


def why_no_kernels(cfg: Config, device) -> str:
    """Return the reason this type of device cannot use Pallas kernels, or "" if it can."""
    backend = device.platform
    if backend not in ("tpu", "gpu"):
        return f"there are no kernels for a {backend}"
    if backend == "gpu" and capability(device) < 8:
        return "kernels need compute capability 8.0+"
    if re.match(r"TPU v[2-4]|TPU v5p?$|TPU7", device.device_kind):
        return f"a {device.device_kind} has less than 128 MiB of VMEM"
    if backend == "tpu" and cfg.width % LANES:
        return f"the width of {cfg.width} is not a multiple of {LANES}"
    for row in (cfg.val_row, *(stage.row_tokens for stage in cfg.stages)):
        if row % 128:
            return f"rows of {row} tokens are not a multiple of 128"
    return ""


def why_plain_attention(cfg: Config, device) -> str:
    """Return the reason attention kernels cannot be used, or "" if they can."""
    h = cfg.head_width
    if not cfg.layers_with("attends"):
        return "no layer has attention"
    if not (cfg.half_rope and cfg.qk_norm) or cfg.shared:
        return "kernels need QK norm, half RoPE, and heads that do not share keys"
    if device.platform == "gpu":
        if cfg.dtype != jnp.bfloat16:
            return f"kernels compute in bfloat16, not in {cfg.compute_dtype}"
        if h not in (32, 64, 128):
            return f"kernels need heads of width 32, 64 or 128, not {h}"
    else:
        if h != LANES or cfg.heads % 2:
            return f"kernels need an even number of heads of width {LANES}, not {cfg.heads} of {h}"
        windows = [*cfg.val_windows, *itertools.chain(*(stage.windows for stage in cfg.stages))]
        longest_row = max(cfg.val_row, *(stage.row_tokens for stage in cfg.stages))
        window = min(max(windows), longest_row)
        plan = plan_for(Heads(cfg.heads, h, h, window, offset=True), BLOCK)
        if plan.ring_bytes(cfg.dtype) > 0.7 * KERNEL_VMEM:  # leaves room for blocks
            return f"a window of {window} tokens of width {cfg.width} does not fit in VMEM"
    score = np.max(schedule(cfg).hyper.scales * (h // 2, h))  # with QK norm
    if score > MAX_SCORE:
        return f"scores up to {score:.0f} could overflow without a running maximum"
    return ""


def check_kernels(cfg: Config, mesh: Mesh, kernels: Kernels, say: Callable) -> tuple[Kernels, str]:
    """Run all Trials on this process's first device (no-op on CPUs). Return `kernels` with failed
    kernels replaced by the plain versions, and a log message suffix. Raise UserError on failure if
    the settings name the kernels, or if several processes must use the same ones."""
    if mesh.devices.flat[0].platform == "cpu":
        return kernels, ""
    names = kernel_names(kernels).split(",")
    tried = [trial for trial in trials(cfg) if trial.field in names]
    with ThreadPoolExecutor(cpu_cores()) as pool:
        results = list(pool.map(lambda trial: failure(trial, cfg, kernels), tried))
    failures = {trial.field: text for trial, text in zip(tried, results, strict=True) if text}
    if not any(from_processes(len(failures))):
        return kernels, ""
    kernels = kernels._replace(**{field: getattr(PLAIN, field) for field in failures})
    line = "; ".join(failures.values())
    may_leave_out = cfg.kernels == "auto" and jax.process_count() == 1
    hint = f"use --set kernels={kernel_names(kernels)}"
    require(may_leave_out, f"kernels failed on this or another host: {line}: {hint}")
    say(f"WARNING: WRONG KERNELS ARE LEFT OUT: {line}")
    return kernels, f"; LEFT OUT: {line}"


class Trial(NamedTuple):
    """A comparison of a kernel with its plain version, on random arrays with the run's widths."""

    field: str  # kernel name in Kernels
    run: Callable  # called with the kernel and the arrays
    shapes: list[tuple]  # shapes of the first arrays, in cfg.dtype
    wide_shapes: list[tuple]  # shapes of the remaining arrays, in float32


def trials(cfg: Config) -> Iterator[Trial]:
    """Yield one Trial per kernel, and one per layer type for attention. Rows are two windows long.
    The largest micro-batch determines the row count. Documents start near block edges, shifted by
    32 tokens per row. One document is longer than a window."""
    number, stage = max(enumerate(cfg.stages), key=lambda pair: pair[1].batch_tokens)
    window_blocks = -(-max(stage.windows) // BLOCK)
    t = min(stage.row_tokens, 2 * window_blocks * BLOCK)
    rows = [rows_together(cfg, s.rows // max(cfg.devices, 1), s.row_tokens) for s in cfg.stages]
    b = min(max(rows), max(1, cfg.micro_tokens // t))
    d, n, v = cfg.width, cfg.heads, cfg.vocab
    places = jnp.arange(b * t).reshape(b, t)
    ids_bt = jnp.where(places % 4, places * 7919 % v, 0)  # scattered, plus one frequent id
    block = math.gcd(t, BLOCK)
    starts = jnp.array([block - 1, block, block + 1, t - block // 2])
    tokens_bt = jnp.arange(t)[None] + 32 * jnp.arange(b)[:, None]
    segments_bt = jnp.sum(tokens_bt[..., None] >= starts[None, None], axis=-1)

    def run_attend(heads, kernel, qkv, x, *gates_of_heads):
        added_gates, xsa, gates = (1 + x_btn / 4 for x_btn in gates_of_heads)
        freqs = yarn(cfg)[number][0][int(heads.offset)]  # long layers have the key offset
        # Scores have a standard deviation of 3, so every key matters to some query.
        scale = jnp.float32(3 / math.sqrt(heads.qk_width))
        inputs = HeadInputs((x, added_gates), xsa, gates, segments_bt, freqs, scale)
        return kernel(heads, qkv, inputs)

    def run_cross_entropy(kernel, x, head):
        targets = ids_bt[0, :, None]
        weighted, _ = kernel(0.1 * x, head, targets, jnp.ones(targets.shape), cfg)
        return weighted

    def run_add_rows(kernel, rows):  # not differentiable
        return kernel(jnp.zeros((v, d)), ids_bt, lax.stop_gradient(rows))

    def run_blend(kernel, x, *rest):
        return kernel(x, rest[-1], rest[:-1])  # weights, sources

    for heads in {heads_of(cfg, i, stage.windows) for i in cfg.layers_with("attends")}:
        qkv = b, t, n * (2 * heads.qk_width + heads.v_width)
        attend = functools.partial(run_attend, heads)
        yield Trial("attend", attend, [qkv, (b, t, d)], [(b, t, n)] * 3)
    yield Trial("cross_entropy", run_cross_entropy, [(t, d), (v, d)], [])
    yield Trial("add_rows", run_add_rows, [(b, t, d)], [])
    streams = [(b, t, d)] * 8  # x and seven sources
    yield Trial("blend", run_blend, streams, [(b, t, 7, 2 * n)])


def failure(trial: Trial, cfg: Config, kernels: Kernels) -> str:
    """Return the reason a kernel fails its Trial, or "". Re-raise out-of-memory errors.

    Errors are measured against the plain version in float32. The limit is four times its largest
    error in bfloat16, but at least four bfloat16 rounding errors. Each half of a head has
    its own limit, so that averaging cannot hide an error in one head."""
    kernel, plain = (getattr(each, trial.field) for each in (kernels, PLAIN))
    try:
        results = trial_results(trial, kernel, cfg.dtype)
    except Exception as error:  # compilers raise many exception types
        text = " ".join(str(error).split())
        on_chip = re.search("memory space [vs]mem|[Ss]hared memory", text)  # not device memory
        if isinstance(error, MemoryError) or ("RESOURCE_EXHAUSTED" in text and not on_chip):
            raise
        return f"{trial.field} cannot run ({text})"
    with jax.default_matmul_precision("highest"):
        expected = trial_results(trial, plain, jnp.float32)
    rounded = trial_results(trial, plain, jnp.bfloat16)
    columns = cfg.head_width // 2
    one_rounding = float(jnp.finfo(jnp.bfloat16).eps) / 2
    for number, (x, exact, near) in enumerate(zip(results, expected, rounded, strict=True)):
        largest = np.max(token_errors(near, exact, columns), axis=0)
        limits = 4 * np.maximum(largest, one_rounding)
        off = np.max(token_errors(x, exact, columns) / limits, axis=1)
        token = np.argmax(off)  # the first NaN, if any
        if not off[token] <= 1:
            times_limit = f"{off[token]:.2g} times the allowed error"
            return f"{trial.field} has {times_limit} in result {number}, token {token}"
    return ""


def trial_results(trial: Trial, kernel: Callable, dtype) -> list[np.ndarray]:
    """Return a kernel's output and gradients. Random inputs and the random output gradient are
    rounded to bfloat16, so their values do not depend on `dtype`."""

    def both():
        count = len(trial.shapes)
        shapes = [*trial.shapes, *trial.wide_shapes]
        arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
        rounded = [x.astype(jnp.bfloat16).astype(dtype) for x in arrays[:count]]
        y, transpose = jax.vjp(functools.partial(trial.run, kernel), *rounded, *arrays[count:])
        y_grad = jax.random.normal(jax.random.key(len(shapes)), y.shape).astype(jnp.bfloat16)
        return y, transpose(y_grad.astype(y.dtype))

    # Stop XLA from removing roundings, because `failure` measures rounding errors.
    results = jax.jit(both, compiler_options={"xla_allow_excess_precision": False})()
    return [np.atleast_1d(np.asarray(x, np.float32)) for x in jax.tree.leaves(results)]


def token_errors(x, exact, columns: int) -> np.ndarray:
    """Return the relative errors [tokens, groups] of `x` [..., features]. Groups have `columns`
    features, or one if `columns` does not divide evenly. Each error is the norm of the difference,
    divided by the token's norm or by the RMS norm over all tokens, whichever is larger."""
    group = columns if exact.shape[-1] % columns == 0 else 1
    x, exact = (y.reshape(-1, y.shape[-1] // group, group) for y in (x, exact))
    error, norms = (np.linalg.norm(y, axis=-1) for y in (x - exact, exact))
    rms = np.sqrt(np.mean(norms**2, axis=0))
    return error / np.maximum(np.maximum(norms, rms), 1e-30)


# ---- N-gram table updates in parts, with less memory --------------------------------------------


def update_in_parts(update: Callable, state: tuple, ids, order, grads: list, sizes: tuple):
    """Fold update(state, ids, gradients, count) -> state over parts of the sorted `ids`. `order`
    gives each id's position in the concatenation of `grads` (per-step gradients [n, d]). `sizes` is
    (ids per part, maximum repeats of an id)."""
    at_once, most_equal = sizes
    size = at_once + most_equal - 1  # longest possible part
    padded_ids = jnp.pad(ids, (0, size), constant_values=len(state[0]))
    padded_order = jnp.pad(order, (0, size))

    def update_next(state, part):
        first, count = part
        part_ids = lax.dynamic_slice_in_dim(padded_ids, first, size)
        part_order = lax.dynamic_slice_in_dim(padded_order, first, size)
        part_grads = rows_of_steps(grads, part_order)
        return update(state, part_ids, part_grads, count), None

    # A part ends after `at_once` ids, or later to keep equal ids together.
    last = np.arange(at_once, len(ids) + at_once, at_once) - 1
    last = np.minimum(last, len(ids) - 1)
    ends = jnp.searchsorted(ids, ids[last], side="right")
    firsts = jnp.pad(ends[:-1], (1, 0))
    after, _ = lax.scan(update_next, state, (firsts, ends - firsts))
    return after


def rows_of_steps(grads: list, places):
    """Gather the rows at `places` from the concatenation of `grads` (per-step gradients [n, d]),
    without materializing the concatenation."""
    rows = 0
    first = 0
    for grad in grads:
        place = places - first
        of_step = (place >= 0) & (place < len(grad))
        rows = jnp.where(of_step[:, None], grad.at[place].get(mode="clip"), rows)
        first += len(grad)
    return rows


# ---- Attention for any hardware, and the plain versions of Kernels ------------------------------

SCORE_BYTES = 2**28  # bytes of float32 scores that attend_band materializes at a time


def attend_band(q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale):
    """Return attend_plain's result [b, t, n, h] in O(t * window) time: each query block attends
    only to keys in its own and the previous block. If the scores exceed SCORE_BYTES, process groups
    of blocks one after another, and recompute them in the backward pass."""

    def attend(block: tuple):
        q, k, v, mask = block
        scores = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(mask, scores * scale, -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("nts,snh->tnh", probs, v)

    blocks = band(q_btnh, k_btnh, v_btnh, segments_bt, window)
    count, _, queries, keys = blocks[3].shape
    together = max(1, SCORE_BYTES // (4 * q_btnh.shape[2] * queries * keys))
    if count <= together:
        y = jax.vmap(attend)(blocks)
    else:
        y = lax.map(jax.checkpoint(attend), blocks, batch_size=together)
    return y.reshape(v_btnh.shape)


def band_block(t: int, window: int) -> int:
    """Return the block size: the smallest divisor of t that covers the window (at most t)."""
    return next((n for n in range(max(window, 1), t) if t % n == 0), t)


def band(q_btnh, k_btnh, v_btnh, segments_bt, window: int) -> tuple:
    """Return (queries [blocks, size, n, h], keys and values [blocks, s, n, h], masks
    [blocks, 1, size, s]). Each block's keys and values also cover the previous block, if any."""
    t = segments_bt.shape[1]
    size = band_block(t, window)
    past = size if size < t else 0
    query_segments = token_blocks(segments_bt, size)
    key_segments = token_blocks(segments_bt, size, past)
    s = past + size
    back_ts = jnp.arange(past, s)[:, None] - jnp.arange(s)[None]
    near_ts = (back_ts >= 0) & (back_ts <= window)
    mask = near_ts[None] & (query_segments[:, :, None] == key_segments[:, None, :])
    q = token_blocks(q_btnh, size)
    k, v = (token_blocks(x, size, past) for x in (k_btnh, v_btnh))
    return q, k, v, mask[:, None]


ATTEND_PLAIN = functools.partial(attend_heads, attend_band)
PLAIN = Kernels(ATTEND_PLAIN, cross_entropy, scatter_rows, blend)


# ---- Loss with a hand-written gradient, and document starts, for any hardware -------------------


def squash(z, cfg: Config):
    """Return tanh((z + b) / 2c) in float32. The capped logit is a/2 (1 + squash)."""
    _, b, c = cfg.logit_cap
    return jnp.tanh((z.astype(jnp.float32) + b) * (0.5 / c))


class Softmax(NamedTuple):
    """Softmax over capped logits. exp(a/2) cancels, so exponentials are exp(a/2 squash)."""

    slopes_tv: jax.Array  # derivative of each exponential w.r.t. z, divided by a/4c, in x's dtype
    sum_t: jax.Array  # float32 sum of exponentials per token
    squashed_targets: jax.Array  # float32 [t, targets]: squash of the target logits


def token_losses(x_td, head_vd, targets, cfg: Config, pointing: bool):
    """Return (losses float32 [t, targets], Softmax). If `pointing`, every token's last target is
    `<copy>`. On TPUs, XLA fuses the softmax with the matmul and never materializes float32 [t, v].
    Recomputing the target logits is predicted to be faster than selecting columns of [t, v]."""
    half = cfg.logit_cap[0] / 2
    z_tv = jnp.matmul(x_td, head_vd.T, preferred_element_type=jnp.float32)
    squashed_tv = squash(z_tv, cfg)
    exponentials_tv = jnp.exp(half * squashed_tv)
    sum_t = jnp.sum(exponentials_tv, axis=1)
    slopes_tv = exponentials_tv * (1 - jnp.square(squashed_tv))
    # The barrier makes XLA store the slopes instead of recomputing them in the backward pass.
    slopes_tv = lax.optimization_barrier(slopes_tv.astype(x_td.dtype))

    ids = [targets[:, k] for k in range(targets.shape[1])]
    if pointing:
        ids[-1] = ids[-1][:1]
    wide_td = x_td.astype(jnp.float32)
    z_targets = [jnp.sum(wide_td * head_vd[ids_t].astype(jnp.float32), axis=1) for ids_t in ids]
    squashed_targets = squash(jnp.stack(z_targets, axis=1), cfg)
    losses = jnp.log(sum_t)[:, None] - half * squashed_targets
    return losses, Softmax(slopes_tv, sum_t, squashed_targets)


def loss_gradients(softmax: Softmax, x_td, head_vd, targets, weights, copy_grad_t, cfg: Config):
    """Return the gradients of the weighted losses w.r.t. x ([t, d], in x's dtype) and the head ([v,
    d], float32). `weights` (non-negative) and `copy_grad_t` come from pointed_slopes.

    The gradient w.r.t. logit z is (the token's total weight * probability - z's target weight),
    times the cap's slope a/4c (1 - squash^2). The gradient splits into two factors:
        a/4c weight / sum   *   (1 - squash^2) (exponential - target weight * sum / weight)
    The first factor is per token, so x and its gradient are scaled instead of [t, v]. Softmax
    stores the second factor for non-target logits."""
    a, _, c = cfg.logit_cap
    weight_t1 = jnp.sum(weights, axis=1, keepdims=True)
    sum_t1 = softmax.sum_t[:, None]
    scale_t1 = a / (4 * c) * weight_t1 / sum_t1
    sum_per_weight_t1 = sum_t1 / jnp.where(weight_t1 == 0, 1.0, weight_t1)
    # Equal targets overwrite each other below, so each gets the sum of their weights.
    equal = targets[:, :, None] == targets[:, None, :]
    merged = jnp.sum(jnp.where(equal, weights[:, None, :], 0.0), axis=2)
    squashed = softmax.squashed_targets
    target_grads = jnp.exp(a / 2 * squashed) - merged * sum_per_weight_t1
    if copy_grad_t is not None:  # `<copy>` is the last target
        of_copy_t1 = copy_grad_t[:, None] * sum_per_weight_t1
        target_grads = jnp.concatenate([target_grads[:, :-1], of_copy_t1], axis=1)
    target_grads *= 1 - jnp.square(squashed)

    ids_v = jnp.arange(len(head_vd))[None]
    grad_tv = softmax.slopes_tv.astype(jnp.float32)
    for k in range(targets.shape[1]):
        column = slice(k, k + 1)
        grad_tv = jnp.where(ids_v == targets[:, column], target_grads[:, column], grad_tv)
    scaled_td = lax.optimization_barrier((scale_t1 * x_td).astype(x_td.dtype))
    x_grad_td, head_grad_vd = logit_gradients(grad_tv.astype(x_td.dtype), scaled_td, head_vd)
    return (scale_t1 * x_grad_td).astype(x_td.dtype), head_grad_vd


def logit_gradients(grad_tv, x_td, head_vd):
    """Return the gradients w.r.t. x (in x's dtype) and the head (float32)."""
    head_grad_vd = jnp.matmul(grad_tv.T, x_td, preferred_element_type=jnp.float32)
    return grad_tv @ head_vd, head_grad_vd


def pointed_slopes(losses, weights, pointed) -> tuple:
    """Return the gradients of add_losses' weighted sum w.r.t. the softmax losses [t, targets], the
    `<copy>` logit [t], and `pointed`. Without a pointer, return (weights, None, None).

    A logit with probability q has gradient q * (sum of the token's loss gradients) - (gradient of
    the logit's own loss). For the `<copy>` logit, both terms grow like 1 / (1 - q) and nearly
    cancel when q is near 1. An equivalent formula avoids this cancellation."""
    if pointed is None:
        return weights, None, None

    def weighted(losses, pointed):
        return jnp.sum(mix_pointed(losses, pointed) * weights)

    slopes, pointed_grad = jax.grad(weighted, argnums=(0, 1))(losses, pointed)
    others_t = jnp.sum(slopes[:, :-1], axis=1)
    copy_loss_t = losses[:, -1]
    copy_grad_t = others_t * jnp.exp(-copy_loss_t) + slopes[:, -1] * jnp.expm1(-copy_loss_t)
    return slopes, copy_grad_t, pointed_grad


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 6))
def fused_cross_entropy(x_td, head_vd, targets, weights, cfg, pointed=None, in_rows=False):
    """Compute cross_entropy. The forward pass also computes gradients chunk by chunk, so logits are
    neither stored nor recomputed. Only the weighted sum is differentiable, w.r.t. x, head (same
    dtype) and `pointed`. Validation needs no gradients and uses the plain version. `in_rows`
    selects a kernel for NVIDIA GPUs, unless a pointer is used."""
    return cross_entropy(x_td, head_vd, targets, weights, cfg, pointed)


def fused_cross_entropy_forward(x_td, head_vd, targets, weights, cfg: Config, pointed, in_rows):
    """Return (cross_entropy's result, residuals: the gradients for a cotangent of 1)."""
    in_rows = in_rows and pointed is None

    def add(carry, chunk):
        totals, head_grad_vd = carry
        x_td, targets, weights, pointed = chunk
        if in_rows:
            losses, grad_tv = loss_rows(x_td @ head_vd.T, targets, weights, cfg)
            x_grad_td, grad_vd = logit_gradients(grad_tv, x_td, head_vd)
            pointed_grad = None
        else:
            losses, softmax = token_losses(x_td, head_vd, targets, cfg, pointed is not None)
            *slopes, pointed_grad = pointed_slopes(losses, weights, pointed)
            x_grad_td, grad_vd = loss_gradients(softmax, x_td, head_vd, targets, *slopes, cfg)
        totals = add_losses(totals, losses, weights, pointed)
        return (totals, head_grad_vd + grad_vd), (x_grad_td, pointed_grad)

    zero_sums = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    zeros = zero_sums, jnp.zeros(head_vd.shape, jnp.float32)
    of_chunks = dataclasses.replace(cfg, loss_chunk=loss_tokens(cfg))
    chunks = in_chunks(of_chunks, len(head_vd), x_td, targets, weights, pointed)
    (totals, head_grad_vd), grads = lax.scan(add, zeros, chunks)
    x_grad_td, pointed_grad = jax.tree.map(flat, grads)
    return totals, (x_grad_td, pointed_grad, head_grad_vd, head_vd)


def loss_tokens(cfg: Config) -> int:
    """Return the number of tokens per chunk in fused_cross_entropy."""
    most = 2**31 // cfg.vocab  # loss_rows has 32-bit logit indices
    return most if cfg.whole_loss == "always" else min(cfg.loss_chunk, most)


def fused_cross_entropy_backward(cfg: Config, in_rows, gradients, cotangents):
    """Return the gradients w.r.t. x, head and pointed (None for targets and weights)."""
    x_grad_td, pointed_grad, head_grad_vd, head_vd = gradients
    slope, _ = cotangents  # for the weighted sum
    grad = (slope * x_grad_td.astype(jnp.float32)).astype(x_grad_td.dtype)
    grad = lax.optimization_barrier(grad)  # otherwise XLA stores float32
    pointed_grad = jax.tree.map(lambda x: slope * x, pointed_grad)  # None without a pointer
    head_grad = (slope * head_grad_vd).astype(head_vd.dtype)
    return grad, head_grad, None, None, pointed_grad


fused_cross_entropy.defvjp(fused_cross_entropy_forward, fused_cross_entropy_backward)


def document_starts(segments_bt):
    """Return the start position of each token's segment in the row, int32 [b, t]."""
    changes = segments_bt[:, 1:] != segments_bt[:, :-1]
    begins = jnp.pad(changes, ((0, 0), (1, 0)))
    tokens = jnp.arange(segments_bt.shape[1], dtype=jnp.int32)[None]
    return lax.cummax(jnp.where(begins, tokens, 0), axis=1)


def flat(x):
    """Reshape [..., d] to [t, d]."""
    return x.reshape(-1, x.shape[-1])


# ---- Running a kernel: Pallas with names --------------------------------------------------------

# A Pallas kernel is a function that runs once per grid step. It gets references instead of arrays:
# r.x[...] reads, and r.x[...] = y writes. In each step, a pl.BlockSpec selects one block of each
# input and output. Scratch memory persists across steps. Comments next to operands give the
# reference shapes.

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

KERNEL_VMEM = 100 * 2**20  # VMEM bytes per kernel; a TPU core has 128 MiB


def as_one_block(x):
    """Return the pl.BlockSpec that loads a full array once for all grid steps."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim, pipeline_mode=pl.Buffered(1))


def compiled_for() -> str:
    """Return the target platform: "tpu", "gpu" or "cpu"."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return target.platform if target else jax.default_backend()


def without_specs(operands: dict) -> tuple:
    """Split {name: (array, block_spec)} into two OrderedDicts, because JAX sorts dict keys."""
    arrays = OrderedDict((name, x) for name, (x, _) in operands.items())
    specs = OrderedDict((name, jax.tree.map(spec, x)) for name, (x, spec) in operands.items())
    return arrays, specs


def run_kernel(name, grid, inputs, outputs, body, scratch=(), scalars=(), tiles=None, aliases=None):
    """Call pl.pallas_call and return the output arrays by name.

    `grid` maps each axis to its number of steps. `inputs` and `outputs` map names to (array,
    function that returns its pl.BlockSpec). An array can also be a list or None, and outputs can be
    jax.ShapeDtypeStructs. `scratch` maps names to pltpu.VMEM(shape, dtype), uninitialized.
    `scalars` maps names to scalar-prefetch arrays, which index maps also receive. `body` gets one
    object with all references and the current step on each axis.

    With `tiles`, the kernel is compiled by Triton for NVIDIA GPUs: steps run in any order, and
    scratch memory and scalars are not supported. Other kernels are for TPUs: steps run in order,
    last axis fastest, and all blocks except as_one_block are double-buffered. CPUs run kernels in
    interpret mode."""
    interpret = compiled_for() == "cpu"
    arrays, in_specs = without_specs(inputs)
    shapes, out_specs = without_specs(outputs)

    def kernel(scalars, inputs, outputs, scratch):
        steps = {axis: pl.program_id(k) for k, axis in enumerate(grid)}
        body(SimpleNamespace(**scalars, **inputs, **outputs, **scratch, **steps))

    if tiles:
        from jax.experimental.pallas import triton

        params = triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages)
    else:
        params = pltpu.CompilerParams(vmem_limit_bytes=KERNEL_VMEM)
        if not interpret:
            # Otherwise XLA moves arrays to VMEM before some calls, which adds kernels to compile.
            in_hbm = functools.partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM)
            arrays = jax.tree.map(in_hbm, arrays)
            shapes = jax.tree.map(lambda x: pltpu.HBM(x.shape, x.dtype), shapes)
    steps = tuple(grid.values())  # num_scalar_prefetch is 1: `scalars`
    spec = pltpu.PrefetchScalarGridSpec(1, steps, [in_specs], out_specs, [OrderedDict(scratch)])
    how = {"name": name, "grid_spec": spec, "compiler_params": params, "interpret": interpret}
    call = pl.pallas_call(kernel, shapes, input_output_aliases=aliases or {}, **how)
    return dict(call(OrderedDict(scalars), arrays))


# ---- Attention for TPUs: all heads of a layer in one pass ---------------------------------------

# Each kernel makes one pass over a row, in blocks of BLOCK tokens (or a smaller divisor of the row
# length). Heads stay side by side, [t, n h], as in the projection. Each block is normalized and
# rotated once. Keys and values then stay in VMEM ring buffers while a window can reach them. Blocks
# without visible keys are skipped. No kernel has run on a TPU yet. JAX's splash attention is
# predicted to take five to eight times as long (records/NOTES.md).
#
# Scores are [keys, queries], so per-query numbers (sum, gate, document start) form a row, which is
# cheap to broadcast. The kernels transpose queries, values, outputs and all gradients to
# [h, tokens], so QK norm, rotation, XSA and gates need only a few sums over rows. QK norm bounds
# the scores, so no running maximum is needed. A hardware tile has 128 columns and holds one wide
# head, or two narrow heads side by side.

LOG2E = math.log2(math.e)  # scales the queries, because the hardware computes 2^x
LANES = 128  # columns per tile
ONES = 16  # rows of ones below the values, so that one matmul also sums the weights
# Limit on scale * head width, which bounds scores after QK norm (the key offset adds a factor of
# sqrt 2). At this limit, a sum of 4096 exponentials fits in float32 (windows in VMEM are smaller).
MAX_SCORE = 48.0
# Optional arrays [b, n, t]: gates for `added`, tanh of the XSA gates, output gates.
OF_HEADS = "added_gates", "xsa", "gates"


class Plan(NamedTuple):
    """Tiling of one layer in the attention kernels."""

    heads: Heads
    block: int  # tokens
    half: int  # number of heads, or of head pairs (c, c + half) if paired
    reach: int  # distance in tokens from a query to the earliest visible key
    slots: int  # key blocks visible to a query block, including its own
    ring: int  # slots in attend_tpu_backward's ring buffer

    @property
    def sizes(self) -> tuple:
        """(heads, head dim of q and k, head dim of v, tokens per block)."""
        return self.heads.count, self.heads.qk_width, self.heads.v_width, self.block

    @property
    def pairs(self) -> list:
        """All (query head c, key head o) pairs that need scores. Paired heads see each other's
        keys. The first pair with a given c has o < half; the first with a given o has c < half."""
        n = self.heads.count
        return [(c, o) for c in range(n) for o in range(c % self.half, n, self.half)]

    def ring_bytes(self, dtype) -> int:
        """Return the VMEM bytes of the ring buffers (three in `dtype`, three in float32)."""
        n, h, v, block = self.sizes
        numbers = self.ring * block * n * (2 * h + v)
        return numbers * (jnp.dtype(dtype).itemsize + 4)

    def part(self, j: int) -> tuple:
        """Return (key slice, query slice) covering all visible scores for the key block j blocks
        back. Both slices span half a block if only the second half of the keys is in reach."""
        half = self.block // 2
        if j and j * self.block - self.reach >= half:
            return slice(half, self.block), slice(0, half)
        return slice(0, self.block), slice(0, self.block)

    def name(self, direction: str) -> str:
        """Return the kernel's name in profiles, different for different Heads."""
        numbers = [str(int(x)) for x in dataclasses.astuple(self.heads)]
        return "_".join(["window", direction, *numbers])

    def block_specs(self, block_at: Callable) -> tuple:
        """Return block_spec functions for arrays [b, t, columns] and [b or 1, columns, t]."""

        def in_rows(x):
            shape = 1, self.block, x.shape[2]
            return pl.BlockSpec(shape, lambda b, i, *_: (b, block_at(i), 0))

        def in_columns(x):
            shape = 1, x.shape[1], self.block
            shared = len(x) == 1  # one copy for all batch rows
            return pl.BlockSpec(shape, lambda b, i, *_: (0 if shared else b, 0, block_at(i)))

        return in_rows, in_columns

    def tables_of(self, ref, c: int):
        """Return head c's cos and sin [h / 2, block]. Odd paired heads have different positions."""
        half = self.heads.qk_width // 2
        sines = ref.shape[1] // 2  # the cosines come first
        first = half * (c % 2) if self.heads.paired else 0
        cos = ref[0, first : first + half]
        sin = ref[0, sines + first : sines + first + half]
        return cos, sin


def plan_for(heads: Heads, block: int) -> Plan:
    """Return the Plan for these heads."""
    parts = 1 + heads.paired
    reach = -(-heads.window // parts)
    slots = -(-reach // block) + 1
    return Plan(heads, block, heads.count // parts, reach, slots, slots + heads.offset + 1)


def times(a, b, transpose: bool = False):
    """Return a @ b, or a @ b^T, accumulated in float32."""
    sides = (((1,), (1 if transpose else 0,)), ((), ()))
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, sides, exact, preferred_element_type=jnp.float32)


def dot(a, b):
    """Return column-wise dot products [1, block] of two arrays [h, block]."""
    return jnp.sum(a * b, axis=0, keepdims=True)


def add_or_set(ref, place: tuple, value, is_first: bool):
    """Accumulate into ref[place]. The first value overwrites the previous block's sum."""
    ref[place] = value if is_first else ref[place] + value


def column_tiles(n: int, h: int) -> list:
    """List (tile columns, [(head, head columns within the tile)]) for n heads of width h."""
    inside = [slice(first, first + h) for first in range(0, LANES, h)]
    tiles = []
    for first in range(0, n * h, LANES):
        heads = list(enumerate(inside, first // h))
        tiles.append((slice(first, first + LANES), heads))
    return tiles


def tile_after(lanes: slice, columns: int) -> slice:
    """Return the tile that starts `columns` columns after `lanes`."""
    return slice(lanes.start + columns, lanes.stop + columns)


def rows_of_head(c: int, h: int) -> slice:
    """Return head c's rows in an array [n h, block], or its columns in [block, n h]."""
    return slice(c * h, (c + 1) * h)


def transposed(ref, lanes: slice):
    """Load a tile from a block [1, block, columns], transposed to float32 [LANES, block]."""
    return ref[0, :, lanes].T.astype(jnp.float32)


def inverse_rms(x):
    """Return the factors [1, block] by which `norm` scales a transposed head [h, block]."""
    return lax.rsqrt(dot(x, x) / len(x) + 2.0**-23)


def rotate(x, cos, sin, factor=1.0):
    """Return factor * rope(norm(x)) for a transposed head, float32 [h, block]."""
    left, right = jnp.split(x, 2)
    turned_left = left * cos + right * sin
    turned_right = right * cos - left * sin
    turned = jnp.concatenate([turned_left, turned_right])
    return turned * (factor * inverse_rms(x))


def rotate_grad(grad, x, cos, sin, factor):
    """Return the gradient w.r.t. `x`, given the gradient w.r.t. rotate(x)."""
    left, right = jnp.split(grad, 2)
    back_right = right * cos + left * sin
    back_left = left * cos - right * sin
    grad = jnp.concatenate([back_left, back_right])
    inverse = inverse_rms(x)
    along = dot(grad, x) * (inverse**2 / len(x))
    return (grad - x * along) * (factor * inverse)


def unrotated(h: int):
    """Return a mask [h, 1] of the unrotated rows in a transposed head (see key_offset)."""
    row = lax.broadcasted_iota(jnp.int32, (h, 1), 0)
    return lax.rem(row, h // 2) >= h // 4


def offset_key(r, c: int, k):
    """Return key_offset(k) for head c. Column 0 of r.last is the previous block's last token."""
    h = len(k)
    rows = rows_of_head(c, h)
    moved = pltpu.roll(k, 1, 1)
    last = jnp.where(r.i == 0, k, r.last[rows])
    r.last[rows] = moved
    column = lax.broadcasted_iota(jnp.int32, k.shape, 1)
    return jnp.where(unrotated(h), jnp.where(column == 0, last, moved), k)


def visible_keys(plan: Plan, i, starts):
    """Return a function (j, c, o) -> mask [keys, queries] for part(j). The mask is True where a
    query of head c in block i sees a key of head o in block i - j. `starts` gives each query's
    document start.

    The window is measured in tokens, or in half tokens for paired heads (a pair's second head is
    half a token later). `side` is the position of head c minus the position of head o."""
    units = 1 + plan.heads.paired  # window units per token
    query = i * plan.block + lax.broadcasted_iota(jnp.int32, starts.shape, 1)
    first = {}  # side -> each query's first visible key
    for side in range(1 - units, units):
        reach = (plan.heads.window - side) // units
        first[side] = jnp.maximum(starts, query - reach)

    def visible(j: int, c: int, o: int):
        keys, queries = plan.part(j)
        side = (c >= plan.half) - (o >= plan.half)
        shape = keys.stop - keys.start, queries.stop
        key = lax.broadcasted_iota(jnp.int32, shape, 0)
        first_key = first[side][:, queries] - (i - j) * plan.block - keys.start
        seen = key >= first_key
        if j:
            return seen
        query = lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)
        last_key = query - (side < 0)
        return seen & (key <= last_key)

    return visible


def attend_tpu_forward(plan: Plan, arrays: dict, save: bool = True):
    """Return (y [b, t, n v], residuals if `save`). Grid step i stores block i's keys and values in
    ring buffers, then attends from block i's queries to all visible keys."""
    n, h, v, block = plan.sizes
    slots = plan.slots
    b, t, _ = arrays["qkv"].shape
    dtype = arrays["qkv"].dtype
    in_rows, in_columns = plan.block_specs(lambda i: i)

    def saved(spec, *shape, dtype=dtype):
        like = jax.ShapeDtypeStruct(shape, dtype) if save else None
        return like, spec

    scalars = {name: arrays[name] for name in ("earliest", "scale")}  # see attend_tpu
    inputs = {
        "qkv": (arrays["qkv"], in_rows),  # [1, block, n (2 h + v)]
        "added": (arrays["added"], in_rows),  # [1, block, n * LANES]: added to v
        "tables": (arrays["tables"], in_columns),  # [1, rows, block]: see Plan.tables_of
        "starts": (arrays["starts"], in_columns),  # [1, 1, block]: see attend_tpu
        **{name: (arrays[name], in_columns) for name in OF_HEADS},  # [1, n, block] each
    }
    outputs = {
        "y": (jax.ShapeDtypeStruct((b, t, n * v), dtype), in_rows),  # [1, block, n v]
        "saved_k": saved(in_rows, b, t, n * h),  # [1, block, n h]: rotated keys
        "saved_q": saved(in_columns, b, n * h, t),  # [1, n h, block]: rotated queries
        "saved_v": saved(in_rows, b, t, n * v),  # [1, block, n v]: values including `added`
        "saved_y": saved(in_columns, b, n * v, t),  # [1, n v, block]: outputs before XSA and gates
        "log_sums": saved(in_columns, b, n, t, dtype=jnp.float32),  # [1, n, block]: base-2 logs
    }
    scratch = {
        # Ring buffers: block m is in slot m % slots. Values are transposed, with ones below.
        "keys": pltpu.VMEM((slots, n, block, h), dtype),
        "values": pltpu.VMEM((slots, n, v + ONES, block), dtype),
        # Block i, transposed. `sums`: weighted value sums, then weight sums from row v on.
        "queries": pltpu.VMEM((n * h, block), dtype),
        "sums": pltpu.VMEM((n, v + ONES, block), jnp.float32),
        "last": pltpu.VMEM((n * h, block), jnp.float32),  # see offset_key
    }

    def body(r):
        slot = lax.rem(r.i, slots)
        visible = visible_keys(plan, r.i, r.starts[0])

        @pl.when((r.row == 0) & (r.i == 0))
        def start():
            r.values[:, :, v:] = jnp.ones((slots, n, ONES, block), dtype)

        enter_keys(plan, r, slot)
        enter_values(plan, r, slot)
        look_back(plan, r, 0, visible)
        for j in range(1, slots):
            visit = functools.partial(look_back, plan, r, j, visible)
            pl.when(r.i - j >= r.earliest[r.row, r.i])(visit)
        finish_outputs(plan, r, slot)

    grid = {"row": b, "i": t // block}
    written = run_kernel(plan.name("forward"), grid, inputs, outputs, body, scratch, scalars)
    return written.pop("y"), (arrays, written)


def enter_keys(plan: Plan, r, slot):
    """Normalize and rotate block i's queries and keys, and store the keys in `slot`."""
    n, h, _, _ = plan.sizes
    dtype = r.qkv.dtype
    for lanes, heads in column_tiles(n, h):
        q_tile = transposed(r.qkv, lanes)
        k_tile = transposed(r.qkv, tile_after(lanes, n * h))
        rotated = []
        for c, inside in heads:
            cos, sin = plan.tables_of(r.tables, c)
            q = rotate(q_tile[inside], cos, sin, r.scale[0] * LOG2E)
            r.queries[rows_of_head(c, h)] = q.astype(dtype)
            k = rotate(k_tile[inside], cos, sin)
            if plan.heads.offset:
                k = offset_key(r, c, k)
            rotated.append(k)
        k_tile = jnp.concatenate(rotated).astype(dtype).T
        for c, inside in heads:
            r.keys[slot, c] = k_tile[:, inside]
        if r.saved_q is not None:
            r.saved_q[0, lanes] = r.queries[lanes]
            r.saved_k[0, :, lanes] = k_tile


def enter_values(plan: Plan, r, slot):
    """Add `added` to block i's values, and store the sums in `slot`."""
    n, h, v, _ = plan.sizes
    for lanes, heads in column_tiles(n, v):
        v_tile = transposed(r.qkv, tile_after(lanes, 2 * n * h))
        for c, inside in heads:
            added = 0.0
            if r.added is not None:
                gates = r.added_gates[0, c : c + 1]
                added = gates * transposed(r.added, rows_of_head(c, LANES))[:v]
            r.values[slot, c, :v] = (v_tile[inside] + added).astype(r.qkv.dtype)
        if r.saved_v is not None:
            values = [r.values[slot, c, :v] for c, _ in heads]
            r.saved_v[0, :, lanes] = jnp.concatenate(values).T


def look_back(plan: Plan, r, j: int, visible: Callable):
    """Add block i - j's weighted values to block i's sums. The compiler keeps the matmul order, so
    computing all scores first hides the latency of each matmul."""
    h = plan.heads.qk_width
    keys, queries = plan.part(j)
    slot = lax.rem(r.i - j + plan.slots, plan.slots)
    scores = []
    for c, o in plan.pairs:
        k = r.keys[slot, o, keys]
        q = r.queries[rows_of_head(c, h), queries]
        scores.append(times(k, q))
    for (c, o), score in zip(plan.pairs, scores, strict=True):
        weights = jnp.where(visible(j, c, o), jnp.exp2(score), 0.0)
        weights = weights.astype(r.values.dtype)
        weighted = times(r.values[slot, o, :, keys], weights)
        is_first = j == 0 and o < plan.half
        add_or_set(r.sums, (c, slice(None), queries), weighted, is_first)


def finish_outputs(plan: Plan, r, slot):
    """Divide block i's sums by the weight sums, then apply XSA and gates."""
    n, _, v, _ = plan.sizes
    for lanes, heads in column_tiles(n, v):
        outputs = []
        for c, _ in heads:
            row = slice(c, c + 1)
            total = r.sums[c, v : v + 1]
            y = r.sums[c, :v] * (1 / total)
            if r.saved_y is not None:
                r.log_sums[0, row] = jnp.log2(total)
                r.saved_y[0, rows_of_head(c, v)] = y.astype(r.y.dtype)
            if r.xsa is not None:
                value = r.values[slot, c, :v].astype(jnp.float32)
                along = dot(y, value) / jnp.maximum(dot(value, value), 1e-8)
                y -= r.xsa[0, row] * along * value
            if r.gates is not None:
                y = y * r.gates[0, row]
            outputs.append(y)
        r.y[0, :, lanes] = jnp.concatenate(outputs).T.astype(r.y.dtype)


# Backward pass. A query q sees keys k with values v. Scores are base-2 logarithms. Let L be log2 of
# the query's sum of 2^score, w the weights, and dy the gradient of the output y:
#
#     w = 2^(k.q - L)        y = sum of w v
#     dw = v.dy              ds = w (dw - mean)        mean = sum of w dw = y.dy
#     v_grad += w dy         k_grad += ds q            q_grad += ds k
#
# ds is the gradient of a score in natural units. Because q includes the factor scale * LOG2E,
# finish_block divides k_grad by LOG2E and multiplies q_grad by scale.
#
# A key's gradient is a sum over all query blocks that see the key, so blocks stay in a ring buffer.
# Block m enters slot m % ring at step m, and finish_block writes its gradients at step
# m + ring - 1. Step i runs block i's queries against blocks i, i - 1, ..., i - slots + 1, which
# completes block i's q_grad and adds one term to k_grad and v_grad of each visited block. With the
# key offset, a block waits one more step, because half of the next block's first key comes from
# this block's last token. Example: step 7 in a row of 9 blocks, with 3 slots and the key offset
# (`parts` counts the terms in k_grad and v_grad before and after the step):
#
#     block      0      1      2      3      4      5      6      7      8
#              done   done   done finishes waits   seen   seen  enters  to come
#     slot                            3      4      0      1      2
#     parts                         3, 3   3, 3   2, 3   1, 2   0, 1
#
# The last steps have no block i and repeat the last block in an unused slot. The first steps have
# no block to finish and write to block 0, which is overwritten later.


def attend_tpu_backward(plan: Plan, kept, y_grad):
    """Return the gradients w.r.t. qkv, added and OF_HEADS (None for other arrays)."""
    arrays, saved = kept
    n, h, v, block = plan.sizes
    b, t, _ = arrays["qkv"].shape
    dtype = arrays["qkv"].dtype
    blocks = t // block
    ring = plan.ring
    delay = ring - 1  # grid steps between loading a block and finish_block

    in_rows, in_columns = plan.block_specs(lambda i: jnp.minimum(i, blocks - 1))
    old_in_rows, old_in_columns = plan.block_specs(lambda i: jnp.maximum(i - delay, 0))
    scalars = {name: arrays[name] for name in ("earliest", "scale")}
    inputs = {  # shapes as in attend_tpu_forward
        # Block i.
        "y_grad": (y_grad, in_rows),  # [1, block, n v]
        "saved_k": (saved["saved_k"], in_rows),
        "saved_v": (saved["saved_v"], in_rows),
        **{name: (arrays[name], in_columns) for name in ("starts", "xsa", "gates")},
        **{name: (saved[name], in_columns) for name in ("saved_q", "saved_y", "log_sums")},
        # Block i - delay, finished in this step.
        "old_qkv": (arrays["qkv"], old_in_rows),
        "old_added": (arrays["added"], old_in_rows),
        "old_tables": (arrays["tables"], old_in_columns),
        "old_added_gates": (arrays["added_gates"], old_in_columns),
    }
    outputs = {  # gradients have the same shapes as their arrays
        "qkv_grad": (arrays["qkv"], old_in_rows),
        "added_grad": (arrays["added"], old_in_rows),
        "added_gates_grad": (arrays["added_gates"], old_in_columns),
        "xsa_grad": (arrays["xsa"], in_columns),
        "gates_grad": (arrays["gates"], in_columns),
    }
    scratch = {
        # Ring buffers. Gradients are transposed and accumulated in float32.
        "keys": pltpu.VMEM((ring, n, block, h), dtype),
        "values": pltpu.VMEM((ring, n, block, v), dtype),
        "transposed_keys": pltpu.VMEM((ring, n * h, block), dtype),
        "k_grads": pltpu.VMEM((ring, n * h, block), jnp.float32),
        "v_grads": pltpu.VMEM((ring, n * v, block), jnp.float32),
        "q_grads": pltpu.VMEM((ring, n * h, block), jnp.float32),
        # Block i, transposed: y_grad, then the gradient before gates and XSA.
        "y_grads": pltpu.VMEM((n * v, block), dtype),
    }

    def body(r):
        slot = lax.rem(r.i, ring)
        visible = visible_keys(plan, r.i, r.starts[0])
        enter_again(plan, r, slot)
        means = [undo_outputs(plan, r, slot, c) for c in range(n)]
        # Rotating gradients back uses only the vector unit, so interleave finish_block with the
        # matmuls for j = 0, which always run.
        old = r.i - delay
        old_slot = lax.rem(r.i + 1, ring)
        other_work = finish_block(plan, r, old, old_slot, blocks)
        look_back_grads(plan, r, 0, visible, means, other_work)
        for j in range(1, plan.slots):
            visit = functools.partial(look_back_grads, plan, r, j, visible, means, iter(()))
            reaches = r.i - j >= r.earliest[r.row, jnp.minimum(r.i, blocks - 1)]
            pl.when(reaches & (r.i < blocks))(visit)

    grid = {"row": b, "i": blocks + delay}
    written = run_kernel(plan.name("backward"), grid, inputs, outputs, body, scratch, scalars)
    return ({name: written.get(f"{name}_grad") for name in arrays},)


def enter_again(plan: Plan, r, slot):
    """Store block i's saved keys and values in `slot`, and transpose y_grad. With XSA, also store
    the float32 values in v_grads for undo_outputs."""
    n, h, v, _ = plan.sizes
    for c in range(n):
        r.keys[slot, c] = r.saved_k[0, :, rows_of_head(c, h)]
        r.values[slot, c] = r.saved_v[0, :, rows_of_head(c, v)]
    for lanes, _ in column_tiles(n, h):
        r.transposed_keys[slot, lanes] = r.saved_k[0, :, lanes].T
    for lanes, _ in column_tiles(n, v):
        r.y_grads[lanes] = r.y_grad[0, :, lanes].T
        if r.xsa is not None:
            r.v_grads[slot, lanes] = transposed(r.saved_v, lanes)


def undo_outputs(plan: Plan, r, slot, c: int):
    """Backpropagate through finish_outputs for head c: update y_grads, write the gradients w.r.t.
    gates and XSA, and return `mean` [1, block]. XSA is y - share (y.v / v.v) v. XSA's gradient
    w.r.t. v goes to v_grads."""
    row = 0, slice(c, c + 1)
    part = rows_of_head(c, plan.heads.v_width)
    y, grad = r.saved_y[0, part], r.y_grads[part]
    y, grad = y.astype(jnp.float32), grad.astype(jnp.float32)
    output = y  # after XSA, before gates
    if r.xsa is not None:
        value = r.v_grads[slot, part]
        share = r.xsa[row]
        square = jnp.maximum(dot(value, value), 1e-8)
        along = dot(y, value) / square
        output = y - share * along * value
    if r.gates is not None:
        r.gates_grad[row] = dot(grad, output)
        grad *= r.gates[row]
    if r.xsa is not None:
        back = dot(grad, value) / square
        r.xsa_grad[row] = -back * along * square
        twice = jnp.where(square > 1e-8, 2 * along, 0.0)  # jnp.maximum has no gradient below 1e-8
        r.v_grads[slot, part] = -share * (along * grad + back * (y - twice * value))
        grad -= share * back * value
    r.y_grads[part] = grad.astype(r.y_grads.dtype)
    return dot(y, grad)


def look_back_grads(plan: Plan, r, j: int, visible: Callable, means: list, other_work: Iterator):
    """Accumulate the gradients w.r.t. block i's queries and block i - j's keys and values (formulas
    above). `means` come from undo_outputs. `other_work` advances one step after each head pair."""
    _, h, v, _ = plan.sizes
    dtype = r.y_grads.dtype
    keys, queries = plan.part(j)
    key_slot = lax.rem(r.i - j + plan.ring, plan.ring)
    slot = lax.rem(r.i, plan.ring)

    def finish(c, o, weights, grad):  # grad: w.r.t. scores
        first_of_keys = j == 0 and c < plan.half
        first_of_queries = j == 0 and o < plan.half
        of_keys, of_queries = rows_of_head(o, h), rows_of_head(c, h)
        v_grad = times(r.y_grads[rows_of_head(c, v), queries], weights, True)
        is_first = first_of_keys and r.xsa is None
        add_or_set(r.v_grads, (key_slot, rows_of_head(o, v), keys), v_grad, is_first)
        k_grad = times(r.saved_q[0, of_queries, queries], grad, True)
        add_or_set(r.k_grads, (key_slot, of_keys, keys), k_grad, first_of_keys)
        q_grad = times(r.transposed_keys[key_slot, of_keys, keys], grad)
        add_or_set(r.q_grads, (slot, of_queries, queries), q_grad, first_of_queries)

    # The compiler keeps the matmul order. To hide latency, the last three matmuls of a head pair
    # run after the score matmuls of the next two pairs.
    in_flight = []
    for c, o in plan.pairs:
        score = times(r.keys[key_slot, o, keys], r.saved_q[0, rows_of_head(c, h), queries])
        weights_grad = times(r.values[key_slot, o, keys], r.y_grads[rows_of_head(c, v), queries])
        if len(in_flight) == 2:
            finish(*in_flight.pop(0))
        seen = visible(j, c, o)
        score -= r.log_sums[0, c : c + 1, queries]
        weights = jnp.exp2(jnp.where(seen, score, -1e30))  # 0 if not visible
        grad = weights * (weights_grad - means[c][:, queries])
        in_flight.append((c, o, weights.astype(dtype), grad.astype(dtype)))
        next(other_work, None)
    for pair in in_flight:
        finish(*pair)
    for _ in other_work:
        pass


def finish_block(plan: Plan, r, old, slot, blocks: int):
    """Backpropagate block `old`'s gradients, accumulated in `slot`, through enter_keys and
    enter_values, and write the results. Yield after each tile."""
    n, h, v, _ = plan.sizes

    def write(lanes, grads):
        tile = jnp.concatenate(grads)
        r.qkv_grad[0, :, lanes] = tile.astype(r.qkv_grad.dtype).T

    for lanes, heads in column_tiles(n, h):
        k_lanes = tile_after(lanes, n * h)
        q_tile = transposed(r.old_qkv, lanes)
        k_tile = transposed(r.old_qkv, k_lanes)
        q_grads = []
        k_grads = []
        for c, inside in heads:
            rows = rows_of_head(c, h)
            cos, sin = plan.tables_of(r.old_tables, c)
            q_grad = r.q_grads[slot, rows]
            q_grads.append(rotate_grad(q_grad, q_tile[inside], cos, sin, r.scale[0]))
            k_grad = offset_key_grad(plan, r, rows, old, slot, blocks)
            k_grads.append(rotate_grad(k_grad, k_tile[inside], cos, sin, 1 / LOG2E))
        write(lanes, q_grads)
        write(k_lanes, k_grads)
        yield
    for lanes, heads in column_tiles(n, v):
        v_grads = r.v_grads[slot, lanes]
        write(tile_after(lanes, 2 * n * h), [v_grads])
        for c, inside in heads:
            if r.old_added is None:
                continue
            part = rows_of_head(c, LANES)
            row = 0, slice(c, c + 1)
            v_grad = v_grads[inside]
            r.added_gates_grad[row] = dot(v_grad, transposed(r.old_added, part)[:v])
            added_grad = pad_rows(v_grad * r.old_added_gates[row], LANES)
            r.added_grad[0, :, part] = added_grad.astype(r.added_grad.dtype).T
        yield


def offset_key_grad(plan: Plan, r, rows: slice, old, slot, blocks: int):
    """Backpropagate a head's key gradient in block `old` through offset_key."""
    grad = r.k_grads[slot, rows]
    if not plan.heads.offset:
        return grad
    block = plan.block
    column = lax.broadcasted_iota(jnp.int32, grad.shape, 1)
    next_block = r.k_grads[lax.rem(slot + 1, plan.ring), rows, :1]
    next_block = jnp.where(old + 1 < blocks, next_block, 0.0)
    moved = jnp.where(column == block - 1, next_block, pltpu.roll(grad, block - 1, 1))
    moved += jnp.where((column == 0) & (old == 0), grad, 0.0)  # the first token keeps its own key
    return jnp.where(unrotated(len(grad)), moved, grad)


def transposed_rope_tables(freqs, token_positions):
    """Return cos and sin of positions * freqs, [kinds, frequencies, t]. Positions [kinds, t] must
    be evenly spaced, because the angle addition formulas combine every 128th token with the first
    128 tokens. Computing every cosine is predicted to take longer than some layers on a TPU."""
    near = (token_positions[:, :128] - token_positions[:, :1])[:, None, None]
    far = token_positions[:, None, ::128, None]
    angles = [x.astype(jnp.float32) * freqs[None, :, None, None] for x in (far, near)]
    far_cos, near_cos = map(jnp.cos, angles)
    far_sin, near_sin = map(jnp.sin, angles)
    cos = far_cos * near_cos - far_sin * near_sin
    sin = far_sin * near_cos + far_cos * near_sin
    return [x.reshape(*x.shape[:2], -1) for x in (cos, sin)]


def attend_tpu(heads: Heads, qkv, inputs: HeadInputs):
    """Compute attend_heads with one forward and one backward TPU kernel. why_plain_attention lists
    the requirements. freqs and scale get no gradients."""
    added_btd, added_gates_btn = inputs.added or (None, None)
    t = inputs.segments_bt.shape[1]
    window = min(heads.window, t * (1 + heads.paired))
    heads = dataclasses.replace(heads, window=window)
    plan = plan_for(heads, math.gcd(t, BLOCK))
    starts = document_starts(inputs.segments_bt)
    unrotated_pairs = heads.qk_width // 2 - len(inputs.freqs)
    freqs = jnp.pad(inputs.freqs, (0, unrotated_pairs))  # frequency 0 does not rotate
    token_positions = positions(t, heads)[:, : 1 + heads.paired].T
    tables = transposed_rope_tables(freqs, token_positions)
    constants = {
        "starts": starts[:, None],  # [b, 1, t]: start of each token's document
        # First key block to visit, where the document of the query block's first token starts.
        "earliest": starts[:, :: plan.block] // plan.block,
        "tables": jnp.concatenate(tables).reshape(1, -1, t),  # see Plan.tables_of
        "scale": jnp.reshape(inputs.scale, 1).astype(jnp.float32),
    }
    xsa_btn = jax.tree.map(jnp.tanh, inputs.xsa_btn)  # or None
    of_heads = added_gates_btn, xsa_btn, inputs.gates_btn
    of_heads = jax.tree.map(lambda x: x.swapaxes(1, 2), of_heads)
    arrays = {"qkv": qkv, "added": added_btd}
    arrays |= zip(OF_HEADS, of_heads, strict=True)
    arrays |= jax.tree.map(lax.stop_gradient, constants)
    attend = jax.custom_vjp(lambda arrays: attend_tpu_forward(plan, arrays, save=False)[0])
    forward_pass = functools.partial(attend_tpu_forward, plan)
    backward_pass = functools.partial(attend_tpu_backward, plan)
    attend.defvjp(forward_pass, backward_pass)
    return attend(arrays)


# ---- Per-token weighted sums and table gradients for TPUs ---------------------------------------

# On a v6e, XLA runs blend as ten passes over a float32 sum in memory, plus ten in the backward
# pass. One kernel keeps a block of tokens in VMEM for all sources (predicted to save 12 s per run
# on a v6e-8).


def blend_inputs(x, weights, sources) -> tuple:
    """Return (inputs, grid) for both blend_tpu kernels. A matmul expands the weights [t, k, g] of k
    sources to d features (d / g per weight): w @ hot[j] is [block, d] for source j."""
    t, d = flat(sources[0]).shape
    dtype = sources[0].dtype
    k, g = weights.shape[2:]
    block = math.gcd(t, BLOCK)

    def block_spec(x):
        return pl.BlockSpec((block, x.shape[1]), lambda i, _: (i, 0))

    lanes = -(-k * g // LANES) * LANES  # full tiles
    packed = jnp.pad(weights.reshape(t, k * g), ((0, 0), (0, lanes - k * g)))
    # Split each float32 weight into a sum of two `dtype` numbers, because matmuls run in `dtype`.
    rounded = packed.astype(dtype)
    rest = (packed - rounded.astype(jnp.float32)).astype(dtype)
    w = jnp.concatenate([rounded, rest], axis=1)
    inputs = {
        "x": (jax.tree.map(flat, x), block_spec),  # [block, d], or None
        "w": (w, block_spec),  # [block, 2 lanes]
        "ys": ([flat(y) for y in sources], block_spec),  # [block, d] each
    }
    lane = jnp.arange(2 * lanes) % lanes
    weight = jnp.arange(k)[:, None] * g + jnp.arange(d)[None] // (d // g)  # for each feature
    hot = (lane[None, :, None] == weight[:, None]).astype(dtype)
    inputs["hot"] = hot, as_one_block  # [k, 2 lanes, d]: 1 where the lane has the feature's weight
    return inputs, {"i": t // block}


@jax.custom_vjp
def blend_tpu(x_btd, weights, sources):
    """Compute blend in one TPU kernel, and the gradients in another."""
    inputs, grid = blend_inputs(x_btd, weights, sources)
    ys, block_spec = inputs["ys"]
    outputs = {"y": (ys[0], block_spec)}  # [block, d]

    def body(r):
        total = 0.0 if r.x is None else r.x[...].astype(jnp.float32)
        for j, source in enumerate(r.ys):
            y = source[...].astype(jnp.float32)
            total += times(r.w[...], r.hot[j]) * y
        r.y[...] = total.astype(r.y.dtype)

    written = run_kernel("weighted_sum", grid, inputs, outputs, body)
    return written["y"].reshape(sources[0].shape)


def blend_tpu_backward(kept, grad_btd):
    """Return the gradients w.r.t. x (grad_btd itself), the weights (gradient * source, summed over
    each weight's features) and the sources (gradient * weight)."""
    x_btd, weights, sources = kept
    inputs, grid = blend_inputs(grad_btd, weights, sources)  # r.x is the gradient
    w, block_spec = inputs["w"]
    lanes = w.shape[1] // 2
    outputs = {
        "y_grads": inputs["ys"],  # [block, d] each
        "sums": (jax.ShapeDtypeStruct((len(w), lanes), jnp.float32), block_spec),  # [block, lanes]
    }

    def body(r):
        grad = r.x[...].astype(jnp.float32)
        sums = jnp.zeros(r.sums.shape, jnp.float32)
        for j, (source, y_grad) in enumerate(zip(r.ys, r.y_grads, strict=True)):
            factors = times(r.w[...], r.hot[j])
            y_grad[...] = (factors * grad).astype(y_grad.dtype)
            products = (grad * source[...].astype(jnp.float32)).astype(source.dtype)
            sums += times(products, r.hot[j, :lanes], transpose=True)
        r.sums[...] = sums

    written = run_kernel("weighted_sum_grads", grid, inputs, outputs, body)
    source_grads = tuple(y_grad.reshape(grad_btd.shape) for y_grad in written["y_grads"])
    count = math.prod(weights.shape[2:])
    weight_grads = written["sums"][:, :count].reshape(weights.shape)
    x_grad = None if x_btd is None else grad_btd
    return x_grad, weight_grads, source_grads


blend_tpu.defvjp(lambda *arrays: (blend_tpu(*arrays), arrays), blend_tpu_backward)


# XLA scatters lookup gradients row by row, in float32 because frequent ids occur thousands of
# times. One-hot matmuls are predicted to save 6 s per run on a v6e-8. With tokens sorted by id,
# each tile of table rows overlaps only a few token blocks. Each overlap takes one matmul per table:
# a one-hot matrix [tile, block] times a block of gradient rows.

ROW_TILE = 256  # table rows per one-hot matmul


def meetings(ids, rows: int, block: int):
    """Return int32 arrays (tile, block) [steps]: each step's tile of table rows and token block.
    `ids` must be sorted. Every tile has at least one step. Tiles and blocks both ascend, so at most
    tiles + blocks - 1 steps are needed. In unused steps, `block` is the number of blocks."""
    tiles = -(-rows // ROW_TILE)
    blocks = ids.size // block
    first_ids = jnp.arange(tiles + 1) * ROW_TILE
    starts = jnp.searchsorted(ids, first_ids).astype(jnp.int32)  # first token of each tile
    first = jnp.minimum(starts[:-1] // block, blocks - 1)
    last = jnp.maximum((starts[1:] - 1) // block, first)
    ends = jnp.cumsum(last - first + 1)  # for each tile, one past its last step
    step = jnp.arange(tiles + blocks - 1, dtype=jnp.int32)
    tiles_done = jnp.sum(ends[None] <= step[:, None], axis=1, dtype=jnp.int32)
    tile = jnp.minimum(tiles_done, tiles - 1)
    return tile, jnp.minimum(last[tile] + 1 + step - ends[tile], blocks)


def add_rows_tpu(table_vd, ids, rows, ascending: bool = False):
    """Compute scatter_rows in one TPU kernel. Sum in float32, then round to the dtype of `rows`."""
    v, d = table_vd.shape
    rows = [flat(x) for x in jax.tree.leaves(rows)]
    tables = len(rows)
    block = math.gcd(ids.size, BLOCK)
    ids = ids.reshape(-1).astype(jnp.int32)
    if not ascending:
        order = jnp.arange(ids.size, dtype=jnp.int32)
        ids, order = lax.sort((ids, order), num_keys=1, is_stable=False)
        rows = [x[order] for x in rows]
    dtype = rows[0].dtype
    tile_of_step, block_of_step = meetings(ids, v // tables, block)
    steps = len(tile_of_step)
    blocks = ids.size // block

    def of_block(x):  # this step's tokens
        shape = len(x) // blocks, *x.shape[1:]
        rest = (0,) * (x.ndim - 1)
        return pl.BlockSpec(shape, lambda i, r: (jnp.minimum(r["block"][i], blocks - 1), *rest))

    def of_tile(x):  # this step's tile in each table
        return pl.BlockSpec((tables, ROW_TILE, d), lambda i, r: (0, r["tile"][i + 1], 0))

    # Pad "tile" with -1 (no tile) before the first step and after the last.
    tile_of_step = jnp.pad(tile_of_step, 1, constant_values=-1)
    scalars = {"tile": tile_of_step, "block": block_of_step}
    # Refs: ids [1, 1, block]; rows [block, d] for each table.
    inputs = {"ids": (ids.reshape(blocks, 1, block), of_block), "rows": (rows, of_block)}
    outputs = {"sums": (jax.ShapeDtypeStruct((tables, v // tables, d), dtype), of_tile)}
    scratch = {"total": pltpu.VMEM((tables, ROW_TILE, d), jnp.float32)}  # unrounded sums

    def body(r):
        before, tile, after = (r.tile[r.i + k] for k in range(3))

        @pl.when(before != tile)
        def clear():
            r.total[...] = jnp.zeros_like(r.total)

        @pl.when(r.block[r.i] < blocks)
        def add():
            row = tile * ROW_TILE + lax.broadcasted_iota(jnp.int32, (ROW_TILE, block), 0)
            hot = jnp.where(row == r.ids[0], 1.0, 0.0).astype(dtype)
            for k in range(tables):
                r.total[k] += times(hot, r.rows[k][...])

        @pl.when(tile != after)
        def store():
            r.sums[...] = r.total[...].astype(r.sums.dtype)

    name = f"sum_rows_{tables}"
    written = run_kernel(name, {"i": steps}, inputs, outputs, body, scratch, scalars)
    return table_vd + written["sums"].reshape(v, d).astype(table_vd.dtype)


# ---- Attention for NVIDIA GPUs ------------------------------------------------------------------

# Each forward step processes a block of queries for one head and loops over tiles of visible keys
# (FlashAttention, Dao et al. 2022). The backward pass has two kernels: one loops over keys for each
# query block, the other over queries for each key block. Visible keys are contiguous, so tiles
# outside the range are skipped. The kernels use Triton (deprecated since JAX 0.11), because Mosaic
# GPU kernels cannot run in interpret mode on CPUs.


class Tiles(NamedTuple):
    """Tile sizes of a GPU kernel. In attention, `block` and `tile` are powers of two up to 128."""

    block: int  # tokens (queries or keys) per grid step
    tile: int  # keys, queries or logits per loop iteration
    warps: int
    stages: int  # tiles in flight


THREE_STAGES = 164_928  # bytes of shared memory at head dim 128 (from compiled programs)


def tiles_for(cfg: Config, device) -> Tiles:
    """Return the fastest tiles on an H100 (other GPUs were not timed), with two stages if three do
    not fit in shared memory. If JAX does not report the shared memory size, assume 99 KiB (the
    minimum since Ampere)."""
    room = getattr(device, "shared_memory_per_block_optin", 101_376) * 128 / cfg.head_width
    return Tiles(64, 64, warps=4, stages=3 if room >= THREE_STAGES else 2)


def sum_tiles(first, last, tile: int, add: Callable, *shapes):
    """Return float32 sums of the given `shapes` over all tiles visible to a block. Token i of the
    block sees tokens `first`[i] to `last`[i]. add(tile position, mask [block, tile], sums) returns
    the new sums."""

    def add_tile(j, sums):
        tokens = (j * tile + jnp.arange(tile))[None]
        seen = (tokens >= first[:, None]) & (tokens <= last[:, None])
        return add(pl.ds(j * tile, tile), seen, sums)

    zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    end_tile = jnp.max(last) // tile + 1
    return lax.fori_loop(jnp.min(first) // tile, end_tile, add_tile, zeros)


def run_tiles(name: str, tiles: Tiles, blocks: dict, rows: dict, outputs: dict, body: Callable):
    """Call run_kernel with one step per block, head and row. body(r, token positions of the block)
    gets one block of each array in `blocks` and `outputs`, and a full row of each array in `rows`.
    Outputs can be jax.ShapeDtypeStruct. Arrays are [b, t, n, h or v], [b, n, t] or [b, t].
    References are [tokens, h or v] or [tokens]."""
    b, t, n, _ = (blocks | rows)["q"].shape

    def block_spec(tokens: int, block_at: Callable, x):
        if x.ndim == 4:
            shape = None, tokens, None, x.shape[3]
            return pl.BlockSpec(shape, lambda i, n, b, _: (b, block_at(i), n, 0))
        if x.ndim == 3:
            return pl.BlockSpec((None, None, tokens), lambda i, n, b, _: (b, n, block_at(i)))
        return pl.BlockSpec((None, tokens), lambda i, n, b, _: (b, block_at(i)))

    of_block = functools.partial(block_spec, tiles.block, lambda i: i)
    of_row = functools.partial(block_spec, t, lambda i: 0)
    inputs = {name: (x, of_block) for name, x in blocks.items()}
    inputs |= {name: (x, of_row) for name, x in rows.items()}
    outputs = {name: (like, of_block) for name, like in outputs.items()}
    grid = {"i": t // tiles.block, "head": n, "row": b}

    def with_tokens(r):
        body(r, r.i * tiles.block + jnp.arange(tiles.block))

    return run_kernel(name, grid, inputs, outputs, with_tokens, tiles=tiles)


def attend_gpu_forward(tiles: Tiles, arrays: dict):
    """Return (y [b, t, n, v], residuals: `arrays`, y, and log2 of the softmax sums [b, n, t])."""
    b, t, n, v = arrays["v"].shape
    dtype = arrays["q"].dtype
    queries = {name: arrays[name] for name in ("q", "first")}
    keys = {name: arrays[name] for name in ("k", "v")}
    outputs = {"y": arrays["v"], "log_sums": jax.ShapeDtypeStruct((b, n, t), jnp.float32)}

    def body(r, tokens):
        q = r.q[...]

        def add(place, seen, sums):
            y, total = sums
            score = times(q, r.k[place, :], transpose=True)
            weights = jnp.where(seen, jnp.exp2(score), 0.0)
            y += times(weights.astype(dtype), r.v[place, :])
            return y, total + jnp.sum(weights, axis=1)

        y, total = sum_tiles(r.first[...], tokens, tiles.tile, add, (len(q), v), (len(q),))
        r.y[...] = (y / total[:, None]).astype(dtype)
        r.log_sums[...] = jnp.log2(total)

    written = run_tiles("attend", tiles, queries, keys, outputs, body)
    return written["y"], arrays | written


def attend_gpu_backward(tiles: Tiles, arrays: dict, y_grad):
    """Return the gradients w.r.t. q, k and v (formulas above attend_tpu_backward)."""
    mean = jnp.einsum("btnh,btnh->bnt", arrays["y"], y_grad, preferred_element_type=jnp.float32)
    queries = {"q": arrays["q"], "log_sums": arrays["log_sums"], "mean": mean, "y_grad": y_grad}
    keys = {"k": arrays["k"], "v": arrays["v"]}
    q_grad = query_gradients(tiles, queries | {"first": arrays["first"]}, keys)
    k_grad, v_grad = key_gradients(tiles, keys | {"last": arrays["last"]}, queries)
    return ({"q": q_grad, "k": k_grad, "v": v_grad, "first": None, "last": None},)


def query_gradients(tiles: Tiles, queries: dict, keys: dict):
    """Return the gradient w.r.t. q."""
    dtype = queries["q"].dtype

    def body(r, tokens):
        q, y_grad = r.q[...], r.y_grad[...]
        log_sums = r.log_sums[...][:, None]
        mean = r.mean[...][:, None]

        def add(place, seen, sums):
            (q_grad,) = sums
            k = r.k[place, :]
            score = times(q, k, transpose=True) - log_sums
            weights = jnp.where(seen, jnp.exp2(score), 0.0)
            grad = weights * (times(y_grad, r.v[place, :], transpose=True) - mean)
            return (q_grad + times(grad.astype(dtype), k),)

        (q_grad,) = sum_tiles(r.first[...], tokens, tiles.tile, add, q.shape)
        r.q_grad[...] = (q_grad * (1 / LOG2E)).astype(dtype)

    outputs = {"q_grad": queries["q"]}
    return run_tiles("attend_backward_queries", tiles, queries, keys, outputs, body)["q_grad"]


def key_gradients(tiles: Tiles, keys: dict, queries: dict) -> tuple:
    """Return the gradients w.r.t. k and v."""
    dtype = keys["k"].dtype

    def body(r, tokens):
        k, v = r.k[...], r.v[...]

        def add(place, seen, sums):
            k_grad, v_grad = sums
            q, y_grad = r.q[place, :], r.y_grad[place, :]
            score = times(k, q, transpose=True) - r.log_sums[place][None]  # [keys, queries]
            weights = jnp.where(seen, jnp.exp2(score), 0.0)
            v_grad += times(weights.astype(dtype), y_grad)
            grad = weights * (times(v, y_grad, transpose=True) - r.mean[place][None])
            return k_grad + times(grad.astype(dtype), q), v_grad

        k_grad, v_grad = sum_tiles(tokens, r.last[...], tiles.tile, add, k.shape, v.shape)
        r.k_grad[...] = (k_grad * (1 / LOG2E)).astype(dtype)
        r.v_grad[...] = v_grad.astype(dtype)

    outputs = {"k_grad": keys["k"], "v_grad": keys["v"]}
    written = run_tiles("attend_backward_keys", tiles, keys, queries, outputs, body)
    return written["k_grad"], written["v_grad"]


def attend_gpu(tiles: Tiles, q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale):
    """Compute attend_plain with one forward and two backward kernels. Row lengths must be multiples
    of 128, head dims powers of two, and scores at most MAX_SCORE."""
    t = segments_bt.shape[1]
    token = jnp.arange(t, dtype=jnp.int32)[None]
    starts = document_starts(segments_bt)
    mirrored = document_starts(segments_bt[:, ::-1])[:, ::-1]  # counted from the row end
    stops = t - 1 - mirrored
    arrays = {
        "q": (q_btnh * (scale * LOG2E)).astype(q_btnh.dtype),  # kernels compute 2^x
        "k": k_btnh,
        "v": v_btnh,
        "first": jnp.maximum(starts, token - window),  # each query's first visible key
        "last": jnp.minimum(stops, token + window),  # last query that sees each key
    }
    attend = jax.custom_vjp(lambda arrays: attend_gpu_forward(tiles, arrays)[0])
    forward_pass = functools.partial(attend_gpu_forward, tiles)
    backward_pass = functools.partial(attend_gpu_backward, tiles)
    attend.defvjp(forward_pass, backward_pass)
    return attend(arrays)


# ---- Loss for NVIDIA GPUs -----------------------------------------------------------------------

# On GPUs, XLA calls a matmul library, which writes bfloat16 logits to memory. A kernel then
# computes the losses and overwrites the logits with their gradients.

LOSS_TILES = Tiles(1, 2048, warps=8, stages=2)


def loss_rows(logits_tv, targets, weights, cfg: Config):
    """Return (losses float32 [t, targets], logit gradients [t, v] of the weighted loss sum). The
    gradients overwrite the logits. As in upstream, tanh has a relative error of up to 2^-11. Each
    step reads a row twice, but the second read hits the cache, unlike in XLA's own code."""
    a, b, c = cfg.logit_cap
    half = a / 2
    t, v = logits_tv.shape
    tile = LOSS_TILES.tile
    tiles = pl.cdiv(v, tile)

    def row(x):
        return pl.BlockSpec((None, x.shape[1]), lambda i, _: (i, 0))

    def row_of_logits(x):  # full tiles; the last one may extend past the row
        return pl.BlockSpec((None, tiles * tile), lambda i, _: (i, 0))

    inputs = {"z": (logits_tv, row_of_logits), "targets": (targets, row), "weights": (weights, row)}
    outputs = {
        "grad": (logits_tv, row_of_logits),
        "sum": (jax.ShapeDtypeStruct((t, 1), jnp.float32), row),
        "z_targets": (jax.ShapeDtypeStruct(targets.shape, logits_tv.dtype), row),
    }

    def body(r):
        from jax.experimental.pallas import triton

        tanh = jnp.tanh if compiled_for() == "cpu" else triton.approx_tanh
        weighted_targets = [(r.targets[k], r.weights[k]) for k in range(targets.shape[1])]
        # Read target logits before gradients overwrite the row. The sum below synchronizes threads.
        for k, (target, _) in enumerate(weighted_targets):
            r.z_targets[k] = r.z[target]

        def squashed(j):
            """Return the slice, ids, mask of existing ids and squashed logits of tile j."""
            place = pl.ds(j * tile, tile)
            ids = j * tile + jnp.arange(tile)
            z = triton.load(r.z.at[place], mask=ids < v, other=0.0)
            return place, ids, ids < v, tanh((z.astype(jnp.float32) + b) * (0.5 / c))

        def add(j, total):
            _, _, exists, s = squashed(j)
            return total + jnp.where(exists, jnp.exp2(half * LOG2E * s), 0.0)

        total = jnp.sum(lax.fori_loop(0, tiles, add, jnp.zeros(tile, jnp.float32)))
        r.sum[0] = total
        share = sum(weight for _, weight in weighted_targets) / total

        def store(j, _):
            place, ids, exists, s = squashed(j)
            grad = jnp.exp2(half * LOG2E * s) * share
            for target, weight in weighted_targets:
                grad -= jnp.where(ids == target, weight, 0.0)
            grad *= a / (4 * c) * (1 - s * s)
            triton.store(r.grad.at[place], grad.astype(logits_tv.dtype), mask=exists)

        lax.fori_loop(0, tiles, store, None)

    how = {"tiles": LOSS_TILES, "aliases": {0: 0}}  # grad overwrites z
    written = run_kernel("loss", {"i": t}, inputs, outputs, body, **how)
    losses = jnp.log(written["sum"]) - half * squash(written["z_targets"], cfg)
    return losses, written["grad"]


def end_process(status: int):
    """Exit. After an error, do not wait for threads that are still compiling."""
    if status:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    end_process(main())
