"""Parts of pages: texts, panels, figures, bars, tables, and numbers as text.

Everything is changed in place, and only sent to the browser if it changed: a page that is looked at for
hours must neither flicker nor lose the place where the keyboard is. Texts are texts: nothing that a daemon or
a training says is ever taken for HTML.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

Tone = Literal["", "good", "warn", "bad", "live", "muted"]
NOT_AVAILABLE = "not available here"
#: What stands where a number is not known.
UNKNOWN = "–"

T = TypeVar("T")


class Text(TextElement):
    """A text in any HTML element."""

    def __init__(self, text: str = "", classes: str = "", tag: str = "span") -> None:
        super().__init__(tag=tag, text=text)
        self._tone: str = ""
        if classes:
            self.classes(classes)

    def show(self, text: str, tone: Tone | None = None) -> None:
        """Change the text, and the tone if one is given."""
        self.text = text
        if tone is not None and tone != self._tone:
            self.classes(add=tone, remove=self._tone)
            self._tone = tone


class Link(TextElement):
    def __init__(self, text: str, href: str, classes: str = "") -> None:
        super().__init__(tag="a", text=text)
        self._props["href"] = href
        if classes:
            self.classes(classes)

    def show(self, text: str, href: str) -> None:
        self.text = text
        if self._props["href"] != href:
            self._props["href"] = href
            self.update()


def box(classes: str = "", tag: str = "div") -> Element:
    return ui.element(tag).classes(classes)


def panel(title: str, classes: str = "", note: str = "") -> Element:
    """A part of the page with a heading; put what is in it into a `with`."""
    outer = box(f"panel {classes}", "section")
    with outer, box("panel-head"):
        Text(title, tag="h2")
        if note:
            Text(note, "small muted")
    return outer


def empty(text: str) -> Text:
    """The text of an empty place: it says what to do. Hidden until the place is known to be empty."""
    return Text(text, "empty hidden", "p")


def set_visible(element: Element, visible: bool) -> None:
    if visible == ("hidden" in element.classes):
        element.classes(remove="hidden") if visible else element.classes(add="hidden")


def set_stale(element: Element, is_stale: bool) -> None:
    """Grey an element whose values are from before the daemon was lost, or stop that."""
    element.classes(add="stale") if is_stale else element.classes(remove="stale")


class Meter:
    """A bar from 0 to 1 with its text. None shows no bar, and says so."""

    def __init__(self, label: str, *, warn: float | None = None, bad: float | None = None) -> None:
        self._label, self._warn, self._bad = label, warn, bad
        self._width, self._tone = "", ""
        with box("meter") as self._outer:
            self._text = Text(UNKNOWN, "small nowrap")
            with box("track"):
                self._fill = box("fill")
        self._outer.props('role="meter" aria-valuemin="0" aria-valuemax="100"')
        self._outer.props["aria-label"] = label

    def show(self, share: float | None, text: str | None = None, missing: str = NOT_AVAILABLE) -> None:
        """`missing` is said where there is no share."""
        shown = 0.0 if share is None else min(1.0, max(0.0, share))
        self._text.show((percent(share) if text is None else text) if share is not None else missing)
        width = f"width:{shown * 100:.0f}%"
        if width != self._width:
            self._width = width
            self._fill.style(width)
            self._outer.props["aria-valuenow"] = f"{shown * 100:.0f}"
        tone = ""
        if share is not None and self._bad is not None and share > self._bad:
            tone = "bad"
        elif share is not None and self._warn is not None and share > self._warn:
            tone = "warn"
        if tone != self._tone:
            self._fill.classes(add=tone, remove=self._tone)
            self._tone = tone


class FigureTile:
    """A number with its name, unit and a note: how it stands to its goal."""

    def __init__(self, name: str) -> None:
        with box("figure"):
            self._name = Text(name, "name")
            with box("value"):
                self._value, self._unit = Text(UNKNOWN), Text("", "unit")
            self._note = Text("", "note")

    def show(self, value: str, unit: str = "", note: str = "", tone: Tone = "") -> None:
        self._value.show(value, tone)
        self._unit.show(unit if value != UNKNOWN else "")
        self._note.show(note)


class KeyedRows(Generic[T]):
    """One widget for each item, made once, then changed in place; in the order of the items."""

    def __init__(self, container: Element, make: Callable[[T], Callable[[T], None]]) -> None:
        self._container, self._make = container, make
        self._rows: dict[Hashable, tuple[Element, Callable[[T], None]]] = {}

    def show(self, items: Iterable[tuple[Hashable, T]]) -> int:
        """`make` is called for a new item, and returns what shows it again. Return how many there are."""
        wanted = dict(items)
        for key in [key for key in self._rows if key not in wanted]:
            self._rows.pop(key)[0].delete()
        for index, (key, item) in enumerate(wanted.items()):
            if key not in self._rows:
                with self._container:
                    # Children of this one are what `make` builds; it must be one element.
                    before = len(self._container.default_slot.children)
                    update = self._make(item)
                    self._rows[key] = (self._container.default_slot.children[before], update)
            element, update = self._rows[key]
            if self._container.default_slot.children[index] is not element:
                element.move(target_index=index)
            update(item)
        return len(wanted)


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a `Table`: a field and how it is written, or a function that may give (text, tone). `href`
    makes a link of it."""

    title: str
    field: str | Callable[[T], str | tuple[str, Tone]]
    show: Callable[[Any], str] = str
    href: Callable[[T], str | None] | None = None
    number: bool = False
    classes: str = ""


class Table(Generic[T]):
    """A table of records, each found again by `key`."""

    def __init__(self, caption: str, columns: Sequence[Column[T]], key: Callable[[T], Hashable]) -> None:
        self._columns, self._key = columns, key
        with box("scroll-x"), box("data", "table") as self._table:
            self._table.props["aria-label"] = caption
            with box(tag="thead"), box(tag="tr"):
                for column in columns:
                    Text(column.title, self._classes(column), "th").props('scope="col"')
            body = box(tag="tbody")
        self._rows: KeyedRows[T] = KeyedRows(body, self._make_row)

    def show(self, records: Iterable[T]) -> int:
        return self._rows.show((self._key(record), record) for record in records)

    def _make_row(self, record: T) -> Callable[[T], None]:
        with box(tag="tr"):
            cells = [self._make_cell(column, record) for column in self._columns]

        def show_row(changed: T) -> None:
            for show in cells:
                show(changed)

        return show_row

    def _make_cell(self, column: Column[T], record: T) -> Callable[[T], None]:
        href = column.href(record) if column.href else None
        with box(self._classes(column), "td"):
            if href is not None:
                link = Link("", href)
                return lambda changed: link.show(_cell(column, changed)[0], _href(column, changed))
            text = Text("", "state" if column.classes == "states" else "")
            return lambda changed: text.show(*_cell(column, changed))

    @staticmethod
    def _classes(column: Column[T]) -> str:
        return f"{column.classes} num" if column.number else column.classes


def _cell(column: Column[T], record: T) -> tuple[str, Tone]:
    if isinstance(column.field, str):
        return column.show(attrgetter(column.field)(record)), ""
    shown = column.field(record)
    return (shown, "") if isinstance(shown, str) else shown


def _href(column: Column[T], record: T) -> str:
    return (column.href(record) if column.href else None) or ""


class Facts:
    """Names with their values, one below the other."""

    def __init__(self) -> None:
        self._list = box("facts", "dl")
        self._values: dict[str, Text] = {}

    def show(self, facts: Mapping[str, str | None]) -> None:
        """Those that are None are left out."""
        known = {name: value for name, value in facts.items() if value is not None}
        if list(known) != list(self._values):
            self._list.clear()
            with self._list:
                self._values = {}
                for name in known:
                    Text(name, tag="dt")
                    self._values[name] = Text("", tag="dd")
        for name, value in known.items():
            self._values[name].show(value)


class Sparkline:
    """The course of a number in a line of text."""

    def __init__(self, label: str, width: int = 120, height: int = 24) -> None:
        self._label, self._size = label, (width, height)
        # Made of numbers only, so nothing in it needs cleaning.
        self._html = ui.html("", sanitize=False, tag="span")

    def show(self, values: Sequence[float | None]) -> None:
        self._html.content = _sparkline(self._label, [v for v in values if v is not None], *self._size)


def _sparkline(label: str, values: Sequence[float], width: int, height: int) -> str:
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = (width - 2) / (len(values) - 1)
    points = " ".join(
        f"{1 + step * number:.1f},{height - 2 - (height - 4) * (value - low) / span:.1f}"
        for number, value in enumerate(values)
    )
    return (
        f'<svg class="spark" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}: from {values[0]:.4g} to {values[-1]:.4g}"><polyline points="{points}"/></svg>'
    )


# How numbers are written


def percent(share: float | None, digits: int = 0) -> str:
    return UNKNOWN if share is None else f"{share * 100:.{digits}f} %"


def number(value: float | None, digits: int = 4) -> str:
    """`digits` that count, with thousands apart: 12,345 and 0.01234."""
    if value is None:
        return UNKNOWN
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    shown = f"{value:.{digits}g}"
    return f"{float(shown):.3g}" if "e" not in shown and abs(value) < 1e-4 else shown


def size(count: float | None) -> str:
    if count is None:
        return UNKNOWN
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """Two parts at most: 3 d 4 h, 5 h 12 min, 8 min, 40 s."""
    if seconds is None:
        return UNKNOWN
    whole = round(abs(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    unit, part, names = (86_400, 3600, ("d", "h")) if whole >= 86_400 else (3600, 60, ("h", "min"))
    first, rest = divmod(whole, unit)
    second = rest // part
    return f"{first} {names[0]} {second} {names[1]}" if second else f"{first} {names[0]}"


def ago(at: float | None) -> str:
    return UNKNOWN if at is None else f"{duration(max(0.0, time.time() - at))} ago"


def until(at: float | None) -> str:
    """The time until then, or since then."""
    if at is None:
        return UNKNOWN
    left = at - time.time()
    return f"in {duration(left)}" if left >= 0 else f"{duration(left)} ago"


def clock(at: float | None) -> str:
    """The time of this machine, with the date if it is not today."""
    if at is None:
        return UNKNOWN
    moment = datetime.fromtimestamp(at).astimezone()
    today = datetime.now().astimezone().date()
    return moment.strftime("%H:%M:%S" if moment.date() == today else "%d %b %H:%M")


def short_model(name: str) -> str:
    """A model without its owner."""
    return name.rpartition("/")[2] or name
