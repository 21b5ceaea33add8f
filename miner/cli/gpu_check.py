"""`god-miner gpu-check`: measure this machine's GPU, and let plans follow what it showed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from core.domain.errors import ConfigError, Problem
from core.system.files import write_atomically
from miner.cli.options import load_settings
from miner.cli.output import echo


def gpu_check(
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Directory for the table and the figures.")
    ] = Path("gpu-check"),
    seconds: Annotated[float, typer.Option(min=20, help="Seconds after which everything is over.")] = 300,
    part: Annotated[
        list[str] | None, typer.Option(help="Part to run, e.g. lora (repeatable). Default: all, in order.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory of a model to train a few steps of, too."),
    ] = None,
    use: Annotated[
        bool, typer.Option("--use", help="Let plans follow the measurements from now on.")
    ] = False,
) -> None:
    """Measure this machine's first GPU beside what plans expect of it, with random weights of real shapes.

    Needs a checkout and the training environment. Run it while nothing else is on the GPU."""
    from core.planning.measured import measured_file
    from miner.backends.environment import training_interpreter
    from miner.jobs.native_runs import child_environment

    if use and part:
        raise ConfigError(
            "gpu-check", [Problem("--use", "", "takes all parts: plans follow one file of a card")]
        )
    environment = child_environment()
    if not Path(environment["PYTHONPATH"], "benchmarks", "gpu").is_dir():
        raise ConfigError("gpu-check", [Problem("benchmarks", "", "is in a checkout only: run it from one")])
    arguments = ["--seconds", f"{seconds:g}", "--out", str(out.resolve())]
    arguments += [word for name in part or () for word in ("--part", name)]
    arguments += ["--model", str(model.resolve())] if model is not None else []
    command = [str(training_interpreter(load_settings()).path), "-m", "benchmarks", "gpu", *arguments]
    began = {file: file.stat().st_mtime_ns for file in out.glob("*.yaml")}
    code = _run_to_its_end(command, environment)
    if use:
        new = [file for file in out.glob("*.yaml") if file.stat().st_mtime_ns != began.get(file)]
        if not new:
            raise ConfigError("gpu-check", [Problem("--use", "", f"no GPU was measured; see {out / 'log'}")])
        target = measured_file(new[0].stem)
        target.parent.mkdir(exist_ok=True)
        write_atomically(target, new[0].read_bytes(), mode=0o644)
        echo(f"plans for {new[0].stem} follow {os.path.relpath(target)}; a running daemon after its restart")
    raise typer.Exit(code)


def _run_to_its_end(command: list[str], environment: Mapping[str, str]) -> int:
    """Wait for the benchmark, after a signal too: it ends its parts and writes the table."""
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as child:

        def stop(_number: int, _frame: object) -> None:
            child.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
