"""nanoGPT's CPU example and `tiny` on the same text and the same cores, one after the other.

    git clone https://github.com/karpathy/nanoGPT    # MIT; needs torch, in a Python of its own
    python records/beside_nanogpt.py nanoGPT TEXT.txt [--python PYTHON]

nanoGPT trains as its README says for CPUs; ours is 96 wide, enough for bytes. Both are validated on
the whole last tenth of the text (ASCII), in blocks of 64 characters, each without what stands
before it. Ours starts with nothing kept: tokens and compilation count. Neither writes a sample.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

from train_gpt import Parser, need, report_errors

ROOT = Path(__file__).resolve().parents[1]
STEPS = 450  # of ours; each reads 1,024 bytes, of nine tenths of the text
NANO = """train.py config/train_shakespeare_char.py --compile=False --eval_iters=20
--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 --device=cpu --out_dir=out-beside""".split()
VALIDATE = """
import numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load("out-beside/ckpt.pt", map_location="cpu")
model = GPT(GPTConfig(**saved["model_args"]))
model.load_state_dict(saved["model"])
ids = torch.from_numpy(np.fromfile("data/shakespeare_char/val.bin", np.uint16).astype(np.int64))
rows = (len(ids) - 1) // 64
inputs, targets = (ids[i : i + 64 * rows].reshape(rows, 64) for i in (0, 1))
with torch.no_grad():
    losses = [model(x, y)[1] * len(x) for x, y in zip(inputs.split(64), targets.split(64))]
print(float(sum(losses)) / rows)
"""


def run(command: list, folder: Path) -> tuple[str, float]:
    """(what a command prints, its seconds); UserError if it fails."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    need(done.returncode == 0, f"{Path(command[0]).name} {command[1]} failed: see above")
    return done.stdout, time.perf_counter() - start


def train_nanogpt(folder: Path, text: str, python: str) -> tuple[float, float, float]:
    """(loss, seconds of training, seconds in all). An iteration that evaluates counts as others."""
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(text)
    _, prepared = run([python, "prepare.py"], data)
    said, seconds = run([python, *NANO], folder)
    times = [float(ms) for ms in re.findall(r"iter \d+: .*time ([\d.]+)ms", said)]
    loss, _ = run([python, "-c", VALIDATE], folder)
    trained = len(times) * sorted(times)[len(times) // 2] / 1000
    return float(loss.split()[-1]), trained, prepared + seconds


def train_ours(folder: Path, text: str) -> tuple[float, float, float]:
    """The same of `tiny`, on the bytes of the text; its last tenth is for validation there, too."""
    (folder / "text.txt").write_text(text)
    count = len(text) // 10 // 512 * 512
    options = f"width=96 steps={STEPS} sample_tokens=0 val_row=64 val_batch=512 val_tokens={count}"
    command = [sys.executable, ROOT / "train_gpt.py", "tiny", "text.txt", "--cache", "off"]
    _, seconds = run([*command, "--out", "logs", "--set", *options.split()], folder)
    (facts,) = (json.loads(path.read_text()) for path in folder.glob("logs/*/run.json"))
    return facts["val_loss"], facts["train_time_ms"] / 1000, seconds


def main(argv=None):
    parser = Parser(prog="beside_nanogpt.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("nanogpt", type=Path, metavar="FOLDER", help="a clone of nanoGPT")
    parser.add_argument("text", type=Path, metavar="TEXT.txt")
    parser.add_argument("--python", default=sys.executable, help="one with torch, for nanoGPT")
    args = parser.parse_args(argv)
    place = args.nanogpt / "data/shakespeare_char"
    need(place.is_dir(), f"no {place}: name a clone of github.com/karpathy/nanoGPT")
    text = args.text.read_text("ascii", "surrogateescape")
    need(text.isascii(), f"{args.text}: not ASCII")
    need(len(text) >= 1200 * STEPS, f"{args.text}: less than {1200 * STEPS:,} characters")
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        rows = {"ours": train_ours(Path(folder), text)}
    rows["nanoGPT"] = train_nanogpt(args.nanogpt.resolve(), text, args.python)
    print("| | nats a character | bits | training | in all |\n|---|---|---|---|---|")
    for name, (loss, trained, seconds) in rows.items():
        row = f"{name} | {loss:.4f} | {loss / math.log(2):.3f} | {trained:.1f} s | {seconds:.1f} s"
        print(f"| {row} |")


if __name__ == "__main__":
    sys.exit(report_errors(main))
