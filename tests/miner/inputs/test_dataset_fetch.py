"""A job's dataset on disk, checked and looked at."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from core.domain.job_states import EndReason, StepFailed
from core.domain.records import Confidence
from core.domain.tasks import FileFormat, ImageModelType, InstructDataset
from miner.inputs import dataset_fetch as module
from miner.inputs.dataset_fetch import RECORD, SAMPLE, fetch_dataset, measure_lengths
from miner.inputs.messages import DatasetDone, DatasetOrder, MeasureOrder, RetryLimits
from tests.core.data.picture_files import png, zip_bytes
from tests.doubles.files import SIGNATURE, FileStore
from tests.miner.inputs.models import TOKENIZER

pytestmark = pytest.mark.process


DATASET = InstructDataset(field_instruction="q", field_output="a")
ROWS = [{"q": f"question {n}", "a": "an answer"} for n in range(3000)]
DATA = json.dumps(ROWS).encode()
PATIENCE = RetryLimits(tries=3, first_pause=0.001, timeout=60.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs/1/inputs"


@dataclass
class Reports:
    notes: list[str] = field(default_factory=list)
    progress: list[tuple[str, int, int | None]] = field(default_factory=list)


def get(folder: Path, url: str | None, reports: Reports | None = None, **more: Any) -> DatasetDone:
    reports = reports or Reports()
    fields = {
        "dataset": DATASET,
        "max_bytes": 10**7,
        "allowed_networks": ("127.0.0.0/8",),
        "patience": PATIENCE,
        **more,
    }
    order = DatasetOrder(folder=folder, url=url, **fields)
    return fetch_dataset(order, lambda *did: reports.progress.append(did), reports.notes.append)


def failure(folder: Path, url: str | None, **more: Any) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        get(folder, url, **more)
    assert SIGNATURE not in str(caught.value)
    assert not [path for path in folder.glob("data.*") if path.suffix in (".json", ".csv", ".zip")]
    return caught.value


def test_rows_are_fetched_checked_and_counted(store: FileStore, folder: Path) -> None:
    reports = Reports()
    done = get(folder, store.add("0123_train_data.json", DATA), reports)
    assert done.path == folder / "data.json"
    assert done.path.read_bytes() == DATA
    assert (done.facts.rows, done.facts.lengths_confidence) == (3000, Confidence.NAME)
    assert done.sampled
    assert reports.notes == []
    assert reports.progress[-1][0] == "check"
    assert SIGNATURE.encode() not in b"".join(path.read_bytes() for path in folder.iterdir())


def test_a_second_run_does_nothing(store: FileStore, folder: Path) -> None:
    url = store.add("a", DATA)
    assert get(folder, url) == get(folder, url)
    assert len(store.requests) == 1


def test_a_file_signed_anew_is_looked_at_but_not_fetched(store: FileStore, folder: Path) -> None:
    first = get(folder, store.add("a", DATA))
    store.signatures.add("other")
    assert get(folder, store.sign("a", "other")) == first
    assert store.bytes_sent() == len(DATA)
    store.add("a", json.dumps(ROWS[:10]).encode())
    assert get(folder, store.sign("a")).facts.rows == 10


def test_a_task_of_other_columns_looks_again(store: FileStore, folder: Path) -> None:
    url = store.add("a", DATA)
    get(folder, url)
    other = InstructDataset(field_instruction="a", field_output="q")
    assert (
        get(folder, url, dataset=other).facts.answer.max > get(folder, url, dataset=DATASET).facts.answer.max
    )


@pytest.mark.parametrize("harm", ["cut", "gone", "record"])
def test_what_was_harmed_since_is_fetched_again(store: FileStore, folder: Path, harm: str) -> None:
    url = store.add("a", DATA)
    get(folder, url)
    if harm == "cut":
        (folder / "data.json").write_bytes(DATA[:100])
    elif harm == "gone":
        (folder / "data.json").unlink()
    else:
        (folder / RECORD).write_text("{")
    assert get(folder, url).path.read_bytes() == DATA
    assert len(store.requests) == 2


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"<html>sign in</html>", "begins with '<html>"),
        (DATA[:-50], "Unterminated string"),
        (DATA[:5000] + b"\0" * 100, "row 125 cannot be read, at character 5,000"),
        (b"\0" * 5000, "begins with '\\x00"),
        (b'{"data": []}', "no row has the column 'q' (field_instruction), 'a' (field_output)"),
        (b'[{"instruct": "x", "output": "y"}]', "the columns are 'instruct', 'output'"),
        (b"[]", "has no rows"),
        (b'[1, "x", null]', "has no rows"),
        (b'[{"q": "x", "a": ""}]', "can be learned from"),
        (b"[" * 100_000, "nested too deeply"),
        (b'[{"q": ' + b"[" * 50_000, "nested too deeply"),
    ],
)
def test_what_is_no_dataset_ends_the_job_with_the_reason(
    store: FileStore, folder: Path, data: bytes, why: str
) -> None:
    failed = failure(folder, store.add("a", data))
    assert failed.reason is EndReason.BAD_DATA
    assert why in str(failed)


def test_what_was_damaged_on_the_way_is_fetched_once_more(store: FileStore, folder: Path) -> None:
    reports = Reports()
    url = store.add("a", DATA)
    store.fail(declared_length=len(DATA) - 1000)
    assert get(folder, url, reports).facts.rows == 3000
    assert "fetched again, it is another file" in reports.notes[0]
    bad = store.add("b", DATA[:-1000])
    failure(folder, bad)
    assert len(store.lines("/bucket/b")) == 2


def test_odd_rows_are_reported_and_lines_are_rows_too(store: FileStore, folder: Path) -> None:
    reports = Reports()
    rows = b'{"q": "x", "a": "y"}\n7\n{"q": "x", "a": ""}\n{"q": "x", "q": "z", "a": "y"}\n'
    done = get(folder, store.add("a", rows), reports)
    assert done.facts.rows == 2
    assert reports.notes == [
        "1 of 4 rows cannot be learned from: a required text is missing or empty",
        "1 of 4 rows have a key twice; the last one counts",
        "1 of 4 rows are not objects (row 2 is a number)",
    ]


def test_csv_is_read_as_csv(store: FileStore, folder: Path) -> None:
    url = store.add("a", b"q,a\nx,y\nz,\n")
    done = get(folder, url, file_format=FileFormat.CSV)
    assert (done.path.name, done.facts.rows) == ("data.csv", 1)
    assert failure(folder.parent / "other", store.add("b", b""), file_format=FileFormat.CSV).reason is (
        EndReason.BAD_DATA
    )


def test_a_dataset_named_on_the_hub_is_refused(folder: Path) -> None:
    failed = failure(folder, "owner/dataset", file_format=FileFormat.HF)
    assert failed.reason is EndReason.BAD_DATA
    assert "not fetched" in str(failed)


def test_pictures_are_counted_and_what_is_left_out_is_reported(store: FileStore, folder: Path) -> None:
    reports = Reports()
    data = zip_bytes({"a/0.png": png(), "a/0.txt": b"cat", "a/1.png": png(), "a/x.md": b""})
    url = store.add("a", data)
    done = get(folder, url, reports, dataset=None, image_type=ImageModelType.SDXL)
    assert done.path.name == "data.zip"
    assert (done.facts.rows, done.facts.image_repeats, done.sampled) == (2, 10, False)
    assert reports.notes == [
        "'a/x.md' is left out: neither a picture nor a caption",
        "1 of 2 pictures have no caption",
    ]
    assert get(folder, url, dataset=None, image_type=ImageModelType.SDXL) == done
    for name, bad in (("b", data[:-40]), ("c", zip_bytes({"a.txt": b""})), ("d", b"\0" * 100)):
        failed = failure(
            folder.parent / name, store.add(name, bad), dataset=None, image_type=ImageModelType.FLUX
        )
        assert failed.reason is EndReason.BAD_DATA


def test_an_operators_own_file_is_copied_and_checked_and_our_copy_outlives_it(
    folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "mine.json"
    own.write_bytes(DATA)
    assert "larger than" in str(failure(folder, None, file=own, max_bytes=1024))
    first = get(folder, None, file=own)
    own.write_bytes(b"changed later")
    assert first.path.read_bytes() == DATA
    assert "fetched" not in str(failure(folder, None, file=own))
    own.write_bytes(DATA)
    assert get(folder, None, file=own) == first
    own.unlink()
    assert get(folder, None, file=own) == first
    first.path.unlink()
    failed = failure(folder, None, file=own)
    assert (failed.reason, "No such file" in str(failed)) == (EndReason.BAD_DATA, True)


def test_without_room_nothing_is_begun(store: FileStore, folder: Path) -> None:
    assert failure(folder, store.add("a", DATA), keep_free=1 << 60).reason is EndReason.DISK_FULL


def test_loopback_is_refused_unless_it_was_opened(store: FileStore, folder: Path) -> None:
    assert failure(folder, store.add("a", DATA), allowed_networks=()).reason is EndReason.URL_REFUSED
    assert store.requests == []


def test_a_disk_that_fills_up_while_it_is_looked_at_does_not_fetch_it_twice(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        if path.name == SAMPLE:
            raise OSError(errno.ENOSPC, "No space left on device")

    url = store.add("data.json", DATA)
    with monkeypatch.context() as patched:
        patched.setattr(module, "write_atomically", full)
        assert failure(folder, url).reason is EndReason.DISK_FULL
    assert len(store.requests) == 1
    assert get(folder, url).facts.rows == 3000


@pytest.fixture
def measured_folder(tmp_path: Path) -> Path:
    own = tmp_path / "own.json"
    own.write_text(json.dumps([{"q": "word " * n, "a": "three little words"} for n in range(1, 101)]))
    get(tmp_path / "inputs", None, file=own)
    return tmp_path / "inputs"


def test_the_sample_is_counted_by_the_tokenizer(measured_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    order = MeasureOrder(folder=measured_folder, tokenizer=tmp_path / "tokenizer.json", dataset=DATASET)
    facts = measure_lengths(order)
    assert (facts.prompt.max, facts.answer.percentile(50), facts.total.max) == (100, 3, 103)
    assert (facts.rows, facts.lengths_confidence) == (100, Confidence.CONFIG)


@pytest.mark.parametrize("text", ["", "{}", "[", '{"model": {"type": "Unheard"}}'])
def test_a_tokenizer_that_cannot_be_read_alone_measures_nothing(
    measured_folder: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    order = MeasureOrder(folder=measured_folder, tokenizer=tmp_path / "tokenizer.json", dataset=DATASET)
    assert measure_lengths(order) is None
