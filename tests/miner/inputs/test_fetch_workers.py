"""Workers of inputs: a few at a time, each in its turn."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import InstructDataset
from miner.inputs import fetch
from miner.inputs.fetch import InputWorkers
from miner.inputs.messages import MeasureOrder
from tests.doubles.family import children

pytestmark = pytest.mark.process


#: Says nothing, ever.
DEAF = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
#: Ends at once, without an answer.
SHORT = (sys.executable, "-S", "-c", "")


def order(folder: Path) -> MeasureOrder:
    dataset = InstructDataset(field_instruction="q", field_output="a")
    return MeasureOrder(folder=folder, tokenizer=folder / "tokenizer.json", dataset=dataset)


def silent(_what: str, _did: int, _of: int | None) -> None:
    pass


async def test_of_many_jobs_a_few_have_processes_and_the_next_one_comes_when_one_ends(tmp_path: Path) -> None:
    worker = InputWorkers(tmp_path, command=DEAF)
    others = children()
    runs = [
        asyncio.create_task(worker.run(job, order(tmp_path), silent))
        for job in range(3 * fetch.WORKERS_AT_ONCE)
    ]

    async def processes(wanted: int) -> set[int]:
        async with asyncio.timeout(120):
            while len(found := children() - others) != wanted:
                await asyncio.sleep(0.02)
        return found

    try:
        before = await processes(fetch.WORKERS_AT_ONCE)
        runs[0].cancel()
        async with asyncio.timeout(120):
            while (after := await processes(fetch.WORKERS_AT_ONCE)) == before:
                await asyncio.sleep(0.02)
        assert len(after & before) == fetch.WORKERS_AT_ONCE - 1
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    assert children() <= others


async def test_the_wait_for_a_turn_does_not_count_against_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "WORKERS_AT_ONCE", 1)
    worker = InputWorkers(tmp_path, command=DEAF)
    first = asyncio.create_task(worker.run(1, order(tmp_path), silent))
    second = asyncio.create_task(worker.run(2, order(tmp_path), silent, 0.1))
    await asyncio.sleep(1)
    assert not second.done()
    first.cancel()
    with pytest.raises(StepFailed, match=r"did not come within 0\.1 s") as caught:
        await second
    assert caught.value.reason is EndReason.NETWORK


async def test_a_worker_without_an_answer_is_a_bug_and_frees_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "WORKERS_AT_ONCE", 1)
    worker = InputWorkers(tmp_path, command=SHORT)
    for _ in range(3):
        with pytest.raises(StepFailed, match="no answer") as caught:
            await worker.run(1, order(tmp_path), silent, 30)
        assert caught.value.reason is EndReason.BUG
