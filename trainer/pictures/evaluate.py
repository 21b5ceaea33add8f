"""Score adapters by the measure, as the evaluation does: merged into its base by ComfyUI, 256 cases a text.

python -m trainer.pictures.evaluate JOB.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy

from core.runs.picture_run import AdapterScore, PictureEvaluation, PictureScores
from trainer.handoff import write_record
from trainer.pictures.dataset import read_pictures
from trainer.pictures.measure import score
from trainer.pictures.stack import BadAdapter, FlowModel, Stack, TrainedPicture
from trainer.session.failures import one_line


def main(job_path: str) -> None:
    job = PictureEvaluation.read(Path(job_path))
    scores = evaluate(job)
    if scores.reason:
        print(scores.reason, file=sys.stderr)  # noqa: T201 - the last line of a program that failed
    sys.exit(0 if scores.complete and not any(adapter.error for adapter in scores.adapters) else 1)


def evaluate(job: PictureEvaluation) -> PictureScores:
    """Score one after the other; the report is rewritten after each."""
    report = Path(job.report_path)
    scores = PictureScores(reason="the models are not loaded yet")
    try:
        notes: list[str] = []
        pictures = read_pictures(Path(job.pictures_dir), lambda kind, text: notes.append(text))
        stack = Stack(job.model)
        base = stack.load_base(job.model.base_path)
        encoded = stack.encode_pictures(base, pictures)
        stack.encode_texts(["", *(picture.caption for picture in encoded)])
        scores = PictureScores(pictures=tuple(picture.name for picture in encoded), notes=tuple(notes))
        for adapter in job.adapters:
            if job.end_by is not None and time.time() > job.end_by:
                return _with(scores, report, reason="the time is over")
            row = score_adapter(stack, base, encoded, adapter, job.noises)
            scores = _with(scores, report, adapters=(*scores.adapters, row))
        return _with(scores, report, complete=True)
    except Exception as error:  # noqa: BLE001 - the boundary: the report says what it was
        return _with(scores, report, reason=one_line(error))


def score_adapter(
    stack: Stack, base: FlowModel, pictures: list[TrainedPicture], adapter: str, draws: int
) -> AdapterScore:
    began = time.monotonic()
    try:
        model = stack.with_adapter(base, Path(adapter)) if adapter else base
        losses = {False: list[float](), True: list[float]()}
        for picture in pictures:
            for captioned, vector in losses.items():
                cases = stack.losses(model, picture, picture.caption if captioned else "", draws)
                vector.append(float(numpy.mean(cases)))
        stack.check_repeatable(model, pictures[0])
    except (BadAdapter, OSError) as error:
        return AdapterScore(path=adapter, error=str(error), seconds=time.monotonic() - began)
    return AdapterScore(
        path=adapter,
        score=score(losses[True], losses[False]),
        text_losses=tuple(losses[True]),
        no_text_losses=tuple(losses[False]),
        seconds=time.monotonic() - began,
    )


def _with(scores: PictureScores, report: Path, **update: object) -> PictureScores:
    updated = scores.model_copy(update=update)
    write_record(report, updated)
    return updated


if __name__ == "__main__":
    main(sys.argv[1])
