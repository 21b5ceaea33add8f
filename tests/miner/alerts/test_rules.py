"""Rules are the shipped ones with the operator's changes; every mistake has its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.domain.errors import ConfigError
from miner.alerts.rules import LiveAlertRules, load_alert_rules
from miner.api.alerts import Severity
from miner.observe.alerts import AlertKind
from tests.doubles.each import each


def written(folder: Path, text: str) -> Path:
    file = folder / "alerts.yaml"
    file.write_text(text)
    return file


def test_the_shipped_rules_have_the_limits_of_the_strategy() -> None:
    rules = load_alert_rules().rules
    limits = {}
    for name, rule in rules.items():
        limit = rule.when.above or rule.when.below
        limits[name] = limit.value
    assert (
        limits
        | {
            "job-failures": 0.05,
            "gpu-idle": 0.5,
            "rank-drop": 10,
            "long-training": 8 * 3600,
            "gpu-memory": 0.9,
            "gpu-hot": 85,
            "slow-training": 0.8,
        }
        == limits
    )
    acts = {name: (rule.act.batch, rule.act.duty) for name, rule in rules.items() if rule.act}
    assert acts == {"gpu-memory": (-0.1, None), "gpu-hot": (None, -0.03), "slow-training": (0.2, None)}


def test_an_operators_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "rules:\n  gpu-memory: {when: {above: 95%}}\n  gpu-idle: {off: true}\n"
        "  my-power: {when: {metric: gpu.power, above: 650, over: 2m}, severity: info}\n"
        "kinds:\n  gpu_out: {notify: false}\n",
    )
    shipped, rules = load_alert_rules(), load_alert_rules(file)
    memory = rules.rules["gpu-memory"]
    assert (memory.when.above.value, memory.when.clear) == (0.95, shipped.rules["gpu-memory"].when.clear)
    assert rules.rules.keys() == shipped.rules.keys() - {"gpu-idle"} | {"my-power"}
    assert not rules.notifies("gpu_out")
    assert rules.severity_of_kind("gpu_out") is Severity.CRITICAL
    assert rules.origin("rules", "gpu-memory", "when", "above") == "alerts.yaml:2"


@each(
    "rules, line, problem",
    [
        ("gpu-hot:\n    wen: {above: 3}", 3, "no such key; nearest is when"),
        ("a:\n    when: {metric: gpu.mem, above: 3}", 3, "gpu.mem: no such metric; nearest is gpu.memory"),
        ("gpu-memory:\n    when: {above: 90}", 3, "is a share: write it like 90%"),
        ("long-training:\n    when: {above: 8}", 3, "write it like 8h"),
        ("gpu-hot:\n    when: {clear: 99}", 3, "must be at most above, or the alert would never be resolved"),
        ("gpu-hot:\n    when: {over: 2h}", 3, "values are kept for 1 h"),
        ("disk-low:\n    act: {batch: -10%}", 3, "only rules about a GPU or a job can act"),
        ("gpu-memory:\n    act: {batch: 10}", 3, "a change is written with its sign"),
        ("{}\nkinds:\n  gpu_ot: {}", 4, "no alert of the program is called 'gpu_ot'; nearest is gpu_out"),
    ],
)
def test_a_mistake_is_answered_with_its_line_and_the_way_out(
    tmp_path: Path, rules: str, line: int, problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_alert_rules(written(tmp_path, f"rules:\n  {rules}\n"))
    assert f"alerts.yaml:{line}: " in str(error.value)
    assert problem in str(error.value)


def test_a_named_pipe_in_the_place_of_the_rules_is_a_problem_and_not_waited_for(tmp_path: Path) -> None:
    alerts: list[str] = []
    file = tmp_path / "alerts.yaml"
    live = LiveAlertRules(file, tmp_path / "kept.json", lambda _kind, text: alerts.append(text))
    os.mkfifo(file)
    live.refresh()
    assert "gpu-hot" in live.current().rules
    assert "not a regular file" in alerts[0]
    LiveAlertRules(file, tmp_path / "kept.json", lambda _kind, text: alerts.append(text))
    assert "not a regular file" in alerts[-1]


def test_a_bad_edit_keeps_the_last_good_rules_also_over_a_restart(tmp_path: Path) -> None:
    alerts: list[tuple[AlertKind, str]] = []
    file, kept = tmp_path / "alerts.yaml", tmp_path / "last-good" / "alerts.json"

    def start() -> LiveAlertRules:
        return LiveAlertRules(file, kept, lambda kind, text: alerts.append((kind, text)))

    live = start()
    assert "gpu-hot" in live.current().rules  # there is no file yet
    file.write_text("rules: {gpu-hot: {off: true}}")
    live.refresh()
    assert "gpu-hot" not in live.current().rules
    file.write_text("rules: {gpu-hot: {of: true}}  # a slip")
    live.refresh()
    assert "gpu-hot" not in live.current().rules
    assert "nearest is off" in (live.problem or "")
    assert [kind for kind, _ in alerts] == [AlertKind.ALERTS_PROBLEM]
    again = start()
    assert "gpu-hot" not in again.current().rules
    assert "what was last good of it" in alerts[-1][1]
    file.write_text("rules: {gpu-hot: {off: false}}  # mended")
    again.refresh()
    assert "gpu-hot" in again.current().rules
    assert again.problem is None
