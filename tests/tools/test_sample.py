"""records/sample.py: text from a checkpoint, and what is refused."""

import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, ROOT
from programs import CFG, quick, quick_compilation

import train_gpt as T

sys.path.insert(0, str(ROOT / "records"))
import sample


@pytest.fixture(scope="module")
def params():
    """A model whose answers depend on what it reads; padding ids would be likelier than any."""
    _, one = T.make_mesh(replace(CFG, devices=1))
    params = jax.tree.map(np.array, quick(T.start_state(CFG, one), np.uint32(3))["params"])
    rng = np.random.default_rng(0)
    for name in ("embed", "head", "value_tables", "ngram_table", "gate_w2"):
        params[name] += rng.normal(size=params[name].shape).astype(np.float32)
    params["head"][CFG.real_tokens :] *= 9
    params["head"][BOS] = 0  # few documents end
    return jax.tree.map(jax.numpy.asarray, params)


@pytest.fixture
def saved(params, tmp_path, monkeypatch):
    """Its checkpoint at the end of a run; only `params` can be read from it."""
    monkeypatch.setattr(T, "load_state", lambda mesh, saved, kinds: {x: params for x in kinds})
    return SimpleNamespace(cfg=CFG, step=CFG.steps, folder=tmp_path / "checkpoints" / "8")


@pytest.fixture
def seen(monkeypatch):
    """What the model is given; its embedding stands for it, so that nothing compiles for long."""
    calls = []

    def forward(model, rows):
        calls.append((model.segments_bt.shape, model.hyper.scales.tolist()))
        return rows["embed"]

    monkeypatch.setattr(T, "forward", forward)
    return calls


def test_at_temperature_zero_it_takes_the_likeliest_token(saved, params):
    """Beyond the longest row too, where only its length of the newest tokens is seen."""
    cfg = replace(CFG, val_row=16, seed=5)
    prompt = "ABC\nEFGHI KL"
    saved.cfg = cfg
    with quick_compilation():
        text = sample.sample(saved, prompt, 8, temperature=1e-6)
    assert text.startswith(prompt)
    tokens = [BOS, *map(ord, text)] + [BOS] * (len(text) < len(prompt) + 8)  # BOS ended it early
    read = [tokens[:end][-16:] for end in range(1 + len(prompt), len(tokens))]
    rows = np.array([row + [0] * (16 - len(row)) for row in read], np.int32)

    hashed = T.vocabulary(cfg, [bytes([i]) for i in range(BOS)]).hashed_v[rows]
    assert np.any(hashed != rows), "a space is as good as a line feed"
    wanted, places = T.request(cfg, hashed, 1, 1)  # as a validation would have it

    def run(params):
        tables = params | {"ngrams": params["ngram_table"][wanted[0, 0]]}
        found = T.look_up(cfg, tables, rows, places)
        signs = T.sign_pool(cfg, cfg.seed)
        found["ngram"] = T.signed_sum(cfg, signs, found["ngrams"], hashed)
        hyper = T.hyper_at(cfg, cfg.steps - 1)
        segments = T.segment_ids(rows, BOS)
        return T.forward(T.Model(params, cfg, T.PLAIN, cfg.val_windows, segments, hyper), found)

    logits = np.asarray(quick(run, params) @ params["head"].T)
    logits = logits[np.arange(len(rows)), [len(row) - 1 for row in read]]
    assert logits[:, : cfg.real_tokens].argmax(1).tolist() == tokens[1 + len(prompt) :]
    assert len({*tokens[1 + len(prompt) :]}) > 3, "it does not say the same whatever it has read"


def test_its_text_has_real_tokens_and_depends_on_the_seed(saved, seen):
    texts = [sample.sample(saved, "ABC 12", 12)]
    saved.cfg = replace(CFG, seed=1)
    texts += [sample.sample(saved, "ABC 12", 12) for _ in range(2)]
    assert texts[0] != texts[1] == texts[2] and all(text.startswith("ABC 12") for text in texts)
    assert all(ord(char) < BOS for text in texts for char in text)


def test_its_rows_hold_prompt_and_answer_up_to_the_longest_row_of_the_run(saved, seen):
    """In multiples of 128, which kernels need."""
    for val_row, prompt, length in ((4096, 3, 128), (4096, 120, 256), (64, 120, 64)):
        saved.cfg = replace(CFG, val_row=val_row)
        sample.sample(saved, "A" * prompt, 8)
        assert seen.pop()[0] == (1, length)


def test_an_unfinished_run_is_sampled_with_the_rotation_of_its_last_step(saved, seen):
    """YaRN changes the rotation from stage to stage."""
    saved.step = 2
    sample.sample(saved, "A", 1)
    assert seen[0][1] == pytest.approx(T.yarn(CFG)[0][1]) != pytest.approx(T.yarn(CFG)[1][1])


def test_the_command_line_prints_the_prompt_and_what_follows(saved, seen, monkeypatch, capsys):
    monkeypatch.setattr(T, "find_checkpoint", lambda folder, say: saved)
    sample.main(["logs/x", "--prompt", "ABC"])
    assert capsys.readouterr().out == f"{sample.sample(saved, 'ABC', 64)}\n"


def test_without_a_prompt_it_compares_with_gzip_and_xz_and_continues_the_validation_text(
    saved, seen, shards, monkeypatch, capsys
):
    saved.cfg, saved.meta = replace(CFG, data=str(shards)), {"val_loss": 3.5}
    monkeypatch.setattr(T, "find_checkpoint", lambda folder, say: saved)
    sample.main(["logs/x"])
    line, heading, text = capsys.readouterr().out.split("\n", 2)
    form = r"bits per byte of the validation text: the model (\S+), gzip \S+, xz \S+"
    tokens = T.TokenStream(shards, "val", BOS).read(1, CFG.val_tokens)
    own = tokens[tokens != BOS]  # each of which is a byte
    bits = 3.5 * CFG.val_tokens / math.log(2) / len(own)
    assert float(re.fullmatch(form, line)[1]) == pytest.approx(bits, abs=1e-3)
    assert "a sample" in heading and text.startswith(bytes(own[:40].tolist()).decode())


def test_what_is_no_run_or_lacks_its_merges_is_refused_in_one_line(saved, monkeypatch, capsys):
    def refused(*argv):
        assert T.report_errors(lambda: sample.main(argv)) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and err.count("\n") == 1 and out == ""
        return err

    assert "no checkpoint in nothing" in refused("nothing")
    assert "the following arguments are required: RUN_DIR" in refused()
    saved.cfg = replace(CFG, encoding="bpe")
    monkeypatch.setattr(T, "find_checkpoint", lambda folder, say: saved)
    assert "merges.json" in refused("logs/x")
