"""Jobs on the terminal: the list, all of one job, and a job while it runs (a few lines that change on a
terminal, a line per change elsewhere).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from core.domain.units import show_bytes, show_dollars, show_seconds, show_shares
from miner.api.alerts import RuleAction
from miner.api.comparison import JobComparison, show_value
from miner.api.jobs import (
    AttemptDetails,
    AttemptFigures,
    JobDetails,
    JobResult,
    JobStep,
    JobSummary,
    LiveJob,
)
from miner.api.reports import JobStatistics, SuccessRow
from miner.cli.output import echo_json, show_time
from miner.cli.render.terminal import (
    WIDE_COLUMNS,
    Terminal,
    fact_table,
    one_line_cells,
    one_line_table,
    plain_table,
)

#: Rows of tables below which their details are printed.
Detailed = AttemptDetails | JobStep | RuleAction


def job_table(jobs: Sequence[JobSummary], width: int, now: float | None = None) -> Table:
    """Return a table with one line per job."""
    now = time.time() if now is None else now
    names = ["id", "type", "model", "state", "what", "score", "time"]
    names += ["cost"] if any(job.cost is not None for job in jobs) else []
    names += ["gain", "ended", "tags", "task", "submission"] if width >= WIDE_COLUMNS else []
    table = one_line_table(*names, cut=("model", "what", "tags", "submission"), right=("id", "cost"))
    for job in jobs:
        row = {
            "id": str(job.id),
            "type": job.task_type.removesuffix("Task").removesuffix("Text"),
            "model": job.model if width >= WIDE_COLUMNS else job.model.rsplit("/", 1)[-1],
            "state": job.state,
            "what": current_activity(job),
            "score": _scores(job.result, 3) if job.result else "",
            "time": f"took {show_seconds(job.took_s)}" if job.took_s is not None else time_left(job, now),
            "cost": "" if job.cost is None else show_dollars(job.cost),
            "gain": _gain(job.result.gain) if job.result else "",
            "ended": show_time(job.ended_at, seconds=False) if job.ended_at else "",
            "tags": " ".join(job.tags),
            "task": job.task_id[:13],
            "submission": job.submission.repo if job.submission else "",
        }
        table.add_row(*one_line_cells(*(row[name] for name in names)))
    return table


def current_activity(job: JobSummary) -> str:
    """Return what the job is doing, or why it ended."""
    live = job.live
    if live is None:
        return job.end_reason or ""
    if live.trouble:
        return str(live.trouble)
    if live.step is not None:
        total = f"/{live.steps:,}" if live.steps else ""
        loss = f", loss {live.loss:.4g}" if live.loss is not None else ""
        return f"{live.stage} {live.step:,}{total}{loss}"
    return (live.stage or "") + _transfer(live)


def time_left(job: JobSummary, now: float) -> str:
    if job.ended_at is not None:
        return f"ended {show_time(job.ended_at)}"
    left = job.deadline_at - now
    return f"{show_seconds(left)} left" if left > 0 else "past its deadline"


def comparison_pages(comparison: JobComparison, width: int) -> Iterator[RenderableType]:
    """Yield one table, a column for each job: how it went, and in what its plan differs."""
    jobs = comparison.jobs
    room = max((width - 14) // max(len(jobs), 1) - 2, 8)
    table = plain_table("", *(f"job {one.job.id}" for one in jobs))
    rows: dict[str, list[str]] = {
        "model": [one.job.model.rsplit("/", 1)[-1] for one in jobs],
        "profile": [one.profile or "" for one in jobs],
        "tags": [" ".join(one.job.tags) for one in jobs],
        "note": [one.job.note for one in jobs],
        "state": [one.job.end_reason or one.job.state for one in jobs],
        "held out": [_scores(one.figures, 4) for one in jobs],
        "gain": [_gain(one.figures.gain) for one in jobs],
        "loss": [_loss_line(one.loss.value, room) for one in jobs],
        "steps": [f"{one.figures.steps:,}" if one.figures.steps else "" for one in jobs],
        "took": ["" if one.job.took_s is None else show_seconds(one.job.took_s) for one in jobs],
        "tokens/s": ["" if (speed := one.figures.tokens_s) is None else f"{speed:,.0f}" for one in jobs],
        "memory": ["" if (used := one.figures.memory_bytes) is None else show_bytes(used) for one in jobs],
        "GPU-hours": [f"{one.job.gpu_hours:.2f}" for one in jobs],
        "cost": ["" if (cost := one.job.cost) is None else show_dollars(cost) for one in jobs],
    }
    for name, cells in rows.items():
        if any(cells):
            table.add_row(name, *cells)
    for row in comparison.plan:
        table.add_row(
            row.name, *("" if value is None else show_value(value) for value in row.values), style="dim"
        )
    yield table
    if not comparison.plan:
        yield "\nTheir plans are equal, or only one is known."


def _loss_line(values: Sequence[float | None], room: int) -> str:
    known = [value for value in values if value is not None]
    step = max(-(-len(known) // min(room, 24)), 1)
    return sparkline(known[::step]) if known else ""


def job_pages(job: JobDetails, now: float | None = None) -> Iterator[RenderableType]:
    """Yield everything about one job; what several parts repeat is printed once."""
    now = time.time() if now is None else now
    said = {job.detail, ""}
    yield fact_table((name, str(value)) for name, value in _fact_rows(job, now) if value)
    if job.attempts:
        yield ""
        yield _attempt_table(job.attempts)
        yield from _details("attempt", job.attempts, "number", said)
    if job.steps:
        yield ""
        yield _step_table(job.steps)
        yield from _details("step", job.steps, "name", said)
    if job.actions:
        yield ""
        yield _action_table(job.actions)
        yield from _details("rule", job.actions, "rule", said)


def _fact_rows(job: JobDetails, now: float) -> Iterator[tuple[str, Any]]:
    yield "job", f"{job.id}, task {job.task_id} of {job.validator}"
    yield "task", f"{job.task_type} of {job.model}, {job.hours:g} h"
    yield "tags", " ".join(job.tags)
    yield "note", job.note
    yield "state", job.state
    yield "now", current_activity(job) if job.live else ""
    if job.end_reason:
        yield "because", f"{job.end_reason}: {job.detail}" if job.detail else job.end_reason
    if job.meaning:
        yield "which means", job.meaning.operator
        yield "validators see", job.meaning.validator
    if job.result:
        yield from _result_rows(job.result)
    if job.attempts:
        yield from _figure_rows(_shown_attempt(job), so_far=job.result is None)
    if job.cost is not None:
        yield "cost", f"{show_dollars(job.cost)} for {job.gpu_hours:.2f} GPU-hours"
    yield "started", show_time(job.started_at) + (f", {job.starts} times" if job.starts > 1 else "")
    yield "deadline", f"{show_time(job.deadline_at)} ({time_left(job, now)})"
    yield "wanted as", job.expected_repo_name
    if job.submission and job.submitted_at is not None:
        published = f"{job.submission.repo} at {show_time(job.submitted_at)}"
        yield "published", published
    yield "folder", job.folder


def _result_rows(result: JobResult) -> Iterator[tuple[str, str]]:
    if result.best is not None:
        step = f", best at step {result.best_step:,}"
        yield "score", f"{result.metric} {_scores(result, 4)}{step} of attempt {result.attempt}"
    if result.gain is not None:
        yield "gain", f"{_gain(result.gain)} over the base"
    yield "trained", f"{result.steps:,} steps in {show_seconds(result.seconds)}"


def _shown_attempt(job: JobDetails) -> AttemptDetails:
    """Return the attempt that the result is of, or the newest."""
    number = job.result.attempt if job.result else None
    return next((attempt for attempt in job.attempts if attempt.number == number), job.attempts[-1])


def _figure_rows(attempt: AttemptDetails, *, so_far: bool) -> Iterator[tuple[str, str]]:
    figures, losses = attempt.figures, attempt.losses
    if so_far and figures.best is not None:
        gain = f", {_gain(figures.gain)}" if figures.gain is not None else ""
        yield "so far", f"{figures.metric} {_scores(figures, 4)}{gain}"
    yield "target", attempt.target
    if losses:
        yield "loss", f"{sparkline(losses)} {losses[0]:.4g} → {losses[-1]:.4g}"
    yield "speed", _speed(figures)
    yield "memory", _memory(figures)
    if figures.utilization is not None:
        yield "GPUs busy", f"{figures.utilization:.0%} of the time"


def _speed(figures: AttemptFigures | LiveJob) -> str:
    """Describe the figures of an attempt or a live job; unknown ones are left out."""
    texts = {
        "tokens_s": "{:,.0f} tokens/s",
        "samples_s": "{:.3g} samples/s",
        "mfu": "MFU {:.1%}",
        "efficiency": "{:.0%} of the planned speed",
        "wait": "{:.1%} waiting for data",
    }
    values = ((text, getattr(figures, key)) for key, text in texts.items())
    return ", ".join(text.format(value) for text, value in values if value is not None)


def _memory(figures: AttemptFigures | LiveJob) -> str:
    used, estimate = figures.memory_bytes, figures.memory_estimate_bytes
    if used is None:
        return f"not measured; {show_bytes(estimate)} planned" if estimate else ""
    beside = f" at most, {show_bytes(estimate)} planned ({used / estimate:.0%})" if estimate else " at most"
    return f"{show_bytes(used)}{beside}"


def _gain(gain: float | None) -> str:
    return "" if gain is None else f"{gain:+.1%}"


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text."""
    low, high = min(values), max(values)
    height = high / 2 - low / 2  # of halves: a training may report the largest and the smallest number
    return show_shares((value / 2 - low / 2) / height if height else 0.0 for value in values)


def _scores(result: JobResult | AttemptFigures, digits: int) -> str:
    """Return the scores before and after the training."""
    if result.best is None:
        return ""
    before = f"{result.base:.{digits}f} → " if result.base is not None else ""
    return f"{before}{result.best:.{digits}f}"


def _attempt_table(attempts: Sequence[AttemptDetails]) -> Table:
    table = plain_table("attempt", "backend", "GPUs", "began", "took", "ended", "score")
    for attempt in attempts:
        table.add_row(
            str(attempt.number),
            attempt.backend,
            ", ".join(attempt.gpus),
            show_time(attempt.started_at),
            _duration(attempt.started_at, attempt.ended_at),
            attempt.end_reason or "running",
            _scores(attempt.result, 4) if attempt.result else "",
        )
    return table


def _step_table(steps: Sequence[JobStep]) -> Table:
    table = plain_table("step", "attempt", "began", "took", "came to")
    for step in steps:
        table.add_row(
            step.name,
            str(step.attempt or ""),
            show_time(step.began_at),
            _duration(step.began_at, step.ended_at),
            step.outcome or "going on",
        )
    return table


def _action_table(actions: Sequence[RuleAction]) -> Table:
    """Describe the rules' requests to trainings, and the results."""
    table = plain_table("rule", "attempt", "when", "change", "came to")
    for action in actions:
        table.add_row(
            action.rule, str(action.attempt), show_time(action.asked_at), _change(action), action.outcome
        )
    return table


def _change(action: RuleAction) -> str:
    """`micro batch 8 → 7`; only the kind where nothing was to change."""
    before, after = action.before, action.after
    texts = {"micro": "micro batch {} → {}", "duty": "duty {:.0%} → {:.0%}"}
    changes = []
    for key, text in texts.items():
        old, new = before.get(key), after.get(key)
        if new is not None and old is not None and new != old:
            changes.append(text.format(old, new))
    return ", ".join(changes) or str(action.kind)


def _details(what: str, rows: Sequence[Detailed], name: str, said: set[str]) -> Iterator[RenderableType]:
    """Yield details below their table, as wide as the terminal: a table column would be too narrow."""
    for row in rows:
        if row.detail not in said:
            said.add(row.detail)
            yield Padding(Text(f"{what} {getattr(row, name)}: {row.detail}"), (0, 0, 0, 2))


def _duration(began: float, ended: float | None) -> str:
    return show_seconds(ended - began) if ended else ""


def success_tables(stats: JobStatistics) -> Iterator[RenderableType]:
    """Yield one table for all jobs and for each way to group them."""
    if not stats.all.jobs:
        yield f"No job has ended in the last {stats.days:g} days that says something about this miner."
        return
    yield _success_table(f"last {stats.days:g} days", [SuccessRow(name="all jobs", **dict(stats.all))])
    for title, rows in (("type", stats.type), ("family", stats.family), ("size", stats.size)):
        yield ""
        yield _success_table(title, rows)


def _success_table(title: str, rows: Sequence[SuccessRow]) -> Table:
    table = plain_table(
        title, "jobs", "published", "success", "mean time", "mean gain", right=("jobs", "published")
    )
    for row in rows:
        hours = row.mean_hours
        table.add_row(
            row.name,
            str(row.jobs),
            str(row.published),
            "" if row.rate is None else f"{row.rate:.0%}",
            "" if hours is None else show_seconds(hours * 3600),
            _gain(row.mean_gain),
        )
    return table


_LIVE_JOB = TypeAdapter(LiveJob)
#: Steps are printed this often where nobody watches.
QUIET_SECONDS = 10.0
#: More often than the countdowns change, so that no second is skipped.
_REFRESHES_PER_SECOND = 2


class JobDisplay:
    """Display events: the data of a "job" event is its whole state, of a "note" event one sentence. On a
    terminal notes scroll by, and the state below them is redrawn every second: its countdowns go on while
    the job is silent."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None) -> None:
        self._console = console or Terminal()
        self._as_json = as_json
        self._job: LiveJob | None = None
        self._said: tuple[Any, ...] = ()
        self._said_at = 0.0
        self.live: Live | None = None
        if self._console.is_terminal and not as_json:
            self.live = Live(
                console=self._console,
                get_renderable=self._picture,
                refresh_per_second=_REFRESHES_PER_SECOND,
                redirect_stderr=sys.stderr.isatty(),
            )

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self._job = None  # the final page of the job follows
            self.live.stop()

    def take(self, kind: str, data: dict[str, object]) -> None:
        if self._as_json:
            echo_json({"event": kind, **data}, line=True)
            sys.stdout.flush()
        elif kind == "note":
            self._console.print(data["text"], soft_wrap=self.live is None)
        elif kind == "job":
            self._job = _LIVE_JOB.validate_python(data)
            if self.live is None:
                self._tell(self._job)

    def _tell(self, job: LiveJob) -> None:
        now, said = time.monotonic(), (job.state, job.stage, job.attempt, job.trouble)
        if said != self._said or now - self._said_at >= QUIET_SECONDS:
            self._said, self._said_at = said, now
            facts = (f"{name} {value}" for name, value in _live_facts(job) if isinstance(value, str))
            self._console.print(" · ".join(facts), soft_wrap=True)

    def _picture(self) -> RenderableType:
        if self._job is None:
            return Group()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _live_facts(self._job):
            table.add_row(name, value)
        return table


def _live_facts(job: LiveJob) -> Iterable[tuple[str, RenderableType]]:
    attempt = f", attempt {job.attempt}" if job.attempt else ""
    gpus = f" on GPU {', '.join(job.gpus)}" if job.gpus else ""
    yield "state", f"{job.state}{attempt}{gpus}"
    if job.stage:
        yield "stage", job.stage + _transfer(job)
    yield from _live_progress(job)
    if job.trouble:
        again = f", again in {show_seconds(max(job.retry_at - time.time(), 0))}" if job.retry_at else ""
        yield "trouble", f"{job.trouble}{again}"
    now = time.time()
    if job.ends_at:
        yield "ends in", show_seconds(max(job.ends_at - now, 0))
    if job.deadline_at:
        yield "deadline in", show_seconds(max(job.deadline_at - now, 0))
    if job.published:
        yield "published", job.published


def _live_progress(job: LiveJob) -> Iterable[tuple[str, RenderableType]]:
    if job.step is None:
        return
    total = job.steps
    yield "step", f"{job.step:,}" + (f" of {total:,}" if total else "")
    if total:
        yield "", ProgressBar(total=total, completed=job.step, width=40)
    if job.loss is not None:
        yield "loss", f"{job.loss:.4f}"
    if job.best_score is not None:
        base = f", the base {job.base_score:.4f}" if job.base_score is not None else ""
        yield "best score", f"{job.best_score:.4f}{base}"
    for name, value in (("speed", _speed(job)), ("memory", _memory(job))):
        if value:
            yield name, value


def _transfer(job: LiveJob) -> str:
    if job.bytes_done is None:
        return ""
    total = f" of {show_bytes(job.bytes_total)}" if job.bytes_total else ""
    return f": {show_bytes(job.bytes_done)}{total}"
