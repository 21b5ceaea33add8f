"""The measurement of links, with two processes on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from trainer.runner import check_links

SOURCE = str(Path(check_links.__file__).parents[2])


def output(code: str) -> dict[str, object]:
    """In a process of its own: it becomes the parent of orphans."""
    env = {**os.environ, "PYTHONPATH": SOURCE, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_two_processes_add_up_and_the_rate_is_reported() -> None:
    assert torch.distributed.is_available()
    found = output("from trainer.runner.check_links import main; main()")
    assert (found["backend"], found["processes"]) == ("gloo", 2), found
    assert isinstance(found["bytes_s"], float)
    assert found["bytes_s"] > 0


def test_a_measurement_that_hangs_is_ended_and_reported() -> None:
    found = output("from trainer.runner.check_links import main; main(limit_s=0.05)")
    assert "had not ended after 0.05 s" in str(found["problem"])
