"""Rows for the software-engineering environment, out of a requested dataset of agents' conversations.

The agent there speaks plain text: a thought and one command in a fenced block a turn, no tool calls. Kept are
conversations that were submitted and edited something; observations are cut in the middle, as the model's
context is short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.errors import BadData
from trainer.inputs.chat import ASSISTANT, SYSTEM, USER
from trainer.inputs.files import RawRow, files_in, rows_in, text_of

#: What published conversations call a speaker.
ROLES = {
    **dict.fromkeys(("user", "human"), USER),
    **dict.fromkeys(("assistant", "gpt", "model", "bot"), ASSISTANT),
    "system": SYSTEM,
}
#: The folder that the validator lends: `/` of the dataset's name is `--` there.
DATASET = "gradients-io-tournaments--SWE-ZERO-12M-trajectories-filtered"
#: Tokens of a training sequence; letters of a conversation that fit, and of an observation in it.
SEQUENCE_LENGTH = 8_192
MOST_LETTERS, MOST_OBSERVATION = 28_000, 3_000
_CUT = "\n[... {} characters left out ...]\n"
_STATUS = ("exit_status", "status", "exit_reason")
_MESSAGES = ("messages", "trajectory", "conversations")
_COMMAND = re.compile(r"```(?:bash|sh)?\s*\n(.*?)```", re.DOTALL)
#: Commands that change files: in place, by redirection, by patch or move, or through an interpreter.
_EDIT = re.compile(
    r"\bsed\s+(?:-\w+\s+)*-\w*i|\btee\s|\bpatch\s|\bgit\s+(?:apply|mv|rm)\b|\b(?:cp|mv|rm|mkdir|touch)\s"
    r"|(?<![-=0-9&>])>>?\s*[\"']?(?!/dev/|/tmp/)[\w$~-]*[./][\w./-]+|\.write(?:_text|lines)?\("
)
_DIFF = re.compile(r"\bgit diff[^\n;&|]*")


def swe_rows(folders: Sequence[str], most: int) -> list[dict[str, Any]]:
    """Conversations from those of the folders that are the dataset; none where it was not requested."""
    rows: list[dict[str, Any]] = []
    for folder in map(Path, folders):
        if folder.name == DATASET:
            rows.extend(islice(_kept(folder), most - len(rows)))
    return rows


def _kept(folder: Path) -> Iterator[dict[str, Any]]:
    """A file that cannot be read ends with what it gave so far."""
    seen = set[str]()
    try:
        files = files_in(folder)
    except (BadData, OSError):
        return
    for file in files:
        try:
            for raw in rows_in(file):
                row = swe_row(raw)
                if row is not None and (key := json.dumps(row)) not in seen:
                    seen.add(key)
                    yield row
        except BadData:
            continue


def swe_row(raw: RawRow) -> dict[str, Any] | None:
    """A published conversation as a row; None for one that teaches nothing or does not fit."""
    status = next((text_of(raw[name]) for name in _STATUS if raw.get(name)), "")
    if status.strip().lower() != "submitted":
        return None
    turns = _turns(raw)
    if turns is None or turns[-1]["role"] != ASSISTANT:
        return None
    # The first question is the task itself; what follows are observations.
    observations = [turn for turn in turns if turn["role"] == USER][1:]
    for turn in observations:
        turn["content"] = _shortened(turn["content"])
    answers = [turn["content"] for turn in turns if turn["role"] == ASSISTANT]
    if not any(map(edits, answers)) or sum(len(turn["content"]) for turn in turns) > MOST_LETTERS:
        return None
    return {"messages": turns}


def edits(answer: str) -> bool:
    """Return True if the answer's command changes a file; a patch written for submission does not count."""
    return any(_EDIT.search(_DIFF.sub("", command)) for command in _COMMAND.findall(answer))


def _shortened(text: str) -> str:
    if len(text) <= MOST_OBSERVATION:
        return text
    half = (MOST_OBSERVATION - len(_CUT) - 8) // 2
    return text[:half] + _CUT.format(f"{len(text) - 2 * half:,}") + text[-half:]


def _turns(raw: RawRow) -> list[dict[str, str]] | None:
    """Its messages up to the last answer; None where user and assistant do not take turns."""
    value = next((raw[name] for name in _MESSAGES if raw.get(name)), None)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list):
        return None
    turns = []
    for message in value:
        if not isinstance(message, dict):
            return None
        role = ROLES.get(str(message.get("role", message.get("from"))).lower())
        content = message.get("content", message.get("value"))
        if role is None or not isinstance(content, str) or message.get("tool_calls"):
            return None
        turns.append({"role": role, "content": text_of(content)})
    while turns and turns[-1]["role"] != ASSISTANT:
        turns.pop()
    roles = [turn["role"] for turn in turns]
    first = 1 if roles[:1] == [SYSTEM] else 0
    by_turns = all(role == (USER, ASSISTANT)[place % 2] for place, role in enumerate(roles[first:]))
    return turns if by_turns and len(roles) - first >= 2 else None
