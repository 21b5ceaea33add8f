"""Whether a folder is a model, and which."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.models import Family
from core.tasks import ImageModelType
from miner.jobs.inputs.model_check import checked_facts
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason
from tests.miner.jobs.inputs.models import WEIGHTS, model_files, safetensors


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
        ("model.safetensors", b"\xff" * 100, "no safetensors"),
        ("config.json", b"{", "no JSON"),
        ("config.json", b"[]", "no JSON object"),
        ("config.json", b"[" * 100_000, "no JSON"),
        ("config.json", b" " * (11 * 1024**2), "too large"),
    ],
)
def test_what_can_not_be_loaded_is_told_with_the_file(
    folder: Path, name: str, content: bytes, why: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(StepFailed) as caught:
        checked_facts(folder, "a/b", None)
    assert caught.value.reason is EndReason.BAD_MODEL
    assert name in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_missing_is_told(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(StepFailed) as caught:
        checked_facts(folder, "a/b", None)
    assert name.removeprefix("model.") in str(caught.value)
