"""Image training: the validator's command line in a tournament, or a run file from the daemon.

python -m trainer.image --run RUN.json
python -m trainer.image --task-id … --model … --dataset-zip … --model-type … --expected-repo-name …
                        --hours-to-complete … [--trigger-word …]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.runner.command_line import image_run
from trainer.runner.image_runner import ImageRunner
from trainer.runner.main import run_to_end


def main(arguments: Sequence[str] | None = None) -> int:
    return run_to_end(image_run, ImageRunner, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    raise SystemExit(main())
