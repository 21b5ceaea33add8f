"""Several processes train what one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.native import tiny
from trainer.native import ranks


def run(folder: Path, how: str, method: str, world: int, fail: str = "") -> tuple[int, str]:
    """All ranks of a run, to their end; the first one's exit and all output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.trainer.native.rank", str(folder), how, method, fail]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=400)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return started[0].returncode, "\n".join(said)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_processes_whole_or_in_shards_see_the_losses_of_one(tmp_path: Path, method: str) -> None:
    tiny.model_folder(tmp_path / "model")
    for how, world in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        code, said = run(tmp_path, how, method, world)
        assert code == 0, said
    alone = tiny.told(tmp_path / "single")
    name = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    weights = load_file(tmp_path / "single/submission" / name)
    for how in ("ddp", "fsdp"):
        spread = tiny.told(tmp_path / how)
        assert spread.losses == pytest.approx(alone.losses, abs=1e-4)
        assert spread.norms == pytest.approx(alone.norms, abs=1e-4)
        assert spread.held_out == pytest.approx(alone.held_out, abs=1e-4)
        handed_in = load_file(tmp_path / how / "submission" / name)
        assert handed_in.keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(handed_in[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_go_on_where_they_were_cut(tmp_path: Path, how: str) -> None:
    tiny.model_folder(tmp_path / "model")
    code, said = run(tmp_path, how, "full", 2)
    assert code == 0, said
    whole = tiny.told(tmp_path / how)
    (tmp_path / how / "progress.jsonl").unlink()
    code, said = run(tmp_path, how, "full", 2, "resume")
    assert code == 0, said
    assert tiny.told(tmp_path / how).losses == whole.losses[4:]


def test_a_rank_that_died_ends_the_others_with_a_reason(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path / "model")
    code, said = run(tmp_path, "ddp", "full", 2, "die")
    assert code != 0
    assert "Connection" in said or "Timed out" in said or "closed" in said


def test_one_process_needs_no_group() -> None:
    with ranks.joined(cpu=True) as alone:
        assert alone.rank == 0
        assert alone.total(1.0, 2.0) == [1.0, 2.0]
        assert alone.any(True)
        assert not torch.distributed.is_initialized()


def test_the_decoders_layers_are_found_under_adapters(tmp_path: Path) -> None:
    made = tiny.loop(tmp_path, tiny.plan())
    assert len(ranks.layers_of(made.net)) == 2
