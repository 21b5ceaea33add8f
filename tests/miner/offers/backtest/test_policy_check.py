from __future__ import annotations

from pathlib import Path

import pytest

from core.domain.hardware import Hardware, parse_gpus
from miner.offers.backtest.policy_check import acceptance_counts, policy_findings
from miner.offers.policies.load import load_policy
from tests.doubles.each import each
from tests.miner.offers.builders import profile, written_policy


@each(
    ("text", "level", "where", "message"),
    [
        ("score: {threshold: 1, weights: {task: 0, family: 0.6}}", "error", "score.threshold", "to 1"),
        ("score: {weights: {task: 2}}", "warning", "score.weights", "add up to 2.65"),
        (
            "rules: {tasks: [dpo, chat]}\nscore: {threshold: 0.5, task: {dpo: 1}}",
            "warning",
            "score.task",
            "chat is not listed",
        ),
        ("rules: {tasks: [dpo], hours: {chat: 3}}", "warning", "rules.hours.chat", "is not in rules.tasks"),
        ("rules: {min_hours: 5, hours: {dpo: 3}}", "error", "rules.hours.dpo", "below rules.min_hours"),
        ("rules: {blackout: ['00:00-24:00']}", "error", "rules.blackout", "the whole week"),
        ('score: {size: {"<9B": 0.1, 7B-13B: 0.5}}', "warning", "score.size.7B-13B", "begins within <9B"),
    ],
)
def test_what_can_never_happen_is_reported(
    tmp_path: Path, text: str, level: str, where: str, message: str
) -> None:
    (finding,) = policy_findings(written_policy(tmp_path, text))
    assert (finding.level.value, finding.where) == (level, where)
    assert message in finding.message


@pytest.mark.parametrize(
    "text", ["", "rules: {blackout: ['22:00-06:00']}", 'score: {size: {"<9B": 0.1, ">=9B": 0.5}}']
)
def test_a_sound_policy_has_no_findings(tmp_path: Path, text: str) -> None:
    assert policy_findings(written_policy(tmp_path, f"description: x\n{text}")) == []


def test_representative_offers_of_each_type_are_counted() -> None:
    hardware = Hardware(gpus=parse_gpus("8xH100"))
    counts = {
        count.task: count for count in acceptance_counts(load_policy("h100x8"), profile("h100x8"), hardware)
    }
    assert (counts["dpo"].accepted, counts["dpo"].mostly) == (0, "task")
    assert 0 < counts["instruct"].accepted < counts["instruct"].asked
    assert counts["image"] == ("image", 2, 2, "")


def test_representative_offers_come_at_a_quiet_hour(tmp_path: Path) -> None:
    closed = written_policy(
        tmp_path, "extends: everything-feasible\nrules: {blackout: ['Mon-Sat 00:00-24:00']}"
    )
    hardware = Hardware(gpus=parse_gpus("4xH100"))
    assert all(count.accepted for count in acceptance_counts(closed, profile(), hardware))
