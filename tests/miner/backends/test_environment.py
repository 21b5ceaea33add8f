"""The Python that trains, what it needs, and our code for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miner.backends import environment
from miner.backends.environment import (
    NoTrainingPython,
    code_folder,
    copied_code,
    examine_interpreter,
    training_interpreter,
)
from miner.backends.registry import NoBackend
from miner.settings import Settings, load_settings

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


def settings(tmp_path: Path, **more: Any) -> Settings:
    return load_settings(env={}, env_file=None, data_dir=tmp_path / "data", **more)


def test_the_training_s_python_is_the_setting_s_or_the_one_that_was_made_or_our_own_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Path(sys.executable)
    monkeypatch.setattr(environment, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: name == "torch")
    assert training_interpreter(settings(tmp_path)).path == ours
    made = tmp_path / ".venv-training" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.symlink_to(sys.executable)
    assert training_interpreter(settings(tmp_path)).path == made
    assert training_interpreter(settings(tmp_path, trainer_python=ours)).path == ours
    with pytest.raises(NoBackend, match="TRAINER_PYTHON"):
        training_interpreter(settings(tmp_path, trainer_python=tmp_path / "none"))


def test_the_training_finds_our_code_and_none_of_our_libraries(tmp_path: Path) -> None:
    folder = code_folder(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"core", "trainer"}
    (folder / "core").unlink()
    (folder / "core").symlink_to(tmp_path)
    assert (code_folder(tmp_path) / "core" / "domain" / "errors.py").exists()


def test_other_machines_get_a_copy_of_our_code_named_by_its_content(tmp_path: Path) -> None:
    folder = copied_code(tmp_path)
    assert copied_code(tmp_path) == folder
    assert (folder / "trainer" / "text.py").read_bytes() == (
        environment.SOURCE_ROOT / "trainer" / "text.py"
    ).read_bytes()
    found = "from core.config.files import config_dir; print(config_dir())"
    done = subprocess.run(
        [sys.executable, "-c", found],
        env={"PYTHONPATH": str(folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(folder / "configs")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
