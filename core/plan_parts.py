"""The parts of a training plan, each the numbers of one subject."""

from __future__ import annotations

from pydantic import Field

from core.choices import (
    Attention,
    BackwardPrefetch,
    CompileMode,
    EvalMetric,
    ImageLoss,
    Optimizer,
    Schedule,
)
from core.facts import Record
from core.tasks import ImageModelType, TaskType


class TaskSpec(Record):
    """What was asked for."""

    task_type: TaskType
    #: From the moment of planning to the deadline.
    hours: float = Field(ge=0)
    image_type: ImageModelType | None = None
    task_id: str | None = None
    #: Tournament tasks may score eval_loss + coefficient · KL to the base model.
    kl_coefficient: float | None = None
    trigger_word: str | None = None


class AdapterPlan(Record):
    """LoRA, in any of its dresses. `None` in the plan for a full fine-tune."""

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    dropout: float = Field(ge=0, le=1)
    #: Empty: every linear layer.
    target_modules: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False
    loraplus_lr_ratio: float | None = None
    #: Image models: whether the text encoders carry an adapter too.
    text_encoder: bool = False
    #: Adapter weights in fp32 under bf16 autocast (PEFT's default), or in bf16.
    fp32: bool = True
    #: Of all adapters together.
    params: int = Field(ge=0)


class FsdpPlan(Record):
    """Version 2 is what Axolotl renders; the other three are FSDP1's and kept to be able to say so."""

    reshard_after_forward: bool = True
    offload_params: bool = False
    #: The decoder layer's class; empty: found by the engine.
    wrap_class: str = ""
    forward_prefetch: bool = True
    limit_all_gathers: bool = True
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE


class BatchPlan(Record):
    """Sequences per step (DPO: pairs, GRPO: completions, images: pictures)."""

    micro: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    world_size: int = Field(ge=1)
    eval_micro: int = Field(default=1, ge=1)

    @property
    def effective(self) -> int:
        return self.micro * self.accumulation * self.world_size


class SequencePlan(Record):
    """Text: how rows become sequences."""

    length: int = Field(ge=1)
    packing: bool = False
    group_by_length: bool = False
    pad_to_length: bool = False
    #: DPO and GRPO: the prompt keeps its last so many tokens.
    prompt_limit: int | None = None
    #: GRPO: tokens generated at most.
    completion_limit: int | None = None
    #: Part of the rows that is longer than `length` and is dropped by the engine.
    dropped_share: float = Field(default=0.0, ge=0, le=1)
    #: Trained sequences per epoch, after packing and dropping.
    per_epoch: int = Field(ge=0)
    #: Tokens per epoch that the GPUs work through, padding included.
    tokens_per_epoch: int = Field(ge=0)


class LrStage(Record):
    """One of several stages of the learning rate: a share of the training and a factor on the peak."""

    share: float = Field(gt=0, le=1)
    factor: float = Field(gt=0)


class OptimizerPlan(Record):
    name: Optimizer
    learning_rate: float = Field(gt=0)
    schedule: Schedule
    #: Restarts; 1 for every other schedule.
    cycles: int = Field(default=1, ge=1)
    #: The end of the decay as a share of the peak.
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    #: WSD: the last part of the training that decays.
    cooldown_share: float = Field(default=0.0, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    stages: tuple[LrStage, ...] = ()
    #: Image models: the text encoders' own rate.
    text_encoder_lr: float | None = None
    #: Full fine-tune: keep fp32 master weights beside bf16 ones.
    fp32_master: bool = False


class StepsPlan(Record):
    """How long, and what happens on the way."""

    epochs: float = Field(ge=0)
    #: Optimizer steps of one epoch.
    per_epoch: int = Field(ge=0)
    #: Optimizer steps of the whole training; the engines stop here.
    total: int = Field(ge=0)
    #: Steps of the whole wish; more than `total` when the clock cut them. None: the same.
    wanted: int | None = Field(default=None, ge=0)
    #: Every so many steps; a multiple of each other: saves fall on evaluations.
    eval_every: int = Field(ge=1)
    save_every: int = Field(ge=1)
    log_every: int = Field(default=1, ge=1)
    #: Rows (images: pictures) held out of the training for evaluation.
    eval_rows: int = Field(default=0, ge=0)
    eval_metric: EvalMetric = EvalMetric.LOSS
    keep_checkpoints: int = Field(default=2, ge=1)
    #: Evaluations without a better one before the training stops; None: never.
    early_stopping_patience: int | None = None
    load_best: bool = True


class PrecisionPlan(Record):
    """Number formats and kernels."""

    bf16: bool = True
    fp16: bool = False
    tf32: bool = True
    fp8: bool = False
    attention: Attention = Attention.SDPA
    #: None: not compiled.
    compile_mode: CompileMode | None = None
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    #: Cross-entropy without the full logits in memory (chunked, fused or cut).
    fused_loss: bool = True
    liger: bool = False
    #: Triton kernels of Axolotl for LoRA layers.
    lora_kernels: bool = True
    neftune_alpha: float | None = None


class LoaderPlan(Record):
    workers: int = Field(default=2, ge=0)
    pin_memory: bool = True
    #: None exactly when there are no workers.
    prefetch_factor: int | None = 2
    persistent_workers: bool = False
    drop_last: bool = False


class EmaPlan(Record):
    decay: float = Field(gt=0, lt=1)
    every: int = Field(default=1, ge=1)


class PlateauPlan(Record):
    """The dynamic learning rate: lower on a plateau, a little higher while the loss falls; at evaluations."""

    factor: float = Field(gt=0, lt=1)
    growth: float = Field(default=1.0, ge=1)
    patience: int = Field(default=2, ge=1)


class LrSearchPlan(Record):
    """Short trainings at other learning rates, before the real one."""

    #: Part of the training time that they may take together.
    share: float = Field(gt=0, le=0.2)
    #: Candidates are at most this many times the planned rate, and at least its so-manieth part.
    most: float = Field(default=10.0, ge=1, le=100)
    #: A limit of the profile that lies below that, upwards.
    highest: float | None = Field(default=None, gt=0)


class DpoPlan(Record):
    beta: float = Field(default=0.1, gt=0)
    #: Reference log-probs computed once before the training instead of in each step.
    precompute_reference: bool = False


class GrpoPlan(Record):
    beta: float = Field(default=0.0, ge=0)
    generations: int = Field(default=8, ge=2)
    temperature: float = Field(default=0.9, gt=0)
    top_k: int | None = 50
    vllm: bool = False
    #: FSDP without vLLM: the weights of so many layers are gathered for a whole generation, and the others'
    #: anew for every token.
    whole_layers: int = Field(default=0, ge=0)
    #: Share of the GPU that vLLM takes when it lives beside the training.
    vllm_memory_share: float = Field(default=0.3, gt=0, lt=1)


class ImagePlan(Record):
    """What only image training knows. Keys are kohya's; the other engine translates."""

    resolution: int = Field(default=1024, ge=64)
    repeats: int = Field(default=1, ge=1)
    vae_batch: int = Field(default=4, ge=1)
    loss: ImageLoss = ImageLoss.L2
    huber_c: float | None = None
    min_snr_gamma: float | None = None
    noise_offset: float | None = None
    scale_weight_norms: float | None = None
    caption_dropout: float = Field(default=0.0, ge=0, le=1)
    #: Flux and its kin.
    guidance_scale: float | None = None
    timestep_sampling: str | None = None
    flow_shift: float | None = None
    cache_latents: bool = True
    cache_text: bool = False
    quantize_base: bool = False
    #: Files written on the way, every so many epochs (kohya) or steps (ai-toolkit: `steps.save_every`).
    save_every_epochs: int = Field(default=10, ge=1)
    conv_rank: int | None = None
    conv_alpha: float | None = None


class ContainerPlan(Record):
    """The walls around the run. Missing limits mean the engine's own."""

    memory_bytes: int | None = None
    shm_bytes: int | None = None
    #: As docker's cpuset: "0-63".
    cpus: str | None = None


class LaunchPlan(Record):
    """`accelerate launch`'s numbers. The port is chosen free at launch; a fixed one is a wish."""

    processes: int = Field(ge=1)
    machines: int = Field(default=1, ge=1)
    machine_rank: int = Field(default=0, ge=0)
    port: int | None = Field(default=None, ge=1, le=65535)
    #: No other job may share these GPUs: one ran out of memory beside a neighbour.
    exclusive: bool = False


class Reason(Record):
    """Why a number is what it is."""

    text: str
    #: "h100x4.yaml:12", "planner", "engine", "model", …
    source: str = "planner"
