"""The watch over the tests: each way to hang fails and shows where, and the other tests are still run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.doubles import watch

def pytest_configure(config):
    watch.start(config)
"""
HANGING = """
import asyncio, subprocess, sys, time

def test_waits_for_a_child_that_never_ends():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6)"]) as never:
        a_line_to_be_seen = never.wait()

async def test_waits_in_the_loop():
    await asyncio.sleep(60)

def test_swallows():
    for _ in range(2):
        try:
            time.sleep(60)
        except Exception:
            pass

def test_hangs_where_errors_are_only_logged():
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: loop.stop())
    loop.call_soon(time.sleep, 60)
    loop.run_forever()
    loop.close()

def test_is_well():
    time.sleep(0.01)
"""
HEARS = """
import subprocess, sys

def test_a_child_hears_the_signal():
    code = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(1)"
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == -2
"""


def pytest_on(
    folder: Path, text: str, *, ignoring: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_these.py").write_text(text)
    code = "import signal, sys; import pytest;"
    if ignoring:
        code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);" + code
    code += "raise SystemExit(pytest.main(sys.argv[1:]))"
    options = ["-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir", str(folder), str(folder)]
    return subprocess.run(
        [sys.executable, "-c", code, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_hangs_fails_and_the_rest_goes_on(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, HANGING, GOD_MINER_TEST_LIMIT_S="3", CI="true")
    assert "4 failed, 1 passed" in done.stdout, done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "test_waits_in_the_loop (call): not done after 3 s" in done.stderr
    # Said at once, before the summary, with the place.
    first = done.stdout.index("failed (call); the end of what it says")
    assert done.stdout.index("a_line_to_be_seen") > first
    assert first < done.stdout.index("= FAILURES =")


@pytest.mark.thorough
def test_signals_that_a_shell_had_ignored_are_heard(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, HEARS, ignoring=True)
    assert done.returncode == pytest.ExitCode.OK, done.stdout


def test_the_former_alarm_comes_back() -> None:
    from tests.doubles.watch import watched

    before = signal.getsignal(signal.SIGALRM)
    with watched("inner", 5.0, 2):
        assert signal.getsignal(signal.SIGALRM) is not before
    assert signal.getsignal(signal.SIGALRM) is before
