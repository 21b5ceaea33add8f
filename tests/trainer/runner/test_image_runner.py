"""Image runs with stand-in engines: launched, watched through their output, cut off, and never trusted."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import LrSchedule, Optimizer
from core.domain.evaluation import Era
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import image_model_facts
from core.planning.plan import BatchPlan, ImagePlan, OptimizerPlan, StepsPlan, TrainingPlan
from core.runs.progress import ControlEvent, NoteEvent, StepEvent, SubmissionEvent, parse_events
from core.runs.remedies import with_image_steps
from core.runs.run_files import (
    CONTROL_FILE,
    RunControl,
    RunEnd,
    RunResult,
    RunSpec,
    TrainerExitCode,
    write_control,
)
from core.system.wrapper import descendant_pids
from tests.core.recipes.cases import image_plan
from tests.core.submission.folders import image_adapter
from tests.trainer.run_specs import run_spec
from tests.trainer.runner.engines import lay_out
from tests.trainer.runner.pictures import picture_zip
from tests.trainer.session.simulated import safetensors
from trainer.runner import supervise
from trainer.runner.image_runner import ImageRunner
from trainer.runner.processes import StopRequest
from trainer.session.submission import submission_kind

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[3]


def image_run(folder: Path, kind: ImageModelType, seconds: float = 900.0, **changes: Any) -> RunSpec:
    model = folder / "model"
    model.mkdir(parents=True)
    for name in ("base.safetensors", "clip_l.safetensors", "t5xxl_fp16.safetensors", "ae.safetensors"):
        (model / name).write_bytes(safetensors())
    values: dict[str, Any] = {
        "task_type": TaskType.IMAGE,
        "image_type": kind,
        "model_id": "org/pictures",
        "data_path": str(picture_zip(folder / "task.zip")),
        "era": Era.TOURNAMENTS,
    }
    return run_spec(folder, seconds, **{**values, **changes})


def planned(
    run: RunSpec,
    total: int = 60,
    schedule: LrSchedule = LrSchedule.CONSTANT,
    micro: int = 4,
    wanted: int | None = None,
) -> RunSpec:
    """A plan for a GPU that nobody here has: the stand-ins only count."""
    assert run.image_type is not None
    plan = image_plan(
        run.image_type,
        model=image_model_facts("org/pictures", run.image_type),
        batch=BatchPlan(micro=micro, accumulation=1, world_size=1),
        steps=StepsPlan(epochs=30, per_epoch=2, total=total, wanted=wanted, eval_every=10, save_every=10),
        optimizer=OptimizerPlan(name=Optimizer.ADAMW_BNB_8BIT, learning_rate=1e-4, schedule=schedule),
        image=ImagePlan(save_every_epochs=5),
    )
    path = Path(run.work_dir).parent / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return run.model_copy(update={"plan_path": str(path)})


def started(run: RunSpec, **env: str) -> subprocess.Popen[bytes]:
    folder = Path(run.work_dir).parent
    path = folder / "run.json"
    path.write_text(run.to_json(), encoding="utf-8")
    engines = lay_out(folder / "engines", sys.executable)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **engines, **env}
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "trainer.image", "--run", str(path)]
        return subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def finished(run: RunSpec, **env: str) -> tuple[int, RunResult]:
    child = started(run, **env)
    code = child.wait(timeout=600)
    path = Path(run.result_path)
    assert path.exists(), (Path(run.work_dir).parent / "log").read_text("utf-8", "replace")[-3000:]
    return code, RunResult.model_validate_json(path.read_bytes())


def events(run: RunSpec) -> list[Any]:
    data = Path(run.progress_path).read_bytes()
    return [line.event for line in parse_events(data) if line.event is not None]


def tournament_cache(folder: Path) -> Path:
    """Plain directories and flat files, as a validator's downloader leaves them."""
    for name in ("Qwen--Qwen3-VL-4B-Instruct", "Qwen--Qwen3-VL-8B-Instruct"):
        (folder / name).mkdir(parents=True)
    for name in (
        "zimage_turbo_training_adapter_v2",
        "qwen_image_torchao_uint3",
        "ideogram_4_unconditional_lora_r16",
    ):
        (folder / f"{name}.safetensors").write_bytes(safetensors())
    return folder


@pytest.mark.parametrize("kind", ImageModelType)
def test_each_family_is_trained_by_its_engine_and_placed_where_evaluators_look(
    tmp_path: Path, kind: ImageModelType
) -> None:
    run = planned(image_run(tmp_path, kind))
    (tmp_path / "model" / "vae").mkdir()
    # A search path of ours must not hide the engine's own modules.
    env = {"HF_HOME": str(tournament_cache(tmp_path / "hf_cache")), "PYTHONSAFEPATH": "1"}
    code, result = finished(run, **env)
    assert (code, result.end, result.submission) == (0, RunEnd.FINISHED, True), result.detail
    assert not [event for event in events(run) if isinstance(event, NoteEvent) and event.kind == "missing"]
    names = sorted(path.name for path in (tmp_path / "submission").iterdir())
    assert names == ["README.md", "last.safetensors"]
    assert (tmp_path / "submission/last.safetensors").read_bytes()[-2] == 255  # the final one
    said = [event for event in events(run) if isinstance(event, StepEvent)]
    assert said[0].total == 60
    assert said[0].loss is not None


@pytest.mark.parametrize("diffusers", [True, False])
def test_flux_in_an_image_without_sd_scripts_is_trained_by_ai_toolkit(
    tmp_path: Path, diffusers: bool
) -> None:
    """It plans for itself, as in a tournament; a single weight file is more than ai-toolkit can load."""
    run = image_run(tmp_path, ImageModelType.FLUX)
    if diffusers:
        for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
            (tmp_path / "model" / part).mkdir()
    code, result = finished(run, GOD_MINER_KOHYA=str(tmp_path / "no-sd-scripts"))
    if diffusers:
        assert (code, result.submission) == (0, True), result.detail
        assert "ai-toolkit" in next(tmp_path.glob("work/launch-1/command.txt")).read_text()
    else:
        assert (code, result.end) == (TrainerExitCode.BAD_MODEL, RunEnd.BAD_MODEL)
        assert "no transformer directory" in result.detail


def test_for_the_daemon_it_lies_in_the_folder_that_is_published(tmp_path: Path) -> None:
    run = planned(image_run(tmp_path, ImageModelType.SDXL, era=Era.OFFERS))
    assert finished(run)[0] == 0
    assert (tmp_path / "submission/checkpoint/last.safetensors").is_file()


class Endless:
    """In the place of an engine that has written a file and half of the next one, and goes on for ever."""

    pid, tail = 0, ()

    def __init__(self, command: Any, env: Any, cwd: Path, on_line: Callable[[str], None]) -> None:
        (output,) = Path(env["HOME"]).parents[1].glob("launch-*/output")
        (output / "last-000005.safetensors").write_bytes(image_adapter())
        (output / "last.safetensors").write_bytes(image_adapter()[:-3])
        on_line("steps:  5%|#    | 10/10000 [00:01<00:20, 1.00s/it, avr_loss=0.1]")

    def ended(self) -> None:
        """It never does."""

    def close(self) -> int:
        return -9


def test_cut_off_by_the_clock_the_newest_whole_file_is_the_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "dump_stacks", lambda: False)
    run = planned(image_run(tmp_path, ImageModelType.SDXL, seconds=0.5), total=10_000)
    result = ImageRunner(run, StopRequest(Path(run.stop_path)), retries=False, start=Endless).execute()
    assert (result.end, result.submission, result.steps) == (RunEnd.CLOCK, True, 10), result.detail
    assert submission_kind(tmp_path / "submission", TaskType.IMAGE) is not None


def test_what_the_control_file_asks_is_refused_once_with_what_holds(tmp_path: Path) -> None:
    control = tmp_path / CONTROL_FILE
    run = planned(image_run(tmp_path, ImageModelType.SDXL, control_path=str(control)), total=10_000)
    write_control(control, RunControl(number=5, micro=1, duty=0.9))

    class EndlessUntilAnswered(Endless):
        def ended(self) -> None:
            if any(isinstance(event, ControlEvent) for event in events(run)):
                Path(run.stop_path).touch()

    ImageRunner(run, StopRequest(Path(run.stop_path)), retries=False, start=EndlessUntilAnswered).execute()
    (answer,) = [event for event in events(run) if isinstance(event, ControlEvent)]
    assert (answer.number, answer.applied, answer.micro, answer.duty) == (5, False, 4, 1.0)
    assert answer.text == "kohya cannot change while it runs"


def test_asked_to_stop_it_ends_at_once_with_the_newest_file(tmp_path: Path) -> None:
    run = planned(image_run(tmp_path, ImageModelType.QWEN_IMAGE), 10_000)
    child = started(run, STAND_IN_STEP_S="0.1")
    until = time.time() + 600
    while not Path(run.progress_path).exists() or not any(
        isinstance(e, SubmissionEvent) for e in events(run)
    ):
        assert child.poll() is None
        assert time.time() < until
        time.sleep(0.05)
    family = descendant_pids(child.pid)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=120) == 0
    result = RunResult.model_validate_json(Path(run.result_path).read_bytes())
    assert (result.end, result.submission) == (RunEnd.STOPPED, True)
    assert [pid for pid in family if Path(f"/proc/{pid}").exists()] == []


def test_out_of_memory_goes_down_the_ladder(tmp_path: Path) -> None:
    run = planned(image_run(tmp_path, ImageModelType.SDXL))
    code, result = finished(run, STAND_IN_FAULT="oom")
    assert (code, result.end) == (TrainerExitCode.OOM, RunEnd.OOM)
    remedies = [e.text for e in events(run) if isinstance(e, NoteEvent) and e.kind == "remedy"]
    assert len(remedies) >= 2
    assert "micro_batch_size" in remedies[0]


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_file_from_before(tmp_path: Path) -> None:
    run = planned(image_run(tmp_path, ImageModelType.QWEN_IMAGE, era=Era.OFFERS), 10_000)
    code, result = finished(run, STAND_IN_FAULT="nan", STAND_IN_STEP_S="0.05")
    assert code == 0
    assert result.end is RunEnd.NAN
    assert result.submission


def test_an_engine_that_trained_nothing_leaves_no_submission_and_the_reason(tmp_path: Path) -> None:
    run = planned(image_run(tmp_path, ImageModelType.QWEN_IMAGE))
    code, result = finished(run, STAND_IN_FAULT="zero")
    assert (code, result.submission) == (TrainerExitCode.CRASHED, False)
    assert "all add zero" in result.detail
    assert any("all add zero" in e.text for e in events(run) if isinstance(e, NoteEvent))


@pytest.mark.parametrize("fault", ["no data", "crash", "disk"])
def test_an_exit_code_of_zero_without_a_file_is_no_success(tmp_path: Path, fault: str) -> None:
    run = planned(image_run(tmp_path, ImageModelType.SDXL))
    code, result = finished(run, STAND_IN_FAULT=fault)
    expected = {
        "no data": (TrainerExitCode.BAD_DATA, RunEnd.BAD_DATA),
        "disk": (TrainerExitCode.DISK_FULL, RunEnd.DISK_FULL),
        "crash": (TrainerExitCode.CRASHED, RunEnd.CRASHED),
    }[fault]
    assert (code, result.end, result.submission) == (*expected, False)
    if fault == "crash":
        assert "down_blocks" in result.detail


@pytest.mark.parametrize("content", [b"", b"no zip at all"])
def test_an_invalid_zip_ends_with_its_reason(tmp_path: Path, content: bytes) -> None:
    run = image_run(tmp_path, ImageModelType.SDXL)
    Path(run.data_path).write_bytes(content)
    code, result = finished(run)
    assert (code, result.end) == (TrainerExitCode.BAD_DATA, RunEnd.BAD_DATA)


def test_another_number_of_steps_keeps_files_on_the_way(tmp_path: Path) -> None:
    run = planned(image_run(tmp_path, ImageModelType.SDXL), 2000, LrSchedule.COSINE)
    assert run.plan_path is not None
    short = with_image_steps(TrainingPlan.from_json(Path(run.plan_path).read_bytes()), 20)
    assert (short.steps.total, short.steps.save_every) == (20, 5)
    assert short.image is not None
    assert short.image.save_every_epochs == 3


def test_without_a_plan_it_makes_one_from_the_pictures_that_there_are(tmp_path: Path) -> None:
    run = image_run(tmp_path, ImageModelType.SDXL)
    code, result = finished(run)
    assert (code, result.end) == (0, RunEnd.FINISHED), result.detail
    plan = TrainingPlan.from_json((tmp_path / "work/launch-1/plan.json").read_bytes())
    assert plan.data.rows == 6
    assert plan.gpus.is_cpu
