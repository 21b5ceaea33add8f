"""A real training of each engine, killed at random moments and in the middle of a save: what is there then
is uploaded by the uploader's rules, loaded and scored.

Everything is imported already, and the engine's process alone is killed: the one that writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import pytest

from core.domain.evaluation import Era
from core.domain.tasks import TaskType
from core.runs.progress import ProgressEvent, StageEvent, parse_events
from core.runs.run_files import EvalTask, RunResult, RunSpec
from miner.tournament.rehearsal.upload import as_published, what_is_uploaded
from tests.doubles.kills import Kill, run_kills
from tests.trainer import tiny
from tests.trainer.forks import Fork, ForkServer
from tests.trainer.tasks import plan_of, planned, task, write_profile
from trainer.runner.processes import StopRequest
from trainer.runner.text_runner import TextRunner
from trainer.scoring.eval import evaluate

SEED = int(os.environ.get("GOD_MINER_SEED", "56"))
#: In a campaign; fifty of each engine.
INSTANTS = int(os.environ.get("GOD_MINER_INSTANTS", "1"))
#: From the first submission on, seconds in which kills come.
SPAN_S = 4.0
#: No test of so many trainings would be over in its time.
PARTS = 10
ENGINES = ("native", "axolotl")


@dataclass
class Training:
    """A runner of ours in a thread, its engine in a process of its own."""

    run: RunSpec
    server: ForkServer
    started: list[Fork] = field(default_factory=list)
    results: list[RunResult] = field(default_factory=list)

    def start(self) -> Training:
        runner = TextRunner(self.run, StopRequest(Path(self.run.stop_path)), retries=False, start=self._start)
        self.thread = threading.Thread(target=lambda: self.results.append(runner.execute()))
        self.thread.start()
        return self

    def _start(self, *program: object) -> Fork:
        self.started.append(self.server.start(*program, patch="all_rows_are_judged"))  # type: ignore[arg-type]
        return self.started[-1]

    @property
    def place(self) -> Path:
        return Path(self.run.submission_dir)

    def is_running(self) -> bool:
        return self.thread.is_alive()

    def kill(self) -> None:
        if self.started and self.started[-1].ended() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.started[-1].pid, SIGKILL)
        self.thread.join()

    @property
    def events(self) -> list[ProgressEvent]:
        path = Path(self.run.progress_path)
        data = path.read_bytes() if path.exists() else b""
        return [line.event for line in parse_events(data) if line.event is not None]

    @property
    def stage(self) -> str | None:
        """The last one that it has entered."""
        stages = [event.stage for event in self.events if isinstance(event, StageEvent)]
        return stages[-1] if stages else None

    @property
    def log(self) -> str:
        return "\n".join(line for one in self.started[-1:] for line in one.tail[-20:])


class Killed:
    """Trainings on one tiny model, one after the other."""

    def __init__(self, folder: Path, server: ForkServer, engine: str) -> None:
        self.folder, self.server = folder, server
        self.base = tiny.save(folder / "base")
        targets = {"engine": engine, "max_steps": 3000, "warmup_steps": 0, "num_epochs": 500}
        more: dict[str, object] = {"eval_steps": None, "save_steps": None, "val_rows_max": 4}
        limits = {"max_steps": None, "max_epochs": 1000}
        self.profile = write_profile(folder / "profile.yaml", targets=targets | more, limits=limits)
        rows = folder / "rows.json"
        rows.write_text(json.dumps(tiny.instruct_rows(12, seed=7)), encoding="utf-8")
        self.trainings: list[Training] = []

    def start(self) -> Training:
        place = self.folder / f"run-{len(self.trainings)}"
        run = planned(task(place, TaskType.INSTRUCT, 3600, model=self.base, rows=200), self.profile)
        # Scored every few steps and better each time: many saves. The planner would find that too dear.
        plan = plan_of(run)
        update: dict[str, object] = {"steps": plan.steps.model_copy(update={"eval_every": 3})}
        assert run.plan_path is not None
        Path(run.plan_path).write_text(plan.model_copy(update=update).to_json(), encoding="utf-8")
        training = Training(run, self.server).start()
        self.trainings.append(training)
        return training

    def check(self, place: Path) -> str | None:
        upload = what_is_uploaded(place, "org/tiny")
        if upload.problems:
            return "; ".join(upload.problems)
        repository = as_published(upload, place.parent / "repository")
        dataset = self.trainings[-1].run.dataset
        assert dataset is not None
        rows = EvalTask(dataset_type=dataset, data=str(self.folder / "rows.json"), era=Era.TOURNAMENTS)
        scored = evaluate(rows, self.base, [repository]).models[1]
        if not math.isfinite(scored.score) or scored.over_base is None:
            return f"its score is {scored.score}"
        return None if scored.over_base.mean_gap else "it is the base itself"

    def show(self, kill: Kill) -> None:
        sys.stderr.write(f"{kill}, stage {self.trainings[-1].stage}\n")
        if kill.problem:
            sys.stderr.write(self.trainings[-1].log)


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_twice_it_leaves_what_scores(forks: ForkServer, tmp_path: Path, engine: str) -> None:
    killed = Killed(tmp_path, forks, engine)
    report = run_kills(killed.start, 2, SEED, killed.check, span_s=1.0, on_kill=killed.show)
    assert report.problem is None, report.summary()
    assert [kill.moment.changes > 0 for kill in report.kills] == [False, True]


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("engine", ENGINES)
def test_killed_at_any_instant_it_leaves_what_scores(
    forks: ForkServer, tmp_path: Path, engine: str, part: int
) -> None:
    killed = Killed(tmp_path, forks, engine)
    count = max(2 * INSTANTS // PARTS, 1)
    report = run_kills(killed.start, count, SEED + part, killed.check, span_s=SPAN_S, on_kill=killed.show)
    sys.stderr.write(f"{engine}: {report.summary()}\n")
    assert report.problem is None, report.summary()
