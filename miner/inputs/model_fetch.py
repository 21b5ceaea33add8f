"""A worker's task: fetch a base model from the hub into the shared cache.

Imported by worker processes only: the hub's client takes 60 MB. Copying to disk is ours: the client discards
a partial file when interrupted, checks its length but no hash, and sleeps as long as a server asks it to.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
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
from miner.inputs import model_files
from miner.inputs.messages import ModelDone, ModelOrder
from miner.inputs.model_cache import CachedModel, ModelCache, file_sizes
from miner.inputs.model_files import HubFile, ModelFileSelection, checked_facts
from miner.inputs.part_files import DiskReserve, FetchRetries, PartFile
from miner.support.rate_limits import retry_after

#: Files fetched at once: one connection seldom gets more than 100 MB/s from the hub's store.
AT_ONCE = 8
#: After these the cache's copy is used.
_CACHE_FALLBACK_REASONS = (EndReason.NETWORK, EndReason.RATE_LIMITED, EndReason.MODEL_MISSING)
_PROGRESS_SECONDS = 0.3
ModelProgress = Callable[[int, int | None], None]
ModelNote = Callable[[str], None]


def fetch_model(order: ModelOrder, on_progress: ModelProgress, on_note: ModelNote) -> ModelDone:
    """`StepFailed` with NETWORK, RATE_LIMITED, DISK_FULL, MODEL_MISSING, MODEL_GATED or BAD_MODEL."""
    if order.own is not None:
        return ModelDone(path=order.own, facts=checked_facts(order.own, order.model, order.image_type))
    cache = ModelCache(order.cache, order.quota, order.keep_free)
    waiting = _WaitingForFetch(cache, order.model, on_progress, on_note)
    with cache.fetching(order.model, waiting):
        snapshot = _ModelFetch(order, cache, on_progress, on_note).snapshot()
    single = snapshot.about.get("single")
    path = snapshot.path / single if single else snapshot.path
    return ModelDone(path=path, facts=checked_facts(path, order.model, order.image_type))


class _ModelFetch:
    def __init__(
        self, order: ModelOrder, cache: ModelCache, on_progress: ModelProgress, on_note: ModelNote
    ) -> None:
        self._order = order
        self._cache = cache
        self._on_progress = on_progress
        self._on_note = on_note
        self._hub = HubClient(order.endpoint, order.token, order.patience.timeout)
        self._reserve = DiskReserve(order.keep_free)

    def snapshot(self) -> CachedModel:
        model = self._order.model
        try:
            listing = self._listing()
        except StepFailed as failure:
            old = self._cache.find(model) if failure.reason in _CACHE_FALLBACK_REASONS else None
            if old is None:
                raise
            self._on_note(f"{failure}; the cache's copy of {model} is used")
            return old
        return self._cache.find(model, listing.commit) or self._fetched(listing)

    def _listing(self) -> ModelListing:
        retries = self._retries()
        while True:
            try:
                return self._hub.listing(self._order.model)
            except StepFailed as failure:
                retries.wait(failure)

    def _fetched(self, listing: ModelListing) -> CachedModel:
        folder = self._cache.partial(listing.model, listing.commit)
        selection = self._selection(listing, folder)
        self._cache.claim(listing.model, selection.bytes)
        with _reporting_progress(folder, selection.bytes, self._on_progress):
            self._fetch_all(listing, selection, folder)
        present = file_sizes(folder).keys()
        for name in present - selection.paths:
            (folder / name).unlink()  # of an earlier try with another selection
        if lost := sorted(selection.paths - present):
            raise StepFailed(
                EndReason.LOST,
                f"{', '.join(lost)}: fetched, and removed from {folder} before the model was complete",
            )
        path = folder / selection.single if selection.single else folder
        checked_facts(path, listing.model, self._order.image_type)
        return self._cache.commit(listing.model, listing.commit, {"single": selection.single})

    def _selection(self, listing: ModelListing, folder: Path) -> ModelFileSelection:
        if self._order.image_type is not None:
            return model_files.select_image_model(listing.files)
        index = next((file for file in listing.files if file.path == model_files.INDEX), None)
        if index is None:
            return model_files.select_text_model(listing.files, None)
        if index.size > model_files.MAX_SMALL:
            raise StepFailed(EndReason.BAD_MODEL, f"{model_files.INDEX} is too large")
        self._fetch(listing, index, folder)
        return model_files.select_text_model(listing.files, (folder / index.path).read_bytes())

    def _fetch_all(self, listing: ModelListing, selection: ModelFileSelection, folder: Path) -> None:
        """Small files first: they show what is wrong with a repository."""
        files = sorted(selection.files, key=lambda file: (file.path.endswith(".safetensors"), -file.size))
        with ThreadPoolExecutor(AT_ONCE, "fetch") as pool:
            jobs: list[Future[None]] = [pool.submit(self._fetch, listing, file, folder) for file in files]
            done, others = wait(jobs, return_when=FIRST_EXCEPTION)
            if others:
                self._hub.stop.set()  # partial files are kept
                pool.shutdown(cancel_futures=True)
        for job in done:
            job.result()

    def _fetch(self, listing: ModelListing, file: HubFile, folder: Path) -> None:
        self._hub.fetch(listing, file, folder / file.path, self._reserve, self._retries())

    def _retries(self) -> FetchRetries:
        limits = self._order.patience
        return FetchRetries(limits.tries, limits.first_pause, pause=self._hub.stop.wait)


class _WaitingForFetch:
    """Another worker fetches the same model: note that once, and report its progress."""

    def __init__(self, cache: ModelCache, model: str, on_progress: ModelProgress, on_note: ModelNote) -> None:
        self._cache, self._model, self._on_progress, self._on_note = cache, model, on_progress, on_note
        self._reported = False

    def __call__(self) -> None:
        if not self._reported:
            self._reported = True
            self._on_note(f"{self._model} is being fetched for another job")
        self._on_progress(
            sum(cached.bytes for cached in self._cache.unfinished() if cached.model == self._model), None
        )


@contextmanager
def _reporting_progress(folder: Path, total: int, on_progress: ModelProgress) -> Iterator[None]:
    """Report how many bytes there are, by the files themselves."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_PROGRESS_SECONDS):
            on_progress(min(sum(file_sizes(folder).values()), total), total)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    on_progress(total, total)


#: Losing 64 MB of twenty gigabytes costs half a second.
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
        #: Once set, every `fetch` under way ends soon and keeps its partial file.
        self.stop = threading.Event()
        self._timeout = timeout
        self._token: str | bool = token or False
        #: True if the hub rejects our token; requests then go without it.
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
        """Treat a store's error as transient: an expired signed URL is requested again."""
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
