"""The search for memory against one that tries every variation in turn."""

from __future__ import annotations

from functools import partial
from random import Random

from core.data_facts import assumed_facts
from core.hardware import parse_gpus
from core.model_facts import facts_from_name
from core.plan_parts import TaskSpec
from core.planning.ladder import _least, fit_memory, lossless, variations
from core.planning.memory import fits
from core.planning.start import start
from core.planning.wishes import Wish, wish_for
from core.profile.load import load_profile
from core.profile.resolve import resolve
from core.tasks import TaskType


def a_wish(random: Random) -> tuple[Wish, int]:
    """Of a text task, and a number of GPUs."""
    task_type = random.choice([one for one in TaskType if one.is_text])
    params = round(10 ** random.uniform(8.5, 11))
    model = facts_from_name(f"a/{random.choice(('llama', 'Qwen2.5', 'mixtral'))}", params)
    kind = parse_gpus(f"8x{random.choice(('H100', 'A100', 'L4'))}").kind
    profile = resolve(load_profile(random.choice(("base", "h100x8", "h100x4-strategy"))), task_type, model)
    task = TaskSpec(task_type=task_type, hours=3.0)
    wish = wish_for(task, model, assumed_facts(task_type, None, 3.0), profile, kind)
    return wish, random.choice((1, 2, 4, 8))


def test_the_mildest_variation_that_fits_is_the_one_that_trying_all_finds() -> None:
    random, costs = Random(11), set()
    for _ in range(120):
        wish, world = a_wish(random)
        budget = 0.9 * wish.kind.memory_bytes
        wished, able = start(wish, world), partial(fits, budget=budget)
        tried = [wished, *(one for group in variations(wish, wished) for one in group)]
        slow = (cost for cost, one in enumerate(tried) if any(able(least) for least in _least(wish, one)))
        found, cost = fit_memory(wish, world, budget), next(slow, None)
        assert (found and found.cost) == cost, (wish.task, wish.model, world)
        assert found is None or able(found.setup)
        assert cost is None or lossless(wish, tried[cost], able) is not None
        costs.add(cost)
    assert len(costs) > 5
