"""Image training: the validator's command line in a tournament, or a run file from the daemon.

python -m trainer.image --run RUN.json
python -m trainer.image --task-id … --model … --dataset-zip … --model-type … --expected-repo-name …
                        --hours-to-complete … [--trigger-word …]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core.run_files import RunSpec
from trainer.command_line import image_run
from trainer.wrapper.image_course import ImageCourse
from trainer.wrapper.main import nobody_else_retries, run_to_the_end
from trainer.wrapper.signals import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    return run_to_the_end(image_run, _course, sys.argv[1:] if arguments is None else arguments)


def _course(run: RunSpec, stop: StopRequest) -> ImageCourse:
    return ImageCourse(run, stop, retries=nobody_else_retries(run))


if __name__ == "__main__":
    raise SystemExit(main())
