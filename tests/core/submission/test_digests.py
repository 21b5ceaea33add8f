from __future__ import annotations

import hashlib
import math
import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.submission import digests as module
from core.submission.digests import NOT_FINITE_TESTS, counts_for_hash, digest_file, model_hash
from core.submission.safetensors import BadHeader
from tests.core.submission.folders import HASHED_NAMES, bf16, safetensors, validators_hash, write


def put(tmp_path: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_weights_and_other_files_get_the_hash_of_all_their_bytes(tmp_path: Path) -> None:
    for name, content in (
        ("model.safetensors", safetensors({"a": bf16(300, 7000), "b": ("I8", [5], b"12345")})),
        ("other.json", os.urandom(module.BLOCK + 5)),
        ("empty.txt", b""),
    ):
        seen: list[int] = []
        digest = digest_file(put(tmp_path, content, name), seen.append)
        assert digest.sha256 == hashlib.sha256(content).hexdigest()
        assert digest.size == sum(seen) == len(content)
        assert digest.not_finite_count == 0


@pytest.mark.parametrize("at", [0, module.BLOCK // 2 - 1, module.BLOCK // 2, 2 * module.BLOCK // 2 + 3])
def test_one_bad_number_anywhere_in_a_large_tensor_is_found(tmp_path: Path, at: int) -> None:
    dtype, shape, content = bf16(3, module.BLOCK // 2)
    raw = bytearray(content)
    raw[2 * at : 2 * at + 2] = struct.pack("<f", float("inf"))[2:]
    weights = safetensors({"a": bf16(9), "bad": (dtype, shape, bytes(raw)), "c": bf16(9)})
    digest = digest_file(put(tmp_path, weights))
    assert (digest.not_finite, digest.not_finite_count) == (("bad",), 1)


def test_many_bad_tensors_are_counted_and_a_few_named(tmp_path: Path) -> None:
    nan = ("F32", [1], struct.pack("<f", float("nan")))
    digest = digest_file(put(tmp_path, safetensors({f"t{n}": nan for n in range(9)})))
    assert (digest.not_finite_count, len(digest.not_finite)) == (9, module.MAX_NAMED)


def test_a_file_that_is_written_to_meanwhile_is_not_trusted(tmp_path: Path) -> None:
    path = put(tmp_path, safetensors({"a": bf16(10)}))

    def written_to(_: int) -> None:
        with path.open("r+b") as file:
            file.write(b"x")
        os.utime(path, ns=(1, 1))

    with pytest.raises(OSError, match="written to while it was read"):
        digest_file(path, written_to)


def test_a_file_that_is_cut_meanwhile_is_not_trusted(tmp_path: Path) -> None:
    path = put(tmp_path, safetensors({"a": bf16(module.BLOCK), "b": bf16(module.BLOCK)}))
    with pytest.raises(OSError, match="cut while it was read"):
        digest_file(path, lambda _: os.truncate(path, 2000))


def test_a_weights_file_must_contain_weights(tmp_path: Path) -> None:
    with pytest.raises(BadHeader):
        digest_file(put(tmp_path, b"no weights at all"))


FORMATS = {"F16": "<e", "F32": "<f", "F64": "<d"}


def value_of(dtype: str, item: bytes) -> float:
    if dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + item)[0])
    return float(struct.unpack(FORMATS[dtype], item)[0])


@pytest.mark.parametrize(("dtype", "width"), [("BF16", 2), ("F32", 4), ("F64", 8)])
@given(data=st.data())
def test_a_number_that_is_not_finite_is_found_wherever_it_is(
    dtype: str, width: int, data: st.DataObject
) -> None:
    test = NOT_FINITE_TESTS[dtype]
    items = data.draw(st.lists(st.binary(min_size=width, max_size=width), max_size=20))
    expected = any(not math.isfinite(value_of(dtype, item)) for item in items)
    assert test(b"".join(items)) is expected


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_number_of_sixteen_bits_is_classified(dtype: str) -> None:
    test = NOT_FINITE_TESTS[dtype]
    for number in range(1 << 16):
        item = number.to_bytes(2, "little")
        assert test(item) is not math.isfinite(value_of(dtype, item))


def test_eight_bit_numbers_follow_their_formats_rules() -> None:
    def bad(dtype: str) -> set[int]:
        return {byte for byte in range(256) if NOT_FINITE_TESTS[dtype](bytes([byte]))}

    assert bad("F8_E4M3") == {0x7F, 0xFF}
    assert bad("F8_E5M2") == {0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF}
    assert bad("F8_E8M0") == {0xFF}
    assert bad("F8_E4M3FNUZ") == bad("F8_E5M2FNUZ") == {0x80}


def test_whole_numbers_are_always_finite() -> None:
    assert not NOT_FINITE_TESTS.keys() & {"I8", "U8", "I64", "BOOL", "F4"}


NAMES = [
    *HASHED_NAMES,
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model-.safetensors",
    "pytorch_model-1.bin",
    "checkpoint/last.safetensors",
    "checkpoint/last-000004.safetensors",
    "checkpoint/checkpoint-3.safetensors",
    "checkpoints/last.safetensors",
    "last.safetensors",
    "last-1.safetensors",
    "README.md",
    "tokenizer.json",
    "sub/config.json",
    "sub/model-00001-of-00002.safetensors",
    "checkpoint/deep/last-1.safetensors",
    "xmodel.safetensors",
    "model.safetensors.index.json",
    "model-a b\u00fc.safetensors",
]


@given(st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=5), max_size=8))
def test_the_hash_is_the_one_a_validator_takes_of_the_same_files(files: dict[str, bytes]) -> None:
    known = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    with tempfile.TemporaryDirectory() as folder:
        assert model_hash(known) == validators_hash(write(Path(folder), files))


def test_a_known_value() -> None:
    files = {"config.json": (1, "a" * 64), "adapter_config.json": (1, "b" * 64), "README.md": (1, "c" * 64)}
    text = "adapter_config.json:" + "b" * 64 + "config.json:" + "a" * 64
    assert model_hash(files) == hashlib.sha256(text.encode()).hexdigest()


def test_only_files_that_count_are_hashed_and_a_star_does_not_match_a_slash() -> None:
    assert model_hash({"README.md": (5, "a" * 64), "config.json": (0, "b" * 64)}) is None
    assert counts_for_hash("model-1.safetensors")
    assert not counts_for_hash("model-x/y.safetensors")
    assert not counts_for_hash("a/model.safetensors")
