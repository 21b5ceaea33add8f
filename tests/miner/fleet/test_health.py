"""Cards judged from one look to the next."""

from __future__ import annotations

import pytest

from core.hardware import KINDS
from miner.fleet.health import Health, Judged
from miner.fleet.looks import Look, Seen
from tests.miner.fleet.setups import H100

GIB = 2**30


def seen(index: int, **more: object) -> Seen:
    facts: dict[str, object] = {"kind": H100, "total_bytes": 80 * GIB, "used_bytes": 0, **more}
    return Seen(f"g{index}", index, **facts)  # type: ignore[arg-type]


def look(*cards: Seen, **errors: str) -> Look:
    return Look(cards, {int(name[1:]): text for name, text in errors.items()})


class Watch:
    def __init__(self) -> None:
        self.health = Health(return_seconds=300.0, settle_seconds=60.0)
        self.in_use: set[str] = set()
        self.released: dict[str, float] = {}

    def sees(self, now: float, *cards: Seen, **errors: str) -> Judged:
        return self.health.judge(look(*cards, **errors), now, self.in_use.__contains__, self.released)


@pytest.fixture
def watch() -> Watch:
    """A host of two that is known since long before."""
    made = Watch()
    made.sees(-1000.0, seen(0), seen(1))
    return made


def outs(judged: Judged) -> list[str | None]:
    return [gpu.out for gpu in judged.gpus]


def kinds(judged: Judged) -> list[tuple[str, str]]:
    return [(change.kind, change.gpu) for change in judged.changes]


def test_cards_that_answer_may_be_used(watch: Watch) -> None:
    judged = watch.sees(0.0, seen(0), seen(1))
    assert outs(judged) == [None, None]
    assert (judged.kind, judged.failed, judged.changes) == (H100, {}, ())
    assert judged.sees_memory


def test_a_card_that_vanishes_is_out_at_once_and_told_once(watch: Watch) -> None:
    gone = watch.sees(0.0, seen(0))
    assert outs(gone) == [None, "the driver does not list it any more"]
    assert gone.failed == {"g1": "the driver does not list it any more"}
    assert kinds(gone) == [("gpu_out", "g1")]
    assert kinds(watch.sees(5.0, seen(0))) == []


def test_a_card_that_fails_is_known_by_its_place(watch: Watch) -> None:
    lost = watch.sees(0.0, seen(0), _1="GPU is lost")
    assert lost.failed == {"g1": "GPU is lost"}


def test_a_failed_card_is_back_when_it_was_fine_for_long_enough(watch: Watch) -> None:
    watch.sees(0.0, seen(0))
    (_, out) = outs(watch.sees(10.0, seen(0), seen(1)))
    assert out == "the driver does not list it any more; fine again, and watched for a while"
    assert outs(watch.sees(309.0, seen(0), seen(1)))[1] is not None
    back = watch.sees(310.0, seen(0), seen(1))
    assert outs(back) == [None, None]
    assert kinds(back) == [("gpu_back", "g1")]


def test_a_card_that_comes_and_goes_is_not_back(watch: Watch) -> None:
    for now in range(0, 2000, 200):
        watch.sees(float(now), seen(0))
        assert outs(watch.sees(now + 100.0, seen(0), seen(1)))[1] is not None


def test_a_job_on_a_card_that_is_fine_again_is_not_lost_any_more(watch: Watch) -> None:
    watch.sees(0.0, seen(0))
    assert watch.sees(10.0, seen(0), seen(1)).failed == {}


def test_a_clock_set_back_does_not_keep_a_card_out_for_ever(watch: Watch) -> None:
    watch.sees(1e6, seen(0))
    watch.sees(1e6 + 1, seen(0), seen(1))
    assert outs(watch.sees(100.0, seen(0), seen(1))) == [None, None]


def test_a_card_that_somebody_else_uses_is_out_and_no_job_of_ours_is_lost(watch: Watch) -> None:
    taken = watch.sees(0.0, seen(0), seen(1, used_bytes=30 * GIB))
    assert outs(taken) == [None, "somebody else uses 30.0 GiB of it"]
    assert (taken.failed, kinds(taken)) == ({}, [("gpu_out", "g1")])
    assert outs(watch.sees(10.0, seen(0), seen(1)))[1] is not None
    assert outs(watch.sees(310.0, seen(0), seen(1))) == [None, None]


def test_a_little_memory_in_use_is_nobody(watch: Watch) -> None:
    judged = watch.sees(0.0, seen(0, used_bytes=GIB, processes=1), seen(1))
    assert outs(judged) == [None, None]
    assert judged.shared == {"g0"}


def test_what_our_own_job_uses_is_no_fault(watch: Watch) -> None:
    watch.in_use = {"g0"}
    judged = watch.sees(0.0, seen(0, used_bytes=70 * GIB, processes=1), seen(1))
    assert (outs(judged), judged.unclean) == ([None, None], frozenset())


def test_the_last_jobs_memory_has_a_while_to_go(watch: Watch) -> None:
    watch.released = {"g0": 0.0}
    clearing = watch.sees(10.0, seen(0, used_bytes=70 * GIB), seen(1))
    assert (outs(clearing), clearing.unclean) == ([None, None], {"g0"})
    clean = watch.sees(20.0, seen(0), seen(1))
    assert (outs(clean), clean.unclean, clean.changes) == ([None, None], frozenset(), ())
    watch.released = {"g0": 20.0}
    assert outs(watch.sees(81.0, seen(0, used_bytes=70 * GIB), seen(1)))[0] is not None


def test_jobs_of_an_earlier_life_have_a_while_to_be_found() -> None:
    watch = Watch()
    first = watch.sees(0.0, seen(0, used_bytes=70 * GIB))
    assert (outs(first), first.unclean) == ([None], {"g0"})
    assert outs(watch.sees(61.0, seen(0, used_bytes=70 * GIB))) == ["somebody else uses 70.0 GiB of it"]


def test_a_card_that_was_taken_and_then_breaks_is_told_again(watch: Watch) -> None:
    watch.sees(0.0, seen(0), seen(1, used_bytes=30 * GIB))
    broken = watch.sees(5.0, seen(0), _1="GPU is lost")
    assert (broken.failed, kinds(broken)) == ({"g1": "GPU is lost"}, [("gpu_out", "g1")])


def test_the_operators_word_counts_and_costs_no_job(watch: Watch) -> None:
    judged = watch.sees(0.0, seen(0, excluded="the fan"), seen(1))
    assert outs(judged) == ["taken out: the fan", None]
    assert (judged.failed, judged.changes) == ({}, ())
    assert outs(watch.sees(1.0, seen(0), seen(1))) == [None, None]


def test_a_host_is_planned_for_one_kind_of_card() -> None:
    other = KINDS["L40S"]
    judged = Watch().sees(0.0, seen(0, kind=other), seen(1), seen(2))
    assert judged.kind == H100
    assert outs(judged) == ["a L40S among H100-SXM: this host is planned for one kind of card", None, None]


def test_plans_are_made_for_the_card_with_the_least_memory() -> None:
    smaller = H100.model_copy(update={"memory_bytes": H100.memory_bytes - GIB})
    judged = Watch().sees(0.0, seen(0), seen(1, kind=smaller))
    assert judged.kind == smaller
    assert outs(judged) == [None, None]


def test_a_host_without_any_card_has_no_kind() -> None:
    judged = Watch().sees(0.0)
    assert (judged.kind, judged.gpus, judged.sees_memory) == (None, (), False)
