"""Keep a current metagraph: read it in the background from the settings' source, cache it on disk.

Whoever answers validators reads `current` and never waits. A refresh replaces the whole object. While the
chain is down the last good metagraph stays, also across a restart; past `stale_seconds` an alert is raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from core.domain.errors import GodMinerError
from core.system.files import write_atomically
from miner.api.status import ChainStatus
from miner.chain.metagraph import (
    ChainSource,
    ChainUnavailable,
    Metagraph,
    NodeRow,
    WrongChain,
    node_problems,
    nodes_from_rows,
)
from miner.observe.alerts import AlertKind, SendAlert

log = logging.getLogger(__name__)

#: Its name in the data directory.
METAGRAPH_FILE = "metagraph.json"


class _CachedMetagraph(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    source: str
    netuid: int
    genesis: str | None
    block: int | None
    fetched_at: float
    nodes: list[NodeRow]


def save_metagraph(path: Path, graph: Metagraph) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: getattr(graph, name) for name in ("source", "netuid", "genesis", "block", "fetched_at")}
    document = _CachedMetagraph(**values, nodes=[NodeRow(**asdict(node)) for node in graph.nodes])
    write_atomically(path, document.model_dump_json().encode())


def load_metagraph(path: Path, source: ChainSource) -> Metagraph | None:
    """The cached metagraph, or None and a log line if it is damaged or not of the subnet of `source`."""
    try:
        cached = _CachedMetagraph.model_validate_json(path.read_bytes())
        values = cached.model_dump(exclude={"format", "nodes"})
        graph = Metagraph(**values, nodes=nodes_from_rows(cached.nodes))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = node_problems(error)[0] if isinstance(error, ValidationError) else error
        log.warning("ignoring the metagraph cache %s: %s", path, problem)
        return None
    if not is_of_source(graph, source):
        log.warning(
            "ignoring the metagraph cache %s: it is of subnet %d from %s, not of subnet %d from %s",
            path,
            graph.netuid,
            graph.source,
            source.netuid,
            source.name,
        )
        return None
    return graph


def is_of_source(graph: Metagraph, source: ChainSource) -> bool:
    """Return True if a metagraph is of the subnet and the chain that `source` serves.

    Chains are distinguished by genesis hash where both are known, so that moving to another node of the same
    chain keeps the cache; by the source's name where not.
    """
    if graph.netuid != source.netuid:
        return False
    if graph.genesis is not None and source.genesis is not None:
        return graph.genesis == source.genesis
    return graph.source == source.name


class RefreshTimes(NamedTuple):
    """Interval for reading hotkeys and stakes, and the age at which they count as stale, with an alert."""

    every_s: float = 300.0
    stale_s: float = 3600.0


REFRESH_TIMES = RefreshTimes()

#: The first wait after a failed refresh; doubles up to the ordinary interval.
RETRY_SECONDS = 5.0

#: Alerts by the code of the error.
_ALERTS = {
    "wrong_chain": AlertKind.WRONG_CHAIN,
    "no_such_subnet": AlertKind.NO_SUCH_SUBNET,
    "bad_nodes_file": AlertKind.BAD_NODES_FILE,
}


class MetagraphRefresher:
    def __init__(
        self,
        source: ChainSource,
        *,
        cache_path: Path | None,
        times: RefreshTimes = REFRESH_TIMES,
        on_alert: SendAlert = lambda *_: None,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.source = source
        self.current: Metagraph | None = None
        self._cache_path = cache_path
        self._times = times
        self._on_alert = on_alert
        #: Called with every metagraph that is read.
        self.on_refresh: Callable[[Metagraph], None] = lambda _graph: None
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
        """Serve the copy on disk, if there is one, and start refreshing. Waits for no network."""
        self._started_at = self._clock()
        if self._cache_path is not None and self.current is None:
            self.current = load_metagraph(self._cache_path, self.source)
        if self.current is not None:
            log.info("serving the cached metagraph of %s, %.0f s old", self.current.source, self.age() or 0)
        self._task = asyncio.create_task(self._run(), name="metagraph-refresher")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def age(self) -> float | None:
        """Seconds since the metagraph was read, 0 if the clock was set back since then."""
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
        """Read the metagraph now. False if that failed: `status` says why, `current` stays as it was."""
        async with self._lock:
            try:
                graph = await self.source.metagraph()
            except GodMinerError as error:
                self._note_failure(error)
                return False
            self._note_success(graph)
            await self._save(graph)
            self.on_refresh(graph)
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
        usual = min(self._times.every_s, self.source.poll_seconds or self._times.every_s)
        if self._failures == 0:
            return usual
        return float(min(usual, RETRY_SECONDS * 2 ** min(self._failures - 1, 16)))

    def _note_success(self, graph: Metagraph) -> None:
        if self.current is not None and not is_of_source(self.current, self.source):
            log.warning("%s serves another chain than before: genesis %s", graph.source, graph.genesis)
        self.current = graph
        self._failures = 0
        self._last_error = self._last_error_at = None
        if self._alerted:
            self._alerted.clear()
            self._on_alert(
                AlertKind.METAGRAPH_RECOVERED,
                f"the metagraph of {graph.source} is fresh again: {len(graph.nodes)} nodes",
            )

    def _note_failure(self, error: GodMinerError) -> None:
        if self._failures == 0 or str(error) != str(self._last_error):
            log.warning("could not refresh the metagraph from %s: %s", self.source.name, error)
        self._failures += 1
        self._last_error, self._last_error_at = error, self._clock()
        if self.current is not None and not self._may_keep_serving(self.current, error):
            log.error("no longer serving the metagraph of %s: it is of another chain", self.current.source)
            self.current = None
        # A chain that is down for a minute needs nobody. Any other error needs the operator.
        if not isinstance(error, ChainUnavailable):
            kind = _ALERTS.get(error.code, AlertKind.CHAIN)
            self._alert_once(kind, str(error), key=f"{kind}: {error}")
        if self._is_stale():
            self._alert_once(
                AlertKind.METAGRAPH_STALE, self._stale_text(error), key=AlertKind.METAGRAPH_STALE
            )

    def _may_keep_serving(self, graph: Metagraph, error: GodMinerError) -> bool:
        """Also after a node of the wrong chain answered: that says nothing about what the right one sent."""
        return isinstance(error, WrongChain) or is_of_source(graph, self.source)

    def _is_stale(self) -> bool:
        """Without a metagraph, its age counts from the start of the daemon."""
        age = self.age()
        return (self._clock() - self._started_at if age is None else age) > self._times.stale_s

    def _stale_text(self, error: GodMinerError) -> str:
        age = self.age()
        state = "there is no metagraph at all" if age is None else f"the metagraph is {age:.0f} s old"
        return f"{state}, older than {self._times.stale_s:g} s: {error}"

    def _alert_once(self, kind: AlertKind, text: str, *, key: str) -> None:
        if key not in self._alerted:
            self._alerted.add(key)
            self._on_alert(kind, text)

    async def _save(self, graph: Metagraph) -> None:
        """Write it to disk, unless it is there already."""
        state = (graph.nodes, graph.block, graph.genesis)
        if self._cache_path is None or state == self._saved:
            return
        try:
            await asyncio.to_thread(save_metagraph, self._cache_path, graph)
        except OSError as error:
            log.warning("could not write the metagraph to %s: %s", self._cache_path, error)
            return
        self._saved = state
