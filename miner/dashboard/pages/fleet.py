"""Fleet: what every GPU does in the next 24 hours, what it did, what waits, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import NamedTuple
from urllib.parse import quote

from miner.api.fleet import FleetClaim, FleetGpu, FleetStatus
from miner.api.samples import GpuSample
from miner.dashboard.daemons import DaemonLink
from miner.dashboard.fleet_history import FleetHistory
from miner.dashboard.layout import PageView, page, page_head
from miner.dashboard.node_rows import NodeTable, claim_name, claim_path, gpu_name, reserved_text
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
    set_stale,
    set_visible,
    size,
    until,
)

_HOURS = 24
_PATH = "/fleet?short=true"


@page("/fleet", "Fleet", place=40)
def fleet_page(view: PageView) -> None:
    page_head("Fleet")
    for link in view.links:
        _schedule(view, link)
    nodes = NodeTable()
    with panel("History"):
        FleetHistory(view)
    with box("grid"):
        with box("stack w8"), panel("GPUs"):
            gpus = _gpu_table()
            trouble = Text("", "notice hidden", "p").props('role="status"')
        with box("stack w4"), panel("Queue"):
            waits = box()
            with waits:
                queue = _queue_table(view)
            nothing = empty("No job waits for GPUs.")

    def show(fleet: FleetStatus) -> None:
        nodes.show(fleet)
        gpus.show(_TimedGpu(gpu, fleet.at) for gpu in fleet.gpus)
        trouble.show(fleet.trouble or "")
        set_visible(trouble, bool(fleet.trouble))
        waiting = [claim for claim in fleet.claims if claim.stage == "waiting"]
        queue.show(waiting)
        set_visible(waits, bool(waiting))
        set_visible(nothing, not waiting)

    view.live(_PATH, FleetStatus, show)


def _schedule(view: PageView, link: DaemonLink) -> None:
    several = len(view.links) > 1
    title = f"The next {_HOURS} hours" + (f" on {link.name}" if several else "")
    with panel(title) as shown:
        gantt = _Gantt(link.name)
        nothing = empty(
            "No GPU is known. `god-miner fleet show` says what was looked for, GPUS what may be used."
        )
        state = Text("", "state bad hidden").props('role="status"')
        with box("keys"):
            for kind, text in (("", "running"), ("reserved", "reserved"), ("idle", "idle")):
                with box(tag="span"):
                    box(f"swatch {kind}", "span")
                    Text(text)
            summary = Text("")

    def show(fleet: FleetStatus) -> None:
        gantt.show(fleet)
        set_visible(nothing, not fleet.gpus and not fleet.nodes)
        free = _free_hours(fleet)
        summary.show(
            f"{free:.0f} of {len(fleet.gpus) * _HOURS} GPU-hours are not taken"
            if fleet.gpus and not fleet.nodes
            else ""
        )

    def show_lost(one: DaemonLink) -> None:
        state.show(f"unreachable since {clock(one.lost_at)}" if one.lost_at is not None else "")
        set_visible(state, one.lost_at is not None)
        set_stale(shown, one.lost_at is not None)

    view.live(_PATH, FleetStatus, show, link=link)
    view.follow(show_lost, link)


class _ClaimedGpu(NamedTuple):
    """A GPU with the claims on it."""

    gpu: FleetGpu
    claims: list[FleetClaim]


class _TimedGpu(NamedTuple):
    """A GPU at the time at which the fleet was read."""

    gpu: FleetGpu
    now: float


class _Gantt:
    """A row per GPU, with a bar for each job and reservation."""

    def __init__(self, daemon: str) -> None:
        self._daemon = daemon
        self._starts_at = 0.0
        self._grid = box("stack")
        with self._grid:
            with box("schedule"):
                Text("", "small")
                self._scale = box("schedule-scale").props('aria-hidden="true"')
            self._rows: KeyedRows[_ClaimedGpu] = KeyedRows(box("stack").style("gap:5px"), self._make)
        self._shown_hour = -1

    def show(self, fleet: FleetStatus) -> None:
        self._starts_at = fleet.at
        hour = int(fleet.at // 600)
        if hour != self._shown_hour:
            self._shown_hour = hour
            self._show_scale()
        self._rows.show(
            (gpu.id, _ClaimedGpu(gpu, [claim for claim in fleet.claims if gpu.id in claim.gpus]))
            for gpu in fleet.gpus
        )

    def _show_scale(self) -> None:
        self._scale.clear()
        with self._scale:
            Text("now").style("left:0")
            for share, moment in _full_hours(self._starts_at):
                if moment.hour % 4 == 0 and 0.15 < share < 0.97:
                    Text(moment.strftime("%H:%M")).style(f"left:{share * 100:.2f}%")

    def _make(self, _row: _ClaimedGpu) -> Callable[[_ClaimedGpu], None]:
        with box("schedule"):
            name = Text("", "small cut")
            track = box("schedule-track")
            with track:
                lines = box().style("display:contents")
                bars: KeyedRows[FleetClaim] = KeyedRows(box().style("display:contents"), self._make_bar)
        with lines:
            for share, moment in _full_hours(self._starts_at):
                if moment.hour % 4 == 0:
                    box("hour").style(f"left:{share * 100:.2f}%")

        def show(row: _ClaimedGpu) -> None:
            name.show(f"{gpu_name(row.gpu)} · {row.gpu.kind}", "bad" if row.gpu.out else "")
            taken = [claim for claim in row.claims if self._place(claim) is not None]
            bars.show(((claim.validator, claim.task_id), claim) for claim in taken)

        return show

    def _make_bar(self, _claim: FleetClaim) -> Callable[[FleetClaim], None]:
        link = Link("", "")
        link.style("")
        shown = ""

        def show(one: FleetClaim) -> None:
            nonlocal shown
            left, width = self._place(one) or (0.0, 0.0)
            style = f"left:{left:.2f}%;width:{width:.2f}%"
            if style != shown:
                shown = style
                link.style(replace=style)
            link.classes(replace=one.stage)
            link.show(claim_name(one), f"{claim_path(one)}?daemon={quote(self._daemon)}")
            times = f"{clock(one.starts_at)} to {clock(one.ends_at)}"
            text = f"{one.stage}: {claim_name(one)}, task {one.task_id}, {times}"
            if link.props.get("title") != text:
                link.props["title"] = link.props["aria-label"] = text
                link.update()

        return show

    def _place(self, claim: FleetClaim) -> tuple[float, float] | None:
        """Return left end and width in percent, or None outside of what is shown."""
        whole = _HOURS * 3600.0
        start = max(claim.starts_at - self._starts_at, 0.0)
        end = min(max(claim.ends_at - self._starts_at, 0.0), whole)
        if claim.stage == "running":
            start, end = 0.0, max(end, 60.0)
        return None if start >= whole or end <= start else (start / whole * 100, (end - start) / whole * 100)


def _full_hours(starts_at: float) -> list[tuple[float, datetime]]:
    """The full hours that are shown, as a share of the width."""
    first = datetime.fromtimestamp(starts_at).astimezone().replace(minute=0, second=0, microsecond=0)
    hours = [first + timedelta(hours=count) for count in range(1, _HOURS + 1)]
    return [((one.timestamp() - starts_at) / (_HOURS * 3600), one) for one in hours]


def _free_hours(fleet: FleetStatus) -> float:
    """Hours of GPUs that nothing has taken, of the time shown; windows of one GPU may overlap."""
    begins, free = fleet.at, 0.0
    for gpu in fleet.gpus:
        taken = sorted(
            (max(one.starts_at, begins), min(one.ends_at, begins + _HOURS * 3600))
            for one in fleet.claims
            if gpu.id in one.gpus
        )
        at, busy = begins, 0.0
        for start, end in taken:
            busy += max(end - max(start, at), 0.0)
            at = max(at, end)
        free += 0.0 if gpu.out else _HOURS - busy / 3600
    return free


def _gpu_table() -> Table[_TimedGpu]:
    return Table(
        "GPUs",
        [
            Column("GPU", _gpu_text, classes="nowrap"),
            Column("State", _state, classes="states"),
            Column("For", "gpu.claim", _claim_text),
            Column("Use", "gpu.sample", partial(_sampled, "utilization", percent), number=True),
            Column("Memory", _memory, number=True, classes="wide-only"),
            Column("Heat", "gpu.sample", partial(_sampled, "temperature", "{:.0f} °C".format), number=True),
            Column("Power", "gpu.sample", _power, number=True, classes="wide-only"),
            Column("Clocks", _clocks, classes="wide-only"),
            Column("Links", "gpu.linked", _links, classes="wide-only nowrap"),
            Column("Faults", _faults),
        ],
        key=attrgetter("gpu.id"),
    )


def _gpu_text(row: _TimedGpu) -> str:
    return f"{gpu_name(row.gpu)} · {row.gpu.kind}"


def _claim_text(claim: FleetClaim | None) -> str:
    return claim_name(claim) if claim else UNKNOWN


def _sampled(name: str, show: Callable[[float], str], sample: GpuSample | None) -> str:
    value = getattr(sample, name, None)
    return UNKNOWN if value is None else show(value)


def _state(row: _TimedGpu) -> tuple[str, Tone]:
    gpu, claim = row.gpu, row.gpu.claim
    if gpu.out:
        return "out", "bad"
    if gpu.task_id is None:
        return (reserved_text(claim, row.now), "") if claim is not None else ("idle", "muted")
    ends = f"{datetime.fromtimestamp(gpu.until).astimezone():%H:%M}" if gpu.until else ""
    return (f"until {ends}" if ends else "at work"), "live"


def _memory(row: _TimedGpu) -> str:
    sample = row.gpu.sample
    if sample is None or sample.memory_used is None:
        return row.gpu.memory
    total = size(sample.memory_total) if sample.memory_total else row.gpu.memory
    return f"{size(sample.memory_used)} of {total}"


def _power(sample: GpuSample | None) -> str:
    if sample is None or sample.power_watts is None:
        return UNKNOWN
    limit = sample.power_limit_watts
    return f"{sample.power_watts:.0f} of {limit:.0f} W" if limit else f"{sample.power_watts:.0f} W"


def _clocks(row: _TimedGpu) -> tuple[str, Tone]:
    sample = row.gpu.sample
    if sample is None or sample.sm_clock_mhz is None:
        return UNKNOWN, ""
    held = ", ".join(sample.throttle or ())
    text = f"{sample.sm_clock_mhz} MHz"
    return (f"{text}, held by {held}", "warn") if held else (text, "")


def _links(linked: Sequence[int]) -> str:
    if not linked:
        return "none"
    if len(linked) > 2 and linked[-1] - linked[0] < len(linked) + 1:
        return f"{len(linked)} GPUs"
    return ", ".join(map(str, linked))


def _faults(row: _TimedGpu) -> tuple[str, Tone]:
    gpu, sample = row.gpu, row.gpu.sample
    faults = [
        gpu.out or "",
        "is not clean: something else had it" if gpu.unclean else "",
        "somebody else uses it too" if gpu.shared else "",
        f"Xid {', '.join(map(str, sample.xids))}" if sample and sample.xids else "",
        f"{sample.ecc_errors} memory errors" if sample and sample.ecc_errors else "",
    ]
    said = "; ".join(fault for fault in faults if fault)
    if said:
        return said, "bad"
    return ("none", "good") if sample else (UNKNOWN, "muted")


def _queue_table(view: PageView) -> Table[FleetClaim]:
    def job_page(claim: FleetClaim) -> str:
        return view.href(f"/jobs/{claim.task_id}")

    return Table(
        "Jobs that wait for GPUs",
        [
            Column("Place", "queue", _place_text, number=True),
            Column("Task", "task_id", _short_task, href=job_page),
            Column("Worth", "priority", partial(number, digits=3), number=True),
            Column("Must begin", "starts_at", until, classes="nowrap"),
            Column("For", _takes, classes="wide-only"),
        ],
        key=attrgetter("validator", "task_id"),
    )


def _place_text(place: int | None) -> str:
    return str(place or UNKNOWN)


def _short_task(task_id: str) -> str:
    return task_id[:8]


def _takes(claim: FleetClaim) -> str:
    return duration(claim.ends_at - claim.starts_at)
