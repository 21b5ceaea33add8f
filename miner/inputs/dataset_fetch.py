"""A worker's task: download a job's dataset, check and profile it, and measure lengths in tokens.

A download is resumed where it stopped, and its file is complete or absent.

The job's directory holds `data.json` (or `data.csv`, `data.zip`), `data.record` with what was found, and
for texts `data.sample`. A second run with the same URL does nothing; with another one it asks whether the
file is still the same (a second start signs it again) and fetches it only if it is not.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import BinaryIO

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
from miner.inputs.messages import DatasetDone, DatasetOrder, MeasureOrder
from miner.inputs.part_files import DiskReserve, FetchRetries, PartFile, disk_full_as_step_failure
from miner.support.rate_limits import retry_after

#: Called with what is done, the bytes so far, and in all if known.
DatasetProgress = Callable[[str, int, int | None], None]
NoteCallback = Callable[[str], None]
Row = dict[str, object]
RECORD, SAMPLE = "data.record", "data.sample"

_CHUNK = 256 * 1024
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
        while data := response.read1(_CHUNK):
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
