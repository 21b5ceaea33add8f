"""The last step before the trainer in a sandbox: gives up what building the sandbox needed, and becomes it.

A script of its own, run by the training's interpreter: `python -I -S inside.py OPTIONS -- COMMAND`. Of
ours only `core.seccomp` is imported, by its place.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import sys

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
LAST_CAPABILITY = 63
#: As shells have it.
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, help="where to be")
    parser.add_argument("--uid", type=int, help="the user and group to become")
    parser.add_argument("--processes", type=int, help="how many processes and threads there may be")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (options.processes, options.processes))
    # A script without a search path; and what is read, is read before the user changes.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from core import seccomp

    libc = ctypes.CDLL(None, use_errno=True)
    _give_up(libc, options.uid)
    # As that user: root without its capabilities may not even enter what belongs to another.
    os.chdir(options.dir)
    try:
        seccomp.refuse((*seccomp.BREAKOUTS, *seccomp.NAMESPACES))
    except OSError as error:
        sys.exit(f"the filter of system calls cannot be set: {error}")
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


def _must(result: int, what: str) -> None:
    if result:
        sys.exit(f"{what} can not be set: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
