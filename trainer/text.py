"""Text training: the validator's command line in a tournament, or a run file from the daemon.

python -m trainer.text --run RUN.json
python -m trainer.text --task-id … --model … --dataset … --dataset-type '{…}' --task-type … --file-format …
                       --expected-repo-name … --hours-to-complete …

With `--run` of a plan for several machines the same is started on each of them (`trainer.runner.machines`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.runner.command_line import text_run
from trainer.runner.machines import this_machine
from trainer.runner.main import follow_to_end, run_to_end
from trainer.runner.text_runner import TextRunner


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if (machine := this_machine()).rank:
        return follow_to_end(text_run, machine, arguments)
    return run_to_end(text_run, TextRunner, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
