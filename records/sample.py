"""Continue a text with a trained model, or have it answer questions: python records/sample.py RUN

Without a prompt it continues the validation text, and says how far the model compresses that. The
model lies on the devices as in training; every token computes its whole row again.
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
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))  # where shards.py is

import train_gpt as T  # first: it reports in one line that jax is missing

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
    step: int  # how many it was trained


def merges_folder(saved: T.Saved) -> Path:
    """The folder with the merges of the run's tokens: the run's own, or if it has none there, the
    folder of its shards if these are still the same."""
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
    """The model of a checkpoint, on the devices of its run or on those that are here."""
    here = len(T.all_devices())
    count = min(saved.cfg.devices or here, here)
    cfg, mesh = T.make_mesh(dataclasses.replace(saved.cfg, devices=count))
    words = T.token_bytes(cfg, merges_folder(saved))
    kernels, _ = T.pick_kernels(cfg, mesh.devices.flat[0])
    params = T.load_state(mesh, saved, ("params",))["params"]
    copies = T.start_copies(cfg, mesh)(params, np.uint32(cfg.seed))
    return Trained(cfg, mesh, kernels, copies, params.get(T.NGRAMS), words, saved.step)


def read(cfg: T.Config, kernels: T.Kernels, result: Callable, copies, table, batch: T.Batch):
    """`result` (of a Model, features [b, t, d] and their Rows) for the rows of all devices. Up to
    the features this is eval_step."""
    model, *_ = T.gathered_model(cfg, kernels, None, copies, table, batch)

    def of_rows(rows):
        looked_up = T.look_up(model.params, T.table_ids(cfg, rows))
        return result(model, T.forward(model, looked_up, rows), rows)

    results = lax.map(of_rows, T.micro_batches(cfg, batch.rows))
    return T.GATHER(results.reshape(-1, *results.shape[2:]))


def next_logits(model: T.Model, x_btd, rows: T.Rows):
    """Logits [b, v] of the real tokens, where each row has its one target."""
    at_b = jnp.argmax(rows.aims.targets >= 0, axis=1)
    x_bd = jnp.take_along_axis(x_btd, at_b[:, None, None], axis=1)[:, 0]
    cfg = model.cfg
    z_bv = jnp.matmul(x_bd, model.params["head"].T, preferred_element_type=jnp.float32)
    logits_bv = T.cap_logits(z_bv, cfg)
    if cfg.pointer_width:
        logits_bv = mixed(model, x_btd, rows, at_b, logits_bv)
    return logits_bv[:, : cfg.real_tokens]


def mixed(model: T.Model, x_btd, rows: T.Rows, at_b, logits_bv):
    """Logarithms [b, v] of the chances that logits and pointer give the next token of `at_b`."""
    cfg = model.cfg
    reach = cfg.pointer_reach[1]

    def of_row(row):
        (queries, keys), at, logits_v = row
        query = jax.tree.map(lambda x: x[at][None], queries)
        near_s = keys.position // reach >= at // reach - 1
        keys = keys._replace(segment=jnp.where(near_s, keys.segment, -1))
        scores = jnp.append(T.pointer_scores(query, keys), query.sink)  # the sink is last
        chances = jax.nn.softmax(scores)
        next_v = jnp.zeros(len(logits_v)).at[keys.token].add(chances[:-1])
        sink_v = jnp.broadcast_to(chances[-1], next_v.shape)
        losses_v = jax.nn.logsumexp(logits_v) - logits_v
        losses = jnp.stack([losses_v, jnp.full_like(losses_v, losses_v[cfg.real_tokens])], axis=1)
        return -T.mix_pointed(losses, jnp.stack([next_v, sink_v], axis=1))[:, 0]

    return lax.map(of_row, (T.pointer_inputs(model, rows, x_btd), at_b, logits_bv))


def summed_losses(model: T.Model, x_btd, rows: T.Rows):
    """The sum [b] of the losses of each row's targets in nats, as a validation computes them."""

    def loss(row):
        x_td, targets, weights, *more = row
        args = x_td, model.params["head"], targets, weights, model.cfg
        return model.kernels.cross_entropy(*args, *more)[1]

    targets = rows.aims.targets[..., None]
    weights = (targets >= 0).astype(jnp.float32)
    per_row = x_btd, jnp.maximum(targets, 0), weights
    if model.cfg.pointer_width:
        per_row = T.with_pointer(model, rows, *per_row)
    return lax.map(loss, per_row)


def reader(model: Trained, result: Callable, rows: int, length: int) -> Callable:
    """A function of up to `rows` pairs (tokens of a row; how many of the last ones are targets)
    -> `result` of each row. The program is that of a validation with such rows, but for its end."""
    mesh = model.mesh
    rows = -(-rows // mesh.size) * mesh.size
    length = min(model.cfg.val_row, -(-length // 128) * 128)  # kernels take multiples of 128
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
    """A token, of the `top_k` likeliest; at temperature 0 the likeliest."""
    best = np.argsort(-logits_v, kind="stable")[: top_k if temperature else 1]
    scores = (logits_v[best] - logits_v[best[0]]).astype(np.float64) / (temperature or 1)
    return int(best[np.argmax(scores + rng.gumbel(size=len(best)))])


def samples(model: Trained, prompt: list[int], count: int, draws: list) -> Iterator[str]:
    """Yield a text for each of `draws` (logits -> token), as it comes: `prompt`, and up to `count`
    tokens, or as many as the document has. At last the time of a token."""
    logits_of = reader(model, next_logits, 1, len(prompt) + count)
    done = 0
    began = time.perf_counter()
    for n, choose in enumerate(draws):
        if n:
            yield f"---- {n + 1} of {len(draws)}\n"
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps half a character
        yield decoder.decode(b"".join(model.words[i] for i in prompt))
        tokens = [model.cfg.bos, *prompt]
        for _ in range(count):
            (logits_v,) = logits_of([([*tokens, model.cfg.bos], 1)])
            tokens.append(choose(logits_v))
            done += 1
            if tokens[-1] == model.cfg.bos:
                break
            yield decoder.decode(model.words[tokens[-1]])
        yield decoder.decode(b"", final=True) + "\n"
    yield f"({(time.perf_counter() - began) / done:.3g} s a token)\n"


def opening(model: Trained, loss: float | None) -> tuple[str, list[int]]:
    """(bits a byte of the validation text by the run's loss, beside gzip's and xz's; its first
    tokens). With an arithmetic coder, a loss of x nats is x / ln 2 bits."""
    cfg, words = model.cfg, model.words
    place = T.data_place(cfg.data)
    try:
        tokens = T.TokenStream(place, "val", cfg.bos).read(1, cfg.val_tokens)
    except T.UserError:
        return f"no validation text in {place}: a new one; to continue another: --prompt TEXT", []
    tokens = [i for i in tokens if i < len(words)]
    text = b"".join(words[i] for i in tokens)
    sizes = {"gzip": 8 * len(gzip.compress(text))}
    missing = ""
    try:
        import lzma  # some Pythons are built without it
    except ImportError:
        missing = ", xz not known (this Python has no lzma)"
    else:
        sizes["xz"] = 8 * len(lzma.compress(text, preset=9))
    if loss is not None:  # there is none before the first validation
        sizes = {"the model": loss * cfg.val_tokens / math.log(2)} | sizes
    each = ", ".join(f"{name} {size / len(text):.3f}" for name, size in sizes.items())
    heading = f"bits per byte of the validation text: {each}{missing}"
    return f"{heading}\na sample after the first words of that text:", tokens[:48]


def demonstrate(model: Trained, log: T.RunLog):
    """What train_gpt.py shows at the end of a run, and leaves there."""
    heading, prompt = opening(model, log.facts["val_loss"])
    draws = [functools.partial(draw, np.random.default_rng([model.cfg.seed, 0]))]
    pieces = samples(model, prompt, model.cfg.sample_tokens, draws)
    text = "".join([heading, "\n", *pieces]).removesuffix("\n")
    log.write("sample.txt", text)
    log.say(text)
    if T.checkpoint_steps(log.folder / "checkpoints"):
        log.say(f"others: {T.command_for(__file__, log.folder, '--prompt', 'TEXT')}")


def questions(path: Path, bos: int, encode: Callable) -> list[tuple[list, int]]:
    """(a row for `reader` of each ending, number of the right one) of each line of a file."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            item = json.loads(line)
            begin = [bos, *encode(item["ctx"])]
            endings = [encode(" " + ending) for ending in item["endings"]]
            label = range(len(endings)).index(int(str(item["label"])))
            T.need(isinstance(item["endings"], list), "endings are a list")
        except (ValueError, LookupError, TypeError, T.UserError) as error:
            form = '{"ctx": TEXT, "endings": [TEXT, ...], "label": NUMBER}'
            raise T.UserError(f"{path}, line {number} is not {form} ({error!r})") from None
        found.append(([(begin + ending, len(ending)) for ending in endings], label))
    T.need(found, f"{path} has no questions")
    return found


def score(model: Trained, asked: list[tuple[list, int]], say: Callable) -> str:
    """How often the right ending has the least loss: summed (acc), and per token (acc_norm)."""
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
    acc, norm = (f"{x:.4f} ± {math.sqrt(x * (1 - x) / n):.4f}" for x in right / n)
    return f"{n:,} questions: acc {acc} (summed loss), acc_norm {norm} (loss per token)"


def speaks(stream) -> bool:
    """Whether stdin is a pipe or a file, which has the prompt; a line says if that comes late."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
        if stat.S_ISFIFO(mode) and not select.select([stream], [], [], 2)[0]:
            T.tell("waiting for a prompt on stdin; for none add < /dev/null", sys.stderr)
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    except (AttributeError, OSError, ValueError):  # it is closed, or a notebook's
        return False


def given_prompt(args) -> str | None:
    """The text of the command line, a file or stdin; None: there is none."""
    if args.file:
        with opened(Path(args.file)) as file:
            text = decoded(file, args.file)
    elif args.prompt == "-" or (args.prompt is None and speaks(sys.stdin)):
        text = decoded(io.BytesIO(sys.stdin.buffer.read()), "stdin")
    else:
        return args.prompt
    return text.removesuffix("\n") or None


def chosen(run_dir: Path, say: Callable) -> T.Saved:
    """The checkpoint of a run: the one that had the lowest validation loss, if it was kept and is
    not the last; or the newest."""
    best = run_dir / T.BEST
    if not T.checkpoint_steps(best):
        return T.find_checkpoint(run_dir, say)
    saved = T.find_checkpoint(best, say)
    lowest = f"the model of step {saved.step}, whose validation loss was the run's lowest"
    say(f"{lowest} ({saved.meta['val_loss']:.4f}); for the last one name {run_dir}/checkpoints")
    return saved


def main(argv=None):
    parser = T.Parser(prog="sample.py", description=(__doc__ or "").split("\n")[0])
    option = parser.add_argument
    option("run_dir", metavar="RUN_DIR", help="as train_gpt.py left it")
    what = parser.add_mutually_exclusive_group().add_argument
    what("--prompt", metavar="TEXT", help="the text to continue; - or a pipe: stdin")
    what("--file", metavar="FILE", help="that holds the text to continue")
    what("--score", metavar="FILE.jsonl", help="questions in HellaSwag's form, to be answered")
    option("--tokens", type=int, metavar="N", help="so many, or to the end of the document")
    option("--temperature", type=float, default=0.7, metavar="X", help="0: the likeliest token")
    option("--top-k", type=int, metavar="K", help="of the K likeliest tokens only")
    option("--samples", type=int, default=1, metavar="S", help="so many texts")
    option("--seed", type=int, metavar="N", help="another one, another text; default: the run's")
    args = parser.parse_args(argv)
    T.need(0 <= args.temperature < math.inf, "--temperature is a number from 0 on")
    for name, least in {"tokens": 1, "top_k": 1, "samples": 1, "seed": 0}.items():
        given = getattr(args, name)
        T.need(given is None or given >= least, f"--{name.replace('_', '-')} is at least {least}")
    saved = chosen(Path(args.run_dir).expanduser(), lambda line: T.tell(line, sys.stderr))
    encode = text_encoding(saved.cfg.encoding, merges_folder(saved)).encode_ordinary
    if args.score:
        asked = questions(Path(args.score), saved.cfg.bos, encode)
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
    try:
        for piece in samples(model, prompt, args.tokens or model.cfg.sample_tokens or 64, draws):
            print(piece, end="", flush=True)
    except BrokenPipeError:  # `| head` has read enough; what is left would fail at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(T.report_errors(main))
