"""The miner's hotkey: read from a Bittensor wallet by a process of its own, and never shown. That process is
`miner.chain.hotkey_worker`; no other process of ours has the private key.
Only `bittensor_core` is used here: importing the SDK would cost half a second and 45 MB.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import bittensor_core
from bittensor_core import Keypair, encrypt_keyfile_data, serialized_keypair_to_keyfile_data
from pydantic import SecretStr

from core.domain.errors import GodMinerError
from miner.chain import hotkey_worker
from miner.chain.hotkey import SIGN_SECONDS, Hotkey, ask_line
from miner.chain.hotkey_worker import HotkeyProblem
from miner.settings import Settings

log = logging.getLogger(__name__)

#: Opening an encrypted key was measured at 3 to 14 seconds of one core.
UNLOCK_SECONDS = 180.0


class IdentityError(GodMinerError):
    """The hotkey cannot be used."""

    code = "bad_identity"


class PasswordNeeded(IdentityError):
    code = "hotkey_locked"


class Identity:
    """A key in this process, for stand-ins and trials. It prints as its address, and cannot be pickled or
    copied."""

    __slots__ = ("_keypair", "public_key", "ss58_address")

    def __init__(self, keypair: Keypair) -> None:
        self._keypair = keypair
        self.public_key: bytes = bytes(keypair.public_key)
        self.ss58_address: str = keypair.ss58_address

    def sign(self, message: bytes, /) -> bytes:
        return bytes(self._keypair.sign(message))

    def __repr__(self) -> str:
        return f"Identity({self.ss58_address})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Identity holds a private key and cannot be pickled or copied")


@contextlib.contextmanager
def opened_hotkey(settings: Settings, *, with_password: bool = True) -> Iterator[Hotkey]:
    """The hotkey that the settings name, in a process of its own. Blocks: an encrypted one takes seconds."""
    path = hotkey_file(settings.wallet_path, settings.wallet_name, settings.hotkey_name)
    _warn_if_others_can_read(path)
    password = settings.wallet_password if with_password else None
    ours, theirs = socket.socketpair()
    site = str(Path(bittensor_core.__file__).parents[1])
    # -I and -S: no variable, user folder or .pth file changes what it imports.
    command = [sys.executable, "-I", "-S", "-B", hotkey_worker.__file__, site]
    with ours:
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=_library_path(),
            )
        try:
            yield _opened(path, password, ours)
        finally:
            process.kill()
            process.wait()


def _library_path() -> dict[str, str]:
    """Return the variables that a Python may need to find its own library."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def _opened(path: Path, password: SecretStr | None, channel: socket.socket) -> Hotkey:
    secret = password.get_secret_value() if password is not None else None
    channel.settimeout(UNLOCK_SECONDS)
    try:
        # Through a socket: a list of processes would show arguments and variables.
        answer = json.loads(ask_line(channel, json.dumps({"path": str(path), "password": secret})))
    except TimeoutError:
        raise IdentityError(
            f"the hotkey at {path} could not be unlocked within {UNLOCK_SECONDS:.0f} s: "
            "this machine is too busy, try again"
        ) from None
    except (OSError, ValueError) as error:
        raise IdentityError(
            f"opening the hotkey at {path} ended without an answer ({error}): try again"
        ) from None
    if "problem" in answer:
        raise _explained(path, HotkeyProblem(answer["problem"], answer["detail"]))
    channel.settimeout(SIGN_SECONDS)
    return Hotkey(answer, channel)


def hotkey_address(settings: Settings) -> str:
    """Return the hotkey's address: from its public half if that exists, else by opening it."""
    address = address_without_password(settings)
    if address is None:
        with opened_hotkey(settings) as hotkey:
            address = hotkey.ss58_address
    return address


def hotkey_file(wallet_path: Path, wallet_name: str, hotkey_name: str) -> Path:
    """Path at which Bittensor's tools keep a hotkey."""
    for variable, name in (("WALLET_NAME", wallet_name), ("HOTKEY_NAME", hotkey_name)):
        if name in ("", ".", "..") or Path(name).name != name:
            raise IdentityError(f"{variable} has value {name!r}: give a wallet's plain name, not a path")
    return wallet_path.expanduser() / wallet_name / "hotkeys" / hotkey_name


def open_hotkey(path: Path, password: SecretStr | None = None) -> Identity:
    """A key in this process: for stand-ins, never for the miner's own."""
    _warn_if_others_can_read(path)
    try:
        keypair = hotkey_worker.opened(path, password.get_secret_value() if password is not None else None)
    except HotkeyProblem as problem:
        raise _explained(path, problem) from None
    return Identity(keypair)


def address_without_password(settings: Settings) -> str | None:
    """Return the hotkey's address, or None if that needs the password.

    Bittensor's tools write the public half beside the key, as `<hotkey>pub.txt`.
    """
    path = hotkey_file(settings.wallet_path, settings.wallet_name, settings.hotkey_name)
    public = path.with_name(f"{path.name}pub.txt")
    try:
        return str(json.loads(public.read_bytes())["ss58Address"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        with opened_hotkey(settings, with_password=False) as hotkey:
            return hotkey.ss58_address
    except PasswordNeeded:
        return None


def password_problem(settings: Settings) -> str | None:
    """Return the reason why the hotkey cannot be opened, or None. Blocks for seconds."""
    try:
        with opened_hotkey(settings):
            return None
    except IdentityError as error:
        return str(error)


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


def _explained(path: Path, problem: HotkeyProblem) -> IdentityError:
    if problem.kind == "missing":
        return IdentityError(
            f"there is no hotkey at {path}: make one with `btcli wallet new-hotkey`, or set "
            f"WALLET_PATH, WALLET_NAME and HOTKEY_NAME to one that exists{_existing_names(path)}",
            code="hotkey_missing",
        )
    if problem.kind == "unreadable":
        return IdentityError(
            f"the hotkey at {path} cannot be read ({problem.detail}): give the daemon's user access to it"
        )
    if problem.kind == "locked":
        return PasswordNeeded(f"the hotkey at {path} is encrypted: set WALLET_PASSWORD")
    if problem.kind == "wrong_password":
        text = f"WALLET_PASSWORD does not open the hotkey at {path} ({problem.detail} encryption)"
        return IdentityError(text, code="wrong_password")
    return IdentityError(
        f"the hotkey at {path} cannot be used: {problem.detail}. Restore it from its seed words with "
        "`btcli wallet regen-hotkey`"
    )


def _existing_names(path: Path) -> str:
    """The names that exist, for someone who mistyped one."""
    for folder, what in ((path.parent, "hotkeys of this wallet"), (path.parent.parent.parent, "wallets")):
        if folder.is_dir():
            names = sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith("pub.txt"))
            return f" ({what} there: {', '.join(names[:10]) or 'none'})"
    return ""


def _warn_if_others_can_read(path: Path) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise _explained(path, HotkeyProblem("missing")) from None
    except OSError:
        return  # what opens it says why
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning(
            "the hotkey at %s can be read by other users (mode %o): run chmod 600 %s", path, mode, path
        )
