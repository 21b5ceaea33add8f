from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import files
from core.config.files import LayeredValues, MissingConfigs, config_dir
from core.config.yaml_lines import ValueOrigin

ROOT = Path(__file__).parents[3]


def test_in_a_checkout_configs_are_beside_the_packages() -> None:
    assert config_dir() == ROOT / "configs"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation without configs."""
    monkeypatch.setattr(files, "__file__", str(tmp_path / "core" / "config" / "files.py"))
    config_dir.cache_clear()
    yield tmp_path
    config_dir.cache_clear()


def test_a_wheel_contains_configs_where_they_are_expected(installed: Path) -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    target = installed / built["force-include"]["configs"]
    (target / "profiles").mkdir(parents=True)
    assert config_dir() == target


@pytest.mark.usefixtures("installed")
def test_an_installation_without_configs_is_reported() -> None:
    with pytest.raises(MissingConfigs, match="install the package again"):
        config_dir()


def test_the_last_value_of_a_path_counts_and_unset_takes_back_all_below_it() -> None:
    values, origin = LayeredValues(), ValueOrigin(file="a.yaml", line=1)
    for path, value in (
        (("a", "b"), 1),
        (("a", "c"), {}),
        (("a", "c", "d"), 2),
        (("a", "b"), 3),
        (("e", "f"), 4),
    ):
        values.set(path, value, origin)
    assert values.nested() == {"a": {"b": 3, "c": {"d": 2}}, "e": {"f": 4}}
    assert values.below("a") == {"b": 3}
    values.unset(("a",))
    assert (values.nested(), values.origins) == ({"e": {"f": 4}}, {("e", "f"): origin})
