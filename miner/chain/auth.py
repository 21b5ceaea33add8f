"""Authenticate callers: fiber's signed requests, checked cheapest first.

Everything that a stranger can send is refused before a body is read or a signature verified: the headers must
be valid, the caller on the metagraph with enough stake, the nonce new. Only then is the signature worth its
40 µs. Nothing is stored before it verified. A nonce that is too old or too new is refused after that, because
its time says how far this clock is off (`clock_offsets.py`), if it is really the validator's.

Verifying a request opens its transaction: the nonce is stored together with what the request writes first,
which goes through `Caller.ticket.write` (`nonces.NonceTicket`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Protocol

from core.domain.errors import GodMinerError
from miner.chain import fiber
from miner.chain.clock_offsets import ClockOffsets
from miner.chain.metagraph import Metagraph, Node
from miner.chain.nonces import NonceLedger, NonceTicket
from miner.settings import Settings
from miner.support.addresses import client_network, public_key, public_keys, ss58_address
from miner.support.rate_limits import RateLimit, TokenBuckets

FAILURES_PER_SECOND, FAILURE_BURST = 1.0, 120.0
REQUESTS_PER_SECOND, REQUEST_BURST = 5000.0, 10_000.0


def failure_limit() -> RateLimit:
    """Return how many refused requests one address may send before it gets 429."""
    return RateLimit(FAILURES_PER_SECOND, FAILURE_BURST)


def request_limit() -> RateLimit:
    """Return how many verified requests one validator may send before it gets 429."""
    return RateLimit(REQUESTS_PER_SECOND, REQUEST_BURST)


class AuthError(GodMinerError):
    """A request that is refused."""

    code = "unauthorized"


class HeaderMissing(AuthError):
    code = "header_missing"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the header {name!r} is missing; fiber requests carry {', '.join(fiber.AUTH_HEADERS)}"
        )


class HeaderInvalid(AuthError):
    code = "header_invalid"


class CallerRefused(AuthError):
    """The caller is not on the metagraph, has too little stake, or is denied."""

    code = "caller_refused"


class BadCredentials(AuthError):
    """The nonce or the signature is invalid."""

    code = "bad_credentials"


class TooManyRequests(AuthError):
    code = "too_many_requests"

    def __init__(self, message: str, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class MetagraphUnknown(AuthError):
    """Validators cannot be distinguished from strangers yet."""

    code = "metagraph_unknown"


@dataclass(frozen=True)
class CallerPolicy:
    """The operator's rules on who counts as a validator."""

    min_stake: float = 1000.0
    require_permit: bool = False
    allowed: frozenset[bytes] = frozenset()
    denied: frozenset[bytes] = frozenset()

    @classmethod
    def from_settings(cls, settings: Settings) -> CallerPolicy:
        return cls(
            min_stake=settings.min_stake_threshold,
            require_permit=settings.require_validator_permit,
            allowed=public_keys(settings.allow_hotkeys),
            denied=public_keys(settings.deny_hotkeys),
        )

    def lets_in(self, key: bytes, node: Node | None) -> bool:
        try:
            self.check(key, node)
        except CallerRefused:
            return False
        return True

    def check(self, key: bytes, node: Node | None) -> None:
        """Raise `CallerRefused` unless the caller is let in. The allow list replaces the stake rule."""
        if key in self.denied:
            raise CallerRefused("this hotkey is on the miner's deny list")
        if node is None:
            raise CallerRefused("Hotkey not found in metagraph")
        if key in self.allowed:
            return
        if self.allowed:
            raise CallerRefused("this hotkey is not on the miner's allow list")
        if node.stake < self.min_stake:
            raise CallerRefused(
                f"Insufficient stake of {node.stake:g}: at least {self.min_stake:g} is needed"
            )
        if self.require_permit and not node.validator_permit:
            raise CallerRefused("this hotkey has no validator permit")


class UnverifiedCaller(NamedTuple):
    """The content of the headers; the signature is not verified yet."""

    key: bytes
    node: Node
    #: The spelling of the caller, which is what it signed.
    miner_hotkey: str
    nonce: str
    stamp_ns: int
    #: Nanoseconds that this clock was ahead of the caller's when the headers came.
    ahead_ns: int
    signature: bytes


class Caller(NamedTuple):
    """A validator whose signature verified."""

    hotkey: str
    node: Node
    #: Time of the request by the caller's clock.
    at: float
    #: The transaction of this request; awaited before any reply.
    ticket: NonceTicket


class CurrentMetagraph(Protocol):
    """Whoever keeps the metagraph current."""

    current: Metagraph | None


@dataclass
class Authenticator:
    miner_key: bytes
    policy: CallerPolicy
    nonces: NonceLedger
    metagraphs: CurrentMetagraph
    failures: RateLimit = field(default_factory=failure_limit)
    requests: RateLimit = field(default_factory=request_limit)
    now_ns: Callable[[], int] = time.time_ns
    clock_offsets: ClockOffsets = field(default_factory=ClockOffsets)
    _failures: TokenBuckets = field(init=False)
    _requests: TokenBuckets = field(init=False)
    #: The network that each validator's last valid request came from.
    _networks: dict[bytes, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._failures = TokenBuckets(self.failures)
        self._requests = TokenBuckets(self.requests, max_keys=4096)

    def admit(self, headers: Iterable[tuple[bytes, bytes]], address: str) -> UnverifiedCaller:
        """Check a request by its headers alone; the body is not read yet."""
        network = client_network(address)
        if self._failures.is_empty(network):
            wait = self._failures.seconds_until_next(network)
            raise TooManyRequests("too many refused requests from this address", wait)
        try:
            return self._read_headers(headers)
        except MetagraphUnknown:
            raise  # our failure: a validator that keeps trying must not be shut out for it
        except AuthError:
            self.note_failure(address)
            raise

    def verify(self, unverified: UnverifiedCaller, method: str, body: bytes, address: str) -> Caller:
        """Check the signature over the raw body and use up the nonce."""
        if not self._is_signed(unverified, method, body):
            self.note_failure(address)
            raise BadCredentials("the signature does not verify for this hotkey, nonce and body")
        if abs(unverified.ahead_ns) > fiber.NONCE_WINDOW_NS:
            self.note_failure(address)
            self._refuse_for_time(unverified)
        if not self._requests.take(unverified.key):
            wait = self._requests.seconds_until_next(unverified.key)
            raise TooManyRequests("too many requests from this hotkey", wait)
        ticket = self.nonces.use(unverified.key, unverified.nonce, unverified.stamp_ns)
        self.clock_offsets.note(unverified.key, unverified.stamp_ns, unverified.ahead_ns / 1e9)
        self._networks[unverified.key] = client_network(address)
        return Caller(ss58_address(unverified.key), unverified.node, unverified.stamp_ns / 1e9, ticket)

    def is_known(self, network: str) -> bool:
        """Return True if a validator's last valid request came from this network."""
        return network in self._networks.values()

    def note_failure(self, address: str) -> None:
        """Count a request against its address."""
        self._failures.take(client_network(address))

    def _read_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> UnverifiedCaller:
        values = _auth_headers(headers)
        key = public_key(values[fiber.VALIDATOR_HOTKEY])
        if key is None:
            raise CallerRefused("Hotkey not found in metagraph: the validator-hotkey is not an ss58 address")
        metagraph = self.metagraphs.current
        if metagraph is None:
            raise MetagraphUnknown("the metagraph has not been read yet; try again in a minute")
        node = metagraph.nodes_by_key.get(key)
        self.policy.check(key, node)
        assert node is not None
        if public_key(values[fiber.MINER_HOTKEY]) != self.miner_key:
            raise BadCredentials("this request is addressed to another miner-hotkey")
        nonce = values[fiber.NONCE]
        stamp_ns = fiber.nonce_time_ns(nonce)
        if stamp_ns is None:
            raise BadCredentials("the nonce is not '<nanoseconds>_<letters>'")
        if self.nonces.was_used(key, nonce):
            raise BadCredentials("this nonce was used before; every request needs a new one")
        signature = fiber.signature_bytes(values[fiber.SIGNATURE])
        if signature is None:
            raise BadCredentials("the signature is not 0x and 128 hex digits")
        ahead_ns = self.now_ns() - stamp_ns
        return UnverifiedCaller(key, node, values[fiber.MINER_HOTKEY], nonce, stamp_ns, ahead_ns, signature)

    def _refuse_for_time(self, caller: UnverifiedCaller) -> NoReturn:
        ahead = caller.ahead_ns / 1e9
        self.clock_offsets.note_refused(caller.key, caller.stamp_ns, ahead)
        side = "behind" if ahead > 0 else "ahead of"
        raise BadCredentials(
            f"the nonce is {abs(ahead):.0f} s {side} this miner's clock; 120 s are allowed, check both clocks"
        )

    @staticmethod
    def _is_signed(unverified: UnverifiedCaller, method: str, body: bytes) -> bool:
        if method == "GET":
            return any(
                fiber.is_signed(message, unverified.signature, unverified.key)
                for message in fiber.signable_get_messages(unverified.nonce, unverified.miner_hotkey)
            )
        message = fiber.signable_post_message(unverified.nonce, unverified.miner_hotkey, body)
        return fiber.is_signed(message, unverified.signature, unverified.key)


_HEADER_NAMES = {name.encode(): name for name in fiber.AUTH_HEADERS}


def _auth_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The four headers, each exactly once and in ASCII. Two of a kind are refused: proxies differ in which
    one they would have read."""
    values: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = _HEADER_NAMES.get(raw_name)
        if name is None:
            continue
        if name in values:
            raise HeaderInvalid(f"the header {name!r} is given twice; send it once")
        try:
            values[name] = raw_value.decode("ascii")
        except UnicodeDecodeError:
            raise HeaderInvalid(f"the header {name!r} holds bytes that are not ASCII") from None
    for name in fiber.AUTH_HEADERS:
        if name not in values:
            raise HeaderMissing(name)
    return values
