"""A worker's task: fetch a base model into the shared cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from core.domain.job_states import EndReason, StepFailed
from miner.inputs import model_files
from miner.inputs.hub import HubClient, ModelListing
from miner.inputs.messages import ModelDone, ModelOrder
from miner.inputs.model_cache import CachedModel, ModelCache, file_sizes
from miner.inputs.model_files import HubFile, ModelFileSelection, checked_facts
from miner.inputs.part_files import DiskReserve, FetchRetries

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
            return model_files.select_image_model(listing.files, self._order.image_type)
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
