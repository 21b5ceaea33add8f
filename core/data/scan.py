"""Read a text dataset once: count rows, check columns against the task, sample rows for token lengths.

The columns are those that the request names, or else those of validators' files. Lengths leave prompt
formats out, which add a few tokens; the trainer builds the exact texts.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from pydantic import Field

from core.data.facts import MESSAGE_TOKENS, DatasetFacts, TextRow, facts_from_lengths, text_tokens
from core.data.rows import BadRows
from core.domain.records import Confidence, Record
from core.domain.tasks import TASK_TYPE_OF, ChatDataset, DatasetType, DpoDataset, GrpoDataset, InstructDataset

#: How many tokens each of these texts has.
CountTokens = Callable[[Sequence[str]], Sequence[int]]


class RowTexts(NamedTuple):
    """The texts of one row. Markup around messages is counted, not written out."""

    prompt: tuple[str, ...]
    #: What is learned.
    target: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    prompt_messages: int = 0
    target_messages: int = 0

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.prompt, *self.target, *self.rejected)


class RowReader:
    """Reads rows of one task."""

    def __init__(self, dataset: DatasetType) -> None:
        self.dataset = dataset
        #: The request's key → the column that must be there.
        self.needed = needed_columns(dataset)
        self.texts_of: Callable[[TextRow], RowTexts] = _reader_of(dataset)

    def is_usable(self, texts: RowTexts) -> bool:
        """Evaluation and engines alike drop rows without a label."""
        if isinstance(self.dataset, DpoDataset):
            return all(map(_filled, (texts.prompt, texts.target, texts.rejected)))
        return _filled(texts.prompt if isinstance(self.dataset, GrpoDataset) else texts.target)


def needed_columns(dataset: DatasetType) -> dict[str, str]:
    """The columns without which there is nothing to learn. Others that a request names may be missing."""
    if isinstance(dataset, InstructDataset):
        named = {"field_instruction": dataset.field_instruction, "field_output": dataset.field_output}
        return {key: name for key, name in named.items() if name}
    if isinstance(dataset, ChatDataset):
        return {"chat_column": dataset.chat_column or "conversations"}
    if isinstance(dataset, DpoDataset):
        return {
            "field_prompt": dataset.field_prompt or "prompt",
            "field_chosen": dataset.field_chosen or "chosen",
            "field_rejected": dataset.field_rejected or "rejected",
        }
    if isinstance(dataset, GrpoDataset):
        return {"field_prompt": dataset.field_prompt or "prompt"}
    return {}


def _filled(texts: Sequence[str]) -> bool:
    return any(text and not text.isspace() for text in texts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _reader_of(dataset: DatasetType) -> Callable[[TextRow], RowTexts]:
    if isinstance(dataset, InstructDataset):
        return _instruct_reader(dataset)
    if isinstance(dataset, ChatDataset):
        return _chat_reader(dataset)
    columns = tuple(needed_columns(dataset).values())
    if isinstance(dataset, DpoDataset):
        prompt, chosen, rejected = columns
        return lambda row: RowTexts(
            (_text(row.get(prompt)),), (_text(row.get(chosen)),), (_text(row.get(rejected)),)
        )
    if isinstance(dataset, GrpoDataset):
        return lambda row: RowTexts((_text(row.get(columns[0], row.get("prompt"))),))
    raise ValueError(f"{dataset.kind} tasks have no rows")


def _instruct_reader(dataset: InstructDataset) -> Callable[[TextRow], RowTexts]:
    instruction, output = dataset.field_instruction or "", dataset.field_output
    extra, system = dataset.field_input, dataset.field_system or "system"
    system_prompt = dataset.system_prompt or ""

    def texts_of(row: TextRow) -> RowTexts:
        if output is None:  # all of it is learned
            return RowTexts((), (_text(row.get(instruction)),))
        first = _text(row[system]) if system in row else system_prompt
        prompt = (first, _text(row.get(instruction)), _text(row.get(extra)) if extra else "")
        return RowTexts(tuple(filter(None, prompt)), (_text(row.get(output)),))

    return texts_of


def _chat_reader(dataset: ChatDataset) -> Callable[[TextRow], RowTexts]:
    column = dataset.chat_column or "conversations"
    role, content = dataset.chat_role_field or "from", dataset.chat_content_field or "value"
    assistant = dataset.chat_assistant_reference or "assistant"

    def texts_of(row: TextRow) -> RowTexts:
        prompt: list[str] = []
        target: list[str] = []
        for message in _messages(row.get(column)):
            if isinstance(message, Mapping) and message.get(content) is not None:
                (target if message.get(role) == assistant else prompt).append(_text(message[content]))
        return RowTexts(tuple(prompt), tuple(target), (), len(prompt), len(target))

    return texts_of


def _messages(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    return value if isinstance(value, list) else ()


#: Rows whose lengths are measured: this many put the 99th percentile within a few percent.
SAMPLE_ROWS = 2000
#: A longer text is measured by its beginning.
MAX_SAMPLED_CHARS = 16_000
#: Columns that a message names, and that are remembered: a file may have different ones in every row.
_SHOWN_COLUMNS, _MAX_COLUMNS, _MAX_SHAPES = 20, 1000, 1000


class DatasetScan(Record):
    """A file of rows, read to its end."""

    rows: int = Field(ge=0)
    #: Rows from which something can be learned.
    usable: int = Field(ge=0)
    #: Column → in how many rows.
    columns: dict[str, int] = Field(default_factory=dict)


class SampledRow(NamedTuple):
    """One row, its long texts cut."""

    texts: RowTexts
    #: How many times as long each of the texts really is.
    scales: tuple[float, ...]


class RowSample(NamedTuple):
    """Rows picked evenly from the whole file."""

    rows: list[SampledRow]

    def to_json(self) -> str:
        return json.dumps(self.rows)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls([_row_from_json(*row) for row in json.loads(text)])


def scan_rows(rows: Iterable[Mapping[str, Any]], dataset: DatasetType) -> tuple[DatasetScan, RowSample]:
    """Read all rows once. `BadRows`, with the columns found and wanted, when nothing can be learned."""
    reader = RowReader(dataset)
    shapes: dict[tuple[str, ...], int] = {}
    picker = random.Random(0)  # noqa: S311 - a sample, no secret
    sample: list[SampledRow] = []
    count = usable = 0
    for row in rows:
        count += 1
        shape = tuple(row)
        if shape in shapes or len(shapes) < _MAX_SHAPES:
            shapes[shape] = shapes.get(shape, 0) + 1
        texts = reader.texts_of(row)
        if reader.is_usable(texts):
            usable += 1
            if len(sample) < SAMPLE_ROWS:
                sample.append(_clipped(texts))
            elif (index := int(picker.random() * usable)) < SAMPLE_ROWS:
                sample[index] = _clipped(texts)
    columns = _columns(shapes)
    _check(reader, columns, count, usable)
    return DatasetScan(rows=count, usable=usable, columns=columns), RowSample(sample)


def facts_from_scan(
    dataset: DatasetType, scan: DatasetScan, sample: RowSample, count: CountTokens | None = None
) -> DatasetFacts:
    """Measure what the planner needs. `count` is the model's tokenizer; without it, lengths are estimated."""
    texts = [text for row in sample.rows for text in row.texts.all]
    scales = [scale for row in sample.rows for scale in row.scales]
    counts = count(texts) if count else map(text_tokens, texts)
    tokens = (round(number * scale) for number, scale in zip(counts, scales, strict=True))
    prompts, targets, rejected = [], [], []
    for row in (sampled.texts for sampled in sample.rows):
        prompts.append(_sum(tokens, row.prompt) + MESSAGE_TOKENS * row.prompt_messages)
        targets.append(_sum(tokens, row.target) + MESSAGE_TOKENS * row.target_messages)
        rejected.append(_sum(tokens, row.rejected))
    task_type = TASK_TYPE_OF[dataset.kind]
    losers = rejected if task_type.has_pairs else None
    facts = facts_from_lengths(task_type, prompts, targets, losers, scan.usable)
    if count or not sample.rows:
        return facts
    return facts.model_copy(update={"lengths_confidence": Confidence.NAME})


def _sum(tokens: Iterator[int], texts: Sequence[str]) -> int:
    return sum(itertools.islice(tokens, len(texts)))


def _columns(shapes: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    columns: Counter[str] = Counter()
    for shape, count in shapes.items():
        for name in shape:
            columns[name] += count
    return dict(columns.most_common(_MAX_COLUMNS))


def _clipped(texts: RowTexts) -> SampledRow:
    scales = tuple(max(len(text) / MAX_SAMPLED_CHARS, 1.0) for text in texts.all)
    if max(scales, default=1.0) > 1.0:
        prompt, target, rejected = (
            tuple(text[:MAX_SAMPLED_CHARS] for text in part)
            for part in (texts.prompt, texts.target, texts.rejected)
        )
        texts = texts._replace(prompt=prompt, target=target, rejected=rejected)
    return SampledRow(texts, scales)


def _row_from_json(texts: list[Any], scales: list[float]) -> SampledRow:
    prompt, target, rejected, *messages = texts
    return SampledRow(RowTexts(tuple(prompt), tuple(target), tuple(rejected), *messages), tuple(scales))


def _check(reader: RowReader, columns: Mapping[str, int], rows: int, usable: int) -> None:
    if not rows:
        raise BadRows("the file has no rows")
    if not reader.needed:
        raise BadRows(f"the task names no column to learn from; the columns are {_list(columns)}")
    missing = {
        key: name
        for key, name in reader.needed.items()
        if name not in columns and not (key == "field_prompt" and "prompt" in columns)
    }
    if missing:
        wanted = ", ".join(f"{name!r} ({key})" for key, name in missing.items())
        raise BadRows(f"no row has the column {wanted}; the columns are {_list(columns)}")
    if not usable:
        needed = ", ".join(map(repr, reader.needed.values()))
        raise BadRows(f"none of the {rows:,} rows can be learned from: {needed} are empty or of another kind")


def _list(columns: Mapping[str, int]) -> str:
    names = [repr(name[:60]) for name in list(columns)[:_SHOWN_COLUMNS]]
    more = f" and {len(columns) - _SHOWN_COLUMNS} more" if len(columns) > _SHOWN_COLUMNS else ""
    return (", ".join(names) or "none") + more
