"""What goes into a rendering besides the plan, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from core.choices import Engine
from core.errors import ConfigError, Problem
from core.evaluation import Era
from core.facts import Record
from core.tasks import DatasetType


class ImageFiles(Record):
    """The parts of an image model that lie outside its own folder or file."""

    #: Flux with sd-scripts: its text encoders and its VAE, one file each.
    clip_l: str | None = None
    t5xxl: str | None = None
    ae: str | None = None
    #: krea2 and ideogram4: directory of the text encoder.
    text_encoder: str | None = None
    #: krea2: the directory that holds the VAE's own, called `vae`.
    vae: str | None = None
    #: krea2: the weight file, where the model's folder holds several.
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
    #: Text: the table of encoded rows that the trainer's adapters made. Images: the folder that holds
    #: `{repeats}_{words}` folders (sd-scripts), or the folder of pictures itself (ai-toolkit).
    train_path: str
    #: Held-out rows, a table of their own; without it the engine holds out `steps.eval_rows` itself.
    eval_path: str | None = None
    output_dir: str
    #: Scratch of this attempt alone: prepared rows, the engine's home.
    work_dir: str
    #: Where the rendered files will lie, for the command line.
    config_dir: str
    #: The plan as JSON, for the trainer's plugin.
    plan_path: str | None = None
    #: What a text task said of its rows, and whose evaluation they were encoded for.
    dataset: DatasetType | None = None
    era: Era = Era.OFFERS
    #: The token to pad with, where the tokenizer has none: its end-of-sequence token, by text.
    pad_token: str | None = None
    #: A checkpoint folder of an earlier attempt.
    resume_from: str | None = None
    #: The trainer's hooks in Axolotl, as module.Class.
    plugins: tuple[str, ...] = ()
    #: The module with the task's reward functions, and their names in the order of the dataset's list.
    reward_module: str = "task_rewards"
    image: ImageFiles = ImageFiles()
    #: Of `accelerate launch`; free on this machine.
    port: int = Field(ge=1, le=65535)
    #: Where the engines' scripts lie.
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
    #: The template it was laid over, to show the difference.
    base: Mapping[str, Any]
    #: By rendered key: the profile's target that it comes from.
    origins: Mapping[str, str]
    #: Rendered keys that the operator handed to the engine raw.
    raw: frozenset[str]
    #: What the operator asked for under another name, or in vain.
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Rendered:
    """Everything that an attempt needs: files, command and environment."""

    engine: Engine
    config: Mapping[str, Any]
    base: Mapping[str, Any]
    #: Name to text, all in `RunInputs.config_dir`.
    files: Mapping[str, str]
    command: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...]


def refusal(profile: str, what: str, value: object, rule: str) -> RecipeError:
    """The error of a single target that an engine has no equivalent for."""
    return RecipeError(f"profile {profile}", [Problem(what, str(value), rule)])
