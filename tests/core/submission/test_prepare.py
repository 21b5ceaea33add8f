from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.submission.check import Base, examine
from core.submission.prepare import mend_in_place, prepare
from tests.core.submission import folders
from tests.core.submission.folders import BASE_ID, write


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(BASE_ID, folders.base(tmp_path / "base"))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_adapter_gets_its_real_base_and_a_clean_card_and_the_folder_stays(
    tmp_path: Path, base: Base
) -> None:
    folder = folders.adapter(tmp_path / "a")
    before = snapshot(folder)
    prepared = prepare(folder, base)
    config = json.loads(bytes(prepared.items["adapter_config.json"]))  # type: ignore[arg-type]
    assert config["base_model_name_or_path"] == BASE_ID
    assert config["revision"] is None
    assert config["r"] == 4
    shown = bytes(prepared.items["README.md"]).decode()  # type: ignore[arg-type]
    assert "/home" not in shown
    assert "license: apache-2.0" in shown
    assert {fault.where for fault in prepared.mended} == {"adapter_config.json", "README.md"}
    assert snapshot(folder) == before


def test_a_full_models_configuration_is_mended_from_the_base(tmp_path: Path, base: Base) -> None:
    prepared = prepare(folders.full(tmp_path / "f"), base)
    assert json.loads(bytes(prepared.items["config.json"]))["rope_theta"] == 500000.0  # type: ignore[arg-type]
    (why,) = [str(fault) for fault in prepared.mended if fault.where == "config.json"]
    assert "rope_theta" in why


def test_what_needs_no_mending_is_published_as_it_is(tmp_path: Path, base: Base) -> None:
    folder = folders.adapter(tmp_path / "a")
    mend_in_place(folder, base)
    prepared = prepare(folder, base, keep_card=True)
    assert prepared.mended == ()
    assert prepared.items["adapter_config.json"] == folder / "adapter_config.json"


@pytest.mark.parametrize("depth", [1, 200, 450, 700, 950, 5000])
def test_an_odd_configuration_is_mended_or_left_and_breaks_nothing(
    tmp_path: Path, base: Base, depth: int
) -> None:
    folder = folders.adapter(tmp_path / "a")
    odd = '{"half": "\\ud800", "deep": ' + "[" * depth + "]" * depth + "}"
    write(folder, {"adapter_config.json": odd})
    item = prepare(folder, base).items["adapter_config.json"]
    if isinstance(item, bytes):
        assert json.loads(item)["half"] == "\ud800"
        assert json.loads(item)["base_model_name_or_path"] == BASE_ID


def test_a_persons_card_is_kept_when_it_is_good_and_replaced_when_not(tmp_path: Path, base: Base) -> None:
    folder = folders.adapter(tmp_path / "a")
    write(folder, {"README.md": f"---\nbase_model: {BASE_ID}\n---\nMine.\n"})
    assert prepare(folder, base, keep_card=True).items["README.md"] == folder / "README.md"
    write(folder, {"README.md": "---\nbase_model: ./here\n---\nMine.\n"})
    assert isinstance(prepare(folder, base, keep_card=True).items["README.md"], bytes)


def test_without_a_known_base_nothing_is_mended(tmp_path: Path) -> None:
    assert prepare(folders.adapter(tmp_path / "a"), Base()).mended == ()


def test_a_trainer_mends_its_own_folder_which_is_good_then(tmp_path: Path, base: Base) -> None:
    for folder in (folders.adapter(tmp_path / "a"), folders.full(tmp_path / "f", parts=2)):
        mend_in_place(folder, base)
        again = prepare(folder, Base(BASE_ID), keep_card=True)
        items = {name: item for name, item in again.items.items() if isinstance(item, Path)}
        assert items == again.items
        assert examine(items, again.kind, base).faults == ()
        assert not list(folder.rglob("*.tmp"))


def test_a_damaged_configuration_is_left_for_the_check_to_tell(tmp_path: Path, base: Base) -> None:
    folder = write(folders.adapter(tmp_path / "a"), {"adapter_config.json": "{"})
    assert prepare(folder, base).items["adapter_config.json"] == folder / "adapter_config.json"
