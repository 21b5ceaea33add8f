"""All jobs, by pages, narrowed by state and text."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple
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


class _Query(NamedTuple):
    """The list's address: filters, and the jobs that are picked to be compared."""

    q: str = ""
    state: str = ""
    tag: str = ""
    pick: str = ""

    @property
    def picked(self) -> list[str]:
        return [number for number in self.pick.split(",") if number.isdecimal()]

    def toggled(self, number: str) -> _Query:
        others = [one for one in self.picked if one != number]
        return self._replace(pick=",".join(others if number in self.picked else [*others, number]))


@page("/jobs", "Jobs", place=20)
def jobs_page(
    view: PageView, q: str = "", state: str = "", tag: str = "", pick: str = "", before: int = 0
) -> None:
    page_head("Jobs")
    asked = _Query(q, state if state in _STATES else "", tag, pick)
    with panel("All jobs" if not before else f"Jobs before #{before}") as outer:
        _filters(view, asked)
        table: Table[JobSummary] = Table("Jobs", _columns(view, asked, before), key=attrgetter("id"))
        nothing = empty("No job is like this. A validator's start of an accepted task begins one.")
        with box("row"):
            if before:
                Link("Newest", view.href("/jobs", **asked._asdict()))
            earlier = Link("Earlier", "")

    def show(answer: JobList) -> None:
        is_priced = any(job.cost is not None for job in answer.jobs)
        outer.classes(remove="no-money") if is_priced else outer.classes(add="no-money")
        set_visible(nothing, table.show(answer.jobs) == 0)
        set_visible(earlier, answer.next is not None)
        earlier.show("Earlier", view.href("/jobs", **asked._asdict(), before=answer.next))

    wanted = {"limit": PAGE_SIZE, "q": asked.q, "state": asked.state, "tag": tag, "before": before or None}
    query = urlencode({name: value for name, value in wanted.items() if value})
    view.live(f"/jobs?{query}", JobList, show, every=3.0)


def _filters(view: PageView, asked: _Query) -> None:
    def search() -> None:
        changed = asked._replace(
            q=(text.value or "").strip(), state=choice.value, tag=(tag.value or "").strip()
        )
        ui.navigate.to(view.href("/jobs", **changed._asdict()))

    with box("row"):
        text = ui.input("Model, task or note", value=asked.q).props("outlined dense clearable")
        text.style("width:260px").on("keydown.enter", search)
        choice = ui.select(
            {"": "any state"} | {one: one for one in _STATES}, value=asked.state, label="State"
        )
        choice.props("outlined dense options-dense").style("width:150px")
        choice.on_value_change(search)
        tag = ui.input("Tag", value=asked.tag).props("outlined dense clearable")
        tag.style("width:150px").on("keydown.enter", search)
        ui.button("Search", color=None, on_click=search).props("flat no-caps").classes("plain")
        if picked := asked.picked:
            Link(f"Compare {len(picked)}", view.href("/compare", jobs=",".join(picked)), "strong")
            Link("Pick none", view.href("/jobs", **asked._replace(pick="")._asdict()), "small")


def _columns(view: PageView, asked: _Query, before: int) -> list[Column[JobSummary]]:
    def job_page(job: JobSummary) -> str:
        return view.href(f"/jobs/{job.id}")

    def pick_page(job: JobSummary) -> str:
        return view.href("/jobs", **asked.toggled(str(job.id))._asdict(), before=before or None)

    def pick_text(job: JobSummary) -> str:
        return "✓ picked" if str(job.id) in asked.picked else "pick"

    return [
        Column("Job", job_title, href=job_page),
        Column("State", state_text, classes="states"),
        Column("Task", "task_type", task_name, classes="wide-only"),
        Column("Held out", _held_out),
        Column("Cost", _cost, number=True, classes="money"),
        Column("Tags", _tags, classes="wide-only"),
        Column("Started", "started_at", clock, classes="nowrap wide-only"),
        Column("Took", _took, number=True, classes="wide-only"),
        Column("Of", _granted, number=True, classes="wide-only"),
        Column("Compare", pick_text, href=pick_page, classes="nowrap small"),
        Column("Ended by", _end, classes="why"),
    ]


def _held_out(job: JobSummary) -> str:
    return scores(job).removeprefix("held out ")


def _tags(job: JobSummary) -> str:
    return " ".join(job.tags)


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
