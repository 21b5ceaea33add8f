"""Manage the training images: their names, building and pinning them, and whether a pin is current.

A tag can be moved by anybody who may use Docker. So what `god-miner images build` built is recorded by its
id, and that id runs until it is built again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError
from core.system.files import write_atomically
from miner.backends.docker.client import DockerClient, DockerRefused
from miner.backends.docker.settings import DockerSection
from miner.settings import Settings
from miner.support.data_id import data_id

PINS_FILE = "images.json"
#: A pinned build has a tag here, one for each data directory and image: whoever prunes can see it.
PINS_REPOSITORY = "god-miner-pinned"
#: On images that we build: what they were built from.
SOURCE_LABEL = "god-miner.source"


class UnknownImage(GodMinerError):
    code = "unknown_image"


@dataclass(frozen=True, slots=True)
class ImageKind:
    """One of the images; `short` is its name in `AttemptSpec.image`."""

    short: str
    dockerfile: str
    setting: str


IMAGE_KINDS = {
    kind.short: kind
    for kind in (
        ImageKind("text", "standalone-text-trainer.dockerfile", "trainer_text_image"),
        ImageKind("image", "standalone-image-trainer.dockerfile", "trainer_image_image"),
        ImageKind("toolkit", "standalone-image-toolkit-trainer.dockerfile", "trainer_toolkit_image"),
    )
}


@dataclass(frozen=True, slots=True)
class ImagePin:
    """An image that we built."""

    name: str
    id: str
    source: str
    built_at: float


class TrainerImages:
    """Names from the settings, pins from the data directory."""

    def __init__(self, settings: Settings) -> None:
        own = settings.section(DockerSection)
        self._names = {short: str(getattr(own, kind.setting)) for short, kind in IMAGE_KINDS.items()}
        self._data_dir = settings.data_dir
        self._file = settings.data_dir / PINS_FILE

    def name(self, short: str) -> str:
        if short not in self._names:
            raise UnknownImage(f"there is no image {short!r}; those there are: {', '.join(self._names)}")
        return self._names[short]

    def reference(self, short: str) -> str:
        """The image to start: the pinned build, else the name, for images from elsewhere."""
        pin = self.pin(short)
        return pin.id if pin else self.name(short)

    def pin(self, short: str) -> ImagePin | None:
        """The pin of the build, while the setting still names what was built."""
        pin = self._pins().get(short)
        return pin if pin and pin.name == self.name(short) else None

    def pin_tag(self, short: str) -> str:
        return f"{data_id(self._data_dir)}-{short}"

    def set_pin(self, short: str, image_id: str, source: str) -> None:
        pins = {**self._pins(), short: ImagePin(self.name(short), image_id, source, time.time())}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({name: asdict(pin) for name, pin in pins.items()}, indent=2) + "\n"
        write_atomically(self._file, text.encode(), mode=0o644)

    def _pins(self) -> Mapping[str, ImagePin]:
        try:
            return {name: ImagePin(**pin) for name, pin in json.loads(self._file.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UnknownImage(
                f"{self._file} cannot be read ({error}); delete it and run `god-miner images build`"
            ) from None


#: A build without output for so long is stuck; its steps are downloads of gigabytes.
BUILD_SILENCE_S = 1800.0
DOCKERFILES_FOLDER = "dockerfiles"
#: What goes into the images, besides the dockerfile itself.
_INGREDIENTS = ("core", "trainer", "configs", "requirements")
_SKIPPED = frozenset({"__pycache__", ".mypy_cache", ".ruff_cache"})


class BuildFailed(GodMinerError):
    code = "build_failed"


def source_root() -> Path:
    """The checkout that this process runs from."""
    root = Path(__file__).resolve().parents[3]
    if not (root / DOCKERFILES_FOLDER).is_dir():
        raise BuildFailed(
            f"there is no {DOCKERFILES_FOLDER}/ in {root}: images are built from a checkout of the "
            "repository, not from an installed package; run this there, "
            "or name images from elsewhere in TRAINER_*_IMAGE"
        )
    return root


def source_hash(root: Path, kind: ImageKind) -> str:
    """A hash of all that an image of this kind is built from."""
    digest = hashlib.sha256()
    for path in _ingredients(root, kind):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ImageBuild:
    """A checkout to build from, and how."""

    root: Path
    arguments: Mapping[str, str]
    #: Docker's own choice if None.
    network: str | None = None


def build_image(
    client: DockerClient,
    images: TrainerImages,
    short: str,
    build: ImageBuild,
    on_line: Callable[[str], None],
) -> ImagePin:
    """Build and pin an image. Blocking: minutes the first time. A failed build leaves the pin alone."""
    name, kind = images.name(short), IMAGE_KINDS[short]
    source = source_hash(build.root, kind)

    def work(api: Any) -> str:
        lines = api.build(
            path=str(build.root),
            dockerfile=f"{DOCKERFILES_FOLDER}/{kind.dockerfile}",
            tag=name,
            buildargs=dict(build.arguments),
            labels={SOURCE_LABEL: source},
            network_mode=build.network,
            rm=True,
            # A failed build would leave its container behind.
            forcerm=True,
            decode=True,
        )
        _follow_build(lines, kind, on_line)
        image_id = str(api.inspect_image(name)["Id"])
        api.tag(image_id, PINS_REPOSITORY, images.pin_tag(short), force=True)
        return image_id

    image_id = client.call_blocking(work, BUILD_SILENCE_S)
    images.set_pin(short, image_id, source)
    pin = images.pin(short)
    assert pin is not None, "just set"
    return pin


@dataclass(frozen=True, slots=True)
class EarlierBuild:
    id: str
    size_bytes: int


def earlier_builds(client: DockerClient, images: TrainerImages) -> list[EarlierBuild]:
    """Our builds without a name and a pin, of this data directory or another. Blocking."""
    pinned = {images.reference(short) for short in IMAGE_KINDS}

    def work(api: Any) -> list[EarlierBuild]:
        listed = api.images(filters={"label": [SOURCE_LABEL]})
        return [
            EarlierBuild(str(image["Id"]), int(image.get("Size") or 0))
            for image in listed
            if image["Id"] not in pinned and not _image_tags(image)
        ]

    return client.call_blocking(work, client.query_timeout_s)


def _image_tags(image: Mapping[str, Any]) -> list[str]:
    return [tag for tag in image.get("RepoTags") or () if tag != "<none>:<none>"]


def remove_build(client: DockerClient, image_id: str) -> str | None:
    """Remove it. Returns why it was kept (a container uses it, or another image needs it), or None."""
    try:
        client.call_blocking(lambda api: api.remove_image(image_id), BUILD_SILENCE_S)
    except DockerRefused as refused:
        return None if refused.status == 404 else str(refused)
    return None


def _follow_build(
    lines: Iterator[Mapping[str, Any]], kind: ImageKind, on_line: Callable[[str], None]
) -> None:
    """Docker reports a failure within the stream, and ends it as after a success."""
    for line in lines:
        if "error" in line:
            raise BuildFailed(f"{kind.dockerfile} could not be built: {str(line['error']).strip()}")
        text = str(line.get("stream") or line.get("status") or "").strip()
        if text:
            on_line(text)


def _ingredients(root: Path, kind: ImageKind) -> Iterator[Path]:
    dockerfile = root / DOCKERFILES_FOLDER / kind.dockerfile
    if not dockerfile.is_file():
        raise BuildFailed(f"{dockerfile} is not there")
    yield dockerfile
    for name in _INGREDIENTS:
        path = root / name
        if path.is_file():
            yield path
        else:
            yield from sorted(
                file
                for file in path.rglob("*")
                if file.is_file() and not _SKIPPED.intersection(file.parts) and file.suffix != ".pyc"
            )


class ImageState(StrEnum):
    OK = "ok"
    MISSING = "missing"
    #: Started by its name, which anybody who may use Docker can give to another image.
    UNPINNED = "unpinned"
    #: The name was given to another image since; the pinned one still runs.
    MOVED = "moved"
    #: Built from other sources than those of this checkout.
    STALE = "stale"


#: What is wrong, and the way out.
IMAGE_STATE_MEANING: dict[ImageState, tuple[str, str]] = {
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
class ImageStatus:
    short: str
    name: str
    state: ImageState
    id: str = ""
    size_bytes: int = 0
    created: str = ""

    @property
    def text(self) -> str:
        return IMAGE_STATE_MEANING[self.state][0]

    @property
    def fix(self) -> str:
        return IMAGE_STATE_MEANING[self.state][1].format(
            short=self.short, setting=IMAGE_KINDS[self.short].setting.upper()
        )

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "text": self.text, "fix": self.fix}


def image_statuses(client: DockerClient, images: TrainerImages) -> list[ImageStatus]:
    """The state of every image. Blocking; `BackendUnreachable` when Docker does not answer."""
    return [_image_status(client, images, short) for short in IMAGE_KINDS]


def _image_status(client: DockerClient, images: TrainerImages, short: str) -> ImageStatus:
    name, pin = images.name(short), images.pin(short)
    inspected = _inspect_image(client, images.reference(short))
    if inspected is None:
        return ImageStatus(short, name, ImageState.MISSING)
    named = _inspect_image(client, name)
    state = ImageState.OK
    if pin is None:
        state = ImageState.OK if "@sha256:" in name or name.startswith("sha256:") else ImageState.UNPINNED
    elif named is None or named["Id"] != pin.id:
        state = ImageState.MOVED
    elif _current_source_hash(short) not in (
        None,
        (inspected["Config"].get("Labels") or {}).get(SOURCE_LABEL),
    ):
        state = ImageState.STALE
    return ImageStatus(
        short,
        name,
        state,
        inspected["Id"],
        int(inspected.get("Size") or 0),
        str(inspected.get("Created") or ""),
    )


def _inspect_image(client: DockerClient, reference: str) -> Mapping[str, Any] | None:
    try:
        image: Mapping[str, Any] = client.call_blocking(
            lambda api: api.inspect_image(reference), client.query_timeout_s
        )
    except DockerRefused as refused:
        if refused.status == 404:
            return None
        raise
    return image


def _current_source_hash(short: str) -> str | None:
    """Return the hash, or None without a checkout, as in an installed package."""
    try:
        return source_hash(source_root(), IMAGE_KINDS[short])
    except GodMinerError:
        return None
