"""Rows as the folders that Axolotl loads: Arrow tables of `datasets`, mapped into memory instead of parsed.

Labelled rows have the three columns by which Axolotl knows that nothing is left to encode; pairs and prompts
have what our trainer classes (`trainer.axolotl.trainers`) look for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from core.recipes.axolotl.data_keys import GRPO_EXTRA, GRPO_PROMPT
from trainer.inputs.dpo_grpo import extra_text
from trainer.inputs.tokens import Ids, LabelledRow, PairRow, PromptRow, Row

PAIR_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write rows of one kind, at least one."""
    arrow = importlib.import_module("pyarrow")
    datasets = importlib.import_module("datasets")
    table = arrow.table(_columns(rows, arrow))
    datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(str(path))


def read_table(path: Path) -> list[Row]:
    """Read what `write_table` wrote."""
    table = importlib.import_module("datasets").load_from_disk(str(path))
    return list(_rows(table))


def _columns(rows: Sequence[Row], arrow: Any) -> dict[str, Any]:
    first = rows[0]
    if isinstance(first, LabelledRow):
        ids = [row.ids for row in rows if isinstance(row, LabelledRow)]
        marked = [row.labels for row in rows if isinstance(row, LabelledRow)]
        mask = arrow.ListArray.from_arrays(_offsets(ids, arrow), _ones(ids, arrow))
        return {"input_ids": _lists(ids, arrow), "attention_mask": mask, "labels": _lists(marked, arrow)}
    if isinstance(first, PairRow):
        pairs = [row for row in rows if isinstance(row, PairRow)]
        return {name: _lists([row[at] for row in pairs], arrow) for at, name in enumerate(PAIR_COLUMNS)}
    prompts = [row for row in rows if isinstance(row, PromptRow)]
    columns = {GRPO_PROMPT: arrow.array([row.prompt for row in prompts], arrow.string())}
    if any(row.extra is not None for row in prompts):
        columns[GRPO_EXTRA] = arrow.array([extra_text(row.extra) for row in prompts], arrow.string())
    return columns


def _lists(values: Sequence[Ids], arrow: Any) -> Any:
    numpy = importlib.import_module("numpy")
    flat = numpy.concatenate([numpy.asarray(ids, dtype=numpy.int32) for ids in values])
    return arrow.ListArray.from_arrays(_offsets(values, arrow), arrow.array(flat))


def _offsets(values: Sequence[Ids], arrow: Any) -> Any:
    numpy = importlib.import_module("numpy")
    return arrow.array(numpy.cumsum([0, *(len(ids) for ids in values)]).astype(numpy.int32))


def _ones(values: Sequence[Ids], arrow: Any) -> Any:
    numpy = importlib.import_module("numpy")
    return arrow.array(numpy.ones(sum(len(ids) for ids in values), dtype=numpy.int8))


def _rows(table: Any) -> Iterator[Row]:
    columns = set(table.column_names)
    for row in table:
        if "labels" in columns:
            yield LabelledRow(row["input_ids"], row["labels"])
        elif PAIR_COLUMNS[0] in columns:
            yield PairRow(*(row[name] for name in PAIR_COLUMNS))
        else:
            yield PromptRow(row[GRPO_PROMPT], row.get(GRPO_EXTRA))
