"""Several processes train what one does, and end with a reason when one of them does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.run_files import ExitCode
from tests.trainer.native import tiny
from trainer.native import ranks

ROOT = Path(__file__).parents[3]


def run(folder: Path, *cases: str) -> list[list[int]]:
    """The exit codes of each case's ranks."""
    tiny.model_folder(folder / "model")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.native.rank", str(folder), *cases],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def said(folder: Path, case: str, rank: int = 0) -> str:
    return (folder / f"said-{case}-{rank}").read_text()


def healthy(folder: Path, *cases: str) -> None:
    for case, codes in zip(cases, run(folder, *cases), strict=True):
        assert not any(codes), said(folder, case)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_processes_whole_or_in_shards_see_the_losses_of_one(tmp_path: Path, method: str) -> None:
    healthy(tmp_path, f"single:{method}:1", f"ddp:{method}:2", f"fsdp:{method}:2")
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


@pytest.mark.parametrize("method", ["lora", "full"])
def test_tied_to_its_base_a_model_learns_the_same_on_two_processes(tmp_path: Path, method: str) -> None:
    healthy(tmp_path, f"single:{method}:1:kl", f"ddp:{method}:2:kl", f"fsdp:{method}:2:kl")
    alone = tiny.told(tmp_path / "single")
    for how in ("ddp", "fsdp"):
        spread = tiny.told(tmp_path / how)
        assert spread.losses == pytest.approx(alone.losses, abs=1e-4)
        assert spread.held_out == pytest.approx(alone.held_out, abs=1e-4)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_go_on_where_they_were_cut(tmp_path: Path, how: str) -> None:
    healthy(tmp_path, f"{how}:full:2", f"{how}:full:2:resume")
    told = tiny.told(tmp_path / how).losses
    whole, rest = told[:8], told[8:]
    assert 0 < len(rest) < 8
    assert rest == whole[-len(rest) :]


def test_a_rank_that_is_gone_stands_still_or_reads_other_rows_ends_all_with_the_reason(
    tmp_path: Path,
) -> None:
    died, hung, other = "ddp:full:2:die", "ddp:lora:2:hang", "ddp:lora:2:other-rows"
    codes = run(tmp_path, died, hung, other)
    assert codes[0][1] == 7
    assert codes[0][0] not in (0, 7)
    assert "another process of this training is gone or silent" in said(tmp_path, died)
    # Whichever looks first: the one that waits for the other may be told by its end.
    assert codes[1][1] == ExitCode.HUNG
    assert codes[1][0] != 0
    waited = said(tmp_path, hung, 0)
    assert "waiting for the other processes" in waited or "gone or silent" in waited
    # Every thread's stack, and where it stood.
    assert "most recent call first" in said(tmp_path, hung, 1)
    assert "stands still: nothing done for 3 s" in said(tmp_path, hung, 1)
    assert codes[2] == [ExitCode.BAD_DATA, ExitCode.BAD_DATA]
    assert "the ranks have different rows, this one's differ" in said(tmp_path, other, 1)


def test_one_process_needs_no_group() -> None:
    with ranks.joined(cpu=True) as alone:
        assert alone.rank == 0
        assert alone.total(1.0, 2.0) == [1.0, 2.0]
        assert alone.any(True)
        assert not torch.distributed.is_initialized()


def test_the_decoders_layers_are_found_under_adapters(tmp_path: Path) -> None:
    made = tiny.loop(tmp_path, tiny.plan())
    assert len(ranks.layers_of(made.net)) == 2
