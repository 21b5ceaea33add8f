from __future__ import annotations

import pytest
from bittensor_core import Keypair
from hypothesis import given
from hypothesis import strategies as st

from miner.chain.base import Metagraph, Node

KEYS = [Keypair.create_from_uri(f"//{index}") for index in range(8)]


def node(uid: int, incentive: float = 0.0, **values: object) -> Node:
    made = {"ip": None, "port": None, "stake": 1.0, "validator_permit": False} | values
    return Node(uid=uid, hotkey=KEYS[uid].ss58_address, coldkey="", incentive=incentive, **made)  # type: ignore[arg-type]


def graph(*nodes: Node) -> Metagraph:
    return Metagraph(netuid=56, block=1, fetched_at=0.0, source="test", nodes=nodes)


def key(uid: int) -> bytes:
    return bytes(KEYS[uid].public_key)


def test_a_node_is_found_by_its_key() -> None:
    found = graph(node(0), node(1))

    assert found.find(key(1)) is found.nodes[1]
    assert found.find(key(2)) is None
    assert found.by_key.keys() == {key(0), key(1)}


def test_nobody_can_change_who_is_on_a_metagraph() -> None:
    with pytest.raises(TypeError):
        graph(node(0)).by_key[key(1)] = node(1)  # type: ignore[index]


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
    found = graph(node(0, 0.1), node(1, 0.9), node(2, 0.1), node(3, 0.0))

    assert [found.rank(key(uid)) for uid in range(5)] == [2, 1, 2, 4, None]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_a_rank_is_one_more_than_the_number_of_better_nodes(incentives: list[float]) -> None:
    found = graph(*(node(uid, incentive) for uid, incentive in enumerate(incentives)))

    for uid, incentive in enumerate(incentives):
        assert found.rank(key(uid)) == 1 + sum(other > incentive for other in incentives)


def test_seeing_the_same_nodes_again_only_moves_the_time() -> None:
    first = graph(node(0))

    again = first.seen_again(7.0)

    assert (again.fetched_at, first.fetched_at) == (7.0, 0.0)
    assert again.find(key(0)) is first.nodes[0]


@pytest.mark.parametrize(
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
