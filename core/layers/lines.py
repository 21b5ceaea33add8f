"""YAML as plain data, with the line of every key.

Not `yaml.safe_load`: it forgets lines, lets a later duplicate of a key win in silence, reads `8e-4` as text
and `1:30` as ninety, and unfolds aliases without bound. So: the safe parser's nodes, a few scalar rules, no
aliases.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from core.errors import ConfigError, Problem

Path = tuple[str | int, ...]

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16

#: libyaml's reader where PyYAML was built with it: ten times faster, same nodes and marks.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INT = re.compile(r"[-+]?\d{1,18}")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d{1,3})?")
_WORDS: dict[str, Any] = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}


class Located:
    """Data and the line (from 1) of each key and item by path."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.data: Any = None
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []

    def line(self, path: Path) -> int | None:
        """Of the path, or of the nearest thing around it that is really there."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None

    def where(self, path: Path) -> str:
        """`h100x4.yaml:12: targets.lora_r`, as editors jump to it."""
        line = self.line(path)
        place = self.source if line is None else f"{self.source}:{line}"
        return f"{place}: {dotted(path)}" if path else place

    def complain(self, path: Path, line: int, value: str, rule: str) -> None:
        self.problems.append(Problem(f"{self.source}:{line}: {dotted(path)}".rstrip(": "), value, rule))


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def parse(text: str, source: str) -> Located:
    """`ConfigError` for anything that is not plain, bounded YAML; names file and line."""
    if len(text) > MAX_BYTES:
        raise ConfigError(
            source, [Problem(source, f"{len(text)} characters", f"at most {MAX_BYTES} are read")]
        )
    found = Located(source)
    try:
        _refuse_tricks(text)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        hint = _hint(text, error.problem or "", None if mark is None else mark.line)
        rule = f"not YAML: {error.problem}{hint}"
        raise ConfigError(source, [Problem(f"{source}{line}", "", rule)]) from None
    except _Trick as error:
        raise ConfigError(source, [Problem(f"{source}:{error.line}", "", str(error))]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(source, [Problem(source, "", f"not YAML: {error}")]) from None
    found.data = None if node is None else _plain(node, (), found)
    if found.problems:
        raise ConfigError(source, found.problems)
    return found


#: What libyaml and PyYAML say, and what a person most often did.
_SLIPS = (
    (
        r"mapping values are not allowed",
        "a line is indented further than the one above it, or a value has ': '",
    ),
    (
        r"expected <block end>|did not find expected key|expected '-'|block mapping",
        "a line is not indented like the others of its part: they begin in the same column",
    ),
    (r"could not find expected ':'", "a key is followed by a colon and a blank"),
    (r"flow (mapping|sequence)|expected ',' or", "a bracket or brace is not closed"),
    (r"cannot start any token", "put a value that begins with @, ` or % in quotes"),
)


def _hint(text: str, problem: str, line: int | None) -> str:
    """`; a tab is …`, for the mistakes that everybody makes."""
    lines = text.splitlines()
    shown = lines[line] if line is not None and line < len(lines) else ""
    if re.match(r" *\t", shown):
        return "; the line is indented with a tab: YAML takes blanks only"
    return next((f"; {what}" for pattern, what in _SLIPS if re.search(pattern, problem)), "")


class _Trick(yaml.YAMLError):
    def __init__(self, problem: str, event: yaml.Event) -> None:
        super().__init__(problem)
        self.line = event.start_mark.line + 1 if event.start_mark else 1


def _refuse_tricks(text: str) -> None:
    """Aliases unfold without bound and deep nesting exhausts the stack; both are seen in the event stream."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _Trick("anchors and aliases (& and *) are not read here; use extends", event)
        if depth > MAX_DEPTH:
            raise _Trick(f"nested deeper than {MAX_DEPTH} levels", event)


def _plain(node: yaml.Node, path: Path, found: Located) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, found)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            found.lines[(*path, index)] = item.start_mark.line + 1
            items.append(_plain(item, (*path, index), found))
        return items
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: Path, found: Located) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
            found.complain(path, line, "", "a key is a word, not a list or a mapping")
            continue
        key = str(key_node.value)
        inner = (*path, key)
        if key in values:
            found.complain(inner, line, "", f"written twice, first in line {found.lines[inner]}; keep one")
            continue
        found.lines[inner] = line
        values[key] = _plain(value_node, inner, found)
    return values


def _scalar(node: yaml.Node) -> Any:
    text = str(node.value)
    if getattr(node, "style", None) in ("'", '"', "|", ">"):
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
