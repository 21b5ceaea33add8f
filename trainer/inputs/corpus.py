"""Token files from what there is: plain text for pretraining, or the prepared rows of a task.

A corpus is read once as a stream; every process maps the result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.data.facts import DatasetFacts, facts_from_lengths
from core.domain.tasks import TaskType
from core.planning.plan import TrainingPlan
from trainer.errors import BadData
from trainer.inputs.files import KINDS, files_in, rows_in, text_of
from trainer.inputs.token_file import META_FILE, TokenFile, TokenWriter, width_of, write_rows
from trainer.inputs.tokens import (
    IGNORED,
    Tokenizer,
    load_tokenizer,
    model_rows,
    tokenized,
)
from trainer.session.progress_log import ProgressLog
from trainer.session.ranks import Communicator

#: Columns that hold a document's text, the likeliest first.
COLUMNS = ("text", "content", "document", "body")
#: Letters of a piece in which a text file is read, about; each ends where a line does.
PIECE = 1 << 20
#: Texts encoded in one call: enough for all cores, few enough for memory.
ENCODED_AT_ONCE = 512
#: A plain file of tokens, as other tools write them.
RAW = ".bin"
#: Documents for each that is held out, at least.
_MIN_DOCUMENTS_PER_HELD_OUT = 4
#: Rows looked at for a plan.
_SAMPLE = 20_000

Document = tuple[str, bool]


def documents(path: Path) -> Iterator[Document]:
    """Texts, and whether each is the end of its document."""
    has_text = False
    for file in files_in(path, (".txt", *KINDS)):
        for document in _pieces(file) if file.suffix == ".txt" else _column(file):
            has_text = True
            yield document
    if not has_text:
        raise BadData(f"{path} holds no text")


def _pieces(file: Path) -> Iterator[Document]:
    with file.open(encoding="utf-8", errors="replace") as text:
        piece = text.read(PIECE) + text.readline()
        while piece:
            following = text.read(PIECE) + text.readline()
            if piece.strip():
                yield piece, not following
            piece = following


def _column(file: Path) -> Iterator[Document]:
    column = None
    for row in rows_in(file):
        if column is None:
            column = next((name for name in COLUMNS if name in row), None)
            if column is None:
                shown = ", ".join(sorted(row)[:12])
                raise BadData(f"{file.name} has no column {' or '.join(COLUMNS)}; its columns are {shown}")
        if text := text_of(row.get(column)):
            yield text, True


def load_corpus(model_path: str) -> tuple[Tokenizer, int]:
    """A model's tokenizer, and how many tokens the model has; some tokenizers know one more, never used."""
    tokenizer = load_tokenizer(model_path)
    return tokenizer, int(min(len(tokenizer), model_rows(model_path)))


def build_corpus(
    source: Path, folder: Path, tokenizer: Tokenizer, vocabulary: int, progress: ProgressLog | None = None
) -> TokenFile:
    """The token file of the text, in `folder`; what is there already, of this source, is left as it is."""
    identity = identity_of(source, tokenizer)
    if _identity_in(folder) == identity:
        return TokenFile.open(folder, vocabulary)
    # The tokenizer's own threads: nothing has been encoded yet, and no process is forked after.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with TokenWriter(folder, vocabulary, {"identity": identity}) as writer:
        batch: list[Document] = []
        for document in documents(source):
            batch.append(document)
            if len(batch) == ENCODED_AT_ONCE:
                _encode(batch, tokenizer, writer)
                batch.clear()
                if progress is not None:
                    progress.stage("data", f"{writer.tokens:,} tokens of {source.name}")
        _encode(batch, tokenizer, writer)
    return TokenFile.open(folder, vocabulary)


def _encode(batch: Sequence[Document], tokenizer: Tokenizer, writer: TokenWriter) -> None:
    if not batch:
        return
    texts = [text for text, _ in batch]
    options = {"add_special_tokens": False, "return_attention_mask": False}
    encoded = tokenized(tokenizer, texts, **options)["input_ids"]
    for ids, (_, ends) in zip(encoded, batch, strict=True):
        writer.add([*ids, tokenizer.eos_token_id] if ends else ids)


def identity_of(source: Path, tokenizer: Tokenizer) -> str:
    """Changes with the files and with the tokenizer's way to read them."""
    digest = hashlib.sha256()
    for file in files_in(source, (".txt", *KINDS)):
        state = file.stat()
        digest.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode())
    probe = tokenized(tokenizer, ["The 1st test, of (many) words: äöü 日本語\n\tx += 1"])["input_ids"]
    digest.update(json.dumps([len(tokenizer), tokenizer.eos_token_id, probe]).encode())
    return digest.hexdigest()


def _identity_in(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / META_FILE).read_text())["identity"])
    except (OSError, ValueError, KeyError):
        return None


def is_corpus(path: Path) -> bool:
    """Rather than a table of rows."""
    return path.suffix == RAW or (path / META_FILE).is_file()


def open_corpus(path: Path, vocabulary: int, length: int, *, check: bool = False) -> TokenFile:
    """Documents of a token folder; rows of `length` of a plain file of tokens."""
    if path.suffix == RAW:
        return TokenFile.stream(path, vocabulary, length, width_of(vocabulary).name, check=check)
    return TokenFile.open(path, vocabulary)


def split_corpus(corpus: TokenFile, plan: TrainingPlan, which: str) -> TokenFile:
    """The documents trained on or held out, in rows of the plan's length. Of few documents rows are held
    out."""
    length, wanted = plan.sequence.length, plan.steps.eval_rows
    if len(corpus) < _MIN_DOCUMENTS_PER_HELD_OUT * wanted:
        corpus = corpus.cut(length)
    every = max(len(corpus) // max(wanted, 1), 2)
    rows = np.arange(len(corpus))
    # Not the last one, which may be a rest of a single token.
    held = (rows % every == every // 2) & (wanted > 0)
    return corpus.part(rows[held if which == "eval" else ~held]).cut(length)


def corpus_facts(corpus: TokenFile, length: int) -> DatasetFacts:
    lengths = corpus.cut(length).lengths
    sample = lengths[:: max(len(lengths) // _SAMPLE, 1)].tolist()
    return facts_from_lengths(TaskType.INSTRUCT, [0] * len(sample), sample, rows=len(lengths))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="trainer.inputs.corpus")
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True)
    options = parser.parse_args(list(arguments))
    try:
        corpus = build_corpus(options.source, options.folder, *load_corpus(options.tokenizer))
    except BadData as error:
        sys.stderr.write(f"{error}\n")
        return 1
    summary = {"folder": str(options.folder), "documents": len(corpus), "tokens": int(corpus.lengths.sum())}
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


#: Columns of labelled rows and of pairs, as `trainer.inputs` writes them.
_LABELLED = ("input_ids", "labels")
_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")

WrittenRow = tuple[NDArray[np.int64], NDArray[np.bool_]]


def open_rows(
    table: Path, folder: Path, vocabulary: int, plan: TrainingPlan, ranks: Communicator
) -> tuple[TokenFile, bool]:
    """The first rank writes, all map; whether the rows come in pairs. A corpus is mapped as it is."""
    if is_corpus(table):
        corpus = open_corpus(table, vocabulary, plan.sequence.length)
        return split_corpus(corpus, plan, folder.name), False
    if ranks.rank == 0:
        rows, _ = _rows_of(table)
        write_rows(folder, vocabulary, rows())
    ranks.barrier()
    return TokenFile.open(folder, vocabulary), _rows_of(table)[1]


def _rows_of(table: Path) -> tuple[Callable[[], Iterator[WrittenRow]], bool]:
    from datasets import load_from_disk

    rows: Any = load_from_disk(str(table)).with_format("numpy")
    names = set(rows.column_names)
    if names >= set(_LABELLED):
        return lambda: _labelled(rows), False
    if names >= set(_PAIR):
        return lambda: _pair_rows(rows), True
    raise BadData(f"{table} has the columns {sorted(names)}; the native trainer takes labelled rows or pairs")


def _labelled(table: Any) -> Iterator[WrittenRow]:
    for row in table:
        yield row["input_ids"], np.asarray(row["labels"]) != IGNORED


def _pair_rows(table: Any) -> Iterator[WrittenRow]:
    """Chosen, rejected, chosen, …: each after the prompt, and only the answer counts."""
    for row in table:
        for answer in (row["chosen_ids"], row["rejected_ids"]):
            ids = np.concatenate([row["prompt_ids"], answer])
            yield ids, np.arange(len(ids)) >= len(row["prompt_ids"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
