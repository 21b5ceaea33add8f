"""One line per number of the plan: where it comes from, or what decided it."""

from __future__ import annotations

from core.budget import Concession
from core.choices import Attention, Parallelism
from core.plan_parts import Reason
from core.planning.fit import Fit
from core.planning.learning import guarded_rate
from core.planning.wishes import Wish
from core.units import show_bytes, show_seconds

#: The profile's target behind a number of the plan.
TARGET_OF: dict[str, str] = {
    "adapter.rank": "lora_r",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "batch.micro": "micro_batch_size",
    "batch.accumulation": "gradient_accumulation_steps",
    "sequence.length": "sequence_len",
    "sequence.packing": "sample_packing",
    "optimizer.name": "optimizer",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.schedule": "lr_scheduler",
    "optimizer.cycles": "lr_cycles",
    "optimizer.warmup_steps": "warmup_steps",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.max_grad_norm": "max_grad_norm",
    "steps.epochs": "num_epochs",
    "steps.total": "max_steps",
    "steps.eval_every": "eval_steps",
    "steps.save_every": "save_steps",
    "steps.eval_rows": "val_set_size",
    "steps.keep_checkpoints": "save_total_limit",
    "precision.gradient_checkpointing": "gradient_checkpointing",
    "precision.attention": "attention",
    "precision.compile_mode": "compile_mode",
    "precision.fp8": "fp8",
    "method": "method",
    "gpus": "gpu_strategy",
    "parallelism": "fsdp_above",
    "loader.workers": "dataloader_num_workers",
    "image.vae_batch": "vae_batch_size",
    "image.resolution": "resolution",
}


def reasons_for(wish: Wish, fit: Fit, given: list[Concession]) -> dict[str, Reason]:
    """A concession's reason where there is one, else the profile's line, else what the planner reckoned."""
    forced = {one.field: one.reason for one in given}
    own = _own(wish, fit)
    found: dict[str, Reason] = {}
    for path, target in TARGET_OF.items():
        origin = wish.profile.origin(f"targets.{target}")
        if target in forced:
            found[path] = Reason(text=forced[target])
        elif path in own:
            found[path] = Reason(text=own[path])
        elif wish.profile.is_set(f"targets.{target}"):
            found[path] = Reason(text="as the profile asks", source=str(origin))
        else:
            found[path] = Reason(text="the default", source="default")
    return found


def _own(wish: Wish, fit: Fit) -> dict[str, str]:
    timed, targets = fit.best, wish.targets
    setup, seq, schedule = timed.setup, timed.seq, timed.schedule
    found = {
        "gpus": fit.choice.why,
        "parallelism": _parallelism(wish, fit),
        "steps.total": f"{schedule.epochs:.3g} epochs of {schedule.per_epoch:,} steps",
        "optimizer.learning_rate": guarded_rate(wish, timed)[1],
        "steps.eval_rows": f"{targets.val_set_size:.0%} of the rows, at most {targets.val_rows_max}",
    }
    if targets.sequence_len is None and not wish.model.is_image:
        found["sequence.length"] = f"99th percentile of the rows is {wish.data.total.p99} tokens"
    if seq.packing and targets.sample_packing is None:
        rows = seq.rows / max(seq.per_epoch, 1)
        found["sequence.packing"] = f"about {rows:.1f} rows fill one sequence"
    if targets.attention is None and wish.model.attention is not Attention.FLASH_2:
        found["precision.attention"] = f"{wish.model.architecture} has no flash attention"
    if targets.eval_steps is None:
        found["steps.eval_every"] = f"about ten times; one takes {show_seconds(timed.rate.eval_s)}"
    if targets.save_steps is None:
        found["steps.save_every"] = "with each evaluation"
    if targets.num_epochs is None:
        clock = "all that fit before the reserve" if not schedule.complete else "the profile's upper limit"
        found["steps.epochs"] = clock
    if targets.method is None:
        found["method"] = f"full below {targets.full_below or 0:,} parameters"
    if targets.gradient_checkpointing is None:
        found["precision.gradient_checkpointing"] = (
            "memory asks for it" if setup.checkpointing else "memory allows it"
        )
    if targets.effective_batch_size is not None:
        found["batch.accumulation"] = (
            f"{targets.effective_batch_size} sequences per step over {setup.world} GPUs"
        )
    return found


def _parallelism(wish: Wish, fit: Fit) -> str:
    setup = fit.best.setup
    if setup.parallelism is Parallelism.SINGLE:
        return "one GPU"
    gradients = show_bytes(setup.trained_params * setup.trained_width)
    if setup.parallelism is Parallelism.DDP:
        return f"the model fits one GPU; {gradients} of gradients are exchanged per step"
    return f"{show_bytes(setup.shape.params * 2)} of weights are split over {setup.world} GPUs"
