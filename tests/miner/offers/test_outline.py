from __future__ import annotations

import pytest

from core.hardware import Hardware, parse_gpus
from core.model_facts import facts_from_name
from core.planning.planner import quick_plan
from core.profile import ResolvedProfile, load_profile, resolve
from core.tasks import TaskType
from miner.offers import outline as kept
from miner.offers.outline import Question, outline, outline_of, roughly
from tests.doubles.each import each

FOUR = Hardware(gpus=parse_gpus("4xH100"))
ASKED = Question("a/llama-8b", None, 3.0, TaskType.INSTRUCT, None, None, 4, FOUR)


def resolved(name: str = "steady") -> ResolvedProfile:
    return resolve(load_profile(name), TaskType.INSTRUCT, facts_from_name("a/llama-8b"))


@pytest.fixture(autouse=True)
def forgotten() -> None:
    kept._kept.clear()


def test_an_outline_is_the_plan_in_a_few_numbers() -> None:
    plan = quick_plan("a/llama-8b", None, 3.0, TaskType.INSTRUCT, FOUR, resolved())
    found = outline(ASKED, resolved())
    assert found == outline_of(plan)
    assert (found.feasible, found.gpus, found.epochs) == (True, plan.gpus.count, plan.steps.epochs)
    assert found.total_s + found.slack_s == pytest.approx(found.budget_s)
    assert 0 < found.around_s < found.total_s


def test_the_same_question_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = outline(ASKED, resolved())
    monkeypatch.setattr(kept, "quick_plan", None)
    assert outline(ASKED, resolved()) is first


@each(
    "other",
    [
        ASKED._replace(hours=4.0),
        ASKED._replace(model_id="a/llama-7b"),
        ASKED._replace(params=10**9),
        ASKED._replace(gpus=1),
        ASKED._replace(hardware=FOUR.model_copy(update={"download_rate": 1e6})),
        ASKED._replace(task_type=TaskType.DPO),
    ],
)
def test_another_question_is_planned_anew(other: Question) -> None:
    assert outline(other, resolved()) != outline(ASKED, resolved())


def test_another_profile_is_another_question() -> None:
    assert outline(ASKED, resolved("steady")) != outline(ASKED, resolved("h100x4"))


def test_no_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_KEPT", 3)
    for hours in range(1, 8):
        outline(ASKED._replace(hours=float(hours)), resolved())
    assert [key[2].hours for key in kept._kept] == [5, 6, 7]


def test_free_disk_that_changes_a_little_changes_nothing() -> None:
    def host(free: int | None) -> Hardware:
        return FOUR.model_copy(update={"disk_free_bytes": free})

    assert roughly(host(123 * 10**9)) == roughly(host(129 * 10**9)) == host(120 * 10**9)
    assert roughly(host(9 * 10**9)).disk_free_bytes == 0
    assert roughly(host(None)) == host(None)
