"""Config: presets, derived numbers, --set, and errors of settings."""

import dataclasses
import json
from dataclasses import replace

import pytest
from conftest import small_config

import train_gpt as T

SPEEDRUN = T.PRESETS["speedrun"]


def resolve(*items: str) -> T.Config:
    """Return small_config() with `--set ITEM ...`."""
    return T.override(small_config(), [*items])


# ---- Presets -----------------------------------------------------------------------------------


def test_sizes_of_the_speedrun():
    assert SPEEDRUN == T.Config()
    assert SPEEDRUN.boundaries == (0, 320, 681, 1107, 1174, 1194)
    assert [stage.rows for stage in SPEEDRUN.stages] == [8] * 5
    assert SPEEDRUN.tokens_after(SPEEDRUN.steps) == 328_663_040
    assert len(SPEEDRUN.layers) == 11
    assert SPEEDRUN.val_tokens == 5 * SPEEDRUN.val_batch == 5 * 8 * SPEEDRUN.val_row == 10_485_760
    assert SPEEDRUN.layers_with("attends") == (0, 1, 2, 3, 5, 8, 10)
    assert SPEEDRUN.layers_with("values") == (1, 2, 8, 10)
    assert sum(layer.mlps for layer in SPEEDRUN.layers) == 11


@pytest.mark.parametrize(
    "devices, used, row_tokens",
    [
        *((n, m, (32, 64, 64)) for n, m in zip(range(1, 9), (1, 2, 2, 4, 4, 4, 4, 8), strict=True)),
        (12, 8, (32, 64, 64)),  # 256 tokens cannot be divided into 12 equal rows
        (16, 16, (16, 32, 32)),
        (200, 128, (2, 4, 4)),  # in rows of one token, no token has a second target
    ],
)
def test_used_devices_divide_the_rows_evenly(devices, used, row_tokens):
    """Up to eight devices share eight rows. More devices have one shorter row each."""
    cfg = T.for_devices(small_config(), devices)
    assert cfg.devices == used and tuple(s.row_tokens for s in cfg.stages) == row_tokens
    for stage, before in zip(cfg.stages, small_config().stages, strict=True):
        assert stage.rows % used == 0 and replace(stage, row_tokens=before.row_tokens) == before
    assert cfg.val_batch % (used * cfg.val_row) == 0
    assert T.for_devices(cfg, used) == cfg


def test_more_devices_than_there_are_are_refused():
    with pytest.raises(T.UserError, match="devices=16, but there are 8: use fewer, or 0"):
        T.make_mesh(small_config(devices=16))


def test_several_processes_must_use_all_their_devices():
    """A process without a device in the mesh could not run the programs."""

    class Device:
        def __init__(self, number):
            self.process_index, self.id, self.platform = number // 3, number, "cpu"

    with pytest.raises(T.UserError, match="6 devices of several processes cannot .*: use 4"):
        T.make_mesh(small_config(), [Device(number) for number in range(6)])


# ---- --set -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item, value",
    [
        ("prefetch=6", 6),
        ("lr_anvil=1e-2", 0.01),
        ("tied=0", 0.0),  # written as an int, stored as a float
        ("data=some/where=1", "some/where=1"),
        ("momentum=(0.5,0.9)", (0.5, 0.9)),
        ("momentum=[0, 0.5]", (0.0, 0.5)),
        ("momentum=0,0.5", (0.0, 0.5)),
        ("recompute=1", True),
        ("recompute=False", False),
        ("recompute=true", True),
        ("stages.1.windows=(7,70)", (7, 70)),
        ("stages.1.candidates=(80,0,104)", (80, 0, 104)),
        ("layers.1.attends=short", "short"),
    ],
)
def test_set_replaces_one_field_and_keeps_its_type(item, value):
    key = item.partition("=")[0]
    want = got = resolve(item)
    for part in key.split("."):
        got = got[int(part)] if part.isdecimal() else getattr(got, part)
    assert repr(got) == repr(value)  # 2.0, not 2
    changed = [
        x for x in dataclasses.asdict(want) if getattr(want, x) != getattr(small_config(), x)
    ]
    assert changed in ([], [key.split(".")[0]])


# Setting -> a part of the error.
BAD_SETTINGS = {
    # unknown keys, and values of another type
    "layerz=3": "--set layerz=3: unknown key 'layerz'; similar: layers; --show prints all",
    "stages.*.widows=2,3": "unknown key 'stages.*.widows'; similar: stages.N.windows; ",
    "layers.0.skips=1": "unknown key 'layers.0.skips'; similar: layers.N.skip, ",
    "lr=1": "unknown key 'lr'; similar: lr_anvil, lr_adam; --show",
    "windows=2,3": "unknown key 'windows'; similar: val_windows, stages.N.windows; --show",
    "=3": "--set =3: unknown key ''; similar: none",
    "zzz=1": "unknown key 'zzz'; similar: none; --show prints all; N counts from 0",
    "tiny": "--set tiny: write KEY=VALUE; texts and presets go before --set",
    "steps": "--set steps: write KEY=VALUE; texts and presets go before --set",
    "stages.4.share=1": "unknown key 'stages.4.share'; similar: stages.N.share",
    "stages.share=1": "unknown key 'stages.share'; similar: stages.N.share",
    "layers.5.mlps=1": "unknown key 'layers.5.mlps'; similar: layers.N.mlps",
    "stages.3.windows.0=1": "unknown key 'stages.3.windows.0'",
    "stages.0.rows=5": "unknown key 'stages.0.rows'",
    "vocab=2.5": "vocab=2.5 must be int",
    "lr_adam=nan": "lr_adam='nan' must be float",
    "momentum=0.9": "momentum=0.9 must be tuple[float, float], see --show",
    "momentum=(0.9,": "momentum='(0.9,' must be tuple[float, float]",
    "layers.1.skip=0.5": "layers.1.skip=0.5 must be int",
    "stages.0.candidates=48": "candidates=48 must be tuple[int, ...], see --show",
    "recompute=layers": "recompute='layers' must be bool",
    f"prefetch={2**63}": "must be from 0 to 2**32 - 1",
    "encoding=5": "encoding='5' must be gpt2, bytes, bpe, ids",
    # values out of range
    "lr_anvil=-0.1": "lr_anvil=-0.1 must be from 0 to",
    "adam_eps=0": "adam_eps=0 must be positive",  # 0/0 for unused tokens
    "stages.0.row_tokens=0": "stages.0.row_tokens=0 must be positive",
    "compute_dtype=float16": "compute_dtype='float16' must be bfloat16, float32",
    "kernels=fast": "kernels='fast' must be auto, plain, or some of attend,",
    "checkpoint_end=maybe": "checkpoint_end='maybe' must be auto, always, never",
    # sizes of the model
    "heads=3": "heads=3 must be an even number that cuts width=32 into multiples of 8",
    "ngram_rows=521": "ngram_rows=521 must be an even number, 4 or more",
    "ngram_drop=1": "ngram_drop=1.0 must be 0 or more, and less than 1",
    "sign_rows=96": "sign_rows=96 must be a power of two",
    "real_tokens=105": "real_tokens=105 must be 1 to vocab=104",
    "bos=97": "bos=97 must be less than real_tokens=97",
    # layers
    "layers.2.skip=3": "layers.2.skip=3 must be a number of layers up to 2",
    "layers.3.reads_back=4": "layers.3.reads_back=4 must be a number of layers up to 3",
    "layers.0.new_gates=1": "layers.0.new_gates=True must be False in layer 0",
    "layers.1.mudd=1": "layers.1.mudd=True must be False except in a last layer",
    "layers.1.attends=far": "layers.1.attends='far' must be short or long, as xsa, gated",
    "layers.2.attends=far": "layers.2.attends='far' must be short, long, or empty",
    "layers.2.values=1": "layers.2.attends='' must be short or long, as values needs",
    "layers.4.mlps=0": "layers.4.mudd=True must be False except in a last layer with",
    "layers.1.mlps=-1": "layers.1.mlps=-1 must be from 0 to",
    # optimizers
    "table_every=(4,6)": "table_every=(4, 6) must be multiples of adam_every=2",
    "table_change=6": "table_change=6 must be a multiple of 4",
    # stages and validation
    "extension=10": "steps=10 must be one or more for each stage: 12 are enough",
    "extension=0": "extension=0 must be the steps of the last stage if that has share=0",
    "stages.0.share=0.7": "stages.0.share=0.7 must be shares that add up to 1, not 1.2: "
    "set stages.0.share, stages.1.share, stages.2.share",
    "stages.1.share=0": "stages.1.share=0.0 must be above 0; only the last may be 0",
    "stages.3.windows=8,64": "stages.2.share=0.0 must be",
    "steps=3": "steps=3 must be one or more for each stage: 4 are enough",
    "stages.1.batch_tokens=500": "=500 must be a multiple of row_tokens=64",
    "stages.1.batch_tokens=256": "=256 must be 8 rows of 64, as in stages.0",
    "stages.1.row_tokens=1": "stages.1.row_tokens=1 must be 2 or more",
    "stages=()": "stages=() must be one or more",
    "stages.0.windows=(0, 0)": "stages.0.windows.0=0 must be positive",
    "preset=../evil": "preset='../evil' must be letters, digits",
    "width=10000000000": "width=10000000000 must be from 0 to 2**32 - 1",
    "val_row=1": "val_batch=512 must be a multiple of val_row=1, which is 2 or more",
    "epochs=0": "epochs=0 must be positive",
    "stages.0.prefix_weights=()": "stages.0.prefix_weights=() must be one or more",
    "stages.0.candidates=(105,)": "stages.0.candidates=(105,) must be up to vocab=104",
    "stages.0.loss_weights=(1,)": "the first above 0, and as many as loss_weights_end",
    "val_batch=500": "val_batch=500 must be a multiple of val_row=64",
    "val_tokens=1000": "val_tokens=1000 must be a multiple of val_batch=512",
}


@pytest.mark.parametrize("item", BAD_SETTINGS)
def test_a_bad_setting_is_refused_with_its_name_and_value(item):
    with pytest.raises(T.UserError) as refusal:
        resolve(item)
    assert BAD_SETTINGS[item] in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_stage_is_added_as_a_copy_of_the_last_one():
    """So --set can let windows grow in `tiny`, which has one stage."""
    tiny = T.PRESETS["tiny"]
    words = "stages.0.windows=16,64 stages.1.windows=32,128 stages.0.share=0.5 stages.1.share=0.5"
    cfg = T.override(tiny, words.split())
    first = replace(tiny.stages[0], share=0.5, windows=(16, 64))
    assert cfg == replace(tiny, stages=(first, replace(first, windows=(32, 128))))
    assert cfg.boundaries == (0, 220, 440)
    more = ["stages.2.share=0.5", "stages.2.windows=16,16", "stages.1.share=0.25"]
    cfg = T.override(cfg, [*more, "stages.2.share=0.25"])  # stage 2 exists now
    assert [stage.share for stage in cfg.stages] == [0.5, 0.25, 0.25]
    words = r"not 2: set stages.0.share, stages.1.share$"
    with pytest.raises(T.UserError, match=words):
        T.override(tiny, ["stages.1.windows=16,64"])


@pytest.mark.parametrize("cfg", [*T.PRESETS.values(), small_config()], ids=lambda cfg: cfg.preset)
def test_config_survives_json(cfg):
    back = T.typed(T.Config, json.loads(json.dumps(dataclasses.asdict(cfg))))
    assert back == cfg
    assert hash(back) == hash(cfg)  # lists became tuples


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda fields: fields["stages"][0].pop("share"), "stages.0: share is missing, and has no"),
        (lambda fields: fields.update(softcap=30.0), "another train_gpt.py .*softcap"),
        (
            lambda fields: fields.update(layers=11),
            "layers=11 must be",
        ),  # an int in versions before record 92
        (lambda fields: fields["stages"][0].update(loss_weights=[1.0, "a"]), "weights.1='a'"),
    ],
)
def test_a_stored_config_of_another_source_is_refused(change, words):
    fields = json.loads(json.dumps(dataclasses.asdict(small_config())))
    change(fields)
    with pytest.raises(T.UserError, match=words):
        T.typed(T.Config, fields)


def test_settings_suggested_for_names_of_other_trainers_exist():
    fields = {*T.Config.__annotations__} | {f"stages.*.{x}" for x in T.Stage.__annotations__}
    assert {*sum(T.FOREIGN.values(), [])} <= fields
    assert not {*T.FOREIGN} & fields
    assert T.similar_settings("n-embd") == T.similar_settings("model.n_embd") == ["width"]
    assert T.as_setting("--lr=0.1") == "--set lr_anvil=0.1 lr_adam=0.1"
    assert T.as_setting("--heds") == "--set heads=..." and T.as_setting("--zzz=1") == ""


def test_old_names_of_settings_are_accepted(tmp_path):
    """In --set, and in the configs of checkpoints and logs."""
    old = [
        "still=0",
        "stages.0.weights=1,0.5",
        "stages.0.weights_end=1,0",
        "passes=2",
        "layers.3.reads=1",
    ]
    new = [
        "half_rope=0",
        "stages.0.loss_weights=1,0.5",
        "stages.0.loss_weights_end=1,0",
        "epochs=2",
    ]
    new.append("layers.3.reads_back=1")
    tiny = T.PRESETS["tiny"]
    cfg = T.override(tiny, new)
    assert T.override(tiny, old) == cfg != tiny
    text = json.dumps(dataclasses.asdict(cfg))
    for before, after in T.RENAMED.items():
        text = text.replace(f'"{after}":', f'"{before}":')
    assert T.typed(T.Config, json.loads(text)) == cfg and '"still"' in text
