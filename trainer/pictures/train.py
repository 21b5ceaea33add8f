"""Train an adapter on pictures, from the run's file to the outcome. Read it from top to bottom.

1. `main` reads the run and writes the outcome.
2. `train` loads, submits an adapter that changes nothing, encodes, and trains.
3. `train_and_choose` tries rates in short trainings; trains at the best one until the held-out pictures say
   that it only gets worse; then again for the steps that the optimum took, so that the rate comes down in
   time, and for twice as many while that is better; and then for the best one's steps on all pictures.
4. `run_training` is one of these trainings: one step after the other, and scores now and then.

Each better candidate replaces the submission at once, so a training may be ended at any time.

python -m trainer.pictures.train RUN.json
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from core.domain.tasks import TaskType
from core.runs.picture_run import PictureRun
from core.runs.run_files import EXIT_OF, RunEnd, TrainerExitCode
from trainer.handoff import TrainingOutcome, write_record
from trainer.pictures.adapter import Adapter, AdapterWeights, mean_of
from trainer.pictures.choice import (
    Candidate,
    Kind,
    as_good_as_best,
    compare,
    is_past_optimum,
    is_still_better,
)
from trainer.pictures.dataset import read_pictures, split, training_cases
from trainer.pictures.session import PictureSession
from trainer.pictures.stack import Stack, TrainedPicture, make_trainable
from trainer.session.ema import MovingAverage
from trainer.session.failures import NotANumber, end_of, one_line
from trainer.session.progress_log import ProgressLog
from trainer.session.submission import Submission
from trainer.session.watchdog import EndsInTime, dump_stacks_on_request, stop_on_term

#: Trainings on all pictures whose mean is submitted, at most.
MEMBERS = 3
#: Steps of a training where nothing can be held out.
BLIND_STEPS = 160
#: Steps that tell how long one takes, and the fewest after which rates are compared.
TIMED_STEPS, FEWEST_TRIAL_STEPS = 4, 20
#: Part of the time of a training without a horizon after which all pictures are trained on.
JOIN_AT = 0.5
#: Losses in a row that are no numbers.
MAX_NAN = 5


def main(run_path: str) -> None:
    run = PictureRun.read(Path(run_path))
    dump_stacks_on_request()
    stop_on_term(Path(run.stop_path))
    place, base = Path(run.submission_dir), Path(run.model.base_path)
    submission = Submission(place, run.model_id, base, TaskType.IMAGE, image_type=run.model.family)

    def ended(outcome: TrainingOutcome) -> int:
        write_record(Path(run.outcome_path), outcome)
        return 0 if submission.exists else EXIT_OF.get(outcome.end, TrainerExitCode.CRASHED)

    def cut_off(end: RunEnd) -> None:
        code = int(TrainerExitCode.CRASHED)
        try:
            done = submission.trained.step if submission.trained is not None else 0
            text = "ended within a call of ComfyUI's: what is submitted stays"
            code = ended(TrainingOutcome(end=end, detail=text, steps=done, best=submission.score))
        finally:
            os._exit(code)

    with EndsInTime(partial(end_due, run), cut_off):
        try:
            outcome = train(run, ProgressLog(Path(run.progress_path)), submission)
        except Exception as error:  # noqa: BLE001 - the boundary: the best so far is in its place
            traceback.print_exc()
            outcome = TrainingOutcome(end=end_of(error), detail=one_line(error), best=submission.score)
    sys.exit(ended(outcome))


def end_due(run: PictureRun) -> RunEnd | None:
    if Path(run.stop_path).exists():
        return RunEnd.STOPPED
    return RunEnd.CLOCK if time.time() > run.end_by else None


def train(run: PictureRun, progress: ProgressLog, submission: Submission) -> TrainingOutcome:
    # Pictures
    submission.prepare()
    progress.stage("data", "pictures are brought to size")
    pictures = read_pictures(Path(run.pictures_dir), progress.note)

    # The base, and an adapter that loads
    progress.stage("load", "the base")
    recipe, stack = run.recipe, Stack(run.model)
    base = stack.load_base(run.model.base_path)
    make_trainable(base.model.diffusion_model)
    adapter = Adapter(base.model.diffusion_model, recipe, stack.device)
    session = PictureSession(run, progress, submission, stack, base, adapter)
    if recipe.checkpointing:
        session.recompute()
    if not submission.exists:
        session.submit(adapter.nothing(run.seed), None)

    # What the model sees of pictures and texts
    if not session.over:
        progress.stage("load", "pictures and texts are encoded")
        encoded = stack.encode_pictures(base, pictures)
        stack.encode_texts(["", *(picture.caption for picture in encoded)])
        session.parts = split(encoded, recipe.held_out_share, recipe.held_out_least)

        # Train
        session.try_predicting()
        progress.stage("train")
        train_and_choose(session) if session.parts.held_out else train_blindly(session)
    return session.outcome()


def train_blindly(session: PictureSession) -> None:
    """Nothing can be held out: a short training, and its end counts."""
    run = session.run
    session.progress.note("choice", "no picture can be held out: a short training, unscored")
    end = run_training(session, Training(0, run.seed, run.recipe.rate, session.parts.trained, BLIND_STEPS))
    if end.step:
        session.submit(end.average, None)


def train_and_choose(session: PictureSession) -> None:
    run, recipe, parts = session.run, session.run.recipe, session.parts

    # The untouched model
    session.score_base()

    # The rate, by short trainings; at the best one as long as it gets better
    trials = try_rates(session)
    rate = recipe.rate * lowest_good(trials)
    first = Training(len(trials), run.seed, rate, parts.trained, None)
    end = run_training(session, first)

    # For the optimum's steps, for twice as many, and so on while the longest is best, as the curve may have
    # been flat for a while only; time for one on all pictures is kept
    ended: list[Training] = []
    steps = end.best.step if end.past_optimum and end.best and recipe.second_member else 0
    while steps and session.has_room_for(2 if ended else 1, steps):
        number = first.number + 1 + len(ended)
        ended.append(Training(number, run.seed + number, rate, parts.trained, steps))
        run_training(session, ended[-1])
        if len(ended) > 1 and session.candidates[0].member != number:
            break
        steps *= 2

    # The best of all, by the evaluation's own loader
    winner = session.choose()

    # The best of those with an end in sight, on all pictures
    of = {training.number: training for training in ended}
    scored = next((candidate for candidate in session.candidates if candidate.member in of), None)
    if winner is not None and scored is not None:
        on_all_pictures(session, winner, scored, of[scored.member])
    elif winner is not None and end.joined:
        submit_unscored(session, winner, end.average, "the training that all pictures joined")


def try_rates(session: PictureSession) -> dict[float, Candidate]:
    """Short trainings at multiples of the recipe's rate: what each scored. After 1, a higher and a lower one
    comes one beyond the best of these. None where a trial's time has too few steps to tell."""
    run, recipe, pictures = session.run, session.run.recipe, session.parts.trained
    run_training(session, Training(0, run.seed, recipe.rate, pictures, None, TIMED_STEPS, scored=False))
    factor, steps = recipe.rate_factor, session.steps_within(recipe.trial_share)
    trials: dict[float, Candidate] = {}

    def attempt(multiple: float) -> None:
        if multiple not in trials and not session.over:
            trial = Training(len(trials), run.seed, multiple * recipe.rate, pictures, steps)
            if (best := run_training(session, trial).best) is not None:
                trials[multiple] = best

    if factor > 1 and steps >= FEWEST_TRIAL_STEPS:
        for multiple in (1.0, factor, 1 / factor):
            attempt(multiple)
        if trials:
            attempt(lowest_good(trials) ** 2)
    # They are no finalists, and the curve has its own share of the time.
    session.candidates, session.screening_s = [], 0.0
    return trials


def lowest_good(trials: dict[float, Candidate]) -> float:
    """The lowest of those as good as the best within the error: a longer training wants a lower rate."""
    good = {trial.member for trial in as_good_as_best(list(trials.values()))} if trials else set()
    return min((multiple for multiple, trial in trials.items() if trial.member in good), default=1.0)


def on_all_pictures(
    session: PictureSession, winner: Candidate, scored: Candidate, training: Training
) -> None:
    """Make `scored` again as its training did, now on the held-out pictures too. These cannot score the
    result any more: the recipe is what was scored."""
    pictures = [*session.parts.trained, *session.parts.held_out]
    ends: list[AdapterWeights] = []
    while len(ends) < MEMBERS and session.has_room_for(1, scored.step):
        seed = training.seed + len(ends)
        again = replace(training, seed=seed, pictures=pictures, scored=False)
        end = run_training(session, again)
        if end.step < scored.step:
            break
        ends.append(end.weights if scored.kind is Kind.RAW else end.average)
    if ends:
        weights = mean_of(ends if len(ends) > 1 else [*ends, winner.weights])
        submit_unscored(session, winner, weights, f"the mean with {len(ends)} trainings on all pictures")


def submit_unscored(session: PictureSession, winner: Candidate, weights: AdapterWeights, name: str) -> None:
    """Submit what has seen the held-out pictures, if it does better on them than the winner, as it must."""
    losses = session.exact_losses(weights)
    # Not so for losses that are no numbers.
    better = losses is not None and compare(winner.losses, losses).mean <= 0
    if not better:
        session.progress.note("choice", f"{name} was not seen to do better on those held out: not taken")
    elif session.submit(weights, None):
        session.progress.note("choice", f"{name} is submitted")


@dataclass(frozen=True)
class Training:
    """One training from the beginning."""

    number: int
    seed: int
    rate: float
    pictures: Sequence[TrainedPicture]
    #: Steps over which the rate comes down to nothing. None: until the clock's end.
    horizon: int | None
    #: Steps to make, where that is fewer.
    steps: int | None = None
    scored: bool = True


@dataclass(frozen=True)
class TrainingEnd:
    step: int
    weights: AdapterWeights
    average: AdapterWeights
    past_optimum: bool
    #: Whether the held-out pictures were trained on in its second half.
    joined: bool
    #: Of what was scored.
    best: Candidate | None


def run_training(session: PictureSession, training: Training) -> TrainingEnd:
    """Train until the steps are done, the time is over, or the optimum of a training without a horizon is
    past. Where that is not in sight at half of the time, the held-out pictures are trained on too."""
    recipe, adapter, horizon = session.run.recipe, session.adapter, training.horizon
    adapter.begin(training.seed)
    parameters = adapter.parameters
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=training.rate, betas=(0.9, 0.99), weight_decay=recipe.weight_decay
    )
    average = MovingAverage(parameters, recipe.ema_decay)
    cases = training_cases(training.pictures, training.seed)
    draw = torch.Generator().manual_seed(training.seed)
    began, curve = time.time(), [session.base] if session.base else []
    steps, step, nan, past, joined = training.steps or horizon, 0, 0, False, False
    while not (session.over or past) and (steps is None or step < steps):
        # Step. The rate goes by progress from 0 to 1.
        step_began = time.monotonic()
        progress = step / horizon if horizon else session.share_of_time(began)
        if not horizon and not joined and progress >= JOIN_AT and training.scored and is_still_better(curve):
            joined = True
            cases = training_cases([*training.pictures, *session.parts.held_out], training.seed)
        rate = training.rate * rate_share(progress, step, min(recipe.warm_up_steps, (horizon or 1000) // 10))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = session.gradients([next(cases) for _ in range(recipe.batch)], draw)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.clip or math.inf))
        nan = 0 if math.isfinite(loss) and math.isfinite(norm) else nan + 1
        if nan >= MAX_NAN:
            text = f"the loss has been no number for {nan} steps, at a rate of {rate:.2g}"
            if not session.candidates:
                raise NotANumber(text)
            session.progress.note("nan", f"{text}: this training ends")
            break
        step += 1
        if not nan:
            optimizer.step()
            average.stepped(step)
        optimizer.zero_grad(set_to_none=True)
        session.stepped(time.monotonic() - step_began, loss, rate, norm)

        # Score. One with a horizon is best at its end
        scored = training.scored and not joined
        if scored and not horizon and session.is_score_due(step, curve[-1].step if curve else 0):
            with average.applied():
                weights = adapter.weights()
            if (candidate := session.screen(Kind.AVERAGE, step, training.number, weights)) is not None:
                curve.append(candidate)
                past = is_past_optimum(curve)
    weights = adapter.weights()
    with average.applied():
        averaged = adapter.weights()
    if training.scored and step and not (past or joined):
        for kind, end in ((Kind.AVERAGE, averaged), (Kind.RAW, weights)):
            if (candidate := session.screen(kind, step, training.number, end)) is not None:
                curve.append(candidate)
    if past:
        session.progress.note("choice", f"the optimum is past at step {step:,}")
    finite = [candidate for candidate in curve if candidate.step and math.isfinite(candidate.score)]
    best = min(finite, key=lambda candidate: candidate.score, default=None)
    return TrainingEnd(step, weights, averaged, past, joined, best)


def rate_share(progress: float, step: int, warm_up: int) -> float:
    """Share of the rate: up to all of it within the first steps, then down to nothing as a cosine."""
    rise = min((step + 1) / warm_up, 1.0) if warm_up else 1.0
    return rise * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


if __name__ == "__main__":
    main(sys.argv[1])
