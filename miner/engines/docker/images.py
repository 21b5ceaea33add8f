"""The training's images: what they are called, which build of each is ours, and whether it still is.

A tag can be moved to anything by anybody who may use Docker. So what `god-miner images build` made is noted
by its id, and that id is what runs, until it is built again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from core.errors import GodMinerError
from miner.engines.owner import data_id
from miner.settings import Settings

PINS_FILE = "images.json"
#: A pinned build has a tag here, one for each data directory and image: whoever prunes can see it.
PINS_REPOSITORY = "god-miner-pinned"
#: On images that we build: what they were built from.
SOURCE_LABEL = "god-miner.source"


class UnknownImage(GodMinerError):
    code = "unknown_image"


@dataclass(frozen=True, slots=True)
class ImageKind:
    """One of the images, by its short name in `EngineSpec.image`."""

    short: str
    dockerfile: str
    setting: str


KINDS = {
    kind.short: kind
    for kind in (
        ImageKind("text", "standalone-text-trainer.dockerfile", "trainer_text_image"),
        ImageKind("image", "standalone-image-trainer.dockerfile", "trainer_image_image"),
        ImageKind("toolkit", "standalone-image-toolkit-trainer.dockerfile", "trainer_toolkit_image"),
    )
}


@dataclass(frozen=True, slots=True)
class Pin:
    """A build of ours."""

    name: str
    id: str
    source: str
    built_at: float


class Images:
    """Names from the settings, pins from the data folder."""

    def __init__(self, settings: Settings) -> None:
        self._names = {short: str(getattr(settings, kind.setting)) for short, kind in KINDS.items()}
        self._data_dir = settings.data_dir
        self._file = settings.data_dir / PINS_FILE

    def name(self, short: str) -> str:
        if short not in self._names:
            raise UnknownImage(f"there is no image {short!r}; those there are: {', '.join(self._names)}")
        return self._names[short]

    def reference(self, short: str) -> str:
        """What to start: the pinned build; else the name, for images that came from elsewhere."""
        pin = self.pin(short)
        return pin.id if pin else self.name(short)

    def pin(self, short: str) -> Pin | None:
        """Only while the setting still names what was built."""
        found = self._pins().get(short)
        return found if found and found.name == self.name(short) else None

    def pin_tag(self, short: str) -> str:
        return f"{data_id(self._data_dir)}-{short}"

    def set_pin(self, short: str, image_id: str, source: str) -> None:
        pins = {**self._pins(), short: Pin(self.name(short), image_id, source, time.time())}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({name: asdict(pin) for name, pin in pins.items()}, indent=2) + "\n")
        part.replace(self._file)

    def _pins(self) -> Mapping[str, Pin]:
        try:
            return {name: Pin(**pin) for name, pin in json.loads(self._file.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UnknownImage(
                f"{self._file} can not be read ({error}); delete it and run `god-miner images build`"
            ) from None
