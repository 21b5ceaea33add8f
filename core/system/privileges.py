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
    """Become that user for good; raise `OSError` if not allowed. The bounding set is emptied first: later
    that would need a right that is gone."""
    _drop_bounding_set()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Give up every capability in every set, and gaining one by starting a program; raise `OSError` if that
    fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    _require(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _drop_bounding_set()
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", *[0] * 6)
    _require(libc.capset(header, none), "capabilities")


def _drop_bounding_set() -> None:
    """Empty the bounding set. Without CAP_SETPCAP it stays, and gives nothing to a process with
    no_new_privs."""
    libc = ctypes.CDLL(None)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def _require(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} cannot be set: {os.strerror(number)}")
