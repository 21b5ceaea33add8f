"""The hub's own client, as far as models are fetched with it. Imported by workers only: it is large.

The client lists, signs in, finds out where a file lies, and sends the requests. Copying to disk is ours: the
client throws away what it has of a file when it is interrupted, checks its length but no hash, and sleeps as
long as a server asks it to.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from miner.jobs.inputs.model_files import Listed
from miner.jobs.inputs.parts import PartFile, Room
from miner.jobs.inputs.retries import Retries
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

#: Twenty gigabytes on the way: a lost 64 MB is half a second.
SYNC_EVERY = 64 * 1024**2
_COMMIT = re.compile(r"[A-Za-z0-9]{1,64}")


@dataclass(frozen=True)
class Listing:
    model: str
    commit: str
    files: tuple[Listed, ...]


class Hub:
    def __init__(self, endpoint: str, token: str | None, timeout: float = 30.0) -> None:
        """`timeout` is for one connect or one read."""
        self.endpoint = endpoint.rstrip("/")
        #: Set it, and every `fetch` under way ends soon, keeping what it has.
        self.stop = threading.Event()
        self._timeout = timeout
        self._token: str | bool = token or False
        #: Whether the hub does not know our token (any more); then we ask without.
        self.token_refused = False

    def listing(self, model: str) -> Listing:
        """Its files at the newest commit."""
        with self._told(model):
            info = self._api().model_info(model, files_metadata=True, timeout=self._timeout)
        files = [
            Listed(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else None, one.blob_id)
            for one in info.siblings or ()
        ]
        if not info.sha or not _COMMIT.fullmatch(info.sha):  # it becomes the name of a folder
            raise StepFailed(EndReason.NETWORK, f"{self.endpoint} names no commit of {model}")
        return Listing(model, info.sha, tuple(files))

    def fetch(self, listing: Listing, file: Listed, target: Path, room: Room, retries: Retries) -> None:
        """One file, whole and with the hash that was listed; resumed if some of it is there."""
        if target.exists():
            return
        with PartFile(target, room, SYNC_EVERY) as part:
            while True:
                before = part.size
                try:
                    self._try(listing, file, part)
                    return
                except StepFailed as failure:
                    if self.stop.is_set():
                        raise
                    retries.wait(failure, part.size - before)

    def _try(self, listing: Listing, file: Listed, part: PartFile) -> None:
        url = hf_hub_url(listing.model, file.path, revision=listing.commit, endpoint=self.endpoint)
        with self._told(listing.model, listed=True):
            found = get_hf_file_metadata(
                url, token=self._token, timeout=self._timeout, endpoint=self.endpoint
            )
            self._copy(found.location, part, found.etag)
        if part.size != file.size:
            raise StepFailed(
                EndReason.NETWORK, f"{file.path} broke off at {part.size:,} of {file.size:,} bytes"
            )
        if not _is_right(file, part):
            part.begin()  # nothing of it can be trusted
            raise StepFailed(
                EndReason.NETWORK, f"{file.path} arrived damaged: another hash than the hub names"
            )
        part.finish()

    def _copy(self, location: str, part: PartFile, etag: str | None) -> None:
        headers = self._headers(location)
        if part.size and part.about != {"etag": etag}:
            part.begin(etag=etag)
        if part.size:
            headers["Range"] = f"bytes={part.size}-"
        with get_session().stream("GET", location, headers=headers, timeout=self._timeout) as response:
            if response.status_code == 416:  # complete already, or longer than the file
                return
            if response.is_error:
                raise self._store_answered(response, location)
            if response.status_code != 206 or not _continues(response, part.size):
                part.begin(etag=etag)
            # As they come: pieces of a given size would be collected first, and lost when it breaks off.
            for data in response.iter_raw():
                if self.stop.is_set():
                    raise StepFailed(EndReason.NETWORK, "the fetching of another file failed")
                part.write(data)

    def _headers(self, location: str) -> dict[str, str]:
        """The token is for the hub alone; the store that it sends us to has signed addresses."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "god-miner"}
        if self._token and _origin(location) == _origin(self.endpoint):
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _api(self) -> HfApi:
        return HfApi(self.endpoint, token=self._token)

    @contextmanager
    def _told(self, model: str, *, listed: bool = False) -> Iterator[None]:
        """The client's exceptions as ends of ours. Its texts stay out: they hold signed addresses. A model
        that the hub has just listed is not missing, whatever it says for a moment."""
        try:
            yield
        except GatedRepoError:
            raise StepFailed(EndReason.MODEL_GATED, f"{model} is gated: {self._gate()}") from None
        except DisabledRepoError:
            raise StepFailed(EndReason.MODEL_MISSING, f"{model} is disabled by the hub") from None
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
            if listed:
                raise StepFailed(EndReason.NETWORK, f"the hub has lost {model}, which it listed") from None
            raise self._missing(model) from None
        except EntryNotFoundError:
            raise StepFailed(EndReason.NETWORK, f"{model} changed while it was fetched") from None
        except HfHubHTTPError as error:
            raise self._answered(model, error.response) from None
        except (httpx2.TransportError, ConnectionError, TimeoutError) as error:
            raise StepFailed(EndReason.NETWORK, f"the hub can't be reached: {type(error).__name__}") from None

    def _missing(self, model: str) -> StepFailed:
        doubt = "" if self._token else ", or it is private and HF_TOKEN may not see it"
        return StepFailed(EndReason.MODEL_MISSING, f"{self.endpoint} has no model {model}{doubt}")

    def _answered(self, model: str, response: httpx2.Response) -> StepFailed:
        status = response.status_code
        text = f"the hub answers {status} to what is asked of {model}"
        if status == 401 and self._token:
            # Most models are for everybody: a token that ran out must not keep us from them.
            self._token, self.token_refused = False, True
            return StepFailed(EndReason.NETWORK, "the hub does not know HF_TOKEN; asked again without")
        if status in (401, 403):
            return StepFailed(EndReason.MODEL_GATED, f"{text}: {self._gate()}")
        if status == 429:
            return StepFailed(EndReason.RATE_LIMITED, text, asked_pause(response))
        # A hub that has no such model says so with a code of its own, for which the client has an exception.
        if status >= 500 or status in (404, 408, 425):
            return StepFailed(EndReason.NETWORK, text, asked_pause(response))
        return StepFailed(EndReason.MODEL_MISSING, text)

    def _store_answered(self, response: httpx2.Response, location: str) -> StepFailed:
        """What a store says is not of the model: a signed address that has run out is asked for anew."""
        status, pause = response.status_code, asked_pause(response)
        where = "the hub" if _origin(location) == _origin(self.endpoint) else "the hub's store"
        reason = EndReason.RATE_LIMITED if status == 429 else EndReason.NETWORK
        return StepFailed(reason, f"{where} answers {status} to a file that it lists", pause)

    def _gate(self) -> str:
        if self.token_refused:
            return "the hub does not know HF_TOKEN (any more); make a new one"
        if self._token:
            return "accept its terms on its page with the account of HF_TOKEN"
        return "set HF_TOKEN, of an account that accepted its terms"


def asked_pause(response: httpx2.Response) -> float | None:
    """Seconds to wait, from `RateLimit` (the hub's way) or `Retry-After`."""
    limit = re.search(r"\bt\s*=\s*(\d{1,6})", response.headers.get("ratelimit", ""))
    if response.status_code == 429 and limit:
        return float(limit[1])
    value = response.headers.get("retry-after", "").strip()
    return float(value[:6]) if value.isdigit() else None


def _continues(response: httpx2.Response, size: int) -> bool:
    found = re.fullmatch(r"bytes (\d+)-\d+/\d+", response.headers.get("content-range", ""))
    return found is not None and int(found[1]) == size


def _is_right(file: Listed, part: PartFile) -> bool:
    if file.sha256:
        return part.sha256.hexdigest() == file.sha256
    return file.blob_id is None or git_name(part.contents()) == file.blob_id


def git_name(data: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
