"""The validator's uploader: the files of a folder that it takes, changes and leaves out.

It trusts names alone: weights in a direct subfolder are uploaded instead of the submission. Whether the
result loads is a matter of `scoring.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from core.domain.tournament_rules import EMPTY_BYTES, IMAGE_PREFIX, IMAGE_SUBFOLDER, NOT_UPLOADED
from core.submission.folder import ADAPTER_CONFIG, CARD

_BASE_KEY, _BASE_LINE = "base_model_name_or_path", "base_model:"
#: Of a configuration or a card.
_MOST_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Rewrite:
    """A file that the uploader changes on its way."""

    path: Path
    before: str
    after: str


@dataclass(frozen=True)
class Upload:
    """The files of a folder that the uploader would publish. Without problems it is a submission."""

    #: The folder that is uploaded: the submission's own, or the subfolder that takes its place.
    folder: Path
    #: Relative to it, without what is skipped.
    files: tuple[Path, ...] = ()
    skipped: tuple[Path, ...] = ()
    from_subfolder: str | None = None
    rewrites: tuple[Rewrite, ...] = ()
    problems: tuple[str, ...] = ()
    #: Where the files lie in the repository.
    into: str = ""

    @property
    def size(self) -> int:
        return sum((self.folder / path).stat().st_size for path in self.files)

    def published(self, path: Path) -> str:
        """A file's path in the repository."""
        return str(PurePosixPath(self.into, path.as_posix()))


def what_is_uploaded(folder: Path, model_id: str, *, image: bool = False) -> Upload:
    """Apply the uploader's  `model_id`: the task's real model, which adapter and card then name."""
    into = IMAGE_SUBFOLDER if image else ""
    if not folder.is_dir():
        return Upload(folder, problems=(f"{folder} is not a directory: the upload fails",), into=into)
    if (link := _link_out(folder)) is not None:
        why = f"{link} is a link out of the folder, into this machine's own files: nothing is read"
        return Upload(folder, problems=(why,), into=into)
    problems = []
    taken = _folders_with_weights(folder)
    if taken:
        others = f" ({', '.join(taken[1:])} has some too: which one comes first depends on the disk)"
        problems.append(
            f"{taken[0]}/ holds weights and is uploaded instead of the folder{others if taken[1:] else ''}: "
            "leave no subfolder with *.safetensors in it"
        )
    uploaded = folder / taken[0] if taken else folder
    if _is_empty(uploaded):
        problems.append(
            f"no subfolder and no file of more than {EMPTY_BYTES:,} bytes: the uploader takes "
            "the folder for empty and fails"
        )
    found = sorted(path.relative_to(uploaded) for path in uploaded.rglob("*") if path.is_file())
    skipped = tuple(path for path in found if any(fnmatch(path.as_posix(), one) for one in NOT_UPLOADED))
    files = tuple(path for path in found if path not in skipped)
    if not any(path.suffix == ".safetensors" for path in files):
        problems.append("there are no *.safetensors in it: nothing can be evaluated")
    rewrites, bad = _rewrites(uploaded, files, model_id)
    problems += bad
    if image:
        problems += choose_image_file(f"{into}/{path.as_posix()}" for path in files).problems
    return Upload(
        folder=uploaded,
        files=files,
        skipped=skipped,
        from_subfolder=taken[0] if taken else None,
        rewrites=rewrites,
        problems=tuple(problems),
        into=into,
    )


def _link_out(folder: Path) -> Path | None:
    """The first link that leads out. A stranger's container made it, and its target is read out here."""
    if folder.is_symlink():
        return folder
    root = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                return path
    return None


def _folders_with_weights(folder: Path) -> list[str]:
    """In the order of the directory, as `os.listdir` has it."""
    return [
        name
        for name in os.listdir(folder)
        if (folder / name).is_dir() and any((folder / name).glob("*.safetensors"))
    ]


def _is_empty(folder: Path) -> bool:
    entries = [path for path in folder.iterdir() if not path.name.startswith(".git")]
    return not any(path.is_dir() or path.stat().st_size > EMPTY_BYTES for path in entries)


def _rewrites(folder: Path, files: Sequence[Path], model_id: str) -> tuple[tuple[Rewrite, ...], list[str]]:
    """Return the rewritten values, and the problems."""
    rewrites, problems = [], []
    if Path(ADAPTER_CONFIG) in files:
        try:
            named = json.loads(_read(folder / ADAPTER_CONFIG))[_BASE_KEY]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"{ADAPTER_CONFIG} cannot be read ({type(error).__name__}: {error})")
        else:
            if named != model_id:
                rewrites.append(Rewrite(Path(ADAPTER_CONFIG), str(named), model_id))
    if Path(CARD) in files:
        try:
            lines = _read(folder / CARD).splitlines()
        except (OSError, ValueError) as error:
            problems.append(f"{CARD} cannot be read ({type(error).__name__}: {error})")
        else:
            wanted = f"{_BASE_LINE} {model_id}"
            changed = [line for line in lines if line.startswith(_BASE_LINE) and line != wanted]
            rewrites += [Rewrite(Path(CARD), line, wanted) for line in changed]
    return tuple(rewrites), problems


def _read(file: Path) -> str:
    """Read a text of the submission. A stranger's may have any size."""
    if file.stat().st_size > _MOST_TEXT_BYTES:
        raise OSError(f"more than {_MOST_TEXT_BYTES:,} bytes")
    return file.read_text("utf-8")


def as_published(upload: Upload, directory: Path) -> Path:
    """Make the repository as the evaluator downloads it: hard links where possible, else copies. The folder
    itself is not changed."""
    for path in upload.files:
        target = directory / upload.published(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        changes = [rewrite for rewrite in upload.rewrites if rewrite.path == path]
        if changes:
            target.write_text(_rewritten(upload.folder / path, changes), encoding="utf-8")
            continue
        try:
            os.link(upload.folder / path, target)
        except OSError:
            shutil.copyfile(upload.folder / path, target)
    return directory


def _rewritten(file: Path, changes: Sequence[Rewrite]) -> str:
    text = _read(file)
    if file.name == ADAPTER_CONFIG:
        return json.dumps(json.loads(text) | {_BASE_KEY: changes[0].after}, indent=2)
    after = {change.before: change.after for change in changes}
    return "\n".join(after.get(line, line) for line in text.splitlines()) + "\n"


# — pictures

_NUMBER = re.compile(r"[-_](\d+)\.safetensors$")
_ANY_NUMBER = re.compile(r"(\d+)\.safetensors$")


@dataclass(frozen=True)
class ImageChoice:
    """The file that evaluators load, by the rule of July 2026 and by the newest known one."""

    older: str | None
    newer: str | None

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._problems())

    def _problems(self) -> Iterator[str]:
        way_out = "leave exactly one last.safetensors at the top of the folder"
        if self.older is None and self.newer is None:
            yield f"no weights that an evaluator of pictures would load: {way_out}"
        elif self.older is None or self.newer is None:
            yield f"one of the evaluator's two rules finds no weights to load: {way_out}"
        elif self.older != self.newer:
            yield f"the evaluator's older rule loads {self.older}, its newer one {self.newer}: {way_out}"


def choose_image_file(published: Iterable[str]) -> ImageChoice:
    """`published`: paths in the repository."""
    weights = [
        path for path in sorted(published) if path.startswith(IMAGE_PREFIX) and path.endswith(".safetensors")
    ]
    return ImageChoice(_older_choice(weights), _newer_choice(weights))


def _older_choice(weights: Sequence[str]) -> str | None:
    last = next((path for path in weights if path.endswith("last.safetensors")), None)
    plain = next((path for path in weights if not _ANY_NUMBER.search(path)), None)
    return last or plain or _highest(weights, _ANY_NUMBER)


def _newer_choice(weights: Sequence[str]) -> str | None:
    inside = [path for path in weights if PurePosixPath(path).parts[0] in ("checkpoint", "checkpoints")]
    lasts = [path for path in inside if PurePosixPath(path).name == "last.safetensors"]
    if len(lasts) == 1:
        return lasts[0]
    return _highest(inside, _NUMBER) or (inside[0] if len(inside) == 1 else None)


def _highest(weights: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    numbered = {path: int(match[1]) for path in weights if (match := pattern.search(path))}
    return max(numbered, key=numbered.__getitem__, default=None)
