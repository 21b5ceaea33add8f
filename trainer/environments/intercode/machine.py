"""A throw-away copy of a file system, the shell that runs commands in it, and their reward.

The copy lies in a folder of its own, because a container without capabilities can neither mount nor change
its root: absolute paths of the evaluator's are rewritten in a command and translated back in its output.
Beyond that folder commands change nothing (`trainer.rewards.isolation`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.system.files import remove_tree
from trainer.environments.intercode.filesystems import MANAGED, FileSystem
from trainer.environments.intercode.tasks import ShellTask
from trainer.errors import TrainingError

#: What is at a path: a folder with its mode, a link with its target, or a file's digest with its size.
PathState = tuple[str, int | str]
State = Mapping[str, PathState]

_WORD = re.compile(r"(?u)\b\w\w+\b")
_PART, _BASE = 0.33, 0.01
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
#: Of machines that are not closed.
_open_folders: set[str] = set()
TIMED_OUT, MALFORMED = "Command timed out", "Malformed command"


class ShellReward(NamedTuple):
    """A reward and its parts."""

    paths: float
    contents: float
    output: float

    @property
    def total(self) -> float:
        return _BASE + self.paths + self.contents + self.output


def shell_reward(
    before: State, agent: State, gold: State, agent_output: str, gold_output: str
) -> ShellReward:
    """Compare what an agent did with what the gold command did from the same state on, as the evaluator does.

    Each of three parts is worth up to 0.33 and is rounded to hundredths: no path missed or changed in
    addition, common changes that are identical, and the cosine of the outputs' words. A task that changes
    nothing has the first two for free.
    """
    by_agent, by_gold = changed_paths(before, agent), changed_paths(before, gold)
    common = by_agent & by_gold
    alike = sum(agent.get(path) == gold.get(path) for path in common)
    return ShellReward(
        paths=round(_PART * (1 - math.erf(len(by_agent ^ by_gold))), 2),
        contents=round(_PART * (alike / len(common)), 2) if common else _PART,
        output=round(_PART * likeness(agent_output, gold_output), 2),
    )


def changed_paths(before: State, after: State) -> set[str]:
    """Every path that is new, gone or different."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def likeness(one: str, other: str) -> float:
    """The cosine of two texts' words, weighted as scikit-learn's TfidfVectorizer weights them by default.

    Where neither has a word of two letters, they are alike when they are equal."""
    counts = [Counter(_WORD.findall(text.lower())) for text in (one, other)]
    if not any(counts):
        return float(one == other)
    # Of two texts a word is in one or in both.
    rare = math.log(3 / 2) + 1
    vectors = [
        {word: count * (1.0 if word in counts[1 - place] else rare) for word, count in counts[place].items()}
        for place in (0, 1)
    ]
    lengths = [math.sqrt(sum(weight * weight for weight in vector.values())) for vector in vectors]
    if not all(lengths):
        return 0.0
    dot = sum(weight * vectors[1].get(word, 0.0) for word, weight in vectors[0].items())
    return dot / (lengths[0] * lengths[1])


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


class Shell:
    """The shell of one task on a machine, whose copy it replaces."""

    def __init__(self, machine: ShellMachine, task: ShellTask, *, command_s: float = COMMAND_S) -> None:
        self._machine, self._task, self._command_s = machine, task, command_s
        self._roots = MANAGED[task.files.kind]
        machine.restore(task.files)
        self._before = machine.state(self._roots)
        self.workdir = "/"
        #: The last command's output, whole: what a submission submits.
        self.observation = ""
        #: Whether the last command wrote to its error output.
        self.complained = False

    def step(self, command: str) -> str:
        """Run it. A command that begins with `cd` runs at the root, its folder being all that follows: with
        `cd a && ls` the working folder becomes one that does not exist, and the next commands fail."""
        workdir, target = self.workdir, None
        if command.startswith("cd"):
            workdir = "/"
            if "cd " in command:
                target = resolved(self.workdir, command[command.index("cd ") + 3 :].strip())
                command = f"cd {target}"
        output = self._machine.run(command, workdir, self._command_s)
        self.complained = bool(output.stderr)
        if output.malformed:
            self.observation = MALFORMED
        elif output.late:
            self.observation = TIMED_OUT
        else:
            self.observation = output.stdout or output.stderr
            if target is not None and output.code == 0:
                self.workdir = target
        return self.observation

    def has_changes(self) -> bool:
        """Return True if the recorded state differs from that at the beginning."""
        return self._machine.state(self._roots) != self._before

    def reward(self) -> ShellReward:
        """End the task; return the reward of the state and the output as they are."""
        agent = self._machine.state(self._roots)
        self._machine.restore(self._task.files)
        output = self._machine.run(self._task.gold, "/", self._command_s)
        shown = "" if output.late or output.malformed else output.stdout + output.stderr
        gold = self._machine.state(self._roots)
        return shell_reward(self._before, agent, gold, self.observation, shown)


def resolved(workdir: str, target: str) -> str:
    """The folder that `cd` is taken to go to, whether it is there or not."""
    if not target:
        return workdir
    path: list[str] = []
    for part in (target if target.startswith("/") else f"{workdir}/{target}").split("/"):
        if part == "..":
            path = path[:-1]
        elif part not in ("", "."):
            path.append(part)
    return "/" + "/".join(path)
