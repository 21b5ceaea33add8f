from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.errors import ConfigError
from core.domain.evaluation import Era
from core.domain.job_states import EndReason, JobState, StepFailed
from core.domain.tasks import FileFormat, ImageModelType, TaskType
from core.runs.run_files import EvalTask
from miner.jobs.folder import job_folder
from miner.jobs.tasks import (
    OPERATOR,
    job_task_of,
    read_task_file,
    repo_name,
    request_for_display,
    task_spec_of,
)
from miner.store.jobs import JobRow
from tests.doubles.each import each
from tests.miner.jobs.harness import DATASET, VALIDATOR, request


def row(
    raw: bytes, *, validator: str = VALIDATOR, task_type: TaskType = TaskType.INSTRUCT, **more: Any
) -> JobRow:
    values: dict[str, Any] = {
        "id": 7,
        "task_id": "t1",
        "validator": validator,
        "task_type": task_type,
        "model": "a/b",
        "hours": 1.0,
        "expected_repo_name": "r1",
        "state": JobState.QUEUED,
        "end_reason": None,
        "detail": "",
        "counted_from": 0,
        "ended_at": None,
        "started_at": 1000.0,
        "deadline_at": 4600.0,
        "starts": 1,
        "request": raw,
        "submission": None,
        "submitted_at": None,
        "lock_token": 1,
        "updated_at": 1000.0,
    }
    return JobRow(**{**values, **more})


FOLDER = job_folder(Path("data"), 7)


def text_task(**changes: Any) -> str:
    return json.dumps(
        {
            "model": "a/b",
            "hours_to_complete": 1,
            "dataset": "https://e.org/d.json",
            "dataset_type": DATASET,
            **changes,
        }
    )


def test_a_validators_request_is_read_as_it_was_received() -> None:
    task = job_task_of(row(json.dumps({**request(), "something_newer": 1}).encode()), FOLDER)
    assert (task.model, task.file_format, task.is_hostile) == ("tiny/llama", FileFormat.S3, False)
    assert task.data == request()["dataset"]
    assert task.folder == FOLDER.inputs


def test_an_image_request_brings_its_family() -> None:
    raw = {**request(), "dataset_zip": "https://e.org/z.zip", "model_type": "flux"}
    task = job_task_of(row(json.dumps(raw).encode(), task_type=TaskType.IMAGE), FOLDER)
    assert (task.data, task.image_type, task.dataset) == ("https://e.org/z.zip", ImageModelType.FLUX, None)


def test_a_validator_cannot_name_files_of_this_machine() -> None:
    raw = {**request(), "model_folder": "/etc", "dataset": "/etc/passwd"}
    with pytest.raises(StepFailed) as failed:
        job_task_of(row(json.dumps(raw).encode()), FOLDER)
    assert failed.value.reason is EndReason.BAD_DATA
    raw["dataset"] = request()["dataset"]
    assert job_task_of(row(json.dumps(raw).encode()), FOLDER).model_folder is None


def test_the_operator_can(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text("[]")
    task = read_task_file(
        text_task(dataset=str(tmp_path / "d.json"), model_folder=str(tmp_path)), "task.json"
    )
    start = task.start(time.time())
    assert task.task_id.startswith("mine-")
    known = job_task_of(row(start.request, validator=OPERATOR), FOLDER)
    assert (known.data, known.model_folder) == (tmp_path / "d.json", tmp_path)


def test_relative_paths_are_meant_from_the_tasks_file_on(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "models").mkdir()
    task = read_task_file(text_task(dataset="rows.json", model_folder="models"), "task.json", tmp_path)
    assert (task.data, task.model_folder) == (tmp_path / "rows.json", tmp_path / "models")
    # A daemon that is handed the task looks for the same files, wherever it runs.
    again = read_task_file(task.model_dump_json(), "the task", Path("/"))
    assert (again.data, again.model_folder) == (task.data, task.model_folder)
    # Backends refuse paths that go up.
    beside = text_task(dataset="../rows.json", model_folder=".")
    above = read_task_file(beside, "task.json", tmp_path / "models")
    assert (above.data, above.model_folder) == (tmp_path / "rows.json", tmp_path / "models")
    of_hub = read_task_file(text_task(dataset="owner/rows", file_format="hf"), "task.json", tmp_path)
    assert of_hub.data == "owner/rows"


def test_one_file_is_a_task_to_train_and_a_task_to_score_on(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    file = tmp_path / "task.json"
    labels = {"profile": "steady", "tags": ["a"], "note": "first"}
    named = {"task_id": "t", "expected_repo_name": "r", "era": "2026", "kl_coefficient": 0.5, **labels}
    file.write_text(text_task(dataset="rows.json", **named))
    trained = read_task_file(file.read_bytes(), str(file), tmp_path)
    assert (trained.profile, trained.start(0.0).tags) == ("steady", ("a",))
    scored = EvalTask.read(file)
    assert scored.data == str(trained.data)
    assert (scored.dataset_type, scored.era, scored.kl_coefficient) == (
        trained.dataset_type,
        Era.TOURNAMENTS,
        0.5,
    )
    file.write_text(text_task())
    with pytest.raises(ConfigError, match="is not on this machine"):
        EvalTask.read(file)


def test_reward_functions_make_a_task_hostile() -> None:
    dataset = {"field_prompt": "p", "reward_functions": [{"reward_func": "def f(): ...", "reward_weight": 1}]}
    raw = json.dumps({**request(), "dataset_type": dataset}).encode()
    assert job_task_of(row(raw, task_type=TaskType.GRPO), FOLDER).is_hostile


@each(
    ("text", "problem"),
    [
        ("{", "Invalid JSON"),
        ("[]", "object"),
        (text_task(dataset=None), "give one of them"),
        (text_task(dataset_zip="https://e.org/z.zip"), "give one of them"),
        (text_task(dataset_type=None), "needs its `dataset_type`"),
        (text_task(dataset_type={"environment_names": ["x"]}), "tournaments only"),
        (text_task(hours_to_complete=0), "hours_to_complete"),
        (text_task(model_folder="/no/such/folder"), "is not a directory"),
        (text_task(dataset="/no/such/file.json"), "no such file"),
        (text_task(datset="x"), "datset"),
        (text_task(model="../../etc"), "model"),
    ],
)
def test_a_task_file_that_is_wrong_says_how(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.json") as wrong:
        read_task_file(text, "task.json")
    assert problem in str(wrong.value)


@given(
    st.text(max_size=200)
    | st.dictionaries(st.text(max_size=12), st.integers() | st.text(max_size=9)).map(json.dumps)
)
def test_whatever_a_task_file_holds_is_a_task_or_a_list_of_problems(text: str) -> None:
    with pytest.raises(ConfigError):
        read_task_file(text, "task.json")


def test_a_request_of_another_version_is_bad_data() -> None:
    with pytest.raises(StepFailed, match="cannot be read") as failed:
        job_task_of(row(b'{"model": 3}'), FOLDER)
    assert failed.value.reason is EndReason.BAD_DATA


def test_the_planner_is_asked_with_the_hours_that_are_left() -> None:
    job = row(json.dumps(request()).encode())
    assert task_spec_of(job, job_task_of(job, FOLDER), now=1000.0 + 1800).hours == 0.5
    assert task_spec_of(job, job_task_of(job, FOLDER), now=1e9).hours == 0


def test_a_task_without_a_name_is_published_under_its_own() -> None:
    assert repo_name(row(b"{}")) == "r1"
    assert repo_name(row(b"{}", expected_repo_name=None)) == "task-t1"


def test_addresses_that_open_something_are_not_shown() -> None:
    assert "dataset" not in request_for_display(json.dumps(request()).encode())
    assert request_for_display(b"\xff") == {}
    assert request_for_display(b"[1]") == {}
