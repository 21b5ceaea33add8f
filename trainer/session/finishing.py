"""What a session does after its last evaluation: a mean of the best states, then the last stretch.

By then the best model is submitted and the outcome is on disk, so whatever happens here costs neither. The
clock has kept time for it; all ranks go by the first one's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        if outcome.end not in _ENDS or not self.kept.states:
            return
        self.session.record(outcome)
        best = self.session.best
        still_fell = best.waited <= MOST_WAITED and not best.exhausted
        self._average()
        if self.session.clock.stretches and self.session.plan.last_stretch is not None:
            self._stretch(still_fell)

    def _average(self) -> None:
        session, clock, soup_plan = self.session, self.session.clock, self.session.plan.soup
        if soup_plan is None or len(self.kept.states) < 2:
            return
        session.progress.stage("soup", f"means of up to {len(self.kept.states)} states are scored")
        last = clock.now()
        until = last + soup_plan.share * clock.whole

        def has_time() -> bool:
            nonlocal last
            now = clock.now()
            candidate, last = max(clock.eval_s, now - last), now
            fits = clock.fits(candidate + clock.submission_s + clock.stretch_s)
            return fits and now + candidate <= until and not session.stop_requested()

        soup = greedy_soup(
            self.kept, session.scored_now, goes_on=lambda: self._agree(has_time), on_candidate=self._note
        )
        if len(soup.numbers) < 2 or not soup.score.beats(session.best.score):
            return
        if self._agree(self._may_submit):
            self.kept.store.load(soup.numbers)
            session.best.update(soup.score)
            session.progress.write(EvalEvent(t=clock.now(), score=soup.score, best=True))
            session.write(soup.score)
            self.numbers = soup.numbers

    def _note(self, candidate: Soup, better: bool) -> None:
        count, value = len(candidate.numbers), candidate.score.value
        text = f"the mean of {count} states: {value:.5g}, {'better' if better else 'no better'}"
        self.session.progress.note("soup", text)

    def _stretch(self, still_fell: bool) -> None:
        session, clock, plan = self.session, self.session.clock, self.session.plan.last_stretch
        stretcher = session.host.stretcher
        assert plan is not None
        assert stretcher is not None
        if not still_fell or not self.numbers:
            why = (
                "its best state came earlier" if self.numbers else "the best model is from an earlier launch"
            )
            session.progress.note("last-stretch", f"held-out rows are not trained on: {why}")
            return
        session.progress.stage("last-stretch", "held-out rows are trained on")
        until = clock.now() + plan.share * clock.whole

        def seconds_left() -> float:
            after = clock.eval_s + clock.submission_s
            left = min(clock.spare(after), until - clock.now() - after)
            stops = session.ranks.rank == 0 and session.stop_requested()
            return session.ranks.from_first([-1.0 if stops else left])[0]

        if seconds_left() <= 0:
            session.progress.note("last-stretch", "held-out rows are not trained on: there is no time for it")
            return
        self.kept.store.load(self.numbers)
        session.phase = "train"
        step_s = session.ranks.from_first([clock.step_s])[0]
        result = LastStretch(plan, stretcher, session.ranks, session.peak, step_s, seconds_left).run()
        submits = self._agree(lambda: result.accepted and self._may_submit())
        if submits:
            session.write(session.best.score)
        session.progress.note("last-stretch", _text(result, submits))

    def _may_submit(self) -> bool:
        """Whether there is time to write a model."""
        clock = self.session.clock
        in_grace = clock.submission_s <= STOP_GRACE_S or not self.session.stop_requested()
        return in_grace and clock.fits(clock.submission_s)

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
