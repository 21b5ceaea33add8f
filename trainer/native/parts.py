"""What a run is made of, from the sheet and the plan: the model, its rows, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from core.choices import Attention
from core.plan import TrainingPlan
from core.recipes.native import settings_of
from trainer.callbacks.report import Report
from trainer.native import fit, judging, speed
from trainer.native import net as nets
from trainer.native.batches import Layout, Rows
from trainer.native.order import Order
from trainer.native.prepared import token_file
from trainer.native.ranks import Ranks
from trainer.sheet import Sheet


@dataclass(frozen=True)
class Parts:
    #: With the batch that was found to fit.
    plan: TrainingPlan
    net: nets.Net
    train: Rows
    held_out: Rows | None
    order: Order
    #: Of the numbers that decide what a step is.
    shape: str


def assemble(sheet: Sheet, plan: TrainingPlan, report: Report, ranks: Ranks) -> Parts:
    work = Path(sheet.run.work_dir) / "native"
    torch.manual_seed(plan.seed)
    speed.fast_numbers(plan)
    report.stage("load", "the model")
    model, attention = nets.load(Path(sheet.run.model_path), plan, ranks.device)
    ranks.alive()
    vocabulary = int(nets.plain(model).config.vocab_size)
    train, held_out = rows(sheet, plan, ranks, vocabulary, "train"), None
    if sheet.prepared.eval_path is not None:
        held_out = rows(sheet, plan, ranks, vocabulary, "eval")
    net = _net(sheet, plan, model, attention, train.layout.pairs, ranks.device)
    speed.fp8(net, plan, report.note)
    if ranks.device.type == "cuda" and settings_of(plan).probe_batch:
        plan = fit.larger_micro(plan, fit.probe(net, plan, train.layout, ranks))
    if isinstance(net, nets.PreferenceNet):
        report.stage("load", "what the base model prefers")
        resumed = sheet.resume_from is not None
        train = compared(net, train, plan, ranks, work, resumed=resumed)
        held_out = held_out and compared(net, held_out, plan, ranks, work, resumed=resumed)
    speed.compiled(net, plan, report.note)
    order = order_of(train, plan, ranks.world)
    shape = f"{sheet.prepared.digest[:12]} {plan.batch.effective} {plan.sequence.length} {order.ramp}"
    return Parts(plan, net, train, held_out, order, shape)


def _net(
    sheet: Sheet,
    plan: TrainingPlan,
    model: torch.nn.Module,
    attention: Attention,
    pairs: bool,
    device: torch.device,
) -> nets.Net:
    if pairs:
        return nets.PreferenceNet(model, attention, plan.dpo.beta if plan.dpo else 0.1)
    if not sheet.run.kl_coefficient:
        return nets.Net(model, attention)
    base = nets.frozen_base(Path(sheet.run.model_path), plan, device) if plan.adapter is None else None
    return nets.AnchoredNet(model, attention, sheet.run.kl_coefficient, base)


def rows(sheet: Sheet, plan: TrainingPlan, ranks: Ranks, vocabulary: int, which: str) -> Rows:
    table = sheet.prepared.train_path if which == "train" else sheet.prepared.eval_path
    assert table is not None
    folder = Path(sheet.run.work_dir) / "native" / which
    tokens, pairs = token_file(Path(table), folder, vocabulary, plan, ranks)
    ranks.same(f"rows ({which})", *tokens.fingerprint())
    packed = which == "train" and plan.sequence.packing and not pairs
    fixed = which == "train" and (packed or plan.sequence.pad_to_length)
    layout = Layout(
        length=plan.sequence.length if fixed else None,
        packed=packed,
        by_row=not pairs and settings_of(plan).objective == "rows",
        pairs=pairs,
    )
    return Rows(tokens, layout)


def compared(
    net: nets.PreferenceNet, rows: Rows, plan: TrainingPlan, ranks: Ranks, work: Path, *, resumed: bool
) -> Rows:
    """With the base's opinion, asked once before anything is learned; a resumed run has it on disk."""
    path = work / f"reference-{rows.tokens.fingerprint()[-1]:08x}.pt"
    if resumed and path.exists():
        reference = torch.load(path, weights_only=True)
    else:
        reference = judging.preferences(net, rows, ranks, plan.batch.eval_micro)
        if ranks.rank == 0:
            torch.save(reference, half := path.with_suffix(".half"))
            half.replace(path)
    return Rows(rows.tokens, rows.layout, reference)


def order_of(train: Rows, plan: TrainingPlan, world: int) -> Order:
    batch, sequence = plan.batch, plan.sequence
    lengths = train.tokens.lengths
    if train.layout.pairs:
        lengths = lengths.reshape(-1, 2).max(axis=1)
    return Order(
        lengths,
        sequence.length,
        batch.micro,
        batch.accumulation,
        world,
        seed=plan.seed,
        packing=train.layout.packed,
        group_by_length=sequence.group_by_length,
        ramp=settings_of(plan).ramp_steps(plan.steps.total),
    )
