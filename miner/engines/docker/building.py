"""Builds the training's images from `dockerfiles/`, and pins what was built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import GodMinerError
from miner.engines.docker.client import Client, Refused
from miner.engines.docker.images import KINDS, PINS_REPOSITORY, SOURCE_LABEL, ImageKind, Images, Pin

#: A build without a word for so long is stuck; its steps are downloads of gigabytes.
SILENCE_S = 1800.0
FOLDER = "dockerfiles"
#: What goes into the images, besides the dockerfile itself.
_INGREDIENTS = ("core", "trainer", "configs", "constraints.txt", "constraints-training.txt")
_SKIPPED = frozenset({"__pycache__", ".mypy_cache", ".ruff_cache"})


class BuildFailed(GodMinerError):
    code = "build_failed"


def source_root() -> Path:
    """The checkout that we run from."""
    root = Path(__file__).resolve().parents[3]
    if not (root / FOLDER).is_dir():
        raise BuildFailed(
            f"there is no {FOLDER}/ in {root}: images are built from a checkout of the repository, not from "
            "an installed package; run this there, or name images made elsewhere in TRAINER_*_IMAGE"
        )
    return root


def source_hash(root: Path, kind: ImageKind) -> str:
    """What an image of this kind is made from, as one number."""
    digest = hashlib.sha256()
    for path in _ingredients(root, kind):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def build(
    client: Client,
    images: Images,
    short: str,
    *,
    root: Path,
    arguments: Mapping[str, str],
    network: str | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Pin:
    """Blocking: minutes the first time. Only a build that went well moves the pin."""
    name, kind = images.name(short), KINDS[short]
    source = source_hash(root, kind)

    def work(api: Any) -> str:
        lines = api.build(
            path=str(root),
            dockerfile=f"{FOLDER}/{kind.dockerfile}",
            tag=name,
            buildargs=dict(arguments),
            labels={SOURCE_LABEL: source},
            network_mode=network,
            rm=True,
            # A failed build would leave its container behind.
            forcerm=True,
            decode=True,
        )
        _follow(lines, kind, told)
        made = str(api.inspect_image(name)["Id"])
        api.tag(made, PINS_REPOSITORY, images.pin_tag(short), force=True)
        return made

    image_id = client.ask_here(work, SILENCE_S)
    images.set_pin(short, image_id, source)
    found = images.pin(short)
    assert found is not None, "just set"
    return found


@dataclass(frozen=True, slots=True)
class EarlierBuild:
    id: str
    size_bytes: int


def earlier_builds(client: Client, images: Images) -> list[EarlierBuild]:
    """Builds of ours that no name and no pin means any more, of this data directory or another. Blocking."""
    pinned = {images.reference(short) for short in KINDS}

    def work(api: Any) -> list[EarlierBuild]:
        listed = api.images(filters={"label": [SOURCE_LABEL]})
        return [
            EarlierBuild(str(image["Id"]), int(image.get("Size") or 0))
            for image in listed
            if image["Id"] not in pinned and not _tags(image)
        ]

    return client.ask_here(work, client.look_s)


def _tags(image: Mapping[str, Any]) -> list[str]:
    return [tag for tag in image.get("RepoTags") or () if tag != "<none>:<none>"]


def remove_build(client: Client, image_id: str) -> str | None:
    """Why it was kept: a container uses it, or another image stands on it. None: removed."""
    try:
        client.ask_here(lambda api: api.remove_image(image_id), SILENCE_S)
    except Refused as refused:
        return None if refused.status == 404 else str(refused)
    return None


def _follow(lines: Iterator[Mapping[str, Any]], kind: ImageKind, told: Callable[[str], None]) -> None:
    """Docker tells a failure in the stream, and ends it as if all were well."""
    for line in lines:
        if "error" in line:
            raise BuildFailed(f"{kind.dockerfile} could not be built: {str(line['error']).strip()}")
        text = str(line.get("stream") or line.get("status") or "").strip()
        if text:
            told(text)


def _ingredients(root: Path, kind: ImageKind) -> Iterator[Path]:
    dockerfile = root / FOLDER / kind.dockerfile
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
