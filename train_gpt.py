"""Train a GPT to a target loss as fast as the hardware allows: pure JAX, one file.

    python train_gpt.py                    # without an accelerator: `tiny`, 3 minutes on a laptop
    python train_gpt.py speedrun           # FineWeb, target 3.28, on v6e-8, 8xH100 or one GPU
    python train_gpt.py speedrun --show    # parameters, stages, tokens, FLOPs; no training

Parameters are a flat dict of arrays, the model is pure functions on it, Adam and Muon are written
out. Read it from top to bottom: nothing below is needed to understand what stands above.

    config, validation    every number of a run, as data
    schedule              stage, rates, loss weights and rotation of each step
    parameters            one table: shape, init, sharding, optimizer
    attention, heads      one contract, four backends; what surrounds them in a layer
    attention kernels     all of a layer's attention in one pass, for TPUs; tiles, for NVIDIA GPUs
    FP8                   matmuls of 8-bit numbers, for NVIDIA GPUs
    model, loss           tokens -> features -> summed cross-entropy
    gradients of tables   what a lookup is, backwards
    optimizers            NorMuon, Adam, and the walk over the table
    steps, compilation    the programs that run on the devices, compiled before the clock starts
    hosts                 several processes as one run
    data, loader          shards -> rows of tokens -> batches on the devices ahead of use
    checkpoint, run log   what a run leaves behind
    sampling, training    text from a checkpoint; the clock and the loop
    benchmark             the steps of each stage, timed without a run
    preflight, command line

Dimension letters, in names (x_btd) and einsums alike: b rows, t time (queries), s time (keys),
d model width, n heads, h head width, f MLP width, v vocabulary, l matrices of a bank, g inputs of
a gate, k targets of a token, r tokens of a batch in one line, c tokens of a chunk of them.
Batches, rows, windows and document lengths are all counted in tokens.

Where to edit: a new size is a preset; a new schedule is rows of Stage; a new parameter is a row of
param_table and its use in forward; a new attention kernel is a function of the contract under
"Attention", named in ATTENTION and HOMES, with its conditions in unfit.

The ideas, most of them from the records of the modded-nanogpt speedrun (Jordan et al. 2024), whose
record 77 the preset `speedrun` is. The last column is by how many million training tokens the
record that brought an idea needed less than the one before it (often with other changes).

    idea                                       where                         record  saved
    Muon: orthogonalized momentum              muon, orthogonalize                4
    ReLU^2, zero-initialized projections,      mlp, bank_rows, attention          5    577
        QK norm
    capped logits; momentum warm-up            cap_logits, muon_momentum          9    722
    long rows, documents apart                 segment_ids, attention backends   12    590
    windows that grow                          Stage.windows                     13     65
    tables of token values                     attention                         14    115
    rotation of half of the dimensions         rope_tables                       17
    long and short windows                     Config.long_layers                20
    rows that start at a document              plan_packed                       26      8
    attention gates from 12 features           projection, attend_heads          28     22
    documents cut at a length                  plan_packed                       29     10
    YaRN when windows grow                     yarn                              31
    smear: a little of the token before        smear                             34
    Polar Express instead of Newton-Schulz     POLAR_EXPRESS                     38      4
    Adam every second step                     split_due                         39     22
    backout: a late output out of the stream   forward                           40     24
    NorMuon: rows equally large                even_rows                         41      4
    up-projections learn twice as fast         bank_rows                         42      8
    cautious decay; on tables too              muon, adam                    43, 50     16
    one gated skip instead of many             forward                           45      5
    batches that grow                          Stage.batch_tokens                46     12
    weights on q, k, v and on o                projection, attention         47, 48
    key offset                                 key_offset                        49     13
    one matrix as embedding and head           apply_updates                     51     14
    slower betas for lone scalars              param_table                       52      9
    multi-token prediction; the embedding      targets_ahead, is_tied            53     21
        and the head part late
    logits 23 sigmoid((z + 5) / 7.5)           cap_logits                        54     10
    gates on values and on the skip            attend_heads, forward             55      9
    paired heads                               pair_heads                        58     17
    table of hashed bigrams                    bigram_ids                        62     43
    five tables of values                      param_table                       63      7
    v and o start like q and k                 bank_rows                         64      5
    documents cut earlier at first; floor .15  Stage.doc_cap, lr_scale           72
    a weight for each branch of a layer        attention, mlp                    73     12
    late attention reads one earlier output    forward                           77      5

Sources beyond it: RoPE (Su et al. 2021), YaRN (Peng et al. 2023), QK norm (Henry et al. 2020),
ReLU^2 (So et al. 2021), value residual (Zhou et al. 2024), Polar Express (Amsel et al. 2025),
NorMuon (Li et al. 2025), cautious updates (Liang et al. 2024), multi-token prediction (Gloeckle et
al. 2024), ZeRO (Rajbhandari et al. 2020).
"""

import argparse
import ast
import bisect
import contextlib
import dataclasses
import errno
import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import lzma
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
import stat
import sys
import tempfile
import threading
import time
import tokenize
import traceback
import types
import typing
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HERE = Path(__file__).resolve().parent
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024  # the llm.c token file format
MERGES = "merges.json"  # beside shards of encoding=bpe and in their runs: merged bytes, in hex
STATE_CUTS = 8  # the training state can be cut into this many equal parts: 1, 2, 4 or 8 devices
BACKENDS = ("auto", "xla", "splash", "cudnn", "triton", "window")  # of attention
ADDERS = ("auto", "scatter", "kernel")  # of the gradients of tables
RECOMPUTE = ("auto", "never", "layers")  # activations on the way back
FP8 = ("none", "head", "mlp", "both")  # which matmuls of training take 8-bit numbers
SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4")  # kinds on which no kernel of ours fits
AXIS = "data"  # the one mesh axis: every device has its own rows
GATE_INPUTS = 12  # features of a token that its gates look at
# What odd text leads to, in a parser or where its values are used.
ODD = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class UserError(Exception):
    """What the user can mend: one line that says what is wrong and what to do. Exit status 2."""


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
    backout: int = 7  # feeds the attention of the layers after it; leaves the stream at the end
    rope_base: float = 1024.0
    attn_scale: float = 0.1  # of q k^T, in the first stage
    logit_cap: tuple[float, float, float] = (23.0, 5.0, 7.5)  # a, b, c of a * sigmoid((z + b) / c)
    compute_dtype: str = "bfloat16"  # of activations and matmuls; masters and loss are float32
    attention: str = "auto"  # auto, xla, splash, cudnn, triton, window
    table_gradients: str = "auto"  # auto, scatter, kernel
    fp8: str = "none"  # none, head, mlp, both: 8-bit matmuls in training, on Ada, Hopper and later
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
    decay_muon: float = 1.2  # times the learning rate once more
    variance_beta: float = 0.95  # of NorMuon's mean square per output
    momentum: tuple[float, float] = (0.85, 0.95)  # Muon: from, to
    momentum_warmup: int = 300  # over this many steps
    momentum_cooldown: int = 50  # and back, over the last steps
    lr_adam: float = 0.008
    decay_adam: float = 0.005  # likewise
    adam_eps: float = 1e-10
    adam_every: int = 2  # steps whose gradients one Adam step sums; a device keeps all of them
    # memory: a device takes up to this many tokens at a time (at least a row), summing gradients
    micro_tokens: int = 0  # 0: as many as fit (see fitted)
    recompute: str = "auto"  # auto, never, layers: on the way back, instead of keeping activations
    loss_chunk: int = 4096  # tokens whose logits exist at once, in compute_dtype
    # validation: the first val_tokens of the validation split, each predicted once
    val_tokens: int = 10_485_760
    val_every: int = 250  # steps; 0: only at the end
    val_batch: int = 2_097_152
    val_row: int = 262_144
    val_windows: tuple[int, int] = (768, 2560)
    target: float = 3.28  # nats per token
    # run
    data: str = "data/fineweb10B"
    devices: int = 0  # 0: all that there are
    prefetch: int = 4  # batches that wait on the devices
    checkpoint_every: int = 0  # steps; 0: only at the end
    checkpoint_seconds: float = 0.0  # also when this time has passed since the last one; 0: never
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

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole run trains on."""
        spans = np.diff(self.boundaries).tolist()
        return sum(n * stage.batch_tokens for n, stage in zip(spans, self.stages, strict=True))


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
# Validation and overrides: a wrong number is refused here, with its name and what would be valid
# ------------------------------------------------------------------------------------------------


def validate(cfg: Config) -> Config:
    """Return `cfg` if a run can be built from it, else raise UserError naming field and value."""

    def need(ok, field, valid):
        if not ok:
            value = functools.reduce(
                lambda obj, key: obj[int(key)] if key.isdigit() else getattr(obj, key),
                field.split("."),
                cfg,
            )
            raise UserError(f"{field}={value!r} is not valid: {valid}")

    for obj, prefix in ((cfg, ""), *((s, f"stages.{i}.") for i, s in enumerate(cfg.stages))):
        for name, kind in typing.get_type_hints(type(obj)).items():
            shown = kind.__name__ if type(kind) is type else kind
            value = getattr(obj, name)
            need(is_a(value, kind), prefix + name, f"it must be {shown}")
            numbers = [x for x in (value if type(value) is tuple else [value]) if type(x) is int]
            need(all(abs(x) < 2**63 for x in numbers), prefix + name, "it must be below 2**63")
    for name, value in dataclasses.asdict(cfg).items():
        need(not isinstance(value, float) or math.isfinite(value), name, "it must be finite")
    for name in (
        *("layers", "width", "heads", "mlp_width", "bigram_rows", "steps", "adam_every"),
        *("loss_chunk", "val_tokens", "val_row", "prefetch", "log_every"),
        *("momentum_warmup", "attn_scale"),
    ):
        need(getattr(cfg, name) > 0, name, "it must be positive")
    for name in (
        *("val_every", "checkpoint_every", "devices", "sample_tokens", "seed", "extension"),
        *("momentum_cooldown", "lr_muon", "lr_adam", "decay_muon", "decay_adam"),
        *("checkpoint_seconds", "micro_tokens"),
    ):
        need(getattr(cfg, name) >= 0, name, "it must not be negative")
    need(re.fullmatch(r"[\w.-]+", cfg.preset), "preset", "letters, digits, '_', '-' and '.'")
    need(cfg.seed < 2**32, "seed", "it must be below 2**32")
    # What is listed at the start, each step and layer, must come to an end.
    need(cfg.steps <= 10**6, "steps", "at most a million")
    need(cfg.layers <= 1000, "layers", "at most 1000")
    need(cfg.width <= 2**16, "width", "at most 65536")
    need(is_name(cfg.data), "data", "no file can have this name")
    need(np.float32(cfg.adam_eps) > 0, "adam_eps", "it must not be 0 in float32")
    need(cfg.rope_base >= 1, "rope_base", "it must be 1 or more")
    cap = "a (0 to 64: its exponentials are summed in float32), b, and c above 0"
    usable = 0 < cfg.logit_cap[0] <= 64 and cfg.logit_cap[2] > 0
    need(usable and all(map(math.isfinite, cfg.logit_cap)), "logit_cap", cap)
    need(cfg.width % cfg.heads == 0, "heads", f"it must divide width={cfg.width}")
    need(cfg.head_width % 4 == 0, "heads", "the head width must be a multiple of 4 (half RoPE)")
    need(cfg.width >= GATE_INPUTS, "width", f"at least {GATE_INPUTS}, which the gates look at")
    for name in ("vocab", "bigram_rows"):
        need(getattr(cfg, name) % STATE_CUTS == 0, name, f"it must be a multiple of {STATE_CUTS}")
    need(0 < cfg.real_tokens <= cfg.vocab, "real_tokens", f"1 to vocab={cfg.vocab}")
    need(cfg.real_tokens <= 2**16, "real_tokens", "shards hold 16-bit ids: at most 65536")
    need(0 <= cfg.bos < cfg.real_tokens, "bos", f"0 to real_tokens-1={cfg.real_tokens - 1}")
    need(cfg.encoding in ("gpt2", "bytes", "bpe"), "encoding", "gpt2, bytes or bpe")
    need(cfg.compute_dtype in ("bfloat16", "float32"), "compute_dtype", "bfloat16 or float32")
    need(cfg.attention in BACKENDS, "attention", ", ".join(BACKENDS))
    need(cfg.table_gradients in ADDERS, "table_gradients", ", ".join(ADDERS))
    need(cfg.recompute in RECOMPUTE, "recompute", ", ".join(RECOMPUTE))
    need(cfg.fp8 in FP8, "fp8", ", ".join(FP8))
    need(0 <= cfg.skip[0] < cfg.skip[1] < cfg.layers, "skip", "an earlier and a later layer")
    need(0 <= cfg.backout < cfg.layers, "backout", "layers are 0..layers-1")
    for name in ("long_layers", "paired_layers", "value_layers"):
        found = getattr(cfg, name)
        attends = f"different ones of the layers that attend: {cfg.attention_layers}"
        need(len({*found} & {*cfg.attention_layers}) == len(found), name, attends)
    need(cfg.value_layers, "value_layers", "at least one layer")
    apart = not {*cfg.long_layers} & {*cfg.paired_layers}
    need(apart, "paired_layers", f"none of long_layers={cfg.long_layers}: those offset their keys")
    need(cfg.heads % 2 == 0 or not cfg.paired_layers, "heads", "it must be even for paired_layers")
    for name in ("cooldown", "lr_floor", "tied", "variance_beta"):
        need(0 <= getattr(cfg, name) <= 1, name, "a share, 0 to 1")
    need(all(0 <= m < 1 for m in cfg.momentum), "momentum", "two numbers in [0, 1)")
    validate_stages(cfg, need)
    need(min(cfg.val_windows) > 0, "val_windows", "two lengths in tokens")
    rows = cfg.val_batch > 0 and cfg.val_batch % cfg.val_row == 0
    need(rows, "val_batch", f"a positive multiple of val_row={cfg.val_row}")
    need(
        cfg.val_tokens % cfg.val_batch == 0,
        "val_tokens",
        f"a multiple of val_batch={cfg.val_batch}",
    )
    return cfg


def validate_stages(cfg: Config, need: Callable):
    """The part of validate that looks at the stages."""
    need(cfg.stages, "stages", "at least one stage")
    need(cfg.extension < cfg.steps, "extension", f"fewer than steps={cfg.steps}")
    shares = [stage.share for stage in cfg.stages]
    scheduled = shares[:-1] if cfg.extension else shares
    whole = "the shares must add up to 1; with an extension, that of the last stage is 0"
    last = "above 0 if and only if the last stage, which it then is, has share=0"
    need((cfg.extension > 0) == (shares[-1] == 0), "extension", last)
    need(scheduled and min(scheduled) > 0 and abs(sum(shares) - 1) < 1e-6, "stages", whole)
    every_stage = (
        f"every stage needs at least one step, and extension={cfg.extension} of them are taken"
    )
    need(min(np.diff(cfg.boundaries)) > 0, "steps", every_stage)
    for i, stage in enumerate(cfg.stages):
        need(0 <= stage.lr_factor < math.inf, f"stages.{i}.lr_factor", "0 or more, finite")
        need(stage.row_tokens > 0, f"stages.{i}.row_tokens", "it must be positive")
        whole = stage.batch_tokens > 0 and stage.batch_tokens % stage.row_tokens == 0
        need(whole, f"stages.{i}.batch_tokens", f"a multiple of row_tokens={stage.row_tokens}")
        need(stage.doc_cap >= 0, f"stages.{i}.doc_cap", "0 (plain rows) or a length in tokens")
        need(min(stage.windows) > 0, f"stages.{i}.windows", "two lengths in tokens")
        for name in ("weights", "weights_end"):
            sizes = all(0 <= w < math.inf for w in getattr(stage, name)), len(stage.weights) > 0
            need(all(sizes), f"stages.{i}.{name}", "at least one number, 0 or more")
        pairs = len(stage.weights) == len(stage.weights_end)
        need(pairs, f"stages.{i}.weights_end", f"as many as weights={stage.weights}")
        ahead = len(stage.weights) <= stage.row_tokens
        need(ahead, f"stages.{i}.weights", f"at most row_tokens={stage.row_tokens} of them")


def parse_value(kind, text: str):
    """`text` read as a value of the annotated type `kind`; raises ValueError when it is not one."""
    if kind is str:
        return text
    if kind in (int, float):
        return kind(text)
    of, *rest = typing.get_args(kind)  # tuple[int, int], tuple[float, float] or tuple[int, ...]
    items = ast.literal_eval(text)
    if not isinstance(items, tuple | list) or not all(type(x) in (int, of) for x in items):
        raise ValueError
    if rest != [...] and len(items) != 1 + len(rest):
        raise ValueError
    return tuple(of(x) for x in items)


def override(cfg, key: str, text: str, prefix: str = ""):
    """`cfg` with field `key` (dotted into stages: stages.1.windows) set to `text`.

    `prefix` is the part of the user's key that led to `cfg`, for the message of a UserError.
    """
    name, _, rest = key.partition(".")
    valid = [field.name for field in dataclasses.fields(cfg)]
    if name not in valid:
        raise UserError(f"unknown key {name!r} in --set; valid keys: {', '.join(valid)}")
    old = getattr(cfg, name)
    if name == "stages":
        index, _, field = rest.partition(".")
        if not field or index not in map(str, range(len(old))):
            raise UserError(
                f"--set {key}={text}: write stages.N.FIELD=VALUE with N below {len(old)}"
            )
        stage = override(old[int(index)], field, text, f"{name}.{index}.")
        return dataclasses.replace(cfg, stages=(*old[: int(index)], stage, *old[int(index) + 1 :]))
    if rest:
        raise UserError(f"--set {key}={text}: {name} has no parts")
    try:
        kind = typing.get_type_hints(type(cfg))[name]
        return dataclasses.replace(cfg, **{name: parse_value(kind, text)})
    except (*ODD, SyntaxError):
        raise UserError(
            f"--set {prefix}{key}={text}: {name} takes a value like {old!r} ({type(old).__name__})"
        ) from None


def is_name(text: str) -> bool:
    """Whether the system can be asked for a file of this name; a config from JSON may say more."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_a(value, kind) -> bool:
    """Whether `value` is of the annotated type `kind`: int, float, str, tuple[...] or a class."""
    if typing.get_origin(kind) is not tuple:
        return type(value) is kind or (kind is float and type(value) is int)
    of, *rest = typing.get_args(kind)
    right_length = rest == [...] or (isinstance(value, tuple) and len(value) == 1 + len(rest))
    return isinstance(value, tuple) and right_length and all(is_a(x, of) for x in value)


def with_tuples(fields: dict) -> dict:
    """JSON has lists where the config has tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def config_from_json(fields: dict) -> Config:
    """The Config written into run.json and checkpoints by dataclasses.asdict."""
    try:
        if missing := {f.name for f in dataclasses.fields(Config)} - set(fields):
            names = ", ".join(sorted(missing))
            raise UserError(f"it lacks {names}: use the one at the head of the run's log.txt")
        stages = [Stage(**with_tuples(stage)) for stage in fields["stages"]]
        return validate(Config(**with_tuples({**fields, "stages": stages})))
    except (KeyError, UserError, *ODD) as error:
        raise UserError(f"the stored config does not fit this train_gpt.py: {error}") from None


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
    """Muon's momentum warms up linearly, since early gradients turn too fast to be averaged for
    long, and cools down at the end, so that the last steps follow the last gradients."""
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


def every(period: int, step: int) -> bool:
    """Whether something with this period (0: never) is due after `step` steps."""
    return period > 0 and step % period == 0


class Hyper(NamedTuple):
    """What changes smoothly from step to step; float32 arrays that travel with a batch."""

    lr: np.ndarray  # factor on every learning rate
    momentum: np.ndarray
    adam_count: np.ndarray  # Adam steps including the next one, for the bias correction
    tied: np.ndarray  # 1: head and embedding are one matrix
    attn_scale: np.ndarray
    freqs: np.ndarray  # [h/4] rotary, radians per token
    weights: np.ndarray  # [k] of the losses; k is that of the stage with the most


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
# Parameters: one table, from which init, state, shardings, checkpoint and listing are mapped
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """A row of the parameter table."""

    shape: tuple[int, ...]
    init: Callable  # (key, shape) -> float32 array
    optimizer: str  # adam or muon
    lr: float
    decay: float = 0.0  # cautious weight decay; times the learning rate once more
    betas: tuple[float, float] = (0.0, 0.0)  # adam
    scale: tuple[float, ...] = ()  # muon: factor on the learning rate of each matrix of the bank
    sharded: bool = True  # cut along axis 0 over the devices; small ones live whole on each
    twin: str = ""  # starts as a copy of this parameter, and is one with it while Hyper.tied
    spare: int = 0  # matrices of a bank that only pad it to a multiple of STATE_CUTS

    @property
    def count(self) -> int:
        """Numbers that the model uses (padding matrices left out)."""
        return math.prod(self.shape) - self.spare * math.prod(self.shape[1:])


def constant(value) -> Callable:
    """An initializer."""
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


def normal(std: float) -> Callable:
    """An initializer."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def uniform(std: float, live: np.ndarray) -> Callable:
    """An initializer for a bank: uniform where `live` (one flag a matrix), else zero."""
    bound = math.sqrt(3) * std

    def init(key, shape):
        values = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        return jnp.where(live[:, None, None], values, 0.0)

    return init


def bank_rows(cfg: Config) -> dict[str, Param]:
    """The rows of param_table that Muon updates.

    Equal-shaped matrices are stacked into banks, so that Muon is one batched call for each shape:
        attn_bank [4 per attention layer, d, d]: q, k, v, o of the first, of the second, ...; x W^T
        mlp_bank [2 layers, f, d]: all up-projections (x W^T), then all down-projections (h W)
    q, k, v are separate matrices of the bank (Muon must not mix their singular values) and one
    matmul in the model (their [out, in] blocks lie one after the other). Banks are padded with zero
    matrices up to a multiple of STATE_CUTS, so that devices own whole matrices.

    An orthogonalized update has unit singular values whatever the shape, so for random inputs the
    change it makes to an output element shrinks as the output grows; sqrt(f / d) makes up for that
    in the up-projections (Jordan et al. 2024). The down-projections get twice as much, found by
    trial (record 48).
    """
    d, f = cfg.width, cfg.mlp_width
    attn, mlp = 4 * len(cfg.attention_layers), 2 * cfg.layers
    spare_attn, spare_mlp = -attn % STATE_CUTS, -mlp % STATE_CUTS
    # Down-projections start at zero: the MLPs begin as the identity.
    starts_attn = np.arange(attn + spare_attn) < attn
    starts_up = np.arange(mlp + spare_mlp) < cfg.layers
    tall = math.sqrt(max(1, f / d))

    def bank(rows, cols, starts, scale, spare):
        return Param(
            (len(starts), rows, cols),
            uniform(0.5 / math.sqrt(d), starts),
            "muon",
            cfg.lr_muon,
            cfg.decay_muon,
            scale=scale,
            spare=spare,
        )

    scale_mlp = (tall,) * cfg.layers + (2 * tall,) * (cfg.layers + spare_mlp)
    return {
        "attn_bank": bank(d, d, starts_attn, (1.0,) * len(starts_attn), spare_attn),
        "mlp_bank": bank(f, d, starts_up, scale_mlp, spare_mlp),
    }


@functools.cache
def param_table(cfg: Config) -> dict[str, Param]:
    """Name -> Param: every parameter, its size, its start and how it learns.

    Tables have one row per token (value_tables: one block of rows for each of its layers). A row
    whose Adam moments are still zero neither moves nor decays, so rare tokens keep their start.
    """
    d, v, n, layers = cfg.width, cfg.vocab, cfg.heads, cfg.layers
    attends, values = len(cfg.attention_layers), len(cfg.value_layers)

    def table(rows, std, lr, decay, betas, twin=""):
        lr, decay = lr * cfg.lr_adam, decay * cfg.decay_adam
        return Param((rows, d), normal(std), "adam", lr, decay, betas, twin=twin)

    def small(shape, start, lr, betas, decay=0.0):
        lr, decay = lr * cfg.lr_adam, decay * cfg.decay_adam
        return Param(shape, constant(start), "adam", lr, decay, betas, sharded=False)

    fast, slow = (0.9, 0.95), (0.9, 0.99)  # betas of mixing weights; of gates and lone scalars
    return {
        #              rows             std    lr  decay  betas
        "head": table(v, 0.005, 1, 150, (0.5, 0.95)),
        "embed": table(v, 0.005, 1, 150, (0.5, 0.95), twin="head"),
        "value_tables": table(values * v, 0.01, 75, 5, (0.75, 0.95)),
        "bigram_table": table(cfg.bigram_rows, 0.0, 75, 5, (0.75, 0.95)),
        **bank_rows(cfg),
        #                     shape                    start  lr  betas
        "attn_gate": small((attends, n, GATE_INPUTS), 0.0, 1, slow, decay=1),
        "value_gate": small((values, n, GATE_INPUTS), 0.0, 1, slow, decay=1),
        "smear_gate": small((1, GATE_INPUTS), 0.0, 0.01, slow),
        "skip_gate": small((1, GATE_INPUTS), 0.0, 0.05, slow),
        "resid_lambdas": small((layers, 2), math.sqrt(1.1), 5, fast),  # attention, MLP
        "post_lambdas": small((layers, 2), 1.0, 1, fast),  # attention, MLP
        "x0_lambdas": small((layers,), 0.0, 1, fast),
        "bigram_lambdas": small((layers,), 0.05, 1, fast),
        "qkv_lambda": small((layers,), 0.5, 5, slow),
        "o_lambda": small((layers,), 1.0, 5, slow),
        "smear_lambda": small((1,), 0.0, 5, slow),
        "backout_lambda": small((1,), 0.5, 5, slow),
        "skip_lambda": small((1,), -1.5, 5, slow),
    }


def partition(param: Param) -> P:
    """How a parameter and its optimizer state lie on the mesh."""
    return P(AXIS) if param.sharded else P()


def map_state(cfg: Config, leaf: Callable) -> dict[str, dict]:
    """The training state as a tree {"params", "first", "second"}: name -> leaf(kind, row).

    first: Adam's mean or Muon's momentum. second: Adam's mean square, or NorMuon's per row of a
    matrix. All float32 and all cut over the devices like the parameter: each device updates its
    share (ZeRO).
    """
    return {
        kind: {name: leaf(kind, row) for name, row in param_table(cfg).items()}
        for kind in ("params", "first", "second")
    }


def state_shape(kind: str, row: Param) -> tuple[int, ...]:
    """Shape of one entry of the training state."""
    return row.shape[:-1] if kind == "second" and row.optimizer == "muon" else row.shape


def abstract_state(cfg: Config, mesh: Mesh):
    """Shapes, dtypes and shardings of the training state; no memory is touched."""
    return map_state(
        cfg,
        lambda kind, row: jax.ShapeDtypeStruct(
            state_shape(kind, row), jnp.float32, sharding=NamedSharding(mesh, partition(row))
        ),
    )


def init_state(cfg: Config, seed):
    """The training state before the first step, the same for every device count.

    `seed` may be traced, so that one compiled program serves for warm-up and for the run.
    """
    key = jax.random.key(seed)
    state = map_state(cfg, lambda kind, row: jnp.zeros(state_shape(kind, row), jnp.float32))
    for name, row in param_table(cfg).items():
        # A key from the name: adding a parameter does not change the others.
        salt = int.from_bytes(hashlib.sha256((row.twin or name).encode()).digest()[:4], "little")
        state["params"][name] = row.init(jax.random.fold_in(key, salt), row.shape)
    return state


# ------------------------------------------------------------------------------------------------
# Attention: one contract, four backends
# ------------------------------------------------------------------------------------------------
# (q_btnh, k_btnh, v_btnh, segments_bt, window, scale) -> o_btnh. Token t attends to itself and to
# the `window` tokens before it that have its segment id. `window` is static, `scale` may be traced.


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


SCORE_BYTES = 2**30  # of float32 scores that attend_xla has at once


def attend_xla(q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale):
    """The reference, for any hardware: the scores of a band, softmax in float32.

    Blocks are taken together up to SCORE_BYTES of scores; beyond that, groups of them one after the
    other, whose scores are formed again in the backward pass.
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


def document_starts(segments_bt):
    """The place in its row where the document of each token begins, int32 [b, t]."""
    begins = jnp.pad(segments_bt[:, 1:] != segments_bt[:, :-1], ((0, 0), (1, 0)))
    here = jnp.arange(segments_bt.shape[1], dtype=jnp.int32)[None]
    return lax.cummax(jnp.where(begins, here, 0), axis=1)


@functools.cache
def splash_mask(t: int, n: int, window: int):
    """The mask of attend_splash; equal masks are one object, which splash works through once."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class Window(masks.LocalMask):
        """splash asks for all (t / 512)^2 blocks: one of a single value is answered by one number.

        That takes 0.4 s instead of 14 s at 16,384 tokens, and makes rows of 524,288 possible.
        """

        def __getitem__(self, blocks):
            rows, cols = blocks
            nearest, furthest = rows.start - cols.stop + 1, rows.stop - 1 - cols.start
            if furthest < 0 or nearest > window:
                return np.zeros((1, 1), bool)
            if nearest >= 0 and furthest <= window:
                return np.ones((1, 1), bool)
            return super().__getitem__(blocks)

    return masks.MultiHeadMask([Window((t, t), (window, 0), 0)] * n)


def attend_splash(q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale, interpret=False):
    """The TPU kernel that ships with jax: tiles outside the window cost nothing.

    Tiles of 512 and a separate dq kernel: the fused backward writes one partial dq per tile of
    keys, which costs more than it saves. `interpret` runs the kernel on a CPU, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    t, n = q_btnh.shape[1:3]
    if t % 128:
        words = f"rows of a multiple of 128 tokens, not {t}: use attention=auto"
        raise UserError(f"attention=splash needs {words}")
    tile = math.gcd(t, 512)
    sizes = kernel.BlockSizes(
        block_q=tile, block_kv=tile, block_kv_compute=tile,
        block_q_dkv=tile, block_kv_dkv=tile, block_kv_dkv_compute=tile,
        block_q_dq=tile, block_kv_dq=tile,
    )  # fmt: skip
    mask = splash_mask(t, n, min(window, t))
    attend = kernel.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
    q_btnh = (q_btnh * scale).astype(q_btnh.dtype)  # the kernel itself does not scale
    q_bnth, k_bnth, v_bnth = (x.swapaxes(1, 2) for x in (q_btnh, k_btnh, v_btnh))
    segments = kernel.SegmentIds(q=segments_bt, kv=segments_bt)
    return jax.vmap(attend)(q_bnth, k_bnth, v_bnth, segments).swapaxes(1, 2)


def attend_cudnn(q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale):
    """The NVIDIA kernel. It has no segment ids: windows and documents enter as the band's mask.

    One dense mask for a row of 49,152 tokens would take 2.4 GB; that of the band takes 75 MB at a
    window of 640 (2.1 GB in the validation, at 262,144 and 2560), and the kernel computes nothing
    outside the band.
    """
    if q_btnh.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(
            f"attention=cudnn takes 16-bit inputs, not {q_btnh.dtype}: use compute_dtype=bfloat16"
        )
    q_btnh = (q_btnh * scale).astype(q_btnh.dtype)  # the kernel's own scale is static
    q, k, v, mask = band(q_btnh, k_btnh, v_btnh, segments_bt, window)
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=1.0, implementation="cudnn")
    return out.reshape(q_btnh.shape)


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

        A TPU kernel reads whole tiles of 128 columns.
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
    attend: Callable, heads: Heads, proj_btp, values_btd, look_btg, segments_bt, freqs, scale
):
    """QK norm, rotation, values, attention and gates of one layer: [b, t, d] of all its heads.

    `proj_btp` holds side by side q, k, v [d] and the logits of the gates [heads.gates]: first one
    of each head's output, then one of each head's value rows. `values_btd`, the tokens' rows of the
    layer's value table, are added to v by that second gate; `look_btg` (or None) is added to the
    logits. This is the plain form, for any of the backends above; attend_window does all of it in
    one kernel.
    """
    b, t, _ = proj_btp.shape
    n, h = heads.count, heads.width
    q, k, v = (proj_btp[..., i * n * h : (i + 1) * n * h].reshape(b, t, n, h) for i in range(3))
    logits_btg = proj_btp[..., 3 * n * h :].astype(jnp.float32)
    if look_btg is not None:
        logits_btg += look_btg
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
# The attention kernel for TPUs
# ------------------------------------------------------------------------------------------------
# One pass over a row each way, in blocks of 256 tokens. The heads of a block lie side by side as
# the projection left them, [t, n h] and never [n, t, h]: what costs most around splash is not
# attention but turning arrays round, and QK norm and rotation as passes of their own. Here they are
# done once for each block, and the turned keys and the values of the blocks that the window can
# reach wait in a ring in VMEM (3 MiB at a window of 640; 14 in the backward pass, with their
# gradients). Scores are kept as [keys, queries], so that what there is one of for each query (sum,
# gate, start of the document) is a row, and costs nothing to broadcast. QK norm bounds the scores:
# no running maximum. Blocks that hold no visible key are skipped; --preflight counts them.
# Predicted for 49,152 tokens and six heads of 128, both ways, in million cycles (of 571 us): 4.8 at
# a window of 640, 6.1 with paired heads, 7.9 at 1408, and 4.3 for what stands around the kernel,
# projections included. With splash the kernels took 21 on average, and what stood around them 27.

LOG2E = math.log2(math.e)  # the hardware's exponential is 2^x: queries are scaled by this as well
ONES = 16  # rows of ones under the values: with them one matmul also sums the weights
# Bound on scale * head width, and so on scores after QK norm, before the key offset (sqrt 2 more):
# the sum of 4096 exponentials of them stays within float32.
MAX_SCORE = 48.0
KERNEL_VMEM = 100 * 2**20  # bytes that a kernel may use of the 128 MiB


def run_kernel(name: str, body, grid, scalars, inputs, outputs, scratch, interpret: bool):
    """pl.pallas_call by name: `body` gets one object with a reference for every name.

    Its `row` and `i` are the place in the grid, which runs through all i of a row before the next.

    inputs: name -> (array, block shape, index map); outputs: name -> (shape with dtype, block
    shape, index map); scratch in VMEM: name -> (shape, dtype). An input or output that is None is
    left out, and None for the body. `scalars`, name -> array, are there before the first block.
    Returns {name: output}.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    absent = {key: None for key, x in (inputs | outputs).items() if x[0] is None}
    given, outputs = (
        {key: x for key, x in entries.items() if key not in absent} for entries in (inputs, outputs)
    )
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


def turn(x, cos, sin):
    """QK norm and rotation of one head [t, h]: rope(norm(x)), float32."""
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(means(wide * wide, x.dtype) + 2.0**-23)
    return (wide * cos + swap_halves(wide) * sin) * size


def turn_back(grad, x, cos, sin):
    """The gradient of `x` from that of turn(x)."""
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(means(wide * wide, x.dtype) + 2.0**-23)
    grad, wide = grad * cos + swap_halves(grad * sin), wide * size
    return (grad - wide * means(grad * wide, x.dtype)) * size


def still(plan: Plan):
    """Which columns of a head do not rotate, bool [1, h]."""
    h = plan.heads.width
    return lax.rem(lax.broadcasted_iota(jnp.int32, (1, h), 1), h // 2) >= h // 4


def turned_key(plan: Plan, r, c: int):
    """The keys of head c in the current block, with the offset; r.last keeps their last row."""
    from jax.experimental.pallas import tpu as pltpu

    k = turn(r.k[0, :, plan.lanes(c)], *cos_and_sin(plan, r.tables, c))
    if not plan.heads.offset:
        return k
    before = jnp.where(r.i == 0, k[:1], r.last[:1, plan.lanes(c)])
    r.last[:1, plan.lanes(c)] = k[-1:]
    row = lax.broadcasted_iota(jnp.int32, k.shape, 0)
    return jnp.where(still(plan), jnp.where(row == 0, before, pltpu.roll(k, 1, 0)), k)


def gate_values(logits, look):
    """All gates of a block, float32 [t, g]."""
    logits = logits[0].astype(jnp.float32)
    return jax.nn.sigmoid(logits if look is None else logits + look[0].astype(jnp.float32))


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
    """Inputs of run_kernel from the arrays of a layer; grid step i reads their block at(i)."""
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
        "look": tokens(arrays["look"], g),
        "tables": (
            arrays["tables"], (block, arrays["tables"].shape[1]), lambda b, i, *_: (at(i), 0)
        ),
    }  # fmt: skip


def window_forward(plan: Plan, arrays: dict, save: bool) -> dict:
    """y [b, t, d]; one grid step a block.

    To `save` for the backward pass: log2 of the softmax sums [b, n rounded up, t], and queries,
    keys and (with a value table) values as they met, [b, t, d] each: turning them again would take
    2,700 bundles a block, of 11,000.
    """
    from jax.experimental import pallas as pl

    n, h, block, slots = plan.heads.count, plan.heads.width, plan.block, plan.slots
    (b, t, _), dtype = arrays["proj"].shape, arrays["proj"].dtype

    def body(r):
        i = r.i
        slot = lax.rem(i, slots)
        gates = gate_values(r.logits, r.look)
        first = first_keys(plan, i, r.starts[0])
        for c in range(n):
            lanes = plan.lanes(c)
            k = turned_key(plan, r, c).astype(dtype)
            q = turn(r.q[0, :, lanes], *cos_and_sin(plan, r.tables, c))
            v = gated_value(plan, r, gates, c)
            r.keys[slot, :, lanes] = k
            r.queries[:, lanes] = (q * (r.scale[0] * LOG2E)).astype(dtype)
            r.turned_values[slot, c, :h] = v.T.astype(dtype)
            r.turned_values[slot, c, h:] = jnp.ones((ONES, block), dtype)
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
                weighted = times(r.turned_values[at, o, :, keys], weights)
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

    high = -(-n // 8) * 8
    inputs = window_inputs(plan, arrays, lambda i: i)
    inputs["starts"] = (arrays["starts"][:, None], (1, 1, block), lambda b, i, *_: (b, 0, i))
    rows = jax.ShapeDtypeStruct((b, t, n * h), dtype)
    sums = jax.ShapeDtypeStruct((b, high, t), jnp.float32)
    whole, across = (1, block, n * h), lambda b, i, *_: (b, i, 0)
    outputs = {
        "y": (rows, whole, across),
        "saved_q": (rows if save else None, whole, across),
        "saved_k": (rows if save else None, whole, across),
        "saved_v": (rows if save and arrays["values"] is not None else None, whole, across),
        "log_sums": (sums if save else None, (1, high, block), lambda b, i, *_: (b, 0, i)),
    }
    scratch = {
        "keys": ((slots, block, n * h), dtype),
        "turned_values": ((slots, n, h + ONES, block), dtype),
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
    first row of the next block is needed too, one step later.
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
            q_grad = times(r.turned_keys[at, k_lanes, keys], grad)
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
        gates = gate_values(r.logits, r.look).T
        first = first_keys(plan, r.i, r.starts[0])
        r.keys[slot], r.all_values[slot] = r.saved_k[0], r.saved_v[0]
        shift, mean = [], []  # log2 of gate / softmax sum; what every score gradient has too much
        for c in range(n):
            lanes = plan.lanes(c)
            r.turned_keys[slot, lanes] = r.saved_k[0, :, lanes].T
            product = r.y[0, :, lanes].astype(jnp.float32) * r.y_grad[0, :, lanes].astype(
                jnp.float32
            )
            total, gate = jnp.sum(product.T, axis=0, keepdims=True), gates[c : c + 1]
            r.gate_grads[slot, c : c + 1] = total * (1 - gate)
            gate = jnp.maximum(gate, 1e-20)
            shift.append(jnp.log2(gate) - r.log_sums[0, c : c + 1])
            mean.append(total / gate)

        look_back(r, 0, first, shift, mean)
        for j in range(1, slots):
            meet = functools.partial(look_back, r, j, first, shift, mean)
            pl.when((r.i - j >= r.earliest[r.row, now(r.i)]) & (r.i < blocks))(meet)

        # What the first blocks that leave write is overwritten by block 0, which comes after them.
        # The last steps have no block i: they repeat the last one, into a slot that nothing reads.
        past = lax.rem(r.i + 1, ring)  # the slot of block i - delay
        gates = None if r.old_values is None else gate_values(r.old_logits, r.old_look)
        gate_grads = jnp.concatenate([r.gate_grads[past, :n], jnp.zeros((g - n, block))]).T
        for c in range(n):
            gate_grads = head_leaves(r, c, r.i - delay, past, gates, gate_grads)
        r.grads[0, :, 3 * d :] = gate_grads.astype(dtype)

    def head_leaves(r, c: int, old, past, gates, gate_grads):
        """Columns of head c in the gradients of block `old`; returns gate_grads with its column."""
        lanes, rotation = plan.lanes(c), cos_and_sin(plan, r.old_tables, c)
        grad = turn_back(r.q_grads[past, lanes].T * r.scale[0], r.old_q[0, :, lanes], *rotation)
        r.grads[0, :, lanes] = grad.astype(dtype)
        grad = r.k_grads[past, :, lanes] * (1 / LOG2E)
        if plan.heads.offset:
            row = lax.broadcasted_iota(jnp.int32, (block, h), 0)
            after = r.k_grads[lax.rem(past + 1, ring), :1, lanes] * (1 / LOG2E)
            after = jnp.where(old + 1 < blocks, after, 0.0)
            moved = jnp.where(row == block - 1, after, pltpu.roll(grad, block - 1, 0))
            moved += jnp.where((row == 0) & (old == 0), grad, 0.0)  # the first kept its own
            grad = jnp.where(still(plan), moved, grad)
        grad = turn_back(grad, r.old_k[0, :, lanes], *rotation)
        r.grads[0, :, plan.lanes(n + c)] = grad.astype(dtype)
        grad = r.v_grads[past, :, lanes]
        r.grads[0, :, plan.lanes(2 * n + c)] = grad.astype(dtype)
        if r.old_values is None:
            return gate_grads
        gate = gates[:, n + c : n + c + 1]
        r.value_grads[0, :, lanes] = (2 * gate * grad).astype(dtype)
        product = grad * r.old_values[0, :, lanes].astype(jnp.float32)
        total = jnp.sum(product, axis=1, keepdims=True)
        column = lax.broadcasted_iota(jnp.int32, (block, g), 1)
        return jnp.where(column == n + c, 2 * total * gate * (1 - gate), gate_grads)

    def now(i):
        return jnp.minimum(i, blocks - 1)

    def then(i):
        return jnp.maximum(i - delay, 0)

    def rows(array):
        return array, (1, array.shape[1], block), lambda b, i, *_: (b, 0, now(i))

    current, old = (window_inputs(plan, arrays, at) for at in (now, then))
    inputs = {name: current[name] for name in ("logits", "look")}
    inputs |= {f"old_{name}": old[name] for name in old if name != "v"}
    values, v_column = arrays["values"], 0
    if values is None:
        saved, v_column = saved | {"saved_v": arrays["proj"]}, 2
    for name, array in (saved | {"y_grad": y_grad}).items():
        column = v_column if name == "saved_v" else 0
        inputs[name] = array, (1, block, d), lambda b, i, *_, column=column: (b, now(i), column)
    inputs |= {"log_sums": rows(saved["log_sums"]), "starts": rows(arrays["starts"][:, None])}
    outputs = {
        "grads": (arrays["proj"], (1, block, width), lambda b, i, *_: (b, then(i), 0)),
        "value_grads": (values, (1, block, d), lambda b, i, *_: (b, then(i), 0)),
    }
    scratch = {
        **{name: ((ring, block, d), dtype) for name in ("keys", "all_values")},
        **{name: ((ring, block, d), jnp.float32) for name in ("k_grads", "v_grads")},
        "turned_keys": ((ring, d, block), dtype),
        "q_grads": ((ring, d, block), jnp.float32),
        "gate_grads": ((ring, saved["log_sums"].shape[1], block), jnp.float32),
    }
    scalars = {name: arrays[name] for name in ("earliest", "scale")}
    grid = b, blocks + delay
    name = plan.name("backward", values)
    out = run_kernel(name, body, grid, scalars, inputs, outputs, scratch, plan.interpret)
    return out["grads"], out.get("value_grads")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def window_attention(plan: Plan, proj, values, look, others: dict):
    """attend_window on what it has prepared in `others`."""
    arrays = {"proj": proj, "values": values, "look": look, **others}
    return window_forward(plan, arrays, save=False)["y"]


def window_saves(plan: Plan, proj, values, look, others: dict):
    """window_attention, and what its gradient needs."""
    arrays = {"proj": proj, "values": values, "look": look, **others}
    saved = window_forward(plan, arrays, save=True)
    return saved["y"], (arrays, saved)


def window_gradients(plan: Plan, kept, y_grad):
    """Gradients of proj, values and look; `others` get none."""
    proj, values = window_backward(plan, *kept, y_grad)
    look = None if kept[0]["look"] is None else proj[..., -plan.heads.gates :]
    return proj, values, look, None


window_attention.defvjp(window_saves, window_gradients)


def attend_window(
    heads: Heads, proj_btp, values_btd, look_btg, segments_bt, freqs, scale, interpret=False
):
    """attend_heads in one TPU kernel each way: same arguments, same result up to rounding.

    Needs heads of a multiple of 128 and rows of a multiple of 128 tokens. No gradients of `freqs`
    and `scale`. `interpret` runs the kernel on a CPU, for tests.
    """
    b, t = segments_bt.shape
    reachable = min(heads.window, 2 * t if heads.paired else t)
    plan = Plan(dataclasses.replace(heads, window=reachable), math.gcd(t, 256), interpret)
    if heads.width % 128 or plan.block % 128:
        raise UserError(
            f"attention=window needs heads and rows of a multiple of 128, not heads of "
            f"{heads.width} and rows of {t}: use attention=auto"
        )
    starts = document_starts(segments_bt)
    cos, sin = (x.swapaxes(0, 1) for x in rope_tables(freqs, positions(t, heads)))
    tables = [x for c, s in zip(cos, sin, strict=True) for x in (c, c, s, -s)]
    others = {
        "starts": starts,
        "earliest": starts[:, :: plan.block] // plan.block,
        "tables": jnp.concatenate(tables, axis=1).astype(proj_btp.dtype),
        "scale": jnp.reshape(scale, 1).astype(jnp.float32),
    }
    others = jax.tree.map(lax.stop_gradient, others)
    return window_attention(plan, proj_btp, values_btd, look_btg, others)


# ------------------------------------------------------------------------------------------------
# Attention kernels for NVIDIA GPUs
# ------------------------------------------------------------------------------------------------
# One kernel takes a block of queries of one head through the keys that any of them can see, tile by
# tile (FlashAttention, Dao et al. 2022); two more go back, one with a block of queries through its
# keys, and one with a block of keys through its queries. Windows and documents only move on along
# a row, so what a block can see is one stretch of the row: tiles outside cost nothing, and no list
# of documents is needed. QK norm bounds the scores: no running maximum. Written with Pallas for
# Triton, which finds the tensor core instructions and loads tiles ahead of their use. (jax 0.11
# calls this way into Triton deprecated, for Mosaic GPU, which cannot be interpreted on a CPU. cuDNN
# knows documents only as a batch of a fixed number of sequences, through a private function of jax;
# attend_cudnn, for where this cannot run, gives it a mask.)


class Tiles(NamedTuple):
    """How a kernel cuts its work; tokens are powers of two that divide LARGEST_TILE."""

    queries: int
    keys: int
    warps: int
    stages: int  # tiles that are on their way at once


LARGEST_TILE = 128
# Heads of 128 on an H100: 150, 160 and 234 registers a thread, none spilled; 128 KiB of shared
# memory. Not yet timed: tests/tile_times.py has others.
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
    """y [b, t, n, h] and log_sums, log2 of the softmax sums [b, n, t]."""
    from jax.experimental import pallas as pl

    (b, t, n, h), dtype = arrays["q"].shape, arrays["q"].dtype
    queries, keys, *_ = FORWARD_TILES

    def body(r):
        q, first = r.q[...], r.first[...][:, None]
        query = (r.i * queries + jnp.arange(queries))[:, None]

        def meet(j, carry):
            y, total = carry
            at, key = pl.ds(j * keys, keys), (j * keys + jnp.arange(keys))[None]
            score = times(q, r.k[at, :], transpose=True)
            weights = jnp.where((key >= first) & (key <= query), jnp.exp2(score), 0.0)
            return y + times(weights.astype(dtype), r.v[at, :]), total + jnp.sum(weights, axis=1)

        start = jnp.zeros((queries, h), jnp.float32), jnp.zeros(queries, jnp.float32)
        end = pl.cdiv((r.i + 1) * queries, keys)
        y, total = lax.fori_loop(r.first[0] // keys, end, meet, start)
        r.y[...] = (y / total[:, None]).astype(dtype)
        r.log_sums[...] = jnp.log2(total)

    cut, whole = ("q", "first"), ("k", "v")
    outputs = {"y": arrays["q"], "log_sums": jax.ShapeDtypeStruct((b, n, t), jnp.float32)}
    args = body, FORWARD_TILES, queries, arrays, cut, whole, outputs, interpret
    return run_tiles("attend", *args)


def tiles_backward_queries(arrays: dict, interpret: bool):
    """The gradient of q."""
    from jax.experimental import pallas as pl

    (_, _, _, h), dtype = arrays["q"].shape, arrays["q"].dtype
    queries, keys, *_ = QUERY_TILES

    def body(r):
        q, y_grad, first = r.q[...], r.y_grad[...], r.first[...][:, None]
        log_sums, mean = r.log_sums[...][:, None], r.mean[...][:, None]
        query = (r.i * queries + jnp.arange(queries))[:, None]

        def meet(j, q_grad):
            at, key = pl.ds(j * keys, keys), (j * keys + jnp.arange(keys))[None]
            k = r.k[at, :]
            score = times(q, k, transpose=True) - log_sums
            weights = jnp.where((key >= first) & (key <= query), jnp.exp2(score), 0.0)
            grad = weights * (times(y_grad, r.v[at, :], transpose=True) - mean)
            return q_grad + times(grad.astype(dtype), k)

        start = jnp.zeros((queries, h), jnp.float32)
        end = pl.cdiv((r.i + 1) * queries, keys)
        q_grad = lax.fori_loop(r.first[0] // keys, end, meet, start)
        r.q_grad[...] = (q_grad * (1 / LOG2E)).astype(dtype)

    cut, whole = ("q", "first", "log_sums", "mean", "y_grad"), ("k", "v")
    outputs = {"q_grad": arrays["q"]}
    args = body, QUERY_TILES, queries, arrays, cut, whole, outputs, interpret
    return run_tiles("attend_backward_queries", *args)["q_grad"]


def tiles_backward_keys(arrays: dict, interpret: bool):
    """The gradients of k and of v; scores stand as [keys, queries]."""
    from jax.experimental import pallas as pl

    (_, _, _, h), dtype = arrays["k"].shape, arrays["k"].dtype
    queries, keys, *_ = KEY_TILES

    def body(r):
        k, v, last = r.k[...], r.v[...], r.last[...][:, None]
        key = (r.i * keys + jnp.arange(keys))[:, None]

        def meet(j, grads):
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
        k_grad, v_grad = lax.fori_loop(r.i * keys // queries, end, meet, (zeros, zeros))
        r.k_grad[...], r.v_grad[...] = (k_grad * (1 / LOG2E)).astype(dtype), v_grad.astype(dtype)

    cut, whole = ("k", "v", "last"), ("q", "log_sums", "mean", "y_grad")
    outputs = {"k_grad": arrays["k"], "v_grad": arrays["v"]}
    args = body, KEY_TILES, keys, arrays, cut, whole, outputs, interpret
    return tuple(run_tiles("attend_backward_keys", *args).values())


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def tiles_attention(q_btnh, k_btnh, v_btnh, reach: dict, interpret: bool):
    """attend_triton of queries that are scaled already."""
    arrays = {"q": q_btnh, "k": k_btnh, "v": v_btnh, **reach}
    return tiles_forward(arrays, interpret)["y"]


def tiles_saves(q_btnh, k_btnh, v_btnh, reach: dict, interpret: bool):
    """tiles_attention, and what its gradient needs."""
    arrays = {"q": q_btnh, "k": k_btnh, "v": v_btnh, **reach}
    arrays |= tiles_forward(arrays, interpret)
    return arrays["y"], arrays


def tiles_gradients(interpret: bool, arrays: dict, y_grad):
    """Gradients of q, k and v; `reach` gets none."""
    # What the gradients of all scores of a query have too much: their weighted mean.
    mean = jnp.einsum("btnh,btnh->bnt", arrays["y"], y_grad, preferred_element_type=jnp.float32)
    arrays = arrays | {"mean": mean, "y_grad": y_grad}
    q_grad = tiles_backward_queries(arrays, interpret)
    k_grad, v_grad = tiles_backward_keys(arrays, interpret)
    return q_grad, k_grad, v_grad, None


tiles_attention.defvjp(tiles_saves, tiles_gradients)


def attend_triton(q_btnh, k_btnh, v_btnh, segments_bt, window: int, scale, interpret=False):
    """One kernel forward and two back. `interpret` runs them on a CPU, for tests.

    Needs rows of a multiple of LARGEST_TILE tokens, heads whose width is a power of two, and scores
    up to MAX_SCORE.
    """
    t = segments_bt.shape[1]
    if t % LARGEST_TILE:
        raise UserError(
            f"attention=triton needs rows of a multiple of {LARGEST_TILE} tokens, not {t}: "
            "use attention=auto"
        )
    here = jnp.arange(t, dtype=jnp.int32)[None]
    starts = document_starts(segments_bt)
    stops = t - 1 - document_starts(segments_bt[:, ::-1])[:, ::-1]  # the same from the other end
    reach = {
        "first": jnp.maximum(starts, here - window),  # key that a query can see
        "last": jnp.minimum(stops, here + window),  # query that can see a key
    }
    q_btnh = (q_btnh * (scale * LOG2E)).astype(q_btnh.dtype)  # the exponential is 2^x
    return tiles_attention(q_btnh, k_btnh, v_btnh, reach, interpret)


# ------------------------------------------------------------------------------------------------
# The choice of attention
# ------------------------------------------------------------------------------------------------

ATTENTION = {
    "xla": functools.partial(attend_heads, attend_xla),
    "splash": functools.partial(attend_heads, attend_splash),
    "cudnn": functools.partial(attend_heads, attend_cudnn),
    "triton": functools.partial(attend_heads, attend_triton),
    "window": attend_window,
}


class Home(NamedTuple):
    """Where a backend runs (None: everywhere), and what a log says of it."""

    platform: str | None
    about: str


HOMES = {  # in the order in which `auto` tries them
    "window": Home("tpu", "the kernel for TPUs in this file"),
    "splash": Home("tpu", "the kernel that ships with jax"),
    "triton": Home("gpu", "the kernels for NVIDIA GPUs in this file"),
    "cudnn": Home("gpu", "the fused kernel for NVIDIA GPUs; documents as a mask of the band"),
    "xla": Home(None, "the reference"),
}


def too_sharp(cfg: Config) -> str | None:
    """Why kernels without a running maximum cannot serve this run, or None."""
    score = max(yarn(cfg, stage)[1] for stage in range(len(cfg.stages))) * cfg.head_width
    if score > MAX_SCORE:
        return f"scores up to {score:.0f} could overflow without a running maximum"
    return None


def unfit(cfg: Config, backend: str, capability: float, kind: str) -> str | None:
    """Why a backend cannot serve this run on devices of its home, or None; see pick_attention."""
    rows = [*(stage.row_tokens for stage in cfg.stages), cfg.val_row]
    odd = next(
        (f"tiles of 128 tokens do not fill rows of {row}" for row in rows if row % 128), None
    )
    if backend == "splash":
        return odd
    if backend == "window":
        if cfg.head_width % 128:
            return f"tiles of 128 do not fill heads {cfg.head_width} wide"
        if odd:
            return odd
        window = max(max(stage.windows) for stage in cfg.stages)
        plan = Plan(Heads(cfg.heads, cfg.head_width, min(window, max(rows)), offset=True), 256)
        if plan.ring_bytes(cfg.dtype) > KERNEL_VMEM * 0.7 or kind in SMALL_VMEM:
            return f"a window of {window} of width {cfg.width} does not fit the VMEM of a {kind}"
        return too_sharp(cfg)
    if backend == "triton":
        if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
            return f"jax {jax.__version__} has no Triton any more"
        if cfg.dtype != jnp.bfloat16:
            return f"it computes in bfloat16, not in {cfg.compute_dtype}"
        if capability < 8.0:
            return f"compute capability {capability} is below 8.0"
        if cfg.head_width not in (16, 32, 64, 128):
            return f"tiles do not fit heads {cfg.head_width} wide"
        return odd or too_sharp(cfg)
    if backend == "cudnn":
        narrow = cfg.head_width <= (256 if capability >= 9.0 else 128)
        if not (narrow and cfg.dtype == jnp.bfloat16 and capability >= 8.0):
            heads = f"heads of {cfg.head_width} in {cfg.compute_dtype}"
            return f"it takes no {heads} on a GPU of compute capability {capability}"
    return None


def pick_attention(
    cfg: Config, platform_: str, capability: float = 9.0, kind: str = "TPU v6 lite"
) -> tuple[str, str]:
    """(backend, reason) for the devices' platform; UserError if the asked one cannot run there.

    `capability` is that of an NVIDIA GPU: before Ampere (8.0) there is no fused attention, and
    before Hopper (9.0) cuDNN takes heads up to 128 wide. `kind` is that of a TPU: those before v5
    have too little VMEM for our kernel.
    """
    asked, passed = cfg.attention, []
    if asked != "auto":
        if (home := HOMES[asked].platform) not in (None, platform_):
            where = f"on a {home}, not on a {platform_}"
            raise UserError(f"attention={asked} runs {where}: use attention=auto or xla")
        if reason := unfit(cfg, asked, capability, kind):
            raise UserError(f"attention={asked} cannot run: {reason}: use attention=auto")
        return asked, "asked for"
    for backend in (name for name, home in HOMES.items() if home.platform in (None, platform_)):
        if (reason := unfit(cfg, backend, capability, kind)) is None:
            break
        passed.append(f"; not {backend}: {reason}")
    return backend, HOMES[backend].about + "".join(passed)


def capability_of(device) -> float:
    """The CUDA compute capability of a GPU; 0 of others (an AMD GPU has a name there)."""
    with contextlib.suppress(ValueError):
        return float(getattr(device, "compute_capability", 0))
    return 0.0


def attention_on(cfg: Config, device) -> tuple[str, str]:
    """pick_attention for one of the run's devices."""
    return pick_attention(cfg, device.platform, capability_of(device), device.device_kind)


# ------------------------------------------------------------------------------------------------
# FP8: matmuls of 8-bit numbers, for NVIDIA GPUs since Ada and Hopper
# ------------------------------------------------------------------------------------------------
# There they have twice the peak of bfloat16. The formats are the usual ones (Micikevicius et al.
# 2022): E4M3 for activations and weights, E5M2, with more range, for gradients. An array has one
# scale, a power of two, for which its largest number just fits. No history of scales: where no
# bound is known beforehand, the largest number of the array itself is looked up.
#
# A product with a power of two is exact, so the scales can stand behind the matmul. There they do
# not hide the 8-bit operands from XLA. In front of it (convert, scale, dot: what XLA turns into
# cuBLASLt's FP8 if xla_gpu_enable_triton_gemm is off) the compiler of jax 0.10.2 makes a bfloat16
# matmul in Triton of it, with operands that are never rounded to 8 bits where a scale is computed.
#
# What is not differentiated (validation, samples) is computed in the compute dtype: custom_vjp
# takes FP8 only where there is a gradient, as the head of the original does. So the losses of
# validation do not have the rounding in them: for equal parameters they are those of fp8=none.

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2  # up to 448 and 57,344; 2^-4 and 2^-3 off


class Scaled(NamedTuple):
    """An array rounded to 8 bits: values * scale."""

    values: jax.Array
    scale: jax.Array  # float32, a power of two; NaN if the array was not finite


def round_fp8(x, kind, bound=None) -> Scaled:
    """`x` in the 8-bit format `kind`; no number may be above `bound` (default: the largest of x).

    What is not finite in x must stay so in the products, but hardware may convert infinity to
    the largest number of the format. So then the scale is NaN. All zeros have a scale too.
    """
    bound = jnp.max(jnp.abs(x)) if bound is None else bound
    bound = jnp.maximum(jnp.asarray(bound, jnp.float32), 2.0**-100)
    # The next power of two, from the bits: exp2(ceil(log2)) is not exact on every device.
    bits = lax.bitcast_convert_type(bound / float(jnp.finfo(kind).max), jnp.int32)
    scale = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    scale = jnp.where(jnp.isfinite(bound), scale, jnp.nan)
    return Scaled((x * (1 / scale).astype(x.dtype)).astype(kind), scale)


def multiply_fp8(a: Scaled, b: Scaled, axes: tuple[int, int], dtype):
    """Matrices `a` and `b` multiplied over these axes of theirs, in `dtype`."""
    over = (axes[:1], axes[1:]), ((), ())
    product = lax.dot_general(a.values, b.values, over, preferred_element_type=dtype)
    return product * (a.scale * b.scale).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear_fp8(x_ri, w_oi, bound: float | None):
    """x w^T [r, o] with FP8 matmuls where it is differentiated; i inputs, o outputs.

    `bound` is that of x, or None: see round_fp8.
    """
    return x_ri @ w_oi.T


def linear_fp8_forward(x_ri, w_oi, bound: float | None):
    """(x w^T, what its gradient needs: both in 8 bits)."""
    x, w = round_fp8(x_ri, E4M3, bound), round_fp8(w_oi, E4M3)
    return multiply_fp8(x, w, (1, 1), x_ri.dtype), (x, w)


def linear_fp8_backward(bound: float | None, saved: tuple[Scaled, Scaled], grad_ro):
    """Gradients for x and w: both matmuls take the same rounded gradient."""
    (x, w), grad = saved, round_fp8(grad_ro, E5M2)
    dtype = grad_ro.dtype
    return multiply_fp8(grad, w, (1, 0), dtype), multiply_fp8(grad, x, (0, 0), dtype)


linear_fp8.defvjp(linear_fp8_forward, linear_fp8_backward)


def norm_bound(cfg: Config) -> float:
    """No number that comes out of norm is larger: they are width many, with a mean square of 1."""
    return math.sqrt(cfg.width)


def check_fp8(cfg: Config, device):
    """UserError if the run asks for FP8 and one of its devices has none. A CPU emulates it."""
    if cfg.fp8 == "none" or device.platform == "cpu":
        return
    if device.platform != "gpu" or capability_of(device) < 8.9:
        raise UserError(
            f"fp8={cfg.fp8} needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper "
            f"or later), not a {device.device_kind}: use fp8=none"
        )


# ------------------------------------------------------------------------------------------------
# Model: tokens -> features
# ------------------------------------------------------------------------------------------------


def gate(x_btd, weights_ng):
    """A number in (0, 1) for each row of weights, from a token's first features; float32 [b, t, n].

    Twelve features suffice (record 28).
    """
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
    around in int32. Documents do not matter. Two multiplications a token are cheaper on the device
    than four more bytes a token on the way to it.
    """
    last = jnp.full_like(tokens_bt[:, :1], rows - 1, dtype=jnp.int32)
    tokens_bt = tokens_bt.astype(jnp.int32)
    before = jnp.concatenate([last, tokens_bt[:, 1:-1]], axis=1)
    hashed = ((36313 * tokens_bt[:, 1:]) ^ (27191 * before)) % (rows - 1)
    return jnp.concatenate([last, hashed], axis=1)


TABLES = ("embed", "value_tables", "bigram_table")  # parameters that are looked up by row


def table_ids(cfg: Config, tokens_bt) -> dict[str, jax.Array]:
    """The rows of TABLES that the tokens use, int32 [b, t]; of value_tables, of each layer's."""
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


def projection(params, cfg: Config, i: int, heads: Heads):
    """Weights [3 d + gates, d] from the input of layer `i` to q, k, v and the logits of its gates.

    The gates look at GATE_INPUTS features of a token. As rows of the same matrix they cost 1 / 18
    of a matmul that is there anyway; alone, a pass over all activations.
    """
    d, at = cfg.width, cfg.attention_layers.index(i)
    w_qkv = params["attn_bank"][4 * at : 4 * at + 3].reshape(3 * d, d)
    gates = [params["attn_gate"][at]]
    if i in cfg.value_layers:
        seen = GATE_INPUTS if i in cfg.paired_layers else GATE_INPUTS // 2  # see attention
        gates.append(params["value_gate"][cfg.value_layers.index(i)][:, :seen])
    gates = jnp.concatenate([jnp.pad(w, ((0, 0), (0, d - w.shape[1]))) for w in gates])
    gates = jnp.pad(gates, ((0, heads.gates - gates.shape[0]), (0, 0)))
    return jnp.concatenate([mix((params["qkv_lambda"][i], w_qkv)), gates.astype(w_qkv.dtype)])


def attention(
    params, cfg: Config, i: int, x_btd, values_btd, segments_bt, window, hyper, attend: Callable
):
    """What the attention of layer `i` adds to the stream, its weight included, from normed input.

    `values_btd` are the tokens' rows of the layer's value table, or None; `attend` is one of
    ATTENTION.
    """
    at, paired = cfg.attention_layers.index(i), i in cfg.paired_layers
    heads = Heads(cfg.heads, cfg.head_width, window, paired, i in cfg.long_layers)
    look_btg = None
    if values_btd is not None and not paired:
        # The gate of values looks at half as many features of the layer's input, and at the values.
        half = GATE_INPUTS // 2
        weights_ng = params["value_gate"][cfg.value_layers.index(i)][:, half:]
        look_btn = values_btd[..., :half] @ weights_ng.T.astype(values_btd.dtype)
        unused = heads.gates - 2 * heads.count
        look_btg = jnp.pad(look_btn, ((0, 0), (0, 0), (heads.count, unused)))
    proj_btp = x_btd @ projection(params, cfg, i, heads).T
    y_btd = attend(
        heads, proj_btp, values_btd, look_btg, segments_bt, hyper.freqs, hyper.attn_scale
    )
    weight = params["post_lambdas"][i, 0] * params["o_lambda"][i]
    return y_btd @ mix((weight, params["attn_bank"][4 * at + 3])).T


@jax.custom_vjp
def squared_relu(z):
    """h = relu(z)^2 (So et al. 2021). Its slope is 2 sqrt(h), so that z need not be kept.

    On an absent H100 that saves 2.6 of 15.6 GiB for 49,152 tokens; on a TPU XLA finds it by itself.
    """
    return jnp.square(jax.nn.relu(z))


squared_relu.defvjp(
    lambda z: (squared_relu(z),) * 2,
    lambda h, grad: ((2 * jnp.sqrt(h.astype(jnp.float32)) * grad).astype(grad.dtype),),
)


def mlp(params, cfg: Config, i: int, x_btd):
    """What the MLP of layer `i` adds to the stream, its weight included: ReLU squared."""
    up_fd, down_fd = params["mlp_bank"][i], params["mlp_bank"][cfg.layers + i]
    down_fd = mix((params["post_lambdas"][i, 1], down_fd))
    if cfg.fp8 in ("mlp", "both"):
        up_rf = linear_fp8(x_btd.reshape(-1, cfg.width), up_fd, norm_bound(cfg))
        y_rd = linear_fp8(squared_relu(up_rf), down_fd.T, None)
        return y_rd.reshape(x_btd.shape)
    return squared_relu(x_btd @ up_fd.T) @ down_fd


def forward(
    params, rows, tokens_bt, cfg: Config, windows: tuple[int, int], hyper, attend: Callable
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
        if i == cfg.skip[1]:
            x = mix((1.0, x), (skip, outputs[cfg.skip[0]]))
        else:
            with jax.named_scope(f"attention{i}"):
                values = None
                if i in cfg.value_layers:
                    values = rows["value_tables"][cfg.value_layers.index(i)]
                source = norm(outputs[cfg.backout] if i > cfg.backout else x)
                window = windows[i in cfg.long_layers]
                y = attention(params, cfg, i, source, values, segments_bt, window, hyper, attend)
                more = [(bigram_lambdas[i], bigram)] if i else []  # layer 0 has it already
                x = mix((resid[i, 0], x), (1.0, y), (x0_lambdas[i], x0), *more)
        with jax.named_scope(f"mlp{i}"):
            return mix((resid[i, 1], x), (1.0, mlp(params, cfg, i, norm(x))))

    if cfg.recompute == "layers":  # keep only what goes from layer to layer
        layer = jax.checkpoint(layer, static_argnums=0)
    for i in range(cfg.layers):
        x = layer(i, x)
        outputs.append(x)
    return norm(mix((1.0, x), (-params["backout_lambda"][0], outputs[cfg.backout])))


# ------------------------------------------------------------------------------------------------
# Loss: features -> summed cross-entropy, with its own gradient
# ------------------------------------------------------------------------------------------------


def squash(z, cfg: Config):
    """tanh((z + b) / 2c), float32: a sigmoid is half of 1 + tanh of half."""
    _, b, c = cfg.logit_cap
    return jnp.tanh((z.astype(jnp.float32) + b) * (0.5 / c))


def cap_logits(z, cfg: Config):
    """Logits a * sigmoid((z + b) / c), in (0, a), in float32 (records 9, 18, 54)."""
    return cfg.logit_cap[0] / 2 * (1 + squash(z, cfg))


def logits(x_cd, head_vd, cfg: Config, dtype):
    """Features times head, [c, v] in `dtype`; with a head in 8 bits (Scaled) x is rounded too."""
    if isinstance(head_vd, Scaled):
        return multiply_fp8(round_fp8(x_cd, E4M3, norm_bound(cfg)), head_vd, (1, 1), dtype)
    return jnp.matmul(x_cd, head_vd.astype(x_cd.dtype).T, preferred_element_type=dtype)


def token_losses(x_cd, head_vd, targets_ck, cfg: Config, trains: bool = False):
    """(losses in nats [c, k], logits [c, v] before the cap, sums of exponentials [c]) as float32.

    Capped logits are below a, so exp cannot overflow and needs no row maximum; a/2 of each cancels.
    XLA does all of this to a product while it is on the chip: if the caller stores squashed logits
    as bfloat16, no float32 [c, v] goes to memory. The logits of the targets come once more, from
    their rows of the head: 12.2 M cycles predicted for v6e (49,152 tokens, one target; 0.2 M more
    are the bytes of the look-up), 18.7 M when they are picked out of [c, v] by comparison.

    On an NVIDIA GPU matmuls are a library's, and the product does go to memory. Where the program
    `trains` it goes there in the dtype of x, as in the original: 0.4 GB a chunk instead of 0.8. The
    sums are then those of rounded logits, the logits of the targets are not rounded.
    """
    half = cfg.logit_cap[0] / 2
    wide = functools.partial(logits, cfg=cfg, dtype=jnp.float32)
    if trains:
        narrow = functools.partial(logits, cfg=cfg, dtype=x_cd.dtype)
        z_cv = lax.platform_dependent(
            x_cd, head_vd, cuda=lambda *args: narrow(*args).astype(jnp.float32), default=wide
        )
    else:
        z_cv = wide(x_cd, head_vd)
    sum_c = jnp.sum(jnp.exp(half * squash(z_cv, cfg)), axis=1)
    scale, w_vd = 1.0, head_vd
    if isinstance(head_vd, Scaled):
        x, w = round_fp8(x_cd, E4M3, norm_bound(cfg)), head_vd
        x_cd, w_vd, scale = x.values, w.values, x.scale * w.scale
    z_ck = [
        jnp.sum(x_cd.astype(jnp.float32) * w_vd[targets_ck[:, k]].astype(jnp.float32), axis=1)
        for k in range(targets_ck.shape[1])
    ]
    losses_ck = jnp.log(sum_c)[:, None] - half * squash(scale * jnp.stack(z_ck, axis=1), cfg)
    return losses_ck, z_cv, sum_c


def loss_gradients(z_cv, sum_c, x_cd, head_vd, targets_ck, weights_ck, cfg: Config):
    """Gradients of the weighted losses: (x's [c, d] in its dtype, the head's [v, d] in float32).

    That of a logit z is (total weight of the token * its probability - weight of z as a target)
    times the slope of the cap, a/4c (1 - squashed^2). With squashed logits, and this product,
    rounded to bfloat16, either gradient is off by 0.3 % (relative norm).

    With a head in 8 bits, that of a logit is rounded to E5M2. It is not above the total weight of
    the token: there is no need to look for the largest one in [c, v].
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
    grad_cv = miss_cv * (1 - jnp.square(squashed_cv))
    if isinstance(head_vd, Scaled):
        x = round_fp8(x_cd, E4M3, norm_bound(cfg))
        grad = round_fp8(grad_cv, E5M2, jnp.max(jnp.sum(weights_ck, axis=1)))
        dx_cd = multiply_fp8(grad, head_vd, (1, 0), x_cd.dtype)
        return dx_cd, multiply_fp8(grad, x, (0, 0), jnp.float32)
    w_vd, grad_cv = head_vd.astype(x_cd.dtype), grad_cv.astype(x_cd.dtype)
    return grad_cv @ w_vd, jnp.matmul(grad_cv.T, x_cd, preferred_element_type=jnp.float32)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(x_rd, head_vd, targets_rk, weights_rk, cfg: Config):
    """(weighted sum of all losses, plain sum of the losses on the next token), float32.

    Only the weighted sum can be differentiated, with respect to x and head. Its gradient is formed
    together with it: on the way back, the logits (9.9 GB in float32 for 49,152 tokens) would have
    to be either kept or computed again. Works through cfg.loss_chunk tokens at a time.
    Predicted for v6e, 49,152 tokens, 50,304 entries, in M cycles with 1, 2, 3 targets: 48.7, 61.7,
    61.7; by autodiff with recomputed logits 72.6, 84.3, 92.8; three matmuls at peak are 21.7.
    """

    def add(totals, chunk):
        x_cd, targets_ck, weights_ck = chunk
        losses_ck, _, _ = token_losses(x_cd, head_vd, targets_ck, cfg)
        return add_losses(totals, losses_ck, weights_ck), None

    zeros = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    return lax.scan(add, zeros, in_chunks(cfg, x_rd, targets_rk, weights_rk))[0]


def cross_entropy_forward(x_rd, head_vd, targets_rk, weights_rk, cfg: Config):
    """(cross_entropy, its gradients for a cotangent of 1), where jax differentiates it."""
    if weights_rk.perturbed:
        raise NotImplementedError("cross_entropy has no gradient with respect to its weights")
    x_rd, head_vd, *targets = (x.value for x in (x_rd, head_vd, targets_rk, weights_rk))
    w_vd = round_fp8(head_vd, E4M3) if cfg.fp8 in ("head", "both") else head_vd

    def add(carry, chunk):
        totals, d_head = carry
        x_cd, targets_ck, weights_ck = chunk
        losses_ck, z_cv, sum_c = token_losses(x_cd, w_vd, targets_ck, cfg, trains=True)
        dx_cd, more = loss_gradients(z_cv, sum_c, x_cd, w_vd, targets_ck, weights_ck, cfg)
        return (add_losses(totals, losses_ck, weights_ck), d_head + more), dx_cd

    zeros = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    start = zeros, jnp.zeros(head_vd.shape, jnp.float32)
    (totals, d_head), dx = lax.scan(add, start, in_chunks(cfg, x_rd, *targets))
    return totals, (dx.reshape(x_rd.shape), d_head, head_vd)


def cross_entropy_backward(cfg: Config, gradients, cotangents):
    """Gradients for x, head, targets (none) and weights (refused above)."""
    dx_rd, d_head, head_vd = gradients
    weighted, plain = cotangents
    if not isinstance(plain, SymbolicZero):
        raise NotImplementedError("cross_entropy has no gradient of the plain sum")
    dx, d_head = weighted * dx_rd.astype(jnp.float32), weighted * d_head
    return dx.astype(dx_rd.dtype), d_head.astype(head_vd.dtype), None, None


cross_entropy.defvjp(cross_entropy_forward, cross_entropy_backward, symbolic_zeros=True)


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


def loss_sums(params, rows, tokens, cfg: Config, windows, hyper, weights_k, attend: Callable):
    """cross_entropy over rows [b, t+1]: token 0..t-1 of a row each predict the next k tokens."""
    x_btd = forward(params, rows, tokens[:, :-1], cfg, windows, hyper, attend)
    x_rd = x_btd.reshape(-1, cfg.width)
    return cross_entropy(x_rd, params["head"], *targets_ahead(tokens, weights_k), cfg)


def flops_per_token(cfg: Config) -> float:
    """Model FLOPs of forward and backward per token: 6 per matmul weight.

    Attention scores are left out, as in the original's figures: with full windows, regardless of
    documents, they would add 13 % in the last stage.
    """
    table = param_table(cfg)
    return 6.0 * sum(table[name].count for name in ("attn_bank", "mlp_bank", "head"))


# ------------------------------------------------------------------------------------------------
# Gradients of tables
# ------------------------------------------------------------------------------------------------
# The gradient of a lookup adds each token's row into the row of its id. XLA scatters them one by
# one, into zeros that it has to write first, in float32 because a frequent id comes up thousands of
# times. On a TPU one-hot matrices do better: where tokens are sorted by id, a tile of table rows
# meets few blocks of tokens, and each meeting is one small matmul. Sums are float32, every row of
# the table is written once, rounded, and there are no zeros. Predicted for the record's seven
# tables and 49,152 tokens: 3.4 M cycles of 235 M of a step. (XLA's estimates leave scatters out.)

ROW_TILE, ROW_BLOCK = 256, 256  # rows of a table, and tokens, that meet in one matmul


def scatter_rows(table_vd, ids, rows):
    """`table_vd` + for every token its row in `rows`, added to the table's row that `ids` names.

    Several tables [v / n, d] may lie in `table_vd`, one under the other, which have the same ids
    [...]: `rows` holds n arrays [..., d]. (In no fixed order on a GPU: last bits may differ.)
    """
    for n, x in enumerate(rows):
        at = ids + n * (table_vd.shape[0] // len(rows))
        table_vd = table_vd.at[at].add(x.astype(table_vd.dtype), mode="promise_in_bounds")
    return table_vd


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
    """
    from jax.experimental import pallas as pl

    (v, d), n, block = table_vd.shape, len(rows), math.gcd(ids.size, ROW_BLOCK)
    if 2 * (v // n // ROW_TILE + 2) * ids.size >= 2**32:
        raise UserError(
            f"{ids.size} tokens and {v // n} rows do not fit 32 bits: use a smaller micro_tokens "
            "or table_gradients=scatter"
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


ADD_ROWS = {"scatter": scatter_rows, "kernel": sum_rows}


def adder_on(cfg: Config, device) -> str:
    """Which of ADD_ROWS serves on one of the run's devices; UserError if the asked one cannot."""
    tiles = cfg.width % 128 == 0 and all(stage.row_tokens % 128 == 0 for stage in cfg.stages)
    able = device.platform == "tpu" and tiles and device.device_kind not in SMALL_VMEM
    if cfg.table_gradients == "kernel" and not able:
        raise UserError(
            "table_gradients=kernel needs a TPU v5 or later, and a width and rows that are "
            "multiples of 128: use table_gradients=auto"
        )
    return {"auto": "kernel" if able else "scatter"}.get(cfg.table_gradients, cfg.table_gradients)


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
    """The nearest (semi-)orthogonal matrix to each matrix of the bank [l, rows, cols], in `dtype`.

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
    for name, row in table.items():  # in its order: a twin is a copy of what stands before it
        if name not in grads:
            continue
        grad, old = grads[name], [state[kind][name] for kind in ("params", "first", "second")]
        lr = hyper.lr * row.lr
        if row.optimizer == "muon":
            mine = lax.axis_index(AXIS) * old[0].shape[0]
            scale = lax.dynamic_slice_in_dim(jnp.asarray(row.scale), mine, old[0].shape[0])
            updated = muon(
                old[0], grad, *old[1:], lr, row.decay, hyper.momentum,
                cfg.variance_beta, scale, cfg.dtype,
            )  # fmt: skip
        else:
            grad = grad + sum(hyper.tied * grads[n] for n, r in table.items() if r.twin == name)
            updated = adam(
                old[0], grad, *old[1:], lr, row.decay, hyper.adam_count, row.betas, cfg.adam_eps
            )
        if row.twin:
            twins = (new[kind][row.twin] for kind in ("params", "first", "second"))
            updated = [jnp.where(hyper.tied > 0, a, b) for a, b in zip(twins, updated, strict=True)]
        new["params"][name], new["first"][name], new["second"][name] = updated
    return new


# ------------------------------------------------------------------------------------------------
# Steps: the programs that run on the devices
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The static part of a program: what would otherwise be recompiled inside the clock.

    A training step is two programs: `grads` of its stage, then `update`, with or without Adam.
    """

    kind: str  # grads, update or eval
    batch_tokens: int = 0
    row_tokens: int = 0
    windows: tuple[int, int] = (0, 0)
    ahead: int = 1  # tokens that each token predicts
    adam: bool = False

    @property
    def name(self) -> str:
        """For example grads-b131072-r16384-w128-384-k3 or update-muon-adam."""
        if self.kind == "update":
            return "update-muon-adam" if self.adam else "update-muon"
        short, long = self.windows
        shape = f"b{self.batch_tokens}-r{self.row_tokens}-w{short}-{long}-k{self.ahead}"
        return f"{self.kind}-{shape}"

    @property
    def rows(self) -> int:
        """Rows of one global batch; 0 for an update."""
        return self.batch_tokens // self.row_tokens if self.row_tokens else 0


def step_variants(cfg: Config, step: int) -> tuple[Variant, Variant]:
    """The two programs of a step; stages that differ in smooth things share theirs."""
    s = stage_at(cfg, step)
    grads = Variant("grads", s.batch_tokens, s.row_tokens, s.windows, len(s.weights))
    return grads, Variant("update", adam=is_adam_step(cfg, step))


def eval_variant(cfg: Config) -> Variant:
    """The program of every validation, with the windows of the last one."""
    return Variant("eval", cfg.val_batch, cfg.val_row, cfg.val_windows)


@functools.cache
def executions(cfg: Config) -> dict[Variant, int]:
    """Every program of the run, in order of first use, and how many times it runs."""
    counts = Counter(v for step in range(cfg.steps) for v in step_variants(cfg, step))
    validations = 1 + sum(every(cfg.val_every, step) for step in range(cfg.steps))
    counts[eval_variant(cfg)] = validations * (cfg.val_tokens // cfg.val_batch)
    return dict(counts)


def all_devices() -> list:
    """The devices of all processes; UserError if jax cannot start its backend."""
    try:
        return jax.devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"jax finds no devices ({reason}): see JAX_PLATFORMS and drivers") from None


def make_mesh(cfg: Config, devices=None) -> Mesh:
    """The one-axis mesh over `devices` (default: the first cfg.devices, process by process)."""
    if devices is None:
        devices = sorted(all_devices(), key=lambda device: device.process_index)
    count = cfg.devices or len(devices)
    if jax.process_count() > 1 and count != len(devices):
        raise UserError(f"devices={count} is for a process alone: several use all {len(devices)}")
    if count > len(devices):
        raise UserError(f"devices={count}, but there are {len(devices)}: use a smaller number or 0")
    if STATE_CUTS % count:
        raise UserError(
            f"{count} devices do not divide {STATE_CUTS}: use --set devices=1, 2, 4 or 8"
        )
    for variant in executions(cfg):
        if variant.rows % count:
            raise UserError(
                f"{variant.name} has {variant.rows} rows, which {count} devices cannot share "
                "equally: use fewer devices or a larger stages.N.batch_tokens (val_batch)"
            )
    return Mesh(np.array(devices[:count]), (AXIS,))


def micro_rows(cfg: Config, rows: int, row_tokens: int) -> int:
    """Rows of one micro-batch: the most that divide a device's `rows` within cfg.micro_tokens."""
    fits = [n for n in range(1, rows + 1) if rows % n == 0 and n * row_tokens <= cfg.micro_tokens]
    return max(fits, default=1)


class Hardware(NamedTuple):
    """One device of a kind, by its maker's data sheet; None for what has not been looked up."""

    peak: float | None = None  # dense bfloat16, FLOP/s
    memory: int | None = None  # bytes that programs and state can have together
    hbm: float | None = None  # bytes/s to and from memory
    link: float | None = None  # bytes/s that leave through one link
    clock: float | None = None  # Hz of the compiler's cycles


HARDWARE = {  # by a part of the device kind; the longest that is in it counts
    "TPU v4": Hardware(275e12),
    "TPU v5 lite": Hardware(197e12),
    "TPU v5": Hardware(459e12),
    "TPU v6 lite": Hardware(918e12, int(31.25 * 2**30), 1.64e12, 56e9, 1.75e9),
    "H100": Hardware(989e12),
    # jax takes 75 % of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
    "H100 80GB HBM3": Hardware(989e12, int(0.75 * 81_559 * 2**20), 3.35e12, 450e9),
    "H100 PCIe": Hardware(756e12),
    "H200": Hardware(989e12),
    "A100": Hardware(312e12),
    "L40S": Hardware(362e12),
    "RTX 4090": Hardware(165e12),
}


def hardware(kind: str) -> Hardware:
    """What is known of a device kind."""
    names = [name for name in HARDWARE if name in kind]
    return HARDWARE[max(names, key=len)] if names else Hardware()


def memory_limit(mesh: Mesh) -> int | None:
    """Bytes that programs and state of a run can have on a device; None if that is not known."""
    device = (mesh.local_devices or [*mesh.devices.flat])[0]
    known = hardware(device.device_kind).memory
    try:
        return (device.memory_stats() or {}).get("bytes_limit", known)
    except jax.errors.JaxRuntimeError:  # of a device that is not here
        return known


def memory_needed(cfg: Config, variant: Variant, mesh: Mesh) -> float:
    """Bytes on a device while a `grads` program runs: an estimate, mostly 5 to 25 % too high.

    The model keeps 17 activations of its width for each token and layer (a fourth more with
    attention by XLA or cuDNN); with recompute=layers one, and 24 of the layer that is computed
    again. (From programs for an absent H100, as in --preflight h100x8.)
    """
    size, table = cfg.dtype.itemsize, param_table(cfg)
    numbers = sum(row.count for row in table.values())
    adam = sum(row.count for row in table.values() if row.optimizer == "adam")
    tokens = micro_rows(cfg, variant.rows // mesh.size, variant.row_tokens) * variant.row_tokens
    stays = 12 * numbers / mesh.size + size * (numbers + (cfg.adam_every - 1) * adam)
    sums = (4 + size) * numbers
    loss = cfg.vocab * (min(cfg.loss_chunk, tokens) * (4 + 2 * size) + 4 * cfg.width)
    kept = cfg.layers + 24 if cfg.recompute == "layers" else 17 * cfg.layers
    if attention_on(cfg, mesh.devices.flat[0])[0] in ("xla", "cudnn"):
        kept *= 1.25
    return stays + sums + loss + tokens * cfg.width * size * kept


def fitted(cfg: Config, variant: Variant, mesh: Mesh) -> Config:
    """`cfg` with micro_tokens and recompute settled for a program, by the memory of its devices.

    The most rows at a time whose activations fit, with 5 % to spare; where not even one row's do,
    the most with recompute=layers, which has a third more to compute. Results are the same but for
    the order of sums. Where the memory is not known (a CPU), and for validation: 49,152 tokens.
    """
    limit = memory_limit(mesh)
    ways = ("never", "layers") if cfg.recompute == "auto" else (cfg.recompute,)
    rows = max(variant.rows // mesh.size, 1)
    sizes = [n * variant.row_tokens for n in range(rows, 0, -1) if rows % n == 0]
    if cfg.micro_tokens or limit is None or variant.kind != "grads":
        sizes = [cfg.micro_tokens or 49_152]
    found = [
        dataclasses.replace(cfg, recompute=way, micro_tokens=size) for way in ways for size in sizes
    ]
    if limit is None or variant.kind != "grads":
        return found[0]
    fits = (c for c in found if memory_needed(c, variant, mesh) <= 0.95 * limit)
    return next(fits, found[-1])


def compute_copies(cfg: Config, params, gather: bool = False, names=None):
    """What the model computes with: large parameters in cfg.dtype, small ones as they are.

    With `gather`, inside shard_map, from the shares of all devices: first cast, then gathered.
    """
    copies = {}
    for name, row in param_table(cfg).items():
        if names is None or name in names:
            copies[name] = params[name].astype(cfg.dtype) if row.sharded else params[name]
            if gather and row.sharded:
                copies[name] = lax.all_gather(copies[name], AXIS, tiled=True)
    return copies


def updated_names(cfg: Config, update: Variant) -> list[str]:
    """The parameters that an update changes: Muon's banks at every step, Adam's at its own."""
    table = param_table(cfg)
    return [name for name, row in table.items() if update.adam or row.optimizer == "muon"]


def split_due(cfg: Config, update: Variant, waiting, grads):
    """(gradients that `update` takes, those that wait on): name -> tuple of arrays, oldest first.

    Adam's gradients wait on the device that made them for the update that sums adam_every of them
    (record 39: tables are noisy and want larger batches). So they cross the network only then: per
    step and device 0.55 GB instead of 0.95, and 1.9 with float32 at every step. At the 112 GB/s of
    a v6e-8's corner chip that is 5, 9 and 17 ms.
    """
    queued = {name: (*waiting.get(name, ()), grad) for name, grad in grads.items()}
    due = {name: queued.pop(name) for name in updated_names(cfg, update)}
    return due, queued


def reduce_grads(cfg: Config, due):
    """Sum gradients over steps and devices, leaving each device its own share, in float32.

    On the way large ones have the compute dtype, as in the original: half the bytes, and in
    bfloat16 partial sums that are rounded at every device. An all_to_all of the shares, summed in
    float32 where they arrive, would not round them; but in a v6e-8's 2 x 4 grid half of it crosses
    the two links in the middle, and its 1.1 GB take 19 ms where a ring takes 9.
    """
    reduced = {}
    for name, parts in due.items():
        total = sum(part.astype(jnp.float32) for part in parts)
        if param_table(cfg)[name].sharded:
            total = lax.psum_scatter(total.astype(cfg.dtype), AXIS, tiled=True)
            reduced[name] = total.astype(jnp.float32)
        else:
            reduced[name] = lax.psum(total, AXIS)
    return reduced


def accumulate(cfg: Config, loss: Callable, add_rows: Callable, copies, tokens, micro: int):
    """(loss, gradients) of loss(weights, rows, tokens), summed over micro-batches.

    Gradients have the dtypes of the copies; over micro-batches they are summed in float32. Tables
    take part only with the rows that the tokens look up: `add_rows` adds the gradients of those
    rows to the table's. No collective runs in here.
    """
    weights = {name: x for name, x in copies.items() if name not in TABLES}

    def add(carry, tokens):
        total, grads = carry
        ids, rows = table_ids(cfg, tokens[:, :-1]), look_up(cfg, copies, tokens[:, :-1])
        backward = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, plain), (d_weights, d_rows) = backward(weights, rows, tokens)
        summed = {name: grads[name] + x.astype(jnp.float32) for name, x in d_weights.items()}
        for name in TABLES:
            summed[name] = add_rows(grads[name], ids[name], jax.tree.leaves(d_rows[name]))
        return (total + plain, summed), None

    zeros = {name: jnp.zeros(x.shape, jnp.float32) for name, x in copies.items()}
    carry = jnp.zeros((), jnp.float32), zeros
    if tokens.shape[0] == micro:
        total, grads = add(carry, tokens)[0]
    else:
        total, grads = lax.scan(add, carry, tokens.reshape(-1, micro, tokens.shape[1]))[0]
    return total, {name: grad.astype(copies[name].dtype) for name, grad in grads.items()}


def make_step(cfg: Config, variant: Variant, mesh: Mesh) -> Callable:
    """The function that `variant` compiles; manual over the mesh, so every collective is ours.

    grads:  (copies, tokens uint16 [rows, t+1], Hyper, wishes [devices, 2]) -> (gradients, report)
    update: (state, {name: (gradient, ...)}, Hyper) -> (state, the copies that changed)
    eval:   (copies, tokens uint16 [rows, t+1], Hyper) -> summed loss
    A report is float32 [3]: the mean loss on the next token, and the sum over the devices of what
    their processes wish (see Wishes). Copies are whole on every device, the state is cut. Each
    device keeps the gradients of its own rows (in one array, [devices * n, ...] for a parameter
    [n, ...]); an update reduces them, and gathers what it changed. The gradient is that of the
    summed loss of a row, averaged over rows, as in the original: it grows with the length of a row
    from stage to stage, while the moments remember the old size.
    """
    attend = ATTENTION[attention_on(cfg, mesh.devices.flat[0])[0]]
    add_rows = ADD_ROWS[adder_on(cfg, mesh.devices.flat[0])]
    cfg = fitted(cfg, variant, mesh)
    micro = micro_rows(cfg, variant.rows // mesh.size, variant.row_tokens)
    state_specs = map_state(cfg, lambda kind, row: partition(row))

    def loss(hyper, weights_k, weights, rows, tokens):
        weighted, plain = loss_sums(
            weights, rows, tokens, cfg, variant.windows, hyper, weights_k, attend
        )
        return weighted / variant.rows, plain

    def grads_step(copies, tokens, hyper, wishes):
        row_loss = functools.partial(loss, hyper, hyper.weights[: variant.ahead])
        plain, grads = accumulate(cfg, row_loss, add_rows, copies, tokens.astype(jnp.int32), micro)
        report = jnp.concatenate([plain[None] / variant.batch_tokens, wishes[0]])
        return grads, lax.psum(report, AXIS)

    def update_step(state, due, hyper):
        # Copies that it does not change are not its business: the caller keeps them.
        state = apply_updates(cfg, state, reduce_grads(cfg, due), hyper)
        return state, compute_copies(cfg, state["params"], gather=True, names=due)

    def eval_step(copies, tokens, hyper):
        def micro_loss(tokens):
            rows = look_up(cfg, copies, tokens[:, :-1])
            return loss(hyper, jnp.ones(1), copies, rows, tokens)[1]

        tokens = tokens.astype(jnp.int32).reshape(-1, micro, tokens.shape[1])
        return lax.psum(jnp.sum(lax.map(micro_loss, tokens)), AXIS)

    step, ins, outs = {
        "grads": (grads_step, (P(), P(AXIS), P(), P(AXIS)), (P(AXIS), P())),
        "update": (update_step, (state_specs, P(AXIS), P()), (state_specs, P())),
        "eval": (eval_step, (P(), P(AXIS), P()), P()),
    }[variant.kind]
    return jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


# ------------------------------------------------------------------------------------------------
# Hosts: several processes, each with its own devices, that run the same program in step
# ------------------------------------------------------------------------------------------------


HEARTBEAT_SECONDS = 30  # between signs of life; jax ends all processes when one gives none


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
    if (
        coordinator is None
        and tpu_hosts() == 1
        and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    ):
        return
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours, see Wishes
    try:
        jax.distributed.initialize(
            coordinator, processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot join the other processes ({error}): see --coordinator") from None


def agree(what: dict[str, str]):
    """UserError, on every process, unless all of them have the same texts in `what`."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    own = [platform.node().encode()[:32].ljust(32)]
    own += [hashlib.sha256(text.encode()).digest() for text in what.values()]
    everyone = multihost_utils.process_allgather(np.frombuffer(b"".join(own), np.uint8))
    everyone = everyone.reshape(jax.process_count(), len(own), 32)
    for i, name in enumerate(what, 1):
        groups = {}
        for process, theirs in enumerate(everyone):
            host = theirs[0].tobytes().decode(errors="replace").strip()
            groups.setdefault(theirs[i].tobytes(), []).append(f"{host} (process {process})")
        if len(groups) > 1:
            hosts = " | ".join(", ".join(names) for names in groups.values())
            raise UserError(f"these hosts disagree about their {name}: {hosts}: make them equal")


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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


# ------------------------------------------------------------------------------------------------
# Compilation: every program of the run, before the clock starts
# ------------------------------------------------------------------------------------------------


# All that is asked of a compiler beyond its defaults, by platform; in every run's log. On GPUs XLA
# leaves out the rounding to bfloat16 between operations that it can fuse, and so keeps and reads
# activations as float32: for the record's largest stage 17.65 GiB of temporaries instead of 16.31,
# and 5 % more bytes (counted in its program for an absent H100).
# With 8-bit matmuls they are left to cuBLASLt: XLA's own, by Triton, widen products of the two
# formats to 16 bits. (That collectives run beside computation is XLA's default.)
COMPILER_OPTIONS = {"gpu": {"xla_allow_excess_precision": False}}
FP8_OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}


def compiler_options(cfg: Config, device) -> dict:
    """What COMPILER_OPTIONS and FP8_OPTIONS say for this run and one of its devices."""
    more = {} if cfg.fp8 == "none" else FP8_OPTIONS.get(device.platform, {})
    return COMPILER_OPTIONS.get(device.platform, {}) | more


def abstract_copies(cfg: Config, mesh: Mesh):
    """Shapes, dtypes and shardings of the compute copies."""
    copy = functools.partial(compute_copies, cfg)
    copies = jax.eval_shape(copy, abstract_state(cfg, mesh)["params"])
    whole = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), copies)


def abstract_due(cfg: Config, mesh: Mesh, update: Variant):
    """Shapes, dtypes and shardings of the gradients that an update takes."""

    def leaf(x):
        shape = (mesh.size * x.shape[0], *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, P(AXIS)))

    copies, table = abstract_copies(cfg, mesh), param_table(cfg)
    counts = {"muon": 1, "adam": cfg.adam_every}
    return {
        name: (leaf(copies[name]),) * counts[table[name].optimizer]
        for name in updated_names(cfg, update)
    }


def lower_variant(cfg: Config, variant: Variant, mesh: Mesh):
    """`variant` lowered from abstract values; an update consumes (donates) the state."""
    state, copies = abstract_state(cfg, mesh), abstract_copies(cfg, mesh)
    whole = NamedSharding(mesh, P())
    hyper = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), hyper_at(cfg, 0)
    )
    step, options = make_step(cfg, variant, mesh), compiler_options(cfg, mesh.devices.flat[0])
    if variant.kind == "update":
        due = abstract_due(cfg, mesh, variant)
        program = jax.jit(step, donate_argnums=0, compiler_options=options)
        return program.lower(state, due, hyper)
    shape = (variant.rows, variant.row_tokens + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.uint16, sharding=NamedSharding(mesh, P(AXIS)))
    wishes = jax.ShapeDtypeStruct((mesh.size, 2), jnp.float32, sharding=tokens.sharding)
    wishes = [wishes] if variant.kind == "grads" else []
    return jax.jit(step, compiler_options=options).lower(copies, tokens, hyper, *wishes)


def lower_init(cfg: Config, mesh: Mesh):
    """init_state lowered: seed uint32 -> state, born in its shards."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, mesh))
    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=NamedSharding(mesh, P()))
    return jax.jit(functools.partial(init_state, cfg), out_shardings=shardings).lower(seed)


def lower_copies(cfg: Config, mesh: Mesh):
    """compute_copies lowered: params -> copies, for the start of a run."""
    params = abstract_state(cfg, mesh)["params"]
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    copy = functools.partial(compute_copies, cfg, gather=True)
    copy = jax.shard_map(copy, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    return jax.jit(copy).lower(params)


def program_bytes(compiled) -> dict[str, int]:
    """Bytes on a device of a program's arguments, outputs, temporaries, and of all at its peak."""
    memory = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporary": "temp"}
    sizes = {key: getattr(memory, f"{name}_size_in_bytes") for key, name in names.items()}
    live = sum(sizes.values()) - 2 * sizes["aliased"]
    return sizes | {"peak": getattr(memory, "peak_memory_in_bytes", 0) or live}


def resident_bytes(cfg: Config, variant: Variant, mesh: Mesh) -> int:
    """Bytes on a device of what stays there while a program runs that does not take it.

    Training state and gradients that wait for the next Adam step, or, beside an update, the copies.
    """
    due = abstract_due(cfg, mesh, Variant("update", adam=True)).values()
    resident = abstract_state(cfg, mesh), [x[1:] for x in due]
    if variant.kind == "update":
        resident = abstract_copies(cfg, mesh)
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(resident)
    )


@contextlib.contextmanager
def heartbeat(say: Callable, under_way: dict[str, float]):
    """Inside, name what is in `under_way` (name -> when it began) now and then."""
    done = threading.Event()

    def beat():
        while not done.wait(HEARTBEAT_SECONDS):
            now = time.perf_counter()
            names = [f"{name} ({now - since:.0f} s)" for name, since in under_way.copy().items()]
            say(f"still compiling {', '.join(names)}")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def compile_all(cfg: Config, mesh: Mesh, say: Callable = print, variants=None):
    """Compile every program of the run in parallel threads, reporting the seconds of each.

    With `variants` only these, beside init and copies. Returns ({"init", "copies" or Variant:
    executable}, {name: seconds}). A variant that is not in the dict is a KeyError at the step that
    needs it, never a silent compilation inside the clock. Several processes compile only after they
    agree on what.
    """
    special, under_way = {"init": lower_init, "copies": lower_copies}, {}

    def lower(key):
        under_way[key if key in special else key.name] = time.perf_counter()
        return special[key](cfg, mesh) if key in special else lower_variant(cfg, key, mesh)

    def build(key, lowered):
        name, start = key if key in special else key.name, time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        del under_way[name]
        stats = compiled.memory_analysis()
        temp = f", {stats.temp_size_in_bytes / 2**20:.0f} MiB temporary" if stats else ""
        say(f"compiled {name} in {seconds:.1f} s{temp}")
        return key, compiled, name, seconds

    keys = ["init", "copies", *(variants or executions(cfg))]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool, heartbeat(say, under_way):
        lowered = list(pool.map(lower, keys))
        if jax.process_count() > 1:
            agree({"programs": "".join(one.as_text() for one in lowered)})
        built = list(pool.map(build, keys, lowered))
    programs = {key: compiled for key, compiled, _, _ in built}
    return programs, {name: round(seconds, 3) for *_, name, seconds in built}


# ------------------------------------------------------------------------------------------------
# Data: shards -> one stream of tokens -> rows
# ------------------------------------------------------------------------------------------------


def file_size(path: Path) -> int:
    """Bytes of a plain file; OSError for all else: reading a pipe or a device may never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a file", str(path))
    return found.st_size


def open_shard(path) -> np.memmap:
    """The tokens of a shard as a memory map, uint16; UserError if the file is not a whole shard."""
    path = Path(path)
    fix = "delete it and download or tokenize it again"
    try:
        size = file_size(path)
        if size < HEADER_BYTES:
            raise UserError(f"{path}: {size} bytes is too short for a header: {fix}")
        header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): {fix}") from None
    magic, version, count = header[:3].tolist()
    if magic != SHARD_MAGIC:
        raise UserError(
            f"{path}: magic number {magic}, not {SHARD_MAGIC}: not a token shard, {fix}"
        )
    if version != SHARD_VERSION:
        known = f"only version {SHARD_VERSION} is known"
        raise UserError(f"{path}: version {version} of the format, {known}: {fix}")
    if count <= 0 or size != HEADER_BYTES + 2 * count:
        raise UserError(
            f"{path}: {size} bytes, but its header promises {count} tokens "
            f"({HEADER_BYTES + 2 * count} bytes): {fix}"
        )
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
        self.shards = [open_shard(path) for path in self.paths]
        self.ends = np.cumsum([len(shard) for shard in self.shards])
        self.bos = bos
        self.documents = functools.lru_cache(maxsize=2)(self._documents)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def shard_at(self, cursor: int) -> tuple[int, int]:
        """(number of the shard that holds `cursor`, its first position)."""
        number = int(np.searchsorted(self.ends, cursor, side="right"))
        if number == len(self.shards):
            raise UserError(
                f"the tokens in {self.paths[0].parent} end at {len(self):,}: "
                "download more shards or use fewer steps"
            )
        return number, int(self.ends[number]) - len(self.shards[number])

    def read(self, cursor: int, count: int) -> np.ndarray:
        """`count` tokens from `cursor` on, uint16, across shard borders."""
        out = np.empty(count, np.uint16)
        done = 0
        while done < count:
            number, start = self.shard_at(cursor + done)
            at = cursor + done - start
            piece = self.shards[number][at : at + count - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    def _documents(self, number: int) -> np.ndarray:
        """Where documents begin in shard `number`; `documents` keeps two shards' places."""
        return np.flatnonzero(np.asarray(self.shards[number]) == self.bos)


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
        stops = np.append(starts[1:], len(stream.shards[number]))[: len(starts)]
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


def packed_rows(stream: TokenStream, cursor: int, rows: int, t: int, doc_cap: int, part=None):
    """(uint16 [rows, t+1], next cursor) as planned by plan_packed; of `part` see next_rows."""
    pieces, cursor = plan_packed(stream, cursor, rows, t, doc_cap)
    first, count = part or (0, rows)
    pieces = [(start, stop) for row, start, stop in pieces if first <= row < first + count]
    tokens = np.concatenate([stream.read(start, stop - start) for start, stop in pieces])
    return tokens.reshape(count, t + 1), cursor


def next_rows(stream: TokenStream, cursor: int, stage: Stage, part=None):
    """(uint16 [rows, t+1], next cursor) of a global batch of `stage`, from the cursor alone.

    With `part` = (first, count) only these rows of it are read and returned.
    """
    rows, t = stage.rows, stage.row_tokens
    if stage.doc_cap:
        return packed_rows(stream, cursor, rows, t, stage.doc_cap, part)
    first, count = part or (0, rows)
    return plain_rows(stream, cursor + first * t, count, t)[0], cursor + rows * t


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
    keeps nothing of them: the loader finds the documents again inside the clock (the system's file
    cache is warm then, as after any download).
    """
    cursor = cursor_after(cfg, train, cfg.steps)
    train.documents.cache_clear()
    if len(val) <= cfg.val_tokens:
        raise UserError(
            f"{val.paths[0].parent} holds {len(val):,} validation tokens, {cfg.val_tokens + 1:,} "
            "are needed: get the full validation shard, or lower --set val_tokens="
        )
    found = {}
    for stream, last in ((train, cursor), (val, cfg.val_tokens)):
        for number in range(stream.shard_at(min(last, len(stream) - 1))[0] + 1):
            path, shard = stream.paths[number], stream.shards[number]
            check_ids(cfg, path, shard)
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.name] = {"bytes": path.stat().st_size, "sha256": sha256}
    return found


# ------------------------------------------------------------------------------------------------
# Loader: rows -> batches that are on the devices ahead of use
# ------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A global batch on the devices, and the cursor of the one after it."""

    tokens: jax.Array  # uint16 [rows, t+1], cut over the devices
    hyper: Hyper
    cursor: int


def put(array: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """`array` on the devices of `mesh`; a process touches only the rows of its own devices."""
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


def put_hyper(cfg: Config, step: int, mesh: Mesh) -> Hyper:
    """The Hyper of `step`, whole on every device."""
    return jax.tree.map(lambda x: put(x, mesh, P()), hyper_at(cfg, step))


def own_part(mesh: Mesh, rows: int) -> tuple[int, int]:
    """(first, count): which rows of a batch this process reads, those of its own devices."""
    own = [i for i, x in enumerate(mesh.devices.flat) if x.process_index == jax.process_index()]
    return own[0] * rows // mesh.size, len(own) * rows // mesh.size


def put_rows(own: np.ndarray, mesh: Mesh, rows: int) -> jax.Array:
    """A batch [rows, t+1] over all devices, of which each process has its own_part in `own`."""
    sharding = NamedSharding(mesh, P(AXIS))
    return jax.make_array_from_process_local_data(sharding, own, (rows, own.shape[1]))


def train_batches(cfg: Config, mesh: Mesh, stream: TokenStream, step: int, cursor: int):
    """Yield the Batch of every step from `step` to the end of the run."""
    for now in range(step, cfg.steps):
        stage = stage_at(cfg, now)
        own, cursor = next_rows(stream, cursor, stage, own_part(mesh, stage.rows))
        yield Batch(put_rows(own, mesh, stage.rows), put_hyper(cfg, now, mesh), cursor)


def val_batches(cfg: Config, mesh: Mesh, stream: TokenStream):
    """Yield the validation rows on the devices, uint16 [rows, t+1]: val_tokens targets in all."""
    rows, t = cfg.val_batch // cfg.val_row, cfg.val_row
    first, count = own_part(mesh, rows)
    for start in range(0, cfg.val_tokens, cfg.val_batch):
        yield put_rows(plain_rows(stream, start + first * t, count, t)[0], mesh, rows)


STALL_SECONDS = 10  # a batch that takes longer is reported


class Prefetch:
    """Draws from an iterator in a thread, at most `depth` items ahead and only while `gate` is set.

    Iterate over it inside `with`: leaving the block ends the thread. An exception in the thread is
    raised at the item that it prevented; `late` is told when an item takes long.
    """

    def __init__(
        self, items, depth: int, gate: threading.Event | None = None, late: Callable = print
    ):
        self._queue, self._gate, self._late = queue.Queue(maxsize=depth), gate, late
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join(timeout=STALL_SECONDS)  # no longer: a dead disk must not hold the run

    def _take(self):
        waited = 0
        while True:
            try:
                return self._queue.get(timeout=STALL_SECONDS)
            except queue.Empty:
                waited += STALL_SECONDS
                self._late(f"waiting for the loader for {waited} s: is the disk of the data slow?")

    def __iter__(self):
        while True:
            item, error = self._take()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    def _run(self, items):
        try:
            items = iter(items)
            while self._may_draw():
                if not self._offer((next(items), None)):
                    return
        except BaseException as error:  # whatever it is, the main thread must hear of it
            self._offer((None, error))

    def _may_draw(self) -> bool:
        while not self._stop.is_set():
            if self._gate is None or self._gate.wait(timeout=0.1):
                return True
        return False

    def _offer(self, entry) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(entry, timeout=0.1)
                return True
        return False


def data_folder(cfg: Config, say: Callable = print) -> Path:
    """Where the shards are: cfg.data under the current folder or beside this file.

    The demo corpus of the `tiny` preset is made on first use from the text that every Python
    installation carries.
    """
    folder = Path(cfg.data)
    if not folder.is_absolute() and not folder.exists():
        folder = HERE / folder
    demo = HERE / PRESETS["tiny"].data
    made = all(list(demo.glob(name)) for name in ("*_train_*.bin", "*_val_*.bin", MERGES))
    if folder.resolve() == demo.resolve() and not made and jax.process_index() == 0:
        say(f"making the demo corpus in {folder}")
        sys.modules.setdefault("train_gpt", sys.modules[__name__])  # the tool imports this module
        runpy.run_path(str(HERE / "data" / "builtin_corpus.py"))["build"](folder)
    from_first("")  # the others wait until it is there
    if not folder.is_dir():
        raise UserError(
            f"no folder {folder}: get the tokens with data/cached_fineweb10B.py, or name a --data"
        )
    return folder


# ------------------------------------------------------------------------------------------------
# Checkpoint: RUN_DIR/checkpoints/<step>/ with .npy files of the arrays' rows, and meta.json
# ------------------------------------------------------------------------------------------------

KEPT = 2  # the newest checkpoints of a run; older ones are deleted
PART_SECONDS = 120  # that process 0 waits for the parts of the others


class Saved(NamedTuple):
    """A checkpoint whose files are whole."""

    folder: Path
    cfg: Config
    step: int  # steps done
    cursor: int
    train_time_ms: float
    validated: bool  # a validation due after `step` steps has been done
    devices: int  # of the run that wrote it
    logs: dict  # file name -> bytes that it had; what came later is of steps that are lost
    data: dict  # the answer of check_tokens
    source_sha256: str
    files: dict  # file name -> {first: its first row, bytes, crc32}

    def parts(self, stem: str) -> list[tuple[int, Path]]:
        """(first row, file) of the parts of one array, in order."""
        names = [name for name in self.files if name.rsplit(".", 2)[0] == stem]
        return sorted((self.files[name]["first"], self.folder / name) for name in names)


def own_arrays(tree) -> dict[str, tuple[int, list[np.ndarray]]]:
    """Copies on the host of what this process writes: {"kind.name": (first row, pieces in order)}.

    Of what is cut, each process writes its devices' rows, which lie together; of what every device
    has, the one with the first replica. All transfers begin before the first one is waited for.
    """
    pieces = {}
    for path, array in jax.tree.leaves_with_path(tree):
        own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        for shard in own:
            shard.data.copy_to_host_async()
        if own:
            own.sort(key=lambda shard: shard.index[0].start or 0)
            pieces[".".join(part.key for part in path)] = own
    return {
        stem: (own[0].index[0].start or 0, [on_host(shard.data) for shard in own])
        for stem, own in pieces.items()
    }


def on_host(array: jax.Array) -> np.ndarray:
    """A copy that stays when the array is donated; of a CPU's arrays numpy would give a view."""
    return np.array(array) if array.device.platform == "cpu" else np.asarray(array)


def write_durably(path: Path, content) -> dict:
    """Write an array as .npy, or a text, to the disk itself; returns {bytes, crc32}."""
    crc, size = 0, 0

    class Counting:
        def write(self, data):
            nonlocal crc, size
            crc, size = zlib.crc32(data, crc), size + len(data)
            file.write(data)

    with open(path, "wb") as file:
        if isinstance(content, str):
            Counting().write(content.encode())
        else:
            np.save(Counting(), content, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": crc}


def sync_folder(path: Path):
    """Bring the names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(path: Path):
    """Remove a folder, or what else has its name (rmtree would wait for a pipe), if possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_part(temporary: Path, arrays: dict) -> dict:
    """Write the arrays of this process; returns {file name: {first, bytes, crc32}}."""
    files = {}
    for stem, (first, pieces) in arrays.items():
        array = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if array.dtype.kind == "f" and not np.isfinite(array.sum(dtype=np.float64)):
            raise OSError(f"{stem} is not finite")
        if array.dtype == jnp.bfloat16:
            array = array.view(np.uint16)  # .npy has no bfloat16
        name = f"{stem}.{jax.process_index()}.npy"
        files[name] = {"first": first, **write_durably(temporary / name, array)}
    return files


def parts_of_others(temporary: Path, given_up: threading.Event | None) -> dict:
    """What the other processes have written into the folder that all share, once they have."""
    files, deadline = {}, time.monotonic() + PART_SECONDS
    for rank in range(1, jax.process_count()):
        manifest = temporary / f"{rank}.json"
        while not manifest.exists():
            if (given_up and given_up.is_set()) or time.monotonic() > deadline:
                raise OSError(f"no part of process {rank}: does it see {temporary.parent}?")
            time.sleep(0.05)
        found = json.loads(manifest.read_text())
        if "error" in found:
            raise OSError(f"process {rank}: {found['error']}")
        manifest.unlink()
        files |= found
    return files


def write_checkpoint(
    folder: Path, arrays: dict, meta: dict, given_up: threading.Event | None = None
):
    """Write what this process has of a checkpoint; process 0 makes it visible when it is whole.

    Everything goes into a folder that begins with a dot, to which process 0 gives its name, the
    step, last of all: a checkpoint that can be seen is complete. Raises OSError, and leaves the
    older checkpoints as they are. `given_up` ends the wait for other processes.
    """
    step, rank = str(meta["step"]), jax.process_index()
    temporary = folder / f".{step}"
    temporary.mkdir(parents=True, exist_ok=True)
    if rank:
        try:
            files = write_part(temporary, arrays)
        except Exception as error:
            files = {"error": str(error)}
        write_durably(temporary / f"{rank}.new", json.dumps(files))
        os.replace(temporary / f"{rank}.new", temporary / f"{rank}.json")
        return
    files = write_part(temporary, arrays) | parts_of_others(temporary, given_up)
    body = json.dumps({**meta, "files": files}, sort_keys=True)
    check = {"crc32": zlib.crc32(body.encode()), "checkpoint": json.loads(body)}
    write_durably(temporary / "meta.json", json.dumps(check, sort_keys=True, indent=1))
    sync_folder(temporary)
    os.rename(temporary, folder / step)
    sync_folder(folder)
    for old in sorted(x for x in checkpoint_steps(folder) if x <= meta["step"])[:-KEPT]:
        remove(folder / str(old))


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of what looks like a checkpoint in RUN_DIR/checkpoints."""
    names = re.compile(r"0|[1-9]\d{0,11}")
    return [int(path.name) for path in folder.glob("*") if names.fullmatch(path.name)]


def is_count(value) -> bool:
    """Whether a value from JSON can be a number of rows, bytes or tokens."""
    return type(value) is int and 0 <= value < 2**63


def read_checkpoint(folder: Path) -> Saved:
    """The checkpoint in `folder`, every byte of it checked; ValueError, OSError... if damaged."""
    file_size(folder / "meta.json")
    found = json.loads((folder / "meta.json").read_text())
    meta = found["checkpoint"]
    if zlib.crc32(json.dumps(meta, sort_keys=True).encode()) != found["crc32"]:
        raise ValueError("meta.json has been changed")
    if meta["step"] != int(folder.name):
        raise ValueError(f"it is of step {meta['step']}")
    for name, file in meta["files"].items():
        crc, path = 0, folder / Path(name).name
        if Path(name).name != name or file_size(path) != file["bytes"]:
            raise ValueError(f"{name} is not as it was written")
        with open(path, "rb") as data:
            while piece := data.read(2**24):
                crc = zlib.crc32(piece, crc)
        if crc != file["crc32"] or not is_count(file["first"]):
            raise ValueError(f"{name} is not as it was written")
    saved = Saved(folder=folder, cfg=config_from_json(meta.pop("config")), **meta)
    place = saved.step, saved.cursor, saved.devices, saved.train_time_ms, saved.validated
    if not (
        all(map(is_count, (*place[:3], *saved.logs.values())))
        and type(saved.train_time_ms) is float
        and 0 <= saved.train_time_ms < math.inf
        and type(saved.validated) is bool
        and saved.step <= saved.cfg.steps
        and saved.devices > 0
        and STATE_CUTS % saved.devices == 0
    ):
        raise ValueError(f"step, cursor, devices, time, validated: {place}, logs: {saved.logs}")
    return saved


def find_checkpoint(run_dir: Path, say: Callable = print) -> Saved:
    """The newest whole checkpoint of a run; damaged ones are passed over with a warning."""
    folder = run_dir / "checkpoints"
    for step in sorted(checkpoint_steps(folder), reverse=True):
        try:
            return read_checkpoint(folder / str(step))
        except (OSError, UserError, LookupError, *ODD) as error:
            say(f"warning: {folder / str(step)} cannot be used ({error}): skipped")
    raise UserError(f"no checkpoint in {run_dir}: name the folder of a run, such as logs/<run id>")


def set_aside(saved: Saved):
    """Rename the later checkpoints, which were passed over: no resume must go on from them."""
    folder = saved.folder.parent
    for later in (step for step in checkpoint_steps(folder) if step > saved.step):
        remove(folder / f"damaged-{later}")
        os.rename(folder / str(later), folder / f"damaged-{later}")


def read_rows(saved: Saved, stem: str, dtype, shape) -> Callable:
    """A function (start, stop) -> these rows of an array [shape] of a checkpoint, memory-mapped."""
    stored, parts, rows = np.dtype(np.uint16 if dtype == jnp.bfloat16 else dtype), [], 0
    for first, path in saved.parts(stem):
        try:
            with np.errstate(over="ignore"):  # of a shape beyond all numbers, which is refused
                array = np.lib.format.open_memmap(path, mode="r")  # refuses pickles and archives
        except (OSError, *ODD, tokenize.TokenError) as error:
            raise UserError(f"{path} cannot be loaded ({error}): use another checkpoint") from None
        same = array.dtype == stored and array.shape[1:] == shape[1:] and array.ndim == len(shape)
        if not same or first != rows:
            raise UserError(
                f"{path} holds {array.dtype}{list(array.shape)} from row {first} on, this "
                f"train_gpt.py expects {stored}{list(shape)}, from row {rows} on"
            )
        parts.append((first, array))
        rows += len(array)
    if rows != shape[0]:
        raise UserError(f"{saved.folder} holds {rows} of {shape[0]} rows of {stem}")

    def read(start: int, stop: int):
        pieces = [x[max(start - at, 0) : stop - at] for at, x in parts if at < stop]
        pieces = [x for x in pieces if len(x)] or [parts[0][1][:0]]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return whole.view(dtype) if stored != dtype else whole

    return read


def load_arrays(saved: Saved, wanted):
    """The arrays of a checkpoint, straight onto their devices.

    `wanted` is the tree of ShapeDtypeStructs {kind: {name: ...}} to load; shapes and dtypes must be
    the parameter table's. Each device reads only its own rows, on however many devices the run was.
    """

    def load(path, leaf):
        read = read_rows(saved, ".".join(part.key for part in path), leaf.dtype, leaf.shape)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: read(*index[0].indices(leaf.shape[0])[:2])
        )

    return jax.tree.map_with_path(load, wanted)


def load_waiting(saved: Saved, mesh: Mesh) -> dict[str, tuple]:
    """The gradients that wait for Adam's next step, as split_due takes them.

    Each device has those of its own rows of tokens. On fewer devices than before, each takes the
    sum of several; on more, the first of each group has them and the others zeros.
    """
    cfg, waiting, old, new = saved.cfg, {}, saved.devices, mesh.size
    if (count := saved.step % cfg.adam_every) == 0:
        return waiting
    for name, leaves in abstract_due(cfg, mesh, Variant("update", adam=True)).items():
        leaf, each = leaves[0], leaves[0].shape[0] // new
        if param_table(cfg)[name].optimizer != "adam":
            continue

        def load(i, name=name, leaf=leaf, each=each):
            shape = (old * each, *leaf.shape[1:])
            read = read_rows(saved, f"waiting{i}.{name}", leaf.dtype, shape)

            def rows(index):
                device = index[0].indices(leaf.shape[0])[0] // each
                if old < new:
                    first, empty = divmod(device, new // old)
                    one = read(first * each, (first + 1) * each)
                    return np.zeros_like(one) if empty else one
                group = range(device * (old // new), (device + 1) * (old // new))
                parts = [read(k * each, (k + 1) * each) for k in group]
                if len(parts) == 1:
                    return parts[0]
                return sum(part.astype(np.float32) for part in parts).astype(leaf.dtype)

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, rows)

        waiting[name] = tuple(load(i) for i in range(count))
    return waiting


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


MATTERS = re.compile(r"(XLA|JAX|LIBTPU|TPU|CUDA|NVIDIA|CUDNN|CUBLAS|NCCL|OMP)_\w+|TF_XLA_FLAGS")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.I)


def environment() -> dict[str, str]:
    """The variables that jax and what is below it listen to; none whose name sounds secret."""
    names = (name for name in sorted(os.environ) if MATTERS.fullmatch(name))
    return {name: os.environ[name] for name in names if not SECRET.search(name)}


def make_folder(path: Path, option: str):
    """Make a folder that the user named; UserError if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}: name another folder") from None


class LogFile:
    """A file at whose end text is written at once, so that a crash loses nothing.

    What a full disk refuses is kept, and written with the next text. `size` cuts the file first.
    """

    def __init__(self, path: Path, size: int | None):
        if path.exists():
            file_size(path)
        self.file, self.kept = open(path, "ab", buffering=0), b""
        self.lock = threading.Lock()  # the loop and the Keeper's thread write
        if size is not None and size < self.file.tell():
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    def write(self, text: str):
        """Append `text`; OSError if not all of it could be written."""
        with self.lock:
            self.kept += text.encode("utf-8", "backslashreplace")
            while self.kept:
                self.kept = self.kept[self.file.write(self.kept) :]

    def size(self) -> int:
        """Bytes of the file, with those that are still to be written."""
        with self.lock:
            return self.file.tell() + len(self.kept)


class RunLog:
    """The files of one run. Opening it fails early, before anything is compiled, if OUT is bad.

    Later on no failure to write ends the run: it is reported once, and tried again. Only process 0
    has files; on the others all methods do nothing. Of a resumed run `sizes` says how much of each
    file is of the steps before its checkpoint.
    """

    NAMES = ("log.txt", "metrics.jsonl")

    def __init__(self, run_dir: Path, facts: dict, sizes: dict | None, say: Callable = print):
        self.run_dir, self.facts, self.say, self.files = run_dir, facts, say, {}
        self.resumed, self.warned = sizes is not None, False
        if jax.process_index():
            return
        try:
            run_dir.mkdir(parents=True, exist_ok=self.resumed)
            for name in self.NAMES:
                self.files[name] = LogFile(run_dir / name, (sizes or {}).get(name))
            for partial in (run_dir / "checkpoints").glob(".*"):
                remove(partial)
            self._write_facts()
        except OSError as error:
            raise UserError(
                f"cannot write {run_dir} ({error.strerror}): name another --out"
            ) from None
        devices, rule = facts["devices"], "=" * 100
        about = "\n".join(f"{k} {v}" for k, v in facts["versions"].items())
        about += f"\n{devices['count']} x {devices['kind']} ({devices['platform']})"
        about += f"\n{facts['host']['platform']}\ncommand: {facts['command']}"
        for name in ("host", "environment", "choices", "data"):
            about += f"\n{name}: {json.dumps(facts[name])}"
        if self.resumed:
            self.line(f"{rule}\nresumed\n{about}\n{rule}")
        else:
            source, config = Path(__file__).read_text(), json.dumps(facts["config"])
            self.line(f"{source}\n{rule}\n{about}\nconfig: {config}\n{rule}")

    def _write_facts(self):
        temporary = self.run_dir / "run.json.tmp"
        remove(temporary)
        temporary.write_text(json.dumps(self.facts, indent=1) + "\n")
        os.replace(temporary, self.run_dir / "run.json")

    def _try(self, write: Callable, *args):
        if self.files:
            try:
                write(*args)
            except OSError as error:
                if not self.warned:
                    self.say(f"warning: cannot write {self.run_dir} ({error}); the run goes on")
                self.warned = True

    def write_facts(self, **changes):
        """Put `changes` into run.json, atomically."""
        self.facts.update(changes)
        self._try(self._write_facts)

    def line(self, text: str):
        """One line into log.txt."""
        self._try(lambda: self.files["log.txt"].write(text + "\n"))

    def metric(self, **fields):
        """One object into metrics.jsonl."""
        self._try(lambda: self.files["metrics.jsonl"].write(json.dumps(fields) + "\n"))

    def sizes(self) -> dict[str, int]:
        """Bytes of each file so far."""
        return {name: file.size() for name, file in self.files.items()}

    def sync(self):
        """Bring the files to the disk itself."""
        for file in self.files.values():
            self._try(os.fsync, file.file.fileno())

    def close(self):
        """Try once more to write what is kept; close the files."""
        for file in self.files.values():
            self._try(file.write, "")
            file.file.close()


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


# ------------------------------------------------------------------------------------------------
# Sampling
# ------------------------------------------------------------------------------------------------


BYTE_BPE_PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"  # no merge crosses these


def byte_bpe(merges=()):
    """A tiktoken Encoding: ids 0-255 are the bytes, then `merges` in order, last <|endoftext|>.

    Without merges it is the encoding "bytes", in which every token is one byte.
    """
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {merged: 256 + i for i, merged in enumerate(merges)}
    return tiktoken.Encoding(
        name="byte_bpe",
        pat_str=BYTE_BPE_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )


def text_encoding(name: str, folder: Path | None = None):
    """The tiktoken Encoding gpt2, bytes, or bpe, whose merges.json is in `folder`."""
    if name == "bytes":
        return byte_bpe()
    if name == "bpe":
        try:
            file_size(folder / MERGES)
            merges = json.loads((folder / MERGES).read_text())
            if not isinstance(merges, list):
                raise ValueError("no list of merges")
            merges = [bytes.fromhex(text) for text in merges]
            if len({*merges}) < len(merges) or min(map(len, merges), default=2) < 2:
                raise ValueError("a merge twice, or of less than two bytes")
        except (OSError, *ODD) as error:
            raise UserError(
                f"{folder / MERGES} cannot be used ({error}): make the data again"
            ) from None
        return byte_bpe(merges)
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # it downloads its ranks on first use, through requests
        raise UserError(
            f"tiktoken cannot load the GPT-2 encoding ({type(error).__name__}): "
            "connect to the network once, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from None


def decode(cfg: Config, folder: Path, tokens) -> str:
    """Text of real tokens; padding ids of the table have none and are left out."""
    encoding = text_encoding(cfg.encoding, folder)
    return encoding.decode([int(x) for x in tokens if x < encoding.n_vocab])


def sample(cfg: Config, saved: Saved, prompt: str, count: int = 0, temperature=0.7) -> str:
    """Continue `prompt` by `count` (default cfg.sample_tokens or 64) tokens from a checkpoint.

    The whole row is computed again for each token: a few seconds at the size of a demonstration,
    and no second implementation of the model that could disagree with the first.
    """
    cfg, run_dir = dataclasses.replace(cfg, devices=1, attention="auto"), saved.folder.parents[1]
    mesh = make_mesh(cfg)
    params = load_arrays(saved, {"params": abstract_state(cfg, mesh)["params"]})["params"]
    attend = ATTENTION[attention_on(cfg, mesh.devices.flat[0])[0]]
    copies = jax.jit(functools.partial(compute_copies, cfg))(params)

    @jax.jit
    def next_token(copies, tokens_t, last, key):
        rows = look_up(cfg, copies, tokens_t[None])
        hyper = hyper_at(cfg, max(saved.step - 1, 0))
        x_btd = forward(copies, rows, tokens_t[None], cfg, cfg.val_windows, hyper, attend)
        z_v = jnp.matmul(copies["head"], x_btd[0, last], preferred_element_type=jnp.float32)
        logits_v = cap_logits(z_v, cfg)
        real = jnp.arange(cfg.vocab) < cfg.real_tokens
        return jax.random.categorical(key, jnp.where(real, logits_v / temperature, -jnp.inf))

    tokens = [cfg.bos, *text_encoding(cfg.encoding, run_dir).encode_ordinary(prompt)]
    start, count = len(tokens), count or cfg.sample_tokens or 64
    length = min(cfg.val_row, -(-(start + count) // 128) * 128)  # kernels want multiples of 128
    key = jax.random.key(cfg.seed)
    for i in range(count):
        recent = tokens[-length:]
        row = np.array(recent + [cfg.bos] * (length - len(recent)), np.int32)
        tokens.append(int(next_token(copies, row, len(recent) - 1, jax.random.fold_in(key, i))))
        if tokens[-1] == cfg.bos:
            break
    return decode(cfg, run_dir, [x for x in tokens[start:] if x != cfg.bos])


def demonstrate(cfg: Config, run_dir: Path, val: TokenStream, val_loss: float) -> str:
    """What the end of a demonstration run prints: compression, next to gzip's and xz's; a sample.

    A model that gives text a loss of x nats could, with an arithmetic coder, store it in x / ln 2
    bits. The comparison is on the very text that the validation used.
    """
    tokens = val.read(1, cfg.val_tokens)
    text = decode(cfg, run_dir, tokens[tokens != cfg.bos]).encode()
    ours = val_loss * cfg.val_tokens / math.log(2) / len(text)
    gz, xz = (
        8 * len(f(text)) / len(text) for f in (gzip.compress, lambda t: lzma.compress(t, preset=9))
    )
    prompt = decode(cfg, run_dir, tokens[:48])
    return (
        f"bits per byte of the validation text: {ours:.3f}; gzip -9: {gz:.3f}; xz -9: {xz:.3f}\n"
        f"a sample, from the bar on:\n{prompt}|" + sample(cfg, find_checkpoint(run_dir), prompt)
    )


# ------------------------------------------------------------------------------------------------
# Clock and progress
# ------------------------------------------------------------------------------------------------


class Clock:
    """Milliseconds of training: runs from start() to stop(), and carries over a resume.

    `running` is set meanwhile; the loader waits for it, so that it gets no work done for free.
    """

    def __init__(self, elapsed_ms: float = 0.0):
        self._total, self._since = elapsed_ms, None
        self.running = threading.Event()

    def start(self):
        """Count, if it does not already."""
        if not self.running.is_set():
            self._since = time.perf_counter()
            self.running.set()

    def stop(self):
        """Hold."""
        self._total, self._since = self.ms(), None
        self.running.clear()

    def ms(self) -> float:
        """Training time so far."""
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._total + 1000 * running


def warm_up(cfg: Config, mesh: Mesh, programs):
    """Run every program once on dummy tokens, so that first-call costs are outside the clock."""
    state = programs["init"](put(np.uint32(0), mesh, P()))
    copies, hyper = programs["copies"](state["params"]), put_hyper(cfg, 0, mesh)
    grads = None
    for variant in executions(cfg):
        if variant.kind == "update":  # there are gradients: the first program is a `grads`
            due = {n: (grads[n],) * len(x) for n, x in abstract_due(cfg, mesh, variant).items()}
            state, changed = programs[variant](state, due, hyper)
            copies |= changed
            del due  # not more gradients beside the next program than beside a step
        else:
            rows = np.full((variant.rows, variant.row_tokens + 1), cfg.bos, np.uint16)
            tokens, trains = put(rows, mesh, P(AXIS)), variant.kind == "grads"
            wishes = [put(np.zeros((mesh.size, 2), np.float32), mesh, P(AXIS))] * trains
            out = programs[variant](copies, tokens, hyper, *wishes)
            grads = out[0] if trains else grads
    jax.block_until_ready((state, copies, out))


def evaluate(cfg: Config, mesh: Mesh, programs, copies, step: int, stream: TokenStream) -> float:
    """Mean loss in nats over the first val_tokens of the validation split, after `step` steps."""
    program, hyper = programs[eval_variant(cfg)], put_hyper(cfg, max(step - 1, 0), mesh)
    sums = [program(copies, tokens, hyper) for tokens in val_batches(cfg, mesh, stream)]
    return float(np.sum([np.asarray(x, np.float64) for x in sums])) / cfg.val_tokens


class Keeper:
    """Saves checkpoints beside training: save() copies to the host, a thread writes to the disk."""

    def __init__(
        self, log: RunLog, clock: Clock, cfg: Config, devices: int, newest: Path | None, say
    ):
        self.log, self.clock, self.say = log, clock, say
        self.newest, self.missing = newest, ""  # a folder; why there is no later one
        self.fixed = {"config": dataclasses.asdict(cfg), "devices": devices}
        self.fixed |= {key: log.facts[key] for key in ("data", "source_sha256")}
        self.thread, self.given_up = threading.Thread(), threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        if kind is not None:  # another process may have died: its part will never come
            self.given_up.set()
        self.close()

    def save(self, step: int, cursor: int, validated: bool, state, waiting):
        """Copy what a resume needs to the host, and leave the rest to the thread.

        Waits for the state, and for the checkpoint before if that is not written yet.
        """
        began = time.perf_counter()
        self.close()
        queued = {f"waiting{i}": {} for i in range(max(map(len, waiting.values()), default=0))}
        for name, grads in waiting.items():
            for i, grad in enumerate(grads):
                queued[f"waiting{i}"][name] = grad
        arrays = own_arrays({**state, **queued})
        meta = {"step": step, "cursor": cursor, "validated": validated, **self.fixed}
        meta |= {"train_time_ms": self.clock.ms(), "logs": self.log.sizes()}
        held = 1000 * (time.perf_counter() - began)
        self.thread = threading.Thread(target=self._write, args=(arrays, meta, held))
        self.thread.start()

    def _write(self, arrays, meta, held: float):
        began, step = time.perf_counter(), meta["step"]
        folder = self.log.run_dir / "checkpoints"
        try:
            self.log.sync()
            write_checkpoint(folder, arrays, meta, self.given_up)
        except Exception as error:  # whatever it is, the run must hear of it, and goes on
            self.missing = f"there is no checkpoint of step {step}: {error}"
            self.say(f"warning: {self.missing}; older ones stay")
            if jax.process_index() == 0:
                remove(folder / f".{step}")
            return
        self.missing, self.newest = "", folder / str(step)
        size = sum(piece.nbytes for _, pieces in arrays.values() for piece in pieces)
        seconds = time.perf_counter() - began
        self.log.line(
            f"checkpoint:{step} held the loop for {held:.1f}ms, "
            f"{size / 1e6:.1f} MB written in {seconds:.2f}s"
        )

    def close(self):
        """Wait until the last one is written."""
        if self.thread.ident is not None:
            self.thread.join()


class Progress:
    """Turns finished steps into log lines, metrics and, now and then, a line on the terminal."""

    def __init__(
        self, cfg: Config, mesh: Mesh, log: RunLog, clock: Clock, keeper: Keeper, step: int, say
    ):
        self.cfg, self.log, self.clock, self.keeper, self.say = cfg, log, clock, keeper, say
        self.tokens = sum(stage_at(cfg, now).batch_tokens for now in range(step))
        self.flops, self.resumed_at = 0.0, step
        peak = hardware(mesh.devices.flat[0].device_kind).peak
        self.peak = peak and peak * mesh.size
        self.mark = (clock.ms(), self.flops, self.tokens)  # at the last line on the terminal

    def line(self, step: int, extra: str = "") -> str:
        """The original speedrun's line for `step` steps done; `extra` is the validation loss."""
        ms = self.clock.ms()
        average = ms / max(step, 1)
        return f"step:{step}/{self.cfg.steps} {extra}train_time:{ms:.0f}ms step_avg:{average:.2f}ms"

    def trained(self, step: int, report) -> np.ndarray:
        """Wait for the report of the step that makes `step` steps (the next one is under way).

        Returns the wishes in it.
        """
        report, stage = np.asarray(report), stage_at(self.cfg, step - 1)
        loss = float(report[0])
        self.must_be_sane(step, loss)
        self.tokens += stage.batch_tokens
        self.flops += stage.batch_tokens * flops_per_token(self.cfg)
        ms, line = self.clock.ms(), self.line(step)
        self.log.line(line)
        self.log.metric(
            step=step,
            train_loss=round(loss, 6),
            train_time_ms=round(ms, 3),
            tokens=self.tokens,
            lr=lr_scale(self.cfg, step - 1),
        )
        if step % self.cfg.log_every == 0 or step == self.resumed_at + 1:
            seconds = max(ms - self.mark[0], 1e-6) / 1000
            speed = f"{(self.tokens - self.mark[2]) / seconds:,.0f} tok/s"
            if self.peak:
                speed += f" mfu:{(self.flops - self.mark[1]) / seconds / self.peak:.1%}"
            eta = (self.cfg.steps - step) * ms / step / 1000
            self.say(f"{line} train_loss:{loss:.4f} {speed} eta:{eta:.0f}s")
            self.mark = (ms, self.flops, self.tokens)
        return report[1:]

    def must_be_sane(self, step: int, loss: float):
        """UserError if the run has diverged: no finite loss, or twice that of a uniform guess."""
        if not loss < 2 * math.log(self.cfg.vocab):
            self.keeper.close()
            kept = f"the steps before are in {self.log.run_dir}/metrics.jsonl"
            if self.keeper.newest:
                kept = f"the last good checkpoint is {self.keeper.newest}"
            raise UserError(
                f"the loss of step {step} is {loss:.4g}: lower the learning rates "
                f"(--set lr_muon=...); {kept}"
            )

    def validated(self, step: int, loss: float):
        """Write down the validation loss after `step` steps; the clock stands still."""
        self.must_be_sane(step, loss)
        line = self.line(step, f"val_loss:{loss:.4f} ")
        self.log.line(line)
        self.log.metric(
            step=step,
            val_loss=round(loss, 6),
            train_time_ms=round(self.clock.ms(), 3),
            tokens=self.tokens,
        )
        self.count(step, val_loss=round(loss, 6))
        self.say(line)

    def count(self, step: int, **facts):
        """Put into run.json how far the run is."""
        ms = round(self.clock.ms(), 3)
        self.log.write_facts(steps=step, tokens=self.tokens, train_time_ms=ms, **facts)


# ------------------------------------------------------------------------------------------------
# Training: the loop, and what stands around it
# ------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """The run was asked to end early, and has saved where it is; `number` is that of the signal."""

    def __init__(self, text: str, number: int):
        super().__init__(text)
        self.number = number


class Wishes:
    """What this process wishes all to do: save now (checkpoint_seconds are over), or end.

    One process must not act alone, so the wishes travel with every step and come back summed, at
    the same step for all: two numbers more in the collective that is there for the loss. Inside
    `with`, SIGTERM and Ctrl-C are wishes to end; another one, a second or more later (some send
    the same one twice), ends the process as ever.
    """

    def __init__(self, cfg: Config, mesh: Mesh):
        self.seconds, self.signal, self.saved = cfg.checkpoint_seconds, 0, time.monotonic()
        choices = [(save, end) for save in (False, True) for end in (False, True)]
        self.arrays = {  # on the devices already: choosing one costs a step nothing
            both: put(np.tile(np.float32(both), (mesh.size, 1)), mesh, P(AXIS)) for both in choices
        }
        self.before = {}

    def now(self) -> jax.Array:
        """The wishes of this moment, [devices, 2]."""
        late = self.seconds > 0 and time.monotonic() - self.saved > self.seconds
        return self.arrays[late, self.signal > 0]

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *exc):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _caught(self, number, frame):
        if self.signal and time.monotonic() > self.caught + 1:
            self.__exit__()
            signal.raise_signal(number)
        elif not self.signal:
            self.signal, self.caught = number, time.monotonic()


PROFILE_STEPS = (20, 24)  # of this process: what --profile traces, well after the start


def run_step(cfg: Config, programs, variants, state, copies, waiting, batch, wishes, between=None):
    """Run the two programs of a step: (state, copies, gradients that wait on, report).

    `variants` are its step_variants.

    between(state, waiting) is called after the first: the devices compute gradients, and do not
    need the state, which the second consumes.
    """
    grads_of, update = variants
    grads, report = programs[grads_of](copies, batch.tokens, batch.hyper, wishes)
    if between is not None:
        between(state, waiting)
    due, waiting = split_due(cfg, update, waiting, grads)
    state, changed = programs[update](state, due, batch.hyper)
    return state, copies | changed, waiting, report


def run_steps(cfg: Config, mesh: Mesh, programs, streams, begin, start, progress, profile):
    """The loop: from `start` (step, cursor, validated) to the end of the run; returns val_loss.

    `streams` are the training and the validation TokenStream; begin() makes the state and the
    gradients that wait, which nobody else may hold, or their memory would not come free. The clock
    runs but for the pauses in which the run validates, and after its end; the devices are idle when
    it stops and when it starts again. A checkpoint on the way is taken with the clock running.
    Raises Stopped.
    """
    clock, first, cursor = progress.clock, start["step"], start["cursor"]
    state, waiting = begin()
    copies, wishes = programs["copies"](state["params"]), Wishes(cfg, mesh)
    jax.block_until_ready((state, copies, waiting))
    pending, asked, saved = None, np.zeros(2), first  # the last report; its wishes; the last save

    def finish():
        nonlocal pending, asked
        if pending is not None:  # a wish to save that was sent before the last save is fulfilled
            made, report = pending
            asked, pending = progress.trained(made, report) * [made > saved + 1, 1], None

    batches = train_batches(cfg, mesh, streams[0], first, cursor)
    loader = Prefetch(batches, cfg.prefetch, clock.running, progress.say)
    keeper = progress.keeper
    with loader, wishes, keeper:
        supply = iter(loader)
        for step in range(first, cfg.steps + 1):
            ends, stops, begins = step == cfg.steps, asked[1] > 0, step == first
            saves = asked[0] > 0 or (every(cfg.checkpoint_every, step) and not begins)
            validates = ends or (every(cfg.val_every, step) and not stops)
            validates = validates and not (begins and start["validated"])
            save = functools.partial(keeper.save, step, cursor)
            if validates or ends or stops:
                finish()
                jax.block_until_ready(state)
                clock.stop()
                if validates:
                    val_loss = evaluate(cfg, mesh, programs, copies, step, streams[1])
                    progress.validated(step, val_loss)
                if ends or stops:
                    save(not stops, state, waiting)
                    keeper.close()
                if ends:
                    return val_loss
                if stops:
                    progress.count(step)
                    if keeper.missing:
                        raise UserError(f"stopped after {step} steps, but {keeper.missing}")
                    raise Stopped(
                        f"stopped after {step} of {cfg.steps} steps; to continue: "
                        f"python train_gpt.py --resume {progress.log.run_dir}",
                        wishes.signal or signal.SIGTERM,
                    )
            clock.start()
            if profile and step - first == PROFILE_STEPS[0]:
                jax.profiler.start_trace(str(progress.log.run_dir / "profile"))
            batch = next(supply)

            def between(state, waiting, step=step, save=save):
                nonlocal asked, saved
                finish()
                save(True, state, waiting)
                asked, saved, wishes.saved = asked * [0, 1], step, time.monotonic()

            state, copies, waiting, report = run_step(
                *(cfg, programs, step_variants(cfg, step)),
                *(state, copies, waiting, batch, wishes.now()),
                between if saves else None,
            )
            cursor = batch.cursor
            finish()  # of the step before, while this one runs: no step waits for its loss
            pending = step + 1, report
            if profile and step - first == PROFILE_STEPS[1]:
                jax.block_until_ready(report)
                jax.profiler.stop_trace()


def what_runs(cfg: Config, mesh: Mesh, command: str) -> dict:
    """What the figures of a run or a benchmark stand on: source, versions, machine, config."""
    device = mesh.devices.flat[0]
    return {
        "preset": cfg.preset,
        "config": dataclasses.asdict(cfg),
        "seed": cfg.seed,
        "command": command,
        "source_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": versions(),
        "devices": {
            "kind": device.device_kind,
            "count": mesh.size,
            "platform": device.platform,
            "processes": jax.process_count(),
        },
        "host": host(),
        "environment": environment(),
        "choices": choices(cfg, mesh),
    }


def choices(cfg: Config, mesh: Mesh) -> dict:
    """What this file has decided for these devices; UserError where they cannot do what is asked.

    `at_a_time` has for each program how many rows it takes at once, whether layers are computed
    again on the way back, and the gigabytes that this is estimated to need.
    """
    device, at_a_time = mesh.devices.flat[0], {}
    check_fp8(cfg, device)
    backend, reason = attention_on(cfg, device)
    for variant in executions(cfg):
        if variant.kind == "grads":
            settled = fitted(cfg, variant, mesh)
            at_a_time[variant.name] = {
                "rows": micro_rows(settled, variant.rows // mesh.size, variant.row_tokens),
                "recompute": settled.recompute,
                "gigabytes": round(memory_needed(settled, variant, mesh) / 1e9, 1),
            }
    return {
        "attention": f"{backend} ({reason})",
        "table_gradients": adder_on(cfg, device),
        "compiler_options": compiler_options(cfg, device),
        "at_a_time": at_a_time,
    }


def say_choices(chosen: dict, mesh: Mesh, say: Callable):
    """Lines on the terminal about `choices`; of memory only where it is known how much there is."""
    say(f"attention: {chosen['attention']}")
    if (limit := memory_limit(mesh)) is None:
        return
    for name, how in chosen["at_a_time"].items():
        again = ", layers computed again on the way back" * (how["recompute"] == "layers")
        of = f"about {how['gigabytes']} of {limit / 1e9:.1f} GB"
        rows = f"{how['rows']} row{'s' * (how['rows'] > 1)} at a time"
        line = f"{name}: {rows}{again}, {of}"
        if 1e9 * how["gigabytes"] > limit:
            line = f"warning: {line}: use more devices, or recompute=auto and micro_tokens=0"
        say(line)


def train(
    cfg: Config, out: Path, command: str, resume: Saved | None = None, profile=False, say=print
):
    """Run the whole thing; returns the run's folder.

    Outside the clock: checks, compilation, warm-up (after which the state is made anew from the
    seed), validation, the last checkpoint. Inside: every training step, all loading of its data,
    and checkpoints on the way. Raises Stopped where a signal ended the run early.
    """
    fields = "step", "cursor", "train_time_ms", "validated"
    start = dict(zip(fields, resume[2:6] if resume else (0, 0, 0.0, False), strict=True))
    if start["step"] == cfg.steps:
        raise UserError(f"{resume.folder.parents[1]} is finished: there is nothing to resume")
    if profile and cfg.steps - start["step"] <= PROFILE_STEPS[1]:
        raise UserError(f"--profile needs more than {PROFILE_STEPS[1]} steps: raise --set steps=")
    mesh = make_mesh(cfg)
    facts = what_runs(cfg, mesh, command)  # what cannot be is said before anything is read
    source = data_folder(cfg, say)
    streams = TokenStream(source, "train", cfg.bos), TokenStream(source, "val", cfg.bos)
    data = check_tokens(cfg, *streams)
    if cfg.encoding == "bpe":
        text_encoding(cfg.encoding, source)

    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{cfg.preset}-s{cfg.seed}-{secrets.token_hex(3)}"
    run_dir = resume.folder.parents[1] if resume else out / from_first(stamp)
    facts = {"run_id": run_dir.resolve().name, **facts, "data": data}
    facts |= {"compile_seconds": {}, "steps": 0, "tokens": 0, "train_time_ms": 0.0}
    facts |= {"val_loss": None, "target": cfg.target, "resumed": bool(resume), "finished": False}
    same = {key: facts[key] for key in ("source_sha256", "versions", "config", "data")}
    agree({key: json.dumps(value) for key, value in {**same, "checkpoint": start}.items()})
    if resume and resume.data != data:
        raise UserError(
            f"{source} does not hold the shards that {run_dir} was trained on: name their --data"
        )
    if resume and resume.cursor != (cursor := cursor_after(cfg, streams[0], resume.step)):
        raise UserError(
            f"{resume.folder} says that its {resume.step} steps read {resume.cursor} tokens, but "
            f"they read {cursor}: use another checkpoint"
        )
    if resume and resume.source_sha256 != facts["source_sha256"]:
        say("warning: train_gpt.py has changed since; what follows may differ from what was")
    if resume and jax.process_index() == 0:
        set_aside(resume)
    with contextlib.closing(RunLog(run_dir, facts, resume and resume.logs, say)) as log:
        say(f"run {run_dir} on {mesh.size} x {mesh.devices.flat[0].device_kind}")
        say_choices(facts["choices"], mesh, say)
        if cfg.encoding == "bpe" and jax.process_index() == 0:
            shutil.copy(source / MERGES, run_dir)  # so that --sample needs the run's folder only
        programs, seconds = compile_all(cfg, mesh, say)
        log.write_facts(compile_seconds=seconds)
        warm_up(cfg, mesh, programs)

        def begin():
            if not resume:
                return programs["init"](put(np.uint32(cfg.seed), mesh, P())), {}
            say(f"resumed after {resume.step} of {cfg.steps} steps from {resume.folder}")
            return load_arrays(resume, abstract_state(cfg, mesh)), load_waiting(resume, mesh)

        clock = Clock(start["train_time_ms"])
        keeper = Keeper(log, clock, cfg, mesh.size, resume and resume.folder, say)
        progress = Progress(cfg, mesh, log, clock, keeper, start["step"], say)
        progress.count(start["step"])
        val_loss = run_steps(cfg, mesh, programs, streams, begin, start, progress, profile)
        peak = memory_peak_mib()
        log.line(f"peak memory allocated: {peak:.0f} MiB")
        log.write_facts(finished=True)
        met = "met" if val_loss <= cfg.target else "MISSED"
        say(
            f"target {cfg.target} {met}: val_loss {val_loss:.4f} after {clock.ms() / 1000:.1f} s "
            f"of training on {progress.tokens:,} tokens; peak memory {peak:.0f} MiB"
        )
    if keeper.missing:
        raise UserError(f"the run has ended well, but {keeper.missing}")
    if cfg.sample_tokens and jax.process_count() == 1:
        say(demonstrate(cfg, run_dir, streams[1], val_loss))
    return run_dir


# ------------------------------------------------------------------------------------------------
# Benchmark: how long the steps of each stage take, without a run around them
# ------------------------------------------------------------------------------------------------

BENCH_BATCHES = 4  # lie on the devices and are taken in turn
BENCH_CHUNKS = 5  # stretches of steps that are timed; their median counts
BENCH_SECONDS = 0.5  # a chunk takes at least this: to wait for its end costs well under 1 % of it
BENCH_DOCUMENT = 700  # mean length of random documents; FineWeb's: 100 M tokens / 150,000 a shard
BENCH_LINE = "{:35}{:>8}{:>9}{:>9}{:>9}{:>12}{:>9}{:>9}"  # 100 columns


def part_of(cfg: Config, devices: int, parts: int) -> Config:
    """`cfg` with the batches that are left for `devices` where `parts` devices share the whole.

    With it one GPU does what each of eight has to do for its rows. Of the update it does more: all
    of it, where each of eight updates an eighth. And its collectives cross no network.
    """
    stages = []
    for i, stage in enumerate(cfg.stages):
        if stage.rows % parts:
            raise UserError(
                f"--bench {parts}: stages.{i} has {stage.rows} rows, which {parts} devices cannot "
                "share equally: use a number that divides them"
            )
        tokens = stage.batch_tokens * devices // parts
        stages.append(dataclasses.replace(stage, batch_tokens=tokens))
    return dataclasses.replace(cfg, stages=tuple(stages))


def bench_batches(cfg: Config, mesh: Mesh, step: int, stream: TokenStream | None) -> list[Batch]:
    """Batches of the stage that `step` belongs to: the first of `stream`, or random ones.

    All have the Hyper of `step`. Random tokens are uniform over the real ids, with one document in
    BENCH_DOCUMENT tokens, since attention may pass over what is in another one; rows are not packed
    and documents not cut.
    """
    stage, hyper, cursor, batches = stage_at(cfg, step), put_hyper(cfg, step, mesh), 0, []
    rng, shape = np.random.default_rng(cfg.seed), (stage.rows, stage.row_tokens + 1)
    for _ in range(BENCH_BATCHES):
        if stream:
            rows, cursor = next_rows(stream, cursor, stage)
            check_ids(cfg, stream.paths[0].parent, rows)
        else:
            ids = rng.integers(cfg.real_tokens, size=shape, dtype=np.uint16)
            rows = np.where(rng.random(shape) < 1 / BENCH_DOCUMENT, np.uint16(cfg.bos), ids)
        batches.append(Batch(put_rows(rows, mesh, stage.rows), hyper, cursor))
    return batches


def time_chunks(cfg: Config, run: Callable) -> dict:
    """Times of run(steps) -> (seconds, loss), warm; the fields of its row in bench.json.

    Chunks are made of whole Adam periods, so that each kind of update has its share of them.
    """
    run(2 * cfg.adam_every)
    steps = cfg.adam_every
    while run(steps)[0] < BENCH_SECONDS:
        steps *= 2
    seconds, losses = zip(*(run(steps) for _ in range(BENCH_CHUNKS)), strict=True)
    each = [1e3 * x / steps for x in seconds]
    return {
        "ms": float(np.median(each)),
        "ms_min": min(each),
        "ms_max": max(each),
        "chunk_steps": steps,
        "chunk_ms": [1e3 * x for x in seconds],
        "loss": losses[-1],
    }


def bench(cfg: Config, parts: int, named: bool, dump: Path | None, command: str, say=print):
    """Time the steps of each stage, on random and on real tokens; the content of bench.json.

    The devices share the batches of each stage, or take their share of them among `parts` devices
    (0: as many as there are). Real tokens are the first of the data folder; where there are none,
    random ones have to do, unless the user has `named` the folder. The state goes from stage to
    stage, as in training. Utilization is of the peak in bfloat16, also with fp8. MiB are those of
    the stage's programs and of what stays beside them; what the devices tell of their peak holds
    for all stages so far (bench.json has both). Nothing is written but to `dump`.
    """
    mesh = make_mesh(cfg)
    device, parts, whole = mesh.devices.flat[0], parts or mesh.size, cfg
    cfg, peak = part_of(cfg, mesh.size, parts), hardware(device.device_kind).peak
    facts = what_runs(cfg, mesh, command) | {"config": dataclasses.asdict(whole), "parts": parts}
    if dump:
        make_folder(dump, "--dump")
    streams = {"random": None}
    try:
        streams["real"] = TokenStream(data_folder(cfg, say), "train", cfg.bos)
    except UserError as error:
        if named:
            raise
        say(f"random tokens only: {error}")
    say(f"{cfg.preset} on {mesh.size} x {device.device_kind}, each with 1/{parts} of every batch")
    say(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    say_choices(facts["choices"], mesh, say)

    updates = [Variant("update", adam=is_adam_step(cfg, i)) for i in range(cfg.adam_every)]
    stages = [(step, step_variants(cfg, step)[0]) for step in cfg.boundaries[:-1]]
    work = [  # before anything is compiled: the data may be too short
        (i, grads, kind, bench_batches(cfg, mesh, step, stream))
        for i, (step, grads) in enumerate(stages)
        for kind, stream in streams.items()
    ]
    wanted = dict.fromkeys([*(grads for _, grads in stages), *updates])  # each of them once
    programs, seconds = compile_all(cfg, mesh, say, wanted)
    state = programs["init"](put(np.uint32(cfg.seed), mesh, P()))
    copies, wishes = programs["copies"](state["params"]), Wishes(cfg, mesh).now()

    def run(grads, supply, steps):
        nonlocal state, copies
        waiting, report, start = {}, None, time.perf_counter()
        for i in range(steps):
            variants, before = (grads, updates[i % cfg.adam_every]), report
            state, copies, waiting, report = run_step(
                cfg, programs, variants, state, copies, waiting, next(supply), wishes
            )
            jax.block_until_ready(before)  # as in training, while this step runs
        jax.block_until_ready((state, copies))
        return time.perf_counter() - start, float(report[0])

    rows, head = [], ("stage", "tokens", "ms/step", "min", "max", "tokens/s", "of bf16", "MiB")
    say(BENCH_LINE.format(*head))
    for i, grads, kind, batches in work:
        times = time_chunks(cfg, functools.partial(run, grads, itertools.cycle(batches)))
        if not math.isfinite(times["loss"]):
            raise UserError(
                f"{grads.name}: the loss on {kind} tokens is {times['loss']}, and the time of such "
                "steps tells nothing: lower the learning rates (--set lr_muon=...)"
            )
        rate = 1e3 * grads.batch_tokens / times["ms"]
        needs = [
            resident_bytes(cfg, one, mesh) + program_bytes(programs[one])["peak"]
            for one in (grads, *updates)
        ]
        used = peak and rate * flops_per_token(cfg) / (mesh.size * peak)
        row = {"stage": i, "name": grads.name, "batch_tokens": grads.batch_tokens, "tokens": kind}
        row |= {**times, "tokens_per_second": rate, "utilization": used}
        row |= {"memory_mib": max(needs) / 2**20, "peak_so_far_mib": memory_peak_mib()}
        rows.append(row)
        cells = [f"{row[key]:.2f}" for key in ("ms", "ms_min", "ms_max")]
        cells += f"{rate:,.0f}", f"{used:.1%}" if used else "-", f"{row['memory_mib']:,.0f}"
        say(BENCH_LINE.format(f"{i} {grads.name}", kind, *cells))
    facts |= {"compile_seconds": seconds, "rows": rows}
    if dump:
        (dump / "bench.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


# ------------------------------------------------------------------------------------------------
# Preflight: will the run compile, fit and be fast on hardware that is not here?
# ------------------------------------------------------------------------------------------------

TOPOLOGIES = {"v6e-1": "v6e:1x1", "v6e-4": "v6e:2x2", "v6e-8": "v6e:2x4"}
GPU_TARGET = "h100x8"
# What the GPU compiler must know of an H100 SXM; figures of NVIDIA's data sheets.
H100 = """
device_description_str: "NVIDIA H100 80GB HBM3" platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3350000000000 device_memory_size: 80000000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
"""
# Estimated cycles per bundle: the same MLP has 5.29 M of them in XLA's fusions and 2.99 M bundles.
KERNEL_FACTOR = 1.77
# What libtpu would otherwise look for on a TPU's host; the last one keeps jax from asking for CUDA
# libraries that a machine without a GPU does not have.
NOBODY_HOME = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
COLLECTIVES = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"
CALIBRATION = """\
Made the same way for an earlier JAX port, the prediction was 0.295 s a step where its log has
0.307 s at 1024 tokens a row, 0.502 s for 0.424 s at 2048, and 667 s for 612 s of its whole run."""


class Instruction(NamedTuple):
    """One instruction of an optimized program, and how often it runs."""

    name: str
    shape: str  # of its result, as text
    op: str
    rest: str  # operands, then attributes
    times: int = 1
    in_loop: bool = False

    @property
    def cycles(self) -> int:
        """The compiler's estimate for one execution; 0 if it makes none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found[1]) if found else 0

    @property
    def collective(self) -> str | None:
        """Which of COLLECTIVES it is. A TPU's reduce-scatter can be a fusion of another name."""
        if self.op == "fusion" and self.called("calls").startswith("all-reduce-scatter"):
            return "reduce-scatter"
        return next((kind for kind in COLLECTIVES if self.op in (kind, f"{kind}-start")), None)

    def called(self, key: str) -> str:
        """The name after `key=`, or ""."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""

    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])


def hlo_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """({computation: {name: Instruction}}, name of the entry) of an HLO module as text."""
    found, entry = {}, ""
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\) -> .* \{\n)", text)[1:]:
        head = re.match(r"(ENTRY )?%?([\w.\-]+) ", block)
        lines = re.findall(
            r"^ +(?:ROOT )?%?([^\s=]+) = (.*?[\])}]) ([a-z][\w\-]*)\((.*(?:\n(?!\}$|  ).*)*)",
            block,
            re.MULTILINE,
        )
        found[head[2]] = {line[0]: Instruction(*line) for line in lines}
        entry = head[2] if head[1] else entry
    return found, entry


def loop_trips(one: Instruction, computations) -> int | None:
    """How often a while loop runs: written beside it, or the constant that its counter meets."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest):
        return int(known[1])
    condition = computations[one.called("condition")]
    for test in condition.values():
        if test.op == "compare" and "direction=LT" in test.rest:
            bound = condition.get(test.operands()[1])
            if bound is not None and bound.op == "constant":
                return int(bound.rest.split(")")[0])
    return None


def walk(text: str, notes: set):
    """Yield (Instruction, its computation) for all that a program executes.

    Loops multiply `times`; of a conditional the dearest branch counts; of fusions only those
    without an estimate are entered. What makes the sum doubtful goes into `notes`.
    """
    computations, entry = hlo_computations(text)

    def visit(name, times, in_loop):
        for one in computations[name].values():
            yield one._replace(times=times, in_loop=in_loop), computations[name]
            if one.op == "while":
                trips = loop_trips(one, computations)
                if trips is None:
                    notes.add(f"loop {one.name}, of unknown length, is counted once")
                yield from visit(one.called("body"), times * (trips or 1), True)
            elif one.op == "conditional":
                names = re.findall(r"%([\w.\-]+)", one.rest.split("), ", 1)[1])
                branches = [list(visit(name, times, in_loop)) for name in names]
                yield from max(branches, key=lambda branch: sum(x.cycles for x, _ in branch))
            elif one.op in ("call", "fusion", "async-start") and not (one.cycles or one.collective):
                yield from visit(one.called("to_apply") or one.called("calls"), times, in_loop)

    return visit(entry, 1, False)


def array_bytes(shape: str, op: str = "") -> int:
    """Bytes of all arrays in an HLO type; of a -start's, without its u32[] for bookkeeping."""
    if op.endswith("-start"):
        shape = shape.replace("u32[]", "")
    total = 0
    for dtype, sides in re.findall(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)  # pred has none
        total += math.prod(map(int, filter(None, sides.split(",")))) * int(bits[0] if bits else 8)
    return total // 8


def collectives(instructions, devices: int) -> dict[str, dict]:
    """{kind: {count, bytes, largest_bytes, in_loop, sent_bytes}} of what one device executes.

    Bytes are those of the whole buffer: before a reduce-scatter, after the others. Of these each
    device must send, or receive, (n-1)/n; for an all-reduce, which is both, twice that.
    """
    found = {}
    for one, _ in instructions:
        kind = one.collective
        if kind is None:
            continue
        groups = re.search(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])", one.rest)
        n = devices if groups is None else int(groups[2] or len(groups[1].split(",")))
        size, cut = array_bytes(one.shape, one.op), kind in ("reduce-scatter", "all-gather")
        if one.op.endswith("-start") and kind != "all-reduce":  # its type has operands and results
            size = size * n // (n + 1) if cut else size // 2
        elif kind == "reduce-scatter":
            size *= n
        sent = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
        empty = {"count": 0, "bytes": 0, "largest_bytes": 0, "sent_bytes": 0, "in_loop": False}
        row = found.setdefault(kind, empty)
        row["count"] += one.times
        row["bytes"] += one.times * size
        row["sent_bytes"] += round(one.times * size * sent)
        row["largest_bytes"] = max(row["largest_bytes"], size)
        row["in_loop"] |= one.in_loop
    return found


def moved_bytes(instructions) -> int:
    """Bytes that gathers, scatters and sorts without an estimate read and write at least.

    A gather reads rows and writes them; a scatter reads updates, and reads and writes their rows.
    """
    total = 0
    for one, scope in instructions:
        if one.op in ("gather", "sort") and not one.cycles:
            total += one.times * 2 * array_bytes(one.shape)
        elif one.op == "scatter" and not one.cycles:
            names = one.operands()
            updates = names[-(len(names) // 2) :]  # after the arrays and one array of places
            total += one.times * 3 * sum(array_bytes(scope[name].shape) for name in updates)
    return total


def kernel_bundles(schedule: str) -> tuple[int, int]:
    """(instruction bundles that a Pallas kernel issues, loops of unknown length, counted once).

    In the text of its final schedule a bundle has an address, `LB` where a loop's body begins, a
    `>` for each loop around it (some are missing inside), and the constant in a loop's exit test.
    Regions that a predicate may skip count as executed: an upper bound.
    """
    head = r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})? *:([ >]*)\{"
    _, *parts = re.split(head, schedule, flags=re.MULTILINE)
    marks, texts = parts[::3], parts[2::3]
    depths = [marks.count(">") for marks in parts[1::3]]
    for i in reversed(range(len(depths) - 1)):
        if marks[i + 1] != "LB":
            depths[i] = max(depths[i], depths[i + 1])
    open_loops, unknown = [[0, 1]], 0  # from outside in: bundles, trips

    def close(depth: int):
        nonlocal unknown
        while len(open_loops) > depth + 1:
            bundles, trips = open_loops.pop()
            unknown += trips is None
            open_loops[-1][0] += bundles * (trips or 1)

    for mark, depth, bundle in zip(marks, depths, texts, strict=True):
        close(depth - (mark == "LB"))
        while len(open_loops) <= depth:
            open_loops.append([0, None])
        open_loops[-1][0] += 1
        test = r"totalorder (?:\(\S+\), )?%\S+, (\d+) /\* loop exit test"
        for trips in re.findall(test, bundle):  # an outer loop's can stand after the inner one's
            waiting = [loop for loop in open_loops if loop[1] is None]
            if waiting:
                waiting[-1][1] = int(trips)
    close(0)
    return open_loops[0][0], unknown


@contextlib.contextmanager
def schedule_dump():
    """A temporary folder to which libtpu, when it is loaded inside, writes its final schedules.

    All other passes are left out: they would be gigabytes, and twice the time.
    """
    before = os.environ.get("LIBTPU_INIT_ARGS")
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        only = "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        os.environ["LIBTPU_INIT_ARGS"] = f"{before or ''} {flags} {only}".strip()
        try:
            yield Path(folder)
        finally:
            os.environ.pop("LIBTPU_INIT_ARGS")
            if before is not None:
                os.environ["LIBTPU_INIT_ARGS"] = before


def kernel_cycles(instructions, folder: Path, notes: set) -> int | None:
    """Cycles of a program's Pallas kernels, on the scale of the estimates for the rest.

    From the schedules in `folder`, which it empties. Equal kernels are compiled once, under the
    name of one of them. None if one has no schedule: libtpu was loaded before schedule_dump.
    """
    kernels = {one.name: one for one, _ in instructions if '"tpu_custom_call"' in one.rest}
    code = {x: re.findall(r'"body":"(.*?)"', one.rest) or x for x, one in kernels.items()}
    function = {name: re.sub(r"[.\d]+$", "", name) for name in kernels}
    counts, total = {}, 0
    for path in folder.glob("*"):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if name and name[1] in kernels:
            counts[name[1]], unknown = kernel_bundles(path.read_text(errors="replace"))
            if unknown:
                notes.add(f"kernel {name[1]}: {unknown} loops of unknown length counted once")
        path.unlink()
    for name, one in kernels.items():
        same_code = [counts[x] for x in counts if code[x] == code[name]]
        same_function = [counts[x] for x in counts if function[x] == function[name]]
        twins = same_code or same_function
        if not twins:
            notes.add(f"kernel {name} has no schedule: no prediction")
            return None
        total += one.times * counts.get(name, max(twins))
    return round(total * KERNEL_FACTOR)


def absent_devices(target: str) -> list:
    """Devices for compilation only: a key of TOPOLOGIES, a TPU topology NAME:AxB, or GPU_TARGET."""
    from jax.experimental import topologies

    for key, value in NOBODY_HOME.items():
        os.environ.setdefault(key, value)
    known = f"use {', '.join((*TOPOLOGIES, GPU_TARGET))} or a TPU topology such as v5e:2x4"
    name = TOPOLOGIES.get(target, target)
    if target == GPU_TARGET:
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            parts = " ".join(f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))
            raise UserError(f"--preflight {target} needs the GPU compiler: pip install {parts}")
        options = {"platform": "cuda", "topology_name": "h100", "topology": "1x1x8"}
        options["target_config"] = H100
    elif not re.fullmatch(r"\w+:\d+(x\d+)+", name):
        raise UserError(f"--preflight {target}: {known}")
    else:
        if importlib.util.find_spec("libtpu") is None:
            raise UserError('--preflight needs the TPU compiler: pip install "jax[tpu]"')
        shape = [int(side) for side in name.split(":")[1].split("x")]
        bounds = (*shape, *[1] * (3 - len(shape)))  # one host, as on a v6e-8 VM
        options = {"platform": "tpu", "topology_name": name, "chips_per_host_bounds": bounds}
    try:
        return topologies.get_topology_desc(**options).devices
    except Exception as error:  # whatever the compiler library finds wrong with a name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"--preflight {target}: no such hardware ({reason}): {known}") from None


def link_count(devices) -> int:
    """Links of the device that has fewest: at a corner of a TPU mesh, one for each axis."""
    places = [getattr(device, "coords", (i,)) for i, device in enumerate(devices)]
    return sum(len({*axis}) > 1 for axis in zip(*places, strict=True))


def analyse(compiled, mesh: Mesh, schedules: Path) -> dict:
    """What a compiled program tells of one execution on one device, for its row in preflight.json.

    None stands for what is not known. "flops" is the compiler's own count, which leaves out kernels
    and takes the body of a loop once.
    """
    devices, notes = [*mesh.devices.flat], set()
    known = hardware(devices[0].device_kind)
    instructions = [*walk(compiled.as_text(), notes)]
    found = collectives(instructions, mesh.size)
    sent = sum(row["sent_bytes"] for row in found.values())
    kernels = kernel_cycles(instructions, schedules, notes)
    cycles = sum(one.times * one.cycles for one, _ in instructions)
    cycles = cycles + kernels if cycles and kernels is not None else None
    links = link_count(devices) or 1
    return {
        "flops": (compiled.cost_analysis() or {}).get("flops"),
        "bytes": program_bytes(compiled),
        "collectives": found,
        "estimated_cycles": cycles,
        "kernel_cycles": cycles and kernels,
        "predicted_ms": cycles and known.clock and 1e3 * cycles / known.clock,
        "link_floor_ms": known.link and 1e3 * sent / (links * known.link),
        "moved_floor_ms": known.hbm and 1e3 * moved_bytes(instructions) / known.hbm,
        "notes": sorted(notes),
    }


def refused(error: Exception) -> dict:
    """The same for a program that the compiler finds too large; raises any other error."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    lines = str(error).splitlines()
    reason = next((x.strip() for x in lines if "Used" in x or "xceeded" in x), lines[0])
    used = re.search(r"Used ([\d.]+)([KMG]) of", reason)
    sizes = dict.fromkeys(("arguments", "outputs", "aliased", "temporary", "peak"))
    if used:
        sizes["peak"] = round(float(used[1]) * 2 ** (10 * " KMG".index(used[2])))
    return {"flops": None, "bytes": sizes, "error": reason}


def whole_run(rows: list[dict]) -> dict:
    """Predictions for all executions of the run; None where a program has none."""

    def seconds(key, *kinds):
        each = [(row.get(key), row["steps"]) for row in rows if row["name"].startswith(kinds)]
        return None if None in [ms for ms, _ in each] else sum(ms * n for ms, n in each) / 1e3

    training, rate = seconds("predicted_ms", "grads", "update"), None
    grads = [row for row in rows if row["name"].startswith("grads")]
    if training:
        update = 1e3 * seconds("predicted_ms", "update") / sum(row["steps"] for row in grads)
        rates = [row["tokens_per_step"] / (row["predicted_ms"] + update) for row in grads]
        rate = round(1e3 * max(rates))
    flops = sum(row["model_flops"] * row["steps"] for row in grads)
    return {
        "train_seconds": training,
        "train_link_floor_seconds": seconds("link_floor_ms", "grads", "update"),
        "train_moved_floor_seconds": seconds("moved_floor_ms", "grads", "update"),
        "eval_seconds": seconds("predicted_ms", "eval"),
        "loader_tokens_per_second": rate,
        "model_flops": flops,
        "calibration": CALIBRATION.replace("\n", " "),
    }


def describe(report: dict) -> str:
    """The report of preflight as tables and totals, at most 100 columns wide."""
    rows, run = report["variants"], report["predicted"]
    kind, count = report["device_kind"], report["devices"]

    def number(value, form=".1f", unit=1.0):
        return "-" if value is None else format(value / unit, form)

    def line(name, *cells):
        return f"{name:34}" + "".join(f"{cell:>7} " for cell in cells).rstrip()

    memory = [line("GiB", "args", "temps", "peak", "+ state", "times", "   tokens", "seconds")]
    costs = [line("", "TFLOP", "counted", "Mcycles", "kernels", "ms", "of peak", "links", "moves")]
    sent = [line("collectives", "", "", "count", "MB", "largest", "in loop")]
    for row in rows:
        sizes = [row["bytes"][key] for key in ("arguments", "temporary", "peak")]
        sizes = [number(size, ".2f", 2**30) for size in (*sizes, row["resident_bytes"])]
        tokens, seconds = f"{row['tokens_per_step']:>9,}", f"{row['compile_seconds']:.0f}"
        memory.append(line(row["name"], *sizes, row["steps"], tokens, seconds))
        flops = number(row["model_flops"], ".1f", 1e12), number(row["flops"], ".2f", 1e12)
        cycles = (number(row.get(key), ".1f", 1e6) for key in ("estimated_cycles", "kernel_cycles"))
        time_ = number(row.get("predicted_ms")), number(row.get("utilization"), ".1%")
        floors = number(row.get("link_floor_ms")), number(row.get("moved_floor_ms"))
        costs.append(line(row["name"], *flops, *cycles, *time_, *floors))
        for what, found in row.get("collectives", {}).items():
            size = (f"{found[key] / 1e6:,.1f}" for key in ("bytes", "largest_bytes"))
            loop = "yes" if found["in_loop"] else "no"
            sent.append(
                f"{line(row['name'])} {what:17}{line('', found['count'], *size, loop)[34:]}"
            )
    notes = [f"{row['name']}: {note}" for row in rows for note in row.get("notes", ())]
    legend = f"""\
Predicted by the compiler, not measured; for one execution on one device, but TFLOP are the model's
on all devices (6 for a matmul weight and token, no attention scores). `counted` is the compiler's
own count: no kernels, loops once. Mcycles include `kernels`, an upper bound: blocks that documents
let them skip are counted. Left out, and to be added where nothing hides it: `links`, ms for what
the device with the fewest links ({report["links"]}) sends, and `moves`, ms that gathers, scatters
and sorts take from memory. MB are whole buffers: before a reduce-scatter, after an all-gather.
{CALIBRATION}
"""
    seconds, rate, flops = run["train_seconds"], run["loader_tokens_per_second"], run["model_flops"]
    share = seconds and flops / (count * (hardware(kind).peak or math.nan) * seconds)
    floors = run["train_link_floor_seconds"], run["train_moved_floor_seconds"]
    totals = [
        ("training", "predicted {:.1f} s, {:.1%} of the peak", seconds, share),
        ("left out", "at least {:.1f} s of links, {:.1f} s of moves", *floors),
        ("validation", "predicted {:.1f} s, while the clock stands still", run["eval_seconds"]),
        ("loader", "must sustain {:,} tokens/s, {:.1f} MB/s", rate, rate and 2e-6 * rate),
    ]
    compiling = sum(row["compile_seconds"] for row in rows)
    whole = [f"The whole run on {count} x {kind}; all compiled in {compiling:.0f} s"]
    whole += [
        f"  {report['total_steps']:,} steps, {report['total_tokens']:,} tokens, {flops:.3e} FLOP"
    ]
    for label, form, *values in totals:
        whole.append(f"  {label:12}{'unknown' if None in values else form.format(*values)}")
    parts = ("\n".join(part) for part in (memory, costs, sent, notes, [legend, *whole]) if part)
    return "\n\n".join(parts)


def preflight_row(cfg: Config, variant: Variant, mesh: Mesh, schedules: Path, dump: Path | None):
    """Compile a variant: its row of preflight.json, but for `steps`.

    Model FLOPs are those of all devices, from shapes.
    """
    kind, start = mesh.devices.flat[0].device_kind, time.perf_counter()
    share = {"grads": 1, "eval": 1 / 3, "update": 0}[variant.kind]
    row = {
        "name": variant.name,
        "tokens_per_step": variant.batch_tokens,
        "model_flops": share * flops_per_token(cfg) * variant.batch_tokens,
        "resident_bytes": resident_bytes(cfg, variant, mesh),
        "device_bytes_limit": hardware(kind).memory,
        "hlo": None,
    }
    try:
        compiled = lower_variant(cfg, variant, mesh).compile()
    except jax.errors.JaxRuntimeError as error:
        return row | refused(error) | {"compile_seconds": round(time.perf_counter() - start, 1)}
    row["compile_seconds"] = round(time.perf_counter() - start, 1)
    row |= analyse(compiled, mesh, schedules)
    seconds, peak = (row["predicted_ms"] or 0) / 1e3, hardware(kind).peak
    row["utilization"] = row["model_flops"] / (mesh.size * peak * seconds) if seconds else None
    if dump:
        row["hlo"] = f"{variant.name}.hlo"
        (dump / row["hlo"]).write_text(compiled.as_text())
    return row


def preflight(cfg: Config, target: str, dump: Path | None, say: Callable = print) -> bool:
    """Compile every variant for absent hardware, report what it needs; whether all of it fits.

    With `dump`: preflight.json and the optimized HLO of each variant go there.
    """
    if dump:
        make_folder(dump, "--dump")
    rows = []
    with schedule_dump() as schedules:
        devices = absent_devices(target)
        if attention_on(cfg, devices[0])[0] == "cudnn":
            cfg = dataclasses.replace(cfg, attention="xla")
            say("cuDNN, which the run will take, cannot be compiled without a GPU: XLA's instead")
        mesh = make_mesh(cfg, devices)
        say_choices(choices(cfg, mesh), mesh, say)
        for variant, steps in executions(cfg).items():
            rows.append(preflight_row(cfg, variant, mesh, schedules, dump) | {"steps": steps})
            say(f"{variant.name} compiled in {rows[-1]['compile_seconds']:.0f} s")
    report = {
        "preset": cfg.preset,
        "target": target,
        "device_kind": devices[0].device_kind,
        "devices": mesh.size,
        "links": link_count([*mesh.devices.flat]),
        "total_steps": cfg.steps,
        "total_tokens": cfg.total_tokens,
        "variants": rows,
        "predicted": whole_run(rows),
    }
    if dump:
        (dump / "preflight.json").write_text(json.dumps(report, indent=1) + "\n")
    say("\n" + describe(report))
    limit, fits = hardware(devices[0].device_kind).memory or math.inf, True
    memory = f"the {limit / 2**30:.2f} GiB of a device"
    for row in rows:
        needs = (row["bytes"]["peak"] or 0) + row["resident_bytes"]
        over = f"{(needs - limit) / 2**30:.2f} GiB over {memory}" if needs > limit else ""
        if reason := ", ".join(filter(None, (over, row.get("error")))):
            say(f"{row['name']} does not fit: {reason}")
            fits = False
    if fits:
        say(f"all fit {memory}" if limit < math.inf else "how much memory there is, is not known")
    return fits


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def show(cfg: Config) -> str:
    """The resolved config, the parameter table, the stages and the totals of a run, as text."""
    lines = [f"{k} = {v!r}" for k, v in dataclasses.asdict(cfg).items() if k != "stages"]
    lines.append(
        f"\n{'parameter':14} {'shape':>14} {'numbers':>12} {'optimizer':>9} {'lr':>11} "
        f"{'decay':>6} {'betas':>10}"
    )
    table = param_table(cfg)
    for name, row in table.items():
        shape, betas = "x".join(map(str, row.shape)), "/".join(map(str, row.betas))
        rates = "/".join(f"{row.lr * scale:.3g}" for scale in sorted({*row.scale}) or [1])
        lines.append(
            f"{name:14} {shape:>14} {row.count:12,} {row.optimizer:>9} {rates:>11} "
            f"{row.decay:6.3g} {betas if row.optimizer == 'adam' else '':>10}"
        )
    lines.append(f"{'total':14} {'':>14} {sum(row.count for row in table.values()):12,}")
    lines.append(
        f"\n{'steps':>10} {'batch':>7} {'row':>6} {'doc cap':>7} {'windows':>9} {'lr x':>5} "
        f"{'= from..to':>12} {'attn scale':>10} {'M tokens':>9}  loss weights, from and to"
    )
    for i, stage in enumerate(cfg.stages):
        first, end = cfg.boundaries[i : i + 2]
        factor = f"{lr_scale(cfg, first):.3g}..{lr_scale(cfg, end - 1):.3g}"
        lines.append(
            f"{f'{first}..{end - 1}':>10} {stage.batch_tokens:7} {stage.row_tokens:6} "
            f"{stage.doc_cap or '-':>7} {f'{stage.windows[0]}/{stage.windows[1]}':>9} "
            f"{stage.lr_factor:5g} {factor:>12} {yarn(cfg, i)[1]:10.4f} "
            f"{(end - first) * stage.batch_tokens / 1e6:9.1f}  "
            f"{stage.weights} {stage.weights_end}"
        )
    lines.append(f"validation windows: {cfg.val_windows[0]}/{cfg.val_windows[1]}")
    flat = round((1 - cfg.cooldown) * cfg.scheduled)
    lines.append(f"learning rate falls from step {flat} on; Adam every {cfg.adam_every} steps")
    tied = sum(is_tied(cfg, step) for step in range(cfg.steps))
    lines.append(f"head and embedding tied up to step {tied - 1}" if tied else "never tied")
    flops = cfg.total_tokens * flops_per_token(cfg)
    lines.append(f"{cfg.steps} steps, {cfg.total_tokens:,} tokens, {flops:.3e} model FLOPs")
    lines.append(f"programs: {', '.join(variant.name for variant in executions(cfg))}")
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors: one line, exit status 2."""

    def error(self, message):
        """Raise instead of printing the whole usage."""
        raise UserError(f"{message} (see --help)")


def parse_args(argv):
    """The command line as a namespace."""
    parser = Parser(prog="train_gpt.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("preset", nargs="?", help=f"{' or '.join(PRESETS)}; default: by hardware")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data", metavar="DIR", help="folder with the token shards")
    parser.add_argument("--out", metavar="DIR", default="logs", help="runs go to OUT/<run id>/")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--show", action="store_true", help="config, parameters, stages; then exit")
    parser.add_argument("--preflight", metavar="TARGET", help="compile for absent hardware: v6e-8")
    parser.add_argument(
        "--bench",
        nargs="?",
        const=0,
        type=int,
        metavar="PARTS",
        help="time each stage's steps; PRESET stands before it",
    )
    parser.add_argument("--dump", metavar="DIR", help="where --preflight and --bench leave files")
    parser.add_argument("--resume", metavar="RUN_DIR", help="continue an interrupted run")
    parser.add_argument("--sample", metavar="RUN_DIR", help="continue --prompt from a checkpoint")
    parser.add_argument("--prompt", metavar="TEXT", help="with --sample: the text to continue")
    parser.add_argument("--profile", action="store_true", help="trace a few steps")
    parser.add_argument("--cache", metavar="DIR", help="persistent compilation cache")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of several processes, the first"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process-id", type=int, metavar="I", help="which this one is, from 0 on")
    return parser.parse_args(argv)


def check_args(args):
    """UserError for options that do not go together, or name nothing."""
    for name in ("data", "out", "dump", "cache", "resume", "sample", "preflight"):
        if getattr(args, name) == "":
            raise UserError(f"--{name} is empty: name something, or drop it")
        if not is_name(getattr(args, name) or ""):
            raise UserError(f"--{name} {getattr(args, name)!r}: no file can have this name")
    for name in ("resume", "sample"):
        if getattr(args, name) is not None and (args.preset or args.set or args.seed is not None):
            raise UserError(f"--{name} takes the config of the run: drop PRESET, --set, --seed")
    modes = ("show", "preflight", "bench", "resume", "sample")
    # --bench alone is 0, which equals False but is not it.
    modes = [mode for mode in modes if not any(getattr(args, mode) is x for x in (None, False))]
    if args.profile and "bench" in modes:
        modes.append("profile")
    if len(modes) > 1:
        raise UserError(f"--{modes[0]} and --{modes[1]} are two different things to do: drop one")
    if args.bench is not None and args.bench < 0:
        raise UserError(f"--bench {args.bench}: a positive number of devices, or none")
    if args.dump is not None and args.preflight is None and args.bench is None:
        raise UserError("--dump goes with --preflight TARGET or --bench")
    if args.prompt is not None and args.sample is None:
        raise UserError("--prompt goes with --sample RUN_DIR")
    group = args.coordinator, args.processes, args.process_id
    if any(x is not None for x in group):
        if None in group or not 0 <= args.process_id < args.processes:
            raise UserError("--coordinator HOST:PORT, --processes N, --process-id 0..N-1: give all")
        if not re.fullmatch(r"[^:/\s]+:\d{1,5}", args.coordinator):
            raise UserError(f"--coordinator {args.coordinator}: write HOST:PORT")
        if modes and modes != ["resume"]:
            raise UserError(f"--{modes[0]} is for one process: drop --coordinator")


def resolve(args) -> Config:
    """The Config that the command line asks for."""
    name = args.preset or ("tiny" if all_devices()[0].platform == "cpu" else "speedrun")
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; there are: {', '.join(PRESETS)}")
    cfg = PRESETS[name]
    for item in args.set:
        key, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"--set {item}: write KEY=VALUE (and PRESET before all options)")
        cfg = override(cfg, key, text)
    if args.data is not None:
        cfg = dataclasses.replace(cfg, data=args.data)
    if args.seed is not None:
        cfg = dataclasses.replace(cfg, seed=args.seed)
    return validate(cfg)


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""
    try:
        args = parse_args(argv)
        check_args(args)
        if args.cache is not None:
            make_folder(Path(args.cache), "--cache")
            jax.config.update("jax_compilation_cache_dir", args.cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        if hasattr(sys.stdout, "reconfigure"):  # text of a model must not end a run on a terminal
            sys.stdout.reconfigure(errors="replace")
        say = functools.partial(print, flush=True)
        command = shlex.join(["python", *sys.argv]) if argv is None else shlex.join(argv)
        dump = Path(args.dump) if args.dump else None
        if args.sample is not None:
            saved, prompt = find_checkpoint(Path(args.sample), say), args.prompt or ""
            say(prompt + sample(saved.cfg, saved, prompt))
        elif args.preflight is not None:
            return 0 if preflight(resolve(args), args.preflight, dump, say) else 1
        elif args.bench is not None:
            cfg = resolve(args)
            named = args.data is not None or cfg.data not in {x.data for x in PRESETS.values()}
            bench(cfg, args.bench, named, dump, command, say)
        elif args.show:
            say(show(resolve(args)))
        else:
            join_hosts(args.coordinator, args.processes, args.process_id)
            say = say if jax.process_index() == 0 else lambda line: None
            saved = find_checkpoint(Path(args.resume), say) if args.resume is not None else None
            cfg = resolve(args) if saved is None else saved.cfg
            if saved and (cfg.devices > len(all_devices()) or jax.process_count() > 1):
                cfg = dataclasses.replace(cfg, devices=0)  # on what there is
            cfg = dataclasses.replace(cfg, data=args.data or cfg.data)
            train(cfg, Path(args.out), command, saved, args.profile, say)
    except Stopped as stop:
        print(stop)
        return 128 + stop.number
    except (UserError, OSError) as error:
        print("error:", *str(error).split(), file=sys.stderr, flush=True)
        return alone(2)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            print(
                *("error: out of memory:", *str(error).split()[:40]),
                "(take less at a time: --set recompute=layers micro_tokens=N; or use more devices)",
                file=sys.stderr,
            )
            return alone(2)
        if not jax.distributed.is_initialized():
            raise
        if not isinstance(error, jax.errors.JaxRuntimeError):
            traceback.print_exc()
        print(
            *("error: the devices failed:", *str(error).split()[:60]),
            "(if another process has ended, start all of them again with --resume)",
            file=sys.stderr,
        )
        return alone(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return alone(130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
