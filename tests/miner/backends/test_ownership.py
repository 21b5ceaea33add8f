"""Processes of a run, found by their mark."""

from __future__ import annotations

import os
import secrets
import subprocess

import pytest

from miner.backends.ownership import (
    MARK_VARIABLE,
    kill_marked,
    marked_processes,
    run_mark,
)


@pytest.mark.process
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
