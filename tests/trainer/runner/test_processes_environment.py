"""What a child of the runner is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.runner import processes

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.2.0\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder)\nGCC version: 12\n"
)


@pytest.mark.parametrize(
    ("driver", "brought", "used"),
    [
        (CLOSED.format("535.183.01"), "580.65.06", True),
        (OPEN.format("570.86.15"), "580.65.06", True),
        (OPEN.format("580.65.06"), "580.65.06", False),
        (OPEN.format("580.126.09"), "580.65.06", False),
        (CLOSED.format("590.44.01"), "580.65.06", False),
        (CLOSED.format("535.183.01"), None, False),
        (None, "580.65.06", False),
    ],
)
def test_an_older_driver_is_helped_by_what_the_image_brings(
    driver: str | None, brought: str | None, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compat, version = tmp_path / "compat", tmp_path / "version"
    compat.mkdir()
    if brought:
        (compat / f"libcuda.so.{brought}").touch()
        (compat / "libcuda.so.1").symlink_to(f"libcuda.so.{brought}")
    if driver:
        version.write_text(driver)
    monkeypatch.setattr(processes, "COMPAT", compat)
    monkeypatch.setattr(processes, "DRIVER", version)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    wanted = f"{compat}:/usr/local/nvidia/lib64" if used else "/usr/local/nvidia/lib64"
    for environment_of in (processes.child_environment, processes.engine_environment):
        assert environment_of(tmp_path / "work", {})["LD_LIBRARY_PATH"] == wanted
