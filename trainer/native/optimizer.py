"""Optimizers by the plan's names, and one optimizer step over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from core.domain.choices import Optimizer as Name
from core.domain.choices import Parallelism
from core.planning.memory.persistent import STATE_BYTES, WHOLE_MATRICES
from core.planning.plan import TrainingPlan
from trainer.errors import TrainingError
from trainer.native import distributed
from trainer.native.batches import TokenBatch
from trainer.native.distributed import NativeCommunicator
from trainer.native.master_weights import MasterWeights
from trainer.native.model import LossModel
from trainer.session.control import release_memory
from trainer.session.failures import is_oom

#: Muon orthogonalises matrices; these are tables.
_NOT_MUON = ("embed", "lm_head", "wte", "wpe")


class NoOptimizer(TrainingError):
    """An optimizer that this environment or trainer does not have."""

    code = "no_optimizer"


def build_optimizer(model: nn.Module, plan: TrainingPlan, device: torch.device) -> MasterWeights:
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not named:
        raise ValueError("nothing of the model is trained")
    planned = plan.optimizer
    wide, narrow = STATE_BYTES[planned.name]
    return MasterWeights(
        named,
        lambda trained: _make_optimizer(trained, plan, device),
        kept=plan.adapter is None and planned.fp32_master,
        narrow=narrow < wide,
        by_rows=planned.name not in WHOLE_MATRICES,
        seed=plan.seed,
    )


def _make_optimizer(
    named: list[tuple[str, nn.Parameter]], plan: TrainingPlan, device: torch.device
) -> Optimizer:
    planned = plan.optimizer
    rate, betas = planned.learning_rate, (planned.beta1, planned.beta2)
    groups = list(_groups(named, plan))
    match planned.name:
        case Name.ADAMW_TORCH | Name.ADAMW_TORCH_FUSED:
            return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=device.type in ("cuda", "cpu"))
        case Name.ADAMW_TORCH_8BIT:
            from torchao.optim import AdamW8bit

            return AdamW8bit(groups, lr=rate, betas=betas)  # type: ignore[no-any-return]
        case Name.ADAMW_BNB_8BIT | Name.PAGED_ADAMW_8BIT | Name.PAGED_ADAMW_32BIT:
            import bitsandbytes as bnb

            kinds = {
                Name.ADAMW_BNB_8BIT: bnb.optim.AdamW8bit,
                Name.PAGED_ADAMW_8BIT: bnb.optim.PagedAdamW8bit,
                Name.PAGED_ADAMW_32BIT: bnb.optim.PagedAdamW32bit,
            }
            return kinds[planned.name](groups, lr=rate, betas=betas)  # type: ignore[no-any-return]
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
            adam = torch.optim.AdamW(others, lr=planned.learning_rate, betas=betas, fused=True)
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
        # Between two passes there is no memory for whole gradients of a sharded model.
        sharded = self.plan.parallelism is Parallelism.FSDP
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
