"""An environment task before its training: rows are made in processes of their own, then encoded.

    making = RowsInTheMaking.start(run, plan)     # at once: the model's files are read meanwhile
    rows, notes = making.rows()

The file that validators send holds a thousand copies of one sentence and is not read, and the servers that
they start beside a game are not asked: everything is played here.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from core.data.facts import MADE_ROWS, facts_from_lengths
from core.domain.evaluation import UNKNOWN_WINDOW
from core.domain.tasks import EnvironmentDataset
from core.domain.units import show_seconds
from core.planning.plan import TrainingPlan
from core.planning.time.overheads import making_rows_share
from core.runs.run_files import RunSpec
from core.system.resources import usable_cores
from trainer.environments.generation import GRACE_S
from trainer.environments.rows import encode_rows
from trainer.environments.sources import (
    SEEDS,
    RowsOrder,
    RowsReport,
    known_environments,
    sequence_limit_of,
    unknown_environments,
)
from trainer.environments.template_probe import fitting_encoder
from trainer.errors import BadData
from trainer.handoff import read_record, write_record
from trainer.inputs.files import RawRow
from trainer.inputs.instruct import count_learned
from trainer.inputs.split import fingerprint_of_ids
from trainer.inputs.text import NO_ANSWER, UNKNOWN, TextTask, drop_reason, require_rows, within_vocabulary
from trainer.inputs.tokens import LabelledRow, Tokenizer, model_window

log = logging.getLogger(__name__)

#: However short the time: rows of each environment, and seconds for making them.
LEAST_EACH, LEAST_S = 64, 20.0
#: Rows made for one that is planned to be trained on: where steps are faster than was thought the clock makes
#: more of them, and where they are slower it ends the epoch early.
_SPARE = 2.0
#: Parts of the most rows for which a training is planned before there are any.
ROWS_SHARES = (1.0, 0.25, 0.06, 0.015)
#: The longest rows that are made for a training, and how many may be longer than the usual length.
LONGEST_MADE, FEW = 8192, 0.01
LAST_RESORT = "leduc_poker"
#: What ends a process that makes rows, where it does not end by itself.
_LATE_S = 5.0


@dataclass
class RowsInTheMaking:
    """The processes that make rows; none for what an earlier attempt of this run has made."""

    orders: tuple[RowsOrder, ...]
    processes: Mapping[str, subprocess.Popen[bytes]]
    notes: tuple[str, ...]

    @classmethod
    def start(cls, run: RunSpec, plan: TrainingPlan) -> Self:
        assert isinstance(run.dataset, EnvironmentDataset)
        orders = tuple(rows_orders(run, plan))
        new = [order for order in orders if not _is_made(order)]
        processes = {order.environment: _started(order) for order in new}
        return cls(orders, processes, unknown_environments(run.dataset.environment_names))

    def __str__(self) -> str:
        names = ", ".join(order.environment for order in self.orders)
        seconds = max(max(order.end_by for order in self.orders) - time.time(), 0.0)
        first = self.orders[0]
        time_left = f"{show_seconds(seconds)} at most"
        return f"{first.rows:,} rows each of {names}, on {first.cores} cores, {time_left}"

    def rows(self) -> tuple[list[RawRow], tuple[str, ...]]:
        """All rows, and what is to be said of them; `BadData` where there are none."""
        notes, rows = list(self.notes), list[RawRow]()
        for order in self.orders:
            _end(order, self.processes.get(order.environment))
            rows += _taken(order, notes)
        if not rows:
            order = _last_resort(self.orders[0])
            notes.append(f"none of these has rows: {order.environment} is played instead")
            _end(order, _started(order))
            rows = _taken(order, notes)
        if not rows:
            raise BadData(f"no rows were made: {'; '.join(notes)}")
        return rows, tuple(notes)


def _is_made(order: RowsOrder) -> bool:
    """By an attempt before this one, if only in part: its maker may have been killed."""
    return order.report_path.is_file() or sum(1 for _ in order.made()) >= LEAST_EACH


def _started(order: RowsOrder) -> subprocess.Popen[bytes]:
    path = Path(order.folder) / "order.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, order)
    # What its workers leave behind when they are killed goes with the run's own directory.
    scratch = path.parent / "tmp"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "trainer.environments.generation", str(path)]
    return subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)})


def _end(order: RowsOrder, process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    try:
        process.wait(max(order.end_by + GRACE_S + _LATE_S - time.time(), _LATE_S))
    except subprocess.TimeoutExpired:
        # A player that is not ready by then has no rows to wait for.
        process.kill()
        process.wait()


def _taken(order: RowsOrder, notes: list[str]) -> list[RawRow]:
    rows = list(order.made())
    report = read_record(RowsReport, order.report_path)
    notes.append(f"{order.environment}: {_said(len(rows), report)}")
    notes += report.notes if report else ()
    return rows


def _last_resort(order: RowsOrder) -> RowsOrder:
    """The game that is ready at once: a model that has learned its form is worth more than none at all."""
    folder = Path(order.folder).with_name("instead")
    instead = {"environment": LAST_RESORT, "end_by": time.time() + LEAST_S, "folder": str(folder)}
    return order.model_copy(update=instead)


def _said(rows: int, report: RowsReport | None) -> str:
    if report is None:
        return f"{rows:,} rows, by a process that was ended" if rows else "no rows: not ready in time"
    ready = f", of which {report.ready_s:.0f} s to get ready"
    return f"{rows:,} rows of {report.games:,} games in {report.seconds:.0f} s{ready}"


def trained_rows(plan: TrainingPlan) -> int:
    return plan.steps.total * plan.batch.effective


def rows_orders(run: RunSpec, plan: TrainingPlan) -> Iterator[RowsOrder]:
    """Order the rows that the plan trains on, the same number of each environment, to be made in the planned
    part of the remaining time."""
    assert isinstance(run.dataset, EnvironmentDataset)
    names = known_environments(run.dataset.environment_names)
    wanted = min(round(trained_rows(plan) * _SPARE) + plan.steps.eval_rows, MADE_ROWS)
    now, cores = time.time(), usable_cores()
    end_by = now + max(making_rows_share(plan.model.params_total) * (run.end_by - now), LEAST_S)
    for place, name in enumerate(names):
        yield RowsOrder(
            environment=name,
            rows=max(-(-wanted // len(names)), LEAST_EACH),
            end_by=end_by,
            # Not all are ready at once, and some end early: the others take over what is free then.
            cores=min(cores, -(-2 * cores // len(names))),
            seed=(run.seed * 100 + place) * SEEDS,
            folder=str(Path(run.work_dir) / "environments" / name),
            requested_data=run.requested_data,
        )


def encode_made(spec: RunSpec, records: list[RawRow], tokenizer: Tokenizer) -> TextTask:
    """Encode rows that were made: requests as the evaluator makes them, and the expert's answers."""
    assert isinstance(spec.dataset, EnvironmentDataset)
    encoder, notes, left_out = fitting_encoder(tokenizer, records, spec.model_path)
    records = [row for row in records if row.get("environment") not in left_out]
    encoded = list(encode_rows(encoder, records, usable_cores()))
    usual = sequence_limit_of(spec.dataset.environment_names)
    window = model_window(spec.model_path) or UNKNOWN_WINDOW
    limit, longer = _limit_of(encoded, usual, min(window, LONGEST_MADE))
    notes += longer
    known, kept, dropped = within_vocabulary(spec), list[LabelledRow](), Counter[str]()
    for row in encoded:
        reason = drop_reason(row, limit, completion=False)
        if reason is None and row is not None and not known(row.ids):
            reason = UNKNOWN
        if reason is not None or row is None:
            dropped[reason or NO_ANSWER] += 1
            continue
        kept.append(row)
    require_rows(kept, dropped, f"sequences have {limit} tokens at most")
    answers = [count_learned(row.labels) for row in kept]
    prompts = [len(row.ids) - answer for row, answer in zip(kept, answers, strict=True)]
    prints = array("Q", (fingerprint_of_ids(row.ids) for row in kept))
    notes += tuple(f"{count:,} of {len(records):,} rows are lost: {why}" for why, count in dropped.items())
    facts = facts_from_lengths(spec.task_type, prompts, answers)
    return TextTask(spec, tokenizer, kept, prints, dict(dropped), facts, limit, notes=notes)


def _limit_of(rows: Sequence[LabelledRow | None], usual: int, most: int) -> tuple[int, tuple[str, ...]]:
    """Requests are as long as the evaluator makes them: where the usual length does not do for a model's
    tokenizer, twice as long."""
    limit = min(usual, most)
    while limit < most and sum(row is not None and len(row.ids) > limit for row in rows) > FEW * len(rows):
        limit = min(2 * limit, most)
    said = f"rows are longer than {usual} tokens: sequences have {limit}"
    return limit, (said,) if limit > usual else ()
