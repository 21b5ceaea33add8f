"""`god-miner gpu-check`: what it refuses. tests/benchmarks/test_gpu.py runs what it starts."""

from __future__ import annotations

import pytest

from core.domain.errors import ConfigError
from miner.cli.gpu_check import gpu_check


def test_plans_do_not_follow_a_part() -> None:
    with pytest.raises(ConfigError, match="takes all parts"):
        gpu_check(use=True, part=["lora"])
