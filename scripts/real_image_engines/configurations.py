"""Render image configurations: every family, engine and profile, and every choice that changes keys.

    python configurations.py DIRECTORY PICTURES

A few pictures are written as well. A configuration is a directory with the engine's file and `case.json`. One
that equals an earlier one is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from core.data.facts import image_dataset_facts
from core.domain.choices import Engine
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import image_model_facts
from core.models.image_families import IMAGE_FAMILIES
from core.planning.conditions import JobConditions
from core.planning.plan import TaskSpec
from core.planning.planner import plan_task
from core.profile.resolve import load_profile, profile_files, resolve_profile
from core.recipes.base import RecipeError, RunInputs
from core.recipes.dry_run import example_inputs
from core.recipes.render import render
from tests.trainer.runner.pictures import png

PICTURES, HOURS = 24, 1.0
#: The choices below are tried with these: families of one engine differ in the model, not in the keys.
CHOICE_FAMILIES = (ImageModelType.SDXL, ImageModelType.FLUX, ImageModelType.Z_IMAGE, ImageModelType.KREA2)
#: Targets that write other keys or other values than the profiles do.
CHOICES: dict[str, dict[str, Any]] = {
    "huber": {"image_loss": "huber", "huber_c": 0.1},
    "l1": {"image_loss": "l1"},
    "smooth": {"image_loss": "smooth_l1"},
    "adamw": {"optimizer": "adamw_torch", "weight_decay": 0.01},
    "adamw8bit": {"optimizer": "adamw_bnb_8bit"},
    "paged": {"optimizer": "paged_adamw_32bit"},
    "adafactor": {"optimizer": "adafactor"},
    "lion": {"optimizer": "lion_8bit"},
    "prodigy": {"optimizer": "prodigy", "learning_rate": 1.0},
    "linear": {"lr_scheduler": "linear", "warmup_steps": 10},
    "cosine": {"lr_scheduler": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 10},
    "restarts": {"lr_scheduler": "cosine_with_restarts"},
    "stable-decay": {"lr_scheduler": "warmup_stable_decay", "warmup_steps": 10},
    "one-cycle": {"lr_scheduler": "one_cycle"},
    "constant-warmup": {"lr_scheduler": "constant_with_warmup", "warmup_steps": 20},
    "average": {"ema_decay": 0.99},
    "captions": {"caption_dropout": 0.3, "noise_offset": 0.05, "scale_weight_norms": 1.0},
    "text-encoders": {"text_encoder_lr": 1e-5},
    "resolutions": {"resolutions": [512, 768, 1024]},
    "convolutions": {"conv_rank": 8, "conv_alpha": 4.0, "lora_dropout": 0.1},
    "quantised": {"quantize_base": True},
    "whole": {"quantize_base": False, "gradient_checkpointing": False},
    "compiled": {"compile_mode": "default"},
    "timesteps": {"timestep_sampling": "sigmoid", "guidance_scale": 1.0, "flow_shift": 3.0},
    "accumulated": {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
    "fp32": {"bf16": False},
}


class ConfigurationCase(NamedTuple):
    name: str
    engine: Engine
    family: ImageModelType
    text: str
    file: str


def cases(work: Path) -> Iterator[ConfigurationCase]:
    """Yield every configuration once; what a recipe refuses by name is no configuration."""
    seen: set[str] = set()
    for name, profile, gpus in _profiles(work):
        for family, record in IMAGE_FAMILIES.items():
            if name in CHOICES and family not in CHOICE_FAMILIES:
                continue
            # Flux has both engines; its choices are tried with sd-scripts.
            for engine in record.engines[:1] if name in CHOICES else record.engines:
                if (case := _case(name, profile, gpus, family, engine)) and case.text not in seen:
                    seen.add(case.text)
                    yield case


def _profiles(work: Path) -> Iterator[tuple[str, str, str]]:
    for name in sorted(profile_files()):
        hardware = load_profile(name).hardware or "1xH100"
        for gpus in dict.fromkeys((hardware, "1xH100")):
            yield f"{name}-{gpus}", name, gpus
    for choice, targets in CHOICES.items():
        path = work / f"{choice}.yaml"
        profile = {"extends": "steady", "sections": {"image": {"targets": targets}}}
        path.write_text(yaml.safe_dump(profile), encoding="utf-8")
        yield choice, str(path), "1xH100"


def _case(
    name: str, path: str, gpus: str, family: ImageModelType, engine: Engine
) -> ConfigurationCase | None:
    model = image_model_facts(f"example/{family}", family)
    profile = resolve_profile(load_profile(path), TaskType.IMAGE, model, PICTURES)
    targets = profile.targets.model_copy(update={"engine": engine})
    profile = profile.model_copy(update={"targets": targets})
    hardware = Hardware(gpus=parse_gpus(gpus), cpu_cores=24, memory_bytes=110 * 10**9)
    data = image_dataset_facts(PICTURES, family)
    spec = TaskSpec(task_type=TaskType.IMAGE, image_type=family, hours=HOURS, trigger_word="lora")
    conditions = JobConditions(hardware, model_cached=True, publishes=False)
    plan = plan_task(spec, model, data, hardware, profile, conditions=conditions)
    if not plan.verdict.feasible:
        return None
    try:
        rendered = render(plan, _inputs(family))
    except RecipeError as error:
        print(f"{name} {engine} {family}: refused: {error}", file=sys.stderr)
        return None
    ((file, text),) = rendered.files.items()
    # The first line names the profile and the plan.
    return ConfigurationCase(
        f"{name}.{engine}.{family}", engine, family, "\n".join(text.splitlines()[1:]) + "\n", file
    )


def _inputs(family: ImageModelType) -> RunInputs:
    """With every file beside the model that the family has."""
    inputs = example_inputs(TaskType.IMAGE, f"example/{family}")
    extra = IMAGE_FAMILIES[family].extra
    if extra is None:
        return inputs
    image = inputs.image.model_copy(update={extra.field: f"/cache/hf_cache/{extra.field}.safetensors"})
    return inputs.model_copy(update={"image": image})


def main(directory: str, pictures: str) -> None:
    for at in range(4):
        (Path(pictures) / f"{at}.png").write_bytes(png(shade=40 * at))
        (Path(pictures) / f"{at}.txt").write_text(f"a grey square of shade {at}", encoding="utf-8")
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    for case in cases(root):
        folder = root / case.name
        folder.mkdir(exist_ok=True)
        (folder / case.file).write_text(case.text, encoding="utf-8")
        record = {"name": case.name, "engine": case.engine, "family": case.family, "file": case.file}
        (folder / "case.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
