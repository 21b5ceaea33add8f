from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.profile.live import LiveProfile
from tests.core.profile.test_load import write


def edit(folder: Path, stamp: int, **texts: str) -> None:
    """Write and set the time: two edits may fall into one tick of a coarse file system clock."""
    write(folder, **texts)
    for name in texts:
        os.utime(folder / f"{name}.yaml", ns=(stamp, stamp))


def test_an_edit_takes_effect_at_the_next_look(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="targets: {lora_r: 1}")
    live = LiveProfile("mine", [tmp_path])
    first = live.current()
    assert live.current() is first
    edit(tmp_path, 2, mine="targets: {lora_r: 2}")
    assert live.current().layers[-1].content.targets.lora_r == 2


def test_an_edit_of_an_ancestor_counts_too(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="extends: up", up="targets: {lora_r: 1}")
    live = LiveProfile("mine", [tmp_path])
    edit(tmp_path, 2, up="targets: {lora_r: 5}")
    assert live.current().layers[0].content.targets.lora_r == 5


def test_a_bad_edit_keeps_the_last_good_profile_and_says_why(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="targets: {lora_r: 1}")
    live = LiveProfile("mine", [tmp_path])
    edit(tmp_path, 2, mine="targets: {lora_rr: 2}")
    assert live.current().layers[-1].content.targets.lora_r == 1
    assert live.problem is not None
    assert "mine.yaml:1" in str(live.problem)
    edit(tmp_path, 3, mine="targets: {lora_r: 3}")
    assert live.current().layers[-1].content.targets.lora_r == 3
    assert live.problem is None


def test_a_file_that_goes_away_is_a_bad_edit(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="targets: {lora_r: 1}")
    live = LiveProfile("mine", [tmp_path])
    (tmp_path / "mine.yaml").unlink()
    assert live.current().layers[-1].content.targets.lora_r == 1
    assert live.problem is not None


def test_a_profile_that_was_never_good_is_refused_at_the_start(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="nope: 1")
    with pytest.raises(ConfigError):
        LiveProfile("mine", [tmp_path])


def test_a_file_that_goes_away_is_not_replaced_by_the_shipped_one_of_its_name(tmp_path: Path) -> None:
    edit(tmp_path, 1, h100x4="targets: {lora_r: 1}")
    told: list[ConfigError] = []
    live = LiveProfile("h100x4", [tmp_path], told.append)
    (tmp_path / "h100x4.yaml").unlink()
    assert live.current().layers[-1].content.targets.lora_r == 1
    assert live.current().layers[-1].content.targets.lora_r == 1
    assert [str(tmp_path / "h100x4.yaml") in str(problem) for problem in told] == [True]
    edit(tmp_path, 2, h100x4="targets: {lora_r: 2}")
    assert live.current().layers[-1].content.targets.lora_r == 2
    assert live.problem is None


def test_an_ancestor_may_go_when_the_file_that_named_it_says_another(tmp_path: Path) -> None:
    edit(tmp_path, 1, mine="extends: up", up="targets: {lora_r: 1}", other="targets: {lora_r: 7}")
    live = LiveProfile("mine", [tmp_path])
    (tmp_path / "up.yaml").unlink()
    assert live.current().layers[0].content.targets.lora_r == 1
    assert live.problem is not None
    edit(tmp_path, 2, mine="extends: other")
    assert live.current().layers[0].content.targets.lora_r == 7
    assert live.problem is None
