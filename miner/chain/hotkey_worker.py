"""The process that holds the hotkey: opens a keyfile, then signs what comes in.

It imports nothing but the standard library and `bittensor_core`, so no other package can take the
key. `miner.chain.identity` starts it as a file, without `site`, so that no `.pth` file of the
environment runs. Standard input and output are one socket: a line with the order, a line with the answer, and
then a line with a signature for each line with a message, both in hex. It ends with its socket.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

if __name__ == "__main__":
    sys.path.append(sys.argv[1])  # where bittensor_core is

from bittensor_core import (
    KeyfileError,
    Keypair,
    WrongPasswordError,
    decrypt_keyfile_data,
    deserialize_keypair_from_keyfile_data,
    keyfile_data_encryption_method,
    keyfile_data_is_encrypted,
)


class HotkeyProblem(Exception):
    """A problem with the keyfile: its kind, for `miner.chain.identity`, and a detail for the message."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def opened(path: Path, password: str | None) -> Keypair:
    """Return the key of a keyfile. Decryption blocks the interpreter for 3 to 14 seconds."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise HotkeyProblem("missing") from None
    except OSError as error:
        raise HotkeyProblem("unreadable", error.strerror or type(error).__name__) from None
    if keyfile_data_is_encrypted(data):
        data = _decrypted(data, password)
    try:
        keypair = deserialize_keypair_from_keyfile_data(data)
    except (KeyfileError, ValueError):
        # The cause is dropped on purpose: a parser's message may quote what it could not parse.
        raise HotkeyProblem("unusable", "it is not a Bittensor keyfile") from None
    try:
        keypair.sign(b"")
    except (KeyfileError, ValueError, RuntimeError):
        why = "it holds a public key only, and signing needs the private one"
        raise HotkeyProblem("unusable", why) from None
    return keypair


def _decrypted(data: bytes, password: str | None) -> bytes:
    if not password:
        raise HotkeyProblem("locked")
    method = keyfile_data_encryption_method(data)
    try:
        return bytes(decrypt_keyfile_data(data, password))
    except WrongPasswordError:
        raise HotkeyProblem("wrong_password", str(method)) from None
    except KeyfileError as error:
        raise HotkeyProblem("unusable", f"its {method} encryption cannot be undone: {error}") from None


def serve(lines: TextIO, output: TextIO) -> None:
    def answer(text: str) -> None:
        output.write(f"{text}\n")
        output.flush()

    order = json.loads(lines.readline())
    try:
        key = opened(Path(order["path"]), order["password"])
    except HotkeyProblem as problem:
        return answer(json.dumps({"problem": problem.kind, "detail": problem.detail}))
    public = {"public_key": bytes(key.public_key).hex(), "crypto_type": key.crypto_type}
    answer(json.dumps({"address": key.ss58_address, **public}))
    for line in lines:
        answer(bytes(key.sign(bytes.fromhex(line))).hex())
    return None


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
