"""Which source the settings name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miner.chain.sources import (
    GENESIS_HASHES,
    NodesFileSource,
    SdkSource,
    build_source,
    node_without_credentials,
)
from miner.settings import load_settings
from tests.doubles.each import each

NODE = {"CHAIN": "bittensor", "SUBTENSOR_ADDRESS": "ws://127.0.0.1:9944"}


@each(
    ("env", "kind", "name", "genesis"),
    [
        (
            {"CHAIN": "file", "NODES_FILE": "nodes.json"},
            NodesFileSource,
            f"file:{Path.cwd()}/nodes.json",
            None,
        ),
        ({"CHAIN": "bittensor"}, SdkSource, "bittensor:finney", GENESIS_HASHES["finney"]),
        # An address takes the place of the network, and may be of any chain.
        (NODE, SdkSource, "bittensor:ws://127.0.0.1:9944", None),
    ],
)
def test_the_settings_name_the_source(
    env: dict[str, str], kind: type[Any], name: str, genesis: str | None
) -> None:
    source = build_source(load_settings(env=env, env_file=None), None)
    assert isinstance(source, kind)
    assert (source.name, source.netuid, source.genesis) == (name, 56, genesis)


@each(
    ("node", "shown"),
    [
        ("finney", "finney"),
        ("wss://user:pass@node.example:443/v1/t0ken?key=s3cret", "wss://node.example:443"),
        ("ws://[2001:db8::1]:9944/x", "ws://[2001:db8::1]:9944"),
        ("wss://node.example", "wss://node.example"),
    ],
)
def test_a_nodes_name_shows_no_token(node: str, shown: str) -> None:
    assert node_without_credentials(node) == shown


@pytest.mark.process
def test_the_daemons_side_of_it_never_imports_the_sdk() -> None:
    code = (
        "import sys, miner.chain.metagraph_refresh, miner.cli.chain;"
        "print({name.split('.')[0] for name in sys.modules} & {'bittensor', 'websockets', 'eth_account'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
