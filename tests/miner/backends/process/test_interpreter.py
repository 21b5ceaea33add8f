"""The directories that an interpreter needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miner.backends.process.interpreter import NoTrainingPython, examine_interpreter

pytestmark = pytest.mark.process


def covered(path: Path, needs: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(root) for root in (*needs, Path("/usr")))


def test_an_environment_needs_itself_and_the_installation_behind_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    found = examine_interpreter(python)
    assert found.path == python
    assert covered(tmp_path / "env", found.needs)
    assert covered(python.resolve(), found.needs)
    assert covered(Path(subprocess.__file__), found.needs)


def test_links_on_the_way_are_needed_too(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "real"], check=True)
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    outer = tmp_path / "tools" / "bin"
    outer.mkdir(parents=True)
    (outer / "python").symlink_to(tmp_path / "alias" / "bin" / "python")
    found = examine_interpreter(outer / "python")
    assert covered(tmp_path / "alias", found.needs)


def test_none_lies_below_another() -> None:
    needs = examine_interpreter(Path(sys.executable)).needs
    assert not any(one in other.parents for one in needs for other in needs)


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 3\n", "#!/bin/sh\necho no json\n", None])
def test_an_interpreter_that_fails_is_reported(text: str | None, tmp_path: Path) -> None:
    python = tmp_path / "python"
    if text is not None:
        python.write_text(text)
        python.chmod(0o755)
    with pytest.raises(NoTrainingPython, match="TRAINER_PYTHON="):
        examine_interpreter(python)
