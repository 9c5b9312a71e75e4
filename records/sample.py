"""Continue a text with a trained model, or answer questions: python records/sample.py RUN_DIR

Without a prompt, the model continues the validation text, and a line compares its compression of
that text with gzip. The model is sharded across devices as in training. Each new token recomputes
its whole row.
"""

import codecs
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # folder of train_gpt.py
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))  # folder of shards.py

import train_gpt as T  # first, because it reports a missing jax in one line

# isort: split

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from shards import decoded, opened, text_encoding


class Trained(NamedTuple):
    """A model on its devices."""

    cfg: T.Config  # for the devices of `mesh`
    mesh: T.Mesh
    kernels: T.Kernels
    copies: dict
    table: T.jax.Array | None  # of n-grams
    words: list[bytes]
    step: int  # number of steps that it was trained


def merges_folder(saved: T.Saved) -> Path:
    """Return the folder with the run's merges.json: the run itself or, if the file is missing there
    and the shards have not changed, the folder of the shards."""
    run_dir = saved.folder.parents[1]
    if saved.cfg.encoding != "bpe" or (run_dir / T.MERGES).exists():
        return run_dir
    data = T.data_place(saved.cfg.data)
    for name, facts in saved.meta["data"].items():
        path = data / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != facts["sha256"]:
            return run_dir
    return data


def load(saved: T.Saved) -> Trained:
    """Load the model of a checkpoint, on the run's number of devices if they are available."""
    here = len(T.all_devices())
    count = min(saved.cfg.devices or here, here)
    cfg, mesh = T.make_mesh(dataclasses.replace(saved.cfg, devices=count))
    words = T.token_bytes(cfg, merges_folder(saved))
    kernels, _ = T.choose_kernels(cfg, mesh.devices.flat[0])
    params = T.load_state(mesh, saved, ("params",))["params"]
    copies = T.start_copies(cfg, mesh)(params, np.uint32(cfg.seed))
    return Trained(cfg, mesh, kernels, copies, params.get(T.NGRAMS), words, saved.step)


def read(cfg: T.Config, kernels: T.Kernels, result: Callable, copies, table, batch: T.Batch):
    """Return result(Model, features [b, t, d], Rows) for the rows of all devices. The features are
    computed as in eval_step."""
    model, *_ = T.gathered_model(cfg, kernels, None, copies, table, batch)

    def of_rows(rows):
        looked_up = T.look_up(model.params, T.table_ids(cfg, rows))
        return result(model, T.forward(model, looked_up, rows), rows)

    results = lax.map(of_rows, T.micro_batches(cfg, batch.rows))
    return T.GATHER(results.reshape(-1, *results.shape[2:]))


def next_logits(model: T.Model, x_btd, rows: T.Rows):
    """Return the logits [b, v] of the real tokens at the one target of each row."""
    at_b = jnp.argmax(rows.targets.ids >= 0, axis=1)
    x_bd = jnp.take_along_axis(x_btd, at_b[:, None, None], axis=1)[:, 0]
    cfg = model.cfg
    z_bv = jnp.matmul(x_bd, model.params["head"].T, preferred_element_type=jnp.float32)
    logits_bv = T.cap_logits(z_bv, cfg)
    if cfg.pointer_width:
        logits_bv = mixed(model, x_btd, rows, at_b, logits_bv)
    return logits_bv[:, : cfg.real_tokens]


def mixed(model: T.Model, x_btd, rows: T.Rows, at_b, logits_bv):
    """Return the log probabilities [b, v] of the mixture of softmax and copy pointer at `at_b`."""
    cfg = model.cfg
    reach = cfg.pointer_reach[1]

    def of_row(row):
        (queries, keys), at, logits_v = row
        query = jax.tree.map(lambda x: x[at][None], queries)
        near_s = keys.position // reach >= at // reach - 1
        keys = keys._replace(segment=jnp.where(near_s, keys.segment, -1))
        scores = jnp.append(T.pointer_scores(query, keys), query.sink)  # last: the sink
        probs = jax.nn.softmax(scores)
        next_v = jnp.zeros(len(logits_v)).at[keys.token].add(probs[:-1])
        sink_v = jnp.broadcast_to(probs[-1], next_v.shape)
        losses_v = jax.nn.logsumexp(logits_v) - logits_v
        losses = jnp.stack([losses_v, jnp.full_like(losses_v, losses_v[cfg.real_tokens])], axis=1)
        return -T.mix_pointed(losses, jnp.stack([next_v, sink_v], axis=1))[:, 0]

    return lax.map(of_row, (T.pointer_inputs(model, rows, x_btd), at_b, logits_bv))


def summed_losses(model: T.Model, x_btd, rows: T.Rows):
    """Return the summed loss [b] of each row's targets in nats, computed as in validation."""

    def loss(row):
        x_td, targets, weights, *more = row
        args = x_td, model.params["head"], targets, weights, model.cfg
        return model.kernels.cross_entropy(*args, *more)[1]

    targets = rows.targets.ids[..., None]
    weights = (targets >= 0).astype(jnp.float32)
    per_row = x_btd, jnp.maximum(targets, 0), weights
    if model.cfg.pointer_width:
        per_row = T.with_pointer(model, rows, *per_row)
    return lax.map(loss, per_row)


def reader(model: Trained, result: Callable, rows: int, length: int) -> Callable:
    """Compile a function of up to `rows` pairs (tokens of a row; number of targets at its end) that
    returns `result` per row. It is the validation program, with `result` in place of the loss."""
    mesh = model.mesh
    rows = -(-rows // mesh.size) * mesh.size
    length = min(model.cfg.val_row, -(-length // 128) * 128)  # for kernels
    cfg = dataclasses.replace(model.cfg, val_row=length, val_batch=rows * length)
    step = functools.partial(read, cfg, model.kernels, result)
    program = T.programs(cfg, mesh, model.kernels)["eval"]
    program = dataclasses.replace(program, step=step, out=T.P())
    compiled = T.compile_one(cfg, mesh, "eval", program.lower())
    vocabulary = T.vocabulary(cfg, model.words)

    def results(pairs):
        tokens_bt = np.full((rows, length + 1), cfg.bos, np.uint16)
        targets_bt = np.full((rows, length), -1, np.int32)
        for i, (tokens, count) in enumerate(pairs):
            kept = tokens[-length - 1 :]
            first = max(1, len(kept) - count)
            tokens_bt[i, : len(kept)] = kept
            targets_bt[i, first - 1 : len(kept) - 1] = kept[first:]
        own = T.own_rows(mesh, rows)
        batch = T.batch_of(cfg, mesh, model.step, vocabulary, tokens_bt[own], targets_bt[own])
        return np.asarray(compiled(model.copies, model.table, batch))[: len(pairs)]

    return results


def draw(rng: np.random.Generator, logits_v, temperature=0.7, top_k: int | None = None) -> int:
    """Draw one of the `top_k` most likely tokens (default: all); at temperature 0 the first."""
    best = np.argsort(-logits_v, kind="stable")[: top_k if temperature else 1]
    scores = (logits_v[best] - logits_v[best[0]]).astype(np.float64)
    scores = scores / (temperature or 1) + rng.gumbel(size=len(best))
    return int(best[np.argmax(scores)])


def samples(model: Trained, prompt: list[int], count: int, draws: list) -> Iterator[str]:
    """Yield the parts of one text per function (logits -> token) in `draws`: `prompt`, then up to
    `count` tokens, as they are drawn. A text ends with its document."""
    logits_of = reader(model, next_logits, 1, len(prompt) + count)
    for n, choose in enumerate(draws):
        if n:
            yield f"---- {n + 1} of {len(draws)}\n"
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # waits for complete characters
        yield decoder.decode(b"".join(model.words[i] for i in prompt))
        tokens = [model.cfg.bos, *prompt]
        for _ in range(count):
            (logits_v,) = logits_of([([*tokens, model.cfg.bos], 1)])
            tokens.append(choose(logits_v))
            if tokens[-1] == model.cfg.bos:
                break
            yield decoder.decode(model.words[tokens[-1]])
        yield decoder.decode(b"", final=True) + "\n"


def opening(model: Trained, loss: float | None) -> tuple[str, list[int]]:
    """Return (bits per byte of the validation text, for the run's loss and for gzip; the first
    tokens of the text). With arithmetic coding, a loss of x nats takes x / ln 2 bits."""
    cfg, words = model.cfg, model.words
    place = T.data_place(cfg.data)
    try:
        tokens = T.TokenStream(place, "val", cfg.bos).read(1, cfg.val_tokens)
    except T.UserError:
        return f"no validation text in {place}: a new text (or use --prompt TEXT)", []
    tokens = [i for i in tokens if i < len(words)]
    text = b"".join(words[i] for i in tokens)
    compressed = gzip.compress(text)
    sizes = f"gzip {8 * len(compressed) / len(text):.3f}"
    if loss is not None:  # None before the first validation
        bits = loss * cfg.val_tokens / math.log(2)
        sizes = f"the model {bits / len(text):.3f}, {sizes}"
    heading = f"bits per byte of the validation text: {sizes}"
    return f"{heading}\na sample after the first words of that text:", tokens[:48]


def demonstrate(model: Trained, log: T.RunLog):
    """Write sample.txt at the end of a run of train_gpt.py."""
    heading, prompt = opening(model, log.facts["val_loss"])
    draws = [functools.partial(draw, np.random.default_rng([model.cfg.seed, 0]))]
    pieces = samples(model, prompt, model.cfg.sample_tokens, draws)
    text = "".join([heading, "\n", *pieces]).removesuffix("\n")
    log.write("sample.txt", text)
    log.say(text)
    if T.checkpoint_steps(log.folder / "checkpoints"):
        log.say(f"others: {T.command_for(__file__, log.folder, '--prompt', 'TEXT')}")


def questions(path: Path, bos: int, encode: Callable) -> list[tuple[list, int]]:
    """Return (one row for `reader` per ending, index of the right ending) per line of a file."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            item = json.loads(line)
            begin = [bos, *encode(item["ctx"])]
            endings = [encode(" " + ending) for ending in item["endings"]]
            label = range(len(endings)).index(int(str(item["label"])))
        except (ValueError, LookupError, TypeError) as error:
            form = '{"ctx": TEXT, "endings": [TEXT, ...], "label": NUMBER}'
            raise T.UserError(f"{path}, line {number} is not {form} ({error!r})") from None
        found.append(([(begin + ending, len(ending)) for ending in endings], label))
    T.require(found, f"{path} has no questions")
    return found


def score(model: Trained, asked: list[tuple[list, int]], say: Callable) -> str:
    """Return how often the right ending has the lowest loss: summed (acc), per token (acc_norm)."""
    rows = [row for endings, _ in asked for row in endings]
    length = max(len(tokens) for tokens, _ in rows) - 1
    batch = max(1, model.cfg.micro_tokens // length) * model.mesh.size
    losses_of = reader(model, summed_losses, min(batch, len(rows)), length)
    losses = []
    for first in range(0, len(rows), batch):
        losses.extend(losses_of(rows[first : first + batch]))
        if first and first % (100 * batch) == 0:
            say(f"{len(losses):,} of {len(rows):,} endings\r")
    right = np.zeros(2)
    each = iter(losses)
    for endings, label in asked:
        sums = np.array([next(each) for _ in endings])
        means = sums / [count for _, count in endings]
        right += [sums.argmin() == label, means.argmin() == label]
    n = len(asked)
    acc, norm = right / n
    acc_error, norm_error = np.sqrt(right / n * (1 - right / n) / n)
    acc = f"acc {acc:.4f} ± {acc_error:.4f} (summed loss)"
    norm = f"acc_norm {norm:.4f} ± {norm_error:.4f} (loss per token)"
    return f"{n:,} questions: {acc}, {norm}"


def given_prompt(args) -> str | None:
    """Return the prompt from the command line, a file or stdin; None if there is none."""
    if args.file:
        with opened(args.file) as file:
            text = decoded(file, args.file)
    elif args.prompt == "-" or (args.prompt is None and is_redirected(sys.stdin)):
        T.tell("reading the prompt from stdin (no prompt: add < /dev/null)", sys.stderr)
        text = decoded(io.BytesIO(sys.stdin.buffer.read()), "stdin")
    else:
        return args.prompt
    return text.removesuffix("\n") or None


def is_redirected(stream) -> bool:
    """Return whether stdin is a pipe or a file."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by a notebook
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def main(argv=None):
    parser = T.Parser(prog="sample.py", description=(__doc__ or "").split("\n")[0])
    option = parser.add_argument

    def path(text):  # shells do not expand ~ in --file=~/prompt.txt
        return Path(text).expanduser()

    option("run_dir", type=path, metavar="RUN_DIR", help="folder of a run")
    what = parser.add_mutually_exclusive_group().add_argument
    what("--prompt", metavar="TEXT", help="text to continue; - for stdin (or use a pipe)")
    what("--file", type=path, metavar="FILE", help="file with the text to continue")
    what("--score", type=path, metavar="FILE.jsonl", help="questions in HellaSwag's format")
    option("--tokens", type=int, metavar="N", help="maximum length of the answer")
    option("--temperature", type=float, default=0.7, metavar="X", help="0: the most likely token")
    option("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    option("--samples", type=int, default=1, metavar="S", help="number of texts")
    option("--seed", type=int, metavar="N", help="of the random draws; default: the run's")
    args = parser.parse_args(argv)
    T.require(0 <= args.temperature < math.inf, "--temperature must be a number >= 0")
    counts = args.tokens, args.top_k, args.samples
    positive = all(count is None or count > 0 for count in counts)
    T.require(positive, "--tokens, --top-k and --samples must be positive")
    T.require(args.seed is None or args.seed >= 0, "--seed must not be negative")
    place = args.run_dir
    best = place / T.BEST
    if T.checkpoint_steps(best):
        line = f"the model with the run's lowest validation loss; the last one: {place}/checkpoints"
        T.tell(line, sys.stderr)
        place = best
    saved = T.find_checkpoint(place, lambda line: T.tell(line, sys.stderr))
    encode = text_encoding(saved.cfg.encoding, merges_folder(saved)).encode_ordinary
    if args.score:
        asked = questions(args.score, saved.cfg.bos, encode)
        T.tell(score(load(saved), asked, T.tell))
        return
    text = given_prompt(args)
    model = load(saved)
    if text is None:
        heading, prompt = opening(model, saved.meta["val_loss"])
        T.tell(heading)
    else:
        prompt = encode(text)
    seed = model.cfg.seed if args.seed is None else args.seed
    how = {"temperature": args.temperature, "top_k": args.top_k}
    rngs = (np.random.default_rng([seed, n]) for n in range(args.samples))
    draws = [functools.partial(draw, rng, **how) for rng in rngs]
    count = args.tokens or model.cfg.sample_tokens or 64
    try:
        for piece in samples(model, prompt, count, draws):
            print(piece, end="", flush=True)
    except BrokenPipeError:  # after `| head`; otherwise flushing would fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(T.report_errors(main))
