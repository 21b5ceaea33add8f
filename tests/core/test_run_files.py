"""The files of one attempt."""

from __future__ import annotations

from core.run_files import EXIT_OF, ExitCode, RunEnd, RunResult, RunSpec, Score
from core.tasks import InstructDataset, TaskType
from tests.doubles.each import each


def test_a_run_reads_back_as_it_was_written() -> None:
    run = RunSpec(
        task_id="t",
        task_type=TaskType.INSTRUCT,
        model_id="a/b",
        model_path="/m",
        data_path="/d.json",
        dataset=InstructDataset(field_instruction="q", field_output="a"),
        work_dir="/w",
        submission_dir="/s",
        progress_path="/p",
        result_path="/r",
        stop_path="/stop",
        began_at=1.0,
        end_by=2.0,
        deadline_at=3.0,
    )
    assert RunSpec.from_json(run.to_json()) == run


@each("end", RunEnd)
def test_the_exit_is_zero_exactly_with_a_submission(end: RunEnd) -> None:
    assert RunResult(end=end, submission=True).exit_code is ExitCode.OK
    assert RunResult(end=end, submission=False).exit_code is EXIT_OF.get(end, ExitCode.CRASHED) != ExitCode.OK


def test_better_means_what_the_metric_says() -> None:
    low, high = Score(value=0.1, step=1), Score(value=0.2, step=2)
    assert low.beats(high)
    assert not high.beats(low)
    reward = Score(value=0.2, metric="reward", lower_is_better=False, step=2)
    assert reward.beats(Score(value=0.1, metric="reward", lower_is_better=False, step=1))
    assert low.beats(None)
