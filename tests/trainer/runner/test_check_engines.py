"""What an environment is found to lack."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.domain.choices import Engine
from trainer.runner import check_engines

pytestmark = pytest.mark.process


def test_packages_that_are_not_there_are_named_by_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_engines, "LOADED", ("json",))
    monkeypatch.setattr(check_engines, "NATIVE", ("json",))
    monkeypatch.setattr(check_engines, "AXOLOTL", ("json", "no_such_axolotl"))
    assert check_engines.missing_packages("text") == {Engine.AXOLOTL: "no no_such_axolotl", Engine.NATIVE: ""}
    monkeypatch.setattr(check_engines, "LOADED", ("no_such_torch",))
    assert "no_such_torch" in check_engines.missing_packages("text")[Engine.NATIVE]


@pytest.mark.parametrize("visible", [True, False])
def test_a_promised_gpu_must_be_visible_to_cuda(monkeypatch: pytest.MonkeyPatch, visible: bool) -> None:
    for name in ("LOADED", "NATIVE", "AXOLOTL"):
        monkeypatch.setattr(check_engines, name, ("json",))
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: visible))
    )
    expected = "" if visible else check_engines.NO_GPU
    assert set(check_engines.missing_packages("text", with_gpu=True).values()) == {expected}
    assert set(check_engines.missing_packages("text").values()) == {""}
    assert check_engines.main("text", "gpu") == (0 if visible else 1)


def test_image_engines_need_their_scripts_and_a_python_with_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GOD_MINER_AI_TOOLKIT", str(tmp_path))
    assert check_engines.main("toolkit") == 1
    assert "no " in json.loads(capsys.readouterr().out)["ai-toolkit"]
    (tmp_path / "run.py").touch()
    python = tmp_path / "python"
    for code, expected in ((1, "no torch here"), (0, "")):
        python.write_text(f"#!/bin/sh\necho 'no torch here' >&2; exit {code}\n")
        python.chmod(0o755)
        monkeypatch.setenv("GOD_MINER_ENGINE_PYTHON", str(python))
        assert expected in check_engines.missing_packages("toolkit")[Engine.AI_TOOLKIT]
    assert check_engines.main("toolkit") == 0
    monkeypatch.setenv("GOD_MINER_ENGINE_PYTHON", sys.executable + "-is-not-there")
    assert "is-not-there" in check_engines.missing_packages("toolkit")[Engine.AI_TOOLKIT]
