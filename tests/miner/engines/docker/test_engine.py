"""What Docker lacks, by its answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner.engines.base import Unreachable
from miner.engines.docker.client import Refused
from miner.engines.docker.config import House
from miner.engines.docker.engine import DockerEngine
from miner.engines.docker.images import UnknownImage


class Answers:
    """A client whose Docker has some images."""

    def __init__(self, *there: str, status: int = 404) -> None:
        self.there, self.status = there, status

    async def ask(self, _what: str, call: Callable[[Any], Any]) -> Any:
        def inspect(reference: str) -> None:
            if reference not in self.there:
                raise Refused(self.status, "No such image")

        return call(SimpleNamespace(inspect_image=inspect))


def engine(client: Answers, image_of: Callable[[str], str] = lambda short: f"me/{short}") -> DockerEngine:
    return DockerEngine(
        client,  # type: ignore[arg-type]
        House("id", Path("/wrapper.py"), "1:1"),
        image_of=image_of,
        redact=str,
        trusted=(),
        training_uid=None,
    )


async def test_images_that_are_not_there_are_named() -> None:
    assert await engine(Answers("me/text", "me/image", "me/toolkit")).lacks() == {}
    found = await engine(Answers("me/text")).lacks()
    assert set(found) == {"image", "toolkit"}
    assert "me/image: god-miner images build" in found["image"]


async def test_pins_that_can_not_be_read_lack_everything() -> None:
    def unreadable(_short: str) -> str:
        raise UnknownImage("images.json can not be read")

    assert set(await engine(Answers(), unreadable).lacks()) == {"text", "image", "toolkit"}


async def test_any_other_answer_tells_nothing() -> None:
    with pytest.raises(Unreachable):
        await engine(Answers(status=500)).lacks()
