"""Locks that vanish with whoever holds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miner.inputs import model_cache
from miner.inputs.model_cache import is_unlocked, locked

HOLD = "import sys; from pathlib import Path; from miner.inputs.model_cache import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_one_holds_it_and_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "LOCK_RETRY_SECONDS", 0.01)
    path = tmp_path / "deep/lock"
    assert is_unlocked(path)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert not is_unlocked(path)
        waited = 0

        def waiting() -> None:
            nonlocal waited
            waited += 1
            if waited == 2:
                other.kill()  # a lock does not outlive its holder, however it ends

        with locked(path, waiting):
            assert waited >= 2
            assert not is_unlocked(path)
    assert is_unlocked(path)
