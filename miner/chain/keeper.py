"""Keeps a metagraph at hand: read in the background, kept on disk, served however old it is.

Whoever answers validators reads `current` and never waits. A refresh swaps the object whole; when the chain
is down the last good one stays, its age grows, and past `stale_seconds` the alert hook hears of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.errors import GodMinerError
from miner.chain import cache
from miner.chain.base import ChainSource, Metagraph
from miner.chain.errors import ChainUnavailable, WrongChain

log = logging.getLogger(__name__)

#: The first wait after a failed refresh; doubles up to the ordinary interval.
RETRY_SECONDS = 5.0

STALE = "metagraph_stale"
RECOVERED = "metagraph_recovered"


@dataclass(frozen=True)
class ChainStatus:
    """The metagraph's state, to be shown. `last_error` is of the latest refresh, None if that one worked."""

    source: str
    netuid: int
    block: int | None
    age: float | None
    nodes: int
    last_error: str | None
    last_error_at: float | None
    stale: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class MetagraphKeeper:
    def __init__(
        self,
        source: ChainSource,
        *,
        cache_path: Path | None,
        refresh_seconds: float,
        stale_seconds: float,
        on_alert: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.source = source
        self.current: Metagraph | None = None
        self._cache_path = cache_path
        self._refresh_seconds = refresh_seconds
        self._stale_seconds = stale_seconds
        self._on_alert = on_alert
        self._clock = clock
        self._pause = pause
        self._started_at = clock()
        self._saved: tuple[Any, ...] | None = None
        self._last_error: GodMinerError | None = None
        self._last_error_at: float | None = None
        self._failures = 0
        self._alerted: set[str] = set()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve the copy on disk, if there is one, and begin to refresh. Waits for no network."""
        self._started_at = self._clock()
        if self._cache_path is not None and self.current is None:
            self.current = cache.load(self._cache_path, self.source)
        if self.current is not None:
            log.info("serving the cached metagraph of %s, %.0f s old", self.current.source, self.age() or 0)
        self._task = asyncio.create_task(self._run(), name="metagraph-keeper")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self.source.close()

    def age(self) -> float | None:
        """Seconds since the metagraph was read; a clock set back since then counts as none."""
        return None if self.current is None else max(0.0, self._clock() - self.current.fetched_at)

    def status(self) -> ChainStatus:
        graph = self.current
        return ChainStatus(
            source=graph.source if graph else self.source.name,
            netuid=self.source.netuid,
            block=graph.block if graph else None,
            age=self.age(),
            nodes=len(graph.nodes) if graph else 0,
            last_error=str(self._last_error) if self._last_error else None,
            last_error_at=self._last_error_at,
            stale=self._is_stale(),
        )

    async def refresh_once(self) -> bool:
        """Read the metagraph now. False when that failed; `status` says why, `current` stays as it was."""
        async with self._lock:
            try:
                graph = await self.source.metagraph()
            except GodMinerError as error:
                self._note_failure(error)
                return False
            self._note_success(graph)
            await self._save(graph)
            return True

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh_once()
            except Exception:  # a bug in a source or an alert hook must not end the refreshing for good
                log.exception("refreshing the metagraph failed unexpectedly; trying again")
                self._failures += 1
            await self._pause(self._wait_seconds())

    def _wait_seconds(self) -> float:
        usual = min(self._refresh_seconds, self.source.poll_seconds or self._refresh_seconds)
        if self._failures == 0:
            return usual
        return float(min(usual, RETRY_SECONDS * 2 ** min(self._failures - 1, 16)))

    def _note_success(self, graph: Metagraph) -> None:
        if self.current is not None and not cache.belongs(self.current, self.source):
            log.warning("%s serves another chain than before: genesis %s", graph.source, graph.genesis)
        self.current = graph
        self._failures = 0
        self._last_error = self._last_error_at = None
        if self._alerted:
            self._alerted.clear()
            self._alert(
                RECOVERED, f"the metagraph of {graph.source} is fresh again: {len(graph.nodes)} nodes"
            )

    def _note_failure(self, error: GodMinerError) -> None:
        if self._failures == 0 or str(error) != str(self._last_error):
            log.warning("could not refresh the metagraph from %s: %s", self.source.name, error)
        self._failures += 1
        self._last_error, self._last_error_at = error, self._clock()
        if self.current is not None and not self._still_ours(self.current, error):
            log.error("no longer serving the metagraph of %s: it is of another chain", self.current.source)
            self.current = None
        # A chain that is down for a minute is nobody's business yet. Anything else waits for the operator.
        if not isinstance(error, ChainUnavailable):
            self._alert_once(error.code, str(error), key=f"{error.code}: {error}")
        if self._is_stale():
            self._alert_once(STALE, self._stale_text(error), key=STALE)

    def _still_ours(self, graph: Metagraph, error: GodMinerError) -> bool:
        """A node of the wrong chain says nothing about a metagraph read from the right one."""
        return isinstance(error, WrongChain) or cache.belongs(graph, self.source)

    def _is_stale(self) -> bool:
        """Having none since the start counts from the start."""
        age = self.age()
        return (self._clock() - self._started_at if age is None else age) > self._stale_seconds

    def _stale_text(self, error: GodMinerError) -> str:
        age = self.age()
        held = "there is no metagraph at all" if age is None else f"the metagraph is {age:.0f} s old"
        return f"{held}, older than METAGRAPH_STALE_SECONDS={self._stale_seconds:g}: {error}"

    def _alert_once(self, code: str, text: str, *, key: str) -> None:
        if key not in self._alerted:
            self._alerted.add(key)
            self._alert(code, text)

    def _alert(self, code: str, text: str) -> None:
        if self._on_alert is not None:
            self._on_alert(code, text)

    async def _save(self, graph: Metagraph) -> None:
        """Keep it on disk, unless it is what lies there already."""
        state = (graph.nodes, graph.block, graph.genesis)
        if self._cache_path is None or state == self._saved:
            return
        try:
            await asyncio.to_thread(cache.save, self._cache_path, graph)
        except OSError as error:
            log.warning("could not keep the metagraph on disk at %s: %s", self._cache_path, error)
            return
        self._saved = state
