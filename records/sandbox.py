"""A sandbox for submitted sources, without a network and with few writable folders.

`leaderboard.py reproduce --sandbox` uses bubblewrap (bwrap), or docker if bwrap is not installed.
"""

import functools
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from checks import Refused

DEVICES = "/dev/nvidia*", "/dev/accel*", "/dev/vfio/*", "/dev/dri/*"  # accelerators
SOCKETS = "/tmp/ssh-*", "/tmp/.X11-unix"  # sockets of other programs outside /run


def found(patterns: tuple[str, ...]) -> list[str]:
    """Return the paths that match one of the patterns."""
    return sorted(path for pattern in patterns for path in glob.glob(pattern))


def in_bubblewrap(home: Path, writable: list[Path], command: list[str], names) -> list[str]:
    """Return a bwrap command that runs `command` in the folder `home`."""
    words = (
        "bwrap --die-with-parent --new-session --unshare-net --unshare-pid --unshare-ipc".split()
    )
    words += "--ro-bind / / --dev-bind /dev /dev --tmpfs /dev/shm --proc /proc --tmpfs /run".split()
    for path in found(SOCKETS):
        words += ["--tmpfs", path]
    for path in writable:
        words += ["--bind", str(path), str(path)]
    return [*words, "--chdir", str(home), *command]


def in_docker(home: Path, writable: list[Path], command: list[str], names) -> list[str]:
    """Return a docker command that runs `command`, with the environment variables `names`.

    The image is empty; the folders of this machine are mounted into it.
    """
    words = "docker run --rm --init --network none --read-only --cap-drop ALL".split()
    words += ["--security-opt", "no-new-privileges", "--user", f"{os.getuid()}:{os.getgid()}"]
    for path in sorted(Path("/").iterdir()):
        if path.is_dir() and path.name not in ("dev", "proc", "run", "sys"):
            words += ["--volume", f"{path}:{path}:ro"]
    for path in found(SOCKETS):
        words += ["--tmpfs", path]
    for path in writable:
        words += ["--volume", f"{path}:{path}"]
    for path in found(DEVICES):
        if not Path(path).is_dir():
            words += ["--device", path]
    image = "train_gpt_sandbox"
    empty_archive = bytes(10240)
    subprocess.run(["docker", "import", "-", image], input=empty_archive, stdout=2, check=True)
    for name in names:
        words += ["--env", name]
    return [*words, "--workdir", str(home), image, *command]


def sandbox(home: Path, writable: list[Path]) -> Callable:
    """Return a function (command, names of variables) -> command in a sandbox, run in `home`."""
    boxes = {"bwrap": in_bubblewrap, "docker": in_docker}
    for program, box in boxes.items():
        if sys.platform == "linux" and shutil.which(program):
            return functools.partial(box, home, writable)
    raise Refused("--sandbox needs Linux and bubblewrap (bwrap) or docker: install bwrap or docker")
