"""The best of several files is submitted, and the last one whenever anything about that fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.domain.tasks import ImageModelType
from core.planning.plan import CheckpointChoice, TrainingPlan
from core.runs.progress import NoteEvent, StageEvent, SubmissionEvent
from core.runs.run_files import RunEnd, RunResult, RunSpec
from tests.core.submission.folders import image_adapter
from tests.trainer.runner.pictures import picture_zip
from tests.trainer.runner.test_image_runner import events, finished, image_run, planned
from trainer.inputs.images import prepare_images
from trainer.runner import image_choice, supervise
from trainer.runner.image_choice import best_of, choice_deadline, hold_out, pictures_in, read_scores, spread
from trainer.runner.image_runner import ImageRunner
from trainer.runner.processes import StopRequest

pytestmark = pytest.mark.process


MADE = "qwen-image ai-toolkit"
STEPS = (15, 30, 45, 60)
#: What a scoring process does with its job.
Scoring = Callable[[dict[str, Any]], int | None]


def weights(step: int) -> bytes:
    return image_adapter(MADE, seed=step)


def with_choice(run: RunSpec, seconds: float = 300.0, **changes: Any) -> RunSpec:
    assert run.plan_path is not None
    path = Path(run.plan_path)
    plan = TrainingPlan.from_json(path.read_bytes())
    assert plan.image is not None
    values = {"files": 4, "pictures": 2, "seeds": 3, "seconds": seconds, **changes}
    image = plan.image.model_copy(update={"choice": CheckpointChoice.model_validate(values)})
    path.write_text(plan.model_copy(update={"image": image}).to_json(), encoding="utf-8")
    return run


def lies_there(run: RunSpec) -> bytes:
    return (Path(run.submission_dir) / "last.safetensors").read_bytes()


def report(job: dict[str, Any], losses: dict[str, float], complete: bool = True, reason: str = "") -> None:
    files = [
        {"path": path, "loss": losses[Path(path).name], "seconds": 1.0}
        for path in job["files"]
        if Path(path).name in losses
    ]
    Path(job["report"]).write_text(json.dumps({"files": files, "complete": complete, "reason": reason}))


class Process:
    """In the place of the engine, which leaves its files, and of the scoring process."""

    pid, tail = 0, ("its last words",)
    run: RunSpec
    scoring: Scoring
    jobs: list[dict[str, Any]]
    #: What the engine leaves, and whether it then goes on for ever.
    files: tuple[int, ...] = STEPS
    endless = False

    def __init__(self, command: Any, env: Any, cwd: Path, on_line: Callable[[str], None]) -> None:
        self.code: int | None
        if command[-2] == "trainer.scoring.pictures":
            job = json.loads(Path(command[-1]).read_text())
            self.jobs.append(job)
            assert lies_there(self.run) == Path(job["files"][0]).read_bytes(), "the last file is in its place"
            self.code = self.scoring(job)
            return
        (output,) = Path(self.run.work_dir).glob("launch-*/output")
        for step in self.files:
            last = step == STEPS[-1]
            name = "last.safetensors" if last else f"last/last_{step:09}.safetensors"
            (output / "last").mkdir(exist_ok=True)
            (output / name).write_bytes(weights(step))
        on_line("last: 100%|####| 60/60 [00:01<00:00, 1.00s/it, lr: 1.0e-04 loss: 1.0e-01]")
        self.code = None if self.endless else 0

    def ended(self) -> int | None:
        return self.code

    def close(self) -> int:
        return -9 if self.code is None else self.code


def trained(run: RunSpec, scoring: Scoring, **changes: Any) -> tuple[RunResult, list[dict[str, Any]]]:
    jobs: list[dict[str, Any]] = []
    values = {"run": run, "scoring": staticmethod(scoring), "jobs": jobs, **changes}
    process = type("OneProcess", (Process,), values)
    runner = ImageRunner(run, StopRequest(Path(run.stop_path)), retries=False, start=process)
    return runner.execute(), jobs


def notes(run: RunSpec) -> list[str]:
    return [one.text for one in events(run) if isinstance(one, NoteEvent) and one.kind == "choice"]


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    return with_choice(planned(image_run(tmp_path, ImageModelType.QWEN_IMAGE)))


LOSSES = {
    "last_000000015.safetensors": 0.060,
    "last_000000030.safetensors": 0.052,
    "last_000000045.safetensors": 0.050,
    "last.safetensors": 0.055,
}


def test_the_best_file_is_put_in_the_place_of_the_last(run: RunSpec) -> None:
    def scoring(job: dict[str, Any]) -> int:
        report(job, LOSSES)
        return 0

    result, (job,) = trained(run, scoring)
    assert (result.end, result.submission) == (RunEnd.FINISHED, True)
    assert lies_there(run) == weights(45)
    assert sorted(path.name for path in Path(run.submission_dir).iterdir()) == [
        "README.md",
        "last.safetensors",
    ]
    assert [Path(file).name for file in job["files"]] == list(reversed(LOSSES))
    assert (job["engine"], job["family"], job["seeds"], job["device"]) == (
        "ai-toolkit",
        "qwen-image",
        3,
        "cuda",
    )
    assert job["config"].endswith("launch-1/config.yaml")
    assert len(job["pictures"]) == 2
    assert all(Path(one["image"]).is_file() and one["caption"] for one in job["pictures"])
    said = notes(run)
    assert "last_000000045.safetensors is submitted, of last_000000015.safetensors 0.06000" in said[-1]
    assert "last.safetensors scores 0.05500" in said
    assert [one.step for one in events(run) if isinstance(one, SubmissionEvent)] == [60, 45]
    assert "choose" in [one.stage for one in events(run) if isinstance(one, StageEvent)]


def refuses(job: dict[str, Any]) -> int:
    return 1


def says_why(job: dict[str, Any]) -> int:
    report(job, {}, complete=False, reason="kohya: cannot be loaded")
    return 1


def is_late(job: dict[str, Any]) -> int:
    scored = {name: loss for name, loss in LOSSES.items() if name != "last.safetensors"}
    report(job, scored, complete=False, reason="the deadline passed")
    return 0


def forgets_one(job: dict[str, Any]) -> int:
    report(job, {name: loss for name, loss in LOSSES.items() if "30" not in name})
    return 0


def measures_nothing(job: dict[str, Any]) -> int:
    report(job, {**LOSSES, "last_000000015.safetensors": math.nan})
    return 0


def writes_nonsense(job: dict[str, Any]) -> int:
    Path(job["report"]).write_text('{"files": 7}')
    return 0


def dies_afterwards(job: dict[str, Any]) -> int:
    report(job, LOSSES)
    return -11


@pytest.mark.parametrize(
    ("scoring", "reason"),
    [
        (refuses, "there is no report (exit code 1; its last words)"),
        (says_why, "kohya: cannot be loaded"),
        (is_late, "the deadline passed"),
        (forgets_one, "a file has no score"),
        (measures_nothing, "a file has no score"),
        (writes_nonsense, "there is no report"),
        (dies_afterwards, "exit code -11"),
    ],
)
def test_whatever_fails_leaves_the_last_file(run: RunSpec, scoring: Scoring, reason: str) -> None:
    result, _ = trained(run, scoring)
    assert (result.end, result.submission) == (RunEnd.FINISHED, True)
    assert lies_there(run) == weights(60)
    assert "the last file stays" in notes(run)[-1]
    assert reason in notes(run)[-1]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "dump_stacks", lambda: False)
    monkeypatch.setattr(image_choice, "GRACE_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_an_engine_that_goes_on_is_ended_early_enough_to_compare_its_files(tmp_path: Path) -> None:
    def scoring(job: dict[str, Any]) -> int:
        report(job, LOSSES)
        return 0

    # Of 60 seconds 54 belong to the comparison, which took them from the steps, and six to what follows it.
    run = image_run(tmp_path, ImageModelType.QWEN_IMAGE, seconds=60)
    run = planned(run, total=10_000, wanted=20_000)
    result, (job,) = trained(with_choice(run, seconds=54), scoring, endless=True, files=STEPS[:3])
    assert (result.end, result.submission) == (RunEnd.CLOCK, True)
    assert job["deadline"] <= run.end_by
    assert [Path(file).name for file in job["files"]] == list(reversed(LOSSES))[1:]
    assert lies_there(run) == weights(45)


@pytest.mark.usefixtures("impatient")
def test_wanted_steps_are_not_cut_off_to_compare_files(tmp_path: Path) -> None:
    """What was to be spare time is none on a slow GPU."""
    run = image_run(tmp_path, ImageModelType.QWEN_IMAGE, seconds=5)
    run = with_choice(planned(run, total=10_000, wanted=10_000), seconds=4.9)
    result, jobs = trained(run, refuses, endless=True, files=STEPS[:3])
    assert (result.end, result.submission, jobs) == (RunEnd.CLOCK, True, [])
    assert notes(run) == ["the last file stays: no time is left to compare files"]


@pytest.mark.usefixtures("impatient")
def test_a_comparison_that_never_ends_is_ended(run: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_choice, "OVERRUN", 0.0)
    monkeypatch.setattr(image_choice, "LEAST_SHARE", 0.0)
    result, _ = trained(run, lambda job: None)
    assert (result.end, result.submission) == (RunEnd.FINISHED, True)
    assert lies_there(run) == weights(60)
    assert "the last file stays: the comparison took longer than its time" in notes(run)[-1]


@pytest.mark.usefixtures("impatient")
def test_a_request_to_stop_ends_the_comparison(run: RunSpec) -> None:
    def scoring(job: dict[str, Any]) -> None:
        report(job, LOSSES)
        Path(run.stop_path).touch()

    result, _ = trained(run, scoring)
    assert result.submission
    assert lies_there(run) == weights(60)
    assert "asked to stop" in notes(run)[-1]


def test_of_an_earlier_attempt_the_submission_alone_is_compared(run: RunSpec) -> None:
    """Its submission stays until a file of this attempt is there."""
    old = Path(run.work_dir) / "launch-1" / "output"
    old.mkdir(parents=True)
    (old / "last.safetensors").write_bytes(weights(7))
    place = Path(run.submission_dir)
    place.mkdir()
    (place / "last.safetensors").write_bytes(weights(7))
    (place / "sample.png").write_bytes(b"stray")

    def scoring(job: dict[str, Any]) -> int:
        report(job, {**LOSSES, "earlier.safetensors": 0.07})
        return 0

    result, (job,) = trained(run, scoring)
    names = [Path(file).name for file in job["files"]]
    assert names == [*list(reversed(LOSSES))[:2], "last_000000030.safetensors", "earlier.safetensors"]
    assert Path(job["files"][-1]).read_bytes() == weights(7)
    assert (result.submission, lies_there(run)) == (True, weights(45))
    assert sorted(path.name for path in place.iterdir()) == ["README.md", "last.safetensors"]


def test_a_swap_that_was_cut_off_is_mended_by_the_next_attempt(run: RunSpec) -> None:
    place = Path(run.submission_dir)
    gone = place.with_name(f".{place.name}.old")
    gone.mkdir()
    (gone / "last.safetensors").write_bytes(weights(7))
    half = place.with_name(f".{place.name}.new")
    half.mkdir()
    (half / "last.safetensors").write_bytes(weights(8)[:-9])
    result, _ = trained(run, refuses, files=())
    assert lies_there(run) == weights(7)
    assert not half.exists()
    assert result.end is not RunEnd.FINISHED


def test_one_file_is_compared_with_nothing(run: RunSpec) -> None:
    result, jobs = trained(run, refuses, files=STEPS[-1:])
    assert (result.submission, jobs) == (True, [])
    assert notes(run) == ["the last file stays: there is one file only"]


def test_a_best_file_that_is_no_submission_leaves_the_last(run: RunSpec) -> None:
    def scoring(job: dict[str, Any]) -> int:
        best = next(path for path in map(Path, job["files"]) if "45" in path.name)
        best.write_bytes(image_adapter(MADE, zero=lambda name: "lora_B" in name))
        report(job, LOSSES)
        return 0

    result, _ = trained(run, scoring)
    assert (result.submission, lies_there(run)) == (True, weights(60))
    assert "all add zero" in notes(run)[-1]


def test_held_out_pictures_are_scored_and_not_trained_on(tmp_path: Path) -> None:
    data = str(picture_zip(tmp_path / "many.zip", 20))
    run = planned(image_run(tmp_path, ImageModelType.QWEN_IMAGE, data_path=data))
    _, (job,) = trained(with_choice(run, held_out=True), refuses)
    trained_on = {path.name for path in tmp_path.glob("work/data/*/img/*/*.png")}
    scored = {Path(one["image"]).name for one in job["pictures"]}
    assert (len(trained_on), len(scored)) == (18, 2)
    assert not trained_on & scored


def test_with_few_pictures_those_of_the_training_are_scored(tmp_path: Path) -> None:
    run = planned(image_run(tmp_path, ImageModelType.QWEN_IMAGE))
    _, (job,) = trained(with_choice(run, held_out=True), refuses)
    assert "too few pictures to keep some out of the training" in notes(run)
    assert all("/img/" in one["image"] for one in job["pictures"])


def test_what_is_held_out_depends_on_the_pictures_and_not_on_their_names(tmp_path: Path) -> None:
    run = image_run(tmp_path, ImageModelType.KREA2, data_path=str(picture_zip(tmp_path / "a.zip", 20)))
    contents = []
    for renamed in (False, True):
        images = prepare_images(run, tmp_path / f"data-{renamed}")
        if renamed:
            for path in pictures_in(images.folder):
                path.rename(path.with_name(f"x{40 - int(path.stem):05}.png"))
        folder = hold_out(images, 2)
        assert folder is not None
        contents.append({path.read_bytes() for path in pictures_in(folder)})
        assert len(pictures_in(images.folder)) == 18
    assert contents[0] == contents[1]
    assert hold_out(images, 8) is None


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([0.05, 0.04, 0.03], 2),
        ([0.05, 0.03, 0.04], 1),
        ([0.03, 0.03, 0.03], 2),
        ([0.0300, 0.0299, 0.0300], 2),  # within the noise
        ([0.0300, 0.0290, 0.0300], 1),
        ([0.0, 0.0, 0.1], 1),
        ([0.03, math.inf, 0.04], None),
        ([0.03, math.nan, 0.04], None),
        ([], None),
    ],
)
def test_of_equal_files_the_latest_is_the_best(losses: list[float], best: int | None) -> None:
    files = [Path(f"last-{number}") for number in range(len(losses))]
    scores = {str(path): loss for path, loss in zip(files, losses, strict=True)}
    assert best_of(files, scores) == (None if best is None else files[best])
    assert best_of([*files, Path("unscored")], scores) is None


@pytest.mark.parametrize(
    ("there", "count", "taken"),
    [(4, 4, [0, 1, 2, 3]), (10, 5, [1, 3, 5, 7, 9]), (3, 5, [0, 1, 2]), (7, 2, [3, 6]), (5, 1, [4])],
)
def test_files_are_evenly_spread_with_the_last_among_them(there: int, count: int, taken: list[int]) -> None:
    assert spread([Path(str(number)) for number in range(there)], count) == [Path(str(at)) for at in taken]


def test_a_comparison_has_its_time_or_a_little_more_and_never_beyond_the_end() -> None:
    choice = CheckpointChoice(files=4, pictures=2, seeds=2, seconds=100)
    assert choice_deadline(choice, 1000, 2000) == 1150
    assert choice_deadline(choice, 1000, 1060) == 1060
    assert choice_deadline(choice, 1000, 1024) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": [{}]}', '{"files": [], "complete": 1}'])
def test_a_damaged_report_has_no_scores(text: str, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(text)
    scores, reason = read_scores(tmp_path / "scores.json")
    assert scores == {}
    assert reason


def test_the_real_scoring_process_is_asked_as_it_expects(tmp_path: Path) -> None:
    """It has no engine here, and says so: the whole way with processes of their own."""
    run = with_choice(planned(image_run(tmp_path, ImageModelType.QWEN_IMAGE)))
    code, result = finished(run)
    assert (code, result.end, result.submission) == (0, RunEnd.FINISHED, True), result.detail
    assert "the last file stays" in notes(run)[-1]
    assert json.loads((tmp_path / "work/launch-1/scores.json").read_text())["complete"] is False
