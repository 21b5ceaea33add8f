"""Ports for `accelerate launch`: one per job, because the second job on 29500 dies with "address in use"."""

from __future__ import annotations

import socket
from collections.abc import Collection
from random import Random

#: Below what the system hands out by itself: nobody's outgoing connection takes one between now and then.
RANGE = range(20_000, 30_000)
_TRIES = 200


def free_port(taken: Collection[int], random: Random) -> int:
    """One that nobody listens on and no job of ours has been given."""
    for _ in range(_TRIES):
        port = random.choice(RANGE)
        if port not in taken and _is_free(port):
            return port
    raise OSError(f"no port of {RANGE.start}-{RANGE.stop - 1} is free on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
