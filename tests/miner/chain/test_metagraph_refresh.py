from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miner.chain import metagraph_refresh
from miner.chain.metagraph import ChainError, ChainUnavailable, Metagraph, WrongChain
from miner.chain.metagraph_refresh import RETRY_SECONDS, MetagraphRefresher, RefreshTimes
from miner.observe.alerts import AlertKind
from tests.miner.chain.fake_source import FakeSource
from tests.miner.chain.test_metagraph import graph, key, node

DOWN = ChainUnavailable("the node is down")
HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class RefresherHarness:
    """A refresher whose source, clock and pauses the test controls."""

    def __init__(self, *answers: Metagraph | BaseException, cache_path: Path | None = None, **source: Any):
        self.clock = Clock()
        self.alerts: list[tuple[str, str]] = []
        self.source = FakeSource(answers, **source)
        self.pauses: list[float] = []
        self._turn = asyncio.Event()
        self.refresher = MetagraphRefresher(
            self.source,
            cache_path=cache_path,
            times=RefreshTimes(300, HOUR),
            on_alert=lambda code, text: self.alerts.append((code, text)),
            clock=self.clock,
            pause=self._pause,
        )

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self._turn.wait()
        self._turn.clear()

    async def next_round(self) -> None:
        """Let the refresher's wait end, and wait until it waits again."""
        self._turn.set()
        await self.rounds(len(self.pauses) + 1)

    async def rounds(self, count: int) -> None:
        for _ in range(60_000):
            if len(self.pauses) >= count:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{count} rounds did not happen, only {len(self.pauses)}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MetagraphRefresher]:
        await self.refresher.start()
        try:
            yield self.refresher
        finally:
            await self.refresher.stop()


def at(moment: float, *, block: int = 1) -> Metagraph:
    return replace(graph(node(0)), fetched_at=moment, block=block)


async def test_what_was_read_is_served_until_the_next_reading_is_there() -> None:
    harness = RefresherHarness(at(1000.0, block=1), at(1300.0, block=2))
    async with harness.running() as refresher:
        await harness.rounds(1)
        first = refresher.current
        await harness.next_round()
        assert (first.block, refresher.current.block) == (1, 2)
        assert harness.pauses == [300, 300]


async def test_a_chain_that_is_down_leaves_the_old_metagraph_with_its_age() -> None:
    harness = RefresherHarness(at(1000.0), DOWN)
    await harness.refresher.refresh_once()
    harness.clock.now = 1400.0
    fresh = await harness.refresher.refresh_once()
    status = harness.refresher.status()
    assert not fresh
    assert harness.refresher.current is not None
    assert (status.age, status.nodes, status.stale) == (400.0, 1, False)
    assert (status.last_error, status.last_error_at) == ("the node is down", 1400.0)
    assert harness.alerts == []
    harness.clock.now = 900.0  # set back
    assert harness.refresher.age() == 0.0


async def test_past_its_time_it_is_stale_which_alerts_once_until_it_recovers() -> None:
    harness = RefresherHarness(at(1000.0), DOWN, DOWN, at(5000.0), DOWN)
    await harness.refresher.refresh_once()
    harness.clock.now = 1001.0 + HOUR
    await harness.refresher.refresh_once()
    await harness.refresher.refresh_once()
    assert harness.refresher.status().stale
    ((kind, text),) = harness.alerts
    assert kind == AlertKind.METAGRAPH_STALE
    for part in ("3601 s old", "3600 s", "the node is down"):
        assert part in text
    await harness.refresher.refresh_once()
    assert harness.refresher.status().last_error is None
    harness.clock.now = 5001.0 + HOUR
    await harness.refresher.refresh_once()
    assert [kind for kind, _ in harness.alerts] == [
        AlertKind.METAGRAPH_STALE,
        AlertKind.METAGRAPH_RECOVERED,
        AlertKind.METAGRAPH_STALE,
    ]


async def test_never_having_had_a_metagraph_is_stale_in_the_end() -> None:
    harness = RefresherHarness(DOWN, DOWN)
    await harness.refresher.refresh_once()
    assert harness.refresher.age() is None
    assert harness.alerts == []
    harness.clock.now += HOUR + 1
    await harness.refresher.refresh_once()
    assert harness.refresher.status().stale
    assert "no metagraph at all" in harness.alerts[0][1]


@pytest.mark.parametrize(
    "error", [ChainError("no subnet 56", code="no_such_subnet"), WrongChain("another chain")]
)
async def test_what_only_the_operator_can_mend_alerts_at_once_and_once(error: Exception) -> None:
    harness = RefresherHarness(error, error)
    await harness.refresher.refresh_once()
    await harness.refresher.refresh_once()
    assert harness.alerts == [(error.code, str(error))]  # type: ignore[attr-defined]


async def test_failures_are_tried_again_soon_and_then_less_and_less_often() -> None:
    harness = RefresherHarness(*[DOWN] * 9)
    async with harness.running():
        await harness.rounds(1)
        for _ in range(8):
            await harness.next_round()
        assert harness.pauses == [RETRY_SECONDS * 2**n for n in range(6)] + [300.0] * 3


async def test_a_source_that_is_cheap_to_ask_is_asked_more_often() -> None:
    harness = RefresherHarness(at(1.0), DOWN, poll_seconds=1.0)
    async with harness.running():
        await harness.rounds(1)
        await harness.next_round()
        assert harness.pauses == [1.0, 1.0]


async def test_a_bug_in_a_source_does_not_end_the_refreshing(caplog: pytest.LogCaptureFixture) -> None:
    harness = RefresherHarness(RuntimeError("a bug"), at(1000.0))
    async with harness.running() as refresher:
        await harness.rounds(1)
        await harness.next_round()
        assert refresher.current is not None
    assert "RuntimeError: a bug" in caplog.text


async def test_a_start_waits_for_nothing() -> None:
    gate = asyncio.Event()

    class Slow(FakeSource):
        async def metagraph(self) -> Metagraph:
            await gate.wait()
            raise DOWN

    refresher = MetagraphRefresher(Slow(), cache_path=None, times=RefreshTimes(300, HOUR))
    await refresher.start()
    assert refresher.current is None
    await refresher.stop()


async def test_stopping_ends_the_refreshing() -> None:
    harness = RefresherHarness(at(1000.0))
    async with harness.running():
        await harness.rounds(1)
    assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_restart_with_the_chain_down_serves_what_was_kept_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "metagraph.json"
    before = RefresherHarness(at(1000.0, block=7), cache_path=path)
    await before.refresher.refresh_once()
    after = RefresherHarness(DOWN, cache_path=path)
    after.clock.now = 1000.0 + 2 * HOUR
    async with after.running() as refresher:
        assert refresher.current.block == 7
        assert refresher.age() == 2 * HOUR
        await after.rounds(1)
        assert refresher.status().stale
    assert [code for code, _ in after.alerts] == [AlertKind.METAGRAPH_STALE]


async def test_the_disk_is_written_only_when_something_changed(tmp_path: Path) -> None:
    path = tmp_path / "metagraph.json"
    same = at(1000.0)
    harness = RefresherHarness(same, same.with_fetched_at(1001.0), at(1002.0, block=2), cache_path=path)
    inodes = []
    for _ in range(3):
        await harness.refresher.refresh_once()
        inodes.append(path.stat().st_ino)
    assert inodes[0] == inodes[1] != inodes[2]


async def test_a_disk_that_cannot_be_written_costs_a_log_line_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    harness = RefresherHarness(at(1000.0), cache_path=tmp_path / "metagraph.json")
    assert await harness.refresher.refresh_once()
    assert harness.refresher.current is not None
    assert "No space left on device" in caplog.text


async def test_a_metagraph_of_another_chain_is_dropped_as_soon_as_the_chain_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metagraph.json"
    metagraph_refresh.save_metagraph(path, replace(at(1000.0), genesis="0xaa"))
    harness = RefresherHarness(DOWN, cache_path=path)
    async with harness.running() as refresher:
        assert refresher.current is not None
        harness.source.genesis = "0xbb"
        await harness.rounds(1)
        assert refresher.current is None
    assert "of another chain" in caplog.text


async def test_a_node_of_the_wrong_chain_does_not_spoil_the_right_metagraph() -> None:
    harness = RefresherHarness(
        replace(at(1000.0), genesis="0xaa"), WrongChain("it serves 0xbb"), genesis="0xaa"
    )
    await harness.refresher.refresh_once()
    await harness.refresher.refresh_once()
    assert harness.refresher.current is not None


async def test_repeated_failures_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    harness = RefresherHarness(DOWN, DOWN, ChainUnavailable("something else"))
    for _ in range(3):
        await harness.refresher.refresh_once()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "could not refresh the metagraph from test: the node is down",
        "could not refresh the metagraph from test: something else",
    ]


GENESIS = "0x" + "11" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "metagraph.json"


def full() -> Metagraph:
    nodes = (node(0, 0.5, ip="8.8.4.4", port=7999, emission=2.5), node(3, ip="2001:db8::1", port=1))
    return replace(graph(*nodes), genesis=GENESIS, fetched_at=123.5)


def test_what_was_saved_comes_back_whole(path: Path) -> None:
    saved = full()
    metagraph_refresh.save_metagraph(path, saved)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["metagraph.json"]
    loaded = metagraph_refresh.load_metagraph(path, FakeSource())
    assert loaded == saved
    assert loaded.nodes_by_key.get(key(3)) == saved.nodes[1]


def test_no_cache_is_no_metagraph_and_no_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert metagraph_refresh.load_metagraph(path, FakeSource()) is None
    assert not caplog.records


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 2}', b'{"format": 1, "nodes": []}', b"\x00" * 4096],
)
def test_a_corrupt_cache_is_ignored_with_a_log_line(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    assert metagraph_refresh.load_metagraph(path, FakeSource()) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"ignoring the metagraph cache {path}" in record.getMessage()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2000), flip=st.integers(0, 255))
def test_no_damage_to_the_file_raises(path: Path, cut: int, flip: int) -> None:
    metagraph_refresh.save_metagraph(path, full())
    content = bytearray(path.read_bytes())
    content[cut % len(content)] ^= flip
    path.write_bytes(content[: len(content) - cut // 3])
    loaded = metagraph_refresh.load_metagraph(path, FakeSource())
    assert loaded is None or len(loaded.nodes) == 2


@pytest.mark.parametrize(
    ("source", "served"),
    [
        (FakeSource(), True),
        (FakeSource(netuid=241), False),
        (FakeSource(name="bittensor:another"), False),
        (FakeSource(genesis=GENESIS), True),
        (FakeSource(genesis=GENESIS, name="another node of the same chain"), True),
        (FakeSource(genesis="0x" + "22" * 32), False),
    ],
)
def test_only_the_metagraph_of_the_right_subnet_and_chain_is_served(
    path: Path, source: FakeSource, served: bool, caplog: pytest.LogCaptureFixture
) -> None:
    metagraph_refresh.save_metagraph(path, full())
    assert (metagraph_refresh.load_metagraph(path, source) is not None) is served
    assert bool(caplog.records) is not served
