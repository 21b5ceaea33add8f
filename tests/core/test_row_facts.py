"""Lengths without a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.facts import Confidence
from core.row_facts import BYTES_PER_TOKEN, facts_from_rows, text_tokens
from core.tasks import TaskType
from tests.doubles.each import each

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
def test_columns_are_known_by_their_usual_names(
    task: TaskType, row: dict[str, Any], prompt: int, answer: int
) -> None:
    facts = facts_from_rows(task, [row], 500)
    assert facts.rows == 500
    assert (facts.prompt.max, facts.answer.max) == (prompt, answer)
    assert facts.lengths_confidence is Confidence.NAME


def test_other_alphabets_count_by_their_bytes() -> None:
    assert text_tokens("é" * 36) == pytest.approx(2 * 36 / BYTES_PER_TOKEN)


def test_no_rows_at_all_are_an_empty_dataset() -> None:
    facts = facts_from_rows(TaskType.INSTRUCT, [])
    assert facts.rows == 0
    assert facts.total.max == 0


rows = st.lists(
    st.dictionaries(st.text(max_size=12), st.none() | st.text() | st.integers() | st.lists(st.text())),
    max_size=8,
)


@given(st.sampled_from([task for task in TaskType if task.is_text]), rows)
def test_whatever_the_rows_hold_there_are_facts(task: TaskType, sample: list[dict[str, Any]]) -> None:
    facts = facts_from_rows(task, sample)
    assert facts.rows == len(sample)
    assert facts.total.max >= facts.prompt.quantiles[0]
