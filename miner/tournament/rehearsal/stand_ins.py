"""Rows and pictures in place of an operator's own: made up, with a rule in them that can be learned.

Models are made by `stand_in_worker` inside the image. Of image models there are no stand-ins.
"""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miner.tournament.rules import TournamentTask

#: Of the pictures two are kept for the score.
TRAIN_ROWS, TEST_ROWS, TEST_PROMPTS, PICTURES = 400, 60, 8, 14
#: Environment tasks get as many records, all with one sentence.
DUMMY_RECORDS = 1000
WORDS = (  # noqa: SIM905 - as a list it fills a page
    "the quick brown fox jumps over a lazy dog while seven wise owls count green apples and red pears "
    "near old river stones under bright moon light and nobody knows why rain falls on empty fields"
).split()


def stand_in_rows(task: TournamentTask, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with the fields of the task's dataset type."""
    if task.task_type == "EnvTask":
        return [{"prompt": "Interact with this environment."} for _ in range(DUMMY_RECORDS)]
    chance = random.Random(seed)  # noqa: S311 - repeatable rows, no secrets
    return [_ROWS[str(task.task_type)](chance) for _ in range(count)]


def _words(chance: random.Random, most: int = 8) -> list[str]:
    return [chance.choice(WORDS) for _ in range(chance.randint(2, most))]


def _answer(words: list[str]) -> str:
    return "backwards it reads " + " ".join(reversed(words))


def _instruct(chance: random.Random) -> dict[str, Any]:
    words = _words(chance)
    instruction = "write it backwards: " + " ".join(words)
    return {"instruct": instruction, "input": "", "output": _answer(words)}


def _chat(chance: random.Random) -> dict[str, Any]:
    turns = []
    for _ in range(chance.randint(1, 3)):
        words = _words(chance)
        turns += [{"from": "user", "value": " ".join(words)}, {"from": "assistant", "value": _answer(words)}]
    return {"conversations": turns}


def _pair(chance: random.Random) -> dict[str, Any]:
    words = _words(chance)
    return {"prompt": " ".join(words), "chosen": _answer(words), "rejected": " ".join(_words(chance))}


def _prompt(chance: random.Random) -> dict[str, Any]:
    return {"prompt": " ".join(_words(chance))}


_ROWS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "InstructTextTask": _instruct,
    "ChatTask": _chat,
    "DpoTask": _pair,
    "GrpoTask": _prompt,
}


def stand_in_pictures(count: int = PICTURES, width: int = 512, height: int = 512) -> bytes:
    """A zip of PNG files with captions, as validators send it."""
    out = io.BytesIO()
    chance = random.Random(0)  # noqa: S311
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(1, count + 1):
            colours = [tuple(chance.randrange(256) for _ in range(3)) for _ in range(2)]
            archive.writestr(f"{number}.png", _png(width, height, colours, chance.randrange(width)))
            archive.writestr(f"{number}.txt", f"two plain fields of colour, {' '.join(_words(chance))}")
    return out.getvalue()


def _png(width: int, height: int, colours: Sequence[Sequence[int]], edge: int) -> bytes:
    """Two fields of colour side by side."""
    row = b"\0" + bytes(colours[0]) * edge + bytes(colours[1]) * (width - edge)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * height)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data
