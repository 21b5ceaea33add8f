"""A file by a URL from outside, onto disk: resumed where it stopped, whole or not there at all."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from miner.jobs.inputs.connection import Opener
from miner.jobs.inputs.parts import PartFile, Room
from miner.jobs.inputs.retries import Retries
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

CHUNK = 256 * 1024
#: Bytes so far, and in all if the other side said.
Tell = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Downloaded:
    bytes: int
    sha256: str
    etag: str | None


@dataclass(frozen=True)
class Download:
    """One file. `known` is the ETag of a copy that is there: if it still holds, nothing is fetched."""

    url: str
    path: Path
    max_bytes: int
    opener: Opener
    room: Room
    #: For all tries together.
    seconds: float = 3600.0
    tell: Tell = lambda _did, _of: None
    known: str | None = None

    def run(self, retries: Retries) -> Downloaded | None:
        """None when the known copy is still what the URL leads to. `StepFailed` when it can not be had."""
        until = time.monotonic() + self.seconds
        with PartFile(self.path, self.room) as part:
            while True:
                before = part.size
                try:
                    return self._try(part, until)
                except StepFailed as failure:
                    if time.monotonic() > until:
                        raise
                    retries.wait(failure, part.size - before)

    def _try(self, part: PartFile, until: float) -> Downloaded | None:
        response = self.opener.open(self.url, self._headers(part))
        try:
            if response.status == 304 and self.known:
                return None
            total = self._accept(response, part)
            self._copy(response, part, total, until)
        except (OSError, http.client.HTTPException) as error:
            raise StepFailed(EndReason.NETWORK, f"the dataset broke off: {_said(error)}") from None
        finally:
            response.close()
        if total is not None and part.size != total:
            raise StepFailed(EndReason.NETWORK, f"the dataset broke off at {part.size:,} of {total:,} bytes")
        found = Downloaded(part.size, part.sha256.hexdigest(), part.about.get("etag"))
        part.finish()
        return found

    def _headers(self, part: PartFile) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity", "User-Agent": "god-miner"}
        condition = part.about.get("etag") or part.about.get("modified")
        if part.size and condition:
            headers |= {"Range": f"bytes={part.size}-", "If-Range": condition}
        elif self.known:
            headers["If-None-Match"] = self.known
        return headers

    def _accept(self, response: http.client.HTTPResponse, part: PartFile) -> int | None:
        """The length of the whole file, with `part` at the place that the reply goes on from."""
        if response.status == 206 and (total := _continues(response, part)) is not None:
            self._check_size(total, part)
            return total
        if response.status in (206, 416):
            part.begin()  # another file than before, or a server that miscounts: all of it, next time
            raise StepFailed(EndReason.NETWORK, "the dataset can't be resumed; it is fetched anew")
        if response.status != 200:
            raise _failure(response)
        encoding = response.getheader("Content-Encoding", "identity")
        if encoding.lower() not in ("identity", ""):
            raise StepFailed(EndReason.BAD_DATA, f"the dataset comes packed as {encoding[:20]!r}, unasked")
        part.begin(etag=_strong(response.getheader("ETag")), modified=response.getheader("Last-Modified"))
        total = response.length
        if total is not None:
            self._check_size(total, part)
        return total

    def _check_size(self, total: int, part: PartFile) -> None:
        if total > self.max_bytes:
            raise _too_large(total, self.max_bytes)
        self.room.check(self.path.parent, total - part.size)

    def _copy(
        self, response: http.client.HTTPResponse, part: PartFile, total: int | None, until: float
    ) -> None:
        while data := response.read1(CHUNK):
            if part.size + len(data) > self.max_bytes:
                raise _too_large(part.size + len(data), self.max_bytes)
            part.write(data)
            self.tell(part.size, total)
            if time.monotonic() > until:
                raise StepFailed(
                    EndReason.NETWORK, f"the dataset is too slow: {part.size:,} bytes in {self.seconds:g} s"
                )


def _continues(response: http.client.HTTPResponse, part: PartFile) -> int | None:
    """The whole length, if a partial reply is the part that was asked for."""
    unit, _, rest = response.getheader("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    first, _, last = span.partition("-")
    if unit != "bytes" or not (first.isdigit() and last.isdigit() and total.isdigit()):
        return None
    fits = int(first) == part.size and int(last) + 1 == int(total)
    return int(total) if fits and response.length in (None, int(last) + 1 - int(first)) else None


def _strong(etag: str | None) -> str | None:
    """A weak one says "much the same", which is not enough to go on in the middle of a file."""
    return None if etag is None or etag.startswith("W/") else etag


def _failure(response: http.client.HTTPResponse) -> StepFailed:
    status = response.status
    text = f"the dataset's server answers {status} {response.reason[:60]}"
    if status == 429:
        return StepFailed(EndReason.RATE_LIMITED, text, retry_after(response))
    if status in (408, 425) or status >= 500 or status < 400:
        return StepFailed(EndReason.NETWORK, text, retry_after(response))
    return StepFailed(EndReason.DATA_GONE, f"{text}: its address is wrong, or has run out")


def retry_after(response: http.client.HTTPResponse) -> float | None:
    """Seconds that the other side asks for, given as such or as a date."""
    value = (response.getheader("Retry-After") or "").strip()
    if value.isdigit():
        return float(value[:6])
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None


def _too_large(size: int, most: int) -> StepFailed:
    return StepFailed(
        EndReason.BAD_DATA, f"the dataset has {size:,} bytes or more, over DATASET_MAX_BYTES={most:,}"
    )


def _said(error: Exception) -> str:
    return str(error).strip()[:200] or type(error).__name__
