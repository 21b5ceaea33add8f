"""Do with a commit what validators do: clone, build, run, kill at the limit, upload, score.

Everything happens in one directory; what was made in Docker is removed again. Inputs that the operator does
not name are made up: they show that a task runs from end to end, not how good its model is.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

from core.domain.units import show_seconds
from core.system.files import remove_tree, write_atomically
from miner.backends.docker.client import DockerClient
from miner.reports.report import redact_report
from miner.tournament.checkout import clone_repository
from miner.tournament.rehearsal.build import Build, build_entry, remove_entry
from miner.tournament.rehearsal.container import internal_network, training_machine
from miner.tournament.rehearsal.inputs import check_entry, check_inputs
from miner.tournament.rehearsal.leftovers import IMAGE, RECORD, RehearsalRecord, rehearsal_record
from miner.tournament.rehearsal.options import RehearsalOptions, Say
from miner.tournament.rehearsal.report import Rehearsal
from miner.tournament.rehearsal.task_run import RehearsalSetup, TaskRun
from miner.tournament.rules import TournamentTask

#: In the output directory.
REPORT = "report.json"


def rehearse(
    client: DockerClient, source: str, options: RehearsalOptions, say: Say = lambda text: None
) -> Rehearsal:
    """Rehearse every task; a task that fails is a part of the report. `GodMinerError` where nothing can be
    rehearsed: no repository, no Docker, inputs that are not there. The report is written after every part."""
    began = time.monotonic()
    check_inputs(options)
    machine = training_machine(client, options.gpus)
    options.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        record = stack.enter_context(rehearsal_record(options.output))
        stack.callback(_remove_unused, options.output)
        if options.keep:
            stack.callback(record.keep)
        else:
            stack.callback(remove_tree, options.output / "checkout")
        say(f"cloning {source}")
        clone = clone_repository(source, options.commit, options.output / "checkout")
        check_entry(clone.directory, options.tasks)
        report = Rehearsal(source, clone.commit, clone.seconds, clone.size_bytes, output=str(options.output))

        def save() -> None:
            report.seconds = time.monotonic() - began
            found = redact_report(report.as_dict(), options.hide)
            text = json.dumps(found, indent=2) + "\n"
            write_atomically(options.output / REPORT, text.encode(), mode=0o644)

        save()
        network, no_bridge = stack.enter_context(internal_network(client, options.output))
        setup = RehearsalSetup(client, options, machine, network, say, save)
        for task in options.tasks:
            build = _built(setup, clone.directory, task, report, stack, record)
            run = TaskRun(setup, task, build)
            if no_bridge:
                run.report.deviations.append(no_bridge)
            report.tasks.append(run.report)
            save()
            run.run()
            save()
        report.complete = True
        save()
    return report


def _remove_unused(output: Path) -> None:
    """A rehearsal that was refused leaves no directory."""
    if [path.name for path in output.iterdir()] == [RECORD]:
        remove_tree(output)


def _built(
    setup: RehearsalSetup,
    root: Path,
    task: TournamentTask,
    report: Rehearsal,
    stack: ExitStack,
    record: RehearsalRecord,
) -> Build:
    """Each Dockerfile is built once, though validators build it for every task."""
    for build in report.builds:
        if build.dockerfile.endswith(task.dockerfile):
            return build
    client, options, say = setup.client, setup.options, setup.say
    say(f"building {task.dockerfile}")
    tag = f"{IMAGE}:{uuid.uuid4().hex[:12]}"
    record.add_build(tag)
    build = build_entry(
        client,
        root,
        task.dockerfile,
        tag,
        arguments=options.build_arguments,
        network=options.build_network,
        on_line=lambda line: say(f"  {line}") if line.startswith("Step ") else None,
        on_step=record.add_step,
    )
    if not options.keep:
        stack.callback(remove_entry, client, build)
    report.builds.append(build)
    say(f"  {build.problem or f'built in {show_seconds(build.seconds)}'}")
    return build
