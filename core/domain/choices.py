"""The closed sets of names that profiles choose from and plans hold."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Why this task cannot be trained on this hardware within these limits."""

    NO_TIME = "no_time"  # too few hours for anything at all, zero included
    TOO_SLOW = "too_slow"  # the smallest training worth submitting would end after the reserve begins
    NO_MEMORY = "no_memory"  # does not fit the memory budget after every concession
    IMPOSSIBLE_LIMIT = "impossible_limit"  # a limit of the profile leaves nothing to plan with
    UNKNOWN_SIZE = "unknown_size"  # the size of the model is not known
    ABSURD_SIZE = "absurd_size"  # a parameter count that no model has
    EMPTY_DATASET = "empty_dataset"
    ROWS_TOO_LONG = "rows_too_long"  # no row is left after the sequence limit
    NO_GPU = "no_gpu"  # fewer GPUs than the profile's limits demand
    NO_ENGINE = "no_engine"  # no engine trains this kind of task or model


class Engine(StrEnum):
    """The recipe that trains."""

    AXOLOTL = "axolotl"  # text
    KOHYA = "kohya"  # images; which engine trains which family: `IMAGE_FAMILIES`
    AI_TOOLKIT = "ai-toolkit"  # images
    NATIVE = "native"  # our own trainer on torch, accelerate, peft and torchao
    PICTURES = "pictures"  # images, in tournaments: our own trainer in the evaluator's ComfyUI


class Method(StrEnum):
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"  # 4-bit base: only where bf16 does not fit


class Parallelism(StrEnum):
    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"


class Optimizer(StrEnum):
    """Names as Axolotl spells them; the renderers translate. Each runs without packages beyond our images."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAMW_BNB_8BIT = "adamw_bnb_8bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADAMW_32BIT = "paged_adamw_32bit"
    ADAFACTOR = "adafactor"
    LION_8BIT = "lion_8bit"
    MUON = "muon"
    PRODIGY = "prodigy"  # image engines only


class LrSchedule(StrEnum):
    """The course of the learning rate. WSD is constant with a cooldown at the end."""

    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    ONE_CYCLE = "one_cycle"
    WSD = "warmup_stable_decay"


class Attention(StrEnum):
    """Names as transformers and Axolotl spell them."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLASH_2 = "flash_attention_2"
    FLASH_3 = "flash_attention_3"
    FLEX = "flex_attention"


class CompileMode(StrEnum):
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"


class GpuStrategy(StrEnum):
    """The rule by which a plan picks its GPUs among those available."""

    BY_VALUE = "by_value"  # what the training gains, less what the GPU-hours are worth to others
    AUTO = "auto"  # the fewest that fit in memory and in time
    ALL = "all"  # every GPU of the host, for one job
    BY_SIZE = "by_size"  # by parameter count, see `gpus_by_size`
    LANES = "lanes"  # fixed sets of GPUs per size band, see `lanes`
    TOURNAMENT = "tournament"  # as validators hand out machines: by effective size


class BackwardPrefetch(StrEnum):
    """FSDP1's setting; FSDP2 has no such key and prefetches by itself."""

    PRE = "BACKWARD_PRE"
    POST = "BACKWARD_POST"
    NONE = "NO_PREFETCH"


class EvalMetric(StrEnum):
    VALIDATOR = "validator"  # the number by which validators rank, recomputed on held-out rows
    LOSS = "loss"  # the engine's own evaluation loss


class ImageLoss(StrEnum):
    L1 = "l1"
    L2 = "l2"
    HUBER = "huber"
    SMOOTH_L1 = "smooth_l1"
