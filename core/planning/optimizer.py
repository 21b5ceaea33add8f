"""The optimizer's part of a plan: learning rate, schedule, warmup, stages, averages."""

from __future__ import annotations

import math
from collections.abc import Iterator

from core.domain.choices import LrSchedule, Method
from core.planning.budget import Concession, conceded
from core.planning.candidate import RunCandidate
from core.planning.plan import EmaPlan, LrSearchPlan, LrStage, OptimizerPlan, PlateauPlan
from core.planning.search.requirements import Requirements, asked_method, lr_search
from core.planning.search.timed_candidate import TimedCandidate

#: A warmup longer than this part of the run leaves too little of it at the peak.
MOST_WARMUP = 0.25
#: The winner's rate: this times the median RMS of the matrices, at a billion parameters, and its bounds.
RATE_PER_RMS, LEAST_RATE, MOST_RATE = 0.003, 1e-6, 1e-3
#: The search begins at most this far above the planned rate, and nearer than this at it.
HIGHEST_FIRST, SAME_RATE = 3.0, 1.2
#: LoRA's alpha for text, where the profile has none: published rates are tuned for it.
TEXT_ALPHA = 32.0


def lora_alpha(needs: Requirements, rank: int) -> float:
    asked = needs.targets.lora_alpha
    if asked is not None:
        return asked
    return float(rank) if needs.model.is_image else TEXT_ALPHA


def learning_rate(needs: Requirements, timed: TimedCandidate) -> tuple[float, list[str]]:
    """The profile's rate times its factors, and a text for each factor."""
    targets, rate, why = needs.targets, needs.targets.learning_rate, []
    below = [count for count in targets.lr_gpu_scale if count <= timed.candidate.world]
    if below and (factor := targets.lr_gpu_scale[max(below)]) != 1:
        rate *= factor
        why.append(f"× {factor:g} for {timed.candidate.world} GPUs")
    if needs.asked_batch is not None:
        batch = timed.candidate.effective
        rate *= math.sqrt(min(batch / needs.asked_batch, 1.0))
        why.append(f"× √({batch}/{needs.asked_batch}) for smaller steps")
    full = asked_method(needs.model, targets) is Method.FULL
    replaces_full = full and timed.candidate.method is not Method.FULL
    if replaces_full and targets.lora_lr_factor != 1:
        rate *= targets.lora_lr_factor
        why.append(f"× {targets.lora_lr_factor:g} as LoRA stands in for a full fine-tune")
    return float(f"{rate:.6g}"), why


def guarded_rate(needs: Requirements, timed: TimedCandidate) -> tuple[float, str, Concession | None]:
    """The rate, limited by `max_alpha_lr`: with Adam alpha × rate is how fast a LoRA moves, at any rank."""
    rate, factors = learning_rate(needs, timed)
    why = " ".join(["as asked", *factors]) if factors else "as asked"
    if (highest := needs.conditions.workarounds.learning_rate) is not None and highest < rate:
        rate, why = highest, "a higher one became NaN"
    most = needs.limits.max_alpha_lr
    if most is None or timed.candidate.method is Method.FULL or needs.model.is_image:
        return rate, why, None
    alpha = lora_alpha(needs, timed.candidate.rank)
    if alpha * rate <= most * (1 + 1e-9):
        return rate, why, None
    lowered = float(f"{most / alpha:.6g}")
    reason = f"alpha {alpha:g} × {rate:g} is {alpha * rate:.3g}, above limits.max_alpha_lr {most:g}"
    return lowered, "limits.max_alpha_lr", conceded("learning_rate", rate, lowered, reason)


def warmup(needs: Requirements, total: int) -> tuple[int, Concession | None]:
    """Warmup steps, at most a quarter of the run."""
    targets, most = needs.targets, int(total * MOST_WARMUP)
    if targets.warmup_steps is None:
        return min(round(targets.warmup_ratio * total), most), None
    if targets.warmup_steps <= most or total < 1:
        return targets.warmup_steps, None
    reason = f"a quarter of the {total:,} steps"
    return most, conceded("warmup_steps", targets.warmup_steps, most, reason)


def cycles(needs: Requirements, timed: TimedCandidate) -> int:
    """Return as many restarts as epochs, within the profile's range."""
    if needs.targets.lr_scheduler is not LrSchedule.COSINE_WITH_RESTARTS:
        return 1
    asked = needs.targets.lr_cycles
    return min(max(round(timed.schedule.epochs), asked.low), asked.high)


def optimizer_plan(
    needs: Requirements, timed: TimedCandidate, rate: float, warmup_steps: int
) -> OptimizerPlan:
    targets, candidate = needs.targets, timed.candidate
    image = candidate.image
    return OptimizerPlan(
        name=candidate.optimizer,
        learning_rate=rate,
        schedule=targets.lr_scheduler,
        cycles=cycles(needs, timed),
        min_lr_ratio=targets.min_lr_ratio,
        cooldown_share=targets.cooldown_share if targets.lr_scheduler is LrSchedule.WSD else 0.0,
        warmup_steps=warmup_steps,
        weight_decay=targets.weight_decay,
        max_grad_norm=targets.max_grad_norm,
        stages=tuple(LrStage(share=stage.share, factor=stage.factor) for stage in targets.lr_stages),
        text_encoder_lr=targets.text_encoder_lr if image and image.text_adapter else None,
        fp32_master=candidate.fp32_master,
    )


def ema_plan(needs: Requirements, candidate: RunCandidate) -> EmaPlan | None:
    if needs.targets.ema_decay is None or not candidate.keeps_average:
        return None
    return EmaPlan(decay=needs.targets.ema_decay, every=needs.targets.ema_every)


def plateau_plan(needs: Requirements) -> PlateauPlan | None:
    targets = needs.targets
    if targets.plateau_factor is None or not needs.task.task_type.is_text:
        return None
    return PlateauPlan(
        factor=targets.plateau_factor, growth=targets.plateau_growth, patience=targets.plateau_patience
    )


def search_plan(needs: Requirements, timed: TimedCandidate, rate: float) -> LrSearchPlan | None:
    """The search for a rate, which keeps to the profile's limit too."""
    search, most = lr_search(needs), needs.limits.max_alpha_lr
    if search is None:
        return None
    if timed.candidate.method is Method.FULL:
        return search.model_copy(update={"first": first_factor(needs, rate, search.most)})
    if most is None:
        return search
    return search.model_copy(update={"highest": most / (lora_alpha(needs, timed.candidate.rank) * rate)})


def first_factor(needs: Requirements, rate: float, most: float) -> float | None:
    """Begin the search of a full fine-tune at the rate that suits the size of its weights, if that is higher.

    What the validator's changes of a model need follows from the RMS only in part: a scaled layer's weights
    want steps in proportion to their size (0.5 to 1.5 times); noise and new entries leave the RMS as it was;
    pruning lowers it where more, not less, is to be learned. And on Gemma-2-2B the formula gave a quarter of
    the rate that won. So the planned rate is its floor, the search may walk away from it, and without
    a search it changes nothing. The low rank weights of a LoRA do not grow with those they are added to.
    """
    rms = needs.conditions.weight_rms
    if rms is None or not needs.task.task_type.is_supervised:
        return None
    suited = RATE_PER_RMS * rms * math.sqrt(1e9 / max(needs.model.params_total, 1))
    factor = min(min(max(suited, LEAST_RATE), MOST_RATE) / rate, HIGHEST_FIRST, most)
    return None if factor < SAME_RATE else float(f"{factor:.3g}")


def learning_concessions(needs: Requirements, timed: TimedCandidate) -> Iterator[Concession]:
    for concession in (guarded_rate(needs, timed)[2], warmup(needs, timed.schedule.total)[1]):
        if concession is not None:
            yield concession
