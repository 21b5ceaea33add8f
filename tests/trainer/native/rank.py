"""The ranks of a tiny run, for tests with several: forks of a process that has imported the stack.

FOLDER CASE, and a case is how:method:world[:trouble]. The ranks' exit codes lie in `FOLDER/codes-CASE` as
JSON, and what each said in `FOLDER/said-CASE-RANK`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from core.domain.choices import Parallelism
from core.planning.plan import EmaPlan, FsdpPlan
from core.runs.run_files import CONTROL_FILE, EXIT_OF, RunControl, TrainerExitCode, write_control
from tests.trainer.native import tiny
from trainer.native import checkpoints, distributed
from trainer.native.train import Trainer, resume, run_loop
from trainer.runner.processes import free_port
from trainer.session import session
from trainer.session.control import ControlFile
from trainer.session.failures import failure_of
from trainer.session.watchdog import HangWatchdog

#: What a rank that stands still is given, and what a healthy one never needs.
SOON_S, LONG_S = 3.0, 300.0


def one(folder: Path, case: str) -> None:
    """One rank, to its end. A case that resumes goes on in the folder of the one that it names."""
    how, method, world, *rest = case.split(":")
    trouble = rest[0] if rest else ""
    name = f"{how}:{method}:{world}" if trouble == "resume" else case

    def hung(reason: str) -> None:
        print(f"stands still: {reason}", flush=True)
        os._exit(TrainerExitCode.HUNG)

    reported: list[Callable[[], None]] = [lambda: None]
    with distributed.join_process_group(cpu=True, heartbeat=lambda: reported[-1](), hang_s=LONG_S) as group:
        parts = 2 if trouble in ("control", "parts") else 1
        shape = {"micro": 8 // group.world // parts, "accumulation": parts, "world": group.world}
        plan = tiny.plan(full=method == "full", steps=8, **shape)
        if how == "fsdp":
            plan = plan.model_copy(update={"parallelism": Parallelism.FSDP, "fsdp": FsdpPlan()})
        if trouble == "ema":
            plan = plan.model_copy(update={"ema": EmaPlan(decay=0.5)})
        kl = 20.0 if trouble == "kl" else 0.0
        pairs = trouble == "dpo"
        trainer = tiny.training(folder, plan, group, name=name, kl=kl, pairs=pairs)
        group.require_same("rows", *trainer.setup.train.tokens.fingerprint())
        if trouble == "other-rows":
            rows = tiny.rows(folder / f"own-{group.rank}", seed=group.rank)
            group.require_same("rows", *rows.fingerprint())
        if trouble == "resume":
            state = checkpoints.newest_checkpoint(folder / name / "states")
            assert state is not None
            assert resume(trainer, state) == state
        # Watched from here on: how long a busy machine takes to begin is nobody's hang.
        stands_still = trouble == "hang" and group.rank == 1
        if trouble == "control":
            ask_on_the_way(trainer, folder / name / CONTROL_FILE)
        with HangWatchdog(SOON_S if stands_still else LONG_S, hung) as watch:
            reported.append(watch.heartbeat)
            if trouble == "die" and group.rank == 1:
                os._exit(7)
            if stands_still:
                time.sleep(600)
            run_loop(trainer)


def ask_on_the_way(trainer: Trainer, path: Path) -> None:
    """The first rank's file asks for smaller passes from step 2 on and for larger ones from step 5 on."""
    session.MAX_STEPS_BETWEEN_AGREEMENTS = 1
    file = ControlFile(path, trainer.session.progress.note, every_s=0)
    requests = {2: RunControl(number=1, micro=1, duty=0.8), 5: RunControl(number=2, micro=8)}

    def take() -> RunControl | None:
        if request := requests.get(trainer.session.step):
            write_control(path, request)
        return file.take()

    trainer.session.take_control = take


def as_rank(folder: Path, case: str, rank: int, world: int, port: str) -> NoReturn:
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {key: str(value) for key, value in named.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    log = os.open(folder / f"said-{case}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    try:
        one(folder, case)
    except BaseException as error:
        traceback.print_exc()
        failure = failure_of(error, "train")
        print(failure.detail, flush=True)
        os._exit(int(EXIT_OF.get(failure.end, TrainerExitCode.CRASHED)))
    sys.stdout.flush()
    os._exit(0)


def main(folder: str, case: str) -> None:
    world, port = int(case.split(":")[2]), free_port()
    children = []
    for rank in range(world):
        if not (child := os.fork()):
            as_rank(Path(folder), case, rank, world, str(port))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    Path(folder, f"codes-{case}").write_text(json.dumps(codes))
