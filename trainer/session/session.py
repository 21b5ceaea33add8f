"""Decisions about a running training, the same for every engine and on every rank.

The engine calls it after each step and does what it orders. All ranks call every method at the same point;
rank 0 decides, the others follow. The scorer decides which model is best, in the validator's metric.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from core.domain.evaluation import RewardScore
from core.domain.units import show_seconds
from core.planning.plan import LrSearchPlan, TrainingPlan
from core.planning.time.schedule import EVALUATIONS
from core.runs.progress import CheckpointEvent, EvalEvent, StepEvent, SubmissionEvent
from core.runs.run_files import HeldOutScore, RunControl, RunEnd
from trainer.handoff import LaunchSpec, TrainingOutcome
from trainer.session.clock import EVAL_SHARE, STOP_GRACE_S, BestScore, RunClock, StepOrders
from trainer.session.control import ControlFile, Controls, MicroChange
from trainer.session.failures import NotANumber
from trainer.session.learning_rate import (
    SAMPLED_NOISE,
    FoundRate,
    LrSearch,
    PlateauFactor,
    Probe,
    Prober,
    ScheduleProgress,
    is_tuned,
    rate_factor,
)
from trainer.session.progress_log import ProgressLog, SpeedReading
from trainer.session.ranks import Communicator
from trainer.session.submission import Submission
from trainer.session.watchdog import StopFile

#: Ranks agree at most this often: a broadcast makes the GPU wait for its own queue.
AGREE_S = 0.5
MAX_STEPS_BETWEEN_AGREEMENTS = 20
#: Evaluations that take longer are a stage of their own in the progress.
SHOWN_S = 2.0
#: Two attempts whose base scores differ by less have the same held-out rows.
SAME_ROWS = 1e-3
#: Logs in a row with NaN: one is a bad batch, several are a broken model.
MAX_NAN = 3


class Scorer(Protocol):
    """Scores the model as it is, on held-out rows. All ranks call every method."""

    metric: str
    lower_is_better: bool
    #: What the last score is made of, where one number is not enough.
    rewarded: RewardScore | None
    #: Seconds that one evaluation takes, as measured by `score_base`, which itself also warms up.
    pass_seconds: float

    def score_base(self, budget_s: float, untouched: bool) -> float:
        """The base model's score, before the first step of this process. Settles how many rows one
        evaluation can read in about `budget_s`. `untouched`: the model has not been trained yet and is the
        base itself."""

    def score(self) -> float: ...


class TrainingHost(Protocol):
    """The engine, as far as the session needs it."""

    scorer: Scorer | None
    #: Tries learning rates out; None if the engine cannot undo a step.
    prober: Prober | None

    def write(self, folder: Path | None) -> None:
        """Write the weights as a submission; all ranks call it, those without a folder only send their
        shards."""

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has its averaged weights, where there are any."""

    def regroup(self, micro: int | None) -> MicroChange:
        """From the next step on, put at most `micro` sequences in a pass, and as many passes as that takes;
        with None, as at the start. All ranks call it."""


def session_of(
    spec: LaunchSpec, plan: TrainingPlan, progress: ProgressLog, ranks: Communicator, host: TrainingHost
) -> Session:
    """The session of a launch, in real time."""
    run, stop = spec.run, StopFile(Path(spec.run.stop_path))
    control = ControlFile(Path(run.control_path) if run.control_path else None, progress.note)
    return Session(
        plan=plan,
        clock=RunClock(plan, end_by=run.end_by, now=time.time),
        submission=Submission(Path(run.submission_dir), run.model_id, Path(run.model_path), run.task_type),
        progress=progress,
        ranks=ranks,
        host=host,
        stop_requested=lambda: stop.requested,
        take_control=control.take,
    )


class StopReason(NamedTuple):
    end: RunEnd
    detail: str = ""


_ENDS = tuple(RunEnd)


class _Agreement(NamedTuple):
    """Rank 0's decisions after a step, sent to the other ranks as numbers."""

    total: int = 0
    evaluate: bool = False
    save: bool = False
    end: RunEnd | None = None
    #: Steps until the next agreement.
    steps_between: int = 1
    control: RunControl | None = None

    def numbers(self) -> list[float]:
        end = -1 if self.end is None else _ENDS.index(self.end)
        control = self.control
        asked = (control.number, control.micro or 0, control.duty) if control else (0, 0, 1.0)
        return [self.total, self.evaluate, self.save, end, self.steps_between, *asked]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        *counts, duty = numbers
        total, evaluate, save, end, steps_between, number, micro = map(int, counts)
        control = RunControl(number=number, micro=micro or None, duty=duty) if number else None
        return cls(
            total, bool(evaluate), bool(save), _ENDS[end] if end >= 0 else None, steps_between, control
        )


@dataclass
class Session:
    plan: TrainingPlan
    clock: RunClock
    submission: Submission
    progress: ProgressLog
    ranks: Communicator
    host: TrainingHost
    #: Whether a stop was requested, by file or signal; called on rank 0 only.
    stop_requested: Callable[[], bool] = lambda: False
    #: The control file's request, once; called on rank 0 only.
    take_control: Callable[[], RunControl | None] = lambda: None
    sleep: Callable[[float], None] = time.sleep
    #: "load", "train", "evaluation", "generation": where a failure happened.
    phase: str = "load"
    step: int = 0
    stop: StopReason | None = None
    #: The reason as text; known on rank 0 only.
    stop_detail: str = ""
    _agree_at: int = 0
    _nan: int = 0
    _last_scored: int = -1
    #: The factor on the planned peak rate that the search found.
    peak: float = 1.0
    controls: Controls = field(init=False)
    _found_rate: FoundRate = field(init=False)
    schedule: ScheduleProgress = field(init=False)
    best: BestScore = field(init=False)
    plateau: PlateauFactor | None = field(init=False)

    def __post_init__(self) -> None:
        self._found_rate = FoundRate(self.submission.beside("rate.json"))
        self.controls = Controls(self.host.regroup, self.clock, self.progress, self.plan.batch.micro)
        self.schedule = ScheduleProgress(
            total=self.clock.total, asked_warmup=self.plan.optimizer.warmup_steps
        )
        self.best = BestScore(patience=self.plan.steps.early_stopping_patience)
        self.plateau = PlateauFactor(self.plan.plateau) if self.plan.plateau else None

    # — the learning rate

    @property
    def rate(self) -> float:
        """The factor on the peak rate for the next step."""
        plateau = self.plateau.factor if self.plateau else 1.0
        return self.peak * rate_factor(self.plan.optimizer, self.schedule) * plateau

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A failure inside is the generation's, for which another remedy helps than for a training step's."""
        before, self.phase = self.phase, "generation"
        yield
        self.phase = before

    # — the run

    def begin(self) -> None:
        """After loading, before the first step: score the untouched model, and look for an earlier
        submission."""
        if self.ranks.rank == 0:
            self.submission.prepare()
        if self.host.scorer is not None:
            scorer = self.host.scorer
            # A tenth of the share for evaluations: about ten are to follow.
            share = EVAL_SHARE / EVALUATIONS * max(self.clock.left, 0.0)
            budget = self.ranks.from_first([max(share, 1.0)])[0]
            value, seconds = self._score_now(
                lambda: scorer.score_base(budget, self.step == 0), lambda: scorer.pass_seconds
            )
            self.best.base = self._score(value, 0)
            self.progress.write(
                EvalEvent(t=self.clock.now(), score=self.best.base, best=False, seconds=seconds)
            )
        self.best.score = self._agree_on_score(self._submitted_score())
        self._last_scored = self.step
        if self.plan.lr_search is not None and self.step == 0:
            self._search(self.plan.lr_search)
        self.phase = "train"
        left = show_seconds(max(self.clock.left, 0))
        text = f"up to {self.clock.total:,} steps on {self.ranks.world} processes, {left} left"
        self.progress.stage("train", text)

    def _search(self, plan: LrSearchPlan) -> None:
        """The peak rate by trial, or as a launch before this one found it."""
        known = self.ranks.from_first([self._found_rate.factor(self.plan) if self.ranks.rank == 0 else 0.0])[
            0
        ]
        scorer, prober, base = self.host.scorer, self.host.prober, self.best.base
        if known:
            self.peak = known
            self.progress.note("lr-search", f"{self._rate_text(known)}, as was found before")
            return
        if scorer is None or prober is None or base is None:
            return
        self.phase = "train"
        seconds = plan.share * max(self.clock.left, 0.0)
        tuned = is_tuned(self.plan.task.task_type, base.value)
        self.progress.stage("search", f"learning rates are tried out for {show_seconds(seconds)} at most")
        if tuned:
            self.progress.note("lr-search", f"a loss of {base.value:.3g}: the base knows such rows already")
        search = LrSearch(
            plan,
            prober,
            self.ranks,
            self.clock.now,
            score=lambda: self._timed(scorer.score)[0],
            lower_is_better=scorer.lower_is_better,
            rewarded=lambda: scorer.rewarded,
            score_s=self.clock.eval_s,
            noise=0.0 if scorer.lower_is_better else SAMPLED_NOISE,
            tuned=tuned,
            pairs=self.plan.task.task_type.has_pairs,
            adapter=self.plan.adapter is not None,
            whole_steps=lambda step_s: min(self.clock.wanted, (self.clock.left - seconds) / step_s),
            on_probe=self._on_probe,
        )
        factor = search.run(base.value, seconds)
        if factor is None:
            self.progress.note("lr-search", "there is no time or no memory for it: the planned rate is kept")
            return
        self.peak = factor
        if self.ranks.rank == 0:
            self._found_rate.remember(self.plan, factor)
        text = f"for {search.longer:.3g} times as many steps {self._rate_text(factor)} is trained with"
        self.progress.note("lr-search", text)

    def _on_probe(self, probe: Probe, steps: int) -> None:
        """The first candidate that beats the base is the first submission. Better ones follow soon enough:
        large models take a while to write."""
        text = f"{probe.score:.5g}" if probe.score is not None else "given up"
        self.progress.note("lr-search", f"{self._rate_text(probe.factor)}: {text} after {steps} steps")
        if probe.score is None or self.best.base is None or self.best.score is not None:
            return
        score = self._score(probe.score, steps)
        if score.beats(self.best.base) and self.best.update(score):
            self.write(score)
        self.best.waited = 0

    def _rate_text(self, factor: float) -> str:
        return f"rate × {factor:.3g} = {factor * self.plan.optimizer.learning_rate:.3g}"

    def optimizer_stepped(self) -> None:
        """Called after the optimizer's step: from here on `rate` is the next step's."""
        self.schedule.advance()

    def stepped(self, seconds: float) -> StepOrders:
        """Called after each step; returns what follows. `seconds`: the step without evaluations. A pause that
        the control file asks for is made here."""
        self.step += 1
        self.clock.stepped(seconds)
        self.controls.pause(seconds, self.sleep, lambda: self.ranks.rank == 0 and self.stop_requested())
        if self.step < self._agree_at:
            return StepOrders(total=self.clock.total)
        orders = self._agree()
        if self.stop is None and orders.evaluate:
            self.evaluate()
            # It may have taken all the time that was left.
            self._agree()
            if self.stop is None and self.best.exhausted:
                self.stop = StopReason(RunEnd.EARLY, f"no better score in {self.best.waited} evaluations")
            orders = orders._replace(stop=self.stop is not None)
        return orders

    def _agree(self) -> StepOrders:
        """Rank 0's orders on all ranks; `stop` is set with them."""
        agreed = _Agreement.of(self.ranks.from_first(self._decided().numbers()))
        self.clock.total = agreed.total
        self.schedule.forecast(agreed.total)
        self._agree_at = min(self.step + agreed.steps_between, max(agreed.total, self.step + 1))
        if agreed.end is not None and self.stop is None:
            self.stop = StopReason(agreed.end, self.stop_detail)
        if agreed.control is not None:
            self.controls.carry_out(agreed.control, self.step)
        return StepOrders(agreed.total, agreed.evaluate, agreed.save, self.stop is not None)

    def _decided(self) -> _Agreement:
        if self.ranks.rank:
            return _Agreement()
        orders = self.clock.after_step()
        stop = self._stop_reason(orders)
        self.stop_detail = stop.detail if stop else self.stop_detail
        steps_between = min(int(AGREE_S / max(self.clock.step_s, 1e-3)), MAX_STEPS_BETWEEN_AGREEMENTS)
        return _Agreement(
            total=orders.total,
            evaluate=orders.evaluate,
            save=orders.save,
            end=stop.end if stop else None,
            steps_between=max(steps_between, 1) if self.clock.sure else 1,
            control=self.take_control(),
        )

    def _stop_reason(self, orders: StepOrders) -> StopReason | None:
        if self._nan >= MAX_NAN:
            return StopReason(RunEnd.NAN, f"no finite loss in {MAX_NAN} logs, the last at step {self.step}")
        if self.stop_requested():
            return StopReason(RunEnd.STOPPED, f"asked to stop at step {self.step}")
        if not orders.stop:
            return None
        if self.step >= self.clock.wanted:
            return StopReason(RunEnd.FINISHED, f"all {self.step:,} steps done")
        return StopReason(RunEnd.CLOCK, f"the time allows {self.step:,} of {self.clock.wanted:,} steps")

    def evaluate(self) -> None:
        """Score the model; one that is better than all before is submitted. Without a scorer the newest
        is."""
        if self.host.scorer is None:
            self._submit(None)
            self.clock.evaluated(0.0)
            self._last_scored = self.step
            return
        scorer = self.host.scorer
        with self.host.averaged():
            value, seconds = self._score_now(scorer.score)
            self._last_scored = self.step
            score = self._score(value, self.step)
            better = self.best.update(score)
            self.progress.write(EvalEvent(t=self.clock.now(), score=score, best=better, seconds=seconds))
            if better:
                self._submit(score)
        if self.plateau and (change := self.plateau.update(better)):
            self.progress.note("learning-rate", change)

    def _score_now(
        self, score: Callable[[], float], later: Callable[[], float] | None = None
    ) -> tuple[float, float]:
        """`later`: how long it will take the next time, where that differs."""
        value, seconds = self._timed(score, later)
        if not math.isfinite(value):
            raise NotANumber(f"the held-out score is {value} after {self.step} steps: the model is broken")
        return value, seconds

    def _timed(
        self, score: Callable[[], float], later: Callable[[], float] | None = None
    ) -> tuple[float, float]:
        before, self.phase = self.phase, "evaluation"
        shown = self.clock.eval_s >= SHOWN_S
        if shown:
            self.progress.stage("evaluate")
        began = self.clock.now()
        # Ranks that compare other numbers would part ways.
        value = self.ranks.from_first([score()])[0]
        seconds = self.clock.now() - began
        self.clock.evaluated(later() if later else seconds)
        self.phase = before
        if shown:
            self.progress.stage(before)
        return value, seconds

    def _score(self, value: float, step: int, rewarded: RewardScore | None = None) -> HeldOutScore:
        """From the scorer's last evaluation, or with what was `rewarded` earlier."""
        assert self.host.scorer is not None
        scorer = self.host.scorer
        return HeldOutScore(
            value=value,
            metric=scorer.metric,
            lower_is_better=scorer.lower_is_better,
            step=step,
            rewarded=rewarded or scorer.rewarded,
        )

    def _submit(self, score: HeldOutScore | None) -> None:
        """Submit the weights as they are now, but never an untouched model."""
        if self.step > 0:
            self.write(score)

    def write(self, score: HeldOutScore | None) -> None:
        began = self.clock.now()
        if self.ranks.rank == 0:
            self.submission.put(self.host.write, score, base=self.best.base)
        else:
            self.host.write(None)
        self.clock.submitted(self.clock.now() - began)
        step = score.step if score is not None and score.step is not None else self.step
        self.progress.write(SubmissionEvent(t=self.clock.now(), score=score, step=step))

    def logged(self, loss: float | None, grad_norm: float | None) -> None:
        """The numbers of a log: several in a row that are not finite end the run."""
        bad = any(value is not None and not math.isfinite(value) for value in (loss, grad_norm))
        self._nan = self._nan + 1 if bad else 0

    def log_step(self, step: int, reading: SpeedReading, memory: int | None, **numbers: float | None) -> None:
        """`numbers`: epoch, loss, lr and grad_norm. Events hold no NaN: JSON has none, and a missing number
        says it as well."""
        clock = self.clock
        finite: dict[str, Any] = {
            name: value for name, value in numbers.items() if value is not None and math.isfinite(value)
        }
        ends_at = clock.now() + (clock.total - clock.done) * clock.step_s + clock.finish_s
        event = StepEvent(t=clock.now(), step=step, total=clock.total, memory_bytes=memory, ends_at=ends_at)
        self.progress.write(event.model_copy(update={**finite, **reading._asdict()}))

    def checkpointed(self, folder: Path, seconds: float) -> None:
        self.clock.saved(seconds)
        self.progress.write(CheckpointEvent(t=self.clock.now(), step=self.step, path=str(folder)))

    # — the end

    def finish(self) -> TrainingOutcome:
        """After the last step: score the last state, if there is time, and submit the best."""
        stop = self.stop or StopReason(RunEnd.FINISHED, f"all {self.step:,} steps done")
        self.phase = "evaluation"
        if stop.end is not RunEnd.NAN and self.step > self._last_scored:
            self._final_evaluation(stop)
        return TrainingOutcome(
            end=stop.end, detail=stop.detail, steps=self.step, best=self.best.score, base=self.best.base
        )

    def _final_evaluation(self, stop: StopReason) -> None:
        seconds = self.clock.eval_s + self.clock.submission_s
        time_left = self.clock.left if stop.end is not RunEnd.STOPPED else min(self.clock.left, STOP_GRACE_S)
        fits, submitted = self.ranks.from_first([time_left >= seconds, self.submission.exists])
        if fits:
            self.evaluate()
        elif not submitted:
            self.progress.note("unjudged", "no time to evaluate: the last state is submitted as it is")
            with self.host.averaged():
                self._submit(None)

    def _submitted_score(self) -> HeldOutScore | None:
        """Return the score of an earlier attempt's submission, if known."""
        if self.ranks.rank or not self.submission.exists:
            return None
        score, base, own = self.submission.score, self.submission.base_score, self.best.base
        if score is None or base is None or own is None or self.step or score.rewarded is not None:
            return score or self.best.score
        moved = own.value - base.value
        if base.metric != own.metric or abs(moved) < SAME_ROWS:
            return score
        # Of other rows: with another number of them, or by another version, the split is another.
        here = score.model_copy(update={"value": score.value + moved})
        text = f"{score.value:.5g} on rows of which the base had {base.value:.5g}: {here.value:.5g} on these"
        self.progress.note("score", f"an earlier attempt's submission had {text}")
        return here

    def _agree_on_score(self, score: HeldOutScore | None) -> HeldOutScore | None:
        """Rank 0 alone reads the file of scores."""
        scorer = self.host.scorer
        if scorer is None:
            return None
        own = scorer.rewarded
        width = 0 if own is None else 1 + 2 * len(own.means)
        numbers = [math.nan] * (2 + width)
        if score is not None and score.metric == scorer.metric:
            earlier = score.rewarded
            parts = [] if earlier is None else [earlier.kl, *earlier.means, *earlier.base]
            if len(parts) == width:
                numbers = [score.value, score.step, *parts]
        value, step, *parts = self.ranks.from_first(numbers)
        if math.isnan(value):
            return None
        if own is None:
            return self._score(value, int(step))
        kl, means, base = parts[0], tuple(parts[1 : 1 + len(own.means)]), tuple(parts[1 + len(own.means) :])
        rewarded = own.model_copy(update={"kl": kl, "means": means, "base": base})
        return self._score(value, int(step), rewarded)

    # — across attempts

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed training needs."""
        return {
            "step": self.step,
            "peak": self.peak,
            "pace": self.schedule.state(),
            "plateau": self.plateau.state() if self.plateau else None,
            "best": self.best.score.model_dump() if self.best.score else None,
            "base": self.best.base.model_dump() if self.best.base else None,
            "waited": self.best.waited,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state` before `begin`: the same schedule continues in the time that is left now."""
        self.step = int(state["step"])
        self.peak = float(state.get("peak", 1.0))
        self.clock.resumed(self.step)
        self.schedule.restore(state["pace"])
        self.best.score = HeldOutScore.model_validate(state["best"]) if state.get("best") else None
        if self.plateau and state.get("plateau"):
            self.plateau.restore(state["plateau"])
        self.best.base = HeldOutScore.model_validate(state["base"]) if state.get("base") else None
        self.best.waited = int(state.get("waited", 0))
