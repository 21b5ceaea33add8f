"""Score adapters of pictures as validators do: ENGINE_PYTHON -m trainer.scoring.pictures JOB.json

The engine's own Python runs this, so it needs what is there: Python 3.10, torch, and the engine. The base is
loaded once, as the training loaded it; the adapters are put into it one after the other, in the given order.
After each the report is rewritten, so that whoever waits has what is done when the time is up.

JOB.json: `engine` ("ai-toolkit" or "kohya"), `engine_dir`, `config` (what the training was started with),
`family`, `files` ("" is the base alone), `pictures` (`image` and `caption`), `seeds`, `deadline` (Unix
seconds), `report`, `device` ("cuda" or "cpu").

The report: `files` with `path`, `loss`, `with_caption`, `without_caption` and `seconds`; `complete`, and the
`reason` where it is not; `load_seconds`. Exit 0 where at least one file has a loss.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from core.models.image_families import IMAGE_FAMILIES, RenderRules
from core.system.files import write_atomically
from trainer.scoring.pictures_rules import NotScored, mean, noise_levels, seed_list, task_loss

# Render a picture again out of noise, as the validators' graph does, with any model that predicts.

#: A tensor of the engine; here only added and multiplied.
Latent = Any


class PictureModel(Protocol):
    """A base with its encoders, and at most one adapter at a time."""

    def encode_texts(self, texts: list[str]) -> None:
        """Called once, with all that will be rendered; the text encoder is not needed after it."""

    def use(self, adapter: str) -> None:
        """Load this file in place of the one before; "" is the base alone."""

    def read(self, image: str) -> Any:
        """The picture as validators compare it."""

    def encode(self, picture: Any) -> tuple[Latent, int, int]:
        """Its latent, its width and its height."""

    def noise(self, latent: Latent, seed: int) -> Latent: ...

    def velocity(self, latent: Latent, sigma: float, text: str | None) -> Latent:
        """Noise less picture. Without a text: the negative branch, without the adapter."""

    def loss(self, latent: Latent, picture: Any) -> float:
        """The mean squared difference of pixels in [0, 1]."""


def render(model: PictureModel, rules: RenderRules, picture: Any, seed: int, text: str) -> Latent:
    latent, width, height = picture
    levels = noise_levels(rules, width, height)
    noisy = model.noise(latent, seed) * levels[0] + latent * (1.0 - levels[0])
    if rules.second_order:
        return _dpmpp_2m(model, rules, noisy, levels, text)
    for sigma, following in pairwise(levels):
        noisy = noisy + _guided(model, rules, noisy, sigma, text) * (following - sigma)
    return noisy


def _one_branch(rules: RenderRules, text: str) -> bool:
    """The negative text is the empty one: against itself, no guidance remains."""
    return rules.embedded or rules.guidance == 1.0 or not text


def _guided(model: PictureModel, rules: RenderRules, noisy: Latent, sigma: float, text: str) -> Latent:
    wanted = model.velocity(noisy, sigma, text)
    if rules.late is not None:
        later, below = rules.late
        guidance, other = later if sigma <= below else rules.guidance, model.velocity(noisy, sigma, None)
    elif _one_branch(rules, text):
        return wanted
    else:
        guidance, other = rules.guidance, model.velocity(noisy, sigma, "")
    return other + (wanted - other) * guidance


def _dpmpp_2m(
    model: PictureModel, rules: RenderRules, noisy: Latent, levels: list[float], text: str
) -> Latent:
    """DPM-Solver++ of second order, in steps of -log(sigma); the step to 0 is the prediction itself."""
    before: tuple[Latent, float] | None = None
    for sigma, following in pairwise(levels):
        clean = noisy - _guided(model, rules, noisy, sigma, text) * sigma
        if following == 0.0:
            return clean
        step = math.log(sigma / following)
        target = clean
        if before is not None:
            last_clean, last_step = before
            share = step / (2.0 * last_step)
            target = clean * (1.0 + share) - last_clean * share
        noisy = noisy * (following / sigma) - target * math.expm1(-step)
        before = clean, step
    return noisy


#: What loads an engine's models; each is imported only where it is used.
LOADERS = {
    "ai-toolkit": "trainer.scoring.pictures_ai_toolkit",
    "kohya": "trainer.scoring.pictures_kohya",
}


class OutOfTime(Exception):
    """The deadline has passed."""


@dataclass(frozen=True)
class PictureJob:
    engine: str
    engine_dir: str
    config: str
    family: str
    files: tuple[str, ...]
    #: Path and caption.
    pictures: tuple[tuple[str, str], ...]
    seeds: int
    deadline: float
    report: str
    device: str

    @classmethod
    def read(cls, path: Path) -> PictureJob:
        values = json.loads(path.read_text(encoding="utf-8"))
        pictures = tuple((each["image"], each["caption"]) for each in values.pop("pictures"))
        return cls(pictures=pictures, files=tuple(values.pop("files")), **values)

    @property
    def rules(self) -> RenderRules:
        rendered = {str(kind): record.render for kind, record in IMAGE_FAMILIES.items() if record.render}
        if self.family not in rendered:
            raise NotScored(f"{self.family}: validators have no such family, only {', '.join(rendered)}")
        return rendered[self.family]


@dataclass
class Scores:
    """The report, as it grows."""

    path: Path
    files: list[dict[str, Any]]
    load_seconds: float = 0.0

    def add(self, file: str, captioned: Sequence[float], empty: Sequence[float], seconds: float) -> None:
        self.files.append(
            {
                "path": file,
                "loss": task_loss(captioned, empty),
                "with_caption": mean(captioned),
                "without_caption": mean(empty),
                "seconds": round(seconds, 3),
            }
        )
        self.write("not all files are scored yet")

    def write(self, reason: str = "") -> None:
        report = {
            "files": self.files,
            "complete": not reason,
            "reason": reason,
            "load_seconds": round(self.load_seconds, 3),
        }
        write_atomically(self.path, json.dumps(report, indent=1).encode(), mode=0o644)


def load_model(job: PictureJob) -> PictureModel:
    if job.engine not in LOADERS:
        raise NotScored(f"{job.engine}: only models of {', '.join(LOADERS)} can be loaded for scoring")
    loader = importlib.import_module(LOADERS[job.engine])
    model: PictureModel = loader.load(job)
    return model


def score(job: PictureJob, load: Callable[[PictureJob], PictureModel] = load_model) -> Scores:
    """Score file after file until all are done or the time is up; the report says which."""
    scores = Scores(Path(job.report), [])
    began = time.monotonic()
    problems: list[str] = []
    try:
        if not job.pictures:
            raise NotScored("the job names no pictures")
        rules, model = job.rules, load(job)
        model.encode_texts(sorted({"", *(caption for _, caption in job.pictures)}))
        pictures = [(model.read(image), caption) for image, caption in job.pictures]
        latents = [(model.encode(picture), picture, caption) for picture, caption in pictures]
        scores.load_seconds = time.monotonic() - began
        for file in job.files:
            try:
                _score_file(job, rules, model, latents, file, scores)
            except NotScored as error:
                problems.append(str(error))
        scores.write("; ".join(problems))
    except OutOfTime:
        done = f"the deadline passed with {len(scores.files)} of {len(job.files)} files scored"
        scores.write("; ".join([*problems, done]))
    except NotScored as error:
        scores.write(str(error))
    except Exception as error:  # noqa: BLE001 - whatever an engine raises: what is scored already counts
        traceback.print_exc()
        scores.write(f"{type(error).__name__}: {error}")
    return scores


def _score_file(
    job: PictureJob,
    rules: RenderRules,
    model: PictureModel,
    pictures: Sequence[tuple[Any, Any, str]],
    file: str,
    scores: Scores,
) -> None:
    began = time.monotonic()
    _check_time(job)
    model.use(file)
    captioned, empty = [], []
    for latent, picture, caption in pictures:
        _check_time(job)
        losses: dict[str, list[float]] = {caption: [], "": []}
        for seed in seed_list(rules, job.seeds):
            for text in losses:
                _check_time(job)
                loss = model.loss(render(model, rules, latent, seed, text), picture)
                if not math.isfinite(loss):
                    raise NotScored(f"{file or 'the base'}: a render is not a number")
                losses[text].append(loss)
        captioned.append(mean(losses[caption]))
        empty.append(mean(losses[""]))
    scores.add(file, captioned, empty, time.monotonic() - began)


def _check_time(job: PictureJob) -> None:
    if time.time() >= job.deadline:
        raise OutOfTime


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m trainer.scoring.pictures JOB.json\n")
        return 2
    return 0 if score(PictureJob.read(Path(arguments[0]))).files else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
