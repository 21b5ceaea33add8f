"""Offers against a fleet of several machines: which class of nodes a task gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from core.domain.choices import Engine
from core.domain.decisions import Decision
from core.domain.hardware import Hardware, parse_gpus
from core.domain.keys import GpuReservation, ReservationKind, TaskKey, gpu_on_node, nodes_of
from core.domain.tasks import TaskType
from core.profile.resolve import load_profile
from miner.fleet.base import BackendAbility, FleetNode, FleetSnapshot, Gpu, InventoryState
from miner.offers.decide import decide
from miner.offers.history import SuccessHistory
from tests.miner.offers.builders import HOUR, NOON, decided, fleet, offer, policy, verdict


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
    assert decision.placement is not None
    return nodes_of(decision.placement.gpus)


def large(**changes: Any) -> Any:
    """What eight H100 train more of than four."""
    return offer(**{"model": "meta-llama/Llama-3.1-70B", "model_params_count": 70 * 10**9, **changes})


def test_each_class_is_planned_by_its_own_gpus_and_what_trains_most_is_taken() -> None:
    fleets = {"a1": "8xA100", "h1": "4xH100"}
    asked = offer(hours_to_complete=1.0)
    alone = {name: decided(asked, on=machines(n1=text), plan_by="all") for name, text in fleets.items()}
    assert alone["a1"].plan is not None
    assert alone["h1"].plan is not None
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
    assert free.plan is not None
    assert free.plan.gpus == 8
    part = decide_on(machines(held("n2", 1, 9.0), n1="4xA100", n2="4xA100", n3="4xA100"))
    assert nodes_for(part) == ("n1", "n3")
    alone = decide_on(machines(held("n2", 1, 9.0), n1="4xA100", n2="4xA100"))
    assert len(nodes_for(alone)) == 1
