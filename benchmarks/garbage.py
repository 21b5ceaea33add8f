"""Requests that must be refused, by the hundred thousand: does memory or the database grow?

The rate limits are opened wide, or all but the first few would be turned away before any check; a run with
the limits as shipped shows what a stranger really costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks import machine, subjects
from benchmarks.load_kind import LoadKind
from benchmarks.presign import GARBAGE_KINDS
from benchmarks.report import Report, latency
from miner.dev import stack

TOTAL = 100_000
STEP = 10_000
EXTRAPOLATED = 1_000_000


def run(quick: bool, kinds: tuple[LoadKind, ...] = (LoadKind.GARBAGE,)) -> Report:
    total, step = (10_000, 1_000) if quick else (TOTAL, STEP)
    report = Report(
        "Garbage: what the daemon holds while it refuses",
        ("requests", "limits", "req/s", "p99 ms", "RSS MB", "database kB", "all files kB", "statuses"),
    )
    for kind in kinds:
        for limits, settings in (("open", {**subjects.OPEN_LIMITS, **subjects.QUIET}), ("as shipped", {})):
            samples = _flood(kind, total, step, settings)
            report.data[f"{kind.value}, limits {limits}"] = samples
            report.rows += [_row(kind, limits, sample) for sample in samples]
            report.notes += _slopes(kind, limits, samples)
    mix = ", ".join(kind.value for kind in GARBAGE_KINDS)
    report.notes.append(f"`garbage` is an even mix of {mix}; 50 connections, kept alive.")
    report.notes.append("All files: the database and all else under DATA_DIR, and the log.")
    return report


def _flood(kind: LoadKind, total: int, step: int, settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """A sample before anything was sent, and one after every step."""
    with subjects.ground() as ground, stack.daemon_process(ground, settings) as child:
        # A first good and a first bad request load what is loaded once.
        subjects.load(ground, child.port, LoadKind.OFFER, 100)
        subjects.load(ground, child.port, kind, 100)
        samples = [_sample(ground, child, 0, None)]
        for sent in range(step, total + 1, step):
            done = subjects.load(ground, child.port, kind, step, seed=sent)
            samples.append(_sample(ground, child, sent, done))
    return samples


def _sample(
    ground: stack.DevStack, child: stack.ChildProcess, sent: int, done: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "sent": sent,
        "rss_mb": machine.rss_mb(child.pid),
        "database_kb": machine.size_kb(ground.data_dir, "*.db*")
        + machine.size_kb(ground.data_dir, "*.sqlite*"),
        "files_kb": machine.size_kb(ground.data_dir) + machine.size_kb(ground.folder, "*.log"),
        "run": done,
    }


def _row(kind: LoadKind, limits: str, sample: dict[str, Any]) -> tuple[str, ...]:
    done = sample["run"]
    held = (f"{sample['rss_mb']:.1f}", f"{sample['database_kb']:.0f}", f"{sample['files_kb']:.0f}")
    if done is None:
        return ("before", limits, "-", "-", *held, "-")
    statuses = Counter(done["statuses"]) + Counter(done["failures"])
    return (
        f"{sample['sent']:,} {kind.value}",
        limits,
        f"{done['per_second']:,.0f}",
        latency([done], "p99"),
        *held,
        ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items())),
    )


def _slopes(kind: LoadKind, limits: str, samples: list[dict[str, Any]]) -> list[str]:
    """Over the whole run, and over its second half: what grows without end still grows there."""
    notes = []
    for name, unit, key, factor in (
        ("RSS", "kB", "rss_mb", 1024.0),
        ("database", "kB", "database_kb", 1.0),
        ("all files", "kB", "files_kb", 1.0),
    ):
        points = [(sample["sent"], sample[key] * factor) for sample in samples]
        whole, late = slope(points) * 1000, slope(points[len(points) // 2 :]) * 1000
        last = points[-1][1]
        projected = max(0.0, last + late / 1000 * (EXTRAPOLATED - points[-1][0])) / 1024
        notes.append(
            f"{kind.value}, limits {limits}, {name}: {whole:+.2f} {unit} per 1,000 requests over all, "
            f"{late:+.2f} in the second half; {projected:,.1f} MB at {EXTRAPOLATED:,} at that rate."
        )
    return notes


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares: growth per request."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
