"""`docs/profiles.md` and the JSON Schema, both from the schema itself.

Run `python -m core.profile.docs docs/profiles.md` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from core.profile.annotation_rules import RULES
from core.profile.load import load_profile, profile_files
from core.profile.schema import EngineConfigs, Profile, Section, When
from core.profile.targets import ContainerTargets, GpuStep, Lane, Limits, LrStageTarget, Scale, Targets
from core.profile.words import Range
from core.units import parse_seconds

_INTRO = """\
# Tuning profiles

A profile says how trainings are to be run: *targets* (what you want) and *limits* (what is never exceeded).
The planner keeps to the targets as far as limits, memory and clock allow, and reports every step back with
the number that forced it. This page is generated from the schema; `god-miner profile schema` prints the same
as JSON Schema for your editor.

```yaml
extends: h100x4            # everything else as there
targets:
  lora_r: 256
limits:
  gpu_memory: 70GB
sections:
  long-chats:              # a name of your choice
    when: {task: chat, size: ">=13B"}
    targets: {sequence_len: 4096}
    scale: {learning_rate: 0.5}
```

Put it into your own profile directory, or give its path. `god-miner profile check FILE` tells every mistake
with its line, `god-miner profile diff h100x4 FILE` what it changes, and `god-miner profile explain FILE` what
today's engines make of each value.

**Units are words**: sizes `75GB` (10⁹) or `75GiB` (2³⁰), durations `90m`, `1.5h`, `1h30m`, model sizes `13B`,
bands of sizes `<7B`, `7B-13B` (the lower end belongs to it), `>=70B`. A bare number is refused where a unit
is needed. `null` takes back what an extended profile has set.

**Order, later wins**: built-in defaults; the general parts of each file, oldest ancestor first; then every
section whose `when` holds, in the order in which they were first written. A section of the same name in a
later file is laid over the earlier one, key by key, in its place. Factors under `scale` multiply at the very
end.

A profile that `extends` its own name means the shipped one: your `h100x4.yaml` may start with
`extends: h100x4`. An edit takes effect without a restart; a bad edit keeps the last good profile and raises
an alert.
"""

_PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Profile),
    ("targets", "What you want.", Targets),
    ("limits", "What is never exceeded.", Limits),
    ("container", "The container around a job. General part only.", ContainerTargets),
    ("sections", "Each has a name and these parts.", Section),
    ("sections: when", "All that is written must hold.", When),
    ("sections: scale", "Factors; those of several matching sections multiply.", Scale),
    ("targets.gpus_by_size", "A list of these.", GpuStep),
    ("targets.lanes", "By a name of your choice.", Lane),
    ("targets.lr_stages", "A list of these.", LrStageTarget),
    ("engine_config", "Raw keys by engine; checked against the engine's schema.", EngineConfigs),
)


def json_schema() -> dict[str, Any]:
    schema = Profile.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        for about in part.get("properties", {}).values():
            # Defaults are in base units (seconds) and whole objects: no text that one could write.
            about.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def markdown() -> str:
    parts = [_INTRO, _shipped(), *(_table(*part) for part in _PARTS), _effects()]
    return "\n".join(parts)


def _shipped() -> str:
    lines = ["## Shipped profiles", "", "| profile | made for | what it is |", "|---|---|---|"]
    for name in profile_files():
        profile = load_profile(name)
        lines.append(f"| `{name}` | {profile.hardware or 'any'} | {profile.description} |")
    return "\n".join([*lines, ""])


def _table(title: str, lead: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    shared = schema.get("$defs", {})
    lines = [
        f"## {title}",
        "",
        *([lead, ""] if lead else []),
        "| key | value | default | meaning |",
        "|---|---|---|---|",
    ]
    for key, about in schema["properties"].items():
        field = next(field for name, field in model.model_fields.items() if key in (name, field.alias))
        meaning = _cell(field.description or "")
        lines.append(f"| `{key}` | {_kind(about, shared)} | {_default(field)} | {meaning} |")
    return "\n".join([*lines, ""])


def _kind(about: dict[str, Any], shared: dict[str, Any]) -> str:
    """A schema in words: `one of a, b`, `number > 0`, `list of …`."""
    if "$ref" in about:
        return _kind(shared[about["$ref"].rpartition("/")[2]], shared)
    if "anyOf" in about and "examples" not in about:
        if _one_or_many(about):
            return f"{_kind(about['anyOf'][1], shared)}; or a list of them"
        kinds = [_kind(option, shared) for option in about["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in about:
        return "one of " + ", ".join(f"`{value}`" for value in about["enum"])
    if examples := about.get("examples"):
        return "like " + ", ".join(f"`{_cell(str(value))}`" for value in examples)
    if about.get("type") == "array":
        return f"list of {_kind(about['items'], shared)}"
    if about.get("type") == "object":
        return "mapping"
    if about.get("type") == "string" and "pattern" in about:
        return f"text like `{_cell(about['pattern'])}`"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "yes or no"}
    return words.get(about.get("type", ""), "any value") + _bounds(about)


def _one_or_many(about: dict[str, Any]) -> bool:
    many = about["anyOf"][0]
    return bool(many.get("type") == "array" and many.get("items") == about["anyOf"][1])


def _bounds(about: dict[str, Any]) -> str:
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    found = [f"{sign} {about[name]}" for name, sign in signs if name in about]
    return " " + ", ".join(found) if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Range):
        return f"`{value.low}`"
    if value is None or isinstance(value, BaseModel) or value in ({}, [], ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_duration(field):
        return f"`{value / 60:g}m`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _is_duration(field: FieldInfo) -> bool:
    return any(isinstance(rule, BeforeValidator) and rule.func is parse_seconds for rule in field.metadata)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _effects() -> str:
    lines = [
        "## What today's engines make of it",
        "",
        "`god-miner profile explain` shows the lines of this table that apply to a profile's own values.",
        "",
        "| key | effect | what happens |",
        "|---|---|---|",
    ]
    lines += [f"| `{rule.path}` | {rule.effect} | {_cell(rule.text)} |" for rule in RULES]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
