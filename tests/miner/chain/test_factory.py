from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from miner.chain.factory import build_source
from miner.chain.nodes_file import NodesFileSource
from miner.chain.sdk import GENESIS, SdkSource, shown_node


@dataclass
class Asked:
    netuid: int = 56
    chain: str = "bittensor"
    subtensor_network: str = "finney"
    subtensor_address: str | None = None
    nodes_file: Path = Path("nodes.json")
    data_dir: Path = Path("data")
    chain_timeout_seconds: float = 30.0
    allow_private_axon: bool = False


def test_the_file_is_the_source_where_it_is_asked_for() -> None:
    source = build_source(Asked(chain="file"), None)

    assert isinstance(source, NodesFileSource)
    assert (source.name, source.netuid, source.genesis) == ("file:nodes.json", 56, None)


def test_the_chain_is_the_source_where_it_is_asked_for() -> None:
    source = build_source(Asked(), None)

    assert isinstance(source, SdkSource)
    assert (source.name, source.netuid, source.genesis) == ("bittensor:finney", 56, GENESIS["finney"])


def test_an_address_takes_the_networks_place_and_promises_no_chain() -> None:
    source = build_source(Asked(subtensor_address="ws://127.0.0.1:9944"), None)

    assert (source.name, source.genesis) == ("bittensor:ws://127.0.0.1:9944", None)


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        ("finney", "finney"),
        ("wss://user:pass@node.example:443/v1/t0ken?key=s3cret", "wss://node.example:443"),
        ("ws://[2001:db8::1]:9944/x", "ws://[2001:db8::1]:9944"),
        ("wss://node.example", "wss://node.example"),
    ],
)
def test_a_nodes_name_shows_no_token(node: str, shown: str) -> None:
    assert shown_node(node) == shown


def test_the_daemons_side_of_it_never_imports_the_sdk() -> None:
    code = (
        "import sys, miner.chain.factory, miner.chain.keeper, miner.commands.chain;"
        "print({name.split('.')[0] for name in sys.modules} & {'bittensor', 'websockets', 'eth_account'})"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
