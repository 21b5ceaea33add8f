"""The operator's options of a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miner.observe.redact import Redactor
from miner.tournament.rules import TournamentTask

STAND_IN_MODEL = "stand-in/tiny"
#: Shows a line of progress.
Say = Callable[[str], None]
#: Writes down what is known so far.
Save = Callable[[], None]


@dataclass(frozen=True)
class RehearsalInputs:
    """The operator's inputs of one task; the rest is made up."""

    model: Path | None = None
    model_id: str = STAND_IN_MODEL
    data: Path | None = None


@dataclass(frozen=True)
class RehearsalOptions:
    output: Path
    tasks: Sequence[TournamentTask]
    commit: str | None = None
    inputs: Mapping[str, RehearsalInputs] = field(default_factory=dict)
    #: None: what the kind usually gets, or `STAND_IN_HOURS`.
    hours: float | None = None
    #: Directories of datasets that the entry requests, by their names on the hub.
    datasets: Mapping[str, Path] = field(default_factory=dict)
    hub_cache: Path | None = None
    trigger_word: str | None = None
    gpus: tuple[str, ...] = ()
    build_arguments: Mapping[str, str] = field(default_factory=dict)
    build_network: str | None = None
    against: Path | None = None
    #: Kill one more training after its first submission.
    kill: bool = False
    #: Removes secrets from a text.
    hide: Callable[[str], str] = field(default_factory=Redactor)
    #: Leave images, caches and checkpoints behind.
    keep: bool = False
