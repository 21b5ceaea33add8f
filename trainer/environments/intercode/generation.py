"""Rows of shell tasks: each turn of an expert who knows the command, in the evaluator's form.

A state has one label: the gold command first, wherever the history has not yet run it, and `submit` after it.
Histories also begin with turns that a weaker player makes, so that the model learns to go on from them;
those turns themselves are no rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

from trainer.environments.intercode.machine import Shell, ShellMachine
from trainer.environments.intercode.prompts import NO_CALL, execute, history_of, messages, submit, tools
from trainer.environments.intercode.tasks import ShellTask, draw_tasks
from trainer.environments.tool_calls import ToolCall, assistant_message, template_tools

#: A task whose own command earns less is dropped: its output differs from one time to the next.
LEAST_REWARD = 0.99
#: Of tasks that begin with somebody else's turns, and of those with two of them.
_OFF_PATH, _TWICE = 0.3, 0.25
#: Of tasks whose command has nothing to print or to change: some answers are empty.
_EMPTY = 0.25
#: A generated command that takes longer belongs to no good task.
_COMMAND_S = 5.0
_BACK = "cd /"

Row = dict[str, Any]


def generate(seed: int, seconds: float, most: int) -> Iterator[Row]:
    """At most so many rows in this time; the same rows for the same seed, as far as the time suffices."""
    until = time.monotonic() + seconds
    random = Random(f"intercode {seed}")  # noqa: S311 - a seed gives the same rows
    seen, made = set[str](), 0
    with ShellMachine() as machine:
        for task in draw_tasks(random):
            for row in rows_of(task, machine, random):
                prompt = row["messages"][1]["content"]
                if made >= most or time.monotonic() > until:
                    return
                if prompt not in seen:
                    seen.add(prompt)
                    made += 1
                    yield row
            if time.monotonic() > until:
                return


def rows_of(task: ShellTask, machine: ShellMachine, random: Random) -> list[Row]:
    """The expert's turns; none where its command does not do what is asked, or not every time."""
    shell = Shell(machine, task, command_s=_COMMAND_S)
    history: list[str] = []
    turn = 1
    for command in _detours(task, random):
        observation = NO_CALL if command is None else shell.step(command)
        call = None if command is None else execute(command)
        history += history_of(turn, None, call, observation)
        turn += 1
    rows = []
    # A working folder that does not exist makes every command fail.
    for command in ([_BACK] if "&&" in shell.workdir else []) + [task.gold]:
        rows.append(_row(task.question, history, turn, execute(command)))
        history += history_of(turn, None, execute(command), shell.step(command))
        turn += 1
    rows.append(_row(task.question, history, turn, submit()))
    empty = not (shell.observation.strip() or task.template.silent or shell.has_changes())
    # A tool that is missing here, or a file that cannot be written where the kernel has no Landlock.
    if shell.complained or (empty and random.random() > _EMPTY):
        return []
    return rows if shell.reward().total >= LEAST_REWARD else []


def _row(question: str, history: list[str], turn: int, call: ToolCall) -> Row:
    return {
        "messages": [*messages(question, history, turn), assistant_message([call])],
        "tools": template_tools(tools()),
    }


def _detours(task: ShellTask, random: Random) -> list[str | None]:
    """Commands that come before the expert's; None for an answer without a call."""
    if random.random() > _OFF_PATH:
        return []
    roots = task.files.roots or ("/",)
    looks: list[str | None] = [
        f"ls {roots[0]}",
        f"ls -A {roots[0]}",
        f"cd {roots[0]}",
        f"cd {roots[0]} && ls",
        "pwd",
    ]
    choices = [*task.wrong, *task.wrong, *random.sample(looks, 2), None]
    return random.sample(choices, 2 if random.random() < _TWICE else 1)
