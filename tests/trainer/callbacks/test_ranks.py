"""Agreement between processes, over a real process group."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.callbacks.ranks import OneRank, ranks_here

ROOT = Path(__file__).parents[3]


def test_all_ranks_hear_the_first_and_each_other() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.callbacks.rank"],
            cwd=ROOT,
            env={**os.environ, **group, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [json.loads(process.communicate(timeout=180)[0].splitlines()[-1]) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [one["rank"] for one in said] == [0, 1]
    for one in said:
        assert one["world"] == 2
        assert one["first"] == [3.5, -1.0]
        assert one["precise"][0] == pytest.approx(1_790_000_000.123, abs=1e-3)
        assert one["any"] == [True, False]
        assert one["gathered"] == [0.0, 1.0, 1.0]


def test_a_process_alone_agrees_with_itself() -> None:
    ranks = ranks_here(torch.device("cpu"))
    assert isinstance(ranks, OneRank)
    assert ranks.gather([1.0, 2.0]) == ranks.from_first([1.0, 2.0]) == [1.0, 2.0]
    assert ranks.any(True)
    ranks.wait()
