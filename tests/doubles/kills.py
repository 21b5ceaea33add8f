"""Campaigns of kills: a training is killed repeatedly, and each time must leave a submission that scores.

Validators end a container at its limit with SIGKILL and upload what they find. Moments are drawn from the
first submission on. Every second kill comes in the middle of a save: after a drawn number of changes in the
directory.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

#: Changes of a LoRA's save as seen from outside: directory, weights, configuration, card, scores, rename.
MOST_CHANGES = 6
#: Seconds after the first submission in which moments are drawn.
SPAN_S = 20.0
#: Longest wait for the first submission; loading a model on a busy CPU takes minutes.
FIRST_LIMIT_S = 1800.0
#: Repeats of a kill that came after its training's end, each in half of the span.
MOST_REPEATS = 2
_LOOK_S = 0.05
#: A save of a small model takes milliseconds.
_LOOK_IN_SAVE_S = 0.0002


class RunningContainer(Protocol):
    """A training that has been started."""

    @property
    def place(self) -> Path:
        """The submission's folder, as this machine sees it."""

    def is_running(self) -> bool: ...

    def kill(self) -> None:
        """SIGKILL to all of it, without notice; return when nothing of it runs."""


@dataclass(frozen=True)
class KillMoment:
    #: Counted from the first submission.
    seconds: float
    #: Changes in the directory to wait for after `seconds`; 0 unless the kill is to come in a save.
    changes: int = 0


@dataclass(frozen=True)
class Kill:
    number: int
    moment: KillMoment
    #: True if the kill left an unfinished save beside the submission.
    in_save: bool
    #: True if the training had ended by itself.
    ended: bool
    #: Why the submission does not score, if it does not.
    problem: str | None

    @property
    def is_late(self) -> bool:
        """Return True if the training had ended before its kill, with a submission that scores."""
        return self.ended and self.problem is None


@dataclass(frozen=True)
class KillReport:
    """`seed` and the number of kills repeat all moments."""

    seed: int
    kills: tuple[Kill, ...]

    @property
    def late(self) -> int:
        return sum(1 for kill in self.kills if kill.is_late)

    @property
    def problem(self) -> str | None:
        """The first failure, or None if every training was killed and left a submission that scores."""
        if bad := next((kill for kill in self.kills if kill.problem), None):
            return f"kill {bad.number} left nothing that scores: {bad.problem}"
        if self.late:
            count = f"{self.late} of {len(self.kills)}"
            return f"{count} trainings had ended before their kill: give them more time"
        return None

    def summary(self) -> str:
        in_saves = sum(1 for kill in self.kills if kill.in_save)
        kills = f"{len(self.kills)} kills, {in_saves} in the middle of a save"
        return f"{self.problem or 'every kill left a submission that scores'} ({kills}; seed {self.seed})"


def kill_moments(count: int, seed: int, span_s: float = SPAN_S) -> list[KillMoment]:
    """Draw moments by a seed; every second one lies in a save."""
    chance = random.Random(seed)
    moments = []
    for number in range(count):
        seconds, changes = chance.uniform(0, span_s), chance.randint(1, MOST_CHANGES)
        # Saves become rare later in a training: these are looked for in the first half.
        moments.append(KillMoment(seconds / 2, changes) if number % 2 else KillMoment(seconds))
    return moments


def run_kills(
    start: Callable[[], RunningContainer],
    count: int,
    seed: int,
    check: Callable[[Path], str | None],
    *,
    span_s: float = SPAN_S,
    first_limit_s: float = FIRST_LIMIT_S,
    on_kill: Callable[[Kill], None] = lambda kill: None,
) -> KillReport:
    """Start and kill a training `count` times.

    `check` gets the submission's folder and returns what is wrong with it. If no save comes within `span_s`,
    the kill comes then. A kill after the training's end is repeated earlier, and those after it come earlier
    too: the span was measured on a slower training."""
    kills, share = [], 1.0
    for number, drawn in enumerate(kill_moments(count, seed, span_s), 1):
        for repeat in range(MOST_REPEATS + 1):
            share /= 2 if repeat else 1
            moment = replace(drawn, seconds=drawn.seconds * share)
            kill = _one_kill(number, moment, start, check, span_s * share, first_limit_s)
            if not kill.is_late:
                break
        kills.append(kill)
        on_kill(kill)
    return KillReport(seed, tuple(kills))


def _one_kill(
    number: int,
    moment: KillMoment,
    start: Callable[[], RunningContainer],
    check: Callable[[Path], str | None],
    span_s: float,
    first_limit_s: float,
) -> Kill:
    began = time.monotonic()
    container = start()
    try:
        first = _wait(container, container.place.is_dir, began + first_limit_s)
        first_s = time.monotonic() - began
        if first:
            _wait(container, lambda: False, began + first_s + moment.seconds)
            if moment.changes:
                _wait_in_save(container, moment.changes, began + first_s + span_s)
        ended = not container.is_running()
    finally:
        container.kill()
    none = f"no submission within {first_s:.0f} s" + (": the training ended" if ended else "")
    return Kill(
        number=number,
        moment=moment,
        in_save=any(entry.name.endswith(".new") for entry in _beside(container.place)),
        ended=ended,
        problem=check(container.place) if first else none,
    )


def _wait(container: RunningContainer, done: Callable[[], bool], until: float) -> bool:
    while not done():
        left = until - time.monotonic()
        if left <= 0 or not container.is_running():
            return done()
        time.sleep(min(left, _LOOK_S))
    return True


def _wait_in_save(container: RunningContainer, changes: int, until: float) -> None:
    """Return at the given change of the directory."""
    before, seen, looks = _state(container.place), 0, 0
    while seen < changes and time.monotonic() < until:
        time.sleep(_LOOK_IN_SAVE_S)
        now, looks = _state(container.place), looks + 1
        if now != before:
            before, seen = now, seen + 1
        if looks % 1000 == 0 and not container.is_running():
            return


def _beside(place: Path) -> Iterator[os.DirEntry[str]]:
    """Iterate over what the trainer keeps beside its submission while it writes a better one."""
    try:
        with os.scandir(place.parent) as entries:
            yield from (entry for entry in entries if entry.name.startswith(f".{place.name}."))
    except OSError:
        return


def _state(place: Path) -> tuple[object, ...]:
    """Return a value that changes with the submission and the files beside it."""
    found: list[object] = []
    for entry in _beside(place):
        try:
            if entry.is_dir(follow_symlinks=False):
                found += [(path.name, path.stat().st_size) for path in sorted(Path(entry.path).iterdir())]
            found.append((entry.name, entry.inode()))
        except OSError:  # it has just been renamed or removed
            found.append(entry.name)
    try:
        found.append(place.stat().st_ino)
    except OSError:
        found.append(None)
    return tuple(found)
