"""Rule 2: licence and notice of the default branch, compared as validators compare them with their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from core.domain.errors import GodMinerError
from core.domain.tournament_rules import (
    LICENSE_DIGEST,
    LICENSE_NAMES,
    LICENSE_READ,
    NOTICE_DIGEST,
    NOTICE_NAMES,
    UPSTREAM,
)
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding
from miner.tournament.checkout import read_inside
from miner.tournament.polite_client import PoliteClient, SiteError

#: The order in which validators look for their own.
UPSTREAM_LICENSE_NAMES = ("LICENSE.md", "LICENSE")
FETCH_LIMIT_S = 5.0
#: A licence has some ten kilobytes.
MOST_FETCHED = 1_000_000
_BOM = b"\xef\xbb\xbf"
_FIX = (
    "copy LICENSE.md and NOTICE byte for byte from a checkout of "
    f"{UPSTREAM}, or let `god-miner tournament prepare DIR --upstream CHECKOUT` do it"
)


class NoUpstream(GodMinerError):
    """A checkout named as upstream's that has not what an entry is compared with."""

    code = "no_upstream"


@dataclass(frozen=True)
class UpstreamFiles:
    """Digests of the normalized texts that an entry's licence and notice must equal."""

    license: str
    notice: str
    #: Where they were read.
    origin: str
    #: Whether these are upstream's present files and not the stored digests.
    present: bool


def normalized(content: bytes) -> str:
    """Normalize a licence as validators do; `UnicodeDecodeError` is a failure there too."""
    return "\n".join(line.rstrip() for line in content.decode("utf-8").splitlines())


def digest_of(content: bytes) -> str:
    return hashlib.sha256(normalized(content).encode()).hexdigest()


def first_file(directory: Path, names: Sequence[str]) -> Path | None:
    """The first of these names that exists; a directory counts, and then cannot be read."""
    return next((directory / name for name in names if (directory / name).exists()), None)


def upstream_files(checkout: Path) -> tuple[Path, Path]:
    """Licence and notice of a checkout of upstream that the operator names."""
    license_file = first_file(checkout, UPSTREAM_LICENSE_NAMES)
    notice_file = first_file(checkout, NOTICE_NAMES)
    if license_file is None or notice_file is None:
        missing = " and ".join(
            name for name, file in (("LICENSE.md", license_file), ("NOTICE", notice_file)) if file is None
        )
        raise NoUpstream(f"{checkout} has no {missing}: name a checkout of {UPSTREAM}")
    return license_file, notice_file


def read_upstream(entry: CheckedEntry, *, raw: str | None = None) -> UpstreamFiles:
    """From the checkout that the operator names, else from the network, else as stored."""
    if entry.upstream is not None:
        license_file, notice_file = upstream_files(entry.upstream)
        return UpstreamFiles(
            digest_of(license_file.read_bytes()),
            digest_of(notice_file.read_bytes()),
            str(entry.upstream),
            present=True,
        )
    stored = UpstreamFiles(LICENSE_DIGEST, NOTICE_DIGEST, f"their files of {LICENSE_READ}", present=False)
    if entry.offline:
        return stored
    base = raw or UPSTREAM.replace("github.com", "raw.githubusercontent.com") + "/HEAD"
    cache = entry.tree.parent / "upstream"
    try:
        with PoliteClient(cache, pause_s=0.0, read_s=FETCH_LIMIT_S, answer_s=FETCH_LIMIT_S) as client:
            license_text = _fetched(client, base, UPSTREAM_LICENSE_NAMES)
            notice_text = _fetched(client, base, NOTICE_NAMES)
        digests = digest_of(license_text), digest_of(notice_text)
    except (SiteError, UnicodeDecodeError):
        return stored
    return UpstreamFiles(*digests, "their files of now", present=True)


def check_licence(entry: CheckedEntry) -> RuleFinding:
    expected = read_upstream(entry)
    problems = [
        *_problems(entry.head, "licence", LICENSE_NAMES, expected.license),
        *_problems(entry.head, "notice", NOTICE_NAMES, expected.notice),
    ]
    branch = entry.branch
    if problems:
        return RuleFinding(
            2,
            "licence and notice",
            FindingState.FAILED,
            f"{branch}, against {expected.origin}: {problems[0]}",
            tuple(problems[1:]),
            _FIX,
        )
    notes = () if expected.present else ("validators compare with their present files",)
    to_do = "" if expected.present else f"compare with a checkout of today: --upstream CHECKOUT of {UPSTREAM}"
    text = f"{branch} has both, equal to {expected.origin}"
    return RuleFinding(2, "licence and notice", FindingState.PASSED, text, notes, to_do)


def _problems(directory: Path, word: str, names: Sequence[str], expected: str) -> list[str]:
    file = first_file(directory, names)
    if file is None:
        return [f"there is no {word}: none of {', '.join(names)}"]
    try:
        content = read_inside(directory, file)
    except OSError as error:
        return [f"{file.name} cannot be read: {error.strerror}"]
    try:
        if digest_of(content) == expected:
            return []
    except UnicodeDecodeError:
        return [f"{file.name} is not UTF-8"]
    return [f"{file.name} differs{_why(content, expected)}"]


def _why(content: bytes, expected: str) -> str:
    """Name the known differences that break an equal text; line ends and trailing blanks do not count."""
    if digest_of(content.removeprefix(_BOM)) == expected:
        return ": it begins with a byte order mark"
    if digest_of(content.removeprefix(_BOM).rstrip()) == expected:
        return ": it has empty lines at the end"
    if digest_of(content.lstrip()) == expected:
        return ": it has empty lines at the beginning"
    return " (validators take the first of the names that exists, not the best)"


def _fetched(client: PoliteClient, base: str, names: Sequence[str]) -> bytes:
    for name in names:
        try:
            return client.get(f"{base}/{name}", max_bytes=MOST_FETCHED).body
        except SiteError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
    raise SiteError(f"none of {', '.join(names)} is below {base}")
