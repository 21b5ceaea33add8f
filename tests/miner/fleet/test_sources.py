"""Facts about the host of the GPUs."""

from __future__ import annotations

from pathlib import Path

from miner.fleet.sources import physical_cores


def test_hardware_threads_are_found_together_and_only_those_that_may_be_used(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / f"cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    every = frozenset(range(8))
    assert physical_cores(every, tmp_path) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert physical_cores(frozenset({1, 2, 5}), tmp_path) == ((1, 5), (2,))
    assert physical_cores(every, tmp_path / "none") == tuple((number,) for number in range(8))
