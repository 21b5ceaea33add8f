"""A tournament's environment task, from the container's arguments to what is uploaded."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("pyspiel")
pytest.importorskip("axolotl")

from core.runs.progress import NoteEvent, StageEvent, SubmissionEvent, parse_events
from core.runs.run_files import RunResult, RunSpec, TrainerExitCode
from tests.trainer.environments import models
from tests.trainer.forks import Fork, ForkServer
from trainer.environments.models import LocalModel
from trainer.environments.prompts import tools
from trainer.runner import command_line
from trainer.runner.planning import PROFILE_VARIABLE
from trainer.runner.processes import StopRequest
from trainer.runner.text_runner import TextRunner

MODEL = "0123456789abcdef"
REPOSITORY = "tournament-t-9f-5Gabc"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture
def places(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a validator mounts them. A server is named that never answers; a thousand dummies are the data."""
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / MODEL).symlink_to(model)
    (tmp_path / "cache" / "datasets").mkdir()
    dummies = json.dumps([{"prompt": "Interact with this environment."}] * 1000)
    (tmp_path / "cache" / "datasets" / "9f_train_data.json").write_text(dummies, encoding="utf-8")
    monkeypatch.setattr(command_line, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(command_line, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setenv("GOD_MINER_WORK", str(tmp_path / "work"))
    monkeypatch.setenv("ENVIRONMENT_SERVER_URLS", "http://192.0.2.1:8000")
    return tmp_path


def asked(places: Path, monkeypatch: pytest.MonkeyPatch, steps: int, *names: str) -> RunSpec:
    profile = places / "profile.yaml"
    targets = {"max_steps": steps, "eval_steps": 2, "save_steps": 2, "val_rows_max": 4, "micro_batch_size": 1}
    profile.write_text(yaml.safe_dump({"extends": "cpu-native", "targets": targets}), encoding="utf-8")
    monkeypatch.setenv(PROFILE_VARIABLE, str(profile))
    arguments = ["--task-id", "9f", "--model", MODEL, "--dataset", "https://example.com/rows.json"]
    arguments += ["--dataset-type", json.dumps({"environment_names": list(names)}), "--task-type", "EnvTask"]
    arguments += ["--file-format", "s3", "--expected-repo-name", REPOSITORY, "--hours-to-complete", "0.15"]
    # From now on, not from when the tests were started.
    monkeypatch.setattr(command_line, "process_start", time.time)
    run = command_line.text_run(arguments)
    Path(run.work_dir).mkdir(parents=True)
    Path(run.submission_dir).parent.mkdir(parents=True)
    return run


def executed(run: RunSpec, forks: ForkServer, started: list[Fork] | None = None) -> RunResult:
    """`started` gets the processes: the one that prepares, and the one that trains."""

    def start(*order: Any) -> Fork:
        process = forks.start(*order, patch="all_rows_are_judged")
        if started is not None:
            started.append(process)
        return process

    return TextRunner(run, StopRequest(Path(run.stop_path)), retries=False, start=start).execute()


def plays(run: RunSpec) -> None:
    """What was submitted is loaded as anybody loads it, and answers a request."""
    submitted = LocalModel(Path(run.submission_dir), base=Path(run.model_path))
    messages = [{"role": "user", "content": "Legal actions:\n1 -> Call"}]
    answer = submitted.answer(messages, tools([1]), max_tokens=4, seed=0)
    assert answer.text is not None or answer.calls


def test_from_the_arguments_to_a_submission(
    places: Path, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asked(places, monkeypatch, 4, "leduc_poker", "chess", "intercode")
    result = executed(run, forks)
    assert result.exit_code is TrainerExitCode.OK, result.detail
    assert (result.submission, result.steps) == (True, 4)
    events = [line.event for line in parse_events(Path(run.progress_path).read_bytes()) if line.event]
    said = [event.text for event in events if isinstance(event, NoteEvent) and event.kind == "data"]
    assert any("'chess' is no environment" in text for text in said)
    assert not [text for text in said if "are lost" in text]
    for name in ("leduc_poker", "intercode"):
        parts = (Path(run.work_dir) / "environments" / name).glob("rows-*.jsonl")
        made = [line for part in parts for line in part.read_text("utf-8").splitlines()]
        assert len(made) >= 64
    assert "generate" in [event.stage for event in events if isinstance(event, StageEvent)]
    plays(run)


def test_a_run_that_is_killed_leaves_a_model_that_plays(
    places: Path, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started = asked(places, monkeypatch, 100, "leduc_poker"), list[Fork]()

    def killed_after_the_first_submission() -> None:
        progress = Path(run.progress_path)
        while True:
            found = parse_events(progress.read_bytes()) if progress.exists() else []
            if any(isinstance(line.event, SubmissionEvent) for line in found):
                break
            time.sleep(0.05)
        started[1].kill()

    killer = threading.Thread(target=killed_after_the_first_submission, daemon=True)
    killer.start()
    result = executed(run, forks, started)
    killer.join()
    assert result.submission
    assert result.exit_code is TrainerExitCode.OK
    plays(run)
