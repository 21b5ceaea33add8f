"""One training process of the native engine: `accelerate launch … -m trainer.native`, or torchrun, or alone.

Everything it needs is in the sheet, whose path is in the environment; see `trainer.sheet`.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from core.plan import TrainingPlan
from trainer.callbacks.clock import Clock
from trainer.callbacks.failures import catch_all
from trainer.callbacks.guard import StopFile, dump_stacks_on_request, end_with
from trainer.callbacks.report import Report
from trainer.callbacks.session import Session
from trainer.callbacks.submission import Submission
from trainer.errors import BadModel
from trainer.native import fit, loop, speed
from trainer.native import net as nets
from trainer.native.batches import Layout
from trainer.native.loop import Hands, HeldOutLoss, Loop, Rows
from trainer.native.order import Order
from trainer.native.prepared import token_file
from trainer.native.ranks import Ranks, joined
from trainer.sheet import Sheet, write_whole


class Run:
    """Puts the parts together, and knows at any moment what is being done."""

    def __init__(self, sheet: Sheet, plan: TrainingPlan, report: Report, ranks: Ranks) -> None:
        self.sheet, self.plan, self.report, self.ranks = sheet, plan, report, ranks
        self.work = Path(sheet.run.work_dir) / "native"
        self.session: Session | None = None

    def train(self) -> None:
        run, plan, ranks = self.sheet.run, self.plan, self.ranks
        if run.kl_coefficient:
            raise BadModel("the native trainer has no KL term; a task with one is Axolotl's")
        torch.manual_seed(plan.seed)
        speed.fast_numbers(plan)
        self.report.stage("load", "the model")
        model, attention = nets.load(Path(run.model_path), plan, ranks.device)
        vocabulary = int(nets.plain(model).config.vocab_size)
        train, held_out = self._rows("train", vocabulary), self._rows("eval", vocabulary)
        assert train is not None
        net: nets.Net
        if train.layout.pairs:
            net = nets.PreferenceNet(model, attention, plan.dpo.beta if plan.dpo else 0.1)
        else:
            net = nets.Net(model, attention)
        speed.fp8(net, plan, self.report.note)
        if ranks.device.type == "cuda" and plan.engine_config.get("probe_batch", True):
            self.plan = plan = fit.larger_micro(plan, fit.probe(net, plan, train.layout, ranks))
        if isinstance(net, nets.PreferenceNet):
            self.report.stage("load", "what the base model prefers")
            train, held_out = self._compared(net, train), held_out and self._compared(net, held_out)
        speed.compiled(net, plan, self.report.note)
        judge = HeldOutLoss(net, held_out, ranks, plan.batch.eval_micro) if held_out else None
        self._train(net, train, Hands(net, ranks, judge, None))

    def _train(self, net: nets.Net, train: Rows, hands: Hands) -> None:
        run, plan, ranks = self.sheet.run, self.plan, self.ranks
        stop = StopFile(Path(run.stop_path))
        self.session = Session(
            plan=plan,
            clock=Clock(plan, end_by=run.end_by, now=time.time),
            submission=Submission(Path(run.submission_dir), run.model_id, Path(run.model_path)),
            report=self.report,
            ranks=ranks,
            host=hands,
            stop_asked=lambda: stop.asked,
        )
        made = Loop(
            net=net,
            plan=plan,
            ranks=ranks,
            train=train,
            order=self._order(train),
            session=self.session,
            hands=hands,
            folder=Path(run.work_dir) / "output",
            begun=self.sheet.begun_path.touch if ranks.rank == 0 else lambda: None,
            shape=f"{self.sheet.prepared.digest[:12]} {plan.batch.effective} {plan.sequence.length}",
        )
        if self.sheet.resume_from:
            made.resume(Path(self.sheet.resume_from))
        outcome = made.run()
        if ranks.rank == 0:
            write_whole(self.sheet.outcome_path, outcome)
        ranks.wait()

    def _rows(self, which: str, vocabulary: int) -> Rows | None:
        prepared = self.sheet.prepared
        table = prepared.train_path if which == "train" else prepared.eval_path
        if table is None:
            return None
        tokens, pairs = token_file(Path(table), self.work / which, vocabulary, self.ranks)
        packed = which == "train" and self.plan.sequence.packing and not pairs
        fixed = which == "train" and (packed or self.plan.sequence.pad_to_length)
        layout = Layout(
            length=self.plan.sequence.length if fixed else None,
            packed=packed,
            by_row=not pairs and self.plan.engine_config.get("objective", "rows") == "rows",
            pairs=pairs,
        )
        return Rows(tokens, layout)

    def _compared(self, net: nets.PreferenceNet, rows: Rows) -> Rows:
        """The base's opinion, asked once before anything is learned; a resumed run has it on disk."""
        path = self.work / f"reference-{len(rows.tokens)}.pt"
        if self.sheet.resume_from and path.exists():
            reference = torch.load(path, weights_only=True)
        else:
            reference = loop.preferences(net, rows, self.ranks, self.plan.batch.eval_micro)
            if self.ranks.rank == 0:
                torch.save(reference, path)
        return Rows(rows.tokens, rows.layout, reference)

    def _order(self, train: Rows) -> Order:
        batch, sequence = self.plan.batch, self.plan.sequence
        lengths = train.tokens.lengths
        if train.layout.pairs:
            lengths = lengths.reshape(-1, 2).max(axis=1)
        return Order(
            lengths,
            sequence.length,
            batch.micro,
            batch.accumulation,
            self.ranks.world,
            seed=self.plan.seed,
            packing=train.layout.packed,
            group_by_length=sequence.group_by_length,
        )


def main() -> None:
    sheet, rank = Sheet.read(), int(os.environ.get("RANK", "0"))
    plan = TrainingPlan.from_json(Path(sheet.plan_path).read_bytes())
    report = Report(Path(sheet.run.progress_path) if rank == 0 else None)
    runs: list[Run] = []

    def moment() -> str:
        session = runs[0].session if runs else None
        return session.moment if session else "load"

    catch_all(sheet, rank, moment)
    dump_stacks_on_request()
    end_with(sheet.wrapper_pid)
    if rank == 0:
        sheet.marker_path.touch()
    with ExitStack() as stack:
        ranks = stack.enter_context(joined(cpu=plan.gpus.is_cpu))
        runs.append(Run(sheet, plan, report, ranks))
        runs[0].train()


if __name__ == "__main__":
    main()
