"""Parts that all recipes share: the inputs of a run, the engine templates of `configs/base`, the result."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from core.config.files import config_dir
from core.domain.errors import ConfigError, Problem
from core.domain.evaluation import Era
from core.domain.records import Record
from core.domain.tasks import DatasetType


class ImageFiles(Record):
    """The parts of an image model outside its own folder or file."""

    #: Flux with sd-scripts: its text encoders and its VAE, one file each.
    clip_l: str | None = None
    t5xxl: str | None = None
    ae: str | None = None
    #: Where it is not in the model: directory of the text encoder.
    text_encoder: str | None = None
    #: Likewise: the directory that contains the VAE's own directory, `vae`.
    vae: str | None = None
    #: The weight file, where the model's folder holds several.
    checkpoint_filename: str | None = None
    #: z-image turbo: the training adapter that undoes its distillation.
    assistant_lora: str | None = None
    #: ideogram4: the adapter of the negative pass.
    unconditional_lora: str | None = None
    #: qwen-image: the adapter that makes up for a base quantised to 3 bits.
    recovery_adapter: str | None = None


class RunInputs(Record):
    """Files, names and the port of one attempt: what a plan leaves open. Paths as the trainer sees them."""

    #: A folder, a file or a hub name.
    model_path: str
    #: Text: the table of rows that the trainer encoded. Images: the folder of `{repeats}_{words}` folders
    #: (sd-scripts), or the folder of images itself (ai-toolkit).
    train_path: str
    #: The table of held-out rows; without it the engine holds out `steps.eval_rows` itself.
    eval_path: str | None = None
    output_dir: str
    #: Scratch space of this attempt alone: prepared rows, the engine's home.
    work_dir: str
    #: Where the rendered files will be, for the command line.
    config_dir: str
    #: The plan as JSON, for the trainer's plugin.
    plan_path: str | None = None
    #: The row format of a text task, and the evaluation that its rows are encoded for.
    dataset: DatasetType | None = None
    era: Era = Era.OFFERS
    #: The padding token, where the tokenizer has none: the text of its end-of-sequence token.
    pad_token: str | None = None
    #: A checkpoint folder of an earlier attempt.
    resume_from: str | None = None
    #: The trainer's hooks in Axolotl, as module.Class.
    plugins: tuple[str, ...] = ()
    #: The module with the task's reward functions, `reward_0` and so on in the order of the dataset's list.
    reward_module: str = "task_rewards"
    image: ImageFiles = ImageFiles()
    #: Of `accelerate launch`; free on the first machine.
    port: int = Field(ge=1, le=65535)
    #: Which of the plan's machines this is, and the address of the first, once it is known.
    machine_rank: int = Field(default=0, ge=0)
    head: str = ""
    #: The engines' checkouts.
    kohya_dir: str = "/app/sd-scripts"
    ai_toolkit_dir: str = "/app/ai-toolkit"
    #: The interpreter of the training environment.
    python: str = "python"


class RecipeError(ConfigError):
    """A plan that cannot be rendered, or a rendering that its engine would not run as written."""

    code = "bad_recipe"


@dataclass(frozen=True)
class Recipe:
    """An engine's configuration before it becomes text."""

    config: dict[str, Any]
    #: The template below it, to show the difference.
    base: Mapping[str, Any]
    #: By rendered key: the profile's target that it comes from.
    origins: Mapping[str, str]
    #: Rendered keys that come from `engine_config`, raw.
    raw: frozenset[str]
    #: What was renamed, replaced or left out.
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RenderedRun:
    """Everything to start an attempt: files, command and environment."""

    config: Mapping[str, Any]
    base: Mapping[str, Any]
    #: Name to text, all in `RunInputs.config_dir`.
    files: Mapping[str, str]
    command: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...]


def unsupported_target(profile: str, what: str, value: object, rule: str) -> RecipeError:
    """The error for a target that an engine has no equivalent for."""
    return RecipeError(f"profile {profile}", [Problem(what, str(value), rule)])


EngineConfig = dict[str, Any]


def template_dir() -> Path:
    """The folder with every engine's template."""
    return config_dir() / "base"


def load_templates(*names: str) -> EngineConfig:
    """Merge the named templates, later ones over earlier ones, into a new mapping."""
    merged: EngineConfig = {}
    for name in names:
        merged = overlay(merged, _read(template_dir() / name))
    return merged


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> EngineConfig:
    """Merge mappings: `above` wins, and a null in it removes the key. Neither argument is changed."""
    merged = {key: _copied(value) for key, value in below.items()}
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            inner = merged.get(key)
            merged[key] = overlay(inner if isinstance(inner, Mapping) else {}, value)
        else:
            merged[key] = _copied(value)
    return merged


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def _read(path: Path) -> EngineConfig:
    text = path.read_text("utf-8")
    return dict(tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text))
