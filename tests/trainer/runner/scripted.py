"""An image engine of a test's own, which does one thing at each look that the runner takes at it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from core.runs.run_files import RunResult, RunSpec
from tests.core.submission.folders import image_adapter
from trainer.runner.image_runner import ImageRunner
from trainer.runner.main import write_result
from trainer.runner.processes import StopRequest
from trainer.runner.supervise import LaunchResult
from trainer.session.failures import end_of

MADE = {"ai-toolkit": "qwen-image ai-toolkit", "kohya": "sdxl kohya"}


class ScriptedEngine:
    """The engine that the runner starts."""

    pid = 0

    def __init__(self, run: RunSpec, script: EngineScript, on_line: Callable[[str], None]) -> None:
        self.run, self.on_line = run, on_line
        self.tail: list[str] = []
        launches = Path(run.work_dir).glob("launch-*/output")
        self.output = max(launches, key=lambda path: int(path.parent.name.partition("-")[2]))
        self._script, self._code = script(self), None

    def ended(self) -> int | None:
        if self._code is None:
            try:
                next(self._script)
            except StopIteration as end:
                self._code = end.value or 0
        return self._code

    def close(self) -> int:
        return -9 if self._code is None else self._code

    @property
    def total(self) -> int:
        plan = json.loads((self.output.parent / "plan.json").read_text("utf-8"))
        return int(plan["steps"]["total"])

    def says(self, line: str) -> None:
        self.tail.append(line)
        self.on_line(line)

    def steps(self, *steps: int, loss: str = "1.0e-01") -> None:
        for step in steps:
            self.says(f"last: 5%|# | {step}/{self.total} [00:01<00:20, 1.00s/it, lr: 1.0e-04 loss: {loss}]")

    def save(self, step: int, content: bytes | None = None) -> None:
        name = "last.safetensors" if step == self.total else f"last/last_{step:09}.safetensors"
        (self.output / "last").mkdir(exist_ok=True)
        (self.output / name).write_bytes(adapter(step) if content is None else content)

    def stop(self) -> None:
        Path(self.run.stop_path).touch()


EngineScript = Callable[[ScriptedEngine], Generator[None, None, int | None]]


def adapter(step: int, **changes: Any) -> bytes:
    return image_adapter(MADE["ai-toolkit"], seed=step, **changes)


def carried_out(run: RunSpec, *scripts: EngineScript, retries: bool = False) -> RunResult:
    """The runner with one script for each process that it starts; errors end as in `run_to_end`."""
    left = iter(scripts)

    def start(command: Any, env: Any, cwd: Path, on_line: Callable[[str], None]) -> ScriptedEngine:
        return ScriptedEngine(run, next(left), on_line)

    try:
        result = ImageRunner(run, StopRequest(Path(run.stop_path)), retries, start=start).execute()
    except Exception as error:
        result = write_result(run, LaunchResult(end_of(error), str(error)))
    assert next(left, None) is None, "a process was not started"
    return result
