"""Draw the held-out scores of a picture training: python scripts/picture_curve.py PROGRESS.jsonl > CURVE.svg.

A point is a score by its step, counted over all trainings of the run; the line is the best so far.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere
from core.runs.progress import EvalEvent, parse_events

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 520, 24, 226
ROWS, COLUMNS = 4, 3


def curve_of(progress: Path) -> list[EvalEvent]:
    """The scores of the first attempt, the untouched model's first."""
    events = (line.event for line in parse_events(progress.read_bytes()))
    return [event for event in events if isinstance(event, EvalEvent)]


def lines_of(curve: list[EvalEvent]) -> Iterator[str]:
    values = [event.score.value for event in curve]
    low, high, last = min(values), max(values), max(event.score.step for event in curve)

    def x(step: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / max(last, 1), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / max(high - low, 1e-9), 1)

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12" fill="#334155">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    for row in range(ROWS + 1):
        value = low + (high - low) * row / ROWS
        yield f'<path d="M{LEFT} {y(value)}H{RIGHT}" stroke="#e2e8f0"/>'
        yield f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:.2f}</text>'
    for column in range(COLUMNS + 1):
        step, unit = round(last * column / COLUMNS), " steps" if column == COLUMNS else ""
        yield f'<text x="{x(step)}" y="{BOTTOM + 20}" text-anchor="middle">{step:,}{unit}</text>'
    # The score of what lies in its place, from one better candidate to the next.
    submitted, path = values[0], f"M{LEFT} {y(values[0])}"
    for event in curve:
        if event.best:
            submitted = event.score.value
            path += f"H{x(event.score.step)}V{y(submitted)}"
    yield f'<path d="{path}H{RIGHT}" fill="none" stroke="#2563eb" stroke-width="2"/>'
    for event in curve:
        yield f'<circle cx="{x(event.score.step)}" cy="{y(event.score.value)}" r="3" fill="#64748b"/>'
    yield f'<text x="{LEFT + 36}" y="{y(values[0]) + 15}">the untouched base, {values[0]:.3f}</text>'
    yield f'<text x="{RIGHT + 10}" y="{y(submitted) + 4}">the best, {submitted:.3f}</text>'
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(lines_of(curve_of(Path(sys.argv[1])))))
