import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from miner.nonces import NonceLedger, NoncesFull
from miner.store import database
from miner.store.books import Books, NonceUsed
from miner.store.writer import StoreUnavailable

KEY = b"k" * 32
SECOND = 1_000_000_000
NOW = 1_764_000_000


@pytest.fixture
async def books(tmp_path: Path):
    made = Books(database.prepare(tmp_path))
    made.writer.start(asyncio.get_running_loop())
    yield made
    await made.writer.close()


def ledger(books: Books, *, max_live: int = 1000) -> NonceLedger:
    made = NonceLedger(books, max_live=max_live)
    made.load(NOW)
    return made


async def test_a_nonce_is_good_once(books: Books) -> None:
    nonces = ledger(books)
    assert not nonces.was_used(KEY, "a")
    await nonces.use(KEY, "a", NOW * SECOND).settle()
    assert nonces.was_used(KEY, "a")
    with pytest.raises(NonceUsed):
        nonces.use(KEY, "a", NOW * SECOND)


async def test_a_nonce_stays_used_after_a_restart(books: Books) -> None:
    await ledger(books).use(KEY, "a", NOW * SECOND).settle()
    assert ledger(books).was_used(KEY, "a")


async def test_a_nonce_is_forgotten_only_when_its_window_is_over(books: Books) -> None:
    nonces = ledger(books)
    await nonces.use(KEY, "future", (NOW + 119) * SECOND).settle()
    await nonces.sweep(NOW + 119 + 120)
    assert nonces.was_used(KEY, "future")
    await nonces.sweep(NOW + 119 + 120 + 7)
    assert len(nonces) == 0
    assert books.live_nonces(0) == []


async def test_a_clock_set_back_reopens_nothing(books: Books) -> None:
    nonces = ledger(books)
    await nonces.use(KEY, "a", NOW * SECOND).settle()
    await nonces.sweep(NOW + 200)
    with pytest.raises(NonceUsed, match="already closed"):
        nonces.use(KEY, "a", NOW * SECOND)


async def test_a_clock_that_ran_ahead_and_was_set_right_shuts_nobody_out(books: Books) -> None:
    nonces = ledger(books)
    await nonces.use(KEY, "a", NOW * SECOND).settle()
    await nonces.sweep(NOW + 86_400)
    with pytest.raises(NonceUsed, match="already closed"):
        nonces.use(KEY, "a", NOW * SECOND)
    await nonces.use(KEY, "b", (NOW + 60) * SECOND).settle()


async def test_at_the_cap_new_requests_are_refused_and_none_forgotten(books: Books) -> None:
    nonces = ledger(books, max_live=4)
    for signer in b"abcd":
        await nonces.use(bytes([signer]) * 32, "n", NOW * SECOND).settle()
    with pytest.raises(NoncesFull):
        nonces.use(KEY, "n", NOW * SECOND)
    assert nonces.was_used(b"a" * 32, "n")


async def test_one_validator_can_not_fill_the_ledger_for_all(books: Books) -> None:
    nonces = ledger(books, max_live=8)
    for name in "ab":
        await nonces.use(KEY, name, NOW * SECOND).settle()
    with pytest.raises(NoncesFull, match="of this hotkey"):
        nonces.use(KEY, "c", NOW * SECOND)
    await nonces.use(b"j" * 32, "c", NOW * SECOND).settle()
    await nonces.sweep(NOW + 200)
    await nonces.use(KEY, "d", (NOW + 200) * SECOND).settle()


async def test_a_clock_that_jumps_by_years_is_swept_at_once(books: Books) -> None:
    nonces = ledger(books)
    await nonces.use(KEY, "a", NOW * SECOND).settle()
    await asyncio.wait_for(nonces.sweep(NOW + 10**9), 60)
    assert len(nonces) == 0


async def test_what_expired_is_dropped_in_slices_until_none_is_left(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.store.books.NONCES_DROPPED_AT_ONCE", 3)
    nonces = ledger(books)
    for name in "abcdefg":
        await nonces.use(KEY, name, NOW * SECOND).settle()
    before = books.writer.pieces
    await nonces.sweep(NOW + 200)
    assert books.writer.pieces - before == 4
    assert books.live_nonces(0) == []


async def test_a_store_that_is_not_to_be_written_is_not_asked_a_second_time(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.store.writer.LOCK_SECONDS", 0.01)
    ticket = ledger(books).use(KEY, "a", NOW * SECOND)
    with closing(database.connect(books.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable):
            await ticket.submit(lambda connection: None)
    with pytest.raises(StoreUnavailable):
        await ticket.settle()
    assert books.writer.batches == 1
