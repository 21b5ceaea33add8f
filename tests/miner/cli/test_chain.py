from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from miner.chain.hotkey import Hotkey
from miner.chain.identity import create_temporary_hotkey
from miner.chain.metagraph_refresh import METAGRAPH_FILE, save_metagraph
from miner.chain.sources import SdkSource, read_nodes
from miner.cli.chain import NEEDS_ACTION, UNDECIDED, app
from miner.settings import Settings
from tests.doubles.chain import Subtensor
from tests.doubles.chain_fixtures import NETUID, chain_spec, node, subtensor
from tests.doubles.chain_node import WATCH, ChainDouble, Fault

pytestmark = pytest.mark.process


__all__ = ["chain_spec", "node", "subtensor"]

PUBLIC = ["--ip", "8.8.4.4", "--port", "7999"]


class Cli:
    """The commands, on a wallet and a nodes file of this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            "CHAIN": "file",
            "DATA_DIR": str(folder / "data"),
            "NODES_FILE": str(folder / "nodes.json"),
            "WALLET_PATH": str(folder / "wallets"),
        }

    def __call__(self, *args: str, **env: str) -> Result:
        return CliRunner().invoke(app, list(args), env=self.env | env)

    def json(self, *args: str, **env: str) -> tuple[int, Any]:
        result = self(*args, "--json", **env)
        return result.exit_code, json.loads(result.stdout)

    def nodes(self, *hotkeys: str) -> None:
        rows = [{"hotkey": hotkey, "stake": 5.0, "incentive": 0.5} for hotkey in hotkeys]
        (self.folder / "nodes.json").write_text(json.dumps(rows))


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(tmp_path)


@pytest.fixture
def hotkey(cli: Cli) -> str:
    address = create_temporary_hotkey(cli.folder / "wallets", "default").ss58_address
    cli.nodes(address)
    return address


def test_status_shows_the_subnet_and_the_own_place_in_it(cli: Cli, hotkey: str) -> None:
    code, shown = cli.json("status")
    assert code == 0
    assert shown["hotkey"] == hotkey
    assert (shown["registered"], shown["uid"], shown["rank"], shown["stake"]) == (True, 0, 1, 5.0)
    assert (shown["nodes"], shown["netuid"], shown["from_cache"]) == (1, NETUID, False)

    result = cli("status")
    assert result.exit_code == 0
    for part in (hotkey, "registered", "yes", "age seconds", f"file:{cli.folder}/nodes.json"):
        assert part.replace(" ", "") in "".join(result.stdout.split())


def test_status_falls_back_on_the_daemons_copy_and_says_so(cli: Cli, hotkey: str) -> None:
    nodes = cli.folder / "nodes.json"
    save_metagraph(cli.folder / "data" / METAGRAPH_FILE, read_nodes(nodes, NETUID, at=1000.0))
    nodes.write_text("oops")

    code, shown = cli.json("status")

    assert code == os.EX_CONFIG
    assert (shown["from_cache"], shown["registered"]) == (True, True)
    assert shown["age_seconds"] > 1e6
    assert "nodes.json" in shown["error"]


def test_status_shows_what_it_knows_without_a_metagraph_or_a_hotkey(cli: Cli) -> None:
    code, shown = cli.json("status")
    assert (code, shown["registered"]) == (os.EX_CONFIG, None)
    assert "no such file" in shown["error"]

    cli.nodes()
    code, shown = cli.json("status")
    assert (code, shown["nodes"]) == (NEEDS_ACTION, 0)
    assert "there is no hotkey at" in shown["hotkey_problem"]


def test_an_unregistered_hotkey_is_shown_how_to_register(cli: Cli, hotkey: str) -> None:
    code, shown = cli.json("register-check")
    assert (code, shown["registered"], shown["uid"]) == (0, True, 0)

    cli.nodes()
    result = cli("register-check")
    assert result.exit_code == NEEDS_ACTION
    assert "btcli subnets register --netuid 56" in " ".join(result.stdout.split())


def test_publishing_writes_the_address_once(cli: Cli, hotkey: str) -> None:
    first = cli.json("publish-ip", *PUBLIC, "--yes")
    second = cli.json("publish-ip", *PUBLIC, "--yes")

    assert (first[0], first[1]["outcome"]) == (0, "published")
    assert (second[0], second[1]["outcome"]) == (0, "unchanged")
    assert cli.json("status")[1]["axon"] == "8.8.4.4:7999"


def test_address_and_port_come_from_the_settings_if_left_out(cli: Cli, hotkey: str) -> None:
    result = cli("publish-ip", "--yes", PUBLIC_IP="8.8.8.8", PUBLIC_PORT="8111")

    assert result.exit_code == 0
    assert "8.8.8.8:8111" in result.stdout


def test_publishing_asks_first_and_needs_a_yes_where_nobody_answers(cli: Cli, hotkey: str) -> None:
    result = cli("publish-ip", *PUBLIC)

    assert result.exit_code == os.EX_CONFIG
    assert "add it" in result.stderr
    assert cli.json("status")[1]["axon"] is None


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ([], "give the public address with --ip, or set PUBLIC_IP"),
        (["--ip", "10.0.0.1"], "ALLOW_PRIVATE_AXON"),
        (["--ip", "example.org"], "'example.org' is not an IP address"),
        (["--ip", "8.8.4.4", "--port", "0"], "port 0 is not a TCP port"),
    ],
)
def test_an_address_of_no_use_is_refused_with_the_reason(
    cli: Cli, hotkey: str, arguments: list[str], reported: str
) -> None:
    result = cli("publish-ip", *arguments, "--yes")

    assert result.exit_code != 0
    assert reported in result.stderr
    code, shown = cli.json("publish-ip", *arguments, "--yes")
    assert code == result.exit_code
    assert reported in shown["error"]["message"]


def test_an_ipv6_address_is_published_with_a_warning(cli: Cli, hotkey: str) -> None:
    result = cli("publish-ip", "--ip", "2001:4860:4860::8844", "--yes")

    assert result.exit_code == 0
    assert "validators cannot call an IPv6 address" in result.stderr


def test_publishing_without_a_hotkey_names_the_settings(cli: Cli) -> None:
    cli.nodes()

    code, shown = cli.json("publish-ip", *PUBLIC, "--yes")

    assert code == os.EX_CONFIG
    assert shown["error"]["code"] == "hotkey_missing"


@pytest.fixture
def on_chain(subtensor: Subtensor, node: ChainDouble, hotkey: str) -> dict[str, str]:
    """The settings for a chain on which the hotkey is uid 20."""
    subtensor.subnets[NETUID][20].hotkey = hotkey
    return {"CHAIN": "bittensor", "SUBTENSOR_ADDRESS": node.url}


@pytest.mark.thorough
def test_publishing_and_status_go_through_the_real_sdk(cli: Cli, on_chain: dict[str, str]) -> None:
    code, published = cli.json("publish-ip", *PUBLIC, "--yes", **on_chain)
    assert (code, published["outcome"]) == (0, "published")

    code, shown = cli.json("status", **on_chain)

    assert code == 0
    assert (shown["uid"], shown["axon"], shown["block"]) == (20, "8.8.4.4:7999", 101)
    assert shown["validators"] == 2


def test_a_chain_that_is_down_has_an_exit_code_of_its_own(
    cli: Cli, on_chain: dict[str, str], node: ChainDouble
) -> None:
    node.stop()

    code, shown = cli.json("status", **on_chain)

    assert code == os.EX_UNAVAILABLE
    assert "ws://127.0.0.1" in shown["error"]


def test_a_submission_of_unknown_fate_has_an_exit_code_of_its_own(
    cli: Cli, on_chain: dict[str, str], node: ChainDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(settings: Settings, identity: Hotkey | None) -> SdkSource:
        return SdkSource(NETUID, address=node.url, identity=identity, submit_timeout=1.0, read_back=(0.0,))

    monkeypatch.setattr("miner.chain.sources.build_source", impatient)
    node.faults[WATCH] = Fault.DROP

    code, shown = cli.json("publish-ip", *PUBLIC, "--yes", **on_chain)

    assert (code, shown["outcome"]) == (UNDECIDED, "unknown")
