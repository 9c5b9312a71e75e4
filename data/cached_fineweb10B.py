"""Download FineWeb-10B as GPT-2 tokens: the validation shard and the first N training shards.

    python data/cached_fineweb10B.py [N] [--dir DIR]

A shard is 100 M tokens, 200 MB; all 103 are 10.3 B tokens. Shards that are there and whole are left
alone, so run it again after an interruption, which begins its shard anew, or with a larger N. Each
shard must have the SHA-256 that huggingface.co publishes for one revision of the dataset. These are
kept in DIR/hashes.json, by which the trainer logs that it has read the published shards.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is

from train_gpt import HASHES, Parser, UserError, need, open_shard, report_errors, tell

# isort: split

from shards import locked, work_folder

REPO = "kjj0/fineweb10B-gpt2"  # a dataset on huggingface.co, or where HF_ENDPOINT says
REVISION = "889765ea1f903759787add96995d81171b632d0c"
MAX_SHARDS = 103
DEFAULT_DIR = Path(__file__).resolve().parent / "fineweb10B"


def stored_hashes(folder: Path) -> dict[str, str]:
    """File name -> the SHA-256 that REVISION has for it, as an earlier call has stored it."""
    try:
        stored = json.loads((folder / HASHES).read_text())
        return stored["sha256"] if stored["revision"] == REVISION else {}
    except (OSError, ValueError, LookupError, TypeError):  # there is none, or it is damaged
        return {}


def published_hashes(names: list[str]) -> dict[str, str]:
    """The same for these names, asked of the Hub."""
    from huggingface_hub import HfApi

    found = HfApi().get_paths_info(REPO, names, revision=REVISION, repo_type="dataset")
    return {file.path: file.lfs.sha256 for file in found}


def check_hash(path: Path, hashes: dict[str, str]) -> None:
    """ValueError if a shard does not have its published hash."""
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != hashes[path.name]:
        raise ValueError(f"its SHA-256 is {sha256}, published is {hashes[path.name]}")


def missing_shards(paths: list[Path]) -> list[Path]:
    """Those that are not there, or damaged."""
    missing = []
    for path in paths:
        try:
            open_shard(path)
        except UserError:
            missing.append(path)
    return missing


def as_published(path: Path, hashes: dict[str, str]) -> bool:
    """Whether a shard is there and has its published hash."""
    try:
        check_hash(path, hashes)
        return True
    except (OSError, ValueError):
        return False


def download(paths: list[Path], folder: Path) -> None:
    """Fetch those of `paths` that are missing in `folder` or not as published, when no other
    process is doing so, and store their hashes."""
    from huggingface_hub import hf_hub_download

    with work_folder(folder, ".downloading-") as work, locked(folder):
        hashes = stored_hashes(folder)
        checked = {*hashes}
        if names := [path.name for path in paths if path.name not in hashes]:
            hashes |= published_hashes(names)
        for path in paths:
            if missing_shards([path]) or not (path.name in checked or as_published(path, hashes)):
                tell(f"downloading {path.name}")
                where = {"repo_type": "dataset", "revision": REVISION, "local_dir": work}
                hf_hub_download(REPO, path.name, **where)
                open_shard(work / path.name)
                check_hash(work / path.name, hashes)
                os.replace(work / path.name, path)
        (work / HASHES).write_text(json.dumps({"revision": REVISION, "sha256": hashes}, indent=1))
        os.replace(work / HASHES, folder / HASHES)


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
    missing = missing_shards(paths)
    unverified = ""
    try:
        if missing:
            tell(f"{folder} lacks {len(missing)} of {len(paths)} shards; downloads take turns")
        if missing or not stored_hashes(folder).keys() >= {path.name for path in paths}:
            download(paths, folder)
    except Exception as error:  # OSError, HTTP errors, RuntimeError: no common base class
        missing = missing_shards(missing)
        if missing and isinstance(error, ImportError):
            raise UserError(f"{error}: pip install huggingface_hub") from None
        cause = error.__cause__ or error  # the Hub's library hides some in a vaguer one
        reason = f"{type(cause).__name__}: {cause}"
        if missing:
            free = f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free in {folder}"
            cure = "check the network and the disk, and run this again, it begins this shard anew"
            there = f"{len(paths) - len(missing)} of {len(paths)} shards are whole"
            there += f", the others take {0.2 * len(missing):.1f} GB, {free}"
            what = f"{missing[0].name} cannot be downloaded: {cure}; {there}"
            raise UserError(f"{what} ({reason})") from None
        unverified = f"; not verified, as their hashes cannot be looked up ({reason})"
    shards = f"the validation shard and {args.shards} training shards"
    tell(f"{folder}: {shards}, all whole{unverified}")


if __name__ == "__main__":
    sys.exit(report_errors(main))
