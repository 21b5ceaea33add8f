"""Files that arrive in pieces, and what is left of them after an end of any kind."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miner.jobs.inputs.parts import PartFile, Room, no_room_is_told
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

DATA = bytes(range(256)) * 100


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with PartFile(tmp_path / "deep/a") as part:
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


def test_beginning_anew_forgets_all(tmp_path: Path) -> None:
    with PartFile(tmp_path / "a") as part:
        part.begin(etag="1")
        part.write(b"other")
        part.begin(etag="2")
        part.write(DATA)
        part.finish()
    assert (tmp_path / "a").read_bytes() == DATA
    assert part.sha256.hexdigest() == hashlib.sha256(DATA).hexdigest()


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


def test_a_disk_that_would_get_too_full_is_told_before_and_while_writing(tmp_path: Path) -> None:
    room = Room(keep_free=1 << 60)
    with pytest.raises(StepFailed) as caught:
        room.check(tmp_path, 1)
    assert caught.value.reason is EndReason.DISK_FULL
    assert "MIN_FREE_DISK_BYTES" in str(caught.value)
    with PartFile(tmp_path / "a", room, sync_every=10) as part:
        part.begin(etag="1")
        with pytest.raises(StepFailed):
            part.write(DATA)
    with PartFile(tmp_path / "a") as part:
        assert part.size == len(DATA)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_has_a_name_and_other_errors_are_themselves(number: int) -> None:
    with pytest.raises(StepFailed) as caught, no_room_is_told(Path("/x/y")):
        raise OSError(number, os.strerror(number))
    assert caught.value.reason is EndReason.DISK_FULL
    with pytest.raises(PermissionError), no_room_is_told(Path("/x/y")):
        raise PermissionError(errno.EACCES, "no")
