"""Files of an image model outside its own folder: in the validator's cache, the container, beside the model.

A cache lies in the hub's own layout (`models--owner--name/snapshots/…`) or under plain names: directories
called `owner--name`, and single files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES, FlowRules, PublishedFile
from core.recipes.base import ImageFiles
from core.runs.picture_run import PictureModel
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
    """Find the parts outside the model, with a warning for each that the family needs and that is missing.

    They lie in the model's directory, in the engine's image, or in the validator's cache."""
    directory = model if model.is_dir() else model.parent
    parts: dict[str, str | None] = {}
    if kind is ImageModelType.FLUX:
        places = [directory, Path(os.environ.get(FLUX_VARIABLE, FLUX)), _weights()]
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


#: Files of the evaluator that the image was built with (EVALUATOR_FILES of the build), and its ComfyUI.
WEIGHTS_VARIABLE, WEIGHTS = "GOD_MINER_WEIGHTS", "/app/weights"
COMFYUI_VARIABLE, COMFYUI = "GOD_MINER_COMFYUI", "/app/ComfyUI"
#: A base is larger: what lies beside it in the repository's root is not.
LEAST_BASE_BYTES = 5 * 2**30


class EvaluatedModel(NamedTuple):
    model: PictureModel
    #: What differs from the files that evaluators load.
    notes: tuple[str, ...]


def comfyui() -> Path:
    return Path(os.environ.get(COMFYUI_VARIABLE, COMFYUI))


def evaluated_model(kind: ImageModelType, model: Path) -> EvaluatedModel:
    """Find what the evaluator loads of a family, or what is nearest to it. `BadModel` where there is nothing
    that the picture trainer could load."""
    flow = IMAGE_FAMILIES[kind].flow
    if flow is None:
        raise BadModel(f"{kind} is not scored")
    if not comfyui().is_dir():
        raise BadModel(f"{comfyui()} is not there")
    folder = model if model.is_dir() else model.parent
    parts = {wanted: _scored_file(wanted, folder) for wanted in flow.encoders}
    for at, wanted in enumerate(flow.encoders):
        parts[wanted] = parts[wanted] or _other_encoder(kind, at, folder)
    parts[flow.vae] = _vae(kind, flow, folder)
    if missing := [wanted.name for wanted, path in parts.items() if path is None]:
        raise BadModel(f"no {', '.join(missing)} in the cache, the model or {_weights()}")
    found = PictureModel(
        family=kind,
        base_path=_base(flow, model, folder),
        text_encoder_paths=tuple(parts[wanted] or "" for wanted in flow.encoders),
        vae_path=parts[flow.vae] or "",
        comfy_dir=str(comfyui()),
    )
    return EvaluatedModel(found, tuple(_differences(flow, found)))


def _differences(flow: FlowRules, found: PictureModel) -> list[str]:
    pairs = zip((*flow.encoders, flow.vae), (*found.text_encoder_paths, found.vae_path), strict=True)
    return [
        f"{path} stands in for {one.name}, which evaluators load"
        for one, path in pairs
        if Path(path).name not in (one.name, "vae")
    ]


def _weights() -> Path:
    return Path(os.environ.get(WEIGHTS_VARIABLE, WEIGHTS))


def _scored_file(wanted: PublishedFile, folder: Path) -> str | None:
    """The very file: fetched at the build, beside the model, in the base image, or in a cache."""
    for place in (_weights(), folder, Path(os.environ.get(FLUX_VARIABLE, FLUX))):
        if (place / wanted.name).is_file():
            return str(place / wanted.name)
    return _file(wanted.repository, wanted.path) or _file(wanted.repository, wanted.name)


def _other_encoder(kind: ImageModelType, at: int, folder: Path) -> str | None:
    """The same encoder in another format: a folder of shards."""
    repository = IMAGE_FAMILIES[kind].text_encoder
    if repository is not None:
        return _repository(repository)
    # Flux has T5 in its second folder, and it is the first of the evaluator's.
    name = ("text_encoder_2", "text_encoder")[at] if kind is ImageModelType.FLUX else "text_encoder"
    return str(folder / name) if any((folder / name).glob("*.safetensors")) else None


def _vae(kind: ImageModelType, flow: FlowRules, folder: Path) -> str | None:
    """Evaluators encode z-image with the task's own, by diffusers, which reads Flux's too."""
    scored, own = _scored_file(flow.vae, folder), folder / "vae"
    if not (own / "config.json").is_file() or kind not in (ImageModelType.Z_IMAGE, ImageModelType.FLUX):
        return scored
    return str(own) if kind is ImageModelType.Z_IMAGE else scored or str(own)


def _base(flow: FlowRules, model: Path, folder: Path) -> str:
    """The one weight file in the repository's root, as evaluators look for it, or the family's own."""
    if flow.base is not None:
        if (path := _scored_file(flow.base, folder)) is None:
            raise BadModel(f"no {flow.base.name} in the cache, the model or {_weights()}")
        return path
    if model.is_file():
        return str(model)
    files = sorted(model.glob("*.safetensors"))
    large = [path for path in files if path.stat().st_size > LEAST_BASE_BYTES]
    if len(large or files) != 1:
        raise BadModel(f"{model} has {len(large or files)} weight files in its root: evaluators load one")
    return str((large or files)[0])
