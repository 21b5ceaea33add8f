"""The hotkey: is it there, can it be opened without asking anybody, can only its owner read it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, warn
from miner.settings import Settings

#: Opening an encrypted hotkey takes 3 to 14 seconds on an idle core.
LIMIT_SECONDS = 200.0


def run(surroundings: Surroundings) -> Iterator[Finding]:
    from miner.identity import hotkey_file

    settings = surroundings.settings
    path = hotkey_file(settings.wallet_path, settings.wallet_name, settings.hotkey_name)
    yield _opened(settings)
    if path.exists():
        yield _guarded(path)
    yield from _coldkey_elsewhere(path.parent.parent / "coldkey")


def _opened(settings: Settings) -> Finding:
    from miner.identity import HotkeyMissing, IdentityError, PasswordNeeded, WrongPassword, load_identity

    try:
        identity = load_identity(settings)
    except HotkeyMissing as error:
        return fail("hotkey", str(error), _make_one(settings))
    except PasswordNeeded as error:
        return fail("hotkey", str(error), "put WALLET_PASSWORD=… into .env (chmod 600 .env)")
    except WrongPassword as error:
        return fail("hotkey", str(error), "correct WALLET_PASSWORD")
    except IdentityError as error:
        return fail("hotkey", str(error), "mend or restore the file that is named; see `btcli wallet --help`")
    return ok("hotkey", f"{settings.wallet_name}/{settings.hotkey_name} is {identity.ss58_address}")


def _make_one(settings: Settings) -> str:
    return (
        f"btcli wallet new-hotkey -w {settings.wallet_name} -H {settings.hotkey_name} "
        f"--wallet-path {settings.wallet_path}; or set WALLET_NAME and HOTKEY_NAME to one that exists"
    )


def _guarded(path: Path) -> Finding:
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        detail = f"{path} has mode {mode:o}: others on this machine can take the key"
        return warn("hotkey file", detail, f"chmod 600 {path}")
    if found.st_uid != os.getuid():
        detail = f"{path} belongs to uid {found.st_uid}, and this is uid {os.getuid()}"
        return warn(
            "hotkey file", detail, f"chown {os.getuid()} {path}, if that user is not meant to have it"
        )
    return ok("hotkey file", f"only its owner can read it (mode {mode:o})")


def _coldkey_elsewhere(coldkey: Path) -> Iterator[Finding]:
    if coldkey.exists():
        yield warn(
            "coldkey",
            f"{coldkey} is on this machine; the miner never needs it, and whoever has it has the funds",
            "keep the coldkey on another machine; here only hotkeys/ is needed",
        )


CHECK = Check("wallet", run, LIMIT_SECONDS)
