"""Measure the worth of each idea: train `tiny` without it, and `plain` with it as the only idea.

    python records/ideas.py --seeds N    # trains the runs that ideas.jsonl does not have

Prints all results as a table. A run takes half a minute on two cores. You can stop the command and
start it again. Losses are the same on any machine, except for the last digits. Times need an idle
machine: `--times` trains each variant and `tiny` for 100 steps.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of train_gpt.py

from train_gpt import IDEAS, PLAIN_HAS, PRESETS, Parser, override, report_errors, require

# isort: split

import numpy as np
from leaderboard import table
from scipy.stats import sem

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "records/ideas.jsonl"
TINY = PRESETS["tiny"]
CHANGED = {idea: override(TINY, [f"without={idea}"]) for idea in IDEAS}
HAS = [idea for idea, cfg in CHANGED.items() if cfg != replace(TINY, without=idea)]
WITHOUT = "", *HAS, "all"  # variants: `tiny` without this idea; "all" is `plain`
ALONE = ["+" + idea for idea in HAS if idea not in PLAIN_HAS]  # variants: `plain` with this idea
HEADS = "idea", "`tiny` loses without it", "`plain` gains by it alone", "its step, of `tiny`'s"


def rows() -> list[dict]:
    """Return the results: a loss, or milliseconds per step, for a variant and a seed."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def train(variant: str, seed: int, *items: str) -> dict:
    """Train a variant with the settings `items`; return its run.json."""
    others = [x for x in IDEAS if x not in PLAIN_HAS and "+" + x != variant]
    names = others if variant in ALONE else [variant]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "train_gpt.py", "tiny", "--seed", str(seed)]
        more = "sample_tokens=0", "checkpoint_end=never", "target=0", *items
        command += ["--out", folder, "--set", "without=" + ",".join(names), *more]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        require(done.returncode == 0, f"{variant}: train_gpt.py failed, see above")
        (path,) = Path(folder).glob("*/run.json")
        return json.loads(path.read_text())


def losses(known: list[dict]) -> dict[str, dict[int, float]]:
    """Return {variant: {seed: loss}}."""
    found = {variant: {} for variant in (*WITHOUT, *ALONE)}
    for row in known:
        if "loss" in row:
            found[row["idea"]][row["seed"]] = row["loss"]
    return found


def difference(more: dict[int, float], less: dict[int, float]) -> tuple[float, float]:
    """Return (mean difference over the common seeds, its standard error); NaN below two seeds."""
    apart = [more[seed] - less[seed] for seed in sorted(more.keys() & less.keys())]
    if len(apart) < 2:
        return np.nan, np.nan
    return float(np.mean(apart)), float(sem(apart))


def worth(known: list[dict]) -> dict[str, tuple]:
    """Return {idea: (loss of `tiny` without it, gain of `plain` with it)} as differences."""
    each = losses(known)
    alone = {idea: each.get("+" + idea, {}) for idea in HAS}
    found = {x: (difference(each[x], each[""]), difference(each["all"], alone[x])) for x in HAS}
    return dict(sorted(found.items(), key=lambda x: -np.nan_to_num(x[1][0][0], nan=-9)))


def report(known: list[dict]) -> str:
    """Return the worth of the ideas as a Markdown table, and the losses of `tiny` and `plain`."""
    times = {row["idea"]: f"{row['ms'] / row['tiny_ms']:.2f}" for row in known if "ms" in row}
    rows = []
    for idea, apart in worth(known).items():
        cells = ["" if np.isnan(x) else f"{x:+.4f} ± {error:.4f}" for x, error in apart]
        cells = ["nothing" if cell == "+0.0000 ± 0.0000" else cell for cell in cells]
        rows.append(dict(zip(HEADS, (idea, *cells, times.get(idea, "")), strict=True)))
    lines = [table(rows)]
    for variant, name in (("", "`tiny`"), ("all", "`plain`")):
        if values := [*losses(known)[variant].values()]:
            spread = f", standard deviation {np.std(values, ddof=1):.4f}" if values[1:] else ""
            lines.append(f"{name}: mean loss {np.mean(values):.4f}, {len(values)} seeds{spread}.\n")
    lines.append(f"`tiny` does not have {', '.join(x for x in IDEAS if x not in HAS)}.")
    return "\n".join(lines)


def main(argv=None):
    """Parse the command line, train the missing runs, print all results."""
    parser = Parser(prog="ideas.py", description=(__doc__ or "").split("\n")[0])
    number = {"type": int, "default": 0, "metavar": "N"}
    parser.add_argument("--seeds", **number, help="train `tiny` without each idea, seeds 0 to N-1")
    parser.add_argument("--alone", **number, help="train `plain` with each idea, seeds 0 to N-1")
    parser.add_argument("--times", action="store_true", help="time the steps of each variant")
    args = parser.parse_args(argv)
    done = {(row["idea"], row["seed"]) for row in rows() if "loss" in row}
    wanted = [(variant, seed) for seed in range(args.seeds) for variant in WITHOUT]
    wanted += [(variant, seed) for seed in range(args.alone) for variant in ALONE]
    with open(KEPT, "a") as file:
        for variant, seed in wanted:
            if (variant, seed) not in done:
                row = {"idea": variant, "seed": seed, "loss": train(variant, seed)["val_loss"]}
                print(json.dumps(row), file=file, flush=True)
        for variant in WITHOUT[1:] if args.times else ():  # with `tiny` each: machine speed varies
            both = [train(x, 0, "steps=100", "val_tokens=4096") for x in ("", variant)]
            tiny, own = (facts["train_time_ms"] / facts["steps"] for facts in both)
            row = {"idea": variant, "seed": 0, "ms": own, "tiny_ms": tiny}
            print(json.dumps(row), file=file, flush=True)
    print(report(rows()))


if __name__ == "__main__":
    sys.exit(report_errors(main))
