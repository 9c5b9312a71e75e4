"""The command line: errors are one line with status 2, before any file is written."""

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
# One step per stage, with one row per device (8), needs little data.
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
TOKENS = 8 * sum(stage.row_tokens for stage in TINY.stages) + 1  # of these steps
TRAIN, VAL = "cli_train_000001.bin", "cli_val_000001.bin"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with exactly the tokens that SMALL needs."""
    folder = tmp_path_factory.mktemp("data")
    tokens = np.resize([TINY.bos, *range(96)], TOKENS)
    write_shard(folder / TRAIN, tokens)
    write_shard(folder / VAL, np.resize(tokens, TINY.val_batch + 1))
    return folder


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """Return T.main in an empty folder -> (status, stdout, stderr). Compiling is a failure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(T, "compile_all", lambda *_: pytest.fail("went on to compile"))

    def run(*argv):
        status = T.main([str(arg) for arg in argv])
        return status, *capsys.readouterr()

    return run


def refused(result) -> str:
    """Return the error, which must be one line."""
    status, out, err = result
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in out + err
    return err


# ---- Wrong arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["more"], "unknown preset 'more' (choose from plain, tiny, speedrun, pointer), "),
        (["tiny", "bok.txt"], "error: bok.txt does not exist\n"),
        (["--data", "/nope"], "error: /nope does not exist\n"),
        (["--set", "steps=5", "book.txt"], "--set book.txt: write KEY=VALUE; texts and presets "),
        (["--verbose"], "unrecognized arguments: --verbose (see --help)"),
        (["tiny", "--prof"], "unrecognized arguments: --prof"),  # no abbreviations
        # Options of other trainers, and settings without --set:
        (["tiny", "--steps=500"], "--steps=500; did you mean --set steps=500"),
        (["tiny", "--max-iters", "5", "-lr=1"], "mean --set lr_anvil=1 lr_adam=1"),
        (["tiny", "--batch_size=8"], "did you mean --set 'stages.*.batch_tokens=8'"),
        (["tiny", "--grad_clip=1"], "unrecognized arguments: --grad_clip=1 (see --help)"),
        (["tiny", "--device=cpu"], "did you mean JAX_PLATFORMS=cpu (or cuda, tpu) before the c"),
        (["tiny", "steps=500"], ": for a setting write --set steps=500\n"),
        (["tiny", "max_iters=500"], ": for a setting write --set steps=500\n"),
        (["--set", "preset=speedrun"], "changes only a name: write the preset first"),
        (["--set", "batch_size=8"], "key 'batch_size'; similar: stages.*.batch_tokens; --show"),
        (["--set", "steps=5", "tiny"], "--set tiny: write KEY=VALUE; texts and presets go"),
        (["--set"], "argument --set: expected at least one argument"),
        (["--set", "stepps=3"], "--set stepps=3: unknown key 'stepps'; similar: steps"),
        (["speedrun", "--set", "steps=21"], "for each stage: 38 are enough"),
        (["--seed", "-1"], "seed=-1 must be from 0 to"),
        (["--seed", "lucky"], "argument --seed: invalid int value: 'lucky'"),
        (["--resume", "x", "--seed", "0"], "--resume uses the config of the run: drop PRESET, "),
        (["tiny", "--resume", "x"], "drop PRESET, --seed, "),
        (["--resume", "x", "--set", "steps=3"], "drop PRESET, --seed, --show, --set but for "),
        (["--resume", "x"], "for a new run with its parameters: --start x"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(main, tmp_path, argv, words):
    assert words in refused(main(*argv, "--show"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["nothing", __file__, "", "/", "young", "young/checkpoints/4"])
def test_a_place_without_checkpoints_is_not_resumed(main, tmp_path, where):
    (tmp_path / "young").mkdir()
    (tmp_path / "young/run.json").write_text("{}")
    words = "pass a run with a checkpoint (--set checkpoint_every=N)"
    if where in ("nothing", "young/checkpoints/4"):
        words = f"error: {where} does not exist: pass a run directory"
    status, out, err = main("--resume", where)
    assert words in refused((status, "", err))
    assert [path.name for path in tmp_path.rglob("*")] == ["young", "run.json"]


# ---- Data, files and devices -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (TRAIN, lambda _: None, "no train shards (*_train_*.bin) in"),
        (VAL, lambda _: None, "no val shards (*_val_*.bin) in"),
        (TRAIN, lambda b: b[:-2], "is not a complete token shard"),
        (VAL, lambda b: b[:100], "not a complete token shard"),
        (VAL, lambda b: b"<html>" + b, "not a complete token shard"),
        (
            TRAIN,
            lambda b: b[:8] + np.int32(TOKENS - 1).tobytes() + b[12:-2],
            f"enough for only {STEPS - 1} of {STEPS} steps: get more text or shards, lower",
        ),
        (
            VAL,
            lambda b: b[:8] + np.int32(TINY.val_batch).tobytes() + b[12:-2],
            f"{TINY.val_batch + 1:,} are needed: lower --set val_tokens=",
        ),
        (
            TRAIN,
            lambda b: b[:-2] + b"\xff\xff",
            "token id 65535 >= 2048, so its encoding is not bytes",
        ),
    ],
    ids=["none", "no val", "cut", "cut header", "html", "too few", "too few to validate", "bad id"],
)
def test_bad_data_is_refused_with_its_name_before_files_are_written(
    main, data, tmp_path, name, change, words
):
    folder = shutil.copytree(data, tmp_path / "bad")
    content = change((folder / name).read_bytes())
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    line = refused(main(*SMALL, "--data", folder, "--out", tmp_path / "logs"))
    assert words in line and str(folder) in line
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("missing", [False, True], ids=["no network", "not installed"])
def test_a_missing_encoding_is_refused_before_compiling(main, data, tmp_path, monkeypatch, missing):
    """Training needs the bytes of each token."""
    tiktoken = pytest.importorskip("tiktoken")

    def offline(name):
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    if missing:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    argv = [*SMALL, "--set=encoding=gpt2", "--data", data, "--out", tmp_path / "logs"]
    words = ("pip install -r req", "tiktoken") if missing else ("connect to the network once",)
    line = refused(main(*argv))
    assert all(word in line for word in words) and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_out_that_cannot_be_a_folder_is_refused(main, data, tmp_path, below):
    (tmp_path / "file").write_text("not a folder")
    line = refused(main(*SMALL, "--data", data, "--out", f"{tmp_path}/file{below}"))
    assert "cannot write" in line and "pass another --out" in line


@pytest.mark.parametrize(
    "error, reason",
    [
        (RuntimeError("Unable to initialize backend 'tpu': no chip\nmore"), "Unable to initialize"),
        (AssertionError(), "AssertionError"),  # jax 0.10.2 with JAX_PLATFORMS=cuda
    ],
)
@pytest.mark.parametrize("words", [["--show"], [], ["tiny"]])
def test_missing_devices_are_reported_in_one_line(main, monkeypatch, words, error, reason):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    line = refused(main(*words))
    assert line.startswith("error: JAX finds no devices (") and reason in line
    assert "see JAX_PLATFORMS and drivers" in line


@pytest.mark.parametrize("platform, extra", [
    ("cuda", "cuda13"), ("gpu", "cuda13"), ("tpu", "tpu"), ("metal", "")
])  # fmt: skip
def test_a_named_platform_without_devices_leads_to_its_package(main, monkeypatch, platform, extra):
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    monkeypatch.setattr(jax, "devices", lambda: exec("raise AssertionError"))
    line = refused(main("tiny"))
    assert (f"JAX_PLATFORMS={platform}, it needs pip install 'jax[{extra}]'" in line) == bool(extra)
    assert ("pip" in line) == bool(extra)


def test_good_arguments_reach_the_compiler(main, data):
    """The refusals above then have no other reason."""
    with pytest.raises(pytest.fail.Exception, match="went on to compile"):
        main(*SMALL, "--data", data)


@pytest.mark.parametrize(
    "error, words",
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes."),
            "out of memory: use --set recompute=1, a smaller micro_tokens or ngram_rows, or more ",
        ),
        (MemoryError("Unable to allocate 2 TiB"), "out of memory: use --set recompute=1"),
        (PermissionError(13, "Permission denied", "tokens.bin"), "Permission denied: 'tokens.bin'"),
        (KeyError("grads7"), None),  # a bug keeps its traceback
    ],
)
def test_errors_of_a_run_become_one_line_with_a_fix(main, monkeypatch, error, words):
    def train(*_):
        raise error

    monkeypatch.setattr(T, "train", train)
    if words:
        assert words in refused(main("tiny"))
    else:
        with pytest.raises(KeyError, match="grads7"):
            main("tiny")


def test_folder_of_compiled_programs(main, program_cache, monkeypatch):
    seen = []
    monkeypatch.setattr(T, "train", lambda *_: seen.append(jax.config.jax_compilation_cache_dir))
    monkeypatch.setenv("HOME", "/home/me")
    main("tiny")  # JAX_COMPILATION_CACHE_DIR is set
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for options in (["--cache", "off"], [], ["--cache", "a/b"]):
        main("tiny", *options)
    for place in ("/scratch/me", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        main("tiny")
    own = program_cache["jax_compilation_cache_dir"]
    in_home = "/home/me/.cache/train_gpt"
    assert seen == [own, None, in_home, "a/b", "/scratch/me/train_gpt", in_home]


def test_least_recently_used_programs_are_deleted_from_a_full_cache(tmp_path, monkeypatch):
    """Other files in the folder stay."""
    monkeypatch.setattr(T, "CACHE_BYTES", 250)
    for number, name in enumerate(["new-cache", "old-cache", "tokens", "newest-cache"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - (name == "old-cache") * 900 + number,) * 2)
    T.keep_programs(str(tmp_path))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["new-cache", "newest-cache", "tokens"]


def test_a_tilde_is_the_home_folder(main, program_cache, monkeypatch, tmp_path):
    """Shells do not expand it in --out=~/runs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    seen = []
    monkeypatch.setattr(T, "train", lambda cfg, out, *_: seen.append(out))
    main("tiny", "--out=~/runs", "--cache=~/programs")
    assert seen == [tmp_path / "home/runs"]
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "home/programs")


def test_wrong_settings_are_refused_before_a_text_is_tokenized(main, tmp_path, monkeypatch):
    monkeypatch.setattr(T, "run_tool", lambda *_: pytest.fail("made tokens"))
    (tmp_path / "book.txt").write_text("Roses are red. " * 900)
    for words in (["book.txt"], ["tiny", "book.txt"], ["--data", "book.txt"]):
        assert "unknown key 'lr'" in refused(main(*words, "--set", "lr=1"))
        assert "steps='x' must be" in refused(main(*words, "--set", "steps=x"))


# ---- --show, defaults, and the real thing ------------------------------------------------------


def test_show_of_the_speedrun_is_the_record(main):
    """Parameters, stages and totals are as published."""
    out = main("speedrun", "--show")[1]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for row in (
        "width = 768",
        "val_windows = (768, 2560)",
        "table_every = (2, 4)",
        "layers.8 = Layer(attends='short', paired=False, narrow=True, values=True, xsa=False, "
        "gated=False, x0=False, ngram=False, skip=0, reads_back=0, new_gates=False, "
        "mudd=False, mlps=2)",
        "head (50304, 768) 38,633,472 adam lr 0.008 decay 0.75 betas (0.5, 0.95)",
        "value_tables (201216, 768) 154,533,888 tables lr 0.56 decay 0.025 betas (0.75, 0.95)",
        "ngram_table (42301440, 768) 32,487,505,920 tables lr 0.56 decay 0.025 betas (0, 0.95)",
        "qk_bank (42, 256, 768) 8,257,536 anvil lr 0.023 decay 2.25 betas (0.0, 0.0)",
        "mlp_bank (22, 2816, 768) 47,579,136 anvil lr 0.023 decay 2.25 betas (0.0, 0.0)",
        "value_gate (3, 6, 12) 216 adam lr 0.008 decay 0.005 betas (0.9, 0.99)",
        "smear_gate (1, 12) 12 adam lr 8e-05 decay 0 betas (0.9, 0.99)",
        "32,783,613,427 numbers, 1194 steps, 328,663,040 tokens, 1.441e+17 model FLOPs",
    ):
        assert row in lines
    for row in (
        "steps 0 to 319, lr 1 to 0.937: stages.0 = Stage(share=",
        "steps 320 to 680, lr 1.41 to 0.941: stages.1 = Stage(share=",
        "steps 681 to 1106, lr 1.05 to 0.403: stages.2 = Stage(share=",
        "steps 1107 to 1173, lr 0.391 to 0.301: stages.3 = Stage(share=",
        "steps 1174 to 1193, lr 0.3 to 0.3: stages.4 = Stage(share=0.0, ",
    ):
        assert any(line.startswith(row) for line in lines)


def run_script(*argv, flags=(), script=ROOT / "train_gpt.py", cwd=None, **variables):
    """Run `python FLAGS SCRIPT ARGV` with these environment variables."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, *map(str, (*flags, script, *argv))]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
def test_show_without_docstrings_and_with_jax_disable_jit():
    done = run_script("--show", flags=["-OO"], JAX_DISABLE_JIT="1")
    assert done.returncode == 0 and "preset = 'tiny'" in done.stdout


def test_the_script_alone_asks_for_the_folder_data(tmp_path):
    script = Path(shutil.copy(ROOT / "train_gpt.py", tmp_path))
    done = run_script(*SMALL, "--out=logs", script=script, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no ") and done.stderr.count("\n") == 1
    assert "builtin_corpus.py: copy the directory data/ too, or pass --data DIR" in done.stderr
    assert not (tmp_path / "logs").exists()


# ---- Python, packages and notebooks ------------------------------------------------------------


@pytest.mark.parametrize("code, words", [
    ("import sys; sys.modules['fcntl'] = None", "import of fcntl halted"),  # Windows
    ("import sys; sys.modules['jax'] = None", "import of jax halted"),
    ("import jax; del jax.shard_map", "cannot import name 'shard_map' from 'jax'"),  # too old
])  # fmt: skip
def test_a_missing_module_is_reported_in_one_line(code, words):
    script = f"{code}; import runpy; runpy.run_path({str(ROOT / 'train_gpt.py')!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.endswith(": use WSL on Windows, or pip install -r requirements.txt\n")


IN_A_NOTEBOOK = """
import signal, sys, threading
import jax
print(len(jax.devices()))  # so this process has only one device
sys.ps1 = "In [1]: "
import train_gpt
size = lambda cfg: train_gpt.make_mesh(cfg)[1].size
train_gpt.train = lambda cfg, *_: print(signal.getsignal(2), size(cfg))
before = [signal.getsignal(number) for number in (1, 2, 15)]
print(train_gpt.main(["tiny"]))
thread = threading.Thread(target=lambda: print(train_gpt.main(["tiny"])))
thread.start()
thread.join()
asked = []
thread = threading.Thread(target=lambda: asked.append(train_gpt.ask_to_stop()(1)))
thread.start()
thread.join()
sys.argv[1:] = ["-f", "kernel.json"]  # arguments of the notebook's kernel
print(train_gpt.main())
print(asked, before == [signal.getsignal(number) for number in (1, 2, 15)])
"""


def test_a_notebook_keeps_its_devices_and_signal_handlers():
    command = [sys.executable, "-c", IN_A_NOTEBOOK]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    own = "<built-in function default_int_handler> 1\n"
    bare = f"{own}next, a text of your own: {T.command_for(T.__file__)} TEXT\n"
    assert done.stdout == f"1\n{own}0\n{own}0\n{bare}0\n[0] True\n", done.stderr


def test_importing_the_file_changes_nothing_for_the_importer():
    code = (
        "import jax, sys; jax.config.update('jax_enable_x64', True); before = sys.stdout.errors\n"
    )
    code += "import train_gpt; print(jax.config.jax_enable_x64, sys.stdout.errors == before)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert done.stdout == "True True\n"
