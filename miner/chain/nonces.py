"""Used nonces: each is good once, also for two requests at the same moment and after a restart.

They are looked up in memory and kept in the store. A nonce enters only after its signature verified, so a
stranger cannot make this grow; what a validator may add is bounded by its rate limit times the window, and by
a cap. At the cap new requests are refused: forgetting a live nonce would let it be replayed. No validator
may fill more than a share of it, or one of them could shut the others out.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from core.domain.errors import GodMinerError
from miner.chain.fiber import NONCE_WINDOW_NS
from miner.store.database import StoreUnavailable
from miner.store.store import Store

P = ParamSpec("P")
T = TypeVar("T")

_NANOSECONDS = 1_000_000_000
#: A nonce made in the future is live for longer than one window: until its own clock is a window old.
_GRACE_SECONDS = 5
#: Most nonces that are remembered; beyond that, requests get 503.
MAX_LIVE_NONCES = 500_000
#: One signer's nonces are at most this part of the cap.
_MAX_SIGNER_FRACTION = 4


_INSERT_NONCE = "INSERT INTO nonces (signer, nonce, expires_at) VALUES (?, ?, ?)"
_DROP_NONCES = (
    "DELETE FROM nonces WHERE (signer, nonce) IN "
    "(SELECT signer, nonce FROM nonces WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)"
)
#: Half a million expired nonces, as after a busy hour and a restart, would hold the event loop for a second.
MAX_DROPPED_NONCES = 5000


class NonceUsed(GodMinerError):
    code = "nonce_used"


class NoncesFull(GodMinerError):
    """There are so many live nonces that no more are accepted."""

    code = "too_many_nonces"


class NonceTicket:
    """A nonce just used, and the transaction of its request.

    It goes to disk with whatever the request writes first, through `write`, or else alone: so that a reply,
    before which both must be on disk, costs one fsync.
    """

    __slots__ = ("_row", "_saved", "_store")

    def __init__(self, store: Store, signer: bytes, nonce: str, expires_at: float) -> None:
        self._store = store
        self._row = (signer, nonce, expires_at)
        self._saved: asyncio.Future[Any] | None = None

    def write(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """`Store.write`; the first piece of work also writes the nonce, in the same transaction."""
        if self._saved is not None:
            return self._store.write(work, *args, **kwargs)
        row = self._row

        def with_nonce(connection: sqlite3.Connection) -> T:
            insert_nonce(connection, *row)
            return work(connection, *args, **kwargs)

        self._saved = future = self._store.write(with_nonce)
        return future

    async def wait_until_saved(self) -> None:
        """Return once the nonce is on disk, also if the work that it was written with failed."""
        if self._saved is not None:
            try:
                await self._saved
                return
            except StoreUnavailable:
                raise  # nothing was accepted, and another try would double the wait for a locked file
            except Exception:  # noqa: BLE001, S110 - who awaits that work gets the error; the nonce goes alone
                pass
        await self._store.write(insert_nonce, *self._row)


class NonceLedger:
    def __init__(self, store: Store, *, max_live: int = MAX_LIVE_NONCES) -> None:
        self._store = store
        self._max_live = max_live
        self._live: set[tuple[bytes, str]] = set()
        self._by_signer: Counter[bytes] = Counter()
        self._by_expiry: defaultdict[int, list[tuple[bytes, str]]] = defaultdict(list)
        #: Nonces that expired up to this second are forgotten.
        self._expired_until = 0

    def __len__(self) -> int:
        return len(self._live)

    def load_live(self, now: float) -> None:
        """Load what this daemon accepted before its restart."""
        self._expired_until = int(now)
        for signer, nonce, expires_at in self._store.read_now(live_nonces, now):
            self._remember((signer, nonce), int(expires_at) + 1)

    def was_used(self, signer: bytes, nonce: str) -> bool:
        return (signer, nonce) in self._live

    def use(self, signer: bytes, nonce: str, stamp_ns: int) -> NonceTicket:
        """Use up a nonce whose signature verified. Await the ticket's `wait_until_saved` before a reply."""
        entry = (signer, nonce)
        if entry in self._live:
            raise NonceUsed("this nonce was used before; every request needs a new one")
        if len(self._live) >= self._max_live:
            raise NoncesFull(f"{len(self._live)} requests in the last minutes are the most this miner takes")
        if self._by_signer[signer] >= max(1, self._max_live // _MAX_SIGNER_FRACTION):
            raise NoncesFull(
                f"{self._by_signer[signer]} requests of this hotkey in the last minutes are the most"
            )
        expires_at = (stamp_ns + NONCE_WINDOW_NS) / _NANOSECONDS + _GRACE_SECONDS
        if expires_at <= self._expired_until:
            # Our clock was set back: this nonce's time is forgotten, whether it was used cannot be known.
            raise NonceUsed("this nonce is from a time that is already closed; make a new one")
        self._remember(entry, int(expires_at) + 1)
        return NonceTicket(self._store, signer, nonce, expires_at)

    async def sweep(self, now: float) -> None:
        """Drop the nonces that can no longer be replayed, here and in the store."""
        for second in [second for second in self._by_expiry if second <= int(now)]:
            # Not `now`: a clock that ran ahead for a moment would close all the time up to there, and every
            # request would be refused until it has passed.
            self._expired_until = max(self._expired_until, second)
            for entry in self._by_expiry.pop(second):
                self._live.discard(entry)
                self._by_signer[entry[0]] -= 1
        while await self._store.write(drop_nonces, now):
            pass  # in slices, with requests in between

    def _remember(self, entry: tuple[bytes, str], expiry: int) -> None:
        self._live.add(entry)
        self._by_signer[entry[0]] += 1
        self._by_expiry[expiry].append(entry)


def insert_nonce(connection: sqlite3.Connection, signer: bytes, nonce: str, expires_at: float) -> None:
    try:
        connection.execute(_INSERT_NONCE, (signer, nonce, expires_at))
    except sqlite3.IntegrityError:
        raise NonceUsed("this nonce was used before; every request needs a new one") from None


def drop_nonces(connection: sqlite3.Connection, now: float) -> int:
    """Delete one batch of expired nonces, the oldest first; return the count."""
    return connection.execute(_DROP_NONCES, (now, MAX_DROPPED_NONCES)).rowcount


def live_nonces(connection: sqlite3.Connection, now: float) -> list[tuple[bytes, str, float]]:
    """Return signer, nonce and expiry of every nonce that could still be replayed."""
    rows = connection.execute("SELECT signer, nonce, expires_at FROM nonces WHERE expires_at > ?", (now,))
    return [(row["signer"], row["nonce"], row["expires_at"]) for row in rows]
