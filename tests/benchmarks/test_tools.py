import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import garbage, machine, report, subjects
from benchmarks.load_kind import LoadKind

pytestmark = pytest.mark.process


def test_the_slope_is_growth_per_request() -> None:
    assert garbage.slope([(0, 100.0), (1000, 102.0), (2000, 104.0)]) == pytest.approx(0.002)
    assert garbage.slope([(0, 7.0), (1000, 7.0)]) == 0.0
    assert garbage.slope([(0, 7.0)]) == 0.0


def test_memory_is_counted_with_the_children() -> None:
    own = machine.rss_mb(os.getpid())
    assert 5 < own < 4000


def test_sizes_are_of_the_files_that_match(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite3").write_bytes(b"x" * 2048)
    (tmp_path / "a.sqlite3-wal").write_bytes(b"x" * 1024)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log").write_bytes(b"x" * 512)
    assert machine.size_kb(tmp_path, "*.sqlite*") == 3.0
    assert machine.size_kb(tmp_path) == 3.5


def test_facts_tell_the_machine_and_the_versions() -> None:
    facts = machine.facts()
    assert "uvicorn" in facts["libraries"]
    assert facts["CPU"][0].isdigit()


def test_a_report_is_a_table_with_its_notes_and_a_file_of_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    things = report.Report("Things", ("thing", "n"), [("a", "1")], ["[b]of note[/b]"], {"runs": [1]})
    console = Console(record=True, width=60, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        things.show(console)
    assert "Things" in (text := console.export_text())
    assert "[b]of note[/b]" in text
    written = json.loads(things.write("things", {"CPU": "1"}).read_text())
    assert written == {"benchmark": "things", "machine": {"CPU": "1"}, "runs": [1]}


def test_the_generator_and_the_bare_server_work_as_processes() -> None:
    with subjects.ground() as ground, subjects.bare_server(ground) as server:
        done = subjects.load(ground, server.port, LoadKind.OFFER, 200, concurrency=5)
        assert (done["answered"], done["errors"]) == (200, 0)
        refused = subjects.load(ground, server.port, LoadKind.GARBAGE, 50, concurrency=5)
        assert refused["errors"] == 50  # it answers 200 to everything, which garbage must not get


def a_run(p99: float | None, **more: object) -> dict:
    return {"latency_ms": {"p99": p99}, "errors": 0, "statuses": {}, "failures": {}, **more}


def test_a_latency_is_the_median_of_the_runs_that_had_answers() -> None:
    assert report.latency([a_run(1.0), a_run(9.0), a_run(2.0), a_run(None)], "p99") == "2.0"
    assert report.latency([a_run(None)], "p99") == "-"


def test_errors_are_shown_with_what_came_instead() -> None:
    good = a_run(1.0, statuses={"200": 7})
    bad = a_run(1.0, errors=3, statuses={"200": 5, "500": 2}, failures={"connection lost": 1})
    assert report.errors_of("it", [good]) == []
    (note,) = report.errors_of("it", [good, bad, bad])
    assert "10 × 200, 4 × 500, 2 × connection lost" in note
