"""A real daemon on a host whose GPUs fail: what operators and validators see of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miner.api.fleet import FleetStatus
from miner.api.samples import FleetSamples
from miner.daemon_client import get
from miner.dev.stack import ChildProcess
from miner.settings import load_settings
from tests.doubles.nvml import DRIVER_NOT_LOADED, LOST, NvmlHost, compiled, training, uuid
from tests.integration.test_last_gpu import POLICY, all_at_once, one_gpu_task
from tests.integration.traffic import GENEROUS, Validator, store


@pytest.fixture
def host(tmp_path: Path) -> NvmlHost:
    return NvmlHost(compiled(tmp_path), tmp_path / "nvml.json", 4)


class Watched:
    def __init__(self, validator: Validator) -> None:
        self.validator = validator

    def page(self) -> dict[str, Any]:
        settings = load_settings(env=self.validator.stack.settings(), env_file=None)
        return get(settings, "/fleet", FleetStatus).model_dump()

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            page = self.page()
            if condition(page):
                return page
            time.sleep(0.05)
        raise AssertionError(f"it did not come to that: {page}")

    async def accepted(self, count: int) -> int:
        offers = [self.validator.offer(one_gpu_task(self.validator)) for _ in range(count)]
        return sum(await all_at_once(self.validator.stack.public_port, offers))

    def alerts(self) -> list[str]:
        with store(self.validator.stack) as connection:
            rows = connection.execute("SELECT kind FROM events WHERE kind LIKE '%gpu%' OR kind LIKE 'inv%'")
            return [row["kind"] for row in rows]


QUICK = {
    "GPUS": "nvml",
    "miner.fleet.inventory.REFRESH_SECONDS": "0.2",
    "miner.backends.build_fleet.RETURN_SECONDS": "0.5",
}


def outs(page: dict[str, Any]) -> list[bool]:
    return [gpu["out"] is not None for gpu in page["gpus"]]


async def test_a_daemon_lives_with_what_its_gpus_do(
    validator: Validator, running: Callable[..., ChildProcess], host: NvmlHost, tmp_path: Path
) -> None:
    policy = tmp_path / "at-once.yaml"
    policy.write_text(POLICY)
    terms = {**QUICK, "POLICY": str(policy)}
    running(**GENEROUS, **terms, **host.environment)
    watched = Watched(validator)

    page = watched.until(lambda page: len(page["gpus"]) == 4)
    assert [gpu["id"] for gpu in page["gpus"]] == [uuid(index) for index in range(4)]
    assert page["source"] == "driver 550.127.05"

    host.gpu(3, error=LOST)
    page = watched.until(lambda page: outs(page) == [False, False, False, True])
    assert "lost" in page["gpus"][3]["out"].lower()
    assert await watched.accepted(5) == 3

    host.set(init_error=DRIVER_NOT_LOADED, count=0)
    host.gpu(0, delay_ms=60_000)  # the worker that is running hangs, the next one finds no driver
    host.set(count=4)
    page = watched.until(lambda page: page["trouble"] is not None)
    assert len(page["gpus"]) == 4  # as last seen
    assert await watched.accepted(1) == 0

    host.gpu(0, delay_ms=None)
    host.gpu(3, error=None)
    host.set(init_error=0)
    watched.until(lambda page: page["trouble"] is None and not any(outs(page)))
    assert await watched.accepted(2) == 1
    assert watched.alerts() == ["gpu_out", "inventory_unreadable", "inventory_recovered", "gpu_back"]


async def test_what_somebody_else_takes_is_not_offered(
    validator: Validator, running: Callable[..., ChildProcess], host: NvmlHost, tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("exclude: {0: the fan}\n")
    terms = {**QUICK, "FLEET_FILE": str(file), "MAX_JOBS": "100"}
    running(**{**GENEROUS, **terms, **host.environment})
    watched = Watched(validator)
    page = watched.until(lambda page: len(page["gpus"]) == 4)
    assert outs(page) == [True, False, False, False]
    file.write_text("exclude: {1: rented out until Friday}\n")
    page = watched.until(lambda page: outs(page) == [False, True, False, False])
    assert page["gpus"][1]["out"] == "taken out: rented out until Friday"
    host.gpu(2, used_mib=40_000, processes=3)
    page = watched.until(lambda page: page["gpus"][2]["unclean"])
    assert page["gpus"][2]["shared"]


async def test_a_driver_that_hangs_while_it_is_measured_holds_up_neither_scans_nor_offers(
    validator: Validator, running: Callable[..., ChildProcess], host: NvmlHost, tmp_path: Path
) -> None:
    policy = tmp_path / "at-once.yaml"
    policy.write_text(POLICY)
    terms = {**QUICK, "miner.backends.build_fleet.SAMPLE_SECONDS": "0.2", "POLICY": str(policy)}
    daemon = running(**GENEROUS, **terms, **host.environment)
    watched = Watched(validator)
    host.gpu(1, **training(temperature=83, used_mib=4))
    # What the tensor cores did lies between two samples: it is not in the first.
    page = watched.until(
        lambda page: (
            (sample := page["gpus"][1]["sample"])
            and sample["temperature"] == 83
            and sample["tensor"] is not None
        )
    )

    host.gpu(0, sample_delay_ms=600_000)
    settings = load_settings(env=validator.stack.settings(), env_file=None)
    assert await watched.accepted(1) == 1
    hung_at = page["looked_at"]
    while get(settings, "/samples?seconds=60", FleetSamples).problem is None:
        assert watched.page()["trouble"] is None
    page = watched.until(lambda page: page["looked_at"] > hung_at + 5)
    assert page["trouble"] is None
    assert await watched.accepted(1) == 1
    assert watched.alerts() == []
    # A stop while a measurement and a scan wait for the driver.
    assert daemon.stop(120) == 0
