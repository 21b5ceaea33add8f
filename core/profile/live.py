"""A profile that follows its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from core.errors import ConfigError
from core.layers.live import Live, folders_of
from core.profile.load import LoadedProfile, load_profile


class LiveProfile(Live[LoadedProfile]):
    """An edit works without a restart, a bad edit keeps the last good profile and is told."""

    def __init__(
        self,
        name_or_path: str,
        directories: Sequence[Path] = (),
        on_problem: Callable[[ConfigError], None] | None = None,
        fallback: Callable[[ConfigError], LoadedProfile] | None = None,
    ) -> None:
        super().__init__(
            lambda: load_profile(name_or_path, tuple(directories)),
            on_problem,
            folders_of(name_or_path, directories),
            fallback,
        )
