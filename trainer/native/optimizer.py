"""Optimizers by the plan's names, fp32 copies of weights trained in bf16, and one optimizer step over all
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from core.domain.choices import Optimizer as Name
from core.domain.choices import Parallelism
from core.planning.plan import TrainingPlan
from trainer.errors import TrainingError
from trainer.native import distributed
from trainer.native.batches import TokenBatch
from trainer.native.distributed import NativeCommunicator
from trainer.native.model import LossModel
from trainer.session.control import release_memory
from trainer.session.ema import own_part
from trainer.session.failures import is_oom

#: Muon orthogonalises matrices; these are tables.
_NOT_MUON = ("embed", "lm_head", "wte", "wpe")


class NoOptimizer(TrainingError):
    """An optimizer that this environment or trainer does not have."""

    code = "no_optimizer"


class MasterWeights:
    """An optimizer over fp32 copies of bf16 weights, where an update of a thousandth would be lost.

    Behaves like the optimizer that it holds; gradients are converted and freed at each step, weights written
    back after it. Nothing is copied where the weights are fp32 already.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], make: Callable[[Any], Optimizer]) -> None:
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []
        trained = []
        for name, weight in named:
            copy: Tensor = weight
            if weight.dtype in (torch.bfloat16, torch.float16):
                copy = nn.Parameter(weight.detach().float())
                self._weights.append(weight)
                self._copies.append(copy)
            trained.append((name, copy))
        self.optimizer = make(trained)

    @torch.no_grad()
    def step(self) -> None:
        for weight, copy in zip(self._weights, self._copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.to(copy.dtype)
            weight.grad = None
        self.optimizer.step()
        if self._weights:
            torch._foreach_copy_(self._weights, self._copies)
        for copy in self._copies:
            copy.grad = None

    @torch.no_grad()
    def reread(self) -> None:
        """After the weights were changed from outside: the copies are theirs again."""
        if self._weights:
            torch._foreach_copy_(self._copies, self._weights)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for weight in self._weights:
            weight.grad = None

    @property
    def parts(self) -> list[Optimizer]:
        """The optimizers that hold state."""
        return self.optimizer.parts if isinstance(self.optimizer, MuonAndAdam) else [self.optimizer]

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            own = rate * group.get("rate_factor", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own)  # torchao's are compiled around it
            else:
                group["lr"] = own

    def state(self) -> dict[str, Any]:
        """This rank's part, as plain tensors: moments in the order of the weights, and the copies."""
        moments = [
            {key: own_part(value) for key, value in part.state[weight].items()}
            for part, weight in self._weights_by_part()
        ]
        return {"moments": moments, "copies": list(map(own_part, self._copies))}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` returned, on the same number of ranks."""
        for (part, weight), saved in zip(self._weights_by_part(), state["moments"], strict=True):
            part.state[weight] = {key: _like(value, weight) for key, value in saved.items()}
        for copy, saved in zip(self._copies, state["copies"], strict=True):
            own_part(copy).copy_(saved)

    def _weights_by_part(self) -> list[tuple[Optimizer, Tensor]]:
        return [
            (part, weight) for part in self.parts for group in part.param_groups for weight in group["params"]
        ]


def _like(value: Any, weight: Tensor) -> Any:
    """A moment beside its weight: sharded where that is, on its device. Step counts stay what they are."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    on_device = value.to(weight.device)
    if isinstance(weight, DTensor) and on_device.shape == weight.to_local().shape:
        return DTensor.from_local(
            on_device, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
    return on_device


def build_optimizer(model: nn.Module, plan: TrainingPlan, device: torch.device) -> MasterWeights:
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not named:
        raise ValueError("nothing of the model is trained")
    return MasterWeights(named, lambda trained: _make_optimizer(list(trained), plan, device))


def _make_optimizer(
    named: list[tuple[str, nn.Parameter]], plan: TrainingPlan, device: torch.device
) -> Optimizer:
    planned = plan.optimizer
    rate, betas = planned.learning_rate, (planned.beta1, planned.beta2)
    groups = list(_groups(named, plan))
    common: dict[str, Any] = {"lr": rate, "betas": betas, "eps": planned.epsilon}
    match planned.name:
        case Name.ADAMW_TORCH | Name.ADAMW_TORCH_FUSED:
            return torch.optim.AdamW(groups, **common, fused=device.type in ("cuda", "cpu"))
        case Name.ADAMW_TORCH_8BIT:
            from torchao.optim import AdamW8bit

            return AdamW8bit(groups, **common)  # type: ignore[no-any-return]
        case Name.ADAMW_BNB_8BIT | Name.PAGED_ADAMW_8BIT | Name.PAGED_ADAMW_32BIT:
            import bitsandbytes as bnb

            kinds = {
                Name.ADAMW_BNB_8BIT: bnb.optim.AdamW8bit,
                Name.PAGED_ADAMW_8BIT: bnb.optim.PagedAdamW8bit,
                Name.PAGED_ADAMW_32BIT: bnb.optim.PagedAdamW32bit,
            }
            return kinds[planned.name](groups, **common)  # type: ignore[no-any-return]
        case Name.LION_8BIT:
            import bitsandbytes as bnb

            return bnb.optim.Lion8bit(groups, lr=rate, betas=betas)  # type: ignore[no-any-return]
        case Name.ADAFACTOR:
            return torch.optim.Adafactor(groups, lr=rate)
        case Name.MUON:
            return MuonAndAdam(named, plan)
    raise NoOptimizer(f"the native trainer has no optimizer {planned.name}; adamw_torch_fused is its default")


def _groups(named: list[tuple[str, nn.Parameter]], plan: TrainingPlan) -> Iterable[dict[str, Any]]:
    """Norms and biases are not decayed; LoRA's B may learn faster than its A (LoRA+)."""
    ratio = (plan.adapter.loraplus_lr_ratio if plan.adapter else None) or 1.0
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, weight in named:
        kinds.setdefault((weight.ndim >= 2, ratio != 1.0 and "lora_B" in name), []).append(weight)
    for (decays, faster), weights in kinds.items():
        factor = ratio if faster else 1.0
        yield {
            "params": weights,
            "weight_decay": plan.optimizer.weight_decay if decays else 0.0,
            "lr": plan.optimizer.learning_rate * factor,
            "rate_factor": factor,
        }


class MuonAndAdam(Optimizer):
    """Muon for the matrices, AdamW for all else, as one optimizer."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], plan: TrainingPlan) -> None:
        matrices = [
            weight
            for name, weight in named
            if weight.ndim == 2 and not any(part in name for part in _NOT_MUON)
        ]
        chosen = {id(weight) for weight in matrices}
        others = [weight for _, weight in named if id(weight) not in chosen]
        planned = plan.optimizer
        self.parts: list[Optimizer] = []
        if matrices:
            # Scaled to AdamW's step, so that one rate serves both.
            muon = torch.optim.Muon(
                matrices,
                lr=planned.learning_rate,
                weight_decay=planned.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self.parts.append(muon)
        if others:
            betas = (planned.beta1, planned.beta2)
            adam = torch.optim.AdamW(
                others, lr=planned.learning_rate, betas=betas, eps=planned.epsilon, fused=True
            )
            self.parts.append(adam)
        super().__init__([weight for _, weight in named], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


@dataclass(frozen=True)
class StepResult:
    """The numbers of one optimizer step."""

    loss: float
    norm: float
    rate: float
    #: Of all ranks.
    tokens: int


class Stepper:
    """The net distributed over the ranks, and its optimizer."""

    def __init__(self, net: LossModel, plan: TrainingPlan, ranks: NativeCommunicator) -> None:
        self.net, self.plan, self._ranks = net, plan, ranks
        # Sharding replaces the parameters, so the optimizer comes after it.
        self.distributed = distributed.distribute(net, plan, ranks)
        self.masters = build_optimizer(net, plan, ranks.device)
        self._weights = [weight for weight in net.parameters() if weight.requires_grad]

    def step(
        self,
        batches: list[TokenBatch],
        factor: float = 1.0,
        smaller: Callable[[], list[TokenBatch] | None] = lambda: None,
    ) -> StepResult:
        """With the plan's rate times `factor`. Gradients that are not finite change nothing. Where memory
        runs out before the update, the step is made again with the `smaller` batches, if there are any."""
        rate = self.plan.optimizer.learning_rate * factor
        count, learned, tokens = self._ranks.sum(
            sum(batch.count for batch in batches),
            sum(batch.learned for batch in batches),
            sum(batch.tokens for batch in batches),
        )
        shares = self.net.shares(count, learned, self._ranks.device)
        summed = self._gradients_that_fit(batches, shares, smaller)
        norm = self._clipped()
        if math.isfinite(norm):
            self.masters.set_rate(rate)
            self.masters.step()
        self.masters.zero_grad()
        (loss,) = self._ranks.sum(float(summed))
        return StepResult(loss, norm, rate, int(tokens))

    def _gradients_that_fit(
        self, batches: list[TokenBatch], shares: Tensor, smaller: Callable[[], list[TokenBatch] | None]
    ) -> Tensor:
        try:
            return self._gradients(batches, shares)
        except (RuntimeError, MemoryError) as error:
            again = smaller() if is_oom(error) else None
            if again is None:
                raise
        # Out of the handler, which keeps the failed pass and its memory.
        self.masters.zero_grad()
        release_memory()
        return self._gradients(again, shares)

    def _gradients(self, batches: list[TokenBatch], shares: Tensor) -> Tensor:
        device, world = self._ranks.device, self._ranks.world
        summed = torch.zeros((), device=device)
        # With one planned pass there is no memory for the whole gradients of a sharded model between two.
        sharded = self.plan.parallelism is Parallelism.FSDP and self.plan.batch.accumulation == 1
        for number, batch in enumerate(batches, start=1):
            with distributed.no_sync(self.distributed, last=sharded or number == len(batches)):
                loss = self.distributed(batch.to(device)) @ shares
                # DDP and FSDP take the mean over ranks of what is a sum here.
                (loss * world).backward()
                summed += loss.detach()
        return summed

    def _clipped(self) -> float:
        """The gradients' norm, before those beyond the plan's were scaled to it."""
        max_norm = self.plan.optimizer.max_grad_norm or math.inf
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norm = float(distributed.full_tensor(total))
        if norm > max_norm:
            torch.nn.utils.clip_grads_with_norm_(self._weights, max_norm, total, foreach=True)
        return norm
