"""Plain text as token files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.native import tiny
from tests.trainer.native.test___main__ import model_with_tokenizer
from trainer.errors import BadData
from trainer.native import corpus
from trainer.native.tokens import BadTokens, TokenFile, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_tokenizer(tmp_path_factory.mktemp("corpus") / "model")


def lines(path: Path, count: int, column: str = "text") -> Path:
    path.write_text(
        "".join(json.dumps({"id": at, column: f"near plum {at} far"}) + "\n" for at in range(count))
    )
    return path


def test_documents_end_with_the_end_token_and_are_built_once(tmp_path: Path, model: Path) -> None:
    (tokenizer, size), source = corpus.load(str(model)), lines(tmp_path / "rows.jsonl", 30)
    made = corpus.build(source, tmp_path / "tokens", tokenizer, size)
    assert len(made) == 30
    assert {int(made[row].ids[-1]) for row in range(30)} == {tokenizer.eos_token_id}
    wanted = tokenizer("near plum 7 far", add_special_tokens=False)["input_ids"]
    assert made[7].ids[:-1].tolist() == wanted
    assert made[7].trained.all()
    before = (tmp_path / "tokens/meta.json").stat().st_mtime_ns
    corpus.build(source, tmp_path / "tokens", tokenizer, size)
    assert (tmp_path / "tokens/meta.json").stat().st_mtime_ns == before
    lines(source, 31)
    assert len(corpus.build(source, tmp_path / "tokens", tokenizer, size)) == 31


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
    tokenizer, size = corpus.load(str(model))
    made = corpus.build(tmp_path / "book.txt", tmp_path / "tokens", tokenizer, size)
    ids = np.concatenate([made[row].ids for row in range(len(made))]).tolist()
    assert ids == [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def test_text_that_is_none_is_told_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="its columns are id, words"):
        list(corpus.documents(lines(tmp_path / "rows.jsonl", 3, "words")))
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(BadData, match="holds no text"):
        list(corpus.documents(tmp_path / "empty.txt"))


def test_held_out_documents_are_trained_on_by_nobody_and_rows_are_as_long_as_planned(tmp_path: Path) -> None:
    documents = [([at % 64] * (10 + at), [True] * (10 + at)) for at in range(60)]
    file = write_rows(tmp_path / "tokens", 64, documents)
    plan = tiny.plan()
    train, held = corpus.split(file, plan, "train"), corpus.split(file, plan, "eval")
    assert max(train.lengths) == plan.sequence.length == max(held.lengths)
    assert int(train.lengths.sum() + held.lengths.sum()) == int(file.lengths.sum())

    def first_tokens(part: TokenFile) -> set[int]:
        return {int(part[row].ids[0]) for row in range(len(part))}

    assert first_tokens(held)
    assert not first_tokens(train) & first_tokens(held)


def test_of_one_long_document_rows_are_held_out(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "tokens", 64, [([1] * 1000, [True] * 1000)])
    plan = tiny.plan()
    train, held = corpus.split(file, plan, "train"), corpus.split(file, plan, "eval")
    assert len(train) + len(held) == 32
    assert 4 <= len(held) <= 10


def test_a_plain_file_of_tokens_is_taken_as_it_is_or_refused_with_the_reason(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    assert corpus.is_corpus(tmp_path / "tokens.bin")
    assert len(corpus.read(tmp_path / "tokens.bin", 100, 32, check=True)) == 3
    with pytest.raises(BadTokens, match="holds token 99; the model has 99"):
        corpus.read(tmp_path / "tokens.bin", 99, 32, check=True)
    assert BadTokens.end is BadData.end
    (tmp_path / "tokens.bin").write_bytes(b"abc")
    with pytest.raises(BadTokens, match="no whole number"):
        corpus.read(tmp_path / "tokens.bin", 100, 32)
