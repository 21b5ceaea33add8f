from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.domain.choices import Method, Parallelism, Refusal
from core.planning.budget import (
    MemoryBreakdown,
    MemoryTerm,
    PlanVerdict,
    TimeBreakdown,
    TimelinePhase,
    conceded,
)
from core.planning.plan import EmaPlan, FsdpPlan, ImagePlan, LaunchPlan, PlanReason, TrainingPlan
from core.profile.targets import Targets
from tests.core.builders import plan, resolved
from tests.doubles.each import each


def test_a_plan_read_back_has_the_same_digest_and_text() -> None:
    original = plan(engine_config={"a": [1, {"b": None}], "c": 0.1}, notes=("one",))
    again = TrainingPlan.from_json(original.to_json())
    assert again == original
    assert (again.digest, again.to_json()) == (original.digest, original.to_json())


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


@each(
    ("changes", "same"),
    [
        ({"reasons": {}, "notes": ("x",), "profile": resolved()}, True),
        ({"available": plan().available.take(8)}, True),
        ({"targets": Targets(seed=43)}, False),
        ({"env": {"A": "1"}}, False),
    ],
)
def test_the_digest_is_of_what_runs(changes: dict[str, Any], same: bool) -> None:
    assert (plan(**changes).digest == plan().digest) is same


def test_the_order_of_keys_does_not_change_the_digest() -> None:
    content = json.loads(plan().to_json())
    reordered = TrainingPlan.model_validate(dict(reversed(content.items())))
    assert reordered.digest == plan().digest
    assert len(plan().digest) == 64


@each(
    "text",
    [
        *("", "null", "[]", "{}", '{"version": 3}', "\x00", '{"version": 3, "task": {}}'),
        plan().to_json().replace('"seed"', '"sead"'),
    ],
)
def test_what_is_no_plan_of_this_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        TrainingPlan.from_json(text)


def test_a_plan_of_another_version_is_refused_in_one_line() -> None:
    content = json.loads(plan().to_json())
    del content["targets"]
    with pytest.raises(ValueError, match=r"^it is a plan of version 2, .* reads version 3$"):
        TrainingPlan.from_json(json.dumps({**content, "version": 2, "seed": 42}))


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
    seconds = {"load": 60, "train": 600, "save": 40}
    phases = tuple(TimelinePhase(name=name, seconds=each) for name, each in seconds.items())
    time = TimeBreakdown(
        phases=phases, deadline_s=1000, reserve_s=300, step_s=1, throughput=1, utilisation=0.3
    )
    assert (time.total_s, time.slack_s, time["train"]) == (700, 0, 600)
    assert [time.start_of(name) for name in ("load", "train", "save", "publish")] == [0, 60, 660, 700]


@pytest.mark.parametrize(
    ("wanted", "got", "shown"),
    [(32, 12, "32 → 12"), (None, True, "unset → yes"), (8e-4, 3e-4, "0.0008 → 0.0003"), ("a", "b", "a → b")],
)
def test_a_concession_reads_as_a_sentence(wanted: Any, got: Any, shown: str) -> None:
    concession = conceded("micro_batch_size", wanted, got, "61.2 GB over the budget")
    assert str(concession) == f"micro_batch_size {shown}: 61.2 GB over the budget"


def test_a_plan_with_several_resolutions_is_read() -> None:
    several = ImagePlan(resolutions=(512, 1024))
    assert ImagePlan.model_validate_json(several.model_dump_json()) == several
    assert several.resolution == 1024
