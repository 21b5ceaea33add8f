from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import pytest

from core.submission import weigh as module
from core.submission.safetensors import BadHeader
from core.submission.weigh import weigh
from tests.core.submission.folders import bf16, safetensors


def put(tmp_path: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_weights_and_other_files_get_the_hash_of_all_their_bytes(tmp_path: Path) -> None:
    for name, content in (
        ("model.safetensors", safetensors({"a": bf16(300, 7000), "b": ("I8", [5], b"12345")})),
        ("other.json", os.urandom(module.PIECE + 5)),
        ("empty.txt", b""),
    ):
        seen: list[int] = []
        found = weigh(put(tmp_path, content, name), seen.append)
        assert found.sha256 == hashlib.sha256(content).hexdigest()
        assert found.size == sum(seen) == len(content)
        assert found.not_finite_count == 0


@pytest.mark.parametrize("at", [0, module.PIECE // 2 - 1, module.PIECE // 2, 2 * module.PIECE // 2 + 3])
def test_one_bad_number_anywhere_in_a_large_tensor_is_found(tmp_path: Path, at: int) -> None:
    dtype, shape, content = bf16(3, module.PIECE // 2)
    raw = bytearray(content)
    raw[2 * at : 2 * at + 2] = struct.pack("<f", float("inf"))[2:]
    found = weigh(put(tmp_path, safetensors({"a": bf16(9), "bad": (dtype, shape, bytes(raw)), "c": bf16(9)})))
    assert found.not_finite == ("bad",)
    assert found.not_finite_count == 1


def test_many_bad_tensors_are_counted_and_a_few_named(tmp_path: Path) -> None:
    nan = ("F32", [1], struct.pack("<f", float("nan")))
    found = weigh(put(tmp_path, safetensors({f"t{n}": nan for n in range(9)})))
    assert found.not_finite_count == 9
    assert len(found.not_finite) == module.MAX_NAMED


def test_a_file_that_is_written_to_meanwhile_is_not_trusted(tmp_path: Path) -> None:
    path = put(tmp_path, safetensors({"a": bf16(10)}))

    def written_to(_: int) -> None:
        with path.open("r+b") as file:
            file.write(b"x")
        os.utime(path, ns=(1, 1))

    with pytest.raises(OSError, match="written to while it was read"):
        weigh(path, written_to)


def test_a_file_that_is_cut_meanwhile_is_not_trusted(tmp_path: Path) -> None:
    path = put(tmp_path, safetensors({"a": bf16(module.PIECE), "b": bf16(module.PIECE)}))
    with pytest.raises(OSError, match="cut while it was read"):
        weigh(path, lambda _: os.truncate(path, 2000))


def test_what_calls_itself_weights_must_be_some(tmp_path: Path) -> None:
    with pytest.raises(BadHeader):
        weigh(put(tmp_path, b"no weights at all"))
