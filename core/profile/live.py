"""A profile that follows its files: an edit works without a restart, a bad edit keeps the last good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.errors import ConfigError
from core.profile.load import LoadedProfile, load_profile

#: Size and time of change of each file; a file that went away differs from one that is there.
_Stamp = tuple[tuple[str, int, int], ...]


class LiveProfile:
    """`current()` costs a `stat` per file; the files are read again only when one of them has changed."""

    def __init__(self, name_or_path: str, directories: Sequence[Path] = ()) -> None:
        self._name = name_or_path
        self._directories = tuple(directories)
        self._good = load_profile(name_or_path, directories)
        self._stamp = _stamp(self._good)
        #: Why the files as they are now cannot be used; None when they are what `current` returns.
        self.problem: ConfigError | None = None

    def current(self) -> LoadedProfile:
        stamp = _stamp(self._good)
        if stamp != self._stamp:
            self._stamp = stamp
            self._reload()
        return self._good

    def _reload(self) -> None:
        try:
            self._good = load_profile(self._name, self._directories)
        except ConfigError as error:
            self.problem = error
        else:
            self.problem = None
            self._stamp = _stamp(self._good)


def _stamp(profile: LoadedProfile) -> _Stamp:
    return tuple(_seen(layer.file) for layer in profile.layers)


def _seen(file: Path) -> tuple[str, int, int]:
    try:
        status = file.stat()
    except OSError:
        return str(file), -1, -1
    return str(file), status.st_mtime_ns, status.st_size
