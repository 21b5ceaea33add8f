"""Optimizers by the plan's names, one optimizer step over all ranks, and updates of bf16 weights in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from core.domain.choices import Optimizer as Name
from core.domain.choices import Parallelism
from core.planning.memory.persistent import STATE_BYTES, UPDATE_BLOCK, WHOLE_MATRICES
from core.planning.plan import TrainingPlan
from trainer.errors import TrainingError
from trainer.native import distributed
from trainer.native.batches import TokenBatch
from trainer.native.distributed import NativeCommunicator
from trainer.native.model import LossModel
from trainer.session.control import release_memory
from trainer.session.ema import own_part, rounded
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
        seed=plan.targets.seed,
    )


def _make_optimizer(
    named: list[tuple[str, nn.Parameter]], plan: TrainingPlan, device: torch.device
) -> Optimizer:
    planned = plan.optimizer
    rate, betas = planned.learning_rate, (plan.targets.adam_beta1, plan.targets.adam_beta2)
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
    ratio = (plan.targets.loraplus_lr_ratio if plan.adapter else None) or 1.0
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
            betas = (plan.targets.adam_beta1, plan.targets.adam_beta2)
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


#: All rows: of a weight without rows, or for an optimizer that needs the whole.
_ALL = slice(None)
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WeightPart:
    """Rows of a bf16 weight, and the optimizer's fp32 copy of them, which has no memory between updates if no
    masters are kept."""

    weight: nn.Parameter
    rows: slice
    copy: nn.Parameter
    #: The last part of its weight.
    last: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a weight or its gradient. Not kept: FSDP2 moves weights."""
        return _rows(own_part(tensor), self.rows)

    def hold(self, values: Tensor) -> None:
        """Let the copy have these values, in their memory."""
        if isinstance(self.copy, DTensor):
            self.copy._local_tensor = values
        else:
            self.copy.data = values


@dataclass(frozen=True)
class UpdateBlock:
    """Parts that are updated together. Without parts the optimizer has the weights themselves, in fp32."""

    parts: list[WeightPart]
    optimizer: Optimizer

    @property
    def optimizers(self) -> list[Optimizer]:
        return getattr(self.optimizer, "parts", None) or [self.optimizer]

    def state_of(self, copy: Tensor) -> dict[str, Any]:
        return next((part.state[copy] for part in self.optimizers if copy in part.state), {})


class MasterWeights:
    """Optimizers of all weights, with updates of bf16 weights computed in fp32, a block of them at a time.
    Gradients of bf16 weights are freed as they are used.

    With masters, fp32 copies of the weights are kept. Without, those of a block and its moments are made for
    its update, and the result is rounded up or down at random, in proportion: rounding to the nearest would
    lose every update of less than half a last digit.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        make: Callable[[list[tuple[str, nn.Parameter]]], Optimizer],
        *,
        kept: bool = True,
        narrow: bool = False,
        by_rows: bool = True,
        seed: int = 0,
    ) -> None:
        """`kept`: fp32 copies stay. `narrow`: moments are bf16 between updates. `by_rows`: `make` makes an
        optimizer that needs no more than some rows of a matrix. Ranks round alike with the same `seed`."""
        self._kept, self._narrow, self._seed = kept, narrow and not kept, seed
        self._random: torch.Generator | None = None
        all_named = list(named)
        half = [(name, weight) for name, weight in all_named if weight.dtype in _HALF]
        direct = [(name, weight) for name, weight in all_named if weight.dtype not in _HALF]
        self._half = [weight for _, weight in half]
        self._blocks = [UpdateBlock([], make(direct))] if direct else []
        for block in _in_blocks(half, by_rows):
            self._blocks.append(UpdateBlock([part for _, part in block], make(_copies(block))))
            if not kept:
                for _, part in block:
                    _let_go(part)

    @torch.no_grad()
    def step(self) -> None:
        for block in self._blocks:
            parts = [part for part in block.parts if part.weight.grad is not None]
            for part in parts:
                if not self._kept:
                    self._widen(block, part)
                gradient: Any = part.weight.grad
                part.copy.grad = _beside(part.of(gradient).float(), part.copy)
                if part.last:
                    part.weight.grad = None
            block.optimizer.step()
            for part in parts:
                part.copy.grad = None
                if not self._kept:
                    self._round(block, part)
            if self._kept and parts:
                torch._foreach_copy_([part.of(part.weight) for part in parts], _values(parts))

    def _widen(self, block: UpdateBlock, part: WeightPart) -> None:
        part.hold(part.of(part.weight).float())
        state = block.state_of(part.copy)
        for key, value in state.items():
            if self._narrow and isinstance(value, Tensor) and value.dtype is torch.bfloat16:
                state[key] = _beside(own_part(value).float(), part.copy)

    def _round(self, block: UpdateBlock, part: WeightPart) -> None:
        weight = part.of(part.weight)
        if self._random is None:
            self._random = torch.Generator(weight.device).manual_seed(self._seed)
        weight.copy_(rounded(own_part(part.copy), weight.dtype, self._random))
        state = block.state_of(part.copy)
        for key, value in state.items():
            if (
                self._narrow
                and key != "step"
                and isinstance(value, Tensor)
                and value.shape == part.copy.shape
            ):
                narrow = rounded(own_part(value), torch.bfloat16, self._random)
                state[key] = _beside(narrow, part.copy)
        _let_go(part)

    @torch.no_grad()
    def restart(self) -> None:
        """Return to the state before the first step, after all steps were undone: copy the weights again."""
        self._random = None
        for block in self._blocks:
            if self._kept and block.parts:
                torch._foreach_copy_(_values(block.parts), [part.of(part.weight) for part in block.parts])

    def zero_grad(self) -> None:
        for block in self._blocks:
            block.optimizer.zero_grad(set_to_none=True)
        for weight in self._half:
            weight.grad = None

    @property
    def parts(self) -> list[Optimizer]:
        """The optimizers that hold state."""
        return [optimizer for block in self._blocks for optimizer in block.optimizers]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.parts for group in optimizer.param_groups]

    def set_rate(self, rate: float) -> None:
        for group in self.param_groups:
            own = rate * group.get("rate_factor", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own)  # torchao's are compiled around it
            else:
                group["lr"] = own

    @property
    def layout(self) -> list[str]:
        """Describe the order of a state's numbers: only a state with the same layout can be loaded."""
        kinds = [f"{type(part).__name__} × {len(part.param_groups)}" for part in self.parts]
        return [f"masters kept: {self._kept}", *kinds, *map(str, self._sizes())]

    def _sizes(self) -> Iterator[int]:
        for block in self._blocks:
            yield from (part.of(part.weight).numel() for part in block.parts)

    def state(self) -> dict[str, Any]:
        """Return this rank's part, as plain tensors: moments in the order of the weights, and the masters."""
        moments = [
            {key: own_part(value) for key, value in part.state[weight].items()}
            for part, weight in self._weights_by_part()
        ]
        masters = [own_part(part.copy) for block in self._blocks for part in block.parts if self._kept]
        rounding = None if self._random is None else self._random.get_state()
        return {"layout": self.layout, "moments": moments, "copies": masters, "rounding": rounding}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Load a result of `state`, on the same number of ranks and with the same `layout`."""
        for (part, weight), saved in zip(self._weights_by_part(), state["moments"], strict=True):
            part.state[weight] = {key: _on_device_of(weight, value) for key, value in saved.items()}
        parts = [part for block in self._blocks for part in block.parts if self._kept]
        for one, saved in zip(parts, state["copies"], strict=True):
            own_part(one.copy).copy_(saved)
        if state["rounding"] is not None:
            device = own_part(self._half[0]).device
            self._random = torch.Generator(device)
            self._random.set_state(state["rounding"].cpu())

    def _weights_by_part(self) -> list[tuple[Optimizer, Tensor]]:
        return [
            (part, weight) for part in self.parts for group in part.param_groups for weight in group["params"]
        ]


NamedParts = list[tuple[str, WeightPart]]


def _copies(block: NamedParts) -> list[tuple[str, nn.Parameter]]:
    return [(name, part.copy) for name, part in block]


def _values(parts: list[WeightPart]) -> list[Tensor]:
    return [own_part(part.copy) for part in parts]


def _in_blocks(named: list[tuple[str, nn.Parameter]], by_rows: bool) -> Iterator[NamedParts]:
    block: NamedParts = []
    size = 0
    for name, weight in named:
        own = own_part(weight)
        rows = _row_slices(own) if by_rows else [_ALL]
        for place, part in enumerate(rows, start=1):
            values = _rows(own, part).float() if by_rows else weight.detach().float()
            numbers = own_part(values).numel()
            if block and size + numbers > UPDATE_BLOCK:
                yield block
                block, size = [], 0
            block.append((name, WeightPart(weight, part, nn.Parameter(values), place == len(rows))))
            size += numbers
    if block:
        yield block


def _rows(own: Tensor, rows: slice) -> Tensor:
    return own if rows == _ALL else own[rows]


def _row_slices(own: Tensor) -> list[slice]:
    """Return slices of at most a block's numbers; none if this rank has no part of the weight."""
    if own.numel() <= UPDATE_BLOCK:
        return [_ALL] if own.numel() else []
    rows = max(UPDATE_BLOCK // own[0].numel(), 1)
    return [slice(start, start + rows) for start in range(0, len(own), rows)]


def _let_go(part: WeightPart) -> None:
    part.hold(own_part(part.copy).new_empty(0))


def _beside(values: Tensor, copy: Tensor) -> Tensor:
    """Make a tensor like the copy of this rank's values: sharded if the copy is."""
    if not isinstance(copy, DTensor):
        return values
    sharded = DTensor.from_local(
        values, copy.device_mesh, copy.placements, run_check=False, shape=copy.shape, stride=copy.stride()
    )
    sharded._local_tensor = values  # may be on the host, with FSDP2's offloading
    return sharded


def _on_device_of(weight: Tensor, value: Any) -> Any:
    """Return a loaded moment, sharded if its weight is. Step counts are unchanged."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    on_device = value.to(own_part(weight).device)
    same = isinstance(weight, DTensor) and on_device.ndim == weight.ndim
    return _beside(on_device, weight) if same else on_device
