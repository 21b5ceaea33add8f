from __future__ import annotations

import ipaddress

import pytest
from bittensor_core import Keypair
from hypothesis import given
from hypothesis import strategies as st

from miner.chain.metagraph import (
    ChainError,
    Metagraph,
    Node,
    PublishOutcome,
    checked_axon_address,
    is_unreachable_for_fiber,
    result_without_submitting,
)
from tests.doubles.each import each

KEYS = [Keypair.create_from_uri(f"//{index}") for index in range(8)]


def node(uid: int, incentive: float = 0.0, **values: object) -> Node:
    fields = {"ip": None, "port": None, "stake": 1.0, "validator_permit": False} | values
    return Node(uid=uid, hotkey=KEYS[uid].ss58_address, coldkey="", incentive=incentive, **fields)  # type: ignore[arg-type]


def graph(*nodes: Node) -> Metagraph:
    return Metagraph(netuid=56, block=1, fetched_at=0.0, source="test", nodes=nodes)


def key(uid: int) -> bytes:
    return bytes(KEYS[uid].public_key)


def test_a_node_is_found_by_its_key() -> None:
    subnet = graph(node(0), node(1))
    assert subnet.nodes_by_key.get(key(1)) is subnet.nodes[1]
    assert subnet.nodes_by_key.get(key(2)) is None
    with pytest.raises(TypeError):  # nobody can change who is on it
        subnet.nodes_by_key[key(2)] = node(2)  # type: ignore[index]


def test_a_hotkey_that_is_no_address_is_an_error_with_its_uid() -> None:
    bad = Node(uid=3, hotkey="5nonsense", coldkey="", stake=0, validator_permit=False, ip=None, port=None)
    with pytest.raises(ValueError, match="uid 3: hotkey '5nonsense'"):
        graph(bad)


def test_one_hotkey_under_two_uids_is_an_error_even_with_another_networks_prefix() -> None:
    other = Keypair(public_key=KEYS[0].public_key, ss58_format=0).ss58_address
    twin = Node(uid=9, hotkey=other, coldkey="", stake=0, validator_permit=False, ip=None, port=None)
    with pytest.raises(ValueError, match="uids 0 and 9"):
        graph(node(0), twin)


def test_the_highest_incentive_ranks_first_and_equals_share_a_place() -> None:
    subnet = graph(node(0, 0.1), node(1, 0.9), node(2, 0.1), node(3, 0.0))
    assert [subnet.rank(key(uid)) for uid in range(5)] == [2, 1, 2, 4, None]


@each(
    ("ip", "port", "shown"),
    [
        ("1.2.3.4", 80, "1.2.3.4:80"),
        ("2001:db8::1", 80, "[2001:db8::1]:80"),
        (None, 80, None),
        ("1.2.3.4", None, None),
    ],
)
def test_an_address_is_shown_as_it_is_dialled(ip: str | None, port: int | None, shown: str | None) -> None:
    assert node(0, ip=ip, port=port).address == shown


# Axon addresses


@each("ip", ["8.8.4.4", "::ffff:8.8.4.4"])
def test_a_public_address_is_published_in_its_plain_form(ip: str) -> None:
    assert checked_axon_address(ip, 7999, allow_private=False) == "8.8.4.4"


@each(
    ("ip", "word"),
    [
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("10.1.2.3", "private"),
        ("172.17.0.2", "private"),
        ("192.168.1.1", "private"),
        ("fd00::1", "private"),
        ("169.254.169.254", "link-local"),
        ("100.64.0.7", "not a public"),
        ("203.0.113.9", "private or reserved"),
        ("::ffff:10.0.0.1", "private"),
    ],
)
def test_an_address_that_validators_cannot_reach_is_refused_unless_allowed(ip: str, word: str) -> None:
    with pytest.raises(ChainError, match=f"{word}.*ALLOW_PRIVATE_AXON"):
        checked_axon_address(ip, 7999, allow_private=False)
    assert checked_axon_address(ip, 7999, allow_private=True)


@each("ip", ["0.0.0.0", "::", "224.0.0.1", "miner.example.org", "8.8.4", "8.8.4.4:7999", ""])
def test_what_is_no_address_of_a_machine_is_never_published(ip: str) -> None:
    with pytest.raises(ChainError):
        checked_axon_address(ip, 7999, allow_private=True)


@each("port", [-1, 0, 65536])
def test_a_port_out_of_range_is_refused_with_the_range(port: int) -> None:
    with pytest.raises(ChainError, match=f"port {port}.*1 to 65535"):
        checked_axon_address("8.8.4.4", port, allow_private=False)


@given(st.text(max_size=60), st.integers())
def test_any_text_is_an_address_or_a_clear_error(text: str, port: int) -> None:
    try:
        published: str | None = checked_axon_address(text, port, allow_private=True)
    except ChainError:
        published = None
    assert published is None or (ipaddress.ip_address(published) and 1 <= port <= 65535)


def test_ipv6_is_known_to_be_out_of_reach_for_fiber() -> None:
    assert is_unreachable_for_fiber("2001:4860:4860::8844")
    assert not is_unreachable_for_fiber("8.8.4.4")


def test_nothing_is_submitted_for_an_address_that_is_there_already_or_never_can_be() -> None:
    subnet = graph(node(0, ip="8.8.4.4", port=7999))
    unchanged = result_without_submitting(subnet, key(0), "8.8.4.4", 7999)
    assert (unchanged.outcome, unchanged.ok) == (PublishOutcome.UNCHANGED, True)
    assert result_without_submitting(subnet, key(0), "8.8.4.4", 8000) is None
    refused = result_without_submitting(subnet, key(1), "8.8.4.4", 7999)
    assert (refused.outcome, refused.ok) == (PublishOutcome.REFUSED, False)
    assert "btcli subnets register --netuid 56" in refused.message
