"""One measured value of every GPU over the last hours or days."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nicegui import ui

from miner.api.fleet import FleetStatus
from miner.api.samples import GpuHistory, GpuRollup
from miner.dashboard.charts import COLOURS, Format, LineChart, Series
from miner.dashboard.layout import PageView
from miner.dashboard.node_rows import gpu_name
from miner.dashboard.parts import box

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


class FleetHistory:
    """One measured value of every GPU over time, from the roll-ups."""

    def __init__(self, view: PageView) -> None:
        self._view = view
        self._stop: Callable[[], None] | None = None
        self._names: dict[str, str] = {}
        self._data: dict[str, list[GpuRollup]] = {}
        with box("row"):
            self._metric = _select(
                {name: title for name, (title, _) in _METRICS.items()}, "utilization", "Value"
            )
            self._span = _select(_SPANS, "24", "Of the last")
        self._metric.on_value_change(lambda _: self._build_chart())
        self._span.on_value_change(lambda _: self._watch())
        self._place = box()
        self._notes = box()
        view.live("/fleet?short=true", FleetStatus, self._learn_names)
        self._build_chart()
        self._watch()

    def _learn_names(self, fleet: FleetStatus) -> None:
        self._names = {gpu.id: f"GPU {gpu_name(gpu)}" for gpu in fleet.gpus}

    def _watch(self) -> None:
        if self._stop is not None:
            self._stop()
        self._notes.clear()

        def show(answer: GpuHistory) -> None:
            self._data = answer.gpus
            self._draw()

        with self._notes:
            self._stop = self._view.live(
                f"/samples/history?hours={self._span.value}", GpuHistory, show, every=60.0
            )

    def _build_chart(self) -> None:
        title, form = _METRICS[self._metric.value]
        self._place.clear()
        with self._place:
            self._chart = LineChart(
                f"{title} of every GPU",
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
            for index, (gpu, rows) in enumerate(self._data.items())
        ]
        self._chart.show([one for one in series if any(value is not None for value in one.y)])


def _series(name: str, rows: Sequence[GpuRollup], metric: str, colour: int) -> Series:
    step = -(-len(rows) // _MAX_POINTS) or 1
    groups = [rows[at : at + step] for at in range(0, len(rows), step)]
    points = [(group[0].at * 1000, _mean([getattr(row, metric) for row in group])) for group in groups]
    return Series(
        name,
        [at for at, _ in points],
        [value for _, value in points],
        colour,
        dashed=colour >= len(COLOURS),
        # A line of one point is nothing to be seen.
        points=len(points) < 30,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _select(options: dict[str, str], value: str, label: str) -> ui.select:
    return (
        ui.select(options, value=value, label=label)
        .props("outlined dense options-dense")
        .style("min-width:150px")
    )
