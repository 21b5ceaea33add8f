"""What a scrape shows: what is known now, with names by the conventions, and nothing that is over."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from core.config.files import config_dir
from core.domain.units import parse_seconds
from miner import __version__
from miner.alerts.rules import load_alert_rules
from miner.api.samples import GpuSample, HostSample
from miner.fleet.sampler import FRESH_SECONDS, SampleHistory
from miner.http.prometheus import STORE_SECONDS, WEEK_SECONDS
from miner.store.database import StoreUnavailable
from miner.store.store import Store
from tests.doubles.each import each
from tests.miner.http.daemon_in_process import DaemonInProcess, open_daemon, task
from tests.miner.http.scraped import dashboard_queries, know_everything, known_sample

NAME = r"god_miner_\w+"
RULES = yaml.safe_load((config_dir() / "prometheus" / "rules.yml").read_text())["groups"][0]["rules"]
PAGE = Path(__file__).parents[3] / "docs/prometheus.md"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[DaemonInProcess]:
    async with open_daemon(tmp_path, GPUS="2xH100") as running:
        yield running


async def scrape(running: DaemonInProcess) -> list[Sample]:
    reply = await running.operator.get("/metrics")
    assert reply.status_code == 200
    return [sample for family in text_string_to_metric_families(reply.text) for sample in family.samples]


def values(samples: list[Sample], name: str, *labels: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for sample in samples
        if sample.name == f"god_miner_{name}"
    }


async def test_trainings_and_gpus_are_shown_and_vanish_when_they_end(
    running: DaemonInProcess, tmp_path: Path
) -> None:
    trainings = await know_everything(running, tmp_path)
    before = await scrape(running)
    first, second = (gpu.id for gpu in running.daemon.fleet.inventory.gpus)
    assert values(before, "build_info", "version") == {(__version__,): 1}
    assert values(before, "training_loss", "job_id", "task_type") == {
        ("1", "InstructTextTask"): 1.25,
        ("2", "InstructTextTask"): 1.25,
    }
    assert values(before, "gpu_temperature_celsius", "gpu") == {(first,): 62, (second,): 62}
    assert values(before, "gpu_sm_clock_hertz", "index") == {("0",): 1.755e9, ("1",): 1.755e9}
    assert values(before, "gpu_throttled", "index", "reason")["0", "power"] == 1
    states = values(before, "gpu_state", "index", "state")
    assert [state for (index, state), value in states.items() if index == "0" and value] == ["training"]

    del trainings[1]
    after = await scrape(running)
    assert values(after, "training_loss", "job_id").keys() == {("1",)}
    states = values(after, "gpu_state", "index", "state")
    assert [state for (index, state), value in states.items() if index == "1" and value] == ["idle"]

    state = running.daemon.fleet.inventory
    gpus = tuple(replace(gpu, busy=((0.0, math.inf),)) for gpu in state.gpus)
    running.daemon.fleet.inventory = replace(state, gpus=gpus)
    states = values(await scrape(running), "gpu_state", "index", "state")
    assert {index: state for (index, state), value in states.items() if value} == {
        "0": "training",
        "1": "others",
    }
    assert not [sample.name for sample in after if sample.name.endswith("_created")]


async def test_what_is_not_known_has_no_series(running: DaemonInProcess, tmp_path: Path) -> None:
    trainings = await know_everything(running, tmp_path)
    trainings[0].live.loss = None
    now, gpu = running.daemon.clock(), running.daemon.fleet.inventory.gpus[0].id
    running.daemon.samples.add([GpuSample(now, gpu, utilization=0.0)])
    found = await scrape(running)
    assert values(found, "training_loss", "job_id").keys() == {("2",)}
    assert values(found, "gpu_utilization_ratio", "index")["0",] == 0
    for name in ("temperature_celsius", "ecc_errors_total", "throttled", "tensor_active_ratio"):
        assert {index for (index,) in values(found, f"gpu_{name}", "index")} == {"1"}


async def test_a_gpu_or_host_that_is_not_measured_any_more_has_no_numbers(
    running: DaemonInProcess, tmp_path: Path
) -> None:
    await know_everything(running, tmp_path)
    gpu, old = running.daemon.fleet.inventory.gpus[0].id, running.daemon.clock() - FRESH_SECONDS - 1
    running.daemon.samples = SampleHistory()
    running.daemon.samples.add([known_sample(old, gpu)], HostSample(old, cpu=0.2))
    found = await scrape(running)
    assert values(found, "gpu_utilization_ratio", "gpu") == {}
    assert values(found, "host_cpu_ratio") == {}
    assert len(values(found, "gpu_info", "gpu")) == 2


async def test_the_store_is_asked_once_a_minute_and_a_scrape_goes_on_without_it(
    running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = running.daemon.clock()
    monkeypatch.setattr(running.daemon, "clock", lambda: now)
    await running.start(task(seed=1))
    assert values(await scrape(running), "jobs", "state")["queued",] == 1
    await running.start(task(seed=2))
    found = await scrape(running)
    assert values(found, "jobs", "state")["queued",] == 1
    assert values(found, "open_jobs") == {(): 2}
    now += STORE_SECONDS
    assert values(await scrape(running), "jobs", "state") == {
        (state,): float(2 * (state == "queued"))
        for state in ("queued", "preparing", "training", "publishing", "done", "failed", "cancelled")
    }

    async def unreadable(*_: object) -> None:
        raise StoreUnavailable("the disk is gone")

    monkeypatch.setattr(Store, "read", unreadable)
    now += STORE_SECONDS
    found = await scrape(running)
    assert values(found, "jobs", "state") == {}
    assert values(found, "open_jobs") == {(): 2}


async def test_the_table_of_metrics_names_every_one(running: DaemonInProcess, tmp_path: Path) -> None:
    await know_everything(running, tmp_path)
    reply = await running.operator.get("/metrics")
    exposed = set(re.findall(r"^# TYPE (god_miner_\w+) ", reply.text, re.MULTILINE))
    described = re.findall(r"^\| `(god_miner_\w+)", PAGE.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(exposed)


async def test_dashboard_and_rules_ask_for_what_there_is(running: DaemonInProcess, tmp_path: Path) -> None:
    await know_everything(running, tmp_path)
    exposed = {sample.name for sample in await scrape(running)}
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    for query in (*dashboard_queries(), *(rule["expr"] for rule in RULES)):
        assert set(re.findall(NAME, query)) <= exposed, query
        assert set(re.findall(r"god_miner:[\w:]+", query)) <= recorded, query


@each("rule", [rule for rule in RULES if "rule" in rule.get("labels", {})])
def test_prometheus_rules_have_the_limits_of_the_shipped_ones(rule: dict[str, Any]) -> None:
    """An alert of Prometheus and the one of the daemon come together, or one of them is wrong."""
    ours = load_alert_rules().rules[rule["labels"]["rule"]]
    over = re.findall(r"(?:\[|offset )(\w+)", rule["expr"])
    (sign, limit) = re.findall(r"([<>]) ([\d.e]+)", rule["expr"])[0]
    threshold = ours.when.above if sign == ">" else ours.when.below
    assert float(limit) == threshold.value
    assert rule["labels"]["severity"] == ours.severity
    assert parse_seconds(rule.get("for", "0s")) == (ours.hold or 0)
    if rule["labels"]["rule"] == "job-failures":
        assert (ours.when.over, f">= {ours.when.least}" in rule["expr"]) == (WEEK_SECONDS, True)
    else:
        assert {parse_seconds(one) for one in over} == {ours.when.over} - {None}
    about_gpu = rule["labels"]["rule"].startswith("gpu-")
    assert ('state="training"' in rule["expr"]) == (about_gpu and ours.only == "training")
