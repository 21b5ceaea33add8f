from __future__ import annotations

import socket

import pytest

from miner.api.status import HubStatus
from miner.publish.reachable import NO_ADDRESS, HubReachability

pytestmark = pytest.mark.process


async def test_a_hub_that_goes_and_comes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        hub = HubReachability(f"http://127.0.0.1:{port}", lambda: 7.0)
        assert hub.status() == HubStatus(endpoint=hub.endpoint, checked_at=None, problem=None)
        await hub.check()
        assert (hub.problem, hub.checked_at) == (None, 7.0)
    await hub.check()
    assert hub.problem is not None
    assert f"127.0.0.1:{port} cannot be reached" in hub.problem
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        await hub.check()
        assert hub.problem is None


@pytest.mark.parametrize("proxy", ["http://user:pass/word@127.0.0.1:1", "http://user:password@"])
async def test_an_address_of_a_proxy_that_cannot_be_read_is_a_problem_and_stays_secret(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    hub = HubReachability("http://127.0.0.1:1", lambda: 7.0)
    await hub.check()
    assert (hub.problem, hub.checked_at) == (NO_ADDRESS, 7.0)
