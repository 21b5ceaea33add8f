"""SDXL and Flux plans as TOML for sd-scripts."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from core.domain.choices import ImageLoss, LrSchedule, Method, Optimizer
from core.domain.tasks import ImageModelType
from core.planning.plan import (
    AdapterPlan,
    EmaPlan,
    ImagePlan,
    LoaderPlan,
    OptimizerPlan,
    PrecisionPlan,
    StepsPlan,
)
from core.profile.targets import Targets
from core.recipes.base import ImageFiles, RecipeError, RenderedRun
from core.recipes.render import render
from tests.core.recipes.cases import image_inputs, image_plan, noted
from tests.doubles.each import each

SDXL, FLUX = ImageModelType.SDXL, ImageModelType.FLUX


def rendered(kind: ImageModelType, gpus: int = 1, **changes: Any) -> RenderedRun:
    return render(image_plan(kind, gpus, **changes), image_inputs(kind))


def optimizer(name: Optimizer = Optimizer.ADAMW_TORCH, **values: Any) -> OptimizerPlan:
    return OptimizerPlan(**{"name": name, "learning_rate": 1e-4, "schedule": LrSchedule.LINEAR, **values})


def check(run: RenderedRun, *notes: str, **keys: Any) -> None:
    """It has these keys (None: it lacks them), and notes that begin so."""
    assert {key: run.config.get(key) for key in keys} == keys
    assert [note for note in notes if not noted(run, note)] == []


@each("kind", [SDXL, FLUX])
def test_the_plans_numbers_are_the_configs_and_the_files(kind: ImageModelType) -> None:
    run = rendered(kind)
    assert tomllib.loads(run.files["config.toml"]) == run.config
    check(
        run,
        network_dim=32,
        network_alpha=16.0,
        train_batch_size=4,
        max_train_steps=438,
        learning_rate=1e-4,
        unet_lr=1e-4,
        pretrained_model_name_or_path="/cache/models/base",
        train_data_dir="/run/images",
        output_dir="/run/output",
        output_name="last",
        resolution="1024,1024",
        mixed_precision="bf16",
        network_train_unet_only=True,
        text_encoder_lr=None,
        seed=42,
    )
    check(rendered(kind, image=ImagePlan(vae_batch=64)), "vae_batch_size 64", vae_batch_size=8)


def test_flux_names_the_parts_outside_the_model_and_is_refused_without_them() -> None:
    files = image_inputs(FLUX).image
    check(rendered(FLUX), ae=files.ae, clip_l=files.clip_l, t5xxl=files.t5xxl)
    check(rendered(SDXL), ae=None, clip_l=None, t5xxl=None)
    with pytest.raises(RecipeError, match="t5xxl"):
        render(image_plan(FLUX), image_inputs(FLUX, image=ImageFiles()))


def test_on_several_gpus_warmup_is_a_share_noise_differs_and_the_cache_is_on_disk() -> None:
    for gpus in (1, 4):
        assert rendered(SDXL, gpus).config["lr_warmup_steps"] == pytest.approx(10 / 438, abs=1e-6)
    check(rendered(SDXL, gpus=4), "seed", seed=None)
    check(rendered(FLUX, gpus=2), cache_latents_to_disk=True)
    check(rendered(FLUX), cache_latents_to_disk=False)


def test_each_model_has_the_losses_that_work_with_it() -> None:
    weighted = Targets(min_snr_gamma=16)
    check(rendered(SDXL, targets=weighted), min_snr_gamma=16)
    check(rendered(FLUX, targets=weighted), "min_snr_gamma", min_snr_gamma=None)
    check(rendered(SDXL, targets=Targets(huber_c=0.015)), "huber_c", huber_c=None)
    huber = Targets(huber_c=0.015, image_loss=ImageLoss.HUBER)
    check(rendered(SDXL, targets=huber), loss_type="huber", huber_c=0.015, huber_schedule=None)
    # The default schedule crashes Flux.
    check(rendered(FLUX, targets=huber), huber_schedule="exponential")


@each("kind", [SDXL, FLUX])
def test_the_text_encoders_are_trained_when_asked(kind: ImageModelType) -> None:
    adapter = AdapterPlan(rank=8, alpha=8, dropout=0, params=1, text_encoder=True)
    both = rendered(kind, adapter=adapter, optimizer=optimizer(text_encoder_lr=5e-5))
    check(both, text_encoder_lr=[5e-5, 5e-5], network_train_unet_only=None)


def test_dropped_captions_exclude_cached_text() -> None:
    check(rendered(FLUX, image=ImagePlan(cache_text=True)), cache_text_encoder_outputs=True)
    dropped = rendered(FLUX, image=ImagePlan(cache_text=True, caption_dropout=0.5))
    check(dropped, "cache_text", caption_dropout_rate=0.5, cache_text_encoder_outputs=None)


@each("name", [name for name in Optimizer if name is not Optimizer.MUON])
def test_every_optimizer_is_one_that_sd_scripts_builds(name: Optimizer) -> None:
    arguments = rendered(SDXL, optimizer=optimizer(name, weight_decay=0.01)).config["optimizer_args"]
    assert "weight_decay=0.01" in arguments
    # Adafactor would find its own rate.
    assert ("relative_step=False" in arguments) is (name is Optimizer.ADAFACTOR)


@each("schedule", list(LrSchedule))
def test_every_schedule_is_one_that_sd_scripts_builds(schedule: LrSchedule) -> None:
    shaped = optimizer(
        schedule=schedule,
        cycles=3 if schedule is LrSchedule.COSINE_WITH_RESTARTS else 1,
        warmup_steps=20,
        min_lr_ratio=0.1,
        cooldown_share=0.2,
    )
    run = rendered(SDXL, optimizer=shaped)
    assert run.config["lr_scheduler"] != "constant"  # which takes no warmup
    if schedule is LrSchedule.COSINE_WITH_RESTARTS:
        check(run, lr_scheduler_num_cycles=3)
    if schedule is LrSchedule.WSD:
        check(run, lr_decay_steps=0.2, lr_scheduler_min_lr_ratio=0.1)


def test_as_many_epoch_files_are_kept_as_asked_for() -> None:
    steps = StepsPlan(epochs=40, per_epoch=10, total=400, eval_every=10, save_every=10, keep_checkpoints=3)
    run = rendered(SDXL, steps=steps, image=ImagePlan(save_every_epochs=10))
    check(run, save_every_n_epochs=10, save_last_n_epochs=3, save_every_n_steps=None)


@each("kind", [SDXL, FLUX])
@each(("side", "least", "most"), [(64, 64, 2048), (200, 192, 2048), (512, 256, 2048), (2080, 256, 2112)])
def test_the_buckets_hold_the_resolution(kind: ImageModelType, side: int, least: int, most: int) -> None:
    """sd-scripts refuses a data set with a resolution beyond them."""
    run = rendered(kind, image=ImagePlan(resolutions=(side,)))
    check(run, min_bucket_reso=least, max_bucket_reso=most)


def test_what_is_asked_for_in_other_words_is_translated_or_noted() -> None:
    check(rendered(SDXL, precision=PrecisionPlan(bf16=False, fp16=True)), mixed_precision="fp16")
    nobody = LoaderPlan(workers=0, prefetch_factor=None, persistent_workers=True)
    check(rendered(SDXL, loader=nobody), persistent_data_loader_workers=False)
    check(rendered(SDXL, ema=EmaPlan(decay=0.999)), "ema_decay")
    convolved = rendered(SDXL, targets=Targets(conv_rank=16, conv_alpha=8))
    check(convolved, network_args=["conv_dim=16", "conv_alpha=8"])


def test_raw_keys_that_do_nothing_are_left_out_with_a_note() -> None:
    run = rendered(SDXL, engine_config={"epoch": 60, "huggingface_token": "", "network_dim": 512})
    check(run, "epoch", network_dim=512, epoch=None, huggingface_token=None)


@each(
    ("changes", "why"),
    [
        ({"engine_config": {"network_dim": "512"}}, r"engine_config\.kohya → network_dim.*a whole number"),
        ({"method": Method.FULL, "adapter": None}, "method"),
        ({"optimizer": optimizer(Optimizer.MUON)}, "muon"),
    ],
)
def test_what_sd_scripts_would_not_run_as_written_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        rendered(SDXL, **changes)
