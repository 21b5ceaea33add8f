"""The YAML files of an operator: which there are, what each says in the end, and saving one.

Only files in the operator's own directories are written. A shipped file is changed by a file of the
operator's that extends it, and may have its name.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from core.config.files import ConfigKind, config_dir
from core.config.schema_docs import key_help
from core.config.yaml_lines import MAX_BYTES
from core.domain.errors import ConfigError, GodMinerError
from core.profile.explain import Subject, format_value, profile_settings, representative_subjects
from core.profile.resolve import PROFILE_KIND, LoadedProfile, load_profile, resolve_profile
from core.system.files import read_regular_file, write_atomically
from miner.alerts.rules import ALERTS_KIND, LoadedAlertRules, load_alert_rules
from miner.api.config_files import (
    ConfigFile,
    ConfigFileList,
    ConfigFileText,
    ConfigKey,
    EffectiveValue,
    FileKind,
    FilesInForce,
)
from miner.offers.policies.load import POLICY_KIND, LoadedPolicy, load_policy
from miner.offers.policy_runtime import PolicyRuntime
from miner.settings import Settings

# Values of a file and all that it extends, as one YAML text with the origin of each.

#: A word that YAML reads as the text it is, or as the number or measure that it shows.
_PLAIN = re.compile(r"[A-Za-z0-9._/+-][A-Za-z0-9._/+ -]*")
#: Where comments begin, unless a line is longer.
_COLUMN = 44


def effective_yaml(values: Sequence[EffectiveValue]) -> str:
    """Nested as in a file, each value with its origin as a comment."""
    return "".join(f"{line}\n" for line in _lines(values))


def _lines(values: Sequence[EffectiveValue]) -> Iterator[str]:
    above: list[str] = []
    for entry in values:
        *parents, key = _steps(entry.path)
        shared = next(
            (at for at, pair in enumerate(zip(above, parents, strict=False)) if pair[0] != pair[1]),
            min(len(above), len(parents)),
        )
        for depth in range(shared, len(parents)):
            yield f"{'  ' * depth}{_key(parents[depth])}:"
        above = parents
        line = f"{'  ' * len(parents)}{_key(key)}: {_scalar(entry.value)}"
        yield f"{line:<{_COLUMN}}  # {entry.origin}"


def _steps(path: str) -> list[str]:
    """Engine keys may have dots of their own: they are below two steps."""
    return path.split(".", 2 if path.startswith("engine_config.") else -1)


def _key(step: str) -> str:
    return step if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", step) else json.dumps(step, ensure_ascii=False)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not value.endswith(" "):
        return value
    return json.dumps(value, ensure_ascii=False)


#: The largest shipped profile has 8 kB.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
DEFAULT_SUBJECT = "instruct Llama-8B"


class NoSuchFile(GodMinerError):
    code = "no_such_file"


class StaleFile(GodMinerError):
    """The file is not what the editor began with."""

    code = "stale_file"


class NotWritable(GodMinerError):
    code = "not_writable"


#: The name of the one file of alert rules.
ALERTS_NAME = "alerts"


LoadedFile = LoadedProfile | LoadedPolicy | LoadedAlertRules


class _KindFiles(NamedTuple):
    """The place and kind of some files."""

    kind: ConfigKind[Any]
    #: The operator's.
    directory: Path


class ConfigFiles:
    """Reads and writes files: off the event loop."""

    def __init__(self, settings: Settings, runtime: PolicyRuntime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._kinds = {
            FileKind.PROFILES: _KindFiles(PROFILE_KIND, settings.profile_dir),
            FileKind.POLICIES: _KindFiles(POLICY_KIND, settings.policy_dir),
            FileKind.ALERTS: _KindFiles(ALERTS_KIND, settings.alerts_file.parent),
        }

    def overview(self) -> ConfigFileList:
        """Every file that has a name, and what is in force."""
        return ConfigFileList(
            files=[self._entry(kind, name) for kind in FileKind for name in self._names(kind)],
            directories={kind: str(files.directory) for kind, files in self._kinds.items()},
            in_force=FilesInForce(
                profile=self._runtime.profile.name,
                policy=self._runtime.policy.name,
                **self._runtime.problems,
            ),
        )

    def show(self, kind: FileKind, name: str, subject: str = "") -> ConfigFileText:
        """One file: its text, and every value that is in force where it is, with its origin."""
        path = self.path(kind, name)
        own = self.saved_text(kind, name)
        shown = path if own is not None else self._named(kind, name)
        effective = self._effective(kind, shown, subject or DEFAULT_SUBJECT)
        return ConfigFileText(
            **dict(self._entry(kind, name)),
            text=_read(shown) if own is None else own,
            digest="" if own is None else text_digest(own),
            draft=None if own is not None else _draft(kind, name),
            keys=list(_keys(kind)),
            subjects=[about.label for about in representative_subjects()]
            if kind is FileKind.PROFILES
            else [],
            subject=effective.subject,
            notes=effective.notes,
            effective=effective.values,
            effective_yaml=effective_yaml(effective.values),
        )

    def path(self, kind: FileKind, name: str) -> Path:
        """Return the path of the operator's file of this name, which need not exist."""
        if not _NAME.fullmatch(name):
            raise NoSuchFile(f"{name!r} is not a name: letters, digits, - and _, at most 64")
        if kind is FileKind.ALERTS:
            if name != ALERTS_NAME:
                raise NoSuchFile(f"there is one file of alert rules, {ALERTS_NAME}")
            return self._settings.alerts_file
        return self._kinds[kind].directory / f"{name}.yaml"

    def saved_text(self, kind: FileKind, name: str) -> str | None:
        """Return the text of the operator's file, or None if there is none."""
        path = self.path(kind, name)
        return None if self._is_shipped(path) or not path.is_file() else _read(path)

    def check_writable(self, kind: FileKind, name: str) -> None:
        path = self.path(kind, name)
        if self._is_shipped(path):
            raise NotWritable(f"{path} is shipped; save a copy in a directory of yours")
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.lstat().st_mode)):
            raise NotWritable(f"{path} is a link or no file; edit what it leads to")

    def save(self, kind: FileKind, name: str, text: str, digest: str) -> None:
        """Replace the operator's file of this name in one step, and keep what it was beside it. `digest`:
        of the text that the editor began with, empty for a new file. `StaleFile`, `NotWritable`."""
        self.check_writable(kind, name)
        path, before = self.path(kind, name), self.saved_text(kind, name)
        if digest != ("" if before is None else text_digest(before)):
            what = "has been changed" if before is not None else "is gone"
            raise StaleFile(f"{path.name} {what} since you began to edit it; load it again")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            mode = 0o600
            if before is not None:
                mode = stat.S_IMODE(path.stat().st_mode)
                write_atomically(path.with_name(f"{path.name}.bak"), path.read_bytes(), mode=mode)
            write_atomically(path, text.encode(), mode=mode)
        except OSError as error:
            raise NotWritable(f"{path} cannot be written: {error.strerror}") from None

    def _names(self, kind: FileKind) -> Iterator[str]:
        if kind is FileKind.ALERTS:
            return iter([ALERTS_NAME])
        files = self._kinds[kind]
        return (name for name in files.kind.files([files.directory]) if _NAME.fullmatch(name))

    def _entry(self, kind: FileKind, name: str) -> ConfigFile:
        path = self._named(kind, name)
        own = not self._is_shipped(path)
        hardware, description, problem = None, "", None
        try:
            loaded = self._load(kind, path)
            description = loaded.layers[-1].content.description
            hardware = None if isinstance(loaded, LoadedAlertRules) else loaded.newest("hardware")
        except ConfigError as error:
            problem = str(error.problems[0])
        in_force, used_by = self._use(kind, path)
        return ConfigFile(
            kind=kind,
            name=name,
            file=str(path if own else path.resolve().relative_to(config_dir().resolve().parent)),
            own=own,
            writable=own and not path.is_symlink(),
            in_force=in_force,
            used_by=used_by,
            hardware=hardware,
            description=description,
            problem=problem,
        )

    def _use(self, kind: FileKind, path: Path) -> tuple[bool, str | None]:
        """Return whether the file is in force, and the name of the file in force that extends it."""
        if kind is FileKind.ALERTS:
            return True, None
        used = self._runtime.profile if kind is FileKind.PROFILES else self._runtime.policy
        is_parent = path in [layer.file for layer in used.layers[:-1]]
        return path == used.file, used.name if is_parent else None

    def _named(self, kind: FileKind, name: str) -> Path:
        path = self.path(kind, name)
        if path.is_file():
            return path
        shipped = config_dir() / self._kinds[kind].kind.directory / path.name
        if not shipped.is_file():
            raise NoSuchFile(f"there is no {self._kinds[kind].kind.noun} {name}")
        return shipped

    def _is_shipped(self, path: Path) -> bool:
        return path.resolve().is_relative_to(config_dir().resolve())

    def _load(self, kind: FileKind, path: Path) -> LoadedFile:
        if kind is FileKind.ALERTS:
            return load_alert_rules(path)
        directories = [self._kinds[kind].directory]
        if kind is FileKind.PROFILES:
            return load_profile(str(path), directories)
        in_force = self._runtime.policy
        overrides = in_force.overrides if in_force.file == path else None
        return load_policy(str(path), directories, overrides)

    def _effective(self, kind: FileKind, path: Path, subject: str) -> _Effective:
        """Return the values of the file with all that it extends; nothing if it cannot be loaded."""
        try:
            loaded = self._load(kind, path)
            values = _values(loaded, subject)
        except ConfigError:
            return _Effective(subject, [], [])
        noted = () if isinstance(loaded, LoadedAlertRules) else loaded.layers
        about = subject if isinstance(loaded, LoadedProfile) else None
        return _Effective(about, [note for layer in noted for note in layer.content.notes], values)


class _Effective(NamedTuple):
    """The values of a file for a task and model, and the notes of its layers."""

    subject: str | None
    notes: list[str]
    values: list[EffectiveValue]


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_BYTES:
        raise NotWritable(f"{path} is larger than {MAX_BYTES} bytes, and too large to be shown here")
    return read_regular_file(path).decode("utf-8-sig", errors="replace")


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def subject_named(label: str) -> Subject:
    """The task and model of a label like `instruct Llama-8B`; `NoSuchFile` where there is none."""
    found = next((one for one in representative_subjects() if one.label == label), None)
    if found is None:
        raise NoSuchFile(f"no such task and model: {label!r}")
    return found


def _draft(kind: FileKind, name: str) -> str:
    """Return the beginning of a new file of the operator's."""
    if kind is FileKind.ALERTS:
        return "# Laid over the shipped rules key by key: write what you change.\nrules: {}\n"
    return f"description: My {name}\nextends: {name}\n"


def _values(loaded: LoadedFile, subject: str) -> list[EffectiveValue]:
    if isinstance(loaded, LoadedAlertRules):
        return [
            EffectiveValue(path=path, value=value, origin=origin) for path, value, origin in loaded.written()
        ]
    if isinstance(loaded, LoadedPolicy):
        return [EffectiveValue.model_validate(setting) for setting in loaded.written().values()]
    about = subject_named(subject)
    settings = profile_settings(resolve_profile(loaded, about.task_type, about.model))
    return [
        EffectiveValue(path=setting.path, value=_shown(setting.path, setting.value), origin=setting.origin)
        for setting in settings
    ]


def _shown(path: str, value: JsonValue) -> JsonValue:
    """Return a value as one writes it: sizes and durations with their units."""
    return value if value is None or isinstance(value, bool | dict | list) else format_value(path, value)


@lru_cache
def _keys(kind: FileKind) -> tuple[ConfigKey, ...]:
    kinds: dict[FileKind, ConfigKind[Any]] = {
        FileKind.PROFILES: PROFILE_KIND,
        FileKind.POLICIES: POLICY_KIND,
        FileKind.ALERTS: ALERTS_KIND,
    }
    return tuple(map(ConfigKey.model_validate, key_help(kinds[kind].model)))
