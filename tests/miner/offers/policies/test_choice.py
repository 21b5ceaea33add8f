from __future__ import annotations

import pytest

from core.hardware import CPU, GpuSet, Hardware, parse_gpus
from miner.offers.policies.choice import on_top, policy_name, profile_name
from miner.offers.policies.load import load_policy
from miner.settings import Settings, load_settings


def settings(**env: str) -> Settings:
    return load_settings(env=env, env_file=None)


def host(gpus: str | None) -> Hardware | None:
    if gpus is None:
        return None
    return Hardware(gpus=GpuSet(kind=CPU, count=1) if gpus == "cpu" else parse_gpus(gpus))


@pytest.mark.parametrize(
    ("gpus", "policy", "profile"),
    [
        ("8xH100", "h100x8", "h100x8"),
        ("7xH100", "h100x8", "h100x8"),  # one of eight failed
        ("4xH100", "h100x4", "h100x4-strategy"),
        ("1xL40S", "h100x4", "h100x4-strategy"),
        (None, "h100x4", "h100x4-strategy"),
        ("cpu", "everything-feasible", "cpu-demo"),
    ],
)
def test_unless_chosen_policy_and_profile_follow_the_gpus(
    gpus: str | None, policy: str, profile: str
) -> None:
    chosen = policy_name(settings(), host(gpus))
    assert chosen == policy
    assert profile_name(settings(), load_policy(chosen), host(gpus)) == profile


def test_what_is_chosen_is_taken_and_a_policy_names_its_profile() -> None:
    chosen = settings(POLICY="conservative", PROFILE="/etc/mine.yaml")
    assert policy_name(chosen, host("8xH100")) == "conservative"
    assert profile_name(chosen, load_policy("conservative"), host("8xH100")) == "/etc/mine.yaml"
    assert profile_name(settings(), load_policy("conservative"), host("8xH100")) == "steady"


def test_the_environment_is_laid_over_any_policy() -> None:
    assert on_top(settings()) == {}
    found = load_policy("h100x8", (), on_top(settings(TASK_TYPES="chat,dpo", MAX_HOURS="3", MAX_JOBS="0")))
    rules = found.terms.rules
    assert [task.value for task in rules.tasks or ()] == ["ChatTask", "DpoTask"]
    assert rules.max_hours is not None
    assert (rules.max_hours.hours, rules.max_jobs) == (3, 0)
