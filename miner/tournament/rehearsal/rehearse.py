"""Do with a commit what validators do: clone, build, run, kill at the limit, upload, score.

Everything happens in one directory; what was made in Docker is removed again. Inputs that the operator does
not name are made up: they show that a task runs from end to end, not how good its model is.
"""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from pathlib import Path

from core.domain.units import show_seconds
from core.system.files import remove_tree
from miner.engines.docker.client import DockerClient
from miner.tournament.checkout import clone_repository
from miner.tournament.rehearsal.build import Build, build_entry, remove_entry
from miner.tournament.rehearsal.container import internal_network, training_machine
from miner.tournament.rehearsal.inputs import check_inputs
from miner.tournament.rehearsal.options import RehearsalOptions, Say
from miner.tournament.rehearsal.report import Rehearsal
from miner.tournament.rehearsal.task_run import TaskRun
from miner.tournament.rules import TournamentTask


def rehearse(
    client: DockerClient, source: str, options: RehearsalOptions, say: Say = lambda text: None
) -> Rehearsal:
    """Rehearse every task; a task that fails is a part of the report. `GodMinerError` where nothing can be
    rehearsed: no repository, no Docker, inputs that are not there."""
    began = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    check_inputs(options)
    machine = training_machine(client, options.gpus)
    say(f"cloning {source}")
    clone = clone_repository(source, options.commit, options.output / "checkout")
    report = Rehearsal(source, clone.commit, clone.seconds, clone.size_bytes, output=str(options.output))
    with ExitStack() as stack:
        if not options.keep:
            stack.callback(remove_tree, options.output / "checkout")
        network, no_bridge = stack.enter_context(internal_network(client))
        for task in options.tasks:
            build = _built(client, clone.directory, task, options, report, stack, say)
            rehearsed = TaskRun(client, task, options, machine, build, network, say)
            if no_bridge:
                rehearsed.report.deviations.append(no_bridge)
            report.tasks.append(rehearsed.run())
    report.seconds = time.monotonic() - began
    return report


def _built(
    client: DockerClient,
    root: Path,
    task: TournamentTask,
    options: RehearsalOptions,
    report: Rehearsal,
    stack: ExitStack,
    say: Say,
) -> Build:
    """Each Dockerfile is built once, though validators build it for every task."""
    for build in report.builds:
        if build.dockerfile.endswith(task.dockerfile):
            return build
    say(f"building {task.dockerfile}")
    tag = f"god-miner-rehearsal:{uuid.uuid4().hex[:12]}"
    build = build_entry(
        client,
        root,
        task.dockerfile,
        tag,
        arguments=options.build_arguments,
        network=options.build_network,
        on_line=lambda line: say(f"  {line}") if line.startswith("Step ") else None,
    )
    if not options.keep:
        stack.callback(remove_entry, client, build)
    report.builds.append(build)
    say(f"  {build.problem or f'built in {show_seconds(build.seconds)}'}")
    return build
