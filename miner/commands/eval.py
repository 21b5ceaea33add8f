"""`god-miner eval`: models side by side in the validator's metric, in the training environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

#: Of our environment the child needs no more; it has no business with the wallet or the hub.
PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
FIXED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}


def evaluate(
    task: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="What to score on: see docs/training.md.")
    ],
    base: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The folder of the model trained from.")
    ],
    model: Annotated[
        list[Path] | None,
        typer.Option(exists=True, file_okay=False, help="A model or an adapter; give it again for more."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Score on the first so many rows only.")] = None,
    allow_rewards: Annotated[
        bool, typer.Option("--allow-rewards", help="Run a GRPO task's reward code here, with your rights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Score models on a task's rows as validators do: base, ours, others side by side, and who would win."""
    import core
    from miner.engines.choose import training_interpreter
    from miner.settings import load_settings

    python = training_interpreter(load_settings()).path
    arguments = ["--task", str(task.resolve()), "--base", str(base.resolve())]
    for one in model or []:
        arguments += ["--model", str(one.resolve())]
    arguments += ["--rows", str(rows)] if rows is not None else []
    arguments += ["--allow-rewards"] if allow_rewards else []
    arguments += ["--json"] if as_json else []
    source = Path(core.__file__).resolve().parents[1]
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    done = subprocess.run(
        [python, "-m", "trainer.eval", *arguments],
        env={**passed, **FIXED, "PYTHONPATH": str(source)},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    raise typer.Exit(done.returncode)
