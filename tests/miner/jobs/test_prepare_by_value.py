"""A job's number of GPUs by value: as its offer was decided, and never those of others."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.data.facts import assumed_facts
from core.domain.decisions import Decision, TrainingWorth
from core.domain.job_states import ProgressCallback
from core.domain.keys import TaskKey
from core.domain.tasks import ImageModelType, TaskType
from core.domain.wire import MinerTaskOffer
from core.models.identify import facts_from_name
from core.planning.plan import TrainingPlan
from core.profile.resolve import load_profile
from miner.fleet.base import FleetSnapshot
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs.tasks import OPERATOR
from miner.jobs.timeline import JobTimings
from miner.offers.decide import decide, training_worth
from miner.offers.history import SuccessHistory
from miner.offers.parsed_offer import parse_offer
from miner.offers.policies.load import load_policy
from miner.store.jobs import StartRequest
from tests.miner.jobs.harness import VALIDATOR, JobsHarness, open_harness, request, waits
from tests.miner.offers.builders import offer

LLAMA, HOURS = "meta-llama/Llama-3.1-8B", 4.0
JOB, OTHER = TaskKey(VALIDATOR, "t1"), TaskKey(VALIDATOR, "t2")
POLICY, HISTORY = load_policy("h100x4"), SuccessHistory()


def worth(
    asked: MinerTaskOffer, image_type: ImageModelType | None, fleet: FleetSnapshot, now: float
) -> TrainingWorth:
    parsed, terms = parse_offer(asked, image_type), POLICY.terms
    chances = HISTORY.chances(parsed.kinds, parsed.model.family, parsed.params, terms.success, now)
    return training_worth(parsed, terms, chances, fleet)


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobsHarness]:
    """Four idle H100, and inputs as offers of four hours are assumed to have them."""
    timings = JobTimings(poll_s=0.01)
    async with open_harness(tmp_path / "data", timings, "4xH100", "h100x4", worth=worth) as harness:
        fetch = harness.inputs.fetch

        async def fetched(task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
            data = assumed_facts(TaskType.INSTRUCT, None, HOURS)
            return replace(await fetch(task, on_progress), model=facts_from_name(LLAMA), data=data)

        monkeypatch.setattr(harness.inputs, "fetch", fetched)
        harness.backend.default = waits
        yield harness


def accept(harness: JobsHarness, key: TaskKey) -> Decision:
    now = time.time()
    asked = offer(task_id=key.task_id, hours_to_complete=HOURS)
    fleet = harness.fleet.snapshot(now)
    decision = decide(asked, now, fleet, HISTORY, POLICY, load_profile("h100x4"))
    assert decision.accepted
    assert decision.placement is not None
    assert harness.fleet.reserve(key, decision.placement)
    return decision


async def gpus_of(harness: JobsHarness, job_id: int) -> tuple[str, ...]:
    await harness.until(lambda: bool(harness.backend.runs))
    return (await harness.attempts(job_id))[-1].gpus


async def test_a_job_gets_the_gpus_that_its_offer_reserved(harness: JobsHarness) -> None:
    """Even if others came later and raised the price of a GPU, it keeps its own, and they keep theirs."""
    decision, other = accept(harness, JOB), accept(harness, OTHER)
    assert decision.placement is not None
    assert other.placement is not None
    assert len(decision.placement.gpus) == 2 > len(other.placement.gpus)
    harness.fleet.start(JOB, until=time.time() + HOURS * 3600)
    job = await harness.start(seconds=HOURS * 3600, model=LLAMA)
    assert await gpus_of(harness, job) == decision.placement.gpus
    (held,) = [hold for hold in harness.fleet.ledger.reservations if hold.key == OTHER]
    assert held.gpus == other.placement.gpus


async def test_a_job_keeps_its_reserved_gpus_if_its_inputs_are_smaller_than_assumed(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU would complete them, but later: the other one costs nothing now."""
    decision, fetch = accept(harness, JOB), harness.inputs.fetch

    async def few_rows(task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        return replace(await fetch(task, on_progress), data=assumed_facts(TaskType.INSTRUCT, 2_000))

    monkeypatch.setattr(harness.inputs, "fetch", few_rows)
    harness.fleet.start(JOB, until=time.time() + HOURS * 3600)
    job = await harness.start(seconds=HOURS * 3600, model=LLAMA)
    assert decision.placement is not None
    assert await gpus_of(harness, job) == decision.placement.gpus
    (attempt,) = await harness.attempts(job)
    plan = TrainingPlan.from_json((Path(attempt.folder) / "plan.json").read_text(encoding="utf-8"))
    assert (plan.gpus.count, plan.steps.share) == (2, 1.0)


@pytest.mark.parametrize("another_waits", [False, True])
async def test_an_operators_task_has_the_host_until_another_waits(
    harness: JobsHarness, another_waits: bool
) -> None:
    if another_waits:
        waiting = accept(harness, OTHER).placement
        assert waiting is not None
        harness.fleet.release(OTHER)
        later = replace(waiting, starts_at=time.time() + 600, ends_at=time.time() + 7200)
        assert harness.fleet.reserve(OTHER, later)
    wanted = request("mine", model=LLAMA, hours_to_complete=HOURS)
    start = StartRequest(
        "mine", TaskType.INSTRUCT, LLAMA, HOURS, None, time.time(), json.dumps(wanted).encode()
    )
    job = (await harness.jobs.start_own(start, OPERATOR)).job_id
    assert len(await gpus_of(harness, job)) == (1 if another_waits else 4)
