from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from core.domain.choices import Engine
from core.domain.tasks import ImageModelType, TaskType
from core.profile.declare import EngineEffect
from core.profile.explain import (
    EFFECTS,
    ProfileFinding,
    ProfileFindingLevel,
    ProfileRemark,
    Subject,
    check_profile,
    diff_profiles,
    explain_profile,
    format_value,
    profile_settings,
    representative_subjects,
    text_subject,
)
from core.profile.resolve import engine_for, load_profile
from core.profile.schema import ResolvedProfile
from core.profile.targets import Targets
from tests.core.profile.test_resolve import from_text, resolved
from tests.doubles.each import each

LLAMA = text_subject(TaskType.INSTRUCT, "meta-llama/Llama-3.1-8B")


@cache
def remarks_on(name: str) -> list[ProfileRemark]:
    return explain_profile(load_profile(name))


@each(
    ("name", "path", "effect", "word"),
    [
        ("h100x4", "limits.gpu_memory", EngineEffect.RENAMED, "max_memory_MB"),
        ("h100x4", "targets.fsdp_reshard_after_forward", EngineEffect.RENAMED, "fsdp_version 2"),
        ("h100x4", "targets.fsdp_forward_prefetch", EngineEffect.IGNORED, "FSDP2"),
        ("h100x4", "targets.lora_alpha", EngineEffect.HARMFUL, "0.05"),
        ("h100x4", "targets.num_epochs", EngineEffect.RENAMED, "epoch"),
        ("h100x4", "targets.min_snr_gamma", EngineEffect.IGNORED, "Flux"),
        ("h100x4", "targets.huber_c", EngineEffect.IGNORED, "huber"),
        ("h100x4", "targets.vae_batch_size", EngineEffect.HARMFUL, "83 GB"),
        ("h100x4", "targets.lr_cycles", EngineEffect.DOUBTFUL, "restart"),
        ("h100x4", "env.NCCL_NTHREADS", EngineEffect.IGNORED, "64"),
        ("h100x4", "env.NCCL_BUFFSIZE", EngineEffect.DOUBTFUL, "4 MiB"),
        ("h100x4", "env.TORCH_NCCL_ASYNC_ERROR_HANDLING", EngineEffect.DOUBTFUL, "3"),
        ("h100x8", "targets.ema_decay", EngineEffect.OURS, "callback"),
        ("h100x8", "targets.lr_stages", EngineEffect.OURS, "callback"),
        ("h100x8", "targets.plateau_factor", EngineEffect.OURS, "callback"),
    ],
)
def test_values_that_engines_change_are_annotated(
    name: str, path: str, effect: EngineEffect, word: str
) -> None:
    texts = {remark.effect: remark.text for remark in remarks_on(name) if remark.path == path}
    assert word in texts[effect]


def test_every_rule_applies_to_some_profile(tmp_path: Path) -> None:
    """A rule that nothing can trigger is a typo in its path or its condition."""
    example = from_text(
        tmp_path,
        "targets: {attention: flash_attention_2, dataloader_persistent_workers: true, fp16: true,\n"
        "  ema_decay: 0.9,\n"
        "  image_loss: huber, text_encoder_lr: 1e-5, group_by_length: true,\n"
        "  dataloader_drop_last: true, optimizer: adamw_bnb_8bit, lr_scheduler: cosine,\n"
        "  learning_rate: 0.5, lora_rank_pattern: {q_proj: 8}}\n",
    )
    native = from_text(tmp_path, "targets: {engine: native, liger: true}")
    names = ("base", "h100x4", "h100x4-strategy", "h100x8", "h100-fast", "steady", "cpu-demo")
    remarks = [
        *explain_profile(example),
        *explain_profile(native),
        *(remark for name in names for remark in remarks_on(name)),
    ]
    applied = {(remark.path, remark.text) for remark in remarks}
    assert [path for path, effect in EFFECTS if (path, effect.text) not in applied] == []


def test_defaults_are_not_annotated(tmp_path: Path) -> None:
    assert explain_profile(from_text(tmp_path, "description: nothing")) == []


def test_remarks_name_the_line_and_the_subjects() -> None:
    remark = next(each for each in remarks_on("h100x4") if each.path == "targets.min_snr_gamma")
    assert remark.origin.startswith("h100x4.yaml:")
    assert all("image" in words for words in remark.subjects)


@each(
    ("wanted", "task", "image", "engine"),
    [
        (None, TaskType.DPO, None, Engine.AXOLOTL),
        (Engine.KOHYA, TaskType.DPO, None, Engine.AXOLOTL),
        (Engine.NATIVE, TaskType.CHAT, None, Engine.NATIVE),
        (None, TaskType.IMAGE, ImageModelType.SDXL, Engine.KOHYA),
        (Engine.AI_TOOLKIT, TaskType.IMAGE, ImageModelType.SDXL, Engine.KOHYA),
        (Engine.AI_TOOLKIT, TaskType.IMAGE, ImageModelType.FLUX, Engine.AI_TOOLKIT),
        (Engine.KOHYA, TaskType.IMAGE, ImageModelType.KREA2, Engine.AI_TOOLKIT),
    ],
)
def test_an_engine_that_cannot_do_the_task_is_replaced(
    wanted: Engine | None, task: TaskType, image: ImageModelType | None, engine: Engine
) -> None:
    assert engine_for(Targets(engine=wanted), task, image) is engine


def test_settings_are_listed_with_their_origins(tmp_path: Path) -> None:
    text = "targets:\n  lora_r: 10\nenv: {A: 1}\nsections: {s: {scale: {lora_r: 2}}}"
    assert [tuple(setting) for setting in profile_settings(resolved(tmp_path, text))] == [
        ("targets.lora_r", 20, "mine.yaml:2", 10),
        ("env.A", "1", "mine.yaml:3", None),
    ]
    assert len(profile_settings(resolved(tmp_path, "targets: {}"), defaults=True)) > 100


def test_a_profile_and_its_child_differ_by_what_the_child_says(tmp_path: Path) -> None:
    child = from_text(tmp_path, "extends: h100x4\ntargets: {lora_r: 256}\nenv: {NEW: x}")
    rank, env = diff_profiles(load_profile("h100x4"), child, LLAMA)
    assert (rank.path, rank.left, rank.right) == ("targets.lora_r", 512, 256)
    assert (env.path, env.left, env.right) == ("env.NEW", None, "x")
    assert rank.left_origin.startswith("h100x4.yaml:")
    assert rank.right_origin == "mine.yaml:2"
    assert diff_profiles(child, child, LLAMA) == []


def test_representative_subjects_cover_every_task_and_size() -> None:
    subjects = representative_subjects()
    assert {subject.task_type for subject in subjects} == set(TaskType)
    labels = [subject.label for subject in subjects]
    assert {f"image {kind}" for kind in ImageModelType} <= set(labels)
    assert len({subject.model.params_total for subject in subjects}) >= 10


def test_check_reaches_sections_that_no_representative_matches(tmp_path: Path) -> None:
    odd = "sections: {odd: {when: {task: chat, size: 21B-22B, family: yi}, limits: {min_gpus: 9}}}"
    findings = check_profile(from_text(tmp_path, f"{odd}\nlimits: {{max_gpus: 2}}"))
    errors = [finding.message for finding in findings if finding.level is ProfileFindingLevel.ERROR]
    assert "min_gpus" in errors[0]


def test_check_plans_a_section_for_some_pictures_with_so_many(tmp_path: Path) -> None:
    asked: list[Subject] = []
    few = "sections: {few: {when: {image: krea2, pictures: 10-20}, targets: {lora_r: 3}}}"

    def plan_check(_profile: ResolvedProfile, about: Subject) -> Iterable[ProfileFinding]:
        asked.append(about)
        return ()

    check_profile(from_text(tmp_path, few), plan_check)
    assert "image krea2, 15 pictures" in [about.label for about in asked]


@pytest.mark.parametrize(
    "when",
    [
        "{task: dpo, image: flux}",
        "{image: sdxl, family: llama}",
        "{task: dpo, pictures: '<9'}",
        "{task: image, size: '>=500B'}",
    ],
)
def test_check_reports_sections_that_nothing_can_match(tmp_path: Path, when: str) -> None:
    findings = check_profile(from_text(tmp_path, f"sections: {{dead: {{when: {when}}}}}"))
    [finding] = [finding for finding in findings if finding.where == "sections.dead"]
    assert finding.level is ProfileFindingLevel.ERROR


def test_check_passes_every_subject_to_the_planner_s_check() -> None:
    asked: list[Subject] = []

    def plan_check(profile: ResolvedProfile, about: Subject) -> Iterable[ProfileFinding]:
        asked.append(about)
        if about.task_type.generates:
            yield ProfileFinding(ProfileFindingLevel.ERROR, about.label, "does not fit")

    findings = check_profile(load_profile("steady"), plan_check)
    assert {subject.task_type for subject in asked} == set(TaskType)
    assert "does not fit" in [finding.message for finding in findings]


@each(
    ("path", "value", "words"),
    [
        ("limits.gpu_memory", 75 * 10**9, "75.0 GB"),
        ("limits.reserve", 600.0, "10 min 00 s"),
        ("targets.full_below", 9 * 10**9, "9B"),
        ("targets.lr_cycles", {"low": 5, "high": 10}, "5-10"),
        ("targets.lr_cycles", {"low": 1, "high": 1}, "1"),
        ("targets.bf16", True, "yes"),
        ("targets.lora_r", None, "–"),
        ("targets.learning_rate", 8e-4, "0.0008"),
        ("env.A", "x", "x"),
        ("engine_config.axolotl.k", [1], "[1]"),
    ],
)
def test_values_are_formatted_as_in_a_profile(path: str, value: object, words: str) -> None:
    assert format_value(path, value) == words  # type: ignore[arg-type]
