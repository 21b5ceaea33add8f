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
from core.engines.axolotl.recipe import LIGER_PLUGIN
from core.engines.base import RecipeError
from core.engines.render import render
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
from tests.core.engines.cases import TEXT_TASKS, inputs, text_plan
from tests.doubles.each import each


def config_of(plan: TrainingPlan, **changes: Any) -> dict[str, Any]:
    return dict(render(plan, inputs(plan.task.task_type, **changes)).config)


def changed(plan: TrainingPlan, part: str, **values: Any) -> TrainingPlan:
    return plan.model_copy(update={part: getattr(plan, part).model_copy(update=values)})


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_the_file_has_the_configuration(task: TaskType) -> None:
    rendered = render(text_plan(task), inputs(task))
    assert yaml.safe_load(rendered.files["config.yml"]) == rendered.config
    assert set(rendered.files) == {"config.yml"}


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_the_plans_numbers_are_the_configs(task: TaskType) -> None:
    config = config_of(text_plan(task))
    assert (config["lora_r"], config["lora_alpha"], config["lora_dropout"]) == (64, 32, 0.05)
    assert (config["micro_batch_size"], config["sequence_len"]) == (8, 1024)
    assert (config["num_epochs"], config["max_steps"]) == (2.0, 438)
    assert (config["learning_rate"], config["lr_scheduler"]) == (3e-4, "cosine")
    assert (config["eval_steps"], config["save_steps"], config["save_total_limit"]) == (40, 40, 2)
    assert (config["base_model"], config["output_dir"]) == ("/cache/models/base", "/run/output")
    assert config["dataset_prepared_path"].startswith("/run/work/")
    assert config["adapter"] == "lora"
    assert config["lora_target_linear"] is True


def test_a_full_fine_tune_has_no_adapter_keys() -> None:
    config = config_of(text_plan(TaskType.INSTRUCT, Method.FULL))
    assert not [key for key in config if key == "adapter" or key.startswith(("lora_", "peft_"))]


def test_a_four_bit_base_is_loaded_as_one() -> None:
    config = config_of(text_plan(TaskType.INSTRUCT, Method.QLORA))
    assert (config["adapter"], config["load_in_4bit"]) == ("qlora", True)


def test_named_modules_replace_every_linear_layer() -> None:
    adapter = AdapterPlan(rank=8, alpha=16, dropout=0, params=1, target_modules=("q_proj", "v_proj"))
    config = config_of(text_plan(TaskType.CHAT, adapter=adapter))
    assert config["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "lora_target_linear" not in config


def test_alpha_is_rounded_with_a_note() -> None:
    adapter = AdapterPlan(rank=8, alpha=22.6, dropout=0, params=1, dora=True, rslora=True)
    rendered = render(text_plan(TaskType.INSTRUCT, adapter=adapter), inputs())
    assert rendered.config["lora_alpha"] == 23
    assert any("lora_alpha 22.6" in note for note in rendered.notes)
    assert rendered.config["peft_use_dora"] is rendered.config["peft_use_rslora"] is True


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_packing_and_the_best_checkpoint_are_for_supervised_training_only(task: TaskType) -> None:
    config = config_of(text_plan(task))
    assert config.get("sample_packing", False) is task.is_supervised
    assert config.get("load_best_model_at_end", False) is task.is_supervised
    assert ("ddp_find_unused_parameters" in config) is task.is_supervised


def test_what_the_plugin_does_in_preference_training_is_noted() -> None:
    rendered = render(text_plan(TaskType.DPO), inputs(TaskType.DPO))
    assert any("load_best" in note and "plugin" in note for note in rendered.notes)
    assert any("lora_dropout" in note for note in rendered.notes)


def test_dpo_uses_the_evaluations_beta() -> None:
    config = config_of(text_plan(TaskType.DPO))
    assert (config["rl"], config["rl_beta"]) == ("dpo", 0.1)
    assert "excess_length_strategy" not in config


def test_grpo_samples_as_validators_do() -> None:
    config = config_of(text_plan(TaskType.GRPO, grpo=GrpoPlan(beta=0.04, generations=8)))
    expected = {
        "num_generations": 8,
        "max_completion_length": 256,
        "temperature": 0.9,
        "top_k": 50,
        "beta": 0.04,
    }
    assert expected.items() <= config["trl"].items()
    assert config["trl"]["reward_funcs"] == ["task_rewards.reward_0", "task_rewards.reward_1"]
    assert config["trl"]["reward_weights"] == [0.75, 0.25]
    assert config["rl"] == "grpo"


@pytest.mark.parametrize(("gpus", "wanted"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_grpos_evaluation_batch_is_a_multiple_of_the_group(gpus: int, wanted: int) -> None:
    assert config_of(text_plan(TaskType.GRPO, gpus=gpus))["eval_batch_size"] == wanted


def test_vllm_shares_the_card_and_has_its_parallel_size_set() -> None:
    config = config_of(text_plan(TaskType.GRPO, grpo=GrpoPlan(vllm=True, vllm_memory_share=0.4)))
    assert (config["trl"]["use_vllm"], config["trl"]["vllm_mode"]) == (True, "colocate")
    assert config["vllm"] == {"gpu_memory_utilization": 0.4, "tensor_parallel_size": 1}


def test_sharding_is_fsdp2_and_wraps_the_checkpointing() -> None:
    rendered = render(text_plan(TaskType.INSTRUCT, parallelism=Parallelism.FSDP), inputs())
    config = rendered.config
    assert config["fsdp_version"] == 2
    assert config["fsdp_config"]["activation_checkpointing"] is True
    assert config["gradient_checkpointing"] is False
    assert "fsdp" not in config
    assert any("fsdp_forward_prefetch" in note for note in rendered.notes)


def test_an_optimizer_that_does_not_shard_is_replaced_with_a_note() -> None:
    optimizer = OptimizerPlan(name=Optimizer.ADAMW_BNB_8BIT, learning_rate=1e-4, schedule=LrSchedule.LINEAR)
    sharded = text_plan(TaskType.INSTRUCT, parallelism=Parallelism.FSDP, optimizer=optimizer)
    rendered = render(sharded, inputs())
    assert rendered.config["optimizer"] == "adamw_torch_8bit"
    assert any("adamw_bnb_8bit" in note for note in rendered.notes)
    assert config_of(text_plan(TaskType.INSTRUCT, optimizer=optimizer))["optimizer"] == "adamw_bnb_8bit"


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
        (LrSchedule.ONE_CYCLE, {}, {}),
        (LrSchedule.LINEAR, {}, {}),
        (LrSchedule.CONSTANT, {}, {}),
        (LrSchedule.CONSTANT_WITH_WARMUP, {}, {}),
    ],
)
def test_every_schedule_has_the_arguments_it_needs(
    schedule: LrSchedule, settings: dict[str, Any], keys: dict[str, Any]
) -> None:
    optimizer = OptimizerPlan(
        name=Optimizer.ADAMW_TORCH, learning_rate=1e-4, schedule=schedule, warmup_steps=10, **settings
    )
    config = config_of(text_plan(TaskType.INSTRUCT, optimizer=optimizer))
    assert config["lr_scheduler"] == str(schedule)
    assert keys.items() <= config.items()


def test_an_optimizer_of_another_engine_is_refused_with_the_profiles_word_for_it() -> None:
    optimizer = OptimizerPlan(name=Optimizer.PRODIGY, learning_rate=1.0, schedule=LrSchedule.LINEAR)
    with pytest.raises(RecipeError) as refused:
        config_of(text_plan(TaskType.INSTRUCT, optimizer=optimizer))
    assert "profile h100x4" in str(refused.value)
    assert 'targets.optimizer → optimizer has value "prodigy"' in str(refused.value)


def test_stages_and_persistent_workers_are_handed_to_the_plugin() -> None:
    plan = changed(text_plan(TaskType.CHAT), "optimizer", stages=(LrStage(share=1, factor=1),))
    plan = plan.model_copy(
        update={"loader": LoaderPlan(persistent_workers=True, workers=64, prefetch_factor=8)}
    )
    rendered = render(plan, inputs(TaskType.CHAT))
    assert any("lr_stages" in note for note in rendered.notes)
    assert any("dataloader_persistent_workers" in note for note in rendered.notes)
    assert rendered.config["dataloader_num_workers"] == 64
    assert rendered.config["dataloader_prefetch_factor"] == 8


def test_without_loader_processes_nothing_is_fetched_ahead() -> None:
    plan = text_plan(TaskType.CHAT, loader=LoaderPlan(workers=0, prefetch_factor=None))
    config = config_of(plan)
    assert config["dataloader_num_workers"] == 0
    assert "dataloader_prefetch_factor" not in config


def test_grouping_by_length_gives_way_to_packing() -> None:
    plan = changed(text_plan(TaskType.INSTRUCT), "sequence", group_by_length=True)
    rendered = render(plan, inputs())
    assert "group_by_length" not in rendered.config
    assert any("group_by_length" in note for note in rendered.notes)
    loose = changed(plan, "sequence", packing=False)
    assert config_of(loose)["group_by_length"] is True


def test_rows_held_out_by_the_engine_when_there_is_no_file() -> None:
    plan = changed(text_plan(TaskType.INSTRUCT), "steps", eval_rows=200, early_stopping_patience=8)
    config = config_of(plan, eval_path=None)
    assert config["val_set_size"] == 200
    assert config["early_stopping_patience"] == 8
    assert "test_datasets" not in config


def test_without_evaluation_there_are_no_evaluation_keys() -> None:
    steps = StepsPlan(epochs=1, per_epoch=10, total=10, eval_every=5, save_every=5, early_stopping_patience=3)
    config = config_of(text_plan(TaskType.INSTRUCT, steps=steps), eval_path=None)
    assert config["val_set_size"] == 0
    assert not config.keys() & {"eval_steps", "load_best_model_at_end", "early_stopping_patience"}


def test_a_plan_without_gpu_trains_in_fp32_without_kernels() -> None:
    cpu = text_plan(TaskType.INSTRUCT, gpus=1, parallelism=Parallelism.SINGLE)
    cpu = cpu.model_copy(update={"gpus": parse_gpus("cpu"), "available": parse_gpus("cpu")})
    rendered = render(cpu, inputs())
    config = rendered.config
    assert (config["bf16"], config["fp16"], config["tf32"]) == (False, False, False)
    assert config["lora_mlp_kernel"] is config["lora_qkv_kernel"] is config["lora_o_kernel"] is False
    assert any("no GPU" in note for note in rendered.notes)


def test_unset_lora_kernels_would_be_switched_on_so_they_are_always_written() -> None:
    for task in TEXT_TASKS:
        config = config_of(text_plan(task))
        kernels = {config[f"lora_{part}_kernel"] for part in ("mlp", "qkv", "o", "embedding")}
        assert kernels == {task.is_supervised}


def test_liger_comes_with_its_plugin_and_its_own_loss() -> None:
    precision = PrecisionPlan(liger=True, attention=Attention.FLASH_2)
    config = config_of(text_plan(TaskType.INSTRUCT, precision=precision), plugins=("trainer.hooks.Plugin",))
    assert config["plugins"] == ["trainer.hooks.Plugin", LIGER_PLUGIN]
    assert config["liger_fused_linear_cross_entropy"] is True
    assert "chunked_cross_entropy" not in config
    assert config["attn_implementation"] == "flash_attention_2"


def test_fp8_is_compiled_as_well() -> None:
    rendered = render(text_plan(TaskType.INSTRUCT, precision=PrecisionPlan(fp8=True)), inputs())
    assert rendered.config["fp8"] is rendered.config["torch_compile"] is True
    assert any(note.startswith("fp8") for note in rendered.notes)
    tuned = PrecisionPlan(compile_mode=CompileMode.MAX_AUTOTUNE)
    assert config_of(text_plan(TaskType.CHAT, precision=tuned))["torch_compile_mode"] == "max-autotune"


def test_noise_on_the_embeddings_is_supervised_only() -> None:
    noisy = PrecisionPlan(neftune_alpha=5.0)
    assert config_of(text_plan(TaskType.INSTRUCT, precision=noisy))["neftune_noise_alpha"] == 5.0
    rendered = render(text_plan(TaskType.DPO, precision=noisy), inputs(TaskType.DPO))
    assert "neftune_noise_alpha" not in rendered.config
    assert any("neftune_alpha" in note for note in rendered.notes)


def test_raw_keys_win_over_what_is_rendered() -> None:
    plan = text_plan(TaskType.INSTRUCT, engine_config={"lora_r": 8, "logging_steps": 5, "seed": None})
    config = config_of(plan)
    assert (config["lora_r"], config["logging_steps"]) == (8, 5)
    assert "seed" not in config


def test_a_misspelled_raw_key_never_reaches_a_gpu() -> None:
    plan = text_plan(TaskType.INSTRUCT, engine_config={"lora_rank": 8})
    with pytest.raises(RecipeError) as refused:
        config_of(plan)
    message = str(refused.value)
    assert "engine_config.axolotl → lora_rank has value 8" in message
    assert "the nearest is lora_r" in message


def test_an_infeasible_plan_is_not_rendered() -> None:
    reason = "8 GB do not hold 16 GB of weights"
    verdict = PlanVerdict(feasible=False, code=Refusal.NO_MEMORY, reason=reason)
    plan = text_plan(TaskType.INSTRUCT).model_copy(update={"verdict": verdict})
    with pytest.raises(RecipeError, match=reason):
        render(plan, inputs())


def test_an_image_engine_does_not_take_a_text_task() -> None:
    for engine in (Engine.KOHYA, Engine.AI_TOOLKIT):
        with pytest.raises(RecipeError, match="InstructTextTask"):
            render(text_plan(TaskType.INSTRUCT, engine=engine), inputs())


def test_a_text_task_needs_its_row_format() -> None:
    with pytest.raises(RecipeError, match="dataset_type"):
        render(text_plan(TaskType.INSTRUCT), inputs(None))


def test_notes_are_comments_at_the_top_of_the_file() -> None:
    text = render(text_plan(TaskType.DPO), inputs(TaskType.DPO)).files["config.yml"]
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert re.match(r"# profile h100x4, plan [0-9a-f]{12}$", head[0])
    assert any("lora_dropout" in line for line in head)


def test_a_note_cannot_break_out_of_its_comment() -> None:
    plan = text_plan(TaskType.INSTRUCT, profile="x\nbase_model: evil", engine_config={})
    assert yaml.safe_load(render(plan, inputs()).files["config.yml"])["base_model"] == "/cache/models/base"


def test_the_difference_to_the_template_can_be_shown() -> None:
    rendered = render(text_plan(TaskType.DPO), inputs(TaskType.DPO))
    assert rendered.base["rl"] == "dpo"
    assert "lora_r" not in rendered.base
    kept = [key for key in rendered.base if rendered.config.get(key) == rendered.base[key]]
    assert kept == list(rendered.base)


@each("task", TEXT_TASKS)
@each("token", ["</s>", "<|end_of_text|>", "<|endoftext|>"])
def test_a_pad_token_is_written_and_not_taken_for_a_secret(task: TaskType, token: str) -> None:
    """Half of all base models have none (Llama 3, Mistral); taken for a secret it ended their runs."""
    config = config_of(text_plan(task), pad_token=token)
    assert config["special_tokens"] == {"pad_token": token}


def test_a_secret_among_special_tokens_is_still_one() -> None:
    with pytest.raises(RecipeError, match="secret"):
        config_of(text_plan(TaskType.INSTRUCT), pad_token="hf_" + "x" * 30)
