"""A little flow model for the stand-in of ComfyUI, pictures of one style, and runs of the trainer on them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from core.domain.tasks import ImageModelType, TaskType
from core.models.image_families import PictureRecipe
from core.runs.picture_run import PictureModel, PictureRun
from core.runs.progress import ProgressEvent, parse_events
from trainer.handoff import TrainingOutcome
from trainer.pictures import stack
from trainer.pictures.adapter import AdapterWeights, Factors
from trainer.pictures.train import train
from trainer.session.progress_log import ProgressLog
from trainer.session.submission import Submission

COMFYUI = Path(__file__).parents[2] / "doubles" / "comfyui"
RATE = 0.01
PREFIX = "diffusion_model."


def picture_model(folder: Path, family: ImageModelType = ImageModelType.FLUX) -> PictureModel:
    """Write random weights of a base, an encoder and a VAE."""
    stack.import_comfyui(COMFYUI)
    from comfy.sd import CHANNELS, WIDTH, FlowNet

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save_file(FlowNet(2).state_dict(), folder / "base.safetensors")
    save_file({"table": torch.randn(64, WIDTH)}, folder / "encoder.safetensors")
    save_file({"colours": torch.randn(CHANNELS, 3)}, folder / "vae.safetensors")
    return PictureModel(
        family=family,
        base_path=str(folder / "base.safetensors"),
        text_encoder_paths=(str(folder / "encoder.safetensors"),),
        vae_path=str(folder / "vae.safetensors"),
        comfy_dir=str(COMFYUI),
    )


def write_pictures(folder: Path, count: int, size: tuple[int, int] = (256, 16)) -> Path:
    """Pictures of one colour with some noise, and captions."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        chance = numpy.random.default_rng(number)
        pixels = numpy.array([200.0, 60.0, 30.0]) + chance.normal(0, 30, (size[1], size[0], 3))
        Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"a red thing, number {number}\n", encoding="utf-8")
    return folder


def picture_run(folder: Path, pictures: int = 9, seconds: float = 600.0, **recipe: Any) -> PictureRun:
    given = {"rank": 4, "rate": RATE, "max_steps": 60, "evaluation_share": 0.9, **recipe}
    return PictureRun(
        model=picture_model(folder / "model"),
        recipe=PictureRecipe(**given),
        pictures_dir=str(write_pictures(folder / "pictures", pictures)),
        model_id="owner/name",
        submission_dir=str(folder / "out" / "submission"),
        work_dir=str(folder / "work"),
        progress_path=str(folder / "progress.jsonl"),
        outcome_path=str(folder / "outcome.json"),
        stop_path=str(folder / "stop"),
        end_by=time.time() + seconds,
    )


def submission_of(run: PictureRun) -> Submission:
    place, base = Path(run.submission_dir), Path(run.model.base_path)
    return Submission(place, run.model_id, base, TaskType.IMAGE, image_type=run.model.family)


def trained(run: PictureRun) -> TrainingOutcome:
    """Train in this process."""
    return train(run, ProgressLog(Path(run.progress_path)), submission_of(run))


def submitted(run: PictureRun) -> Path:
    return Path(run.submission_dir) / run.submission_file


def events(run: PictureRun) -> list[ProgressEvent]:
    data = Path(run.progress_path).read_bytes()
    return [line.event for line in parse_events(data) if line.event is not None]


def notes(run: PictureRun) -> str:
    return "\n".join(event.text for event in events(run) if event.event == "note")


def problem_of(run: PictureRun) -> str | None:
    """Why the evaluation's loader does not take what is submitted, if it does not."""
    try:
        loader = stack.Stack(run.model)
        loader.with_adapter(loader.load_base(run.model.base_path), submitted(run))
    except (stack.BadAdapter, OSError, ValueError, json.JSONDecodeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_adapter(file: Path) -> AdapterWeights:
    """Read a file that `save_adapter` wrote."""
    tensors = load_file(file)
    names = [key.removeprefix(PREFIX).removesuffix(".lora_up.weight") for key in tensors if "lora_up" in key]
    return {
        name: Factors(tensors[f"{PREFIX}{name}.lora_down.weight"], tensors[f"{PREFIX}{name}.lora_up.weight"])
        for name in names
    }
