from __future__ import annotations

from typing import Any

from core.tasks import TaskType
from core.wire import MinerTaskOffer
from miner.offers.history import History
from tests.doubles.each import each
from tests.miner.offers.builders import (
    decided,
    fleet,
    hold,
    offer,
    outcome,
    picture_offer,
    policy,
    verdict,
    written_policy,
)


@each(
    ("rule", "on_top", "bad", "good", "way"),
    [
        ("task", {"rules.tasks": ["dpo", "chat"]}, offer(), offer(task_type=TaskType.DPO), "rules.tasks"),
        (
            "family",
            {"rules.families": ["qwen", "unknown"]},
            offer(),
            offer(model="someone/mystery-7b"),
            "llama in rules.families",
        ),
        ("family", {"rules.families": ["qwen"]}, offer(model="a/mystery-7b"), picture_offer(), "unknown"),
        (
            "model",
            {"rules.models_denied": ["*/Bad-*"]},
            offer(model="someone/bad-llama-8b"),
            offer(),
            "*/Bad-* out of rules.models_denied",
        ),
        ("size", {"rules.size": "1B-9B"}, offer(model_params_count=13 * 10**9), offer(), "rules.size"),
        (
            "hours",
            {"rules.hours": {"instruct": 2}},
            offer(),
            offer(hours_to_complete=2.0),
            "rules.hours.instruct of 3",
        ),
        (
            "hours",
            {"rules.max_hours": "<3"},
            offer(),
            offer(hours_to_complete=2.99),
            "rules.max_hours of 3",
        ),
        (
            "hours",
            {"rules.hours": {"sdxl": 3, "sd": 1, "image": 4}},
            picture_offer(model="a/stable-diffusion-v1-5", hours_to_complete=2.0),
            picture_offer(model="a/stable-diffusion-xl", hours_to_complete=2.0),
            "rules.hours.sd of 2",
        ),
        ("min_hours", {"rules.min_hours": 4}, offer(), offer(hours_to_complete=4.0), "rules.min_hours of 3"),
        ("success", {"rules.min_success": 0.93}, picture_offer(), offer(), "rules.min_success of 0.9"),
    ],
)
def test_a_hard_rule_refuses_and_says_what_would_have_to_change(
    rule: str, on_top: dict[str, Any], bad: MinerTaskOffer, good: MinerTaskOffer, way: str
) -> None:
    strict = policy(**{key.replace(".", "__"): value for key, value in on_top.items()})
    refused = decided(bad, strict)
    assert not refused.accepted
    found = verdict(refused, rule)
    assert not found.passed
    assert way in found.way
    assert verdict(decided(good, strict), rule).passed
    assert verdict(decided(bad), rule).passed


def test_the_lower_of_two_hour_limits_binds() -> None:
    strict = policy(rules__hours={"instruct": 8}, rules__max_hours=2.5)
    assert "over the limit of 2.5" in verdict(decided(by=strict), "hours").text
    strict = policy(rules__hours={"instruct": 2}, rules__max_hours="<20")
    assert "over the limit of 2 for instruct" in verdict(decided(by=strict), "hours").text


def test_jobs_and_held_offers_count_against_the_limit_once_per_task() -> None:
    busy = fleet("4xH100", hold("a", "01"), hold("a", "2"), hold("b", "3"))
    assert "2 of 3" in verdict(decided(on=busy, by=policy(rules__max_jobs=3)), "jobs").text
    full = verdict(decided(on=busy, by=policy(rules__max_jobs=2)), "jobs")
    assert not full.passed
    assert full.way.startswith("rules.max_jobs of 3")
    assert not decided(by=policy(rules__max_jobs=0)).accepted


@each(
    ("stretch", "refused"),
    [
        ("13:00-13:30", True),
        ("12:00-12:01", True),
        ("22:00-06:00", False),
        ("Wed 14:00-15:00", True),
        ("Thu 14:00-15:00", False),
        ("Mon-Fri 12:30-12:40", True),
        ("Sat,Sun 00:00-24:00", False),
    ],
)
def test_no_job_runs_into_a_blackout(stretch: str, refused: bool) -> None:
    found = decided(by=policy(rules__blackout=[stretch]))
    assert verdict(found, "blackout").passed is not refused
    assert found.accepted is not refused


def test_a_blackout_over_the_end_of_the_week_is_seen_from_both_sides() -> None:
    sunday_night = policy(rules__blackout=["Sun 23:00-02:00"])
    monday_1 = 1_759_712_400.0
    assert not verdict(decided(by=sunday_night, now=monday_1), "blackout").passed
    sunday_22 = monday_1 - 3 * 3600
    assert not verdict(decided(by=sunday_night, now=sunday_22), "blackout").passed
    assert verdict(decided(by=sunday_night, now=monday_1 + 2 * 3600), "blackout").passed


def test_hard_work_waits_for_experience(tmp_path: Any) -> None:
    strict = written_policy(
        tmp_path,
        "extends: everything-feasible\n"
        "rules:\n  experience:\n    large: {when: {size: '>=8B'}, published: 2}\n",
    )
    refused = verdict(decided(by=strict), "experience")
    assert not refused.passed
    assert refused.text == "0 of 2 instruct jobs published that large asks for"
    assert verdict(
        decided(offer(model="a/llama-3b", model_params_count=3 * 10**9), strict), "experience"
    ).passed
    done = History([outcome(1), outcome(2), outcome(3, published=False)])
    assert decided(by=strict, history=done).accepted


def test_every_rule_is_judged_also_behind_one_that_failed() -> None:
    rules = [reason.rule for reason in decided(by=policy("h100x4")).reasons]
    strict = policy("h100x4", rules__tasks=["dpo"], rules__max_jobs=0, rules__size="<1B")
    refused = decided(by=strict)
    assert [reason.rule for reason in refused.reasons] == rules
    assert {reason.rule for reason in refused.failed} == {"task", "jobs", "size"}
    assert all(reason.text for reason in refused.reasons)
    assert all(reason.way for reason in refused.failed)
