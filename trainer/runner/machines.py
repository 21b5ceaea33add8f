"""One training on several machines, which share the run's directory.

The command line is started once on each. The first machine prepares, plans, reports, chooses and submits, as
on one machine. The others start their ranks of each launch when the first says so, report how these ended,
and end with the first. A cluster's scheduler ends all of them when one is lost.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.runs.run_files import RunEnd, RunSpec, TrainerExitCode
from trainer.handoff import (
    LAUNCH_SPEC_VARIABLE,
    LaunchSpec,
    MachineEnd,
    MachinesLaunch,
    TrainingFailure,
    TrainingOutcome,
    read_record,
    write_record,
)
from trainer.runner.processes import EngineProcess, StopRequest, child_environment
from trainer.runner.supervise import (
    STOP_S,
    LaunchResult,
    SupervisedProcess,
    SupervisionLimits,
    Termination,
    launch_result,
    supervise,
)

log = logging.getLogger(__name__)

POLL_S = 0.5
#: From the end of our ranks, or a request to stop, until the first machine must have reported: it saves.
REPORT_S = 2 * STOP_S
#: A network file system may show a file this much later on another machine.
VISIBLE_S = 10.0
#: Causes that only the machine itself sees; a crash may be the consequence of another's end.
_CAUSES = (RunEnd.OOM, RunEnd.DISK_FULL, RunEnd.KILLED)


@dataclass(frozen=True)
class Machine:
    """This one among those that a run was started on."""

    rank: int = 0
    count: int = 1
    #: The address of the first.
    head: str = "127.0.0.1"


def this_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """Read the variables that a backend sets on each machine of a run on several."""
    rank = environment.get("GOD_MINER_NODE_RANK") or "0"
    count = environment.get("GOD_MINER_NODES") or "1"
    head = environment.get("GOD_MINER_HEAD")
    # For a reviewer: the address at which other machines of a run find this one; validators give one machine.
    return Machine(int(rank), int(count), head or socket.gethostname())


# — the first machine


def ask_machines(spec: LaunchSpec, commands: Sequence[tuple[str, ...]], env: Mapping[str, str]) -> None:
    """Let the others begin."""
    order = MachinesLaunch(spec=spec, commands=tuple(commands), env=dict(env))
    write_record(Path(spec.launch_dir) / MachinesLaunch.FILE, order)


def lost_machine(spec: LaunchSpec, machines: int) -> Callable[[], Termination | None]:
    """A reason to end our ranks: those of another machine have failed, and ours would wait for them."""

    def check() -> Termination | None:
        for rank, end in _machine_ends(spec, machines):
            if end.end is not RunEnd.FINISHED:
                return Termination(end.end, f"machine {rank}: {end.detail}")
        return None

    return check


def with_machine_ends(result: LaunchResult, spec: LaunchSpec, machines: int) -> LaunchResult:
    """The cause of a failure may be known to another machine alone; ours then saw a lost connection."""
    if machines == 1 or result.outcome is not None or result.end is not RunEnd.CRASHED:
        return result
    patience = time.monotonic() + VISIBLE_S
    while len(ends := list(_machine_ends(spec, machines))) < machines - 1 and time.monotonic() < patience:
        time.sleep(POLL_S)
    causes = (
        LaunchResult(end.end, f"machine {rank}: {end.detail}", moment=end.moment)
        for rank, end in ends
        if end.end in _CAUSES
    )
    return next(causes, result)


def _machine_ends(spec: LaunchSpec, machines: int) -> list[tuple[int, MachineEnd]]:
    ends = ((rank, read_record(MachineEnd, spec.machine_end_path(rank))) for rank in range(1, machines))
    return [(rank, end) for rank, end in ends if end is not None]


# — the others


def _with_head(command: tuple[str, ...], head: str) -> tuple[str, ...]:
    """The command with the first machine's address as this one sees it: there it may be a loopback."""
    if "--main_process_ip" not in command:
        return command
    at = command.index("--main_process_ip") + 1
    return (*command[:at], head, *command[at + 1 :])


@dataclass
class Follower:
    """Runs this machine's ranks of each launch."""

    run: RunSpec
    machine: Machine
    stop: StopRequest
    #: How programs are started.
    start: Callable[[Sequence[str], Mapping[str, str], Path], SupervisedProcess] = EngineProcess

    def execute(self) -> TrainerExitCode:
        """0 once the first machine has reported the run's end, whatever that is."""
        self.work.mkdir(parents=True, exist_ok=True)
        launch, limit = 0, self.run.deadline_at
        while True:
            launch += 1
            order = self._wait(Path(self.run.work_dir) / f"launch-{launch}", limit)
            if isinstance(order, TrainerExitCode):
                return order
            self._train(order)
            limit = time.time() + REPORT_S

    @property
    def work(self) -> Path:
        """Directory for files that only this machine needs."""
        return Path(self.run.work_dir) / f"machine-{self.machine.rank}"

    def _wait(self, folder: Path, limit: float) -> MachinesLaunch | TrainerExitCode:
        asked_at = None
        while True:
            if self._is_over():
                return TrainerExitCode.OK
            order = read_record(MachinesLaunch, folder / MachinesLaunch.FILE)
            if order is not None and self.machine.rank < len(order.commands):
                return order
            now = time.time()
            if self.stop.asked and asked_at is None:
                asked_at = now
                limit = min(limit, now + REPORT_S)
            if now > limit:
                log.error("machine %d: the first machine has not reported an end", self.machine.rank)
                return TrainerExitCode.HUNG if asked_at is None else TrainerExitCode.STOPPED
            time.sleep(POLL_S)

    def _is_over(self) -> bool:
        return Path(self.run.result_path).exists()

    def _train(self, order: MachinesLaunch) -> None:
        rank = self.machine.rank
        spec = order.spec.model_copy(update={"wrapper_pid": os.getpid()})
        more = {**self._own_paths(order.env), LAUNCH_SPEC_VARIABLE: str(spec.write(f"launch-{rank}.json"))}
        rewards = (str(spec.prepared.rewards_dir),) if spec.prepared.rewards_dir else ()
        command = _with_head(order.commands[rank], self.machine.head)
        child = self.start(command, child_environment(self.work, more, rewards), self.work)
        ended = supervise(child, self._limits(spec), self.stop)
        if ended.code == 0 or self._is_over():
            result = LaunchResult(RunEnd.FINISHED, "")
        else:
            plan = spec.plan
            per_node = plan.gpus.per_node
            own = range(rank * per_node, (rank + 1) * per_node)
            failures = [read_record(TrainingFailure, spec.failure_path(number)) for number in own]
            outcome = read_record(TrainingOutcome, spec.outcome_path)
            result = launch_result(ended, outcome, failures, marked=True)
        end = MachineEnd(end=result.end, detail=result.detail[:4000], moment=result.moment)
        log.info("machine %d: %s: %s", rank, end.end, end.detail or "no details")
        write_record(spec.machine_end_path(rank), end)

    def _own_paths(self, env: Mapping[str, str]) -> dict[str, str]:
        """Caches of compilers and libraries are this machine's; the plan is everybody's."""
        common = self.run.work_dir
        own = (f"{common}/{name}" for name in ("hf", "triton", "inductor"))
        mapped = {path: str(self.work) + path.removeprefix(common) for path in own}
        return {key: mapped.get(value, value) for key, value in env.items()}

    def _limits(self, spec: LaunchSpec) -> SupervisionLimits:
        """Limits of a follower: the first machine decides whether the training hangs."""

        def over() -> Termination | None:
            return Termination(RunEnd.STOPPED, "the first machine has ended") if self._is_over() else None

        return SupervisionLimits(
            hard_end=self.run.deadline_at, begun=spec.started_path, hang_s=math.inf, more=over
        )
