"""One of several ranks: says what it heard from the others.

usage: python -m tests.trainer.callbacks.rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment)
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from trainer.callbacks.ranks import ranks_here


def main() -> None:
    dist.init_process_group("gloo")
    ranks = ranks_here(torch.device("cpu"))
    heard = {
        "rank": ranks.rank,
        "world": ranks.world,
        "first": ranks.from_first([3.5, -1.0] if ranks.rank == 0 else [0.0, 0.0]),
        # Times since the epoch must survive the way to the others to the millisecond.
        "precise": ranks.from_first([1_790_000_000.123 if ranks.rank == 0 else 0.0]),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
        "gathered": ranks.gather([float(ranks.rank)] * (ranks.rank + 1)),
    }
    ranks.wait()
    print(json.dumps(heard))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
