from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.data.facts import (
    BYTES_PER_TOKEN,
    MADE_ROWS,
    PERCENTS,
    LengthStats,
    assumed_facts,
    facts_from_lengths,
    facts_from_rows,
    image_dataset_facts,
    text_tokens,
)
from core.domain.records import Confidence
from core.domain.tasks import OFFERED_TASKS, ImageModelType, TaskType
from tests.doubles.each import each

LENGTHS = st.lists(st.integers(0, 200_000), min_size=1, max_size=300)


def test_percentiles_of_a_sample() -> None:
    stats = LengthStats.from_lengths(range(1001))
    assert (stats.percentile(50), stats.percentile(95), stats.p99, stats.max) == (500, 950, 990, 1000)
    assert stats.mean == 500
    assert stats.percentile(60) == pytest.approx(600)


def test_one_row_of_200k_tokens_among_short_ones_does_not_lift_the_cut_mean() -> None:
    stats = LengthStats.from_lengths([100] * 9_999 + [200_000])
    assert stats.p99 == 100
    assert stats.mean == pytest.approx(119.99)
    assert stats.mean_cut(4096) < 125
    assert stats.share_over(4096) < 0.002


def test_cut_and_kept_means_are_close_to_the_real_ones() -> None:
    rng = random.Random(1)
    lengths = [round(rng.lognormvariate(5.5, 0.8)) for _ in range(20_000)]
    stats = LengthStats.from_lengths(lengths)
    for limit in (256, 512, 1024, 2048):
        cut = sum(min(length, limit) for length in lengths) / len(lengths)
        kept = [length for length in lengths if length <= limit]
        assert stats.mean_cut(limit) == pytest.approx(cut, rel=0.08)
        assert stats.mean_kept(limit) == pytest.approx(sum(kept) / len(kept), rel=0.12)
        assert stats.share_over(limit) == pytest.approx(1 - len(kept) / len(lengths), abs=0.05)


@given(LENGTHS, st.integers(0, 300_000), st.integers(0, 300_000))
def test_a_longer_limit_never_loses_tokens_or_rows(lengths: list[int], limit: int, other: int) -> None:
    stats = LengthStats.from_lengths(lengths)
    low, high = sorted((limit, other))
    assert stats.mean_cut(low) <= stats.mean_cut(high) + 1e-6
    assert stats.share_over(low) >= stats.share_over(high) - 1e-9
    assert 0 <= stats.mean_kept(low) <= low
    assert 0 <= stats.share_over(low) <= 1


def test_falling_quantiles_are_rejected() -> None:
    with pytest.raises(ValidationError, match="never fall"):
        LengthStats(quantiles=tuple(range(len(PERCENTS), 0, -1)), mean=1)
    with pytest.raises(ValidationError, match="quantiles are needed"):
        LengthStats(quantiles=(1, 2), mean=1)


def test_a_sampled_dataset() -> None:
    facts = facts_from_lengths(TaskType.INSTRUCT, [10, 20, 30], [1, 2, 3], rows=3000)
    assert (facts.rows, facts.sampled_rows) == (3000, 3)
    assert facts.total.max == 33
    assert facts.lengths_confidence is Confidence.CONFIG


def test_prompts_without_answers_and_an_empty_file() -> None:
    assert facts_from_lengths(TaskType.GRPO, [7, 9], []).total.max == 9
    empty = facts_from_lengths(TaskType.CHAT, [], [])
    assert (empty.rows, empty.total.max) == (0, 0)
    assert empty.lengths_confidence is Confidence.GUESS


@each("task", [task for task in OFFERED_TASKS if task.is_text])
def test_assumptions_for_an_offer_are_plausible(task: TaskType) -> None:
    facts = assumed_facts(task, hours=3)
    assert facts.rows == 40_000
    assert facts.rows_confidence is Confidence.GUESS
    assert 100 < facts.total.mean < 1000
    assert facts.total.p99 < 4096
    assert (facts.rejected is not None) is task.has_pairs


def test_of_an_environment_as_many_rows_are_made_whatever_the_hours() -> None:
    facts = [assumed_facts(TaskType.ENVIRONMENT, hours=hours) for hours in (0.15, 1.5, 3)]
    assert {one.rows for one in facts} == {MADE_ROWS}
    assert facts[0].total.p99 < 2048


def test_more_hours_mean_more_rows_and_a_stated_count_wins() -> None:
    rows = [assumed_facts(TaskType.INSTRUCT, hours=hours).rows for hours in (0, 0.25, 1.5, 3, 4, 5, 6, 1000)]
    assert rows == sorted(rows)
    stated = assumed_facts(TaskType.INSTRUCT, rows=123, hours=6)
    assert (stated.rows, stated.rows_confidence) == (123, Confidence.GIVEN)


@each("kind", [None, *ImageModelType])
def test_pictures_come_ten_times_per_epoch_for_sdxl_and_once_for_all_others(
    kind: ImageModelType | None,
) -> None:
    facts = assumed_facts(TaskType.IMAGE, image_type=kind)
    assert facts.rows == 30
    assert facts.image_repeats == (10 if kind is ImageModelType.SDXL else 1)
    assert image_dataset_facts(12, kind).rows == 12


WORDS = "x" * 360


@each(
    ("task", "row", "prompt", "answer"),
    [
        (TaskType.INSTRUCT, {"instruct": WORDS, "input": WORDS, "output": WORDS}, 200, 100),
        (TaskType.INSTRUCT, {"question": WORDS, "answer": WORDS, "id": "7"}, 100, 100),
        (TaskType.INSTRUCT, {"text": WORDS}, 0, 100),
        (TaskType.DPO, {"prompt": WORDS, "chosen": WORDS * 2, "rejected": WORDS}, 100, 200),
        (TaskType.GRPO, {"prompt": WORDS}, 100, 0),
        (
            TaskType.CHAT,
            {"conversations": [{"from": "human", "value": WORDS}, {"from": "gpt", "value": WORDS * 2}]},
            105,
            205,
        ),
        (TaskType.CHAT, {"messages": [{"role": "assistant", "content": WORDS}, "junk"]}, 0, 105),
    ],
)
def test_columns_are_recognised_by_their_usual_names(
    task: TaskType, row: dict[str, Any], prompt: int, answer: int
) -> None:
    facts = facts_from_rows(task, [row], 500)
    assert facts.rows == 500
    assert (facts.prompt.max, facts.answer.max) == (prompt, answer)
    assert facts.lengths_confidence is Confidence.NAME


def test_other_alphabets_count_by_their_bytes() -> None:
    assert text_tokens("é" * 36) == pytest.approx(2 * 36 / BYTES_PER_TOKEN)


ROWS = st.lists(
    st.dictionaries(st.text(max_size=12), st.none() | st.text() | st.integers() | st.lists(st.text())),
    max_size=8,
)


@given(st.sampled_from([task for task in TaskType if task.is_text]), ROWS)
def test_any_rows_yield_facts(task: TaskType, sample: list[dict[str, Any]]) -> None:
    facts = facts_from_rows(task, sample)
    assert facts.rows == len(sample)
    assert facts.total.max >= facts.prompt.quantiles[0]
