"""All jobs, by pages, narrowed by state and text."""

from __future__ import annotations

from operator import attrgetter
from urllib.parse import urlencode

from nicegui import ui

from core.domain.job_states import JobState
from core.domain.units import show_dollars
from miner.api.jobs import JobList, JobSummary
from miner.dashboard.job_texts import deadline_text, job_title, scores, state_text, task_name
from miner.dashboard.layout import PageView, page, page_head
from miner.dashboard.parts import Column, Link, Table, box, clock, duration, empty, panel, set_visible

PAGE_SIZE = 50
_STATES = [state.value for state in JobState]


@page("/jobs", "Jobs", place=20)
def jobs_page(view: PageView, q: str = "", state: str = "", before: int = 0) -> None:
    page_head("Jobs")
    state = state if state in _STATES else ""
    with panel("All jobs" if not before else f"Jobs before #{before}") as outer:
        _filters(view, q, state)
        table: Table[JobSummary] = Table("Jobs", _columns(view), key=attrgetter("id"))
        nothing = empty("No job is like this. A validator's start of an accepted task begins one.")
        with box("row"):
            if before:
                Link("Newest", view.href("/jobs", q=q, state=state))
            earlier = Link("Earlier", "")

    def show(answer: JobList) -> None:
        is_priced = any(job.cost is not None for job in answer.jobs)
        outer.classes(remove="no-money") if is_priced else outer.classes(add="no-money")
        set_visible(nothing, table.show(answer.jobs) == 0)
        set_visible(earlier, answer.next is not None)
        earlier.show("Earlier", view.href("/jobs", q=q, state=state, before=answer.next))

    asked = {"limit": PAGE_SIZE, "q": q, "state": state, "before": before or None}
    view.live(
        f"/jobs?{urlencode({name: value for name, value in asked.items() if value})}",
        JobList,
        show,
        every=3.0,
    )


def _filters(view: PageView, q: str, state: str) -> None:
    def search() -> None:
        ui.navigate.to(view.href("/jobs", q=(text.value or "").strip(), state=choice.value))

    with box("row"):
        text = ui.input("Model or task", value=q).props("outlined dense clearable").style("width:260px")
        text.on("keydown.enter", search)
        choice = ui.select({"": "any state"} | {one: one for one in _STATES}, value=state, label="State")
        choice.props("outlined dense options-dense").style("width:150px")
        choice.on_value_change(search)
        ui.button("Search", color=None, on_click=search).props("flat no-caps").classes("plain")


def _columns(view: PageView) -> list[Column[JobSummary]]:
    def job_page(job: JobSummary) -> str:
        return view.href(f"/jobs/{job.id}")

    return [
        Column("Job", job_title, href=job_page),
        Column("State", state_text, classes="states"),
        Column("Task", "task_type", task_name, classes="wide-only"),
        Column("Held out", _held_out),
        Column("Cost", _cost, number=True, classes="money"),
        Column("Started", "started_at", clock, classes="nowrap wide-only"),
        Column("Took", _took, number=True),
        Column("Of", _granted, number=True, classes="wide-only"),
        Column("Ended by", _end, classes="why"),
    ]


def _held_out(job: JobSummary) -> str:
    return scores(job).removeprefix("held out ")


def _cost(job: JobSummary) -> str:
    return "" if job.cost is None else show_dollars(job.cost)


def _took(job: JobSummary) -> str:
    return "" if job.ended_at is None else duration(job.ended_at - job.started_at)


def _granted(job: JobSummary) -> str:
    return duration(job.hours * 3600)


def _end(job: JobSummary) -> str:
    if job.ended_at is None:
        return deadline_text(job)[0]
    return ": ".join(part for part in (job.end_reason or "", job.detail) if part)
