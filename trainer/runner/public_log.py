"""What a tournament's container prints: one short line per event, nothing that shows competitors the plan.

All of it is public while the tournament runs. Engines print their whole configuration, and the learning rate
with every step; this goes to a file in the work directory, with our own log.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from core.runs.progress import NoteEvent, OomEvent, ProgressEvent, StageEvent, SubmissionEvent, parse_events
from core.runs.run_files import RunResult

LOG_FILE = "console.log"
#: What every training has; that a learning rate is searched or files are compared is a part of the plan.
STAGES = frozenset({"data", "load", "evaluate", "train"})
#: How often new events are looked for.
_LOOK_S = 1.0
#: What a validator keeps of a failed container's log is the last line with a colon and one of these words.
_ERROR = re.compile(r"Error|Exception")
_LONGEST = 300


class PublicLog:
    """Prints events while the process's own output goes to a file."""

    def __init__(self, progress: Path, public: int) -> None:
        self._progress, self._public = progress, public
        self._offset = 0
        self._stages: set[str] = set()
        self._submissions = 0
        self._ended = threading.Event()
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def end(self, result: RunResult) -> None:
        """Print what is left of the events, and how it ended."""
        self.stop()
        if result.submission:
            self._say("ended: a submission is in its place")
        if result.exit_code != 0:
            self._say(f"Error: {result.end}: {error_line(result.detail)}")

    def stop(self) -> None:
        self._ended.set()
        self._follower.join()

    def _follow(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._print_new()
        self._print_new()

    def _print_new(self) -> None:
        try:
            with self._progress.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        for line in parse_events(data, self._offset):
            self._offset = line.offset
            text = self._text(line.event) if line.event is not None else None
            if text is not None:
                self._say(text)

    def _text(self, event: ProgressEvent) -> str | None:
        if isinstance(event, StageEvent) and event.stage in STAGES - self._stages:
            self._stages.add(event.stage)
            return f"stage: {event.stage}"
        if isinstance(event, SubmissionEvent):
            self._submissions += 1
            which = "a" if self._submissions == 1 else "a better"
            return f"{which} submission is in its place"
        if isinstance(event, OomEvent):
            return "memory ran out"
        if isinstance(event, NoteEvent) and event.kind == "remedy":
            return "another launch follows"
        return None

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._public, f"trainer: {text}\n".encode())


def error_line(detail: str) -> str:
    """Of a failure's text the one line that says most."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    said = [line for line in lines if _ERROR.search(line)]
    return (said[-1] if said else lines[0] if lines else "no details")[:_LONGEST]


@contextlib.contextmanager
def public_log(work: Path, progress: Path) -> Iterator[PublicLog]:
    """Send the output of this process and its children to a file in `work`, and events to where it went."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        # A full disk costs the log and not the training.
        file = os.open(work / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    log = PublicLog(progress, kept[1])
    try:
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        yield log
    finally:
        log.stop()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, descriptor)
        for descriptor in (*kept, file):
            os.close(descriptor)
