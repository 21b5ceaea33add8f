"""What an operator may want (`Targets`), never exceed (`ProfileLimits`) and multiply (`TargetScale`).

Every key is documented where it is declared; `docs/profiles.md` and the JSON Schema come from here. Names are
Axolotl's where the idea is the same, for text and images alike; other names are in `field_names.py`.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from core.domain import slurm
from core.domain.choices import (
    Attention,
    BackwardPrefetch,
    CompileMode,
    Engine,
    EvalMetric,
    GpuStrategy,
    ImageLoss,
    LrSchedule,
    Method,
    Optimizer,
)
from core.domain.records import Record
from core.domain.selectors import IntegerRange, IntRange, Lane, OneOrMany
from core.domain.units import Bytes, Params, Seconds


class GpuStep(Record):
    """One line of `gpus_by_size`."""

    above: Params = Field(description="For models with more parameters than this.")
    gpus: int = Field(ge=1, le=64, description="GPUs for them.")


class LrStageTarget(Record):
    """One stage of `lr_stages`."""

    share: float = Field(gt=0, le=1, description="Part of the training.")
    factor: float = Field(gt=0, le=100, description="Factor on `learning_rate`.")


class PictureLaw(Record):
    """A number that follows how many pictures there are: at_24 × (pictures / 24) ^ power."""

    at_24: float = Field(gt=0, description="The number at 24 training pictures.")
    power: float = Field(
        default=0.0, ge=-2, le=2, description="0: the same for any; 0.5: with their root; 1: in proportion."
    )

    def at(self, pictures: float) -> float:
        return self.at_24 * math.pow(max(pictures, 1) / 24, self.power)

    def __str__(self) -> str:
        return f"{self.at_24:g} × (pictures/24)^{self.power:g}"


class TargetsByPictures(Record):
    """Targets that follow the number of training pictures. They replace those of the same name."""

    max_steps: PictureLaw | None = Field(
        default=None,
        description="Steps of one picture each: the steps of the run are this over the effective batch.",
    )
    lora_r: PictureLaw | None = Field(default=None, description="Rank.")
    learning_rate: PictureLaw | None = Field(default=None, description="Peak learning rate.")
    weight_decay: PictureLaw | None = Field(default=None, description="Weight decay.")


class CheckpointChoiceTarget(Record):
    """Which files of a run are compared at its end by the evaluator's own measure, and for how long."""

    files: int = Field(default=5, ge=2, le=20, description="Files: evenly spread saves, the last included.")
    pictures: int = Field(default=2, ge=1, le=16, description="Pictures to compare on.")
    seeds: int = Field(default=2, ge=1, le=10, description="Random seeds for each picture.")
    held_out: bool = Field(
        default=False, description="Keep these pictures out of the training, if there are enough."
    )
    share: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Part of the training time that it may take from the steps. 0: only what they leave.",
    )


class Targets(Record):
    """What the operator wants. Honoured as far as the limits allow; each concession is reported."""

    # — what trains
    engine: Engine | None = Field(
        default=None,
        description="Training engine. Unset: axolotl for text, kohya for SDXL and Flux, ai-toolkit for "
        "other images.",
    )
    method: Method | None = Field(default=None, description="Unset: by `full_below`.")
    full_below: Params | None = Field(
        default=None,
        description="Without `method`: smaller models get a full fine-tune, others LoRA.",
    )
    # — the adapter
    lora_r: int = Field(default=64, ge=1, le=8192, description="LoRA rank (kohya: network_dim).")
    lora_alpha: float | None = Field(
        default=None,
        gt=0,
        description="LoRA alpha (kohya: network_alpha). Unset: 32 for text, the rank for images.",
    )
    lora_dropout: float = Field(default=0.05, ge=0, le=0.9, description="Dropout before the adapter.")
    lora_target_modules: list[str] | None = Field(
        default=None,
        description="Layers with an adapter. Unset: all linear layers except routed experts.",
    )
    lora_rank_pattern: dict[str, Annotated[int, Field(ge=1, le=8192)]] = Field(
        default_factory=dict,
        description="Text: other ranks than lora_r for layers by name, like "
        "`{down_proj: 128, 'layers[.][0-3][.].*': 16}`, as peft's rank_pattern: the first match counts. In "
        "proportion where lora_r is scaled or lowered. lora_alpha is the same for all.",
    )
    rslora: bool = Field(default=False, description="Scale by alpha/√r, not alpha/r.")
    dora: bool = Field(default=False, description="Weight-decomposed LoRA.")
    loraplus_lr_ratio: float | None = Field(default=None, gt=0, description="LoRA+: rate of B / rate of A.")
    adapter_fp32: bool = Field(default=True, description="fp32 adapter beside a bf16 base.")
    lora_kernels: bool | None = Field(
        default=None,
        description="Axolotl's Triton kernels for LoRA (SFT). Unset: on GPUs, for models that have them.",
    )
    # — the batch
    micro_batch_size: int = Field(
        default=8, ge=1, le=4096, description="Sequences per GPU and forward pass (kohya: train_batch_size)."
    )
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, le=4096, description="Forward passes per optimizer step."
    )
    effective_batch_size: int | None = Field(
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
    num_epochs: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Passes over the data. Unset: as many as fit, up to `max_epochs`.",
    )
    max_steps: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Most optimizer steps. Unset: by epochs and time.",
    )
    # — the learning rate
    learning_rate: float = Field(default=2e-4, gt=0, le=1, description="Peak learning rate.")
    lora_lr_factor: float = Field(
        default=10.0,
        gt=0,
        le=100,
        description="Factor on learning_rate if LoRA replaces a full fine-tune.",
    )
    text_encoder_lr: float | None = Field(
        default=None, ge=0, le=10, description="Images: rate of the text encoders. Unset or 0: not trained."
    )
    lr_gpu_scale: dict[int, float] = Field(
        default_factory=dict,
        description="Factor on learning_rate by GPU count, like `{2: 1.2, 4: 1.5}`; the nearest lower "
        "count applies.",
    )
    lr_scheduler: LrSchedule = Field(default=LrSchedule.COSINE, description="Schedule.")
    lr_cycles: IntRange = Field(
        default=IntegerRange(low=1, high=1),
        description="cosine_with_restarts: restarts, or a range to choose from by training length.",
    )
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Final rate as a share of the peak.")
    cooldown_share: float = Field(
        default=0.2, ge=0, le=1, description="warmup_stable_decay: share that decays."
    )
    warmup_steps: int | None = Field(default=None, ge=0, description="Overrides warmup_ratio.")
    warmup_ratio: float = Field(default=0.03, ge=0, le=1, description="Warmup, as a share of all steps.")
    lr_stages: list[LrStageTarget] = Field(
        default_factory=list, description="Stages of the rate; shares add up to 1."
    )
    plateau_factor: float | None = Field(
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
    optimizer: Optimizer = Field(default=Optimizer.ADAMW_TORCH_FUSED, description="Optimizer.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's first beta.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's second beta.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Gradient clipping; 0: none.")
    fp32_master: bool | None = Field(
        default=None, description="Full fine-tune: fp32 master weights. Unset: if memory allows."
    )
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="Moving average of the weights. Unset: none."
    )
    ema_every: int = Field(default=1, ge=1, description="Steps between its updates.")
    # — sequences
    sequence_len: int | None = Field(
        default=None,
        ge=16,
        le=1_048_576,
        description="Tokens per sequence. Unset: the data's 99th percentile.",
    )
    sample_packing: bool | None = Field(
        default=None, description="SFT: several rows per sequence. Unset: if it saves time."
    )
    group_by_length: bool = Field(
        default=False, description="Batches of similar lengths; no effect with packing."
    )
    # — evaluation and checkpoints
    eval_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps between evaluations; fewer in a run too short for early_stopping_patience. "
        "Unset: about ten per run.",
    )
    save_steps: int | None = Field(
        default=None, ge=1, description="Steps between checkpoints. Unset: at each evaluation."
    )
    save_every_epochs: int | None = Field(
        default=None,
        ge=1,
        description="kohya: epochs between checkpoints.",
    )
    save_total_limit: int = Field(default=2, ge=1, description="Checkpoints kept.")
    val_set_size: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of rows held out for evaluation.",
    )
    val_rows_max: int = Field(default=500, ge=0, description="Most rows held out.")
    val_rows_min: int = Field(
        default=0, ge=0, description="Fewest rows held out, but no more than a fifth of all."
    )
    early_stopping_patience: int | None = Field(
        default=None, ge=1, description="Stop after this many evaluations without improvement. Unset: never."
    )
    load_best: bool = Field(default=True, description="Submit the best checkpoint, not the last.")
    eval_metric: EvalMetric = Field(default=EvalMetric.VALIDATOR, description="What decides which is best.")
    target_loss: float | None = Field(
        default=None,
        gt=0,
        description="Held-out loss to get below. Shown, with an alert if missed; "
        "the training does not depend on it.",
    )
    target_gain: float | None = Field(
        default=None,
        gt=0,
        description="Least improvement of the held-out score over the base's, as a share of that. "
        "Like target_loss.",
    )
    # — numbers and kernels
    bf16: bool = Field(default=True, description="bfloat16 arithmetic.")
    fp16: bool = Field(default=False, description="float16, for GPUs without bfloat16.")
    tf32: bool = Field(default=True, description="TensorFloat-32 for remaining fp32.")
    fp8: bool = Field(
        default=False, description="fp8 matrix products (Hopper and later; native trainer, full SFT)."
    )
    attention: Attention | None = Field(
        default=None,
        description="Unset: flash attention if the image has it, else sdpa.",
    )
    compile_mode: CompileMode | None = Field(default=None, description="torch.compile. Unset: not compiled.")
    gradient_checkpointing: bool | None = Field(
        default=None,
        description="Recompute activations. Unset: only if memory requires it.",
    )
    activation_offload: bool = Field(default=False, description="Keep activations in host memory.")
    fused_loss: bool = Field(default=True, description="Cross-entropy without full logits in memory.")
    liger: bool | None = Field(
        default=False,
        description="Axolotl: Liger's kernels for norms, rotation, activations and loss. null: where GPU and "
        "model allow, except for GRPO.",
    )
    # — the data loader
    dataloader_num_workers: int = Field(default=4, ge=0, le=1024, description="Loader processes per GPU.")
    dataloader_prefetch_factor: int = Field(default=2, ge=1, le=1024, description="Batches ahead per worker.")
    dataloader_pin_memory: bool = Field(default=True, description="Page-locked host memory.")
    dataloader_persistent_workers: bool = Field(default=False, description="Keep workers between epochs.")
    dataloader_drop_last: bool = Field(default=False, description="Drop the last partial batch.")
    # — GPUs
    gpu_strategy: GpuStrategy = Field(default=GpuStrategy.BY_VALUE, description="How many GPUs a job gets.")
    gpus_by_size: list[GpuStep] = Field(
        default_factory=list, description="by_size: the largest step that the model exceeds, else 1 GPU."
    )
    lanes: dict[str, Lane] = Field(default_factory=dict, description="lanes: GPUs set aside, by name.")
    nodes: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Text except GRPO: most nodes of one job. If it takes more GPUs than one node has, it "
        "takes whole nodes.",
    )
    node_network: float = Field(
        default=25.0,
        gt=0,
        le=10_000,
        description="Gbit/s from one node to the others. 25: Ethernet; one 400G InfiniBand port per GPU: "
        "3200.",
    )
    fsdp_above: Params | None = Field(
        default=None, description="FSDP from this size on. Unset: if one GPU cannot hold the model."
    )
    fsdp_reshard_after_forward: bool = Field(default=True, description="full_shard: free layers after use.")
    fsdp_forward_prefetch: bool = Field(default=True, description="Fetch the next layer early (FSDP1).")
    fsdp_limit_all_gathers: bool = Field(default=True, description="Bound the gathers in flight (FSDP1).")
    fsdp_backward_prefetch: BackwardPrefetch = Field(
        default=BackwardPrefetch.PRE, description="Prefetch order in the backward pass (FSDP1)."
    )
    seed: int = Field(default=42, ge=0, le=2**31 - 1, description="Random seed.")
    main_process_port: int | None = Field(
        default=None, ge=1024, le=65535, description="Launch port. Unset: any free one."
    )
    # — preference and reinforcement
    dpo_beta: float = Field(default=0.1, gt=0, description="DPO's beta; validators evaluate with 0.1.")
    dpo_precompute_reference: bool | None = Field(
        default=None, description="DPO: compute reference log-probs beforehand. Unset: if it saves time."
    )
    grpo_beta: float = Field(
        default=0.0, ge=0, description="GRPO: weight of TRL's KL, of the model to the base on completions."
    )
    grpo_prompt_kl: float = Field(
        default=0.0,
        ge=0,
        description="GRPO: weight of the evaluation's KL, of the base to the model on prompts, beside "
        "advantages of about 1.",
    )
    grpo_generations: int = Field(default=8, ge=2, le=256, description="GRPO: completions per prompt.")
    grpo_most_batch: int | None = Field(
        default=None,
        ge=2,
        le=65536,
        description="GRPO on a GPU: double effective_batch_size (completions) up to this while the estimate "
        "of time says that it trains more per second. Unset: never.",
    )
    grpo_max_completion: int = Field(
        default=256, ge=1, description="GRPO: tokens per completion; validators generate 256."
    )
    grpo_temperature: float | None = Field(
        default=None,
        gt=0,
        description="GRPO: sampling temperature. Unset: the evaluation's, 0.9 for offers and 1.0 in "
        "tournaments.",
    )
    grpo_vllm: bool | None = Field(
        default=False,
        description="GRPO: generate with vLLM, which sleeps while the model trains. Unset: where it is "
        "installed, below 15B, if nothing else is given up for it.",
    )
    # — images
    by_pictures: TargetsByPictures = Field(
        default=TargetsByPictures(), description="Images: targets that follow the number of pictures."
    )
    checkpoint_choice: CheckpointChoiceTarget | None = Field(
        default=None,
        description="Images: compare files at the end and submit the best. Unset: submit the last.",
    )
    resolutions: Annotated[list[Annotated[int, Field(ge=64, le=4096)]], OneOrMany()] = Field(
        default_factory=lambda: [1024],
        min_length=1,
        description="Images: sides of the square; ai-toolkit trains each picture at every one, kohya at the "
        "largest.",
    )
    image_repeats: int | None = Field(
        default=None, ge=1, description="Images: uses per epoch. Unset: as the dataset was prepared."
    )
    vae_batch_size: int = Field(default=4, ge=1, description="Images: batch for caching latents.")
    image_loss: ImageLoss = Field(
        default=ImageLoss.L2, description="Images: loss; validators score squared error."
    )
    huber_c: float | None = Field(default=None, gt=0, description="Images: for huber losses.")
    min_snr_gamma: float | None = Field(default=None, gt=0, description="SDXL: min-SNR weighting.")
    noise_offset: float | None = Field(default=None, ge=0, description="Images: noise offset.")
    scale_weight_norms: float | None = Field(
        default=None, gt=0, description="Images: cap on LoRA weight norms."
    )
    caption_dropout: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Images: share of captions left out; scoring weighs no caption 3:1.",
    )
    guidance_scale: float | None = Field(default=None, ge=0, description="Flux: guidance during training.")
    timestep_sampling: str | None = Field(default=None, description="Flow models: how timesteps are drawn.")
    flow_shift: float | None = Field(default=None, gt=0, description="Flux: discrete_flow_shift.")
    quantize_base: bool | None = Field(
        default=None, description="ai-toolkit: 8-bit frozen weights. Unset: only if memory requires it."
    )
    conv_rank: int | None = Field(
        default=None, ge=1, description="Images: rank for convolutions. Unset: none."
    )
    conv_alpha: float | None = Field(default=None, gt=0, description="Images: alpha for convolutions.")

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


class ProfileLimits(Record):
    """What is never exceeded."""

    gpu_memory: Bytes | None = Field(default=None, description="Most memory per GPU.")
    gpu_memory_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="The same as a share; the lower of the two applies.",
    )
    min_gpus: int = Field(default=1, ge=1, le=64, description="Fewest GPUs per job.")
    max_gpus: int = Field(default=64, ge=1, le=64, description="Most GPUs per job.")
    max_jobs: int | None = Field(
        default=None, ge=1, description="Most jobs at once, over all lanes. Unset: one per GPU set."
    )
    reserve: Seconds = Field(default=600.0, description="Time kept free between publishing and the deadline.")
    reserve_share: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="The same as a share of the hours; the larger applies.",
    )
    eval_share: float = Field(default=0.1, gt=0, le=1, description="Most training time for evaluations.")
    min_epochs: float = Field(default=0.25, ge=0, description="Refuse trainings of fewer passes.")
    max_epochs: float = Field(default=4.0, gt=0, description="Most passes, if `num_epochs` is unset.")
    few_rows_power: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Text: below 10,000 rows `max_epochs` is multiplied by (10,000 / rows) ^ this.",
    )
    max_steps: int | None = Field(default=None, ge=1, description="Most optimizer steps.")
    max_lora_r: int = Field(default=2048, ge=1, description="Largest LoRA rank after scaling.")
    min_lora_r: int = Field(default=8, ge=1, description="Lowest rank that the planner may choose.")
    max_sequence_len: int = Field(default=8192, ge=16, description="Longest sequence.")
    min_sequence_len: int = Field(default=512, ge=16, description="Shortest that the planner may choose.")
    max_micro_batch: int = Field(default=256, ge=1, description="Largest micro batch.")
    max_alpha_lr: float | None = Field(
        default=None,
        gt=0,
        description="LoRA: most lora_alpha × learning_rate. Unset: no limit.",
    )
    checkpoint_disk: Bytes | None = Field(default=None, description="Most disk for checkpoints.")


class ContainerTargets(Record):
    """The container around a job."""

    memory: Bytes | None = Field(default=None, description="Host memory. Unset: in proportion to the GPUs.")
    shm: Bytes | None = Field(
        default=None, description="Shared memory (/dev/shm), at most the GPUs' share. Unset: 16GB per GPU."
    )
    cpus: str | None = Field(
        default=None,
        pattern=r"^\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*$",
        description="Cores that the host's jobs divide by their GPUs, as docker's cpuset. Unset: all.",
        examples=["0-63", "0-15,32-47"],
    )


class SlurmTargets(Record):
    """Where a training runs on a Slurm cluster, instead of what the settings say."""

    partition: str | None = Field(
        default=None, pattern=f"^{slurm.NAMES}$", description="Partition; several with commas."
    )
    account: str | None = Field(default=None, pattern=f"^{slurm.NAME}$", description="Account to charge.")
    qos: str | None = Field(default=None, pattern=f"^{slurm.NAME}$", description="Quality of service.")
    constraint: str | None = Field(
        default=None, pattern=f"^{slurm.CONSTRAINT}$", description="Features that its nodes must have."
    )
    reservation: str | None = Field(
        default=None, pattern=f"^{slurm.NAME}$", description="Reservation to run in."
    )
    options: list[Annotated[str, AfterValidator(slurm.check_option)]] | None = Field(
        default=None, description="More options for sbatch.", examples=[["--nice=100"]]
    )

    def by_name(self) -> dict[str, str]:
        """What is set; options in one text."""
        values = {name: value for name, value in self.model_dump().items() if value is not None}
        return {
            name: " ".join(value) if isinstance(value, list) else str(value) for name, value in values.items()
        }


ScaleFactor = Annotated[float, Field(gt=0, le=100)]


class TargetScale(Record):
    """Factors on targets; those of all matching sections multiply. A rank of a multiple of 8 stays one."""

    lora_r: ScaleFactor = Field(default=1.0, description="Factor on lora_r.")
    lora_alpha: ScaleFactor = Field(default=1.0, description="Factor on lora_alpha.")
    micro_batch_size: ScaleFactor = Field(default=1.0, description="Factor on micro_batch_size.")
    effective_batch_size: ScaleFactor = Field(default=1.0, description="Factor on effective_batch_size.")
    learning_rate: ScaleFactor = Field(default=1.0, description="Factor on learning_rate.")
    text_encoder_lr: ScaleFactor = Field(default=1.0, description="Factor on text_encoder_lr.")
    num_epochs: ScaleFactor = Field(default=1.0, description="Factor on num_epochs.")
    max_steps: ScaleFactor = Field(default=1.0, description="Factor on max_steps.")
    weight_decay: ScaleFactor = Field(default=1.0, description="Factor on weight_decay.")
    warmup_steps: ScaleFactor = Field(default=1.0, description="Factor on warmup_steps.")
