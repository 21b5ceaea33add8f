"""Targets of the learning itself: adapter, batch, length, rate and optimizer."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from core.domain.choices import (
    Engine,
    LrSchedule,
    Method,
    Optimizer,
)
from core.domain.records import Record
from core.domain.selectors import IntegerRange, IntRange
from core.domain.units import Params
from core.profile.declare import (
    AI_TOOLKIT,
    DOUBTFUL,
    HARMFUL,
    IGNORED,
    IMAGES,
    KOHYA,
    KOHYA_FLUX,
    OURS,
    RENAMED,
    TEXT,
    Called,
    Effect,
    Where,
    above,
    at_least,
    between,
    given,
    none_of,
    one_of,
    outside,
    switched_on,
)


class LrStageTarget(Record):
    """One stage of `lr_stages`."""

    share: float = Field(gt=0, le=1, description="Part of the training.")
    factor: float = Field(gt=0, le=100, description="Factor on `learning_rate`.")


def _restarts(cycles: IntegerRange) -> bool:
    return cycles.high > 1


class LearningTargets(Record):
    """The first half of `Targets`: what trains, in which steps, at which rate."""

    # — what trains
    engine: Engine | None = Field(
        default=None,
        description="Training engine. Unset: axolotl for text, kohya for SDXL and Flux, ai-toolkit for "
        "other images.",
    )
    method: Annotated[Method | None, Called(plan="method", axolotl="adapter")] = Field(
        default=None, description="Unset: by `full_below`."
    )
    full_below: Params | None = Field(
        default=None,
        description="Without `method`: smaller models get a full fine-tune, others LoRA.",
    )
    # — the adapter
    lora_r: Annotated[
        int,
        Called(
            plan="adapter.rank",
            axolotl="lora_r",
            kohya="network_dim",
            ai_toolkit="network.linear",
            guides=("lora_rank", "rank", "r"),
        ),
        Effect(DOUBTFUL, TEXT, at_least(512)).because(
            "rank 16 to 64 holds what datasets of this size can teach; 512 costs 10 to 24 GB and a fifth "
            "more compute"
        ),
        Effect(DOUBTFUL, IMAGES, at_least(512)).because(
            "a file of 3.4 GiB (SDXL) or 4.6 GiB (Flux) for 9 to 45 pictures, slow to upload and to evaluate"
        ),
    ] = Field(default=64, ge=1, le=8192, description="LoRA rank (kohya: network_dim).")
    lora_alpha: Annotated[
        float | None,
        Called(
            plan="adapter.alpha",
            axolotl="lora_alpha",
            kohya="network_alpha",
            ai_toolkit="network.linear_alpha",
            guides="alpha",
        ),
        Effect(
            HARMFUL, TEXT, beside={"method": none_of(Method.FULL), "alpha_times_rate": above(0.05)}
        ).because(
            "lora_alpha × learning_rate is above 0.05; published optima lie between 0.003 and 0.03. Rank is "
            "not the problem: alpha 32 at the same rate is inside"
        ),
    ] = Field(
        default=None,
        gt=0,
        description="LoRA alpha (kohya: network_alpha). Unset: 32 for text, the rank for images.",
    )
    lora_dropout: Annotated[
        float,
        Called(
            plan="adapter.dropout",
            axolotl="lora_dropout",
            kohya="network_dropout",
            ai_toolkit="network.dropout",
        ),
        Effect(IGNORED, Where(pairs=True), above(0)).because("TRL switches dropout off for DPO"),
    ] = Field(default=0.05, ge=0, le=0.9, description="Dropout before the adapter.")
    lora_target_modules: Annotated[list[str] | None, Called(axolotl="lora_target_modules")] = Field(
        default=None,
        description="Layers with an adapter. Unset: all linear layers except routed experts. What "
        "PEFT refuses (`out_proj` of Mamba's layers) goes without.",
    )
    lora_rank_pattern: Annotated[
        dict[str, Annotated[int, Field(ge=1, le=8192)]],
        Called(plan="adapter.rank_pattern", axolotl="lora_rank_pattern", guides="rank_pattern"),
        Effect(IGNORED, IMAGES, switched_on).because(
            "image engines know no patterns; what sd-scripts has instead (block_dims, for Flux img_attn_dim "
            "and others) can be written as engine_config.kohya.network_args"
        ),
    ] = Field(
        default_factory=dict,
        description="Text: other ranks than lora_r for layers by name, like "
        "`{down_proj: 128, 'layers[.][0-3][.].*': 16}`, as peft's rank_pattern: the first match counts. In "
        "proportion where lora_r is scaled or lowered. lora_alpha is the same for all.",
    )
    rslora: Annotated[bool, Called(axolotl="peft_use_rslora")] = Field(
        default=False, description="Scale by alpha/√r, not alpha/r."
    )
    dora: Annotated[bool, Called(axolotl="peft_use_dora")] = Field(
        default=False, description="Weight-decomposed LoRA."
    )
    loraplus_lr_ratio: Annotated[float | None, Called(axolotl="loraplus_lr_ratio")] = Field(
        default=None, gt=0, description="LoRA+: rate of B / rate of A."
    )
    lora_kernels: bool | None = Field(
        default=None,
        description="Axolotl's Triton kernels for LoRA (SFT). Unset: on GPUs, for models that have them.",
    )
    # — the batch
    micro_batch_size: Annotated[
        int,
        Called(
            plan="batch.micro",
            axolotl="micro_batch_size",
            kohya="train_batch_size",
            ai_toolkit="train.batch_size",
            guides="per_device_train_batch_size",
        ),
        Effect(DOUBTFUL, TEXT, at_least(32)).because(
            "above 8,000 tokens per forward pass nothing gets faster; accumulation gives the same batch in "
            "less memory"
        ),
        Effect(DOUBTFUL, KOHYA, at_least(8)).because(
            "9 to 45 pictures fill few batches of this size, and the remainder weighs as much as a full one"
        ),
    ] = Field(
        default=8, ge=1, le=4096, description="Sequences per GPU and forward pass (kohya: train_batch_size)."
    )
    gradient_accumulation_steps: Annotated[
        int,
        Called(
            plan="batch.accumulation",
            axolotl="gradient_accumulation_steps",
            kohya="gradient_accumulation_steps",
            ai_toolkit="train.gradient_accumulation",
            guides="gradient_accumulation",
        ),
    ] = Field(default=1, ge=1, le=4096, description="Forward passes per optimizer step.")
    effective_batch_size: Annotated[int | None, Called(guides="batch_size")] = Field(
        default=None,
        ge=1,
        le=65536,
        description="Sequences per optimizer step over all GPUs. "
        "Unset: micro_batch_size × gradient_accumulation_steps × GPUs.",
    )
    least_steps: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Text except GRPO: halve effective_batch_size (down to 8) until there are this many "
        "steps; each halving divides the rate by √2. GRPO: `grpo_most_batch` leaves at least this many.",
    )
    # — how long
    num_epochs: Annotated[
        float | None,
        Called(plan="steps.epochs", axolotl="num_epochs", guides=("epoch", "epochs", "max_train_epochs")),
        Effect(DOUBTFUL, TEXT, above(4)).because(
            "held-out loss rises after a few passes over small data; the best checkpoint is submitted, not "
            "the last"
        ),
        Effect(RENAMED, KOHYA, given).because(
            'kohya ignores the key "epoch"; epochs and max_steps are both planned as max_train_steps, '
            "whichever ends first"
        ),
    ] = Field(
        default=None,
        gt=0,
        le=1000,
        description="Passes over the data. Unset: as many as fit, up to `max_epochs`.",
    )
    max_steps: Annotated[
        int | None,
        Called(plan="steps.total", axolotl="max_steps", kohya="max_train_steps", ai_toolkit="train.steps"),
        Effect(DOUBTFUL, value=at_least(9600)).because(
            "a step count means nothing without its tokens: the training ends at whichever of steps, epochs "
            "and clock comes first"
        ),
    ] = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Most optimizer steps. Unset: by epochs and time.",
    )
    # — the learning rate
    learning_rate: Annotated[
        float,
        Called(
            plan="optimizer.learning_rate",
            axolotl="learning_rate",
            kohya=("learning_rate", "unet_lr"),
            ai_toolkit="train.lr",
            guides="lr",
        ),
        Effect(HARMFUL, Where(rl=True), above(1e-4)).because(
            "published LoRA rates for DPO and GRPO are 1e-6 to 1e-5"
        ),
        Effect(HARMFUL, value=outside(1e-7, 0.01), beside={"optimizer": none_of(Optimizer.PRODIGY)}).because(
            "no training learns at such a rate: full fine-tunes take 1e-6 to 1e-4, adapters 1e-5 to 1e-3; is "
            "the exponent as meant?"
        ),
    ] = Field(default=2e-4, gt=0, le=1, description="Peak learning rate.")
    lora_lr_factor: float = Field(
        default=10.0,
        gt=0,
        le=100,
        description="Factor on learning_rate if LoRA replaces a full fine-tune.",
    )
    text_encoder_lr: Annotated[
        float | None,
        Called(kohya="text_encoder_lr"),
        Effect(IGNORED, KOHYA_FLUX, switched_on).because(
            "the validators load the model part of a Flux LoRA only; training the encoders makes it lean on "
            "what is thrown away"
        ),
    ] = Field(
        default=None, ge=0, le=10, description="Images: rate of the text encoders. Unset or 0: not trained."
    )
    lr_gpu_scale: dict[int, float] = Field(
        default_factory=dict,
        description="Factor on learning_rate by GPU count, like `{2: 1.2, 4: 1.5}`; the nearest lower "
        "count applies.",
    )
    lr_scheduler: Annotated[
        LrSchedule,
        Called(
            plan="optimizer.schedule",
            axolotl=("lr_scheduler", "lr_scheduler_kwargs"),
            kohya="lr_scheduler",
            ai_toolkit=("train.lr_scheduler", "train.lr_scheduler_params"),
            guides="scheduler",
        ),
    ] = Field(default=LrSchedule.COSINE, description="Schedule.")
    lr_cycles: Annotated[
        IntRange,
        Called(plan="optimizer.cycles", kohya="lr_scheduler_num_cycles"),
        Effect(
            DOUBTFUL, value=_restarts, beside={"lr_scheduler": one_of(LrSchedule.COSINE_WITH_RESTARTS)}
        ).because(
            "each restart reheats a nearly finished model, and a stop between two lands on half the peak "
            "rate on average; cycles are planned to end with the training"
        ),
    ] = Field(
        default=IntegerRange(low=1, high=1),
        description="cosine_with_restarts: restarts, or a range to choose from by training length.",
    )
    min_lr_ratio: Annotated[
        float, Called(axolotl="cosine_min_lr_ratio", kohya="lr_scheduler_min_lr_ratio")
    ] = Field(default=0.0, ge=0, le=1, description="Final rate as a share of the peak.")
    cooldown_share: float = Field(
        default=0.2, ge=0, le=1, description="warmup_stable_decay: share that decays."
    )
    warmup_steps: Annotated[
        int | None,
        Called(plan="optimizer.warmup_steps", axolotl="warmup_steps", kohya="lr_warmup_steps"),
        Effect(RENAMED, KOHYA, switched_on).because(
            "multiplied by the GPUs: kohya's scheduler runs that many times per step; left out where the "
            "schedule is constant, which refuses it"
        ),
    ] = Field(default=None, ge=0, description="Overrides warmup_ratio.")
    warmup_ratio: float = Field(default=0.03, ge=0, le=1, description="Warmup, as a share of all steps.")
    lr_stages: Annotated[
        list[LrStageTarget],
        Effect(OURS, TEXT, switched_on).because(
            "no engine has stages; our callback switches the rate at the planned steps"
        ),
    ] = Field(default_factory=list, description="Stages of the rate; shares add up to 1.")
    plateau_factor: Annotated[
        float | None,
        Effect(OURS, TEXT, given).because("our callback applies it at evaluations, on top of the schedule"),
    ] = Field(
        default=None,
        gt=0,
        lt=1,
        description="Factor on the rate when evaluations stop improving. Unset: off.",
    )
    plateau_growth: float = Field(default=1.0, ge=1, le=2, description="Factor while they improve.")
    plateau_patience: int = Field(
        default=2, ge=1, description="Evaluations without improvement before the factor."
    )
    lr_search_share: float = Field(
        default=0.0,
        ge=0,
        le=0.2,
        description="Text: share of the training time for trying other rates first. 0: none.",
    )
    lr_search_most: float = Field(
        default=10.0,
        ge=1,
        le=100,
        description="The rate found is at most this factor above or below learning_rate.",
    )
    # — the optimizer
    optimizer: Annotated[
        Optimizer,
        Called(
            plan="optimizer.name", axolotl="optimizer", kohya="optimizer_type", ai_toolkit="train.optimizer"
        ),
        Effect(RENAMED, TEXT, one_of(Optimizer.ADAMW_BNB_8BIT, Optimizer.PAGED_ADAMW_8BIT)).because(
            "under FSDP2 it is refused; adamw_torch_8bit takes its place there"
        ),
    ] = Field(default=Optimizer.ADAMW_TORCH_FUSED, description="Optimizer.")
    adam_beta1: Annotated[float, Called(axolotl="adam_beta1")] = Field(
        default=0.9, ge=0, lt=1, description="AdamW's first beta."
    )
    adam_beta2: Annotated[float, Called(axolotl="adam_beta2")] = Field(
        default=0.999, ge=0, lt=1, description="AdamW's second beta."
    )
    weight_decay: Annotated[
        float,
        Called(
            plan="optimizer.weight_decay",
            axolotl="weight_decay",
            kohya="optimizer_args",
            ai_toolkit="train.optimizer_params",
        ),
    ] = Field(default=0.0, ge=0, le=10, description="Decoupled weight decay.")
    max_grad_norm: Annotated[
        float,
        Called(
            plan="optimizer.max_grad_norm",
            axolotl="max_grad_norm",
            kohya="max_grad_norm",
            ai_toolkit="train.max_grad_norm",
            guides="clip_grad_norm",
        ),
        Effect(DOUBTFUL, value=between(0, 1), beside={"optimizer": none_of(Optimizer.MUON)}).because(
            "a constant factor cancels out under Adam: it evens out spikes and does not tame a high learning "
            "rate"
        ),
    ] = Field(default=1.0, ge=0, description="Gradient clipping; 0: none.")
    ema_decay: Annotated[
        float | None,
        Called(ai_toolkit="train.ema_config"),
        Effect(OURS, TEXT, given).because(
            "no text engine has it; our callback averages, and evaluates and submits the average"
        ),
        Effect(IGNORED, KOHYA, given).because("kohya's LoRA training has no EMA and drops any such key"),
        Effect(RENAMED, AI_TOOLKIT, given).because(
            "written as ema_config; updated every step whatever ema_every says"
        ),
    ] = Field(default=None, gt=0, lt=1, description="Moving average of the weights. Unset: none.")
    ema_every: Annotated[int, Called(guides="ema_update_every")] = Field(
        default=1, ge=1, description="Steps between its updates."
    )

    @property
    def alpha_times_rate(self) -> float:
        """With Adam and alpha/r scaling the first updates go as this product, whatever the rank."""
        return (self.lora_alpha or 32.0) * self.learning_rate

    @field_validator("lora_rank_pattern")
    @classmethod
    def patterns_are_regular_expressions(cls, value: dict[str, int]) -> dict[str, int]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def stage_shares_add_up(self) -> Self:
        total = sum(stage.share for stage in self.lr_stages)
        if self.lr_stages and abs(total - 1) > 0.01:
            raise ValueError(f"the shares of lr_stages add up to {total:g}, not to 1")
        return self
