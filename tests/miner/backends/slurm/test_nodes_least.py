"""What nodes offer, by scontrol."""

from __future__ import annotations

import pytest

from miner.backends.slurm.nodes import NodeSize, least_size, parse_nodes, parse_partitions

pytestmark = pytest.mark.process


NODES = parse_nodes(
    "NodeName=n1 CPUTot=64 CPUEfctv=62 RealMemory=515000 MemSpecLimit=3000 Gres=gpu:h100:8(S:0-1) "
    "State=IDLE Partitions=train\n"
    "NodeName=n2 CPUTot=32 RealMemory=257000 Gres=gpu:a100:4,nvme:1 State=MIXED Partitions=train,short\n"
    "NodeName=n3 CPUTot=8 RealMemory=1000 Gres=(null) State=IDLE Partitions=short\n"
)
PARTITIONS = parse_partitions(
    "PartitionName=train Default=YES State=UP MaxTime=1-12:30:00\n"
    "PartitionName=short Default=NO State=UP MaxTime=5:00\n"
    "PartitionName=long Default=NO State=UP MaxTime=UNLIMITED\n"
)


def test_the_least_of_the_partitions_nodes_counts() -> None:
    assert least_size(NODES, PARTITIONS, "", False) == NodeSize(32, 257_000 << 20, 4, "", 131_400.0)
    assert least_size(NODES, PARTITIONS, "short,train", False) == NodeSize(8, 1000 << 20, 0, "", 300.0)
    assert least_size(NODES, PARTITIONS, "long", False) is None
    assert least_size([], PARTITIONS, "", False) is None


def test_what_slurm_keeps_for_itself_is_not_offered() -> None:
    size = least_size(NODES[:1], PARTITIONS, "long", True)
    assert size == NodeSize(62, 512_000 << 20, 8, "", None)


def test_where_a_node_has_several_types_the_one_that_it_has_most_of_is_named() -> None:
    nodes = parse_nodes("NodeName=n1 CPUTot=8 RealMemory=9 Gres=gpu:h100:2,gpu:1g.10gb:7 Partitions=train\n")
    size = least_size(nodes, PARTITIONS, "", True)
    assert size is not None
    assert (size.gpus, size.gpu_type) == (7, "1g.10gb")
