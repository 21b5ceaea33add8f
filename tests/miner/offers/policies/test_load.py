from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.domain.errors import ConfigError
from core.domain.tasks import TaskType
from core.models.facts import Family
from miner.offers.policies.load import (
    POLICY_KIND,
    LoadedPolicy,
    load_policy,
    parse_overrides,
)
from tests.doubles.each import each


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


def test_lists_and_tables_by_size_are_replaced_and_both_spellings_of_a_task_are_one_key(
    tmp_path: Path,
) -> None:
    policy = load(
        tmp_path,
        "extends: up\nrules: {tasks: dpo, hours: {InstructTextTask: 12, DpoTask: null}}\n"
        'score: {size: {"<9B": 0.1}}',
        up="rules: {tasks: [chat, grpo], hours: {instruct: 8, dpo: 3}}\n"
        'score: {size: {"<5B": 0.5, ">=5B": 1}}',
    )
    assert policy.terms.rules.tasks == [TaskType.DPO]
    assert {str(band): share for band, share in policy.terms.score.size.items()} == {"<9B": 0.1}
    assert {kind: limit.hours for kind, limit in policy.terms.rules.hours.items()} == {"instruct": 12}


def test_null_takes_back_what_the_extended_policy_has_set(tmp_path: Path) -> None:
    policy = load(
        tmp_path,
        "extends: up\nrules: {hours: {dpo: null}, max_jobs: null}\nscore: {threshold: null, task: null}\n"
        "fitting: {max_wait: null}",
        up="rules: {hours: {dpo: 3, chat: 2}, max_jobs: 3}\nscore: {threshold: 0.5, task: {dpo: 1}}\n"
        "fitting: {max_wait: 5m, spare: 0.5}",
    )
    terms = policy.terms
    assert (list(terms.rules.hours), terms.rules.max_jobs, terms.score.threshold) == (["chat"], None, None)
    assert terms.score.task == {}
    assert (terms.fitting.max_wait, terms.fitting.spare) == (1800, 0.5)
    assert set(policy.written()) == {"rules.hours.chat", "fitting.spare"}


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
