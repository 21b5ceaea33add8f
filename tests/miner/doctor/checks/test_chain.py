"""The subnet's findings, from a source that says what it is told to."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miner.chain.base import Metagraph, Node
from miner.chain.errors import ChainUnavailable
from miner.doctor import Finding, Status, Surroundings
from miner.doctor.checks import chain
from miner.identity import create_throwaway
from miner.settings import Settings, load_settings

ALICE = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
BOB = "5FHneW46xGXgs5mUiveU4sbTyGBzmstUspZC92UhjJM694ty"


class Source:
    def __init__(self, answer: Metagraph | Exception) -> None:
        self.answer, self.closed = answer, False

    async def metagraph(self) -> Metagraph:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def own(tmp_path: Path) -> str:
    return create_throwaway(tmp_path / "wallets", "default").ss58_address


def node(uid: int, hotkey: str, stake: float = 0.0, **more: Any) -> Node:
    fields = {"validator_permit": False, "ip": None, "port": None, **more}
    return Node(uid=uid, hotkey=hotkey, coldkey=ALICE, stake=stake, **fields)


def graph(*nodes: Node) -> Metagraph:
    return Metagraph(56, 4_000_000, 0.0, "a double", nodes)


def settings(tmp_path: Path, **more: Any) -> Settings:
    given = {"chain": "bittensor", "public_ip": "8.8.4.4", "wallet_path": tmp_path / "wallets", **more}
    return load_settings(env={}, env_file=None, data_dir=tmp_path, **given)


def look(
    monkeypatch: pytest.MonkeyPatch, answer: Metagraph | Exception, given: Settings
) -> tuple[dict[str, Finding], Source]:
    source = Source(answer)
    monkeypatch.setattr("miner.chain.factory.build_source", lambda _settings, _identity: source)
    return {finding.what: finding for finding in chain.run(Surroundings(given))}, source


def test_a_registered_hotkey_with_the_right_address_is_good(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = graph(node(3, own, ip="8.8.4.4", port=7999), node(4, BOB, stake=5000, validator_permit=True))
    found, source = look(monkeypatch, nodes, settings(tmp_path))
    assert {name: finding.status for name, finding in found.items()} == {
        "chain": Status.OK,
        "callers": Status.OK,
        "registration": Status.OK,
        "published address": Status.OK,
    }
    assert "uid 3" in found["registration"].detail
    assert "2 nodes on subnet 56 at block 4000000" in found["chain"].detail
    assert source.closed


def test_an_unregistered_hotkey_is_told_with_the_command_that_registers_it(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = look(monkeypatch, graph(node(4, BOB)), settings(tmp_path))
    assert found["registration"].status is Status.FAIL
    assert own in found["registration"].detail
    assert "btcli subnets register --netuid 56 -w default -H default" in found["registration"].fix
    assert "published address" not in found


@pytest.mark.parametrize(
    ("published", "given", "status", "way_out"),
    [
        ({}, {}, Status.FAIL, "god-miner chain publish-ip"),
        ({}, {"public_ip": None}, Status.FAIL, "set PUBLIC_IP"),
        ({"ip": "8.8.4.4", "port": 8000}, {}, Status.FAIL, "PUBLISHED_PORT"),
        ({"ip": "8.8.4.5", "port": 7999}, {}, Status.FAIL, "publish-ip"),
        ({"ip": "8.8.4.4", "port": 7999}, {"public_ip": None}, Status.WARN, "PUBLIC_IP"),
        ({"ip": "8.8.4.4", "port": 40123}, {"published_port": 40123}, Status.OK, ""),
    ],
)
def test_the_published_address_is_compared_with_the_settings(
    published: dict[str, Any],
    given: dict[str, Any],
    status: Status,
    way_out: str,
    tmp_path: Path,
    own: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = look(monkeypatch, graph(node(3, own, **published)), settings(tmp_path, **given))
    assert found["published address"].status is status
    assert way_out in found["published address"].fix


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, 1),
        ({"min_stake_threshold": 0}, 1),
        ({"min_stake_threshold": 0, "require_validator_permit": False}, 2),
        ({"min_stake_threshold": 0, "require_validator_permit": False, "deny_hotkeys": BOB}, 1),
        ({"min_stake_threshold": 0, "allow_hotkeys": BOB}, 1),
        ({"allow_hotkeys": ALICE}, 0),
    ],
)
def test_how_many_callers_the_gate_lets_in_is_counted(
    given: dict[str, Any], count: int, tmp_path: Path
) -> None:
    nodes = graph(node(0, ALICE, stake=10), node(1, BOB, stake=2000, validator_permit=True))
    finding = chain.callers(nodes, settings(tmp_path, **given))
    assert finding.detail.startswith(f"{count} of 2" if count else "not one of 2")
    assert finding.status is (Status.OK if count else Status.WARN)


@pytest.mark.parametrize(
    "error", [ChainUnavailable("node closed"), TimeoutError(), ConnectionRefusedError("no")]
)
def test_a_chain_that_can_not_be_read_is_one_finding_and_the_source_is_closed(
    error: Exception, tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, source = look(monkeypatch, error, settings(tmp_path))
    assert list(found) == ["chain"]
    assert found["chain"].status is Status.FAIL
    assert "SUBTENSOR_ADDRESS" in found["chain"].fix
    assert source.closed


def test_a_chain_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(graph())

    async def silent() -> Metagraph:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(source, "metagraph", silent)
    monkeypatch.setattr("miner.chain.factory.build_source", lambda _settings, _identity: source)
    (finding,) = chain.run(Surroundings(settings(tmp_path, chain_timeout_seconds=0.01)))
    assert finding.status is Status.FAIL


def test_without_a_hotkey_the_rest_of_the_chain_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = look(monkeypatch, graph(node(4, BOB, stake=5000, validator_permit=True)), settings(tmp_path))
    assert found["callers"].status is Status.OK
    assert found["registration"].status is Status.SKIP


def test_a_nodes_file_is_read_for_real_and_good_for_trials(tmp_path: Path, own: str) -> None:
    given = settings(tmp_path, chain="file")
    (missing,) = chain.run(Surroundings(given))
    assert missing.status is Status.FAIL
    assert str(given.nodes_file) in missing.fix
    row = '{"uid": 1, "hotkey": "%s", "coldkey": "%s", "stake": 5000.0}'
    given.nodes_file.write_text("[" + row % (BOB, ALICE) + "]")
    found = {finding.what: finding for finding in chain.run(Surroundings(given))}
    assert found["chain"].status is Status.OK
    assert found["registration"].status is Status.WARN
    given.nodes_file.write_text("[" + row % (own, ALICE) + "]")
    found = {finding.what: finding for finding in chain.run(Surroundings(given))}
    assert found["registration"].status is Status.OK
    assert found["published address"].status is Status.SKIP
