"""The search for memory against one that tries every variation in turn."""

from __future__ import annotations

import itertools
from functools import partial
from random import Random

import pytest

from core.data.facts import assumed_facts
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.conditions import JobConditions
from core.planning.memory.peak import fits_memory, memory_of
from core.planning.plan import TaskSpec
from core.planning.planner import plan_task
from core.planning.search.ladder import _least, fit_lossless, fit_memory, variations
from core.planning.search.requirements import Requirements, first_candidate, requirements_for
from core.profile.resolve import load_profile, resolve_profile
from tests.core.planning.candidates import host, resolved


def random_requirements(random: Random) -> tuple[Requirements, int]:
    """Requirements of a text task, and a number of GPUs."""
    task_type = random.choice([task for task in TaskType if task.is_text])
    params = round(10 ** random.uniform(8.5, 11))
    model = facts_from_name(f"a/{random.choice(('llama', 'Qwen2.5', 'mixtral'))}", params)
    conditions = JobConditions(host(f"8x{random.choice(('H100', 'A100', 'L4'))}"))
    profile = resolve_profile(
        load_profile(random.choice(("base", "h100x8", "h100x4-strategy"))), task_type, model
    )
    task = TaskSpec(task_type=task_type, hours=3.0)
    needs = requirements_for(task, model, assumed_facts(task_type, None, 3.0), profile, conditions)
    return needs, random.choice((1, 2, 4, 8))


def test_the_mildest_variation_that_fits_is_the_one_that_trying_all_finds() -> None:
    random, costs = Random(11), set()
    for _ in range(120):
        needs, world = random_requirements(random)
        budget = 0.9 * needs.kind.memory_bytes
        required, fits = first_candidate(needs, world), partial(fits_memory, budget=budget)
        tried = [required, *itertools.chain.from_iterable(variations(needs, required))]
        fitting = (at for at, base in enumerate(tried) if any(fits(least) for least in _least(needs, base)))
        expected = next(fitting, None)
        candidate, cost = fit_memory(needs, required, budget)
        assert (candidate and cost) == expected, (needs.task, needs.model, world)
        assert candidate is None or fits(candidate)
        assert expected is None or fit_lossless(needs, tried[expected], fits) is not None
        costs.add(expected)
    assert len(costs) > 5


@pytest.mark.parametrize(
    ("image_type", "rate"),
    [(ImageModelType.FLUX, None), (ImageModelType.SDXL, 1e-5)],
    ids=["frozen", "trained"],
)
def test_captions_are_dropped_for_as_long_as_the_text_encoders_stay_on_the_gpu(
    image_type: ImageModelType, rate: float | None
) -> None:
    """A dropped caption is encoded in the step that drops it, so either memory counts the encoders or none is
    dropped. Pixels go last."""
    model = facts_from_name("a/model", None, image_type)
    profile = resolved(caption_dropout=0.1, text_encoder_lr=rate)
    task = TaskSpec(task_type=TaskType.IMAGE, hours=1.0, image_type=image_type)
    data = assumed_facts(TaskType.IMAGE, 30, image_type=image_type)
    needs = requirements_for(task, model, data, profile, JobConditions(host("8xL4")))
    start = first_candidate(needs, 1)
    assert start.image is not None
    assert start.image.text_adapter == (rate is not None)
    tried = list(itertools.chain.from_iterable(variations(needs, start)))
    first = next(index for index, candidate in enumerate(tried) if candidate.image.text_offloaded)
    assert first > 2
    assert all(candidate.image.text_offloaded for candidate in tried[first:])
    assert not any(candidate.image.text_adapter for candidate in tried[first - 1 :])
    assert {candidate.image.resolution for candidate in tried[: first + 1]} == {start.image.resolution}
    encoders = model.image.text_encoder_params
    saved = memory_of(tried[first - 1], 0).total_bytes - memory_of(tried[first], 0).total_bytes
    assert saved > encoders


def test_dropped_captions_are_given_up_where_the_text_encoders_do_not_fit() -> None:
    model = facts_from_name("a/flux", None, ImageModelType.FLUX)
    task = TaskSpec(task_type=TaskType.IMAGE, hours=1.0, image_type=ImageModelType.FLUX)
    data = assumed_facts(TaskType.IMAGE, 30, image_type=ImageModelType.FLUX)
    profile = resolved(caption_dropout=0.1)
    hosts = host("1xA100-PCIE-40GB"), host("1xH200")
    small, large = (plan_task(task, model, data, machine, profile) for machine in hosts)
    assert (small.image.cache_text, small.image.caption_dropout) == (True, 0)
    assert any("caption_dropout 0.1 → 0" in str(concession) for concession in small.concessions)
    assert (large.image.cache_text, large.image.caption_dropout) == (False, 0.1)
