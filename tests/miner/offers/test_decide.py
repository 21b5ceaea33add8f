"""What comes of odd offers and odd moments: a reasoned decision each time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.budget import Refusal
from core.choices import Engine
from core.profile import load_profile
from core.tasks import ImageModelType, TaskType
from core.wire import MinerTaskOffer
from miner.fleet.base import Ability
from miner.offers.decide import decide
from miner.offers.decision import Decision
from miner.offers.history import History
from tests.doubles.each import each
from tests.miner.offers.builders import (
    HOUR,
    NOON,
    decided,
    fleet,
    hold,
    offer,
    outcome,
    picture_offer,
    policy,
    profile,
    verdict,
)


def assert_reasoned(found: Decision) -> None:
    """A verdict on everything, a message without our numbers, and a way out of each refusal."""
    assert found.reasons
    assert found.accepted is not bool(found.failed)
    assert all(reason.text for reason in found.reasons)
    assert all(reason.way for reason in found.failed)
    assert found.message.startswith("Accepted: " if found.accepted else "Not taken: ")
    assert len(found.message) < 260
    assert set(found.factors) == {"task", "family", "success", "time", "size", "hardware", "value"}
    assert found.value is not None
    assert (found.policy_hash, found.profile_hash) != ("", "")
    assert found.accepted <= (found.placement is not None and found.plan is not None)


def test_an_ordinary_offer_is_accepted_with_everything_that_led_to_it() -> None:
    found = decided(by=policy("h100x4"))
    assert_reasoned(found)
    assert found.accepted
    assert (found.policy, found.profile) == ("h100x4", "h100x4-strategy")
    assert found.score is not None
    assert found.threshold is not None
    assert found.score > found.threshold
    assert found.score == pytest.approx(sum(factor.contribution for factor in found.factors.values()))
    assert found.placement is not None
    assert found.placement.starts_at == NOON
    assert NOON < found.placement.ends_at <= NOON + 3 * HOUR + 300
    assert found.priority > 0


@each(
    ("asked", "rule", "said"),
    [
        (offer(model="a/llama-8b", model_params_count=None), None, ""),
        (offer(model="a/mystery", model_params_count=None), "plan", "nothing tells how large"),
        (offer(model="a/mystery", model_params_count=0), "plan", "nothing tells how large"),
        (offer(model_params_count=0), None, ""),
        (offer(model_params_count=10**18), "plan", "no model has more"),
        (offer(model="a/tiny-1b", model_params_count=10**13), "plan", "no model has more"),
        (offer(model="a/giant-700b", model_params_count=8 * 10**9), "plan", "no variation fits"),
        (offer(model="a/giant-70b", model_params_count=8 * 10**9, hours_to_complete=6.0), None, ""),
        (offer(hours_to_complete=0.0), "plan", "0 hours"),
        (offer(hours_to_complete=0.0), "min_hours", "0 h leave no time"),
        (offer(hours_to_complete=0.01), "plan", "reserve"),
        (offer(hours_to_complete=10_000.0), "hours", "10000 h are over the limit of 8"),
        (picture_offer(ds_size=0), "plan", "no rows"),
        (picture_offer(ds_size=None), None, ""),
        (picture_offer(model="x"), None, ""),
        (offer(model="a" * 193, model_params_count=None), "plan", "nothing tells how large"),
    ],
)
def test_an_odd_offer_gets_a_reasoned_decision(asked: Any, rule: str | None, said: str) -> None:
    found = decided(asked, policy("h100x4"))
    assert_reasoned(found)
    if rule is None:
        assert found.accepted, found.failed
    else:
        assert not verdict(found, rule).passed
        assert said in verdict(found, rule).text


def test_a_name_that_lies_about_its_size_is_planned_for_the_larger_and_told() -> None:
    lied = decided(offer(model="a/giant-70b", model_params_count=8 * 10**9, hours_to_complete=6.0))
    assert "the offer says 8B, the name 70B" in verdict(lied, "size").text
    assert lied.plan is not None
    honest = decided(offer(hours_to_complete=6.0))
    assert honest.plan is not None
    assert lied.plan.gpus > honest.plan.gpus
    assert lied.value is not None
    assert honest.value is not None
    assert lied.value.work == honest.value.work  # validators go by the count


@pytest.mark.parametrize("hours_back", [1, 24 * 365 * 40])
def test_a_clock_that_went_backwards_changes_nothing_that_could_break(hours_back: float) -> None:
    now = NOON - hours_back * HOUR
    busy = fleet("4xH100", hold("a", "01"))
    found = decided(on=busy, history=History([outcome(published=False)]), now=now)
    assert_reasoned(found)
    assert found.accepted
    assert found.placement is not None
    assert found.placement.starts_at >= now


def test_gpus_that_can_not_be_looked_at_are_not_promised() -> None:
    found = decided(on=fleet(trouble="NVML: Unknown Error"))
    assert_reasoned(found)
    assert "NVML: Unknown Error" in verdict(found, "inventory").text
    assert "NVML" not in found.message
    assert found.message == "Not taken: no capacity at the moment"


def test_nothing_is_promised_while_nothing_can_train() -> None:
    found = decided(on=fleet(ability=Ability(trouble="Docker does not run")))
    assert_reasoned(found)
    assert {reason.rule for reason in found.failed} == {"engine"}
    assert "Docker does not run" in verdict(found, "engine").text
    assert found.message == "Not taken: no capacity at the moment"


@pytest.mark.parametrize(("task", "accepted"), [(TaskType.GRPO, False), (TaskType.INSTRUCT, True)])
def test_code_of_strangers_is_refused_where_there_is_no_sandbox(task: TaskType, accepted: bool) -> None:
    open_house = fleet(ability=Ability(no_sandbox="no bubblewrap"))
    asked = offer(task_type=task, hours_to_complete=8.0)
    assert decided(asked).accepted
    found = decided(asked, on=open_house)
    assert_reasoned(found)
    assert found.accepted is accepted
    assert {reason.rule for reason in found.failed} == (set() if accepted else {"sandbox"})


@pytest.mark.parametrize(
    ("asked", "needs"),
    [
        (offer(), Engine.AXOLOTL),
        (offer(task_type=TaskType.DPO), Engine.AXOLOTL),
        (picture_offer(), Engine.KOHYA),
        (picture_offer(model="Qwen/Qwen-Image"), Engine.AI_TOOLKIT),
    ],
)
def test_what_no_engine_here_can_train_is_refused_and_nothing_else(
    asked: MinerTaskOffer, needs: Engine
) -> None:
    for engine in Engine:
        found = decided(asked, on=fleet(ability=Ability(lacks={engine: "not built"})))
        assert_reasoned(found)
        assert ("engine" in {reason.rule for reason in found.failed}) is (engine is needs)


def test_without_a_usable_gpu_every_rule_is_still_judged() -> None:
    for blind in (fleet(hardware=None), replace(fleet(), gpus=())):
        found = decided(on=blind)
        assert_reasoned(found)
        assert {reason.rule for reason in found.failed} == {"plan", "gpus"}
        assert found.message == "Not taken: no capacity at the moment"


def test_a_card_that_is_out_is_not_given_and_is_named() -> None:
    idle = fleet("2xH100")
    first = replace(idle.gpus[0], out="fell off the bus")
    hardware = idle.hardware
    assert hardware is not None
    one = hardware.model_copy(update={"gpus": hardware.gpus.take(1)})
    found = decided(on=replace(idle, gpus=(first, idle.gpus[1]), hardware=one))
    assert found.placement is not None
    assert found.placement.gpus == ("1",)
    assert "not 0 (fell off the bus)" in verdict(found, "inventory").text


def test_a_profile_that_contradicts_itself_refuses_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(
        "limits: {min_lora_r: 64}\nsections:\n  a: {when: {task: dpo}, limits: {max_lora_r: 8}}\n"
    )
    odd = load_profile(str(file))
    assert decide(offer(), NOON, fleet(), History(), policy(), odd).accepted
    found = decide(offer(task_type=TaskType.DPO), NOON, fleet(), History(), policy(), odd)
    assert_reasoned(found)
    assert "contradicts itself" in verdict(found, "plan").text


def test_the_image_type_of_a_start_is_what_is_planned() -> None:
    asked = picture_offer(model="someone/a-model")
    found = decide(asked, NOON, fleet(), History(), policy(), profile(), image_type=ImageModelType.QWEN_IMAGE)
    assert found.factors["family"].text.startswith("qwen-image")


@each(
    ("asked", "on_top", "told"),
    [
        (offer(), {"rules.tasks": ["dpo"]}, "this task type is not trained here"),
        (offer(), {"rules.families": ["qwen"]}, "this model is not trained here"),
        (offer(), {"rules.max_hours": 1}, "the task is too long for this miner"),
        (offer(), {"rules.max_jobs": 0}, "no capacity at the moment"),
        (offer(), {"rules.min_value": 1000}, "not at the moment"),
        (offer(), {"score.threshold": 0.99}, "not at the moment"),
        (offer(hours_to_complete=0.1), {"rules.min_hours": 0}, "the task can't be finished here in the time"),
        (offer(model="a/b-700b", model_params_count=7 * 10**11), {}, "the model is too large for this miner"),
    ],
)
def test_a_validator_is_told_the_kind_of_reason_and_none_of_our_numbers(
    asked: Any, on_top: dict[str, Any], told: str
) -> None:
    found = decided(asked, policy(**{key.replace(".", "__"): value for key, value in on_top.items()}))
    assert found.message.startswith(f"Not taken: {told}")
    assert not any(letter.isdigit() for letter in found.message)


def test_the_last_gpus_are_kept_for_what_is_worth_them() -> None:
    choosy = policy(rules__min_value=0, rules__min_value_full=1.5)
    idle = decided(by=choosy)
    assert idle.accepted
    assert "with 25% of the GPUs held" in verdict(idle, "value").text
    full = decided(by=choosy, on=fleet("4xH100", hold("a", "012")))
    refused = verdict(full, "value")
    assert not refused.passed
    assert "less than 1.500 with 100% of the GPUs held" in refused.text
    needed = float(refused.way.split(" of ")[1].split(",")[0])
    kinder = policy(rules__min_value=0, rules__min_value_full=needed)
    assert decided(by=kinder, on=fleet("4xH100", hold("a", "012"))).accepted
    not_for_it = policy(rules__min_value=0, rules__min_value_full=1.5, rules__min_value_full_size="<7B")
    free_of_it = decided(by=not_for_it, on=fleet("4xH100", hold("a", "012")))
    assert free_of_it.accepted
    assert "at least 0" in verdict(free_of_it, "value").text


def test_what_a_refusal_says_would_let_the_offer_pass() -> None:
    refused = decided(by=policy("h100x4", score__threshold=0.9))
    limit = float(verdict(refused, "score").way.split(" of ")[1].split(",")[0])
    assert decided(by=policy("h100x4", score__threshold=limit)).accepted


def test_the_hashes_are_those_of_policy_and_profile() -> None:
    one, other = policy("h100x4"), policy("h100x4", rules__max_jobs=5)
    first, second = decided(by=one), decided(by=other)
    assert one.digest.startswith(first.policy_hash)
    assert first.policy_hash != second.policy_hash
    assert profile().digest.startswith(first.profile_hash or "-")


def test_a_plan_that_was_refused_is_shown_with_its_reason_and_no_place() -> None:
    found = decided(offer(hours_to_complete=0.2))
    assert found.placement is None
    assert found.plan is not None
    assert verdict(found, "plan").way
    assert Refusal.NO_TIME.value not in found.message
