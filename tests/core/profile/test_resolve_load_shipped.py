"""The shipped profiles hold the numbers of their sources, and every one of them can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from core.config.files import config_dir
from core.domain.choices import Engine, Method
from core.domain.hardware import parse_gpus
from core.domain.tasks import TASK_WORDS, ImageModelType, TaskType
from core.domain.units import parse_params
from core.models.image_families import IMAGE_FAMILIES
from core.profile.explain import ProfileFindingLevel, Subject, check_profile, representative_subjects
from core.profile.resolve import load_profile, resolve_profile
from core.profile.schema import ResolvedProfile
from core.profile.targets import Targets
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
    for subject in representative_subjects():
        assert resolve_profile(profile, subject.task_type, subject.model).name == file.stem
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


#: By profile: a task, a model (its parameters, or a kind of image model), and the numbers of the source.
FROM_SOURCES = """
h100x4:
  dpo 8B: &guide
    {lora_r: 512, lora_alpha: 1024, lora_dropout: 0.05, micro_batch_size: 32, gradient_accumulation_steps: 1,
    num_epochs: 8, learning_rate: 0.0008, warmup_steps: 300, weight_decay: 0.002, max_grad_norm: 0.3,
    max_steps: 10000, lr_scheduler: cosine_with_restarts, lr_cycles: 5-10, bf16: true, fp16: false,
    tf32: true, gradient_checkpointing: false, dataloader_num_workers: 64, dataloader_prefetch_factor: 8,
    dataloader_pin_memory: true, eval_steps: 20, save_steps: 40, early_stopping_patience: 8, fsdp_above: 0B,
    fsdp_reshard_after_forward: true, fsdp_forward_prefetch: true, fsdp_limit_all_gathers: true,
    fsdp_backward_prefetch: BACKWARD_PRE}
  instruct 8B: *guide
  chat 8B: *guide
  grpo 8B: *guide
  image sdxl:
    {lora_r: 512, lora_alpha: 256, micro_batch_size: 16, vae_batch_size: 64, max_steps: 9600, num_epochs: 60,
    learning_rate: 4.0e-5, min_snr_gamma: 24, huber_c: 0.015, max_grad_norm: 0.15, weight_decay: 0.0005,
    gradient_checkpointing: false}
  image flux:
    {lora_r: 512, lora_alpha: 512, micro_batch_size: 8, vae_batch_size: 32, max_steps: 12000, num_epochs: 600,
    learning_rate: 0.0002, min_snr_gamma: 16, huber_c: 0.02, max_grad_norm: 0.2, weight_decay: 0.0005,
    gradient_checkpointing: false}
h100x4-strategy:
  instruct 3B:
    {lora_r: 64, lora_alpha: 128, sequence_len: 2048, micro_batch_size: 4, gradient_accumulation_steps: 2,
    learning_rate: 0.0003, lr_gpu_scale: {2: 1.2, 4: 1.5}, gpu_strategy: by_size, fsdp_above: 70B,
    gpus_by_size: [{above: 70B, gpus: 4}, {above: 35B, gpus: 2}], group_by_length: true, bf16: true,
    gradient_checkpointing: true, attention: flash_attention_2}
  instruct 14.8B: {lora_r: 128, lora_alpha: 256, sequence_len: 2048, learning_rate: 0.0003}
  instruct 70.6B: {lora_r: 256, lora_alpha: 512, sequence_len: 2048, learning_rate: 0.0003}
h100x8:
  chat 3B: {lora_r: 256, lora_alpha: 64, lora_dropout: 0.05, learning_rate: 0.0004, micro_batch_size: 16}
  chat 8B: {lora_r: 512, lora_alpha: 128, lora_dropout: 0.1, learning_rate: 0.0003, micro_batch_size: 8,
    gradient_accumulation_steps: 2, gpu_strategy: lanes, sequence_len: 8192, ema_decay: 0.9999, ema_every: 5,
    eval_steps: 25, save_total_limit: 8, plateau_factor: 0.8, plateau_growth: 1.05, compile_mode: default,
    dataloader_num_workers: 16,
    lr_stages: [{share: 0.5, factor: 1.0}, {share: 0.3, factor: 0.3}, {share: 0.2, factor: 0.1}]}
  chat 32B: {lora_r: 1024, lora_alpha: 256, lora_dropout: 0.15, learning_rate: 0.0002, micro_batch_size: 4,
    gradient_accumulation_steps: 4}
  chat 70.6B: {lora_r: 2048, lora_alpha: 512, lora_dropout: 0.2, learning_rate: 0.0001, micro_batch_size: 2,
    gradient_accumulation_steps: 8}
h100-fast:
  instruct 8B:
    {engine: native, fp8: true, compile_mode: default, attention: flash_attention_3,
    optimizer: adamw_torch_fused, lr_scheduler: one_cycle, warmup_ratio: 0.1, warmup_steps: null,
    micro_batch_size: 4, gradient_accumulation_steps: 16, max_grad_norm: 1.0, dataloader_num_workers: 16,
    dataloader_prefetch_factor: 4, dataloader_persistent_workers: true, dataloader_drop_last: true}
  instruct 0.5B: {micro_batch_size: 32, gradient_accumulation_steps: 2}
steady:
  instruct 1.2B: {learning_rate: 0.0001, method: null, full_below: 9B, eval_metric: validator}
  instruct 3.1B: {learning_rate: 7.5e-5, effective_batch_size: 64}
  instruct 4.5B: {learning_rate: 7.0e-5, effective_batch_size: 64}
  instruct 8B: {learning_rate: 3.5e-5, effective_batch_size: 64}
  instruct 14.8B: {learning_rate: 0.0003, effective_batch_size: 32}
  dpo 0.5B: {full_below: 2B, learning_rate: 1.35e-5, effective_batch_size: 64, dpo_beta: 0.1}
  dpo 1.5B: {full_below: 2B, learning_rate: 8.7e-6}
  dpo 3B: {method: null, lora_r: 128, lora_alpha: 256, lora_dropout: 0, learning_rate: 6.5e-6}
  dpo 4.5B: {lora_r: 128, lora_alpha: 256, learning_rate: 6.25e-6}
  dpo 8B: {lora_r: 128, lora_alpha: 256, learning_rate: 7.5e-6}
  dpo 10B: {lora_r: 128, lora_alpha: 256, learning_rate: 5e-6}
  dpo 14.8B: {lora_r: 128, lora_alpha: 256, learning_rate: 8.5e-6}
  dpo 32B: {lora_r: 128, lora_alpha: 256, learning_rate: 8e-6}
  dpo 72B: {lora_r: 128, lora_alpha: 256, learning_rate: 8e-6}
cpu-demo:
  instruct 8B:
    {bf16: false, fp16: false, tf32: false, fp8: false, liger: false, fused_loss: false, lora_kernels: false,
    attention: sdpa, optimizer: adamw_torch, compile_mode: null, dataloader_num_workers: 0}
"""


@each(
    ("name", "case", "written"),
    [(name, *item) for name, cases in yaml.safe_load(FROM_SOURCES).items() for item in cases.items()],
)
def test_a_profile_has_the_numbers_of_its_source(name: str, case: str, written: dict[str, object]) -> None:
    word, _, about = case.partition(" ")
    task = TASK_WORDS[word]
    resolved = of(name, task, parse_params(about)) if task.is_text else of_image(name, ImageModelType(about))
    source = Targets.model_validate(written).model_dump(include=written.keys())
    assert resolved.targets.model_dump(include=written.keys()) == source


def test_half_of_the_captions_are_left_out_for_every_scored_family() -> None:
    scored = [image for image, family in IMAGE_FAMILIES.items() if family.flow is not None]
    assert {of_image("steady", image).targets.caption_dropout for image in scored} == {0.5}


def test_the_rest_of_h100x4_is_its_guides_too() -> None:
    guide = of("h100x4")
    assert (guide.limits.gpu_memory, guide.limits.max_gpus) == (75 * 10**9, 4)
    assert (guide.container.memory, guide.container.shm) == (400 * 10**9, 128 * 10**9)
    assert guide.container.cpus == "0-63"
    assert guide.env == {
        "NCCL_NET_GDR_LEVEL": "5",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_NTHREADS": "8",
        "CUDA_LAUNCH_BLOCKING": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_the_rest_of_the_other_profiles_is_their_sources_too() -> None:
    assert of("h100x4-strategy").container.shm == 32 * 10**9
    assert of("h100x4-strategy").targets.ema_decay is not None
    assert of("h100x4-strategy").targets.early_stopping_patience is not None
    lanes, fast = of("h100x8"), of("h100-fast")
    assert (lanes.limits.max_jobs, lanes.limits.gpu_memory_share) == (12, 0.9)
    assert {name: lane.gpus for name, lane in lanes.targets.lanes.items()} == {
        "small": [0, 1],
        "medium": [2, 3],
        "large": [4, 5],
        "xlarge": [6, 7],
        "sdxl": [6],
        "flux": [7],
    }
    assert (fast.limits.gpu_memory, fast.limits.gpu_memory_share) == (72 * 10**9, 0.9)
    assert fast.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert parse_gpus(load_profile("cpu-demo").hardware or "").is_cpu


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
    base, scaled = (of_image(name, ImageModelType.SDXL).targets for name in ("base", "h100x8"))
    assert scaled.lora_r == base.lora_r * 1.5
    assert scaled.learning_rate == pytest.approx(base.learning_rate * 1.15)


def test_text_lanes_of_h100x8_divide_the_sizes_without_a_gap() -> None:
    lanes = of("h100x8").targets.lanes
    for params in (1, 6_999_999_999, 7 * 10**9, 13 * 10**9, 70 * 10**9, 700 * 10**9):
        assert sum(lane.size is not None and params in lane.size for lane in lanes.values()) == 1
    assert list(lanes)[-2:] == ["sdxl", "flux"]
    assert list(lanes["sdxl"].image or ()) == [ImageModelType.SDXL]
    assert (list(lanes["flux"].task or ()), lanes["flux"].image) == ([TaskType.IMAGE], None)


@each("subject", [subject for subject in representative_subjects() if subject.task_type.is_text])
def test_steady_stays_inside_the_published_ranges(subject: Subject) -> None:
    profile = resolve_profile(load_profile("steady"), subject.task_type, subject.model)
    rate, alpha = profile.targets.learning_rate, profile.targets.lora_alpha or 32
    assert rate * alpha <= (profile.limits.max_alpha_lr or 0)
    if subject.task_type.is_rl:
        # GRPO is trained by LoRA, at ten times a full fine-tune's rate.
        assert 1e-6 <= rate <= (8e-5 if subject.task_type.generates else 2e-5)


@each("name", NAMES)
@each("kind", list(ImageModelType))
def test_settings_for_text_never_reach_images(name: str, kind: ImageModelType) -> None:
    t = of_image(name, kind).targets
    assert t.method is Method.LORA
    assert t.engine is (Engine.KOHYA if kind in ("sdxl", "flux") else Engine.AI_TOOLKIT)
    assert t.learning_rate <= 5e-4
    assert t.micro_batch_size <= 16
    assert (t.effective_batch_size, t.least_steps) == (None, None)
    assert t.ema_decay is None
    if kind not in ("sdxl", "flux"):
        assert t.num_epochs is None
        assert t.max_steps is not None
