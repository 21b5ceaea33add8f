"""What a model sees in a shell task; the same as the evaluator sends where GOD_MINER_UPSTREAM names it."""

from __future__ import annotations

import ast
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.doubles.each import each
from trainer.environments.intercode import prompts
from trainer.environments.intercode.machine import resolved, shell_reward
from trainer.environments.tool_calls import ToolCall

UPSTREAM = os.environ.get("GOD_MINER_UPSTREAM")
with_upstream = pytest.mark.skipif(
    not UPSTREAM, reason="GOD_MINER_UPSTREAM names no checkout of the evaluator"
)

TURNS = [
    (None, prompts.execute("echo \"a\tb\" | awk '{print $1}' # ä"), "a\n"),
    ("I look first.", prompts.execute("ls /testbed"), "x" * 400),
    (None, None, prompts.NO_CALL),
    (None, ToolCall(prompts.EXECUTE, {}), prompts.NO_COMMAND),
    (None, ToolCall(prompts.EXECUTE, {"command": 5}), prompts.NO_COMMAND),
    (None, prompts.submit(), "a\n"),
]


def test_a_turn_shows_the_question_all_turns_and_their_number() -> None:
    history = prompts.history_of(1, "I look.", prompts.execute("ls"), "y" * 351)
    system, user = prompts.messages("count files", history, 2)
    assert system == {"role": "system", "content": prompts.SYSTEM}
    assert user["content"] == (
        "Question: count files\n\nPrevious steps:\n"
        f'Thought 1: I look.\nTool 1: execute_bash(command="ls")\nObservation 1: {"y" * 350}\n\n'
        "Turn 2: call exactly one tool now."
    )


def test_the_first_turn_has_no_history() -> None:
    _, user = prompts.messages("count files", [], 1)
    assert "Previous steps:\nNo commands have been executed yet.\n\nTurn 1:" in user["content"]


def evaluator() -> dict[str, Any]:
    """The evaluator's functions, without what they need to serve a model."""
    assert UPSTREAM
    file = Path(UPSTREAM) / "validator/evaluation/evaluators/intercode.py"
    wanted = {
        "INTERCODE_TOOL_SYSTEM_PROMPT",
        "INTERCODE_EXECUTE_TOOL_NAME",
        "INTERCODE_SUBMIT_TOOL_NAME",
        "DEFAULT_OBS_TRUNCATE_CHARS",
        "DEFAULT_ACTION_TIMEOUT_SECONDS",
        "PATHS_PER_FS",
        "LocalBashEnv",
        "_function_tool",
        "build_intercode_action_tools",
        "_format_tool_history",
        "_build_tool_messages",
        "_first_action_tool_call",
        "_tool_call_for_history",
        "_apply_intercode_tool_call",
        "_run_tool_episode",
    }
    tree = ast.parse(file.read_text("utf-8"))
    tree.body = [node for node in tree.body if wanted & set(_names(node))]
    space: dict[str, Any] = {
        "__name__": "evaluator",
        "ChatMessage": lambda role, content: {"role": role, "content": content},
        "ChatRole": SimpleNamespace(SYSTEM="system", USER="user"),
        "FunctionSchema": lambda **fields: fields,
        "ToolSchema": lambda function: {"type": "function", "function": function},
        **{name: __import__(name) for name in ("json", "math", "os", "hashlib", "subprocess", "shutil")},
        "Path": Path,
    }
    code = compile(ast.unparse(ast.Module([_FUTURE, *tree.body], [])), str(file), "exec")
    exec(code, space)
    space["SCORING_MODE"] = "continuous"
    return space


_FUTURE = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@with_upstream
def test_messages_and_tools_are_byte_for_byte_the_evaluators() -> None:
    theirs = evaluator()
    assert theirs["INTERCODE_TOOL_SYSTEM_PROMPT"] == prompts.SYSTEM
    assert json.dumps(prompts.tools()) == json.dumps(theirs["build_intercode_action_tools"]())
    shown: list[list[dict[str, Any]]] = []
    script = iter(TURNS)

    def chat(client: object, name: str, heat: float, messages: Any, tools: Any, most: int) -> Any:
        shown.append(messages)
        text, call, _ = next(script)
        return SimpleNamespace(content=text, tool_calls=[call] if call else None)

    theirs["_intercode_chat"] = chat
    observations = {turn[1].arguments.get("command"): turn[2] for turn in TURNS if turn[1]}
    shell = SimpleNamespace(
        step=lambda command: (observations.get(command, "a\n"), 0.5, command == "submit", {})
    )
    theirs["_run_tool_episode"](shell, "how many?", None, "m", 0.0, len(TURNS), prompts.MAX_TOKENS)

    history: list[str] = []
    for turn, (text, call, observation) in enumerate(TURNS, 1):
        assert shown[turn - 1] == prompts.messages("how many?", history, turn)
        history += prompts.history_of(turn, text, call, observation)
    assert len(shown) == len(TURNS)


@with_upstream
@each("workdir", ["/", "/testbed", "/testbed/dir1 && ls"])
@each("target", ["", "/", "..", "../..", "a/./b", "/a//b/../c", "~", "-", "/testbed && ls /x", "a/"])
def test_cd_goes_where_the_evaluator_takes_it_to_go(workdir: str, target: str) -> None:
    assert resolved(workdir, target) == evaluator()["LocalBashEnv"]._simplify_path(workdir, target)


@pytest.mark.process
@with_upstream
def test_rewards_are_the_evaluators(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    theirs, draw = evaluator(), random.Random(1)
    for _ in range(100):
        states = [{f"/t/{draw.randrange(6)}": (draw.choice("ab"), 1) for _ in range(4)} for _ in range(3)]
        outputs = [" ".join(draw.choices(("aa", "bb", "cc", "1"), k=draw.randrange(4))) for _ in range(2)]
        shell = theirs["LocalBashEnv"](4, [], Path("/nowhere"))
        shell.gold, shell.observation, shell._snapshot_state = f"printf '{outputs[1]}'", outputs[0], states[0]
        captured = iter(states[1:])
        monkeypatch.setattr(shell, "_capture_state", lambda captured=captured: next(captured))
        monkeypatch.setattr(shell, "_restore_fs", lambda: None)
        reward, _ = shell._get_reward()
        assert shell_reward(*states, *outputs).total == pytest.approx(reward)
