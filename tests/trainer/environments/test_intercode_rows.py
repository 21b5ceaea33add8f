"""Rows of shell tasks, and the rehearsal that scores a model on tasks of their kind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from itertools import islice, pairwise
from random import Random

import pytest

from tests.doubles.each import each
from trainer.environments.intercode import prompts
from trainer.environments.intercode.filesystems import FileSystem, file_system
from trainer.environments.intercode.generation import Row, generate, rows_of
from trainer.environments.intercode.machine import ShellMachine
from trainer.environments.intercode.rehearsal import play_task, rehearse
from trainer.environments.intercode.tasks import TEMPLATES, Template, draw_tasks, fill
from trainer.environments.models import AnswerTimeout, ChatAnswer, Messages, ScriptedModel, Tools
from trainer.environments.tool_calls import ToolCall, template_tools

pytestmark = pytest.mark.process


ENOUGH_S = 600.0


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(generate(11, ENOUGH_S, 120))


def called(row: Row) -> ToolCall:
    (call,) = row["messages"][-1]["tool_calls"]
    return ToolCall(call["function"]["name"], call["function"]["arguments"])


def test_each_row_is_a_turn_in_the_evaluators_form(rows: list[Row]) -> None:
    assert len(rows) == 120
    for row in rows:
        system, user, answer = row["messages"]
        assert (system["content"], user["role"], answer["role"]) == (prompts.SYSTEM, "user", "assistant")
        assert json.dumps(row["tools"]) == json.dumps(template_tools(prompts.tools()))
        turn = int(re.search(r"\n\nTurn (\d+): call exactly one tool now\.$", user["content"])[1])
        assert user["content"].count("\nTool ") == turn - 1
        assert called(row).name in (prompts.EXECUTE, prompts.SUBMIT)


def test_a_command_comes_first_and_then_its_output_is_submitted(rows: list[Row]) -> None:
    for row, after in pairwise(rows):
        if called(row).name == prompts.EXECUTE:
            assert (
                f"execute_bash(command={json.dumps(called(row).arguments['command'])})"
                in (after["messages"][1]["content"])
            )
        else:
            assert "Observation" in row["messages"][1]["content"]
    assert {called(row).name for row in rows} == {prompts.EXECUTE, prompts.SUBMIT}


def test_no_prompt_has_two_answers(rows: list[Row]) -> None:
    found = [row["messages"][1]["content"] for row in rows]
    assert len(set(found)) == len(found)


def test_histories_have_the_turns_of_weaker_players(rows: list[Row]) -> None:
    longest = max(row["messages"][1]["content"].count("\nTool ") for row in rows)
    assert longest >= 2
    assert any(prompts.NO_CALL in row["messages"][1]["content"] for row in rows)


def test_a_seed_gives_the_same_rows_and_another_seed_others(rows: list[Row]) -> None:
    assert list(generate(11, ENOUGH_S, 40)) == rows[:40]
    assert list(generate(12, ENOUGH_S, 5)) != rows[:5]


def test_no_time_gives_no_rows_and_does_not_run_on() -> None:
    assert list(generate(11, 0.0, 100)) == []


def test_a_folder_that_does_not_exist_is_left_before_the_command() -> None:
    template = Template("seq 1 3", ("count to three",), kinds=(1,), wrong=("cd /testbed && ls",))
    files = file_system(1, Random(1))
    with ShellMachine() as machine:
        for seed in range(40):
            task = fill(template, files, Random(seed), held_out=True)
            assert task is not None
            made = rows_of(task, machine, Random(seed))
            if "cd /testbed && ls" in made[0]["messages"][1]["content"]:
                break
    assert [called(row).arguments.get("command") for row in made] == ["cd /", "seq 1 3", None]


WITHOUT_LANDLOCK = """
import errno, json, sys
from random import Random
from core.system.seccomp import SyscallRule, set_filter
set_filter([SyscallRule("landlock_create_ruleset", (444, 444), errno.ENOSYS)])
from trainer.environments.intercode.filesystems import FileSystem, file_system
from trainer.environments.intercode.generation import rows_of
from trainer.environments.intercode.machine import ShellMachine
from trainer.environments.intercode.tasks import fill
from trainer.environments.intercode.tasks import Template
files, made = file_system(1, Random(1)), []
with ShellMachine() as machine:
    for gold in ("wc -l < <text>", "touch <dir>/<new>.txt", "rm <file>", "sort <text> > <root>/<new>"):
        task = fill(Template(gold, ("?", "?")), files, Random(1))
        made.append(len(rows_of(task, machine, Random(1))))
print(json.dumps([made, machine.isolation]))
"""


def test_where_nothing_can_be_written_safely_only_reading_tasks_become_rows() -> None:
    command = [sys.executable, "-c", WITHOUT_LANDLOCK]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made, isolation = json.loads(done.stdout)
    assert "no Landlock" in isolation
    assert made == [2, 0, 0, 0]


def test_there_are_many_templates_each_asked_in_several_ways() -> None:
    assert len(TEMPLATES) >= 50
    assert all(len(set(template.questions)) >= 4 for template in TEMPLATES)
    assert len({template.gold for template in TEMPLATES}) == len(TEMPLATES)
    assert {kind for template in TEMPLATES for kind in template.kinds} == {1, 2, 3, 4}


@cache
def file_systems(kind: int) -> list[FileSystem]:
    return [file_system(kind, Random(seed)) for seed in range(6)]


@each("template", TEMPLATES)
def test_every_template_can_be_asked_and_has_no_slot_left(template: Template) -> None:
    draw = Random(template.gold)
    drawn = [fill(template, files, draw) for kind in template.kinds for files in file_systems(kind)]
    tasks = [task for task in drawn if task is not None]
    assert tasks
    for task in tasks:
        for text in (task.question, task.gold, *task.wrong):
            assert not re.search(r"<[a-z]+2?>", text.replace("<(", ""))


def test_held_out_questions_are_in_words_that_no_row_has() -> None:
    held_out = {template.questions[-1] for template in TEMPLATES}
    asked = {question for template in TEMPLATES for question in template.questions[:-1]}
    assert not held_out & asked


def knowing(golds: dict[str, str]) -> ScriptedModel:
    """Answers as the expert does."""

    def reply(messages: Messages, tools: Tools) -> ChatAnswer:
        assert json.dumps(tools) == json.dumps(prompts.tools())
        question = re.match(r"Question: (.*?)\n\nPrevious", messages[1]["content"], re.DOTALL)[1]
        done = "Observation 1:" in messages[1]["content"]
        return ChatAnswer(None, (prompts.submit() if done else prompts.execute(golds[question]),))

    return ScriptedModel(reply)


def test_who_knows_the_commands_earns_nearly_everything_in_a_rehearsal() -> None:
    tasks = islice(draw_tasks(Random("intercode rehearsal 3"), held_out=True), 12)
    played = rehearse(knowing({task.question: task.gold for task in tasks}), tasks=12, seed=3)
    assert played.mean >= 0.98
    assert all(task.submitted and task.without_call == 0 for task in played.tasks)
    assert len({task.question for task in played.tasks}) == 12


def test_who_never_calls_a_tool_has_ten_turns_and_what_no_change_is_worth() -> None:
    silent = ScriptedModel(lambda messages, tools: ChatAnswer("I would list the files."))
    task = next(task for task in draw_tasks(Random(1), held_out=True) if task.template.gold.startswith("wc"))
    with ShellMachine() as machine:
        played = play_task(silent, task, machine)
    assert (played.without_call, played.submitted) == (10, False)
    assert played.history[0] == "Thought 1: I would list the files."
    assert played.history[2] == f"Observation 1: {prompts.NO_CALL}"
    assert played.reward == pytest.approx(0.67)


@each(
    ("calls", "observation"),
    [
        ((prompts.execute("printf first"), prompts.execute("printf second")), "first"),
        ((ToolCall("other"), prompts.execute("printf 1")), "1"),
        ((prompts.execute("  "),), prompts.NO_COMMAND),
        ((ToolCall(prompts.EXECUTE, {"command": 7}),), prompts.NO_COMMAND),
        ((prompts.execute("seq 1 1000 | tr -d '\\n'"),), "".join(map(str, range(1, 1000)))[:350]),
    ],
)
def test_the_first_call_of_a_turn_counts(calls: tuple[ToolCall, ...], observation: str) -> None:
    answers = iter([ChatAnswer(None, calls), ChatAnswer(None, (prompts.execute("submit now"),))])
    task = next(draw_tasks(Random(1)))
    with ShellMachine() as machine:
        played = play_task(ScriptedModel(lambda messages, tools: next(answers)), task, machine)
    assert played.history[1] == f"Observation 1: {observation}"
    assert played.submitted


def test_an_answer_that_is_too_late_ends_the_task_with_nothing() -> None:
    def late(messages: Messages, tools: Tools) -> ChatAnswer:
        raise AnswerTimeout("30 s")

    assert rehearse(ScriptedModel(late), tasks=2).mean == 0.0


def test_no_task_begins_when_the_time_is_over() -> None:
    model = ScriptedModel(lambda messages, tools: ChatAnswer(None, (prompts.submit(),)))
    played = rehearse(model, tasks=5, at_once=2, seconds=0)
    assert (len(played.tasks), played.ended) == (2, "time is over")


def test_tasks_played_side_by_side_are_those_played_one_by_one() -> None:
    tasks = islice(draw_tasks(Random("intercode rehearsal 4"), held_out=True), 7)
    model, numbers = knowing({task.question: task.gold for task in tasks}), list[int]()
    one_by_one = rehearse(model, tasks=7, seed=4)
    assert (
        one_by_one.tasks
        == rehearse(
            model, tasks=7, seed=4, at_once=3, on_task=lambda number, task: numbers.append(number)
        ).tasks
    )
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6, 7]
