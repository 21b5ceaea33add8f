"""Which source the settings name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bittensor_core import Keypair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miner.chain.identity import Identity
from miner.chain.metagraph import ChainError, Metagraph, NodesFileError, PublishOutcome
from miner.chain.sources import (
    GENESIS_HASHES,
    NodesFileSource,
    SdkSource,
    build_source,
    node_without_credentials,
    read_nodes,
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


ALICE, BOB = (Keypair.create_from_uri(uri) for uri in ("//Alice", "//Bob"))


def row(keypair: Any = ALICE, **values: Any) -> dict[str, Any]:
    return {"hotkey": keypair.ss58_address, **values}


def write(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nodes.json"


def test_every_field_of_a_node_is_read(path: Path) -> None:
    full = row(
        uid=7,
        coldkey=BOB.ss58_address,
        stake=1500.5,
        validator_permit=True,
        ip="8.8.4.4",
        port=7999,
        incentive=0.25,
        last_update=12,
        emission=3,
    )
    write(path, {"netuid": 56, "block": 9, "nodes": [full]})
    graph = read_nodes(path, 56, at=5.0)
    node = graph.nodes_by_key.get(bytes(ALICE.public_key))
    assert (graph.netuid, graph.block, graph.fetched_at, graph.source) == (56, 9, 5.0, f"file:{path}")
    assert (node.uid, node.coldkey, node.stake, node.validator_permit) == (7, BOB.ss58_address, 1500.5, True)
    assert (node.address, node.incentive, node.last_update, node.emission) == ("8.8.4.4:7999", 0.25, 12, 3.0)


def test_a_bare_list_of_hotkeys_is_enough(path: Path) -> None:
    write(path, [row(ALICE, stake=10_000), row(BOB)])
    graph = read_nodes(path, 56, at=0.0)
    assert [(node.uid, node.stake) for node in graph.nodes] == [(0, 10_000.0), (1, 0.0)]
    assert read_nodes(write(path, []), 56, at=0.0).nodes == ()


def test_the_example_in_the_docs_is_a_good_nodes_file(path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "chain.md"
    write(path, page.read_text().partition("```json")[2].partition("```")[0])
    assert len(read_nodes(path, 56, at=0.0).nodes) == 2


@each(
    ("document", "said"),
    [
        ({"nodes": [row(stake="much")]}, ["nodes[0].stake", "'much'", "number"]),
        ({"nodes": [row(stake=-1)]}, ["nodes[0].stake", "-1", "greater than or equal to 0"]),
        ('[{"hotkey": "x", "stake": NaN}]', ["nodes[0].stake", "nodes[0].hotkey"]),
        ({"nodes": [row(), {"hotkey": "5oops"}]}, ["nodes[1].hotkey", "'5oops'", "not an ss58 address"]),
        ({"nodes": [{"stake": 1}]}, ["nodes[0].hotkey", "required"]),
        ({"nodes": [row(uid=70000)]}, ["nodes[0].uid", "70000"]),
        ({"nodes": [row(port=0)]}, ["nodes[0].port", "0"]),
        ({"nodes": [row(ip="localhost")]}, ["nodes[0].ip", "'localhost'", "not an IPv4 or IPv6 address"]),
        ({"nodes": [row(validator_permit="yes")]}, ["nodes[0].validator_permit", "'yes'"]),
        ({"nodes": [row(stakes=1)]}, ["nodes[0].stakes", "not permitted"]),
        ({"nodes": [row(incentive=2)]}, ["nodes[0].incentive", "2"]),
        ({"nodes": {}}, ["nodes", "{}", "array"]),
        ({"netuid": 1, "nodes": []}, ["netuid", "1", "NETUID=56"]),
        ({"nodes": [row(uid=1), row(BOB, uid=1)]}, ["uid 1 is given to both"]),
        ({"nodes": [row(), row()]}, ["uids 0 and 1 have the same hotkey"]),
        ("{", ["JSON"]),
        ("", ["JSON"]),
        ("[1, 2", ["JSON"]),
        ("null", ["the file"]),
    ],
)
def test_a_bad_file_is_refused_with_the_file_the_field_and_the_value(
    path: Path, document: Any, said: list[str]
) -> None:
    with pytest.raises(NodesFileError) as caught:
        read_nodes(write(path, document), 56, at=0.0)
    for part in (str(path), *said):
        assert part in str(caught.value)


def test_all_problems_are_reported_at_once(path: Path) -> None:
    write(path, [row(stake=-1), row(BOB, port=0)])
    with pytest.raises(NodesFileError) as caught:
        read_nodes(path, 56, at=0.0)
    assert [problem.where for problem in caught.value.problems] == ["nodes[0].stake", "nodes[1].port"]


def test_a_missing_file_is_named_with_the_settings_to_change(path: Path) -> None:
    with pytest.raises(NodesFileError, match=r"nodes\.json.*\n.*NODES_FILE"):
        read_nodes(path, 56, at=0.0)


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["nodes", "netuid", "hotkey", "uid"]), inner)
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | JSONISH.map(lambda value: json.dumps(value).encode()))
def test_any_content_is_a_metagraph_or_a_clear_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        outcome: Metagraph | NodesFileError = read_nodes(path, 56, at=0.0)
    except NodesFileError as error:
        outcome = error
    assert isinstance(outcome, Metagraph) or (outcome.problems and str(path) in str(outcome))


async def test_an_edit_counts_at_the_next_reading_also_one_of_the_same_size(path: Path) -> None:
    source = NodesFileSource(write(path, [row(stake=1)]), 56)
    await source.metagraph()
    write(path, [row(stake=2), row(BOB)])
    assert [node.stake for node in (await source.metagraph()).nodes] == [2.0, 0.0]
    before = path.stat()
    write(path, [row(stake=3), row(BOB)])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert [node.stake for node in (await source.metagraph()).nodes] == [3.0, 0.0]


async def test_an_untouched_file_is_not_parsed_again_but_its_age_is_new(path: Path) -> None:
    times = iter([1.0, 2.0, 3.0, 4.0])
    source = NodesFileSource(write(path, [row()]), 56, clock=lambda: next(times))
    first = await source.metagraph()
    second = await source.metagraph()
    assert second.nodes is first.nodes
    assert second.fetched_at > first.fetched_at


async def test_a_file_that_is_invalid_or_gone_raises_at_every_reading_until_it_is_mended(path: Path) -> None:
    source = NodesFileSource(write(path, [row()]), 56)
    await source.metagraph()
    write(path, "[oops")
    for _ in range(2):
        with pytest.raises(NodesFileError):
            await source.metagraph()
    path.unlink()
    with pytest.raises(NodesFileError, match="no such file"):
        await source.metagraph()
    write(path, [row(), row(BOB)])
    assert len((await source.metagraph()).nodes) == 2


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"netuid": 56, "nodes": rows}])
async def test_publishing_writes_the_own_row_and_nothing_else(path: Path, wrap: Any) -> None:
    write(path, wrap([row(BOB, stake=5), row(ALICE, stake=3)])).chmod(0o644)
    source = NodesFileSource(path, 56, identity=Identity(ALICE))
    result = await source.publish_axon("8.8.4.4", 7999)
    again = await source.publish_axon("8.8.4.4", 7999)
    assert (result.outcome, again.outcome) == (PublishOutcome.PUBLISHED, PublishOutcome.UNCHANGED)
    assert json.loads(path.read_text()) == wrap(
        [row(BOB, stake=5), row(ALICE, stake=3, ip="8.8.4.4", port=7999)]
    )
    assert path.stat().st_mode & 0o777 == 0o644


async def test_the_rules_for_addresses_hold_here_too(path: Path) -> None:
    write(path, [row()])
    with pytest.raises(ChainError):
        await NodesFileSource(path, 56, identity=Identity(ALICE)).publish_axon("127.0.0.1", 7999)
    with pytest.raises(ChainError):
        await NodesFileSource(path, 56).publish_axon("8.8.4.4", 7999)
    stranger = NodesFileSource(path, 56, identity=Identity(BOB))
    assert (await stranger.publish_axon("8.8.4.4", 7999)).outcome is PublishOutcome.REFUSED
    allowed = NodesFileSource(path, 56, identity=Identity(ALICE), allow_private=True)
    assert (await allowed.publish_axon("127.0.0.1", 7999)).ok
