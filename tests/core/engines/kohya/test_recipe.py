"""SDXL and Flux plans as TOML for sd-scripts."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from core.domain.choices import ImageLoss, LrSchedule, Method, Optimizer
from core.domain.tasks import ImageModelType
from core.engines.base import ImageFiles, RecipeError, RenderedRun
from core.engines.render import render
from core.planning.plan import (
    AdapterPlan,
    EmaPlan,
    ImagePlan,
    LoaderPlan,
    OptimizerPlan,
    PrecisionPlan,
    StepsPlan,
)
from tests.core.engines.cases import image_inputs, image_plan
from tests.doubles.each import each

SDXL, FLUX = ImageModelType.SDXL, ImageModelType.FLUX
BOTH = (SDXL, FLUX)


def rendered(kind: ImageModelType, gpus: int = 1, **changes: Any) -> RenderedRun:
    return render(image_plan(kind, gpus, **changes), image_inputs(kind))


def noted(made: RenderedRun, key: str) -> bool:
    return any(note.startswith(key) for note in made.notes)


@pytest.mark.parametrize("kind", BOTH)
def test_the_file_has_the_configuration(kind: ImageModelType) -> None:
    made = rendered(kind)
    assert tomllib.loads(made.files["config.toml"]) == made.config


@pytest.mark.parametrize("kind", BOTH)
def test_the_plans_numbers_are_the_configs(kind: ImageModelType) -> None:
    config = rendered(kind).config
    assert (config["network_dim"], config["network_alpha"]) == (32, 16.0)
    assert (config["train_batch_size"], config["max_train_steps"]) == (4, 438)
    assert config["learning_rate"] == config["unet_lr"] == 1e-4
    assert (config["pretrained_model_name_or_path"], config["train_data_dir"]) == (
        "/cache/models/base",
        "/run/images",
    )
    assert (config["output_dir"], config["output_name"]) == ("/run/output", "last")
    assert config["resolution"] == "1024,1024"


def test_flux_names_the_parts_outside_the_model() -> None:
    config = rendered(FLUX).config
    assert config["ae"].endswith("ae.safetensors")
    assert config["t5xxl"].endswith("t5xxl.safetensors")
    assert not rendered(SDXL).config.keys() & {"ae", "clip_l", "t5xxl"}


def test_flux_without_its_parts_is_refused() -> None:
    with pytest.raises(RecipeError, match="t5xxl"):
        render(image_plan(FLUX), image_inputs(FLUX, image=ImageFiles()))


def test_warmup_is_a_share_so_that_it_lasts_on_any_number_of_gpus() -> None:
    for gpus in (1, 4):
        warmup = rendered(SDXL, gpus).config["lr_warmup_steps"]
        assert isinstance(warmup, float)
        assert warmup == pytest.approx(10 / 438, abs=1e-6)


def test_a_seed_on_several_gpus_would_give_all_the_same_noise() -> None:
    assert rendered(SDXL).config["seed"] == 42
    several = rendered(SDXL, gpus=4)
    assert "seed" not in several.config
    assert noted(several, "seed")


def test_several_gpus_share_the_latent_cache_on_disk() -> None:
    assert rendered(FLUX, gpus=2).config["cache_latents_to_disk"] is True
    assert rendered(FLUX).config["cache_latents_to_disk"] is False


@pytest.mark.parametrize("kind", BOTH)
def test_a_large_vae_batch_is_cut_with_a_note(kind: ImageModelType) -> None:
    made = rendered(kind, image=ImagePlan(vae_batch=64))
    assert made.config["vae_batch_size"] == 8
    assert noted(made, "vae_batch_size 64")


def test_min_snr_is_for_sdxl_alone() -> None:
    weighted = ImagePlan(min_snr_gamma=16)
    assert rendered(SDXL, image=weighted).config["min_snr_gamma"] == 16
    made = rendered(FLUX, image=weighted)
    assert "min_snr_gamma" not in made.config
    assert noted(made, "min_snr_gamma")


def test_huber_c_needs_a_huber_loss() -> None:
    made = rendered(SDXL, image=ImagePlan(huber_c=0.015))
    assert "huber_c" not in made.config
    assert noted(made, "huber_c")
    huber = rendered(SDXL, image=ImagePlan(huber_c=0.015, loss=ImageLoss.HUBER)).config
    assert (huber["loss_type"], huber["huber_c"]) == ("huber", 0.015)


def test_a_huber_loss_on_flux_avoids_the_schedule_that_crashes() -> None:
    config = rendered(FLUX, image=ImagePlan(loss=ImageLoss.HUBER)).config
    assert config["huber_schedule"] == "exponential"


@pytest.mark.parametrize("kind", BOTH)
def test_the_text_encoders_are_trained_only_when_asked(kind: ImageModelType) -> None:
    alone = rendered(kind).config
    assert alone["network_train_unet_only"] is True
    assert "text_encoder_lr" not in alone
    adapter = AdapterPlan(rank=8, alpha=8, dropout=0, params=1, text_encoder=True)
    optimizer = OptimizerPlan(
        name=Optimizer.ADAMW_TORCH, learning_rate=1e-4, schedule=LrSchedule.COSINE, text_encoder_lr=5e-5
    )
    both = rendered(kind, adapter=adapter, optimizer=optimizer).config
    assert both["text_encoder_lr"] == [5e-5, 5e-5]
    assert "network_train_unet_only" not in both


def test_dropped_captions_exclude_cached_text() -> None:
    cached = rendered(FLUX, image=ImagePlan(cache_text=True)).config
    assert cached["cache_text_encoder_outputs"] is True
    made = rendered(FLUX, image=ImagePlan(cache_text=True, caption_dropout=0.5))
    assert made.config["caption_dropout_rate"] == 0.5
    assert "cache_text_encoder_outputs" not in made.config
    assert noted(made, "cache_text")


def test_adafactor_keeps_the_rate_it_is_given() -> None:
    optimizer = OptimizerPlan(name=Optimizer.ADAFACTOR, learning_rate=5e-5, schedule=LrSchedule.CONSTANT)
    assert "relative_step=False" in rendered(FLUX, optimizer=optimizer).config["optimizer_args"]


@each("name", [one for one in Optimizer if one is not Optimizer.MUON])
def test_every_optimizer_is_one_that_sd_scripts_builds(name: Optimizer) -> None:
    optimizer = OptimizerPlan(name=name, learning_rate=1e-4, schedule=LrSchedule.LINEAR, weight_decay=0.01)
    assert "weight_decay=0.01" in rendered(SDXL, optimizer=optimizer).config["optimizer_args"]


def test_an_optimizer_that_it_does_not_build_is_refused() -> None:
    optimizer = OptimizerPlan(name=Optimizer.MUON, learning_rate=1e-4, schedule=LrSchedule.LINEAR)
    with pytest.raises(RecipeError, match="muon"):
        rendered(SDXL, optimizer=optimizer)


@each("schedule", list(LrSchedule))
def test_every_schedule_is_one_that_sd_scripts_builds(schedule: LrSchedule) -> None:
    optimizer = OptimizerPlan(
        name=Optimizer.ADAMW_TORCH,
        learning_rate=1e-4,
        schedule=schedule,
        cycles=3 if schedule is LrSchedule.COSINE_WITH_RESTARTS else 1,
        warmup_steps=20,
        min_lr_ratio=0.1,
        cooldown_share=0.2,
    )
    config = rendered(SDXL, optimizer=optimizer).config
    assert config["lr_scheduler"] != "constant"  # which takes no warmup
    if schedule is LrSchedule.COSINE_WITH_RESTARTS:
        assert config["lr_scheduler_num_cycles"] == 3
    if schedule is LrSchedule.WSD:
        assert (config["lr_decay_steps"], config["lr_scheduler_min_lr_ratio"]) == (0.2, 0.1)


def test_as_many_epoch_files_are_kept_as_asked_for() -> None:
    steps = StepsPlan(epochs=40, per_epoch=10, total=400, eval_every=10, save_every=10, keep_checkpoints=3)
    config = rendered(SDXL, steps=steps, image=ImagePlan(save_every_epochs=10)).config
    assert (config["save_every_n_epochs"], config["save_last_n_epochs"]) == (10, 3)
    assert "save_every_n_steps" not in config


@pytest.mark.parametrize("kind", BOTH)
def test_the_buckets_hold_the_resolution(kind: ImageModelType) -> None:
    """sd-scripts refuses a data set with a resolution beyond them."""
    for resolution, least, most in ((64, 64, 2048), (200, 192, 2048), (512, 256, 2048), (2080, 256, 2112)):
        config = rendered(kind, image=ImagePlan(resolution=resolution)).config
        assert (config["min_bucket_reso"], config["max_bucket_reso"]) == (least, most)


def test_precision_is_written_because_the_launcher_does_not_replace_it() -> None:
    assert rendered(SDXL).config["mixed_precision"] == "bf16"
    half = PrecisionPlan(bf16=False, fp16=True)
    assert rendered(SDXL, precision=half).config["mixed_precision"] == "fp16"


def test_loader_processes_stay_only_where_there_are_some() -> None:
    none = LoaderPlan(workers=0, prefetch_factor=None, persistent_workers=True)
    assert rendered(SDXL, loader=none).config["persistent_data_loader_workers"] is False


def test_what_sd_scripts_cannot_do_is_noted() -> None:
    made = rendered(SDXL, ema=EmaPlan(decay=0.999))
    assert noted(made, "ema_decay")
    convolved = rendered(SDXL, image=ImagePlan(conv_rank=16, conv_alpha=8)).config
    assert convolved["network_args"] == ["conv_dim=16", "conv_alpha=8"]


def test_raw_keys_that_do_nothing_are_left_out_with_a_note() -> None:
    given = {"epoch": 60, "huggingface_token": "", "network_dim": 512}
    made = rendered(SDXL, engine_config=given)
    assert made.config["network_dim"] == 512
    assert not made.config.keys() & {"epoch", "huggingface_token"}
    assert noted(made, "epoch")


def test_a_wrong_type_is_named_because_sd_scripts_would_not_notice() -> None:
    with pytest.raises(RecipeError, match=r"engine_config\.kohya → network_dim.*a whole number"):
        rendered(SDXL, engine_config={"network_dim": "512"})


def test_a_full_fine_tune_is_refused() -> None:
    with pytest.raises(RecipeError, match="method"):
        rendered(SDXL, method=Method.FULL, adapter=None)
