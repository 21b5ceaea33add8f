"""Check a text that somebody is writing, in the child process: what is wrong in which line, what differs from
the saved file, and which values were edited."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from core.config.yaml_lines import KeyPath, LocatedYaml, dotted_path, parse_yaml
from core.domain.errors import ConfigError, Problem
from core.profile.explain import ProfileFinding, ProfileFindingLevel, check_profile
from core.profile.resolve import PROFILE_KIND, LoadedProfile
from core.recipes.dry_run import check_profile_plan
from miner.alerts.rules import LoadedAlertRules, alert_rules_of_text
from miner.config_files import effects
from miner.config_files.files import FileKind, LoadedFile
from miner.config_files.what_if import CheckOrder
from miner.offers.backtest.policy_check import policy_findings
from miner.offers.policies.load import POLICY_KIND, LoadedPolicy

MAX_EDITS = 100
_ERROR = ProfileFindingLevel.ERROR


class TextProblem(NamedTuple):
    """What is wrong with a text. Lines and columns count from 1; None: it is not in this file."""

    level: ProfileFindingLevel
    line: int | None
    column: int | None
    key: str
    text: str


def check_text(order: CheckOrder) -> dict[str, Any]:
    """Carry out an order."""
    directories = [Path(order.directory)]
    loaded: LoadedFile | None = None
    try:
        loaded = load_text(order, order.text)
        findings = _findings(loaded)
        problems = [_located(one.level, one.where, one.message, order) for one in findings]
    except ConfigError as error:
        problems = [
            _located(ProfileFindingLevel.ERROR, one.where, _words(one), order) for one in error.problems
        ]
    is_valid = not any(one.level is ProfileFindingLevel.ERROR for one in problems)
    changes: dict[str, Any] | None = None
    if order.effects and is_valid and loaded is not None:
        changes = effects.changes_of(order, loaded, directories)
    return {
        "valid": is_valid,
        "problems": [one._asdict() for one in problems],
        "diff": _diff(order),
        "edited": [one._asdict() for one in edited_values(order.saved or "", order.text)],
        "effects": changes,
    }


def load_text(order: CheckOrder, text: str) -> LoadedFile:
    """Load what the file would be with this text. `ConfigError`."""
    if order.kind == FileKind.ALERTS:
        return alert_rules_of_text(text, Path(order.file))
    file, directories = Path(order.file), [Path(order.directory)]
    if order.kind == FileKind.PROFILES:
        return LoadedProfile(order.name, PROFILE_KIND.layers_of_text(text, file, directories))
    layers = POLICY_KIND.layers_of_text(text, file, directories)
    return LoadedPolicy(order.name, layers, order.terms.overrides)


def _findings(loaded: LoadedFile) -> list[ProfileFinding]:
    if isinstance(loaded, LoadedAlertRules):
        return []
    if isinstance(loaded, LoadedProfile):
        return check_profile(loaded, check_profile_plan)
    return policy_findings(loaded)


def _words(problem: Problem) -> str:
    shown = f"{problem.value}: " if problem.value else ""
    return f"{shown}{problem.rule}"


def _located(level: ProfileFindingLevel, where: str, text: str, order: CheckOrder) -> TextProblem:
    """Find the line and the column of `h100x4.yaml:12: targets.lora_r`, or of a key alone."""
    name = re.escape(Path(order.file).name)
    stated = re.match(rf"{name}:(\d+)(?: \([^)]*\))?(?:: (.*))?$", where)
    key = (stated[2] or "") if stated else where.rpartition(": ")[2]
    line = int(stated[1]) if stated else _line_of(key, order.text)
    lines, word = order.text.splitlines(), key.rpartition(".")[2]
    shown = lines[line - 1] if line is not None and line <= len(lines) else ""
    # A file may extend the shipped one of its own name: then the line may be one of that.
    if line is None or word not in shown:
        return TextProblem(level, None, None, key, text if key == where else f"{where}: {text}")
    column = shown.find(word) if word else len(shown) - len(shown.lstrip())
    return TextProblem(level, line, column + 1, key, text)


def _line_of(key: str, text: str) -> int | None:
    try:
        lines = parse_yaml(text, "").lines
    except ConfigError:
        return None
    return next((line for path, line in lines.items() if dotted_path(path) == key), None)


def _diff(order: CheckOrder) -> str:
    name = Path(order.file).name
    before, after = (text.splitlines() for text in (order.saved or "", order.text))
    return "\n".join(difflib.unified_diff(before, after, f"{name} (saved)", f"{name} (edited)", lineterm=""))


class EditedValue(NamedTuple):
    """A value of the file itself; None: not written."""

    path: str
    before: Any
    after: Any


def edited_values(before: str, after: str) -> list[EditedValue]:
    """Return what differs between two texts of a file, without what they extend. Values of environment
    variables may be secrets, and are left out."""
    try:
        there, here = (dict(_written(parse_yaml(text, ""))) for text in (before, after))
    except ConfigError:
        return []
    found = [
        EditedValue(dotted_path(path), there.get(path), here.get(path))
        for path in dict.fromkeys((*there, *here))
        if there.get(path) != here.get(path)
    ]
    return [_without_secrets(one) for one in found[:MAX_EDITS]]


def _written(located: LocatedYaml) -> Iterator[tuple[KeyPath, Any]]:
    waiting: list[tuple[KeyPath, Any]] = [((), located.data)]
    while waiting:
        path, value = waiting.pop(0)
        if isinstance(value, dict) and value:
            waiting += [((*path, key), inner) for key, inner in value.items()]
        elif path:
            yield path, value


def _without_secrets(one: EditedValue) -> EditedValue:
    if "env" not in one.path.split("."):
        return one
    before, after = (value if value is None else "(set)" for value in one[1:])
    return EditedValue(one.path, before, after)
