"""Check a text that somebody is writing, in the child process: what is wrong in which line, what differs from
the saved file, and which values were edited."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.config.yaml_lines import KeyPath, LocatedYaml, dotted_path, parse_yaml
from core.domain.errors import ConfigError, Problem
from core.profile.explain import ProfileFinding, ProfileFindingLevel, check_profile
from core.profile.resolve import PROFILE_KIND, LoadedProfile
from core.recipes.dry_run import check_profile_plan
from miner.alerts.rules import LoadedAlertRules, alert_rules_of_text
from miner.api.config_files import EditedValue, FileKind, TextCheck, TextProblem
from miner.config_files import effects
from miner.config_files.files import LoadedFile
from miner.config_files.what_if import CheckOrder
from miner.offers.backtest.policy_check import policy_findings
from miner.offers.policies.load import POLICY_KIND, LoadedPolicy

MAX_EDITS = 100
_ERROR = ProfileFindingLevel.ERROR


def check_text(order: CheckOrder) -> TextCheck:
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
    is_valid = not any(problem.level == "error" for problem in problems)
    changes: effects.Effects | None = None
    if order.effects and is_valid and loaded is not None:
        changes = effects.changes_of(order, loaded, directories)
    return TextCheck(
        valid=is_valid,
        problems=problems,
        diff=_diff(order),
        edited=edited_values(order.saved or "", order.text),
        effects=changes,
    )


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
        shown = text if key == where else f"{where}: {text}"
        return TextProblem(level=level, line=None, column=None, key=key, text=shown)
    column = shown.find(word) if word else len(shown) - len(shown.lstrip())
    return TextProblem(level=level, line=line, column=column + 1, key=key, text=text)


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


def edited_values(before: str, after: str) -> list[EditedValue]:
    """Return what differs between two texts of a file, without what they extend. Values of environment
    variables may be secrets, and are left out."""
    try:
        there, here = (dict(_written(parse_yaml(text, ""))) for text in (before, after))
    except ConfigError:
        return []
    found = [
        EditedValue(path=dotted_path(path), before=there.get(path), after=here.get(path))
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
    before, after = (value if value is None else "(set)" for value in (one.before, one.after))
    return EditedValue(path=one.path, before=before, after=after)
