"""The closed sets of names that profiles choose from and plans hold."""

from __future__ import annotations

from enum import StrEnum


class Engine(StrEnum):
    """What trains."""

    AXOLOTL = "axolotl"  # text
    KOHYA = "kohya"  # SDXL and Flux
    AI_TOOLKIT = "ai-toolkit"  # z-image, qwen-image, ideogram4, krea2; Flux too
    NATIVE = "native"  # our own trainer on torch, accelerate, peft and torchao


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


class Schedule(StrEnum):
    """How the learning rate moves. WSD is constant with a cooldown at the end."""

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
    """How a plan picks its GPUs from those that are there."""

    AUTO = "auto"  # the fewest that fit in memory and in time
    ALL = "all"  # every GPU of the host, for one job
    BY_SIZE = "by_size"  # by parameter count, see `gpus_by_size`
    LANES = "lanes"  # fixed sets of cards per size band, see `lanes`
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
