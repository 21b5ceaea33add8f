"""Content that follows its files: an edit works without a restart, a bad edit keeps the last good."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from core.errors import ConfigError, Problem
from core.layers.files import Kind, Layer


class _Layer(Protocol):
    @property
    def file(self) -> Path: ...


class Loaded(Protocol):
    """Something that was read from files, oldest ancestor first."""

    @property
    def layers(self) -> Sequence[_Layer]: ...


L = TypeVar("L", bound=Loaded)
#: Size and time of change of each file; a file that went away differs from one that is there.
Stamp = dict[Path, tuple[int, int]]
_GONE = (-1, -1)


class Live(Generic[L]):
    """`current()` costs a `stat` per file; the files are read again only when one of them has changed.

    A file that is added to one of `directories` counts as a change: it may hide the one that is in force.
    With a `fallback`, files that cannot be used at the start are a problem like a bad edit, and not an error.
    """

    def __init__(
        self,
        load: Callable[[], L],
        on_problem: Callable[[ConfigError], None] | None = None,
        directories: Sequence[Path] = (),
        fallback: Callable[[ConfigError], L] | None = None,
    ) -> None:
        self._load = load
        self._on_problem = on_problem
        self._directories = tuple(directories)
        #: Why the files as they are now cannot be used; None when they are what `current` returns.
        self.problem: ConfigError | None = None
        try:
            self._good = load()
        except ConfigError as error:
            if fallback is None:
                raise
            self._good = fallback(error)
            self.problem = error
        self._stamp = self._look()

    def current(self) -> L:
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp, before = stamp, self._stamp
            self._reload(before)
        return self._good

    def _look(self) -> Stamp:
        files = (layer.file for layer in self._good.layers)
        return stamp_of([*files, *(file for folder in self._directories for file in folder.glob("*.y*ml"))])

    def _reload(self, before: Stamp) -> None:
        try:
            self._refuse_disappearance(before)
            self._good = self._load()
        except ConfigError as error:
            self._refused(error)
        else:
            self.problem = None
            self._stamp = self._look()

    def _refused(self, error: ConfigError) -> None:
        self.problem = error
        if self._on_problem is not None:
            self._on_problem(error)

    def _refuse_disappearance(self, before: Stamp) -> None:
        """A file that goes away is a mishap. Looked up by name again, another of that name would take its
        place without a word; where a file that names it was edited too, that was meant."""
        used = {layer.file for layer in self._good.layers}
        gone = [path for path in self._stamp if path in used and self._stamp[path] == _GONE]
        edited = [path for path in used.difference(gone) if self._stamp[path] != before.get(path)]
        if gone and (self._good.layers[-1].file in gone or not edited):
            rule = "is gone; what was read from it last stays in force until it is back or the next start"
            raise ConfigError(gone[0].name, [Problem(str(path), "", rule) for path in gone])


def folders_of(name_or_path: str, directories: Sequence[Path]) -> list[Path]:
    """Where a file that `name_or_path` means may appear."""
    is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    return [Path(name_or_path).parent] if is_path else list(directories)


class LastGood:
    """The texts of the last layers that could be used, kept over a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = ""

    def keep(self, name: str, layers: Sequence[Layer[Any]]) -> None:
        """Never fails: a disk that is full costs the fallback, not what is in force."""
        text = json.dumps({"name": name, "layers": [[str(layer.file), layer.text] for layer in layers]})
        if text == self._kept:
            return
        partial = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self._path)
            self._kept = text

    def layers(self, name: str, kind: Kind[Any]) -> list[Layer[Any]] | None:
        """Those kept for `name`; None where there are none of use."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["name"] != name:
                return None
            return [Layer(kind, Path(file), text) for file, text in kept["layers"]] or None
        except (OSError, ValueError, KeyError, TypeError, ConfigError):
            return None


def stamp_of(files: Iterable[Path]) -> Stamp:
    return {file: _seen(file) for file in files}


def _seen(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return _GONE
    return status.st_mtime_ns, status.st_size
