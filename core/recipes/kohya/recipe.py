"""An SDXL or Flux plan as a TOML file for sd-scripts.

What sd-scripts names differently, ignores or cannot do is translated here, and every translation leaves a
note.

TOML is written here because the standard library only reads it. sd-scripts reads it with the old `toml`
package, so only what both agree on is written: flat tables of scalars and lists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from core.domain.choices import Engine, ImageLoss, LrSchedule, Method, Optimizer
from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES, families_of
from core.planning.plan import AdapterPlan, ImagePlan, TrainingPlan
from core.profile.declare import NameSystem
from core.profile.schema import FIELD_NAMES
from core.profile.targets import Targets
from core.recipes.base import EngineConfig, Recipe, RunInputs, load_templates, overlay, unsupported_target
from core.recipes.keys import translated_kohya

#: The latent cache takes seconds; a large batch there only costs memory, 2.6 GB per picture in fp32.
_MOST_VAE_BATCH = 8
#: The templates' buckets.
MIN_BUCKET, MAX_BUCKET, BUCKET_STEP = 256, 2048, 64

_OPTIMIZERS = {
    Optimizer.ADAMW_TORCH: "AdamW",
    Optimizer.ADAMW_TORCH_FUSED: "AdamW",
    Optimizer.ADAMW_BNB_8BIT: "AdamW8bit",
    Optimizer.ADAMW_TORCH_8BIT: "AdamW8bit",
    Optimizer.PAGED_ADAMW_8BIT: "PagedAdamW8bit",
    Optimizer.PAGED_ADAMW_32BIT: "PagedAdamW32bit",
    Optimizer.ADAFACTOR: "Adafactor",
    Optimizer.LION_8BIT: "Lion8bit",
    Optimizer.PRODIGY: "Prodigy",
}

KohyaPart = Callable[[TrainingPlan, ImagePlan, RunInputs, list[str]], EngineConfig]


def is_flux(plan: TrainingPlan) -> bool:
    return plan.task.image_type is ImageModelType.FLUX


def kohya_recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    """Make the configuration, with its template, the origins of its values, and notes."""
    image_type = plan.task.image_type
    if image_type not in families_of(Engine.KOHYA) or plan.image is None:
        kind = image_type or plan.task.task_type
        raise unsupported_target(
            plan.profile.name, "engine", "kohya", f"trains sdxl and flux, the task is {kind}"
        )
    if plan.method is Method.FULL:
        raise unsupported_target(
            plan.profile.name, "method", "full", "sd-scripts' network trainers make adapters: method: lora"
        )
    template = load_templates(IMAGE_FAMILIES[image_type].template(Engine.KOHYA))
    notes: list[str] = []
    config = template
    for part in _PARTS:
        config = overlay(config, part(plan, plan.image, inputs, notes))
    raw, raw_notes = translated_kohya(plan.engine_config)
    return Recipe(
        overlay(config, raw),
        template,
        FIELD_NAMES[NameSystem.KOHYA],
        frozenset(raw),
        tuple(notes + raw_notes),
    )


def _files(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    flux = inputs.image if is_flux(plan) else None
    return {
        "pretrained_model_name_or_path": inputs.model_path,
        "train_data_dir": inputs.train_path,
        "output_dir": inputs.output_dir,
        "clip_l": flux.clip_l if flux else None,
        "t5xxl": flux.t5xxl if flux else None,
        "ae": flux.ae if flux else None,
        "resume": inputs.resume_from,
        "seed": _seed(plan, notes),
    }


def _seed(plan: TrainingPlan, notes: list[str]) -> int | None:
    """The seed, or None on several GPUs, where every process would draw the same noise."""
    if plan.launch.processes == 1:
        return plan.targets.seed
    notes.append("seed: left out on several GPUs, where it would give every one of them the same noise")
    return None


def _adapter(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    adapter, targets = plan.adapter, plan.targets
    assert adapter is not None  # a full fine-tune was refused
    for asked, name in ((targets.rslora, "rslora"), (targets.dora, "dora")):
        if asked:
            notes.append(f"{name}: sd-scripts' LoRA has none, so it is left out")
    keys: EngineConfig = {
        "network_dim": adapter.rank,
        "network_alpha": float(adapter.alpha),
        "network_dropout": adapter.dropout or None,
        "network_args": _network_args(targets) or None,
    }
    return keys | _rates(plan, adapter, notes)


def _network_args(targets: Targets) -> list[str]:
    arguments = []
    if targets.conv_rank is not None:
        alpha = targets.conv_alpha if targets.conv_alpha is not None else targets.conv_rank
        arguments += [f"conv_dim={targets.conv_rank}", f"conv_alpha={alpha:g}"]
    if targets.loraplus_lr_ratio is not None:
        arguments.append(f"loraplus_lr_ratio={targets.loraplus_lr_ratio:g}")
    return arguments


def _rates(plan: TrainingPlan, adapter: AdapterPlan, notes: list[str]) -> EngineConfig:
    """Flux is evaluated with the model's part of the adapter alone, SDXL with the text encoders' too."""
    rate, encoder_rate = plan.optimizer.learning_rate, plan.optimizer.text_encoder_lr
    keys: EngineConfig = {"learning_rate": rate, "unet_lr": rate}
    if not adapter.text_encoder:
        return keys | {"network_train_unet_only": True}
    if encoder_rate is None:
        encoder_rate = rate
    if is_flux(plan):
        notes.append("text_encoder_lr: the evaluation of Flux may load the model's part of the adapter only")
    return keys | {"text_encoder_lr": [float(encoder_rate)] * 2}


def _batch(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    if image.vae_batch > _MOST_VAE_BATCH:
        notes.append(
            f"vae_batch_size {image.vae_batch}: the batch of the latent cache alone, which takes seconds; "
            f"{_MOST_VAE_BATCH} is written, more only costs memory"
        )
    workers = plan.loader.workers
    return {
        "resolution": f"{image.resolution},{image.resolution}",
        **_buckets(image.resolution),
        "train_batch_size": plan.batch.micro,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "vae_batch_size": min(image.vae_batch, _MOST_VAE_BATCH),
        "max_data_loader_n_workers": workers,
        "persistent_data_loader_workers": plan.loader.persistent_workers and workers > 0,
        # In memory every process would encode every image; on disk they share the work.
        "cache_latents": image.cache_latents,
        "cache_latents_to_disk": image.cache_latents and plan.launch.processes > 1,
        **_captions(plan, image, notes),
    }


def _buckets(resolution: int) -> EngineConfig:
    """sd-scripts refuses a dataset whose resolution is outside its buckets."""
    keys: EngineConfig = {}
    if resolution < MIN_BUCKET:
        keys["min_bucket_reso"] = max(resolution // BUCKET_STEP * BUCKET_STEP, BUCKET_STEP)
    if resolution > MAX_BUCKET:
        keys["max_bucket_reso"] = -(-resolution // BUCKET_STEP) * BUCKET_STEP
    return keys


def _captions(plan: TrainingPlan, image: ImagePlan, notes: list[str]) -> EngineConfig:
    trained = plan.adapter is not None and plan.adapter.text_encoder
    if image.cache_text and (image.caption_dropout or trained):
        why = "captions are dropped at random" if image.caption_dropout else "the text encoders are trained"
        notes.append(f"cache_text: off, {why}")
    cached = image.cache_text and not image.caption_dropout and not trained
    return {
        "caption_dropout_rate": float(image.caption_dropout) or None,
        "cache_text_encoder_outputs": True if cached else None,
    }


def _optimizer(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    optimizer = plan.optimizer
    if optimizer.name not in _OPTIMIZERS:
        raise unsupported_target(
            plan.profile.name, "optimizer", optimizer.name, "sd-scripts has no such optimizer"
        )
    arguments = [f"weight_decay={optimizer.weight_decay:g}"]
    if optimizer.name is Optimizer.ADAFACTOR:
        # By default it finds its own rate and drops the configured one.
        arguments += ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
    elif "adamw" in optimizer.name or optimizer.name is Optimizer.PRODIGY:
        arguments.append(f"betas=({plan.targets.adam_beta1:g},{plan.targets.adam_beta2:g})")
    return {
        "optimizer_type": _OPTIMIZERS[optimizer.name],
        "optimizer_args": arguments,
        "max_grad_norm": optimizer.max_grad_norm,
        **_schedule(plan, notes),
    }


def _schedule(plan: TrainingPlan, notes: list[str]) -> EngineConfig:
    optimizer, name = plan.optimizer, plan.optimizer.schedule
    keys: EngineConfig = {}
    if name is LrSchedule.ONE_CYCLE:
        notes.append("lr_scheduler one_cycle: sd-scripts has none of that name; cosine is written")
        name = LrSchedule.COSINE
    if name is LrSchedule.CONSTANT and optimizer.warmup_steps:
        name = LrSchedule.CONSTANT_WITH_WARMUP  # constant with a warmup is an error
    if name is LrSchedule.COSINE and optimizer.min_lr_ratio:
        name = LrSchedule.COSINE_WITH_MIN_LR
    if name is LrSchedule.COSINE_WITH_RESTARTS:
        keys["lr_scheduler_num_cycles"] = optimizer.cycles
    if name is LrSchedule.WSD:
        keys["lr_decay_steps"] = float(optimizer.cooldown_share)
    if name in (LrSchedule.COSINE_WITH_MIN_LR, LrSchedule.WSD):
        keys["lr_scheduler_min_lr_ratio"] = float(optimizer.min_lr_ratio)
    for asked, what in (
        (optimizer.stages, "lr_stages"),
        (plan.plateau, "plateau_factor"),
        (plan.ema, "ema_decay"),
    ):
        if asked:
            notes.append(f"{what}: sd-scripts has nothing like it, so it is left out")
    return {"lr_scheduler": str(name), "lr_warmup_steps": _warmup(plan) or None, **keys}


def _warmup(plan: TrainingPlan) -> float:
    """The warm-up as a share of the steps: a whole number would be divided by the number of processes."""
    return min(0.999, round(plan.optimizer.warmup_steps / max(1, plan.steps.total), 6))


def _steps(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    """Files by epochs, never by steps: validators do not recognise the names of step files. sd-scripts itself
    multiplies the number to keep by the epochs between two files."""
    if plan.steps.early_stopping_patience:
        notes.append(
            "early_stopping_patience: sd-scripts does not evaluate; the trainer picks among the files"
        )
    return {
        "max_train_steps": plan.steps.total,
        "save_every_n_epochs": image.save_every_epochs,
        "save_last_n_epochs": plan.steps.keep_checkpoints,
    }


def _precision(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    precision = plan.precision
    mixed = "bf16" if precision.bf16 else "fp16" if precision.fp16 else "no"
    if plan.gpus.is_cpu and mixed != "no":
        notes.append(f"{mixed}: off, the plan has no GPU")
        mixed = "no"
    compiled = precision.compile_mode is not None
    return {
        "mixed_precision": mixed,
        "fp8_base": True if image.quantize_base and mixed != "no" else None,
        "gradient_checkpointing": precision.gradient_checkpointing,
        "torch_compile": True if compiled else None,
        "dynamo_backend": "inductor" if compiled else None,
    }


def _loss(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    targets = plan.targets
    huber = targets.image_loss in (ImageLoss.HUBER, ImageLoss.SMOOTH_L1)
    flux = is_flux(plan)
    if targets.huber_c is not None and not huber:
        notes.append(f"huber_c: only read with a huber loss, the loss is {targets.image_loss}")
    if targets.min_snr_gamma is not None and flux:
        notes.append("min_snr_gamma: has no effect on Flux, so it is left out")
    return {
        "loss_type": str(targets.image_loss),
        "huber_c": targets.huber_c if huber else None,
        # The default, snr, crashes Flux at the first step.
        "huber_schedule": "exponential" if huber and flux else None,
        "min_snr_gamma": None if flux else targets.min_snr_gamma,
        "noise_offset": targets.noise_offset or None,
        "scale_weight_norms": targets.scale_weight_norms,
        **(_flow(targets) if flux else {}),
    }


def _flow(targets: Targets) -> EngineConfig:
    """The template has Flux's own values; a target that is set wins."""
    keys: EngineConfig = {
        "guidance_scale": targets.guidance_scale,
        "timestep_sampling": targets.timestep_sampling,
        "discrete_flow_shift": targets.flow_shift,
    }
    return {key: value for key, value in keys.items() if value is not None}


_PARTS: tuple[KohyaPart, ...] = (_files, _adapter, _batch, _optimizer, _steps, _precision, _loss)


def dump_toml(config: Mapping[str, Any]) -> str:
    """Write one `key = value` per line. `TypeError` for what a flat table cannot hold."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in config.items())


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _toml_number(value)
    if isinstance(value, str):
        return _toml_text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    raise TypeError(f"{value!r} cannot be written to a flat TOML table")


def _toml_number(value: float) -> str:
    """Always with a point: `1e-05` is a float in TOML, but not to every reader."""
    if not math.isfinite(value):
        raise TypeError(f"{value!r} is not a finite number")
    text = repr(value)
    if "e" in text and "." not in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa}.0e{exponent}"
    return text


def _toml_text(value: str) -> str:
    """JSON's strings are TOML's, except DEL, which only TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
