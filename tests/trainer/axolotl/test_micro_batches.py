"""Micro-batches computed in parts, in the real trainers of transformers and TRL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from datasets import Dataset
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainingArguments
from trl import DPOConfig

from core.domain.tasks import TaskType
from core.planning.plan import TrainingPlan
from tests.core.engines.cases import text_plan
from tests.trainer import tiny
from trainer.axolotl.micro_batches import MicroBatchSplitter, order_steps
from trainer.axolotl.patches import add_kl
from trainer.axolotl.trainers import PairTrainer
from trainer.session.step_order import StepOrder

ROWS, LENGTH = 7, 12


def plan_for(task_type: TaskType, micro: int = ROWS) -> TrainingPlan:
    plan = text_plan(task_type)
    return plan.model_copy(update={"batch": plan.batch.model_copy(update={"micro": micro})})


def batch() -> dict[str, torch.Tensor]:
    """Rows of different lengths, each with a prompt that is not learned."""
    torch.manual_seed(3)
    ids = torch.randint(5, 300, (ROWS, LENGTH))
    lengths = torch.arange(ROWS) % 6 + 7
    there = torch.arange(LENGTH)[None] < lengths[:, None]
    labels = torch.where(there & (torch.arange(LENGTH)[None] >= 3), ids, -100)
    labels[0] = torch.where(there[0], ids[0], -100)  # all of it is learned, from its first token on
    return {"input_ids": ids, "attention_mask": there.long(), "labels": labels}


def supervised(folder: Path) -> Any:
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], gradient_accumulation_steps=2)
    trainer = Trainer(tiny.model(), arguments)
    trainer.current_gradient_accumulation_steps = 2
    return trainer


def pairs(folder: Path) -> Any:
    rows = [
        {"prompt_ids": [5, 6, 7], "chosen_ids": [8 + at] * (at + 2), "rejected_ids": [30 + at] * (7 - at)}
        for at in range(ROWS)
    ]
    arguments = DPOConfig(
        str(folder), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=ROWS
    )
    trainer = PairTrainer(
        model=tiny.model(),
        ref_model=tiny.model(seed=5),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 2
    return trainer


def passes_of(model: Any) -> list[int]:
    """Rows of each pass from now on."""
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda module, given, named: rows.append(len(named["input_ids"])), with_kwargs=True
    )
    return rows


def step(trainer: Any, inputs: Any, count: Any) -> tuple[float, list[torch.Tensor]]:
    loss = trainer.training_step(trainer.model, dict(inputs), count)
    gradients = [weight.grad.clone() for weight in trainer.model.parameters()]
    trainer.model.zero_grad()
    return float(loss), gradients


@pytest.mark.parametrize("kind", ["sum", "mean", "sum and divergence", "mean and divergence", "pairs"])
def test_the_parts_losses_and_gradients_add_up_to_the_wholes(tmp_path: Path, kind: str) -> None:
    """In parts of 3, 2 and 2 rows."""
    if kind == "pairs":
        trainer = pairs(tmp_path)
        inputs, count = next(iter(trainer.get_train_dataloader())), None
    else:
        trainer, inputs = supervised(tmp_path), batch()
        trainer.model_accepts_loss_kwargs = kind.startswith("sum")
        count = 2 * (inputs["labels"][:, 1:] != -100).sum() if kind.startswith("sum") else None
    splitter = MicroBatchSplitter(trainer, plan_for(TaskType.DPO if kind == "pairs" else TaskType.INSTRUCT))
    if kind.endswith("divergence"):
        add_kl(trainer, 3.0, tiny.model(seed=5), splitter.label_share)
    rows = passes_of(trainer.model)
    loss, gradients = step(trainer, inputs, count)
    assert splitter.regroup(4) == (4, "")
    halves = step(trainer, inputs, count)
    assert splitter.regroup(3) == (3, "")
    thirds = step(trainer, inputs, count)
    assert splitter.regroup(None) == (ROWS, "")
    step(trainer, inputs, count)
    sides = 2 if kind == "pairs" else 1
    assert [size // sides for size in rows] == [7, 3, 4, 2, 2, 3, 7]
    for other_loss, other in (halves, thirds):
        assert other_loss == pytest.approx(loss, rel=1e-4)
        torch.testing.assert_close(other, gradients, rtol=1e-3, atol=1e-6)


def test_evaluation_is_not_split(tmp_path: Path) -> None:
    trainer = supervised(tmp_path)
    splitter = MicroBatchSplitter(trainer, plan_for(TaskType.INSTRUCT))
    step(trainer, batch(), None)
    splitter.regroup(2)
    rows = passes_of(trainer.model)
    trainer.prediction_step(trainer.model, batch(), prediction_loss_only=True)
    assert rows == [ROWS]


def stand_in(**changes: Any) -> Any:
    done: list[int] = []
    given = {
        "training_step": lambda model, inputs, count: done.append(len(inputs)),
        "compute_loss": lambda *_: None,
        "model": SimpleNamespace(config=SimpleNamespace()),
        "is_fsdp_enabled": False,
        **changes,
    }
    return SimpleNamespace(done=done, **given)


@pytest.mark.parametrize(("is_fsdp_enabled", "kept_back"), [(False, 2), (True, 0)])
def test_gradients_travel_with_the_last_part_unless_they_are_sharded(
    is_fsdp_enabled: bool, kept_back: int
) -> None:
    entered: list[object] = []

    @contextmanager
    def no_sync(model: object) -> Iterator[None]:
        entered.append(model)
        yield

    accelerator = SimpleNamespace(no_sync=no_sync)
    trainer = stand_in(
        accelerator=accelerator, is_fsdp_enabled=is_fsdp_enabled, training_step=lambda *_: torch.tensor(1.0)
    )
    splitter = MicroBatchSplitter(trainer, plan_for(TaskType.INSTRUCT))
    splitter._rows = ROWS
    assert splitter.regroup(3) == (3, "")
    assert float(trainer.training_step(None, {"input_ids": torch.zeros(ROWS, 8)})) == 3.0
    assert len(entered) == kept_back


def test_what_cannot_be_split_is_refused_with_the_reason_and_computed_whole() -> None:
    rows = {"input_ids": torch.zeros(4, 8)}

    def refusal(
        micro: int, task_type: TaskType = TaskType.INSTRUCT, inputs: Any = rows, **changes: Any
    ) -> str:
        trainer = stand_in(**changes)
        splitter = MicroBatchSplitter(trainer, plan_for(task_type, micro=4))
        trainer.training_step(None, inputs)
        change = splitter.regroup(micro)
        assert change.micro == 4
        trainer.training_step(None, inputs)
        assert trainer.done == [len(inputs)] * 2
        return change.refusal

    assert refusal(4) == ""
    assert refusal(5) == "Axolotl's loader makes micro-batches of 4, not of 5"
    assert "packed into 1 row" in refusal(2, inputs={"input_ids": torch.zeros(1, 32)})
    assert "within a whole micro-batch" in refusal(2, TaskType.GRPO, inputs=[{"prompt": "x"}] * 8)
    mixture = SimpleNamespace(config=SimpleNamespace(output_router_logits=True))
    assert "experts" in refusal(2, model=mixture)
    sides = {"input_ids": torch.zeros(8, 8)}
    assert "bco_pair" in refusal(2, TaskType.DPO, inputs=sides, loss_types=["bco_pair"])


# — the order of a step's pairs


def paired(folder: Path, **arguments: Any) -> tuple[Any, TrainingPlan]:
    """A training of 24 pairs in steps of three passes of four."""
    rows = [
        {
            "prompt_ids": [5, 6, 7] * (at * 5 % 7),
            "chosen_ids": [8 + at] * (at * 3 % 11 + 2),
            "rejected_ids": [30 + at] * (at * 7 % 13 + 2),
        }
        for at in range(24)
    ]
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3} | arguments
    trainer = PairTrainer(
        model=tiny.model(),
        ref_model=tiny.model(seed=5),
        args=DPOConfig(str(folder), use_cpu=True, bf16=False, report_to=[], **options),
        train_dataset=Dataset.from_list(rows).shuffle(seed=2),
        processing_class=tiny.tokenizer(),
    )
    return trainer, plan_for(TaskType.DPO, 4)


def test_a_steps_passes_have_rows_of_like_length(tmp_path: Path) -> None:
    trainer, plan = paired(tmp_path)
    order_steps(trainer, plan)
    widths = [inputs["input_ids"].shape[1] for inputs in trainer.get_train_dataloader()]
    steps = [widths[:3], widths[3:]]
    assert all(step == sorted(step, reverse=True) and step[0] > step[-1] for step in steps)
    rows = trainer.train_dataset
    longest = max(
        len(row["prompt_ids"]) + max(map(len, (row["chosen_ids"], row["rejected_ids"]))) for row in rows
    )
    assert max(widths) == longest


def test_ranks_get_passes_of_like_length_from_accelerates_loader(tmp_path: Path) -> None:
    """It deals micro-batches out in turn. Two ranks, steps of three passes of two each."""
    trainer, plan = paired(tmp_path, per_device_train_batch_size=2)
    # Two processes would have to meet: the trainer only has to say that there are two.
    trainer.args = SimpleNamespace(**vars(trainer.args), train_batch_size=2, world_size=2)
    order_steps(trainer, plan)
    order = trainer._get_train_sampler()
    lengths = {row: order._lengths[row] for row in order}
    ranks = [
        list(BatchSamplerShard(BatchSampler(order, 2, drop_last=False), num_processes=2, process_index=rank))
        for rank in range(2)
    ]
    for start in (0, 3):
        widths = [[max(lengths[row] for row in micro) for micro in rank[start : start + 3]] for rank in ranks]
        assert all(rank == sorted(rank, reverse=True) for rank in widths)
        assert [first >= second for first, second in zip(*widths, strict=True)] == [True, False, True]
    assert sorted(row for rank in ranks for micro in rank for row in micro) == list(range(24))


def test_a_step_has_the_gradient_of_its_rows_in_any_order(tmp_path: Path) -> None:
    trainer, plan = paired(tmp_path)
    order_steps(trainer, plan)
    order = list(trainer._get_train_sampler())[:12]
    trainer.current_gradient_accumulation_steps = 3
    found = []
    for rows in (order, sorted(order)):
        trainer.model.zero_grad()
        for start in range(0, 12, 4):
            part = [trainer.train_dataset[row] for row in rows[start : start + 4]]
            trainer.training_step(trainer.model, trainer.data_collator(part), None)
        found.append([weight.grad.clone() for weight in trainer.model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 1},
        {"train_sampling_strategy": "sequential"},
        {"loss_type": ["aot"]},
        {"accelerator_config": {"split_batches": True}},
    ],
    ids=["one pass", "one pair", "in the data's order", "pairs compared", "batches split"],
)
def test_the_order_is_the_engines_where_it_says_so_or_nothing_is_gained(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    trainer, plan = paired(tmp_path, **arguments)
    order_steps(trainer, plan)
    assert not isinstance(trainer._get_train_sampler(), StepOrder)


def test_the_last_stretch_has_an_order_of_its_own_rows(tmp_path: Path) -> None:
    """It trains on others, with the same loader."""
    trainer, plan = paired(tmp_path)
    order_steps(trainer, plan)
    trainer.train_dataset = trainer.train_dataset.select(range(14))
    seen = sum(len(inputs["input_ids"]) // 2 for inputs in trainer.get_train_dataloader())
    assert seen == 14
    assert sorted(trainer._get_train_sampler()) == list(range(14))


def test_a_resumed_epoch_goes_on_in_its_own_order(tmp_path: Path) -> None:
    """A loader that skips rows tells the sampler of several processes no epoch."""
    trainer, plan = paired(tmp_path)
    order_steps(trainer, plan)
    first = list(trainer._get_train_sampler())
    trainer.state.epoch = 1.5
    second, loader = list(trainer._get_train_sampler()), trainer.get_train_dataloader()
    assert first != second
    widths = [inputs["input_ids"].shape[1] for inputs in skip_first_batches(loader, 3)]
    rows = [trainer.train_dataset[row] for row in second[12:]]
    answers = [max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]
    lengths = [len(row["prompt_ids"]) + most for row, most in zip(rows, answers, strict=True)]
    assert widths == [max(lengths[start : start + 4]) for start in (0, 4, 8)]
