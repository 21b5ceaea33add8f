"""Look at the entries that /training_repo hands out as validators will: clone each, and find its commit.

An entry that was prepared here and changed since is not the one that validators get: `prepare` notes where it
is, and its HEAD is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from core.domain.wire import TournamentType
from core.system.files import read_regular_file, temporary_tree, write_atomically
from miner.alerts.tournament_entries import PREPARED, PROTOCOL, EnteredRepo, EntriesChecked, EntriesOrder
from miner.support.child_main import serve
from miner.tournament.check.entry import is_whole_commit, site_answers
from miner.tournament.checkout import CloneFailed, CloneTooSlow, clone_repository, git_output


def note_prepared(data_dir: Path, directory: Path, kinds: tuple[TournamentType, ...]) -> None:
    """Remember where the entry of these kinds lies."""
    file = data_dir / PREPARED
    noted = prepared_directories(file) | dict.fromkeys(kinds, directory)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({kind: str(place) for kind, place in noted.items()}).encode())


def prepared_directories(file: Path) -> dict[TournamentType, Path]:
    """Return what was noted, as far as it can be read."""
    try:
        found = json.loads(read_regular_file(file))
    except (OSError, ValueError):
        return {}
    kinds = set(TournamentType) if isinstance(found, Mapping) else set()
    return {kind: Path(found[kind]) for kind in kinds if isinstance(found.get(kind), str)}


def check_entries(order: EntriesOrder) -> EntriesChecked:
    """Clone each repository; say which commits are not there, and which are not the prepared entry's."""
    problems: dict[TournamentType, tuple[str, ...]] = {}
    unknown: list[str] = []
    prepared = prepared_directories(order.prepared)
    for entry in order.entries:
        found = [*_not_prepared(entry, prepared.get(entry.kind))]
        try:
            found += _not_cloned(entry)
        except CloneTooSlow as error:
            unknown.append(f"{entry.kind}: {error}")
            if not found:
                continue
        problems[entry.kind] = tuple(f"{entry.kind}: {text}" for text in found)
    return EntriesChecked(problems=problems, unknown=tuple(unknown))


def _not_cloned(entry: EnteredRepo) -> Iterator[str]:
    """Say why validators will not get the entry. `CloneTooSlow` if nothing can be said."""
    if not is_whole_commit(entry.commit):
        yield f"the commit {entry.commit} has not 40 hexadecimal digits"
        return
    is_web = entry.url.startswith(("http://", "https://"))
    if is_web and not site_answers(f"{entry.url.rstrip('/')}/info/refs?service=git-upload-pack"):
        raise CloneTooSlow(f"{entry.url} cannot be reached")
    with temporary_tree("god-miner-entry-") as folder:
        token = entry.token.get_secret_value() if entry.token else None
        try:
            clone_repository(entry.url, entry.commit.lower(), folder / "clone", token=token)
        except CloneTooSlow:
            raise
        except CloneFailed as error:
            yield f"validators will not get the entry: {str(error).partition(chr(10))[0]}"


def _not_prepared(entry: EnteredRepo, directory: Path | None) -> Iterator[str]:
    """Compare with the prepared entry's HEAD; a directory that is gone is nothing to compare with."""
    if directory is None or not directory.is_dir():
        return
    with temporary_tree("god-miner-entry-") as folder:
        try:
            clone = clone_repository(str(directory), None, folder / "clone")
            commit = entry.commit.lower()
            if clone.commit == commit:
                return
            known = commit in git_output(clone.directory, "rev-list", "--all").split()
        except CloneFailed:
            return
    is_what = "an older commit of" if known else "no commit of"
    yield (
        f"TRAINING_REPO_{entry.kind.name}_COMMIT is {commit[:12]}, {is_what} the entry in "
        f"{directory}, which was prepared last and is at {clone.commit[:12]}: push and enter that"
    )


def main() -> int:
    return serve(
        PROTOCOL,
        lambda order, write: check_entries(order),
        lambda error, order: EntriesChecked(unknown=(str(error),)),
        niceness=10,
    )


if __name__ == "__main__":
    raise SystemExit(main())
