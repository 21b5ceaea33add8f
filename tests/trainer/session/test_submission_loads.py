"""Torn submissions, to somebody who knows nothing of ours: the benchmarks' own check of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.loadable import Faulty, load, whole
from tests.trainer import tiny


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def broken(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_model_that_is_whole_answers(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model")
    whole(model)
    assert load(model, model) is not None


@pytest.mark.parametrize(
    ("tear", "said"),
    [
        (cut, "SafetensorError"),
        (broken, "NaN"),
        (lambda folder: (folder / "config.json").write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / "config.json").unlink(), "neither adapter nor model"),
        (lambda folder: (folder / ".model.half").write_text(""), "neither adapter nor model"),
        (lambda folder: (folder / "optimizer.pt").write_text(""), "optimizer.pt"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "nothing"),
    ],
)
def test_what_is_torn_or_does_not_belong_is_found(
    tmp_path: Path, tear: Callable[[Path], object], said: str
) -> None:
    model = tiny.save(tmp_path / "model")
    tear(model)
    with pytest.raises(Faulty, match=said):
        load(model, model)


def test_a_folder_that_is_not_there_is_faulty(tmp_path: Path) -> None:
    with pytest.raises(Faulty, match="FileNotFoundError"):
        whole(tmp_path / "nowhere")
