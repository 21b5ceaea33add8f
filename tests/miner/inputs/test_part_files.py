"""Files that arrive in pieces, and what is left of them after an end of any kind."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.domain.job_states import EndReason, StepFailed
from miner.inputs.part_files import (
    PROGRESS_BYTES,
    DiskReserve,
    FetchRetries,
    PartFile,
    disk_full_as_step_failure,
)

DATA = bytes(range(256)) * 100


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with PartFile(tmp_path / "deep/a") as part:
        part.begin(etag="0")
        part.write(b"of another file")
        part.begin(etag="1")
        part.write(DATA)
        assert not (tmp_path / "deep/a").exists()
        part.finish()
    assert (tmp_path / "deep/a").read_bytes() == DATA
    assert part.sha256.hexdigest() == hashlib.sha256(DATA).hexdigest()
    assert left(tmp_path / "deep") == ["a"]


def test_what_was_there_at_an_error_is_resumed_with_its_hash(tmp_path: Path) -> None:
    with contextlib.suppress(ConnectionError), PartFile(tmp_path / "a") as part:
        part.begin(etag="1")
        part.write(DATA[:1000])
        raise ConnectionError
    assert left(tmp_path) == ["a.part", "a.state"]
    with PartFile(tmp_path / "a") as part:
        assert (part.size, part.about) == (1000, {"etag": "1"})
        part.write(DATA[1000:])
        part.finish()
    assert (tmp_path / "a").read_bytes() == DATA
    assert part.sha256.hexdigest() == hashlib.sha256(DATA).hexdigest()


def test_after_a_kill_only_what_was_synced_counts(tmp_path: Path) -> None:
    """A kill leaves the file as it was written, and the state as it was last synced."""
    part = PartFile(tmp_path / "a", sync_every=4000)
    part.begin(etag="1")
    for start in range(0, 10_000, 1000):
        part.write(DATA[start : start + 1000])
    (tmp_path / "a.part").write_bytes(DATA[:8000] + b"\0" * 2000)  # as after a power cut
    with PartFile(tmp_path / "a") as again:
        assert again.size == 8000
        again.write(DATA[8000:])
        again.finish()
    assert (tmp_path / "a").read_bytes() == DATA
    part._file.close()


@pytest.mark.parametrize("state", [b"", b"{}", b"[]", b'{"about": {}, "synced": 99999}', b"\0\0", None])
def test_without_a_sound_state_it_begins_anew(tmp_path: Path, state: bytes | None) -> None:
    (tmp_path / "a.part").write_bytes(b"something")
    if state is not None:
        (tmp_path / "a.state").write_bytes(state)
    with PartFile(tmp_path / "a") as part:
        assert (part.size, part.about) == (0, {})
    assert left(tmp_path) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 3000), max_size=6), sync_every=st.integers(1, 3000))
def test_any_number_of_interruptions_gives_the_same_file(
    cuts: list[int], sync_every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("part") / "a"
    for cut in cuts:
        with contextlib.suppress(ConnectionError), PartFile(path, sync_every=sync_every) as part:
            if not part.about:
                part.begin(etag="1")
            part.write(DATA[part.size : part.size + cut])
            raise ConnectionError
    with PartFile(path) as part:
        part.write(DATA[part.size :])
        part.finish()
    assert path.read_bytes() == DATA
    assert part.sha256.hexdigest() == hashlib.sha256(DATA).hexdigest()


def test_a_disk_that_would_get_too_full_is_reported_before_and_while_writing(tmp_path: Path) -> None:
    reserve = DiskReserve(keep_free=1 << 60)
    with pytest.raises(StepFailed) as caught:
        reserve.require(tmp_path, 1)
    assert caught.value.reason is EndReason.DISK_FULL
    assert "MIN_FREE_DISK_BYTES" in str(caught.value)
    with PartFile(tmp_path / "a", reserve, sync_every=10) as part:
        part.begin(etag="1")
        with pytest.raises(StepFailed):
            part.write(DATA)
    with PartFile(tmp_path / "a") as part:
        assert part.size == len(DATA)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_has_a_name_and_other_errors_are_themselves(number: int) -> None:
    with pytest.raises(StepFailed) as caught, disk_full_as_step_failure(Path("/x/y")):
        raise OSError(number, os.strerror(number))
    assert caught.value.reason is EndReason.DISK_FULL
    with pytest.raises(PermissionError), disk_full_as_step_failure(Path("/x/y")):
        raise PermissionError(errno.EACCES, "no")


def pauses(failures: list[StepFailed], **more: Any) -> tuple[list[float], StepFailed | None]:
    """The pauses between these failures, and the one that was raised."""
    waited: list[float] = []
    retries = FetchRetries(pause=waited.append, **{"jitter": lambda: 1.0, **more})
    for failure in failures:
        try:
            retries.wait(failure)
        except StepFailed as raised:
            return waited, raised
    return waited, None


def network() -> StepFailed:
    return StepFailed(EndReason.NETWORK, "x")


def test_pauses_double_up_to_a_limit_and_then_it_is_over() -> None:
    waited, raised = pauses([network()] * 9, tries=8)
    assert waited == [1, 2, 4, 8, 16, 20, 20]
    assert raised is not None


def test_jitter_takes_up_to_half_of_a_pause_away() -> None:
    assert pauses([network()], jitter=lambda: 0.0)[0] == [0.5]
    (pause,) = pauses([network()], jitter=random.random)[0]
    assert 0.5 <= pause <= 1.0


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (EndReason.URL_REFUSED, []),
        (EndReason.BAD_DATA, []),
        (EndReason.DISK_FULL, []),
        (EndReason.MODEL_GATED, []),
        # What is gone may come back: three tries.
        (EndReason.DATA_GONE, [1, 2]),
    ],
)
def test_what_trying_again_cannot_help_is_raised_at_once(reason: EndReason, expected: list[float]) -> None:
    assert pauses([StepFailed(reason, "x")] * 5)[0] == expected


def test_what_the_other_side_asks_for_is_waited_unless_it_is_too_long() -> None:
    assert pauses([StepFailed(EndReason.RATE_LIMITED, "x", 7.0)] * 2)[0] == [7.0, 7.0]
    waited, raised = pauses([StepFailed(EndReason.RATE_LIMITED, "x", 300.0)])
    assert waited == []
    assert raised.retry_after == 300.0


def test_only_progress_worth_the_name_begins_the_count_anew() -> None:
    waited: list[float] = []
    retries = FetchRetries(tries=2, pause=waited.append, jitter=lambda: 1.0)
    for _ in range(5):
        retries.wait(network(), PROGRESS_BYTES)
    with pytest.raises(StepFailed):
        retries.wait(network(), PROGRESS_BYTES - 1)
    assert waited == [1] * 5
