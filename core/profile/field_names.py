"""What the profile's fields are called elsewhere: in the plan, in the engines' configurations, in guides.

Error messages lead back from those names to the profile's, and from a stray key in a profile to the right
one. A new field needs its declaration (`targets.py`), a row here, and a place in the plan and the recipes.
"""

from __future__ import annotations

from enum import StrEnum


class NameSystem(StrEnum):
    PLAN = "plan"  # the number of the plan that the field becomes
    AXOLOTL = "axolotl"
    KOHYA = "kohya"
    AI_TOOLKIT = "ai_toolkit"  # by dotted path within the process
    GUIDES = "guides"  # and other tools


#: A field, then `system=name,name`, or the system alone where it uses the field's own name. Long
#: rows are two.
_TABLE = """
method                      plan axolotl=adapter
lora_r                      plan=adapter.rank axolotl kohya=network_dim ai_toolkit=network.linear
lora_r                      guides=lora_rank,rank,r
lora_alpha                  plan=adapter.alpha axolotl kohya=network_alpha ai_toolkit=network.linear_alpha
lora_alpha                  guides=alpha
lora_dropout                plan=adapter.dropout axolotl kohya=network_dropout ai_toolkit=network.dropout
lora_target_modules         axolotl
lora_rank_pattern           plan=adapter.rank_pattern axolotl guides=rank_pattern
rslora                      axolotl=peft_use_rslora
dora                        axolotl=peft_use_dora
loraplus_lr_ratio           axolotl
micro_batch_size            plan=batch.micro axolotl kohya=train_batch_size ai_toolkit=train.batch_size
micro_batch_size            guides=per_device_train_batch_size
gradient_accumulation_steps plan=batch.accumulation axolotl kohya ai_toolkit=train.gradient_accumulation
gradient_accumulation_steps guides=gradient_accumulation
effective_batch_size        guides=batch_size
num_epochs                  plan=steps.epochs axolotl guides=epoch,epochs,max_train_epochs
max_steps                   plan=steps.total axolotl kohya=max_train_steps ai_toolkit=train.steps
learning_rate               plan=optimizer.learning_rate axolotl kohya=learning_rate,unet_lr
learning_rate               ai_toolkit=train.lr guides=lr
text_encoder_lr             kohya
lr_scheduler                plan=optimizer.schedule axolotl=lr_scheduler,lr_scheduler_kwargs kohya
lr_scheduler                ai_toolkit=train.lr_scheduler,train.lr_scheduler_params guides=scheduler
lr_cycles                   plan=optimizer.cycles kohya=lr_scheduler_num_cycles
min_lr_ratio                axolotl=cosine_min_lr_ratio kohya=lr_scheduler_min_lr_ratio
warmup_steps                plan=optimizer.warmup_steps axolotl kohya=lr_warmup_steps
optimizer                   plan=optimizer.name axolotl kohya=optimizer_type ai_toolkit=train.optimizer
adam_beta1                  axolotl
adam_beta2                  axolotl
adam_epsilon                axolotl
weight_decay                plan=optimizer.weight_decay axolotl kohya=optimizer_args
weight_decay                ai_toolkit=train.optimizer_params
max_grad_norm               plan=optimizer.max_grad_norm axolotl kohya ai_toolkit=train.max_grad_norm
max_grad_norm               guides=clip_grad_norm
ema_decay                   ai_toolkit=train.ema_config
ema_every                   guides=ema_update_every
sequence_len                plan=sequence.length axolotl guides=max_seq_length
sample_packing              plan=sequence.packing axolotl
group_by_length             axolotl
eval_steps                  plan=steps.eval_every axolotl
save_steps                  plan=steps.save_every axolotl ai_toolkit=save.save_every
save_every_epochs           kohya=save_every_n_epochs
save_total_limit            plan=steps.keep_checkpoints axolotl ai_toolkit=save.max_step_saves_to_keep
val_set_size                plan=steps.eval_rows axolotl
early_stopping_patience     axolotl
target_loss                 plan=goal.loss
target_gain                 plan=goal.gain
load_best                   axolotl=load_best_model_at_end
bf16                        axolotl kohya=mixed_precision
fp16                        axolotl
tf32                        axolotl
fp8                         plan=precision.fp8 axolotl
attention                   plan=precision.attention axolotl=attn_implementation
attention                   guides=flash_attention,xformers_attention
compile_mode                plan=precision.compile_mode axolotl=torch_compile_mode guides=torch_compile
gradient_checkpointing      plan=precision.gradient_checkpointing axolotl kohya
gradient_checkpointing      ai_toolkit=train.gradient_checkpointing
dataloader_num_workers      plan=loader.workers axolotl kohya=max_data_loader_n_workers
dataloader_num_workers      ai_toolkit=datasets[0].num_workers
dataloader_prefetch_factor  axolotl
dataloader_pin_memory       axolotl
dataloader_drop_last        axolotl
gpu_strategy                plan=gpus
nodes                       plan=gpus guides=num_machines,nnodes
fsdp_above                  plan=parallelism axolotl=fsdp_config
fsdp_forward_prefetch       guides=forward_prefetch
fsdp_limit_all_gathers      guides=limit_all_gathers
fsdp_backward_prefetch      guides=backward_prefetch
dpo_beta                    axolotl=rl_beta
resolutions                 plan=image.resolutions kohya=resolution ai_toolkit=datasets[0].resolution
checkpoint_choice           plan=image.choice
vae_batch_size              plan=image.vae_batch kohya
image_loss                  kohya=loss_type ai_toolkit=train.loss_type
huber_c                     kohya
min_snr_gamma               kohya
noise_offset                kohya ai_toolkit=train.noise_offset
scale_weight_norms          kohya
caption_dropout             kohya=caption_dropout_rate ai_toolkit=datasets[0].caption_dropout_rate
guidance_scale              kohya
timestep_sampling           kohya ai_toolkit=train.timestep_type
flow_shift                  kohya=discrete_flow_shift
quantize_base               ai_toolkit=model.quantize
conv_rank                   kohya=network_args ai_toolkit=network.conv
conv_alpha                  ai_toolkit=network.conv_alpha
gpu_memory                  guides=max_memory_MB,max_memory
shm                         guides=shm_size
"""


def _names(rows: str) -> dict[NameSystem, dict[str, str]]:
    names: dict[NameSystem, dict[str, str]] = {system: {} for system in NameSystem}
    for row in rows.strip().splitlines():
        field, *entries = row.split()
        for entry in entries:
            system, _, words = entry.partition("=")
            names[NameSystem(system)] |= dict.fromkeys((words or field).split(","), field)
    return names


#: By system: its name for a field → the field.
FIELD_NAMES = _names(_TABLE)

#: Targets of earlier versions: their measurements are in benchmarks/techniques.md.
REMOVED_FIELDS = frozenset(
    {
        "soup_members",
        "last_stretch_rate",
        "duplicate_weight",
        "mix_datasets",
        "prompt_loss_share",
        "neftune_alpha",
        "lora_experts_r",
    }
)
