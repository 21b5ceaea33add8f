"""The task's rows, as the adapters left them, in this trainer's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.plan import TrainingPlan
from trainer.errors import BadData
from trainer.native import corpus
from trainer.native.batches import IGNORED
from trainer.native.ranks import Ranks
from trainer.native.tokens import TokenFile, write_rows

#: Columns of labelled rows and of pairs, as `trainer.inputs` writes them.
_LABELLED = ("input_ids", "labels")
_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")

Written = tuple[NDArray[np.int64], NDArray[np.bool_]]


def token_file(
    table: Path, folder: Path, vocabulary: int, plan: TrainingPlan, ranks: Ranks
) -> tuple[TokenFile, bool]:
    """The first rank writes, all map; whether the rows come in pairs. A corpus is mapped as it is."""
    if corpus.is_corpus(table):
        whole = corpus.read(table, vocabulary, plan.sequence.length)
        return corpus.split(whole, plan, folder.name), False
    if ranks.rank == 0:
        rows, _ = _rows_of(table)
        write_rows(folder, vocabulary, rows())
    ranks.wait()
    return TokenFile.open(folder, vocabulary), _rows_of(table)[1]


def _rows_of(table: Path) -> tuple[Callable[[], Iterator[Written]], bool]:
    from datasets import load_from_disk

    found: Any = load_from_disk(str(table)).with_format("numpy")
    names = set(found.column_names)
    if names >= set(_LABELLED):
        return lambda: _labelled(found), False
    if names >= set(_PAIR):
        return lambda: _pairs(found), True
    raise BadData(f"{table} has the columns {sorted(names)}; the native trainer takes labelled rows or pairs")


def _labelled(table: Any) -> Iterator[Written]:
    for row in table:
        yield row["input_ids"], np.asarray(row["labels"]) != IGNORED


def _pairs(table: Any) -> Iterator[Written]:
    """Chosen, rejected, chosen, …: each after the prompt, and only the answer counts."""
    for row in table:
        for answer in (row["chosen_ids"], row["rejected_ids"]):
            ids = np.concatenate([row["prompt_ids"], answer])
            yield ids, np.arange(len(ids)) >= len(row["prompt_ids"])
