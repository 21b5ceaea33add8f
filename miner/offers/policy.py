"""The plain first policy: hard rules from the settings, no score.

It knows neither GPUs nor plans: it takes what the operator listed, as long as there is room. The rules
are checked all, not up to the first that fails, so that the stored reasons are complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection

from core.tasks import TaskType
from core.wire import MinerTaskOffer
from miner.offers.decision import Decision, Load, Reason


class PlainPolicy:
    name = "plain"

    def __init__(self, *, task_types: Collection[TaskType], max_hours: float, max_jobs: int) -> None:
        self._task_types = frozenset(task_types)
        self._max_hours = max_hours
        self._max_jobs = max_jobs
        terms = json.dumps([self.name, sorted(self._task_types), max_hours, max_jobs])
        self._hash = hashlib.sha256(terms.encode()).hexdigest()[:16]

    def decide(self, offer: MinerTaskOffer, load: Load) -> Decision:
        reasons = (self._type(offer), self._hours(offer), self._room(load))
        refused = [reason for reason in reasons if not reason.passed]
        message = f"Not taken: {refused[0].text}" if refused else f"Taken: {offer.task_type} of {offer.model}"
        return Decision(not refused, message, self.name, self._hash, reasons)

    def _type(self, offer: MinerTaskOffer) -> Reason:
        passed = offer.task_type in self._task_types
        return Reason("task_type", passed, f"{offer.task_type} is {'' if passed else 'not '}trained here")

    def _hours(self, offer: MinerTaskOffer) -> Reason:
        hours = offer.hours_to_complete
        if hours <= 0:
            return Reason("hours", False, f"{hours:g} hours leave no time to train")
        passed = hours <= self._max_hours
        return Reason(
            "hours",
            passed,
            f"{hours:g} hours are {'within' if passed else 'over'} the limit of {self._max_hours:g}",
        )

    def _room(self, load: Load) -> Reason:
        taken = load.open_jobs + load.held_offers
        passed = taken < self._max_jobs
        return Reason("room", passed, f"{taken} of {self._max_jobs} places are taken")
