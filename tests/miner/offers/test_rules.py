from __future__ import annotations

from pathlib import Path
from typing import Any

from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer
from miner.offers.history import SuccessHistory
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

SD_15 = "a/stable-diffusion-v1-5"


@each(
    ("rule", "rules", "bad", "good", "way"),
    [
        ("task", {"tasks": ["dpo", "chat"]}, offer(), offer(task_type=TaskType.DPO), "rules.tasks"),
        (
            "family",
            {"families": ["qwen", "unknown"]},
            offer(),
            offer(model="a/mystery-7b"),
            "llama in rules.",
        ),
        ("family", {"families": ["qwen"]}, offer(model="a/mystery-7b"), picture_offer(), "unknown"),
        (
            "model",
            {"models_denied": ["*/Bad-*"]},
            offer(model="a/bad-llama-8b"),
            offer(),
            "*/Bad-* out of rules.",
        ),
        ("size", {"size": "1B-9B"}, offer(model_params_count=13 * 10**9), offer(), "rules.size"),
        (
            "hours",
            {"hours": {"instruct": 2}},
            offer(),
            offer(hours_to_complete=2.0),
            "rules.hours.instruct of 3",
        ),
        ("hours", {"max_hours": "<3"}, offer(), offer(hours_to_complete=2.99), "rules.max_hours of 3"),
        (
            "hours",
            {"hours": {"sdxl": 3, "sd": 1, "image": 4}},
            picture_offer(model=SD_15, hours_to_complete=2.0),
            picture_offer(model="a/stable-diffusion-xl", hours_to_complete=2.0),
            "rules.hours.sd of 2",
        ),
        ("min_hours", {"min_hours": 4}, offer(), offer(hours_to_complete=4.0), "rules.min_hours of 3"),
        ("success", {"min_success": 0.93}, picture_offer(), offer(), "rules.min_success of 0.9"),
    ],
)
def test_a_rule_refuses_and_says_what_would_have_to_change(
    rule: str, rules: dict[str, Any], bad: MinerTaskOffer, good: MinerTaskOffer, way: str
) -> None:
    strict = policy(**{f"rules__{key}": value for key, value in rules.items()})
    refused = decided(bad, strict)
    assert not refused.accepted
    assert not verdict(refused, rule).passed
    assert way in verdict(refused, rule).way
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


@each(
    ("blackout", "refused"),
    [("13:00-13:30", True), ("22:00-06:00", False), ("Wed 14:00-15:00", True), ("Thu 14:00-15:00", False)],
)
def test_no_job_runs_into_a_blackout(blackout: str, refused: bool) -> None:
    decision = decided(by=policy(rules__blackout=[blackout]))
    assert verdict(decision, "blackout").passed is decision.accepted is not refused


def test_hard_work_waits_for_experience(tmp_path: Path) -> None:
    strict = written_policy(
        tmp_path,
        "extends: everything-feasible\n"
        "rules:\n  experience:\n    large: {when: {size: '>=8B'}, published: 2}\n",
    )
    refused = verdict(decided(by=strict), "experience")
    assert not refused.passed
    assert refused.text == "0 of 2 instruct jobs published that large asks for"
    small = offer(model="a/llama-3b", model_params_count=3 * 10**9)
    assert verdict(decided(small, strict), "experience").passed
    done = SuccessHistory([outcome(1), outcome(2), outcome(3, published=False)])
    assert decided(by=strict, history=done).accepted


def test_every_rule_is_checked_also_behind_one_that_failed() -> None:
    rules = [reason.rule for reason in decided(by=policy("h100x4")).reasons]
    strict = policy("h100x4", rules__tasks=["dpo"], rules__max_jobs=0, rules__size="<1B")
    refused = decided(by=strict)
    assert [reason.rule for reason in refused.reasons] == rules
    assert {reason.rule for reason in refused.failed} == {"task", "jobs", "size"}
    assert refused.message == "Not taken: this task type is not trained here"
