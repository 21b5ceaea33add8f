from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Engine
from core.domain.decisions import Decision
from core.domain.hardware import Hardware, parse_gpus
from core.domain.keys import GpuReservation, ReservationKind, TaskKey, gpu_on_node, nodes_of
from core.domain.tasks import TaskType
from core.profile.resolve import load_profile
from miner.fleet.base import BackendAbility, FleetNode, FleetSnapshot, Gpu, InventoryState
from miner.offers.decide import decide
from miner.offers.history import SuccessHistory
from tests.miner.offers.builders import (
    HOUR,
    NOON,
    decided,
    fleet,
    hold,
    offer,
    picture_offer,
    policy,
    verdict,
)


def test_gpus_are_held_for_the_plan_and_something_to_spare_but_not_beyond_the_deadline() -> None:
    asked = picture_offer(hours_to_complete=3.0)
    short = decided(asked, policy(fitting__spare=0.5, fitting__start_delay="10m"))
    held = short.placement.ends_at - short.placement.starts_at
    assert held == pytest.approx(1.5 * short.plan.busy_s + 600)
    long = decided(offer(model="a/llama-13b", model_params_count=13 * 10**9), policy(fitting__spare=1))
    assert long.placement.ends_at - NOON == 3 * HOUR + 300
    assert decided(by=policy(fitting__start_delay="0m")).accepted


def test_a_task_waits_for_its_gpus_and_is_planned_for_the_hours_that_are_left() -> None:
    busy = fleet("4xH100", hold("a", "0123", end=0.4))
    waiting = decided(on=busy, by=policy(fitting__max_wait="30m"))
    assert waiting.accepted
    assert waiting.placement.starts_at == pytest.approx(NOON + 0.4 * HOUR, abs=130)
    assert waiting.plan.wait_s == pytest.approx(0.4 * HOUR, abs=130)
    assert waiting.plan.epochs < decided().plan.epochs
    assert waiting.plan.wait_s + waiting.plan.busy_s <= 3 * HOUR
    assert "of waiting" in verdict(waiting, "gpus").text


def test_no_task_waits_longer_than_allowed() -> None:
    busy = fleet("4xH100", hold("a", "0123", end=1.5))
    refused = decided(on=busy, by=policy(fitting__max_wait="30m"))
    reason = verdict(refused, "gpus")
    assert not reason.passed
    assert "free in 1 h 30 min" in reason.text
    assert reason.way.startswith("fitting.max_wait of 90m")
    assert decided(on=busy, by=policy(fitting__max_wait="90m")).accepted
    never = verdict(decided(on=fleet("4xH100", hold("a", "0123", end=9))), "gpus")
    assert "before its deadline" in never.text


def test_nothing_is_planned_while_all_gpus_are_held_for_longer_than_an_offer_may_wait() -> None:
    held = hold("a", "012", end=4), hold("b", "3", end=0.3), hold("c", "3", start=0.3, end=0.8)
    refused = decided(on=fleet("4xH100", *held), by=policy(fitting__max_wait="30m"))
    assert not refused.accepted
    assert refused.message == "Not taken: no capacity at the moment"
    assert refused.plan is None
    assert [reason.rule for reason in refused.failed] == ["gpus"]
    assert "nothing was planned" in verdict(refused, "value").text
    assert "not planned" in verdict(refused, "gpus").text
    gap = hold("a", "012", end=4), hold("b", "3", end=0.3), hold("c", "3", start=0.4, end=0.8)
    assert decided(on=fleet("4xH100", *gap), by=policy(fitting__max_wait="30m")).plan is not None
    assert decided(on=fleet("4xH100", *held), by=policy(fitting__max_wait="48m")).plan is not None


def test_a_wait_that_leaves_too_little_time_is_no_way_out() -> None:
    busy = fleet("4xH100", hold("a", "0123", end=0.9))
    refused = decided(offer(hours_to_complete=1.0), policy(fitting__max_wait="1h"), busy)
    assert not verdict(refused, "gpus").passed
    assert verdict(refused, "plan").passed


def test_where_too_few_gpus_are_free_it_is_planned_for_fewer() -> None:
    busy = fleet("4xH100", hold("a", "01", end=9))
    fewer = decided(plan_by="all", on=busy, by=policy())
    assert len(fewer.placement.gpus) == 2
    assert fewer.plan.gpus == 2
    stubborn = decided(plan_by="all", on=busy, by=policy(fitting__fewer_gpus=False))
    assert not stubborn.accepted


def test_by_value_a_task_gets_gpus_by_what_it_gains_and_what_others_hold() -> None:
    """The shipped flagship: two of four idle GPUs, or one of the last two."""
    alone = decided(offer(hours_to_complete=4), policy("h100x4"), fleet(), plan_by="h100x4")
    assert len(alone.placement.gpus) == 2
    busy = fleet("4xH100", hold("a", "0", end=9), hold("b", "1", end=9))
    among_others = decided(offer(hours_to_complete=4), policy("h100x4"), busy, plan_by="h100x4")
    assert len(among_others.placement.gpus) == 1
    assert among_others.placement.starts_at == NOON
    waiting = fleet("4xH100", hold("a", "01", start=2, end=9))
    assert (
        len(decided(offer(hours_to_complete=4), policy("h100x4"), waiting, plan_by="h100x4").placement.gpus)
        == 1
    )
    free = policy("h100x4", value__gpu_hour=0.0)
    assert len(decided(offer(hours_to_complete=4), free, fleet(), plan_by="h100x4").placement.gpus) == 4


def test_of_waiting_and_fewer_gpus_the_one_that_trains_more_is_taken() -> None:
    soon = fleet("4xH100", hold("a", "01", end=0.1))
    decision = decided(offer(model="a/llama-34b", model_params_count=34 * 10**9), plan_by="all", on=soon)
    assert len(decision.placement.gpus) == 4
    later = fleet("4xH100", hold("a", "01", end=0.45))
    small = decided(picture_offer(), plan_by="all", on=later)
    assert small.placement.starts_at == NOON


def test_a_lane_keeps_its_gpus_and_overflows_where_it_may() -> None:
    on_lane = decided(on=fleet("8xH100"), plan_by="h100x8")
    assert on_lane.placement.gpus == ("2", "3")
    assert on_lane.placement.why.startswith("lane medium")
    assert on_lane.lane[0] == "medium"
    for end in (
        1.0,
        9.0,
    ):  # it does not wait for its lane, also where that is free again long before the deadline
        beyond = decided(on=fleet("8xH100", hold("a", "23", end=end)), plan_by="h100x8")
        assert beyond.placement.starts_at == NOON
        assert not set(beyond.placement.gpus) & {"2", "3"}
        assert "beyond lane medium" in beyond.placement.why


def test_where_all_are_busy_the_gpus_that_are_free_first_are_waited_for() -> None:
    full = fleet("8xH100", hold("a", "23", end=1.0), hold("b", "0167", end=2.0), hold("c", "45", end=0.3))
    waiting = decided(on=full, by=policy(fitting__max_wait="30m"), plan_by="h100x8")
    assert waiting.placement.gpus == ("4", "5")
    assert waiting.placement.starts_at == pytest.approx(NOON + 0.3 * HOUR, abs=130)


def test_the_reference_pass_must_leave_time_with_the_largest_dataset_too(tmp_path: Path) -> None:
    """A full fine-tune cannot do without it on one GPU; an adapter is switched off in each step instead."""
    whole = tmp_path / "whole.yaml"
    whole.write_text("extends: steady\nsections: {dpo: {when: {task: dpo}, targets: {full_below: 9B}}}")
    asked = offer(
        model="mistralai/Mistral-7B-Instruct-v0.3",
        model_params_count=7_248_023_552,
        task_type=TaskType.DPO,
        hours_to_complete=4.0,
    )
    assert decided(asked, plan_by=str(whole)).accepted
    decision = decided(asked, plan_by=str(whole), on=fleet("1xH100"))
    assert not verdict(decision, "plan").passed
    assert "500,000 rows" in verdict(decision, "plan").text
    assert decision.message.startswith("Not taken: the task cannot be finished")
    busy = fleet("4xH100", hold("a", "012", end=9))
    assert not decided(asked, plan_by=str(whole), on=busy).accepted
    assert decided(asked, plan_by="steady", on=busy).accepted


def test_the_rows_of_an_image_offer_count_and_those_of_a_text_offer_do_not() -> None:
    few, many = (decided(picture_offer(ds_size=size)).plan for size in (10, 50))
    assert few.busy_s < many.busy_s
    assert decided(offer(ds_size=10)).plan == decided(offer(ds_size=10**9)).plan


def machines(*holds: GpuReservation, backend: str = "slurm", **nodes: str) -> FleetSnapshot:
    """`machines(n1="8xH100", here="2xA100")`; the node `here` is the daemon's machine, run by Docker."""
    gpus: list[Gpu] = []
    found: list[FleetNode] = []
    for key, text in nodes.items():
        name = "" if key == "here" else key
        one = Hardware(gpus=parse_gpus(text))
        ids = [gpu_on_node(index, name) if name else str(index) for index in range(one.gpus.count)]
        gpus += [
            Gpu(gpu, index, one.gpus.kind, frozenset(ids) - {gpu}, None, name)
            for index, gpu in enumerate(ids)
        ]
        found.append(FleetNode(name, backend if name else "docker", one, one))
    return FleetSnapshot(InventoryState(tuple(gpus), tuple(found)), holds, NOON)


def held(node: str, count: int, hours: float) -> GpuReservation:
    gpus = tuple(gpu_on_node(index, node) for index in range(count))
    key = TaskKey("validator", f"on-{node}")
    return GpuReservation(key, ReservationKind.JOB, gpus, NOON - HOUR, NOON + hours * HOUR, 0.3)


def nodes_for(decision: Decision) -> tuple[str, ...]:
    assert decision.accepted, decision.message
    return nodes_of(decision.placement.gpus)


def large(**changes: Any) -> Any:
    """What eight H100 train more of than four."""
    return offer(**{"model": "meta-llama/Llama-3.1-70B", "model_params_count": 70 * 10**9, **changes})


def test_each_class_is_planned_by_its_own_gpus_and_what_trains_most_is_taken() -> None:
    fleets = {"a1": "8xA100", "h1": "4xH100"}
    asked = offer(hours_to_complete=1.0)
    alone = {name: decided(asked, on=machines(n1=text), plan_by="all") for name, text in fleets.items()}
    assert alone["a1"].plan.share < alone["h1"].plan.share
    together = decided(asked, on=machines(**fleets), plan_by="all")
    assert nodes_for(together) == ("h1",)
    assert together.plan == alone["h1"].plan


def test_the_least_hardware_that_trains_as_much_is_taken_and_large_nodes_stay_whole() -> None:
    small = offer(model="Qwen/Qwen2.5-0.5B", model_params_count=494_000_000, hours_to_complete=6.0)
    assert nodes_for(decided(small, on=machines(n1="4xH100", a1="4xA100"), plan_by="all")) == ("a1",)
    assert nodes_for(decided(large(), on=machines(n1="8xH100", n2="4xH100"), plan_by="all")) == ("n2",)


def test_a_busy_class_is_passed_over_for_one_that_is_free_now() -> None:
    on = machines(held("n1", 8, 20.0), n1="8xH100", n2="4xH100")
    assert nodes_for(decided(on=on)) == ("n2",)
    both = machines(held("n1", 8, 20.0), held("n2", 4, 20.0), n1="8xH100", n2="4xH100")
    refused = decided(on=both)
    assert {reason.rule for reason in refused.failed} >= {"gpus"}


def test_only_nodes_whose_backend_can_train_the_task_count() -> None:
    on = machines(here="4xH100", n1="8xH100")
    slurm_lacks = FleetSnapshot(
        on.inventory,
        (),
        NOON,
        {"docker": BackendAbility(), "slurm": BackendAbility(missing={Engine.AXOLOTL: "not built"})},
    )
    assert nodes_for(decided(on=slurm_lacks)) == ("",)
    away = {"docker": BackendAbility(problem="Docker does not run"), "slurm": BackendAbility()}
    assert nodes_for(decided(on=FleetSnapshot(on.inventory, (), NOON, away))) == ("n1",)
    unsafe = {"docker": BackendAbility(), "slurm": BackendAbility(no_sandbox="none on nodes")}
    grpo = offer(task_type=TaskType.GRPO, hours_to_complete=6.0)
    assert nodes_for(decided(grpo, on=FleetSnapshot(on.inventory, (), NOON, unsafe))) == ("",)
    safe_but_lacking = {
        "docker": BackendAbility(missing=dict.fromkeys(Engine, "not built")),
        "slurm": BackendAbility(no_sandbox="none on nodes"),
    }
    refused = decided(grpo, on=FleetSnapshot(on.inventory, (), NOON, safe_but_lacking))
    assert "none on nodes" in verdict(refused, "sandbox").text
    gone = {name: BackendAbility(problem=f"{name} is gone") for name in ("docker", "slurm")}
    refused = decided(on=FleetSnapshot(on.inventory, (), NOON, gone))
    assert verdict(refused, "backend").text == "nothing can be trained: docker is gone; slurm is gone"


def test_nothing_is_accepted_for_nodes_whose_backend_cannot_train_it_although_another_could() -> None:
    # All that is usable is the cluster's, and what this machine's backend can do does not help there.
    on = machines(n1="8xH100").inventory
    gone = {"docker": BackendAbility(), "slurm": BackendAbility(problem="TRAINER_PYTHON is gone")}
    refused = decided(on=FleetSnapshot(on, (), NOON, gone))
    assert not refused.accepted
    assert "no GPU is usable where a backend" in verdict(refused, "plan").text
    unsafe = {"docker": BackendAbility(), "slurm": BackendAbility(no_sandbox="none on nodes")}
    grpo = offer(task_type=TaskType.GRPO, hours_to_complete=6.0)
    assert not decided(grpo, on=FleetSnapshot(on, (), NOON, unsafe)).accepted
    assert decided(on=FleetSnapshot(on, (), NOON, unsafe)).accepted


def test_what_is_unusable_of_a_cluster_is_counted_not_listed() -> None:
    on = machines(here="2xH100", n1="4xH100").inventory
    first, second, *nodes = on.gpus
    limited = (replace(gpu, unusable_reason="taken out: SLURM_MAX_GPUS=0") for gpu in nodes)
    gpus = (first, replace(second, unusable_reason="broken"), *limited)
    shown = verdict(decided(on=FleetSnapshot(replace(on, gpus=gpus), (), NOON)), "inventory").text
    assert shown == "1 GPUs are usable; not 1 (broken), 4 of nodes"


def test_one_machine_is_decided_about_as_if_it_were_a_node() -> None:
    for asked in (offer(), large(), offer(task_type=TaskType.DPO)):
        here, node = decided(asked, on=fleet("4xH100")), decided(asked, on=machines(n1="4xH100"))
        assert (here.accepted, here.plan, here.score) == (node.accepted, node.plan, node.score)


def test_nodes_that_differ_by_a_little_memory_are_one_class() -> None:
    on = machines(n1="8xH100", n2="8xH100", n3="4xH100")
    first, *others = on.nodes
    more = first.installed.model_copy(update={"memory_bytes": first.installed.memory_bytes + 10**6})
    nodes = (FleetNode("n1", "slurm", more, more), *others)
    classes = InventoryState(on.gpus, nodes).classes
    assert [sorted(one.names) for one in classes] == [["n1", "n2"], ["n3"]]
    assert classes[0].hardware.memory_bytes == others[0].installed.memory_bytes


def test_a_profile_for_two_nodes_gets_two_whole_ones_at_one_moment(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("targets: {gpu_strategy: all, nodes: 2}\n")
    asked, two = offer(hours_to_complete=1.0), load_profile(str(file))

    def decide_on(on: FleetSnapshot) -> Decision:
        return decide(asked, NOON, on, SuccessHistory(), policy(fitting__max_wait="1h"), two)

    free = decide_on(machines(n1="4xA100", n2="4xA100", n3="4xA100"))
    assert nodes_for(free) == ("n1", "n2")
    assert free.plan.gpus == 8
    part = decide_on(machines(held("n2", 1, 9.0), n1="4xA100", n2="4xA100", n3="4xA100"))
    assert nodes_for(part) == ("n1", "n3")
    alone = decide_on(machines(held("n2", 1, 9.0), n1="4xA100", n2="4xA100"))
    assert len(nodes_for(alone)) == 1
