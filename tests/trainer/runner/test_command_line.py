"""The validators' command lines, word for word, and the daemon's run file."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.evaluation import Era
from core.domain.tasks import ImageModelType, InstructDataset, TaskType
from core.runs.run_files import RunSpec
from tests.doubles.each import each
from trainer.runner import command_line
from trainer.runner.command_line import UsageError, image_run, parse_hours, process_start, text_run

TEXT = [
    *("--task-id", "0d63e5c4-task", "--model", "unsloth/Llama-3.2-1B", "--dataset", "https://s3/x.json"),
    *("--dataset-type", '{"field_instruction": "instruct", "field_input": null, "field_output": "output"}'),
    *("--task-type", "InstructTextTask", "--file-format", "s3"),
    *("--expected-repo-name", "tournament-t-0d63e5c4-5Gabc", "--hours-to-complete", "2"),
]
IMAGE = [
    *("--task-id", "77", "--model", "org/sdxl", "--dataset-zip", "https://s3/x.zip", "--model-type", "sdxl"),
    *("--expected-repo-name", "repo", "--hours-to-complete", "1"),
]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command_line, "CHECKPOINTS", tmp_path / "checkpoints")
    for name in ("USE_KL", "KL_COEF", "GOD_MINER_WORK", "BASELINE_STATS_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def changed(arguments: list[str], option: str, value: str | None) -> list[str]:
    at = arguments.index(option)
    return arguments[:at] + ([] if value is None else [option, value]) + arguments[at + 2 :]


def test_a_text_task_has_its_files_where_validators_mount_them(places: Path) -> None:
    run = text_run(TEXT)
    assert run.model_path == "/cache/models/unsloth--Llama-3.2-1B"
    assert run.model_id == "unsloth/Llama-3.2-1B"
    assert run.data_path == "/cache/datasets/0d63e5c4-task_train_data.json"
    expected = places / "checkpoints/0d63e5c4-task/tournament-t-0d63e5c4-5Gabc"
    assert run.submission_dir == str(expected)
    assert (run.task_type, run.era) == (TaskType.INSTRUCT, Era.TOURNAMENTS)
    assert isinstance(run.dataset, InstructDataset)
    assert run.plan_path is None


def test_requested_datasets_are_where_validators_mount_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_run(TEXT).requested_data == ()
    monkeypatch.setenv("MINER_DATASETS", "org--one, org--two,,../../etc,a/b")
    monkeypatch.setenv("MINER_DATASETS_DIR", "/cache/miner_datasets")
    folders = ("/cache/miner_datasets/org--one", "/cache/miner_datasets/org--two")
    assert text_run(TEXT).requested_data == folders
    monkeypatch.delenv("MINER_DATASETS_DIR")
    assert text_run(TEXT).requested_data == folders
    monkeypatch.setenv("MINER_DATASETS", "org--one,\udcff--two")
    assert text_run(TEXT).requested_data == folders[:1]


@pytest.mark.parametrize(("value", "path"), [("/a.json", "/a.json"), ("", None), ("\udcff", None)])
def test_the_validators_statistics_are_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, value: str, path: str | None
) -> None:
    assert text_run(TEXT).baseline_stats_path is None
    monkeypatch.setenv("BASELINE_STATS_PATH", value)
    run = text_run(TEXT)
    assert run.baseline_stats_path == path
    assert RunSpec.from_json(run.to_json()) == run


def test_an_image_task_has_its_files_where_validators_mount_them(places: Path) -> None:
    run = image_run([*IMAGE, "--trigger-word", "sks"])
    assert run.data_path == "/cache/datasets/77_tourn.zip"
    assert run.submission_dir == str(places / "checkpoints/77/repo")
    assert (run.image_type, run.trigger_word) == (ImageModelType.SDXL, "sks")


def test_a_dataset_of_the_hub_is_a_folder() -> None:
    arguments = changed(changed(TEXT, "--file-format", "hf"), "--dataset", "org/rows")
    assert text_run(arguments).data_path == "/cache/datasets/org--rows"


@pytest.mark.parametrize(
    ("said", "seconds", "reserves"),
    [("2", 7200, (180, 30)), ("0.75", 2700, (180, 30)), ("0.1", 360, (36, 30)), ("0.05", 180, (18, 18))],
)
def test_hours_count_from_the_containers_start_and_leave_what_saving_takes_or_a_tenth(
    said: str, seconds: float, reserves: tuple[float, float]
) -> None:
    run, pictures = (
        text_run(changed(TEXT, "--hours-to-complete", said)),
        image_run(changed(IMAGE, "--hours-to-complete", said)),
    )
    assert run.deadline_at - run.began_at == pytest.approx(seconds)
    for one, reserve in zip((run, pictures), reserves, strict=True):
        assert one.deadline_at - one.end_by == pytest.approx(reserve)
    assert run.began_at <= time.time()
    assert run.began_at == pytest.approx(process_start(), abs=60)


@each("said", ["0", "0.0", "-1", "nan", "inf", "soon"])
def test_hours_that_are_no_number_to_plan_with_are_taken_for_the_least_there_is(said: str) -> None:
    """Validators cut three quarters of an hour down to zero before they pass it on."""
    assert parse_hours(said) == 0.7


def test_what_a_newer_validator_adds_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    run = text_run([*TEXT, "--gpu-count", "4", "--brand-new"])
    assert run.task_id == "0d63e5c4-task"
    assert "--brand-new" in caplog.text


@pytest.mark.parametrize(
    ("use", "coefficient", "expected"),
    [("1", "0.4", 0.4), ("true", "1.5", 1.5), ("0", "0.4", None), ("1", "", None), ("1", "nan", None)],
)
def test_a_kl_term_is_set_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, use: str, coefficient: str, expected: float | None
) -> None:
    monkeypatch.setenv("USE_KL", use)
    monkeypatch.setenv("KL_COEF", coefficient)
    assert text_run(TEXT).kl_coefficient == expected


@each(
    ("option", "value", "said"),
    [
        ("--task-id", None, "--task-id"),
        ("--task-id", "../../etc", "single names"),
        ("--expected-repo-name", "a/b", "single names"),
        ("--dataset-type", "{", "--dataset-type"),
        ("--dataset-type", '{"a": 1}', "no known type"),
        ("--task-type", "Poetry", "one of InstructTextTask"),
        ("--task-type", "ImageTask", "trainer.image"),
    ],
)
def test_a_command_line_that_is_invalid_is_refused_with_the_reason(
    option: str, value: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        text_run(changed(TEXT, option, value))


def test_an_unknown_image_family_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="one of sdxl, flux"):
        image_run(changed(IMAGE, "--model-type", "dall-e"))


def test_a_run_file_is_taken_as_it_is(tmp_path: Path) -> None:
    run = text_run(TEXT)
    path = tmp_path / "run.json"
    path.write_text(run.to_json(), encoding="utf-8")
    assert text_run(["--run", str(path)]) == run
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="task_id"):
        text_run(["--run", str(path)])


def test_scratch_is_never_in_the_folder_that_is_uploaded(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = text_run(TEXT)
    assert not Path(run.work_dir).is_relative_to(run.submission_dir)
    monkeypatch.setenv("GOD_MINER_WORK", str(places / "scratch"))
    assert text_run(TEXT).work_dir == str(places / "scratch/0d63e5c4-task")


@given(st.lists(st.text(max_size=20), max_size=12))
def test_any_command_line_gives_a_run_or_a_reason(words: list[str]) -> None:
    try:
        answer: Any = text_run(words)
    except UsageError as error:
        answer = error
    assert isinstance(answer, RunSpec | UsageError)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=8,
    )
)
def test_any_dataset_type_gives_a_run_or_a_reason(said: Any) -> None:
    try:
        answer: Any = text_run(changed(TEXT, "--dataset-type", json.dumps(said)))
    except UsageError as error:
        answer = error
    assert isinstance(answer, RunSpec | UsageError)
