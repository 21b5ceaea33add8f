from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import BYTES_PER_TOKEN
from core.data.rows import BadRows
from core.data.scan import (
    MAX_SAMPLED_CHARS,
    SAMPLE_ROWS,
    CountTokens,
    RowReader,
    RowSample,
    RowTexts,
    facts_from_scan,
    needed_columns,
    scan_rows,
)
from core.domain.records import Confidence
from core.domain.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    EnvironmentDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
    TaskType,
)
from core.recipes.dry_run import DATASETS
from tests.doubles.each import each

DATASET = InstructDataset(field_instruction="q", field_output="a")
GRPO = GrpoDataset(
    field_prompt="ask", reward_functions=[RewardFunction(reward_func="def f(): ...", reward_weight=1)]
)


def words(texts: Any) -> list[int]:
    return [len(text.split()) for text in texts]


def test_rows_usable_rows_and_columns_are_counted() -> None:
    rows: list[dict[str, Any]] = [{"q": "x", "a": "y"}] * 3 + [{"q": "x", "a": " "}, {"q": "z", "n": 1}]
    scan, sample = scan_rows(rows, DATASET)
    assert (scan.rows, scan.usable) == (5, 3)
    assert scan.columns == {"q": 5, "a": 4, "n": 1}
    assert len(sample.rows) == 3
    facts = facts_from_scan(DATASET, scan, sample, words)
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
        ([{"text": "x"}], GRPO, "'ask' (field_prompt)"),
    ],
)
def test_unusable_data_is_rejected_with_the_columns_found_and_wanted(
    rows: list[dict[str, Any]], dataset: DatasetType, why: str
) -> None:
    with pytest.raises(BadRows) as caught:
        scan_rows(rows, dataset)
    assert why in str(caught.value)


def test_the_sample_is_even_over_the_whole_file_and_the_same_each_time() -> None:
    rows = [{"q": "x", "a": "w " * (1 + n % 100)} for n in range(40_000)]
    scan, sample = scan_rows(rows, DATASET)
    assert len(sample.rows) == SAMPLE_ROWS
    facts = facts_from_scan(DATASET, scan, sample, words)
    assert facts.rows == 40_000
    assert 45 <= facts.answer.percentile(50) <= 56
    assert facts.answer.p99 >= 97
    assert scan_rows(rows, DATASET)[1] == sample


@each("count", [words, None])
def test_a_long_text_is_measured_by_its_beginning_and_scaled(count: CountTokens | None) -> None:
    text = "word " * MAX_SAMPLED_CHARS
    scan, sample = scan_rows([{"q": "x", "a": text}], DATASET)
    assert len(sample.to_json()) < 2 * MAX_SAMPLED_CHARS
    tokens = MAX_SAMPLED_CHARS if count else len(text) / BYTES_PER_TOKEN
    assert facts_from_scan(DATASET, scan, sample, count).answer.max == pytest.approx(tokens, rel=0.001)


def test_a_sample_survives_json() -> None:
    _, sample = scan_rows([{"q": 'é\n"x"', "a": "y" * 20_000}], DATASET)
    assert RowSample.from_json(sample.to_json()) == sample


def test_a_file_with_another_column_in_every_row_does_not_fill_the_memory() -> None:
    scan, _ = scan_rows(({"q": "x", "a": "y", f"c{n}": 1} for n in range(5000)), DATASET)
    assert len(scan.columns) <= 1000


INSTRUCT = InstructDataset(field_instruction="q", field_input="i", field_output="a")
CHAT = ChatDataset(chat_user_reference="human", chat_assistant_reference="gpt")
DPO = DpoDataset(field_chosen="good", field_rejected="bad")


@each(
    ("dataset", "row", "texts", "usable"),
    [
        (INSTRUCT, {"q": "x", "i": "y", "a": "z"}, RowTexts(("x", "y"), ("z",)), True),
        (INSTRUCT, {"q": "x", "i": "", "a": " \n"}, RowTexts(("x",), (" \n",)), False),
        (INSTRUCT, {"system": "s", "q": None, "a": 7}, RowTexts(("s",), ("7",)), True),
        (INSTRUCT.model_copy(update={"system_prompt": "p"}), {"q": "x"}, RowTexts(("p", "x"), ("",)), False),
        (INSTRUCT.model_copy(update={"field_output": None}), {"q": "x"}, RowTexts((), ("x",)), True),
        (
            CHAT,
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}, "junk", {}]},
            RowTexts(("x",), ("y",), (), 1, 1),
            True,
        ),
        (CHAT, {"conversations": '[{"from": "gpt", "value": "y"}]'}, RowTexts((), ("y",), (), 0, 1), True),
        (CHAT, {"conversations": "no list"}, RowTexts(()), False),
        (CHAT, {"conversations": [{"from": "human", "value": "x"}]}, RowTexts(("x",), (), (), 1, 0), False),
        (DPO, {"prompt": "x", "good": "y", "bad": "z"}, RowTexts(("x",), ("y",), ("z",)), True),
        (DPO, {"prompt": "x", "good": "y", "bad": ""}, RowTexts(("x",), ("y",), ("",)), False),
        (GRPO, {"ask": "x"}, RowTexts(("x",)), True),
        (GRPO, {"prompt": "x"}, RowTexts(("x",)), True),
        (GRPO, {"ask": ""}, RowTexts(("",)), False),
    ],
)
def test_rows_are_read_as_evaluation_reads_them(
    dataset: DatasetType, row: dict[str, Any], texts: RowTexts, usable: bool
) -> None:
    reader = RowReader(dataset)
    assert reader.texts_of(row) == texts
    assert reader.is_usable(texts) is usable


def test_needed_columns_are_those_named_or_those_of_validators_files() -> None:
    assert needed_columns(INSTRUCT) == {"field_instruction": "q", "field_output": "a"}
    assert needed_columns(CHAT) == {"chat_column": "conversations"}
    assert needed_columns(DPO) == {"field_prompt": "prompt", "field_chosen": "good", "field_rejected": "bad"}
    assert needed_columns(GRPO) == {"field_prompt": "ask"}
    with pytest.raises(ValueError, match="no rows"):
        RowReader(EnvironmentDataset(environment_names=["x"]))


def test_a_tokenizer_makes_lengths_reliable_and_markup_counts() -> None:
    rows = [{"conversations": [{"from": "gpt", "value": "three little words"}]}] * 10
    scan, sample = scan_rows(rows, CHAT)
    facts = facts_from_scan(CHAT, scan, sample, words)
    assert (facts.rows, facts.answer.max, facts.lengths_confidence) == (10, 3 + 5, Confidence.CONFIG)
    by_bytes = facts_from_scan(CHAT, scan, sample)
    assert (by_bytes.answer.max, by_bytes.lengths_confidence) == (5 + 5, Confidence.NAME)


def test_a_preference_row_is_as_long_as_its_longer_answer() -> None:
    facts = facts_from_scan(DPO, *scan_rows([{"prompt": "a b", "good": "c", "bad": "d e f"}], DPO), words)
    assert facts.rejected is not None
    assert (facts.prompt.max, facts.answer.max, facts.rejected.max, facts.total.max) == (2, 1, 3, 5)


@each("task", [task for task in TaskType if task.is_text])
def test_every_text_type_has_an_example_and_a_reader_of_its_rows(task: TaskType) -> None:
    dataset = DATASETS[task]
    if task is TaskType.ENVIRONMENT:  # its rows are made in the container
        with pytest.raises(ValueError, match="have no rows"):
            RowReader(dataset)
    else:
        assert set(needed_columns(dataset)) <= set(type(dataset).model_fields)
        assert RowReader(dataset).texts_of({})
