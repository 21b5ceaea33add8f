"""Missing images, by Docker's answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner.engines.base import EngineUnreachable
from miner.engines.docker.client import DockerRefused
from miner.engines.docker.container import ContainerDefaults
from miner.engines.docker.engine import DockerEngine
from miner.engines.docker.images import UnknownImage


class FakeDocker:
    """A client whose Docker has some images."""

    def __init__(self, *images: str, status: int = 404) -> None:
        self.images, self.status = images, status

    async def query(self, _what: str, call: Callable[[Any], Any]) -> Any:
        def inspect(reference: str) -> dict[str, str]:
            if reference not in self.images:
                raise DockerRefused(self.status, "No such image")
            return {"Id": reference}

        return call(SimpleNamespace(inspect_image=inspect))


def engine(client: FakeDocker, image_of: Callable[[str], str] = lambda short: f"me/{short}") -> DockerEngine:
    return DockerEngine(
        client,  # type: ignore[arg-type]
        ContainerDefaults("id", Path("/wrapper.py"), "1:1"),
        image_of=image_of,
        redact=str,
        trusted=(),
        training_uid=None,
    )


async def test_missing_images_are_named() -> None:
    assert await engine(FakeDocker("me/text", "me/image", "me/toolkit")).missing_images() == {}
    missing = await engine(FakeDocker("me/text")).missing_images()
    assert set(missing) == {"image", "toolkit"}
    assert "me/image: god-miner images build" in missing["image"]


async def test_unreadable_pins_make_every_image_missing() -> None:
    def unreadable(_short: str) -> str:
        raise UnknownImage("images.json cannot be read")

    assert set(await engine(FakeDocker(), unreadable).missing_images()) == {"text", "image", "toolkit"}


async def test_any_other_refusal_is_unreachable() -> None:
    with pytest.raises(EngineUnreachable):
        await engine(FakeDocker(status=500)).missing_images()
