"""FLEET_FILE: read, validated, reloaded, and applied to scans."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

import pytest

from core.domain.errors import ConfigError
from core.domain.hardware import GpuLink, parse_gpus
from miner.backends.build_fleet import build_inventory
from miner.fleet.fleet import Fleet
from miner.fleet.fleet_file import (
    FLEET_FILE_KIND,
    FleetFileSource,
    FleetTerms,
    HostTerms,
    follow_fleet_file,
    gpu_prices,
)
from miner.fleet.nvml import NvmlSource
from miner.fleet.sources import FixedGpuSource, GpuScan
from miner.observe.alerts import AlertKind
from miner.settings import load_settings
from tests.doubles.each import each

DOCS = Path(__file__).parents[3] / "docs" / "fleet.md"


EDITS = count(1)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    # Two edits within one tick of the file system's clock would look like one.
    later = path.stat().st_mtime_ns + next(EDITS) * 10_000_000
    os.utime(path, ns=(later, later))
    return path


async def seen(path: Path, gpus: str = "4xH100") -> GpuScan:
    return await FleetFileSource(follow_fleet_file(path), FixedGpuSource(parse_gpus(gpus), "GPUS")).scan()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fleet.yaml"


async def test_an_empty_file_changes_nothing(file: Path) -> None:
    assert await seen(write(file, "")) == await FixedGpuSource(parse_gpus("4xH100"), "GPUS").scan()


async def test_gpus_that_cannot_be_scanned_are_named_in_the_file(file: Path) -> None:
    scan = await seen(write(file, "gpus: 2xA100\nids: [GPU-a, GPU-b]"))
    assert [gpu.id for gpu in scan.gpus] == ["GPU-a", "GPU-b"]
    assert scan.gpus[0].kind.name == "A100-SXM-80GB"
    assert scan.gpus[0].linked == {"GPU-b"}
    assert scan.source == "FLEET_FILE, 2xA100"


async def test_gpus_are_excluded_by_index_or_id_with_a_reason(file: Path) -> None:
    scan = await seen(write(file, "gpus: 3xH100\nids: [a, b, c]\nexclude: {1: the fan, c: rented out}"))
    assert [gpu.excluded for gpu in scan.gpus] == [None, "the fan", "rented out"]


@pytest.mark.parametrize(
    ("links", "linked", "kind"),
    [
        ("none", [[], [], [], []], GpuLink.PCIE),
        ("all", [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]], GpuLink.NVLINK),
        ("[[0, 3], [1, 2]]", [[3], [2], [1], [0]], GpuLink.NVLINK_PAIR),
        ("[[0, 1, 2, 9]]", [[1, 2], [0, 2], [0, 1], []], GpuLink.NVLINK),
    ],
)
async def test_links_are_as_the_operator_knows_them(
    file: Path, links: str, linked: list[list[int]], kind: GpuLink
) -> None:
    scan = await seen(write(file, f"links: {links}"))
    assert [sorted(map(int, gpu.linked)) for gpu in scan.gpus] == linked
    assert scan.gpus[0].kind.link is kind


def test_host_terms_are_fields_of_hardware() -> None:
    terms = FLEET_FILE_KIND.parse(
        "host: {cpu_cores: 8, memory: 1TB, download: 100MB, upload: 20MB, disk: 2GB}", "x"
    )
    assert terms.host.facts() == {
        "cpu_cores": 8,
        "cores": (),
        "memory_bytes": 10**12,
        "download_rate": 10**8,
        "upload_rate": 2 * 10**7,
        "disk_rate": 2 * 10**9,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: 4xH100", r"fleet\.yaml:1: gpu: no such key; nearest is gpus"),
        ("nvlink: all", "here it is called links"),
        ("gpus: 4xPotato", "name no known kind|COUNTxKIND"),
        ("ids: [a]", "write `gpus` as well"),
        ("gpus: 2xH100\nids: [a, a]", "the same id is written twice"),
        ("extends: other", "stands alone"),
        ("links: some", "all"),
        ("prices: {H100: -1}", "prices.H100 has value -1: must be at least 0"),
    ],
)
def test_a_wrong_file_is_rejected_with_the_reason(file: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        follow_fleet_file(write(file, text))


def test_a_gpu_costs_what_its_kind_does_else_what_all_do(file: Path) -> None:
    env = {"FLEET_FILE": str(write(file, "prices: {h100: 2.5, Tesla-T4: 0}")), "GPU_PRICE_PER_HOUR": "1.25"}
    prices = gpu_prices(load_settings(env=env, env_file=None))
    found = {kind: prices.of(kind) for kind in ("H100-SXM", "Tesla-T4", "L4", None)}
    assert found == {"H100-SXM": 2.5, "Tesla-T4": 0, "L4": 1.25, None: 1.25}
    assert not gpu_prices(load_settings(env={}, env_file=None))
    write(file, "prices: [")  # costs little: what is stored can be looked at still
    assert not gpu_prices(load_settings(env=env, env_file=None))


async def test_an_edit_counts_at_the_next_scan_and_a_bad_one_is_ignored(file: Path) -> None:
    with pytest.raises(ConfigError):
        follow_fleet_file(file)
    problems: list[ConfigError] = []
    followed = follow_fleet_file(write(file, "exclude: {0: x}"), problems.append)
    source = FleetFileSource(followed, FixedGpuSource(parse_gpus("2xH100"), "GPUS"))

    async def excluded() -> list[str | None]:
        followed.refresh()
        return [gpu.excluded for gpu in (await source.scan()).gpus]

    assert await excluded() == ["x", None]
    write(file, "exclude: {1: y}")
    assert await excluded() == [None, "y"]
    write(file, "exclude: nonsense")
    assert await excluded() == [None, "y"]
    file.unlink()
    assert await excluded() == [None, "y"]
    assert len(problems) == 2


async def test_an_edit_that_is_not_in_force_is_a_problem_until_it_is_mended(
    file: Path, tmp_path: Path
) -> None:
    write(file, "exclude: {0: x}")
    env = {"DATA_DIR": str(tmp_path), "GPUS": "2xH100", "FLEET_FILE": str(file)}
    alerts: list[AlertKind] = []
    inventory = build_inventory(
        load_settings(env=env, env_file=None),
        Fleet(),
        NvmlSource(),
        lambda kind, *_: alerts.append(kind),
        time.time,
    )
    assert inventory.file_problem() is None
    write(file, "exclude: nonsense")
    inventory.refresh_file()
    assert "exclude" in str(inventory.file_problem())
    assert alerts == [AlertKind.FLEET_FILE_PROBLEM]
    write(file, "exclude: {1: y}")
    inventory.refresh_file()
    assert inventory.file_problem() is None


@each("name", [*sorted(set(FleetTerms.model_fields) - {"extends"}), *HostTerms.model_fields])
def test_every_key_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCS.read_text()
