"""Download FineWeb-10B as GPT-2 tokens: the validation shard and the first N training shards.

    python data/cached_fineweb10B.py [N] [--dir DIR]

A shard is 100 M tokens, 200 MB; all 103 are 10.3 B tokens. Shards that are there and whole are
left alone, so run it again after an interruption, or with a larger N.
"""

import errno
import shutil
from pathlib import Path

from shards import (
    HEADER_BYTES,
    Parser,
    UserError,
    folder_name,
    make_folder,
    open_shard,
    run,
    shard_path,
    shards_in,
    tell,
)

NAME = "fineweb"
REPO = "kjj0/fineweb10B-gpt2"  # a dataset on huggingface.co
MAX_SHARDS = 103
SHARD_BYTES = HEADER_BYTES + 2 * 100_000_000
DEFAULT_DIR = Path(__file__).resolve().parent / "fineweb10B"


def shard_paths(folder: Path, count: int) -> list[Path]:
    """The validation shard and training shards 1 to `count`, whether they are there or not."""
    train = [shard_path(folder, NAME, "train", number) for number in range(1, count + 1)]
    return [shard_path(folder, NAME, "val", 0), *train]


def is_present(path: Path) -> bool:
    """Whether `path` is a whole shard; a damaged one is reported and deleted."""
    if not path.exists():
        return False
    try:
        open_shard(path)
    except UserError as error:
        tell(f"{error}; doing that now")
        path.unlink()
        return False
    return True


def download(path: Path) -> None:
    """Fetch one shard into its place and verify it; UserError says what went wrong."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise UserError("huggingface_hub is missing: pip install huggingface_hub") from None
    try:
        # Continues a partial download, and moves the file into place only when it is complete.
        hf_hub_download(REPO, path.name, repo_type="dataset", local_dir=path.parent)
    except Exception as error:  # OSError, HTTP errors, RuntimeError: no common base class
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise UserError(f"disk full: make room in {path.parent} and run this again") from None
        raise UserError(
            f"{path.name} cannot be downloaded from huggingface.co ({type(error).__name__}): "
            "check the network and run this again, it continues where it stopped"
        ) from None
    if not is_present(path):
        raise UserError(f"{path.name} arrived damaged and was deleted: run this again")


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "shards",
        nargs="?",
        type=int,
        default=9,
        metavar="N",
        help=f"training shards of 100 M tokens, 1 to {MAX_SHARDS}; default 9",
    )
    parser.add_argument(
        "--dir", type=folder_name, default=DEFAULT_DIR, help="default: data/fineweb10B"
    )
    args = parser.parse_args(argv)
    if not 1 <= args.shards <= MAX_SHARDS:
        raise UserError(f"N={args.shards}: there are 1 to {MAX_SHARDS} training shards")

    make_folder(args.dir, "--dir")
    shards_in(args.dir, NAME, "--dir")
    paths = shard_paths(args.dir, args.shards)
    missing = [path for path in paths if not is_present(path)]
    needed, free = len(missing) * SHARD_BYTES, shutil.disk_usage(args.dir).free
    if needed > free:
        raise UserError(
            f"{len(missing)} shards need {needed / 1e9:.1f} GB, but {args.dir} has "
            f"{free / 1e9:.1f} GB free: make room, ask for fewer, or name another --dir"
        )
    for number, path in enumerate(missing, 1):
        tell(f"downloading {path.name} ({number} of {len(missing)})")
        download(path)
    tokens = sum(len(open_shard(path)) for path in paths)
    tell(f"{args.dir}: {len(paths)} shards, {tokens:,} tokens, all verified")


if __name__ == "__main__":
    run(main)
