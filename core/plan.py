"""The training plan: every number of a run, and the reason for each.

One object is shown, explained, rendered into an engine's configuration, launched, and read again by the
trainer inside the container. It holds no clock and no secret: times are seconds from the moment of planning.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from core.budget import Concession, MemoryBreakdown, TimeBreakdown, Verdict
from core.choices import Engine, Method, Parallelism
from core.data import DatasetFacts
from core.facts import Record
from core.hardware import GpuSet
from core.models import ModelFacts
from core.plan_parts import (
    AdapterPlan,
    BatchPlan,
    ContainerPlan,
    DpoPlan,
    EmaPlan,
    FsdpPlan,
    GrpoPlan,
    ImagePlan,
    LaunchPlan,
    LoaderPlan,
    LrSearchPlan,
    OptimizerPlan,
    PlateauPlan,
    PrecisionPlan,
    Reason,
    SequencePlan,
    StepsPlan,
    TaskSpec,
)

PLAN_VERSION: Literal[1] = 1


class TrainingPlan(Record):
    """Every number of a run."""

    version: Literal[1] = PLAN_VERSION
    task: TaskSpec
    model: ModelFacts
    data: DatasetFacts
    #: What was there to choose from, and what the plan takes.
    available: GpuSet
    gpus: GpuSet
    profile: str
    #: Of the resolved profile: which text led to this plan.
    profile_digest: str = ""
    engine: Engine
    method: Method
    adapter: AdapterPlan | None = None
    parallelism: Parallelism
    fsdp: FsdpPlan | None = None
    batch: BatchPlan
    sequence: SequencePlan
    optimizer: OptimizerPlan
    steps: StepsPlan
    precision: PrecisionPlan = PrecisionPlan()
    loader: LoaderPlan = LoaderPlan()
    ema: EmaPlan | None = None
    plateau: PlateauPlan | None = None
    lr_search: LrSearchPlan | None = None
    dpo: DpoPlan | None = None
    grpo: GrpoPlan | None = None
    image: ImagePlan | None = None
    container: ContainerPlan = ContainerPlan()
    env: dict[str, str] = Field(default_factory=dict)
    launch: LaunchPlan
    seed: int = 42
    #: Keys the operator hands to the engine as they are; they win over everything rendered.
    engine_config: dict[str, JsonValue] = Field(default_factory=dict)
    memory: MemoryBreakdown
    time: TimeBreakdown
    verdict: Verdict
    concessions: tuple[Concession, ...] = ()
    #: What an operator should know: values renamed, ignored or doubtful in today's engine.
    notes: tuple[str, ...] = ()
    #: By dotted path: "optimizer.learning_rate", "batch.micro".
    reasons: dict[str, Reason] = Field(default_factory=dict)
    #: Attempts of this shape that ran out of memory before this plan, newest last.
    oom_steps: tuple[str, ...] = ()

    @model_validator(mode="after")
    def parts_agree(self) -> Self:
        if (self.adapter is None) is not (self.method is Method.FULL):
            raise ValueError(f"method {self.method} and adapter {self.adapter!r} contradict each other")
        if (self.fsdp is None) is (self.parallelism is Parallelism.FSDP):
            raise ValueError(f"parallelism {self.parallelism} and fsdp {self.fsdp!r} contradict each other")
        if self.batch.world_size != self.launch.processes:
            raise ValueError(
                f"{self.launch.processes} processes cannot make a world of {self.batch.world_size}"
            )
        return self

    def to_json(self) -> str:
        """Readable, and equal when read back."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """`ValueError` (pydantic's) for anything that is not a plan of this version."""
        return cls.model_validate_json(text)

    @property
    def digest(self) -> str:
        """The same for the same numbers: sha256 over what runs, without the explanations around it."""
        said = {"memory", "time", "verdict", "concessions", "notes", "reasons", "oom_steps", "available"}
        content = self.model_dump(mode="json", exclude=said)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()
