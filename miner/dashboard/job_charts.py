"""The curves of a job: all attempts over each other."""

from __future__ import annotations

from collections.abc import Sequence

from miner.api.jobs import AttemptSeries, JobSeries
from miner.dashboard.charts import LineChart, Series
from miner.dashboard.parts import box, panel


class JobCharts:
    def __init__(self) -> None:
        with box("grid even"):
            with panel("Training loss", "w6"):
                self._loss = LineChart("Training loss over steps", nothing="No step has been reported yet.")
            with panel("Held out", "w6"):
                self._held_out = LineChart(
                    "Held-out score over steps",
                    nothing="Not evaluated yet: the first score is that of the untouched model.",
                )
            with panel("Speed", "w3"):
                self._speed = LineChart("Tokens per second", height=140, from_zero=True)
            with panel("MFU and wait for data", "w3"):
                self._shares = LineChart(
                    "MFU and wait", shows="percent", height=140, from_zero=True, legend=True
                )
            with panel("Memory against the plan", "w3"):
                self._memory = LineChart(
                    "Memory in use",
                    shows="bytes",
                    height=140,
                    from_zero=True,
                    nothing="Not measured yet, or not available here.",
                )
            with panel("Learning rate", "w3"):
                self._rate = LineChart("Learning rate", shows="rate", height=140, from_zero=True)

    def show(self, answer: JobSeries) -> None:
        # The newest attempt has the accent, whatever their number.
        attempts = list(reversed(answer.attempts))
        self._loss.show(_curves(attempts, "loss"))
        self._held_out.show(_held_out(attempts, answer.metric))
        speed = _curves(attempts, "tokens_s") or _curves(attempts, "samples_s")
        self._speed.show(speed)
        newest = attempts[:1]
        self._shares.show([*_curves(newest, "mfu", "MFU"), *_curves(newest, "wait", "wait", colour=1)])
        self._memory.show(_memory(newest))
        self._rate.show(_curves(attempts, "lr"))


def _name(attempt: AttemptSeries, name: str) -> str:
    return name or f"attempt {attempt.number}"


def _curves(
    attempts: Sequence[AttemptSeries], key: str, name: str = "", colour: int | None = None
) -> list[Series]:
    found = []
    for place, attempt in enumerate(attempts):
        steps = attempt.steps
        values: Sequence[float | None] = getattr(steps, key)
        if any(value is not None for value in values):
            shown = place if colour is None else colour
            found.append(Series(_name(attempt, name), steps.step, values, colour=shown))
    return found


def _held_out(attempts: Sequence[AttemptSeries], metric: str | None) -> list[Series]:
    """Scores of each attempt; the level is that of the untouched model."""
    found = []
    for place, attempt in enumerate(attempts):
        evals = attempt.evals
        if not evals:
            continue
        base = evals[0].score if evals[0].step == 0 else None
        found.append(
            Series(
                f"{metric or 'score'}, {_name(attempt, '')}",
                [one.step for one in evals],
                [one.score for one in evals],
                colour=place,
                points=True,
                level=base if place == 0 else None,
            )
        )
    return found


def _memory(attempts: Sequence[AttemptSeries]) -> list[Series]:
    drawn = _curves(attempts, "memory_bytes", "measured")
    estimate = attempts[0].figures.memory_estimate_bytes if attempts else None
    if drawn and estimate:
        ends = [drawn[0].x[0], drawn[0].x[-1]]
        drawn.append(Series("the plan's estimate", ends, [estimate, estimate], colour=1, dashed=True))
    return drawn
