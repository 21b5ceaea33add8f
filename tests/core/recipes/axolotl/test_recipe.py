"""Text plans as Axolotl configurations, key by key."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from core.domain.choices import (
    Attention,
    CompileMode,
    Engine,
    LrSchedule,
    Method,
    Optimizer,
    Parallelism,
    Refusal,
)
from core.domain.hardware import parse_gpus
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.models.kernels import LigerPart
from core.planning.budget import PlanVerdict
from core.planning.plan import (
    AdapterPlan,
    GrpoPlan,
    LoaderPlan,
    LrStage,
    OptimizerPlan,
    PrecisionPlan,
    StepsPlan,
    TrainingPlan,
)
from core.profile.targets import Targets
from core.recipes.axolotl.recipe import BASE_ONLY, LIGER_PLUGIN, SPARE_TOKENS
from core.recipes.base import RecipeError
from core.recipes.render import render
from tests.core.builders import resolved
from tests.core.recipes.cases import TEXT_TASKS, inputs, noted, text_plan
from tests.doubles.each import each

SFT, CHAT, DPO, GRPO, ENVIRONMENT = TEXT_TASKS
FSDP = Parallelism.FSDP
ADAPTER_KEYS = ("adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_mlp_kernel")
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def config_of(plan: TrainingPlan, **changes: Any) -> dict[str, Any]:
    return dict(render(plan, inputs(plan.task.task_type, **changes)).config)


def changed(plan: TrainingPlan, part: str, **values: Any) -> TrainingPlan:
    return plan.model_copy(update={part: getattr(plan, part).model_copy(update=values)})


def adapter(**values: Any) -> AdapterPlan:
    return AdapterPlan(**{"rank": 8, "alpha": 16, "dropout": 0, "params": 1, **values})


def scheduled(schedule: LrSchedule, name: Optimizer = Optimizer.ADAMW_TORCH, **values: Any) -> OptimizerPlan:
    return OptimizerPlan(name=name, learning_rate=1e-4, schedule=schedule, warmup_steps=10, **values)


def on_cpu() -> TrainingPlan:
    plan = text_plan(SFT, gpus=1, parallelism=Parallelism.SINGLE)
    return plan.model_copy(update={"gpus": parse_gpus("cpu"), "available": parse_gpus("cpu")})


@each("task", TEXT_TASKS)
def test_the_plans_numbers_are_the_configs_and_the_files(task: TaskType) -> None:
    rendered = render(text_plan(task), inputs(task))
    config = dict(rendered.config)
    expected = {
        "lora_r": 64,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_linear": True,
        "adapter": "lora",
        "micro_batch_size": 8,
        "sequence_len": 1024,
        "num_epochs": 2.0,
        "max_steps": 438,
        "learning_rate": 3e-4,
        "lr_scheduler": "cosine",
        "eval_steps": 40,
        "save_steps": 40,
        "save_total_limit": 2,
        "base_model": "/cache/models/base",
        "output_dir": "/run/output",
        "dataset_prepared_path": "/run/work/prepared",
    }
    assert expected.items() <= config.items()
    # Packing and the best checkpoint are for supervised training only; unset kernels would be switched on.
    assert config.get("sample_packing", False) is task.is_supervised
    assert config.get("load_best_model_at_end", False) is task.is_supervised
    assert ("ddp_find_unused_parameters" in config) is task.is_supervised
    assert {config[kernel] for kernel in KERNELS} == {task.is_supervised}
    assert rendered.files.keys() == {"config.yml"}
    assert yaml.safe_load(rendered.files["config.yml"]) == config


def check(plan: TrainingPlan, *notes: str, **keys: Any) -> None:
    """The plan's configuration has these keys (None: it lacks them), and notes that begin so."""
    rendered = render(plan, inputs(plan.task.task_type))
    assert {key: rendered.config.get(key) for key in keys} == keys
    assert [note for note in notes if not noted(rendered, note)] == []


def test_adapters() -> None:
    check(text_plan(SFT, Method.FULL), **dict.fromkeys(ADAPTER_KEYS))
    check(text_plan(SFT, Method.QLORA), adapter="qlora", load_in_4bit=True)
    named = text_plan(CHAT, targets=Targets(lora_target_modules=["q_proj", "v_proj"]))
    check(named, lora_target_modules=["q_proj", "v_proj"], lora_target_linear=None)
    ranks = {"down_proj": 32, "layers[.]0[.].*": 8}
    check(text_plan(SFT, adapter=adapter(rank_pattern=ranks)), lora_rank_pattern=ranks)
    odd = text_plan(SFT, adapter=adapter(alpha=22.6), targets=Targets(dora=True, rslora=True))
    check(odd, "lora_alpha 22.6", lora_alpha=23, peft_use_dora=True, peft_use_rslora=True)


def test_dpo_uses_the_evaluations_beta_and_leaves_the_rest_to_the_plugin() -> None:
    check(text_plan(DPO), "load_best", "lora_dropout", rl="dpo", rl_beta=0.1, excess_length_strategy=None)


def test_grpo_samples_as_validators_do() -> None:
    config = config_of(text_plan(GRPO, targets=Targets(grpo_beta=0.04)))
    expected = {
        "num_generations": 8,
        "max_completion_length": 256,
        "temperature": 0.9,
        "top_k": 50,
        "beta": 0.04,
        "reward_funcs": ["task_rewards.reward_0", "task_rewards.reward_1"],
        "reward_weights": [0.75, 0.25],
    }
    assert expected.items() <= config["trl"].items()
    assert config["rl"] == "grpo"


def test_a_kl_on_prompts_has_trl_keep_the_base() -> None:
    """Where there is no adapter to switch off."""
    full = text_plan(GRPO, Method.FULL, targets=Targets(grpo_prompt_kl=0.5))
    assert config_of(full)["trl"]["beta"] == BASE_ONLY
    assert config_of(text_plan(GRPO, targets=Targets(grpo_prompt_kl=0.5)))["trl"]["beta"] == 0
    assert config_of(text_plan(GRPO))["trl"]["beta"] == 0


def test_vllm_shares_the_gpu_and_has_its_parallel_size_set() -> None:
    plan = text_plan(GRPO, grpo=GrpoPlan(vllm=True, vllm_sleep=True, vllm_memory_share=0.4))
    config = config_of(plan)
    expected = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    assert expected.items() <= config["trl"].items()
    length = plan.sequence.length + SPARE_TOKENS
    engine = {"gpu_memory_utilization": 0.4, "tensor_parallel_size": 1, "max_model_len": length}
    assert config["vllm"] == engine
    window = plan.model.model_copy(update={"max_position": plan.sequence.length + 1})
    assert config_of(plan.model_copy(update={"model": window}))["vllm"]["max_model_len"] == length - 63
    awake = config_of(text_plan(GRPO, grpo=GrpoPlan(vllm=True)))
    assert "vllm_enable_sleep_mode" not in awake["trl"]


def test_sharding_is_fsdp2_and_wraps_the_checkpointing() -> None:
    sharded = text_plan(SFT, parallelism=FSDP)
    check(sharded, "fsdp_forward_prefetch", fsdp=None, fsdp_version=2, gradient_checkpointing=False)
    assert config_of(sharded)["fsdp_config"]["activation_checkpointing"] is True


def test_an_optimizer_that_does_not_shard_is_replaced_with_a_note() -> None:
    optimizer = scheduled(LrSchedule.LINEAR, Optimizer.ADAMW_BNB_8BIT)
    sharded = text_plan(SFT, parallelism=FSDP, optimizer=optimizer)
    check(sharded, "optimizer adamw_bnb_8bit", optimizer="adamw_torch_8bit")
    check(text_plan(SFT, optimizer=optimizer), optimizer="adamw_bnb_8bit")


def test_batches_and_loaders() -> None:
    loader = LoaderPlan(persistent_workers=True, workers=64, prefetch_factor=8)
    busy = text_plan(CHAT, loader=loader)
    check(busy, "dataloader_persistent", dataloader_num_workers=64, dataloader_prefetch_factor=8)
    alone = text_plan(CHAT, loader=LoaderPlan(workers=0, prefetch_factor=None))
    check(alone, dataloader_num_workers=0, dataloader_prefetch_factor=None)
    grouped = changed(text_plan(SFT), "sequence", group_by_length=True)
    check(grouped, "group_by_length", group_by_length=None)
    check(changed(grouped, "sequence", packing=False), group_by_length=True)


def test_precision_and_kernels() -> None:
    check(on_cpu(), "bf16, tf32", bf16=False, fp16=False, tf32=False, **dict.fromkeys(KERNELS, False))
    check(text_plan(SFT, precision=PrecisionPlan(fp8=True)), "fp8", fp8=True, torch_compile=True)
    tuned = PrecisionPlan(compile_mode=CompileMode.MAX_AUTOTUNE)
    check(text_plan(CHAT, precision=tuned), torch_compile_mode="max-autotune")


def test_stages_are_left_to_the_plugin() -> None:
    check(changed(text_plan(CHAT), "optimizer", stages=(LrStage(share=1, factor=1),)), "lr_stages")


def test_raw_keys_win_over_what_is_rendered() -> None:
    raw = {"lora_r": 8, "logging_steps": 5, "seed": None}
    check(text_plan(SFT, engine_config=raw), **raw)


@each(("gpus", "wanted"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_grpos_evaluation_batch_is_a_multiple_of_the_group(gpus: int, wanted: int) -> None:
    assert config_of(text_plan(GRPO, gpus=gpus))["eval_batch_size"] == wanted


@each(
    ("schedule", "settings", "keys"),
    [
        (LrSchedule.COSINE_WITH_RESTARTS, {"cycles": 5}, {"lr_scheduler_kwargs": {"num_cycles": 5}}),
        (LrSchedule.COSINE_WITH_MIN_LR, {"min_lr_ratio": 0.1}, {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}),
        (LrSchedule.COSINE, {"min_lr_ratio": 0.1}, {"cosine_min_lr_ratio": 0.1}),
        (
            LrSchedule.WSD,
            {"cooldown_share": 0.2},
            {"lr_scheduler_kwargs": {"num_decay_steps": 88, "min_lr_ratio": 0.0}},
        ),
        *((name, {}, {}) for name in LrSchedule if "cosine" not in name and name is not LrSchedule.WSD),
    ],
)
def test_every_schedule_has_the_arguments_it_needs(
    schedule: LrSchedule, settings: dict[str, Any], keys: dict[str, Any]
) -> None:
    config = config_of(text_plan(SFT, optimizer=scheduled(schedule, **settings)))
    assert config["lr_scheduler"] == str(schedule)
    assert keys.items() <= config.items()


def test_rows_are_held_out_by_the_engine_when_there_is_no_file() -> None:
    plan = changed(text_plan(SFT), "steps", eval_rows=200, early_stopping_patience=8)
    config = config_of(plan, eval_path=None)
    assert (config["val_set_size"], config["early_stopping_patience"]) == (200, 8)
    assert "test_datasets" not in config


def test_without_evaluation_there_are_no_evaluation_keys() -> None:
    steps = StepsPlan(epochs=1, per_epoch=10, total=10, eval_every=5, save_every=5, early_stopping_patience=3)
    config = config_of(text_plan(SFT, steps=steps), eval_path=None)
    assert config["val_set_size"] == 0
    assert not config.keys() & {"eval_steps", "load_best_model_at_end", "early_stopping_patience"}


def test_liger_comes_with_its_plugin_and_its_own_loss() -> None:
    precision = PrecisionPlan(liger=True, attention=Attention.FLASH_2)
    config = config_of(text_plan(SFT, precision=precision), plugins=("trainer.hooks.Plugin",))
    assert config["plugins"] == ["trainer.hooks.Plugin", LIGER_PLUGIN]
    assert config["liger_fused_linear_cross_entropy"] is True
    assert "chunked_cross_entropy" not in config
    assert config["attn_implementation"] == "flash_attention_2"


def test_experts_are_quantised_where_the_base_is() -> None:
    model = facts_from_name("Qwen/Qwen3-30B-A3B")
    config = config_of(text_plan(SFT).model_copy(update={"model": model}))
    assert config["lora_target_linear"] is True
    four_bit = config_of(text_plan(SFT, Method.QLORA).model_copy(update={"model": model}))
    assert (four_bit["quantize_moe_experts"], four_bit["lora_target_modules"]) == (True, "all-linear")
    assert "lora_target_linear" not in four_bit
    dense = config_of(text_plan(SFT, Method.QLORA))
    assert dense["lora_target_linear"] is True
    assert not dense.keys() & {"quantize_moe_experts", "lora_target_modules"}


@each(
    ("architecture", "task", "missing"),
    [
        ("granite", SFT, {LigerPart.LOSS}),
        ("glm4", SFT, {LigerPart.ROPE}),
        ("qwen3_moe", SFT, {LigerPart.GLU}),
        ("llama", TaskType.DPO, {LigerPart.LOSS}),
    ],
)
def test_parts_that_liger_has_not_for_a_model_or_a_loss_are_left_out(
    architecture: str, task: TaskType, missing: set[LigerPart]
) -> None:
    plan = text_plan(task, precision=PrecisionPlan(liger=True))
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"architecture": architecture})})
    config = config_of(plan)
    assert {part for part in LigerPart if part not in config} == missing
    assert ("chunked_cross_entropy" in config) is (architecture == "granite")


@each(
    ("changes", "parts"),
    [
        (
            {"optimizer": scheduled(LrSchedule.LINEAR, Optimizer.PRODIGY)},
            ("profile h100x4", 'targets.optimizer → optimizer has value "prodigy"'),
        ),
        (
            {"engine_config": {"lora_rank": 8}},
            ("engine_config.axolotl → lora_rank has value 8", "the nearest is lora_r"),
        ),
        ({"verdict": PlanVerdict(feasible=False, code=Refusal.NO_MEMORY, reason="too big")}, ("too big",)),
        ({"engine": Engine.KOHYA}, ("InstructTextTask",)),
        ({"engine": Engine.AI_TOOLKIT}, ("InstructTextTask",)),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_the_profiles_words(
    changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as refused:
        config_of(text_plan(SFT, **changes))
    assert [part for part in parts if part not in str(refused.value)] == []


def test_a_text_task_needs_its_row_format() -> None:
    with pytest.raises(RecipeError, match="dataset_type"):
        render(text_plan(SFT), inputs(None))


def test_notes_are_comments_at_the_top_of_the_file() -> None:
    text = render(text_plan(DPO), inputs(DPO)).files["config.yml"]
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert re.match(r"# profile h100x4, plan [0-9a-f]{12}$", head[0])
    assert any("lora_dropout" in line for line in head)


def test_a_note_cannot_break_out_of_its_comment() -> None:
    plan = text_plan(SFT, profile=resolved(name="x\nbase_model: evil"), engine_config={})
    assert yaml.safe_load(render(plan, inputs()).files["config.yml"])["base_model"] == "/cache/models/base"


def test_the_difference_to_the_template_can_be_shown() -> None:
    rendered = render(text_plan(DPO), inputs(DPO))
    assert rendered.base["rl"] == "dpo"
    assert "lora_r" not in rendered.base
    assert rendered.base.items() <= rendered.config.items()


@each("task", TEXT_TASKS)
@each("token", ["</s>", "<|end_of_text|>", "<|endoftext|>"])
def test_a_pad_token_is_written_and_not_taken_for_a_secret(task: TaskType, token: str) -> None:
    """Half of all base models have none (Llama 3, Mistral); taken for a secret it ended their runs."""
    assert config_of(text_plan(task), pad_token=token)["special_tokens"] == {"pad_token": token}


def test_a_secret_among_special_tokens_is_still_one() -> None:
    with pytest.raises(RecipeError, match="secret"):
        config_of(text_plan(SFT), pad_token="hf_" + "x" * 30)
