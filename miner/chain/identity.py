"""The miner's hotkey: read from a Bittensor wallet, opened once, and never shown.

Only `bittensor_core` is used: importing the SDK for this would cost half a second and 45 MB.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from bittensor_core import (
    KeyfileError,
    Keypair,
    deserialize_keypair_from_keyfile_data,
    encrypt_keyfile_data,
    keyfile_data_encryption_method,
    keyfile_data_is_encrypted,
    serialized_keypair_to_keyfile_data,
)
from pydantic import SecretStr

from core.domain.errors import GodMinerError
from miner.settings import Settings

log = logging.getLogger(__name__)

#: Opening an encrypted key was measured at 3 to 14 seconds of one core.
UNLOCK_SECONDS = 180.0

#: Runs in a process of its own, see `_decrypted`. Reads a line with the password's length, the password and
#: the keyfile; writes the plain keyfile.
_UNLOCKER = """
import sys
from bittensor_core import KeyfileError, WrongPasswordError, decrypt_keyfile_data
size = int(sys.stdin.buffer.readline())
password, data = sys.stdin.buffer.read(size).decode(), sys.stdin.buffer.read()
try:
    sys.stdout.buffer.write(bytes(decrypt_keyfile_data(data, password)))
except WrongPasswordError:
    sys.exit(3)
except KeyfileError as error:
    sys.stderr.write(str(error))
    sys.exit(4)
"""
_WRONG_PASSWORD, _UNREADABLE = 3, 4


class IdentityError(GodMinerError):
    """The hotkey cannot be used."""

    code = "bad_identity"


class HotkeyMissing(IdentityError):
    code = "hotkey_missing"


class PasswordNeeded(IdentityError):
    code = "hotkey_locked"


class WrongPassword(IdentityError):
    code = "wrong_password"


class Identity:
    """A hotkey that can sign. Its text forms show the address only, and it cannot be pickled or copied."""

    __slots__ = ("_keypair", "public_key", "ss58_address")

    def __init__(self, keypair: Keypair) -> None:
        self._keypair = keypair
        self.public_key: bytes = bytes(keypair.public_key)
        self.ss58_address: str = keypair.ss58_address

    def keyfile(self) -> str:
        """The private key as a plain keyfile, for the process that submits extrinsics. Never log this."""
        return bytes(serialized_keypair_to_keyfile_data(self._keypair)).decode()

    def sign(self, message: bytes, /) -> bytes:
        return bytes(self._keypair.sign(message))

    def __repr__(self) -> str:
        return f"Identity({self.ss58_address})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Identity holds a private key and cannot be pickled or copied")


def load_identity(settings: Settings) -> Identity:
    """Open the hotkey that the settings name. Blocks: an encrypted one takes seconds. Never prompts."""
    return open_hotkey(
        hotkey_file(settings.wallet_path, settings.wallet_name, settings.hotkey_name),
        settings.wallet_password,
    )


def hotkey_file(wallet_path: Path, wallet_name: str, hotkey_name: str) -> Path:
    """Where Bittensor's tools keep a hotkey."""
    for variable, name in (("WALLET_NAME", wallet_name), ("HOTKEY_NAME", hotkey_name)):
        if name in ("", ".", "..") or Path(name).name != name:
            raise IdentityError(f"{variable} has value {name!r}: give a wallet's plain name, not a path")
    return wallet_path.expanduser() / wallet_name / "hotkeys" / hotkey_name


def open_hotkey(path: Path, password: SecretStr | None = None) -> Identity:
    """The identity in a keyfile, plain or encrypted."""
    data = _read(path)
    _warn_if_others_can_read(path)
    if keyfile_data_is_encrypted(data):
        data = _decrypted(path, data, password)
    try:
        keypair = deserialize_keypair_from_keyfile_data(data)
    except (KeyfileError, ValueError):
        # The cause is dropped on purpose: a parser's message may quote what it could not parse.
        raise _unusable_hotkey(path, "it is not a Bittensor keyfile") from None
    if not _can_sign(keypair):
        raise _unusable_hotkey(path, "it holds a public key only, and signing needs the private one")
    return Identity(keypair)


def address_without_password(settings: Settings) -> str | None:
    """The hotkey's address without opening it, None when that needs the password.

    Bittensor's tools write the public half beside the key, as `<hotkey>pub.txt`.
    """
    path = hotkey_file(settings.wallet_path, settings.wallet_name, settings.hotkey_name)
    public = path.with_name(f"{path.name}pub.txt")
    try:
        address = json.loads(public.read_bytes())["ss58Address"]
    except (OSError, ValueError, KeyError, TypeError):
        data = _read(path)
        return None if keyfile_data_is_encrypted(data) else open_hotkey(path).ss58_address
    return str(address)


def password_problem(settings: Settings) -> str | None:
    """Why an encrypted hotkey cannot be opened; None if it can, or is not encrypted. Blocks for seconds."""
    try:
        path = hotkey_file(settings.wallet_path, settings.wallet_name, settings.hotkey_name)
        if keyfile_data_is_encrypted(_read(path)):
            open_hotkey(path, settings.wallet_password)
    except IdentityError as error:
        return str(error)
    return None


def create_temporary_hotkey(
    wallet_path: Path, wallet_name: str, hotkey_name: str = "default", *, password: SecretStr | None = None
) -> Identity:
    """Make a new random hotkey on disk, as Bittensor's tools would. Never overwrites one.

    For trials: its seed words are not kept anywhere, so nothing of worth must be tied to it.
    """
    keypair = Keypair.create_from_seed(secrets.token_bytes(32))
    path = hotkey_file(wallet_path, wallet_name, hotkey_name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    data = bytes(serialized_keypair_to_keyfile_data(keypair))
    if password is not None:
        data = bytes(encrypt_keyfile_data(data, password.get_secret_value()))
    _create(path, data)
    public = Keypair(ss58_address=keypair.ss58_address)
    _create(path.with_name(f"{hotkey_name}pub.txt"), bytes(serialized_keypair_to_keyfile_data(public)))
    return Identity(keypair)


def _create(path: Path, data: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise IdentityError(f"{path} exists: a hotkey is never overwritten, choose another name") from None
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise HotkeyMissing(
            f"there is no hotkey at {path}: make one with `btcli wallet new-hotkey`, or set "
            f"WALLET_PATH, WALLET_NAME and HOTKEY_NAME to one that exists{_existing_names(path)}"
        ) from None
    except OSError as error:
        raise IdentityError(
            f"the hotkey at {path} cannot be read ({error.strerror}): give the daemon's user access to it"
        ) from None


def _existing_names(path: Path) -> str:
    """The names that exist, for someone who mistyped one."""
    for folder, what in ((path.parent, "hotkeys of this wallet"), (path.parent.parent.parent, "wallets")):
        if folder.is_dir():
            names = sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith("pub.txt"))
            return f" ({what} there: {', '.join(names[:10]) or 'none'})"
    return ""


def _decrypted(path: Path, data: bytes, password: SecretStr | None) -> bytes:
    """The plain content of an encrypted keyfile.

    Done in a process of its own: bittensor_core keeps the interpreter lock for the whole 3 to 14 seconds, so
    a thread would stop the daemon's event loop just as surely as doing it there. The password goes through a
    pipe, where no process list shows it.
    """
    if password is None or not password.get_secret_value():
        raise PasswordNeeded(f"the hotkey at {path} is encrypted: set WALLET_PASSWORD")
    method = keyfile_data_encryption_method(data)
    secret = password.get_secret_value().encode()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _UNLOCKER],
            input=f"{len(secret)}\n".encode() + secret + data,
            capture_output=True,
            timeout=UNLOCK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise IdentityError(
            f"the hotkey at {path} is not open after {UNLOCK_SECONDS:.0f} s: "
            "this machine is too busy, try again"
        ) from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode == _WRONG_PASSWORD:
        raise WrongPassword(f"WALLET_PASSWORD does not open the hotkey at {path} ({method} encryption)")
    if done.returncode == _UNREADABLE:
        raise _unusable_hotkey(
            path, f"its {method} encryption cannot be undone: {done.stderr.decode(errors='replace')}"
        )
    raise IdentityError(f"opening the hotkey at {path} ended with status {done.returncode}: try again")


def _unusable_hotkey(path: Path, why: str) -> IdentityError:
    return IdentityError(
        f"the hotkey at {path} cannot be used: {why}. Restore it from its seed words with "
        "`btcli wallet regen-hotkey`"
    )


def _can_sign(keypair: Keypair) -> bool:
    try:
        keypair.sign(b"")
    except (KeyfileError, ValueError, RuntimeError):
        return False
    return True


def _warn_if_others_can_read(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning(
            "the hotkey at %s can be read by other users (mode %o): run chmod 600 %s", path, mode, path
        )
