"""The files through which the image runner and the picture trainer meet.

`python -m trainer.pictures.train RUN.json` reads a `PictureRun`, trains, and writes progress
(`core.runs.progress`: stages, steps, held-out scores with the metric `flow_mse`, submissions, notes), the
submission, and a `TrainingOutcome` (`trainer.handoff`) at `outcome_path`. From the first minute on
the submission lies at `submission_dir` in the file `submission_file`; a better one replaces the folder in one
step. Exit code 0 exactly when there is one, else the code of `TrainerExitCode`.

`python -m trainer.pictures.evaluate JOB.json` reads a `PictureEvaluation` and writes `PictureScores` to its
`report_path` after every adapter, so that the scores are there when a caller stops waiting. It ends with 0
if every adapter has a score.

Both run in the Python that has torch, transformers and what ComfyUI requires, with god-miner on `PYTHONPATH`;
of its dependencies they need pydantic alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from core.domain.records import Record, SanitizedText
from core.domain.tasks import ImageModelType
from core.domain.tournament_rules import NOISES
from core.models.image_families import PictureRecipe

#: Held-out scores in progress events and in the outcome: half the mean loss with the caption, half that with
#: the empty text; lower is better.
PICTURE_METRIC = "flow_mse"


class PictureModel(Record):
    """A base with its encoders, as ComfyUI loads them. All paths exist."""

    family: ImageModelType
    #: The one weight file of the diffusion model.
    base_path: str
    #: In the order of the family's record; two for flux (T5, CLIP-L). Each a file, or a folder of shards.
    text_encoder_paths: tuple[str, ...] = Field(min_length=1)
    #: A weight file that ComfyUI's VAE loads, or a folder that diffusers' `AutoencoderKL` does.
    vae_path: str
    #: A checkout of ComfyUI.
    comfy_dir: str


class PictureRun(Record):
    """One training of an adapter on pictures. Paths are the trainer's."""

    version: Literal[1] = 1
    model: PictureModel
    #: The base as the evaluator loads it, where its numbers differ from a training's (fp8); may be the base's
    #: own file. Candidates are then scored on this second copy. None: on the model that is trained.
    twin_path: str | None = None
    recipe: PictureRecipe = PictureRecipe()
    #: Pictures with captions of the same name that end in `.txt`, byte for byte as in the task's archive: the
    #: evaluation encodes a caption as it is, with its spaces and its last newline.
    pictures_dir: str
    #: The hub's name of the base, for the submission's record.
    model_id: str
    submission_dir: str
    #: Within it: `last.safetensors`, or `checkpoint/last.safetensors` for offers.
    submission_file: str = "last.safetensors"
    work_dir: str
    progress_path: str
    outcome_path: str
    #: SIGTERM, or this file when it appears, ends the training within seconds, with the best in its place.
    stop_path: str
    #: Seconds since the epoch: the last save is over by then.
    end_by: float
    seed: int = 42

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())


class PictureEvaluation(Record):
    """Order to score adapters by the measure."""

    model: PictureModel
    #: "" is the base alone.
    adapters: tuple[str, ...] = Field(min_length=1)
    pictures_dir: str
    report_path: str
    noises: int = Field(default=NOISES, ge=1)
    #: Seconds since the epoch, or None for as long as it takes.
    end_by: float | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())


class AdapterScore(Record):
    """The evaluation's two vectors, a number for each picture, and the score of both."""

    path: str
    score: float | None = None
    text_losses: tuple[float, ...] = ()
    no_text_losses: tuple[float, ...] = ()
    seconds: float = 0.0
    #: Why there is no score: a key that is not loaded, nothing patched, numbers that do not repeat.
    error: SanitizedText = ""


class PictureScores(Record):
    """The report of an evaluation."""

    #: Names of the pictures, in the order of the losses.
    pictures: tuple[str, ...] = ()
    #: What is left out, and why.
    notes: tuple[SanitizedText, ...] = ()
    adapters: tuple[AdapterScore, ...] = ()
    #: Whether every adapter has been tried, and the reason if not.
    complete: bool = False
    reason: SanitizedText = ""
