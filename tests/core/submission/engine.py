"""Questions to the libraries of the training environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any


def asked(python: str, code: str, folder: Path) -> Any:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, "-c", code, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
