"""The last good metagraph on disk, so that a restart while the chain is down still knows the validators."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from core.files import write_atomically
from miner.chain.base import ChainSource, Metagraph
from miner.chain.rows import NodeRow, nodes_of, problems

log = logging.getLogger(__name__)

#: Its name in the data directory.
CACHE_FILE = "metagraph.json"


class _Cached(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    source: str
    netuid: int
    genesis: str | None
    block: int | None
    fetched_at: float
    nodes: list[NodeRow]


def save(path: Path, graph: Metagraph) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = _Cached(
        source=graph.source,
        netuid=graph.netuid,
        genesis=graph.genesis,
        block=graph.block,
        fetched_at=graph.fetched_at,
        nodes=[NodeRow(**asdict(node)) for node in graph.nodes],
    )
    write_atomically(path, document.model_dump_json().encode())


def load(path: Path, source: ChainSource) -> Metagraph | None:
    """The cached metagraph, if it is whole and of the subnet that `source` serves; else a log line."""
    try:
        cached = _Cached.model_validate_json(path.read_bytes())
        graph = Metagraph(
            netuid=cached.netuid,
            block=cached.block,
            fetched_at=cached.fetched_at,
            source=cached.source,
            nodes=nodes_of(cached.nodes),
            genesis=cached.genesis,
        )
    except FileNotFoundError:
        return None
    except ValidationError as error:
        log.warning("ignoring the metagraph cache %s: %s", path, problems(error)[0])
        return None
    except (OSError, ValueError) as error:
        log.warning("ignoring the metagraph cache %s: %s", path, error)
        return None
    if not belongs(graph, source):
        log.warning(
            "ignoring the metagraph cache %s: it is of subnet %d from %s, not of subnet %d from %s",
            path,
            graph.netuid,
            graph.source,
            source.netuid,
            source.name,
        )
        return None
    return graph


def belongs(graph: Metagraph, source: ChainSource) -> bool:
    """Whether a metagraph is of the subnet and the chain that `source` serves.

    Chains are told apart by genesis hash where both are known, so that moving to another node of the same
    chain keeps the cache; by the source's name where not.
    """
    if graph.netuid != source.netuid:
        return False
    if graph.genesis is not None and source.genesis is not None:
        return graph.genesis == source.genesis
    return graph.source == source.name
