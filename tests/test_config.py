"""Config: presets, the numbers that follow from them, overrides, and refusals that tell why."""

import dataclasses
import json
import re

import pytest
from conftest import small_config

import train_gpt as T

SPEEDRUN = T.PRESETS["speedrun"]


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
    assert T.make_mesh(cfg).size == devices


def test_speedrun_parameters_by_hand():
    counts = {name: row.count for name, row in T.param_table(SPEEDRUN).items()}
    assert counts == {
        "embed": 50_304 * 1024,
        "resid_mix": 12 * 2,
        "skip": 6,
        "attn_bank": 12 * 4 * 1024 * 1024,
        "value_mix": 12,
        "attn_scale": 12,
        "mlp_bank": 12 * 2 * 4096 * 1024,
        "head": 1024 * 50_304,
    }
    assert sum(counts.values()) == 254_017_590


def test_speedrun_steps_and_tokens_by_hand():
    assert SPEEDRUN.boundaries == (0, 838, 1675)  # half of 1675 is 837.5
    assert [stage.rows for stage in SPEEDRUN.stages] == [512, 256]
    assert SPEEDRUN.total_tokens == 1675 * 524_288 == 878_182_400
    assert SPEEDRUN.val_tokens == 20 * SPEEDRUN.val_batch == 10_485_760
    assert SPEEDRUN.head_width == 256


def test_tokens_of_stages_with_different_batches():
    cfg = small_config(
        steps=7, stages=(T.Stage(0.3, 64, 8, 0, (4, 8)), T.Stage(0.7, 256, 8, 0, (4, 8)))
    )
    assert cfg.boundaries == (0, 2, 7)
    assert cfg.total_tokens == 2 * 64 + 5 * 256


def visible_keys(row: int, window: int) -> float:
    """Keys that the average token of a row sees, counted one by one."""
    return sum(0 <= t - s <= window for t in range(row) for s in range(row)) / row


@pytest.mark.parametrize("row, window, mflops", [(1024, 1024, 1290.6), (2048, 2048, 1366.1)])
def test_speedrun_flops_per_token(row, window, mflops):
    keys = 12 * (row + 1) / 2  # the window never cuts
    # per layer q, k, v, o and two MLP matrices; the head once; the embedding is a look-up
    weights = 12 * (4 * 1024 * 1024 + 2 * 1024 * 4096) + 1024 * 50_304
    # forward 2 per weight and 2 d per key for each of q k^T and p v, backward twice that
    expected = 3 * (2 * weights + 2 * 2 * 1024 * keys)
    assert T.flops_per_token(SPEEDRUN, row, (window, window)) == expected
    assert round(expected / 1e6, 1) == mflops


@pytest.mark.parametrize("row, windows", [(64, (16, 64)), (48, (0, 47)), (32, (5, 1000))])
def test_flops_count_the_keys_that_each_layer_sees(row, windows):
    cfg = small_config(layers=3, long_layers=(1,))
    keys = 2 * visible_keys(row, windows[0]) + visible_keys(row, windows[1])
    weights = 3 * (4 * 32 * 32 + 2 * 32 * 128) + 32 * 104
    expected = 3 * (2 * weights + 2 * 2 * 32 * keys)
    assert T.flops_per_token(cfg, row, windows) == pytest.approx(expected, rel=1e-12)


def test_show_prints_the_derived_numbers(capsys):
    assert T.main(["speedrun", "--show"]) == 0
    text = capsys.readouterr().out
    flops = 524_288 * (838 * 1_290_608_640 + 837 * 1_366_106_112)
    for pattern in (
        r"^layers = 12$",
        r"^embed +50304x1024 +51,511,296 +adam +0\.6$",
        r"^attn_bank +48x1024x1024 +50,331,648 +muon +0\.04$",
        r"^mlp_bank +24x4096x1024 +100,663,296 +muon +0\.04$",
        r"^total +254,017,590$",
        r"^ +0\.\.837 +524288 +1024 +- +1024/1024 +1 +439\.4 +1290\.6$",
        r"^ +838\.\.1674 +524288 +2048 +- +2048/2048 +1 +438\.8 +1366\.1$",
        rf"^1675 steps, 878,182,400 tokens, {re.escape(f'{flops:.3e}')} model FLOPs$",
        r"^programs: train-b524288-r1024-w1024-1024, train-.*, eval-b524288-r2048-w2048-2048$",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern


# Overrides, on small_config()


@pytest.mark.parametrize(
    "item, field, value",
    [
        ("layers=6", "layers", 6),
        ("softcap=15", "softcap", 15.0),
        ("lr_muon=1e-2", "lr_muon", 0.01),
        ("data=some/where=1", "data", "some/where=1"),
        ("adam_betas=(0.9,0.99)", "adam_betas", (0.9, 0.99)),
        ("adam_betas=[0, 0.5]", "adam_betas", (0.0, 0.5)),
        ("long_layers=(0,)", "long_layers", (0,)),
        ("long_layers=()", "long_layers", ()),
        ("long_layers=0,1", "long_layers", (0, 1)),
        ("val_windows=(5,6)", "val_windows", (5, 6)),
    ],
)
def test_set_replaces_one_field_and_keeps_its_type(item, field, value):
    cfg = resolve("small", item)
    got = getattr(cfg, field)
    assert got == value and type(got) is type(value)
    if isinstance(value, tuple):
        assert [type(x) for x in got] == [type(x) for x in value]
    assert cfg == dataclasses.replace(small_config(), **{field: value})


@pytest.mark.parametrize(
    "item, field, value",
    [
        ("stages.1.windows=(7,70)", "windows", (7, 70)),
        ("stages.1.lr_factor=0.5", "lr_factor", 0.5),
        ("stages.1.batch_tokens=640", "batch_tokens", 640),
    ],
)
def test_set_reaches_into_one_stage(item, field, value):
    first, second = small_config().stages
    changed = dataclasses.replace(second, **{field: value})
    assert resolve("small", item).stages == (first, changed)


def test_later_settings_win_and_flags_count():
    args = T.parse_args(["small", *"--set steps=3 --set steps=4 --data d --seed 5".split()])
    cfg = T.resolve(args)
    assert (cfg.steps, cfg.data, cfg.seed) == (4, "d", 5)


# Refusals: (setting, what the one line must say)

BAD_SETTINGS = [
    ("layerz=3", ["unknown key 'layerz'", "layers", "mlp_width"]),
    ("steps", ["--set steps:", "KEY=VALUE"]),
    ("steps.1=3", ["steps.1=3", "no parts"]),
    ("layers=many", ["layers=many", "like 2 (int)"]),
    ("layers=2.5", ["layers=2.5", "like 2 (int)"]),
    ("softcap=wide", ["softcap=wide", "like 30.0 (float)"]),
    ("adam_betas=0.9", ["adam_betas=0.9", "like (0.8, 0.95) (tuple)"]),
    ("adam_betas=(0.9,)", ["adam_betas=(0.9,)", "like (0.8, 0.95)"]),
    ("adam_betas=(0.9,0.9,0.9)", ["adam_betas=(0.9,0.9,0.9)", "like (0.8, 0.95)"]),
    ("adam_betas=('a','b')", ["adam_betas=('a','b')", "like (0.8, 0.95)"]),
    ("adam_betas=(0.9,", ["adam_betas=(0.9,", "like (0.8, 0.95)"]),
    ("long_layers=(0,1.5)", ["long_layers=(0,1.5)", "like (1,)"]),
    ("long_layers=(True,)", ["long_layers=(True,)", "like (1,)"]),
    ("val_windows=(64,)", ["val_windows", "64"]),
    ("val_windows=(1,2,3)", ["val_windows", "1", "3"]),
    ("stages.0.windows=(64,)", ["windows", "64"]),
    ("stages.0.windows=()", ["windows", "()"]),
    ("stages=3", ["stages=3", "stages.N.FIELD=VALUE", "below 2"]),
    ("stages.0=3", ["stages.0=3", "stages.N.FIELD=VALUE", "below 2"]),
    ("stages.2.share=1", ["stages.2.share=1", "below 2"]),
    ("stages.-1.share=1", ["stages.-1.share=1", "below 2"]),
    ("stages.one.share=1", ["stages.one.share=1", "below 2"]),
    ("stages.².share=1", ["stages.².share=1", "below 2"]),
    ("stages.0.rows=5", ["unknown key 'rows'", "row_tokens"]),
    ("stages.0.share=half", ["share=half", "like 0.5 (float)"]),
    ("layers=0", ["layers=0", "positive"]),
    ("heads=-1", ["heads=-1", "positive"]),
    ("log_every=0", ["log_every=0", "positive"]),
    ("momentum_steps=0", ["momentum_steps=0", "positive"]),
    ("val_every=-1", ["val_every=-1", "not be negative"]),
    ("seed=-1", ["seed=-1", "not be negative"]),
    ("seed=4294967296", ["seed=4294967296"]),  # travels as uint32
    ("lr_muon=nan", ["lr_muon=nan", "finite"]),
    ("stages.1.lr_factor=inf", ["lr_factor=inf", "finite"]),
    ("heads=3", ["heads=3", "divide width=32"]),
    ("heads=16", ["heads=16", "multiple of 4"]),
    ("real_tokens=70000", ["real_tokens=70000"]),
    ("steps=3000000000", ["steps=3000000000", "below 2**31"]),
    ("preset=a/b", ["preset='a/b'", "letters"]),
    ("lr_head=-1", ["lr_head=-1.0", "0 or more"]),
    ("adam_eps=1e-60", ["adam_eps=1e-60", "float32"]),
    ("vocab=100", ["vocab=100", "multiple of 8"]),
    ("real_tokens=105", ["real_tokens=105", "1 to vocab=104"]),
    ("real_tokens=0", ["real_tokens=0", "1 to vocab=104"]),
    ("bos=97", ["bos=97", "0 to real_tokens-1=96"]),
    ("encoding=utf8", ["encoding='utf8'", "gpt2", "bytes"]),
    ("compute_dtype=float16", ["compute_dtype='float16'", "bfloat16 or float32"]),
    ("attention=flash", ["attention='flash'", "auto, xla, splash, cudnn"]),
    ("long_layers=(2,)", ["long_layers=(2,)", "0..layers-1"]),
    ("long_layers=(-1,)", ["long_layers=(-1,)", "0..layers-1"]),
    ("cooldown=1.5", ["cooldown=1.5", "0 to 1"]),
    ("cooldown=nan", ["cooldown=nan", "0 to 1"]),
    ("lr_floor=-0.1", ["lr_floor=-0.1", "0 to 1"]),
    ("adam_betas=(0.9,1)", ["adam_betas=(0.9, 1.0)", "[0, 1)"]),
    ("adam_eps=0", ["adam_eps=0"]),  # 0/0 for tokens that were never seen
    ("momentum=(-0.1,0.5)", ["momentum=(-0.1, 0.5)", "[0, 1)"]),
    ("rope_base=0", ["rope_base=0"]),
    ("softcap=0", ["softcap=0"]),
    ("softcap=200", ["softcap=200"]),  # its exponential overflows float32
    ("stages.0.share=0.7", ["stages=", "share=0.7", "add up to 1"]),
    ("stages.0.share=nan", ["stages=", "share=nan", "add up to 1"]),
    ("steps=1", ["steps=1", "at least one step"]),
    ("stages.0.row_tokens=0", ["stages.0.row_tokens=0", "positive"]),
    ("stages.1.batch_tokens=500", ["stages.1.batch_tokens=500", "multiple of row_tokens=64"]),
    ("stages.1.batch_tokens=0", ["stages.1.batch_tokens=0", "multiple of row_tokens=64"]),
    ("stages.0.doc_cap=-1", ["stages.0.doc_cap=-1", "length in tokens"]),
    ("stages.0.windows=(-1,5)", ["stages.0.windows=(-1, 5)", "two lengths"]),
    ("val_windows=(-1,5)", ["val_windows=(-1, 5)"]),
    ("val_row=0", ["val_row=0", "positive"]),
    ("val_batch=500", ["val_batch=500", "multiple of val_row=64"]),
    ("val_batch=0", ["val_batch=0", "multiple of val_row=64"]),
    ("val_tokens=1000", ["val_tokens=1000", "multiple of val_batch=512"]),
]


@pytest.mark.parametrize("item, words", BAD_SETTINGS, ids=[item for item, _ in BAD_SETTINGS])
def test_a_bad_setting_is_refused_by_name_and_value(item, words):
    with pytest.raises(T.UserError) as refusal:
        resolve("small", item)
    text = str(refusal.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_a_negative_share_is_refused():
    with pytest.raises(T.UserError, match="stages=.*share=1.5.*add up to 1"):
        resolve("small", "stages.0.share=1.5", "stages.1.share=-0.5")


def test_no_stages_are_refused():
    with pytest.raises(T.UserError, match="stages=.*at least one stage"):
        small_config(stages=())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"devices": 16}, "devices=16, but there are 8: .*smaller"),
        ({"devices": 3}, "3 devices do not divide 8: .*1, 2, 4 or 8"),
        ({"val_batch": 64 * 4}, "eval-b256-r64-w16-64 has 4 rows, which 8 devices .*fewer devices"),
    ],
)
def test_device_counts_that_cannot_share_the_work_are_refused(changes, words):
    with pytest.raises(T.UserError, match=words):
        T.make_mesh(small_config(**changes))


def test_an_unknown_preset_is_one_line_and_status_2(capsys):
    assert T.main(["sprint"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: unknown preset 'sprint'; there are: speedrun, speedrun-768, tiny"
    )
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
        small_config(long_layers=(), softcap=10.0),
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
        (lambda fields: fields.update(layers="two"), "stored config "),
        (lambda fields: fields.update(heads=3), "heads=3 .*divide width=32"),
        (lambda fields: fields["stages"][0].pop("share"), "stored config .*share"),
        (lambda fields: fields["stages"][0].update(windows=3), "stored config "),
    ],
)
def test_a_stored_config_that_does_not_fit_is_refused(change, words):
    fields = json.loads(json.dumps(dataclasses.asdict(small_config())))
    change(fields)
    with pytest.raises(T.UserError, match=words):
        T.config_from_json(fields)


@pytest.mark.parametrize("obj", [SPEEDRUN, SPEEDRUN.stages[0], T.param_table(SPEEDRUN)["head"]])
def test_configs_are_frozen(obj):
    field = dataclasses.fields(obj)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(obj, field, 1)
