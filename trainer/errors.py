"""Errors that end a training, each with the end that the result file and the exit code report."""

from __future__ import annotations

from typing import ClassVar

from core.domain.errors import GodMinerError
from core.runs.run_files import RunEnd


class TrainingError(GodMinerError):
    """The root of what ends a run; `end` is its reason."""

    code = "training"
    end: ClassVar[RunEnd] = RunEnd.CRASHED


class BadData(TrainingError):
    """Rows or pictures from which nothing can be learned."""

    code = "bad_data"
    end = RunEnd.BAD_DATA


class BadModel(TrainingError):
    """A model folder that cannot be loaded, or lacks what training needs."""

    code = "bad_model"
    end = RunEnd.BAD_MODEL


class BadReward(TrainingError):
    """Reward code that is not usable."""

    code = "bad_reward"
    end = RunEnd.BAD_REWARD


class UnusableGpu(TrainingError):
    """GPUs that the machine has and that cannot be used."""

    code = "no_gpu"
    end = RunEnd.INFEASIBLE
