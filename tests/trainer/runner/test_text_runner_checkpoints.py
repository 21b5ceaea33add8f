"""Which checkpoint a training can go on from."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.session.simulated import safetensors, write_adapter
from trainer.runner.text_runner import newest_checkpoint


def checkpoint(output: Path, step: int, *, whole: bool = True) -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    write_adapter(folder)
    (folder / "optimizer.pt").write_bytes(b"x")
    if whole:
        (folder / "trainer_state.json").write_text("{}", encoding="utf-8")
    return folder


def test_the_newest_whole_one_is_taken_and_torn_ones_are_cleared_away(tmp_path: Path) -> None:
    """Engines take the newest folder whatever it holds, and fail on it after loading the model."""
    old, good = checkpoint(tmp_path, 10), checkpoint(tmp_path, 200)
    torn, cut = checkpoint(tmp_path, 300, whole=False), checkpoint(tmp_path, 1000)
    (cut / "adapter_model.safetensors").write_bytes(safetensors()[:-2])
    assert newest_checkpoint(tmp_path) == str(good)
    assert old.exists()
    assert not torn.exists()
    assert not cut.exists()


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) is None


def test_a_state_of_the_native_trainer_is_whole_when_it_has_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-40"
    folder.mkdir()
    for name in ("position.json", "trained.safetensors", "rank0.pt"):
        (folder / name).write_bytes(b"x")
    assert newest_checkpoint(tmp_path) == str(folder)
