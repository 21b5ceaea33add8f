"""The shipped policies say what the strategies say."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.configs import config_dir
from core.errors import ConfigError
from core.models import Family
from core.profile import load_profile
from core.tasks import TaskType
from miner.offers.decide import decide
from miner.offers.history import History
from miner.offers.policies.check import findings
from miner.offers.policies.load import load_policy, policy_files
from miner.offers.policies.schema import Policy
from tests.doubles.each import each
from tests.miner.offers.builders import NOON, fleet, offer

FILES = sorted((config_dir() / "policies").glob("*.yaml"))


def terms(name: str) -> Policy:
    return load_policy(name).terms


@each("file", FILES)
def test_every_shipped_policy_is_read_described_and_goes_with_a_profile_that_is_there(file: Path) -> None:
    policy = load_policy(str(file))
    assert policy.description
    assert findings(policy) == []
    if policy.profile is not None:
        assert load_profile(policy.profile).hardware
    assert policy_files()[file.stem] == file


def test_the_four_that_were_asked_for_are_there() -> None:
    assert {"h100x4", "h100x8", "conservative", "everything-feasible"} <= set(policy_files())


def test_h100x4_is_the_strategy_for_four() -> None:
    found = terms("h100x4")
    assert {kind: limit.hours for kind, limit in found.rules.hours.items() if kind != "image"} == {
        "instruct": 8,
        "dpo": 10,
        "grpo": 10,
        "chat": 7,
        "sdxl": 4,
        "flux": 4,
        "sd": 3,
    }
    assert (found.rules.tasks, found.rules.families, found.rules.size) == (None, None, None)
    task = found.score.task
    assert task["dpo"] == task["grpo"] > task["instruct"] > task["chat"]
    sizes = [
        next(share for band, share in found.score.size.items() if billions * 10**9 in band)
        for billions in (70, 34, 13, 7, 3)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 5


def test_h100x4_takes_models_of_70b_first_and_never_holds_the_gpus_back_from_them() -> None:
    """The strategy: "70B+ Models: High priority". What is refused has no plan, or costs too much."""
    policy, refused, asked = load_policy("h100x4"), [], 0
    for name, params in (("Llama-3.1-70B", 70_600_000_000), ("Qwen2.5-72B", 72_700_000_000)):
        for task in (TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO):
            for hours in (4, 6, 7):
                one = offer(model=name, model_params_count=params, task_type=task, hours_to_complete=hours)
                found = decide(one, NOON, fleet(), History(), policy, load_profile("h100x4"))
                asked += 1
                if not found.accepted:
                    assert found.refusal is not None or (found.value is not None and found.value.points < 0)
                    refused.append(one)
    assert len(refused) <= asked // 4


def test_h100x8_is_the_strategy_for_eight() -> None:
    found = terms("h100x8")
    assert found.score.weights.model_dump() == {
        "task": 0.35,
        "family": 0.25,
        "success": 0.20,
        "time": 0.10,
        "size": 0.05,
        "hardware": 0.05,
        "value": 0.0,
    }
    assert found.score.threshold == 0.45
    assert {word: found.score.task[word] for word in ("instruct", "grpo", "image", "dpo")} == {
        "instruct": 0.35,
        "grpo": 0.30,
        "image": 0.20,
        "dpo": 0.15,
    }
    names = ("llama", "mistral", "qwen", "gemma", "phi", "codellama", "deepseek")
    assert found.rules.families == [Family(name) for name in names]
    assert [found.success.family[Family(name)] for name in names] == [0.95, 0.9, 0.85, 0.8, 0.75, 0.9, 0.85]
    assert str(found.rules.max_hours) == "<20"
    assert found.rules.max_jobs == 12
    assert TaskType.DPO not in (found.rules.tasks or [])


def test_conservative_takes_less_than_the_others() -> None:
    found = terms("conservative")
    assert found.fitting.max_wait == 0
    assert found.rules.experience
    assert found.rules.min_success > terms("h100x4").rules.min_success


def test_everything_feasible_has_no_preferences() -> None:
    found = terms("everything-feasible")
    assert found.rules == found.rules.model_validate({"min_hours": 0})
    assert found.score.threshold is None


def test_the_scoring_of_validators_is_in_all_of_them() -> None:
    for file in FILES:
        value = load_policy(str(file)).terms.value
        assert (value.win_points, value.penalty) == (3, 1)


def test_a_shipped_policy_does_not_lean_on_the_operator_s_own(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("rules: {max_jobs: 0}")
    assert load_policy("h100x4", [tmp_path]).terms.rules.max_jobs is None
    with pytest.raises(ConfigError):
        load_policy("missing", [tmp_path])
