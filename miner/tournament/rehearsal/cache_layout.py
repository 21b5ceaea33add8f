"""Lay out a validator's cache for one task: the directory that its container finds at /cache.

Nothing of the operator's is changed: files are linked where that is possible and copied otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.domain.errors import GodMinerError
from core.domain.tasks import ImageModelType
from core.domain.tournament_rules import CACHE, DATASETS_FOLDER
from core.models.image_families import IMAGE_FAMILIES
from miner.tournament.rules import TournamentTask

#: A folder below the cache is read by the image's own user, who may be any.
_READABLE, _OPEN = 0o644, 0o755
_WEIGHTS = ("*.safetensors", "*.bin")


class BadInput(GodMinerError):
    """A model or data that the operator named and that is not what a validator would send."""

    code = "bad_input"


@dataclass(frozen=True)
class RehearsedTask:
    """A task as one rehearsal runs it: its names, its hours and what else its container is told."""

    task: TournamentTask
    task_id: str
    hotkey: str
    model_id: str
    #: Where its submission is expected.
    repository: str
    hours: float
    trigger_word: str | None = None
    more_environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheLayout:
    """The places of a cache on this machine."""

    root: Path
    model: Path
    data: Path
    #: Where the statistics belong; None for tasks without.
    statistics: Path | None
    #: What a validator's cache would have and this one lacks.
    missing: tuple[str, ...] = ()


def lay_out_cache(
    root: Path,
    rehearsed: RehearsedTask,
    *,
    model: Path,
    data: Path,
    hub_cache: Path | None = None,
    datasets: Mapping[str, Path] | None = None,
) -> CacheLayout:
    """`data`: the rows or the zip. `hub_cache`: a cache of the hub's client, for what image families need
    besides their model. `datasets`: directories of those that the entry requests, by their names."""
    task = rehearsed.task
    name = task.model_argument(rehearsed.model_id).replace("/", "--")
    target = root / "models" / name
    require_model(model, task)
    if model.is_file():
        target.mkdir(parents=True)
        _place(model, target / model.name)
    else:
        _place_tree(model, target)
    if task.anonymous:
        _forget_name(target / "config.json")
    is_image = task.image_type is not None
    placed = root / "datasets" / f"{rehearsed.task_id}_{'tourn.zip' if is_image else 'train_data.json'}"
    _place(data, placed)
    for dataset, source in (datasets or {}).items():
        _place_tree(source, root / DATASETS_FOLDER / dataset.replace("/", "--"))
    missing: list[str] = []
    if task.image_type is not None:
        missing = _hub_parts(root / "hf_cache", task.image_type, hub_cache)
    for folder, _, _ in os.walk(root):
        os.chmod(folder, _OPEN)
    variable = task.variables(task_id=rehearsed.task_id, hotkey=rehearsed.hotkey).get("BASELINE_STATS_PATH")
    statistics = root / Path(variable).relative_to(CACHE) if variable else None
    return CacheLayout(root, target, placed, statistics, tuple(missing))


def require_model(model: Path, task: TournamentTask) -> None:
    """`BadInput` unless it is what such a task is trained from."""
    if not model.exists():
        raise BadInput(f"{model} is not there: name the directory of a model")
    if task.image_type is None and not (model / "config.json").is_file():
        raise BadInput(f"{model} has no config.json: a text task needs the directory of a transformers model")
    if model.is_dir() and not any(any(model.rglob(pattern)) for pattern in _WEIGHTS):
        raise BadInput(f"{model} has no weights ({', '.join(_WEIGHTS)}): name the directory of a model")


def _forget_name(config: Path) -> None:
    """Remove the name from a configuration, as in anonymised models."""
    fields = json.loads(config.read_bytes())
    fields.pop("_name_or_path", None)
    config.unlink()  # a link to the operator's own file
    config.write_text(json.dumps(fields, indent=2), encoding="utf-8")
    config.chmod(_READABLE)


def _hub_parts(target: Path, kind: ImageModelType, source: Path | None) -> list[str]:
    """Fill the hub's cache of an image task from the operator's; return what is missing."""
    target.mkdir(parents=True, exist_ok=True)
    family, missing = IMAGE_FAMILIES[kind], []
    if family.text_encoder:
        plain = family.text_encoder.replace("/", "--")
        snapshot = _snapshot(source, family.text_encoder)
        if snapshot:
            _place_tree(snapshot, target / plain)
        else:
            missing.append(f"{CACHE}/hf_cache/{plain}")
    if family.extra:
        # Adapters lie flat, beside everything else.
        snapshot = _snapshot(source, family.extra.repository)
        adapters = sorted(snapshot.glob(family.extra.pattern)) if snapshot else []
        if source and not adapters:
            adapters = sorted(source.glob(family.extra.pattern))
        for path in adapters:
            _place(path, target / path.name)
        if not adapters:
            missing.append(f"{CACHE}/hf_cache/{family.extra.pattern}")
    for repository in family.companions:
        folder = f"models--{repository.replace('/', '--')}"
        if source and (source / folder).is_dir():
            _place_tree(source / folder, target / folder)
        else:
            missing.append(f"{CACHE}/hf_cache/{folder}")
    return missing


def _snapshot(cache: Path | None, repository: str) -> Path | None:
    """A repository's files in a cache of the hub's client, or in a directory under its plain name."""
    if cache is None:
        return None
    plain = repository.replace("/", "--")
    if (cache / plain).is_dir():
        return cache / plain
    found = sorted(
        (cache / f"models--{plain}" / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime
    )
    return found[-1] if found else None


def _place_tree(source: Path, target: Path) -> None:
    """All files below `source`; links in it are followed, as a cache of the hub consists of them."""
    for folder, _, names in os.walk(source, followlinks=True):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            _place(Path(folder) / name, place / name)


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    real = source.resolve()
    if real.stat().st_mode & 0o004:
        try:
            os.link(real, target)
            return
        except OSError:
            pass  # another disk, or somebody else's file
    shutil.copyfile(real, target)
    target.chmod(_READABLE)
