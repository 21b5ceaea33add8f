"""Signed offers at 50 concurrent: the daemon and a stand-in for the reference stack, in turns.

All servers run all the time and are asked one after the other, round after round, so that a machine that
grows busier or warmer does so for each of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks import subjects
from benchmarks.report import Report, errors_of, latency
from miner.dev import stack
from miner.dev.presign import LoadKind

OURS = "god-miner"
OURS_LOGGING = "god-miner, INFO log"
REFERENCE = "reference stand-in"
_LATENCIES = ("p50", "p90", "p99", "max")


def run(quick: bool) -> Report:
    rounds, requests = (2, 2_000) if quick else (5, 5_000)
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
    report.notes += [note for name, done in runs.items() for note in errors_of(name, done)]
    ratios = [
        ours["per_second"] / theirs["per_second"]
        for ours, theirs in zip(runs[OURS], runs[REFERENCE], strict=True)
    ]
    report.data["ratio"] = rates[OURS] / rates[REFERENCE]
    report.notes += [
        f"Medians of {rounds} interleaved rounds of {requests:,} offers each, after a warm-up; "
        "one CPython process per server, both at log level WARNING.",
        f"{OURS} : {REFERENCE} = {report.data['ratio']:.2f} : 1 in requests per second "
        f"({min(ratios):.2f} to {max(ratios):.2f} by round). "
        f"{OURS}'s p99 by round: {', '.join(latency([run], 'p99') for run in runs[OURS])} ms.",
        "Every answer of god-miner is on disk before it is sent; the stand-in stores nothing.",
    ]
    return report


def _rounds(rounds: int, requests: int) -> dict[str, list[dict[str, Any]]]:
    with ExitStack() as running:
        quiet, logging = (running.enter_context(subjects.ground()) for _ in range(2))
        servers = {
            OURS: (quiet, stack.daemon(quiet, {**subjects.OPEN_LIMITS, **subjects.QUIET})),
            OURS_LOGGING: (logging, stack.daemon(logging, subjects.OPEN_LIMITS)),
            REFERENCE: (quiet, subjects.reference(quiet)),
        }
        for ground, server in servers.values():
            running.enter_context(server)
            subjects.load(ground, server.port, LoadKind.OFFER, 500, seed=10**6)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for number in range(rounds):
            for name, (ground, server) in servers.items():
                runs[name].append(
                    subjects.load(ground, server.port, LoadKind.OFFER, requests, seed=number + 1)
                )
    return runs
