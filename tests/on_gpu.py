"""Everything that only an NVIDIA GPU can show, in one command:

    python tests/on_gpu.py OUT [--data DIR] [PART...]

PART is any of check, tiles, bench, train, profile; default: all, in this order. Each takes up to
about ten minutes, most of it to compile. OUT gets logs.txt, the raw figures (bench-*.json) and
summary.txt, which is also printed. DIR holds GPT-2 tokens, some 20 million for training and 2.1
million for validation; without it `train` and `profile` are left out.

    check    tests/test_gpu.py: attention, training against the CPU, FP8, memory, resume
    tiles    tests/tile_times.py: the attention kernels by themselves, with other tiles
    bench    --bench 8: the record's stages at one eighth of the batch, for the settings in BENCHES
    train    the record's recipe, halved batches, 104 steps; a small one on GPU and CPU, compared
    profile  which kernels of the largest stage take how long
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHES = {  # name -> settings; the first is what a run takes
    "default": "",
    "fp8-both": "fp8=both",
    "fp8-head": "fp8=head",
    "cudnn": "attention=cudnn",
    "chunks-of-16384": "loss_chunk=16384",
    "recompute": "recompute=layers",
}
SHORT = (
    "devices=1 steps=104 extension=4 momentum_cooldown=4 val_tokens=2097152 val_every=0 "
    "stages.0.batch_tokens=65536 stages.1.batch_tokens=131072 stages.2.batch_tokens=196608 "
    "stages.3.batch_tokens=196608"
)
# Small enough for a CPU: a third of the width, a hundredth of the tokens.
SMALL = (
    "layers=6 width=256 heads=2 mlp_width=1024 long_layers=(1,5) paired_layers=(0,3) steps=60 "
    "value_layers=(1,4,5) skip=(1,2) backout=4 bigram_rows=50304 extension=1 momentum_cooldown=4 "
    "val_tokens=65536 val_batch=65536 val_row=8192 val_every=0 devices=1 "
    + " ".join(
        f"stages.{i}.batch_tokens={4 * row} stages.{i}.row_tokens={row} "
        f"stages.{i}.windows=(128,384)"
        for i, row in enumerate((512, 1024, 1024, 1024))
    )
)


class Report:
    """Runs commands with a limit of time, and keeps what they say."""

    def __init__(self, out: Path, work: Path):
        self.out, self.work, self.lines = out, work, []  # `work` is thrown away at the end

    def say(self, line: str = ""):
        print(line, flush=True)
        self.lines.append(line)
        (self.out / "summary.txt").write_text("\n".join(self.lines) + "\n")

    def run(self, name: str, words, seconds: float, part=False, platform="cuda") -> bool:
        """Run a python command into OUT/logs.txt; whether it ended well (a `part` also counts).

        On this platform or not at all: jax would fall back on the CPU.
        """
        began, log = time.monotonic(), self.work / f"{name}.log"
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.work / "cache"), "JAX_PLATFORMS": platform}
        with open(log, "w") as file:
            try:
                status = subprocess.run(
                    [sys.executable, *map(str, words)],
                    **{"cwd": ROOT, "stdout": file, "stderr": subprocess.STDOUT},
                    env=os.environ | cache,
                    timeout=seconds,
                ).returncode
            except subprocess.TimeoutExpired:
                status = 0 if part else f"over {seconds:.0f} s"
        took, text = time.monotonic() - began, log.read_text(errors="replace")
        with open(self.out / "logs.txt", "a") as file:
            file.write(f"===== {name}: {' '.join(map(str, words))}\n{text}\n")
        self.say(f"[{name}] {'done' if status == 0 else f'FAILED ({status})'} in {took:.0f} s")
        for line in text.splitlines()[-12:] if status != 0 else ():
            self.say(f"    {line[:160]}")
        for checkpoints in self.work.glob("*/*/checkpoints"):
            shutil.rmtree(checkpoints)
        return status == 0


def trainer(report: Report, name: str, *words) -> list:
    """The command line of train_gpt.py for a run into work/NAME."""
    return ["train_gpt.py", "speedrun", "--out", report.work / name, *words]


def check(report: Report):
    """The tests that need a GPU."""
    words = ["-m", "pytest", "-q", "--gpu", "-rf", "--durations=8", "tests/test_gpu.py"]
    report.run("check", words, 540)
    report.say((report.work / "check.log").read_text(errors="replace").splitlines()[-1])


def tiles(report: Report):
    """The attention kernels by themselves."""
    report.run("tiles", ["tests/tile_times.py"], 240)
    for line in (report.work / "tiles.log").read_text(errors="replace").splitlines():
        report.say(f"  {line}")


def bench(report: Report, data: Path | None):
    """Every stage with every setting; the ratio to the first setting in the same call."""
    first, source = {}, ["--data", data] if data else []
    for name, settings in BENCHES.items():
        dump, options = report.work / name, ["--set", "devices=1", *settings.split()]
        words = trainer(report, name, "--bench", "8", "--dump", dump, *source, *options)
        if not report.run(f"bench-{name}", words, 300):
            continue
        shutil.copy(dump / "bench.json", report.out / f"bench-{name}.json")
        for row in json.loads((dump / "bench.json").read_text())["rows"]:
            ratio = row["ms"] / first.setdefault((row["name"], row["tokens"]), row["ms"])
            report.say(
                f"  {name:16} {row['name']:34} {row['tokens']:7} {row['ms']:8.2f} ms "
                f"{row['tokens_per_second']:9,.0f} tok/s {row['utilization'] or 0:6.1%} "
                f"{row['memory_mib']:8,.0f} MiB  x{ratio:.3f}"
            )


def curve(folder: Path) -> list[float]:
    """Training losses of the run in `folder`; none if it wrote none."""
    found = [path.read_text().splitlines() for path in folder.glob("*/metrics.jsonl")]
    rows = map(json.loads, found[0] if found else ())
    return [row["train_loss"] for row in rows if "train_loss" in row]


def train(report: Report, data: Path):
    """Real tokens: the record's recipe on the GPU; a small model on the GPU and on the CPU."""
    words = trainer(report, "train", "--data", data, "--set", *SHORT.split())
    report.run("train", words, 400)
    said = (report.work / "train.log").read_text(errors="replace").splitlines()
    losses = curve(report.work / "train")
    report.say("  loss of every eighth step: " + " ".join(f"{x:.3f}" for x in losses[::8]))
    for line in said:
        if line.startswith(("attention", "grads", "target")):
            report.say(f"  {line}")
    found = {}
    for kind, dtype in {"cuda": "bfloat16", "cpu": "float32"}.items():
        name, options = f"small-{kind}", [*SMALL.split(), f"compute_dtype={dtype}"]
        words = trainer(report, name, "--data", data, "--set", *options)
        report.run(name, words, 150, part=kind == "cpu", platform=kind)
        found[kind] = curve(report.work / name)
    pairs = list(zip(*found.values(), strict=False))
    if not pairs:
        report.say("  nothing to compare: a small run wrote no step")
        return
    (first, _), (last, _), apart = pairs[0], pairs[-1], max(abs(a - b) for a, b in pairs)
    report.say(
        f"  {len(pairs)} steps, from {first:.3f} to {last:.3f} on the GPU in bfloat16, at most "
        f"{apart:.4f} from the CPU in float32"
    )


def profile(report: Report, data: Path):
    """A trace of four steps of the largest stage: the kernels that take longest."""
    largest = "steps=30 extension=1 momentum_cooldown=4 val_tokens=2097152 val_every=0 devices=1"
    largest += "".join(
        f" stages.{i}.batch_tokens=49152 stages.{i}.row_tokens=49152 stages.{i}.windows=(640,1408) "
        f"stages.{i}.weights=(1.0,) stages.{i}.weights_end=(1.0,) stages.{i}.doc_cap=2048"
        for i in range(4)
    )
    words = trainer(report, "profile", "--data", data, "--profile", "--set", *largest.split())
    if not report.run("profile", words, 300):
        return
    from jax.profiler import ProfileData

    times, counts = Counter(), Counter()
    for trace in (report.work / "profile").glob("*/profile/**/*.xplane.pb"):
        for plane in ProfileData.from_file(str(trace)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Stream" in line.name else ():
                    times[event.name] += event.duration_ns / 1e6
                    counts[event.name] += 1
    total = sum(times.values())
    report.say(f"  {total:.1f} ms of kernels in the traced steps")
    for name, ms in times.most_common(40):
        report.say(f"  {ms:8.2f} ms {ms / total:6.1%} {counts[name]:5} x {name[:90]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--data", type=Path)
    args = parser.parse_args()
    parts = {"check": check, "tiles": tiles, "bench": bench, "train": train, "profile": profile}
    if unknown := [part for part in args.parts if part not in parts]:
        parser.error(f"unknown {unknown[0]}; there are: {', '.join(parts)}")
    out, data = args.out.resolve(), args.data and args.data.resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="on_gpu-") as work:
        report = Report(out, Path(work))
        for part in args.parts or parts:
            if part in ("train", "profile") and data is None:
                report.say(f"[{part}] left out: it needs --data")
            else:
                parts[part](report, *(() if part in ("check", "tiles") else (data,)))
    report.say(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
