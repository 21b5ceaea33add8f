"""A worker's first task: a job's dataset on disk, checked and looked at.

In the job's folder lie `data.json` (or `data.csv`, `data.zip`), `data.record` with what was found, and for
texts `data.sample`. A second run with the same address does nothing; with another one it asks whether the
file is still the same (a validator's second start signs it anew) and fetches it only if it is not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from core.archives import BadArchive
from core.csv_rows import CsvRows
from core.data import DatasetFacts
from core.data_facts import image_facts
from core.data_profile import Profile, facts_of, profile_rows
from core.facts import Record
from core.files import write_atomically
from core.json_rows import BadRows, JsonRows
from core.picture_zips import look_into
from core.tasks import FileFormat
from miner.jobs.inputs.addresses import Guard
from miner.jobs.inputs.connection import Opener
from miner.jobs.inputs.download import Download, Downloaded
from miner.jobs.inputs.parts import Room, no_room_is_told
from miner.jobs.inputs.retries import Retries
from miner.jobs.inputs.words import DatasetDone, DatasetOrder
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

#: (what, bytes so far, bytes in all if known)
Tell = Callable[[str, int, int | None], None]
Note = Callable[[str], None]
Row = dict[str, Any]
RECORD, SAMPLE = "data.record", "data.sample"


class Found(Record):
    """What is known of the file that lies there."""

    #: Of what the task asks of the rows.
    task: str
    #: Of the address: a signed URL is a key, and is not kept in the open.
    source: str
    name: str
    bytes: int
    sha256: str
    etag: str | None = None
    facts: DatasetFacts
    profile: Profile | None = None
    notes: tuple[str, ...] = ()


def fetch_dataset(order: DatasetOrder, tell: Tell, note: Note) -> DatasetDone:
    """`StepFailed` with NETWORK, RATE_LIMITED, DISK_FULL, DATA_GONE, URL_REFUSED or BAD_DATA."""
    return _DatasetFetch(order, tell, note).run()


class _DatasetFetch:
    def __init__(self, order: DatasetOrder, tell: Tell, note: Note) -> None:
        self._order = order
        self._tell = tell
        self._note = note
        self._path = order.folder / _name(order)
        self._room = Room(order.keep_free)

    def run(self) -> DatasetDone:
        self._order.folder.mkdir(parents=True, exist_ok=True)
        before = self._before()
        source = self._source(before)
        if before is not None and before.source == source:
            found = before
        else:
            found = (self._fetched(before) or before or self._gone()).model_copy(update={"source": source})
            self._remember(found)
        for text in found.notes:
            self._note(text)
        return DatasetDone(
            path=self._path,
            bytes=found.bytes,
            sha256=found.sha256,
            facts=found.facts,
            sampled=found.profile is not None,
        )

    def _before(self) -> Found | None:
        """What an earlier run found, if the file is still that one and the question the same."""
        try:
            found = Found.model_validate_json((self._order.folder / RECORD).read_bytes())
            there = self._path.stat().st_size
        except (OSError, ValidationError):
            return None
        same = (found.task, found.name, found.bytes) == (self._task(), self._path.name, there)
        return found if same else None

    def _fetched(self, before: Found | None) -> Found | None:
        """None when what was there before is still what the address leads to."""
        got = self._copied() if self._order.url is None else self._downloaded(before)
        try:
            return self._looked_at(got) if got else None
        except StepFailed as failure:
            self._path.unlink()  # what comes next must not be taken for checked
            if failure.reason is not EndReason.BAD_DATA:
                raise
            again = self._downloaded(None) if self._order.url else None
            if again is None or got is None or again.sha256 == got.sha256:
                self._path.unlink(missing_ok=True)
                raise
            # Something on the way had damaged it.
            self._note(f"{failure}; fetched again, it is another file")
            return self._looked_at(again)

    @staticmethod
    def _gone() -> Found:
        raise StepFailed(EndReason.NETWORK, "the server says that a file is unchanged which is not here")

    def _task(self) -> str:
        return hashlib.sha256(f"{self._order.dataset!r} {self._order.image_type}".encode()).hexdigest()

    def _remember(self, found: Found) -> None:
        path = self._order.folder / RECORD
        with no_room_is_told(path):
            write_atomically(path, found.model_dump_json(indent=1).encode())

    def _source(self, before: Found | None) -> str:
        order = self._order
        text = order.url
        if text is None:
            try:
                stat = (order.file or Path()).stat()
            except OSError as error:
                if before is not None:
                    return before.source  # our copy is as good as it was
                raise StepFailed(EndReason.BAD_DATA, f"{order.file}: {error.strerror}") from None
            text = f"{order.file} {stat.st_size} {stat.st_mtime_ns}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _downloaded(self, before: Found | None) -> Downloaded | None:
        order, patience = self._order, self._order.patience
        networks = tuple(ip_network(text) for text in order.allowed_networks)
        return Download(
            url=order.url or "",
            path=self._path,
            max_bytes=order.max_bytes,
            opener=Opener(Guard(networks), patience.timeout),
            room=self._room,
            seconds=order.seconds,
            tell=lambda did, of: self._tell("dataset", did, of),
            known=before.etag if before else None,
        ).run(Retries(patience.tries, patience.first_pause))

    def _copied(self) -> Downloaded:
        """An operator's own file. A copy: what they do to theirs later is not this job's business."""
        source = self._order.file or Path()
        size = source.stat().st_size
        if size > self._order.max_bytes:
            raise StepFailed(
                EndReason.BAD_DATA,
                f"{source.name} is larger than DATASET_MAX_BYTES={self._order.max_bytes:,}",
            )
        self._room.check(self._order.folder, size)
        fresh = self._path.with_name(self._path.name + ".new")
        with no_room_is_told(fresh):
            shutil.copyfile(source, fresh)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        fresh.replace(self._path)
        return Downloaded(size, digest, None)

    def _looked_at(self, got: Downloaded) -> Found:
        try:
            facts, profile, notes = self._facts(got)
        except (BadRows, BadArchive) as error:
            raise StepFailed(EndReason.BAD_DATA, f"the dataset can't be used: {error}") from None
        return Found(
            task=self._task(),
            source="",
            name=self._path.name,
            bytes=got.bytes,
            sha256=got.sha256,
            etag=got.etag,
            facts=facts,
            profile=profile,
            notes=tuple(notes),
        )

    def _facts(self, got: Downloaded) -> tuple[DatasetFacts, Profile | None, list[str]]:
        order = self._order
        if order.image_type is not None:
            contents = look_into(self._path)
            return image_facts(len(contents.pairs), order.image_type), None, contents.notes()
        if order.dataset is None:
            raise BadRows("the task names no columns")
        with self._path.open("rb") as file:
            rows = CsvRows(file) if order.file_format is FileFormat.CSV else JsonRows(file)
            told = self._telling(rows, file, got.bytes)
            profile, sample = profile_rows(told, order.dataset)
        path = order.folder / SAMPLE
        with no_room_is_told(path):
            write_atomically(path, sample.to_json().encode())
        return facts_of(order.dataset, profile, sample), profile, _notes(profile, rows)

    def _telling(self, rows: Iterable[Row], file: BinaryIO, total: int) -> Iterator[Row]:
        for number, row in enumerate(rows):
            if number % 512 == 0:
                self._tell("check", file.tell(), total)
            yield row


def _name(order: DatasetOrder) -> str:
    if order.image_type is not None:
        return "data.zip"
    if order.file_format is FileFormat.HF:
        raise StepFailed(
            EndReason.BAD_DATA, "datasets by their name on the hub are not fetched: a URL of a file is needed"
        )
    return "data.csv" if order.file_format is FileFormat.CSV else "data.json"


def _notes(profile: Profile, rows: CsvRows | JsonRows) -> list[str]:
    """What an operator may want to know of a file that is fine otherwise."""
    found = {
        "can not be learned from: a text that is needed is missing or empty": profile.rows - profile.usable
    }
    if isinstance(rows, JsonRows):
        found["say a key twice; the last one counts"] = rows.doubled
        found[f"are no objects ({rows.first_odd})"] = rows.odd
    return [f"{count:,} of {rows.count:,} rows {what}" for what, count in found.items() if count]
