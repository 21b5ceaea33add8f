"""Which engine is chosen, and why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miner.backends import registry as choose
from miner.backends.process.run_registry import RunRegistry
from miner.backends.registry import DockerState, NoEngine, build_engine, training_interpreter
from miner.settings import BackendKind, Settings, load_settings

pytestmark = pytest.mark.process


READY = DockerState(True, True, "")
NO_IMAGE = DockerState(True, False, "Docker lacks the image")
SILENT = DockerState(False, False, "Docker does not run")


def settings(tmp_path: Path, **more: Any) -> Settings:
    chosen_settings = {"docker_host": f"unix://{tmp_path}/none", "trainer_sandbox": "off", **more}
    return load_settings(env={}, env_file=None, data_dir=tmp_path / "data", **chosen_settings)


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choose, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> Callable[[DockerState], None]:
    """Set the state of Docker."""

    def set_state(state: DockerState) -> None:
        async def state_of(_: Settings) -> DockerState:
            return state

        monkeypatch.setattr(choose, "docker_state", state_of)

    return set_state


async def chosen(given: Settings) -> choose.EngineChoice:
    return await choose.choose_engine(given, given.backend[0])


async def engine_name(settings: Settings) -> str | None:
    choice = await chosen(settings)
    return choice.engine.name if choice.engine else None


@pytest.mark.parametrize(
    ("state", "name"), [(READY, "docker"), (NO_IMAGE, "process"), (SILENT, "process")], ids=str
)
async def test_docker_is_chosen_when_it_is_ready_and_local_processes_otherwise(
    state: DockerState, name: str, tmp_path: Path, docker: Callable[[DockerState], None]
) -> None:
    docker(state)
    choice = await chosen(settings(tmp_path, trainer_python=sys.executable))
    assert choice.engine is not None
    assert choice.engine.name == name
    assert state.why in choice.why


@pytest.mark.usefixtures("no_python")
async def test_without_a_python_docker_without_the_image_is_better_than_nothing(
    tmp_path: Path, docker: Callable[[DockerState], None]
) -> None:
    docker(NO_IMAGE)
    choice = await chosen(settings(tmp_path))
    assert choice.engine is not None
    assert (choice.engine.name, choice.why) == ("docker", NO_IMAGE.why)
    docker(SILENT)
    choice = await chosen(settings(tmp_path / "other"))
    assert choice.engine is None
    assert SILENT.why in choice.why
    assert "make training" in choice.why
    assert await engine_name(settings(tmp_path, backend="process")) is None


async def test_silent_docker_with_the_last_jobs_is_kept(
    tmp_path: Path, docker: Callable[[DockerState], None]
) -> None:
    """Its containers may go on: another engine would start their jobs again."""
    chosen_settings = settings(tmp_path, trainer_python=sys.executable)
    for state, name in ((READY, "docker"), (SILENT, "docker"), (NO_IMAGE, "process")):
        docker(state)
        assert await engine_name(chosen_settings) == name


async def test_running_processes_keep_their_engine(
    tmp_path: Path, docker: Callable[[DockerState], None]
) -> None:
    chosen_settings = settings(tmp_path, trainer_python=sys.executable)
    docker(SILENT)
    await chosen(chosen_settings)
    docker(READY)
    registry = RunRegistry(chosen_settings.data_dir / "engines" / "runs")
    registry.write("gm-1-1", tmp_path, {}, ())
    lock = registry.take_lock("gm-1-1")
    assert lock is not None
    assert await engine_name(chosen_settings) == "process"
    os.close(lock)
    assert await engine_name(chosen_settings) == "docker"


async def test_a_named_engine_is_used_whatever_else_there_is(tmp_path: Path) -> None:
    assert await engine_name(settings(tmp_path, backend="docker")) == "docker"
    assert (
        await engine_name(settings(tmp_path, backend="process", trainer_python=sys.executable)) == "process"
    )


async def test_docker_without_a_socket_is_silent(tmp_path: Path) -> None:
    state = await choose.docker_state(settings(tmp_path))
    assert (state.answers, state.ready) == (False, False)
    assert "does not run" in state.why


async def test_an_unknown_engine_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NoEngine, match="docker, process, slurm"):
        await build_engine(settings(tmp_path), "kubernetes")


def test_the_training_s_python_is_the_setting_s_or_the_one_that_was_made_or_our_own_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Path(sys.executable)
    monkeypatch.setattr(choose, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: name == "torch")
    assert training_interpreter(settings(tmp_path)).path == ours
    made = tmp_path / ".venv-training" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.symlink_to(sys.executable)
    assert training_interpreter(settings(tmp_path)).path == made
    assert training_interpreter(settings(tmp_path, trainer_python=ours)).path == ours
    with pytest.raises(NoEngine, match="TRAINER_PYTHON"):
        training_interpreter(settings(tmp_path, trainer_python=tmp_path / "none"))


def test_choosing_imports_no_training_stack_and_no_docker(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from miner.backends.registry import choose_engine
from miner.settings import load_settings
given = load_settings(env={}, env_file=None, data_dir=Path(sys.argv[1]), backend='process',
                      trainer_python=sys.executable, trainer_sandbox='off')
asyncio.run(choose_engine(given, given.backend[0]))
print(sorted({'torch', 'docker', 'requests', 'transformers'} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_wrapper_for_docker_is_kept_by_its_content(tmp_path: Path) -> None:
    path = choose._wrapper_on_host(settings(tmp_path))
    assert path.read_bytes() == Path(choose.wrapper.__file__).read_bytes()
    assert path.stat().st_mode & 0o444 == 0o444
    assert choose._wrapper_on_host(settings(tmp_path)) == path


def test_the_training_finds_our_code_and_none_of_our_libraries(tmp_path: Path) -> None:
    folder = choose._code_folder(settings(tmp_path))
    assert {path.name for path in folder.iterdir()} == {"core", "trainer"}
    (folder / "core").unlink()
    (folder / "core").symlink_to(tmp_path)
    assert (choose._code_folder(settings(tmp_path)) / "core" / "domain" / "errors.py").exists()


def test_other_machines_get_a_copy_of_our_code_named_by_its_content(tmp_path: Path) -> None:
    folder = choose.copied_code(tmp_path)
    assert choose.copied_code(tmp_path) == folder
    assert (folder / "trainer" / "text.py").read_bytes() == (
        choose.SOURCE_ROOT / "trainer" / "text.py"
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


def test_every_kind_of_engine_is_in_the_registry() -> None:
    assert set(choose.ENGINES) == set(BackendKind) - {BackendKind.AUTO, BackendKind.NONE}
    assert set(choose.AUTOMATIC) <= set(choose.ENGINES)
