"""Laws of the number of steps, fitted on what the best entries of each family did.

Two laws are compared: a power of the number of pictures, and a share of the time. Both are least squares, the
first on logarithms. A law says on how many points it rests; with one point there is none, with two every law
that has two parameters goes through both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class LawPoint:
    """One training that won its task."""

    steps: int
    #: Training pictures and hours of its task.
    pictures: int | None = None
    hours: float | None = None
    lr: float | None = None
    rate_sum: float | None = None


@dataclass(frozen=True, slots=True)
class Law:
    text: str
    points: int
    #: Largest relative distance of a point from the law, or None if the law fits all points by construction.
    off: float | None = None


@dataclass(frozen=True, slots=True)
class FamilyLaws:
    family: str
    points: int
    laws: tuple[Law, ...]
    #: (least, middle, most) of the winners.
    lr: tuple[float, float, float] | None
    rate_sum: tuple[float, float, float] | None


def laws_of(family: str, points: Sequence[LawPoint]) -> FamilyLaws:
    found = [law for law in (power_law(points), clock_law(points)) if law is not None]
    return FamilyLaws(
        family,
        len(points),
        tuple(sorted(found, key=lambda law: (law.off is None, law.off or 0.0))),
        _span([point.lr for point in points]),
        _span([point.rate_sum for point in points]),
    )


def power_law(points: Sequence[LawPoint]) -> Law | None:
    """steps = a · (pictures / 24)^b."""
    used = [(point.pictures, point.steps) for point in points if point.pictures]
    if not used:
        return None
    if len({n for n, _ in used}) < 2:
        n = used[0][0]
        return _one_place(f"n {n}", [steps for _, steps in used])
    xs = [math.log(n / 24) for n, _ in used]
    ys = [math.log(steps) for _, steps in used]
    a, b = _line(xs, ys)
    off = [math.exp(a + b * x) / steps - 1 for x, (_, steps) in zip(xs, used, strict=True)]
    return Law(f"{math.exp(a):.0f} · (n/24)^{b:.2f}", len(used), _furthest(off, len(used)))


def clock_law(points: Sequence[LawPoint]) -> Law | None:
    """steps = (3600 · hours - start) / seconds per step."""
    used = [(point.hours, point.steps) for point in points if point.hours]
    if not used:
        return None
    if len({hours for hours, _ in used}) < 2:
        return _one_place(f"{used[0][0]:g} h", [steps for _, steps in used])
    a, b = _line([hours * 3600 for hours, _ in used], [float(steps) for _, steps in used])
    off = [(a + b * hours * 3600) / steps - 1 for hours, steps in used]
    if b <= 0:
        return Law(
            "no law of the clock: longer tasks took no more steps", len(used), _furthest(off, len(used))
        )
    start = -a / b
    sign = "−" if start >= 0 else "+"
    return Law(f"(3600·h {sign} {abs(start):.0f}) / {1 / b:.3f}", len(used), _furthest(off, len(used)))


def _one_place(where: str, steps: Sequence[int]) -> Law:
    if len(steps) == 1:
        return Law(f"one point: {steps[0]:,} steps at {where}", 1)
    middle = median(steps)
    text = f"only at {where}: {min(steps):,} to {max(steps):,} steps, median {middle:,.0f}"
    return Law(text, len(steps), max(abs(middle / one - 1) for one in steps))


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Least squares: y = a + b·x."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    b = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return mean_y - b * mean_x, b


def _furthest(off: Sequence[float], points: int) -> float | None:
    return None if points <= 2 else max(abs(one) for one in off)


def _span(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    known = sorted(value for value in values if value is not None)
    return (known[0], median(known), known[-1]) if known else None
