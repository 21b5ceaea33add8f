"""Workers that import the training stack once: forks of the process that has collected the tests.

A plugin of pytest's in the place of xdist: `-p tests.trainer.workers --workers N`; without N the tests run in
this process. A file's tests stay together, files with trainings come first.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.trainer.fork_server import import_stack
from tests.trainer.forks import ForkServer

#: A fork hangs in the tokenizers' threads if the process before it has begun them, as collecting tests may.
THREADS = "TOKENIZERS_PARALLELISM"
os.environ[THREADS] = "false"

#: This process's fork server, begun before any test has computed anything.
servers: list[ForkServer] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="Run the tests in N forks of this process.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.testsfailed or session.config.option.collectonly or not session.items:
        return None
    if trains := any(map(_trains, session.items)):
        import_stack()
    if count := session.config.getoption("workers"):
        _run_in_forks(session, count, trains)
    else:
        _run(session, iter([session.items]), trains)
    return True


def _trains(item: pytest.Item) -> bool:
    return "forks" in getattr(item, "fixturenames", ())


def _run(session: pytest.Session, files: Iterator[list[pytest.Item]], trains: bool) -> None:
    del os.environ[THREADS]
    with ExitStack() as stack:
        if trains:
            servers.append(stack.enter_context(ForkServer(anew=False)))
        tests = next(files, [])
        while tests:
            following = next(files, [])
            for item, after in zip_longest(tests, [*tests[1:], *following[:1]]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            tests = following


def _run_in_forks(session: pytest.Session, count: int, trains: bool) -> None:
    by_path: dict[Path, list[pytest.Item]] = {}
    for item in session.items:
        by_path.setdefault(item.path, []).append(item)
    files = sorted(by_path.values(), key=lambda tests: -sum(map(_trains, tests)))
    # A pipe is the queue that all workers take files from, by their numbers.
    taken, left = os.pipe()
    os.write(left, b"".join(number.to_bytes(2, "big") for number in range(len(files))))
    os.close(left)
    folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
    base = folders.getbasetemp()
    running: dict[Any, int] = {}
    for number in range(count):
        reports, told = Pipe(duplex=False)
        if not (pid := os.fork()):
            folders._basetemp = base / f"worker{number}"
            folders._basetemp.mkdir()
            _work(session, told, partial(_run, session, _taken(files, taken), trains))
        told.close()
        running[reports] = pid
    hook = session.config.hook
    while running:
        for ready in wait(list(running)):
            source: Any = ready
            try:
                message = source.recv()
            except EOFError:
                _, status = os.waitpid(running.pop(source), 0)
                if status:
                    raise RuntimeError(f"a worker ended with {os.waitstatus_to_exitcode(status)}") from None
                continue
            report = hook.pytest_report_from_serializable(config=session.config, data=message)
            hook.pytest_runtest_logreport(report=report)


def _taken(files: list[list[pytest.Item]], queue: int) -> Iterator[list[pytest.Item]]:
    while number := os.read(queue, 2):
        yield files[int.from_bytes(number, "big")]


class Relay:
    """Sends the reports of a worker to the process that shows them."""

    def __init__(self, config: pytest.Config, told: Connection) -> None:
        self.config, self.told = config, told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.told.send(data)


def _work(session: pytest.Session, told: Connection, run: Callable[[], None]) -> NoReturn:
    plugins, code = session.config.pluginmanager, 1
    plugins.unregister(plugins.getplugin("terminalreporter"))
    sys.__stdout__ = io.StringIO()  # type: ignore[assignment] # what hears of a failure shows it at once
    plugins.register(Relay(session.config, told))
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        told.close()
        os._exit(code)
