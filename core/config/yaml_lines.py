"""Parse YAML to plain data, with the line of every key.

Not `yaml.safe_load`: it forgets lines, silently lets a duplicate key win, reads `8e-4` as text and `1:30`
as ninety, and expands aliases without bound. So: the safe parser's nodes, a few scalar rules, no aliases.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from core.domain.errors import ConfigError, Problem
from core.domain.records import Record

KeyPath = tuple[str | int, ...]

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16

#: libyaml's reader where PyYAML was built with it: ten times faster, same nodes and marks.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INT = re.compile(r"[-+]?\d{1,18}")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d{1,3})?")
_SCALAR_WORDS: dict[str, Any] = {
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


class ValueOrigin(Record):
    """The origin of a value."""

    file: str
    #: None for a built-in default.
    line: int | None = None
    #: The section of a profile; None where it is general.
    section: str | None = None

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where} ({self.section})" if self.section else where


class LocatedYaml:
    """Data, and by path the line (from 1) of each key and item."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.data: Any = None
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []

    def line(self, path: KeyPath) -> int | None:
        """The line of the path, or of its nearest parent that is present."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None

    def location(self, path: KeyPath) -> str:
        """`h100x4.yaml:12: targets.lora_r`, which editors can jump to."""
        line = self.line(path)
        place = self.source if line is None else f"{self.source}:{line}"
        return f"{place}: {dotted_path(path)}" if path else place

    def origin(self, path: KeyPath, section: str | None = None) -> ValueOrigin:
        return ValueOrigin(file=self.source, line=self.line(path), section=section)

    def add_problem(self, path: KeyPath, line: int, value: str, rule: str) -> None:
        self.problems.append(Problem(f"{self.source}:{line}: {dotted_path(path)}".rstrip(": "), value, rule))


def dotted_path(path: KeyPath) -> str:
    return ".".join(map(str, path))


def parse_yaml(text: str, source: str) -> LocatedYaml:
    """Parse plain, bounded YAML. `ConfigError`, with file and line, for anything else."""
    if len(text) > MAX_BYTES:
        raise ConfigError(
            source, [Problem(source, f"{len(text)} characters", f"at most {MAX_BYTES} are read")]
        )
    located = LocatedYaml(source)
    try:
        _refuse_unsafe(text)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        hint = _hint(text, error.problem or "", None if mark is None else mark.line)
        rule = f"not YAML: {error.problem}{hint}"
        raise ConfigError(source, [Problem(f"{source}{line}", "", rule)]) from None
    except _UnsafeYaml as error:
        raise ConfigError(source, [Problem(f"{source}:{error.line}", "", str(error))]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(source, [Problem(source, "", f"not YAML: {error}")]) from None
    located.data = None if node is None else _plain(node, (), located)
    if located.problems:
        raise ConfigError(source, located.problems)
    return located


#: What libyaml and PyYAML report, and the most frequent mistake behind it.
_COMMON_MISTAKES = (
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
    """`; the line is indented with a tab: …`, for frequent mistakes."""
    lines = text.splitlines()
    shown = lines[line] if line is not None and line < len(lines) else ""
    if re.match(r" *\t", shown):
        return "; the line is indented with a tab: YAML takes blanks only"
    return next((f"; {what}" for pattern, what in _COMMON_MISTAKES if re.search(pattern, problem)), "")


class _UnsafeYaml(yaml.YAMLError):
    def __init__(self, problem: str, event: yaml.Event) -> None:
        super().__init__(problem)
        self.line = event.start_mark.line + 1 if event.start_mark else 1


def _refuse_unsafe(text: str) -> None:
    """Aliases expand without bound and deep nesting exhausts the stack; the event stream shows both."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _UnsafeYaml("anchors and aliases (& and *) are not supported; use extends", event)
        if depth > MAX_DEPTH:
            raise _UnsafeYaml(f"nested deeper than {MAX_DEPTH} levels", event)


def _plain(node: yaml.Node, path: KeyPath, located: LocatedYaml) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, located)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            located.lines[(*path, index)] = item.start_mark.line + 1
            items.append(_plain(item, (*path, index), located))
        return items
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: KeyPath, located: LocatedYaml) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
            located.add_problem(path, line, "", "a key is a word, not a list or a mapping")
            continue
        key = str(key_node.value)
        inner = (*path, key)
        if key in values:
            rule = f"written twice, first in line {located.lines[inner]}; keep one"
            located.add_problem(inner, line, "", rule)
            continue
        located.lines[inner] = line
        values[key] = _plain(value_node, inner, located)
    return values


def _scalar(node: yaml.Node) -> Any:
    text = str(node.value)
    if getattr(node, "style", None) in ("'", '"', "|", ">"):
        return text
    if text.lower() in _SCALAR_WORDS:
        return _SCALAR_WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
