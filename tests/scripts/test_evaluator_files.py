"""Files that an image's build fetches: checked by their digests, and left out where they do not come."""

from __future__ import annotations

import hashlib
import http.client
import io
import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest

from core.models.image_families import IMAGE_FAMILIES

SCRIPT = Path(__file__).parents[2] / "requirements" / "evaluator_files.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """With a directory as the hub."""
    hub = tmp_path / "hub"
    monkeypatch.setenv("HUB", hub.as_uri())
    loaded = runpy.run_path(str(SCRIPT))
    loaded["FILES"].clear()
    for name in ("good", "forged"):
        (hub / "o").mkdir(parents=True, exist_ok=True)
        (hub / "o" / name).write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    loaded["FILES"].update(
        {"good": ("o/good", digest), "forged": ("o/forged", digest[::-1]), "absent": ("o/absent", digest)}
    )
    return loaded


def test_only_what_has_its_digest_stays(
    tmp_path: Path, script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    script["main"](tmp_path / "weights", ["good", "forged", "absent"])
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["good"]
    said = capsys.readouterr().out
    assert "forged: left out: its digest is" in said
    assert "absent: left out" in said


def test_what_does_not_come_in_time_is_left_out(
    tmp_path: Path, script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    script["main"].__globals__["BUDGET_S"] = -1.0
    script["main"](tmp_path / "weights", ["good"])
    assert list((tmp_path / "weights").iterdir()) == []
    assert "not here after" in capsys.readouterr().out


class Trickle(io.BytesIO):
    """A server that sends a byte at a time, and never as much as is asked for."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise AssertionError("waits until all of it has come")

    def read1(self, size: int | None = -1, /) -> bytes:
        return super().read(1) or b"1"


def test_a_server_that_trickles_cannot_stretch_the_build(
    tmp_path: Path,
    script: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: 100.0 * next(ticks))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Trickle())
    script["main"](tmp_path / "weights", ["good"])
    assert "not here after" in capsys.readouterr().out


def test_an_answer_that_breaks_off_costs_the_file_and_not_the_build(
    tmp_path: Path,
    script: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise http.client.IncompleteRead(b"weig")

    monkeypatch.setattr("urllib.request.urlopen", broken)
    script["main"](tmp_path / "weights", ["good"])
    assert "good: left out" in capsys.readouterr().out


def test_they_are_the_evaluators_own_files() -> None:
    known = {
        (file.repository, file.path)
        for record in IMAGE_FAMILIES.values()
        if (flow := record.flow) is not None
        for file in (*flow.encoders, flow.vae, *([flow.base] if flow.base else []))
    }
    for path, _ in runpy.run_path(str(SCRIPT))["FILES"].values():
        repository, _, name = path.partition("/resolve/main/")
        assert (repository, name) in known
