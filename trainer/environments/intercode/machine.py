"""A throw-away copy of a file system, and commands that run in it.

The copy lies in a folder of its own, because a container without capabilities can neither mount nor change
its root: absolute paths of the evaluator's are rewritten in a command and translated back in its output.
Beyond that folder commands change nothing (`trainer.rewards.isolation`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from core.system.files import remove_tree
from trainer.environments.intercode.filesystems import FileSystem
from trainer.environments.intercode.reward import PathState
from trainer.errors import TrainingError

#: Seconds of a command in the evaluation.
COMMAND_S = 30.0
#: Seconds beyond a command's own after which the process that runs it is given up.
_GRACE_S = 15.0
_ROOT = Path(__file__).resolve().parents[3]
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
_MODULE = "trainer.environments.intercode.commands"
#: First folders that are the copy's: where a path begins, and where they are no pattern of sed or awk.
_PATH = re.compile(
    r"(?<![\w./}*?~-])(?=/(?:testbed|system|workspace|backup|tmp)(?![\w-]))(?!/\w+/(?:\s*\{|[dp]['\";]))"
)
#: What most tasks are done with.
_NEEDED = "find grep sed sort wc"
_UNSAFE = ("its files", "its processes", "devices", "everything")


class ShellUnavailable(TrainingError):
    """Generated commands cannot be kept from the container's own files here."""

    code = "shell_unavailable"


class Output(NamedTuple):
    stdout: str
    stderr: str
    code: int
    #: It ran out of time, wrote too much or started too many processes.
    late: bool
    #: Nothing was run: the folder is missing, or no shell takes the text.
    malformed: bool


#: Of machines that are not closed.
_open_folders: set[str] = set()


def remove_open_folders() -> None:
    """Before a process ends without its threads."""
    for folder in tuple(_open_folders):
        remove_tree(folder)


class ShellMachine:
    """One copy; a context manager. Not for several threads at once."""

    def __init__(self) -> None:
        self._folder = os.path.realpath(tempfile.mkdtemp(prefix="intercode-"))
        _open_folders.add(self._folder)
        self.root = os.path.join(self._folder, "root")
        self._forbidden_file = os.path.join(self._folder, "ours")
        os.mkdir(self.root)
        # One for all copies: archives of the same files are the same.
        self._now = time.time()
        Path(self._forbidden_file).touch(0o600)
        if os.geteuid() == 0:
            os.chmod(self._folder, 0o711)  # noqa: S103 - the commands' user passes through
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-c",
                    _PROGRAM.format(root=str(_ROOT), module=_MODULE),
                    self.root,
                    self._forbidden_file,
                ],
                env=self._environment(),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._lines = self._socket.makefile("rwb")
        try:
            hello = self._reply(60.0)
            #: For people.
            self.isolation = str(hello["isolation"])
            #: The user that runs commands and owns the copy; None for our own.
            self._uid: int | None = hello["uid"]
            if unsafe := [way for way in hello["exposed"] if way.startswith(_UNSAFE)]:
                raise ShellUnavailable(
                    f"commands could reach {', '.join(unsafe)} ({self.isolation}): no shell task is run here"
                )
            # Without them right answers fail too, and whoever does nothing would be as good.
            if (found := self.run(f"type {_NEEDED}")).code:
                raise ShellUnavailable(f"no shell task is run here: {found.stderr.strip()[:300]}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShellMachine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_tree(self._folder)
        _open_folders.discard(self._folder)

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TMPDIR": os.path.join(self.root, "tmp"),
        }

    def restore(self, files: FileSystem) -> None:
        """Replace whatever is there by a new copy."""
        remove_tree(self.root)
        os.makedirs(os.path.join(self.root, "tmp"))
        files.write(self.root, self._now)
        if self._uid is not None:
            # From the leaves up, so that the user cannot change the copy before it is complete.
            for folder, folders, names in os.walk(self.root, topdown=False):
                for name in (*folders, *names):
                    os.chown(os.path.join(folder, name), self._uid, self._uid, follow_symlinks=False)
            os.chown(self.root, self._uid, self._uid)

    def run(self, command: str, workdir: str = "/", seconds: float = COMMAND_S) -> Output:
        """Run it in a shell of its own."""
        text = _PATH.sub(lambda match: self.root, command)
        question = {"command": text, "workdir": self._real(workdir), "seconds": seconds}
        reply = self._reply(seconds + _GRACE_S, question)
        return Output(
            self._shown(reply["stdout"]),
            self._shown(reply["stderr"]),
            int(reply["code"]),
            late=bool(reply["late"]),
            malformed=not reply["started"],
        )

    def _reply(self, seconds: float, question: dict[str, Any] | None = None) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            if question is not None:
                self._lines.write(json.dumps(question).encode() + b"\n")
                self._lines.flush()
            line = self._lines.readline()
        except OSError as error:
            raise ShellUnavailable(f"the process that runs shell commands does not reply: {error}") from error
        if not line:
            raise ShellUnavailable("the process that runs shell commands ended")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _real(self, workdir: str) -> str:
        """Relative paths are the copy's, also at the root; other absolute ones are the machine's."""
        path = _PATH.sub(lambda match: self.root, workdir)
        return self.root if path == "/" else path

    def _shown(self, text: str) -> str:
        return text.replace(self.root + "/", "/").replace(self.root, "/")

    def state(self, roots: Iterable[str]) -> dict[str, PathState]:
        """Return what is below these folders, as the evaluator records it."""
        found: dict[str, PathState] = {}
        for root in roots:
            for folder, folders, files in os.walk(self.root + root):
                for name in folders:
                    path = os.path.join(folder, name)
                    found[path[len(self.root) :]] = self._path_state(path, folder=True)
                for name in files:
                    path = os.path.join(folder, name)
                    found[path[len(self.root) :]] = self._path_state(path, folder=False)
        return found

    def _path_state(self, path: str, *, folder: bool) -> PathState:
        try:
            facts = os.lstat(path)
            if folder:
                return ("<DIR>", facts.st_mode)
            if stat.S_ISLNK(facts.st_mode):
                return ("<LINK>", self._shown(os.readlink(path)))
            if not stat.S_ISREG(facts.st_mode):
                return ("<ERR>", 0)
            with open(path, "rb") as file:
                return (
                    hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest(),
                    facts.st_size,
                )
        except OSError:
            return ("<ERR>", 0)
