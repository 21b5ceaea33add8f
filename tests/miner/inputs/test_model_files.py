"""Which files of a repository are fetched."""

from __future__ import annotations

import json
import posixpath
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import ImageModelType
from core.models.facts import Family
from miner.inputs.model_files import (
    SINGLE_FILE_BYTES,
    HubFile,
    ModelFileSelection,
    checked_facts,
    is_safe_path,
    select_image_model,
    select_text_model,
)
from tests.doubles.each import each
from tests.miner.inputs.models import WEIGHTS, model_files, safetensors

SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def listed(*names: str, size: int = 10) -> list[HubFile]:
    return [HubFile(name, size, None, None) for name in names]


def chosen(selection: ModelFileSelection) -> set[str]:
    return {file.path for file in selection.files}


def index(*names: str) -> bytes:
    return json.dumps({"weight_map": {f"layer.{n}": name for n, name in enumerate(names)}}).encode()


def bad(names: list[HubFile], given_index: bytes | None = None) -> str:
    with pytest.raises(StepFailed) as caught:
        select_text_model(names, given_index)
    assert caught.value.reason is EndReason.BAD_MODEL
    return str(caught.value)


def test_weights_come_once_and_nothing_that_runs_code() -> None:
    repository = listed(
        *SMALL,
        *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt"),
        *("tokenizer.model", "README.md", "LICENSE.txt", "model.safetensors"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack"),
        *(
            "model.gguf",
            "modeling_custom.py",
            "tokenization_custom.py",
            ".gitattributes",
            "training_args.bin",
        ),
        *("original/consolidated.00.pth", "onnx/model.onnx", "consolidated.safetensors", "image.png"),
        *("model.fp16.safetensors", "adapter_model.safetensors", "rust_model.ot", "coreml/x.json"),
    )
    assert chosen(select_text_model(repository, None)) == {
        *SMALL,
        *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt"),
        *("tokenizer.model", "README.md", "LICENSE.txt", "model.safetensors"),
    }


def test_shards_are_those_of_the_index() -> None:
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    repository = listed(*SMALL, *shards, "model.safetensors.index.json", "consolidated.safetensors")
    found = select_text_model(repository, index(*shards, shards[0]))
    assert chosen(found) == {*SMALL, *shards, "model.safetensors.index.json"}
    assert found.bytes == 10 * len(found.files)


@each(
    "given_index",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        index("missing.safetensors"),
        index("../../etc/passwd"),
        index("config.json"),
        b"[" * 100_000,
    ],
)
def test_an_index_that_leads_nowhere_is_a_bad_model(given_index: bytes) -> None:
    assert "model.safetensors.index.json" in bad(listed(*SMALL, "model.safetensors"), given_index)


@each(
    ("names", "why"),
    [
        (("tokenizer.json", "model.safetensors"), "no config.json"),
        (("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"), "is an adapter"),
        (("config.json", "model.safetensors"), "no tokenizer"),
        ((*SMALL, "pytorch_model.bin"), "are pickles only (pytorch_model.bin)"),
        ((*SMALL, "model.gguf"), "no safetensors weights"),
        (SMALL, "no safetensors weights"),
    ],
)
def test_what_cannot_be_loaded_is_reported(names: tuple[str, ...], why: str) -> None:
    assert why in bad(listed(*names))


def test_weights_under_another_name_are_taken_too() -> None:
    found = select_text_model(listed(*SMALL, "weights.safetensors", "weights.fp16.safetensors"), None)
    assert chosen(found) == {*SMALL, "weights.safetensors"}


def test_files_too_large_to_be_small_are_left() -> None:
    repository = [*listed(*SMALL, "model.safetensors"), HubFile("dump.json", 10**10, None, None)]
    assert "dump.json" not in chosen(select_text_model(repository, None))


def test_an_image_model_is_its_one_large_file() -> None:
    single = HubFile("sdxl_base.safetensors", SINGLE_FILE_BYTES + 1, None, None)
    repository = [*listed("model_index.json", "unet/x.safetensors", "other.safetensors"), single]
    found = select_image_model(repository)
    assert (chosen(found), found.single) == ({"sdxl_base.safetensors"}, "sdxl_base.safetensors")


def test_an_image_model_in_folders_comes_without_its_doubles() -> None:
    repository = listed(
        *("model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"),
        *("unet/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.bin"),
        *("vae/model.fp16-00001-of-00002.safetensors", "tokenizer/merges.txt", "text_encoder/model.onnx"),
        *("scheduler/run.py", "README.md", "teaser.png"),
    )
    found = select_image_model(repository)
    assert found.single is None
    assert chosen(found) == {
        *("model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"),
        *("vae/model.fp16-00001-of-00002.safetensors", "tokenizer/merges.txt"),
    }


def test_an_image_repository_with_one_file_is_that_file() -> None:
    found = select_image_model(listed("README.md", "model.safetensors"))
    assert found.single == "model.safetensors"
    with pytest.raises(StepFailed, match="pickles only"):
        select_image_model(listed("model.ckpt"))


@each("path", ["../x", "a/../b", "/abs", "a//b", "a\\b", "a\0b", ".", "..", "a/.", "x" * 501, "", "a/"])
def test_names_that_lead_out_of_the_folder_are_never_fetched(path: str) -> None:
    assert not is_safe_path(path)
    assert path not in chosen(
        select_text_model([*listed(*SMALL, "model.safetensors"), HubFile(path, 1, None, None)], None)
    )


@given(st.text(alphabet="ab./\\\0-", max_size=12))
def test_a_safe_name_stays_inside(path: str) -> None:
    if is_safe_path(path):
        assert not posixpath.isabs(path)
        assert posixpath.normpath(path) == path
        assert not path.startswith("..")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in model_files().items():
        assert isinstance(content, bytes)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_facts_come_from_the_config_and_the_count_from_the_headers(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors({"a": (30_000, 64), "b": (300, 64)}))
    facts = checked_facts(folder, "owner/name", None)
    assert (facts.family, facts.architecture, facts.layers) == (Family.LLAMA, "llama", 2)
    assert facts.params_total == 30_300 * 64
    assert facts.model_id == "owner/name"


def test_an_image_model_has_the_facts_of_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(WEIGHTS)
    assert checked_facts(file, "a/b", ImageModelType.FLUX).family is Family.FLUX


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.safetensors", WEIGHTS[:-1], "cut off"),
        ("model.safetensors", b"", "cut off"),
        ("model.safetensors", b"\xff" * 100, "not a safetensors"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"[" * 100_000, "not JSON"),
        ("config.json", b" " * (11 * 1024**2), "too large"),
        ("config.json", None, "there is no"),
        ("model.safetensors", None, "no safetensors weights"),
    ],
)
def test_what_cannot_be_loaded_is_shown_with_the_file(
    folder: Path, name: str, content: bytes | None, why: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(StepFailed) as caught:
        checked_facts(folder, "a/b", None)
    assert caught.value.reason is EndReason.BAD_MODEL
    assert name.removeprefix("model.") in str(caught.value)
    assert why in str(caught.value)
