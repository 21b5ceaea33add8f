"""The load generator's own ceiling. A server's figure near it says nothing about the server."""

from __future__ import annotations

from statistics import median

from benchmarks import subjects
from benchmarks.load_kind import LoadKind
from benchmarks.report import Report, errors_of, latency


def run(quick: bool) -> Report:
    rounds, requests = (1, 5_000) if quick else (3, 20_000)
    report = Report(
        "The load generator against a server that looks at nothing, 50 at once",
        ("request", "req/s", "p50 ms", "p99 ms", "own CPU per request", "errors"),
    )
    with subjects.ground() as ground, subjects.bare_server(ground) as server:
        for kind in (LoadKind.HEALTH, LoadKind.OFFER):
            runs = [subjects.load(ground, server.port, kind, requests) for _ in range(rounds)]
            report.data[kind.value] = runs
            report.rows.append(
                (
                    kind.value,
                    f"{median(run['per_second'] for run in runs):,.0f}",
                    latency(runs, "p50"),
                    latency(runs, "p99"),
                    f"{1e6 * median(run['own_cpu_s'] / max(1, run['answered']) for run in runs):.0f} µs",
                    str(sum(run["errors"] for run in runs)),
                )
            )
            report.notes += errors_of(kind.value, runs)
    report.notes.append(f"Medians of {rounds} rounds of {requests:,}; requests were signed beforehand.")
    return report
