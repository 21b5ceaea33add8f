"""Dataset facts from a sample of token lengths, or by assumption when only an offer is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from core.data import PERCENTS, DatasetFacts, LengthStats
from core.facts import Confidence
from core.tasks import ImageModelType, TaskType

#: Assumed lengths: (prompt median, prompt p99, answer median, answer p99). Validators reckon with 400 tokens
#: per row; their evaluation cuts DPO prompts at 512 and generates 256 tokens for GRPO.
_LENGTHS: dict[TaskType, tuple[int, int, int, int]] = {
    TaskType.INSTRUCT: (120, 1400, 200, 1600),
    TaskType.CHAT: (250, 2200, 350, 2200),
    TaskType.DPO: (120, 1200, 220, 1200),
    TaskType.GRPO: (140, 1200, 0, 0),
}
#: Rows that validators pair with a number of hours, upper half of each bin: (hours up to, rows).
_ROWS_BY_HOURS: tuple[tuple[float, int], ...] = (
    (1, 8_000),
    (2, 20_000),
    (3, 40_000),
    (4, 75_000),
    (5, 110_000),
    (float("inf"), 175_000),
)
_NORMAL = NormalDist()
#: How far along (in log length) from the median to the 99th percentile each percentile lies when lengths are
#: log-normal. The ends stand for one row in ten thousand.
_SHARES: tuple[float, ...] = tuple(
    _NORMAL.inv_cdf(min(max(percent / 100, 1e-4), 1 - 1e-4)) / _NORMAL.inv_cdf(0.99) for percent in PERCENTS
)
#: Pictures that validators send: 10 to 50 pairs, a tenth held out.
TYPICAL_PICTURES = 30


def image_repeats(image_type: ImageModelType | None) -> int:
    """As datasets are prepared: `10_lora` folders for SDXL, `1_lora` for all others."""
    return 10 if image_type is ImageModelType.SDXL else 1


def facts_from_lengths(
    task_type: TaskType,
    prompts: Sequence[int],
    answers: Sequence[int],
    rejected: Sequence[int] | None = None,
    rows: int | None = None,
) -> DatasetFacts:
    """From token lengths of sampled rows, all lists alike in order. `rows` is the whole file's count."""
    padded = [*answers, *([0] * (len(prompts) - len(answers)))]
    losers = rejected or padded
    total = [ask + max(good, bad) for ask, good, bad in zip(prompts, padded, losers, strict=False)]
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
    """What to expect of a task's data. An offer's `ds_size` of a text task is no count: do not pass it."""
    given = Confidence.GUESS if rows is None else Confidence.GIVEN
    if task_type is TaskType.IMAGE:
        return image_facts(TYPICAL_PICTURES if rows is None else rows, image_type, given)
    return _assumed_text(task_type, _expected_rows(hours) if rows is None else rows, given)


@lru_cache
def _assumed_text(task_type: TaskType, rows: int, given: Confidence) -> DatasetFacts:
    prompt_mid, prompt_top, answer_mid, answer_top = _LENGTHS[task_type]
    return DatasetFacts(
        task_type=task_type,
        rows=rows,
        rows_confidence=given,
        lengths_confidence=Confidence.GUESS,
        prompt=_spread(prompt_mid, prompt_top),
        answer=_spread(answer_mid, answer_top),
        rejected=_spread(answer_mid, answer_top) if task_type is TaskType.DPO else None,
        total=_spread(prompt_mid + answer_mid, prompt_top + answer_top // 2),
    )


@lru_cache
def image_facts(
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
        image_repeats=image_repeats(image_type),
    )


def _expected_rows(hours: float | None) -> int:
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
    return stats.model_copy(update={"mean": stats.mean_of_lines})
