"""Runs inside the training environment: trainings that are cut off or killed, and what is there then.

    training-python -m benchmarks.deadlines_worker '{"cut_offs": 20, "kills": 50, "seed": 0}'

One JSON line per training. The stack is imported once and forked for every training.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.loadable import Faulty, load, whole
from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.runs.progress import SubmissionEvent, parse_events
from core.runs.run_files import RunSpec
from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.tasks import ENDLESS, TEXT_TASKS, planned, task, write_profile
from trainer.runner.processes import StopRequest
from trainer.runner.text_runner import TextRunner
from trainer.session.submission import Submission

#: From the first step on. GRPO's first evaluations answer prompts.
CUT_OFF_S = dict.fromkeys(TEXT_TASKS, (1.0, 6.0)) | {TaskType.GRPO: (3.0, 10.0)}
#: From the first step on: before, between and during submissions, of which there is one every other step.
KILL_S = (0.0, 4.0)
WATCH_S = 0.01


class Watch(threading.Thread):
    """Reads every file of the submission to its end, all the time: once there, it is there for ever."""

    def __init__(self, place: Path) -> None:
        super().__init__(daemon=True)
        self.place, self.looks, self.wrong = place, 0, list[str]()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            self._look()
            time.sleep(WATCH_S)

    def _look(self) -> None:
        if not self.looks and not self.place.exists():
            return
        try:
            whole(self.place)
        except Faulty as error:
            # Another one may have been exchanged for it between two files; then the next look is whole.
            try:
                whole(self.place)
            except Faulty:
                self.wrong.append(str(error))
        self.looks += 1

    def done(self) -> None:
        self._over.set()
        self.join()


class Field:
    def __init__(self, folder: Path, forks: ForkServer, seed: int) -> None:
        self.folder, self.forks, self.chance = folder, forks, random.Random(seed)
        self.model = tiny.save(folder / "model")
        self.endless = write_profile(folder / "endless.yaml", **ENDLESS)
        self.count = 0

    def training(self, kind: TaskType) -> RunSpec:
        self.count += 1
        method = (Method.LORA, Method.FULL)[self.count % 2]
        run = task(self.folder / f"{self.count}", kind, 900, model=self.model)
        return planned(run, self.endless, method=method, log_every=1000)

    def cut_off(self, kind: TaskType) -> dict[str, Any]:
        seconds = self.chance.uniform(*CUT_OFF_S[kind])
        run = self.training(kind)
        watch = Watch(Path(run.submission_dir))
        watch.start()

        def start(command: Any, env: Any, cwd: Path) -> Any:
            patch = "" if "trainer.runner.prepare" in command else f"cut_off:{seconds}"
            return self.forks.start(command, env, cwd, patch)

        result = TextRunner(run, StopRequest(Path(run.stop_path)), retries=False, start=start).execute()
        watch.done()
        launch = Path(run.work_dir) / "launch-1"
        late = (launch / "outcome.json").stat().st_mtime - float((launch / "end_by").read_text())
        return {
            "seconds": seconds,
            "end": result.end.value,
            "steps": result.steps,
            "exit": int(result.exit_code),
            "late_s": late,
            **self._left(run, watch),
        }

    def killed(self, kind: TaskType) -> dict[str, Any]:
        """kill -9 on the whole family, at any instant; then what a second attempt would find."""
        run = self.training(kind)
        watch = Watch(Path(run.submission_dir))
        children: list[Any] = []

        def start(command: Any, env: Any, cwd: Path) -> Any:
            patch = "" if "trainer.runner.prepare" in command else "better_every_time"
            children.append(self.forks.start(command, env, cwd, patch))
            return children[-1]

        runner = TextRunner(run, StopRequest(Path(run.stop_path)), retries=False, start=start)
        thread = threading.Thread(target=runner.execute)
        watch.start()
        thread.start()
        begun = Path(run.work_dir) / "launch-1" / "begun"
        while not begun.exists() and thread.is_alive():
            time.sleep(0.01)
        seconds = self.chance.uniform(*KILL_S)
        time.sleep(seconds)
        children[-1].kill()
        watch.done()
        thread.join(timeout=60)
        Submission(Path(run.submission_dir), run.model_id, self.model, kind).prepare()
        return {"seconds": seconds, **self._left(run, watch)}

    def _left(self, run: RunSpec, watch: Watch) -> dict[str, Any]:
        """Load the result with transformers and peft as anybody would, and ask it for a token."""
        place, reported = Path(run.submission_dir), submissions(run)
        wrong = list(watch.wrong)
        if place.exists():
            try:
                load(place, self.model)
            except Faulty as error:
                wrong.append(str(error))
        elif reported:
            wrong.append("a submission was told of and is not there")
        return {"submissions": reported, "looks": watch.looks, "there": place.exists(), "wrong": wrong}


def submissions(run: RunSpec) -> int:
    path = Path(run.progress_path)
    lines = parse_events(path.read_bytes()) if path.exists() else ()
    return sum(isinstance(line.event, SubmissionEvent) for line in lines)


def main(asked: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="deadlines-") as folder, ForkServer() as forks:
        field = Field(Path(folder), forks, asked["seed"])
        kinds = [TaskType(one) for one in asked.get("tasks", TEXT_TASKS)]
        for kind in kinds:
            for _ in range(asked["cut_offs"]):
                _say("cut off", kind, field.cut_off(kind))
        for number in range(asked["kills"]):
            kind = kinds[number % len(kinds)]
            _say("killed", kind, field.killed(kind))


def _say(what: str, kind: TaskType, found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"what": what, "task": kind.name.lower(), **found}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
