"""Optimizers by the plan's names, and fp32 copies of what is trained in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from core.choices import Optimizer as Name
from core.plan import TrainingPlan
from trainer.errors import TrainingError

#: Muon orthogonalises matrices; these are tables.
_NOT_MUON = ("embed", "lm_head", "wte", "wpe")


class NoOptimizer(TrainingError):
    """An optimizer that this environment or trainer does not have."""

    code = "no_optimizer"


class Masters:
    """An optimizer over fp32 copies of bf16 weights, where an update of a thousandth would be lost.

    Behaves like the optimizer that it holds; gradients are taken over and let go of at each step, weights
    written back after it. Nothing is copied where the weights are fp32 already.
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

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for weight in self._weights:
            weight.grad = None

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
            {key: local(value) for key, value in part.state[weight].items()}
            for part, weight in self._weights_by_part()
        ]
        return {"moments": moments, "copies": [local(copy.detach()) for copy in self._copies]}

    @torch.no_grad()
    def take_up(self, state: dict[str, Any]) -> None:
        """What `state` gave, on the same number of ranks."""
        for (part, weight), saved in zip(self._weights_by_part(), state["moments"], strict=True):
            part.state[weight] = {key: _like(value, weight) for key, value in saved.items()}
        for copy, saved in zip(self._copies, state["copies"], strict=True):
            local(copy).copy_(saved)

    def _weights_by_part(self) -> list[tuple[Optimizer, Tensor]]:
        parts = self.optimizer.parts if isinstance(self.optimizer, MuonAndAdam) else [self.optimizer]
        return [(part, weight) for part in parts for group in part.param_groups for weight in group["params"]]


def local(value: Any) -> Any:
    """The part of a sharded tensor that lies here."""
    return value.to_local() if isinstance(value, DTensor) else value


def _like(value: Any, weight: Tensor) -> Any:
    """A moment beside its weight: sharded where that is, on its device. Step counts stay what they are."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    here = value.to(weight.device)
    if isinstance(weight, DTensor) and here.shape == weight.to_local().shape:
        return DTensor.from_local(
            here, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
    return here


def build(model: nn.Module, plan: TrainingPlan, device: torch.device) -> Masters:
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not named:
        raise ValueError("nothing of the model is trained")
    return Masters(named, lambda trained: _make(list(trained), plan, device))


def _make(named: list[tuple[str, nn.Parameter]], plan: TrainingPlan, device: torch.device) -> Optimizer:
    made = plan.optimizer
    rate, betas = made.learning_rate, (made.beta1, made.beta2)
    groups = list(_groups(named, plan))
    common: dict[str, Any] = {"lr": rate, "betas": betas, "eps": made.epsilon}
    match made.name:
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
            return kinds[made.name](groups, **common)  # type: ignore[no-any-return]
        case Name.LION_8BIT:
            import bitsandbytes as bnb

            return bnb.optim.Lion8bit(groups, lr=rate, betas=betas)  # type: ignore[no-any-return]
        case Name.ADAFACTOR:
            return torch.optim.Adafactor(groups, lr=rate)
        case Name.MUON:
            return MuonAndAdam(named, plan)
    raise NoOptimizer(f"the native trainer has no optimizer {made.name}; adamw_torch_fused is its default")


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
    """Muon for the matrices, AdamW for all else, behind one face."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], plan: TrainingPlan) -> None:
        matrices = [
            weight
            for name, weight in named
            if weight.ndim == 2 and not any(part in name for part in _NOT_MUON)
        ]
        chosen = {id(weight) for weight in matrices}
        others = [weight for _, weight in named if id(weight) not in chosen]
        made = plan.optimizer
        self.parts: list[Optimizer] = []
        if matrices:
            # Scaled to AdamW's step, so that one rate serves both.
            muon = torch.optim.Muon(
                matrices,
                lr=made.learning_rate,
                weight_decay=made.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self.parts.append(muon)
        if others:
            betas = (made.beta1, made.beta2)
            adam = torch.optim.AdamW(others, lr=made.learning_rate, betas=betas, eps=made.epsilon, fused=True)
            self.parts.append(adam)
        super().__init__([weight for _, weight in named], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
