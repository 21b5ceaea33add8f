"""List and fetch models through the hub's own client. Imported by worker processes only: it takes 60 MB.

Copying to disk is ours: the client discards a partial file when interrupted, checks its length but no
hash, and sleeps as long as a server asks it to.
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

from core.domain.job_states import EndReason, StepFailed
from miner.inputs.model_files import HubFile
from miner.inputs.part_files import DiskReserve, FetchRetries, PartFile
from miner.support.retry_after import retry_after

#: Of twenty gigabytes a loss of 64 MB is half a second.
SYNC_EVERY = 64 * 1024**2
_COMMIT = re.compile(r"[A-Za-z0-9]{1,64}")


@dataclass(frozen=True)
class ModelListing:
    model: str
    commit: str
    files: tuple[HubFile, ...]


class HubClient:
    def __init__(self, endpoint: str, token: str | None, timeout: float = 30.0) -> None:
        """`timeout` is for one connect or one read."""
        self.endpoint = endpoint.rstrip("/")
        #: When set, every `fetch` under way ends soon and keeps its partial file.
        self.stop = threading.Event()
        self._timeout = timeout
        self._token: str | bool = token or False
        #: Whether the hub rejects our token; then requests go without one.
        self.token_refused = False

    def listing(self, model: str) -> ModelListing:
        """List the model's files at the newest commit."""
        with self._as_step_failures(model):
            info = self._api().model_info(model, files_metadata=True, timeout=self._timeout)
        files = [
            HubFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None, file.blob_id)
            for file in info.siblings or ()
        ]
        if not info.sha or not _COMMIT.fullmatch(info.sha):  # it becomes the name of a directory
            raise StepFailed(EndReason.NETWORK, f"{self.endpoint} names no commit of {model}")
        return ModelListing(model, info.sha, tuple(files))

    def fetch(
        self, listing: ModelListing, file: HubFile, target: Path, reserve: DiskReserve, retries: FetchRetries
    ) -> None:
        """Fetch one file and verify its hash; a partial file is resumed."""
        if target.exists():
            return
        with PartFile(target, reserve, SYNC_EVERY) as part:
            while True:
                before = part.size
                try:
                    self._try(listing, file, part)
                    return
                except StepFailed as failure:
                    if self.stop.is_set():
                        raise
                    retries.wait(failure, part.size - before)

    def _try(self, listing: ModelListing, file: HubFile, part: PartFile) -> None:
        url = hf_hub_url(listing.model, file.path, revision=listing.commit, endpoint=self.endpoint)
        with self._as_step_failures(listing.model, listed=True):
            metadata = get_hf_file_metadata(
                url, token=self._token, timeout=self._timeout, endpoint=self.endpoint
            )
            self._copy(metadata.location, part, metadata.etag)
        if part.size != file.size:
            raise StepFailed(
                EndReason.NETWORK, f"{file.path} broke off at {part.size:,} of {file.size:,} bytes"
            )
        if not _hash_matches(file, part):
            part.begin()  # start over
            raise StepFailed(
                EndReason.NETWORK, f"{file.path} arrived damaged: its hash is not the one that the hub names"
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
            # As they come: chunks of a given size would be collected first, and lost on a broken connection.
            for data in response.iter_raw():
                if self.stop.is_set():
                    raise StepFailed(EndReason.NETWORK, "another file could not be fetched")
                part.write(data)

    def _headers(self, location: str) -> dict[str, str]:
        """The token is for the hub alone; its store has signed URLs."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "god-miner"}
        if self._token and _origin(location) == _origin(self.endpoint):
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _api(self) -> HfApi:
        return HfApi(self.endpoint, token=self._token)

    @contextmanager
    def _as_step_failures(self, model: str, *, listed: bool = False) -> Iterator[None]:
        """Turn the client's exceptions into `StepFailed`, without their texts, which contain signed URLs.

        A model that the hub has just listed is not missing, whatever the hub says for a moment.
        """
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
            raise StepFailed(
                EndReason.NETWORK, f"the hub cannot be reached: {type(error).__name__}"
            ) from None

    def _missing(self, model: str) -> StepFailed:
        private = "" if self._token else ", or it is private and HF_TOKEN may not see it"
        return StepFailed(EndReason.MODEL_MISSING, f"{self.endpoint} has no model {model}{private}")

    def _answered(self, model: str, response: httpx2.Response) -> StepFailed:
        status = response.status_code
        text = f"the hub answers {status} to a request for {model}"
        if status == 401 and self._token:
            # Most models are public: an expired token must not keep us from them.
            self._token, self.token_refused = False, True
            return StepFailed(EndReason.NETWORK, "the hub does not know HF_TOKEN; trying without")
        if status in (401, 403):
            return StepFailed(EndReason.MODEL_GATED, f"{text}: {self._gate()}")
        if status == 429:
            return StepFailed(EndReason.RATE_LIMITED, text, requested_pause(response))
        # For a model that the hub does not have the client has an exception of its own.
        if status >= 500 or status in (404, 408, 425):
            return StepFailed(EndReason.NETWORK, text, requested_pause(response))
        return StepFailed(EndReason.MODEL_MISSING, text)

    def _store_answered(self, response: httpx2.Response, location: str) -> StepFailed:
        """A store's answer says nothing of the model: an expired signed URL is requested again."""
        status, pause = response.status_code, requested_pause(response)
        where = "the hub" if _origin(location) == _origin(self.endpoint) else "the hub's store"
        reason = EndReason.RATE_LIMITED if status == 429 else EndReason.NETWORK
        return StepFailed(reason, f"{where} answers {status} to a file that it lists", pause)

    def _gate(self) -> str:
        if self.token_refused:
            return "the hub does not know HF_TOKEN (any more); make a new one"
        if self._token:
            return "accept its terms on its page with the account of HF_TOKEN"
        return "set HF_TOKEN, of an account that accepted its terms"


def requested_pause(response: httpx2.Response) -> float | None:
    """Seconds to wait, from `RateLimit` (the hub's way) or `Retry-After`."""
    limit = re.search(r"\bt\s*=\s*(\d{1,6})", response.headers.get("ratelimit", ""))
    if response.status_code == 429 and limit:
        return float(limit[1])
    return retry_after(response.headers.get("retry-after"))


def _continues(response: httpx2.Response, size: int) -> bool:
    content_range = re.fullmatch(r"bytes (\d+)-\d+/\d+", response.headers.get("content-range", ""))
    return content_range is not None and int(content_range[1]) == size


def _hash_matches(file: HubFile, part: PartFile) -> bool:
    if file.sha256:
        return part.sha256.hexdigest() == file.sha256
    return file.blob_id is None or git_blob_hash(part.contents()) == file.blob_id


def git_blob_hash(data: bytes) -> str:
    """The hash by which git names a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
