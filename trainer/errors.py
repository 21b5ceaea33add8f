"""What ends a training on purpose: each error knows the end that the daemon and the exit code speak of."""

from __future__ import annotations

from typing import ClassVar

from core.errors import GodMinerError
from core.run_files import RunEnd


class TrainingError(GodMinerError):
    """The root of what ends a run; `end` is its reason."""

    code = "training"
    end: ClassVar[RunEnd] = RunEnd.CRASHED


class BadData(TrainingError):
    """Rows or pictures that nothing can be learned from."""

    code = "bad_data"
    end = RunEnd.BAD_DATA


class BadModel(TrainingError):
    """A model folder that cannot be loaded, or misses what training needs."""

    code = "bad_model"
    end = RunEnd.BAD_MODEL


class BadReward(TrainingError):
    """Reward code that is no reward code."""

    code = "bad_reward"
    end = RunEnd.BAD_REWARD


class NoGpu(TrainingError):
    """Cards that the machine has and nothing can use."""

    code = "no_gpu"
    end = RunEnd.INFEASIBLE
