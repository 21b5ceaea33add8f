"""The trainer's tests run twice: what is pure with the daemon's, all of it in the training environment.

A file that imports the training stack, or the little models made with it (`tests.trainer.tiny`,
`tests.trainer.native`), is left out where there is no torch. `make test` runs those alone in the training
environment, `make test-all` the others there as well; in CI a missing training environment fails.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tests.conftest import TORCH, needs_stack
from tests.trainer import workers
from tests.trainer.forks import ForkServer
from trainer.inputs.model_loading import block_imports

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

if TORCH:
    block_imports("trackio", "sklearn")  # as in a training process
    # `datasets` forks its workers. One of them collected what this process had left, and waited for ever for
    # a thread that a fork does not have.
    os.register_at_fork(after_in_child=gc.freeze)

#: A file that says so is slow and pure: once is enough, with the daemon's packages.
ONCE = "# Once: "


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    once = f"\n{ONCE}" in collection_path.read_text("utf-8")
    return (once if TORCH else needs_stack(collection_path)) or None


def pytest_collection_finish() -> None:
    if TORCH:
        gc.freeze()  # else every collection goes through all that the stack has brought along


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what some look after at the end has to be gone by then


@pytest.fixture(scope="session")
def forks() -> ForkServer:
    """One for all: importing the training stack takes longer than most of the trainings here."""
    return workers.servers[-1]
