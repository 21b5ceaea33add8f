"""Find an image model and its parts: in its own directory, in the engine's image, in the validator's cache.

Validators put some parts into the hub's own layout (`models--owner--name/snapshots/…`) and others beside it
under plain names: directories called `owner--name` and single files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from core.recipes.run import ImageFiles
from core.tasks import ImageModelType
from trainer.errors import BadModel

#: What the kohya image carries of Flux besides the model itself.
FLUX_VARIABLE, FLUX = "GOD_MINER_FLUX", "/app/flux"
#: Where a tournament's validator mounts its cache.
CACHE = Path("/cache/hf_cache")
#: The text encoder that ai-toolkit would fetch from the hub by name.
_TEXT_ENCODERS = {
    ImageModelType.KREA2: "Qwen/Qwen3-VL-4B-Instruct",
    ImageModelType.IDEOGRAM4: "Qwen/Qwen3-VL-8B-Instruct",
}
#: ai-toolkit reads krea2's VAE from the `vae` directory in this repository, or in the directory it is given.
_KREA2_VAE = "Qwen/Qwen-Image"


class Adapter(NamedTuple):
    """A small weight file beside the model: the field of `ImageFiles`, its repository and its name."""

    field: str
    repository: str
    pattern: str
    purpose: str


_ADAPTERS = {
    ImageModelType.Z_IMAGE: Adapter(
        "assistant_lora",
        "ostris/zimage_turbo_training_adapter",
        "zimage_turbo_training_adapter*.safetensors",
        "a turbo model loses its few-step quality without it",
    ),
    ImageModelType.QWEN_IMAGE: Adapter(
        "recovery_adapter",
        "ostris/accuracy_recovery_adapters",
        "qwen_image_torchao_uint3.safetensors",
        "a quantised base falls back to 8 bits",
    ),
    ImageModelType.IDEOGRAM4: Adapter(
        "unconditional_lora",
        "ostris/ideogram_4_unconditional_lora",
        "ideogram_4_unconditional_lora*.safetensors",
        "the negative pass runs without it",
    ),
}


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


def image_files(kind: ImageModelType, model: Path) -> tuple[ImageFiles, list[str]]:
    """The parts outside the model, and a warning for each that the family wants and nobody provides."""
    directory = model if model.is_dir() else model.parent
    parts: dict[str, str | None] = {}
    if kind is ImageModelType.FLUX:
        places = [directory, Path(os.environ.get(FLUX_VARIABLE, FLUX))]
        parts = {part: _first(places, f"{part}*.safetensors") for part in ("clip_l", "t5xxl", "ae")}
    if kind in _TEXT_ENCODERS:
        parts["text_encoder"] = _repository(_TEXT_ENCODERS[kind])
        parts["checkpoint_filename"] = _largest_of_several(model)
    if kind is ImageModelType.KREA2:
        parts["vae"] = str(directory) if (directory / "vae").is_dir() else _repository(_KREA2_VAE)
    if kind not in _ADAPTERS:
        return ImageFiles(**parts), []
    adapter = _ADAPTERS[kind]
    parts[adapter.field] = _file(adapter.repository, adapter.pattern)
    missing = f"{kind}: no {adapter.pattern} in {', '.join(map(str, hub_caches()))}: {adapter.purpose}"
    return ImageFiles(**parts), [] if parts[adapter.field] else [missing]


def _first(places: list[Path], pattern: str) -> str | None:
    matches = (path for place in places if place.is_dir() for path in sorted(place.rglob(pattern)))
    return next((str(path) for path in matches), None)


def _largest_of_several(model: Path) -> str | None:
    """The name of the weight file to load, where the model's directory has several."""
    weights = (
        sorted(model.glob("*.safetensors"), key=lambda file: file.stat().st_size) if model.is_dir() else []
    )
    return weights[-1].name if len(weights) > 1 else None


def hub_caches() -> list[Path]:
    """Directories that may hold cached models, most specific first, by what validators set and mount."""
    roots = [
        Path(os.environ[name])
        for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_HOME")
        if os.environ.get(name)
    ]
    caches = [place for root in (*roots, CACHE) for place in (root, root / "hub")]
    return list(dict.fromkeys(caches))


def _open_caches() -> list[Path]:
    """Those that are there and that this user may look into: pathlib raises where it may not."""
    return [cache for cache in hub_caches() if os.access(cache, os.R_OK | os.X_OK) and cache.is_dir()]


def hub_cache() -> Path | None:
    """The first cache in the hub's own layout that has anything."""
    return next((cache for cache in _open_caches() if any(cache.glob("models--*"))), None)


def _repository(name: str) -> str | None:
    """A repository's directory: under its plain name, or the newest snapshot in the hub's layout."""
    plain = name.replace("/", "--")
    for cache in _open_caches():
        if (cache / plain).is_dir():
            return str(cache / plain)
        if snapshots := sorted(
            cache.glob(f"models--{plain}/snapshots/*"), key=lambda path: path.stat().st_mtime
        ):
            return str(snapshots[-1])
    return None


def _file(repository: str, pattern: str) -> str | None:
    """A repository's file, flat in a cache or in the repository's directory; of several the last by name."""
    for cache in _open_caches():
        if flat := sorted(path for path in cache.glob(pattern) if path.is_file()):
            return str(flat[-1])
    directory = _repository(repository)
    matches = sorted(Path(directory).glob(pattern)) if directory else []
    return str(matches[-1]) if matches else None
