from __future__ import annotations

from pathlib import Path

import pytest

from core.submission.check import BaseModelRef
from tests.core.submission import folders


@pytest.fixture
def base(tmp_path: Path) -> BaseModelRef:
    return BaseModelRef(folders.BASE_ID, folders.base(tmp_path / "base"))
