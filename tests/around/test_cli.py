"""The command line: what is wrong is said in one line, with status 2, before anything is made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT, write_shard

import train_gpt as T

TINY = T.PRESETS["tiny"]
SHORT = TINY.extension + 1  # one step for all stages but the extension
# A step for each stage, of one row for each of 8 devices, so that a little data is enough.
STEPS = len(TINY.stages)
SMALL = [
    "tiny",
    f"--set=steps={STEPS}",
    f"--set=extension={int(TINY.stages[-1].share == 0)}",
    "--set=encoding=bytes",
    f"--set=val_tokens={TINY.val_batch}",
    *(f"--set=stages.{i}.share={1 / (STEPS - 1)}" for i in range(STEPS - 1)),
    *(f"--set=stages.{i}.batch_tokens={8 * s.row_tokens}" for i, s in enumerate(TINY.stages)),
]
TOKENS = 8 * sum(stage.row_tokens for stage in TINY.stages) + 1  # what these steps read


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Exactly the data that SMALL needs."""
    folder = tmp_path_factory.mktemp("data")
    tokens = np.resize([TINY.bos, *range(96)], TOKENS)
    write_shard(folder / "cli_train_000001.bin", tokens)
    write_shard(folder / "cli_val_000001.bin", np.resize(tokens, TINY.val_batch + 1))
    return folder


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """T.main in an empty folder; returns (status, stdout, stderr). Training is never reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))

    def run(*argv):
        status = T.main([str(arg) for arg in argv])
        return status, *capsys.readouterr()

    return run


def refused(result) -> str:
    """The one line of a refused command line."""
    status, out, err = result
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in out + err
    return err


# ------------------------------------------------------------------------------------------------
# Wrong arguments
# ------------------------------------------------------------------------------------------------


GROUP = "--processes", "2", "--coordinator"
TOOLS = "sample", "preflight", "bench", "dump", "prompt"  # have moved to records/


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["more"], "unknown preset 'more'; there are: speedrun, medium, tiny"),
        (["tiny", "more"], "unrecognized arguments: more (see --help)"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["tiny", "--prof"], "unrecognized arguments: --prof"),  # records look for --profile
        (
            ["--set", "steps=5", "tiny"],
            "--set tiny: write KEY=VALUE (and PRESET before all options)",
        ),
        (["--set"], "argument --set: expected at least one argument"),
        (["--out", ""], "--out is empty: name a folder"),
        (["--set", "steps"], "--set steps: write KEY=VALUE"),
        (["--set", "stepps=3"], "unknown key 'stepps' in --set; valid keys: preset, seed, layers"),
        (["--set", "steps=many"], "--set steps=many: steps takes a value like"),
        (["--set", "steps=1.5"], "steps=1.5: steps takes a value like"),
        (["--set", "steps="], "steps=: steps takes a value like"),
        (["--set", "steps.1=3"], "unknown key 'steps.1' in --set; valid keys: preset, seed"),
        (["--set", "lr_anvil=fast"], "lr_anvil takes a value like"),
        (["--set", "momentum=0.9"], "momentum takes a value like"),
        (["--set", "momentum=(0.9,)"], "momentum takes a value like"),
        (["--set", "momentum=(0.9,"], "momentum takes a value like"),
        (["--set", "logit_cap=(23.0,5.0)"], "logit_cap takes a value like"),
        (["--set", "stages.0.weights=1"], "--set stages.0.weights=1: weights takes a value like"),
        (
            ["--set", "stages.0.candidates=512"],
            "candidates takes a value like (512,) (tuple), one alone is (1,)",
        ),
        (["--set", "stages.0.prefix="], "prefix takes a value like (0.25,) (tuple), one alone"),
        (["--set", "event_every=2"], "event_every takes a value like (2, 4) (tuple)"),
        (["--set", "layers=6"], "--set layers=6: write layers.N.FIELD=VALUE with N below 6"),
        (["--set", "layers.6.x0=1"], "write layers.N.FIELD=VALUE with N below 6"),
        (["--set", "layers.0.x0=maybe"], "--set layers.0.x0=maybe: x0 takes a value like True"),
        (["--set", "layers.0.width=4"], "unknown key 'layers.0.width' in --set; valid keys: att"),
        (["--set", "val_windows=(64,)"], "val_windows"),
        (["--set", "stages.0.windows=(64,)"], "windows"),
        (["--set", "stages.0.windows=()"], "windows"),
        (["--set", "stages=3"], "write stages.N.FIELD=VALUE with N below"),
        (["--set", "stages.9.share=0.5"], "write stages.N.FIELD=VALUE with N below"),
        (["--set", "stages.0.rows=4"], "unknown key 'stages.0.rows'"),
        (["--set", "steps=0"], "steps=0 is not valid: it must be positive"),
        ([f"--set=steps={SHORT}"], f"steps={SHORT} is not valid: every stage needs at least one"),
        (["--set", "heads=3"], "heads=3 is not valid: it must divide width="),
        (["--set", "bos=-1"], "bos=-1 is not valid"),
        (["--set", "devices=-1"], "devices=-1 is not valid"),
        (["--set", "real_tokens=9999999"], "real_tokens=9999999 is not valid: 1 to vocab="),
        (["--set", "layers.0.attends=all"], "layers.0.attends='all' is not valid: short, long or"),
        (["--set", "layers.5.mlps=0"], "layers.5.mlps=0 is not valid: the last layer needs one"),
        (["--set", "source=99"], "source=99 is not valid: a layer between skip[0] and the last"),
        (["--set", "event_change=5"], "event_every=(2, 4) is not valid: multiples of adam_every"),
        (["--set", "stages.0.candidates=(9999,)"], "(9999,) is not valid: one number or more, 0 ("),
        (["--set", "skip=(2,1)"], "skip=(2, 1) is not valid: an earlier and a later layer"),
        (["--set", "adam_every=0"], "adam_every=0 is not valid: it must be positive"),
        (["--set", "extension=9999"], "extension=9999 is not valid: fewer than steps="),
        (["--set", "stages.0.weights_end=()"], "stages.0.weights_end=() is not valid: as many as"),
        (["--set", "encoding=morse"], "encoding='morse' is not valid: gpt2 or bytes or bpe"),
        (
            ["--set", "kernels=magic"],
            "kernels='magic' is not valid: auto, plain, or some of attend,",
        ),
        (["--set", "attention=xla"], "unknown key 'attention' in --set; valid keys: preset, seed"),
        (["--set", "recompute=layers"], "--set recompute=layers: recompute takes a value like"),
        (["--set", "checkpoint_end=no"], "checkpoint_end='no' is not valid: auto or always"),
        (["--set", "compute_dtype=float16"], "bfloat16 or float32"),
        (["--set", "cooldown=nan"], "cooldown=nan is not valid: it must be float, and finite"),
        (["--set", "logit_cap=(0.0,5.0,7.5)"], "logit_cap=(0.0, 5.0, 7.5) is not valid"),
        (["--set", "rope_base=0"], "rope_base=0.0 is not valid"),
        (["--set", "lr_anvil=nan"], "lr_anvil=nan is not valid"),
        (["--set", "val_windows=(-1,5)"], "val_windows=(-1, 5) is not valid"),
        (["--set", "stages.0.windows=(-1,5)"], "stages.0.windows=(-1, 5) is not valid"),
        (["--set", "stages.0.share=0.1"], "shares above 0 that add up to 1"),
        (["--set", "stages.0.row_tokens=7"], "is not valid: a multiple of row_tokens=7"),
        (["--set", "val_batch=7"], "val_batch=7 is not valid: a multiple of val_row="),
        (["--seed", "-1"], "seed=-1 is not valid: it must not be negative"),
        (["--seed", "4294967296"], "seed=4294967296 is not valid"),
        (["--seed", "lucky"], "argument --seed: invalid int value: 'lucky'"),
        ([""], "unknown preset ''; there are: speedrun, medium, tiny"),
        *((["--" + tool], f"unrecognized arguments: --{tool}") for tool in TOOLS),
        (["--data", ""], "data='' is not valid: the name of a folder"),
        (["--processes", "2"], "--coordinator HOST:PORT, --processes N, --process-id 0..N-1: give"),
        (["--coordinator", "a:1"], "--process-id 0..N-1: give all"),
        ([*GROUP, "a:1", "--process-id", "2"], "--process-id 0..N-1: give all"),
        ([*GROUP, "a:1", "--process-id", "-1"], "--process-id 0..N-1: give all"),
        ([*GROUP, "a:1", "--process-id", "one"], "argument --process-id: invalid int value"),
        ([*GROUP, "a", "--process-id", "1"], "--coordinator a: write HOST:PORT"),
        ([*GROUP, "a:b", "--process-id", "1"], "--coordinator a:b: write HOST:PORT"),
        (
            [*GROUP, "a:65536", "--process-id", "1"],
            "--coordinator a:65536: write HOST:PORT, a port",
        ),
        (
            [*GROUP, "a:0", "--process-id", "1"],
            "--coordinator a:0: write HOST:PORT, a port to 65535",
        ),
    ],
)
def test_wrong_argument_is_refused_in_one_line(main, argv, words):
    assert words in refused(main(*argv, "--show"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--resume", "nothing"], "no checkpoint in nothing: name the folder of a run"),
        (["--resume", __file__], "no checkpoint in"),
        (["--resume", ""], "--resume is empty: name a folder"),  # of an unset variable
        (["--resume", "young"], "young has no checkpoint (see --set checkpoint_every)"),
        (["--resume", "x", "--seed", "0"], "--resume takes the config of the run: drop PRESET, "),
        (["tiny", "--resume", "x"], "--resume takes the config of the run: drop PRESET, --seed, "),
        (["--resume", "x", "--set", "steps=3"], "drop PRESET, --seed, --show, --set but for "),
        (["", "--resume", "x"], "--resume takes the config of the run"),
        (["--resume", "x", "--show"], "--resume takes the config of the run"),
    ],
)
def test_what_cannot_be_resumed_is_refused(main, tmp_path, argv, words):
    (tmp_path / "young").mkdir()
    (tmp_path / "young/run.json").write_text("{}")
    assert words in refused(main(*argv))
    assert [path.name for path in tmp_path.rglob("*")] == ["young", "run.json"]


# ------------------------------------------------------------------------------------------------
# What the machine or the data does not allow: found before a run's folder is made
# ------------------------------------------------------------------------------------------------


def change_shard(data, folder, name, change):
    """A copy of `data` in which one shard is changed by `change(bytes)`, or missing."""
    folder.mkdir()
    for path in data.iterdir():
        content = change(path.read_bytes()) if path.name == name else path.read_bytes()
        if content is not None:
            (folder / path.name).write_bytes(content)
    return folder


TRAIN, VAL = "cli_train_000001.bin", "cli_val_000001.bin"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        pytest.param(TRAIN, lambda _: None, "no train shards (*_train_*.bin) in", id="no train"),
        pytest.param(VAL, lambda _: None, "no val shards (*_val_*.bin) in", id="no val"),
        pytest.param(TRAIN, lambda b: b[:-2], "and its header says", id="truncated"),
        pytest.param(VAL, lambda b: b[:100], "no whole token shard", id="cut header"),
        pytest.param(VAL, lambda b: b"<html>" + b, "no whole token shard", id="not a shard"),
        pytest.param(
            TRAIN,
            lambda b: b[:8] + np.int32(TOKENS - 1).tobytes() + b[12:-2],
            f"last for {STEPS - 1} of {STEPS} steps: get more shards, or lower --set steps=",
            id="too few",
        ),
        pytest.param(
            VAL,
            lambda b: b[:8] + np.int32(TINY.val_batch).tobytes() + b[12:-2],
            f"{TINY.val_batch + 1:,} are needed: get the full validation shard",
            id="too few for validation",
        ),
        pytest.param(TRAIN, lambda b: b[:-2] + b"\xff\xff", "token id 65535 is not", id="bad id"),
    ],
)
def test_bad_data_is_refused_by_name(main, data, tmp_path, name, change, words):
    folder = change_shard(data, tmp_path / "bad", name, change)
    line = refused(main(*SMALL, "--data", folder, "--out", tmp_path / "logs"))
    assert words in line and str(folder) in line
    assert not (tmp_path / "logs").exists()


def test_missing_and_empty_data_folders_are_refused(main, tmp_path):
    assert "no folder" in refused(main(*SMALL, "--data", tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    assert "no train shards" in refused(main(*SMALL, "--data", tmp_path / "empty"))


@pytest.mark.parametrize("merges", [None, "", "[1]", '["xy"]', "3"])
def test_data_without_usable_merges_are_refused(main, data, tmp_path, merges):
    folder = change_shard(data, tmp_path / "data", "", None)
    if merges is not None:
        (folder / T.MERGES).write_text(merges)
    argv = [*SMALL, "--set=encoding=bpe", "--data", folder, "--out", tmp_path / "logs"]
    line = refused(main(*argv))
    assert T.MERGES in line and "make the data again" in line
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("missing", [False, True], ids=["no network", "not installed"])
def test_an_encoding_that_cannot_be_had_is_refused(main, data, tmp_path, monkeypatch, missing):
    """Before anything is compiled: what the tokens stand for is needed for training."""
    import tiktoken

    def offline(name):
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    if missing:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    argv = [*SMALL, "--set=encoding=gpt2", "--data", data, "--out", tmp_path / "logs"]
    words = ("pip install -r req", "tiktoken") if missing else ("connect to the network once",)
    line = refused(main(*argv))
    assert all(word in line for word in words) and not (tmp_path / "logs").exists()


def test_data_of_another_encoding_are_refused_with_what_to_set(main, data, tmp_path):
    """Before they train to a loss that means nothing: no document begins with this token."""
    line = refused(main(*SMALL, "--set=bos=2000", "--data", data, "--out", tmp_path / "logs"))
    assert "no document begins with bos=2000" in line and "set encoding, vocab, real_to" in line


def test_two_data_sets_in_a_folder_are_refused(main, data, tmp_path):
    folder = change_shard(data, tmp_path / "two", "", None)
    (folder / "other_val_000000.bin").write_bytes((data / VAL).read_bytes())
    assert "holds several data sets (cli, other): give each" in refused(
        main(*SMALL, "--data", folder)
    )


def test_devices_that_are_not_there_are_refused(main, data, tmp_path):
    argv = [*SMALL, "--set", "devices=16", "--data", data, "--out", tmp_path / "logs"]
    assert "devices=16, but there are 8" in refused(main(*argv))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_out_that_cannot_be_a_folder_is_refused(main, data, tmp_path, below):
    (tmp_path / "file").write_text("not a folder")
    line = refused(main(*SMALL, "--data", data, "--out", f"{tmp_path}/file{below}"))
    assert "cannot write" in line and "name another --out" in line


def test_cache_that_cannot_be_a_folder_is_refused(main, data, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    line = refused(main(*SMALL, "--data", data, "--cache", f"{tmp_path}/file/deeper"))
    assert f"--cache {tmp_path}/file/deeper: " in line and "name another folder" in line


@pytest.fixture
def cached_in(main, monkeypatch):
    """A function of options -> the folder in which jax then keeps programs."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before, seen = {name: getattr(jax.config, name) for name in names}, []
    monkeypatch.setattr(T, "train", lambda *_: seen.append(jax.config.jax_compilation_cache_dir))

    def folder(*options):
        assert main("tiny", *options)[0] == 0
        return seen.pop()

    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_where_the_user_says(cached_in, tmp_path):
    assert cached_in("--cache", tmp_path / "a/b") == f"{tmp_path}/a/b"
    assert (tmp_path / "a/b").is_dir()


def test_programs_are_kept_in_the_users_cache_unless_it_cannot_be(cached_in, tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    assert cached_in() == before  # the variable of jax is set
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/file")
    assert cached_in() == before
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/home")
    assert cached_in("--cache", "off") == before and not (tmp_path / "home").exists()
    assert cached_in() == f"{tmp_path}/home/train_gpt" and (tmp_path / "home/train_gpt").is_dir()


def test_profile_of_a_run_that_is_too_short_is_refused(main, data, tmp_path):
    line = refused(main(*SMALL, "--data", data, "--out", tmp_path / "logs", "--profile"))
    assert "--profile needs more than 24 steps: raise --set steps=" in line
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "error, reason",
    [
        (
            RuntimeError("Unable to initialize backend 'tpu': no chip\nmore of it"),
            "Unable to initialize backend 'tpu': no chip",
        ),
        (AssertionError(), "AssertionError"),  # jax 0.10.2 where JAX_PLATFORMS names CUDA
    ],
)
@pytest.mark.parametrize("words", [["--show"], [], ["tiny"]])
def test_no_devices_is_one_line(main, monkeypatch, words, error, reason):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    line = refused(main(*words))
    assert f"jax finds no devices ({reason}): see JAX_PLATFORMS" in line


def test_good_arguments_go_on_to_compile(main, data):
    """So that the refusals above are not for another reason."""
    with pytest.raises(pytest.fail.Exception, match="went on to compile"):
        main(*SMALL, "--data", data)


def test_too_little_memory_ends_in_one_line_that_says_what_to_set(main, monkeypatch):
    def train(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes.")

    monkeypatch.setattr(T, "train", train)
    line = refused(main("tiny"))
    assert "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes." in line
    assert "use --set recompute=1, a smaller micro_tokens or ngram_rows, or more devices" in line


def test_a_file_that_cannot_be_read_or_written_ends_in_one_line(main, monkeypatch):
    def train(*_):
        raise PermissionError(13, "Permission denied", "tokens.bin")

    monkeypatch.setattr(T, "train", train)
    assert "Permission denied: 'tokens.bin'" in refused(main("tiny"))


def test_a_fault_of_the_program_keeps_its_traceback(main, monkeypatch):
    def train(*_):
        raise KeyError("grads7")

    monkeypatch.setattr(T, "train", train)
    with pytest.raises(KeyError, match="grads7"):
        main("tiny")


def test_stopped_run_has_the_exit_status_of_its_signal(main, monkeypatch):
    def train(*_):
        raise T.Stopped("stopped after 4 of 8 steps; to continue: ...", 15)

    monkeypatch.setattr(T, "train", train)
    assert main("tiny") == (143, "stopped after 4 of 8 steps; to continue: ...\n", "")


def test_interrupt_ends_in_one_line(main, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(T, "train", interrupted)
    assert main("tiny") == (130, "", "interrupted\n")


# ------------------------------------------------------------------------------------------------
# --show, defaults, and the real thing
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", T.PRESETS)
def test_show_prints_config_parameters_and_stages(main, tmp_path, preset):
    status, out, err = main(preset, "--show")
    cfg = T.PRESETS[preset]
    assert (status, err) == (0, "")
    for text in (
        f"preset = '{preset}'",
        f"{cfg.steps} steps, {cfg.total_tokens:,} tokens",
        *T.CHOICES,
        *T.param_table(cfg),
    ):
        assert text in out
    assert not list(tmp_path.iterdir())


def test_show_of_the_speedrun_is_the_record(main):
    """Its parameters, stages and totals, as published; rates and decays of the Adam tables."""
    out = main("speedrun", "--show")[1]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "total 32,787,938,803" in lines
    assert "1194 steps, 328,663,040 tokens, 1.441e+17 model FLOPs" in lines
    for row in (
        "head 50304x768 38,633,472 adam 0.008 0.75 0.5/0.95",
        "embed 50304x768 38,633,472 adam 0.008 0.75 0.5/0.95",
        "value_tables 201216x768 154,533,888 tables 0.56 0.025 0.75/0.95",
        "ngram_table 42301440x768 32,487,505,920 tables 0.56 0.025 0/0.95",
        "qk_bank 42x256x768 8,257,536 anvil 0.023 2.25",
        "vo_bank 14x768x768 8,257,536 anvil 0.023 2.25",
        "mlp_bank 24x2816x768 51,904,512 anvil 0.044/0.0881 2.25",
        "value_gate 3x6x12 216 adam 0.008 0.005 0.9/0.99",
        "smear_gate 1x12 12 adam 8e-05 0 0.9/0.99",
        "resid_lambdas 11x2 22 adam 0.04 0 0.9/0.95",
        "skip_lambda 1 1 adam 0.04 0 0.9/0.99",
    ):
        assert row in lines
    for row in (  # steps, batch, row, doc cap, windows, lr, attention scales, M tokens
        "0..319 131072 16384 896 128/384 1..0.937 0.1300/0.0850 41.9 "
        "(1.0, 0.5, 0.25) (1.0, 0.5, 0.0) (0.25,) (10240,)",
        "320..680 262144 32768 2048 384/896 1.41..0.941 0.1586/0.0994 94.6 "
        "(1.0, 0.5) (1.0, 0.0) (0.2, 0.15, 0.1, 0.05) (10240,)",
        "681..1106 393216 49152 3072 640/1408 1.05..0.403 0.1748/0.1084 167.5 "
        "(1.0,) (1.0,) (0.0,) (14336, 14336, 24576)",
        "1107..1173 327680 40960 3072 640/1408 0.391..0.301 0.1748/0.1084 22.0 "
        "(1.0,) (1.0,) (0.0,) (0,)",
        "1174..1193 131072 16384 3072 768/1664 0.3..0.3 0.1811/0.1120 2.6 "
        "(1.0,) (1.0,) (0.0,) (0,)",
    ):
        assert row in lines
    assert {"val_windows = (768, 2560)", "adam_every = 2", "event_every = (2, 4)"} <= {*lines}
    assert "learning rate falls from step 234 on" in lines
    assert "head and embedding tied up to step 1175" in lines


def test_show_says_when_head_and_embedding_are_never_tied(main):
    assert "never tied" in main("tiny", "--set", "tied=0", "--show")[1].splitlines()


def test_default_preset_without_an_accelerator_is_tiny(main):
    assert main("--show") == main("tiny", "--show")


def test_settings_are_applied_in_order_and_data_and_seed_win(main):
    argv = ["--set=steps=900", "--set=steps=120", "--set=stages.0.lr_factor=0.75", "--set=data=x"]
    _, out, _ = main("tiny", *argv, "--data", "y", "--seed", "7", "--show")
    assert {"steps = 120", "data = 'y'", "seed = 7"} <= set(out.splitlines())
    assert " 0.75.." in next(line for line in out.splitlines() if line.strip().startswith("0.."))


OPTIONS = "set", "data", "out", "seed", "show", "resume", "profile", "cache"
OPTIONS += "coordinator", "processes", "process-id"


def test_help_names_every_option(main, capsys):
    with pytest.raises(SystemExit) as end:
        main("--help")
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert all(f"--{name}" in out for name in OPTIONS)


def run_script(*argv, flags=(), script=ROOT / "train_gpt.py", cwd=None, **variables):
    """What `python FLAGS SCRIPT ARGV` with these variables leads to."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, *map(str, (*flags, script, *argv))]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


def test_script_shows_the_default_preset():
    done = run_script("--show")
    assert done.returncode == 0 and "preset = 'tiny'" in done.stdout
    assert "Traceback" not in done.stderr


def test_several_processes_that_find_no_coordinator_end_with_one_line(main, monkeypatch):
    def initialize(*_, **__):
        raise RuntimeError("Deadline exceeded")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    line = refused(main("tiny", "--coordinator=localhost:1", "--processes=2", "--process-id=1"))
    assert "cannot join the other processes (Deadline exceeded): see --coordinator" in line


def test_wrong_settings_are_refused_before_other_processes_are_waited_for(main, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("waits"))
    group = "--coordinator=localhost:1", "--processes=2", "--process-id=1"
    assert "steps takes a value like" in refused(main("tiny", "--set", "steps=x", *group))


def test_script_ends_with_status_2_and_one_line():
    done = run_script("tiny", "--set", "steps=0")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: steps=0 is not valid: it must be positive\n"


def test_a_profiler_may_run_the_script(data, tmp_path):
    """Which then is what sys.modules has as __main__; the tools in data/ find their trainer."""
    profiled = {"flags": ["-m", "cProfile", "-o", tmp_path / "profile"]}
    assert "preset = 'tiny'" in run_script("--show", **profiled).stdout
    argv = [*SMALL, "--set=encoding=bpe", "--data", data, "--out", tmp_path / "logs"]
    line = run_script(*argv, **profiled).stderr
    assert line.startswith("error: ") and T.MERGES in line and "make the data again" in line


TOOL_HELP = ("records/bench.py", "records/sample.py", "records/preflight.py", "records/scaling.py")
TOOL_HELP += ("records/leaderboard.py", "data/tokenize_text.py", "data/cached_fineweb10B.py")
TOOL_HELP += ("data/builtin_corpus.py", "train_gpt.py")


@pytest.mark.parametrize("script", TOOL_HELP)
def test_without_docstrings_the_scripts_work(script):
    """As by python -OO."""
    done = run_script("--help", flags=["-OO"], script=ROOT / script)
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


def test_without_docstrings_a_run_is_shown():
    assert "preset = 'tiny'" in run_script("--show", flags=["-OO"]).stdout


def test_numbers_of_64_bits_are_off():
    """Also where jax was told to have them: they would compile to other programs, or to none."""
    code = "import jax, train_gpt; assert jax.numpy.arange(3).dtype == 'int32', 'x64'"
    done = run_script(flags=["-c"], script=code, cwd=ROOT, JAX_ENABLE_X64="1")
    assert done.returncode == 0, done.stderr


def test_the_script_trains_alone_on_data_and_says_what_makes_some(data, tmp_path):
    """Copied without its folders."""
    script = Path(shutil.copy(ROOT / "train_gpt.py", tmp_path))
    shutil.copytree(data, tmp_path / "there")
    done = run_script(*SMALL, "--out=logs", script=script, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    there = "copy the repository's folder data/ there"
    assert done.stderr == f"error: no {script.parent}/data/builtin_corpus.py: {there}\n"
    assert not (tmp_path / "logs").exists()
    done = run_script(*SMALL, "--data=there", "--out=logs", script=script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
