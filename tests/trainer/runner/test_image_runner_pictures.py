"""Runs of the picture trainer, by a stand-in of it: what it is told, what its end means, who takes over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES
from core.runs.picture_run import PictureRun
from core.runs.progress import NoteEvent
from core.runs.run_files import RunEnd, RunResult, RunSpec
from tests.core.submission.folders import image_adapter
from tests.trainer.runner.scripted import ScriptedEngine
from tests.trainer.runner.test_image_runner import events, image_run, tournament_cache
from tests.trainer.runner.test_image_runner_ends import finishes
from trainer.handoff import TrainingOutcome, write_record
from trainer.runner import image_files, planning, supervise
from trainer.runner.image_runner import ImageRunner
from trainer.runner.processes import StopRequest
from trainer.session.submission import TrainedSteps

pytestmark = pytest.mark.process

QWEN = ImageModelType.QWEN_IMAGE


@pytest.fixture(autouse=True)
def _container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, ComfyUI, ai-toolkit, a cache, and the files that are fetched at the build."""
    weights = tmp_path / "weights"
    for folder in (weights, tmp_path / "comfyui", tmp_path / "toolkit"):
        folder.mkdir()
    (weights / "qwen_image_vae.safetensors").write_bytes(b"weights")
    (weights / "qwen_2.5_vl_7b_fp8_scaled.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(image_files, "CACHE", tournament_cache(tmp_path / "hf_cache"))
    monkeypatch.setenv(image_files.WEIGHTS_VARIABLE, str(weights))
    monkeypatch.setenv(image_files.COMFYUI_VARIABLE, str(tmp_path / "comfyui"))
    monkeypatch.setenv("GOD_MINER_AI_TOOLKIT", str(tmp_path / "toolkit"))
    monkeypatch.setenv("GOD_MINER_KOHYA", str(tmp_path / "nothing"))
    machine = Hardware(gpus=parse_gpus("1xH100"))
    monkeypatch.setattr(planning, "detect_machine", lambda disk: machine)
    monkeypatch.setattr(supervise, "POLL_S", 0.0)


def qwen_run(folder: Path) -> RunSpec:
    run = image_run(folder / "run", QWEN, 3600.0)
    for name in ("clip_l", "t5xxl_fp16", "ae"):
        (Path(run.model_path) / f"{name}.safetensors").unlink()
    return run


class PictureTrainer:
    """Ends at once; `trained` steps lie in the submission by then."""

    pid, tail = 0, ["a last line"]

    def __init__(self, run: RunSpec, command: Any, end: RunEnd | None, trained: int | None) -> None:
        self.order = PictureRun.read(Path(command[-1]))
        if trained is not None:
            runner = ImageRunner(run, StopRequest(Path(run.stop_path)), False)
            content = image_adapter("qwen-image ai-toolkit", seed=trained)

            def write(folder: Path) -> None:
                (folder / self.order.submission_file).write_bytes(content)

            runner._submission().put(write, None, TrainedSteps(trained, float(trained)))
        if end is not None:
            write_record(Path(self.order.outcome_path), TrainingOutcome(end=end, detail="its own words"))

    def ended(self) -> int | None:
        return 0

    def close(self) -> int:
        return 0


class AskedToStop(PictureTrainer):
    """Asked to stop at its first look; ends by itself at a later one."""

    code: int | None = None
    looks = 0

    def ended(self) -> int | None:
        self.looks += 1
        Path(self.order.stop_path).touch()
        if self.looks > 3:
            write_record(
                Path(self.order.outcome_path), TrainingOutcome(end=RunEnd.STOPPED, detail="by itself")
            )
            self.code = 0
        return self.code


@pytest.mark.parametrize(
    ("trained", "said"), [(None, "asked to stop before the first step"), (0, "by itself")]
)
def test_a_stop_waits_for_the_trainer_once_there_is_something_to_keep(
    tmp_path: Path, trained: int | None, said: str
) -> None:
    run = qwen_run(tmp_path)

    def start(command: Any, env: Any, cwd: Path, on_line: Callable[[str], None]) -> Any:
        return AskedToStop(run, command, None, trained)

    result = ImageRunner(run, StopRequest(Path(run.stop_path)), False, start=start).execute()
    assert (result.end, result.detail, result.submission) == (RunEnd.STOPPED, said, trained is not None)


def carried_out(
    run: RunSpec, end: RunEnd | None, trained: int | None
) -> tuple[RunResult, list[list[str]], PictureRun]:
    commands, orders = list[list[str]](), list[PictureRun]()

    def start(command: Any, env: Any, cwd: Path, on_line: Callable[[str], None]) -> Any:
        commands.append(list(command))
        if "trainer.pictures.train" in command:
            trainer = PictureTrainer(run, command, end, trained)
            orders.append(trainer.order)
            return trainer
        return ScriptedEngine(run, finishes, on_line)

    result = ImageRunner(run, StopRequest(Path(run.stop_path)), False, start=start).execute()
    return result, commands, orders[0]


def notes(run: RunSpec) -> str:
    return "\n".join(f"{one.kind}: {one.text}" for one in events(run) if isinstance(one, NoteEvent))


def test_a_tournaments_run_is_the_picture_trainers(tmp_path: Path) -> None:
    run = qwen_run(tmp_path)
    result, commands, order = carried_out(run, RunEnd.EARLY, 200)
    assert (result.end, result.submission, result.exit_code, len(commands)) == (RunEnd.EARLY, True, 0, 1)
    flow = IMAGE_FAMILIES[QWEN].flow
    assert flow is not None
    assert (order.recipe.rank, order.recipe.rate) == (flow.recipe.rank, flow.recipe.rate)
    assert (order.end_by, order.submission_file) == (run.end_by, "last.safetensors")
    assert order.twin_path == order.model.base_path == str(Path(run.model_path) / "base.safetensors")
    assert {path.suffix for path in Path(order.pictures_dir).iterdir()} <= {".png", ".txt"}


@pytest.mark.parametrize(
    ("end", "trained"), [(RunEnd.BAD_MODEL, None), (RunEnd.OOM, 0), (RunEnd.CRASHED, 0), (None, None)]
)
def test_another_engine_takes_over_where_nothing_could_be_trained(
    tmp_path: Path, end: RunEnd | None, trained: int | None
) -> None:
    run = qwen_run(tmp_path)
    result, commands, _ = carried_out(run, end, trained)
    assert len(commands) == 2
    assert all("run.py" in command[1] for command in commands[1:])
    assert "ai-toolkit takes over from the picture trainer: " in notes(run)
    assert (result.submission, result.exit_code) == (True, 0)


@pytest.mark.parametrize(
    ("end", "trained"), [(RunEnd.CRASHED, 100), (RunEnd.BAD_DATA, None), (RunEnd.CLOCK, 0)]
)
def test_nobody_takes_over_from_a_training_or_where_it_would_fail_too(
    tmp_path: Path, end: RunEnd, trained: int | None
) -> None:
    run = qwen_run(tmp_path)
    result, commands, _ = carried_out(run, end, trained)
    assert len(commands) == 1
    assert (result.end, result.submission) == (end, trained is not None)


def test_a_python_that_cannot_be_started_is_no_end_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = qwen_run(tmp_path)
    monkeypatch.setenv("GOD_MINER_PICTURES_PYTHON", "/nowhere/python")

    def start(command: Any, env: Any, cwd: Path, on_line: Callable[[str], None]) -> Any:
        if "trainer.pictures.train" in command:
            raise FileNotFoundError(2, "No such file or directory", command[0])
        return ScriptedEngine(run, finishes, on_line)

    result = ImageRunner(run, StopRequest(Path(run.stop_path)), False, start=start).execute()
    assert (result.submission, result.exit_code) == (True, 0)
    assert "takes over from the picture trainer: /nowhere/python cannot be started" in notes(run)
