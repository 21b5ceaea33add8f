"""Rows out of a task's data file: one JSON array as validators send it, JSON lines, CSV, parquet, or a
folder.

Nothing is cleaned here: validators add odd strings to their rows and evaluate on them, so rows are trained on
as they are. Only what no tokenizer takes (half a surrogate pair) is replaced.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.csv_rows import CsvRows
from core.json_rows import BadRows, JsonRows
from trainer.errors import BadData

Record = dict[str, Any]

KINDS = (".json", ".jsonl", ".csv", ".parquet")
#: A file whose name says nothing is taken for JSON.
_CSV, _PARQUET = ".csv", ".parquet"
_ABOUT = ("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_SHOWN = 12


def read_rows(path: Path) -> list[Record]:
    """Every row of the file, or of the files in the folder. `BadData` where there are none."""
    rows = [row for file in files_in(path) for row in rows_in(file)]
    if not rows:
        raise BadData(f"{path.name} has no rows that are objects: the task's data is empty")
    return rows


def columns_of(rows: list[Record]) -> frozenset[str]:
    """Every column of the table: one that a single row has, all have, as in the evaluation."""
    return frozenset().union(*rows)


def need(columns: frozenset[str], wanted: Mapping[str, str | None]) -> None:
    """`BadData` when a column that the task names is in no row; `wanted` is the request's key to its name."""
    for key, name in wanted.items():
        if not name:
            raise BadData(f"the task's {key} names no column, so nothing says what is to be learned")
        if name not in columns:
            shown = ", ".join(sorted(columns)[:_SHOWN]) or "none"
            raise BadData(f"{key} {name!r} is no column of the data; its columns are {shown}")


def text_of(value: Any) -> str:
    """What a template makes of a value; null and absent are empty, as in the files validators prepare."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    return text if text.isascii() else _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)


def files_in(path: Path, kinds: tuple[str, ...] = KINDS) -> list[Path]:
    """The file itself, or those of the folder that are of the first one's kind."""
    if path.is_file():
        return [path]
    found = (file for file in path.rglob("*") if file.suffix in kinds and file.is_file())
    files = sorted(file for file in found if not _is_about(file.relative_to(path)))
    if not files:
        raise BadData(
            f"{path} is no file and no folder with {', '.join(kinds)} files: the task's data is not there"
        )
    # The columns of several formats of one dataset would mix; repositories often hold both.
    sizes = Counter[str]()
    for file in files:
        sizes[file.suffix] += file.stat().st_size
    return [file for file in files if file.suffix == max(sizes, key=sizes.__getitem__)]


def _is_about(inside: Path) -> bool:
    """What repositories and download caches say about their data is none."""
    return any(part.startswith(".") for part in inside.parts) or inside.name in _ABOUT


def rows_in(file: Path) -> Iterator[Record]:
    """One after the other: a file may be larger than memory."""
    try:
        if file.suffix == _PARQUET:
            for batch in importlib.import_module("pyarrow.parquet").ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        else:
            with file.open("rb") as data:
                yield from CsvRows(data) if file.suffix == _CSV else JsonRows(data)
    except (OSError, ValueError, BadRows) as error:
        raise BadData(f"{file.name} cannot be read as rows: {str(error)[:200]}") from error
