"""Everything that only an NVIDIA GPU can show, in one command:

    python tests/kernels/on_gpu.py OUT [--data DIR] [PART...]
    python tests/kernels/on_gpu.py OUT --small [PART...]     # a toy on a CPU: the script runs

PART is any of check, tiles, bench, train, profile; default: all, in this order. Each takes up to
about ten minutes, most of it to compile. OUT gets logs.txt, the raw figures (bench-*.json) and
summary.txt, which is also printed. DIR holds GPT-2 tokens, some 20 million for training and 2.1
million for validation; without it `train` and `profile` are left out. Exit status 1 if any command
failed. The record's table of n-grams, 65 GB, is that of one of eight devices everywhere.

    check    test_gpu.py: attention of all widths, whole layers with XSA and gates, the loss over
             the vocabulary and over candidates, gradients of tables, the exchange of n-grams,
             training, all against float32 on the CPU; memory, resume
    tiles    tile_times.py: the attention kernels by themselves, with other tiles
    bench    records/bench.py: the record's stages for the settings in BENCHES, in milliseconds
    train    the record's recipe, halved batches, 104 steps; a wide `tiny` on GPU and CPU, compared
    profile  which kernels of the largest stage take how long

The figure to beat: the original's record 92 takes 33.4 ms a step on average on eight H100s, 39.9 s
for its 1194 steps.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt as T

ROOT = Path(T.__file__).resolve().parent
# name -> (devices that would share each batch, settings); the first is what a run takes. With a
# quarter of the batch, two rows, there is a choice of how many rows to take at a time.
BENCHES = {
    "default": (8, ""),
    "plain": (8, "kernels=plain"),
    "recompute": (8, "recompute=1"),
    "chunks-of-16384": (8, "loss_chunk=16384"),
    "quarter": (4, ""),
    "quarter-at-once": (4, "micro_tokens=98304"),
}
TABLE = "ngram_rows=5287680 "  # an eighth
ENDS = "devices=1 val_every=0 checkpoint_end=never "
SHORT = (
    f"{ENDS}{TABLE}steps=104 extension=4 momentum_cooldown=4 val_tokens=2097152 event_change=28 "
    "rails_step=44 tail=26 tail_average=22 stages.0.batch_tokens=65536 "
    "stages.1.batch_tokens=131072 stages.2.batch_tokens=196608 stages.3.batch_tokens=163840 "
    "stages.4.batch_tokens=65536"
)
# `tiny` with heads and rows that kernels take; small enough for a CPU.
NARROW = (
    f"{ENDS}width=256 heads=2 mlp_width=1024 compute_dtype=bfloat16 steps=60 extension=1 "
    "momentum_cooldown=4 event_change=16 rails_step=26 tail=15 tail_average=12 sample_tokens=0 "
    "stages.3.row_tokens=384 stages.3.batch_tokens=3072"
)
LARGEST = (
    f"{ENDS}{TABLE}steps=30 extension=1 momentum_cooldown=4 val_tokens=2097152 event_change=8 "
    + " ".join(
        f"stages.{i}.batch_tokens=49152 stages.{i}.row_tokens=49152 stages.{i}.windows=(640,1408) "
        f"stages.{i}.weights=(1.0,) stages.{i}.weights_end=(1.0,) stages.{i}.prefix=(0.0,) "
        f"stages.{i}.candidates=(14336,) stages.{i}.doc_cap=3072"
        for i in range(5)
    )
)
TINY = (  # of --small
    f"{ENDS}steps=26 momentum_warmup=4 momentum_cooldown=2 event_change=8 rails_step=11 tail=10 "
    "tail_average=8 val_tokens=4096 sample_tokens=0"
)


class Report:
    """Runs commands with a limit of time, and keeps what they say."""

    def __init__(self, out: Path, work: Path, small: bool):
        self.out, self.work, self.small = out, work, small  # `work` is thrown away at the end
        self.platform, self.preset = ("cpu", "tiny") if small else ("cuda", "speedrun")
        self.lines, self.failed = [], []

    def say(self, line: str = ""):
        T.tell(line)
        self.lines.append(line)
        (self.out / "summary.txt").write_text("\n".join(self.lines) + "\n")

    def said(self, name: str) -> list[str]:
        """The lines that command `name` wrote."""
        return (self.work / f"{name}.log").read_text(errors="replace").splitlines()

    def run(self, name: str, words, seconds: float, part=False, platform=None) -> bool:
        """Run a python command into OUT/logs.txt; whether it ended well (a `part` also counts).

        On this platform or not at all: jax would fall back on the CPU.
        """
        began, platform = time.monotonic(), platform or self.platform
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.work / "cache"), "JAX_PLATFORMS": platform}
        with open(self.work / f"{name}.log", "w") as file:
            try:
                status = subprocess.run(
                    [sys.executable, *map(str, words)],
                    **{"cwd": ROOT, "stdout": file, "stderr": subprocess.STDOUT},
                    env=os.environ | cache,
                    timeout=seconds,
                ).returncode
            except subprocess.TimeoutExpired:
                status = 0 if part else f"over {seconds:.0f} s"
        took, lines = time.monotonic() - began, self.said(name)
        with open(self.out / "logs.txt", "a") as file:
            file.write("\n".join([f"===== {name}: {' '.join(map(str, words))}", *lines, ""]))
        self.say(f"[{name}] {'done' if status == 0 else f'FAILED ({status})'} in {took:.0f} s")
        if status != 0:
            self.failed.append(name)
            for line in lines[-12:]:
                self.say(f"    {line[:160]}")
        return status == 0

    def train(
        self, name: str, settings: str, data, seconds: float, *words, preset="", **limits
    ) -> bool:
        """Run train_gpt.py into work/NAME."""
        source = ["--data", data] if data else []
        words = ["train_gpt.py", preset or self.preset, "--out", self.work / name, *source, *words]
        return self.run(name, [*words, "--set", *settings.split()], seconds, **limits)

    def curve(self, name: str) -> list[float]:
        """Training losses of the run in work/NAME; none if it wrote none."""
        found = [path.read_text() for path in (self.work / name).glob("*/metrics.jsonl")]
        rows = [json.loads(line) for line in "".join(found).splitlines()]
        return [row["train_loss"] for row in rows if "train_loss" in row]


def check(report: Report, data):
    """The tests that need a GPU; on a CPU, those of the same kernels, interpreted."""
    words = ["--gpu", "tests/kernels/test_gpu.py"]
    if report.small:
        words = ["-k", "triton", "tests/kernels/test_attention.py"]
    report.run("check", ["-m", "pytest", "-q", "-rf", "--durations=8", *words], 540)
    report.say(f"  {report.said('check')[-1]}")


def tiles(report: Report, data):
    """The attention kernels by themselves."""
    report.run("tiles", ["tests/kernels/tile_times.py", *["--small"] * report.small], 360)
    for line in report.said("tiles"):
        report.say(f"  {line}")


def bench(report: Report, data):
    """Every stage with every setting; the ratio to the first setting that has as many parts."""
    first, source = {}, ["--data", data] if data else []
    for name, (parts, settings) in BENCHES.items():
        dump, options = report.work / name, ["--set", "devices=1", *settings.split()]
        words = ["records/bench.py", report.preset, "--parts", parts, "--dump", dump]
        if not report.run(f"bench-{name}", [*words, *source, *options], 300):
            continue
        shutil.copy(dump / "bench.json", report.out / f"bench-{name}.json")
        facts = json.loads((dump / "bench.json").read_text())
        cfg, total = T.config_from_json(facts["config"]), Counter()
        report.say(f"  {facts['choices']['kernels']}")
        for row in facts["rows"]:
            total[row["tokens"]] += row["ms"] * row["steps"]
            ratio = row["ms"] / first.setdefault((row["name"], row["tokens"], parts), row["ms"])
            report.say(
                f"  {name:16} 1/{parts} {row['name']:8} {row['tokens']:7} {row['ms']:8.2f} ms "
                f"{row['tokens_per_second']:9,.0f} tok/s {row['utilization'] or 0:6.1%} "
                f"{row['memory_mib']:8,.0f} MiB  x{ratio:.3f}"
            )
        for tokens, ms in total.items():
            report.say(f"  {name:16} 1/{parts} {tokens}: {ms / cfg.steps:.2f} ms a step on average")
    report.say(
        "  of which 1/8 is what each of eight devices does, but for the network, and with all of "
        "the update\n  but of n-grams, instead of an eighth; record 92 takes 33.4 ms on 8 x H100"
    )


def train(report: Report, data):
    """Real tokens: the record's recipe on the GPU; a small model on the GPU and on the CPU, with
    the built-in corpus."""
    report.train("train", TINY if report.small else SHORT, data, 400)
    losses = report.curve("train")
    report.say("  loss of every eighth step: " + " ".join(f"{x:.3f}" for x in losses[::8]))
    for line in report.said("train"):
        if line.startswith(("kernels", "compiled", "target")):
            report.say(f"  {line}")
    if report.small:
        runs = {"auto": (TINY, "cpu"), "plain": (f"{TINY} kernels=plain", "cpu")}
    else:
        wide = f"{NARROW} compute_dtype=float32"
        runs = {"bfloat16-gpu": (NARROW, "cuda"), "float32-cpu": (wide, "cpu")}
    for name, (settings, platform) in runs.items():
        limits = {"part": name == "float32-cpu", "platform": platform}
        seconds = 400 if report.small else 240
        report.train(name, settings, None, seconds, preset="tiny", **limits)
    pairs = list(zip(*(report.curve(name) for name in runs), strict=False))
    if not pairs:
        report.failed.append("train")
        report.say("  nothing to compare: a small run wrote no step")
        return
    (first, _), (last, _), apart = pairs[0], pairs[-1], max(abs(a - b) for a, b in pairs)
    one, other = runs
    report.say(
        f"  {len(pairs)} steps, from {first:.3f} to {last:.3f} with {one}, at most {apart:.4f} "
        f"from {other}"
    )


def profile(report: Report, data):
    """A trace of some steps of the largest stage: the kernels that take longest."""
    settings = TINY if report.small else LARGEST
    if not report.train("profile", settings, data, 300, "--profile"):
        return
    from jax.profiler import ProfileData

    device, line_of = ("CPU", "") if report.small else ("GPU", "Stream")
    times, counts = Counter(), Counter()
    for trace in (report.work / "profile").glob("*/profile/**/*.xplane.pb"):
        for plane in ProfileData.from_file(str(trace)).planes:
            for line in plane.lines if device in plane.name else ():
                for event in line.events if line_of in line.name else ():
                    times[event.name] += event.duration_ns / 1e6
                    counts[event.name] += 1
    total = sum(times.values())
    report.say(f"  {total:.1f} ms of kernels in the traced steps")
    for name, ms in times.most_common(40):
        report.say(f"  {ms:8.2f} ms {ms / total:6.1%} {counts[name]:5} x {name[:90]}")


PROBE = "import sys, train_gpt as T; sys.exit(T.report_errors(lambda: T.all_devices() and 0))"
PARTS = {"check": check, "tiles": tiles, "bench": bench, "train": train, "profile": profile}


def parse_args(argv):
    """The command line as a namespace; UserError for what cannot be done here."""
    parser = T.Parser(prog="on_gpu.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", metavar="OUT", help="a folder for what it finds")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--data", metavar="DIR", help="a folder of GPT-2 tokens")
    parser.add_argument("--small", action="store_true", help="the preset `tiny`, on a CPU")
    args = parser.parse_intermixed_args(argv)
    if "" in (args.out, args.data):
        raise T.UserError("OUT or --data is empty: name a folder")
    if unknown := [part for part in args.parts if part not in PARTS]:
        raise T.UserError(f"unknown PART {unknown[0]!r}; there are: {', '.join(PARTS)}")
    if args.small and args.data:
        raise T.UserError("--small takes the built-in corpus: drop --data")
    if args.data and not Path(args.data).is_dir():
        raise T.UserError(f"--data {args.data}: no such folder")
    if not args.small:  # in a process of its own: this one must take no memory of the GPU
        cuda = os.environ | {"JAX_PLATFORMS": "cuda"}
        words = [sys.executable, "-c", PROBE]
        done = subprocess.run(words, cwd=ROOT, env=cuda, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise T.UserError(f"no NVIDIA GPU here, and no --small: {reason}")
    return args


def measure(argv) -> int:
    """Do what the command line says; 1 if any command failed."""
    args = parse_args(argv)
    out, data = Path(args.out).resolve(), args.data and Path(args.data).resolve()
    T.make_folder(out, "OUT")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="on_gpu-") as work:
        report = Report(out, Path(work), args.small)
        for part in args.parts or PARTS:
            if part in ("train", "profile") and not (data or args.small):
                report.say(f"[{part}] left out: it needs --data")
            else:
                PARTS[part](report, data)
    report.say(f"{time.monotonic() - began:.0f} s in all")
    if report.failed:
        report.say(f"FAILED: {', '.join(report.failed)}")
    return int(bool(report.failed))


def main(argv=None) -> int:
    """Run the command line; returns the exit status."""
    return T.report_errors(lambda: measure(argv))


if __name__ == "__main__":
    sys.exit(main())
