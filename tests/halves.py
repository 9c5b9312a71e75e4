"""Two processes share the test files out among themselves, which halves the wait on two cores.

pytest-xdist does more of this, and would be one more package for everybody to install. Each process
takes the next file when it is done with one, the largest first; the second one, which is the same
command once more, sends its reports to the first, which counts and shows them. Whoever names a few
files, or `-x`, `--pdb` or `-s`, gets pytest's own loop.
"""

import os
import subprocess
import sys
import threading
from itertools import chain
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest

FEW_FILES = 12  # are not worth a second process, which compiles anew what files have in common
SECOND = "SECOND_TEST_PROCESS"  # in its environment: two files, to take from and to send to


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Run all tests in two processes; None leaves them to pytest's own loop."""
    files, option = {}, session.config.option
    for item in session.items:
        files.setdefault(item.path, []).append(item)
    alone = option.collectonly or option.usepdb or option.maxfail or option.capture == "no"
    few = len(files) <= FEW_FILES or (os.cpu_count() or 1) < 2 or os.name != "posix"
    if alone or session.testsfailed or few:
        return None
    files = [files[path] for path in sorted(files, key=lambda x: (-x.stat().st_size, x))]
    if SECOND in os.environ:
        take, send = map(int, os.environ[SECOND].split())
        reports = Connection(send, readable=False)
        session.config.pluginmanager.register(Sender(session.config, reports))
        for item, following in items(files, take):
            run(item, following)
        reports.close()
        return True
    take, put = os.pipe()  # the numbers of the files that nobody has taken yet
    os.write(put, bytes(range(len(files))))
    os.close(put)
    receive, send = os.pipe()
    second = subprocess.Popen(
        [sys.executable, "-m", "pytest", *session.config.invocation_params.args],
        env=os.environ | {SECOND: f"{take} {send}"},
        pass_fds=(take, send),
        stdout=subprocess.DEVNULL,
    )
    os.close(send)
    reports, seen = SimpleQueue(), set()
    from_second = Connection(receive, writable=False)
    # As they come: a full pipe would hold up the second process.
    threading.Thread(target=forward, args=(from_second, reports), daemon=True).start()
    try:
        for item, following in items(files, take):
            run(item, following)
            seen.add(item.nodeid)
            if following is None or following.path != item.path:
                show(session.config, reports, seen)
        show(session.config, reports, seen, wait=True)
    except BaseException:
        second.kill()
        raise
    finally:
        status = second.wait()
    if missing := len(session.items) - len(seen):
        raise session.Interrupted(f"{missing} tests had no report, second process: {status}")
    return True


def items(files, take: int):
    """Pairs of a test and the one that this process runs next, or None: what the next one needs
    too stays set up. File after file, whose numbers come from the descriptor `take`."""
    mine = chain.from_iterable(files[n[0]] for n in iter(lambda: os.read(take, 1), b""))
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        yield item, following
        item = following


def run(item, following):
    """Run one test, with all reports."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def forward(from_second: Connection, reports: SimpleQueue):
    """All that comes from the second process goes to `reports`, at last None."""
    try:
        while True:
            reports.put(from_second.recv())
    except EOFError:
        reports.put(None)


def show(config, reports: SimpleQueue, seen: set, wait: bool = False):
    """Show what the second process has reported; with `wait`, until it is done."""
    while wait or not reports.empty():
        if (data := reports.get()) is None:
            reports.put(None)  # for whoever asks again
            return
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        where = {"nodeid": report.nodeid, "location": report.location}
        if report.when == "setup":
            config.hook.pytest_runtest_logstart(**where)
        config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            config.hook.pytest_runtest_logfinish(**where)
            seen.add(report.nodeid)


class Sender:
    """The plugin of the second process: its reports go to the first."""

    def __init__(self, config, reports: Connection):
        self.config, self.reports = config, reports

    def pytest_runtest_logreport(self, report):
        hook = self.config.hook.pytest_report_to_serializable
        self.reports.send(hook(config=self.config, report=report))
