"""Reference tables and JSON Schema, generated from a pydantic model's own declarations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from core.domain.units import parse_seconds

_UNITS = (("d", 86_400), ("h", 3600), ("m", 60))


def editor_schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON Schema for editors."""
    schema = model.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        for about in part.get("properties", {}).values():
            # Defaults are in base units (seconds) and whole objects, which a file cannot contain.
            about.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


class KeyHelp(NamedTuple):
    """One key that a file may have."""

    #: Dotted; `*` stands for a name of the writer's choice.
    path: str
    #: What it takes, in words.
    value: str
    #: Empty: none.
    default: str
    description: str


def key_help(model: type[BaseModel], above: str = "") -> Iterator[KeyHelp]:
    """Every key of a kind of file, parts before what is in them."""
    schema = model.model_json_schema()
    shared = schema.get("$defs", {})
    for key, about in schema["properties"].items():
        field = next(field for name, field in model.model_fields.items() if key in (name, field.alias))
        path = f"{above}{key}"
        default = _default(field).strip("`")
        value = _value_text(about, shared).replace("`", "")
        yield KeyHelp(path, value, "" if default == "–" else default, field.description or "")
        inner, is_named = _mapping_in(field.annotation)
        if inner is not None:
            yield from key_help(inner, f"{path}.*." if is_named else f"{path}.")


def _mapping_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The part of the schema that a field holds, and whether by names of the writer's choice. None for a
    value, also for one that is written as a word."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation if annotation.__str__ is BaseModel.__str__ else None, False
    if get_origin(annotation) is dict:
        return _mapping_in(get_args(annotation)[1])[0], True
    return None, False


def reference_table(title: str, lead: str, model: type[BaseModel]) -> str:
    """One part of the schema as a section of a page."""
    schema = model.model_json_schema()
    shared = schema.get("$defs", {})
    rows = []
    for key, about in schema["properties"].items():
        field = next(field for name, field in model.model_fields.items() if key in (name, field.alias))
        rows.append((f"`{key}`", _value_text(about, shared), _default(field), cell(field.description or "")))
    return section(title, lead, ("key", "value", "default", "meaning"), rows)


def section(title: str, lead: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A heading, a sentence and a Markdown table."""
    lines = [
        f"## {title}",
        "",
        *([lead, ""] if lead else []),
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join([*lines, ""])


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def _value_text(about: dict[str, Any], shared: dict[str, Any]) -> str:
    """A schema in words: `a, b`, `number >0`, `integer 1–64`, `list of …`."""
    if "$ref" in about:
        return _value_text(shared[about["$ref"].rpartition("/")[2]], shared)
    if "anyOf" in about and "examples" not in about:
        if _one_or_many(about):
            return f"{_value_text(about['anyOf'][1], shared)} (or a list)"
        kinds = [_value_text(option, shared) for option in about["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in about:
        return ", ".join(f"`{value}`" for value in about["enum"])
    if examples := about.get("examples"):
        return "like " + ", ".join(f"`{cell(str(value))}`" for value in examples)
    if about.get("type") == "array":
        return f"list of {_value_text(about['items'], shared)}"
    if about.get("type") == "object":
        return "mapping"
    if about.get("type") == "string" and "pattern" in about:
        return f"text like `{cell(about['pattern'])}`"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "yes/no"}
    return words.get(about.get("type", ""), "any value") + _bounds(about)


def _one_or_many(about: dict[str, Any]) -> bool:
    many = about["anyOf"][0]
    return bool(many.get("type") == "array" and many.get("items") == about["anyOf"][1])


def _bounds(about: dict[str, Any]) -> str:
    if "minimum" in about and "maximum" in about:
        return f" {about['minimum']}–{about['maximum']}"
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    found = [f"{sign}{about[name]}" for name, sign in signs if name in about]
    return " " + ", ".join(found) if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):  # a value written as one word, or a part with its own table
        return "–" if type(value).__str__ is BaseModel.__str__ else f"`{value}`"
    if value is None or value in ({}, [], ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_duration(field):
        unit, seconds = next((u for u in _UNITS if value and value % u[1] == 0), _UNITS[-1])
        return f"`{value / seconds:g}{unit}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _is_duration(field: FieldInfo) -> bool:
    return any(isinstance(rule, BeforeValidator) and rule.func is parse_seconds for rule in field.metadata)
