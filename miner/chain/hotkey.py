"""Access to the hotkey: its public half, and a socket to the process that holds the private one."""

from __future__ import annotations

import socket
from typing import Any

#: Time limit of one signature, on a machine that is busy training.
SIGN_SECONDS = 30.0


class Hotkey:
    """The public half of a hotkey, and the socket of the process that signs with it."""

    def __init__(self, answer: dict[str, Any], channel: socket.socket) -> None:
        self.ss58_address: str = answer["address"]
        self.public_key = bytes.fromhex(answer["public_key"])
        self.crypto_type: int = answer["crypto_type"]
        #: May be passed on to one process, which then signs instead of this one.
        self.channel = channel

    def sign(self, message: bytes, /) -> bytes:
        return bytes.fromhex(ask_line(self.channel, message.hex()))


def ask_line(channel: socket.socket, line: str) -> str:
    """Send a line to the hotkey's process and return its answer."""
    channel.sendall(f"{line}\n".encode())
    answer = b""
    while not answer.endswith(b"\n"):
        piece = channel.recv(65_536)
        if not piece:
            raise ConnectionError("the hotkey's process has ended")
        answer += piece
    return answer.decode().strip()
