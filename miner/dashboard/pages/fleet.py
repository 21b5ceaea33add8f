"""Fleet: what every card does in the next 24 hours, what it did, what waits, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

from nicegui import ui

from miner.dashboard.charts import COLOURS, Format, LineChart, Series
from miner.dashboard.daemons import DaemonLink
from miner.dashboard.layout import PageView, page, page_head
from miner.dashboard.parts import (
    UNKNOWN,
    Column,
    KeyedRows,
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
    size,
    until,
)

Record = Mapping[str, Any]
_HOURS = 24
#: Points of a line: more than a screen shows apart.
_MAX_POINTS = 240
_METRICS: dict[str, tuple[str, Format]] = {
    "utilization": ("Utilisation", "percent"),
    "memory": ("Memory, highest", "percent"),
    "temperature": ("Temperature, highest (°C)", "number"),
    "power": ("Power (W)", "number"),
    "busy": ("Taken by jobs", "percent"),
}
_SPANS = {"3": "3 hours", "24": "24 hours", "168": "7 days", "720": "30 days"}

_NOTHING_MEASURED = (
    "Nothing is measured yet: a minute is here when it is over, under 3 hours; an hour likewise. Where "
    "nothing comes, `god-miner doctor` says whether NVML answers."
)


@page("/fleet", "Fleet", place=40)
def fleet_page(view: PageView) -> None:
    page_head("Fleet")
    for link in view.links:
        _schedule(view, link)
    with panel("History"):
        _History(view)
    with box("grid"):
        with box("stack w8"), panel("Cards"):
            cards = _card_table()
            trouble = Text("", "notice hidden", "p").props('role="status"')
        with box("stack w4"), panel("Queue"):
            waits = box()
            with waits:
                queue = _queue_table(view)
            nothing = empty("No job waits for cards.")

    def show(fleet: dict[str, Any]) -> None:
        cards.show(fleet["gpus"])
        trouble.show(fleet["trouble"] or "")
        set_visible(trouble, bool(fleet["trouble"]))
        waiting = [claim for claim in fleet["claims"] if claim["stage"] == "waiting"]
        queue.show(waiting)
        set_visible(waits, bool(waiting))
        set_visible(nothing, not waiting)

    view.live("/fleet", show)


def _schedule(view: PageView, link: DaemonLink) -> None:
    several = len(view.links) > 1
    title = f"The next {_HOURS} hours" + (f" on {link.name}" if several else "")
    with panel(title):
        gantt = _Gantt(link.name)
        nothing = empty(
            "No card is known. `god-miner fleet show` says what was looked for, GPUS what may be used."
        )
        set_visible(nothing, False)
        state = Text("", "state bad hidden").props('role="status"')
        with box("keys"):
            for kind, text in (("", "running"), ("promised", "reserved"), ("idle", "idle")):
                with box(tag="span"):
                    box(f"swatch {kind}", "span")
                    Text(text)
            summary = Text("")

    def show(fleet: dict[str, Any]) -> None:
        gantt.show(fleet)
        set_visible(nothing, not fleet["gpus"])
        free = _free_hours(fleet)
        summary.show(
            f"{free:.0f} of {len(fleet['gpus']) * _HOURS} card hours are not taken" if fleet["gpus"] else ""
        )

    def show_lost(one: DaemonLink) -> None:
        if not view.client.is_deleted:
            state.show(f"unreachable since {clock(one.lost_at)}" if one.lost_at is not None else "")
            set_visible(state, one.lost_at is not None)

    show_lost(link)
    view.client.on_delete(link.listen(show_lost))
    view.live("/fleet", show, link=link)


class _Gantt:
    """A row per card, with a bar for each job and reservation."""

    def __init__(self, daemon: str) -> None:
        self._daemon = daemon
        self._starts_at = 0.0
        self._grid = box("stack")
        with self._grid:
            with box("schedule"):
                Text("", "small")
                self._scale = box("schedule-scale").props('aria-hidden="true"')
            self._rows: KeyedRows[Record] = KeyedRows(box("stack").style("gap:5px"), self._make)
        self._shown_hour = -1

    def show(self, fleet: Record) -> None:
        self._starts_at = fleet["at"]
        hour = int(fleet["at"] // 600)
        if hour != self._shown_hour:
            self._shown_hour = hour
            self._show_scale()
        claims = fleet["claims"]
        self._rows.show(
            (gpu["id"], {**gpu, "claims": [one for one in claims if gpu["id"] in one["gpus"]]})
            for gpu in fleet["gpus"]
        )

    def _show_scale(self) -> None:
        self._scale.clear()
        with self._scale:
            Text("now").style("left:0")
            for share, moment in _full_hours(self._starts_at):
                if moment.hour % 4 == 0 and 0.15 < share < 0.97:
                    Text(moment.strftime("%H:%M")).style(f"left:{share * 100:.2f}%")

    def _make(self, gpu: Record) -> Callable[[Record], None]:
        with box("schedule"):
            name = Text("", "small cut")
            track = box("schedule-track")
            with track:
                lines = box().style("display:contents")
                bars: KeyedRows[Record] = KeyedRows(box().style("display:contents"), self._make_bar)
        with lines:
            for share, moment in _full_hours(self._starts_at):
                if moment.hour % 4 == 0:
                    box("hour").style(f"left:{share * 100:.2f}%")

        def show(one: Record) -> None:
            name.show(f"{one['index']} · {one['kind']}", "bad" if one["out"] else "")
            taken = [claim for claim in one["claims"] if self._place(claim) is not None]
            bars.show(((claim["validator"], claim["task_id"]), claim) for claim in taken)

        return show

    def _make_bar(self, claim: Record) -> Callable[[Record], None]:
        link = Link("", "")
        link.style("")
        shown = ""

        def show(one: Record) -> None:
            nonlocal shown
            left, width = self._place(one) or (0.0, 0.0)
            style = f"left:{left:.2f}%;width:{width:.2f}%"
            if style != shown:
                shown = style
                link.style(replace=style)
            link.classes(replace=one["stage"])
            link.show(_claim_name(one), self._href(one))
            text = (
                f"{one['stage']}: task {one['task_id']}, {clock(one['starts_at'])} to {clock(one['ends_at'])}"
            )
            if link.props.get("title") != text:
                link.props["title"] = link.props["aria-label"] = text
                link.update()

        return show

    def _href(self, claim: Record) -> str:
        kind = "offers" if claim["kind"] == "offer" else "jobs"
        return f"/{kind}/{quote(claim['task_id'], safe='')}?daemon={quote(self._daemon)}"

    def _place(self, claim: Record) -> tuple[float, float] | None:
        """Left end and width in percent; None: outside of what is shown."""
        whole = _HOURS * 3600.0
        start = max(claim["starts_at"] - self._starts_at, 0.0)
        end = min(max(claim["ends_at"] - self._starts_at, 0.0), whole)
        if claim["stage"] == "running":
            start, end = 0.0, max(end, 60.0)
        return None if start >= whole or end <= start else (start / whole * 100, (end - start) / whole * 100)


def _claim_name(claim: Record) -> str:
    job = claim.get("job_id")
    return f"#{job}" if job else claim["task_id"][:8]


def _full_hours(starts_at: float) -> list[tuple[float, datetime]]:
    """The full hours that are shown, as a share of the width."""
    first = datetime.fromtimestamp(starts_at).astimezone().replace(minute=0, second=0, microsecond=0)
    hours = [first + timedelta(hours=count) for count in range(1, _HOURS + 1)]
    return [((one.timestamp() - starts_at) / (_HOURS * 3600), one) for one in hours]


def _free_hours(fleet: Record) -> float:
    """Hours of cards that nothing has taken, of the time shown; windows of one card may overlap."""
    begins, free = fleet["at"], 0.0
    for gpu in fleet["gpus"]:
        taken = sorted(
            (max(one["starts_at"], begins), min(one["ends_at"], begins + _HOURS * 3600))
            for one in fleet["claims"]
            if gpu["id"] in one["gpus"]
        )
        at, busy = begins, 0.0
        for start, end in taken:
            busy += max(end - max(start, at), 0.0)
            at = max(at, end)
        free += 0.0 if gpu["out"] else _HOURS - busy / 3600
    return free


class _History:
    """One measured value of every card over time, from the roll-ups."""

    def __init__(self, view: PageView) -> None:
        self._view = view
        self._stop: Callable[[], None] | None = None
        self._names: dict[str, str] = {}
        self._data: dict[str, Any] = {}
        with box("row"):
            self._metric = _select(
                {name: title for name, (title, _) in _METRICS.items()}, "utilization", "Value"
            )
            self._span = _select(_SPANS, "24", "Of the last")
        self._metric.on_value_change(lambda _: self._build_chart())
        self._span.on_value_change(lambda _: self._watch())
        self._place = box()
        self._notes = box()
        view.live("/fleet", self._learn_names)
        self._build_chart()
        self._watch()

    def _learn_names(self, fleet: dict[str, Any]) -> None:
        self._names = {gpu["id"]: f"card {gpu['index']}" for gpu in fleet["gpus"]}

    def _watch(self) -> None:
        if self._stop is not None:
            self._stop()
        self._notes.clear()

        def show(answer: dict[str, Any]) -> None:
            self._data = answer
            self._draw()

        with self._notes:
            self._stop = self._view.live(f"/samples/history?hours={self._span.value}", show, every=60.0)

    def _build_chart(self) -> None:
        title, form = _METRICS[self._metric.value]
        self._place.clear()
        with self._place:
            self._chart = LineChart(
                f"{title} of every card",
                shows=form,
                height=240,
                from_zero=True,
                time_axis=True,
                y_max=1 if form == "percent" else None,
                nothing=_NOTHING_MEASURED,
            )
        self._draw()

    def _draw(self) -> None:
        series = [
            _series(self._names.get(gpu, gpu), rows, self._metric.value, index)
            for index, (gpu, rows) in enumerate(self._data.get("gpus", {}).items())
        ]
        self._chart.show([one for one in series if any(value is not None for value in one.y)])


def _series(name: str, rows: Sequence[Record], metric: str, colour: int) -> Series:
    step = -(-len(rows) // _MAX_POINTS) or 1
    groups = [rows[at : at + step] for at in range(0, len(rows), step)]
    points = [(group[0]["at"] * 1000, _mean([row[metric] for row in group])) for group in groups]
    return Series(
        name, [at for at, _ in points], [value for _, value in points], colour, dashed=colour >= len(COLOURS)
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _card_table() -> Table:
    return Table(
        "Cards",
        [
            Column("Card", lambda one: f"{one['index']} · {one['kind']}", classes="nowrap"),
            Column("State", _state, classes="states"),
            Column("Use", lambda one: _sampled(one, "utilization", percent), number=True),
            Column("Memory", _memory, number=True, classes="wide-only"),
            Column("Heat", lambda one: _sampled(one, "temperature", lambda v: f"{v:.0f} °C"), number=True),
            Column("Power", _power, number=True, classes="wide-only"),
            Column("Clocks", _clocks, classes="wide-only"),
            Column("Links", _links, classes="wide-only nowrap"),
            Column("Faults", _faults),
        ],
        key=lambda one: one["id"],
    )


def _sampled(gpu: Record, name: str, show: Callable[[Any], str]) -> str:
    value = (gpu.get("sample") or {}).get(name)
    return UNKNOWN if value is None else show(value)


def _state(gpu: Record) -> tuple[str, Tone]:
    if gpu["out"]:
        return "out", "bad"
    if gpu["task_id"] is None:
        return "idle", "muted"
    until_at = gpu.get("until")
    return (f"until {datetime.fromtimestamp(until_at).astimezone():%H:%M}" if until_at else "at work"), "live"


def _memory(gpu: Record) -> str:
    sample = gpu.get("sample") or {}
    used = sample.get("memory_used")
    return f"{size(used)} of {gpu['memory']}" if used is not None else gpu["memory"]


def _power(gpu: Record) -> str:
    sample = gpu.get("sample") or {}
    watts, limit = sample.get("power_watts"), sample.get("power_limit_watts")
    if watts is None:
        return UNKNOWN
    return f"{watts:.0f} of {limit:.0f} W" if limit else f"{watts:.0f} W"


def _clocks(gpu: Record) -> tuple[str, Tone]:
    sample = gpu.get("sample")
    if not sample or sample.get("sm_clock_mhz") is None:
        return UNKNOWN, ""
    held = ", ".join(sample["throttle"])
    return (
        (f"{sample['sm_clock_mhz']} MHz, held by {held}", "warn")
        if held
        else (f"{sample['sm_clock_mhz']} MHz", "")
    )


def _links(gpu: Record) -> str:
    linked = gpu["linked"]
    if not linked:
        return "none"
    if len(linked) > 2 and linked[-1] - linked[0] < len(linked) + 1:
        return f"{len(linked)} cards"
    return ", ".join(map(str, linked))


def _faults(gpu: Record) -> tuple[str, Tone]:
    sample = gpu.get("sample") or {}
    faults = [
        str(gpu["out"] or ""),
        "is not clean: something else had it" if gpu["unclean"] else "",
        "somebody else uses it too" if gpu["shared"] else "",
        f"Xid {', '.join(map(str, sample['xids']))}" if sample.get("xids") else "",
        f"{sample['ecc_errors']} memory errors" if sample.get("ecc_errors") else "",
    ]
    said = "; ".join(fault for fault in faults if fault)
    if said:
        return said, "bad"
    return ("none", "good") if sample else (UNKNOWN, "muted")


def _queue_table(view: PageView) -> Table:
    return Table(
        "Jobs that wait for cards",
        [
            Column("Place", lambda one: str(one["queue"] or UNKNOWN), number=True),
            Column(
                "Task",
                lambda one: one["task_id"][:8],
                href=lambda one: view.href(f"/jobs/{one['task_id']}"),
            ),
            Column("Worth", lambda one: number(one["priority"], 3), number=True),
            Column("Must begin", lambda one: until(one["starts_at"]), classes="nowrap"),
            Column("For", lambda one: duration(one["ends_at"] - one["starts_at"]), classes="wide-only"),
        ],
        key=lambda one: (one["validator"], one["task_id"]),
    )


def _select(options: dict[str, str], value: str, label: str) -> ui.select:
    return (
        ui.select(options, value=value, label=label)
        .props("outlined dense options-dense")
        .style("min-width:150px")
    )
