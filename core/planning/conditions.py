"""A plan's surroundings: the machine, what else is known of the job, and what its failures have taught.

Bounds are of memory, and hold for plans of the same shape on the same kind of GPU. Workarounds leave out what
failed, wherever the next attempt runs. The planner keeps to both: after a failure it plans again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field

from core.domain.choices import Attention, Method, Optimizer
from core.domain.decisions import IDLE_HOST, TrainingWorth
from core.domain.evaluation import Era
from core.domain.hardware import Hardware
from core.domain.records import Record
from core.planning.budget import Concession


class LearnedBounds(Record):
    """Bounds that attempts which ran out of memory have taught; the defaults bound nothing."""

    #: Sequences of a pass, in training and in evaluation.
    micro: int | None = Field(default=None, ge=1)
    eval_micro: int | None = Field(default=None, ge=1)
    checkpointing: bool = False
    length: int | None = Field(default=None, ge=1)
    #: Side of the largest pictures.
    resolution: int | None = Field(default=None, ge=64)
    method: Method | None = None
    #: What was given up for memory is not taken back: rank, the profile's optimizer, the moving average.
    rank: int | None = Field(default=None, ge=1)
    optimizer: Optimizer | None = None
    no_average: bool = False
    #: At least so many GPUs; their weights sharded, at last over all nodes.
    gpus: int | None = Field(default=None, ge=1)
    sharded: bool = False
    over_nodes: bool = False
    #: Sequences of a step: an effective batch that stays, or a smaller one of completions.
    batch: int | None = Field(default=None, ge=1)
    #: GRPO: completions at once on a GPU; layers gathered for a generation; vLLM's share.
    together: int | None = Field(default=None, ge=1)
    gathered_layers: int | None = Field(default=None, ge=0)
    vllm_share: float | None = Field(default=None, ge=0, lt=1)
    #: By the memory model, of what ran out: nothing larger is tried.
    memory_bytes: int | None = Field(default=None, ge=0)
    #: No other job on the same GPUs.
    exclusive: bool = False
    #: Seconds of a step, relative to the prior.
    slowness: float = Field(default=1.0, gt=0)
    #: What gave way, newest last.
    steps: tuple[Concession, ...] = ()

    def for_later_jobs(self) -> Self:
        """The part that does not depend on one job's rows and neighbours."""
        own: dict[str, object] = dict.fromkeys(("rank", "optimizer", "batch", "memory_bytes"))
        steps = [step for step in self.steps if step.field not in ("effective_batch_size", "exclusive")]
        return self.model_copy(update={**own, "no_average": False, "exclusive": False, "steps": tuple(steps)})


def tightest(first: LearnedBounds, second: LearnedBounds) -> LearnedBounds:
    """Both bounds; the slowness is the second's."""
    least = ("micro", "eval_micro", "length", "resolution", "rank", "batch", "together", "gathered_layers")
    update: dict[str, object] = {
        name: _least(getattr(first, name), getattr(second, name))
        for name in (*least, "vllm_share", "memory_bytes")
    }
    either = ("checkpointing", "no_average", "sharded", "over_nodes", "exclusive")
    update |= {name: getattr(first, name) or getattr(second, name) for name in either}
    update["gpus"] = max(first.gpus or 0, second.gpus or 0) or None
    update["method"] = first.method or second.method
    update["optimizer"] = first.optimizer or second.optimizer
    update["steps"] = (*first.steps, *(step for step in second.steps if step not in first.steps))
    return second.model_copy(update=update)


def _least(first: float | None, second: float | None) -> float | None:
    return min((value for value in (first, second) if value is not None), default=None)


class Workarounds(Record):
    """Changes for the next attempts after failures, on any GPU; the defaults change nothing."""

    #: The fastest attention that has not failed.
    attention: Attention | None = None
    no_liger: bool = False
    no_lora_kernels: bool = False
    no_vllm: bool = False
    #: Packages with kernels for state spaces, convolutions and linear attention are not imported.
    no_state_kernels: bool = False
    loader_workers: int | None = Field(default=None, ge=0)
    #: The highest learning rate.
    learning_rate: float | None = Field(default=None, gt=0)
    #: What was changed after which failure, newest last.
    notes: tuple[str, ...] = ()

    def adding(self, note: str, **changes: object) -> Self:
        return self.model_copy(update={**changes, "notes": (*self.notes, note)})


UNBOUNDED, NO_WORKAROUNDS = LearnedBounds(), Workarounds()


@dataclass(frozen=True, slots=True)
class JobConditions:
    """The job's surroundings, as far as its plan depends on them."""

    hardware: Hardware
    #: The base model is on disk already: in a tournament's cache, or from an earlier job.
    model_cached: bool = False
    #: We upload the result ourselves; in tournaments the validator does.
    publishes: bool = True
    #: How long steps took by the validator's measurement, relative to the prior; the RMS of the weights.
    slowness: float = 1.0
    weight_rms: float | None = None
    #: vLLM and flash attention 3 are installed where the training will run.
    vllm: bool = False
    flash_3: bool = False
    #: The picture trainer is there, with what it needs of the evaluator's.
    pictures: bool = False
    #: Whose evaluation the training samples like.
    era: Era = Era.OFFERS
    #: Environments: the rows are made already.
    rows_made: bool = False
    #: The value by which `by_value` chooses the number of GPUs.
    worth: TrainingWorth = IDLE_HOST
    learned: LearnedBounds = UNBOUNDED
    workarounds: Workarounds = NO_WORKAROUNDS
    #: For the plan's own notes.
    notes: tuple[str, ...] = ()
