"""`god-miner fleet show`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from typer.testing import CliRunner

from core.domain.decisions import Decision
from core.domain.errors import ConfigError
from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.domain.wire import MinerTaskOffer
from miner.__main__ import app
from miner.api.fleet import FleetStatus
from miner.daemon_client import NoDaemon
from miner.fleet.base import GpuOption
from miner.store import database
from miner.store.offers import ReceivedOffer, ReservationRow, StandingRule, record_offer
from miner.store.store import Store
from tests.miner.http.daemon_in_process import DaemonInProcess, task

CLAIM: dict[str, Any] = {
    "job_id": None,
    "model": None,
    "validator": "v",
    "task_id": "",
    "stage": "reserved",
    "kind": "offer",
    "gpus": [],
    "starts_at": 0.0,
    "ends_at": 0.0,
    "priority": 0.0,
    "accepted": True,
    "queue": None,
}
PAGE: dict[str, Any] = {
    "at": 0.0,
    "source": "driver 550",
    "looked_at": 0.0,
    "trouble": None,
    "notes": [],
    "nodes": [],
    "gpus": [
        {
            "id": f"GPU-{index}",
            "index": index,
            "node": "",
            "others": False,
            "busy": [],
            "kind": "H100-SXM",
            "memory": "84.9 GB",
            "linked": [1 - index] if index < 2 else [],
            "out": "it is lost" if index == 2 else None,
            "unclean": index == 1,
            "shared": index == 3,
            "task_id": "running-task" if index == 0 else None,
            "validator": "v" if index == 0 else None,
            "job_id": 7 if index == 0 else None,
            "until": 3600.0 if index == 0 else None,
            "claim": {**CLAIM, "task_id": "reserved-task", "model": "org/llama-8b", "ends_at": 5400.0}
            if index == 4
            else None,
            "sample": {
                "at": 0.0,
                "gpu": "GPU-0",
                "utilization": 0.93,
                "memory_used": 66_100_000_000,
                "temperature": 71.0,
                "power_watts": 612.0,
                "power_limit_watts": 700.0,
            }
            if index == 0
            else None,
        }
        for index in range(5)
    ],
    "claims": [
        {
            **CLAIM,
            "task_id": "waiting-task",
            "stage": "waiting",
            "kind": "job",
            "starts_at": 7200.0,
            "ends_at": 7200.0,
            "priority": -1e6,
            "accepted": False,
            "queue": 1,
        }
    ],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    monkeypatch.setenv("GPUS", "4xH100")
    monkeypatch.setattr("miner.fleet.nvml.NvmlSource.sample", AsyncMock(return_value=[]))
    return tmp_path


def run(*arguments: str, columns: int = 200) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fleet", "show", *arguments], env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


def answers(monkeypatch: pytest.MonkeyPatch, page: dict[str, Any]) -> None:
    answer = FleetStatus.model_validate(page)
    monkeypatch.setattr("miner.daemon_client.get", lambda _settings, path, _type: {"/fleet": answer}[path])


def test_gpus_holders_and_queue_are_shown_and_machines_get_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, PAGE)
    code, shown = run()
    assert code == 0
    for words in ("runs running-task", "still freeing memory", "out: it is lost", "free, and slightly used"):
        assert words in shown
    assert "reserved for offer reserved (org/llama-8b), 01-01 00:00 to 01-01 01:30" in shown
    for words in ("job, waiting, 1. in the queue", "no place yet", "not accepted"):
        assert words in shown
    code, shown = run("--json")
    page = json.loads(shown)
    assert (code, page.keys()) == (0, {"daemon", "host", *PAGE})
    assert [gpu["id"] for gpu in page["gpus"]] == [gpu["id"] for gpu in PAGE["gpus"]]
    assert page["gpus"][0]["until"] == "1970-01-01T01:00:00.000Z"
    assert page["gpus"][0]["sample"].items() >= {"utilization": 0.93, "power_watts": 612.0}.items()


def test_what_a_gpu_measures_fits_into_80_columns_and_what_is_unknown_is_a_dash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(monkeypatch, PAGE)
    _, shown = run(columns=80)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[2:6] == ["93%", "66.1/84.9", "GB", "71"] and "612/700" in line for line in lines)
    assert any(line.split()[2:6] == ["-", "-/84.9", "GB", "-"] for line in lines)


@pytest.mark.parametrize(
    "change", [{"trouble": "the driver hangs"}, {"gpus": [{**PAGE["gpus"][2]}]}, {"gpus": []}]
)
def test_a_fleet_that_can_not_be_used_is_reported_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    answers(monkeypatch, {**PAGE, **change})
    code, shown = run()
    assert code == 1
    assert change.get("trouble", "") in shown


def test_without_a_daemon_the_gpus_are_scanned_and_the_store_read(folder: Path) -> None:
    async def reserve() -> None:
        store = Store(database.prepare_store(folder))
        store.writer.start(asyncio.get_running_loop())
        offer = MinerTaskOffer.model_validate(task().offer())
        hold = GpuReservation(
            TaskKey("v", offer.task_id), ReservationKind.OFFER, ("1", "2"), 0.0, 7200.0, 0.25
        )
        await store.write(
            record_offer,
            ReceivedOffer("v", offer, b"{}", 0.0),
            Decision(True, "yes", "p", "h"),
            ReservationRow(hold, True, 900.0),
            StandingRule(False, 1.0),
        )
        await store.writer.close()

    asyncio.run(reserve())
    code, shown = run("--json")
    page = json.loads(shown)
    assert (code, page["daemon"], page["source"]) == (0, False, "GPUS=4xH100")
    assert "god-miner run" in page["why"]
    assert [gpu["id"] for gpu in page["gpus"]] == ["0", "1", "2", "3"]
    (claim,) = page["claims"]
    assert (claim["gpus"], claim["kind"], claim["accepted"]) == (["1", "2"], "offer", True)
    code, shown = run()
    assert "1, 2" in shown


def test_without_daemon_and_store_the_gpus_are_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = run()
    assert code == 0
    assert "nothing is reserved, nothing waits" in shown
    assert not list(folder.glob("*.sqlite3*"))
    monkeypatch.setattr("miner.daemon_client.get", Mock(side_effect=NoDaemon("it does not answer")))
    assert "it does not answer" in run()[1]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("GPUS", "4xPotato", "known are"), ("FLEET_FILE", "fleet.yaml", "nearest is gpus")],
    ids=["a setting", "the fleet file"],
)
def test_what_is_written_wrong_is_an_error(
    name: str, value: str, rule: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "fleet.yaml").write_text("gpu: 4")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rule):
        CliRunner().invoke(app, ["fleet", "show"], catch_exceptions=False)


def cluster_page(count: int) -> dict[str, Any]:
    """A cluster whose node n1 has a job of ours and others', and n2 is drained."""

    def node(number: int, **more: Any) -> dict[str, Any]:
        same = {"backend": "slurm", "kind": "H100-SXM", "gpus": 8, "cpu_cores": 128, "memory_bytes": 10**12}
        state = {"name": f"n{number}", "state": "idle", "ours": 0, "others": 0, "free": 8}
        return {**same, **state, "until": None, "out": None, "is_of_interest": number < 3, **more}

    nodes = [node(number) for number in range(1, count + 1)]
    nodes[0] = node(1, state="mixed", ours=2, others=4, free=2, until=7200.0)
    nodes[1] = node(2, state="drained: bad disk", free=0, out="taken out: drained: bad disk")
    same = {**PAGE["gpus"][2], "out": None, "node": "n1", "sample": None}
    slots = [{**same, "id": f"{index}@n1", "index": index} for index in range(2)]
    slots[1] |= {"others": True, "busy": [{"starts_at": 0.0, "ends_at": None}]}
    return {**PAGE, "source": "Slurm 24.11.5, partition train", "gpus": slots, "nodes": nodes}


def test_many_nodes_are_summed_up_and_those_of_interest_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {**cluster_page(125), "notes": ["n9 is left out: its GPUs are of no known kind"]})
    code, shown = run(columns=80)
    assert code == 0
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert max(map(len, shown.splitlines())) <= 80
    assert len(lines) < 20
    assert "125 8xH100-SXM 1000 2 4 986 8" in lines
    assert "n1 8xH100-SXM 2 4 2 01-01 02:00 mixed" in lines
    assert "n2 8xH100-SXM 0 0 0 - drained: bad disk" in lines
    assert any(line.startswith("123 more nodes") for line in lines)
    assert "n9 is left out: its GPUs are of no known kind" in lines
    assert "GPUs of nodes are not measured by this daemon" in lines


def test_one_node_is_shown_with_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, cluster_page(125))
    code, shown = run("--node", "n1", columns=80)
    assert code == 0
    assert "1@n1" in shown
    assert "used by others; others: 01-01 00:00 to no end" in shown
    assert "n2" not in shown
    answers(monkeypatch, cluster_page(125))
    page = json.loads(run("--node", "n1", "--json")[1])
    assert [one["name"] for one in page["nodes"]] == ["n1"]
    answers(monkeypatch, cluster_page(125))
    code, shown = run("--node", "n999")
    assert code == 2
    assert "there is no node n999" in shown


async def test_the_daemons_page_shows_who_has_what(running: DaemonInProcess) -> None:
    await running.offer(task(seed=1))
    await running.start(task(seed=2))
    page = (await running.operator.get("/fleet")).json()
    assert len(page["gpus"]) == 64
    assert [claim["kind"] for claim in page["claims"]] == ["offer", "job"]
    held = page["claims"][0]
    assert (held["job_id"], held["model"]) == (None, task(seed=1).model)
    assert [gpu["claim"]["task_id"] for gpu in page["gpus"] if gpu["id"] in held["gpus"]] == [held["task_id"]]
    assert (page["claims"][1]["job_id"], page["claims"][1]["model"]) == (1, task(seed=2).model)
    assert held["task_id"] == task(seed=1).task_id
    assert held["ends_at"] > held["starts_at"]
    assert (held["stage"], held["accepted"], held["queue"]) == ("reserved", True, None)
    job = page["claims"][1]
    fleet = running.daemon.fleet
    key = TaskKey(job["validator"], job["task_id"])
    grant = await fleet.acquire(key, [GpuOption(1)], until=9e9)
    page = (await running.operator.get("/fleet")).json()
    assert {gpu["id"]: gpu["task_id"] for gpu in page["gpus"]}[grant.ids[0]] == key.task_id
