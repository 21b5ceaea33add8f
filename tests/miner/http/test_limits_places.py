"""Limits on open connections, and the choice of one to close for a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random

import pytest

from miner.http.limits import HttpLimits
from miner.http.places import Places
from tests.doubles.http_bytes import request
from tests.miner.http.protocol_server import KNOWN, ProtocolServer, run_protocol_server
from tests.miner.http.raw_connection import RawConnection

pytestmark = pytest.mark.process


HERE, ELSEWHERE, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
LAST = request("/now", {"connection": "close"})
SHOWN = {KNOWN[0].decode(): KNOWN[1].decode()}
OF_KNOWN, LAST_OF_KNOWN = request("/wait/known", SHOWN), request("/now", {**SHOWN, "connection": "close"})

Connect = Callable[[str], RawConnection]


@pytest.fixture
def narrow() -> Iterator[tuple[ProtocolServer, Connect]]:
    """A server for six strangers and two that it knows, three from one address; and a way to connect."""
    few = HttpLimits(
        300,
        300,
        max_body_bytes=1000,
        max_known_connections=2,
        max_stranger_connections=6,
        max_connections_per_address=3,
    )
    with run_protocol_server(few) as server, ExitStack() as stack:
        yield server, lambda address: stack.enter_context(RawConnection(server.port, address=address))


def hold_all_places_of_strangers(server: ProtocolServer, connect: Connect) -> list[RawConnection]:
    """Take the places with requests that are being answered, which are never closed."""
    busy = [connect(address).send(request("/wait")) for address in (HERE, ELSEWHERE) * 3]
    server.wait_until(lambda: server.started.count("/wait") == len(busy))
    return busy


def test_one_address_cannot_take_all_connections(narrow: tuple[ProtocolServer, Connect]) -> None:
    server, connect = narrow
    for _ in range(3):
        connect(HERE).send(request("/wait"))
    server.wait_until(lambda: len(server.started) == 3)
    assert connect(HERE).last_reply().error == "too_many_connections"
    for _ in range(10):  # a closed connection makes room for its address
        assert connect(ELSEWHERE).send(LAST).last_reply().status == 200


def test_idle_connections_of_an_address_shut_out_nobody_behind_it(
    narrow: tuple[ProtocolServer, Connect],
) -> None:
    """A validator may share its address with a client that opens connections and sends nothing."""
    _, connect = narrow
    idle = [connect(HERE) for _ in range(3)]
    assert connect(HERE).send(LAST).last_reply().status == 200
    assert idle[0].last_reply().error == "busy"
    assert idle[1].send(LAST).last_reply().status == 200


def test_idle_connections_shut_nobody_out(narrow: tuple[ProtocolServer, Connect]) -> None:
    _, connect = narrow
    for address in (HERE, ELSEWHERE) * 3:
        connect(address)
    for _ in range(10):
        assert connect(THIRD).send(LAST).last_reply().status == 200


def test_a_connection_whose_request_is_being_answered_is_not_hung_up_on(
    narrow: tuple[ProtocolServer, Connect],
) -> None:
    server, connect = narrow
    busy = hold_all_places_of_strangers(server, connect)
    assert connect(THIRD).last_reply().error == "busy"
    server.release("/wait")
    assert [raw.reply().status for raw in busy] == [200] * 6
    # With their replies out they wait for their clients again, and make way.
    assert connect(THIRD).send(LAST).last_reply().status == 200


def test_strangers_take_no_places_of_those_that_are_known(narrow: tuple[ProtocolServer, Connect]) -> None:
    server, connect = narrow
    server.known.add(THIRD)
    hold_all_places_of_strangers(server, connect)
    assert connect("127.0.0.4").last_reply().error == "busy"
    assert [connect(THIRD).send(LAST).last_reply().status for _ in range(3)] == [200] * 3


def test_a_client_known_by_its_headers_makes_way_for_no_stranger(
    narrow: tuple[ProtocolServer, Connect],
) -> None:
    server, connect = narrow
    known = [connect(address).send(OF_KNOWN) for address in (HERE, ELSEWHERE)]
    server.wait_until(lambda: server.started.count("/wait/known") == 2)
    # The places that are kept are taken; there are others.
    assert connect(THIRD).send(LAST_OF_KNOWN).last_reply().status == 200
    server.release("/wait/known")
    assert [raw.reply().status for raw in known] == [200, 200]
    idle = [connect(address) for address in (HERE, ELSEWHERE, THIRD) * 3]
    assert all(raw.last_reply().error == "busy" for raw in idle[:3])
    assert [raw.send(LAST).last_reply().status for raw in known] == [200, 200]


def test_the_oldest_connection_of_the_network_with_most_is_found_whatever_came_and_went() -> None:
    """A plain search, which takes longer the more there are, finds the same one."""
    random, places = Random(1), Places[int](10**6, 10**6)
    idle: dict[int, str] = {}
    networks: dict[int, str] = {}
    for number in range(500):
        network = f"10.0.0.{random.randrange(12)}"
        places.enter(network)
        networks[number] = network
        places.set_idle(number, network)
        idle[number] = network
        for change in random.sample(sorted(networks), min(2, len(networks))):
            match random.randrange(3):
                case 0:
                    places.leave(change, networks.pop(change))
                    idle.pop(change, None)
                case 1:
                    places.set_busy(change, networks[change])
                    idle.pop(change, None)
                case 2:
                    places.set_idle(change, networks[change])
                    idle.setdefault(change, networks[change])
        sizes = {network: list(idle.values()).count(network) for network in idle.values()}
        oldest = places.oldest_idle()
        if oldest is None:
            assert not idle
            continue
        assert sizes[idle[oldest]] == max(sizes.values())
        assert oldest == next(each for each, network in idle.items() if network == idle[oldest])
        assert oldest == places.oldest_idle(idle[oldest])


def test_finding_a_connection_to_close_looks_at_no_other_one(
    monkeypatch: pytest.MonkeyPatch, narrow: tuple[ProtocolServer, Connect]
) -> None:
    server, connect = narrow
    looked_at: list[object] = []
    makes_way = server.protocol._makes_way  # type: ignore[attr-defined]
    monkeypatch.setattr(server.protocol, "_makes_way", lambda each: looked_at.append(each) or makes_way(each))
    for number in range(2, 8):
        connect(f"127.0.0.{number}")
    for _ in range(10):
        assert connect(HERE).send(LAST).last_reply().status == 200
    assert len(looked_at) <= 10
