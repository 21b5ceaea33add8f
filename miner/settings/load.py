"""Reads the settings from the environment and `.env`, and tells all that is wrong with them at once."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from dotenv.parser import parse_stream
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from core.errors import ConfigError, Problem
from miner.redact import HIDDEN
from miner.settings.fields import SECRET_FIELDS, Settings, Source, without_keys

DEFAULT_ENV_FILE = ".env"
_SHOWN_LENGTH = 80
#: How alike two names must be to guess that one was meant for the other.
_ALIKE = 0.84


@dataclass
class _Given:
    """What was found before it is checked."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, source: Source, values: Mapping[str, Any]) -> None:
        self.values |= values
        self.sources |= dict.fromkeys(values, source)


def load_settings(
    env: Mapping[str, str] | None = None,
    env_file: str | os.PathLike[str] | None = DEFAULT_ENV_FILE,
    **overrides: Any,
) -> Settings:
    """The settings, or one `ConfigError` with every problem.

    `env` stands in for the process's environment; `env_file` None reads no file; `overrides` win over all.
    """
    given = _Given()
    if env_file is not None:
        _read_env_file(Path(env_file), given)
    given.add("env", _EnvSource(os.environ if env is None else env)())
    given.add("override", overrides)
    settings = _checked(given)
    if given.problems:
        raise ConfigError("settings", given.problems)
    assert settings is not None
    settings._sources = given.sources
    settings._warnings = tuple(given.warnings)
    return settings


class _EnvSource(EnvSettingsSource):
    """pydantic-settings' own reading of variables, from any mapping."""

    def __init__(self, variables: Mapping[str, str | None]) -> None:
        self._variables = variables
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._variables.items() if value}


def _read_env_file(path: Path, given: _Given) -> None:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if path != Path(DEFAULT_ENV_FILE):
            given.problems.append(Problem(str(path), "", "there is no such file"))
        return
    except (OSError, UnicodeDecodeError) as error:
        given.problems.append(Problem(str(path), "", f"can not be read as UTF-8 text: {error}"))
        return
    _look_for_slips(path, text, given)
    given.add(".env", _EnvSource(_variables(text))())


def _variables(text: str) -> dict[str, str | None]:
    """As python-dotenv reads them: `${NAME}` replaced, but not in secrets, where it may mean itself."""
    found = dotenv_values(stream=io.StringIO(text))
    literal = dotenv_values(stream=io.StringIO(text), interpolate=False)
    return {name: literal[name] if name.lower() in SECRET_FIELDS else value for name, value in found.items()}


def _look_for_slips(path: Path, text: str, given: _Given) -> None:
    """What python-dotenv passes over in silence: lines it can not read, repeats, and near misses."""
    seen: set[str] = set()
    for line in parse_stream(io.StringIO(text)):
        number = line.original.line + len(line.original.string) - len(line.original.string.lstrip("\n"))
        if line.error or (line.key is not None and line.value is None):
            # The line itself is not shown: it may be a secret with a slip in it.
            given.problems.append(Problem(f"{path} line {number}", "", "is not of the form NAME=value"))
            continue
        if line.key is None:
            continue
        name = line.key.lower()
        if name in seen and name in Settings.model_fields:
            given.warnings.append(f"{line.key} is set twice in {path}; the last one, line {number}, counts")
        seen.add(name)
        if name not in Settings.model_fields and (meant := _nearest(name)):
            given.warnings.append(f"{line.key} is not a setting; did you mean {meant.upper()}?")


def _nearest(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name.lower(), Settings.model_fields, 1, _ALIKE)), None)


def _checked(given: _Given) -> Settings | None:
    """Checks each value, then, leaving wrong ones out, the rules that bind the others."""
    wrong: set[str] = set()
    for _attempt in ("the values", "the rules"):
        try:
            return Settings(**{name: value for name, value in given.values.items() if name not in wrong})
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                given.problems.extend(_problems(detail, given, wrong))
            wrong |= {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
    return None


def _problems(detail: ErrorDetails, given: _Given, wrong: set[str]) -> Iterator[Problem]:
    if detail["type"] == "broken_rules":
        for rule in detail["ctx"]["broken"]:
            if not wrong.intersection(rule.fields):
                yield Problem(_variable(rule.fields[0], given), _shown(rule.fields[0], given), rule.text)
    elif detail["loc"] and str(detail["loc"][0]) in given.values:
        name = str(detail["loc"][0])
        yield Problem(_variable(name, given), _shown(name, given, detail), _rule(name, detail))


def _variable(name: str, given: _Given) -> str:
    return f"{name.upper()} (in .env)" if given.sources.get(name) == ".env" else name.upper()


def _shown(name: str, given: _Given, detail: ErrorDetails | None = None) -> str:
    """The offending value; of a list, the offending element."""
    if name not in given.values:
        return ""
    value = given.values[name]
    if name in SECRET_FIELDS:
        return HIDDEN
    if detail is not None and len(detail["loc"]) > 1:
        value = detail["input"]
    text = repr(without_keys(value) if name == "subtensor_address" else value)
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…"


def _rule(name: str, detail: ErrorDetails) -> str:
    known = Settings.model_fields.get(name)
    if known is None:
        meant = _nearest(name)
        return f"is not a setting; did you mean {meant.upper()}?" if meant else "is not a setting"
    text = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{text}. It means: {known.description}"
