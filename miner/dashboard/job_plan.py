"""The plan of a job: its numbers, what it gave up, and its memory beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

Record = Mapping[str, Any]


class JobPlan:
    def __init__(self) -> None:
        with box("grid"):
            with panel("Plan", "w5") as self.panel:
                self._facts = Facts()
            with panel("Trade-offs", "w4"):
                self._concessions: KeyedRows[Record] = KeyedRows(box("rows"), self._make_concession)
                self._none = empty("The plan gave nothing up.")
            with panel("Memory of one GPU", "w3"):
                self._total = Text("", "small")
                self._terms = Table(
                    "Memory by purpose",
                    [
                        Column("Purpose", lambda term: term["name"]),
                        Column("Planned", lambda term: size(term["bytes"]), number=True),
                    ],
                    key=lambda term: term["name"],
                )

    @staticmethod
    def _make_concession(_concession: Record) -> Any:
        with box("stack"):
            what, why = Text("", "strong"), Text("", "small muted")

        def show(one: Record) -> None:
            what.show(one["what"])
            why.show(one["reason"])

        return show

    def show(self, answer: Record) -> None:
        self._facts.show(_plan_facts(answer["plan"], answer["expected"]))
        concessions = [(place, _concession(one)) for place, one in enumerate(answer["concessions"])]
        set_visible(self._none, self._concessions.show(concessions) == 0)
        memory = answer["memory"]
        measured = memory["measured_bytes"]
        beside = f"measured {size(measured)}" if measured else "not measured yet"
        self._total.show(f"planned {size(memory['estimate_bytes'])}, {beside}")
        self._terms.show({"name": name, "bytes": count} for name, count in memory["terms"].items() if count)


def _concession(one: Any) -> Record:
    if isinstance(one, Mapping):
        return {"what": f"{one['field']} {one['wanted']} → {one['got']}", "reason": str(one["reason"])}
    what, _, reason = str(one).partition(": ")
    return {"what": what, "reason": reason}


def _plan_facts(plan: Record, expected: Record) -> dict[str, str | None]:
    batch, adapter, optimizer = plan["batch"], plan["adapter"], plan["optimizer"]
    rows = batch["micro"] * batch["accumulation"] * batch["world_size"]
    tokens_s, mfu = expected.get("tokens_s"), expected.get("mfu")
    return {
        "Engine": f"{plan['engine']}, {plan['parallelism']}",
        "Method": f"{plan['method']}, rank {adapter['rank']}" if adapter else str(plan["method"]),
        "Batch": f"{rows} = {batch['micro']} × {batch['accumulation']} × {batch['world_size']} GPUs",
        "Sequence": f"{plan['sequence']['length']:,} tokens",
        "Steps": f"{plan['steps']['total']:,}, {number(plan['steps']['epochs'], 3)} epochs",
        "Learning rate": f"{optimizer['learning_rate']:.3g}, {optimizer['schedule']}, {optimizer['name']}",
        "Evaluated": f"every {plan['steps']['eval_every']:,} steps",
        "Step": duration(expected["step_s"]) if (expected.get("step_s") or 0) >= 2 else None,
        "Expected": f"{number(tokens_s, 3)} tokens/s" if tokens_s else None,
        "Expected MFU": percent(mfu) if mfu else None,
        "Profile": plan["profile"],
    }
