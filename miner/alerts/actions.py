"""Actions that rules ask of running trainings: smaller or larger passes, and pauses. Each is judged.

An attempt has one open action at a time. It is requested in the control file, the training answers with a
`ControlEvent`, and after a while the numbers before and after are compared. What made things worse is
undone, and its rule leaves this attempt alone from then on. The store has all that a restart needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from core.planning.candidate import vary
from core.planning.memory.peak import peak_bytes
from core.runs.progress import ControlEvent
from core.runs.run_files import even_micro
from miner.alerts.metrics import LiveMeasurements
from miner.alerts.rules import AlertAction, AlertRule
from miner.alerts.state import RuleTracker, TrackedRule
from miner.jobs.running_training import RunningTraining
from miner.observe.alerts import AlertSubject, gpu_subject, job_subject
from miner.store.actions import (
    ActionNumbers,
    ActionOutcome,
    ActionRow,
    NewAction,
    actions_of_job,
    add_action,
    update_action,
)
from miner.store.store import Store

log = logging.getLogger(__name__)

TIMES, SETTLE_SECONDS, WORSE = 4, 120.0, 0.1
#: A training that does not answer in this time cannot be asked: its engine has no step boundary for us.
ANSWER_SECONDS = 300.0
#: The least share of the time that a GPU computes.
LEAST_DUTY = 0.7
#: Larger passes are not tried where the memory measured would come above this share of the GPU.
MEMORY_CEILING = 0.85
#: Factor on what an action may cost before it is undone, if it helped.
_WORSE_ALTHOUGH_IT_HELPED = 3.0
#: Largest distance of the next number that shares a batch out evenly, in requested changes.
_MOST_GROWTH = 2.5
#: The loss is worse if it is this much above what it was, and beyond its own scatter.
_LOSS_WORSE = 0.1


@dataclass(frozen=True, slots=True)
class ProposedChange:
    """A change to request, or the reason why none is possible."""

    kind: str
    micro: int | None = None
    duty: float | None = None
    refusal: str = ""


@dataclass(slots=True)
class OpenAction:
    """An action that is not judged yet."""

    row: ActionRow
    #: In the control file. None if an earlier process asked: then any answer since counts.
    number: int | None
    applied_at: float | None = None


@dataclass
class AttemptActions:
    """The actions of one attempt."""

    job_id: int
    attempt: int
    rows: list[ActionRow] = field(default_factory=list)
    open: OpenAction | None = None
    #: Rules that do nothing more in this attempt.
    blocked: set[str] = field(default_factory=set)
    ended_at: float = -math.inf

    @classmethod
    def load(cls, job_id: int, attempt: int, rows: list[ActionRow]) -> AttemptActions:
        own = [row for row in rows if row.attempt == attempt]
        unfinished = [row for row in own if row.ended_at is None]
        final = (ActionOutcome.UNDONE, ActionOutcome.REFUSED, ActionOutcome.NEXT_ATTEMPT)
        return cls(
            job_id,
            attempt,
            own,
            OpenAction(unfinished[-1], unfinished[-1].after.get("number")) if unfinished else None,
            {row.rule for row in own if row.outcome in final or was_useless(row)},
            max((row.ended_at for row in own if row.ended_at is not None), default=-math.inf),
        )

    @property
    def key(self) -> tuple[int, int]:
        return self.job_id, self.attempt

    def count(self, rule: str) -> int:
        return sum(row.rule == rule and row.outcome is not ActionOutcome.RETURNED for row in self.rows)

    @property
    def has_shrunk(self) -> bool:
        """True if passes were made smaller: they are not made larger again, or two rules would fight."""
        return any(row.micro_change < 0 for row in self.rows)


class ActionController:
    def __init__(self, store: Store, live: LiveMeasurements) -> None:
        self._store, self._live = store, live
        self._attempts: dict[tuple[int, int], AttemptActions] = {}

    async def step(self, rules: Mapping[str, AlertRule], tracker: RuleTracker, now: float) -> None:
        """Follow up what was asked, and ask for what rules want now."""
        running = self._live.trainings()
        if running is None:
            return
        trainings = {(training.job_id, training.attempt): training for training in running}
        await self._forget_ended(trainings, now)
        for key, training in trainings.items():
            if training.training_since is None:
                continue
            actions = self._attempts.get(key)
            if actions is None:
                rows = await self._store.read(actions_of_job, training.job_id)
                actions = self._attempts[key] = AttemptActions.load(*key, rows)
            try:
                await self._step_of(training, actions, rules, tracker, now)
            except OSError as error:
                log.warning("job %d: nothing can be asked of its training: %s", training.job_id, error)

    async def _step_of(
        self,
        training: RunningTraining,
        actions: AttemptActions,
        rules: Mapping[str, AlertRule],
        tracker: RuleTracker,
        now: float,
    ) -> None:
        if actions.open is not None:
            rule = rules.get(actions.open.row.rule)
            await self._follow_up(training, actions, actions.open, rule, tracker, now)
            return
        firing = False
        for name, rule in rules.items():
            if rule.act is None:
                continue
            tracked = _firing_for(training, tracker.firing(name))
            firing = firing or (tracked is not None and rule.act.duty is not None)
            if tracked is None or tracked.no_data or name in actions.blocked:
                continue
            if rule.act.batch and rule.act.batch > 0 and training.duty < 1.0:
                continue  # it is slow on purpose
            settle = rule.act.settle or SETTLE_SECONDS
            if actions.count(name) >= (rule.act.times or TIMES) or now - actions.ended_at < settle / 2:
                continue
            await self._act(training, actions, name, rule.act, tracked, now)
            return
        if not firing:
            await self._give_back(training, actions, rules, now)

    # Asking

    async def _act(
        self,
        training: RunningTraining,
        actions: AttemptActions,
        name: str,
        act: AlertAction,
        tracked: TrackedRule,
        now: float,
    ) -> None:
        before = self._numbers(training, now - (act.settle or SETTLE_SECONDS), tracked.value)
        proposed = self._proposed(training, actions, act, now)
        if proposed.refusal:
            actions.blocked.add(name)
            refused = (ActionOutcome.REFUSED, proposed.refusal)
            await self._add(actions, NewAction(name, *actions.key, proposed.kind, before, {}, *refused), now)
            return
        control = await training.request(micro=proposed.micro, duty=proposed.duty)
        after: ActionNumbers = {"number": control.number}
        if proposed.micro is not None:
            after["micro"] = proposed.micro
        if proposed.duty is not None:
            after["duty"] = proposed.duty
        row = await self._add(actions, NewAction(name, *actions.key, proposed.kind, before, after), now)
        actions.open = OpenAction(row, control.number)
        try:
            await training.ask(control)
        except OSError as error:
            await self._not_applied(actions, actions.open, f"nothing can be asked of it: {error}", now)

    def _proposed(
        self, training: RunningTraining, actions: AttemptActions, act: AlertAction, now: float
    ) -> ProposedChange:
        if act.duty is not None:
            duty = max(LEAST_DUTY, round(training.duty + act.duty, 2))
            if duty >= training.duty:
                return ProposedChange("duty", refusal=f"the duty is at its least, {100 * LEAST_DUTY:g} %")
            return ProposedChange("duty", duty=duty)
        assert act.batch is not None
        batch, micro = training.plan.batch, training.micro
        sequences = batch.micro * batch.accumulation
        if act.batch < 0:
            if micro == 1:
                return ProposedChange("batch", refusal="a pass is one sequence already")
            return ProposedChange("batch", micro=smaller_micro(sequences, micro, act.batch))
        larger = larger_micro(sequences, micro, act.batch)
        if larger is None:
            return ProposedChange(
                "batch", refusal="the batch of a GPU cannot be shared out over fewer passes"
            )
        return ProposedChange(
            "batch", micro=larger, refusal=self._why_not_larger(training, actions, larger, now)
        )

    def _why_not_larger(
        self, training: RunningTraining, actions: AttemptActions, micro: int, now: float
    ) -> str:
        """Return the reason why passes of this size may not be tried, or an empty text."""
        plan = training.plan
        if actions.has_shrunk:
            return "passes were made smaller in this attempt"
        if plan.oom_steps:
            return "memory ran out in an attempt before"
        candidate = plan.candidate
        new, old = (peak_bytes(vary(candidate, micro=size)) for size in (micro, training.micro))
        if new > plan.memory.budget_bytes:
            return f"{micro} sequences would need {new / 1e9:.1f} GB by the memory model"
        total = plan.gpus.kind.memory_bytes
        for gpu in training.gpus:
            shares = [sample.memory_share for sample in self._live.samples.since(gpu, now - SETTLE_SECONDS)]
            known = [share for share in shares if share is not None]
            if not known:
                return "how much memory is in use is not known"
            if max(known) + (new - old) / total > MEMORY_CEILING:
                return f"{100 * max(known):.0f} % of the memory is in use"
        return ""

    async def _give_back(
        self, training: RunningTraining, actions: AttemptActions, rules: Mapping[str, AlertRule], now: float
    ) -> None:
        """The GPU is cool again: pause less, one step at a time."""
        lowered = [
            row for row in actions.rows if row.kind == "duty" and row.outcome is not ActionOutcome.REFUSED
        ]
        if training.duty >= 1.0 or not lowered:
            return
        name = lowered[-1].rule
        act = rules[name].act if name in rules else None
        settle = act.settle if act and act.settle else SETTLE_SECONDS
        if now - actions.ended_at < settle:
            return
        step = abs(act.duty if act and act.duty else 0.03)
        before = self._numbers(training, now - settle, None)
        duty = min(1.0, round(training.duty + step, 2))
        control = await training.request(duty=duty)
        after: ActionNumbers = {"duty": duty, "number": control.number}
        returned = (ActionOutcome.RETURNED, "the alert is resolved")
        await self._add(actions, NewAction(name, *actions.key, "duty", before, after, *returned), now)
        await training.ask(control)

    # Following up

    async def _follow_up(
        self,
        training: RunningTraining,
        actions: AttemptActions,
        action: OpenAction,
        rule: AlertRule | None,
        tracker: RuleTracker,
        now: float,
    ) -> None:
        answer = training.answer
        is_answered = answer is not None and answer.number >= (action.number or 0)
        if answer is not None and is_answered and not is_carried_out(action.row, answer):
            # Also later: an engine may find that larger passes do not fit after all.
            await self._not_applied(actions, action, answer.text or "this engine cannot", now)
            return
        if action.applied_at is None:
            if answer is not None and is_answered:
                action.applied_at = now
                got: ActionNumbers = {"micro": answer.micro, "duty": answer.duty}
                await self._update(actions, action, ActionOutcome.APPLIED, got, answer.text, now)
            elif now - action.row.asked_at >= ANSWER_SECONDS:
                await self._not_applied(actions, action, "the training does not answer", now)
            return
        act = rule.act if rule and rule.act else AlertAction()
        settle = act.settle or SETTLE_SECONDS
        if now - action.applied_at < settle:
            return
        value = _value_now(training, tracker, action.row.rule)
        after = self._numbers(training, action.applied_at + settle / 2, value)
        verdict = judge(action.row, after, act.worse or WORSE, below=bool(rule and rule.when.below))
        if verdict.is_worse:
            before = action.row.before
            await training.ask(await training.request(micro=before["micro"], duty=before["duty"]))
            actions.blocked.add(action.row.rule)
        outcome = ActionOutcome.UNDONE if verdict.is_worse else ActionOutcome.KEPT
        del after["micro"], after["duty"]  # those of the answer stay
        await self._update(actions, action, outcome, after, verdict.text, now)
        if was_useless(action.row):
            actions.blocked.add(action.row.rule)

    async def _not_applied(self, actions: AttemptActions, action: OpenAction, why: str, now: float) -> None:
        """Smaller passes are for the next attempt's plan then; nothing else outlives this one."""
        is_smaller = action.row.micro_change < 0
        outcome = ActionOutcome.NEXT_ATTEMPT if is_smaller else ActionOutcome.REFUSED
        actions.blocked.add(action.row.rule)
        await self._update(actions, action, outcome, {}, why, now)

    async def _forget_ended(self, trainings: Mapping[tuple[int, int], RunningTraining], now: float) -> None:
        for key in [key for key in self._attempts if key not in trainings]:
            actions = self._attempts.pop(key)
            if actions.open is not None:
                text = "the attempt ended before it was judged"
                await self._update(actions, actions.open, ActionOutcome.KEPT, {}, text, now)

    # Numbers and rows

    def _numbers(self, training: RunningTraining, since: float, value: float | None) -> ActionNumbers:
        """Return the numbers by which an action is judged."""
        speeds, losses = (self._recorded(training, name, since) for name in ("job.tokens_s", "job.loss"))
        return {
            "micro": training.micro,
            "duty": training.duty,
            "value": value,
            "tokens_s": fmean(speeds) if speeds else None,
            "loss": fmean(losses) if losses else None,
            "loss_scatter": pstdev(losses) if losses else None,
        }

    def _recorded(self, training: RunningTraining, name: str, since: float) -> list[float]:
        series = self._live.recorded(name, since).get(job_subject(training.job_id))
        return [point.value for point in series.points] if series else []

    async def _add(self, actions: AttemptActions, action: NewAction, now: float) -> ActionRow:
        row = await self._store.write(add_action, action, now)
        actions.rows.append(row)
        if row.ended_at is not None:
            actions.ended_at = now
        log.info("job %d: %s asks for %s: %s %s", row.job_id, row.rule, row.after, row.outcome, row.detail)
        return row

    async def _update(
        self,
        actions: AttemptActions,
        action: OpenAction,
        outcome: ActionOutcome,
        after: ActionNumbers,
        detail: str,
        now: float,
    ) -> None:
        row = await self._store.write(update_action, action.row.id, outcome, after, detail, now)
        actions.rows[actions.rows.index(action.row)] = action.row = row
        if row.ended_at is not None:
            actions.open, actions.ended_at = None, now
        log.info("job %d: the action of %s: %s %s", actions.job_id, row.rule, outcome, detail)


def _firing_for(training: RunningTraining, firing: list[TrackedRule]) -> TrackedRule | None:
    """The firing rule about this training or one of its GPUs; of several the one with the largest value."""
    own = _subjects_of(training)
    about = [tracked for tracked in firing if tracked.subject in own]
    return max(about, key=_magnitude, default=None)


def _magnitude(tracked: TrackedRule) -> float:
    return abs(tracked.value or 0.0)


def _value_now(training: RunningTraining, tracker: RuleTracker, rule: str) -> float | None:
    """The rule's present value, where it is worst."""
    own = _subjects_of(training)
    values = [
        tracked.value
        for tracked in tracker.states()
        if tracked.rule == rule
        and tracked.subject in own
        and tracked.value is not None
        and not tracked.no_data
    ]
    return max(values, default=None)


def _subjects_of(training: RunningTraining) -> set[AlertSubject]:
    return {job_subject(training.job_id), *map(gpu_subject, training.gpus)}


# Sizes of changes, and verdicts


def smaller_micro(sequences: int, micro: int, change: float) -> int:
    """Return a smaller pass, by at least one sequence, that shares the batch out evenly."""
    return even_micro(sequences, max(1, min(micro - 1, math.floor(micro * (1 + change)))))


def larger_micro(sequences: int, micro: int, change: float) -> int | None:
    """Return the least larger pass that saves one, from the change on, or None if it would be far beyond."""
    wanted = max(micro + 1, round(micro * (1 + change)))
    passes = -(-sequences // micro)
    if passes == 1:
        return None
    larger = max(even_micro(sequences, wanted), -(-sequences // (passes - 1)))
    return larger if micro < larger <= max(micro + 1, micro * (1 + _MOST_GROWTH * change)) else None


def was_useless(row: ActionRow) -> bool:
    """Tell smaller passes that left the memory as it was: still smaller ones would only cost time."""
    old, new = row.before.get("value"), row.after.get("value")
    if row.outcome is not ActionOutcome.KEPT or old is None or new is None:
        return False
    return row.micro_change < 0 and new >= old


def is_carried_out(row: ActionRow, answer: ControlEvent) -> bool:
    """Compare the number of the action's kind: a request has both, and one of them may be refused."""
    if row.kind == "duty":
        return abs(answer.duty - (row.after.get("duty") or 1.0)) < 0.005
    return answer.micro != row.before.get("micro")


@dataclass(frozen=True, slots=True)
class ActionVerdict:
    is_worse: bool
    text: str


def judge(row: ActionRow, after: ActionNumbers, worse: float, *, below: bool) -> ActionVerdict:
    """Compare the numbers before and after. `below`: the rule's number was too low."""
    old, new = row.before.get("value"), after.get("value")
    improved = old is not None and new is not None and (new > old if below else new < old)
    old_loss, new_loss, scatter = row.before.get("loss"), after.get("loss"), row.before.get("loss_scatter")
    if old_loss is not None and new_loss is not None:
        highest = old_loss + max(_LOSS_WORSE * abs(old_loss), 3 * (scatter or 0.0))
        if new_loss > highest:
            return ActionVerdict(True, f"the loss rose from {old_loss:.4g} to {new_loss:.4g}")
    speed = _speed_change(row, after)
    limit = worse * _WORSE_ALTHOUGH_IT_HELPED if improved else worse
    shown = "" if speed is None else f"tokens per second {100 * speed:+.0f} %"
    if speed is not None and speed < -limit:
        return ActionVerdict(True, f"{shown}, more than the action should cost")
    if row.micro_change > 0 and speed is not None and speed <= 0:
        return ActionVerdict(True, f"{shown}: a larger pass is not faster")
    helped = "it helped" if improved else "it did not help" if new is not None else ""
    return ActionVerdict(False, ", ".join(part for part in (helped, shown) if part))


def _speed_change(row: ActionRow, after: ActionNumbers) -> float | None:
    """The change of tokens per second, beyond what the duty explains."""
    old, new = row.before.get("tokens_s"), after.get("tokens_s")
    if not old or new is None:
        return None
    expected = old
    if row.kind == "duty":
        expected *= (row.after.get("duty") or 1.0) / (row.before.get("duty") or 1.0)
    return new / expected - 1
