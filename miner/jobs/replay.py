"""How to run an attempt by hand: the same command and environment, in a folder of its own.

The attempt's own files stay as they are; only the paths of what is written are others.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.run_files import RunSpec
from core.tasks import TaskType
from miner.fleet.base import CPU_ID
from miner.jobs.folder import AttemptFolder
from miner.jobs.launch import Attempt, run_environment, trainer_command
from miner.settings import Settings


@dataclass(frozen=True, slots=True)
class Replay:
    number: int
    engine: str
    folder: str
    run_json: str
    plan_json: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    #: What the command needs to be there: inputs that are removed a while after a job is over.
    needs: tuple[str, ...]
    #: Reward functions from outside would run.
    hostile: bool

    @classmethod
    def of(cls, attempt: Attempt, settings: Settings) -> Replay:
        place = AttemptFolder(attempt.folder.path.with_name(f"replay_{attempt.row.number}"))
        run = _moved(attempt.run, place)
        command = trainer_command(attempt.plan, run)
        python = str(settings.trainer_python or "python")
        environment = dict(run_environment(run, attempt.plan))
        if gpus := ",".join(one for one in attempt.row.gpus if one != CPU_ID):
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        needs = (run.model_path, run.data_path, *([run.resume_from] if run.resume_from else []))
        return cls(
            attempt.row.number,
            attempt.row.engine,
            str(place.path),
            run.to_json(),
            attempt.plan.to_json(),
            (python, *command[1:]),
            environment,
            needs,
            run.task_type is TaskType.GRPO,
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "missing": self.missing()}

    def missing(self) -> list[str]:
        return [one for one in self.needs if not Path(one).exists()]

    def script(self) -> str:
        """For a shell. The trainer's packages must be on its interpreter's path."""
        lines = [
            f"# Attempt {self.number} again, by hand: it ran on {self.engine}, this is a plain process.",
            *(["# WARNING: its reward functions come from outside; run this in a sandbox."] * self.hostile),
            *(f"# MISSING: {one}" for one in self.missing()),
            f"mkdir -p {shlex.quote(self.folder)}/work {shlex.quote(self.folder)}/config",
            f"cat > {shlex.quote(self.folder)}/run.json <<'END'\n{self.run_json}\nEND",
            f"cat > {shlex.quote(self.folder)}/plan.json <<'END'\n{self.plan_json}\nEND",
            f"cd {shlex.quote(self.folder)}",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())),
            shlex.join(self.command),
        ]
        return "\n".join(lines)


def _moved(run: RunSpec, place: AttemptFolder) -> RunSpec:
    """Without a clock: a replay is for looking, and the deadline it had has passed."""
    far = run.began_at + 10 * 365 * 86_400
    return run.model_copy(
        update={
            "plan_path": str(place.plan) if run.plan_path else None,
            "work_dir": str(place.work),
            "submission_dir": str(place.submission),
            "progress_path": str(place.progress),
            "result_path": str(place.result),
            "stop_path": str(place.stop),
            "end_by": far,
            "deadline_at": far,
        }
    )
