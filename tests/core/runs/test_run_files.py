"""The files of one attempt, and task files for `god-miner eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.domain.errors import ConfigError
from core.domain.evaluation import Era
from core.domain.tasks import InstructDataset, TaskType
from core.runs.run_files import EXIT_OF, EvalTask, HeldOutScore, RunEnd, RunResult, RunSpec, TrainerExitCode
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
    assert RunResult(end=end, submission=True).exit_code is TrainerExitCode.OK
    assert RunResult(end=end, submission=False).exit_code is EXIT_OF.get(end, TrainerExitCode.CRASHED)
    assert TrainerExitCode.OK not in EXIT_OF.values()


def test_better_means_what_the_metric_says() -> None:
    low, high = (HeldOutScore(value=value, step=1) for value in (0.1, 0.2))
    assert low.beats(None)
    assert low.beats(high)
    assert not high.beats(low)
    assert high.model_copy(update={"lower_is_better": False}).beats(low)


CHAT = {"chat_template": "chatml", "chat_column": "conversations"}


def written(folder: Path, content: object) -> Path:
    file = folder / "task.json"
    file.write_text(json.dumps(content))
    return file


def test_the_data_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    task = EvalTask.read(written(tmp_path, {"dataset_type": CHAT, "data": "sub/rows.json"}))
    assert task.data == str(tmp_path / "sub/rows.json")
    assert (task.task_type, task.era, task.kl_coefficient) == (TaskType.CHAT, Era.OFFERS, None)


def test_a_tournaments_evaluation_is_asked_for_by_its_year(tmp_path: Path) -> None:
    content = {"dataset_type": CHAT, "data": "/d", "era": "2026", "kl_coefficient": 0.5}
    task = EvalTask.read(written(tmp_path, content))
    assert (task.era, task.kl_coefficient) == (Era.TOURNAMENTS, 0.5)


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"dataset_type": CHAT}, "data"),
        ({"data": "x"}, "dataset_type"),
        ({"dataset_type": CHAT, "data": ""}, "data"),
        ({"dataset_type": CHAT, "data": "x", "era": "1999"}, "era"),
        ({"dataset_type": CHAT, "data": "x", "typo": 1}, "typo"),
        ({"dataset_type": CHAT, "data": "x", "kl_coefficient": -1}, "kl_coefficient"),
        ([], "object"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: object, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        EvalTask.read(written(tmp_path, content))


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        EvalTask.read(tmp_path / "none.json")
