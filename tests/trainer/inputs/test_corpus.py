"""Plain text, and the prepared rows of a task, as token files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from tests.trainer.native import tiny
from tests.trainer.tiny import save
from trainer.errors import BadData
from trainer.inputs import corpus
from trainer.inputs.corpus import open_rows
from trainer.inputs.token_file import BadTokens, TokenFile, write_rows

pytestmark = pytest.mark.small


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("corpus") / "model")


def lines(path: Path, count: int, column: str = "text") -> Path:
    path.write_text(
        "".join(json.dumps({"id": at, column: f"near plum {at} far"}) + "\n" for at in range(count))
    )
    return path


def test_documents_end_with_the_end_token_and_are_built_once(tmp_path: Path, model: Path) -> None:
    (tokenizer, size), source = corpus.load_corpus(str(model)), lines(tmp_path / "rows.jsonl", 30)
    tokens = corpus.build_corpus(source, tmp_path / "tokens", tokenizer, size)
    assert len(tokens) == 30
    assert {int(tokens[row].ids[-1]) for row in range(30)} == {tokenizer.eos_token_id}
    wanted = tokenizer("near plum 7 far", add_special_tokens=False)["input_ids"]
    assert tokens[7].ids[:-1].tolist() == wanted
    assert tokens[7].trained.all()
    before = (tmp_path / "tokens/meta.json").stat().st_mtime_ns
    corpus.build_corpus(source, tmp_path / "tokens", tokenizer, size)
    assert (tmp_path / "tokens/meta.json").stat().st_mtime_ns == before
    lines(source, 31)
    assert len(corpus.build_corpus(source, tmp_path / "tokens", tokenizer, size)) == 31


def test_a_long_text_is_read_in_pieces_and_nothing_is_lost(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE", 100)
    text = "".join(f"line {at} one two three\n" for at in range(50))
    (tmp_path / "book.txt").write_text(text)
    pieces = list(corpus.documents(tmp_path / "book.txt"))
    assert len(pieces) > 5
    assert "".join(piece for piece, _ in pieces) == text
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    tokenizer, size = corpus.load_corpus(str(model))
    tokens = corpus.build_corpus(tmp_path / "book.txt", tmp_path / "tokens", tokenizer, size)
    ids = np.concatenate([tokens[row].ids for row in range(len(tokens))]).tolist()
    assert ids == [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def test_invalid_text_is_refused_with_the_columns_there_are(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="its columns are id, words"):
        list(corpus.documents(lines(tmp_path / "rows.jsonl", 3, "words")))
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(BadData, match="holds no text"):
        list(corpus.documents(tmp_path / "empty.txt"))


def test_held_out_documents_are_trained_on_by_nobody_and_rows_are_as_long_as_planned(tmp_path: Path) -> None:
    documents = [([at % 64] * (10 + at), [True] * (10 + at)) for at in range(60)]
    file = write_rows(tmp_path / "tokens", 64, documents)
    plan = tiny.plan()
    train, held = corpus.split_corpus(file, plan, "train"), corpus.split_corpus(file, plan, "eval")
    assert max(train.lengths) == plan.sequence.length == max(held.lengths)
    assert int(train.lengths.sum() + held.lengths.sum()) == int(file.lengths.sum())

    def first_tokens(part: TokenFile) -> set[int]:
        return {int(part[row].ids[0]) for row in range(len(part))}

    assert first_tokens(held)
    assert not first_tokens(train) & first_tokens(held)


def test_of_one_long_document_rows_are_held_out(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "tokens", 64, [([1] * 1000, [True] * 1000)])
    plan = tiny.plan()
    train, held = corpus.split_corpus(file, plan, "train"), corpus.split_corpus(file, plan, "eval")
    assert len(train) + len(held) == 32
    assert 4 <= len(held) <= 10


def test_a_plain_file_of_tokens_is_taken_as_it_is_or_refused_with_the_reason(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    assert corpus.is_corpus(tmp_path / "tokens.bin")
    assert len(corpus.open_corpus(tmp_path / "tokens.bin", 100, 32, check=True)) == 3
    with pytest.raises(BadTokens, match="holds token 99; the model has 99"):
        corpus.open_corpus(tmp_path / "tokens.bin", 99, 32, check=True)
    assert BadTokens.end is BadData.end
    (tmp_path / "tokens.bin").write_bytes(b"abc")
    with pytest.raises(BadTokens, match="not a whole number"):
        corpus.open_corpus(tmp_path / "tokens.bin", 100, 32)


@pytest.mark.parametrize(
    ("rows", "pairs", "ids", "trained"),
    [
        (
            [
                {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
                {"input_ids": [5, 6], "labels": [5, 6]},
            ],
            False,
            [[1, 2, 3, 4], [5, 6]],
            [[False, False, True, True], [True, True]],
        ),
        (
            [{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}],
            True,
            [[1, 2, 3], [1, 2, 4, 5]],
            [[False, False, True], [False, False, True, True]],
        ),
    ],
    ids=["labelled rows", "pairs, each answer after its prompt"],
)
def test_of_prepared_rows_the_labels_and_answers_count(
    tmp_path: Path, rows: list[Any], pairs: bool, ids: list[list[int]], trained: list[list[bool]]
) -> None:
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "table"))
    file, in_pairs = open_rows(tmp_path / "table", tmp_path / "train", 64, tiny.plan(), tiny.ALONE)
    assert in_pairs is pairs
    assert [file[row].ids.tolist() for row in range(2)] == ids
    assert [file[row].trained.tolist() for row in range(2)] == trained


def test_another_table_is_refused_with_its_columns(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "a"}]).save_to_disk(str(tmp_path / "table"))
    with pytest.raises(BadData, match="text"):
        open_rows(tmp_path / "table", tmp_path / "train", 64, tiny.plan(), tiny.ALONE)


def test_the_preparing_process_gets_no_torch_from_here() -> None:
    code = "import sys, trainer.inputs.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
