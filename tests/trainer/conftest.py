"""The trainer's tests run twice: what is pure with the daemon's, all of it in the training environment.

A file that imports the training stack, or the little models made with it (`tests.trainer.tiny`,
`tests.trainer.native`), is left out where there is no torch. `make test` runs both, and in CI a missing
training environment fails.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
for _name in (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "AXOLOTL_DO_NOT_TRACK",
    "DO_NOT_TRACK",
):
    os.environ.setdefault(_name, "1")
# Little models gain nothing from threads, and several that wait for each other lose ten times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")

STACK = (
    r"(?:torch|numpy|transformers|datasets|axolotl|trl|peft|accelerate|safetensors"
    r"|tests\.trainer\.(?:tiny|native))"
)
NEEDS_STACK = re.compile(
    rf"^(?:(?:from|import) {STACK}\b|from tests\.trainer import .*\btiny\b)", re.MULTILINE
)
#: A file that says so is slow and pure: once is enough, with the daemon's packages.
ONCE = "# Once: "
TRAINING = importlib.util.find_spec("torch") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text("utf-8")
    left_out = f"\n{ONCE}" in text if TRAINING else NEEDS_STACK.search(text) is not None
    return left_out or None
