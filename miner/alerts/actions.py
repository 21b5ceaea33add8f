"""What rules ask of running trainings: smaller or larger passes, and pauses. Each action is judged.

One action at a time for an attempt. It is asked by the control file, the training answers with a
`ControlEvent`, and after a while the numbers from before and after are compared. What made things worse is
undone, and its rule leaves this attempt alone from then on. All that is needed to go on after a restart is in
the store.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from core.planning.candidate import candidate_of, vary
from core.planning.memory.peak import peak_bytes
from miner.alerts.action_verdict import is_carried_out, judge, larger_micro, smaller_micro, was_useless
from miner.alerts.metrics import LiveMeasurements
from miner.alerts.rules import AlertAction, AlertRule
from miner.alerts.state import RuleEngine, TrackedRule
from miner.jobs.control import RunningTraining
from miner.observe.alerts import gpu_subject, job_subject
from miner.store import alerts as store_alerts
from miner.store.alerts import ActionOutcome, ActionRow
from miner.store.store import Store

log = logging.getLogger(__name__)

TIMES, SETTLE_SECONDS, WORSE = 4, 120.0, 0.1
#: A training that does not answer in this time cannot be asked: its engine has no step boundary for us.
ANSWER_SECONDS = 300.0
#: The least share of the time that a GPU computes.
LEAST_DUTY = 0.7
#: Larger passes are not tried where the memory measured would come above this share of the GPU.
MEMORY_CEILING = 0.85


@dataclass(frozen=True, slots=True)
class ProposedChange:
    """What to ask for, or why nothing can be asked."""

    kind: str
    micro: int | None = None
    duty: float | None = None
    refusal: str = ""


@dataclass(slots=True)
class OpenAction:
    """An action that is not judged yet."""

    row: ActionRow
    #: Of the control file; None: asked by an earlier process, and any answer since counts.
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

    def count(self, rule: str) -> int:
        return sum(row.rule == rule and row.outcome is not ActionOutcome.RETURNED for row in self.rows)

    @property
    def has_shrunk(self) -> bool:
        """Whether a pass was made smaller: then it is not made larger again, or two rules would fight."""
        return any(
            row.kind == "batch" and row.after.get("micro", math.inf) < row.before.get("micro", 0)
            for row in self.rows
        )


class ActionController:
    def __init__(self, store: Store, live: LiveMeasurements) -> None:
        self._store, self._live = store, live
        self._attempts: dict[tuple[int, int], AttemptActions] = {}

    async def step(self, rules: Mapping[str, AlertRule], engine: RuleEngine, now: float) -> None:
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
                rows = await self._store.read(store_alerts.actions_of_job, training.job_id)
                actions = self._attempts[key] = AttemptActions.load(*key, rows)
            try:
                await self._step_of(training, actions, rules, engine, now)
            except OSError as error:
                log.warning("job %d: nothing can be asked of its training: %s", training.job_id, error)

    async def _step_of(
        self,
        training: RunningTraining,
        actions: AttemptActions,
        rules: Mapping[str, AlertRule],
        engine: RuleEngine,
        now: float,
    ) -> None:
        if actions.open is not None:
            rule = rules.get(actions.open.row.rule)
            await self._follow_up(training, actions, actions.open, rule, engine, now)
            return
        firing = False
        for name, rule in rules.items():
            if rule.act is None:
                continue
            tracked = _firing_for(training, engine.firing(name))
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
            await self._add(
                actions, name, proposed.kind, now, before, {}, ActionOutcome.REFUSED, proposed.refusal
            )
            return
        control = await training.request(micro=proposed.micro, duty=proposed.duty)
        asked = {"micro": proposed.micro, "duty": proposed.duty, "number": control.number}
        after = {key: value for key, value in asked.items() if value is not None}
        row = await self._add(actions, name, proposed.kind, now, before, after, ActionOutcome.ASKED, "")
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
        """Why passes of this size may not be tried: an empty text if they may."""
        plan = training.plan
        if actions.has_shrunk:
            return "passes were made smaller in this attempt"
        if plan.oom_steps:
            return "memory ran out in an attempt before"
        candidate = candidate_of(plan)
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
        after = {"duty": duty, "number": control.number}
        await self._add(
            actions, name, "duty", now, before, after, ActionOutcome.RETURNED, "the alert is resolved"
        )
        await training.ask(control)

    # Following up

    async def _follow_up(
        self,
        training: RunningTraining,
        actions: AttemptActions,
        action: OpenAction,
        rule: AlertRule | None,
        engine: RuleEngine,
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
                got = {"micro": answer.micro, "duty": answer.duty}
                await self._update(actions, action, ActionOutcome.APPLIED, got, answer.text, now)
            elif now - action.row.asked_at >= ANSWER_SECONDS:
                await self._not_applied(actions, action, "the training does not answer", now)
            return
        act = rule.act if rule and rule.act else AlertAction()
        settle = act.settle or SETTLE_SECONDS
        if now - action.applied_at < settle:
            return
        value = _value_now(training, engine, action.row.rule)
        after = self._numbers(training, action.applied_at + settle / 2, value)
        verdict = judge(action.row, after, act.worse or WORSE, below=bool(rule and rule.when.below))
        if verdict.is_worse:
            before = action.row.before
            await training.ask(await training.request(micro=before["micro"], duty=before["duty"]))
            actions.blocked.add(action.row.rule)
        outcome = ActionOutcome.UNDONE if verdict.is_worse else ActionOutcome.KEPT
        measured = {key: number for key, number in after.items() if key not in ("micro", "duty")}
        await self._update(actions, action, outcome, measured, verdict.text, now)
        if was_useless(action.row):
            actions.blocked.add(action.row.rule)

    async def _not_applied(self, actions: AttemptActions, action: OpenAction, why: str, now: float) -> None:
        """Smaller passes are for the next attempt's plan then; nothing else outlives this one."""
        row = action.row
        smaller = row.kind == "batch" and row.after.get("micro", 0) < row.before.get("micro", 0)
        outcome = ActionOutcome.NEXT_ATTEMPT if smaller else ActionOutcome.REFUSED
        actions.blocked.add(row.rule)
        await self._update(actions, action, outcome, {}, why, now)

    async def _forget_ended(self, trainings: Mapping[tuple[int, int], RunningTraining], now: float) -> None:
        for key in [key for key in self._attempts if key not in trainings]:
            actions = self._attempts.pop(key)
            if actions.open is not None:
                text = "the attempt ended before it was judged"
                await self._update(actions, actions.open, ActionOutcome.KEPT, {}, text, now)

    # Numbers and rows

    def _numbers(self, training: RunningTraining, since: float, value: float | None) -> dict[str, Any]:
        """What an action is judged by. None: not known."""
        subject = job_subject(training.job_id)
        numbers: dict[str, Any] = {"micro": training.micro, "duty": training.duty, "value": value}
        for name in ("tokens_s", "loss"):
            points = self._live.recorded(f"job.{name}", since).get(subject)
            values = [point.value for point in points.points] if points else []
            numbers[name] = fmean(values) if values else None
            if name == "loss":
                numbers["loss_scatter"] = pstdev(values) if values else None
        return numbers

    async def _add(
        self,
        actions: AttemptActions,
        rule: str,
        kind: str,
        now: float,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        outcome: ActionOutcome,
        detail: str,
    ) -> ActionRow:
        row = await self._store.write(
            store_alerts.add_action,
            rule=rule,
            job_id=actions.job_id,
            attempt=actions.attempt,
            kind=kind,
            now=now,
            before=before,
            after=after,
            outcome=outcome,
            detail=detail,
        )
        actions.rows.append(row)
        if row.ended_at is not None:
            actions.ended_at = now
        log.info("job %d: %s asks for %s: %s %s", actions.job_id, rule, dict(after), outcome, detail)
        return row

    async def _update(
        self,
        actions: AttemptActions,
        action: OpenAction,
        outcome: ActionOutcome,
        after: Mapping[str, Any],
        detail: str,
        now: float,
    ) -> None:
        row = await self._store.write(store_alerts.update_action, action.row.id, outcome, after, detail, now)
        actions.rows[[one.id for one in actions.rows].index(row.id)] = action.row = row
        if row.ended_at is not None:
            actions.open, actions.ended_at = None, now
        log.info("job %d: what %s asked for: %s %s", actions.job_id, row.rule, outcome, detail)


def _firing_for(training: RunningTraining, firing: list[TrackedRule]) -> TrackedRule | None:
    """The firing rule's subject that is this training, or one of its GPUs: the one with the most to say."""
    own = {job_subject(training.job_id), *map(gpu_subject, training.gpus)}
    found = [one for one in firing if one.subject in own]
    return max(found, key=lambda one: abs(one.value or 0.0), default=None)


def _value_now(training: RunningTraining, engine: RuleEngine, rule: str) -> float | None:
    """What the rule goes by now, wherever it is worst."""
    own = {job_subject(training.job_id), *map(gpu_subject, training.gpus)}
    values = [
        one.value
        for one in engine.states()
        if one.rule == rule and one.subject in own and one.value is not None and not one.no_data
    ]
    return max(values, default=None)
