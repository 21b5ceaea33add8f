"""bf16 weights learn as fp32 ones do, and take the memory that is planned for them."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from core.domain.choices import LrSchedule, Optimizer, Parallelism
from core.models.identify import facts_from_config
from core.planning.candidate import RunCandidate
from core.planning.memory import persistent
from core.planning.memory.peak import moments
from core.planning.plan import AdapterPlan, EmaPlan, FsdpPlan, OptimizerPlan, PrecisionPlan, TrainingPlan
from core.profile.targets import Targets
from tests.trainer.forks import ForkServer
from tests.trainer.native import tiny
from tests.trainer.native.allocated import bytes_allocated
from tests.trainer.sharding import together
from trainer.native import checkpoints
from trainer.native import optimizer as optimizer_module
from trainer.native.checkpoints import BadCheckpoint
from trainer.native.distributed import NativeCommunicator
from trainer.native.loader import BatchLoader
from trainer.native.optimizer import MasterWeights
from trainer.native.train import Trainer, resume, save
from trainer.session.ema import own_part, rounded

pytestmark = pytest.mark.small


BF16 = PrecisionPlan(bf16=True, tf32=False)
#: Large enough that norms and step counts are next to nothing of it.
SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 512}


def with_optimizer(name: Optimizer, *, rate: float = 1e-2, master: bool) -> OptimizerPlan:
    return OptimizerPlan(name=name, learning_rate=rate, schedule=LrSchedule.CONSTANT, fp32_master=master)


def steps(trainer: Trainer, count: int) -> list[float]:
    loader = BatchLoader(trainer.setup.train, trainer.setup.order, rank=trainer.ranks.rank)
    try:
        return [trainer.stepper.step(batches).loss for batches in islice(loader, count)]
    finally:
        loader.close()


# — memory

PLANS: dict[str, dict[str, Any]] = {
    f"full {name.value} {'with' if master else 'without'} masters": {
        "full": True,
        "optimizer": with_optimizer(name, rate=1e-3, master=master),
    }
    for name in (Optimizer.ADAMW_TORCH_FUSED, Optimizer.ADAMW_TORCH, Optimizer.MUON, Optimizer.ADAFACTOR)
    for master in (True, False)
}
PLANS["full averaged"] = PLANS["full adamw_torch_fused without masters"] | {"ema": EmaPlan(decay=0.5)}
PLANS["LoRA"] = {"adapter": AdapterPlan(rank=16, alpha=8, dropout=0.0, params=1)}


def planned(name: str, world: int) -> TrainingPlan:
    facts = facts_from_config(json.loads(Path("model/config.json").read_text()), "tiny")
    split = {"parallelism": Parallelism.FSDP, "fsdp": FsdpPlan()} if world > 1 else {}
    whole: dict[str, Any] = {"model": facts, "precision": BF16, "world": world, **split, **PLANS[name]}
    return tiny.plan(**whole)


def held_bytes(trainer: Trainer) -> int:
    """Weights, masters, moments and the average; not the steps that each moment counts."""

    def size(value: Any) -> int:
        if isinstance(value, dict):
            return sum(map(size, value.values()))
        if isinstance(value, list):
            return sum(map(size, value))
        return value.nbytes if isinstance(value, torch.Tensor) and value.ndim else 0

    weights = sum(own_part(weight).nbytes for weight in trainer.setup.net.parameters())
    state = trainer.stepper.masters.state()
    average = {} if trainer.host.average is None else trainer.host.average.state()
    return weights + size([state["moments"], state["copies"], average])


def planned_bytes(candidate: RunCandidate) -> float:
    held = next(moments(candidate)).held.parts
    return sum(size for part, size in held.items() if part is not persistent.cuda)


def weigh_all(rank: int, world: int = 2) -> None:
    """Write every plan's bytes after two steps."""
    weighed = {}
    for name in PLANS:
        if world > 1 and "adafactor" in name:
            continue  # not planned there, see SHARDABLE
        plan, ranks = planned(name, world), NativeCommunicator(rank, world, tiny.CPU)
        trainer = tiny.training(Path(), plan, ranks, name=f"{name}-{world}")
        steps(trainer, 2)
        weighed[name] = held_bytes(trainer), planned_bytes(plan.candidate)
    Path(f"weighed-{world}-{rank}").write_text(json.dumps(weighed))


def compare_bytes(weighed: dict[str, list[float]]) -> None:
    assert len(weighed) >= len(PLANS) - 2
    for name, (held, by_plan) in weighed.items():
        # Adafactor's rows and columns are less than the half byte that is planned for them.
        least = 0.8 if "adafactor" in name else 0.98
        assert least * by_plan < held < 1.02 * by_plan, name


def test_what_is_held_is_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.model_folder(tmp_path / "model", **SHAPE)
    weigh_all(0, world=1)
    compare_bytes(json.loads((tmp_path / "weighed-1-0").read_text()))


def test_what_is_held_of_a_split_model_is_what_is_planned(forks: ForkServer, tmp_path: Path) -> None:
    tiny.model_folder(tmp_path / "model", **SHAPE)
    assert together(forks, tmp_path, weigh_all)
    for rank in (0, 1):
        compare_bytes(json.loads((tmp_path / f"weighed-2-{rank}").read_text()))


@pytest.mark.parametrize("master", [True, False])
def test_an_update_takes_no_more_than_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: bool
) -> None:
    block = 8192
    for module in (optimizer_module, persistent):
        monkeypatch.setattr(module, "UPDATE_BLOCK", block)
    monkeypatch.chdir(tmp_path)
    tiny.model_folder(tmp_path / "model", **SHAPE)
    name = f"full adamw_torch_fused {'with' if master else 'without'} masters"
    plan = planned(name, world=1)
    trainer = tiny.training(tmp_path, plan)

    def one_step_and_gradients() -> None:
        """Moments are there after the first."""
        for _ in range(2):
            trainer.stepper.masters.step()
            for weight in trainer.setup.net.parameters():
                weight.grad = torch.ones_like(weight)

    most = bytes_allocated(trainer.stepper.masters.step, one_step_and_gradients)
    work = persistent.optimizer_temporaries(plan.candidate)
    assert work == block * (4 if master else 24)
    assert most < 1.1 * work


# — learning


def weights_after(folder: Path, count: int, **changes: Any) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    trainer = tiny.training(
        folder, tiny.plan(**{"full": True, **changes}), name=str(len(list(folder.iterdir())))
    )
    losses = steps(trainer, count)
    return losses, [weight.detach().clone() for weight in trainer.setup.net.parameters()]


class PlainBf16(MasterWeights):
    """The training without masters and without random rounding."""

    def __init__(self, named: Any, make: Any, **_: Any) -> None:
        self._plain = make(list(named))
        super().__init__([], make)

    def step(self) -> None:
        self._plain.step()

    def zero_grad(self) -> None:
        self._plain.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(self._plain.param_groups)


@pytest.mark.thorough_rows("muon")
@pytest.mark.parametrize("name", [Optimizer.ADAMW_TORCH_FUSED, Optimizer.MUON])
def test_small_steps_rounded_at_random_learn_as_much_as_with_masters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Optimizer
) -> None:
    """The rate is so low that most updates are below half a last digit."""

    def last(master: bool) -> float:
        optimizer = with_optimizer(name, rate=1e-4, master=master)
        losses, _ = weights_after(tmp_path, 150, precision=BF16, optimizer=optimizer)
        assert losses[0] > losses[-1]
        return sum(losses[-12:]) / 12

    with_masters, without = last(True), last(False)
    monkeypatch.setattr("trainer.native.optimizer.MasterWeights", PlainBf16)
    plain = last(False)
    assert without == pytest.approx(with_masters, rel=0.01)
    assert plain > without + 3 * abs(without - with_masters)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
def test_what_is_no_number_or_has_no_end_is_rounded_to_itself(bits: int) -> None:
    """All bits are set in CUDA's NaN."""
    no_number = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
    assert rounded(no_number, torch.bfloat16).isnan().all()
    endless = torch.tensor([torch.inf, -torch.inf, 0.0, 1.0])
    assert torch.equal(rounded(endless, torch.bfloat16).float(), endless)


def test_a_weight_of_one_number_learns_and_counts_its_steps() -> None:
    scale = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    masters = MasterWeights(
        [("scale", scale)],
        lambda named: torch.optim.AdamW([weight for _, weight in named], lr=1e-3),
        kept=False,
        narrow=True,
    )
    for _ in range(300):
        scale.grad = torch.ones_like(scale)
        masters.step()
    assert float(scale) == pytest.approx(0.7, abs=0.03)
    (moments,) = masters.state()["moments"]
    assert float(moments["step"]) == 300


def in_place(**changes: Any) -> dict[str, Any]:
    optimizer = with_optimizer(Optimizer.ADAMW_TORCH_FUSED, master=False)
    return {"full": True, "precision": BF16, "optimizer": optimizer, **changes}


def test_the_same_seed_rounds_alike_and_another_does_not(tmp_path: Path) -> None:
    (one, weights), (again, others) = (weights_after(tmp_path, 6, **in_place()) for _ in range(2))
    assert one == again
    assert all(map(torch.equal, weights, others))
    other, _ = weights_after(tmp_path, 6, **in_place(targets=Targets(seed=8)))
    assert other != one


def test_a_run_without_masters_resumes_to_the_last_bit_and_not_from_one_with_masters(tmp_path: Path) -> None:
    whole = tiny.training(tmp_path, tiny.plan(**in_place()), name="whole")
    steps(whole, 4)
    save(whole)
    whole.saver.wait()
    state = checkpoints.newest_checkpoint(tmp_path / "whole" / "states")
    assert state is not None
    again = tiny.training(tmp_path, tiny.plan(**in_place()), name="again")
    assert resume(again, state) == state
    assert steps(again, 4) == steps(whole, 4)
    masters = with_optimizer(Optimizer.ADAMW_TORCH_FUSED, master=True)
    other = tiny.training(tmp_path, tiny.plan(**in_place(optimizer=masters)), name="other")
    before = [weight.detach().clone() for weight in other.setup.net.parameters()]
    with pytest.raises(BadCheckpoint, match="other master weights"):
        checkpoints.load_checkpoint(state, other.stepper, tiny.ALONE, "tiny")
    assert all(map(torch.equal, before, other.setup.net.parameters()))


def round_on_each(rank: int) -> None:
    """Each its own rows, and random numbers of its own in between."""
    ranks = NativeCommunicator(rank, 2, tiny.CPU)
    trainer = tiny.training(Path(), tiny.plan(**in_place(world=2)), ranks)
    for _ in range(3):
        steps(trainer, 1)
        torch.rand(5 + rank)
    for weight in trainer.setup.net.parameters():
        first = weight.detach().clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(first, weight)


def test_ranks_that_have_the_whole_model_round_it_alike(forks: ForkServer, tmp_path: Path) -> None:
    tiny.model_folder(tmp_path / "model")
    assert together(forks, tmp_path, round_on_each)


@pytest.mark.parametrize("name", [Optimizer.ADAMW_TORCH_FUSED, Optimizer.ADAFACTOR, Optimizer.MUON])
def test_with_masters_blocks_of_any_size_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Optimizer
) -> None:
    changes = {"precision": BF16, "optimizer": with_optimizer(name, master=True)}
    _, at_once = weights_after(tmp_path, 4, **changes)
    monkeypatch.setattr(optimizer_module, "UPDATE_BLOCK", 100)
    _, by_blocks = weights_after(tmp_path, 4, **changes)
    assert all(map(torch.equal, at_once, by_blocks))
