"""Processes that do one piece of work for the daemon and talk in lines.

In a process because reading gigabytes and waiting for clients without time limits have no place in the
daemon, and because a process can be ended at any instant and takes everything with it. It gets its order as
the first line of its input, which stays open: when it closes, the child knows that nobody waits any more and
ends itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import miner

#: What programs need to know of this machine; nothing of ours is in it, and no secret.
PASSED = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
#: One that has nothing more to say and hangs in its own end is not waited for.
END_SECONDS = 5.0
_LAST_WORDS = 4000


class Silent(Exception):
    """Nothing was heard for too long."""


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    code: int | None
    #: The end of what it said besides events; may hold secrets of libraries' making.
    noise: bytes


async def converse(
    command: Sequence[str],
    order: bytes,
    heard: Callable[[bytes], None],
    *,
    environment: Mapping[str, str],
    max_line: int,
    silence: float | None = None,
) -> Ended:
    """Start it, hand it its order, pass on its lines. It is gone when this returns, raises or is cancelled.

    `OSError` when it can't be started, `Silent` after `silence` seconds without a line. SIGKILL is how it is
    ended: what such a process does must bear that anyway.
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
    )
    assert process.stdin is not None
    assert process.stderr is not None
    noise = asyncio.create_task(_tail(process.stderr))
    try:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(order)
            await process.stdin.drain()
        await _listen(process, heard, silence)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SECONDS)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        said = await noise
    return Ended(process.returncode, said)


def own_environment(*names: str, **more: str) -> dict[str, str]:
    """For a child of our own code: it has to find this very package, wherever the daemon was started. `names`
    are further variables that are passed on."""
    found = {name: os.environ[name] for name in (*PASSED, *names) if name in os.environ}
    root = str(Path(miner.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**found, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


async def _listen(
    process: asyncio.subprocess.Process, heard: Callable[[bytes], None], silence: float | None
) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await asyncio.wait_for(process.stdout.readline(), silence)
        except TimeoutError:
            raise Silent(f"nothing was heard for {silence:g} s") from None
        except ValueError:
            continue  # longer than any line of ours
        if not line:
            return
        heard(line)


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while piece := await stream.read(_LAST_WORDS):
        kept = (kept + piece)[-_LAST_WORDS:]
    return kept
