"""The cache of a task as validators lay it out, and what is put in place of an operator's own data."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from core.data.pictures import inspect_picture_zip
from core.domain.tasks import dataset_kind
from miner.tournament.rehearsal.cache_layout import BadInput, CacheLayout, RehearsedTask, lay_out_cache
from miner.tournament.rehearsal.inputs import DUMMY_RECORDS, PICTURES, stand_in_pictures, stand_in_rows
from miner.tournament.rules import TASKS, anonymous_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"_name_or_path": "org/name", "model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors").chmod(0o600)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def rehearsed(kind: str) -> RehearsedTask:
    return RehearsedTask(TASKS[kind], "t1", "5Grehearsal", "org/name", repository="r", hours=1.0)


def lay_out(tmp_path: Path, model: Path, kind: str, hub: Path | None = None) -> CacheLayout:
    data = tmp_path / "data"
    data.write_text("[]")
    return lay_out_cache(
        tmp_path / "cache",
        rehearsed(kind),
        model=model,
        data=data,
        hub_cache=hub,
    )


def test_a_texts_model_has_no_name_and_statistics_lie_beside_the_data(tmp_path: Path, model: Path) -> None:
    found = lay_out(tmp_path, model, "instruct")
    assert found.model == tmp_path / "cache/models" / anonymous_model("org/name")
    assert json.loads((found.model / "config.json").read_text()) == {"model_type": "llama"}
    assert "_name_or_path" in json.loads((model / "config.json").read_text())
    assert found.data == tmp_path / "cache/datasets/t1_train_data.json"
    assert found.statistics == tmp_path / "cache/baseline_stats_t1_5Grehear.json"


def test_files_of_their_owner_alone_are_copied_for_any_user(tmp_path: Path, model: Path) -> None:
    found = lay_out(tmp_path, model, "instruct")
    assert (found.model / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert (model / "model.safetensors").stat().st_mode & 0o777 == 0o600
    assert (found.model / "tokenizer.json").samefile(model / "tokenizer.json")


def test_any_user_may_enter_the_folders_whatever_the_operators_habit(tmp_path: Path, model: Path) -> None:
    before = os.umask(0o077)
    try:
        found = lay_out(tmp_path, model, "instruct")
    finally:
        os.umask(before)
    assert {Path(folder).stat().st_mode & 0o777 for folder, _, _ in os.walk(found.root)} == {0o755}


def test_a_picture_tasks_model_keeps_its_name_and_its_parts_lie_flat(tmp_path: Path, model: Path) -> None:
    hub = tmp_path / "hub"
    for repository, name in (
        ("Qwen--Qwen3-VL-8B-Instruct", "config.json"),
        ("ostris--ideogram_4_unconditional_lora", "ideogram_4_unconditional_lora_r16.safetensors"),
    ):
        blob = hub / f"models--{repository}" / "blobs" / "1"
        blob.parent.mkdir(parents=True)
        blob.write_text("content")
        snapshot = hub / f"models--{repository}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / name).symlink_to(blob)
    found = lay_out(tmp_path, model, "ideogram4", hub)
    assert found.model == tmp_path / "cache/models/org--name"
    assert found.data.name == "t1_tourn.zip"
    assert found.statistics is None
    cache = tmp_path / "cache/hf_cache"
    assert (cache / "Qwen--Qwen3-VL-8B-Instruct/config.json").read_text() == "content"
    assert (cache / "ideogram_4_unconditional_lora_r16.safetensors").read_text() == "content"
    assert not found.missing


def test_what_the_hub_cache_lacks_is_named(tmp_path: Path, model: Path) -> None:
    assert lay_out(tmp_path, model, "krea2").missing == ("/cache/hf_cache/Qwen--Qwen3-VL-4B-Instruct",)


def test_a_directory_without_a_configuration_is_no_texts_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        lay_out(tmp_path, tmp_path, "instruct")


@pytest.mark.parametrize("kind", ["instruct", "chat", "dpo", "grpo", "continuous", "instruct-kl"])
def test_made_up_rows_have_the_columns_of_their_type(kind: str) -> None:
    task = TASKS[kind]
    rows = stand_in_rows(task, 20, seed=1)
    assert rows == stand_in_rows(task, 20, seed=1)
    assert rows != stand_in_rows(task, 20, seed=2)
    columns = [value for key, value in task.dataset.items() if key in _COLUMNS and value]
    assert all(set(columns) <= set(row) for row in rows)
    assert dataset_kind(dict(task.dataset)) is not None


_COLUMNS = {
    "field_instruction",
    "field_input",
    "field_output",
    "field_prompt",
    "field_chosen",
    "field_rejected",
    "chat_column",
}


def test_an_environments_data_are_one_sentence() -> None:
    rows = stand_in_rows(TASKS["environment"], 5, seed=1)
    assert len(rows) == DUMMY_RECORDS
    assert len({row["prompt"] for row in rows}) == 1


def test_made_up_pictures_are_a_zip_that_trainings_read(tmp_path: Path) -> None:
    path = tmp_path / "pictures.zip"
    path.write_bytes(stand_in_pictures())
    contents = inspect_picture_zip(path)
    assert (len(contents.pairs), contents.captioned) == (PICTURES, PICTURES)
    assert zipfile.ZipFile(path).testzip() is None


def test_requested_datasets_lie_under_their_names(tmp_path: Path, model: Path) -> None:
    dataset = tmp_path / "poker"
    (dataset / "data").mkdir(parents=True)
    (dataset / "data/train.jsonl").write_text("{}")
    data = tmp_path / "data.json"
    data.write_text("[]")
    lay_out_cache(
        tmp_path / "cache",
        rehearsed("environment"),
        model=model,
        data=data,
        datasets={"RZ412/PokerBench": dataset},
    )
    assert (tmp_path / "cache/miner_datasets/RZ412--PokerBench/data/train.jsonl").read_text() == "{}"
