from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.doubles.files import FileStore


@pytest.fixture
def store() -> Iterator[FileStore]:
    with FileStore() as store:
        yield store
