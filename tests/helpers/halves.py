"""Run test files in two processes, which take them from one list. Files with common programs stay
together, so that they compile once. The output of the second process is printed at the end."""

import os
import subprocess
import sys
import tempfile
from itertools import chain, pairwise

FEW_FILES = 12  # need no second process, which would compile common programs again
TOGETHER = "test_run.py", "test_resume.py", "test_compilation.py"
LIST = "LIST_OF_TEST_FILES"  # environment variable of the second process: a pipe of file numbers


def pytest_runtestloop(session):
    """Run all tests in two processes. Return None (pytest's loop) for few files, -x, --pdb and
    -s."""
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
    take, put = os.pipe()  # numbers of the remaining files
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
    """Run the tests of files with numbers from the descriptor `take`. pytest keeps fixtures that
    the next test uses."""
    mine = chain.from_iterable(files[n[0]] for n in iter(lambda: os.read(take, 1), b""))
    for item, following in pairwise(chain(mine, [None])):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
