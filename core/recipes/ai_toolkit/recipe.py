"""The plan of an image family that ai-toolkit trains as a YAML file for it.

ai-toolkit trains on one GPU, names its result after `config.name`, and passes on only some learning rate
schedules intact; what it cannot do leaves a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.domain.choices import Engine, ImageLoss, LrSchedule, Method, Optimizer
from core.models.image_families import IMAGE_FAMILIES, families_of
from core.planning.plan import ImagePlan, TrainingPlan
from core.profile.declare import NameSystem
from core.profile.schema import FIELD_NAMES
from core.profile.targets import Targets
from core.recipes.base import EngineConfig, Recipe, RunInputs, load_templates, overlay, unsupported_target

_PROCESS = "config.process[0]."

_OPTIMIZERS = {
    Optimizer.ADAMW_TORCH: "adamw",
    Optimizer.ADAMW_TORCH_FUSED: "adamw",
    Optimizer.ADAMW_BNB_8BIT: "adamw8bit",
    Optimizer.ADAMW_TORCH_8BIT: "adamw8bit",
    Optimizer.PAGED_ADAMW_8BIT: "adamw8bit",
    Optimizer.PAGED_ADAMW_32BIT: "adamw",
    Optimizer.ADAFACTOR: "adafactor",
    Optimizer.LION_8BIT: "lion8bit",
    Optimizer.PRODIGY: "prodigy",
}
_LOSSES = {
    ImageLoss.L2: "mse",
    ImageLoss.L1: "mae",
    ImageLoss.HUBER: "pseudo_huber",
    ImageLoss.SMOOTH_L1: "pseudo_huber",
}
#: sd-scripts' names of the same draws.
_TIMESTEPS = {"flux_shift": "flux_shift", "shift": "shift", "sigmoid": "sigmoid", "uniform": "linear"}


def ai_toolkit_recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    """Make the configuration, with its template, the origins of its values, and notes."""
    image, image_type = plan.image, plan.task.image_type
    trained = families_of(Engine.AI_TOOLKIT)
    if image_type not in trained or image is None:
        kind, trains = image_type or plan.task.task_type, ", ".join(trained)
        raise unsupported_target(
            plan.profile.name, "engine", "ai-toolkit", f"trains {trains}, the task is {kind}"
        )
    if plan.method is Method.FULL:
        raise unsupported_target(
            plan.profile.name, "method", "full", "validators take an adapter from ai-toolkit: method: lora"
        )
    template = load_templates(IMAGE_FAMILIES[image_type].template(Engine.AI_TOOLKIT))
    notes: list[str] = []
    settings: EngineConfig = {
        "training_folder": inputs.output_dir,
        "trigger_word": plan.task.trigger_word,
        "training_seed": plan.targets.seed,
        "network": _network(plan, notes),
        "save": {"save_every": plan.steps.save_every, "max_step_saves_to_keep": plan.steps.keep_checkpoints},
        "datasets": _dataset(plan, image, inputs),
        "train": _train(plan, image, notes),
        "model": _model(plan, image, inputs),
    }
    config = overlay_process(template, settings)
    for path, value in plan.engine_config.items():
        config = overlay_process(config, _nested(path, value))
    origins = {f"{_PROCESS}{path}": target for path, target in FIELD_NAMES[NameSystem.AI_TOOLKIT].items()}
    raw = frozenset(f"{_PROCESS}{path}" for path in plan.engine_config)
    return Recipe(config, template, origins, raw, tuple(notes))


def overlay_process(template: Mapping[str, Any], settings: Mapping[str, Any]) -> EngineConfig:
    """Merge settings over the template's only process and its only dataset."""
    config = overlay(template, {})
    process = config["config"]["process"][0]
    dataset = overlay(process["datasets"][0], settings.get("datasets") or {})
    rest = {key: value for key, value in settings.items() if key != "datasets"}
    config["config"]["process"] = [{**overlay(process, rest), "datasets": [dataset]}]
    return config


def _nested(path: str, value: Any) -> EngineConfig:
    """`train.lr` with its value as `{train: {lr: …}}`, from the process down."""
    first, *rest = reversed(path.split("."))
    nested: EngineConfig = {first: value}
    for part in rest:
        nested = {part: nested}
    return nested


def _network(plan: TrainingPlan, notes: list[str]) -> EngineConfig:
    adapter, targets = plan.adapter, plan.targets
    assert adapter is not None  # a full fine-tune was refused
    asked = {"rslora": targets.rslora, "dora": targets.dora, "loraplus_lr_ratio": targets.loraplus_lr_ratio}
    for name, value in asked.items():
        if value:
            notes.append(f"{name}: ai-toolkit's LoRA has none, so it is left out")
    return {
        "linear": adapter.rank,
        "linear_alpha": float(adapter.alpha),
        "dropout": adapter.dropout or None,
        "conv": targets.conv_rank,
        "conv_alpha": float(targets.conv_alpha) if targets.conv_alpha is not None else None,
    }


def _dataset(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs) -> EngineConfig:
    return {
        "folder_path": inputs.train_path,
        "resolution": list(image.resolutions),
        "num_repeats": image.repeats,
        "caption_dropout_rate": float(image.caption_dropout),
        "cache_latents_to_disk": image.cache_latents,
        "num_workers": plan.loader.workers,
        "prefetch_factor": plan.loader.prefetch_factor if plan.loader.workers else None,
    }


def _train(plan: TrainingPlan, image: ImagePlan, notes: list[str]) -> EngineConfig:
    precision, ema, targets = plan.precision, plan.ema, plan.targets
    if ema is not None and ema.every > 1:
        notes.append(f"ema_every {ema.every}: ai-toolkit updates its average at every step")
    if targets.image_loss is ImageLoss.SMOOTH_L1:
        notes.append("image_loss smooth_l1: ai-toolkit has pseudo_huber, which is written")
    nowhere = {
        "min_snr_gamma": targets.min_snr_gamma,
        "scale_weight_norms": targets.scale_weight_norms,
        "guidance_scale": targets.guidance_scale,
        "flow_shift": targets.flow_shift,
        "huber_c": targets.huber_c,
        "plateau_factor": plan.plateau,
        "early_stopping_patience": plan.steps.early_stopping_patience,
    }
    for name, value in nowhere.items():
        if value:
            notes.append(f"{name}: ai-toolkit has nothing like it here, so it is left out")
    return {
        "steps": plan.steps.total,
        "batch_size": plan.batch.micro,
        "gradient_accumulation": plan.batch.accumulation,
        "gradient_checkpointing": precision.gradient_checkpointing,
        "dtype": "bf16" if precision.bf16 else "fp16" if precision.fp16 else "fp32",
        "loss_type": _LOSSES[targets.image_loss],
        "noise_offset": targets.noise_offset or None,
        "cache_text_embeddings": True if image.cache_text else None,
        "ema_config": {"use_ema": True, "ema_decay": ema.decay} if ema is not None else None,
        **_timesteps(targets, notes),
        **_optimizer(plan, notes),
        **_schedule(plan, notes),
    }


def _timesteps(targets: Targets, notes: list[str]) -> EngineConfig:
    asked = targets.timestep_sampling
    if asked is None:
        return {}
    name = _TIMESTEPS.get(asked, asked)
    if name != asked:
        notes.append(f"timestep_sampling {asked}: is called {name} in ai-toolkit")
    return {"timestep_type": name}


def _optimizer(plan: TrainingPlan, notes: list[str]) -> EngineConfig:
    optimizer = plan.optimizer
    if optimizer.name not in _OPTIMIZERS:
        raise unsupported_target(
            plan.profile.name, "optimizer", optimizer.name, "ai-toolkit has no such optimizer"
        )
    parameters: EngineConfig = {"weight_decay": optimizer.weight_decay}
    if "adamw" in optimizer.name:
        parameters["betas"] = [plan.targets.adam_beta1, plan.targets.adam_beta2]
    if optimizer.text_encoder_lr:
        notes.append("text_encoder_lr: ai-toolkit leaves the text encoders of these models as they are")
    return {
        "optimizer": _OPTIMIZERS[optimizer.name],
        "optimizer_params": parameters,
        "lr": optimizer.learning_rate,
        "max_grad_norm": optimizer.max_grad_norm,
    }


def _schedule(plan: TrainingPlan, notes: list[str]) -> EngineConfig:
    """The schedules that reach torch with the arguments they need: ai-toolkit adds `total_iters`."""
    optimizer, name = plan.optimizer, plan.optimizer.schedule
    least = optimizer.min_lr_ratio
    if optimizer.warmup_steps and name not in (LrSchedule.CONSTANT, LrSchedule.CONSTANT_WITH_WARMUP):
        notes.append(f"warmup_steps: ai-toolkit's {name} starts at the peak")
    if optimizer.stages:
        notes.append("lr_stages: ai-toolkit has none, so they are left out")
    if name is LrSchedule.LINEAR:
        # torch's own default climbs from a third of the rate to all of it.
        return {"lr_scheduler": "linear", "lr_scheduler_params": {"start_factor": 1.0, "end_factor": least}}
    if name is LrSchedule.CONSTANT and not optimizer.warmup_steps:
        return {"lr_scheduler": "constant"}
    if name in (LrSchedule.CONSTANT, LrSchedule.CONSTANT_WITH_WARMUP):
        warmup = {"num_warmup_steps": optimizer.warmup_steps}
        return {"lr_scheduler": "constant_with_warmup", "lr_scheduler_params": warmup}
    if name not in (LrSchedule.COSINE, LrSchedule.COSINE_WITH_MIN_LR):
        notes.append(f"lr_scheduler {name}: ai-toolkit cannot pass its settings on; one cosine is written")
    return {"lr_scheduler": "cosine", "lr_scheduler_params": {"eta_min": least * optimizer.learning_rate}}


def _model(plan: TrainingPlan, image: ImagePlan, inputs: RunInputs) -> EngineConfig:
    parts = inputs.image
    elsewhere = {
        "text_encoder_path": parts.text_encoder,
        "vae_path": parts.vae,
        "checkpoint_filename": parts.checkpoint_filename,
    }
    compiled = plan.precision.compile_mode
    # The adapter is made for 3 bits. A base that fits unquantised stays so.
    recovered = image.quantize_base and parts.recovery_adapter
    return {
        "name_or_path": inputs.model_path,
        "quantize": image.quantize_base,
        "quantize_te": image.quantize_base,
        **({"qtype": f"uint3|{parts.recovery_adapter}"} if recovered else {}),
        "assistant_lora_path": parts.assistant_lora,
        "unconditional_lora_path": parts.unconditional_lora,
        "model_kwargs": {key: value for key, value in elsewhere.items() if value} or None,
        "compile": True if compiled else None,
        "compile_mode": str(compiled) if compiled else None,
    }
