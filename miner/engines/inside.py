"""The last step before the trainer in a sandbox: gives up what building the sandbox needed, and becomes it.

A script of its own, run by the training's interpreter: `python -I -S inside.py OPTIONS -- COMMAND`. Only the
standard library is there.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator

PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SECCOMP_MODE_FILTER = 4, 2
LAST_CAPABILITY = 63
#: As shells have it.
NOT_EXECUTABLE, NOT_FOUND = 126, 127

#: Parts of the kernel that training has no use for and break-outs are made of, as Docker forbids them too:
#: their numbers on x86-64 and on 64-bit ARM.
FORBIDDEN = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "request_key": (249, 218),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
#: A new process in new namespaces is made by these. The second hides its flags from a filter, and is said not
#: to exist: the C library then uses the first.
CLONE, CLONE3 = (56, 220), (435, 435)
NEW_NAMESPACES = 0x7E020000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _SET, _RETURN, _AT_LEAST = 0x20, 0x15, 0x45, 0x06, 0x35
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, help="where to be")
    parser.add_argument("--uid", type=int, help="the user and group to become")
    parser.add_argument("--processes", type=int, help="how many processes and threads there may be")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (options.processes, options.processes))
    libc = ctypes.CDLL(None, use_errno=True)
    _give_up(libc, options.uid)
    # As that user: root without its capabilities may not even enter what belongs to another.
    os.chdir(options.dir)
    _filter_calls(libc)
    try:
        os.execvp(options.command[0], options.command)  # noqa: S606 - what we are for
    except OSError as error:
        sys.stderr.write(f"{options.command[0]} can not be started: {error}\n")
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def _give_up(libc: ctypes.CDLL, uid: int | None) -> None:
    _must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # Before the user changes: what is cleared afterwards was given up by then.
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _filter_calls(libc: ctypes.CDLL) -> None:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        sys.exit(f"the sandbox knows the system calls of {', '.join(ARCHITECTURES)}, not of {machine}")
    lines = list(filter_lines(machine))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HP", len(lines), ctypes.addressof(code))
    _must(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "the filter of system calls")


def filter_lines(machine: str) -> Iterator[tuple[int, int, int, int]]:
    """A program of the kernel's packet filter: (code, steps if true, steps if false, value) each."""
    column = list(ARCHITECTURES).index(machine)
    yield (_LOAD, 0, 0, 4)  # the architecture: other numbers mean other calls
    yield (_EQUAL, 1, 0, ARCHITECTURES[machine])
    yield (_RETURN, 0, 0, _EPERM)
    yield (_LOAD, 0, 0, 0)  # the call's number
    yield (_AT_LEAST, 0, 1, 0x40000000)  # those of x32, which are the same calls again
    yield (_RETURN, 0, 0, _ENOSYS)
    for numbers in FORBIDDEN.values():
        yield (_EQUAL, 0, 1, numbers[column])
        yield (_RETURN, 0, 0, _EPERM)
    yield (_EQUAL, 0, 1, CLONE3[column])
    yield (_RETURN, 0, 0, _ENOSYS)
    yield (_EQUAL, 0, 3, CLONE[column])
    yield (_LOAD, 0, 0, 16)  # its flags
    yield (_SET, 0, 1, NEW_NAMESPACES)
    yield (_RETURN, 0, 0, _EPERM)
    yield (_RETURN, 0, 0, _ALLOW)


def _must(result: int, what: str) -> None:
    if result:
        sys.exit(f"{what} can not be set: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
