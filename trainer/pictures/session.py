"""The state of a picture training: its steps, its scores, its time, and what is submitted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy
import torch

from core.domain.tournament_rules import BANDS
from core.runs.picture_run import PICTURE_METRIC, PictureRun
from core.runs.progress import EvalEvent, StepEvent, SubmissionEvent
from core.runs.run_files import HeldOutScore, RunEnd
from core.submission.faults import BadSubmission
from trainer.handoff import TrainingOutcome
from trainer.pictures.adapter import Adapter, AdapterWeights, mean_of, save_adapter
from trainer.pictures.choice import Candidate, Kind, Losses, best_of
from trainer.pictures.dataset import PictureSplit, TrainingCase
from trainer.pictures.measure import flow_losses, noisy, sigma_of
from trainer.pictures.stack import BadAdapter, FlowModel, Predict, Stack, recompute_blocks
from trainer.session.failures import is_oom
from trainer.session.progress_log import ProgressLog
from trainer.session.submission import Submission, TrainedSteps
from trainer.session.watchdog import StopFile

#: Candidates that are compared exactly at the end.
FINALISTS = 3
#: A score may take this share of the time: where it takes more, a half or a quarter of the bands are scored.
SCORE_SHARE = 0.01
#: They may take this share of the time, and all scores after the last step that one: where a score is slow,
#: not all of them are made.
CONFIRM_SHARE, FINISH_SHARE = 0.05, 0.2
#: Kept free before the end, besides what is measured.
SLACK_S = 3.0
#: Steps before the first score, and how many times as many there are before the next one, at least.
FIRST_SCORE, SCORE_GROWTH = 8, 1.2
LOG_EVERY_S = 1.0


class PictureSession:
    """One run of the trainer."""

    def __init__(
        self,
        run: PictureRun,
        progress: ProgressLog,
        submission: Submission,
        stack: Stack,
        base: FlowModel,
        adapter: Adapter,
    ) -> None:
        self.run, self.progress, self.adapter = run, progress, adapter
        self.parts = PictureSplit([], [])
        self.candidates: list[Candidate] = []
        #: The untouched model's.
        self.base: Candidate | None = None
        self.steps = 0
        self._submission, self._stack, self._model = submission, stack, base
        self._twin: FlowModel | None = None
        self._recomputes = False
        #: Of the submission that another attempt has left.
        self._earlier = self._best = submission.score if submission.exists else None
        self._began = self._logged_at = time.time()
        self._step_s: list[float] = []
        self._screen_s = self._submit_s = 0.0
        #: What the scores of the curve have taken.
        self.screening_s = 0.0
        #: To bring the model to the GPU, about what merging a candidate into it takes.
        self._move_s = 0.0
        self._finalists = FINALISTS
        self._bands = range(BANDS)
        self._stop = StopFile(Path(run.stop_path))

    # — time

    @property
    def stopped(self) -> bool:
        return self._stop.requested

    @property
    def _total_s(self) -> float:
        return max(self.run.end_by - self._began, 1.0)

    @property
    def step_s(self) -> float:
        return median(self._step_s) if self._step_s else 0.0

    @property
    def _finish_s(self) -> float:
        """From the last step to the end: two scores, the exact ones of finalists and of what was trained on
        all pictures, and the last submissions."""
        exact = self._finalists + 1
        wanted = 1.25 * (2 + exact * self.confirm_draws) * self._screen_s + exact * self._merge_s
        if self.run.twin_path is not None and self._twin is None:
            wanted += self._stack.load_s
        return min(wanted, FINISH_SHARE * self._total_s) + 3 * self._submit_s + SLACK_S

    @property
    def _merge_s(self) -> float:
        """The weights leave the GPU, merged ones come."""
        return 2 * self._move_s

    def _has_time(self, seconds: float = 0.0) -> bool:
        """Return whether so much may still begin, and a submission after it."""
        return not self.stopped and time.time() + seconds < self.run.end_by - SLACK_S - self._submit_s

    @property
    def left_s(self) -> float:
        """Seconds left for training."""
        return self.run.end_by - time.time() - self._finish_s

    @property
    def over(self) -> bool:
        most = self.run.recipe.max_steps
        return self.stopped or self.left_s < self.step_s or (most is not None and self.steps >= most)

    @property
    def confirm_draws(self) -> int:
        """Noise draws of exact scores, as many as the time allows."""
        draws = CONFIRM_SHARE * self._total_s / max(FINALISTS * self._screen_s, 1e-9)
        return max(min(int(draws), self.run.recipe.confirm_noises), 1)

    def share_of_time(self, since: float) -> float:
        """Part of the time from `since` to the end of training that is over."""
        passed = time.time() - since
        by_time = passed / max(passed + self.left_s, 1e-9)
        most = self.run.recipe.max_steps
        return max(by_time, self.steps / most if most else 0.0)

    def steps_within(self, share: float) -> int:
        """Steps that take this share of all time, or of the most that are asked for."""
        by_time = share * self._total_s / max(self.step_s, 1e-9)
        most = self.run.recipe.max_steps
        return int(by_time if most is None else min(by_time, share * most))

    def has_room_for(self, trainings: int, steps: int) -> bool:
        most = self.run.recipe.max_steps
        fits = most is None or self.steps + trainings * steps <= most
        return (
            fits
            and not self.stopped
            and self.left_s >= trainings * (steps * self.step_s + 2 * self._screen_s)
        )

    def is_score_due(self, step: int, last: int) -> bool:
        """Often in the beginning, where few pictures have their optimum, and within the share of all time."""
        passed = min((time.time() - self._began) / self._total_s, 1.0)
        allowed = self.run.recipe.evaluation_share * self._total_s * math.sqrt(passed)
        return step >= max(SCORE_GROWTH * last, FIRST_SCORE) and self.screening_s + self._screen_s <= allowed

    # — steps

    def gradients(self, cases: Sequence[TrainingCase], draw: torch.Generator) -> float:
        """Add the gradients of a step's mean loss, case by case; return the loss."""
        try:
            return sum(self._case_gradients(case, draw, len(cases)) for case in cases) / len(cases)
        except Exception as error:
            if not is_oom(error) or self._recomputes:
                raise
        self.progress.note("memory", "the GPU's memory ran out: activations are computed twice from now on")
        for parameter in self.adapter.parameters.values():
            parameter.grad = None
        self._stack.release()
        self.recompute()
        return self.gradients(cases, draw)

    def _case_gradients(self, case: TrainingCase, draw: torch.Generator, count: int) -> float:
        picture, sigma = case.picture, sigma_of(case.band)
        noise = torch.randn(picture.latent.shape, generator=draw)
        noised = noisy(picture.latent, noise, sigma).to(self._stack.device)
        target = (noise - picture.latent).to(self._stack.device)
        losses: list[float] = []

        def visit(predict: Predict) -> None:
            denoised = predict(noised, torch.full((1,), sigma, device=noised.device))
            loss = flow_losses(noised, denoised, target, sigma).mean()
            (loss / count).backward()
            losses.append(loss.item())

        with self._stack.training(), self.adapter.trained():
            self._stack.predicting(self._model, picture, case.text, visit)
        return losses[0]

    def recompute(self) -> None:
        """From now on compute activations again in the backward pass."""
        if not self._recomputes:
            self._recomputes = True
            recompute_blocks(self._model.model.diffusion_model)

    def stepped(self, seconds: float, loss: float, rate: float, norm: float) -> None:
        self.steps += 1
        self._step_s = [*self._step_s[-31:], seconds]
        if (now := time.time()) - self._logged_at >= LOG_EVERY_S or self.steps == 1:
            self._logged_at = now
            memory = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
            self.progress.write(
                StepEvent(
                    t=now,
                    step=self.steps,
                    total=self.run.recipe.max_steps,
                    loss=loss if math.isfinite(loss) else None,
                    lr=rate,
                    grad_norm=norm if math.isfinite(norm) else None,
                    samples_s=self.run.recipe.batch / max(self.step_s, 1e-9),
                    memory_bytes=memory,
                    ends_at=self.run.end_by,
                )
            )

    # — scores

    def try_predicting(self) -> None:
        """Predict once: that base, encoders and VAE belong together shows then."""
        began = time.monotonic()
        self._stack.try_predicting(self._model, [*self.parts.trained, *self.parts.held_out][0])
        self._move_s = time.monotonic() - began

    def score_base(self) -> None:
        """Score the untouched model; the first picture tells how many bands there is time for."""
        weights, first = self.adapter.nothing(), self.parts.held_out[0]
        began = time.monotonic()
        self._stack.losses(self._model, first, "", 1, self._bands_in_time())
        share = (time.monotonic() - began) * 2 * len(self.parts.held_out) / self._total_s
        step = next((step for step in (1, 2) if share <= step * SCORE_SHARE), 4)
        self._bands = range(step // 2, BANDS, step)
        losses = self._timed_losses(weights)
        if losses is not None:
            self.base = Candidate(Kind.RAW, 0, 0, weights, losses)
            self._report(self.base, best=False)

    def screen(self, kind: Kind, step: int, member: int, weights: AdapterWeights) -> Candidate | None:
        """Score by one draw a band, and submit what is better than everything before. Return None if there
        was no time."""
        losses = self._timed_losses(weights)
        if losses is None:
            return None
        candidate = Candidate(kind, step, member, weights, losses)
        if not math.isfinite(candidate.score):
            return candidate
        best = self._score(candidate).beats(self._best)
        self._report(candidate, best)
        if best:
            self.submit(weights, self._score(candidate))
        self.candidates = sorted([*self.candidates, candidate], key=lambda item: item.score)[: 2 * FINALISTS]
        return candidate

    def _timed_losses(self, weights: AdapterWeights) -> Losses | None:
        began = time.monotonic()
        with self.adapter.using(weights):
            losses = self._losses(self._model, 1)
        self._screen_s = time.monotonic() - began
        self.screening_s += self._screen_s
        return losses

    def _losses(self, model: FlowModel, draws: int) -> Losses | None:
        rows: list[list[list[float]]] = []
        for picture in self.parts.held_out:
            texts: list[list[float]] = []
            for text in (picture.caption, ""):
                cases = self._stack.losses(model, picture, text, draws, self._bands_in_time())
                if len(cases) < len(self._bands):
                    return None
                texts.append([float(numpy.mean(band)) for band in cases])
            rows.append(texts)
        return numpy.array(rows)

    def _bands_in_time(self) -> Iterator[int]:
        for band in self._bands:
            if not self._has_time():
                return
            yield band

    def exact_losses(self, weights: AdapterWeights) -> Losses | None:
        """Losses by the evaluation's own loader and numbers. Return None if it would refuse the file, or if
        there was no time."""
        if not self._has_time(self._merge_s):
            return None
        file = Path(self.run.work_dir) / "candidate.safetensors"
        model = self._evaluators_model()
        try:
            save_adapter(weights, file)
            patched = self._stack.with_adapter(model, file)
            self._stack.check_repeatable(patched, self.parts.held_out[0])
            losses = self._losses(patched, self.confirm_draws)
        except (BadAdapter, OSError) as error:
            self.progress.note("choice", f"a candidate is passed over: {error}")
            return None
        except Exception as error:
            if not is_oom(error) or model is self._model:
                raise
            self._without_twin(error)
            return self.exact_losses(weights)
        finally:
            file.unlink(missing_ok=True)
        return losses

    def _evaluators_model(self) -> FlowModel:
        """The base as the evaluation loads it, where that differs and there is room for it."""
        if self._twin is None and self.run.twin_path is not None:
            try:
                self._twin = self._stack.load_base(self.run.twin_path)
            except Exception as error:  # noqa: BLE001 - whatever it was, there is the model that was trained
                self._without_twin(error)
        return self._twin or self._model

    def _without_twin(self, error: Exception) -> None:
        self.progress.note("choice", f"no second copy of the base is scored on: {error}")
        self._twin = self._model
        self._stack.release()

    def choose(self) -> Candidate | None:
        """Score the best few exactly, and submit the one that the standard errors leave. Return None if there
        was no time."""
        self.progress.stage("evaluate", "the best are compared")
        finalists: list[Candidate] = []
        for candidate in self._finalists_of(self.candidates):
            if (losses := self.exact_losses(candidate.weights)) is not None:
                finalists.append(
                    Candidate(candidate.kind, candidate.step, candidate.member, candidate.weights, losses)
                )
            if self.stopped:
                return None
        if not finalists:
            return None
        winner = best_of(finalists)
        if self._earlier is not None and not self._score(winner).beats(self._earlier):
            self.progress.note("choice", f"an earlier attempt's stays, at {self._earlier.value:.6f}")
            return None
        if self.submit(winner.weights, self._score(winner)):
            self.progress.note("choice", f"{winner} is submitted, at {winner.score:.6f}")
        self._finalists = 1
        return winner

    def _finalists_of(self, best: Sequence[Candidate]) -> list[Candidate]:
        """The best two, and the mean of the best with that of another training, or with the second."""
        if len(best) < 2:
            return list(best)
        first = best[0]
        second = next((other for other in best if other.member != first.member), best[1])
        mean = mean_of([first.weights, second.weights])
        blend = Candidate(Kind.MEAN, max(first.step, second.step), -1, mean, first.losses)
        return [*best[: FINALISTS - 1], blend]

    # — submissions

    def submit(self, weights: AdapterWeights, score: HeldOutScore | None) -> bool:
        """Replace the submission in one step, once ComfyUI's loader takes all of the file."""
        began = time.monotonic()

        def write(folder: Path) -> None:
            file = folder / self.run.submission_file
            save_adapter(weights, file)
            self._stack.with_adapter(self._model, file)

        base = self._score(self.base) if self.base is not None else None
        try:
            self._submission.put(write, score, TrainedSteps(self.steps, self.steps), base)
        except (OSError, BadSubmission, BadAdapter) as error:
            self.progress.note("submission", f"cannot be put in place: {error}")
            return False
        self._submit_s = time.monotonic() - began
        self._best = score or self._best
        self.progress.write(SubmissionEvent(t=time.time(), score=score, step=self.steps))
        return True

    def _score(self, candidate: Candidate) -> HeldOutScore:
        return HeldOutScore(value=candidate.score, metric=PICTURE_METRIC, step=self.steps)

    def _report(self, candidate: Candidate, best: bool) -> None:
        score = self._score(candidate)
        self.progress.write(EvalEvent(t=time.time(), score=score, best=best, seconds=self._screen_s))

    def outcome(self) -> TrainingOutcome:
        end = (
            RunEnd.STOPPED if self.stopped else RunEnd.CLOCK if self.left_s < self.step_s else RunEnd.FINISHED
        )
        base = self._score(self.base).model_copy(update={"step": 0}) if self.base is not None else None
        return TrainingOutcome(end=end, steps=self.steps, best=self._best, base=base)
