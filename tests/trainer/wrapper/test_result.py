from __future__ import annotations

from pathlib import Path

from core.progress import StageEvent, StepEvent, line_of
from core.run_files import RunEnd, RunResult
from core.tasks import TaskType
from tests.trainer.tasks import task
from trainer.wrapper.result import conclude


def test_a_result_says_how_fast_and_how_full_the_training_was(tmp_path: Path) -> None:
    run = task(tmp_path, TaskType.INSTRUCT)
    steps = [
        StepEvent(t=1, step=step, tokens_s=speed, memory_bytes=memory)
        for step, speed, memory in ((1, 10.0, 5), (2, 100.0, 9), (3, 110.0, 7), (4, None, None))
    ]
    told = [StageEvent(t=0, stage="train"), *steps]
    Path(run.progress_path).parent.mkdir(parents=True, exist_ok=True)
    Path(run.progress_path).write_bytes(b"".join(map(line_of, told)) + b'{"torn')
    conclude(run, RunEnd.FINISHED, "", steps=4)
    found = RunResult.model_validate_json(Path(run.result_path).read_bytes())
    assert (found.tokens_s, found.memory_bytes) == (100.0, 9)
    Path(run.progress_path).unlink()
    assert conclude(run, RunEnd.CRASHED, "").tokens_s is None
