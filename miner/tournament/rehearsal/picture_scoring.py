"""Score a LoRA of pictures inside the image that trained it, by `trainer.scoring.pictures`.

The base is loaded by the engine with the configuration that our trainer rendered for the training: it is kept
from the training's container. An image of somebody else's trainer has none, and no scorer of ours.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from core.data.pictures import PICTURE_SUFFIXES
from miner.backends.docker.client import DockerClient
from miner.tournament.rehearsal.container import TrainerContainer
from miner.tournament.rehearsal.scoring import (
    AGAINST,
    INSIDE,
    OURS,
    REPORT,
    CannotScore,
    FolderScore,
    gains,
    readable_report,
    run_scorer,
    write_json,
)
from miner.tournament.rehearsal.upload import choose_image_file
from miner.tournament.rules import CACHE, TournamentTask

#: Validators take all pictures and up to ten seeds; a difference of a percent shows with fewer.
SEEDS, MOST_PICTURES = 2, 4
#: For loading and rendering.
LIMIT_S = 3000.0
#: The engine of a configuration, and where our Dockerfiles have it.
_ENGINES = {
    "config.toml": ("kohya", "/app/sd-scripts"),
    "config.yaml": ("ai-toolkit", "/app/ai-toolkit"),
}
_JOB = "job.json"


def keep_configuration(container: TrainerContainer, work: str, folder: Path) -> Path | None:
    """Copy what the engine was last started with out of the trainer's work directory, running or not."""
    kept, launch = None, 1
    while found := _copied(container, f"{work}/launch-{launch}", folder):
        kept, launch = found, launch + 1
    return kept


def _copied(container: TrainerContainer, launch: str, folder: Path) -> Path | None:
    for name in _ENGINES:
        if container.copy_out(f"{launch}/{name}", folder / name):
            return folder / name
    return None


def pictures_in(folder: Path) -> list[tuple[Path, str]]:
    """Pictures with their captions."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix in PICTURE_SUFFIXES:
            caption = path.with_suffix(".txt")
            found.append((path, caption.read_text("utf-8") if caption.exists() else ""))
    return found


def score_pictures(
    client: DockerClient,
    image: str,
    task: TournamentTask,
    *,
    folder: Path,
    cache: Path,
    configuration: Path,
    pictures: Sequence[tuple[Path, str]],
    repository: Path,
    seeds: int = SEEDS,
    against: Path | None = None,
    gpus: Sequence[str] = (),
) -> FolderScore:
    """Score by the validator's reconstruction loss, as far as the engine computes it. `folder` is a scratch
    directory; `pictures` were not trained on, and come with their captions."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(configuration, folder / configuration.name)
    seen: dict[Path, str] = {cache: CACHE, repository: OURS}
    if against is not None:
        seen[against] = AGAINST
    files = ["", _image_file(repository, OURS)]
    files += [_image_file(against, AGAINST)] if against else []
    copies = []
    for number, (picture, caption) in enumerate(pictures):
        name = f"picture-{number}{picture.suffix}"
        shutil.copyfile(picture, folder / name)
        copies.append({"image": str(INSIDE / name), "caption": caption})
    engine, directory = _ENGINES[configuration.name]
    job = {
        "engine": engine,
        "engine_dir": directory,
        "config": str(INSIDE / configuration.name),
        "family": str(task.image_type),
        "files": files,
        "pictures": copies,
        "seeds": seeds,
        "deadline": time.time() + LIMIT_S,
        "report": str(INSIDE / REPORT),
        "device": "cuda" if gpus else "cpu",
    }
    write_json(folder / _JOB, job)
    # Tokenizers are found there by their names, as in the training.
    variables = f"HF_HUB_CACHE={CACHE}/hf_cache"
    python = '"${GOD_MINER_ENGINE_PYTHON:-python}"'
    command = f"{variables} {python} -m trainer.scoring.pictures {INSIDE / _JOB}"
    report = run_scorer(client, image, command, folder, seen, gpus)
    with readable_report():
        losses = {one["path"]: float(one["loss"]) for one in report["files"]}
        missing = [path or "the base" for path in files if path not in losses]
        reason = str(report["reason"])
    if missing:
        raise CannotScore(f"{', '.join(missing)} cannot be scored: {reason}")
    other = losses[files[2]] if against else None
    return FolderScore(
        metric="reconstruction loss",
        base=losses[""],
        ours=losses[files[1]],
        against=other,
        wins=None if other is None else gains(other - losses[files[1]], other),
        seconds=round(time.monotonic() - began, 1),
        notes=(f"on {len(copies)} pictures, with at most {seeds} seeds for each",),
    )


def _image_file(repository: Path, inside: str) -> str:
    """The file that the evaluator would load; `repository` may also be a folder with just that file."""
    paths = [path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()]
    choice = choose_image_file(paths)
    chosen = choice.newer or choice.older or ("last.safetensors" if "last.safetensors" in paths else None)
    if chosen is None:
        raise CannotScore(f"{repository} has no weights that an evaluator of pictures would load")
    return f"{inside}/{chosen}"
