"""Errors that know their end."""

from __future__ import annotations

import pytest

from core.runs.run_files import EXIT_OF, TrainerExitCode
from trainer.errors import BadData, BadModel, BadReward, TrainingError


@pytest.mark.parametrize("error", [BadData, BadModel, BadReward])
def test_every_end_of_bad_input_has_an_exit_code_of_its_own(error: type[TrainingError]) -> None:
    assert EXIT_OF[error.end] not in (TrainerExitCode.OK, TrainerExitCode.CRASHED)
    assert error.code == error.end.value
