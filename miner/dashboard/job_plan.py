"""The plan of a job: its numbers, what it gave up, and its memory beside what was measured."""

from __future__ import annotations

from collections.abc import Callable

from core.planning.plan import TrainingPlan
from miner.api.jobs import PlanDetails, PlannedSpeed
from miner.dashboard.parts import (
    Column,
    Facts,
    KeyedRows,
    Table,
    Text,
    box,
    duration,
    empty,
    number,
    panel,
    percent,
    set_visible,
    size,
)


class PlanPanel:
    def __init__(self) -> None:
        with box("grid"):
            with panel("Plan", "w5") as self.panel:
                self._facts = Facts()
            with panel("Trade-offs", "w4"):
                self._concessions: KeyedRows[str] = KeyedRows(box("rows"), self._make_concession)
                self._none = empty("The plan gave nothing up.")
            with panel("Memory of one GPU", "w3"):
                self._total = Text("", "small")
                self._terms: Table[tuple[str, int]] = Table(
                    "Memory by purpose",
                    [
                        Column("Purpose", "name"),
                        Column("Planned", _planned, number=True),
                    ],
                    key=_purpose,
                )

    @staticmethod
    def _make_concession(_concession: str) -> Callable[[str], None]:
        with box("stack"):
            what, why = Text("", "strong"), Text("", "small muted")

        def show(concession: str) -> None:
            title, _, reason = concession.partition(": ")
            what.show(title)
            why.show(reason)

        return show

    def show(self, answer: PlanDetails) -> None:
        self._facts.show(_plan_facts(answer.plan, answer.expected))
        set_visible(self._none, self._concessions.show(enumerate(answer.concessions)) == 0)
        memory = answer.memory
        beside = f"measured {size(memory.measured_bytes)}" if memory.measured_bytes else "not measured yet"
        self._total.show(f"planned {size(memory.estimate_bytes)}, {beside}")
        self._terms.show(term for term in memory.terms.items() if term[1])


def _purpose(term: tuple[str, int]) -> str:
    return term[0]


def _planned(term: tuple[str, int]) -> str:
    return size(term[1])


def _plan_facts(plan: TrainingPlan, expected: PlannedSpeed | None) -> dict[str, str | None]:
    batch, adapter, optimizer, steps = plan.batch, plan.adapter, plan.optimizer, plan.steps
    rows = batch.micro * batch.accumulation * batch.world_size
    speed = expected or PlannedSpeed(step_s=0.0, samples_s=0.0, tokens_s=None, mfu=None)
    return {
        "Engine": f"{plan.engine}, {plan.parallelism}",
        "Method": f"{plan.method}, rank {adapter.rank}" if adapter else str(plan.method),
        "Batch": f"{rows} = {batch.micro} × {batch.accumulation} × {batch.world_size} GPUs",
        "Sequence": f"{plan.sequence.length:,} tokens" if plan.sequence else None,
        "Steps": f"{steps.total:,}, {number(steps.epochs, 3)} epochs",
        "Learning rate": f"{optimizer.learning_rate:.3g}, {optimizer.schedule}, {optimizer.name}",
        "Evaluated": f"every {steps.eval_every:,} steps",
        "Step": duration(speed.step_s) if speed.step_s >= 2 else None,
        "Expected": f"{number(speed.tokens_s, 3)} tokens/s" if speed.tokens_s else None,
        "Expected MFU": percent(speed.mfu) if speed.mfu else None,
        "Profile": plan.profile.name,
    }
