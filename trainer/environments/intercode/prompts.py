"""The evaluator's messages in a shell task: a fixed text, and the question with all turns so far.

Each turn is a new conversation: the history is text, not messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trainer.environments.tool_calls import ToolCall

EXECUTE, SUBMIT = "execute_bash", "submit"
MAX_TURNS, MAX_TOKENS = 10, 512
#: Characters of an output that the model gets to see.
OBSERVATION_LENGTH = 350

#: Word for word the evaluator's.
SYSTEM = """Interact with a Bourne Shell system using Bash commands to answer a question.
You may reason briefly in normal assistant text, but every turn must call exactly one tool:
(1) execute_bash, which executes Bash code on the Bourne Shell system
(2) submit, which indicates that the previous observation is the answer
Do not write actions as plain text. Use the tools for every action.

Examples:

Question: Convert the first 16 characters in "/testbed/textfile7.txt" to a single hexadecimal value
Turn 1 tool: execute_bash(command="xxd -p -l 16 /testbed/textfile7.txt")
Observation 1: /bin/bash: line 1: xxd: command not found
Turn 2 tool: execute_bash(command="od -A n -t x1 -N 16 /testbed/textfile7.txt")
Observation 2:  54 65 78 74 20 66 69 6c 65 20 37 20 77 69 74 68
Turn 3 tool: execute_bash(command="od -A n -t x1 -N 16 /testbed/textfile7.txt | awk '{$1=$1;print}' | tr -d ' '")
Observation 3: 546578742066696c6520372077697468
Turn 4 tool: submit()

Question: print disk usage in human readable format of files or folders in /workspace
Turn 1 tool: execute_bash(command="du /workspace")
Observation 1: 48\t/workspace/dir1
8\t/workspace/dir2/mysql
24\t/workspace/dir2
100\t/workspace
Turn 2 tool: execute_bash(command="du -h /workspace")
Observation 2: 48K\t/workspace/dir1
8.0K\t/workspace/dir2/mysql
24K\t/workspace/dir2
100K\t/workspace
Turn 3 tool: execute_bash(command="du -sh /workspace")
Observation 3: 100K\t/workspace
Turn 4 tool: submit()

Question: Count all the lines of all php files in the /testbed directory recursively
Turn 1 tool: execute_bash(command="find /testbed -name \"*.php\" | xargs wc -l")
Observation 1:  1 /testbed/dir1/info.php
 1 /testbed/hello.php
 2 total
Turn 2 tool: execute_bash(command="find /testbed -name \"*.php\" -type f -exec cat {} + | wc -l")
Observation 2: 2
Turn 3 tool: submit()
"""  # noqa: E501

NO_CALL = "Error executing query: no valid action tool call received; call execute_bash or submit."
NO_COMMAND = "Error executing query: execute_bash requires a non-empty string command."


def tools() -> list[dict[str, Any]]:
    """The two tools, in the evaluator's order of keys."""
    command = {"type": "string", "description": "The Bash command to execute."}
    return [
        _tool(
            EXECUTE,
            "Execute one Bash command in the InterCode Bourne Shell environment.",
            {"command": command},
        ),
        _tool(SUBMIT, "Submit the previous observation as the final answer and end the task.", {}),
    ]


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def messages(question: str, history: Sequence[str], turn: int) -> list[dict[str, Any]]:
    """A turn's conversation; `turn` counts from 1."""
    steps = "\n".join(history) or "No commands have been executed yet."
    user = f"Question: {question}\n\nPrevious steps:\n{steps}\n\nTurn {turn}: call exactly one tool now."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def execute(command: str) -> ToolCall:
    return ToolCall(EXECUTE, {"command": command})


def submit() -> ToolCall:
    return ToolCall(SUBMIT)


def history_of(turn: int, text: str | None, call: ToolCall | None, observation: str) -> list[str]:
    """The lines that a turn adds to the history."""
    thought = [f"Thought {turn}: {text}"] if text else []
    shown = observation[:OBSERVATION_LENGTH]
    return [*thought, f"Tool {turn}: {_shown_call(call)}", f"Observation {turn}: {shown}"]


def _shown_call(call: ToolCall | None) -> str:
    if call is None:
        return "no valid tool call"
    if call.name == SUBMIT:
        return "submit()"
    return f"{EXECUTE}(command={json.dumps(call.arguments.get('command', ''))})"
