"""Settings that ai-toolkit accepts in a YAML file and then ignores or fails on.

Its own check before the model is loaded finds a handful of mistakes; an unknown key, a string for a number
or an unknown architecture passes, the last as Stable Diffusion 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.domain.choices import Engine
from core.domain.errors import Problem
from core.models.image_families import IMAGE_FAMILIES
from core.recipes.schema import (
    ConfigMapping,
    check_choice,
    check_range,
    engine_table,
    invalid,
    missing_keys,
    shown_value,
)

AI_TOOLKIT_HINTS = {
    "device": "the accelerate device is used",
    "learning_rate": "lr",
    "max_train_steps": "steps",
    "ema_decay": "ema_config: {use_ema, ema_decay}",
    "seed": "training_seed, one level up",
}

#: Compared one by one in the trainer; any other name means mse.
LOSSES = ("mse", "mae", "wavelet", "stepped", "pseudo_huber", "mean_flow")
#: What the flow-matching sampler and the trainer compare with; any other name is ignored.
TIMESTEPS = (
    "linear",
    "weighted",
    "sigmoid",
    "flux_shift",
    "lumina2_shift",
    "shift",
    "lognorm_blend",
    "next_sample",
    "one_step",
    "two_step",
    "four_step",
    "eight_step",
)
_DTYPES = ("float", "fp32", "single", "float32", "fp16", "half", "float16", "bf16", "bfloat16")
#: Architectures whose text encoder comes from the hub unless a path is given.
_TEXT_ENCODER_ELSEWHERE = {image_type for image_type, record in IMAGE_FAMILIES.items() if record.text_encoder}
_VAE_ELSEWHERE = {image_type for image_type, record in IMAGE_FAMILIES.items() if record.vae}


def ai_toolkit_rules(config: ConfigMapping, gpus: int) -> Iterator[Problem]:
    """Yield what is wrong with a combination of valid keys."""
    yield from _placeholders(config, "")
    inner = config.get("config") or {}
    yield from missing_keys(inner, ("name", "process"), "ai-toolkit needs it")
    processes = inner.get("process") or []
    if gpus > 1:
        rule = "ai-toolkit does not split the data: every GPU would train on all of it"
        yield Problem("config.process", f"{gpus} GPUs", rule)
    if len(processes) > 1:
        yield Problem("config.process", f"{len(processes)} entries", "one task is one process")
    for process in processes:
        yield from _prefixed("config.process[0]", _process(process))


def _placeholders(value: Any, path: str) -> Iterator[Problem]:
    """`${NAME}` anywhere is replaced from the environment, and fatal if it is not set."""
    if isinstance(value, str) and "${" in value:
        yield Problem(
            path,
            shown_value(value),
            "holds ${…}, which ai-toolkit takes from the environment, and fails without",
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _placeholders(item, f"{path}.{key}" if path else str(key))


def _process(process: ConfigMapping) -> Iterator[Problem]:
    train, model = process.get("train") or {}, process.get("model") or {}
    needed = ("training_folder", "network", "save", "datasets", "train", "model")
    yield from missing_keys(process, needed, "ai-toolkit needs it")
    yield from _prefixed("train", _train(train))
    yield from _prefixed("model", _model(model))
    yield from _prefixed("network", _network(process.get("network") or {}))
    yield from _prefixed("save", _save(process.get("save") or {}))
    for dataset in process.get("datasets") or []:
        yield from _prefixed(
            "datasets[0]", missing_keys(dataset, ("folder_path",), "there is nothing to train on")
        )


def _prefixed(section: str, problems: Iterator[Problem]) -> Iterator[Problem]:
    for problem in problems:
        yield Problem(f"{section}.{problem.where}", problem.value, problem.rule)


def _train(train: ConfigMapping) -> Iterator[Problem]:
    facts = engine_table(Engine.AI_TOOLKIT).facts
    for key in ("steps", "batch_size", "gradient_accumulation", "lr"):
        yield from missing_keys(train, [key], "the toolkit's own default is not what was planned")
        yield from check_range(train, key, above=0)
    yield from check_range(train, "max_grad_norm", least=0)
    optimizer = {"optimizer": str(train.get("optimizer", "adamw")).lower()}
    yield from check_choice(optimizer, "optimizer", facts["optimizers"])
    yield from check_choice(train, "lr_scheduler", facts["schedulers"])
    yield from _schedule(train)
    yield from check_choice(train, "loss_type", LOSSES)
    yield from check_choice(train, "timestep_type", TIMESTEPS)
    yield from check_choice(train, "dtype", _DTYPES)
    if train.get("gradient_accumulation_steps", 1) != 1 and train.get("gradient_accumulation", 1) != 1:
        given = shown_value(train["gradient_accumulation_steps"])
        yield Problem("gradient_accumulation_steps", given, "excludes gradient_accumulation")
    if train.get("bypass_guidance_embedding") and train.get("do_guidance_loss"):
        yield Problem("bypass_guidance_embedding", "true", "excludes do_guidance_loss")


def _schedule(train: ConfigMapping) -> Iterator[Problem]:
    """The trainer passes `total_iters` to every schedule, which torch's do not all take or read alike."""
    name, arguments = train.get("lr_scheduler"), train.get("lr_scheduler_params") or {}
    if name == "step":
        yield invalid(train, "lr_scheduler", "ends in a TypeError: torch's takes no total_iters")
    if name == "linear" and arguments.get("start_factor") != 1.0:
        yield invalid(train, "lr_scheduler", "climbs from a third of the rate without start_factor: 1.0")
    if name == "cosine_with_restarts":
        yield invalid(train, "lr_scheduler", "is one cycle here: its length is always all the steps")


def _model(model: ConfigMapping) -> Iterator[Problem]:
    yield from missing_keys(model, ("name_or_path", "arch"), "without it Stable Diffusion 1 would be loaded")
    arch = str(model.get("arch") or "").split(":")[0]
    if arch:
        yield from check_choice(
            {"arch": arch}, "arch", engine_table(Engine.AI_TOOLKIT).facts["architectures"]
        )
    recovery = model.get("accuracy_recovery_adapter") or "|" in str(model.get("qtype", ""))
    if recovery and model.get("assistant_lora_path"):
        yield invalid(model, "assistant_lora_path", "excludes a recovery adapter")
    paths = model.get("model_kwargs") or {}
    why = "it would be fetched from the hub, which tournament machines cannot reach"
    if arch in _TEXT_ENCODER_ELSEWHERE:
        yield from _prefixed("model_kwargs", missing_keys(paths, ("text_encoder_path",), why))
    if arch in _VAE_ELSEWHERE:
        yield from _prefixed("model_kwargs", missing_keys(paths, ("vae_path",), why))


def _network(network: ConfigMapping) -> Iterator[Problem]:
    for key in ("linear", "linear_alpha", "conv", "conv_alpha"):
        yield from check_range(network, key, above=0)
    if network.get("type") == "lokr" and network.get("lokr_full_rank", True) and network.get("linear"):
        yield invalid(network, "linear", "has no effect with lokr_full_rank")
    if network.get("type", "lora") == "lora" and not (network.get("linear") or network.get("rank")):
        yield Problem("linear", "", "is missing: the rank would be 4")


def _save(save: ConfigMapping) -> Iterator[Problem]:
    yield from check_choice(save, "dtype", _DTYPES)
    for key in ("save_every", "max_step_saves_to_keep"):
        yield from check_range(save, key, above=0)
    if save.get("push_to_hub"):
        yield Problem("push_to_hub", "true", "the daemon publishes")
