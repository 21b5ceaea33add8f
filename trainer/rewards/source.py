"""Reward code from outside: checked as text, and written beside the task as an importable module."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.domain.evaluation import Era
from core.domain.tasks import MAX_REWARD_SOURCE, GrpoDataset
from core.recipes.axolotl.data_keys import GRPO_EXTRA, reward_name, reward_weights
from core.system.files import write_atomically
from trainer.errors import BadReward

#: The module that Axolotl imports (`core.recipes.base.RunInputs.reward_module`).
REWARD_MODULE = "task_rewards"
#: What it reads.
REWARD_TABLE = "rewards.json"
COMPLETIONS = "completions"
#: A function may insist on these.
HANDED_OVER = (GRPO_EXTRA, "prompts")

_HEAD = '''"""The task's rewards, each called in the sandbox. Written by god-miner; do not edit."""

from pathlib import Path

from trainer.rewards.sandbox import Rewards

REWARDS = Rewards.open(Path(__file__).with_name("{table}"))
'''
_FUNCTION = """

def {name}(prompts=None, completions=None, **columns):
    return REWARDS.call({place}, completions, prompts=prompts, **columns)
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class RewardCode:
    """One source and its reward function, or the problem that it has."""

    source: str
    function: str = ""
    #: Parameters that may be given by name; `anything` where there is a `**kwargs`.
    parameters: tuple[str, ...] = ()
    anything: bool = False
    problem: str | None = None


def read_reward(source: str) -> RewardCode:
    """Read the source without running any of it."""
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
    functions = [node for node in tree.body if isinstance(node, Function)]
    if not functions:
        return RewardCode(source, problem="defines no function")
    usable = [
        node for node in functions if isinstance(node, ast.FunctionDef) and _accepts_completions(node.args)
    ]
    named = [node for node in usable if COMPLETIONS in _names(node.args)]
    if not usable:
        shown = ", ".join(f"{node.name}({ast.unparse(node.args)})" for node in functions[:5])
        return RewardCode(source, problem=f"has no function to be called with completions alone: {shown}")
    chosen = (named or usable)[0]
    return RewardCode(source, chosen.name, tuple(_names(chosen.args)), anything=chosen.args.kwarg is not None)


def _names(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]


def _accepts_completions(arguments: ast.arguments) -> bool:
    """Return True if Python accepts `f(completions)`, or that and the arguments that validators pass by
    name."""
    positional = [*arguments.posonlyargs, *arguments.args]
    must = positional[: len(positional) - len(arguments.defaults)]
    required = len(must[:1]) + sum(argument.arg not in HANDED_OVER for argument in must[1:])
    keywords = [
        argument
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if not default
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
    """Write module and table; return the folder for PYTHONPATH. `BadReward` when no source has a reward."""
    read = [read_reward(reward.reward_func) for reward in dataset.reward_functions]
    if all(reward.problem for reward in read):
        reasons = "; ".join(f"{reward_name(place)} {reward.problem}" for place, reward in enumerate(read))
        raise BadReward(f"none of the task's reward functions can be used: {reasons}"[:2000])
    table = {
        "rewards": [
            {
                "source": reward.source,
                "function": reward.function,
                "parameters": reward.parameters,
                "anything": reward.anything,
                "problem": reward.problem,
                "weight": weight,
            }
            for reward, weight in zip(read, reward_weights(dataset), strict=True)
        ],
        # The evaluation of offers passes only the extra column, and only to a function that names it.
        "only": [GRPO_EXTRA] if era is Era.OFFERS else None,
        # The tables hold the extra column as text; the evaluation passes the original values.
        "decode": [GRPO_EXTRA] if extra_is_json else [],
        "progress": progress_path,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / REWARD_TABLE, json.dumps(table, indent=1))
    functions = (_FUNCTION.format(name=reward_name(place), place=place) for place in range(len(read)))
    _replace(folder / f"{REWARD_MODULE}.py", _HEAD.format(table=REWARD_TABLE) + "".join(functions))
    return folder


def disable_rewards(folder: Path, problems: Mapping[int, str]) -> None:
    """The functions at these places are no longer called, in any process of this run."""
    table = json.loads((folder / REWARD_TABLE).read_text("utf-8"))
    for place, problem in problems.items():
        table["rewards"][place]["problem"] = problem
    _replace(folder / REWARD_TABLE, json.dumps(table, indent=1))


def _replace(file: Path, text: str) -> None:
    write_atomically(file, text.encode("utf-8", "replace"), mode=0o644)
