"""`god-miner tournament check` and `prepare` from the outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from core.domain.wire import TournamentType
from miner.alerts.tournament_entries import PREPARED
from miner.cli.tournament import app
from miner.tournament.check import checks
from miner.tournament.check.entry import CHECK_LIMIT_S, CheckedEntry, CheckTooSlow, RuleFinding
from miner.tournament.checkout import clone_repository
from miner.tournament.entry_watch import prepared_directories
from tests.miner.tournament.entries import SMALL
from tests.miner.tournament.repositories import commit_deep_file, commit_files, make_repository
from tests.miner.tournament.test_checkout import serving

pytestmark = pytest.mark.process


LICENSE, NOTICE = "Some Licence\n", "Some Notice\n"


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A stand-in for a checkout of the validators' repository."""
    make_repository(tmp_path / "upstream", {"LICENSE.md": LICENSE, "NOTICE": NOTICE})
    return tmp_path / "upstream"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})


def test_every_rule_is_answered_for_this_checkout_and_the_licence_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside other tests a clone takes as long as it takes.
    monkeypatch.setitem(clone_repository.__kwdefaults__, "limit_s", 600.0)
    # Without a remote: what this checkout was cloned from may have gone on since.
    entry = str(tmp_path / "entry")
    for command in (
        ["clone", "-q", str(Path(__file__).parents[3]), entry],
        ["-C", entry, "remote", "remove", "origin"],
    ):
        subprocess.run(["git", *command], check=True)
    result = run("check", entry, "--offline", "--json")
    found = json.loads(result.stdout)
    assert [rule["number"] for rule in found["rules"]] == list(range(1, 14))
    assert [rule["rule"] for rule in found["rules"] if rule["state"] == "failed"] == ["licence and notice"]
    assert (result.exit_code, found["admitted"]) == (1, False)
    [obfuscation] = [rule for rule in found["rules"] if rule["rule"] == "obfuscation"]
    assert obfuscation["notes"] == []  # no false suspicion of any of our own files


def test_a_table_has_eighty_columns_and_says_what_is_left_to_do(tmp_path: Path, upstream: Path) -> None:
    make_repository(tmp_path / "entry", {"LICENSE": LICENSE, "NOTICE": NOTICE})
    result = run("check", str(tmp_path / "entry"), "--offline", "--upstream", str(upstream))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "there is no ops/docker/standalone-text-trainer.dockerfile" in " ".join(result.stdout.split())
    assert "cannot be known here: do these by hand" in lines[-1]


def test_a_directory_that_is_no_repository_is_an_error(tmp_path: Path) -> None:
    result = run("check", str(tmp_path))
    assert result.exit_code == 1
    assert f"→ {tmp_path} must be a git repository" in str(result.exception)


def test_a_tree_deeper_than_recursion_is_checked_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    commit_deep_file(tmp_path / "entry", depth=1100)
    result = run("check", str(tmp_path / "entry"), "--offline", "--json")
    assert len(json.loads(result.stdout)["rules"]) == 13
    assert list((tmp_path / "temporary").iterdir()) == []


def endless(entry: CheckedEntry) -> RuleFinding:
    """A rule in the middle of which the time is up."""
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    re.search("(a|a)*b", "a" * 64)
    raise AssertionError("it ended by itself")


def test_a_repository_that_keeps_a_rule_busy_ends_with_a_finding_at_that_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(checks, "CHECKS", (*checks.CHECKS[:3], endless, *checks.CHECKS[4:]))
    make_repository(tmp_path / "entry", {"a": "1"})
    result = run("check", str(tmp_path / "entry"), "--offline", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["admitted"]) == (1, False)
    assert [rule["number"] for rule in found["rules"]] == [1, 2, 3, 4]
    assert found["rules"][-1]["rule"] == "time limit"
    assert f"after {CHECK_LIMIT_S:g} s" in found["rules"][-1]["text"]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_clone_that_uses_up_the_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            released.wait(60)

    make_repository(tmp_path / "entry", {"a": "1"})
    with serving(Silent) as address:
        result = run("check", str(tmp_path / "entry"), "--offline", "--other", f"{address}/other")
        released.set()
    assert isinstance(result.exception, CheckTooSlow)


@pytest.mark.kept("15")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_check_and_leaves_nothing(sign: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    make_repository(tmp_path / "entry", {"a": "1"})
    asked, released = threading.Event(), threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            released.wait(60)

    with serving(Silent) as address:
        command = ["check", str(tmp_path / "entry"), "--offline", "--other", f"{address}/other"]
        process = subprocess.Popen(
            [sys.executable, "-m", "miner", "tournament", *command],
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
            stderr=subprocess.DEVNULL,
        )
        assert asked.wait(60)
        process.send_signal(sign)
        assert process.wait(60) != 0
        released.set()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_commit_of_a_directory_can_be_named(tmp_path: Path) -> None:
    first = make_repository(tmp_path / "entry", {"a": "1"})
    commit_files(tmp_path / "entry", {"a": "2"})
    result = run("check", str(tmp_path / "entry"), "--commit", first, "--offline", "--json", "--kind", "text")
    found = json.loads(result.stdout)
    assert found["commit"] == first
    assert found["kinds"] == ["text"]


@pytest.mark.thorough
def test_an_entry_is_prepared_and_passes_what_can_pass(tmp_path: Path, upstream: Path) -> None:
    place = tmp_path / "entry"
    result = run("prepare", str(place), "--upstream", str(upstream), "--kind", "text")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80 + len(str(tmp_path))
    assert "What does not:" in result.stdout
    assert prepared_directories(tmp_path / "data" / PREPARED) == {TournamentType.TEXT: place}
    checked = run("check", str(place), "--upstream", str(upstream), "--offline", "--json", "--kind", "text")
    found = json.loads(checked.stdout)
    assert (checked.exit_code, found["admitted"]) == (0, True)
    passed = {rule["number"] for rule in found["rules"] if rule["state"] == "passed"}
    # The ninth runs the entry's code in a sandbox.
    assert passed | ({9} if shutil.which("bwrap") is None else set()) == {2, 3, 7, 8, 9, 10, 13}


def test_without_upstream_an_entry_says_that_it_would_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_repository(tmp_path / "small", SMALL)
    monkeypatch.setattr("miner.backends.docker.images.source_root", lambda: tmp_path / "small")
    result = run("prepare", str(tmp_path / "entry"), "--kind", "text")
    assert result.exit_code == 0, result.output
    assert "→ prepare it with --upstream CHECKOUT" in result.stdout
    assert not (tmp_path / "entry/LICENSE.md").exists()
