"""A run so small that it takes a second: a random Llama, rows of repeating tokens, a plan for one CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from core.domain.choices import Attention, Engine, LrSchedule, Method, Optimizer, Parallelism
from core.domain.hardware import parse_gpus
from core.planning.plan import (
    AdapterPlan,
    BatchPlan,
    LaunchPlan,
    LoaderPlan,
    OptimizerPlan,
    PrecisionPlan,
    SequencePlan,
    StepsPlan,
    TrainingPlan,
)
from core.runs.progress import EvalEvent, NoteEvent, StepEvent, parse_events
from tests.core import builders
from trainer.inputs.token_file import TokenFile, write_rows
from trainer.native import model as nets
from trainer.native.batches import BatchLayout, SampleOrder, TokenRows
from trainer.native.checkpoints import Saver, TrainingPosition
from trainer.native.distributed import NativeCommunicator, shard, shard_mesh
from trainer.native.evaluation import HeldOutLoss, with_base_preferences
from trainer.native.optimizer import Stepper
from trainer.native.train import NativeHost, Trainer, TrainingSetup, moving_average, prober_of
from trainer.session.clock import RunClock
from trainer.session.progress_log import ProgressLog
from trainer.session.session import Session
from trainer.session.submission import Submission

VOCABULARY = 64
CPU = torch.device("cpu")
ALONE = NativeCommunicator(0, 1, CPU)


def model_folder(folder: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).save_pretrained(folder)
    return folder


def rows(folder: Path, count: int = 48, *, seed: int = 0, pairs: bool = False) -> TokenFile:
    """A prompt of a few tokens and an answer that counts on from it; of a pair the second one counts down."""
    random = np.random.default_rng(seed)

    def row(start: int, prompt: int, answer: int, step: int) -> tuple[list[int], list[bool]]:
        ids = [(start + step * max(at - prompt, 0)) % VOCABULARY for at in range(prompt + answer)]
        return ids, [at >= prompt for at in range(prompt + answer)]

    written = []
    for _ in range(count):
        start, prompt, answer = (int(random.integers(low, high)) for low, high in ((0, 64), (2, 6), (4, 20)))
        written.append(row(start, prompt, answer, 1))
        if pairs:
            written.append(row(start, prompt, answer, -1))
    return write_rows(folder, VOCABULARY, written)


def plan(
    *,
    full: bool = False,
    micro: int = 4,
    accumulation: int = 1,
    world: int = 1,
    steps: int = 12,
    **changes: Any,
) -> TrainingPlan:
    cpus = parse_gpus(f"{world}xcpu")
    whole: dict[str, Any] = {
        "engine": Engine.NATIVE,
        "available": cpus,
        "gpus": cpus,
        "method": Method.FULL if full else Method.LORA,
        "adapter": None if full else AdapterPlan(rank=4, alpha=8, dropout=0.0, params=1),
        "parallelism": Parallelism.DDP if world > 1 else Parallelism.SINGLE,
        "batch": BatchPlan(micro=micro, accumulation=accumulation, world_size=world, eval_micro=4),
        "sequence": SequencePlan(length=32, per_epoch=48, tokens_per_epoch=1),
        "optimizer": OptimizerPlan(
            name=Optimizer.ADAMW_TORCH_FUSED, learning_rate=1e-2, schedule=LrSchedule.COSINE, warmup_steps=2
        ),
        "steps": StepsPlan(epochs=1, per_epoch=12, total=steps, eval_every=4, save_every=4, eval_rows=8),
        "precision": PrecisionPlan(bf16=False, tf32=False, attention=Attention.SDPA),
        "loader": LoaderPlan(workers=0, prefetch_factor=None, pin_memory=False),
        "launch": LaunchPlan(processes=world),
    }
    return builders.plan(**{**whole, **changes})


def notes(folder: Path, kind: str) -> list[str]:
    events = (line.event for line in parse_events((folder / "progress.jsonl").read_bytes()))
    return [event.text for event in events if isinstance(event, NoteEvent) and event.kind == kind]


class Reported(NamedTuple):
    """What a run said of itself."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    #: Tokens of one sample, by the speeds of a step.
    sizes: list[float]
    held_out: list[float]
    best: list[int]


def reported(folder: Path) -> Reported:
    events = [line.event for line in parse_events((folder / "progress.jsonl").read_bytes())]
    steps = [event for event in events if isinstance(event, StepEvent)]
    judged = [event for event in events if isinstance(event, EvalEvent)]
    return Reported(
        [event.loss if event.loss is not None else float("nan") for event in steps],
        [event.grad_norm or 0.0 for event in steps],
        [event.lr or 0.0 for event in steps],
        [event.tokens_s / event.samples_s for event in steps if event.tokens_s and event.samples_s],
        [event.score.value for event in judged],
        [event.score.step for event in judged if event.best],
    )


def training(
    folder: Path,
    planned: TrainingPlan,
    ranks: NativeCommunicator = ALONE,
    *,
    stop_at: int | None = None,
    name: str = "run",
    kl: float = 0.0,
    held_rows: int = 8,
    pairs: bool = False,
    **order: Any,
) -> Trainer:
    """Model, rows and plan put together in `folder`, where an earlier call may have made the model; what
    happens is logged in `folder/name`."""
    path, own = folder / "model", folder / name
    own.mkdir(exist_ok=True)
    if not path.exists():
        model_folder(path)
    torch.manual_seed(1)
    mesh = shard_mesh(planned, ranks)
    model, attention = nets.load_model(path, planned, ranks.device, mesh)
    layout = BatchLayout(
        packed=bool(order.get("packing")), by_row=not (order.get("packing") or pairs), pairs=pairs
    )
    trained = TokenRows(rows(own / f"train{ranks.rank}", pairs=pairs), layout)
    held_out = rows(own / f"held{ranks.rank}", held_rows, seed=9, pairs=pairs)
    held = TokenRows(held_out, BatchLayout(by_row=not pairs, pairs=pairs))
    net = nets.DpoLossModel(model, attention, 0.1) if pairs else nets.LossModel(model, attention)
    if kl:
        base = nets.frozen_base(path, planned, ranks.device, mesh) if planned.adapter is None else None
        net = nets.KlLossModel(model, attention, kl, base)
    shard(net, planned, mesh, ranks.device)
    if isinstance(net, nets.DpoLossModel):
        trained, held = (
            with_base_preferences(net, each, ranks, 4, own, resumed=False) for each in (trained, held)
        )
    batch, sampling = planned.batch, {"seed": 7, **order}
    sample_order = SampleOrder(
        trained.lengths, planned.sequence.length, batch.micro, batch.accumulation, ranks.world, **sampling
    )
    setup = TrainingSetup(planned, net, trained, held, sample_order, "tiny")
    stepper = Stepper(net, planned, ranks)
    host = NativeHost(
        net,
        ranks,
        HeldOutLoss(net, held, ranks, 4),
        prober_of(setup, stepper, ranks, own / "snapshots"),
        moving_average(net, planned),
    )
    session = Session(
        plan=planned,
        clock=RunClock(planned, end_by=time.time() + 3600),
        submission=Submission(own / "submission", "tests/tiny", path),
        progress=ProgressLog(own / "progress.jsonl" if ranks.rank == 0 else None),
        ranks=ranks,
        host=host,
        stop_requested=lambda: stop_at is not None and session.step >= stop_at,
    )
    saver = Saver(own / "states", ranks, planned.steps.keep_checkpoints)
    return Trainer(setup, ranks, session, host, stepper, saver, TrainingPosition(0, "tiny"))
