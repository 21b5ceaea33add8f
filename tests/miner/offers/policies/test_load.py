from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.config.files import config_dir
from core.domain.errors import ConfigError
from core.domain.tasks import TaskType
from core.models.facts import Family
from core.profile.resolve import load_profile
from miner.offers.backtest.policy_check import policy_findings
from miner.offers.decide import decide
from miner.offers.history import SuccessHistory
from miner.offers.policies.load import (
    POLICY_KIND,
    LoadedPolicy,
    load_policy,
    parse_overrides,
    policy_files,
)
from miner.offers.policies.schema import Policy, PolicyRules
from tests.doubles.each import each
from tests.miner.offers.builders import NOON, fleet, offer


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def load(folder: Path, text: str, **more: str) -> LoadedPolicy:
    return load_policy("mine", [write(folder, mine=text, **more)])


@each(
    ("text", "line", "meant"),
    [
        ("rules:\n  max_job: 3", 3, "nearest is max_jobs"),
        ("rules:\n  task_types: [dpo]", 3, "here it is called tasks"),
        ("rules:\n  threshold: 0.5", 3, "it belongs under score"),
        ("max_jobs: 3", 2, "it belongs under rules"),
        ("rules:\n  experience:\n    a: {publishd: 3}", 4, "nearest is published"),
    ],
)
def test_an_unknown_key_is_reported_with_its_line(text: str, line: int, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        POLICY_KIND.parse(f"description: x\n{text}\n", "mine.yaml")
    (problem,) = [problem for problem in caught.value.problems if "no such key" in problem.rule]
    assert problem.where.startswith(f"mine.yaml:{line}:")
    assert meant in problem.rule


@each(
    ("text", "said"),
    [
        ("rules: {hours: {poetry: 3}}", "a kind of task is one of instruct"),
        ("rules: {tasks: [poetry]}", "a task is one of"),
        ("rules: {size: 70}", "a size band is written"),
        ("rules: {min_success: 2}", "must be at most 1"),
        ("rules: {blackout: ['22-6']}", "blackout hours are written"),
        ("success: {half_life: 14}", "is written with its unit"),
    ],
)
def test_an_invalid_value_is_reported_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        POLICY_KIND.parse(text, "mine.yaml")
    assert said in str(caught.value)


def test_a_policy_replaces_the_one_it_extends_key_by_key(tmp_path: Path) -> None:
    policy = load(
        tmp_path,
        "extends: up\nrules: {hours: {dpo: 5}, max_jobs: 2}\nsuccess: {family: {qwen: 0.5}}",
        up="rules: {hours: {dpo: 10, chat: 7}, min_hours: 1}\nsuccess: {family: {llama: 0.9}}",
    )
    rules = policy.terms.rules
    assert {kind: limit.hours for kind, limit in rules.hours.items()} == {"dpo": 5, "chat": 7}
    assert (rules.max_jobs, rules.min_hours) == (2, 1)
    assert policy.terms.success.family == {Family.LLAMA: 0.9, Family.QWEN: 0.5}
    written = policy.written()
    assert written["rules.hours.dpo"].origin == "mine.yaml:2"
    assert written["rules.hours.chat"].origin == "up.yaml:1"


def test_lists_and_tables_by_size_are_replaced_and_null_takes_back_under_either_spelling(
    tmp_path: Path,
) -> None:
    policy = load(
        tmp_path,
        "extends: up\nrules: {tasks: dpo, hours: {InstructTextTask: 12, DpoTask: null}, max_jobs: null}\n"
        'score: {size: {"<9B": 0.1}, threshold: null, task: null}\nfitting: {max_wait: null}',
        up="rules: {tasks: [chat, grpo], hours: {instruct: 8, dpo: 3}, max_jobs: 3}\n"
        'score: {size: {"<5B": 0.5, ">=5B": 1}, threshold: 0.5, task: {dpo: 1}}\n'
        "fitting: {max_wait: 5m, spare: 0.5}",
    )
    rules, score, fitting = policy.terms.rules, policy.terms.score, policy.terms.fitting
    assert (rules.tasks, rules.max_jobs) == ([TaskType.DPO], None)
    assert {kind: limit.hours for kind, limit in rules.hours.items()} == {"instruct": 12}
    assert {str(band): share for band, share in score.size.items()} == {"<9B": 0.1}
    assert (score.threshold, score.task, fitting.max_wait, fitting.spare) == (None, {}, 1800, 0.5)
    assert set(policy.written()) == {"rules.tasks", "rules.hours.instruct", "score.size.<9B", "fitting.spare"}


def test_description_is_not_inherited_but_hardware_and_profile_are(tmp_path: Path) -> None:
    policy = load(tmp_path, "extends: up", up="description: Up\nhardware: 2xL4\nprofile: steady")
    assert (policy.description, policy.hardware, policy.profile) == ("", "2xL4", "steady")
    other = load(tmp_path, "extends: up\nprofile: h100x4", up="profile: steady")
    assert (other.profile, other.hardware) == ("h100x4", None)


def test_the_digest_changes_with_text_and_overrides(tmp_path: Path) -> None:
    first = load(tmp_path, "rules: {max_jobs: 1}")
    again = load(tmp_path, "rules: {max_jobs: 1}")
    other = load(tmp_path, "rules: {max_jobs: 2}")
    overrides = first.with_overrides({"rules.max_jobs": 2})
    assert first.digest == again.digest
    assert len({first.digest, other.digest, overrides.digest}) == 3
    assert overrides.terms == other.terms


def test_overrides_win_and_are_shown_as_such() -> None:
    policy = load_policy("h100x4", (), parse_overrides(["hours.InstructTextTask=12", "threshold=null"]))
    assert policy.terms.rules.hours["instruct"].hours == 12
    assert policy.terms.score.threshold is None
    assert policy.written()["rules.hours.instruct"].origin == "set"
    assert policy.written()["rules.hours.dpo"].origin.startswith("h100x4.yaml:")
    twice = policy.with_overrides(parse_overrides(["rules.max_jobs=3"]))
    assert (twice.terms.rules.max_jobs, twice.terms.rules.hours["instruct"].hours) == (3, 12)


@each(
    ("text", "overrides"),
    [
        ("hours.dpo=12", {"rules.hours.dpo": 12}),
        ("max_hours=<20", {"rules.max_hours": "<20"}),
        ("weights.value=.3", {"score.weights.value": 0.3}),
        ("max_wait = 2h", {"fitting.max_wait": "2h"}),
        ("min_value=", {"rules.min_value": None}),
    ],
)
def test_an_override_may_leave_out_the_part_it_belongs_to(text: str, overrides: dict[str, Any]) -> None:
    assert parse_overrides([text]) == overrides


@each(
    ("text", "rule"),
    [
        ("hours", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("hourz.dpo=3", "nearest is rules.hours"),
        ("task.dpo=0.5", "is it score or success"),
        ("max_jobs=&a 3", "anchors"),
        ("hours.dpo=long", "hours are a number"),
    ],
)
def test_an_invalid_override_is_reported_with_what_it_could_mean(text: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy("h100x4", (), parse_overrides([text]))
    assert rule in str(caught.value)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-5, 5)
        | st.floats(allow_nan=False)
        | st.sampled_from(["8", "dpo"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["rules", "hours", "score", "dpo", "size", "<7B", "weights", "task", "x"]),
                inner,
            )
        ),
        max_leaves=8,
    )
)
def test_any_yaml_is_a_policy_or_a_reported_problem(data: Any) -> None:
    try:
        POLICY_KIND.parse(yaml.safe_dump(data), "x.yaml")
    except ConfigError as error:
        message = str(error)
        assert "x.yaml" in message


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
