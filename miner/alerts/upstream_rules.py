"""The daily look at upstream's rules of tournaments, in a process of its own, and the alert that follows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from core.domain.records import Record
from miner.api.tournament import RulesCheck
from miner.observe.alerts import AlertKind, SendAlert
from miner.support.child_main import ChildProtocol
from miner.support.subprocess import run_order, worker_environment

log = logging.getLogger(__name__)

DAY_S = 86_400.0
#: After a start a validator's requests come first.
FIRST_S = 600.0
#: For all files together; each has limits of its own.
LIMIT_S = 600.0
_NAMED = 3


class RulesOrder(Record):
    """A folder for answers, and a checkout or an address of upstream's files, if not their own."""

    cache: Path
    upstream: str | None = None


class RulesFailed(Record):
    error: str


PROTOCOL: ChildProtocol[RulesOrder, RulesCheck | RulesFailed] = ChildProtocol(
    "miner.tournament.rules_watch", TypeAdapter(RulesOrder), TypeAdapter(RulesFailed | RulesCheck)
)


class UpstreamRules:
    """The result of the last look. Without a network there is none, and nothing is said."""

    def __init__(self, cache: Path, alert: SendAlert, upstream: str | None = None) -> None:
        self._order = RulesOrder(cache=cache, upstream=upstream)
        self._alert = alert
        #: None until a look has found all of upstream's files.
        self.last: RulesCheck | None = None

    async def check(self) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                answer = await run_order(
                    PROTOCOL, self._order, lambda event: None, environment=worker_environment()
                )
        except (OSError, TimeoutError) as error:
            log.info("upstream's rules of tournaments are not compared: %s", error)
            return
        found = answer.event
        if not isinstance(found, RulesCheck) or found.problem is not None:
            why = found.problem if isinstance(found, RulesCheck) else found.error if found else answer.ending
            log.info("upstream's rules of tournaments are not compared: %s", why)
            return
        before, self.last = self.problem, found
        if self.problem and self.problem != before:
            self._alert(AlertKind.TOURNAMENT_RULES_CHANGED, self.problem)

    @property
    def problem(self) -> str | None:
        """The changes that were found last, for people."""
        changes = self.last.changes if self.last else ()
        if not changes:
            return None
        named = "; ".join(map(str, changes[:_NAMED]))
        more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
        return f"upstream has changed tournament rules: {named}{more}; see god-miner tournament rules --check"

    def standing(self) -> Mapping[str, str | None]:
        """The standing problem, for the alerts. Before the first look nothing is known, so nothing ends."""
        return {} if self.last is None else {AlertKind.TOURNAMENT_RULES_CHANGED: self.problem}
