"""Options that several commands share: directories, the policy and profile in force, times, and completion.

Imported by every command at start-up: everything heavy is imported inside the functions.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from core.domain.errors import ConfigError, Problem
from core.domain.units import parse_seconds

if TYPE_CHECKING:
    from core.domain.hardware import Hardware
    from core.domain.records import Record
    from core.profile.explain import ProfileFinding
    from core.profile.resolve import LoadedProfile
    from miner.offers.policies.load import ActiveConfig
    from miner.settings import Settings

R = TypeVar("R", bound="Record")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_LIMIT_HELP = "Show at most this many, the newest."
Limit = Annotated[int, typer.Option("-n", "--limit", min=1, help=_LIMIT_HELP)]
#: For lists that a daemon answers, up to its own bound.
PageLimit = Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help=_LIMIT_HELP)]
Since = Annotated[
    str | None, typer.Option(help="Start time: 2d or 12h ago, or a date like 2025-10-01. Default: all.")
]

#: Planned for if neither options, settings, this host, the policy nor the profile name GPUs.
DEFAULT_GPUS = "4xH100"


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take a dataclass: each of its fields is an option, as if it were a parameter."""
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name not in records:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        types = get_type_hints(records[name], include_extras=True)
        for one in fields(records[name]):
            default = Parameter.empty if one.default is MISSING else one.default
            options.append(
                Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[one.name])
            )

    def run(**given: Any) -> None:
        made = {
            name: record(**{one.name: given.pop(one.name) for one in fields(record)})
            for name, record in records.items()
        }
        command(**given, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    return run


def load_settings() -> Settings:
    from miner import settings

    return settings.load_settings()


def end_on_signals() -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C, to clean up. Under `nohup` SIGHUP stays ignored."""
    for sign in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sign) is not signal.SIG_IGN:
            signal.signal(sign, signal.default_int_handler)


def profile_directories(directories: Sequence[Path] | None) -> list[Path]:
    """Return the directories to search: `--dir`, then PROFILE_DIR."""
    return [*(directories or ()), load_settings().profile_dir]


def load_profile_from(name: str, directories: Sequence[Path] | None) -> LoadedProfile:
    from core.profile.resolve import load_profile

    return load_profile(name, profile_directories(directories))


def policy_directories(directories: Sequence[Path] | None) -> list[Path]:
    """Return the directories to search: `--dir`, then POLICY_DIR."""
    return [*(directories or ()), load_settings().policy_dir]


def local_hardware(settings: Settings) -> Hardware | None:
    """Return this host as a daemon would see it; None if no GPU was found and GPUS does not say so: such a
    machine is one to plan on, not one to train on."""
    from miner.backends.build_fleet import CPU, scan_once

    installed = scan_once(settings)[0].inventory.installed
    if installed is None or (installed.gpus.is_cpu and settings.gpus != CPU):
        return None
    return installed


def local_policy_and_profile() -> ActiveConfig:
    """Return the policy and profile that a daemon with these settings would use here."""
    from miner.backends.build_fleet import scan_once
    from miner.offers.policies.load import active_config

    settings = load_settings()
    return active_config(settings, scan_once(settings)[0].inventory.installed)


def local_policy_and_profile_or_warn() -> ActiveConfig | None:
    """Like `local_policy_and_profile`, with the reason for a failure on stderr."""
    try:
        return local_policy_and_profile()
    except ConfigError as error:
        typer.echo(f"what is in force cannot be used: {error}", err=True)
        return None


def warn_if_not_in_force(word: str, name: str) -> None:
    """Warn on stderr if another policy or profile (`word`) than the one shown is in force."""
    from miner.offers.policies.load import ChosenName, inactive_text

    found = local_policy_and_profile_or_warn()
    if found is None:
        return
    used = found.profile if word == "profile" else found.policy
    why = found.why_profile if word == "profile" else found.why_policy
    stem = Path(name).stem if name.endswith((".yaml", ".yml")) else name
    if stem != used.name:
        typer.echo(inactive_text(word, stem, used.name, ChosenName(used.name, why)), err=True)


def problem_findings(error: ConfigError) -> list[ProfileFinding]:
    """Return what is wrong with a file that cannot be loaded, as `check` reports it."""
    from core.profile.explain import ProfileFinding, ProfileFindingLevel

    return [
        ProfileFinding(ProfileFindingLevel.ERROR, problem.where, f"{problem.value} {problem.rule}".strip())
        for problem in error.problems
    ]


#: How many jobs completion offers, the newest first.
_COMPLETED_JOBS = 50


def complete_profiles(incomplete: str) -> list[str]:
    from core.profile.resolve import profile_files

    with contextlib.suppress(Exception):
        return _starting_with(profile_files(profile_directories(None)), incomplete)
    return []


def complete_policies(incomplete: str) -> list[str]:
    from miner.offers.policies.load import policy_files

    with contextlib.suppress(Exception):
        return _starting_with(policy_files(policy_directories(None)), incomplete)
    return []


def complete_task_types(incomplete: str) -> list[str]:
    from core.domain.tasks import TASK_WORDS

    return _starting_with(TASK_WORDS, incomplete)


def complete_jobs(incomplete: str) -> list[tuple[str, str]]:
    """Complete job numbers, with a description of each."""
    from miner.store import jobs as store_jobs
    from miner.store.database import open_store

    with contextlib.suppress(Exception), open_store(load_settings().store_dir) as connection:
        rows = store_jobs.newest_jobs(connection, _COMPLETED_JOBS)
        shown = [(str(row.id), f"{row.state.value} {row.task_type.value} {row.model}") for row in rows]
        shown += [(row.task_id, f"job {row.id}") for row in rows if incomplete]
        return [one for one in shown if one[0].startswith(incomplete)]
    return []


def _starting_with(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def parse_time(text: str, now: float) -> float:
    """Return seconds since the epoch; a date without a time zone is UTC."""
    try:
        return now - parse_seconds(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        rule = "a length like 2d or 12h, or a date like 2025-10-01, is needed"
        raise ConfigError("time", [Problem("--since", text, rule)]) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON object such as a config.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _bad_file(path, "", f"cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise _bad_file(path, type(found).__name__, "a JSON object is needed")
    return found


def read_record(path: Path, kind: type[R]) -> R:
    """Read a record that another command has written, or an operator."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _bad_file(path, "", f"holds no {kind.__name__}: {error}") from None


def _bad_file(path: Path, value: str, rule: str) -> ConfigError:
    return ConfigError(str(path), [Problem(path.name, value, rule)])


def parse_build_arguments(written: Sequence[str]) -> dict[str, str]:
    """Read options written NAME=VALUE, for a Dockerfile's ARG."""
    found = {}
    for one in written:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{one!r} must be written NAME=VALUE")
        found[name] = value
    return found
