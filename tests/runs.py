"""A writer of runs in the trainer's format, without the trainer: quick, and any content."""

import json
import zlib
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

RULE = "=" * 100
SOURCE = "import sys\n\nprint('a trainer')\n"
HOST = {"cpu": "A CPU", "cores": 2, "platform": "Linux"}
CHOICES = {"kernels": "plain: this is a CPU", "compiler_options": {}}
SETTINGS = {"grads0": {"micro_tokens": 512, "recompute": False}}  # that memory forced


def shard(content: str, size: int) -> dict:
    return {"bytes": size, "sha256": sha256(content.encode()).hexdigest()}


BUILTIN = {
    "builtin_train_000001.bin": shard("words", 4_000_000),
    "builtin_val_000000.bin": shard("other words", 300_000),
}
FINEWEB = {
    f"fineweb_{split}.bin": shard(split, 200_001_024) for split in ("val_000000", "train_000001")
}
BUILTIN_NAME = "builtin-" + BUILTIN["builtin_val_000000.bin"]["sha256"][:8]


def write_run(
    folder: Path,
    seed: int,
    config: dict,
    loss=3.9,
    seconds=10.0,
    data=BUILTIN,
    source=SOURCE,
    devices=None,
    curve_seed=None,
    day=1,
    **changes,
) -> Path:
    """A run as train_gpt.py leaves it, but for checkpoints; `changes` of run.json."""
    steps, stages, period = config["steps"], config["stages"], config["val_every"]
    ends = accumulate(stage["share"] for stage in stages)
    ends = [0, *(round(end * (steps - config["extension"])) for end in ends)][:-1] + [steps]
    spans = zip(stages, pairwise(ends), strict=True)
    sizes = [stage["batch_tokens"] for stage, (a, b) in spans for _ in range(b - a)]
    rng = np.random.default_rng(seed if curve_seed is None else curve_seed)
    run_id = f"202601{day:02}-{seed:02}0000-{config['preset']}-s{seed}-{rng.bytes(3).hex()}"
    run_dir = folder / run_id
    run_dir.mkdir(parents=True)
    metrics, lines, tokens = [], [], 0
    uneven = np.random.default_rng(zlib.crc32(str(run_dir).encode())).uniform(-0.4, 0.4, steps + 1)
    uneven[[0, steps]] = 0  # ms: no two runs take the same times
    for step in range(steps + 1):
        ms = round(seconds * 1000 * step / steps + uneven[step], 3)
        line = f"step:{step}/{steps} {{}}train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        common = {"train_time_ms": ms, "tokens": tokens, "dropped_ngrams": int(step == 1)}
        if step:
            tokens = common["tokens"] = tokens + sizes[step - 1]
            lines.append(line.format(""))
            guess = round(loss + 3 / step + rng.normal() / 100, 6)
            norms = {"grad_norm": 1.5} | ({} if step % 2 else {"grad_norm_adam": 0.25})
            norms |= {} if step % 4 else {"grad_norm_event": 0.125}
            metrics.append({"step": step, "train_loss": guess, **common, "lr": 1.0, **norms})
        if step == steps or (period and step % period == 0):
            now = round(loss if step == steps else loss + 3 / (step + 1), 6)
            lines.append(line.format(f"val_loss:{now:.4f} "))
            metrics.append({"step": step, "val_loss": now, **common})
    facts = {
        "run_id": run_id,
        "preset": config["preset"],
        "config": config | {"seed": seed},
        "seed": seed,
        "command": f"python train_gpt.py {config['preset']} --seed {seed} --out /mine",
        "source_sha256": sha256(source.encode()).hexdigest(),
        "versions": {"python": "3.11.9", "jax": "0.10.2", "jaxlib": "0.10.2"},
        "devices": devices or {"kind": "cpu", "count": 1, "platform": "cpu", "processes": 1},
        "host": HOST,
        "environment": {"JAX_PLATFORMS": "cpu"},
        "choices": CHOICES,
        "data": data,
        "compile_seconds": {"grads0": 1.2},
        "settings": {},
        "steps": steps,
        "tokens": tokens,
        "train_time_ms": metrics[-1]["train_time_ms"],
        "val_loss": metrics[-1]["val_loss"],
        "dropped_ngrams": 1,
        "target": config["target"],
        "resumed": False,
        "finished": True,
    } | changes
    lines.append(f"checkpoint:{steps} held the loop for 5.1ms, 38.8 MB written in 0.17s")
    lines += ["n-grams that found no room: 1", "peak memory allocated: 1 MiB"]
    log = f"{source}\n{RULE}\n{head(facts)}\nconfig: {json.dumps(facts['config'])}\n{RULE}\n"
    (run_dir / "log.txt").write_text(log + "\n".join(lines) + "\n")
    write_metrics(run_dir, metrics)
    write_json(run_dir / "run.json", facts)
    return run_dir


def write_json(path: Path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def head(facts: dict) -> str:
    devices = facts["devices"]
    about = "\n".join(f"{k} {v}" for k, v in facts["versions"].items())
    about += f"\n{devices['count']} x {devices['kind']} ({devices['platform']})"
    about += f"\n{facts['host']['platform']}"
    about += f"\ncommand: {facts['command']}"
    for name in ("host", "environment", "choices", "data"):
        about += f"\n{name}: {json.dumps(facts[name])}"
    return about


def write_metrics(run_dir: Path, rows: list[dict]):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
