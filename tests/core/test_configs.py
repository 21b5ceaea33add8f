from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from core import configs
from core.configs import MissingConfigs, config_dir

ROOT = Path(__file__).parents[2]


def test_a_checkout_s_configs_lie_beside_the_packages() -> None:
    assert config_dir() == ROOT / "configs"


def test_a_wheel_carries_them_to_where_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    target = tmp_path / built["force-include"]["configs"]
    (target / "profiles").mkdir(parents=True)
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "core" / "configs.py"))
    config_dir.cache_clear()
    try:
        assert config_dir() == target
    finally:
        config_dir.cache_clear()


def test_an_installation_without_them_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "core" / "configs.py"))
    config_dir.cache_clear()
    try:
        with pytest.raises(MissingConfigs, match="install the package again"):
            config_dir()
    finally:
        config_dir.cache_clear()
