from __future__ import annotations

from pathlib import Path

import pytest

from core.hardware import Hardware, parse_gpus
from core.profile.explain import Level
from miner.offers.policies.check import findings, tallies
from miner.offers.policies.load import load_policy
from tests.miner.offers.builders import profile, written_policy


@pytest.mark.parametrize(
    ("text", "level", "where", "said"),
    [
        ("score: {threshold: 1, weights: {task: 0, family: 0.6}}", Level.ERROR, "score.threshold", "to 1"),
        ("score: {weights: {task: 2}}", Level.WARNING, "score.weights", "add up to 2.65"),
        (
            "rules: {tasks: [dpo, chat]}\nscore: {threshold: 0.5, task: {dpo: 1}}",
            Level.WARNING,
            "score.task",
            "chat is not listed",
        ),
        (
            "rules: {tasks: [dpo], hours: {chat: 3}}",
            Level.WARNING,
            "rules.hours.chat",
            "chat is not in rules.tasks",
        ),
        ("rules: {min_hours: 5, hours: {dpo: 3}}", Level.ERROR, "rules.hours.dpo", "below rules.min_hours"),
        ("rules: {blackout: ['00:00-24:00']}", Level.ERROR, "rules.blackout", "the whole week"),
        (
            "rules: {blackout: ['Mon-Fri 00:00-24:00', 'Sat,Sun 00:00-24:00']}",
            Level.ERROR,
            "rules.blackout",
            "",
        ),
        (
            'score: {size: {"<9B": 0.1, 7B-13B: 0.5}}',
            Level.WARNING,
            "score.size.7B-13B",
            "begins within <9B",
        ),
    ],
)
def test_what_can_never_happen_is_told(
    tmp_path: Path, text: str, level: Level, where: str, said: str
) -> None:
    found = findings(written_policy(tmp_path, text))
    assert [(one.level, one.where) for one in found] == [(level, where)]
    assert said in found[0].message


@pytest.mark.parametrize(
    "text", ["", "rules: {blackout: ['22:00-06:00']}", 'score: {size: {"<9B": 0.1, ">=9B": 0.5}}']
)
def test_a_sound_policy_is_fine(tmp_path: Path, text: str) -> None:
    assert findings(written_policy(tmp_path, f"description: x\n{text}")) == []


def test_representative_offers_of_each_type_are_counted() -> None:
    hardware = Hardware(gpus=parse_gpus("8xH100"))
    found = {one.task: one for one in tallies(load_policy("h100x8"), profile("h100x8"), hardware)}
    assert (found["dpo"].accepted, found["dpo"].mostly) == (0, "task")
    assert 0 < found["instruct"].accepted < found["instruct"].asked
    assert found["image"] == ("image", 2, 2, "")


def test_they_are_asked_in_a_quiet_hour(tmp_path: Path) -> None:
    closed = written_policy(
        tmp_path, "extends: everything-feasible\nrules: {blackout: ['Mon-Sat 00:00-24:00']}"
    )
    hardware = Hardware(gpus=parse_gpus("4xH100"))
    assert all(one.accepted for one in tallies(closed, profile(), hardware))
