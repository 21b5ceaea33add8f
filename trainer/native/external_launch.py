"""Rows, plan and launch spec of a run, without starting it: for launchers that are not ours.

    export GOD_MINER_LAUNCH_SPEC=$(python -m trainer.native.external_launch RUN.json)
    torchrun … -m trainer.native

The runner (`trainer.text`) does the same and then launches, watches and retries by itself, on one machine.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from core.runs.run_files import RunSpec
from trainer.errors import TrainingError
from trainer.handoff import LaunchSpec, PrepareSpec, TrainingFailure, TrainingOutcome, read_record
from trainer.native.checkpoints import newest_checkpoint
from trainer.runner.main import write_result
from trainer.runner.prepare import prepare
from trainer.runner.supervise import LaunchResult, ProcessEnd, launch_result


def prepare_launch(run: RunSpec) -> LaunchSpec:
    """Resumes from the newest checkpoint in the work folder, as a requeued job must."""
    work = Path(run.work_dir)
    data, launch = work / "data", work / "launch"
    for folder in (data, launch, Path(run.submission_dir).parent):
        folder.mkdir(parents=True, exist_ok=True)
    # Of an earlier launch: its records would be taken for this one's.
    files = (Path(run.stop_path), Path(run.result_path), launch / "outcome.json")
    for old in (*files, *launch.glob("failure-*.json")):
        old.unlink(missing_ok=True)
    prepare_spec = PrepareSpec(
        run=run,
        plan_path=run.plan_path,
        plan_out=str(launch / "plan.json"),
        folder=str(data),
        prepared_out=str(data / "prepared.json"),
        failure_out=str(data / "failure.json"),
    )
    prepared = prepare(prepare_spec)
    state = newest_checkpoint(work / "output")
    return LaunchSpec(
        run=run,
        plan_path=prepare_spec.plan_out,
        launch_dir=str(launch),
        prepared=prepared,
        resume_from=str(state) if state else run.resume_from,
    )


def finish_run(run: RunSpec) -> int:
    """After the launcher's end: the run's own result file and exit code."""
    launch = Path(run.work_dir) / "launch"
    failures = [read_record(TrainingFailure, path) for path in sorted(launch.glob("failure-*.json"))]
    result = launch_result(
        ProcessEnd(1, None, ()), read_record(TrainingOutcome, launch / "outcome.json"), failures, marked=True
    )
    return int(write_result(run, result).exit_code)


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    finish = "--over" in arguments
    (path,) = [argument for argument in arguments if argument != "--over"]
    run = RunSpec.from_json(Path(path).read_bytes())
    if finish:
        return finish_run(run)
    try:
        spec = prepare_launch(run)
    except TrainingError as error:
        sys.stderr.write(f"{error}\n")
        return int(write_result(run, LaunchResult(error.end, str(error))).exit_code)
    sys.stdout.write(f"{spec.write()}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
