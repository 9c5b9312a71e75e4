"""Sampling: text from a checkpoint, what a demonstration prints, and what is refused."""

import gzip
import json
import lzma
import math
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import BOS, ROOT, write_shard
from programs import CFG, quick, quick_compilation

import train_gpt as T

sys.path.insert(0, str(ROOT / "records"))
import sample


def checkpoint(run_dir: Path, cfg: T.Config, step: int, state) -> T.Saved:
    """A checkpoint of `state` after `step` steps, as a run writes it."""
    meta = {"step": step, "train_time_ms": 1.0, "logs": {}, "data": {}, "source_sha256": ""}
    meta |= {"cursor": 0, "dropped_ngrams": 0}
    copies, pieces = T.own_arrays(cfg, state)
    copies[f"{T.OFFSETS}0"] = np.zeros(cfg.rows)
    meta |= {"config": asdict(cfg)}
    T.write_checkpoint(run_dir / "checkpoints", [*pieces, *copies.items()], meta)
    return T.find_checkpoint(run_dir)


@pytest.fixture(scope="module")
def state():
    """A model whose answers depend on what it reads; padding ids would be likelier than any."""
    _, one = T.make_mesh(replace(CFG, devices=1))
    state = jax.tree.map(np.array, quick(T.start_state(CFG, one), np.uint32(3)))
    rng = np.random.default_rng(0)
    for name in ("embed", "head", "value_tables", "ngram_table", "gate_w2"):
        table = state["params"][name]
        table += rng.normal(size=table.shape).astype(np.float32)
    state["params"]["head"][CFG.real_tokens :] *= 9
    state["params"]["head"][BOS] = 0  # few documents end
    return jax.tree.map(jax.numpy.asarray, state)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory) -> T.Saved:
    """Its checkpoint, at the end of a run."""
    return checkpoint(tmp_path_factory.mktemp("run"), CFG, CFG.steps, state)


def continued(cfg: T.Config, saved: T.Saved, *args, **kwargs) -> str:
    with quick_compilation():
        return sample.sample(cfg, saved, *args, **kwargs)


def features(monkeypatch):
    """Replace the model by its embedding: nothing to compile; the calls that it gets."""
    seen = []

    def forward(model, rows):
        seen.append((model.segments_bt.shape, model.hyper.scales.tolist(), model.kernels))
        return rows["embed"]

    monkeypatch.setattr(T, "forward", forward)
    return seen


# ------------------------------------------------------------------------------------------------
# Text from a checkpoint
# ------------------------------------------------------------------------------------------------


def test_a_sample_is_text_of_real_tokens_and_depends_on_the_seed(saved):
    texts = [continued(replace(CFG, seed=seed), saved, "ABC 12", count=12) for seed in (0, 1)]
    assert texts[0] != texts[1] and 0 < len(texts[0]) <= 12
    assert all(ord(char) < BOS for text in texts for char in text)


def test_at_temperature_zero_it_takes_the_likeliest_token(saved, state):
    """Beyond the longest row too, where only its length of the newest tokens is seen."""
    cfg, prompt, count = replace(CFG, val_row=16, seed=5), "ABC\nEFGHI KL", 8
    text = continued(cfg, saved, prompt, count=count, temperature=1e-6)
    tokens = [BOS, *map(ord, prompt + text)] + [BOS] * (len(text) < count)  # BOS ended it early
    seen = [tokens[:end][-16:] for end in range(1 + len(prompt), len(tokens))]
    rows = np.array([row + [0] * (16 - len(row)) for row in seen], np.int32)

    hashed = T.vocabulary(cfg, [bytes([i]) for i in range(BOS)]).hashed_v[rows]
    assert np.any(hashed != rows), "a space is as good as a line feed"
    wanted, places = T.request(cfg, hashed, 1)  # as a validation would have it

    def run(params):
        tables = params | {"ngrams": params["ngram_table"][wanted[0, 0]]}
        found, hyper = T.look_up(cfg, tables, rows, places), T.hyper_at(cfg, cfg.steps - 1)
        signs = T.sign_pool(cfg, CFG.seed)  # the run's, not the sample's
        found["ngram"] = T.signed_sum(cfg, signs, found["ngrams"], hashed)
        segments = T.segment_ids(rows, BOS)
        model = T.Model(params, cfg, T.PLAIN, cfg.val_windows, segments, hyper)
        return T.forward(model, found)

    params = state["params"]
    logits = np.asarray(quick(run, params) @ params["head"].T)
    logits = logits[np.arange(len(rows)), [len(row) - 1 for row in seen]]
    assert logits[:, : cfg.real_tokens].argmax(1).tolist() == tokens[1 + len(prompt) :]
    assert len({*text}) > 3, "it does not say the same whatever it has read"


@pytest.mark.slow
def test_it_does_not_depend_on_the_length_of_its_rows(saved):
    texts = [continued(replace(CFG, val_row=n), saved, "ABC", 8) for n in (16, 4096)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("val_row", "prompt", "count", "length"),
    [
        (4096, 3, 8, 128),  # with the BOS 12 tokens
        (4096, 119, 8, 128),
        (4096, 120, 8, 256),
        (64, 120, 8, 64),
    ],
)
def test_its_rows_hold_prompt_and_answer(saved, monkeypatch, val_row, prompt, count, length):
    """In multiples of 128, which kernels want, up to the longest row of the run."""
    seen = features(monkeypatch)
    sample.sample(replace(CFG, val_row=val_row), saved, "A" * prompt, count=count)
    assert [shape for shape, *_ in seen] == [(1, length)]


def test_an_unfinished_run_is_sampled_with_the_rotation_of_its_last_step(
    state, tmp_path, monkeypatch
):
    """YaRN changes the rotation from stage to stage."""
    seen = features(monkeypatch)
    sample.sample(CFG, checkpoint(tmp_path, CFG, 2, state), "A", count=1)
    (found,) = [scales for _, scales, _ in seen]
    assert found == pytest.approx(T.yarn(CFG)[0][1]) != pytest.approx(T.yarn(CFG)[1][1])


def test_it_draws_from_the_capped_logits(saved, monkeypatch):
    features(monkeypatch)
    only_q = 100.0 * (np.arange(CFG.vocab) == ord("Q"))
    monkeypatch.setattr(T, "cap_logits", lambda z, cfg: only_q)
    assert sample.sample(CFG, saved, "A", count=3) == "QQQ"


def test_it_reads_the_parameters_alone(saved, monkeypatch):
    """A third of a checkpoint."""
    kinds = []

    def load_state(mesh, saved, wanted, real=T.load_state):
        state = real(mesh, saved, wanted)
        kinds.extend(state)
        return state

    features(monkeypatch)
    monkeypatch.setattr(T, "load_state", load_state)
    sample.sample(CFG, saved, "A", count=1)
    assert kinds == ["params"]


def test_it_has_the_kernels_of_a_run_here(saved, monkeypatch):
    seen = features(monkeypatch)
    for kernels in ("auto", "plain"):
        sample.sample(replace(CFG, kernels=kernels), saved, "A", count=1)
    want = [T.pick_kernels(replace(CFG, kernels=x), jax.devices()[0])[0] for x in ("auto", "plain")]
    assert [kernels for *_, kernels in seen] == want and want[0] != want[1]


# ------------------------------------------------------------------------------------------------
# The end of a demonstration, and the command line
# ------------------------------------------------------------------------------------------------


def test_a_demonstration_compares_with_gzip_and_xz_and_writes_on(saved, tmp_path, monkeypatch):
    text = "\x60".join("a text that gzip and xz make shorter. " * 20 for _ in range(3))
    tokens = np.array([BOS, *text.encode()], np.uint16)
    write_shard(tmp_path / "x_val_000000.bin", tokens)
    cfg = replace(CFG, val_tokens=1024, sample_tokens=5)
    monkeypatch.setattr(sample, "sample", lambda cfg, saved, prompt: f"<{saved.step}, {prompt}>")
    run_dir, stream = saved.folder.parents[1], T.TokenStream(tmp_path, "val", BOS)
    lines = sample.demonstrate(cfg, run_dir, stream, 2.0).split("\n")
    used = text[:1024].replace("\x60", "")  # which is BOS: no text
    bits = 2.0 * 1024 / math.log(2) / len(used)
    gz, xz = (8 * len(f(used.encode())) / len(used) for f in (gzip.compress, lzma.compress))
    assert gz < 2 and xz < 2 < bits
    assert lines[0].startswith(
        f"bits per byte of the validation text: {bits:.3f}; gzip -9: {gz:.3f}"
    )
    found_xz = float(lines[0].rpartition("xz -9: ")[2])
    assert found_xz <= xz + 0.0005
    assert lines[1] == "a sample, from the bar on:"
    assert lines[2:] == [f"{text[:48]}|<8, {text[:48]}>"]


def test_without_a_checkpoint_a_demonstration_has_no_sample(tmp_path):
    write_shard(tmp_path / "x_val_000000.bin", np.array([BOS, *b"some text " * 200], np.uint16))
    stream = T.TokenStream(tmp_path, "val", BOS)
    said = sample.demonstrate(replace(CFG, checkpoint_end="never"), tmp_path, stream, 2.0)
    assert said.startswith("bits per byte") and "\n" not in said


def test_the_command_line_prints_prompt_and_sample_the_same_each_time(saved, capsys):
    """64 tokens, or fewer if the document ends."""
    with quick_compilation():
        assert sample.main([str(saved.folder.parents[1]), "--prompt", "ABC"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("ABC") and err == "" and 3 < len(out.rstrip("\n")) <= 3 + 64
    assert out == f"ABC{continued(CFG, saved, 'ABC')}\n"


def test_it_ends_well_when_nobody_reads(saved, monkeypatch):
    """As after `| head`; what is left in the pipe's buffer would fail when Python ends."""
    features(monkeypatch)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert sample.main([str(saved.folder.parents[1])]) == 0


@pytest.mark.slow
def test_as_a_script_from_another_folder(saved, tmp_path):
    """As a user calls it: no path is set, and the folder is another one."""
    run_dir = saved.folder.parents[1]
    command = [sys.executable, ROOT / "records/sample.py", run_dir, "--prompt", "ABC"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("ABC")


def test_run_by_the_trainer_it_uses_the_trainer_and_no_second_one():
    found = T.run_tool("records/sample.py")
    assert found["T"] is T and callable(found["demonstrate"])


def refused(capsys, *argv) -> str:
    """The one line of a refused command line."""
    assert sample.main([*map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in out + err
    return err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nothing"], "no checkpoint in nothing: name the folder of a run"),
        ([""], "RUN_DIR is empty"),
        ([], "the following arguments are required: RUN_DIR"),
        (["nothing", "--seed", "1"], "unrecognized arguments: --seed 1"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, *argv)


def test_broken_merges_are_refused_in_one_line(state, tmp_path, capsys):
    run_dir = tmp_path / "run"
    folder = checkpoint(run_dir, replace(CFG, encoding="bpe"), 8, state).folder
    assert f"{run_dir}/merges.json cannot be used" in refused(capsys, run_dir, "--prompt", "A")
    (run_dir / "merges.json").write_text(json.dumps(["zz"]))
    assert f"{run_dir}/merges.json cannot be used" in refused(capsys, run_dir, "--prompt", "A")
    shutil.rmtree(folder)
    assert "no checkpoint" in refused(capsys, run_dir)
