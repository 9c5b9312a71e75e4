"""Download FineWeb-10B as GPT-2 tokens: the validation shard and the first N training shards.

    python data/cached_fineweb10B.py [N] [--dir DIR]

A shard has 100 M tokens (200 MB); all 103 have 10.3 B tokens. Complete shards are kept, so run the
script again after an interruption or with a larger N; an interrupted shard starts from the
beginning. Each shard must have the SHA-256 that huggingface.co publishes for one revision of the
dataset. The hashes are stored in DIR/hashes.json, which tells train_gpt.py that a run has read the
published shards.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # folder of train_gpt.py

from train_gpt import HASHES, Parser, UserError, fcntl, open_shard, report_errors, require, tell

REPO = "kjj0/fineweb10B-gpt2"  # dataset on huggingface.co (or on HF_ENDPOINT)
REVISION = "889765ea1f903759787add96995d81171b632d0c"
MAX_SHARDS = 103
DEFAULT_DIR = Path(__file__).resolve().parent / "fineweb10B"


def stored_hashes(folder: Path) -> dict[str, str]:
    """Return file name -> SHA-256 in REVISION, for the shards that were checked before."""
    try:
        stored = json.loads((folder / HASHES).read_text())
        return stored["sha256"] if stored["revision"] == REVISION else {}
    except (OSError, ValueError, LookupError, TypeError):  # the file is missing or damaged
        return {}


def published_hashes(names: list[str]) -> dict[str, str]:
    """Return file name -> SHA-256 in REVISION, from the Hub."""
    from huggingface_hub import HfApi

    found = HfApi().get_paths_info(REPO, names, revision=REVISION, repo_type="dataset")
    return {file.path: file.lfs.sha256 for file in found}


def is_complete(path: Path, sha256: str | None = None) -> bool:
    """Return whether a shard exists, is complete, and has the hash `sha256` (if given)."""
    try:
        open_shard(path)
    except UserError:
        return False
    if sha256 is None:
        return True
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def download(paths: list[Path], folder: Path) -> None:
    """Make sure that all `paths` in `folder` are the published shards, and store their hashes.

    Only one process at a time does this; the next process finds complete shards."""
    from huggingface_hub import hf_hub_download

    with open(folder / ".lock", "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        hashes = stored_hashes(folder)
        names = [path.name for path in paths if path.name not in hashes]
        unchecked = published_hashes(names) if names else {}
        hashes |= unchecked
        work = folder / ".downloading"
        shutil.rmtree(work, ignore_errors=True)  # left by an interrupted download
        work.mkdir()
        for path in paths:
            if is_complete(path, unchecked.get(path.name)):
                continue
            tell(f"downloading {path.name}")
            where = {"repo_type": "dataset", "revision": REVISION, "local_dir": work}
            hf_hub_download(REPO, path.name, **where)
            new = work / path.name
            wrong = f"{path.name} is incomplete, or has another SHA-256"
            require(is_complete(new, hashes[path.name]), wrong)
            os.replace(new, path)
        contents = {"revision": REVISION, "sha256": hashes}
        (work / HASHES).write_text(json.dumps(contents, indent=1))
        os.replace(work / HASHES, folder / HASHES)
        shutil.rmtree(work)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shards", nargs="?", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument("--dir", default=DEFAULT_DIR, help="default: data/fineweb10B")
    args = parser.parse_args(argv)
    in_range = 1 <= args.shards <= MAX_SHARDS
    require(
        in_range, f"N={args.shards} must be from 1 to {MAX_SHARDS}, the number of training shards"
    )
    folder = Path(os.path.expanduser(args.dir))
    folder.mkdir(parents=True, exist_ok=True)
    train = [f"fineweb_train_{number:06d}.bin" for number in range(1, args.shards + 1)]
    paths = [folder / name for name in ("fineweb_val_000000.bin", *train)]
    missing = [path for path in paths if not is_complete(path)]
    unverified = ""
    try:
        if missing or not stored_hashes(folder).keys() >= {path.name for path in paths}:
            download(paths, folder)
    except Exception as error:  # OSError, HTTP errors, RuntimeError: no common base class
        missing = [path for path in missing if not is_complete(path)]
        cause = error.__cause__ or error  # huggingface_hub hides some causes behind a vaguer error
        reason = f"{type(cause).__name__}: {cause}"
        free = f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free"
        fix = f"check the network and the disk ({free}), then run this again"
        if isinstance(error, ImportError):
            fix = "pip install huggingface_hub"
        progress = f"{len(missing)} of {len(paths)} shards (0.2 GB each) are missing in {folder}"
        require(not missing, f"cannot download: {reason}: {fix}; {progress}")
        unverified = f"; not verified, as the hashes could not be looked up ({reason})"
    shards = f"the validation shard and {args.shards} training shards"
    tell(f"{folder}: {shards}, all complete{unverified}")


if __name__ == "__main__":
    sys.exit(report_errors(main))
