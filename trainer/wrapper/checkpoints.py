"""Checkpoints to go on from: only whole ones, since engines take the newest folder whatever it holds."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainer.callbacks.submission import kind_of

#: Engines write this one last.
LAST_WRITTEN = "trainer_state.json"
#: Of the native trainer's states, which get their name when all of them is on disk.
NATIVE = "place.json"


def newest_checkpoint(output: Path) -> str | None:
    """The newest whole checkpoint. Torn ones are deleted: they would only be in the way."""
    found = sorted(output.glob("checkpoint-*"), key=_step, reverse=True)
    whole = [folder for folder in found if is_whole_checkpoint(folder)]
    for folder in found:
        if folder not in whole:
            shutil.rmtree(folder, ignore_errors=True)
    return str(whole[0]) if whole else None


def is_whole_checkpoint(folder: Path) -> bool:
    if (folder / NATIVE).is_file():
        return True
    return (folder / LAST_WRITTEN).is_file() and kind_of(folder) is not None


def _step(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
