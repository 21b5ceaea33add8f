"""Image training: the validator's command line in a tournament, or a run file from the daemon.

python -m trainer.image --run RUN.json
python -m trainer.image --task-id … --model … --dataset-zip … --model-type … --expected-repo-name …
                        --hours-to-complete … [--trigger-word …]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core.runs.run_files import RunSpec
from trainer.runner.command_line import image_run
from trainer.runner.image_runner import ImageRunner
from trainer.runner.main import retries_here, run_to_end
from trainer.runner.processes import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    return run_to_end(image_run, _runner, sys.argv[1:] if arguments is None else arguments)


def _runner(run: RunSpec, stop: StopRequest) -> ImageRunner:
    return ImageRunner(run, stop, retries=retries_here(run))


if __name__ == "__main__":
    raise SystemExit(main())
