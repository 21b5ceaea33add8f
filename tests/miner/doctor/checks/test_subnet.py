"""The findings about the subnet, from a source that answers as a test says."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner.chain.identity import create_temporary_hotkey
from miner.chain.metagraph import ChainUnavailable, Metagraph, Node
from miner.doctor import CheckContext, Finding, FindingStatus
from miner.doctor.checks import subnet
from miner.settings import Settings, load_settings
from tests.doubles.each import each
from tests.doubles.hub import Hub
from tests.miner.chain.fake_source import FakeSource
from tests.miner.publish.conftest import here

__all__ = ["here"]

ALICE = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
BOB = "5FHneW46xGXgs5mUiveU4sbTyGBzmstUspZC92UhjJM694ty"


@pytest.fixture
def own(tmp_path: Path) -> str:
    return create_temporary_hotkey(tmp_path / "wallets", "default").ss58_address


def node(uid: int, hotkey: str, stake: float = 0.0, **more: Any) -> Node:
    fields = {"validator_permit": False, "ip": None, "port": None, **more}
    return Node(uid=uid, hotkey=hotkey, coldkey=ALICE, stake=stake, **fields)


def graph(*nodes: Node) -> Metagraph:
    return Metagraph(56, 4_000_000, 0.0, "a double", nodes)


def settings(tmp_path: Path, **more: Any) -> Settings:
    given = {"chain": "bittensor", "public_ip": "8.8.4.4", "wallet_path": tmp_path / "wallets", **more}
    return load_settings(env={}, env_file=None, data_dir=tmp_path, **given)


def check_chain(
    monkeypatch: pytest.MonkeyPatch, answer: Metagraph | Exception, given: Settings
) -> dict[str, Finding]:
    source = FakeSource([answer])
    monkeypatch.setattr("miner.chain.sources.build_source", lambda _settings, _identity: source)
    return {finding.what: finding for finding in subnet.check_chain(CheckContext(given))}


def test_a_registered_hotkey_with_the_right_address_is_good(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = graph(node(3, own, ip="8.8.4.4", port=7999), node(4, BOB, stake=5000, validator_permit=True))
    found = check_chain(monkeypatch, nodes, settings(tmp_path))
    assert {name: finding.status for name, finding in found.items()} == {
        "chain": FindingStatus.OK,
        "callers": FindingStatus.OK,
        "purpose": FindingStatus.WARN,
        "registration": FindingStatus.OK,
        "published address": FindingStatus.OK,
    }
    assert "uid 3" in found["registration"].detail
    assert "2 nodes on subnet 56 at block 4000000" in found["chain"].detail


def test_an_unregistered_hotkey_comes_with_the_command_that_registers_it(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check_chain(monkeypatch, graph(node(4, BOB)), settings(tmp_path))
    assert found["registration"].status is FindingStatus.FAIL
    assert own in found["registration"].detail
    assert "btcli subnets register --netuid 56 -w default -H default" in found["registration"].fix
    assert "published address" not in found


@each(
    ("published", "given", "status", "way_out"),
    [
        ({}, {}, FindingStatus.FAIL, "god-miner chain publish-ip"),
        ({}, {"public_ip": None}, FindingStatus.FAIL, "set PUBLIC_IP"),
        ({"ip": "8.8.4.4", "port": 8000}, {}, FindingStatus.FAIL, "PUBLISHED_PORT"),
        ({"ip": "8.8.4.5", "port": 7999}, {}, FindingStatus.FAIL, "publish-ip"),
        ({"ip": "8.8.4.4", "port": 7999}, {"public_ip": None}, FindingStatus.WARN, "PUBLIC_IP"),
        ({"ip": "8.8.4.4", "port": 40123}, {"published_port": 40123}, FindingStatus.OK, ""),
    ],
)
def test_the_published_address_is_compared_with_the_settings(
    published: dict[str, Any],
    given: dict[str, Any],
    status: FindingStatus,
    way_out: str,
    tmp_path: Path,
    own: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = check_chain(monkeypatch, graph(node(3, own, **published)), settings(tmp_path, **given))
    assert found["published address"].status is status
    assert way_out in found["published address"].fix


@each(
    ("given", "count"),
    [
        ({}, 1),
        ({"min_stake_threshold": 0}, 1),
        ({"min_stake_threshold": 0, "require_validator_permit": False}, 2),
        ({"min_stake_threshold": 0, "require_validator_permit": False, "deny_hotkeys": BOB}, 1),
        ({"min_stake_threshold": 0, "allow_hotkeys": BOB}, 1),
        ({"allow_hotkeys": ALICE}, 1),  # instead of the stake
        ({"min_stake_threshold": 3000}, 0),
    ],
)
def test_how_many_callers_are_let_in_is_counted(given: dict[str, Any], count: int, tmp_path: Path) -> None:
    nodes = graph(node(0, ALICE, stake=10), node(1, BOB, stake=2000, validator_permit=True))
    finding = subnet.callers(nodes, settings(tmp_path, **given))
    assert finding.detail.startswith(f"{count} of 2" if count else "not one of 2")
    assert finding.status is (FindingStatus.OK if count else FindingStatus.WARN)


@each("error", [ChainUnavailable("node closed"), TimeoutError(), ConnectionRefusedError("no")])
def test_a_chain_that_cannot_be_read_is_one_finding(
    error: Exception, tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check_chain(monkeypatch, error, settings(tmp_path))
    assert list(found) == ["chain"]
    assert found["chain"].status is FindingStatus.FAIL
    assert "SUBTENSOR_ADDRESS" in found["chain"].fix


def test_a_chain_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FakeSource()

    async def silent() -> Metagraph:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(source, "metagraph", silent)
    monkeypatch.setattr("miner.chain.sources.build_source", lambda _settings, _identity: source)
    monkeypatch.setattr(subnet, "READ_SECONDS", 0.02)
    (finding,) = subnet.check_chain(CheckContext(settings(tmp_path)))
    assert finding.status is FindingStatus.FAIL


def test_without_a_hotkey_the_rest_of_the_chain_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check_chain(
        monkeypatch, graph(node(4, BOB, stake=5000, validator_permit=True)), settings(tmp_path)
    )
    assert found["callers"].status is FindingStatus.OK
    assert found["registration"].status is FindingStatus.SKIP


def test_a_nodes_file_is_read_for_real_and_good_for_trials(tmp_path: Path, own: str) -> None:
    given = settings(tmp_path, chain="file")
    (missing,) = subnet.check_chain(CheckContext(given))
    assert missing.status is FindingStatus.FAIL
    assert str(given.nodes_file) in missing.fix
    row = '{"uid": 1, "hotkey": "%s", "coldkey": "%s", "stake": 5000.0}'
    given.nodes_file.write_text("[" + row % (BOB, ALICE) + "]")
    found = {finding.what: finding for finding in subnet.check_chain(CheckContext(given))}
    assert found["chain"].status is FindingStatus.OK
    assert found["registration"].status is FindingStatus.WARN
    given.nodes_file.write_text("[" + row % (own, ALICE) + "]")
    found = {finding.what: finding for finding in subnet.check_chain(CheckContext(given))}
    assert found["registration"].status is FindingStatus.OK
    assert found["published address"].status is FindingStatus.SKIP


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, FindingStatus.WARN),
        (
            {
                "training_repo_image_url": "https://github.com/me/entry",
                "training_repo_image_commit": "0" * 40,
            },
            FindingStatus.OK,
        ),
        ({"chain": "file"}, None),
    ],
)
def test_a_miner_without_a_tournament_entry_is_warned_that_no_offers_come(
    tmp_path: Path, given: dict[str, str], status: FindingStatus | None
) -> None:
    found = list(subnet.purpose(settings(tmp_path, **given)))
    assert [finding.status for finding in found] == ([status] if status else [])
    assert all("October 2025" in finding.detail for finding in found if status is FindingStatus.WARN)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        yield running


def looked_at(tmp_path: Path, **more: object) -> Finding:
    settings = load_settings(env={}, env_file=None, data_dir=tmp_path / "data", **more)
    (found,) = subnet.check_hub(CheckContext(settings))
    return found


def online(tmp_path: Path, hub: Hub, **more: object) -> Finding:
    about: dict[str, object] = {"hub": "huggingface", "hf_endpoint": hub.url, "hf_token": hub.token}
    return looked_at(tmp_path, **about | more)


@pytest.mark.usefixtures("here")
@pytest.mark.process
def test_a_token_that_may_write_is_named_with_its_user(tmp_path: Path, hub: Hub) -> None:
    found = online(tmp_path, hub)
    assert found.status is FindingStatus.OK
    assert "tester, token of role write, publishing as tester" in found.detail


@pytest.mark.usefixtures("here")
@pytest.mark.process
def test_a_token_that_may_only_read_or_not_there_is_a_failure(tmp_path: Path, hub: Hub) -> None:
    hub.roles["tester"] = {"role": "read"}
    assert online(tmp_path, hub).status is FindingStatus.FAIL
    assert "HF_USER" in online(tmp_path, hub, hf_user="guild").detail
    hub.orgs["guild"] = {"roleInOrg": "read"}
    assert "may only read in guild" in online(tmp_path, hub, hf_user="guild").detail


@pytest.mark.usefixtures("here")
@pytest.mark.process
def test_a_wrong_token_none_or_no_hub_are_failures_with_a_way_out(tmp_path: Path, hub: Hub) -> None:
    wrong = online(tmp_path, hub, hf_token="hf_" + "w" * 34)
    assert wrong.status is FindingStatus.FAIL
    assert "HF_TOKEN" in wrong.fix
    assert "w" * 34 not in wrong.detail
    assert online(tmp_path, hub, hf_token=None).status is FindingStatus.FAIL
    away = online(tmp_path, hub, hf_endpoint="http://127.0.0.1:9")
    assert "HF_ENDPOINT" in away.fix


@pytest.mark.process
def test_a_folder_must_be_one_that_can_be_written(tmp_path: Path) -> None:
    assert looked_at(tmp_path).status is FindingStatus.OK
    (tmp_path / "file").write_text("x")
    assert looked_at(tmp_path, hub=f"local:{tmp_path}/file/hub").status is FindingStatus.FAIL


@pytest.mark.process
def test_a_folder_on_a_real_chain_is_warned_of(tmp_path: Path) -> None:
    about = {"chain": "bittensor", "hub": f"local:{tmp_path}/hub"}
    found = looked_at(tmp_path, **about)
    assert found.status is FindingStatus.WARN
    assert "no validator finds" in found.detail
