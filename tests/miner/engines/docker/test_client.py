"""Docker's API without a daemon, or with a silent one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from miner.engines.base import EngineUnreachable
from miner.engines.docker.client import DockerClient


async def test_no_socket_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(EngineUnreachable, match="does not run: No such file"):
        await DockerClient(f"unix://{tmp_path}/none").query("ping", lambda api: api.ping())


async def test_a_socket_that_nobody_listens_on_is_unreachable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    with pytest.raises(EngineUnreachable, match="Connection refused"):
        await DockerClient(f"unix://{tmp_path}/s").query("ping", lambda api: api.ping())


async def test_a_socket_that_is_not_ours_says_how_to_get_it(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is closed to root")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        (tmp_path / "s").chmod(0)
        with pytest.raises(EngineUnreachable, match="usermod -aG docker"):
            await DockerClient(f"unix://{tmp_path}/s").query("ping", lambda api: api.ping())


async def test_a_silent_socket_is_unreachable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        with pytest.raises(EngineUnreachable, match="cannot be used"):
            await DockerClient(f"unix://{tmp_path}/s", query_timeout_s=0.2).query(
                "ping", lambda api: api.ping()
            )
