"""Cost of a submission's check and fingerprint, and of a whole publication to a folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Report
from core.domain.tasks import TaskType
from core.submission.check import BaseModelRef
from core.submission.digests import digest_file
from core.submission.prepare import check_submission
from miner.publish import HubPublisher, PublishTarget
from miner.publish.publisher import PublishRequest

MEGA = 1e6
TENSORS = 64
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000}


def run(quick: bool) -> Report:
    size = 256_000_000 if quick else 4_000_000_000
    rounds = 2 if quick else 3
    report = Report(
        f"Publishing a model of {size / MEGA:,.0f} MB, files in the page cache, best of {rounds}",
        ("what", "MB/s", "s per GB"),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dtype in ("BF16", "F16", "F32"):
            _measure(report, _model(folder / dtype, dtype, size), dtype, size, rounds)
    report.notes.append("Searching and hashing share two cores; with one they take turns.")
    return report


def _measure(report: Report, model: Path, dtype: str, size: int, rounds: int) -> None:
    weights = model / "model.safetensors"
    if dtype == "BF16":
        _row(report, "SHA-256 alone", size, rounds, lambda: _hashed(weights))
    _row(report, f"{dtype}: SHA-256 and every number finite", size, rounds, lambda: digest_file(weights))
    _row(report, f"{dtype}: the whole check", size, rounds, lambda: _judged(model))
    if dtype == "BF16":
        _row(report, "published to a folder: check, copy, verify", size, 1, lambda: _published(model))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
        report.notes.append(f"The publishing process took {peak:.0f} MB at its peak.")
    weights.unlink()


def _row(report: Report, what: str, size: int, rounds: int, work: Callable[[], object]) -> None:
    best = min(_timed(work) for _ in range(rounds))
    report.rows.append((what, f"{size / MEGA / best:,.0f}", f"{best / size * 1e9:.2f}"))
    report.data[what] = {"bytes": size, "seconds": best}


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _hashed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _judged(folder: Path) -> None:
    found = check_submission(folder, BaseModelRef("owner/base"))
    assert not found.faults, found.faults


def _published(folder: Path) -> None:
    to = PublishTarget(f"local:{folder}.hub", "", None, "owner", folder.parent / "state")
    outgoing = PublishRequest(0, TaskType.INSTRUCT, "owner/base", Path(), folder, "name")
    asyncio.run(HubPublisher(to, on_note=lambda *_: None).publish(outgoing, lambda *_: None))


def _model(folder: Path, dtype: str, size: int) -> Path:
    """Weights as they are after a training: numbers of every sign and size below one."""
    width = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    each = size // TENSORS // width * width
    header = {
        f"model.layers.{number}.weight": {
            "dtype": dtype,
            "shape": [each // width],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(TENSORS)
    }
    text = json.dumps(header).encode()
    block = bytearray(os.urandom(min(each, 16_000_000) // width * width))
    block[width - 1 :: width] = bytes(byte & 0xBF for byte in block[width - 1 :: width])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = each * TENSORS
        while left:
            left -= file.write(block[:left])
    return folder
