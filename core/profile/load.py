"""From files to a checked profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as File

from core.layers import files
from core.layers.files import Kind, digest_of
from core.profile.nearest import advice
from core.profile.schema import Profile, ResolvedProfile, When

PROFILES = Kind(word="profile", folder="profiles", model=Profile, advice=advice)
Layer = files.Layer[Profile]


class LoadedProfile:
    """A profile and what it extends: the layers, oldest ancestor first."""

    def __init__(self, name: str, layers: Sequence[Layer]) -> None:
        self.name = name
        self.layers = tuple(layers)
        #: Kept by `resolve`: what it yields depends on the matching sections alone.
        self.resolved: dict[tuple[str, ...], ResolvedProfile] = {}
        self.selectors: list[tuple[str, When]] | None = None
        self.digest = digest_of(layers)

    @property
    def file(self) -> File:
        return self.layers[-1].file

    @property
    def description(self) -> str:
        return self.layers[-1].content.description

    @property
    def hardware(self) -> str | None:
        stated = [layer.content.hardware for layer in self.layers if layer.content.hardware]
        return stated[-1] if stated else None


def parse_profile(text: str, source: str = "profile.yaml") -> Profile:
    """One file's text, without what it extends. `ConfigError` names every mistake with its line."""
    return PROFILES.parse(text, source)


def load_profile(name_or_path: str, directories: Sequence[File] = ()) -> LoadedProfile:
    """By path (anything with a slash or `.yaml`), or by name: in `directories` first, then as shipped."""
    layers = PROFILES.layers(name_or_path, directories)
    return LoadedProfile(layers[-1].name, layers)


def profile_files(directories: Sequence[File] = ()) -> dict[str, File]:
    """Every profile that can be called by name; an operator's hides the shipped one of the same name."""
    return PROFILES.files(directories)
