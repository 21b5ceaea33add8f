from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from core.domain.tasks import TaskType
from core.submission.check import BaseModelRef, examine
from core.submission.faults import FaultKind
from core.submission.prepare import check_submission, folder_model_hash, mend_in_place, prepare
from tests.core.submission import folders
from tests.core.submission.folders import BASE_ID, validators_hash, write


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_adapter_gets_its_real_base_and_a_clean_card_and_the_folder_stays(
    tmp_path: Path, base: BaseModelRef
) -> None:
    folder = folders.adapter(tmp_path / "a")
    before = snapshot(folder)
    prepared = prepare(folder, base)
    config = json.loads(bytes(prepared.items["adapter_config.json"]))
    assert config["base_model_name_or_path"] == BASE_ID
    assert config["revision"] is None
    assert config["r"] == 4
    shown = bytes(prepared.items["README.md"]).decode()
    assert "/home" not in shown
    assert "license: apache-2.0" in shown
    assert {fault.where for fault in prepared.mended} == {"adapter_config.json", "README.md"}
    assert snapshot(folder) == before


def test_a_full_models_configuration_is_mended_from_the_base(tmp_path: Path, base: BaseModelRef) -> None:
    prepared = prepare(folders.full(tmp_path / "f"), base)
    assert json.loads(bytes(prepared.items["config.json"]))["rope_theta"] == 500000.0
    (why,) = [str(fault) for fault in prepared.mended if fault.where == "config.json"]
    assert "rope_theta" in why


@pytest.mark.parametrize("depth", [1, 200, 450, 700, 950, 5000])
def test_a_strange_configuration_is_mended_or_left(tmp_path: Path, base: BaseModelRef, depth: int) -> None:
    folder = folders.adapter(tmp_path / "a")
    odd = '{"half": "\\ud800", "deep": ' + "[" * depth + "]" * depth + "}"
    write(folder, {"adapter_config.json": odd})
    item = prepare(folder, base).items["adapter_config.json"]
    if isinstance(item, bytes):
        assert json.loads(item)["half"] == "\ud800"
        assert json.loads(item)["base_model_name_or_path"] == BASE_ID


def test_a_persons_card_is_kept_when_it_is_good_and_replaced_when_not(
    tmp_path: Path, base: BaseModelRef
) -> None:
    folder = folders.adapter(tmp_path / "a")
    write(folder, {"README.md": f"---\nbase_model: {BASE_ID}\n---\nMine.\n"})
    assert prepare(folder, base, keep_card=True).items["README.md"] == folder / "README.md"
    write(folder, {"README.md": "---\nbase_model: ./here\n---\nMine.\n"})
    assert isinstance(prepare(folder, base, keep_card=True).items["README.md"], bytes)


def test_without_a_known_base_nothing_is_mended(tmp_path: Path) -> None:
    assert prepare(folders.adapter(tmp_path / "a"), BaseModelRef()).mended == ()


def test_a_mended_folder_has_no_faults(tmp_path: Path, base: BaseModelRef) -> None:
    for folder in (folders.adapter(tmp_path / "a"), folders.full(tmp_path / "f", parts=2)):
        mend_in_place(folder, base)
        again = prepare(folder, BaseModelRef(BASE_ID), keep_card=True)
        items = {name: item for name, item in again.items.items() if isinstance(item, Path)}
        assert items == again.items
        assert examine(items, again.kind, base).faults == ()
        assert not list(folder.rglob("*.tmp"))


def test_a_damaged_configuration_is_left_to_the_check(tmp_path: Path, base: BaseModelRef) -> None:
    folder = write(folders.adapter(tmp_path / "a"), {"adapter_config.json": "{"})
    assert prepare(folder, base).items["adapter_config.json"] == folder / "adapter_config.json"


def clean(folder: Path) -> Path:
    """As a trainer writes it: only what belongs to the adapter."""
    folders.adapter(folder)
    for name in ("debug.log", "config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "checkpoint-10")
    return folder


def test_the_hash_of_a_folder_ignores_files_that_do_not_count(tmp_path: Path) -> None:
    assert folder_model_hash(write(tmp_path / "x", {"README.md": "x", "config.json": ""})) is None


def test_a_mended_folder_passes_the_check_of_a_tournament(tmp_path: Path, base: BaseModelRef) -> None:
    folder = clean(tmp_path / "new")
    assert check_submission(folder, base, as_is=True).faults != ()
    mend_in_place(folder, base, TaskType.DPO)
    checked = check_submission(folder, base, as_is=True)
    assert checked.faults == ()
    assert checked.report.model_hash == validators_hash(folder) == folder_model_hash(folder)


def test_strays_that_a_tournament_would_upload_are_faults(tmp_path: Path, base: BaseModelRef) -> None:
    folder = write(clean(tmp_path / "new"), {"model.safetensors": b"x", "ref/config.json": "{}"})
    mend_in_place(folder, base, TaskType.DPO)
    kinds = {fault.kind for fault in check_submission(folder, base, as_is=True).faults}
    assert kinds == {FaultKind.BOTH_KINDS, FaultKind.STRAY}
