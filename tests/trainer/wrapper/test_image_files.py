"""Where an image model and its parts are found: validators mount them in several ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.tasks import ImageModelType
from trainer.errors import BadModel
from trainer.wrapper import image_files as module
from trainer.wrapper.image_files import hub_cache, image_files, model_path


def put(path: Path, size: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


@pytest.fixture(autouse=True)
def nothing_of_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "no-cache"))
    monkeypatch.setenv(module.FLUX_VARIABLE, str(tmp_path / "no-flux"))


def test_a_folder_with_one_weight_file_is_that_file(tmp_path: Path) -> None:
    weights = put(tmp_path / "model" / "sdxl.safetensors")
    put(tmp_path / "model" / "README.md")
    assert model_path(tmp_path / "model") == weights
    assert model_path(weights) == weights


def test_a_diffusers_folder_is_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    put(folder / "model_index.json")
    put(folder / "unet" / "diffusion_pytorch_model.safetensors")
    assert model_path(folder) == folder
    put(folder / "left-over.safetensors")
    assert model_path(folder) == folder


def test_a_model_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="not there"):
        model_path(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadModel, match="empty"):
        model_path(tmp_path / "empty")


def test_flux_takes_its_encoders_from_the_model_and_else_from_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = put(tmp_path / "model" / "flux.safetensors")
    carried = tmp_path / "flux"
    monkeypatch.setenv(module.FLUX_VARIABLE, str(carried))
    clip = put(carried / "clip_l.safetensors")
    t5 = put(carried / "t5xxl_fp16.safetensors")
    own = put(tmp_path / "model" / "ae.safetensors")
    put(carried / "ae.safetensors")
    found = image_files(ImageModelType.FLUX, model)
    assert (found.clip_l, found.t5xxl, found.ae) == (str(clip), str(t5), str(own))


def test_what_an_engine_would_download_is_taken_from_a_mounted_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hf_cache"
    monkeypatch.setenv("HF_HOME", str(cache))
    snapshot = cache / "hub" / "models--Qwen--Qwen3-VL-4B-Instruct" / "snapshots" / "abc"
    put(snapshot / "config.json")
    found = image_files(ImageModelType.KREA2, tmp_path / "model")
    assert found.text_encoder == str(snapshot)
    assert found.vae is None
    assert hub_cache() == cache / "hub"


def test_of_several_weight_files_the_largest_is_the_model(tmp_path: Path) -> None:
    put(tmp_path / "model" / "a_vae.safetensors", 10)
    put(tmp_path / "model" / "transformer.safetensors", 1000)
    assert image_files(ImageModelType.KREA2, tmp_path / "model").checkpoint_filename == (
        "transformer.safetensors"
    )


def test_z_images_assistant_is_the_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--ostris--zimage_turbo_training_adapter" / "snapshots" / "1"
    put(folder / "zimage_turbo_training_adapter_v1.safetensors")
    newer = put(folder / "zimage_turbo_training_adapter_v2.safetensors")
    assert image_files(ImageModelType.Z_IMAGE, tmp_path / "model").assistant_lora == str(newer)


def test_without_any_of_it_the_engine_is_left_to_its_names(tmp_path: Path) -> None:
    found = image_files(ImageModelType.FLUX, tmp_path)
    assert (found.clip_l, found.t5xxl, found.ae) == (None, None, None)
