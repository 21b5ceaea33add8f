from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bittensor_core import Keypair, ss58_encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miner.chain import auth, fiber
from miner.chain.auth import Authenticator, AuthError, CallerPolicy
from miner.chain.metagraph import Metagraph, Node
from miner.chain.nonces import NonceLedger, NonceUsed
from miner.store import database
from miner.store.store import Store
from miner.support.rate_limits import RateLimit
from tests.doubles.each import each

VALIDATOR, MINER, STRANGER = (Keypair.create_from_seed(bytes([byte]) * 32) for byte in (0x11, 0x22, 0x33))
CLOCK_NS = 1_764_000_000_000_000_000
BODY = b'{"a": 1}'
HOME = "192.0.2.7"

Headers = list[tuple[bytes, bytes]]


def node(hotkey: str, stake: float = 5000.0, *, permit: bool = True) -> Node:
    return Node(0, hotkey, "", stake, permit, None, None)


def graph(*nodes: Node) -> Metagraph:
    return Metagraph(56, 1, 0.0, "test", nodes or (node(VALIDATOR.ss58_address),))


def authenticator(
    store: Store, *, nodes: Sequence[Node] = (), policy: CallerPolicy | None = None, **more: Any
) -> Authenticator:
    nonces = NonceLedger(store, max_live=1000)
    nonces.load_live(CLOCK_NS / 1e9)
    metagraph = graph(*nodes)
    return Authenticator(
        miner_key=MINER.public_key,
        policy=policy or CallerPolicy(),
        nonces=nonces,
        metagraphs=SimpleNamespace(current=metagraph),
        now_ns=lambda: CLOCK_NS,
        **more,
    )


def signed(body: bytes | None = BODY, *, signer: Keypair = VALIDATOR, **changes: str) -> Headers:
    nonce = changes.pop("nonce", f"{CLOCK_NS}_abc")
    headers = fiber.sign_headers(signer, changes.pop("to", MINER.ss58_address), body, nonce)
    headers.update({name.replace("_", "-"): value for name, value in changes.items()})
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def check(
    checker: Authenticator, headers: Headers, method: str = "POST", body: bytes = BODY
) -> auth.Caller:
    caller = checker.verify(checker.admit(headers, HOME), method, body, HOME)
    await caller.ticket.wait_until_saved()
    return caller


@each("name", fiber.AUTH_HEADERS)
async def test_a_header_that_is_missing_twice_or_not_ascii_is_refused(store: Store, name: str) -> None:
    headers = signed()
    (header,) = (entry for entry in headers if entry[0] == name.encode())
    others = [entry for entry in headers if entry != header]
    with pytest.raises(auth.HeaderMissing, match=name):
        authenticator(store).admit(others, HOME)
    with pytest.raises(auth.HeaderInvalid, match="twice"):
        authenticator(store).admit([*others, header, header], HOME)
    with pytest.raises(auth.HeaderInvalid, match="ASCII"):
        authenticator(store).admit([*others, (header[0], "é".encode())], HOME)


@pytest.mark.parametrize(
    ("stamp", "fits"), [(-121, False), (-119, True), (0, True), (119, True), (121, False), (10**9, False)]
)
async def test_a_nonce_may_be_two_minutes_off_either_way(store: Store, stamp: int, *, fits: bool) -> None:
    headers = signed(nonce=f"{CLOCK_NS + stamp * 10**9}_x")
    if fits:
        await check(authenticator(store), headers)
    else:
        with pytest.raises(auth.BadCredentials, match="clock"):
            await check(authenticator(store), headers)


async def test_what_is_refused_for_its_time_says_how_far_the_clock_is_off(store: Store) -> None:
    checker = authenticator(store, nodes=[node(VALIDATOR.ss58_address), node(STRANGER.ss58_address)])
    forged = signed(nonce=f"{CLOCK_NS + 300 * 10**9}_x", signature="0x" + "11" * 64)
    with pytest.raises(auth.BadCredentials, match="does not verify"):
        await check(checker, forged)
    assert checker.clock_offsets.measure() is None
    await check(checker, signed())
    assert checker.clock_offsets.measure() is None
    for number, signer in enumerate([VALIDATOR, STRANGER] * 3):
        with pytest.raises(auth.BadCredentials, match="300 s ahead of this miner's clock"):
            await check(checker, signed(signer=signer, nonce=f"{CLOCK_NS + 300 * 10**9 + number}_x"))
    assert checker.clock_offsets.measure() == (pytest.approx(-300.0, abs=1e-3), 2)


async def test_a_replay_is_refused_also_after_a_restart(store: Store) -> None:
    checker = authenticator(store)
    await check(checker, signed())
    for again in (checker, authenticator(store)):
        with pytest.raises(auth.BadCredentials, match="used before"):
            await check(again, signed())


async def test_of_two_at_the_same_moment_one_wins(store: Store) -> None:
    checker = authenticator(store)
    admitted = [checker.admit(signed(), HOME) for _ in range(2)]  # both admitted before either is verified
    await checker.verify(admitted[0], "POST", BODY, HOME).ticket.wait_until_saved()
    with pytest.raises(NonceUsed):
        checker.verify(admitted[1], "POST", BODY, HOME)


async def test_strangers_and_validators_with_too_little_stake_are_refused(store: Store) -> None:
    with pytest.raises(auth.CallerRefused, match="not found in metagraph"):
        authenticator(store).admit(signed(signer=STRANGER), HOME)
    with pytest.raises(auth.CallerRefused, match="ss58"):
        authenticator(store).admit(signed(validator_hotkey="5nonsense"), HOME)
    poor = [node(VALIDATOR.ss58_address, 999.5)]
    with pytest.raises(auth.CallerRefused, match=r"999.5: at least 1000"):
        authenticator(store, nodes=poor).admit(signed(), HOME)


async def test_a_permit_is_required_only_if_the_operator_says_so(store: Store) -> None:
    nodes = [node(VALIDATOR.ss58_address, permit=False)]
    await check(authenticator(store, nodes=nodes), signed())
    with pytest.raises(auth.CallerRefused, match="permit"):
        authenticator(store, nodes=nodes, policy=CallerPolicy(require_permit=True)).admit(signed(), HOME)


async def test_an_allow_list_lets_in_these_and_only_these(store: Store) -> None:
    nodes = [node(VALIDATOR.ss58_address, 0.0), node(STRANGER.ss58_address)]
    policy = CallerPolicy(allowed=frozenset({VALIDATOR.public_key}))
    await check(authenticator(store, nodes=nodes, policy=policy), signed())
    with pytest.raises(auth.CallerRefused, match="allow list"):
        authenticator(store, nodes=nodes, policy=policy).admit(signed(signer=STRANGER), HOME)


async def test_the_deny_list_goes_by_key_not_by_spelling(store: Store) -> None:
    policy = CallerPolicy(denied=frozenset({VALIDATOR.public_key}))
    other_spelling = ss58_encode(VALIDATOR.public_key, 0)
    with pytest.raises(auth.CallerRefused, match="deny list"):
        authenticator(store, policy=policy).admit(signed(validator_hotkey=other_spelling), HOME)


async def test_a_caller_is_known_by_one_spelling(store: Store) -> None:
    other_spelling = ss58_encode(VALIDATOR.public_key, 0)
    caller = await check(authenticator(store), signed(validator_hotkey=other_spelling))
    assert caller.hotkey == VALIDATOR.ss58_address


async def test_a_request_for_another_miner_is_refused(store: Store) -> None:
    with pytest.raises(auth.BadCredentials, match="another miner"):
        authenticator(store).admit(signed(to=STRANGER.ss58_address), HOME)


async def test_without_a_metagraph_nobody_is_judged(store: Store) -> None:
    checker = authenticator(store, failures=RateLimit(per_second=0.001, burst=3))
    known, checker.metagraphs = checker.metagraphs, SimpleNamespace(current=None)
    for _ in range(10):
        with pytest.raises(auth.MetagraphUnknown):
            checker.admit(signed(), HOME)
    checker.metagraphs = known
    checker.admit(signed(), HOME)  # that was our failure, and counted as nobody else's


async def test_a_get_signature_opens_no_post(store: Store) -> None:
    with pytest.raises(auth.BadCredentials):
        await check(authenticator(store), signed(None), "POST", b"")


async def test_failures_from_one_address_end_in_429_and_leave_others_alone(store: Store) -> None:
    checker = authenticator(store, failures=RateLimit(per_second=0.001, burst=3))
    for _ in range(3):
        with pytest.raises(auth.CallerRefused):
            checker.admit(signed(signer=STRANGER), HOME)
    with pytest.raises(auth.TooManyRequests):
        checker.admit(signed(), HOME)
    checker.admit(signed(), "192.0.2.8")


async def test_bad_signatures_in_a_validators_name_do_not_lock_it_out(store: Store) -> None:
    checker = authenticator(store, failures=RateLimit(per_second=0.001, burst=3))
    for number in range(3):
        unverified = checker.admit(
            signed(nonce=f"{CLOCK_NS}_{number}", signature="0x" + "00" * 64), "203.0.113.1"
        )
        with pytest.raises(auth.BadCredentials):
            checker.verify(unverified, "POST", BODY, "203.0.113.1")
    with pytest.raises(auth.TooManyRequests):
        checker.admit(signed(), "203.0.113.1")
    await check(checker, signed())


async def test_a_validator_has_a_rate_of_its_own(store: Store) -> None:
    checker = authenticator(store, requests=RateLimit(per_second=0.001, burst=2))
    for number in range(2):
        await check(checker, signed(nonce=f"{CLOCK_NS}_{number}"))
    with pytest.raises(auth.TooManyRequests, match="hotkey"):
        await check(checker, signed(nonce=f"{CLOCK_NS}_9"))


any_headers = st.lists(
    st.tuples(
        st.sampled_from([name.encode() for name in fiber.AUTH_HEADERS] + [b"host", b"x"]),
        st.binary(max_size=140),
    ),
    max_size=8,
)
one_gone_wrong = st.builds(
    lambda name, value: [(key, value if key == name.encode() else good) for key, good in signed()],
    st.sampled_from(fiber.AUTH_HEADERS),
    st.binary(max_size=140),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_headers | one_gone_wrong, st.just(BODY) | st.binary(max_size=50))
def test_any_headers_are_an_auth_error_never_a_crash(tmp_path: Path, headers: Headers, body: bytes) -> None:
    checker = authenticator(Store(database.prepare_store(tmp_path)), failures=RateLimit(1e9, 1e9))
    with pytest.raises(AuthError):
        checker.verify(checker.admit(headers, HOME), "POST", body, HOME)
