"""Two processes take the test files from one list, which halves the wait on two cores; files that
share programs go to one of them, or either would compile them.

The second one is the same command once more; what it printed follows at the end.
"""

import os
import subprocess
import sys
import tempfile
from itertools import chain, pairwise

FEW_FILES = 12  # are not worth a second process, which compiles anew what files have in common
TOGETHER = "test_run.py", "test_resume.py", "test_compilation.py"
LIST = "LIST_OF_TEST_FILES"  # in the environment of the second process: a pipe of file numbers


def pytest_runtestloop(session):
    """Run all tests in two processes; None leaves few files, -x, --pdb and -s to pytest's loop."""
    files, option = {}, session.config.option
    for item in session.items:
        path = item.path.with_name(TOGETHER[0]) if item.path.name in TOGETHER else item.path
        files.setdefault(path, []).append(item)
    alone = option.collectonly or option.usepdb or option.maxfail or option.capture == "no"
    few = len(files) <= FEW_FILES or (os.cpu_count() or 1) < 2
    if alone or few or session.testsfailed:
        return None
    files = [files[path] for path in sorted(files, key=lambda x: (-x.stat().st_size, x))]
    if LIST in os.environ:
        run(files, int(os.environ[LIST]))
        return True
    take, put = os.pipe()  # the numbers of the files that nobody has taken yet
    os.write(put, bytes(range(len(files))))
    os.close(put)
    command = [sys.executable, "-m", "pytest", *session.config.invocation_params.args]
    with tempfile.TemporaryFile("w+") as said:
        pipes = {"pass_fds": (take,), "stdout": said, "stderr": said}
        second = subprocess.Popen(command, env=os.environ | {LIST: str(take)}, **pipes)
        try:
            run(files, take)
            session.testsfailed += second.wait() != 0
        finally:
            second.kill()
        said.seek(0)
        session.config.get_terminal_writer().write(f"\n\nThe second process:\n{said.read()}\n")
    return True


def run(files: list, take: int):
    """Run the tests of the files whose numbers come from the descriptor `take`. Each is told the
    next one, so that what that needs too stays set up."""
    mine = chain.from_iterable(files[n[0]] for n in iter(lambda: os.read(take, 1), b""))
    for item, following in pairwise(chain(mine, [None])):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
