"""The walls are only worth something if every package stands behind one."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_under_a_contract_and_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    linter = project["tool"]["importlinter"]
    assert packages == set(linter["root_packages"])
    behind_a_wall = {name for contract in linter["contracts"] for name in contract.get("source_modules", [])}
    assert packages <= behind_a_wall
    assert packages <= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packages - {"trainer"} <= set(project["tool"]["mypy"]["files"])
