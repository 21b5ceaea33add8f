"""Weights that are put aside: where they lie, and what lack of room does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.system import resources as memory
from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.session.test_ema import average_of, logits, trained
from tests.trainer.sharding import split, together
from trainer.session import undo
from trainer.session.ranks import Communicator, communicator
from trainer.session.undo import Snapshots

GB = 10**9


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.zeros(7, 3, dtype=dtype, requires_grad=True),
        "number": torch.zeros((), dtype=dtype, requires_grad=True),
    }


def filled(trained_weights: dict[str, torch.Tensor], value: float) -> None:
    for weight in trained_weights.values():
        weight.data.fill_(value)


@pytest.fixture(params=["memory", "files"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(undo, "free_memory", lambda: 100 * GB if name == "memory" else 0)
    monkeypatch.setattr(undo, "is_in_memory", lambda folder: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 * GB))
    return name


def test_the_weights_come_back_as_they_were_put_aside(tmp_path: Path, place: str) -> None:
    both = weights(torch.bfloat16)
    store = Snapshots(both, tmp_path, Communicator())
    filled(both, 1.0078125)
    assert store.keep()
    for _ in range(2):
        filled(both, 5.0)
        store.load()
        assert all(bool((weight == 1.0078125).all()) for weight in both.values())
    assert len(list(tmp_path.glob("*"))) == (0 if place == "memory" else 1)


def test_dropped_they_leave_no_file_and_those_of_an_earlier_process_go(tmp_path: Path, place: str) -> None:
    store = Snapshots(weights(), tmp_path, Communicator())
    assert store.keep()
    Snapshots(weights(), tmp_path, Communicator())
    assert list(tmp_path.iterdir()) == []
    assert store.keep()
    store.drop()
    assert list(tmp_path.iterdir()) == []


def test_without_room_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a state there must be room for three more and two gigabytes."""
    large = {"large": torch.zeros(GB, device="meta")}
    store = Snapshots(large, tmp_path, Communicator())
    free = {"memory": 4 * 4 * GB - 1, "disk": 4 * 4 * GB - 1}
    monkeypatch.setattr(undo, "free_memory", lambda: free["memory"])
    monkeypatch.setattr(Snapshots, "_disk_free", lambda self: free["disk"])
    assert not store.keep()
    small = Snapshots(weights(), tmp_path, Communicator())
    free |= {"memory": 2 * GB, "disk": 2 * GB}
    assert not small.keep()
    free["disk"] += 1000
    assert small.keep()


def test_a_disk_that_is_full_after_all_costs_the_state_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo, "free_memory", lambda: 0)
    monkeypatch.setattr(Snapshots, "_disk_free", lambda self: 100 * GB)
    store = Snapshots(weights(), tmp_path / "full", Communicator())  # there is no such folder
    assert not store.keep()


def test_memory_that_is_taken_after_all_costs_the_state_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo, "free_memory", lambda: 100 * GB)

    def to(self: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    store = Snapshots(weights(), tmp_path, Communicator())
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        assert not store.keep()
    assert store.keep()


def test_files_in_memory_are_no_place_for_what_memory_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(memory, "_MOUNTS", mounts)
    for system, room in (("tmpfs", False), ("ext4", True)):
        line = f"36 35 {os.major(device)}:{os.minor(device)} / {tmp_path} rw shared:7 - {system} none rw\n"
        mounts.write_text(line, encoding="utf-8")
        assert bool(Snapshots(weights(), tmp_path, Communicator())._disk_free()) is room


def two_ranks_keep_the_weights_once(rank: int) -> None:
    """Averaged weights of a sharded model, and weights that both ranks have: both come back as they were."""
    ranks, folder = communicator(torch.device("cpu")), Path.cwd()
    whole, parts = tiny.model(), split(tiny.model(), registered=False)
    parts.set_reshard_after_forward(False)
    for model in (parts, whole):
        average = average_of(model)
        store = Snapshots(
            dict(model.named_parameters()), folder, ranks, 2, drop_gathered=average._drop_gathered
        )
        trained(model, average, 2)
        with average.applied():
            seen = logits(model)
            assert store.keep()
        assert store._state is not None
        kept = sum(tensor.numel() for tensor in store._state.values())
        assert kept < 0.7 * sum(weight.numel() for weight in whole.parameters())
        trained(model, average, 2)
        assert not torch.allclose(logits(model), seen, atol=1e-4)
        store.load()
        assert torch.equal(logits(model), seen)
        everywhere = [torch.empty_like(seen) for _ in range(2)]
        torch.distributed.all_gather(everywhere, seen)
        assert torch.equal(*everywhere)


def test_two_ranks_keep_the_weights_once(forks: ForkServer, tmp_path: Path) -> None:
    assert together(forks, tmp_path, two_ranks_keep_the_weights_once)
