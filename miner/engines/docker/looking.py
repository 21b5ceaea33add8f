"""What became of the images: there or not, ours or not, of today's sources or of older ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from core.errors import GodMinerError
from miner.engines.docker.building import source_hash, source_root
from miner.engines.docker.client import Client, Refused
from miner.engines.docker.images import KINDS, SOURCE_LABEL, Images


class ImageState(StrEnum):
    OK = "ok"
    MISSING = "missing"
    #: Runs by its name, which anybody who may use Docker can give to another image.
    UNPINNED = "unpinned"
    #: The name was given to another image since; ours is still what runs.
    MOVED = "moved"
    #: Built from other sources than those that lie here.
    STALE = "stale"


#: What is wrong, and the way out.
MEANING: dict[ImageState, tuple[str, str]] = {
    ImageState.OK: ("built here, from these sources", ""),
    ImageState.MISSING: ("not there", "god-miner images build {short}"),
    ImageState.UNPINNED: (
        "there, by its name only",
        "god-miner images build {short}; or name it with @sha256:… in {setting}",
    ),
    ImageState.MOVED: (
        "its name now means another image; the one built here still runs",
        "god-miner images build {short}",
    ),
    ImageState.STALE: ("built from other sources than these", "god-miner images build {short}"),
}


@dataclass(frozen=True, slots=True)
class Look:
    short: str
    name: str
    state: ImageState
    id: str = ""
    size_bytes: int = 0
    created: str = ""

    @property
    def text(self) -> str:
        return MEANING[self.state][0]

    @property
    def fix(self) -> str:
        return MEANING[self.state][1].format(short=self.short, setting=KINDS[self.short].setting.upper())

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text, "fix": self.fix}


def look(client: Client, images: Images) -> list[Look]:
    """At all of them. Blocking; `Unreachable` when Docker does not answer."""
    return [_look(client, images, short) for short in KINDS]


def _look(client: Client, images: Images, short: str) -> Look:
    name, pin = images.name(short), images.pin(short)
    found = _inspect(client, images.reference(short))
    if found is None:
        return Look(short, name, ImageState.MISSING)
    named = _inspect(client, name)
    state = ImageState.OK
    if pin is None:
        state = ImageState.OK if "@sha256:" in name or name.startswith("sha256:") else ImageState.UNPINNED
    elif named is None or named["Id"] != pin.id:
        state = ImageState.MOVED
    elif _sources(short) not in (None, (found["Config"].get("Labels") or {}).get(SOURCE_LABEL)):
        state = ImageState.STALE
    return Look(short, name, state, found["Id"], int(found.get("Size") or 0), str(found.get("Created") or ""))


def _inspect(client: Client, reference: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = client.ask_here(lambda api: api.inspect_image(reference), client.look_s)
    except Refused as refused:
        if refused.status == 404:
            return None
        raise
    return found


def _sources(short: str) -> str | None:
    """None where there are none, as with an installed package."""
    try:
        return source_hash(source_root(), KINDS[short])
    except GodMinerError:
        return None
