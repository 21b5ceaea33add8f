"""Configuration that follows its files: an edit applies without a restart, a bad one keeps the last good."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from core.config.files import ConfigKind, ConfigLayer
from core.domain.errors import ConfigError, Problem
from core.system.files import read_regular_file


class _HasFile(Protocol):
    @property
    def file(self) -> Path: ...


class _HasLayers(Protocol):
    """Something read from files, oldest ancestor first."""

    @property
    def layers(self) -> Sequence[_HasFile]: ...


L = TypeVar("L", bound=_HasLayers)
#: Modification time and size of each file; a missing file has a stamp of its own.
FileStamps = dict[Path, tuple[int, int]]
_MISSING_FILE = (-1, -1)


class LiveConfig(Generic[L]):
    """`refresh` costs a `stat` per file; the files are read again only when one of them has changed.

    A file that is added to a directory in which the name is looked up counts as a change: it may hide the one
    that is in force. With a `fallback`, files that cannot be used at the start are a problem like a bad edit,
    and not an error.
    """

    def __init__(
        self,
        load: Callable[[str, Sequence[Path]], L],
        name_or_path: str,
        directories: Sequence[Path] = (),
        on_problem: Callable[[ConfigError], None] | None = None,
        fallback: Callable[[ConfigError], L] | None = None,
    ) -> None:
        self._load = partial(load, name_or_path, tuple(directories))
        self._on_problem = on_problem
        is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
        self._directories = (Path(name_or_path).parent,) if is_path else tuple(directories)
        #: Why the files cannot be used as they are now; None if they are in force.
        self.problem: ConfigError | None = None
        try:
            self.current = self._load()
        except ConfigError as error:
            if fallback is None:
                raise
            self.current = fallback(error)
            self.problem = error
        self._stamps = self._current_stamps()

    def refresh(self) -> L:
        """Load files that were edited; return the configuration in force."""
        stamps = self._current_stamps()
        if stamps != self._stamps:
            self._stamps, before = stamps, self._stamps
            self._reload(before)
        return self.current

    def _current_stamps(self) -> FileStamps:
        files = (layer.file for layer in self.current.layers)
        return file_stamps(
            [*files, *(file for directory in self._directories for file in directory.glob("*.y*ml"))]
        )

    def _reload(self, before: FileStamps) -> None:
        try:
            self._check_missing_files(before)
            self.current = self._load()
        except ConfigError as error:
            self.problem = error
            if self._on_problem is not None:
                self._on_problem(error)
        else:
            self.problem = None
            self._stamps = self._current_stamps()

    def _check_missing_files(self, before: FileStamps) -> None:
        """A file that goes away is a mishap. Looked up by name again, another of that name would take its
        place silently; where a file that names it was edited too, that was meant."""
        used = {layer.file for layer in self.current.layers}
        missing = [path for path in self._stamps if path in used and self._stamps[path] == _MISSING_FILE]
        edited = [path for path in used.difference(missing) if self._stamps[path] != before.get(path)]
        if missing and (self.current.layers[-1].file in missing or not edited):
            rule = "is gone; what was read from it last stays in force until it is back or the next start"
            raise ConfigError(missing[0].name, [Problem(str(path), "", rule) for path in missing])


class LastGoodLayers:
    """The texts of the last valid layers, kept over a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = ""

    def keep(self, name: str, layers: Sequence[ConfigLayer[Any]]) -> None:
        """Write the layers down. Never fails: a full disk costs the fallback, not what is in force."""
        text = json.dumps({"name": name, "layers": [[str(layer.file), layer.text] for layer in layers]})
        if text == self._kept:
            return
        partial = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self._path)
            self._kept = text

    def layers(self, name: str, kind: ConfigKind[Any]) -> list[ConfigLayer[Any]] | None:
        """The layers kept for `name`, if they are valid."""
        try:
            kept = json.loads(read_regular_file(self._path))
            if kept["name"] != name:
                return None
            return [ConfigLayer(kind, Path(file), text) for file, text in kept["layers"]] or None
        except (OSError, ValueError, KeyError, TypeError, ConfigError):
            return None


def file_stamps(files: Iterable[Path]) -> FileStamps:
    return {file: _file_stamp(file) for file in files}


def _file_stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return _MISSING_FILE
    return (status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else _MISSING_FILE
