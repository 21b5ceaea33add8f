"""Whether the model's own template carries rows: tried before the training on one row of each environment.

Templates differ in what they do with calls. Some leave them out, some refuse two in one turn, some fail on
an empty list of calls, and some have never heard of tools. Where another form of the same answer works it is
taken, and said; where none does, nothing is worth training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.environments.rows import CallForm, RowEncoder, written_call, written_call_llama
from trainer.errors import BadModel
from trainer.inputs.files import RawRow
from trainer.inputs.tokens import Tokenizer


def fitting_encoder(
    tokenizer: Tokenizer, rows: Sequence[RawRow], model_path: str
) -> tuple[RowEncoder, tuple[str, ...]]:
    """The first form in which the template loses nothing, and what is to be said of it. `BadModel` if there
    is none."""
    if not tokenizer.chat_template:
        raise BadModel(f"the tokenizer in {model_path} has no chat template: no request can be written")
    write = written_call_llama if _model_type(model_path).startswith("llama") else written_call
    probed = list(_one_of_each(rows))
    problems: dict[CallForm, str] = {}
    for form in CallForm:
        encoder = RowEncoder(tokenizer, form, write)
        problem = next((problem for row in probed if (problem := problem_of(encoder, row))), None)
        if problem is None:
            return encoder, tuple(_notes(encoder, problems, probed))
        problems[form] = problem
    tried = "; ".join(f"{form}: {problem}" for form, problem in problems.items())
    raise BadModel(f"the model's chat template cannot carry an environment's rows: {tried}"[:2000])


def _one_of_each(rows: Sequence[RawRow]) -> Iterator[RawRow]:
    """Of each environment a row with the most calls in a turn, and one without any."""
    seen: dict[tuple[Any, bool], RawRow] = {}
    for row in rows:
        key = row.get("environment"), _calls(row) > 0
        if key not in seen or _calls(row) > _calls(seen[key]):
            seen[key] = row
    yield from seen.values()


def _calls(row: RawRow) -> int:
    return max((len(message.get("tool_calls") or ()) for message in row["messages"]), default=0)


def problem_of(encoder: RowEncoder, row: RawRow) -> str | None:
    """What the template loses of this row; None: nothing."""
    try:
        turns = encoder.turns(row)
    except Exception as error:  # noqa: BLE001 - a template is a program: it fails with whatever it meets
        return f"{row.get('environment')}: {str(error)[:200] or type(error).__name__}"
    answers = [message for message in row["messages"] if message["role"] == "assistant"]
    for (read, learned), answer in zip(turns, answers, strict=True):
        calls = list(answer.get("tool_calls") or ())
        for wanted in calls[-1:] if encoder.form is CallForm.ONE_CALL else calls:
            missing = next((part for part in _parts(wanted) if part not in learned), None)
            if missing is not None:
                return f"{row.get('environment')}: {missing[:100]} of a call is lost"
        content = str(answer.get("content") or "").strip()
        if content and not calls and content not in learned:
            return f"{row.get('environment')}: the answer's text is lost"
        if not read:
            return f"{row.get('environment')}: nothing is asked"
    texts = [str(message.get("content") or "").strip() for message in row["messages"]]
    whole = "".join(read + learned for read, learned in turns)
    for message, text in zip(row["messages"], texts, strict=True):
        if message["role"] != "assistant" and text not in whole:
            return f"{row.get('environment')}: the text of {message['role']} is lost"
    return None


def _parts(call: Mapping[str, Any]) -> Iterator[str]:
    function = call["function"]
    yield str(function["name"])
    for name, value in function["arguments"].items():
        yield name
        # Inside of JSON, whatever stands around it.
        yield json.dumps(value, ensure_ascii=False).strip('"')


def _notes(encoder: RowEncoder, problems: Mapping[CallForm, str], rows: Sequence[RawRow]) -> Iterator[str]:
    if problems:
        yield f"calls are written in the form {encoder.form.value!r}: " + "; ".join(problems.values())
    for row in rows:
        names = [tool.get("function", tool)["name"] for tool in _listed(row.get("tools"))]
        prompt = "".join(read for read, _ in encoder.turns(row))
        if names and not all(name in prompt for name in names):
            yield "the chat template does not show tools: their names are learned from the answers alone"
            return


def _listed(tools: Any) -> list[dict[str, Any]]:
    return json.loads(tools) if isinstance(tools, str) and tools else list(tools or ())


def _model_type(model_path: str) -> str:
    try:
        return str(json.loads((Path(model_path) / "config.json").read_text("utf-8")).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""
