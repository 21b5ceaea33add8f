"""What the doctor says of the GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miner.doctor.checks.training import check_gpus, gpu_findings
from miner.doctor.examine import CheckContext
from miner.fleet.base import InventoryState
from miner.settings import load_settings
from miner.support.findings import FindingStatus
from tests.doubles.nvml import DRIVER_NOT_LOADED, LOST, NvmlHost
from tests.miner.fleet.conftest import nvml_host, nvml_library

pytestmark = pytest.mark.process


__all__ = ["nvml_host", "nvml_library"]

Host = Callable[..., NvmlHost]


def found(folder: Path, gpus: str) -> list[tuple[FindingStatus, str]]:
    settings = load_settings(env={"DATA_DIR": str(folder), "GPUS": gpus}, env_file=None)
    return [(one.status, one.detail) for one in check_gpus(CheckContext(settings))]


def test_gpus_that_answer_are_fine_and_one_that_fails_at_once_is_not_counted(
    nvml_host: Host, tmp_path: Path
) -> None:
    gpus = nvml_host(4)
    assert found(tmp_path, "auto") == [(FindingStatus.OK, "4xH100-SXM (driver 550.127.05)")]
    gpus.gpu(3, error=LOST)
    assert found(tmp_path, "nvml") == [(FindingStatus.OK, "3xH100-SXM (driver 550.127.05)")]


def test_no_gpu_at_all_is_a_failure(nvml_host: Host, tmp_path: Path) -> None:
    nvml_host(0)
    assert found(tmp_path, "nvml")[0][0] is FindingStatus.FAIL
    assert [one.status for one in gpu_findings(InventoryState(), "never read")] == [FindingStatus.FAIL]


def test_a_driver_that_does_not_answer_is_a_failure_with_a_way_out(nvml_host: Host, tmp_path: Path) -> None:
    nvml_host(4).set(init_error=DRIVER_NOT_LOADED)
    ((status, text),) = found(tmp_path, "nvml")
    assert status is FindingStatus.FAIL
    assert "NVML says" in text


def test_a_host_without_a_driver_has_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert found(tmp_path, "auto") == [(FindingStatus.WARN, "a pretended GPU (no NVIDIA driver)")]
