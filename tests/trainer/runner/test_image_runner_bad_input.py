"""Bad tasks in a tournament's container: our trainer on a stand-in for ComfyUI, kohya by a script.

Each ends in the best adapter that loads, or in one clear line.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from core.domain.hardware import Hardware, parse_gpus
from core.runs.picture_run import PictureRun
from core.runs.progress import NoteEvent
from core.runs.run_files import RunEnd, RunSpec
from tests.core.submission.folders import image_adapter
from tests.trainer.forks import ForkServer
from tests.trainer.pictures.little import COMFYUI, picture_model, problem_of, write_pictures
from tests.trainer.runner.scripted import ScriptedEngine
from tests.trainer.runner.test_image_runner import events
from tests.trainer.runner.test_image_runner_ends import Script
from trainer.runner import command_line, image_files, planning
from trainer.runner.image_runner import ImageRunner
from trainer.runner.main import write_result
from trainer.runner.processes import StopRequest
from trainer.runner.supervise import LaunchResult
from trainer.session.failures import end_of

#: No smaller ones are taken by kohya.
SIZE = (256, 64)
ENCODERS = ("t5xxl_fp16.safetensors", "clip_l.safetensors")


class Task(NamedTuple):
    """What a validator mounts, and what the image was built with."""

    model: Path
    weights: Path
    zipped: Path


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    made = Task(
        tmp_path / "cache/models/org--flux", tmp_path / "weights", tmp_path / "cache/datasets/t_tourn.zip"
    )
    for folder in (made.model, made.weights, made.zipped.parent, tmp_path / "kohya"):
        folder.mkdir(parents=True)
    model = picture_model(tmp_path / "made")
    Path(model.base_path).rename(made.model / "flux1-dev.safetensors")
    for name in ENCODERS:
        (made.weights / name).write_bytes(Path(model.text_encoder_paths[0]).read_bytes())
    Path(model.vae_path).rename(made.weights / "ae.safetensors")
    write_zip(made, write_pictures(tmp_path / "pictures", 6, SIZE))
    profile = tmp_path / "profile.yaml"
    profile.write_text(
        "extends: steady\nengine_config: {pictures: {rank: 4, max_steps: 6, evaluation_share: 0.9}}\n"
    )
    for name, value in {
        command_line.WORK_VARIABLE: tmp_path / "work",
        planning.PROFILE_VARIABLE: profile,
        image_files.WEIGHTS_VARIABLE: made.weights,
        image_files.COMFYUI_VARIABLE: COMFYUI,
        image_files.FLUX_VARIABLE: tmp_path / "nothing",
        "GOD_MINER_KOHYA": tmp_path / "kohya",
        "GOD_MINER_AI_TOOLKIT": tmp_path / "nothing",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(command_line, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(command_line, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(image_files, "CACHE", tmp_path / "cache/hf_cache")
    machine = Hardware(gpus=parse_gpus("1xH100"))
    monkeypatch.setattr(planning, "detect_machine", lambda disk: machine)
    return made


def write_zip(task: Task, folder: Path) -> None:
    with zipfile.ZipFile(task.zipped, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)


def as_given(task: Task) -> None:
    pass


def without_captions(task: Task) -> None:
    folder = write_pictures(task.weights / "pictures", 6, SIZE)
    (folder / "00.txt").unlink()
    (folder / "01.txt").write_text(" \n")
    write_zip(task, folder)


def one_picture(task: Task) -> None:
    write_zip(task, write_pictures(task.weights / "pictures", 1, SIZE))


def all_sizes_and_broken_ones(task: Task) -> None:
    folder = write_pictures(task.weights / "pictures", 2, SIZE)
    for name, size in {"pixel.png": (1, 1), "forty.png": (8000, 5000), "strip.png": (1, 3000)}.items():
        Image.new("RGB", size, (9, 9, 9)).save(folder / name)
    (folder / "half.png").write_bytes((folder / "00.png").read_bytes()[:200])
    (folder / "empty.jpg").touch()
    write_zip(task, folder)


def broken_ones_alone(task: Task) -> None:
    with zipfile.ZipFile(task.zipped, "w") as archive:
        archive.writestr("a.png", b"no picture")
        archive.writestr("b.jpg", b"")


def no_zip(task: Task) -> None:
    task.zipped.write_bytes(b"PK")


def two_bases(task: Task) -> None:
    (task.model / "other.safetensors").write_bytes((task.model / "flux1-dev.safetensors").read_bytes())


def half_a_base(task: Task) -> None:
    base = task.model / "flux1-dev.safetensors"
    base.write_bytes(base.read_bytes()[:500])


def another_familys_base(task: Task) -> None:
    base = task.model / "flux1-dev.safetensors"
    save_file({**load_file(base), "adaln_proj.weight": torch.zeros(4, 4)}, base)


def no_encoders(task: Task) -> None:
    (task.weights / "clip_l.safetensors").unlink()


def another_familys_encoder(task: Task) -> None:
    for name in ENCODERS:
        save_file({"table": torch.randn(64, 5)}, task.weights / name)


def another_familys_vae(task: Task) -> None:
    save_file({"colours": torch.randn(6, 3)}, task.weights / "ae.safetensors")


class Ending(NamedTuple):
    broken: Callable[[Task], None]
    end: RunEnd
    #: Who made the submission.
    by: str | None
    #: Within the notes and the result's detail.
    said: str


PICTURES, KOHYA = "pictures", "kohya"
ENDINGS = {
    "nothing is wrong": Ending(as_given, RunEnd.FINISHED, PICTURES, "is submitted, at"),
    "captions are missing": Ending(without_captions, RunEnd.FINISHED, PICTURES, "2 of 6 have no caption"),
    "one picture": Ending(one_picture, RunEnd.FINISHED, PICTURES, "no picture can be held out"),
    "all sizes": Ending(all_sizes_and_broken_ones, RunEnd.FINISHED, PICTURES, "1×3000 leaves no 16 pixels"),
    "broken pictures": Ending(broken_ones_alone, RunEnd.BAD_DATA, None, "its header is not a picture's"),
    "no zip": Ending(no_zip, RunEnd.BAD_DATA, None, "t_tourn.zip: "),
    "two bases": Ending(two_bases, RunEnd.FINISHED, KOHYA, "2 weight files in its root: evaluators load one"),
    "half a base": Ending(half_a_base, RunEnd.FINISHED, KOHYA, "kohya takes over from the picture trainer: "),
    "another base": Ending(another_familys_base, RunEnd.FINISHED, KOHYA, "is not loaded by ComfyUI: "),
    "no encoders": Ending(no_encoders, RunEnd.CRASHED, None, "no clip_l.safetensors in the cache"),
    "another VAE": Ending(another_familys_vae, RunEnd.FINISHED, KOHYA, "predicts nothing with"),
    "another encoder": Ending(another_familys_encoder, RunEnd.FINISHED, KOHYA, "encode no texts: "),
}


def finishes(engine: ScriptedEngine) -> Script:
    engine.save(engine.total, image_adapter("flux kohya"))
    yield
    return 0


@pytest.mark.parametrize("name", ENDINGS)
def test_a_bad_task_ends_in_an_adapter_that_loads_or_in_one_line(
    forks: ForkServer, task: Task, tmp_path: Path, name: str
) -> None:
    broken, end, by, said = ENDINGS[name]
    broken(task)
    words = ("--task-id", "t", "--model", "org/flux", "--model-type", "flux", "--expected-repo-name", "repo")
    run = command_line.image_run([*words, "--hours-to-complete", "0"])
    (tmp_path / "checkpoints/t").mkdir(parents=True)
    Path(run.work_dir).mkdir(parents=True)
    orders, started = list[PictureRun](), list[str]()

    def start(command: Any, env: Any, cwd: Path, on_line: Callable[[str], None]) -> Any:
        if "trainer.pictures.train" not in command:
            started.append(KOHYA)
            return ScriptedEngine(run, finishes, on_line)
        started.append(PICTURES)
        orders.append(PictureRun.read(Path(command[-1])))
        return forks.start(command[1:], {**env, "OMP_NUM_THREADS": "1"}, cwd)

    try:
        result = ImageRunner(run, StopRequest(Path(run.stop_path)), False, start=start).execute()
    except Exception as error:
        result = write_result(run, LaunchResult(end_of(error), str(error)))
    assert (result.end, result.submission) == (end, by is not None), result.detail
    assert (started or [None])[-1] == by
    lines = [*said_in(run), result.detail]
    assert any(said in line and "\n" not in line for line in lines), lines
    if by is PICTURES:
        assert problem_of(orders[0]) is None


def said_in(run: RunSpec) -> list[str]:
    if not Path(run.progress_path).exists():
        return []
    return [event.text for event in events(run) if isinstance(event, NoteEvent)]
