"""Insert a key into the YAML text that somebody is writing, where it belongs."""

from __future__ import annotations

import re
from collections.abc import Sequence

_KEY = re.compile(r"( *)([^\s:#][^:]*):(.*)")
#: What a name of the writer's choice is called until the writer chooses.
PLACEHOLDER = "my-name"


def insert_key(text: str, path: str) -> tuple[str, int]:
    """Add an empty value at a dotted path, below the parts that are there; return the text and the line,
    counted from 1. A key that is there already stays, and its line is returned."""
    lines, steps = text.rstrip().splitlines(), path.split(".")
    first, last, indent, depth = 0, len(lines), 0, 0
    while depth < len(steps):
        at = _line_of(lines, first, last, indent, steps[depth])
        if at is None:
            break
        depth, first = depth + 1, at + 1
        last = _end_of_part(lines, first, last, indent)
        indent = _indent_below(lines, first, last, indent)
    if depth == len(steps):
        return text, first
    at = max(last, 0)
    while at > first and not lines[at - 1].strip():
        at -= 1
    if depth and (above := _KEY.match(lines[first - 1])) and above[3].strip() == "{}":
        lines[first - 1] = f"{above[1]}{above[2]}:"
    new = _nested(steps[depth:], indent)
    lines[at:at] = new
    return "\n".join(lines) + "\n", at + len(new)


def _nested(steps: Sequence[str], indent: int) -> list[str]:
    """The lines of a key and of the parts above it."""
    names = [PLACEHOLDER if step == "*" else step for step in steps]
    return [
        f"{' ' * (indent + 2 * depth)}{name}:{' ' if depth == len(names) - 1 else ''}"
        for depth, name in enumerate(names)
    ]


def _line_of(lines: Sequence[str], first: int, last: int, indent: int, step: str) -> int | None:
    for at in range(first, last):
        found = _KEY.match(lines[at])
        if found and len(found[1]) == indent and (step == "*" or found[2].strip("\"' ") == step):
            return at
    return None


def _end_of_part(lines: Sequence[str], first: int, last: int, indent: int) -> int:
    """The line after the last one that is indented further."""
    for at in range(first, last):
        line = lines[at]
        if line.strip() and not line.lstrip().startswith("#") and len(line) - len(line.lstrip()) <= indent:
            return at
    return last


def _indent_below(lines: Sequence[str], first: int, last: int, indent: int) -> int:
    found = (_KEY.match(line) for line in lines[first:last])
    return next((len(one[1]) for one in found if one), indent + 2)
