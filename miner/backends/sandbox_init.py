"""Give up what building the sandbox needed, then become the trainer: the sandbox's first process.

A script of its own, run by the training interpreter: `python -I -S sandbox_init.py OPTIONS -- COMMAND`. Of
our packages it imports only `core.system.seccomp` and `core.system.privileges`, found from its own path.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import socket
import struct
import sys

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
LAST_CAPABILITY = 63
#: In the sandbox's own memory, where nobody but root could have put it before.
REWARDS_SOCKET = "/tmp/.god-miner-rewards"  # noqa: S108 - see above
#: CLONE_NEWNS, NEWIPC, NEWPID, NEWNET
REWARD_NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000
#: CAP_KILL, SETGID, SETUID
SUPERVISOR_CAPABILITIES = {5, 6, 7}
#: As shells have it.
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, help="the working directory")
    parser.add_argument("--uid", type=int, help="the user and group to become")
    parser.add_argument("--processes", type=int, help="how many processes and threads there may be")
    parser.add_argument("--rewards", help="the folder of our packages: serve reward code as another user")
    parser.add_argument("--rewards-uid", type=int, help="that user")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (options.processes, options.processes))
    # Scripts have no search path here (-I); imports come before the user changes.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from core.system import privileges, seccomp

    libc = ctypes.CDLL(None, use_errno=True)
    if options.rewards and options.uid is not None:
        _serve_rewards(libc, options)
    if options.uid is not None:
        privileges.become_user(options.uid)
    try:
        privileges.drop_capabilities()
    except OSError as error:
        sys.exit(error.strerror)
    # As that user: root without capabilities may not even enter a directory of somebody else.
    os.chdir(options.dir)
    try:
        seccomp.set_filter((*seccomp.BREAKOUTS, *seccomp.NAMESPACES))
    except OSError as error:
        sys.exit(f"the filter of system calls cannot be set: {error}")
    try:
        os.execvp(options.command[0], options.command)  # noqa: S606 - what we are for
    except OSError as error:
        sys.stderr.write(f"{options.command[0]} cannot be started: {error}\n")
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def _serve_rewards(libc: ctypes.CDLL, options: argparse.Namespace) -> None:
    """Give every trainer process that connects a supervisor (`trainer.rewards.worker`), which has just the
    rights of root that it needs to become the rewards' user. All run in namespaces of their own, without a
    network and without access to the trainer's processes. The trainer cannot choose what is started."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(REWARDS_SOCKET)
    os.chmod(REWARDS_SOCKET, 0o666)  # noqa: S103 - who connects is looked at
    listener.listen(64)
    os.environ["GOD_MINER_REWARDS"] = REWARDS_SOCKET
    first = os.fork()
    if first:
        listener.close()
        os.waitpid(first, 0)
        return
    try:
        os.setsid()
        _require(libc.unshare(REWARD_NAMESPACES), "namespaces for reward code")
        # The fork is process 1 of the new namespace, and ends with the sandbox.
        if os.fork() == 0:
            _require(libc.mount(b"proc", b"/proc", b"proc", 0b1110, None), "/proc of reward code")
            _require(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
            for capability in set(range(LAST_CAPABILITY + 1)) - SUPERVISOR_CAPABILITIES:
                libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                _start_supervisor(listener, options)
    finally:
        os._exit(0)


def _start_supervisor(listener: socket.socket, options: argparse.Namespace) -> None:
    connection, _ = listener.accept()
    with connection:
        peer = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if peer[1] != options.uid or os.fork():
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(connection.fileno(), 0)
        os.closerange(3, 1 << 16)
        environment = {**os.environ, "GOD_MINER_REWARD_UID": str(options.rewards_uid)}
        start = f"import sys; sys.path.insert(0, {options.rewards!r}); "
        start += "from trainer.rewards.worker import main; main()"
        os.execve(sys.executable, [sys.executable, "-I", "-c", start], environment)  # noqa: S606 - as above


def _require(result: int, what: str) -> None:
    if result:
        sys.exit(f"{what} cannot be set: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
