"""Saying what happens: events appended to progress.jsonl, one write per line."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from core.progress import Event, NoteEvent, StageEvent, line_of

log = logging.getLogger(__name__)


class Report:
    """Several processes append to one file: each line is one write, so lines never mix."""

    def __init__(self, path: Path | None) -> None:
        """None: a rank that has nothing to say."""
        self.path = path

    def say(self, event: Event) -> None:
        """A full disk must not end a training that could still finish: it is logged and forgotten."""
        if self.path is None:
            return
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line_of(event))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: event %s is lost: %s", self.path, event.event, error)

    def stage(self, stage: str, text: str = "") -> None:
        self.say(StageEvent(t=time.time(), stage=stage, text=text[:1000]))

    def note(self, kind: str, text: str) -> None:
        log.info("%s: %s", kind, text)
        self.say(NoteEvent(t=time.time(), kind=kind, text=text[:2000]))
