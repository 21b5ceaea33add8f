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

from core.data.rows import BadRows, CsvRows, JsonRows
from trainer.errors import BadData

RawRow = dict[str, Any]

KINDS = (".json", ".jsonl", ".csv", ".parquet")
#: A file with any other suffix is read as JSON.
_CSV, _PARQUET = ".csv", ".parquet"
_ABOUT = ("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_SHOWN = 12
#: Rows of a parquet file in memory as objects.
READ_AT_ONCE = 1000


def read_rows(path: Path) -> list[RawRow]:
    """Every row of the file, or of the files in the folder. `BadData` where there are none."""
    rows = [row for file in files_in(path) for row in rows_in(file)]
    if not rows:
        raise BadData(f"{path.name} has no rows that are objects: the task's data is empty")
    return rows


def columns_of(rows: list[RawRow]) -> frozenset[str]:
    """Every column of the table: a column of one row is a column of all, as in the evaluation."""
    return frozenset().union(*rows)


def require_columns(columns: frozenset[str], wanted: Mapping[str, str | None]) -> None:
    """`BadData` when a column that the task names is in no row; `wanted` is the request's key to its name."""
    for key, name in wanted.items():
        if not name:
            raise BadData(f"the task's {key} names no column, so nothing says what is to be learned")
        if name not in columns:
            shown = ", ".join(sorted(columns)[:_SHOWN]) or "none"
            raise BadData(f"{key} {name!r} is no column of the data; its columns are {shown}")


def text_of(value: Any) -> str:
    """A value as text; null and absent are empty, as in the files that validators prepare."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    return text if text.isascii() else _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)


def texts_in(record: RawRow) -> Iterator[str]:
    """Every text of a row, those in its lists of messages included."""
    for value in record.values():
        if isinstance(value, list):
            for item in value:
                yield from texts_in(item) if isinstance(item, dict) else (text_of(item),)
        else:
            yield text_of(value)


def files_in(path: Path, kinds: tuple[str, ...] = KINDS) -> list[Path]:
    """The file itself, or those of the folder that are of the first one's kind."""
    if path.is_file():
        return [path]
    candidates = (file for file in path.rglob("*") if file.suffix in kinds and file.is_file())
    files = sorted(file for file in candidates if not _is_about(file.relative_to(path)))
    if not files:
        raise BadData(
            f"{path} is neither a file nor a directory with {', '.join(kinds)} files: "
            "the task's data is missing"
        )
    # The columns of several formats of one dataset would mix; repositories often hold both.
    sizes = Counter[str]()
    for file in files:
        sizes[file.suffix] += file.stat().st_size
    return [file for file in files if file.suffix == max(sizes, key=sizes.__getitem__)]


def _is_about(inside: Path) -> bool:
    """Return True for a file about the data, of a repository or a download cache."""
    return any(part.startswith(".") for part in inside.parts) or inside.name in _ABOUT


def rows_in(file: Path) -> Iterator[RawRow]:
    """Read rows one by one: a file may be larger than memory."""
    try:
        if file.suffix == _PARQUET:
            table = importlib.import_module("pyarrow.parquet").ParquetFile(file)
            for batch in table.iter_batches(batch_size=READ_AT_ONCE):
                yield from batch.to_pylist()
        else:
            with file.open("rb") as data:
                yield from CsvRows(data) if file.suffix == _CSV else JsonRows(data)
    except (OSError, ValueError, BadRows) as error:
        raise BadData(f"{file.name} cannot be read as rows: {str(error)[:200]}") from error
