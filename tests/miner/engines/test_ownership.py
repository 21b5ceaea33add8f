"""The data directory's id, and processes of a run, found by their mark."""

from __future__ import annotations

import os
import secrets
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from miner.engines.ownership import (
    DATA_ID_FILE,
    MARK_VARIABLE,
    DataIdUnusable,
    data_id,
    kill_marked,
    marked_processes,
    run_mark,
)


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    first = data_id(tmp_path / "new")
    assert data_id(tmp_path / "new") == first
    assert data_id(tmp_path / "other") != first
    assert [path.name for path in (tmp_path / "new").iterdir()] == [DATA_ID_FILE]


def test_concurrent_callers_get_the_same_id(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(lambda _: data_id(tmp_path), range(16)))) == 1


@pytest.mark.parametrize("content", ["", "short", "../../etc", "0" * 17])
def test_an_invalid_id_is_rejected(content: str, tmp_path: Path) -> None:
    (tmp_path / DATA_ID_FILE).write_text(content)
    with pytest.raises(DataIdUnusable, match="16 hexadecimal"):
        data_id(tmp_path)


def test_an_unwritable_data_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataIdUnusable, match="DATA_DIR"):
        data_id(tmp_path / "file")


def test_all_that_carry_the_mark_are_found_and_ended_and_nobody_else() -> None:
    value = run_mark(secrets.token_hex(8), "key-1")
    environment = {**os.environ, MARK_VARIABLE: value}
    ours = [subprocess.Popen(["sleep", "60"], env=environment) for _ in range(2)]
    longer = {**os.environ, MARK_VARIABLE: f"{value}0"}
    others = [subprocess.Popen(["sleep", "60"], env=longer), subprocess.Popen(["sleep", "60"])]
    try:
        while marked_processes(value) != {process.pid for process in ours}:
            assert all(process.poll() is None for process in ours)
        assert kill_marked(value) == 2
        assert [process.wait(60) for process in ours] == [-9, -9]
        assert kill_marked(value) == 0
        assert [process.poll() for process in others] == [None, None]
    finally:
        for process in (*ours, *others):
            process.kill()
            process.wait()
