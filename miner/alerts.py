"""What the operator should hear of: counted, logged, and in the books."""

from __future__ import annotations

import asyncio
import logging

from miner.metrics import Metrics
from miner.store.books import Books
from miner.store.writer import StoreUnavailable

log = logging.getLogger(__name__)

#: Good news: noted, no alarm.
_GOOD = frozenset({"gpu_back", "inventory_recovered", "engine_back", "metagraph_recovered"})


class Alerts:
    """Never fails and never waits: whoever has something to tell has something else to do."""

    def __init__(self, metrics: Metrics, books: Books) -> None:
        self._metrics = metrics
        self._books = books

    def __call__(self, kind: str, text: str) -> None:
        self._tell(kind, text)

    def of_gpu(self, kind: str, text: str, gpu: str | None = None) -> None:
        self._tell(kind, text, **({"gpu": gpu} if gpu else {}))

    def _tell(self, kind: str, text: str, **more: object) -> None:
        if kind in _GOOD:
            log.info("%s: %s", kind, text)
        else:
            self._metrics.alerts.labels(kind).inc()
            log.warning("alert %s: %s", kind, text)
            more["alert"] = True
        try:
            self._books.note(kind, None, text=text, **more).add_done_callback(_forgiven)
        except StoreUnavailable:  # before the books are open, after they are closed, or when the disk is full
            log.debug("the alert %s is not in the books", kind)


def _forgiven(future: asyncio.Future[None]) -> None:
    if not future.cancelled() and future.exception() is not None:
        log.debug("an alert is not in the books: %s", future.exception())
