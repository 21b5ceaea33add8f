"""What is wrong in a text, what differs, and what an edit would change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.domain.hardware import Hardware, parse_gpus
from core.profile.resolve import load_profile
from miner.api.config_files import EditedValue, RuleValueChange
from miner.config_files.checks import check_text, edited_values
from miner.config_files.what_if import CheckOrder, TermsInForce
from miner.offers.policies.load import load_policy
from tests.miner.offers.builders import HOUR, NOON, offer, picture_offer
from tests.miner.offers.filled import answer, store

TERMS = TermsInForce.of(load_policy("h100x4"), load_profile("h100x4"), Hardware(gpus=parse_gpus("4xH100")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with store(tmp_path):
        pass
    return tmp_path


def check(folder: Path, text: str, **how: Any) -> Any:
    whole: dict[str, Any] = {
        "kind": "profiles",
        "name": "mine",
        "file": str(folder / "mine.yaml"),
        "directory": str(folder),
        "text": text,
        "saved": None,
        "effects": False,
        "terms": TERMS,
        "store_dir": str(folder),
        "now": NOON + HOUR,
    }
    return check_text(CheckOrder(**{**whole, **how}))


def places(found: Any) -> list[tuple[int | None, int | None, str]]:
    return [(one.line, one.column, one.key) for one in found.problems]


def test_mistakes_have_line_column_and_the_nearest_key(folder: Path) -> None:
    found = check(folder, "extends: h100x4\ntargets:\n  lora_rank: 8\n  learning_rate: fast\n")
    assert not found.valid
    assert places(found) == [(3, 3, "targets.lora_rank"), (4, 3, "targets.learning_rate")]
    assert "lora_r" in found.problems[0].text


@pytest.mark.parametrize(
    ("text", "line"),
    [("targets:\n\tlora_r: 8\n", 2), ("a: &b 1\n", 1), ("extends: nothing-like-it\n", 1), ("- a\n", None)],
)
def test_what_is_no_profile_at_all_is_a_problem_in_its_line(
    folder: Path, text: str, line: int | None
) -> None:
    found = check(folder, text)
    assert not found.valid
    assert [one.line for one in found.problems] == [line]


def test_a_contradiction_of_a_policy_is_found_in_its_line(folder: Path) -> None:
    text = "extends: h100x4\nscore:\n  threshold: 7\n"
    found = check(folder, text, kind="policies")
    assert (found.valid, places(found)) == (False, [(3, 3, "score.threshold")])


def test_a_warning_about_the_file_of_the_same_name_that_is_extended_has_no_line_here(folder: Path) -> None:
    found = check(folder, "extends: base\n" + "#\n" * 40, name="base", file=str(folder / "base.yaml"))
    assert found.valid
    assert {one.line for one in found.problems} == {None}


def test_the_diff_is_against_the_saved_text(folder: Path) -> None:
    saved, text = "extends: h100x4\n", "extends: h100x4\nlimits:\n  max_gpus: 2\n"
    found = check(folder, text, saved=saved)
    assert found.valid
    assert "+  max_gpus: 2" in found.diff.splitlines()
    assert found.edited == [EditedValue(path="limits.max_gpus", before=None, after=2)]


def test_values_of_environment_variables_are_not_reported() -> None:
    edits = edited_values("env: {KEY: old}\n", "env: {KEY: new}\ntargets: {lora_r: 8}\n")
    assert [(edit.path, edit.before, edit.after) for edit in edits] == [
        ("env.KEY", "(set)", "(set)"),
        ("targets.lora_r", None, 8),
    ]


def test_an_edited_profile_changes_the_plans_of_tasks_that_were_offered_lately(folder: Path) -> None:
    with store(folder) as connection:
        answer(connection, offer(task_id="text"), NOON)
        answer(connection, picture_offer(task_id="pictures"), NOON)
    text = "extends: h100x4\nlimits:\n  gpu_memory: 30GB\n"
    found = check(folder, text, name="h100x4", effects=True)
    tasks = found.effects.tasks
    assert [one.task for one in tasks[:2]] == [
        "image rayonlabs/FLUX.1-dev, 1 h",
        "instruct meta-llama/Llama-3.1-8B, 8.03B, 3 h",
    ]
    assert {one.task.split()[0] for one in tasks} == {"image", "instruct", "dpo", "grpo", "chat"}
    before, after = tasks[1].before, tasks[1].after
    assert after.budget_bytes == 30 * 10**9 < before.budget_bytes
    assert after.memory_bytes < before.memory_bytes
    assert {one.part for one in tasks[1].differences} >= {"memory", "configuration"}
    nothing = check(folder, "extends: h100x4\n", name="h100x4", effects=True)
    assert not any(one.differences for one in nothing.effects.tasks)


def test_an_edited_policy_changes_which_past_offers_are_accepted(folder: Path) -> None:
    with store(folder) as connection:
        for number in range(3):
            answer(connection, offer(task_id=str(number), hours_to_complete=2.0 + number), NOON)
    text = "extends: h100x4\nrules:\n  max_hours: 3\n"
    found = check(folder, text, kind="policies", name="h100x4", effects=True).effects
    assert (found.offers, found.policy) == (3, "h100x4")
    assert [(one.task_id, one.accepted) for one in found.changes] == [("2", False)]


def test_an_edit_of_the_alert_rules_shows_which_rules_change(folder: Path) -> None:
    text = "rules:\n  gpu-memory:\n    when: {above: 95%}\n  gpu-idle:\n    off: true\n"
    found = check(folder, text, kind="alerts", name="alerts", effects=True)
    assert found.valid, found.problems
    assert [(one.rule, one.what) for one in found.effects.rules] == [
        ("gpu-memory", "changed"),
        ("gpu-idle", "off"),
    ]
    values = found.effects.rules[0].values
    assert values == [RuleValueChange(key="when.above.value", before="0.9", after="0.95")]
    wrong = check(folder, "rules:\n  gpu-memory:\n    when: {above: 70}\n", kind="alerts", name="alerts")
    assert (wrong.valid, wrong.problems[0].line) == (False, 3)
