"""Download FineWeb-10B as GPT-2 tokens: the validation shard and the first N training shards.

    python data/cached_fineweb10B.py [N] [--dir DIR]

A shard is 100 M tokens, 200 MB; all 103 are 10.3 B tokens. Shards that are there and whole are
left alone, so run it again after an interruption, or with a larger N.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
from train_gpt import Parser, UserError, open_shard, report_errors, tell

REPO = "kjj0/fineweb10B-gpt2"  # a dataset on huggingface.co
MAX_SHARDS = 103
DEFAULT_DIR = Path(__file__).resolve().parent / "fineweb10B"


def download(path: Path) -> None:
    """Fetch one shard; UserError says what went wrong."""
    tell(f"downloading {path.name}")
    try:
        from huggingface_hub import hf_hub_download

        path.unlink(missing_ok=True)  # it is damaged, if it is there
        # It continues a partial download, and gives a file its name only when it is complete.
        hf_hub_download(REPO, path.name, repo_type="dataset", local_dir=path.parent)
    except ImportError:
        raise UserError("huggingface_hub is missing: pip install huggingface_hub") from None
    except Exception as error:  # OSError, HTTP errors, RuntimeError: no common base class
        raise UserError(
            f"{path.name} cannot be downloaded from huggingface.co: check the network and the "
            f"disk, and run this again, it goes on there ({type(error).__name__}: {error})"
        ) from None


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shards", nargs="?", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="default: data/fineweb10B")
    args = parser.parse_args(argv)
    if not 1 <= args.shards <= MAX_SHARDS:
        raise UserError(f"N={args.shards}: there are 1 to {MAX_SHARDS} training shards")
    args.dir.mkdir(parents=True, exist_ok=True)
    train = [f"fineweb_train_{number:06d}.bin" for number in range(1, args.shards + 1)]
    for path in (args.dir / name for name in ("fineweb_val_000000.bin", *train)):
        try:
            open_shard(path)
        except UserError:  # it is missing or damaged
            download(path)
            open_shard(path)
    tell(f"{args.dir}: the validation shard and {args.shards} training shards, all whole")


if __name__ == "__main__":
    sys.exit(report_errors(main))
