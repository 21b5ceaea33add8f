"""Signed offers at 50 concurrent: the daemon and a stand-in for the reference stack, in turns.

Three streams: the same few tasks again and again; 240 shapes under names never seen; and offers of which
name, size, hours, rows and type are all new, so that nothing of an earlier answer helps. Both servers run all
the time and are asked one after the other, round after round, so that a machine that grows busier or warmer
does so for both of them.

The first offers fill the fleet, as on a miner that is in use. A second daemon, whose policy accepts nothing,
is asked the new offers too: it plans each of them for idle GPUs.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks import machine, subjects
from benchmarks.load_kind import LoadKind
from benchmarks.report import Report, errors_of, latency
from miner.dev import stack

OURS = "god-miner"
IDLE = "god-miner, idle GPUs"
REFERENCE = "reference stand-in"
STREAMS = {
    "repeated": LoadKind.OFFER,
    "240 shapes": LoadKind.SHAPED_OFFER,
    "all new": LoadKind.NEW_OFFER,
}
#: What is to hold: requests per second relative to the reference, and p99 in ms.
BARS = {"repeated": (2.2, 100), "240 shapes": (2.0, 100), "all new": (0.9, 150)}
#: Every other rule is met; so each offer is planned and given a place, and no GPU is ever held.
NOTHING_ACCEPTED = "extends: h100x8\nrules:\n  min_value: 1e9\n"
#: Fills the fleet, and lets each server meet every shape.
WARM_UP = 2000
_LATENCIES = ("p50", "p90", "p99", "max")

Run = dict[str, Any]


def run(quick: bool) -> Report:
    rounds, requests = (2, 1_000) if quick else (7, 2_000)
    report = Report(
        "Signed offers, 50 at once, load generator on the same machine",
        ("stream", "server", "req/s", *(f"{name} ms" for name in _LATENCIES), "CPU ms", "RSS MB", "errors"),
        data={"rounds": rounds, "requests": requests},
    )
    for stream, runs in _measure(rounds, requests).items():
        report.data[stream] = runs
        report.rows += [_row(stream, name, done) for name, done in runs.items()]
        report.notes += [note for name, done in runs.items() for note in errors_of(name, done)]
        report.notes += [_ratio(stream, name, runs) for name in runs if name != REFERENCE]
    report.notes += [
        f"Medians of {rounds} interleaved rounds of {requests:,} offers each, after a warm-up; one CPython "
        "process per server, at log level WARNING. CPU is the server's own, per request.",
        "God-miner decides all offers by policy and profile h100x8 for a pretended host of 8 H100; a few are "
        "accepted and hold it, the others are refused, unplanned while no GPU is free in time. "
        "With idle GPUs every offer is planned, given a place and refused for its value. Its answers are on "
        "disk before they are sent; the stand-in accepts all and stores nothing.",
    ]
    return report


def _measure(rounds: int, requests: int) -> dict[str, dict[str, list[Run]]]:
    runs: dict[str, dict[str, list[Run]]] = {name: {} for name in STREAMS}
    with ExitStack() as running:
        ground, idle = running.enter_context(subjects.ground()), running.enter_context(subjects.ground())
        policy = idle.folder / "nothing-accepted.yaml"
        policy.write_text(NOTHING_ACCEPTED, encoding="utf-8")
        settings = {**subjects.OPEN_LIMITS, **subjects.QUIET}
        servers = {
            OURS: (ground, stack.daemon_process(ground, settings)),
            IDLE: (idle, stack.daemon_process(idle, {**settings, "POLICY": str(policy)})),
            REFERENCE: (ground, subjects.reference(ground)),
        }
        for on, server in servers.values():
            running.enter_context(server)
            subjects.load(on, server.port, LoadKind.SHAPED_OFFER, WARM_UP, seed=10**6)
        for stream, kind in STREAMS.items():
            for number in range(rounds):
                for name, (on, server) in servers.items():
                    if name != IDLE or kind is LoadKind.NEW_OFFER:
                        done = _asked(on, server, kind, requests, number + 1)
                        runs[stream].setdefault(name, []).append(done)
    return runs


def _asked(
    ground: stack.DevStack, server: stack.ChildProcess, kind: LoadKind, requests: int, seed: int
) -> Run:
    before = machine.cpu_s(server.pid)
    done = subjects.load(ground, server.port, kind, requests, seed=seed)
    cpu_ms = 1000 * (machine.cpu_s(server.pid) - before) / requests
    return {**done, "cpu_ms": cpu_ms, "rss_mb": machine.rss_mb(server.pid)}


def _row(stream: str, name: str, runs: list[Run]) -> tuple[str, ...]:
    return (
        stream,
        name,
        f"{median(run['per_second'] for run in runs):,.0f}",
        *(latency(runs, share) for share in _LATENCIES),
        f"{median(run['cpu_ms'] for run in runs):.2f}",
        f"{max(run['rss_mb'] for run in runs):.0f}",
        str(sum(run["errors"] + run["unsent"] for run in runs)),
    )


def _ratio(stream: str, name: str, runs: dict[str, list[Run]]) -> str:
    pairs = list(zip(runs[name], runs[REFERENCE], strict=True))
    rates = [our["per_second"] / their["per_second"] for our, their in pairs if their["per_second"]]
    cpu = [their["cpu_ms"] / our["cpu_ms"] for our, their in pairs if our["cpu_ms"]]
    bar, p99 = BARS[stream]
    return (
        f"{stream}, {name}: {median(rates):.2f} × the reference's requests per second ({min(rates):.2f} to "
        f"{max(rates):.2f} by round), {median(cpu):.2f} × by CPU time; the bar is {bar:g}, for p99 {p99} ms."
    )
