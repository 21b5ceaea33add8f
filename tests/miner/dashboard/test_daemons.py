"""One poller per daemon and address, for all pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from miner.api.base import Answer
from miner.dashboard.daemons import DaemonLink, DaemonTrouble, build_links, link_named
from miner.settings.model import Settings


class Asked(Answer):
    asked: int


class Daemon:
    """What stands behind the operator port."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.up = True
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.up:
            raise httpx.ConnectError("connection refused")
        self.asked.append((request.url.path, request.headers.get("authorization", "")))
        if self.status != 200:
            return httpx.Response(self.status, json={"message": "no such job"})
        return httpx.Response(200, json={"asked": len(self.asked)})


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def link(daemon: Daemon) -> DaemonLink:
    made = DaemonLink("rack1", lambda: "http://daemon", lambda: "the-token")
    made._client = httpx.AsyncClient(transport=httpx.MockTransport(daemon))
    return made


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


def ignore(_value: Any) -> None:
    pass


async def test_twenty_pages_cost_as_much_as_one_and_none_costs_nothing(
    link: DaemonLink, daemon: Daemon
) -> None:
    seen: list[list[Asked]] = [[] for _ in range(20)]
    stops = [link.watch("/status", Asked, 0.1, one.append, ignore) for one in seen]
    await until(lambda: all(len(one) >= 2 for one in seen))
    looks = len(seen[0])
    assert len(daemon.asked) <= looks + 1
    assert daemon.asked[0] == ("/status", "Bearer the-token")
    for stop in stops:
        stop()
    asked = len(daemon.asked)
    await asyncio.sleep(0.25)  # two turns would have come
    assert len(daemon.asked) == asked
    # What a page showed yesterday is not what the next one begins with.
    fresh: list[Asked] = []
    stop = link.watch("/status", Asked, 0.1, fresh.append, ignore)
    assert fresh == []
    await until(lambda: fresh)
    stop()


async def test_a_lost_daemon_is_reported_once_and_is_back_by_itself(
    link: DaemonLink, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.dashboard.daemons.RETRY_SECONDS", 0.1)
    reported: list[float | None] = []
    seen: list[Asked] = []
    link.listen(lambda one: reported.append(one.lost_at))
    stop = link.watch("/status", Asked, 0.1, seen.append, ignore)
    await until(lambda: seen)
    daemon.up = False
    await until(lambda: link.lost_at is not None)
    shown = len(seen)
    daemon.up = True
    await until(lambda: len(seen) > shown)
    assert link.lost_at is None
    assert [at is not None for at in reported] == [True, False]
    stop()


async def test_a_refusal_is_the_pages_trouble_and_not_a_lost_daemon(link: DaemonLink, daemon: Daemon) -> None:
    daemon.status = 404
    troubles: list[DaemonTrouble | None] = []
    stop = link.watch("/jobs/9", Asked, 0.1, ignore, troubles.append)
    await until(lambda: troubles)
    assert (str(troubles[0]), troubles[0] and troubles[0].status) == ("no such job", 404)
    assert link.lost_at is None
    stop()


async def test_a_page_that_cannot_show_it_does_not_keep_it_from_others(link: DaemonLink) -> None:
    def fail(_data: Asked) -> None:
        raise RuntimeError("a page is broken")

    seen: list[Asked] = []
    stops = [link.watch("/status", Asked, 0.1, show, ignore) for show in (fail, seen.append)]
    await until(lambda: len(seen) >= 2)
    for stop in stops:
        stop()


async def test_an_action_carries_the_typed_token_and_a_wrong_one_is_not_ours(
    link: DaemonLink, daemon: Daemon
) -> None:
    await link.request("POST", "/jobs/3/cancel", Asked, token="typed")
    assert daemon.asked[-1] == ("/jobs/3/cancel", "Bearer typed")
    daemon.status = 401
    with pytest.raises(DaemonTrouble) as refused:
        await link.request("POST", "/jobs/3/cancel", Asked, token="wrong")
    assert refused.value.status == 401
    assert link.lost_at is None


async def test_each_daemon_has_its_token_in_a_file_or_this_machines(tmp_path: Any) -> None:
    (tmp_path / "operator-token").write_text("own\n")
    (tmp_path / "operator-token-rack2").write_text("of rack 2\n")
    settings = Settings(
        data_dir=tmp_path,
        dashboard_daemons=("rack1=http://127.0.0.1:7998", "rack2=https://rack2.example.org"),
    )
    links = build_links(settings)
    assert [(one.name, one._find_url(), one._find_token()) for one in links] == [
        ("rack1", "http://127.0.0.1:7998", "own"),
        ("rack2", "https://rack2.example.org", "of rack 2"),
    ]
    assert link_named(links, "rack2") is links[1]
    assert link_named(links, "gone") is links[0]
