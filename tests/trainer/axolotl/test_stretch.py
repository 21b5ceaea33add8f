"""Training on held-out rows with the engine's own loader and steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args import AxolotlTrainingArguments
from axolotl.monkeypatch.data.batch_dataset_fetcher import (
    apply_multipack_dataloader_patch,
    remove_multipack_dataloader_patch,
)
from axolotl.utils.collators import DataCollatorForSeq2Seq, V2BatchSamplerDataCollatorForSeq2Seq
from datasets import load_from_disk

from core.domain.tasks import TaskType
from tests.trainer import tiny
from tests.trainer.tasks import rows_plan, spec
from trainer.axolotl.scorers import HeldOutScorer
from trainer.axolotl.stretch import REFERENCE_COLUMNS, HfStretcher
from trainer.handoff import LaunchSpec
from trainer.inputs.text import read_task, write_task
from trainer.inputs.tokens import load_tokenizer
from trainer.scoring.held_out import LogProbs
from trainer.session.ranks import Communicator

LENGTH = 64


def launch(folder: Path, task: TaskType, rows: list[dict[str, Any]], held: int) -> LaunchSpec:
    run = spec(folder, task, rows)
    plan = rows_plan(task, eval_rows=held, length=LENGTH)
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    files = write_task(read_task(run, load_tokenizer(run.model_path)), plan, folder / "data")
    return LaunchSpec(
        run=run, plan_path=str(folder / "plan.json"), launch_dir=str(folder / "launch"), prepared=files
    )


def engine(folder: Path, sheet: LaunchSpec, packing: bool) -> Any:
    rows = load_from_disk(str(sheet.prepared.train_path))
    if packing:
        rows = rows.map(lambda row: {"position_ids": list(range(len(row["input_ids"])))})
    arguments = AxolotlTrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=1 if packing else 4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_seq_length=LENGTH,
        sample_packing=packing,
        multipack_real_batches=False,
        sample_packing_efficiency=1.0,
        dataset_num_proc=1,
        dataloader_num_workers=0,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    tokenizer = load_tokenizer(sheet.run.model_path)
    collator = V2BatchSamplerDataCollatorForSeq2Seq if packing else DataCollatorForSeq2Seq
    trainer = AxolotlTrainer(
        model=tiny.load(Path(sheet.run.model_path)),
        args=arguments,
        train_dataset=rows,
        data_collator=collator(tokenizer, padding=True),
        processing_class=tokenizer,
    )
    trainer.create_optimizer_and_scheduler(10)
    for group in trainer.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return trainer


@pytest.fixture
def packed_batches() -> Iterator[None]:
    """As Axolotl itself reads them."""
    apply_multipack_dataloader_patch()
    yield
    remove_multipack_dataloader_patch()


@pytest.mark.usefixtures("packed_batches")
@pytest.mark.parametrize("packing", [False, True], ids=["apart", "packed"])
def test_one_pass_trains_on_held_out_rows_without_a_double_of_one_that_judges(
    tmp_path: Path, packing: bool
) -> None:
    data = [row for row in tiny.instruct_rows(300, length=20) for _ in range(2)]
    sheet = launch(tmp_path, TaskType.INSTRUCT, data, 120)
    trainer = engine(tmp_path, sheet, packing)
    scorer = HeldOutScorer(sheet, trainer, Communicator())
    scorer.score_base(60.0, untouched=True)
    stretcher = HfStretcher(sheet, sheet.plan, trainer, scorer, Communicator())
    steps = stretcher.begin()
    assert steps == len(stretcher._steps) > 1
    held = [tuple(ids) for ids in load_from_disk(str(sheet.prepared.eval_path))["input_ids"]]
    judges = {tuple(row.ids) for row in scorer._held.rows}  # type: ignore[union-attr]
    trained = [tuple(row) for row in rows_in(stretcher, packing)]
    assert len(scorer._held.rows) >= 32
    assert not judges & set(trained), "doubles are equal here"
    assert set(trained) <= set(held)
    assert len(trained) > (len(held) - len(scorer._held.rows)) / 2
    before, weights = stretcher.score(), [weight.detach().clone() for weight in trainer.model.parameters()]
    losses = [stretcher.step(0.5, place) for place in range(steps)]
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert not all(map(torch.equal, weights, trainer.model.parameters()))
    assert stretcher.score() != before
    assert len(trainer.train_dataset) == sheet.prepared.train_rows


def rows_in(stretcher: HfStretcher, packing: bool) -> list[list[int]]:
    """The rows of all batches, without padding."""
    rows: list[list[int]] = []
    for samples, _ in stretcher._steps:
        for batch in samples:
            for at, ids in enumerate(batch["input_ids"].tolist()):
                if not packing:
                    rows.append(
                        [one for one, seen in zip(ids, batch["attention_mask"][at], strict=True) if seen]
                    )
                    continue
                for one, place in zip(ids, batch["position_ids"][at].tolist(), strict=True):
                    rows += [[]] if place == 0 else []
                    rows[-1].append(one)
    return rows


def test_pairs_bring_what_the_base_gave_them_and_those_without_it_stay_out(tmp_path: Path) -> None:
    sheet = launch(tmp_path, TaskType.DPO, tiny.pair_rows(600), 120)
    base = {place: LogProbs(-float(place), -2.0 * place) for place in range(0, 120, 2)}
    scorer: Any = SimpleNamespace()
    trainer = SimpleNamespace(
        precompute_ref_logps=True, train_dataset=SimpleNamespace(column_names=["prompt_ids"])
    )
    stretcher = HfStretcher(sheet, sheet.plan, trainer, scorer, Communicator())
    table = stretcher._table([3, 4, 6, 7, 8], base)
    assert [table[name][:] for name in REFERENCE_COLUMNS] == [[-4.0, -6.0, -8.0], [-8.0, -12.0, -16.0]]
    held = load_from_disk(str(sheet.prepared.eval_path))
    assert table["chosen_ids"][:] == [held[place]["chosen_ids"] for place in (4, 6, 8)]
