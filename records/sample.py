"""Continue a text from a run's newest checkpoint.

    python records/sample.py RUN_DIR --prompt TEXT

Runs of the preset `tiny` end with what `demonstrate` says here: how well the model compresses its
validation text, and a sample of what it writes.
"""

import dataclasses
import gzip
import lzma
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))  # where shards.py is

import jax
import jax.numpy as jnp
import numpy as np
from shards import decode, text_encoding

import train_gpt as T


def sample(cfg: T.Config, saved: T.Saved, prompt: str, count: int = 0, temperature=0.7) -> str:
    """Continue `prompt` by `count` (default cfg.sample_tokens or 64) tokens from a checkpoint.

    The whole row is computed again for each token: a few seconds at the size of a demonstration,
    and no second implementation of the model that could disagree with the first. It ends early
    where the document ends.
    """
    cfg, run_dir = dataclasses.replace(cfg, devices=1), saved.folder.parents[1]
    cfg, mesh = T.make_mesh(cfg)
    now = max(saved.step - 1, 0)  # the schedule's step
    kernels, _ = T.pick_kernels(cfg, mesh.devices.flat[0], mesh.size)
    params = T.load_state(mesh, saved, ("params",))["params"]
    copies = T.start_copies(cfg, mesh)(params, np.uint32(saved.cfg.seed))
    known = T.vocabulary(cfg, T.token_bytes(cfg, run_dir))

    @jax.jit
    def next_token(copies, table, tokens_bt, hashed_bt, slots_bit, last, key):
        # The table is whole here: its rows are looked up in place of what a device would fetch.
        rows = T.look_up(cfg, copies | {"ngrams": table}, tokens_bt, slots_bit)
        rows["ngram"] = T.signed_sum(cfg, copies["signs"], rows["ngrams"], hashed_bt)
        segments_bt, hyper = T.segment_ids(tokens_bt, cfg.bos), T.hyper_at(cfg, now)
        model = T.Model(copies, cfg, kernels, cfg.val_windows, segments_bt, hyper)
        x_btd = T.forward(model, rows)
        z_v = jnp.matmul(copies["head"], x_btd[0, last], preferred_element_type=jnp.float32)
        logits_v = T.cap_logits(z_v, cfg)
        real = jnp.arange(cfg.vocab) < cfg.real_tokens
        return jax.random.categorical(key, jnp.where(real, logits_v / temperature, -jnp.inf))

    encoding = text_encoding(cfg.encoding, run_dir)
    tokens = [cfg.bos, *encoding.encode_ordinary(prompt)]
    start, count = len(tokens), count or cfg.sample_tokens or 64
    length = min(cfg.val_row, -(-(start + count) // 128) * 128)  # kernels want multiples of 128
    key = jax.random.key(cfg.seed)
    for i in range(count):
        recent = tokens[-length:]
        row = np.array([recent + [cfg.bos] * (length - len(recent))], np.int32)
        hashed = known.hashed_v[row]
        ids = T.ngram_ids(hashed, cfg.ngram_rows)
        places = T.table_rows(ids, cfg.ngram_rows).astype(np.int32).swapaxes(0, 1)
        args = row, hashed, places, len(recent) - 1, jax.random.fold_in(key, i)
        tokens.append(int(next_token(copies, params["ngram_table"], *args)))
        if tokens[-1] == cfg.bos:
            break
    return decode(encoding, [x for x in tokens[start:] if x != cfg.bos])


def demonstrate(cfg: T.Config, run_dir: Path, val: T.TokenStream, val_loss: float) -> str:
    """What the end of a demonstration run prints: compression, next to gzip's and xz's; a sample.

    A model that gives text a loss of x nats could, with an arithmetic coder, store it in x / ln 2
    bits. The comparison is on the very text that the validation used. No sample where the run has
    kept no checkpoint.
    """
    encoding, tokens = text_encoding(cfg.encoding, run_dir), val.read(1, cfg.val_tokens)
    text = decode(encoding, tokens[tokens != cfg.bos]).encode()
    ours = val_loss * cfg.val_tokens / math.log(2) / len(text)
    gz, xz = (
        8 * len(f(text)) / len(text) for f in (gzip.compress, lambda t: lzma.compress(t, preset=9))
    )
    prompt = decode(encoding, tokens[:48])
    line = f"bits per byte of the validation text: {ours:.3f}; gzip -9: {gz:.3f}; xz -9: {xz:.3f}"
    if not T.checkpoint_steps(run_dir / "checkpoints"):
        return line
    written = sample(cfg, T.find_checkpoint(run_dir), prompt)
    return f"{line}\na sample, from the bar on:\n{prompt}|{written}"


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""

    def run():
        parser = T.Parser(prog="sample.py", description=(__doc__ or "").split("\n")[0])
        parser.add_argument("run_dir", metavar="RUN_DIR", help="as train_gpt.py left it")
        parser.add_argument("--prompt", default="", metavar="TEXT", help="the text to continue")
        args = parser.parse_args(argv)
        if not args.run_dir:
            raise T.UserError("RUN_DIR is empty: name the folder of a run, such as logs/<run id>")
        saved = T.find_checkpoint(Path(args.run_dir), lambda line: T.tell(line, sys.stderr))
        T.tell(args.prompt + sample(saved.cfg, saved, args.prompt))

    return T.report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
