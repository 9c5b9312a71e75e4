"""Train a GPT to a target loss as fast as the hardware allows: pure JAX, one file.

    python train_gpt.py                    # without an accelerator: `tiny`, 2 minutes on a laptop
    python train_gpt.py speedrun           # FineWeb, target 3.28, on v6e-8, 8xH100 or one GPU
    python train_gpt.py speedrun --show    # parameters, stages, tokens, FLOPs; no training

`speedrun` is record 77 of the modded-nanogpt speedrun (github.com/KellerJordan/modded-nanogpt,
Jordan et al. 2024): 539 M parameters, 1490 steps, 396 M tokens. "Record N" is the Nth of its list,
"the original" the PyTorch program of record 77. Predicted by the TPU's compiler: 159 s on a v6e-8;
nobody has timed it yet. The run in outline, its real loop stands at the end of Part I:

    state = init(seed); copies = bfloat16(state.params)        # Parameters
    for step in range(1490):
        tokens, hyper = next(loader)                           # Token stream, Loader, Schedule
        x = forward(copies, tokens)                            # Attention, Heads, Model
        loss, grads = backward(cross_entropy(x, copies.head))  # Loss
        grads = reduce_scatter(grads)                          # The step; small ones: psum
        state = muon(banks), adam(tables, every 2nd step)      # Optimizers
        copies = all_gather(bfloat16(state.params))
        log(loss of the step before)                           # nothing waits for a loss

    PART I, the speedrun          all that decides the loss, in plain JAX: read it from the top;
                                  `train` alone uses what stands later, and lists it
    PART II, around a run         refusals, data checks, compilation, checkpoints, log, signals,
                                  several hosts, command line: look it up
    PART III, fast on hardware    kernels that equal Part I's functions, for TPUs and NVIDIA GPUs;
                                  `--set kernels=plain` trains without

Dimension letters, in names (x_btd) and einsums alike: b rows, t time (queries), s time (keys),
d model width, n heads, h head width, f MLP width, v vocabulary, p columns of a projection, g gates
of a token or their inputs, k targets of a token, r tokens of a batch in one line, c tokens of a
chunk or block; in the optimizers l matrices of a bank, r and c their rows and columns. Batches,
rows, windows and document lengths are all counted in tokens.

Where to edit: a new size is a preset; a new schedule is rows of Stage; a new parameter is a row of
param_table and its use in forward; a new kernel is a function in Part III that equals one of
Kernels, with its conditions in pick_kernels.

Sources beyond the speedrun, whose records are named where an idea stands: RoPE (Su et al. 2021),
YaRN (Peng et al. 2023), QK norm (Henry et al. 2020), ReLU^2 (So et al. 2021), value residual (Zhou
et al. 2024), Polar Express (Amsel et al. 2025), NorMuon (Li et al. 2025), cautious updates (Liang
et al. 2024), multi-token prediction (Gloeckle et al. 2024), ZeRO (Rajbhandari et al. 2020).
"""

import argparse
import ast
import bisect
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import queue
import re
import runpy
import secrets
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
import typing
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "data"  # the one mesh axis: every device has its own rows


class UserError(Exception):
    """What the user can mend: one line that says what is wrong and what to do. Exit status 2."""


# ================================================================================================
# PART I: THE SPEEDRUN
# ================================================================================================

# ------------------------------------------------------------------------------------------------
# Config and presets
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with one shape of batch; all sizes in tokens."""

    share: float  # of the steps before the extension; 0: this stage is the extension
    batch_tokens: int  # per step, over all devices
    row_tokens: int  # length of a row
    doc_cap: int  # 0: rows are cut from the plain stream; else documents cut at this length
    windows: tuple[int, int]  # short and long: how many tokens before itself a token can see
    lr_factor: float = 1.0
    # Multi-token prediction: the weight of the loss on the next token, on the one after it, ..., at
    # the start of the stage and where they have come to at its end.
    weights: tuple[float, ...] = (1.0,)
    weights_end: tuple[float, ...] = (1.0,)

    @property
    def rows(self) -> int:
        """Rows of one global batch."""
        return self.batch_tokens // self.row_tokens


@dataclass(frozen=True)
class Config:
    """Every number of a run. A preset is one of these; `--set KEY=VALUE` replaces fields.

    The defaults are record 77 of the modded-nanogpt speedrun: 539 M parameters, 396 M tokens.
    """

    preset: str = "speedrun"
    # ---- The recipe: what decides the loss ----
    seed: int = 0
    # model; layers are counted from 0
    layers: int = 11
    width: int = 768
    heads: int = 6
    mlp_width: int = 3072
    vocab: int = 50304  # rows of the embedding table: real_tokens padded to a multiple of 128
    real_tokens: int = 50257  # ids at or above this are refused
    bos: int = 50256  # stands before every document; attention does not cross it
    encoding: str = "gpt2"  # how text became tokens: gpt2, bytes, or bpe with the data's own merges
    bigram_rows: int = 251_520  # 5 rows of the hash table for each row of the vocabulary
    long_layers: tuple[int, ...] = (3, 10)  # long window, keys offset by one token
    paired_layers: tuple[int, ...] = (0, 2, 5, 9)  # heads attend in pairs
    value_layers: tuple[int, ...] = (1, 2, 8, 9, 10)  # each with its own table of token values
    skip: tuple[int, int] = (3, 6)  # the output of the one replaces attention in the other
    backout: int = 7  # its output is read by all later attentions, and partly taken out at the end
    rope_base: float = 1024.0
    attn_scale: float = 0.1  # of q k^T, in the first stage
    logit_cap: tuple[float, float, float] = (23.0, 5.0, 7.5)  # a, b, c of a * sigmoid((z + b) / c)
    compute_dtype: str = "bfloat16"  # of activations and matmuls; masters and loss are float32
    # schedule: batch, windows and document length grow; the row is an eighth of the batch
    steps: int = 1490
    extension: int = 40  # of these, after the schedule: at the lowest rate, with wider windows
    stages: tuple[Stage, ...] = (
        # share batch   row   doc cap  windows    lr   loss weights, from and to
        Stage(1 / 3, 131_072, 16_384, 896, (128, 384), 1.0, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
        Stage(1 / 3, 262_144, 32_768, 2048, (384, 896), 1.52, (1.0, 0.5), (1.0, 0.0)),
        Stage(1 / 3, 393_216, 49_152, 2048, (640, 1408), 1.73),
        Stage(0.0, 393_216, 49_152, 2048, (768, 1664)),
    )
    tied: float = 2 / 3  # share of the schedule in which head and embedding are one matrix
    cooldown: float = 0.6  # last share of the schedule, in which the learning rate falls linearly
    lr_floor: float = 0.15  # to this
    # optimizers; param_table has the factors of each parameter
    lr_muon: float = 0.023
    decay_muon: float = 1.2  # a step takes lr * lr * this of a weight
    variance_beta: float = 0.95  # of NorMuon's mean square of each row
    momentum: tuple[float, float] = (0.85, 0.95)  # Muon: from, to
    momentum_warmup: int = 300  # over this many steps
    momentum_cooldown: int = 50  # and back, over the last steps
    lr_adam: float = 0.008
    decay_adam: float = 0.005  # likewise
    adam_eps: float = 1e-10
    adam_every: int = 2  # steps whose gradients one Adam step sums; a device keeps all of them
    # validation: the first val_tokens of the validation split, each predicted once
    val_tokens: int = 10_485_760
    val_every: int = 250  # steps; 0: only at the end
    val_batch: int = 2_097_152
    val_row: int = 262_144
    val_windows: tuple[int, int] = (768, 2560)
    target: float = 3.28  # nats per token; 0: none
    # ---- The machine: what decides only the speed, and what a run leaves behind ----
    data: str = "data/fineweb10B"
    devices: int = 0  # 0: all that there are
    kernels: str = "auto"  # auto: those of Part III where they serve; plain: none
    micro_tokens: int = 49_152  # a device takes so many at a time (at least a row)
    recompute: bool = False  # layers again on the way back, instead of keeping their activations
    loss_chunk: int = 4096  # tokens whose logits exist at once
    prefetch: int = 4  # batches that wait on the devices
    checkpoint_every: int = 0  # steps; 0: only at the end
    checkpoint_end: str = "auto"  # auto: unless it takes more than 10 GB; always; never
    log_every: int = 10  # steps between lines on the terminal; the log has them all
    sample_tokens: int = 0  # at the end of the run, continue the validation text by this many

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend, in the order in which banks and gates hold them."""
        return tuple(i for i in range(self.layers) if i != self.skip[1])

    @property
    def dtype(self) -> jnp.dtype:
        """compute_dtype as a dtype."""
        return jnp.dtype(self.compute_dtype)

    @property
    def scheduled(self) -> int:
        """Steps before the extension."""
        return self.steps - self.extension

    @functools.cached_property
    def boundaries(self) -> tuple[int, ...]:
        """First step of each stage, then the number of steps."""
        ends = np.cumsum([stage.share for stage in self.stages])
        return (0, *(round(end * self.scheduled) for end in ends[:-1].tolist()), self.steps)

    def tokens_after(self, step: int) -> int:
        """Tokens that the first `step` steps train on."""
        spans = zip(self.stages, itertools.pairwise(self.boundaries), strict=True)
        return sum(s.batch_tokens * max(0, min(step, end) - at) for s, (at, end) in spans)

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole run trains on."""
        return self.tokens_after(self.steps)


PRESETS = {
    "speedrun": Config(),
    # the same ideas at toy size, for under three minutes on two cores; sizes and rates by trial
    "tiny": Config(
        preset="tiny",
        layers=5,
        width=128,
        heads=4,
        mlp_width=512,
        vocab=2048,
        real_tokens=2048,
        bos=2047,
        encoding="bpe",
        bigram_rows=10_240,
        long_layers=(1, 4),
        paired_layers=(0,),
        value_layers=(1, 4),
        skip=(0, 2),
        backout=3,
        compute_dtype="float32",
        steps=330,
        extension=0,
        stages=(
            Stage(1 / 3, 1024, 128, 0, (64, 128), 1.0, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
            Stage(1 / 3, 2048, 256, 0, (64, 256), 1.52, (1.0, 0.5), (1.0, 0.0)),
            Stage(1 / 3, 3072, 384, 0, (128, 384), 1.73),
        ),
        momentum_warmup=100,
        lr_muon=0.05,  # with 0.023 and 0.008 it takes 380 steps (records/cpu)
        lr_adam=0.016,
        micro_tokens=512,  # fits the caches: 1.4 times the speed of 4096
        val_tokens=98_304,
        val_every=165,
        val_batch=4096,
        val_row=512,
        val_windows=(128, 512),
        target=3.95,
        data="data/builtin",
        sample_tokens=80,
    ),
}


# ------------------------------------------------------------------------------------------------
# Parameters: one table, from which init, state, shardings, checkpoint and listing are mapped
# ------------------------------------------------------------------------------------------------

GATE_INPUTS = 12  # features of a token that its gates look at (record 28: twelve suffice)


@dataclass(frozen=True)
class Param:
    """A row of the parameter table."""

    shape: tuple[int, ...]
    init: Callable  # (key, shape) -> float32 array
    optimizer: str  # adam or muon
    lr: float
    decay: float = 0.0  # a step takes lr * lr * decay of a weight that the update shrinks
    betas: tuple[float, float] = (0.0, 0.0)  # adam
    scale: tuple[float, ...] = ()  # muon: factor on the learning rate of each matrix of the bank
    sharded: bool = True  # cut along axis 0 over the devices; small ones live whole on each
    tied_to: str = ""  # starts as a copy of this parameter, and is one with it while Hyper.tied

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def constant(value) -> Callable:
    """An initializer: `value` everywhere."""
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


def normal(std: float) -> Callable:
    """An initializer: normal with this standard deviation."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def uniform(std: float, live: int) -> Callable:
    """An initializer for a bank: uniform in its first `live` matrices, zero in the others."""
    bound = math.sqrt(3) * std

    def init(key, shape):
        values = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        return jnp.where((np.arange(shape[0]) < live)[:, None, None], values, 0.0)

    return init


@functools.cache
def param_table(cfg: Config) -> dict[str, Param]:
    """Name -> Param: every parameter, its size, its start and how it learns.

    Tables have one row per token (value_tables: one block of rows for each of its layers). A row
    whose Adam moments are still zero neither moves nor decays, so rare tokens keep their start.

    Equal-shaped matrices are stacked into banks, so that Muon is one batched call for each shape:
        attn_bank [4 per attention, d, d]: q, k, v, o of the first layer, of the second, ...; x W^T
        mlp_bank [2 per layer, f, d]: all up-projections (x W^T), then all down-projections (h W)
    q, k, v are separate matrices of the bank (Muon must not mix their singular values) and one
    matmul in the model (their [out, in] blocks lie one after the other). Down-projections start at
    zero: the MLPs begin as the identity.

    An orthogonalized update has unit singular values whatever the shape, so for random inputs the
    change it makes to an output element shrinks as the output grows; sqrt(f / d) makes up for that
    in the up-projections (Jordan et al. 2024). The down-projections get twice as much, found by
    trial (record 48).
    """
    d, f, v, n, layers = cfg.width, cfg.mlp_width, cfg.vocab, cfg.heads, cfg.layers
    attends, values = len(cfg.attention_layers), len(cfg.value_layers)
    tall = math.sqrt(max(1, f / d))

    def table(rows, std, lr, decay, betas, tied_to=""):
        lr, decay = lr * cfg.lr_adam, decay * cfg.decay_adam
        return Param((rows, d), normal(std), "adam", lr, decay, betas, tied_to=tied_to)

    def bank(shape, live, scale):
        start = uniform(0.5 / math.sqrt(d), live)
        return Param(shape, start, "muon", cfg.lr_muon, cfg.decay_muon, scale=scale)

    def small(shape, start, lr, betas, decay=0.0):
        lr, decay = lr * cfg.lr_adam, decay * cfg.decay_adam
        return Param(shape, constant(start), "adam", lr, decay, betas, sharded=False)

    fast, slow = (0.9, 0.95), (0.9, 0.99)  # betas of mixing weights; of gates, other scalars
    return {
        #              rows             std    lr  decay  betas
        "head": table(v, 0.005, 1, 150, (0.5, 0.95)),
        "embed": table(v, 0.005, 1, 150, (0.5, 0.95), tied_to="head"),
        "value_tables": table(values * v, 0.01, 75, 5, (0.75, 0.95)),
        "bigram_table": table(cfg.bigram_rows, 0.0, 75, 5, (0.75, 0.95)),
        #                 shape               live matrices   factors on lr_muon
        "attn_bank": bank((4 * attends, d, d), 4 * attends, (1.0,) * (4 * attends)),
        "mlp_bank": bank((2 * layers, f, d), layers, (tall,) * layers + (2 * tall,) * layers),
        #                     shape                    start  lr  betas
        "attn_gate": small((attends, n, GATE_INPUTS), 0.0, 1, slow, decay=1),
        "value_gate": small((values, n, GATE_INPUTS), 0.0, 1, slow, decay=1),
        "smear_gate": small((1, GATE_INPUTS), 0.0, 0.01, slow),  # of the token before
        "skip_gate": small((1, GATE_INPUTS), 0.0, 0.05, slow),  # of layer skip[0] in skip[1]
        "resid_lambdas": small((layers, 2), math.sqrt(1.1), 5, fast),  # the stream; attention, MLP
        "post_lambdas": small((layers, 2), 1.0, 1, fast),  # what is added to it; attention, MLP
        "x0_lambdas": small((layers,), 0.0, 1, fast),
        "bigram_lambdas": small((layers,), 0.05, 1, fast),
        "qkv_lambda": small((layers,), 0.5, 5, slow),  # on v in effect: QK norm cancels it
        "o_lambda": small((layers,), 1.0, 5, slow),
        "smear_lambda": small((1,), 0.0, 5, slow),
        "backout_lambda": small((1,), 0.5, 5, slow),
        "skip_lambda": small((1,), -1.5, 5, slow),
    }


def map_state(cfg: Config, leaf: Callable) -> dict[str, dict]:
    """The training state as a tree {"params", "first", "second"}: name -> leaf(shape, Param).

    first: Adam's mean or Muon's momentum. second: Adam's mean square, or NorMuon's per row of a
    matrix. All float32 and all cut over the devices like the parameter: each device updates its
    share (ZeRO).
    """

    def shape(kind, row):
        return row.shape[:-1] if kind == "second" and row.optimizer == "muon" else row.shape

    return {
        kind: {name: leaf(shape(kind, row), row) for name, row in param_table(cfg).items()}
        for kind in ("params", "first", "second")
    }


def padded(shape: tuple[int, ...], row: Param, cuts: int) -> tuple[int, ...]:
    """`shape` as it lies on `cuts` devices: rows of zeros make what is sharded divisible.

    The record's 22 MLP matrices are 24 on eight devices, which so own whole matrices.
    """
    return (-(-shape[0] // cuts) * cuts, *shape[1:]) if row.sharded else shape


def grown(x, rows: int):
    """`x` with zeros after it, up to `rows` rows."""
    return x if len(x) == rows else jnp.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))


def unpadded(cfg: Config, arrays: dict) -> dict:
    """Name -> array without the rows that only make a parameter divisible by the devices."""
    rows = {name: param_table(cfg)[name].shape[0] for name in arrays}
    return {name: x if len(x) == rows[name] else x[: rows[name]] for name, x in arrays.items()}


def abstract_state(cfg: Config, mesh: Mesh):
    """Shapes, dtypes and shardings of the training state on `mesh`; no memory is touched."""

    def leaf(shape, row):
        sharding = NamedSharding(mesh, P(AXIS) if row.sharded else P())
        return jax.ShapeDtypeStruct(padded(shape, row, mesh.size), jnp.float32, sharding=sharding)

    return map_state(cfg, leaf)


def init_state(cfg: Config, cuts: int, seed):
    """The training state before the first step, padded for `cuts` devices; its numbers do not
    depend on how many there are.

    `seed` may be traced, so that one compiled program serves for warm-up and for the run.
    """
    key = jax.random.key(seed)
    state = map_state(cfg, lambda shape, row: jnp.zeros(padded(shape, row, cuts), jnp.float32))
    for name, row in param_table(cfg).items():
        # A key from the name: adding a parameter does not change the others.
        salt = int.from_bytes(hashlib.sha256((row.tied_to or name).encode()).digest()[:4], "little")
        start = row.init(jax.random.fold_in(key, salt), row.shape)
        state["params"][name] = grown(start, len(state["params"][name]))
    return state


# ------------------------------------------------------------------------------------------------
# Attention: the contract, and the reference that every kernel of Part III is held against
# ------------------------------------------------------------------------------------------------
# (q_btnh, k_btnh, v_btnh, segments_bt, window, scale) -> o_btnh. Token t attends to itself and to
# the `window` tokens before it that have its segment id. `window` is static, `scale` may be traced.

SCORE_BYTES = 2**30  # of float32 scores that attend_plain has at once


def attend_plain(q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale):
    """The reference, for any hardware: the scores of a band, softmax in float32.

    Blocks of queries are taken together up to SCORE_BYTES of scores; beyond that, groups of them
    one after the other, whose scores are formed again in the backward pass.
    """

    def attend(block):
        q_cnh, k_snh, v_snh, mask_ncs = block
        scores = jnp.einsum("cnh,snh->ncs", q_cnh, k_snh, preferred_element_type=jnp.float32)
        probs = jax.nn.softmax(jnp.where(mask_ncs, scores * scale, -jnp.inf), axis=-1)
        return jnp.einsum("ncs,snh->cnh", probs.astype(v_snh.dtype), v_snh)

    blocks = band(q_btnh, k_btnh, v_btnh, segments_bt, window)
    count, _, c, s = blocks[3].shape
    together = max(1, SCORE_BYTES // (4 * q_btnh.shape[2] * c * s))
    if count <= together:
        return jax.vmap(attend)(blocks).reshape(q_btnh.shape)
    return lax.map(jax.checkpoint(attend), blocks, batch_size=together).reshape(q_btnh.shape)


def band(q_btnh, k_btnh, v_btnh, segments_bt, window: int):
    """Cut rows into blocks of queries, each with all keys that its window can reach.

    Returns (q [b', c, n, h], k and v [b', s, n, h], mask [b', 1, c, s]) with b' = b t / c, where c
    is the smallest divisor of t that holds the window and s = 2 c: the block and the one before it.
    So the cost grows with t * window, not with t * t. Where no such c < t exists, c = s = t.
    """
    b, t = segments_bt.shape
    c = next((c for c in range(max(window, 1), t) if t % c == 0), t)

    def blocks(x, before: int):
        x = x.reshape(b, t // c, c, *x.shape[2:])
        if before and c < t:
            edge = [(0, 0)] * (x.ndim - 2)  # what stands before the first block belongs to none
            past = jnp.pad(x[:, :-1], [(0, 0), (1, 0), *edge], constant_values=-1)
            x = jnp.concatenate([past, x], axis=2)
        return x.reshape(b * (t // c), *x.shape[2:])

    own, seen = blocks(segments_bt, 0), blocks(segments_bt, 1)
    s = seen.shape[1]
    back_cs = jnp.arange(s - c, s)[:, None] - jnp.arange(s)[None, :]
    near_cs = (back_cs >= 0) & (back_cs <= window)
    mask = near_cs[None] & (own[:, :, None] == seen[:, None, :])
    return blocks(q_btnh, 0), blocks(k_btnh, 1), blocks(v_btnh, 1), mask[:, None]


# ------------------------------------------------------------------------------------------------
# Heads: from the projection of a layer to the gated outputs of its heads
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """What is static about the attention of one layer."""

    count: int
    width: int  # of one head
    window: int  # in tokens; with `paired` in half tokens
    paired: bool = False  # see pair_heads
    offset: bool = False  # see key_offset

    @property
    def gates(self) -> int:
        """Columns of the projection after q, k and v: gates of outputs, of values, and unused ones.

        The unused ones fill up to 128 columns where heads do too: a TPU reads whole tiles of 128.
        """
        return -(-2 * self.count // 128) * 128 if self.width % 128 == 0 else 2 * self.count


def norm(x):
    """RMS norm over the last axis, without gain, statistics in float32."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * lax.rsqrt(square + 2.0**-23)).astype(x.dtype)


def mix(*terms):
    """Weighted sum of (float32 weight, array): added in float32, returned in the arrays' dtype.

    In float32, so that the gradients of the weights, sums over all tokens, are too: summed in
    bfloat16, those of small models in the tests were up to 45 % off.
    """
    total = sum(jnp.asarray(weight, jnp.float32) * x for weight, x in terms)
    return total.astype(terms[0][1].dtype)


def rope_tables(freqs, positions_tn):
    """cos and sin, float32 [t, n or 1, h/2]: half of the pairs turn with `freqs`, half stand still.

    A dimension i is paired with i + h/2; the pairs that stand still carry content regardless of
    position.
    """
    angles = positions_tn[..., None].astype(jnp.float32) * freqs[None, None]
    still = [(0, 0), (0, 0), (0, freqs.shape[0])]
    return jnp.pad(jnp.cos(angles), still, constant_values=1.0), jnp.pad(jnp.sin(angles), still)


def rope(x_btnh, cos_tnh, sin_tnh):
    """Rotate the pairs (i, i + h/2) of every head by the angle of their position."""
    left, right = jnp.split(x_btnh, 2, axis=-1)
    cos, sin = (a.astype(x_btnh.dtype)[None] for a in (cos_tnh, sin_tnh))
    return jnp.concatenate([left * cos + right * sin, right * cos - left * sin], axis=-1)


def positions(t: int, heads: Heads):
    """Positions for the rotation, int [t, 1]; of paired heads [t, 2], of even and of odd ones.

    Even heads turn by 2t and odd ones by 2t + 1, although pair_heads sends the first half of the
    heads to place 2t: the original reshapes differently for the two, and so must we.
    """
    if heads.paired:
        return 2 * jnp.arange(t)[:, None] + jnp.arange(2)[None]
    return jnp.arange(t)[:, None]


def pair_heads(x_btnh):
    """Paired heads: [b, t, n, h] -> [b, 2t, n/2, h], two heads as one of twice the length.

    Token t becomes the positions 2t (first half of the heads) and 2t + 1 (second half), so a head
    also attends to the keys of its partner (record 58). The same window then reaches half as far.
    """
    b, t, n, h = x_btnh.shape
    return x_btnh.reshape(b, 2 * t, n // 2, h)


def key_offset(k_btnh):
    """The dimensions of the keys that do not rotate, from the token before (record 49).

    So one layer can do what takes two otherwise: find an earlier place like this one, and read what
    followed (induction). The first token of a row keeps its own; documents do not matter.
    """
    h = k_btnh.shape[-1]
    shifted = jnp.concatenate([k_btnh[:, :1], k_btnh[:, :-1]], axis=1)
    still = jnp.arange(h) % (h // 2) >= h // 4
    return jnp.where(still[None, None, None], shifted, k_btnh)


def attend_heads(
    attend: Callable, heads, proj_btp, *, values_btd, value_logits_btg, segments_bt, freqs, scale
):
    """QK norm, rotation, values, attention and gates of one layer: [b, t, d] of all its heads.

    `proj_btp` holds side by side q, k, v [d] and logits of gates [heads.gates]: n of the heads'
    outputs, n of their values, then unused ones. `values_btd`, the tokens' rows of the layer's
    value table, are added to v by the second gate; `value_logits_btg` (or None) is added to the
    logits. `attend` has the contract of attend_plain. This is the plain form of Kernels.attend; a
    kernel may do all of it at once.
    """
    b, t, _ = proj_btp.shape
    n, h = heads.count, heads.width
    q, k, v = (proj_btp[..., i * n * h : (i + 1) * n * h].reshape(b, t, n, h) for i in range(3))
    logits_btg = proj_btp[..., 3 * n * h :].astype(jnp.float32)
    if value_logits_btg is not None:
        logits_btg += value_logits_btg
    gates_btg = jax.nn.sigmoid(logits_btg)
    tables = rope_tables(freqs, positions(t, heads))
    if heads.paired:
        tables = [jnp.tile(x, (1, n // 2, 1)) for x in tables]
    q, k = rope(norm(q), *tables), rope(norm(k), *tables)
    if heads.offset:
        k = key_offset(k)
    if values_btd is not None:
        amount_btn = 2 * gates_btg[..., n : 2 * n]
        v = mix((1.0, v), (amount_btn[..., None], values_btd.reshape(v.shape)))
    if heads.paired:
        q, k, v = pair_heads(q), pair_heads(k), pair_heads(v)
        segments_bt = jnp.repeat(segments_bt, 2, axis=1)
    y = attend(q, k, v, segments_bt, heads.window, scale).reshape(b, t, n, h)
    return mix((gates_btg[..., :n, None], y)).reshape(b, t, n * h)


# ------------------------------------------------------------------------------------------------
# Model: tokens -> features
# ------------------------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """The four places where Part III may put something faster: the same up to rounding."""

    attend: Callable  # attend_heads with an attention
    squared_relu: Callable
    cross_entropy: Callable
    add_rows: Callable  # scatter_rows: the gradient of a lookup


def gate(x_btd, weights_ng):
    """A number in (0, 1) for each row of weights, from a token's first features: [b, t, n]."""
    x_btg = x_btd[..., : weights_ng.shape[1]].astype(jnp.float32)
    return jax.nn.sigmoid(jnp.einsum("btg,ng->btn", x_btg, weights_ng))


def smear(x_btd, weights_ng, strength):
    """Every token takes a little of the one before it, by a gate (record 34)."""
    before = jnp.pad(x_btd[:, :-1], ((0, 0), (1, 0), (0, 0)))  # the first has none
    return mix((1.0, x_btd), (strength * gate(x_btd, weights_ng), before))


def segment_ids(tokens_bt, bos: int):
    """Number of the document each token belongs to, within its row: int32, rising at every BOS."""
    return jnp.cumsum(tokens_bt == bos, axis=1, dtype=jnp.int32)


def bigram_ids(tokens_bt, rows: int):
    """Row of the bigram table for each token: a hash of it and the token before, int32 [b, t].

    The first token of a row gets the last row of the table, and the second one is hashed with that
    row's number in place of a token, because the original (record 62) works in place. Products wrap
    around in int32. Borders of documents are ignored. Two multiplications a token are cheaper on
    the device than four more bytes a token on the way to it.
    """
    last = jnp.full_like(tokens_bt[:, :1], rows - 1, dtype=jnp.int32)
    tokens_bt = tokens_bt.astype(jnp.int32)
    before = jnp.concatenate([last, tokens_bt[:, 1:-1]], axis=1)
    hashed = ((36313 * tokens_bt[:, 1:]) ^ (27191 * before)) % (rows - 1)
    return jnp.concatenate([last, hashed], axis=1)


TABLES = ("embed", "value_tables", "bigram_table")  # parameters that are looked up by row


def table_ids(cfg: Config, tokens_bt) -> dict[str, jax.Array]:
    """The rows of TABLES that the tokens use, int32 [b, t]; of value_tables within each layer."""
    bigrams = bigram_ids(tokens_bt, cfg.bigram_rows)
    return {"embed": tokens_bt, "value_tables": tokens_bt, "bigram_table": bigrams}


def look_up(cfg: Config, copies, tokens_bt) -> dict[str, jax.Array]:
    """The tokens' rows of TABLES: [b, t, d]; for value_tables a tuple of these, one for a layer.

    Not one array of all layers, of which each layer would have to copy its part.
    """
    ids = table_ids(cfg, tokens_bt)
    rows = {name: copies[name][ids[name]] for name in ("embed", "bigram_table")}
    first = [cfg.vocab * layer for layer in range(len(cfg.value_layers))]
    table = copies["value_tables"]
    return rows | {"value_tables": tuple(table[ids["value_tables"] + n] for n in first)}


def value_gate_weights(params, cfg: Config, i: int):
    """The gate of layer `i`'s values: (weights [n, g] on its input, on the values or None).

    It looks at GATE_INPUTS features: half of them are the first of the layer's input, half the
    first of the token's row of values; in paired layers all are of the input (record 55).
    """
    weights_ng = params["value_gate"][cfg.value_layers.index(i)]
    if i in cfg.paired_layers:
        return weights_ng, None
    return weights_ng[:, : GATE_INPUTS // 2], weights_ng[:, GATE_INPUTS // 2 :]


def projection(params, cfg: Config, i: int, heads: Heads):
    """Weights [3 d + gates, d] from the input of layer `i` to q, k, v and the logits of its gates.

    The gates look at GATE_INPUTS features of a token. As rows of the same matrix they cost 1 / 18
    of a matmul that is there anyway; alone, a pass over all activations.
    """
    d, at = cfg.width, cfg.attention_layers.index(i)
    w_qkv = params["attn_bank"][4 * at : 4 * at + 3].reshape(3 * d, d)
    gates = [params["attn_gate"][at]]
    if i in cfg.value_layers:
        gates.append(value_gate_weights(params, cfg, i)[0])
    gates = jnp.concatenate([jnp.pad(w, ((0, 0), (0, d - w.shape[1]))) for w in gates])
    gates = jnp.pad(gates, ((0, heads.gates - gates.shape[0]), (0, 0)))
    return jnp.concatenate([mix((params["qkv_lambda"][i], w_qkv)), gates.astype(w_qkv.dtype)])


def attention(
    params, cfg: Config, kernels: Kernels, i: int, x_btd, values_btd, segments_bt, window, hyper
):
    """What the attention of layer `i` adds to the stream, its weight included, from normed input.

    `values_btd` are the tokens' rows of the layer's value table, or None.
    """
    at, paired = cfg.attention_layers.index(i), i in cfg.paired_layers
    heads = Heads(cfg.heads, cfg.head_width, window, paired, i in cfg.long_layers)
    value_logits_btg = None
    if values_btd is not None:
        _, weights_ng = value_gate_weights(params, cfg, i)
        if weights_ng is not None:
            seen_btg = values_btd[..., : weights_ng.shape[1]]
            logits_btn = seen_btg @ weights_ng.T.astype(seen_btg.dtype)
            unused = heads.gates - 2 * heads.count
            value_logits_btg = jnp.pad(logits_btn, ((0, 0), (0, 0), (heads.count, unused)))
    y_btd = kernels.attend(
        heads,
        x_btd @ projection(params, cfg, i, heads).T,
        values_btd=values_btd,
        value_logits_btg=value_logits_btg,
        segments_bt=segments_bt,
        freqs=hyper.freqs,
        scale=hyper.attn_scale,
    )
    weight = params["post_lambdas"][i, 0] * params["o_lambda"][i]
    return y_btd @ mix((weight, params["attn_bank"][4 * at + 3])).T


def squared_relu(z):
    """relu(z)^2 (So et al. 2021)."""
    return jnp.square(jax.nn.relu(z))


def mlp(params, cfg: Config, kernels: Kernels, i: int, x_btd):
    """What the MLP of layer `i` adds to the stream, its weight included: ReLU squared."""
    up_fd, down_fd = params["mlp_bank"][i], params["mlp_bank"][cfg.layers + i]
    down_fd = mix((params["post_lambdas"][i, 1], down_fd))
    return kernels.squared_relu(x_btd @ up_fd.T) @ down_fd


def forward(
    params, rows, tokens_bt, cfg: Config, kernels: Kernels, windows: tuple[int, int], hyper
):
    """Tokens int32 [b, t] and their table rows -> normed output of the last layer [b, t, d].

    `params` are the compute copies (banks in cfg.dtype, small parameters in float32), `rows` what
    look_up finds in TABLES. The embedding x0 and the bigram row go into the stream again with
    the output of every attention. The output of layer `backout` is the input of all later
    attentions; half of it, at first, is taken out of the stream before the head (records 40, 77).
    """
    segments_bt = segment_ids(tokens_bt, cfg.bos)
    resid, x0_lambdas, bigram_lambdas = (
        params[name] for name in ("resid_lambdas", "x0_lambdas", "bigram_lambdas")
    )
    x0 = norm(smear(rows["embed"], params["smear_gate"], params["smear_lambda"][0]))
    bigram = rows["bigram_table"]
    skip = 2 * jax.nn.sigmoid(params["skip_lambda"][0]) * gate(x0, params["skip_gate"])
    x = mix((1.0, x0), (bigram_lambdas[0], bigram))
    outputs = []

    def layer(i: int, x):
        if i == cfg.skip[1]:  # no attention here: an earlier output instead (record 45)
            x = mix((1.0, x), (skip, outputs[cfg.skip[0]]))
        else:
            with jax.named_scope(f"attention{i}"):
                values = None
                if i in cfg.value_layers:
                    values = rows["value_tables"][cfg.value_layers.index(i)]
                source = norm(outputs[cfg.backout] if i > cfg.backout else x)
                window = windows[i in cfg.long_layers]
                y = attention(params, cfg, kernels, i, source, values, segments_bt, window, hyper)
                more = [(bigram_lambdas[i], bigram)] if i else []  # layer 0 has it already
                x = mix((resid[i, 0], x), (1.0, y), (x0_lambdas[i], x0), *more)
        with jax.named_scope(f"mlp{i}"):
            return mix((resid[i, 1], x), (1.0, mlp(params, cfg, kernels, i, norm(x))))

    if cfg.recompute:  # keep only what goes from layer to layer
        layer = jax.checkpoint(layer, static_argnums=0)
    for i in range(cfg.layers):
        x = layer(i, x)
        outputs.append(x)
    return norm(mix((1.0, x), (-params["backout_lambda"][0], outputs[cfg.backout])))


# ------------------------------------------------------------------------------------------------
# Loss: features -> summed cross-entropy
# ------------------------------------------------------------------------------------------------


def cap_logits(z, cfg: Config):
    """Logits a * sigmoid((z + b) / c), in (0, a), in float32 (records 9, 18, 54)."""
    a, b, c = cfg.logit_cap
    return a * jax.nn.sigmoid((z.astype(jnp.float32) + b) / c)


def targets_ahead(tokens, weights_k):
    """Rows int [b, t+1] -> targets int [b t, k] and their weights [b t, k] (record 53).

    Target j of token i is token i + 1 + j of the row. What lies beyond the row has weight 0;
    documents do not matter.
    """
    t, targets, weights = tokens.shape[1] - 1, [], []
    for j in range(weights_k.shape[0]):
        targets.append(jnp.pad(tokens[:, 1 + j :], ((0, 0), (0, j))))
        inside_t = jnp.arange(t) < t - j
        weights.append(jnp.broadcast_to(inside_t * weights_k[j], targets[-1].shape))
    return tuple(jnp.stack(x, axis=-1).reshape(-1, len(targets)) for x in (targets, weights))


def in_chunks(cfg: Config, *arrays):
    """Arrays [r, ...] as [chunks, c, ...]: the fewest equal chunks of c <= cfg.loss_chunk."""
    tokens = arrays[0].shape[0]
    chunks = -(-tokens // cfg.loss_chunk)
    while tokens % chunks:
        chunks += 1
    return [a.reshape(chunks, -1, *a.shape[1:]) for a in arrays]


def add_losses(totals, losses_ck, weights_ck):
    """The two sums of cross_entropy, with those of a chunk."""
    weighted, plain = totals
    return weighted + jnp.sum(losses_ck * weights_ck), plain + jnp.sum(losses_ck[:, 0])


def cross_entropy(x_rd, head_vd, targets_rk, weights_rk, cfg: Config):
    """(weighted sum of all losses, plain sum of the losses on the next token), float32, in nats.

    Features [r, d], head [v, d], targets int and weights float [r, k]. Works through cfg.loss_chunk
    tokens at a time, whose logits are formed again on the way back: those of 49,152 tokens would
    take 9.9 GB in float32. Capped logits are below a, so exp cannot overflow and needs no maximum.
    """

    @jax.checkpoint
    def add(totals, chunk):
        x_cd, targets_ck, weights_ck = chunk
        w_vd = wide_vd.astype(x_cd.dtype)
        z_cv = jnp.matmul(x_cd, w_vd.T, preferred_element_type=jnp.float32)
        capped_cv = cap_logits(z_cv, cfg)
        log_sum_c = jnp.log(jnp.sum(jnp.exp(capped_cv), axis=1))
        losses_ck = log_sum_c[:, None] - jnp.take_along_axis(capped_cv, targets_ck, axis=1)
        return add_losses(totals, losses_ck, weights_ck), None

    wide_vd = head_vd.astype(jnp.float32)  # so that its gradient is summed over chunks in float32
    zeros = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    return lax.scan(add, zeros, in_chunks(cfg, x_rd, targets_rk, weights_rk))[0]


def loss_sums(params, rows, tokens, cfg: Config, kernels: Kernels, windows, hyper, weights_k):
    """cross_entropy over rows [b, t+1]: token 0..t-1 of a row each predict the next k tokens."""
    x_btd = forward(params, rows, tokens[:, :-1], cfg, kernels, windows, hyper)
    targets_rk, weights_rk = targets_ahead(tokens, weights_k)
    x_rd = x_btd.reshape(-1, cfg.width)
    return kernels.cross_entropy(x_rd, params["head"], targets_rk, weights_rk, cfg)


def scatter_rows(grad_vd, ids, rows):
    """The gradient of a lookup: to row ids[i] of `grad_vd`, the gradient so far, add token i's row.

    Several tables [v / n, d] may lie in `grad_vd`, one under the other, that share the ids [...];
    then `rows` holds n arrays [..., d]. (In no fixed order on a GPU: last bits may differ.)
    """
    for n, x in enumerate(rows):
        at = ids + n * (grad_vd.shape[0] // len(rows))
        grad_vd = grad_vd.at[at].add(x.astype(grad_vd.dtype), mode="promise_in_bounds")
    return grad_vd


PLAIN = Kernels(
    functools.partial(attend_heads, attend_plain), squared_relu, cross_entropy, scatter_rows
)


# ------------------------------------------------------------------------------------------------
# Schedule: what holds at a given step. Plain Python; the devices get it as a Hyper.
# ------------------------------------------------------------------------------------------------


def stage_index(cfg: Config, step: int) -> int:
    """The number of the stage that `step` (from 0) belongs to."""
    return bisect.bisect_right(cfg.boundaries[1:-1], step)


def stage_at(cfg: Config, step: int) -> Stage:
    """The stage that `step` (from 0) belongs to."""
    return cfg.stages[stage_index(cfg, step)]


def lr_scale(cfg: Config, step: int) -> float:
    """Learning rate of `step` as a share of the full one: its stage's factor, then the floor.

    Larger batches bear larger rates: the factors are about the root of the batch's growth.
    """
    flat = (1 - cfg.cooldown) * cfg.scheduled
    falls = flat < step < cfg.scheduled
    done = (step - flat) / (cfg.scheduled - flat) if falls else float(step >= cfg.scheduled)
    return stage_at(cfg, step).lr_factor * (1 - done) + cfg.lr_floor * done


def muon_momentum(cfg: Config, step: int) -> float:
    """Muon's momentum: a linear warm-up, a plateau, a cooldown.

    Early gradients turn too fast to be averaged for long; the last steps follow the last gradients.
    """
    low, high = cfg.momentum
    up = min(1.0, step / cfg.momentum_warmup)
    down = max(0, step - (cfg.steps - cfg.momentum_cooldown)) / max(cfg.momentum_cooldown, 1)
    return low + (high - low) * min(up, 1 - down)


def loss_weights(cfg: Config, step: int) -> tuple[float, ...]:
    """Weights of the losses on the next token, the one after, ...: linear within the stage."""
    at = stage_index(cfg, step)
    first, end = cfg.boundaries[at : at + 2]
    done, stage = (step - first) / (end - first), cfg.stages[at]
    return tuple(a + (b - a) * done for a, b in zip(stage.weights, stage.weights_end, strict=True))


def is_tied(cfg: Config, step: int) -> bool:
    """Whether head and embedding are still one matrix when `step` updates them.

    They part after an Adam step, so that no gradient is summed over both states: the first one at
    or after the `tied` share of the schedule. In the record that is step 967.
    """
    last = round(cfg.tied * cfg.scheduled)
    last += -(last + 1) % cfg.adam_every
    return cfg.tied > 0 and step <= last


def is_adam_step(cfg: Config, step: int) -> bool:
    """Whether `step` updates the Adam parameters: the last of every adam_every steps."""
    return (step + 1) % cfg.adam_every == 0


def every(period: int, step: int) -> bool:
    """Whether something with this period (0: never) is due after `step` steps."""
    return period > 0 and step % period == 0


def is_due(period: int, last: int, step: int) -> bool:
    """Whether a multiple of `period` (0: never) lies after `last` and not after `step`."""
    return period > 0 and step // period > last // period


@functools.cache
def yarn(cfg: Config, stage: int) -> tuple[np.ndarray, float]:
    """(rotary frequencies float32 [h/4], attention scale) of a stage: YaRN (Peng et al. 2023).

    When the long window grows, dimensions that turn less than once within the old one slow down in
    proportion, those that turn 32 times keep their frequency, and those between are interpolated.
    Attention over more keys gets a little sharper.
    """
    # Every step is rounded to float32, as in the original.
    freqs = (1 / cfg.rope_base) ** np.linspace(0, 1, cfg.head_width // 4, dtype=np.float32)
    scale = cfg.attn_scale
    for before, after in zip(cfg.stages[:stage], cfg.stages[1 : stage + 1], strict=True):
        old, new = before.windows[1], after.windows[1]
        if old == new:
            continue
        turns = old * freqs / np.float32(2 * math.pi)
        keep = np.clip((turns - 1) / 31, 0, 1)
        freqs = (freqs * (old / new + keep * (1 - old / new))).astype(np.float32)
        scale *= 1 + 0.2 * math.log(new / old)
    return freqs, scale


class Hyper(NamedTuple):
    """What changes from step to step without a new program: float32 arrays, sent with a batch.

    What changes shapes or masks (rows, windows, how many targets) is static instead: four stages
    are four programs. All else of the schedule is here, or each step would be a program of its own.
    """

    lr: np.ndarray  # factor on every learning rate
    momentum: np.ndarray
    adam_count: np.ndarray  # Adam steps including the next one, for the bias correction
    tied: np.ndarray  # 1: head and embedding are one matrix
    attn_scale: np.ndarray
    freqs: np.ndarray  # [h/4] rotary, radians per token
    weights: np.ndarray  # [k] of the losses; k as in the stage that has most, so that shapes stay


def hyper_at(cfg: Config, step: int) -> Hyper:
    """The Hyper of `step`."""
    freqs, attn_scale = yarn(cfg, stage_index(cfg, step))
    weights = np.zeros(max(len(stage.weights) for stage in cfg.stages))
    now = loss_weights(cfg, step)
    weights[: len(now)] = now
    values = (
        lr_scale(cfg, step),
        muon_momentum(cfg, step),
        step // cfg.adam_every + 1,
        is_tied(cfg, step),
        attn_scale,
        freqs,
        weights,
    )
    return Hyper(*(np.asarray(value, np.float32) for value in values))


# ------------------------------------------------------------------------------------------------
# Optimizers
# ------------------------------------------------------------------------------------------------

# Coefficients (a, b, c) of X <- aX + (bA + cAA)X, A = XX^T. Each triple is the best odd quintic for
# the singular values that the one before leaves (Polar Express, Amsel et al. 2025; five steps from
# [1/1000, 1], with the paper's safety factor).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(x, dtype):
    """Approximately the nearest (semi-)orthogonal matrices to a bank [l, rows, cols], in `dtype`.

    Drives all singular values towards 1 with matmuls only. The Gram matrix is taken on the shorter
    side: for [4d, d] that is 9 d^3 multiply-adds a step, on the longer side it would be 96.
    """
    x = x.astype(dtype)
    size = jnp.linalg.norm(x.astype(jnp.float32), axis=(1, 2), keepdims=True)
    x = (x / (size * 1.02 + 1e-6)).astype(dtype)
    tall = x.shape[1] > x.shape[2]
    for a, b, c in POLAR_EXPRESS:
        gram = jnp.einsum("lrc,lrk->lck" if tall else "lrc,lkc->lrk", x, x)
        poly = b * gram + c * (gram @ gram)
        x = a * x + (x @ poly if tall else poly @ x)
    return x


def even_rows(update, variance, beta):
    """NorMuon (Li et al. 2025, record 41): rows of an orthogonalized update made equally large.

    [l, rows, cols] and the running mean square of each row [l, rows] -> (update, mean square). The
    matrix keeps its Frobenius norm.
    """
    variance = beta * variance + (1 - beta) * jnp.mean(jnp.square(update), axis=2)
    even = update / jnp.sqrt(jnp.maximum(variance, 1e-10))[..., None]
    before, after = (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) for x in (update, even))
    return even * (before / jnp.maximum(after, 1e-10)), variance


def muon(param, grad, momentum, variance, lr, decay, mu, beta, scale, dtype):
    """One NorMuon step on a bank, all float32: (new bank, new momentum, new variance).

    Muon (Jordan et al. 2024, record 4) puts the nearest orthogonal matrix in place of a matrix's
    momentum: all directions learn at one rate. NorMuon then makes its rows equally large.
    Bank, gradient, momentum are [l, rows, cols], variance [l, rows]; `scale` [l] is the factor on
    the learning rate of each matrix. Momentum and its Nesterov look-ahead are averages, so that
    `grad` keeps its size while `mu` warms up. Weights decay only where the update shrinks them or
    leaves them (cautious, after Liang et al. 2024; record 43), by lr * scale * lr * decay.
    """
    momentum = mu * momentum + (1 - mu) * grad
    update = orthogonalize(mu * momentum + (1 - mu) * grad, dtype).astype(jnp.float32)
    update, variance = even_rows(update, variance, beta)
    shrinks = update * param >= 0
    rate = lr * scale[:, None, None]
    return param - rate * (update + lr * decay * shrinks * param), momentum, variance


def adam(param, grad, mean, square, lr, decay, count, betas, eps):
    """One Adam step (Kingma & Ba 2015), all float32: (new param, new mean, new mean square).

    As in the original, eps joins the root before its bias correction. Weights decay only where the
    update shrinks them, by lr * lr * decay; where there is no update yet, none (record 50).
    """
    b1, b2 = betas
    mean = b1 * mean + (1 - b1) * grad
    square = b2 * square + (1 - b2) * jnp.square(grad)
    correction = jnp.sqrt(1 - b2**count) / (1 - b1**count)
    update = lr * correction * mean / (jnp.sqrt(square) + eps)
    shrinks = update * param > 0
    return param - update - lr * lr * decay * shrinks * param, mean, square


def apply_updates(cfg: Config, state, grads, hyper: Hyper):
    """The state after an update of the parameters in `grads`, on this device's share of it.

    Called inside shard_map. `grads` has the same share of the gradient summed over devices and, of
    Adam parameters, over the steps since their last update. While `tied`, the embedding's gradient
    goes to the head, and the embedding with its moments is a copy of the head (records 51, 53).
    """
    new = {kind: dict(entries) for kind, entries in state.items()}
    table = param_table(cfg)
    for name, row in table.items():  # in its order: what is tied copies what stands before it
        if name not in grads:
            continue
        param, *moments = (state[kind][name] for kind in ("params", "first", "second"))
        grad, rates = grads[name], {"lr": hyper.lr * row.lr, "decay": row.decay}
        if row.optimizer == "muon":
            mine, cuts = len(param), lax.axis_size(AXIS)
            scale = np.pad(np.float32(row.scale), (0, mine * cuts - len(row.scale)))
            scale = lax.dynamic_slice_in_dim(jnp.asarray(scale), lax.axis_index(AXIS) * mine, mine)
            rates |= {"mu": hyper.momentum, "beta": cfg.variance_beta, "scale": scale}
            after = muon(param, grad, *moments, **rates, dtype=cfg.dtype)
        else:
            tied = [grads[n] for n, r in table.items() if r.tied_to == name]
            grad += sum(hyper.tied * x for x in tied)
            rates |= {"count": hyper.adam_count, "betas": row.betas, "eps": cfg.adam_eps}
            after = adam(param, grad, *moments, **rates)
        if row.tied_to:
            copied = (new[kind][row.tied_to] for kind in ("params", "first", "second"))
            after = [jnp.where(hyper.tied > 0, a, b) for a, b in zip(copied, after, strict=True)]
        new["params"][name], new["first"][name], new["second"][name] = after
    return new


# ------------------------------------------------------------------------------------------------
# The step: what every device does, with every collective in plain sight (inside shard_map)
# ------------------------------------------------------------------------------------------------


def compute_copies(cfg: Config, params):
    """What the model computes with: large parameters in cfg.dtype, small ones as they are."""
    table = param_table(cfg)
    return {n: x.astype(cfg.dtype) if table[n].sharded else x for n, x in params.items()}


def micro_rows(cfg: Config, rows: int, t: int) -> list[int]:
    """How many of a device's `rows` can be taken at a time within cfg.micro_tokens; most first."""
    return [k for k in range(rows, 0, -1) if rows % k == 0 and k * t <= cfg.micro_tokens] or [1]


def micro_batches(cfg: Config, tokens):
    """A device's rows uint16 [b, t+1] as int32 [micro-batches, rows of each, t+1]."""
    rows, length = tokens.shape
    return tokens.astype(jnp.int32).reshape(-1, micro_rows(cfg, rows, length - 1)[0], length)


def grads_step(cfg: Config, kernels: Kernels, stage: Stage, copies, tokens, hyper: Hyper):
    """(gradients of this device's rows in the dtypes of `copies`, mean loss over all devices).

    Over micro-batches gradients are summed in float32. Tables take part only with the rows that
    tokens look up: add_rows adds the gradients of those rows to the table's. The gradient is that
    of the summed loss of a row, averaged over the rows of the batch, as in the original: it grows
    with the length of a row from stage to stage, while the moments remember the old size.
    """
    weights = {name: x for name, x in copies.items() if name not in TABLES}
    tables = unpadded(cfg, {name: copies[name] for name in TABLES})
    weights_k = hyper.weights[: len(stage.weights)]

    def loss(weights, rows, tokens):
        # Banks keep their padding, since matrices are taken by number: to cut it off would be a
        # pass over their gradients, 1.2 of 235 M cycles predicted for the record's on a v6e-8.
        params = weights | unpadded(cfg, {"head": weights["head"]})
        sums = loss_sums(params, rows, tokens, cfg, kernels, stage.windows, hyper, weights_k)
        return sums[0] / stage.rows, sums[1]

    def add(carry, tokens):
        total, grads = carry
        ids, rows = table_ids(cfg, tokens[:, :-1]), look_up(cfg, tables, tokens[:, :-1])
        backward = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, plain), (d_weights, d_rows) = backward(weights, rows, tokens)
        summed = {name: grads[name] + x.astype(jnp.float32) for name, x in d_weights.items()}
        for name in TABLES:
            summed[name] = kernels.add_rows(grads[name], ids[name], jax.tree.leaves(d_rows[name]))
        return (total + plain, summed), None

    zeros = {name: jnp.zeros(x.shape, jnp.float32) for name, x in (weights | tables).items()}
    start, batches = (jnp.zeros((), jnp.float32), zeros), micro_batches(cfg, tokens)
    alone = len(batches) == 1  # a loop of one would keep XLA from leaving out the zeros
    total, grads = (add(start, batches[0]) if alone else lax.scan(add, start, batches))[0]
    grads = {n: grown(x.astype(copies[n].dtype), len(copies[n])) for n, x in grads.items()}
    return grads, lax.psum(total / stage.batch_tokens, AXIS)


def update_step(cfg: Config, state, due, hyper: Hyper):
    """(state, compute copies of what changed, norm of the gradient) after an update of `due`.

    due: name -> this device's gradients of the steps since the last update, a tuple. Each device
    receives the sum of its own share (reduce-scatter), updates it, and all gather the results,
    already rounded: ZeRO. Large gradients cross the network in the compute dtype, as in the
    original: half the bytes, and in bfloat16 partial sums that are rounded at every device. An
    all_to_all would not round them, but half of it crosses the two links in the middle of a v6e-8:
    19 ms instead of 9. The norm is that of the summed gradients of all parameters in `due`.
    """
    table, reduced, cut, whole = param_table(cfg), {}, 0.0, 0.0
    for name, grads in due.items():
        total = sum(grad.astype(jnp.float32) for grad in grads)
        if table[name].sharded:
            total = lax.psum_scatter(total.astype(cfg.dtype), AXIS, tiled=True)
            reduced[name] = total.astype(jnp.float32)
            cut += jnp.sum(jnp.square(reduced[name]))
        else:
            reduced[name] = lax.psum(total, AXIS)
            whole += jnp.sum(jnp.square(reduced[name]))
    state = apply_updates(cfg, state, reduced, hyper)
    copies = compute_copies(cfg, {name: state["params"][name] for name in due})
    gather = functools.partial(lax.all_gather, axis_name=AXIS, tiled=True)
    copies = {name: gather(x) if table[name].sharded else x for name, x in copies.items()}
    return state, copies, jnp.sqrt(lax.psum(cut, AXIS) + whole)


def eval_step(cfg: Config, kernels: Kernels, copies, tokens, hyper: Hyper):
    """The summed loss on the next token of a batch of validation rows, in nats."""
    params, windows = unpadded(cfg, copies), cfg.val_windows

    def loss(tokens):
        rows = look_up(cfg, params, tokens[:, :-1])
        return loss_sums(params, rows, tokens, cfg, kernels, windows, hyper, jnp.ones(1))[1]

    return lax.psum(jnp.sum(lax.map(loss, micro_batches(cfg, tokens))), AXIS)


# ------------------------------------------------------------------------------------------------
# Programs: all that the devices run, described by shapes alone
# ------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A step before it is compiled."""

    step: Callable
    args: tuple  # shapes, dtypes and shardings of its arguments
    out: tuple  # how its results lie on the mesh
    donates: tuple = ()  # numbers of the arguments whose memory its results may take


def programs_of(cfg: Config, step: int) -> tuple[str, ...]:
    """The names of the programs of a step, in order: gradients, Muon, and at its own steps Adam.

    Adam's gradients wait on the device that made them for the update that sums adam_every of them
    (record 39: tables are noisy and want larger batches). So they cross the network only then: per
    step and device 0.54 GB enter the reduction instead of 0.94, and 1.9 with float32 at every step.
    At the 112 GB/s of a v6e-8's corner chip that is 5, 8 and 17 ms.
    """
    adam_too = ("adam",) * is_adam_step(cfg, step)
    return f"grads{stage_index(cfg, step)}", "muon", *adam_too


def updated(cfg: Config, update: str) -> list[str]:
    """The parameters that the program `update`, "muon" or "adam", changes."""
    return [name for name, row in param_table(cfg).items() if row.optimizer == update]


def programs(cfg: Config, mesh: Mesh, kernels: Kernels) -> dict[str, Program]:
    """Name -> Program: the gradients of each stage, two updates, validation.

    Copies are whole on every device, the state is cut, and each device keeps the gradients of its
    own rows (in one array, [devices * n, ...] for a parameter [n, ...]) until an update takes them.
    """

    def leaf(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    def rows(count, t):
        return leaf((count, t + 1), jnp.uint16, AXIS)

    def grads(x, steps):
        return (leaf((mesh.size * x.shape[0], *x.shape[1:]), x.dtype, AXIS),) * steps

    state = abstract_state(cfg, mesh)
    copies = jax.eval_shape(functools.partial(compute_copies, cfg), state["params"])
    copies = {name: leaf(x.shape, x.dtype) for name, x in copies.items()}
    hyper = jax.tree.map(lambda x: leaf(x.shape, x.dtype), hyper_at(cfg, 0))
    state_specs = jax.tree.map(lambda x: x.sharding.spec, state)
    found = {}
    for i, stage in enumerate(cfg.stages):
        step = functools.partial(grads_step, cfg, kernels, stage)
        args = copies, rows(stage.rows, stage.row_tokens), hyper
        found[f"grads{i}"] = Program(step, args, (P(AXIS), P()))
    for update, steps in (("muon", 1), ("adam", cfg.adam_every)):
        due = {name: grads(copies[name], steps) for name in updated(cfg, update)}
        step, args = functools.partial(update_step, cfg), (state, due, hyper)
        found[update] = Program(step, args, (state_specs, P(), P()), donates=(0,))
    args = copies, rows(cfg.val_batch // cfg.val_row, cfg.val_row), hyper
    found["eval"] = Program(functools.partial(eval_step, cfg, kernels), args, P())
    return found


# XLA on GPUs leaves out the rounding to bfloat16 between operations that it can fuse, and so keeps
# activations as float32: 17.65 GiB of temporaries instead of 16.31 in the record's largest stage
# (counted in its program for an absent H100).
COMPILER_OPTIONS = {"gpu": {"xla_allow_excess_precision": False}}


def lower(program: Program, mesh: Mesh):
    """A program lowered for the devices of `mesh`, which need not be there.

    Its `.compile()` gives the executable. compile_all does that for all of a run, side by side.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, program.args)
    step = jax.shard_map(
        program.step, mesh=mesh, in_specs=specs, out_specs=program.out, check_vma=False
    )
    options = COMPILER_OPTIONS.get(mesh.devices.flat[0].platform)
    step = jax.jit(step, donate_argnums=program.donates, compiler_options=options)
    return step.lower(*program.args)


# ------------------------------------------------------------------------------------------------
# Token stream: shards -> one stream of tokens -> rows
# ------------------------------------------------------------------------------------------------

SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024  # the llm.c token file format


def open_shard(path) -> np.memmap:
    """The tokens of a shard as a memory map, uint16; UserError if the file is not a whole shard."""
    try:
        size = Path(path).stat().st_size
        header = np.fromfile(path, dtype="<i4", count=3).tolist()
    except OSError as error:
        cure = "make it readable, or download or tokenize it again"
        raise UserError(f"{path}: cannot be read ({error.strerror}): {cure}") from None
    problem = f"{size} bytes is too short for a header"
    if size >= HEADER_BYTES:
        magic, version, count = header
        promised, problem = HEADER_BYTES + 2 * count, ""
        if magic != SHARD_MAGIC:
            problem = f"magic number {magic}, not {SHARD_MAGIC}: not a token shard"
        elif version != SHARD_VERSION:
            problem = f"version {version} of the format, only version {SHARD_VERSION} is known"
        elif count <= 0 or size != promised:
            problem = f"{size} bytes, but its header promises {count} tokens ({promised} bytes)"
    if problem:
        raise UserError(f"{path}: {problem}: delete it and download or tokenize it again")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)


class TokenStream:
    """The shards of one split in the order of their names, as one stream of tokens.

    A place in it is one number, counted from the first token of the first shard: the cursor.
    """

    def __init__(self, folder: Path, split: str, bos: int):
        names = re.compile(rf".*_{split}_\d+\.bin")
        self.paths = sorted(path for path in folder.glob("*.bin") if names.fullmatch(path.name))
        if not self.paths:
            raise UserError(
                f"no {split} shards (*_{split}_*.bin) in {folder}: get some with "
                "data/cached_fineweb10B.py or data/tokenize_text.py, or name another --data"
            )
        for path in self.paths:
            open_shard(path)  # whole, or a UserError
        self.files = [open(path, "rb") for path in self.paths]  # these, whatever takes their names
        self.lock, self.bos = threading.Lock(), bos  # a place in a file belongs to one thread
        sizes = (os.fstat(file.fileno()).st_size for file in self.files)
        self.sizes = [(size - HEADER_BYTES) // 2 for size in sizes]
        self.ends = np.cumsum(self.sizes)
        self.documents = functools.lru_cache(maxsize=2)(self._documents)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def shard_at(self, cursor: int) -> tuple[int, int]:
        """(number of the shard that holds `cursor`, its first position)."""
        number = int(np.searchsorted(self.ends, cursor, side="right"))
        if number == len(self.sizes):
            raise UserError(
                f"the tokens in {self.paths[0].parent} end at {len(self):,}: "
                "download more shards or use fewer steps"
            )
        return number, int(self.ends[number]) - self.sizes[number]

    def read(self, cursor: int, count: int) -> np.ndarray:
        """`count` tokens from `cursor` on, uint16, across shard borders.

        Read and not mapped: of a file that shrinks, a map would end the process without a word.
        """
        out, done = np.empty(count, "<u2"), 0
        while done < count:
            number, start = self.shard_at(cursor + done)
            at = cursor + done - start
            part = out[done : done + self.sizes[number] - at]
            with self.lock:
                self.files[number].seek(HEADER_BYTES + 2 * at)
                if self.files[number].readinto(part) < part.nbytes:
                    raise UserError(f"{self.paths[number]} has become shorter under the run")
            done += len(part)
        return out

    def _documents(self, number: int) -> np.ndarray:
        """Where documents begin in shard `number`; `documents` keeps two shards' places."""
        size = self.sizes[number]
        return np.flatnonzero(self.read(int(self.ends[number]) - size, size) == self.bos)


def plain_rows(stream: TokenStream, cursor: int, rows: int, t: int):
    """(uint16 [rows, t+1], next cursor): neighbouring rows share one token, none is left out."""
    tokens = stream.read(cursor, rows * t + 1)
    return np.lib.stride_tricks.sliding_window_view(tokens, t + 1)[::t], cursor + rows * t


def plan_packed(stream: TokenStream, cursor: int, rows: int, t: int, doc_cap: int):
    """([(row, start, stop)], next cursor): which pieces of the stream fill the rows of a batch.

    A piece begins at a document's BOS and ends with the document, at doc_cap tokens or where the
    row is full; the rest of a cut document is passed over. Rows are filled in order with t+1
    tokens each (t inputs and the last target). A shard with too few documents left for the whole
    batch is left for the next one. This is the original speedrun's order on eight devices; ours
    does not depend on the number of devices.
    """
    while True:
        number, base = stream.shard_at(cursor)
        starts = stream.documents(number)
        stops = np.append(starts[1:], stream.sizes[number])[: len(starts)]
        first = int(np.searchsorted(starts, cursor - base))
        pieces, row, room = [], 0, t + 1
        # Numbers one by one: a list of a shard's 150,000 documents would take 30 ms a batch.
        for start, stop in zip(map(int, starts[first:]), map(int, stops[first:]), strict=True):
            stop = min(stop, start + doc_cap, start + room)
            pieces.append((row, base + start, base + stop))
            room -= stop - start
            if room == 0:
                row, room = row + 1, t + 1
                if row == rows:
                    return pieces, base + stop
        cursor = int(stream.ends[number])


def packed_rows(stream: TokenStream, cursor: int, rows: int, t: int, doc_cap: int):
    """(uint16 [rows, t+1], next cursor) as planned by plan_packed."""
    pieces, cursor = plan_packed(stream, cursor, rows, t, doc_cap)
    tokens = np.concatenate([stream.read(start, stop - start) for _, start, stop in pieces])
    return tokens.reshape(rows, t + 1), cursor


def next_rows(stream: TokenStream, cursor: int, stage: Stage):
    """(uint16 [rows, t+1], next cursor) of a global batch of `stage`, from the cursor alone."""
    if stage.doc_cap:
        return packed_rows(stream, cursor, stage.rows, stage.row_tokens, stage.doc_cap)
    return plain_rows(stream, cursor, stage.rows, stage.row_tokens)


# ------------------------------------------------------------------------------------------------
# Loader: batches that are on the devices ahead of use
# ------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What a step needs beside the state."""

    tokens: jax.Array  # uint16 [rows, t+1], cut over the devices
    hyper: Hyper


def put(array: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """`array` on the devices of `mesh`: of several hosts each sends its own devices their part."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def put_hyper(cfg: Config, step: int, mesh: Mesh) -> Hyper:
    """The Hyper of `step`, whole on every device."""
    return jax.tree.map(lambda x: put(x, mesh, P()), hyper_at(cfg, step))


def train_batches(cfg: Config, mesh: Mesh, stream: TokenStream, step: int, cursor: int):
    """Yield the Batch of every step from `step` to the end of the run."""
    for now in range(step, cfg.steps):
        rows, cursor = next_rows(stream, cursor, stage_at(cfg, now))
        yield Batch(put(rows, mesh, P(AXIS)), put_hyper(cfg, now, mesh))


STALL_SECONDS = 10  # a batch that takes longer is reported


@contextlib.contextmanager
def prefetch(items, depth: int, running: threading.Event, late: Callable = print):
    """An iterator over `items`, which a thread draws `depth` ahead while the clock is `running`.

    Only then: the loader gets no work done for free. An exception in the thread is raised at the
    item that it prevented; `late` is told when one takes long; leaving the block ends the thread.
    """
    ready, left = queue.Queue(depth), threading.Event()

    def draw():
        try:
            source = iter(items)
            while not left.is_set():
                if running.wait(timeout=0.1):
                    ready.put((next(source), None))
        except BaseException as error:  # whatever it is, the main thread must hear of it
            ready.put((None, error))

    def take() -> Iterator:
        waited = 0
        while True:
            try:
                item, error = ready.get(timeout=STALL_SECONDS)
            except queue.Empty:
                waited += STALL_SECONDS
                late(f"waiting for the loader for {waited} s: is the disk of the data slow?")
                continue
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            waited = 0
            yield item

    threading.Thread(target=draw, daemon=True).start()
    try:
        yield take()
    finally:
        left.set()
        with contextlib.suppress(queue.Empty):  # room for an item that waits to be put
            ready.get_nowait()


# ------------------------------------------------------------------------------------------------
# Training: the clock and the loop
# ------------------------------------------------------------------------------------------------


class Clock:
    """Milliseconds of training, carried over a resume; the loader works while it is `running`."""

    def __init__(self, elapsed_ms: float = 0.0):
        self.total, self.since, self.running = elapsed_ms, 0.0, threading.Event()

    def start(self):
        """Count, if it does not already."""
        if not self.running.is_set():
            self.since = time.perf_counter()
            self.running.set()

    def stop(self):
        """Hold."""
        self.total = self.ms()
        self.running.clear()

    def ms(self) -> float:
        """Training time so far."""
        counting = self.running.is_set()
        return self.total + (1000 * (time.perf_counter() - self.since) if counting else 0.0)


def start_state(cfg: Config, mesh: Mesh) -> Callable:
    """A jitted function seed -> training state, born in its shards."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, mesh))
    return jax.jit(functools.partial(init_state, cfg, mesh.size), out_shardings=shardings)


def start_copies(cfg: Config, mesh: Mesh) -> Callable:
    """A jitted function parameters -> compute copies, whole on every device."""
    whole = NamedSharding(mesh, P())
    return jax.jit(functools.partial(compute_copies, cfg), out_shardings=whole)


def warm_up(cfg: Config, mesh: Mesh, compiled: dict, state, copies):
    """Run every program once on dummy tokens, so that first-call costs are outside the clock.

    Consumes the state; the real one is made after it, anew from the seed.
    """
    hyper = put_hyper(cfg, 0, mesh)

    def dummy(rows, t):
        return put(np.full((rows, t + 1), cfg.bos, np.uint16), mesh, P(AXIS))

    for i, stage in enumerate(cfg.stages):
        tokens = dummy(stage.rows, stage.row_tokens)
        grads, _ = compiled[f"grads{i}"](copies, tokens, hyper)
    for update, steps in (("muon", 1), ("adam", cfg.adam_every)):
        due = {name: (grads[name],) * steps for name in updated(cfg, update)}
        state, *_ = compiled[update](state, due, hyper)
    tokens = dummy(cfg.val_batch // cfg.val_row, cfg.val_row)
    jax.block_until_ready((state, compiled["eval"](copies, tokens, hyper)))


def evaluate(cfg: Config, mesh: Mesh, program, copies, step: int, stream: TokenStream) -> float:
    """Mean loss in nats over the first val_tokens of the validation split, after `step` steps."""
    hyper, sums = put_hyper(cfg, max(step - 1, 0), mesh), []
    for start in range(0, cfg.val_tokens, cfg.val_batch):
        rows, _ = plain_rows(stream, start, cfg.val_batch // cfg.val_row, cfg.val_row)
        sums.append(program(copies, put(rows, mesh, P(AXIS)), hyper))
    return float(np.sum([np.asarray(x, np.float64) for x in sums])) / cfg.val_tokens


def train(cfg: Config, out: Path, command: str, saved=None, profile=False, say=print) -> Path:
    """Run the whole thing, or what is left after the checkpoint `saved`; returns the run's folder.

    Outside the clock: checks, compilation, warm-up (after which the state is made anew from the
    seed), validation, the last checkpoint. Inside: every training step, all loading of its data,
    and checkpoints on the way. A checkpoint is taken where no gradients wait for Adam, and the end
    that a signal asks for comes there too.

    From Parts II and III: make_mesh, data_folder, check_tokens, check_unchanged, cursor_after,
    run_facts and open_log (what goes to the disk and the terminal), pick_kernels, compile_all,
    load_state, Saver (checkpoints), keeps_end, ask_to_stop (signals), trace (--profile),
    demonstrate (end of `tiny`).
    """
    mesh, first = make_mesh(cfg), saved.step if saved else 0
    kernels, reason = pick_kernels(cfg, mesh.devices.flat[0])
    folder = data_folder(cfg, say)
    stream, val_stream = (TokenStream(folder, split, cfg.bos) for split in ("train", "val"))
    shards = check_tokens(cfg, stream, val_stream)
    facts = run_facts(cfg, mesh, command, reason) | {"data": shards}
    log = open_log(cfg, facts, folder, out, saved, profile, say)
    compiled, facts = compile_all(cfg, mesh, kernels, say)
    log.compiled(facts)
    init, copy = start_state(cfg, mesh), start_copies(cfg, mesh)
    state = init(np.uint32(cfg.seed))
    warm_up(cfg, mesh, compiled, state, copy(state["params"]))
    state = load_state(mesh, saved) if saved else init(np.uint32(cfg.seed))
    copies = jax.block_until_ready(copy(state["params"]))
    clock, last_saved, waiting, pending = log.clock, first, {}, None
    batches = train_batches(cfg, mesh, stream, first, cursor_after(cfg, stream, first))

    def report():
        """Wait for the loss of the step before, if nobody has, and log it."""
        nonlocal pending
        if pending is not None:
            log.trained(*pending)
            pending = None

    with (
        prefetch(batches, cfg.prefetch, clock.running, say) as supply,
        ask_to_stop() as asked,
        Saver(cfg, log) as saver,
    ):
        for step in range(first, cfg.steps + 1):
            ends, signalled = step == cfg.steps, asked(step)
            progressed = not saved or step > first  # or this state and its loss are on the disk
            stops = ends or (signalled and not waiting)
            validates = ends or (every(cfg.val_every, step) and progressed)
            if validates or stops:
                report()
                jax.block_until_ready(state)
                clock.stop()
                if validates:
                    val_loss = evaluate(cfg, mesh, compiled["eval"], copies, step, val_stream)
                    check_unchanged(shards, stream, val_stream)
                    log.validated(step, val_loss)
                if stops:
                    keeps = keeps_end(cfg) if ends else progressed
                    if keeps:
                        saver.save(step, state)
                    break

            clock.start()
            if profile:
                trace(step - first, log.folder, pending)
            batch = next(supply)
            grads_of, *updates = programs_of(cfg, step)
            (grads, loss), norms = compiled[grads_of](copies, batch.tokens, batch.hyper), {}
            if not waiting and is_due(cfg.checkpoint_every, last_saved, step):
                report()
                saver.save(step, state)  # copied while the devices compute gradients
                last_saved = step
            waiting = {name: (*waiting.get(name, ()), grad) for name, grad in grads.items()}
            del grads  # or those that an update has taken would lie beside the next program
            for update in updates:
                due = {name: waiting.pop(name) for name in updated(cfg, update)}
                state, changed, norms[update] = compiled[update](state, due, batch.hyper)
                copies |= changed
                del due
            report()  # of the step before, while this one runs: no step waits for its loss
            pending = step + 1, loss, norms
    log.end(step, signalled, saver.missing)
    if cfg.sample_tokens:
        demonstrate(cfg, log.folder, val_stream, val_loss, say)
    return log.folder


# ================================================================================================
# PART II: AROUND A RUN
# ================================================================================================

# ------------------------------------------------------------------------------------------------
# Validation and overrides: a wrong number is refused here, with its name and what would be valid
# ------------------------------------------------------------------------------------------------

POSITIVE = (
    "layers width heads mlp_width bigram_rows steps adam_every loss_chunk micro_tokens val_tokens "
    "val_row val_batch prefetch log_every momentum_warmup attn_scale"
).split()
NOT_NEGATIVE = (
    "val_every checkpoint_every devices sample_tokens seed extension momentum_cooldown lr_muon "
    "lr_adam decay_muon decay_adam"
).split()
SHARES = "cooldown", "lr_floor", "tied", "variance_beta"
AT_MOST = {"steps": 10**6, "layers": 1000, "width": 2**16, "seed": 2**32 - 1}
MACHINE = [field.name for field in dataclasses.fields(Config)]  # what --resume may --set:
MACHINE = MACHINE[MACHINE.index("devices") :]  # the last block of the config, but for its data
CHOICES = {
    "encoding": ("gpt2", "bytes", "bpe"),
    "compute_dtype": ("bfloat16", "float32"),
    "kernels": ("auto", "plain"),
    "checkpoint_end": ("auto", "always", "never"),
}


def rules(c: Config):
    """Yield (field, whether it is valid, what would be); each may trust those before it."""
    for obj, prefix in ((c, ""), *((s, f"stages.{i}.") for i, s in enumerate(c.stages))):
        for name, kind in typing.get_type_hints(type(obj)).items():
            shown = kind.__name__ if type(kind) is type else kind
            yield prefix + name, is_a(getattr(obj, name), kind), f"it must be {shown}, and finite"
    for name in POSITIVE:
        yield name, getattr(c, name) > 0, "it must be positive"
    for name in NOT_NEGATIVE:
        yield name, getattr(c, name) >= 0, "it must not be negative"
    for name in SHARES:
        yield name, 0 <= getattr(c, name) <= 1, "a share, 0 to 1"
    for name, most in AT_MOST.items():
        yield name, getattr(c, name) <= most, f"at most {most}"
    for name, choices in CHOICES.items():
        yield name, getattr(c, name) in choices, " or ".join(choices)
    yield "preset", re.fullmatch(r"[\w.-]+", c.preset), "letters, digits, '_', '-' and '.'"
    yield "data", c.data and "\0" not in c.data, "the name of a folder"
    yield "adam_eps", np.float32(c.adam_eps) > 0, "it must not be 0 in float32"
    yield "rope_base", c.rope_base >= 1, "1 or more"
    usable = 0 < c.logit_cap[0] <= 64 and c.logit_cap[2] > 0
    cap = "a (0 to 64: its exponentials are summed in float32), b, and c above 0"
    yield "logit_cap", usable, cap
    yield "heads", c.width % c.heads == 0, f"it must divide width={c.width}"
    yield "heads", c.head_width % 4 == 0, "the head width must be a multiple of 4 (half RoPE)"
    yield "heads", c.heads % 2 == 0 or not c.paired_layers, "it must be even for paired_layers"
    yield "width", c.width >= GATE_INPUTS, f"at least {GATE_INPUTS}, which the gates look at"
    yield "real_tokens", 0 < c.real_tokens <= c.vocab, f"1 to vocab={c.vocab}"
    yield "real_tokens", c.real_tokens <= 2**16, "shards hold 16-bit ids: at most 65536"
    yield "bos", 0 <= c.bos < c.real_tokens, f"0 to real_tokens-1={c.real_tokens - 1}"
    yield "skip", 0 <= c.skip[0] < c.skip[1] < c.layers, "an earlier and a later layer"
    yield "backout", 0 <= c.backout < c.layers, "layers are 0..layers-1"
    for name in ("long_layers", "paired_layers", "value_layers"):
        found, valid = getattr(c, name), f"different ones of {c.attention_layers}, which attend"
        yield name, len({*found} & {*c.attention_layers}) == len(found), valid
    yield "value_layers", c.value_layers, "at least one layer"
    apart = not {*c.long_layers} & {*c.paired_layers}
    yield "paired_layers", apart, f"none of long_layers={c.long_layers}: those offset their keys"
    yield "momentum", all(0 <= m < 1 for m in c.momentum), "two numbers in [0, 1)"
    yield "val_windows", min(c.val_windows) > 0, "two lengths in tokens"
    yield "val_batch", c.val_batch % c.val_row == 0, f"a multiple of val_row={c.val_row}"
    yield "val_tokens", c.val_tokens % c.val_batch == 0, f"a multiple of val_batch={c.val_batch}"
    yield from stage_rules(c)


def stage_rules(c: Config):
    """The part of `rules` that looks at the stages."""
    yield "stages", c.stages, "at least one stage"
    yield "extension", c.extension < c.steps, f"fewer than steps={c.steps}"
    shares = [stage.share for stage in c.stages]
    last = "above 0 if and only if the last stage, which it then is, has share=0"
    yield "extension", (c.extension > 0) == (shares[-1] == 0), last
    scheduled = shares[:-1] if c.extension else shares
    whole = scheduled and min(scheduled) > 0 and abs(sum(shares) - 1) < 1e-6
    add_up = "shares above 0 that add up to 1; with an extension, that of the last stage is 0"
    yield "stages.0.share", whole, add_up
    each = f"every stage needs at least one step, and extension={c.extension} of them are taken"
    yield "steps", min(np.diff(c.boundaries)) > 0, each
    for i, s in enumerate(c.stages):
        at, many = f"stages.{i}.", len(s.weights)
        yield at + "row_tokens", s.row_tokens > 0, "it must be positive"
        whole = s.batch_tokens > 0 and s.batch_tokens % s.row_tokens == 0
        yield at + "batch_tokens", whole, f"a multiple of row_tokens={s.row_tokens}"
        yield at + "doc_cap", s.doc_cap >= 0, "0 (plain rows) or a length in tokens"
        yield at + "windows", min(s.windows) > 0, "two lengths in tokens"
        yield at + "lr_factor", s.lr_factor >= 0, "0 or more"
        some = 0 < many <= s.row_tokens and min(s.weights) >= 0
        yield at + "weights", some, f"1 to row_tokens={s.row_tokens} numbers, 0 or more"
        same = many == len(s.weights_end) and min(s.weights_end) >= 0
        yield at + "weights_end", same, f"as many as weights={s.weights}, 0 or more"


def validate(cfg: Config) -> Config:
    """Return `cfg` if a run can be built from it, else raise UserError naming field and value."""
    for field, valid, would_be in rules(cfg):
        if not valid:
            where, _, name = field.rpartition(".")
            obj = cfg.stages[int(where.split(".")[1])] if where else cfg
            raise UserError(f"{field}={getattr(obj, name)!r} is not valid: {would_be}")
    return cfg


def is_a(value, kind) -> bool:
    """Whether `value` is of the annotated type `kind`: int, float, bool, str, tuple[...], a class.

    Numbers must be finite; an int may stand for a float and must fit 64 bits.
    """
    if typing.get_origin(kind) is tuple:
        of, *rest = typing.get_args(kind)
        if not isinstance(value, tuple) or (rest != [...] and len(value) != 1 + len(rest)):
            return False
        return all(is_a(x, of) for x in value)
    if type(value) is int and abs(value) >= 2**63:
        return False
    if type(value) is float and not math.isfinite(value):
        return False
    return type(value) is kind or (kind is float and type(value) is int)


def parse_value(kind, text: str):
    """`text` read as a value of the annotated type `kind`; raises ValueError when it is not one."""
    if kind is str:
        return text
    if kind is bool:
        return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
    if kind in (int, float):
        return kind(text)
    items, of = ast.literal_eval(text), typing.get_args(kind)[0]
    if not isinstance(items, tuple | list) or not all(type(x) in (int, of) for x in items):
        raise ValueError
    value = tuple(of(x) for x in items)
    if not is_a(value, kind):
        raise ValueError
    return value


def override(cfg, key: str, text: str, prefix: str = ""):
    """`cfg` with field `key` (dotted into stages: stages.1.windows) set to `text`.

    `prefix` is the part of the user's key that led to `cfg`, for the message of a UserError.
    """
    name, _, rest = key.partition(".")
    kinds = typing.get_type_hints(type(cfg))
    if name not in kinds:
        raise UserError(f"unknown key {prefix + name!r} in --set; valid keys: {', '.join(kinds)}")
    old = getattr(cfg, name)
    if name == "stages":
        index, _, field = rest.partition(".")
        if not field or index not in map(str, range(len(old))):
            raise UserError(
                f"--set {key}={text}: write stages.N.FIELD=VALUE with N below {len(old)}"
            )
        stages = list(old)
        stages[int(index)] = override(stages[int(index)], field, text, f"{name}.{index}.")
        return dataclasses.replace(cfg, stages=tuple(stages))
    if rest:
        raise UserError(f"--set {prefix}{key}={text}: {name} has no parts")
    try:
        return dataclasses.replace(cfg, **{name: parse_value(kinds[name], text)})
    except (ValueError, TypeError, ArithmeticError, LookupError, SyntaxError, RecursionError):
        like = f"a value like {old!r} ({type(old).__name__})"
        like += ", one alone is (1,)" * (isinstance(old, tuple) and "..." in str(kinds[name]))
        raise UserError(f"--set {prefix}{key}={text}: {name} takes {like}") from None


def config_from_json(fields: dict) -> Config:
    """The Config written into run.json and checkpoints by dataclasses.asdict."""

    def build(kind, fields):  # JSON has lists where the config has tuples
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})

    try:
        if missing := {f.name for f in dataclasses.fields(Config)} - set(fields):
            names = ", ".join(sorted(missing))
            raise UserError(f"it lacks {names}: use the one at the head of the run's log.txt")
        stages = [build(Stage, stage) for stage in fields["stages"]]
        return validate(build(Config, {**fields, "stages": stages}))
    except (UserError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"the stored config does not fit this train_gpt.py: {error}") from None


# ------------------------------------------------------------------------------------------------
# Data checks: every token that the run will read is there, before anything starts
# ------------------------------------------------------------------------------------------------

MERGES = "merges.json"  # beside shards of encoding=bpe and in their runs: merged bytes, in hex
STARTED = time.time() - 60  # a clock of files may be late
DESCRIPTION = "dataset.json"  # beside shards of own text, by data/tokenize_text.py: what they are


def cursor_after(cfg: Config, train: TokenStream, steps: int) -> int:
    """Where the rows of the first `steps` steps end; UserError if there are too few tokens."""
    cursor = 0
    for step in range(steps):
        stage = stage_at(cfg, step)
        try:
            if stage.doc_cap:
                shape = stage.rows, stage.row_tokens, stage.doc_cap
                cursor = plan_packed(train, cursor, *shape)[1]
            else:
                cursor += stage.batch_tokens
                train.shard_at(cursor)
        except UserError:
            raise UserError(
                f"{train.paths[0].parent} holds {len(train):,} training tokens in "
                f"{len(train.paths)} shards, which last for {step} of {cfg.steps} steps: "
                "get more shards, or lower --set steps="
            ) from None
    train.documents.cache_clear()  # the loader finds them again inside the clock: no free work
    return cursor


def check_ids(cfg: Config, path: Path, tokens: np.ndarray):
    """UserError unless every one of `tokens`, which come from `path`, is a known id."""
    if (largest := int(tokens.max())) >= cfg.real_tokens:
        raise UserError(
            f"{path}: token id {largest} is not below {cfg.real_tokens}: "
            f"not made with the {cfg.encoding} encoding, tokenize it again"
        )


def check_tokens(cfg: Config, train: TokenStream, val: TokenStream) -> dict[str, dict]:
    """Size and hash of every shard that the run will read: {file name: {bytes, sha256}}.

    UserError unless every token is there and is a known id. Reads the shards, before the clock, but
    keeps nothing of them (the system's file cache is warm then, as after any download).
    """
    cursor = cursor_after(cfg, train, cfg.steps)
    if len(val) <= cfg.val_tokens:
        raise UserError(
            f"{val.paths[0].parent} holds {len(val):,} validation tokens, {cfg.val_tokens + 1:,} "
            "are needed: get the full validation shard, or lower --set val_tokens="
        )
    found, known, description = {}, {}, val.paths[0].parent / DESCRIPTION
    if description.exists():
        known = json.loads(description.read_text())["sha256"]
    for stream, last in ((train, cursor), (val, cfg.val_tokens)):
        begins = False
        for number in range(stream.shard_at(min(last, len(stream) - 1))[0] + 1):
            path, size = stream.paths[number], stream.sizes[number]
            tokens = stream.read(int(stream.ends[number]) - size, size)
            check_ids(cfg, path, tokens)
            begins |= bool(np.any(tokens == cfg.bos))
            sha256 = hash_of(stream, number)
            if sha256 != known.get(path.name, sha256):
                raise UserError(f"{path} is not as {DESCRIPTION} says: tokenize the text again")
            found[path.name] = {"bytes": HEADER_BYTES + 2 * size, "sha256": sha256}
        if not begins:
            raise UserError(
                f"{path}: no document begins with bos={cfg.bos}, so it is of another encoding than "
                f"{cfg.encoding}: set encoding, vocab, real_tokens and bos, or tokenize it again"
            )
    return found


def hash_of(stream: TokenStream, number: int) -> str:
    """SHA-256 of shard `number`, header and all, as it is now."""
    with stream.lock:
        stream.files[number].seek(0)
        return hashlib.file_digest(stream.files[number], "sha256").hexdigest()


def check_unchanged(shards: dict[str, dict], *streams: TokenStream):
    """UserError if one of `shards`, the answer of check_tokens, is not what it was: losses would be
    of other tokens. They are hashed again only if the system says that their files have changed
    since the process began."""
    for stream in streams:
        for number, (path, file) in enumerate(zip(stream.paths, stream.files, strict=True)):
            stat = os.fstat(file.fileno())
            changed = max(stat.st_mtime, stat.st_ctime) > STARTED
            if changed and path.name in shards:
                if hash_of(stream, number) != shards[path.name]["sha256"]:
                    raise UserError(f"{path} has changed under the run: its losses are of no use")


def place_of(data: str) -> Path:
    """The folder that cfg.data names: under the current folder or beside this file."""
    return Path(data) if Path(data).exists() else Path(__file__).resolve().parent / data


def data_sets(folder: Path) -> dict[Path, str]:
    """Shard -> the name of its data set, of all shards in `folder`."""
    names = re.compile(r"(.*)_(?:train|val)_\d+\.bin")
    found = ((path, names.fullmatch(path.name)) for path in folder.glob("*.bin"))
    return {path: match[1] for path, match in found if match}


def data_folder(cfg: Config, say: Callable = print) -> Path:
    """Where the shards are; UserError if there is no folder, or more than one data set in it.

    The demo corpus of the `tiny` preset is made on first use from the text that every Python
    installation carries.
    """
    folder = place_of(cfg.data)
    demo = Path(__file__).resolve().parent / PRESETS["tiny"].data
    made = all(list(demo.glob(name)) for name in ("*_train_*.bin", "*_val_*.bin", MERGES))
    if folder.resolve() == demo.resolve() and not made and jax.process_index() == 0:
        say(f"making the demo corpus in {folder}")
        run_tool("data/builtin_corpus.py")["build"](folder)
    from_first("")  # the others wait until it is there
    if not folder.is_dir():
        raise UserError(
            f"no folder {folder}: get the tokens with data/cached_fineweb10B.py, or name a --data"
        )
    if len(names := sorted({*data_sets(folder).values()})) > 1:
        several = f"several data sets ({', '.join(names)})"
        raise UserError(f"{folder} holds {several}: give each its own folder")
    return folder


def run_tool(name: str) -> dict:
    """The names that a script beside this file defines; it imports this module as train_gpt."""
    sys.modules.setdefault("train_gpt", sys.modules[__name__])
    return runpy.run_path(str(Path(__file__).resolve().parent / name))


# ------------------------------------------------------------------------------------------------
# Compilation: every program of the run, before the clock starts, so that it fits the devices
# ------------------------------------------------------------------------------------------------


def make_mesh(cfg: Config, devices=None) -> Mesh:
    """The one-axis mesh over `devices` (default: the first cfg.devices, process by process)."""
    if devices is None:
        devices = sorted(all_devices(), key=lambda device: device.process_index)
    count = cfg.devices or len(devices)
    if jax.process_count() > 1 and count != len(devices):
        raise UserError(f"devices={count} is for a process alone: several use all {len(devices)}")
    if count > len(devices):
        raise UserError(f"devices={count}, but there are {len(devices)}: use a smaller number or 0")
    batches = {f"stages.{i}.batch_tokens": stage.rows for i, stage in enumerate(cfg.stages)}
    for name, rows in {**batches, "val_batch": cfg.val_batch // cfg.val_row}.items():
        if rows % count:
            raise UserError(
                f"{name} has {rows} rows, which {count} devices cannot share equally: "
                f"use --set devices=N with a divisor of {rows}, or a larger {name}"
            )
    return Mesh(np.array(devices[:count]), (AXIS,))


def all_devices() -> list:
    """The devices of all processes; UserError if jax cannot start its backend."""
    try:
        return jax.devices()
    except Exception as error:  # RuntimeError, or whatever else a backend that is missing leads to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"jax finds no devices ({reason}): see JAX_PLATFORMS and drivers") from None


def program_bytes(compiled) -> dict[str, int]:
    """Bytes on a device of a program's arguments, outputs, temporaries, and of all at its peak."""
    memory = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporary": "temp"}
    sizes = {key: getattr(memory, f"{name}_size_in_bytes") for key, name in names.items()}
    live = sizes["arguments"] + sizes["outputs"] + sizes["temporary"] - sizes["aliased"]
    return sizes | {"peak": getattr(memory, "peak_memory_in_bytes", 0) or live}


def resident_bytes(cfg: Config, mesh: Mesh, name: str) -> int:
    """Bytes on a device in use beside the arguments of the program `name` while it runs.

    The training state beside gradients and validation, the copies beside updates, and the gradients
    that wait for the next Adam step.
    """
    found = programs(cfg, mesh, PLAIN)
    state, due, _ = found["adam"].args
    stays = found["eval"].args[0] if name in ("muon", "adam") else state
    # Muon may run just before Adam, when the gradients of all its steps wait.
    steps = {"muon": cfg.adam_every, "adam": 0}.get(name, cfg.adam_every - 1)
    waits = [grads[:steps] for grads in due.values()]
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((stays, waits))
    )


def memory_limit(device) -> int | None:
    """Bytes that programs and state of a run can have on a device; None if it does not tell."""
    return (device.memory_stats() or {}).get("bytes_limit")


def settings(cfg: Config, mesh: Mesh, name: str) -> list[Config]:
    """The ways to compile a program, the next of which is taken when one does not fit the memory.

    As asked; layers computed again on the way back (a third more work); fewer rows at a time. All
    give the same numbers but for the order of sums.
    """
    if not name.startswith("grads"):
        return [cfg]
    stage = cfg.stages[int(name.removeprefix("grads"))]
    t = stage.row_tokens
    sizes = [k * t for k in micro_rows(cfg, stage.rows // mesh.size, t)]
    ways = [(cfg.recompute, sizes[0]), *((True, size) for size in sizes)]
    return [
        dataclasses.replace(cfg, recompute=again, micro_tokens=size)
        for again, size in dict.fromkeys(ways)
    ]


def compile_fitting(
    cfg: Config, mesh: Mesh, kernels: Kernels, name: str, limit: int | None, say: Callable = print
):
    """(executable, Config that it was compiled with, seconds) of a program of the run.

    The first of its `settings` whose own account of its memory, with resident_bytes, is within
    `limit` bytes (None: any is); the last one whatever it needs, unless the compiler refuses.
    """
    began, ways = time.perf_counter(), settings(cfg, mesh, name)
    for setting in ways:
        last = setting is ways[-1]
        try:
            compiled = lower(programs(setting, mesh, kernels)[name], mesh).compile()
        except jax.errors.JaxRuntimeError as error:
            if last or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            needs = "more than the compiler allows"
        else:
            seconds = time.perf_counter() - began
            if last or limit is None:
                return compiled, setting, seconds
            size = program_bytes(compiled)["peak"] + resident_bytes(cfg, mesh, name)
            if size <= limit:
                return compiled, setting, seconds
            needs = f"{size / 2**30:.2f} GiB of {limit / 2**30:.2f}"
        way = f"recompute={setting.recompute} micro_tokens={setting.micro_tokens}"
        say(f"{name} with {way} needs {needs}: compiling it with less at a time")


def compile_all(cfg: Config, mesh: Mesh, kernels: Kernels, say: Callable = print):
    """({name: executable}, {"compile_seconds", "settings"}) of all programs, side by side.

    A name that is not there is a KeyError at the step that needs it, never a silent compilation
    inside the clock. `settings` holds what memory has changed: {name: {micro_tokens, recompute}}.
    """
    limit = memory_limit(mesh.local_devices[0])

    def build(name):
        compiled, setting, seconds = compile_fitting(cfg, mesh, kernels, name, limit, say)
        temporary = program_bytes(compiled)["temporary"] / 2**20
        say(f"compiled {name} in {seconds:.1f} s, {temporary:.0f} MiB temporary")
        changed = {key: getattr(setting, key) for key in ("micro_tokens", "recompute")}
        asked = setting == settings(cfg, mesh, name)[0]
        return compiled, round(seconds, 3), {} if asked else changed

    names = [*programs(cfg, mesh, kernels)]
    say(f"compiling {', '.join(names)}; for accelerators it takes minutes")
    with ending_at_once(), ThreadPoolExecutor(os.cpu_count()) as pool:
        built = zip(*pool.map(build, names), strict=True)
    compiled, seconds, changed = (dict(zip(names, x, strict=True)) for x in built)
    changed = {name: way for name, way in changed.items() if way}
    return compiled, {"compile_seconds": seconds, "settings": changed}


# ------------------------------------------------------------------------------------------------
# Checkpoints: RUN_DIR/checkpoints/<step>/ with meta.json and <process>.npz, each process's rows
# ------------------------------------------------------------------------------------------------

KEPT = 2  # the newest checkpoints of a run; older ones are deleted
PART_SECONDS = 120  # that process 0 waits for the rows of the others


class Saved(NamedTuple):
    """A checkpoint of which every byte has been checked."""

    folder: Path
    cfg: Config
    step: int  # steps done
    train_time_ms: float
    logs: dict  # file name -> bytes that it had; what came later is of steps that are lost
    data: dict  # the answer of check_tokens
    source_sha256: str
    processes: int  # each of which has written a file


def keeps_end(cfg: Config) -> bool:
    """Whether a checkpoint is written when the run has ended; see Config.checkpoint_end."""
    size = 12 * sum(row.count for row in param_table(cfg).values())  # three float32 for a parameter
    return cfg.checkpoint_end == "always" or (cfg.checkpoint_end == "auto" and size <= 10e9)


def own_rows(cfg: Config, state) -> dict[str, tuple[int, list[np.ndarray]]]:
    """{"kind.name": (first row, pieces in order)} of what this process writes, on the host.

    Of what is cut, the rows of its devices, which lie together, without padding; of what every
    device has, process 0 has the first replica. All transfers begin before the first is waited for.
    """
    own = {}
    for path, array in jax.tree.leaves_with_path(state):
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        for shard in shards:
            shard.data.copy_to_host_async()
        own[tuple(key.key for key in path)] = shards
    # A copy stays when the state is donated; of a CPU's arrays numpy would give a view.
    copy = np.array if jax.default_backend() == "cpu" else np.asarray
    found = {}
    for (kind, name), shards in own.items():
        rows = param_table(cfg)[name].shape[0]
        pieces = {shard.index[0].start or 0: shard.data for shard in shards}
        pieces = {first: copy(x)[: rows - first] for first, x in pieces.items() if first < rows}
        if pieces:
            found[f"{kind}.{name}"] = min(pieces), [pieces[first] for first in sorted(pieces)]
    return found


@contextlib.contextmanager
def whole_file(path: Path):
    """A file to write, which gets its name when all of it is on the disk."""
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(path: Path):
    """Bring the names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_checkpoint(folder: Path, rows: dict, meta: dict, leaving: threading.Event | None = None):
    """Write what this process has of a checkpoint; process 0 makes it visible when it is whole.

    Everything goes into a folder that begins with a dot, to which process 0 gives its name, the
    step, last of all: a checkpoint that can be seen is complete. In its files a member's name ends
    with its first row; zip keeps a checksum of each. Raises OSError, and leaves the older
    checkpoints as they are. `leaving` ends the wait for the other processes.
    """
    temporary, final = folder / f".{meta['step']}", folder / str(meta["step"])
    temporary.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}.{first}": np.concatenate(x) for name, (first, x) in rows.items()}
    for name, array in arrays.items():
        if not np.isfinite(array.sum(dtype=np.float64)):
            raise OSError(f"{name} is not finite")
    with whole_file(temporary / f"{jax.process_index()}.npz") as file:
        np.savez(file, **arrays)
    if jax.process_index():
        return
    deadline = time.monotonic() + PART_SECONDS
    for process in range(jax.process_count()):
        while not (temporary / f"{process}.npz").exists():
            if (leaving and leaving.is_set()) or time.monotonic() > deadline:
                raise OSError(f"no rows of process {process}: does it see {folder}?")
            time.sleep(0.05)
    body = json.dumps({**meta, "processes": jax.process_count()}, sort_keys=True)
    check = {"crc32": zlib.crc32(body.encode()), "checkpoint": json.loads(body)}
    with whole_file(temporary / "meta.json") as file:
        file.write(json.dumps(check, sort_keys=True, indent=1).encode())
    sync_folder(temporary)
    os.rename(temporary, final)
    sync_folder(folder)
    for old in sorted(step for step in checkpoint_steps(folder) if step <= meta["step"])[:-KEPT]:
        hidden = folder / f".{old}"  # or a kill would leave half of it in sight
        os.rename(folder / str(old), hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of what looks like a checkpoint in RUN_DIR/checkpoints."""
    names = re.compile(r"0|[1-9]\d{0,11}")
    return [int(path.name) for path in folder.glob("*") if names.fullmatch(path.name)]


def read_checkpoint(folder: Path) -> Saved:
    """The checkpoint in `folder`, every byte of it checked; some exception if it is damaged."""
    found = json.loads((folder / "meta.json").read_text())
    meta = found["checkpoint"]
    if zlib.crc32(json.dumps(meta, sort_keys=True).encode()) != found["crc32"]:
        raise ValueError("meta.json has been changed")
    if meta["step"] != int(folder.name):
        raise ValueError(f"it is of step {meta['step']}")
    for process in range(meta["processes"]):
        with zipfile.ZipFile(folder / f"{process}.npz") as file:
            if name := file.testzip():
                raise ValueError(f"{name} in {process}.npz is not as it was written")
    return Saved(folder=folder, cfg=config_from_json(meta.pop("config")), **meta)


def find_checkpoint(run_dir: Path, say: Callable = print) -> Saved:
    """The newest whole checkpoint of a run; damaged ones are passed over with a warning."""
    folder = run_dir / "checkpoints"
    for step in sorted(checkpoint_steps(folder), reverse=True):
        try:
            return read_checkpoint(folder / str(step))
        except Exception as error:  # whatever a damaged file leads to
            say(f"warning: {folder / str(step)} cannot be used ({error}): skipped")
    if (run_dir / "run.json").exists():
        raise UserError(f"{run_dir} has no checkpoint (see --set checkpoint_every): start it anew")
    raise UserError(f"no checkpoint in {run_dir}: name the folder of a run, such as logs/<run id>")


def set_aside(saved: Saved):
    """Rename the later checkpoints, which were passed over: no resume must go on from them."""
    folder = saved.folder.parent
    for later in (step for step in checkpoint_steps(folder) if step > saved.step):
        shutil.rmtree(folder / f"damaged-{later}", ignore_errors=True)
        os.rename(folder / str(later), folder / f"damaged-{later}")


def load_state(mesh: Mesh, saved: Saved, kinds=("params", "first", "second")):
    """The training state of a checkpoint (or some `kinds` of it), straight onto its devices.

    Any number of devices reads what any number has written: a host reads the files whose rows its
    devices need, one parameter at a time. UserError where shapes are not the parameter table's.
    """
    files = [np.load(saved.folder / f"{process}.npz") for process in range(saved.processes)]
    places = {}  # kind.name -> [(first row, file, member)]
    for file in files:
        for member in file.files:
            name, _, first = member.rpartition(".")
            places.setdefault(name, []).append((int(first), file, member))
    wanted, table = abstract_state(saved.cfg, mesh), param_table(saved.cfg)

    def load(path, leaf):
        kind, name = (key.key for key in path)
        rows = table[name].shape[0]
        parts = sorted(places.get(f"{kind}.{name}", []), key=itemgetter(0))
        ends = [*(first for first, _, _ in parts[1:]), rows]
        read = functools.cache(lambda i: parts[i][1][parts[i][2]])  # once for all devices

        def piece(index):
            start, stop, _ = index[0].indices(leaf.shape[0])
            out, found = np.zeros((stop - start, *leaf.shape[1:]), leaf.dtype), 0
            for i, ((first, _, member), end) in enumerate(zip(parts, ends, strict=False)):
                low, high = max(first, start), min(end, stop)
                if low >= high:
                    continue
                array, shape = read(i), (end - first, *leaf.shape[1:])
                if (array.dtype, array.shape) != (leaf.dtype, shape):
                    is_one = f"is {array.dtype}{[*array.shape]}, not {leaf.dtype}{[*shape]}"
                    raise UserError(f"{saved.folder}: {member} {is_one}: use another checkpoint")
                out[low - start : high - start] = array[low - first : high - first]
                found += high - low
            if found != max(0, min(stop, rows) - start):  # what is beyond is padding
                raise UserError(f"{saved.folder} lacks rows of {kind}.{name}: use another one")
            return out

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, piece)

    state = jax.tree.map_with_path(load, {kind: wanted[kind] for kind in kinds})
    for file in files:
        file.close()
    return state


class Saver:
    """Saves checkpoints beside training: save() copies to the host, a thread writes to the disk.

    What cannot be written is reported, and `missing` says so until a later one is there: the run
    goes on, older checkpoints stay. Leaving the block waits for the last one.
    """

    def __init__(self, cfg: Config, log: "RunLog"):
        self.cfg, self.log, self.missing = cfg, log, ""
        self.thread, self.leaving = threading.Thread(), threading.Event()
        log.wait_for_checkpoint = self.wait

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        if kind is not None:  # another process may have died: its rows will never come
            self.leaving.set()
        self.wait()

    def wait(self):
        """Until the last one is written."""
        if self.thread.ident is not None:
            self.thread.join()

    def save(self, step: int, state):
        """Waits for the state, and for the checkpoint before if that is not written yet."""
        began = time.perf_counter()
        self.wait()
        rows, meta = own_rows(self.cfg, state), self.log.meta(step)
        held = 1000 * (time.perf_counter() - began)
        self.thread = threading.Thread(target=self._write, args=(rows, meta, held))
        self.thread.start()

    def _write(self, rows, meta, held: float):
        began, step = time.perf_counter(), meta["step"]
        folder = self.log.folder / "checkpoints"
        try:
            self.log.sync()
            write_checkpoint(folder, rows, meta, self.leaving)
        except Exception as error:  # whatever it is, the run must hear of it, and goes on
            self.missing = f"there is no checkpoint of step {step}: {error}"
            self.log.say(f"warning: {self.missing}; older ones stay")
            if jax.process_index() == 0:
                shutil.rmtree(folder / f".{step}", ignore_errors=True)
            return
        self.missing = ""
        size = sum(piece.nbytes for _, pieces in rows.values() for piece in pieces)
        self.log.write(
            "log.txt",
            f"checkpoint:{step} held the loop for {held:.1f}ms, "
            f"{size / 1e6:.1f} MB written in {time.perf_counter() - began:.2f}s",
        )


# ------------------------------------------------------------------------------------------------
# Run log: RUN_DIR/log.txt, metrics.jsonl, run.json
# ------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    found = {"python": platform.python_version()}
    cuda = "jax-cuda{0}-plugin", "nvidia-cudnn-cu{0}", "nvidia-cublas-cu{0}"
    cuda = *(name.format(number) for number in (12, 13) for name in cuda), "nvidia-cublas"
    for package in ("jax", "jaxlib", "numpy", "libtpu", *cuda):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, IndexError):
        driver = Path("/proc/driver/nvidia/version").read_text()
        found["NVIDIA driver"] = re.findall(r"\b\d+(?:\.\d+)+\b", driver)[0]
    return found


def host() -> dict:
    """The machine around the devices: its CPU, the cores this process may use, its system."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        model = found[1].strip() if found else model
    may = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(may(0)) if may else os.cpu_count()
    return {"cpu": model, "cores": cores, "platform": platform.platform()}


LISTENED_TO = ("XLA_", "TF_XLA_", "JAX_", "LIBTPU_", "TPU_", "CUDA_", "CUDNN_", "CUBLAS_", "NCCL_")
LISTENED_TO += "OMP_", "OPENBLAS_", "MKL_", "NVIDIA_TF32_OVERRIDE", "PYTHON", "LD_"


def environment() -> dict[str, str]:
    """The variables that Python, jax and what is below it listen to."""
    return {name: x for name, x in sorted(os.environ.items()) if name.startswith(LISTENED_TO)}


def make_folder(path: Path, option: str):
    """Make a folder that the user named; UserError if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}: name another folder") from None


def memory_peak_mib() -> float:
    """Peak memory of the busiest device in MiB; of this process where devices do not tell (CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(s.get("peak_bytes_in_use", 0) for s in stats)
    if peak:
        return peak / 2**20
    try:
        import resource
    except ImportError:  # Windows has no such module
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


# Dense bfloat16, by a part of the device kind; the longest that is in it counts.
PEAK_FLOPS = {"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12}
PEAK_FLOPS |= {"H100": 989e12, "H100 PCIe": 756e12, "H200": 989e12, "A100": 312e12}
PEAK_FLOPS |= {"L40S": 362e12, "RTX 4090": 165e12}


def peak_flops(kind: str) -> float | None:
    """FLOP/s of a device of this kind by its maker's data sheet; None if it is not in the table."""
    names = [name for name in PEAK_FLOPS if name in kind]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def flops_per_token(cfg: Config) -> float:
    """Model FLOPs of forward and backward per token: 6 per matmul weight.

    Attention scores are left out, as in the original's figures: with full windows, regardless of
    documents, they would add 13 % in the last stage.
    """
    table = param_table(cfg)
    return 6.0 * sum(table[name].count for name in ("attn_bank", "mlp_bank", "head"))


def run_facts(cfg: Config, mesh: Mesh, command: str, reason: str) -> dict:
    """What the figures of a run or a benchmark stand on: source, versions, machine, config.

    `reason` is what pick_kernels says of its choice.
    """
    device = mesh.devices.flat[0]
    return {
        "preset": cfg.preset,
        "config": dataclasses.asdict(cfg),
        "seed": cfg.seed,
        "command": command,
        "source_sha256": hashlib.sha256(own_source().encode()).hexdigest(),
        "versions": versions(),
        "devices": {"kind": device.device_kind, "platform": device.platform}
        | {"count": mesh.size, "processes": jax.process_count()},
        "host": host(),
        "environment": environment(),
        "choices": {
            "kernels": reason,
            "compiler_options": COMPILER_OPTIONS.get(device.platform, {}),
        },
    }


SOURCE = Path(__file__).read_text()  # of this file, with lines that end as they do in the log
RUNNING = sys._getframe().f_code  # what Python has made of it, before it imported jax


def own_source() -> str:
    """The source that runs; UserError if the file has changed between Python's look and ours."""
    if compile(SOURCE, __file__, "exec", dont_inherit=True) != RUNNING:
        raise UserError("train_gpt.py was changed while it started: start it again")
    return SOURCE


class Stopped(Exception):
    """The run was asked to end early, and has saved where it is; `number` is that of the signal."""

    def __init__(self, text: str, number: int):
        super().__init__(text)
        self.number = number


class RunLog:
    """The files of a run, written by process 0, and what the terminal shows.

    Opening it fails before anything is compiled, if its `head` does not fit the disk, too. Later a
    full disk does not end the run: what it refuses is said once, kept, and written with the next
    line.
    """

    NAMES = "log.txt", "metrics.jsonl"

    def __init__(self, cfg: Config, folder: Path, facts: dict, saved: Saved | None, say, head=""):
        self.cfg, self.folder, self.facts, self.say = cfg, folder, facts, say
        self.clock = Clock(saved.train_time_ms if saved else 0.0)
        self.first = saved.step if saved else 0
        self.mark = self.clock.total, cfg.tokens_after(self.first)  # ms and tokens at the last line
        self.files, self.kept, self.warned = {}, {}, False
        self.lock = threading.Lock()  # the loop and the thread of the Saver write
        self.wait_for_checkpoint = lambda: None  # a Saver knows how
        if jax.process_index():
            return
        try:
            folder.mkdir(parents=True, exist_ok=bool(saved))
            for name in self.NAMES:
                self.files[name], self.kept[name] = claim(folder, name), b""
                size, was = self.files[name].tell(), saved.logs[name] if saved else 0
                if was < size:
                    self.files[name].truncate(was)
                    self.files[name].seek(0, os.SEEK_END)
                elif was > size:  # half a line may be its end
                    say(f"warning: {name} of {folder} lacks what stood in it: no record any more")
                    self.kept[name] = b"\n" if size else b""
            for partial in (folder / "checkpoints").glob(".*"):
                shutil.rmtree(partial, ignore_errors=True)
            self.kept["log.txt"] += head.encode("utf-8", "backslashreplace")
            self._flush("log.txt")
            self._write_facts()
        except OSError as error:
            cure = "make that possible" if saved else "name another --out"
            raise UserError(f"cannot write {folder} ({error.strerror}): {cure}") from None

    def _flush(self, name: str):
        with self.lock:
            while self.kept[name]:
                self.kept[name] = self.kept[name][self.files[name].write(self.kept[name]) :]

    def _write_facts(self):
        temporary = self.folder / "run.json.tmp"
        temporary.write_text(json.dumps(self.facts, indent=1) + "\n")
        os.replace(temporary, self.folder / "run.json")

    def attempt(self, write: Callable, *args):
        """write(*args) if this process has files; what the disk refuses is said once."""
        if self.files:
            try:
                write(*args)
            except OSError as error:
                if not self.warned:
                    self.say(f"warning: cannot write {self.folder} ({error}); the run goes on")
                self.warned = True

    def write(self, name: str, text: str):
        """Append a line to a file at once, so that a crash loses nothing."""
        if name in self.files:
            with self.lock:
                self.kept[name] += text.encode("utf-8", "backslashreplace") + b"\n"
        self.attempt(self._flush, name)

    def write_facts(self, **changes):
        """Put `changes` into run.json, atomically."""
        self.facts.update(changes)
        self.attempt(self._write_facts)

    def compiled(self, facts: dict):
        """Write down what compile_all says; of settings only those that memory has changed."""
        self.write_facts(**facts)
        if facts["settings"]:
            self.write("log.txt", f"settings: {json.dumps(facts['settings'])}")

    def lost(self) -> str:
        """Says which files of the run have been deleted or replaced since; "" if none has."""
        gone = []
        for name, file in self.files.items():
            try:
                there = os.path.samestat(os.fstat(file.fileno()), os.stat(self.folder / name))
            except OSError:
                there = False
            gone += [] if there else [name]
        names = " and ".join(gone)
        return (
            f"{names} of this run no longer in {self.folder}: bring them together" if gone else ""
        )

    def sync(self):
        """Bring the files to the disk itself."""
        for file in self.files.values():
            self.attempt(os.fsync, file.fileno())

    def meta(self, step: int) -> dict:
        """What a checkpoint says beside its arrays."""
        sizes = {name: file.tell() + len(self.kept[name]) for name, file in self.files.items()}
        facts = {key: self.facts[key] for key in ("config", "data", "source_sha256")}
        return {"step": step, "train_time_ms": self.clock.ms(), "logs": sizes, **facts}

    def line(self, step: int, kind: str, loss: float, shown: str = "", **more) -> str:
        """A loss after `step` steps into both files; the line, in the original speedrun's format.

        UserError if the run has diverged: no finite loss, or twice that of a uniform guess.
        """
        if not loss < 2 * math.log(self.cfg.vocab):
            self.wait_for_checkpoint()
            kept = f"the steps before are in {self.folder}/metrics.jsonl"
            if saved := checkpoint_steps(self.folder / "checkpoints"):
                kept = f"the last good checkpoint is {self.folder}/checkpoints/{max(saved)}"
            raise UserError(
                f"the loss of step {step} is {loss:.4g}: lower the learning rates "
                f"(--set lr_muon=...); {kept}"
            )
        ms, tokens = self.clock.ms(), self.cfg.tokens_after(step)
        average = f"step_avg:{ms / max(step, 1):.2f}ms"
        line = f"step:{step}/{self.cfg.steps} {shown}train_time:{ms:.0f}ms {average}"
        fields = {"step": step, kind: round(loss, 6), "train_time_ms": round(ms, 3)}
        self.write("log.txt", line)
        self.write("metrics.jsonl", json.dumps({**fields, "tokens": tokens, **more}))
        return line

    def trained(self, step: int, loss: jax.Array, norms: dict[str, jax.Array]):
        """Wait for the loss of the step that makes `step` steps; the next one is under way.

        `norms` of the gradient come with the updates: Muon's at every step, Adam's at its own.
        """
        loss, names = float(loss), {"muon": "grad_norm", "adam": "grad_norm_adam"}
        found = {names[k]: float(f"{x:.6g}") for k, x in norms.items() if np.isfinite(x)}
        line = self.line(step, "train_loss", loss, lr=lr_scale(self.cfg, step - 1), **found)
        if step % self.cfg.log_every and step != self.first + 1:
            return
        ms, tokens = self.clock.ms(), self.cfg.tokens_after(step)
        speed = (tokens - self.mark[1]) / max(ms - self.mark[0], 1e-3) * 1000
        devices, mfu = self.facts["devices"], ""
        if peak := peak_flops(devices["kind"]):
            mfu = f" mfu:{speed * flops_per_token(self.cfg) / (peak * devices['count']):.1%}"
        eta = (self.cfg.steps - step) * ms / step / 1000
        self.say(f"{line} train_loss:{loss:.4f} {speed:,.0f} tok/s{mfu} eta:{eta:.0f}s")
        self.mark = ms, tokens

    def validated(self, step: int, loss: float):
        """Write down the validation loss after `step` steps; the clock stands still."""
        self.say(self.line(step, "val_loss", loss, f"val_loss:{loss:.4f} "))
        self.progress(step, val_loss=round(loss, 6))
        if lost := self.lost():
            self.say(f"warning: {lost}")

    def progress(self, step: int, **facts):
        """Put into run.json how far the run is."""
        ms, tokens = round(self.clock.ms(), 3), self.cfg.tokens_after(step)
        self.write_facts(steps=step, tokens=tokens, train_time_ms=ms, **facts)

    def end(self, step: int, asked: int, missing: str):
        """The last lines. Stopped if a signal has ended the run; UserError if it is not saved."""
        missing = missing or self.lost()
        if step < self.cfg.steps:
            self.progress(step)
            if not missing:
                raise Stopped(
                    f"stopped after {step} of {self.cfg.steps} steps; to continue: "
                    f"python train_gpt.py --resume {shlex.quote(str(self.folder))}",
                    asked,
                )
            raise UserError(f"stopped after {step} steps, but {missing}")
        peak, target, loss = memory_peak_mib(), self.cfg.target, self.facts["val_loss"]
        self.write("log.txt", f"peak memory allocated: {peak:.0f} MiB")
        self.write_facts(finished=True)
        met, seconds = "met" if loss <= target else "MISSED", self.clock.ms() / 1000
        verdict = f"target {target} {met}: " if target else ""  # one's own text has none
        self.say(
            f"{verdict}val_loss {loss:.4f} after {seconds:.1f} s of training on "
            f"{self.cfg.total_tokens:,} tokens; peak memory {peak:.0f} MiB"
        )
        if missing:
            raise UserError(f"the run has ended well, but {missing}")


def claim(run_dir: Path, name: str):
    """Open a file of a run to append to it, locked if the system can; UserError if another process
    has it. The system takes the lock back when this process ends or closes the file."""
    try:
        file = open(run_dir / name, "ab", buffering=0)
    except OSError as error:
        why = f"{error.strerror}: make that possible, or name another folder"
        raise UserError(f"cannot write {run_dir / name}: {why}") from None
    with contextlib.suppress(ImportError):  # Windows has no such module
        import fcntl

        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"another process writes {run_dir}: wait for it, or end it") from None
        except OSError:  # a file system without locks
            pass
    return file


def open_log(
    cfg: Config, facts: dict, data: Path, out: Path, saved: Saved | None, profile: bool, say
) -> RunLog:
    """The log of a new run, or of one that goes on, with its head; UserError if it cannot be.

    `facts` are run_facts and the answer of check_tokens, on which all processes must agree; `data`
    is the folder of the shards, `out` where new runs go.
    """
    left = cfg.steps - (saved.step if saved else 0)
    if not left:
        raise UserError(f"{saved.folder.parents[1]} is finished: there is nothing to resume")
    if profile and left <= PROFILED.stop:
        raise UserError(f"--profile needs more than {PROFILED.stop} steps: raise --set steps=")
    same = {key: facts[key] for key in ("source_sha256", "versions", "data")}
    same |= {f"config's {key}": value for key, value in facts["config"].items()}
    agree({**same, "step to resume from": saved and saved.step})
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{cfg.preset}-s{cfg.seed}-{secrets.token_hex(3)}"
    folder = saved.folder.parents[1] if saved else out / from_first(stamp)
    if saved and saved.data != facts["data"]:
        raise UserError(
            f"{data} does not hold the shards that {folder} was trained on: name their --data"
        )
    merges = data / MERGES
    if cfg.encoding == "bpe":
        try:
            [bytes.fromhex(merge) for merge in json.loads(merges.read_text())]
        except (OSError, ValueError, TypeError) as error:
            says = f"{merges}, which says what the tokens are, cannot be used ({error})"
            raise UserError(f"{says}: make the data again") from None
    changed = saved and saved.source_sha256 != facts["source_sha256"]
    if changed:
        say("warning: train_gpt.py has changed since; what follows may differ from what was")
    if saved and jax.process_index() == 0:
        set_aside(saved)
    facts = {"run_id": folder.resolve().name, **facts, "compile_seconds": {}, "settings": {}}
    facts |= {"steps": 0, "tokens": 0, "train_time_ms": 0.0, "val_loss": None}
    facts |= {"target": cfg.target, "resumed": bool(saved), "finished": False}
    rule, devices = "=" * 100, facts["devices"]
    about = [f"{k} {v}" for k, v in facts["versions"].items()]
    about += [f"{devices['count']} x {devices['kind']} ({devices['platform']})"]
    about += [facts["host"]["platform"], f"command: {facts['command']}"]
    about += [f"{x}: {json.dumps(facts[x])}" for x in ("host", "environment", "choices", "data")]
    if not saved or cfg != dataclasses.replace(saved.cfg, data=cfg.data, devices=cfg.devices):
        about += [f"config: {json.dumps(facts['config'])}"]
    head = [rule, "resumed"] if saved else [SOURCE]
    head += [f"source: {facts['source_sha256']}", SOURCE] if changed else []
    head += [*about, rule, ""] if saved and not changed else [rule, *about, rule, ""]
    log = RunLog(cfg, folder, facts, saved, say, "\n".join(head))
    check_shared(folder)
    if saved:
        log.progress(saved.step)
    kernels = facts["choices"]["kernels"]
    say(f"run {folder} on {devices['count']} x {devices['kind']}; kernels: {kernels}")
    if saved:
        say(f"resumed after {saved.step} of {cfg.steps} steps from {saved.folder}")
    if cfg.encoding == "bpe" and not (folder / MERGES).exists():
        log.attempt(shutil.copy, merges, folder)  # so that a sample needs the run's folder only
    return log


def check_shared(folder: Path):
    """UserError unless all processes see the folder of the run that process 0 has made."""
    if jax.process_count() == 1:
        return
    probe = folder / from_first(f".{secrets.token_hex(4)}")
    if jax.process_index() == 0:
        probe.touch()
    from_first("")  # it is there
    try:
        agree({f"folder {folder}": probe.exists()})
    finally:
        if jax.process_index() == 0:
            probe.unlink()


PROFILED = range(20, 24)  # the steps of this process that --profile traces, well after the start


def trace(at: int, folder: Path, last):
    """Trace the steps PROFILED into folder/profile; called before each, with the `last` loss."""
    if at == PROFILED.start:
        jax.profiler.start_trace(str(folder / "profile"))
    if at == PROFILED.stop:
        jax.block_until_ready(last)
        jax.profiler.stop_trace()


def demonstrate(cfg: Config, run_dir: Path, val: TokenStream, val_loss: float, say: Callable):
    """At the end of a demonstration: compression beside gzip's and xz's, and a sample."""
    tool = "records/sample.py"
    if jax.process_count() == 1 and (Path(__file__).resolve().parent / tool).exists():
        say(run_tool(tool)["demonstrate"](cfg, run_dir, val, val_loss))


# ------------------------------------------------------------------------------------------------
# Signals and hosts: several processes, each with its own devices, that run the same programs
# ------------------------------------------------------------------------------------------------

HEARTBEAT_SECONDS = 30  # jax ends all processes when one has given no sign of life for so long
JOIN_SECONDS = 300  # that a process waits for the others at the start


@contextlib.contextmanager
def ask_to_stop():
    """A function of the step: the signal that has asked for the end, on all processes, or 0.

    Inside, SIGTERM, Ctrl-C and the end of the terminal (SIGHUP) ask; another one, a second or more
    later (some send the same one twice), ends the process at once. Of several processes the one
    that hears a signal tells jax by SIGTERM, which finds a step at which all can stop: each asks at
    every step.
    """
    asked, before, agreed = [], {}, []  # (signal, time); signal -> handler
    one = jax.process_count() == 1

    def ask(number, frame):
        if asked and time.monotonic() > asked[0][1] + 1:
            signal.signal(number, signal.SIG_DFL)  # an exception could be lost, in a callback
            signal.raise_signal(number)
        asked.append((number, time.monotonic()))
        if not one:
            signal.raise_signal(signal.SIGTERM)

    def reached(step: int) -> int:
        if one:
            return asked[0][0] if asked else 0
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):  # says so once
            agreed.append(signal.SIGTERM)
        return agreed[0] if agreed else 0

    numbers = [signal.SIGINT, *[signal.SIGTERM] * one]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:  # what `nohup` asks for
        numbers.append(hangup)
    if threading.current_thread() is threading.main_thread():
        before |= {number: signal.signal(number, ask) for number in numbers}
    try:
        yield reached
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ending_at_once():
    """Inside, Ctrl-C ends the process without a word: there is nothing to save, and the compiler's
    threads, or jax while it waits, would let no handler of Python's be heard for minutes."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    heard &= threading.current_thread() is threading.main_thread()
    if heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def tpu_hosts() -> int:
    """How many hosts the TPU slice of this machine has; 1 where there is no TPU or no answer."""
    names = os.environ.get("TPU_WORKER_HOSTNAMES")
    if names is None and (Path("/dev/vfio").exists() or Path("/dev/accel0").exists()):
        if importlib.util.find_spec("libtpu") is not None:
            where = "metadata.google.internal/computeMetadata/v1/instance/attributes"
            ask = urllib.request.Request(f"http://{where}/worker-network-endpoints")
            ask.add_header("Metadata-Flavor", "Google")
            with contextlib.suppress(OSError), urllib.request.urlopen(ask, timeout=3) as answer:
                names = answer.read().decode()
    return len((names or "one").split(","))


def join_hosts(coordinator: str | None, processes: int | None, process_id: int | None):
    """Join the other processes of the run, if there are any; before jax touches a device.

    With nothing given: on a TPU slice of several hosts and in a Slurm step of several tasks, where
    jax finds out by itself. (Alone, a process has no need of jax.distributed and of its ports.)
    """
    several = tpu_hosts() > 1 or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    if coordinator is None and not several:
        return
    tell(f"waiting for the other processes, up to {JOIN_SECONDS} s; Ctrl-C ends")

    def give_up():  # a thread, for jax waits outside Python, and then dumps its stack
        tell(f"error: no word of all processes after {JOIN_SECONDS} s: start them all", sys.stderr)
        os._exit(2)

    timer = threading.Timer(JOIN_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        with ending_at_once():
            if coordinator is not None:
                meet(coordinator, process_id)
            jax.distributed.initialize(
                *(coordinator, processes, process_id),
                initialization_timeout=2 * JOIN_SECONDS,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot join the other processes ({error}): see --coordinator") from None
    finally:
        timer.cancel()


def meet(coordinator: str, process_id: int):
    """Find out whether the port is free (process 0) or answers (the others), which wait for it.

    jax would crash where it is in use, and abort after minutes where nobody answers.
    """
    name, port = coordinator.rsplit(":", 1)
    if process_id == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or old connections count
            try:
                probe.bind(("", int(port)))
            except OSError as error:
                why = f"{error.strerror}: choose another port"
                raise UserError(f"--coordinator {coordinator}: {why}") from None
        return
    deadline = time.monotonic() + 0.9 * JOIN_SECONDS
    while True:
        try:
            return socket.create_connection((name, int(port)), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                why = f"{error.strerror or error}: does process 0 run there, is the port open?"
                raise UserError(f"--coordinator {coordinator}: {why}") from None
            time.sleep(0.2)


def agree(facts: dict):
    """UserError, on every process, unless all of them have the same `facts`."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digests = [hashlib.sha256(json.dumps(fact).encode()).digest() for fact in facts.values()]
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(len(facts), -1)
    first = multihost_utils.broadcast_one_to_all(mine)
    equal = multihost_utils.process_allgather((mine == first).all(axis=1))
    for name, each in zip(facts, equal.reshape(jax.process_count(), -1).T, strict=True):
        if not each.all():
            others = ", ".join(str(process) for process in np.flatnonzero(~each))
            raise UserError(
                f"the {name} of process {others} is not that of process 0 (this is process "
                f"{jax.process_index()} on {platform.node()}): make them equal on all hosts"
            )


def from_first(text: str) -> str:
    """The text that process 0 has, on every process; at most 256 bytes."""
    if jax.process_count() == 1:
        return text
    from jax.experimental import multihost_utils

    own = np.frombuffer(text.encode().ljust(256), np.uint8)
    return multihost_utils.broadcast_one_to_all(own).tobytes().decode().strip()


def alone(status: int) -> int:
    """`status`; one of several processes ends with it at once: a farewell waits for the others."""
    if jax.distributed.is_initialized():
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed at the start
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    return status


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def show(cfg: Config) -> str:
    """The resolved config, the parameter table, the stages and the totals of a run, as text."""
    lines = [f"{k} = {v!r}" for k, v in dataclasses.asdict(cfg).items() if k != "stages"]
    form = "{:14} {:>14} {:>12} {:>9} {:>11} {:>6} {:>10}".format
    lines.append("\n" + form("parameter", "shape", "numbers", "optimizer", "lr", "decay", "betas"))
    table = param_table(cfg)
    for name, row in table.items():
        shape = "x".join(map(str, row.shape))
        rates = "/".join(f"{row.lr * scale:.3g}" for scale in sorted({*row.scale}) or [1])
        betas = "{}/{}".format(*row.betas) if row.optimizer == "adam" else ""
        count, decay = f"{row.count:,}", f"{row.decay:.3g}"
        lines.append(form(name, shape, count, row.optimizer, rates, decay, betas))
    lines.append(f"{'total':14} {'':>14} {sum(row.count for row in table.values()):12,}")
    form = "{:>10} {:>7} {:>6} {:>7} {:>9} {:>5} {:>12} {:>10} {:>9}  {}".format
    heads = "steps", "batch", "row", "doc cap", "windows", "lr x", "= from..to", "attn scale"
    lines.append("\n" + form(*heads, "M tokens", "loss weights, from and to"))
    for i, s in enumerate(cfg.stages):
        first, end = cfg.boundaries[i : i + 2]
        lr = f"{lr_scale(cfg, first):.3g}..{lr_scale(cfg, end - 1):.3g}"
        cells = f"{first}..{end - 1}", s.batch_tokens, s.row_tokens, s.doc_cap or "-"
        cells += "/".join(map(str, s.windows)), f"{s.lr_factor:g}", lr, f"{yarn(cfg, i)[1]:.4f}"
        tokens = f"{(end - first) * s.batch_tokens / 1e6:.1f}"
        lines.append(form(*cells, tokens, f"{s.weights} {s.weights_end}"))
    lines.append(f"validation windows: {cfg.val_windows[0]}/{cfg.val_windows[1]}")
    flat = round((1 - cfg.cooldown) * cfg.scheduled)
    lines.append(f"learning rate falls from step {flat} on; Adam every {cfg.adam_every} steps")
    tied = sum(is_tied(cfg, step) for step in range(cfg.steps))
    lines.append(f"head and embedding tied up to step {tied - 1}" if tied else "never tied")
    flops = cfg.total_tokens * flops_per_token(cfg)
    lines.append(f"{cfg.steps} steps, {cfg.total_tokens:,} tokens, {flops:.3e} model FLOPs")
    return "\n".join(lines)


def tell(line, stream=None):
    """Print a line, on stdout if on nothing else. If nobody can read it, the run goes on all the
    same: the terminal may be closed, the disk below it full, `| head` may have seen enough."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError):  # what the stream still holds would fail at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors: one line, exit status 2."""

    def error(self, message):
        """Raise instead of printing the whole usage."""
        raise UserError(f"{message} (see --help)")


def add_config_options(parser: argparse.ArgumentParser):
    """PRESET, --set, --data and --seed: what `resolve` makes a Config of."""
    parser.add_argument("preset", nargs="?", help=f"{' or '.join(PRESETS)}; default: by hardware")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data", metavar="DIR", help="folder with the token shards")
    parser.add_argument("--seed", type=int, metavar="N")


def resolve(args, say: Callable = tell) -> Config:
    """The Config that the command line asks for."""
    name = args.preset
    if name is None:
        name = "tiny" if all_devices()[0].platform == "cpu" else "speedrun"
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; there are: {', '.join(PRESETS)}")
    given = {"data": args.data, "seed": args.seed}
    given = {key: value for key, value in given.items() if value is not None}
    cfg = validate(dataclasses.replace(overridden(PRESETS[name], args.set), **given))
    folder, given = place_of(cfg.data), {item.partition("=")[0] for item in args.set}
    if (folder / DESCRIPTION).exists():
        return run_tool("data/own_text.py")["fit"](cfg, folder, given, say)
    return cfg


def overridden(cfg: Config, items: list[str]) -> Config:
    """`cfg` with every KEY=VALUE of --set in it."""
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"--set {item}: write KEY=VALUE (and PRESET before all options)")
        cfg = override(cfg, key, text)
    return cfg


def parse_args(argv):
    """The command line as a namespace; UserError for what does not go together."""
    parser = Parser(prog="train_gpt.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    add_config_options(parser)
    option = parser.add_argument
    option("--out", metavar="DIR", default="logs", help="runs go to OUT/<run id>/")
    option("--show", action="store_true", help="config, parameters, stages; then exit")
    option("--resume", metavar="RUN_DIR", help="continue an interrupted run")
    option("--profile", action="store_true", help="trace a few steps")
    option("--cache", metavar="DIR", help="persistent compilation cache")
    option("--coordinator", metavar="HOST:PORT", help="of several processes, the first")
    option("--processes", type=int, metavar="N", help="how many there are")
    option("--process-id", type=int, metavar="I", help="which this one is, from 0 on")
    args = parser.parse_args(argv)
    for name in ("data", "out", "cache", "resume"):
        if getattr(args, name) == "":
            raise UserError(f"--{name} is empty: name something, or drop it")
    own = [item for item in args.set if item.partition("=")[0] not in MACHINE]
    if args.resume is not None and (args.preset is not None or own or args.seed is not None):
        also = f"--set but for {', '.join(MACHINE)}"
        raise UserError(f"--resume takes the config of the run: drop PRESET, --seed, {also}")
    if args.show and args.resume is not None:
        raise UserError("--show and --resume are two different things to do: drop one")
    group = args.coordinator, args.processes, args.process_id
    if any(x is not None for x in group):
        if None in group or not 0 <= args.process_id < args.processes:
            raise UserError("--coordinator HOST:PORT, --processes N, --process-id 0..N-1: give all")
        port = re.fullmatch(r"[^:/\s]+:(\d{1,5})", args.coordinator)
        if not port or not 0 < int(port[1]) < 2**16:
            raise UserError(f"--coordinator {args.coordinator}: write HOST:PORT, a port to 65535")
        if args.show:
            raise UserError("--show is for one process: drop --coordinator")
    return args


def run(argv: list[str], command: str):
    """Do what the command line says."""
    args = parse_args(argv)
    if args.cache is not None:
        make_folder(Path(args.cache), "--cache")
        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if args.show:
        print(show(resolve(args)), flush=True)
        return
    if args.coordinator is not None and args.preset is not None:
        resolve(args, lambda line: None)  # what is wrong with it is said before others wait
    join_hosts(args.coordinator, args.processes, args.process_id)
    all_devices()  # before anything else asks jax: without a backend this is one line
    first = jax.process_index() == 0
    say = tell if first else lambda line: None
    if args.resume is None:
        saved, cfg = None, resolve(args, say)
    else:
        there = Path(args.resume, "log.txt").is_file() and first
        lock = claim(Path(args.resume), "log.txt") if there else None  # noqa: F841 (to the end)
        saved = find_checkpoint(Path(args.resume), say)
        many = saved.cfg.devices > len(all_devices()) or jax.process_count() > 1
        moved = {"devices": 0 if many else saved.cfg.devices, "data": args.data or saved.cfg.data}
        cfg = validate(overridden(dataclasses.replace(saved.cfg, **moved), args.set))
    train(cfg, Path(args.out), command, saved, args.profile, say)


def report_errors(do: Callable) -> int:
    """The exit status of `do()`: what the user can mend becomes one line and status 2."""
    if hasattr(sys.stdout, "reconfigure"):  # text of a model must not end a run on a terminal
        sys.stdout.reconfigure(errors="replace")
    several = jax.distributed.is_initialized
    try:
        return do() or 0
    except Stopped as stop:
        tell(stop)
        return 128 + stop.number
    except KeyboardInterrupt:
        tell("interrupted", sys.stderr)
        return alone(130)
    except Exception as error:
        line, hint = str(error), ""
        if "RESOURCE_EXHAUSTED" in line:
            line = f"out of memory: {line}"
            hint = "(use --set recompute=1 or a smaller micro_tokens, or more devices)"
        elif several() and not isinstance(error, UserError):
            if not isinstance(error, jax.errors.JaxRuntimeError):
                traceback.print_exc()
            line = f"the devices failed: {line}"
            hint = "(if another process has ended, start all of them again, or --resume the run)"
        elif not isinstance(error, UserError | OSError):
            raise  # a fault of this file: its traceback helps
        words = line.split()[:60] if hint else line.split()
        tell(" ".join(["error:", *words, *hint.split()]), sys.stderr)
        return alone(2)


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return report_errors(lambda: run(words, shlex.join(["python", "train_gpt.py", *words])))


# ================================================================================================
# PART III: FAST ON HARDWARE
# ================================================================================================
# Kernels that equal Part I's functions up to rounding, and the one function that chooses them.


# ------------------------------------------------------------------------------------------------
# The choice
# ------------------------------------------------------------------------------------------------

SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4")  # kinds on which no kernel of ours fits


def pick_kernels(cfg: Config, device) -> tuple[Kernels, str]:
    """(the Kernels for one of the run's devices, why these: a line for the log).

    The loss with its own gradient and the lean ReLU^2 serve everywhere. Attention and the gradients
    of tables have kernels for TPUs since v5 and attention for NVIDIA GPUs since Ampere; where one
    of their conditions fails, the plain form does the work, and the line says which.
    """
    if cfg.kernels == "plain":
        return PLAIN, "plain, as asked for"
    chosen = PLAIN._replace(squared_relu=lean_squared_relu, cross_entropy=fused_cross_entropy)
    kind, h = device.device_kind, cfg.head_width
    rows = [*(stage.row_tokens for stage in cfg.stages), cfg.val_row]
    window = max(*cfg.val_windows, *(max(stage.windows) for stage in cfg.stages))
    window = min(window, max(rows))
    # Conditions are pairs: whether one fails, and what then is wrong.
    uneven = next((row for row in rows if row % 128), None)
    even = uneven, f"tiles of 128 tokens do not fill rows of {uneven}"
    # Without a running maximum the largest score must be known to be small: that of normed q and k.
    score = max(yarn(cfg, stage)[1] for stage in range(len(cfg.stages))) * h
    high = f"scores up to {score:.0f} could overflow without a running maximum"
    bounded = score > MAX_SCORE, high
    if device.platform == "tpu":
        ring = Plan(Heads(cfg.heads, h, window, offset=True), 256).ring_bytes(cfg.dtype)
        large = f"a window of {window} of width {cfg.width} does not fit the VMEM"
        for_tables = [
            (kind.startswith(SMALL_VMEM), f"a {kind} has too little VMEM"),
            (cfg.width % 128, f"tiles of 128 columns do not fill a width of {cfg.width}"),
            even,
        ]
        if not any(fails for fails, _ in for_tables):
            chosen = chosen._replace(add_rows=sum_rows)
        wide = h % 128, f"tiles of 128 columns do not fill heads {h} wide"
        conditions = [*for_tables, wide, (ring > KERNEL_VMEM * 0.7, large), bounded]
        attend, served = attend_window, "attention and gradients of tables for TPUs"
    elif device.platform == "gpu":
        triton = importlib.util.find_spec("jax.experimental.pallas.triton")
        conditions = [
            (triton is None, f"jax {jax.__version__} has no Triton any more"),
            (cfg.dtype != jnp.bfloat16, f"they compute in bfloat16, not in {cfg.compute_dtype}"),
            (capability_of(device) < 8.0, "the compute capability is below 8.0"),
            (h not in (16, 32, 64, 128), f"tiles do not fit heads {h} wide"),
            even,
            bounded,
        ]
        attend, served = functools.partial(attend_heads, attend_triton), "attention for NVIDIA GPUs"
    else:
        return chosen, f"plain attention: there are no kernels for a {device.platform}"
    for fails, why in conditions:
        if fails:
            tables = ", table gradients for TPUs" if chosen.add_rows is sum_rows else ""
            return chosen, f"plain attention{tables}: {why}"
    return chosen._replace(attend=attend), served


def capability_of(device) -> float:
    """The CUDA compute capability of a GPU; 0 of others (an AMD GPU has a name there)."""
    with contextlib.suppress(ValueError):
        return float(getattr(device, "compute_capability", 0))
    return 0.0


# ------------------------------------------------------------------------------------------------
# For all hardware: the loss with its own gradient, ReLU^2, document starts
# ------------------------------------------------------------------------------------------------


def squash(z, cfg: Config):
    """tanh((z + b) / 2c), float32: a sigmoid is half of 1 + tanh of half."""
    _, b, c = cfg.logit_cap
    return jnp.tanh((z.astype(jnp.float32) + b) * (0.5 / c))


def token_losses(x_cd, head_vd, targets_ck, cfg: Config, trains: bool = False):
    """(losses in nats [c, k], logits [c, v] before the cap, sums of exponentials [c]) as float32.

    Capped logits are a/2 (1 + squash), and a/2 of each cancels. XLA does all of this to a product
    while it is on the chip: if the caller stores squashed logits as bfloat16, no float32 [c, v]
    goes to memory. The logits of the targets come once more, from their rows of the head: 12.2 M
    cycles predicted for v6e (49,152 tokens, one target; 0.2 M more are the bytes of the look-up),
    18.7 M when they are picked out of [c, v] by comparison.

    On an NVIDIA GPU matmuls are a library's, and the product does go to memory. Where the program
    `trains` it goes there in the dtype of x, as in the original: 0.4 GB a chunk instead of 0.8. The
    sums are then those of rounded logits, the logits of the targets are not rounded.
    """
    half = cfg.logit_cap[0] / 2

    def logits(x_cd, head_vd, dtype=jnp.float32):
        w_vd = head_vd.astype(x_cd.dtype)
        return jnp.matmul(x_cd, w_vd.T, preferred_element_type=dtype).astype(jnp.float32)

    narrow = functools.partial(logits, dtype=x_cd.dtype if trains else jnp.float32)
    z_cv = lax.platform_dependent(x_cd, head_vd, cuda=narrow, default=logits)
    sum_c = jnp.sum(jnp.exp(half * squash(z_cv, cfg)), axis=1)
    z_ck = [
        jnp.sum(x_cd.astype(jnp.float32) * head_vd[targets_ck[:, k]].astype(jnp.float32), axis=1)
        for k in range(targets_ck.shape[1])
    ]
    losses_ck = jnp.log(sum_c)[:, None] - half * squash(jnp.stack(z_ck, axis=1), cfg)
    return losses_ck, z_cv, sum_c


def loss_gradients(z_cv, sum_c, x_cd, head_vd, targets_ck, weights_ck, cfg: Config):
    """Gradients of the weighted losses: (x's [c, d] in its dtype, the head's [v, d] in float32).

    That of a logit z is (total weight of the token * its probability - weight of z as a target)
    times the slope of the cap, a/4c (1 - squashed^2). With squashed logits, and this product,
    rounded to bfloat16, either gradient is off by 0.3 % (relative norm).
    """
    a, _, c = cfg.logit_cap
    weights_ck = a / (4 * c) * weights_ck

    # Barriers make XLA store what was rounded, and no float32 [c, v]: here the squashed logits...
    def store(z_cv):
        return lax.optimization_barrier(squash(z_cv, cfg).astype(x_cd.dtype)).astype(jnp.float32)

    # ... and on a GPU nothing more: the rounded product is in memory already (see token_losses);
    # the barrier keeps XLA from widening it.
    def again(z_cv):
        return squash(lax.optimization_barrier(z_cv.astype(x_cd.dtype)), cfg)

    squashed_cv = lax.platform_dependent(z_cv, cuda=again, default=store)
    # Targets of a token that are equal share the sum of their weights: it is written only once.
    equal_ckk = targets_ck[:, :, None] == targets_ck[:, None, :]
    merged_ck = jnp.sum(jnp.where(equal_ckk, weights_ck[:, None, :], 0.0), axis=2)
    ids_v, hit_cv = jnp.arange(squashed_cv.shape[1])[None], 0.0
    for k in range(targets_ck.shape[1]):
        hit_cv = jnp.where(ids_v == targets_ck[:, k : k + 1], merged_ck[:, k : k + 1], hit_cv)
    factor_c = jnp.sum(weights_ck, axis=1) / sum_c
    miss_cv = jnp.exp(a / 2 * squashed_cv) * factor_c[:, None] - hit_cv
    grad_cv = (miss_cv * (1 - jnp.square(squashed_cv))).astype(x_cd.dtype)
    d_head_vd = jnp.matmul(grad_cv.T, x_cd, preferred_element_type=jnp.float32)
    return grad_cv @ head_vd.astype(x_cd.dtype), d_head_vd


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def fused_cross_entropy(x_rd, head_vd, targets_rk, weights_rk, cfg: Config):
    """cross_entropy, whose gradient is formed together with it, chunk by chunk.

    On the way back the logits would have to be either kept or computed again. Only the weighted sum
    has a gradient, with respect to x and head. Predicted for v6e, 49,152 tokens, 50,304 entries, in
    M cycles with 1, 2, 3 targets: 48.7, 61.7, 61.7; by autodiff with recomputed logits 72.6, 84.3,
    92.8; three matmuls at peak are 21.7.
    """

    def add(totals, chunk):
        x_cd, targets_ck, weights_ck = chunk
        losses_ck, _, _ = token_losses(x_cd, head_vd, targets_ck, cfg)
        return add_losses(totals, losses_ck, weights_ck), None

    zeros = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    return lax.scan(add, zeros, in_chunks(cfg, x_rd, targets_rk, weights_rk))[0]


def fused_cross_entropy_forward(x_rd, head_vd, targets_rk, weights_rk, cfg: Config):
    """(fused_cross_entropy, its gradients for a cotangent of 1), where jax differentiates it."""

    def add(carry, chunk):
        totals, d_head = carry
        x_cd, targets_ck, weights_ck = chunk
        losses_ck, z_cv, sum_c = token_losses(x_cd, head_vd, targets_ck, cfg, trains=True)
        dx_cd, more = loss_gradients(z_cv, sum_c, x_cd, head_vd, targets_ck, weights_ck, cfg)
        return (add_losses(totals, losses_ck, weights_ck), d_head + more), dx_cd

    zeros = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    start = zeros, jnp.zeros(head_vd.shape, jnp.float32)
    (totals, d_head), dx = lax.scan(add, start, in_chunks(cfg, x_rd, targets_rk, weights_rk))
    return totals, (dx.reshape(x_rd.shape), d_head, head_vd)


def fused_cross_entropy_backward(cfg: Config, gradients, cotangents):
    """Gradients for x and head; targets and weights have none."""
    dx_rd, d_head, head_vd = gradients
    weighted, _ = cotangents
    dx, d_head = weighted * dx_rd.astype(jnp.float32), weighted * d_head
    return dx.astype(dx_rd.dtype), d_head.astype(head_vd.dtype), None, None


fused_cross_entropy.defvjp(fused_cross_entropy_forward, fused_cross_entropy_backward)


@jax.custom_vjp
def lean_squared_relu(z):
    """squared_relu, whose slope is 2 sqrt(h), so that z need not be kept beside h.

    On an absent H100 that saves 2.6 of 15.6 GiB for 49,152 tokens; on a TPU XLA finds it by itself.
    """
    return squared_relu(z)


lean_squared_relu.defvjp(
    lambda z: (squared_relu(z),) * 2,
    lambda h, grad: ((2 * jnp.sqrt(h.astype(jnp.float32)) * grad).astype(grad.dtype),),
)


def document_starts(segments_bt):
    """The place in its row where the document of each token begins, int32 [b, t]."""
    begins = jnp.pad(segments_bt[:, 1:] != segments_bt[:, :-1], ((0, 0), (1, 0)))
    here = jnp.arange(segments_bt.shape[1], dtype=jnp.int32)[None]
    return lax.cummax(jnp.where(begins, here, 0), axis=1)


# ------------------------------------------------------------------------------------------------
# Attention for TPUs: all of a layer's in one pass
# ------------------------------------------------------------------------------------------------
# One pass over a row each way, in blocks of 256 tokens. The heads of a block lie side by side as
# the projection left them, [t, n h] and never [n, t, h]: what costs most around other kernels is
# not attention but transposing arrays, and QK norm and rotation as passes of their own. Here they
# are done once for each block, and rotated keys and values of the blocks that the window can reach
# wait in a ring in VMEM (3 MiB at a window of 640; 14 in the backward pass, with their gradients).
# Scores are kept as [keys, queries], so that what there is one of for each query (sum,
# gate, start of the document) is a row, and costs nothing to broadcast. QK norm bounds the scores:
# no running maximum. Blocks that hold no visible key are skipped.
# Predicted for 49,152 tokens and six heads of 128, both ways, in million cycles (of 571 us): 4.8 at
# a window of 640, 6.1 with paired heads, 7.9 at 1408, and 4.3 for what stands around the kernel,
# projections included. With jax's splash attention the kernels took 21 on average, and what stood
# around them 27.

LOG2E = math.log2(math.e)  # the hardware's exponential is 2^x: queries are scaled by this as well
ONES = 16  # rows of ones under the values: with them one matmul also sums the weights
# Bound on scale * head width, and so on scores after QK norm, before the key offset (sqrt 2 more):
# the sum of 4096 exponentials of them stays within float32.
MAX_SCORE = 48.0
KERNEL_VMEM = 100 * 2**20  # bytes that a kernel may use of the 128 MiB


def run_kernel(name: str, body, grid, scalars, inputs, outputs, scratch, interpret: bool):
    """pl.pallas_call by name: `body` gets one object with a reference for every name.

    Its `row` (of the batch) and `i` (block of it) are the place in the grid, all i of a row first.

    inputs: name -> (array, block shape, index map); outputs: name -> (shape with dtype, block
    shape, index map); scratch in VMEM: name -> (shape, dtype). An input or output that is None is
    left out, and None for the body. `scalars`, name -> array, are there before the first block.
    Returns {name: output}.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    absent = {key: None for key, x in (inputs | outputs).items() if x[0] is None}
    given = {key: x for key, x in inputs.items() if key not in absent}
    outputs = {key: x for key, x in outputs.items() if key not in absent}
    names = [*scalars, *given, *outputs, *scratch]

    def kernel(*refs):
        place = {"row": pl.program_id(0), "i": pl.program_id(1)}
        body(types.SimpleNamespace(**dict(zip(names, refs, strict=True)), **absent, **place))

    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[pl.BlockSpec(*x[1:]) for x in given.values()],
            out_specs=[pl.BlockSpec(*x[1:]) for x in outputs.values()],
            scratch_shapes=[pltpu.VMEM(*x) for x in scratch.values()],
        ),
        out_shape=[x[0] for x in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(grid), vmem_limit_bytes=KERNEL_VMEM
        ),
        interpret=interpret,
        name=name,
    )(*scalars.values(), *(x[0] for x in given.values()))
    return dict(zip(outputs, results, strict=True))


@dataclass(frozen=True)
class Plan:
    """How the kernel cuts the work of one layer; distances are in blocks."""

    heads: Heads
    block: int  # tokens
    interpret: bool = False

    @property
    def reach(self) -> int:
        """Tokens back that any query can see."""
        return (self.heads.window + 1) // 2 if self.heads.paired else self.heads.window

    @property
    def slots(self) -> int:
        """Blocks of keys that a block of queries can see, itself included."""
        return -(-self.reach // self.block) + 1

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(head of the queries, head of the keys) for all products of scores, by query head."""
        n, half = self.heads.count, self.heads.count // 2
        if self.heads.paired:
            return [(c, o) for c in range(n) for o in (c % half, c % half + half)]
        return [(c, c) for c in range(n)]

    @property
    def delay(self) -> int:
        """After how many steps of the backward pass a block is complete."""
        return self.slots - 1 + self.heads.offset

    def ring_bytes(self, dtype) -> int:
        """VMEM of the rings of window_backward: three of `dtype` and three of float32."""
        numbers = (self.delay + 1) * self.block * self.heads.count * self.heads.width
        return numbers * 3 * (jnp.dtype(dtype).itemsize + 4)

    def first_partner(self, c: int) -> int:
        """The first head whose keys meet the queries of head c, and the other way round."""
        return c % (self.heads.count // 2) if self.heads.paired else c

    def side(self, c: int, o: int) -> int:
        """By how many half tokens queries of head c stand behind keys of head o: -1, 0 or 1."""
        half = self.heads.count // 2
        return (c >= half) - (o >= half) if self.heads.paired else 0

    def part(self, j: int) -> tuple[slice, slice]:
        """(keys, queries) of a block and of the one j before it that can see each other at all.

        All, or the last half of the keys and the first half of the queries, 1 score in 4: most
        windows of the record end in the middle of a block.
        """
        half = self.block // 2
        if j and j * self.block - self.reach >= half:
            return slice(half, self.block), slice(0, half)
        return slice(0, self.block), slice(0, self.block)

    def name(self, direction: str, values) -> str:
        """A name that tells kernels of different work apart, in profiles and in dumps."""
        kinds = {"paired": self.heads.paired, "offset": self.heads.offset}
        kinds["values"] = values is not None
        parts = [kind for kind, there in kinds.items() if there]
        return "_".join(["window", direction, str(self.heads.window), *parts])

    def lanes(self, c: int) -> slice:
        """Columns of head c."""
        return slice(c * self.heads.width, (c + 1) * self.heads.width)


def times(a, b, transpose: bool = False):
    """a @ b, or a @ b^T, summed in float32."""
    sides = (((1,), (1 if transpose else 0,)), ((), ()))
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, sides, exact, preferred_element_type=jnp.float32)


def collect(ref, at: tuple, value, anew: bool):
    """Add to a part of `ref`, or overwrite what a block before has left there."""
    ref[at] = value if anew else ref[at] + value


def swap_halves(x):
    """[t, h] with the halves of every row exchanged."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.roll(x, x.shape[1] // 2, 1)


def cos_and_sin(plan: Plan, tables, c: int):
    """The rotation of head c in float32, [block, h] each, from the block of `tables`."""
    h, at = plan.heads.width, 2 * plan.heads.width * (c % 2 if plan.heads.paired else 0)
    return tuple(tables[:, x : x + h].astype(jnp.float32) for x in (at, at + h))


def means(x, dtype):
    """The mean of every row [t, h], float32, in all of its columns: a matmul with ones.

    The MXU has nothing else to do then; with sums over lanes the forward pass takes 900 bundles a
    block more, of 4,700. What is summed is rounded to `dtype` first, which changes a mean of 128
    by about 2^-12 of itself.
    """
    h = x.shape[1]
    power = 2 ** int(math.log2(h))  # its inverse is exact in bfloat16
    mean = times(x.astype(dtype), jnp.full((h, h), 1 / power, dtype))
    return mean if power == h else mean * (power / h)


def rotate(x, cos, sin):
    """QK norm and rotation of one head [t, h]: rope(norm(x)), float32."""
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(means(wide * wide, x.dtype) + 2.0**-23)
    return (wide * cos + swap_halves(wide) * sin) * size


def rotate_grad(grad, x, cos, sin):
    """The gradient of `x` from that of rotate(x)."""
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(means(wide * wide, x.dtype) + 2.0**-23)
    grad, wide = grad * cos + swap_halves(grad * sin), wide * size
    return (grad - wide * means(grad * wide, x.dtype)) * size


def still(plan: Plan):
    """Which columns of a head do not rotate, bool [1, h]."""
    h = plan.heads.width
    return lax.rem(lax.broadcasted_iota(jnp.int32, (1, h), 1), h // 2) >= h // 4


def rotated_key(plan: Plan, r, c: int):
    """The keys of head c in the current block, with the offset; r.last keeps their last row."""
    from jax.experimental.pallas import tpu as pltpu

    k = rotate(r.k[0, :, plan.lanes(c)], *cos_and_sin(plan, r.tables, c))
    if not plan.heads.offset:
        return k
    before = jnp.where(r.i == 0, k[:1], r.last[:1, plan.lanes(c)])
    r.last[:1, plan.lanes(c)] = k[-1:]
    row = lax.broadcasted_iota(jnp.int32, k.shape, 0)
    return jnp.where(still(plan), jnp.where(row == 0, before, pltpu.roll(k, 1, 0)), k)


def gate_values(logits, value_logits):
    """All gates of a block, float32 [t, g]."""
    logits = logits[0].astype(jnp.float32)
    if value_logits is not None:
        logits += value_logits[0].astype(jnp.float32)
    return jax.nn.sigmoid(logits)


def gated_value(plan: Plan, r, gates, c: int):
    """The values of head c in the current block, with their rows of the value table, float32."""
    v = r.v[0, :, plan.lanes(c)].astype(jnp.float32)
    if r.values is None:
        return v
    at = plan.heads.count + c
    return v + 2 * gates[:, at : at + 1] * r.values[0, :, plan.lanes(c)].astype(jnp.float32)


def first_keys(plan: Plan, i, starts):
    """The first key that each query of block i can see, int32 [1, block], by Plan.side."""
    query = i * plan.block + lax.broadcasted_iota(jnp.int32, starts.shape, 1)
    unit, sides = (2, (-1, 0, 1)) if plan.heads.paired else (1, (0,))
    return {s: jnp.maximum(starts, query - (plan.heads.window - s) // unit) for s in sides}


def visible(plan: Plan, first, i, j: int, side: int):
    """Which keys of block i - j the queries of block i can see, bool [keys, queries] of part(j)."""
    keys, queries = plan.part(j)
    shape = keys.stop - keys.start, queries.stop
    key = lax.broadcasted_iota(jnp.int32, shape, 0)
    seen = key >= first[side][:, queries] - (i - j) * plan.block - keys.start
    if j:
        return seen
    latest = lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) - (side < 0)
    return seen & (key <= latest)


def window_inputs(plan: Plan, arrays: dict, at: Callable) -> dict:
    """Inputs of run_kernel from the arrays of a layer; grid step i reads their block at(i).

    q, k, v [1, block, d], logits [1, block, g]: columns of proj
    values [1, block, d], value_logits [1, block, g]: either may be None
    tables [block, 2 h], with paired heads 4 h: cos, cos, sin, -sin of even, then of odd heads
    """
    n, block = plan.heads.count, plan.block
    d, g = n * plan.heads.width, plan.heads.gates
    proj = arrays["proj"]

    def tokens(array, width, column=0):
        return array, (1, block, width), lambda b, i, *_: (b, at(i), column)

    return {
        "q": tokens(proj, d, 0),
        "k": tokens(proj, d, 1),
        "v": tokens(proj, d, 2),
        "logits": tokens(proj, g, 3 * d // g),
        "values": tokens(arrays["values"], d),
        "value_logits": tokens(arrays["value_logits"], g),
        "tables": (
            arrays["tables"], (block, arrays["tables"].shape[1]), lambda b, i, *_: (at(i), 0)
        ),
    }  # fmt: skip


def window_forward(plan: Plan, arrays: dict, save: bool) -> dict:
    """{"y" [b, t, d], and what to `save` for the backward pass}; one grid step a block.

    Saved are log_sums, log2 of the softmax sums [b, padded_n, t] (n rounded up to 8), and saved_q,
    saved_k and (with a value table) saved_v as they met, [b, t, d] each: rotating them again would
    take 2,700 bundles a block, of 11,000. `body` has the references of window_inputs, scale [1] and

    earliest [b, blocks]: the block in which the document of each block's first token begins
    starts [1, 1, block]: the place in its row where the document of each token begins
    y, saved_q, saved_k, saved_v [1, block, d], log_sums [1, padded_n, block]: outputs
    keys [slots, block, d]: ring of rotated keys
    transposed_values [slots, n, h + ONES, block]: ring, with rows of ones below the values
    queries [block, d]: rotated and scaled
    sums [n, h + ONES, block]: float32, of weighted values; row h: of weights
    last [8, d]: float32, row 0: the last rotated keys of the block before
    """
    from jax.experimental import pallas as pl

    n, h, block, slots = plan.heads.count, plan.heads.width, plan.block, plan.slots
    (b, t, _), dtype = arrays["proj"].shape, arrays["proj"].dtype

    def body(r):
        i = r.i
        slot = lax.rem(i, slots)
        gates = gate_values(r.logits, r.value_logits)
        first = first_keys(plan, i, r.starts[0])
        for c in range(n):
            lanes = plan.lanes(c)
            k = rotated_key(plan, r, c).astype(dtype)
            q = rotate(r.q[0, :, lanes], *cos_and_sin(plan, r.tables, c))
            v = gated_value(plan, r, gates, c)
            r.keys[slot, :, lanes] = k
            r.queries[:, lanes] = (q * (r.scale[0] * LOG2E)).astype(dtype)
            r.transposed_values[slot, c, :h] = v.T.astype(dtype)
            r.transposed_values[slot, c, h:] = jnp.ones((ONES, block), dtype)
            for ref, x in ((r.saved_k, k), (r.saved_v, v)):
                if ref is not None:
                    ref[0, :, lanes] = x.astype(dtype)
        if save:
            r.saved_q[0] = r.queries[...]

        def look_back(j: int):
            (keys, queries), at = plan.part(j), lax.rem(i - j + slots, slots)

            # All scores first: the compiler keeps this order, and so has work to fill the wait for
            # each matmul. Head by head this takes 1661 bundles a block instead of 749.
            scores = [
                times(r.keys[at, keys, plan.lanes(o)], r.queries[queries, plan.lanes(c)], True)
                for c, o in plan.pairs
            ]
            for (c, o), score in zip(plan.pairs, scores, strict=True):
                seen = visible(plan, first, i, j, plan.side(c, o))
                weights = jnp.where(seen, jnp.exp2(score), 0.0).astype(dtype)
                weighted = times(r.transposed_values[at, o, :, keys], weights)
                anew = j == 0 and o == plan.first_partner(c)
                collect(r.sums, (c, slice(None), queries), weighted, anew)

        look_back(0)
        for j in range(1, slots):
            pl.when(i - j >= r.earliest[r.row, i])(functools.partial(look_back, j))
        gates = gates.T
        for c in range(n):
            total = r.sums[c, h : h + 1]
            y = r.sums[c, :h] * (gates[c : c + 1] / total)
            r.y[0, :, plan.lanes(c)] = y.T.astype(dtype)
            if save:
                r.log_sums[0, c : c + 1] = jnp.log2(total)

    padded_n = -(-n // 8) * 8
    inputs = window_inputs(plan, arrays, lambda i: i)
    inputs["starts"] = (arrays["starts"][:, None], (1, 1, block), lambda b, i, *_: (b, 0, i))
    rows = jax.ShapeDtypeStruct((b, t, n * h), dtype)
    sums = jax.ShapeDtypeStruct((b, padded_n, t), jnp.float32)
    whole, across = (1, block, n * h), lambda b, i, *_: (b, i, 0)
    outputs = {
        "y": (rows, whole, across),
        "saved_q": (rows if save else None, whole, across),
        "saved_k": (rows if save else None, whole, across),
        "saved_v": (rows if save and arrays["values"] is not None else None, whole, across),
        "log_sums": (sums if save else None, (1, padded_n, block), lambda b, i, *_: (b, 0, i)),
    }
    scratch = {
        "keys": ((slots, block, n * h), dtype),
        "transposed_values": ((slots, n, h + ONES, block), dtype),
        "queries": ((block, n * h), dtype),
        "sums": ((n, h + ONES, block), jnp.float32),
        "last": ((8, n * h), jnp.float32),
    }
    scalars = {name: arrays[name] for name in ("earliest", "scale")}
    grid = b, t // block
    name = plan.name("forward", arrays["values"])
    return run_kernel(name, body, grid, scalars, inputs, outputs, scratch, plan.interpret)


def window_backward(plan: Plan, arrays: dict, saved: dict, y_grad):
    """Gradients of proj and of values (None without).

    Grid step i takes block i of the queries through all blocks that they can see, whose gradients
    collect in rings. What block i - delay was missing has then arrived, and it leaves, all its
    columns together: concatenated outside, they would be copied once more. With the key offset the
    first row of the next block is needed too, one step later. The references of `body`:

    logits, value_logits, starts, scale, earliest, log_sums: of block i, as in window_forward
    y_grad, y, saved_q, saved_k, saved_v [1, block, d]: of block i; saved_v is v without values
    old_q, old_k, old_logits, old_values, ...: of block i - delay, as in window_inputs
    grads [1, block, columns of proj], value_grads [1, block, d]: outputs, of block i - delay
    keys, all_values [ring, block, d], transposed_keys [ring, d, block]: saved_k, saved_v
    k_grads, v_grads [ring, block, d], q_grads [ring, d, block]: float32
    gate_grads [ring, padded_n, block]: float32, of the logits of the output gates
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    n, h, block, slots = plan.heads.count, plan.heads.width, plan.block, plan.slots
    (b, t, width), dtype = arrays["proj"].shape, arrays["proj"].dtype
    d, g, blocks = n * h, plan.heads.gates, t // block
    delay, ring = plan.delay, plan.delay + 1

    def look_back(r, j: int, first, shift, mean):
        """Block i as queries of block i - j."""
        (keys, queries), at = plan.part(j), lax.rem(r.i - j + ring, ring)
        slot = lax.rem(r.i, ring)

        def finish(c, o, weights, grad):
            q_lanes, k_lanes = plan.lanes(c), plan.lanes(o)
            v_grad = times(weights, r.y_grad[0, queries, q_lanes])
            collect(r.v_grads, (at, keys, k_lanes), v_grad, j == 0 and c == plan.first_partner(o))
            k_grad = times(grad, r.saved_q[0, queries, q_lanes])
            collect(r.k_grads, (at, keys, k_lanes), k_grad, j == 0 and c == plan.first_partner(o))
            q_grad = times(r.transposed_keys[at, k_lanes, keys], grad)
            anew = j == 0 and o == plan.first_partner(c)
            collect(r.q_grads, (slot, q_lanes, queries), q_grad, anew)

        waiting = None
        for c, o in plan.pairs:
            q_lanes, k_lanes = plan.lanes(c), plan.lanes(o)
            score = times(r.keys[at, keys, k_lanes], r.saved_q[0, queries, q_lanes], True)
            value_grad = times(r.all_values[at, keys, k_lanes], r.y_grad[0, queries, q_lanes], True)
            seen = visible(plan, first, r.i, j, plan.side(c, o))
            weights = jnp.where(seen, jnp.exp2(score + shift[c][:, queries]), 0.0)
            grad = weights * (value_grad - mean[c][:, queries])
            # The matmuls of one pair of heads fill the wait for the scores of the next: 1975
            # bundles a block instead of 2520; 1728 is the least that the MXU needs.
            if waiting:
                finish(*waiting)
            waiting = c, o, weights.astype(dtype), grad.astype(dtype)
        finish(*waiting)

    def body(r):
        slot = lax.rem(r.i, ring)
        gates = gate_values(r.logits, r.value_logits).T
        first = first_keys(plan, r.i, r.starts[0])
        r.keys[slot], r.all_values[slot] = r.saved_k[0], r.saved_v[0]
        shift, mean = [], []  # log2 of gate / softmax sum; what every score gradient has too much
        for c in range(n):
            lanes = plan.lanes(c)
            r.transposed_keys[slot, lanes] = r.saved_k[0, :, lanes].T
            y, dy = (x[0, :, lanes].astype(jnp.float32) for x in (r.y, r.y_grad))
            total, gate = jnp.sum((y * dy).T, axis=0, keepdims=True), gates[c : c + 1]
            r.gate_grads[slot, c : c + 1] = total * (1 - gate)
            gate = jnp.maximum(gate, 1e-20)
            shift.append(jnp.log2(gate) - r.log_sums[0, c : c + 1])
            mean.append(total / gate)

        look_back(r, 0, first, shift, mean)
        for j in range(1, slots):
            visit = functools.partial(look_back, r, j, first, shift, mean)
            pl.when((r.i - j >= r.earliest[r.row, newest(r.i)]) & (r.i < blocks))(visit)

        # What the first blocks that leave write is overwritten by block 0, which comes after them.
        # The last steps have no block i: they repeat the last one, into a slot that nothing reads.
        old_slot = lax.rem(r.i + 1, ring)  # the slot of block i - delay
        gates = None if r.old_values is None else gate_values(r.old_logits, r.old_value_logits)
        gate_grads = jnp.concatenate([r.gate_grads[old_slot, :n], jnp.zeros((g - n, block))]).T
        for c in range(n):
            gate_grads = write_head(r, c, r.i - delay, old_slot, gates, gate_grads)
        r.grads[0, :, 3 * d :] = gate_grads.astype(dtype)

    def write_head(r, c: int, old, slot, gates, gate_grads):
        """Columns of head c in the gradients of block `old`; returns gate_grads with its column."""
        lanes, rotation = plan.lanes(c), cos_and_sin(plan, r.old_tables, c)
        grad = rotate_grad(r.q_grads[slot, lanes].T * r.scale[0], r.old_q[0, :, lanes], *rotation)
        r.grads[0, :, lanes] = grad.astype(dtype)
        grad = r.k_grads[slot, :, lanes] * (1 / LOG2E)
        if plan.heads.offset:
            row = lax.broadcasted_iota(jnp.int32, (block, h), 0)
            after = r.k_grads[lax.rem(slot + 1, ring), :1, lanes] * (1 / LOG2E)
            after = jnp.where(old + 1 < blocks, after, 0.0)
            moved = jnp.where(row == block - 1, after, pltpu.roll(grad, block - 1, 0))
            moved += jnp.where((row == 0) & (old == 0), grad, 0.0)  # the first kept its own
            grad = jnp.where(still(plan), moved, grad)
        grad = rotate_grad(grad, r.old_k[0, :, lanes], *rotation)
        r.grads[0, :, plan.lanes(n + c)] = grad.astype(dtype)
        grad = r.v_grads[slot, :, lanes]
        r.grads[0, :, plan.lanes(2 * n + c)] = grad.astype(dtype)
        if r.old_values is None:
            return gate_grads
        gate = gates[:, n + c : n + c + 1]
        r.value_grads[0, :, lanes] = (2 * gate * grad).astype(dtype)
        product = grad * r.old_values[0, :, lanes].astype(jnp.float32)
        total = jnp.sum(product, axis=1, keepdims=True)
        column = lax.broadcasted_iota(jnp.int32, (block, g), 1)
        return jnp.where(column == n + c, 2 * total * gate * (1 - gate), gate_grads)

    def newest(i):
        return jnp.minimum(i, blocks - 1)

    def oldest(i):
        return jnp.maximum(i - delay, 0)

    def rows(array):
        return array, (1, array.shape[1], block), lambda b, i, *_: (b, 0, newest(i))

    current, old = (window_inputs(plan, arrays, at) for at in (newest, oldest))
    inputs = {name: current[name] for name in ("logits", "value_logits")}
    inputs |= {f"old_{name}": old[name] for name in old if name != "v"}
    values, v_column = arrays["values"], 0
    if values is None:
        saved, v_column = saved | {"saved_v": arrays["proj"]}, 2
    for name, array in (saved | {"y_grad": y_grad}).items():
        column = v_column if name == "saved_v" else 0
        inputs[name] = array, (1, block, d), lambda b, i, *_, column=column: (b, newest(i), column)
    inputs |= {"log_sums": rows(saved["log_sums"]), "starts": rows(arrays["starts"][:, None])}
    outputs = {
        "grads": (arrays["proj"], (1, block, width), lambda b, i, *_: (b, oldest(i), 0)),
        "value_grads": (values, (1, block, d), lambda b, i, *_: (b, oldest(i), 0)),
    }
    scratch = {
        **{name: ((ring, block, d), dtype) for name in ("keys", "all_values")},
        **{name: ((ring, block, d), jnp.float32) for name in ("k_grads", "v_grads")},
        "transposed_keys": ((ring, d, block), dtype),
        "q_grads": ((ring, d, block), jnp.float32),
        "gate_grads": ((ring, saved["log_sums"].shape[1], block), jnp.float32),
    }
    scalars = {name: arrays[name] for name in ("earliest", "scale")}
    grid = b, blocks + delay
    name = plan.name("backward", values)
    out = run_kernel(name, body, grid, scalars, inputs, outputs, scratch, plan.interpret)
    return out["grads"], out.get("value_grads")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def window_attention(plan: Plan, arrays: dict):
    """attend_window on the `arrays` that it has prepared."""
    return window_forward(plan, arrays, save=False)["y"]


def window_saves(plan: Plan, arrays: dict):
    """window_attention, and what its gradient needs."""
    saved = window_forward(plan, arrays, save=True)
    return saved["y"], (arrays, saved)


def window_gradients(plan: Plan, kept, y_grad):
    """Gradients of proj, values and value_logits; other arrays get none."""
    arrays, saved = kept
    proj, values = window_backward(plan, arrays, saved, y_grad)
    logits = None if arrays["value_logits"] is None else proj[..., -plan.heads.gates :]
    return (dict.fromkeys(arrays) | {"proj": proj, "values": values, "value_logits": logits},)


window_attention.defvjp(window_saves, window_gradients)


def attend_window(
    heads, proj_btp, *, values_btd, value_logits_btg, segments_bt, freqs, scale, interpret=False
):
    """attend_heads in one TPU kernel each way: same arguments, same result up to rounding.

    Needs heads of a multiple of 128 and rows of a multiple of 128 tokens (see pick_kernels). No
    gradients of `freqs` and `scale`. `interpret` runs the kernel on a CPU, for tests.
    """
    b, t = segments_bt.shape
    reachable = min(heads.window, 2 * t if heads.paired else t)
    plan = Plan(dataclasses.replace(heads, window=reachable), math.gcd(t, 256), interpret)
    starts = document_starts(segments_bt)
    cos, sin = (x.swapaxes(0, 1) for x in rope_tables(freqs, positions(t, heads)))
    tables = [x for c, s in zip(cos, sin, strict=True) for x in (c, c, s, -s)]
    others = {
        "starts": starts,
        "earliest": starts[:, :: plan.block] // plan.block,
        "tables": jnp.concatenate(tables, axis=1).astype(proj_btp.dtype),
        "scale": jnp.reshape(scale, 1).astype(jnp.float32),
    }
    learned = {"proj": proj_btp, "values": values_btd, "value_logits": value_logits_btg}
    return window_attention(plan, learned | jax.tree.map(lax.stop_gradient, others))


# ------------------------------------------------------------------------------------------------
# Gradients of tables for TPUs
# ------------------------------------------------------------------------------------------------
# XLA scatters the rows of a lookup's gradient one by one, into zeros that it has to write first, in
# float32 because a frequent id comes up thousands of times. On a TPU one-hot matrices do better:
# where tokens are sorted by id, a tile of table rows meets few blocks of tokens, and each meeting
# is one small matmul. Sums are float32, every row of the table is written once, rounded, and there
# are no zeros. Predicted for the record's seven tables and 49,152 tokens: 3.4 M cycles of 235 M of
# a step. (XLA's estimates leave scatters out.)

ROW_TILE, ROW_BLOCK = 256, 256  # rows of a table, and tokens, that meet in one matmul


def meetings(ids_r, rows: int, block: int):
    """(order, tile, block): tokens sorted by tile, and which tile meets which block at each step.

    A tile is ROW_TILE of the `rows` of a table; `order` int32 [r] sorts the tokens, which are cut
    into blocks. Every tile has a step even if no token uses it. As tiles and blocks rise together,
    there are tiles + blocks - 1 steps at most; those that are left over have a block past the last.
    Tile and place of a token fit one integer: sorting that is all the sorting there is.
    """
    tiles, blocks, bits = -(-rows // ROW_TILE), ids_r.size // block, (ids_r.size - 1).bit_length()
    keys = (ids_r // ROW_TILE).astype(jnp.uint32) << bits
    keys = lax.sort(keys | jnp.arange(ids_r.size, dtype=jnp.uint32), is_stable=False)
    order = (keys & (2**bits - 1)).astype(jnp.int32)
    edges = jnp.arange(tiles + 1, dtype=jnp.uint32) << bits
    starts = jnp.sum(keys[None] < edges[:, None], axis=1, dtype=jnp.int32)
    first = jnp.minimum(starts[:-1] // block, blocks - 1)
    last = jnp.maximum((starts[1:] - 1) // block, first)
    ends = jnp.cumsum(last - first + 1)
    step = jnp.arange(tiles + blocks - 1, dtype=jnp.int32)
    tile = jnp.minimum(jnp.sum(ends[None] <= step[:, None], axis=1, dtype=jnp.int32), tiles - 1)
    return order, tile, jnp.minimum(last[tile] + 1 + step - ends[tile], blocks)


def sum_rows(table_vd, ids, rows, interpret=False):
    """scatter_rows in one TPU kernel, with sums rounded to the dtype of `rows`.

    A step builds the one-hot matrix [tile, block] of a meeting, multiplies each table's rows of
    the block by it, and adds up in VMEM; there are also the block and the tile, twice each: 11 MiB
    for five tables 768 wide. Against XLA's scatter, in bundles, for 49,152 tokens of a table
    [50304, 768]: 0.18 M instead of 1.72 M, the permutation of the rows (0.28 M) in neither.

    `body` reads tile and at [steps], the tile and the block of every meeting, and of that block ids
    [1, 1, block] and for each table rows0, rows1, ... [block, d]. It adds up in total (float32) and
    writes sums, of one tile [n, ROW_TILE, d] both.
    """
    from jax.experimental import pallas as pl

    (v, d), n, block = table_vd.shape, len(rows), math.gcd(ids.size, ROW_BLOCK)
    if 2 * (v // n // ROW_TILE + 2) * ids.size >= 2**32:
        raise UserError(
            f"{ids.size} tokens and {v // n} rows do not fit 32 bits: use a smaller micro_tokens"
        )
    order, tile, at = meetings(ids.reshape(-1), v // n, block)
    steps, blocks = tile.size, ids.size // block

    def body(r):
        tile = r.tile[r.i]
        begins = (r.i == 0) | (r.tile[jnp.maximum(r.i - 1, 0)] != tile)
        ends = (r.i == steps - 1) | (r.tile[jnp.minimum(r.i + 1, steps - 1)] != tile)

        @pl.when(begins)
        def clear():
            r.total[...] = jnp.zeros_like(r.total)

        @pl.when(r.at[r.i] < blocks)
        def add():
            row = tile * ROW_TILE + lax.broadcasted_iota(jnp.int32, (ROW_TILE, block), 0)
            hot = jnp.where(row == r.ids[0], 1.0, 0.0).astype(rows[0].dtype)
            for k in range(n):
                r.total[k] += times(hot, getattr(r, f"rows{k}")[...])

        @pl.when(ends)
        def store():
            r.sums[...] = r.total[...].astype(r.sums.dtype)

    def block_at(_, i, tile, at):
        return jnp.minimum(at[i], blocks - 1), 0

    ids = ids.reshape(-1)[order].reshape(blocks, 1, block)
    inputs = {"ids": (ids, (1, 1, block), lambda *args: (*block_at(*args), 0))}
    for k, x in enumerate(rows):
        inputs[f"rows{k}"] = x.reshape(-1, d)[order], (block, d), block_at
    sums = jax.ShapeDtypeStruct((n, v // n, d), rows[0].dtype)
    outputs = {"sums": (sums, (n, ROW_TILE, d), lambda _, i, tile, at: (0, tile[i], 0))}
    total = {"total": ((n, ROW_TILE, d), jnp.float32)}
    scalars = {"tile": tile, "at": at}
    out = run_kernel(f"sum_rows_{n}", body, (1, steps), scalars, inputs, outputs, total, interpret)
    return table_vd + out["sums"].reshape(v, d).astype(table_vd.dtype)


# ------------------------------------------------------------------------------------------------
# Attention for NVIDIA GPUs
# ------------------------------------------------------------------------------------------------
# One kernel takes a block of queries of one head through the keys that any of them can see, tile by
# tile (FlashAttention, Dao et al. 2022); two more go back, one with a block of queries through its
# keys, and one with a block of keys through its queries. Windows and documents only move on along
# a row, so what a block can see is one stretch of the row: tiles outside cost nothing, and no list
# of documents is needed. QK norm bounds the scores: no running maximum. Written with Pallas for
# Triton, which finds the tensor core instructions and loads tiles ahead of their use. (jax 0.11
# calls this way into Triton deprecated, for Mosaic GPU, which cannot be interpreted on a CPU.)


class Tiles(NamedTuple):
    """How a kernel cuts its work; tokens are powers of two that divide LARGEST_TILE."""

    queries: int
    keys: int
    warps: int
    stages: int  # tiles that are on their way at once


LARGEST_TILE = 128
# Heads of 128 on an H100: 150, 160 and 234 registers a thread, none spilled; 128 KiB of shared
# memory. Not yet timed: tests/kernels/tile_times.py has others.
FORWARD_TILES = Tiles(128, 64, 8, 3)
QUERY_TILES = Tiles(128, 64, 8, 2)
KEY_TILES = Tiles(64, 128, 8, 2)


def run_tiles(name, body, tiles: Tiles, block: int, arrays, cut, whole, outputs, interpret: bool):
    """pl.pallas_call for each block of `block` tokens of each head and row: {output name: array}.

    `body` gets one object with a reference for every name, and `i`, the number of its block. Of the
    `arrays` named in `cut`, and of `outputs` (name -> shape with dtype), it has the block, of those
    in `whole` the row, always of its head alone. Arrays are [b, t, n, h], [b, n, t] or [b, t].
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    b, t, n, _ = arrays["q"].shape

    def spec(x, is_cut: bool):
        tokens, at = (block, lambda i: i) if is_cut else (t, lambda i: 0)
        if x.ndim == 4:
            return pl.BlockSpec((None, tokens, None, x.shape[3]), lambda i, n, b: (b, at(i), n, 0))
        if x.ndim == 3:
            return pl.BlockSpec((None, None, tokens), lambda i, n, b: (b, n, at(i)))
        return pl.BlockSpec((None, tokens), lambda i, n, b: (b, at(i)))

    def kernel(*refs):
        given = dict(zip((*cut, *whole, *outputs), refs, strict=True))
        body(types.SimpleNamespace(i=pl.program_id(0), **given))

    results = pl.pallas_call(
        kernel,
        grid=(t // block, n, b),
        in_specs=[spec(arrays[name], name in cut) for name in (*cut, *whole)],
        out_specs=[spec(x, True) for x in outputs.values()],
        out_shape=[*outputs.values()],
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name=name,
    )(*(arrays[name] for name in (*cut, *whole)))
    return dict(zip(outputs, results, strict=True))


def tiles_forward(arrays: dict, interpret: bool) -> dict:
    """y [b, t, n, h] and log_sums, log2 of the softmax sums [b, n, t].

    `body` reads q [queries, h] and first [queries], the first key that each query can see, of its
    block, and k and v [t, h] of the row; it writes y [queries, h] and log_sums [queries].
    """
    from jax.experimental import pallas as pl

    (b, t, n, h), dtype = arrays["q"].shape, arrays["q"].dtype
    queries, keys, *_ = FORWARD_TILES

    def body(r):
        q, first = r.q[...], r.first[...][:, None]
        query = (r.i * queries + jnp.arange(queries))[:, None]

        def add_tile(j, carry):
            y, total = carry
            at, key = pl.ds(j * keys, keys), (j * keys + jnp.arange(keys))[None]
            score = times(q, r.k[at, :], transpose=True)
            weights = jnp.where((key >= first) & (key <= query), jnp.exp2(score), 0.0)
            return y + times(weights.astype(dtype), r.v[at, :]), total + jnp.sum(weights, axis=1)

        start = jnp.zeros((queries, h), jnp.float32), jnp.zeros(queries, jnp.float32)
        end = pl.cdiv((r.i + 1) * queries, keys)
        y, total = lax.fori_loop(r.first[0] // keys, end, add_tile, start)
        r.y[...] = (y / total[:, None]).astype(dtype)
        r.log_sums[...] = jnp.log2(total)

    cut, whole = ("q", "first"), ("k", "v")
    outputs = {"y": arrays["q"], "log_sums": jax.ShapeDtypeStruct((b, n, t), jnp.float32)}
    args = body, FORWARD_TILES, queries, arrays, cut, whole, outputs, interpret
    return run_tiles("attend", *args)


def tiles_backward_queries(arrays: dict, interpret: bool):
    """The gradient of q.

    `body` reads q, y_grad [queries, h], first, log_sums and mean [queries] (see tiles_gradients) of
    its block, and k and v [t, h] of the row; it writes q_grad [queries, h].
    """
    from jax.experimental import pallas as pl

    (_, _, _, h), dtype = arrays["q"].shape, arrays["q"].dtype
    queries, keys, *_ = QUERY_TILES

    def body(r):
        q, y_grad, first = r.q[...], r.y_grad[...], r.first[...][:, None]
        log_sums, mean = r.log_sums[...][:, None], r.mean[...][:, None]
        query = (r.i * queries + jnp.arange(queries))[:, None]

        def add_tile(j, q_grad):
            at, key = pl.ds(j * keys, keys), (j * keys + jnp.arange(keys))[None]
            k = r.k[at, :]
            score = times(q, k, transpose=True) - log_sums
            weights = jnp.where((key >= first) & (key <= query), jnp.exp2(score), 0.0)
            grad = weights * (times(y_grad, r.v[at, :], transpose=True) - mean)
            return q_grad + times(grad.astype(dtype), k)

        start = jnp.zeros((queries, h), jnp.float32)
        end = pl.cdiv((r.i + 1) * queries, keys)
        q_grad = lax.fori_loop(r.first[0] // keys, end, add_tile, start)
        r.q_grad[...] = (q_grad * (1 / LOG2E)).astype(dtype)

    cut, whole = ("q", "first", "log_sums", "mean", "y_grad"), ("k", "v")
    outputs = {"q_grad": arrays["q"]}
    args = body, QUERY_TILES, queries, arrays, cut, whole, outputs, interpret
    return run_tiles("attend_backward_queries", *args)["q_grad"]


def tiles_backward_keys(arrays: dict, interpret: bool):
    """The gradients of k and of v; scores stand as [keys, queries].

    `body` reads k, v [keys, h] and last [keys], the last query that can see each key, of its block,
    and q, y_grad [t, h], log_sums and mean [t] of the row; it writes k_grad and v_grad [keys, h].
    """
    from jax.experimental import pallas as pl

    (_, _, _, h), dtype = arrays["k"].shape, arrays["k"].dtype
    queries, keys, *_ = KEY_TILES

    def body(r):
        k, v, last = r.k[...], r.v[...], r.last[...][:, None]
        key = (r.i * keys + jnp.arange(keys))[:, None]

        def add_tile(j, grads):
            k_grad, v_grad = grads
            at, query = pl.ds(j * queries, queries), (j * queries + jnp.arange(queries))[None]
            q, y_grad = r.q[at, :], r.y_grad[at, :]
            score = times(k, q, transpose=True) - r.log_sums[at][None]
            weights = jnp.where((query >= key) & (query <= last), jnp.exp2(score), 0.0)
            v_grad += times(weights.astype(dtype), y_grad)
            grad = weights * (times(v, y_grad, transpose=True) - r.mean[at][None])
            return k_grad + times(grad.astype(dtype), q), v_grad

        zeros = jnp.zeros((keys, h), jnp.float32)
        end = r.last[keys - 1] // queries + 1
        k_grad, v_grad = lax.fori_loop(r.i * keys // queries, end, add_tile, (zeros, zeros))
        r.k_grad[...], r.v_grad[...] = (k_grad * (1 / LOG2E)).astype(dtype), v_grad.astype(dtype)

    cut, whole = ("k", "v", "last"), ("q", "log_sums", "mean", "y_grad")
    outputs = {"k_grad": arrays["k"], "v_grad": arrays["v"]}
    args = body, KEY_TILES, keys, arrays, cut, whole, outputs, interpret
    return tuple(run_tiles("attend_backward_keys", *args).values())


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def tiles_attention(arrays: dict, interpret: bool):
    """attend_triton of q (scaled already), k and v, with the first and last of their reach."""
    return tiles_forward(arrays, interpret)["y"]


def tiles_saves(arrays: dict, interpret: bool):
    """tiles_attention, and what its gradient needs."""
    saved = arrays | tiles_forward(arrays, interpret)
    return saved["y"], saved


def tiles_gradients(interpret: bool, arrays: dict, y_grad):
    """Gradients of q, k and v; `reach` gets none."""
    # What the gradients of all scores of a query have too much: their weighted mean.
    mean = jnp.einsum("btnh,btnh->bnt", arrays["y"], y_grad, preferred_element_type=jnp.float32)
    arrays = arrays | {"mean": mean, "y_grad": y_grad}
    q_grad = tiles_backward_queries(arrays, interpret)
    k_grad, v_grad = tiles_backward_keys(arrays, interpret)
    return ({"q": q_grad, "k": k_grad, "v": v_grad, "first": None, "last": None},)


tiles_attention.defvjp(tiles_saves, tiles_gradients)


def attend_triton(q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale, interpret=False):
    """One kernel forward and two back. `interpret` runs them on a CPU, for tests.

    Needs rows of a multiple of LARGEST_TILE tokens, heads whose width is a power of two, and scores
    up to MAX_SCORE.
    """
    t = segments_bt.shape[1]
    if t % LARGEST_TILE:  # or tokens at the end of a row would silently be left out
        tiles = f"a multiple of {LARGEST_TILE} tokens, not {t}: use kernels=plain"
        raise UserError(f"attend_triton needs rows of {tiles}")
    here = jnp.arange(t, dtype=jnp.int32)[None]
    starts = document_starts(segments_bt)
    stops = t - 1 - document_starts(segments_bt[:, ::-1])[:, ::-1]  # the same from the other end
    arrays = {
        "q": (q_btnh * (scale * LOG2E)).astype(q_btnh.dtype),  # the exponential is 2^x
        "k": k_btnh,
        "v": v_btnh,
        "first": jnp.maximum(starts, here - window),  # key that a query can see
        "last": jnp.minimum(stops, here + window),  # query that can see a key
    }
    return tiles_attention(arrays, interpret)


if __name__ == "__main__":
    sys.exit(main())
