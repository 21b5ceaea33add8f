"""Saved tasks of the field, beside our own plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miner.cli.render.field import field_pages
from miner.tournament.field.entries import NoField, read_field
from miner.tournament.rules import training_pictures
from tests.doubles.field import ai_toolkit_config, image_task

TASK = "11111111-2222-4333-8444-555555555555"


def saved(directory: Path) -> Path:
    folder = directory / "tourn_1" / TASK
    entries = [
        {"hotkey": "5First" + "x" * 42, "repo": "o/first", "rank": 1, "test_loss": 0.04},
        {"hotkey": "5Second" + "x" * 41, "repo": "o/second", "rank": 2, "test_loss": 0.05},
        {"hotkey": "../../..", "repo": "o/third", "rank": 3, "test_loss": 0.06},
    ]
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(image_task(TASK, hotkey_details=entries)))
    (folder / "5Firstxx").mkdir()
    (folder / "5Firstxx" / "config.yaml").write_bytes(ai_toolkit_config(lr_scheduler=None))
    return directory


def test_a_saved_task_with_its_entries_in_order(tmp_path: Path) -> None:
    (task,) = read_field(saved(tmp_path))
    assert (task.family, task.pictures, task.task.hours) == ("krea2", 18, 0.75)
    assert [one.entry.rank for one in task.entries] == [1, 2]
    assert task.entries[0].recipe.rate_sum == pytest.approx(700 * 3e-4)
    assert task.entries[1].recipe.steps is None


def test_our_own_plan_stands_beside_it(tmp_path: Path) -> None:
    (task,) = read_field(saved(tmp_path))
    ours, why = task.own_plan()
    assert ours is not None, why
    assert ours.trainer == "pictures"
    assert ours.lora_rank
    assert ours.rate_sum == pytest.approx(ours.lr * ours.steps, rel=0.6)  # type: ignore[operator]


def test_folders_of_own_files_are_a_task_of_each_family(tmp_path: Path) -> None:
    for name, arch in {
        "mine": "zimage:turbo",
        "other": "zimage",
        "third": "qwen_image",
        "new": "wan21",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_bytes(ai_toolkit_config(arch=arch))
    tasks = read_field(tmp_path)
    found = {task.family: [one.entry.hotkey for one in task.entries] for task in tasks}
    assert found == {"qwen-image": ["third"], "wan21": ["new"], "z-image": ["mine", "other"]}
    assert tasks[0].entries[0].recipe.steps == 700
    assert tasks[0].own_plan()[1] == "the task is not known: there is no task.json"


def test_an_entry_whose_files_cannot_be_read_is_named(tmp_path: Path) -> None:
    hostile = {
        "bomb": b"a: &a [x]\nb: &b [*a, *a]\n<<: *b\n",
        "code": b"!!python/object/apply:os.system ['true']",
        "escape": b"config: \x1b[2J",
        "other": b"model: of somebody's own",
    }
    for name, content in hostile.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_bytes(content)
    (task,) = read_field(tmp_path)
    notes = {one.entry.hotkey: one.recipe.notes for one in task.entries}
    assert notes.keys() == hostile.keys()
    assert all(
        len(found) == 1 and found[0].startswith("config.yaml cannot be read: ") for found in notes.values()
    )
    assert not any("\x1b" in note for (note,) in notes.values())
    shown = [str(page) for page in field_pages([task], 3)]
    assert {
        name for name in hostile if any(f"{name}: config.yaml cannot be read" in one for one in shown)
    } == {*hostile}


def test_a_task_of_the_future_has_no_plan_and_says_why(tmp_path: Path) -> None:
    for name, more in {"a": {"model_type": "newcomer"}, "b": {"task_type": "SongTask"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.json").write_text(json.dumps(image_task(name, **more)))
    reasons = sorted(task.own_plan()[1] for task in read_field(tmp_path))
    assert reasons == ["SongTask is not a kind that we plan", "newcomer is not a family that we plan"]


def test_an_empty_directory_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoField, match=r"task\.json, config\.yaml"):
        read_field(tmp_path)
    with pytest.raises(NoField, match="field pull"):
        read_field(tmp_path / "nowhere")
    (tmp_path / "task.json").write_text("{")
    with pytest.raises(NoField, match="cannot be read"):
        read_field(tmp_path)


def test_validators_keep_a_tenth_of_the_pictures() -> None:
    assert [training_pictures(pictures) for pictures in (10, 14, 20, 21, 50)] == [9, 12, 18, 18, 45]
