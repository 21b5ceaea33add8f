"""Counters of a running daemon for Prometheus. The other numbers are in `miner/http/prometheus.py`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.process_collector import ProcessCollector

# A second series for each counter and bucket, which nothing here reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 3.0, 10.0)


class Metrics:
    """One registry per daemon, so that tests can have many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "god_miner_requests", "Requests on the public port", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "god_miner_request_seconds",
            "Time to answer a request",
            ["route"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        offers = Counter("god_miner_offers", "Offers decided", ["answer"], registry=self.registry)
        self._accepted, self._refused = offers.labels("accepted"), offers.labels("refused")
        self.starts = Counter("god_miner_starts", "Starts taken", ["kind"], registry=self.registry)
        for kind in ("new", "repeated"):  # from 0 on: a rate would miss the first one
            self.starts.labels(kind)
        self.alerts = Counter("god_miner_alerts", "Alerts raised", ["kind"], registry=self.registry)
        self._observed: dict[tuple[str, int], tuple[Callable[[], None], Callable[[float], None]]] = {}

    def count_request(self, route: str, status: int, seconds: float) -> None:
        known = self._observed.get((route, status))
        if known is None:  # finding a labelled child takes longer than counting
            counter = self._requests.labels(route, str(status))
            known = self._observed[route, status] = (counter.inc, self._seconds.labels(route).observe)
        count, observe = known
        count()
        observe(seconds)

    def count_offer(self, *, accepted: bool) -> None:
        (self._accepted if accepted else self._refused).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)
