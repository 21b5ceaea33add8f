"""From the start of the process to the first answered request, and what the idle daemon holds."""

from __future__ import annotations

import time
from statistics import median

from benchmarks import machine, subjects
from benchmarks.report import Report
from miner.dev import stack

IDLE_S = 5.0


def run(quick: bool) -> Report:
    rounds, idle = (2, 1.0) if quick else (5, IDLE_S)
    report = Report(
        "The daemon's start, asked every 10 ms",
        ("start", "first answer s (min, max)", "RSS then MB", f"RSS after {idle:g} s idle MB", "stop s"),
    )
    with subjects.ground() as used:
        _once(used, 0.0)  # makes the database, and the byte code of a fresh checkout
        for name in ("empty folder", "folder in use"):
            starts = []
            for _ in range(rounds):
                if name == "folder in use":
                    starts.append(_once(used, idle))
                else:
                    with subjects.ground() as fresh:
                        starts.append(_once(fresh, idle))
            report.data[name] = starts
            answer, first, after, stop = zip(*starts, strict=True)
            report.rows.append(
                (
                    name,
                    f"{median(answer):.2f} ({min(answer):.2f}, {max(answer):.2f})",
                    f"{median(first):.0f}",
                    f"{median(after):.0f}",
                    f"{median(stop):.2f}",
                )
            )
    report.notes.append(f"Medians of {rounds} starts each. The first answer is /healthz, a full HTTP reply.")
    return report


def _once(on: stack.DevStack, idle: float) -> tuple[float, float, float, float]:
    """Seconds to the first answer, RSS then, RSS after idling, seconds to stop."""
    child = stack.daemon_process(on)
    with child:
        first = machine.rss_mb(child.pid)
        time.sleep(idle)
        after = machine.rss_mb(child.pid)
        began = time.perf_counter()
        code = child.stop()
        if code != 0:
            raise RuntimeError(f"the daemon ended with code {code}:\n{child.log_tail()}")
        return child.start_s, first, after, time.perf_counter() - began
