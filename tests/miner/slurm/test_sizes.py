"""What nodes offer, by sinfo."""

from __future__ import annotations

import pytest

from miner.slurm.sizes import NodeSize, gpu_count, least_size, time_limit


def test_the_least_of_the_nodes_of_the_default_partition_counts() -> None:
    text = (
        "64|515000|gpu:h100:8(S:0-1)|2-00:00:00|train*\n"
        "32+|257000+|gpu:a100:4,nvme:1|1-12:30:00|train*\n"
        "8|1000|(null)|5:00|short\n"
    )
    assert least_size(text, any_partition=False) == NodeSize(32, 257_000 << 20, 4, 131_400.0)
    assert least_size(text) == NodeSize(8, 1000 << 20, 0, 300.0)
    assert least_size("") is None


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:4", 4),
        ("gpu:h100:4(S:0-1),gpu:a100:2", 6),
        ("(null)", 0),
        ("nvme:1,gpu:1", 1),
        ("gpu:1g.5gb:7", 7),
    ],
)
def test_gpus_are_counted_whatever_their_type(gres: str, count: int) -> None:
    assert gpu_count(gres) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("infinite", None), ("5:00", 300.0), ("1:00:00", 3600.0), ("1-00:00:00", 86_400.0), ("n/a", None)],
)
def test_a_time_limit_is_in_seconds(text: str, seconds: float | None) -> None:
    assert time_limit(text) == seconds
