"""Plain text for pretraining: read once as a stream, kept as one token file, mapped by every process after.

    python -m trainer.native.corpus DATA FOLDER --tokenizer MODEL

DATA is a text file, a table with a column of text (JSON lines, JSON, CSV, parquet), or a folder of either. A
row of the file is a document with its end token. How long a training's sequences are and which documents are
held out is decided when it begins, and copies nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from core.choices import Engine
from core.data import DatasetFacts
from core.data_facts import facts_from_lengths
from core.plan import TrainingPlan
from core.tasks import TaskType
from trainer.callbacks.report import Report
from trainer.errors import BadData
from trainer.inputs.files import KINDS, files_in, rows_in, text_of
from trainer.inputs.tokens import Tokenizer, load_tokenizer, model_rows, model_window, pad_token_for_engine
from trainer.native.tokens import META, TokenFile, TokenWriter, width_of
from trainer.own_plan import model_facts, own_plan
from trainer.sheet import Ask, Prepared

#: Columns that hold a document's text, the likeliest first.
COLUMNS = ("text", "content", "document", "body")
#: A text file is read in pieces of about so many letters, which end where a line does.
PIECE = 1 << 20
#: Texts encoded in one call: enough for all cores, few enough for memory.
TOGETHER = 512
#: A plain file of tokens, as other tools write them.
RAW = ".bin"
#: Documents for each that is held out, at least.
_FEW = 4
#: Rows looked at for a plan.
_SAMPLE = 20_000

Document = tuple[str, bool]


def documents(path: Path) -> Iterator[Document]:
    """Texts, and whether each is the end of its document."""
    found = False
    for file in files_in(path, (".txt", *KINDS)):
        for document in _pieces(file) if file.suffix == ".txt" else _column(file):
            found = True
            yield document
    if not found:
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


def load(model_path: str) -> tuple[Tokenizer, int]:
    """A model's tokenizer, and how many tokens the model has; some tokenizers know one more, never used."""
    tokenizer = load_tokenizer(model_path)
    return tokenizer, int(min(len(tokenizer), model_rows(model_path)))


def build(
    source: Path, folder: Path, tokenizer: Tokenizer, vocabulary: int, report: Report | None = None
) -> TokenFile:
    """The token file of the text, in `folder`; what is there already, of this source, is left as it is."""
    identity = identity_of(source, tokenizer)
    if _identity_in(folder) == identity:
        return TokenFile.open(folder, vocabulary)
    # The tokenizer's own threads: nothing has been encoded yet, and no process is forked after.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with TokenWriter(folder, vocabulary, {"identity": identity}) as writer:
        together: list[Document] = []
        for document in documents(source):
            together.append(document)
            if len(together) == TOGETHER:
                _encode(together, tokenizer, writer)
                together.clear()
                if report is not None:
                    report.stage("data", f"{writer.tokens:,} tokens of {source.name}")
        _encode(together, tokenizer, writer)
    return TokenFile.open(folder, vocabulary)


def _encode(together: Sequence[Document], tokenizer: Tokenizer, writer: TokenWriter) -> None:
    if not together:
        return
    texts = [text for text, _ in together]
    found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    for ids, (_, ends) in zip(found, together, strict=True):
        writer.add([*ids, tokenizer.eos_token_id] if ends else ids)


def identity_of(source: Path, tokenizer: Tokenizer) -> str:
    """Changes with the files and with the tokenizer's way to read them."""
    found = hashlib.sha256()
    for file in files_in(source, (".txt", *KINDS)):
        state = file.stat()
        found.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode())
    probe = tokenizer(["The 1st test, of (many) words: äöü 日本語\n\tx += 1"])["input_ids"]
    found.update(json.dumps([len(tokenizer), tokenizer.eos_token_id, probe]).encode())
    return found.hexdigest()


def _identity_in(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / META).read_text())["identity"])
    except (OSError, ValueError, KeyError):
        return None


def is_corpus(path: Path) -> bool:
    """Rather than a table of rows."""
    return path.suffix == RAW or (path / META).is_file()


def read(path: Path, vocabulary: int, length: int, *, check: bool = False) -> TokenFile:
    """Documents of a token folder; rows of `length` of a plain file of tokens."""
    if path.suffix == RAW:
        return TokenFile.stream(path, vocabulary, length, width_of(vocabulary).name, check=check)
    return TokenFile.open(path, vocabulary)


def split(corpus: TokenFile, plan: TrainingPlan, which: str) -> TokenFile:
    """The documents trained on or held out, in rows of the plan's length. Of few documents rows are held
    out."""
    length, wanted = plan.sequence.length, plan.steps.eval_rows
    if len(corpus) < _FEW * wanted:
        corpus = corpus.cut(length)
    every = max(len(corpus) // max(wanted, 1), 2)
    rows = np.arange(len(corpus))
    # Not the last one, which may be a rest of a single token.
    held = (rows % every == every // 2) & (wanted > 0)
    return corpus.part(rows[held if which == "eval" else ~held]).cut(length)


def prepare(ask: Ask) -> Prepared:
    """`trainer.prepare`'s answer for a task that is plain text."""
    run, source = ask.run, Path(ask.run.data_path)
    tokenizer, vocabulary = load(run.model_path)
    window = model_window(run.model_path) or 2048
    folder = source if is_corpus(source) else Path(run.work_dir) / "corpus"
    if folder == source:
        corpus = read(source, vocabulary, window, check=True)
    else:
        corpus = build(source, folder, tokenizer, vocabulary, Report(Path(run.progress_path)))
    if ask.plan_path is not None:
        plan = TrainingPlan.from_json(Path(ask.plan_path).read_bytes())
    else:
        model = model_facts(Path(run.model_path), run.model_id)
        plan = own_plan(run, model, facts(corpus, window))
        # Long documents are cut to what the plan takes at once, which is more rows than it knew of.
        plan = own_plan(run, model, facts(corpus, plan.sequence.length))
    if plan.engine is not Engine.NATIVE:
        raise BadData(
            f"{source} is plain text, which the native trainer alone takes; the plan names {plan.engine}"
        )
    Path(ask.plan_out).write_text(plan.to_json(), encoding="utf-8")
    if folder.suffix == RAW:
        corpus = read(folder, vocabulary, plan.sequence.length)
    train, held = split(corpus, plan, "train"), split(corpus, plan, "eval")
    if not len(train):
        raise BadData(f"{source} has too few documents: {len(corpus)}")
    return Prepared(
        train_path=str(folder),
        eval_path=str(folder) if len(held) else None,
        train_rows=len(train),
        eval_rows=len(held),
        digest=hashlib.sha256(repr(train.fingerprint()).encode()).hexdigest(),
        pad_token=pad_token_for_engine(tokenizer),
    )


def facts(corpus: TokenFile, length: int) -> DatasetFacts:
    lengths = corpus.cut(length).lengths
    sample = lengths[:: max(len(lengths) // _SAMPLE, 1)].tolist()
    return facts_from_lengths(TaskType.INSTRUCT, [0] * len(sample), sample, rows=len(lengths))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="trainer.native.corpus")
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True)
    said = parser.parse_args(list(arguments))
    try:
        made = build(said.source, said.folder, *load(said.tokenizer))
    except BadData as error:
        sys.stderr.write(f"{error}\n")
        return 1
    told = {"folder": str(said.folder), "documents": len(made), "tokens": int(made.lengths.sum())}
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
