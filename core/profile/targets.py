"""Targets of an operator: each is declared here or in `learning.py`.

A declaration says all that is known of a target beside its default: its description, what the plan, the
engines and guides call it, and what engines make of its values. `docs/profiles.md`, the JSON Schema, the
hints for a stray key, the plan's reasons and `profile explain` come from here. Names are Axolotl's where the
idea is the same, for text and images alike.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from core.domain.choices import (
    Attention,
    BackwardPrefetch,
    CompileMode,
    EvalMetric,
    GpuStrategy,
    ImageLoss,
    Method,
)
from core.domain.records import Record
from core.domain.selectors import Lane, OneOrMany
from core.domain.units import Params
from core.profile.declare import (
    AI_TOOLKIT,
    AXOLOTL,
    DOUBTFUL,
    HARMFUL,
    IGNORED,
    IMAGES,
    KOHYA,
    KOHYA_FLUX,
    NATIVE,
    OTHER_THAN_AXOLOTL,
    OTHER_THAN_NATIVE,
    OURS,
    RENAMED,
    SDXL,
    TEXT,
    Called,
    Effect,
    Where,
    above,
    at_least,
    below,
    given,
    none_of,
    one_of,
    switched_on,
)
from core.profile.learning import LearningTargets

_ONE_THREAD = "the native trainer prepares batches in one thread of its own"


class GpuStep(Record):
    """One line of `gpus_by_size`."""

    above: Params = Field(description="For models with more parameters than this.")
    gpus: int = Field(ge=1, le=64, description="GPUs for them.")


class Targets(LearningTargets):
    """The operator's wishes, honoured as far as the limits allow; each concession is reported."""

    # — sequences
    sequence_len: Annotated[
        int | None, Called(plan="sequence.length", axolotl="sequence_len", guides="max_seq_length")
    ] = Field(
        default=None,
        ge=16,
        le=1_048_576,
        description="Tokens per sequence. Unset: the data's 99th percentile.",
    )
    sample_packing: Annotated[bool | None, Called(plan="sequence.packing", axolotl="sample_packing")] = Field(
        default=None, description="SFT: several rows per sequence. Unset: if it saves time."
    )
    group_by_length: Annotated[
        bool,
        Called(axolotl="group_by_length"),
        Effect(IGNORED, Where(rl=True), switched_on).because(
            "nothing to group where rows are packed, and Axolotl ignores it for DPO and GRPO"
        ),
        Effect(IGNORED, Where(text=True, rl=False), switched_on, {"sample_packing": none_of(False)}).because(
            "nothing to group where rows are packed, and Axolotl ignores it for DPO and GRPO"
        ),
        Effect(IGNORED, IMAGES, switched_on).because("pictures are bucketed by size instead"),
    ] = Field(default=False, description="Batches of similar lengths; no effect with packing.")
    # — evaluation and checkpoints
    eval_steps: Annotated[
        int | None,
        Called(plan="steps.eval_every", axolotl="eval_steps"),
        Effect(IGNORED, IMAGES).because("image engines do not evaluate"),
    ] = Field(
        default=None,
        ge=1,
        description="Steps between evaluations; fewer in a run too short for early_stopping_patience. "
        "Unset: about ten per run.",
    )
    save_steps: Annotated[
        int | None,
        Called(plan="steps.save_every", axolotl="save_steps", ai_toolkit="save.save_every"),
        Effect(RENAMED, TEXT, given, {"eval_steps": given}).because(
            "saves fall on evaluations, as the best checkpoint needs both; our callback writes every new "
            "best besides"
        ),
        Effect(RENAMED, KOHYA, given).because(
            "files by step are not recognised as submissions; written as save_every_n_epochs"
        ),
    ] = Field(default=None, ge=1, description="Steps between checkpoints. Unset: at each evaluation.")
    save_every_epochs: Annotated[int | None, Called(kohya="save_every_n_epochs")] = Field(
        default=None,
        ge=1,
        description="kohya: epochs between checkpoints.",
    )
    save_total_limit: Annotated[
        int,
        Called(
            plan="steps.keep_checkpoints",
            axolotl="save_total_limit",
            ai_toolkit="save.max_step_saves_to_keep",
        ),
    ] = Field(default=2, ge=1, description="Checkpoints kept.")
    val_set_size: Annotated[float, Called(plan="steps.eval_rows", axolotl="val_set_size")] = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of rows held out for evaluation.",
    )
    val_rows_max: int = Field(default=500, ge=0, description="Most rows held out.")
    val_rows_min: int = Field(
        default=0, ge=0, description="Fewest rows held out, but no more than a fifth of all."
    )
    early_stopping_patience: Annotated[
        int | None,
        Called(axolotl="early_stopping_patience"),
        Effect(RENAMED, TEXT, given).because(
            "counted in evaluations, by our callback: Axolotl's own works for SFT only"
        ),
        Effect(IGNORED, IMAGES, given).because("image engines do not evaluate"),
    ] = Field(
        default=None, ge=1, description="Stop after this many evaluations without improvement. Unset: never."
    )
    load_best: Annotated[bool, Called(axolotl="load_best_model_at_end")] = Field(
        default=True, description="Submit the best checkpoint, not the last."
    )
    eval_metric: EvalMetric = Field(default=EvalMetric.VALIDATOR, description="What decides which is best.")
    target_loss: Annotated[float | None, Called(plan="goal.loss")] = Field(
        default=None,
        gt=0,
        description="Held-out loss to get below. Shown, with an alert if missed; "
        "the training does not depend on it.",
    )
    target_gain: Annotated[float | None, Called(plan="goal.gain")] = Field(
        default=None,
        gt=0,
        description="Least improvement of the held-out score over the base's, as a share of that. "
        "Like target_loss.",
    )
    # — numbers and kernels
    bf16: Annotated[bool, Called(axolotl="bf16", kohya="mixed_precision")] = Field(
        default=True, description="bfloat16 arithmetic."
    )
    fp16: Annotated[
        bool,
        Called(axolotl="fp16"),
        Effect(IGNORED, value=switched_on, beside={"bf16": switched_on}).because(
            "bf16 wins when both are set"
        ),
    ] = Field(default=False, description="float16, for GPUs without bfloat16.")
    tf32: Annotated[bool, Called(axolotl="tf32")] = Field(
        default=True, description="TensorFloat-32 for remaining fp32."
    )
    fp8: Annotated[
        bool,
        Called(plan="precision.fp8", axolotl="fp8"),
        Effect(DOUBTFUL, TEXT, switched_on).because(
            "1.1 to 1.3 times bf16 at 1B to 8B, not 2; slower than bf16 without compilation or with gradient "
            "checkpointing, and only for supervised training"
        ),
        Effect(IGNORED, NATIVE, switched_on, {"method": none_of(Method.FULL)}).because(
            "off for an adapter: the frozen weights of a LoRA run gain nothing from fp8 products"
        ),
    ] = Field(default=False, description="fp8 matrix products (Hopper and later; native trainer, full SFT).")
    attention: Annotated[
        Attention | None,
        Called(
            plan="precision.attention",
            axolotl="attn_implementation",
            guides=("flash_attention", "xformers_attention"),
        ),
        Effect(RENAMED, AXOLOTL, given).because(
            "written as attn_implementation, and replaced by sdpa where the image lacks the kernel"
        ),
        Effect(IGNORED, KOHYA_FLUX, given).because("kohya's Flux always uses torch's sdpa"),
        Effect(RENAMED, NATIVE, one_of(Attention.FLASH_2, Attention.FLASH_3)).because(
            "where the package is missing, the native trainer uses the flash kernel behind torch's sdpa"
        ),
    ] = Field(
        default=None,
        description="Unset: flash attention if the image has it, else sdpa.",
    )
    compile_mode: Annotated[
        CompileMode | None,
        Called(plan="precision.compile_mode", axolotl="torch_compile_mode", guides="torch_compile"),
        Effect(DOUBTFUL, TEXT, given).because(
            "5 to 15 minutes before the first step for 15 to 25% afterwards: the plan leaves it out where "
            "the steps are too few to win them back, and says so"
        ),
    ] = Field(default=None, description="torch.compile. Unset: not compiled.")
    gradient_checkpointing: Annotated[
        bool | None,
        Called(
            plan="precision.gradient_checkpointing",
            axolotl="gradient_checkpointing",
            kohya="gradient_checkpointing",
            ai_toolkit="train.gradient_checkpointing",
        ),
        Effect(DOUBTFUL, TEXT, one_of(False), {"micro_batch_size": at_least(16)}).because(
            "an 8B model without it holds some 8,000 tokens per pass on 80 GB; the micro batch shrinks "
            "before this is given up"
        ),
    ] = Field(
        default=None,
        description="Recompute activations. Unset: only if memory requires it.",
    )
    fused_loss: bool = Field(default=True, description="Cross-entropy without full logits in memory.")
    liger: Annotated[
        bool | None, Effect(IGNORED, OTHER_THAN_AXOLOTL, one_of(True)).because("Axolotl's alone")
    ] = Field(
        default=False,
        description="Axolotl: Liger's kernels for norms, rotation, activations and loss. null: where GPU and "
        "model allow, except for GRPO.",
    )
    # — the data loader
    dataloader_num_workers: Annotated[
        int,
        Called(
            plan="loader.workers",
            axolotl="dataloader_num_workers",
            kohya="max_data_loader_n_workers",
            ai_toolkit="datasets[0].num_workers",
        ),
        Effect(DOUBTFUL, OTHER_THAN_NATIVE, at_least(32)).because(
            "per GPU, so four GPUs start four times as many processes of half a gigabyte; limited to the "
            "host's cores"
        ),
        Effect(IGNORED, NATIVE, above(0)).because(_ONE_THREAD),
    ] = Field(default=4, ge=0, le=1024, description="Loader processes per GPU.")
    dataloader_prefetch_factor: Annotated[int, Called(axolotl="dataloader_prefetch_factor")] = Field(
        default=2, ge=1, le=1024, description="Batches ahead per worker."
    )
    dataloader_pin_memory: Annotated[bool, Called(axolotl="dataloader_pin_memory")] = Field(
        default=True, description="Page-locked host memory."
    )
    dataloader_persistent_workers: Annotated[
        bool,
        Effect(IGNORED, NATIVE, switched_on).because(_ONE_THREAD),
        Effect(OURS, AXOLOTL, switched_on).because("Axolotl drops the key; our plugin sets it"),
    ] = Field(default=False, description="Keep workers between epochs.")
    dataloader_drop_last: Annotated[
        bool,
        Called(axolotl="dataloader_drop_last"),
        Effect(IGNORED, NATIVE, switched_on).because("the native trainer does not read it"),
        Effect(OURS, AXOLOTL._replace(rl=True), switched_on).because(
            "Axolotl ignores it for DPO and GRPO; our plugin sets it"
        ),
    ] = Field(default=False, description="Drop the last partial batch.")
    # — GPUs
    gpu_strategy: GpuStrategy = Field(default=GpuStrategy.BY_VALUE, description="How many GPUs a job gets.")
    gpus_by_size: list[GpuStep] = Field(
        default_factory=list, description="by_size: the largest step that the model exceeds, else 1 GPU."
    )
    lanes: dict[str, Lane] = Field(default_factory=dict, description="lanes: GPUs set aside, by name.")
    nodes: Annotated[int, Called(plan="gpus", guides=("num_machines", "nnodes"))] = Field(
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
    fsdp_above: Annotated[
        Params | None,
        Called(plan="parallelism", axolotl="fsdp_config"),
        Effect(DOUBTFUL, TEXT, below(14_000_000_000)).because(
            "where one GPU holds the model, LoRA's gradients are small and plain data parallelism is faster; "
            "unset it and FSDP comes in only where memory needs it"
        ),
        Effect(IGNORED, IMAGES).because("image engines know data parallelism only"),
    ] = Field(default=None, description="FSDP from this size on. Unset: if one GPU cannot hold the model.")
    fsdp_reshard_after_forward: Annotated[
        bool,
        Effect(RENAMED, AXOLOTL).because(
            'the string fsdp: "full_shard auto_wrap" is refused today; written as fsdp_version 2 with '
            "reshard_after_forward and TRANSFORMER_BASED_WRAP"
        ),
    ] = Field(default=True, description="full_shard: free layers after use.")
    fsdp_forward_prefetch: Annotated[
        bool,
        Called(guides="forward_prefetch"),
        Effect(IGNORED, AXOLOTL).because("FSDP1's flag; Axolotl drops it, FSDP2 prefetches by itself"),
    ] = Field(default=True, description="Fetch the next layer early (FSDP1).")
    fsdp_limit_all_gathers: Annotated[
        bool,
        Called(guides="limit_all_gathers"),
        Effect(IGNORED, AXOLOTL).because(
            "FSDP1's flag; Axolotl drops it, FSDP2 bounds its gathers by itself"
        ),
    ] = Field(default=True, description="Bound the gathers in flight (FSDP1).")
    fsdp_backward_prefetch: Annotated[
        BackwardPrefetch,
        Called(guides="backward_prefetch"),
        Effect(IGNORED, AXOLOTL).because(
            "FSDP1's flag; Axolotl drops it, FSDP2 prefetches backward by itself"
        ),
    ] = Field(default=BackwardPrefetch.PRE, description="Prefetch order in the backward pass (FSDP1).")
    seed: int = Field(default=42, ge=0, le=2**31 - 1, description="Random seed.")
    main_process_port: int | None = Field(
        default=None, ge=1024, le=65535, description="Launch port. Unset: any free one."
    )
    # — preference and reinforcement
    dpo_beta: Annotated[float, Called(axolotl="rl_beta")] = Field(
        default=0.1, gt=0, description="DPO's beta; validators evaluate with 0.1."
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
    resolutions: Annotated[
        list[Annotated[int, Field(ge=64, le=4096)]],
        OneOrMany(),
        Called(plan="image.resolutions", kohya="resolution", ai_toolkit="datasets[0].resolution"),
    ] = Field(
        default_factory=lambda: [1024],
        min_length=1,
        description="Images: sides of the square; ai-toolkit trains each picture at every one, kohya at the "
        "largest.",
    )
    image_repeats: int | None = Field(
        default=None, ge=1, description="Images: uses per epoch. Unset: as the dataset was prepared."
    )
    vae_batch_size: Annotated[
        int,
        Called(plan="image.vae_batch", kohya="vae_batch_size"),
        Effect(HARMFUL, KOHYA, above(16)).because(
            "32 pictures of 1024² need some 83 GB in the fp32 VAE of SDXL, for a cache that takes seconds; "
            "limited to what fits and to the number of pictures"
        ),
    ] = Field(default=4, ge=1, description="Images: batch for caching latents.")
    image_loss: Annotated[
        ImageLoss,
        Called(kohya="loss_type", ai_toolkit="train.loss_type"),
        Effect(RENAMED, KOHYA_FLUX, one_of(ImageLoss.HUBER, ImageLoss.SMOOTH_L1)).because(
            'kohya\'s default huber schedule "snr" crashes on Flux; "exponential" is written'
        ),
    ] = Field(default=ImageLoss.L2, description="Images: loss; validators score squared error.")
    huber_c: Annotated[
        float | None,
        Called(kohya="huber_c"),
        Effect(IGNORED, KOHYA, given, {"image_loss": one_of(ImageLoss.L1, ImageLoss.L2)}).because(
            "used with a huber loss only (image_loss); validators score squared error"
        ),
    ] = Field(default=None, gt=0, description="Images: for huber losses.")
    min_snr_gamma: Annotated[
        float | None,
        Called(kohya="min_snr_gamma"),
        Effect(IGNORED, KOHYA_FLUX, given).because(
            "no effect at all on Flux: results are identical bit by bit"
        ),
        Effect(DOUBTFUL, SDXL, at_least(10)).because(
            "nearly off: at 24 it touches 42 of 1000 timesteps, the paper's 5 touches 147"
        ),
    ] = Field(default=None, gt=0, description="SDXL: min-SNR weighting.")
    noise_offset: Annotated[float | None, Called(kohya="noise_offset", ai_toolkit="train.noise_offset")] = (
        Field(default=None, ge=0, description="Images: noise offset.")
    )
    scale_weight_norms: Annotated[float | None, Called(kohya="scale_weight_norms")] = Field(
        default=None, gt=0, description="Images: cap on LoRA weight norms."
    )
    caption_dropout: Annotated[
        float, Called(kohya="caption_dropout_rate", ai_toolkit="datasets[0].caption_dropout_rate")
    ] = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Images: share of captions left out; half of a score is the empty text's.",
    )
    guidance_scale: Annotated[float | None, Called(kohya="guidance_scale")] = Field(
        default=None, ge=0, description="Flux: guidance during training."
    )
    timestep_sampling: Annotated[
        str | None, Called(kohya="timestep_sampling", ai_toolkit="train.timestep_type")
    ] = Field(default=None, description="Flow models: how timesteps are drawn.")
    flow_shift: Annotated[float | None, Called(kohya="discrete_flow_shift")] = Field(
        default=None, gt=0, description="Flux: discrete_flow_shift."
    )
    quantize_base: Annotated[bool | None, Called(ai_toolkit="model.quantize")] = Field(
        default=None, description="ai-toolkit: 8-bit frozen weights. Unset: only if memory requires it."
    )
    conv_rank: Annotated[
        int | None,
        Called(kohya="network_args", ai_toolkit="network.conv"),
        Effect(IGNORED, AI_TOOLKIT, given).because("the transformers of these models have no convolutions"),
    ] = Field(default=None, ge=1, description="Images: rank for convolutions. Unset: none.")
    conv_alpha: Annotated[float | None, Called(ai_toolkit="network.conv_alpha")] = Field(
        default=None, gt=0, description="Images: alpha for convolutions."
    )
