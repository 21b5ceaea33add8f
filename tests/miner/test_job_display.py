from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest
from rich.console import Console

from miner.job_display import Display
from miner.jobs.live import Live


def picture(**more: Any) -> dict[str, Any]:
    return Live(1, "t1", "training", **{"deadline_at": time.time() + 3600, **more}).as_dict()


def test_on_a_terminal_the_picture_is_whole() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, highlight=False)
    with Display(console=console) as display:
        display.take("note", {"text": "attempt 1 runs on [docker]"})
        display.take("job", picture(stage="model", bytes_done=10**9, bytes_total=2 * 10**9))
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
    text = out.getvalue()
    for words in (
        "runs on [docker]",
        "model: 1.0 GB of 2.0 GB",
        "40 of 100",
        "1.2500",
        "1,234",
        "ends in",
        "deadline in",
    ):
        assert words in text, words


def test_where_nobody_watches_only_changes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    display = Display(console=Console(file=out, force_terminal=False, width=200, highlight=False))
    with display:
        for step in range(50):
            display.take("job", picture(stage="train", step=step, steps=100))
        display.take("job", picture(stage="save", trouble="the hub says 500", retry_at=time.time() + 5))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "the hub says 500" in lines[1]


def test_for_programs_every_event_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(as_json=True) as display:
        display.take("job", picture())
        display.take("note", {"text": "x"})
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["job", "note"]
