"""How train_gpt.py trains on one's own text: what its config takes from the text.

data/tokenize_text.py describes the shards that it writes, in dataset.json beside them; the trainer
asks here what follows from that.
"""

import bisect
import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
import train_gpt as T


def fit(cfg: T.Config, folder: Path, given: set[str], say: Callable) -> T.Config:
    """`cfg` for one's own text: its encoding, and no more steps and validation than there is text.

    Only where data/tokenize_text.py has described its shards, and only what --set has not `given`.
    (FineWeb has no description: there, too few tokens are half a download, and refused.) The target
    goes: a loss per token says nothing about tokens of another kind. A stage has all ids in place
    of candidates where it would have as many or more, and where rows have more different tokens.
    """
    try:
        about = json.loads((folder / T.DESCRIPTION).read_text())
        found = {key: about[key] for key in ("encoding", "real_tokens", "bos")}
        if tuple(found.values()) not in (("gpt2", 50257, 50256), ("bytes", 257, 256)):
            raise ValueError("no encoding has this name and these numbers")
        size = -(-found["real_tokens"] // 128) * 128
        fewer = [tuple(n * (n < size) for n in stage.candidates) for stage in cfg.stages]
        stages = zip(cfg.stages, fewer, strict=True)
        stages = tuple(replace(stage, candidates=few) for stage, few in stages)
        vocab = {"vocab": size, "target": 0.0, "stages": stages}
        fitted = T.validate(replace(cfg, **found, **vocab))
        if {path.name for path in folder.glob("*.bin")} != {*dict(about["sha256"])}:
            raise ValueError("these are not the shards that it describes")
    except (OSError, ValueError, TypeError, LookupError, RecursionError, T.UserError) as error:
        raise T.UserError(f"{folder / T.DESCRIPTION}: {error}: tokenize the text again") from None
    for key in found.keys() & given:
        if getattr(cfg, key) != found[key]:
            raise T.UserError(f"--set {key}=: the text in {folder} has {found[key]}: drop it")
    kept = {key: getattr(cfg, key) for key in vocab.keys() & given}
    kept["stages"] = tuple(
        cfg.stages[i] if f"stages.{i}.candidates" in given else stage
        for i, stage in enumerate(fitted.stages)
    )
    cfg, asked = T.validate(replace(fitted, **kept)), cfg

    train, val = (T.TokenStream(folder, split, cfg.bos) for split in ("train", "val"))
    rows, have = cfg.val_batch // cfg.val_row, len(val) - 1
    row = min(cfg.val_row, have // rows)
    row -= row % 128 if row > 128 else 0  # the blocks of attention on accelerators
    if row and have < cfg.val_tokens and not given & {"val_row", "val_batch", "val_tokens"}:
        tokens = have // (rows * row) * rows * row
        cfg = replace(cfg, val_row=row, val_batch=rows * row, val_tokens=tokens)

    all_ids = [replace(stage, candidates=(0,)) for stage in cfg.stages]

    def of_steps(steps):
        extension = cfg.extension if "extension" in given else min(cfg.extension, steps // 8)
        return replace(cfg, steps=steps, extension=extension)

    def ends_at(steps, check=T.cursor_after):  # 0: it cannot be so short, or so long
        with contextlib.suppress(T.UserError):
            short = replace(of_steps(steps), stages=tuple(all_ids))
            return check(T.validate(short), train, steps)
        return 0

    if "steps" in given:
        cfg = of_steps(cfg.steps)
    elif not ends_at(cfg.steps):
        least = next(n for n in itertools.count(1) if ends_at(n, lambda *_: 1))
        may = range(least, cfg.steps)
        most = least - 1 + bisect.bisect(may, 0, key=lambda steps: not ends_at(steps))
        if most < least:
            few = f"{len(train):,} training tokens are too few for {least} steps, the least of"
            raise T.UserError(f"{folder}: {few} {cfg.preset}: tokenize more text")
        cfg = of_steps(most)
    try:
        T.cursor_after(cfg, train, cfg.steps)
    except T.UserError:
        stay = [f"stages.{i}.candidates" in given for i in range(len(cfg.stages))]
        stages = zip(cfg.stages, all_ids, stay, strict=True)
        cfg = replace(cfg, stages=tuple(own if stays else other for own, other, stays in stages))
    said = f"{folder} holds {found['encoding']} tokens, its own vocabulary of {cfg.vocab}"
    for name in ("steps", "val_tokens"):
        if (got := getattr(cfg, name)) < (wanted := getattr(asked, name)):
            said += f"; for {got:,} of {wanted:,} {name}"
    say(said)
    return cfg
