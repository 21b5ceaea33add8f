"""A text plan as an Axolotl configuration.

Pure: plan and file names in, a mapping and notes out. What Axolotl names differently or cannot do is
translated here, and every translation leaves a note: nothing an operator asked for vanishes silently. What
the trainer's plugin does (deadline, moving average, stages, best checkpoint in preference training) is in
the plan, which the plugin reads, and not in this configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.domain.choices import LrSchedule, Method, Optimizer
from core.models.kernels import LigerPart, liger_parts
from core.planning.plan import TrainingPlan
from core.profile.declare import NameSystem
from core.profile.schema import FIELD_NAMES
from core.recipes.axolotl.data_keys import dataset_keys
from core.recipes.axolotl.rules import LORA_KERNELS
from core.recipes.base import EngineConfig, Recipe, RunInputs, load_templates, overlay, unsupported_target
from core.recipes.keys import translated_axolotl

_ADAMW = frozenset(optimizer for optimizer in Optimizer if "adamw" in optimizer)
#: bitsandbytes' state cannot be sharded; torchao's can.
_SHARDABLE = {
    Optimizer.ADAMW_BNB_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.PAGED_ADAMW_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.PAGED_ADAMW_32BIT: Optimizer.ADAMW_TORCH_FUSED,
}


def optimizer_keys(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    optimizer = plan.optimizer
    name = optimizer.name
    if plan.fsdp is not None and name in _SHARDABLE:
        name = _SHARDABLE[name]
        notes.append(f"optimizer {optimizer.name}: does not shard under FSDP2, {name} is written")
    betas: EngineConfig = {}
    if name in _ADAMW:
        betas = {
            "adam_beta1": plan.targets.adam_beta1,
            "adam_beta2": plan.targets.adam_beta2,
            "adam_epsilon": 1e-8,
        }
    if optimizer.fp32_master and plan.fsdp is None:
        notes.append("fp32 master weights: Axolotl trains bf16 weights in place outside FSDP")
    return {
        "optimizer": str(name),
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        **betas,
        **_schedule(plan, notes),
    }


def _schedule(plan: TrainingPlan, notes: list[str]) -> EngineConfig:
    optimizer, name = plan.optimizer, plan.optimizer.schedule
    arguments: dict[str, Any] = {}
    least: float | None = None
    if name is LrSchedule.COSINE_WITH_RESTARTS:
        arguments = {"num_cycles": optimizer.cycles}
    elif name is LrSchedule.COSINE_WITH_MIN_LR:
        arguments = {"min_lr_rate": optimizer.min_lr_ratio}
    elif name is LrSchedule.WSD:
        decay = max(1, round(optimizer.cooldown_share * plan.steps.total))
        arguments = {"num_decay_steps": decay, "min_lr_ratio": optimizer.min_lr_ratio}
    elif name is LrSchedule.COSINE and optimizer.min_lr_ratio:
        least = optimizer.min_lr_ratio
    elif optimizer.min_lr_ratio:
        notes.append(f"min_lr_ratio: {name} has no end of its own in Axolotl; the plugin's schedule has one")
    if optimizer.stages:
        notes.append("lr_stages: laid over the schedule by the plugin")
    return {
        "lr_scheduler": str(name),
        "lr_scheduler_kwargs": arguments or None,
        "cosine_min_lr_ratio": least,
        "warmup_steps": optimizer.warmup_steps,
    }


LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"


def axolotl_recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    """Make the configuration, with its template, the origins of its values, and notes."""
    task_type = plan.task.task_type
    if not task_type.is_text:
        raise unsupported_target(
            plan.profile.name, "engine", "axolotl", f"trains text, the task is {task_type}"
        )
    overlays = [f"axolotl_{task_type.word}.yaml"] if task_type.is_rl else []
    template = load_templates("axolotl.yaml", *overlays)
    notes: list[str] = []
    config = template
    for part in _PARTS:
        config = overlay(config, part(plan, inputs, notes))
    raw, raw_notes = translated_axolotl(plan.engine_config)
    return Recipe(
        overlay(config, raw),
        template,
        FIELD_NAMES[NameSystem.AXOLOTL],
        frozenset(raw),
        tuple(notes + raw_notes),
    )


AxolotlPart = Callable[[TrainingPlan, RunInputs, list[str]], EngineConfig]


def _files(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    plugins = [*inputs.plugins, *([LIGER_PLUGIN] if plan.precision.liger else [])]
    return {
        "base_model": inputs.model_path,
        "output_dir": inputs.output_dir,
        "dataset_prepared_path": f"{inputs.work_dir}/prepared",
        "resume_from_checkpoint": inputs.resume_from,
        "special_tokens": {"pad_token": inputs.pad_token} if inputs.pad_token else None,
        "plugins": plugins or None,
        "seed": plan.targets.seed,
    }


def _data(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    if inputs.dataset is None:
        raise unsupported_target(plan.profile.name, "dataset_type", None, "is needed to render a text task")
    return dataset_keys(inputs.dataset, inputs)


def _adapter(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    adapter = plan.adapter
    if adapter is None:
        return {}
    if adapter.dropout and plan.task.task_type.has_pairs:
        notes.append("lora_dropout: TRL switches dropout off in DPO, so it has no effect there")
    return {
        "adapter": "qlora" if plan.method is Method.QLORA else "lora",
        "load_in_4bit": True if plan.method is Method.QLORA else None,
        "lora_r": adapter.rank,
        "lora_alpha": _rounded_alpha(adapter.alpha, notes),
        "lora_dropout": adapter.dropout,
        "lora_rank_pattern": adapter.rank_pattern or None,
        **_target_layers(plan),
        "peft_use_rslora": plan.targets.rslora or None,
        "peft_use_dora": plan.targets.dora or None,
        "loraplus_lr_ratio": plan.targets.loraplus_lr_ratio,
    }


def _target_layers(plan: TrainingPlan) -> EngineConfig:
    """A 4-bit base leaves experts as they are unless it is asked to, and then Axolotl wants the layers named;
    peft knows a name for all of them."""
    modules = plan.targets.lora_target_modules
    keys: EngineConfig = {}
    if plan.method is Method.QLORA and plan.model.moe is not None:
        keys = {
            "quantize_moe_experts": True,
            "lora_target_modules": modules or "all-linear",
        }
    elif modules:
        keys = {"lora_target_modules": modules}
    else:
        keys = {"lora_target_linear": True}
    return {"lora_target_linear": None, "lora_target_modules": None, **keys}


def _rounded_alpha(alpha: float, notes: list[str]) -> int:
    """Axolotl takes alpha as a whole number only."""
    rounded = max(1, round(alpha))
    if rounded != alpha:
        notes.append(f"lora_alpha {alpha:g}: Axolotl takes whole numbers, {rounded} is written")
    return rounded


def _batch(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    return {
        "micro_batch_size": plan.batch.micro,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "eval_batch_size": _eval_batch(plan),
        "sequence_len": plan.sequence.length,
        **(_packing(plan, notes) if plan.task.task_type.is_supervised else {}),
    }


def _eval_batch(plan: TrainingPlan) -> int:
    """GRPO's evaluation generates in groups, so the batch over all GPUs is a multiple of the group."""
    batch = plan.batch.eval_micro
    while plan.grpo is not None and batch * plan.batch.world_size % plan.targets.grpo_generations:
        batch += 1
    return batch


def _packing(plan: TrainingPlan, notes: list[str]) -> EngineConfig:
    sequence = plan.sequence
    if sequence.packing and sequence.group_by_length:
        notes.append("group_by_length: packed sequences are all of one length, so it is left out")
    return {
        "sample_packing": sequence.packing,
        # Validators evaluate row by row; packed evaluation would weigh long rows more than they do.
        "eval_sample_packing": False,
        "pad_to_sequence_len": sequence.packing or sequence.pad_to_length,
        "group_by_length": True if sequence.group_by_length and not sequence.packing else None,
    }


def _steps(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    steps = plan.steps
    return {
        "num_epochs": steps.epochs,
        # Counted by the planner from tokens and clock; wins over the epochs.
        "max_steps": steps.total,
        "logging_steps": steps.log_every,
        "save_steps": steps.save_every,
        "save_total_limit": steps.keep_checkpoints,
        **_evaluation(plan, inputs, notes),
    }


def _evaluation(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    steps = plan.steps
    if not inputs.eval_path and not steps.eval_rows:
        return {"val_set_size": 0}
    keys: EngineConfig = {"eval_steps": steps.eval_every}
    if not inputs.eval_path:
        keys["val_set_size"] = steps.eval_rows
    if plan.task.task_type.is_rl:
        if steps.load_best or steps.early_stopping_patience:
            notes.append(
                "load_best, early_stopping_patience: Axolotl ignores both here; the plugin does them"
            )
        return keys
    if steps.load_best:
        keys |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    return keys | {"early_stopping_patience": steps.early_stopping_patience}


def _precision(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    precision, cpu = plan.precision, plan.gpus.is_cpu
    if cpu and (precision.bf16 or precision.tf32):
        notes.append("bf16, tf32: off, the plan has no GPU")
    if precision.fp16 and precision.bf16:
        notes.append("fp16: bf16 wins, so it is left out")
    compiled = precision.compile_mode
    if precision.fp8 and compiled is None:
        notes.append("fp8: compiled as well, without it fp8 is several times slower than bf16")
    return {
        "bf16": precision.bf16 and not cpu,
        "fp16": precision.fp16 and not precision.bf16,
        "tf32": precision.tf32 and not cpu,
        "fp8": True if precision.fp8 else None,
        "attn_implementation": str(precision.attention),
        "torch_compile": True if compiled or precision.fp8 else None,
        "torch_compile_mode": str(compiled) if compiled else None,
        **_checkpointing(plan),
        **_kernels(plan, notes),
    }


def _checkpointing(plan: TrainingPlan) -> EngineConfig:
    """Under FSDP2 the sharded layers are wrapped instead of the model; both would recompute twice."""
    if plan.fsdp is not None or not plan.precision.gradient_checkpointing:
        return {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    return {"gradient_checkpointing": True}


def _kernels(plan: TrainingPlan, notes: list[str]) -> EngineConfig:
    """Always set: the engine would switch unset LoRA kernels on, even on machines without Triton."""
    precision, supervised = plan.precision, plan.task.task_type.is_supervised
    keys: EngineConfig = {}
    if plan.adapter is not None:
        wanted = precision.lora_kernels and supervised and not plan.gpus.is_cpu
        keys |= dict.fromkeys(LORA_KERNELS, wanted)
    parts = liger_parts(plan.model.architecture) if precision.liger else frozenset()
    keys |= {part.value: True for part in LigerPart if part in parts and part is not LigerPart.LOSS}
    if precision.fused_loss and supervised:
        keys[LigerPart.LOSS.value if LigerPart.LOSS in parts else "chunked_cross_entropy"] = True
    return keys


def _loader(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    loader = plan.loader
    supervised = plan.task.task_type.is_supervised
    if loader.persistent_workers:
        notes.append("dataloader_persistent_workers: no key of Axolotl's; the plugin sets it")
    if loader.drop_last and not supervised:
        notes.append(f"dataloader_drop_last: Axolotl ignores it in {plan.task.task_type}; the plugin sets it")
    return {
        "dataloader_num_workers": loader.workers,
        "dataloader_pin_memory": loader.pin_memory and not plan.gpus.is_cpu,
        "dataloader_prefetch_factor": loader.prefetch_factor if loader.workers else None,
        "dataloader_drop_last": True if loader.drop_last and supervised else None,
    }


def _sharding(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    fsdp = plan.fsdp
    if fsdp is None:
        return {}
    notes.append(
        "fsdp_forward_prefetch, fsdp_backward_prefetch, fsdp_limit_all_gathers: settings of FSDP1; "
        "FSDP2 is written, which prefetches and bounds its gathers by itself"
    )
    hybrid = {"dp_replicate_size": plan.gpus.nodes, "dp_shard_size": plan.gpus.per_node}
    return {
        **(hybrid if fsdp.within_nodes else {}),
        "fsdp_version": 2,
        "fsdp_config": {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": plan.targets.fsdp_reshard_after_forward,
            "offload_params": False,
            # If every rank read a 70B model, the host would need its memory eight times; with a 4-bit base
            # only rank 0 quantizes and the others wait forever.
            "cpu_ram_efficient_loading": plan.method is not Method.QLORA,
            # Whole tensors, so that a checkpoint is a submission.
            "state_dict_type": "FULL_STATE_DICT",
            "final_state_dict_type": "FULL_STATE_DICT",
            "activation_checkpointing": plan.precision.gradient_checkpointing,
        },
    }


def _preference(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    dpo = plan.dpo
    if not plan.task.task_type.has_pairs or dpo is None:
        return {}
    return {
        "rl_beta": plan.targets.dpo_beta,
        "precompute_ref_log_probs": True if dpo.precompute_reference else None,
    }


#: A prompt that is encoded again may be a little longer.
SPARE_TOKENS = 64
#: Not zero, so that TRL loads the base; `trainer/axolotl/prompt_kl.py` then leaves TRL's KL out.
BASE_ONLY = 1e-9


def _groups(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> EngineConfig:
    grpo, targets = plan.grpo, plan.targets
    if not plan.task.task_type.generates or grpo is None:
        return {}
    keys: EngineConfig = {
        # TRL keeps a full fine-tune's base, sharded as the model is, for a term of its own only.
        "beta": targets.grpo_beta or (BASE_ONLY if targets.grpo_prompt_kl and not plan.adapter else 0.0),
        "num_generations": targets.grpo_generations,
        "temperature": grpo.temperature,
        "top_k": grpo.top_k,
        # Unset, generation stops at 20 tokens.
        "max_completion_length": plan.sequence.completion_limit or 256,
    }
    if not grpo.vllm:
        return {"trl": keys}
    keys |= {"use_vllm": True, "vllm_mode": "colocate"}
    if grpo.vllm_sleep:
        keys["vllm_enable_sleep_mode"] = True
    notes.append("vllm.max_model_len: Axolotl does not pass it on; the plugin does")
    # The parallel size has no default of its own here: unset, it is multiplied as None.
    engine = {
        "gpu_memory_utilization": grpo.vllm_memory_share,
        "tensor_parallel_size": 1,
        # vLLM refuses more than the model's window.
        "max_model_len": min(plan.sequence.length + SPARE_TOKENS, plan.model.max_position),
    }
    return {"trl": keys, "vllm": engine}


_PARTS: tuple[AxolotlPart, ...] = (
    _files,
    _data,
    _adapter,
    _batch,
    optimizer_keys,
    _steps,
    _precision,
    _loader,
    _sharding,
    _preference,
    _groups,
)
