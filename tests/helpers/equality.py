"""Compare two versions of train_gpt.py: the programs that they trace, and what short runs return.

    python tests/helpers/equality.py OLD.py NEW.py [--only programs|runs] [--set KEY=VALUE ...]

Programs: the jaxprs of all programs of `speedrun` and `pointer` on eight devices, with the kernels
for TPUs and with those for GPUs, bodies of kernels included. Runs: losses and hashes of the arrays
in the last checkpoint after 24 steps of `tiny`, `plain` and a small bfloat16 configuration with all
ideas, on one and on two devices. --set adds settings to each config. Prints a line for each
difference, and then exits with status 1. The test suite does not run this: use it to compare the
source before and after a change that must not change numbers.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

DEVICES = {
    "tpu": SimpleNamespace(platform="tpu", device_kind="TPU v6 lite"),
    "gpu": SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100 80GB", compute_capability="9.0"
    ),
}
EVERY_IDEA = """data=data/builtin encoding=bpe vocab=2176 real_tokens=2048 bos=2047 width=64 heads=2
    mlp_width=128 ngram_rows=4096 gate_width=16 mudd_width=16 pointer_width=16 pointer_reach=64,128
    extension=2 momentum_warmup=5 momentum_cooldown=3 rails_step=10 table_change=8 tail=8
    tail_average=6 attention_cap=80 micro_tokens=256 loss_chunk=100 target=0 ngram_drop=0.25
    stages.*.batch_tokens=1024 stages.*.row_tokens=128 stages.2.batch_tokens=2048
    stages.2.row_tokens=256 stages.*.doc_cap=96 stages.*.windows=(16,48) stages.2.windows=(32,96)
    stages.0.candidates=(512,) stages.1.candidates=(512,) stages.2.candidates=(640,704)
    val_tokens=8192 val_batch=4096 val_row=512 val_windows=32,128"""
# Compile in a tenth of the time; both versions do.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SHORT = "steps=24 sample_tokens=0 checkpoint_end=always"
RUNS = {
    "tiny": f"tiny --set {SHORT} val_tokens=8192",
    "plain": f"plain --set {SHORT} val_tokens=8192",
    "every idea": f"speedrun --set {SHORT} {EVERY_IDEA}",
}


def load(path: Path):
    """The module in the file `path`, as train_gpt."""
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def normalized(text: str) -> str:
    """The text of a jaxpr without addresses, and without names of functions and files."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r"\S+\.py:\d+(:\d+)?", "FILE", text)
    text = re.sub(r"<function [^>]*>", "<function>", text)
    return re.sub(r"\b(name|debug_info|bwd|fwd_jaxpr_thunk|out_trees)=\S+", r"\1", text)


def programs(path: Path, more: list[str]) -> dict[str, str]:
    """Preset, kind of kernels and program -> hash of its jaxpr."""
    T = load(path)
    import jax
    import numpy as np

    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (T.AXIS,))
    hashes = {}
    for preset in ("speedrun", "pointer"):
        cfg = T.override(T.PRESETS[preset], ["devices=8", "whole_loss=always", *more])
        for kind, device in DEVICES.items():
            kernels, _ = T.choose_kernels(cfg, device)
            for key, program in T.programs(cfg, mesh, kernels).items():
                specs = jax.tree.map(lambda x: x.sharding.spec, program.args)
                how = {"mesh": mesh, "in_specs": specs, "out_specs": program.out}
                step = jax.shard_map(program.step, check_vma=False, **how)
                jaxpr = jax.jit(step).trace(*program.args).jaxpr
                text = normalized(jaxpr.pretty_print(source_info=False, name_stack=False))
                name = f"{preset}, {kind}: {key}"
                hashes[name] = hashlib.sha256(text.encode()).hexdigest()
                dump(name, text)
    return hashes


def dump(name: str, text: str):
    """Keep the text of a program in the folder of this process, to be compared by diff."""
    Path(re.sub(r"\W+", "_", name) + ".txt").write_text(text)


def runs(path: Path, more: list[str]) -> dict[str, str]:
    """Run and number of devices -> its losses, and hashes of the arrays in its last checkpoint."""
    found = {}
    for name, words in RUNS.items():
        for devices in (1, 2):
            out = Path(f"{name}-{devices}")
            argv = [sys.executable, path, *words.split(), f"devices={devices}", *more]
            argv[3:3] = ["--out", str(out), "--cache", "off"]
            env = os.environ | {"XLA_FLAGS": QUICK}
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=env)
            (run,) = out.iterdir()
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            losses = [line.get("train_loss", line.get("val_loss")) for line in lines]
            arrays = hashlib.sha256()
            for file in sorted((run / "checkpoints/24").glob("*.npy")):
                arrays.update(file.name.encode() + file.read_bytes())
            found[f"{name}, {devices} devices"] = f"{losses} {arrays.hexdigest()}"
    return found


PARTS = {"programs": programs, "runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sources", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    if len(args.sources) == 1:  # a child of the process below
        print(json.dumps(PARTS[args.only](args.sources[0], args.set)))
        return 0
    status = 0
    for part in [args.only] if args.only else PARTS:
        results = []
        for source in args.sources:
            folder = tempfile.mkdtemp(prefix=f"equality-{part}-")
            words = [sys.executable, __file__, source.resolve(), "--only", part, "--set", *args.set]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, cwd=folder)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{source}: {len(results[-1])} {part}, kept in {folder}", flush=True)
        old, new = results
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                status = 1
                print(f"differs: {name}: {old.get(name)} -> {new.get(name)}")
        print(f"{part}: {'different' if status else 'equal'}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
