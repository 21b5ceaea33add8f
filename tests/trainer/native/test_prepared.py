"""The adapters' tables in this trainer's files."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from tests.trainer.native import tiny
from trainer.errors import BadData
from trainer.native.prepared import token_file


def test_of_labelled_rows_the_labels_count(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
        {"input_ids": [5, 6], "labels": [5, 6]},
    ]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "table"))
    file, pairs = token_file(tmp_path / "table", tmp_path / "train", 64, tiny.plan(), tiny.ALONE)
    assert not pairs
    assert [file[row].ids.tolist() for row in range(2)] == [[1, 2, 3, 4], [5, 6]]
    assert [file[row].trained.tolist() for row in range(2)] == [[False, False, True, True], [True, True]]


def test_of_pairs_both_answers_follow_the_prompt_and_count(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "table"))
    file, pairs = token_file(tmp_path / "table", tmp_path / "train", 64, tiny.plan(), tiny.ALONE)
    assert pairs
    assert [file[row].ids.tolist() for row in range(2)] == [[1, 2, 3], [1, 2, 4, 5]]
    assert [file[row].trained.tolist() for row in range(2)] == [
        [False, False, True],
        [False, False, True, True],
    ]


def test_another_table_is_refused_with_its_columns(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "a"}]).save_to_disk(str(tmp_path / "table"))
    with pytest.raises(BadData, match="text"):
        token_file(tmp_path / "table", tmp_path / "train", 64, tiny.plan(), tiny.ALONE)
