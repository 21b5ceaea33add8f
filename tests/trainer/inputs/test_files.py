"""Rows out of files, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.each import each
from trainer.errors import BadData
from trainer.inputs.files import columns_of, read_rows, require_columns, text_of


def written(folder: Path, text: str, name: str = "rows.json") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", '[{"a": "x"}, {"a": null}]'),
        ("rows", '\ufeff [{"a": "x"}, {"a": null}]'),
        ("rows.jsonl", '{"a": "x"}\n\n{"a": null}\n'),
        ("rows.csv", "a\nx\n\n"),
    ],
)
def test_rows_are_read_from_the_forms_that_people_keep_them_in(tmp_path: Path, name: str, text: str) -> None:
    assert text_of(read_rows(written(tmp_path, text, name))[0]["a"]) == "x"


def test_a_folder_is_read_whole_but_in_one_form(tmp_path: Path) -> None:
    written(tmp_path, '[{"a": 1}]', "1.json")
    written(tmp_path, '[{"a": 2}]', "2.json")
    written(tmp_path, "b\n3\n", "3.csv")
    assert read_rows(tmp_path) == [{"a": 1}, {"a": 2}]


def test_of_a_repository_the_data_are_read_and_not_the_files_about_them(tmp_path: Path) -> None:
    """The form that most of it is in, whichever name comes first."""
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    written(tmp_path, '{"etag": "x"}', ".cache/huggingface/data.json")
    written(tmp_path, '{"default": {"splits": {}}}', "dataset_infos.json")
    written(tmp_path, '[{"a": "an example"}]', "a-sample.json")
    written(tmp_path, '{"a": "one"}\n{"a": "two"}\n{"a": "three"}\n', "train.jsonl")
    assert [row["a"] for row in read_rows(tmp_path)] == ["one", "two", "three"]


def test_a_cell_of_a_csv_file_may_be_long_and_a_row_too(tmp_path: Path) -> None:
    path = written(tmp_path, f"\ufeffa,b\n{'x' * 200_000},y,z,z\n", "rows.csv")
    rows = read_rows(path)
    assert (len(rows[0]["a"]), rows[0]["b"]) == (200_000, "y")
    assert columns_of(rows) == {"a", "b"}


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[1, 2]", '[{"a": 1}', "{", "[" * 5000, '{"a": "b"} nonsense']
)
def test_what_has_no_rows_is_bad_data_with_the_files_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadData, match=r"rows\.json"):
        read_rows(written(tmp_path, text))


def test_a_file_that_is_not_there_is_bad_data(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="data is missing"):
        read_rows(tmp_path / "none.json")


def test_rows_that_are_no_objects_are_left_out(tmp_path: Path) -> None:
    assert read_rows(written(tmp_path, '[1, {"a": "x"}, null, ["a"]]')) == [{"a": "x"}]


def test_a_column_of_one_row_is_a_column_of_all() -> None:
    assert columns_of([{"a": 1}, {"b": 2}]) == {"a", "b"}


def test_a_missing_column_is_named_together_with_those_that_there_are() -> None:
    with pytest.raises(BadData, match=r"field_output 'answer' .* question, reply"):
        require_columns(frozenset({"question", "reply"}), {"field_output": "answer"})


def test_a_column_that_the_task_does_not_name_is_named_by_its_key() -> None:
    with pytest.raises(BadData, match="field_output names no column"):
        require_columns(frozenset({"a"}), {"field_output": None})


@each(
    ("value", "text"),
    [(None, ""), (3, "3"), (1.5, "1.5"), (True, "True"), ("nul\0", "nul\0"), ("😀", "😀"), ("\ud83d!", "�!")],
)
def test_every_value_has_a_text(value: object, text: str) -> None:
    assert text_of(value) == text


@given(
    st.recursive(
        st.none() | st.text() | st.integers() | st.floats(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_every_text_can_be_encoded(value: object) -> None:
    text_of(json.loads(json.dumps(value))).encode("utf-8")
