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
from tests.core.recipes.cases import text_plan
from tests.trainer import tiny
from trainer.axolotl.micro_batches import MicroBatchSplitter, _borders, order_steps
from trainer.axolotl.patches import add_kl
from trainer.axolotl.trainers import PairTrainer
from trainer.session.step_order import StepOrder

ROWS, LENGTH = 7, 12


def plan_for(
    task_type: TaskType, micro: int = ROWS, accumulation: int = 2, packing: bool = False
) -> TrainingPlan:
    plan = text_plan(task_type)
    batch = plan.batch.model_copy(update={"micro": micro, "accumulation": accumulation})
    sequence = plan.sequence.model_copy(update={"packing": packing})
    return plan.model_copy(update={"batch": batch, "sequence": sequence})


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


def packed(*lengths: int, seed: int = 3, padding: int = 5) -> dict[str, torch.Tensor]:
    """Documents in one row, each with a prompt of two tokens that is not learned, and padding."""
    torch.manual_seed(seed)
    positions = torch.cat([torch.arange(length) for length in (*lengths, padding)])[None]
    ids = torch.randint(5, 300, positions.shape)
    labels = torch.where(positions >= 2, ids, -100)
    labels[:, sum(lengths) :] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize(("most", "widths"), [(2, [16, 21]), (1, [9, 7, 11, 10]), (3, [16, 21])])
def test_a_packed_row_is_cut_between_documents_and_the_gradient_stays(
    tmp_path: Path, kind: str, most: int, widths: list[int]
) -> None:
    """A row of four sequences, as Axolotl makes it for flash attention."""
    trainer, inputs = supervised(tmp_path), packed(9, 7, 5, 6, 5)
    trainer.model_accepts_loss_kwargs = kind == "sum"
    count = 2 * (inputs["labels"] != -100).sum() if kind == "sum" else None
    splitter = MicroBatchSplitter(trainer, plan_for(TaskType.INSTRUCT, micro=4, packing=True))
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, given, named: seen.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    loss, gradients = step(trainer, inputs, count)
    assert splitter.regroup(most) == (2 if most == 3 else most, "")
    other_loss, other = step(trainer, inputs, count)
    assert seen == [37, *widths]
    assert other_loss == pytest.approx(loss, rel=1e-4)
    torch.testing.assert_close(other, gradients, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_a_row_of_too_few_documents_makes_as_many_passes_as_those_of_other_ranks(
    tmp_path: Path, kind: str
) -> None:
    trainer, inputs = supervised(tmp_path), packed(20, 12)
    trainer.model_accepts_loss_kwargs = kind == "sum"
    count = (inputs["labels"] != -100).sum() if kind == "sum" else None
    splitter = MicroBatchSplitter(trainer, plan_for(TaskType.INSTRUCT, micro=4, packing=True))
    loss, gradients = step(trainer, inputs, count)
    assert splitter.regroup(1) == (1, "")
    passes = passes_of(trainer.model)
    other_loss, other = step(trainer, inputs, count)
    assert len(passes) == 4
    assert other_loss == pytest.approx(loss, rel=1e-4)
    torch.testing.assert_close(other, gradients, rtol=1e-3, atol=1e-6)


def test_a_row_is_not_cut_where_the_first_token_of_a_document_is_learned() -> None:
    """The document before it predicts it, in the engine's loss."""
    inputs = packed(9, 7, 5, 6)
    inputs["labels"][0, 9] = inputs["input_ids"][0, 9]
    assert _borders(inputs) == [16, 21]


def test_padding_in_the_middle_of_joined_rows_is_no_part_by_itself() -> None:
    """A mean over its labels, of which there are none, would be no number."""
    rows = packed(9, 7), packed(5, 6)
    assert _borders({key: torch.cat([row[key] for row in rows], 1) for key in rows[0]}) == [9, 21, 26]


def step_of(trainer: Any, batches: list[dict[str, torch.Tensor]], count: Any) -> tuple[float, Any]:
    """An optimizer step on these micro-batches."""
    copies = [{key: value.clone() for key, value in batch.items()} for batch in batches]
    loss = 0.0
    for at, inputs in enumerate(copies, start=1):
        trainer.accelerator.gradient_state._set_sync_gradients(at == len(copies))
        loss += float(trainer.training_step(trainer.model, inputs, count))
    gradients = [weight.grad.clone() for weight in trainer.model.parameters()]
    trainer.model.zero_grad()
    return loss, gradients


@pytest.mark.parametrize("kind", ["rows", "packed", "packed, mean", "pairs"])
@pytest.mark.parametrize(
    "runs_out",
    [None, torch.OutOfMemoryError(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")],
    ids=lambda error: type(error).__name__,
)
def test_passes_larger_than_the_loaders_have_the_same_gradient_or_are_undone(
    tmp_path: Path, kind: str, runs_out: Exception | None
) -> None:
    """Three micro-batches in two passes."""
    if kind == "pairs":
        trainer = pairs(tmp_path)
        (first,), count = list(trainer.get_train_dataloader()), None
        batches = [first | {"input_ids": (first["input_ids"] + at) % 300} for at in range(3)]
    else:
        trainer = supervised(tmp_path)
        trainer.model_accepts_loss_kwargs = not kind.endswith("mean")
        # A mean over micro-batches is one over all labels, where they have as many.
        batches = [packed(9, 7), packed(5, 6, 7, padding=1, seed=4), packed(14, padding=7, seed=5)]
        if kind == "rows":  # the second one is narrower
            batches = [batch(), {key: value[:, :9] for key, value in batch().items()}, batch()]
        counts = [(inputs["labels"][:, 1:] != -100).sum() for inputs in batches]
        count = None if kind.endswith("mean") else sum(counts)
    trainer.current_gradient_accumulation_steps = 3
    task_type = TaskType.DPO if kind == "pairs" else TaskType.INSTRUCT
    planned, larger = (1, 2) if kind.endswith("mean") else (ROWS, ROWS + 4)
    plan = plan_for(task_type, planned, accumulation=3, packing="packed" in kind)
    splitter = MicroBatchSplitter(trainer, plan)
    undone: list[int] = []
    splitter.on_undone = undone.append
    loss, gradients = step_of(trainer, batches, count)
    assert splitter.regroup(larger) == (larger, "")
    passes: list[int] = []

    def seen(module: Any, given: Any, named: dict[str, Any]) -> None:
        passes.append(len(named["input_ids"]))
        if runs_out and len(passes) == 2:
            raise runs_out

    trainer.model.register_forward_pre_hook(seen, with_kwargs=True)
    other_loss, other = step_of(trainer, batches, count)
    joined, alone = {"rows": ([10, 11], 7), "pairs": ([20, 22], 14)}.get(kind, ([1, 1], 1))
    assert passes == ([*joined, *3 * [alone]] if runs_out else joined)
    assert undone == ([planned] if runs_out else [])
    assert other_loss == pytest.approx(loss, rel=1e-4)
    torch.testing.assert_close(other, gradients, rtol=1e-3, atol=1e-6)
    assert splitter.regroup(None) == (planned, "")


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
        "model_accepts_loss_kwargs": False,
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
        micro: int,
        task_type: TaskType = TaskType.INSTRUCT,
        inputs: Any = rows,
        kl: float | None = None,
        **changes: Any,
    ) -> str:
        trainer, plan = stand_in(**changes), plan_for(task_type, micro=4)
        task = plan.task.model_copy(update={"kl_coefficient": kl})
        splitter = MicroBatchSplitter(trainer, plan.model_copy(update={"task": task}))
        trainer.training_step(None, inputs)
        change = splitter.regroup(micro)
        assert change.micro == 4
        trainer.training_step(None, inputs)
        assert trainer.done == [len(inputs)] * 2
        return change.refusal

    assert refusal(4) == ""
    assert "a step's 8 sequences take 2 passes of 4 either way" in refusal(5)
    assert "differ in their labels" in refusal(8)
    assert "divergence" in refusal(8, kl=0.1)
    assert "in 1 row" in refusal(2, inputs={"input_ids": torch.zeros(1, 32)})
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
