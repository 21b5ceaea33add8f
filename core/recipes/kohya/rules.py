"""Settings that sd-scripts accepts in a TOML file and then ignores or fails on.

Its argument parser checks neither types nor choices nor unknown keys in a file, so this and the key table
are the only check before the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.domain.choices import Engine
from core.domain.errors import Problem
from core.recipes.keys import DROPPED_KOHYA
from core.recipes.schema import (
    ConfigMapping,
    check_choice,
    check_range,
    engine_table,
    invalid,
    missing_keys,
    shown_value,
    unknown_choice,
)

KOHYA_HINTS = {**DROPPED_KOHYA, "rank": "network_dim", "alpha": "network_alpha"}

#: Required keys, and what happens without each: most of it late, some of it after the training.
_NEEDED = {
    "pretrained_model_name_or_path": "the model is opened first",
    "train_data_dir": "sd-scripts would end with exit code 0 and no file",
    "resolution": "the dataset is refused",
    "network_module": "there is nothing to train",
    "network_dim": "the rank would be 4",
    "output_dir": "the training would be lost at the save",
    "output_name": "validators look for last.safetensors",
}
_NEEDED_BY_FLUX = ("clip_l", "t5xxl", "ae")
_BUCKET_KEYS = ("bucket_no_upscale", "min_bucket_reso", "max_bucket_reso")
_NO_EFFECT_ON_FLUX = ("min_snr_gamma", "debiased_estimation_loss", "scale_v_pred_loss_like_noise_pred")
_HUBER = ("huber", "smooth_l1")


def kohya_rules(config: ConfigMapping, gpus: int, flux: bool) -> Iterator[Problem]:
    """Yield what is wrong with a combination of valid keys."""
    for key, why in _NEEDED.items():
        yield from missing_keys(config, [key], why)
    if flux:
        yield from missing_keys(config, _NEEDED_BY_FLUX, "Flux opens it before anything else")
    yield from _numbers(config)
    yield from _lists(config)
    yield from _optimizer(config, gpus)
    yield from _hub(config)
    yield from _data(config)
    yield from _captions(config, flux)
    yield from _loss(config, flux)
    yield from _precision(config)


def _numbers(config: ConfigMapping) -> Iterator[Problem]:
    for key in ("network_dim", "network_alpha", "train_batch_size", "max_train_steps", "max_train_epochs"):
        yield from check_range(config, key, above=0)
    for key in ("vae_batch_size", "gradient_accumulation_steps", "learning_rate", "save_every_n_epochs"):
        yield from check_range(config, key, above=0)
    for key in ("max_grad_norm", "noise_offset", "max_data_loader_n_workers", "unet_lr"):
        yield from check_range(config, key, least=0)
    yield from check_range(config, "caption_dropout_rate", least=0, below=1.000001)
    yield from check_range(config, "network_dropout", least=0, below=1)
    if config.get("max_train_epochs") and config.get("max_train_steps"):
        yield invalid(config, "max_train_epochs", "wins over max_train_steps")


def _lists(config: ConfigMapping) -> Iterator[Problem]:
    """The TOML reader of sd-scripts refuses a list that mixes integers and floats."""
    for key, value in config.items():
        if isinstance(value, list) and len({type(item) for item in value}) > 1:
            yield Problem(key, shown_value(value), "mixes types; write every number with a decimal point")
    for key in ("optimizer_args", "lr_scheduler_args", "network_args"):
        for item in config.get(key) or []:
            if isinstance(item, str) and "=" not in item:
                yield Problem(key, shown_value(item), "must be written name=value")


def _optimizer(config: ConfigMapping, gpus: int) -> Iterator[Problem]:
    facts = engine_table(Engine.KOHYA).facts
    name, schedule = str(config.get("optimizer_type") or ""), config.get("lr_scheduler", "constant")
    if name and "." not in name and name.lower() not in facts["optimizers"]:
        yield unknown_choice("optimizer_type", name, facts["optimizers"], also=", nor module.Class")
    if not str(schedule).startswith("adafactor"):
        yield from check_choice({"lr_scheduler": schedule}, "lr_scheduler", facts["schedulers"])
    warmup = config.get("lr_warmup_steps") or 0
    if schedule == "constant" and warmup:
        yield invalid(config, "lr_warmup_steps", "is an error with constant; constant_with_warmup takes it")
    if isinstance(warmup, int) and warmup and gpus > 1:
        rule = f"lasts {warmup}/{gpus} steps on {gpus} GPUs; a share under 1 is right on any number"
        yield invalid(config, "lr_warmup_steps", rule)
    arguments = " ".join(map(str, config.get("optimizer_args") or []))
    if name.lower() == "adafactor" and "relative_step=False" not in arguments.replace(" ", ""):
        yield Problem(
            "optimizer_args", shown_value(arguments), "Adafactor drops every rate without relative_step=False"
        )
    if config.get("fused_backward_pass"):
        yield Problem("fused_backward_pass", "true", "has no effect on a network's training")


def _hub(config: ConfigMapping) -> Iterator[Problem]:
    """An empty repository id counts as set: two logged errors per checkpoint."""
    for key in config:
        if key.startswith("huggingface_") or key in ("async_upload", "save_state_to_huggingface"):
            yield invalid(config, key, "must be left out, even empty: the daemon publishes")


def _buckets(config: ConfigMapping) -> Iterator[Problem]:
    """The resolution is `1024,1024` or one number."""
    sides = [int(side) for side in str(config.get("resolution", "")).split(",") if side.strip().isdigit()]
    least, most = config.get("min_bucket_reso", 256), config.get("max_bucket_reso", 1024)
    if sides and isinstance(least, int) and min(sides) < least:
        rule = f"is above the resolution of {min(sides)}: the dataset is refused"
        yield Problem("min_bucket_reso", shown_value(least), rule)
    if sides and isinstance(most, int) and max(sides) > most:
        rule = f"is below the resolution of {max(sides)}: the dataset is refused"
        yield Problem("max_bucket_reso", shown_value(most), rule)


def _data(config: ConfigMapping) -> Iterator[Problem]:
    if config.get("caption_extension", ".caption") != ".txt":
        yield invalid(config, "caption_extension", "captions are in .txt files")
    for key in _BUCKET_KEYS:
        if key in config and not config.get("enable_bucket"):
            yield invalid(config, key, "has no effect without enable_bucket")
    if config.get("enable_bucket"):
        yield from _buckets(config)
    workers = config.get("max_data_loader_n_workers", 8)
    if config.get("persistent_data_loader_workers") and workers == 0:
        yield Problem(
            "persistent_data_loader_workers", "true", "is an error with max_data_loader_n_workers = 0"
        )
    for key in ("color_aug", "random_crop"):
        if config.get(key) and (config.get("cache_latents") or config.get("cache_latents_to_disk")):
            yield Problem(key, "true", "excludes cache_latents")
    if config.get("max_token_length") not in (None, 150, 225):
        yield invalid(config, "max_token_length", "is 150 or 225; left out, 75")


def _captions(config: ConfigMapping, flux: bool) -> Iterator[Problem]:
    cached = config.get("cache_text_encoder_outputs") or config.get("cache_text_encoder_outputs_to_disk")
    if not cached:
        return
    if not flux and not config.get("network_train_unet_only"):
        yield Problem("cache_text_encoder_outputs", "true", "needs network_train_unet_only")
    for key in ("caption_dropout_rate", "caption_tag_dropout_rate", "shuffle_caption"):
        if config.get(key):
            yield invalid(config, key, "is an error with cache_text_encoder_outputs")
    if flux and config.get("sample_prompts") == "":
        yield Problem("sample_prompts", '""', "crashes with cache_text_encoder_outputs; leave it out")
    if "train_t5xxl=True" in " ".join(map(str, config.get("network_args") or [])).replace(" ", ""):
        yield Problem("network_args", "train_t5xxl=True", "excludes cache_text_encoder_outputs")


def _loss(config: ConfigMapping, flux: bool) -> Iterator[Problem]:
    loss = config.get("loss_type", "l2")
    for key in ("huber_c", "huber_schedule", "huber_scale"):
        if key in config and loss not in _HUBER:
            yield invalid(config, key, f"has no effect with loss_type {loss}")
    if not flux:
        return
    for key in _NO_EFFECT_ON_FLUX:
        if config.get(key):
            yield invalid(config, key, "has no effect on Flux")
    if loss in _HUBER and config.get("huber_schedule", "snr") == "snr":
        rule = "crashes Flux at the first step with a huber loss; exponential or constant"
        yield Problem("huber_schedule", '"snr"', rule)
    for key in ("min_timestep", "max_timestep", "clip_skip"):
        if config.get(key):
            yield invalid(config, key, "has no effect on Flux")


def _precision(config: ConfigMapping) -> Iterator[Problem]:
    precision = config.get("mixed_precision", "no")
    for key in ("fp8_base", "fp8_base_unet"):
        if config.get(key) and precision not in ("bf16", "fp16"):
            yield Problem(key, "true", "needs mixed_precision bf16 or fp16")
    for key, needed in (("full_bf16", "bf16"), ("full_fp16", "fp16")):
        if config.get(key) and precision != needed:
            yield Problem(key, "true", f"needs mixed_precision {needed}")
    if config.get("cpu_offload_checkpointing") and config.get("blocks_to_swap"):
        yield Problem("cpu_offload_checkpointing", "true", "excludes blocks_to_swap")
    if config.get("xformers") and config.get("sdpa"):
        yield Problem("xformers", "true", "wins over sdpa and needs its own package")
