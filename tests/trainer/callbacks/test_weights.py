"""Whole weight files, told from their headers."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer.callbacks.simulated import safetensors
from trainer.callbacks.weights import header, is_whole


def test_a_whole_file_has_a_header_and_tensors(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(safetensors())
    found = header(file)
    assert found is not None
    assert list(found) == ["weight"]
    assert is_whole(file)


def test_a_file_without_tensors_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert not is_whole(file)


def test_a_missing_file_is_not_whole(tmp_path: Path) -> None:
    assert not is_whole(tmp_path / "nothing")
    assert not is_whole(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.binary(max_size=300) | st.integers(0, len(safetensors()) - 1).map(lambda n: safetensors()[:n]))
def test_whatever_else_lies_there_is_not_whole_and_no_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "weights"
    file.write_bytes(content)
    assert not is_whole(file)
