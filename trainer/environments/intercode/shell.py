"""A task's shell as the evaluator has it: one command a turn, a working folder that only `cd` changes."""

from __future__ import annotations

from trainer.environments.intercode.filesystems import MANAGED
from trainer.environments.intercode.machine import COMMAND_S, ShellMachine
from trainer.environments.intercode.reward import ShellReward, shell_reward
from trainer.environments.intercode.tasks import ShellTask

TIMED_OUT, MALFORMED = "Command timed out", "Malformed command"


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
