"""Rows of requested datasets in the columns of the task, whatever is in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.domain.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
)
from tests.doubles.each import each
from trainer.inputs import requested
from trainer.inputs.requested import requested_rows, task_row

INSTRUCT = InstructDataset(field_instruction="instruct", field_output="output")
COMPLETION = InstructDataset(field_instruction="text")
CHAT = ChatDataset(chat_user_reference="human", chat_assistant_reference="gpt")
DPO = DpoDataset(field_prompt="question", field_chosen="good", field_rejected="bad")
REWARD = RewardFunction(reward_func="def one(completions): return [1.0]", reward_weight=1.0)
GRPO = GrpoDataset(field_prompt="prompt", reward_functions=[REWARD])

ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}
MESSAGES = {"messages": [{"role": "system", "content": "Count."}, ASKED, ANSWERED]}
ALPACA = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
TALK = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]


@each(
    ("raw", "dataset", "row"),
    [
        (MESSAGES, INSTRUCT, {"instruct": "Count.\n2 + 2?", "output": "4"}),
        (ALPACA, INSTRUCT, {"instruct": "Add.\n2 + 2", "output": "4"}),
        ({"question": "2 + 2?", "answer": "4"}, INSTRUCT, {"instruct": "2 + 2?", "output": "4"}),
        (PAIR, INSTRUCT, {"instruct": "2 + 2?", "output": "4"}),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, INSTRUCT, {"instruct": "2 + 2?", "output": "4"}),
        ({"conversations": json.dumps(TALK)}, INSTRUCT, {"instruct": "2 + 2?", "output": "4"}),
        (ALPACA, COMPLETION, {"text": "Add.\n2 + 2\n4"}),
        ({"messages": [ASKED, ANSWERED]}, CHAT, {"conversations": TALK}),
        ({"prompt": "2 + 2?", "completion": "4"}, CHAT, {"conversations": TALK}),
        (PAIR, DPO, {"question": "2 + 2?", "good": "4", "bad": "5"}),
        (
            {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, {"role": "assistant", "content": "5"}]},
            DPO,
            {"question": "2 + 2?", "good": "4", "bad": "5"},
        ),
        (MESSAGES, GRPO, {"prompt": "Count.\n2 + 2?"}),
        ({"prompt": "2 + 2?"}, GRPO, {"prompt": "2 + 2?"}),
    ],
)
def test_a_published_row_is_brought_into_the_tasks_columns(
    raw: dict[str, Any], dataset: DatasetType, row: dict[str, Any]
) -> None:
    assert task_row(raw, dataset) == row


@each(
    ("raw", "dataset"),
    [
        ({}, INSTRUCT),
        ({"label": 3, "text": "no prompt"}, INSTRUCT),
        ({"prompt": "no answer"}, INSTRUCT),
        ({"messages": [ASKED]}, CHAT),
        ({"messages": [{"role": "tool", "content": "{}"}, ANSWERED]}, CHAT),
        ({"messages": [{"role": "user", "content": None}, ANSWERED]}, INSTRUCT),
        ({"messages": "[" * 10_000}, INSTRUCT),
        ({"messages": [1, 2]}, CHAT),
        ({"prompt": 3, "completion": ["x"]}, INSTRUCT),
        ({"instruction": "x", "output": "y" * 300_000}, INSTRUCT),
        (ALPACA, DPO),
        ({"prompt": "x", "chosen": "y", "rejected": ""}, DPO),
        (PAIR, GRPO.model_copy(update={"extra_column": "extra"})),
    ],
)
def test_a_row_without_what_the_task_learns_is_left_out(raw: dict[str, Any], dataset: DatasetType) -> None:
    assert task_row(raw, dataset) is None


def write(folder: Path, rows: list[Any], name: str = "train.jsonl") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def alpaca(count: int, word: str = "x") -> list[dict[str, str]]:
    return [{"instruction": f"{word} {number}", "output": "y"} for number in range(count)]


def test_each_dataset_and_each_of_its_files_gives_its_share(tmp_path: Path) -> None:
    one = write(tmp_path / "one", alpaca(100, "a"), "1.jsonl")
    write(tmp_path / "one", alpaca(100, "b"), "2.jsonl")
    other = write(tmp_path / "other", alpaca(3, "c"))
    found = requested_rows([one, other], INSTRUCT, 40)
    words = [row["instruct"][0] for row in found.rows]
    assert [words.count(word) for word in "abc"] == [10, 10, 3]
    assert len(requested_rows([other, one], INSTRUCT, 40).rows) > 40, "one has what the other has not"
    assert found.notes == ["one: 20 rows that fit the task", "other: 3 rows that fit the task"]


def test_what_cannot_be_read_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    good = write(tmp_path / "good", alpaca(5), "1.jsonl")
    (tmp_path / "good" / "2.jsonl").write_text('{"instruction": "cut o')
    (tmp_path / "pictures").mkdir()
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.parquet").write_bytes(b"PAR1 not really")
    folders = [good, *(str(tmp_path / name) for name in ("missing", "pictures", "table", "n" * 300))]
    found = requested_rows([*folders, write(tmp_path / "other", [{"label": 1}] * 9)], INSTRUCT, 100)
    assert len(found.rows) == 5
    starts = ["good: 5", "missing: 0", "pictures: 0", "table: 0", "nnn", "other: 0"]
    assert [note.startswith(start) for note, start in zip(found.notes, starts, strict=True)] == [True] * 6
    assert "2.jsonl" in found.notes[0]
    assert "no file and no folder with" in found.notes[1]


def test_of_a_huge_dataset_few_rows_and_few_files_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        write(tmp_path / "huge", [{"label": row} for row in range(200)] + alpaca(1), f"{number:03}.jsonl")
    read: list[Path] = []
    plain = requested.rows_in

    def counted(file: Path) -> Any:
        for row in plain(file):
            read.append(file)
            yield row

    monkeypatch.setattr(requested, "rows_in", counted)
    assert not requested_rows([str(tmp_path / "huge")], INSTRUCT, 40).rows
    assert len(set(read)) == requested.MOST_FILES
    assert len(read) == 40 * requested.LOOKED_AT
