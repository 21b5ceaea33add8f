"""One training process of the native engine: `accelerate launch … -m trainer.native`, or torchrun, or alone.

Everything it needs is in the sheet, whose path is in the environment; see `trainer.sheet`.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from core.plan import TrainingPlan
from core.recipes.native import settings_of
from core.run_files import RunEnd
from trainer.callbacks.clock import Clock
from trainer.callbacks.failures import catch_all, give_up
from trainer.callbacks.guard import StopFile, dump_stacks_on_request, end_with, stop_on_term
from trainer.callbacks.report import Report
from trainer.callbacks.session import Session
from trainer.callbacks.submission import Submission
from trainer.loading import leave_out
from trainer.native import parts
from trainer.native.board import with_board
from trainer.native.judging import HeldOutLoss
from trainer.native.loop import Hands, Loop
from trainer.native.parts import Parts
from trainer.native.ranks import Ranks, joined
from trainer.native.watch import Watch
from trainer.sheet import Failure, Sheet, write_whole

#: Nothing that is planned takes as long as this many times its own forecast.
_HANG_FACTOR = 10.0
#: Compiling with autotuning takes a quarter of an hour; the wrapper's own patience ends after twenty minutes.
_COMPILING_S = 1100.0


class Run:
    """Puts the parts together, and knows at any moment what is being done."""

    def __init__(self, sheet: Sheet, plan: TrainingPlan, report: Report, ranks: Ranks) -> None:
        self.sheet, self.plan, self.report, self.ranks = sheet, plan, report, ranks
        self.session: Session | None = None

    def train(self) -> None:
        made = parts.assemble(self.sheet, self.plan, self.report, self.ranks)
        self.plan = made.plan
        loop = self._loop(made)
        if self.sheet.resume_from and not loop.resume(Path(self.sheet.resume_from)):
            self.report.note("resume", "no state could be taken up: the training begins anew")
        outcome = loop.run()
        if self.ranks.rank == 0:
            write_whole(self.sheet.outcome_path, outcome)
        self.ranks.wait()

    def _loop(self, made: Parts) -> Loop:
        run, plan, ranks = self.sheet.run, made.plan, self.ranks
        stop = StopFile(Path(run.stop_path))
        judge = HeldOutLoss(made.net, made.held_out, ranks, plan.batch.eval_micro) if made.held_out else None
        hands = Hands(made.net, ranks, judge)
        self.session = Session(
            plan=plan,
            clock=Clock(plan, end_by=run.end_by, now=time.time),
            submission=Submission(Path(run.submission_dir), run.model_id, Path(run.model_path)),
            report=self.report,
            ranks=ranks,
            host=hands,
            stop_asked=lambda: stop.asked,
        )
        return Loop(
            net=made.net,
            plan=plan,
            ranks=ranks,
            train=made.train,
            order=made.order,
            session=self.session,
            hands=hands,
            folder=Path(run.work_dir) / "output",
            begun=self.sheet.begun_path.touch if ranks.rank == 0 else lambda: None,
            shape=made.shape,
        )


def hang_seconds(plan: TrainingPlan) -> float:
    longest = max(plan.time.step_s, plan.time["evaluate"], plan.time["save"])
    compiling = _COMPILING_S if plan.precision.compile_mode else 0.0
    return max(settings_of(plan).hang_seconds, _HANG_FACTOR * longest, compiling)


def main() -> None:
    leave_out("sklearn")  # transformers' generation would take a second and more to import it
    sheet, rank = Sheet.read(), int(os.environ.get("RANK", "0"))
    plan = TrainingPlan.from_json(Path(sheet.plan_path).read_bytes())
    report = Report(Path(sheet.run.progress_path) if rank == 0 else None)
    if rank == 0 and settings_of(plan).tensorboard:
        report = with_board(report, Path(sheet.run.work_dir) / "tensorboard")
    runs: list[Run] = []

    def moment() -> str:
        session = runs[0].session if runs else None
        return session.moment if session else "load"

    def hung(reason: str) -> None:
        detail = f"rank {rank} stands still: {reason}"
        give_up(sheet, rank, Failure(end=RunEnd.HUNG, moment=moment(), detail=detail, at=time.time()))

    catch_all(sheet, rank, moment)
    dump_stacks_on_request()
    end_with(sheet.wrapper_pid)
    if sheet.wrapper_pid is None:
        stop_on_term(Path(sheet.run.stop_path))
    if rank == 0:
        sheet.marker_path.touch()
    with ExitStack() as stack:
        limit = hang_seconds(plan)
        watch = stack.enter_context(Watch(limit, hung))
        ranks = stack.enter_context(joined(cpu=plan.gpus.is_cpu, alive=watch.alive, hang_s=limit))
        runs.append(Run(sheet, plan, report, ranks))
        runs[0].train()


if __name__ == "__main__":
    main()
