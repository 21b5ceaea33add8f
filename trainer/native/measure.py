"""A few steps under the clock: which settings are fastest here, and which kernels the time goes to.

    python -m trainer.native.measure trace RUN.json FOLDER [--steps 5]
    python -m trainer.native.measure sweep RUN.json [--steps 12] [--levers compile,micro,…]

Each answer is a line of JSON on standard output; one GPU (or the CPU) is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.run_files import RunSpec
from trainer.native import levers
from trainer.native.clocked import speed
from trainer.native.levers import LEVERS
from trainer.native.ready import plan_of, ready
from trainer.native.sweep import sweep
from trainer.native.trace import trace
from trainer.sheet import Sheet


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["one"]:
        sheet = Sheet.model_validate_json(Path(arguments[1]).read_bytes())
        _say(speed(sheet, plan_of(sheet), int(arguments[2])))
        return 0
    parser = argparse.ArgumentParser(prog="trainer.native.measure")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name in ("trace", "sweep"):
        kind = kinds.add_parser(name)
        kind.add_argument("run", type=Path)
        kind.add_argument("--steps", type=int, default=5 if name == "trace" else 12)
        if name == "trace":
            kind.add_argument("folder", type=Path)
        else:
            kind.add_argument("--levers", default=",".join(LEVERS))
    said = parser.parse_args(list(arguments))
    sheet = ready(RunSpec.from_json(said.run.read_bytes()))
    plan = levers.measurable(plan_of(sheet))
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    if said.kind == "trace":
        found = trace(sheet, plan, said.folder, said.steps)
    else:
        wanted = [name for name in LEVERS if name in said.levers.split(",")]
        found = sweep(sheet, plan, said.steps, wanted)
    for event in found:
        _say(event)
    return 0


def _say(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
