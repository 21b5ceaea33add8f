"""Write `.env.example` and `docs/settings.md` from the declarations of the settings."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from miner.settings.fields import Section
from miner.settings.model import SECRET_FIELDS, Settings

_WIDTH = 100


@dataclass(frozen=True)
class SettingDoc:
    """One setting as the documents show it."""

    name: str
    section: str
    kind: str
    default: str
    meaning: str

    @property
    def variable(self) -> str:
        return self.name.upper()


def setting_docs() -> list[SettingDoc]:
    """Return every setting, in the order of declaration."""
    schema = Settings.model_json_schema()
    return [
        _setting_doc(section, name, schema)
        for section in Settings.sections()
        for name in section.model_fields
    ]


def env_example() -> str:
    """Return `.env.example`: every setting with its meaning and default, all of it commented out."""
    head = """\
        # Settings of god-miner. Copy to .env (chmod 600), and take the # away from what you change.
        # The environment wins over this file. An empty value counts as not set.
        # Lists are separated by commas or blanks. ${NAME} is replaced, except in secrets.
        # Written by `god-miner config env`; checked with `god-miner config show` and `god-miner doctor`.
        """
    parts = [textwrap.dedent(head)]
    for title, entries in _sections():
        parts.append(f"\n# --- {title} ---\n")
        for entry in entries:
            note = f"{entry.meaning} ({entry.kind})"
            text = textwrap.fill(note, _WIDTH, initial_indent="# ", subsequent_indent="# ")
            parts.append(f"\n{text}\n#{entry.variable}={_example(entry)}\n")
    return "".join(parts)


def settings_page() -> str:
    """Return `docs/settings.md`."""
    head = """\
        # Settings

        <!-- Written by `make docs`; edit miner/settings/fields.py instead. -->

        Set an environment variable, or write `NAME=value` into `.env` in the directory where you start the
        daemon. The environment wins over `.env`. An empty value counts as not set. Separate list entries
        with commas or spaces. Seconds are above 0, at most a week. In `.env`, `${NAME}` is replaced by that
        variable's value, except in secrets.

        A wrong value stops the start with exit code 78; all wrong values are reported at once.
        `god-miner config show` prints every value and its source, with secrets hidden; `god-miner doctor`
        tests them.
        """
    parts = [textwrap.dedent(head)]
    for title, entries in _sections():
        parts.append(f"\n## {title}\n\n| Variable | Value | Default | Meaning |\n|---|---|---|---|\n")
        for entry in entries:
            default = f"`{entry.default}`" if entry.default else "–"
            cells = (f"`{entry.variable}`", entry.kind, default, entry.meaning)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def env_text(value: Any) -> str:
    """Return a value as it would be written in `.env`."""
    if isinstance(value, tuple):
        return ",".join(map(env_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, StrEnum):
        return value.value
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sections() -> Iterator[tuple[str, list[SettingDoc]]]:
    for title, entries in groupby(setting_docs(), key=attrgetter("section")):
        yield title, list(entries)


def _setting_doc(section: type[Section], name: str, schema: dict[str, Any]) -> SettingDoc:
    kind, meaning = _kind(name, schema["properties"][name], schema), section.model_fields[name].description
    return SettingDoc(name, section.title, kind, _default(name), meaning or "")


def _default(name: str) -> str:
    field = Settings.model_fields[name]
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "shown_default" in extra:
        return str(extra["shown_default"])
    if field.default is PydanticUndefined or field.default is None:
        return ""
    return env_text(field.default)


def _example(entry: SettingDoc) -> str:
    """The default as a value for the file; empty if it names another setting."""
    named = re.findall(r"[A-Z][A-Z_]+", entry.default)
    return "" if any(name.lower() in Settings.model_fields for name in named) else entry.default


def _kind(name: str, prop: dict[str, Any], schema: dict[str, Any]) -> str:
    if name in SECRET_FIELDS:
        return "secret"
    kinds = [part for part in prop.get("anyOf", [prop]) if part.get("type") != "null"]
    part = kinds[0]
    if "$ref" in part:
        part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    if "enum" in part:
        return " or ".join(", ".join(part["enum"]).rsplit(", ", 1))
    if part.get("type") in ("integer", "number"):
        return _number(part)
    if part.get("format") == "path":
        return "path"
    return {"boolean": "true/false", "array": "list"}.get(part.get("type", ""), "text")


def _number(part: dict[str, Any]) -> str:
    low, above, high = (
        f"{part[name]:,}".removesuffix(".0") if name in part else ""
        for name in ("minimum", "exclusiveMinimum", "maximum")
    )
    if (above, high) == ("0", "604,800"):
        return "seconds"
    if low and high:
        return f"{part['type']} {low}–{high}"
    bounds = ", ".join(sign + bound for sign, bound in (("≥", low), (">", above), ("≤", high)) if bound)
    return f"{part['type']} {bounds}".rstrip()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_page(), encoding="utf-8")
