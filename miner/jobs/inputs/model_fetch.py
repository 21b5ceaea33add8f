"""A worker's second task: a base model in the shared cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from miner.jobs.inputs import model_files
from miner.jobs.inputs.cache import ModelCache, Snapshot, sizes
from miner.jobs.inputs.hub import Hub, Listing
from miner.jobs.inputs.model_check import checked_facts
from miner.jobs.inputs.model_files import Listed, Selection
from miner.jobs.inputs.parts import Room
from miner.jobs.inputs.retries import Retries
from miner.jobs.inputs.words import ModelDone, ModelOrder
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

#: Files fetched at once: one connection seldom gets more than 100 MB/s out of the hub's store.
AT_ONCE = 8
#: Without these we still have what the cache has.
_HUB_IS_OF_NO_HELP = (EndReason.NETWORK, EndReason.RATE_LIMITED, EndReason.MODEL_MISSING)
_TELL_SECONDS = 0.3
Tell = Callable[[int, int | None], None]
Note = Callable[[str], None]


def fetch_model(order: ModelOrder, tell: Tell, note: Note) -> ModelDone:
    """`StepFailed` with NETWORK, RATE_LIMITED, DISK_FULL, MODEL_MISSING, MODEL_GATED or BAD_MODEL."""
    if order.own is not None:
        return ModelDone(path=order.own, facts=checked_facts(order.own, order.model, order.image_type))
    cache = ModelCache(order.cache, order.quota, order.keep_free)
    waiting = _Waiting(cache, order.model, tell, note)
    with cache.fetching(order.model, waiting):
        snapshot = _ModelFetch(order, cache, tell, note).snapshot()
    single = snapshot.about.get("single")
    path = snapshot.path / single if single else snapshot.path
    return ModelDone(path=path, facts=checked_facts(path, order.model, order.image_type))


class _ModelFetch:
    def __init__(self, order: ModelOrder, cache: ModelCache, tell: Tell, note: Note) -> None:
        self._order = order
        self._cache = cache
        self._tell = tell
        self._note = note
        self._hub = Hub(order.endpoint, order.token, order.patience.timeout)
        self._room = Room(order.keep_free)

    def snapshot(self) -> Snapshot:
        model = self._order.model
        try:
            listing = self._listing()
        except StepFailed as failure:
            old = self._cache.find(model) if failure.reason in _HUB_IS_OF_NO_HELP else None
            if old is None:
                raise
            self._note(f"{failure}; the cache's copy of {model} is used")
            return old
        return self._cache.find(model, listing.commit) or self._fetched(listing)

    def _listing(self) -> Listing:
        retries = self._retries()
        while True:
            try:
                return self._hub.listing(self._order.model)
            except StepFailed as failure:
                retries.wait(failure)

    def _fetched(self, listing: Listing) -> Snapshot:
        folder = self._cache.partial(listing.model, listing.commit)
        selection = self._selection(listing, folder)
        self._cache.claim(listing.model, selection.bytes)
        with _telling(folder, selection.bytes, self._tell):
            self._fetch_all(listing, selection, folder)
        there = sizes(folder).keys()
        for name in there - selection.paths:
            (folder / name).unlink()  # of an earlier try that wanted something else
        if lost := sorted(selection.paths - there):
            raise StepFailed(
                EndReason.LOST, f"{', '.join(lost)}: fetched, and gone from {folder} before all was there"
            )
        path = folder / selection.single if selection.single else folder
        checked_facts(path, listing.model, self._order.image_type)
        return self._cache.commit(listing.model, listing.commit, {"single": selection.single})

    def _selection(self, listing: Listing, folder: Path) -> Selection:
        if self._order.image_type is not None:
            return model_files.image_model(listing.files, self._order.image_type)
        index = next((file for file in listing.files if file.path == model_files.INDEX), None)
        if index is None:
            return model_files.text_model(listing.files, None)
        if index.size > model_files.MAX_SMALL:
            raise StepFailed(EndReason.BAD_MODEL, f"{model_files.INDEX} is too large to be one")
        self._fetch(listing, index, folder)
        return model_files.text_model(listing.files, (folder / index.path).read_bytes())

    def _fetch_all(self, listing: Listing, selection: Selection, folder: Path) -> None:
        """Small ones first: what is wrong with a repository shows in them."""
        files = sorted(selection.files, key=lambda file: (file.path.endswith(".safetensors"), -file.size))
        with ThreadPoolExecutor(AT_ONCE, "fetch") as pool:
            jobs: list[Future[None]] = [pool.submit(self._fetch, listing, file, folder) for file in files]
            done, others = wait(jobs, return_when=FIRST_EXCEPTION)
            if others:
                self._hub.stop.set()  # they keep what they have
                pool.shutdown(cancel_futures=True)
        for job in done:
            job.result()

    def _fetch(self, listing: Listing, file: Listed, folder: Path) -> None:
        self._hub.fetch(listing, file, folder / file.path, self._room, self._retries())

    def _retries(self) -> Retries:
        patience = self._order.patience
        return Retries(patience.tries, patience.first_pause, pause=self._hub.stop.wait)


class _Waiting:
    """Another worker fetches the same model: say so once, and how far it is."""

    def __init__(self, cache: ModelCache, model: str, tell: Tell, note: Note) -> None:
        self._cache, self._model, self._tell, self._note = cache, model, tell, note
        self._said = False

    def __call__(self) -> None:
        if not self._said:
            self._said = True
            self._note(f"{self._model} is being fetched for another job")
        self._tell(sum(one.bytes for one in self._cache.unfinished() if one.model == self._model), None)


@contextmanager
def _telling(folder: Path, total: int, tell: Tell) -> Iterator[None]:
    """Tell how much is there, from the files themselves."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_TELL_SECONDS):
            tell(min(sum(sizes(folder).values()), total), total)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    tell(total, total)
