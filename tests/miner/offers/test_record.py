from __future__ import annotations

import json

from hypothesis import given, settings

from core.wire import MinerTaskOffer
from miner.offers.decision import Decision, Reason, below
from miner.offers.record import decision_from, texts_of
from tests.doubles.each import each
from tests.miner.offers.builders import decided, offer, policy
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
    assert json.loads(texts.reasons)[0][0] == "task"


@each("value", [0.5, 0.1234, -0.5, 0.0, 1e-9, 3.0])
def test_a_limit_with_few_digits_lies_just_below(value: float) -> None:
    assert value - 0.002 <= below(value) < value
