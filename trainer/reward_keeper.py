"""Stands between the trainer and the process that reward code runs in.

It starts that process as another user where it may, and isolated; passes on questions and replies; and ends
everything that a reward has started as soon as its call is over. It reads nothing of what it passes on. Its
standard input is a socket to the trainer: when that closes, everything ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import time

from core.files import remove_tree
from trainer import isolation, reward_worker
from trainer.wrapper.processes import adopt_orphans, descendants, reap

#: The user to become is chosen by whoever starts this with the right to become one.
UID_VARIABLE = "GOD_MINER_REWARD_UID"
#: All that a reward's process is told of ours. No GPU: the training's memory is planned to the last gigabyte.
PASSED = ("PATH", "LANG", "LC_ALL", "HF_HOME", "TORCH_HOME", "NLTK_DATA", "SYSTEMROOT")
FIXED = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: Processes that a reward may have at a time. Where it has a user of its own the kernel counts, threads too.
MOST_PROCESSES = reward_worker.PROCESSES
LONGEST_REPLY = 16 << 20
#: How often the processes are counted, and how long those that were killed may take to go.
TICK_S, END_S = 0.25, 5.0
PIECE = 1 << 16


def main() -> None:
    trainer = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    adopt_orphans()
    scratch = tempfile.gettempdir()
    uid = isolation.usable_uid(int(os.environ.get(UID_VARIABLE, isolation.FIRST_UID)), scratch)
    folder = os.path.join(scratch, f"reward-{secrets.token_hex(8)}")
    theirs = f"{folder}.ours"
    with open(os.open(theirs, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb"):
        pass
    ours, other = socket.socketpair()
    worker = os.fork()
    if worker == 0:
        _work(other, uid, folder, theirs)
    other.close()
    try:
        _relay(trainer, ours, worker)
    finally:
        end_all(worker)
        _remove_as(uid, folder)
        for left in (theirs, theirs + ".moved"):
            with contextlib.suppress(OSError):
                os.unlink(left)
    sys.exit(_exit_code(worker))


def _work(conversation: socket.socket, uid: int | None, folder: str, theirs: str) -> None:
    """Never returns: the fork of the keeper must not go on as the keeper."""
    code = 1
    try:
        os.setsid()
        keeper = os.getppid()
        os.dup2(conversation.detach(), 3)
        os.closerange(4, 1 << 16)
        if uid is not None:
            isolation.become(uid)
        os.mkdir(folder, 0o700)
        os.chdir(folder)
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        os.environ.clear()
        os.environ.update({**passed, **FIXED, "HOME": folder, "TMPDIR": folder})
        tempfile.tempdir = None
        sys.path[:] = [place for place in sys.path if place and place != _root()]
        reward_worker.limit(own_user=uid is not None)
        held = isolation.isolate(folder, own_user=uid is not None, theirs=theirs, keeper=keeper)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("core", "trainer")]:
            del sys.modules[name]
        hello = {"isolation": held.means, "exposed": held.exposed}
        reward_worker.serve(socket.socket(fileno=3), hello)
        code = 0
    finally:
        os._exit(code)


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _relay(trainer: socket.socket, worker: socket.socket, pid: int) -> None:
    """Until one of the two is gone, says too much, or has too many children."""
    questions, reply, counted = bytearray(), bytearray(), 0.0
    worker.setblocking(False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(trainer, selectors.EVENT_READ)
        waiting.register(worker, selectors.EVENT_READ)
        while True:
            waiting.modify(worker, selectors.EVENT_READ | (selectors.EVENT_WRITE if questions else 0))
            ready = {key.fileobj: events for key, events in waiting.select(TICK_S)}
            if trainer in ready:
                data = trainer.recv(PIECE)
                if not data:
                    return
                questions += data
            if ready.get(worker, 0) & selectors.EVENT_WRITE:
                with contextlib.suppress(BlockingIOError):
                    del questions[: worker.send(questions)]
            if ready.get(worker, 0) & selectors.EVENT_READ:
                data = worker.recv(PIECE)
                reply += data
                if not data or len(reply) > LONGEST_REPLY:
                    return
                if reply.endswith(b"\n"):
                    end_all(pid, spare=True)
                    trainer.sendall(reply)
                    reply.clear()
            if time.monotonic() - counted > TICK_S:
                counted = time.monotonic()
                below = descendants()
                if pid not in below:
                    return
                if len(below) > MOST_PROCESSES:
                    end_all(pid)
                    trainer.sendall(b'{"problem": "started more than %d processes"}\n' % MOST_PROCESSES)
                    return


def end_all(worker: int, *, spare: bool = False) -> None:
    """Everything below this process; or all but the worker itself. All are stopped first: what forks faster
    than one can kill must not get to it."""
    until = time.monotonic() + END_S
    while (
        left := [pid for pid in descendants() if not (spare and pid == worker)]
    ) and time.monotonic() < until:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        reap(worker)
        time.sleep(0.002)


def _exit_code(worker: int) -> int:
    with contextlib.suppress(ChildProcessError):
        code = os.waitstatus_to_exitcode(os.waitpid(worker, os.WNOHANG)[1])
        return code if code >= 0 else 128 - code
    return 1


def _remove_as(uid: int | None, folder: str) -> None:
    """By the user whose folder it is: root without its capabilities may not enter it."""
    child = os.fork()
    if child == 0:
        try:
            if uid is not None:
                isolation.become(uid)
            remove_tree(folder)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
