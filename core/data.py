"""What is known of a dataset: rows and token lengths, measured on a sample or assumed by task type."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from core.facts import Confidence, Record
from core.tasks import ImageModelType, TaskType

#: The percentiles kept of a length distribution.
PERCENTS: tuple[float, ...] = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.9, 100)


class LengthStats(Record):
    """How long things are, in tokens: percentiles with straight lines between them, and the exact mean."""

    #: One value for each of `PERCENTS`, never falling.
    quantiles: tuple[int, ...]
    mean: float = Field(ge=0)

    @model_validator(mode="after")
    def quantiles_never_fall(self) -> Self:
        if len(self.quantiles) != len(PERCENTS):
            raise ValueError(f"{len(PERCENTS)} quantiles are needed, not {len(self.quantiles)}")
        if self.quantiles[0] < 0 or any(low > high for low, high in pairwise(self.quantiles)):
            raise ValueError("quantiles are token counts that never fall")
        return self

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Self:
        """Of a sample; an empty one gives zeros."""
        ordered = sorted(lengths) or [0]
        last = len(ordered) - 1
        picked = tuple(ordered[min(last, round(percent / 100 * last))] for percent in PERCENTS)
        return cls(quantiles=picked, mean=sum(ordered) / len(ordered))

    def percentile(self, percent: float) -> float:
        return _interpolate(percent, PERCENTS, self.quantiles)

    @property
    def p50(self) -> int:
        return self.quantiles[PERCENTS.index(50)]

    @property
    def p90(self) -> int:
        return self.quantiles[PERCENTS.index(90)]

    @property
    def p95(self) -> int:
        return self.quantiles[PERCENTS.index(95)]

    @property
    def p99(self) -> int:
        return self.quantiles[PERCENTS.index(99)]

    @property
    def max(self) -> int:
        return self.quantiles[-1]

    def share_over(self, limit: float) -> float:
        """Which part of the rows is longer than `limit`."""
        if limit >= self.max:
            return 0.0
        if limit < self.quantiles[0]:
            return 1.0
        return 1.0 - _interpolate(limit, self.quantiles, PERCENTS) / 100

    def mean_cut(self, limit: float) -> float:
        """The mean when every row is cut at `limit` tokens."""
        if limit >= self.max:
            return self.mean
        whole = self.mean_of_lines
        return min(self._integral(limit) * (self.mean / whole if whole > self.mean > 0 else 1.0), limit)

    def mean_kept(self, limit: float) -> float:
        """The mean of the rows that remain when longer ones are dropped, as Axolotl does; else 0."""
        over = self.share_over(limit)
        if over >= 1.0:
            return 0.0
        return min(max(self.mean_cut(limit) - over * limit, 0.0) / (1.0 - over), limit)

    @cached_property
    def mean_of_lines(self) -> float:
        """The mean that the quantiles imply; off from the real one when the longest rows are few and huge."""
        return self._integral(float("inf"))

    def _integral(self, limit: float) -> float:
        """The mean that the straight lines between the quantiles imply, rows cut at `limit`."""
        total = 0.0
        for (p1, p2), (low, high) in zip(pairwise(PERCENTS), pairwise(self.quantiles), strict=True):
            width = (p2 - p1) / 100
            if high <= limit:
                total += width * (low + high) / 2
            elif low >= limit:
                total += width * limit
            else:
                below = (limit - low) / (high - low)
                total += width * (below * (low + limit) / 2 + (1 - below) * limit)
        return total


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """On the polyline through (xs, ys); at equal xs the last one counts."""
    if x < xs[0]:
        return float(ys[0])
    at = bisect.bisect_right(xs, x)
    if at >= len(xs):
        return float(ys[-1])
    x1, x2 = xs[at - 1], xs[at]
    return ys[at - 1] + (ys[at] - ys[at - 1]) * (x - x1) / (x2 - x1)


class DatasetFacts(Record):
    """One task's data. For images only the last three fields say anything."""

    task_type: TaskType
    #: Training rows; for images the number of pictures.
    rows: int = Field(ge=0)
    rows_confidence: Confidence
    #: Of the token lengths: CONFIG when measured on a sample, GUESS when a prior.
    lengths_confidence: Confidence
    sampled_rows: int = Field(default=0, ge=0)
    #: The prompt; for chat all that is not trained on.
    prompt: LengthStats
    #: What is learned: the answer, the assistant's turns, the chosen answer. GRPO has none.
    answer: LengthStats
    #: DPO's other answer.
    rejected: LengthStats | None = None
    #: A whole row as one sequence: prompt plus answer (DPO: the longer of the two answers).
    total: LengthStats
    image_type: ImageModelType | None = None
    #: How often each picture comes per epoch (the `10_` of kohya's folder names).
    image_repeats: int = Field(default=1, ge=1)
    #: Side of the square a picture is brought to.
    image_resolution: int = Field(default=1024, ge=64)
