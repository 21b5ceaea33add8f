"""Which backend is chosen, and why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miner.backends import environment, registry
from miner.backends.docker import plugin
from miner.backends.docker.plugin import DockerState
from miner.backends.process.run_registry import RunRegistry
from miner.settings import Settings, load_settings

pytestmark = pytest.mark.process


READY = DockerState(True, True, "")
NO_IMAGE = DockerState(True, False, "Docker lacks the image")
SILENT = DockerState(False, False, "Docker does not run")


def settings(tmp_path: Path, **more: Any) -> Settings:
    chosen_settings = {"docker_host": f"unix://{tmp_path}/none", "trainer_sandbox": "off", **more}
    return load_settings(env={}, env_file=None, data_dir=tmp_path / "data", **chosen_settings)


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> Callable[[DockerState], None]:
    """Set the state of Docker."""

    def set_state(state: DockerState) -> None:
        async def state_of(_: Settings) -> DockerState:
            return state

        monkeypatch.setattr(plugin, "docker_state", state_of)

    return set_state


async def chosen(given: Settings) -> registry.BackendChoice:
    return await registry.choose_backend(given, given.backend[0])


async def backend_name(settings: Settings) -> str | None:
    choice = await chosen(settings)
    return choice.backend.name if choice.backend else None


@pytest.mark.parametrize(
    ("state", "name"), [(READY, "docker"), (NO_IMAGE, "process"), (SILENT, "process")], ids=str
)
async def test_docker_is_chosen_when_it_is_ready_and_local_processes_otherwise(
    state: DockerState, name: str, tmp_path: Path, docker: Callable[[DockerState], None]
) -> None:
    docker(state)
    choice = await chosen(settings(tmp_path, trainer_python=sys.executable))
    assert choice.backend.name == name
    assert state.why in choice.why


@pytest.mark.usefixtures("no_python")
async def test_without_a_python_docker_without_the_image_is_better_than_nothing(
    tmp_path: Path, docker: Callable[[DockerState], None]
) -> None:
    docker(NO_IMAGE)
    choice = await chosen(settings(tmp_path))
    assert (choice.backend.name, choice.why) == ("docker", NO_IMAGE.why)
    docker(SILENT)
    choice = await chosen(settings(tmp_path / "other"))
    assert choice.backend is None
    assert SILENT.why in choice.why
    assert "make training" in choice.why
    assert await backend_name(settings(tmp_path, backend="process")) is None


async def test_silent_docker_with_the_last_jobs_is_kept(
    tmp_path: Path, docker: Callable[[DockerState], None]
) -> None:
    """Its containers may go on: another backend would start their jobs again."""
    chosen_settings = settings(tmp_path, trainer_python=sys.executable)
    for state, name in ((READY, "docker"), (SILENT, "docker"), (NO_IMAGE, "process")):
        docker(state)
        assert await backend_name(chosen_settings) == name


async def test_running_processes_keep_their_backend(
    tmp_path: Path, docker: Callable[[DockerState], None]
) -> None:
    chosen_settings = settings(tmp_path, trainer_python=sys.executable)
    docker(SILENT)
    await chosen(chosen_settings)
    docker(READY)
    registry = RunRegistry(chosen_settings.data_dir / "backends" / "runs")
    registry.write("gm-1-1", tmp_path, {}, ())
    lock = registry.take_lock("gm-1-1")
    assert lock is not None
    assert await backend_name(chosen_settings) == "process"
    os.close(lock)
    assert await backend_name(chosen_settings) == "docker"


async def test_a_named_backend_is_used_whatever_else_there_is(tmp_path: Path) -> None:
    assert await backend_name(settings(tmp_path, backend="docker")) == "docker"
    assert (
        await backend_name(settings(tmp_path, backend="process", trainer_python=sys.executable)) == "process"
    )


async def test_docker_without_a_socket_is_silent(tmp_path: Path) -> None:
    state = await plugin.docker_state(settings(tmp_path))
    assert (state.answers, state.ready) == (False, False)
    assert "does not run" in state.why


def test_choosing_imports_no_training_stack_and_no_other_backend(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from miner.backends.registry import choose_backend
from miner.settings import load_settings
given = load_settings(env={}, env_file=None, data_dir=Path(sys.argv[1]), backend='process',
                      trainer_python=sys.executable, trainer_sandbox='off')
asyncio.run(choose_backend(given, given.backend[0]))
unwanted = {'torch', 'docker', 'requests', 'transformers', 'miner.backends.docker.plugin'}
print(sorted(unwanted & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
