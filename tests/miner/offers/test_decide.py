"""A reasoned decision on every offer, however odd, at any time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Engine, Refusal
from core.domain.decisions import Decision, ExpectedValue
from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer
from core.profile.resolve import load_profile
from miner.fleet.base import BackendAbility, InventoryState
from miner.offers.decide import decide, work_score
from miner.offers.history import SuccessHistory
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


def assert_reasoned(decision: Decision) -> None:
    """A reason for every rule, a short message, and a way out of each refusal."""
    assert decision.reasons
    assert decision.accepted is not bool(decision.failed)
    assert all(reason.text for reason in decision.reasons)
    assert all(reason.way for reason in decision.failed)
    assert decision.message.startswith("Accepted: " if decision.accepted else "Not taken: ")
    assert len(decision.message) < 260
    assert set(decision.factors) == {"task", "family", "success", "time", "size", "hardware", "value"}
    assert decision.value is not None
    assert (decision.policy_hash, decision.profile_hash) != ("", "")
    assert decision.accepted <= (decision.placement is not None and decision.plan is not None)


def test_an_ordinary_offer_is_accepted_with_everything_that_led_to_it() -> None:
    decision = decided(by=policy("h100x4"))
    assert_reasoned(decision)
    assert decision.accepted
    assert (decision.policy, decision.profile) == ("h100x4", "h100x4-strategy")
    assert policy("h100x4").digest.startswith(decision.policy_hash)
    assert profile().digest.startswith(decision.profile_hash)
    assert decision.score > decision.threshold
    assert decision.score == pytest.approx(sum(factor.contribution for factor in decision.factors.values()))
    assert decision.placement.starts_at == NOON
    assert NOON < decision.placement.ends_at <= NOON + 3 * HOUR + 300
    assert decision.priority > 0


@each(
    ("asked", "rule", "text"),
    [
        (offer(model="a/llama-8b", model_params_count=None), None, ""),
        (offer(model="a/mystery", model_params_count=0), "plan", "is unknown: no config"),
        (offer(model="a" * 193, model_params_count=None), "plan", "is unknown: no config"),
        (offer(model_params_count=10**18), "plan", "no model has more"),
        (offer(model="a/giant-700b", model_params_count=8 * 10**9), "plan", "no variation fits"),
        (offer(hours_to_complete=0.0), "plan", "0 hours"),
        (offer(hours_to_complete=0.0), "min_hours", "0 h leave no time"),
        (offer(hours_to_complete=0.01), "plan", "reserve"),
        (offer(hours_to_complete=10_000.0), "hours", "10000 h are over the limit of 8"),
        (picture_offer(ds_size=0), "plan", "no rows"),
        (picture_offer(ds_size=None), None, ""),
        (picture_offer(model="x"), None, ""),
    ],
)
def test_an_odd_offer_gets_a_reasoned_decision(asked: Any, rule: str | None, text: str) -> None:
    decision = decided(asked, policy("h100x4"))
    assert_reasoned(decision)
    if rule is None:
        assert decision.accepted, decision.failed
    else:
        assert not verdict(decision, rule).passed
        assert text in verdict(decision, rule).text


@each("hours", [0.5, 2.0])
def test_an_offer_without_pictures_is_refused_also_where_checkpoints_would_be_compared(hours: float) -> None:
    decision = decided(picture_offer(ds_size=0, hours_to_complete=hours), plan_by="steady")
    assert "no rows" in verdict(decision, "plan").text


def test_a_name_that_contradicts_the_stated_size_is_planned_for_the_larger() -> None:
    lied = decided(offer(model="a/giant-70b", model_params_count=8 * 10**9, hours_to_complete=6.0))
    honest = decided(offer(hours_to_complete=6.0))
    assert "the offer says 8B, the name 70B" in verdict(lied, "size").text
    assert lied.plan.gpus > honest.plan.gpus
    assert lied.value.work == honest.value.work  # validators go by the count


@pytest.mark.parametrize("hours_back", [1, 24 * 365 * 40])
def test_a_clock_that_went_backwards_breaks_nothing(hours_back: float) -> None:
    now = NOON - hours_back * HOUR
    busy = fleet("4xH100", hold("a", "01"))
    decision = decided(on=busy, history=SuccessHistory([outcome(published=False)]), now=now)
    assert_reasoned(decision)
    assert decision.accepted
    assert decision.placement.starts_at >= now


@pytest.mark.parametrize(
    ("changes", "rules", "text"),
    [
        (
            {"inventory": replace(fleet().inventory, problem="NVML: Unknown Error")},
            {"inventory"},
            "NVML: Unknown Error",
        ),
        (
            {"abilities": {"": BackendAbility(problem="Docker does not run")}},
            {"backend"},
            "Docker does not run",
        ),
        ({"inventory": InventoryState()}, {"plan", "gpus"}, "no GPU is usable"),
    ],
)
def test_nothing_is_accepted_without_gpus_that_can_be_seen_and_a_backend(
    changes: dict[str, Any], rules: set[str], text: str
) -> None:
    decision = decided(on=replace(fleet(), **changes))
    assert_reasoned(decision)
    assert {reason.rule for reason in decision.failed} == rules
    assert text in decision.failed[0].text
    assert decision.message == "Not taken: no capacity at the moment"


@pytest.mark.parametrize(("task", "accepted"), [(TaskType.GRPO, False), (TaskType.INSTRUCT, True)])
def test_code_of_strangers_is_refused_where_there_is_no_sandbox(task: TaskType, accepted: bool) -> None:
    unsafe = fleet(abilities={"": BackendAbility(no_sandbox="no bubblewrap")})
    asked = offer(task_type=task, hours_to_complete=8.0)
    assert decided(asked).accepted
    decision = decided(asked, on=unsafe)
    assert_reasoned(decision)
    assert decision.accepted is accepted
    assert {reason.rule for reason in decision.failed} == (set() if accepted else {"sandbox"})


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
        decision = decided(asked, on=fleet(abilities={"": BackendAbility(missing={engine: "not built"})}))
        assert_reasoned(decision)
        assert ("backend" in {reason.rule for reason in decision.failed}) is (engine is needs)


def test_a_gpu_that_is_out_is_not_given_and_is_named() -> None:
    idle = fleet("2xH100")
    first = replace(idle.gpus[0], unusable_reason="fell off the bus")
    (node,) = idle.nodes
    left = replace(node, hardware=node.installed.model_copy(update={"gpus": node.installed.gpus.take(1)}))
    decision = decided(on=replace(idle, inventory=InventoryState((first, idle.gpus[1]), (left,))))
    assert decision.placement.gpus == ("1",)
    assert "not 0 (fell off the bus)" in verdict(decision, "inventory").text


def test_a_profile_that_contradicts_itself_refuses_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(
        "limits: {min_lora_r: 64}\nsections:\n  a: {when: {task: dpo}, limits: {max_lora_r: 8}}\n"
    )
    odd = load_profile(str(file))
    assert decide(offer(), NOON, fleet(), SuccessHistory(), policy(), odd).accepted
    decision = decide(offer(task_type=TaskType.DPO), NOON, fleet(), SuccessHistory(), policy(), odd)
    assert_reasoned(decision)
    assert "contradicts itself" in verdict(decision, "plan").text


@each(
    ("asked", "overrides", "text"),
    [
        (offer(), {"rules__tasks": ["dpo"]}, "this task type is not trained here"),
        (offer(), {"rules__families": ["qwen"]}, "this model is not trained here"),
        (offer(), {"rules__max_hours": 1}, "the task is too long for this miner"),
        (offer(), {"rules__max_jobs": 0}, "no capacity at the moment"),
        (offer(), {"score__threshold": 0.99}, "not at the moment"),
        (
            offer(hours_to_complete=0.1),
            {"rules__min_hours": 0},
            "the task cannot be finished here in the time",
        ),
        (offer(model="a/b-700b", model_params_count=7 * 10**11), {}, "the model is too large for this miner"),
    ],
)
def test_a_validator_gets_the_kind_of_reason_and_none_of_our_numbers(
    asked: Any, overrides: dict[str, Any], text: str
) -> None:
    decision = decided(asked, policy(**overrides))
    assert decision.message.startswith(f"Not taken: {text}")
    assert not any(letter.isdigit() for letter in decision.message)


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


@pytest.mark.parametrize("model", ["runwayml/stable-diffusion-v1-5", "someone/sd-2.1-anime"])
def test_image_tasks_of_a_model_that_no_engine_trains_are_refused(model: str) -> None:
    decision = decided(picture_offer(model=model), policy("h100x4"))
    assert not decision.accepted
    assert decision.refusal is Refusal.NO_ENGINE
    assert decision.message == "Not taken: such models are not trained here"
    assert "Stable Diffusion 1 or 2; the image models trained are" in verdict(decision, "plan").text
    assert decided(picture_offer(model="stabilityai/stable-diffusion-xl-base-1.0")).refusal is None


def test_the_work_score_is_the_validators_own() -> None:
    for hours, billions, score in ((4, 9, 12), (0, 40, 1), (0.01, 1, 1), (10_000, 40, 1264.91)):
        assert work_score(hours, billions) == pytest.approx(score, abs=0.01)


def test_the_score_of_the_strategy_for_eight_is_its_formula() -> None:
    decision = decided(by=policy("h100x8"), plan_by="h100x8")
    by_hand = (
        0.35 * 0.35  # task weight of instruct
        + 0.25 * 0.95  # llama
        + 0.20 * 0.95  # success of instruct
        + 0.10 * (1 - 3 / 20)  # three of twenty hours
        + 0.05 * 1.0  # 8B lies in 7B-13B
        + 0.05 * decision.plan.share
    )
    assert decision.score == pytest.approx(by_hand)
    assert decision.threshold == 0.45


@each(
    ("name", "low", "high"),
    [
        ("task", {"task_type": TaskType.CHAT}, {"task_type": TaskType.DPO}),
        ("time", {"hours_to_complete": 6.0}, {"hours_to_complete": 2.0}),
        (
            "size",
            {"model": "a/llama-3b", "model_params_count": 3 * 10**9},
            {"model": "a/llama-70b", "model_params_count": 70 * 10**9},
        ),
        ("hardware", {"model": "a/x-13b", "model_params_count": 13 * 10**9}, {}),
        ("value", {"model": "a/x-1b", "model_params_count": 10**9}, {}),
    ],
)
def test_a_factor_rises_with_what_it_stands_for(name: str, low: dict[str, Any], high: dict[str, Any]) -> None:
    small, large = (decided(offer(**changes), policy("h100x4")).factors[name] for changes in (low, high))
    assert small.value < large.value
    assert small.weight == large.weight > 0
    assert small.contribution == pytest.approx(small.value * small.weight)
    assert 0 <= small.value <= large.value <= 1


def test_every_factor_is_shown_also_one_without_weight() -> None:
    family = decided(by=policy("h100x4")).factors["family"]
    assert (family.weight, family.contribution) == (0, 0)
    assert family.value == 0.95
    assert family.text == "llama: 95%, the prior"


def value_of(**overrides: Any) -> ExpectedValue | None:
    return decided(by=policy(**overrides)).value


def test_expected_value_weighs_winning_against_failing() -> None:
    value = value_of(
        value__win_chance={"instruct": 0.2}, value__penalty=2, value__training_exponent={"instruct": 0}
    )
    assert value.work == pytest.approx(2 * math.sqrt(3 * 8))
    assert value.success == 0.95
    assert value.win == 0.2
    assert value.points == pytest.approx(value.work * (3 * 0.95 * 0.2 - 2 * 0.05))
    assert value.per_gpu_hour == pytest.approx(value.points / value.gpu_hours)


def test_a_training_cut_short_wins_less_often() -> None:
    whole = value_of(value__training_exponent={"instruct": 0})
    cut = value_of(value__training_exponent={"instruct": 1})
    share = decided().plan
    assert cut.win == pytest.approx(whole.win * share.share)
    default = value_of(value__training_exponent=None)
    assert default.win == pytest.approx(whole.win * share.share**0.3)


def test_pictures_can_lose_points_though_they_are_published() -> None:
    decision = decided(
        picture_offer(), policy(value__punished={"image": 0.25}, value__win_chance={"flux": 0.1})
    )
    assert decision.value.punished == 0.25
    success = decision.value.success
    lost = 1 - success + 0.25 * success
    assert decision.value.points == pytest.approx(
        decision.value.work * (3 * success * decision.value.win - lost)
    )
