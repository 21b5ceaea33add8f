"""Give up the privileges of root. Imports the standard library alone, as `core.system.seccomp` does."""

from __future__ import annotations

import ctypes
import os
import struct

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
LAST_CAPABILITY = 63
_CAPABILITY_VERSION_3 = 0x20080522


def become_user(uid: int) -> None:
    """Become that user for good; `OSError` where we may not. The bounding set goes first: later there is no
    right to empty it."""
    _drop_bounding_set()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Give up every capability in every set, and the way to get one by starting a program; `OSError` where
    that is not possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    _require(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _drop_bounding_set()
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", *[0] * 6)
    _require(libc.capset(header, none), "capabilities")


def _drop_bounding_set() -> None:
    """Without CAP_SETPCAP it stays as it is, and gives nothing to who has no_new_privs."""
    libc = ctypes.CDLL(None)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def _require(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} cannot be set: {os.strerror(number)}")
