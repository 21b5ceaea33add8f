"""Adapters scored as the evaluation scores them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from core.runs.picture_run import PictureEvaluation, PictureScores
from tests.trainer.pictures.little import picture_run, submitted, trained
from trainer.pictures.evaluate import evaluate, main

pytestmark = pytest.mark.small


def test_a_trained_adapter_scores_better_than_the_base_and_a_bad_one_not_at_all(tmp_path: Path) -> None:
    run = picture_run(tmp_path, max_steps=40)
    trained(run)
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    job = PictureEvaluation(
        model=run.model,
        adapters=("", str(submitted(run)), str(tmp_path / "bad.safetensors")),
        pictures_dir=run.pictures_dir,
        report_path=str(tmp_path / "report.json"),
        noises=2,
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    with pytest.raises(SystemExit, match="1"):
        main(str(tmp_path / "job.json"))
    scores = PictureScores.model_validate_json((tmp_path / "report.json").read_bytes())
    assert scores.complete
    base, ours, bad = scores.adapters
    assert base.score is not None
    assert ours.score is not None
    assert ours.score < 0.8 * base.score
    assert ours.score == pytest.approx(
        0.5 * numpy.mean(ours.text_losses) + 0.5 * numpy.mean(ours.no_text_losses)
    )
    assert len(ours.text_losses) == len(ours.no_text_losses) == len(scores.pictures) == 9
    assert bad.score is None
    assert bad.error


def test_a_job_that_cannot_begin_says_why(tmp_path: Path) -> None:
    run = picture_run(tmp_path)
    model = run.model.model_copy(update={"vae_path": str(tmp_path / "missing.safetensors")})
    report = tmp_path / "report.json"
    job = PictureEvaluation(
        model=model, adapters=("",), pictures_dir=run.pictures_dir, report_path=str(report)
    )
    assert "missing.safetensors" in evaluate(job).reason
    assert json.loads(report.read_text())["complete"] is False


def test_the_time_limit_leaves_what_is_done(tmp_path: Path) -> None:
    run = picture_run(tmp_path)
    job = PictureEvaluation(
        model=run.model,
        adapters=("", ""),
        pictures_dir=run.pictures_dir,
        report_path=str(tmp_path / "report.json"),
        end_by=1.0,
    )
    scores = evaluate(job)
    assert (scores.complete, scores.reason, scores.adapters) == (False, "the time is over", ())
