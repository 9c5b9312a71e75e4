"""Two processes share the test files out among themselves, which halves the wait on two cores.

pytest-xdist does more of this, and would be one more package for everybody to install. Each process
takes the next file when it is done with one, the largest first; the second one sends its reports to
the first, which counts and shows them. Whoever names a few files, or `-x`, `--pdb` or `-s`, gets
pytest's own loop.
"""

import json
import os
import threading
from itertools import chain
from queue import SimpleQueue

import pytest

FEW_FILES = 12  # are not worth a second process, which compiles anew what files have in common


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Run all tests in two processes; None leaves them to pytest's own loop."""
    config, files = session.config, {}
    for item in session.items:
        files.setdefault(item.path, []).append(item)
    option = config.option
    alone = option.collectonly or option.usepdb or option.maxfail or option.capture == "no"
    if alone or session.testsfailed or len(files) <= FEW_FILES or (os.cpu_count() or 1) < 2:
        return None
    groups = [files[path] for path in sorted(files, key=lambda x: x.stat().st_size, reverse=True)]
    config._tmp_path_factory.getbasetemp()  # one for both
    take, put = os.pipe()  # the numbers of the files that nobody has taken yet
    os.write(put, bytes(range(len(groups))))
    os.close(put)
    items = chain.from_iterable(groups[n[0]] for n in iter(lambda: os.read(take, 1), b""))
    receive, send = os.pipe()
    second = os.fork()
    if not second:
        run_second(config, items, send)
    os.close(send)
    reports = SimpleQueue()

    def listen():
        with open(receive, encoding="utf-8") as lines:
            for line in lines:
                reports.put(json.loads(line))
        reports.put(None)

    threading.Thread(target=listen, daemon=True).start()
    reported, ended = set(), False

    def show(wait=False):
        nonlocal ended
        while not ended and (wait or not reports.empty()):
            if (data := reports.get()) is None:
                ended = True
                break
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            where = {"nodeid": report.nodeid, "location": report.location}
            if report.when == "setup":
                config.hook.pytest_runtest_logstart(**where)
            config.hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                config.hook.pytest_runtest_logfinish(**where)
                reported.add(report.nodeid)

    try:
        for item, following in with_next(items):
            run(item, following)
            reported.add(item.nodeid)
            if following is None or following.path != item.path:
                show()
        show(wait=True)
    except BaseException:
        os.kill(second, 9)
        raise
    finally:
        status = os.waitpid(second, 0)[1]
    missing = len(session.items) - len(reported)
    if status or missing:
        raise session.Interrupted(f"the second process ended ({status}), {missing} tests have not")
    return True


def with_next(items):
    """(item, the one that this process runs next or None): what a test has set up, and the next one
    needs, stays."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        yield item, following
        item = following


def run(item, following):
    """Run one test, with all reports."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def run_second(config, items, send: int):
    """The second process, from fork to end: run what there is of `items`, reports go to `send`."""
    status = 1
    try:
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the first process
        capture.start_global_capturing()
        config.pluginmanager.unregister(name="terminalreporter")
        with open(send, "w", encoding="utf-8") as lines:

            class Sender:
                def pytest_runtest_logreport(self, report):
                    data = config.hook.pytest_report_to_serializable(config=config, report=report)
                    lines.write(json.dumps(data) + "\n")
                    lines.flush()

            config.pluginmanager.register(Sender())
            for item, following in with_next(items):
                run(item, following)
        status = 0
    finally:
        os._exit(status)
