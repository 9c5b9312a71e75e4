"""Compute the validation loss of a run's checkpoint with this train_gpt.py.

    python records/recheck.py RUN.json CHECKPOINT [--data DIR]

`leaderboard.py reproduce` uses it, because a submitted source could report a wrong loss. The config
and the hashes of the shards are from RUN.json, the run.json of a checked record. A config that this
train_gpt.py cannot read is refused, and so is a checkpoint with other parameters.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of train_gpt.py

import train_gpt as T  # first, because it reports in one line that jax is missing

# isort: split

from sample import load


def recorded_config(facts: dict, data: str | None) -> T.Config:
    """Return the config in run.json, with the shards in `data` or in their default folder."""
    fields = {field.name for field in dataclasses.fields(T.Config)}
    other = "its config has other fields than Config in this train_gpt.py"
    T.require(facts["config"].keys() == fields, other)
    default = T.PRESETS["tiny"].data if facts["config"]["encoding"] == "bpe" else T.Config.data
    return T.validate(T.typed(T.Config, facts["config"] | {"data": data or default, "start": ""}))


def validation_loss(cfg: T.Config, checkpoint: Path, shards: dict) -> float:
    """Return the validation loss of a checkpoint.

    `shards` has the shards in the record's run.json; the validation shard must be the same.
    """
    T.require(checkpoint.is_dir(), f"there is no {checkpoint}")
    folder = T.data_place(cfg.data)
    stream = T.TokenStream(folder, "val", cfg.bos)
    for name, facts in T.shards_until(cfg, stream, cfg.val_tokens).items():
        T.require(shards.get(name) == facts, f"{folder / name} is not the shard of the record")
    saved = T.Saved(checkpoint, cfg, cfg.steps, T.LoaderState(0, ()), {"data": {}})
    model = load(saved)
    cfg, mesh = model.cfg, model.mesh
    words = T.token_bytes(cfg, folder)
    by_id = T.vocabulary(cfg, words) if cfg.ngram_rows else None
    lowered = T.programs(cfg, mesh, model.kernels)["eval"].lower()
    program = T.compile_one(cfg, mesh, "eval", lowered)
    batches = T.validation_batches(cfg, mesh, cfg.steps, stream, by_id)
    loss, _ = T.evaluate(cfg, functools.partial(program, model.copies, model.table), batches)
    return loss


def main(argv=None):
    """Parse the command line and print the loss."""
    parser = T.Parser(prog="recheck.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run_json", metavar="RUN.json", type=Path)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("--data", metavar="DIR", help="folder with the token shards")
    args = parser.parse_args(argv)
    facts = json.loads(args.run_json.read_text())
    print(validation_loss(recorded_config(facts, args.data), args.checkpoint, facts["data"]))


if __name__ == "__main__":
    sys.exit(T.report_errors(main))
