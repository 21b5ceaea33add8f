"""Read a few small answers from other sites: slowly, with limits, and from a cache.

One request at a time with a pause between them. An answer is at most so large, takes at most so long, and is
kept on disk with its age and ETag. If a site does not answer, an older answer is used and says so. The
operator's hub token goes to the hub's own host only: never to where the hub redirects, never into a log.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from core.domain.errors import GodMinerError
from core.domain.records import printable
from core.domain.units import show_bytes
from core.system.files import write_atomically
from miner.inputs.connection import AddressGuard, resolve_host

#: Between two requests.
PAUSE_S = 1.0
#: For a connect or a read, and for a whole answer.
READ_S, ANSWER_S = 15.0, 60.0
#: A site that asks for a longer wait than this is not asked again.
LONGEST_WAIT_S = 30.0
MAX_REDIRECTS = 3
#: An unused answer is removed after so long.
KEEP_S = 30 * 86_400.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_BUSY = frozenset({429, 503})


class SiteError(GodMinerError):
    """Another site that did not answer, or answered what cannot be used."""

    code = "site"

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class SiteAnswer:
    """A site's answer, from now or from `at`."""

    url: str
    body: bytes
    at: float
    etag: str | None = None
    #: Why this is an older answer: the site gave no new one.
    stale: str | None = None
    #: Size of the whole file, if the answer is a part of one and the site names it.
    whole: int | None = None

    def json(self) -> Any:
        """The answer as JSON; `SiteError` if it is not."""
        try:
            return json.loads(self.body, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise SiteError(f"{self.url} did not answer with JSON") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@dataclass
class PoliteClient:
    """Close it, or use it with `with`."""

    cache: Path
    #: The site that may have the token, and the token.
    hub: str | None = None
    token: str | None = field(default=None, repr=False)
    pause_s: float = PAUSE_S
    read_s: float = READ_S
    answer_s: float = ANSWER_S
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.time
    #: Called with what a long wait is for.
    on_wait: Callable[[str], None] = lambda _text: None
    #: Requests that were sent.
    requests: int = 0

    def __post_init__(self) -> None:
        self._http = httpx.Client(
            timeout=self.read_s, follow_redirects=False, headers={"User-Agent": "god-miner", "Accept": "*/*"}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, url: str, *, max_bytes: int, max_age_s: float = 0.0) -> SiteAnswer:
        """Return the whole answer, from the cache if that is at most `max_age_s` old.

        `SiteError` if there is none; its `status` is the site's, such as 404.
        """
        known = self._cached(url)
        if known is not None and 0 <= self.clock() - known.at < max_age_s:
            return known
        try:
            answer = self._ask(url, max_bytes, known.etag if known else None)
        except SiteError as error:
            if known is None or (
                error.status is not None and error.status not in _BUSY and error.status < 500
            ):
                raise
            return replace(known, stale=str(error))
        if answer is None:
            assert known is not None
            answer = replace(known, at=self.clock())
        self._keep(answer)
        return answer

    def get_part(self, url: str, begin: int, count: int) -> SiteAnswer:
        """Return at most `count` bytes from `begin` on, and the size of the whole. Not cached.

        No more than `count` bytes are read, whatever the site sends.
        """
        answer = self._ask(url, count, None, begin)
        assert answer is not None
        return answer

    # One request

    def _ask(self, url: str, max_bytes: int, etag: str | None, begin: int | None = None) -> SiteAnswer | None:
        """Return the new answer, or None if the cached one is current."""
        for last in (False, True):
            with self._following_redirects(url, etag, begin, max_bytes) as response:
                if response.status_code not in _BUSY:
                    return self._answer(url, response, max_bytes, begin)
                wait = _wait_asked(response.headers.get("retry-after"), self.clock())
            if last or wait > LONGEST_WAIT_S:
                break
            self.on_wait(f"{_host(url)} is busy and asks to wait {wait:.0f} s")
            self.sleep(wait)
        raise SiteError(
            f"{_host(url)} answers {response.status_code}: too many requests. Try again in {wait:.0f} s",
            response.status_code,
        )

    @contextlib.contextmanager
    def _following_redirects(
        self, url: str, etag: str | None, begin: int | None, count: int
    ) -> Iterator[httpx.Response]:
        here = url
        for _ in range(MAX_REDIRECTS + 1):
            headers = {"Accept-Encoding": "identity"}
            if etag:
                headers["If-None-Match"] = etag
            if begin is not None:
                headers["Range"] = f"bytes={begin}-{begin + count - 1}"
            if self.token and self.hub and _origin(here) == _origin(self.hub):
                headers["Authorization"] = f"Bearer {self.token}"
            if self.requests:
                self.sleep(self.pause_s)
            self.requests += 1
            with contextlib.ExitStack() as opened:
                try:
                    response = opened.enter_context(self._http.stream("GET", here, headers=headers))
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    reason = _why(error)
                    raise SiteError(f"{_host(here)} cannot be reached: {reason}") from None
                target = response.headers.get("location")
                if response.status_code not in _REDIRECTS or target is None:
                    yield response
                    return
            here = self._redirected(here, target)
        raise SiteError(f"{_host(url)} redirects more than {MAX_REDIRECTS} times")

    def _redirected(self, here: str, target: str) -> str:
        """The address to go on with; the hub alone may send us to another host, and never into a network
        that is not the internet."""
        before, after = urlsplit(here), _split(here, target)
        there = after.geturl()
        if after.scheme != before.scheme and after.scheme != "https":
            raise SiteError(f"{_host(here)} redirects from {before.scheme} to {printable(after.scheme[:20])}")
        if _origin(there) == _origin(here):
            return there
        if not (self.hub and _origin(here) == _origin(self.hub)):
            raise SiteError(f"{_host(here)} redirects to another host, {_host(there)}: not followed")
        if before.scheme == "https" and (why := _forbidden(after)):
            raise SiteError(f"{_host(here)} redirects to {_host(there)}, which is {why}: not followed")
        return there

    def _answer(
        self, url: str, response: httpx.Response, max_bytes: int, begin: int | None
    ) -> SiteAnswer | None:
        status = response.status_code
        if status == httpx.codes.NOT_MODIFIED:
            return None
        if status not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            raise SiteError(f"{_host(url)} answers {status} for {_path(url)}", status)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise SiteError(f"{_host(url)} answers compressed, which was not asked for")
        whole = _whole_size(response, begin, url)
        body = self._read(url, response, max_bytes, is_part=begin is not None)
        if begin and status == httpx.codes.OK:
            raise SiteError(f"{_host(url)} does not give parts of files")
        return SiteAnswer(url, body, self.clock(), response.headers.get("etag"), whole=whole)

    def _read(self, url: str, response: httpx.Response, max_bytes: int, *, is_part: bool) -> bytes:
        body, end = bytearray(), time.monotonic() + self.answer_s
        try:
            for piece in response.iter_raw(65_536):
                body += piece
                if len(body) > max_bytes and not is_part:
                    raise SiteError(
                        f"{_host(url)} answers more than {show_bytes(max_bytes)} for {_path(url)}"
                    )
                if len(body) >= max_bytes and is_part:
                    return bytes(body[:max_bytes])
                if time.monotonic() > end:
                    raise SiteError(f"{_host(url)} takes longer than {self.answer_s:.0f} s for {_path(url)}")
        except httpx.HTTPError as error:
            raise SiteError(f"{_host(url)} broke off its answer: {_why(error)}") from None
        return bytes(body)

    # The cache: one file per address, a line of JSON and then the body

    def _file(self, url: str) -> Path:
        return self.cache / f"{hashlib.sha256(url.encode()).hexdigest()[:40]}.answer"

    def _cached(self, url: str) -> SiteAnswer | None:
        try:
            head, _, body = self._file(url).read_bytes().partition(b"\n")
            about = json.loads(head)
            if about["url"] != url or about["bytes"] != len(body):
                return None
            return SiteAnswer(url, body, float(about["at"]), about["etag"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, answer: SiteAnswer) -> None:
        about = {"url": answer.url, "at": answer.at, "etag": answer.etag, "bytes": len(answer.body)}
        with contextlib.suppress(OSError):  # a full or read-only disk: the answer is there all the same
            self.cache.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(answer.url), json.dumps(about).encode() + b"\n" + answer.body)
            for file in self.cache.glob("*.answer"):
                if self.clock() - file.stat().st_mtime > KEEP_S:
                    file.unlink()


def _wait_asked(header: str | None, now: float) -> float:
    """The seconds that a Retry-After asks for, whether it is a number or a date."""
    text = (header or "").strip()
    if text.isdigit():
        return float(text[:9])
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    return 5.0


def _whole_size(response: httpx.Response, begin: int | None, url: str) -> int | None:
    """The size of the whole file; `SiteError` if the part that came is another one."""
    if response.status_code == httpx.codes.OK:
        length = response.headers.get("content-length", "")
        return int(length) if begin is not None and length.isdigit() else None
    unit, _, rest = response.headers.get("content-range", "").partition(" ")
    span, _, size = rest.partition("/")
    if begin is None or unit != "bytes" or span.partition("-")[0] != str(begin):
        raise SiteError(f"{_host(url)} sent another part of the file than was asked for")
    return int(size) if size.isdigit() else None


def _split(here: str, target: str) -> SplitResult:
    try:
        parts = urlsplit(urljoin(here, target))
        _ = parts.port
        if parts.scheme in ("http", "https") and parts.hostname and parts.username is None:
            return parts
    except ValueError:
        pass
    raise SiteError("a redirect leads to what is not an address of a site: not followed")


def _forbidden(parts: SplitResult) -> str | None:
    try:
        addresses = resolve_host(parts.hostname or "", parts.port or 443)
    except (OSError, UnicodeError):
        return None  # behind a proxy names may have no address here; without one the connection fails too
    refusals = (AddressGuard().refusal(address) for address in addresses)
    return next((why for why in refusals if why), None)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port


def _host(url: str) -> str:
    return printable(urlsplit(url).netloc[:100])


def _path(url: str) -> str:
    return printable(urlsplit(url).path[:200])


def _why(error: Exception) -> str:
    return printable(str(error).strip()[:200]) or type(error).__name__
