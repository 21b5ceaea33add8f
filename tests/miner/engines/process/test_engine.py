"""What local processes cannot start here."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner.engines.process import engine as module
from miner.engines.process.engine import ProcessEngine
from miner.engines.process.launch import Interpreter
from miner.engines.process.run_registry import RunRegistry
from miner.engines.process.sandbox import Sandbox

PYTHON = Interpreter(Path(sys.executable), ())


def engine(
    tmp_path: Path, interpreter: Interpreter = PYTHON, sandbox: Sandbox | None = None
) -> ProcessEngine:
    more: dict[str, Any] = {"trusted": (), "ulimits": {}, "pids": 100, "redact": str, "limits": None}
    return ProcessEngine(
        RunRegistry(tmp_path), "id", interpreter, code=tmp_path, sandbox=sandbox, why_no_sandbox="", **more
    )


def sandbox(*shown: Path) -> Sandbox:
    return Sandbox(Path("/bwrap"), PYTHON, Path("/hosts"), shown, None, 100)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "app/sd-scripts"
    monkeypatch.setattr(module, "TOOLS", {"image": place})
    return place


async def test_pictures_need_their_own_programs(tmp_path: Path, tools: Path) -> None:
    assert str(tools) in (await engine(tmp_path).missing_images())["image"]
    tools.mkdir(parents=True)
    assert await engine(tmp_path).missing_images() == {}


async def test_programs_outside_of_the_sandbox_are_as_good_as_none(tmp_path: Path, tools: Path) -> None:
    tools.mkdir(parents=True)
    assert "sandbox" in (await engine(tmp_path, sandbox=sandbox()).missing_images())["image"]
    assert await engine(tmp_path, sandbox=sandbox(tools.parent)).missing_images() == {}


async def test_an_interpreter_that_is_gone_starts_nothing(tmp_path: Path, tools: Path) -> None:
    gone = replace(PYTHON, path=tmp_path / "gone")
    assert set(await engine(tmp_path, gone).missing_images()) == {"text", "image"}


async def test_an_upgrade_of_our_own_code_is_another_identity(tmp_path: Path) -> None:
    source = tmp_path / "checkout" / "trainer"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "one.py").touch()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "trainer").symlink_to(source)
    one = engine(tmp_path / "code")
    before = await one.identity("text")
    assert await one.identity("text") == before
    (source / "inner" / "two.py").touch()
    assert await one.identity("text") != before
