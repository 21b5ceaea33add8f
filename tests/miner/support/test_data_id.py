"""The data directory's id."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from miner.support.data_id import DATA_ID_FILE, DataIdUnusable, data_id


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    first = data_id(tmp_path / "new")
    assert data_id(tmp_path / "new") == first
    assert data_id(tmp_path / "other") != first
    assert [path.name for path in (tmp_path / "new").iterdir()] == [DATA_ID_FILE]


def test_concurrent_callers_get_the_same_id(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(lambda _: data_id(tmp_path), range(16)))) == 1


@pytest.mark.parametrize("content", ["", "short", "../../etc", "0" * 17])
def test_an_invalid_id_is_rejected(content: str, tmp_path: Path) -> None:
    (tmp_path / DATA_ID_FILE).write_text(content)
    with pytest.raises(DataIdUnusable, match="16 hexadecimal"):
        data_id(tmp_path)


def test_an_unwritable_data_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataIdUnusable, match="DATA_DIR"):
        data_id(tmp_path / "file")
