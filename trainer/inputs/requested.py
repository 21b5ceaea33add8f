"""Rows of datasets that an entry requested of the validators, in the columns of the task.

They come in the shapes in which datasets are published: messages, instruction and output, prompt and
completion, prompt and two answers. They are foreign files: what cannot be read, is of another shape, or is
far too long is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from core.domain.tasks import ChatDataset, DatasetType, DpoDataset, GrpoDataset, InstructDataset
from core.recipes.axolotl.data_keys import GRPO_PROMPT
from trainer.errors import BadData
from trainer.inputs.chat import ASSISTANT, SYSTEM, USER
from trainer.inputs.dpo_grpo import CHOSEN, PROMPT, REJECTED
from trainer.inputs.files import RawRow, files_in, rows_in

#: Column names of published datasets, the likeliest first.
MESSAGES = ("messages", "conversations", "conversation", "dialogue")
PROMPTS = ("instruction", "instruct", PROMPT, "question", "query", "problem")
INPUTS = ("input", "context")
ANSWERS = ("output", "response", "answer", "completion", "solution", CHOSEN)
SYSTEMS = (SYSTEM, "system_prompt")
ROLES = {
    **dict.fromkeys(("user", "human"), USER),
    **dict.fromkeys(("assistant", "gpt", "model", "bot"), ASSISTANT),
    "system": SYSTEM,
}
#: Files read of a dataset, evenly spread; rows looked at for each that is wanted; letters of a row.
MOST_FILES, LOOKED_AT, MOST_LETTERS = 20, 5, 200_000


class RequestedRows(NamedTuple):
    rows: list[RawRow]
    #: What there was, by dataset: for the operator.
    notes: list[str]


class _Turn(NamedTuple):
    role: str
    text: str


def requested_rows(folders: Sequence[str], dataset: DatasetType, wanted: int) -> RequestedRows:
    """About so many rows, of each dataset as many as of the others, or what it has."""
    found = RequestedRows([], [])
    for number, folder in enumerate(map(Path, folders)):
        share = -(-(wanted - len(found.rows)) // (len(folders) - number))
        rows, problems = list[RawRow](), list[str]()
        try:
            files = files_in(folder)
        except (BadData, OSError) as error:
            files = []
            problems.append(str(error))
        files = files[:: -(-len(files) // MOST_FILES) or 1]
        for file in files:
            try:
                rows.extend(_rows_of(file, dataset, -(-share // len(files))))
            except Exception as error:  # noqa: BLE001 - a foreign file makes its reader raise what it likes
                problems.append(f"{file.name}: {str(error)[:200] or type(error).__name__}")
        found.rows.extend(rows)
        found.notes.append("; ".join([f"{folder.name}: {len(rows):,} rows that fit the task", *problems[:3]]))
    return found


def _rows_of(file: Path, dataset: DatasetType, wanted: int) -> list[RawRow]:
    looked_at = islice(rows_in(file), LOOKED_AT * wanted)
    fitting = (row for raw in looked_at if (row := task_row(raw, dataset)) is not None)
    return list(islice(fitting, wanted))


def task_row(raw: RawRow, dataset: DatasetType) -> RawRow | None:
    """A published row in the task's columns; None where it has nothing that the task learns."""
    if isinstance(dataset, DpoDataset):
        row = _preference(raw, dataset)
    else:
        turns = _turns(raw)
        row = _of_turns(turns, dataset) if turns else None
    return row if row is not None and len(json.dumps(row, default=str)) <= MOST_LETTERS else None


def _of_turns(turns: list[_Turn], dataset: DatasetType) -> RawRow | None:
    if isinstance(dataset, GrpoDataset):
        # Rewards that read a column of the task's own rows have nothing to read here.
        prompt = _joined(turns[:-1] if turns[-1].role == ASSISTANT else turns)
        return {dataset.field_prompt or GRPO_PROMPT: prompt} if prompt and not dataset.extra_column else None
    if turns[-1].role != ASSISTANT or len(turns) < 2:
        return None
    if isinstance(dataset, ChatDataset):
        role, content = dataset.chat_role_field or "from", dataset.chat_content_field or "value"
        names = {USER: dataset.chat_user_reference, ASSISTANT: dataset.chat_assistant_reference}
        messages = [{role: names.get(turn.role) or turn.role, content: turn.text} for turn in turns]
        return {dataset.chat_column or "conversations": messages}
    if isinstance(dataset, InstructDataset) and dataset.field_instruction:
        if not dataset.field_output:
            return {dataset.field_instruction: _joined(turns)}
        return {dataset.field_instruction: _joined(turns[:-1]), dataset.field_output: turns[-1].text}
    return None


def _preference(raw: RawRow, dataset: DpoDataset) -> RawRow | None:
    """A prompt may be only in the conversations that the answers end."""
    chosen, rejected = _last_text(raw.get(CHOSEN)), _last_text(raw.get(REJECTED))
    prompt = _joined(_messages(raw.get(PROMPT)) or [])
    prompt = prompt or _first_text(raw, PROMPTS) or _joined((_messages(raw.get(CHOSEN)) or [])[:-1])
    if not (prompt and chosen and rejected):
        return None
    names = (dataset.field_prompt, dataset.field_chosen, dataset.field_rejected)
    columns = (name or usual for name, usual in zip(names, (PROMPT, CHOSEN, REJECTED), strict=True))
    return dict(zip(columns, (prompt, chosen, rejected), strict=True))


def _turns(raw: RawRow) -> list[_Turn] | None:
    for column in MESSAGES:
        if turns := _messages(raw.get(column)):
            return turns
    prompt = _messages(raw.get(PROMPT))
    if prompt is None:
        asked = "\n".join(filter(None, (_first_text(raw, PROMPTS), _first_text(raw, INPUTS))))
        if not asked:
            return None
        system = _first_text(raw, SYSTEMS)
        prompt = [*([_Turn(SYSTEM, system)] if system else []), _Turn(USER, asked)]
    answer = next((text for name in ANSWERS if (text := _last_text(raw.get(name)))), "")
    return [*prompt, _Turn(ASSISTANT, answer)] if answer else prompt


def _messages(value: Any) -> list[_Turn] | None:
    """A conversation of texts; None for anything else, such as calls of tools or pictures."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value:
        return None
    turns = []
    for message in value:
        if not isinstance(message, dict):
            return None
        role = ROLES.get(str(message.get("role", message.get("from"))).lower())
        text = next((message[name] for name in ("content", "value", "text") if name in message), None)
        if role is None or not isinstance(text, str):
            return None
        turns.append(_Turn(role, text))
    return turns


def _last_text(value: Any) -> str:
    turns = _messages(value)
    if turns is not None:
        return turns[-1].text if turns[-1].role == ASSISTANT else ""
    return value if isinstance(value, str) else ""


def _first_text(raw: RawRow, columns: Sequence[str]) -> str:
    return next((raw[name] for name in columns if isinstance(raw.get(name), str) and raw[name]), "")


def _joined(turns: Sequence[_Turn]) -> str:
    return "\n".join(turn.text for turn in turns)
