"""Costs and concessions of a plan: memory by term, time by phase, what it gave up, the verdict."""

from __future__ import annotations

from typing import Self

from pydantic import Field, JsonValue, model_validator

from core.domain.choices import Refusal
from core.domain.records import Record


class PlanVerdict(Record):
    """The plan's feasibility. A refused plan still holds the nearest numbers that were tried."""

    feasible: bool
    #: None exactly when feasible.
    code: Refusal | None = None
    #: One sentence with the deciding number, for the operator and the log.
    reason: str = ""

    @model_validator(mode="after")
    def a_refusal_has_its_code(self) -> Self:
        if self.feasible is (self.code is not None):
            raise ValueError("a refusal has a code and a feasible plan has none")
        return self


class MemoryTerm(Record):
    """One thing in GPU memory at the peak."""

    #: Stable: "weights", "gradients", "optimizer", "adapter", "activations", "logits", "cuda", …
    name: str
    bytes: int = Field(ge=0)
    #: How the number came about, as a phrase.
    why: str = ""


class MemoryPeak(Record):
    """The total at a moment other than the worst: evaluation, generation, the optimizer's step."""

    phase: str
    bytes: int = Field(ge=0)


class MemoryBreakdown(Record):
    """GPU memory of one rank at its worst moment."""

    #: When that is: "backward", "optimizer step", "evaluation", "generation", "saving", …
    phase: str
    terms: tuple[MemoryTerm, ...]
    #: What the plan may use of one GPU: the profile's limit or the GPU's memory, whichever is less.
    budget_bytes: int = Field(ge=0)
    #: The GPU's memory.
    capacity_bytes: int = Field(ge=0)
    #: The other moments, for the explanation.
    other_peaks: tuple[MemoryPeak, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(term.bytes for term in self.terms)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.budget_bytes

    def __getitem__(self, name: str) -> int:
        """The bytes of one term, 0 when it does not occur."""
        return sum(term.bytes for term in self.terms if term.name == name)


class TimelinePhase(Record):
    """A phase of the timeline. Evaluations and saves inside the training are sums, not moments."""

    #: Stable: "download", "generate", "tokenise", "load", "compile", "train", "evaluate", "save", "publish".
    name: str
    seconds: float = Field(ge=0)
    why: str = ""


class TimeBreakdown(Record):
    """From now (0) to the deadline, in seconds."""

    #: In order of time; `start_of` adds them up.
    phases: tuple[TimelinePhase, ...]
    deadline_s: float = Field(ge=0)
    #: Kept free before the deadline.
    reserve_s: float = Field(ge=0)
    #: One optimizer step, accumulation included.
    step_s: float = Field(ge=0)
    #: Trained tokens per second of all GPUs together, padding not counted; images per second for image tasks.
    throughput: float = Field(ge=0)
    #: The assumed share of the peak FLOP/s, as multiplied out in `step_s`.
    utilisation: float = Field(ge=0, le=1)
    #: Whether `step_s` was measured on this run (after recalibration) or is a prior.
    measured: bool = False
    #: Where the prior comes from (`core/planning/measured.py`).
    prior: str = "a prior"

    @property
    def total_s(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def slack_s(self) -> float:
        """Seconds left before the reserve begins; negative when the plan is late."""
        return self.deadline_s - self.reserve_s - self.total_s

    def __getitem__(self, name: str) -> float:
        return sum(phase.seconds for phase in self.phases if phase.name == name)

    def start_of(self, name: str) -> float:
        """When the first phase of that name begins; the end of the timeline if there is none."""
        at = 0.0
        for phase in self.phases:
            if phase.name == name:
                return at
            at += phase.seconds
        return at


class Concession(Record):
    """A target that gave way: `micro_batch_size 32 → 12: 61.2 GB of activations over the budget`."""

    #: The target's name in the profile.
    field: str
    wanted: JsonValue
    got: JsonValue
    #: The number that forced it is in it.
    reason: str

    def __str__(self) -> str:
        return f"{self.field} {_shown(self.wanted)} → {_shown(self.got)}: {self.reason}"


def conceded(field: str, wanted: JsonValue, got: JsonValue, reason: str) -> Concession:
    return Concession(field=field, wanted=wanted, got=got, reason=reason)


def _shown(value: JsonValue) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
