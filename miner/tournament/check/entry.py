"""An entry in fresh clones of its own, the finding of a rule's check, and the time limit of all checks."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from core.domain.errors import GodMinerError
from core.domain.wire import TournamentType
from miner.backends.docker.images import BuildFailed, source_root
from miner.settings import Settings
from miner.tournament.checkout import (
    Clone,
    CloneFailed,
    CloneTooSlow,
    clone_repository,
    git_output,
    is_local,
    remote_url,
    tracked_files,
)

USUAL_KINDS = tuple(TournamentType)
#: For one answer of a code host, before minutes are given to a clone.
ANSWER_LIMIT_S = 5.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SSH = re.compile(r"(?:ssh://)?[\w.-]+@(?P<host>[\w.-]+)[:/](?P<path>.+?)(?:\.git)?/?")


class FindingState(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    #: It cannot be known here; the finding says what to do by hand.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RuleFinding:
    """The finding of one rule of admission on an entry."""

    number: int
    rule: str
    state: FindingState
    text: str
    notes: tuple[str, ...] = ()
    #: What the operator does next: to mend a failure, or to find out what cannot be known here.
    to_do: str = ""
    #: Every place by itself, for `--json`.
    places: tuple[Mapping[str, object], ...] = ()

    def as_dict(self) -> dict[str, object]:
        return {
            "number": self.number,
            "rule": self.rule,
            "state": str(self.state),
            "text": self.text,
            "notes": list(self.notes),
            "to_do": self.to_do,
            "places": [dict(place) for place in self.places],
        }


@dataclass(frozen=True)
class Remote:
    """The repository from which validators would clone the entry."""

    url: str
    clone: Clone | None
    #: Why there is no clone.
    problem: str = ""
    #: Whether the host has answered: without an answer nothing is known.
    answered: bool = False
    #: Whether the clone was given up at the validators' own limit.
    too_slow: bool = False


@dataclass(frozen=True)
class CheckedEntry:
    """A commit in a fresh clone, the default branch beside it, and how the operator wants it checked."""

    source: str
    #: As the operator named it; None for HEAD.
    asked: str | None
    clone: Clone
    #: A checkout of the default branch's head, from where validators read licence and notice.
    head: Path
    head_commit: str
    remote: Remote | None
    kinds: tuple[TournamentType, ...]
    #: None where they cannot be read; `settings_problem` says why.
    settings: Settings | None
    settings_problem: str
    others: tuple[tuple[str, Clone], ...]
    #: Entries that could not be cloned to compare with, and why.
    lost: tuple[tuple[str, str], ...]
    upstream: Path | None
    #: Whether its code may be run here without a sandbox.
    trusted: bool
    offline: bool
    now: datetime

    @property
    def tree(self) -> Path:
        return self.clone.directory

    @property
    def branch(self) -> str:
        """The default branch as it is known here, for messages."""
        if self.remote and self.remote.clone:
            return f"the default branch of {self.remote.url} at {self.head_commit[:12]}"
        return f"HEAD of {self.source} at {self.head_commit[:12]} (taken for the default branch)"

    def files(self) -> list[str]:
        """Every file of the commit, by its path."""
        return tracked_files(self.tree)


def named_source(subject: str | None) -> tuple[str, str | None]:
    """The repository and commit that an operator means by a commit, an address, a directory or nothing."""
    if subject is None:
        return _own_checkout(), None
    if not is_local(subject) or Path(subject).is_dir():
        return subject, None
    if "/" in subject or subject.startswith((".", "~")):
        raise CloneFailed(f"{subject} is not a directory; name a commit, an address or a directory")
    return _own_checkout(), subject


def _own_checkout() -> str:
    try:
        return str(source_root())
    except BuildFailed:
        raise CloneFailed(
            "god-miner is installed here as a package, not as a checkout: name an address or a directory"
        ) from None


def _is_own_checkout(source: str) -> bool:
    try:
        return is_local(source) and Path(source).resolve() == source_root().resolve()
    except BuildFailed:
        return False


def open_entry(
    subject: str | None,
    folder: Path,
    *,
    commit: str | None = None,
    kinds: Sequence[TournamentType] = USUAL_KINDS,
    settings: Settings | None = None,
    settings_problem: str = "",
    others: Sequence[str] = (),
    upstream: Path | None = None,
    trust: bool = False,
    offline: bool = False,
    now: datetime,
    say: Callable[[str], None] = lambda line: None,
) -> CheckedEntry:
    """Clone all that the checks need below `folder`; `say` gets a line before each clone."""
    source, named = named_source(subject)
    if commit and named:
        raise CloneFailed(f"a commit is named twice: {named} and --commit {commit}")
    asked = commit or named
    if _SSH.fullmatch(source):
        source = public_address(source)  # validators have none of the operator's keys
    token = _token(settings, source, kinds)
    say(f"cloning {public_address(source)}")
    clone = clone_repository(source, asked, folder / "entry", token=token)
    remote = None
    if is_local(source):
        url = _remote_url(Path(source), settings, kinds)
        if url is not None and not (offline and not is_local(url)):
            say(f"cloning {url}")
            remote = _clone_remote(url, clone.commit, folder / "remote", _token(settings, url, kinds))
    else:
        remote = Remote(source, clone, answered=True)
    best = remote.clone if remote and remote.clone else clone
    head = _head_of(best, folder / "head")
    found, lost = [], []
    for number, other in enumerate(others):
        name = public_address(other)
        say(f"cloning {name}")
        try:
            found.append((name, clone_repository(other, None, folder / f"other-{number}")))
        except CloneFailed as error:
            lost.append((name, _first_line(error)))
    return CheckedEntry(
        source=source,
        asked=asked,
        clone=clone,
        head=head,
        head_commit=best.default_head,
        remote=remote,
        kinds=tuple(kinds),
        settings=settings,
        settings_problem=settings_problem,
        others=tuple(found),
        lost=tuple(lost),
        upstream=upstream,
        trusted=trust or _is_own_checkout(source),
        offline=offline,
        now=now,
    )


def is_whole_commit(text: str) -> bool:
    """Validators compare in lower case and take 40 hexadecimal digits only."""
    return _COMMIT.fullmatch(text.lower()) is not None


def public_address(url: str) -> str:
    """The address that validators clone: by https, without a user or a token in it."""
    found = _SSH.fullmatch(url)
    if found and "://" not in url.removeprefix("ssh://"):
        return f"https://{found['host']}/{found['path']}"
    if not url.startswith(("http://", "https://")):
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def site_answers(url: str) -> bool:
    """Return True if a host answers at all: git would wait for minutes. Nothing of the answer is read."""
    try:
        with httpx.stream("GET", url, timeout=ANSWER_LIMIT_S):
            return True
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _head_of(clone: Clone, place: Path) -> Path:
    if clone.commit == clone.default_head:
        return clone.directory
    git_output(
        clone.directory, "worktree", "add", "--quiet", "--detach", str(place.resolve()), clone.default_head
    )
    return place


def _remote_url(directory: Path, settings: Settings | None, kinds: Sequence[TournamentType]) -> str | None:
    """The checkout's own remote; else what the settings enter."""
    if found := remote_url(directory):
        url = public_address(found)
        # Relative to the checkout, if it is a path.
        return str((directory / url).resolve()) if is_local(url) else url
    entered = [settings.training_repo(kind) for kind in kinds] if settings else []
    return next((repo.url for repo in entered if repo), None)


def _token(settings: Settings | None, url: str, kinds: Sequence[TournamentType]) -> str | None:
    """The token that the settings have for this very repository."""
    for kind in kinds if settings else ():
        repo = settings.training_repo(kind) if settings else None
        if repo and repo.token and same_repository(repo.url, url):
            return repo.token.get_secret_value()
    return None


def same_repository(one: str, other: str) -> bool:
    def plain(url: str) -> str:
        return public_address(url).rstrip("/").removesuffix(".git").lower()

    return plain(one) == plain(other)


def _first_line(error: CloneFailed) -> str:
    """Without the way out, which the finding has itself."""
    return str(error).partition("\n")[0]


def _clone_remote(url: str, commit: str, place: Path, token: str | None) -> Remote:
    is_web = url.startswith(("http://", "https://"))
    if is_web and not site_answers(f"{url.rstrip('/')}/info/refs?service=git-upload-pack"):
        return Remote(url, None, f"{url} cannot be reached")
    try:
        return Remote(url, clone_repository(url, commit, place, token=token), answered=True)
    except CloneFailed as error:
        return Remote(url, None, _first_line(error), answered=True, too_slow=isinstance(error, CloneTooSlow))


# — the time limit of a check

#: Time limit. Our own checkout takes one minute on two busy cores.
CHECK_LIMIT_S = 600.0
#: Time to clean up. Then the signal comes again, in case the first exception was swallowed.
_AGAIN_S = 30.0


class CheckTooSlow(GodMinerError):
    """A repository that could not be cloned within the limit."""

    code = "check_too_slow"


class TimeIsUp(BaseException):
    """The limit is reached. It is a `BaseException`, so that no `except Exception` catches it on the way."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` in the main thread after so many seconds, by a signal, which ends loops, regular
    expressions and waits for other processes alike."""

    def on_alarm(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_within_limit(
    opened: Callable[[], CheckedEntry],
    run_checks: Callable[[CheckedEntry], Iterator[RuleFinding]],
    on_finding: Callable[[RuleFinding], None],
) -> CheckedEntry:
    """Open an entry and check it. The limit ends the check with a finding of its own."""
    entry, number = None, 1
    try:
        with time_limit(CHECK_LIMIT_S):
            entry = opened()
            for finding in run_checks(entry):
                on_finding(finding)
                number = finding.number + 1
    except TimeIsUp:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it may have come while the limit was removed
        if entry is None:
            raise CheckTooSlow(
                f"cloning was not done within {CHECK_LIMIT_S:g} s in all: look at the connection, or name "
                "fewer entries by --other"
            ) from None
        on_finding(_unfinished(number))
    assert entry is not None
    return entry


def _unfinished(number: int) -> RuleFinding:
    text = f"the check was ended after {CHECK_LIMIT_S:g} s, at this rule: it and those after it are not known"
    to_do = "take out files that are huge or generated; on a busy machine, check again"
    return RuleFinding(number, "time limit", FindingState.FAILED, text, to_do=to_do)
