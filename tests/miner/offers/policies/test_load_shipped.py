"""The shipped policies say what the strategies say."""

from __future__ import annotations

from pathlib import Path

from core.config.files import config_dir
from core.domain.tasks import TaskType
from core.models.facts import Family
from core.profile.resolve import load_profile
from miner.offers.backtest.policy_check import policy_findings
from miner.offers.decide import decide
from miner.offers.history import SuccessHistory
from miner.offers.policies.load import load_policy, policy_files
from miner.offers.policies.schema import Policy, PolicyRules
from tests.miner.offers.builders import NOON, fleet, offer

FILES = sorted((config_dir() / "policies").glob("*.yaml"))


def terms(name: str) -> Policy:
    return load_policy(name).terms


def test_every_shipped_policy_is_sound_described_and_goes_with_a_profile_that_exists() -> None:
    assert {"h100x4", "h100x8", "conservative", "everything-feasible"} <= set(policy_files())
    for file in FILES:
        policy = load_policy(str(file))
        assert policy.description
        assert policy_findings(policy) == []
        assert policy.profile is None or load_profile(policy.profile).hardware
        assert policy_files()[file.stem] == file
        value = policy.terms.value
        assert (value.win_points, value.penalty) == (3, 1)  # the validators' scoring


def test_h100x4_is_the_strategy_for_four() -> None:
    rules, score = terms("h100x4").rules, terms("h100x4").score
    limits = {"instruct": 8, "dpo": 10, "grpo": 10, "chat": 7, "sdxl": 4, "flux": 4, "sd": 3}
    assert {kind: limit.hours for kind, limit in rules.hours.items() if kind != "image"} == limits
    assert (rules.tasks, rules.families, rules.size) == (None, None, None)
    assert score.task["dpo"] == score.task["grpo"] > score.task["instruct"] > score.task["chat"]
    billions = (70, 34, 13, 7, 3)
    sizes = [next(value for band, value in score.size.items() if size * 10**9 in band) for size in billions]
    assert sizes == sorted(set(sizes), reverse=True)


def test_h100x4_takes_models_of_70b_first_and_never_holds_the_gpus_back_from_them() -> None:
    """The strategy: "70B+ Models: High priority". What is refused has no plan, or costs too much."""
    policy, refused, asked = load_policy("h100x4"), [], 0
    for name, params in (("Llama-3.1-70B", 70_600_000_000), ("Qwen2.5-72B", 72_700_000_000)):
        for task in (TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO):
            for hours in (4, 6, 7):
                sent = offer(model=name, model_params_count=params, task_type=task, hours_to_complete=hours)
                decision = decide(sent, NOON, fleet(), SuccessHistory(), policy, load_profile("h100x4"))
                asked += 1
                if not decision.accepted:
                    assert decision.refusal is not None or (
                        decision.value is not None and decision.value.points < 0
                    )
                    refused.append(sent)
    assert len(refused) <= asked // 4


def test_h100x8_is_the_strategy_for_eight() -> None:
    rules, score, success = terms("h100x8").rules, terms("h100x8").score, terms("h100x8").success
    weights = {"task": 0.35, "family": 0.25, "success": 0.2, "time": 0.1, "size": 0.05, "hardware": 0.05}
    assert score.weights.model_dump() == {**weights, "value": 0.0}
    assert score.threshold == 0.45
    tasks = {"instruct": 0.35, "grpo": 0.30, "image": 0.20, "dpo": 0.15}
    assert {word: score.task[word] for word in tasks} == tasks
    families = ("llama", "mistral", "qwen", "gemma", "phi", "codellama", "deepseek")
    assert rules.families == [Family(name) for name in families]
    rates = [success.family[Family(name)] for name in families]
    assert rates == [0.95, 0.9, 0.85, 0.8, 0.75, 0.9, 0.85]
    assert (str(rules.max_hours), rules.max_jobs) == ("<20", 12)
    assert TaskType.DPO not in (rules.tasks or [])


def test_conservative_accepts_less_than_the_others_and_everything_feasible_has_no_preferences() -> None:
    conservative, feasible = terms("conservative"), terms("everything-feasible")
    assert conservative.fitting.max_wait == 0
    assert conservative.rules.experience
    assert conservative.rules.min_success > terms("h100x4").rules.min_success
    assert feasible.rules == PolicyRules(min_hours=0)
    assert feasible.score.threshold is None


def test_a_shipped_policy_does_not_depend_on_the_operator_s_own(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("rules: {max_jobs: 0}")
    assert load_policy("h100x4", [tmp_path]).terms.rules.max_jobs is None
