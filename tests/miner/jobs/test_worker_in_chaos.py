"""Everything at once, at random: failing trainings, a daemon that dies, a backend that goes and comes, a hub,
a network and a store that fail, second starts under other names. In any order, the same must hold in the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.domain.job_states import EndReason, JobState, StepFailed
from core.runs.run_files import RunEnd
from miner.backends.base import EndCause, RunPhase
from miner.store.database import StoreUnavailable
from tests.miner.jobs.harness import CAP_S, EndedBy, JobsHarness, Trainer, open_harness

pytestmark = pytest.mark.campaign


JOBS, ACTS = 3, 25
ENDS = (RunEnd.FINISHED, RunEnd.FINISHED, RunEnd.EARLY, RunEnd.OOM, RunEnd.NAN, RunEnd.STOPPED)


class Chaos:
    def __init__(self, harness: JobsHarness, seed: int) -> None:
        self.harness, self.random = harness, Random(seed)
        #: task → the scores of the models that its attempts have left.
        self.saved: dict[str, list[float]] = {}
        self.names: dict[str, str] = {}
        self._break_the_store()

    async def train(self, trainer: Trainer) -> None:
        """Some steps, perhaps models, and one of many ends."""
        random, task = self.random, trainer.run.task_id
        for step in range(1, random.randint(2, 8)):
            trainer.step(step, 10)
            await asyncio.sleep(random.uniform(0, 0.02))
            if random.random() < 0.3:
                self._save(trainer, task, step)
            if random.random() < 0.2:
                trainer.checkpoint(step)
            if random.random() < 0.05:
                raise EndedBy(random.choice([EndCause.FAILED, EndCause.KILLED, EndCause.OOM_KILLED]), 137)
            if trainer.asked_to_stop:
                trainer.end(RunEnd.STOPPED)
                return
        end = random.choice(ENDS)
        if end in (RunEnd.FINISHED, RunEnd.EARLY):
            self._save(trainer, task, 9)
        trainer.end(end, moment="train")

    def _save(self, trainer: Trainer, task: str, step: int) -> None:
        score = round(self.random.uniform(0.1, 2.0), 6)
        best = trainer.__dict__.setdefault("best", score + 1)
        if score < best:  # a trainer keeps its best
            trainer.__dict__["best"] = score
            trainer.save(score, step)
            self.saved.setdefault(task, []).append(score)

    async def act(self) -> None:
        random, harness = self.random, self.harness
        task = f"t{random.randrange(JOBS)}"
        act = random.randrange(8)
        if act in (0, 4):
            self.down = False  # a daemon does not start without its store, nor take a start
        match act:
            case 0:
                await harness.restart()
            case 1:
                harness.backend.gone = not harness.backend.gone
            case 2:
                harness.hub.troubles.append(StepFailed(EndReason.NETWORK, "cut"))
            case 3:
                harness.inputs.troubles.append(StepFailed(EndReason.NETWORK, "cut"))
            case 4:
                self.names[task] = f"{task}-{random.randrange(5)}"
                again = (
                    harness.start(task_id=task, name=self.names[task]) for _ in range(random.randint(1, 3))
                )
                await asyncio.gather(*again)
            case 5:
                harness.hub.troubles.append(random.uniform(0, 0.1))
            case 6:
                await asyncio.sleep(random.uniform(0, 0.1))
            case 7:
                self.down = not self.down

    def _break_the_store(self) -> None:
        """While it is down nothing can be read or written."""
        self.down = False
        store = self.harness.store
        submit, read_now = store.writer.submit, store.read_now

        def writes(work: Any) -> Any:
            if self.down:
                raise StoreUnavailable("the disk is full")
            return submit(work)

        def reads(*query: Any, **more: Any) -> Any:
            if self.down:
                raise StoreUnavailable("the disk is gone")
            return read_now(*query, **more)

        store.writer.submit = writes  # type: ignore[method-assign]
        store.read_now = reads  # type: ignore[method-assign]

    async def run(self) -> list[int]:
        self.harness.backend.default = self.train
        jobs = []
        for number in range(JOBS):
            self.names[f"t{number}"] = f"t{number}-first"
            jobs.append(await self.harness.start(task_id=f"t{number}", name=self.names[f"t{number}"]))
        for _ in range(ACTS):
            await self.act()
            await asyncio.sleep(self.random.uniform(0, 0.03))
        self.harness.backend.gone = self.down = False
        self.harness.hub.troubles.clear()
        return jobs


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_in_whatever_order(tmp_path: Path, seed: int) -> None:
    async with open_harness(tmp_path / "data") as harness:
        chaos = Chaos(harness, seed)
        jobs = await chaos.run()
        rows = [await harness.over_within(job) for job in jobs]
        await settled(harness)
        for row in rows:
            saved = chaos.saved.get(row.task_id)
            row = await harness.row(row.id)
            if saved:
                assert row.state is JobState.DONE, (row, saved)
                assert row.submission.repo == f"me/{chaos.names[row.task_id]}"
                content = harness.hub.repos[row.submission.repo]["adapter_model.safetensors"].decode()
                assert float(content.split()[1]) == min(saved), (content, saved)
            else:
                assert row.state is JobState.FAILED, row
        launched = Counter(spec.key for spec in harness.backend.submitted)
        assert max(launched.values()) == 1
        attempts = [attempt for job in jobs for attempt in await harness.attempts(job)]
        assert set(launched) <= {attempt.key for attempt in attempts}
        assert all(attempt.ended_at for attempt in attempts)
        assert not [run for run in harness.backend.runs.values() if run.status.phase is RunPhase.RUNNING]
        assert not harness.fleet.ledger.reservations


async def settled(harness: JobsHarness) -> None:
    """Until the last move to another name is done as well."""
    async with asyncio.timeout(CAP_S):
        while harness.jobs.running_workers:
            await asyncio.sleep(0.01)
