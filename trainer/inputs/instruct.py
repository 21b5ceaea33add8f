"""Instruct rows as evaluation encodes them: prompt and answer each by itself, nothing between, then the end
token.

The text of the prompt is the system part and the turn. Formats come from the request and are filled as
Python's `str.format` does, which is what evaluation uses; one that Python cannot fill (a stray brace,
another name) is filled by replacing the names it may hold.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from typing import Any

from core.domain.tasks import InstructDataset
from trainer.inputs.files import RawRow, columns_of, require_columns, text_of
from trainer.inputs.tokens import IGNORED, Ids, LabelledRow, Tokenizer, compact_ids, encode_filled

#: The columns that the evaluation's tokenizer looks for where the request names none.
SYSTEM, INPUT = "system", "input"


def fill_format(form: str, values: Mapping[str, str]) -> str:
    """The format with its names filled in; anything but a plain `{name}` of `values` is left as it stands."""
    try:
        parts = list(string.Formatter().parse(form))
    except ValueError:
        parts = None
    if parts is not None and all(
        name is None or (name in values and not spec and not conversion)
        for _, name, spec, conversion in parts
    ):
        return form.format(**values)
    # One pass, so that a value which itself holds a name in braces is not filled again.
    pieces, rest = [], form
    while rest:
        first_name = min(
            ((at, name) for name in values if (at := rest.find(f"{{{name}}}")) >= 0), default=None
        )
        if first_name is None:
            break
        at, name = first_name
        pieces += [rest[:at], values[name]]
        rest = rest[at + len(name) + 2 :]
    return "".join([*pieces, rest])


class InstructText:
    """Makes prompt and answer of a row."""

    def __init__(self, dataset: InstructDataset, columns: frozenset[str]) -> None:
        self._system_prompt = dataset.system_prompt
        self._instruction_field, self._output_field = (
            dataset.field_instruction or "",
            dataset.field_output or "",
        )
        self._system_field = dataset.field_system or SYSTEM
        self._has_system = self._system_field in columns
        self._input_field = dataset.field_input or INPUT
        default = "{instruction} {input}" if dataset.field_input else "{instruction}"
        self._turn = default if dataset.format is None else dataset.format
        self._bare = "{instruction}" if dataset.no_input_format is None else dataset.no_input_format
        self._system_format = "{system}" if dataset.system_format is None else dataset.system_format

    def prompt(self, row: RawRow) -> str:
        system = text_of(row.get(self._system_field)) if self._has_system else self._system_prompt
        instruction = text_of(row.get(self._instruction_field))
        input_text = text_of(row.get(self._input_field))
        system_text = (
            fill_format(self._system_format, {"system": system}) if system and self._system_format else ""
        )
        if input_text:
            return system_text + fill_format(self._turn, {"instruction": instruction, "input": input_text})
        return system_text + fill_format(self._bare, {"instruction": instruction})

    def answer(self, row: RawRow) -> str:
        return text_of(row.get(self._output_field))


def instruct_rows(
    dataset: InstructDataset, rows: list[RawRow], tokenizer: Tokenizer, limit: int
) -> Iterator[LabelledRow]:
    """Encode each row, in order. A row without an answer has no label; evaluation leaves it out."""
    require_columns(columns_of(rows), {"field_instruction": dataset.field_instruction})
    if not dataset.field_output:
        yield from _completions(rows, dataset.field_instruction or "", tokenizer)
        return
    require_columns(columns_of(rows), {"field_output": dataset.field_output})
    text = InstructText(dataset, columns_of(rows))
    prompts = encode_filled(tokenizer, [text.prompt(row) for row in rows], limit)
    answers = encode_filled(tokenizer, [text.answer(row) for row in rows], limit)
    for prompt, raw in zip(prompts, answers, strict=True):
        answer = _with_end_token(raw, tokenizer, limit)
        if answer and answer[0] == tokenizer.bos_token_id:
            answer = answer[1:]
        yield LabelledRow(compact_ids([*prompt, *answer]), compact_ids([*[IGNORED] * len(prompt), *answer]))


def _with_end_token(ids: list[int], tokenizer: Tokenizer, limit: int | None) -> list[int]:
    """Append the end token, where there are tokens and room for it."""
    full = limit is not None and len(ids) >= limit
    if not ids or ids[-1] == tokenizer.eos_token_id or full or tokenizer.eos_token_id is None:
        return ids
    return [*ids, tokenizer.eos_token_id]


def _completions(rows: list[RawRow], field: str, tokenizer: Tokenizer) -> Iterator[LabelledRow]:
    """Encode rows without an output column: all of the text is learned. It is cut into sequences later."""
    for raw in encode_filled(tokenizer, [text_of(row.get(field)) for row in rows], None):
        ids = compact_ids(_with_end_token(raw, tokenizer, None))
        yield LabelledRow(ids, ids)


def split_completion(row: LabelledRow, length: int) -> Iterator[LabelledRow]:
    """A completion's sequences of at most `length` tokens. A last one of a single token predicts nothing."""
    for start in range(0, max(len(row.ids) - 1, 0), length):
        yield LabelledRow(row.ids[start : start + length], row.labels[start : start + length])


def count_learned(labels: Ids) -> int:
    """Count the tokens of a row that are learned."""
    return len(labels) - labels.count(IGNORED)


def is_completion(dataset: Any) -> bool:
    return isinstance(dataset, InstructDataset) and not dataset.field_output
