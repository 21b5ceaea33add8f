from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.config.live import LiveConfig
from core.domain.errors import ConfigError
from core.profile.resolve import LoadedProfile, load_profile
from tests.core.profile.test_resolve_load import write


def edit(folder: Path, stamp: int, **texts: str) -> None:
    """Write and set the time: two edits may fall into one tick of a coarse file system clock."""
    write(folder, **texts)
    for name in texts:
        os.utime(folder / f"{name}.yaml", ns=(stamp, stamp))


def rank(live: LiveConfig[LoadedProfile], layer: int = -1) -> int | None:
    return live.refresh().layers[layer].content.targets.lora_r


def test_an_edit_of_a_file_or_its_ancestor_takes_effect_at_the_next_call(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="{extends: up, targets: {lora_r: 1}}", up="targets: {lora_r: 10}")
    live = LiveConfig(load_profile, "mine", [tmp_path])
    assert live.refresh() is live.refresh()
    edit(tmp_path, 2, mine="{extends: up, targets: {lora_r: 2}}")
    assert rank(live) == 2
    edit(tmp_path, 3, up="targets: {lora_r: 20}")
    assert rank(live, 0) == 20


def test_a_bad_edit_keeps_the_last_good_profile_and_says_why(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="targets: {lora_r: 1}")
    live = LiveConfig(load_profile, "mine", [tmp_path])
    edit(tmp_path, 2, mine="targets: {lora_rr: 2}")
    assert rank(live) == 1
    assert "mine.yaml:1" in str(live.problem)
    edit(tmp_path, 3, mine="targets: {lora_r: 3}")
    assert rank(live) == 3
    assert live.problem is None


def test_a_profile_that_is_invalid_at_the_start_is_rejected(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="nope: 1")
    with pytest.raises(ConfigError):
        LiveConfig(load_profile, "mine", [tmp_path])


def test_a_deleted_file_is_a_problem_and_not_replaced_by_the_shipped_one_of_its_name(tmp_path: Path) -> None:
    edit(tmp_path, 1, h100x4="targets: {lora_r: 1}")
    problems: list[ConfigError] = []
    live = LiveConfig(load_profile, "h100x4", [tmp_path], problems.append)
    (tmp_path / "h100x4.yaml").unlink()
    assert [rank(live), rank(live)] == [1, 1]
    assert problems == [live.problem]
    assert str(tmp_path / "h100x4.yaml") in str(live.problem)
    edit(tmp_path, 2, h100x4="targets: {lora_r: 2}")
    assert rank(live) == 2
    assert live.problem is None


def test_an_ancestor_may_be_deleted_when_the_file_names_another(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="extends: up", up="targets: {lora_r: 1}", other="targets: {lora_r: 7}")
    live = LiveConfig(load_profile, "mine", [tmp_path])
    (tmp_path / "up.yaml").unlink()
    assert rank(live, 0) == 1
    assert live.problem is not None
    edit(tmp_path, 2, mine="extends: other")
    assert rank(live, 0) == 7
    assert live.problem is None


def test_a_named_pipe_in_the_place_of_a_file_is_a_file_that_is_gone(tmp_path: Path) -> None:
    edit(tmp_path, 1, h100x4="targets: {lora_r: 1}")
    live = LiveConfig(load_profile, "h100x4", [tmp_path])
    (tmp_path / "h100x4.yaml").unlink()
    os.mkfifo(tmp_path / "h100x4.yaml")
    assert rank(live) == 1
    assert "is gone" in str(live.problem)
