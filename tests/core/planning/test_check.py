"""`profile check` down to the engine's configuration."""

from __future__ import annotations

from pathlib import Path

from core.planning.check import plan_check
from core.profile import load_profile
from core.profile.explain import Finding, Level, check
from tests.doubles.each import each

SHIPPED = ("base", "cpu-demo", "cpu-native", "h100-fast", "h100x4", "h100x4-strategy", "h100x8", "steady")


def _errors(name: str, *folders: Path) -> list[Finding]:
    found = check(load_profile(name, folders), plan_check)
    return [one for one in found if one.level is Level.ERROR]


@each("name", SHIPPED)
def test_every_shipped_profile_plans_and_renders_for_every_representative_task(name: str) -> None:
    assert _errors(name) == []


def _written(folder: Path, text: str) -> list[Finding]:
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return check(load_profile("mine", [folder]), plan_check)


def test_a_limit_that_leaves_nothing_is_found(tmp_path: Path) -> None:
    found = _written(tmp_path, "extends: steady\nlimits: {gpu_memory: 1GB}\n")
    assert any("CUDA context" in one.message for one in found if one.level is Level.ERROR)


def test_a_key_that_the_engine_does_not_know_is_found(tmp_path: Path) -> None:
    found = _written(tmp_path, "extends: steady\nengine_config: {axolotl: {sequence_length: 5}}\n")
    assert any("sequence_length" in one.message for one in found if one.level is Level.ERROR)


def test_tasks_that_the_profile_can_never_take_are_warned_of(tmp_path: Path) -> None:
    found = _written(tmp_path, "extends: steady\nhardware: 1xRTX-4090\nlimits: {gpu_memory: 3GB}\n")
    assert any("refused on 1xRTX-4090" in one.message for one in found if one.level is Level.WARNING)
