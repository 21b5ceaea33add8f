"""Make an entry out of this repository: a new git repository with one commit and only what a training needs.

The tree is that of HEAD, so nothing uncommitted slips in. The chosen profile becomes the default of its
Dockerfiles. Upstream's licence and notice come from a checkout that the operator names, byte for byte: we
ship neither.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config.files import ConfigLayer
from core.domain.errors import GodMinerError
from core.domain.tournament_rules import UPSTREAM
from core.domain.wire import TournamentType
from core.profile.resolve import PROFILE_KIND
from core.profile.schema import Profile
from core.system.files import temporary_tree
from miner.tournament.check.dockerfiles import first_dockerfile
from miner.tournament.check.licence import upstream_files
from miner.tournament.check.review.concerns import PACKAGES, Gravity, ReviewFinding
from miner.tournament.check.review.rule import review_tree
from miner.tournament.checkout import (
    CloneFailed,
    clone_repository,
    git_output,
    tracked_files,
    uncommitted_files,
)
from miner.tournament.rules import TASKS

#: What every image is built from and what its trainer reads, besides Dockerfiles and profiles.
INGREDIENTS = ("core/", "trainer/", "configs/base/", "requirements/")
PROFILES = "configs/profiles"
#: What a training uses if no profile is named: on GPUs, and on the CPU of a rehearsal (`trainer/runner`).
USUAL_PROFILE, CPU_PROFILE = "steady", "cpu-demo"
REVIEW_PAGE = "REVIEW.md"
OWN_LICENSE = "LICENSE-god-miner"
DOCKERIGNORE = ".git\n**/__pycache__\n"
GITIGNORE = "__pycache__/\n*.pyc\n"
#: What the comparison of entries (T2) asks for, and what it does not count.
DISTINCT = (
    "one mechanism that runs in trainings of this kind of tournament, works, and that neither the other "
    "entry nor the base that both share has",
)
NOT_DISTINCT = (
    "values: rates, ranks, batches, another shipped profile",
    "other names, order, comments, texts or files that no training reads",
    "code that never runs here: for another kind of task, behind variables that validators do not set",
    "options that the engine ignores",
)


class CannotPrepare(GodMinerError):
    """An entry that cannot be made as it was asked for."""

    code = "cannot_prepare"


@dataclass(frozen=True)
class PreparedEntry:
    directory: Path
    #: The one commit of the new repository.
    commit: str
    #: The commit of god-miner that it was made from.
    made_from: str
    kinds: tuple[TournamentType, ...]
    profile: str
    #: The profile's files, oldest ancestor first.
    layers: tuple[str, ...]
    files: int
    size_bytes: int
    #: Whether upstream's licence and notice are in it.
    licensed: bool
    #: Places that REVIEW.md explains, and those that it cannot: no comment says what they are for.
    explained: int
    unexplained: tuple[str, ...]
    #: What was changed or new in the checkout and not committed, so it is not in the entry.
    uncommitted: tuple[str, ...]


def prepare_entry(
    source: Path,
    directory: Path,
    *,
    kinds: Sequence[TournamentType],
    profile: str = USUAL_PROFILE,
    profile_directories: Sequence[Path] = (),
    upstream: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> PreparedEntry:
    """Make the entry in a new or empty directory; nothing is there if it fails."""
    directory = directory.resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CannotPrepare(f"{directory} is not an empty directory: name one that is not there yet")
    license_files = upstream_files(upstream) if upstream else ()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with temporary_tree(f".{directory.name}-", parent=directory.parent) as folder:
        say(f"cloning {source}")
        try:
            clone = clone_repository(str(source), None, folder / "clone")
        except CloneFailed as error:
            raise CannotPrepare(f"an entry is made from a checkout: {error}") from None
        say("writing the entry")
        entry = folder / "entry"
        entry.mkdir()
        layers = _profile_layers(profile, profile_directories, clone.directory)
        _copy_ingredients(clone.directory, entry)
        names = _write_profile(layers, clone.directory, entry)
        for needed in (USUAL_PROFILE, CPU_PROFILE):
            _copy_shipped_profile(needed, clone.directory, entry)
        _copy_dockerfiles(clone.directory, entry, kinds, names[-1])
        shutil.copyfile(clone.directory / "LICENSE", entry / OWN_LICENSE)
        for file in license_files:
            shutil.copyfile(file, entry / file.name)
        (entry / ".dockerignore").write_text(DOCKERIGNORE, "utf-8")
        (entry / ".gitignore").write_text(GITIGNORE, "utf-8")
        (entry / "README.md").write_text(
            _readme(kinds, names[-1], clone.commit, bool(license_files)), "utf-8"
        )
        say("reading it as a reviewer")
        found = review_tree(entry, _files_of(entry), kinds)
        (entry / REVIEW_PAGE).write_text(_review_page(kinds, found), "utf-8")
        say("committing")
        commit = _commit(entry, f"Entry for {_and(kinds)} tournaments, from god-miner {clone.commit[:12]}")
        files = tracked_files(entry)
        size = sum((entry / name).stat().st_size for name in files)
        entry.chmod(0o755)
        entry.replace(directory)
    return PreparedEntry(
        directory,
        commit,
        clone.commit,
        tuple(kinds),
        names[-1],
        tuple(names),
        len(files),
        size,
        bool(license_files),
        sum(bool(one.why) for one in found),
        tuple(f"{one.place} {one.what}" for one in found if one.severity is not Gravity.SAID),
        tuple(uncommitted_files(source)),
    )


def _profile_layers(profile: str, directories: Sequence[Path], clone: Path) -> list[ConfigLayer[Profile]]:
    """The profile with all it extends; a shipped one as it is in the commit."""
    return PROFILE_KIND.layers(profile, [*directories, clone / PROFILES])


def _write_profile(layers: Sequence[ConfigLayer[Profile]], clone: Path, entry: Path) -> list[str]:
    """Write every layer, each extending the one before it; return their names, the chosen one last.

    A file that is not the shipped one gets a name that no shipped one has: it may extend that one."""
    place = entry / PROFILES
    place.mkdir(parents=True, exist_ok=True)
    shipped = PROFILE_KIND.files([clone / PROFILES])
    names: list[str] = []
    for layer in layers:
        name, text = layer.name, layer.text
        is_shipped = name in shipped and shipped[name].read_text("utf-8") == text
        while name in names or (name in shipped and not is_shipped):
            name += "-own"
        if layer.content.extends is not None and layer.content.extends != names[-1]:
            text, count = re.subn(
                r"^(\"?extends\"?\s*:).*$", rf"\g<1> {names[-1]}", text, count=1, flags=re.MULTILINE
            )
            if count != 1:
                raise CannotPrepare(f"{layer.file}: write `extends:` on a line of its own")
        (place / f"{name}.yaml").write_text(text, "utf-8")
        names.append(name)
    written = PROFILE_KIND.layers(str(place / f"{names[-1]}.yaml"), [place])
    for before, after in zip(layers, written, strict=True):
        if before.content.model_copy(update={"extends": None}) != after.content.model_copy(
            update={"extends": None}
        ):
            raise CannotPrepare(f"{before.file} reads differently in the entry: write it in plain YAML")
    return names


def _copy_shipped_profile(name: str, clone: Path, entry: Path) -> None:
    for layer in PROFILE_KIND.layers(str(clone / PROFILES / f"{name}.yaml"), [clone / PROFILES]):
        target = entry / PROFILES / layer.file.name
        if not target.exists():
            target.write_text(layer.text, "utf-8")


def _copy_ingredients(clone: Path, entry: Path) -> None:
    for name in tracked_files(clone):
        if name.startswith(INGREDIENTS):
            target = entry / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(clone / name, target, follow_symlinks=False)


def _copy_dockerfiles(clone: Path, entry: Path, kinds: Sequence[TournamentType], profile: str) -> None:
    for wanted in dict.fromkeys(task.dockerfile for task in TASKS.values() if task.tournament in kinds):
        name = first_dockerfile(clone, wanted)
        if name is None:
            raise CannotPrepare(f"this commit has no dockerfiles/{wanted}")
        text = (clone / name).read_text("utf-8")
        if profile != USUAL_PROFILE:
            line = f"ENV GOD_MINER_PROFILE={profile}\nENTRYPOINT "
            text, count = re.subn(r"^ENTRYPOINT ", line, text, flags=re.MULTILINE)
            if count != 1:
                raise CannotPrepare(
                    f"{name} has {count} entry points, not one: the profile has no place there"
                )
        (entry / name).parent.mkdir(parents=True, exist_ok=True)
        (entry / name).write_text(text, "utf-8")


def _commit(entry: Path, message: str) -> str:
    git_output(entry, "init", "--quiet", "-b", "main")
    plain = ("-c", "core.autocrlf=false", "-c", "commit.gpgsign=false")
    git_output(entry, *plain, "add", "--all", "--force", operators=True)
    try:
        git_output(entry, "config", "user.email", operators=True)
        who: tuple[str, ...] = ()
    except CloneFailed:  # no name is set for commits
        who = ("-c", "user.name=god-miner", "-c", "user.email=god-miner@localhost")
    git_output(entry, *plain, *who, "commit", "--quiet", "--message", message, operators=True)
    return git_output(entry, "rev-parse", "HEAD")


def _files_of(entry: Path) -> list[str]:
    return sorted(str(path.relative_to(entry)) for path in entry.rglob("*") if not path.is_dir())


def _review_page(kinds: Sequence[TournamentType], found: Sequence[ReviewFinding]) -> str:
    """List what the images fetch and what else a reviewer would look at, each with the comment beside it."""
    told = [one for one in found if one.why or one.concern is PACKAGES or one.severity is not Gravity.SAID]
    fetched = [one for one in told if one.concern.fetches]
    others = [one for one in told if not one.concern.fetches]
    return f"""# For the reviewer

Written by `god-miner tournament prepare`, from the comments beside each place, for {_and(kinds)} tournaments.
It has read the Dockerfiles and every file that they copy. Trained on are the task's own data in `/cache` and
the data sets that the entry requests, and nothing else.

## What a build fetches

{_table(fetched)}
## What else may raise a question

{_table(others)}"""


def _table(found: Sequence[ReviewFinding]) -> str:
    if not found:
        return "Nothing.\n"
    ordered = sorted(found, key=lambda one: (one.file, one.line))
    rows = [f"| `{one.place}` | {_cell(one.what)} | {_cell(one.why) or '-'} |" for one in ordered]
    return "\n".join(["| where | what | what for |", "|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _and(kinds: Sequence[TournamentType]) -> str:
    return " and ".join(str(kind) for kind in kinds)


def _readme(kinds: Sequence[TournamentType], profile: str, commit: str, licensed: bool) -> str:
    files = (
        f"`LICENSE.md` and `NOTICE` are those of {UPSTREAM}, as its tournaments ask of every entry."
        if licensed
        else f"`LICENSE.md` and `NOTICE` of {UPSTREAM} are missing: its tournaments refuse the entry."
    )
    return f"""# A trainer for {_and(kinds)} tournaments of Gradients

An entry for the tournaments of [Gradients](https://gradients.io), subnet 56 of Bittensor. {files}

## Whose work it is

The trainer (`core/`, `trainer/`, `configs/`, `dockerfiles/`) is a copy of god-miner at commit `{commit}`,
under the MIT licence in `{OWN_LICENSE}`. Whatever was changed after this repository's first commit is the
work of its owner.

## What is in it

| | |
|---|---|
| `dockerfiles/` | the images that validators build |
| `trainer/` | what runs in them; the entry points are `trainer.text` and `trainer.image` |
| `core/` | planning, engines' configurations, what makes a submission |
| `configs/profiles/{profile}.yaml` | how to train |
| `{REVIEW_PAGE}` | what the images fetch, and what for |
"""
