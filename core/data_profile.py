"""What a file of rows turns out to be: counted whole, sampled for lengths, held against the task."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from pydantic import Field

from core.data import DatasetFacts
from core.facts import Record
from core.json_rows import BadRows
from core.row_parts import Count, Parts, RowReader, facts_from_parts, standard_name
from core.tasks import DatasetType

#: Rows whose lengths are measured: so many put the 99th percentile within a few percent.
SAMPLE = 2000
#: A longer text is measured by its beginning.
CLIP = 16_000
#: Columns that are told of, and remembered; a file may have other ones in every row.
_SHOWN, _MOST_COLUMNS, _MOST_SHAPES = 20, 1000, 1000


class Profile(Record):
    """A file of rows, read to its end."""

    rows: int = Field(ge=0)
    #: Rows from which something can be learned.
    usable: int = Field(ge=0)
    #: Column → in how many rows.
    columns: dict[str, int] = Field(default_factory=dict)


class Sampled(NamedTuple):
    """One row, its long texts cut."""

    parts: Parts
    #: How many times as long each of the texts really is.
    scales: tuple[float, ...]


class Sample(NamedTuple):
    """Rows picked evenly from the whole file."""

    rows: list[Sampled]

    def to_json(self) -> str:
        return json.dumps(self.rows)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls([_row_of(*one) for one in json.loads(text)])


def profile_rows(
    rows: Iterable[Mapping[str, Any]], dataset: DatasetType, seed: int = 0
) -> tuple[Profile, Sample]:
    """Read all rows once. `BadRows` when nothing can be learned from them, with what was found and wanted."""
    reader = RowReader(dataset)
    shapes: dict[tuple[str, ...], int] = {}
    picker = random.Random(seed)  # noqa: S311 - a sample, no secret
    sample: list[Sampled] = []
    count = usable = 0
    for row in rows:
        count += 1
        shape = tuple(row)
        if shape in shapes or len(shapes) < _MOST_SHAPES:
            shapes[shape] = shapes.get(shape, 0) + 1
        parts = reader.parts(row)
        if reader.can_be_learned(parts):
            usable += 1
            if len(sample) < SAMPLE:
                sample.append(_clipped(parts))
            elif (place := int(picker.random() * usable)) < SAMPLE:
                sample[place] = _clipped(parts)
    columns = _columns(shapes)
    _check(reader, columns, count, usable)
    return Profile(rows=count, usable=usable, columns=columns), Sample(sample)


def facts_of(
    dataset: DatasetType, found: Profile, sample: Sample, count: Count | None = None
) -> DatasetFacts:
    """What a planner wants to know. `count` is the model's tokenizer, if there is one."""
    scales = [scale for row in sample.rows for scale in row.scales]

    def scaled(texts: Sequence[str]) -> list[int]:
        assert count is not None
        return [round(tokens * scale) for tokens, scale in zip(count(texts), scales, strict=True)]

    return facts_from_parts(
        dataset, [row.parts for row in sample.rows], found.usable, None if count is None else scaled
    )


def _columns(shapes: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for shape, count in shapes.items():
        for name in shape:
            found[name] += count
    return dict(found.most_common(_MOST_COLUMNS))


def _clipped(parts: Parts) -> Sampled:
    scales = tuple(max(len(text) / CLIP, 1.0) for text in parts.texts)
    if max(scales, default=1.0) > 1.0:
        read, learned, rejected = (
            tuple(text[:CLIP] for text in texts) for texts in (parts.read, parts.learned, parts.rejected)
        )
        parts = parts._replace(read=read, learned=learned, rejected=rejected)
    return Sampled(parts, scales)


def _row_of(parts: list[Any], scales: list[float]) -> Sampled:
    read, learned, rejected, *messages = parts
    return Sampled(Parts(tuple(read), tuple(learned), tuple(rejected), *messages), tuple(scales))


def _check(reader: RowReader, columns: Mapping[str, int], rows: int, usable: int) -> None:
    if not rows:
        raise BadRows("the file has no rows")
    if not reader.needed:
        raise BadRows(f"the task names no column to learn from; the columns are {_list(columns)}")
    missing = {
        key: name
        for key, name in reader.needed.items()
        if name not in columns and standard_name(key) not in columns
    }
    if missing:
        wanted = ", ".join(f"{name!r} ({key})" for key, name in missing.items())
        raise BadRows(f"no row has the column {wanted}; the columns are {_list(columns)}")
    if not usable:
        needed = ", ".join(map(repr, reader.needed.values()))
        raise BadRows(f"none of the {rows:,} rows can be learned from: {needed} are empty or of another kind")


def _list(columns: Mapping[str, int]) -> str:
    names = [repr(name[:60]) for name in list(columns)[:_SHOWN]]
    more = f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else ""
    return (", ".join(names) or "none") + more
