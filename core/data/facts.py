"""Facts about a dataset: row count and token lengths, measured on a sample or assumed from the task type.

The daemon has no tokenizer by design, so lengths are estimated from bytes. English prose has about four
bytes per token with today's vocabularies, code and other languages fewer; the divisor errs towards more
tokens, which costs a plan some time and saves it from a sequence that is too short. The trainer
measures again with the real tokenizer.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Self

from pydantic import Field, model_validator

from core.domain.records import Confidence, Record
from core.domain.tasks import ImageModelType, TaskType
from core.models.image_families import IMAGE_FAMILIES

#: The percentiles kept of a length distribution.
PERCENTS: tuple[float, ...] = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.9, 100)


class LengthStats(Record):
    """Token lengths: percentiles, interpolated linearly, and the exact mean."""

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
        """Statistics of a sample; zeros for an empty one."""
        ordered = sorted(lengths) or [0]
        last = len(ordered) - 1
        picked = tuple(ordered[min(last, round(percent / 100 * last))] for percent in PERCENTS)
        return cls(quantiles=picked, mean=sum(ordered) / len(ordered))

    def percentile(self, percent: float) -> float:
        return _interpolate(percent, PERCENTS, self.quantiles)

    @property
    def p99(self) -> int:
        return self.quantiles[PERCENTS.index(99)]

    @property
    def max(self) -> int:
        return self.quantiles[-1]

    def share_over(self, limit: float) -> float:
        """The share of the rows that are longer than `limit`."""
        if limit >= self.max:
            return 0.0
        if limit < self.quantiles[0]:
            return 1.0
        return 1.0 - _interpolate(limit, self.quantiles, PERCENTS) / 100

    def mean_cut(self, limit: float) -> float:
        """The mean when every row is cut at `limit` tokens."""
        if limit >= self.max:
            return self.mean
        implied = self.implied_mean
        factor = self.mean / implied if implied > self.mean > 0 else 1.0
        return min(self._integral(limit) * factor, limit)

    def mean_kept(self, limit: float) -> float:
        """The mean of the rows that remain when longer ones are dropped, as by Axolotl; 0 if none remains."""
        over = self.share_over(limit)
        if over >= 1.0:
            return 0.0
        return min(max(self.mean_cut(limit) - over * limit, 0.0) / (1.0 - over), limit)

    @cached_property
    def implied_mean(self) -> float:
        """The mean that the quantiles imply; wrong where the longest rows are few and huge."""
        return self._integral(float("inf"))

    def _integral(self, limit: float) -> float:
        """The mean that the interpolated quantiles imply, rows cut at `limit`."""
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
    """One task's data. For images only the last three fields matter."""

    task_type: TaskType
    #: Training rows; for images the number of pictures.
    rows: int = Field(ge=0)
    rows_confidence: Confidence
    #: CONFIG when measured on a sample, GUESS when assumed.
    lengths_confidence: Confidence
    sampled_rows: int = Field(default=0, ge=0)
    #: Of the prompt; for chat, of everything that is not trained on.
    prompt: LengthStats
    #: What is learned: the answer, the assistant's turns, the chosen answer. GRPO has none.
    answer: LengthStats
    #: Of DPO's other answer.
    rejected: LengthStats | None = None
    #: Of the row as one sequence: prompt plus answer (DPO: the longer of the two).
    total: LengthStats
    image_type: ImageModelType | None = None
    #: How often each picture comes per epoch (the `10_` of kohya's directory names).
    image_repeats: int = Field(default=1, ge=1)
    #: Side of the square a picture is brought to.
    image_resolution: int = Field(default=1024, ge=64)

    @property
    def pictures(self) -> int | None:
        """Training pictures; None for a text task."""
        return None if self.task_type.is_text else self.rows


#: Rows that validators pair with a number of hours, upper half of each bin: (hours up to, rows).
_ROWS_BY_HOURS: tuple[tuple[float, int], ...] = (
    (1, 8_000),
    (2, 20_000),
    (3, 40_000),
    (4, 75_000),
    (5, 110_000),
    (float("inf"), 175_000),
)
#: Rows that are made for environments, at most: a thousand steps of 128. Half as many left "a note, then no
#: move" half learned in an entry of 2026-09.
MADE_ROWS = 128_000
_NORMAL = NormalDist()
#: How far along (in log length) from the median to the 99th percentile each percentile lies when lengths are
#: log-normal. The ends stand for one row in ten thousand.
_SHARES: tuple[float, ...] = tuple(
    _NORMAL.inv_cdf(min(max(percent / 100, 1e-4), 1 - 1e-4)) / _NORMAL.inv_cdf(0.99) for percent in PERCENTS
)
#: Pictures that validators send: 10 to 50 pairs, a tenth held out.
TYPICAL_PICTURES = 30


def facts_from_lengths(
    task_type: TaskType,
    prompts: Sequence[int],
    answers: Sequence[int],
    rejected: Sequence[int] | None = None,
    rows: int | None = None,
) -> DatasetFacts:
    """From token lengths of sampled rows; `rows` counts the whole file."""
    padded = [*answers, *([0] * (len(prompts) - len(answers)))]
    losers = rejected or padded
    total = [
        prompt + max(chosen, other) for prompt, chosen, other in zip(prompts, padded, losers, strict=False)
    ]
    return DatasetFacts(
        task_type=task_type,
        rows=len(prompts) if rows is None else rows,
        rows_confidence=Confidence.CONFIG,
        lengths_confidence=Confidence.CONFIG if prompts else Confidence.GUESS,
        sampled_rows=len(prompts),
        prompt=LengthStats.from_lengths(prompts),
        answer=LengthStats.from_lengths(padded),
        rejected=LengthStats.from_lengths(rejected) if rejected else None,
        total=LengthStats.from_lengths(total),
    )


def assumed_facts(
    task_type: TaskType,
    rows: int | None = None,
    hours: float | None = None,
    image_type: ImageModelType | None = None,
) -> DatasetFacts:
    """Assume the facts of a task's data. Do not pass the `ds_size` of a text offer: it is not a count."""
    given = Confidence.GUESS if rows is None else Confidence.GIVEN
    if not task_type.is_text:
        return image_dataset_facts(TYPICAL_PICTURES if rows is None else rows, image_type, given)
    return _assumed_text(task_type, _expected_rows(task_type, hours) if rows is None else rows, given)


@lru_cache
def _assumed_text(task_type: TaskType, rows: int, given: Confidence) -> DatasetFacts:
    prompt_mid, prompt_top, answer_mid, answer_top = task_type.traits.typical_tokens
    return DatasetFacts(
        task_type=task_type,
        rows=rows,
        rows_confidence=given,
        lengths_confidence=Confidence.GUESS,
        prompt=_spread(prompt_mid, prompt_top),
        answer=_spread(answer_mid, answer_top),
        rejected=_spread(answer_mid, answer_top) if task_type.has_pairs else None,
        total=_spread(prompt_mid + answer_mid, prompt_top + answer_top // 2),
    )


@lru_cache
def image_dataset_facts(
    pictures: int, image_type: ImageModelType | None, confidence: Confidence = Confidence.CONFIG
) -> DatasetFacts:
    nothing = _spread(0, 0)
    return DatasetFacts(
        task_type=TaskType.IMAGE,
        rows=pictures,
        rows_confidence=confidence,
        lengths_confidence=confidence,
        prompt=nothing,
        answer=nothing,
        total=nothing,
        image_type=image_type,
        image_repeats=IMAGE_FAMILIES[image_type].repeats if image_type else 1,
    )


def _expected_rows(task_type: TaskType, hours: float | None) -> int:
    if task_type.makes_rows:
        return MADE_ROWS
    if hours is None:
        return 40_000
    return next(rows for most, rows in _ROWS_BY_HOURS if hours <= most)


@lru_cache
def _spread(median: int, p99: int) -> LengthStats:
    """A log-normal between the two, as text lengths are."""
    if median <= 0:
        return LengthStats.from_lengths([])
    at = tuple(max(round(median * (p99 / median) ** share), 1) for share in _SHARES)
    stats = LengthStats(quantiles=at, mean=0)
    return stats.model_copy(update={"mean": stats.implied_mean})


BYTES_PER_TOKEN = 3.6
#: Markup around one chat message.
MESSAGE_TOKENS = 5
#: Column names in validators' files, and common others.
PROMPT_COLUMNS = ("system", "instruct", "instruction", "input", "prompt", "question")
ANSWER_COLUMNS = ("output", "answer", "response", "completion", "chosen")
REJECTED_COLUMNS = ("rejected",)
MESSAGE_COLUMNS = ("conversations", "messages")
ASSISTANT_ROLES = ("assistant", "gpt", "model", "bot")

TextRow = Mapping[str, Any]


def facts_from_rows(task_type: TaskType, sample: Sequence[TextRow], rows: int | None = None) -> DatasetFacts:
    """From sampled rows of a file with `rows` rows in all. Columns are known by their usual names."""
    if task_type is TaskType.CHAT:
        pairs = [_chat_tokens(row) for row in sample]
        prompts, answers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    else:
        prompts = [_tokens_in_columns(row, PROMPT_COLUMNS) for row in sample]
        answers = [0 if task_type.generates else _answer_tokens(row) for row in sample]
    rejected = [_tokens_in_columns(row, REJECTED_COLUMNS) for row in sample] if task_type.has_pairs else None
    facts = facts_from_lengths(task_type, prompts, answers, rejected, rows)
    return facts.model_copy(update={"lengths_confidence": Confidence.NAME if sample else Confidence.GUESS})


def text_tokens(text: str) -> int:
    return math.ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


def _tokens_in_columns(row: TextRow, columns: Sequence[str]) -> int:
    return sum(text_tokens(value) for key, value in row.items() if key in columns and isinstance(value, str))


def _answer_tokens(row: TextRow) -> int:
    """In a file with other column names all texts count as the answer: only their sum matters."""
    known = _tokens_in_columns(row, ANSWER_COLUMNS)
    if known or any(key in PROMPT_COLUMNS for key in row):
        return known
    return sum(text_tokens(value) for value in row.values() if isinstance(value, str))


def _chat_tokens(row: TextRow) -> tuple[int, int]:
    """Tokens of the prompt, and tokens that are learned: the assistant's turns."""
    prompt = learned = 0
    messages: list[Any] = next((row[key] for key in MESSAGE_COLUMNS if isinstance(row.get(key), list)), [])
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        role = str(message.get("from", message.get("role", "")))
        text = str(message.get("value", message.get("content", "")))
        if role in ASSISTANT_ROLES:
            learned += text_tokens(text) + MESSAGE_TOKENS
        else:
            prompt += text_tokens(text) + MESSAGE_TOKENS
    return prompt, learned
