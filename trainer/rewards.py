"""Reward code from outside: checked as text, written beside the task, called in a process of its own.

A source may hold helpers, imports and several functions; the reward is the first that takes `completions`, as
validators call it, or else the first that can be called with one argument. Nothing is run here: the sources
go into `rewards.json`, and the module `task_rewards`, which Axolotl imports, hands every call to the
sandbox.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.evaluation import Era
from core.files import write_atomically
from core.recipes.datasets import GRPO_EXTRA, reward_name, reward_weights
from core.tasks import MAX_REWARD_SOURCE, GrpoDataset
from trainer.errors import BadReward

#: The module that Axolotl is told of (`core.recipes.run.RunInputs.reward_module`).
MODULE = "task_rewards"
#: What it reads.
TABLE = "rewards.json"
COMPLETIONS = "completions"
#: A function may insist on these.
HANDED_OVER = (GRPO_EXTRA, "prompts")

_HEAD = '''"""The task's rewards, each called in the sandbox. Written by god-miner; do not edit."""

from pathlib import Path

from trainer.sandbox import Rewards

REWARDS = Rewards.open(Path(__file__).with_name("{table}"))
'''
_FUNCTION = """

def {name}(prompts=None, completions=None, **columns):
    return REWARDS.call({place}, completions, prompts=prompts, **columns)
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class RewardCode:
    """One source and the function in it that is the reward; or why there is none."""

    source: str
    function: str = ""
    #: Parameters that may be given by name; `anything` where there is a `**kwargs`.
    parameters: tuple[str, ...] = ()
    anything: bool = False
    problem: str | None = None


def read_reward(source: str) -> RewardCode:
    """Looks at the source without running any of it."""
    if len(source) > MAX_REWARD_SOURCE:
        return RewardCode("", problem=f"is {len(source):,} characters long, {MAX_REWARD_SOURCE:,} at most")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as first:
        source = textwrap.dedent(source)
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return RewardCode(source, problem=f"is no Python: {first}")
    found = [node for node in tree.body if isinstance(node, Function)]
    if not found:
        return RewardCode(source, problem="defines no function")
    usable = [node for node in found if isinstance(node, ast.FunctionDef) and _takes_one(node.args)]
    named = [node for node in usable if COMPLETIONS in _names(node.args)]
    if not usable:
        shown = ", ".join(f"{node.name}({ast.unparse(node.args)})" for node in found[:5])
        return RewardCode(source, problem=f"has no function to be called with completions alone: {shown}")
    chosen = (named or usable)[0]
    return RewardCode(source, chosen.name, tuple(_names(chosen.args)), anything=chosen.args.kwarg is not None)


def _names(arguments: ast.arguments) -> list[str]:
    return [one.arg for one in (*arguments.args, *arguments.kwonlyargs)]


def _takes_one(arguments: ast.arguments) -> bool:
    """Whether Python accepts `f(completions)`, or that and what validators hand over by name."""
    positional = [*arguments.posonlyargs, *arguments.args]
    must = positional[: len(positional) - len(arguments.defaults)]
    required = len(must[:1]) + sum(one.arg not in HANDED_OVER for one in must[1:])
    keywords = [
        one for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default
    ]
    return required <= 1 and not keywords and bool(positional or arguments.vararg)


def write_rewards(
    dataset: GrpoDataset,
    folder: Path,
    *,
    era: Era = Era.OFFERS,
    progress_path: str | None = None,
    extra_is_json: bool = False,
) -> Path:
    """Writes module and table, returns the folder for PYTHONPATH. `BadReward` when no source has a reward."""
    read = [read_reward(one.reward_func) for one in dataset.reward_functions]
    if all(one.problem for one in read):
        reasons = "; ".join(f"{reward_name(place)} {one.problem}" for place, one in enumerate(read))
        raise BadReward(f"none of the task's reward functions can be used: {reasons}"[:2000])
    table = {
        "rewards": [
            {
                "source": one.source,
                "function": one.function,
                "parameters": one.parameters,
                "anything": one.anything,
                "problem": one.problem,
                "weight": weight,
            }
            for one, weight in zip(read, reward_weights(dataset), strict=True)
        ],
        # The evaluation of offers gives a function nothing but what it names of the extra column.
        "only": [GRPO_EXTRA] if era is Era.OFFERS else None,
        # What rows carry for the rewards lies in tables as text; the evaluation hands it over as it was.
        "decode": [GRPO_EXTRA] if extra_is_json else [],
        "progress": progress_path,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / TABLE, json.dumps(table, indent=1))
    functions = (_FUNCTION.format(name=reward_name(place), place=place) for place in range(len(read)))
    _replace(folder / f"{MODULE}.py", _HEAD.format(table=TABLE) + "".join(functions))
    return folder


def leave_out(folder: Path, problems: Mapping[int, str]) -> None:
    """The functions at these places are not called any more, in no process of this run."""
    table = json.loads((folder / TABLE).read_text("utf-8"))
    for place, problem in problems.items():
        table["rewards"][place]["problem"] = problem
    _replace(folder / TABLE, json.dumps(table, indent=1))


def _replace(file: Path, text: str) -> None:
    write_atomically(file, text.encode("utf-8", "replace"), mode=0o644)
