"""The overview: is it alive, is it earning; to be read in five seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter

from core.domain.job_states import JobState
from miner.api.alerts import Alert
from miner.api.fleet import FleetStatus
from miner.api.jobs import JobSummary, LiveJob, RunningJob
from miner.api.offers import OfferSummary
from miner.api.reports import Kpi, Money
from miner.api.status import DaemonSummary, Overview
from miner.dashboard.daemons import DaemonLink
from miner.dashboard.gpu_rows import GpuRows
from miner.dashboard.job_texts import (
    NOT_LIVE,
    answer_text,
    deadline_text,
    gpu_names,
    job_title,
    scores,
    severity_tone,
    state_text,
    subject_text,
    task_name,
)
from miner.dashboard.layout import PageView, page, page_head
from miner.dashboard.node_rows import NodeTable, gpus_at_work
from miner.dashboard.parts import (
    UNKNOWN,
    Column,
    FigureTile,
    KeyedRows,
    Link,
    Meter,
    Sparkline,
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
from miner.reports.money import money_line

NO_ALERTS = "Nothing is wrong."


@page("/", "Overview", place=10)
def overview_page(view: PageView) -> None:
    _, _ = page_head("Overview")
    state = _StateLine()
    if len(view.links) > 1:
        _machines(view)
    indicators = _Indicators()
    with box("grid"):
        with box("stack w8").style("gap:16px"):
            gpus, nodes, jobs = GpuRows(view), NodeTable(), _Jobs(view)
        with box("stack w4").style("gap:16px"):
            alerts, ended = _Alerts(view), _Ended(view)
    decisions = _Decisions(view)

    def show(answer: Overview) -> None:
        state.show(answer.daemon, answer.jobs, answer.fleet, len(answer.alerts))
        indicators.show(answer.kpis, answer.money)
        gpus.show(answer.fleet, answer.jobs)
        nodes.show(answer.fleet)
        jobs.show(answer.jobs, answer.fleet)
        alerts.show(answer.alerts)
        ended.show(answer.ended)
        decisions.show(answer.decisions)

    view.live("/overview", Overview, show)
    view.follow(state.show_lost)
    view.follow(alerts.show_lost)


class _StateLine:
    """One sentence: it answers, it trains, and since when."""

    def __init__(self) -> None:
        with box("row").style("margin-top:-10px"):
            self._state = Text("Asking the daemon", "state strong")
            self._facts = Text("", "muted")
        self._trouble = Text("", "notice hidden", "p").props('role="status"')

    def show(
        self, daemon: DaemonSummary, jobs: Sequence[JobSummary], fleet: FleetStatus, alerts: int
    ) -> None:
        training = sum(job.state is JobState.TRAINING for job in jobs)
        troubles = daemon.troubles
        doing = f"{training} in training" if training else "nothing in training"
        wrong = f", {alerts} open alert{'s' if alerts > 1 else ''}" if alerts else ""
        self._state.show(f"Answering, {doing}{wrong}", "warn" if troubles or alerts else "good")
        waiting = f"{daemon.held_offers} offers held, {daemon.waiting_jobs} jobs wait for GPUs"
        facts = [
            gpus_at_work(fleet),
            f"up {duration(daemon.uptime_seconds)}",
            waiting,
            f"policy {daemon.policy}",
            f"version {daemon.version}",
        ]
        self._facts.show(" · ".join(facts))
        self._trouble.show("; ".join(troubles))
        set_visible(self._trouble, bool(troubles))

    def show_lost(self, link: DaemonLink) -> None:
        if link.lost_at is not None:
            self._state.show(f"Not answering for {duration(time.time() - link.lost_at)}", "bad")


def _machines(view: PageView) -> None:
    """A line per daemon: all of an operator's machines at a glance."""
    with panel("Machines"):
        for link in view.links:
            _machine(view, link)


def _machine(view: PageView, link: DaemonLink) -> None:
    with box("row"):
        name = Link(link.name, f"/?daemon={link.name}", "strong")
        name.style("min-width:120px")
        state = Text("asking", "state")
        facts = Text("", "muted")

    def show_lost(one: DaemonLink) -> None:
        if one.lost_at is not None:
            state.show(f"unreachable since {clock(one.lost_at)}", "bad")

    def show(answer: Overview) -> None:
        troubles = len(answer.daemon.troubles)
        state.show(f"{troubles} problems" if troubles else "answering", "warn" if troubles else "good")
        facts.show(f"{gpus_at_work(answer.fleet)} · {len(answer.jobs)} jobs · {len(answer.alerts)} alerts")

    view.live("/overview", Overview, show, link=link)
    view.follow(show_lost, link)


class _Indicators:
    """The five indicators against their goals."""

    def __init__(self) -> None:
        self._rows: KeyedRows[Kpi] = KeyedRows(box("figures"), self._make)
        self._money = Text("", "hidden", "p")

    def show(self, kpis: Sequence[Kpi], money: Money | None) -> None:
        self._rows.show((kpi.name, kpi) for kpi in kpis)
        self._money.show(f"Last 24 hours: {money_line(money)}" if money else "")
        set_visible(self._money, money is not None)

    def _make(self, kpi: Kpi) -> Callable[[Kpi], None]:
        figure = FigureTile(kpi.title)

        def show(one: Kpi) -> None:
            value, unit = _indicator(one.value, one.unit, one.name)
            tone: Tone = "" if one.met is None else "good" if one.met else "warn"
            figure.show(value, unit, f"{_goal(one)}{one.detail}", tone)

        return show


def _indicator(value: float | None, unit: str, name: str) -> tuple[str, str]:
    if value is None:
        return UNKNOWN, ""
    if unit == "share":
        return f"{value * 100:.1f}".removesuffix(".0"), "%"
    if unit == "hours":
        return (f"{value:.1f}", "h") if value >= 1 else (f"{value * 60:.0f}", "min")
    return (f"{value:.0f}" if name == "rank" else f"{value:.2f}"), unit


def _goal(kpi: Kpi) -> str:
    target = kpi.target
    if target is None or kpi.name == "quality":
        return ""
    value, unit = _indicator(target, kpi.unit, kpi.name)
    sign = "<" if kpi.name == "completion_hours" else "≤" if kpi.name == "rank" else ">"
    return f"goal {sign} {value}{' ' + unit if unit else ''}; "


class _Jobs:
    """A row per open job: how far, how well, how fast, and how much time is left."""

    def __init__(self, view: PageView) -> None:
        self._view = view
        self._gpus: Mapping[str, str] = {}
        with panel("Jobs"):
            self._rows: KeyedRows[RunningJob] = KeyedRows(box("rows"), self._make)
            self._nothing = empty(
                "No job is open. When a validator starts an accepted task, it is here within seconds; "
                "`make demo` trains one without a validator."
            )

    def show(self, jobs: Sequence[RunningJob], fleet: FleetStatus) -> None:
        self._gpus = gpu_names(fleet)
        set_visible(self._nothing, self._rows.show((job.id, job) for job in jobs) == 0)

    def _make(self, job: RunningJob) -> Callable[[RunningJob], None]:
        with box("job-row"):
            with box("stack"):
                with box("row").style("gap:2px 10px"):
                    Link(job_title(job), self._view.href(f"/jobs/{job.id}"), "strong cut")
                    state = Text("", "state")
                doing = Text("", "small muted cut")
            with box("stack"):
                progress = Meter("Progress")
            with box("row").style("gap:4px 10px;flex-wrap:nowrap"):
                spark = Sparkline("Loss")
                loss = Text("", "small nowrap")
            with box("stack"):
                held_out = Text("", "small nowrap")
                deadline = Text("", "small nowrap")

        def show(one: RunningJob) -> None:
            live = one.live or NOT_LIVE
            state.show(*state_text(one))
            doing.show(self._doing(one, live))
            step, steps = live.step, live.steps
            share = step / steps if step is not None and steps else None
            progress.show(
                share, f"step {step} of {steps}", missing=f"step {step}" if step else _transfer(live)
            )
            spark.show(one.spark)
            loss.show(f"loss {number(live.loss)}" if live.loss is not None else "")
            held_out.show(scores(one))
            deadline.show(*deadline_text(one))

        return show

    def _doing(self, job: RunningJob, live: LiveJob) -> str:
        names = ", ".join(self._gpus.get(gpu, gpu) for gpu in live.gpus)
        parts = [
            live.trouble,
            f"GPU {names}" if names else "",
            f"{number(live.tokens_s)} tokens/s" if live.tokens_s else "",
            f"MFU {percent(live.mfu)}" if live.mfu else "",
            f"attempt {live.attempt}" if (live.attempt or 0) > 1 else "",
        ]
        return " · ".join(part for part in parts if part) or job.task_id


def _transfer(live: LiveJob) -> str:
    done, total = live.bytes_done, live.bytes_total
    if done is None:
        return UNKNOWN
    return f"{size(done)} of {size(total)}" if total else size(done)


class _Alerts:
    def __init__(self, view: PageView) -> None:
        with panel("Open alerts"):
            self._rows: KeyedRows[Alert] = KeyedRows(box("rows"), partial(self._make, view))
            self._nothing = empty(NO_ALERTS)

    def show(self, alerts: Sequence[Alert]) -> None:
        self._nothing.show(NO_ALERTS)
        set_visible(self._nothing, self._rows.show((alert.id, alert) for alert in alerts) == 0)

    def show_lost(self, link: DaemonLink) -> None:
        if link.lost_at is not None:
            self._nothing.show("Current alerts are unknown.")
            set_visible(self._nothing, True)

    def _make(self, view: PageView, alert: Alert) -> Callable[[Alert], None]:
        with box("stack"):
            with box("row").style("gap:2px 10px"):
                Link(alert.rule, view.href("/alerts"), "state").classes(severity_tone(alert.severity))
                since = Text("", "small muted")
            text = Text("", "small")

        def show(one: Alert) -> None:
            since.show(f"{subject_text(one.subject)}, for {ago(one.raised_at).removesuffix(' ago')}")
            text.show(one.text)

        return show


class _Ended:
    def __init__(self, view: PageView) -> None:
        with panel("Last ended"):
            self._rows: KeyedRows[JobSummary] = KeyedRows(box("rows"), partial(self._make, view))
            self._nothing = empty("No job has ended yet.")

    def show(self, jobs: Sequence[JobSummary]) -> None:
        set_visible(self._nothing, self._rows.show((job.id, job) for job in jobs) == 0)

    def _make(self, view: PageView, job: JobSummary) -> Callable[[JobSummary], None]:
        with box("row").style("gap:2px 10px"):
            state = Text("", "state")
            Link(job_title(job), view.href(f"/jobs/{job.id}"), "cut")
            text = Text("", "small muted")

        def show(one: JobSummary) -> None:
            state.show(*state_text(one))
            text.show(" · ".join(part for part in (scores(one), ago(one.ended_at)) if part))

        return show


class _Decisions:
    """The last answers, and their reasons."""

    def __init__(self, view: PageView) -> None:
        with panel("Last decisions"):
            self._table: Table[OfferSummary] = Table(
                "Last decisions",
                [
                    Column("When", "decided_at", clock, classes="nowrap"),
                    Column("Answer", answer_text, classes="states"),
                    Column("Model", "model", short_model),
                    Column("Task", "task_type", task_name, classes="wide-only"),
                    Column("Hours", "hours", number, number=True, classes="wide-only"),
                    Column("Score", "score", partial(number, digits=2), number=True, classes="wide-only"),
                    Column("Why", _why, classes="why"),
                ],
                key=attrgetter("id", "decided_at"),
            )
            self._nothing = empty(
                "No validator has offered a task yet. `god-miner chain status` says whether they find you."
            )

    def show(self, decisions: Sequence[OfferSummary]) -> None:
        set_visible(self._nothing, self._table.show(decisions) == 0)


def _why(offer: OfferSummary) -> str:
    return offer.why or offer.message
