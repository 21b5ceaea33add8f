import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bittensor_core import Keypair, ss58_encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miner import auth, fiber
from miner.auth import Authenticator, AuthError, Gate
from miner.chain.base import Metagraph, Node
from miner.limits import Rate
from miner.nonces import NonceLedger
from miner.store import database
from miner.store.books import Books, NonceUsed

VECTORS = json.loads((Path(__file__).parent.parent / "data" / "fiber_vectors.json").read_text())
VALIDATOR, MINER, STRANGER = (Keypair.create_from_seed(bytes([byte]) * 32) for byte in (0x11, 0x22, 0x33))
CLOCK_NS = VECTORS["clock_ns"]
BODY = b'{"a": 1}'
HOME = "192.0.2.7"

Headers = list[tuple[bytes, bytes]]


def node(hotkey: str, stake: float = 5000.0, *, permit: bool = True) -> Node:
    return Node(0, hotkey, "", stake, permit, None, None)


def graph(*nodes: Node) -> Metagraph:
    return Metagraph(56, 1, 0.0, "test", nodes or (node(VALIDATOR.ss58_address),))


@pytest.fixture
async def books(tmp_path: Path):
    made = Books(database.prepare(tmp_path))
    made.writer.start(asyncio.get_running_loop())
    yield made
    await made.writer.close()


def authenticator(
    books: Books, *, nodes: Sequence[Node] = (), gate: Gate | None = None, **more: Any
) -> Authenticator:
    nonces = NonceLedger(books, max_live=1000)
    nonces.load(CLOCK_NS / 1e9)
    metagraph = graph(*nodes)
    return Authenticator(
        miner_key=MINER.public_key,
        gate=gate or Gate(),
        nonces=nonces,
        metagraph=lambda: metagraph,
        now_ns=lambda: CLOCK_NS,
        **more,
    )


def signed(body: bytes | None = BODY, *, signer: Keypair = VALIDATOR, **changes: str) -> Headers:
    nonce = changes.pop("nonce", f"{CLOCK_NS}_abc")
    headers = fiber.sign_headers(signer, changes.pop("to", MINER.ss58_address), body, nonce)
    headers.update({name.replace("_", "-"): value for name, value in changes.items()})
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def check(
    judge: Authenticator, headers: Headers, method: str = "POST", body: bytes = BODY
) -> auth.Caller:
    caller = judge.verify(judge.admit(headers, HOME), method, body, HOME)
    await caller.ticket.settle()
    return caller


@pytest.mark.parametrize("vector", VECTORS["requests"], ids=lambda v: v["headers"]["nonce"][-2:])
async def test_reference_requests_come_out_right(books: Books, vector: dict[str, Any]) -> None:
    judge = authenticator(books)
    headers = [(name.encode(), value.encode()) for name, value in vector["headers"].items()]
    body = bytes.fromhex(vector.get("body_hex") or "")
    if vector["valid"]:
        caller = await check(judge, headers, vector["method"], body)
        assert caller.hotkey == VECTORS["validator"]
    else:
        with pytest.raises(auth.BadCredentials):
            await check(judge, headers, vector["method"], body)
        assert books.live_nonces(0) == []  # nothing is stored before a signature verified


@pytest.mark.parametrize("name", fiber.AUTH_HEADERS)
async def test_a_missing_header_is_named(books: Books, name: str) -> None:
    headers = [entry for entry in signed() if entry[0] != name.encode()]
    with pytest.raises(auth.HeaderMissing, match=name):
        authenticator(books).admit(headers, HOME)


@pytest.mark.parametrize("name", fiber.AUTH_HEADERS)
async def test_a_header_given_twice_is_refused(books: Books, name: str) -> None:
    twice = next(entry for entry in signed() if entry[0] == name.encode())
    with pytest.raises(auth.HeaderInvalid, match="twice"):
        authenticator(books).admit([*signed(), twice], HOME)


@pytest.mark.parametrize("name", fiber.AUTH_HEADERS)
async def test_bytes_that_are_not_ascii_are_refused(books: Books, name: str) -> None:
    headers = [(key, "é".encode() if key == name.encode() else value) for key, value in signed()]
    with pytest.raises(auth.HeaderInvalid, match="ASCII"):
        authenticator(books).admit(headers, HOME)


@pytest.mark.parametrize(
    ("stamp", "fits"), [(-121, False), (-119, True), (0, True), (119, True), (121, False), (10**9, False)]
)
async def test_a_nonce_may_be_two_minutes_off_either_way(books: Books, stamp: int, *, fits: bool) -> None:
    headers = signed(nonce=f"{CLOCK_NS + stamp * 10**9}_x")
    if fits:
        await check(authenticator(books), headers)
    else:
        with pytest.raises(auth.BadCredentials, match="clock"):
            authenticator(books).admit(headers, HOME)


async def test_a_replay_is_refused_also_after_a_restart(books: Books) -> None:
    judge = authenticator(books)
    await check(judge, signed())
    for again in (judge, authenticator(books)):
        with pytest.raises(auth.BadCredentials, match="used before"):
            await check(again, signed())


async def test_of_two_at_the_same_moment_one_wins(books: Books) -> None:
    judge = authenticator(books)
    claims = [judge.admit(signed(), HOME) for _ in range(2)]  # both admitted before either is verified
    await judge.verify(claims[0], "POST", BODY, HOME).ticket.settle()
    with pytest.raises(NonceUsed):
        judge.verify(claims[1], "POST", BODY, HOME)


async def test_a_stranger_is_refused_whatever_it_signs(books: Books) -> None:
    with pytest.raises(auth.CallerRefused, match="not found in metagraph"):
        authenticator(books).admit(signed(signer=STRANGER), HOME)


async def test_a_validator_hotkey_that_is_no_address_is_refused(books: Books) -> None:
    with pytest.raises(auth.CallerRefused, match="ss58"):
        authenticator(books).admit(signed(validator_hotkey="5nonsense"), HOME)


async def test_too_little_stake_is_told_with_both_numbers(books: Books) -> None:
    judge = authenticator(books, nodes=[node(VALIDATOR.ss58_address, 999.5)])
    with pytest.raises(auth.CallerRefused, match=r"999.5: at least 1000"):
        judge.admit(signed(), HOME)


async def test_a_permit_is_asked_for_only_when_the_operator_wants_it(books: Books) -> None:
    nodes = [node(VALIDATOR.ss58_address, permit=False)]
    await check(authenticator(books, nodes=nodes), signed())
    with pytest.raises(auth.CallerRefused, match="permit"):
        authenticator(books, nodes=nodes, gate=Gate(require_permit=True)).admit(signed(), HOME)


async def test_an_allow_list_lets_in_these_and_only_these(books: Books) -> None:
    nodes = [node(VALIDATOR.ss58_address, 0.0), node(STRANGER.ss58_address)]
    gate = Gate(allowed=frozenset({VALIDATOR.public_key}))
    await check(authenticator(books, nodes=nodes, gate=gate), signed())
    with pytest.raises(auth.CallerRefused, match="allow list"):
        authenticator(books, nodes=nodes, gate=gate).admit(signed(signer=STRANGER), HOME)


async def test_the_deny_list_goes_by_key_not_by_spelling(books: Books) -> None:
    gate = Gate(denied=frozenset({VALIDATOR.public_key}))
    other_spelling = ss58_encode(VALIDATOR.public_key, 0)
    with pytest.raises(auth.CallerRefused, match="deny list"):
        authenticator(books, gate=gate).admit(signed(validator_hotkey=other_spelling), HOME)


async def test_a_caller_is_known_by_one_spelling(books: Books) -> None:
    other_spelling = ss58_encode(VALIDATOR.public_key, 0)
    caller = await check(authenticator(books), signed(validator_hotkey=other_spelling))
    assert caller.hotkey == VALIDATOR.ss58_address


async def test_a_request_for_another_miner_is_refused(books: Books) -> None:
    with pytest.raises(auth.BadCredentials, match="another miner"):
        authenticator(books).admit(signed(to=STRANGER.ss58_address), HOME)


async def test_without_a_metagraph_nobody_is_judged(books: Books) -> None:
    judge = authenticator(books, failures=Rate(per_second=0.001, burst=3))
    known, judge.metagraph = judge.metagraph, lambda: None
    for _ in range(10):
        with pytest.raises(auth.MetagraphUnknown):
            judge.admit(signed(), HOME)
    judge.metagraph = known
    judge.admit(signed(), HOME)  # that was our failure, and counted as nobody else's


async def test_a_get_signature_opens_no_post(books: Books) -> None:
    with pytest.raises(auth.BadCredentials):
        await check(authenticator(books), signed(None), "POST", b"")


async def test_failures_from_one_address_end_in_429_and_leave_others_alone(books: Books) -> None:
    judge = authenticator(books, failures=Rate(per_second=1.0, burst=3))
    for _ in range(3):
        with pytest.raises(auth.CallerRefused):
            judge.admit(signed(signer=STRANGER), HOME)
    with pytest.raises(auth.TooManyRequests):
        judge.admit(signed(), HOME)
    judge.admit(signed(), "192.0.2.8")


async def test_bad_signatures_in_a_validators_name_do_not_lock_it_out(books: Books) -> None:
    judge = authenticator(books, failures=Rate(per_second=1.0, burst=3))
    for number in range(3):
        claim = judge.admit(signed(nonce=f"{CLOCK_NS}_{number}", signature="0x" + "00" * 64), "203.0.113.1")
        with pytest.raises(auth.BadCredentials):
            judge.verify(claim, "POST", BODY, "203.0.113.1")
    with pytest.raises(auth.TooManyRequests):
        judge.admit(signed(), "203.0.113.1")
    await check(judge, signed())


async def test_a_validator_has_a_rate_of_its_own(books: Books) -> None:
    judge = authenticator(books, requests=Rate(per_second=1.0, burst=2))
    for number in range(2):
        await check(judge, signed(nonce=f"{CLOCK_NS}_{number}"))
    with pytest.raises(auth.TooManyRequests, match="hotkey"):
        await check(judge, signed(nonce=f"{CLOCK_NS}_9"))


raw_headers = st.lists(
    st.tuples(
        st.sampled_from([name.encode() for name in fiber.AUTH_HEADERS] + [b"host", b"x"]),
        st.binary(max_size=140),
    ),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw_headers, st.binary(max_size=50))
def test_any_headers_are_an_auth_error_never_a_crash(tmp_path: Path, headers: Headers, body: bytes) -> None:
    judge = authenticator(Books(database.prepare(tmp_path)), failures=Rate(1e9, 1e9))
    with pytest.raises(AuthError):
        judge.verify(judge.admit(headers, HOME), "POST", body, HOME)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(fiber.AUTH_HEADERS), st.binary(max_size=140))
def test_one_header_gone_wrong_is_an_auth_error_never_a_crash(
    tmp_path: Path, name: str, value: bytes
) -> None:
    judge = authenticator(Books(database.prepare(tmp_path)), failures=Rate(1e9, 1e9))
    headers = [(key, value if key == name.encode() else good) for key, good in signed()]
    with pytest.raises(AuthError):
        judge.verify(judge.admit(headers, HOME), "POST", BODY, HOME)
