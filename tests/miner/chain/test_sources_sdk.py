"""The real SDK against a node on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bittensor_core import Keypair, serialized_keypair_to_keyfile_data

from miner.chain.hotkey import Hotkey
from miner.chain.identity import hotkey_file, opened_hotkey
from miner.chain.metagraph import (
    ChainError,
    ChainUnavailable,
    PublishOutcome,
    WrongChain,
)
from miner.chain.sources import GENESIS_HASHES, SdkSource
from tests.doubles.chain import Subtensor, neurons
from tests.doubles.chain_fixtures import NETUID, chain_spec, node, subtensor
from tests.doubles.chain_node import WATCH, ChainDouble, Fault
from tests.miner.chain.test_identity import Wallets

__all__ = ["chain_spec", "node", "subtensor"]
pytestmark = pytest.mark.process

METAGRAPH = "SubnetInfoRuntimeApi_get_metagraph"
PUBLIC_IP = "8.8.4.4"


def source(node: ChainDouble, **options: Any) -> SdkSource:
    options = {"timeout": 60.0, "read_back": (0.0,)} | options
    return SdkSource(NETUID, address=node.url, **options)


@pytest.fixture
def hotkey(tmp_path: Path) -> Iterator[Hotkey]:
    """The key of the miner with UID 20, in a process of its own as always."""
    wallet = Wallets(tmp_path)
    path = hotkey_file(tmp_path, wallet.wallet_name, wallet.hotkey_name)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(serialized_keypair_to_keyfile_data(key())))
    path.chmod(0o600)
    with opened_hotkey(wallet) as hotkey:
        yield hotkey


def key(uid: int = 20) -> Keypair:
    return Keypair.create_from_uri(f"//hot{uid}")


async def test_reads_a_full_subnet_of_256_nodes(subtensor: Subtensor, node: ChainDouble) -> None:
    subtensor.subnets[NETUID] = neurons(256)
    subtensor.subnets[NETUID][21].ip = "2001:db8::5"
    graph = await source(node).metagraph()
    assert (graph.netuid, graph.block, len(graph.nodes)) == (NETUID, 100, 256)
    assert graph.genesis == subtensor.genesis
    validator, member = graph.nodes[0], graph.nodes[20]
    assert validator.validator_permit
    assert validator.stake == 256_000.0
    assert validator.address is None
    assert graph.nodes[21].address == "[2001:db8::5]:7021"
    assert (member.ip, member.port, member.stake) == ("198.51.100.20", 7020, 0.5)
    assert (member.last_update, member.emission) == (20, 5.0)
    assert member.incentive == pytest.approx(236 / 256, abs=1e-4)
    assert graph.nodes_by_key.get(bytes(key().public_key)) == member
    # The chain sends no ranks: they come from the incentive.
    assert [graph.rank(bytes(key(uid).public_key)) for uid in (16, 0)] == [1, 241]


async def test_a_subnet_that_does_not_exist_is_named(node: ChainDouble) -> None:
    with pytest.raises(ChainError, match="no subnet 57"):
        await SdkSource(57, address=node.url).metagraph()


async def test_an_unknown_network_is_refused_with_the_known_ones() -> None:
    with pytest.raises(WrongChain, match=r"'finey'.*finney.*SUBTENSOR_NETWORK"):
        await SdkSource(NETUID, "finey").metagraph()


async def test_a_node_of_another_chain_is_not_taken_for_finney(
    node: ChainDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GENESIS_HASHES, node.url, GENESIS_HASHES["finney"])
    with pytest.raises(WrongChain, match=f"not {GENESIS_HASHES['finney']}"):
        await SdkSource(NETUID, node.url).metagraph()


async def test_publishes_the_axon_and_the_chain_shows_it(
    subtensor: Subtensor, node: ChainDouble, hotkey: Hotkey
) -> None:
    result = await source(node, identity=hotkey).publish_axon(PUBLIC_IP, 7999)
    assert result.outcome is PublishOutcome.PUBLISHED
    assert result.block_hash == subtensor.block_hash(101)
    graph = await source(node).metagraph()
    own = graph.nodes_by_key.get(hotkey.public_key)
    assert own.address == f"{PUBLIC_IP}:7999"
    # What the reference miner's fiber posts, too: validators look at these fields.
    args = subtensor.submitted[0].args
    assert (args["protocol"], args["ip_type"], args["netuid"]) == (4, 4, NETUID)
    again = await source(node, identity=hotkey).publish_axon(PUBLIC_IP, 7999)
    assert (again.outcome, len(subtensor.submitted)) == (PublishOutcome.UNCHANGED, 1)


async def test_a_hotkey_that_is_deregistered_meanwhile_is_refused_by_the_chain(
    subtensor: Subtensor, node: ChainDouble, hotkey: Hotkey
) -> None:
    subtensor.before_submit = lambda: subtensor.subnets.update({NETUID: neurons(8)})
    result = await source(node, identity=hotkey).publish_axon(PUBLIC_IP, 7999)
    assert result.outcome is PublishOutcome.REFUSED
    assert "not registered" in result.message
    assert not subtensor.submitted


@pytest.mark.thorough
async def test_the_node_checks_the_signature_for_real(
    subtensor: Subtensor, node: ChainDouble, hotkey: Hotkey
) -> None:
    subtensor.before_submit = lambda: setattr(subtensor, "name", "another chain")
    result = await source(node, identity=hotkey).publish_axon(PUBLIC_IP, 7999)
    assert result.outcome is PublishOutcome.REFUSED
    assert "signature" in result.message
    assert not subtensor.submitted


async def test_what_cannot_be_published_never_gets_to_the_chain(node: ChainDouble, hotkey: Hotkey) -> None:
    with pytest.raises(ChainError):
        await source(node, identity=hotkey).publish_axon("10.0.0.4", 7999)
    with pytest.raises(ChainError, match="WALLET_NAME"):
        await source(node).publish_axon(PUBLIC_IP, 7999)
    assert node.calls == []


@pytest.mark.kept("Fault.DROP_AFTER_INCLUSION-60.0")
@pytest.mark.parametrize(
    ("fault", "timeout"),
    # The silence lasts so long: by then the submission is in a block, also on a slow machine.
    [(Fault.DROP_AFTER_INCLUSION, 60.0), (Fault.SILENT_AFTER_READY, 25.0)],
)
async def test_a_submission_that_is_cut_off_is_looked_up_and_not_sent_again(
    subtensor: Subtensor, node: ChainDouble, fault: Fault, timeout: float, hotkey: Hotkey
) -> None:
    node.faults[WATCH] = fault
    mine = source(node, identity=hotkey)
    mine._submit_timeout = timeout
    result = await mine.publish_axon(PUBLIC_IP, 7999)
    assert result.outcome is PublishOutcome.PUBLISHED
    assert "the chain shows it" in result.message
    assert len(subtensor.submitted) == 1


@pytest.mark.kept("Fault.SILENT")
@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.CLOSE_1000])
async def test_a_submission_whose_fate_is_unknown_says_so(
    node: ChainDouble, fault: Fault, hotkey: Hotkey
) -> None:
    node.faults[WATCH] = fault
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    mine = source(node, identity=hotkey, read_back=(0.0, 13.0), pause=pause)
    mine._submit_timeout = 2.0  # nothing is heard, however long one waits
    result = await mine.publish_axon(PUBLIC_IP, 7999)
    assert result.outcome is PublishOutcome.UNKNOWN
    assert "god-miner chain status" in result.message
    assert pauses == [13.0]


UNHEARD = [Fault.SILENT, Fault.CLOSE_1000, Fault.CLOSE_1001, Fault.CLOSE_1011, Fault.DROP, Fault.NOT_JSON]
NONSENSE = [Fault.WRONG_TYPE, Fault.RANDOM_BYTES]


TROUBLE = [(METAGRAPH, fault) for fault in (*UNHEARD, *NONSENSE)]
TROUBLE += [
    ("state_getRuntimeVersion", fault) for fault in (Fault.SILENT, Fault.CLOSE_1000, Fault.WRONG_TYPE)
]


@pytest.mark.kept(
    "SubnetInfoRuntimeApi_get_metagraph-Fault.SILENT",
    "SubnetInfoRuntimeApi_get_metagraph-Fault.RANDOM_BYTES",
    "state_getRuntimeVersion-Fault.WRONG_TYPE",
)
@pytest.mark.parametrize(("on", "fault"), TROUBLE)
async def test_a_node_in_trouble_costs_the_time_limit_at_most(
    node: ChainDouble, fault: Fault, on: str
) -> None:
    node.faults[on] = fault
    mine = source(node, timeout=0.4)
    with pytest.raises(ChainUnavailable) as caught:
        await mine.metagraph()
    assert "127.0.0.1" in str(caught.value)


async def test_the_second_node_is_asked_when_the_first_is_gone(
    node: ChainDouble, unused_tcp_port: int
) -> None:
    mine = SdkSource(NETUID, address=f"ws://127.0.0.1:{unused_tcp_port}", timeout=60.0, fallbacks=[node.url])
    assert len((await mine.metagraph()).nodes) == 32


async def test_a_worker_that_is_stuck_is_killed_and_reported() -> None:
    mine, others = stuck_source(), set(children())
    with pytest.raises(ChainUnavailable, match=r"stuck and was killed after 0\.3 s"):
        await mine.metagraph()
    assert set(children()) <= others


async def test_a_request_that_is_cancelled_takes_its_worker_along() -> None:
    others = set(children())
    request = asyncio.create_task(stuck_source(start_timeout=60.0).metagraph())
    for _ in range(12_000):
        await asyncio.sleep(0.01)
        if set(children()) - others:
            break
    else:
        pytest.fail("the worker never started")
    request.cancel()
    await asyncio.wait({request})
    assert request.cancelled()
    assert set(children()) <= others


async def test_a_worker_that_dies_is_reported_with_its_last_words() -> None:
    mine = SdkSource(NETUID, worker=[sys.executable, "-c", "raise SystemExit('out of memory')"])
    with pytest.raises(ChainUnavailable, match="status 1 and no answer: out of memory"):
        await mine.metagraph()


async def test_a_worker_that_cannot_be_started_is_reported() -> None:
    with pytest.raises(ChainUnavailable, match=r"cannot be started: .*no-such-python"):
        await SdkSource(NETUID, worker=["/no-such-python"]).metagraph()


async def test_a_well_formed_answer_that_makes_no_sense_is_no_metagraph() -> None:
    nodes = [{"hotkey": "not an address", "uid": 0}]
    response = {"answer": {"genesis": "0x00", "metagraph": {"block": 1, "nodes": nodes}}}
    mine = SdkSource(NETUID, worker=[sys.executable, "-c", f"print({json.dumps(json.dumps(response))})"])
    with pytest.raises(ChainUnavailable, match=r"\[0\]\.hotkey.*not an ss58 address"):
        await mine.metagraph()


def stuck_source(start_timeout: float = 0.3) -> SdkSource:
    stuck = [sys.executable, "-c", "import time; time.sleep(60)"]
    return SdkSource(NETUID, timeout=0.0, start_timeout=start_timeout, worker=stuck)


def children() -> list[str]:
    """The processes that this one started and has not seen the end of."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


async def test_the_private_key_stays_in_its_process_and_no_token_of_the_address_is_logged(
    node: ChainDouble, caplog: pytest.LogCaptureFixture, hotkey: Hotkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK's process, with all that the SDK imports, gets the public half and has it sign."""
    caplog.set_level(logging.DEBUG)
    mine = SdkSource(NETUID, address=f"{node.url}/t0ken-in-a-path?key=s3cret", identity=hotkey, timeout=60.0)
    orders: list[bytes] = []
    run_worker = mine._run_worker

    async def record(order: bytes, *more: Any) -> dict[str, Any]:
        orders.append(order)
        return await run_worker(order, *more)

    monkeypatch.setattr(mine, "_run_worker", record)
    node.faults[METAGRAPH] = Fault.WRONG_TYPE
    with pytest.raises(ChainUnavailable) as caught:
        await mine.metagraph()
    node.faults.clear()
    assert (await mine.publish_axon(PUBLIC_IP, 7999)).outcome is PublishOutcome.PUBLISHED
    shown = f"{mine.name} {caught.value}" + "".join(
        record.getMessage() for record in caplog.records if record.name.startswith("miner")
    )
    assert "t0ken" not in shown
    assert "s3cret" not in shown
    sent = b"".join(orders).decode()
    assert hotkey.ss58_address in sent
    assert private_forms(key(), caplog.text + sent) == []


def private_forms(keypair: Any, text: str) -> Sequence[str]:
    """Where a key's private half shows up in a text, as its keyfile would write it."""
    stored = json.loads(bytes(serialized_keypair_to_keyfile_data(keypair)))
    forms = [stored[name].removeprefix("0x") for name in ("privateKey", "secretSeed") if name in stored]
    assert forms
    return [form for form in forms if form in text]
