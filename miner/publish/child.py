"""Runs one publishing process: hands it its order, passes on what it tells, ends it when it is time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import miner
from miner.publish.words import MAX_LINE, Event, Failed, Order, Trouble, event_in

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "miner.publish.worker")
#: What a client of the hub needs to know of this machine; nothing of ours is in it, and no secret.
_PASSED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "HF_HUB_DISABLE_XET",
    "HF_XET_HIGH_PERFORMANCE",
)
_LAST_WORDS = 4000
END_SECONDS = 5.0


class Stalled(Exception):
    """Nothing was heard for too long."""


class Child:
    """One process, for one order."""

    def __init__(
        self,
        order: Order,
        cache: Path,
        *,
        deduplicate: bool = True,
        worker: Sequence[str] = WORKER,
        redact: Callable[[str], str] = lambda text: text,
    ) -> None:
        self._order = order
        self._worker = worker
        self._environment = environment(cache, deduplicate=deduplicate)
        self._redact = redact

    async def run(self, heard: Callable[[Event], None], silence: float) -> Event:
        """The last event, which is the answer; `Stalled` after `silence` seconds without any. The process is
        gone when this returns, is cancelled or raises."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._worker,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=self._environment,
                limit=MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:
            return Failed(trouble=Trouble.CRASHED, text=f"the publishing process can't be started: {error}")
        assert process.stdin is not None
        assert process.stderr is not None
        noise = asyncio.create_task(_tail(process.stderr))
        try:
            with contextlib.suppress(ConnectionError):
                # Its input stays open: when it closes, the process knows that nobody waits any more.
                process.stdin.write(self._order.model_dump_json().encode() + b"\n")
                await process.stdin.drain()
            answer: Event | None = None
            async for event in _events(process, silence):
                answer = event
                heard(event)
            # It has nothing more to say; one that hangs in its own end is not waited for.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_SECONDS)
        finally:
            await _end(process)
            said = self._redact((await noise).decode(errors="replace")).strip()
            if said:
                log.debug("the publishing process said: %s", said)
        if answer is None or answer.event in ("stage", "progress", "note"):
            last = said.rpartition("\n")[2]
            text = f"the publishing process ended with status {process.returncode} and no answer: {last}"
            return Failed(trouble=Trouble.CRASHED, text=text)
        return answer


def environment(cache: Path, *, deduplicate: bool) -> dict[str, str]:
    """It has to find this very package, wherever the daemon was started, and keeps to its own folder."""
    found = {name: os.environ[name] for name in _PASSED if name in os.environ}
    found |= {
        "PYTHONPATH": str(Path(miner.__file__).parent.parent),
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": str(cache),
        "HF_XET_CACHE": str(cache / "xet"),
        # Each piece of 64 MB that was stored is remembered at once; by default an upload that is killed
        # forgets its last 20 s.
        "HF_XET_SESSION_XORB_METADATA_FLUSH_MAX_COUNT": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "DO_NOT_TRACK": "1",
    }
    if not deduplicate:
        found["HF_HUB_DISABLE_XET"] = "1"
    return _with_path(found)


def _with_path(found: Mapping[str, str]) -> dict[str, str]:
    given = os.environ.get("PYTHONPATH")
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, (found["PYTHONPATH"], given)))}


async def _events(process: asyncio.subprocess.Process, silence: float) -> AsyncIterator[Event]:
    assert process.stdout is not None
    while True:
        try:
            line = await asyncio.wait_for(process.stdout.readline(), silence)
        except TimeoutError:
            raise Stalled(f"nothing was heard of the upload for {silence:g} s") from None
        except ValueError:
            continue  # longer than any event of ours
        if not line:
            return
        event = event_in(line)
        if event is not None:
            yield event


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while piece := await stream.read(_LAST_WORDS):
        kept = (kept + piece)[-_LAST_WORDS:]
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGKILL: what it had sent stays sent, and a commit happens or does not."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
