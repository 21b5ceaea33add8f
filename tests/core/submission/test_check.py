from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.domain.tasks import TaskType
from core.submission import check as module
from core.submission.check import BaseModelRef, SubmissionReport, examine
from core.submission.faults import FaultKind
from core.submission.prepare import prepare
from tests.core.submission import folders
from tests.core.submission.folders import BASE_ID, adapter, bf16, full, image, safetensors, write
from tests.doubles.each import each

NAN = ("F32", [1], struct.pack("<f", float("nan")))
ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"


def checked(folder: Path, base: BaseModelRef) -> SubmissionReport:
    prepared = prepare(folder, base)
    return examine(prepared.items, prepared.kind, base)


def kinds(report: SubmissionReport) -> list[FaultKind]:
    return [fault.kind for fault in report.faults]


@pytest.mark.parametrize("make", [adapter, full, lambda folder: full(folder, parts=3), image])
def test_what_engines_leave_can_be_published_after_mending(
    make: Callable[[Path], Path], tmp_path: Path, base: BaseModelRef
) -> None:
    report = checked(make(tmp_path / "new"), base)
    assert report.faults == ()
    assert report.model_hash is not None
    assert report.parameters > 0


def test_without_mending_the_local_name_of_the_base_is_a_fault(tmp_path: Path, base: BaseModelRef) -> None:
    folder = adapter(tmp_path / "a")
    items = {name: folder / name for name in (ADAPTER, WEIGHTS, "README.md")}
    report = examine(items, prepare(folder, base).kind, base)
    assert kinds(report) == [FaultKind.WRONG_BASE, FaultKind.BAD_CARD]
    assert BASE_ID in str(report.faults[0])


def test_an_empty_folder_lacks_configuration_and_weights(tmp_path: Path, base: BaseModelRef) -> None:
    (tmp_path / "e").mkdir()
    report = checked(tmp_path / "e", base)
    assert [fault.where for fault in report.faults] == ["config.json", "model.safetensors"]
    assert report.model_hash is None


@pytest.mark.parametrize(
    ("make", "files", "expected"),
    [
        (adapter, {WEIGHTS: safetensors({"a": ("BF16", [0, 4], b"")})}, FaultKind.NO_WEIGHTS),
        (adapter, {WEIGHTS: safetensors({"a": bf16(3)})[:-1]}, FaultKind.BAD_HEADER),
        (adapter, {WEIGHTS: safetensors({"model.lm_head.weight": bf16(70, 4)})}, FaultKind.VOCABULARY),
        (adapter, {WEIGHTS: safetensors({"model.lm_head.lora_A.weight": bf16(4, 16)})}, None),
        (adapter, {ADAPTER: "{"}, FaultKind.BAD_JSON),
        (adapter, {ADAPTER: "[]"}, FaultKind.BAD_JSON),
        (adapter, {ADAPTER: "[" * 100_000}, FaultKind.BAD_JSON),
        (adapter, {ADAPTER: {"base_model_name_or_path": BASE_ID}}, FaultKind.BAD_JSON),
        (full, {"model.safetensors": safetensors({"model.a": NAN})}, FaultKind.NOT_FINITE),
        (full, {"model.safetensors": safetensors({"m._orig_mod.w": bf16(3)})}, FaultKind.WRAPPED),
        (full, {"model.safetensors": safetensors({"_fsdp_wrapped_module.w": bf16(3)})}, FaultKind.WRAPPED),
        (full, {"model.safetensors": safetensors({"module.model.w": bf16(3)})}, FaultKind.WRAPPED),
    ],
    ids=[
        "no weights",
        "weights cut off",
        "resized embeddings",
        "a LoRA of the embeddings",
        "no JSON",
        "no object",
        "nested too deeply",
        "no type of adapter",
        "not finite",
        "compiled",
        "sharded",
        "distributed",
    ],
)
def test_one_bad_file_is_one_fault(
    make: Callable[[Path], Path],
    files: dict[str, Any],
    expected: FaultKind | None,
    tmp_path: Path,
    base: BaseModelRef,
) -> None:
    report = checked(write(make(tmp_path / "new"), files), base)
    assert kinds(report) == ([expected] if expected else [])


def test_weights_that_are_not_finite_are_named(tmp_path: Path, base: BaseModelRef) -> None:
    weights = safetensors({"model.a.weight": NAN, "model.b.weight": bf16(3)})
    report = checked(write(full(tmp_path / "f"), {"model.safetensors": weights}), base)
    assert "NaN or infinity in 1 of 2 tensors (model.a.weight)" in str(report.faults[0])


@each("missing", [ADAPTER, WEIGHTS])
def test_half_an_adapter_is_refused(tmp_path: Path, base: BaseModelRef, missing: str) -> None:
    folder = adapter(tmp_path / "a")
    (folder / missing).unlink()
    assert FaultKind.MISSING in kinds(checked(folder, base))


def test_parts_must_be_of_one_model_and_all_there(tmp_path: Path, base: BaseModelRef) -> None:
    folder = full(tmp_path / "f", parts=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert kinds(checked(folder, base))[0] is FaultKind.BAD_INDEX
    of_two_models = full(full(tmp_path / "g", parts=3), parts=2)
    assert FaultKind.BAD_INDEX in kinds(checked(of_two_models, base))
    whole_and_in_parts = full(full(tmp_path / "h", parts=2))
    assert FaultKind.BOTH_KINDS in kinds(checked(whole_and_in_parts, base))


def test_the_index_must_name_every_tensor_where_it_is(tmp_path: Path, base: BaseModelRef) -> None:
    folder = full(tmp_path / "f", parts=2)
    index = json.loads((folder / INDEX).read_bytes())
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    report = checked(write(folder, {INDEX: index}), base)
    assert kinds(report) == [FaultKind.BAD_INDEX]
    assert "1 tensors elsewhere than it says, the first model.norm.weight" in str(report.faults[0])
    assert kinds(checked(write(folder, {INDEX: {"weight_map": {"a": 1}}}), base)) == [FaultKind.BAD_INDEX]
    assert kinds(checked(write(folder, {INDEX: "nope"}), base)) == [FaultKind.BAD_JSON]
    (folder / INDEX).unlink()
    assert kinds(checked(folder, base)) == [FaultKind.MISSING]


def test_a_model_that_differs_from_its_base_is_a_fault(tmp_path: Path, base: BaseModelRef) -> None:
    folder = full(tmp_path / "f", rows=65, hidden_size=17, max_position_embeddings=64)
    expected = [FaultKind.CONFIG_CHANGED, FaultKind.CONTEXT, FaultKind.VOCABULARY, FaultKind.VOCABULARY]
    assert kinds(checked(folder, base)) == expected


def test_without_a_base_the_rest_is_checked(tmp_path: Path) -> None:
    assert kinds(checked(full(tmp_path / "f", rows=65), BaseModelRef())) == [FaultKind.VOCABULARY] * 2
    assert checked(adapter(tmp_path / "a"), BaseModelRef()).faults[0].kind is FaultKind.BAD_CARD


def test_a_bases_configuration_is_read_through_the_links_of_the_hubs_cache_if_there_is_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to(folders.base(tmp_path / "blobs") / "config.json")
    config = BaseModelRef("a/b", tmp_path / "snapshot").config()
    assert config is not None
    assert config["vocab_size"] == folders.ROWS
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert BaseModelRef("a/b", tmp_path / "model.safetensors").config() is None
    (tmp_path / "config.json").write_text("nope")
    assert BaseModelRef("a/b", tmp_path).config() is None


def test_more_than_any_model_is_refused_without_reading_it(tmp_path: Path, base: BaseModelRef) -> None:
    folder = image(tmp_path / "i")
    with (folder / "last.safetensors").open("r+b") as file:
        file.truncate(401 * 10**9)
    assert kinds(checked(folder, base)) == [FaultKind.TOO_MUCH]


def test_a_link_out_of_the_folder_is_neither_followed_nor_published(
    tmp_path: Path, base: BaseModelRef
) -> None:
    folder = adapter(tmp_path / "a")
    (folder / ADAPTER).unlink()
    (folder / ADAPTER).symlink_to(write(tmp_path / "out", {"key": "secret"}) / "key")
    prepared = prepare(folder, base, TaskType.INSTRUCT)
    assert ADAPTER not in prepared.items
    assert FaultKind.NOT_A_FILE in [fault.kind for fault in prepared.left_out]


def test_headers_that_would_fill_the_memory_together_are_refused(
    tmp_path: Path, base: BaseModelRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HEADERS", 100)
    report = checked(adapter(tmp_path / "a"), base)
    assert kinds(report) == [FaultKind.TOO_MUCH]
    assert report.model_hash is None
