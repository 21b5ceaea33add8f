"""The job, the order of files, the deadline and the report, with a model that only adds up numbers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.scoring.pictures import PictureJob, main, score
from trainer.scoring.pictures_rules import NotScored, mean, seeds


class Adapters:
    """Each file's name is the loss that it renders, twice that without a text."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.at_render = lambda: None
        self.file = ""

    def encode_texts(self, texts: list[str]) -> None:
        self.events.append(f"texts {texts}")

    def use(self, adapter: str) -> None:
        if adapter == "bad":
            raise NotScored("bad: 3 tensors fit no layer")
        self.events.append(f"use {adapter}")
        self.file = adapter

    def read(self, image: str) -> str:
        return image

    def encode(self, picture: str) -> tuple[float, int, int]:
        return 0.0, 1024, 1024

    def noise(self, latent: float, seed: int) -> float:
        self.events.append(f"seed {seed}")
        return 0.0

    def velocity(self, latent: float, sigma: float, text: str | None) -> float:
        return 0.0 if text else 1.0

    def loss(self, latent: float, picture: str) -> float:
        self.at_render()
        return float(self.file or 9) * (2.0 if latent else 1.0)


def make_job(folder: Path, **changes: Any) -> PictureJob:
    job = PictureJob(
        engine="ai-toolkit",
        engine_dir="/nowhere",
        config="/nowhere/config.yaml",
        family="z-image",
        files=("0.5", "0.25"),
        pictures=(("a.png", "a cat"), ("b.png", "")),
        seeds=2,
        deadline=time.time() + 3600,
        report=str(folder / "report.json"),
        device="cpu",
    )
    return replace(job, **changes)


def report_of(job: PictureJob) -> dict[str, Any]:
    return json.loads(Path(job.report).read_text())


def test_files_are_scored_in_their_order_by_the_validators_weights(tmp_path: Path) -> None:
    model, job = Adapters(), make_job(tmp_path)

    score(job, lambda _: model)

    report = report_of(job)
    assert (report["complete"], report["reason"]) == (True, "")
    assert [each["path"] for each in report["files"]] == ["0.5", "0.25"]
    first = report["files"][0]
    # The second picture has no caption: with and without it is the same text.
    assert first["with_caption"] == pytest.approx(mean([0.5, 1.0]))
    assert first["without_caption"] == pytest.approx(1.0)
    assert first["loss"] == pytest.approx(0.25 * 0.75 + 0.75 * 1.0)
    assert report["files"][1]["loss"] == pytest.approx(first["loss"] / 2)


def test_texts_are_encoded_once_and_each_picture_is_rendered_from_the_same_seeds(tmp_path: Path) -> None:
    model = Adapters()

    score(make_job(tmp_path), lambda _: model)

    first, second = seeds(2)
    # Captioned and empty from one seed, then from the next; the picture without a caption once per seed.
    renders = [first, first, second, second, first, second]
    asked = [f"seed {seed}" for seed in renders]
    assert model.events == ["texts ['', 'a cat']", "use 0.5", *asked, "use 0.25", *asked]


def test_the_base_can_be_scored_beside_its_adapters(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=("", "0.5"))

    score(job, lambda _: Adapters())

    losses = [each["loss"] for each in report_of(job)["files"]]
    assert losses[0] > losses[1]


def test_what_is_scored_when_the_time_is_up_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, job, now = Adapters(), make_job(tmp_path), [0.0]
    monkeypatch.setattr("trainer.scoring.pictures.time.time", lambda: now[0])

    def at_render() -> None:
        if model.file == "0.25":
            now[0] = job.deadline

    model.at_render = at_render
    score(job, lambda _: model)

    report = report_of(job)
    assert [each["path"] for each in report["files"]] == ["0.5"]
    assert not report["complete"]
    assert report["reason"] == "the deadline passed with 1 of 2 files scored"


def test_the_report_is_there_after_each_file(tmp_path: Path) -> None:
    model, job = Adapters(), make_job(tmp_path)
    seen = []

    def at_render() -> None:
        if model.file == "0.25":
            seen.append(report_of(job))

    model.at_render = at_render
    score(job, lambda _: model)

    assert [each["path"] for each in seen[0]["files"]] == ["0.5"]
    assert not seen[0]["complete"]


def test_a_file_that_fits_not_is_left_out_and_named(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=("bad", "0.5"))

    score(job, lambda _: Adapters())

    report = report_of(job)
    assert [each["path"] for each in report["files"]] == ["0.5"]
    assert (report["complete"], report["reason"]) == (False, "bad: 3 tensors fit no layer")


def test_a_render_that_is_no_number_is_no_score(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=("nan", "0.5"))

    score(job, lambda _: Adapters())

    report = report_of(job)
    assert [each["path"] for each in report["files"]] == ["0.5"]
    assert "nan: a render is not a number" in report["reason"]


def test_an_engine_that_fails_half_way_leaves_what_is_scored(tmp_path: Path) -> None:
    model, job = Adapters(), make_job(tmp_path)

    def at_render() -> None:
        if model.file == "0.25":
            raise RuntimeError("CUDA out of memory")

    model.at_render = at_render
    scores = score(job, lambda _: model)

    assert [each["path"] for each in scores.files] == ["0.5"]
    assert report_of(job)["reason"] == "RuntimeError: CUDA out of memory"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": "sdxl"}, "sdxl: validators have no such family, only"),
        ({"pictures": []}, "the job names no pictures"),
        ({"engine": "other"}, "other: only models of ai-toolkit, kohya"),
        ({"engine_dir": "/nowhere"}, "ModuleNotFoundError: No module named 'toolkit'"),
    ],
)
def test_a_job_that_cannot_be_done_says_why_and_fails(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    job = make_job(tmp_path)
    values = {**vars(job), "pictures": [{"image": "a.png", "caption": "a cat"}], **changes}
    (tmp_path / "job.json").write_text(json.dumps(values))

    assert main([str(tmp_path / "job.json")]) == 1

    report = report_of(job)
    assert report["files"] == []
    assert report["reason"].startswith(reason)
