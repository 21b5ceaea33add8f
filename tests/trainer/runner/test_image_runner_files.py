"""Where an image model and its parts are found: validators mount them in several ways."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.domain.tasks import ImageModelType
from trainer.errors import BadModel
from trainer.runner import image_files as module
from trainer.runner.image_files import evaluated_model, hub_cache, image_files, resolve_model_path


def put(path: Path, size: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, in the place where a validator mounts its own; nothing of this machine's."""
    for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "CACHE", tmp_path / "hf_cache")
    monkeypatch.setenv(module.FLUX_VARIABLE, str(tmp_path / "no-flux"))
    return tmp_path / "hf_cache"


def test_a_cache_that_this_user_may_not_read_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the home of root in an image whose container runs as somebody else."""
    (tmp_path / "root" / "hf" / "models--o--n").mkdir(parents=True)
    (tmp_path / "root").chmod(0)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "root" / "hf"))
    is_root = os.geteuid() == 0
    real = os.getresuid()
    if is_root:
        os.setresuid(65_534, 65_534, 0)  # `os.access` goes by the real user
    try:
        assert hub_cache() is None
        _, warnings = image_files(ImageModelType.Z_IMAGE, Path("/no-such-model"))
    finally:
        os.setresuid(*real)
    assert len(warnings) == 1


def test_a_model_is_its_only_weight_file_or_its_folder(tmp_path: Path) -> None:
    weights = put(tmp_path / "one" / "sdxl.safetensors")
    put(tmp_path / "one" / "README.md")
    assert resolve_model_path(tmp_path / "one") == resolve_model_path(weights) == weights
    diffusers = tmp_path / "diffusers"
    put(diffusers / "model_index.json")
    put(diffusers / "unet" / "diffusion_pytorch_model.safetensors")
    assert resolve_model_path(diffusers) == diffusers
    put(diffusers / "left-over.safetensors")
    assert resolve_model_path(diffusers) == diffusers


def test_a_model_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="not there"):
        resolve_model_path(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadModel, match="empty"):
        resolve_model_path(tmp_path / "empty")


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
    parts, warnings = image_files(ImageModelType.FLUX, model)
    assert (parts.clip_l, parts.t5xxl, parts.ae) == (str(clip), str(t5), str(own))
    assert warnings == []


def test_every_part_is_found_where_a_tournament_puts_it(tmp_path: Path, cache: Path) -> None:
    """Plain directories and flat files beside the hub's layout; krea2's VAE in the model's own directory."""
    model = tmp_path / "models" / "0123456789abcdef"
    put(model / "raw.safetensors")
    put(model / "vae" / "diffusion_pytorch_model.safetensors")
    for encoder in ("Qwen--Qwen3-VL-4B-Instruct", "Qwen--Qwen3-VL-8B-Instruct"):
        put(cache / encoder / "config.json")
    z_image = put(cache / "zimage_turbo_training_adapter_v2.safetensors")
    qwen = put(cache / "qwen_image_torchao_uint3.safetensors")
    ideogram = put(cache / "ideogram_4_unconditional_lora_r16.safetensors")
    put(cache / "models--openai--clip-vit-large-patch14" / "snapshots" / "1" / "vocab.json")
    expected = {
        ImageModelType.KREA2: {"text_encoder": str(cache / "Qwen--Qwen3-VL-4B-Instruct"), "vae": str(model)},
        ImageModelType.IDEOGRAM4: {
            "text_encoder": str(cache / "Qwen--Qwen3-VL-8B-Instruct"),
            "unconditional_lora": str(ideogram),
        },
        ImageModelType.Z_IMAGE: {"assistant_lora": str(z_image)},
        ImageModelType.QWEN_IMAGE: {"recovery_adapter": str(qwen)},
    }
    for kind, wanted in expected.items():
        parts, warnings = image_files(kind, model)
        assert parts.model_dump(exclude_none=True) == wanted, kind
        assert warnings == [], kind
    assert hub_cache() == cache


def test_every_part_is_found_in_the_layout_of_the_hub(tmp_path: Path, cache: Path) -> None:
    def repository(name: str, file: str) -> Path:
        return put(cache / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "abc" / file)

    encoder = repository("Qwen/Qwen3-VL-4B-Instruct", "config.json").parent
    vae = repository("Qwen/Qwen-Image", "vae/config.json").parent.parent
    repository("ostris/zimage_turbo_training_adapter", "zimage_turbo_training_adapter_v1.safetensors")
    newer = repository("ostris/zimage_turbo_training_adapter", "zimage_turbo_training_adapter_v2.safetensors")
    krea2, _ = image_files(ImageModelType.KREA2, tmp_path / "model")
    assert (krea2.text_encoder, krea2.vae) == (str(encoder), str(vae))
    z_image, warnings = image_files(ImageModelType.Z_IMAGE, tmp_path / "model")
    assert (z_image.assistant_lora, warnings) == (str(newer), [])
    assert hub_cache() == cache / "hub"


@pytest.mark.parametrize(
    "kind", [ImageModelType.Z_IMAGE, ImageModelType.QWEN_IMAGE, ImageModelType.IDEOGRAM4]
)
def test_an_adapter_that_is_missing_is_named(tmp_path: Path, kind: ImageModelType) -> None:
    parts, (warning,) = image_files(kind, tmp_path / "model")
    assert parts.model_dump(exclude_none=True) == {}
    assert kind.value in warning
    assert ".safetensors" in warning


def test_of_several_weight_files_the_largest_is_the_model(tmp_path: Path) -> None:
    put(tmp_path / "model" / "a_vae.safetensors", 10)
    put(tmp_path / "model" / "transformer.safetensors", 1000)
    parts, _ = image_files(ImageModelType.KREA2, tmp_path / "model")
    assert parts.checkpoint_filename == "transformer.safetensors"


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """ComfyUI's directory, and files that were fetched at the build."""
    monkeypatch.setenv(module.COMFYUI_VARIABLE, str(tmp_path))
    monkeypatch.setenv(module.WEIGHTS_VARIABLE, str(tmp_path / "weights"))
    return tmp_path / "weights"


def test_the_evaluators_own_files_come_first_and_what_stands_in_for_them_is_said(
    tmp_path: Path, cache: Path, container: Path
) -> None:
    folder = tmp_path / "model"
    base = put(folder / "raw.safetensors")
    vae = put(container / "qwen_image_vae.safetensors")
    shards = cache / "Qwen--Qwen3-VL-4B-Instruct"
    put(shards / "model-00001-of-00002.safetensors")
    scored = evaluated_model(ImageModelType.KREA2, folder)
    assert (scored.model.base_path, scored.model.vae_path) == (str(base), str(vae))
    assert scored.model.text_encoder_paths == (str(shards),)
    (note,) = scored.notes
    assert "stands in for qwen3vl_4b_fp8_scaled.safetensors" in note
    own = put(container / "qwen3vl_4b_fp8_scaled.safetensors")
    scored = evaluated_model(ImageModelType.KREA2, folder)
    assert (scored.model.text_encoder_paths, scored.notes) == ((str(own),), ())


def test_flux_has_two_encoders_and_z_image_the_tasks_own_vae(tmp_path: Path, container: Path) -> None:
    flux, z_image = tmp_path / "flux", tmp_path / "z-image"
    names = ("t5xxl_fp16.safetensors", "clip_l.safetensors", "ae.safetensors")
    t5, clip, _ = [put(container / name) for name in names]
    put(flux / "flux1-dev.safetensors")
    assert evaluated_model(ImageModelType.FLUX, flux).model.text_encoder_paths == (str(t5), str(clip))
    put(z_image / "z_image.safetensors")
    put(z_image / "text_encoder" / "model.safetensors")
    put(z_image / "vae" / "config.json")
    assert evaluated_model(ImageModelType.Z_IMAGE, z_image).model.vae_path == str(z_image / "vae")


@pytest.mark.parametrize(
    ("kind", "files", "reason"),
    [
        (ImageModelType.SDXL, [], "sdxl is not scored"),
        (ImageModelType.KREA2, ["raw.safetensors"], "no qwen3vl_4b_fp8_scaled.safetensors, qwen_image_vae"),
        (ImageModelType.FLUX, ["a.safetensors", "b.safetensors"], "2 weight files in its root"),
        (ImageModelType.IDEOGRAM4, ["a.safetensors"], "no ideogram4_fp8_scaled.safetensors"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    tmp_path: Path, container: Path, kind: ImageModelType, files: list[str], reason: str
) -> None:
    for name in files:
        put(tmp_path / "model" / name)
    if kind is not ImageModelType.KREA2:
        for name in ("t5xxl_fp16", "clip_l", "ae", "qwen3vl_8b_fp8_scaled", "flux2-vae"):
            put(container / f"{name}.safetensors")
    with pytest.raises(BadModel, match=reason):
        evaluated_model(kind, tmp_path / "model")
