from __future__ import annotations

from pathlib import Path

import pytest

from core.submission.check import Base
from core.submission.faults import BadSubmission, FaultKind
from core.submission.judge import complete, hash_of, judge
from core.tasks import TaskType
from tests.core.submission import folders
from tests.core.submission.folders import BASE_ID, write
from tests.core.submission.test_model_hash import plainly


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(BASE_ID, folders.base(tmp_path / "base"))


def clean(folder: Path) -> Path:
    """As a trainer writes it: only what belongs to the adapter."""
    folders.adapter(folder)
    for name in ("debug.log", "config.json", "checkpoint-10/optimizer.pt"):
        (folder / name).unlink()
    (folder / "checkpoint-10" / "adapter_model.safetensors").unlink()
    return folder


def test_a_trainer_puts_a_mended_and_good_submission_in_place(tmp_path: Path, base: Base) -> None:
    place = tmp_path / "submission"
    report = complete(clean(tmp_path / "new"), place, base, TaskType.DPO)
    assert report.model_hash == plainly(place) == hash_of(place)
    assert judge(place, base, as_is=True).faults == ()
    assert not (tmp_path / "new").exists()


def test_what_is_not_good_does_not_replace_what_is(tmp_path: Path, base: Base) -> None:
    place = tmp_path / "submission"
    complete(clean(tmp_path / "new"), place, base, TaskType.DPO)
    before = plainly(place)
    worse = write(clean(tmp_path / "worse"), {"adapter_model.safetensors": b"half"})
    with pytest.raises(BadSubmission, match="has 4 bytes"):
        complete(worse, place, base, TaskType.DPO)
    assert plainly(place) == before


def test_strays_that_a_tournament_would_upload_are_faults(tmp_path: Path, base: Base) -> None:
    new = write(clean(tmp_path / "new"), {"model.safetensors": b"x", "ref/config.json": "{}"})
    with pytest.raises(BadSubmission) as caught:
        complete(new, tmp_path / "submission", base, TaskType.DPO)
    assert {fault.kind for fault in caught.value.faults} == {FaultKind.BOTH_KINDS, FaultKind.STRAY}
    assert not (tmp_path / "submission").exists()


def test_the_hash_of_a_folder_passes_over_what_does_not_count(tmp_path: Path) -> None:
    assert hash_of(write(tmp_path / "x", {"README.md": "x", "config.json": ""})) is None
