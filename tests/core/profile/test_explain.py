from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from core.choices import Engine
from core.model_facts import facts_from_name
from core.profile import ResolvedProfile, load_profile, resolve
from core.profile.annotation_rules import RULES
from core.profile.annotations import Effect, engine_for
from core.profile.display import in_words
from core.profile.explain import (
    Finding,
    Level,
    Subject,
    check,
    diff,
    explain,
    representative,
    settings,
    subject,
)
from core.profile.targets import Targets
from core.tasks import ImageModelType, TaskType
from tests.core.profile.test_resolve import from_text, resolved
from tests.doubles.each import each

LLAMA = subject(TaskType.INSTRUCT, "meta-llama/Llama-3.1-8B")


def said(name: str, path: str, about: list[Subject] | None = None) -> dict[Effect, str]:
    return {each.effect: each.text for each in explain(load_profile(name), about) if each.path == path}


@each(
    ("path", "effect", "word"),
    [
        ("limits.gpu_memory", Effect.RENAMED, "max_memory_MB"),
        ("targets.fsdp_reshard_after_forward", Effect.RENAMED, "fsdp_version 2"),
        ("targets.fsdp_forward_prefetch", Effect.IGNORED, "FSDP2"),
        ("targets.fsdp_limit_all_gathers", Effect.IGNORED, "FSDP2"),
        ("targets.fsdp_backward_prefetch", Effect.IGNORED, "FSDP2"),
        ("targets.lora_alpha", Effect.HARMFUL, "0.05"),
        ("targets.num_epochs", Effect.RENAMED, "epoch"),
        ("targets.min_snr_gamma", Effect.IGNORED, "Flux"),
        ("targets.huber_c", Effect.IGNORED, "huber"),
        ("targets.vae_batch_size", Effect.HARMFUL, "83 GB"),
        ("targets.lr_cycles", Effect.DOUBTFUL, "restart"),
        ("env.NCCL_NTHREADS", Effect.IGNORED, "64"),
    ],
)
def test_h100x4_s_values_that_engines_do_not_take_as_they_are_have_a_line(
    path: str, effect: Effect, word: str
) -> None:
    assert word in said("h100x4", path)[effect]


def test_what_no_engine_has_is_said_to_be_ours() -> None:
    assert Effect.OURS in said("h100x8", "targets.ema_decay")
    assert Effect.OURS in said("h100x8", "targets.lr_stages")
    assert Effect.OURS in said("h100x8", "targets.plateau_factor")


def test_every_rule_of_the_table_is_spoken_by_some_profile_or_example(tmp_path: Path) -> None:
    """A rule that nothing can trigger is a typo in its path or its condition."""
    example = from_text(
        tmp_path,
        "targets: {attention: flash_attention_2, dataloader_persistent_workers: true, fp16: true,\n"
        "  ema_decay: 0.9, image_loss: huber, text_encoder_lr: 1e-5, group_by_length: true,\n"
        "  dataloader_drop_last: true, optimizer: adamw_bnb_8bit, lr_scheduler: cosine,\n"
        "  learning_rate: 0.5}\n",
    )
    names = ("base", "h100x4", "h100x4-strategy", "h100x8", "h100-fast", "steady", "cpu-demo")
    spoken = {(each.path, each.text) for name in names for each in explain(load_profile(name))}
    spoken |= {(each.path, each.text) for each in explain(example)}
    assert [rule.path for rule in RULES if (rule.path, rule.text) not in spoken] == []


def test_rules_speak_of_keys_that_exist() -> None:
    whole = resolved_defaults()
    for rule in RULES:
        part, _, name = rule.path.partition(".")
        assert part == "env" or hasattr(getattr(whole, part), name), rule.path


def resolved_defaults() -> ResolvedProfile:
    return resolve(load_profile("base"), TaskType.INSTRUCT, LLAMA.model)


def test_defaults_need_no_apology(tmp_path: Path) -> None:
    assert explain(from_text(tmp_path, "description: nothing")) == []


def test_remarks_name_the_line_and_the_subjects() -> None:
    remark = next(each for each in explain(load_profile("h100x4")) if each.path == "targets.min_snr_gamma")
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
    found = settings(
        resolved(tmp_path, "targets:\n  lora_r: 10\nenv: {A: 1}\nsections: {s: {scale: {lora_r: 2}}}")
    )
    assert [(each.path, each.value, each.origin, each.unscaled) for each in found] == [
        ("targets.lora_r", 20, "mine.yaml:2", 10),
        ("env.A", "1", "mine.yaml:3", None),
    ]
    assert len(settings(resolved(tmp_path, "targets: {}"), defaults=True)) > 100


def test_a_profile_and_its_child_differ_by_what_the_child_says(tmp_path: Path) -> None:
    child = from_text(tmp_path, "extends: h100x4\ntargets: {lora_r: 256}\nenv: {NEW: x}")
    found = diff(load_profile("h100x4"), child, LLAMA)
    assert [(each.path, each.left, each.right) for each in found] == [
        ("targets.lora_r", 512, 256),
        ("env.NEW", None, "x"),
    ]
    assert found[0].left_origin.startswith("h100x4.yaml:")
    assert found[0].right_origin == "mine.yaml:2"
    assert diff(child, child, LLAMA) == []


def test_representative_subjects_cover_every_task_and_size() -> None:
    subjects = representative()
    assert {each.task_type for each in subjects} == set(TaskType)
    assert {each.model.image.image_type for each in subjects if each.model.image} == set(ImageModelType)
    assert len({each.model.params_total for each in subjects}) >= 10


def test_check_reaches_sections_that_no_representative_matches(tmp_path: Path) -> None:
    text = "sections: {odd: {when: {task: chat, size: 21B-22B, family: yi}, limits: {min_gpus: 65}}}"
    profile = from_text(tmp_path, text.replace("65", "9") + "\nlimits: {max_gpus: 2}")
    errors = [finding for finding in check(profile) if finding.level is Level.ERROR]
    assert errors
    assert "min_gpus" in errors[0].message


@pytest.mark.parametrize(
    "when",
    ["{task: dpo, image: flux}", "{image: sdxl, family: llama}", "{task: image, size: '>=500B'}"],
)
def test_check_tells_sections_that_nothing_can_match(tmp_path: Path, when: str) -> None:
    found = check(from_text(tmp_path, f"sections: {{dead: {{when: {when}}}}}"))
    assert (
        Finding(Level.ERROR, "sections.dead", "matches nothing: its conditions exclude each other") in found
    )


def test_check_hands_every_subject_to_the_planner_s_own_check() -> None:
    asked: list[Subject] = []

    def plan_check(profile: ResolvedProfile, about: Subject) -> Iterable[Finding]:
        asked.append(about)
        if about.task_type is TaskType.GRPO:
            yield Finding(Level.ERROR, about.words, "does not fit")

    found = check(load_profile("steady"), plan_check)
    assert {each.task_type for each in asked} == set(TaskType)
    assert any(finding.message == "does not fit" for finding in found)


def test_check_of_all_shipped_profiles_takes_seconds() -> None:
    start = time.process_time()
    for name in ("h100x4", "h100x8", "steady"):
        check(load_profile(name))
    assert time.process_time() - start < 20


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
def test_values_are_shown_as_one_would_write_them(path: str, value: object, words: str) -> None:
    assert in_words(path, value) == words  # type: ignore[arg-type]


def test_image_subjects_are_named_by_type() -> None:
    about = Subject(TaskType.IMAGE, facts_from_name("x/y", None, ImageModelType.FLUX))
    assert about.words == "image flux"
