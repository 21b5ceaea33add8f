"""Requests to a running training: smaller or larger passes, and pauses between steps."""

from __future__ import annotations

import asyncio
import logging

from pydantic import ValidationError

from core.planning.plan import TrainingPlan
from core.runs.progress import ControlEvent
from core.runs.run_files import MAX_CONTROL_BYTES, RunControl
from miner.api.jobs import LiveJob
from miner.jobs.folder import AttemptFolder
from miner.jobs.progress import RunProgress
from miner.support.untrusted_files import read_untrusted, write_untrusted

log = logging.getLogger(__name__)


class RunningTraining:
    """A running attempt: its numbers, and its control file."""

    def __init__(
        self,
        live: LiveJob,
        attempt: int,
        began_at: float,
        plan: TrainingPlan,
        folder: AttemptFolder,
        progress: RunProgress,
    ) -> None:
        self.live, self.attempt, self.began_at, self.plan = live, attempt, began_at, plan
        self._path, self._progress = folder.control, progress
        #: The last request of this process, if any.
        self.asked: RunControl | None = None

    @property
    def job_id(self) -> int:
        return self.live.job_id

    @property
    def gpus(self) -> tuple[str, ...]:
        return self.live.gpus

    @property
    def training_since(self) -> float | None:
        """Time of the first step, or None before it and once the training has ended."""
        return None if self._progress.end is not None else self._progress.first_step_at

    @property
    def answer(self) -> ControlEvent | None:
        """The training's last answer to a request."""
        return self._progress.control

    @property
    def micro(self) -> int:
        """Sequences in one pass on one GPU, as last reported or planned."""
        return self.answer.micro if self.answer else self.plan.batch.micro

    @property
    def duty(self) -> float:
        return self.answer.duty if self.answer else 1.0

    async def request(self, *, micro: int | None = None, duty: float | None = None) -> RunControl:
        """Build a request for `ask`; numbers that are not given stay as they are."""
        before = self.asked or await asyncio.to_thread(self._last_request)
        as_it_is = None if self.micro == self.plan.batch.micro else self.micro
        return RunControl(
            number=max(before.number if before else 0, self.answer.number if self.answer else 0) + 1,
            micro=as_it_is if micro is None else micro,
            duty=self.duty if duty is None else duty,
        )

    async def ask(self, control: RunControl) -> None:
        """Write the request to the control file; `OSError` on a full disk."""
        await asyncio.to_thread(write_untrusted, self._path, control.model_dump_json().encode())
        self.asked = control

    def _last_request(self) -> RunControl | None:
        """Read the request of an earlier daemon."""
        data = read_untrusted(self._path, MAX_CONTROL_BYTES)
        try:
            return RunControl.model_validate_json(data) if data else None
        except ValidationError:
            log.warning("%s is not a request of ours; it is replaced", self._path)
            return None
