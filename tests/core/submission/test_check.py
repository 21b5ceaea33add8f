from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from core.domain.tasks import TaskType
from core.submission import check as module
from core.submission.check import BaseModelRef, SubmissionReport, examine
from core.submission.faults import FaultKind
from core.submission.prepare import prepare
from tests.core.submission import folders
from tests.core.submission.folders import BASE_ID, bf16, safetensors, write


@pytest.fixture
def base(tmp_path: Path) -> BaseModelRef:
    return BaseModelRef(BASE_ID, folders.base(tmp_path / "base"))


def checked(folder: Path, base: BaseModelRef, task_type: TaskType | None = None) -> SubmissionReport:
    prepared = prepare(folder, base, task_type)
    return examine(prepared.items, prepared.kind, base)


def kinds(report: SubmissionReport) -> list[FaultKind]:
    return [fault.kind for fault in report.faults]


def test_what_engines_leave_can_be_published_after_mending(tmp_path: Path, base: BaseModelRef) -> None:
    for folder in (
        folders.adapter(tmp_path / "a"),
        folders.full(tmp_path / "f"),
        folders.full(tmp_path / "p", parts=3),
        folders.image(tmp_path / "i"),
    ):
        found = checked(folder, base)
        assert found.faults == ()
        assert found.model_hash is not None
        assert found.parameters > 0


def test_without_mending_the_local_name_of_the_base_is_a_fault(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.adapter(tmp_path / "a")
    items = {
        name: folder / name for name in ("adapter_config.json", "adapter_model.safetensors", "README.md")
    }
    found = examine(items, prepare(folder, base).kind, base)
    assert kinds(found) == [FaultKind.WRONG_BASE, FaultKind.BAD_CARD]
    assert BASE_ID in str(found.faults[0])


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_refused(tmp_path: Path, base: BaseModelRef, missing: str) -> None:
    folder = folders.adapter(tmp_path / "a")
    (folder / missing).unlink()
    assert FaultKind.MISSING in kinds(checked(folder, base))


def test_an_empty_folder_lacks_configuration_and_weights(tmp_path: Path, base: BaseModelRef) -> None:
    (tmp_path / "e").mkdir()
    found = checked(tmp_path / "e", base)
    assert [fault.where for fault in found.faults] == ["config.json", "model.safetensors"]
    assert found.model_hash is None


def test_weights_that_are_not_finite_are_named(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.full(tmp_path / "f")
    nan = ("F32", [1], struct.pack("<f", float("nan")))
    write(folder, {"model.safetensors": safetensors({"model.a.weight": nan, "model.b.weight": bf16(3)})})
    found = checked(folder, base)
    assert kinds(found) == [FaultKind.NOT_FINITE]
    assert "NaN or infinity in 1 of 2 tensors (model.a.weight)" in str(found.faults[0])


@pytest.mark.parametrize(
    "name", ["model._orig_mod.layers.0.w", "_fsdp_wrapped_module.model.w", "module.model.w"]
)
def test_names_of_a_training_wrapper_are_faults(tmp_path: Path, base: BaseModelRef, name: str) -> None:
    folder = write(folders.full(tmp_path / "f"), {"model.safetensors": safetensors({name: bf16(3)})})
    assert kinds(checked(folder, base)) == [FaultKind.WRAPPED]


def test_resized_embeddings_are_faults_in_full_models_and_adapters(
    tmp_path: Path, base: BaseModelRef
) -> None:
    assert kinds(checked(folders.full(tmp_path / "f", rows=65), base)) == [FaultKind.VOCABULARY] * 2
    folder = folders.adapter(tmp_path / "a")
    weights = safetensors({"base_model.model.lm_head.weight": bf16(70, 4)})
    write(folder, {"adapter_model.safetensors": weights})
    assert kinds(checked(folder, base)) == [FaultKind.VOCABULARY]


def test_a_lora_of_the_embeddings_is_not_mistaken_for_them(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.adapter(tmp_path / "a")
    weights = safetensors({"base_model.model.lm_head.lora_A.weight": bf16(4, 16)})
    write(folder, {"adapter_model.safetensors": weights})
    assert checked(folder, base).faults == ()


def test_empty_weights_are_a_fault(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.adapter(tmp_path / "a")
    write(folder, {"adapter_model.safetensors": safetensors({"a": ("BF16", [0, 4], b"")})})
    assert kinds(checked(folder, base)) == [FaultKind.NO_WEIGHTS]


def test_a_truncated_file_is_a_fault(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.adapter(tmp_path / "a")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert kinds(checked(folder, base)) == [FaultKind.BAD_HEADER]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("adapter_config.json", "{", FaultKind.BAD_JSON),
        ("adapter_config.json", "[]", FaultKind.BAD_JSON),
        ("adapter_config.json", "[" * 100_000, FaultKind.BAD_JSON),
        ("adapter_config.json", {"base_model_name_or_path": BASE_ID}, FaultKind.BAD_JSON),
    ],
)
def test_an_invalid_configuration_is_a_fault(
    tmp_path: Path, base: BaseModelRef, name: str, content: Any, kind: FaultKind
) -> None:
    folder = write(folders.adapter(tmp_path / "a"), {name: content})
    assert kinds(checked(folder, base)) == [kind]


def test_parts_must_be_of_one_model_and_all_there(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.full(tmp_path / "f", parts=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert kinds(checked(folder, base))[0] is FaultKind.BAD_INDEX
    folder = folders.full(folders.full(tmp_path / "g", parts=3), parts=2)
    assert FaultKind.BAD_INDEX in kinds(checked(folder, base))
    folder = folders.full(folders.full(tmp_path / "h", parts=2))
    assert FaultKind.BOTH_KINDS in kinds(checked(folder, base))


def test_the_index_must_name_every_tensor_where_it_is(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.full(tmp_path / "f", parts=2)
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_bytes())
    said["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(said))
    found = checked(folder, base)
    assert kinds(found) == [FaultKind.BAD_INDEX]
    assert "1 tensors elsewhere than it says, the first model.norm.weight" in str(found.faults[0])
    index.write_text(json.dumps({"weight_map": {"a": 1}}))
    assert kinds(checked(folder, base)) == [FaultKind.BAD_INDEX]
    index.unlink()
    assert kinds(checked(folder, base)) == [FaultKind.MISSING]


def test_a_configuration_that_differs_from_the_bases_is_a_fault(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.full(tmp_path / "f", hidden_size=17, max_position_embeddings=64)
    assert kinds(checked(folder, base)) == [FaultKind.CONFIG_CHANGED, FaultKind.CONTEXT]


def test_without_a_base_the_rest_is_checked(tmp_path: Path) -> None:
    folder = folders.full(tmp_path / "f", rows=65)
    assert kinds(checked(folder, BaseModelRef())) == [FaultKind.VOCABULARY] * 2
    assert checked(folders.adapter(tmp_path / "a"), BaseModelRef()).faults[0].kind is FaultKind.BAD_CARD


def test_a_base_that_is_a_single_file_or_damaged_has_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert BaseModelRef("a/b", tmp_path / "model.safetensors").config() is None
    (tmp_path / "config.json").write_text("nope")
    assert BaseModelRef("a/b", tmp_path).config() is None


def test_a_base_in_the_hubs_own_cache_is_read_through_its_links(tmp_path: Path) -> None:
    folders.base(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to(tmp_path / "blobs" / "config.json")
    config = BaseModelRef("a/b", tmp_path / "snapshot").config()
    assert config["vocab_size"] == folders.ROWS


def test_more_than_any_model_is_refused_without_reading_it(tmp_path: Path, base: BaseModelRef) -> None:
    folder = folders.image(tmp_path / "i")
    with (folder / "last.safetensors").open("r+b") as file:
        file.truncate(401 * 10**9)
    assert kinds(checked(folder, base)) == [FaultKind.TOO_MUCH]


def test_a_link_out_of_the_folder_is_neither_followed_nor_published(
    tmp_path: Path, base: BaseModelRef
) -> None:
    folder = folders.adapter(tmp_path / "a")
    secret = write(tmp_path / "out", {"key": "secret"}) / "key"
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to(secret)
    prepared = prepare(folder, base, TaskType.INSTRUCT)
    assert "adapter_config.json" not in prepared.items
    assert FaultKind.NOT_A_FILE in [fault.kind for fault in prepared.left_out]


def test_headers_that_would_fill_the_memory_together_are_refused(
    tmp_path: Path, base: BaseModelRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.adapter(tmp_path / "a")
    monkeypatch.setattr(module, "MAX_HEADERS", 100)
    report = checked(folder, base)
    assert kinds(report) == [FaultKind.TOO_MUCH]
    assert report.model_hash is None
