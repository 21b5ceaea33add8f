"""Make the rows of one environment on all cores, for so long and no longer.

python -m trainer.environments.generation ORDER.json

A process of its own without torch, so that its workers are small. Those of several environments run side by
side: they share the cores, and while one still solves its game the others play. Each worker writes rows to a
file of its own, a line each: a killed worker could leave half a message in a pipe, and its reader would wait
for ever. The report beside them is written last. A row of an environment counts for what it is,
however many a game has: each stops at the same number.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO

from trainer.environments.sources import RowsOrder, RowSource, RowsReport, source_of
from trainer.handoff import read_record, write_record

log = logging.getLogger(__name__)

#: Jobs in flight for each worker, so that none waits for the next.
_AHEAD = 2
#: Failures after which there are no more games, unless they are rare.
_STRIKES, _RARE = 3, 0.1
#: Rows before which the end of the time does not count, and for how long at most.
LEAST_ROWS, GRACE_S = 32, 60.0
_TICK_S = 0.2

_PARENT_DIED = 1  # PR_SET_PDEATHSIG

_source: RowSource | None = None
_part: IO[str] | None = None


def end_with_parent() -> None:
    """Workers that outlive the one that reads their rows would keep the cores from the training."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)


def _begin(folder: str) -> None:
    """In each worker."""
    global _part
    end_with_parent()
    _part = (Path(folder) / f"rows-{os.getpid()}.jsonl").open("a", encoding="utf-8")


def _make(seed: int) -> tuple[int, str]:
    """Write the rows of a job; return how many. Or none, and why."""
    assert _source is not None
    assert _part is not None
    try:
        lines = [json.dumps({"environment": _source.name, **row}) + "\n" for row in _source.rows(seed)]
    except Exception as error:  # noqa: BLE001 - one game in thousands; the maker counts them
        place = traceback.extract_tb(error.__traceback__)[-1]
        return 0, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"[:300]
    _part.write("".join(lines))
    _part.flush()
    return len(lines), ""


class RowsGeneration:
    """One generation, from a source that gets ready to the last row."""

    def __init__(self, order: RowsOrder, source: RowSource) -> None:
        self.order, self.source = order, source
        self.began = time.time()
        self.rows = self.started = self.done = self.strikes = 0
        self.open = True
        #: There are no more games to begin.
        self.exhausted = False
        self.notes: list[str] = []

    def run(self) -> RowsReport:
        global _source
        # Before workers are forked: what a player solves or compiles is theirs as well.
        self.source.get_ready()
        ready_s, _source = time.time() - self.began, self.source
        for part in self.order.parts():  # of an attempt before this one
            part.unlink()
        while self.open:
            try:
                self._pool()
            except BrokenProcessPool:
                self._strike("a worker was killed")
        return RowsReport(
            rows=min(self.rows, self.order.rows),
            games=self.done,
            ready_s=ready_s,
            seconds=time.time() - self.began,
            notes=tuple(self.notes),
        )

    def _pool(self) -> None:
        forking = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(self.order.cores, forking, _begin, (self.order.folder,))
        running: set[Future[tuple[int, str]]] = set()
        try:
            while self.open and not self._is_over():
                while len(running) < _AHEAD * self.order.cores and self._expected(len(running)):
                    self.started += 1
                    running.add(pool.submit(_make, self.order.seed + self.started))
                if not running:
                    break
                ended, running = wait(running, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    self._take(*future.result())
            self.open = False
        finally:
            # Nothing that still runs is waited for.
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)

    def _expected(self, running: int) -> bool:
        """Return True if the running games will not be enough."""
        each = self.rows / self.done if self.done else 1.0
        return self.open and not self.exhausted and self.rows + running * each < self.order.rows

    def _take(self, rows: int, problem: str) -> None:
        self.rows += rows
        self.done += 1
        if problem:
            self._strike(problem)
        elif not rows:
            self.exhausted = True

    def _strike(self, problem: str) -> None:
        self.strikes += 1
        if self.strikes >= _STRIKES and self.strikes > _RARE * self.done:
            self.open = False
            self.notes.append(f"{self.source.name}: ends after {self.strikes} failures: {problem}")

    def _is_over(self) -> bool:
        """Past the time only for a first few rows: a training without any is worth nothing."""
        now = time.time()
        return now > self.order.end_by and (self.rows >= LEAST_ROWS or now > self.order.end_by + GRACE_S)


def generate(order: RowsOrder) -> RowsReport:
    """Make the rows and the report. With time enough the same order makes the same rows, in some order."""
    Path(order.folder).mkdir(parents=True, exist_ok=True)
    began = time.time()
    try:
        report = RowsGeneration(order, source_of(order.environment, order.requested_data)).run()
    except Exception as error:
        log.exception("%s cannot be played", order.environment)
        why = f"{order.environment} cannot be played: {type(error).__name__}: {error}"[:300]
        seconds = time.time() - began
        report = RowsReport(rows=0, games=0, ready_s=seconds, seconds=seconds, notes=(why,))
    write_record(order.report_path, report)
    return report


def main(path: str) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    end_with_parent()
    order = read_record(RowsOrder, Path(path))
    if order is None:
        log.error("%s is no order of rows", path)
        return 2
    report = generate(order)
    log.info(
        "%s: %d rows of %d games in %.0f s", order.environment, report.rows, report.games, report.seconds
    )
    return 0 if report.rows else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
