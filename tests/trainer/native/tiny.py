"""A run so small that it takes a second: a random Llama, rows of repeating tokens, a plan for one CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from core.run_files import RunEnd
from tests.core import builders
from trainer.native import net as nets
from trainer.native.batches import Layout
from trainer.native.loop import Loop, Rows, Step
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


class Recorder:
    """A coach that remembers, and evaluates as the plan says."""

    def __init__(self, every: int = 4, stop_at: int | None = None) -> None:
        self.every, self.stop_at = every, stop_at
        self.steps: list[Step] = []
        self.losses: list[float] = []
        self.states: list[Path] = []
        self.submitted: list[int] = []

    def total_steps(self, planned: int, done: int, step_s: float) -> int:
        return planned

    def stepped(self, step: Step) -> None:
        self.steps.append(step)

    def rate_factor(self) -> float:
        return 1.0

    def wants_evaluation(self, done: int, total: int) -> bool:
        return done % self.every == 0

    def evaluated(self, loss: float, done: int, seconds: float) -> bool:
        self.losses.append(loss)
        return loss <= min(self.losses)

    def submit(self, net: torch.nn.Module, done: int) -> None:
        self.submitted.append(done)

    def saved(self, folder: Path, done: int) -> None:
        self.states.append(folder)

    def verdict(self) -> RunEnd | None:
        return RunEnd.STOPPED if self.stop_at is not None and len(self.steps) >= self.stop_at else None


def loop(folder: Path, made: TrainingPlan, coach: Recorder, ranks: Ranks = ALONE, **order: Any) -> Loop:
    """Model, rows and plan put together in `folder`, where a former call may have made the model."""
    path = folder / "model"
    if not path.exists():
        model_folder(path)
    torch.manual_seed(1)
    model, attention = nets.load(path, made, ranks.device)
    layout = Layout(packed=bool(order.get("packing")), by_row=not order.get("packing"))
    own = folder / f"rows{ranks.rank}"
    train = rows(own / "train") if not (own / "train").exists() else TokenFile.open(own / "train", VOCABULARY)
    held_out = rows(own / "held", 8, seed=9)
    batch = made.batch
    whole = {"seed": 7, **order}
    return Loop(
        net=nets.Net(model, attention),
        plan=made,
        ranks=ranks,
        train=Rows(train, layout),
        held_out=Rows(held_out, Layout(by_row=True)),
        order=Order(
            train.lengths, made.sequence.length, batch.micro, batch.accumulation, ranks.world, **whole
        ),
        coach=coach,
        folder=folder / "states",
        shape="tiny",
    )
