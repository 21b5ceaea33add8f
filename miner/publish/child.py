"""Runs one publishing process: hands it its order, passes on what it tells, ends it when it is time."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from miner.children import Silent, converse, own_environment
from miner.publish.words import MAX_LINE, Event, Failed, Order, Trouble, event_in

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "miner.publish.worker")
#: What an operator may tell the hub's client.
_PASSED = ("HF_HUB_DISABLE_XET", "HF_XET_HIGH_PERFORMANCE")


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
        answer: Event | None = None

        def heard_line(line: bytes) -> None:
            nonlocal answer
            event = event_in(line)
            if event is not None:
                answer = event
                heard(event)

        try:
            ended = await converse(
                self._worker,
                self._order.model_dump_json().encode() + b"\n",
                heard_line,
                environment=self._environment,
                max_line=MAX_LINE,
                silence=silence,
            )
        except OSError as error:
            return Failed(trouble=Trouble.CRASHED, text=f"the publishing process can't be started: {error}")
        except Silent:
            raise Stalled(f"nothing was heard of the upload for {silence:g} s") from None
        said = self._redact(ended.noise.decode(errors="replace")).strip()
        if said:
            log.debug("the publishing process said: %s", said)
        if answer is None or answer.event in ("stage", "progress", "note"):
            last = said.rpartition("\n")[2]
            text = f"the publishing process ended with status {ended.code} and no answer: {last}"
            return Failed(trouble=Trouble.CRASHED, text=text)
        return answer


def environment(cache: Path, *, deduplicate: bool) -> dict[str, str]:
    """It keeps to its own folder."""
    found = own_environment(
        *_PASSED,
        HF_HOME=str(cache),
        HF_XET_CACHE=str(cache / "xet"),
        # Each piece of 64 MB that was stored is remembered at once; by default an upload that is killed
        # forgets its last 20 s.
        HF_XET_SESSION_XORB_METADATA_FLUSH_MAX_COUNT="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_IMPLICIT_TOKEN="1",  # noqa: S106 - a switch
        DO_NOT_TRACK="1",
    )
    return found if deduplicate else {**found, "HF_HUB_DISABLE_XET": "1"}
