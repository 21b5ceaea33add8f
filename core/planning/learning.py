"""The optimizer's part of a plan: rate, schedule, warmup, stages, averages."""

from __future__ import annotations

import math
from collections.abc import Iterator

from core.budget import Concession
from core.choices import Method, Schedule
from core.plan_parts import EmaPlan, LrSearchPlan, LrStage, OptimizerPlan, PlateauPlan
from core.planning.fit import Timed
from core.planning.setup import Setup
from core.planning.wishes import Wish, lr_search
from core.tasks import TaskType

#: Warming up longer than this part of the run leaves too little of it at the peak.
MOST_WARMUP = 0.25
#: LoRA's alpha for text, where the profile has none: published rates are tuned to it.
TEXT_ALPHA = 32.0


def alpha_of(wish: Wish, rank: int) -> float:
    asked = wish.targets.lora_alpha
    if asked is not None:
        return asked
    return float(rank) if wish.model.is_image else TEXT_ALPHA


def learning_rate(wish: Wish, timed: Timed) -> tuple[float, list[str]]:
    """The profile's rate and every factor on it."""
    targets, rate, why = wish.targets, wish.targets.learning_rate, []
    below = [count for count in targets.lr_gpu_scale if count <= timed.setup.world]
    if below and (factor := targets.lr_gpu_scale[max(below)]) != 1:
        rate *= factor
        why.append(f"× {factor:g} for {timed.setup.world} GPUs")
    if wish.asked_batch is not None:
        batch = timed.setup.micro * timed.setup.accumulation * timed.setup.world
        rate *= math.sqrt(min(batch / wish.asked_batch, 1.0))
        why.append(f"× √({batch}/{wish.asked_batch}) for smaller steps")
    stands_in = timed.wished.method is Method.FULL and timed.setup.method is not Method.FULL
    if stands_in and targets.lora_lr_factor != 1:
        rate *= targets.lora_lr_factor
        why.append(f"× {targets.lora_lr_factor:g} as LoRA stands in for a full fine-tune")
    return float(f"{rate:.6g}"), why


def guarded_rate(wish: Wish, timed: Timed) -> tuple[float, str, Concession | None]:
    """With Adam alpha × rate sets how fast a LoRA moves, whatever the rank."""
    rate, factors = learning_rate(wish, timed)
    why = " ".join(["as asked", *factors]) if factors else "as asked"
    most = wish.limits.max_alpha_lr
    if most is None or timed.setup.method is Method.FULL or wish.model.is_image:
        return rate, why, None
    alpha = alpha_of(wish, timed.setup.rank)
    if alpha * rate <= most * (1 + 1e-9):
        return rate, why, None
    lowered = float(f"{most / alpha:.6g}")
    reason = f"alpha {alpha:g} × {rate:g} is {alpha * rate:.3g}, above limits.max_alpha_lr {most:g}"
    return (
        lowered,
        "limits.max_alpha_lr",
        Concession(field="learning_rate", wanted=rate, got=lowered, reason=reason),
    )


def warmup(wish: Wish, total: int) -> tuple[int, Concession | None]:
    """Steps up to the peak, at most a quarter of the run."""
    targets, most = wish.targets, int(total * MOST_WARMUP)
    if targets.warmup_steps is None:
        return min(round(targets.warmup_ratio * total), most), None
    if targets.warmup_steps <= most or total < 1:
        return targets.warmup_steps, None
    reason = f"a quarter of the {total:,} steps"
    return most, Concession(field="warmup_steps", wanted=targets.warmup_steps, got=most, reason=reason)


def cycles(wish: Wish, timed: Timed) -> int:
    """As many restarts as epochs, within the profile's range."""
    if wish.targets.lr_scheduler is not Schedule.COSINE_WITH_RESTARTS:
        return 1
    asked = wish.targets.lr_cycles
    return min(max(round(timed.schedule.epochs), asked.low), asked.high)


def optimizer_plan(wish: Wish, timed: Timed, rate: float, warmup_steps: int) -> OptimizerPlan:
    targets, setup = wish.targets, timed.setup
    picture = setup.picture
    return OptimizerPlan(
        name=setup.optimizer,
        learning_rate=rate,
        schedule=targets.lr_scheduler,
        cycles=cycles(wish, timed),
        min_lr_ratio=targets.min_lr_ratio,
        cooldown_share=targets.cooldown_share if targets.lr_scheduler is Schedule.WSD else 0.0,
        warmup_steps=warmup_steps,
        weight_decay=targets.weight_decay,
        max_grad_norm=targets.max_grad_norm,
        beta1=targets.adam_beta1,
        beta2=targets.adam_beta2,
        epsilon=targets.adam_epsilon,
        stages=tuple(LrStage(share=one.share, factor=one.factor) for one in targets.lr_stages),
        text_encoder_lr=targets.text_encoder_lr if picture and picture.text_adapter else None,
        fp32_master=setup.fp32_master,
    )


def ema_plan(wish: Wish, setup: Setup) -> EmaPlan | None:
    if wish.targets.ema_decay is None or not setup.averages:
        return None
    return EmaPlan(decay=wish.targets.ema_decay, every=wish.targets.ema_every)


def plateau_plan(wish: Wish) -> PlateauPlan | None:
    targets = wish.targets
    if targets.plateau_factor is None or wish.task.task_type is TaskType.IMAGE:
        return None
    return PlateauPlan(
        factor=targets.plateau_factor, growth=targets.plateau_growth, patience=targets.plateau_patience
    )


def search_plan(wish: Wish, timed: Timed, rate: float) -> LrSearchPlan | None:
    """No rate above the profile's limit is tried either."""
    found, most = lr_search(wish), wish.limits.max_alpha_lr
    if found is None or most is None or timed.setup.method is Method.FULL:
        return found
    return found.model_copy(update={"highest": most / (alpha_of(wish, timed.setup.rank) * rate)})


def learning_concessions(wish: Wish, timed: Timed) -> Iterator[Concession]:
    """What of the rate and the warmup could not be kept."""
    for found in (guarded_rate(wish, timed)[2], warmup(wish, timed.schedule.total)[1]):
        if found is not None:
            yield found
