"""The validation loss of a run, computed again from its last checkpoint with this train_gpt.py.

    python records/recheck.py RUN.json                           # bytes that a checkpoint takes
    python records/recheck.py RUN.json CHECKPOINT [--data DIR]   # the loss

`leaderboard.py reproduce` runs it, so that the loss does not depend on what a submitted source
reports. Config and hashes come from RUN.json, the run.json of a checked record. A config that this
train_gpt.py cannot read is refused, and a checkpoint with other parameters.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

import train_gpt as T  # first: it reports in one line that jax is missing

# isort: split

import jax
from sample import load


def recorded_config(facts: dict, data: str | None) -> T.Config:
    """The config in run.json, with the shards in the folder `data` or in their usual one."""
    fields = {field.name for field in dataclasses.fields(T.Config)}
    other = "its config has other fields than Config in this train_gpt.py"
    T.need(facts["config"].keys() == fields, other)
    usual = T.PRESETS["tiny"].data if facts["config"]["encoding"] == "bpe" else T.Config.data
    return T.validate(T.typed(T.Config, facts["config"] | {"data": data or usual, "start": ""}))


def checkpoint_bytes(cfg: T.Config) -> int:
    """Bytes of the whole training state."""
    _, mesh = T.make_mesh(dataclasses.replace(cfg, devices=1))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(T.abstract_state(cfg, mesh)))


def validation_loss(cfg: T.Config, checkpoint: Path, shards: dict) -> float:
    """The loss of the parameters in a checkpoint. `shards`: what the record's run.json has of the
    shards that it read; the validation shard must be the same."""
    T.need(checkpoint.is_dir(), f"there is no {checkpoint}")
    folder = T.data_place(cfg.data)
    stream = T.TokenStream(folder, "val", cfg.bos)
    for name, facts in T.shards_until(cfg, stream, cfg.val_tokens).items():
        T.need(shards.get(name) == facts, f"{folder / name} is not the shard of the record")
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
    parser = T.Parser(prog="recheck.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run_json", metavar="RUN.json", type=Path)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, nargs="?")
    parser.add_argument("--data", metavar="DIR", help="folder with the token shards")
    args = parser.parse_args(argv)
    facts = json.loads(args.run_json.read_text())
    cfg = recorded_config(facts, args.data)
    if args.checkpoint:
        print(validation_loss(cfg, args.checkpoint, facts["data"]))
    else:
        print(checkpoint_bytes(cfg))


if __name__ == "__main__":
    sys.exit(T.report_errors(main))
