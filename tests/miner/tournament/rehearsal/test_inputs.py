"""What an operator names is refused before anything is cloned or built, where it cannot be rehearsed."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from core.domain.tournament_rules import TEXT_DOCKERFILE
from miner.tournament.rehearsal.build import Build
from miner.tournament.rehearsal.cache_layout import BadInput, CacheLayout
from miner.tournament.rehearsal.container import TrainingMachine
from miner.tournament.rehearsal.inputs import (
    PICTURES,
    RehearsalInputs,
    RehearsalOptions,
    check_entry,
    check_inputs,
    split_pictures,
    split_rows,
    stand_in_pictures,
    training_data,
)
from miner.tournament.rehearsal.rehearse import RehearsalSetup, TaskRun
from miner.tournament.rehearsal.scoring import pictures_in
from miner.tournament.rules import TASKS


def check(tmp_path: Path, kind: str, model: Path | None, data: Path | None = None, **more: Any) -> None:
    inputs = {kind: RehearsalInputs(model, "org/name", data)}
    check_inputs(RehearsalOptions(tmp_path / "out", [TASKS[kind]], inputs=inputs, **more))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def rows(tmp_path: Path, *found: dict[str, str]) -> Path:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(found))
    return path


def test_a_model_and_rows_of_the_task_are_taken(tmp_path: Path, model: Path) -> None:
    check(tmp_path, "dpo", model, rows(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}))
    check(tmp_path, "dpo", None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "said"), [("config.json", "config.json"), ("model.safetensors", "weights")]
)
def test_a_directory_that_is_no_model_is_refused(
    tmp_path: Path, model: Path, missing: str, said: str
) -> None:
    (model / missing).unlink()
    with pytest.raises(BadInput, match=f"has no {said}"):
        check(tmp_path, "instruct", model)


def test_rows_of_another_task_are_refused_with_the_columns_that_are_wanted(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="lacks chosen, rejected; wanted: prompt, chosen, rejected"):
        check(tmp_path, "dpo", None, rows(tmp_path, {"prompt": "a"}))
    with pytest.raises(BadInput, match="it has no rows"):
        check(tmp_path, "dpo", None, rows(tmp_path))


def test_a_file_that_is_no_zip_of_pictures_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(BadInput, match="zip of pictures"):
        check(tmp_path, "flux", model, rows(tmp_path))


def test_another_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "champion").mkdir()
    with pytest.raises(BadInput, match=r"--against .*champion: there is no"):
        check(tmp_path, "dpo", None, against=tmp_path / "champion")


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(BadInput, match=r"has 5.0 MB free: name one on another disk by --output"):
        check(tmp_path, "dpo", None)


def test_an_entry_that_cannot_train_the_task_is_refused_before_its_build(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="chat: no Dockerfile: neither of"):
        check_entry(tmp_path, [TASKS["chat"]])
    for name in ("core/domain/tasks.py", "trainer/text.py", f"dockerfiles/{TEXT_DOCKERFILE}"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    check_entry(tmp_path, [TASKS["chat"]])
    with pytest.raises(BadInput, match="trains no environment tasks yet"):
        check_entry(tmp_path, [TASKS["environment"]])


def test_a_dataset_without_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "poker"
    folder.mkdir()
    for named in (folder, tmp_path / "missing"):
        with pytest.raises(BadInput, match=r"RZ412/PokerBench: .* is not a directory with files"):
            check(tmp_path, "chat", None, datasets={"RZ412/PokerBench": named})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rows.jsonl").write_text("{}")
    (folder / "data").symlink_to(elsewhere)
    check(tmp_path, "chat", None, datasets={"RZ412/PokerBench": folder})
    (elsewhere / "rows.jsonl").rename(tmp_path / "rows.jsonl")
    (folder / "rows.jsonl").symlink_to(elsewhere / "rows.jsonl")
    with pytest.raises(BadInput, match=r"rows\.jsonl is a link to nothing"):
        check(tmp_path, "chat", None, datasets={"RZ412/PokerBench": folder})


@pytest.mark.parametrize(("kind", "given"), [("environment", True), ("flux", False)])
def test_a_container_is_told_which_datasets_arrived(
    tmp_path: Path, model: Path, kind: str, given: bool
) -> None:
    datasets = {"RZ412/PokerBench": model, "albarji/ballmatro": model}
    options = RehearsalOptions(tmp_path / "out", [TASKS[kind]], datasets=datasets)
    machine = TrainingMachine(memory_bytes=2**33, cpus=2, gpus=())
    build = Build(TASKS[kind].dockerfile, image="made:1")
    run = TaskRun(RehearsalSetup(Mock(), options, machine, "none", Mock(), Mock()), TASKS[kind], build)
    layout = CacheLayout(tmp_path, tmp_path, tmp_path, None)
    found = run._container_options("made:1", layout, "checkpoints").environment
    folder, names = found.get("MINER_DATASETS_DIR"), found.get("MINER_DATASETS")
    expected = ("/cache/miner_datasets", "RZ412--PokerBench,albarji--ballmatro")
    assert (folder, names) == (expected if given else (None, None))


@pytest.mark.parametrize(("count", "kept"), [(2, 1), (10, 1), (11, 2), (21, 3)])
def test_a_tenth_of_the_pictures_is_kept_for_the_score_with_their_captions(
    tmp_path: Path, count: int, kept: int
) -> None:
    source = tmp_path / "given.zip"
    source.write_bytes(stand_in_pictures(count, 64, 64))
    train, test = split_pictures(source, tmp_path)
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(train) as rest:
        left = set(rest.namelist())
        assert len(left) == 2 * (count - kept)
        assert all(rest.read(name) == given.read(name) for name in left)
        others = {given.read(name) for name in set(given.namelist()) - left}
    held = pictures_in(test)
    assert len(held) == kept
    assert {file.read_bytes() for path in held for file in (path, path.with_suffix(".txt"))} == others


def test_pictures_may_lie_in_a_folder_and_lack_captions(tmp_path: Path) -> None:
    source = tmp_path / "given.zip"
    with zipfile.ZipFile(tmp_path / "given.zip", "w") as archive:
        made = tmp_path / "made.zip"
        made.write_bytes(stand_in_pictures(4, 64, 64))
        for number in range(1, 5):
            archive.writestr(f"some folder/{number}.PNG", zipfile.ZipFile(made).read(f"{number}.png"))
    train, test = split_pictures(source, tmp_path)
    assert [path.name for path in pictures_in(test)] == ["1.png"]
    assert len(zipfile.ZipFile(train).namelist()) == 3


def test_one_picture_is_too_few(tmp_path: Path) -> None:
    source = tmp_path / "given.zip"
    source.write_bytes(stand_in_pictures(1, 64, 64))
    with pytest.raises(BadInput, match="1 picture, which validators would keep"):
        split_pictures(source, tmp_path)


def test_one_row_is_too_few(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "1"}]', encoding="utf-8")
    with pytest.raises(BadInput, match="1 row, which is kept for the score"):
        split_rows(path)


def test_made_up_pictures_are_kept_back_too(tmp_path: Path) -> None:
    train, test = training_data(TASKS["krea2"], RehearsalInputs(), tmp_path)
    assert len(zipfile.ZipFile(train).namelist()) // 2 + len(pictures_in(test)) == PICTURES


def test_a_tenth_of_the_rows_is_kept_for_the_score(tmp_path: Path) -> None:
    rows = [{"text": str(number)} for number in range(30)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    train, test = split_rows(path)
    assert (len(train), len(test)) == (27, 3)
    assert sorted((*train, *test), key=str) == sorted(rows, key=str)
