from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import asdict
from typing import Any

import pytest

from miner.api.jobs import LiveJob
from miner.cli.render import jobs
from miner.cli.render.jobs import JobDisplay, sparkline
from miner.cli.render.terminal import Terminal


def picture(**more: Any) -> dict[str, Any]:
    return asdict(LiveJob(1, "t1", "training", **{"deadline_at": time.time() + 3600, **more}))


def test_a_curve_in_a_line_of_text_goes_from_its_lowest_to_its_highest_value() -> None:
    assert sparkline([3.0, 2.0, 1.0, 1.5]) == "█▅▁▃"
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_on_a_terminal_the_picture_is_whole() -> None:
    out = io.StringIO()
    with JobDisplay(console=Terminal(file=out, force_terminal=True, width=100)) as display:
        display.take("note", {"text": "attempt 1 runs on [docker] \x1b[2J"})
        display.take("job", picture(stage="model", bytes_done=10**9, bytes_total=2 * 10**9))
        display.live.refresh()
        display.take(
            "job",
            picture(
                stage="train",
                attempt=1,
                step=40,
                steps=100,
                loss=1.25,
                best_score=0.9,
                tokens_s=1234.0,
                ends_at=time.time() + 90,
            ),
        )
        display.live.refresh()
    text = out.getvalue()
    for words in (
        "runs on [docker] \N{REPLACEMENT CHARACTER}[2J",
        "model: 1.0 GB of 2.0 GB",
        "40 of 100",
        "1.2500",
        "1,234",
        "ends in",
        "deadline in",
    ):
        assert words in text, words


def test_the_countdowns_go_on_while_the_job_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), 1000.0
    monkeypatch.setattr(jobs.time, "time", lambda: now)
    with JobDisplay(console=Terminal(file=out, force_terminal=True, width=80)) as display:
        assert display.live.auto_refresh
        assert display.live.refresh_per_second >= 1
        display.take("job", picture(stage="train", ends_at=1060.0, deadline_at=1080.0))
        for now, ends_in, deadline_in in ((1000.0, 60, 80), (1001.0, 59, 79)):
            display.live.refresh()
            assert f"{ends_in} s" in out.getvalue(), now
            assert f"{deadline_in} s" in out.getvalue(), now


def test_log_lines_stand_above_the_picture_and_do_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stderr)
    console = Terminal(file=out, force_terminal=True, width=80)
    with JobDisplay(console=console) as display:
        display.take("job", picture(stage="train"))
        sys.stderr.write("the backend is gone\n")
    assert "the backend is gone" in out.getvalue()
    assert stderr.getvalue() == ""


def test_where_nobody_watches_only_changes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(jobs, "QUIET_SECONDS", float("inf"))
    display = JobDisplay(console=Terminal(file=out, force_terminal=False, width=200))
    with display:
        for step in range(50):
            display.take("job", picture(stage="train", step=step, steps=100))
        display.take("job", picture(stage="save", trouble="the hub says 500", retry_at=time.time() + 5))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "the hub says 500" in lines[1]


def test_for_programs_every_event_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with JobDisplay(as_json=True) as display:
        display.take("job", picture())
        display.take("note", {"text": "x"})
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["job", "note"]
