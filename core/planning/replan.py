"""A plan with other numbers after a failed attempt: the same wish, in the time that is left."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, JsonValue

from core.budget import Concession, Phase, Refusal, Verdict
from core.choices import Parallelism
from core.facts import Record
from core.plan import TrainingPlan
from core.plan_parts import BatchPlan, FsdpPlan, SequencePlan
from core.planning.memory import memory_of
from core.planning.schedule import Cadence, Rates, count_of, most_steps
from core.planning.sequences import How, Sequences, picture_sequences, text_sequences
from core.planning.setup import Setup
from core.planning.speed import step_time
from core.units import show_seconds

#: Starting and loading again, where the plan no longer says what they took.
RESTART_S = 120.0


class OutOfMemory(Record):
    """What is known of the failure."""

    #: "train", "evaluation" or "generation", as the trainer's progress says.
    moment: str = "train"
    #: Since the plan was made.
    elapsed_s: float = Field(default=0.0, ge=0)
    #: Another job was on the same GPUs.
    neighbours: bool = False
    #: GPUs that the next attempt could have, those of this one included. None: no more than it had.
    available: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class Rung:
    setup: Setup
    field: str
    wanted: JsonValue
    got: JsonValue
    exclusive: bool = False

    def __str__(self) -> str:
        return f"{self.field} {self.wanted} → {self.got}"


def replanned(plan: TrainingPlan, old: Setup, rung: Rung, failure: OutOfMemory) -> TrainingPlan:
    """The same wish with the new numbers, in the time that is left."""
    new = rung.setup
    seq = _sequences(plan, new)
    step_s = plan.time.step_s * _relative(plan, old, new, seq)
    why = f"out of memory in {failure.moment}"
    given = Concession(field=rung.field, wanted=rung.wanted, got=rung.got, reason=why)
    changed = _timed(plan, new, seq, step_s, failure)
    return plan.model_copy(
        update={
            **changed,
            **_widened(plan, new),
            "batch": BatchPlan(
                micro=new.micro,
                accumulation=new.accumulation,
                world_size=new.world,
                eval_micro=new.eval_micro,
            ),
            "sequence": _sequence(plan, seq),
            "precision": plan.precision.model_copy(update={"gradient_checkpointing": new.checkpointing}),
            "image": plan.image and new.picture and _image(plan, new),
            "grpo": plan.grpo and plan.grpo.model_copy(update={"whole_layers": new.whole}),
            "memory": memory_of(new, plan.memory.budget_bytes),
            "concessions": (*plan.concessions, given),
            "oom_steps": (*plan.oom_steps, str(rung)),
            "launch": plan.launch.model_copy(
                update={
                    "processes": new.world,
                    "exclusive": plan.launch.exclusive or rung.exclusive,
                }
            ),
        }
    )


def _widened(plan: TrainingPlan, new: Setup) -> dict[str, object]:
    sharded = new.parallelism is Parallelism.FSDP
    return {
        "gpus": plan.gpus.take(new.world),
        "parallelism": new.parallelism,
        "fsdp": (plan.fsdp or FsdpPlan()) if sharded else None,
        "optimizer": plan.optimizer.model_copy(update={"name": new.optimizer}),
    }


def _image(plan: TrainingPlan, new: Setup) -> object:
    assert plan.image is not None
    assert new.picture is not None
    update = {"resolution": new.picture.resolution, "vae_batch": new.picture.vae_batch}
    return plan.image.model_copy(update=update)


def _sequences(plan: TrainingPlan, setup: Setup) -> Sequences:
    if plan.image is not None and setup.picture is not None:
        return picture_sequences(plan.data, plan.model, setup.picture.resolution, plan.image.repeats)
    old = plan.sequence
    how = How(old.packing, old.group_by_length, setup.generations, setup.completion)
    effective = setup.micro * setup.accumulation * setup.world
    rows = plan.data.rows - plan.steps.eval_rows
    return text_sequences(plan.data, how, setup.length, rows, setup.micro, effective)


def _sequence(plan: TrainingPlan, seq: Sequences) -> SequencePlan:
    return plan.sequence.model_copy(
        update={
            "length": seq.length,
            "prompt_limit": seq.prompt_limit,
            "completion_limit": seq.completion_limit,
            "dropped_share": min(max(seq.dropped_share, 0.0), 1.0),
            "per_epoch": seq.per_epoch,
            "tokens_per_epoch": round(seq.per_epoch * (seq.length if seq.pictures else seq.padded)),
        }
    )


def _relative(plan: TrainingPlan, old: Setup, new: Setup, seq: Sequences) -> float:
    """How much longer a step takes; what has been measured of the speed so far stays in."""
    before = step_time(old, _sequences(plan, old).work(old.micro)).seconds
    return step_time(new, seq.work(new.micro)).seconds / before


def _timed(
    plan: TrainingPlan, new: Setup, seq: Sequences, step_s: float, failure: OutOfMemory
) -> dict[str, object]:
    """Download is done; starting, loading and all else come again."""
    steps, time = plan.steps, plan.time
    names = [phase.name for phase in time.phases]
    at = names.index("train") if "train" in names else 0
    again = [phase for phase in time.phases[:at] if phase.name not in ("download", "so far")]
    again = again or [Phase(name="start", seconds=RESTART_S, why="starting and loading anew")]
    tail = time.phases[-1]
    spent = failure.elapsed_s + sum(phase.seconds for phase in again) + tail.seconds
    slower = step_s / time.step_s if time.step_s else 1.0
    eval_s = time["evaluate"] / (count_of(steps.total, steps.eval_every) + 1) * slower
    rate = Rates(step_s, eval_s, time["save"] / max(count_of(steps.total, steps.save_every), 1))
    per_epoch = max(-(-seq.per_epoch // (new.micro * new.accumulation * new.world)), 1)
    epochs = (steps.wanted or steps.total) / max(steps.per_epoch, 1)
    wanted = max(round(epochs * per_epoch), 1)
    cadence = Cadence(steps.eval_every, steps.save_every, 1, 1, eval_s)
    total = most_steps(wanted, rate, cadence, time.deadline_s - time.reserve_s - spent)
    phases = [
        Phase(name="so far", seconds=failure.elapsed_s, why="attempts that ran out of memory"),
        *again,
        Phase(name="train", seconds=total * step_s, why=f"{total:,} steps of {step_s:.3g} s"),
        Phase(name="evaluate", seconds=(count_of(total, steps.eval_every) + 1) * eval_s if total else 0.0),
        Phase(name="save", seconds=count_of(total, steps.save_every) * rate.save_s),
        tail,
    ]
    verdict = plan.verdict
    if total < 1:
        why = f"{show_seconds(time.deadline_s - time.reserve_s - spent)} are left after the attempts before"
        verdict = Verdict(feasible=False, code=Refusal.NO_TIME, reason=why)
    update = {"total": total, "wanted": wanted, "per_epoch": per_epoch, "epochs": total / per_epoch}
    return {
        "steps": steps.model_copy(update=update),
        "time": time.model_copy(
            update={
                "phases": tuple(phases),
                "step_s": step_s,
                "throughput": new.micro * new.accumulation * new.world * seq.trained / step_s,
                "utilisation": min(time.utilisation / slower, 1.0),
            }
        ),
        "verdict": verdict,
    }
