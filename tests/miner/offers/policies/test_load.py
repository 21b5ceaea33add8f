from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.models import Family
from core.tasks import TaskType
from miner.offers.policies.load import (
    LivePolicy,
    LoadedPolicy,
    load_policy,
    parse_policy,
    policy_files,
    read_settings,
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
        ("ruls: {}", 2, "nearest is rules"),
        ("rules:\n  max_job: 3", 3, "nearest is max_jobs"),
        ("rules:\n  task_types: [dpo]", 3, "here it is called tasks"),
        ("rules:\n  threshold: 0.5", 3, "it belongs under score"),
        ("max_jobs: 3", 2, "it belongs under rules"),
        ("score:\n  weights: {tsk: 1}", 3, "nearest is task"),
        ("rules:\n  experience:\n    a: {publishd: 3}", 4, "nearest is published"),
        ("value:\n  win_chances: {}", 3, "nearest is win_chance"),
        ("success:\n  decay: 3d", 3, "here it is called half_life"),
    ],
)
def test_a_stray_key_is_told_with_its_line_and_what_was_meant(text: str, line: int, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(f"description: x\n{text}\n", "mine.yaml")
    (problem,) = [one for one in caught.value.problems if "no such key" in one.rule]
    assert problem.where.startswith(f"mine.yaml:{line}:")
    assert meant in problem.rule


@each(
    ("text", "said"),
    [
        ("rules: {hours: {poetry: 3}}", "a kind of task is one of instruct"),
        ("rules: {hours: {dpo: 8h}}", "hours are a number like 8"),
        ("rules: {tasks: [poetry]}", "a task is one of"),
        ("rules: {families: [lama]}", "nearest is llama"),
        ("rules: {size: 70}", "a size band is written"),
        ("rules: {min_success: 2}", "must be at most 1"),
        ("rules: {max_jobs: -1}", "must be at least 0"),
        ("rules: {blackout: ['22-6']}", "a stretch is written"),
        ("score: {task: {dpo: 1.5}}", "must be at most 1"),
        ("score: {size: {7B: 0.5}}", "a size band is written"),
        ("success: {half_life: 14}", "is written with its unit"),
        ("success: {half_life: 0d}", "must be more than 0"),
        ("fitting: {max_wait: 30}", "is written with its unit"),
        ("value: {win_points: x}", "a number is needed"),
        ("[1, 2]", "a policy is a mapping"),
        ("rules: {tasks: [dpo, null]}", "a task is one of"),
    ],
)
def test_a_wrong_value_is_told_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        parse_policy(text, "mine.yaml")
    assert said in str(caught.value)


def test_a_policy_is_laid_over_the_one_it_extends_key_by_key(tmp_path: Path) -> None:
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


def test_lists_and_tables_by_size_are_replaced_as_a_whole(tmp_path: Path) -> None:
    policy = load(
        tmp_path,
        'extends: up\nrules: {tasks: dpo}\nscore: {size: {"<9B": 0.1}}',
        up='rules: {tasks: [chat, grpo]}\nscore: {size: {"<5B": 0.5, ">=5B": 1}}',
    )
    assert policy.terms.rules.tasks == [TaskType.DPO]
    assert {str(band): share for band, share in policy.terms.score.size.items()} == {"<9B": 0.1}


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


def test_both_spellings_of_a_task_are_one_key(tmp_path: Path) -> None:
    policy = load(
        tmp_path,
        "extends: up\nrules: {hours: {InstructTextTask: 12, DpoTask: null}}",
        up="rules: {hours: {instruct: 8, dpo: 3}}",
    )
    assert {kind: limit.hours for kind, limit in policy.terms.rules.hours.items()} == {"instruct": 12}


def test_what_belongs_to_one_file_is_not_inherited_but_hardware_and_profile_are(tmp_path: Path) -> None:
    policy = load(tmp_path, "extends: up", up="description: Up\nhardware: 2xL4\nprofile: steady")
    assert (policy.description, policy.hardware, policy.profile) == ("", "2xL4", "steady")
    other = load(tmp_path, "extends: up\nprofile: h100x4", up="profile: steady")
    assert (other.profile, other.hardware) == ("h100x4", None)


def test_the_digest_changes_with_text_and_with_what_is_set_on_top(tmp_path: Path) -> None:
    one = load(tmp_path, "rules: {max_jobs: 1}")
    again = load(tmp_path, "rules: {max_jobs: 1}")
    other = load(tmp_path, "rules: {max_jobs: 2}")
    on_top = one.changed({"rules.max_jobs": 2})
    assert one.digest == again.digest
    assert len({one.digest, other.digest, on_top.digest}) == 3
    assert on_top.terms == other.terms


def test_what_is_set_on_top_wins_and_is_shown_as_such() -> None:
    policy = load_policy("h100x4", (), read_settings(["hours.InstructTextTask=12", "threshold=null"]))
    assert policy.terms.rules.hours["instruct"].hours == 12
    assert policy.terms.score.threshold is None
    assert policy.written()["rules.hours.instruct"].origin == "set"
    assert policy.written()["rules.hours.dpo"].origin.startswith("h100x4.yaml:")
    twice = policy.changed(read_settings(["rules.max_jobs=3"]))
    assert (twice.terms.rules.max_jobs, twice.terms.rules.hours["instruct"].hours) == (3, 12)


@each(
    ("text", "found"),
    [
        ("hours.dpo=12", {"rules.hours.dpo": 12}),
        ("rules.tasks=[dpo, chat]", {"rules.tasks": ["dpo", "chat"]}),
        ("max_hours=<20", {"rules.max_hours": "<20"}),
        ("weights.value=.3", {"score.weights.value": 0.3}),
        ("max_wait = 2h", {"fitting.max_wait": "2h"}),
        ("min_value=", {"rules.min_value": None}),
    ],
)
def test_a_setting_may_leave_out_the_part_it_belongs_to(text: str, found: dict[str, Any]) -> None:
    assert read_settings([text]) == found


@each(
    ("text", "said"),
    [
        ("hours", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("hourz.dpo=3", "nearest is rules.hours"),
        ("task.dpo=0.5", "is it score or success"),
        ("max_jobs=&a 3", "anchors"),
    ],
)
def test_a_setting_that_names_nothing_is_told_what_it_could_mean(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings([text])
    assert said in str(caught.value)


def test_a_bad_value_set_on_top_is_told() -> None:
    with pytest.raises(ConfigError, match="hours are a number"):
        load_policy("h100x4", (), {"rules.hours.dpo": "long"})


def test_a_policy_of_the_shipped_one_s_name_may_extend_it(tmp_path: Path) -> None:
    write(tmp_path, h100x4="extends: h100x4\nrules: {max_jobs: 7}")
    policy = load_policy("h100x4", [tmp_path])
    assert policy.terms.rules.max_jobs == 7
    assert policy.terms.rules.hours["dpo"].hours == 10
    assert policy_files([tmp_path])["h100x4"].parent == tmp_path


def test_a_circle_and_a_missing_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="circle"):
        load(tmp_path, "extends: up", up="extends: mine")
    with pytest.raises(ConfigError, match=r"no such policy; known by name: .*h100x4"):
        load_policy("nope", [tmp_path])


def edit(folder: Path, stamp: int, **texts: str) -> None:
    write(folder, **texts)
    for name in texts:
        os.utime(folder / f"{name}.yaml", ns=(stamp, stamp))


def test_a_policy_follows_its_file_and_a_bad_edit_keeps_the_last_good_one(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="rules: {max_jobs: 1}")
    told: list[ConfigError] = []
    live = LivePolicy("mine", [tmp_path], told.append, {"rules.min_hours": 2})
    assert live.current().terms.rules.max_jobs == 1
    edit(tmp_path, 2, mine="rules: {max_jobz: 2}")
    assert live.current().terms.rules.max_jobs == 1
    assert "max_jobz" in str(told[0])
    edit(tmp_path, 3, mine="rules: {max_jobs: 3}")
    assert (live.current().terms.rules.max_jobs, live.current().terms.rules.min_hours) == (3, 2)
    assert live.problem is None


def test_a_policy_whose_file_goes_away_stays_in_force_and_is_told_once(tmp_path: Path) -> None:
    edit(tmp_path, 1, h100x4="rules: {max_jobs: 1}")
    told: list[ConfigError] = []
    live = LivePolicy("h100x4", [tmp_path], told.append)
    (tmp_path / "h100x4.yaml").unlink()
    for _ in range(3):
        assert live.current().terms.rules.max_jobs == 1
    assert ["is gone" in str(error) for error in told] == [True]


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
def test_anything_that_yaml_can_say_is_a_policy_or_a_told_problem(data: Any) -> None:
    import yaml

    try:
        parse_policy(yaml.safe_dump(data), "x.yaml")
    except ConfigError as error:
        told = str(error)
        assert "x.yaml" in told
