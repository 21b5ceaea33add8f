import subprocess
import sys
from pathlib import Path

import pytest

from miner.cli import dev

pytestmark = pytest.mark.process


def test_the_command_line_starts_without_anything_heavy() -> None:
    code = "import sys; import miner.__main__; print([m for m in sys.modules if m.startswith('miner.dev')"
    heavy = "or m in ('httpx', 'uvloop', 'httptools', 'bittensor_core', 'fastapi', 'rich.table')])"
    root = Path(dev.__file__).parents[2]
    command = [sys.executable, "-c", f"{code} {heavy}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
