"""Where an image model and its parts lie: in the model's folder, in the engine's image, in the hub's
cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from core.recipes.run import ImageFiles
from core.tasks import ImageModelType
from trainer.errors import BadModel

#: What the kohya image carries of Flux besides the model itself.
FLUX_VARIABLE, FLUX = "GOD_MINER_FLUX", "/app/flux"
#: Repositories that engines would look up by name; a tournament's cache holds some of them.
_ENCODERS = {
    ImageModelType.KREA2: ("Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen-Image"),
    ImageModelType.IDEOGRAM4: ("Qwen/Qwen3-VL-8B-Instruct", None),
}
_ASSISTANT = "ostris/zimage_turbo_training_adapter"


def model_path(path: Path) -> Path:
    """The folder, or the only weight file in it."""
    if not path.exists():
        raise BadModel(f"{path} is not there")
    if path.is_file():
        return path
    files = [one for one in path.iterdir() if one.is_file() and not one.name.startswith(".")]
    folders = [one for one in path.iterdir() if one.is_dir() and not one.name.startswith(".")]
    weights = [one for one in files if one.suffix == ".safetensors"]
    if len(weights) == 1 and not folders and not (path / "model_index.json").exists():
        return weights[0]
    if not files and not folders:
        raise BadModel(f"{path} is empty")
    return path


def image_files(kind: ImageModelType, model: Path) -> ImageFiles:
    """The parts outside the model, as far as they are found."""
    if kind is ImageModelType.FLUX:
        places = [model if model.is_dir() else model.parent, Path(os.environ.get(FLUX_VARIABLE, FLUX))]
        return ImageFiles(
            clip_l=_first(places, "clip_l*.safetensors"),
            t5xxl=_first(places, "t5xxl*.safetensors"),
            ae=_first(places, "ae*.safetensors"),
        )
    if kind in _ENCODERS:
        encoder, vae = _ENCODERS[kind]
        return ImageFiles(
            text_encoder=_snapshot(encoder),
            vae=_snapshot(vae) if vae else None,
            checkpoint_filename=_only_weights(model),
        )
    if kind is ImageModelType.Z_IMAGE:
        folder = _snapshot(_ASSISTANT)
        return ImageFiles(assistant_lora=_first([Path(folder)], "*v2*.safetensors") if folder else None)
    return ImageFiles()


def _first(places: list[Path], pattern: str) -> str | None:
    found = (path for place in places if place.is_dir() for path in sorted(place.rglob(pattern)))
    return next((str(path) for path in found), None)


def _only_weights(model: Path) -> str | None:
    weights = (
        sorted(model.glob("*.safetensors"), key=lambda one: one.stat().st_size) if model.is_dir() else []
    )
    return weights[-1].name if len(weights) > 1 else None


def hub_caches() -> Iterator[Path]:
    """Folders with `models--owner--name` in them, by what validators set and mount."""
    for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_HOME"):
        if value := os.environ.get(name):
            yield from (Path(value), Path(value) / "hub")
    yield from (Path("/cache/hf_cache"), Path("/cache/hf_cache/hub"))


def hub_cache() -> Path | None:
    """The first that has anything."""
    return next((one for one in hub_caches() if one.is_dir() and any(one.glob("models--*"))), None)


def _snapshot(repository: str) -> str | None:
    for cache in hub_caches():
        found = sorted(cache.glob(f"models--{repository.replace('/', '--')}/snapshots/*"))
        if found:
            return str(found[-1])
    return None
