"""Runs inside the training environment: for each seed and task three trainings, scored side by side.

    training-python -m benchmarks.training_worker '{"seconds": 40, "tasks": […], "seeds": […], …}'

One JSON line per task and seed. The stack is imported once and forked for every training.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import upstream
from benchmarks.training_rows import DATASETS, ERA, ROWS, World, base_model
from core.domain.tasks import TaskType
from core.runs.progress import parse_events
from core.runs.run_files import EvalTask, RunSpec
from tests.trainer.forks import ForkServer
from trainer.runner.planning import PROFILE_VARIABLE
from trainer.runner.processes import StopRequest, child_environment
from trainer.runner.text_runner import TextRunner
from trainer.scoring.eval import evaluate

PROFILE = Path(__file__).with_name("training.yaml")
#: Around the training clock: reading rows, making a plan, loading.
AROUND_S = 60.0
#: Nothing of upstream's takes so long beyond its clock.
PATIENCE_S = 240.0


def main(asked: dict[str, Any]) -> None:
    os.environ[PROFILE_VARIABLE] = asked.get("profile") or str(PROFILE)
    with tempfile.TemporaryDirectory(prefix="training-") as folder, ForkServer() as forks:
        for seed in asked["seeds"]:
            world = World(seed)
            model = base_model(Path(folder) / f"base-{seed}", world, asked["pretrain"], seed)
            for name in asked["tasks"]:
                task = TaskType(name)
                place = Path(folder) / f"{task.name.lower()}-{seed}"
                found = Trial(forks, task, seed, world, model, place, asked["seconds"]).run()
                sys.stdout.write(json.dumps({"task": task.name.lower(), "seed": seed, **found}) + "\n")
                sys.stdout.flush()


class Trial:
    """Three trainings on the same rows, from the same base, for as long."""

    def __init__(
        self,
        forks: ForkServer,
        task: TaskType,
        seed: int,
        world: World,
        model: Path,
        folder: Path,
        seconds: float,
    ) -> None:
        self.forks, self.task, self.seed, self.model = forks, task, seed, model
        self.folder, self.seconds = folder, seconds
        train, test = ROWS[task]
        folder.mkdir()
        self.rows = world.rows(task, train)
        (folder / "train.json").write_text(json.dumps(self.rows), encoding="utf-8")
        (folder / "test.json").write_text(json.dumps(world.rows(task, test)), encoding="utf-8")

    def run(self) -> dict[str, Any]:
        reported = {
            "ours": self._ours(),
            "upstream": self._upstream("upstream", capped=True),
            "uncapped": self._upstream("uncapped", capped=False),
        }
        places = [self.folder / name for name in reported]
        task = EvalTask(dataset_type=DATASETS[self.task], data=str(self.folder / "test.json"), era=ERA)
        report = evaluate(task, self.model, places, allow_rewards=True)
        for one in report.models:
            said = reported.setdefault(one.name, {})
            said |= {"score": one.score, "rewards": one.rewards, "kl": one.kl}
        return {"lower": report.lower_is_better, "sides": reported}

    def _ours(self) -> dict[str, Any]:
        """As in a tournament: no plan is given. The clock begins with the base's evaluation."""
        now, work = time.time(), self.folder / "work"
        work.mkdir()
        run = RunSpec.model_validate(
            {
                "task_id": "task",
                "task_type": self.task,
                "model_id": "org/tiny",
                "model_path": str(self.model),
                "data_path": str(self.folder / "train.json"),
                "dataset": DATASETS[self.task],
                "era": ERA,
                "work_dir": str(work),
                "submission_dir": str(self.folder / "ours"),
                "progress_path": str(work / "progress.jsonl"),
                "result_path": str(work / "result.json"),
                "stop_path": str(work / "stop"),
                "began_at": now,
                "end_by": now + self.seconds + AROUND_S,
                "deadline_at": now + self.seconds + AROUND_S + 60,
            }
        )

        def start(command: Any, env: Any, cwd: Path) -> Any:
            training = "trainer.runner.prepare" not in command
            return self.forks.start(command, env, cwd, f"cut_off:{self.seconds}" if training else "")

        result = TextRunner(run, StopRequest(Path(run.stop_path)), retries=True, start=start).execute()
        if not result.submission:
            raise RuntimeError(f"{result.end}: {result.detail}\n{_tail(work)}")
        launch = sorted(work.glob("launch-*"))[-1]
        late = (launch / "outcome.json").stat().st_mtime - float((launch / "end_by").read_text())
        best, base = result.best, result.base
        return {
            "steps": result.steps,
            "end": result.end.value,
            "late_s": late,
            "best": best and best.value,
            "base": base and base.value,
            "notes": [f"{event.kind}: {event.text}" for event in _notes(work)],
        }

    def _upstream(self, name: str, *, capped: bool) -> dict[str, Any]:
        work = self.folder / f"{name}-work"
        config = upstream.write_config(
            work, self.model, DATASETS[self.task], self.rows, capped=capped, seed=self.seed
        )
        more = {upstream.SECONDS: str(self.seconds)}
        command = [sys.executable, "-m", "axolotl.cli.train", str(config)]
        child = self.forks.start(command, child_environment(work, more, (str(work),)), work)
        until = time.time() + self.seconds + PATIENCE_S
        while child.ended() is None and time.time() < until:
            time.sleep(0.1)
        child.close()
        (work / "output").rename(self.folder / name)
        reported = work / "told.json"
        if not reported.exists():
            raise RuntimeError(f"{name} told nothing:\n{_tail(work)}")
        found: dict[str, Any] = json.loads(reported.read_text("utf-8"))
        return found


def _notes(work: Path) -> Iterator[Any]:
    for line in parse_events((work / "progress.jsonl").read_bytes()):
        if line.event is not None and line.event.event == "note":
            yield line.event


def _tail(work: Path) -> str:
    return (work / "log").read_text("utf-8", "replace")[-4000:]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
