from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doubles.nvml import NvmlHost, compiled


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml_host(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., NvmlHost]:
    """Make this a host with so many GPUs, for every process that is started from here."""

    def start_host(count: int = 4) -> NvmlHost:
        host = NvmlHost(nvml_library, tmp_path / "nvml.json", count)
        for name, value in host.environment.items():
            monkeypatch.setenv(name, value)
        return host

    return start_host
