"""`god-miner doctor` prints findings for people and machines, hides secrets, and exits with a verdict."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miner.cli.doctor import app
from miner.doctor import CHECKS, DoctorCheck
from miner.settings import Settings
from miner.support.findings import Finding, fail, ok, warn

TOKEN = "hush-hush-0123456789"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    root = logging.getLogger()
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    yield
    root.handlers[:], (sys.excepthook, threading.excepthook) = before[0], before[2:]
    root.setLevel(before[1])
    logging.captureWarnings(False)


def checks(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr("miner.doctor.all_checks", lambda _: [DoctorCheck("all", lambda _: findings)])


def test_json_holds_every_finding_and_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    checks(monkeypatch, ok("a", "fine"), fail("b", "bad", "mend it"))
    done = CliRunner().invoke(app, ["--json"])
    assert json.loads(done.output) == {
        "healthy": False,
        "findings": [
            {"status": "ok", "what": "a", "detail": "fine", "fix": ""},
            {"status": "fail", "what": "b", "detail": "bad", "fix": "mend it"},
        ],
    }
    assert done.exit_code == 1


def test_people_get_a_table_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    checks(monkeypatch, ok("a", "fine"), warn("b", "so so [bold]", "mend it"))
    done = CliRunner().invoke(app, [])
    assert "→ mend it" in done.output
    assert "so so [bold]" in done.output
    assert "1 ok, 1 warn" in done.output
    assert done.exit_code == 0


def test_wrong_settings_are_findings_and_all_else_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETUID", "x")
    monkeypatch.setenv("MAX_JOBS", "-1")
    done = CliRunner().invoke(app, ["--json"])
    found = json.loads(done.output)["findings"]
    assert [(finding["status"], finding["what"]) for finding in found] == [
        ("fail", "settings"),
        ("fail", "settings"),
        ("skip", "all else"),
    ]
    assert all(finding["fix"] for finding in found[:2])
    assert done.exit_code == 1


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_no_finding_shows_a_secret(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATOR_TOKEN", TOKEN)
    checks(monkeypatch, fail(f"a {TOKEN}", f"b {TOKEN}", f"c {TOKEN}"))
    done = CliRunner().invoke(app, args)
    assert TOKEN not in done.output
    assert done.output.count("***") == 3


@pytest.mark.process
def test_all_real_checks_run_on_a_bare_machine_and_none_of_them_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PUBLIC_PORT", "0")
    monkeypatch.setenv("OPERATOR_PORT", "0")
    monkeypatch.setenv("WALLET_PATH", str(Path.cwd() / "wallets"))
    patient = tuple(replace(check, limit_seconds=300.0) for check in CHECKS)  # on a busy machine
    monkeypatch.setattr("miner.doctor.all_checks", lambda _: patient)
    done = CliRunner().invoke(app, ["--json"])
    found = {finding["what"]: finding for finding in json.loads(done.output)["findings"]}
    assert {"settings", "system", "data directory", "hotkey", "chain", "clock", "public port"} <= found.keys()
    assert "broke" not in done.output
    assert done.exit_code == 1
