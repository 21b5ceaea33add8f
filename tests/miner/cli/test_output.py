"""What all commands share in their output: cleaned text, one form of JSON, errors."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.table import Table
from rich.text import Text

from core.domain.errors import ConfigError, GodMinerError, Problem
from miner import __main__ as main
from miner.api.jobs import LiveJob
from miner.cli import output
from miner.cli.output import echo, echo_json
from miner.cli.render.jobs import job_pages
from miner.cli.render.terminal import Terminal
from tests.miner.cli.pages import JOB, job_details

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\r"
COMMANDS = Path(output.__file__).parent


def shown(*renderables: object, width: int = 80) -> str:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=width)
    for one in renderables:
        console.print(one)
    return out.getvalue()


def test_no_text_steers_the_terminal_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(f"[bold]{HOSTILE}", style="red")
    hostile = job_details(
        detail=HOSTILE,
        model=HOSTILE,
        live=LiveJob(1, "t1", HOSTILE, trouble=HOSTILE),
        steps=[{**JOB["steps"][0], "detail": HOSTILE + "step"}],
    )
    text = shown(HOSTILE, Text(HOSTILE, "bold"), table, *job_pages(hostile, 0.0))
    echo(HOSTILE)
    text += capsys.readouterr().out
    for steering in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e", "\r"):
        assert steering not in text, repr(steering)
    assert "[bold]" in text
    assert "\x1b[31m" in text  # our own colours pass


def test_no_command_prints_past_the_one_door() -> None:
    offenders = [file.name for file in COMMANDS.glob("*.py") if "rich.console import" in file.read_text()]
    assert offenders == ["output.py"]


def test_moments_are_known_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    echo_json(
        {"a_at": 0, "rows": [{"t": 1.5, "end_by": None, "at": 1e30}], "steps": 3, "is_at": True}, line=True
    )
    assert json.loads(capsys.readouterr().out) == {
        "a_at": "1970-01-01T00:00:00.000Z",
        "rows": [{"t": "1970-01-01T00:00:01.500Z", "end_by": None, "at": None}],
        "steps": 3,
        "is_at": True,
    }


@pytest.fixture
def god_miner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """The console script: its exit code and what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["god-miner", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return (ended.value.code, *capsys.readouterr())

    return run


GONE = GodMinerError("it is gone\x1b[2J")
MISSING = ConfigError("task.json", [Problem("dataset", "x", "is missing")])


@pytest.mark.parametrize(
    ("error", "code", "reported", "as_json"),
    [
        (
            GONE,
            1,
            "it is gone\N{REPLACEMENT CHARACTER}[2J\n",
            {"code": "error", "message": "it is gone\x1b[2J"},
        ),
        (
            MISSING,
            78,
            f"{MISSING}\n",
            {
                "code": "bad_config",
                "message": str(MISSING),
                "problems": [{"where": "dataset", "value": "x", "rule": "is missing"}],
            },
        ),
    ],
    ids=["an error", "a wrong setting"],
)
def test_an_error_is_a_line_and_json_where_json_was_asked_for(
    error: GodMinerError,
    code: int,
    reported: str,
    as_json: object,
    god_miner: Callable[..., tuple[object, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("miner.settings.load_settings", Mock(side_effect=error))
    assert god_miner("jobs", "list") == (code, "", reported)
    ended, out, err = god_miner("jobs", "list", "--json")
    assert (ended, json.loads(out), err) == (code, {"error": as_json}, "")


def test_a_wrong_option_is_json_too_and_a_command_that_is_well_ends_with_zero(
    god_miner: Callable[..., tuple[object, str, str]],
) -> None:
    code, out, _ = god_miner("jobs", "list", "--json", "--limit", "many")
    error = json.loads(out)["error"]
    assert (code, error["code"], "--limit" in error["message"]) == (2, "usage", True)
    assert god_miner("jobs", "list", "--limit", "many")[0] == 2
    code, out, _ = god_miner("config", "env")
    assert not code
    assert "LOG_FORMAT" in out
    assert god_miner("--version")[1].startswith("god-miner ")
