"""Run child processes that do one piece of work for the daemon and answer in lines.

They are processes because reading gigabytes and waiting for clients without time limits do not belong in
the daemon, and because a process can be ended at any instant. A child gets its order as the first line of
its standard input, which stays open: when it closes, the daemon is gone and the child exits.
`miner.support.child_main` is the child's half.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from pydantic import BaseModel

import miner
from miner.support.child_main import ChildProtocol, EventT, OrderT, line_of

log = logging.getLogger(__name__)

#: What programs need to know of this machine; no setting and no secret of ours.
PASSED_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
#: How long to wait for the exit of a child that has closed its output.
END_SECONDS = 5.0
_KEPT_NOISE_BYTES = 4000


class ChildSilent(Exception):
    """The child has written nothing for too long."""


@dataclass(frozen=True)
class ChildResult:
    """The end of a child process."""

    code: int | None
    #: The end of its standard error; libraries may write secrets there.
    noise: bytes


@dataclass(frozen=True)
class ChildAnswer(Generic[EventT]):
    """The last event of a child, and how it ended."""

    event: EventT | None
    code: int | None
    #: The end of its standard error, redacted.
    noise: str

    @property
    def ending(self) -> str:
        """Describe the end of a child whose last event is not an answer."""
        return f"ended with status {self.code} and no answer: {self.noise.rpartition(chr(10))[2][-300:]}"


async def run_order(
    protocol: ChildProtocol[OrderT, EventT],
    order: BaseModel,
    on_event: Callable[[EventT], None],
    *,
    environment: Mapping[str, str],
    silence: float | None = None,
    redact: Callable[[str], str] = lambda text: text,
    command: Sequence[str] | None = None,
) -> ChildAnswer[EventT]:
    """Have a worker carry out one order; raises and ends it as `run_child` does."""
    last: EventT | None = None

    def on_line(line: bytes) -> None:
        nonlocal last
        if (event := protocol.event_in(line)) is not None:
            last = event
            on_event(event)

    result = await run_child(
        command or protocol.command,
        line_of(order),
        on_line,
        environment=environment,
        max_line=protocol.max_line,
        silence=silence,
    )
    noise = redact(result.noise.decode(errors="replace")).strip()
    if noise:
        log.debug("%s wrote: %s", protocol.module, noise)
    return ChildAnswer(last, result.code, noise)


async def run_child(
    command: Sequence[str],
    order: bytes,
    on_line: Callable[[bytes], None],
    *,
    environment: Mapping[str, str],
    max_line: int,
    silence: float | None = None,
    passed: Sequence[int] = (),
) -> ChildResult:
    """Start a child, write its order and pass on its lines. `passed` are open files that it gets besides.

    The child is gone when this returns, raises or is cancelled. `OSError` when it cannot be started,
    `ChildSilent` after `silence` seconds without a line. It is ended with SIGKILL: whatever such a process
    does must survive that anyway.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=dict(environment),
        limit=max_line,
        start_new_session=True,
        pass_fds=passed,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    noise = asyncio.create_task(_read_noise(process.stderr))
    try:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(order)
            await process.stdin.drain()
        await _pass_on_lines(process, on_line, silence)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started: the session is its own
            await process.wait()
        # What it left running may keep standard error open.
        await asyncio.wait({noise}, timeout=END_SECONDS)
        noise.cancel()
    return ChildResult(process.returncode, noise.result() if noise.done() and not noise.cancelled() else b"")


def worker_environment(*names: str, **more: str) -> dict[str, str]:
    """The environment of a child that runs our code; `names` are further variables to pass on."""
    passed = {name: os.environ[name] for name in (*PASSED_VARIABLES, *names) if name in os.environ}
    return {**passed, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **more}


def python_path() -> str:
    """`PYTHONPATH` for a child that must find this very package, wherever the daemon was started."""
    root = str(Path(miner.__file__).parent.parent)
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


async def _pass_on_lines(
    process: asyncio.subprocess.Process, on_line: Callable[[bytes], None], silence: float | None
) -> None:
    assert process.stdout is not None
    while True:
        try:
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes with a line.
            async with asyncio.timeout(silence):
                line = await process.stdout.readline()
        except TimeoutError:
            raise ChildSilent(f"no line for {silence:g} s") from None
        except ValueError:
            continue  # longer than any event
        if not line:
            return
        on_line(line)


async def _read_noise(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while piece := await stream.read(_KEPT_NOISE_BYTES):
        kept = (kept + piece)[-_KEPT_NOISE_BYTES:]
    return kept
