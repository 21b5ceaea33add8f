"""System call filters. Imports the standard library alone: the scripts that install a filter run without our
dependencies.

A filter needs no privilege, cannot be removed, and applies to every later child of the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AND, _RETURN, _AT_LEAST = 0x20, 0x15, 0x54, 0x06, 0x35
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
#: The first number of x32, which has the same calls again.
_X32 = 0x40000000


@dataclass(frozen=True)
class SyscallRule:
    """A system call that is denied, always or for some values of an argument."""

    name: str
    #: On x86-64 and on 64-bit ARM; None if that has no such call.
    numbers: tuple[int | None, int | None]
    errno: int = errno.EPERM
    #: (argument index, mask, value): denied where the masked lower half of the argument is the value.
    where: tuple[int, int, int] | None = None
    #: Denied where it is *not* the value.
    unless: bool = False


def _always(**numbers: tuple[int | None, int | None]) -> tuple[SyscallRule, ...]:
    return tuple(SyscallRule(name, both) for name, both in numbers.items())


_FILE_TYPE, _CHARACTER_DEVICE, _BLOCK_DEVICE = 0o170000, 0o020000, 0o060000
#: Device files. The same calls make FIFOs and sockets, which are harmless.
_DEVICES = tuple(
    SyscallRule(name, numbers, where=(which, _FILE_TYPE, kind))
    for name, numbers, which in (("mknod", (133, None), 1), ("mknodat", (259, 33), 2))
    for kind in (_CHARACTER_DEVICE, _BLOCK_DEVICE)
)
#: Parts of the kernel that training does not need and break-outs use, and what changes the whole machine;
#: Docker forbids them too, by its filter or by the capabilities that it leaves out.
BREAKOUTS = _DEVICES + _always(
    acct=(163, 89),
    add_key=(248, 217),
    adjtimex=(159, 171),
    bpf=(321, 280),
    chroot=(161, 51),
    clock_adjtime=(305, 266),
    clock_settime=(227, 112),
    delete_module=(176, 106),
    fanotify_init=(300, 262),
    finit_module=(313, 273),
    fsconfig=(431, 431),
    fsmount=(432, 432),
    fsopen=(430, 430),
    fspick=(433, 433),
    init_module=(175, 105),
    io_uring_enter=(426, 426),
    io_uring_register=(427, 427),
    io_uring_setup=(425, 425),
    ioperm=(173, None),
    iopl=(172, None),
    kexec_file_load=(320, 294),
    kexec_load=(246, 104),
    keyctl=(250, 219),
    mount=(165, 40),
    mount_setattr=(442, 442),
    move_mount=(429, 429),
    open_by_handle_at=(304, 265),
    open_tree=(428, 428),
    open_tree_attr=(467, 467),
    perf_event_open=(298, 241),
    pivot_root=(155, 41),
    quotactl=(179, 60),
    quotactl_fd=(443, 443),
    reboot=(169, 142),
    request_key=(249, 218),
    setdomainname=(171, 162),
    sethostname=(170, 161),
    setns=(308, 268),
    settimeofday=(164, 170),
    swapoff=(168, 225),
    swapon=(167, 224),
    syslog=(103, 116),
    umount2=(166, 39),
    unshare=(272, 97),
    userfaultfd=(323, 282),
    vhangup=(153, 58),
)
CLONE, CLONE3 = (56, 220), (435, 435)
NEW_NAMESPACES = 0x7E020000
#: A new process in new namespaces is made by these. The second hides its flags from a filter, and is said not
#: to exist: the C library then uses the first.
NAMESPACES = (
    SyscallRule("clone3", CLONE3, errno.ENOSYS),
    SyscallRule("clone", CLONE, where=(0, NEW_NAMESPACES, 0), unless=True),
)


def filter_program(rules: Iterable[SyscallRule], machine: str) -> Iterator[tuple[int, int, int, int]]:
    """The rules as a program of the kernel's packet filter: (code, steps if true, steps if false, value)."""
    column = list(ARCHITECTURES).index(machine)
    yield (_LOAD, 0, 0, 4)  # the architecture: other numbers mean other calls
    yield (_EQUAL, 1, 0, ARCHITECTURES[machine])
    yield (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    yield (_LOAD, 0, 0, 0)  # the call's number
    yield (_AT_LEAST, 0, 1, _X32)
    yield (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    for rule in rules:
        number = rule.numbers[column]
        if number is None:
            continue
        refused = (_RETURN, 0, 0, _ERRNO | rule.errno)
        if rule.where is None:
            yield (_EQUAL, 0, 1, number)
            yield refused
            continue
        which, mask, value = rule.where
        yield (_EQUAL, 0, 5, number)
        yield (_LOAD, 0, 0, 16 + 8 * which)
        yield (_AND, 0, 0, mask)
        yield (_EQUAL, 1, 0, value) if rule.unless else (_EQUAL, 0, 1, value)
        yield refused
        yield (_LOAD, 0, 0, 0)  # for the rules that follow
    yield (_RETURN, 0, 0, _ALLOW)


def set_filter(rules: Iterable[SyscallRule]) -> None:
    """Set the filter on this thread and all that it starts; `OSError` where that is not possible."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise OSError(errno.ENOSYS, f"the system calls of {known} are known here, not those of {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    lines = list(filter_program(rules, machine))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    header = struct.pack("HP", len(lines), ctypes.addressof(code))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0
    ):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
