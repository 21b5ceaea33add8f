"""What a session does after its last evaluation: a mean of the best states, then the last stretch.

By then the best model is submitted and the outcome is on disk, so whatever happens here costs neither. The
clock has kept time for it; all ranks go by the first one's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.planning.plan import LastStretchPlan, SoupPlan
from core.runs.progress import EvalEvent
from core.runs.run_files import HeldOutScore, RunEnd
from trainer.handoff import TrainingOutcome
from trainer.session.clock import STOP_GRACE_S
from trainer.session.last_stretch import LastStretch, StretchResult
from trainer.session.soup import BestStates, Soup, greedy_soup

if TYPE_CHECKING:
    from trainer.session.session import Session

#: Ends after which there is something to improve, and time.
_ENDS = (RunEnd.FINISHED, RunEnd.CLOCK, RunEnd.EARLY)
#: The best state came last, or one evaluation before: more training still helped, so more rows will.
MOST_WAITED = 1


@dataclass
class Finishing:
    session: Session
    kept: BestStates
    #: The states whose mean has the best score of all; empty where an earlier process had it.
    numbers: tuple[int, ...] = ()
    #: The states whose mean the weights are.
    _loaded: tuple[int, ...] = ()

    @classmethod
    def of(cls, session: Session) -> Finishing | None:
        """None where nothing is planned, or the engine cannot put weights aside. No time is kept for what
        cannot be."""
        plan, clock, host = session.plan, session.clock, session.host
        clock.stretches = clock.stretches and host.stretcher is not None
        if host.snapshots is None or host.scorer is None:
            clock.soup_members, clock.stretches = 0, False
        if clock.soup_members < 2 and not clock.stretches:
            return None
        assert host.snapshots is not None
        return cls(session, BestStates(host.snapshots, plan.soup.members if plan.soup else 1))

    def offer(self, score: HeldOutScore, better: bool) -> None:
        """After an evaluation: keep the weights as they were scored, if they are among the best."""
        clock, began = self.session.clock, self.session.clock.now()
        kept = self.kept.offer(score)
        if kept:
            clock.kept(clock.now() - began)
        if better:
            self.numbers = (self.kept.states[0].number,) if kept else ()
        if kept is None and clock.soup_members > len(self.kept.states):
            clock.soup_members = len(self.kept.states)
            text = f"there is room for {clock.soup_members} states of the weights beside the training"
            self.session.progress.note("soup", text)
        clock.stretches = clock.stretches and bool(self.kept.states)

    def run(self, outcome: TrainingOutcome) -> None:
        """`outcome`: as it would be without all this."""
        try:
            if outcome.end in _ENDS and self.kept.states:
                self._improve(outcome)
        finally:
            self.kept.store.clear()

    def _improve(self, outcome: TrainingOutcome) -> None:
        session, best = self.session, self.session.best
        session.record(outcome)
        still_fell = best.waited <= MOST_WAITED and not best.exhausted
        if session.plan.soup is not None and len(self.kept.states) > 1:
            self._average(session.plan.soup, outcome)
        if session.clock.stretches and session.plan.last_stretch is not None:
            self._stretch(session.plan.last_stretch, still_fell)

    def _average(self, plan: SoupPlan, outcome: TrainingOutcome) -> None:
        session, clock = self.session, self.session.clock
        until = clock.now() + plan.share * clock.whole

        def has_time(states: int) -> bool:
            seconds = clock.eval_s + 2 * clock.load_s(states) + clock.submission_s
            in_share = clock.now() + seconds <= until
            return in_share and clock.fits(seconds + clock.stretch_s) and not session.stop_requested()

        soup = greedy_soup(
            self.kept.states,
            self._scored,
            goes_on=lambda states: self._agree(lambda: has_time(states)),
            on_candidate=self._note,
        )
        if len(soup.numbers) < 2 or not soup.score.beats(session.best.score):
            return
        loading = self._load_s(soup.numbers)
        if not self._agree(lambda: self._may_submit(loading)):
            return
        self._load(soup.numbers)
        if not self._agree(self._may_submit):
            return
        # The model first, then the record of its score: a kill between them leaves no false record.
        session.write(soup.score)
        session.best.update(soup.score)
        session.progress.write(EvalEvent(t=clock.now(), score=soup.score, best=True))
        session.record(outcome.model_copy(update={"best": soup.score}))
        self.numbers = soup.numbers

    def _scored(self, numbers: tuple[int, ...]) -> HeldOutScore | None:
        self.session.progress.stage("soup", f"the mean of {len(numbers)} states is scored")
        self._load(numbers)
        return self.session.scored_now()

    def _load_s(self, numbers: tuple[int, ...]) -> float:
        return 0.0 if numbers == self._loaded else self.session.clock.load_s(len(numbers))

    def _load(self, numbers: tuple[int, ...]) -> None:
        """Give the weights the mean of these states, unless they are that already."""
        if numbers == self._loaded:
            return
        clock, began = self.session.clock, self.session.clock.now()
        self.kept.store.load(numbers)
        self._loaded = numbers
        clock.loaded(clock.now() - began, len(numbers))

    def _note(self, candidate: Soup, better: bool) -> None:
        count, value = len(candidate.numbers), candidate.score.value
        text = f"the mean of {count} states: {value:.5g}, {'better' if better else 'no better'}"
        self.session.progress.note("soup", text)

    def _stretch(self, plan: LastStretchPlan, still_fell: bool) -> None:
        session, clock, stretcher = self.session, self.session.clock, self.session.host.stretcher
        assert stretcher is not None
        if not still_fell or not self.numbers:
            why = (
                "its best state came earlier" if self.numbers else "the best model is from an earlier launch"
            )
            session.progress.note("last-stretch", f"held-out rows are not trained on: {why}")
            return
        until = clock.now() + plan.share * clock.whole

        def seconds_left() -> float:
            after = clock.eval_s + clock.submission_s
            left = min(clock.spare(after), until - clock.now() - after)
            stops = session.ranks.rank == 0 and session.stop_requested()
            return session.ranks.from_first([-1.0 if stops else left])[0]

        loading = session.ranks.from_first([self._load_s(self.numbers)])[0]
        if seconds_left() <= loading:
            session.progress.note("last-stretch", "held-out rows are not trained on: there is no time for it")
            return
        session.progress.stage("last-stretch", "held-out rows are trained on")
        self._load(self.numbers)
        session.phase = "train"
        step_s = session.ranks.from_first([clock.step_s])[0]
        result = LastStretch(plan, stretcher, session.ranks, session.peak, step_s, seconds_left).run()
        submits = self._agree(lambda: result.accepted and self._may_submit())
        if submits:
            session.write(session.best.score)
        session.progress.note("last-stretch", _text(result, submits))

    def _may_submit(self, before: float = 0.0) -> bool:
        """Whether there is time to write a model, after something that takes so many seconds."""
        clock = self.session.clock
        seconds = before + clock.submission_s
        in_grace = seconds <= STOP_GRACE_S or not self.session.stop_requested()
        return in_grace and clock.fits(seconds)

    def _agree(self, decide: Callable[[], bool]) -> bool:
        """The first rank decides."""
        ranks = self.session.ranks
        return bool(ranks.from_first([ranks.rank == 0 and decide()])[0])


def _text(result: StretchResult, submitted: bool) -> str:
    if not result.steps:
        return f"held-out rows are not trained on: {result.why}"
    scores = f"the rows that stayed out {result.before:.5g} → {result.after:.5g}"
    verdict = "submitted with the score from before" if submitted else "not submitted"
    return f"{result.steps:,} steps on held-out rows; {scores}: {verdict}"
