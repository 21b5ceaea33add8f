from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.domain.choices import Method, Parallelism, Refusal
from core.planning.budget import (
    Concession,
    MemoryBreakdown,
    MemoryTerm,
    PlanVerdict,
    TimeBreakdown,
    TimelinePhase,
)
from core.planning.plan import EmaPlan, FsdpPlan, LaunchPlan, PlanReason, TrainingPlan
from tests.core.builders import plan
from tests.doubles.each import each


def test_a_plan_read_back_is_the_same_plan() -> None:
    original = plan(
        ema=EmaPlan(decay=0.999),
        env={"NCCL_NTHREADS": "8", "ü": "✓"},
        engine_config={"a": [1, {"b": None}], "c": 0.1},
        concessions=(Concession(field="micro_batch_size", wanted=32, got=12, reason="61.2 GB"),),
        notes=("one",),
    )
    again = TrainingPlan.from_json(original.to_json())
    assert again == original
    assert again.digest == original.digest
    assert again.to_json() == original.to_json()


@given(
    rate=st.floats(1e-300, 1.0, exclude_min=True),
    decay=st.floats(0, 1, exclude_min=True, exclude_max=True),
    text=st.text(),
    number=st.integers(1, 2**63),
)
def test_no_number_or_letter_changes_on_the_way(rate: float, decay: float, text: str, number: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    base = plan()
    original = plan(
        optimizer=base.optimizer.model_copy(update={"learning_rate": rate}),
        ema=EmaPlan(decay=decay, every=number),
        env={"A": text},
        reasons={text: PlanReason(text=text)},
    )
    assert TrainingPlan.from_json(original.to_json()) == original


def test_the_digest_ignores_explanations() -> None:
    base = plan()
    assert plan(reasons={}, notes=("x",), oom_steps=("y",)).digest == base.digest
    assert plan(available=base.available.take(8)).digest == base.digest
    assert plan(seed=43).digest != base.digest
    assert plan(env={"A": "1"}).digest != base.digest


def test_the_digest_is_the_same_in_every_process() -> None:
    """Written down once: a change of this value forgets what was remembered of earlier runs."""
    content = json.loads(plan().to_json())
    reordered = TrainingPlan.model_validate(dict(reversed(list(content.items()))))
    assert reordered.digest == plan().digest
    assert len(plan().digest) == 64


@each("text", ["", "null", "[]", "{}", '{"version": 2}', "\x00", '{"version": 1, "task": {}}'])
def test_an_invalid_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        TrainingPlan.from_json(text)


def test_an_unknown_key_is_refused() -> None:
    content: dict[str, Any] = json.loads(plan().to_json())
    content["lerning_rate"] = 1
    with pytest.raises(ValidationError, match="lerning_rate"):
        TrainingPlan.from_json(json.dumps(content))


@each(
    "changes",
    [
        {"method": Method.FULL},
        {"adapter": None},
        {"parallelism": Parallelism.FSDP},
        {"fsdp": FsdpPlan()},
        {"launch": LaunchPlan(processes=2)},
    ],
)
def test_contradicting_parts_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"contradict|cannot make"):
        plan(**changes)


def test_a_verdict_has_a_code_exactly_when_it_refuses() -> None:
    assert PlanVerdict(feasible=False, code=Refusal.NO_TIME).code == "no_time"
    for feasible, code in ((True, Refusal.NO_TIME), (False, None)):
        with pytest.raises(ValidationError, match="refusal has a code"):
            PlanVerdict(feasible=feasible, code=code)


def test_memory_adds_up_by_term() -> None:
    terms = (MemoryTerm(name="weights", bytes=16), MemoryTerm(name="cuda", bytes=2))
    memory = MemoryBreakdown(phase="backward", terms=terms, budget_bytes=18, capacity_bytes=20)
    assert (memory.total_bytes, memory["weights"], memory["logits"]) == (18, 16, 0)
    assert memory.fits
    assert not memory.model_copy(update={"budget_bytes": 17}).fits


def test_the_timeline_adds_up_to_the_reserve() -> None:
    time = TimeBreakdown(
        phases=(
            TimelinePhase(name="load", seconds=60),
            TimelinePhase(name="train", seconds=600),
            TimelinePhase(name="save", seconds=40),
        ),
        deadline_s=1000,
        reserve_s=300,
        step_s=1,
        throughput=1,
        utilisation=0.3,
    )
    assert (time.total_s, time.slack_s, time["train"]) == (700, 0, 600)
    assert [time.start_of(name) for name in ("load", "train", "save", "publish")] == [0, 60, 660, 700]


@pytest.mark.parametrize(
    ("wanted", "got", "shown"),
    [(32, 12, "32 → 12"), (None, True, "unset → yes"), (8e-4, 3e-4, "0.0008 → 0.0003"), ("a", "b", "a → b")],
)
def test_a_concession_reads_as_a_sentence(wanted: Any, got: Any, shown: str) -> None:
    said = Concession(field="micro_batch_size", wanted=wanted, got=got, reason="61.2 GB over the budget")
    assert str(said) == f"micro_batch_size {shown}: 61.2 GB over the budget"
