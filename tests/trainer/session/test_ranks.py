"""Agreement between processes, over a real process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.forks import ForkServer
from tests.trainer.sharding import together
from trainer.session.ranks import Communicator, communicator


def each_hears_the_first_and_the_others(rank: int) -> None:
    ranks = communicator(torch.device("cpu"))
    assert (ranks.rank, ranks.world) == (rank, 2)
    assert ranks.from_first([3.5, -1.0] if rank == 0 else [0.0, 0.0]) == [3.5, -1.0]
    # Times since the epoch must survive the way to the others to the millisecond.
    (precise,) = ranks.from_first([1_790_000_000.123 if rank == 0 else 0.0])
    assert precise == pytest.approx(1_790_000_000.123, abs=1e-3)
    assert ranks.any(rank == 1)
    assert not ranks.any(False)
    assert ranks.gather([float(rank)] * (rank + 1)) == [0.0, 1.0, 1.0]
    ranks.barrier()


def test_all_ranks_get_the_firsts_numbers_and_each_others(forks: ForkServer, tmp_path: Path) -> None:
    assert together(forks, tmp_path, each_hears_the_first_and_the_others)


def test_a_process_alone_agrees_with_itself() -> None:
    ranks = communicator(torch.device("cpu"))
    assert isinstance(ranks, Communicator)
    assert ranks.gather([1.0, 2.0]) == ranks.from_first([1.0, 2.0]) == [1.0, 2.0]
    assert ranks.any(True)
    ranks.barrier()
