"""The shipped profiles hold the numbers of their sources, and every one of them can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.config.files import config_dir
from core.domain.choices import (
    Attention,
    BackwardPrefetch,
    CompileMode,
    Engine,
    EvalMetric,
    GpuStrategy,
    LrSchedule,
    Method,
    Optimizer,
)
from core.domain.hardware import parse_gpus
from core.domain.selectors import Lane
from core.domain.tasks import ImageModelType, TaskType
from core.profile.explain import ProfileFindingLevel, check_profile, representative_subjects
from core.profile.resolve import load_profile, resolve_profile
from core.profile.schema import ResolvedProfile
from tests.core.profile.test_resolve import model, picture
from tests.doubles.each import each

FILES = sorted((config_dir() / "profiles").glob("*.yaml"))
NAMES = [file.stem for file in FILES]


def of(name: str, task: TaskType = TaskType.INSTRUCT, params: float = 8.03e9) -> ResolvedProfile:
    return resolve_profile(load_profile(name), task, model(params))


def of_image(name: str, kind: ImageModelType) -> ResolvedProfile:
    return resolve_profile(load_profile(name), TaskType.IMAGE, picture(kind))


@each("file", FILES)
def test_every_shipped_file_is_read_and_resolves_for_every_task(file: Path) -> None:
    profile = load_profile(str(file))
    assert profile.description
    if profile.hardware:
        parse_gpus(profile.hardware)
    for one in representative_subjects():
        found = resolve_profile(profile, one.task_type, one.model)
        assert found.name == file.stem
    assert not [finding for finding in check_profile(profile) if finding.level is ProfileFindingLevel.ERROR]


NUMBER = re.compile(r"[:{,]\s*\[?-?\d")


@each("name", NAMES)
def test_every_number_is_traced_to_its_source_in_a_comment_on_its_line(name: str) -> None:
    lines = (config_dir() / "profiles" / f"{name}.yaml").read_text().splitlines()
    exempt = ("description", "hardware", "when", '- "', "#")
    env = range(0)
    for start, line in enumerate(lines):
        if line.startswith("env:") and "#" in line:  # one source for all of it, named on the first line
            env = range(start, start + 8)
    untraced = [
        f"{number + 1}: {line}"
        for number, line in enumerate(lines)
        if NUMBER.search(line.split("#")[0])
        and "#" not in line
        and not line.strip().startswith(exempt)
        and not (number in env and line.startswith("  "))
    ]
    assert untraced == []


@each("task", [task for task in TaskType if task.is_text])
def test_h100x4_has_the_numbers_of_its_guide_for_every_text_task(task: TaskType) -> None:
    found = of("h100x4", task)
    t = found.targets
    assert (t.lora_r, t.lora_alpha, t.lora_dropout) == (512, 1024, 0.05)
    assert (t.micro_batch_size, t.gradient_accumulation_steps, t.num_epochs) == (32, 1, 8)
    assert (t.learning_rate, t.warmup_steps, t.weight_decay, t.max_grad_norm) == (8e-4, 300, 0.002, 0.3)
    assert (t.max_steps, t.lr_scheduler) == (10_000, LrSchedule.COSINE_WITH_RESTARTS)
    assert (t.lr_cycles.low, t.lr_cycles.high) == (5, 10)
    assert (t.bf16, t.fp16, t.tf32, t.gradient_checkpointing) == (True, False, True, False)
    assert (t.dataloader_num_workers, t.dataloader_prefetch_factor, t.dataloader_pin_memory) == (64, 8, True)
    assert (t.eval_steps, t.save_steps, t.early_stopping_patience) == (20, 40, 8)
    assert (t.fsdp_above, t.fsdp_reshard_after_forward) == (0, True)
    assert (t.fsdp_forward_prefetch, t.fsdp_limit_all_gathers) == (True, True)
    assert t.fsdp_backward_prefetch is BackwardPrefetch.PRE
    assert (found.limits.gpu_memory, found.limits.max_gpus) == (75 * 10**9, 4)
    assert (found.container.memory, found.container.shm) == (400 * 10**9, 128 * 10**9)
    assert found.container.cpus == "0-63"
    assert found.env == {
        "NCCL_NET_GDR_LEVEL": "5",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_NTHREADS": "8",
        "CUDA_LAUNCH_BLOCKING": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_h100x4_has_the_guide_s_tables_for_sdxl_and_flux() -> None:
    s = of_image("h100x4", ImageModelType.SDXL).targets
    assert (s.lora_r, s.lora_alpha, s.micro_batch_size, s.vae_batch_size) == (512, 256, 16, 64)
    assert (s.max_steps, s.num_epochs, s.learning_rate) == (9600, 60, 4e-5)
    assert (s.min_snr_gamma, s.huber_c, s.max_grad_norm, s.weight_decay) == (24, 0.015, 0.15, 0.0005)
    f = of_image("h100x4", ImageModelType.FLUX).targets
    assert (f.lora_r, f.lora_alpha, f.micro_batch_size, f.vae_batch_size) == (512, 512, 8, 32)
    assert (f.max_steps, f.num_epochs, f.learning_rate) == (12_000, 600, 2e-4)
    assert (f.min_snr_gamma, f.huber_c, f.max_grad_norm, f.weight_decay) == (16, 0.02, 0.2, 0.0005)
    assert s.gradient_checkpointing is f.gradient_checkpointing is False


@pytest.mark.parametrize(
    ("params", "rank", "alpha"), [(3e9, 64, 128), (14.8e9, 128, 256), (70.6e9, 256, 512)]
)
def test_h100x4_strategy_has_the_numbers_of_its_strategy(params: float, rank: int, alpha: int) -> None:
    found = of("h100x4-strategy", params=params)
    t = found.targets
    assert (t.lora_r, t.lora_alpha, t.sequence_len) == (rank, alpha, 2048)
    assert (t.micro_batch_size, t.gradient_accumulation_steps, t.learning_rate) == (4, 2, 3e-4)
    assert t.lr_gpu_scale == {2: 1.2, 4: 1.5}
    assert [(step.above, step.gpus) for step in t.gpus_by_size] == [(70 * 10**9, 4), (35 * 10**9, 2)]
    assert (t.gpu_strategy, t.fsdp_above) == (GpuStrategy.BY_SIZE, 70 * 10**9)
    assert t.ema_decay is not None
    assert t.early_stopping_patience is not None
    assert (t.group_by_length, t.gradient_checkpointing, t.bf16) == (True, True, True)
    assert t.attention is Attention.FLASH_2
    assert found.container.shm == 32 * 10**9


BANDS = (
    (3e9, 256, 64, 0.05, 4e-4, 16, 1),
    (8e9, 512, 128, 0.1, 3e-4, 8, 2),
    (32e9, 1024, 256, 0.15, 2e-4, 4, 4),
    (70.6e9, 2048, 512, 0.2, 1e-4, 2, 8),
)


@pytest.mark.parametrize(("params", "rank", "alpha", "dropout", "rate", "batch", "accumulation"), BANDS)
def test_h100x8_has_its_strategy_s_four_bands(
    params: float, rank: int, alpha: int, dropout: float, rate: float, batch: int, accumulation: int
) -> None:
    t = of("h100x8", TaskType.CHAT, params).targets
    assert (t.lora_r, t.lora_alpha, t.lora_dropout, t.learning_rate) == (rank, alpha, dropout, rate)
    assert (t.micro_batch_size, t.gradient_accumulation_steps) == (batch, accumulation)


@each(
    ("task", "rank", "rate"),
    [(TaskType.INSTRUCT, 1.4, 1.2), (TaskType.GRPO, 1.6, 0.85), (TaskType.DPO, 1.0, 1.0)],
)
@each("params", [3e9, 8e9, 32e9, 70.6e9])
def test_h100x8_has_its_strategy_s_task_multipliers(
    task: TaskType, rank: float, rate: float, params: float
) -> None:
    plain, scaled = of("h100x8", TaskType.CHAT, params).targets, of("h100x8", task, params).targets
    assert scaled.lora_r == pytest.approx(plain.lora_r * rank, abs=4)
    assert scaled.learning_rate == pytest.approx(plain.learning_rate * rate)


def test_h100x8_multiplies_images_too() -> None:
    base, found = (of_image(name, ImageModelType.SDXL).targets for name in ("base", "h100x8"))
    assert found.lora_r == base.lora_r * 1.5
    assert found.learning_rate == pytest.approx(base.learning_rate * 1.15)


def test_h100x8_has_lanes_and_the_rest_of_its_strategy() -> None:
    found = of("h100x8")
    t = found.targets
    lanes: dict[str, Lane] = t.lanes
    assert {name: lane.gpus for name, lane in lanes.items()} == {
        "small": [0, 1],
        "medium": [2, 3],
        "large": [4, 5],
        "xlarge": [6, 7],
        "sdxl": [6],
        "flux": [7],
    }
    assert t.gpu_strategy is GpuStrategy.LANES
    assert (found.limits.max_jobs, found.limits.gpu_memory_share) == (12, 0.9)
    assert (t.sequence_len, t.ema_decay, t.ema_every) == (8192, 0.9999, 5)
    assert [stage.share for stage in t.lr_stages] == [0.5, 0.3, 0.2]
    assert sorted((stage.factor for stage in t.lr_stages), reverse=True) == [1.0, 0.3, 0.1]
    assert (t.eval_steps, t.save_total_limit) == (25, 8)
    assert (t.plateau_factor, t.plateau_growth) == (0.8, 1.05)
    assert (t.compile_mode, t.dataloader_num_workers) == (CompileMode.DEFAULT, 16)


def test_text_lanes_of_h100x8_divide_the_sizes_without_a_gap() -> None:
    lanes = of("h100x8").targets.lanes
    for params in (1, 6_999_999_999, 7 * 10**9, 13 * 10**9, 70 * 10**9, 700 * 10**9):
        assert sum(lane.size is not None and params in lane.size for lane in lanes.values()) == 1
    kinds = [kind for lane in lanes.values() for kind in lane.image or ()]
    assert sorted(kinds) == sorted(ImageModelType)


def test_h100_fast_has_the_numbers_of_its_guide() -> None:
    found = of("h100-fast")
    t = found.targets
    assert (t.engine, t.fp8, t.compile_mode) == (Engine.NATIVE, True, CompileMode.MAX_AUTOTUNE)
    assert (t.attention, t.optimizer) == (Attention.FLASH_3, Optimizer.ADAMW_TORCH_FUSED)
    assert (t.lr_scheduler, t.warmup_ratio, t.warmup_steps) == (LrSchedule.ONE_CYCLE, 0.1, None)
    assert (t.micro_batch_size, t.gradient_accumulation_steps, t.max_grad_norm) == (4, 16, 1.0)
    assert (t.dataloader_num_workers, t.dataloader_prefetch_factor) == (16, 4)
    assert t.dataloader_persistent_workers
    assert t.dataloader_drop_last
    assert (found.limits.gpu_memory, found.limits.gpu_memory_share) == (72 * 10**9, 0.9)
    assert found.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    small = of("h100-fast", params=0.5e9).targets
    assert (small.micro_batch_size, small.gradient_accumulation_steps) == (32, 2)


@each(("params", "rate"), [(1.2e9, 1e-4), (3.1e9, 7.5e-5), (4.5e9, 7e-5), (8e9, 3.5e-5), (14.8e9, 3e-4)])
def test_steady_has_the_winner_s_rates_by_size(params: float, rate: float) -> None:
    t = of("steady", params=params).targets
    assert t.learning_rate == rate
    assert (t.method, t.full_below, t.eval_metric) == (None, 9 * 10**9, EvalMetric.VALIDATOR)
    assert t.effective_batch_size == (64 if params < 9e9 else 32)


def test_steady_stays_inside_the_published_ranges() -> None:
    steady = load_profile("steady")
    for one in representative_subjects():
        found = resolve_profile(steady, one.task_type, one.model)
        t = found.targets
        if one.task_type.is_text:
            assert t.learning_rate * (t.lora_alpha or 32) <= (found.limits.max_alpha_lr or 0)
        if one.task_type.is_rl:
            # GRPO is trained by LoRA, at ten times a full fine-tune's rate.
            assert 1e-6 <= t.learning_rate <= (5e-5 if one.task_type.generates else 2e-5)


def test_cpu_demo_asks_for_nothing_that_needs_a_gpu() -> None:
    t = of("cpu-demo").targets
    assert not any((t.bf16, t.fp16, t.tf32, t.fp8, t.liger, t.fused_loss, t.lora_kernels))
    assert (t.attention, t.optimizer, t.compile_mode) == (Attention.SDPA, Optimizer.ADAMW_TORCH, None)
    assert t.dataloader_num_workers == 0
    assert parse_gpus(load_profile("cpu-demo").hardware or "").is_cpu


@each("name", NAMES)
@each("kind", list(ImageModelType))
def test_settings_for_text_never_reach_images(name: str, kind: ImageModelType) -> None:
    t = of_image(name, kind).targets
    assert t.method is Method.LORA
    assert t.engine is (Engine.KOHYA if kind in ("sdxl", "flux") else Engine.AI_TOOLKIT)
    assert t.learning_rate <= 5e-4
    assert t.micro_batch_size <= 16
    assert t.ema_decay is None
    if kind not in ("sdxl", "flux"):
        assert t.num_epochs is None
        assert t.max_steps is not None
