"""Read the settings from the environment and `.env`, and report every mistake at once."""

from __future__ import annotations

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

from core.domain.errors import ConfigError, Problem, nearest_name
from miner.observe.redact import HIDDEN
from miner.settings.model import SECRET_FIELDS, Settings, Source, without_keys
from miner.settings.values import BackendKind, split_list

DEFAULT_ENV_FILE = ".env"
_SHOWN_LENGTH = 80
#: Former settings that nobody changed: their values are constants beside the code that uses them.
_GONE = (
    "header_timeout_seconds body_timeout_seconds max_body_bytes max_concurrent_requests "
    "max_connections_per_address failure_rate_per_address failure_burst_per_address request_rate_per_hotkey "
    "request_burst_per_hotkey max_live_nonces chain_timeout_seconds metagraph_refresh_seconds "
    "metagraph_stale_seconds refusal_seconds queue_patience_seconds gpu_refresh_seconds gpu_sample_seconds "
    "gpu_return_seconds dataset_timeout_seconds trainer_processes slurm_poll_seconds publish_margin_seconds "
    "stall_factor stall_min_seconds silence_limit_seconds job_poll_seconds retry_pause_seconds "
    "retry_pause_max_seconds notify_period_seconds report_hour"
)
GONE = frozenset(_GONE.split())
#: How alike two names must be to guess that one was meant for the other.
_ALIKE = 0.84
#: Names of before the first release.
_RENAMED = {"engine": "backend"}


@dataclass
class _ReadSettings:
    """Values as read, before they are checked."""

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
    """Return the settings, or raise one `ConfigError` with every problem.

    `env` replaces the environment of the process; `env_file` None reads no file; `overrides` win over all.
    """
    read = _ReadSettings()
    if env_file is not None:
        _read_env_file(Path(env_file), read)
    environment = os.environ if env is None else env
    for name, value in environment.items():
        if name.lower() in _RENAMED and _names_backends(value):  # others may have a variable of this name too
            read.problems.append(_renamed(name))
    read.warnings.extend(_is_gone(name) for name in environment if name.lower() in GONE)
    read.add("env", _EnvSource(environment)())
    read.add("override", overrides)
    settings = _checked(read)
    if read.problems:
        raise ConfigError("settings", read.problems)
    assert settings is not None
    settings._sources = read.sources
    settings._warnings = tuple(read.warnings)
    return settings


class _EnvSource(EnvSettingsSource):
    """pydantic-settings' own reader, for any mapping."""

    def __init__(self, variables: Mapping[str, str | None]) -> None:
        self._variables = variables
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._variables.items() if value}


def _read_env_file(path: Path, read: _ReadSettings) -> None:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if path != Path(DEFAULT_ENV_FILE):
            read.problems.append(Problem(str(path), "", "there is no such file"))
        return
    except (OSError, UnicodeDecodeError) as error:
        read.problems.append(Problem(str(path), "", f"cannot be read as UTF-8 text: {error}"))
        return
    _find_mistakes(path, text, read)
    read.add(".env", _EnvSource(_variables(text))())


def _variables(text: str) -> dict[str, str | None]:
    """Read variables as python-dotenv does: `${NAME}` is replaced, but not in secrets."""
    replaced = dotenv_values(stream=io.StringIO(text))
    literal = dotenv_values(stream=io.StringIO(text), interpolate=False)
    return {name: literal[name] if name.lower() in SECRET_FIELDS else replaced[name] for name in replaced}


def _find_mistakes(path: Path, text: str, read: _ReadSettings) -> None:
    """Report what python-dotenv ignores silently: unreadable lines, repeats, and misspelled names."""
    seen: set[str] = set()
    for line in parse_stream(io.StringIO(text)):
        number = line.original.line + len(line.original.string) - len(line.original.string.lstrip("\n"))
        if line.error or (line.key is not None and line.value is None):
            # The line itself is not shown: it may be a misspelled secret.
            read.problems.append(Problem(f"{path} line {number}", "", "is not of the form NAME=value"))
            continue
        if line.key is None:
            continue
        name = line.key.lower()
        if name in seen and name in Settings.model_fields:
            read.warnings.append(f"{line.key} is set twice in {path}; the last one, line {number}, counts")
        seen.add(name)
        if name in _RENAMED:
            read.problems.append(_renamed(line.key, f" ({path} line {number})"))
        elif name in GONE:
            read.warnings.append(_is_gone(line.key))
        elif name not in Settings.model_fields and (meant := _nearest(name)):
            read.warnings.append(f"{line.key} is not a setting; did you mean {meant.upper()}?")


def _names_backends(value: str) -> bool:
    words = split_list(value)
    return bool(words) and set(words) <= {*BackendKind}


def _renamed(name: str, where: str = "") -> Problem:
    return Problem(f"{name}{where}", "", f"is {_RENAMED[name.lower()].upper()} now")


def _is_gone(name: str) -> str:
    return f"{name} is no longer a setting: its value is fixed; remove it"


def _nearest(name: str) -> str | None:
    return nearest_name(name.lower(), Settings.model_fields, _ALIKE)


def _checked(read: _ReadSettings) -> Settings | None:
    """Check each value, then, without the wrong ones, the rules that bind the others."""
    wrong: set[str] = set()
    for _attempt in ("the values", "the rules"):
        try:
            return Settings(**{name: value for name, value in read.values.items() if name not in wrong})
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                read.problems.extend(_problems(detail, read, wrong))
            wrong |= {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        if not wrong:  # the rules were checked already, and would be reported twice
            break
    return None


def _problems(detail: ErrorDetails, read: _ReadSettings, wrong: set[str]) -> Iterator[Problem]:
    if detail["type"] == "broken_rules":
        for rule in detail["ctx"]["broken"]:
            if not wrong.intersection(rule.fields):
                yield Problem(_variable(rule.fields[0], read), _shown(rule.fields[0], read), rule.text)
    elif detail["loc"] and str(detail["loc"][0]) in read.values:
        name = str(detail["loc"][0])
        yield Problem(_variable(name, read), _shown(name, read, detail), _rule(name, detail))


def _variable(name: str, read: _ReadSettings) -> str:
    return f"{name.upper()} (in .env)" if read.sources.get(name) == ".env" else name.upper()


def _shown(name: str, read: _ReadSettings, detail: ErrorDetails | None = None) -> str:
    """The offending value; of a list, the offending element."""
    if name not in read.values:
        return ""
    value = read.values[name]
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
