"""Everything at once, at random: failing trainings, a daemon that dies, an engine that goes and comes, a hub,
a network and a store that fail, second starts under other names. In any order, the same must hold in the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.run_files import RunEnd
from miner.engines.base import Phase, Why
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason, JobState
from miner.store.writer import StoreUnavailable
from tests.miner.jobs.house import CAP_S, EndedBy, House, Trainer, opened

JOBS, ACTS = 3, 25
ENDS = (RunEnd.FINISHED, RunEnd.FINISHED, RunEnd.EARLY, RunEnd.OOM, RunEnd.NAN, RunEnd.STOPPED)


class Chaos:
    def __init__(self, house: House, seed: int) -> None:
        self.house, self.random = house, Random(seed)
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
                raise EndedBy(random.choice([Why.FAILED, Why.KILLED, Why.OOM_KILLED]), 137)
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
        random, house = self.random, self.house
        task = f"t{random.randrange(JOBS)}"
        act = random.randrange(8)
        if act in (0, 4):
            self.down = False  # a daemon does not start without its books, nor take a start
        match act:
            case 0:
                await house.reborn()
            case 1:
                house.engine.gone = not house.engine.gone
            case 2:
                house.hub.troubles.append(StepFailed(EndReason.NETWORK, "cut"))
            case 3:
                house.inputs.troubles.append(StepFailed(EndReason.NETWORK, "cut"))
            case 4:
                self.names[task] = f"{task}-{random.randrange(5)}"
                again = (
                    house.start(task_id=task, name=self.names[task]) for _ in range(random.randint(1, 3))
                )
                await asyncio.gather(*again)
            case 5:
                house.hub.troubles.append(random.uniform(0, 0.1))
            case 6:
                await asyncio.sleep(random.uniform(0, 0.1))
            case 7:
                self.down = not self.down

    def _break_the_store(self) -> None:
        """While it is down nothing can be read or written."""
        self.down = False
        books, submit, reading = self.house.books, self.house.books.writer.submit, self.house.books.reading

        def writes(work: Any) -> Any:
            if self.down:
                raise StoreUnavailable("the disk is full")
            return submit(work)

        def reads() -> Any:
            if self.down:
                raise StoreUnavailable("the disk is gone")
            return reading()

        books.writer.submit = writes  # type: ignore[method-assign]
        books.reading = reads  # type: ignore[method-assign]

    async def run(self) -> list[int]:
        self.house.engine.default = self.train
        jobs = []
        for number in range(JOBS):
            self.names[f"t{number}"] = f"t{number}-first"
            jobs.append(await self.house.start(task_id=f"t{number}", name=self.names[f"t{number}"]))
        for _ in range(ACTS):
            await self.act()
            await asyncio.sleep(self.random.uniform(0, 0.03))
        self.house.engine.gone = self.down = False
        self.house.hub.troubles.clear()
        return jobs


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_in_whatever_order(tmp_path: Path, seed: int) -> None:
    async with opened(tmp_path / "data") as house:
        chaos = Chaos(house, seed)
        jobs = await chaos.run()
        rows = [await house.over_within(job) for job in jobs]
        await settled(house)
        for row in rows:
            saved = chaos.saved.get(row.task_id)
            row = await house.parts.book.load(row.id)
            if saved:
                assert row.state is JobState.DONE, (row, saved)
                assert row.submission is not None
                assert row.submission.repo == f"me/{chaos.names[row.task_id]}"
                content = house.hub.repos[row.submission.repo]["adapter_model.safetensors"].decode()
                assert float(content.split()[1]) == min(saved), (content, saved)
            else:
                assert row.state is JobState.FAILED, row
        launched = Counter(spec.key for spec in house.engine.submitted)
        assert max(launched.values()) == 1
        attempts = [one for job in jobs for one in await house.attempts(job)]
        assert set(launched) <= {one.key for one in attempts}
        assert all(one.ended_at for one in attempts)
        assert not [run for run in house.engine.runs.values() if run.status.phase is Phase.RUNNING]
        assert not house.fleet.ledger.holds


async def settled(house: House) -> None:
    """Until the last move to another name is done as well."""
    async with asyncio.timeout(CAP_S):
        while house.jobs.working:
            await asyncio.sleep(0.01)
