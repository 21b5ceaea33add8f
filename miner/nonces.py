"""Used nonces: each is good once, also at the same moment and after a restart.

Memory answers, the books remember. A nonce enters only after its signature verified, so a stranger can't
make this grow; what a validator may add is bounded by its rate limit times the window, and by a cap. At
the cap new requests are refused: forgetting a live nonce would let it be replayed. No validator may fill
more than a share of it, or one of them could shut the others out.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter, defaultdict
from typing import Any, TypeVar

from core.errors import GodMinerError
from miner.fiber import NONCE_WINDOW_NS
from miner.store.books import Books, NonceUsed, insert_nonce
from miner.store.writer import StoreUnavailable, Work

T = TypeVar("T")

_SECOND = 1_000_000_000
#: A nonce made in the future is live for longer than one window: until its own clock is a window old.
_GRACE_SECONDS = 5
#: One signer's nonces are at most this part of the cap.
_SHARE = 4


class NoncesFull(GodMinerError):
    """So many live nonces that no more are taken."""

    code = "too_many_nonces"


class NonceTicket:
    """A nonce just used. It goes to disk with whatever its request writes first, or else alone."""

    __slots__ = ("_books", "_row", "_saved")

    def __init__(self, books: Books, signer: bytes, nonce: str, expires_at: float) -> None:
        self._books = books
        self._row = (signer, nonce, expires_at)
        self._saved: asyncio.Future[Any] | None = None

    def submit(self, work: Work[T]) -> asyncio.Future[T]:
        """The writer's `submit`, with the nonce in the same piece."""
        if self._saved is not None:
            return self._books.writer.submit(work)
        row = self._row

        def both(connection: sqlite3.Connection) -> T:
            insert_nonce(connection, *row)
            return work(connection)

        self._saved = future = self._books.writer.submit(both)
        return future

    async def settle(self) -> None:
        """Return once the nonce is on disk, also when what it was to be written with was refused."""
        if self._saved is not None:
            try:
                await self._saved
                return
            except StoreUnavailable:
                raise  # nothing was promised, and asking once more would double the wait for a locked file
            except GodMinerError:
                pass
        await self._books.save_nonce(*self._row)


class NonceLedger:
    def __init__(self, books: Books, *, max_live: int) -> None:
        self._books = books
        self._max_live = max_live
        self._live: set[tuple[bytes, str]] = set()
        self._by_signer: Counter[bytes] = Counter()
        self._by_expiry: defaultdict[int, list[tuple[bytes, str]]] = defaultdict(list)
        #: The second up to which nonces were forgotten.
        self._closed_until = 0

    def __len__(self) -> int:
        return len(self._live)

    def load(self, now: float) -> None:
        """Take up what earlier lives of this daemon have accepted."""
        self._closed_until = int(now)
        for signer, nonce, expires_at in self._books.live_nonces(now):
            self._remember((signer, nonce), int(expires_at) + 1)

    def was_used(self, signer: bytes, nonce: str) -> bool:
        return (signer, nonce) in self._live

    def use(self, signer: bytes, nonce: str, stamp_ns: int) -> NonceTicket:
        """Use up a nonce whose signature verified. Settle the ticket before any reply."""
        entry = (signer, nonce)
        if entry in self._live:
            raise NonceUsed("this nonce was used before; every request needs a new one")
        if len(self._live) >= self._max_live:
            raise NoncesFull(f"{len(self._live)} requests in the last minutes are the most this miner takes")
        if self._by_signer[signer] >= max(1, self._max_live // _SHARE):
            raise NoncesFull(
                f"{self._by_signer[signer]} requests of this hotkey in the last minutes are the most"
            )
        expires_at = (stamp_ns + NONCE_WINDOW_NS) / _SECOND + _GRACE_SECONDS
        if expires_at <= self._closed_until:
            # Our clock was set back: this nonce's time is forgotten, so nobody can tell whether it was used.
            raise NonceUsed("this nonce is from a time that is already closed; make a new one")
        self._remember(entry, int(expires_at) + 1)
        return NonceTicket(self._books, signer, nonce, expires_at)

    async def sweep(self, now: float) -> None:
        """Forget what can't be replayed any more, here and in the books."""
        for second in [second for second in self._by_expiry if second <= int(now)]:
            # Not `now`: a clock that ran ahead for a moment would close all the time up to there, and every
            # request would be refused until it has passed.
            self._closed_until = max(self._closed_until, second)
            for entry in self._by_expiry.pop(second):
                self._live.discard(entry)
                self._by_signer[entry[0]] -= 1
        while await self._books.drop_nonces(now):
            pass  # in slices, with requests in between

    def _remember(self, entry: tuple[bytes, str], expiry: int) -> None:
        self._live.add(entry)
        self._by_signer[entry[0]] += 1
        self._by_expiry[expiry].append(entry)
