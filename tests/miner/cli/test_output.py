"""What all commands share in their output: cleaned text, one form of JSON, errors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from core.domain.errors import ConfigError, GodMinerError, Problem
from miner import __main__ as main
from miner.cli import output
from miner.cli.output import echo, echo_json
from miner.cli.render.jobs import job_pages
from miner.cli.render.terminal import Terminal
from tests.miner.cli.pages import JOB

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
    hostile = {**JOB, "detail": HOSTILE, "model": HOSTILE, "state": HOSTILE}
    hostile["live"] = {"trouble": HOSTILE}
    hostile["steps"] = [{**JOB["steps"][0], "detail": HOSTILE + "step"}]
    text = shown(HOSTILE, Text(HOSTILE, "bold"), table, *job_pages(hostile, 0.0))
    echo(HOSTILE)
    text += capsys.readouterr().out
    for steering in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e", "\r"):
        assert steering not in text, repr(steering)
    assert "[bold]" in text
    assert "\x1b[31m" in text  # our own colours pass


def test_no_command_prints_past_the_one_door() -> None:
    offenders = [
        file.name for file in COMMANDS.glob("*.py") if "rich.console import Console\n" in file.read_text()
    ]
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


@pytest.mark.parametrize(
    ("error", "words", "code", "told"),
    [
        (
            GodMinerError("it is gone\x1b[2J"),
            ("--json",),
            1,
            {"code": "error", "message": "it is gone\x1b[2J"},
        ),
        (GodMinerError("it is gone\x1b[2J"), (), 1, "it is gone\N{REPLACEMENT CHARACTER}[2J\n"),
        (
            ConfigError("task.json", [Problem("dataset", "x", "is missing")]),
            ("--json",),
            78,
            {
                "code": "bad_config",
                "message": "task.json: 1 problem\n  - dataset has value x: is missing",
                "problems": [{"where": "dataset", "value": "x", "rule": "is missing"}],
            },
        ),
    ],
)
def test_an_error_is_json_where_json_was_asked_for(
    error: GodMinerError,
    words: tuple[str, ...],
    code: int,
    told: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("miner.settings.load_settings", fail)
    monkeypatch.setattr(sys, "argv", ["god-miner", "jobs", "list", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert (json.loads(out) if out else err) == ({"error": told} if out else told)


def test_a_wrong_option_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["god-miner", "jobs", "list", "--json", "--limit", "many"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    told = json.loads(capsys.readouterr().out)["error"]
    assert (ended.value.code, told["code"], "--limit" in told["message"]) == (2, "usage", True)


def test_a_command_that_is_well_ends_with_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["god-miner", "config", "env"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert not ended.value.code
    assert "LOG_FORMAT" in capsys.readouterr().out
