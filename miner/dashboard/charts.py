"""Line charts of ECharts that follow the theme.

Charts are drawn as SVG, so that their colours can be the variables of `static/page.css`: when the theme
changes, they change with everything else, and nothing has to be sent. Nothing from a daemon is ever a key of
the options: NiceGUI evaluates those that begin with a colon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nicegui import ui

from miner.dashboard.parts import empty, set_visible

#: The newest or most important series is the first.
COLOURS = ("var(--accent)", "var(--second)", "var(--third)", "var(--fourth)", "var(--good)", "var(--warn)")
MUTED, INK, LINE, SURFACE = "var(--muted)", "var(--ink)", "var(--line)", "var(--surface)"
_FONT = "system-ui, sans-serif"

#: How an axis and the tooltip write numbers. Ours, and constant.
_FORMATS = {
    "number": "v => v == null ? '–' : Math.abs(v) >= 1000 ? v.toLocaleString('en') : "
    "String(Number(Number(v).toPrecision(4)))",
    "percent": "v => v == null ? '–' : Math.round(v * 1000) / 10 + ' %'",
    "bytes": "v => v == null ? '–' : v >= 1e9 ? (v / 1e9).toFixed(1) + ' GB' : (v / 1e6).toFixed(0) + ' MB'",
    "rate": "v => v == null ? '–' : v.toExponential(2)",
}
#: Options of ECharts, or a part of them.
Options = dict[str, object]
Format = Literal["number", "percent", "bytes", "rate"]


@dataclass(frozen=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    #: A number of `COLOURS`.
    colour: int = 0
    dashed: bool = False
    points: bool = False
    #: Which of the chart's two axes it belongs to.
    right: bool = False
    #: A level across the chart, like a limit; its name.
    level: float | None = None


@dataclass
class LineChart:
    """A chart of lines over steps or times."""

    label: str
    x_name: str = "step"
    shows: Format = "number"
    height: int = 210
    #: Let the vertical axis begin at 0.
    from_zero: bool = False
    time_axis: bool = False
    y_max: float | None = None
    #: What is said while there is nothing to draw.
    nothing: str = "nothing measured yet"
    #: Name also a single line.
    legend: bool = False
    _sent: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._chart = (
            ui.echart(self._options([]), renderer="svg").classes("chart").style(f"height:{self.height}px")
        )
        self._chart.props('role="img"')
        self._chart.props["aria-label"] = self.label
        self._empty = empty(self.nothing)
        set_visible(self._chart, False)

    def show(self, series: Sequence[Series]) -> None:
        """Draw these; nothing is sent if nothing changed."""
        drawn = [_series(one) for one in series]
        if drawn == self._sent:
            return
        self._sent = drawn
        set_visible(self._empty, not drawn)
        set_visible(self._chart, bool(drawn))
        # The options' identity is what the element watches: keep it, change what is in it.
        self._chart.options.clear()
        self._chart.options.update(self._options(drawn))
        self._chart.update()

    def _options(self, series: list[Options]) -> Options:
        formatter, named = _FORMATS[self.shows], self.legend or len(series) > 1
        return base_options() | {
            "grid": {"left": 6, "right": 14, "top": 34 if named else 14, "bottom": 4}
            | {"outerBoundsMode": "same", "outerBoundsContain": "axisLabel"},
            "legend": {
                "show": named,
                "top": 0,
                "left": 0,
                "icon": "roundRect",
                "itemWidth": 12,
                "itemHeight": 3,
                "itemGap": 16,
                "type": "scroll",
                "textStyle": _text(),
                "inactiveColor": LINE,
                "pageTextStyle": _text(),
            },
            "tooltip": tooltip() | {"trigger": "axis", ":valueFormatter": formatter},
            "xAxis": axis("time" if self.time_axis else "value")
            | ({} if self.time_axis else {"min": "dataMin", "max": "dataMax", "minInterval": 1}),
            "yAxis": axis("value")
            | {"scale": not self.from_zero, "splitNumber": 4}
            | ({} if self.y_max is None else {"max": self.y_max, "interval": self.y_max / 4})
            | {"axisLabel": {**_text(), ":formatter": formatter}},
            "series": series,
        }


def _series(one: Series) -> Options:
    colour = COLOURS[one.colour % len(COLOURS)]
    drawn: Options = {
        "type": "line",
        "name": one.name,
        "data": [[x, _rounded(y)] for x, y in zip(one.x, one.y, strict=False)],
        "showSymbol": one.points,
        "symbol": "circle",
        "symbolSize": 5,
        "lineStyle": {"width": 1.6, "color": colour, "type": "dashed" if one.dashed else "solid"},
        "itemStyle": {"color": colour},
        "emphasis": {"disabled": True},
        "connectNulls": False,
    }
    if one.level is not None:
        drawn["markLine"] = {
            "silent": True,
            "symbol": "none",
            "label": {"show": False},
            "lineStyle": {"color": colour, "type": "dashed", "width": 1.2},
            "data": [{"yAxis": one.level}],
        }
    return drawn


def _rounded(value: float | None) -> float | None:
    """Five digits are more than a screen shows, and half of what would be sent."""
    return None if value is None else float(f"{value:.5g}")


def base_options() -> Options:
    """Options of every chart: no animation, the page's font and colours."""
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "color": list(COLOURS),
        "textStyle": {"fontFamily": _FONT, "color": INK},
    }


def axis(kind: str) -> Options:
    return {
        "type": kind,
        "axisLine": {"lineStyle": {"color": LINE}},
        "axisTick": {"show": False},
        "axisLabel": {**_text(), "hideOverlap": True},
        "splitLine": {"show": kind == "value", "lineStyle": {"color": LINE, "width": 0.7}},
        "axisPointer": {"lineStyle": {"color": MUTED, "width": 1}, "label": {"show": False}},
    }


def tooltip() -> Options:
    return {
        "confine": True,
        "backgroundColor": SURFACE,
        "borderColor": LINE,
        "borderWidth": 1,
        "padding": [6, 10],
        "textStyle": {"color": INK, "fontSize": 12.5, "fontFamily": _FONT},
    }


def _text() -> Options:
    return {"color": MUTED, "fontSize": 11.5, "fontFamily": _FONT}
