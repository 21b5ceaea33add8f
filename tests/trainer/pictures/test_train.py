"""Whole trainings of a little model, and what they leave whatever happens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file

from core.domain.tasks import ImageModelType
from core.runs.picture_run import PictureRun
from core.runs.run_files import HeldOutScore, RunEnd
from tests.trainer.pictures.little import (
    RATE,
    events,
    notes,
    picture_run,
    problem_of,
    read_adapter,
    submission_of,
    submitted,
    trained,
)
from trainer.errors import BadModel
from trainer.pictures import adapter as adapter_file
from trainer.pictures import train as training
from trainer.pictures.choice import Candidate, Kind
from trainer.pictures.dataset import TrainingCase
from trainer.pictures.session import PictureSession
from trainer.pictures.stack import Stack, TrainedPicture
from trainer.session.watchdog import EndsInTime

pytestmark = pytest.mark.small


def test_a_training_ends_with_the_best_that_it_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "JOIN_AT", math.inf)
    run = picture_run(tmp_path)
    outcome = trained(run)
    assert (outcome.end, outcome.steps) == (RunEnd.FINISHED, 60)
    assert outcome.best is not None
    assert outcome.base is not None
    assert outcome.best.value < 0.8 * outcome.base.value
    assert problem_of(run) is None
    assert submission_of(run).score == outcome.best
    kinds = [event.event for event in events(run)]
    assert kinds.index("submission") < kinds.index("step")  # the one that changes nothing came first
    assert {"stage", "step", "eval", "submission"} <= set(kinds)
    scores = [event.score.value for event in events(run) if event.event == "eval"]
    assert scores[0] == outcome.base.value
    assert not list(Path(run.work_dir).glob("*.safetensors"))


def test_pictures_held_out_are_trained_on_where_no_optimum_is_in_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = training.training_cases

    def counted(pictures: Sequence[TrainedPicture], seed: int) -> Iterator[TrainingCase]:
        seen.append(len(pictures))
        return real(pictures, seed)

    monkeypatch.setattr(training, "training_cases", counted)
    run = picture_run(tmp_path)
    trained(run)
    assert seen == [6, 6, 9]  # the steps that are timed, the training, its second half
    scores = [event.score.step for event in events(run) if event.event == "eval"]
    assert max(scores) <= 30 + training.TIMED_STEPS
    assert "the training that all pictures joined is submitted" in notes(run)
    assert submission_of(run).score is None
    assert problem_of(run) is None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[training.Training]:
    """The trainings of a run whose optimum is past at its third score, step 12."""
    monkeypatch.setattr(training, "is_past_optimum", lambda curve: len(curve) > 3)
    noted: list[training.Training] = []
    real = training.run_training

    def note(session: PictureSession, member: training.Training) -> training.TrainingEnd:
        noted.append(member)
        return real(session, member)

    monkeypatch.setattr(training, "run_training", note)
    return noted


def test_past_the_optimum_it_trains_again_and_on_all_pictures(
    tmp_path: Path, made: list[training.Training]
) -> None:
    run = picture_run(tmp_path, max_steps=training.TIMED_STEPS + (1 + 1 + 3) * 12)
    outcome = trained(run)
    assert outcome.end is RunEnd.FINISHED
    timed, first, again, *on_all = made
    assert (timed.steps, timed.scored) == (training.TIMED_STEPS, False)
    assert (first.horizon, again.horizon) == (None, 12)
    assert [(member.horizon, member.scored) for member in on_all] == [(12, False)] * training.MEMBERS
    assert {len(member.pictures) for member in (first, again)} == {6}
    assert {len(member.pictures) for member in on_all} == {9}
    assert len({member.seed for member in made}) >= 4
    assert "with 3 trainings on all pictures is submitted" in notes(run)
    assert next(iter(read_adapter(submitted(run)).values())).down.shape[0] == 3 * run.recipe.rank
    assert problem_of(run) is None


def test_where_twice_the_steps_are_better_it_trains_longer(
    tmp_path: Path, made: list[training.Training]
) -> None:
    trained(picture_run(tmp_path, max_steps=156))
    assert [member.horizon for member in made] == [None, None, 12, 24, 48, 48]
    assert [len(member.pictures) for member in made][-2:] == [6, 9]


@pytest.mark.parametrize(
    ("best", "tried", "taken"),
    [
        (1.0, [1, 3, 1 / 3], 1),
        (8.0, [1, 3, 1 / 3, 9], 9),
        (0.01, [1, 3, 1 / 3, 1 / 9], 1 / 9),
        (None, [1, 3, 1 / 3], 1),  # none has a score
    ],
)
def test_the_rate_is_the_best_of_short_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: float | None, tried: list[float], taken: float
) -> None:
    made: list[training.Training] = []

    def end_of(session: PictureSession, member: training.Training) -> training.TrainingEnd:
        """An end without the training: the nearer to the best rate, the lower is the score."""
        made.append(member)
        session.stepped(0.001, 1.0, member.rate, 1.0)
        losses = numpy.full((1, 2, 16), abs(math.log(member.rate / RATE / (best or 1))))
        candidate = Candidate(Kind.AVERAGE, 1, member.number, {}, losses)
        return training.TrainingEnd(1, {}, {}, False, False, candidate if best else None)

    monkeypatch.setattr(training, "run_training", end_of)
    trained(picture_run(tmp_path, max_steps=1000))
    timed, *trials, first = made
    assert (timed.steps, timed.scored) == (training.TIMED_STEPS, False)
    assert [trial.rate / RATE for trial in trials] == pytest.approx(tried)
    assert {trial.horizon for trial in trials} == {35}
    assert (first.rate / RATE, first.horizon) == (pytest.approx(taken), None)


def test_the_evaluators_copy_of_the_base_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = picture_run(tmp_path)
    run = run.model_copy(update={"twin_path": run.model.base_path})
    loaded: list[object] = []
    real = Stack.load_base
    monkeypatch.setattr(Stack, "load_base", lambda self, path: loaded.append(real(self, path)) or loaded[-1])
    trained(run)
    assert len(loaded) == 2
    assert "is submitted, at" in notes(run)


def test_without_room_for_that_copy_the_trained_model_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path).model_copy(update={"twin_path": str(tmp_path / "nowhere.safetensors")})
    assert trained(run).best is not None
    assert "no second copy" in notes(run)
    assert "is submitted, at" in notes(run)


def test_where_predicting_on_that_copy_takes_too_much_memory_the_trained_model_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path, max_steps=20)
    failures = [torch.OutOfMemoryError("CUDA out of memory")]
    real = Stack.check_repeatable

    def failing(self: Stack, *given: Any) -> None:
        if failures:
            raise failures.pop()
        real(self, *given)

    monkeypatch.setattr(Stack, "check_repeatable", failing)
    assert trained(run.model_copy(update={"twin_path": run.model.base_path})).best is not None
    assert "no second copy" in notes(run)
    assert "is submitted, at" in notes(run)


@pytest.mark.parametrize("pictures", [1, 2, 3])
def test_few_pictures_are_trained_on(tmp_path: Path, pictures: int) -> None:
    run = picture_run(tmp_path, pictures=pictures, max_steps=20)
    outcome = trained(run)
    assert outcome.steps == 20
    assert problem_of(run) is None
    assert any(factors.up.abs().max() > 1e-3 for factors in read_adapter(submitted(run)).values())
    assert (outcome.best is None) is (pictures == 1)


def no_time(run: PictureRun) -> PictureRun:
    return run.model_copy(update={"end_by": time.time()})


def stopped(run: PictureRun) -> PictureRun:
    Path(run.stop_path).touch()
    return run


def without_captions(run: PictureRun) -> PictureRun:
    for path in Path(run.pictures_dir).glob("*.txt"):
        path.unlink()
    return run


def with_odd_pictures(run: PictureRun) -> PictureRun:
    folder = Path(run.pictures_dir)
    Image.new("RGB", (1, 1)).save(folder / "one.png")
    Image.new("L", (400, 25)).save(folder / "grey.jpg")
    (folder / "broken.webp").write_bytes(b"RIFF")
    return run


def without_encoders(run: PictureRun) -> PictureRun:
    model = run.model.model_copy(update={"text_encoder_paths": (run.model.base_path + ".missing",)})
    return run.model_copy(update={"model": model})


def without_base(run: PictureRun) -> PictureRun:
    model = run.model.model_copy(update={"base_path": run.pictures_dir})
    return run.model_copy(update={"model": model})


def with_half_a_base(run: PictureRun) -> PictureRun:
    base = Path(run.model.base_path)
    base.write_bytes(base.read_bytes()[: base.stat().st_size // 2])
    return run


def with_another_familys_base(run: PictureRun) -> PictureRun:
    model = run.model.model_copy(update={"family": ImageModelType.KREA2})
    return run.model_copy(update={"model": model})


def with_another_familys_encoder(run: PictureRun) -> PictureRun:
    save_file({"table": torch.randn(64, 5)}, run.model.text_encoder_paths[0])
    return run


def without_pictures(run: PictureRun) -> PictureRun:
    return run.model_copy(update={"pictures_dir": run.work_dir})


@pytest.mark.parametrize(
    ("broken", "end", "code"),
    [
        (no_time, RunEnd.CLOCK, 0),
        (stopped, RunEnd.STOPPED, 0),
        (without_captions, RunEnd.FINISHED, 0),
        (with_odd_pictures, RunEnd.FINISHED, 0),
        (without_encoders, RunEnd.BAD_MODEL, 0),  # the one that changes nothing is there
        (with_another_familys_encoder, RunEnd.BAD_MODEL, 0),
        (with_another_familys_base, RunEnd.BAD_MODEL, 21),
        (without_base, RunEnd.BAD_MODEL, 21),
        (with_half_a_base, RunEnd.BAD_MODEL, 21),
        (without_pictures, RunEnd.BAD_DATA, 20),
    ],
)
def test_bad_input_ends_in_an_adapter_that_loads_or_in_one_line(
    tmp_path: Path, broken: Callable[[PictureRun], PictureRun], end: RunEnd, code: int
) -> None:
    run = broken(picture_run(tmp_path, max_steps=10))
    (tmp_path / "run.json").write_text(run.model_dump_json())
    with pytest.raises(SystemExit) as ended:
        training.main(str(tmp_path / "run.json"))
    outcome = training.TrainingOutcome.model_validate_json(Path(run.outcome_path).read_bytes())
    assert (outcome.end, ended.value.code) == (end, code)
    if code == 0:
        assert problem_of(run) is None
    if end in (RunEnd.BAD_MODEL, RunEnd.BAD_DATA):
        assert outcome.detail
        assert "\n" not in outcome.detail


@pytest.mark.parametrize("end", [RunEnd.STOPPED, RunEnd.CLOCK])
@pytest.mark.parametrize("call", ["load_base", "encode_pictures", "encode_texts"])
def test_a_call_that_looks_at_no_clock_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, end: RunEnd
) -> None:
    run = picture_run(tmp_path)
    codes: list[int] = []
    monkeypatch.setattr(training.os, "_exit", codes.append)
    monkeypatch.setattr(training, "EndsInTime", partial(EndsInTime, patience_s=0.01))

    def hanging(self: Stack, *given: object) -> None:
        if end is RunEnd.STOPPED:
            Path(run.stop_path).touch()
        else:
            late = time.time() + 3600
            monkeypatch.setattr(training.time, "time", lambda: late)
        while not codes:
            time.sleep(0.01)
        raise BadModel("the process has ended by now")

    monkeypatch.setattr(Stack, call, hanging)
    (tmp_path / "run.json").write_text(run.model_dump_json())
    outcomes: list[training.TrainingOutcome] = []
    monkeypatch.setattr(training, "write_record", lambda path, record: outcomes.append(record))
    with pytest.raises(SystemExit):
        training.main(str(tmp_path / "run.json"))
    assert outcomes[0].end is end
    if call == "load_base":
        assert codes == [34 if end is RunEnd.STOPPED else 1]
    else:
        assert codes == [0]
        assert problem_of(run) is None


def test_memory_that_runs_out_is_answered_by_recomputing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path, checkpointing=False, max_steps=10)
    failures = [torch.OutOfMemoryError("CUDA out of memory"), None]
    real = PictureSession._case_gradients

    def failing(self: PictureSession, *given: object) -> float:
        if failures and (failure := failures.pop(0)):
            raise failure
        return real(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(PictureSession, "_case_gradients", failing)
    assert trained(run).steps == 10
    assert "memory ran out" in notes(run)


def test_memory_that_still_runs_out_ends_the_training_with_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path)
    (tmp_path / "run.json").write_text(run.model_dump_json())

    def failing(self: PictureSession, *given: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PictureSession, "_case_gradients", failing)
    with pytest.raises(SystemExit, match="0"):
        training.main(str(tmp_path / "run.json"))
    assert training.TrainingOutcome.model_validate_json(Path(run.outcome_path).read_bytes()).end is RunEnd.OOM
    assert problem_of(run) is None


def test_losses_that_are_no_numbers_end_one_training_and_the_best_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path)
    real = PictureSession._case_gradients

    def failing(self: PictureSession, *given: object) -> float:
        return real(self, *given) if self.steps < 20 else float("nan")  # type: ignore[arg-type]

    monkeypatch.setattr(PictureSession, "_case_gradients", failing)
    assert trained(run).steps == 20 + training.MAX_NAN - 1
    assert "this training ends" in notes(run)
    assert "is submitted, at" in notes(run)


def test_a_full_disk_keeps_what_is_submitted_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path, max_steps=20)
    real = adapter_file.save_file
    written: list[Path] = []

    def full(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        written.append(file)
        if len(written) > 1:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(tensors, file, metadata)

    monkeypatch.setattr(adapter_file, "save_file", full)
    assert trained(run).steps == 20
    assert len(written) > 2
    assert "cannot be put in place" in notes(run)
    assert problem_of(run) is None


def test_a_score_ends_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = picture_run(tmp_path, max_steps=10)
    bands: list[int] = []
    real = Stack.losses

    def slow(self: Stack, *given: Any) -> list[list[float]]:
        def noted() -> Iterator[int]:
            for band in given[4]:
                bands.append(band)
                if len(bands) == 3:
                    Path(run.stop_path).touch()
                    time.sleep(1.1)  # a stop is looked for once a second
                yield band

        return real(self, *given[:4], noted()) if len(given) > 4 else real(self, *given)

    monkeypatch.setattr(Stack, "losses", slow)
    assert trained(run).end is RunEnd.STOPPED
    assert len(bands) == 3


def test_a_better_submission_of_an_earlier_attempt_stays(tmp_path: Path) -> None:
    run = picture_run(tmp_path, max_steps=30)
    first = trained(run)
    assert first.best is not None
    kept = submitted(run).read_bytes()
    score = HeldOutScore(value=0.0001, metric="flow_mse", step=1)
    submission_of(run).put(lambda folder: (folder / run.submission_file).write_bytes(kept) and None, score)
    again = trained(run.model_copy(update={"recipe": run.recipe.model_copy(update={"max_steps": 9})}))
    assert again.best == score
    assert submitted(run).read_bytes() == kept


def test_the_rate_rises_and_comes_down() -> None:
    shares = [training.rate_share(step / 100, step, 10) for step in range(100)]
    assert shares[0] < shares[4] < shares[9] > 0.97
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert shares[-1] < 0.001
    assert training.rate_share(0.0, 0, 0) == 1.0
