"""What the engines silently accept: one case for each rule, as a change and a part of the message. A third
entry is the number of GPUs, where it matters."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from core.domain.choices import Engine, Parallelism
from core.domain.tasks import ImageModelType, TaskType
from core.recipes.base import overlay
from core.recipes.render import render, validate
from tests.core.recipes.cases import image_inputs, image_plan, inputs, text_plan
from tests.doubles.each import each


def problems(engine: Engine, config: dict[str, Any], gpus: int, flux: bool = False) -> list[str]:
    return [str(problem) for problem in validate(engine, config, gpus=gpus, flux=flux)]


SFT = dict(render(text_plan(TaskType.INSTRUCT), inputs()).config)
DPO = dict(render(text_plan(TaskType.DPO), inputs(TaskType.DPO)).config)
GRPO = dict(render(text_plan(TaskType.GRPO), inputs(TaskType.GRPO)).config)
SDXL = dict(render(image_plan(ImageModelType.SDXL), image_inputs(ImageModelType.SDXL)).config)
FLUX = dict(render(image_plan(ImageModelType.FLUX), image_inputs(ImageModelType.FLUX)).config)
FSDP = dict(render(text_plan(TaskType.INSTRUCT, parallelism=Parallelism.FSDP), inputs()).config)


SUPERVISED = [
    ({"optimizer": "junk_opt"}, "optimizer has value"),
    ({"optimizer": "adamw_torch_fusd"}, "the nearest is adamw_torch_fused"),
    ({"optimizer": "galore_adamw"}, "needs galore-torch"),
    ({"lr_scheduler": "cosinex"}, "the nearest is cosine"),
    ({"lr_scheduler": "cosine_with_min_lr"}, "needs min_lr or min_lr_rate"),
    ({"lr_scheduler": "warmup_stable_decay"}, "needs num_decay_steps"),
    ({"lr_scheduler": "one_cycle", "cosine_min_lr_ratio": 0.1}, "ignores it"),
    ({"lr_scheduler_kwargs": {"cycles": 3}}, "cosine takes num_cycles"),
    ({"lr_scheduler": "reduce_lr_on_plateau", "test_datasets": None}, "needs an evaluation set"),
    ({"warmup_ratio": 0.1}, "exclude each other"),
    ({"adapter": "lorra"}, "the nearest is"),
    ({"adapter": "qlora"}, "qlora needs it"),
    ({"lora_r": None}, "lora_r: is missing"),
    ({"lora_r": -1}, "must be over 0"),
    ({"lora_target_linear": None}, "no layer would carry the adapter"),
    ({"learning_rate": -1.0}, "learning_rate has value -1.0: must be over 0"),
    ({"lora_dropout": 1.0}, "must be under 1"),
    ({"attn_implementation": "flash"}, "is not one of eager, flash_attention_2"),
    ({"attn_implementation": "fp8"}, "would attend to each other"),
    ({"flash_attention": True}, "is the old name of attn_implementation: flash_attention_2"),
    ({"save_steps": 50}, "it would silently be off"),
    ({"test_datasets": None}, "there is no evaluation set"),
    ({"evals_per_epoch": 4}, "exclude each other"),
    ({"early_stopping_patience": 3, "save_steps": 50}, "that eval_steps divides"),
    ({"group_by_length": True}, "no effect with sample_packing"),
    ({"dataloader_num_workers": 0}, "is an error without dataloader_num_workers"),
    ({"dataset_prepared_path": None}, "use a new folder per job"),
    ({"datasets": None}, "nothing to train on"),
    ({"base_model": None}, "base_model: is missing"),
    ({"gpu_memory_limit": "70GiB"}, "limits nothing while training"),
    ({"max_memory": {"0": "70GiB"}}, "limits nothing while training"),
    ({"batch_size": 32}, "excludes gradient_accumulation_steps"),
    ({"max_memory_MB": 75000}, "limits.gpu_memory of the profile"),
    ({"fp16": True}, "bf16 wins"),
    ({"fp8": True}, "several times slower"),
    ({"load_in_8bit": True}, "refused together with load_in_8bit"),
    ({"cut_cross_entropy": True}, "no such key"),
    ({"gradient_checkpointing": "unsloth"}, "gradient_checkpointing"),
    ({"fsdp": ["full_shard", "auto_wrap"]}, "FSDP1's key"),
    ({"deepspeed": "zero3.json"}, "not in our images"),
    ({"datasets": [{"path": "x", "type": "chat_template", "chat_template": "chatmk"}]}, "nearest is chatml"),
]
SHARDED = [
    ({}, "shards over several GPUs", 1),
    ({"fsdp_version": 1}, "must be 2"),
    ({"optimizer": "adamw_bnb_8bit"}, "adamw_torch_8bit does"),
    ({"gradient_checkpointing": True}, "do it twice"),
    ({"load_in_4bit": True, "adapter": "qlora"}, "hangs with load_in_4bit"),
    ({"fsdp_config": {"forward_prefetch": True}}, "no such key"),
]
PREFERENCES = [
    ({"load_best_model_at_end": True}, "Axolotl ignores it with rl: dpo"),
    ({"neftune_noise_alpha": 5.0}, "Axolotl ignores it with rl: dpo"),
    ({"group_by_length": True}, "Axolotl ignores it with rl: dpo"),
    ({"sample_packing": True}, "does not work with rl: dpo"),
    ({"datasets": [{"path": "x", "ds_type": "json"}]}, "read by the file's ending"),
    ({"datasets": [{"path": "x", "type": {"field_prompt": "other"}}]}, "field map of datasets[0]"),
    ({"test_datasets": [{"path": "a"}, {"path": "b"}]}, "but only 1 datasets"),
]
GROUPS = [
    ({"trl": {"max_completion_length": None}}, "stop at 20 tokens"),
    ({"trl": {"reward_funcs": []}}, "nothing to learn from"),
    ({"trl": {"reward_funcs": ["len", "a.b"]}}, "taken for a model"),
    ({"trl": {"reward_weights": [1.0]}}, "one per reward function"),
    ({"trl": {"num_generations": 1}}, "at least 2"),
    ({"trl": {"num_generations": 7}}, "must be a multiple of it"),
    ({"gradient_accumulation_steps": 1}, "at least 32 on 4 GPUs"),
    ({"trl": {"max_prompt_length": 512}}, "max_prompt_length"),
]
SDXL_ALONE = [
    ({"epoch": 60}, "max_steps or num_epochs"),
    ({"network_dim": "512"}, "takes a whole number"),
    ({"loss_type": "banana"}, "one of"),
    ({"max_train_steps": 3.7}, "takes a whole number"),
    ({"optimizer_args": "weight_decay=0.01"}, "a list of text"),
    ({"optimizer_args": ["weight_decay"]}, "name=value"),
    ({"text_encoder_lr": [0, 5e-5]}, "mixes types"),
    ({"output_dir": None}, "lost at the save"),
    ({"train_data_dir": None}, "exit code 0 and no file"),
    ({"network_dim": None}, "the rank would be 4"),
    ({"optimizer_type": "AdamW9bit"}, "the nearest is adamw8bit"),
    ({"optimizer_type": "Adafactor"}, "relative_step=False"),
    ({"lr_scheduler": "cosinus"}, "the nearest is cosine"),
    ({"lr_scheduler": "constant"}, "constant_with_warmup takes it"),
    ({"lr_warmup_steps": 300}, "lasts 300/4 steps", 4),
    ({"fused_backward_pass": True}, "no effect"),
    ({"huggingface_repo_id": ""}, "must be left out, even empty"),
    ({"caption_extension": None}, "captions are in .txt"),
    ({"enable_bucket": False}, "no effect without enable_bucket"),
    ({"resolution": "128,128"}, "is above the resolution of 128"),
    ({"resolution": "4096,4096"}, "is below the resolution of 4096"),
    ({"persistent_data_loader_workers": True, "max_data_loader_n_workers": 0}, "is an error"),
    ({"color_aug": True}, "excludes cache_latents"),
    ({"max_token_length": 75}, "150 or 225"),
    ({"cache_text_encoder_outputs": True, "network_train_unet_only": False}, "needs network_train"),
    ({"cache_text_encoder_outputs": True, "shuffle_caption": True}, "is an error with cache_text"),
    ({"huber_c": 0.1}, "no effect with loss_type l2"),
    ({"fp8_base": True, "mixed_precision": "no"}, "needs mixed_precision"),
    ({"full_bf16": True, "mixed_precision": "fp16"}, "needs mixed_precision bf16"),
    ({"xformers": True}, "wins over sdpa"),
    ({"max_train_epochs": 10}, "wins over max_train_steps"),
    ({"guidance_scale": 1.0}, "no such key"),
]
FLUX_ALONE = [
    ({"t5xxl": None}, "opens it before anything else"),
    ({"min_snr_gamma": 5}, "no effect on Flux"),
    ({"max_timestep": 900}, "no effect on Flux"),
    ({"loss_type": "huber"}, "crashes Flux at the first step"),
    ({"cache_text_encoder_outputs": True, "sample_prompts": ""}, "leave it out"),
    ({"cache_text_encoder_outputs": True, "network_args": ["train_t5xxl=True"]}, "excludes"),
    ({"cpu_offload_checkpointing": True, "blocks_to_swap": 8}, "excludes blocks_to_swap"),
    ({"timestep_sampling": "linear"}, "one of"),
]
FAMILIES: dict[str, tuple[Engine, dict[str, Any], int, list[Any]]] = {
    "supervised": (Engine.AXOLOTL, SFT, 4, SUPERVISED),
    "sharded": (Engine.AXOLOTL, FSDP, 4, SHARDED),
    "preferences": (Engine.AXOLOTL, DPO, 4, PREFERENCES),
    "groups": (Engine.AXOLOTL, GRPO, 4, GROUPS),
    "sdxl": (Engine.KOHYA, SDXL, 1, SDXL_ALONE),
    "flux": (Engine.KOHYA, FLUX, 1, FLUX_ALONE),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rule_finds_its_mistake_in_a_good_configuration(family: str) -> None:
    engine, good, usual_gpus, cases = FAMILIES[family]
    assert problems(engine, good, usual_gpus, family == "flux") == []
    for change, expected, *gpus in cases:
        messages = problems(engine, overlay(good, change), *(gpus or [usual_gpus]), family == "flux")
        assert any(expected in text for text in messages), (change, messages)


def test_a_template_that_falls_back_on_the_tokenizers_is_known() -> None:
    entry = {"path": "x", "type": "chat_template", "chat_template": "tokenizer_default_fallback_chatml"}
    assert problems(Engine.AXOLOTL, overlay(SFT, {"datasets": [entry]}), 4) == []


KREA = render(image_plan(ImageModelType.KREA2), image_inputs(ImageModelType.KREA2)).config


@each(
    ("change", "expected"),
    [
        ({"train": {"steps": "4000"}}, "takes a whole number"),
        ({"train": {"stepz": 4000}}, "the nearest is steps"),
        ({"train": {"optimizer": "adamw9"}}, "the nearest is adamw"),
        ({"train": {"loss_type": "squared"}}, "is not one of mse"),
        ({"train": {"timestep_type": "gauss"}}, "timestep_type"),
        ({"train": {"lr": None}}, "lr: is missing"),
        ({"train": {"steps": 0}}, "must be over 0"),
        ({"train": {"lr_scheduler": "linear", "lr_scheduler_params": None}}, "climbs from a third"),
        ({"train": {"lr_scheduler": "step"}}, "lr_scheduler"),
        ({"train": {"lr_scheduler": "cosine_with_restarts"}}, "one cycle"),
        ({"train": {"gradient_accumulation": 2, "gradient_accumulation_steps": 2}}, "excludes"),
        ({"train": {"bypass_guidance_embedding": True, "do_guidance_loss": True}}, "excludes"),
        ({"train": {"dtype": "bf17"}}, "bf17"),
        ({"model": {"arch": "krea3"}}, "the nearest is krea2"),
        ({"model": {"arch": None}}, "Stable Diffusion 1"),
        ({"model": {"model_kwargs": {"vae_path": None}}}, "vae_path: is missing"),
        ({"model": {"qtype": "uint3|x", "assistant_lora_path": "y"}}, "excludes a recovery adapter"),
        ({"network": {"linear": None}}, "the rank would be 4"),
        ({"network": {"type": "lokr"}}, "no effect with lokr_full_rank"),
        ({"save": {"save_format": "pt"}}, "one of diffusers, safetensors"),
        ({"save": {"push_to_hub": True}}, "the daemon publishes"),
        ({"trigger_word": "${HOME}"}, "takes from the environment"),
        ({"training_folder": None}, "training_folder: is missing"),
    ],
)
def test_ai_toolkit(change: dict[str, Any], expected: str) -> None:
    config = copy.deepcopy(dict(KREA))
    assert problems(Engine.AI_TOOLKIT, config, gpus=1) == []
    (process,) = config["config"]["process"]
    config["config"]["process"] = [overlay(process, change)]
    messages = problems(Engine.AI_TOOLKIT, config, gpus=1)
    assert any(expected in text for text in messages), messages


def test_ai_toolkit_trains_one_task_on_one_gpu() -> None:
    config = copy.deepcopy(dict(KREA))
    assert any("does not split" in text for text in problems(Engine.AI_TOOLKIT, config, gpus=2))
    config["config"]["process"] *= 2
    assert any("2 entries" in text for text in problems(Engine.AI_TOOLKIT, config, gpus=1))
