from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.config.live import LiveConfig
from core.domain.errors import ConfigError
from core.profile.resolve import load_profile
from tests.core.profile.test_resolve_load import write


def edit(folder: Path, stamp: int, **texts: str) -> None:
    """Write and set the time: two edits may fall into one tick of a coarse file system clock."""
    write(folder, **texts)
    for name in texts:
        os.utime(folder / f"{name}.yaml", ns=(stamp, stamp))


def test_an_edit_takes_effect_at_the_next_call(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="targets: {lora_r: 1}")
    live = LiveConfig(load_profile, "mine", [tmp_path])
    first = live.current()
    assert live.current() is first
    edit(tmp_path, 2, mine="targets: {lora_r: 2}")
    assert live.current().layers[-1].content.targets.lora_r == 2


def test_an_edit_of_an_ancestor_counts_too(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="extends: up", up="targets: {lora_r: 1}")
    live = LiveConfig(load_profile, "mine", [tmp_path])
    edit(tmp_path, 2, up="targets: {lora_r: 5}")
    assert live.current().layers[0].content.targets.lora_r == 5


def test_a_bad_edit_keeps_the_last_good_profile_and_says_why(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="targets: {lora_r: 1}")
    live = LiveConfig(load_profile, "mine", [tmp_path])
    edit(tmp_path, 2, mine="targets: {lora_rr: 2}")
    assert live.current().layers[-1].content.targets.lora_r == 1
    assert live.problem is not None
    assert "mine.yaml:1" in str(live.problem)
    edit(tmp_path, 3, mine="targets: {lora_r: 3}")
    assert live.current().layers[-1].content.targets.lora_r == 3
    assert live.problem is None


def test_a_deleted_file_counts_as_a_bad_edit(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="targets: {lora_r: 1}")
    live = LiveConfig(load_profile, "mine", [tmp_path])
    (tmp_path / "mine.yaml").unlink()
    assert live.current().layers[-1].content.targets.lora_r == 1
    assert live.problem is not None


def test_a_profile_that_is_invalid_at_the_start_is_rejected(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="nope: 1")
    with pytest.raises(ConfigError):
        LiveConfig(load_profile, "mine", [tmp_path])


def test_a_deleted_file_is_not_replaced_by_the_shipped_one_of_its_name(tmp_path: Path) -> None:
    edit(tmp_path, 1, h100x4="targets: {lora_r: 1}")
    problems: list[ConfigError] = []
    live = LiveConfig(load_profile, "h100x4", [tmp_path], problems.append)
    (tmp_path / "h100x4.yaml").unlink()
    assert live.current().layers[-1].content.targets.lora_r == 1
    assert live.current().layers[-1].content.targets.lora_r == 1
    assert [str(tmp_path / "h100x4.yaml") in str(problem) for problem in problems] == [True]
    edit(tmp_path, 2, h100x4="targets: {lora_r: 2}")
    assert live.current().layers[-1].content.targets.lora_r == 2
    assert live.problem is None


def test_an_ancestor_may_be_deleted_when_the_file_names_another(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="extends: up", up="targets: {lora_r: 1}", other="targets: {lora_r: 7}")
    live = LiveConfig(load_profile, "mine", [tmp_path])
    (tmp_path / "up.yaml").unlink()
    assert live.current().layers[0].content.targets.lora_r == 1
    assert live.problem is not None
    edit(tmp_path, 2, mine="extends: other")
    assert live.current().layers[0].content.targets.lora_r == 7
    assert live.problem is None
