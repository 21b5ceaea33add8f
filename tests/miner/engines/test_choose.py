"""Which engine is taken, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from miner.engines import choose
from miner.engines.choose import Choice, DockerState, NoEngine, build, training_interpreter
from miner.engines.process.book import Book
from miner.settings import Settings, load_settings

READY = DockerState(True, True, "")
NO_IMAGE = DockerState(True, False, "Docker lacks the image")
SILENT = DockerState(False, False, "Docker does not run")


def settings(tmp_path: Path, **more: Any) -> Settings:
    given = {"docker_host": f"unix://{tmp_path}/none", "trainer_sandbox": "off", **more}
    return load_settings(env={}, env_file=None, data_dir=tmp_path / "data", **given)


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choose, "SOURCE", tmp_path)
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)


def docker_is(state: DockerState, monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(_: Settings) -> DockerState:
        return state

    monkeypatch.setattr(choose, "docker_state", told)


def named(choice: Choice) -> str | None:
    return choice.engine.name if choice.engine else None


async def test_docker_is_taken_where_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker_is(READY, monkeypatch)
    assert named(await choose.choose(settings(tmp_path, trainer_python=sys.executable))) == "docker"


@pytest.mark.parametrize("state", [NO_IMAGE, SILENT])
async def test_local_processes_are_taken_else(
    state: DockerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_is(state, monkeypatch)
    choice = await choose.choose(settings(tmp_path, trainer_python=sys.executable))
    assert named(choice) == "process"
    assert state.why in choice.why


@pytest.mark.usefixtures("no_python")
async def test_docker_without_the_image_is_better_than_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_is(NO_IMAGE, monkeypatch)
    choice = await choose.choose(settings(tmp_path))
    assert (named(choice), choice.why) == ("docker", NO_IMAGE.why)


@pytest.mark.usefixtures("no_python")
async def test_with_nothing_at_all_both_reasons_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_is(SILENT, monkeypatch)
    choice = await choose.choose(settings(tmp_path))
    assert choice.engine is None
    assert SILENT.why in choice.why
    assert "make training" in choice.why
    assert (await choose.choose(settings(tmp_path, engine="process"))).engine is None


async def test_docker_that_ran_the_last_jobs_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its containers may go on: another engine would start their jobs anew."""
    given = settings(tmp_path, trainer_python=sys.executable)
    docker_is(READY, monkeypatch)
    await choose.choose(given)
    docker_is(SILENT, monkeypatch)
    assert named(await choose.choose(given)) == "docker"
    docker_is(NO_IMAGE, monkeypatch)
    assert named(await choose.choose(given)) == "process"


async def test_processes_that_still_run_are_seen_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    given = settings(tmp_path, trainer_python=sys.executable)
    docker_is(SILENT, monkeypatch)
    await choose.choose(given)
    docker_is(READY, monkeypatch)
    book = Book(given.data_dir / "engines" / "runs")
    book.write("gm-1-1", tmp_path, {}, ())
    lock = book.locked("gm-1-1")
    assert lock is not None
    assert named(await choose.choose(given)) == "process"
    os.close(lock)
    assert named(await choose.choose(given)) == "docker"


async def test_what_is_asked_for_is_taken_whatever_there_is(tmp_path: Path) -> None:
    assert named(await choose.choose(settings(tmp_path, engine="docker"))) == "docker"
    given = settings(tmp_path, engine="process", trainer_python=sys.executable)
    assert named(await choose.choose(given)) == "process"


async def test_docker_without_a_socket_is_silent(tmp_path: Path) -> None:
    state = await choose.docker_state(settings(tmp_path))
    assert (state.answers, state.ready) == (False, False)
    assert "does not run" in state.why


async def test_one_that_is_not_there_can_not_be_built(tmp_path: Path) -> None:
    with pytest.raises(NoEngine, match="docker, process"):
        await build(settings(tmp_path), "slurm")


def test_the_training_s_python_is_the_setting_s(tmp_path: Path) -> None:
    found = training_interpreter(settings(tmp_path, trainer_python=sys.executable))
    assert found.path == Path(sys.executable)
    with pytest.raises(NoEngine, match="TRAINER_PYTHON"):
        training_interpreter(settings(tmp_path, trainer_python=tmp_path / "none"))


def test_or_the_one_that_was_made_or_our_own_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "SOURCE", tmp_path)
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
from miner.engines.choose import choose
from miner.settings import load_settings
given = load_settings(env={}, env_file=None, data_dir=Path(sys.argv[1]), engine='process',
                      trainer_python=sys.executable, trainer_sandbox='off')
asyncio.run(choose(given))
print(sorted({'torch', 'docker', 'requests', 'transformers'} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_wrapper_for_docker_is_kept_by_its_content(tmp_path: Path) -> None:
    given = settings(tmp_path)
    path = choose._wrapper_on_host(given)
    assert path.read_bytes() == Path(choose.wrapper.__file__).read_bytes()
    assert path.stat().st_mode & 0o444 == 0o444
    assert choose._wrapper_on_host(given) == path


def test_the_training_finds_our_code_and_none_of_our_libraries(tmp_path: Path) -> None:
    given = settings(tmp_path)
    folder = choose._code(given)
    assert {path.name for path in folder.iterdir()} == {"core", "trainer"}
    (folder / "core").unlink()
    (folder / "core").symlink_to(tmp_path)
    assert (choose._code(given) / "core" / "errors.py").exists()
