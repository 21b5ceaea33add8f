"""What of a row is read and what is learned."""

from __future__ import annotations

from typing import Any

import pytest

from core.facts import Confidence
from core.row_parts import Parts, RowReader, facts_from_parts, needed_columns
from core.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    EnvironmentDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
    TaskType,
)
from tests.doubles.each import each

INSTRUCT = InstructDataset(field_instruction="q", field_input="i", field_output="a")
CHAT = ChatDataset(chat_user_reference="human", chat_assistant_reference="gpt")
DPO = DpoDataset(field_chosen="good", field_rejected="bad")
GRPO = GrpoDataset(
    field_prompt="ask", reward_functions=[RewardFunction(reward_func="def f(): ...", reward_weight=1)]
)


@each(
    ("dataset", "row", "parts", "learnable"),
    [
        (INSTRUCT, {"q": "x", "i": "y", "a": "z"}, Parts(("x", "y"), ("z",)), True),
        (INSTRUCT, {"q": "x", "i": "", "a": " \n"}, Parts(("x",), (" \n",)), False),
        (INSTRUCT, {"system": "s", "q": None, "a": 7}, Parts(("s",), ("7",)), True),
        (INSTRUCT.model_copy(update={"system_prompt": "p"}), {"q": "x"}, Parts(("p", "x"), ("",)), False),
        (INSTRUCT.model_copy(update={"field_output": None}), {"q": "x"}, Parts((), ("x",)), True),
        (
            CHAT,
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}, "junk", {}]},
            Parts(("x",), ("y",), (), 1, 1),
            True,
        ),
        (CHAT, {"conversations": '[{"from": "gpt", "value": "y"}]'}, Parts((), ("y",), (), 0, 1), True),
        (CHAT, {"conversations": "no list"}, Parts(()), False),
        (CHAT, {"conversations": [{"from": "human", "value": "x"}]}, Parts(("x",), (), (), 1, 0), False),
        (DPO, {"prompt": "x", "good": "y", "bad": "z"}, Parts(("x",), ("y",), ("z",)), True),
        (DPO, {"prompt": "x", "good": "y", "bad": ""}, Parts(("x",), ("y",), ("",)), False),
        (GRPO, {"ask": "x"}, Parts(("x",)), True),
        (GRPO, {"prompt": "x"}, Parts(("x",)), True),
        (GRPO, {"ask": ""}, Parts(("",)), False),
    ],
)
def test_rows_are_read_as_evaluation_reads_them(
    dataset: DatasetType, row: dict[str, Any], parts: Parts, learnable: bool
) -> None:
    reader = RowReader(dataset)
    assert reader.parts(row) == parts
    assert reader.can_be_learned(parts) is learnable


def test_columns_that_are_needed_are_those_named_or_those_of_validators_files() -> None:
    assert needed_columns(INSTRUCT) == {"field_instruction": "q", "field_output": "a"}
    assert needed_columns(CHAT) == {"chat_column": "conversations"}
    assert needed_columns(DPO) == {"field_prompt": "prompt", "field_chosen": "good", "field_rejected": "bad"}
    assert needed_columns(GRPO) == {"field_prompt": "ask"}
    with pytest.raises(ValueError, match="no rows"):
        RowReader(EnvironmentDataset(environment_names=["x"]))


def test_a_tokenizer_makes_lengths_sure_and_markup_is_counted() -> None:
    parts = [RowReader(CHAT).parts({"conversations": [{"from": "gpt", "value": "three little words"}]})]
    facts = facts_from_parts(CHAT, parts, 10, lambda texts: [len(text.split()) for text in texts])
    assert (facts.rows, facts.answer.max, facts.lengths_confidence) == (10, 3 + 5, Confidence.CONFIG)
    by_bytes = facts_from_parts(CHAT, parts, 10)
    assert (by_bytes.answer.max, by_bytes.lengths_confidence) == (5 + 5, Confidence.NAME)


def test_a_preference_row_is_as_long_as_its_longer_answer() -> None:
    parts = [RowReader(DPO).parts({"prompt": "a b", "good": "c", "bad": "d e f"})]
    facts = facts_from_parts(DPO, parts, 1, lambda texts: [len(text.split()) for text in texts])
    assert facts.task_type is TaskType.DPO
    assert facts.rejected is not None
    assert (facts.prompt.max, facts.answer.max, facts.rejected.max, facts.total.max) == (2, 1, 3, 5)
