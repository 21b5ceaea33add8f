"""Isolation of reward code from the training: another user if we may become one, Landlock for files and
signals, a filter of system calls, and a test that all this holds.

Reward code comes from a validator and runs beside the trainer, mostly as the same user: in containers without
capabilities there is no other. None of this needs a privilege, and none of it can be taken off again:

| what is kept from it | by another user | by Landlock | without either |
|---|---|---|---|
| writing the trainer's files | file modes | all but its own folder | opening to write is refused |
| signals to the trainer | the kernel | from ABI 6 (Linux 6.12) on | kill and its kin are refused |
| memory, limits, priorities of others | seccomp, for all | | |
| sockets, so the ranks' rendezvous | seccomp, for all | | |

Capabilities are given up in every case, so that root is no more than the owner of its files.

Only the standard library and modules of `core.system` that import nothing else: this is loaded into the
process that reward code runs in.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from core.system.privileges import become_user, drop_capabilities
from core.system.seccomp import BREAKOUTS, NAMESPACES, SyscallRule, set_filter

#: Users that no machine has: above those that systemd gives to containers.
FIRST_UID = 2_000_000_000
NOBODY = 65_534
_PR_SET_PDEATHSIG = 1

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's calls, on every architecture
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_WRITE_FILE = 1 << 1
#: Everything that changes files, in the order of the ABIs that brought it.
_CHANGES = {1: _WRITE_FILE | 0b1_1111_1111 << 4, 2: 1 << 13, 3: 1 << 14}
#: Denied in its own folder too: MAKE_CHAR and MAKE_BLOCK.
_DEVICES = 1 << 6 | 1 << 11
_SCOPED = 0b11  # abstract sockets and signals
SCOPED_ABI, TRUNCATE_ABI = 6, 3


def _of_others(name: str, x86: int, arm: int, which: int = 0) -> SyscallRule:
    """A call that names a process: itself (0) is fine."""
    return SyscallRule(name, (x86, arm), where=(which, 0xFFFFFFFF, 0), unless=True)


_OTHERS = (
    SyscallRule("ptrace", (101, 117)),
    SyscallRule("process_vm_readv", (310, 270)),
    SyscallRule("process_vm_writev", (311, 271)),
    SyscallRule("pidfd_getfd", (438, 438)),
    SyscallRule("process_madvise", (440, 440)),
    SyscallRule("migrate_pages", (256, 238)),
    SyscallRule("move_pages", (279, 239)),
    _of_others("prlimit64", 302, 261),
    _of_others("sched_setparam", 142, 118),
    _of_others("sched_setscheduler", 144, 119),
    _of_others("sched_setaffinity", 203, 122),
    _of_others("sched_setattr", 314, 274),
    _of_others("setpriority", 141, 140, 1),
    _of_others("ioprio_set", 251, 30, 1),
    # Signals by way of a descriptor's owner, and leases that keep others from opening a file.
    *(SyscallRule("fcntl", (72, 25), where=(1, 0xFFFFFFFF, command)) for command in (8, 10, 15, 1024)),
    *(SyscallRule("ioctl", (16, 29), where=(1, 0xFFFFFFFF, command)) for command in (0x8901, 0x8902)),
)
_NETWORK = (SyscallRule("socket", (41, 198)),)
#: Landlock does not cover these, and a folder without its mode is as unusable as a deleted one.
_MODES = tuple(
    SyscallRule(name, numbers)
    for name, numbers in {
        "chmod": (90, None),
        "fchmod": (91, 52),
        "fchmodat": (268, 53),
        "fchmodat2": (452, 452),
        "chown": (92, None),
        "fchown": (93, 55),
        "lchown": (94, None),
        "fchownat": (260, 54),
        "utime": (132, None),
        "utimes": (235, None),
        "futimesat": (261, None),
        "utimensat": (280, 88),
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "removexattr": (197, 14),
        "lremovexattr": (198, 15),
        "fremovexattr": (199, 16),
        "truncate": (76, 45),
    }.items()
)
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), SyscallRule("openat2", (437, 437), errno.ENOSYS)
#: Opened for reading and emptied all the same: not known to Landlock before `TRUNCATE_ABI`.
_EMPTYING = (
    _OPENAT2,
    SyscallRule("open", _OPEN, where=(1, os.O_ACCMODE | os.O_TRUNC, os.O_TRUNC)),
    SyscallRule("openat", _OPENAT, where=(2, os.O_ACCMODE | os.O_TRUNC, os.O_TRUNC)),
)
_ANY_CHANGE = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
_WRITING = (
    _OPENAT2,
    SyscallRule("open", _OPEN, errno.EACCES, where=(1, _ANY_CHANGE, 0), unless=True),
    SyscallRule("openat", _OPENAT, errno.EACCES, where=(2, _ANY_CHANGE, 0), unless=True),
    *(
        SyscallRule(name, numbers, errno.EACCES)
        for name, numbers in {
            "creat": (85, None),
            "rename": (82, None),
            "renameat": (264, 38),
            "renameat2": (316, 276),
            "link": (86, None),
            "linkat": (265, 37),
            "symlink": (88, None),
            "symlinkat": (266, 36),
            "unlink": (87, None),
            "unlinkat": (263, 35),
            "mkdir": (83, None),
            "mkdirat": (258, 34),
            "rmdir": (84, None),
            "mknod": (133, None),
            "mknodat": (259, 33),
        }.items()
    ),
)
_SIGNALS = (
    SyscallRule("kill", (62, 129)),
    SyscallRule("tkill", (200, 130)),
    SyscallRule("pidfd_send_signal", (424, 424)),
    SyscallRule("rt_sigqueueinfo", (129, 138)),
    SyscallRule("rt_tgsigqueueinfo", (297, 240)),
)


class Isolation(NamedTuple):
    """Describe what is in force, for people, and what reward code could still reach: usually nothing."""

    means: str
    exposed: tuple[str, ...]


def usable_uid(wanted: int, scratch: str) -> int | None:
    """A user of its own for reward code, who can read what a reward imports and write into `scratch`. None
    where we are not root, may not become another, or the other could not do that."""
    if os.geteuid() != 0:
        return None
    modules = [place for place in sys.path if os.path.isdir(place)]
    return next((uid for uid in (wanted, NOBODY) if can_work(uid, modules, scratch)), None)


def can_work(uid: int, modules: list[str], scratch: str) -> bool:
    """Return True if we may become that user, and it can read `modules` and write into `scratch`."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            become_user(uid)
            for place in modules:
                os.listdir(place)
            code = 0 if os.access(scratch, os.W_OK | os.X_OK) else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def isolate_process(
    folder: str, *, own_user: bool, forbidden_file: str, supervisor: int, for_shell: bool = False
) -> Isolation:
    """Let this process and its children change only what lies in `folder`, from here on. Tried at the end:
    `forbidden_file`, which they must not be able to touch, and `supervisor`, a process out of their reach.

    Modes, owners and times of files cannot be changed. With `for_shell` such calls do nothing and report
    success: commands as common as touch and sed make them on the way, and fail where they fail. A user of its
    own does not keep a shell from what everybody may write: what Landlock lacks is refused all the same."""
    # After the change of user, which resets it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    drop_capabilities()
    abi = _landlock(folder)
    means = [f"user {os.getuid()}, of its own" if own_user else f"user {os.getuid()}, the trainer's own"]
    means.append(f"Landlock {abi}" if abi else "no Landlock")
    by_modes = own_user and not for_shell
    modes = tuple(replace(rule, errno=0) for rule in _MODES) if for_shell else _MODES
    rules = [*BREAKOUTS, *NAMESPACES, *_OTHERS, *_NETWORK, *modes]
    if not by_modes and abi < SCOPED_ABI:
        rules += [
            *_SIGNALS,
            SyscallRule("tgkill", (234, 131), where=(0, 0xFFFFFFFF, os.getpid()), unless=True),
        ]
    if not by_modes and abi < TRUNCATE_ABI:
        rules += _EMPTYING if abi else _WRITING
    try:
        set_filter(rules)
        means.append("seccomp" if by_modes or abi else "seccomp, which lets it write nothing at all")
    except OSError as error:
        means.append(f"no seccomp ({error.strerror})")
    return Isolation(", ".join(means), tuple(_exposed(folder, forbidden_file, supervisor)))


def _abi() -> int:
    """Landlock's, of this kernel; below 1 for none."""
    return int(ctypes.CDLL(None).syscall(_CREATE, None, 0, _VERSION_FLAG))


def _landlock(folder: str) -> int:
    """The ABI that is in force; 0 for none."""
    abi = _abi()
    if abi < 1:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    changes = 0
    for since, rights in _CHANGES.items():
        changes |= rights if abi >= since else 0
    ruleset = struct.pack("QQQ", changes, 0, _SCOPED)[: 24 if abi >= SCOPED_ABI else 16 if abi >= 4 else 8]
    rules = libc.syscall(_CREATE, ruleset, len(ruleset), 0)
    if rules < 0:
        return 0
    try:
        for path, rights in ((folder, changes & ~_DEVICES), (os.devnull, _WRITE_FILE | changes & 1 << 14)):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            added = libc.syscall(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", rights, opened), 0)
            os.close(opened)
            if added:
                return 0
        return 0 if libc.syscall(_RESTRICT, rules, 0) else abi
    finally:
        os.close(rules)


def _exposed(folder: str, forbidden_file: str, supervisor: int) -> Iterator[str]:
    """Try every way out; return those that work."""
    if _goes(lambda: os.close(os.open(forbidden_file, os.O_WRONLY))):
        yield "its files (writing)"
    if _mode_changes(forbidden_file):
        yield "its files (modes)"
    if _goes(lambda: os.rename(forbidden_file, forbidden_file + ".moved")):
        yield "its files (renaming)"
    if _goes(lambda: os.kill(supervisor, 0)):
        yield "its processes (signals)"
    # For a reviewer: the sandbox of reward functions tries its own walls; it must fail here.
    if _goes(lambda: os.close(os.open(f"/proc/{supervisor}/mem", os.O_RDONLY))):
        yield "its memory (reading)"
    if _goes(lambda: socket.socket().close()):
        yield "the network"
    device = os.path.join(folder, ".device")
    if _goes(lambda: os.mknod(device, stat.S_IFCHR, os.makedev(1, 3))):  # /dev/null's
        os.unlink(device)
        yield "devices (making them)"


def _mode_changes(file: str) -> bool:
    """Not only whether the call succeeds: the filter may report success and do nothing."""
    before = os.stat(file).st_mode
    return _goes(lambda: os.chmod(file, before & 0o777 ^ 0o100)) and os.stat(file).st_mode != before


def _goes(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True
