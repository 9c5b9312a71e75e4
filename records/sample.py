"""Continue a text from a run's newest checkpoint: python records/sample.py RUN_DIR [--prompt TEXT]

Without a prompt, as at the end of `tiny`, it continues the validation text, and says how well the
model compresses that. Every token computes its whole row again: there is no second form of it.
"""

import dataclasses
import gzip
import lzma
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

import jax
import jax.numpy as jnp
import numpy as np

import train_gpt as T
from data.shards import text_encoding


def sample(saved: T.Saved, prompt: str, count: int, temperature=0.7) -> str:
    """`prompt` and `count` tokens more, or as many as the document has."""
    cfg, mesh = T.make_mesh(dataclasses.replace(saved.cfg, devices=1))
    run_dir = saved.folder.parents[1]
    kernels, _ = T.pick_kernels(cfg, mesh.devices.flat[0])
    params = T.load_state(mesh, saved, ("params",))["params"]
    copies = T.start_copies(cfg, mesh)(params, np.uint32(cfg.seed))
    words = T.token_bytes(cfg, run_dir)
    hashed_v = T.vocabulary(cfg, words).hashed_v

    @jax.jit
    def next_token(copies, table, tokens_bt, hashed_bt, slots_bit, last, key):
        # The table is whole here: its rows are looked up in place of what a device would fetch.
        rows = T.look_up(cfg, copies | {"ngrams": table}, tokens_bt, slots_bit)
        rows["ngram"] = T.signed_sum(cfg, copies["signs"], rows["ngrams"], hashed_bt)
        segments_bt = T.segment_ids(tokens_bt, cfg.bos)
        hyper = T.hyper_at(cfg, max(saved.step - 1, 0))  # of the last step that was done
        x_btd = T.forward(T.Model(copies, cfg, kernels, cfg.val_windows, segments_bt, hyper), rows)
        z_v = jnp.matmul(copies["head"], x_btd[0, last], preferred_element_type=jnp.float32)
        real = jnp.arange(cfg.vocab) < cfg.real_tokens
        logits_v = jnp.where(real, T.cap_logits(z_v, cfg) / temperature, -jnp.inf)
        return jax.random.categorical(key, logits_v)

    tokens = [cfg.bos, *text_encoding(cfg.encoding, run_dir).encode_ordinary(prompt)]
    length = min(cfg.val_row, -(-(len(tokens) + count) // 128) * 128)  # kernels: multiples of 128
    for i in range(count):
        recent = tokens[-length:]
        row = np.array([recent + [cfg.bos] * (length - len(recent))], np.int32)
        hashed = hashed_v[row]
        ids = T.ngram_ids(hashed, cfg.ngram_rows)
        slots = T.table_rows(ids, cfg.ngram_rows).swapaxes(0, 1)
        args = row, hashed, slots, len(recent) - 1, jax.random.fold_in(jax.random.key(cfg.seed), i)
        tokens.append(int(next_token(copies, params["ngram_table"], *args)))
        if tokens[-1] == cfg.bos:
            break
    return b"".join(words[x] for x in tokens if x != cfg.bos).decode("utf-8", "replace")


def validation_text(saved: T.Saved) -> list[bytes]:
    """The bytes of the tokens that the run was validated on, but for those that begin documents."""
    words = T.token_bytes(saved.cfg, saved.folder.parents[1])
    val = T.TokenStream(T.data_place(saved.cfg.data), "val", saved.cfg.bos)
    return [words[i] for i in val.read(1, saved.cfg.val_tokens) if i < len(words)]


def compression(saved: T.Saved, text: bytes) -> str:
    """Bits a byte of this text by the run's loss, beside gzip's and xz's: with an arithmetic coder,
    a loss of x nats a token is x / ln 2 bits."""
    sizes = {"the model": saved.meta["val_loss"] * saved.cfg.val_tokens / math.log(2)}
    sizes |= {"gzip": 8 * len(gzip.compress(text)), "xz": 8 * len(lzma.compress(text, preset=9))}
    each = (f"{name} {size / len(text):.3f}" for name, size in sizes.items())
    return f"bits per byte of the validation text: {', '.join(each)}"


def main(argv=None):
    """Run the command line."""
    parser = T.Parser(prog="sample.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run_dir", metavar="RUN_DIR", help="as train_gpt.py left it")
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    args = parser.parse_args(argv)
    saved = T.find_checkpoint(Path(args.run_dir), lambda line: T.tell(line, sys.stderr))
    if (prompt := args.prompt) is None:
        pieces = validation_text(saved)
        T.tell(compression(saved, b"".join(pieces)))
        prompt = b"".join(pieces[:48]).decode("utf-8", "replace")
        T.tell("a sample after the first words of that text; others: sample.py RUN --prompt TEXT")
    T.tell(sample(saved, prompt, saved.cfg.sample_tokens or 64))


if __name__ == "__main__":
    sys.exit(T.report_errors(main))
