"""Content that follows its files: an edit works without a restart, a bad edit keeps the last good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from core.errors import ConfigError, Problem


class _Layer(Protocol):
    @property
    def file(self) -> Path: ...


class Loaded(Protocol):
    """Something that was read from files, oldest ancestor first."""

    @property
    def layers(self) -> Sequence[_Layer]: ...


L = TypeVar("L", bound=Loaded)
#: Size and time of change of each file; a file that went away differs from one that is there.
_Stamp = dict[Path, tuple[int, int]]
_GONE = (-1, -1)


class Live(Generic[L]):
    """`current()` costs a `stat` per file; the files are read again only when one of them has changed."""

    def __init__(
        self, load: Callable[[], L], on_problem: Callable[[ConfigError], None] | None = None
    ) -> None:
        self._load = load
        self._on_problem = on_problem
        self._good = load()
        self._stamp = _stamp(self._good)
        #: Why the files as they are now cannot be used; None when they are what `current` returns.
        self.problem: ConfigError | None = None

    def current(self) -> L:
        stamp = _stamp(self._good)
        if stamp != self._stamp:
            self._stamp, before = stamp, self._stamp
            self._reload(before)
        return self._good

    def _reload(self, before: _Stamp) -> None:
        try:
            self._refuse_disappearance(before)
            self._good = self._load()
        except ConfigError as error:
            self.problem = error
            if self._on_problem is not None:
                self._on_problem(error)
        else:
            self.problem = None
            self._stamp = _stamp(self._good)

    def _refuse_disappearance(self, before: _Stamp) -> None:
        """A file that goes away is a mishap. Looked up by name again, another of that name would take its
        place without a word; where a file that names it was edited too, that was meant."""
        gone = [path for path, seen in self._stamp.items() if seen == _GONE]
        edited = [path for path, seen in self._stamp.items() if seen not in (_GONE, before[path])]
        if gone and (self._good.layers[-1].file in gone or not edited):
            rule = "is gone; what was read from it last stays in force until it is back or the next start"
            raise ConfigError(gone[0].name, [Problem(str(path), "", rule) for path in gone])


def _stamp(loaded: Loaded) -> _Stamp:
    return {layer.file: _seen(layer.file) for layer in loaded.layers}


def _seen(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return _GONE
    return status.st_mtime_ns, status.st_size
