"""What is done now and then."""

from __future__ import annotations

import pytest

from miner.housekeeping import Chore, Housekeeping


async def test_one_chore_that_fails_keeps_no_other_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def fails() -> None:
        raise RuntimeError("a bug")

    async def works() -> None:
        done.append("works")

    house = Housekeeping([Chore("failing", fails), Chore("working", works)])
    await house.round()
    await house.round()
    assert done == ["works", "works"]
    assert "housekeeping failed at: failing" in caplog.text


async def test_a_chore_is_done_as_often_as_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = 100.0, []

    async def rare() -> None:
        done.append(now)

    monkeypatch.setattr("time.monotonic", lambda: now)
    house = Housekeeping([Chore("rare", rare, every=60.0)])
    for now in (100.0, 159.0, 160.0, 219.0, 220.0):  # noqa: B007 - read by the clock
        await house.round()
    assert done == [100.0, 160.0, 220.0]


async def test_it_ends_when_told_to() -> None:
    house = Housekeeping([])
    house.start()
    await house.stop()
    await house.stop()
