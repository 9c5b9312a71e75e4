"""records/sample.py: text and answers from a checkpoint, and errors."""

import io
import json
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from hashlib import sha256
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, ROOT
from programs import BUILT, CFG, features, lay, quick, quick_compilation

import train_gpt as T

sys.path.insert(0, str(ROOT / "records"))
import sample


@pytest.fixture(scope="module")
def params():
    """Parameters of a model with answers that depend on the text; padding ids are most likely."""
    _, one = T.make_mesh(replace(CFG, devices=1))
    params = jax.tree.map(np.array, quick(T.start_state(CFG, one), np.uint32(3))["params"])
    rng = np.random.default_rng(0)
    for name in ("embed", "head", "value_tables", "ngram_table", "gate_w2"):
        params[name] += rng.normal(size=params[name].shape).astype(np.float32)
    params["head"][CFG.real_tokens :] *= 9
    params["head"][BOS] = 0  # few documents end
    return params


@pytest.fixture
def saved(params, tmp_path, monkeypatch):
    """Its checkpoint at the end of a run; it contains only `params`."""

    def load_state(mesh, saved, kinds):
        return {kind: lay(saved.cfg, params, mesh) for kind in kinds}

    def lower(program, real=T.Program.lower):
        """Compile each program once; `seen` changes programs."""
        same = program.step.func, program.step.args, str(program.args), program.mesh.size, T.forward
        if same not in BUILT:
            BUILT[same] = real(program).compile()
        return SimpleNamespace(compile=lambda: BUILT[same])

    monkeypatch.setattr(T, "load_state", load_state)
    monkeypatch.setattr(T.Program, "lower", lower)
    cfg = replace(CFG, devices=1)
    folder = tmp_path / "checkpoints" / "8"
    return SimpleNamespace(cfg=cfg, step=CFG.steps, folder=folder, meta={"data": {}})


@pytest.fixture
def seen(monkeypatch):
    """Return the input shapes of the model. Only its embedding runs, to compile less."""
    calls = []

    def forward(model, found, rows):
        calls.append(rows.hashed.shape)
        return found["embed"]

    monkeypatch.setattr(T, "forward", forward)
    return calls


def text_of(saved, prompt: str, count: int, seed=0, **how) -> str:
    """Return the prompt and its continuation; tokens are bytes."""
    draws = [partial(sample.draw, np.random.default_rng(seed), **how)]
    with quick_compilation():
        model = sample.load(saved)
        pieces = [*sample.samples(model, list(prompt.encode()), count, draws)]
    return "".join(pieces).removesuffix("\n")


def test_at_temperature_zero_it_takes_the_most_likely_token(saved, params):
    """Also after more tokens than a row has: then the model reads only the newest ones."""
    cfg = saved.cfg = replace(saved.cfg, val_row=16, seed=5)
    prompt = "ABC\nEFGHI KL"
    text = text_of(saved, prompt, 8, temperature=0)
    assert text.startswith(prompt)
    tokens = [BOS, *map(ord, text)] + [BOS] * (len(text) < len(prompt) + 8)  # BOS ended it early
    read = [tokens[:end][-16:] for end in range(1 + len(prompt), len(tokens))]
    rows = np.array([row + [0] * (16 - len(row)) for row in read], np.int32)

    hashed = T.vocabulary(cfg, [bytes([i]) for i in range(BOS)]).hashed_v[rows]
    assert np.any(hashed != rows), "hashes treat a space like a line feed"
    wanted, places = T.request(cfg, hashed, 1, 1)  # as in validation

    def run(params):
        hyper, signs = T.hyper_at(cfg, cfg.steps - 1), T.sign_pool(cfg, cfg.seed)
        fetched = params | {"ngram_table": params["ngram_table"][wanted[0, 0]]}
        return features(T.Model(fetched, cfg, T.PLAIN, None, hyper, signs), rows, hashed, places)

    logits = np.asarray(quick(run, params) @ params["head"].T)
    logits = logits[np.arange(len(rows)), [len(row) - 1 for row in read]]
    assert logits[:, : cfg.real_tokens].argmax(1).tolist() == tokens[1 + len(prompt) :]
    assert len({*tokens[1 + len(prompt) :]}) > 3, "the answer depends on the text"


@pytest.mark.slow
def test_the_text_is_the_same_with_the_ngram_table_sharded_across_devices(saved):
    """As in training, each device requests rows from the others."""
    one = text_of(saved, "ABC 12", 12, temperature=0)
    saved.cfg = replace(CFG, devices=4)
    assert T.make_mesh(saved.cfg)[1].size == 4
    assert text_of(saved, "ABC 12", 12, top_k=1) == one != text_of(saved, "ABC 12", 12)


def test_a_run_on_more_devices_than_available_is_sampled_on_all(saved, seen):
    saved.cfg = replace(CFG, devices=64)
    assert sample.load(saved).mesh.size == 8


def test_its_text_has_real_tokens_and_depends_on_the_seed(saved, seen):
    texts = [text_of(saved, "ABC 12", 12, seed) for seed in (0, 1, 1)]
    assert texts[0] != texts[1] == texts[2] and all(text.startswith("ABC 12") for text in texts)
    assert all(ord(char) < BOS for text in texts for char in text)


def test_draws_follow_temperature_and_top_k():
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    rng = np.random.default_rng(0)
    drawn = [sample.draw(rng, logits, temperature=0.5, top_k=2) for _ in range(2000)]
    share = 0.36 / (0.36 + 0.09)
    assert {*drawn} == {1, 2} and abs(
        drawn.count(1) / 2000 - share
    ) < 0.03  # three standard deviations
    assert sample.draw(rng, logits, temperature=1e-300) == 1


def test_rows_have_prompt_and_answer_up_to_the_longest_row_of_the_run(saved, seen):
    """Kernels need multiples of 128. The last token is not read."""
    for val_row, prompt, length in ((4096, 3, 128), (4096, 121, 256), (64, 120, 64)):
        saved.cfg = replace(saved.cfg, val_row=val_row)
        text_of(saved, "A" * prompt, 8)
        assert seen.pop() == (1, length)


def test_an_unfinished_run_is_sampled_with_the_rotation_of_its_last_step(saved, seen):
    """YaRN changes the rotation from stage to stage."""
    saved.step = 2
    hyper = []
    real = T.put_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "put_batch", lambda *args: hyper.append(real(*args).hyper) or real(*args))
        text_of(saved, "A", 1)
    assert hyper[0].scales.tolist() == pytest.approx(T.yarn(CFG)[0][1])
    assert T.yarn(CFG)[0][1] != pytest.approx(T.yarn(CFG)[1][1])


def test_characters_are_complete_and_a_document_ends_the_text(monkeypatch):
    """In this test, tokens are bytes."""
    tokens = [*"aé…".encode(), 0xE2, BOS, 65]
    logits = iter(np.eye(257, dtype=np.float32)[tokens][:, None])
    monkeypatch.setattr(sample, "reader", lambda *_: lambda rows: next(logits))
    cfg = SimpleNamespace(bos=BOS)
    model = SimpleNamespace(cfg=cfg, words=[bytes([i]) for i in range(256)])
    draws = [partial(sample.draw, np.random.default_rng(0), temperature=0)]
    pieces = list(sample.samples(model, [], 99, draws))
    assert pieces == ["", "a", "", "é", "", "", "…", "", "\ufffd\n"]


@pytest.fixture
def command(saved, monkeypatch, capsys):
    """Return a function that returns the output of the command line for some words."""

    def printed(*words, stdin=None):
        take, put = os.pipe() if stdin is not None else (os.open(os.devnull, os.O_RDONLY), None)
        if put:
            os.write(put, stdin)
            os.close(put)
        with os.fdopen(take) as pipe, quick_compilation():
            monkeypatch.setattr(sys, "stdin", pipe)
            sample.main(["logs/x", *words])
        return capsys.readouterr().out.removesuffix("\n")

    monkeypatch.setattr(T, "find_checkpoint", lambda folder, say: saved)
    return printed


def test_the_prompt_is_on_the_command_line_in_a_file_or_on_stdin(command, seen, tmp_path):
    text = command("--prompt", "ABC", "--tokens", "9")
    assert len(text) > 4 and text.startswith("ABC")
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfABC\n")
    more = "--tokens", "9"
    assert command("--file", str(tmp_path / "prompt.txt"), *more) == text
    for content in ("ABC\n".encode("utf-16"), b"ABC\n"):
        (tmp_path / "prompt.txt").write_bytes(content)
        assert command("--file", str(tmp_path / "prompt.txt"), *more) == text
        assert command(*more, stdin=content) == text
    assert command("--prompt", "-", *more, stdin=b"ABC") == text
    assert command("--seed", "1", "--prompt", "ABC", *more) != text
    two = command("--samples", "2", "--prompt", "ABC", *more)
    assert re.fullmatch(rf"{re.escape(text)}\n---- 2 of 2\nABC(?s:.+)", two)
    assert two.count(text.removeprefix("ABC")) == 1


def test_only_a_pipe_or_a_file_on_stdin_is_a_prompt(command, seen, capsys, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(T, "tell", lambda line, stream=None: told.append(line))
    command("--tokens", "1", stdin=b"ABC\n")
    assert told == ["reading the prompt from stdin (no prompt: add < /dev/null)"]
    (tmp_path / "prompt").write_text("ABC")
    for stream, expected in ((open(tmp_path / "prompt"), True), (open(os.devnull), False)):
        with stream:
            assert sample.is_redirected(stream) is expected
    assert not sample.is_redirected(io.StringIO("replaced by a notebook"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("café\n".encode("latin-1"))))
    assert sample.given_prompt(SimpleNamespace(file=None, prompt="-")) == "café"


def test_without_a_prompt_it_compares_with_gzip_and_continues_the_validation_text(
    saved, seen, shards, command
):
    saved.cfg, saved.meta = replace(saved.cfg, data=str(shards)), {"val_loss": 3.5}
    line, heading, text = command().split("\n", 2)
    form = r"bits per byte of the validation text: the model (\S+), gzip \S+"
    tokens = T.TokenStream(shards, "val", BOS).read(1, CFG.val_tokens)
    own = tokens[tokens != BOS]  # bytes
    bits = 3.5 * CFG.val_tokens / math.log(2) / len(own)
    assert float(re.fullmatch(form, line)[1]) == pytest.approx(bits, abs=1e-3)
    assert "a sample" in heading and text.startswith(bytes(own[:40].tolist()).decode())
    saved.meta["val_loss"] = None  # stopped before its first validation
    assert command().startswith("bits per byte of the validation text: gzip ")


def test_a_run_without_merges_uses_the_merges_next_to_its_shards(saved, shards, tmp_path):
    """If the shards have changed, their merges do not fit."""
    data = shutil.copytree(shards, tmp_path / "data")
    (data / "merges.json").write_text('["7468"]')
    names = "small_train_000001.bin", "small_val_000000.bin"
    facts = {
        name: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
        for name, path in ((name, data / name) for name in names)
    }
    saved.cfg, saved.meta = replace(saved.cfg, encoding="bpe", data=str(data)), {"data": facts}
    assert sample.merges_folder(saved) == data
    (data / names[1]).write_bytes((data / names[0]).read_bytes())
    assert sample.merges_folder(saved) == tmp_path
    shutil.copy(shards / names[1], data)
    (tmp_path / "merges.json").write_text("[]")
    assert sample.merges_folder(saved) == tmp_path


def test_without_the_validation_text_it_begins_a_new_text(saved, seen, tmp_path, command):
    saved.cfg, saved.meta = replace(saved.cfg, data=str(tmp_path)), {"val_loss": 3.5}
    heading, text = command().split("\n", 1)
    assert f"no validation text in {tmp_path}" in heading and "--prompt" in heading
    assert "--data" not in heading and len(text) > 3


# ---- Questions ---------------------------------------------------------------------------------


def test_losses_equal_the_validation_loss(saved, shards):
    """On two devices."""
    saved.cfg = replace(CFG, devices=2)
    with quick_compilation():
        model = sample.load(saved)
        cfg, mesh = model.cfg, model.mesh
        lowered = T.programs(cfg, mesh, model.kernels)["eval"].lower()
        loss = partial(T.compile_one(cfg, mesh, "eval", lowered), model.copies, model.table)
        losses_of = sample.reader(model, sample.summed_losses, 16, cfg.val_row)
    stream = T.TokenStream(shards, "val", BOS)
    vocabulary = T.vocabulary(cfg, model.words)
    batches = T.validation_batches(cfg, mesh, cfg.steps, stream, vocabulary)
    want, dropped = T.evaluate(cfg, loss, batches)
    rows = [stream.read(64 * n, 65).tolist() for n in range(16)]
    each = losses_of([(row, 64) for row in rows])
    assert (each.sum() / 1024, dropped) == (pytest.approx(want, rel=1e-5), 0)
    last = losses_of([(row, 3) for row in rows]) + losses_of([(row[:-3], 61) for row in rows])
    np.testing.assert_allclose(last, each, rtol=1e-4)  # targets are at the end of their row


def test_with_a_pointer_logits_equal_the_losses_of_all_next_tokens(
    params, saved, seen, monkeypatch
):
    """Inside and outside the reach of the pointer, for tokens in the text and other tokens."""
    cfg = replace(saved.cfg, pointer_width=8, pointer_reach=(8, 16))
    rng = np.random.default_rng(1)
    own = {name: row.shape for name, row in T.param_specs(cfg).items() if name not in params}
    own = {name: rng.normal(size=shape).astype(np.float32) for name, shape in own.items()}
    own["pointer_gain"][:] = 0.5  # gives every key some probability
    whole = params | own
    monkeypatch.setattr(T, "load_state", lambda mesh, *_: {"params": lay(cfg, whole, mesh)})
    saved.cfg = cfg
    with quick_compilation():
        model = sample.load(saved)
        logits_of = sample.reader(model, sample.next_logits, 2, 64)
        losses_of = sample.reader(model, sample.summed_losses, cfg.real_tokens, 64)
    for count in (9, 40, 63):
        text = [BOS, *rng.integers(0, 12, count).tolist()]
        (logits,) = logits_of([([*text, BOS], 1)])
        losses = losses_of([([*text, i], 1) for i in range(cfg.real_tokens)])
        assert logits.shape == losses.shape == (cfg.real_tokens,)
        np.testing.assert_allclose(-logits, losses, rtol=2e-5)
    for at, seen_there in ((31, False), (32, True)):  # the last two blocks
        other = [*text[:at], 50, *text[at + 1 :], BOS]
        assert np.any(logits_of([(other, 1)])[0] != logits) == seen_there


@pytest.fixture
def counting(params, seen):
    """Return parameters (see `seen`): after a character, its successor in ASCII is likely, and all
    other characters are equally unlikely."""
    embed, head = np.zeros_like(params["embed"]), np.zeros_like(params["head"])
    for i in range(32):
        embed[ord("@") + i, i] = 1
        head[ord("@") + i, (i - 1) % 32] = 40
    return params | {"embed": embed, "head": head}


def test_the_ending_with_the_lowest_loss_is_the_answer(
    saved, counting, monkeypatch, tmp_path, capsys
):
    """A short wrong ending can have a lower summed loss, but not a lower loss per token."""
    monkeypatch.setattr(
        T, "load_state", lambda mesh, saved, kinds: {"params": lay(saved.cfg, counting, mesh)}
    )
    monkeypatch.setattr(T, "find_checkpoint", lambda folder, say: saved)
    saved.cfg = replace(CFG, devices=4)
    items = [
        {"ctx": "ABC", "endings": ["XAZ", "ABC", "QQQ"], "label": 1},
        {"ctx": "A" * 99, "endings": ["ABCDEFGHIJKLMNOP", "Q"], "label": "0", "ind": 5},
        {"ctx": "", "endings": ["KLM", "MLK"], "label": 1},  # wrong
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    with quick_compilation():
        sample.main(["logs/x", "--score", str(path)])
    answer = "3 questions: acc 0.3333 ± 0.2722 (summed loss), acc_norm 0.6667 ± 0.2722"
    assert capsys.readouterr().out == f"{answer} (loss per token)\n"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        '{"ctx": "A", "endings": ["B"]}',
        '{"ctx": "A", "endings": ["B"], "label": 1}',
        '{"ctx": "A", "endings": ["B"], "label": -1}',
        '{"ctx": "A", "endings": ["B"], "label": ""}',
        '{"ctx": 7, "endings": ["B"], "label": 0}',
        '{"ctx": "A", "endings": ["B", null], "label": 0}',
        '{"ctx": "A", "endings": [], "label": 0}',
    ],
)
def test_an_invalid_question_is_named_by_its_line(line, saved, tmp_path, monkeypatch, capsys):
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"ctx": "A", "endings": ["B", "C"], "label": 0}}\n{line}\n')
    monkeypatch.setattr(T, "find_checkpoint", lambda folder, say: saved)
    assert T.report_errors(lambda: sample.main(["x", "--score", str(path)])) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {path}, line 2 is not ") and err.count("\n") == 1 and not out


# ---- Errors ------------------------------------------------------------------------------------


def test_invalid_arguments_are_refused_in_one_line(saved, monkeypatch, capsys):
    def refused(*argv):
        assert T.report_errors(lambda: sample.main(argv)) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and err.count("\n") == 1 and out == ""
        return err

    assert "nothing does not exist: pass a run directory" in refused("nothing")
    assert "the following arguments are required: RUN_DIR" in refused()
    for words in ("tokens -1", "tokens 0", "top-k 0", "samples 0"):
        name, value = words.split()
        positive = "--tokens, --top-k and --samples must be positive"
        assert positive in refused("x", f"--{name}", value)
    assert "--seed must not be negative" in refused("x", "--seed", "-1")
    assert "--temperature must be a number >= 0" in refused("x", "--temperature", "nan")
    assert "--temperature must be a number" in refused("x", "--temperature", "-0.5")
    assert "invalid int value: 'some'" in refused("x", "--tokens", "some")
    assert "not allowed with" in refused("x", "--prompt", "A", "--file", "B")
    monkeypatch.setattr(T, "find_checkpoint", lambda folder, say: saved)
    assert "nowhere.txt" in refused("x", "--file", "nowhere.txt")
    saved.cfg = replace(CFG, encoding="bpe")
    assert "merges.json" in refused("logs/x")
    saved.cfg = replace(CFG, encoding="ids")
    assert "encoding=ids: only your tokenizer knows text of such" in refused("logs/x", "--prompt=A")


def test_of_a_run_with_a_best_model_it_takes_that_and_reports_it(tmp_path, monkeypatch, capsys):
    def place_of(run_dir):
        with pytest.raises(T.UserError) as found:
            sample.main([str(run_dir)])
        return str(found.value)

    def find(place, say):
        raise T.UserError(str(place))

    monkeypatch.setattr(T, "find_checkpoint", find)
    assert place_of(tmp_path) == f"{tmp_path}" and not capsys.readouterr().err
    (tmp_path / "best" / "3").mkdir(parents=True)
    assert place_of(tmp_path) == f"{tmp_path}/best"
    line = f"the model with the run's lowest validation loss; the last one: {tmp_path}/checkpoints"
    assert capsys.readouterr().err == f"{line}\n"
    assert place_of(tmp_path / "checkpoints") == f"{tmp_path}/checkpoints"
