"""A run so small that it takes a second: a random Llama, rows of repeating tokens, a plan for one CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from core.choices import Attention, Engine, Method, Optimizer, Parallelism, Schedule
from core.hardware import parse_gpus
from core.plan import TrainingPlan
from core.plan_parts import (
    AdapterPlan,
    BatchPlan,
    LaunchPlan,
    LoaderPlan,
    OptimizerPlan,
    PrecisionPlan,
    SequencePlan,
    StepsPlan,
)
from core.progress import EvalEvent, StepEvent, events_in
from tests.core import builders
from trainer.callbacks.clock import Clock
from trainer.callbacks.report import Report
from trainer.callbacks.session import Session
from trainer.callbacks.submission import Submission
from trainer.native import net as nets
from trainer.native.batches import Layout, Rows
from trainer.native.judging import HeldOutLoss
from trainer.native.loop import Hands, Loop
from trainer.native.order import Order
from trainer.native.ranks import Ranks
from trainer.native.tokens import TokenFile, write_rows

VOCABULARY = 64
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


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

    made = []
    for _ in range(count):
        start, prompt, answer = (int(random.integers(low, high)) for low, high in ((0, 64), (2, 6), (4, 20)))
        made.append(row(start, prompt, answer, 1))
        if pairs:
            made.append(row(start, prompt, answer, -1))
    return write_rows(folder, VOCABULARY, made)


def plan(
    *,
    full: bool = False,
    micro: int = 4,
    accumulation: int = 1,
    world: int = 1,
    steps: int = 12,
    **changes: Any,
) -> TrainingPlan:
    cpu = parse_gpus("cpu")
    whole: dict[str, Any] = {
        "engine": Engine.NATIVE,
        "available": cpu.take(world),
        "gpus": cpu.take(world),
        "method": Method.FULL if full else Method.LORA,
        "adapter": None if full else AdapterPlan(rank=4, alpha=8, dropout=0.0, params=1),
        "parallelism": Parallelism.DDP if world > 1 else Parallelism.SINGLE,
        "batch": BatchPlan(micro=micro, accumulation=accumulation, world_size=world, eval_micro=4),
        "sequence": SequencePlan(length=32, per_epoch=48, tokens_per_epoch=1),
        "optimizer": OptimizerPlan(
            name=Optimizer.ADAMW_TORCH_FUSED, learning_rate=1e-2, schedule=Schedule.COSINE, warmup_steps=2
        ),
        "steps": StepsPlan(epochs=1, per_epoch=12, total=steps, eval_every=4, save_every=4, eval_rows=8),
        "precision": PrecisionPlan(bf16=False, tf32=False, attention=Attention.SDPA),
        "loader": LoaderPlan(workers=0, prefetch_factor=None, pin_memory=False),
        "launch": LaunchPlan(processes=world),
    }
    return builders.plan(**{**whole, **changes})


class Told(NamedTuple):
    """What a run said of itself."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    held_out: list[float]
    best: list[int]


def told(folder: Path) -> Told:
    events = [line.event for line in events_in((folder / "progress.jsonl").read_bytes())]
    steps = [event for event in events if isinstance(event, StepEvent)]
    judged = [event for event in events if isinstance(event, EvalEvent)]
    return Told(
        [event.loss if event.loss is not None else float("nan") for event in steps],
        [event.grad_norm or 0.0 for event in steps],
        [event.lr or 0.0 for event in steps],
        [event.score.value for event in judged],
        [event.score.step for event in judged if event.best],
    )


def loop(
    folder: Path,
    made: TrainingPlan,
    ranks: Ranks = ALONE,
    *,
    stop_at: int | None = None,
    name: str = "run",
    kl: float = 0.0,
    **order: Any,
) -> Loop:
    """Model, rows and plan put together in `folder`, where a former call may have made the model; what
    happens is told in `folder/name`."""
    path, own = folder / "model", folder / name
    own.mkdir(exist_ok=True)
    if not path.exists():
        model_folder(path)
    torch.manual_seed(1)
    model, attention = nets.load(path, made, ranks.device)
    layout = Layout(packed=bool(order.get("packing")), by_row=not order.get("packing"))
    train, held_out = rows(own / f"train{ranks.rank}"), rows(own / f"held{ranks.rank}", 8, seed=9)
    net = nets.Net(model, attention)
    if kl:
        base = nets.frozen_base(path, made, ranks.device) if made.adapter is None else None
        net = nets.AnchoredNet(model, attention, kl, base)
    hands = Hands(net, ranks, HeldOutLoss(net, Rows(held_out, Layout(by_row=True)), ranks, 4))
    session = Session(
        plan=made,
        clock=Clock(made, end_by=time.time() + 3600),
        submission=Submission(own / "submission", "tests/tiny", path),
        report=Report(own / "progress.jsonl" if ranks.rank == 0 else None),
        ranks=ranks,
        host=hands,
        stop_asked=lambda: stop_at is not None and session.step >= stop_at,
    )
    batch = made.batch
    whole = {"seed": 7, **order}
    return Loop(
        net=net,
        plan=made,
        ranks=ranks,
        train=Rows(train, layout),
        order=Order(
            train.lengths, made.sequence.length, batch.micro, batch.accumulation, ranks.world, **whole
        ),
        session=session,
        hands=hands,
        folder=own / "states",
        shape="tiny",
    )
