"""Rows of tokens on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.inputs.token_file import BadTokens, TokenFile, TokenWriter, write_rows

pytestmark = pytest.mark.small


ROWS = [([1, 2, 3], [False, True, True]), ([], []), ([4], [True])]


@given(rows=st.lists(st.lists(st.tuples(st.integers(0, 99_999), st.booleans()), max_size=20), max_size=20))
def test_rows_read_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[int, bool]]]
) -> None:
    folder = tmp_path_factory.mktemp("tokens") / "rows"
    split = [([token for token, _ in row], [counts for _, counts in row]) for row in rows]
    read = write_rows(folder, 100_000, split)
    assert [(row.ids.tolist(), row.trained.tolist()) for row in (read[i] for i in range(len(read)))] == split


def test_small_vocabularies_take_two_bytes(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", 1000, ROWS)
    assert (tmp_path / "rows/ids.bin").stat().st_size == 8


def test_nothing_is_there_before_all_is(tmp_path: Path) -> None:
    with pytest.raises(BadTokens), TokenWriter(tmp_path / "rows", 10) as writer:
        writer.add([1, 99], [True, True])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ids.bin", "trained.bin", "ends.bin", "meta.json"])
@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, harm: str) -> None:
    write_rows(tmp_path / "rows", 10, ROWS)
    path = tmp_path / "rows" / name
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(BadTokens):
        TokenFile.open(tmp_path / "rows", 10)


def test_another_tokenizers_rows_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", 5000, ROWS)
    with pytest.raises(BadTokens, match="another tokenizer"):
        TokenFile.open(tmp_path / "rows", 4999)
    with pytest.raises(BadTokens, match="outside the vocabulary"):
        write_rows(tmp_path / "more", 4, ROWS)


def test_a_plain_stream_of_tokens_is_cut_into_rows(tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"
    np.arange(10, dtype=np.uint16).tofile(path)
    rows = TokenFile.stream(path, 10, length=4)
    assert [row.ids.tolist() for row in (rows[0], rows[1])] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows[0].trained.all()
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "0 bytes"), (b"abc", "not a whole number"), (b"\xff\xff", "another tokenizer")],
)
def test_an_invalid_stream_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "stream.bin"
    path.write_bytes(content)
    with pytest.raises(BadTokens, match=said):
        TokenFile.stream(path, 1000, length=1)
