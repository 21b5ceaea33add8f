import asyncio
from contextlib import closing

import pytest

from miner.chain.nonces import NonceLedger, NoncesFull, NonceUsed, insert_nonce, live_nonces
from miner.store import database
from miner.store.database import StoreUnavailable
from miner.store.store import Store

KEY = b"k" * 32
SECOND = 1_000_000_000
NOW = 1_764_000_000


def ledger(store: Store, *, max_live: int = 1000) -> NonceLedger:
    nonces = NonceLedger(store, max_live=max_live)
    nonces.load_live(NOW)
    return nonces


async def test_a_nonce_is_good_once(store: Store) -> None:
    nonces = ledger(store)
    assert not nonces.was_used(KEY, "a")
    await nonces.use(KEY, "a", NOW * SECOND).wait_until_saved()
    assert nonces.was_used(KEY, "a")
    with pytest.raises(NonceUsed):
        nonces.use(KEY, "a", NOW * SECOND)


async def test_the_store_takes_a_nonce_of_a_signer_once(store: Store) -> None:
    uses = [store.write(insert_nonce, signer, "a", NOW) for signer in (KEY, KEY, KEY, b"j" * 32)]
    results = await asyncio.gather(*uses, return_exceptions=True)
    assert [type(result) for result in results].count(NonceUsed) == 2


async def test_a_nonce_is_forgotten_only_when_its_window_is_over(store: Store) -> None:
    nonces = ledger(store)
    await nonces.use(KEY, "future", (NOW + 119) * SECOND).wait_until_saved()
    await nonces.sweep(NOW + 119 + 120)
    assert nonces.was_used(KEY, "future")
    await nonces.sweep(NOW + 119 + 120 + 7)
    assert len(nonces) == 0
    assert store.read_now(live_nonces, 0) == []


async def test_a_clock_that_ran_ahead_and_was_set_right_shuts_nobody_out(store: Store) -> None:
    nonces = ledger(store)
    await nonces.use(KEY, "a", NOW * SECOND).wait_until_saved()
    await nonces.sweep(NOW + 10**9)
    with pytest.raises(NonceUsed, match="already closed"):
        nonces.use(KEY, "a", NOW * SECOND)
    await nonces.use(KEY, "b", (NOW + 60) * SECOND).wait_until_saved()


async def test_at_the_cap_new_requests_are_refused_and_none_forgotten(store: Store) -> None:
    nonces = ledger(store, max_live=4)
    for signer in b"abcd":
        await nonces.use(bytes([signer]) * 32, "n", NOW * SECOND).wait_until_saved()
    with pytest.raises(NoncesFull):
        nonces.use(KEY, "n", NOW * SECOND)
    assert nonces.was_used(b"a" * 32, "n")


async def test_one_validator_cannot_fill_the_ledger_for_all(store: Store) -> None:
    nonces = ledger(store, max_live=8)
    for name in "ab":
        await nonces.use(KEY, name, NOW * SECOND).wait_until_saved()
    with pytest.raises(NoncesFull, match="of this hotkey"):
        nonces.use(KEY, "c", NOW * SECOND)
    await nonces.use(b"j" * 32, "c", NOW * SECOND).wait_until_saved()
    await nonces.sweep(NOW + 200)
    await nonces.use(KEY, "d", (NOW + 200) * SECOND).wait_until_saved()


async def test_what_expired_is_dropped_in_slices_until_none_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.chain.nonces.MAX_DROPPED_NONCES", 3)
    nonces = ledger(store)
    for name in "abcdefg":
        await nonces.use(KEY, name, NOW * SECOND).wait_until_saved()
    before = store.writer.writes
    await nonces.sweep(NOW + 200)
    assert store.writer.writes - before == 4
    assert store.read_now(live_nonces, 0) == []


async def test_a_store_that_is_not_to_be_written_is_not_asked_a_second_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.store.store.LOCK_SECONDS", 0.01)
    ticket = ledger(store).use(KEY, "a", NOW * SECOND)
    with closing(database.connect(store.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable):
            await ticket.write(lambda connection: None)
    with pytest.raises(StoreUnavailable):
        await ticket.wait_until_saved()
    assert store.writer.batches == 1


async def test_a_nonce_is_used_up_even_if_the_work_it_came_with_fails_unexpectedly(store: Store) -> None:
    ticket = ledger(store).use(KEY, "a", NOW * SECOND)

    def fails(_connection: object) -> None:
        raise TypeError("a bug in an endpoint")

    with pytest.raises(TypeError):
        await ticket.write(fails)
    await ticket.wait_until_saved()
    assert ledger(store).was_used(KEY, "a")
