"""Docker's API when there is nobody, or nobody who talks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from miner.engines.base import Unreachable
from miner.engines.docker.client import Client


async def test_no_socket_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="does not run: No such file"):
        await Client(f"unix://{tmp_path}/none").ask("ping", lambda api: api.ping())


async def test_a_socket_that_nobody_listens_on_is_unreachable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    with pytest.raises(Unreachable, match="Connection refused"):
        await Client(f"unix://{tmp_path}/s").ask("ping", lambda api: api.ping())


async def test_a_socket_that_is_not_ours_says_how_to_get_it(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is closed to root")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        (tmp_path / "s").chmod(0)
        with pytest.raises(Unreachable, match="usermod -aG docker"):
            await Client(f"unix://{tmp_path}/s").ask("ping", lambda api: api.ping())


async def test_one_who_listens_and_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        with pytest.raises(Unreachable, match="can not be asked"):
            await Client(f"unix://{tmp_path}/s", look_s=0.2).ask("ping", lambda api: api.ping())
