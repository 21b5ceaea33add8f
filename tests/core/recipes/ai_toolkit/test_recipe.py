"""Plans of the newer image families as YAML for ai-toolkit."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from core.domain.choices import Engine, ImageLoss, LrSchedule, Method, Optimizer
from core.domain.tasks import ImageModelType, TaskType
from core.planning.plan import AdapterPlan, EmaPlan, OptimizerPlan, PlateauPlan, TaskSpec
from core.profile.targets import Targets
from core.recipes.base import ImageFiles, RecipeError, RenderedRun
from core.recipes.render import render
from tests.core.recipes.cases import image_inputs, image_plan, noted
from tests.doubles.each import each

Z_IMAGE = ImageModelType.Z_IMAGE
KINDS = {
    ImageModelType.FLUX: "flux",
    ImageModelType.Z_IMAGE: "zimage:turbo",
    ImageModelType.QWEN_IMAGE: "qwen_image",
    ImageModelType.IDEOGRAM4: "ideogram4",
    ImageModelType.KREA2: "krea2",
}


def rendered(kind: ImageModelType = Z_IMAGE, gpus: int = 1, **changes: Any) -> RenderedRun:
    plan = image_plan(kind, gpus, **{"engine": Engine.AI_TOOLKIT, **changes})
    return render(plan, image_inputs(kind))


def process(run: RenderedRun) -> dict[str, Any]:
    (only,) = run.config["config"]["process"]
    return dict(only)


def scheduled(schedule: LrSchedule, cycles: int) -> OptimizerPlan:
    return OptimizerPlan(
        name=Optimizer.ADAMW_TORCH, learning_rate=1e-4, schedule=schedule, cycles=cycles, min_lr_ratio=0.1
    )


@each(("kind", "arch"), KINDS.items())
def test_the_plans_numbers_are_the_configs_and_validators_find_the_result(
    kind: ImageModelType, arch: str
) -> None:
    run = rendered(kind)
    assert yaml.safe_load(run.files["config.yaml"]) == run.config
    assert run.config["config"]["name"] == "last"
    settings = process(run)
    assert settings["training_folder"] == "/run/output"
    assert (settings["model"]["arch"], settings["model"]["name_or_path"]) == (arch, "/cache/models/base")
    assert (settings["network"]["linear"], settings["network"]["linear_alpha"]) == (32, 16.0)
    train = settings["train"]
    assert (train["steps"], train["batch_size"], train["gradient_accumulation"]) == (438, 4, 1)
    assert (train["lr"], train["optimizer"], train["loss_type"]) == (1e-4, "adamw8bit", "mse")
    assert settings["save"]["save_every"] == 40
    (dataset,) = settings["datasets"]
    assert (dataset["folder_path"], dataset["resolution"]) == ("/run/images", [1024])


def test_parts_outside_the_models_folder_are_named() -> None:
    assert process(rendered(ImageModelType.KREA2))["model"]["model_kwargs"] == {
        "text_encoder_path": "/cache/encoder",
        "vae_path": "/cache/vae",
    }


@each("kind", [ImageModelType.KREA2, ImageModelType.IDEOGRAM4])
def test_missing_parts_are_refused_because_the_hub_would_be_used(kind: ImageModelType) -> None:
    with pytest.raises(RecipeError, match="text_encoder_path"):
        render(image_plan(kind), image_inputs(kind, image=ImageFiles()))


def triggered(word: str) -> TaskSpec:
    return TaskSpec(task_type=TaskType.IMAGE, hours=1, image_type=Z_IMAGE, trigger_word=word)


def test_the_trigger_word_goes_in() -> None:
    assert process(rendered(task=triggered("ohwx")))["trigger_word"] == "ohwx"
    assert "trigger_word" not in process(rendered())


@each(
    ("changes", "why"),
    [
        ({"task": triggered("${HOME}")}, "trigger_word"),  # it would be looked up in the environment
        ({"gpus": 4}, "does not split the data"),
        ({"targets": Targets(timestep_sampling="sigma")}, "timestep_sampling"),
        ({"method": Method.FULL, "adapter": None}, "adapter"),
        ({"kind": ImageModelType.SDXL}, "sdxl"),
        (
            {"engine_config": {"train.step": 4000}},
            r"ai-toolkit → config.process\[0\].train.step has value 4000.*the nearest is steps",
        ),
    ],
)
def test_what_the_toolkit_would_not_run_as_written_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        rendered(**changes)


def test_the_moving_average_is_the_toolkits_own() -> None:
    run = rendered(ema=EmaPlan(decay=0.9999, every=5))
    assert process(run)["train"]["ema_config"] == {"use_ema": True, "ema_decay": 0.9999}
    assert noted(run, "ema_every 5")


@each("schedule", list(LrSchedule))
def test_every_schedule_is_one_that_the_toolkit_passes_on_intact(schedule: LrSchedule) -> None:
    train = process(rendered(optimizer=scheduled(schedule, 3)))["train"]
    assert train["lr_scheduler"] in {"constant", "constant_with_warmup", "cosine", "linear"}
    if train["lr_scheduler"] == "linear":
        assert train["lr_scheduler_params"] == {"start_factor": 1.0, "end_factor": 0.1}
    if train["lr_scheduler"] == "cosine":
        assert train["lr_scheduler_params"]["eta_min"] == pytest.approx(1e-5)


def test_a_schedule_it_cannot_pass_on_leaves_a_note() -> None:
    restarts = scheduled(LrSchedule.COSINE_WITH_RESTARTS, 5)
    assert noted(rendered(optimizer=restarts), "lr_scheduler cosine_with_restarts")


def test_what_the_toolkit_cannot_do_is_noted() -> None:
    run = rendered(
        targets=Targets(
            dora=True, min_snr_gamma=5, timestep_sampling="uniform", image_loss=ImageLoss.SMOOTH_L1
        ),
        plateau=PlateauPlan(factor=0.5),
        adapter=AdapterPlan(rank=8, alpha=8, dropout=0.1, params=1),
    )
    for key in ("min_snr_gamma", "plateau_factor", "dora", "timestep_sampling uni", "image_loss smooth_l1"):
        assert noted(run, key), key
    assert process(run)["train"]["timestep_type"] == "linear"
    assert process(run)["network"]["dropout"] == 0.1


def test_raw_keys_are_dotted_paths_from_the_process_down() -> None:
    given = {"train.content_or_style": "style", "datasets.num_repeats": 10, "model.low_vram": True}
    settings = process(rendered(engine_config=given))
    assert settings["train"]["content_or_style"] == "style"
    assert settings["datasets"][0]["num_repeats"] == 10
    assert settings["model"]["low_vram"] is True
    assert settings["train"]["steps"] == 438
