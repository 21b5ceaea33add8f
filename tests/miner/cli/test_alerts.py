from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from miner.__main__ import app
from miner.alerts.rules import load_alert_rules
from miner.api.alerts import AlertsPage, Severity, TrialNotification
from miner.observe.alerts import HOST, AlertKind, gpu_subject
from miner.store import alerts as store_alerts
from miner.store.alerts import NewAlert
from tests.miner.http.daemon_in_process import DaemonInProcess
from tests.miner.offers.filled import store


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["alerts", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_check_names_each_mistake_with_its_line_and_what_a_good_file_changes(data_dir: Path) -> None:
    assert "does not exist: the shipped rules are in force" in run("check")
    file = data_dir / "alerts.yaml"
    file.write_text("rules:\n  gpu-hot: {when: {abov: 90}}\n")
    assert "alerts.yaml:2: rules.gpu-hot.when.abov" in run("check", code=1)
    findings = json.loads(run("check", "--json", code=1))["findings"]
    assert "nearest is above" in findings[0]["message"]
    file.write_text("rules:\n  gpu-hot: {when: {above: 90}}\n  gpu-idle: {off: true}\n")
    found = json.loads(run("check", "--json"))["rules"]
    assert found["gpu-idle"] == "off"
    assert found["gpu-hot"].startswith("gpu.temperature above 90 °C")
    assert found.keys() == {"gpu-hot", "gpu-idle"}


def test_a_rule_is_tried_at_a_value(data_dir: Path) -> None:
    assert "raises a warning alert, once it has lasted for 30s" in run("test", "gpu-hot", "91")
    assert "resolves an open alert" in run("test", "gpu-memory", "60%")
    assert "leaves an open alert open" in run("test", "gpu-memory", "89%")
    done = CliRunner().invoke(app, ["alerts", "test", "gpu-ht", "91"])
    assert "nearest is gpu-hot" in str(done.exception)


def test_without_a_daemon_stored_alerts_are_listed(data_dir: Path) -> None:
    with store(data_dir) as connection:
        for rule in ("gpu-hot", "gpu-idle"):
            alert = NewAlert(rule, gpu_subject("g0"), Severity.WARNING, "above 85 °C", 91.0)
            store_alerts.raise_alert(connection, alert, 1000.0)
        store_alerts.resolve_alert(connection, "gpu-idle", gpu_subject("g0"), "", 2000.0)
    assert [row["rule"] for row in json.loads(run("list", "--json"))["alerts"]] == ["gpu-hot"]
    assert len(json.loads(run("list", "--all", "--json"))["alerts"]) == 2
    assert "above 85 °C" in run("list")


async def test_the_list_of_a_running_daemon_fits_80_columns(
    running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = {"rule": "gpu-*", "seconds": 3600, "reason": "a new fan is on its way and comes on Friday"}
    assert (await running.operator.post("/alerts/silences", json=hold)).status_code == 201
    running.daemon.alerts(AlertKind.GPU_OUT, "it fell off the bus and does not come back", gpu_subject("g3"))
    await running.daemon.alert_service.evaluate()
    page: dict[str, Any] = (await running.operator.get("/alerts?open=1")).json()
    assert {one["name"] for one in page["rules"]} == load_alert_rules().rules.keys()
    limits = {one["name"]: one["limit_text"] for one in page["rules"]}
    assert (limits["gpu-hot"], limits["gpu-memory"], limits["gpu-idle"]) == ("> 85 °C", "> 90 %", "< 50 %")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("miner.daemon_client.get", lambda *_: AlertsPage.model_validate(page))
    shown = await asyncio.to_thread(run, "list")
    assert max(map(len, shown.splitlines())) <= 80
    for word in ("gpu_out", "gpu-hot", "nothing to measure"):
        assert word in shown
    (silence,) = page["silences"]
    assert (await running.operator.delete(f"/alerts/silences/{silence['id']}")).status_code == 200
    assert (await running.operator.delete(f"/alerts/silences/{silence['id']}")).status_code == 404
    for subject, status in (("gpu:3", 503), ("job:7", 503), ("a:b", 422), (["miner", ""], 422), (5, 422)):
        reply = await running.operator.post("/alerts/test", json={"subject": subject})
        assert reply.status_code == status, subject
    sent = TrialNotification(subject=HOST).model_dump(mode="json")
    assert sent["subject"] == "host"
    assert TrialNotification.model_validate(sent).subject == HOST
