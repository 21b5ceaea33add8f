"""The keys of profiles: what other tools call them, and where a stray one belongs."""

from __future__ import annotations

from core.layers.nearest import Keys
from core.profile.schema import Profile

#: What other tools and the seeds call our keys.
SYNONYMS: dict[str, str] = {
    "network_dim": "lora_r",
    "lora_rank": "lora_r",
    "rank": "lora_r",
    "r": "lora_r",
    "network_alpha": "lora_alpha",
    "alpha": "lora_alpha",
    "train_batch_size": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "batch_size": "effective_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "epoch": "num_epochs",
    "epochs": "num_epochs",
    "max_train_epochs": "num_epochs",
    "max_train_steps": "max_steps",
    "lr": "learning_rate",
    "unet_lr": "learning_rate",
    "max_memory_MB": "gpu_memory",
    "max_memory": "gpu_memory",
    "scheduler": "lr_scheduler",
    "lr_scheduler_num_cycles": "lr_cycles",
    "loss_type": "image_loss",
    "flash_attention": "attention",
    "xformers_attention": "attention",
    "attn_implementation": "attention",
    "torch_compile": "compile_mode",
    "optimizer_type": "optimizer",
    "ema_update_every": "ema_every",
    "shm_size": "shm",
    "max_seq_length": "sequence_len",
    "clip_grad_norm": "max_grad_norm",
    "backward_prefetch": "fsdp_backward_prefetch",
    "forward_prefetch": "fsdp_forward_prefetch",
    "limit_all_gathers": "fsdp_limit_all_gathers",
}

KEYS = Keys(Profile, SYNONYMS, [(), ("targets",), ("limits",), ("container",)])
keys_at = KEYS.keys_at
advice = KEYS.advice
