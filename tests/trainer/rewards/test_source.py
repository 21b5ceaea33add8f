"""Reward sources, looked at without running them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.evaluation import Era
from core.domain.tasks import GrpoDataset, RewardFunction
from tests.doubles.each import each
from trainer.errors import BadReward
from trainer.rewards.source import REWARD_MODULE, REWARD_TABLE, read_reward, write_rewards


def task(*sources: str, weights: tuple[float, ...] = ()) -> GrpoDataset:
    given_weights = weights or (1.0,) * len(sources)
    functions = [
        RewardFunction(reward_func=source, reward_weight=weight)
        for source, weight in zip(sources, given_weights, strict=True)
    ]
    return GrpoDataset(field_prompt="prompt", reward_functions=functions)


WITH_HELPER = """import re

def helper(text):
    return len(text)

def score(completions):
    return [helper(one) for one in completions]
"""
GOOD = "def reward(completions, **kwargs):\n    return [float(len(one)) for one in completions]\n"


@each(
    ("source", "function"),
    [
        (GOOD, "reward"),
        (WITH_HELPER, "score"),
        ("def first(completions): return []\ndef second(completions): return []", "first"),
        ("def only(texts): return []", "only"),
        ("def f(a, b=1, *, c=2, **k): return []", "f"),
        ("def f(*args): return []", "f"),
        ("def f(completions, extra_data): return []", "f"),
        ("def two(a, b): ...\ndef one(a): ...", "one"),
        ("    def indented(completions):\n        return [1]\n", "indented"),
        ("def outer(completions):\n    def inner(completions): ...\n    return []", "outer"),
    ],
)
def test_the_reward_is_the_function_that_takes_the_completions(source: str, function: str) -> None:
    reward = read_reward(source)
    assert (reward.problem, reward.function) == (None, function)


def test_a_signature_decides_what_is_passed() -> None:
    reward = read_reward("def f(completions, extra_data=None, *, more=1, **kwargs): ...")
    assert (reward.parameters, reward.anything) == (("completions", "extra_data", "more"), True)
    assert not read_reward("def f(completions): ...").anything


@each(
    ("source", "problem"),
    [
        ("def f(completions:\n  return", "is no Python"),
        ("x = 1", "defines no function"),
        ("", "defines no function"),
        ("async def f(completions): ...", "no function to be called"),
        ("def f(): ...", "no function to be called"),
        ("def f(a, b): ...", r"no function to be called with completions alone: f\(a, b\)"),
        ("def f(completions, *, needed): ...", "no function to be called"),
        ("\0", "is no Python"),
        ("(" * 500, "is no Python"),
        ("class C:\n    def f(self, completions): ...", "defines no function"),
        ("a" * 200_001, "characters long"),
    ],
)
def test_an_invalid_reward_has_a_problem(source: str, problem: str) -> None:
    import re

    reward = read_reward(source)
    assert reward.problem is not None
    assert re.search(problem, reward.problem)


@given(st.text(max_size=60))
def test_any_text_is_read_without_an_error(source: str) -> None:
    read_reward(source)


def test_looking_runs_nothing(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n{GOOD}"
    write_rewards(task(trap), tmp_path / "w")
    assert not (tmp_path / "ran").exists()


def test_the_module_has_a_function_for_each_place_and_no_foreign_code(tmp_path: Path) -> None:
    folder = write_rewards(task(GOOD, "def broken(", GOOD), tmp_path / "w")
    module = (folder / f"{REWARD_MODULE}.py").read_text()
    assert [f"def reward_{place}(" in module for place in range(4)] == [True, True, True, False]
    assert "float(len" not in module
    table = json.loads((folder / REWARD_TABLE).read_text())
    assert [one["problem"] is None for one in table["rewards"]] == [True, False, True]


def test_weights_are_normalised_as_validators_do(tmp_path: Path) -> None:
    folder = write_rewards(task(GOOD, GOOD, weights=(3.0, 1.0)), tmp_path / "w")
    assert [one["weight"] for one in json.loads((folder / REWARD_TABLE).read_text())["rewards"]] == [
        0.75,
        0.25,
    ]


@pytest.mark.parametrize(("era", "only"), [(Era.OFFERS, ["extra_data"]), (Era.TOURNAMENTS, None)])
def test_the_era_decides_what_functions_are_passed(tmp_path: Path, era: Era, only: list[str] | None) -> None:
    folder = write_rewards(task(GOOD), tmp_path / "w", era=era)
    assert json.loads((folder / REWARD_TABLE).read_text())["only"] == only


def test_a_task_without_a_single_reward_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    with pytest.raises(BadReward, match=r"reward_0 is no Python.*reward_1 defines no function"):
        write_rewards(task("def (", "x = 1"), tmp_path / "w")
