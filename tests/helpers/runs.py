"""Write runs with any content in the trainer's format, without training."""

import json
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

RULE = "=" * 100
SOURCE = "import sys\n\nprint('a trainer')\n"


def shard(content: str, size: int) -> dict:
    """Return the entry of a shard in run.json."""
    return {"bytes": size, "sha256": sha256(content.encode()).hexdigest()}


BUILTIN = {
    "builtin_train_000001.bin": shard("words", 4_000_000),
    "builtin_val_000000.bin": shard("other words", 300_000),
}
BUILTIN_NAME = "builtin-" + BUILTIN["builtin_val_000000.bin"]["sha256"][:8]
FINEWEB = {
    f"fineweb_{split}.bin": shard(split, 200_001_024) for split in ("train_000001", "val_000000")
}


def write_run(
    folder: Path, seed: int, config: dict, loss=3.9, seconds=10.0, source=SOURCE, day=1, **changes
) -> Path:
    """Write a finished run without checkpoints, with `changes` to run.json."""
    steps = config["steps"]
    stages = config["stages"]
    ends = accumulate(stage["share"] for stage in stages)
    ends = [0, *(round(end * (steps - config["extension"])) for end in ends)][:-1] + [steps]
    sizes = [s["batch_tokens"] for s, (a, b) in zip(stages, pairwise(ends), strict=True)
             for _ in range(b - a)]  # fmt: skip
    rng = np.random.default_rng(seed)
    run_id = f"202601{day:02}-{seed:02}0000-{config['preset']}-s{seed}-{rng.bytes(3).hex()}"
    lines = []
    metrics = []
    for step in range(steps + 1):
        ms = round(seconds * 1000 * step / steps, 3)
        line = f"step:{step}/{steps} {{}}train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        common = {"step": step, "train_time_ms": ms, "tokens": sum(sizes[:step])}
        if step > 0:
            lines.append(line.format(""))
            metrics.append(common | {"train_loss": round(loss + 3 / step + rng.normal() / 100, 6)})
        if step == steps or (config["val_every"] and step % config["val_every"] == 0):
            now = round(loss + 3 * (steps - step) / steps, 6)
            lines.append(line.format(f"val_loss:{now:.4f} "))
            metrics.append(common | {"val_loss": now})
    facts = {
        "run_id": run_id,
        "preset": config["preset"],
        "config": config | {"seed": seed},
        "seed": seed,
        "command": f"python train_gpt.py {config['preset']} --seed {seed} --out /mine",
        "source_sha256": sha256(source.encode()).hexdigest(),
        "versions": {"python": "3.11.9", "jax": "0.10.2", "jaxlib": "0.10.2"},
        "devices": {"kind": "cpu", "platform": "cpu", "count": 1, "processes": 1},
        "host": {"cpu": "A CPU", "cores": 2, "platform": "Linux"},
        "environment": {"JAX_PLATFORMS": "cpu"},
        "choices": {"kernels": "plain: this is a CPU", "compiler_options": {}},
        "parameters": 1_000_000,
        "data": BUILTIN,
        "steps": steps,
        "tokens": metrics[-1]["tokens"],
        "train_time_ms": metrics[-1]["train_time_ms"],
        "val_loss": metrics[-1]["val_loss"],
        "target": config["target"],
        "resumed": False,
        "finished": True,
    } | changes
    run_dir = folder / run_id
    run_dir.mkdir(parents=True)
    log = f"{source}\n{RULE}\n{head(facts)}\nconfig: {json.dumps(facts['config'])}\n{RULE}\n"
    lines += [f"checkpoint:{steps} held the loop for 5.1ms", "peak memory allocated: 1 MiB"]
    (run_dir / "log.txt").write_text(log + "\n".join(lines) + "\n")
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (run_dir / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    return run_dir


def head(facts: dict) -> str:
    """Return the head of a log, which is repeated when a run is resumed."""
    about = [f"{name} {version}" for name, version in facts["versions"].items()]
    about += ["{count} x {kind} ({platform})".format(**facts["devices"])]
    about += [facts["host"]["platform"], f"command: {facts['command']}"]
    names = "host", "environment", "choices", "parameters", "data"
    about += [f"{name}: {json.dumps(facts[name])}" for name in names if name in facts]
    return "\n".join(about)
