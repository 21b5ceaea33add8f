"""Making rows: as many as asked, for so long, whatever fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.domain.tasks import PVP_GAMES
from trainer.environments import generation
from trainer.environments.generation import LEAST_ROWS, RowsGeneration
from trainer.environments.sources import (
    RowsOrder,
    RowsReport,
    ShellSource,
    known_environments,
    sequence_limit_of,
    unknown_environments,
)
from trainer.errors import TrainingError

pytestmark = pytest.mark.process


class Source:
    """Rows that say whose they are; a job fails, dies or takes its time by its seed."""

    name = "a game"

    def __init__(
        self, each: int = 3, fails: int = 0, dies: int = 0, seconds: float = 0.0, text: str = ""
    ) -> None:
        self.text = text
        self.each, self.fails, self.dies, self.seconds = each, fails, dies, seconds
        self.ready = False

    def get_ready(self) -> None:
        self.ready = True

    def rows(self, seed: int) -> Sequence[dict[str, Any]]:
        assert self.ready
        time.sleep(self.seconds)
        if self.dies and seed % self.dies == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails and seed % self.fails == 0:
            raise ValueError(f"no game {seed}")
        return [{"messages": [seed, place], "tools": self.text or None} for place in range(self.each)]


def made(
    folder: Path, source: Source, rows: int = 100, seconds: float = 60.0
) -> tuple[RowsReport, list[Any]]:
    end_by = time.time() + seconds
    order = RowsOrder(environment=source.name, rows=rows, end_by=end_by, cores=2, folder=str(folder))
    report = RowsGeneration(order, source).run()
    return report, list(order.made())


def test_as_many_rows_as_asked_of_as_many_games_as_that_takes(tmp_path: Path) -> None:
    report, rows = made(tmp_path, Source(each=7), rows=100)
    assert (report.rows, len(rows), report.notes) == (100, 100, ())
    assert {row["environment"] for row in rows} == {"a game"}
    assert len({tuple(row["messages"]) for row in rows}) == 100
    assert 15 <= report.games <= 20


def test_the_end_of_the_time_ends_it_and_what_is_there_stays(tmp_path: Path) -> None:
    report, rows = made(tmp_path, Source(each=LEAST_ROWS, seconds=0.05), rows=10**9, seconds=1.0)
    assert LEAST_ROWS <= report.rows <= len(rows) < 10**9
    assert report.seconds < 30


def test_without_any_time_there_are_a_few_rows(tmp_path: Path) -> None:
    report, rows = made(tmp_path, Source(), rows=10**9, seconds=-1.0)
    assert LEAST_ROWS <= report.rows <= len(rows) < 100 * LEAST_ROWS


def test_not_even_those_are_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "GRACE_S", 0.5)
    report, rows = made(tmp_path, Source(seconds=600), seconds=-1.0)
    assert (report.rows, rows) == (0, [])
    assert report.seconds < 60


def test_a_game_that_fails_now_and_then_costs_that_game(tmp_path: Path) -> None:
    report, rows = made(tmp_path, Source(fails=20), rows=300)
    assert (report.rows, report.notes) == (300, ())
    assert not [row for row in rows if row["messages"][0] % 20 == 0]


def test_a_game_that_always_fails_ends_with_the_reason(tmp_path: Path) -> None:
    report, rows = made(tmp_path, Source(fails=1))
    assert (report.rows, rows) == (0, [])
    assert "ValueError: no game" in report.notes[0]


def test_a_worker_that_is_killed_costs_no_rows_of_others(tmp_path: Path) -> None:
    report, rows = made(tmp_path, Source(dies=40), rows=200)
    assert report.rows == len(rows) == 200


def test_workers_that_always_die_end_it(tmp_path: Path) -> None:
    report, _ = made(tmp_path, Source(dies=1))
    assert report.rows == 0
    assert "killed" in report.notes[0]


def test_a_source_without_more_rows_ends_early_and_none_is_lost(tmp_path: Path) -> None:
    class Twenty(Source):
        def rows(self, seed: int) -> Sequence[dict[str, Any]]:
            time.sleep(0.1 if seed < 20 else 0.0)
            return super().rows(seed) if seed <= 20 else []

    report, rows = made(tmp_path, Twenty())
    assert (report.rows, report.notes) == (60, ())
    assert {row["messages"][0] for row in rows} == set(range(1, 21))


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_large_rows_of_workers_that_are_ended_amid_them_keep_nobody_waiting(
    tmp_path: Path, seconds: float
) -> None:
    """More than a pipe holds, so that a worker is killed in the middle of writing them."""
    source = Source(each=80, text="x" * 9000)
    report, rows = made(tmp_path, source, rows=10**9, seconds=seconds)
    assert len(rows) >= report.rows >= LEAST_ROWS
    assert report.seconds < 30


def test_what_cannot_be_played_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_source(name: str, folders: Sequence[str]) -> Source:
        raise OSError("no shell here")

    monkeypatch.setattr(generation, "source_of", no_source)
    order = RowsOrder(environment="intercode", rows=9, end_by=0.0, cores=1, folder=str(tmp_path))
    assert generation.generate(order).notes == ("intercode cannot be played: OSError: no shell here",)
    assert order.report_path.is_file()


def test_unknown_names_are_said_and_the_known_ones_are_trained() -> None:
    names = ["leduc_poker", "chess", "leduc_poker", "intercode"]
    assert known_environments(names) == ("leduc_poker", "intercode")
    [note] = unknown_environments(names)
    assert "'chess'" in note
    assert known_environments(["chess"]) == PVP_GAMES
    assert "are played instead" in unknown_environments(["chess"])[1]


def test_the_longest_rows_decide_the_length() -> None:
    assert sequence_limit_of(["leduc_poker", "chess"]) == 4096
    assert sequence_limit_of(["leduc_poker", "swe_infinite"]) == 8192


def test_a_shell_that_makes_nothing_in_its_time_fails_and_is_not_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No rows would say that there are no more tasks."""
    monkeypatch.setattr("trainer.environments.intercode.generation.generate", lambda *asked: iter(()))
    with pytest.raises(TrainingError, match="no shell task was made"):
        ShellSource().rows(1)
