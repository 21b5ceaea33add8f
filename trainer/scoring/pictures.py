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
from pathlib import Path
from typing import Any

from core.models.image_families import IMAGE_FAMILIES, RenderRules
from core.system.files import write_atomically
from trainer.scoring.pictures_render import PictureModel, render
from trainer.scoring.pictures_rules import NotScored, mean, seed_list, task_loss

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
