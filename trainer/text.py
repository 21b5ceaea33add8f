"""Text training: the validator's command line in a tournament, or a run file from the daemon.

python -m trainer.text --run RUN.json
python -m trainer.text --task-id … --model … --dataset … --dataset-type '{…}' --task-type … --file-format …
                       --expected-repo-name … --hours-to-complete …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core.run_files import RunSpec
from trainer.command_line import text_run
from trainer.wrapper.course import TextCourse
from trainer.wrapper.main import nobody_else_retries, run_to_the_end
from trainer.wrapper.signals import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    return run_to_the_end(text_run, _course, sys.argv[1:] if arguments is None else arguments)


def _course(run: RunSpec, stop: StopRequest) -> TextCourse:
    return TextCourse(run, stop, retries=nobody_else_retries(run))


if __name__ == "__main__":
    raise SystemExit(main())
