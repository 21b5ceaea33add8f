"""Keep a miner on this machine busy and measure how long each answer takes.

    python -m benchmarks.load --kind offer --concurrency 50 --requests 5000 [--json]

Light enough to share two cores with the server it measures: requests are signed ahead in batches (not on
the clock, and within the two minutes that a nonce lives), connections are kept alive on uvloop, replies go
through the C parser. Only loopback may be aimed at: this is a test tool, not a weapon.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import json
import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from benchmarks.load_kind import LoadKind
from benchmarks.presign import EXPECTED, Presigner
from core.domain.errors import GodMinerError
from miner.chain.fiber import Signer
from miner.dev.stack import throwaway_keys

MAX_REQUESTS = 1_000_000
MAX_CONCURRENCY = 1_000
MAX_SECONDS = 600.0
#: Small enough that the first nonce of a batch is still fresh when its last one is sent.
BATCH = 5_000

_TIMED_OUT = "no answer in time"
_CUT_OFF = "cut off by the run's limit"
_LOST = "connection lost"
_UNREACHED = "not connected"
_NOT_HTTP = "not HTTP"


class LoadRefused(GodMinerError):
    """The load generator will not do what was asked."""

    code = "load_refused"


@dataclass(frozen=True)
class LoadPlan:
    """A load to send, bounded in every direction."""

    url: str
    kind: LoadKind = LoadKind.OFFER
    concurrency: int = 50
    requests: int = 5_000
    #: The whole run ends here, whatever is left.
    seconds: float = 120.0
    #: One request's limit.
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        _within("requests", self.requests, 1, MAX_REQUESTS)
        _within("concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        _within("seconds", self.seconds, 0.1, MAX_SECONDS)
        _within("timeout", self.timeout_s, 0.1, MAX_SECONDS)
        loopback_address(self.url)


@dataclass
class LoadReport:
    """Result of a load. Latencies are of answered requests; the rest is counted under `failures`."""

    plan: LoadPlan
    seconds: float = 0.0
    #: CPU the generator itself burnt while the clock ran: its share of the machine.
    own_cpu_s: float = 0.0
    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    statuses: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def answered(self) -> int:
        return sum(self.statuses.values())

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> int:
        """Requests without an answer, or with one of another status than the kind should get."""
        expected = EXPECTED[self.plan.kind]
        unexpected = sum(count for status, count in self.statuses.items() if status not in expected)
        return unexpected + sum(self.failures.values())

    @property
    def unsent(self) -> int:
        """Requests that the time limit left unsent."""
        return self.plan.requests - self.answered - sum(self.failures.values())

    def percentile_ms(self, share: float) -> float:
        """Nearest rank: a latency that was really seen."""
        ordered = sorted(self.latencies_s)
        if not ordered:
            return math.nan
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1000

    def as_json(self) -> dict[str, Any]:
        spread = {name: self.percentile_ms(share) for name, share in PERCENTILES.items()}
        return {
            "url": self.plan.url,
            "kind": self.plan.kind.value,
            "concurrency": self.plan.concurrency,
            "requests": self.plan.requests,
            "answered": self.answered,
            "unsent": self.unsent,
            "seconds": round(self.seconds, 4),
            "per_second": round(self.per_second, 1),
            "latency_ms": {n: None if math.isnan(ms) else round(ms, 3) for n, ms in spread.items()},
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "failures": dict(self.failures),
            "errors": self.errors,
            "own_cpu_s": round(self.own_cpu_s, 4),
        }


PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "max": 1.0}


def run_load(plan: LoadPlan, signer: Signer, miner_hotkey: str, seed: int = 0) -> LoadReport:
    """The whole run, in this process, on an event loop of its own."""
    host, port = loopback_address(plan.url)
    presigner = Presigner(f"{host}:{port}", signer, miner_hotkey, seed)
    return uvloop.run(_run_batches(plan, host, port, presigner))


def loopback_address(url: str) -> tuple[str, int]:
    """Host and port of a plain-http loopback address; anything else is refused."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise LoadRefused(f"url {url!r} is not an address ({error}); http://127.0.0.1:7999 is one") from None
    if parts.scheme != "http":
        raise LoadRefused(
            f"url {url!r} is of scheme {parts.scheme!r}; load is sent over plain http to loopback"
        )
    if parts.path.strip("/") or parts.query:
        raise LoadRefused(
            f"url {url!r} names a path; only the address is needed, as in http://127.0.0.1:7999"
        )
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise LoadRefused(
            f"host {host!r} is not loopback; load goes to this machine only: run it beside the server, "
            "with a url such as http://127.0.0.1:7999"
        )
    return host, port


async def _run_batches(plan: LoadPlan, host: str, port: int, presigner: Presigner) -> LoadReport:
    report = LoadReport(plan)
    left = plan.requests
    while left > 0 and report.seconds < plan.seconds:
        batch = presigner.batch(plan.kind, min(left, BATCH))
        left -= len(batch)
        # A collection over all that lives here would show up as the server's latency.
        gc.freeze()
        try:
            await _LoadBatch(plan, report, iter(batch)).fire(host, port, plan.seconds - report.seconds)
        finally:
            gc.unfreeze()
    return report


class _LoadBatch:
    """One batch of requests: what is left to send, and the open connections."""

    def __init__(self, plan: LoadPlan, report: LoadReport, requests: Iterator[bytes]) -> None:
        self.plan = plan
        self.report = report
        self.next_request = requests.__next__
        self.open: set[_LoadConnection] = set()

    async def fire(self, host: str, port: int, seconds: float) -> None:
        cpu, began = time.process_time(), time.perf_counter()
        watchdog = asyncio.create_task(self._abort_the_late())
        lanes = [asyncio.create_task(self._lane(host, port)) for _ in range(self.plan.concurrency)]
        _done, late = await asyncio.wait(lanes, timeout=seconds)
        self.report.seconds += time.perf_counter() - began
        self.report.own_cpu_s += time.process_time() - cpu
        for task in (watchdog, *late):
            task.cancel()
        for connection in list(self.open):
            connection.abort(_CUT_OFF)
        for outcome in await asyncio.gather(watchdog, *lanes, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _lane(self, host: str, port: int) -> None:
        """Connections one after the other for as long as there is something to send."""
        loop = asyncio.get_running_loop()
        for request in iter(self.next_or_none, None):
            try:
                async with asyncio.timeout(self.plan.timeout_s):
                    _, connection = await loop.create_connection(lambda: _LoadConnection(self), host, port)
            except (OSError, TimeoutError):
                self.report.failures[_UNREACHED] += 1
                continue
            connection.send(request)
            await connection.ended

    def next_or_none(self) -> bytes | None:
        try:
            return self.next_request()
        except StopIteration:
            return None

    async def _abort_the_late(self) -> None:
        """One clock for all: a timer per request would cost more than the request."""
        while True:
            await asyncio.sleep(min(0.25, self.plan.timeout_s / 4))
            deadline = time.perf_counter() - self.plan.timeout_s
            for connection in [one for one in self.open if one.sent_at and one.sent_at < deadline]:
                connection.abort(_TIMED_OUT)


class _LoadConnection(asyncio.Protocol):
    """Sends a request when the one before it has been answered."""

    def __init__(self, batch: _LoadBatch) -> None:
        self.batch = batch
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)
        #: When the request now under way was written; 0.0 when none is.
        self.sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no asyncio class; what create_connection gives can be written to.
        self.transport = cast(asyncio.Transport, transport)
        self.batch.open.add(self)

    def send(self, request: bytes) -> None:
        self.sent_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort(_NOT_HTTP)

    def on_message_complete(self) -> None:
        """The parser's call at the end of a reply. An interim 1xx reply is not one."""
        report, status = self.batch.report, self.parser.get_status_code()
        if status < 200 or not self.sent_at:
            return
        report.latencies_s.append(time.perf_counter() - self.sent_at)
        report.statuses[status] += 1
        self.sent_at = 0.0
        request = self.batch.next_or_none() if self.parser.should_keep_alive() else None
        if request is None:
            self.transport.close()
        else:
            self.send(request)

    def abort(self, failure: str) -> None:
        self._settle(failure)
        self.transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        self._settle(_LOST)
        self.batch.open.discard(self)
        if not self.ended.done():
            self.ended.set_result(None)

    def _settle(self, failure: str) -> None:
        """A request under way when the connection goes has failed, once."""
        if self.sent_at:
            self.batch.report.failures[failure] += 1
            self.sent_at = 0.0


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise LoadRefused(f"{name} {value:g} is out of bounds; {low:g} to {high:g} is allowed")


def print_report(report: LoadReport) -> None:
    plan = report.plan
    print(f"{report.answered} of {plan.requests} {plan.kind} requests answered, {plan.concurrency} at once")
    for name, share in PERCENTILES.items():
        print(f"  {name:<14} {report.percentile_ms(share):.1f} ms")
    share = report.own_cpu_s / report.seconds if report.seconds else 0.0
    print(f"  {'req/s':<14} {report.per_second:,.0f}\n  {'errors':<14} {report.errors}")
    print(f"  {'statuses':<14} {dict(sorted(report.statuses.items()))}")
    print(f"  {'failures':<14} {dict(report.failures)}")
    print(f"  {'generator CPU':<14} {share:.0%}")


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a request got no answer, or not the one that its kind should get."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description="Loopback only.")
    parser.add_argument("--url", default="http://127.0.0.1:7999", help="the miner's public address")
    parser.add_argument("--kind", type=LoadKind, default=LoadKind.OFFER, help=", ".join(LoadKind))
    parser.add_argument("--concurrency", type=int, default=50, help="requests at once")
    parser.add_argument("--requests", type=int, default=5000, help="requests in all")
    parser.add_argument("--seconds", type=float, default=120.0, help="stop after this long")
    parser.add_argument("--dir", type=Path, default=Path(".god-miner/dev"), help="where the keys are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        plan = LoadPlan(options.url, options.kind, options.concurrency, options.requests, options.seconds)
        keys = throwaway_keys(options.dir)
    except GodMinerError as error:
        parser.error(str(error))
    report = run_load(plan, keys.validator, keys.miner.ss58_address, options.seed)
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print_report(report)
    return 1 if report.errors or report.unsent else 0


if __name__ == "__main__":
    sys.exit(main())
