from __future__ import annotations

from core.domain.hardware import CPU, GpuSet, Hardware, parse_gpus
from miner.offers.policies.load import active_config, load_policy, settings_overrides
from miner.settings import Settings, load_settings
from tests.doubles.each import each


def settings(**env: str) -> Settings:
    return load_settings(env=env, env_file=None)


def host(gpus: str | None) -> Hardware | None:
    if gpus is None:
        return None
    return Hardware(gpus=GpuSet(kind=CPU, count=1) if gpus == "cpu" else parse_gpus(gpus))


@each(
    ("gpus", "policy", "profile"),
    [
        ("8xH100", "h100x8", "h100x8"),
        ("7xH100", "h100x8", "h100x8"),  # one of eight failed
        ("4xH100", "h100x4", "h100x4"),
        ("1xL40S", "h100x4", "h100x4"),
        (None, "h100x4", "h100x4"),
        ("cpu", "everything-feasible", "cpu-demo"),
    ],
)
def test_unless_chosen_policy_and_profile_follow_the_gpus(
    gpus: str | None, policy: str, profile: str
) -> None:
    active = active_config(settings(), host(gpus))
    assert (active.policy.name, active.profile.name) == (policy, profile)
    assert "POLICY is auto" in active.why_policy
    assert "PROFILE is auto" in active.why_profile


def test_what_is_chosen_is_taken_and_a_policy_names_its_profile() -> None:
    chosen = active_config(settings(POLICY="conservative", PROFILE="h100-fast"), host("8xH100"))
    assert (chosen.policy.name, chosen.profile.name) == ("conservative", "h100-fast")
    assert chosen.why_policy == "POLICY=conservative in the environment"
    active = active_config(settings(POLICY="conservative"), host("8xH100"))
    assert active.profile.name == "steady"
    assert active.why_profile == "policy conservative names it and PROFILE is auto"


def test_the_environment_is_laid_over_any_policy() -> None:
    assert settings_overrides(settings()) == {}
    policy = load_policy(
        "h100x8", (), settings_overrides(settings(TASK_TYPES="chat,dpo", MAX_HOURS="3", MAX_JOBS="0"))
    )
    rules = policy.terms.rules
    assert [task.value for task in rules.tasks or ()] == ["ChatTask", "DpoTask"]
    assert (rules.max_hours.hours, rules.max_jobs) == (3, 0)
