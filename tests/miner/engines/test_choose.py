"""Which engine is chosen, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from miner.engines import choose
from miner.engines.choose import DockerState, EngineChoice, NoEngine, build_engine, training_interpreter
from miner.engines.process.run_registry import RunRegistry
from miner.settings import EngineKind, Settings, load_settings

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


def set_docker(state: DockerState, monkeypatch: pytest.MonkeyPatch) -> None:
    async def state_of(_: Settings) -> DockerState:
        return state

    monkeypatch.setattr(choose, "docker_state", state_of)


def engine_name(choice: EngineChoice) -> str | None:
    return choice.engine.name if choice.engine else None


async def test_ready_docker_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_docker(READY, monkeypatch)
    assert (
        engine_name(await choose.choose_engine(settings(tmp_path, trainer_python=sys.executable))) == "docker"
    )


@pytest.mark.parametrize("state", [NO_IMAGE, SILENT])
async def test_local_processes_are_the_fallback(
    state: DockerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_docker(state, monkeypatch)
    choice = await choose.choose_engine(settings(tmp_path, trainer_python=sys.executable))
    assert engine_name(choice) == "process"
    assert state.why in choice.why


@pytest.mark.usefixtures("no_python")
async def test_docker_without_the_image_is_better_than_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_docker(NO_IMAGE, monkeypatch)
    choice = await choose.choose_engine(settings(tmp_path))
    assert (engine_name(choice), choice.why) == ("docker", NO_IMAGE.why)


@pytest.mark.usefixtures("no_python")
async def test_without_any_engine_both_reasons_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_docker(SILENT, monkeypatch)
    choice = await choose.choose_engine(settings(tmp_path))
    assert choice.engine is None
    assert SILENT.why in choice.why
    assert "make training" in choice.why
    assert (await choose.choose_engine(settings(tmp_path, engine="process"))).engine is None


async def test_silent_docker_with_the_last_jobs_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its containers may go on: another engine would start their jobs again."""
    chosen_settings = settings(tmp_path, trainer_python=sys.executable)
    set_docker(READY, monkeypatch)
    await choose.choose_engine(chosen_settings)
    set_docker(SILENT, monkeypatch)
    assert engine_name(await choose.choose_engine(chosen_settings)) == "docker"
    set_docker(NO_IMAGE, monkeypatch)
    assert engine_name(await choose.choose_engine(chosen_settings)) == "process"


async def test_running_processes_keep_their_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    chosen_settings = settings(tmp_path, trainer_python=sys.executable)
    set_docker(SILENT, monkeypatch)
    await choose.choose_engine(chosen_settings)
    set_docker(READY, monkeypatch)
    registry = RunRegistry(chosen_settings.data_dir / "engines" / "runs")
    registry.write("gm-1-1", tmp_path, {}, ())
    lock = registry.take_lock("gm-1-1")
    assert lock is not None
    assert engine_name(await choose.choose_engine(chosen_settings)) == "process"
    os.close(lock)
    assert engine_name(await choose.choose_engine(chosen_settings)) == "docker"


async def test_a_named_engine_is_used_whatever_else_there_is(tmp_path: Path) -> None:
    assert engine_name(await choose.choose_engine(settings(tmp_path, engine="docker"))) == "docker"
    chosen_settings = settings(tmp_path, engine="process", trainer_python=sys.executable)
    assert engine_name(await choose.choose_engine(chosen_settings)) == "process"


async def test_docker_without_a_socket_is_silent(tmp_path: Path) -> None:
    state = await choose.docker_state(settings(tmp_path))
    assert (state.answers, state.ready) == (False, False)
    assert "does not run" in state.why


async def test_an_unknown_engine_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NoEngine, match="docker, process"):
        await build_engine(settings(tmp_path), "slurm")


def test_the_training_s_python_is_the_setting_s(tmp_path: Path) -> None:
    found = training_interpreter(settings(tmp_path, trainer_python=sys.executable))
    assert found.path == Path(sys.executable)
    with pytest.raises(NoEngine, match="TRAINER_PYTHON"):
        training_interpreter(settings(tmp_path, trainer_python=tmp_path / "none"))


def test_or_the_one_that_was_made_or_our_own_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: name == "torch")
    assert training_interpreter(settings(tmp_path)).path == Path(sys.executable)
    made = tmp_path / ".venv-training" / "bin"
    made.mkdir(parents=True)
    (made / "python").symlink_to(sys.executable)
    assert training_interpreter(settings(tmp_path)).path == made / "python"


def test_choosing_imports_no_training_stack_and_no_docker(tmp_path: Path) -> None:
    import subprocess

    code = """
import asyncio, sys
from pathlib import Path
from miner.engines.choose import choose_engine
from miner.settings import load_settings
given = load_settings(env={}, env_file=None, data_dir=Path(sys.argv[1]), engine='process',
                      trainer_python=sys.executable, trainer_sandbox='off')
asyncio.run(choose_engine(given))
print(sorted({'torch', 'docker', 'requests', 'transformers'} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_wrapper_for_docker_is_kept_by_its_content(tmp_path: Path) -> None:
    chosen_settings = settings(tmp_path)
    path = choose._wrapper_on_host(chosen_settings)
    assert path.read_bytes() == Path(choose.wrapper.__file__).read_bytes()
    assert path.stat().st_mode & 0o444 == 0o444
    assert choose._wrapper_on_host(chosen_settings) == path


def test_the_training_finds_our_code_and_none_of_our_libraries(tmp_path: Path) -> None:
    chosen_settings = settings(tmp_path)
    folder = choose._code_folder(chosen_settings)
    assert {path.name for path in folder.iterdir()} == {"core", "trainer"}
    (folder / "core").unlink()
    (folder / "core").symlink_to(tmp_path)
    assert (choose._code_folder(chosen_settings) / "core" / "domain" / "errors.py").exists()


def test_every_kind_of_engine_is_in_the_registry() -> None:
    assert set(choose.ENGINES) == set(EngineKind) - {EngineKind.AUTO, EngineKind.NONE}
    assert set(choose.AUTOMATIC) <= set(choose.ENGINES)
