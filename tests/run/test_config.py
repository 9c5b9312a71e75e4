"""Config: presets, the numbers that follow from them, --set, and refusals that tell why."""

import dataclasses
import json
import shlex
from dataclasses import replace

import pytest
from conftest import small_config

import train_gpt as T

SPEEDRUN = T.PRESETS["speedrun"]


def resolve(*items: str) -> T.Config:
    """small_config() with `--set ITEM ...`."""
    return T.override(small_config(), [*items])


# ---- Presets and what follows from them --------------------------------------------------------


def test_speedrun_sizes_by_hand():
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
        assert stage.rows % used == 0 and replace(stage, row_tokens=before.row_tokens) == before
    assert cfg.val_batch % (used * cfg.val_row) == 0
    assert T.for_devices(cfg, used) == cfg


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(T.UserError, match="devices=16, but there are 8: use fewer, or 0"):
        T.make_mesh(small_config(devices=16))


def test_devices_of_several_processes_are_all_used_or_the_count_is_refused():
    """A process without a device in the mesh could not take part."""

    class Device:
        def __init__(self, number):
            self.process_index, self.id, self.platform = number // 3, number, "cpu"

    with pytest.raises(T.UserError, match="6 devices of several processes .* 4 would"):
        T.make_mesh(small_config(), [Device(number) for number in range(6)])


# ---- --set -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item, value",
    [
        ("prefetch=6", 6),
        ("lr_anvil=1e-2", 0.01),
        ("tied=0", 0.0),  # a float, although it is written as an int
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


# Settings, and what the one line must say.
BAD_SETTINGS = {
    # what cannot be read
    "layerz=3": "unknown key 'layerz'; most like it: layers; --show prints all, N counts from 0",
    "stages.*.widows=2,3": "unknown key 'stages.*.widows'; most like it: stages.N.windows, ",
    "layers.0.skips=1": "unknown key 'layers.0.skips'; most like it: layers.N.skip, ",
    "lr=1": "unknown key 'lr'; most like it: lr_floor, lr_anvil, lr_adam, stages.N.lr_factor; --sh",
    "windows=2,3": "unknown key 'windows'; most like it: val_windows, stages.N.windows; --show",
    "=3": "--set =3: unknown key ''; --show prints all",
    "epochs=3": "unknown key 'epochs'; write --set passes=N; --show prints all",
    "zzz=1": "--set zzz=1: unknown key 'zzz'; --show prints all, N counts from 0 or is * for all",
    "tiny": "--set tiny: write KEY=VALUE; texts and presets go before --set",
    "steps": "--set steps: write KEY=VALUE; texts and presets go before --set",
    "stages.4.share=1": "there is no 'stages.4.share': N of stages.N.share is 0 to 2; stages.3",
    "stages.share=1": "unknown key 'stages.share'; most like it: stages.N.share",
    "layers.5.mlps=1": "there is no 'layers.5.mlps': N of layers.N.mlps is 0 to 4",
    "stages.3.windows.0=1": "unknown key 'stages.3.windows.0'",
    "stages.0.rows=5": "unknown key 'stages.0.rows'",
    "vocab=2.5": "vocab=2.5 is not valid: it must be int",
    "lr_adam=nan": "lr_adam='nan' is not valid: it must be float",
    "momentum=0.9": "momentum=0.9 is not valid: it must be tuple[float, float], see --show",
    "momentum=(0.9,": "momentum='(0.9,' is not valid: it must be tuple[float, float]",
    "layers.1.skip=0.5": "layers.1.skip=0.5 is not valid: it must be int",
    "stages.0.candidates=48": "candidates=48 is not valid: it must be tuple[int, ...], see --show",
    "recompute=layers": "recompute='layers' is not valid: it must be bool",
    f"prefetch={2**63}": "is not valid: it must not be negative, nor so large",
    "encoding=5": "encoding='5' is not valid: gpt2, bytes, bpe, ids",
    # numbers that cannot be
    "lr_anvil=-0.1": "lr_anvil=-0.1 is not valid: it must not be negative",
    "adam_eps=0": "adam_eps=0 is not valid: it must be positive",  # 0/0 for tokens never seen
    "stages.0.row_tokens=0": "stages.0.row_tokens=0 is not valid: it must be positive",
    "compute_dtype=float16": "compute_dtype='float16' is not valid: bfloat16, float32",
    "kernels=fast": "kernels='fast' is not valid: auto, plain, or some of attend,",
    "checkpoint_end=maybe": "checkpoint_end='maybe' is not valid: auto, always, never",
    # sizes of the model
    "heads=3": "heads=3 is not valid: an even number that cuts width=32 into multiples of 8",
    "ngram_rows=521": "ngram_rows=521 is not valid: an even number, 4 or more",
    "ngram_drop=1": "ngram_drop=1.0 is not valid: 0 or more, and less than 1",
    "sign_rows=96": "sign_rows=96 is not valid: a power of two",
    "real_tokens=105": "real_tokens=105 is not valid: 1 to vocab=104",
    "bos=97": "bos=97 is not valid: less than real_tokens=97",
    # which layers do what
    "layers.2.skip=3": "layers.2.skip=3 is not valid: a number of layers up to 2",
    "layers.3.reads=4": "layers.3.reads=4 is not valid: a number of layers up to 3",
    "layers.0.looks=1": "layers.0.looks=True is not valid: not of the first",
    "layers.1.mudd=1": "layers.1.mudd=True is not valid: of the last, with attention",
    "layers.1.attends=far": "layers.1.attends='far' is not valid: short, long; or nothing",
    "layers.2.values=1": "layers.2.attends='' is not valid: short, long; or nothing, which values",
    "layers.4.mlps=0": "layers.4.mudd=True is not valid: of the last, with attention and MLP",
    "layers.1.mlps=-1": "layers.1.mlps=-1 is not valid: it must not be negative",
    # optimizers
    "table_every=(4,6)": "table_every=(4, 6) is not valid: multiples of adam_every=2",
    "table_change=6": "table_change=6 is not valid: a multiple of 4",
    # stages and validation
    "extension=10": "steps=10 is not valid: one for each stage: 12 are enough",
    "extension=0": "extension=0 is not valid: the steps of the last stage if that has share=0",
    "stages.0.share=0.7": "stages.0.share=0.7 is not valid: shares that add up to 1, not 1.2: "
    "set stages.0.share, stages.1.share, stages.2.share",
    "stages.1.share=0": "stages.1.share=0.0 is not valid: above 0; only the last may be 0, the ext",
    "stages.3.windows=8,64": "stages.2.share=0.0 is not valid",
    "steps=3": "steps=3 is not valid: one for each stage: 4 are enough",
    "stages.1.batch_tokens=500": "=500 is not valid: a multiple of row_tokens=64",
    "stages.1.batch_tokens=256": "=256 is not valid: 8 rows of 64, as in stages.0",
    "stages.1.row_tokens=1": "stages.1.row_tokens=1 is not valid: 2 or more",
    "stages=()": "stages=() is not valid: one or more",
    "stages.0.windows=(0, 0)": "stages.0.windows.0=0 is not valid: it must be positive",
    "preset=../evil": "preset='../evil' is not valid: letters, digits",
    "width=10000000000": "width=10000000000 is not valid: it must not be negative, nor so large",
    "val_row=1": "val_batch=512 is not valid: a multiple of val_row=1, which is 2 or more",
    "passes=0": "passes=0 is not valid: it must be positive",
    "stages.0.prefix=()": "stages.0.prefix=() is not valid: one or more",
    "stages.0.candidates=(105,)": "stages.0.candidates=(105,) is not valid: up to vocab=104",
    "stages.0.weights=(1,)": "the first above 0, and as many as weights_end",
    "val_batch=500": "val_batch=500 is not valid: a multiple of val_row=64",
    "val_tokens=1000": "val_tokens=1000 is not valid: a multiple of val_batch=512",
}


@pytest.mark.parametrize("item", BAD_SETTINGS)
def test_a_bad_setting_is_refused_by_name_and_value(item):
    with pytest.raises(T.UserError) as refusal:
        resolve(item)
    assert BAD_SETTINGS[item] in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_stage_is_added_as_a_copy_of_the_last_one():
    """Windows that grow in `tiny`, which has one stage, by --set alone."""
    tiny = T.PRESETS["tiny"]
    words = "stages.0.windows=16,64 stages.1.windows=32,128 stages.0.share=0.5 stages.1.share=0.5"
    cfg = T.override(tiny, words.split())
    first = replace(tiny.stages[0], share=0.5, windows=(16, 64))
    assert cfg == replace(tiny, stages=(first, replace(first, windows=(32, 128))))
    assert cfg.boundaries == (0, 220, 440)
    more = ["stages.2.share=0.5", "stages.2.windows=16,16", "stages.1.share=0.25"]
    cfg = T.override(cfg, [*more, "stages.2.share=0.25"])  # it is there now
    assert [stage.share for stage in cfg.stages] == [0.5, 0.25, 0.25]
    words = r"not 2: set stages.0.share, stages.1.share$"
    with pytest.raises(T.UserError, match=words):
        T.override(tiny, ["stages.1.windows=16,64"])


@pytest.mark.parametrize("cfg", [*T.PRESETS.values(), small_config()], ids=lambda cfg: cfg.preset)
def test_config_survives_json(cfg):
    back = T.typed(T.Config, json.loads(json.dumps(dataclasses.asdict(cfg))))
    assert back == cfg
    assert hash(back) == hash(cfg)  # no list is left in it


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda fields: fields["stages"][0].pop("share"), "stages.0: share is missing, and has no"),
        (lambda fields: fields.update(softcap=30.0), "another train_gpt.py .*softcap"),
        (lambda fields: fields.update(layers=11), "layers=11 is not valid"),  # before record 92
        (lambda fields: fields["stages"][0].update(weights=[1.0, "a"]), "weights.1='a'"),
    ],
)
def test_a_stored_config_of_another_source_is_refused(change, words):
    fields = json.loads(json.dumps(dataclasses.asdict(small_config())))
    change(fields)
    with pytest.raises(T.UserError, match=words):
        T.typed(T.Config, fields)


def test_what_other_trainers_call_settings_leads_to_some_that_exist():
    """Whatever is renamed here; and no name leads to two."""
    known = {*T.Config.__annotations__}
    known |= {f"stages.*.{name}" for name in T.Stage.__annotations__}
    of_settings = [here for here in T.ELSEWHERE if here.startswith("--set")]
    settings = [word for here in of_settings for word in shlex.split(here) if "=" in word]
    assert len(settings) > 10 and {x.partition("=")[0] for x in settings} <= known
    names = " ".join(T.ELSEWHERE.values()).split()
    assert len(names) == len({*names}) and {*names} & known == {"preset"}
