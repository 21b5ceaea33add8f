"""The evaluation at home: a model plays tasks that no row asks in these words, by the evaluator's rules.

Its limit of 150 s a task is left out: the time a model takes here is not the time it takes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from trainer.environments.intercode.machine import ShellMachine
from trainer.environments.intercode.prompts import (
    EXECUTE,
    MAX_TOKENS,
    MAX_TURNS,
    NO_CALL,
    NO_COMMAND,
    SUBMIT,
    history_of,
    messages,
    tools,
)
from trainer.environments.intercode.shell import Shell
from trainer.environments.intercode.tasks import ShellTask, draw_tasks
from trainer.environments.models import AnswerTimeout, ChatModel, ContextOverflow

#: Tasks of one evaluation.
TASKS = 20


@dataclass(frozen=True)
class PlayedTask:
    """What a model earned at a task."""

    question: str
    reward: float
    #: In the evaluator's words; empty where the model failed to answer.
    history: tuple[str, ...]
    #: Turns without a call that counts.
    without_call: int
    submitted: bool


@dataclass(frozen=True)
class ShellRehearsal:
    """All tasks that were played."""

    tasks: tuple[PlayedTask, ...]

    @property
    def mean(self) -> float:
        """What the evaluator reports."""
        return sum(task.reward for task in self.tasks) / len(self.tasks) if self.tasks else 0.0


def rehearse(model: ChatModel, *, tasks: int = TASKS, seed: int = 0) -> ShellRehearsal:
    """Let it play held-out tasks, one after the other; the same for the same seed."""
    random = Random(f"intercode rehearsal {seed}")  # noqa: S311 - a seed gives the same tasks
    drawn = draw_tasks(random, held_out=True)
    with ShellMachine() as machine:
        return ShellRehearsal(tuple(play_task(model, next(drawn), machine, seed) for _ in range(tasks)))


def play_task(model: ChatModel, task: ShellTask, machine: ShellMachine, seed: int = 0) -> PlayedTask:
    """One task. A turn that fails to be answered in time or in the context ends it with nothing."""
    shell = Shell(machine, task)
    history: list[str] = []
    without_call = 0
    for turn in range(1, MAX_TURNS + 1):
        try:
            answer = model.answer(
                messages(task.question, history, turn), tools(), max_tokens=MAX_TOKENS, seed=seed
            )
        except (AnswerTimeout, ContextOverflow):
            return PlayedTask(task.question, 0.0, tuple(history), without_call, submitted=False)
        call = next((call for call in answer.calls if call.name in (EXECUTE, SUBMIT)), None)
        command = call.arguments.get("command") if call is not None and call.name == EXECUTE else None
        if call is None:
            without_call += 1
            observation = NO_CALL
        elif call.name == SUBMIT or (isinstance(command, str) and command.startswith(SUBMIT)):
            history += history_of(turn, answer.text, call, shell.observation)
            return PlayedTask(
                task.question, shell.reward().total, tuple(history), without_call, submitted=True
            )
        elif isinstance(command, str) and command.strip():
            observation = shell.step(command)
        else:
            observation = NO_COMMAND
        history += history_of(turn, answer.text, call, observation)
    return PlayedTask(task.question, shell.reward().total, tuple(history), without_call, submitted=False)
