"""A text plan as an Axolotl configuration.

Pure: plan and file names in, a mapping and notes out. What Axolotl 0.19 calls otherwise or cannot do is
translated here, and every translation leaves a note; nothing an operator asked for vanishes silently. What
belongs to the trainer's plugin (deadline, moving average, stages, best checkpoint in preference training)
is in the plan, which the plugin reads, and not in this file.
"""

from __future__ import annotations

from collections.abc import Callable

from core.choices import Method
from core.plan import TrainingPlan
from core.recipes.axolotl_optimizer import optimizer_keys
from core.recipes.base import Config, base, overlay
from core.recipes.datasets import dataset_keys
from core.recipes.origins import AXOLOTL
from core.recipes.raw_keys import translated_axolotl
from core.recipes.run import Recipe, RunInputs, refusal
from core.tasks import TaskType

LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"

_TEMPLATES = {
    TaskType.INSTRUCT: ("axolotl.yaml",),
    TaskType.CHAT: ("axolotl.yaml",),
    TaskType.DPO: ("axolotl.yaml", "axolotl_dpo.yaml"),
    TaskType.GRPO: ("axolotl.yaml", "axolotl_grpo.yaml"),
}
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    """The configuration, its template, where its values come from, and what had to be translated."""
    if plan.task.task_type not in _TEMPLATES:
        raise refusal(plan.profile, "engine", "axolotl", f"trains text, the task is {plan.task.task_type}")
    template = base(*_TEMPLATES[plan.task.task_type])
    notes: list[str] = []
    config = template
    for part in _PARTS:
        config = overlay(config, part(plan, inputs, notes))
    given, about = translated_axolotl(plan.engine_config)
    return Recipe(overlay(config, given), template, AXOLOTL, frozenset(given), tuple(notes + about))


Part = Callable[[TrainingPlan, RunInputs, list[str]], Config]


def _files(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    plugins = [*inputs.plugins, *([LIGER_PLUGIN] if plan.precision.liger else [])]
    return {
        "base_model": inputs.model_path,
        "output_dir": inputs.output_dir,
        "dataset_prepared_path": f"{inputs.work_dir}/prepared",
        "resume_from_checkpoint": inputs.resume_from,
        "special_tokens": {"pad_token": inputs.pad_token} if inputs.pad_token else None,
        "plugins": plugins or None,
        "seed": plan.seed,
    }


def _data(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    if inputs.dataset is None:
        raise refusal(plan.profile, "dataset_type", None, "is needed to render a text task")
    return dataset_keys(inputs.dataset, inputs)


def _adapter(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    adapter = plan.adapter
    if adapter is None:
        return {}
    if adapter.dropout and plan.task.task_type is TaskType.DPO:
        notes.append("lora_dropout: TRL switches dropout off in DPO, so it has no effect there")
    return {
        "adapter": "qlora" if plan.method is Method.QLORA else "lora",
        "load_in_4bit": True if plan.method is Method.QLORA else None,
        "lora_r": adapter.rank,
        "lora_alpha": _whole(adapter.alpha, "lora_alpha", plan, notes),
        "lora_dropout": adapter.dropout,
        "lora_target_linear": None if adapter.target_modules else True,
        "lora_target_modules": list(adapter.target_modules) or None,
        "peft_use_rslora": adapter.rslora or None,
        "peft_use_dora": adapter.dora or None,
        "loraplus_lr_ratio": adapter.loraplus_lr_ratio,
        "peft_autocast_adapter_dtype": None if adapter.fp32 else False,
    }


def _whole(alpha: float, name: str, plan: TrainingPlan, notes: list[str]) -> int:
    """Axolotl takes alpha as a whole number only."""
    rounded = max(1, round(alpha))
    if rounded != alpha:
        notes.append(f"{name} {alpha:g}: Axolotl takes whole numbers, {rounded} is written")
    return rounded


def _batch(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    return {
        "micro_batch_size": plan.batch.micro,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "eval_batch_size": _eval_batch(plan),
        "sequence_len": plan.sequence.length,
        **(_packing(plan, notes) if plan.task.task_type in (TaskType.INSTRUCT, TaskType.CHAT) else {}),
    }


def _eval_batch(plan: TrainingPlan) -> int:
    """GRPO's evaluation generates in groups, so the batch over all GPUs is a multiple of the group."""
    batch = plan.batch.eval_micro
    while plan.grpo is not None and batch * plan.batch.world_size % plan.grpo.generations:
        batch += 1
    return batch


def _packing(plan: TrainingPlan, notes: list[str]) -> Config:
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


def _steps(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
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


def _evaluation(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    steps = plan.steps
    if not inputs.eval_path and not steps.eval_rows:
        return {"val_set_size": 0}
    keys: Config = {"eval_steps": steps.eval_every}
    if not inputs.eval_path:
        keys["val_set_size"] = steps.eval_rows
    if plan.task.task_type in (TaskType.DPO, TaskType.GRPO):
        if steps.load_best or steps.early_stopping_patience:
            notes.append(
                "load_best, early_stopping_patience: Axolotl ignores both here; the plugin does them"
            )
        return keys
    if steps.load_best:
        keys |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    return keys | {"early_stopping_patience": steps.early_stopping_patience}


def _precision(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
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
        "activation_offloading": True if precision.activation_offload else None,
        **_checkpointing(plan),
        **_kernels(plan, notes),
    }


def _checkpointing(plan: TrainingPlan) -> Config:
    """Under FSDP2 the sharded layers are wrapped instead of the model: doing both would recompute twice."""
    if plan.fsdp is not None or not plan.precision.gradient_checkpointing:
        return {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    return {"gradient_checkpointing": True}


def _kernels(plan: TrainingPlan, notes: list[str]) -> Config:
    """Unset LoRA kernels would be switched on by the engine, on machines without Triton too."""
    precision, supervised = plan.precision, plan.task.task_type in (TaskType.INSTRUCT, TaskType.CHAT)
    keys: Config = {}
    if plan.adapter is not None:
        wanted = precision.lora_kernels and supervised and not plan.gpus.is_cpu
        keys |= dict.fromkeys(_KERNELS, wanted)
    if precision.liger:
        keys |= {"liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True}
    if precision.fused_loss and supervised:
        keys["liger_fused_linear_cross_entropy" if precision.liger else "chunked_cross_entropy"] = True
    if precision.neftune_alpha and supervised:
        keys["neftune_noise_alpha"] = precision.neftune_alpha
    elif precision.neftune_alpha:
        notes.append(f"neftune_alpha: Axolotl ignores it in {plan.task.task_type}; the plugin sets it")
    return keys


def _loader(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    loader = plan.loader
    supervised = plan.task.task_type in (TaskType.INSTRUCT, TaskType.CHAT)
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


def _sharding(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    fsdp = plan.fsdp
    if fsdp is None:
        return {}
    notes.append(
        "fsdp_forward_prefetch, fsdp_backward_prefetch, fsdp_limit_all_gathers: settings of FSDP1; "
        "FSDP2 is written, which prefetches and bounds its gathers by itself"
    )
    return {
        "fsdp_version": 2,
        "fsdp_config": {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": fsdp.wrap_class or None,
            "reshard_after_forward": fsdp.reshard_after_forward,
            "offload_params": fsdp.offload_params,
            # Every rank reading a 70B model would need its host memory eight times over; with a 4-bit base
            # only rank 0 quantizes and the others wait for ever.
            "cpu_ram_efficient_loading": plan.method is not Method.QLORA,
            # Whole tensors, so that a checkpoint is a submission.
            "state_dict_type": "FULL_STATE_DICT",
            "final_state_dict_type": "FULL_STATE_DICT",
            "activation_checkpointing": plan.precision.gradient_checkpointing,
        },
    }


def _preference(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    dpo = plan.dpo
    if plan.task.task_type is not TaskType.DPO or dpo is None:
        return {}
    return {"rl_beta": dpo.beta, "precompute_ref_log_probs": True if dpo.precompute_reference else None}


def _groups(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    grpo = plan.grpo
    if plan.task.task_type is not TaskType.GRPO or grpo is None:
        return {}
    keys: Config = {
        "beta": grpo.beta,
        "num_generations": grpo.generations,
        "temperature": grpo.temperature,
        "top_k": grpo.top_k,
        # Unset, generation stops at 20 tokens.
        "max_completion_length": plan.sequence.completion_limit or 256,
    }
    if not grpo.vllm:
        return {"trl": keys}
    # The parallel size has no default of its own here: unset, it is multiplied as None.
    server = {"gpu_memory_utilization": grpo.vllm_memory_share, "tensor_parallel_size": 1}
    return {"trl": keys | {"use_vllm": True, "vllm_mode": "colocate"}, "vllm": server}


_PARTS: tuple[Part, ...] = (
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
