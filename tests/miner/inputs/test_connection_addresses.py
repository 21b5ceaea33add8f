"""Where a URL from outside may lead."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from hypothesis import given
from hypothesis import strategies as st

from miner.inputs.connection import AddressGuard
from tests.doubles.each import each

PRIVATE = [
    ("127.0.0.1", "loopback"),
    ("127.255.1.9", "loopback"),
    ("::1", "loopback"),
    ("0.0.0.0", "private"),
    ("::", "an obsolete form of IPv4"),
    ("10.1.2.3", "private"),
    ("172.16.0.1", "private"),
    ("192.168.1.1", "private"),
    ("fd12:3456::1", "private"),
    ("169.254.169.254", "link-local"),
    ("fe80::1", "private"),
    ("fe80::1%eth0", "private"),
    ("fd00:ec2::254", "Amazon's metadata"),
    ("168.63.129.16", "Azure's host agent"),
    ("100.100.100.200", "Alibaba's metadata"),
    ("100.64.0.1", "not of the internet"),
    ("192.0.0.192", "Oracle's metadata"),
    ("198.18.0.1", "private"),
    ("203.0.113.5", "private"),
    ("224.0.0.1", "multicast"),
    ("ff02::1", "multicast"),
    ("240.0.0.1", "private"),
    ("255.255.255.255", "private"),
    ("fec0::1", "site-local"),
    ("2001:db8::1", "private"),
    ("3fff::1", "documentation"),
    ("192.88.99.1", "an obsolete way"),
    # IPv4 in IPv6 clothes
    ("::ffff:127.0.0.1", "loopback"),
    ("::ffff:10.0.0.1", "private"),
    ("::ffff:a9fe:a9fe", "link-local"),
    ("::127.0.0.1", "an obsolete form of IPv4"),
    ("2002:7f00:0001::", "loopback"),
    ("2002:a9fe:a9fe::1", "link-local"),
    ("64:ff9b::a9fe:a9fe", "link-local"),
    ("64:ff9b::7f00:1", "loopback"),
    ("64:ff9b:1::7f00:1", "own way to IPv4"),
    ("2001:0:7f00:1::", "loopback"),
    ("no address", "not an address"),
    ("", "not an address"),
]


@each(("address", "why"), PRIVATE)
def test_what_is_not_the_internet_is_refused_with_the_reason(address: str, why: str) -> None:
    assert why in (AddressGuard().refusal(address) or "")


@each(
    "address",
    ["8.8.8.8", "52.216.1.1", "2600:1f18::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"],
)
def test_the_internet_is_let_through(address: str) -> None:
    assert AddressGuard().refusal(address) is None


def test_an_operator_can_open_a_network_and_only_that() -> None:
    guard = AddressGuard((ip_network("127.0.0.0/8"), ip_network("fd00::/8")))
    assert guard.refusal("127.0.0.1") is None
    assert guard.refusal("::ffff:127.0.0.1") is None
    assert guard.refusal("fd00:ec2::254") is None
    assert guard.refusal("10.0.0.1") == "private"
    assert guard.refusal("::1") == "loopback"


@given(st.integers(0, 2**32 - 1))
def test_an_ipv4_address_is_judged_alike_in_all_its_clothes(number: int) -> None:
    plain = AddressGuard().refusal(str(IPv4Address(number)))
    for dressed in (
        IPv6Address(0xFFFF << 32 | number),
        IPv6Address(0x2002 << 112 | number << 80),
        IPv6Address(0x64FF9B << 96 | number),
    ):
        assert AddressGuard().refusal(str(dressed)) == plain


@given(st.text(max_size=40) | st.ip_addresses().map(str))
def test_any_text_is_judged_and_only_global_addresses_pass(text: str) -> None:
    if AddressGuard().refusal(text) is None:
        address = ip_address(text.split("%")[0])
        assert address.is_global or "2002:" in text or "64:ff9b" in text
