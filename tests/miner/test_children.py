"""Processes that do one piece of work and talk in lines."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from miner.children import Silent, converse, own_environment

ENVIRONMENT = own_environment()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_it_gets_its_order_and_its_lines_are_heard() -> None:
    heard: list[bytes] = []
    code = "import sys; print('a' + input()); print('b', file=sys.stderr); sys.exit(5)"
    ended = await converse(python(code), b"order\n", heard.append, environment=ENVIRONMENT, max_line=100)
    assert (heard, ended.code, ended.noise) == ([b"aorder\n"], 5, b"b\n")


async def test_a_line_that_is_too_long_is_skipped() -> None:
    heard: list[bytes] = []
    code = "print('x' * 5000, flush=True); print('short')"
    await converse(python(code), b"\n", heard.append, environment=ENVIRONMENT, max_line=1000)
    assert heard[-1] == b"short\n"
    assert all(len(line) <= 1000 for line in heard)


async def test_silence_ends_it() -> None:
    with pytest.raises(Silent):
        await converse(
            python("import time; time.sleep(60)"),
            b"\n",
            print,
            environment=ENVIRONMENT,
            max_line=100,
            silence=0.2,
        )


async def test_a_cancelled_one_is_gone() -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    task = asyncio.create_task(
        converse(python(code), b"\n", heard.put_nowait, environment=ENVIRONMENT, max_line=100)
    )
    pid = int(await heard.get())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_what_can_not_be_started_is_told() -> None:
    with pytest.raises(OSError, match="nothing"):
        await converse(["/nothing"], b"", print, environment=ENVIRONMENT, max_line=100)


def test_its_environment_finds_our_code_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WALLET_PASSWORD", "OPERATOR_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    made = own_environment(MORE="1")
    assert "secret" not in made.values()
    assert (made["MORE"], made["PATH"]) == ("1", os.environ["PATH"])
    assert (Path(made["PYTHONPATH"].split(os.pathsep)[0]) / "miner/children.py").exists()
