"""Measurements of a card, which come before the priors: `configs/measured/<card>.yaml`.

`python -m benchmarks gpu` writes such a file (docs/gpu.md); none is shipped of a card that nobody has
measured. A run is like a measured one if engine, kind of task, method and compilation are the same, and its
model has at most four times as many parameters, or as few. The nearest counts. A run that has measured itself
corrects its own plan as ever (`time/calibration.py`), and what jobs have taught is relative to this.
"""

from __future__ import annotations

import datetime
import logging
import math
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import yaml
from pydantic import Field

from core.config.files import config_dir
from core.domain.choices import Engine, Method
from core.domain.records import Record
from core.domain.tasks import TaskType
from core.planning.candidate import RunCandidate

log = logging.getLogger(__name__)

FOLDER = "measured"
#: By how much the parameters of a run may differ from a measured one's.
_LIKE = 4.0
#: A faulty measurement must not make plans absurd.
_FASTEST, _SLOWEST = 0.2, 20.0
#: 24 GB: if an estimate is further off, correct the estimate.
MOST_OFFSET_BYTES = 24_000_000_000


class StepKind(StrEnum):
    """The kind of work that a step is."""

    ROWS = "rows"
    PAIRS = "pairs"
    COMPLETIONS = "completions"


def step_kind(task: TaskType) -> StepKind:
    if task.generates:
        return StepKind.COMPLETIONS
    return StepKind.PAIRS if task.has_pairs else StepKind.ROWS


class MeasuredTraining(Record):
    """A training's speed and memory beside the prior's."""

    engine: Engine
    step: StepKind
    method: Method
    compiled: bool
    checkpointing: bool
    params: int = Field(ge=1)
    #: Seconds of a step, relative to the prior.
    slowness: float = Field(ge=_FASTEST, le=_SLOWEST)
    #: The peak of memory less the estimate of the memory model.
    memory_offset_bytes: int = Field(default=0, ge=-MOST_OFFSET_BYTES, le=MOST_OFFSET_BYTES)

    def is_like(self, s: RunCandidate) -> bool:
        same = (self.engine, self.step, self.method, self.compiled)
        if same != (s.engine, step_kind(s.task), s.method, s.compile_mode is not None):
            return False
        return 1 / _LIKE <= s.shape.params / self.params <= _LIKE


class MeasuredCard(Record):
    """A file of `configs/measured`."""

    gpu: str
    date: datetime.date
    #: Of torch, CUDA, transformers, the driver and god-miner.
    versions: dict[str, str] = Field(default_factory=dict)
    trainings: tuple[MeasuredTraining, ...] = ()

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def measured_file(gpu: str) -> Path:
    return config_dir() / FOLDER / f"{gpu}.yaml"


@lru_cache(maxsize=64)
def measured_card(gpu: str) -> MeasuredCard | None:
    """The card's measurements. A file that cannot be read counts as none: the priors are there still."""
    path = measured_file(gpu)
    try:
        return MeasuredCard.model_validate(yaml.safe_load(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError, ValueError) as error:  # ValueError: also of a date like 2026-13-01
        log.warning("%s is left out, plans follow the priors: %s", path, error)
        return None


def like_measured(s: RunCandidate) -> MeasuredTraining | None:
    """The measured training that is most like this one; of several, one that recomputes as it does."""
    return min(
        _alike(s), key=lambda one: (one.checkpointing is not s.checkpointing, _far(one, s)), default=None
    )


def _alike(s: RunCandidate) -> list[MeasuredTraining]:
    card = measured_card(s.kind.name) if s.image is None else None
    return [one for one in card.trainings if one.is_like(s)] if card is not None else []


def _far(one: MeasuredTraining, s: RunCandidate) -> float:
    return abs(math.log(s.shape.params / one.params))


def measured_slowness(s: RunCandidate) -> float:
    """Seconds of a step relative to the prior; 1 where nothing like it was measured."""
    one = like_measured(s)
    return 1.0 if one is None else one.slowness


def measured_offset(s: RunCandidate) -> float:
    """Bytes above the memory model's estimate, recomputed or not. What was less than estimated counts as
    nothing: the next run's peak may come at another moment."""
    return float(max([0, *(one.memory_offset_bytes for one in _alike(s))]))


def prior_source(s: RunCandidate) -> str:
    """Name the source of a plan's speed: "measured on an H100-SXM on 2026-12-01"."""
    card = measured_card(s.kind.name)
    if card is None or like_measured(s) is None:
        return "a prior"
    article = "an" if s.kind.name[0] in "AHLR" else "a"
    return f"measured on {article} {s.kind.name} on {card.date:%Y-%m-%d}"
