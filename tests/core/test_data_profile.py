"""A file of rows, counted, sampled and held against the task."""

from __future__ import annotations

from typing import Any

import pytest

from core.data_profile import CLIP, SAMPLE, Sample, facts_of, profile_rows
from core.json_rows import BadRows
from core.tasks import DatasetType, GrpoDataset, InstructDataset, RewardFunction
from tests.doubles.each import each

DATASET = InstructDataset(field_instruction="q", field_output="a")
GRPO = GrpoDataset(reward_functions=[RewardFunction(reward_func="def f(): ...", reward_weight=1)])


def words(texts: Any) -> list[int]:
    return [len(text.split()) for text in texts]


def test_rows_are_counted_with_those_that_can_be_learned_and_their_columns() -> None:
    rows: list[dict[str, Any]] = [{"q": "x", "a": "y"}] * 3 + [{"q": "x", "a": " "}, {"q": "z", "n": 1}]
    found, sample = profile_rows(rows, DATASET)
    assert (found.rows, found.usable) == (5, 3)
    assert found.columns == {"q": 5, "a": 4, "n": 1}
    assert len(sample.rows) == 3
    facts = facts_of(DATASET, found, sample, words)
    assert (facts.rows, facts.sampled_rows, facts.total.max) == (3, 3, 2)


@each(
    ("rows", "dataset", "why"),
    [
        ([], DATASET, "the file has no rows"),
        (
            [{"instruct": "x", "output": "y"}],
            DATASET,
            "no row has the column 'q' (field_instruction), 'a' (field_output); "
            "the columns are 'instruct', 'output'",
        ),
        ([{"q": "x", "b": 1}], DATASET, "no row has the column 'a' (field_output); the columns are 'q', 'b'"),
        ([{}], DATASET, "the columns are none"),
        ([{"q": "x", "a": ""}] * 2, DATASET, "none of the 2 rows can be learned from: 'q', 'a' are empty"),
        ([{"q": "x"}], InstructDataset(), "the task names no column"),
        ([{f"c{n}": n for n in range(50)}], DATASET, "'c19' and 30 more"),
        ([{"text": "x"}], GRPO, "'prompt' (field_prompt)"),
    ],
)
def test_what_can_not_be_trained_on_is_told_with_the_columns_found_and_wanted(
    rows: list[dict[str, Any]], dataset: DatasetType, why: str
) -> None:
    with pytest.raises(BadRows) as caught:
        profile_rows(rows, dataset)
    assert why in str(caught.value)


def test_the_sample_is_even_over_the_whole_file_and_the_same_each_time() -> None:
    rows = [{"q": "x", "a": "w " * (1 + n % 100)} for n in range(40_000)]
    found, sample = profile_rows(rows, DATASET)
    assert len(sample.rows) == SAMPLE
    facts = facts_of(DATASET, found, sample, words)
    assert facts.rows == 40_000
    assert 45 <= facts.answer.p50 <= 56
    assert facts.answer.p99 >= 97
    assert profile_rows(rows, DATASET)[1] == sample


def test_a_long_text_is_measured_by_its_beginning_and_scaled() -> None:
    text = "word " * CLIP
    found, sample = profile_rows([{"q": "x", "a": text}], DATASET)
    assert len(sample.to_json()) < 2 * CLIP
    assert facts_of(DATASET, found, sample, words).answer.max == pytest.approx(CLIP, rel=0.001)


def test_a_sample_comes_back_from_its_file() -> None:
    _, sample = profile_rows([{"q": 'é\n"x"', "a": "y" * 20_000}], DATASET)
    assert Sample.from_json(sample.to_json()) == sample


def test_a_file_with_another_column_in_every_row_does_not_fill_the_memory() -> None:
    found, _ = profile_rows(({"q": "x", "a": "y", f"c{n}": 1} for n in range(5000)), DATASET)
    assert len(found.columns) <= 1000
