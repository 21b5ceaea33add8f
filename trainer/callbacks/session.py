"""The brain of a running training, the same for every engine and on every rank.

The engine tells it when a step is over and does what it orders. All ranks call every method at the same
point; rank 0 decides, the others follow. What is best is decided by the judge, which speaks the validator's
metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from core.plan import TrainingPlan
from core.plan_parts import LrSearchPlan
from core.planning.schedule import EVALUATIONS
from core.progress import CheckpointEvent, EvalEvent, SubmissionEvent
from core.rewarded import Rewarded
from core.run_files import RunEnd, Score
from core.units import show_seconds
from trainer.callbacks.best import Best
from trainer.callbacks.clock import EVAL_SHARE, Clock, Orders
from trainer.callbacks.failures import NotANumber
from trainer.callbacks.pace import Pace, rate_factor
from trainer.callbacks.plateau import Plateau
from trainer.callbacks.ranks import Ranks
from trainer.callbacks.report import Report
from trainer.callbacks.search import SAMPLED_NOISE, Probe, Prober, Search
from trainer.callbacks.submission import Submission
from trainer.sheet import Outcome

#: Ranks compare notes at most this often: a broadcast makes the GPU wait for its own queue.
AGREE_S = 0.5
MOST_STEPS_APART = 20
#: Asked to stop, a run takes this long at most for its last evaluation and for a checkpoint, each.
STOP_GRACE_S = 20.0
#: Evaluations that take longer are a stage of their own in the progress.
SHOWN_S = 2.0
#: Logs in a row without a number: one is a bad batch, several are a broken model.
MOST_NAN = 3


class Judge(Protocol):
    """Scores the model as it is, on held-out rows. All ranks call every method."""

    metric: str
    lower_is_better: bool
    #: What the last score was made of, where that is more than one number says.
    rewarded: Rewarded | None
    #: Seconds that one evaluation takes, as `begin` saw it: less than `begin`, which also tries and warms up.
    pass_s: float

    def begin(self, budget_s: float, untouched: bool) -> float:
        """The base model's score, before the first step of this process. Settles how many rows one
        evaluation can read in about `budget_s`. `untouched`: the model has not been trained yet and is the
        base itself."""

    def judge(self) -> float: ...


class Host(Protocol):
    """The engine, as far as the session needs it."""

    judge: Judge | None
    #: What tries learning rates out; None where the engine cannot undo a step.
    prober: Prober | None

    def write(self, folder: Path | None) -> None:
        """The weights as a submission; all ranks call it, those without a folder only lend their shards."""

    def averaged(self) -> AbstractContextManager[bool]:
        """Inside it the model has its averaged weights; False when there are none."""


class Stop(NamedTuple):
    end: RunEnd
    detail: str = ""


_ENDS = tuple(RunEnd)
_NONE = -1.0


@dataclass
class Session:
    plan: TrainingPlan
    clock: Clock
    submission: Submission
    report: Report
    ranks: Ranks
    host: Host
    #: Whether a stop was asked for, by file or signal; asked on rank 0 only.
    stop_asked: Callable[[], bool] = lambda: False
    #: "load", "train", "evaluation", "generation": what a failure was in the middle of.
    moment: str = "load"
    step: int = 0
    stop: Stop | None = None
    #: Why, in words; known on rank 0 only.
    stop_detail: str = ""
    _agree_at: int = 0
    _nan: int = 0
    _last_judged: int = -1
    #: What the search for a learning rate made of the peak.
    peak: float = 1.0
    pace: Pace = field(init=False)
    best: Best = field(init=False)
    plateau: Plateau | None = field(init=False)

    def __post_init__(self) -> None:
        self.pace = Pace(total=self.clock.total, asked_warmup=self.plan.optimizer.warmup_steps)
        self.best = Best(patience=self.plan.steps.early_stopping_patience)
        self.plateau = Plateau(self.plan.plateau) if self.plan.plateau else None

    # — the learning rate

    @property
    def rate(self) -> float:
        """The factor on the peak rate for the next step."""
        plateau = self.plateau.factor if self.plateau else 1.0
        return self.peak * rate_factor(self.plan.optimizer, self.pace) * plateau

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A failure inside is the generation's, which another attempt than one of a step's can mend."""
        before, self.moment = self.moment, "generation"
        yield
        self.moment = before

    # — the course of a run

    def begin(self) -> None:
        """After loading, before the first step: what the untouched model scores, and what is there
        already."""
        if self.ranks.rank == 0:
            self.submission.prepare()
        if self.host.judge is not None:
            judge = self.host.judge
            budget = self._base_budget()
            value, seconds = self._judged(lambda: judge.begin(budget, self.step == 0), lambda: judge.pass_s)
            self.best.base = self._score(value, 0)
            self.report.say(EvalEvent(t=self.clock.now(), score=self.best.base, best=False, seconds=seconds))
        self.best.score = self._agreed(self._earlier())
        self._last_judged = self.step
        if self.plan.lr_search is not None and self.step == 0:
            self._search(self.plan.lr_search)
        self.moment = "train"
        left = show_seconds(max(self.clock.left, 0))
        text = f"up to {self.clock.total:,} steps on {self.ranks.world} processes, {left} left"
        self.report.stage("train", text)

    def _search(self, plan: LrSearchPlan) -> None:
        """The peak rate by trial, or as a launch before this one found it."""
        known = self.ranks.from_first([self.submission.peak(self.plan) if self.ranks.rank == 0 else 0.0])[0]
        judge, prober, base = self.host.judge, self.host.prober, self.best.base
        if known:
            self.peak = known
            self.report.note("lr-search", f"{self._rate_words(known)}, as was found before")
            return
        if judge is None or prober is None or base is None:
            return
        self.moment = "train"
        seconds = plan.share * max(self.clock.left, 0.0)
        self.report.stage("search", f"learning rates are tried out for {show_seconds(seconds)} at most")
        search = Search(
            plan,
            prober,
            self.ranks,
            self.clock.now,
            judge=lambda: self._timed(judge.judge)[0],
            lower_is_better=judge.lower_is_better,
            rewarded=lambda: judge.rewarded,
            judge_s=self.clock.eval_s,
            noise=0.0 if judge.lower_is_better else SAMPLED_NOISE,
            probed=self._probed,
        )
        found = search.run(base.value, seconds)
        if found is None:
            self.report.note("lr-search", "there is no time for it: the planned rate is kept")
            return
        self.peak = found
        if self.ranks.rank == 0:
            self.submission.remember_peak(self.plan, found)
        self.report.note("lr-search", f"{self._rate_words(found)} is trained with")

    def _probed(self, probe: Probe, steps: int) -> None:
        """The first candidate that beats the base is a submission, earlier than any other. Better ones follow
        soon enough: large models take a while to write."""
        words = f"{probe.score:.5g}" if probe.score is not None else "diverged"
        self.report.note("lr-search", f"{self._rate_words(probe.factor)}: {words} after {steps} steps")
        if probe.score is None or self.best.base is None or self.best.score is not None:
            return
        score = self._score(probe.score, steps)
        if score.beats(self.best.base) and self.best.judge(score):
            self._write(score)
        self.best.waited = 0

    def _rate_words(self, factor: float) -> str:
        return f"rate × {factor:.3g} = {factor * self.plan.optimizer.learning_rate:.3g}"

    def _base_budget(self) -> float:
        """A tenth of the share for evaluations: about ten are to follow."""
        return max(EVAL_SHARE / EVALUATIONS * max(self.clock.left, 0.0), 1.0)

    def moved(self) -> None:
        """The optimizer has moved the weights: from here on `rate` is the next step's."""
        self.pace.advance()

    def stepped(self, seconds: float) -> Orders:
        """After a step: what follows. The step's own duration, without evaluations."""
        self.step += 1
        self.clock.stepped(seconds)
        if self.step < self._agree_at:
            return Orders(total=self.clock.total)
        orders = self._agree()
        if self.stop is None and orders.evaluate:
            self.evaluate()
            # It may have taken all the time there was.
            self._agree()
            orders = self._after_evaluation(orders)
        return orders

    def _agree(self) -> Orders:
        """Rank 0's orders on all ranks; `stop` is set with them."""
        said: list[float] = [_NONE] * 5
        if self.ranks.rank == 0:
            orders, stop = self._decided()
            apart = min(int(AGREE_S / max(self.clock.step_s, 1e-3)), MOST_STEPS_APART)
            apart = max(apart, 1) if self.clock.sure else 1
            end = float(_ENDS.index(stop.end)) if stop else _NONE
            said = [orders.total, orders.evaluate, orders.save, end, apart]
        heard = [int(number) for number in self.ranks.from_first(said)]
        total, evaluate, save, end, apart = heard
        self.clock.total = total
        self.pace.forecast(total)
        self._agree_at = min(self.step + apart, max(total, self.step + 1))
        if end >= 0 and self.stop is None:
            self.stop = Stop(_ENDS[end], self.stop_detail)
        return Orders(total, bool(evaluate), bool(save), self.stop is not None)

    def _decided(self) -> tuple[Orders, Stop | None]:
        orders = self.clock.after_step()
        stop = self._stop(orders)
        if stop:
            self.stop_detail = stop.detail
        return orders, stop

    def _stop(self, orders: Orders) -> Stop | None:
        if self._nan >= MOST_NAN:
            return Stop(RunEnd.NAN, f"no finite loss in {MOST_NAN} logs, the last at step {self.step}")
        if self.stop_asked():
            return Stop(RunEnd.STOPPED, f"asked to stop at step {self.step}")
        if not orders.stop:
            return None
        if self.step >= self.clock.wanted:
            return Stop(RunEnd.FINISHED, f"all {self.step:,} steps done")
        return Stop(RunEnd.CLOCK, f"the time allows {self.step:,} of {self.clock.wanted:,} steps")

    def _after_evaluation(self, orders: Orders) -> Orders:
        if self.stop is None and self.best.exhausted:
            self.stop = Stop(RunEnd.EARLY, f"no better score in {self.best.waited} evaluations")
        return orders._replace(stop=self.stop is not None)

    def evaluate(self) -> None:
        """Judge the model; a better one than all before is submitted. Without a judge the newest is."""
        if self.host.judge is None:
            self._submit(None)
            self.clock.evaluated(0.0)
            self._last_judged = self.step
            return
        judge = self.host.judge
        with self.host.averaged():
            value, seconds = self._judged(judge.judge)
            self._last_judged = self.step
            better = self._better(value, seconds)
            if better:
                self._submit(self.best.score)
        if self.plateau and (said := self.plateau.judged(better)):
            self.report.note("learning-rate", said)

    def _better(self, value: float, seconds: float | None = None) -> bool:
        score = self._score(value, self.step)
        better = self.best.judge(score)
        self.report.say(EvalEvent(t=self.clock.now(), score=score, best=better, seconds=seconds))
        return better

    def _judged(
        self, judge: Callable[[], float], later: Callable[[], float] | None = None
    ) -> tuple[float, float]:
        """`later`: what it will take the next time, where that is something else."""
        value, seconds = self._timed(judge, later)
        if not math.isfinite(value):
            raise NotANumber(f"the held-out score is {value} after {self.step} steps: the model is broken")
        return value, seconds

    def _timed(
        self, judge: Callable[[], float], later: Callable[[], float] | None = None
    ) -> tuple[float, float]:
        before, self.moment = self.moment, "evaluation"
        shown = self.clock.eval_s >= SHOWN_S
        if shown:
            self.report.stage("evaluate")
        began = self.clock.now()
        value = judge()
        seconds = self.clock.now() - began
        self.clock.evaluated(later() if later else seconds)
        self.moment = before
        if shown:
            self.report.stage(before)
        return value, seconds

    def _score(self, value: float, step: int, rewarded: Rewarded | None = None) -> Score:
        """What the judge has just said, or what was `rewarded` earlier."""
        assert self.host.judge is not None
        judge = self.host.judge
        return Score(
            value=value,
            metric=judge.metric,
            lower_is_better=judge.lower_is_better,
            step=step,
            rewarded=rewarded or judge.rewarded,
        )

    def _submit(self, score: Score | None) -> None:
        """The weights as they are now; at the very start nothing: an untouched model is no submission."""
        if self.step > 0:
            self._write(score)

    def _write(self, score: Score | None) -> None:
        began = self.clock.now()
        if self.ranks.rank == 0:
            self.submission.put(self.host.write, score)
        else:
            self.host.write(None)
        self.clock.submitted(self.clock.now() - began)
        step = score.step if score is not None and score.step is not None else self.step
        self.report.say(SubmissionEvent(t=self.clock.now(), score=score, step=step))

    def logged(self, loss: float | None, grad_norm: float | None) -> None:
        """What a log said: several in a row that are no numbers end the run."""
        bad = any(value is not None and not math.isfinite(value) for value in (loss, grad_norm))
        self._nan = self._nan + 1 if bad else 0

    def checkpointed(self, folder: Path, seconds: float) -> None:
        self.clock.saved(seconds)
        self.report.say(CheckpointEvent(t=self.clock.now(), step=self.step, path=str(folder)))

    # — the end

    def finish(self) -> Outcome:
        """After the last step: the last state is judged, if there is time, and what is best is submitted."""
        stop = self.stop or Stop(RunEnd.FINISHED, f"all {self.step:,} steps done")
        self.moment = "evaluation"
        if stop.end is not RunEnd.NAN and self.step > self._last_judged:
            self._last_words(stop)
        return Outcome(
            end=stop.end, detail=stop.detail, steps=self.step, best=self.best.score, base=self.best.base
        )

    def _last_words(self, stop: Stop) -> None:
        seconds = self.clock.eval_s + self.clock.submission_s
        room = self.clock.left if stop.end is not RunEnd.STOPPED else min(self.clock.left, STOP_GRACE_S)
        fits, there = self.ranks.from_first([room >= seconds, self.submission.exists])
        if fits:
            self.evaluate()
        elif not there:
            self.report.note("unjudged", "no time to evaluate: the last state is submitted as it is")
            with self.host.averaged():
                self._submit(None)

    def _earlier(self) -> Score | None:
        """What the submission of an earlier attempt scored."""
        if self.ranks.rank or not self.submission.exists:
            return None
        return self.submission.score or self.best.score

    def _agreed(self, score: Score | None) -> Score | None:
        """Rank 0 alone reads the file of scores."""
        judge = self.host.judge
        if judge is None:
            return None
        own = judge.rewarded
        width = 0 if own is None else 1 + 2 * len(own.means)
        said = [math.nan] * (2 + width)
        if score is not None and score.metric == judge.metric:
            parts = _parts(score.rewarded)
            if len(parts) == width:
                said = [score.value, score.step, *parts]
        value, step, *parts = self.ranks.from_first(said)
        if math.isnan(value):
            return None
        if own is None:
            return self._score(value, int(step))
        kl, means, base = parts[0], tuple(parts[1 : 1 + len(own.means)]), tuple(parts[1 + len(own.means) :])
        rewarded = own.model_copy(update={"kl": kl, "means": means, "base": base})
        return self._score(value, int(step), rewarded)

    # — across attempts

    def state(self) -> dict[str, Any]:
        """What a resumed training must know."""
        return {
            "step": self.step,
            "peak": self.peak,
            "pace": self.pace.state(),
            "plateau": self.plateau.state() if self.plateau else None,
            "best": self.best.score.model_dump() if self.best.score else None,
            "base": self.best.base.model_dump() if self.best.base else None,
            "waited": self.best.waited,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Before `begin`: the same schedule goes on, in the time that is left now."""
        self.step = int(state["step"])
        self.peak = float(state.get("peak", 1.0))
        self.clock.resumed(self.step)
        self.pace.restore(state["pace"])
        self.best.score = Score.model_validate(state["best"]) if state.get("best") else None
        if self.plateau and state.get("plateau"):
            self.plateau.restore(state["plateau"])
        self.best.base = Score.model_validate(state["base"]) if state.get("base") else None
        self.best.waited = int(state.get("waited", 0))


def _parts(rewarded: Rewarded | None) -> list[float]:
    return [] if rewarded is None else [rewarded.kl, *rewarded.means, *rewarded.base]
