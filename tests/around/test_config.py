"""Config: presets, the numbers that follow from them, overrides, and refusals that tell why."""

import dataclasses
import json
import re
from dataclasses import replace

import pytest
from conftest import small_config

import train_gpt as T

SPEEDRUN = T.PRESETS["speedrun"]
STAGES = small_config().stages


def resolve(preset: str, *items: str) -> T.Config:
    """The config of `train_gpt.py PRESET --set ITEM ...`."""
    return T.resolve(T.parse_args([preset, *(x for item in items for x in ("--set", item))]))


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    monkeypatch.setitem(T.PRESETS, "small", small_config())


# Presets and what follows from them


@pytest.mark.parametrize("name", T.PRESETS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_preset_is_valid_on_every_device_count(name, devices):
    cfg = resolve(name, f"devices={devices}")
    assert cfg.preset == name
    made, mesh = T.make_mesh(cfg)
    assert made == cfg and mesh.size == devices


def test_there_are_three_presets_and_the_record_is_the_default():
    assert {*T.PRESETS} - {"small"} == {"speedrun", "medium", "tiny"}
    assert SPEEDRUN == T.Config()


def test_speedrun_sizes_by_hand():
    assert SPEEDRUN.boundaries == (0, 320, 681, 1107, 1174, 1194)
    assert [stage.rows for stage in SPEEDRUN.stages] == [SPEEDRUN.rows] * 5 == [8] * 5
    assert SPEEDRUN.total_tokens == 328_663_040
    assert SPEEDRUN.scheduled == 1174 and SPEEDRUN.depth == 11
    assert SPEEDRUN.val_tokens == 5 * SPEEDRUN.val_batch == 5 * 8 * SPEEDRUN.val_row == 10_485_760
    assert SPEEDRUN.head_width == 128
    assert SPEEDRUN.layers_with("attends") == (0, 1, 2, 3, 5, 8, 10)
    assert SPEEDRUN.layers_with("values") == (1, 2, 8, 10)
    assert sum(layer.mlps for layer in SPEEDRUN.layers) == 11
    assert SPEEDRUN.dtype == "bfloat16"


def test_show_prints_the_derived_numbers(capsys):
    assert T.main(["speedrun", "--show"]) == 0
    text = capsys.readouterr().out
    # q, k, v and o of three paired layers, two short ones that are narrow, two long ones; eleven
    # MLPs; the head's columns are the candidates, in the third stage of each third of its 426 steps
    columns = 2 * 6 * (3 * (64 + 128) + 2 * (64 + 64) + 2 * (128 + 128)) + 11 * 2 * 2816
    head = 320 * 131_072 * 10_240 + 361 * 262_144 * 10_240
    head += 142 * 393_216 * (14_336 + 14_336 + 24_576)
    head += (67 * 327_680 + 20 * 131_072) * 50_304
    flops = 6 * 768 * (328_663_040 * columns + head)
    for pattern in (
        r"^source = 7$",
        r"^skip = \(3, 6\)$",
        r"^layers.0 = Layer\(attends='paired', .* x0=True, ngram=True, mlps=1\)$",
        r"^layers.6 = Layer\(attends='', .* mlps=1\)$",
        r"^layers.8 = Layer\(attends='short', narrow=True, values=True, .* mlps=2\)$",
        r"^head +50304x768 +38,633,472 +adam +0\.008 +0\.75 +0\.5/0\.95$",
        r"^value_tables +201216x768 +154,533,888 +tables +0\.56 +0\.025 +0\.75/0\.95$",
        r"^ngram_table +42301440x768 +32,487,505,920 +tables +0\.56 +0\.025 +0/0\.95$",
        r"^qk_bank +42x256x768 +8,257,536 +anvil +0\.023 +2\.25 *$",
        r"^mlp_bank +24x2816x768 +51,904,512 +anvil +0\.044/0\.0881 +2\.25 *$",
        r"^smear_gate +1x12 +12 +adam +8e-05 +0 +0\.9/0\.99$",
        r"^total +32,787,938,803$",
        r"^ +0\.\.319 +131072 +16384 +896 +128/384 +1\.\.0\.937 0\.1300/0\.0850 +41\.9  "
        r"\(1\.0, 0\.5, 0\.25\) \(1\.0, 0\.5, 0\.0\) \(0\.25,\) \(10240,\)$",
        r"^ +320\.\.680 +262144 +32768 +2048 +384/896 +1\.41\.\.0\.941 0\.1586/0\.0994 +94\.6  "
        r"\(1\.0, 0\.5\) \(1\.0, 0\.0\) \(0\.2, 0\.15, 0\.1, 0\.05\) \(10240,\)$",
        r"^ *681\.\.1106 +393216 +49152 +3072 +640/1408 +1\.05\.\.0\.403 0\.1748/0\.1084 +167\.5 ",
        r"^ *1107\.\.1173 +327680 +40960 +3072 +640/1408 +0\.391\.\.0\.301 "
        r"0\.1748/0\.1084 +22\.0 ",
        r"^ *1174\.\.1193 +131072 +16384 +3072 +768/1664 +0\.3\.\.0\.3 0\.1811/0\.1120 +2\.6 ",
        r"^val_windows = \(768, 2560\)$",
        r"^learning rate falls from step 234 on$",
        r"^event_every = \(2, 4\)$",
        r"^event_change = 336$",
        r"^head and embedding tied up to step 1175$",
        rf"^1194 steps, 328,663,040 tokens, {re.escape(f'{flops:.3e}')} model FLOPs$",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern


def test_show_of_a_run_that_is_never_tied_and_has_plain_rows(capsys):
    assert T.main(["small", "--show", "--set", "tied=0", "stages.1.doc_cap=0"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^never tied$", text, re.MULTILINE)
    assert re.search(r"^ +4\.\.7 +512 +64 +- +16/64 +0\.986\.\.0\.471 ", text, re.MULTILINE)


# Overrides, on small_config()


@pytest.mark.parametrize(
    "item, field, value",
    [
        ("prefetch=6", "prefetch", 6),
        ("attn_scales=(1,2)", "attn_scales", (1.0, 2.0)),
        ("lr_anvil=1e-2", "lr_anvil", 0.01),
        ("data=some/where=1", "data", "some/where=1"),
        ("momentum=(0.5,0.9)", "momentum", (0.5, 0.9)),
        ("momentum=[0, 0.5]", "momentum", (0.0, 0.5)),
        ("momentum=0,0.5", "momentum", (0.0, 0.5)),
        ("rail_fast=(1,0)", "rail_fast", (1.0, 0.0)),
        ("event_every=(4,4)", "event_every", (4, 4)),
        ("event_change=8", "event_change", 8),
        ("logit_cap=(30,0,7.5)", "logit_cap", (30.0, 0.0, 7.5)),
        ("skip=(1,3)", "skip", (1, 3)),
        ("source=3", "source", 3),
        ("val_windows=(5,6)", "val_windows", (5, 6)),
        ("tied=0", "tied", 0.0),
        ("adam_every=1", "adam_every", 1),
        ("momentum_cooldown=0", "momentum_cooldown", 0),
        ("extension=5", "extension", 5),
        ("ngram_rows=522", "ngram_rows", 522),
        ("ngram_ids=raw", "ngram_ids", "raw"),
        ("vocab=101", "vocab", 101),
        ("kernels=plain", "kernels", "plain"),
        ("recompute=1", "recompute", True),
        ("recompute=False", "recompute", False),
        ("checkpoint_end=never", "checkpoint_end", "never"),
    ],
)
def test_set_replaces_one_field_and_keeps_its_type(item, field, value):
    cfg = resolve("small", item)
    got = getattr(cfg, field)
    assert got == value and type(got) is type(value)
    if isinstance(value, tuple):
        assert [type(x) for x in got] == [type(x) for x in value]
    assert cfg == replace(small_config(), **{field: value})


@pytest.mark.parametrize(
    "item, field, value",
    [
        ("stages.1.windows=(7,70)", "windows", (7, 70)),
        ("stages.1.lr_factor=0.5", "lr_factor", 0.5),
        ("stages.1.doc_cap=64", "doc_cap", 64),
        ("stages.1.weights=(2,)", "weights", (2.0,)),
        ("stages.1.weights_end=(.5,)", "weights_end", (0.5,)),
        ("stages.1.prefix=(.5,0)", "prefix", (0.5, 0.0)),
        ("stages.1.candidates=(80,0,104)", "candidates", (80, 0, 104)),
    ],
)
def test_set_reaches_into_one_stage(item, field, value):
    first, second, last = small_config().stages
    changed = replace(second, **{field: value})
    got = resolve("small", item).stages
    assert got == (first, changed, last)
    assert repr(getattr(got[1], field)) == repr(value)  # 2.0, not 2


@pytest.mark.parametrize(
    "item, field, value",
    [
        ("layers.1.attends=short", "attends", "short"),
        ("layers.1.xsa=0", "xsa", False),
        ("layers.1.narrow=true", "narrow", True),
        ("layers.1.mlps=3", "mlps", 3),
    ],
)
def test_set_reaches_into_one_layer(item, field, value):
    first, second, *others = small_config().layers
    assert resolve("small", item).layers == (first, replace(second, **{field: value}), *others)


def test_rows_of_all_stages_change_together():
    """Each row has its own walk through the vocabulary."""
    sizes = [f"stages.{i}.batch_tokens={16 * s.row_tokens}" for i, s in enumerate(STAGES)]
    assert resolve("small", *sizes).rows == 16


def test_set_gives_a_stage_more_targets():
    cfg = resolve("small", "stages.1.weights=(1,.5)", "stages.1.weights_end=(1,0)")
    assert cfg.stages[1].weights == (1.0, 0.5) and cfg.stages[1].weights_end == (1.0, 0.0)


def test_later_settings_win_and_flags_count():
    args = T.parse_args(["small", *"--set steps=30 --set steps=40 --data d --seed 5".split()])
    cfg = T.resolve(args)
    assert (cfg.steps, cfg.data, cfg.seed) == (40, "d", 5)


# Refusals: (settings, what the one line must say)

POSITIVE = (
    *("width", "heads", "mlp_width", "ngram_rows", "gate_width", "steps", "adam_every", "tail"),
    *("loss_chunk", "micro_tokens", "val_tokens", "val_row", "val_batch", "prefetch", "log_every"),
    *("momentum_warmup", "attention_cap"),
)
NOT_NEGATIVE = (
    *("val_every", "checkpoint_every", "devices", "sample_tokens", "seed", "extension"),
    *("momentum_cooldown", "lr_anvil", "lr_adam", "decay_anvil", "decay_adam", "rails_step"),
    *("event_change", "tail_average"),
)
SHARES = "cooldown", "lr_floor", "tied", "slow_rate", "equalize_rate"
AT_MOST = {"seed": 2**32 - 1, "steps": 10**6, "width": 2**16, "ngram_rows": 2**30}
GONE = "attention", "table_gradients", "fp8", "checkpoint_seconds"  # of older versions
GONE += "lr_muon", "bigram_rows", "backout", "long_layers", "attn_scale"
FLAGS = [field.name for field in dataclasses.fields(T.Layer) if field.type is bool]
FLOATS = [field.name for field in dataclasses.fields(T.Config) if field.type is float]

BAD_SETTINGS = [
    # what cannot be read
    ("layerz=3", ["unknown key 'layerz'", "layers", "mlp_width"]),
    *((f"{name}=1", [f"unknown key '{name}'", "kernels", "checkpoint_every"]) for name in GONE),
    ("steps", ["--set steps:", "KEY=VALUE"]),
    ("steps.1=3", ["unknown key 'steps.1'", "valid keys: preset, seed"]),
    ("vocab=many", ["vocab=many", "like 104 (int)"]),
    ("vocab=2.5", ["vocab=2.5", "like 104 (int)"]),
    ("lr_adam=wide", ["lr_adam=wide", "like 0.008 (float)"]),
    ("momentum=0.9", ["momentum=0.9", "like (0.85, 0.93) (tuple)"]),
    ("momentum=(0.9,)", ["momentum=(0.9,)", "like (0.85, 0.93)"]),
    ("momentum=(0.9,0.9,0.9)", ["momentum=(0.9,0.9,0.9)", "like (0.85, 0.93)"]),
    ("momentum=('a','b')", ["momentum=('a','b')", "like (0.85, 0.93)"]),
    ("momentum=(0.9,", ["momentum=(0.9,", "like (0.85, 0.93)"]),
    ("logit_cap=(30,7.5)", ["logit_cap=(30,7.5)", "like (23.0, 5.0, 7.5)"]),
    ("skip=3", ["skip=3", "like (1, 2) (tuple)"]),
    ("skip=(0,1,2)", ["skip=(0,1,2)", "like (1, 2)"]),
    ("skip=(0,1.5)", ["skip=(0,1.5)", "like (1, 2)"]),
    ("skip=(True,2)", ["skip=(True,2)", "like (1, 2)"]),
    ("source=(1,)", ["source=(1,)", "like 2 (int)"]),
    ("attn_scales=1", ["attn_scales=1", "like (0.13, 0.085)"]),
    ("event_every=2", ["event_every=2", "like (2, 4)"]),
    ("event_every=(2.0,4)", ["event_every=(2.0,4)", "like (2, 4)"]),
    ("rail_fast=.5", ["rail_fast=.5", "like (0.85, 0.4385)"]),
    ("val_windows=(64,)", ["val_windows", "64"]),
    ("val_windows=(1,2,3)", ["val_windows", "1", "3"]),
    ("stages.0.windows=(64,)", ["windows", "64"]),
    ("stages.0.windows=()", ["windows", "()"]),
    ("stages.0.weights=1", ["stages.0.weights=1", "like (1.0, 0.5) (tuple)"]),
    ("stages.0.weights_end=(1,'a')", ["stages.0.weights_end=(1,'a')", "like (1.0, 0.0)"]),
    ("stages.0.prefix=1", ["stages.0.prefix=1", "like (0.2, 0.1) (tuple)", "alone is (1,)"]),
    ("stages.0.candidates=48", ["candidates=48", "like (48,) (tuple)", "one alone is (1,)"]),
    ("stages.0.candidates=(48.5,)", ["candidates=(48.5,)", "like (48,)"]),
    ("layers=3", ["layers=3", "layers.N.FIELD=VALUE", "below 5"]),
    ("layers.0=3", ["layers.0=3", "layers.N.FIELD=VALUE", "below 5"]),
    ("layers.5.x0=1", ["layers.5.x0=1", "below 5"]),
    ("layers.0.window=5", ["unknown key 'layers.0.window'", "attends"]),
    *((f"layers.0.{x}=2", [f"layers.0.{x}=2", "like", "(bool)"]) for x in FLAGS),
    ("layers.0.mlps=1.5", ["layers.0.mlps=1.5", "like 1 (int)"]),
    ("stages=3", ["stages=3", "stages.N.FIELD=VALUE", "below 3"]),
    ("stages.0=3", ["stages.0=3", "stages.N.FIELD=VALUE", "below 3"]),
    ("stages.3.share=1", ["stages.3.share=1", "below 3"]),
    ("stages.-1.share=1", ["stages.-1.share=1", "below 3"]),
    ("stages.one.share=1", ["stages.one.share=1", "below 3"]),
    ("stages.².share=1", ["stages.².share=1", "below 3"]),
    ("stages.0.rows=5", ["unknown key 'stages.0.rows'", "row_tokens"]),
    ("stages.0.share=half", ["share=half", "like 0.5 (float)"]),
    # numbers that must be positive, not negative, finite, in a range
    *((f"{name}=0", [f"{name}=0", "it must be positive"]) for name in POSITIVE),
    *((f"{name}=-1", [f"{name}=-1", "it must be positive"]) for name in POSITIVE),
    *((f"{name}=-1", [f"{name}=-1", "it must not be negative"]) for name in NOT_NEGATIVE),
    *((f"{name}=nan", [f"{name}=nan", "must be float, and finite"]) for name in FLOATS),
    *((f"{name}=inf", [f"{name}=inf", "must be float, and finite"]) for name in FLOATS),
    *((f"{name}=1.01", [f"{name}=1.01", "a share, 0 to 1"]) for name in SHARES),
    *((f"{name}=-0.01", [f"{name}=-0.01", "a share, 0 to 1"]) for name in SHARES),
    *((f"{x}={most + 1}", [f"{x}={most + 1}", f"at most {most}"]) for x, most in AT_MOST.items()),
    (f"prefetch={2**63}", [f"prefetch={2**63}", "it must be int, and finite"]),
    ("preset=a/b", ["preset='a/b'", "letters"]),
    ("adam_eps=1e-60", ["adam_eps=1e-60", "float32"]),
    ("adam_eps=0", ["adam_eps=0.0", "float32"]),  # 0/0 for tokens that were never seen
    ("adam_eps=-1", ["adam_eps=-1.0", "float32"]),
    ("rope_base=0.5", ["rope_base=0.5", "1 or more"]),
    ("momentum=(-0.1,0.5)", ["momentum=(-0.1, 0.5)", "[0, 1)"]),
    ("momentum=(0.5,1)", ["momentum=(0.5, 1.0)", "[0, 1)"]),
    ("logit_cap=(0,5,7.5)", ["logit_cap=(0.0, 5.0, 7.5)", "0 to 64"]),
    ("logit_cap=(65,5,7.5)", ["logit_cap=(65.0, 5.0, 7.5)", "0 to 64"]),  # exp overflows float32
    ("logit_cap=(23,5,0)", ["logit_cap=(23.0, 5.0, 0.0)", "c above 0"]),
    ("logit_cap=(23,5,-1)", ["logit_cap=(23.0, 5.0, -1.0)", "c above 0"]),
    (
        "logit_cap=(23,1e999,7.5)",
        ["logit_cap=(23,1e999,7.5)", "like (23.0, 5.0"],
    ),  # all logits would be 23
    ("logit_cap=(23,5,1e999)", ["logit_cap=(23,5,1e999)", "like (23.0, 5.0"]),  # or all the same
    # sizes of the model
    ("heads=3", ["heads=3", "divide width=32"]),
    ("heads=16", ["heads=16", "multiple of 8"]),
    ("width=8 heads=1", ["heads=1", "even", "two heads of q and k"]),
    ("width=36 heads=2", ["heads=2", "multiple of 8"]),
    ("vocab=40022", ["vocab=40022", "no multiple of 20011"]),
    ("ngram_rows=521", ["ngram_rows=521", "an even number"]),
    ("ngram_rows=2", ["ngram_rows=2", "4 or more"]),
    ("ngram_ids=both", ["ngram_ids='both'", "normalised or raw"]),
    ("sign_rows=0", ["sign_rows=0", "a power of two"]),
    ("sign_rows=96", ["sign_rows=96", "a power of two"]),
    ("attn_scales=(0,1)", ["attn_scales=(0.0, 1.0)", "above 0"]),
    ("real_tokens=70000", ["real_tokens=70000", "1 to vocab=104"]),
    ("real_tokens=70000 vocab=80000", ["real_tokens=70000", "at most 65536"]),
    ("real_tokens=105", ["real_tokens=105", "1 to vocab=104"]),
    ("real_tokens=0", ["real_tokens=0", "1 to vocab=104"]),
    ("bos=97", ["bos=97", "0 to real_tokens-1=96"]),
    ("bos=-1", ["bos=-1", "0 to real_tokens-1=96"]),
    ("encoding=utf8", ["encoding='utf8'", "gpt2 or bytes or bpe"]),
    ("compute_dtype=float16", ["compute_dtype='float16'", "bfloat16 or float32"]),
    ("kernels=fast", ["kernels='fast'", "auto, plain, or some of attend,"]),
    ("checkpoint_end=maybe", ["checkpoint_end='maybe'", "auto or always or never"]),
    ("recompute=layers", ["recompute=layers", "like False (bool)"]),
    ("recompute=2", ["recompute=2", "like False (bool)"]),
    ("data=", ["data=''", "the name of a folder"]),
    # which layers do what
    ("skip=(2,2)", ["skip=(2, 2)", "an earlier and a later layer"]),
    ("skip=(3,1)", ["skip=(3, 1)", "an earlier and a later layer"]),
    ("skip=(1,4)", ["skip=(1, 4)", "an earlier and a later layer"]),  # the last is another kind
    ("skip=(-1,2)", ["skip=(-1, 2)", "an earlier and a later layer"]),
    ("source=1", ["source=1", "between skip[0] and the last one"]),
    ("source=4", ["source=4", "between skip[0] and the last one"]),
    ("layers.1.attends=far", ["layers.1.attends='far'", "short, long or paired"]),
    ("layers.1.mlps=9", ["layers.1.mlps=9", "0 to 8"]),
    ("layers.1.mlps=-1", ["layers.1.mlps=-1", "0 to 8"]),
    *(
        (f"layers.2.{name}=1", ["layers.2.attends=''", "need an attention"])
        for name in ("values", "xsa", "gated", "narrow")
    ),
    ("layers.0.ngram=0", ["layers.0.ngram=False", "begins with the n-gram vector"]),
    ("layers.4.values=0", ["layers.4.values=False", "the last layer needs them"]),
    (
        "layers.4.attends= layers.4.values=0 layers.4.gated=0",
        ["layers.4.values=False", "the last layer needs them"],
    ),
    ("layers.4.mlps=0", ["layers.4.mlps=0", "the last layer needs one"]),
    ("layers.0.values=0 layers.3.values=0", ["layers=", "2 to 8 of them must have values"]),
    # optimizers
    ("event_every=(0,2)", ["event_every=(0, 2)", "a number and a multiple"]),
    ("event_every=(4,2)", ["event_every=(4, 2)", "a number and a multiple"]),
    ("event_every=(4,6)", ["event_every=(4, 6)", "a number and a multiple"]),
    ("event_every=(1,2)", ["event_every=(1, 2)", "multiples of adam_every"]),
    ("adam_every=3", ["event_every=(2, 4)", "multiples of adam_every"]),
    ("event_change=3", ["event_every=(2, 4)", "of which event_change is one"]),
    ("rail_fast=(1.5,0)", ["rail_fast=(1.5, 0.0)", "two shares"]),
    ("rail_fast=(1,-.5)", ["rail_fast=(1.0, -0.5)", "two shares"]),
    # stages
    ("extension=10", ["extension=10", "fewer than steps=10"]),
    ("extension=0", ["extension=0", "share=0"]),  # the last stage has no share
    ("stages.0.share=0.7", ["stages.0.share=0.7", "shares above 0 that add up to 1"]),
    ("stages.0.share=nan", ["stages.0.share=nan", "float, and finite"]),
    ("stages.0.share=1.5 stages.1.share=-0.5", ["stages.0.share=1.5", "add up to 1"]),
    ("stages.0.share=0.4 stages.2.share=0.1", ["extension=2", "share=0"]),
    ("steps=3", ["steps=3", "at least one step"]),  # 2 for the extension, 1 for two stages
    ("stages.0.share=0.02 stages.1.share=0.98", ["steps=10", "at least one step"]),
    ("stages.1.lr_factor=inf", ["stages.1.lr_factor=inf", "finite"]),
    ("stages.1.lr_factor=-1", ["stages.1.lr_factor=-1.0", "0 or more"]),
    ("stages.0.row_tokens=0", ["stages.0.row_tokens=0", "positive"]),
    ("stages.1.batch_tokens=500", ["stages.1.batch_tokens=500", "multiple of row_tokens=64"]),
    ("stages.1.batch_tokens=1024", ["batch_tokens=1024", "as many rows as the first stage: 8"]),
    ("stages.0.prefix=()", ["stages.0.prefix=()", "one number or more"]),
    ("stages.0.prefix=(0,-1)", ["stages.0.prefix=(0.0, -1.0)", "0 or more"]),
    ("stages.0.candidates=()", ["stages.0.candidates=()", "one number or more"]),
    ("stages.0.candidates=(105,)", ["stages.0.candidates=(105,)", "0 (all) to vocab=104"]),
    ("stages.0.candidates=(-1,)", ["stages.0.candidates=(-1,)", "0 (all) to vocab=104"]),
    ("stages.1.batch_tokens=0", ["stages.1.batch_tokens=0", "multiple of row_tokens=64"]),
    ("stages.0.doc_cap=-1", ["stages.0.doc_cap=-1", "length in tokens"]),
    ("stages.0.windows=(-1,5)", ["stages.0.windows=(-1, 5)", "two lengths"]),
    ("stages.0.windows=(5,0)", ["stages.0.windows=(5, 0)", "two lengths"]),
    ("stages.0.weights=()", ["stages.0.weights=()", "1 to row_tokens=32 numbers"]),
    ("stages.0.weights=(0,1)", ["stages.0.weights=(0.0, 1.0)", "the first above 0"]),
    ("stages.0.weights=(1,-1)", ["stages.0.weights=(1.0, -1.0)", "0 or more"]),
    ("stages.0.weights=(1,1e999)", ["stages.0.weights=(1,1e999)", "like (1.0, 0.5)"]),
    ("stages.0.weights_end=(1,-1)", ["stages.0.weights_end=(1.0, -1.0)", "0 or more"]),
    ("stages.0.weights=(1,)", ["stages.0.weights_end=(1.0, 0.0)", "as many as weights=(1.0,)"]),
    ("stages.1.weights=(1,.5)", ["stages.1.weights_end=(1.0,)", "as many as weights=(1.0, 0.5)"]),
    ("stages.1.weights_end=()", ["stages.1.weights_end=()", "as many as weights=(1.0,)"]),
    (
        "stages.0.row_tokens=1 stages.0.batch_tokens=8",  # two tokens ahead
        ["stages.0.weights=(1.0, 0.5)", "1 to row_tokens=1 numbers"],
    ),
    # validation
    ("val_windows=(-1,5)", ["val_windows=(-1, 5)", "two lengths"]),
    ("val_batch=500", ["val_batch=500", "multiple of val_row=64"]),
    ("val_tokens=1000", ["val_tokens=1000", "multiple of val_batch=512"]),
]


@pytest.mark.parametrize("item, words", BAD_SETTINGS, ids=[item for item, _ in BAD_SETTINGS])
def test_a_bad_setting_is_refused_by_name_and_value(item, words):
    with pytest.raises(T.UserError) as refusal:
        resolve("small", *item.split(" "))
    text = str(refusal.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_every_field_has_a_value_that_is_refused():
    items = " ".join(item for item, _ in BAD_SETTINGS).split()
    tried = {item.partition("=")[0].split(".")[-1] for item in items}
    fields = [field for of in (T.Config, T.Stage, T.Layer) for field in dataclasses.fields(of)]
    assert {field.name for field in fields} <= tried


def test_no_stages_are_refused():
    with pytest.raises(T.UserError, match="stages=.*at least one stage"):
        small_config(stages=())


def test_an_extension_needs_a_stage_before_it():
    with pytest.raises(T.UserError, match="stages.0.share=0.0 .*but for the extension"):
        small_config(stages=(T.Stage(0.0, 256, 32, 0, (8, 32)),))
    with pytest.raises(T.UserError, match="extension=2 .*share=0"):
        small_config(stages=(T.Stage(1.0, 256, 32, 0, (8, 32)),))


@pytest.mark.parametrize(
    "changes",
    [
        {"extension": 0, "stages": (T.Stage(1.0, 256, 32, 0, (8, 32)),)},
        {"extension": 9, "stages": (T.Stage(1, 64, 8, 0, (8, 8)), T.Stage(0, 64, 8, 0, (8, 8)))},
        {"skip": (0, 3), "source": 1},
        {"skip": (2, 3), "source": 3},  # of and to a layer that does not attend, and one that does
        {"cooldown": 0.0, "lr_floor": 1, "tied": 1.0, "slow_rate": 0.0},  # edges of shares
        {"cooldown": 1.0, "lr_floor": 0.0, "tied": 0.0, "momentum": (0, 0)},
        {"momentum_cooldown": 0, "lr_anvil": 0.0, "decay_adam": 0, "tail": 99, "tail_average": 0},
        {"adam_every": 9, "event_every": (9, 9), "event_change": 0, "rails_step": 0},
        {"adam_every": 1, "event_every": (1, 3), "event_change": 3},
        {"logit_cap": (64.0, -5.0, 1e-3)},
        {"vocab": 101, "ngram_rows": 522},  # tables need not be divisible by devices
    ],
)
def test_unusual_configs_that_are_valid(changes):
    cfg = small_config(**changes)
    assert f"{cfg.steps} steps, " in T.show(cfg)
    assert T.programs(*T.make_mesh(cfg, T.all_devices()[:1]), T.PLAIN)
    assert [T.hyper_at(cfg, step) for step in range(cfg.steps)]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"layers": "4"}, "layers='4' .*must be tuple"),
        ({"layers": (1,)}, "layers=.1,. .*must be tuple"),
        ({"layers": ()}, "skip=.1, 2. .*a later layer"),
        ({"layers": [T.Layer()]}, "layers=.*must be tuple"),
        ({"layers": (T.Layer("long", mlps=1.0),)}, "layers.0.mlps=1.0 .*must be int"),
        ({"heads": True}, "heads=True .*must be int"),
        ({"tied": "yes"}, "tied='yes' .*must be float"),
        ({"recompute": 1}, "recompute=1 .*must be bool"),
        ({"skip": [0, 2]}, r"skip=\[0, 2\] .*must be tuple"),
        ({"skip": (0, 2, 3)}, r"skip=\(0, 2, 3\) .*must be tuple"),
        ({"event_every": (2, 4.0)}, r"event_every=\(2, 4.0\) .*must be tuple"),
        ({"logit_cap": (23.0, 5.0)}, r"logit_cap=\(23.0, 5.0\) .*must be tuple"),
        ({"stages": (1,)}, r"stages"),
        (
            {"stages": (T.Stage(1.0, 256, 32, 0, (8, 32), 1.0, (1.0, "a")),)},
            r"stages.0.weights=\(1.0, 'a'\) .*must be tuple",
        ),
    ],
)
def test_wrong_types_are_refused(changes, words):
    with pytest.raises(T.UserError, match=words):
        small_config(**changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"devices": 16}, "devices=16, but there are 8: use a smaller number or 0"),
    ],
)
def test_device_counts_that_cannot_share_the_work_are_refused(changes, words):
    with pytest.raises(T.UserError, match=words):
        T.make_mesh(small_config(**changes))


@pytest.mark.parametrize(
    "devices, used, row_tokens",
    [
        *((n, m, (32, 64, 64)) for n, m in zip(range(1, 9), (1, 2, 2, 4, 4, 4, 4, 8), strict=True)),
        (12, 8, (32, 64, 64)),  # 256 tokens are no 12 equal rows
        (16, 16, (16, 32, 32)),
        (200, 128, (2, 4, 4)),  # of 256 rows of one token none has a second target
    ],
)
def test_rows_divide_over_the_devices_that_are_used(devices, used, row_tokens):
    """Of eight rows the first devices have equally many, or each has a shorter one of its own."""
    cfg = T.for_devices(small_config(), devices)
    assert cfg.devices == used and tuple(s.row_tokens for s in cfg.stages) == row_tokens
    for stage, before in zip(cfg.stages, small_config().stages, strict=True):
        assert stage.batch_tokens == before.batch_tokens and stage.rows % used == 0
        assert replace(stage, row_tokens=before.row_tokens) == before
    assert cfg.val_batch % (used * cfg.val_row) == 0
    assert T.for_devices(cfg, used) == cfg


def test_rows_of_the_record_are_whole_blocks_on_every_slice():
    for devices in (16, 32, 64, 128, 256):
        cfg = T.for_devices(T.Config(), devices)
        assert cfg.devices == devices and {s.row_tokens % T.BLOCK for s in cfg.stages} == {0}
    assert T.for_devices(T.Config(), 512).devices == 256  # 640 is no whole block


def test_an_unknown_preset_is_one_line_and_status_2(capsys):
    assert T.main(["sprint"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown preset 'sprint'; there are: speedrun, medium, tiny")
    assert error.count("\n") == 1


def test_a_bad_option_is_one_line_and_status_2(capsys):
    assert T.main(["tiny", "--seed", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "--seed" in error and error.count("\n") == 1


# Round trip and immutability


@pytest.mark.parametrize(
    "cfg",
    [
        *T.PRESETS.values(),
        small_config(skip=(0, 3), logit_cap=(30.0, 0.0, 7.5)),
    ],
    ids=lambda cfg: cfg.preset,
)
def test_config_survives_json(cfg):
    back = T.config_from_json(json.loads(json.dumps(dataclasses.asdict(cfg))))
    assert back == cfg
    assert hash(back) == hash(cfg)  # no list is left in it


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda fields: fields.pop("stages"), "stored config .*stages"),
        (lambda fields: fields.update(extra=1), "stored config .*extra"),
        (lambda fields: fields.pop("layers"), "stored config .*layers"),
        (lambda fields: fields.update(layers="two"), "stored config "),
        (lambda fields: fields.update(layers=11), "stored config "),  # as before record 92
        (lambda fields: fields["layers"][0].pop("x0"), "stored config .*lacks x0: use the one"),
        (lambda fields: fields["stages"][0].pop("candidates"), "stored config .*lacks candidates"),
        (lambda fields: fields["layers"][0].update(far=True), "stored config .*far"),
        (lambda fields: fields["layers"][0].update(mlps="x"), "layers.0.mlps='x'"),
        (lambda fields: fields.update(heads=3), "heads=3 .*divide width=32"),
        (lambda fields: fields.pop("adam_every"), "stored config .*adam_every"),
        (lambda fields: fields.update(softcap=30.0), "stored config .*softcap"),
        (lambda fields: fields.update(skip=[0, 2, 3]), r"skip=\(0, 2, 3\)"),
        (lambda fields: fields["stages"][0].pop("share"), "stored config .*share"),
        (lambda fields: fields["stages"][0].update(weights=[1.0, "a"]), "stages.0.weights="),
        (lambda fields: fields["stages"][0].update(windows=3), "stored config "),
    ],
)
def test_a_stored_config_that_does_not_fit_is_refused(change, words):
    fields = json.loads(json.dumps(dataclasses.asdict(small_config())))
    change(fields)
    with pytest.raises(T.UserError, match=words):
        T.config_from_json(fields)


@pytest.mark.parametrize(
    "obj", [SPEEDRUN, SPEEDRUN.stages[0], SPEEDRUN.layers[0], T.param_table(SPEEDRUN)["head"]]
)
def test_configs_are_frozen(obj):
    field = dataclasses.fields(obj)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(obj, field, 1)
