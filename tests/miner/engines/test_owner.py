"""The data folder's own name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from miner.engines.owner import FILE_NAME, DataIdUnusable, data_id


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    first = data_id(tmp_path / "new")
    assert data_id(tmp_path / "new") == first
    assert data_id(tmp_path / "other") != first
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE_NAME]


def test_all_who_ask_at_once_get_the_same(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(data_id(tmp_path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


@pytest.mark.parametrize("content", ["", "short", "../../etc", "0" * 17])
def test_a_name_that_is_none_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(DataIdUnusable, match="16 hexadecimal"):
        data_id(tmp_path)


def test_a_folder_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataIdUnusable, match="DATA_DIR"):
        data_id(tmp_path / "file")
