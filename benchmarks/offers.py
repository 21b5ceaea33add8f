"""Signed offers at 50 concurrent: the daemon and a stand-in for the reference stack, in turns.

All servers run all the time and are asked one after the other, round after round, so that a machine that
grows busier or warmer does so for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks import subjects
from benchmarks.report import Report, errors_of, latency
from miner.dev import stack
from miner.dev.presign import LoadKind

OURS = "god-miner"
REFERENCE = "reference stand-in"
#: The same two with a line in the log for every request, as both are run by default.
OURS_LOGGING = "god-miner, INFO log"
REFERENCE_LOGGING = "reference stand-in, INFO log"
#: What bounds us: the least one process can do, and two of ours that share nothing, not even nonces.
FLOOR = "signature and a row, no more"
TWO = "two of god-miner, apart"
#: For the plans of the tasks that are offered to be remembered: a validator's offers repeat themselves too.
WARM_UP = 400
CONCURRENCY = 50
_LATENCIES = ("p50", "p90", "p99", "max")


def run(quick: bool) -> Report:
    rounds, requests = (2, 1_000) if quick else (11, 1_900)
    runs = _rounds(rounds, requests)
    report = Report(
        "Signed offers, 50 at once, load generator on the same machine",
        ("server", "req/s", *(f"{name} ms" for name in _LATENCIES), "errors", "generator CPU"),
        data={"rounds": rounds, "requests": requests, "runs": runs},
    )
    rates = {name: median(run["per_second"] for run in done) for name, done in runs.items()}
    for name, done in runs.items():
        report.rows.append(
            (
                name,
                f"{rates[name]:,.0f}",
                *(latency(done, share) for share in _LATENCIES),
                str(sum(run["errors"] + run["unsent"] for run in done)),
                f"{100 * median(run['own_cpu_s'] / run['seconds'] for run in done):.0f}% of a core",
            )
        )
    report.data["ratio"] = {
        "WARNING": rates[OURS] / rates[REFERENCE],
        "INFO": rates[OURS_LOGGING] / rates[REFERENCE_LOGGING],
    }
    report.notes += [note for name, done in runs.items() for note in errors_of(name, done)]
    report.notes += [
        f"Medians of {rounds} interleaved rounds of {requests:,} offers each, after a warm-up; "
        "one CPython process per server. Without INFO in its name a server ran at log level WARNING.",
        _ratio(runs, OURS, REFERENCE),
        _ratio(runs, OURS_LOGGING, REFERENCE_LOGGING),
        _ratio(runs, FLOOR, REFERENCE) + " The least that keeps the protocol's promises in one process.",
        _ratio(runs, TWO, REFERENCE)
        + " Each with half of the connections: more than two workers could reach "
        "that share their nonces and books.",
        f"{OURS}'s p99 by round: {', '.join(latency([run], 'p99') for run in runs[OURS])} ms.",
        "God-miner judges every offer by policy and profile h100x8 for a pretended host of 8 H100; a few are "
        "accepted and hold it, the others are refused with all their reasons. Its answers are on disk before "
        "they are sent; the stand-in accepts all and stores nothing.",
    ]
    return report


def _ratio(runs: dict[str, list[dict[str, Any]]], ours: str, theirs: str) -> str:
    by_round = [
        our["per_second"] / their["per_second"]
        for our, their in zip(runs[ours], runs[theirs], strict=True)
        if their["per_second"]
    ]
    return (
        f"{ours} : {theirs} = {median(by_round):.2f} : 1 in requests per second, "
        f"{min(by_round):.2f} to {max(by_round):.2f} by round."
    )


def _rounds(rounds: int, requests: int) -> dict[str, list[dict[str, Any]]]:
    with ExitStack() as running:
        quiet, logging, other = (running.enter_context(subjects.ground()) for _ in range(3))
        silent = {**subjects.OPEN_LIMITS, **subjects.QUIET}
        servers = {
            OURS: (quiet, stack.daemon(quiet, silent)),
            OURS_LOGGING: (logging, stack.daemon(logging, subjects.OPEN_LIMITS)),
            REFERENCE: (quiet, subjects.reference(quiet)),
            REFERENCE_LOGGING: (logging, subjects.reference(logging, "info")),
            FLOOR: (quiet, subjects.floor_server(quiet)),
        }
        second = (other, stack.daemon(other, silent))
        for ground, server in (*servers.values(), second):
            running.enter_context(server)
            subjects.load(ground, server.port, LoadKind.OFFER, WARM_UP, seed=10**6)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*servers, TWO)}
        for number in range(rounds):
            for name, (ground, server) in servers.items():
                runs[name].append(
                    subjects.load(ground, server.port, LoadKind.OFFER, requests, seed=number + 1)
                )
            runs[TWO].append(_both([servers[OURS], second], requests, seed=1000 + number))
    return runs


def _both(
    servers: Sequence[tuple[stack.Stack, stack.ChildProcess]], requests: int, seed: int
) -> dict[str, Any]:
    """Asked at the same time, each by half of the connections."""
    with ThreadPoolExecutor(len(servers)) as threads:
        asked = [
            threads.submit(
                subjects.load,
                ground,
                server.port,
                LoadKind.OFFER,
                requests,
                CONCURRENCY // len(servers),
                seed,
            )
            for ground, server in servers
        ]
        parts = [one.result() for one in asked]
    worst = max(parts, key=lambda part: part["latency_ms"]["p99"])
    summed = {name: sum(part[name] for part in parts) for name in ("per_second", "errors", "unsent")}
    return {**worst, **summed, "own_cpu_s": sum(part["own_cpu_s"] for part in parts)}
