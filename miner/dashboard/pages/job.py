"""One job: curves of all its attempts, what it costs and reaches, its steps, plan, log and files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import quote

from nicegui import ui

from core.domain.job_states import EndReason, JobState
from miner.api.jobs import (
    JobDetails,
    JobFile,
    JobFiles,
    JobResult,
    JobSeries,
    JobStep,
    JobSummary,
    LiveJob,
)
from miner.api.plans import PlanDetails
from miner.dashboard.daemons import DaemonTrouble
from miner.dashboard.job_panels import JobCharts, JobLog, PlanPanel
from miner.dashboard.job_texts import (
    NOT_LIVE,
    cost_text,
    deadline_text,
    gain_text,
    held_out,
    shown_target,
    state_text,
    task_name,
)
from miner.dashboard.layout import PageView, Question, page, page_head
from miner.dashboard.parts import (
    NOT_AVAILABLE,
    UNKNOWN,
    Column,
    Facts,
    FigureTile,
    KeyedRows,
    Link,
    Table,
    Text,
    Tone,
    ago,
    box,
    clock,
    duration,
    empty,
    number,
    panel,
    percent,
    set_visible,
    short_model,
    size,
)


@page("/jobs/{job}", "Job")
async def job_page(view: PageView, job: str) -> None:
    path = f"/jobs/{quote(job, safe='')}"
    try:
        await view.get(path, JobDetails)
    except DaemonTrouble as error:
        page_head("Job")
        view.explain(error, path)
        Link("All jobs", view.href("/jobs"))
        return
    head = _Head(view, path)
    figures = _JobFigures()
    charts = JobCharts()
    with box("grid"):
        with box("stack w8").style("gap:16px"):
            timeline = _Timeline()
            log = JobLog(view, path)
        with box("stack w4").style("gap:16px"):
            facts = _JobFacts()
            validator = _ValidatorView()
            files = _Files()
    plan = PlanPanel()

    def show(answer: JobDetails) -> None:
        head.show(answer)
        figures.show(answer)
        timeline.show(_steps(answer))
        facts.show(answer)
        validator.show(answer)

    view.live(path, JobDetails, show)
    view.live(f"{path}/series", JobSeries, charts.show, every=3.0)
    log.start()
    with plan.panel:
        view.live(f"{path}/plan", PlanDetails, plan.show, every=20.0)
    view.live(f"{path}/files", JobFiles, files.show, every=15.0)


class _Head:
    """Title, state and the two buttons."""

    def __init__(self, view: PageView, path: str) -> None:
        self._view, self._path = view, path
        self._title, end = page_head("Job")
        self._number = 0
        with end:
            self._compare = Link("Compare", "")
            self._cancel = self._button("Cancel job", self._ask_cancel, "danger")
            self._retry = self._button("Retry job", self._ask_retry, "")
        with box("row").style("margin-top:-8px"):
            self._state = Text("", "state strong")
            self._about = Text("", "muted")
        self._trouble = Text("", "notice hidden", "p").props('role="status"')

    def _button(self, text: str, on_click: Any, kind: str) -> ui.button:
        button = ui.button(text, color=None, on_click=on_click).props("flat no-caps")
        return button.classes(f"plain {kind} hidden")

    def show(self, job: JobDetails) -> None:
        self._number = job.id
        self._compare.show("Compare", self._view.href("/compare", jobs=job.id))
        self._title.show(f"#{job.id} {short_model(job.model)}")
        self._state.show(*state_text(job))
        left = deadline_text(job)[0] if not job.state.is_over else f"ended {ago(job.ended_at)}"
        self._about.show(f"{task_name(job.task_type)} · {duration(job.hours * 3600)} granted · {left}")
        trouble = _trouble(job)
        self._trouble.show(trouble)
        set_visible(self._trouble, bool(trouble))
        set_visible(self._cancel, not job.state.is_over)
        set_visible(self._retry, job.state in (JobState.FAILED, JobState.CANCELLED))

    async def _ask_cancel(self) -> None:
        text = "Its training is ended. What is published stays; without a submission, validators penalise it."
        question = Question(f"Cancel job {self._number}?", "Cancel job", text=text, danger=True)
        await self._ask("cancel", question)

    async def _ask_retry(self) -> None:
        text = "It begins again, as long as there is time to its deadline."
        await self._ask("retry", Question(f"Retry job {self._number}?", "Retry job", text=text))

    async def _ask(self, action: str, question: Question) -> None:
        answer = await self._view.act("POST", f"{self._path}/{action}", JobSummary, question)
        if answer is not None:
            ui.notify(f"Job {self._number}: {answer.state}")
            await self._view.link.look_again(self._path)


def _trouble(job: JobDetails) -> str:
    live = job.live or NOT_LIVE
    if not job.state.is_over:
        again = f"; tried again at {clock(live.retry_at)}" if live.retry_at else ""
        return f"{live.trouble}{again}" if live.trouble else ""
    if job.state is not JobState.FAILED:
        return ""
    meaning = job.meaning.operator if job.meaning else ""
    return ": ".join(part for part in (job.end_reason, job.detail, meaning) if part)


class _JobFigures:
    """Progress, quality, speed and memory."""

    def __init__(self) -> None:
        with box("figures"):
            self._progress, self._loss = FigureTile("Progress"), FigureTile("Training loss")
            self._held_out, self._speed = FigureTile("Held out"), FigureTile("Speed")
            self._mfu, self._memory = FigureTile("MFU"), FigureTile("Memory, fullest GPU")

    def show(self, job: JobDetails) -> None:
        live, result = job.live or NOT_LIVE, job.result
        self._show_progress(job, live)
        self._loss.show(number(live.loss), note=_epoch(live))
        base, best = held_out(job)
        is_reward = result is not None and result.metric == "reward"
        note = gain_text(base, best, lower_is_better=not is_reward) or (
            f"base {number(base)}" if base else ""
        )
        target = shown_target(job)
        self._held_out.show(number(best), note=" · ".join(part for part in (note, target) if part))
        self._show_speed(live, result)
        memory = live.memory_bytes or (result.memory_bytes if result else None)
        note = f"the plan expects {size(live.memory_estimate_bytes)}" if live.memory_estimate_bytes else ""
        if live.step is not None and memory is None:
            note = NOT_AVAILABLE
        self._memory.show(size(memory), note=note)

    def _show_speed(self, live: LiveJob, result: JobResult | None) -> None:
        tokens_s = live.tokens_s or (result.tokens_s if result else None)
        self._speed.show(
            number(tokens_s or live.samples_s, 3),
            "tokens/s" if tokens_s or not live.samples_s else "samples/s",
            f"waits for data {percent(live.wait, 1)}" if live.wait is not None else "",
        )
        tone: Tone = "warn" if live.efficiency is not None and live.efficiency < 0.8 else ""
        note = f"{percent(live.efficiency)} of what the plan expects" if live.efficiency is not None else ""
        if live.step is not None and live.mfu is None:
            note = NOT_AVAILABLE
        self._mfu.show(percent(live.mfu, 1).removesuffix(" %"), "%", note, tone)

    def _show_progress(self, job: JobDetails, live: LiveJob) -> None:
        step, steps = live.step, live.steps
        if step is not None:
            share = percent(step / steps).removesuffix(" %") if steps else str(step)
            note = f"step {step:,} of {steps:,}" if steps else ""
            if live.ends_at:
                note += f", over at {clock(live.ends_at)}"
            self._progress.show(share, "%" if steps else "steps", note)
        elif not job.state.is_over:
            self._progress.show(UNKNOWN, note=state_text(job)[0])
        else:
            steps = job.result.steps if job.result else None
            self._progress.show(
                f"{steps:,}" if steps else UNKNOWN, "steps", _counted(len(job.attempts), "attempt")
            )


def _epoch(live: LiveJob) -> str:
    parts = [
        f"epoch {live.epoch:.2f}" if live.epoch is not None else "",
        f"rate {live.learning_rate:.3g}" if live.learning_rate is not None else "",
    ]
    return ", ".join(part for part in parts if part)


class _Bar(NamedTuple):
    """A step and its place in the timeline, as shares of the width."""

    step: JobStep
    left: float
    width: float


class _Timeline:
    """The job's steps as bars over its whole time."""

    def __init__(self) -> None:
        with panel("Timeline"):
            self._rows: KeyedRows[_Bar] = KeyedRows(box("rows timeline"), self._make)
            self._nothing = empty("Nothing has been done yet.")

    def show(self, steps: Sequence[JobStep]) -> None:
        if not steps:
            set_visible(self._nothing, True)
            return
        begins = min(step.began_at for step in steps)
        whole = max(1.0, max(map(_ended, steps)) - begins)
        bars = (
            _Bar(step, (step.began_at - begins) / whole, (_ended(step) - step.began_at) / whole)
            for step in steps
        )
        set_visible(self._nothing, self._rows.show(enumerate(bars)) == 0)

    def _make(self, _bar: _Bar) -> Callable[[_Bar], None]:
        with box("step-row"):
            name, state = Text("", "cut"), Text("", "state small")
            with box("gantt"):
                bar = box("bar")
            took, detail = Text("", "small nowrap num"), Text("", "small muted detail")
        drawn = ""

        def show(shown: _Bar) -> None:
            nonlocal drawn
            step = shown.step
            name.show(f"{step.name} {step.attempt}" if step.attempt else step.name)
            state.show(*_outcome(step))
            took.show(duration(_ended(step) - step.began_at))
            detail.show(step.detail or f"from {clock(step.began_at)}")
            style = f"left:{shown.left * 100:.2f}%;width:max(3px,{shown.width * 100:.2f}%)"
            if style != drawn:
                drawn = style
                bar.style(style)

        return show


def _steps(job: JobDetails) -> list[JobStep]:
    """The steps of the worker, and the trainings that went on meanwhile."""
    trainings = [
        JobStep(
            attempt=attempt.number,
            name="training",
            began_at=attempt.started_at,
            ended_at=attempt.ended_at,
            outcome="ok" if attempt.end_reason in (EndReason.TRAINED, None) else attempt.end_reason,
            detail=attempt.detail,
        )
        for attempt in job.attempts
    ]
    return sorted([*job.steps, *trainings], key=attrgetter("began_at"))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _ended(step: JobStep) -> float:
    return step.ended_at or time.time()


def _outcome(step: JobStep) -> tuple[str, Tone]:
    if step.ended_at is None:
        return "now", "live"
    outcome = step.outcome or "ended"
    return outcome, "good" if outcome == "ok" else "warn"


class _JobFacts:
    def __init__(self) -> None:
        with panel("Job"):
            self._facts = Facts()

    def show(self, job: JobDetails) -> None:
        attempts = job.attempts
        newest = attempts[-1] if attempts else None
        self._facts.show(
            {
                "Model": job.model,
                "Task": job.task_id,
                "Validator": job.validator,
                "Started": clock(job.started_at),
                "Deadline": clock(job.deadline_at),
                "Attempts": str(len(attempts)) if attempts else "none yet",
                "GPUs": ", ".join(newest.gpus) if newest else None,
                "Cost": cost_text(job) or None,
                "Tags": " ".join(job.tags) or None,
                "Note": job.note or None,
                "Ended by": job.end_reason,
                "Folder": job.folder,
            }
        )


class _ValidatorView:
    """The answer that a validator gets."""

    def __init__(self) -> None:
        with panel("What the validator sees"):
            self._facts = Facts()

    def show(self, job: JobDetails) -> None:
        submission = job.submission
        self._facts.show(
            {
                "Submission": submission.repo if submission else "none yet: asked for it, we answer 404",
                "Hash": submission.model_hash if submission else None,
                "Published": clock(job.submitted_at) if submission else None,
                "Wanted name": job.expected_repo_name,
                "Meaning": job.meaning.validator if job.meaning else None,
            }
        )


class _Files:
    def __init__(self) -> None:
        with panel("Files"), box("tall").props('tabindex="0" aria-label="Files of the job"'):
            self._table: Table[JobFile] = Table(
                "Files",
                [
                    Column("Name", "name", classes="mono why"),
                    Column("Size", "bytes", size, number=True),
                    Column("Changed", "at", clock, number=True, classes="wide-only"),
                ],
                key=attrgetter("name"),
            )
            self._nothing = empty(
                "No files: the job has not been launched, or they were removed (see KEEP_FINISHED_HOURS)."
            )

    def show(self, files: JobFiles) -> None:
        set_visible(self._nothing, self._table.show(files.artefacts) == 0)
