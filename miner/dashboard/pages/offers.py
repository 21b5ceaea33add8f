"""Offers: what came, what was answered and why, and what other values would have done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from nicegui import ui
from pydantic import JsonValue

from miner.api.config_files import ConfigFileList, ConfigFileText
from miner.api.offers import (
    DecisionDetails,
    DecisionFactor,
    DecisionReason,
    OfferDetails,
    OfferList,
    OfferOutcome,
    OfferSummary,
)
from miner.dashboard.daemons import DaemonTrouble
from miner.dashboard.effects import BacktestView
from miner.dashboard.job_texts import answer_text, task_name
from miner.dashboard.layout import PageView, page, page_head
from miner.dashboard.parts import (
    UNKNOWN,
    Column,
    Facts,
    Link,
    Table,
    Text,
    Tone,
    box,
    clock,
    duration,
    empty,
    number,
    panel,
    percent,
    set_visible,
    short_model,
)

_PER_PAGE = 15
_ANSWERS = {"": "All answers", "true": "Accepted", "false": "Refused"}
_TYPES = {
    "": "All task types",
    **{
        kind: task_name(kind) for kind in ("InstructTextTask", "ChatTask", "DpoTask", "GrpoTask", "ImageTask")
    },
}
_OUTCOMES: dict[OfferOutcome, Tone] = {
    OfferOutcome.PUBLISHED: "good",
    OfferOutcome.FAILED: "bad",
    OfferOutcome.OPEN: "live",
    OfferOutcome.LAPSED: "warn",
    OfferOutcome.REFUSED: "muted",
}


@page("/offers", "Offers", place=30)
def offers_page(view: PageView, q: str = "", accepted: str = "", task_type: str = "") -> None:
    page_head("Offers")
    with panel("What came, and what was answered"):
        _OfferList(view, q, accepted, task_type)
    with panel("What if?", note="past offers, answered by other values of the policy in force"):
        _WhatIf(view)


class _OfferList:
    """The newest offers, live; earlier ones by pages."""

    def __init__(self, view: PageView, q: str, accepted: str, task_type: str) -> None:
        self._view = view
        self._before: list[int] = []
        self._next: int | None = None
        self._stop: Callable[[], None] | None = None
        with box("row"):
            self._answer = _select(_ANSWERS, accepted, "Answer", self._restart)
            self._type = _select(_TYPES, task_type, "Task type", self._restart)
            self._text = (
                ui.input("Model or task id", value=q, on_change=self._restart)
                .props("outlined dense clearable debounce=400")
                .style("flex:1 1 180px;max-width:340px")
            )
        self._place = box("stack")
        with self._place:
            pass
        with box("row"):
            self._newer = _plain_button("Newest", self._to_newest)
            self._older = _plain_button("Earlier", self._to_older)
            self._where = Text("", "small muted")
        self._watch()

    def _restart(self) -> None:
        self._before.clear()
        self._watch()

    def _to_newest(self) -> None:
        self._restart()

    def _to_older(self) -> None:
        if self._next is not None:
            self._before.append(self._next)
            self._watch()

    def _watch(self) -> None:
        """Show the page of offers that the filters and buttons mean."""
        if self._stop is not None:
            self._stop()
        self._place.clear()
        with self._place:
            table = self._make_table()
            nothing = empty("")

            def show(answer: OfferList) -> None:
                self._next = answer.next
                count = table.show(answer.offers)
                nothing.show("" if count else self._empty_text())
                set_visible(nothing, count == 0)
                set_visible(self._older, self._next is not None)

            self._stop = self._view.live(self._path(), OfferList, show, every=5.0)
        set_visible(self._newer, bool(self._before))
        self._where.show(f"before offer {self._before[-1]}" if self._before else "")

    def _path(self) -> str:
        query = {
            "limit": _PER_PAGE,
            "accepted": self._answer.value,
            "task_type": self._type.value,
            "q": (self._text.value or "").strip()[:200],
            "before": self._before[-1] if self._before else None,
        }
        return "/offers?" + urlencode({name: value for name, value in query.items() if value})

    def _empty_text(self) -> str:
        if self._answer.value or self._type.value or self._text.value:
            return "No matching offers; change the filters."
        return (
            "No validator has offered a task yet. `god-miner chain status` says whether they find you, "
            "`god-miner doctor` whether they can reach you."
        )

    def _make_table(self) -> Table[OfferSummary]:
        def offer_page(offer: OfferSummary) -> str:
            return self._view.href(f"/offers/{offer.id}")

        return Table(
            "Offers",
            [
                Column("Offer", "id", "#{}".format, href=offer_page),
                Column("Came", "received_at", clock, classes="nowrap wide-only"),
                Column("Answer", answer_text, classes="states"),
                Column("Model", "model", short_model, classes="model"),
                Column("Task", "task_type", task_name, classes="wide-only"),
                Column("Hours", "hours", number, number=True),
                Column("Score", "score", _score, number=True, classes="wide-only"),
                Column("Became", _outcome, classes="wide-only"),
                Column("Why", _why, classes="why wide-only"),
            ],
            key=attrgetter("id"),
        )


class _Lever(NamedTuple):
    """A value of the policy that the slider moves."""

    label: str
    unit: str
    low: float
    high: float
    step: float
    start: float
    #: The key that it overrides.
    key: str
    #: Keys of the policy that count as well where it names them: the lowest one counts.
    also: str = ""

    def overrides(self, value: float, keys: Iterable[str]) -> dict[str, JsonValue]:
        """Return what is overridden in a policy with these keys."""
        own = [path for path in keys if self.also and path.startswith(self.also)]
        shown: JsonValue = int(value) if self.unit == "jobs" else value
        return dict.fromkeys([self.key, *own], shown)


_LEVERS = {
    "hours": _Lever("Longest task", "hours", 1, 24, 1, 12, "rules.max_hours", "rules.hours."),
    "score": _Lever("Score needed", "", 0, 1, 0.05, 0.5, "score.threshold"),
    "jobs": _Lever("Jobs at once", "jobs", 0, 24, 1, 4, "rules.max_jobs"),
    "value": _Lever("Points per GPU-hour needed", "", 0, 3, 0.1, 0.3, "rules.min_value"),
}


class _WhatIf:
    """A slider over one value of the policy, and the backtest of where it stands."""

    def __init__(self, view: PageView) -> None:
        self._view = view
        self._lever = _LEVERS["hours"]
        with box("row"):
            self._which = _select(
                {name: lever.label for name, lever in _LEVERS.items()}, "hours", "Value", self._change_lever
            )
            self._days = _select(
                {"1": "1 day", "7": "7 days", "30": "30 days"}, "7", "Offers of", lambda: None
            )
            with box("row").style("flex:1 1 260px;flex-wrap:nowrap"):
                self._slider = ui.slider(min=1, max=24, step=1, value=12).style("min-width:120px")
                self._slider.props["aria-label"] = "The value to try"
                self._slider.on_value_change(lambda _: self._show_value())
                self._slider.on("change", self._run)
                self._value = Text("", "strong nowrap").style("min-width:70px")
            _plain_button("Compare", self._run).classes("primary")
        self._result = BacktestView(view)
        self._show_value()

    def _change_lever(self) -> None:
        self._lever = lever = _LEVERS[self._which.value]
        for name, value in (("min", lever.low), ("max", lever.high), ("step", lever.step)):
            self._slider.props[name] = value
        self._slider.value = lever.start
        self._show_value()

    def _show_value(self) -> None:
        self._value.show(f"{self._slider.value:g} {self._lever.unit}".strip())

    async def _run(self) -> None:
        keys: list[str] = []
        try:
            name = (await self._view.get("/config", ConfigFileList)).in_force.policy
            shown = await self._view.get(f"/config/policies/{name}", ConfigFileText)
            keys = [value.path for value in shown.effective]
        except DaemonTrouble:
            pass  # the backtest itself says what is wrong
        overrides = self._lever.overrides(self._slider.value, keys)
        await self._result.run(float(self._days.value), overrides)


@page("/offers/{offer}", "Offer")
async def offer_page(view: PageView, offer: str) -> None:
    heading, _ = page_head(f"Offer {offer}")
    try:
        found = await view.get(f"/offers/{quote(offer, safe='')}", OfferDetails)
    except DaemonTrouble as error:
        view.explain(error, "/offers?limit=1")
        Link("All offers", view.href("/offers"))
        return
    explained = found.explanation
    what = "Start without an accepted offer" if found.is_start else f"Offer {found.id}"
    heading.show(f"{what}: {short_model(found.model)}")
    with box("row").style("margin-top:-10px"):
        Text().classes("state strong").show(*answer_text(found))
        Text(f"by policy {explained.policy}", "muted")
        Text(f"answer to the validator: {explained.message}", "muted")
    with box("grid"):
        with box("stack w7").style("gap:16px"):
            _rules(explained.reasons)
            _factors(explained)
            if not explained.accepted:
                _needed(view, explained.reasons, found.overrides)
        with box("stack w5").style("gap:16px"):
            _offer_facts(found)
            _plan_facts(explained)


def _rules(reasons: Sequence[DecisionReason]) -> None:
    with panel("Rules"):
        table: Table[DecisionReason] = Table(
            "Rules",
            [
                Column("Rule", "rule", classes="nowrap"),
                Column("", _verdict, classes="states"),
                Column("Why", "text", classes="why"),
            ],
            key=attrgetter("rule"),
        )
        if table.show(reasons) == 0:
            Text("No rule was asked.", "empty", "p")


def _verdict(reason: DecisionReason) -> tuple[str, Tone]:
    return ("ok", "good") if reason.passed else ("no", "bad")


class _NamedFactor(NamedTuple):
    name: str
    factor: DecisionFactor


def _factors(explained: DecisionDetails) -> None:
    if not explained.factors:
        return
    needed = explained.threshold
    note = "no threshold" if needed is None else f"needed: more than {needed:g}"
    score = number(explained.score, 3)
    with panel("Score", note=f"{score}; {note}"):
        table: Table[_NamedFactor] = Table(
            "Score",
            [
                Column("Factor", "name"),
                Column("Value", "factor.value", "{:.3f}".format, number=True),
                Column("Weight", "factor.weight", "{:.2f}".format, number=True),
                Column("Adds", "factor.contribution", "{:.3f}".format, number=True),
                Column("From", "factor.text", classes="why wide-only"),
            ],
            key=attrgetter("name"),
        )
        table.show(_NamedFactor(name, factor) for name, factor in explained.factors.items())


def _needed(view: PageView, reasons: Sequence[DecisionReason], overrides: Mapping[str, str]) -> None:
    failed = [one for one in reasons if not one.passed]
    with panel("What would have to change"):
        for one in failed:
            Text(f"{one.rule}: {one.way or 'otherwise'}", tag="p")
        if not overrides:
            return
        result = box("stack")
        with result:
            shown = BacktestView(view)

        async def try_them() -> None:
            await shown.run(7.0, {key: _value(text) for key, text in overrides.items()})

        said = ", ".join(f"{key} of {value}" for key, value in overrides.items())
        with box("row"):
            _plain_button(f"Backtest 7 days with {said}", try_them).classes("primary")


def _offer_facts(found: OfferDetails) -> None:
    with panel("The offer"):
        Facts().show(
            {
                "Model": found.model,
                "Task": task_name(found.task_type),
                "Hours": number(found.hours),
                "Parameters": None if found.params is None else number(found.params),
                "Rows stated": None if found.ds_size is None else number(found.ds_size),
                "Came": clock(found.received_at),
                "Asked": f"{found.times_seen} times" if found.times_seen > 1 else "once",
                "Became": found.became,
                "Task id": found.task_id,
                "Validator": found.validator,
            }
        )


def _plan_facts(explained: DecisionDetails) -> None:
    plan, place, value = explained.plan, explained.placement, explained.value
    if plan is None and value is None:
        return
    facts: dict[str, str | None] = {}
    if plan is not None:
        facts["GPUs"] = str(plan.gpus)
        facts["Takes"] = duration(plan.busy_s)
        facts["Waits for GPUs"] = duration(plan.wait_s) if plan.wait_s else None
        facts["Epochs"] = number(plan.epochs, 2)
        facts["Of the wished training"] = percent(plan.share)
    if place is not None:
        facts["Place"] = f"GPU {', '.join(place.gpus)}, {clock(place.starts_at)} to {clock(place.ends_at)}"
        facts["Why there"] = place.why
    if value is not None:
        facts["Worth"] = f"{value.points:.2f} points, {value.per_gpu_hour:.3f} per GPU-hour"
        facts["Chances"] = f"success {percent(value.success)}, win {percent(value.win, 1)}"
    with panel("Plan and worth"):
        Facts().show(facts)


def _value(text: str) -> JsonValue:
    """Return a number if it is one, like `12`, else the text, like `70b`."""
    try:
        return float(text)
    except ValueError:
        return text


def _score(score: float | None) -> str:
    return UNKNOWN if score is None else f"{score:.2f}"


def _why(offer: OfferSummary) -> str:
    """Say why it was refused, or what was expected of it."""
    if offer.accepted:
        return "" if offer.points is None else f"{offer.points:.2f} points expected"
    return offer.why or offer.message


def _outcome(offer: OfferSummary) -> tuple[str, Tone]:
    return offer.became.value, _OUTCOMES[offer.became]


def _select(options: dict[str, str], value: str, label: str, on_change: Callable[[], Any]) -> ui.select:
    return (
        ui.select(options, value=value if value in options else "", label=label, on_change=on_change)
        .props("outlined dense options-dense")
        .style("min-width:140px")
    )


def _plain_button(text: str, on_click: Callable[[], Any]) -> ui.button:
    return ui.button(text, color=None, on_click=on_click).props("flat no-caps").classes("plain")
