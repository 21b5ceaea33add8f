from __future__ import annotations

import socket
from random import Random

import pytest

from miner.jobs import loopback


def test_a_port_is_free_and_nobody_elses() -> None:
    random = Random(3)
    first = loopback.free_port((), random)
    assert first in loopback.RANGE
    assert loopback.free_port({first}, Random(3)) != first


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    random = Random(4)
    wanted = loopback.free_port((), Random(4))
    with socket.create_server(("127.0.0.1", wanted)):
        assert loopback.free_port((), random) != wanted


def test_a_machine_without_a_free_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "_is_free", lambda _port: False)
    with pytest.raises(OSError, match="no port of 20000-29999 is free"):
        loopback.free_port((), Random(1))
