"""Rows, plan and sheet of a run, without starting it: for launchers that are not ours.

    export GOD_MINER_SHEET=$(python -m trainer.native.ready RUN.json)
    torchrun … -m trainer.native

The wrapper (`trainer.text`) does the same and then launches, watches and retries by itself, on one machine.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from core.plan import TrainingPlan
from core.run_files import RunSpec
from trainer.errors import TrainingError
from trainer.native.saving import newest
from trainer.prepare import prepare
from trainer.sheet import Ask, Failure, Outcome, Sheet, read_record
from trainer.wrapper.result import conclude
from trainer.wrapper.supervise import Ended
from trainer.wrapper.verdict import judged


def ready(run: RunSpec) -> Sheet:
    """Goes on from the newest state that lies in the work folder, as a job that was requeued must."""
    work = Path(run.work_dir)
    data, launch = work / "data", work / "launch"
    for folder in (data, launch, Path(run.submission_dir).parent):
        folder.mkdir(parents=True, exist_ok=True)
    # Of an earlier launch: its words would be taken for this one's.
    files = (Path(run.stop_path), Path(run.result_path), launch / "outcome.json")
    for old in (*files, *launch.glob("failure-*.json")):
        old.unlink(missing_ok=True)
    ask = Ask(
        run=run,
        plan_path=run.plan_path,
        plan_out=str(launch / "plan.json"),
        folder=str(data),
        prepared_out=str(data / "prepared.json"),
        failure_out=str(data / "failure.json"),
    )
    prepared = prepare(ask)
    state = newest(work / "output")
    return Sheet(
        run=run,
        plan_path=ask.plan_out,
        launch_dir=str(launch),
        prepared=prepared,
        resume_from=str(state) if state else run.resume_from,
    )


def plan_of(sheet: Sheet) -> TrainingPlan:
    return TrainingPlan.from_json(Path(sheet.plan_path).read_bytes())


def concluded(run: RunSpec) -> int:
    """After the launcher's end: the run's own result file and exit code."""
    launch = Path(run.work_dir) / "launch"
    failures = [read_record(Failure, path) for path in sorted(launch.glob("failure-*.json"))]
    found = judged(Ended(1, None, ()), read_record(Outcome, launch / "outcome.json"), failures, marked=True)
    best, base, steps = None, None, 0
    if found.outcome is not None:
        best, base, steps = found.outcome.best, found.outcome.base, found.outcome.steps
    result = conclude(run, found.end, found.detail, best=best, base=base, steps=steps, moment=found.moment)
    return int(result.exit_code)


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    over = "--over" in arguments
    (path,) = [one for one in arguments if one != "--over"]
    run = RunSpec.from_json(Path(path).read_bytes())
    if over:
        return concluded(run)
    try:
        sheet = ready(run)
    except TrainingError as error:
        sys.stderr.write(f"{error}\n")
        return int(conclude(run, error.end, str(error)).exit_code)
    sys.stdout.write(f"{sheet.write()}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
