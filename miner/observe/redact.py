"""Remove secrets from text: the known ones, in every spelling, and whatever looks like one."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

HIDDEN = "***"

#: A shorter piece of a base64 text would hide innocent words.
_MIN_PIECE_CHARS = 6

#: Secrets that come inside other things: tokens of a known shape, signed URLs, passwords in URLs.
_SECRET_PATTERNS = re.compile(
    r"""
      \b(?:hf_|gh[pousr]_|github_pat_)[A-Za-z0-9_]{16,}
    | (?<=X-Amz-Signature=)[^&\s"'<>]+
    | (?<=X-Amz-Credential=)[^&\s"'<>]+
    | (?<=X-Amz-Security-Token=)[^&\s"'<>]+
    | (?<=X-Goog-Signature=)[^&\s"'<>]+
    | (?<=[?&]Signature=)[^&\s"'<>]+
    | (?<=[?&]sig=)[^&\s"'<>]+
    | (?<=://)[^/\s:@"'<>]*:[^/\s@"'<>]+(?=@)
    | (?<=[Bb]earer\ )[A-Za-z0-9._~+/=-]{8,}
    """,
    re.VERBOSE,
)

#: Each pattern needs one of these. Searching for them first is a tenth of the work, and nearly every line of
#: a log has none.
_PATTERN_MARKS = (
    "hf_",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "X-Amz-",
    "Signature=",
    "sig=",
    "://",
    "earer ",
)


class Redactor:
    """Replace secrets by `***`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {spelling for secret in secrets if secret for spelling in _spellings(secret)}
        # Longest first: a short spelling inside a long one would leave the rest of it standing.
        self._spellings = sorted(known, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        # A plain search per spelling is several times faster than one big alternation.
        for spelling in self._spellings:
            if spelling in text:
                text = text.replace(spelling, HIDDEN)
        for mark in _PATTERN_MARKS:
            if mark in text:
                return _SECRET_PATTERNS.sub(HIDDEN, text)
        return text


def _spellings(secret: str) -> Iterator[str]:
    """The forms of a secret in a text: as it is, quoted for Python, JSON and URLs, and in base64."""
    yield secret
    yield repr(secret)[1:-1]
    yield repr(secret.encode())[2:-1]
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    for quoted in (quote(secret), quote(secret, safe=""), quote_plus(secret)):
        yield quoted
        yield re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), quoted)
    yield from _base64_pieces(secret.encode())


def _base64_pieces(secret: bytes) -> Iterator[str]:
    """The part of a secret in the base64 of a longer text (`user:secret`), for each of its three offsets."""
    for before in range(3):
        bits_before, bits = 8 * before, 8 * (before + len(secret))
        first, last = -(-bits_before // 6), bits // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            piece = encode(b"\0" * before + secret).decode()[first:last]
            if len(piece) >= _MIN_PIECE_CHARS:
                yield piece
