"""The training plan: every number of a run, grouped by subject, and the reason for each.

One object is shown, explained, rendered into an engine's configuration, launched, and read again by the
trainer inside the container. It holds no clock and no secret: times are seconds from the moment of
planning.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from core.data.facts import DatasetFacts
from core.domain.choices import (
    Attention,
    CompileMode,
    Engine,
    EvalMetric,
    LrSchedule,
    Method,
    Optimizer,
    Parallelism,
)
from core.domain.hardware import GpuSet
from core.domain.records import Record
from core.domain.tasks import ImageModelType, TaskType
from core.models.facts import ModelFacts
from core.models.image_families import PictureRecipe
from core.planning.budget import Concession, MemoryBreakdown, PlanVerdict, TimeBreakdown
from core.planning.candidate import RunCandidate
from core.planning.conditions import JobConditions
from core.profile.schema import ResolvedProfile
from core.profile.targets import Targets


class TaskSpec(Record):
    """The task that is planned."""

    task_type: TaskType
    #: From the moment of planning to the deadline.
    hours: float = Field(ge=0)
    image_type: ImageModelType | None = None
    task_id: str | None = None
    #: Tournament tasks may score eval_loss + coefficient · KL to the base model.
    kl_coefficient: float | None = None
    trigger_word: str | None = None


class AdapterPlan(Record):
    """LoRA in any variant. `None` in the plan for a full fine-tune."""

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    dropout: float = Field(ge=0, le=1)
    #: Other ranks, by a pattern of the layers' names.
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    #: Image models: whether the text encoders carry an adapter too.
    text_encoder: bool = False
    #: Of all adapters together.
    params: int = Field(ge=0)


class FsdpPlan(Record):
    """FSDP2: over which GPUs the weights are split."""

    #: Several nodes: shards within each, and copies between them (hybrid). False: shards over all GPUs.
    within_nodes: bool = False


class BatchPlan(Record):
    """Sequences per step (DPO: pairs, GRPO: completions, image tasks: images)."""

    micro: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    world_size: int = Field(ge=1)
    eval_micro: int = Field(default=1, ge=1)

    @property
    def effective(self) -> int:
        return self.micro * self.accumulation * self.world_size


class SequencePlan(Record):
    """The way from rows to sequences."""

    length: int = Field(ge=1)
    packing: bool = False
    group_by_length: bool = False
    pad_to_length: bool = False
    #: DPO and GRPO: the prompt keeps its last `prompt_limit` tokens.
    prompt_limit: int | None = None
    #: GRPO: tokens generated at most.
    completion_limit: int | None = None
    #: Part of the rows that is longer than `length` and is dropped by the engine.
    dropped_share: float = Field(default=0.0, ge=0, le=1)
    #: Trained sequences per epoch, after packing and dropping.
    per_epoch: int = Field(ge=0)
    #: Tokens per epoch that the GPUs work through, padding included.
    tokens_per_epoch: int = Field(ge=0)


class LrStage(Record):
    """One of several stages of the learning rate: a share of the training and a factor on the peak."""

    share: float = Field(gt=0, le=1)
    factor: float = Field(gt=0)


class OptimizerPlan(Record):
    name: Optimizer
    learning_rate: float = Field(gt=0)
    schedule: LrSchedule
    #: Restarts; 1 for every other schedule.
    cycles: int = Field(default=1, ge=1)
    #: The end of the decay as a share of the peak.
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    #: WSD: the last part of the training that decays.
    cooldown_share: float = Field(default=0.0, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, ge=0)
    stages: tuple[LrStage, ...] = ()
    #: Image models: the text encoders' own rate.
    text_encoder_lr: float | None = None
    #: Full fine-tune: keep fp32 master weights beside bf16 ones.
    fp32_master: bool = False


class StepsPlan(Record):
    """Length of the run, and when it evaluates and saves."""

    epochs: float = Field(ge=0)
    #: Optimizer steps of one epoch.
    per_epoch: int = Field(ge=0)
    #: Optimizer steps of the whole training; the engines stop here.
    total: int = Field(ge=0)
    #: Steps asked for; more than `total` when the clock cut them. None: the same.
    wanted: int | None = Field(default=None, ge=0)
    #: Intervals in steps. Saves fall on evaluations: the second is a multiple of the first.
    eval_every: int = Field(ge=1)
    save_every: int = Field(ge=1)
    log_every: int = Field(default=1, ge=1)
    #: Rows held out of the training for evaluation.
    eval_rows: int = Field(default=0, ge=0)
    eval_metric: EvalMetric = EvalMetric.LOSS
    keep_checkpoints: int = Field(default=2, ge=1)
    #: Evaluations without a better one before the training stops, or None for no such stop.
    early_stopping_patience: int | None = None
    load_best: bool = True

    @property
    def share(self) -> float:
        """Share of the requested training that is done."""
        return min(self.total / self.wanted, 1.0) if self.wanted else 1.0


class PrecisionPlan(Record):
    """Number formats and kernels."""

    bf16: bool = True
    fp16: bool = False
    tf32: bool = True
    fp8: bool = False
    attention: Attention = Attention.SDPA
    #: None: not compiled.
    compile_mode: CompileMode | None = None
    gradient_checkpointing: bool = False
    #: Cross-entropy without the full logits in memory (chunked, fused or cut).
    fused_loss: bool = True
    liger: bool = False
    #: Triton kernels of Axolotl for LoRA layers.
    lora_kernels: bool = True


class LoaderPlan(Record):
    workers: int = Field(default=2, ge=0)
    pin_memory: bool = True
    #: None exactly when there are no workers.
    prefetch_factor: int | None = 2
    persistent_workers: bool = False
    drop_last: bool = False


class EmaPlan(Record):
    decay: float = Field(gt=0, lt=1)
    every: int = Field(default=1, ge=1)


class PlateauPlan(Record):
    """A learning rate that follows evaluations: lower on a plateau, slightly higher while the loss falls."""

    factor: float = Field(gt=0, lt=1)
    growth: float = Field(default=1.0, ge=1)
    patience: int = Field(default=2, ge=1)


class LrSearchPlan(Record):
    """Short trainings at other learning rates, before the real one."""

    #: Part of the training time that they may take together.
    share: float = Field(gt=0, le=0.2)
    #: The rate found lies within this factor of the planned one, up and down.
    most: float = Field(default=10.0, ge=1, le=100)
    #: The upper factor of the rate found, if the profile's limit lowers it.
    highest: float | None = Field(default=None, gt=0)
    #: The factor that is tried first (None is the planned rate itself).
    first: float | None = Field(default=None, gt=0)


class DpoPlan(Record):
    #: Reference log-probs computed once before the training instead of in each step.
    precompute_reference: bool = False


class GrpoPlan(Record):
    temperature: float = Field(default=0.9, gt=0)
    #: 0: all tokens.
    top_k: int | None = 50
    vllm: bool = False
    #: vLLM gives its memory back while the training has the GPU.
    vllm_sleep: bool = False
    #: Completions that a GPU generates at once, where all of a step do not fit; the others wait.
    together: int | None = Field(default=None, ge=2)
    #: FSDP without vLLM: the weights of so many layers are gathered once for a generation, those of the
    #: others again for every token.
    whole_layers: int = Field(default=0, ge=0)
    #: Share of the GPU that vLLM takes beside the training.
    vllm_memory_share: float = Field(default=0.3, gt=0, lt=1)


class ImagePlan(Record):
    """Numbers that only image training has, beside its targets."""

    #: Sides of the squares whose area pictures are trained at. ai-toolkit trains every picture at each of
    #: them in turn; kohya takes the largest.
    resolutions: tuple[Annotated[int, Field(ge=64)], ...] = Field(default=(1024,), min_length=1)
    repeats: int = Field(default=1, ge=1)
    vae_batch: int = Field(default=4, ge=1)
    caption_dropout: float = Field(default=0.0, ge=0, le=1)
    cache_latents: bool = True
    cache_text: bool = False
    quantize_base: bool = False
    #: The picture trainer's numbers; with another engine None.
    recipe: PictureRecipe | None = None
    #: It scores candidates on a second copy of the base, loaded as the evaluator loads it.
    twin: bool = False
    #: Interval of the checkpoints: in epochs for kohya; ai-toolkit takes `steps.save_every`.
    save_every_epochs: int = Field(default=10, ge=1)

    @property
    def resolution(self) -> int:
        """The largest."""
        return max(self.resolutions)


class ContainerPlan(Record):
    """The container's limits; None leaves the engine's own."""

    memory_bytes: int | None = None
    shm_bytes: int | None = None
    #: As docker's cpuset: "0-63".
    cpus: str | None = None


class LaunchPlan(Record):
    """The numbers of `accelerate launch`. The port is chosen at launch; `port` is only a preference."""

    processes: int = Field(ge=1)
    #: The processes are as many on each.
    machines: int = Field(default=1, ge=1)
    #: From one machine to the others, bytes/s; decides nothing once there is a plan.
    network: float = Field(default=25e9 / 8, gt=0)
    port: int | None = Field(default=None, ge=1, le=65535)
    #: No other job may share these GPUs: an attempt ran out of memory beside one.
    exclusive: bool = False


class GoalPlan(Record):
    """Targets of the profile for the best held-out score. The training does not depend on them."""

    #: Loss to get below.
    loss: float | None = None
    #: Least improvement, as a share of the base's score.
    gain: float | None = None

    def __str__(self) -> str:
        parts = [f"loss below {self.loss:g}"] if self.loss is not None else []
        parts += [f"{100 * self.gain:.3g} % better than the base"] if self.gain is not None else []
        return ", ".join(parts)


class PlanReason(Record):
    """Why a number is what it is."""

    text: str
    #: "h100x4.yaml:12", "planner", "engine", "model", …
    source: str = "planner"


PLAN_VERSION: Literal[3] = 3


class TrainingPlan(Record):
    """Every number of a run."""

    version: Literal[3] = PLAN_VERSION
    task: TaskSpec
    model: ModelFacts
    data: DatasetFacts
    #: What the plan was made from, beside the three before: an attempt that failed is planned again.
    profile: ResolvedProfile
    conditions: JobConditions
    #: The numbers that memory and time follow from.
    candidate: RunCandidate
    gpus: GpuSet
    #: What the profile asks for this training. The parts below hold what became of it.
    targets: Targets
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
    goal: GoalPlan | None = None
    container: ContainerPlan = ContainerPlan()
    #: What the job asks of a cluster's scheduler: partition, account, …
    slurm: dict[str, str] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    launch: LaunchPlan
    #: The operator's raw keys for the engine; they win over everything rendered.
    engine_config: dict[str, JsonValue] = Field(default_factory=dict)
    memory: MemoryBreakdown
    time: TimeBreakdown
    verdict: PlanVerdict
    concessions: tuple[Concession, ...] = ()
    #: What an operator should know: values renamed, ignored or doubtful in today's engine.
    notes: tuple[str, ...] = ()
    #: By dotted path: "optimizer.learning_rate", "batch.micro".
    reasons: dict[str, PlanReason] = Field(default_factory=dict)

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
        if self.gpus.nodes != self.launch.machines:
            raise ValueError(f"{self.gpus} are not in {self.launch.machines} machines")
        return self

    def to_json(self) -> str:
        """Readable JSON; `from_json` returns an equal plan."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read `to_json`'s text. Raise `ValueError` if it is not a plan of this version."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            version = _version_in(text)
            if version in (None, PLAN_VERSION):
                raise
        raise ValueError(f"it is a plan of version {version}, this program reads version {PLAN_VERSION}")

    @property
    def available(self) -> GpuSet:
        """The GPUs to choose from."""
        return self.conditions.hardware.gpus

    @property
    def oom_steps(self) -> tuple[str, ...]:
        """Targets that gave way after attempts of this shape ran out of memory, newest last."""
        return tuple(f"{step.field} {step.wanted} → {step.got}" for step in self.conditions.learned.steps)

    @property
    def prompt_coverage(self) -> float | None:
        """GRPO: the part of the prompts that the run gets to see."""
        return min(self.steps.epochs, 1.0) if self.grpo is not None else None

    @property
    def digest(self) -> str:
        """SHA-256 of what runs, without explanations: the same for the same numbers."""
        explained = ["memory", "time", "verdict", "concessions", "notes", "reasons"]
        made_from = ["profile", "conditions"]
        left_out: dict[str, bool | set[str]] = dict.fromkeys([*explained, *made_from, "goal"], True)
        left_out["targets"] = {"target_loss", "target_gain"}
        left_out["candidate"] = {"node_gpus"}
        content = self.model_dump(mode="json", exclude=left_out)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def _version_in(text: str | bytes) -> int | None:
    """The version that a plan's JSON names, or None if there is none."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    version = content.get("version") if isinstance(content, dict) else None
    return version if isinstance(version, int) else None
