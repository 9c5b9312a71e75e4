"""What is each idea worth? `tiny` without it, from several seeds, beside `tiny` with all.

    python records/ideas.py [--seeds N]    # trains what records/ideas.jsonl lacks, prints the table

A run takes half a minute on two cores, so six seeds of all take three hours: stop it when you like,
and go on. Losses are those of any machine; times compare on an idle one only (`--times` leaves
losses alone, and trains 100 steps of each, in turn).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

from train_gpt import IDEAS, Parser, need, report_errors

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "records/ideas.jsonl"
COLUMNS = "loss", "ms"  # at the end of a run, and of a step


def rows() -> list[dict]:
    """What is known: for each idea and seed a loss or the milliseconds of a step."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def train(idea: str, seed: int, *items: str) -> dict:
    """The run.json of `tiny` without an idea ("": with all)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "train_gpt.py", "tiny", "--seed", str(seed)]
        more = "sample_tokens=0", "checkpoint_end=never", "target=0", *items
        command += ["--out", folder, "--set", f"without={idea}", *more]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        need(done.returncode == 0, f"without={idea}: train_gpt.py failed, see above")
        (path,) = Path(folder).glob("*/run.json")
        return json.loads(path.read_text())


def table(known: list[dict]) -> str:
    """The ideas by what leaving them out costs, in Markdown."""
    means = {}
    for idea in ("", *IDEAS, "all"):
        each = {x: [row[x] for row in known if row["idea"] == idea and x in row] for x in COLUMNS}
        if len(each["loss"]) > 1:
            error = np.std(each["loss"], ddof=1) / len(each["loss"]) ** 0.5
            times = np.median(each["ms"]) if each["ms"] else np.nan
            means[idea] = np.mean(each["loss"]), error, len(each["loss"]), times
    need("" in means, "train two seeds at least")
    loss, error, _, ms = means[""]
    lines = ["| without | loss | more than with all | runs | ms a step |", "|---|---|---|---|---|"]
    for idea, (mean, own, n, time) in sorted(means.items(), key=lambda x: -x[1][0]):
        off = f"{mean - loss:+.4f} ± {np.hypot(own, error):.4f}" if idea else ""
        spent = f"{time:.1f} ({time / ms:.2f})" if np.isfinite(time) else ""
        lines.append(f"| {idea or '(nothing)'} | {mean:.4f} ± {own:.4f} | {off} | {n} | {spent} |")
    return "\n".join(lines)


def main(argv=None):
    parser = Parser(prog="ideas.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="seeds 0 to N-1 of each")
    parser.add_argument("--times", action="store_true", help="time the steps of each once more")
    args = parser.parse_args(argv)
    done = {(row["idea"], row["seed"]) for row in rows() if "loss" in row}
    wanted = [(idea, seed) for seed in range(args.seeds) for idea in ("", *IDEAS, "all")]
    with open(KEPT, "a") as file:
        for idea, seed in wanted:
            if (idea, seed) not in done:
                row = {"idea": idea, "seed": seed, "loss": train(idea, seed)["val_loss"]}
                print(json.dumps(row), file=file, flush=True)
        for idea in ("", *IDEAS, "all") if args.times else ():
            facts = train(idea, 0, "steps=100", "val_tokens=4096")
            row = {"idea": idea, "seed": 0, "ms": facts["train_time_ms"] / facts["steps"]}
            print(json.dumps(row), file=file, flush=True)
    print(table(rows()))


if __name__ == "__main__":
    sys.exit(report_errors(main))
