"""Download one file from a URL from outside: resumed where it stopped, complete or absent."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.domain.job_states import EndReason, StepFailed
from miner.inputs.connection import UrlOpener
from miner.inputs.part_files import DiskReserve, FetchRetries, PartFile
from miner.support.retry_after import retry_after

CHUNK = 256 * 1024
#: Called with the bytes so far, and in all if the server says.
DownloadProgress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Downloaded:
    bytes: int
    sha256: str
    etag: str | None


@dataclass(frozen=True)
class Download:
    """One file. `known` is the ETag of an existing copy: if it is still valid, nothing is fetched."""

    url: str
    path: Path
    max_bytes: int
    opener: UrlOpener
    reserve: DiskReserve
    #: For all tries together.
    seconds: float = 3600.0
    on_progress: DownloadProgress = lambda _done, _total: None
    known: str | None = None

    def run(self, retries: FetchRetries) -> Downloaded | None:
        """Fetch the file, or return None when the known copy is still valid; `StepFailed` otherwise."""
        until = time.monotonic() + self.seconds
        with PartFile(self.path, self.reserve) as part:
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
            raise StepFailed(EndReason.NETWORK, f"the dataset broke off: {_error_text(error)}") from None
        finally:
            response.close()
        if total is not None and part.size != total:
            raise StepFailed(EndReason.NETWORK, f"the dataset broke off at {part.size:,} of {total:,} bytes")
        downloaded = Downloaded(part.size, part.sha256.hexdigest(), part.about.get("etag"))
        part.finish()
        return downloaded

    def _headers(self, part: PartFile) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity", "User-Agent": "god-miner"}
        condition = part.about.get("etag") or part.about.get("modified")
        if part.size and condition:
            headers |= {"Range": f"bytes={part.size}-", "If-Range": condition}
        elif self.known:
            headers["If-None-Match"] = self.known
        return headers

    def _accept(self, response: http.client.HTTPResponse, part: PartFile) -> int | None:
        """Return the length of the whole file, with `part` where the response continues."""
        if response.status == 206 and (total := _continues(response, part)) is not None:
            self._check_size(total, part)
            return total
        if response.status in (206, 416):
            part.begin()  # another file than before, or a wrong range: fetch all of it next time
            raise StepFailed(EndReason.NETWORK, "the dataset cannot be resumed; it is fetched again")
        if response.status != 200:
            raise _failure(response)
        encoding = response.getheader("Content-Encoding", "identity")
        if encoding.lower() not in ("identity", ""):
            raise StepFailed(
                EndReason.BAD_DATA, f"the dataset is encoded as {encoding[:20]!r}, which was not requested"
            )
        part.begin(etag=_strong(response.getheader("ETag")), modified=response.getheader("Last-Modified"))
        total = response.length
        if total is not None:
            self._check_size(total, part)
        return total

    def _check_size(self, total: int, part: PartFile) -> None:
        if total > self.max_bytes:
            raise _too_large(total, self.max_bytes)
        self.reserve.require(self.path.parent, total - part.size)

    def _copy(
        self, response: http.client.HTTPResponse, part: PartFile, total: int | None, until: float
    ) -> None:
        while data := response.read1(CHUNK):
            if part.size + len(data) > self.max_bytes:
                raise _too_large(part.size + len(data), self.max_bytes)
            part.write(data)
            self.on_progress(part.size, total)
            if time.monotonic() > until:
                raise StepFailed(
                    EndReason.NETWORK, f"the dataset is too slow: {part.size:,} bytes in {self.seconds:g} s"
                )


def _continues(response: http.client.HTTPResponse, part: PartFile) -> int | None:
    """The whole length, if a partial response is the requested part."""
    unit, _, rest = response.getheader("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    first, _, last = span.partition("-")
    if unit != "bytes" or not (first.isdigit() and last.isdigit() and total.isdigit()):
        return None
    fits = int(first) == part.size and int(last) + 1 == int(total)
    return int(total) if fits and response.length in (None, int(last) + 1 - int(first)) else None


def _strong(etag: str | None) -> str | None:
    """A weak ETag means "equivalent", which is not enough to resume in the middle of a file."""
    return None if etag is None or etag.startswith("W/") else etag


def _failure(response: http.client.HTTPResponse) -> StepFailed:
    status = response.status
    text = f"the dataset's server answers {status} {response.reason[:60]}"
    if status == 429:
        return StepFailed(EndReason.RATE_LIMITED, text, retry_after(response.getheader("Retry-After")))
    if status in (408, 425) or status >= 500 or status < 400:
        return StepFailed(EndReason.NETWORK, text, retry_after(response.getheader("Retry-After")))
    return StepFailed(EndReason.DATA_GONE, f"{text}: its address is wrong or has expired")


def _too_large(size: int, most: int) -> StepFailed:
    return StepFailed(
        EndReason.BAD_DATA, f"the dataset has {size:,} bytes or more, over DATASET_MAX_BYTES={most:,}"
    )


def _error_text(error: Exception) -> str:
    return str(error).strip()[:200] or type(error).__name__
