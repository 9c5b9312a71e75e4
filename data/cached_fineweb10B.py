"""Download FineWeb-10B as GPT-2 tokens: the validation shard and the first N training shards.

    python data/cached_fineweb10B.py [N] [--dir DIR]

A shard is 100 M tokens, 200 MB; all 103 are 10.3 B tokens. Shards that are there and whole are left
alone, so run it again after an interruption, which begins its shard anew, or with a larger N.
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from shards import locked, work_folder

# Importing shards has put the folder of train_gpt.py on the path.
from train_gpt import Parser, UserError, need, open_shard, report_errors, tell

REPO = "kjj0/fineweb10B-gpt2"  # a dataset on huggingface.co, or where HF_ENDPOINT says
MAX_SHARDS = 103
DEFAULT_DIR = Path(__file__).resolve().parent / "fineweb10B"


def missing_shards(paths: list[Path]) -> list[Path]:
    """Those that are not there, or damaged."""
    missing = []
    for path in paths:
        try:
            open_shard(path)
        except UserError:
            missing.append(path)
    return missing


def download(paths: list[Path], folder: Path) -> None:
    """Fetch those of `paths` that are missing in `folder`, when no other process is doing so."""
    from huggingface_hub import hf_hub_download

    with work_folder(folder, ".downloading-") as work, locked(folder):
        for path in missing_shards(paths):
            tell(f"downloading {path.name}")
            hf_hub_download(REPO, path.name, repo_type="dataset", local_dir=work)
            os.replace(work / path.name, path)
            open_shard(path)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shards", nargs="?", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument("--dir", default=DEFAULT_DIR, help="default: data/fineweb10B")
    args = parser.parse_args(argv)
    possible = 1 <= args.shards <= MAX_SHARDS
    need(possible, f"N={args.shards}: there are 1 to {MAX_SHARDS} training shards")
    folder = Path(os.path.expanduser(args.dir))
    folder.mkdir(parents=True, exist_ok=True)
    train = [f"fineweb_train_{number:06d}.bin" for number in range(1, args.shards + 1)]
    paths = [folder / name for name in ("fineweb_val_000000.bin", *train)]
    try:
        if missing := missing_shards(paths):
            tell(f"{folder} lacks {len(missing)} of {len(paths)} shards; downloads take turns")
            download(paths, folder)
    except ImportError as error:
        raise UserError(f"{error}: pip install huggingface_hub") from None
    except Exception as error:  # OSError, HTTP errors, RuntimeError: no common base class
        if missing := missing_shards(paths):
            free = f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free in {folder}"
            cause = error.__cause__ or error  # the Hub's library hides some in a vaguer one
            cure = "check the network and the disk, and run this again, it begins this shard anew"
            there = f"{len(paths) - len(missing)} of {len(paths)} shards are whole"
            there += f", the others take {0.2 * len(missing):.1f} GB, {free}"
            what = f"{missing[0].name} cannot be downloaded: {cure}; {there}"
            raise UserError(f"{what} ({type(cause).__name__}: {cause})") from None
    tell(f"{folder}: the validation shard and {args.shards} training shards, all whole")


if __name__ == "__main__":
    sys.exit(report_errors(main))
