"""One job: curves of all its attempts, what it costs and reaches, its steps, plan, log and files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from nicegui import ui

from miner.dashboard.daemons import DaemonTrouble
from miner.dashboard.job_charts import JobCharts
from miner.dashboard.job_log import JobLog
from miner.dashboard.job_plan import JobPlan
from miner.dashboard.job_texts import deadline_text, gain_text, shown_target, state_text, task_name
from miner.dashboard.layout import PageView, page, page_head
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

Record = Mapping[str, Any]
OPEN_STATES = ("queued", "preparing", "training", "publishing")


@page("/jobs/{job}", "Job")
async def job_page(view: PageView, job: str) -> None:
    path = f"/jobs/{quote(job, safe='')}"
    try:
        await view.get(path)
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
    plan = JobPlan()

    def show(answer: dict[str, Any]) -> None:
        head.show(answer)
        figures.show(answer)
        timeline.show(_steps(answer))
        facts.show(answer)
        validator.show(answer)

    view.live(path, show)
    view.live(f"{path}/series", charts.show, every=3.0)
    log.start()
    with plan.panel:
        view.live(f"{path}/plan", plan.show, every=20.0)
    view.live(f"{path}/files", lambda answer: files.show(answer["artefacts"]), every=15.0)


class _Head:
    """Title, state and the two buttons."""

    def __init__(self, view: PageView, path: str) -> None:
        self._view, self._path = view, path
        self._title, end = page_head("Job")
        self._number: Any = None
        with end:
            self._cancel = self._button("Cancel job", self._ask_cancel, "danger")
            self._retry = self._button("Retry job", self._ask_retry, "")
        with box("row").style("margin-top:-8px"):
            self._state = Text("", "state strong")
            self._about = Text("", "muted")
        self._trouble = Text("", "notice hidden", "p").props('role="status"')

    def _button(self, text: str, on_click: Any, kind: str) -> ui.button:
        button = ui.button(text, color=None, on_click=on_click).props("flat no-caps")
        return button.classes(f"plain {kind} hidden")

    def show(self, job: Record) -> None:
        self._number = job["id"]
        self._title.show(f"#{job['id']} {short_model(job['model'])}")
        self._state.show(*state_text(job))
        left = deadline_text(job)[0] if job["state"] in OPEN_STATES else f"ended {ago(job['ended_at'])}"
        self._about.show(f"{task_name(job['task_type'])} · {duration(job['hours'] * 3600)} granted · {left}")
        trouble = _trouble(job)
        self._trouble.show(trouble)
        set_visible(self._trouble, bool(trouble))
        set_visible(self._cancel, job["state"] in OPEN_STATES)
        set_visible(self._retry, job["state"] in ("failed", "cancelled"))

    async def _ask_cancel(self) -> None:
        await self._ask(
            "cancel",
            "Cancel job {}?",
            "Its training is ended. What is published stays; without a submission, validators penalise it.",
            "Cancel job",
        )

    async def _ask_retry(self) -> None:
        await self._ask(
            "retry",
            "Retry job {}?",
            "It begins again, as long as there is time to its deadline.",
            "Retry job",
        )

    async def _ask(self, action: str, question: str, text: str, button: str) -> None:
        answer = await self._view.act(
            "POST",
            f"{self._path}/{action}",
            question=question.format(self._number),
            text=text,
            button=button,
            danger=action == "cancel",
        )
        if answer is not None:
            ui.notify(f"Job {self._number}: {answer['state']}")
            await self._view.link.look_again(self._path)


def _trouble(job: Record) -> str:
    live = job["live"] or {}
    if job["state"] in OPEN_STATES:
        again = f"; tried again at {clock(live['retry_at'])}" if live.get("retry_at") else ""
        return f"{live['trouble']}{again}" if live.get("trouble") else ""
    if job["state"] != "failed":
        return ""
    meaning = (job.get("meaning") or {}).get("operator") or ""
    return ": ".join(part for part in (job["end_reason"], job["detail"], meaning) if part)


class _JobFigures:
    """How far, how well, how fast, how full."""

    def __init__(self) -> None:
        with box("figures"):
            self._progress, self._loss = FigureTile("Progress"), FigureTile("Training loss")
            self._held_out, self._speed = FigureTile("Held out"), FigureTile("Speed")
            self._mfu, self._memory = FigureTile("MFU"), FigureTile("Memory, fullest GPU")

    def show(self, job: Record) -> None:
        live, result = job["live"] or {}, job["result"] or {}
        self._show_progress(job, live, result)
        self._loss.show(number(live.get("loss")), note=_epoch(live))
        base = live.get("base_score") if live.get("base_score") is not None else result.get("base")
        best = live.get("best_score") if live.get("best_score") is not None else result.get("best")
        lower = result.get("metric") != "reward"
        note = gain_text(base, best, lower_is_better=lower) or (f"base {number(base)}" if base else "")
        target = shown_target(job)
        self._held_out.show(number(best), note=" · ".join(part for part in (note, target) if part))
        tokens_s = live.get("tokens_s") or result.get("tokens_s")
        samples_s = live.get("samples_s")
        self._speed.show(
            number(tokens_s or samples_s, 3),
            "tokens/s" if tokens_s or not samples_s else "samples/s",
            f"waits for data {percent(live['wait'], 1)}" if live.get("wait") is not None else "",
        )
        efficiency = live.get("efficiency")
        tone: Tone = "warn" if efficiency is not None and efficiency < 0.8 else ""
        note = f"{percent(efficiency)} of what the plan expects" if efficiency is not None else ""
        trains = live.get("step") is not None
        if trains and live.get("mfu") is None:
            note = NOT_AVAILABLE
        self._mfu.show(percent(live.get("mfu"), 1).removesuffix(" %"), "%", note, tone)
        memory = live.get("memory_bytes") or result.get("memory_bytes")
        estimate = live.get("memory_estimate_bytes")
        note = f"the plan expects {size(estimate)}" if estimate else ""
        if trains and memory is None:
            note = NOT_AVAILABLE
        self._memory.show(size(memory), note=note)

    def _show_progress(self, job: Record, live: Record, result: Record) -> None:
        step, steps = live.get("step"), live.get("steps")
        if step is not None:
            share = percent(step / steps).removesuffix(" %") if steps else str(step)
            ends = live.get("ends_at")
            note = f"step {step:,} of {steps:,}" if steps else ""
            if ends:
                note += f", over at {clock(ends)}"
            self._progress.show(share, "%" if steps else "steps", note)
        elif job["state"] in OPEN_STATES:
            self._progress.show(UNKNOWN, note=state_text(job)[0])
        else:
            steps = result.get("steps")
            self._progress.show(
                f"{steps:,}" if steps else UNKNOWN, "steps", _counted(len(job["attempts"]), "attempt")
            )


def _epoch(live: Record) -> str:
    rate = live.get("learning_rate")
    parts = [f"epoch {live['epoch']:.2f}" if live.get("epoch") is not None else ""]
    parts.append(f"rate {rate:.3g}" if rate is not None else "")
    return ", ".join(part for part in parts if part)


class _Timeline:
    """The job's steps as bars over its whole time."""

    def __init__(self) -> None:
        with panel("Timeline"):
            self._rows: KeyedRows[Record] = KeyedRows(box("rows timeline"), self._make)
            self._nothing = empty("Nothing has been done yet.")

    def show(self, steps: list[Record]) -> None:
        if not steps:
            set_visible(self._nothing, True)
            return
        begins = min(step["began_at"] for step in steps)
        ends = max(_ended(step) for step in steps)
        whole = max(1.0, ends - begins)
        items = [
            (
                number_,
                {
                    **step,
                    "left": (step["began_at"] - begins) / whole,
                    "width": (_ended(step) - step["began_at"]) / whole,
                },
            )
            for number_, step in enumerate(steps)
        ]
        set_visible(self._nothing, self._rows.show(items) == 0)

    def _make(self, _step: Record) -> Any:
        with box("step-row"):
            name, state = Text("", "cut"), Text("", "state small")
            with box("gantt"):
                bar = box("bar")
            took, detail = Text("", "small nowrap num"), Text("", "small muted detail")
        drawn = ""

        def show(step: Record) -> None:
            nonlocal drawn
            attempt = f" {step['attempt']}" if step["attempt"] else ""
            name.show(f"{step['name']}{attempt}")
            state.show(*_outcome(step))
            took.show(duration(_ended(step) - step["began_at"]))
            detail.show(step["detail"] or f"from {clock(step['began_at'])}")
            style = f"left:{step['left'] * 100:.2f}%;width:max(3px,{step['width'] * 100:.2f}%)"
            if style != drawn:
                drawn = style
                bar.style(style)

        return show


def _steps(job: Record) -> list[Record]:
    """What the worker did, and the trainings that went on meanwhile."""
    trainings = [
        {
            "attempt": attempt["number"],
            "name": "training",
            "began_at": attempt["started_at"],
            "ended_at": attempt["ended_at"],
            "outcome": "ok" if attempt["end_reason"] in ("trained", None) else attempt["end_reason"],
            "detail": attempt["detail"],
        }
        for attempt in job["attempts"]
    ]
    return sorted([*job["steps"], *trainings], key=lambda step: float(step["began_at"]))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _ended(step: Record) -> float:
    return float(step["ended_at"] or time.time())


def _outcome(step: Record) -> tuple[str, Tone]:
    if step["ended_at"] is None:
        return "now", "live"
    outcome = step["outcome"] or "ended"
    return outcome, "good" if outcome == "ok" else "warn"


class _JobFacts:
    def __init__(self) -> None:
        with panel("Job"):
            self._facts = Facts()

    def show(self, job: Record) -> None:
        attempts = job["attempts"]
        newest = attempts[-1] if attempts else None
        self._facts.show(
            {
                "Model": job["model"],
                "Task": job["task_id"],
                "Validator": job["validator"],
                "Started": clock(job["started_at"]),
                "Deadline": clock(job["deadline_at"]),
                "Attempts": str(len(attempts)) if attempts else "none yet",
                "GPUs": ", ".join(newest["gpus"]) if newest else None,
                "Ended by": job["end_reason"],
                "Folder": job["folder"],
            }
        )


class _ValidatorView:
    """What a validator gets when it asks."""

    def __init__(self) -> None:
        with panel("What the validator sees"):
            self._facts = Facts()

    def show(self, job: Record) -> None:
        submission = job["submission"]
        meaning = (job.get("meaning") or {}).get("validator")
        self._facts.show(
            {
                "Submission": submission["repo"] if submission else "none yet: asked for it, we answer 404",
                "Hash": submission["model_hash"] if submission else None,
                "Published": clock(job["submitted_at"]) if submission else None,
                "Wanted name": job["expected_repo_name"],
                "Meaning": meaning,
            }
        )


class _Files:
    def __init__(self) -> None:
        with panel("Files"), box("tall").props('tabindex="0" aria-label="Files of the job"'):
            self._table = Table(
                "Files",
                [
                    Column("Name", lambda one: one["name"], classes="mono why"),
                    Column("Size", lambda one: size(one["bytes"]), number=True),
                    Column("Changed", lambda one: clock(one["at"]), number=True, classes="wide-only"),
                ],
                key=lambda one: one["name"],
            )
            self._nothing = empty(
                "No files: the job has not been launched, or they were removed (see KEEP_FINISHED_HOURS)."
            )

    def show(self, files: list[Record]) -> None:
        set_visible(self._nothing, self._table.show(files) == 0)
