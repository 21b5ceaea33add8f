"""Jobs: lists, details, live state, logs, curves, plans and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, JsonValue

from core.domain.job_states import EndReason, JobState
from core.domain.records import Record
from core.domain.tasks import TaskType
from core.domain.wire import MinerSubmission
from core.runs.run_files import RunEnd
from miner.api.alerts import RuleAction
from miner.api.base import Answer


@dataclass
class LiveJob:
    """The display state of a job. None: not known yet."""

    job_id: int
    task_id: str
    state: str
    #: What is being done: "model" and "dataset" are fetched, "gpus" are waited for, then the trainer's.
    stage: str = ""
    attempt: int | None = None
    gpus: tuple[str, ...] = ()
    #: Of what is being transferred.
    bytes_done: int | None = None
    bytes_total: int | None = None
    step: int | None = None
    steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_s: float | None = None
    samples_s: float | None = None
    mfu: float | None = None
    #: Share of the time that the GPU waits for data.
    wait: float | None = None
    #: Speed of the latest steps relative to the plan's (`core/planning/time/calibration.py`).
    efficiency: float | None = None
    #: Of the GPU that uses the most, and what the plan expects of each.
    memory_bytes: int | None = None
    memory_estimate_bytes: int | None = None
    #: The held-out scores: of the untouched model, the last one, and the best one of this attempt's training.
    base_score: float | None = None
    score: float | None = None
    best_score: float | None = None
    #: When the job will probably be over, seconds since the epoch; and when it has to be.
    ends_at: float | None = None
    deadline_at: float | None = None
    published: str | None = None
    #: What is being waited for, or went wrong last.
    trouble: str = ""
    #: When the next try begins.
    retry_at: float | None = None

    def clear_run(self) -> None:
        """Remove the numbers of an attempt that is over."""
        self.step = self.steps = self.memory_bytes = self.memory_estimate_bytes = None
        self.epoch = self.loss = self.learning_rate = self.grad_norm = self.ends_at = None
        self.tokens_s = self.samples_s = self.mfu = self.wait = self.efficiency = None


class JobResult(Answer):
    """The result of a training by its own word."""

    attempt: int
    end: RunEnd
    metric: str | None
    base: float | None
    best: float | None
    best_step: int | None
    #: How much better the best is, relative to the base.
    gain: float | None
    steps: int
    seconds: float
    tokens_s: float | None
    memory_bytes: int | None


class JobSummary(Answer):
    """One job in a list."""

    id: int
    task_id: str
    validator: str
    task_type: TaskType
    model: str
    hours: float
    state: JobState
    end_reason: EndReason | None
    detail: str
    expected_repo_name: str | None
    submission: MinerSubmission | None
    submitted_at: float | None
    started_at: float
    deadline_at: float
    ended_at: float | None
    took_s: float | None
    starts: int
    #: By the operator.
    tags: tuple[str, ...] = ()
    note: str = ""
    #: Hours of its GPUs, added up, and the dollars for them, or None if one has no price.
    gpu_hours: float = 0.0
    cost: float | None = None
    result: JobResult | None
    #: None: no worker has it.
    live: LiveJob | None

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None


class JobList(Answer):
    """Jobs, newest first. `next`: the value of `before` for earlier ones; None at the end."""

    jobs: list[JobSummary]
    next: int | None


class StartedJob(Answer):
    job_id: int
    task_id: str
    state: JobState


class EndText(Answer):
    """The meaning of an end."""

    operator: str
    validator: str


class AttemptFigures(Answer):
    """Results of one attempt. None: not measured, or not known for this kind of training."""

    steps: int = 0
    seconds: float | None = None
    #: Means over its steps, without the first few.
    tokens_s: float | None = None
    samples_s: float | None = None
    mfu: float | None = None
    #: Share of the time that the GPU waited for data.
    wait: float | None = None
    #: Measured speed relative to the plan's (`core/planning/time/calibration.py`).
    efficiency: float | None = None
    #: Of the GPU that used the most, and what the plan expected of each.
    memory_bytes: int | None = None
    memory_estimate_bytes: int | None = None
    #: Mean share of the time in which its GPUs ran a kernel.
    utilization: float | None = None
    #: The held-out score of the untouched model, and the best of the training.
    base: float | None = None
    best: float | None = None
    metric: str | None = None
    lower_is_better: bool | None = None
    #: How much better the best is, relative to the base.
    gain: float | None = None
    #: The profile's target, and whether the best score misses it.
    target: str | None = None
    target_missed: bool | None = None

    @property
    def standing(self) -> str:
        """The best score and its gain, beside the target."""
        gain = "" if self.gain is None else f", {100 * self.gain:+.3g} % over the base"
        return f"{self.metric} {self.best:.4g}{gain}; wanted: {self.target}" if self.best is not None else ""

    @property
    def target_text(self) -> str:
        """The target, and whether it was reached; empty without one."""
        if self.target is None:
            return ""
        if self.target_missed is None:
            return f"{self.target}: not measured"
        return f"{self.target}: {'not reached' if self.target_missed else 'reached'}"


class AttemptDetails(Answer):
    number: int
    backend: str
    #: The backend's name of it.
    key: str
    gpus: list[str]
    folder: str
    started_at: float
    end_by: float | None
    ended_at: float | None
    end_reason: EndReason | None
    meaning: str | None
    detail: str
    result: JobResult | None
    figures: AttemptFigures
    target: str
    #: The loss in few points.
    losses: list[float]


class JobStep(Answer):
    """A step of a job's work, like fetching its inputs."""

    attempt: int | None
    name: str
    began_at: float
    ended_at: float | None
    outcome: str | None
    detail: str


Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,39}$")]
Note = Annotated[str, Field(max_length=500)]


class JobLabels(Record):
    """Tags and note of a job."""

    tags: Annotated[list[Tag], Field(max_length=20)]
    note: Note


class JobDetails(JobSummary):
    """One job with everything that the store knows of it."""

    meaning: EndText | None
    folder: str
    #: The validator's request, without signed URLs.
    request: dict[str, JsonValue]
    attempts: list[AttemptDetails]
    steps: list[JobStep]
    actions: list[RuleAction]


class LogChunk(Answer):
    attempt: int
    text: str
    #: Where to continue.
    next: str
    #: The attempt has ended, and this was the last of it.
    ended: bool


class RunningJob(JobSummary):
    """An open job in the overview."""

    #: The loss of the attempt that runs, in few points.
    spark: list[float | None]


# Curves


class StepCurves(Answer):
    """Columns of equal length over logged steps."""

    step: list[int]
    t: list[float]
    loss: list[float | None]
    lr: tuple[float | None, ...] = ()
    tokens_s: tuple[float | None, ...] = ()
    samples_s: tuple[float | None, ...] = ()
    mfu: tuple[float | None, ...] = ()
    wait: tuple[float | None, ...] = ()
    memory_bytes: tuple[float | None, ...] = ()
    grad_norm: tuple[float | None, ...] = ()


class EvalPoint(Answer):
    """A held-out score."""

    step: int
    t: float
    score: float
    best: bool


class AttemptSeries(Answer):
    number: int
    backend: str
    started_at: float
    ended_at: float | None
    actions: list[RuleAction]
    figures: AttemptFigures
    steps: StepCurves
    evals: list[EvalPoint]


class JobSeries(Answer):
    """The curves of all attempts over their steps."""

    job_id: int
    metric: str | None
    lower_is_better: bool | None
    attempts: list[AttemptSeries]


# Files


class JobFile(Answer):
    name: str
    bytes: int
    at: float


class JobFiles(Answer):
    """Files of the attempts and the submission, without inputs."""

    job_id: int
    artefacts: list[JobFile]
