"""Find an image model and its parts: in its own directory, in the engine's image, in the validator's cache.

Validators put some parts into the hub's own layout (`models--owner--name/snapshots/…`) and others beside it
under plain names: directories called `owner--name` and single files.
"""

from __future__ import annotations

import os
from pathlib import Path

from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES
from core.recipes.base import ImageFiles
from trainer.errors import BadModel

#: What the kohya image carries of Flux besides the model itself.
FLUX_VARIABLE, FLUX = "GOD_MINER_FLUX", "/app/flux"
#: Where a tournament's validator mounts its cache.
CACHE = Path("/cache/hf_cache")


def resolve_model_path(path: Path) -> Path:
    """The folder, or the only weight file in it."""
    if not path.exists():
        raise BadModel(f"{path} is not there")
    if path.is_file():
        return path
    files = [entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith(".")]
    folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    weights = [entry for entry in files if entry.suffix == ".safetensors"]
    if len(weights) == 1 and not folders and not (path / "model_index.json").exists():
        return weights[0]
    if not files and not folders:
        raise BadModel(f"{path} is empty")
    return path


def image_files(kind: ImageModelType, model: Path) -> tuple[ImageFiles, list[str]]:
    """The parts outside the model, and a warning for each that the family needs and that is missing."""
    directory = model if model.is_dir() else model.parent
    parts: dict[str, str | None] = {}
    if kind is ImageModelType.FLUX:
        places = [directory, Path(os.environ.get(FLUX_VARIABLE, FLUX))]
        parts = {part: _first(places, f"{part}*.safetensors") for part in ("clip_l", "t5xxl", "ae")}
    record = IMAGE_FAMILIES[kind]
    if record.text_encoder is not None:
        parts["text_encoder"] = _repository(record.text_encoder)
        parts["checkpoint_filename"] = _largest_of_several(model)
    if record.vae is not None:
        parts["vae"] = str(directory) if (directory / "vae").is_dir() else _repository(record.vae)
    extra = record.extra
    if extra is None:
        return ImageFiles(**parts), []
    parts[extra.field] = _file(extra.repository, extra.pattern)
    missing = f"{kind}: no {extra.pattern} in {', '.join(map(str, hub_caches()))}: {extra.purpose}"
    return ImageFiles(**parts), [] if parts[extra.field] else [missing]


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
    """Those that exist and that this user may read: pathlib raises where it may not."""
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
