"""The daemon's daily look at upstream's rules."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miner.alerts.upstream_rules import UpstreamRules
from miner.observe.alerts import MINER, AlertKind, AlertSubject
from tests.doubles.upstream import write_upstream

pytestmark = pytest.mark.process


class Raised(list[tuple[AlertKind, str]]):
    def __call__(self, kind: AlertKind, text: str, subject: AlertSubject = MINER) -> None:
        self.append((kind, text))


def test_a_change_is_one_alert_until_it_is_another_one(tmp_path: Path) -> None:
    """The licence of the double is not upstream's: that is two changes more."""
    raised, upstream = Raised(), tmp_path / "upstream"
    rules = UpstreamRules(tmp_path / "answers", raised, str(upstream))
    asyncio.run(rules.check())  # nothing is there, as without a network
    assert (raised, rules.standing()) == ([], {})
    write_upstream(upstream, {"MAX_TRAINING_ATTEMPTS": 3, "CPUS_PER_GPU": 12})
    asyncio.run(rules.check())
    asyncio.run(rules.check())
    ((kind, text),) = raised
    assert kind is AlertKind.TOURNAMENT_RULES_CHANGED
    assert "attempts: 2 → 3; digest of LICENSE.md" in text
    assert text.endswith("and 1 more; see god-miner tournament rules --check")
    assert rules.standing() == {kind: text}
    write_upstream(upstream, {"MAX_TRAINING_ATTEMPTS": 4})
    asyncio.run(rules.check())
    assert len(raised) == 2
