"""A trial of the model's own template, before the training, on rows of each environment.

Templates differ in what they do with calls. Some leave them out, some refuse two in one turn, some fail on
an empty list of calls, and some show no tools. What is learned is read as the evaluator's server reads it,
and has to be the calls that were meant. Where another form of the same answer works it is taken, and said;
where none does, nothing is worth training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.models.tool_parsers import parser_for
from trainer.environments.rows import CallForm, RowEncoder, turn_end
from trainer.environments.tool_calls import find_calls
from trainer.errors import BadModel
from trainer.inputs.files import RawRow
from trainer.inputs.tokens import Tokenizer


class FittingEncoder(NamedTuple):
    encoder: RowEncoder
    #: What is to be said of it.
    notes: tuple[str, ...]
    #: Environments whose rows the template does not carry.
    left_out: frozenset[str]


def fitting_encoder(tokenizer: Tokenizer, rows: Sequence[RawRow], model_path: str) -> FittingEncoder:
    """The first form in which the template loses nothing, or the least environments. `BadModel` if it carries
    none."""
    if not tokenizer.chat_template:
        raise BadModel(f"the tokenizer in {model_path} has no chat template: no request can be written")
    # Its name is made up in tournaments, and says nothing.
    parser = parser_for("", _model_type(model_path))
    probed = list(_one_of_each(rows))
    flat, end = not _takes_tools(RowEncoder(tokenizer), probed), turn_end(tokenizer)
    names = {str(row.get("environment")) for row in probed}
    lost: dict[CallForm, dict[str, str]] = {}
    for form in CallForm:
        lost[form] = dict(_losses(RowEncoder(tokenizer, form, parser, flat, end), probed))
        if not lost[form]:
            break
    form = min(lost, key=lambda tried: len(lost[tried]))
    if lost[form].keys() == names:
        tried = "; ".join(f"{form}: {next(iter(found.values()))}" for form, found in lost.items())
        raise BadModel(f"the model's chat template cannot carry an environment's rows: {tried}"[:2000])
    encoder, left_out = RowEncoder(tokenizer, form, parser, flat, end), frozenset(lost[form])
    carried = [row for row in probed if str(row.get("environment")) not in left_out]
    before = [next(iter(lost[tried].values())) for tried in lost if tried is not form]
    without = [f"left out, for the template does not carry it: {why}"[:500] for why in lost[form].values()]
    return FittingEncoder(encoder, (*_notes(encoder, before, carried), *without), left_out)


def _losses(encoder: RowEncoder, rows: Sequence[RawRow]) -> Iterator[tuple[str, str]]:
    """By environment."""
    for row in rows:
        if (problem := problem_of(encoder, row)) is not None:
            yield str(row.get("environment")), problem


def _takes_tools(encoder: RowEncoder, rows: Sequence[RawRow]) -> bool:
    for row in rows:
        asked = [message for message in row["messages"] if message["role"] != "assistant"]
        try:
            encoder.render(asked, encoder.tools(row), asks=True)
        except Exception:  # noqa: BLE001 - a template is a program: it fails with whatever it meets
            return False
    return True


def _one_of_each(rows: Sequence[RawRow]) -> Iterator[RawRow]:
    """Return a row of each environment with the most calls in a turn, and one without any."""
    seen: dict[tuple[Any, bool], RawRow] = {}
    for row in rows:
        key = row.get("environment"), _calls(row) > 0
        if key not in seen or _calls(row) > _calls(seen[key]):
            seen[key] = row
    yield from seen.values()


def _calls(row: RawRow) -> int:
    return max((len(message.get("tool_calls") or ()) for message in row["messages"]), default=0)


def problem_of(encoder: RowEncoder, row: RawRow) -> str | None:
    """Return what the template loses of this row, or None."""
    name = row.get("environment")
    try:
        turns = encoder.turns(row)
    except Exception as error:  # noqa: BLE001 - a template is a program: it fails with whatever it meets
        return f"{name}: {str(error)[:200] or type(error).__name__}"
    whole = "".join(text for turn in turns for text in turn)
    for message in row["messages"]:
        text = str(message.get("content") or "").strip()
        if text not in whole:
            return f"{name}: a text of {message['role']} is lost"
    answers = [message for message in row["messages"] if message["role"] == "assistant"]
    for (_, learned), answer in zip(turns, answers, strict=True):
        wanted = [call["function"] for call in encoder.calls(answer)]
        if (lost := _lost(encoder, learned, wanted)) is not None:
            return f"{name}: {lost}"
    return None


def _lost(encoder: RowEncoder, learned: str, wanted: Sequence[Mapping[str, Any]]) -> str | None:
    if encoder.parser is None:
        missing = [call["name"] for call in wanted if call["name"] not in learned]
        return f"the call of {missing[0]} is lost" if missing else None
    text = encoder.said(learned)
    names = {call["name"] for call in wanted}
    _, calls = find_calls(text, encoder.parser, names)
    found = [(call.name, dict(call.arguments)) for call in calls]
    if found == [(call["name"], dict(call["arguments"])) for call in wanted]:
        return None
    return f"{len(wanted)} calls are written, {len(found)} are read by {encoder.parser}: {text[:200]!r}"


def _notes(encoder: RowEncoder, problems: Sequence[str], rows: Sequence[RawRow]) -> Iterator[str]:
    if encoder.parser is None:
        yield "the evaluator has no parser of calls for such a model: what is trained may count as forfeits"
    if encoder.form is not CallForm.NATIVE:
        yield f"calls are written in the form {encoder.form.value!r}: {'; '.join(problems)}"[:1000]
    for row in rows:
        names = [tool.get("function", tool)["name"] for tool in encoder.tools(row) or ()]
        prompt = "".join(read for read, _ in encoder.turns(row))
        if not all(name in prompt for name in names):
            yield "the chat template does not show tools: their names are learned from the answers alone"
            return


def _model_type(model_path: str) -> str:
    try:
        return str(json.loads((Path(model_path) / "config.json").read_text("utf-8")).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""
