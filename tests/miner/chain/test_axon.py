from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.chain.axon import checked_address, settled, unreachable_for_fiber
from miner.chain.base import PublishOutcome
from miner.chain.errors import AxonAddressError
from tests.doubles.each import each
from tests.miner.chain.test_base import graph, key, node


def test_a_public_address_is_taken_as_it_is() -> None:
    assert checked_address("8.8.4.4", 7999, allow_private=False) == "8.8.4.4"


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
def test_an_address_that_validators_can_not_reach_is_refused_unless_allowed(ip: str, word: str) -> None:
    with pytest.raises(AxonAddressError, match=f"{word}.*ALLOW_PRIVATE_AXON"):
        checked_address(ip, 7999, allow_private=False)

    assert checked_address(ip, 7999, allow_private=True)


@each("ip", ["0.0.0.0", "::", "224.0.0.1", "miner.example.org", "8.8.4", "8.8.4.4:7999", ""])
def test_what_is_no_address_of_a_machine_is_never_published(ip: str) -> None:
    with pytest.raises(AxonAddressError):
        checked_address(ip, 7999, allow_private=True)


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_a_port_out_of_range_is_refused_with_the_range(port: int) -> None:
    with pytest.raises(AxonAddressError, match=f"port {port}.*1 to 65535"):
        checked_address("8.8.4.4", port, allow_private=False)


@given(st.text(max_size=60), st.integers())
def test_any_text_is_an_address_or_a_clear_error(text: str, port: int) -> None:
    try:
        published: str | None = checked_address(text, port, allow_private=True)
    except AxonAddressError:
        published = None

    assert published is None or (ipaddress.ip_address(published) and 1 <= port <= 65535)


def test_a_mapped_ipv4_address_is_published_as_ipv4() -> None:
    assert checked_address("::ffff:8.8.4.4", 7999, allow_private=False) == "8.8.4.4"


def test_ipv6_is_known_to_be_out_of_reach_for_fiber() -> None:
    assert unreachable_for_fiber("2001:4860:4860::8844")
    assert not unreachable_for_fiber("8.8.4.4")


def test_there_is_nothing_to_do_for_an_address_that_is_there_already() -> None:
    found = graph(node(0, ip="8.8.4.4", port=7999))

    unchanged = settled(found, key(0), "8.8.4.4", 7999)
    assert unchanged is not None
    assert unchanged.outcome is PublishOutcome.UNCHANGED
    assert unchanged.ok
    assert settled(found, key(0), "8.8.4.4", 8000) is None


def test_there_is_nothing_to_do_for_a_hotkey_that_is_not_registered() -> None:
    refused = settled(graph(node(0)), key(1), "8.8.4.4", 7999)

    assert refused is not None
    assert refused.outcome is PublishOutcome.REFUSED
    assert not refused.ok
