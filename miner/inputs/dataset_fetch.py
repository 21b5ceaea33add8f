"""A worker's task: fetch a job's dataset, check and profile it, and measure lengths in tokens.

The job's directory holds `data.json` (or `data.csv`, `data.zip`), `data.record` with what was found, and
for texts `data.sample`. A second run with the same URL does nothing; with another one it asks whether the
file is still the same (a second start signs it again) and fetches it only if it is not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from core.data.archives import BadArchive
from core.data.facts import DatasetFacts, image_dataset_facts
from core.data.pictures import inspect_picture_zip
from core.data.rows import BadRows, CsvRows, JsonRows
from core.data.scan import DatasetScan, RowSample, facts_from_scan, scan_rows
from core.domain.job_states import EndReason, StepFailed
from core.domain.records import Record
from core.domain.tasks import FileFormat
from core.system.files import write_atomically
from miner.inputs.connection import AddressGuard, UrlOpener
from miner.inputs.download import Download, Downloaded
from miner.inputs.messages import DatasetDone, DatasetOrder, MeasureOrder
from miner.inputs.part_files import DiskReserve, FetchRetries, disk_full_as_step_failure

#: Called with what is done, the bytes so far, and in all if known.
DatasetProgress = Callable[[str, int, int | None], None]
NoteCallback = Callable[[str], None]
Row = dict[str, Any]
RECORD, SAMPLE = "data.record", "data.sample"


class DatasetRecord(Record):
    """Facts about the fetched file."""

    #: A hash of what the task needs of the rows.
    task: str
    #: A hash of the URL: a signed one is a key, and is not stored.
    source: str
    name: str
    bytes: int
    sha256: str
    etag: str | None = None
    facts: DatasetFacts
    profile: DatasetScan | None = None
    notes: tuple[str, ...] = ()


def fetch_dataset(order: DatasetOrder, on_progress: DatasetProgress, on_note: NoteCallback) -> DatasetDone:
    """`StepFailed` with NETWORK, RATE_LIMITED, DISK_FULL, DATA_GONE, URL_REFUSED or BAD_DATA."""
    return _DatasetFetch(order, on_progress, on_note).run()


class _DatasetFetch:
    def __init__(self, order: DatasetOrder, on_progress: DatasetProgress, on_note: NoteCallback) -> None:
        self._order = order
        self._on_progress = on_progress
        self._on_note = on_note
        self._path = order.folder / _file_name(order)
        self._reserve = DiskReserve(order.keep_free)

    def run(self) -> DatasetDone:
        self._order.folder.mkdir(parents=True, exist_ok=True)
        record = self._earlier_record()
        source = self._source(record)
        if record is None or record.source != source:
            record = (self._fetched(record) or record or self._gone()).model_copy(update={"source": source})
            path = self._order.folder / RECORD
            with disk_full_as_step_failure(path):
                write_atomically(path, record.model_dump_json(indent=1).encode())
        for text in record.notes:
            self._on_note(text)
        return DatasetDone(
            path=self._path,
            bytes=record.bytes,
            sha256=record.sha256,
            facts=record.facts,
            sampled=record.profile is not None,
        )

    def _earlier_record(self) -> DatasetRecord | None:
        """The record of an earlier run, if it has the same file and task."""
        try:
            record = DatasetRecord.model_validate_json((self._order.folder / RECORD).read_bytes())
            size = self._path.stat().st_size
        except (OSError, ValidationError):
            return None
        same = (record.task, record.name, record.bytes) == (self._task(), self._path.name, size)
        return record if same else None

    def _fetched(self, before: DatasetRecord | None) -> DatasetRecord | None:
        """Fetch and check the file; None when the earlier copy is still valid."""
        file = self._copied() if self._order.url is None else self._downloaded(before)
        try:
            return self._checked(file) if file else None
        except StepFailed as failure:
            self._path.unlink()  # the next run must not take it for checked
            if failure.reason is not EndReason.BAD_DATA:
                raise
            again = self._downloaded(None) if self._order.url else None
            if again is None or file is None or again.sha256 == file.sha256:
                self._path.unlink(missing_ok=True)
                raise
            # It was damaged on the way.
            self._on_note(f"{failure}; fetched again, it is another file")
            return self._checked(again)

    @staticmethod
    def _gone() -> DatasetRecord:
        raise StepFailed(
            EndReason.NETWORK, "the server says that the file is unchanged, but there is no copy of it"
        )

    def _task(self) -> str:
        return hashlib.sha256(f"{self._order.dataset!r} {self._order.image_type}".encode()).hexdigest()

    def _source(self, before: DatasetRecord | None) -> str:
        order = self._order
        text = order.url
        if text is None:
            try:
                stat = (order.file or Path()).stat()
            except OSError as error:
                if before is not None:
                    return before.source  # our copy is still valid
                raise StepFailed(EndReason.BAD_DATA, f"{order.file}: {error.strerror}") from None
            text = f"{order.file} {stat.st_size} {stat.st_mtime_ns}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _downloaded(self, before: DatasetRecord | None) -> Downloaded | None:
        order, limits = self._order, self._order.patience
        networks = tuple(ip_network(text) for text in order.allowed_networks)
        return Download(
            url=order.url or "",
            path=self._path,
            max_bytes=order.max_bytes,
            opener=UrlOpener(AddressGuard(networks), limits.timeout),
            reserve=self._reserve,
            seconds=order.seconds,
            on_progress=lambda done, total: self._on_progress("dataset", done, total),
            known=before.etag if before else None,
        ).run(FetchRetries(limits.tries, limits.first_pause))

    def _copied(self) -> Downloaded:
        """Copy an operator's own file, which may change later."""
        source = self._order.file or Path()
        size = source.stat().st_size
        if size > self._order.max_bytes:
            raise StepFailed(
                EndReason.BAD_DATA,
                f"{source.name} is larger than DATASET_MAX_BYTES={self._order.max_bytes:,}",
            )
        self._reserve.require(self._order.folder, size)
        fresh = self._path.with_name(self._path.name + ".new")
        with disk_full_as_step_failure(fresh):
            shutil.copyfile(source, fresh)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        fresh.replace(self._path)
        return Downloaded(size, digest, None)

    def _checked(self, file: Downloaded) -> DatasetRecord:
        try:
            facts, profile, notes = self._facts(file)
        except (BadRows, BadArchive) as error:
            raise StepFailed(EndReason.BAD_DATA, f"the dataset cannot be used: {error}") from None
        return DatasetRecord(
            task=self._task(),
            source="",
            name=self._path.name,
            bytes=file.bytes,
            sha256=file.sha256,
            etag=file.etag,
            facts=facts,
            profile=profile,
            notes=tuple(notes),
        )

    def _facts(self, downloaded: Downloaded) -> tuple[DatasetFacts, DatasetScan | None, list[str]]:
        order = self._order
        if order.image_type is not None:
            contents = inspect_picture_zip(self._path)
            return image_dataset_facts(len(contents.pairs), order.image_type), None, contents.notes()
        if order.dataset is None:
            raise BadRows("the task names no columns")
        with self._path.open("rb") as file:
            rows = CsvRows(file) if order.file_format is FileFormat.CSV else JsonRows(file)
            profile, sample = scan_rows(self._with_progress(rows, file, downloaded.bytes), order.dataset)
        path = order.folder / SAMPLE
        with disk_full_as_step_failure(path):
            write_atomically(path, sample.to_json().encode())
        return facts_from_scan(order.dataset, profile, sample), profile, _row_notes(profile, rows)

    def _with_progress(self, rows: Iterable[Row], file: BinaryIO, total: int) -> Iterator[Row]:
        for number, row in enumerate(rows):
            if number % 512 == 0:
                self._on_progress("check", file.tell(), total)
            yield row


def _file_name(order: DatasetOrder) -> str:
    if order.image_type is not None:
        return "data.zip"
    if order.file_format is FileFormat.HF:
        raise StepFailed(
            EndReason.BAD_DATA, "datasets by their name on the hub are not fetched: a URL of a file is needed"
        )
    return "data.csv" if order.file_format is FileFormat.CSV else "data.json"


def _row_notes(profile: DatasetScan, rows: CsvRows | JsonRows) -> list[str]:
    """Notes for the operator about a file that can be used."""
    counts = {"cannot be learned from: a required text is missing or empty": profile.rows - profile.usable}
    if isinstance(rows, JsonRows):
        counts["have a key twice; the last one counts"] = rows.duplicate_keys
        counts[f"are not objects ({rows.first_non_object})"] = rows.non_objects
    return [f"{count:,} of {rows.count:,} rows {what}" for what, count in counts.items() if count]


#: Texts encoded in one call.
TEXTS_PER_CALL = 256


def measure_lengths(order: MeasureOrder) -> DatasetFacts | None:
    """Measure in tokens; None when the tokenizer cannot be read alone, and the lengths by bytes remain."""
    from tokenizers import Tokenizer

    record = DatasetRecord.model_validate_json((order.folder / RECORD).read_bytes())
    sample = RowSample.from_json((order.folder / SAMPLE).read_bytes())
    if record.profile is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(order.tokenizer))
    except Exception:  # noqa: BLE001 - a plain Exception is what the library raises for a file it cannot read
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        lengths: list[int] = []
        for start in range(0, len(texts), TEXTS_PER_CALL):
            # Without special tokens: half of them would be counted for texts in the middle of a row.
            batch = tokenizer.encode_batch_fast(
                list(texts[start : start + TEXTS_PER_CALL]), add_special_tokens=False
            )
            lengths += [len(one.ids) for one in batch]
        return lengths

    return facts_from_scan(order.dataset, record.profile, sample, count)
