from __future__ import annotations

import math
from collections import Counter

import pytest

from core.domain.tasks import TaskType
from core.domain.tournament_rules import (
    ENVIRONMENT,
    FACTS,
    IMAGE,
    TEXT,
    TOURNAMENTS,
    emission_shares,
    gpus_for,
    place_shares,
)


def test_every_fact_has_a_source_a_use_and_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(fact.name for fact in FACTS).items() if count > 1] == []
    assert [fact.name for fact in FACTS if not (fact.uses and fact.source.commit and fact.source.day)] == []


@pytest.mark.parametrize(
    ("kind", "billions", "extra", "gpus"),
    [
        (TaskType.INSTRUCT, 4.0, {}, 1),
        (TaskType.INSTRUCT, 4.0, {"kl": True}, 2),
        (TaskType.INSTRUCT, 32.0, {"kl": True}, 8),
        (TaskType.DPO, 1.3, {}, 1),
        (TaskType.DPO, 12.0, {}, 4),
        (TaskType.DPO, 14.0, {}, 8),
        (TaskType.GRPO, 8.0, {}, 4),
        (TaskType.CHAT, 14.8, {"continuous": True}, 4),
        (TaskType.ENVIRONMENT, 1.5, {}, 4),
        (TaskType.IMAGE, 20.0, {}, 1),
    ],
)
def test_gpus_follow_from_the_kind_and_the_size(
    kind: TaskType, billions: float, extra: dict[str, bool], gpus: int
) -> None:
    assert gpus_for(kind, billions * 1e9, **extra) == gpus


def test_a_boss_round_of_texts_or_pictures_has_six_tasks() -> None:
    for kind in (TEXT, IMAGE):
        boss = TOURNAMENTS[kind].round("boss")
        assert boss is not None
        assert sum(task.count for task in boss.tasks) == 6
    drawn = [one for rules in TOURNAMENTS.values() for one in rules.rounds if one.drawn]
    assert [math.isclose(sum(task.share for task in one.tasks), 1) for one in drawn] == [True, True]


def test_emission_goes_from_full_kinds_to_empty_ones() -> None:
    """At the entries that the weights stand for, each kind has its weight; the whole is always paid."""
    balanced = emission_shares({TEXT: 35, IMAGE: 25, ENVIRONMENT: 25})
    assert balanced == pytest.approx({TEXT: 0.35 / 0.85, IMAGE: 0.25 / 0.85, ENVIRONMENT: 0.25 / 0.85})
    assert emission_shares({TEXT: None}) == pytest.approx(balanced)
    crowded = emission_shares({TEXT: 60, IMAGE: 4, ENVIRONMENT: 8})
    assert sum(crowded.values()) == pytest.approx(1)
    assert crowded[IMAGE] > balanced[IMAGE]
    assert crowded[TEXT] == pytest.approx(0.05 / 0.77, abs=0.03)
    assert place_shares() == pytest.approx((16 / 21, 4 / 21, 1 / 21))
    assert place_shares(2) == pytest.approx((0.8, 0.2))
