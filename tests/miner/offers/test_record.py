from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from hypothesis import given, settings

from core.wire import MinerTaskOffer
from miner.fleet.base import Placement
from miner.offers import record
from miner.offers.decision import Decision, ExpectedValue, Factor, PlanBrief, Reason, below
from miner.offers.record import decision_from, texts_of
from tests.doubles.each import each
from tests.miner.offers.builders import decided, fleet, offer, policy
from tests.miner.offers.test_decide_properties import OFFERS, POLICIES


def stored(decision: Decision) -> tuple[dict[str, object], str]:
    texts = texts_of(decision)
    row = {
        "accepted": int(decision.accepted),
        "message": decision.message,
        "policy": decision.policy,
        "policy_hash": decision.policy_hash,
        "reasons": texts.reasons,
        "score": decision.score,
        "factors": texts.factors,
        "profile_hash": decision.profile_hash,
    }
    return row, texts.details


@settings(max_examples=40)
@given(OFFERS, POLICIES)
def test_a_decision_comes_back_from_the_books_as_it_was(asked: MinerTaskOffer, name: str) -> None:
    found = decided(asked, policy(name))
    assert decision_from(*stored(found)) == found


def test_what_an_older_version_stored_is_read_too() -> None:
    row, _ = stored(decided(offer()))
    old = decision_from(
        {**row, "reasons": '[["hours", true, "3 h"]]', "factors": '{"size": [1.0, 0.5]}'}, "{}"
    )
    assert old.reasons == (Reason("hours", True, "3 h", ""),)
    assert old.factors["size"].contribution == 0.5
    assert (old.placement, old.value, old.plan) == (None, None, None)


def test_the_texts_are_json() -> None:
    texts = texts_of(decided())
    assert set(json.loads(texts.details)) >= {"placement", "value", "plan", "profile"}
    assert json.loads(texts.reasons)[0]["rule"] == "task"


def test_half_a_surrogate_pair_in_a_message_is_stored_and_read() -> None:
    found = decided(on=fleet(trouble="no such file: \udcff"))
    assert decision_from(*stored(found)) == found


class _Later(NamedTuple):
    """A reason as a later version may have it: with a field in the middle, and without `way`."""

    rule: str
    weight: float = 0.0
    passed: bool = True
    text: str = ""


def test_a_field_that_comes_or_goes_misreads_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = Reason("hours", False, "3 h", "more")
    assert record.read_part(_Later, reason._asdict()) == _Later("hours", 0.0, False, "3 h")
    # And so it is with the bare values of old rows, whose order nothing may change.
    assert {
        kind.__name__: kind.__match_args__ for kind in (Reason, Factor, ExpectedValue, PlanBrief, Placement)
    } == record._BARE
    monkeypatch.setitem(record._BARE, "_Later", record._BARE["Reason"])
    assert record.read_part(_Later, list(reason)) == _Later("hours", 0.0, False, "3 h")


def test_a_row_without_what_it_needs_is_refused_by_name() -> None:
    with pytest.raises(record.DecisionUnreadable, match="stored Reason can't be read"):
        record.read_part(Reason, {"rule": "hours"})


@each("value", [0.5, 0.1234, -0.5, 0.0, 1e-9, 3.0])
def test_a_limit_with_few_digits_lies_just_below(value: float) -> None:
    assert value - 0.002 <= below(value) < value
