"""What the pipeline needs of its neighbours: something that fetches inputs, and something that publishes.

Both raise `StepFailed` with the reason that the retry rule is looked up by, and nothing else on purpose. Both
may be cancelled at any await and end soon then; both are safe to repeat, also after a `kill -9` in the
middle. Engines and the fleet have their words in `miner/engines/base.py` and `miner/fleet/base.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from core.data import DatasetFacts
from core.errors import GodMinerError
from core.models import ModelFacts
from core.tasks import DatasetType, FileFormat, ImageModelType, TaskType
from core.wire import MinerSubmission
from miner.jobs.states import EndReason


class StepFailed(GodMinerError):
    """A step of a job that did not come to its end, and why."""

    code = "job_step_failed"

    def __init__(self, reason: EndReason, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        #: Seconds; what the other side asked for, as in `Retry-After`.
        self.retry_after = retry_after


#: (what: "model", "dataset", "check" or "upload", bytes so far, bytes in all if known). Called from the event
#: loop, a few times per second at most.
Told = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job must have before it can train."""

    job_id: int
    task_type: TaskType
    #: The hub's name of the base model.
    model: str
    #: A presigned URL of the rows or of the zip; with FileFormat.HF a dataset's name on the hub. A `Path` is
    #: the operator's own file (`god-miner run --task`), never from a request: copied or linked, then checked.
    data: str | Path
    file_format: FileFormat
    #: The job's own folder of inputs, which may not exist yet: files lie in it under names of ours.
    folder: Path
    dataset: DatasetType | None = None
    image_type: ImageModelType | None = None
    #: The operator's own copy of the model, never from a request: used where it lies.
    model_folder: Path | None = None
    #: The parameters that the offer stated; None where nobody said.
    stated_params: int | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Everything there, checked, and looked at."""

    #: A folder (or, for some image models, a file) in the shared cache; read-only for training.
    model_path: Path
    #: Text: one JSON array of rows. Images: the zip.
    data_path: Path
    model: ModelFacts
    data: DatasetFacts


class Inputs(Protocol):
    async def fetch(self, wanted: Wanted, told: Told) -> Fetched:
        """Fetch what is missing, check it, and look at it: idempotent, resumes what is half there, trusts
        nothing that is. The model stays in the cache until `release`. `StepFailed` with NETWORK,
        RATE_LIMITED, DISK_FULL (tried again), DATA_GONE, URL_REFUSED, BAD_DATA, MODEL_MISSING, MODEL_GATED
        or BAD_MODEL (final)."""

    def hold(self, wanted: Wanted) -> None:
        """After a restart: a run that goes on uses this model; not to be evicted. No I/O to speak of."""

    def release(self, job_id: int) -> None:
        """The job needs its model no more. Safe to repeat. Its own folder is the pipeline's to remove."""

    def release_all_but(self, jobs: Collection[int]) -> None:
        """At the start, with the jobs that are not over: one that ended as the daemon was killed, between its
        end and its release, would keep its model for ever."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A submission that is to be the job's published one from now on."""

    job_id: int
    task_id: str
    task_type: TaskType
    #: The hub's name of the base model, which belongs into `adapter_config.json`; and where it lies, to hold
    #: a full model's configuration against.
    model: str
    model_path: Path
    #: A snapshot: regular files only, nobody writes here while it is being published. Must not be changed:
    #: what has to be different (a README, a base name) is put beside it.
    folder: Path
    #: The last part of the repository's name, as the validator expects it.
    repo_name: str
    image_type: ImageModelType | None = None
    #: What this job has published before, perhaps under another name: replaced in one commit, moved first.
    earlier: MinerSubmission | None = None
    #: Seconds since the epoch: an upload still going on then is ended, and told before that it will be.
    finish_by: float | None = None


class Publisher(Protocol):
    async def publish(self, outgoing: Outgoing, told: Told) -> MinerSubmission:
        """Check the folder, upload, verify what lies there. `StepFailed` with NETWORK, RATE_LIMITED,
        HUB_REFUSED, DISK_FULL (tried again), DEADLINE or BAD_SUBMISSION (what lies there now, if anything,
        stays)."""

    async def move(
        self, earlier: MinerSubmission, repo_name: str, finish_by: float | None = None
    ) -> MinerSubmission:
        """The same files under another name: a validator's second start names a new repository. Where it is
        there already, nothing happens. `StepFailed` as above."""

    def forget(self, job_id: int) -> None:
        """The job is over, so what is remembered of its files for another try is of no use. Safe to repeat; a
        job that lives again after all costs another reading of its files."""
