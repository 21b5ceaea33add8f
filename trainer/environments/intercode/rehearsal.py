"""The evaluation at home: a model plays tasks that no row asks in these words, by the evaluator's rules.

Its limit of 150 s a task is left out: the time a model takes here is not the time it takes there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from random import Random

from core.domain.errors import GodMinerError
from trainer.environments.intercode.machine import Shell, ShellMachine
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
from trainer.environments.intercode.tasks import ShellTask, draw_tasks
from trainer.environments.match import INTERRUPTED, threads_until_interrupted
from trainer.environments.models import AnswerTimeout, ChatModel, ContextOverflow

#: Tasks of one evaluation.
TASKS = 20


@dataclass(frozen=True)
class PlayedTask:
    """The result of a model at a task."""

    question: str
    reward: float
    #: The turns that were answered, in the evaluator's words.
    history: tuple[str, ...]
    #: Turns without a call that counts.
    without_call: int
    submitted: bool
    #: Why a turn was not answered; empty if all were.
    failure: str = ""

    def transcript(self) -> str:
        """Return the task as a text for people."""
        end = self.failure or ("submitted" if self.submitted else "out of turns")
        lines = [f"reward {self.reward:.2f}, {end}, {self.without_call} turns without a call", self.question]
        return "\n\n".join([*lines, *self.history]) + "\n"


@dataclass(frozen=True)
class ShellRehearsal:
    """The tasks that a model played."""

    name: str
    tasks: tuple[PlayedTask, ...]
    #: How many were to be played.
    asked: int
    seconds: float = 0.0
    #: By Ctrl-C, before all tasks were played.
    interrupted: bool = False
    #: Why the tasks that are missing were not played.
    failure: str = ""

    @property
    def mean(self) -> float:
        """The score that the evaluator reports."""
        return sum(task.reward for task in self.tasks) / len(self.tasks) if self.tasks else 0.0

    @property
    def ended(self) -> str:
        if self.interrupted:
            return INTERRUPTED
        if self.failure:
            return "an error"
        return "all tasks played" if len(self.tasks) == self.asked else "time is over"

    @property
    def submitted(self) -> int:
        return sum(task.submitted for task in self.tasks)

    @property
    def failures(self) -> int:
        return sum(bool(task.failure) for task in self.tasks)

    @property
    def without_call(self) -> int:
        return sum(task.without_call for task in self.tasks)


def rehearse(
    model: ChatModel,
    *,
    name: str = "",
    tasks: int = TASKS,
    seed: int = 0,
    at_once: int = 1,
    seconds: float = math.inf,
    on_task: Callable[[int, PlayedTask], None] = lambda number, task: None,
) -> ShellRehearsal:
    """Let it play held-out tasks, the same for the same seed. None is begun after Ctrl-C, an error or so many
    seconds, but for the first `at_once`. `on_task` is called by one thread at a time."""
    random = Random(f"intercode rehearsal {seed}")  # noqa: S311 - a seed gives the same tasks
    drawn = list(islice(draw_tasks(random, held_out=True), tasks))
    at_once = min(at_once, tasks)
    began, lock = time.monotonic(), threading.Lock()
    interrupted, failed = threading.Event(), threading.Event()
    played: dict[int, PlayedTask] = {}
    failures: list[str] = []

    def play_some(first: int) -> None:
        with ShellMachine() as machine:
            for number in range(first, tasks, at_once):
                late = number >= at_once and time.monotonic() - began >= seconds
                if late or interrupted.is_set() or failed.is_set():
                    return
                task = play_task(model, drawn[number], machine, seed)
                with lock:
                    played[number] = task
                    on_task(number + 1, task)

    def play_or_fail(first: int) -> None:
        try:
            play_some(first)
        except (GodMinerError, OSError) as error:
            failed.set()
            with lock:
                failures.append(str(error))
        except BaseException:
            failed.set()
            raise

    with threads_until_interrupted(at_once, "shells", interrupted) as pool:
        list(pool.map(play_or_fail, range(at_once)))
    with lock:
        ordered = tuple(played[number] for number in sorted(played))
        failure = failures[0] if failures else ""
    return ShellRehearsal(name, ordered, tasks, time.monotonic() - began, interrupted.is_set(), failure)


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
        except (AnswerTimeout, ContextOverflow) as error:
            return PlayedTask(
                task.question, 0.0, tuple(history), without_call, submitted=False, failure=str(error)
            )
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
